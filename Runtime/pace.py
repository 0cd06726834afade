"""What every rank logs about its steps: where their time went, its memory, and on rank 0 the disk space.

Every EVERY steps each rank adds a line "pace" to its log. From it Report/run.py draws the ranks side by side and
Report/rules.py finds the slow one. Rank 0 sends the same figures to TensorBoard.
"""
import collections
import shutil
import time

from Runtime import watchdog
from Runtime.writer import add_scalar, flush

EVERY = 10  # steps
FLUSH_S = 60.0  # TensorBoard's curves reach the disk this often, not only at the end of an epoch
GIB = 2 ** 30


def new_pace():
    """The sums of `keep_pace`, before the first step of a launch."""
    return {"steps": 0, "spent": collections.Counter(), "began": time.time(), "flushed": time.time()}


def keep_pace(pace, line, spent, watch, curves):
    """Count a step; after every EVERY steps log their sums. Every rank calls this at the end of a step.

    pace: from `new_pace`. line: rank 0's log line of the step, with "lr", "samples" and "norms". spent: from
    watchdog.end_step. watch: from memory.new_watch. curves: from writer.new_writer on rank 0; None on other ranks.
    """
    pace["spent"].update(spent)
    pace["steps"] += 1
    if pace["steps"] < EVERY:
        return
    now, memory = time.time(), watch["samples"][-1] if watch["samples"] else {}
    seconds = {phase: round(value, 4) for phase, value in pace["spent"].items()}
    watchdog.event("pace", steps=pace["steps"], seconds=round(now - pace["began"], 4), spent=seconds, **memory,
                   **(disk_space(watchdog.STATE.get("run")) if curves else {}))
    if curves:
        show_pace(curves, pace["steps"] * line["samples"] / max(now - pace["began"], 1e-9), pace, line, memory)
        if now - pace["flushed"] > FLUSH_S:
            flush(curves)
            pace["flushed"] = now
    pace.update(steps=0, began=now)
    pace["spent"].clear()


def disk_space(run):
    """{"disk_free", "disk_total"}: bytes of the file system that holds a run folder; {} if unknown."""
    try:
        usage = shutil.disk_usage(run)
    except (OSError, TypeError):  # no answer, or a training without a log
        return {}
    return {"disk_free": usage.free, "disk_total": usage.total}


def show_pace(curves, samples_per_s, pace, line, memory):
    """Add a point to each of TensorBoard's curves: speed, waiting for data, learning rate, gradients, memory."""
    step, spent = watchdog.STATE.get("step", 0), pace["spent"]
    points = {"speed/samples_per_s": samples_per_s, "speed/step_s": sum(spent.values()) / pace["steps"],
              "speed/data_s": spent["data"] / pace["steps"],
              "speed/data_percent": 100 * spent["data"] / max(sum(spent.values()), 1e-9), "train/lr": line["lr"],
              **{f"gradient_norm/{mode}": norm for mode, norm in line["norms"].items()},
              **{f"memory/{name}_gib": value / GIB for name, value in memory.items() if value is not None}}
    for tag, value in points.items():
        add_scalar(curves, tag, value, step)
