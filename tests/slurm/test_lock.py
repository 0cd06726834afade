"""The lock of a run folder beside a real Slurm: what it says of a job counts more than the clock."""
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from Runtime.errors import InputError
from Runtime.files import is_passing, patiently
from Runtime.run_lock import lock
from tests.slurm.cluster import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def said(slurm, *command):
    return subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout.strip()


def state(slurm, job):
    return said(slurm, "squeue", "-h", "--states=all", "-o", "%T", "-j", job)


@pytest.fixture
def job(slurm, monkeypatch):
    """A job that runs, and this process as one that can ask Slurm about it."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.setenv("PATH", slurm["PATH"])
    number = said(slurm, "sbatch", "--parsable", "--nodes=1", "--output=/dev/null", "--wrap", "sleep 300")
    wait_for(lambda: state(slurm, number) == "RUNNING", 60, "the job")
    yield number
    subprocess.run(["scancel", number], env=slurm)


def stale_lock(run, job, cluster="test"):
    """The lock of a job on another machine, untouched for days."""
    token = lock(run, 60)
    found = json.loads((run / "lock.json").read_text())
    found["holders"][0].update(host="elsewhere", boot="another", pid=1)
    (run / "lock.json").write_text(json.dumps(found | {"job": job, "cluster": cluster}))
    os.utime(run / "lock.json", (1e9, 1e9))
    return token


def test_a_job_holds_its_folder_as_long_as_slurm_says_that_it_runs_or_is_suspended(tmp_path, slurm, job):
    before = stale_lock(tmp_path, job)
    with pytest.raises(InputError, match=rf"on elsewhere \(job {job}\)"):
        lock(tmp_path, 60)
    said(slurm, "scontrol", "suspend", job)
    wait_for(lambda: state(slurm, job) == "SUSPENDED", 60, "the suspension")
    with pytest.raises(InputError, match=rf"\(job {job}\)"):
        lock(tmp_path, 60)
    said(slurm, "scontrol", "resume", job)
    said(slurm, "scancel", job)
    after = patiently(lambda: lock(tmp_path, 60), 60, "the lock")  # it may be ending for a moment
    assert after != before


def test_the_number_of_another_cluster_says_nothing_here(tmp_path, slurm, job):
    before = stale_lock(tmp_path, job, cluster="elsewhere")
    assert lock(tmp_path, 60) != before


def test_a_controller_that_is_away_is_waited_for(tmp_path, slurm, job, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "test")  # as in any job; else the controller is asked for that too
    stale_lock(tmp_path, job)
    controller = int((Path(slurm["SLURM_CONF"]).parent / "pid/slurmctld").read_text())
    os.kill(controller, signal.SIGSTOP)
    wakes = threading.Timer(30, os.kill, [controller, signal.SIGCONT])
    wakes.start()
    try:
        with pytest.raises(OSError, match=f"whether job {job} still runs") as raised:
            lock(tmp_path, 60)
        assert is_passing(raised.value)
        with pytest.raises(InputError, match=rf"\(job {job}\)"):
            patiently(lambda: lock(tmp_path, 60), 120, "the lock")
    finally:
        wakes.join()
