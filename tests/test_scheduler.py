"""What the launcher asks a scheduler: the answers of Slurm and PBS, as their commands print them.

The outputs below are in the form of a Slurm 22.05 and of the reference of PBS Professional (qstat -f, with its lines
that go on after a tab). A real Slurm is in tests/slurm; there is no real PBS here.
"""
import datetime
import os
import subprocess
from pathlib import Path

import pytest

from tests import launching
from tests.test_launcher import HERE, ended, launched, run_of, spoken
from tests.tiny import ROOT, launcher_environment

SCONTROL = ("JobId=17 JobName=omnimorph UserId=alice(1000) Account=brains JobState={state} Reason=None Requeue=1 "
            "Restarts=0 TimeLimit=12:00:00 StartTime=2026-11-23T05:01:10 EndTime=2026-11-23T17:01:10 Deadline=N/A\n")
QSTAT = """Job Id: 1234.pbs01
    Job_Name = omnimorph
    Job_Owner = alice@login1
    resources_used.walltime = 00:10:12
    job_state = {state}
    queue = gpuq
    server = pbs01
    Account_Name = brains
    exec_host = node07/0*48
    exec_vnode = (node07:ncpus=48:ngpus=4)
    Output_Path = login1:/home/alice/a rather long path that goes on in the next l
\tine/omnimorph.o1234
    Resource_List.ncpus = 48
    Resource_List.place = scatter
    Resource_List.select = 1:ncpus=48:ngpus=4:mem=200
\tgb
    Resource_List.walltime = {walltime}
    stime = {stime}
    project = _pbs_project_default
    Submit_arguments = -l walltime=12:00:00 -- /bin/bash x.sh
"""
PBS = {"PBS_JOBID": "1234.pbs01"}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]"}


def stand_ins(folder, state="R", stime="Mon Nov 23 05:01:10 2026", walltime="12:00:00"):
    """Commands of both schedulers, first on the PATH; qsub and scontrol requeue note their words in `calls`."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "job").write_text(QSTAT.format(state=state, stime=stime, walltime=walltime))
    (tools / "slurm").write_text(SCONTROL.format(state=state))
    (folder / "nodes").write_text("node07\nnode07\n")
    programs = {"qstat": f'[[ $* == "-f 1234.pbs01" ]] && cat {tools}/job',
                "qsub": f'echo "$PWD" >> {folder}/calls; printf "%s\\n" "$@" >> {folder}/calls; env > {folder}/later',
                "srun": "exit 1", "scontrol": f"""case "$*" in
                    "show job -o 17") cat {tools}/slurm ;;
                    "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
                    "requeue 17") echo requeue >> {folder}/calls ;;
                esac"""}
    for name, does in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "PBS_NODEFILE": str(folder / "nodes")}


def ask(folder, question, variables):
    """What a function of Scripts/scheduler.sh prints, and its exit code."""
    done = launching.run(["bash", "-uc", f"source {ROOT}/Scripts/scheduler.sh; {question}"], cwd=folder,
                         env={"TZ": "UTC", "HOME": str(folder), **variables})
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode


@pytest.mark.parametrize("job, name, hosts, times", [(PBS, "pbs 1234.pbs01", "node07\n", {"OMNIMORPH_TIMES": "2"}),
                                                     (SLURM, "slurm 17", "n1\nn2\n", {"SLURM_RESTART_COUNT": "2"})])
def test_both_answer_the_same_questions(tmp_path, job, name, hosts, times):
    variables = {**stand_ins(tmp_path), **job}
    assert ask(tmp_path, 'echo "$SCHEDULER $JOB"', variables)[0] == f"{name}\n"
    assert ask(tmp_path, "job_hosts", variables)[0] == hosts
    ends = datetime.datetime(2026, 11, 23, 17, 1, 10, tzinfo=datetime.UTC).timestamp()
    assert float(ask(tmp_path, "job_ends", variables)[0]) == ends
    assert ask(tmp_path, "job_cancelled", variables)[1] == 1
    assert [ask(tmp_path, "job_times", {**variables, **more})[0] for more in ({}, times)] == ["0\n", "2\n"]
    gone = stand_ins(tmp_path, "E" if job is PBS else "CANCELLED")
    assert ask(tmp_path, "job_cancelled", {**gone, **job})[1] == 0


def test_outside_a_job_there_is_no_scheduler(tmp_path):
    variables = stand_ins(tmp_path)
    for more in ({}, {**SLURM, "RANKS": "2"}, {**PBS, "PATH": "/usr/bin:/bin"}):
        assert ask(tmp_path, 'echo "<$SCHEDULER$JOB>"', {**variables, **more})[0] == "<>\n"


def test_a_job_without_a_time_limit_does_not_end(tmp_path):
    for words in ({"walltime": ""}, {"stime": ""}):
        assert ask(tmp_path, "job_ends", {**stand_ins(tmp_path, **words), **PBS})[0] == ""


def test_slurm_puts_the_job_back_and_pbs_gets_a_copy_that_waits(tmp_path):
    variables = stand_ins(tmp_path)
    assert ask(tmp_path, "job_again x.sh --fresh", {**variables, **SLURM})[1] == 0
    assert (tmp_path / "calls").read_text() == "requeue\n"
    (tmp_path / "calls").unlink()
    (tmp_path / "from here").mkdir()
    more = {"PBS_O_WORKDIR": str(tmp_path / "from here"), "MASTER_PORT": "29500", "PYTHON": "/my/python"}
    assert ask(tmp_path, "job_again x.sh --set 'data.name=two words'", {**variables, **PBS, **more})[1] == 0
    where, *words = (tmp_path / "calls").read_text().splitlines()
    assert where == str(tmp_path / "from here")
    assert words == ["-V", "-j", "oe", "-q", "gpuq", "-N", "omnimorph", "-l", "select=1:ncpus=48:ngpus=4:mem=200gb",
                     "-l", "place=scatter", "-l", "walltime=12:00:00", "-A", "brains", "-W",
                     "depend=afterany:1234.pbs01", "--", "/bin/bash", "x.sh", "--set", "data.name=two words"]
    later = (tmp_path / "later").read_text().splitlines()
    assert {"OMNIMORPH_TIMES=1", "PYTHON=/my/python"} <= set(later) and "MASTER_PORT=29500" not in later


def test_the_file_is_sound():
    shellcheck = Path(os.sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, ROOT / "Scripts/scheduler.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The launcher in a job of PBS
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_near_the_time_limit_the_round_ends_and_the_next_job_is_submitted(tmp_path):
    """The alarm comes 480 s before the limit: eight seconds after the start here. The rank leaves after twelve."""
    started = datetime.datetime.now().strftime("%a %b %e %H:%M:%S %Y")
    variables = {**stand_ins(tmp_path, stime=started, walltime="00:08:08"), **PBS, "PBS_O_WORKDIR": str(tmp_path)}
    with launched(tmp_path, rank=HERE + "sleep 12; leave", more=["--no-preflight"], **variables) as process:
        assert process.wait(60) == 42
    text = (tmp_path / "log.txt").read_text()
    assert "the time limit of job 1234.pbs01 is near: back into the queue" in text
    assert "Logs/train_multi_1234.pbs01.out" in text and ended(tmp_path) == ["restart"]
    where, *words = (tmp_path / "calls").read_text().splitlines()
    script, *typed = words[words.index("/bin/bash") + 1:]
    assert script == str(ROOT / "bash_train_multi_nodes.sh") and "--no-preflight" in typed and typed[0] == "--config"
    assert not (run_of(tmp_path) / "lock.json").exists() and spoken(tmp_path, 0)
    (ROOT / "Logs/train_multi_1234.pbs01.out").unlink()


def test_a_job_of_two_nodes_is_refused(tmp_path):
    variables = {**stand_ins(tmp_path), **PBS}
    (tmp_path / "nodes").write_text("node07\nnode08\n")
    done = launching.run(["bash", ROOT / "bash_train_multi_nodes.sh"], cwd=ROOT, env={
        **launcher_environment(1), **variables})
    assert done.returncode == 43
    assert "error: job 1234.pbs01 has 2 nodes; in a job of PBS it can be one: submit with select=1" in done.stdout
    (ROOT / "Logs/train_multi_1234.pbs01.out").unlink()
