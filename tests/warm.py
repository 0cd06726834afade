"""Real ranks that start in a tenth of a second: forked from one process that has imported torch and the training.

A rank of its own takes more than three seconds of processor time before its first step. Where a test asks what ranks
compute, and not how a process starts, it takes these: processes with their own number, memory, signals and exit code,
but forked by multiprocessing's fork server, with one thread each. The launcher has tests with ranks that it starts.
"""
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch._dynamo  # an optimizer's first step would import it, and fsdp the others
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import Diffusion.figures  # noqa: F401
import OM_train_3modes as om
from tests import launching
from tests.tiny import ROOT, launcher_environment

SERVER = multiprocessing.get_context("forkserver")


def start(target, arguments, log, environment, errors=None):
    """A process that calls target(*arguments), whose result is its exit code.

    What it prints is added to `log`, or, where it goes to standard error, to `errors`, if there is one.
    """
    if multiprocessing.forkserver._forkserver._forkserver_pid is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
            patch.setenv("OMP_NUM_THREADS", "1")
            SERVER.set_forkserver_preload(["pytest.__main__", __name__])
            multiprocessing.forkserver.ensure_running()
    process = SERVER.Process(target=work, args=(target, arguments, str(log), environment, str(errors or log)))
    process.start()
    return process


def work(target, arguments, log, environment, errors):
    """What the process does: a session, variables and outputs of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((log, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    sys.exit(target(*arguments))


@contextlib.contextmanager
def ranks(count, log, arguments, target=om.main, **more):
    """So many ranks that all call target(*arguments), for the length of a `with` block. more: their variables.

    With one there are none of the variables that tell ranks who they are.
    """
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {} for rank in range(count)]
    processes = []
    with launching.held_port() as port:
        shared = launcher_environment(count, **more)
        if count > 1:
            shared.update(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            for variables in own:
                processes.append(start(target, arguments, log, {**shared, **variables}))
            yield processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its workers with it
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()


def codes(processes, seconds):
    """Exit codes of processes, once all have ended. Raises TimeoutError where one does not."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
        if process.exitcode is None:
            raise TimeoutError(f"process {process.pid} has not ended within {seconds} s")
    return [process.exitcode for process in processes]


def program(target, words, folder):
    """A program whose main(words) is `target`, in a process of its own. Returns what subprocess.run does.

    words: its command line; None where `target` takes nothing. folder: for its two outputs.
    """
    out, errors = (Path(folder) / name for name in ("standard_output", "standard_error"))
    for path in (out, errors):
        path.unlink(missing_ok=True)
    process = start(target, [] if words is None else [words], out, {**os.environ, "OMP_NUM_THREADS": "1"}, errors)
    code, = codes([process], 200)
    return subprocess.CompletedProcess(words, code, out.read_text(), errors.read_text())


def train(count, log, words, expected=0, seconds=200, target=om.main, **more):
    """A training, or another program, of so many ranks. words: its command line. Returns what it printed."""
    with ranks(count, log, [words], target, **more) as processes:
        found = codes(processes, seconds)
    printed = log.read_text()
    assert found == [expected] * count, f"{found}: {printed}"
    return printed
