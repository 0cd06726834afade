"""Volumes on the training grid, from NIfTI files to batches."""
import atexit
import multiprocessing
import os
import signal
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from Dataloader.datalist import read_datalist, read_pairs
from Dataloader.sampler import batches, epoch_order, epoch_pair_count, epoch_pairs, steps_left
from Dataloader.volume_io import normalise, read_label, read_volume, to_grid
from Runtime.errors import InputError


def read_image(path, size, spacing_mm):
    """One volume on the training grid: (1, *size) float32 in [0, 1]."""
    array, affine = read_volume(path, len(size))
    return torch.from_numpy(to_grid(normalise(array), affine, size, spacing_mm)[0])[None]


def read_labels(path, size, spacing_mm):
    """One label image on the training grid: (1, *size) int16, nearest neighbour."""
    array, affine = read_label(path, len(size))
    return torch.from_numpy(np.ascontiguousarray(to_grid(array, affine, size, spacing_mm, order=0)[0]))[None]


class VolumeDataset(Dataset):
    """Volumes addressed as (position, index): the position in the epoch keys the random draws, the index is the volume.

    With in_memory all volumes are read at once, which also finds every bad file before the training starts.
    """

    def __init__(self, items, size, spacing_mm, in_memory, what="volumes"):
        self.items, self.size, self.spacing_mm = items, size, spacing_mm
        self.images = None
        if in_memory:
            self.images = [self.read(i) for i in tqdm(range(len(items)), f"reading {what}", unit="vol", leave=False)]

    def __len__(self):
        return len(self.items)

    def read(self, index):
        return read_image(self.items[index]["image"], self.size, self.spacing_mm)

    def __getitem__(self, address):
        position, index = address
        image = self.read(index) if self.images is None else self.images[index]
        return image, position, index


def make_loader(dataset, batch_list, cfg):
    """A DataLoader over ready-made batches of (position, index); a batch is (images, positions, indices)."""
    workers = 0 if cfg["data.in_memory"] else cfg["data.num_workers"]
    options = {}
    if workers:
        # spawn: a forked worker inherits locks of the accelerator's driver in whatever state they are.
        options = {"prefetch_factor": cfg["data.prefetch_factor"], "multiprocessing_context": "spawn",
                   "worker_init_fn": leave_signals_to_the_rank}
    return DataLoader(dataset, batch_sampler=batch_list, num_workers=workers, **options)


def leave_signals_to_the_rank(worker):
    """A scheduler signals every process of a job; the rank saves and leaves, and needs its workers until then."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # torch compares later with the parent that it finds then, and an orphan would wait for work for ever.
    if os.getppid() != multiprocessing.parent_process().pid:
        sys.exit(1)


@atexit.register
def end_workers():
    """multiprocessing ends workers by SIGTERM, which they do not hear, and would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch takes the death of a worker for an error
    for worker in multiprocessing.active_children():
        worker.kill()


def epoch_batches(cfg, dataset, listed, progress, share, ranks):
    """What a rank does from here to the end of the epoch.

    Returns: iterator of (volumes, pairs), each the step's list of batches (images, positions, indices); in a batch of
    pairs moving and fixed alternate.
    """
    seed, epoch, mine = cfg["run.seed"], progress["epoch"], (ranks["rank"], ranks["world"])
    steps = steps_left(cfg, len(dataset), listed, share, progress["samples"], progress["pairs"])
    count = epoch_pair_count(cfg, len(dataset), listed, share)
    order = epoch_order(seed, epoch, len(dataset), cfg["data.repeats"])
    order = batches(order, share["samples"], share["sample_batch"], progress["samples"], *mine)
    drawn = epoch_pairs(seed, epoch, len(dataset), count, listed)
    drawn = batches(drawn, share["pairs"], share["pair_batch"], progress["pairs"], *mine)
    flat = [[(2 * position + side, pair[side]) for position, pair in batch for side in (0, 1)] for batch in drawn]
    volumes = iter(make_loader(dataset, order[:steps * share["sample_batches"]], cfg))
    pairs = iter(make_loader(dataset, flat[:steps * share["pair_batches"]], cfg))
    return zip(zip(*[volumes] * share["sample_batches"]), zip(*[pairs] * share["pair_batches"]))


def read_datasets(cfg, headers_only=False):
    """Datalists and data sets of a config.

    headers_only: look at the lists but read no volume yet.
    Returns: training VolumeDataset, validation VolumeDataset (maybe empty), and the listed training pairs or None.
    Raises InputError if a folder is missing or there are fewer training volumes than data.expect_samples.
    """
    root, dims = cfg["data.root"], cfg["model.dims"]
    train = read_datalist(root, dims, cfg["data.train_ids"])
    val = read_datalist(root, dims, cfg["data.val_ids"]) if cfg["data.val_ids"] else []
    if len(train) < cfg["data.expect_samples"]:
        raise InputError(f"{root}: {len(train)} training volumes, but data.expect_samples says "
                         f"{cfg['data.expect_samples']}; restore the missing files, or lower the key if the smaller "
                         f"set is meant.")
    shared = sorted({item["id"] for item in train} & {item["id"] for item in val})
    if shared:
        raise InputError(f"data.val_ids: {shared[0]} is in the training set too; held-out volumes must be held out, so "
                         f"narrow data.train_ids or data.val_ids.")
    if len(train) < 2:
        raise InputError(f"{root}: one training volume is not enough, mode 3 needs pairs; add volumes or widen "
                         f"data.train_ids.")
    listed = read_pairs(cfg["data.pair_list"], train) if cfg["data.pair_list"] else None
    grid = (cfg["data.img_size"], cfg["data.spacing_mm"], cfg["data.in_memory"] and not headers_only)
    return (VolumeDataset(train, *grid, what="training volumes"),
            VolumeDataset(val, *grid, what="validation volumes"), listed)
