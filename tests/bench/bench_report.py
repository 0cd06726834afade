"""What it costs to monitor a run, and whether problems are found in time.

    python tests/bench/bench_report.py [--steps 100000] [--keep FOLDER]

open_s: seconds from the command to the page of a run of 100,000 made-up steps and, if chromium is installed, until it
is drawn. bytes: size of that page. logging_share: fraction of a step that a real training spends on its logs: the line
of each step, timed inside the steps of the hippocampus config, and the lines of all ranks and TensorBoard
(Runtime/progress.py). The watchdog's phases keep a run alive, so they count in the safety_share of bench_runtime.py.
straggler_named: the step at which the rules name the rank, of two real ones, that works 30 % slower. false_alarms:
problems reported in a healthy real run of 500 steps. The last line of standard output is a JSON object.
"""
import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_runtime
from bench_step import ROOT, configuration
from tqdm import tqdm

from Report.page import text_table
from Report.rules import find_all
from Report.run_logs import read_run
from Runtime import progress, watchdog
from tests.faults.common import end_all, launch, new_folder, run_of, wait
from tests.launching import until
from tests.made_up_run import made_up_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TARGETS = {"open_s": 5.0, "logging_share": 0.005, "straggler_named": 50, "false_alarms": 0}
STEPS = 30
# What a real launch needs to be quick and to have steps that are alike.
QUIET = {"run__checkpoint_steps": 0, "run__val_every": 1000, "run__keep_every": 0, "data__img_size": 16}


def open_page(parent, steps):
    """(seconds of the command, seconds of a browser or None, bytes of the page)."""
    run = made_up_run(parent / "long", steps)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "Report.run", run], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    built = time.perf_counter() - began
    page, browser = run / "report.html", next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return built, None, page.stat().st_size
    shot = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,4000"]
    seconds = []
    for target in ("about:blank", page.as_uri()):  # the first is what the browser itself takes to start and to end
        began = time.perf_counter()
        subprocess.run([*shot, f"--screenshot={parent / 'page.png'}", target], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return built, max(seconds[1] - seconds[0], 0.0), page.stat().st_size


def logging_share(folder):
    """(seconds of logging in a step, seconds of a step), medians of real steps of the hippocampus config."""
    cfg = {**configuration(folder), "run.epochs": 1000}
    bench_runtime.TIMED.clear()
    bench_runtime.TIMED.update({"logging": (watchdog, "event")})
    state, rows = bench_runtime.measure(cfg, Path(folder), STEPS)
    line = {"lr": 1e-4, "samples": 1, "norms": dict.fromkeys(("diffusion", "contrastive", "registration"), 1.0)}
    curves = progress.new_writer(Path(folder) / "board", 0)
    began = time.perf_counter()
    sums = progress.new_pace()
    for _ in range(50 * progress.EVERY):  # besides, as the loop of that benchmark does not call it
        progress.keep_pace(sums, line, {"forward": 1.0, "data": 0.1}, state.watch, curves)
    progress.flush(curves)
    pace_s = (time.perf_counter() - began) / (50 * progress.EVERY)
    rows = [row for row in rows if not row["writing"]] or rows  # a checkpoint that is being flushed delays any write
    return statistics.median(row["logging"] for row in rows) + pace_s, statistics.median(row["step"] for row in rows)


def straggler_named(parent, share=0.3):
    """The first step at which the rules name rank 1, slowed by that share; None if they do not within 200 steps."""
    folder = new_folder(parent, "slow")
    faults = [{"id": f"slow {phase}", "do": "slow_down", "share": share, "rank": 1, "phase": phase, "always": True}
              for phase in ("deform", "forward", "accumulate", "backward", "optimizer")]
    process = launch(folder, 2, faults, run__epochs=17, **QUIET)
    until(lambda: (run_of(folder) / "attempts.jsonl").exists())
    named = None
    while process.poll() is None and named is None:
        time.sleep(0.2)
        findings = [each for each in find_all(read_run(run_of(folder))) if each["rule"] == "straggler"]
        named = next((each["step"] for each in findings if each["sentence"].startswith("rank 1 ")), None)
    end_all()
    return named


def false_alarms(parent, steps=500):
    """What the rules have found in a healthy real run of so many steps, looked at all the time."""
    folder, seen = new_folder(parent, "healthy"), {}
    process = launch(folder, 2, run__epochs=-(-steps // 12), **QUIET)
    until(lambda: (run_of(folder) / "attempts.jsonl").exists())
    bar = tqdm(total=steps, desc="healthy run", unit="step", file=sys.stderr, mininterval=10)
    while process.poll() is None:
        found = read_run(run_of(folder))
        seen.update({each["rule"]: each["sentence"] for each in find_all(found)})
        bar.update(int(found["steps"]["is_step"].sum()) - bar.n)
        time.sleep(2)
    bar.close()
    if wait(process):
        raise RuntimeError(f"the healthy run failed: {folder}/log.txt")
    seen.update({each["rule"]: each["sentence"] for each in find_all(read_run(run_of(folder)))})
    return seen


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of the made-up run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there and leave everything")
    args = parser.parse_args(argv)
    parent = args.keep or Path(tempfile.mkdtemp(prefix="report-"))
    parent.mkdir(parents=True, exist_ok=True)
    built, drawn, size = open_page(parent, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        logging_s, step_s = logging_share(folder)
    named, alarms = straggler_named(parent), false_alarms(parent)
    rows = [["page written", built, "s"], ["page drawn by a browser", drawn, "s"], ["page", size / 1e6, "MB"],
            ["logging of a step", 1e3 * logging_s, "ms"], ["step", 1e3 * step_s, "ms"],
            ["slow rank named at step", named, ""], ["findings in a healthy run", len(alarms), ""]]
    print(text_table(["what", "value", "unit"], rows))
    for rule, sentence in alarms.items():
        print(f"false alarm: {rule}: {sentence}")
    result = {"open_s": round(built + (drawn or 0.0), 2), "bytes": size, "logging_share": round(logging_s / step_s, 5),
              "straggler_named": named, "false_alarms": len(alarms)}
    missed = [name for name, most in TARGETS.items() if result[name] is None or result[name] > most]
    print(f"missed: {', '.join(missed)}" if missed else "all targets are met")
    print(json.dumps(result))
    if not args.keep:
        shutil.rmtree(parent)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
