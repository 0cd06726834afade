"""Real launches of a tiny training, with faults from outside or from tests/faults/inject, and what became of them."""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from Runtime.checkpoint import load, weights_sha256  # noqa: E402
from Runtime.memory import children  # noqa: E402
from Supervisor.attempts import read_lines  # noqa: E402
from tests import launching  # noqa: E402
from tests.launching import SLOW  # noqa: E402
from tests.tiny import arguments, launcher_environment, make_data  # noqa: E402

# Deadlines and pauses scaled to steps of a tenth of a second; float32, which no CPU has to emulate; volumes of 8^3.
# What is asked is who is found and where the run goes on, and most of the time goes to starting processes anyway.
SCALED = {"run.deadline_floor_s": 3 * SLOW, "run.deadline_factor": 5, "run.deadline_first_s": 25 * SLOW,
          "run.join_s": 20 * SLOW, "run.grace_s": 2 * SLOW, "run.pause_planned_s": 0.2, "run.pause_crash_s": 0.2,
          "run.round_seconds": 600, "run.checkpoint_steps": 4, "run.epochs": 3, "data.repeats": 8, "data.batchsize": 1,
          "data.diff_reg_batch_ratio": 1, "data.global_batchsize": 4, "run.val_pairs": 1, "run.amp": "off",
          "run.patience_s": 60 * SLOW, "data.img_size": 8, "run.picture_every": 0}
STEPS_PER_EPOCH = 12


def launch(folder, ranks, faults=(), more=(), cwd=None, root=ROOT, **changes):
    """Start bash_train_multi_nodes.sh on a tiny training in `folder`. Returns the process; its output is in log.txt.

    cwd: another folder to start it from, by the script's relative path. root: of the code.
    Whatever ends this script ends the launch too, with all that it has started (tests/launching.py).
    """
    own = json.loads((folder / "settings.json").read_text()) if (folder / "settings.json").exists() else {}
    settings = {**{key.replace(".", "__"): value for key, value in {**SCALED, **own}.items()}, **changes}
    environment = launcher_environment(ranks, FAULT_DIR=str(folder))
    if faults:
        environment.update(FAULTS=json.dumps([{"id": "fault", **fault} for fault in faults]),
                           PYTHONPATH=str(Path(__file__).parent / "inject"))
    script = root / "bash_train_multi_nodes.sh"
    command = ["bash", os.path.relpath(script, cwd) if cwd else script, *arguments(folder, *more, **settings)]
    with open(folder / "log.txt", "a") as log:
        return launching.start(command, cwd=cwd or root, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(process, seconds=600):
    """Exit code of a launch; a launch that does not end is killed with all it started, and that is an error."""
    try:
        return process.wait(seconds * SLOW)
    except subprocess.TimeoutExpired:
        launching.end(process)
        raise


def end_all():
    """Kill all launches of this process, and whatever they have left; no fork server of the process itself."""
    for process in list(launching.STARTED):
        launching.end(process)


def family(pid):
    """A process and all its descendants."""
    pids = [pid]
    for parent in pids:
        pids += children(parent)
    return pids


def run_of(folder):
    return folder / "Models/demo_om_net"


def rank_pid(folder, rank, attempt=0):
    """Process number of a rank once it has started, else None."""
    starts = [line for line in read_lines(run_of(folder) / f"rank{rank}.jsonl")
              if line["event"] == "start" and line["attempt"] == attempt]
    return starts[-1]["pid"] if starts else None


def steps_done(folder, attempt=None):
    """Number of the last step that rank 0 has logged, -1 before the first."""
    return max([line["step"] for line in read_lines(run_of(folder) / "rank0.jsonl")
                if line["event"] == "step" and attempt in (None, line["attempt"])], default=-1)


def ends(folder):
    """How each attempt ended: {attempt: its line of attempts.jsonl}."""
    return {line["attempt"]: line for line in read_lines(run_of(folder) / "attempts.jsonl") if line["event"] == "end"}


def final_weights(folder, epochs=SCALED["run.epochs"]):
    """SHA-256 of weights and averaged weights after the last epoch, None if the run did not get there."""
    path = run_of(folder) / "manifest.json"
    entries = json.loads(path.read_text())["checkpoints"] if path.exists() else {}
    last = next((name for name, entry in entries.items() if entry["epoch"] == epochs), None)
    if last is None:
        return None
    content = load(run_of(folder) / last)
    ema = {f"average {name}": tensor for name, tensor in content.get("ema", {}).items()}
    return weights_sha256({**content["model"], **ema})


def resumed_at(folder, launch_number=1):
    """The step from which a later launch went on, None without one. A launch that finds all epochs done keeps no record
    of itself but its attempt."""
    path = run_of(folder) / f"launches/{launch_number:04d}/launch.json"
    begins = [line for line in read_lines(run_of(folder) / "attempts.jsonl") if line["event"] == "begin"]
    if path.exists():
        return json.loads(path.read_text())["step"]
    return begins[launch_number]["durable"] if launch_number < len(begins) else None


def new_folder(parent, name, **settings):
    """A folder of its own for a run, on the data that all runs of `parent` share. settings: of each launch in it."""
    folder = parent / name
    folder.mkdir(parents=True)
    if not (parent / "data").exists():
        make_data(parent)
    (folder / "data").symlink_to(parent / "data")
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    (folder / "settings.json").write_text(json.dumps(dotted))
    return folder


def prepare(parent):
    """Prepare the data of `parent` once for all its runs. Returns the settings of a run that reads the cache."""
    cache = parent / "cache"
    if not cache.exists():
        if not (parent / "data").exists():
            make_data(parent)
        words = arguments(parent, data__cache=cache, data__img_size=SCALED["data.img_size"])
        command = [sys.executable, ROOT / "OM_prepare.py", *words, "--workers", 1]
        launching.run(command, cwd=ROOT, check=True)
    return {"data__cache": str(cache), "data__root": str(parent / "data")}
