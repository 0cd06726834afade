"""A training small enough for tests: 16^3 synthetic volumes, a few thousand weights, milliseconds per step."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from Dataloader.dataset import epoch_batches
from Dataloader.nifti import read_label, write_volume
from Dataloader.synthetic import write_dataset
from Runtime import checkpoint
from Runtime.config import load_config
from Supervisor.attempts import read_lines

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "Config/config_demo.yaml")
SETTINGS = {
    "model.channels": "[8, 8, 16]", "model.attention_width": 16, "model.attention_depth": 1, "model.attention_heads": 2,
    "model.field_stride": 1, "diffusion.grids": "[4, 8]", "contrastive.embedding": 8, "contrastive.queue": 8,
    "registration.window": 5, "registration.scales": 2, "registration.gate": 2, "data.train_ids": "0-5",
    "data.val_ids": "6-7", "data.img_size": 16, "data.batchsize": 2, "data.diff_reg_batch_ratio": 2, "data.repeats": 2,
    "data.expect_samples": 6, "run.epochs": 2, "run.checkpoint_steps": 2, "run.val_pairs": 1, "run.device": "cpu",
    # One thread: the same rounding in every process, whatever else the machine does.
    "run.threads": 1,
    # On a CPU that emulates bfloat16 a step takes ten times as long; tests of bfloat16 ask for it.
    "run.amp": "off",
}
# Changes for trainings of which only the bits, the counts and the events matter: 8^3, one pass, no pictures. A fifth of
# the time.
QUICK = {"data__img_size": 8, "model__channels": "[4, 4, 8]", "model__rec_num": 1, "run__picture_every": 0}
# What a launch takes over from the one before, beside the weights: a rate, an average, and Adam's moments of each mode,
# of which the third is left out of some steps.
CARRIED = {"optim__schedule": "cosine", "optim__average": 0.9, "optim__moments": "per_mode", "registration__gate": 0.0}
# Changes for trainings that ranks share: three steps of four samples and two pairs, of which some have labels, also of
# one step. run.checksum_every: weights compared before each step.
SHARED = {**QUICK, "model__rec_num": 2, "data__batchsize": 1, "data__global_batchsize": 4, "run__epochs": 1,
          "run__checksum_every": 1, "run__checkpoint_steps": 1, "run__val_pairs": 3, "run__pause_planned_s": 0,
          "run__pause_crash_s": 0, "optim__average": 0.9, "optim__moments": "per_mode", "loss__dice": 0.01,
          "data__label_ids": "1-2,4", "loss__segment": 0.1, "model__structures": 6, "model__descents": 2,
          "model__fine_descents": 1}
PICTURED = {**SHARED, "run__picture_every": 1}  # of two ranks with ddp, one training for several files
MASKED = (1, 4, 6)  # volumes that `add_masks` gives a mask
FAST_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def settings(folder, **changes):
    """Overrides of a tiny run inside `folder`; changes are written with a double underscore for the dot."""
    values = {**SETTINGS, "data.root": folder / "data", "run.models": folder / "Models", "run.logs": folder / "Logs"}
    values.update({key.replace("__", "."): value for key, value in changes.items()})
    return [f"{key}={value}" for key, value in values.items()]


def arguments(folder, *more, **changes):
    """Command line of a tiny training run inside `folder`."""
    return ["--config", CONFIG, *more, *[word for item in settings(folder, **changes) for word in ("--set", item)]]


def options(data, folder, *more, **changes):
    """Command line of a tiny training on the volumes in `data`, which others may read too, with outputs in `folder`."""
    return arguments(data, *more, **{"run__models": folder / "Models", "run__logs": folder / "Logs", **changes})


def config(folder=Path("."), **changes):
    return load_config(CONFIG, settings(folder, **changes))


def begin(cfg, folder=Path("no_run"), ranks=None):
    """A training that is set up, and continued where its folder holds a checkpoint; its loop has not begun. A Run."""
    import OM_train_3modes as om  # here, as few tests need it
    return om.set_up(cfg, om.parse_arguments(["--config", CONFIG]), ranks or om.launch.Ranks(), folder)


def first_batches(run):
    """The batches of the next step: lists for modes 1 and 2, and for mode 3."""
    return next(iter(epoch_batches(run.cfg, run.dataset, run.listed, run.progress, run.split, run.ranks)))


def make_data(folder, count=8, size=16, dims=3):
    write_dataset(folder / "data", range(count), size, dims=dims)
    return folder


def run_prepare(words, page=False, workers=False):
    """OM_prepare.py with this command line, in this process, without its page and workers: those take most of a short
    run. Returns: its exit code."""
    import pytest  # here, because the benchmarks and faults of a cluster use this file without it

    import OM_prepare

    def one_by_one(function, tasks, _workers, _what, begin, arguments, meanwhile):
        begin(*arguments)
        for task in tasks:
            result = function(*task)
            meanwhile()
            yield task, result

    with pytest.MonkeyPatch.context() as patch:
        if not workers:
            patch.setattr(OM_prepare, "WORKER", {})
            patch.setattr(OM_prepare, "run_tasks", one_by_one)
        if not page:
            patch.setattr(OM_prepare, "write_report", lambda *arguments: "no page")
        return OM_prepare.main(words)


def prepare(data, folder, **changes):
    """The cache of a tiny run's volumes, in `folder`, which it creates. Returns: the folder."""
    assert run_prepare(arguments(data, data__cache=folder, **changes)) == 0
    return folder


def add_masks(folder):
    """Give the volumes of MASKED in a data folder a mask, where their labels are. Returns: the folder."""
    path = folder / "data/dataset.json"
    content = json.loads(path.read_text())
    for number in MASKED:
        name = f"subject_{number:04d}.nii.gz"
        label, affine = read_label(folder / "data/labelsTr" / name)
        write_volume(folder / "data/masksTr" / name, (label > 0).astype(np.uint8), affine)
        entry = next(entry for entry in content["training"] if entry["image"].endswith(name))
        entry["mask"] = f"./masksTr/{name}"
    path.write_text(json.dumps(content))
    return folder


def log_lines(folder, event, rank=0):
    """Events of one kind in a rank's log of the tiny run inside `folder`, oldest first."""
    path = folder / f"Models/demo_om_net/rank{rank}.jsonl"
    return [line for line in read_lines(path) if line["event"] == event]


def newest_state(folder):
    """What the newest checkpoint of the tiny run inside `folder` holds."""
    run = folder / "Models/demo_om_net"
    return checkpoint.load(run / checkpoint.newest(run))


def final_sha256(folder):
    """SHA-256 of the weights in the newest checkpoint of the tiny run inside `folder`."""
    return checkpoint.weights_sha256(newest_state(folder)["model"])


def kill_in(arguments, folder, step):
    """Train in a process of its own inside `folder`, and kill it once the run has done that step."""
    from tests import warm
    folder.mkdir(exist_ok=True)
    with warm.ranks(1, folder / "log", [arguments]) as (process,):
        until = time.monotonic() + 120
        while not [line for line in log_lines(folder, "step") if line["step"] >= step]:
            assert process.is_alive() and time.monotonic() < until, "the run ended before it could be killed"
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL


def launcher_environment(ranks, **more):
    """Environment for bash_train_multi_nodes.sh outside any job: this interpreter, one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and name not in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FAULTS")}
    return {**kept, "RANKS": str(ranks), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **more}


def stand_in(path, does):
    """An executable in place of a program: a shell script. Returns its path as text."""
    path.write_text(f"#!/usr/bin/env bash\n{does}\n")
    path.chmod(0o755)
    return str(path)


def write_large(path):
    """A volume that needs more memory than `run_in_little_memory` gives: 400^3 voxels of int16, a small file."""
    large = np.zeros((400, 400, 400), np.int16)
    large[:200] = 7
    write_volume(path, large, np.eye(4))


LITTLE_MEMORY = """import resource, sys, {program}, Inference.augment_volumes, Inference.register_pairs
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 400 * 2 ** 20
resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
sys.exit({program}.main(sys.argv[1:]))"""


def run_in_little_memory(program, *words):
    """Run a program, by its module's name, that may map only 400 MiB beyond its imports, as a process of its own.

    A process that has run other programs keeps memory of theirs. With one thread: where the stack of another one does
    not fit, libgomp ends the process. Returns: the CompletedProcess.
    """
    return subprocess.run([sys.executable, "-c", LITTLE_MEMORY.format(program=program), *map(str, words)], cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
