"""Every rank is its own watchdog: phases with deadlines, a heartbeat, breadcrumbs, last words.

`<run>/rank<r>.jsonl` is heartbeat, breadcrumb and event log at once: one JSON object per line. The last line
({"event": "now", ...}) says where the rank is; each phase overwrites it in place, so that the file grows by events
only. Writes go straight to the kernel and survive the death of the process. A phase that outlives its deadline ends the
process by faulthandler, which works with the GIL held and with a backend that never times out; the stacks of all
threads then stand in `<run>/rank<r>.stack`, without a launcher on standard error.
"""
import collections
import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import time
import traceback

from Runtime.run_lock import TakenOver, assert_held, touch

WIDTH = 320  # bytes of the line that is overwritten
LOOK_S = 10.0  # how often a rank looks whether the run's folder is still its own: a lock is given up much later
UNSAID = 2 ** 20  # bytes of log that wait for room on a full disk
ONE_OFF = ("start", "meet", "data set", "stage", "join", "restore", "epoch", "evaluate", "checkpoint", "refresh",
           "leave", "exit")
STATE = {"file": None, "stop": None}


def start(run, rank, attempt, cfg, launcher):
    """Begin the log and arm the first deadline. run: Path of the run folder; launcher: whether one reads the stack."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: STATE.update(stop=signal.Signals(number).name))
    stack = sys.__stderr__
    if launcher:  # a new file: a process of an earlier attempt that wakes up late writes into the old one
        (run / f"rank{rank}.stack").unlink(missing_ok=True)
        stack = open(run / f"rank{rank}.stack", "w")
    file = os.open(run / f"rank{rank}.jsonl", os.O_RDWR | os.O_CREAT, 0o644)
    end = os.fstat(file).st_size
    if end and os.pread(file, 1, end - 1) != b"\n":
        end += os.pwrite(file, b"\n", end)  # a node died in the middle of a line
    now = time.time()
    STATE.update(run=run, rank=rank, attempt=attempt, host=socket.gethostname(), stack=stack, looked=now)
    STATE.update(file=file, end=end, unsaid=b"", number=0, step=0, mode="", name="start", since=now, entered=now)
    STATE.update({name: cfg[f"run.deadline_{key}"] for name, key in
                  (("floor", "floor_s"), ("factor", "factor"), ("first", "first_s"))})
    STATE.update(spent=collections.Counter(), took={}, steps=collections.deque(maxlen=20), step_began=None, write=None)
    faulthandler.enable(file=stack)
    sys.excepthook = _last_words
    event("start", host=STATE["host"], pid=os.getpid(), node=os.environ.get("SLURMD_NODENAME", ""))
    phase("start")


def phase(name, mode=""):
    """Enter a phase: leave the breadcrumb and arm its deadline. All ranks enter the same phases in the same order."""
    if STATE["file"] is None:
        return
    _look()
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

    What has not been timed yet compiles, connects or reads for the first time and gets the long first deadline: each
    phase of each mode, since mode 3 may open late. Saving has been timed once a write has: the copy alone is quick.
    """
    known = []
    if (name, mode) in STATE["took"]:
        if name not in ONE_OFF and mode not in ONE_OFF:  # an agreement may wait for the one-off phase of another rank
            known = [statistics.median(STATE["steps"])] if STATE["steps"] else []
        elif "checkpoint" not in (name, mode):
            known = [STATE["took"][name, mode], *STATE["steps"]]
        elif STATE["write"]:
            known = [STATE["took"][name, mode], STATE["write"], *STATE["steps"]]
    return max(STATE["floor"], STATE["factor"] * max(known)) if known else max(STATE["first"], STATE["floor"])


def learn_write(seconds):
    """A checkpoint took so long to write, in a thread: the next save or the end of the run may have to wait for that.

    seconds: 0 where none has been written yet.
    """
    if STATE["file"] is not None:
        STATE["write"] = max(STATE["write"] or 0.0, seconds)


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
    if "first step" not in STATE["took"]:
        STATE["took"]["first step"] = time.time() - STATE["step_began"]
    else:
        STATE["steps"].append(time.time() - STATE["step_began"])
    return _take_spent()


def event(kind, **fields):
    """Append one line to the log."""
    if STATE["file"] is None:
        return
    _look()
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


def _look():
    """Every LOOK_S, before anything is written: is the folder still ours? Rank 0 also shows that this run lives.

    A launch that stood still may wake up after another one has taken its folder over. Raises TakenOver then, and the
    log is closed: what this process still has to say would stand in the log of the other one.
    """
    if time.time() - STATE["looked"] < LOOK_S:
        return
    STATE["looked"] = time.time()
    try:
        (touch if STATE["rank"] == 0 else assert_held)(STATE["run"])
    except TakenOver:
        os.close(STATE["file"])
        STATE["file"] = None
        faulthandler.enable(file=sys.__stderr__)
        faulthandler.dump_traceback_later(STATE["first"], exit=True, file=sys.__stderr__)  # for the way out
        raise


def _write(lines):
    """Events in place of the breadcrumb, and the breadcrumb after them, in one write.

    What a full disk does not take waits for room: it must not end a training that is healthy.
    """
    crumb = {"event": "now", "attempt": STATE["attempt"], "rank": STATE["rank"], "step": STATE["step"],
             "mode": STATE["mode"], "phase": STATE["name"], "number": STATE["number"], "time": round(STATE["since"], 3),
             "deadline": round(STATE.get("deadline", 0), 1), "host": STATE["host"][:64]}
    crumb = json.dumps(crumb).encode().ljust(WIDTH - 1) + b"\n"
    lines = STATE["unsaid"] + lines
    try:
        if os.pwrite(STATE["file"], lines + crumb, STATE["end"]) < len(lines + crumb):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if not STATE["unsaid"]:
            print(f"rank {STATE['rank']} cannot write its log: {error}", file=sys.stderr, flush=True)
        STATE["unsaid"] = lines[-UNSAID:]
        with contextlib.suppress(OSError):  # in place of the one before, which needs no more room
            os.pwrite(STATE["file"], crumb, STATE["end"])
            os.ftruncate(STATE["file"], STATE["end"] + WIDTH)
    else:
        STATE.update(end=STATE["end"] + len(lines), unsaid=b"")


def _last_words(kind, error, trace):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises in it once a worker has died, and would cut them off
    frames = [f"{os.path.relpath(f.filename)}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)]
    STATE["looked"] = 0.0  # they may be the consequence of what another rank has seen
    try:
        event("died", error=f"{kind.__name__}: {error}"[:2000], phase=STATE["name"], mode=STATE["mode"],
              stack=frames[-12:])
    except TakenOver as taken:
        print(f"error: {taken}", file=sys.stderr, flush=True)
    sys.__excepthook__(kind, error, trace)
