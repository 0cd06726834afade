"""Runtime/workers.py: results, the death of a worker, the death of the parent."""
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from Runtime.errors import InputError
from Runtime.workers import run_tasks
from tests import launching

ROOT = Path(__file__).resolve().parent.parent  # not from tests/tiny.py: each worker would import torch
STATE = {}


def keep(number):
    STATE["number"] = number


def add(a, b):
    return os.getpid(), a + b + STATE.get("number", 0)


class Counted:
    """How often it has been sent to another process."""

    def __init__(self):
        self.sent = 0

    def __getstate__(self):
        self.sent += 1
        return {}


def pass_on(_, a):
    return a


def kill_one(a):
    if a == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return a


def end_one(a):
    if a == 1:
        os._exit(7)
    return a


def take_too_much(a):
    raise MemoryError


def refuse(a):
    raise InputError(f"{a}: not this one")


def sleep(folder, seconds):
    with open(os.path.join(folder, str(os.getpid())), "w"):
        time.sleep(seconds)


def draw_and_end(a):
    from tqdm import tqdm
    with tqdm(total=1, disable=True):
        os.kill(os.getpid(), signal.SIGKILL)


def warn(a):
    print("a warning", file=sys.stderr)
    return a


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_log_on_a_full_disk_ends_no_task():
    program = "from tests.test_workers import *\nprint([found for _, found in run_tasks(warn, [(7,)], 1, 'out')])"
    with open("/dev/full", "w") as log:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert (done.returncode, done.stdout) == (0, "[7]\n")


def test_a_worker_that_is_killed_leaves_no_warning_of_python():
    """The lock of tqdm's bars is a semaphore: after each Ctrl-C Python said that it had leaked."""
    program = "from tests.test_workers import *\nlist(run_tasks(draw_and_end, [(7,)], 1, 'out'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "a worker process was killed" in done.stderr and "leaked" not in done.stderr


def test_every_task_runs_once_in_another_process():
    calls = []
    results = dict(run_tasks(add, [(1, 2), (3, 4), (5, 6)], 2, "out", keep, (100,), lambda: calls.append(1)))
    assert {task: total for task, (_, total) in results.items()} == {(1, 2): 103, (3, 4): 107, (5, 6): 111}
    pids = {pid for pid, _ in results.values()}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids and calls


def test_what_all_tasks_share_goes_to_each_process_once():
    """The rows of 2000 results are 5 MB: sent with each of them, they took minutes."""
    shared = Counted()
    assert sorted(a for _, a in run_tasks(functools.partial(pass_on, shared), [(a,) for a in range(9)], 2, "out")) == [
        *range(9)]
    assert shared.sent <= 2


@pytest.mark.parametrize("function, workers, advice", [
    (kill_one, 2, "with fewer --workers than 2, and"), (kill_one, 1, "again on a machine with more memory, and"),
    pytest.param(take_too_much, 2, "with fewer --workers than 2, and", marks=pytest.mark.slow)])
def test_a_worker_that_dies_or_lacks_memory_is_one_sentence(function, workers, advice):
    with pytest.raises(InputError, match=f"out: a worker process was killed, .* {advice}"):
        list(run_tasks(function, [(1,), (2,)], workers, "out"))


def test_a_worker_that_exits_is_named_with_its_status():
    with pytest.raises(InputError, match="out: a worker process ended with exit status 7; the lines above"):
        list(run_tasks(end_one, [(1,), (2,)], 2, "out"))


def test_what_a_task_raises_is_raised_here():
    with pytest.raises(InputError, match="7: not this one"):
        list(run_tasks(refuse, [(7,)], 3, "out"))


SETUP = "from Runtime.workers import run_tasks\n"
TASKS = "list(run_tasks(len, [('a',)], 1, 'out'))"
TRAINING_SETUP = ("from Dataloader.dataset import require_room_for_workers\nfrom tests.tiny import config\n"
                  "cfg = config(data__in_memory='false', data__num_workers=1)\n")
TRAINING = "require_room_for_workers(cfg)"


@pytest.mark.parametrize("call, what", [
    (SETUP + TASKS, "out"), ("import OM_prepare; OM_prepare.make_groups('out', {0: ['a']}, {}, 1, 0)", "out"),
    (TRAINING_SETUP + TRAINING, "data.num_workers")])
def test_without_shared_memory_it_and_not_the_results_is_blamed(call, what):
    hidden = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*hidden, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot hide /dev/shm from a process")
    done = subprocess.run([*hidden, sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"InputError: {what}: no worker processes can be started (Read-only file system); they need /dev/shm" in \
        done.stderr, done.stderr


@pytest.mark.parametrize("first, call, what, fewer", [
    (SETUP, TASKS, "out", "give fewer --workers"),
    (SETUP + "resource_tracker.ensure_running()\n", TASKS, "out", "give fewer --workers"),
    (TRAINING_SETUP, TRAINING, "data.num_workers", "set it to 0")], ids=["semaphores", "processes", "training"])
def test_a_limit_of_processes_and_not_the_results_is_blamed(first, call, what, fewer):
    # All imports come first: the user that the process becomes may not read this Python.
    program = ("import multiprocessing.popen_spawn_posix, multiprocessing.queues, multiprocessing.synchronize\n"
               "import os, resource\nfrom multiprocessing import resource_tracker\n"
               f"{first}"
               "if os.getuid() == 0:\n    os.setuid(65534)  # root may start any number\n"
               "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n" + call)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"InputError: {what}: no more worker processes can be started (Resource temporarily unavailable); " \
        f"{fewer}, or raise" in done.stderr, done.stderr


def test_no_worker_outlives_its_killed_parent(tmp_path):
    code = ("import sys; from Runtime.workers import run_tasks; from tests.test_workers import sleep\n"
            "if __name__ == '__main__':\n    list(run_tasks(sleep, [(sys.argv[1], 60)] * 2, 2, 'out'))")
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "pids").mkdir()
    process = launching.start([sys.executable, str(tmp_path / "main.py"), str(tmp_path / "pids")],
                              stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    launching.until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
    process.kill()
    process.wait()
    assert launching.expect_nothing(process.mark) == ""
