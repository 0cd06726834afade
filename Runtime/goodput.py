"""How a run spent its wall time, from attempts.jsonl and the log of rank 0.

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

# Phases of the log by the kind of time in the table; any other phase belongs to a restart.
STEP = ("deform", "embeddings", "forward", "accumulate", "agree", "backward", "optimizer", "between steps")
PHASES = {"data": "waiting for data", "epoch": "waiting for data", "checkpoint": "checkpoints",
          "evaluate": "validation", "refresh": "process-group refresh", **dict.fromkeys(STEP, "steps")}


def account(run):
    """Wall seconds of a run by kind, and the cost of each cause of an attempt's end.

    run: Path of the run folder.
    Returns: (Counter of seconds by kind, {cause: Counter of times, detection, restart, replayed}). "useful steps" are
    those whose work is in the result; "replayed steps" had to be done again.
    Raises InputError if the folder has no attempts.jsonl.
    """
    lines, log = history(run), read_lines(run / "rank0.jsonl")
    if not lines:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    ends = {line["attempt"]: line for line in lines if line["event"] == "end"}
    last_attempt = {line["step"]: line["attempt"] for line in log if line["event"] == "step"}
    kinds, causes = collections.Counter(), collections.defaultdict(collections.Counter)
    end_before, cause = None, "first start"
    for begun in (line for line in lines if line["event"] == "begin"):
        attempt = begun["attempt"]
        steps = [line for line in log if line.get("attempt") == attempt and line["event"] in ("step", "end")]
        spent = seconds_by_kind(steps, last_attempt)
        last_sign = steps[-1]["time"] if steps else begun["time"]
        if attempt in ends:
            ended, verdict = ends[attempt]["time"], ends[attempt]["verdict"]
        else:
            ended = max([line["time"] for line in steps], default=begun["time"])
            verdict = {"dead": False, "cause": "running"}
        began = begun["time"] if end_before is None else end_before
        detection = ended - last_sign if verdict["dead"] and steps else 0.0
        restart = max(ended - began - sum(spent.values()) - detection, 0.0)
        kinds.update({**spent, "restart": restart, "detection": detection})
        causes[cause].update(restart=restart)
        cause = verdict["cause"]
        causes[cause].update(times=1, detection=detection, replayed=spent["replayed steps"])
        # The time between the end of a training and its continuation with more epochs belongs to no attempt.
        end_before = None if cause == "done" else ended
    return kinds, causes


def seconds_by_kind(steps, last_attempt):
    """Counter of the seconds of an attempt by kind, without those that belong to its restart.

    steps: lines "step" and "end" of the attempt. last_attempt: {step: the last attempt that did it}.
    """
    spent = collections.Counter()
    for line in steps:
        replayed = line["event"] == "step" and last_attempt[line["step"]] != line["attempt"]
        for phase, seconds in line["spent"].items():
            kind = PHASES.get(phase)
            if kind == "steps":
                kind = "replayed steps" if replayed else "useful steps"
            if kind is not None:
                spent[kind] += seconds
    return spent


def goodput(kinds):
    """Fraction of the wall time that useful steps and validation took."""
    return (kinds["useful steps"] + kinds["validation"]) / max(sum(kinds.values()), 1e-9)


def goodput_at(kinds, causes, epochs, minutes):
    """Goodput if an epoch took `minutes` and lost as much time as one of the measured `epochs` did."""
    lost_s = sum(map(lost_seconds, causes.values())) / max(epochs, 1)
    return 60 * minutes / (60 * minutes + lost_s)


def lost_seconds(costs):
    """Seconds that a cause cost. costs: its Counter of `account`."""
    return costs["detection"] + costs["restart"] + costs["replayed"]


def table(run, minutes=0.0):
    """The goodput table as text. minutes: length of an epoch for a second figure, 0 = leave it out."""
    kinds, causes = account(run)
    wall = sum(kinds.values())
    rows = [(kind, seconds, 100 * seconds / wall) for kind, seconds in kinds.most_common() if seconds]
    text = text_table(["wall time of " + str(run), "seconds", "share %"], [*rows, ("together", wall, 100.0)],
                      [None, ".1f", ".1f"])
    rows = [(cause, int(costs["times"]), costs["detection"], costs["restart"], costs["replayed"], lost_seconds(costs))
            for cause, costs in causes.items()]
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
