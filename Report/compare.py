"""Runs side by side: `python -m Report.compare RUN RUN...`.

It shows the keys that differ, the curves on one axis, results and cost. It writes one page and prints the final
figures, also as a Markdown table for a notebook.
"""
import argparse
import sys
from pathlib import Path

import numpy as np

from Report.charts import grid, line_chart
from Report.goodput import add_up, goodput
from Report.page import markdown_table, table_html, text_table, write_page
from Report.run import differing_keys, duration, epochs_done, settings_of, speed, state_of
from Report.run_charts import smoothed
from Report.run_logs import launches_behind, read_run
from Runtime.errors import DONE, InputError, parse_options, run_program

# Keys that say where a run is, not what it does.
PLACES = ("run.models", "run.logs", "run.notify", "data.name", "data.cache", "data.stage")
SMOOTH, POINTS = 20, 150  # steps of the running mean of a curve; points of it at most


def short_names(runs):
    """A distinct name for each run: the end of its path."""
    paths = [path.resolve().parts for path in runs]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise InputError(f"{runs[0]}: the same run is named twice; name each run once.")


def figures(found):
    """{name: value} of a run's outcome: state, epochs, steps, final losses and scores, time, rank hours, goodput."""
    kinds, _ = add_up(found)
    wall, epochs = sum(kinds.values()), found["epochs"]
    rank_s = sum(max(each["ended"] - each["begin"]["time"], 0) * (each["begin"].get("ranks") or 1)
                 for each in found["costs"])  # not the time between attempts
    row = {"state": state_of(found)[0], "epochs": epochs_done(found), "steps": len(found["once"]["step"])}
    last = epochs[-1] if epochs else {}
    row.update({name: last.get(name) for name in found["losses"]})
    row.update({name: lines[-1][name] if lines else None for name, lines in found["scores"].items()})
    best = [line["val_dice"] for line in found["scores"].get("val_dice", [])]
    return {**row, "best val_dice": max(best, default=None), "wall time": duration(wall),
            "rank hours": rank_s / 3600, "goodput %": 100 * goodput(kinds), "samples/s": speed(found)}


def overlaid(runs, names):
    """Charts with a curve for each run: losses as running means, then the validation scores."""
    charts = []
    for loss in dict.fromkeys(loss for found in runs for loss in found["losses"]):
        curves = []
        for name, steps in zip(names, (found["once"] for found in runs)):
            curves.append((name, steps["step"], steps.get(f"terms.{loss}", np.full(len(steps["step"]), np.nan))))
        means = []
        for name, x, y in smoothed(curves, SMOOTH):  # of few points, since bands of several runs would hide each other
            chosen = np.unique(np.linspace(0, len(x) - 1, min(POINTS, len(x))).astype(int))
            means.append((name, x[chosen], y[chosen]))
        charts.append(line_chart(loss, means))
    for score in sorted({score for found in runs for score in found["scores"]}):
        lines = [found["scores"].get(score, []) for found in runs]
        charts.append(line_chart(score, [(name, [line["step"] for line in own], [line[score] for line in own])
                                         for name, own in zip(names, lines)]))
    return grid(charts)


def compared(runs, out):
    """Write the page of two or more runs and print its figures. Raises InputError for one, or a folder that is none."""
    if len(runs) < 2:
        raise InputError(f"compare {runs[0]}: name two runs or more.")
    names, runs = short_names(runs), [read_run(run) for run in runs]
    launches = [launches_behind(found["launches"], found["once"]["step"].max(initial=-1) + 1) or found["launches"][-1:]
                for found in runs]
    keys = differing_keys([list(map(settings_of, each)) for each in launches], PLACES)
    columns = [figures(found) for found in runs]
    rows = [[name, *(column.get(name) for column in columns)]
            for name in dict.fromkeys(name for column in columns for name in column)]
    sections = [("Keys that differ", table_html(["key", *names], keys) if keys else "<p>None.</p>"),
                ("Curves", overlaid(runs, names)), ("Results and cost", table_html(["", *names], rows))]
    page = write_page(out, "Runs side by side", ", ".join(names), sections)
    print(text_table(["key", *names], keys) if keys else "no key differs")
    print(f"\n{text_table(['', *names], rows)}\n\nfor a notebook:\n\n{markdown_table(['', *names], [*keys, *rows])}")
    print(f"\nreport: {page.resolve()}")
    return DONE


def main(argv=None):
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.compare", description="Runs side by side: keys "
                                     "that differ, curves on one axis, final figures, cost; also for a notebook.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, Models/<data>_<net>")
    parser.add_argument("--out", type=Path, default=Path("Logs/compare.html"), metavar="FILE", help="the page")
    return run_program(lambda args: compared(args.runs, args.out), parse_options(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
