"""Check within a minute that every task of an allocation has what the training needs, before any data is read.

    P=Scripts/preflight/preflight.py; srun ... python $P --task --config C | python $P --collect --config C

bash_train_multi_nodes.sh does this. Both sides take the arguments of the training and read NODES ("n1 n2"),
TASKS_PER_NODE and PREFLIGHT_SECONDS (time limit, default 45); tasks also RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, the collector RANKS_ASKED (those before nodes were left out; default: the ranks of the nodes). A task
prints one JSON line for each check and always exits with 0. The collector prints a table on standard error
(Scripts/preflight/collect.py) and EXCLUDED=n2 n3 on standard output; it exits with 0 (passed), 43 (stop), 75 (continue
without the excluded nodes) or, with --may-repeat, 76 (the faults may pass: check once more).
"""
import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from Runtime.config import load_config  # noqa: E402
from Runtime.errors import STOP, InputError, first_line  # noqa: E402
from Runtime.files import is_passing  # noqa: E402

FORK = multiprocessing.get_context("fork")
LEAST = 0.05  # fraction of PREFLIGHT_SECONDS that a check gets even after a late start
PIECE = 400  # characters; srun does not mix lines of less than 1024 bytes with those of other tasks


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Check an allocation before training.", allow_abbrev=False)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--task", action="store_true", help="run the checks of one rank, print findings as JSON lines")
    side.add_argument("--collect", action="store_true", help="read the findings of all ranks, judge them")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--fresh", action="store_true", help="the training begins a new run")
    parser.add_argument("--may-repeat", action="store_true", help="exit with 76 if a second check may pass")
    parser.add_argument("--allow-tmp", action="store_true", help="run.models and run.logs may be under /tmp")
    return parser.parse_known_args(argv)[0]


def place():
    """(names of the nodes in order, tasks on each, time limit in seconds), from the environment."""
    return (os.environ["NODES"].split(), int(os.environ["TASKS_PER_NODE"]),
            float(os.environ.get("PREFLIGHT_SECONDS", 45)))


# ---------------------------------------------------------------------------------------------------------------------
# A task: all checks, each in a process of its own
# ---------------------------------------------------------------------------------------------------------------------

def run_task(args):
    """Report the arrival of this rank, load the config and torch, run all checks in their order."""
    began, variables, host = time.monotonic(), dict(os.environ), socket.gethostname()
    nodes, tasks, limit = place()
    rank, local_rank, world_size = (int(variables[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    node = variables.get("SLURMD_NODENAME", host)

    def say(check, result):
        print_line({"rank": rank, "node": node, "host": host, "check": check, **result})

    say("arrival", {"ok": True, "said": "arrived", "do": "", "world_size": world_size, "local_rank": local_rank})
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the table reports an address that does not answer
    try:
        cfg = load_config(args.config, args.overrides)
        from Scripts.preflight import checks  # here, since torch loads slowly and this rank has arrived already
    except InputError as error:
        return say("code", {"ok": False, "said": str(error), "do": "the config has to be the same on every node"})
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return say("code", {"ok": False, "said": f"the code does not load: {type(error).__name__}: {error}"[:300],
                            "do": "check the environment of this node, or exclude it"})
    findings = {}
    context = {"cfg": cfg, "rank": rank, "local_rank": local_rank, "world_size": world_size, "node": node,
               "nodes": nodes, "tasks": tasks, "allow_tmp": args.allow_tmp, "variables": variables, "began": began,
               "findings": findings, "served": None}

    def ends(until):
        """The deadline of a check. One that begins late, since torch loaded slowly, still gets a little time."""
        return max(began + until * limit, time.monotonic() + LEAST * limit)

    if rank == 0 and world_size > 1:
        context["served"] = answer(checks.serve, {**context, "ends": ends(0.4)}, stays=True)
    for name, (function, until, needs) in checks.CHECKS.items():
        if name in checks.OF_THE_NODE and local_rank:
            continue
        ill = next((need for need in needs if not findings[need]["ok"]), "")
        findings[name] = checks.skipped(f"{ill} failed") if ill else answer(function, {**context, "ends": ends(until)})
        say(name, findings[name])
    if findings["rendezvous"]["ok"] and local_rank == 0:  # no other node still waits for the marks of this one
        checks.clean_folders(context)
    elif context["served"]:
        time.sleep(LEAST * limit)  # ranks that are a little behind would take the end of the store for a failure


def print_line(line):
    """Print one finding as a line of JSON, or as several lines that each hold a piece of it."""
    text, rank = json.dumps(line), line["rank"]
    pieces = [text[start:start + PIECE] for start in range(0, len(text), PIECE)]
    lines = [text] if len(text) < 2 * PIECE else [
        json.dumps({"rank": rank, "piece": number, "of": len(pieces), "text": piece})
        for number, piece in enumerate(pieces, 1)]
    for text in lines:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def answer(function, context, stays=False):
    """Result of one check, run in a forked process that is killed at its deadline.

    context: with "began" and "ends" (time.monotonic); the rest is for the check. stays: do not kill the process after
    its answer. A check that only needs processor time passes a dict to `at` beforehand: this is its result if it is too
    late, a warning instead of a failure.
    """
    mine, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, args=(function, context, theirs), daemon=True)
    process.start()
    theirs.close()
    where, late, result = "at its start", None, None
    while result is None and mine.poll(max(context["ends"] - time.monotonic(), 0)):
        try:
            message = mine.recv()
        except EOFError:
            process.join(1)
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            result = {"ok": False, "said": f"died with {how} ({where})", "do": "see its last output above this table"}
        else:
            if isinstance(message, str):
                where = message
            elif message.get("late"):
                late = message
            else:
                result = message
    if result is None:
        result = late or {"ok": False, "said": f"no answer within {context['ends'] - context['began']:.0f} s ({where})",
                          "do": "check this node, or exclude it", "passing": True}
    if not stays:
        process.kill()
    return result


def work(function, context, pipe):
    """In the child: run a check. An error that libraries raise becomes a finding; others show their traceback."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process dies with its task
    os.dup2(2, 1)  # libraries print to standard output, which is for the findings
    try:
        result = function(context, pipe.send)
    except (RuntimeError, ValueError, OSError) as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        result = {"ok": False, "said": kind + first_line(error)[:300],
                  "do": "see this error; --debug says more" if kind else "",
                  "passing": is_passing(error) or isinstance(error, OSError) and error.errno is None}
    pipe.send(result)


def main(argv=None):
    args = parse_arguments(argv)
    if args.task:
        run_task(args)
        return 0
    began = time.monotonic()
    sys.stdin.reconfigure(errors="replace")
    try:
        cfg = load_config(args.config, args.overrides)
        from Scripts.preflight.collect import collect  # here, since torch loads slowly
        return collect(sys.stdin, cfg, *place(), began, args.may_repeat, args.fresh)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main())
