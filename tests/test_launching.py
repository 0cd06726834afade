"""Nothing that a test starts outlives it, however the test ends: real processes that ignore every polite signal."""
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests import launching
from tests.faults.common import end_all
from tests.tiny import ROOT

# A launcher whose rank ignores TERM and INT, and whose other rank has left for a session of its own as well.
DEAF = """
trap '' TERM INT HUP
bash -c 'trap "" TERM INT HUP; echo $$ > '$1'/child; while :; do sleep 1; done' &
setsid bash -c 'trap "" TERM INT HUP; echo $$ > '$1'/elsewhere; while :; do sleep 1; done' &
echo $$ > $1/parent
"""
STAYS, LEAVES = DEAF + "while :; do sleep 1; done", DEAF + "sleep 0.3"
NAMES = ("parent", "child", "elsewhere")
SEEN = []  # process numbers, from one test to the next
INNER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests import launching
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts by & ignores it, and so do its children
with launching.running(["bash", "-c", sys.argv[2], "deaf", sys.argv[3]]):
    while not all(Path(sys.argv[3], name).exists() for name in ("parent", "child", "elsewhere")):
        time.sleep(0.01)
    os.kill(os.getpid(), int(sys.argv[4]))
    time.sleep(60)
"""


def pids(folder):
    """Process numbers of all three, once they have started."""
    launching.until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in NAMES), 20)
    return [int((folder / name).read_text()) for name in NAMES]


def alive(numbers):
    return [number for number in numbers if Path(f"/proc/{number}").exists()
            and Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


@pytest.mark.parametrize("end", [ZeroDivisionError, KeyboardInterrupt])
def test_a_block_that_is_left_ends_all_that_was_started(tmp_path, end):
    with pytest.raises(end), launching.running(["bash", "-c", STAYS, "deaf", tmp_path]) as process:
        numbers = pids(tmp_path)
        assert len(alive(numbers)) == 3 and process.pid == numbers[0]
        raise end
    assert not alive(numbers) and process.returncode == -signal.SIGKILL


def test_what_a_process_leaves_behind_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 1)
    with pytest.raises(AssertionError, match="has ended and left behind: process .*sleep 1"):
        launching.run(["bash", "-c", LEAVES, "deaf", tmp_path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert not alive(pids(tmp_path))


def test_a_process_that_takes_too_long_ends_with_its_children_and_what_it_said_is_shown(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        launching.run(["bash", "-c", f"echo so far, so good; {STAYS}", "deaf", tmp_path], timeout=1)
    assert "so far, so good" in caught.value.__notes__[0] and not alive(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_pytest_leaves_nothing_either(tmp_path, number):
    """Where it cannot do so any more, its guard does it."""
    done = launching.run([sys.executable, "-c", INNER, ROOT, STAYS, tmp_path, int(number)], timeout=60)
    assert done.returncode in (-number, 1), done.stderr
    launching.until(lambda: not alive(pids(tmp_path)), 10)  # the guard works beside this process


def test_marks_nest_and_do_not_overlap(tmp_path):
    show = f"echo ${launching.MARK}; sleep 100; :"  # bash would become its last command, and have no marks meanwhile
    with launching.running(["bash", "-c", show], stdout=subprocess.PIPE, text=True) as one, \
            launching.running(["bash", "-c", show], stdout=subprocess.PIPE, text=True) as other:
        marks = [process.stdout.readline().strip() for process in (one, other)]
        assert all(mark.startswith(os.environ[launching.MARK]) for mark in marks) and len(set(marks)) == 2
        assert one.pid in launching.marked(marks[0]) and other.pid not in launching.marked(marks[0])
        launching.end(one)
        assert not launching.marked(marks[0]) and other.pid in launching.marked(os.environ[launching.MARK])


def test_the_end_of_all_launches_leaves_what_multiprocessing_runs_for_later(tmp_path):
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker._pid
    process = launching.start(["bash", "-c", STAYS, "deaf", tmp_path])
    numbers = pids(tmp_path)
    end_all()
    assert not alive(numbers) and process.returncode == -signal.SIGKILL and alive([tracker])


@pytest.fixture(scope="module")
def of_the_file():
    with launching.running(["sleep", "100"]) as process:
        yield process


def test_what_a_test_starts_is_there_while_it_runs(of_the_file, tmp_path):
    launching.start(["bash", "-c", STAYS, "deaf", tmp_path])
    SEEN.extend(pids(tmp_path))
    assert len(alive(SEEN)) == 3


def test_and_ends_with_it_but_not_what_a_fixture_of_the_file_has_started(of_the_file):
    assert len(SEEN) == 3 and not alive(SEEN) and of_the_file.poll() is None
