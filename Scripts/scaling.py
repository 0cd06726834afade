"""How the speed of a training grows with its ranks: `python Scripts/scaling.py RUN...`.

A measurement covers all attempts of a run with the same ranks, nodes and samples per step. It counts each step that
directly follows another step, once. It leaves out steps that compile (the first WARM_UP of an attempt and its first
with mode 3) and steps after a checkpoint, a validation or the start of an epoch, whose phases are not the step's own.
The time per epoch includes the time between steps. Times are those of rank 0.
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

import Runtime  # noqa: E402, F401  before third-party packages: an outdated Python stops here with one sentence

# isort: split
from Report.charts import grid, line_chart  # noqa: E402
from Report.page import table_html, text_table, write_page  # noqa: E402
from Report.run_logs import lines_of, ranks_of, read_launches  # noqa: E402
from Runtime.errors import DONE, InputError, parse_options, run_program  # noqa: E402
from Runtime.global_batch import known_step, split_step  # noqa: E402
from Runtime.watchdog import ONE_OFF  # noqa: E402
from Supervisor.attempts import history  # noqa: E402

WARM_UP = 3
# Rows that differ in these did not do the same work.
SAME_SECTIONS = ("model", "diffusion", "registration")
SAME_KEYS = ("data.img_size", "run.amp", "run.device", "run.strategy")
# (heading, key of a row, factor, format) of the table
COLUMNS = (("ranks", "ranks", 1, None), ("nodes", "nodes", 1, None), ("batch", "batch", 1, None),
           ("step s", "step_s", 1, ".4g"), ("samples/s", "samples_per_s", 1, ".4g"), ("speed-up", "speedup", 1, ".2f"),
           ("efficiency %", "efficiency", 100, ".1f"), ("epoch s", "epoch_s", 1, ".4g"),
           ("data %", "data_share", 100, ".1f"), ("agree %", "agree_share", 100, ".1f"),
           ("mode 3 %", "mode3_share", 100, ".0f"), ("steps", "steps", 1, None), ("left out", "left_out", 1, None))
METHOD = (f"batch: samples of mode 1 in a step of all ranks together. step s: median. samples/s: all samples by all "
          "seconds of the steps that count, so that waits count. speed-up and efficiency of a rank: against the first "
          "row. epoch s: median wall time of complete epochs, with validation and checkpoint. data %, agree %: share "
          "of the steps' time that rank 0 waited for data, and for the slowest rank. left out: the first "
          f"{WARM_UP} steps of each attempt and its first with mode 3, which compile; those behind a checkpoint, a "
          "validation or the start of an epoch.")


def measurements(run):
    """The measurements of a run folder, a list of dicts; also those without a step to count (`"steps": 0`).

    Times are in seconds, fractions from 0 to 1. Values that the logs do not have are None.
    Raises InputError if this is no run folder, or one without a step.
    """
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder; give the folder of a run, Models/<data>_<net>.")
    begun = [line for line in history(run) if line["event"] == "begin"]
    if not begun:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    logs = collections.defaultdict(list)
    for rank in ranks_of(run):
        for line in lines_of(run / f"rank{rank}.jsonl"):
            logs[line["attempt"], line["event"]].append(line)
    launches = [(datetime.datetime.fromisoformat(launch["started"]).timestamp(), launch["config"])
                for launch in read_launches(run) if "started" in launch]
    groups = collections.defaultdict(list)
    for line in begun:
        number, ranks = line["attempt"], line["ranks"]
        steps = logs[number, "step"]
        if not steps:
            continue
        nodes = len({start["node"] or start["host"] for start in logs[number, "start"]})
        # The config of the newest launch that had begun by then.
        cfg = next((cfg for started, cfg in reversed(launches) if started <= steps[0]["time"]), None)
        if cfg is None:
            raise InputError(f"{run}: launches/ lacks the config of its first steps; copy the whole folder of the "
                             "run.")
        samples = steps[0].get("samples") or split_step(cfg, ranks, known_step(run, cfg)).samples
        groups[ranks, nodes, samples].append({"steps": steps, "epochs": logs[number, "epoch"], "config": cfg})
    if not groups:
        raise InputError(f"{run}: its logs have no step yet; let it train for more than {WARM_UP} steps.")
    return [{"run": str(run), "ranks": ranks, "nodes": nodes, "batch": samples, **measure(samples, attempts)}
            for (ranks, nodes, samples), attempts in groups.items()]


def countable(steps):
    """{step: line} of the steps of an attempt that are measured."""
    first_open = next((number for number, line in enumerate(steps) if line["open"]), 0)
    return {line["step"]: line for number, line in enumerate(steps)
            if number >= WARM_UP and number != first_open and not line["spent"].keys() & set(ONE_OFF)}


def measure(samples, attempts):
    """The measurement of attempts with the same ranks, nodes and samples per step, as in `measurements`."""
    counted, spent = {}, collections.Counter()
    for attempt in attempts:
        counted.update(countable(attempt["steps"]))
    for line in counted.values():
        spent.update(line["spent"])
    seconds, count = [sum(line["spent"].values()) for line in counted.values()], len(counted)
    total_s = max(sum(seconds), 1e-9)
    return {"steps": count, "step_s": statistics.median(seconds) if count else None,
            "samples_per_s": samples * count / total_s if count else None,
            "left_out": len({line["step"] for attempt in attempts for line in attempt["steps"]}) - count,
            "data_share": spent["data"] / total_s, "agree_share": spent["agree"] / total_s,
            "mode3_share": sum(line["open"] for line in counted.values()) / max(count, 1),
            "epoch_s": epoch_seconds(attempts), "config": attempts[-1]["config"]}


def epoch_seconds(attempts):
    """Median wall time of the complete epochs of an attempt, validation and checkpoint included; None without one.

    The first epoch of an attempt includes compilation, so it counts only if there is no other.
    """
    first, later = [], []
    for attempt in attempts:
        steps, epochs = attempt["steps"], attempt["epochs"]
        later += [after["time"] - before["time"] for before, after in itertools.pairwise(epochs)]
        if epochs and sum(line["epoch"] == epochs[0]["epoch"] for line in steps) == epochs[0]["steps"]:
            own = [value for name, value in steps[0]["spent"].items() if name == "epoch" or name not in ONE_OFF]
            first.append(epochs[0]["time"] - steps[0]["time"] + sum(own))
    return statistics.median(later or first) if later or first else None


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
            raise InputError(f"{run}: none of its {sum((row['left_out'] for row in measured))} steps counts, "
                             f"because the first {WARM_UP} of each attempt and those after a checkpoint or a "
                             "validation are left out; let it train longer.")
        notes += [f"{run} with {row['ranks']} ranks: no step is left to measure, so it is left out."
                  for row in measured if not row["steps"]]
        rows += [row for row in measured if row["steps"]]
    rows.sort(key=lambda row: row["ranks"])
    for row in rows:
        row["speedup"] = row["samples_per_s"] / rows[0]["samples_per_s"]
        row["efficiency"] = row["speedup"] * rows[0]["ranks"] / row["ranks"]
    configs = [row.pop("config") for row in rows]
    keys = sorted({key for cfg in configs for key in cfg if key.split(".")[0] in SAME_SECTIONS or key in SAME_KEYS})
    differing = [key for key in keys if any(cfg.get(key) != configs[0].get(key) for cfg in configs)]
    if differing:
        notes.append(f"Not the same work everywhere: the configs differ in {', '.join(differing)}.")
    opened = [row["mode3_share"] for row in rows]
    if max(opened) - min(opened) > 0.05:
        notes.append(f"Not the same work everywhere: mode 3 ran in {100 * min(opened):.0f} to "
                     f"{100 * max(opened):.0f} % of the steps (registration.gate).")
    if len({row["batch"] for row in rows}) == 1 < len({row["ranks"] for row in rows}):
        notes.append("The effective batch is the same everywhere (strong scaling).")
    return rows, notes


def report(runs, out):
    """Measure runs, write `scaling.html` to `out`, and print the table and a last line of JSON.

    runs: Paths of run folders. out: Path of a folder, created. Returns the exit code.
    Raises InputError for a folder that is no run or has no step to measure, OSError if `out` cannot be written.
    """
    rows, notes = compare(runs)
    table = [[*[row[key] and factor * row[key] for _, key, factor, _ in COLUMNS], row["run"]] for row in rows]
    header, formats = [*[name for name, *_ in COLUMNS], "run"], [*[form for *_, form in COLUMNS], None]
    ranks = [row["ranks"] for row in rows]
    ideal = [rows[0]["samples_per_s"] * number / ranks[0] for number in ranks]
    charts = grid([line_chart("samples per second", [("measured", ranks, [row["samples_per_s"] for row in rows]),
                                                     ("ideal", ranks, ideal)], across="ranks"),
                   line_chart("efficiency of a rank, %",
                              [("measured", ranks, [100 * row["efficiency"] for row in rows])], across="ranks")])
    page = write_page(out / "scaling.html", "Scaling", " ".join(notes),
                      [("", charts + table_html(header, table, METHOD, formats))])
    print("\n".join([text_table(header, table, formats), "", *notes, f"report: {page.resolve()}"]))
    print(json.dumps({"rows": rows, "notes": notes, "warm_up": WARM_UP, "page": str(page)}))
    return DONE


def main(argv=None):
    parser = argparse.ArgumentParser(description="Speed of runs by number of ranks: samples/s, time per epoch, "
                                     "efficiency; table and page, last a line of JSON.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, Models/<data>_<net>")
    parser.add_argument("--out", type=Path, default=Path("Logs/scaling"), metavar="FOLDER", help="for the page")
    return run_program(lambda args: report(args.runs, args.out), parse_options(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
