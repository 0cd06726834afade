"""Every fault that the campaign has met, against real launches: found when, named how, survived with the same weights?

    python tests/faults/run_matrix.py [--only WORD ...] [--ranks N] [--keep FOLDER]

Each row is a launch of bash_train_multi_nodes.sh with 2 (or 4) gloo ranks on a tiny training. One fault strikes, from
outside or by tests/faults/inject; the row says how long it took to find it, whether the verdict named the rank and the
phase, where the run went on, and whether its final weights are bitwise those of an undisturbed run. Deadlines are
scaled to steps of a tenth of a second; beside each stands the one that production has (config_om.yaml, step of 108 s).
The last line of standard output is one JSON object; the exit code is the number of failed rows.
"""
import argparse
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

from Runtime.attempts import read_lines  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.memory import WINDOW  # noqa: E402
from Runtime.report import text_table  # noqa: E402
from tests.faults.common import (  # noqa: E402
    ends,
    family,
    final_weights,
    launch,
    new_folder,
    rank_pid,
    resumed_at,
    run_of,
    steps_done,
    until,
    wait,
)

STEP_S = 108  # of the recorded campaign: 41 steps in 74 minutes
FORWARD = {"rank": 1, "phase": "forward", "mode": "diffusion", "step": 9}
REFUSED, DONE = 43, 0


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


def killed_from_outside(folder, ranks, reference, number, victims):
    process = launch(folder, ranks)
    until(lambda: steps_done(folder) >= 9)
    since = time.time()
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
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old.exists() else "memory.max")).write_text("1000000")
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
    sentence = next(line for line in (folder / "log.txt").read_text().splitlines() if "is skipped" in line)
    log = read_lines(run_of(folder) / "rank0.jsonl")
    found = next(line["time"] for line in log if line["event"] == "step" and line["attempt"] == 1)
    return result(folder, reference, since, found, said in sentence and code == DONE), sentence


def disk_full(folder, ranks, reference):
    """The disk fills up before a checkpoint and is freed later: the run goes on, the next checkpoint stands."""
    (folder / "Models").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder / "Models"]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    acts, refusal = (("fill_disk", "free_disk"), "No space left") if mounted else (
        ("limit_files", "unlimit_files"), "File too large")
    try:
        faults = [{"do": acts[0], "rank": 0, "phase": "forward", "step": 9},
                  {"id": "free", "do": acts[1], "rank": 0, "phase": "forward", "step": 18}]
        code, since = wait(launch(folder, ranks, faults)), struck(folder)
        failed = [line for line in (folder / "log.txt").read_text().splitlines() if "checkpoint failed" in line]
        log = read_lines(run_of(folder) / "rank0.jsonl")
        found = next(line["time"] for line in log if line["event"] == "step" and line["step"] >= 15)
        named = code == DONE and failed and refusal in failed[0] and ".pth" in failed[0]
        row = result(folder, reference, since, found, named)
        return {**row, "steps_lost": 0}, failed[0] if failed else "nothing was said"
    finally:
        if mounted:
            subprocess.run(["umount", folder / "Models"], check=True)


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
    changes = {"data__in_memory": "false", "data__num_workers": 1}
    process = launch(folder, ranks, **changes)
    until(lambda: steps_done(folder) >= 9)
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
    code, since = wait(launch(folder, ranks, faults)), struck(folder, "poison")
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


def second_run(folder, ranks, reference):
    process = launch(folder, ranks)
    until(lambda: steps_done(folder) >= 3)
    since = time.time()
    second = launch(folder, ranks)
    refused, found = wait(second), time.time()
    named = refused == REFUSED and f"in use by process {process.pid} on" in (folder / "log.txt").read_text()
    code = wait(process)
    row = result(folder, reference, since, found, named and code == DONE and len(ends(folder)) == 1)
    said = next(line for line in (folder / "log.txt").read_text().splitlines() if "in use by" in line)
    return {**row, "steps_lost": 0}, said


def would_not_exit(folder, ranks, reference):
    process = launch(folder, ranks, [{"do": "never_exit", "rank": 1, "phase": "leave"}])
    code, since = wait(process), struck(folder)
    end = ends(folder)[0]
    verdict = end["verdict"]
    named = (verdict["cause"], verdict["rank"], verdict["phase"]) == ("would not exit", 1, "exit") and code == DONE
    return result(folder, reference, since, end["time"], named), end["sentence"]


def launcher_asked_to_leave(folder, ranks, reference):
    process = launch(folder, ranks)
    until(lambda: steps_done(folder) >= 9)
    since = time.time()
    process.terminate()
    code, found = wait(process), time.time()
    end = ends(folder)[0]
    named = code == 42 and end["cause"] == "planned restart" and not (run_of(folder) / "lock.json").exists()
    again = wait(launch(folder, ranks))
    return result(folder, reference, since, found, named and again == DONE), end["sentence"]


def launcher_killed(folder, ranks, reference):
    """The ranks go on by themselves; a second start is refused meanwhile, and later finds the run complete."""
    process = launch(folder, ranks)
    until(lambda: steps_done(folder) >= 9)
    since = time.time()
    process.kill()
    process.wait()
    refused, found = wait(launch(folder, ranks)), time.time()
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "in use by" in line]
    named = refused == REFUSED and said and f"process {rank_pid(folder, 0)} on" in said[0]
    until(lambda: steps_done(folder) >= 47 and not Path(f"/proc/{rank_pid(folder, 0)}").exists())
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
            ("killed while saving", died, ({"do": "kill_while_saving", **FORWARD, "rank": 0}, "killed", 0, None),
             "now"),
            ("leak of 50 MB a step", leak, (), "window"),
            ("a loader worker killed", loader_worker_killed, (), "now"),
            ("TERM to one rank", killed_from_outside, (signal.SIGTERM, [1]), "now"),
            ("TERM to the launcher", launcher_asked_to_leave, (), "now"),
            ("SIGKILL of the launcher", launcher_killed, (), "now"),
            ("the same crash every time", same_crash_every_time, (), "now"),
            ("a second run on the folder", second_run, (), "now"),
            ("a process that never exits", would_not_exit, (), "exit"),
            ("a launch that never starts", never_starts, (120,), "first"),
            ("a launch beyond its time limit", never_starts, (8,), "round")]
    again = {"SIGKILL of one rank", "hang holding the GIL", "skipped collective", "other batch shape on one rank"}
    return ([(title, 2, *rest) for title, *rest in rows]
            + [(f"{title}, 4 ranks", 4, *rest) for title, *rest in rows if title in again])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose title has one of these words")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only rows with so many ranks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run there and leave everything")
    args = parser.parse_args(argv)
    parent = args.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    references, rows = {}, []
    for title, ranks, function, arguments, kind in matrix():
        if (args.only and not any(word in title for word in args.only)) or args.ranks not in (None, ranks):
            continue
        if ranks not in references:
            folder = new_folder(parent, f"undisturbed, {ranks} ranks")
            if wait(launch(folder, ranks)) != DONE:
                sys.exit(f"the undisturbed run failed: {folder}/log.txt")
            references[ranks] = final_weights(folder)
        try:
            row, said = function(new_folder(parent, title), ranks, references[ranks], *arguments)
        except PermissionError as error:
            print(f"{title}: left out, this needs more rights ({error})", file=sys.stderr, flush=True)
            continue
        except (LookupError, StopIteration, TimeoutError, subprocess.TimeoutExpired) as error:
            # The fault was not found, or not as expected: that is what the row has to say.
            row = {"detected_s": 999.0, "named": False, "resumed_step": None, "steps_lost": None, "equal": False}
            said = f"FAILED, {type(error).__name__}: {error}"
        rows.append({"fault": title, **row, "production": production(kind)})
        print(f"{title}: {said}", file=sys.stderr, flush=True)
    failed = [row["fault"] for row in rows if not row["named"] or row["equal"] is False or row["detected_s"] > 30]
    header = ["fault", "detected after s", "in production", "named", "resumed at step", "steps lost", "weights equal"]
    words = {True: "yes", False: "NO", None: "-"}
    print(text_table(header, [(row["fault"], row["detected_s"], row["production"], words[row["named"]],
                               "-" if row["resumed_step"] is None else row["resumed_step"],
                               "-" if row["steps_lost"] is None else row["steps_lost"], words[row["equal"]])
                              for row in rows], [None, ".1f", None, None, None, None, None]))
    print(json.dumps({"failed": failed, "rows": [{key: value for key, value in row.items() if key != "production"}
                                                 for row in rows]}))
    if not args.keep:
        shutil.rmtree(parent)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
