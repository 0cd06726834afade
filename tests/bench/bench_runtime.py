"""What safety costs: agreement, watchdog and leak monitor in a step, checkpoints, and resuming after a restart.

    python tests/bench/bench_runtime.py [--steps 40]

One run of the hippocampus config with mode 3 in every step; the first steps, which compile, are left out. Volumes are
those of bench_step.py; checkpoints go to the temporary folder.

safety_share: watchdog (breadcrumb and heartbeat, deadline, log), leak monitor with a full window, and fingerprints are
timed inside real steps. Agreements are timed between two real processes that do nothing else and so arrive together:
waits between ranks are no cost of agreement, because ranks would otherwise wait when they sum gradients.
checkpoint_share: share of a step spent waiting for `training_state.save`, at one checkpoint per 50 steps. A thread then
writes; how much this slows the steps begun meanwhile is a separate row, not part of the share.
resume_s: from the start of `python OM_train_3modes.py` to the end of its first step, for an early and a late step.
"""
import argparse
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_step import ROOT, configuration
from tqdm import tqdm

import OM_train_3modes as om
from Dataloader.dataset import epoch_batches
from Dataloader.sampler import steps_left
from Report.page import text_table
from Runtime import agree, checkpoint, launch, memory, watchdog
from Runtime.config import save_config
from Runtime.device import describe, synchronize
from Runtime.errors import PLANNED_RESTART
from Runtime.run_lock import run_folder
from Supervisor.attempts import free_port, read_lines
from tests.tiny import begin

WARM_UP, AGREEMENTS, LATE_STEP = 5, 400, 20000
SAVE_EVERY, SAVE_SHARE = 5, 50  # steps: measured so often, counted as one in so many
TARGETS = {"safety_share": 0.02, "checkpoint_share": 0.01, "resume_s": 15}
TIMED = {"watchdog": (watchdog, "phase", "new_step", "end_step", "event"), "leak monitor": (memory, "watch"),
         "fingerprints of the inputs": (agree, "fingerprint")}


def time_parts():
    """From now on the functions of TIMED add the seconds spent in them to the returned dict of part: seconds."""
    seconds, inside = dict.fromkeys(TIMED, 0.0), []

    def wrap(function, part):
        def timed(*args, **kwargs):
            inside.append(part)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            inside.pop()
            if not inside:  # new_step calls phase, and its time has that of phase in it
                seconds[part] += time.perf_counter() - started
            return result
        return timed

    for part, (module, *names) in TIMED.items():
        for name in names:
            setattr(module, name, wrap(getattr(module, name), part))
    return seconds


def take_steps(state, batches, count, seconds):
    """Turns of the training's loop, without its progress bar. seconds: the dict of `time_parts`.

    Returns a dict for each: seconds of "step", of "save" before it (or None), and of the parts; "writing", whether a
    checkpoint was being written as the step began.
    """
    progress, rows = state.progress, []
    for number in tqdm(range(count), "steps", file=sys.stderr, leave=False):
        save = None
        if number % SAVE_EVERY == 0:
            om.training_state.finish_saving(state)  # in a training, where saves are rarer, it is long over
            started = time.perf_counter()
            om.training_state.save(state, f"tmp/step{state.progress.step}.pth")
            save = time.perf_counter() - started
        seconds.update(dict.fromkeys(seconds, 0.0))
        writing, started = bool(state.saving and not state.saving.done()), time.perf_counter()
        watchdog.new_step(progress.step)
        volumes, pairs = next(batches)
        memory.watch(state.watch, progress.step)
        line, *_ = om.train_step(state, volumes, pairs)
        om.advance(progress, state.split)
        synchronize(state.device)
        watchdog.event("step", **line, spent=watchdog.end_step())
        rows.append({"step": time.perf_counter() - started, "save": save, "writing": writing, **seconds})
    return rows


def measure(cfg, run, steps):
    """Train in this process under a watchdog. Returns the state and what `take_steps` does; leaves checkpoints."""
    state = begin(cfg, run)
    batches = epoch_batches(cfg, state.dataset, state.listed, state.progress, state.split, state.ranks)
    watchdog.start(run, 0, 0, cfg, launcher=False)
    seconds, state.watch = time_parts(), memory.new_watch(state.device, cfg["run.memory_limit_gb"])
    take_steps(state, batches, WARM_UP, seconds)
    state.watch = memory.new_watch(state.device, cfg["run.memory_limit_gb"])
    for number in range(-3 * memory.WINDOW - 2, 0):  # as full as after the first minute of a training
        memory.watch(state.watch, number)
    rows = take_steps(state, batches, steps, seconds)
    om.training_state.finish_saving(state, last=True)
    faulthandler.cancel_dump_traceback_later()  # the deadlines are the training's, not those of what comes next
    watchdog.STATE["file"] = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return state, rows


def median_s(function, count):
    """Median seconds of function(number) over `count` calls; the first tenth is left out."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        function(number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[count // 10:])


def one_of_two():
    """One of two ranks, in a process of its own without a watchdog: prints the median seconds of an agreement."""
    torch.set_num_threads(1)
    ranks = launch.environment()
    launch.rendezvous(ranks, 60)
    launch.join(ranks, torch.device("cpu"), {"run.deadline_first_s": 60, "run.backend_timeout_s": 60})
    print(median_s(lambda step: agree.agree(ranks, step, "diffusion", 77, terms=(1, 2, 3, 4)), AGREEMENTS))
    launch.leave(ranks)


def agreement_s():
    """Median seconds of one agreement between two processes, as the slower one sees it."""
    address = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [subprocess.Popen([sys.executable, __file__, "--one-of-two"], env={**address, "RANK": str(rank)},
                             stdout=subprocess.PIPE, text=True) for rank in range(2)]
    return max(float(process.communicate(timeout=120)[0]) for process in both)  # one that failed has said nothing


def resume_s(cfg, content, folder):
    """Seconds from the start of the training script to the end of its first step, continuing from `content`."""
    cfg = {**cfg, "run.models": str(folder / "Models"), "run.logs": str(folder / "Logs")}
    run = run_folder(cfg)
    checkpoint.save(run, "tmp/given.pth", content)
    save_config(cfg, folder / "config.yaml")
    alone, started = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, time.time()
    done = subprocess.run([sys.executable, "OM_train_3modes.py", "--config", folder / "config.yaml",
                           "--max-steps-before-restart", "1"], cwd=ROOT, env=alone, timeout=600, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ended = [line["time"] for line in read_lines(run / "rank0.jsonl") if line["event"] == "step"]
    if done.returncode != PLANNED_RESTART or f", step {content['step']}\n" not in done.stdout or len(ended) != 1:
        raise RuntimeError(f"step {content['step']} was not continued (exit code {done.returncode}):\n{done.stdout}")
    return ended[0] - started


def resumes(cfg, state):
    """{step: seconds of a resume} from the newest checkpoint of the run, and from the same as if late in a long run."""
    early = checkpoint.load(state.folder / checkpoint.newest(state.folder))
    epoch, within = divmod(LATE_STEP, steps_left(cfg, len(state.dataset), state.listed, state.split))
    late = {**early, "epoch": epoch, "step_in_epoch": within, "step": LATE_STEP,
            **{key: within * getattr(state.split, key) for key in ("samples", "pairs")}}
    return {content["step"]: resume_s(cfg, content, state.folder / f"from{content['step']}")
            for content in tqdm([early, late], "resumes", file=sys.stderr, leave=False)}


def report(cfg, rows, comparison, agreement, resumed):
    """Print three tables. Returns {name of the figure: value}."""
    every, during = cfg["run.checksum_every"], [row["step"] for row in rows if row["writing"]]
    others = [row for row in rows if not row["writing"]] or rows  # a fast device never sees the end of a write
    step = statistics.median(row["step"] for row in others)
    parts = {**{part: statistics.median(row[part] for row in others) for part in TIMED},
             "3 agreements between 2 ranks": 3 * agreement, f"comparison of all weights / {every}": comparison / every}
    safety = sum(parts.values())
    # Alone, its two agreements exchange nothing.
    wait = statistics.median(row["save"] for row in rows if row["save"] is not None) + 2 * agreement
    slower = statistics.median(during) - step if len(during) < len(rows) and during else float("nan")
    saves = {"wait for a checkpoint": wait, f"wait / {SAVE_SHARE}": wait / SAVE_SHARE,
             f"a step is slower if begun during the write ({len(during)} of {len(rows)})": slower}
    for title, lines in (("safety", {**parts, "all of these": safety}), ("checkpoints", saves)):
        lines = [[name, 1e3 * value, 100 * value / step] for name, value in {**lines, "whole step": step}.items()]
        print(f"{text_table([title, 'ms', '% of a step'], lines, [None, '.3f', '.3f'])}\n")
    lines = [[f"continued from step {number}", seconds] for number, seconds in resumed.items()]
    print(f"{text_table(['resume', 's to the end of the first step'], lines, [None, '.1f'])}\n")
    return dict(zip(TARGETS, (safety / step, wait / SAVE_SHARE / step, max(resumed.values()))))


def main():
    parser = argparse.ArgumentParser(description="What safety costs: of a step, at a checkpoint, at a restart.")
    parser.add_argument("--steps", type=int, default=40, help="steps to measure, one in five after a save (40)")
    parser.add_argument("--one-of-two", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_of_two:
        return one_of_two()
    with tempfile.TemporaryDirectory() as folder:
        cfg = {**configuration(folder), "run.epochs": 1000}
        state, rows = measure(cfg, Path(folder), args.steps)
        comparison = median_s(lambda _: agree.digest(agree.checksums(state.net.parameters())), 10)
        agreement, resumed = agreement_s(), resumes(cfg, state)
    print(f"hippocampus config, {args.steps} steps, batch {cfg['data.batchsize']}, {describe(state.device)}, torch "
          f"{torch.__version__}\nmedians, but for one row of steps begun while no checkpoint was being written\n")
    result = report(cfg, rows, comparison, agreement, resumed)
    for name, value in result.items():
        print(f"{name} = {value:.4g}, target at most {TARGETS[name]}: {'met' if value <= TARGETS[name] else 'NOT met'}")
    print("\n" + json.dumps({name: round(value, 5) for name, value in result.items()}))


if __name__ == "__main__":
    main()
