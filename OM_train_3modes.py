"""Train a deformation network in three modes: diffusion, contrastive, registration.

    python OM_train_3modes.py --config Config/config_om.yaml [--set key=value ...]

The same command continues an interrupted run from its newest checkpoint; bash_train_multi_nodes.sh starts many ranks.
Three step functions, one step, one loop. Exit codes: 0 done, 42 planned restart, 43 stop (bad input), others a crash.
"""
import Runtime.unix  # noqa: F401  first of all: a Python that is too old, or Windows, ends here, in one sentence

# isort: split
import argparse
import collections
import contextlib
import math
import os
import sys
import time

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from Dataloader.dataset import NO_LABELS, epoch_batches, read_datasets
from Dataloader.identity import (
    agree_on_labels,
    as_csv,
    compare_data,
    describe_data,
    require_same_everywhere,
    volumes_of,
)
from Dataloader.sampler import steps_left
from Dataloader.staging import release
from Diffusion import graphs
from Diffusion.batch_augment import augment, augment_maps, remap
from Diffusion.cost import dry_run
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.embeddings import embed, name_volumes, new_queue, push, target_embeddings
from Diffusion.fields import warp
from Diffusion.gradients import new_gradients, put_together, set_aside
from Diffusion.losses import (
    image_similarity,
    info_nce,
    label_terms,
    mean_square,
    recovery_terms,
    regularity,
    segmentation_terms,
    structure_shares,
    warp_inside,
)
from Diffusion.networks import build_network, compile_network
from Diffusion.schedule import ema_weights, learning_rate, new_ema, update_ema
from Diffusion.sharding import (
    compare_moments,
    footprint,
    gather,
    gather_state,
    load_optimizers,
    make_optimizers,
    replicated,
    whole,
    wrap,
)
from Diffusion.validation import align, validate
from Inference.load_model import find_checkpoint, load_state
from Runtime import agree, checkpoint, launch, memory, trail, watchdog, writer
from Runtime.config import MODEL_KEYS, load_config, modes_of
from Runtime.device import autocast, describe, pick_device, precision, prepare_device, send
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError
from Runtime.files import is_passing, passing_fault, patiently, remove_leftovers, write_file
from Runtime.global_batch import split_step
from Runtime.keyed_random import uniform
from Runtime.pace import keep_pace, new_pace
from Runtime.profile import new_profile, profile_step
from Runtime.progress import add_terms, averages, new_sums, of_their_share, progress_bars, show_epoch, show_progress
from Runtime.provenance import save_launch
from Runtime.rules import start_notifying

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
    parser.add_argument("--init-from", metavar="F", help="start a new run from the weights of a checkpoint, a "
                        ".safetensors file, a run's folder, or universal, the network for any volumes")
    parser.add_argument("--dry-run", action="store_true", help="build everything, print sizes and costs, and exit")
    parser.add_argument("--max-steps-before-restart", type=int, default=0, metavar="N",
                        help="after N steps save and exit with 42, for a launcher to start again (0 = off)")
    parser.add_argument("--max-seconds-before-restart", type=float, default=0, metavar="S",
                        help="the same after S seconds: a launcher passes on its own time limit (0 = off)")
    parser.add_argument("--debug", action="store_true",
                        help="find a crash: blocking launches, checked collectives, the module that was running")
    parser.add_argument("--profile", metavar="START:STEPS",
                        help="trace so many steps of rank 0 from step START on, for the report of the run")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# The three modes: from a batch, a dict of named tensors, to a weighted loss and its terms.
# ---------------------------------------------------------------------------------------------------------------------

def deform_batch(images, rng_keys, ddpm, cfg, drawn=None):
    """What modes 1 and 2 see of a batch: x_t, the target field, t, and the condition made of the augmented x0.

    images: (B, C, *spatial) as stored, C channels, mostly 1. rng_keys: B tuples (seed, epoch, position), see
    Runtime/keyed_random.py. drawn: ddpm.draw(rng_keys), where it has been done already.
    """
    x0 = augment(images, rng_keys, cfg)                                        # (B, C, *spatial)
    times = ddpm.draw_times(rng_keys)
    xt, target_field = ddpm.diffuse(x0, times, rng_keys, drawn)                # (B, C, *spatial), (B, N, *spatial)
    return {"xt": xt, "target_field": target_field, "t": send(torch.tensor(times), x0.device),
            "condition": make_condition(x0, cfg["model.condition_type"], rng_keys),
            "keep": send(uniform(rng_keys, "keep") >= cfg["model.condition_dropout"], x0.device)}


def step_diffusion(net, batch, cfg):
    """Mode 1: undo a random deformation, seeing a few slices of the original."""
    with autocast(batch["xt"].device, cfg["run.amp"]):
        pred_field = net(batch["xt"], batch["t"], batch["condition"], batch["keep"])
    dist, ang = (term.mean() for term in recovery_terms(pred_field, batch["target_field"]))
    regul = regularity(pred_field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.dist"] * dist + cfg["loss.ang"] * ang + cfg["loss.regul"] * regul
    return loss, {"total": loss, "ang": ang, "dist": dist, "regul": regul}


def step_contrastive(net, batch, cfg):
    """Mode 2: know a deformed volume by its own slices among embeddings of other subjects.

    The third result is what goes into the queue: the target embeddings, of the averaged weights where there are any.
    """
    queue, subjects = batch["queue"], batch["subjects"]
    of_image, of_condition = embed(net, batch, cfg)                            # (B, E) each
    image, condition = batch["targets"] or (of_image, of_condition)
    allowed = (queue["subjects"] >= 0) & (queue["subjects"] != subjects[:, None])
    loss = cfg["loss.contrastive"] * 0.5 * (
        info_nce(of_image, condition, queue["conditions"], allowed, cfg["contrastive.temperature"])
        + info_nce(of_condition, image, queue["images"], allowed, cfg["contrastive.temperature"]))
    return loss, {"contrastive": loss}, (image.detach(), condition.detach())


def step_registration(net, batch, cfg):
    """Mode 3: align two volumes, seeing all of the fixed one. Masks and labels only the loss sees."""
    moving, fixed = batch["moving"], batch["fixed"]                            # (B, C, *spatial) each
    seen = batch.get("seen", batch)  # with augment.remap the network sees the pair in other intensities than the loss
    shares = None
    if cfg["loss.segment"]:
        field, logits = align(net, seen["moving"], seen["fixed"], cfg, segment=True)   # and (2 B, K + 1, *spatial)
        shares = structure_shares(logits.detach()).chunk(2)                    # (B, K, *spatial) each
    else:
        field = align(net, seen["moving"], seen["fixed"], cfg)                 # (B, N, *spatial)
    warped, inside = warp(moving, field), None                                 # (B, C, *spatial)
    if cfg["registration.masks"]:
        warped, inside = warp_inside(moving, field, **batch["mask"])           # (B, C, *spatial), (B, 1, *spatial)
    imgsim = -image_similarity(warped, fixed, cfg, inside)
    imgmse = mean_square(warped - fixed, inside)
    ddf = regularity(field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.imgsim"] * imgsim + cfg["loss.imgmse"] * imgmse + cfg["loss.ddf"] * ddf
    terms = {"imgsim": imgsim, "imgmse": imgmse, "ddf": ddf}
    if cfg["loss.dice"]:
        dice, labelled = label_terms(field, **batch["label"], shares=shares)   # of the pairs with labels; their share
        loss = loss + cfg["loss.dice"] * dice
        terms.update(dice=dice * labelled, labelled=labelled)                  # see PARTIAL of Runtime/progress.py
    if cfg["loss.segment"]:
        segment, segmented = segmentation_terms(logits, **batch["label"])      # of the volumes with labels
        loss = loss + cfg["loss.segment"] * segment
        terms.update(segment=segment * segmented, segmented=segmented)
    return loss, {"regist": loss, **terms}


# The modes of a step. A fourth one is a step function, a line here, one in WEIGHTS of Runtime/config.py, whose order is
# that of a step, and its call in train_step.
#   step       (net, batch, cfg) -> the loss, its terms by name, and, if need be, what train_step keeps of the batch
#   clip_norm  config key of the largest norm of its gradient; None for no limit
#   gate       config key: the mode runs in a step whose `ang` is below it; None for every step
Mode = collections.namedtuple("Mode", "step clip_norm gate")
MODES = {"diffusion": Mode(step_diffusion, None, None),
         "contrastive": Mode(step_contrastive, "contrastive.clip_norm", None),
         "registration": Mode(step_registration, "registration.clip_norm", "registration.gate")}


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
    ranks, net, optimizers = state["ranks"], state["net"], state["optimizers"]
    agree.agree(ranks, state["progress"]["step"], "checkpoint", weights=replicated(net, optimizers))
    watchdog.phase("checkpoint")
    finish_saving(state)
    weights, adam = gather_state(net, optimizers, ranks)
    ema = gather(state["ema"], ranks)
    if ranks["rank"] == 0:
        content = {"format": 1, "model": weights, "optimizer": adam, "queue": state["queue"], "config": cfg,
                   "data": state["data"], **({"ema": {**weights, **ema}} if ema else {}),
                   **state["progress"]}
        began = time.time()
        state["saving"] = checkpoint.save_in_background(
            state["run"], relative, content, metrics, best, (cfg["run.keep_last"], cfg["run.keep_every"], 2))
        state["saving"].add_done_callback(lambda done: state.update(write_s=time.time() - began))
    # Wait here, under this deadline, not in the next step; and learn from rank 0 how long the write before this took.
    agreed = agree.agree(ranks, state["progress"]["step"], "checkpoint", terms=[state["write_s"]])
    watchdog.learn_write(agreed["terms"][0] * ranks["world_size"])


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
    precisions = agree.gather_objects(ranks, precision(asked, device))
    cfg["run.amp"] = "off" if "off" in precisions else "bf16"
    return asked == "auto"


def keep_precision(cfg, begun, is_main):
    """With run.amp "auto": a run goes on in the precision in which it began, which is another on another device."""
    if begun in ("bf16", "off") and begun != cfg["run.amp"]:
        if is_main:
            print(f"run.amp: this run began with {begun} and goes on so; on these devices auto would choose "
                  f"{cfg['run.amp']}, which `--set run.amp={cfg['run.amp']}` takes.")
        cfg["run.amp"] = begun


def checkpoint_to_load(state, init_from):
    """The newest checkpoint that verifies, as rank 0 finds it: its path and name; where there is none init_from, ""."""
    run, relative = state["run"], ""
    if state["ranks"]["rank"] == 0:
        remove_leftovers(run)
        reason = os.environ.get("OMNIMORPH_STEP_BACK")
        if reason:
            checkpoint.step_back(run, reason)
        relative = checkpoint.newest(run, record=True, patience_s=READ_AGAIN_S) or ""
    relative = launch.tell(state["ranks"], "newest checkpoint", relative)
    if relative and init_from and os.environ.get("OMNIMORPH_ROUND", "0") == "0":
        raise InputError(f"--init-from: {run} has checkpoints already and would be continued; add --fresh to start a "
                         f"new run from {init_from}.")
    return run / relative if relative else init_from and find_checkpoint(init_from), relative


def restore_state(state, cfg, init_from=None):
    """Continue from the newest checkpoint, or start, from given weights or anew. Every rank calls this.

    Returns: Adam's state and averaged weights of that checkpoint, for what does not exist yet; None for what it lacks.
    """
    ranks, net, progress = state["ranks"], state["net"], state["progress"]
    path, relative = checkpoint_to_load(state, init_from)
    if not path:
        return None, None
    content = patiently(lambda: load_state(path, next(net.parameters()).device), READ_AGAIN_S, path)
    if relative and state["auto_amp"]:
        keep_precision(cfg, (content.get("config") or {}).get("run.amp"), ranks["rank"] == 0)
    changes = checkpoint.check_compatible(content, cfg, path, MODEL_KEYS)
    checkpoint.load_weights(net, content, path)
    if relative:
        changes += compare_moments(content["optimizer"], modes_of(cfg), cfg, path)
        changes += restore_progress(content, state, cfg, path)
    if ranks["rank"] == 0:
        for change in changes if relative else []:
            print(f"changed since the checkpoint: {change}")
        print(f"continuing from {path}, epoch {progress['epoch']}, step {progress['step']}" if relative
              else f"weights from {path}")
    agree.agree(ranks, progress["step"], "checkpoint", weights=net.state_dict())
    return (content["optimizer"], content.get("ema")) if relative else (None, None)


def restore_progress(content, state, cfg, path):
    """Take counters, sums and the queue from a checkpoint. Returns sentences about what has changed in the data."""
    missing = [name for name in state["progress"] if name not in content]
    if missing:
        raise InputError(f"{path} has no {missing[0]}: it is of an older version; start a new run with --fresh "
                         f"--init-from {path}.")
    state["queue"].update({name: value if name == "next" else value.to(state["device"])
                           for name, value in content["queue"].items()})
    state["progress"].update({name: content[name] for name in state["progress"]})
    return go_on_with_data(content, state, cfg, path)


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

def forward(state, name, batch, results, cfg):
    """The loss of one batch in one mode. It, its terms and what the mode keeps are added to the results."""
    watchdog.phase("forward", name)
    model, step = state["model"], MODES[name].step
    loss, terms, *kept = graphs.run(state.get("graphs"), name, lambda given: step(model, given, cfg), batch,
                                    state["net"].parameters())
    results["losses"].append(loss.detach())
    results["terms"].append({term: value.detach() for term, value in terms.items()})
    results["kept"] += kept
    return loss


def fetch(results):
    """The terms of all batches of a mode as numbers, their means by name, and whether all losses are finite.

    The host waits here until the device has done the mode's forward passes, and nowhere before.
    """
    names = list(results["terms"][0])
    rows = [[loss, *terms.values()] for loss, terms in zip(results["losses"], results["terms"])]
    rows = torch.stack([torch.stack([value.float() for value in row]) for row in rows]).cpu().tolist()
    means = {name: sum(row[place] / len(rows) for row in rows) for place, name in enumerate(names, 1)}
    return means, all(math.isfinite(row[0]) for row in rows)


def clip_gradient(net, limit):
    """Shrink the gradient to a norm of at most `limit`, None for none. Returns the norm that it had.

    All ranks have the same gradients, or slices of them, and so the same norm.
    """
    norm = get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    if limit is not None:
        clip_grads_with_norm_(net.parameters(), limit, norm)
    return whole(norm).item()


def train_mode(state, name, batches, cfg, **raised):
    """One mode of a step: forward of each batch of this rank, one agreement, backward, clip, optimizer step.

    batches: dicts of named tensors, as the mode's step function takes them. raised: see agree.agree.
    Returns: what was agreed, with "terms" (global means by name), "moved" (whether the weights did), "norm" (of the
    gradient, before its clip) and "kept" (what the step function returns beside, of each batch).
    """
    model, net, gradients, ranks = state["model"], state["net"], state["gradients"], state["ranks"]
    alone = model is net  # no DDP around it: one rank, or fsdp
    optimizer = state["optimizers"].get(name) or state["optimizers"]["shared"]  # see optim.moments
    optimizer.zero_grad(set_to_none=True)
    gradients["parts"] = len(batches) if alone else len(batches) * ranks["world_size"]
    results = {"losses": [], "terms": [], "kept": []}

    # Gradients of all batches but the last only add up here; the last backward sums them over the ranks.
    for batch in batches[:-1]:
        with contextlib.nullcontext() if alone else model.no_sync():
            loss = forward(state, name, batch, results, cfg)
            watchdog.phase("accumulate", name)
            loss.backward()
        set_aside(gradients, net.parameters())
    loss = forward(state, name, batches[-1], results, cfg)
    means, finite = fetch(results)
    if not finite:
        watchdog.event("nonfinite", mode=name, terms=means)
    agreed = agree.agree(ranks, state["progress"]["step"], name, agree.fingerprint(batches), nonfinite=not finite,
                         terms=means.values(), **raised)
    watchdog.phase("backward", name)
    loss.backward()  # of a loss that is not finite too: DDP counts on a backward after each forward
    if alone:
        put_together(gradients, net.parameters())

    watchdog.phase("optimizer", name)
    norm = clip_gradient(net, cfg[MODES[name].clip_norm] if MODES[name].clip_norm else None)
    terms, moved = dict(zip(means, agreed["terms"])), math.isfinite(norm) and not agreed["nonfinite"]
    if moved:
        optimizer.step()
        add_terms(state["progress"]["sums"], terms)
    return {**agreed, "terms": terms, "moved": moved, "norm": norm, "kept": results["kept"]}


def volume_batches(state, volumes, cfg):
    """The batches of modes 1 and 2: deformed volumes, their subjects, and the queue. volumes: of `epoch_batches`."""
    batches, device, epoch = [], state["device"], state["progress"]["epoch"]
    queue = {name: value for name, value in state["queue"].items() if name != "next"}
    for images, positions, subjects, drawn in volumes:
        rng_keys = [(cfg["run.seed"], epoch, position) for position in positions.tolist()]
        batches.append({**deform_batch(send(images, device), rng_keys, state["ddpm"], cfg, drawn),
                        "subjects": send(subjects, device), "queue": queue, "targets": None})
    return batches


def pair_batches(state, pairs, cfg):
    """The batches of mode 3. pairs: of `epoch_batches`, where moving and fixed alternate.

    Beside the images, where the config asks for them: "seen", what the network sees instead; "mask" and "label", maps
    of moving and fixed, and of the labels also which volumes of a pair have them, and all labels there are.
    """
    batches, device, epoch = [], state["device"], state["progress"]["epoch"]
    for images, positions, _, maps in pairs:
        # Negative positions: the draws of mode 3 must not be those of mode 1.
        rng_keys = [(cfg["run.seed"], epoch, -1 - position) for position in positions.tolist()]
        deformation = state["ddpm"].draw_pair_fields(images.shape[2:], rng_keys, device, cfg["augment.deform"])
        both = augment(send(images, device), rng_keys, cfg, deformation)       # (2 B, C, *spatial)
        batch = {"moving": both[0::2], "fixed": both[1::2]}                    # (B, C, *spatial) each
        if cfg["augment.remap"]:
            seen = remap(both, rng_keys, cfg)                                  # (2 B, C, *spatial)
            batch["seen"] = {"moving": seen[0::2], "fixed": seen[1::2]}        # (B, C, *spatial) each
        for kind, stored in maps.items():
            both = augment_maps(send(stored, device), rng_keys, cfg, deformation)          # (2 B, 1, *spatial)
            batch[kind] = {"moving": both[0::2], "fixed": both[1::2]}          # (B, 1, *spatial) each
        if "label" in maps:
            has = maps["label"].flatten(1)[:, 0] != NO_LABELS                  # (2 B,), on the host: nobody waits
            batch["label"].update(labelled=has.view(-1, 2).tolist(), values=state["labels"])
        batches.append(batch)
    return batches


def push_of_all_ranks(state, volumes, kept):
    """Put the embeddings of a step into the queue of every rank, in global sample order. volumes: of `epoch_batches`.
    """
    embeddings = torch.cat([torch.cat(both, dim=1) for both in kept]).cpu()
    subjects = torch.cat([subjects for _, _, subjects, _ in volumes])
    # In float64, which holds a subject's number exactly; on the CPU, as not every device has it.
    rows = torch.cat([embeddings.double(), subjects[:, None].double()], dim=1)
    rows = agree.gather(state["ranks"], rows).flatten(0, 1)                    # (samples, 2 E + 1)
    images, conditions = send(rows[:, :-1].float(), state["device"]).chunk(2, dim=1)
    push(state["queue"], images, conditions, send(rows[:, -1].long(), state["device"]))


def train_step(state, volumes, pairs, cfg, **raised):
    """One step of all modes that the config gives a weight.

    volumes, pairs: lists of batches, of `epoch_batches`. raised: what this rank asks for, see agree.agree.
    Returns: the step's line of the log, and what its first mode agreed on.
    """
    progress, device, wanted, modes = state["progress"], state["device"], modes_of(cfg), {}
    compare = cfg["run.checksum_every"] and progress["step"] % cfg["run.checksum_every"] == 0
    # What the first agreement of a step carries; it is that of the first mode, which runs in every step.
    raised.update(weights=replicated(state["net"]) if compare else None)
    watchdog.phase("deform")
    batches = volume_batches(state, volumes, cfg) if {"diffusion", "contrastive"} & set(wanted) else []
    if "diffusion" in wanted:
        modes["diffusion"] = train_mode(state, "diffusion", batches, cfg, **raised)
    for batch in batches:  # mode 2 needs neither
        del batch["target_field"], batch["keep"]
    memory.empty_cache(cfg, device)

    if "contrastive" in wanted:
        for batch, targets in zip(batches, target_embeddings(state["net"], state["ema"], batches, cfg,
                                                             state.get("graphs"))):
            batch["targets"] = targets
        modes["contrastive"] = train_mode(state, "contrastive", batches, cfg, **({} if modes else raised))
        if modes["contrastive"]["moved"]:
            push_of_all_ranks(state, volumes, modes["contrastive"]["kept"])
    batches = batch = None  # what mode 3 needs no memory for
    memory.empty_cache(cfg, device)

    gate_open = "registration" in wanted and gate_is_open(modes, cfg)
    if gate_open:
        modes["registration"] = train_mode(state, "registration", pair_batches(state, pairs, cfg), cfg,
                                           **({} if modes else raised))
        memory.empty_cache(cfg, device)

    update_ema(state["ema"], state["net"], cfg, progress["step"])
    nonfinite = [mode["moved"] for mode in modes.values()].count(False)
    count_step(progress, gate_open, nonfinite)
    terms = {name: value for mode in modes.values() for name, value in mode["terms"].items()}
    line = {"epoch": progress["epoch"], "ang": terms.get("ang"), "open": gate_open, "nonfinite": nonfinite,
            "terms": of_their_share(terms), "norms": {name: mode["norm"] for name, mode in modes.items()}}
    return line, next(iter(modes.values()))


def gate_is_open(modes, cfg):
    """Whether mode 3 runs in this step. modes: what those before it came to; a training without mode 1 has no gate."""
    if "diffusion" not in modes:
        return True
    return modes["diffusion"]["moved"] and modes["diffusion"]["terms"]["ang"] < cfg[MODES["registration"].gate]


def count_step(progress, gate_open, nonfinite):
    """nonfinite: modes that took no step, because their loss or gradient was not finite."""
    sums = progress["sums"]
    sums["steps"] += 1
    sums["open"] += gate_open
    sums["nonfinite"] += nonfinite
    progress["nonfinite_in_a_row"] = progress["nonfinite_in_a_row"] + 1 if nonfinite else 0


def set_up(cfg, args, ranks, run):
    """Data, network, optimizer; join the ranks; continue or start.

    Returns: the state that a training carries along; its volumes: training and validation data sets ("train", "val"),
    "listed" pairs or None, and "split", how the samples of a step are split over the ranks.
    """
    launched, device = time.time(), pick_device(cfg["run.device"], ranks["local_rank"])
    prepare_device(device, cfg["run.threads"])
    watchdog.phase("data set")
    train, val, listed = read_datasets(cfg, ranks=ranks)
    split = split_step(cfg, ranks["world_size"], ranks["step"])
    watchdog.phase("join")
    launch.join(ranks, device, cfg)
    watchdog.phase("restore")
    auto_amp = choose_precision(cfg, ranks, device)
    data = describe_data(cfg, train, val)
    require_same_everywhere(ranks, data)
    labels = agree_on_labels(ranks, train.found_labels, cfg) if cfg["loss.dice"] else []
    # With fsdp no device ever holds the whole network.
    net = build_network(cfg, "cpu" if cfg["run.strategy"] == "fsdp" else device)
    state = {"run": run, "ranks": ranks, "device": device, "net": net, "ddpm": DeformDDPM(cfg), "data": data,
             "labels": send(torch.tensor(labels), device), "queue": new_queue(cfg, device),
             "progress": new_progress(), "auto_amp": auto_amp, "gradients": new_gradients(cfg, device), "writer": None,
             "graphs": None if args.debug else graphs.new_graphs(cfg, device, ranks),
             "watch": memory.new_watch(device, cfg["run.memory_limit_gb"]),
             "saving": None, "failed_saves": 0, "write_s": 0.0, "saved": launched, "launched": launched,
             "steps_here": 0, "pace": new_pace()}
    adam, ema = restore_state(state, cfg, args.init_from)
    state["profile"] = new_profile(args.profile, state)
    if args.debug and cfg["run.compile"] == "off":
        trail.follow(net)
    state["model"] = wrap(net, ranks, device, state["gradients"], cfg)
    if cfg["run.compile"] == "step":
        compile_network(net, device)
    state["optimizers"], state["ema"] = make_optimizers(net, ranks, modes_of(cfg), cfg), new_ema(net, cfg, ema)
    if adam:
        load_optimizers(state["optimizers"], adam)
    volumes = {"train": train, "val": val, "listed": listed, "split": split}
    if ranks["rank"] == 0:
        announce(state, volumes, cfg)
    return state, volumes


def announce(state, volumes, cfg):
    """Write down what this launch runs with, say so, and open the log for TensorBoard. Rank 0 calls this."""
    run, step, split, ranks = state["run"], state["progress"]["step"], volumes["split"], state["ranks"]
    try:
        save_launch(run, cfg, step)
        write_file(run / "data.csv", as_csv(state["data"]))
    except OSError as error:  # a full disk may have room again when the next checkpoint is due
        print(f"{run}: what this launch runs with could not be written: {error}", file=sys.stderr)
    print(f"{run}: {len(volumes['train'])} training and {len(volumes['val'])} validation volumes, {split['samples']} "
          f"samples and {split['pairs']} pairs a step, on {ranks['world_size']} x {describe(state['device'])}, "
          f"{PRECISIONS[cfg['run.amp']]}")
    if cfg["loss.contrastive"] and len(set(volumes["train"].subjects.tolist())) < 2:
        print("all training volumes are of one subject, so mode 2 has nobody to tell apart: its loss stays 0; set "
              "loss.contrastive to 0, or data.subject_pattern if these are several subjects")
    if len(volumes["val"]) == 1:
        print("one validation volume makes no pair, so registration is not validated and no checkpoint is the best: "
              "hold out two volumes (data.val_ids, data.val_fraction)")
    start_notifying(run, cfg["run.notify"])
    state["writer"] = writer.new_writer(f"{cfg['run.logs']}/{run.name}", step, run / "pictures")


def why_leave(state, args):
    """Whether this rank would leave after the step that begins: the strongest of agree.REASONS, or None."""
    holds = {"steps": 0 < args.max_steps_before_restart <= state["steps_here"],
             "time": 0 < args.max_seconds_before_restart < time.time() - state["launched"],
             "signal": watchdog.stop_requested(),
             "memory": memory.watch(state["watch"], state["progress"]["step"])}
    return next((reason for reason in reversed(agree.REASONS) if holds.get(reason)), None)


def train_epoch(state, volumes, args, cfg):
    """Train to the end of the epoch, or until the ranks leave. Returns: the agreed reason to leave; None at the end."""
    progress, ranks, split, is_main = state["progress"], state["ranks"], volumes["split"], state["ranks"]["rank"] == 0
    train, listed, first_step, started = volumes["train"], volumes["listed"], progress["step_in_epoch"], time.time()
    steps = first_step + steps_left(cfg, len(train), listed, split, progress["samples"], progress["pairs"])
    bar, below = progress_bars(cfg, progress, steps, is_main)
    watchdog.new_step(progress["step"], "epoch")
    with bar, below:
        for volume_list, pair_list in epoch_batches(cfg, train, listed, progress, split, ranks,
                                                    draw=state["ddpm"].draw):
            state["steps_here"] += 1
            lr = set_learning_rate(state, steps, cfg)
            profile_step(state["profile"], progress["step"])
            line, agreed = train_step(state, volume_list, pair_list, cfg, save=save_is_due(state, cfg),
                                      leave=why_leave(state, args))
            advance(progress, split)
            spent = watchdog.end_step()
            line.update(lr=lr, samples=split["samples"])
            if is_main:
                watchdog.event("step", **line, spent=spent)
                show_progress(bar, below, progress, cfg, steps, first_step, split["samples"], time.time() - started)
            keep_pace(state["pace"], line, spent, state["watch"], state["writer"])
            if line["nonfinite"]:
                refuse_nonfinite(state, cfg)
            every, step = cfg["run.checkpoint_steps"], progress["step_in_epoch"]
            if agreed["leave"] or agreed["save"] or (every and step % every == 0 and step < steps):
                save_state(state, checkpoint.step_name(progress["epoch"], step, cfg["data.name"], cfg["model.name"]),
                           cfg)
                state["saved"] = time.time()
            if agreed["leave"]:
                return agreed["leave"]
            watchdog.new_step(progress["step"])
    return None


def set_learning_rate(state, steps, cfg):
    """Set and return the rate of the step that begins. steps: of a whole epoch."""
    progress = state["progress"]
    done = (progress["epoch"] * steps + progress["step_in_epoch"]) / (steps * cfg["run.epochs"])
    rate = learning_rate(cfg, progress["step"], done)
    for optimizer in state["optimizers"].values():
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rate


def save_is_due(state, cfg):
    """Whether rank 0 asks for a checkpoint, by run.checkpoint_minutes."""
    return state["ranks"]["rank"] == 0 and 0 < 60 * cfg["run.checkpoint_minutes"] < time.time() - state["saved"]


def advance(progress, split):
    """Count a step, with its samples and pairs of all ranks."""
    progress["step"] += 1
    progress["step_in_epoch"] += 1
    progress["samples"] += split["samples"]
    progress["pairs"] += split["pairs"]


def refresh_if_due(state, cfg):
    """Make the process group anew every so many epochs, which frees what drivers leak in it."""
    every, epoch = cfg["run.refresh_process_group_every"], state["progress"]["epoch"]
    if every and state["steps_here"] and epoch % every == 0:
        state["model"] = None
        launch.refresh(state["ranks"], state["device"], cfg)
        state["model"] = wrap(state["net"], state["ranks"], state["device"], state["gradients"], cfg)


def train(cfg, args, ranks, run):
    """Set up, continue or start, and train to the last epoch. Returns the exit code."""
    state, volumes = set_up(cfg, args, ranks, run)
    progress, leave = state["progress"], None
    while progress["epoch"] < cfg["run.epochs"] and not leave:
        watchdog.phase("epoch")
        refresh_if_due(state, cfg)
        started = time.time()
        leave = train_epoch(state, volumes, args, cfg)
        if not leave:
            finish_epoch(state, volumes["val"], cfg, started)
    return finish(state, leave, cfg)


def finish(state, leave, cfg):
    """Wait for the last write, part from the other ranks, and say how it ended. Returns the exit code."""
    progress, ranks = state["progress"], state["ranks"]
    profile_step(state["profile"], math.inf)
    watchdog.phase("checkpoint")
    finish_saving(state, last=True)
    if state["writer"]:
        writer.flush(state["writer"])
    agree.agree(ranks, progress["step"], "checkpoint")  # the others wait under this deadline
    weights = None if leave else gather(state["net"].state_dict(), ranks)
    watchdog.phase("leave")
    state.update(model=None, net=None, optimizers=None, ema=None)
    launch.leave(ranks)
    if leave in (None, "signal"):  # the job ends, so no copy of the volumes may stay on its nodes
        release(remove=True)
    if leave:
        leak = state["watch"]["leak"] if leave == "memory" else None
        watchdog.event("leave", reason=f"rank {ranks['rank']}: {leak['sentence']}" if leak else REASONS[leave])
        return PLANNED_RESTART
    if ranks["rank"] == 0:
        print(f"done: {cfg['run.epochs']} epochs, {progress['step']} steps, weights "
              f"{checkpoint.weights_sha256(weights)}\n"
              f"the network, for OM_register.py, OM_augment.py and Scripts/export_model.py: --model {state['run']}")
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
    watchdog.event("memory", epoch=epoch, strategy=cfg["run.strategy"], world_size=state["ranks"]["world_size"],
                   samples=progress["samples"], steps=sums["steps"],
                   **footprint(state["net"], state["optimizers"], state["device"]))
    scores, picture = {}, None
    if len(held_out) and ((epoch + 1) % cfg["run.val_every"] == 0 or last):
        watchdog.phase("evaluate")
        memory.trim()  # what the C library keeps of the steps would come on top of what the validation takes
        with ema_weights(state["net"], state["ema"]):
            scores, picture = validate(state, held_out, cfg)
        watchdog.phase("evaluate")
    if state["writer"]:
        entry = {**averages(sums), "steps": sums["steps"], "open_share": sums["open"] / max(sums["steps"], 1),
                 "nonfinite": sums["nonfinite"], **scores}
        watchdog.event("epoch", **{**entry, "epoch": epoch, "step": progress["step"]})
        show_epoch(state["writer"], entry, progress, cfg, time.time() - started)
        if picture and cfg["run.picture_every"] and ((epoch + 1) % cfg["run.picture_every"] == 0 or last):
            from Diffusion.figures import registration_figure  # here: matplotlib would slow the start of every rank
            figure = registration_figure(*picture, title=f"epoch {epoch + 1}")
            writer.add_figure(state["writer"], "registration", figure, progress["step"])
        writer.flush(state["writer"])
    metric = "val_dice" if scores.get("val_dice") is not None else "val_imgsim"
    value = scores.get(metric)
    if scores and "registration" not in modes_of(cfg):  # judged by its recovery; the best is what is highest
        metric, value = "-val_ang", -scores["val_ang"]
    progress.update(epoch=epoch + 1, step_in_epoch=0, samples=0, pairs=0, sums=new_sums())
    save_state(state, checkpoint.epoch_name(epoch + 1, cfg["data.name"], cfg["model.name"]), cfg,
               metrics=scores or None, best=(metric, value) if is_number(value) else None)


def is_number(value):
    """Whether a score can be compared: validation may have found none, or one that is not finite."""
    return value is not None and math.isfinite(value)


def main(argv=None):
    args = parse_arguments(argv)
    run = None
    try:
        cfg = load_config(args.config, args.overrides)
        ranks = launch.environment()
        if args.debug:
            launch.debug()
        modes_of(cfg)  # a config without any ends here, before a folder is made
        if args.dry_run:
            return dry_run(cfg, ranks["world_size"], MODES)
        run = launch.open_run(ranks, cfg, args.fresh)
        code = train(cfg, args, ranks, run)
    except OSError as error:
        if run or is_passing(error):
            raise
        print(f"error: {error.filename or 'the run'}: {error.strerror or error}: name another folder (run.models), or "
              "have this one's rights corrected.", file=sys.stderr)
        code = STOP
    except InputError as error:
        # From a loader's worker it comes with the worker's traceback in front of the sentence.
        sentence = str(error).strip().splitlines()[-1].split("InputError: ")[-1]
        number = passing_fault(error)
        if number:  # no input is wrong: a death, after which the launcher tries again
            raise OSError(number, sentence) from error
        watchdog.event("refused", error=sentence, phase=watchdog.STATE.get("name", "start"))
        print(f"error: {sentence}", file=sys.stderr)
        release(remove=True)
        code = STOP
    if run:
        launch.close_run(ranks, run, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
