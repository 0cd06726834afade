"""Processes that tests start. None outlives the test that started it, whatever ends that test.

    done = launching.run(command, env=..., timeout=60)        # as subprocess.run with captured text
    with launching.running(command, stdout=log) as process:   # as subprocess.Popen
        ...

Each is a session of its own with a mark in its environment, which all that it starts inherit. By the mark they are
found and killed when the `with` block is left, whatever ends it; a guard process does so when pytest itself is killed.
A block that ends well must leave nothing behind: what it leaves is killed and named in an AssertionError.
tests/conftest.py asks the same after each file of tests, and ends what a test has begun by `start`. Scripts that tests
start may use all of this too (tests/faults, tests/slurm): marks nest.
"""
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

MARK = "TEST_OF_OMNIMORPH"  # run.notify does not pass on OMNIMORPH_*
NUMBERS = itertools.count()
STARTED = []  # by `start`, and not yet ended
GRACE = 5  # seconds for what ends by itself: a worker that notices the death of its parent
GUARDS = {}  # our process number: the guard, which reads from us until we are gone
DEADLY = (signal.SIGINT, signal.SIGTERM)
# On a machine that other work slows down, FAULTS_SLOW=4 multiplies what `until` waits for, and the deadlines of faults.
SLOW = float(os.environ.get("FAULTS_SLOW", "1"))


def mark_this_process():
    """Give this process a mark that all which it starts carry, below that of who started it. Returns it."""
    own = f"/{os.getpid()}/"
    if own not in os.environ.get(MARK, ""):
        os.environ[MARK] = os.environ.get(MARK, "").rstrip("/") + own
    if os.getpid() not in GUARDS:
        command = [sys.executable, "-S", __file__, os.environ[MARK]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        without = {name: value for name, value in os.environ.items() if name != MARK}
        GUARDS[os.getpid()] = subprocess.Popen(command, stdin=subprocess.PIPE, env=without, **quiet)
    return os.environ[MARK]


def start(command, env=None, **options):
    """subprocess.Popen of a session of its own with a mark of its own. It ends by `end`, or with the test."""
    mark = f"{mark_this_process()}{next(NUMBERS)}/"
    environment = {**(os.environ if env is None else env), MARK: mark}
    process = subprocess.Popen([str(word) for word in command], env=environment, start_new_session=True, **options)
    process.mark = mark
    STARTED.append(process)
    return process


def until(condition, seconds=120):
    """Wait for a condition to become true. Returns its value; raises TimeoutError."""
    ends = time.monotonic() + seconds * SLOW
    while not (value := condition()):
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {seconds} s for {condition}")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def held_port():
    """A TCP port that nobody is given for the length of a `with` block; rank 0 may serve there, as may whoever asks
    for this number and, as torch does, for SO_REUSEADDR. Where nobody does, connections are refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def end(process):
    """Kill a process of `start` with all that it has started, and wait until nothing of it is left."""
    STARTED[:] = [other for other in STARTED if other is not process]
    kill(process.mark)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        pipe.close()


@contextlib.contextmanager
def running(command, **options):
    """A process of `start` for the length of a `with` block.

    Raises AssertionError where the block ends well with the process, but not all that it has started, at its end.
    """
    process = start(command, **options)
    try:
        yield process
        stays = expect_nothing(process.mark) if process.poll() is not None else ""
    finally:
        end(process)
    assert not stays, f"{command} has ended and left behind: {stays}"


def run(command, timeout=240, check=False, input=None, **options):
    """subprocess.run with captured text, of a process that ends with all that it has started.

    Raises subprocess.TimeoutExpired, with the end of what was printed, and with `check` CalledProcessError.
    """
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    if input is not None:
        given["stdin"] = subprocess.PIPE
    with running(command, **given) as process:
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired as error:
            kill(process.mark)
            error.add_note("It printed: " + "".join(filter(None, process.communicate()))[-3000:])
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def marked(mark):
    """{process number: command line} of all living processes that carry a mark, or one below it. Linux only."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if any(word.startswith(wanted) for word in (folder / "environ").read_bytes().split(b"\0")):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
    return found


def expect_nothing(mark, but=()):
    """Wait for the end of all that carries a mark. Returns what is still there after GRACE seconds, "" for nothing."""
    until = time.monotonic() + GRACE
    while left := {pid: command for pid, command in marked(mark).items() if pid not in but}:
        if time.monotonic() > until:
            return "; ".join(f"process {pid}: {command[:200]}" for pid, command in left.items())
        time.sleep(0.02)
    return ""


def kill(mark, but=()):
    """Kill all that carries a mark, and what that starts meanwhile, until there is nothing left."""
    until = time.monotonic() + GRACE
    while left := [pid for pid in marked(mark) if pid not in but]:
        if time.monotonic() > until:
            raise TimeoutError(f"these processes cannot be killed: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def guard(mark):
    """Wait for the end of who has started us, which closes our input, and kill what it has left."""
    for number in DEADLY:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill(mark)


if __name__ == "__main__":
    guard(sys.argv[1])
