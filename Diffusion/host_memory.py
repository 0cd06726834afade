"""How much host memory a training will need on a node, estimated before it starts (Scripts/preflight/checks.py).

It counts what the kernel cannot drop: anonymous memory of the ranks and their loader workers, batches in shared memory,
and a cache staged in memory. Mapped files of a cache do not count: the kernel drops their pages when it needs room.
"""
import math
from pathlib import Path

import numpy as np
import torch

from Dataloader.staging import copy_of, expanded
from Runtime import memory
from Runtime.device import precision
from Runtime.errors import InputError
from Runtime.global_batch import split_step

GIB = 2 ** 30
# Measured on x86-64 Linux with torch 2.13.0+cpu, glibc's malloc and one thread a rank: the highest anonymous memory of
# trainings of 16^3 to 96^3 voxels and 50 thousand to 27 million parameters.
TRAINING = 125 * 2 ** 20  # bytes that the smallest training adds to a preflight: its modules, TensorBoard, pictures
WORKER = 190 * 2 ** 20  # bytes of a loader worker before it reads anything: 188 MiB measured
READING = 8  # volumes of the training grid in float32 held while one of that size is read from its file: 7.4 measured
# Peak of a step on a CPU, as a multiple of the activations kept for the backward pass: gradients of activations, fields
# and images in float32, scratch of oneDNN, gaps of malloc.
PEAK = {"bf16": 1.37, "off": 1.3}
LOCAL_MATCH = 1.12  # further factor with amp off and model.local_match: convolutions have 27 more channels
RECOMPUTED = 1.2  # further factor with model.use_checkpoint: the backward pass computes levels a second time
# Beside weights, gradients and moments, as a multiple of the weights, with two or more ranks on a CPU: gradients in
# float64 that are being reduced; with fsdp also gathered blocks, and their casts to bf16 in every pass.
BETWEEN_RANKS = {"ddp": 1.25, "zero1": 1.25, "fsdp": 5}
IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files take memory


def memory_estimate(cfg, world_size, ranks, process, parameters, held=0, activations=0, staged=0, on_cpu=False,
                    writes=False, adams=1):
    """Host memory of a node, in bytes.

    world_size: ranks of the run. ranks: those on this node. process: bytes of one process without the training.
    parameters: their number in the network. held, activations, staged: of `held_bytes`, `activation_bytes` (0 without a
    CPU training) and `staged_bytes`. on_cpu: the network is trained on the host. writes: whether rank 0, which writes
    checkpoints, is on this node. adams: number of sets of moments, see `adam_names` of Diffusion/optim.py.
    Returns: {"rank", "activations", "worker", "workers" (their number in a rank), "batches" (read ahead, of one rank),
    "checkpoint", "staged", "total": ranks x (rank + activations + workers x worker + batches) + checkpoint + staged}.
    """
    split = split_step(cfg, world_size)
    voxels = math.prod(cfg["data.img_size"])
    cached = bool(cfg["data.cache"])
    workers = 0 if cfg["data.in_memory"] and not cached else cfg["data.num_workers"]
    reading = 0 if cached else READING * 4 * voxels * cfg["data.channels"]
    # Steps whose volumes are in memory: the one being computed, and what is read ahead. Each worker reads ahead
    # batches; without workers, a thread beside an accelerator reads ahead whole steps.
    per_step = split.sample_batches + split.pair_batches
    steps = 1 + cfg["data.prefetch_factor"] * (workers / per_step if workers else not on_cpu)
    volumes = split.sample_batches * split.sample_batch + 2 * split.pair_batches * split.pair_batch
    stored = np.dtype(cfg["data.dtype"]).itemsize if cached else 4
    batches = round(steps * volumes * voxels * cfg["data.channels"] * stored)
    maps = 2 * split.pair_batches * split.pair_batch * map_kinds(cfg)
    batches += round(steps * maps * voxels * 2)  # int16
    weights = 4 * parameters
    rank = process + TRAINING + held + (0 if workers else reading)
    # 1: they are initialised on the host.
    rank += round(weights * (copies(cfg, world_size, split, adams) if on_cpu else 1))
    # A copy of weights, moments and average while it is written.
    checkpoint = (1 + 2 * adams + bool(cfg["optim.average"])) * weights if writes else 0
    worker = WORKER + reading
    total = ranks * (rank + activations + workers * worker + batches) + checkpoint + staged
    return {"rank": rank, "activations": activations, "worker": worker, "workers": workers, "batches": batches,
            "checkpoint": checkpoint, "staged": staged, "total": total}


def map_kinds(cfg):
    """How many kinds of maps, labels and masks, the training reads with the images of a pair."""
    return (cfg["loss.dice"] > 0) + cfg["registration.masks"]


def copies(cfg, world_size, split, adams=1):
    """Bytes that a rank on a CPU holds as a multiple of the weights' bytes: weights, gradients, moments, sums."""
    strategy = cfg["run.strategy"]
    multiple = 2 + 2 * adams
    if world_size > 1:
        own = {"ddp": multiple, "zero1": 2 + 2 * adams / world_size, "fsdp": multiple / world_size}[strategy]
        multiple = own + BETWEEN_RANKS[strategy]
    if cfg["optim.average"]:
        multiple += 1 / world_size if strategy == "fsdp" else 1
    if max(split.sample_batches, split.pair_batches) > 1:  # gradients of several batches add up in a second copy
        multiple += 2 if cfg["run.exact_sums"] else 1
    return multiple


def activation_bytes(cfg, world_size, modes):
    """Bytes that a step on a CPU takes at its peak, beside weights and their gradients. Takes some seconds to count.

    modes: MODES of the training script.
    """
    from Diffusion.cost import mode_costs, training_volumes  # here: only a CPU training needs these imports
    labels = training_volumes(cfg)[3] if cfg["loss.dice"] else 1
    _, costs = mode_costs(cfg, split_step(cfg, world_size).pair_batch, modes, None, labels)
    amp = precision(cfg["run.amp"], torch.device("cpu"))
    factor = PEAK[amp] * (RECOMPUTED if cfg["model.use_checkpoint"] else 1)
    factor *= LOCAL_MATCH if amp == "off" and cfg["model.local_match"] else 1
    return round(factor * max(cost["kept"] for cost in costs.values()))


def held_bytes(cfg):
    """Bytes of the volumes that a rank keeps with data.in_memory: images in float32, labels and masks in int16."""
    if not cfg["data.in_memory"] or cfg["data.cache"]:
        return 0
    from Dataloader.dataset import read_datasets, wanted_maps  # here: scipy and nibabel take a second to import
    try:
        train, val, _ = read_datasets(cfg, headers_only=True)
        images = len(train) + len(val)
        maps = sum(bool(item["label"]) for item in val.items)
        maps += sum(bool(item[kind]) for item in train.items for kind in wanted_maps(cfg))
    except InputError:  # the training reports it; the files may arrive before it starts
        images, maps = cfg["data.expect_samples"], 0
    return math.prod(cfg["data.img_size"]) * (4 * images * cfg["data.channels"] + 2 * maps)


def staged_bytes(cfg):
    """Bytes of memory that data.stage will take on this node: none on a disk, and none for files that are there."""
    place = expanded(cfg["data.stage"])
    if not cfg["data.cache"] or not cfg["data.stage"] or file_system(place) not in IN_MEMORY:
        return 0
    from Dataloader.cache import read_manifest
    try:
        manifest = read_manifest(cfg["data.cache"], cfg)
    except InputError:
        return 0
    copy = copy_of(manifest, place)
    return sum(size for name, (size, _) in manifest["files"].items() if not (copy / name).is_file())


def file_system(path):
    """Type of the file system that a path is on, as /proc/mounts names it: "ext4", "tmpfs"; "" where it is unknown."""
    path = Path(path).resolve()
    mounts = Path("/proc/mounts")
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.is_file() else []
    above = [(len(point), number, kind) for number, (_, point, kind, *_) in enumerate(lines)
             if path.is_relative_to(point.replace("\\040", " "))]
    return max(above)[2] if above else ""


def host_room(cfg, ranks, variables):
    """Bytes of host memory that the ranks of this node may take together.

    The least of what the machine and its control groups have free, Slurm's limit, and run.memory_limit_gb of each rank.
    """
    room = [memory.measure(torch.device("cpu"))["host_free"] or math.inf]
    if variables.get("SLURM_MEM_PER_NODE", "0") != "0":  # "0" asks for all of it
        room.append(int(variables["SLURM_MEM_PER_NODE"]) * 2 ** 20)
    if cfg["run.memory_limit_gb"]:
        room.append(cfg["run.memory_limit_gb"] * GIB * ranks)
    return min(room)
