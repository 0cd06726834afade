"""The run folder and its lock, with real processes holding it, dying and starting at the same moment."""
import contextlib
import errno
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from Inference.results import do_all
from Runtime import run_lock
from Runtime.config import load_config, save_config
from Runtime.errors import InputError
from Runtime.files import is_passing, patiently, write_file
from Runtime.run_lock import CLAIM_S, TakenOver, assert_held, lock, run_folder, touch, unlock
from tests import launching
from tests.tiny import CONFIG, ROOT, config, stand_in

# Takes the lock once the file `go` is there, and lives until its input ends.
HOLD = """
import sys, time
from pathlib import Path
from Runtime.errors import InputError
from Runtime.run_lock import lock
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

ELSEWHERE = {"host": "elsewhere", "boot": "another", "pid": 1}


def alive():
    """A process that holds a lock for which `lock` gets its number."""
    return launching.start(["sleep", "100"])


def end(process):
    process.kill()
    process.wait(10)


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


def test_a_live_holder_is_named_and_a_killed_one_loses_the_folder(tmp_path):
    holder = alive()
    lock(tmp_path, 60, pid=holder.pid)
    age(tmp_path, 10 ** 6)  # on its own machine a process is asked, not the clock
    with pytest.raises(InputError) as refused:
        lock(tmp_path, 60)
    text = str(refused.value)
    assert f"process {holder.pid} on {socket.gethostname()} since {read(tmp_path)['since']}" in text
    assert str(tmp_path) in text and "--fresh" in text
    holder.kill()
    launching.until(lambda: ") Z " in open(f"/proc/{holder.pid}/stat").read(), 5)  # without wait() it stays a zombie
    touch(tmp_path)
    token = lock(tmp_path, 60)
    assert read(tmp_path)["token"] == token and read(tmp_path)["holders"][0]["pid"] == os.getpid()


def test_without_proc_too_a_dead_process_of_this_host_loses_the_folder_at_once(tmp_path, monkeypatch):
    """As on macOS: no more is known of a process than its number and its host."""
    identity, unknown = run_lock._identity, {"machine": "", "boot": "", "namespace": "", "began": None}
    monkeypatch.setattr(run_lock, "_identity", lambda pid: identity(pid) | unknown)
    holder = alive()
    before = lock(tmp_path, 1000, pid=holder.pid)
    with pytest.raises(InputError, match=f"process {holder.pid} on"):
        lock(tmp_path, 1000)
    end(holder)
    rewrite(tmp_path, host="elsewhere")
    with pytest.raises(InputError, match="on elsewhere"):
        lock(tmp_path, 1000)
    rewrite(tmp_path, host=socket.gethostname())
    assert lock(tmp_path, 1000) != before


def test_of_six_starts_at_the_same_moment_one_gets_the_folder(tmp_path):
    lock(tmp_path, 60)
    rewrite(tmp_path, pid=2 ** 22 + 1)  # the lock of a dead one is there, which each of them may replace
    processes = [launching.start([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE) for _ in range(6)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 6
    (tmp_path / "go").touch()
    said = [process.stdout.readline() for process in processes]
    assert sorted(line.split()[0] for line in said) == ["refused"] * 5 + ["token"]
    winner = processes[[line.split()[0] for line in said].index("token")]
    assert read(tmp_path)["holders"][0]["pid"] == winner.pid
    assert all(f"process {winner.pid} on" in line for line in said if line.startswith("refused"))
    assert {path.name for path in tmp_path.iterdir()} == {"go", "lock.json"}


@pytest.mark.parametrize("later", [-CLAIM_S - 1, 1e6])  # s; the clock may be set back
def test_what_a_death_in_the_middle_of_locking_leaves_is_in_the_way_for_half_a_minute(tmp_path, later):
    claim = tmp_path / ".lock.claim"
    claim.touch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock, tmp_path, 60)
        time.sleep(0.3)
        assert not (tmp_path / "lock.json").exists() and waiting.running()
        os.utime(claim, (time.time() + later,) * 2)
        assert waiting.result(20) == read(tmp_path)["token"] and not claim.exists()


def test_the_half_lock_of_a_process_killed_while_it_wrote_does_not_stay(tmp_path):
    (tmp_path / ".lock.json.tmp-vm-14205").write_text('{"token": "0de2')
    unlock(tmp_path, lock(tmp_path, 60))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("over", [lambda run, holder: end(holder), lambda run, holder: age(run, 1001)])
def test_a_living_holder_that_proc_hides_is_judged_by_the_clock(tmp_path, monkeypatch, over):
    """As a process of another user where /proc is mounted with hidepid: only that there is one can be seen."""
    holder, read_text = alive(), Path.read_text
    before = lock(tmp_path, 1000, pid=holder.pid)

    def unless_hidden(path, *more):
        if str(path) == f"/proc/{holder.pid}/stat":
            raise FileNotFoundError(path)
        return read_text(path, *more)

    monkeypatch.setattr(Path, "read_text", unless_hidden)
    with pytest.raises(InputError, match=f"process {holder.pid} on"):
        lock(tmp_path, 1000)
    over(tmp_path, holder)
    assert lock(tmp_path, 1000) != before


def test_a_process_number_that_someone_else_has_now_is_dead(tmp_path):
    lock(tmp_path, 60)
    rewrite(tmp_path, pid=alive().pid)  # alive, but it began at another time
    before = read(tmp_path)["token"]
    assert lock(tmp_path, 60) != before


def test_a_holder_that_touches_the_lock_lives_as_long_as_it_has_promised(tmp_path):
    lock(tmp_path, 100)
    rewrite(tmp_path, **ELSEWHERE)
    age(tmp_path, 150)
    touch(tmp_path)
    with pytest.raises(InputError, match="elsewhere"):
        lock(tmp_path, 1)  # the holder's own promise counts, not that of who asks


def test_work_in_a_folder_below_touches_the_lock(tmp_path):
    """The rounds of a template have folders of their own, and take longer than a lock lasts untouched."""
    where = tmp_path / "rounds/round_1"
    where.mkdir(parents=True)
    lock(tmp_path, 60)
    age(tmp_path, 1000)
    row = {"name": "a", "folder": str(where), "labels": {}, "source": {}, "files": {}}
    assert do_all(where, [({"name": "a"}, where)], lambda *_: row, {}) == ([row], [])
    assert time.time() - (tmp_path / "lock.json").stat().st_mtime < 60


def test_results_that_another_program_has_taken_over_are_not_written(tmp_path):
    lock(tmp_path, 60)

    def taken_over(*_):
        content = json.loads((tmp_path / "lock.json").read_text())
        (tmp_path / "lock.json").write_text(json.dumps({**content, "token": "another"}))
        (tmp_path / "results.json").write_text("of another program")
        return {"name": "a", "folder": str(tmp_path), "labels": {}, "files": {}}

    with pytest.raises(TakenOver):
        do_all(tmp_path, [({"name": "a"}, tmp_path)], taken_over, {})
    assert (tmp_path / "results.json").read_text() == "of another program"


def test_another_machine_of_the_same_name_keeps_its_lock(tmp_path):
    """Such as two that are both called localhost: another boot is no reboot."""
    lock(tmp_path, 60)
    rewrite(tmp_path, boot="of that machine", machine="that one")
    with pytest.raises(InputError, match=f"is in use by process {os.getpid()} .* that this is a copy of its folder, "
                                         f"remove {tmp_path / 'lock.json'}"):
        lock(tmp_path, 60)


def test_a_holder_from_before_a_reboot_is_dead_however_fresh(tmp_path, monkeypatch):
    lock(tmp_path, 1000)
    monkeypatch.setattr("Runtime.run_lock._machine", lambda: "this one")
    rewrite(tmp_path, boot="the boot before", machine="this one")
    lock(tmp_path, 1000)


def test_a_job_that_was_requeued_takes_its_own_folder_back(tmp_path, monkeypatch):
    """However fresh: a job does not run twice at a time."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    before = lock(tmp_path, 1000)
    rewrite(tmp_path, **ELSEWHERE)
    with pytest.raises(InputError, match=r"\(job 4711\) since"):
        lock(tmp_path, 1000)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert lock(tmp_path, 1000) != before


# What squeue printed on a cluster with Slurm 22.05: its output, its errors, its exit code.
SQUEUE = {"RUNNING": ("RUNNING", "", 0), "SUSPENDED": ("SUSPENDED", "", 0), "COMPLETING": ("COMPLETING", "", 0),
          "COMPLETED": ("COMPLETED", "", 0), "forgotten": ("", "slurm_load_jobs error: Invalid job id specified", 1),
          "away": ("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)}


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """An squeue on PATH that answers as told. It lists no job if it sees the filter that this user has set."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SQUEUE_USERS", "me")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def say(state):
        out, err, code = SQUEUE[state]
        stand_in(folder / "squeue", f"[ -n \"$SQUEUE_USERS\" ] || echo '{out}'\necho '{err}' >&2\nexit {code}")
        stand_in(folder / "scontrol", "echo 'ClusterName             = here'")

    return say


def lock_of_job(run, seconds, holder, **changes):
    """A lock that somebody else has taken, last touched so many seconds ago. holder, changes: what is different."""
    lock(run, 100)
    rewrite(run, **holder)
    (run / "lock.json").write_text(json.dumps(read(run) | changes))
    age(run, seconds)


def refused(said):
    """Around `lock`: refused with this sentence, or, for None, not at all."""
    return pytest.raises(InputError, match=said) if said else contextlib.nullcontext()


CONTAINER = {"namespace": "pid:[1]", "host": "container", "pid": 2 ** 22 + 1}
JOB = {"job": "7", "cluster": "here"}


@pytest.mark.parametrize("state, holder, changes, touched, said", [
    ("forgotten", {}, {}, 0, "process PID on"),  # this process
    ("forgotten", ELSEWHERE, {}, 50, "process 1 on elsewhere since"), ("forgotten", ELSEWHERE, {}, 150, None),
    ("forgotten", CONTAINER, {}, 0, "on container"), ("forgotten", CONTAINER, {}, 150, None),
    # What Slurm says of a job counts more than the clock.
    ("RUNNING", ELSEWHERE, JOB, 10 ** 6, r"process 1 on elsewhere \(job 7\)"),
    ("SUSPENDED", ELSEWHERE, JOB, 10 ** 6, r"process 1 on elsewhere \(job 7\)"),
    ("COMPLETED", ELSEWHERE, JOB, 0, None), ("forgotten", ELSEWHERE, JOB, 0, None),
    # Of course: this cluster has had no such job.
    ("forgotten", ELSEWHERE, {**JOB, "cluster": "there"}, 50, r"elsewhere \(job 7\)"),
    ("forgotten", ELSEWHERE, {**JOB, "cluster": "there"}, 150, None)])
def test_who_is_alive(tmp_path, slurm, state, holder, changes, touched, said):
    """The lock promises to be touched every 100 s, and was `touched` so many seconds ago."""
    slurm(state)
    lock_of_job(tmp_path, touched, holder, **changes)
    with refused(said and said.replace("PID", str(os.getpid()))):
        lock(tmp_path, 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another user")
def test_the_lock_of_another_user_is_judged_and_taken_in_a_folder_of_both():
    program = ("import os, sys\nfrom pathlib import Path\nfrom Runtime.run_lock import lock\nos.setuid(65534)\n"
               "try:\n    print(lock(Path(sys.argv[1]), 100))\nexcept ValueError as error:\n    print(error)")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        run, said = Path(folder), []
        lock_of_job(run, 150, ELSEWHERE)
        lock(run, 100)
        for touched in (50, 150):
            rewrite(run, **ELSEWHERE)
            age(run, touched)
            said.append(subprocess.check_output([sys.executable, "-c", program, folder], cwd=ROOT, text=True).strip())
        assert "process 1 on elsewhere" in said[0] and said[1] == read(run)["token"]


@pytest.mark.parametrize("state, touched, said", [
    ("forgotten", 50, "elsewhere"), ("forgotten", 150, None), ("COMPLETED", 50, None)])
def test_a_job_of_somebody_else_that_slurm_does_not_show_is_judged_by_the_clock(tmp_path, slurm, monkeypatch, state,
                                                                               touched, said):
    """With PrivateData=jobs, squeue says of a colleague's running job that there is no such job."""
    slurm(state)
    lock_of_job(tmp_path, touched, ELSEWHERE, **JOB)
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "lock.json").stat().st_uid + 1)
    with refused(said):
        lock(tmp_path, 100)


@pytest.mark.parametrize("jobs, job, touched, said", [
    (None, "7", 50, "elsewhere"), (None, "7", 150, None), ("6=RUNNING 7=RUNNING", "7", 10 ** 6, "elsewhere"),
    ("6=RUNNING 7=PENDING", "7", 0, None), ("", "7", 0, None), ("7_1=RUNNING", "7_2", 0, None)])
def test_in_a_container_without_slurm_the_launcher_tells_which_jobs_live(tmp_path, monkeypatch, jobs, job, touched,
                                                                        said):
    monkeypatch.setattr(run_lock.shutil, "which", lambda name: None)
    for name in ("OMNIMORPH_JOBS", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    if jobs is not None:
        monkeypatch.setenv("OMNIMORPH_JOBS", jobs)
    lock_of_job(tmp_path, touched, ELSEWHERE, job=job, cluster="")
    with refused(said):
        lock(tmp_path, 100)


def test_a_lock_that_somebody_has_removed_comes_back_with_the_token_of_the_launch(tmp_path):
    token = lock(tmp_path, 100)
    (tmp_path / "lock.json").unlink()
    assert lock(tmp_path, 100, token=token) == token == read(tmp_path)["token"]


@pytest.mark.parametrize("state, said", [("COMPLETING", "job 7 is just ending"),
                                         ("away", "Slurm does not say whether job 7 still runs")])
def test_what_the_next_minute_will_tell_is_waited_for(tmp_path, slurm, state, said):
    slurm(state)
    lock_of_job(tmp_path, 10 ** 6, ELSEWHERE, **JOB)
    with pytest.raises(OSError, match=said) as raised:
        lock(tmp_path, 100)
    assert is_passing(raised.value)
    threading.Timer(0.3, slurm, ["forgotten"]).start()
    assert patiently(lambda: lock(tmp_path, 100), 20, "the lock") == read(tmp_path)["token"]


def test_the_same_job_number_of_another_cluster_is_another_job(tmp_path, slurm, monkeypatch):
    slurm("forgotten")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    lock_of_job(tmp_path, 50, ELSEWHERE, job="7", cluster="there", start="0")
    with pytest.raises(InputError, match="elsewhere"):
        lock(tmp_path, 100)
    assert lock(tmp_path, 100, token=read(tmp_path)["token"]) == read(tmp_path)["token"]


def test_whoever_had_the_folder_finds_out_that_another_has_it_now(tmp_path):
    lock(tmp_path, 60)
    assert_held(tmp_path)
    old = read(tmp_path)
    changed = {**old, "token": "0" * 16, "job": "9"}
    (tmp_path / "lock.json").write_text(json.dumps(changed))
    age(tmp_path, 100)
    before = (tmp_path / "lock.json").stat().st_mtime
    with pytest.raises(TakenOver, match=rf"taken over by process {os.getpid()} on .* \(job 9\) since {old['since']}"):
        touch(tmp_path)
    assert (tmp_path / "lock.json").stat().st_mtime == before, "it is not ours to show alive"
    (tmp_path / "lock.json").unlink()
    touch(tmp_path)  # a lock that a person has removed is no other run
    begun = {"event": "begin", "attempt": 0, "loop": old["token"]}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(begun) + "\n")
    touch(tmp_path)
    with open(tmp_path / "attempts.jsonl", "a") as file:
        file.write(json.dumps({**begun, "attempt": 1, "loop": "0" * 16}) + "\n")
    with pytest.raises(TakenOver, match="by another run, which has ended since"):
        touch(tmp_path)
    assert not (tmp_path / "lock.json").exists()


def test_a_folder_that_was_moved_away_is_not_the_new_one_of_its_name(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    token = lock(folder, 60)
    folder.rename(tmp_path / "elsewhere")
    touch(folder)  # it may come back
    write_file(folder / "pair_2/warped.nii.gz", b"")
    with pytest.raises(TakenOver, match="results was moved or removed while this process wrote there"):
        touch(folder)
    assert os.listdir(folder) == ["pair_2"]
    folder.rename(tmp_path / "new")
    (tmp_path / "elsewhere").rename(folder)
    touch(folder)
    unlock(folder, token)


def test_a_run_whose_attempt_began_here_is_not_taken_for_a_new_folder(tmp_path):
    """Some file systems change the number of a folder, and a lock may be removed by hand."""
    run = tmp_path / "run"
    run.mkdir()
    lock(run, 60, token="mine")
    (run / "lock.json").unlink()
    (run / "attempts.jsonl").write_text(json.dumps({"event": "begin", "attempt": 0, "loop": "mine"}) + "\n")
    run.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", run)
    touch(run)


def test_who_knows_the_token_joins_and_either_keeps_it_alive(tmp_path):
    launcher, other = alive(), alive()
    token = lock(tmp_path, 60, pid=launcher.pid)
    assert lock(tmp_path, 60, token=token) == token
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid, os.getpid()]
    assert lock(tmp_path, 60, pid=other.pid, token=token) == token  # the next round's rank 0 replaces the last one's
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid, other.pid]
    lock(tmp_path, 60, pid=launcher.pid, token=token)
    assert [holder["pid"] for holder in read(tmp_path)["holders"]] == [launcher.pid], "its next round has no rank yet"
    lock(tmp_path, 60, pid=other.pid, token=token)
    end(launcher)
    with pytest.raises(InputError, match="in use"):
        lock(tmp_path, 60)
    with pytest.raises(InputError, match="in use"):
        lock(tmp_path, 60, token="0" * 16)
    end(other)
    assert lock(tmp_path, 60) != token


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
    cfg = {"run.models": tmp_path, "data.name": "brain", "model.name": "net"}
    assert run_folder(cfg).name == "brain_net"
    assert run_folder(cfg, fresh=True).name == "brain_net-2"
    for name in ("brain_net-10", "brain_net-old", "brain_net-011", "brain_nets-40", "abrain_net-50"):
        (tmp_path / name).mkdir()
    run = run_folder(cfg)
    assert run.name == "brain_net-10" and (run / "tmp").is_dir()
    assert run_folder(cfg, fresh=True).name == "brain_net-11"
    assert run_folder({**cfg, "data.name": "brain."}).name == "brain._net"


def test_two_fresh_runs_that_begin_at_the_same_moment_get_two_folders(tmp_path, monkeypatch):
    """Such as two tasks of an array: both have listed the folder before either has made its own."""
    cfg = {"run.models": tmp_path / "new", "data.name": "brain", "model.name": "net"}
    monkeypatch.setattr(run_lock, "listed", lambda folder: [])
    assert [run_folder(cfg).name, run_folder(cfg).name] == ["brain_net"] * 2, "the lock decides who continues it"
    assert [run_folder(cfg, fresh=True).name, run_folder(cfg, fresh=True).name] == ["brain_net-2", "brain_net-3"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch, number):
    """Else --fresh would continue the first run, whose folder is there, and a requeued job would start a new one."""
    for name in ("brain_net", "brain_net-2", "brain_net-3"):
        (tmp_path / name).mkdir()
    cfg = {"run.models": tmp_path, "data.name": "brain", "model.name": "net"}
    faults = [OSError(number, os.strerror(number), str(tmp_path))]

    def fail_once(real, *args):
        if faults:
            raise faults.pop()
        return real(*args)

    for name in ("listdir", "scandir"):  # whichever is used
        monkeypatch.setattr(os, name, functools.partial(fail_once, getattr(os, name)))
    if is_passing(faults[0]):
        assert patiently(lambda: run_folder(cfg, fresh=True), 5, tmp_path).name == "brain_net-4"
    else:
        with pytest.raises(PermissionError, match=str(tmp_path)):
            run_folder(cfg, fresh=True)
    assert not faults


def test_of_several_generations_that_with_the_settings_of_the_command_is_continued(tmp_path, capsys):
    """G7: run 1 can be continued after --fresh, and run 2 does not go on under the settings of run 1."""
    cfg = {**config(tmp_path), "run.models": str(tmp_path), "data.name": "brain"}
    for number, (generation, regul) in enumerate((("brain_om_net", 10.0), ("brain_om_net-2", 5.0))):
        (tmp_path / generation / f"launches/000{number}").mkdir(parents=True)
        save_config({**cfg, "loss.regul": regul}, tmp_path / generation / f"launches/000{number}/config.yaml")

    def chosen(**changes):
        return run_folder({**cfg, **changes}).name, capsys.readouterr().err

    assert chosen(**{"loss.regul": 5.0, "run.epochs": 7, "data.root": "/elsewhere"}) == ("brain_om_net-2", "")
    name, said = chosen(**{"loss.regul": 10.0})
    assert name == "brain_om_net" and "it has these settings" in said and "brain_om_net-2 has others" in said
    name, said = chosen(**{"loss.regul": 3.0})
    assert name == "brain_om_net-2" and "no run of this name has these settings" in said
    (tmp_path / "brain_om_net-3").mkdir()  # a --fresh that never came to train
    assert chosen(**{"loss.regul": 10.0}) == ("brain_om_net-3", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_run_in_which_only_another_user_may_write_is_not_continued(mode):
    """With these settings and the newest, so that this user's own could not be continued."""
    program = ("import os, sys\nfrom Runtime.config import load_config\nfrom Runtime.run_lock import run_folder\n"
               "os.setuid(65534)\nprint(run_folder(load_config(*sys.argv[1:2], sys.argv[2:])).name)")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        for name, owner in (("brain_om_net", 65534), ("brain_om_net-2", 0)):
            (Path(folder) / name / "tmp").mkdir(parents=True)
            os.chown(Path(folder) / name, owner, owner)
            (Path(folder) / name).chmod(mode)
        overrides = [f"run.models={folder}", "data.name=brain"]
        found = subprocess.check_output([sys.executable, "-c", program, CONFIG, *overrides], cwd=ROOT, text=True)
        assert found == "brain_om_net\n"
        assert run_folder(load_config(CONFIG, overrides)).name == "brain_om_net-2"  # root may write anywhere
