"""Whether a change keeps every bit: six steps of training and one registered pair, at another commit and here.

    python tests/same_bits.py [COMMIT]

COMMIT is the parent of this working tree's commit by default. Both sides get the same volumes and the same command
lines, each in a process of its own with one thread. Printed is the SHA-256 of the weights, of Adam's moments and of the
field of each side; the exit code is 1 where they differ. A golden curve within one percent misses most slips.
"""
import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
TRAINING = {"model.channels": "[4, 4, 8]", "model.attention_width": 16, "model.attention_depth": 1,
            "model.attention_heads": 2, "model.field_stride": 1, "diffusion.grids": "[4, 8]",
            "contrastive.embedding": 8, "contrastive.queue": 8, "registration.window": 5, "registration.scales": 2,
            "registration.gate": 2, "data.train_ids": "0-5", "data.val_ids": "6-7", "data.img_size": 8,
            "data.batchsize": 2, "data.diff_reg_batch_ratio": 2, "data.repeats": 2, "data.expect_samples": 6,
            "optim.lr": 1e-3, "optim.average": 0.9, "run.epochs": 1, "run.checkpoint_steps": 2, "run.device": "cpu",
            "run.threads": 1, "run.amp": "off"}


def python(code, *words):
    """Run Python in the folder of some code; its output is shown where it fails."""
    done = subprocess.run([sys.executable, *words], cwd=code, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)})
    if done.returncode:
        sys.exit(f"{code}: {' '.join(words)}\n{done.stdout}{done.stderr}")


def hashed(arrays):
    """SHA-256 of arrays, in order."""
    sums = hashlib.sha256()
    for array in arrays:
        sums.update(np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()


def tensors(value):
    """Every tensor in nested dicts and lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value.numpy()
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def hashes(code, data, out):
    """{what: SHA-256} of a training and a pair. code, data: folders. out: folder of the outputs, which is made."""
    settings = {**TRAINING, "data.root": data, "run.models": out / "Models", "run.logs": out / "Logs"}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    python(code, "OM_train_3modes.py", "--config", "Config/config_demo.yaml", *changes)
    checkpoint = next(out.glob("Models/*/000001_*.pth"))
    fixed, moving = (str(data / f"imagesTr/subject_000{number}.nii.gz") for number in (6, 7))
    python(code, "OM_register.py", "--fixed", fixed, "--moving", moving, "--model", str(checkpoint), "--affine",
           "--refine", "5", "--no-picture", "--device", "cpu", "--out", str(out / "pair"))
    content = torch.load(checkpoint, weights_only=True)
    return {"weights": hashed(tensors(content["model"])), "moments": hashed(tensors(content["optimizer"])),
            "average": hashed(tensors(content["ema"])), "queue": hashed(tensors(content["queue"])),
            "field": hashed([nibabel.load(out / "pair/field.nii.gz").get_fdata()])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD^", help="(%(default)s)")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
        if archive.returncode:
            sys.exit(f"error: {commit} is no commit of this repository")
        (folder / "before").mkdir()
        subprocess.run(["tar", "x", "-C", folder / "before"], input=archive.stdout, check=True)
        python(ROOT, "-c", "import sys; from Dataloader.synthetic import write_dataset; "
               "write_dataset(sys.argv[1], range(8), 8)", str(folder / "data"))
        one = hashes(folder / "before", folder / "data", folder / "out_before")
        other = hashes(ROOT, folder / "data", folder / "out_after")
    for name, value in one.items():
        print(f"{name:>8}: {value[:16]} {'=' if value == other[name] else '!='} {other[name][:16]}")
    return int(one != other)


if __name__ == "__main__":
    sys.exit(main())
