"""Train a deformation network in three modes: diffusion, contrastive, registration.

    python OM_train_3modes.py --config Config/config_om.yaml [--set key=value ...]

The same command continues an interrupted run from its newest checkpoint. Reads top to bottom: arguments, the three
step functions, validation, one loop. Exit codes: 0 done, 42 planned restart, 43 stop (bad input), others a crash.
"""
import argparse
import json
import math
import sys
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from Dataloader.augment import augment
from Dataloader.dataset import make_loader, read_datasets, read_labels
from Dataloader.sampler import batches, epoch_order, epoch_pairs
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.fields import warp
from Diffusion.losses import info_nce, mslncc, recovery_terms, regularity
from Diffusion.metrics import average, dice_before_after, folding_percent
from Diffusion.networks import build_network, network_class
from Runtime import checkpoint
from Runtime.config import MODEL_KEYS, load_config
from Runtime.device import autocast, describe, pick_device, prepare_device
from Runtime.draws import uniform
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError
from Runtime.memory import count_costs, empty_cache, weights_and_optimizer_bytes
from Runtime.provenance import save_launch
from Runtime.report import registration_figure

AVERAGES = ["total", "ang", "dist", "regul", "contrastive", "regist", "imgsim", "imgmse", "ddf"]


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Train a deformation network in three modes. Run the same command "
                                     "again to continue an interrupted run.")
    parser.add_argument("--config", required=True, help="YAML file with every key, e.g. Config/config_om.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key, e.g. --set data.root=/data/brains; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="start over in a new folder beside the old one")
    parser.add_argument("--init-from", metavar="FILE", help="start a new run from the weights of this checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="build everything, print sizes and costs, and exit")
    parser.add_argument("--max-steps-before-restart", type=int, default=0, metavar="N",
                        help="after N steps save and exit with 42, for a launcher to start again (0 = off)")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# The three modes: from a batch to a weighted loss and its terms. Loss terms leave as numbers only after the backward.
# ---------------------------------------------------------------------------------------------------------------------

def deform_batch(images, keys, ddpm, cfg):
    """What modes 1 and 2 share: augmented x0, times, x_t, the true field, and the condition made of x0."""
    x0 = augment(images, keys, cfg)
    times = ddpm.draw_times(keys)
    xt, true_field = ddpm.diffuse(x0, times, keys)
    return {"xt": xt, "true_field": true_field, "t": torch.tensor(times, device=x0.device),
            "condition": make_condition(x0, cfg["model.condition_type"], keys),
            "keep": (uniform(keys, "keep") >= cfg["model.condition_dropout"]).to(x0.device)}


def step_diffusion(net, batch, cfg):
    """Mode 1: undo a random deformation, seeing a few slices of the original."""
    with autocast(batch["xt"].device, cfg["run.amp"]):
        pred_field = net(batch["xt"], batch["t"], batch["condition"], batch["keep"])
    dist, ang = (term.mean() for term in recovery_terms(pred_field, batch["true_field"]))
    regul = regularity(pred_field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.dist"] * dist + cfg["loss.ang"] * ang + cfg["loss.regul"] * regul
    return loss, {"total": loss, "ang": ang, "dist": dist, "regul": regul}


def step_contrastive(net, batch, subjects, queue, cfg):
    """Mode 2: know a deformed volume by its own slices among embeddings of other subjects."""
    with autocast(batch["xt"].device, cfg["run.amp"]):
        of_image, of_condition = net(batch["xt"], batch["t"], batch["condition"], embed=True)
    allowed = (queue["subjects"] >= 0) & (queue["subjects"] != subjects[:, None])
    temperature = cfg["contrastive.temperature"]
    loss = cfg["loss.contrastive"] * 0.5 * (
        info_nce(of_image, of_condition, queue["conditions"], allowed, temperature)
        + info_nce(of_condition, of_image, queue["images"], allowed, temperature))
    return loss, {"contrastive": loss}, (of_image.detach(), of_condition.detach())


def register(net, moving, fixed, cfg):
    """Align (B, 1, *spatial) volumes: returns warped and the field in voxels."""
    t = torch.full((len(moving),), cfg["diffusion.timesteps"], device=moving.device)
    kind = "none" if cfg["model.condition_type"] == "none" else "volume"
    with autocast(moving.device, cfg["run.amp"]):
        field = net(moving, t, make_condition(fixed, kind))
    return warp(moving, field), field


def step_registration(net, moving, fixed, cfg):
    """Mode 3: align two volumes, seeing all of the fixed one."""
    warped, field = register(net, moving, fixed, cfg)
    imgsim = -mslncc(warped, fixed, cfg["registration.window"], cfg["registration.scales"], cfg["registration.squared"])
    imgmse = (warped - fixed).square().mean()
    ddf = regularity(field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.imgsim"] * imgsim + cfg["loss.imgmse"] * imgmse + cfg["loss.ddf"] * ddf
    return loss, {"regist": loss, "imgsim": imgsim, "imgmse": imgmse, "ddf": ddf}


def update(loss, net, optimizer, clip_norm=math.inf):
    """Backward, clip, step. Returns False, and changes no weight, where the loss or a gradient is not finite."""
    if not math.isfinite(loss.item()):
        return False
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if not math.isfinite(torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm).item()):
        return False
    optimizer.step()
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The state of a run: everything a checkpoint holds. No generator states: every draw is keyed (Runtime/draws.py).
# ---------------------------------------------------------------------------------------------------------------------

def new_progress():
    """Counters and sums that survive a restart: where we are, and the epoch's averages so far."""
    return {"epoch": 0, "step_in_epoch": 0, "step": 0, "nonfinite_in_a_row": 0, "sums": new_sums()}


def new_sums():
    """Sums of an epoch: each average's total and count, steps, steps with an open gate, non-finite losses."""
    return {**{name: 0.0 for name in AVERAGES}, "steps": 0, "open": 0, "nonfinite": 0,
            "counts": {name: 0 for name in AVERAGES}}


def new_queue(cfg, device):
    """Embeddings of recent samples, oldest overwritten first; subject -1 marks an empty place."""
    size, width = cfg["contrastive.queue"], cfg["contrastive.embedding"]
    return {"images": torch.zeros(size, width, device=device), "conditions": torch.zeros(size, width, device=device),
            "subjects": torch.full((size,), -1, device=device), "next": 0}


def push(queue, embeddings, subjects):
    """Put this step's embeddings into the queue, in sample order."""
    for image, condition, subject in zip(*embeddings, subjects):
        place = queue["next"] % len(queue["subjects"])
        queue["images"][place], queue["conditions"][place], queue["subjects"][place] = image, condition, subject
        queue["next"] += 1


def add_terms(sums, terms):
    """Add a mode's terms to the epoch's sums; called only where that mode took a step."""
    for name, value in terms.items():
        sums[name] += float(value.detach())
        sums["counts"][name] += 1


def averages(sums):
    """The nine averages; None where a mode has not run."""
    return {name: sums[name] / sums["counts"][name] if sums["counts"][name] else None for name in AVERAGES}


def show(value):
    """A number for a person; "-" for a mode that has not run."""
    return "-" if value is None else f"{value:.3g}"


def save_state(run, relative, net, optimizer, queue, progress, cfg, metrics=None, best=None):
    """Write one checkpoint, verified, and remove those that the config does not keep."""
    state = {"format": 1, "model": net.state_dict(), "optimizer": optimizer.state_dict(), "queue": queue,
             "config": cfg, **progress}
    checkpoint.save(run, relative, state, metrics=metrics, best=best)
    checkpoint.prune(run, cfg["run.keep_last"], cfg["run.keep_every"], keep_tmp=2)


def restore_state(run, net, optimizer, queue, cfg, device):
    """Continue from the newest checkpoint that verifies. Returns the progress, or None for a new run."""
    relative = checkpoint.newest(run)
    if relative is None:
        return None
    state = checkpoint.load(run / relative, map_location=device)
    for change in checkpoint.check_compatible(state, cfg, run / relative, MODEL_KEYS):
        print(f"changed since the checkpoint: {change}")
    checkpoint.load_weights(net, state, run / relative)
    optimizer.load_state_dict(state["optimizer"])
    queue.update(state["queue"])
    print(f"continuing from {run / relative}, epoch {state['epoch']}, step {state['step']}")
    return {name: state[name] for name in new_progress()}


# ---------------------------------------------------------------------------------------------------------------------
# Validation on held-out volumes: fixed times, fixed pairs.
# ---------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def validate(net, ddpm, dataset, cfg, device):
    """Scores on held-out volumes, and the first pair for a picture.

    Returns: dict of val_ang (mean over times), val_dice and val_dice_before (None without labels), val_imgsim (mean
    local correlation, 1 is perfect), val_folding (percent of voxels); and (moving, fixed, warped, field) of pair 0.
    """
    net.eval()
    cosines, scores, picture = [], [], None
    times = sorted({max(cfg["diffusion.timesteps"] * share // 4, 1) for share in (1, 2, 3)})
    for index in range(min(len(dataset), cfg["run.val_pairs"])):
        x0 = dataset[0, index][0][None].to(device)
        for t in times:
            keys = [(cfg["run.seed"], -1, t * len(dataset) + index)]
            xt, true_field = ddpm.diffuse(x0, [t], keys)
            with autocast(device, cfg["run.amp"]):
                pred = net(xt, torch.tensor([t], device=device), make_condition(x0, cfg["model.condition_type"], keys))
            cosines.append(recovery_terms(pred, true_field)[1].item())
    grid = (cfg["data.img_size"], cfg["data.spacing_mm"])
    for pair in epoch_pairs(cfg["run.seed"], -1, len(dataset), cfg["run.val_pairs"]):
        moving, fixed = (dataset[0, index][0][None].to(device) for index in pair)
        warped, field = register(net, moving, fixed, cfg)
        score = {"val_dice": None, "val_dice_before": None, "val_imgsim": mslncc(warped, fixed).item(),
                 "val_folding": folding_percent(field)}
        paths = [dataset.items[index]["label"] for index in pair]
        if all(paths):
            labels = [read_labels(path, *grid)[None] for path in paths]
            score["val_dice_before"], score["val_dice"], _ = dice_before_after(*labels, field.cpu())
        scores.append(score)
        picture = picture or [volume[0, 0].cpu() for volume in (moving, fixed, warped)] + [field[0].cpu()]
    net.train()
    mean = {name: average([s[name] for s in scores]) for name in scores[0]}
    return {"val_ang": average(cosines), **mean}, picture


# ---------------------------------------------------------------------------------------------------------------------
# The training
# ---------------------------------------------------------------------------------------------------------------------

def epoch_length(cfg, volumes, listed):
    """Steps of an epoch: that of the shorter loader. Also the number of pairs to draw."""
    diffusion_steps = -(-volumes * cfg["data.repeats"] // cfg["data.batchsize"])
    pair_batch = max(cfg["data.batchsize"] // cfg["data.diff_reg_batch_ratio"], 1)
    pairs = len(listed) if listed else cfg["data.pairs"] or diffusion_steps * pair_batch
    return min(diffusion_steps, -(-pairs // pair_batch)), pairs, pair_batch


def epoch_loaders(cfg, dataset, listed, epoch, first_step):
    """The two loaders of an epoch from a step on: volumes for modes 1 and 2, pairs for mode 3 (moving, fixed, ...)."""
    steps, pairs, pair_batch = epoch_length(cfg, len(dataset), listed)
    seed = cfg["run.seed"]
    order = batches(epoch_order(seed, epoch, len(dataset), cfg["data.repeats"]), cfg["data.batchsize"], first_step)
    drawn = batches(epoch_pairs(seed, epoch, len(dataset), pairs, listed), pair_batch, first_step)
    flat = [[(2 * position + side, pair[side]) for position, pair in batch for side in (0, 1)] for batch in drawn]
    remaining = steps - first_step
    return make_loader(dataset, order[:remaining], cfg), make_loader(dataset, flat[:remaining], cfg)


def train_step(net, optimizer, ddpm, queue, progress, volumes, pairs, cfg, device):
    """One step of all three modes. Returns the step's line for the log."""
    images, positions, subjects = volumes
    seed, epoch, sums = cfg["run.seed"], progress["epoch"], progress["sums"]
    keys = [(seed, epoch, position) for position in positions.tolist()]
    subjects = subjects.to(device)
    finite = []

    batch = deform_batch(images.to(device), keys, ddpm, cfg)
    loss, terms = step_diffusion(net, batch, cfg)
    finite.append(update(loss, net, optimizer))
    ang = float(terms["ang"].detach())
    if finite[-1]:
        add_terms(sums, terms)
    del loss, terms
    empty_cache(cfg, device)

    loss, terms, embeddings = step_contrastive(net, batch, subjects, queue, cfg)
    finite.append(update(loss, net, optimizer, cfg["contrastive.clip_norm"]))
    if finite[-1]:
        add_terms(sums, terms)
        push(queue, embeddings, subjects)
    del loss, terms, embeddings, batch
    empty_cache(cfg, device)

    gate_open = ang < cfg["registration.gate"]
    if gate_open:
        # Negative positions: the draws of mode 3 must not be those of mode 1.
        pair_keys = [(seed, epoch, -1 - position) for position in pairs[1].tolist()]
        both = augment(pairs[0].to(device), pair_keys, cfg)
        loss, terms = step_registration(net, both[0::2], both[1::2], cfg)
        finite.append(update(loss, net, optimizer, cfg["registration.clip_norm"]))
        if finite[-1]:
            add_terms(sums, terms)
        del loss, terms, both
        empty_cache(cfg, device)

    sums["steps"] += 1
    sums["open"] += gate_open
    sums["nonfinite"] += finite.count(False)
    progress["nonfinite_in_a_row"] = 0 if all(finite) else progress["nonfinite_in_a_row"] + 1
    return {"event": "step", "epoch": epoch, "step": progress["step"], "ang": ang, "open": gate_open,
            "nonfinite": finite.count(False)}


def train(cfg, args):
    """Set up, continue or start, and train to the last epoch. Returns the exit code."""
    device = pick_device(cfg["run.device"])
    prepare_device(device, cfg["run.threads"])
    if args.dry_run:
        return dry_run(cfg)
    dataset, held_out, listed = read_datasets(cfg)
    net = build_network(cfg, device)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg["optim.lr"], fused=True)
    ddpm, queue = DeformDDPM(cfg), new_queue(cfg, device)
    if args.init_from:
        start = checkpoint.load(args.init_from)
        checkpoint.check_compatible(start, cfg, args.init_from, MODEL_KEYS)
        checkpoint.load_weights(net, start, args.init_from)
        print(f"weights from {args.init_from}")

    run = checkpoint.run_folder(cfg["run.models"], cfg["data.name"], cfg["model.name"], args.fresh)
    checkpoint.clean_leftovers(run)
    progress = restore_state(run, net, optimizer, queue, cfg, device)
    if progress is not None and args.init_from:
        raise InputError(f"--init-from: {run} has checkpoints already and would be continued; add --fresh to start a "
                         f"new run from {args.init_from}.")
    progress = progress or new_progress()

    steps = epoch_length(cfg, len(dataset), listed)[0]
    save_launch(run, cfg, progress["step"])
    print(f"{run}: {len(dataset)} training and {len(held_out)} validation volumes, {steps} steps per epoch, on "
          f"{describe(device)}")
    log = open(run / "rank0.jsonl", "a", buffering=1)
    board = SummaryWriter(f"{cfg['run.logs']}/{run.name}", purge_step=progress["step"])
    done_here, restart = 0, False

    while progress["epoch"] < cfg["run.epochs"]:
        epoch, first_step, started = progress["epoch"], progress["step_in_epoch"], time.time()
        loaders = epoch_loaders(cfg, dataset, listed, epoch, first_step)
        terminal = sys.stderr.isatty()
        bar = tqdm(zip(*loaders), total=steps, initial=first_step, unit="step", dynamic_ncols=True,
                   desc=f"epoch {epoch + 1}/{cfg['run.epochs']}", mininterval=1.0 if terminal else 30.0)
        below = tqdm(bar_format="{desc}", position=1, dynamic_ncols=True, disable=not terminal)
        for volumes, pairs in bar:
            for group in optimizer.param_groups:
                group["lr"] = cfg["optim.lr"] * min((progress["step"] + 1) / max(cfg["optim.warmup_steps"], 1), 1.0)
            line = train_step(net, optimizer, ddpm, queue, progress, volumes, pairs, cfg, device)
            progress["step"] += 1
            progress["step_in_epoch"] += 1
            done_here += 1
            log.write(json.dumps({**line, "time": time.time()}) + "\n")
            show_progress(bar, below, progress, cfg, steps, first_step, time.time() - started)
            if progress["nonfinite_in_a_row"] >= cfg["run.max_nonfinite"]:
                raise InputError(f"{run}: the loss was not finite in {cfg['run.max_nonfinite']} steps in a row, the "
                                 f"last one {progress['step']}; look at the data or lower optim.lr.")
            restart = args.max_steps_before_restart and done_here >= args.max_steps_before_restart
            every = cfg["run.checkpoint_steps"]
            if progress["step_in_epoch"] < steps and (restart or (every and progress["step_in_epoch"] % every == 0)):
                name = checkpoint.step_name(epoch, progress["step_in_epoch"], cfg["data.name"], cfg["model.name"])
                save_state(run, name, net, optimizer, queue, progress, cfg)
            if restart and progress["step_in_epoch"] < steps:
                return PLANNED_RESTART
        bar.close()
        below.close()
        finish_epoch(run, net, optimizer, ddpm, queue, progress, held_out, cfg, device, log, board, started)
        if restart:
            return PLANNED_RESTART

    print(f"done: {cfg['run.epochs']} epochs, {progress['step']} steps, weights "
          f"{checkpoint.weights_sha256(net.state_dict())}")
    return DONE


def show_progress(bar, below, progress, cfg, steps, first_step, seconds):
    """Samples per second and time left of the run behind the bar, the nine averages below it (in a log, behind)."""
    here = progress["step_in_epoch"] - first_step
    left = (cfg["run.epochs"] - progress["epoch"]) * steps - progress["step_in_epoch"]
    hours, minutes = divmod(int(left * seconds / here) // 60, 60)
    shown = "  ".join(f"{name} {show(value)}" for name, value in averages(progress["sums"]).items())
    rate = f"{here * cfg['data.batchsize'] / seconds:.2f} samples/s, {hours}:{minutes:02d} h left"
    bar.set_postfix_str(f"{rate} | {shown}" if below.disable else rate, refresh=False)
    below.set_description_str(shown)


def finish_epoch(run, net, optimizer, ddpm, queue, progress, held_out, cfg, device, log, board, started):
    """Validation, log, TensorBoard and the epoch's checkpoint."""
    epoch, sums = progress["epoch"], progress["sums"]
    last = epoch + 1 == cfg["run.epochs"]
    scores, picture = {}, None
    if len(held_out) and ((epoch + 1) % cfg["run.val_every"] == 0 or last):
        scores, picture = validate(net, ddpm, held_out, cfg, device)
    entry = {**averages(sums), "steps": sums["steps"], "open_share": sums["open"] / max(sums["steps"], 1),
             "nonfinite": sums["nonfinite"], **scores}
    tqdm.write(f"epoch {epoch + 1}: " + " ".join(f"{name} {show(value)}" for name, value in entry.items())
               + f" (gate {cfg['registration.gate']}, {time.time() - started:.0f} s)")
    line = {"event": "epoch", "epoch": epoch, "step": progress["step"], **entry, "time": time.time()}
    log.write(json.dumps(line) + "\n")
    for name, value in entry.items():
        if value is not None:
            board.add_scalar(("validation/" if name.startswith("val_") else "train/") + name, value, progress["step"])
    if picture and cfg["run.picture_every"] and ((epoch + 1) % cfg["run.picture_every"] == 0 or last):
        board.add_figure("registration", registration_figure(*picture, title=f"epoch {epoch + 1}"), progress["step"])
    board.flush()
    metric = "val_dice" if scores.get("val_dice") is not None else "val_imgsim"
    best = (metric, scores[metric]) if scores else None
    progress.update(epoch=epoch + 1, step_in_epoch=0, sums=new_sums())
    name = checkpoint.epoch_name(epoch + 1, cfg["data.name"], cfg["model.name"])
    save_state(run, name, net, optimizer, queue, progress, cfg, metrics=scores or None, best=best)


def dry_run(cfg):
    """Build everything on tensors that hold no numbers, print what a step costs, and last one line of JSON."""
    size, batchsize, word = cfg["data.img_size"], cfg["data.batchsize"], cfg["model.condition_type"]
    try:
        dataset, _, listed = read_datasets(cfg, headers_only=True)
        volumes, source = len(dataset), cfg["data.root"]
    except InputError as error:
        volumes, listed, source = cfg["data.expect_samples"], None, f"data.expect_samples, since {error}"
    steps, pairs, pair_batch = epoch_length(cfg, volumes, listed)
    with FakeTensorMode():
        net, queue = network_class(cfg["model.name"])(cfg), new_queue(cfg, "cpu")
        t, image = torch.zeros(batchsize, dtype=torch.long), torch.zeros(batchsize, 1, *size)
        moving, fixed = torch.zeros(pair_batch, 1, *size), torch.zeros(pair_batch, 1, *size)
        batch = {"xt": image, "t": t, "true_field": torch.zeros(batchsize, len(size), *size), "keep": None,
                 "condition": make_condition(image, "none" if word == "none" else "volume")}
        costs = {"diffusion": count_costs(lambda: step_diffusion(net, batch, cfg)[0], net),
                 "contrastive": count_costs(lambda: step_contrastive(net, batch, t, queue, cfg)[0], net),
                 "registration": count_costs(lambda: step_registration(net, moving, fixed, cfg)[0], net)}
    parameters, fixed_bytes = sum(p.numel() for p in net.parameters()), weights_and_optimizer_bytes(net)
    memory = fixed_bytes + max(kept for _, kept in costs.values())
    print(f"{cfg['model.name']}: {parameters / 1e6:.1f} M parameters, {'x'.join(map(str, size))} voxels, "
          f"batch {batchsize}, {cfg['diffusion.timesteps']} timesteps, condition {word}")
    for mode, (flops, kept) in costs.items():
        print(f"{mode:>13}: {flops / 1e12:8.3f} Tflop, activations {kept / 2 ** 30:6.2f} GiB")
    print(f"memory per step about {memory / 2 ** 30:.1f} GiB: {fixed_bytes / 2 ** 30:.1f} for weights, gradients and "
          f"Adam, the rest for the activations of the largest mode")
    print(f"{steps} steps per epoch: {volumes} volumes (from {source}), {pairs} pairs; effective batch {batchsize}")
    print(json.dumps({"parameters": parameters, "step_flops": sum(flops for flops, _ in costs.values()),
                      "step_memory_bytes": memory, "steps_per_epoch": steps, "effective_batch": batchsize}))
    return DONE


def main(argv=None):
    args = parse_arguments(argv)
    try:
        cfg = load_config(args.config, args.overrides)
        return train(cfg, args)
    except InputError as error:
        # From a loader's worker it comes with the worker's traceback in front of the sentence.
        print(f"error: {str(error).strip().splitlines()[-1].split('InputError: ')[-1]}", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main())
