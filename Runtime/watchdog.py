"""Every rank is its own watchdog: phases with deadlines, a heartbeat, breadcrumbs, last words.

`<run>/rank<r>.jsonl` is heartbeat, breadcrumb and event log at once: one JSON object per line. The last line
({"event": "now", ...}) says where the rank is; each phase overwrites it in place, so that the file grows by events
only. Writes go straight to the kernel and survive the death of the process. A phase that outlives its deadline ends the
process by faulthandler, which works with the GIL held and with a backend that never times out; the stacks of all
threads then stand in `<run>/rank<r>.stack`, without a launcher on standard error.
"""
import collections
import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import time
import traceback

from Runtime.folder import touch

WIDTH = 320  # bytes of the line that is overwritten
ONE_OFF = ("start", "meet", "data set", "stage", "join", "restore", "epoch", "evaluate", "checkpoint", "refresh",
           "leave", "exit")
STATE = {"file": None, "stop": None}


def start(run, rank, attempt, cfg, launcher):
    """Begin the log and arm the first deadline. run: Path of the run folder; launcher: whether one reads the stack."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: STATE.update(stop=signal.Signals(number).name))
    stack = open(run / f"rank{rank}.stack", "w") if launcher else sys.__stderr__
    file = os.open(run / f"rank{rank}.jsonl", os.O_RDWR | os.O_CREAT, 0o644)
    end = os.fstat(file).st_size
    if end and os.pread(file, 1, end - 1) != b"\n":
        end += os.pwrite(file, b"\n", end)  # a node died in the middle of a line
    STATE.update(run=run, file=file, end=end, stack=stack, rank=rank, attempt=attempt, number=0, step=0, mode="",
                 name="start", since=time.time(), entered=time.time(), spent=collections.Counter(), took={},
                 floor=cfg["run.deadline_floor_s"], factor=cfg["run.deadline_factor"], host=socket.gethostname(),
                 first=cfg["run.deadline_first_s"], steps=collections.deque(maxlen=20), step_began=None)
    faulthandler.enable(file=stack)
    sys.excepthook = _last_words
    event("start", host=STATE["host"], pid=os.getpid(), node=os.environ.get("SLURMD_NODENAME", ""))
    phase("start")


def phase(name, mode=""):
    """Enter a phase: leave the breadcrumb and arm its deadline. All ranks enter the same phases in the same order."""
    if STATE["file"] is None:
        return
    now, what = time.time(), (STATE["name"], STATE["mode"])
    STATE["spent"][STATE["name"]] += now - STATE["since"]
    if what != (name, mode):  # one that goes on is not over, and has not been timed
        STATE["took"][what] = max(now - STATE["entered"], STATE["took"].get(what, 0))
        STATE["entered"] = now
    STATE.update(name=name, mode=mode, since=now, number=STATE["number"] + 1)
    STATE["deadline"] = deadline(name, mode)
    _write(b"")
    faulthandler.dump_traceback_later(STATE["deadline"], exit=True, file=STATE["stack"])


def deadline(name, mode=""):
    """Seconds that a phase may take: factor times what a step (or this one-off phase) takes, the floor at least.

    What has not been timed yet compiles, connects or reads for the first time and gets the long first deadline.
    """
    if name in ONE_OFF or mode in ONE_OFF:  # an agreement may also wait for the one-off phase of another rank
        known = [STATE["took"][name, mode], *STATE["steps"]] if (name, mode) in STATE["took"] else []
    else:
        known = [statistics.median(STATE["steps"])] if STATE["steps"] else []
    return max(STATE["floor"], STATE["factor"] * max(known)) if known else max(STATE["first"], STATE["floor"])


def new_step(step, name="data"):
    """A step of the run begins, with the wait for its data: the first one of an epoch also starts the loaders."""
    if STATE["file"] is None:
        return
    STATE.update(step=step, step_began=time.time())
    phase(name)


def end_step():
    """The step is done; its time is learned, but not that of the first one: it compiles.

    Returns the seconds spent in each phase since the end of the step before.
    """
    if STATE["file"] is None:
        return {}
    phase("between steps")
    if STATE["rank"] == 0:
        touch(STATE["run"])  # the lock: a round may last longer than a holder elsewhere would be believed to live
    if "first step" not in STATE["took"]:
        STATE["took"]["first step"] = time.time() - STATE["step_began"]
    else:
        STATE["steps"].append(time.time() - STATE["step_began"])
    return _take_spent()


def event(kind, **fields):
    """Append one line to the log."""
    if STATE["file"] is None:
        return
    line = {"event": kind, "attempt": STATE["attempt"], "rank": STATE["rank"], "step": STATE["step"],
            "time": round(time.time(), 3), **fields}
    _write(json.dumps(line).encode() + b"\n")


def stop_requested():
    """Name of the signal that asked this rank to leave, or None."""
    return STATE["stop"]


def finish():
    """The last phase: the deadline stays armed until the process is gone, so that an exit that hangs ends too."""
    if STATE["file"] is not None:
        phase("exit")
        event("end", spent=_take_spent())


def _take_spent():
    spent = {name: round(seconds, 4) for name, seconds in STATE["spent"].items()}
    STATE["spent"].clear()
    return spent


def _write(lines):
    """Events in place of the breadcrumb, and the breadcrumb after them, in one write."""
    crumb = {"event": "now", "attempt": STATE["attempt"], "rank": STATE["rank"], "step": STATE["step"],
             "mode": STATE["mode"], "phase": STATE["name"], "number": STATE["number"], "time": round(STATE["since"], 3),
             "deadline": round(STATE.get("deadline", 0), 1), "host": STATE["host"][:64]}
    try:
        os.pwrite(STATE["file"], lines + json.dumps(crumb).encode().ljust(WIDTH - 1) + b"\n", STATE["end"])
        STATE["end"] += len(lines)
    except OSError as error:  # a full disk must not end a training that is healthy
        print(f"rank {STATE['rank']} cannot write its log: {error}", file=sys.stderr, flush=True)


def _last_words(kind, error, trace):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in it once a worker has died, and would cut them off
    frames = [f"{os.path.relpath(f.filename)}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)]
    event("died", error=f"{kind.__name__}: {error}"[:2000], phase=STATE["name"], mode=STATE["mode"], stack=frames[-12:])
    sys.__excepthook__(kind, error, trace)
