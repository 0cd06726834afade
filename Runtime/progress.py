"""The progress of a training, the averages of its epoch, and how both are shown: bar, logs and TensorBoard.

The terms of the modes are always listed. Every other term that a step function returns is averaged, shown, logged and
drawn under its own name. Every EVERY steps each rank adds a line "pace" to its log: where the time of its steps went,
its memory, and on rank 0 the disk space. From it Report/run.py draws the ranks side by side and Report/rules.py finds
the slow one. Curves that cannot be written wait, and training continues.
"""
import collections
import dataclasses
import io
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from Runtime import watchdog
from Runtime.errors import InputError
from Runtime.files import append_bytes, write_file

# Keys that the sums and the log use besides the terms; a term cannot have these names.
TAKEN = ("steps", "open", "nonfinite", "counts", "open_share", "epoch", "step", "event", "attempt", "rank", "time")
# Terms that only some pairs have, and the share of pairs that have them. A step function returns the share, and the
# term times the share: both then add up over batches, ranks and steps like every other term.
PARTIAL = {"dice": "labelled", "segment": "segmented"}
EVERY = 10  # steps
FLUSH_S = 60.0  # TensorBoard's curves reach the disk this often, not only at the end of an epoch
WAITING = 64 * 2 ** 20  # most bytes that wait for space on a full disk; beyond that the oldest are dropped
PICTURES = 4  # the newest ones, which stay in the run folder
GIB = 2 ** 30


@dataclasses.dataclass
class Sums:
    """Sums of an epoch."""

    steps: int = 0
    open: int = 0       # steps with an open gate
    nonfinite: int = 0  # losses that were NaN or infinite
    totals: dict = dataclasses.field(default_factory=dict)  # {term: sum of its values}
    counts: dict = dataclasses.field(default_factory=dict)  # {term: number of values}


@dataclasses.dataclass
class Progress:
    """How far a training has come: what a checkpoint holds besides weights, moments and queue."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0     # of the run
    samples: int = 0  # in this epoch, on all ranks
    pairs: int = 0
    nonfinite_in_a_row: int = 0
    sums: Sums = dataclasses.field(default_factory=Sums)


def new_sums(terms):
    """The Sums of an epoch at its start. terms: names that are always listed."""
    return Sums(totals=dict.fromkeys(terms, 0.0), counts=dict.fromkeys(terms, 0))


def advance(progress, split):
    """Count a step, with its samples and pairs of all ranks."""
    progress.step += 1
    progress.step_in_epoch += 1
    progress.samples += split.samples
    progress.pairs += split.pairs


def begin_epoch(progress, epoch, terms):
    """Set the progress to the first step of an epoch. terms: of `new_sums`."""
    progress.epoch, progress.step_in_epoch, progress.samples, progress.pairs = epoch, 0, 0, 0
    progress.sums = new_sums(terms)


def to_saved(progress):
    """The progress as a checkpoint stores it: a plain dict whose "sums" has the totals beside the other fields."""
    saved = dataclasses.asdict(progress)
    return {**saved, "sums": {**saved["sums"].pop("totals"), **saved["sums"]}}


def from_saved(saved):
    """The Progress of a checkpoint. Raises KeyError naming what is missing."""
    sums = dict(saved["sums"])
    own = {name: sums.pop(name) for name in ("steps", "open", "nonfinite", "counts")}
    names = [field.name for field in dataclasses.fields(Progress) if field.name != "sums"]
    return Progress(**{name: saved[name] for name in names}, sums=Sums(totals=sums, **own))


def add_terms(sums, terms):
    """Add a mode's terms to the epoch's sums; call this only if the mode took a step.

    sums: Sums, changed here. terms: {name: number}. Raises InputError for a name in TAKEN.
    """
    for name, value in terms.items():
        if name in TAKEN:
            raise InputError(f"a loss term is called {name}, a name that the log uses for something else; rename "
                             "the term in its step function.")
        sums.totals[name] = sums.totals.get(name, 0.0) + value
        sums.counts[name] = sums.counts.get(name, 0) + 1


def averages(sums):
    """{term: average over its steps}, the always listed ones first; None for a term whose mode has not run."""
    means = of_their_share({name: sums.totals[name] / count for name, count in sums.counts.items() if count})
    return {name: means.get(name) for name in sums.counts}


def of_their_share(terms):
    """The terms, each of PARTIAL as the mean over the pairs that have it; terms that no pair has are left out.

    terms: {name: mean over all pairs}.
    """
    result = dict(terms)
    for name, share in PARTIAL.items():
        if terms.get(share):
            result[name] = terms[name] / terms[share]
        else:
            result.pop(name, None)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Bar and log
# ---------------------------------------------------------------------------------------------------------------------

def show(value):
    """A number with three digits; "-" for None."""
    return "-" if value is None else f"{value:.3g}"


def progress_bars(cfg, progress, steps, is_main):
    """(epoch bar, line of averages below it). The line is disabled in a log, and both are on ranks other than 0.

    progress: Progress. steps: number of steps in the epoch.
    """
    terminal = sys.stderr.isatty()
    bar = tqdm(total=steps, initial=progress.step_in_epoch, unit="step", dynamic_ncols=True, disable=not is_main,
               desc=f"epoch {progress.epoch + 1}/{cfg['run.epochs']}", mininterval=1.0 if terminal else 30.0)
    below = tqdm(bar_format="{desc}", position=1, dynamic_ncols=True, disable=not (terminal and is_main))
    return bar, below


def show_progress(bar, below, progress, cfg, steps, first_step, began, samples):
    """Advance the bar by a step and show samples per second, the run's remaining time and the averages.

    The averages are in the line below or, in a log, beside the rest. steps: per epoch. first_step, began: step_in_epoch
    from which the pace is measured, and time.monotonic() there. samples: per step.
    """
    steps_here, seconds = progress.step_in_epoch - first_step, time.monotonic() - began
    steps_left = (cfg["run.epochs"] - progress.epoch) * steps - progress.step_in_epoch
    hours, minutes = divmod(int(steps_left * seconds / steps_here) // 60, 60)
    shown = "  ".join(f"{name} {show(value)}" for name, value in averages(progress.sums).items())
    rate = f"{steps_here * samples / seconds:.2f} samples/s, {hours}:{minutes:02d} h left"
    bar.set_postfix_str(f"{rate} | {shown}" if below.disable else rate, refresh=False)
    below.set_description_str(shown)
    bar.update()


def show_epoch(curves, entry, progress, cfg, seconds):
    """Print an epoch's averages and scores in one line, and add each to its curve, at the last step done.

    curves: from `new_writer`. entry: {name: value or None}. seconds: duration of the epoch.
    """
    shown = " ".join(f"{name} {show(value)}" for name, value in entry.items())
    tqdm.write(f"epoch {progress.epoch + 1}: {shown} (gate {cfg['registration.gate']}, {seconds:.0f} s)")
    for name, value in entry.items():
        if value is not None:
            kind = "validation" if name.startswith("val_") else "train"
            # The next launch begins at progress.step, from which on TensorBoard ignores the points of this one.
            add_scalar(curves, f"{kind}/{name}", value, progress.step - 1)


def new_pace():
    """The sums of `keep_pace`, before the first step of a launch."""
    return {"steps": 0, "spent": collections.Counter(), "began": time.monotonic(), "flushed": time.monotonic()}


def keep_pace(pace, line, spent, watch, curves):
    """Count a step; after every EVERY steps log their sums. Every rank calls this at the end of a step.

    pace: from `new_pace`. line: rank 0's log line of the step, with "lr", "samples" and "norms". spent: from
    watchdog.end_step. watch: from memory.new_watch. curves: from `new_writer` on rank 0; None on other ranks.
    """
    pace["spent"].update(spent)
    pace["steps"] += 1
    if pace["steps"] < EVERY:
        return
    now, memory = time.monotonic(), watch["samples"][-1] if watch["samples"] else {}
    seconds = {phase: round(value, 4) for phase, value in pace["spent"].items()}
    watchdog.event("pace", steps=pace["steps"], seconds=round(now - pace["began"], 4), spent=seconds, **memory,
                   **(disk_space(watchdog.STATE.get("run")) if curves else {}))
    if curves:
        steps, total_s, data_s = pace["steps"], sum(pace["spent"].values()), pace["spent"]["data"]
        points = {"speed/samples_per_s": steps * line["samples"] / max(now - pace["began"], 1e-9),
                  "speed/step_s": total_s / steps, "speed/data_s": data_s / steps,
                  "speed/data_percent": 100 * data_s / max(total_s, 1e-9), "train/lr": line["lr"],
                  **{f"gradient_norm/{mode}": norm for mode, norm in line["norms"].items()},
                  **{f"memory/{name}_gib": value / GIB for name, value in memory.items() if value is not None}}
        for tag, value in points.items():
            add_scalar(curves, tag, value, watchdog.STATE.get("step", 0))
        if now - pace["flushed"] > FLUSH_S:
            flush(curves)
            pace["flushed"] = now
    pace.update(steps=0, began=now)
    pace["spent"].clear()


def disk_space(run):
    """{"disk_free", "disk_total"}: bytes of the file system that holds a run folder; {} if unknown."""
    try:
        usage = shutil.disk_usage(run)
    except (OSError, TypeError):  # no answer, or a training without a log
        return {}
    return {"disk_free": usage.free, "disk_total": usage.total}


# ---------------------------------------------------------------------------------------------------------------------
# TensorBoard
# ---------------------------------------------------------------------------------------------------------------------

def new_writer(folder, step, pictures=None):
    """Begin an event file. TensorBoard then ignores events of earlier launches from `step` on.

    folder: for the events, created at the first `flush`. pictures: a folder for the newest pictures as files, which
    the run's report shows; None for none. Returns: the dict that the functions below take.
    """
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    writer = {"path": Path(folder) / name, "waiting": [], "told": False, "pictures": pictures}
    _add(writer, file_version="brain.Event:2")
    _add(writer, step=step, session_log=SessionLog(status=SessionLog.START))
    return writer


def add_scalar(writer, tag, value, step):
    """Add a point to the curve `tag`. It is written by the next `flush`."""
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=float(value))]))


def add_figure(writer, tag, figure, step):
    """Add a matplotlib figure as a picture. It is written by the next `flush`, and as one of the newest files now.

    If the disk refuses the file, training continues.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    width, height = (int(side) for side in figure.get_size_inches() * figure.dpi)
    image = Summary.Image(encoded_image_string=picture.getvalue(), width=width, height=height, colorspace=3)
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))
    if writer["pictures"] is None:
        return
    path = writer["pictures"] / f"{tag}_{step:08d}.png"
    try:
        write_file(path, picture.getvalue())
        for old in sorted(path.parent.glob("*.png"))[:-PICTURES]:
            old.unlink()
    except OSError as error:
        print(f"{path} was not written ({error.strerror or error}); training continues", file=sys.stderr, flush=True)


def flush(writer):
    """Write all that waits. If that fails, one line on standard error says so, and the next flush retries."""
    try:
        append_bytes(writer["path"], b"".join(writer["waiting"]))
    except OSError as error:
        if not writer["told"]:
            print(f"TensorBoard: {writer['path']} cannot be written ({error.strerror or error}): the curves are "
                  "written later, and training continues", file=sys.stderr, flush=True)
        writer["told"] = True
        while sum(map(len, writer["waiting"])) > WAITING:
            writer["waiting"].pop(0)
    else:
        writer.update(waiting=[], told=False)


def _add(writer, **content):
    framed = io.BytesIO()
    RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
    writer["waiting"].append(framed.getvalue())
