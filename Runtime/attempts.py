"""Attempts: each launch of a run is one, numbered in `<run>/attempts.jsonl` with how it ended and what came next.

The launcher (bash_train_multi_nodes.sh) calls `python -m Runtime.attempts begin ...` before and `... end CODE` after
each round; a training without a launcher does so by itself. Needs no torch. Runtime/goodput.py adds up what they cost.
"""
import argparse
import functools
import itertools
import json
import math
import os
import shlex
import socket
import sys
import time
from pathlib import Path

from Runtime.config import load_config
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError
from Runtime.files import append_line, is_passing, patiently, read_lines, write_file
from Runtime.global_batch import fix_step, split_step, usable
from Runtime.manifest import durable_step
from Runtime.run_lock import hold, lock, run_folder, touch, unlock
from Runtime.verdict import judge, sentence

SAME_DEATHS, ANY_DEATHS = 3, 10  # without a new durable step: so many and the loop stops
PATIENCE_S = 600.0  # where no config has been read yet


def history(run):
    """The lines of attempts.jsonl; one that a dying machine cut short is left out."""
    return read_lines(run / "attempts.jsonl")


def append(run, line):
    append_line(run / "attempts.jsonl", line)


def begin(run, loop, world_size):
    """Number a new attempt. loop: token that is the same for all rounds of one launch. Returns the number."""
    lines = history(run)
    begun = [line for line in lines if line["event"] == "begin"]
    ended = {line["attempt"] for line in lines if line["event"] == "end"}
    if begun and begun[-1]["attempt"] not in ended:  # nobody was left to write it
        end(run, begun[-1]["attempt"], None)
    attempt = begun[-1]["attempt"] + 1 if begun else 0
    append(run, {"event": "begin", "attempt": attempt, "loop": loop, "time": time.time(), "ranks": world_size,
                 "host": socket.gethostname(), "job": os.environ.get("SLURM_JOB_ID", ""), "durable": durable_step(run)})
    return attempt


def end(run, attempt, code, quiet=False, patience_s=0.0):
    """Judge an attempt, decide what comes next, write both down and say so.

    code: exit code of the launch, None where nobody saw it. quiet: the process itself has said how it ended.
    patience_s: how long a file system that is full or does not answer is waited for.
    Returns the decision: "done", "continue", "restart" (planned), "step back" (one checkpoint) or "stop".
    """
    line = patiently(lambda: judged(run, attempt, code), patience_s, run)
    patiently(lambda: append(run, line), patience_s, run / "attempts.jsonl")
    if line["verdict"]["dead"]:
        content = {**line["verdict"], "next": line["next"], "sentence": line["sentence"]}
        patiently(lambda: write_file(run / "verdict.json", json.dumps(content, indent=1) + "\n"), patience_s,
                  run / "verdict.json")
    if not quiet:
        print(line["sentence"], file=sys.stderr, flush=True)
    return line["decision"]


def judged(run, attempt, code):
    """The line that an attempt's end adds to attempts.jsonl."""
    lines = history(run)
    begun = next(line for line in lines if line["event"] == "begin" and line["attempt"] == attempt)
    verdict = judge(run, attempt, begun["ranks"], code)
    line = {"event": "end", "attempt": attempt, "loop": begun["loop"], "code": code,
            "time": time.time() if code is not None else verdict["ended"] or begun["time"],
            "durable": durable_step(run), "cause": verdict["cause"],
            "signature": [verdict[key] for key in ("cause", "mode", "phase", "step")]}
    decision, why = decide([*lines, line], verdict)
    return {**line, "decision": decision, "verdict": verdict, "next": why,
            "sentence": f"{sentence(verdict).rstrip('.')}. {why}"}


def decide(lines, verdict):
    """(decision, what happens next in one sentence) from the ends of this loop's attempts, the last one included."""
    last = lines[-1]
    if verdict["cause"] == "done":
        return "done", "The training is complete."
    if verdict["cause"] == "refused" and verdict["phase"] in (
            "launch", "start", "meet", "data set", "stage", "join", "restore"):
        return "stop", "This needs a person: correct it and start again."
    ends = [line for line in lines if line["event"] == "end" and line["loop"] == last["loop"]]
    if not verdict["dead"]:
        same = len(list(itertools.takewhile(lambda line: is_same(line, last), reversed(ends))))
        if same >= SAME_DEATHS:  # each step that was done and saved would have made it another one
            return "stop", f"Stopped: {same} planned restarts in a row at step {last['durable']}."
        return "restart", f"Continues from step {last['durable']}."
    deaths = [line for line in ends if line["durable"] == last["durable"] and line["cause"] != "planned restart"]
    same = [line for line in deaths if is_same(line, last)]
    # A file system comes back: no checkpoint is to blame, and it is given longer.
    again = 0 if verdict["cause"] == "disk" else len(same)
    if again >= SAME_DEATHS or len(deaths) >= ANY_DEATHS:
        count = f"the same end {again} times" if again >= SAME_DEATHS else f"{len(deaths)} ends"
        return "stop", f"Stopped: {count} without a new durable step after step {last['durable']}."
    if again == SAME_DEATHS - 1:
        return "step back", "The same death twice without a new durable step: goes one checkpoint back."
    return "continue", f"Continues from the newest checkpoint that verifies (step {last['durable']})."


def is_same(line, other):
    """Whether two attempts ended in the same way at the same place, with the same durable step."""
    return (line["signature"], line["durable"]) == (other["signature"], other["durable"])


# ---------------------------------------------------------------------------------------------------------------------
# What the launcher calls
# ---------------------------------------------------------------------------------------------------------------------

def launcher_begin(argv):
    """Before a round: check the config, take the lock, number the attempt; print shell variables for the launcher."""
    parser = argparse.ArgumentParser(prog="attempts begin")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--launcher-pid", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that are there")
    parser.add_argument("--tasks", type=int, required=True, help="ranks on each of them")
    parser.add_argument("--of", type=int, default=0, help="ranks that were asked for, before nodes were left out")
    args, _ = parser.parse_known_args(argv)
    patiently(lambda: Path(args.config).exists() and Path(args.config).read_bytes(), PATIENCE_S, args.config)
    cfg = load_config(args.config, args.overrides)
    floor = cfg["run.deadline_floor_s"]
    patience = cfg["run.patience_s"]
    run, token, requeued = take_folder(cfg, args.fresh, args.launcher_pid)
    step, nodes, tasks = patiently(lambda: share_out(run, cfg, args.nodes, args.tasks, args.of), patience, run)
    lines = patiently(lambda: history(run), patience, run)
    ends = [line for line in lines if line["event"] == "end" and line["loop"] == token]
    step_back = ends[-1]["sentence"] if ends and ends[-1]["decision"] == "step back" else ""
    variables = {"OMNIMORPH_RUN": run, "OMNIMORPH_TOKEN": token, "OMNIMORPH_STEP_BACK": step_back,
                 "OMNIMORPH_STEP": json.dumps(step), "NODE_COUNT": nodes, "TASKS_PER_NODE": tasks,
                 "RANKS": nodes * tasks,
                 "OMNIMORPH_ATTEMPT": patiently(lambda: begin(run, token, nodes * tasks), patience, run),
                 "OMNIMORPH_ROUND": len(ends) + requeued, "FREE_PORT": free_port(),
                 "ROUND_SECONDS": f"{cfg['run.round_seconds']:g}", "MAX_ROUNDS": cfg["run.max_rounds"],
                 "PAUSE_PLANNED": cfg["run.pause_planned_s"], "PAUSE_CRASH": cfg["run.pause_crash_s"],
                 "OMNIMORPH_PATIENCE_S": cfg["run.patience_s"],
                 "GRACE": math.ceil(cfg["run.grace_s"]), "START_SECONDS": math.ceil(cfg["run.deadline_first_s"]),
                 "LINGER": math.ceil(max(floor, 10)), "LEAVE_SECONDS": math.ceil(max(3 * floor, 10))}
    for name, value in variables.items():
        print(f"{name}={shlex.quote(str(value))}")


def take_folder(cfg, fresh, launcher_pid):
    """(folder of the run, token of its lock, whether this job was requeued and goes on there); waits with patience."""
    in_time = functools.partial(patiently, seconds=cfg["run.patience_s"], what=cfg["run.models"])
    run, again = os.environ.get("OMNIMORPH_RUN"), os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    requeued = in_time(lambda: run_of_job(cfg)) if again else None
    name = cfg["data.name"], cfg["model.name"]
    run = Path(run or requeued or in_time(lambda: run_folder(cfg["run.models"], *name, fresh)))
    token = in_time(lambda: lock(run, stale_after_s(cfg), pid=launcher_pid, token=os.environ.get("OMNIMORPH_TOKEN")))
    return run, token, bool(requeued)


def share_out(run, cfg, nodes, tasks, asked):
    """The step of the run, and how many of the nodes and of the ranks on each share it: (step, nodes, tasks).

    Where fewer ranks are left than were asked for, or fewer start than at first, as many as possible go on, and it is
    said how many stay idle. Raises InputError where the config does not fit the ranks that were asked for.
    """
    ranks = nodes * tasks
    asked = max(asked, ranks)
    step = fix_step(run, cfg, asked)
    used, each = usable(cfg, step, nodes, tasks)
    if used * each < ranks == asked and asked >= step["ranks"]:
        split_step(cfg, ranks, step)  # says what does not divide
    most = max(asked, step["ranks"])
    if used * each < most:
        count = split_step(cfg, used * each, step)["sample_batches"]
        idle = f"; {ranks - used * each} more could not share it evenly and stay idle" if used * each < ranks else ""
        print(f"{used * each} of {most} ranks ({used} x {each}) do the whole step of {step['samples']} samples, "
              f"{count} batches each{idle}", file=sys.stderr, flush=True)
    return step, used, each


def run_of_job(cfg):
    """The folder in which this job, requeued since, has trained before; None where it has not come to that."""
    folders = Path(cfg["run.models"]).glob(f"{cfg['data.name']}_{cfg['model.name']}*")
    jobs = {line["job"]: folder for folder in folders for line in history(folder) if line["event"] == "begin"}
    return jobs.get(os.environ["SLURM_JOB_ID"])


def launcher_end(argv):
    """After a round: judge and decide. Returns the exit code of the round: 0, 42 (planned), 43 (stop) or 1 (crash)."""
    run, attempt, code = Path(os.environ["OMNIMORPH_RUN"]), int(os.environ["OMNIMORPH_ATTEMPT"]), int(argv[0])
    hold(run, os.environ["OMNIMORPH_TOKEN"])
    touch(run)  # raises where somebody else has taken the folder over since: then nothing may be written here
    decision = end(run, attempt, code, patience_s=float(os.environ.get("OMNIMORPH_PATIENCE_S", PATIENCE_S)))
    return {"done": DONE, "restart": PLANNED_RESTART, "stop": STOP}.get(decision, 1)


def stale_after_s(cfg):
    """When a lock that is not touched may be taken: later than every deadline of its holder."""
    return 3 * max(cfg["run.deadline_first_s"], cfg["run.deadline_floor_s"], cfg["run.pause_crash_s"], 60.0)


def free_port():
    """A free TCP port of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main(argv):
    try:
        calls = {"begin": launcher_begin, "end": launcher_end, "port": lambda _: print(free_port()),
                 "unlock": lambda _: unlock(Path(os.environ["OMNIMORPH_RUN"]), os.environ["OMNIMORPH_TOKEN"])}
        if not argv or argv[0] not in calls:
            raise InputError(f"python -m Runtime.attempts is for the launcher and knows {', '.join(calls)}; where the "
                             "time of a run went tells python -m Runtime.goodput Models/<run>.")
        return calls[argv[0]](argv[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    except OSError as error:
        if not is_passing(error):
            raise
        print(f"error: {error.filename or 'the run'}: {error.strerror or error}, and that did not pass: make room, or "
              "wait until it answers, then start the same command again.", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
