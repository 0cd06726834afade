"""How a run stands and what it has cost, in words and numbers, from what Report/run_logs.py has read."""
import time

import numpy as np

from Report.charts import number
from Report.goodput import add_up, goodput, is_refused_start
from Report.run_logs import tail_of

QUIET_S = 10.0  # so long after its deadline a rank has not been heard of, the run counts as silent


def state_of(found, now=None):
    """How a run stands: (word, sentence). word: running, waiting, silent, stopped or done.

    found: of run_logs.read_run. now: time.time(). A rank says until when it would be heard of again (its deadline); a
    run that has missed that is silent: all its processes are gone, or this is a copy of its folder.
    """
    now = now or time.time()
    begins = [line for line in found["attempts"] if line["event"] == "begin"]
    ends = {line["attempt"]: line for line in found["attempts"] if line["event"] == "end"}
    end = ends.get(begins[-1]["attempt"]) if begins else None
    if end is None:
        return at_work(found, begins, now)
    decision = end.get("decision", "done" if end["cause"] == "done" else "continue")
    said, when = end.get("sentence", end["cause"]), moment(end["time"])
    if decision == "done":
        return "done", f"Done since {when}: {said}"
    if decision == "stop":
        return "stopped", f"Stopped since {when}: {said}"
    if found["lock"]:
        return "waiting", f"Between two rounds since {when}: {said}"
    return "waiting", f"Waiting since {when} to be started again with the same command: {said}"


def at_work(found, begins, now):
    """`state_of` a run whose newest attempt has no end yet."""
    crumbs = {rank: line for rank, line in found["now"].items() if begins and line["attempt"] == begins[-1]["attempt"]}
    if not crumbs:
        began = begins[-1]["time"] if begins else now
        return "running", f"Starting since {moment(began)}: no rank has written to its log yet."
    behind = min(crumbs.values(), key=lambda line: line["number"])
    mode = f" ({behind['mode']})" if behind["mode"] else ""
    where = f"rank {behind['rank']} on {behind['host']} is in {behind['phase']}{mode} of step {behind['step']}"
    newest = max(line["time"] for line in crumbs.values())
    if now > max(line["time"] + line["deadline"] for line in crumbs.values()) + QUIET_S:
        return "silent", (f"Silent since {moment(newest)}, beyond its deadline: {where}. Either the run has died, "
                          "and the same command continues it, or this is a copy of its folder.")
    return "running", f"Running: {where}, since {now - behind['time']:.0f} s."


def moment(stamp):
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def duration(seconds):
    """Seconds in words: "3 h 20 min"."""
    if seconds is None or not np.isfinite(seconds):
        return "-"
    minutes = int(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    hours, days = minutes // 60, minutes // 1440
    if days >= 2:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def headline(found, findings):
    """The cards at the top of a page: [(label, value, note)]."""
    kinds, _ = add_up(found)
    wall, done = sum(kinds.values()), len(found["once"]["step"])
    epochs, of = len(found["epochs"]), found["config"].get("run.epochs")
    attempts, ends = found["costs"], [each["end"] for each in found["costs"] if each["end"]]
    refused = sum(map(is_refused_start, ends))
    died = sum(bool(end["verdict"]["dead"]) for end in ends) - refused
    rate, left = speed(found), time_left(found, kinds)
    return [("Epochs", f"{epochs} of {of}" if of else epochs, f"{done} steps"),
            *([("Time left", left, "at this pace")] if left else []),
            ("Goodput", f"{100 * goodput(kinds):.1f} %" if wall else "-", f"of {duration(wall)}"),
            ("Samples/s", number(rate) if rate else "-", "in 100 steps"),
            ("Deaths", died, f"in {len(attempts)} attempt{'s' * (len(attempts) != 1)}"
             + f", {refused} refused at {'their' if refused > 1 else 'its'} start" * (refused > 0)),
            ("Findings", len(findings), "see below" if findings else "no problem found")]


def time_left(found, kinds):
    """The time until the last epoch, in words, by epochs done and the wall time that they took.

    None before the first epoch and after the last one.
    """
    epochs, of = found["epochs"], found["config"].get("run.epochs")
    if not epochs or not of:
        return None
    per_epoch = np.median([line["steps"] for line in epochs])
    done = len(found["once"]["step"])
    steps_left = of * per_epoch - done
    return duration(steps_left * sum(kinds.values()) / max(done, 1)) if steps_left > 0 else None


def speed(found, last=100):
    """Samples per second of the last steps, waits included; None where the log does not say."""
    steps = tail_of(found["once"], last)
    total = steps["seconds"].sum()
    return float(np.nansum(steps["samples"]) / total) if total > 0 and np.isfinite(steps["samples"]).any() else None
