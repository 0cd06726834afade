"""bash_train_multi_nodes.sh where it is alone with its signals, outputs and processes; real trainings are elsewhere.

The ranks are stand-ins, which say that they are there and then do what a test wants: what is looked at here happens
before, between and after them. Everything else, the attempts and the lock too, is real.
"""
import ast
import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from OM_train_3modes import parse_arguments
from Supervisor import launcher, scheduler
from Supervisor.attempts import history, read_lines
from Supervisor.processes import Leave
from tests import launching
from tests.launching import until
from tests.tiny import ROOT, arguments, launcher_environment, stand_in

LAUNCHER = ROOT / "bash_train_multi_nodes.sh"
# In place of Python: what a rank does, and what stands before a call of Supervisor.attempts.
STAND_IN = """
log=$OMNIMORPH_RUN/rank$RANK.jsonl
speak() {{
    local place="\\"attempt\\": $OMNIMORPH_ATTEMPT, \\"rank\\": $RANK, \\"step\\": 0"
    echo "{{$place, \\"time\\": $(date +%s.%N), $1}}" >> "$log"
}}
leave() {{ speak '"event": "leave", "reason": "asked"'; speak '"event": "end"'; exit 42; }}
if [[ $1 == OM_train_3modes.py ]]; then
    {rank}
    exit
fi
{call}
exec {python} "$@"
"""
HERE = """speak '"event": "start"'; speak '"event": "now", "phase": "forward", "mode": "", "number": 1, "deadline": 9'
    """
STAYS = HERE + "for ((i = 0; i < 600; i++)); do sleep 0.1; done"
DONE = HERE + """speak '"event": "end"'; exit 0"""


@contextlib.contextmanager
def launched(folder, rank=STAYS, call="", ranks=1, more=(), cwd=ROOT, script=LAUNCHER, stdout=None, crash_s=0.2,
             planned_s=0.2, **variables):
    """The launcher at work in `folder` with stand-ins for the ranks. Its output is in log.txt."""
    does = STAND_IN.format(rank=rank, call=call, python=shlex.quote(sys.executable))
    python = stand_in(folder / "python", does)
    words = arguments(folder, *more, run__pause_crash_s=crash_s, run__pause_planned_s=planned_s, run__grace_s=1)
    environment = launcher_environment(ranks, PYTHON=python, FOLDER=str(folder), **variables)
    with open(stdout or folder / "log.txt", "w") as log:
        with launching.running(["bash", script, *words], cwd=cwd, env=environment, stdout=log, stderr=log) as process:
            yield process


def run(folder, code=0, **given):
    """A launch from start to end, with this exit code. given: as for `launched`. Returns what it printed."""
    with launched(folder, **given) as process:
        assert process.wait(120) == code
    return (folder / "log.txt").read_text()


def run_of(folder):
    return folder / "Models/demo_om_net"


def ended(folder):
    return [line["decision"] for line in history(run_of(folder)) if line["event"] == "end"]


def spoken(folder, attempt, rank=0):
    """Whether a rank has begun an attempt."""
    return any(line["attempt"] == attempt for line in read_lines(run_of(folder) / f"rank{rank}.jsonl"))


@pytest.mark.slow
def test_a_signal_between_rounds_is_heard_and_what_may_pass_is_tried_again(tmp_path):
    """The first call of `begin` fails for once; that of the second round is slow, and then the signal comes."""
    call = """if [[ $3 == begin ]]; then
        count=$(($(cat "$FOLDER/begins" 2> /dev/null) + 1)); echo $count > "$FOLDER/begins"
        ((count > 1)) || { echo "the file system stands still" >&2; exit 1; }
        ((count < 3)) || exec sleep 100
    fi"""
    with launched(tmp_path, rank=HERE + "leave", call=call) as process:
        until(lambda: (tmp_path / "begins").exists() and (tmp_path / "begins").read_text() == "3\n", 60)
        process.terminate()
        assert process.wait(60) == 42
    text = (tmp_path / "log.txt").read_text()
    assert "the file system stands still\n" in text and "round 0 cannot begin yet (code 1): tried again" in text
    assert "left by TERM before round 1" in text and ended(tmp_path) == ["restart"] and not spoken(tmp_path, 1)
    assert not (run_of(tmp_path) / "lock.json").exists()


def test_a_signal_while_a_round_begins_ends_it_before_it_starts(tmp_path):
    """After `begin` has numbered the attempt and before there is a rank: nothing has died."""
    call = """if [[ $3 == begin ]]; then trap '' TERM; kill -TERM "$PPID"; fi"""
    run(tmp_path, 42, call=call)
    attempts = history(run_of(tmp_path))
    assert [line["event"] for line in attempts] == ["begin", "end"] and attempts[1]["cause"] == "planned restart"
    assert not spoken(tmp_path, 0) and not (run_of(tmp_path) / "lock.json").exists()


@pytest.mark.parametrize("late", ["rank", "supervisor"])
def test_a_signal_before_a_rank_or_its_supervisor_listens_ends_the_round_without_a_death(tmp_path, late):
    deaf = "touch $FOLDER/there; trap '' USR1 TERM; exec sleep 60"
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin/python3", f"""[[ $* == *sys.executable* ]] && {{ echo "$0"; exit; }}
    [[ $* == *"launcher round"* && {late} == supervisor ]] && touch $FOLDER/there && exec sleep 60
    exec {shlex.quote(sys.executable)} "$@\"""")
    with launched(tmp_path, rank=deaf, ranks=2, PATH=f"{tmp_path}/bin:{os.environ['PATH']}") as process:
        until((tmp_path / "there").exists, 60)
        process.terminate()
        assert process.wait(20) == 42
    assert "left by TERM; the same command continues the run" in (tmp_path / "log.txt").read_text()
    assert [line["cause"] for line in history(run_of(tmp_path)) if line["event"] == "end"] == ["planned restart"]


@pytest.mark.slow
def test_a_full_log_changes_no_decision(tmp_path):
    """As under sbatch on a full disk: the log is where the launcher writes to, and takes nothing."""
    job = f"full-{os.getpid()}"
    log = ROOT / f"Logs/train_multi_{job}.out"
    log.parent.mkdir(exist_ok=True)
    log.symlink_to("/dev/full")
    try:
        with launched(tmp_path, rank=f"echo a word; {DONE}", stdout="/dev/full", SLURM_JOB_ID=job) as process:
            assert process.wait(60) == 0
    finally:
        log.unlink()
    assert ended(tmp_path) == ["done"]


@pytest.mark.slow
def test_it_may_be_started_by_a_relative_path_and_says_its_last_words_before_it_is_gone(tmp_path):
    """The user's own time until a restart comes after the launcher's, and counts."""
    (tmp_path / "own.yaml").write_text("base: config_demo.yaml\n")
    given = {"more": ["--config", "own.yaml", "--max-seconds-before-restart", "7"], "cwd": tmp_path,
             "script": os.path.relpath(LAUNCHER, tmp_path)}
    with launched(tmp_path, rank='printf "%s\\n" "$@" > "$FOLDER/told"; ' + DONE, **given) as process:
        assert process.wait(60) == 0
        assert (tmp_path / "log.txt").read_text().endswith("done after 1 rounds\n")
    assert ended(tmp_path) == ["done"]
    script, *words = (tmp_path / "told").read_text().splitlines()
    assert script == "OM_train_3modes.py" and words.count("--max-seconds-before-restart") == 2
    assert parse_arguments(words).max_seconds_before_restart == 7


@pytest.fixture
def freezer():
    """A group whose processes a signal cannot end while it is frozen: as those that a driver holds (state D)."""
    folder = Path(f"/sys/fs/cgroup/freezer/omnimorph-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the freezer of cgroup v1 ({error})")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    until(lambda: not (folder / "tasks").read_text(), 10)
    folder.rmdir()


@pytest.mark.parametrize("codes, linger, grace, ends_with", [
    ((42, 7, 9), 60, 0, 7), ((7, 42, 0), 0, 60, 7), ((0, 42), 60, 0, 42)])
def test_a_round_ends_with_the_code_of_the_first_rank_that_failed(tmp_path, monkeypatch, codes, linger, grace,
                                                                  ends_with):
    """The ranks end one after the other. Those after the first have the time that its end gives them."""
    python = stand_in(tmp_path / "python", f"""codes=({" ".join(map(str, codes))})
    until ((RANK == 0)) || [[ -e {tmp_path}/rank$((RANK - 1)).jsonl ]]; do sleep 0.1; done
    exit ${{codes[RANK]}}""")
    for name, value in {"PYTHON": python, "RANKS": len(codes), "LINGER": linger, "GRACE": grace, "START_SECONDS": 60,
                        "OMNIMORPH_RUN": tmp_path, "OMNIMORPH_ATTEMPT": 0, "OMNIMORPH_TOKEN": "ours"}.items():
        monkeypatch.setenv(name, str(value))
    assert launcher.run_ranks([]) == ends_with
    assert [read_lines(tmp_path / f"rank{rank}.jsonl")[0]["code"] for rank in range(len(codes))] == [*codes]


@pytest.mark.slow
def test_a_rank_that_cannot_be_killed_keeps_nobody_waiting(tmp_path, freezer):
    """Rank 0 is held, rank 1 dies: rank 2 is ended at once, the next round begins while rank 0 is still there."""
    rank = """echo $BASHPID > "$FOLDER/rank$RANK"
    if ((OMNIMORPH_ATTEMPT == 0 && RANK == 1)); then
        """ + HERE + """while [[ ! -e $FOLDER/held ]]; do sleep 0.1; done; exit 7
    fi
    """ + STAYS
    with launched(tmp_path, rank=rank, ranks=3) as process:
        until(lambda: all(spoken(tmp_path, 0, number) for number in range(3)), 60)
        held, other = (int((tmp_path / f"rank{number}").read_text()) for number in (0, 2))
        (freezer / "tasks").write_text(str(held))
        (freezer / "freezer.state").write_text("FROZEN")
        until(lambda: (freezer / "freezer.state").read_text() == "FROZEN\n", 10)
        (tmp_path / "held").touch()
        began = time.time()
        until(lambda: not Path(f"/proc/{other}").exists(), 20)
        until(lambda: spoken(tmp_path, 1, 2), 40)
        assert process.poll() is None and Path(f"/proc/{held}").exists() and time.time() - began < 40
        exits = {number: [line for line in read_lines(run_of(tmp_path) / f"rank{number}.jsonl") if
                          line.get("event") == "exit" and line["attempt"] == 0] for number in range(3)}
        assert [(exits[n][0]["code"], exits[n][0].get("by_launcher", False)) for n in range(3)] == [
            (137, True), (7, False), (137, True)]
        assert exits[2][0]["time"] - exits[1][0]["time"] < 8
        (freezer / "freezer.state").write_text("THAWED")
    text = (tmp_path / "log.txt").read_text()
    assert f"rank 0 (process {held}) was killed and does not end: a driver or a file system holds it" in text
    assert json.loads((run_of(tmp_path) / "verdict.json").read_text())["attempt"] == 0


def test_a_terminal_that_is_closed_makes_it_save_and_leave(tmp_path):
    # The shell of a rank cannot trap what was ignored when it began, so Python listens in its place.
    listens = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(42)); signal.pause()"
    last_words = HERE + """speak '"event": "leave", "reason": "asked by a signal"'; speak '"event": "end"'; """
    rank = f"{last_words}exec {shlex.quote(sys.executable)} -c '{listens}'"
    with launched(tmp_path, rank=rank, ranks=2, more=["--fresh"]) as process:
        until(lambda: spoken(tmp_path, 0, 0) and spoken(tmp_path, 0, 1), 60)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 42
    assert ended(tmp_path) == ["restart"] and not (run_of(tmp_path) / "lock.json").exists()
    text = (tmp_path / "log.txt").read_text()
    assert "left by HUP; the same command without --fresh continues the run" in text, "else it would begin another"


def test_ranks_do_not_outlive_the_shell_of_their_round(tmp_path):
    """The shell between launcher and ranks is killed: two trainings in one folder would be worse than none."""
    rank = """echo $BASHPID > "$FOLDER/rank$OMNIMORPH_ATTEMPT"
    ((OMNIMORPH_ATTEMPT == 0)) || { """ + DONE + "; }\n" + STAYS
    with launched(tmp_path, rank=rank, planned_s=600) as process:  # a death takes the other pause
        until(lambda: spoken(tmp_path, 0), 60)
        first = int((tmp_path / "rank0").read_text())
        os.kill(int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        until(lambda: not Path(f"/proc/{first}").exists(), 20)
        assert process.wait(60) == 0
    causes = [line["cause"] for line in history(run_of(tmp_path)) if line["event"] == "end"]
    assert causes == ["vanished", "done"] and ended(tmp_path) == ["continue", "done"]


@pytest.mark.slow
def test_the_launch_goes_on_where_the_process_that_begins_a_round_is_killed(tmp_path):
    call = """if [[ $3 == begin ]]; then
        count=$(($(cat "$FOLDER/begins" 2> /dev/null) + 1)); echo $count > "$FOLDER/begins"
        ((count == 2)) && kill -KILL "$PPID"
    fi"""
    rank = "((OMNIMORPH_ATTEMPT > 0)) && { " + DONE + "; }\n" + HERE + "leave"
    text = run(tmp_path, rank=rank, call=call)
    assert '"begin" of Supervisor/launcher.py ended with exit code 137: tried again' in text
    assert ended(tmp_path)[0] == "restart" and ended(tmp_path)[-1] == "done"


@pytest.mark.slow
def test_nothing_that_a_program_prints_is_run(tmp_path):
    """The output of run.notify, the name of a volume in a verdict: `begin` prints them beside its variables."""
    call = """if [[ $3 == begin ]]; then
        echo 'touch "$FOLDER/owned"'; echo 'OMNIMORPH_STEP_BACK=$(touch "$FOLDER/owned")'; echo 'PATH=/nowhere'
    fi"""
    assert "not found" not in run(tmp_path, rank=DONE, call=call)
    assert not (tmp_path / "owned").exists() and ended(tmp_path) == ["done"]


@pytest.mark.slow
def test_an_answer_larger_than_a_pipe_keeps_nobody_waiting(tmp_path):
    """Of a job with thousands of nodes, whose names come several times."""
    call = f"""if [[ $3 == begin ]]; then
        {shlex.quote(sys.executable)} "$@" | sed 's/^{{/{{"FILLER": "'$(printf %0100000d 0)'", /'
        exit "${{PIPESTATUS[0]}}"
    fi"""
    run(tmp_path, rank=DONE, call=call)
    assert ended(tmp_path) == ["done"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_help_is_a_text_and_starts_nothing(tmp_path, shell):
    done = launching.run([shell, LAUNCHER, "--help"], cwd=tmp_path, timeout=20)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("Train until it is done") and "PREFLIGHT_SECONDS" in done.stdout
    assert not list(tmp_path.iterdir()), "no log"


@pytest.mark.slow
def test_an_option_that_does_not_exist_stops_at_once_and_copies_of_volumes_do_not_stay(tmp_path):
    """Whatever Python's argparse refuses it would refuse in every round. Ranks that are killed cannot remove copies;
    one that a process of another training holds stays."""
    kept = tmp_path / f"stage/omnimorph_{os.getuid()}_held"
    kept.mkdir(parents=True)
    rank = """copy=$FOLDER/stage/omnimorph_$(id -u)_0123; mkdir "$copy"; touch "$copy/.lock" "$copy/images_00000.npy"
        echo 'error: unrecognized arguments: --fersh' >&2; exit 2"""
    with open(kept / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        more = ["--fersh", "--set", f"data.stage={tmp_path / 'stage'}"]
        text = run(tmp_path, 43, rank=rank, more=more)
        assert list((tmp_path / "stage").iterdir()) == [kept], text
    assert "attempt 0: refused: rank 0" in text and "unrecognized arguments: --fersh" in text
    assert text.endswith(" stopped after 1 rounds\n") and not run_of(tmp_path).exists(), "nor does the run's folder"
    theirs = {run_of(tmp_path) / "notes.txt", run_of(tmp_path) / "rankings.csv"}
    run_of(tmp_path).mkdir()
    for path in theirs:
        path.write_text("ours")
    text, verdict = run(tmp_path, 43, rank=rank, more=more), run_of(tmp_path) / "verdict.json"
    assert text.endswith(f" stopped after 1 rounds; verdict in {verdict}\n") and ended(tmp_path) == ["stop"]
    assert {*theirs, verdict} < set(run_of(tmp_path).iterdir()), "all of it stays beside files of somebody else"


def test_a_dry_run_is_passed_on(tmp_path):
    rank = 'echo "$RANK of $WORLD_SIZE: $*" > "$FOLDER/told"'
    run(tmp_path, rank=rank, ranks=3, more=["--dry-run"])
    assert (tmp_path / "told").read_text().startswith("0 of 3: OM_train_3modes.py --dry-run --config ")
    assert not run_of(tmp_path).exists()


@pytest.mark.parametrize("more, call, said", [
    (["--set", "run.max_rounds=1"], "", "stopped after 1 rounds (run.max_rounds)"),
    ([], '[[ $3 == begin && -e $FOLDER/round ]] && exit 43', "stopped before round 1: see the error above")])
def test_the_users_command_is_called_where_a_launch_stops_between_two_rounds(tmp_path, more, call, said):
    kept = run_of(tmp_path) / "launches/0000/config.yaml"  # as the training keeps it
    kept.parent.mkdir(parents=True)
    kept.write_text(f"run:\n  notify: echo $OMNIMORPH_SUBJECT, $OMNIMORPH_MESSAGE >> {tmp_path}/told\n")
    run(tmp_path, 43, rank=f"touch $FOLDER/round; {HERE}leave", more=more, call=call, crash_s=600)
    assert (tmp_path / "told").read_text() == f"stop, {said}\n" and ended(tmp_path) == ["restart"]


def stopped_by(command, monkeypatch, **variables):
    """Why a command of Supervisor/launcher.py ends the launch with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Leave) as left:
        launcher.COMMANDS[command](["log"])
    assert left.value.code == 43
    return left.value.why


@pytest.mark.parametrize("ranks", ["0", "two"])
def test_a_wrong_number_of_ranks_is_one_sentence(monkeypatch, ranks):
    assert stopped_by("nodes", monkeypatch, RANKS=ranks).startswith(f"error: RANKS={ranks}: give the number of pro")


@pytest.mark.parametrize("seconds", ["1min", "0", "inf"])
def test_a_wrong_time_limit_of_the_preflight_is_one_sentence(monkeypatch, seconds):
    why = stopped_by("ranks", monkeypatch, PREFLIGHT_SECONDS=seconds)
    assert why == f"error: PREFLIGHT_SECONDS={seconds}: give a number of seconds above 0"


@pytest.mark.parametrize("port", ["2950O", "0", "70000"])
def test_a_wrong_port_is_one_sentence(monkeypatch, port):
    why = stopped_by("ranks", monkeypatch, PREFLIGHT_SECONDS="45", FIXED_PORT=port)
    assert why == f"error: MASTER_PORT={port}: give a free port of the first node, 1 to 65535, or unset it"


def test_ranks_of_one_host_in_a_job_of_several_are_refused(monkeypatch):
    why = stopped_by("nodes", monkeypatch, RANKS="2", SLURM_JOB_ID="7", SLURM_NNODES="2")
    assert why == "error: RANKS=2 starts processes on this host only, and job 7 has 2 nodes: unset RANKS"


def test_a_job_of_several_nodes_whose_shell_has_no_srun_does_not_train_on_one(tmp_path):
    """The step would be fixed for fewer ranks, so the result would change."""
    (tmp_path / "bin").mkdir()
    for folder in os.environ["PATH"].split(":"):  # all programs but Slurm's
        for program in Path(folder).glob("*"):
            with contextlib.suppress(FileExistsError):
                program.name in ("srun", "scontrol", "squeue") or (tmp_path / "bin" / program.name).symlink_to(program)
    job = f"bare{os.getpid()}"
    environment = {name: value for name, value in launcher_environment(1).items() if name != "RANKS"}
    done = launching.run(["bash", LAUNCHER, *arguments(tmp_path)], cwd=ROOT, timeout=60, env={
        **environment, "PATH": str(tmp_path / "bin"), "SLURM_JOB_ID": job, "SLURM_NNODES": "2"})
    (ROOT / f"Logs/train_multi_{job}.out").unlink()
    assert done.returncode == 43 and f"error: job {job} has 2 nodes, and without srun in the PATH" in done.stdout
    assert not (tmp_path / "Models").exists()


# What sbatch passes on where it is called in a step of an array's task that has been requeued.
OF_ANOTHER = {"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0",
              "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x1"}
PLAIN = "JobId=$SLURM_JOB_ID JobName=omnimorph UserId=me(1) Requeue=1 Restarts=0 BatchFlag=1"
TASK = "JobId=$SLURM_JOB_ID ArrayJobId=100 ArrayTaskId=3 JobName=omnimorph Requeue=1 Restarts=1 BatchFlag=1"
STEP = "StepId=$SLURM_JOB_ID.0 UserId=1"


def path_with_slurm(folder, job, step=""):
    """PATH with an scontrol that says this of the job and its step 0, or does not know what is empty."""
    (folder / "bin").mkdir()
    scontrol = f"""case "$2 ${{*: -1}}" in job*) said="{job}" ;; *.0) said="{step}" ;; *) said="" ;; esac
        if [[ $said ]]; then echo "$said"; else echo "slurm_load_jobs error: Invalid job id specified"; exit 1; fi"""
    for name, body in (("scontrol", scontrol), ("srun", "exit 1"), ("squeue", "")):
        stand_in(folder / "bin" / name, body)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


@pytest.mark.parametrize("step, said", [
    (STEP, "a task of srun itself (step JOB.0)"), ("", "Slurm does not say how many tasks a node has")])
def test_a_shell_that_is_a_task_of_srun_is_refused(tmp_path, step, said):
    """A job submitted from such a shell is not, although it inherits the number of the step."""
    job = f"task{os.getpid()}"
    log = ROOT / f"Logs/train_multi_{job}.out"
    environment = {name: value for name, value in launcher_environment(1).items() if name != "RANKS"}
    done = launching.run(["bash", LAUNCHER, "--config", "Config/config_demo.yaml"], cwd=ROOT, timeout=60, env={
        **environment, "PATH": path_with_slurm(tmp_path, PLAIN, step), "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"})
    assert log.exists() == (not step)
    log.unlink(missing_ok=True)
    assert done.returncode == 43 and said.replace("JOB", job) in done.stderr + done.stdout


@pytest.mark.parametrize("job, step, given, kept", [
    (PLAIN, "", OF_ANOTHER, set()),
    (TASK, "", OF_ANOTHER, {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"}),
    (PLAIN, STEP, OF_ANOTHER, {"SLURM_STEP_ID"}),
    ("", "", OF_ANOTHER, set(OF_ANOTHER) - {"SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST"}),
    (PLAIN, "", {"SLURM_CPU_BIND": "cores"}, {"SLURM_CPU_BIND"})], ids=[
        "another job's", "a task's own", "a step's own", "Slurm does not answer", "a user's"])
def test_a_job_does_not_take_itself_for_the_one_that_submitted_it(tmp_path, job, step, given, kept):
    path = path_with_slurm(tmp_path, job, step)
    done = subprocess.run(["bash", "-uc", "source Scripts/settings.sh; forget_other_jobs; env"], cwd=ROOT, text=True,
                          capture_output=True, env={"PATH": path, "SLURM_JOB_ID": "901", **given}, timeout=20)
    found = {line.partition("=")[0] for line in done.stdout.splitlines() if line.startswith("SLURM_")}
    assert found == {"SLURM_JOB_ID", *kept} and not done.stderr


def test_the_launcher_forgets_the_job_that_submitted_it_and_a_users_filters(tmp_path):
    """Its first call of PYTHON writes down what it would start the ranks with."""
    job = f"child{os.getpid()}"
    said = run(tmp_path, 43, call='env > "$FOLDER/env"; exit 1', SLURM_JOB_ID=job, SQUEUE_USERS="me", SLURM_GPUS="8",
               PATH=path_with_slurm(tmp_path, PLAIN), **OF_ANOTHER)
    (ROOT / f"Logs/train_multi_{job}.out").unlink()
    found = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert "SLURM_JOB_ID" in found and not found & {*OF_ANOTHER, "SQUEUE_USERS", "SLURM_GPUS"}, said


@pytest.mark.slow
def test_the_preflight_waits_for_what_may_pass(tmp_path):
    """It fails three times with a fault that may pass, then all is well: more than the one repetition of before."""
    call = """if [[ $1 == Scripts/preflight/preflight.py && " $* " == *" --collect "* ]]; then
        count=$(($(cat "$FOLDER/looks" 2> /dev/null) + 1)); echo $count > "$FOLDER/looks"
        cat > /dev/null; ((count > 3)) || exit 76; echo EXCLUDED=; exit 0
    fi
    [[ $1 == Scripts/preflight/preflight.py ]] && exit 0"""
    assert "once more in 20 s, for up to 600 s in all" in run(tmp_path, call=call, more=["--preflight"])
    assert (tmp_path / "looks").read_text() == "4\n"


def test_a_preflight_that_only_loads_says_what_to_raise(monkeypatch, capsys):
    for name, value in {"PYTHON": "true", "RANKS": "1", "UNDER_SLURM": "", "PREFLIGHT_SECONDS": "45"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "ask", lambda *words, **more: (137, ""))  # as after 105 s
    assert launcher.look([], []) == (137, "")
    said = capsys.readouterr().err
    assert "judged nothing in 45 s + 60 s: if Python and torch load this slowly, raise PREFLIGHT_SECONDS" in said


def test_a_command_line_that_the_preflight_cannot_read_is_not_tried_again():
    words = ["bash", LAUNCHER, "--preflight", "--set", "run.epochs=1"]  # without --config
    done = launching.run(words, cwd=ROOT, timeout=60, env=launcher_environment(1))
    assert done.returncode == 43 and "stopped: the preflight failed, see above" in done.stdout
    assert "once more" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["launcher", "processes", "scheduler", "task"])
def test_what_runs_beside_slurm_needs_an_old_python_and_no_packages(name):
    """PYTHON may be in a container. The host has what its system came with: 3.6 in Red Hat 8 and SLES 15."""
    tree = ast.parse((ROOT / f"Supervisor/{name}.py").read_text(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"functools", "json", "math", "os", "shutil", "signal", "socket", "subprocess", "sys", "time",
                        "Supervisor", "Supervisor.processes", "Supervisor.scheduler"}


def test_a_name_that_is_not_ascii_passes_an_old_python_in_the_locale_c():
    """There it reads names as ASCII, and the Python of the training as UTF-8."""
    name = b"Models/K\xc3\xb6pfe_\xff"  # as the file system has it; the last byte is no UTF-8
    call = f"from Supervisor import launcher; launcher.answer(OMNIMORPH_RUN={ascii(os.fsdecode(name))})"
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", call], cwd=ROOT, capture_output=True, timeout=60,
                          env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"})
    assert (done.returncode, done.stdout) == (0, b"OMNIMORPH_RUN=" + name + b"\n"), done.stderr.decode()


# As srun of Slurm 23.11 and newer, it runs nothing for a task whose cores the environment gives in two ways.
SRUN = """echo "$*" >> "$FOLDER/sruns"
[[ $1 == --help ]] && exit
if [[ $* != *--cpus-per-task=* && ${SLURM_CPUS_PER_TASK:-} != "${SLURM_TRES_PER_TASK#cpu=}" ]]; then
    echo "srun: fatal: SLURM_CPUS_PER_TASK and SLURM_TRES_PER_TASK are mutually exclusive" >&2; exit 1
fi
"""


def in_allocation(folder, monkeypatch, srun=SRUN, **more):
    """Set the environment of a job on a, b and c, with an srun that does this."""
    for name, body in (("srun", srun), ("scontrol", """[[ $2 == hostnames ]] && printf '%s\\n' a b c"""),
                       ("sinfo", "echo down"), ("squeue", "")):
        stand_in(folder / name, body)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder), "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "[a-c]", "SLURM_TASKS_PER_NODE": "2(x3)",
                "STEP_NAME": f"omnimorph-{os.getpid()}", "UNDER_SLURM": "1", "FIXED_ADDRESS": "a", **more}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("now, left", [(-480, 480), (3600 - 480, 480), (-7200, 7200), (3600 + 60, -60)])
def test_a_limit_in_the_hour_that_comes_twice_is_the_next_one(tmp_path, monkeypatch, now, left):
    """02:30 in the night in which summer time ends. now: seconds since it is 02:30 for the first time."""
    stand_in(tmp_path / "scontrol", "echo JobId=7 EndTime=2026-10-25T02:30:00")
    for name, value in (("PATH", f"{tmp_path}:{os.environ['PATH']}"), ("TZ", "Europe/Berlin"),
                        ("SLURM_TIME_FORMAT", "relative")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(**{**vars(time), "time": lambda: 1792888200 + now}))
    try:
        time.tzset()
        assert scheduler.seconds_left() == left
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_nodes_answer_an_srun_that_wants_the_cores_of_a_task_on_its_command_line(tmp_path, monkeypatch):
    in_allocation(tmp_path, monkeypatch, SLURM_CPUS_PER_TASK="12", SLURM_TRES_PER_TASK="cpu=1")
    chosen = scheduler.choose_nodes(0)
    assert (chosen["NODES"], chosen["RANKS"]) == ("a b c", 6)


def test_copies_of_volumes_are_removed_from_nodes_that_were_left_out_too(tmp_path, monkeypatch):
    """They are patients', and a killed rank cannot remove them."""
    in_allocation(tmp_path, monkeypatch, EXCLUDED="b", HOSTS="a", PYTHON=sys.executable, OMNIMORPH_STAGE="/dev/shm")
    launcher.clean([])
    asked = [line for line in (tmp_path / "sruns").read_text().splitlines() if "Dataloader.staging /dev/shm" in line]
    assert sorted(line.partition("--nodelist=")[2][0] for line in asked) == ["a", "b", "c"]


@pytest.mark.parametrize("dead, told, expected", [
    ("x", "a b c", ["a,b,c"]), ("b", "a c", ["a,b,c", "a", "b", "c", "b"])], ids=["none", "one"])
def test_all_nodes_are_asked_by_one_srun_and_each_by_its_own_only_where_that_fails(tmp_path, monkeypatch, dead, told,
                                                                                  expected):
    """Sites limit the requests of a user at a time, and a job may have hundreds of nodes."""
    monkeypatch.setattr(scheduler, "nap", lambda seconds: None)
    in_allocation(tmp_path, monkeypatch, SRUN + f'[[ $* != *--nodelist=*{dead}*--input* ]]')
    assert scheduler.choose_nodes(60)["NODES"] == told
    asked = [line for line in (tmp_path / "sruns").read_text().splitlines() if line != "--help"]
    lists = [next(word[11:] for word in line.split() if word.startswith("--nodelist=")) for line in asked]
    assert lists[0] == expected[0] and sorted(lists) == sorted(expected)
    count = expected[0].count(",") + 1
    assert f"--nodes={count} --ntasks={count} --ntasks-per-node=1 " in asked[0] and asked[0].endswith(" true")


def test_an_srun_whose_step_does_not_begin_ends_with_its_round(tmp_path, monkeypatch):
    """It would start the ranks of this round beside those of the next one."""
    for name, body in (("srun", "read -t 60 <> <(:)"), ("squeue", "")):
        stand_in(tmp_path / name, body)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STEP_NAME": f"omnimorph-{os.getpid()}",
                "SLURM_JOB_ID": "7", "UNDER_SLURM": "1", "OMNIMORPH_RUN": str(tmp_path), "START_SECONDS": "1",
                "LINGER": "9", "NODES": "a", "NODE_COUNT": "1", "RANKS": "1", "TASKS_PER_NODE": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert launcher.run_step(["--config", "x.yaml"]) == 137 and time.monotonic() - began < 20


def test_a_log_of_an_earlier_attempt_is_no_sign_of_life(tmp_path, monkeypatch):
    """A rank that hangs before it has begun its log is for the launcher to end."""
    monkeypatch.setenv("OMNIMORPH_RUN", str(tmp_path))
    assert not launcher.has_spoken(), "nor is a folder that does not answer"
    for file, second in (("attempts.jsonl", 100), ("rank0.jsonl", 100), ("rank1.jsonl", 99), ("verdict.json", 101)):
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (second, second))
    assert not launcher.has_spoken()
    os.utime(tmp_path / "rank1.jsonl", (101, 101))
    assert launcher.has_spoken()


@pytest.mark.parametrize("python, said", [("/nowhere/python", "lacks Python"), ("{bare} -S", "lacks torch")])
def test_an_interpreter_without_what_is_needed_is_one_sentence(tmp_path, python, said):
    """Found out by a round, it would be tried for ten minutes with a traceback every five seconds."""
    bare = Path(sys.executable).resolve()
    done = launching.run(["bash", LAUNCHER, *arguments(tmp_path)], cwd=ROOT, timeout=60, env={
        **launcher_environment(1), "PYTHON": python.format(bare=bare)})
    assert done.returncode == 43 and f"{said}" in done.stdout and "PYTHON=path" in done.stdout
    assert not (tmp_path / "Models").exists()


def test_a_folder_of_somebody_else_is_one_sentence(tmp_path):
    """Models is a link to nowhere: that does not pass by itself."""
    (tmp_path / "Models").symlink_to(tmp_path / "gone" / "Models")
    text = run(tmp_path, 43)
    assert "name another folder (run.models)" in text and "Traceback" not in text
