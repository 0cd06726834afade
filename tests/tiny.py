"""A training small enough for tests: 16^3 synthetic volumes, a few thousand weights, milliseconds per step."""
import json
import os
import subprocess
import sys
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
    "data.expect_samples": 6, "run.epochs": 2, "run.checkpoint_steps": 2, "run.val_pairs": 2, "run.device": "cpu",
    # One thread: the same rounding in every process, whatever else the machine does.
    "run.threads": 1,
    # On a CPU that emulates bfloat16 a step takes ten times as long; tests of bfloat16 ask for it.
    "run.amp": "off",
}
# Changes for trainings of which only the bits, the counts and the events matter: 8^3, no pictures. A third of the time.
QUICK = {"data__img_size": 8, "model__channels": "[4, 4, 8]", "run__picture_every": 0}
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


def final_sha256(folder):
    """SHA-256 of the weights in the newest checkpoint of the tiny run inside `folder`."""
    run = folder / "Models/demo_om_net"
    return checkpoint.weights_sha256(checkpoint.load(run / checkpoint.newest(run))["model"])


def launcher_environment(ranks, **more):
    """Environment for bash_train_multi_nodes.sh outside any job: this interpreter, one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and name not in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FAULTS")}
    return {**kept, "RANKS": str(ranks), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **more}


def write_large(path):
    """A volume that needs more memory than `run_in_little_memory` gives: 400^3 voxels of int16, a small file."""
    large = np.zeros((400, 400, 400), np.int16)
    large[:200] = 7
    write_volume(path, large, np.eye(4))


LITTLE_MEMORY = """import resource, sys, {program}, Inference.register_pairs
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 400 * 2 ** 20
resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
sys.exit({program}.main(sys.argv[1:]))"""


def run_in_little_memory(program, *words):
    """Run a program, by its module's name, that may map only 400 MiB beyond its imports, as a process of its own.

    A process that has run other programs keeps memory of theirs. Returns: the CompletedProcess.
    """
    return subprocess.run([sys.executable, "-c", LITTLE_MEMORY.format(program=program), *map(str, words)], cwd=ROOT,
                          capture_output=True, text=True)
