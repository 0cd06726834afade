"""Real launches of a tiny training, with faults from outside or from tests/faults/inject, and what became of them."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from Runtime.attempts import read_lines  # noqa: E402
from tests.tiny import arguments, launcher_environment, make_data  # noqa: E402

# Deadlines and pauses scaled to steps of a tenth of a second.
SCALED = {"run.deadline_floor_s": 3, "run.deadline_factor": 5, "run.deadline_first_s": 25, "run.join_s": 20,
          "run.grace_s": 2, "run.pause_planned_s": 0.2, "run.pause_crash_s": 0.2, "run.round_seconds": 120,
          "run.checkpoint_steps": 4, "run.epochs": 4, "data.repeats": 8, "data.batchsize": 1,
          "data.diff_reg_batch_ratio": 1, "data.global_batchsize": 4, "run.val_pairs": 1}


def launch(folder, ranks, faults=(), more=(), **changes):
    """Start bash_train_multi_nodes.sh on a tiny training in `folder`. Returns the process; its output is in log.txt."""
    settings = {**{key.replace(".", "__"): value for key, value in SCALED.items()}, **changes}
    environment = launcher_environment(ranks, FAULT_DIR=str(folder))
    if faults:
        environment.update(FAULTS=json.dumps([{"id": "fault", **fault} for fault in faults]),
                           PYTHONPATH=str(Path(__file__).parent / "inject"))
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(["bash", str(ROOT / "bash_train_multi_nodes.sh"),
                                 *arguments(folder, *more, **settings)], cwd=ROOT, env=environment, stdout=log,
                                stderr=subprocess.STDOUT, start_new_session=True)


def wait(process, seconds=300):
    """Exit code of a launch; a launch that does not end is killed with all it started, and that is an error."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for pid in family(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        raise


def family(pid):
    """A process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in path.read_text().split()]
    return pids


def run_of(folder):
    return folder / "Models/demo_om_net"


def rank_pid(folder, rank, attempt=0):
    """Process number of a rank once it has started, else None."""
    starts = [line for line in read_lines(run_of(folder) / f"rank{rank}.jsonl")
              if line["event"] == "start" and line["attempt"] == attempt]
    return starts[-1]["pid"] if starts else None


def until(condition, seconds=60):
    """Wait for a condition to become true; returns its value."""
    ends = time.time() + seconds
    while not (value := condition()):
        if time.time() > ends:
            raise TimeoutError(f"waited {seconds} s for {condition}")
        time.sleep(0.02)
    return value


def steps_done(folder, attempt=None):
    """Number of the last step that rank 0 has logged, -1 before the first."""
    return max([line["step"] for line in read_lines(run_of(folder) / "rank0.jsonl")
                if line["event"] == "step" and attempt in (None, line["attempt"])], default=-1)


def ends(folder):
    """How each attempt ended: {attempt: its line of attempts.jsonl}."""
    return {line["attempt"]: line for line in read_lines(run_of(folder) / "attempts.jsonl") if line["event"] == "end"}


def final_weights(folder, epochs=SCALED["run.epochs"]):
    """SHA-256 of the weights after the last epoch, None if the run did not get there."""
    path = run_of(folder) / "manifest.json"
    entries = json.loads(path.read_text())["checkpoints"] if path.exists() else {}
    return next((entry["weights_sha256"] for entry in entries.values() if entry["epoch"] == epochs), None)


def resumed_at(folder, launch_number=1):
    """The step from which a later launch went on."""
    path = run_of(folder) / f"launches/{launch_number:04d}/launch.json"
    return json.loads(path.read_text())["step"] if path.exists() else None


def new_folder(parent, name):
    """A folder of its own for a run, on the data that all runs of `parent` share."""
    folder = parent / name
    folder.mkdir(parents=True)
    if not (parent / "data").exists():
        make_data(parent)
    (folder / "data").symlink_to(parent / "data")
    return folder
