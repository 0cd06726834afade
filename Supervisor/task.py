"""One rank as a task of srun: start it, watch it, note how it ended. Scripts/task.sh has set its variables."""
import os
import signal
import subprocess
import sys
import time

from Supervisor.processes import SIGNALS, code_of, interpreter, note_exit, oom_kills, say


def main(words):
    """words: a program of the repository and its arguments. Returns: the exit code of this task."""
    rank, kills, last_stop = int(os.environ["RANK"]), oom_kills(), None
    for number in SIGNALS:  # Slurm sends them to the rank too, which saves and leaves; wait for it
        signal.signal(number, lambda *_: None)
    # Until its Python handles USR1, the rank would die from it; USR1 is sent repeatedly.
    try:
        process = subprocess.Popen(interpreter() + words,
                                   preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    except OSError as error:
        say("rank %d cannot be started: %s" % (rank, error))
        note_exit(rank, 127, kills)
        return 127
    while process.poll() is None:  # Slurm wakes a stopped rank before it ends it, so note the stop here
        if state(process.pid) == "T":
            last_stop = time.monotonic()
        time.sleep(0.5)
    code = code_of(process)
    stopped = last_stop is not None and time.monotonic() - last_stop < 5
    note_exit(rank, code, kills, **({"stopped": True} if stopped else {}))
    if code in (0, 42):  # another code makes --kill-on-bad-exit end the other ranks while they are leaving
        return 0
    time.sleep(int(os.environ["GRACE"]))  # give the others time to log their exceptions first
    return code


def state(pid):
    """The kernel's letter for the state of a process: R, S, D, T and so on."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
