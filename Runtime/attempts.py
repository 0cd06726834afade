"""Attempts: each launch of a run is one, numbered in `<run>/attempts.jsonl` with how it ended and what came next.

    python -m Runtime.attempts Models/<run>            table: where the wall time went, by kind and by cause

The launcher (bash_train_multi_nodes.sh) calls `begin` before and `end` after each round; a training without a launcher
does so by itself. Needs no torch.
"""
import argparse
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
from Runtime.folder import lock, run_folder, touch, unlock
from Runtime.shares import fix_step, shares, usable
from Runtime.verdict import judge, sentence

SAME_DEATHS, ANY_DEATHS = 3, 10  # without a new durable step: so many and the loop stops


def history(run):
    """The lines of attempts.jsonl; one that a dying machine cut short is left out."""
    return read_lines(run / "attempts.jsonl")


def read_lines(path):
    lines = []
    if path.exists():
        with open(path, errors="replace") as file:
            for line in file:
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    continue
    return lines


def append(run, line):
    with open(run / "attempts.jsonl", "ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")  # a machine died in the middle of a line
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def durable_step(run):
    """Steps of the newest checkpoint in the manifest; 0 where there is none."""
    try:
        entries = json.loads((run / "manifest.json").read_text())["checkpoints"].values()
        return max((entry["step"] for entry in entries), default=0)
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def begin(run, loop, world):
    """Number a new attempt. loop: token that is the same for all rounds of one launch. Returns the number."""
    lines = history(run)
    begun = [line for line in lines if line["event"] == "begin"]
    ended = {line["attempt"] for line in lines if line["event"] == "end"}
    if begun and begun[-1]["attempt"] not in ended:  # nobody was left to write it
        end(run, begun[-1]["attempt"], None)
    attempt = begun[-1]["attempt"] + 1 if begun else 0
    append(run, {"event": "begin", "attempt": attempt, "loop": loop, "time": time.time(), "ranks": world,
                 "host": socket.gethostname(), "job": os.environ.get("SLURM_JOB_ID", ""), "durable": durable_step(run)})
    return attempt


def end(run, attempt, code, quiet=False):
    """Judge an attempt, decide what comes next, write both down and say so.

    code: exit code of the launch, None where nobody saw it. quiet: the process itself has said how it ended.
    Returns the decision: "done", "continue", "restart" (planned), "step back" (one checkpoint) or "stop".
    """
    lines = history(run)
    begun = next(line for line in lines if line["event"] == "begin" and line["attempt"] == attempt)
    verdict = judge(run, attempt, begun["ranks"], code)
    line = {"event": "end", "attempt": attempt, "loop": begun["loop"], "code": code,
            "time": time.time() if code is not None else verdict["ended"] or begun["time"],
            "durable": durable_step(run), "cause": verdict["cause"],
            "signature": [verdict[key] for key in ("cause", "mode", "phase", "step")]}
    decision, why = decide([*lines, line], verdict)
    said = f"{sentence(verdict).rstrip('.')}. {why}"
    append(run, {**line, "decision": decision, "verdict": verdict, "sentence": said})
    if verdict["dead"]:
        (run / "verdict.json").write_text(json.dumps({**verdict, "next": why, "sentence": said}, indent=1) + "\n")
    if not quiet:
        print(said, file=sys.stderr, flush=True)
    return decision


def decide(lines, verdict):
    """(decision, what happens next in one sentence) from the ends of this loop's attempts, the last one included."""
    last = lines[-1]
    if verdict["cause"] == "done":
        return "done", "The training is complete."
    if verdict["cause"] == "refused" and verdict["phase"] in (
            "launch", "start", "meet", "data set", "stage", "join", "restore"):
        return "stop", "This needs a person: correct it and start again."
    ends = [line for line in lines if line["event"] == "end" and line["loop"] == last["loop"]
            and line["durable"] == last["durable"]]
    same = [line for line in ends if line["signature"] == last["signature"]]
    if len(same) >= SAME_DEATHS or len(ends) >= ANY_DEATHS:
        count = f"the same end {len(same)} times" if len(same) >= SAME_DEATHS else f"{len(ends)} ends"
        return "stop", f"Stopped: {count} without a new durable step after step {last['durable']}."
    if not verdict["dead"]:
        return "restart", f"Continues from step {last['durable']}."
    if len(same) == SAME_DEATHS - 1:
        return "step back", "The same death twice without a new durable step: goes one checkpoint back."
    return "continue", f"Continues from the newest checkpoint that verifies (step {last['durable']})."


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
    cfg = load_config(args.config, args.overrides)
    floor = cfg["run.deadline_floor_s"]
    run, token = os.environ.get("OMNIMORPH_RUN"), os.environ.get("OMNIMORPH_TOKEN")
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and run_of_job(cfg)
    if not run:
        run = requeued or run_folder(cfg["run.models"], cfg["data.name"], cfg["model.name"], args.fresh)
    token = lock(Path(run), stale_after_s(cfg), pid=args.launcher_pid, token=token)
    step, nodes, tasks = share_out(Path(run), cfg, args.nodes, args.tasks, args.of)
    lines = history(Path(run))
    ends = [line for line in lines if line["event"] == "end" and line["loop"] == token]
    step_back = ends[-1]["sentence"] if ends and ends[-1]["decision"] == "step back" else ""
    variables = {"OMNIMORPH_RUN": run, "OMNIMORPH_TOKEN": token, "OMNIMORPH_STEP_BACK": step_back,
                 "OMNIMORPH_STEP": json.dumps(step), "NODE_COUNT": nodes, "TASKS_PER_NODE": tasks,
                 "RANKS": nodes * tasks, "OMNIMORPH_ATTEMPT": begin(Path(run), token, nodes * tasks),
                 "OMNIMORPH_ROUND": len(ends) + bool(requeued), "FREE_PORT": free_port(),
                 "ROUND_SECONDS": f"{cfg['run.round_seconds']:g}", "MAX_ROUNDS": cfg["run.max_rounds"],
                 "PAUSE_PLANNED": cfg["run.pause_planned_s"], "PAUSE_CRASH": cfg["run.pause_crash_s"],
                 "GRACE": math.ceil(cfg["run.grace_s"]), "START_SECONDS": math.ceil(cfg["run.deadline_first_s"]),
                 "LINGER": math.ceil(max(floor, 10)), "LEAVE_SECONDS": math.ceil(max(3 * floor, 10))}
    for name, value in variables.items():
        print(f"{name}={shlex.quote(str(value))}")


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
        shares(cfg, ranks, step)  # says what does not divide
    most = max(asked, step["ranks"])
    if used * each < most:
        count = shares(cfg, used * each, step)["sample_batches"]
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
    touch(run)
    return {"done": DONE, "restart": PLANNED_RESTART, "stop": STOP}.get(end(run, attempt, code), 1)


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
        if argv and argv[0] in calls:
            return calls[argv[0]](argv[1:])
        parser = argparse.ArgumentParser(prog="python -m Runtime.attempts", description="Where the wall time of a run "
                                         "went: useful steps, replayed steps, detection, restart, by cause.")
        parser.add_argument("run", type=Path, help="folder of the run, Models/<data>_<net>")
        parser.add_argument("--epoch-minutes", type=float, default=0.0, metavar="M",
                            help="also: goodput if the same losses met epochs of M minutes")
        args = parser.parse_args(argv)
        from Scripts.goodput import table  # here, because it imports torch and a launcher's rounds should not wait
        print(table(args.run, args.epoch_minutes))
        return DONE
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
