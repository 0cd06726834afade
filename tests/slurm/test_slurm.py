"""sbatch bash_train_multi_nodes.sh on a real Slurm: to the end, through every fault, walltime and scancel."""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Runtime.checkpoint import newest
from Runtime.errors import InputError
from Runtime.run_lock import lock
from Supervisor.attempts import read_lines
from tests.faults.common import SCALED, ends, final_weights, launch, run_of, steps_done, wait
from tests.launching import until
from tests.slurm.cluster import daemon
from tests.test_launcher import OF_ANOTHER
from tests.tiny import ROOT, arguments, launcher_environment, make_data

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
RANKS, NODES = 4, 2


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files of this checkout in a folder of their own, whose Logs stay there."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Config", "Dataloader", "Diffusion", "Inference", "Report", "Runtime", "Scripts", "Supervisor"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("OM_train_3modes.py", "bash_train_multi_nodes.sh"):
        shutil.copy(ROOT / name, folder)
    (folder / "Logs").mkdir()
    return folder


def submitting(slurm):
    """Environment of who submits a job."""
    own = {name: value for name, value in launcher_environment(RANKS).items() if name != "RANKS"}
    return {**own, "SLURM_CONF": slurm["SLURM_CONF"]}


def submit(slurm, checkout, words, *options, nodes=NODES, **environment):
    """Number of the job; what it prints goes to Logs/train_multi_<job>.out."""
    command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--ntasks-per-node={RANKS // NODES}", "--cpus-per-task=1",
               "--gres=gpu:2", *options, "bash_train_multi_nodes.sh", *words]
    done = subprocess.run(command, cwd=checkout, env={**submitting(slurm), **environment}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(slurm, job):
    """Slurm's word for where a job is, and how often it has been started anew."""
    shown = subprocess.run(["scontrol", "show", "job", job, "-o"], env=slurm, capture_output=True, text=True).stdout
    words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    return words.get("JobState"), int(words.get("Restarts", 0))


def is_over(slurm, job):
    return state(slurm, job)[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def until_over(slurm, job, seconds):
    """Wait for the end of a job that may go back into the queue, where Slurm would keep it for two minutes.

    Not at once: the end of its first life would be taken for that of the second.
    """
    pending = []

    def over():
        pending[:] = [*pending, time.time()] if state(slurm, job)[0] == "PENDING" else []
        if pending and pending[-1] - pending[0] > 8:
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm)
        return is_over(slurm, job)
    until(over, seconds)


def printed(checkout, job):
    return (checkout / f"Logs/train_multi_{job}.out").read_text(errors="replace")


def strays(folder):
    """Command lines of processes that still belong to a run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and int(path.parent.name) != os.getpid():
            found.append(words)
    return found


def options(folder, *more, **changes):
    scaled = {key.replace(".", "__"): value for key, value in SCALED.items()}
    return arguments(folder, "--allow-tmp", *more, **{**scaled, **changes})


def prepared(folder, name):
    """A folder for one run on the data that all runs of `folder` share."""
    (folder / name).mkdir()
    (folder / name / "data").symlink_to(folder / "data")
    return folder / name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("runs"))


def reference(place, name, **changes):
    """SHA-256 of the weights of an undisturbed run, with two ranks of this host."""
    folder = prepared(place, name)
    assert wait(launch(folder, 2, **changes), 1200) == 0, (folder / "log.txt").read_text()
    return final_weights(folder, changes.get("run__epochs", SCALED["run.epochs"]))


@pytest.fixture(scope="module")
def short(place):
    return reference(place, "undisturbed")


def test_sbatch_trains_the_demo_also_from_inside_another_job(slurm, checkout, tmp_path):
    make_data(tmp_path, count=44, size=40)
    words = ["--config", "Config/config_demo.yaml", "--allow-tmp"]
    for key, value in {"data.root": tmp_path / "data", "run.models": tmp_path / "Models", "run.logs": tmp_path / "Logs",
                       "data.val_ids": "40-43", "data.repeats": 1, "run.epochs": 1, "run.device": "cpu"}.items():
        words += ["--set", f"{key}={value}"]
    job = submit(slurm, checkout, words, **OF_ANOTHER)
    until(lambda: is_over(slurm, job), 300)
    text = printed(checkout, job)
    assert state(slurm, job)[0] == "COMPLETED" and "done after 1 rounds" in text, text
    assert read_lines(tmp_path / "Models/demo_om_net/attempts.jsonl")[0]["job"] == job and "start 2 of" not in text
    assert "4 ranks on n1 n2" in text and newest(tmp_path / "Models/demo_om_net") == "000001_demo_om_net.pth"
    starts = [read_lines(tmp_path / f"Models/demo_om_net/rank{rank}.jsonl")[0] for rank in range(RANKS)]
    assert [line["node"] for line in starts] == ["n1", "n1", "n2", "n2"]
    assert until(lambda: not strays(tmp_path), 30)


# The next five tests look at the launcher's and Slurm's part; trainings are in the others. In place of Python: a rank
# that begins its log, saves one checkpoint if it is told to, and leaves when it is asked.
RANK = """
import datetime, hashlib, json, os, signal, time
run, rank, attempt = os.environ["OMNIMORPH_RUN"], os.environ["RANK"], int(os.environ["OMNIMORPH_ATTEMPT"])

def speak(**line):
    with open(f"{run}/rank{rank}.jsonl", "a") as log:
        place = {"attempt": attempt, "rank": int(rank), "step": 8, "time": time.time()}
        log.write(json.dumps({**place, **line}) + "\\n")

def leave(*_):
    speak(event="leave", reason="asked by a signal")
    speak(event="end")
    os._exit(42)

signal.signal(signal.SIGUSR1, leave)
signal.signal(signal.SIGTERM, leave)
speak(event="start", host="", pid=os.getpid(), node="")
if rank == "0" and "SAVES" in os.environ:
    name, now = f"{attempt + 1:06d}_demo_om_net.pth", datetime.datetime.now(datetime.timezone.utc)
    open(f"{run}/{name}", "wb").write(b"weights")
    entry = {"epoch": attempt + 1, "step": 8 * attempt + 8, "bytes": 7, "written": now.isoformat(timespec="seconds"),
             "sha256": hashlib.sha256(b"weights").hexdigest()}
    open(f"{run}/manifest.json", "w").write(json.dumps({"checkpoints": {name: entry}, "best": None}))
speak(event="now", phase="forward", mode="", number=1, deadline=9)
while True:
    signal.pause()
"""


@pytest.fixture
def stand_in(tmp_path):
    """PYTHON for a launcher whose ranks are those of RANK."""
    (tmp_path / "rank.py").write_text(RANK)
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
[[ $1 == OM_train_3modes.py ]] && exec {sys.executable} -S {tmp_path}/rank.py
exec {sys.executable} "$@"
""")
    python.chmod(0o755)
    return str(python)


def spoken(folder, attempt):
    """Whether all ranks are there in an attempt."""
    return all(any(line["attempt"] == attempt and line["event"] == "now"
                   for line in read_lines(run_of(folder) / f"rank{rank}.jsonl")) for rank in (0, 1))


def submit_script(slurm, checkout, text, *more, **environment):
    """Number of the job of a script."""
    script = checkout / "job.sh"
    script.write_text(text)
    done = subprocess.run(["sbatch", "--parsable", "--ntasks-per-node=2", "--cpus-per-task=1", "--gres=gpu:2", *more,
                           script.name], cwd=checkout, env={**submitting(slurm), **environment}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def page_script(site, words):
    """The job script of a site's page as somebody fills it in here: no account or QOS, this Slurm's partition."""
    text = (ROOT / f"docs/site_{site}.md").read_text().partition("```sh\n")[2].partition("```")[0]
    lines = [line for line in text.splitlines() if not re.match(r"#SBATCH --(account|qos)=", line)]
    lines = [re.sub("(--partition=)[^ ]+", r"\1main", line) for line in lines]
    lines = [line.replace(f"CLUSTER={site}", "CLUSTER=local") for line in lines]
    command = lines[-1].partition(" --config")[0]
    return "\n".join([*lines[:-1], f"{command} {shlex.join(map(str, words))}"]) + "\n"


def test_the_script_of_a_site_page_goes_on_after_its_time_limit(slurm, checkout, tmp_path, stand_in):
    """Its own --signal, eight minutes before the limit: of ten minutes the training has two."""
    text = page_script("dawn", options(tmp_path, "--no-preflight"))
    job = submit_script(slurm, checkout, text, "--nodes=2", "--time=10", PYTHON=stand_in, SAVES="1")
    until(lambda: state(slurm, job)[1] == 1 or is_over(slurm, job), 240)
    text = printed(checkout, job)
    assert state(slurm, job)[1] == 1 and f"the time limit of job {job} is near: back into the queue" in text, text
    assert [end["cause"] for end in ends(tmp_path).values()] == ["planned restart"]

    def goes_on():
        if state(slurm, job)[0] == "PENDING":  # where Slurm would keep it for two minutes
            time.sleep(3)
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm)
        return spoken(tmp_path, 1)
    until(goes_on, 200)
    subprocess.run(["scancel", job], env=slurm, check=True)
    until(lambda: is_over(slurm, job) and not strays(tmp_path), 60)
    text = printed(checkout, job)
    assert "back into the queue" in text and f"start 2 of job {job}" in text, "both starts write the same log"


def test_a_job_with_too_little_time_is_not_repeated_for_ever(slurm, checkout, tmp_path, stand_in):
    """Of eight minutes all are for leaving: USR1 comes at once, in each start of the job anew."""
    job = submit(slurm, checkout, options(tmp_path, "--no-preflight"), "--time=8", "--signal=B:USR1@480",
                 PYTHON=stand_in)
    until(lambda: is_over(slurm, job) or state(slurm, job)[1], 240)
    text = printed(checkout, job)
    assert state(slurm, job) == ("FAILED", 0), text
    assert f"job {job} is not put back into the queue: it has reached its time limit without saving" in text
    assert not list(tmp_path.glob("Models/*/lock.json"))


def test_of_a_job_array_only_the_task_at_its_limit_goes_back_into_the_queue(slurm, checkout, tmp_path, stand_in):
    folders = [tmp_path / name for name in ("first", "second")]
    lines = [f"[[ $SLURM_ARRAY_TASK_ID == {number} ]] && exec bash bash_train_multi_nodes.sh "
             f"{shlex.join(map(str, options(folder, '--no-preflight')))}" for number, folder in enumerate(folders)]
    array = submit_script(slurm, checkout, "\n".join(["#!/bin/bash", *lines, ""]), "--array=0-1", "--nodes=1",
                          "--requeue", "--time=15", "--open-mode=append", "--output=Logs/array_%A_%a.out",
                          PYTHON=stand_in, SAVES="1")
    try:
        until(lambda: all(spoken(folder, 0) for folder in folders), 120)
        # The last task has the array's own number, which to `scontrol requeue` means all of them.
        subprocess.run(["scancel", "--signal=USR1", "--batch", f"{array}_1"], env=slurm, check=True)
        until(lambda: state(slurm, f"{array}_1")[1] == 1, 120)
        time.sleep(5)
        assert state(slurm, f"{array}_0") == ("RUNNING", 0)
    finally:
        subprocess.run(["scancel", array], env=slurm)
    assert until(lambda: not strays(tmp_path), 60)


@pytest.mark.parametrize("partition, warning, saves, said", [
    # The launcher hears USR1. It has saved nothing, and the end of the grace is its time limit now.
    ("grace", "--signal=B:USR1@480", "", "is preempted: back into the queue"),
    # The ranks hear TERM, and the launcher nothing before the grace has ended: it goes on for so long.
    ("grace", "", "1", "DUE TO PREEMPTION"),
    # Both hear both, and Slurm puts the job back itself.
    ("graceless", "--signal=B:USR1@480", "1", "left by USR1")])
def test_a_preempted_job_goes_back_into_the_queue(slurm, checkout, tmp_path, stand_in, partition, warning, saves, said):
    text = "#!/bin/bash\nexec bash bash_train_multi_nodes.sh "
    text += shlex.join(map(str, options(tmp_path, "--no-preflight"))) + "\n"
    job = submit_script(slurm, checkout, text, "--nodes=1", "--nodelist=n1", f"--partition={partition}", "--requeue",
                        "--open-mode=append", "--output=Logs/train_multi_%j.out", *filter(None, [warning]),
                        PYTHON=stand_in, **({"SAVES": saves} if saves else {}))
    try:
        until(lambda: spoken(tmp_path, 0), 60)
        subprocess.run(["sbatch", "--partition=main", "--exclusive", "--nodelist=n1", "--output=/dev/null",
                        "--wrap=true"], env=slurm, check=True, stdout=subprocess.DEVNULL)
        until(lambda: is_over(slurm, job) or state(slurm, job) == ("PENDING", 1), 90)
    finally:
        subprocess.run(["scancel", job], env=slurm)
    text = printed(checkout, job)
    assert state(slurm, job)[1] == 1 and said in text and "syntax error" not in text, text
    assert "time limit" not in text and "could not be put back" not in text, text
    assert [end["cause"] for end in ends(tmp_path).values()] == ["planned restart"] * (1 if warning else 2)
    assert not list(tmp_path.glob("Models/*/lock.json")) and until(lambda: not strays(tmp_path), 60)


def test_a_job_that_is_cancelled_while_it_leaves_is_not_requeued(slurm, checkout, tmp_path, stand_in):
    job = submit(slurm, checkout, options(tmp_path, "--no-preflight"), PYTHON=stand_in, SAVES="1")
    until(lambda: spoken(tmp_path, 0), 60)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)
    subprocess.run(["scancel", job], env=slurm, check=True)
    until(lambda: state(slurm, job)[0] in ("CANCELLED", "PENDING"), 90)
    assert state(slurm, job) == ("CANCELLED", 0) and "left by USR1" in printed(checkout, job), printed(checkout, job)


def newest_attempt(folder):
    """Number of the newest attempt in which all ranks have started, and their process numbers; (-1, []) before."""
    found = [[line for line in read_lines(run_of(folder) / f"rank{rank}.jsonl") if line["event"] == "start"][-1:]
             for rank in range(RANKS)]
    numbers = {lines[0]["attempt"] for lines in found if lines}
    if not all(found) or len(numbers) > 1:
        return -1, []
    return numbers.pop(), [lines[0]["pid"] for lines in found]


@pytest.mark.timeout(2400)  # two whole trainings, which a slow or busy processor takes ten to twenty minutes each for
def test_a_campaign_through_kill_stop_hang_and_walltime(slurm, checkout, place):
    epochs = 40  # long enough to be there still when the walltime comes, after all the other faults
    wanted = reference(place, "undisturbed campaign", run__epochs=epochs, run__val_every=40)
    folder = prepared(place, "campaign")
    # The hang is injected, for the first rank of the second node; the signals come from outside.
    fault = {"id": "hang", "do": "hold_gil", "rank": 2, "phase": "forward", "mode": "diffusion", "step": 40}
    job = submit(slurm, checkout, options(folder, run__epochs=epochs, run__val_every=40), "--time=4",
                 "--signal=B:USR1@90", FAULTS=f"[{fault}]".replace("'", '"'), FAULT_DIR=str(folder),
                 PYTHONPATH=str(ROOT / "tests/faults/inject"))
    last = -1
    for number, rank in ((signal.SIGKILL, 1), (signal.SIGSTOP, 3)):
        def ready(last=last):
            attempt, pids = newest_attempt(folder)
            went_on = attempt > last and steps_done(folder, attempt) - resumed(folder, attempt) >= 3
            # Without a checkpoint a job that a busy machine brings to its time limit would not go back into the queue.
            return went_on and newest(run_of(folder)) and (attempt, pids)
        last, pids = until(ready, 200)
        os.kill(pids[rank], number)
    until_over(slurm, job, 1400)
    text, causes = printed(checkout, job), [end["cause"] for end in ends(folder).values()]
    assert state(slurm, job)[0] == "COMPLETED", text
    assert {"killed", "frozen", "hang", "planned restart", "done"} == set(causes), text
    assert state(slurm, job)[1] >= 1 and f"the time limit of job {job} is near" in text
    verdicts = {end["cause"]: end["verdict"] for end in reversed(ends(folder).values())}  # the first of each
    assert [verdicts[cause]["rank"] for cause in ("killed", "frozen", "hang")] == [1, 3, 2]
    assert final_weights(folder, epochs) == wanted
    assert not (run_of(folder) / "lock.json").exists() and until(lambda: not strays(folder), 30)


def resumed(folder, attempt):
    """The first step that an attempt has logged, or a number that no step reaches."""
    return min([line["step"] for line in read_lines(run_of(folder) / "rank0.jsonl")
                if line["event"] == "step" and line["attempt"] == attempt], default=10 ** 9)


def test_scancel_leaves_a_folder_that_the_next_job_continues(slurm, checkout, place, short):
    folder = prepared(place, "cancelled")
    job = submit(slurm, checkout, options(folder))
    until(lambda: steps_done(folder) >= 9, 300)
    subprocess.run(["scancel", job], env=slurm, check=True)
    until(lambda: is_over(slurm, job), 60)
    assert state(slurm, job)[0] == "CANCELLED" and until(lambda: not strays(folder), 60)
    before = steps_done(folder)
    assert 9 <= before < 47 and newest(run_of(folder))
    again = submit(slurm, checkout, options(folder))
    until(lambda: is_over(slurm, again), 200)
    assert state(slurm, again)[0] == "COMPLETED", printed(checkout, again)
    assert resumed(folder, 1) > 4, "it went on where the first job stopped"
    assert final_weights(folder) == short


def test_a_lock_is_worth_as_much_as_its_job(slurm, tmp_path, monkeypatch):
    """A holder on a node that is gone cannot be asked, but Slurm can."""
    take = f"from pathlib import Path; from Runtime.run_lock import lock; lock(Path('{tmp_path}'), 10 ** 6)"
    command = ["sbatch", "--parsable", "--output=/dev/null", f"--chdir={ROOT}", "--wrap",
               f'{sys.executable} -c "{take}"; exec sleep 300']
    job = subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout.strip()
    path = tmp_path / "lock.json"
    found = json.loads(until(lambda: path.exists() and path.read_text()))
    assert found["job"] == job
    found["holders"][0].update(host="elsewhere", boot="another", pid=1)
    path.write_text(json.dumps(found))
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    with pytest.raises(InputError, match=f"job {job}"):
        lock(tmp_path, 60)
    subprocess.run(["scancel", job], env=slurm, check=True)
    until(lambda: is_over(slurm, job))
    assert lock(tmp_path, 60) != found["token"]


def test_the_jobs_of_an_array_register_a_list_and_one_more_joins_them(slurm, tmp_path):
    for seed in range(4):
        write_volume(tmp_path / f"data/s{seed}.nii.gz", make_subject(seed, 12)["image"], np.eye(4))
    words = ["Scripts/bash_infer.sh", "register", "--fixed", tmp_path / "data/s0.nii.gz", "--moving", tmp_path / "data",
             "--affine", "none", "--refine", "1", "--out", tmp_path / "out"]

    def submitted(*options):
        done = subprocess.run(["sbatch", "--parsable", "--cpus-per-task=1", "--gres=none", *options, *map(str, words)],
                              cwd=ROOT, env=submitting(slurm), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    array = submitted("--array=1-2", f"--output={tmp_path}/part_%a.out")
    whole = submitted(f"--dependency=afterok:{array}", f"--output={tmp_path}/whole.out")
    until(lambda: is_over(slurm, whole), 300)
    said = (tmp_path / "whole.out").read_text()
    assert state(slurm, whole)[0] == "COMPLETED" and "keeping 3 of 3 pairs" in said, said
    assert len(json.loads((tmp_path / "out/results.json").read_text())["pairs"]) == 3
    assert sorted(path.name for path in (tmp_path / "out/parts").iterdir()) == ["1_of_2", "2_of_2"]


def test_a_second_job_on_the_same_folder_is_refused(slurm, checkout, place, short):
    folder = prepared(place, "twice")
    first = submit(slurm, checkout, options(folder))
    until(lambda: steps_done(folder) >= 2, 300)
    words = options(folder, "--no-preflight")  # which on a busy machine may take longer than the first job
    second = submit(slurm, checkout, words, "--no-requeue")
    until(lambda: is_over(slurm, second), 120)
    assert state(slurm, second)[0] == "FAILED" and f"(job {first})" in printed(checkout, second)
    until(lambda: is_over(slurm, first), 200)
    assert state(slurm, first)[0] == "COMPLETED" and final_weights(folder) == short


def test_a_node_without_a_device_is_left_out(slurm, checkout, place, short):
    """As with the shipped configs, nothing says how many samples a step has but the ranks that were asked for."""
    folder = prepared(place, "device")
    words = options(folder, run__device="auto", data__global_batchsize=0)
    job = submit(slurm, checkout, words, FAKE_DEVICES='{"n1": 2, "n2": 0, "n3": 0}',
                 PYTHONPATH=str(ROOT / "tests/slurm/inject"))
    until(lambda: is_over(slurm, job), 300)
    text = printed(checkout, job)
    assert state(slurm, job)[0] == "COMPLETED" and "continues without n2: 2 ranks on n1" in text, text
    assert final_weights(folder) == short


@pytest.mark.parametrize("preflights, more", [(2, []), (0, ["--no-preflight"])])
def test_a_node_that_dies_is_left_out(slurm, checkout, place, short, preflights, more):
    """The first round, of four ranks, has fixed the step; two ranks go on with the same samples, to the same bits."""
    folder = prepared(place, f"node{preflights}")
    job = submit(slurm, checkout, options(folder, *more, data__global_batchsize=0), "--nodelist=n3,n4")
    until(lambda: steps_done(folder) >= 9, 300)
    assert read_lines(run_of(folder) / "rank2.jsonl")[0]["node"] == "n4"
    for path in Path("/proc").glob("[0-9]*"):  # the whole node at once: its daemon, its steps, its ranks
        try:
            variables, words = ((path / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
        except OSError:
            continue
        ours = slurm["SLURM_CONF"].encode() in b" ".join(variables + words)
        if ours and (b"SLURMD_NODENAME=n4" in variables or words[-3:-1] == [b"-N", b"n4"]):
            os.kill(int(path.name), signal.SIGKILL)
    until(lambda: is_over(slurm, job), 400)
    daemon(Path(slurm["SLURM_CONF"]).parent, "slurmd", "-N", "n4")  # the node is back for the next test
    text = printed(checkout, job)
    assert state(slurm, job)[0] == "COMPLETED", text
    # "frozen" where the deadline of the others comes before the end of their connections: its words are of a node too.
    assert ends(folder)[0]["cause"] in ("vanished", "frozen") and ends(folder)[0]["verdict"]["host"] == "n4", text
    assert "left out, since no task can be started there: n4" in text and final_weights(folder) == short
    assert text.count("preflight of ") == preflights
    assert "2 of 4 ranks (1 x 2) do the whole step of 4 samples, 2 batches each" in text
    step = json.loads((run_of(folder) / "step.json").read_text())
    assert step == {"samples": 4, "pairs": 4, "ranks": 4, "ratio": 1.0}


def test_a_step_of_somebody_else_in_the_job_lives_on(slurm, checkout, place, short):
    """An interactive shell, or another launcher: what ends between the rounds are this launcher's own steps."""
    folder = prepared(place, "company")
    job = submit(slurm, checkout, options(folder))
    until(lambda: steps_done(folder) >= 2, 300)
    beside = ["srun", "--overlap", f"--jobid={job}", "--nodes=1", "--ntasks=1", "sleep", "3600"]
    other = subprocess.Popen(beside, env=slurm, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: " sleep" in steps_of(slurm, job), 30)
        os.kill(newest_attempt(folder)[1][1], signal.SIGKILL)
        until(lambda: steps_done(folder, 1) >= 9, 300)
        assert ends(folder)[0]["cause"] == "killed" and " sleep" in steps_of(slurm, job) and other.poll() is None
        until(lambda: is_over(slurm, job), 300)
    finally:
        other.kill()
        other.wait()
    assert state(slurm, job)[0] == "COMPLETED" and final_weights(folder) == short, printed(checkout, job)


def steps_of(slurm, job):
    """Numbers and names of the steps of a job."""
    return subprocess.run(["squeue", "-h", "-s", "-j", job, "-o", "%i %j"], env=slurm, capture_output=True,
                          text=True).stdout


def test_a_save_that_outlasts_the_time_limit_ends_before_it(slurm, checkout, place, short):
    """USR1 finds rank 0 in a save that would take for ever, and no deadline of its own is due."""
    folder = prepared(place, "slow save")
    fault = {"id": "save", "do": "sleep_long", "rank": 0, "phase": "checkpoint", "step": 8}
    words = options(folder, run__deadline_floor_s=900, run__deadline_first_s=900)
    job = submit(slurm, checkout, words, "--time=3", "--signal=B:USR1@5", FAULTS=json.dumps([fault]),
                 FAULT_DIR=str(folder), PYTHONPATH=str(ROOT / "tests/faults/inject"))
    until(lambda: (folder / "save").exists(), 170)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], env=slurm, check=True)
    until(lambda: state(slurm, job)[1] == 1, 200)
    text = printed(checkout, job)
    assert "the ranks have not left in time before the time limit" in text and "DUE TO TIME LIMIT" not in text, text
    until_over(slurm, job, 400)
    assert state(slurm, job)[0] == "COMPLETED" and final_weights(folder) == short, printed(checkout, job)
    assert "back into the queue" in text and not list(run_of(folder).glob("lock.json"))


def test_a_controller_that_is_away_for_half_a_minute_is_waited_for(slurm, checkout, place, short):
    """It stands still between two rounds, when it is asked for the most."""
    folder = prepared(place, "controller")
    job = submit(slurm, checkout, options(folder), "--nodelist=n2,n3")  # rank 0 is where the launcher is
    until(lambda: steps_done(folder) >= 9, 300)
    controller = int((Path(slurm["SLURM_CONF"]).parent / "pid/slurmctld").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        os.kill(newest_attempt(folder)[1][1], signal.SIGKILL)
        time.sleep(30)
    finally:
        os.kill(controller, signal.SIGCONT)
    until(lambda: is_over(slurm, job), 400)
    assert state(slurm, job)[0] == "COMPLETED" and final_weights(folder) == short, printed(checkout, job)
    assert [end["decision"] for end in ends(folder).values()] == ["continue", "done"]
