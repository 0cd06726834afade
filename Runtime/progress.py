"""The progress of a training, the averages of its epoch, and how it shows them.

The terms of the modes are always listed. Every other term that a step function returns is averaged, shown, logged and
drawn under its own name.
"""
import dataclasses
import sys

from tqdm import tqdm

from Runtime.errors import InputError
from Runtime.writer import add_scalar

# Keys that the sums and the log use besides the terms; a term cannot have these names.
TAKEN = ("steps", "open", "nonfinite", "counts", "open_share", "epoch", "step", "event", "attempt", "rank", "time")
# Terms that only some pairs have, and the share of pairs that have them. A step function returns the share, and the
# term times the share: both then add up over batches, ranks and steps like every other term.
PARTIAL = {"dice": "labelled", "segment": "segmented"}


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
    """How far a training has come: what survives a restart besides weights, moments and queue."""

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


def show_progress(bar, below, progress, cfg, steps, first_step, samples, seconds):
    """Advance the bar; after it come samples per second and the run's remaining time, and averages below (in a log,
    after it too).

    steps: per epoch. first_step: step_in_epoch where this launch entered the epoch. samples: per step.
    seconds: since first_step.
    """
    steps_here = progress.step_in_epoch - first_step
    steps_left = (cfg["run.epochs"] - progress.epoch) * steps - progress.step_in_epoch
    hours, minutes = divmod(int(steps_left * seconds / steps_here) // 60, 60)
    shown = "  ".join(f"{name} {show(value)}" for name, value in averages(progress.sums).items())
    rate = f"{steps_here * samples / seconds:.2f} samples/s, {hours}:{minutes:02d} h left"
    bar.set_postfix_str(f"{rate} | {shown}" if below.disable else rate, refresh=False)
    below.set_description_str(shown)
    bar.update()


def show_epoch(curves, entry, progress, cfg, seconds):
    """Print an epoch's averages and scores in one line, and add each to its curve, at the last step done.

    curves: from Runtime/writer.py. entry: {name: value or None}. seconds: duration of the epoch.
    """
    shown = " ".join(f"{name} {show(value)}" for name, value in entry.items())
    tqdm.write(f"epoch {progress.epoch + 1}: {shown} (gate {cfg['registration.gate']}, {seconds:.0f} s)")
    for name, value in entry.items():
        if value is not None:
            kind = "validation" if name.startswith("val_") else "train"
            # The next launch begins at progress.step, from which on TensorBoard ignores the points of this one.
            add_scalar(curves, f"{kind}/{name}", value, progress.step - 1)
