"""Volumes on the training grid, from NIfTI files to batches."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from Dataloader.datalist import read_datalist, read_pairs
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
        options = {"prefetch_factor": cfg["data.prefetch_factor"], "multiprocessing_context": "spawn"}
    return DataLoader(dataset, batch_sampler=batch_list, num_workers=workers, **options)


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
