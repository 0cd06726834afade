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
        steps, total_s, data_s = pace["steps"], sum(pace["spent"].values()), pace["spent"]["data"]
        points = {"speed/samples_per_s": steps * line["samples"] / max(now - pace["began"], 1e-9),
                  "speed/step_s": total_s / steps, "speed/data_s": data_s / steps,
                  "speed/data_percent": 100 * data_s / max(total_s, 1e-9), "train/lr": line["lr"],
                  **{f"gradient_norm/{mode}": norm for mode, norm in line["norms"].items()},
                  **{f"memory/{name}_gib": value / GIB for name, value in memory.items() if value is not None}}
        for tag, value in points.items():
            add_scalar(curves, tag, value, watchdog.STATE.get("step", 0))
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
