"""The averages of an epoch, and how the training shows them: nine of the modes as they are, and any that is added.

Whatever a step function returns among its terms is averaged, shown, logged and drawn under its name.
"""
import sys

from tqdm import tqdm

from Runtime.errors import InputError
from Runtime.writer import add_scalar

AVERAGES = ["total", "ang", "dist", "regul", "contrastive", "regist", "imgsim", "imgmse", "ddf"]
# What the sums and the lines of the log have beside the terms: no names for a term.
TAKEN = ("steps", "open", "nonfinite", "counts", "open_share", "epoch", "step", "event", "attempt", "rank", "time")


def new_sums():
    """Sums of an epoch: each average's total and count, steps, steps with an open gate, non-finite losses."""
    return {**{name: 0.0 for name in AVERAGES}, "steps": 0, "open": 0, "nonfinite": 0,
            "counts": {name: 0 for name in AVERAGES}}


def add_terms(sums, terms):
    """Add a mode's terms to the epoch's sums; called only where that mode took a step.

    Raises InputError for a term with a name that the log uses itself.
    """
    for name, value in terms.items():
        if name in TAKEN:
            raise InputError(f"a loss term is called {name}, which the log uses for something else; give it another "
                             "name in its step function.")
        sums[name] = sums.get(name, 0.0) + value
        sums["counts"][name] = sums["counts"].get(name, 0) + 1


def averages(sums):
    """The averages of all terms, the nine first; None where a mode has not run."""
    return {name: sums[name] / count if count else None for name, count in sums["counts"].items()}


def show(value):
    """A number for a person; "-" for a mode that has not run."""
    return "-" if value is None else f"{value:.3g}"


def progress_bars(cfg, progress, steps, is_main):
    """The bar of an epoch, and the line of averages below it; silent on all ranks but the first."""
    terminal = sys.stderr.isatty()
    bar = tqdm(total=steps, initial=progress["step_in_epoch"], unit="step", dynamic_ncols=True, disable=not is_main,
               desc=f"epoch {progress['epoch'] + 1}/{cfg['run.epochs']}", mininterval=1.0 if terminal else 30.0)
    return bar, tqdm(bar_format="{desc}", position=1, dynamic_ncols=True, disable=not (terminal and is_main))


def show_progress(bar, below, progress, cfg, steps, first_step, samples, seconds):
    """Samples per second and time left of the run behind the bar, the averages below it (in a log, behind)."""
    here = progress["step_in_epoch"] - first_step
    left = (cfg["run.epochs"] - progress["epoch"]) * steps - progress["step_in_epoch"]
    hours, minutes = divmod(int(left * seconds / here) // 60, 60)
    shown = "  ".join(f"{name} {show(value)}" for name, value in averages(progress["sums"]).items())
    rate = f"{here * samples / seconds:.2f} samples/s, {hours}:{minutes:02d} h left"
    bar.set_postfix_str(f"{rate} | {shown}" if below.disable else rate, refresh=False)
    below.set_description_str(shown)
    bar.update()


def show_epoch(curves, entry, progress, cfg, seconds):
    """An epoch's averages and scores: a line in the log, and each of them as a curve (Runtime/writer.py)."""
    tqdm.write(f"epoch {progress['epoch'] + 1}: " + " ".join(f"{name} {show(value)}" for name, value in entry.items())
               + f" (gate {cfg['registration.gate']}, {seconds:.0f} s)")
    for name, value in entry.items():
        if value is not None:
            kind = "validation" if name.startswith("val_") else "train"
            add_scalar(curves, f"{kind}/{name}", value, progress["step"])
