"""The state of a training: what a checkpoint holds, and how it is saved and restored.

A checkpoint is one flat dict (Runtime/checkpoint.py): model, optimizer, queue, config, data, the averaged weights if
any, and the fields of Progress. It holds no generator states: every draw is keyed (Runtime/keyed_random.py).
"""
import concurrent.futures
import glob
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from Dataloader.cache import some
from Dataloader.dataset import VolumeDataset, as_csv, compare_data, seen_by, with_gone
from Dataloader.sampler import steps_left
from Diffusion.diffuser import DeformDDPM
from Diffusion.optim import GradientSums, compare_moments, gather, gather_state, replicated, whole
from Runtime import agree, checkpoint, launch, watchdog
from Runtime.device import PRECISIONS, describe, precision
from Runtime.errors import InputError
from Runtime.files import listed, remove_leftovers, write_file
from Runtime.global_batch import Split, fix_step
from Runtime.progress import Progress, begin_epoch, from_saved, new_writer, to_saved
from Runtime.provenance import save_launch

READ_AGAIN_S = 20.0  # to retry a checkpoint that cannot be read; after that the run crashes
MOST_FAILED_SAVES = 3  # of different steps, in a row


@dataclass
class Run:
    """One training, as one rank sees it."""

    cfg: dict                    # as read, with what the ranks have agreed on: run.amp and registration.labels
    modes: list                  # the entries of the training script's MODES that this training has
    terms: list                  # names of the terms that are always listed
    # What a checkpoint holds.
    net: torch.nn.Module         # with fsdp this rank's slices
    queue: dict                  # from embeddings.new_queue
    data: str                    # from dataset.describe_data
    progress: Progress
    # What lives only in this process.
    folder: Path                 # of the run
    ranks: launch.Ranks
    device: torch.device
    dataset: VolumeDataset
    held_out: VolumeDataset
    listed: list | None          # pairs of volumes, see read_datasets
    split: Split
    labels: torch.Tensor         # that loss.dice compares
    ddpm: DeformDDPM
    gradients: GradientSums
    watch: dict                  # from memory.new_watch
    graphs: dict | None          # from graphs.new_graphs
    launched: float              # time.monotonic() when this launch began
    # Set once the weights are restored; a checkpoint holds the first two as well.
    optimizers: dict = field(default_factory=dict)  # {name: Adam}, see optim.moments
    ema: dict | None = None      # averaged weights
    model: torch.nn.Module | None = None            # the network as the step functions call it, maybe in DDP
    curves: dict | None = None   # from progress.new_writer, on rank 0
    saving: concurrent.futures.Future | None = None  # the checkpoint write in progress
    saving_step: int = 0         # the step that it is of
    failed_saves: set = field(default_factory=set)  # steps of the writes that have failed since the last good one
    write_s: float = 0.0         # duration of the last write
    saved: float = 0.0           # time.monotonic() of the last checkpoint within an epoch


def save_step(run):
    """Save the checkpoint of a step within an epoch. Every rank calls this."""
    cfg, progress = run.cfg, run.progress
    save(run, checkpoint.step_name(progress.epoch, progress.step_in_epoch, cfg["data.name"], cfg["model.name"]))
    run.saved = time.monotonic()


def save(run, relative, metrics=None, best=None):
    """Save one checkpoint, once all ranks agree on the tensors that each holds whole. Every rank calls this.

    The step waits only for the copy: a thread of rank 0 writes, reads back, and removes what the config does not keep.
    """
    cfg, ranks, step = run.cfg, run.ranks, run.progress.step
    watchdog.phase("checkpoint")
    finish_saving(run)  # before the agreement, where the others wait for rank 0's disk, not in a device's collective
    agree.agree(ranks, step, "checkpoint", weights=replicated(run.net, run.optimizers))
    watchdog.phase("checkpoint")
    weights, adam = gather_state(run.net, run.optimizers, ranks)
    ema = gather(run.ema, ranks)
    if ranks.rank == 0:
        content = {"format": 1, "model": weights, "optimizer": adam, "queue": run.queue, "config": cfg,
                   "data": run.data, **({"ema": {**weights, **ema}} if ema else {}), **to_saved(run.progress)}
        began, run.saving_step = time.monotonic(), step

        def note_time(done):
            run.write_s = time.monotonic() - began

        run.saving = checkpoint.save_in_background(
            run.folder, relative, content, metrics, best, (cfg["run.keep_last"], cfg["run.keep_every"], 2))
        run.saving.add_done_callback(note_time)
    # Wait here, under this deadline, not in the next step, and learn from rank 0 how long the previous write took.
    agreed = agree.agree(ranks, step, "checkpoint", terms=[run.write_s])
    watchdog.learn_write(agreed.terms[0] * ranks.world_size)


def finish_saving(run, last=False):
    """Wait for the write in progress. A failed write ends the run only if it is the last one or that of the third step
    in a row; before and after a validation the same step is written.
    """
    if run.saving is None:
        return
    try:
        run.saving.result()
        run.failed_saves.clear()
    except OSError as error:
        run.failed_saves.add(run.saving_step)
        watchdog.event("checkpoint failed", error=str(error))
        print(f"checkpoint failed, the earlier ones are kept: {error}", file=sys.stderr, flush=True)
        if last or len(run.failed_saves) == MOST_FAILED_SAVES:
            raise
    run.saving = None


def newest_checkpoint(folder, ranks):
    """Path of the newest checkpoint that verifies, found by rank 0 and sent to every rank; None in a new run."""
    relative = ""
    if ranks.rank == 0:
        remove_leftovers(folder)
        if reason := os.environ.get("OMNIMORPH_STEP_BACK"):
            checkpoint.step_back(folder, reason)
        relative = checkpoint.newest(folder, record=True, patience_s=READ_AGAIN_S) or ""
    relative = launch.broadcast(ranks, "newest checkpoint", relative)
    return folder / relative if relative else None


def agree_on_precision(cfg, ranks, device, saved=None):
    """The precision that all ranks use: "bf16" or "off". Every rank calls this.

    run.amp auto means bf16 if every device computes it fast. A resumed run with auto keeps the precision it began with,
    even if these devices would choose another. saved: content of the checkpoint that it resumes from.
    """
    here = "off" if "off" in agree.gather_objects(ranks, precision(cfg["run.amp"], device)) else "bf16"
    begun = ((saved or {}).get("config") or {}).get("run.amp")
    if cfg["run.amp"] != "auto" or begun not in ("bf16", "off") or begun == here:
        return here
    if ranks.rank == 0:
        print(f"run.amp: this run began with {begun} and continues with it; on these devices auto would choose "
              f"{here}, which you can set with `--set run.amp={here}`.")
    return begun


def restore(run, content, path, continues):
    """Load the weights of a checkpoint and, if the run continues, its other content. Every rank calls this.

    content: of the checkpoint at `path`. continues: True for the run's own checkpoint, False for --init-from, which
    starts from the averaged weights, as all tools use them. Adam's moments and the average are loaded later, once they
    exist.
    """
    changes = checkpoint.check_compatible(content, run.cfg, path, continues)
    weights = content["model"] if continues else content.get("ema") or content["model"]
    checkpoint.load_weights(run.net, {"model": weights}, path)
    if continues:
        changes += compare_moments(content["optimizer"], [mode.name for mode in run.modes], run.cfg, path)
        try:
            run.progress = from_saved(content)
            reordered, of_data = compare_data(content["data"], run.data, path)
            run.data = with_gone(content["data"], run.data)
        except KeyError as missing:
            raise InputError(f"{path} has no {missing.args[0]}, because an older version wrote it; start a new run "
                             f"with --fresh --init-from {path}.") from None
        changes += of_data
        if len(content["queue"]["subjects"]) == len(run.queue["subjects"]):
            run.queue.update({name: value if name == "next" else value.to(run.device)
                              for name, value in content["queue"].items()})
        else:
            changes.append("the queue of mode 2 starts empty, because it has another length")
        # The order of the volumes in an epoch also comes from the seed.
        reordered = reordered or content["config"].get("run.seed") != run.cfg["run.seed"]
        if reordered and run.progress.step_in_epoch:  # leave the epoch
            # Not past the last epoch, which would end the run without its validation; nor back, if there are fewer now.
            epoch = max(min(run.progress.epoch + 1, run.cfg["run.epochs"] - 1), run.progress.epoch)
            begin_epoch(run.progress, epoch, run.terms)
            changes.append(f"the order of the volumes: training continues from the start of epoch {epoch + 1}")
    if run.ranks.rank == 0:
        if not continues and content.get("data") and (seen := seen_by(content["data"], run.data)):
            print(f"warning: {path} was trained on {some(seen)}, held out in this run: their scores will be too good; "
                  "hold out the subjects that were held out there (data.val_ids, or split in the list).",
                  file=sys.stderr)
        for change in changes if continues else []:
            print(f"changed since the checkpoint: {change}")
        print(f"continuing from {path}, epoch {run.progress.epoch + 1}, step {run.progress.step}" if continues
              else f"weights from {path}")
    agree.agree(run.ranks, run.progress.step, "checkpoint", weights=run.net.state_dict())


def announce(run):
    """Record and print what this launch runs with, and open the log for TensorBoard. Rank 0 calls this."""
    cfg, step, volumes, held_out = run.cfg, run.progress.step, len(run.dataset), len(run.held_out)
    try:
        fix_step(run.folder, cfg, run.ranks.step["ranks"], trains=True)
        save_launch(run.folder, cfg, step, run.modes)
        write_file(run.folder / "data.csv", as_csv(run.data))
    except OSError as error:  # a full disk may have room again when the next checkpoint is due
        print(f"{run.folder}: what this launch runs with could not be written: {error}", file=sys.stderr)
    subjects, others = (len(set(dataset.subjects.tolist())) for dataset in (run.dataset, run.held_out))
    print(f"{run.folder}: {volumes} training and {held_out} validation volumes ({subjects} and {others} subjects), "
          f"{run.split.samples} samples and {run.split.pairs} pairs a step, on {run.ranks.world_size} x "
          f"{describe(run.device)}, {PRECISIONS[cfg['run.amp']]}, modes: {', '.join(mode.name for mode in run.modes)}")
    if cfg["loss.contrastive"] and subjects < 2:
        print("all training volumes are of one subject, so mode 2 has no other to compare with: its loss stays 0; set "
              "loss.contrastive to 0, or data.subject_pattern if these are several subjects")
    if cfg["loss.segment"] and cfg["augment.flip"]:
        print("augment.flip mirrors volumes, but their labels keep their values, so loss.segment also teaches to call "
              "the left side right: set augment.flip to 0 if left and right have labels of their own")
    if cfg["data.stage"] and not cfg["data.cache"]:
        print(f"data.stage {cfg['data.stage']} is not used, because data.cache is empty and there is no cache to copy: "
              "set data.cache to auto or to a folder")
    inputs = {mode.data for mode in run.modes}
    modalities = sorted({item["modality"] for item in run.dataset.items} - {""})
    if "pairs" in inputs and not run.listed and len(modalities) > 1 and cfg["data.pair_modalities"] == "any":
        print(f"the volumes have {len(modalities)} modalities ({some(modalities)}), and pairs may mix them: set "
              "data.pair_modalities to same unless you want to align across modalities")
    steps, whole = (steps_left(cfg, volumes, run.listed, run.split, inputs=each) for each in (inputs, ["volumes"]))
    if "volumes" in inputs and steps < whole:
        key = "data.pair_list" if run.listed else "data.pairs"
        print(f"{key} has pairs for {steps} steps, after which each epoch ends, although all volumes would take "
              f"{whole}: modes 1 and 2 see the others in other epochs; {whole * run.split.pairs} pairs are enough "
              "for all")
    if held_out == 1:
        print("one validation volume makes no pair, so registration is not validated and no checkpoint can be the "
              "best: hold out two volumes (data.val_ids, data.val_fraction)")
    logs = Path(cfg["run.logs"]) / run.folder.name
    if not step and glob.glob("*", root_dir=logs) and len(listed(run.folder / "launches")) == 1:
        print(f"{logs} has curves of another run, which TensorBoard will no longer show, because this run draws there "
              "too: give each of several run.models its own run.logs")
    run.curves = new_writer(logs, step, run.folder / "pictures")


def refuse_nonfinite(run, failed):
    """After a step without an update: stop if the weights are not finite, or if too many losses in a row are not.

    failed: names of the modes without an update.
    """
    step, most = run.progress.step, run.cfg["run.max_nonfinite"]
    for name, parameter in run.net.named_parameters():
        if not whole(parameter).isfinite().all():
            raise RuntimeError(f"the weights are not finite after step {step}: {name}")
    if run.progress.nonfinite_in_a_row >= most:
        raise InputError(f"{run.folder}: the loss or its gradient was not finite in {most} steps in a row, in the last "
                         f"one, {step - 1}, that of {' and '.join(failed)}; look at the data, or lower optim.lr or the "
                         "weights of the losses.")
