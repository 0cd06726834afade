"""Train a deformation network in three modes: diffusion, contrastive, registration.

    python OM_train_3modes.py --config Config/config_om.yaml [--set key=value ...]

The same command continues an interrupted run from its newest checkpoint; bash_train_multi_nodes.sh starts many ranks.
The file follows the order of a run: arguments, data, network, the three modes, one step, the loop.
Diffusion/training_state.py defines the state of a run, saves it and restores it.
Exit codes: 0 done, 42 planned restart, 43 stop (bad input), others a crash.
"""
import Runtime.unix  # noqa: F401  first: an outdated Python, or Windows, stops here with one sentence

# isort: split
import argparse
import contextlib
import errno
import math
import os
import sys
import time
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from Dataloader.cache import for_this_user
from Dataloader.dataset import (
    NO_LABELS,
    agree_on_labels,
    describe_data,
    epoch_batches,
    read_datasets,
    require_same_everywhere,
)
from Dataloader.sampler import steps_left
from Dataloader.staging import release
from Diffusion import embeddings, graphs, losses, optim, predict, training_state, validation
from Diffusion.batch_augment import augment, augment_maps, remap_intensities
from Diffusion.cost import dry_run
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.fields import warp
from Diffusion.networks import build_network
from Inference.load_model import find_checkpoint, load_state
from Runtime import agree, checkpoint, launch, memory, watchdog
from Runtime.config import load_config, modes_of
from Runtime.device import autocast, pick_device, prepare_device, send
from Runtime.errors import (
    DONE,
    PLANNED_RESTART,
    STOP,
    InputError,
    fault_of,
    keep_freed_memory,
    parse_options,
    unbreakable_output,
)
from Runtime.files import is_passing, passing_fault, patiently
from Runtime.global_batch import split_step
from Runtime.keyed_random import uniform
from Runtime.profile import new_profile, parse_steps, profile_step
from Runtime.progress import (
    Progress,
    add_figure,
    add_terms,
    advance,
    averages,
    begin_epoch,
    flush,
    keep_pace,
    new_pace,
    new_sums,
    of_their_share,
    progress_bars,
    show_epoch,
    show_progress,
)
from Runtime.provenance import began_from
from Supervisor.run import close_run, open_run

WHY_LEFT = {"steps": "--max-steps-before-restart", "time": "--max-seconds-before-restart",
            "signal": "requested by a signal", "memory": "memory of another rank runs out"}


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Train a deformation network in three modes. Run the same command "
                                     "again to continue an interrupted run.")
    parser.add_argument("--config", required=True, help="config file, e.g. Config/config_om.yaml; one that begins with "
                        "base: lists only what differs")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys, e.g. --set data.root=/data/brains model.dims=2")
    parser.add_argument("--fresh", action="store_true", help="start over in a new folder beside the old one")
    parser.add_argument("--init-from", metavar="F", help="start a new run from the weights of a checkpoint, a "
                        ".safetensors file, a run's folder, hf:OWNER/NAME of a model hub, or universal, the network "
                        "for any volumes")
    parser.add_argument("--dry-run", action="store_true", help="build everything, print sizes and costs, and exit")
    parser.add_argument("--max-steps-before-restart", type=int, default=0, metavar="N",
                        help="save after N steps and exit with 42, so that a launcher starts again (0 = off)")
    parser.add_argument("--max-seconds-before-restart", type=float, default=0, metavar="S",
                        help="the same after S seconds; a launcher passes on its own time limit (0 = off)")
    parser.add_argument("--debug", action="store_true",
                        help="locate a crash: blocking launches, checked collectives, all details of the libraries")
    parser.add_argument("--profile", metavar="START:STEPS",
                        help="trace STEPS steps of rank 0, from step START on, for the report of the run")
    args = parse_options(parser, argv)
    if not (args.max_steps_before_restart >= 0 and args.max_seconds_before_restart >= 0):  # NaN is no number either
        parser.error("--max-steps-before-restart and --max-seconds-before-restart take a number of at least 0")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Data: the inputs of the modes, from the volumes and pairs of a step. A batch is a dict of named tensors.
# ---------------------------------------------------------------------------------------------------------------------

def deform_batch(images, rng_keys, ddpm, cfg, drawn=None):
    """The input of modes 1 and 2 for a batch: x_t, the target field, t, and the condition made from the augmented x0.

    images: (B, C, *spatial) as stored, C channels, usually 1. rng_keys: B tuples (seed, epoch, position), see
    Runtime/keyed_random.py. drawn: ddpm.draw(rng_keys), if already computed.
    """
    x0 = augment(images, rng_keys, cfg)                                        # (B, C, *spatial)
    times = ddpm.draw_times(rng_keys)
    xt, target_field = ddpm.diffuse(x0, times, rng_keys, drawn)                # (B, C, *spatial), (B, N, *spatial)
    return {"xt": xt, "target_field": target_field, "t": send(torch.tensor(times), x0.device),
            "condition": make_condition(x0, cfg["model.condition_type"], rng_keys),
            "use_condition": send(uniform(rng_keys, "keep") >= cfg["model.condition_dropout"], x0.device)}


def volume_batches(run, volumes):
    """The batches of modes 1 and 2. volumes: from `epoch_batches`.

    Those of `deform_batch`, plus subjects, mode 2's queue and its target embeddings (None without averaged weights).
    """
    batches, queue = [], {name: value for name, value in run.queue.items() if name != "next"}
    for images, positions, subjects, drawn in volumes:
        rng_keys = [(run.cfg["run.seed"], run.progress.epoch, position) for position in positions.tolist()]
        batches.append({**deform_batch(send(images, run.device), rng_keys, run.ddpm, run.cfg, drawn),
                        "subjects": send(subjects, run.device), "queue": queue, "targets": None})
    if any(mode.step is step_contrastive for mode in run.modes):
        targets = embeddings.target_embeddings(run.net, run.ema, batches, run.cfg, run.graphs)
        batches = [{**batch, "targets": both} for batch, both in zip(batches, targets)]
    return batches


def pair_batches(run, pairs):
    """The batches of mode 3. pairs: from `epoch_batches`, with moving and fixed volumes alternating.

    Besides the images, if the config needs them: "seen", the remapped images that the network sees instead; "mask" and
    "label", maps of moving and fixed. "label" also says which volumes of a pair have labels, and lists all label
    values.
    """
    batches, cfg, device = [], run.cfg, run.device
    for images, positions, _, maps in pairs:
        # Negative positions: the draws of mode 3 must not be those of mode 1.
        rng_keys = [(cfg["run.seed"], run.progress.epoch, -1 - position) for position in positions.tolist()]
        deformation = run.ddpm.draw_pair_fields(images.shape[2:], rng_keys, device, cfg["augment.deform"])
        both = augment(send(images, device), rng_keys, cfg, deformation, paired=True)      # (2 B, C, *spatial)
        batch = {"moving": both[0::2], "fixed": both[1::2]}                    # (B, C, *spatial) each
        if cfg["augment.remap"]:
            seen = remap_intensities(both, rng_keys, cfg)                                  # (2 B, C, *spatial)
            batch["seen"] = {"moving": seen[0::2], "fixed": seen[1::2]}        # (B, C, *spatial) each
        for kind, stored in maps.items():
            both = augment_maps(send(stored, device), rng_keys, cfg, deformation, paired=True)  # (2 B, 1, *spatial)
            batch[kind] = {"moving": both[0::2], "fixed": both[1::2]}          # (B, 1, *spatial) each
        if "label" in maps:
            has = maps["label"].flatten(1)[:, 0] != NO_LABELS                  # (2 B,), on the host: no device sync
            batch["label"].update(labelled=has.view(-1, 2).tolist(), values=run.labels)
        batches.append(batch)
    return batches


# ---------------------------------------------------------------------------------------------------------------------
# Network: data sets, network and optimizers of a run, new or restored from its newest checkpoint
# ---------------------------------------------------------------------------------------------------------------------

def is_untaught(cfg, args):
    """Whether the network segments but nothing has taught it: no loss, and no weights to start from."""
    return cfg["model.structures"] and not cfg["loss.segment"] and not args.init_from


def set_up(cfg, args, ranks, folder):
    """Read the data, join the ranks, build the network, and continue or start. Returns: Run."""
    launched, device = time.monotonic(), pick_device(cfg["run.device"], ranks.local_rank)
    prepare_device(device, cfg["run.threads"])
    # Gradients of a softmax are full of subnormal numbers, with which Intel's CPUs compute a hundred times more slowly.
    torch.set_flush_denormal(True)
    watchdog.phase("data set")
    dataset, held_out, listed = read_datasets(cfg, ranks=ranks, inputs={mode.data for mode in modes_of(cfg, MODES)})
    split = split_step(cfg, ranks.world_size, ranks.step)
    watchdog.phase("join")
    launch.join(ranks, device, cfg)

    watchdog.phase("restore")
    data = describe_data(cfg, dataset, held_out)
    require_same_everywhere(ranks, data)
    newest = training_state.newest_checkpoint(folder, ranks)
    if (newest and args.init_from and os.environ.get("OMNIMORPH_ROUND", "0") == "0"
            and began_from(folder) != args.init_from):  # else the command that began the run, given again
        raise InputError(f"--init-from: {folder} has checkpoints already; leave --init-from out to continue that "
                         f"run, or add --fresh to start a new one from {args.init_from}.")
    if is_untaught(cfg, args) and not newest:
        raise InputError(f"model.structures is {cfg['model.structures']}, but loss.segment is 0, so nothing teaches "
                         "this new network to segment: give loss.segment and loss.dice a value above 0, set "
                         "model.structures to 0, or begin from a network that segments (--init-from).")
    with for_this_user(f"--init-from {args.init_from}"):
        start = newest or (find_checkpoint(args.init_from) if args.init_from else None)
    place = "cpu" if cfg["run.strategy"] == "fsdp" else device  # with fsdp no device ever holds the whole network
    content = patiently(lambda: load_state(start, place), training_state.READ_AGAIN_S, start) if start else None

    settled = {"run.amp": training_state.agree_on_precision(cfg, ranks, device, content if newest else None)}
    labels = agree_on_labels(ranks, dataset.found_labels, cfg) if cfg["loss.dice"] else []
    if cfg["loss.segment"]:  # the checkpoint records what the network segments
        settled["registration.labels"] = ",".join(map(str, labels))
    elif cfg["model.structures"] and content:  # it still segments what it has learned
        settled["registration.labels"] = (content["config"].get("registration.labels")
                                          or cfg["registration.labels"])
    cfg = cfg | settled  # a new dict: the config as read stays unchanged
    run = training_state.Run(
        cfg=cfg, modes=modes_of(cfg, MODES), terms=TERMS, net=build_network(cfg, place),
        queue=embeddings.new_queue(cfg, device), data=data, progress=Progress(sums=new_sums(TERMS)),
        folder=folder, ranks=ranks, device=device, dataset=dataset, held_out=held_out, listed=listed, split=split,
        labels=send(torch.tensor(labels), device), ddpm=DeformDDPM(cfg), gradients=optim.new_gradients(cfg, device),
        watch=memory.new_watch(device, cfg["run.memory_limit_gb"]),
        graphs=None if args.debug else graphs.new_graphs(cfg, device, ranks), launched=launched, saved=launched)
    if content:
        training_state.restore(run, content, start, continues=bool(newest))
        watchdog.phase("restore", "optimizers")  # the agreement is over, and what follows is not a part of a step
    run.model = optim.wrap(run.net, ranks, device, run.gradients, cfg)
    run.optimizers = optim.make_optimizers(run.net, ranks, cfg, [mode.name for mode in run.modes])
    run.ema = optim.new_ema(run.net, cfg, content.get("ema") if newest else None)
    if newest:
        for change in optim.load_optimizers(run.net, run.optimizers, content["optimizer"]):
            if ranks.rank == 0:
                print(f"changed since the checkpoint: {change}")
    return run


# ---------------------------------------------------------------------------------------------------------------------
# The three modes: from a batch to a weighted loss and its terms
# ---------------------------------------------------------------------------------------------------------------------

def step_diffusion(net, batch, cfg):
    """Mode 1: undo a random deformation, seeing a few slices of the original."""
    with autocast(batch["xt"].device, cfg["run.amp"]):
        pred_field = net(batch["xt"], batch["t"], batch["condition"], batch["use_condition"])   # (B, N, *spatial)
    dist, ang = (term.mean() for term in losses.recovery_terms(pred_field, batch["target_field"]))
    regul = losses.regularity(pred_field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.dist"] * dist + cfg["loss.ang"] * ang + cfg["loss.regul"] * regul
    return loss, {"ang": ang, "dist": dist, "regul": regul}


def step_contrastive(net, batch, cfg):
    """Mode 2: recognise a deformed volume by its own slices among embeddings of other subjects.

    The third result goes into the queue: the target embeddings, from the averaged weights if the run keeps them.
    """
    queue, subjects = batch["queue"], batch["subjects"]
    of_image, of_condition = embeddings.embed(net, batch, cfg)                            # (B, E) each
    image, condition = batch["targets"] or (of_image, of_condition)
    allowed = (queue["subjects"] >= 0) & (queue["subjects"] != subjects[:, None])          # (B, K)
    loss = cfg["loss.contrastive"] * 0.5 * (
        losses.info_nce(of_image, condition, queue["conditions"], allowed, cfg["contrastive.temperature"])
        + losses.info_nce(of_condition, image, queue["images"], allowed, cfg["contrastive.temperature"]))
    return loss, {}, (image.detach(), condition.detach())


def step_registration(net, batch, cfg):
    """Mode 3: align two volumes, seeing all of the fixed one. Only the loss sees masks and labels."""
    moving, fixed = batch["moving"], batch["fixed"]                            # (B, C, *spatial) each
    seen = batch.get("seen", batch)  # with augment.remap only the network sees remapped intensities
    shares = None
    if cfg["loss.segment"]:
        # field (B, N, *spatial), logits (2 B, K + 1, *spatial)
        field, logits = predict.align(net, seen["moving"], seen["fixed"], cfg, segment=True)
        shares = losses.structure_shares(logits.detach()).chunk(2)             # (B, K, *spatial) each
    else:
        field = predict.align(net, seen["moving"], seen["fixed"], cfg)         # (B, N, *spatial)
    if cfg["registration.masks"]:
        warped, inside = losses.warp_inside(moving, field, **batch["mask"])    # (B, C, *spatial), (B, 1, *spatial)
    else:
        warped, inside = warp(moving, field), None                             # (B, C, *spatial)
    imgsim = -losses.image_similarity(warped, fixed, cfg, inside)
    imgmse = losses.mean_square(warped - fixed, inside)
    smoothness = losses.regularity(field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.imgsim"] * imgsim + cfg["loss.imgmse"] * imgmse + cfg["loss.ddf"] * smoothness
    terms = {"imgsim": imgsim, "imgmse": imgmse, "ddf": smoothness}
    if cfg["loss.dice"]:
        dice, labelled = losses.label_terms(field, **batch["label"], shares=shares)  # of pairs with labels; their share
        loss = loss + cfg["loss.dice"] * dice
        terms.update(dice=dice * labelled, labelled=labelled)                  # see PARTIAL of Runtime/progress.py
    if cfg["loss.segment"]:
        segment, segmented = losses.segmentation_terms(logits, **batch["label"])      # of the volumes with labels
        loss = loss + cfg["loss.segment"] * segment
        terms.update(segment=segment * segmented, segmented=segmented)
    return loss, terms


class Mode(NamedTuple):
    """One mode of the training, for all other code. To add a mode, write a step function and an entry in MODES."""

    name: str
    step: object                   # (net, batch, cfg) -> loss, {term: value}, maybe embeddings for the queue
    data: str                      # its input: "volumes" or "pairs", batches made by a function above
    weights: tuple                 # keys of `loss` that weigh its terms: if all are 0 the mode is skipped
    curve: str                     # the name under which its loss is recorded
    terms: tuple                   # names of the terms that are always listed
    clip_norm: str | None = None   # key of the limit on its gradient norm; None for no limit
    gate: str | None = None        # key: it runs in steps whose `ang`, of the global batch, is below; None: in all
    needs_condition: bool = False  # whether it needs a second volume
    unused: tuple = ()             # tensors of its batches that it does not read: freed before it if nothing later does


# In the order in which a step runs them.
MODES = {mode.name: mode for mode in (
    Mode("diffusion", step_diffusion, "volumes", ("dist", "ang", "regul"), "total", ("ang", "dist", "regul")),
    Mode("contrastive", step_contrastive, "volumes", ("contrastive",), "contrastive", (), "contrastive.clip_norm",
         needs_condition=True, unused=("target_field", "use_condition")),
    Mode("registration", step_registration, "pairs", ("imgsim", "imgmse", "ddf", "dice"), "regist",
         ("imgsim", "imgmse", "ddf"), "registration.clip_norm", "registration.gate", needs_condition=True))}
TERMS = [name for mode in MODES.values() for name in (mode.curve, *mode.terms)]


# ---------------------------------------------------------------------------------------------------------------------
# One step
# ---------------------------------------------------------------------------------------------------------------------

class ModeResult(NamedTuple):
    """The result of a mode in one step."""

    agreed: agree.Agreed
    terms: dict   # {name: mean over the batches of all ranks}
    moved: bool   # whether it changed the weights
    norm: float   # of the gradient, before clipping
    kept: list    # further results of its step function, per batch


def run_mode(run, mode, batches, **raised):
    """One mode of a step: forward of each batch of this rank, one agreement, backward, clip, optimizer step.

    batches: dicts of named tensors for the step function. raised: requests of this rank, see agree.agree.
    Returns: ModeResult.
    """
    alone = run.model is run.net  # no DDP around it: one rank, or fsdp
    optimizer = run.optimizers.get(mode.name) or run.optimizers["shared"]  # see optim.moments
    optimizer.zero_grad(set_to_none=True)
    run.gradients.parts = len(batches) if alone else len(batches) * run.ranks.world_size

    # Gradients of all batches but the last accumulate locally; the last backward pass sums them over the ranks.
    rows, kept, named = [], [], []
    for number, batch in enumerate(batches, 1):
        is_last = number == len(batches)
        with contextlib.nullcontext() if alone or is_last else run.model.no_sync():
            watchdog.phase("forward", mode.name)
            result = graphs.run(run.graphs, mode.name, lambda given: mode.step(run.model, given, run.cfg), batch,
                                run.net.parameters())
            loss, terms, *beside = losses.checked(mode, result)
            rows.append(torch.stack([value.detach().float() for value in (loss, *terms.values())]))
            named.append([*terms])
            kept += beside
            if not is_last:
                watchdog.phase("accumulate", mode.name)
                loss.backward()
                optim.set_aside(run.gradients, run.net.parameters())

    # The first point where the host waits for the device, until the forward passes are done.
    same = named.count(named[0]) == len(named)
    values = torch.stack(rows if same else rows[-1:]).cpu().tolist()
    means = {name: sum(value / len(rows) for value in column)
             for name, column in zip([mode.curve, *terms], zip(*values))}
    finite = all(math.isfinite(row[0]) for row in values)
    if not finite:
        watchdog.event("nonfinite", mode=mode.name, terms=means)
    agreed = agree.agree(run.ranks, run.progress.step, mode.name, agree.fingerprint(batches), nonfinite=not finite,
                         terms=means.values(), names=means if same else None, **raised)
    watchdog.phase("backward", mode.name)
    loss.backward()  # even if the loss is not finite: DDP needs a backward after each forward
    if alone:
        optim.put_together(run.gradients, run.net.parameters())

    # All ranks have the same gradients, or slices of them, so the norm is the same.
    watchdog.phase("optimizer", mode.name)
    norm = get_total_norm([p.grad for p in run.net.parameters() if p.grad is not None])
    if mode.clip_norm:
        clip_grads_with_norm_(run.net.parameters(), run.cfg[mode.clip_norm], norm)
    norm = optim.whole(norm).item()
    terms, moved = dict(zip(means, agreed.terms)), not agreed.nonfinite and math.isfinite(norm)
    if moved:
        optimizer.step()
        add_terms(run.progress.sums, terms)
    elif not agreed.nonfinite:  # else the rank with the loss has reported it
        watchdog.event("nonfinite", mode=mode.name, terms=means, norm=str(norm))
    return ModeResult(agreed, terms, moved, norm, kept)


def train_step(run, volumes, pairs, **raised):
    """One step of all modes of the training.

    volumes, pairs: lists of batches, from `epoch_batches`. raised: requests of this rank, see agree.agree; they go into
    the agreement of the first mode.
    Returns: the step's log line, what the ranks agreed on in its first mode, and the names of the modes whose loss or
    gradient was not finite.
    """
    cfg, progress, results = run.cfg, run.progress, {}
    compare = cfg["run.checksum_every"] and progress.step % cfg["run.checksum_every"] == 0
    raised.update(weights=optim.replicated(run.net) if compare else None)
    watchdog.phase("deform")
    batches = held = None
    for number, mode in enumerate(run.modes, 1):
        recovery = results.get("diffusion")  # without mode 1 there is no gate
        if mode.gate and recovery and not (recovery.moved and recovery.terms["ang"] < cfg[mode.gate]):
            continue
        if mode.data != held:  # frees the input of the earlier modes first
            batches = None
            batches = volume_batches(run, volumes) if mode.data == "volumes" else pair_batches(run, pairs)
            held = mode.data
        result = run_mode(run, mode, batches, **({} if results else raised))
        if result.kept and result.moved:
            subjects = torch.cat([subjects for _, _, subjects, _ in volumes])
            embeddings.push_of_all_ranks(run.queue, result.kept, subjects, run.ranks, run.device)
        results[mode.name] = result
        later = [other.unused for other in run.modes[number:] if other.data == mode.data]
        batches = [{name: value for name, value in batch.items() if not all(name in unused for unused in later)}
                   for batch in batches]
        memory.empty_cache(cfg, run.device)

    optim.update_ema(run.ema, run.net, cfg, progress.step)
    failed = [name for name, result in results.items() if not result.moved]
    gate_open = any(MODES[name].gate for name in results)
    progress.sums.steps += 1
    progress.sums.open += gate_open
    progress.sums.nonfinite += len(failed)
    progress.nonfinite_in_a_row = progress.nonfinite_in_a_row + 1 if failed else 0
    terms = {}
    for name, result in results.items():
        twice = terms.keys() & result.terms
        if twice:
            raise InputError(f"mode {name} and an earlier one both return a loss term {min(twice)}; rename one.")
        terms.update(result.terms)
    line = {"epoch": progress.epoch, "ang": terms.get("ang"), "open": gate_open, "nonfinite": len(failed),
            "terms": of_their_share(terms), "norms": {name: result.norm for name, result in results.items()}}
    return line, next(iter(results.values())).agreed, failed


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------

def train(cfg, args, ranks, folder):
    """Set up, continue or start, and train to the last epoch. Returns the exit code."""
    run = set_up(cfg, args, ranks, folder)
    cfg, progress, split, is_main = run.cfg, run.progress, run.split, ranks.rank == 0
    inputs = {mode.data for mode in run.modes}
    if is_main and progress.epoch < cfg["run.epochs"]:
        training_state.announce(run)
    elif is_main:  # the records stay those of the launches that have trained
        print(f"{folder}: all of its {progress.epoch} epochs are done, so nothing is trained: raise run.epochs to "
              "train on, or add --fresh to begin a new run")
    profile, pace = new_profile(args.profile, progress.step, ranks.rank, folder, run.device), new_pace()
    # Steps of this launch, seconds of the last one and of the last validation, the agreed reason to leave.
    steps_here, step_s, validation_s, leave = 0, 0.0, 0.0, None

    while progress.epoch < cfg["run.epochs"]:
        watchdog.phase("epoch")
        refresh_every = cfg["run.refresh_process_group_every"]
        if refresh_every and steps_here and progress.epoch % refresh_every == 0:  # frees what drivers leak in the group
            run.model = None
            launch.refresh(ranks, run.device, cfg)
            run.model = optim.wrap(run.net, ranks, run.device, run.gradients, cfg)
        began, first_step = time.monotonic(), progress.step_in_epoch
        paced = first_step, began  # where the bar begins to count, and when
        left = steps_left(cfg, len(run.dataset), run.listed, split, progress.samples, progress.pairs, inputs)
        steps, length = first_step + left, progress.samples / split.samples + left  # length: in steps of this size
        bar, below = progress_bars(cfg, progress, steps, is_main)
        watchdog.new_step(progress.step, "epoch")
        with bar, below:
            for volumes, pairs in epoch_batches(cfg, run.dataset, run.listed, progress, split, ranks,
                                                run.ddpm.draw, inputs):
                steps_here, step_began = steps_here + 1, time.monotonic()
                done = (progress.epoch * length + progress.samples / split.samples) / (length * cfg["run.epochs"])
                lr = optim.learning_rate(cfg, progress.step, done)
                for optimizer in run.optimizers.values():
                    for group in optimizer.param_groups:
                        group["lr"] = lr * group["share"]
                if profile_step(profile, progress.step):
                    agree.agree(ranks, progress.step, "profile")  # the others wait while rank 0 writes

                # Requests of this rank: to leave after this step, for the strongest reason, and to save.
                reasons = {"steps": 0 < args.max_steps_before_restart <= steps_here,
                           # Another step like the last one, after this one, would end too late.
                           "time": 0 < args.max_seconds_before_restart < step_began - run.launched + 2 * step_s,
                           "signal": watchdog.stop_requested(), "memory": memory.watch(run.watch, progress.step)}
                wish = next((reason for reason in reversed(agree.REASONS) if reasons.get(reason)), None)
                due = is_main and 0 < 60 * cfg["run.checkpoint_minutes"] < time.monotonic() - run.saved

                line, agreed, failed = train_step(run, volumes, pairs, leave=wish, save=due)
                advance(progress, split)
                spent = watchdog.end_step()
                step_s = time.monotonic() - step_began
                line.update(lr=lr, samples=split.samples)
                if is_main:
                    watchdog.event("step", **line, spent=spent)
                    show_progress(bar, below, progress, cfg, steps, *paced, split.samples)
                    if steps_here == 1:  # it may have compiled: the time left follows from the others
                        paced = progress.step_in_epoch, time.monotonic()
                keep_pace(pace, line, spent, run.watch, run.curves)
                if failed:
                    training_state.refuse_nonfinite(run, failed)

                leave, step, save_every = agreed.leave, progress.step_in_epoch, cfg["run.checkpoint_steps"]
                if leave or agreed.save or (save_every and step % save_every == 0 and step < steps):
                    training_state.save_step(run)
                if leave:
                    break
                watchdog.new_step(progress.step)
        if leave:
            break

        # The end of an epoch: validation, log, TensorBoard, a checkpoint.
        epoch, sums, last = progress.epoch, progress.sums, progress.epoch + 1 == cfg["run.epochs"]
        validate = len(run.held_out) and ((epoch + 1) % cfg["run.val_every"] == 0 or last)
        if validate:
            # A validation may last for minutes: leave before it rather than be killed in it, and validate after the
            # restart. A launch that has made no step validates in any case, or it would be restarted for ever.
            limit = args.max_seconds_before_restart
            late = 0 < limit < time.monotonic() - run.launched + validation_s
            wish = "signal" if watchdog.stop_requested() else "time" if late else None
            leave = agree.agree(ranks, progress.step, "validation", leave=wish if steps_here else None).leave
            if leave or (limit and steps_here and not validation_s):  # nobody knows how long the first one takes
                training_state.save_step(run)
            if leave:
                break
        watchdog.event("memory", epoch=epoch, strategy=cfg["run.strategy"], world_size=ranks.world_size,
                       samples=progress.samples, steps=sums.steps,
                       **optim.footprint(run.net, run.optimizers, run.device))
        scores, picture = {}, None
        if validate:
            watchdog.phase("evaluate")
            validation_began = time.monotonic()
            memory.trim()  # else memory that the C library keeps from the steps adds to the validation's
            with optim.ema_weights(run.net, run.ema):
                scores, picture = validation.validate(run, run.held_out)
            validation_s = time.monotonic() - validation_began
            watchdog.phase("evaluate")
        if run.curves:
            entry = {**averages(sums), "steps": sums.steps, "open_share": sums.open / max(sums.steps, 1),
                     "nonfinite": sums.nonfinite, **scores}
            watchdog.event("epoch", **{**entry, "epoch": epoch, "step": progress.step})
            show_epoch(run.curves, entry, progress, cfg, time.monotonic() - began)
            flush(run.curves)

        begin_epoch(progress, epoch + 1, run.terms)
        names = [mode.name for mode in run.modes]
        best = validation.best_by(scores, names)
        name = checkpoint.epoch_name(epoch + 1, cfg["data.name"], cfg["model.name"])
        measurable = len(run.held_out) > ("registration" in names)  # one volume makes no pair
        best = best and (*best, validation.measured_on(cfg, run.held_out)) if measurable else ()
        training_state.save(run, name, metrics=scores or None, best=best)

        # After the save: a failing picture must not lose the epoch.
        picture_every = cfg["run.picture_every"]
        if picture_every and ((epoch + 1) % picture_every == 0 or last):
            watchdog.phase("evaluate")  # on every rank: verdicts compare the numbers of phases that ranks have entered
            if run.curves and picture:
                from Diffusion.figures import registration_figure  # matplotlib would slow the start of every rank
                add_figure(run.curves, "registration", registration_figure(*picture, title=f"epoch {epoch + 1}"),
                           progress.step - 1)
                flush(run.curves)

    # Wait for the last write, leave the process group, and report the outcome.
    profile_step(profile, math.inf)
    watchdog.phase("checkpoint")
    training_state.finish_saving(run, last=True)
    if run.curves:
        flush(run.curves)
    agree.agree(ranks, progress.step, "checkpoint")  # the others wait under this deadline
    weights = None if leave else optim.gather(run.net.state_dict(), ranks)
    watchdog.phase("leave")
    run.model = run.net = run.optimizers = run.ema = None
    launch.leave(ranks)
    if leave in (None, "signal"):  # the job ends, so no copy of the volumes may stay on its nodes
        release(remove=True)
    if leave:
        why, leak = {"reason": WHY_LEFT[leave]}, run.watch["leak"]
        if leave == "memory" and memory.runs_out_soon(leak):  # else that of another rank does
            why = {"reason": f"rank {ranks.rank}: {leak['sentence']}", "steps_left": leak["steps_left"]}
        watchdog.event("leave", **why)
        return PLANNED_RESTART
    if is_main:
        if progress.nonfinite_in_a_row:
            print(f"warning: the loss or its gradient was not finite in the last {progress.nonfinite_in_a_row} of "
                  f"{progress.step} steps, from which nothing was learned: look at the data, or lower optim.lr or the "
                  "weights of the losses.", file=sys.stderr)
        print(f"done: {progress.epoch} epochs, {progress.step} steps, weights "
              f"{checkpoint.weights_sha256(weights)}\n"
              f"the network, for OM_register.py, OM_augment.py and OM_export.py: --model {folder}")
    return DONE


@unbreakable_output()
def main(argv=None):
    args = parse_arguments(argv)
    keep_freed_memory()
    run = None
    try:
        cfg = load_config(args.config, args.overrides)
        ranks = launch.environment()
        if args.debug:
            launch.debug()
        if args.profile:
            parse_steps(args.profile)  # a mistake in it is reported before anything is read
        modes_of(cfg, MODES)  # a config without any mode stops here, before a folder is made
        if args.dry_run:
            if is_untaught(cfg, args):  # a run that continues may have learned it
                print("warning: loss.segment is 0, so nothing teaches a new network its model.structures: unless it "
                      "continues a run, training refuses this without --init-from.", file=sys.stderr)
            return dry_run(cfg, ranks.world_size, MODES)
        run = open_run(ranks, cfg, args.fresh)
        code = train(cfg, args, ranks, run)
    except launch.NotMet as error:
        if watchdog.STATE["file"] is not None:  # for the launcher's verdict
            raise
        print(f"error: {error}.", file=sys.stderr)
        return 1  # the code of a crash: whatever starts the ranks may try again
    except OSError as error:
        # Once a rank has a log, the watchdog's hook says it, and the log needs the exception.
        if not run and watchdog.STATE["file"] is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"error: {fault_of(error, 'the run')}: make room, or name another folder (run.models).",
                  file=sys.stderr)
            return 1  # the code of a crash: a launcher tries again
        # A launcher tries again, and its verdict names the exception.
        if is_passing(error) or run and not (isinstance(error, PermissionError) and ranks.attempt is not None):
            raise
        fault = fault_of(error, "the run").splitlines()[-1]  # that of a loader's worker ends with it
        sentence = (f"{fault}: name another folder (run.models), or have the permissions of this "
                    "one corrected.")
        watchdog.event("refused", error=sentence, phase=watchdog.STATE["name"])
        print(f"error: {sentence}", file=sys.stderr)
        code = STOP
    except InputError as error:
        # An error from a loader's worker has the worker's traceback in front of the sentence.
        sentence = str(error).strip().splitlines()[-1].split("InputError: ")[-1]
        number = passing_fault(error)
        if number:  # not bad input: end as a crash, so that the launcher tries again
            raise OSError(number, sentence) from error
        watchdog.event("refused", error=sentence, phase=watchdog.STATE["name"])
        print(f"error: {sentence}", file=sys.stderr)
        release(remove=True)
        code = STOP
    if run:
        close_run(ranks, run, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
