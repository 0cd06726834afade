"""How the speed of a training grows with its ranks: `python Scripts/scaling.py RUN...`.

A measurement is what a run did with one number of ranks, nodes and samples a step, over all its attempts. It counts the
steps that follow directly on another step, each once. Left out are the first WARM_UP of an attempt and the first of its
steps that ran mode 3, which compile, and those behind a checkpoint, a validation or the start of an epoch, whose phases
are not the step's own; the time per epoch includes what is between the steps. Times are those of rank 0.
"""
import argparse
import collections
import datetime
import itertools
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import Runtime  # noqa: E402, F401  before what is not of the standard library: a Python that is too old ends here, in one sentence

# isort: split
import yaml  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import NullLocator  # noqa: E402

from Dataloader.dataset import read_datasets  # noqa: E402
from Dataloader.sampler import steps_left  # noqa: E402
from Runtime.attempts import history  # noqa: E402
from Runtime.config import flatten, load_config  # noqa: E402
from Runtime.errors import DONE, STOP, InputError  # noqa: E402
from Runtime.files import write_file  # noqa: E402
from Runtime.global_batch import known_step, split_step  # noqa: E402
from Runtime.page import cards_html, figure_html, figure_png, table_html, text_table, write_page  # noqa: E402
from Runtime.run_logs import log_lines, ranks_of  # noqa: E402
from Runtime.watchdog import ONE_OFF  # noqa: E402

WARM_UP = 3
# Rows that differ in these did not do the same work.
SAME_SECTIONS = ("model", "diffusion", "registration")
SAME_KEYS = ("data.img_size", "run.amp", "run.device", "run.strategy")
SPEED = ["ranks", "nodes", "batch", "step s", "samples/s", "speed-up", "efficiency %", "epoch", "run"]
SPEED_FORMATS = [None, None, None, ".4g", ".4g", ".2f", ".1f", None, None]
COSTS = ["ranks", "nodes", "data %", "agree %", "mode 3 %", "peak GiB", "optimizer GiB", "steps", "left out"]
COSTS_FORMATS = [None, None, ".1f", ".1f", ".0f", ".2f", ".3f", None, None]
MEASURED, IDEAL, GRID = "#1668a8", "#8a939c", "#e3e6e9"


# ---------------------------------------------------------------------------------------------------------------------
# From the logs of a run to its measurements
# ---------------------------------------------------------------------------------------------------------------------

def measurements(run):
    """The measurements of a run folder, a list of dicts; also those without a step to count (`"steps": 0`).

    Times are in seconds, memory in bytes, fractions from 0 to 1. Values that the logs do not have are None.
    Raises InputError if this is no run folder, or one without a step.
    """
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder; give the folder of a run, Models/<data>_<net>.")
    begun = [line for line in history(run) if line["event"] == "begin"]
    if not begun:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    logs = collections.defaultdict(list)
    for rank in ranks_of(run):
        for line in log_lines(run, rank):
            logs[line["attempt"], line["event"]].append(line)
    groups = collections.defaultdict(list)
    for line in begun:
        number, ranks = line["attempt"], line["ranks"]
        steps = logs[number, "step"]
        if not steps:
            continue
        config = launch_config(run, steps[0]["time"])
        nodes = len({start["node"] or start["host"] for start in logs[number, "start"]})
        cfg = flatten(yaml.safe_load(config.read_text()), config)
        samples = split_step(cfg, ranks, known_step(run, cfg)).samples
        groups[ranks, nodes, samples].append({"steps": steps, "epochs": logs[number, "epoch"], "config": config,
                                              "memory": logs[number, "memory"]})
    if not groups:
        raise InputError(f"{run}: its logs have no step yet; let it train for more than {WARM_UP} steps.")
    return [{"run": str(run), "ranks": ranks, "nodes": nodes, "batch": samples, **measure(ranks, samples, attempts)}
            for (ranks, nodes, samples), attempts in groups.items()]


def launch_config(run, moment):
    """Path of the config of the launch that ran at a moment (a time stamp): the newest that had begun by then."""
    begun = []
    for path in (run / "launches").glob("*/launch.json"):
        try:
            started = json.loads(path.read_text())["started"]
        except ValueError:
            continue  # a machine died while it was written
        begun.append((datetime.datetime.fromisoformat(started).timestamp(), path.with_name("config.yaml")))
    begun = [entry for entry in begun if entry[0] <= moment]
    if not begun:
        raise InputError(f"{run}: launches/ has no config of its first steps; copy the whole folder of the run.")
    return max(begun)[1]


def countable(steps):
    """{step: line} of the steps of an attempt that are measured."""
    first_open = next((number for number, line in enumerate(steps) if line["open"]), 0)
    return {line["step"]: line for number, line in enumerate(steps)
            if number >= WARM_UP and number != first_open and not line["spent"].keys() & set(ONE_OFF)}


def measure(ranks, samples, attempts):
    """The measurement of some attempts with the same ranks, nodes and samples of a step, as in `measurements`."""
    counted = {}
    for attempt in attempts:
        counted.update(countable(attempt["steps"]))
    seconds = [sum(line["spent"].values()) for line in counted.values()]
    spent = collections.Counter()
    for line in counted.values():
        spent.update(line["spent"])
    total_s, count = max(sum(seconds), 1e-9), len(counted)
    median_s = statistics.median(seconds) if count else None
    config = attempts[-1]["config"]
    epoch_s, steps_per_epoch = epoch_seconds(attempts), None
    if not epoch_s and count:
        steps_per_epoch = epoch_steps(attempts) or planned_steps(config, ranks)
        epoch_s = steps_per_epoch and steps_per_epoch * median_s
    return {"steps": count, "step_s": median_s, "samples_per_s": samples * count / total_s if count else None,
            "left_out": len({line["step"] for attempt in attempts for line in attempt["steps"]}) - count,
            "data_share": spent["data"] / total_s, "agree_share": spent["agree"] / total_s,
            "mode3_share": sum(line["open"] for line in counted.values()) / max(count, 1),
            "epoch_s": epoch_s, "epoch_computed": bool(steps_per_epoch),
            "peak_bytes": most(attempts, "peak_bytes"), "optimizer_bytes": most(attempts, "optimizer_bytes"),
            "config": config}


def most(attempts, key):
    """The largest value of a key in the memory lines of some attempts; None where no line has one."""
    values = [line[key] for attempt in attempts for line in attempt["memory"]]
    return max(filter(None, values), default=None)


def epoch_seconds(attempts):
    """Median wall time of the complete epochs of an attempt, validation and checkpoint included; None without one.

    The first epoch of an attempt contains the compilation, so it counts only where there is no other.
    """
    first, later = [], []
    for attempt in attempts:
        steps, epochs = attempt["steps"], attempt["epochs"]
        later += [after["time"] - before["time"] for before, after in itertools.pairwise(epochs)]
        if epochs and sum(line["epoch"] == epochs[0]["epoch"] for line in steps) == epochs[0]["steps"]:
            own = [value for name, value in steps[0]["spent"].items() if name == "epoch" or name not in ONE_OFF]
            first.append(epochs[0]["time"] - steps[0]["time"] + sum(own))
    return statistics.median(later or first) if later or first else None


def epoch_steps(attempts):
    """Steps of an epoch that these attempts did together from its beginning to its end; None without such an epoch."""
    steps = {(line["epoch"], line["step"]) for attempt in attempts for line in attempt["steps"]}
    done = collections.Counter(epoch for epoch, _ in steps)
    ended = [line for attempt in attempts for line in attempt["epochs"] if line["steps"] == done[line["epoch"]]]
    return ended[-1]["steps"] if ended else None


def planned_steps(config, ranks):
    """Steps of an epoch by config and datalist; None where the data set, or a key since introduced, is not there."""
    try:
        cfg = load_config(config)
        dataset, _, listed = read_datasets(cfg, headers_only=True)
    except InputError:
        return None
    run = config.parent.parent.parent
    return steps_left(cfg, len(dataset), listed, split_step(cfg, ranks, known_step(run, cfg)))


# ---------------------------------------------------------------------------------------------------------------------
# From measurements to the report
# ---------------------------------------------------------------------------------------------------------------------

def compare(runs):
    """The measurements of all runs, ordered by ranks, with "speedup" and "efficiency" against the first.

    runs: Paths of run folders.
    Returns: list of dicts; list of sentences on what was not measured and what is not comparable.
    Raises InputError for a run without a step to count.
    """
    rows, notes = [], []
    for run in runs:
        measured = measurements(run)
        if not any(row["steps"] for row in measured):
            raise InputError(f"{run}: of its {sum(row['left_out'] for row in measured)} steps none is left without the "
                             f"first {WARM_UP} of each attempt and those behind a checkpoint or a validation; let it "
                             "train longer.")
        notes += [f"{run} with {plural(row['ranks'], 'rank')}: no step is left to measure, so it is left out."
                  for row in measured if not row["steps"]]
        rows += [row for row in measured if row["steps"]]
    rows.sort(key=lambda row: row["ranks"])
    for row in rows:
        row["speedup"] = row["samples_per_s"] / rows[0]["samples_per_s"]
        row["efficiency"] = row["speedup"] * rows[0]["ranks"] / row["ranks"]
    configs = [flatten(yaml.safe_load(row.pop("config").read_text()), row["run"]) for row in rows]
    keys = sorted({key for cfg in configs for key in cfg if key.split(".")[0] in SAME_SECTIONS or key in SAME_KEYS})
    differing = [key for key in keys if any(cfg.get(key) != configs[0].get(key) for cfg in configs)]
    if differing:
        notes.append(f"Not the same work everywhere: the configs differ in {', '.join(differing)}.")
    opened = [row["mode3_share"] for row in rows]
    if max(opened) - min(opened) > 0.05:
        notes.append(f"Not the same work everywhere: mode 3 ran in {100 * min(opened):.0f} to "
                     f"{100 * max(opened):.0f} % of the steps (registration.gate).")
    return rows, notes


def plural(number, word):
    return f"{number} {word}{'s' * (number != 1)}"


def duration(seconds, computed=False):
    """Seconds as text in hours, minutes or seconds, with "~" before a computed value. None stays None."""
    if seconds is None:
        return None
    unit, size = "s", 1
    if seconds >= 7200:
        unit, size = "h", 3600
    elif seconds >= 120:
        unit, size = "min", 60
    return f"{'~' if computed else ''}{seconds / size:.3g} {unit}"


def tables(rows):
    """Two tables, of speed and of where time and memory go: dicts of header, rows and formats."""
    speed, costs = [], []
    for row in rows:
        speed.append([row["ranks"], row["nodes"], row["batch"], row["step_s"], row["samples_per_s"], row["speedup"],
                      100 * row["efficiency"], duration(row["epoch_s"], row["epoch_computed"]), row["run"]])
        fractions = [100 * row[key] for key in ("data_share", "agree_share", "mode3_share")]
        memory = [row[key] and row[key] / 2 ** 30 for key in ("peak_bytes", "optimizer_bytes")]
        costs.append([row["ranks"], row["nodes"], *fractions, *memory, row["steps"], row["left_out"]])
    return ({"header": SPEED, "rows": speed, "formats": SPEED_FORMATS},
            {"header": COSTS, "rows": costs, "formats": COSTS_FORMATS})


def kind_of_scaling(rows):
    """Whether the batch grew with the ranks, for the top of the page; empty for one number of ranks."""
    if len({row["ranks"] for row in rows}) == 1:
        return ""
    if len({row["batch"] for row in rows}) == 1:
        return "; the effective batch is the same everywhere (strong scaling)"
    same = len({row["batch"] / row["ranks"] for row in rows}) == 1
    return f"; the effective batch {'grows with the ranks (weak scaling)' if same else 'differs'}"


def scaling_figure(rows):
    """Samples per second and efficiency against ranks, as a matplotlib Figure."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    ranks, base = [row["ranks"] for row in rows], rows[0]
    line = {"color": MEASURED, "marker": "o", "markersize": 6, "zorder": 3, "label": "measured",
            "linestyle": "-" if len(set(ranks)) == len(ranks) else "none"}
    rates = [row["samples_per_s"] for row in rows]
    efficiencies = [100 * row["efficiency"] for row in rows]
    ends = [ranks[0] / 1.35, ranks[-1] * 1.35]
    ideal = [base["samples_per_s"] * end / base["ranks"] for end in ends]
    left.plot(ends, ideal, color=IDEAL, linestyle="--", label=f"ideal, from {plural(base['ranks'], 'rank')}")
    left.plot(ranks, rates, **line)
    right.axhline(100, color=IDEAL, linestyle="--")
    right.plot(ranks, efficiencies, **line)
    marks = marks_around(rates + ideal)
    left.set_yscale("log")
    left.set_yticks(marks, [f"{mark:g}" for mark in marks])
    left.set(ylim=(marks[0], marks[-1]), ylabel="throughput, samples/s")
    right.set(ylim=(0, max(118, 1.15 * max(efficiencies))), ylabel="efficiency per rank, % of ideal")
    left.legend(loc="upper left", frameon=False)
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xticks(sorted(set(ranks)), [str(number) for number in sorted(set(ranks))])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set(xlim=ends, xlabel="ranks")
        ax.grid(color=GRID, linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    for number, rate, efficiency in zip(ranks, rates, efficiencies):
        left.annotate(f"{rate:.3g}", (number, rate), (7, -11), textcoords="offset points", fontsize=9)
        right.annotate(f"{efficiency:.0f} %", (number, efficiency), (7, 7), textcoords="offset points", fontsize=9)
    return figure


def marks_around(values):
    """Marks 1, 2, 5, 10, 20, ... of a logarithmic axis, from the last below all values to the first above them."""
    marks = [digit * 10.0 ** power for power in range(-6, 9) for digit in (1, 2, 5)]
    low = max(mark for mark in marks if mark < min(values))
    high = min(mark for mark in marks if mark > max(values))
    return [mark for mark in marks if low <= mark <= high]


def headline(rows):
    """The cards at the top of the page: figures of the run with most ranks, against that with fewest."""
    base, most = rows[0], rows[-1]
    where = f"{plural(most['ranks'], 'rank')} on {plural(most['nodes'], 'node')}, batch {most['batch']}"
    against = f"against {plural(base['ranks'], 'rank')}"
    return [("Samples per second", f"{most['samples_per_s']:.4g}", where),
            ("Speed-up", f"{most['speedup']:.2f}", f"{against}; ideal: {most['ranks'] / base['ranks']:.4g}"),
            ("Efficiency of a rank", f"{100 * most['efficiency']:.1f} %", against),
            ("Time per epoch", duration(most["epoch_s"], most["epoch_computed"]), f"{most['step_s']:.4g} s a step")]


def method(rows):
    """How the figures were made: rows of a table."""
    measured = sum(row["steps"] for row in rows)
    left_out = sum(row["left_out"] for row in rows)
    return [("steps", f"{measured} measured, each once. {left_out} left out: the first {WARM_UP} of each attempt and "
             "its first with mode 3, which compile; those behind a checkpoint, a validation or the start of an epoch"),
            ("batch", "effective batch: samples of mode 1 in a step of all ranks together"),
            ("step s", "median"), ("samples/s", "all samples by all seconds of these steps, so that waits count"),
            ("speed-up", f"samples/s against the first row ({plural(rows[0]['ranks'], 'rank')})"),
            ("efficiency %", "samples/s of a rank, against the first row"),
            ("epoch", "median wall time of complete epochs, with validation and checkpoint; ~ where it is computed: "
             "steps of an epoch by the median step"),
            ("data %, agree %", "share of the steps' time that rank 0 waited for data, and spent in agreements of the "
             "ranks, where it waits for the slowest"),
            ("mode 3 %", "share of the steps that ran mode 3"), ("peak, optimizer", "memory of the rank that has most")]


def report(runs, out):
    """Measure runs, write `scaling.png` and `scaling.html` to `out`, and print the tables and last a line of JSON.

    runs: Paths of run folders. out: Path of a folder, created. Returns the exit code.
    Raises InputError for what is no run, for one without a step to measure, and if `out` cannot be written.
    """
    rows, notes = compare(runs)
    speed, costs = tables(rows)
    figure = scaling_figure(rows)
    lead = f"{plural(len(rows), 'measurement')} of {plural(len(runs), 'run')}{kind_of_scaling(rows)}. {' '.join(notes)}"
    alt = "Samples per second and efficiency against the number of ranks, with the ideal lines"
    sections = [("", cards_html(headline(rows))), ("Speed", figure_html(figure, alt=alt) + table_html(**speed)),
                ("Where the time of a step goes, and memory", table_html(**costs)),
                ("How it was measured", table_html(["figure", "meaning"], method(rows)))]
    try:
        page = write_page(out / "scaling.html", "Scaling", lead, sections)
        write_file(out / "scaling.png", figure_png(figure))
    except OSError as error:
        raise InputError(f"{out}: the report cannot be written there ({error.strerror}); give another folder with "
                         "--out.") from None
    print("\n".join([text_table(**speed), "", text_table(**costs), "", *notes,
                     f"plot: {(out / 'scaling.png').resolve()}", f"report: {page.resolve()}"]))
    print(json.dumps({"rows": rows, "notes": notes, "warm_up": WARM_UP, "plot": str(out / "scaling.png"),
                      "page": str(page)}))
    return DONE


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Speed of runs by number of ranks: samples/s, time per epoch, "
                                     "efficiency; table, plot and page, last a line of JSON.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, Models/<data>_<net>")
    parser.add_argument("--out", type=Path, default=Path("Logs/scaling"), metavar="FOLDER", help="for page and plot")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_arguments(argv)
    try:
        return report(args.runs, args.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main())
