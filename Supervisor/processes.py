"""Start other programs under time limits: for the launcher, and for a task of srun on its node.

Nothing here waits forever, not even for a process blocked in a driver or file system (state D). This file, launcher.py,
scheduler.py and task.py need only the host's own Python, 3.6 or newer, and its standard library, because the training's
PYTHON may run in a container, which has no Slurm.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
ASKED = []  # names of the signals that asked this process to leave


class Leave(Exception):
    """Ends the launch: exit code (42 asked to leave, 43 a person is needed), and why."""

    def __init__(self, code, why):
        super().__init__(why)
        self.code, self.why = code, why


def listen():
    """From now on note signals in ASKED, except those already ignored, as under nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: ASKED.append(signal.Signals(number).name[3:]))


def ignore():
    """From now on ignore signals: a rank would die from them before its Python handles them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def say(text):
    """Write a line with the time to the log."""
    try:
        sys.stderr.write("%s %s\n" % (time.strftime("%Y-%m-%d %H:%M:%S"), text))
        sys.stderr.flush()
    except OSError:  # whoever read it is gone
        pass


def nap(seconds):
    """Sleep, but wake up once asked to leave."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not ASKED:
        time.sleep(0.1)


def interpreter():
    """The words of PYTHON; a path with blanks is one word."""
    return [os.environ["PYTHON"]] if shutil.which(os.environ["PYTHON"]) else os.environ["PYTHON"].split()


def code_of(process, ends=0):
    """Exit code of a process, 128 + the signal that ended it; None if it runs beyond `ends` (time.monotonic)."""
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.1)
    return 128 - process.returncode if (process.returncode or 0) < 0 else process.returncode


def ask(command, seconds, stoppable=False, quiet=False, stdin=subprocess.DEVNULL):
    """(exit code, output) of a command; 137 and no output if it was killed after `seconds`.

    stoppable: if this process is asked to leave, so is the command. quiet: drop its standard error.
    """
    try:
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL if quiet else None)
    except OSError as error:
        say("%s cannot be started: %s" % (command[0], error.strerror or error))
        return 127, ""
    os.set_blocking(process.stdout.fileno(), False)
    ends, told, output = time.monotonic() + seconds, False, b""
    while True:
        code = code_of(process)
        output += process.stdout.read() or b""  # so far: a process that it started may still hold the pipe
        if code is not None:
            return code, os.fsdecode(output)
        if time.monotonic() >= ends:
            process.kill()
            return 137, ""
        if stoppable and ASKED and not told:
            process.terminate()
            told = True
        time.sleep(0.1)


def oom_kills():
    """How many processes this node's kernel has killed because memory ran out; "" if unknown."""
    try:
        with open("/proc/vmstat") as lines:
            return next((line.split()[1] for line in lines if line.startswith("oom_kill ")), "")
    except OSError:
        return ""


def note_exit(rank, code, kills, **more):
    """Append the end of a rank's process to its log. kills: `oom_kills` when it began."""
    run = os.environ["OMNIMORPH_RUN"]
    if code == 137 and kills and oom_kills() != kills:
        more["oom_kill"] = True
    line = {"event": "exit", "attempt": int(os.environ["OMNIMORPH_ATTEMPT"]), "rank": rank, "code": code,
            "time": time.time()}
    line.update(more)
    try:
        if is_ours(os.path.join(run, "lock.json")):
            with open(os.path.join(run, "rank%d.jsonl" % rank), "a") as log:
                log.write(json.dumps(line) + "\n")
    except OSError as error:
        say("the end of rank %d could not be noted: %s" % (rank, error))


def is_ours(lock):
    """Whether the folder still belongs to this launch: another one may have taken it over."""
    try:
        with open(lock) as file:
            return os.environ["OMNIMORPH_TOKEN"] in file.read()
    except FileNotFoundError:
        return True
