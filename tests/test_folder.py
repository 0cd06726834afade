"""The run folder and its lock, with real processes holding it, dying and starting at the same moment."""
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from Runtime.errors import InputError
from Runtime.folder import lock, run_folder, touch, unlock
from tests.tiny import ROOT

HOLD = """
import sys, time
from pathlib import Path
from Runtime.errors import InputError
from Runtime.folder import lock
run = Path(sys.argv[1])
print("ready", flush=True)
while not (run / "go").exists():
    time.sleep(0.001)
try:
    print("token", lock(run, 60), flush=True)
except InputError as error:
    print("refused", error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes that take the lock once the file `go` is there and live until their input ends."""
    started = []

    def start_one():
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def read(run):
    return json.loads((run / "lock.json").read_text())


def rewrite(run, **changes):
    """Change the lock's first holder, as if another process had written it; keeps the time of the last touch."""
    found = read(run)
    found["holders"][0].update(changes)
    (run / "lock.json").write_text(json.dumps(found))


def age(run, seconds):
    moment = time.time() - seconds
    os.utime(run / "lock.json", (moment, moment))


def test_a_live_holder_is_named_and_a_killed_one_loses_the_folder(tmp_path, start):
    (tmp_path / "go").touch()
    holder = start()
    assert holder.stdout.readline().startswith("token ")
    age(tmp_path, 10 ** 6)  # on its own machine a process is asked, not the clock
    with pytest.raises(InputError) as refused:
        lock(tmp_path, 60)
    text = str(refused.value)
    assert f"process {holder.pid} on {socket.gethostname()} since {read(tmp_path)['since']}" in text
    assert str(tmp_path) in text and "--fresh" in text
    holder.kill()
    holder.wait(10)
    touch(tmp_path)
    token = lock(tmp_path, 60)
    assert read(tmp_path)["token"] == token and read(tmp_path)["holders"][0]["pid"] == os.getpid()


def test_a_killed_holder_that_nobody_has_waited_for_is_dead(tmp_path, start):
    (tmp_path / "go").touch()
    holder = start()
    assert holder.stdout.readline().startswith("token ")
    holder.kill()
    until = time.time() + 5
    while ") Z " not in open(f"/proc/{holder.pid}/stat").read():  # without wait() it stays a zombie
        assert time.time() < until
        time.sleep(0.01)
    lock(tmp_path, 60)


def test_of_six_starts_at_the_same_moment_one_gets_the_folder(tmp_path, start):
    processes = [start() for _ in range(6)]
    (tmp_path / "go").touch()
    said = [process.stdout.readline() for process in processes]
    assert sorted(line.split()[0] for line in said) == ["refused"] * 5 + ["token"]
    winner = processes[[line.split()[0] for line in said].index("token")]
    assert read(tmp_path)["holders"][0]["pid"] == winner.pid
    assert all(f"process {winner.pid} on" in line for line in said if line.startswith("refused"))
    assert not list(tmp_path.glob("lock.json.tmp*"))


def test_a_process_number_that_someone_else_has_now_is_dead(tmp_path, start):
    lock(tmp_path, 60)
    rewrite(tmp_path, pid=start().pid)  # alive, but it began at another time
    before = read(tmp_path)["token"]
    assert lock(tmp_path, 60) != before


def test_a_holder_that_is_this_process_is_alive(tmp_path):
    lock(tmp_path, 60)
    with pytest.raises(InputError, match=f"process {os.getpid()} on"):
        lock(tmp_path, 60)


def test_another_machine_is_alive_while_it_touches_the_lock(tmp_path):
    lock(tmp_path, 100)
    rewrite(tmp_path, host="elsewhere", boot="another", pid=1)
    age(tmp_path, 50)
    with pytest.raises(InputError, match="process 1 on elsewhere since"):
        lock(tmp_path, 1)  # the holder's own promise counts, not that of who asks
    age(tmp_path, 150)
    touch(tmp_path)
    with pytest.raises(InputError, match="elsewhere"):
        lock(tmp_path, 1)
    age(tmp_path, 150)
    lock(tmp_path, 1)


def test_another_namespace_of_this_machine_is_judged_by_its_touches(tmp_path):
    lock(tmp_path, 100)
    rewrite(tmp_path, namespace="pid:[1]", host="container", pid=2 ** 22 + 1)
    with pytest.raises(InputError, match="on container"):
        lock(tmp_path, 100)
    age(tmp_path, 150)
    lock(tmp_path, 100)


def test_a_holder_from_before_a_reboot_is_dead_however_fresh(tmp_path):
    lock(tmp_path, 1000)
    rewrite(tmp_path, boot="the boot before")
    lock(tmp_path, 1000)


def test_the_job_of_the_holder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    lock(tmp_path, 60)
    with pytest.raises(InputError, match=r"\(job 4711\) since"):
        lock(tmp_path, 60)


def test_a_job_that_was_requeued_takes_its_own_folder_back(tmp_path, monkeypatch):
    """However fresh: a job does not run twice at a time."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    before = lock(tmp_path, 1000)
    rewrite(tmp_path, host="elsewhere", boot="another", pid=1)
    with pytest.raises(InputError, match="job 4711"):
        lock(tmp_path, 1000)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert lock(tmp_path, 1000) != before


def test_who_knows_the_token_joins_and_either_keeps_it_alive(tmp_path, start):
    launcher, other = start(), start()
    token = lock(tmp_path, 60, pid=launcher.pid)
    assert lock(tmp_path, 60, token=token) == token
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid, os.getpid()]
    assert lock(tmp_path, 60, pid=other.pid, token=token) == token  # the next round's rank 0 replaces the last one's
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid, other.pid]
    launcher.kill()
    launcher.wait(10)
    with pytest.raises(InputError, match="in use"):
        lock(tmp_path, 60)
    with pytest.raises(InputError, match="in use"):
        lock(tmp_path, 60, token="0" * 16)
    other.kill()
    other.wait(10)
    assert lock(tmp_path, 60) != token


def test_a_launcher_that_takes_its_lock_again_is_alone_in_it(tmp_path, start):
    launcher = start()
    token = lock(tmp_path, 60, pid=launcher.pid)
    lock(tmp_path, 60, token=token)
    lock(tmp_path, 60, pid=launcher.pid, token=token)
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid]


def test_only_the_token_unlocks(tmp_path):
    token = lock(tmp_path, 60)
    unlock(tmp_path, "0" * 16)
    assert read(tmp_path)["token"] == token
    unlock(tmp_path, token)
    assert not (tmp_path / "lock.json").exists()
    unlock(tmp_path, token)
    touch(tmp_path)
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("text", ["", "{", '{"token": "ab", "hold', "[]", "null", '{"token": "ab", "holders": []}',
                                  "\0\0"])
def test_a_lock_that_says_too_little_is_none(tmp_path, text):
    (tmp_path / "lock.json").write_text(text)
    token = lock(tmp_path, 60)
    assert read(tmp_path)["token"] == token and read(tmp_path)["holders"][0]["pid"] == os.getpid()


def test_runs_continue_the_newest_generation_and_fresh_makes_the_next(tmp_path):
    assert run_folder(tmp_path, "brain", "net").name == "brain_net"
    assert run_folder(tmp_path, "brain", "net", fresh=True).name == "brain_net-2"
    for name in ("brain_net-10", "brain_net-old", "brain_net-011", "brain_nets-40", "abrain_net-50"):
        (tmp_path / name).mkdir()
    run = run_folder(tmp_path, "brain", "net")
    assert run.name == "brain_net-10" and (run / "tmp").is_dir()
    assert run_folder(tmp_path, "brain", "net", fresh=True).name == "brain_net-11"
    assert run_folder(tmp_path, "brain.", "net").name == "brain._net"
