"""Where the wall time of a run went, from its attempts and the log of rank 0.

    python -m Runtime.goodput Models/<run> [--epoch-minutes M]       table: useful, replayed, lost, by kind and by cause
"""
import argparse
import collections
import sys
from pathlib import Path

from Runtime.attempts import history
from Runtime.errors import DONE, STOP, InputError
from Runtime.files import read_lines
from Runtime.report import text_table

STEP = ("deform", "embeddings", "forward", "accumulate", "agree", "backward", "optimizer", "between steps")
PHASES = {"data": "waiting for data", "epoch": "waiting for data", "checkpoint": "checkpoints",
          "evaluate": "validation", "refresh": "process-group refresh", **dict.fromkeys(STEP, "steps")}


def account(run):
    """Wall seconds of a run by kind, and what each cause of an end cost.

    Returns: (Counter of seconds by kind, {cause: Counter of times, detection, restart, replayed}). "useful steps" are
    those whose work stands in the result; "replayed steps" those that had to be done again.
    """
    lines, log = history(run), read_lines(run / "rank0.jsonl")
    if not lines:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    ends = {line["attempt"]: line for line in lines if line["event"] == "end"}
    last = {line["step"]: line["attempt"] for line in log if line["event"] == "step"}
    kinds, causes = collections.Counter(), collections.defaultdict(collections.Counter)
    before, cause = None, "first start"
    for begun in (line for line in lines if line["event"] == "begin"):
        attempt = begun["attempt"]
        steps = [line for line in log if line.get("attempt") == attempt and line["event"] in ("step", "end")]
        spent = collections.Counter()
        for line in steps:
            for name, seconds in line["spent"].items():
                kind = PHASES.get(name, "restart")
                if kind == "steps":
                    redone = line["event"] == "step" and last[line["step"]] != attempt
                    kind = "replayed steps" if redone else "useful steps"
                spent[kind] += seconds
        spent.pop("restart", None)
        until = ends[attempt]["time"] if attempt in ends else max([line["time"] for line in steps] or [begun["time"]])
        began = begun["time"] if before is None else before
        quiet = until - (steps[-1]["time"] if steps else begun["time"])
        verdict = ends[attempt]["verdict"] if attempt in ends else {"dead": False, "cause": "running"}
        detection = quiet if verdict["dead"] and steps else 0.0
        restart = max(until - began - sum(spent.values()) - detection, 0.0)
        kinds.update({**spent, "restart": restart, "detection": detection})
        causes[cause].update(restart=restart)
        cause = verdict["cause"]
        causes[cause].update(times=1, detection=detection, replayed=spent["replayed steps"])
        before = None if cause == "done" else until  # what lies between a finished run and more epochs is nobody's
    return kinds, causes


def goodput(kinds):
    """Share of the wall time that went into what stands in the result: useful steps and validation."""
    return (kinds["useful steps"] + kinds["validation"]) / max(sum(kinds.values()), 1e-9)


def goodput_at(kinds, causes, epochs, minutes):
    """Goodput with the measured losses of an epoch in epochs of another length."""
    lost = sum(cause["detection"] + cause["restart"] + cause["replayed"] for cause in causes.values()) / max(epochs, 1)
    return 60 * minutes / (60 * minutes + lost)


def table(run, minutes=0.0):
    """The goodput table as text."""
    kinds, causes = account(run)
    wall = sum(kinds.values())
    rows = [(kind, seconds, 100 * seconds / wall) for kind, seconds in kinds.most_common() if seconds]
    text = text_table(["wall time of " + str(run), "seconds", "share %"], [*rows, ("together", wall, 100.0)],
                      [None, ".1f", ".1f"])
    rows = [(name, int(c["times"]), c["detection"], c["restart"], c["replayed"],
             c["detection"] + c["restart"] + c["replayed"]) for name, c in causes.items()]
    header = ["how attempts ended", "times", "detection s", "restart s", "replayed s", "lost s"]
    text += "\n\n" + text_table(header, rows, [None, "d", ".1f", ".1f", ".1f", ".1f"])
    text += f"\n\ngoodput {100 * goodput(kinds):.2f} %"
    if minutes:
        epochs = len({line["epoch"] for line in read_lines(run / "rank0.jsonl") if line["event"] == "epoch"})
        text += (f"; with the same losses in each of {epochs} epochs of {minutes:g} min: "
                 f"{100 * goodput_at(kinds, causes, epochs, minutes):.2f} %")
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m Runtime.goodput", description="Where the wall time of a run went: "
                                     "useful steps, replayed steps, detection, restart, by cause.")
    parser.add_argument("run", type=Path, help="folder of the run, Models/<data>_<net>")
    parser.add_argument("--epoch-minutes", type=float, default=0.0, metavar="M",
                        help="also: goodput if the same losses met epochs of M minutes")
    args = parser.parse_args(argv)
    try:
        print(table(args.run, args.epoch_minutes))
        return DONE
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP


if __name__ == "__main__":
    sys.exit(main())
