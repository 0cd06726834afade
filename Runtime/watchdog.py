"""Every rank is its own watchdog: phases with deadlines, a heartbeat, breadcrumbs, and the exception that ended it.

`<run>/rank<r>.jsonl` is heartbeat, breadcrumb and event log at once: one JSON object per line. The last line
({"event": "now", ...}) says where the rank is; each phase overwrites it in place, so that the file grows by events
only. Writes go straight to the kernel and survive the death of the process. If a phase outlives its deadline, but not
on macOS, faulthandler ends the process, even with the GIL held or a backend that never times out. It writes the stacks
of all threads to `<run>/rank<r>.stack`, or to standard error if there is no launcher.
"""
import collections
import contextlib
import errno
import faulthandler
import json
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback

from Runtime.errors import INTERRUPTED
from Runtime.run_lock import TakenOver, assert_held, touch

WIDTH = 400  # bytes of the breadcrumb line, which is overwritten
LOOK_S = 10.0  # how often a rank checks that the folder is still its own; a lock goes stale much later
MOST_PENDING = 2 ** 20  # bytes of log that wait for space on a full disk; beyond that the oldest are dropped
# Phases that are not part of every step: each is timed on its own.
ONE_OFF = ("start", "meet", "data set", "stage", "join", "restore", "epoch", "evaluate", "checkpoint", "refresh",
           "profile", "leave", "exit")
# beat: tells other ranks that this one makes progress
STATE = {"file": None, "stop": None, "beat": lambda: None, "name": "start", "mode": ""}


def start(run, rank, attempt, cfg, launcher):
    """Begin the log, arm the first deadline, and note TERM, USR1, Ctrl-C and HUP instead of dying from them.

    run: Path of the run folder. cfg: config with the keys run.deadline_*. launcher: whether a launcher will read the
    stacks.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            signal.signal(number, _note_signal)
    stack = sys.__stderr__
    if launcher:  # a new file, so that a process of an earlier attempt that wakes up late writes into the old one
        (run / f"rank{rank}.stack").unlink(missing_ok=True)
        stack = open(run / f"rank{rank}.stack", "w")
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    file = os.open(run / f"rank{rank}.jsonl", os.O_RDWR | os.O_CREAT, 0o666)
    end = os.fstat(file).st_size
    if end and os.pread(file, 1, end - 1) != b"\n":
        end += os.pwrite(file, b"\n", end)  # a node died in the middle of a line
    now = time.monotonic()  # the machine's clock may be set back or forward meanwhile
    STATE.update(
        run=run, rank=rank, attempt=attempt, host=host, stack=stack, looked=now, beat=lambda: None,
        # The log: its descriptor, the offset of the breadcrumb, bytes that a full disk has not taken yet.
        file=file, end=end, pending=b"",
        # Where it is: number of phases so far, step, the phase and when it was entered (since: or last repeated; told:
        # the same by the machine's clock).
        number=0, step=0, name="start", mode="", entered=now, since=now, told=time.time(),
        # Deadlines, and the durations they are learned from: phases, the last steps, writing a checkpoint.
        floor=cfg["run.deadline_floor_s"], first=cfg["run.deadline_first_s"], factor=cfg["run.deadline_factor"],
        took={}, lately={}, write=None, steps=collections.deque(maxlen=20), step_began=None,
        # Seconds in each phase since the end of the last step.
        spent=collections.Counter())
    faulthandler.enable(file=stack)
    sys.excepthook = _log_exception
    event("start", host=host, pid=os.getpid(), node=os.environ.get("SLURMD_NODENAME", ""))
    phase("start")


def _note_signal(number, frame):
    """Ask this rank to leave after its step. A second Ctrl-C ends it at once."""
    again = number == signal.SIGINT and STATE["stop"] == "SIGINT"
    STATE["stop"] = signal.Signals(number).name  # before printing: the next signal may arrive meanwhile
    if again:
        raise KeyboardInterrupt("a second Ctrl-C")
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):  # a full disk or a closed terminal
            os.write(2, b"\nCtrl-C: saves and leaves after this step, and the same command resumes; once more ends "
                        b"at once\n")


def phase(name, mode="", moves=True):
    """Enter a phase: write the breadcrumb and arm the deadline. All ranks enter the same phases in the same order.

    A phase of many parts is entered again for each part, so that waiting ranks see this one make progress. It is not
    counted again: a rank with more parts is no further than others. moves: whether a part is done.
    """
    if STATE["file"] is None:
        return
    now, last = time.monotonic(), (STATE["name"], STATE["mode"])
    repeated = last == (name, mode) and STATE["number"] > 0
    STATE["spent"][STATE["name"]] += now - STATE["since"]
    if last != (name, mode):  # else its duration is not known yet
        STATE["lately"][last] = now - STATE["entered"]
        STATE["took"][last] = max(STATE["lately"][last], STATE["took"].get(last, 0))
    if not repeated:
        STATE.update(entered=now, number=STATE["number"] + 1)
    STATE.update(name=name, mode=mode, since=now, told=time.time())
    STATE["deadline"] = deadline(name, mode)
    _write(b"")
    if sys.platform != "darwin":  # its timer runs on while the machine sleeps, and there a single rank trains alone
        faulthandler.dump_traceback_later(STATE["deadline"], exit=True, file=STATE["stack"])
    if repeated and moves:
        STATE["beat"]()


def goes_on():
    """Enter the current phase again, since a part of it is done. No effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        phase(STATE["name"], STATE["mode"])


def wait_on():
    """Restart the deadline of this phase: a rank that this one waits for has made progress, this one has not."""
    phase(STATE["name"], STATE["mode"], moves=False)


def deadline(name, mode=""):
    """Seconds that a phase may take: run.deadline_factor times a step or this one-off phase, but at least the floor.

    A phase that has not been timed compiles, connects or reads for the first time and gets the long first deadline;
    so does each phase of each mode, since mode 3 may open late. A checkpoint counts as timed only once `learn_write`
    knows how long a write takes: the copy alone is quick.
    """
    took, steps, saves = STATE["took"].get((name, mode)), STATE["steps"], "checkpoint" in (name, mode)
    one_off = name in ONE_OFF or mode in ONE_OFF  # an agreement may wait for the one-off phase of another rank
    if took is None or saves and not STATE["write"] or not (one_off or steps):
        return max(STATE["first"], STATE["floor"])
    if one_off:
        longest = max(took, *steps, STATE["write"] if saves else 0)
    else:
        # Also its own last duration: a mode that opens late takes longer than earlier steps. Capped: it may have
        # compiled.
        own = min(STATE["lately"].get((name, mode), 0), STATE["first"] / STATE["factor"])
        longest = max(statistics.median(steps), own)
    return max(STATE["floor"], STATE["factor"] * longest)


def learn_write(seconds):
    """Remember how long a checkpoint took to write in its thread: the next save, or the exit, may wait that long.

    seconds: 0 if none has been written yet.
    """
    if STATE["file"] is not None:
        STATE["write"] = max(STATE["write"] or 0.0, seconds)


def new_step(step, name="data"):
    """Begin a step of the run. name: its first phase; "data" waits for a batch, "epoch" also starts the loaders."""
    if STATE["file"] is None:
        return
    STATE.update(step=step, step_began=time.monotonic())
    phase(name)


def end_step():
    """End a step and learn its time for the deadlines; the first step compiles, so its time is left out.

    Returns: {phase: seconds since the end of the last step}.
    """
    if STATE["file"] is None:
        return {}
    phase("between steps")
    if "first step" not in STATE["took"]:
        STATE["took"]["first step"] = time.monotonic() - STATE["step_began"]
    else:
        STATE["steps"].append(time.monotonic() - STATE["step_began"])
    return _take_spent()


def event(kind, **fields):
    """Append one line to the log. fields: JSON-serialisable."""
    if STATE["file"] is None:
        return
    line = {"event": kind, "attempt": STATE["attempt"], "rank": STATE["rank"], "step": STATE["step"],
            "time": round(time.time(), 3), **fields}
    _write(json.dumps(line).encode() + b"\n")


def stop_requested():
    """Name of the signal that asked this rank to leave; None if there was none."""
    return STATE["stop"]


def finish():
    """Enter the last phase. Its deadline stays armed until the process is gone, so that a hanging exit ends too."""
    if STATE["file"] is not None:
        phase("exit")
        event("end", spent=_take_spent())


def _take_spent():
    """Return {phase: seconds} since the last call, and reset it."""
    spent = {name: round(seconds, 4) for name, seconds in STATE["spent"].items()}
    STATE["spent"].clear()
    return spent


def _check_folder():
    """Every LOOK_S, right before a write: check that the folder is still ours. Rank 0 also touches the lock.

    A launch that was stopped may wake up after another one has taken over its folder. This then closes the log, since
    further lines would go into the other launch's log, and raises TakenOver.
    """
    if time.monotonic() - STATE["looked"] < LOOK_S:
        return
    STATE["looked"] = time.monotonic()
    check = touch if STATE["rank"] == 0 else assert_held
    try:
        check(STATE["run"])
    except TakenOver:
        os.close(STATE["file"])
        STATE["file"] = None
        faulthandler.enable(file=sys.__stderr__)
        faulthandler.dump_traceback_later(STATE["first"], exit=True, file=sys.__stderr__)  # for the exit
        raise


def _write(lines):
    """Write events over the breadcrumb, and the new breadcrumb after them, in one call. lines: bytes.

    Events that a full disk refuses are kept for later: a log must not end a healthy training. Raises TakenOver.
    """
    breadcrumb = {"event": "now", "attempt": STATE["attempt"], "rank": STATE["rank"], "step": STATE["step"],
                  "mode": STATE["mode"], "phase": STATE["name"], "number": STATE["number"],
                  "time": round(STATE["told"], 3), "deadline": round(STATE.get("deadline", 0), 1),
                  "host": STATE["host"][:64]}
    breadcrumb = json.dumps(breadcrumb).encode().ljust(WIDTH - 1) + b"\n"
    lines = STATE["pending"] + lines
    content = lines + breadcrumb
    _check_folder()
    try:
        if os.pwrite(STATE["file"], content, STATE["end"]) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if not STATE["pending"]:
            print(f"rank {STATE['rank']} cannot write its log: {error}", file=sys.stderr, flush=True)
        STATE["pending"] = lines[-MOST_PENDING:]
        with contextlib.suppress(OSError):  # over the last breadcrumb: this needs no more space
            os.pwrite(STATE["file"], breadcrumb, STATE["end"])
            os.ftruncate(STATE["file"], STATE["end"] + WIDTH)
    else:
        STATE.update(end=STATE["end"] + len(lines), pending=b"")


def _log_exception(kind, error, trace):
    """The hook for an exception that ends the process."""
    # After a loader worker has died, torch's SIGCHLD handler raises, which would interrupt this.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    frames = [f"{os.path.relpath(frame.filename)}:{frame.lineno} {frame.name}"
              for frame in traceback.extract_tb(trace)]
    STATE["looked"] = -math.inf  # check the folder now: the error may come from another rank that saw the takeover
    try:
        event("died", error=f"{kind.__name__}: {error}"[:2000], errno=getattr(error, "errno", None),
              phase=STATE["name"], mode=STATE["mode"], stack=frames[-12:])
    except TakenOver as taken:
        print(f"error: {taken}", file=sys.stderr, flush=True)
    if issubclass(kind, KeyboardInterrupt):
        print(INTERRUPTED, file=sys.stderr, flush=True)
    elif issubclass(kind, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # whoever met it
        print(f"error: {str(error).removeprefix(f'[Errno {error.errno}] ')}: make room, or have the limit raised; the "
              "same command then resumes.", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)
