"""Provenance: each launch saves its config, commit, local changes, settings and package versions in the run folder.

    python -m Runtime.provenance        print the settings of this shell
"""
import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from Runtime import __version__
from Runtime.config import save_config
from Runtime.files import listed, write_file
from Runtime.run_lock import launch_files

# Environment variables that drivers, communication libraries and torch read.
SETTINGS = re.compile("(NCCL|RCCL|CCL|GLOO|UCX|FI|I_MPI|MPICH|MIOPEN|HSA|HIP|ROCR|CUDA|ZE|ZES|ONEAPI|SYCL|NEO|TORCH|"
                      "PYTORCH|OMP|MKL|KMP|MASTER|CLUSTER|PYTHONPATH)(_.*)?$")

MOST_NEW = 2 ** 20  # bytes of an untracked file; of a larger one only the name is kept


def settings():
    """{name: value} of the variables of this process that drivers, communication libraries and torch read."""
    return {name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)}


def git(*arguments, code=0):
    """Output of a git command in the code's folder that ends with exit code `code`; None if it does not, outside a
    checkout, or if git takes more than 30 s."""
    if not (Path(__file__).parents[1] / ".git").exists():  # installed, perhaps inside somebody's own checkout
        return None
    # Git refuses a checkout of another user, such as a shared one, although its code runs here anyway.
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True,
                              errors="replace", timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == code else None


def local_changes():
    """Diff of the code against its commit, with loaded modules that git does not track; "" if nothing differs.

    A checkout may hold any number of other untracked files, which take no part in the run.
    """
    root = Path(__file__).parents[1]
    # Not module.__file__: a lazy module may try to import something for it, and fail.
    files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    own = sorted({path for path in map(os.path.abspath, filter(None, files)) if path.endswith(".py")
                  and path.startswith(f"{root}{os.sep}") and "site-packages" not in path})
    unknown = git("ls-files", "--others", "--exclude-standard", "-z", "--", *own) if own else None
    changes = [git("diff", "HEAD")]
    for name in (unknown or "").split("\0")[:-1]:
        with contextlib.suppress(OSError):  # removed since it was loaded
            large = (root / name).stat().st_size > MOST_NEW
            changes.append(f"{name}: new, and too large to be kept\n" if large else
                           git("diff", "--no-index", "--", os.devnull, name, code=1))
    return "".join(filter(None, changes))


def described(mode):
    """What a run's report needs to know about a mode, as JSON. mode: one of the training script's MODES."""
    return {name: getattr(mode, name) for name in ("name", "weights", "curve", "terms", "clip_norm", "gate")}


def save_launch(run, cfg, step, modes):
    """Write <run>/launches/<n>/: config.yaml, launch.json and, if files differ from the commit, changes.diff.

    step: the step at which this launch starts. modes: of the training, see `described`.
    """
    launches = run / "launches"
    numbers = [int(path.name) for path in listed(launches) if re.fullmatch(r"\d+", path.name)]
    folder = launches / f"{max(numbers, default=-1) + 1:04d}"
    folder.mkdir(parents=True)
    save_config(cfg, folder / "config.yaml")
    names, versions = ["torch", "numpy", "nibabel", "pyyaml", "tensorboard", "tqdm", "scipy", "matplotlib"], {}
    names += [re.split(r"[^\w.-]", requirement)[0] for requirement in importlib.metadata.requires("torch") or []]
    for name in dict.fromkeys(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit, changes = git("rev-parse", "HEAD"), local_changes()
    job = {name: value for name, value in sorted(os.environ.items()) if re.match("SLURM_(JOB|NTASKS|NNODES)", name)}
    launch = {"started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "step": step,
              "command": [sys.executable, *sys.argv], "host": platform.node(), "version": __version__,
              "commit": commit and commit.strip(), "changed": bool(changes), "seed": cfg["run.seed"],
              "modes": [described(mode) for mode in modes], "python": platform.python_version(), "packages": versions,
              "settings": settings(), "job": job}
    write_file(folder / "launch.json", json.dumps(launch, indent=1) + "\n")
    if changes:
        write_file(folder / "changes.diff", changes)


def began_from(run):
    """--init-from of the launch of a run that made its first steps, "" if it had none, None if that is not recorded.

    It is the last one that started at step 0: those before it ended without a checkpoint.
    """
    try:
        launches = [json.loads(path.read_text()) for path in launch_files(run, "launch.json")]
        words = [launch["command"] for launch in launches if launch["step"] == 0][-1]
        options = argparse.ArgumentParser(add_help=False)
        options.add_argument("--init-from", default="")
        return options.parse_known_args(words)[0].init_from
    except (OSError, ValueError, LookupError, TypeError):
        return None


if __name__ == "__main__":
    for key, value in settings().items():
        print(f"  {key}={value}")
