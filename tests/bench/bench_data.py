"""How fast prepared volumes load, how much memory they take, and whether a training waits for them.

    python tests/bench/bench_data.py [--volumes 256] [--steps 60]

cache_vs_nibabel, cache_vs_monai: samples/s of 128^3 volumes as float32 tensors in [0, 1], in batches of 2. The
training's own loader reads the prepared cache; it is compared with nibabel reading the .nii.gz files in one process
(decompressed and scaled to [0, 1], nothing resampled) and with MONAI's PersistentDataset in a DataLoader. Cache and
MONAI have their best number of workers, nibabel has none: in as many processes as there are cores it is that much
faster. Each method has its own process; they take turns, with all files in the page cache; figures are medians.
Without MONAI its figure is nan in the list and null in the JSON.
pss_growth: memory of 8 loader workers against 1, as proportional set sizes (pages shared by processes count once),
minus that of the same workers before they read anything; each worker reads every volume.
data_wait_share: share of phase "data" in the steps of the hippocampus config, after the first ten. The phase ends when
the batch is on its way to the device, so it includes the leak monitor (1 ms).
Real hippocampus volumes come from ../shared/data/hippocampus if present, else synthetic ones stand in.
"""
import argparse
import gzip
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
import torch
from common import ROOT, hippocampus
from tqdm import tqdm

from Dataloader.dataset import as_float, make_loader, read_ahead, read_datasets
from Dataloader.grids import rescale
from Dataloader.synthetic import make_subject
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import PLANNED_RESTART
from Supervisor.attempts import read_lines

SIDE, BATCH, ROUNDS, DIFFERENT = 128, 2, 7, 6
TARGETS = {"cache_vs_nibabel": (30, "least"), "cache_vs_monai": (2, "least"), "pss_growth": (0.10, "most"),
           "data_wait_share": (0.01, "most")}
# A training's own loader in a process of its own; says when its workers have started, and when they have read all.
WORKERS = """
import sys, time
from Dataloader.dataset import make_loader, read_datasets, read_ahead
from Runtime.config import load_config
if __name__ == "__main__":
    cfg = load_config(sys.argv[1], sys.argv[2:])
    dataset = read_datasets(cfg)[0]
    loader = make_loader(dataset, [], cfg)
    for batch in read_ahead(loader, 1):
        pass
    print("started", flush=True)
    sys.stdin.readline()
    # Batches go to the workers in turn: each volume once for each of them.
    workers = cfg["data.num_workers"]
    loader.batch_sampler[:] = [[(0, index)] for index in range(len(dataset)) for _ in range(workers)]
    for batch in read_ahead(loader, 1):
        pass
    print("read", flush=True)
    sys.stdin.readline()
"""


def prepare(config, overrides):
    words = [word for override in overrides for word in ("--set", override)]
    done = subprocess.run([sys.executable, "OM_prepare.py", "--config", config, *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"OM_prepare.py ended with {done.returncode}: {done.stdout}")


def make_volumes(folder, count):
    """128^3 volumes as int16 .nii.gz; the same few contents under many names. Returns the config's overrides."""
    (folder / "data").mkdir()
    for number in tqdm(range(count), "writing volumes", file=sys.stderr, leave=False):
        path = folder / f"data/subject_{number:04d}.nii.gz"
        if number < DIFFERENT:
            image = np.rint(make_subject(number, (SIDE,) * 3)["image"] * 1000).astype(np.int16)
            # Like the files of other tools: level 1 is what FSL and nibabel write.
            path.write_bytes(gzip.compress(nibabel.Nifti1Image(image, np.eye(4)).to_bytes(), 1))
        else:
            os.link(folder / f"data/subject_{number % DIFFERENT:04d}.nii.gz", path)
    return [f"data.root={folder}/data", f"data.cache={folder}/cache", f"run.logs={folder}/Logs", "data.name=bench",
            "data.expect_samples=0", "data.train_ids=", "data.val_ids=", "data.val_fraction=0", f"data.img_size={SIDE}"]


# ---------------------------------------------------------------------------------------------------------------------
# Samples per second
# ---------------------------------------------------------------------------------------------------------------------

def by_cache(cfg, workers, ahead=0):
    dataset = read_datasets(cfg)[0]
    lists = [[(0, index) for index in range(first, first + BATCH)] for first in range(0, len(dataset), BATCH)]
    loader = make_loader(dataset, lists, {**cfg, "data.num_workers": workers})
    return lambda: (as_float(images) for images, *_ in read_ahead(loader, ahead))


def by_nibabel(paths):
    def batches():
        for first in range(0, len(paths), BATCH):
            arrays = [np.asarray(nibabel.load(path).dataobj) for path in paths[first:first + BATCH]]
            yield torch.from_numpy(np.stack([rescale(array, 0, 1000) for array in arrays])[:, None])
    return batches


def by_monai(paths, folder, workers):
    """The same volumes, prepared by MONAI and kept by its PersistentDataset; None where MONAI is not installed."""
    try:
        from monai.data import DataLoader, PersistentDataset
        from monai.transforms import Compose, EnsureTyped, LoadImaged, ScaleIntensityRangePercentilesd
    except ImportError:
        return None
    steps = Compose([LoadImaged("image", ensure_channel_first=True), EnsureTyped("image"),
                     ScaleIntensityRangePercentilesd("image", 0.5, 99.5, 0, 1, clip=True)])
    dataset = PersistentDataset([{"image": str(path)} for path in paths], steps, cache_dir=folder / "monai")
    options = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)
    return lambda: (batch["image"] for batch in loader)


WAYS = {"cache, no worker": lambda cfg, paths, folder: by_cache(cfg, 0),
        "cache, a thread ahead": lambda cfg, paths, folder: by_cache(cfg, 0, 4),
        "cache, 2 workers": lambda cfg, paths, folder: by_cache(cfg, 2),
        ".nii.gz by nibabel": lambda cfg, paths, folder: by_nibabel(paths[:DIFFERENT]),
        "MONAI, no worker": lambda cfg, paths, folder: by_monai(paths, folder, 0),
        "MONAI, 2 workers": lambda cfg, paths, folder: by_monai(paths, folder, 2)}


def one_way(name, overrides, folder):
    """In a process of its own, as in a training: for each line of input a pass over the volumes; prints samples/s."""
    paths = sorted((folder / "data").iterdir())[:24 * DIFFERENT]
    cfg = load_config(ROOT / "Config/config_om.yaml", [*overrides, f"data.train_ids=0-{len(paths) - 1}"])
    batches = WAYS[name](cfg, paths, folder)
    print("ready" if batches else "not installed", flush=True)
    for _ in sys.stdin:
        started, count = time.perf_counter(), 0
        for images in batches():
            count += len(images)
            assert images.dtype == torch.float32 and images.shape[1:] == (1, SIDE, SIDE, SIDE), name
        print(count / (time.perf_counter() - started), flush=True)


def speed(overrides, folder):
    """Samples/s of the cache over that of nibabel and of MONAI; all ways take turns."""
    processes = {name: subprocess.Popen([sys.executable, __file__, "--way", name, str(folder), *overrides], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for name in WAYS}
    for name, process in list(processes.items()):
        if process.stdout.readline().strip() != "ready":
            processes.pop(name).communicate()
    found = {name: [] for name in processes}
    for _ in tqdm(range(2 + ROUNDS), "rounds", file=sys.stderr, leave=False):
        for name, process in processes.items():
            process.stdin.write("again\n")
            process.stdin.flush()
            found[name].append(float(process.stdout.readline()))
    for process in processes.values():
        process.communicate()
    # The first two rounds fill caches, start workers and let malloc learn the sizes.
    found = {name: statistics.median(rates[2:]) for name, rates in found.items()}
    print(text_table(["128^3 volumes as float32", "samples/s"], found.items(), [None, ".1f"]) + "\n")
    best = {key: max((value for name, value in found.items() if key in name), default=float("nan"))
            for key in ("cache", "nibabel", "MONAI")}
    return best["cache"] / best["nibabel"], best["cache"] / best["MONAI"]


# ---------------------------------------------------------------------------------------------------------------------
# Memory of workers, waiting of a training
# ---------------------------------------------------------------------------------------------------------------------

def workers_pss(pid):
    """Proportional set size of the loader workers of a process, in MiB. Python's resource tracker is none of them."""
    total = 0
    for child in " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            total += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{child}/smaps_rollup").read_text(), re.M)[1])
    return total / 1024


def memory_of(workers, overrides, folder):
    """PSS of the workers in MiB: before they have read anything, and when each has read everything."""
    script, found = folder / "workers.py", []
    script.write_text(WORKERS)
    words = [*overrides, f"data.num_workers={workers}", "data.prefetch_factor=1"]
    process = subprocess.Popen([sys.executable, script, ROOT / "Config/config_om.yaml", *words], text=True, cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    for word in ("started", "read"):
        if process.stdout.readline().strip() != word:
            raise RuntimeError(f"the workers' process ended with {process.wait()}")
        before, now = -1, workers_pss(process.pid)
        while now != before:  # they are still importing
            time.sleep(2)
            before, now = now, workers_pss(process.pid)
        found.append(now)
        process.stdin.write("go on\n")
        process.stdin.flush()
    process.wait(timeout=60)
    return found


def growth(overrides, folder):
    found = {workers: memory_of(workers, overrides, folder) for workers in (1, 8)}
    rows = [[workers, idle, full, full - idle] for workers, (idle, full) in found.items()]
    header = ["workers", "started, MiB", "have read all, MiB", "difference"]
    print(text_table(header, rows, [None, ".0f", ".0f", ".0f"]) + "\n")
    return (found[8][1] - found[8][0]) / (found[1][1] - found[1][0]) - 1


def wait_share(folder, steps):
    """Share of the steps of a real training in which it waits for data; and milliseconds of the phases."""
    config = "Config/config_hippocampus.yaml"
    overrides = [f"data.cache={folder}/hippocampus", f"run.models={folder}/Models", f"run.logs={folder}/Logs",
                 *hippocampus(folder / "standing_in")]
    prepare(config, overrides)
    words = [word for override in overrides for word in ("--set", override)]
    done = subprocess.run([sys.executable, "OM_train_3modes.py", "--config", config, *words,
                           "--max-steps-before-restart", str(steps + 10)], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    if done.returncode != PLANNED_RESTART:
        raise RuntimeError(f"the training ended with {done.returncode}: {done.stdout}")
    log = next((folder / "Models").glob("*/rank0.jsonl"))
    spent = [line["spent"] for line in read_lines(log) if line["event"] == "step"][10:]
    phases = {name: sum(line.get(name, 0) for line in spent) for name in dict.fromkeys(sum(map(list, spent), []))}
    whole = sum(phases.values())
    rows = [[name, 1e3 * seconds / len(spent), 100 * seconds / whole] for name, seconds in phases.items()]
    print(text_table(["phase of a step", "ms", "%"], rows, [None, ".2f", ".2f"]) + "\n")
    return phases["data"] / whole


def main():
    parser = argparse.ArgumentParser(description="Speed, memory and waiting of the data path.")
    parser.add_argument("--volumes", type=int, default=256, help="128^3 volumes in the cache (256; 2 MB each)")
    parser.add_argument("--steps", type=int, default=60, help="steps of the hippocampus config (60)")
    parser.add_argument("--way", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        return one_way(args.way[0], args.way[2:], Path(args.way[1]))
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), "Config/config_om.yaml"
        share = wait_share(folder, args.steps)
        overrides = make_volumes(folder, args.volumes)
        prepare(config, overrides)
        grown = growth(overrides, folder)
        result = dict(zip(TARGETS, (*speed(overrides, folder), grown, share)))
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, value in result.items():
        target, word = TARGETS[name]
        met = value >= target if word == "least" else value <= target
        print(f"{name} = {value:.4g}, target at {word} {target}: {'met' if met else 'NOT met'}")
    print("\n" + json.dumps({name: None if math.isnan(value) else round(value, 5) for name, value in result.items()}))


if __name__ == "__main__":
    main()
