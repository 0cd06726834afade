"""Every fault that the campaign has met, against real launches: found when, named how, survived with the same weights?

    python tests/faults/run_matrix.py [--only WORD ...] [--ranks N] [--keep FOLDER]

Each row is a launch of bash_train_multi_nodes.sh with 2 (or 4) gloo ranks on a tiny training. One fault strikes, from
outside or by tests/faults/inject; the row says how long it took to find it, whether the verdict named the rank and the
phase, where the run went on, and whether its final weights are bitwise those of an undisturbed run. Deadlines are
scaled to steps of a tenth of a second; beside each stands the one that production has (config_om.yaml, step of 108 s).
The rows "..., zero1" train with sharded moments, averaged weights, a schedule and a prepared cache. A row that needs
rights which we do not have is left out by name, and only those of NEED_RIGHTS may be.
The last line of standard output is one JSON object; the exit code is the number of failed rows.
"""
import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from Report.page import text_table  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.memory import WINDOW  # noqa: E402
from Runtime.watchdog import LOOK_S  # noqa: E402
from Supervisor.attempts import read_lines  # noqa: E402
from tests import launching  # noqa: E402
from tests.faults.common import (  # noqa: E402
    SCALED,
    STEPS_PER_EPOCH,
    end_all,
    ends,
    family,
    final_weights,
    launch,
    new_folder,
    prepare,
    rank_pid,
    resumed_at,
    run_of,
    steps_done,
    wait,
)
from tests.launching import SLOW, until  # noqa: E402

STEP_S = 108  # of the recorded campaign: 41 steps in 74 minutes
FORWARD = {"rank": 1, "phase": "forward", "mode": "diffusion", "step": 9}
REFUSED, DONE = 43, 0
# The same rows with what a long training has besides: moments shared out, averaged weights, a schedule, a cache.
SHARDED = {"run__strategy": "zero1", "optim__average": 0.9, "optim__schedule": "cosine"}
# Rows that mount a file system or move a process into a control group, which not everybody may.
ALL_STEPS = SCALED["run.epochs"] * STEPS_PER_EPOCH
NEED_RIGHTS = ("killed by the kernel for memory", "disk full while saving", "full logs folder",
               "full disk while the launcher writes")


def production(kind):
    """The deadline that the production config would have had."""
    cfg = load_config(ROOT / "Config/config_om.yaml")
    step = max(cfg["run.deadline_floor_s"], cfg["run.deadline_factor"] * STEP_S)
    return {"step": f"{step:.0f} s", "first": f"{cfg['run.deadline_first_s']:.0f} s",
            "exit": f"{cfg['run.deadline_floor_s']:.0f} s", "now": "at once",
            "compare": f"{cfg['run.checksum_every']} steps", "window": f"{WINDOW + 2} steps",
            "round": f"{cfg['run.round_seconds'] + 3 * cfg['run.deadline_floor_s']:.0f} s"}[kind]


def struck(folder, name="fault"):
    """When the injected fault struck."""
    return float(until(lambda: (folder / name).exists() and (folder / name).read_text()))


def result(folder, reference, since, until_time, named, launch_number=1, equal=True):
    """A row's values. steps_lost: done before the fault and done again after it."""
    resumed = resumed_at(folder, launch_number)
    before = steps_done(folder, launch_number - 1)
    lost = None if resumed is None else max(before + 1 - resumed, 0)
    weights = final_weights(folder)
    return {"detected_s": round(until_time - since, 1), "named": bool(named), "resumed_step": resumed,
            "steps_lost": lost, "equal": None if not equal else weights is not None and weights == reference}


def died(folder, ranks, reference, fault, cause, rank=1, phase="forward", **changes):
    """A fault that ends an attempt: its verdict names cause, rank and phase, and the run goes on."""
    process = launch(folder, ranks, [fault], **changes)
    code, since = wait(process), struck(folder)
    end = ends(folder)[0]
    verdict = end["verdict"]
    named = (verdict["cause"], verdict["rank"]) == (cause, rank) and phase in (None, verdict["phase"]) and code == DONE
    return result(folder, reference, since, end["time"], named), end["sentence"]


def under_way(folder, ranks, **changes):
    """A launch that has trained for some steps, and the time."""
    process = launch(folder, ranks, **changes)
    until(lambda: steps_done(folder) >= 9)
    return process, time.time()


def killed_from_outside(folder, ranks, reference, number, victims):
    process, since = under_way(folder, ranks)
    for rank in victims:
        os.kill(rank_pid(folder, rank), number)
    code, end = wait(process), ends(folder)[0]
    verdict = end["verdict"]
    if number == signal.SIGTERM:
        named = verdict["cause"] == "planned restart" and "signal" in verdict["detail"]
    elif len(victims) == ranks:
        named = (verdict["cause"], verdict["rank"]) == ("killed", None) and "SIGKILL" in verdict["detail"]
    else:
        named = (verdict["cause"], verdict["rank"]) == ("killed", victims[0]) and verdict["phase"] != "launch"
    return result(folder, reference, since, end["time"], named and code == DONE), end["sentence"]


def kernel_takes_memory(folder, ranks, reference):
    """A control group with next to no memory: the kernel ends the rank that is put into it."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.exists() else Path("/sys/fs/cgroup")) / f"omnimorph-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old.exists() else "memory.max")).write_text("1000000")
    except OSError as error:  # in a container /sys may be read-only, which is no PermissionError
        with contextlib.suppress(OSError):
            group.rmdir()
        raise PermissionError(str(error)) from error
    try:
        leak = {"do": "leak", "rank": 1, "phase": "optimizer", "mode": "diffusion", "step": 9, "always": True}
        process = launch(folder, ranks, [{**leak, "last_attempt": 0}])  # what it has already is not taken from it
        until(lambda: steps_done(folder) >= 9)
        since = time.time()
        (group / "cgroup.procs").write_text(str(rank_pid(folder, 1)))
        code, end = wait(process), ends(folder)[0]
        named = (end["cause"], end["verdict"]["rank"], code) == ("out of host memory", 1, DONE)
        return result(folder, reference, since, end["time"], named), end["sentence"]
    finally:
        group.rmdir()


def damaged_checkpoint(folder, ranks, reference, how, said):
    """The newest checkpoint is spoilt between two launches: the one before is taken."""
    faults = [{"do": "kill", **FORWARD}, {"id": "damage", "do": how, "rank": 0, "phase": "restore", "attempt": 1}]
    process = launch(folder, ranks, faults)
    code, since = wait(process), struck(folder, "damage")
    sentence = log_of(folder, "is skipped")[0]
    log = read_lines(run_of(folder) / "rank0.jsonl")
    found = next(line["time"] for line in log if line["event"] == "step" and line["attempt"] == 1)
    return result(folder, reference, since, found, said in sentence and code == DONE), sentence


@contextlib.contextmanager
def small_disk(folder, *names):
    """Folders of a run on a disk of 8 MB of their own; raises PermissionError without the right to mount one."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        for name in names:
            (disk / name).mkdir()
            (folder / name).symlink_to(disk / name)
        yield disk
    finally:
        end_all()
        subprocess.run(["umount", disk], check=True)


def log_of(folder, word):
    """The lines of a launch's output that contain a word."""
    return [line for line in (folder / "log.txt").read_text().splitlines() if word in line]


def disk_full(folder, ranks, reference):
    """The disk of all outputs fills up before a checkpoint and is freed later: the run goes on, the next one stands."""
    with small_disk(folder, "Models", "Logs"):
        faults = [{"do": "fill_disk", "rank": 0, "phase": "forward", "step": 9},
                  {"id": "free", "do": "free_disk", "rank": 0, "phase": "forward", "step": 18}]
        code, since = wait(launch(folder, ranks, faults)), struck(folder)
        failed = log_of(folder, "checkpoint failed")
        log = read_lines(run_of(folder) / "rank0.jsonl")
        steps = [line["step"] for line in log if line["event"] == "step"]
        found = next(line["time"] for line in log if line["event"] == "step" and line["step"] >= 15)
        named = (code == DONE and failed and "No space left" in failed[0] and ".pth" in failed[0]
                 and log_of(folder, "TensorBoard: ") and steps == list(range(ALL_STEPS)))
        row = result(folder, reference, since, found, named)
        return {**row, "steps_lost": 0}, failed[0] if failed else "nothing was said"


def disk_full_at_the_end_of_a_round(folder, ranks, reference):
    """The disk is full when a rank dies, so that the launcher cannot write what it decides: it waits, and goes on."""
    with small_disk(folder, "Models", "Logs") as disk:
        process = launch(folder, ranks, [{"do": "fill_disk_and_die", **FORWARD, "path": str(disk)}])
        since = struck(folder)
        until(lambda: log_of(folder, "tried again for up to"))
        found, said = time.time(), log_of(folder, "tried again for up to")[0]
        time.sleep(3)
        (disk / "ballast").unlink()
        code = wait(process)
        return result(folder, reference, since, found, code == DONE and "No space left on device" in said), said


def logs_full(folder, ranks, reference):
    """The folder of the curves is full from the start: nothing is lost but the curves."""
    with small_disk(folder, "Logs") as disk:
        process = launch(folder, ranks, [{"do": "fill_disk", "rank": 0, "phase": "forward", "path": str(disk)}])
        since = struck(folder)
        until(lambda: log_of(folder, "TensorBoard: "), 120)
        found, said = time.time(), log_of(folder, "TensorBoard: ")
        code = wait(process)
        named = (code == DONE and len(ends(folder)) == 1 and len(said) == 1 and "No space left on device" in said[0]
                 and "Traceback" not in (folder / "log.txt").read_text())
        # The first epoch's end is the first moment at which anybody could know.
        epoch = next(line["time"] for line in read_lines(run_of(folder) / "rank0.jsonl") if line["event"] == "epoch")
        return {**result(folder, reference, max(since, epoch), found, named), "steps_lost": 0}, said[0]


def two_damaged_checkpoints(folder, ranks, reference):
    """The two newest are spoilt. What is saved at lower steps from then on stays."""
    faults = [{"do": "kill", **FORWARD, "step": 21},
              {"id": "damage", "do": "spoil_two", "rank": 0, "phase": "restore", "attempt": 1},
              {"id": "leave", "do": "terminate", **FORWARD, "step": 13, "attempt": 1},
              {"id": "again", "do": "kill", **FORWARD, "step": 15, "attempt": 2}]
    code, since = wait(launch(folder, ranks, faults)), struck(folder, "damage")
    skipped = log_of(folder, "is skipped: SHA-256 differs")
    log = read_lines(run_of(folder) / "rank0.jsonl")
    found = next(line["time"] for line in log if line["event"] == "step" and line["attempt"] == 1)
    causes = [end["cause"] for end in ends(folder).values()]
    resumed = [resumed_at(folder, number) for number in (1, 2, 3)]
    named = (code == DONE and causes == ["killed", "planned restart", "killed", "done"] and len(skipped) >= 2
             and resumed == [12, 15, 15])
    sentence = f"{skipped[0]} ({len(skipped)} skipped; {', '.join(causes)}; continued at {resumed})"
    return result(folder, reference, since, found, named, launch_number=3), sentence


def slow_but_well(folder, ranks, reference, fault, longer_than, changes):
    """A phase takes longer than a deadline, each of its parts does not: nobody is ended, here and on other ranks."""
    code = wait(launch(folder, ranks, [fault], **changes))
    since = struck(folder)
    log = read_lines(run_of(folder) / f"rank{fault['rank']}.jsonl")
    took = next(line["time"] for line in log  # what is written just before the fault strikes may be rounded to after it
                if line["time"] > since + 0.1 and line["event"] in ("step", "memory", "end")) - since
    named = code == DONE and len(ends(folder)) == 1 and took > longer_than
    row = result(folder, reference, since, since, named, 0)
    return {**row, "steps_lost": 0}, f"{fault['phase']} took {took:.0f} s, and nobody was ended"


def data_away(folder, ranks, reference):
    """The data are moved away between two rounds, as while somebody copies them anew, and come back."""
    (folder / "data").unlink()
    shutil.copytree(folder.parent / "data", folder / "data")
    process = launch(folder, ranks, [{"do": "move_away", "path": str(folder / "data"), **FORWARD}])
    since = struck(folder)
    until(lambda: len(ends(folder)) >= 3)
    (folder / "data.away").rename(folder / "data")
    code, last = wait(process), ends(folder)[2]
    named = (code == DONE and [end["cause"] for end in ends(folder).values()][:2] == ["killed", "refused"]
             and "this may pass" in last["sentence"])
    launches = len(list((run_of(folder) / "launches").iterdir()))
    row = result(folder, reference, since, ends(folder)[1]["time"], named, launches - 1)
    return {**row, "steps_lost": 1}, last["sentence"]


def stale_handles(folder, ranks, reference):
    """The first two restarts cannot copy the cache: that is the file system, and it passes."""
    settings = prepare(folder.parent)
    reference = undisturbed(folder.parent, ranks, settings, ", cache")
    # Whichever rank of the node is first copies for both.
    faults = [{"do": "kill", **FORWARD},
              *({"id": f"stale{n}rank{rank}", "do": "stale_copies", "rank": rank, "phase": "data set", "attempt": n,
                 "last_attempt": n} for n in (1, 2) for rank in range(ranks))]
    (folder / "memory").mkdir()
    code = wait(launch(folder, ranks, faults, **settings, data__stage=str(folder / "memory"),
                       run__patience_s=90 * SLOW))
    since, causes = struck(folder), [end["cause"] for end in ends(folder).values()]
    named = code == DONE and causes == ["killed", "disk", "disk", "done"]
    return result(folder, reference, since, ends(folder)[1]["time"], named, 1), ends(folder)[1]["sentence"]


def half_a_line_saved(folder, ranks, reference):
    """Somebody edits the code while the run trains from it, and it does not parse when a round begins."""
    code_folder = folder / "checkout"
    for name in ("Config", "Dataloader", "Diffusion", "Inference", "Report", "Runtime", "Scripts", "Supervisor"):
        shutil.copytree(ROOT / name, code_folder / name)
    for name in ("OM_train_3modes.py", "bash_train_multi_nodes.sh"):
        shutil.copy(ROOT / name, code_folder)
    edited = code_folder / "Diffusion/losses.py"
    good = edited.read_text()
    process = launch(folder, ranks, root=code_folder, more=["--max-steps-before-restart", "10"])
    until(lambda: steps_done(folder) >= 3)
    since = time.time()
    edited.write_text(good + "\ndef half(")
    until(lambda: len(ends(folder)) >= 5)
    found = ends(folder)[1]
    edited.write_text(good)
    result_code = wait(process)
    named = result_code == DONE and found["cause"] == "never started"
    launches = len(list((run_of(folder) / "launches").iterdir()))
    row = result(folder, reference, since, found["time"], named, launches - 1)
    return {**row, "steps_lost": 0, "detected_s": None}, found["sentence"]  # it strikes when a round begins


def late_mode_3(folder, ranks, reference):
    """Mode 3 first runs in the seventh step, and its first forward takes longer than a step's deadline: no hang."""
    closed = [{"id": f"gate{rank}", "do": "other_branch", "rank": rank, "phase": "forward", "mode": "diffusion",
               "always": True, "last_step": 5} for rank in range(ranks)]
    slow = {"do": "nap", "seconds": 8, "rank": 1, "phase": "forward", "mode": "registration"}
    other = new_folder(folder.parent, f"{folder.name} (quick)")
    if wait(launch(other, ranks, closed)) != DONE:
        return result(folder, None, 0, 999, False), "the run without the slow step did not end well"
    code = wait(launch(folder, ranks, [*closed, slow]))
    since = struck(folder)
    log = [line for line in read_lines(run_of(folder) / "rank0.jsonl") if line["event"] == "step"]
    first, seconds = next(line for line in log if line["open"]), log[6]["time"] - log[5]["time"]
    named = (code == DONE and len(ends(folder)) == 1 and first["step"] == 6
             and seconds > 8)
    row = result(folder, final_weights(other), since, since, named)
    return {**row, "steps_lost": 0}, f"mode 3 opened at step {first['step']}, which took {seconds:.1f} s"


def stopped_holder_wakes(folder, ranks, reference):
    """A whole launch stands still, as on a machine that is suspended; another takes its folder over; the first wakes.

    To the second the first is on another machine: there only the clock tells that it no longer lives. A lock is given
    up after minutes, so whoever wakes has last looked at it longer ago than watchdog.LOOK_S, and the second has to be
    slow enough to be there still.
    """
    slow = {"do": "nap", "seconds": 1, "rank": 0, "phase": "optimizer", "mode": "diffusion", "always": True}
    first, stopped = under_way(folder, ranks)
    for pid in launching.marked(first.mark):
        os.kill(pid, signal.SIGSTOP)
    lock = run_of(folder) / "lock.json"
    found = json.loads(lock.read_text())
    found["holders"] = [{**holder, "host": "elsewhere", "boot": "another"} for holder in found["holders"]]
    lock.write_text(json.dumps(found))
    os.utime(lock, (time.time() - 10 ** 6,) * 2)
    second = launch(folder, ranks, [{**slow, "step": 12, "last_step": 24}])
    until(lambda: steps_done(folder, attempt=1) >= 20)
    time.sleep(max(stopped + LOOK_S + 0.5 - time.time(), 0))
    for pid in launching.marked(first.mark):
        os.kill(pid, signal.SIGCONT)
    since = time.time()
    refused = wait(first)
    left = time.time()
    code = wait(second)
    said = log_of(folder, "was taken over by process")
    logs = [run_of(folder) / name for name in ("attempts.jsonl", *(f"rank{rank}.jsonl" for rank in range(ranks)))]
    late = [line for path in logs for line in read_lines(path) if line["attempt"] == 0 and line["time"] > since]
    done = [line["step"] for line in read_lines(logs[1]) if line["event"] == "step" and line["attempt"] == 1]
    named = (refused == REFUSED and code == DONE and said and not late and done == list(range(done[0], ALL_STEPS))
             and [end["cause"] for end in ends(folder).values()][1:] == ["done"])
    row = result(folder, reference, since, left, named)
    return row, said[0] if said else "nothing was said"


def leak(folder, ranks, reference):
    fault = {"do": "leak", "rank": 1, "phase": "optimizer", "mode": "diffusion", "step": 3, "always": True}
    process = launch(folder, ranks, [{**fault, "last_attempt": 0}], run__memory_limit_gb=3)
    code, since = wait(process), struck(folder)
    end = ends(folder)[0]
    found = [line for line in read_lines(run_of(folder) / "rank1.jsonl") if line["event"] == "leak"]
    rate = found[0]["bytes_per_step"] / 1e6 if found else 0
    named = (code == DONE and end["cause"] == "planned restart" and "memory" in end["verdict"]["detail"]
             and found[0]["who"] == "loader or Python objects" and 40 < rate < 60)
    return result(folder, reference, since, found[0]["time"] if found else since + 999, named), end["sentence"]


def loader_worker_killed(folder, ranks, reference):
    process, _ = under_way(folder, ranks, data__in_memory="false", data__num_workers=1)
    workers = [pid for pid in family(rank_pid(folder, 1))
               if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    since = time.time()
    os.kill(workers[0], signal.SIGKILL)
    code, end = wait(process), ends(folder)[0]
    verdict = end["verdict"]
    named = (verdict["cause"], verdict["rank"]) == ("a loader worker died", 1) and code == DONE
    return result(folder, reference, since, end["time"], named), end["sentence"]


def poisoned_volume(folder, ranks, reference):
    """A volume with NaN: refused by name; repaired, the run goes on."""
    (folder / "data").unlink()
    shutil.copytree(folder.parent / "data", folder / "data")
    path = sorted((folder / "data/imagesTr").glob("*.nii.gz"))[2]
    faults = [{"do": "kill", **FORWARD},
              {"id": "poison", "do": "poison_volume", "path": str(path), "rank": 0, "phase": "start", "attempt": 1}]
    code, since = wait(launch(folder, ranks, faults, run__patience_s=1)), struck(folder, "poison")
    end = ends(folder)[1]
    verdict = end["verdict"]
    named = (code == REFUSED and verdict["cause"] == "refused" and path.name in verdict["detail"]
             and verdict["rank"] is not None and verdict["phase"] == "data set")
    path.write_bytes(path.with_name("good").read_bytes())
    again = wait(launch(folder, ranks))
    return result(folder, reference, since, end["time"], named and again == DONE), end["sentence"]


def nan_in_a_batch(folder, ranks, reference):
    """One rank's batch has NaN: no rank steps, whichever rank it was; so the weights are those of the other's run."""
    other = folder.parent / f"{folder.name} (other rank)"
    new_folder(folder.parent, other.name)
    fault = {"do": "nan_batch", **FORWARD}
    since = {}
    for place, rank in ((other, 0), (folder, 1)):
        if wait(launch(place, ranks, [{**fault, "rank": rank}])) != DONE:
            return result(folder, None, 0, 999, False), "the run did not end well"
        since[place] = struck(place)
    log = read_lines(run_of(folder) / "rank0.jsonl")
    skipped = [(line["step"], line["nonfinite"]) for line in log if line["event"] == "step" and line["nonfinite"]]
    said = [line for line in read_lines(run_of(folder) / "rank1.jsonl") if line["event"] == "nonfinite"]
    named = (skipped == [(9, 2)] and [line["mode"] for line in said] == ["diffusion", "contrastive"]
             and not any(line["event"] == "nonfinite" for line in log) and final_weights(folder) != reference)
    row = result(folder, final_weights(other), since[folder], said[0]["time"], named)
    return {**row, "steps_lost": 0}, f"step and modes without an update, on all ranks: {skipped}"


def same_crash_every_time(folder, ranks, reference):
    code = wait(launch(folder, ranks, [{"do": "raise_error", "always": True, **FORWARD}]))
    since, last = struck(folder), ends(folder)[2]
    named = (code == REFUSED and [end["decision"] for end in ends(folder).values()] == ["continue", "step back", "stop"]
             and last["verdict"]["rank"] == 1 and last["verdict"]["phase"] == "forward" and len(ends(folder)) == 3
             and "the same crash every time" in last["sentence"])
    return result(folder, reference, since, ends(folder)[0]["time"], named, equal=False), last["sentence"]


def crash_in_the_first_step(folder, ranks, reference):
    """Each attempt after the first dies in its first step. Once that is cured, the run goes on from its newest file."""
    faults = [{"do": "kill", **FORWARD, "step": 21},
              {"id": "again", "do": "raise_error", "always": True, **FORWARD, "step": 0, "attempt": 1}]
    code, since = wait(launch(folder, ranks, faults)), struck(folder)
    last = ends(folder)[max(ends(folder))]
    decisions = [end["decision"] for end in ends(folder).values()]
    again, launches = wait(launch(folder, ranks)), len(list((run_of(folder) / "launches").iterdir()))
    named = ((code, again, decisions) == (REFUSED, DONE, ["continue", "continue", "step back", "stop"])
             and resumed_at(folder, launches - 1) == 20 and "is not to blame" in last["sentence"])
    row = result(folder, reference, since, ends(folder)[0]["time"], named, launches - 1)
    return {**row, "steps_lost": 1}, last["sentence"]


def second_run(folder, ranks, reference):
    process, since = under_way(folder, ranks)
    refused, found = wait(launch(folder, ranks)), time.time()
    said = log_of(folder, "in use by")[0]
    named = refused == REFUSED and f"in use by process {process.pid} on" in said
    code = wait(process)
    row = result(folder, reference, since, found, named and code == DONE and len(ends(folder)) == 1)
    return {**row, "steps_lost": 0}, said


def shell_of_the_round_killed(folder, ranks, reference):
    """The shell between launcher and ranks: these end before the next round begins in the same folder."""
    process, since = under_way(folder, ranks)
    pid = rank_pid(folder, 0)
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists() or rank_pid(folder, 0, 1))
    code, alone = wait(process), not Path(f"/proc/{pid}").exists() and not log_of(folder, "in use by")
    causes = [end["cause"] for end in ends(folder).values()]
    named = code == DONE and alone and causes == ["vanished", "done"]
    return result(folder, reference, since, ends(folder)[0]["time"], named), ends(folder)[0]["sentence"]


def launcher_asked_to_leave(folder, ranks, reference, number):
    process, since = under_way(folder, ranks)
    process.send_signal(number)
    code, found = wait(process), time.time()
    end = ends(folder)[0]
    named = code == 42 and end["cause"] == "planned restart" and not (run_of(folder) / "lock.json").exists()
    again = wait(launch(folder, ranks))
    return result(folder, reference, since, found, named and again == DONE), end["sentence"]


def stopped_between_rounds(folder, ranks, reference):
    """TERM while the launcher begins its second round: that round does not start."""
    process = launch(folder, ranks, more=["--max-steps-before-restart", "10"])

    def begins():
        for pid in family(process.pid) if ends(folder) else ():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if b"Supervisor.attempts\0begin" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
    until(begins)
    since = time.time()
    process.terminate()
    code, found = wait(process), time.time()
    said = log_of(folder, "left by TERM")
    named = code == 42 and said and not rank_pid(folder, 0, 1) and not (run_of(folder) / "lock.json").exists()
    again = wait(launch(folder, ranks))
    return result(folder, reference, since, found, named and again == DONE), said[0] if said else "it was not heard"


def relative_path(folder, ranks, reference):
    """Started from another folder by a relative path, as each of its rounds is then: a killed rank, and it goes on."""
    return died(folder, ranks, reference, {"do": "kill", **FORWARD}, "killed", cwd=folder)


def launcher_killed(folder, ranks, reference):
    """The ranks go on by themselves; a second start is refused meanwhile, and later finds the run complete."""
    process, since = under_way(folder, ranks)
    process.kill()
    process.wait()
    refused, found = wait(launch(folder, ranks)), time.time()
    said = log_of(folder, "in use by")
    named = refused == REFUSED and said and f"process {rank_pid(folder, 0)} on" in said[0]
    until(lambda: steps_done(folder) == ALL_STEPS - 1 and not Path(f"/proc/{rank_pid(folder, 0)}").exists())
    again = wait(launch(folder, ranks))
    row = result(folder, reference, since, found, named and again == DONE)
    return {**row, "steps_lost": 0}, said[0] if said else "it was not refused"


def never_starts(folder, ranks, reference, seconds):
    """Every process hangs before its first word and ignores TERM: the launcher or the time limit ends them."""
    faults = [{"id": f"fault{n}", "do": "ignore_everything", "rank": n, "phase": "import"} for n in range(ranks)]
    code, since = wait(launch(folder, ranks, faults, run__round_seconds=seconds)), struck(folder, "fault0")
    end = ends(folder)[0]
    verdict = end["verdict"]
    named = (verdict["cause"], verdict["rank"], verdict["phase"], code) == ("never started", 0, "launch", DONE)
    return {**result(folder, reference, since, end["time"], named, 0), "steps_lost": 0}, end["sentence"]


def matrix():
    """(title, ranks, function, its arguments, kind of production deadline)."""
    rows = [("SIGKILL of one rank", killed_from_outside, (signal.SIGKILL, [1]), "now"),
            ("SIGKILL of all ranks", killed_from_outside, (signal.SIGKILL, [0, 1]), "now"),
            ("SIGSTOP of one rank", died, ({"do": "stop", **FORWARD}, "frozen"), "step"),
            ("hang holding the GIL", died, ({"do": "hold_gil", **FORWARD}, "hang"), "step"),
            ("endless C call", died, ({"do": "endless_c_call", **FORWARD}, "hang"), "step"),
            ("hang in Python, optimizer", died, ({"do": "sleep_long", **FORWARD, "phase": "optimizer"}, "hang", 1,
                                                 "optimizer"), "step"),
            ("skipped collective", died, ({"do": "skip_gradient_sum", **FORWARD}, "out of step", 1, "agree"), "step"),
            ("other branch on one rank", died, ({"do": "other_branch", **FORWARD}, "out of step", 1, "agree"), "now"),
            ("other batch shape on one rank", died, ({"do": "smaller_batch", **FORWARD}, "out of step", 1, "agree"),
             "now"),
            ("one bit of one weight", died, ({"do": "flip_weight", **FORWARD}, "out of step", 1, "agree"), "compare"),
            ("NaN in one volume", poisoned_volume, (), "now"),
            ("NaN in one batch", nan_in_a_batch, (), "now"),
            ("NaN in the weights", died, ({"do": "nan_weights", **FORWARD}, "weights not finite", 1, "between steps"),
             "now"),
            ("segfault in the first forward", died, ({"do": "segfault", **FORWARD, "step": 0}, "crash in native code"),
             "now"),
            ("hang in the first forward", died, ({"do": "hold_gil", **FORWARD, "step": 0}, "hang"), "first"),
            ("out of memory on one rank", died, ({"do": "out_of_memory", **FORWARD}, "out of host memory"), "now"),
            ("killed by the kernel for memory", kernel_takes_memory, (), "now"),
            ("newest checkpoint truncated", damaged_checkpoint, ("truncate", "truncated"), "now"),
            ("newest checkpoint bit-flipped", damaged_checkpoint, ("flip_bit", "SHA-256 differs"), "now"),
            ("newest checkpoint unloadable", damaged_checkpoint, ("unloadable", "cannot be read"), "now"),
            ("disk full while saving", disk_full, (), "now"),
            ("full logs folder", logs_full, (), "now"),
            ("full disk while the launcher writes", disk_full_at_the_end_of_a_round, (), "now"),
            ("two bad newest checkpoints, then a kill", two_damaged_checkpoints, (), "now"),
            ("killed while saving", died, ({"do": "kill_while_saving", **FORWARD, "rank": 0}, "killed", 0, None),
             "now"),
            ("leak of 50 MB a step", leak, (), "window"),
            ("a loader worker killed", loader_worker_killed, (), "now"),
            ("TERM to one rank", killed_from_outside, (signal.SIGTERM, [1]), "now"),
            ("TERM to the launcher", launcher_asked_to_leave, (signal.SIGTERM,), "now"),
            ("a closed terminal", launcher_asked_to_leave, (signal.SIGHUP,), "now"),
            ("SIGKILL of the shell of a round", shell_of_the_round_killed, (), "now"),
            ("stop signal between rounds", stopped_between_rounds, (), "now"),
            ("relative path of the script", relative_path, (), "now"),
            ("SIGKILL of the launcher", launcher_killed, (), "now"),
            ("the same crash every time", same_crash_every_time, (), "now"),
            ("a crash in the first step of every attempt", crash_in_the_first_step, (), "now"),
            ("a second run on the folder", second_run, (), "now"),
            ("a stopped holder of the lock wakes", stopped_holder_wakes, (), "now"),
            ("validation longer than its deadline", slow_but_well, (
                {"do": "slow_calls", "module": "Diffusion.validation", "function": "send", "seconds": 5 * SLOW,
                 "rank": 1, "phase": "evaluate"}, 25 * SLOW, {"run__val_pairs": 2, "run__val_every": 3}), "now"),
            ("reading longer than every deadline", slow_but_well, (
                {"do": "slow_calls", "module": "Dataloader.dataset", "function": "on_grid", "seconds": 5 * SLOW,
                 "rank": 1, "phase": "data set"}, 25 * SLOW, {}), "now"),
            ("restore longer than the join", slow_but_well, (
                {"do": "nap", "seconds": 22 * SLOW, "rank": 0, "phase": "restore"}, 20 * SLOW,
                {"run__deadline_first_s": 60 * SLOW}),
             "now"),
            ("the data away at a restart", data_away, (), "now"),
            ("stale file handles at two restarts", stale_handles, (), "now"),
            ("half a line of code saved during the run", half_a_line_saved, (), "now"),
            ("mode 3 opens late and slowly", late_mode_3, (), "first"),
            ("a process that never exits", died, ({"do": "never_exit", "rank": 1, "phase": "leave"}, "would not exit",
                                                  1, "exit"), "exit"),
            ("a launch that never starts", never_starts, (120,), "first"),
            ("a launch beyond its time limit", never_starts, (20,), "round")]
    again = {"SIGKILL of one rank", "hang holding the GIL", "skipped collective", "other batch shape on one rank"}
    other = {"SIGKILL of one rank", "SIGKILL of all ranks", "hang holding the GIL", "newest checkpoint truncated",
             "killed while saving", "TERM to the launcher"}
    return ([(title, 2, False, *rest) for title, *rest in rows]
            + [(f"{title}, 4 ranks", 4, False, *rest) for title, *rest in rows if title in again]
            + [(f"{title}, zero1", 2, True, *rest) for title, *rest in rows if title in other])


def undisturbed(parent, ranks, settings, variant):
    """Weights of a run that nothing disturbs."""
    folder = new_folder(parent, f"undisturbed, {ranks} ranks{variant}", **settings)
    if wait(launch(folder, ranks)) != DONE:
        sys.exit(f"the undisturbed run failed: {folder}/log.txt")
    return final_weights(folder)


def run_row(parent, title, ranks, settings, reference, function, arguments):
    """One row, and what was said. Raises PermissionError where it needs more rights than we have."""
    try:
        return function(new_folder(parent, title, **settings), ranks, reference, *arguments)
    except (LookupError, StopIteration, TimeoutError, subprocess.TimeoutExpired) as error:
        # The fault was not found, or not as expected: that is what the row has to say.
        row = {"detected_s": 999.0, "named": False, "resumed_step": None, "steps_lost": None, "equal": False}
        return row, f"FAILED, {type(error).__name__}: {error}"
    finally:
        end_all()


def show(rows):
    header = ["fault", "detected after s", "in production", "named", "resumed at step", "steps lost", "weights equal"]
    words = {True: "yes", False: "NO", None: "-"}
    print(text_table(header, [(row["fault"], row["detected_s"], row["production"], words[row["named"]],
                               "-" if row["resumed_step"] is None else row["resumed_step"],
                               "-" if row["steps_lost"] is None else row["steps_lost"], words[row["equal"]])
                              for row in rows], [None, ".1f", None, None, None, None, None]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help="rows of this title, or with this word in their titles")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only rows with so many ranks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run there and leave everything")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would every launcher
    parent = args.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    references, rows, left_out = {}, [], {}
    titles = [title for title, *_ in matrix()]
    for title, ranks, sharded, function, arguments, kind in matrix():
        # A whole title is that row alone, and not also those that begin with it.
        wanted = any(word == title or (word in title and word not in titles) for word in args.only)
        if (args.only and not wanted) or args.ranks not in (None, ranks):
            continue
        settings = {**SHARDED, **prepare(parent)} if sharded else {}
        if (ranks, sharded) not in references:
            references[ranks, sharded] = undisturbed(parent, ranks, settings, ", zero1" if sharded else "")
        try:
            row, said = run_row(parent, title, ranks, settings, references[ranks, sharded], function, arguments)
        except PermissionError as error:
            left_out[title] = f"this needs more rights ({error})"
            print(f"{title}: left out, {left_out[title]}", file=sys.stderr, flush=True)
            continue
        rows.append({"fault": title, **row, "production": production(kind)})
        print(f"{title}: {said}", file=sys.stderr, flush=True)
    if not rows and not left_out:
        parser.error(f"--only {' '.join(args.only)}: no row has that title, nor such a word in it.")
    failed = [row["fault"] for row in rows
              if not row["named"] or row["equal"] is False or (row["detected_s"] or 0) > 30 * SLOW]
    failed += [title for title in left_out if title not in NEED_RIGHTS]
    show(rows)
    print(json.dumps({"failed": failed, "left_out": left_out, "rows": [
        {key: value for key, value in row.items() if key != "production"} for row in rows]}))
    if not args.keep:
        shutil.rmtree(parent)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
