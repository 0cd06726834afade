"""Train a deformation network in three modes: diffusion, contrastive, registration.

    python OM_train_3modes.py --config Config/config_om.yaml [--set key=value ...]

The same command continues an interrupted run from its newest checkpoint; bash_train_multi_nodes.sh starts many ranks.
Three step functions, one step, one loop. Exit codes: 0 done, 42 planned restart, 43 stop (bad input), others a crash.
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import collections
import contextlib
import math
import os
import sys
import time

import torch

from Dataloader.dataset import epoch_batches, read_datasets
from Dataloader.identity import as_csv, compare_data, describe_data, require_same_everywhere, volumes_of
from Dataloader.sampler import steps_left
from Dataloader.staging import release
from Diffusion.batch_augment import augment
from Diffusion.cost import dry_run
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.embeddings import embed, embed_steadily, name_volumes, new_queue, push
from Diffusion.fields import warp
from Diffusion.figures import registration_figure
from Diffusion.gradients import new_gradients, put_together, set_aside
from Diffusion.losses import info_nce, mslncc, recovery_terms, regularity
from Diffusion.networks import build_network
from Diffusion.schedule import averaged, learning_rate, new_average, update_average
from Diffusion.sharding import footprint, gather, gather_state, load_optimizer, make_optimizer, replicated, whole, wrap
from Diffusion.validation import align, validate
from Runtime import agree, checkpoint, launch, memory, watchdog, writer
from Runtime.config import MODEL_KEYS, load_config
from Runtime.device import autocast, describe, pick_device, precision, prepare_device
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError
from Runtime.files import patiently, remove_leftovers, write_file
from Runtime.global_batch import shares
from Runtime.keyed_random import uniform
from Runtime.progress import add_terms, averages, new_sums, progress_bars, show_epoch, show_progress
from Runtime.provenance import save_launch

PRECISIONS = {"bf16": "bf16", "off": "float32"}
READ_AGAIN_S = 20.0  # for a checkpoint that the file system does not give; then this is a death like others
REASONS = {"steps": "--max-steps-before-restart", "time": "--max-seconds-before-restart", "signal": "asked by a signal",
           "memory": "memory of another rank runs out"}


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
    parser.add_argument("--max-seconds-before-restart", type=float, default=0, metavar="S",
                        help="the same after S seconds: a launcher passes on its own time limit (0 = off)")
    parser.add_argument("--debug", action="store_true", help="find a crash: blocking launches, checked collectives")
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
    of_image, of_condition = embed(net, batch, cfg)
    image, condition = batch.get("steady") or (of_image, of_condition)
    allowed = (queue["subjects"] >= 0) & (queue["subjects"] != subjects[:, None])
    loss = cfg["loss.contrastive"] * 0.5 * (
        info_nce(of_image, condition, queue["conditions"], allowed, cfg["contrastive.temperature"])
        + info_nce(of_condition, image, queue["images"], allowed, cfg["contrastive.temperature"]))
    return loss, {"contrastive": loss}, (image.detach(), condition.detach())


def step_registration(net, moving, fixed, cfg):
    """Mode 3: align two volumes, seeing all of the fixed one."""
    field = align(net, moving, fixed, cfg)
    warped = warp(moving, field)
    imgsim = -mslncc(warped, fixed, cfg["registration.window"], cfg["registration.scales"], cfg["registration.squared"])
    imgmse = (warped - fixed).square().mean()
    ddf = regularity(field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.imgsim"] * imgsim + cfg["loss.imgmse"] * imgmse + cfg["loss.ddf"] * ddf
    return loss, {"regist": loss, "imgsim": imgsim, "imgmse": imgmse, "ddf": ddf}


# ---------------------------------------------------------------------------------------------------------------------
# The state of a run: everything a checkpoint holds. No generator states: every draw is keyed (Runtime/keyed_random.py).
# ---------------------------------------------------------------------------------------------------------------------

def new_progress():
    """Counters and sums that survive a restart: where we are, samples and pairs of this epoch, its averages."""
    return {"epoch": 0, "step_in_epoch": 0, "step": 0, "samples": 0, "pairs": 0, "nonfinite_in_a_row": 0,
            "sums": new_sums()}


def save_state(state, relative, cfg, metrics=None, best=None):
    """Save one checkpoint, once all ranks have found that what each holds whole is the same.

    The step waits for the copy only: a thread of rank 0 writes, reads back, and removes what the config does not keep.
    """
    ranks, net, optimizer = state["ranks"], state["net"], state["optimizer"]
    agree.agree(ranks, state["progress"]["step"], "checkpoint", weights=replicated(net, optimizer))
    watchdog.phase("checkpoint")
    finish_saving(state)
    weights, adam = gather_state(net, optimizer, ranks)
    average = gather(state["average"], ranks)
    if ranks["rank"] == 0:
        content = {"format": 1, "model": weights, "optimizer": adam, "queue": state["queue"], "config": cfg,
                   "data": state["data"], **({"average": {**weights, **average}} if average else {}),
                   **state["progress"]}
        began = time.time()
        state["saving"] = checkpoint.save_in_background(
            state["run"], relative, content, metrics, best, (cfg["run.keep_last"], cfg["run.keep_every"], 2))
        state["saving"].add_done_callback(lambda done: state.update(write_s=time.time() - began))
    # Wait here, under this deadline, not in the next step; and learn from rank 0 how long the write before this took.
    agreed = agree.agree(ranks, state["progress"]["step"], "checkpoint", terms=[state["write_s"]])
    watchdog.learn_write(agreed["terms"][0] * ranks["world"])


def finish_saving(state, last=False):
    """Wait for the write in progress. A failed one does not end a healthy run; three in a row or the last do."""
    if state["saving"] is None:
        return
    try:
        state["saving"].result()
        state["failed_saves"] = 0
    except OSError as error:
        state["failed_saves"] += 1
        watchdog.event("checkpoint failed", error=str(error))
        print(f"checkpoint failed, the earlier ones stand: {error}", file=sys.stderr, flush=True)
        if last or state["failed_saves"] == 3:
            raise
    state["saving"] = None


def choose_precision(cfg, ranks, device):
    """Turn run.amp "auto" into what all ranks take: bf16 where every device computes it fast. Every rank calls this.

    Returns: whether it was "auto".
    """
    asked = cfg["run.amp"]
    found = agree.gather_objects(ranks, precision(asked, device))
    cfg["run.amp"] = "off" if "off" in found else "bf16"
    return asked == "auto"


def keep_precision(cfg, begun, is_main):
    """With run.amp "auto": a run goes on in the precision in which it began, which is another on another device."""
    if begun in ("bf16", "off") and begun != cfg["run.amp"]:
        if is_main:
            print(f"run.amp: this run began with {begun} and goes on so; on these devices auto would choose "
                  f"{cfg['run.amp']}, which `--set run.amp={cfg['run.amp']}` takes.")
        cfg["run.amp"] = begun


def restore_state(state, cfg, init_from=None):
    """Continue from the newest checkpoint that verifies, as rank 0 finds it; or start, from given weights or anew.

    Returns Adam's state and averaged weights of that checkpoint, for what does not exist yet; None for what it lacks.
    """
    run, ranks, net = state["run"], state["ranks"], state["net"]
    relative = ""
    if ranks["rank"] == 0:
        remove_leftovers(run)
        reason = os.environ.get("OMNIMORPH_STEP_BACK")
        if reason:
            checkpoint.step_back(run, reason)
        relative = checkpoint.newest(run, record=True, patience_s=READ_AGAIN_S) or ""
    relative = launch.tell(ranks, "newest checkpoint", relative)
    path = run / relative if relative else init_from
    if relative and init_from and os.environ.get("OMNIMORPH_ROUND", "0") == "0":
        raise InputError(f"--init-from: {run} has checkpoints already and would be continued; add --fresh to start a "
                         f"new run from {init_from}.")
    if not path:
        return None, None
    content = patiently(lambda: checkpoint.load(path, map_location=next(net.parameters()).device), READ_AGAIN_S, path)
    if relative and state["auto_amp"]:
        keep_precision(cfg, (content.get("config") or {}).get("run.amp"), ranks["rank"] == 0)
    changes = checkpoint.check_compatible(content, cfg, path, MODEL_KEYS)
    checkpoint.load_weights(net, content, path)
    if relative:
        missing = [name for name in state["progress"] if name not in content]
        if missing:
            raise InputError(f"{path} has no {missing[0]}: it is of an older version; start a new run with --fresh "
                             f"--init-from {path}.")
        state["queue"].update({name: value if name == "next" else value.to(state["device"])
                               for name, value in content["queue"].items()})
        state["progress"].update({name: content[name] for name in state["progress"]})
        changes += go_on_with_data(content, state, cfg, path)
    if ranks["rank"] == 0:
        for change in changes if relative else []:
            print(f"changed since the checkpoint: {change}")
        progress = state["progress"]
        print(f"continuing from {path}, epoch {progress['epoch']}, step {progress['step']}" if relative
              else f"weights from {path}")
    agree.agree(ranks, state["progress"]["step"], "checkpoint", weights=net.state_dict())
    return (content["optimizer"], content.get("average")) if relative else (None, None)


def go_on_with_data(content, state, cfg, path):
    """Compare the data with those of the checkpoint, and leave an epoch whose order is another. Returns sentences."""
    reordered, changes = compare_data(content.get("data"), state["data"], path)
    progress = state["progress"]
    if "data" not in content:
        name_volumes(state["queue"], [row[1] for row in volumes_of(state["data"]) if row[2] == "train"])
    if reordered and progress["step_in_epoch"]:
        # Not beyond the last one, which would end the run without its validation.
        progress.update(epoch=min(progress["epoch"] + 1, cfg["run.epochs"] - 1), step_in_epoch=0, samples=0, pairs=0,
                        sums=new_sums())
        changes.append(f"the order of the volumes: the training goes on with epoch {progress['epoch']} from its start")
    return changes


# ---------------------------------------------------------------------------------------------------------------------
# The training
# ---------------------------------------------------------------------------------------------------------------------

def train_mode(branch, compute, inputs, state, clip_norm, cfg, **raised):
    """One mode of a step: forward of each batch of this rank, one agreement, backward, clip, optimizer step.

    compute(model, *inputs[i], cfg) gives loss, terms and what else is to be kept. raised: see agree.agree.
    Returns what was agreed, with "terms" (global means by name), "moved" (whether the weights did) and "kept".
    """
    model, optimizer, count, gradients = state["model"], state["optimizer"], len(inputs), state["gradients"]
    optimizer.zero_grad(set_to_none=True)
    gradients["parts"] = count if model is state["net"] else count * state["ranks"]["world"]
    means, finite, kept = collections.Counter(), True, []
    for number, batch in enumerate(inputs, 1):
        watchdog.phase("forward", branch)
        # Gradients of all batches but the last only add up here; the last backward sums them over the ranks.
        with contextlib.nullcontext() if number == count or model is state["net"] else model.no_sync():
            loss, terms, *more = compute(model, *batch, cfg)
            means.update({name: float(value.detach()) / count for name, value in terms.items()})
            finite = finite and math.isfinite(loss.item())
            kept += more
            if number < count:
                watchdog.phase("accumulate", branch)
                loss.backward()
                set_aside(gradients, state["net"].parameters())
    if not finite:
        watchdog.event("nonfinite", mode=branch, terms=means)
    agreed = agree.agree(state["ranks"], state["progress"]["step"], branch, agree.fingerprint(inputs),
                         nonfinite=not finite, terms=means.values(), **raised)
    agreed.update(terms=dict(zip(means, agreed["terms"])), moved=False, kept=kept)
    watchdog.phase("backward", branch)
    loss.backward()  # of a loss that is not finite too: DDP counts on a backward after each forward
    if model is state["net"]:
        put_together(gradients, state["net"].parameters())
    watchdog.phase("optimizer", branch)
    # All ranks have the same gradients now, or slices of them, and so the same norm.
    norm = whole(torch.nn.utils.clip_grad_norm_(state["net"].parameters(), clip_norm)).item()
    if math.isfinite(norm) and not agreed["nonfinite"]:
        optimizer.step()
        add_terms(state["progress"]["sums"], agreed["terms"])
        agreed["moved"] = True
    return agreed


def train_step(state, volumes, pairs, cfg, **raised):
    """One step of all three modes. volumes, pairs: lists of batches. Returns the step's line and mode 1's agreement."""
    progress, queue, device, ranks = state["progress"], state["queue"], state["device"], state["ranks"]
    seed, epoch, sums, batches = cfg["run.seed"], progress["epoch"], progress["sums"], []
    watchdog.phase("deform")
    for images, positions, subjects in volumes:
        keys = [(seed, epoch, position) for position in positions.tolist()]
        batches.append((deform_batch(images.to(device), keys, state["ddpm"], cfg), subjects.to(device), queue))

    compare = cfg["run.checksum_every"] and progress["step"] % cfg["run.checksum_every"] == 0
    first = train_mode("diffusion", step_diffusion, [batch[:1] for batch in batches], state, math.inf, cfg,
                       weights=replicated(state["net"]) if compare else None, **raised)
    for batch, *_ in batches:  # mode 2 needs neither
        del batch["true_field"], batch["keep"]
    memory.empty_cache(cfg, device)

    embed_steadily(state["net"], state["average"], [batch[0] for batch in batches], cfg)
    second = train_mode("contrastive", step_contrastive, batches, state, cfg["contrastive.clip_norm"], cfg)
    if second["moved"]:
        # In float64, which holds a subject's number exactly; on the CPU, as not every device has it.
        rows = [torch.cat([part.cpu().double() for part in (*kept, batch[1][:, None])], dim=1)
                for kept, batch in zip(second["kept"], batches)]
        rows = agree.gather(ranks, torch.cat(rows)).flatten(0, 1)  # in global sample order
        push(queue, *rows[:, :-1].float().to(device).chunk(2, dim=1), rows[:, -1].long().to(device))
    moved, terms = [first["moved"], second["moved"]], {**first["terms"], **second["terms"]}
    del batches, second
    memory.empty_cache(cfg, device)

    gate_open = first["moved"] and first["terms"]["ang"] < cfg["registration.gate"]
    if gate_open:
        # Negative positions: the draws of mode 3 must not be those of mode 1.
        both = [augment(volumes.to(device), [(seed, epoch, -1 - p) for p in positions.tolist()], cfg)
                for volumes, positions, _ in pairs]
        third = train_mode("registration", step_registration, [(b[0::2], b[1::2]) for b in both], state,
                           cfg["registration.clip_norm"], cfg)
        moved.append(third["moved"])
        terms.update(third["terms"])
        del both, third
        memory.empty_cache(cfg, device)

    update_average(state["average"], state["net"], cfg, progress["step"])
    failed = moved.count(False)
    sums["steps"], sums["open"], sums["nonfinite"] = (sums["steps"] + 1, sums["open"] + gate_open,
                                                      sums["nonfinite"] + failed)
    progress["nonfinite_in_a_row"] = progress["nonfinite_in_a_row"] + 1 if failed else 0
    return {"epoch": epoch, "ang": terms["ang"], "open": gate_open, "nonfinite": failed, "terms": terms}, first


def set_up(cfg, args, ranks, run):
    """Data, network, optimizer; join the ranks; continue or start.

    Returns: the state that a training carries along, training and validation data sets, listed pairs, and the shares.
    """
    device = pick_device(cfg["run.device"], ranks["local_rank"])
    prepare_device(device, cfg["run.threads"])
    watchdog.phase("data set")
    dataset, held_out, listed = read_datasets(cfg, ranks=ranks)
    share = shares(cfg, ranks["world"], ranks.get("step"))
    watchdog.phase("join")
    launch.join(ranks, device, cfg)
    watchdog.phase("restore")
    auto_amp = choose_precision(cfg, ranks, device)
    data = describe_data(cfg, dataset, held_out)
    require_same_everywhere(ranks, data)
    # With fsdp no device ever holds the whole network.
    net = build_network(cfg, "cpu" if cfg["run.strategy"] == "fsdp" else device)
    state = {"run": run, "ranks": ranks, "device": device, "net": net, "ddpm": DeformDDPM(cfg), "saving": None,
             "data": data, "queue": new_queue(cfg, device), "progress": new_progress(), "failed_saves": 0,
             "write_s": 0.0,
             "gradients": new_gradients(cfg["run.exact_sums"], device), "writer": None,
             "watch": memory.new_watch(device, cfg["run.memory_limit_gb"]), "auto_amp": auto_amp}
    adam, average = restore_state(state, cfg, args.init_from)
    state["model"] = wrap(net, ranks, device, state["gradients"], cfg)
    state["optimizer"], state["average"] = make_optimizer(net, ranks, cfg), new_average(net, cfg, average)
    if adam:
        load_optimizer(state["optimizer"], adam)
    if ranks["rank"] == 0:
        step = state["progress"]["step"]
        try:
            save_launch(run, cfg, step)
            write_file(run / "data.csv", as_csv(data))
        except OSError as error:  # a full disk may have room again when the next checkpoint is due
            print(f"{run}: what this launch runs with could not be written: {error}", file=sys.stderr)
        print(f"{run}: {len(dataset)} training and {len(held_out)} validation volumes, {share['samples']} samples and "
              f"{share['pairs']} pairs a step, on {ranks['world']} x {describe(device)}, {PRECISIONS[cfg['run.amp']]}")
        state["writer"] = writer.new_writer(f"{cfg['run.logs']}/{run.name}", step)
    return state, dataset, held_out, listed, share


def why_leave(state, args, started, steps):
    """Whether this rank would leave after this step, its `steps`th here: the strongest of agree.REASONS, or None."""
    holds = {"steps": 0 < args.max_steps_before_restart <= steps,
             "time": 0 < args.max_seconds_before_restart < time.time() - started,
             "signal": watchdog.stop_requested(),
             "memory": memory.watch(state["watch"], state["progress"]["step"])}
    return next((reason for reason in reversed(agree.REASONS) if holds.get(reason)), None)


def train(cfg, args, ranks, run):
    """Set up, continue or start, and train to the last epoch. Returns the exit code."""
    launched = saved = time.time()
    state, dataset, held_out, listed, share = set_up(cfg, args, ranks, run)
    progress, chief, done_here, leave = state["progress"], ranks["rank"] == 0, 0, None

    while progress["epoch"] < cfg["run.epochs"] and not leave:
        watchdog.phase("epoch")
        if cfg["run.refresh_process_group_every"] and done_here and not (
                progress["epoch"] % cfg["run.refresh_process_group_every"]):
            state["model"] = None
            launch.refresh(ranks, state["device"], cfg)
            state["model"] = wrap(state["net"], ranks, state["device"], state["gradients"], cfg)
        first_step, started = progress["step_in_epoch"], time.time()
        steps = first_step + steps_left(cfg, len(dataset), listed, share, progress["samples"], progress["pairs"])
        bar, below = progress_bars(cfg, progress, steps, chief)
        watchdog.new_step(progress["step"], "epoch")
        with bar, below:
            for volumes, pairs in epoch_batches(cfg, dataset, listed, progress, share, ranks):
                done = (progress["epoch"] * steps + progress["step_in_epoch"]) / (steps * cfg["run.epochs"])
                for group in state["optimizer"].param_groups:
                    group["lr"] = learning_rate(cfg, progress["step"], done)
                done_here += 1
                due = chief and 0 < 60 * cfg["run.checkpoint_minutes"] < time.time() - saved
                line, agreed = train_step(state, volumes, pairs, cfg, save=due,
                                          leave=why_leave(state, args, launched, done_here))
                for key in ("step", "step_in_epoch", "samples", "pairs"):
                    progress[key] += share.get(key, 1)
                spent = watchdog.end_step()
                if chief:
                    watchdog.event("step", **line, spent=spent)
                    show_progress(bar, below, progress, cfg, steps, first_step, share["samples"], time.time() - started)
                if line["nonfinite"]:
                    refuse_nonfinite(state, cfg)
                leave, every = agreed["leave"], cfg["run.checkpoint_steps"]
                if leave or agreed["save"] or (every and progress["step_in_epoch"] % every == 0
                                               and progress["step_in_epoch"] < steps):
                    place = (progress["epoch"], progress["step_in_epoch"])
                    save_state(state, checkpoint.step_name(*place, cfg["data.name"], cfg["model.name"]), cfg)
                    saved = time.time()
                if leave:
                    break
                watchdog.new_step(progress["step"])
        if not leave:
            finish_epoch(state, held_out, cfg, started)

    watchdog.phase("checkpoint")
    finish_saving(state, last=True)
    agree.agree(ranks, progress["step"], "checkpoint")  # the others wait under this deadline
    weights = None if leave else gather(state["net"].state_dict(), ranks)
    watchdog.phase("leave")
    state.update(model=None, net=None, optimizer=None, average=None)
    launch.leave(ranks)
    if leave:
        leak = state["watch"]["leak"] if leave == "memory" else None
        watchdog.event("leave", reason=f"rank {ranks['rank']}: {leak['sentence']}" if leak else REASONS[leave])
        return PLANNED_RESTART
    release(remove=True)
    if chief:
        print(f"done: {cfg['run.epochs']} epochs, {progress['step']} steps, weights "
              f"{checkpoint.weights_sha256(weights)}\n"
              f"the network, for OM_register.py, OM_augment.py and Scripts/export_model.py: --model {run}")
    return DONE


def refuse_nonfinite(state, cfg):
    """After a step without an update: weights that are not finite never recover; nor does a loss that stays so."""
    progress = state["progress"]
    for name, parameter in state["net"].named_parameters():
        if not whole(parameter).isfinite().all():
            raise RuntimeError(f"the weights are not finite after step {progress['step']}: {name}")
    if progress["nonfinite_in_a_row"] >= cfg["run.max_nonfinite"]:
        raise InputError(f"{state['run']}: the loss was not finite in {cfg['run.max_nonfinite']} steps in a row, the "
                         f"last one {progress['step']}; look at the data or lower optim.lr.")


def finish_epoch(state, held_out, cfg, started):
    """Validation, log, TensorBoard and the epoch's checkpoint."""
    progress = state["progress"]
    epoch, sums, last = progress["epoch"], progress["sums"], progress["epoch"] + 1 == cfg["run.epochs"]
    watchdog.event("memory", epoch=epoch, strategy=cfg["run.strategy"], world=state["ranks"]["world"],
                   samples=progress["samples"], steps=sums["steps"],
                   **footprint(state["net"], state["optimizer"], state["device"]))
    scores, picture = {}, None
    if len(held_out) and ((epoch + 1) % cfg["run.val_every"] == 0 or last):
        watchdog.phase("evaluate")
        with averaged(state["net"], state["average"]):
            scores, picture = validate(state, held_out, cfg)
        watchdog.phase("evaluate")
    if state["writer"]:
        entry = {**averages(sums), "steps": sums["steps"], "open_share": sums["open"] / max(sums["steps"], 1),
                 "nonfinite": sums["nonfinite"], **scores}
        watchdog.event("epoch", **{**entry, "epoch": epoch, "step": progress["step"]})
        show_epoch(state["writer"], entry, progress, cfg, time.time() - started)
        if picture and cfg["run.picture_every"] and ((epoch + 1) % cfg["run.picture_every"] == 0 or last):
            figure = registration_figure(*picture, title=f"epoch {epoch + 1}")
            writer.add_figure(state["writer"], "registration", figure, progress["step"])
        writer.flush(state["writer"])
    metric = "val_dice" if scores.get("val_dice") is not None else "val_imgsim"
    progress.update(epoch=epoch + 1, step_in_epoch=0, samples=0, pairs=0, sums=new_sums())
    save_state(state, checkpoint.epoch_name(epoch + 1, cfg["data.name"], cfg["model.name"]), cfg,
               metrics=scores or None, best=(metric, scores[metric]) if scores else None)


def main(argv=None):
    args = parse_arguments(argv)
    run = None
    try:
        cfg = load_config(args.config, args.overrides)
        ranks = launch.environment()
        if args.debug:
            launch.debug()
        if args.dry_run:
            return dry_run(cfg, ranks["world"], step_diffusion, step_contrastive, step_registration)
        run = launch.open_run(ranks, cfg, args.fresh)
        code = train(cfg, args, ranks, run)
    except InputError as error:
        # From a loader's worker it comes with the worker's traceback in front of the sentence.
        sentence = str(error).strip().splitlines()[-1].split("InputError: ")[-1]
        watchdog.event("refused", error=sentence, phase=watchdog.STATE.get("name", "start"))
        print(f"error: {sentence}", file=sys.stderr)
        code = STOP
    if run:
        launch.close_run(ranks, run, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
