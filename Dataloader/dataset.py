"""Volumes on the training grid, from a prepared cache or from NIfTI files, to batches."""
import atexit
import collections
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from Dataloader.cache import Rows, open_cache, settings
from Dataloader.datalist import list_volumes, read_pairs, split_volumes, subject_key
from Dataloader.nifti import read_header
from Dataloader.prepare import on_grid
from Dataloader.sampler import all_pairs, batches, epoch_order, epoch_pair_count, epoch_pairs, pair_rule, steps_left
from Runtime.errors import InputError

ALONE = {"rank": 0, "world_size": 1}
PIECE = 2 ** 18  # voxels: 1 MiB of float32 stays in a processor's cache from one operation to the next


def as_float(images):
    """Images as they are stored (uint8 0 .. 255, or 0.0 .. 1.0) as float32 in [0, 1], on their device."""
    if images.dtype != torch.uint8:
        return images.float()
    if images.device.type != "cpu":
        return images.float().mul_(1 / 255)
    found = torch.empty(images.shape)
    for values, stored in zip(found.view(-1).split(PIECE), images.reshape(-1).split(PIECE)):
        values.copy_(stored).mul_(1 / 255)
    return found


class VolumeDataset:
    """Volumes by number.

    items: from the datalist or the cache. images, labels: indexed by number, each a (D, H, W) array; labels may be
    None. rule: which pairs are permitted, from `pair_rule`. hold: what keeps the cache from being removed meanwhile.
    subjects: (N,) int64, whose each volume is, by `subject_key`.
    """

    def __init__(self, items, images, labels, rule, hold=None):
        self.items, self.images, self.labels, self.rule, self.loader = items, images, labels, rule, None
        self.subjects = torch.tensor([subject_key(item["subject"]) for item in items], dtype=torch.int64)
        self.hold = hold

    def __len__(self):
        return len(self.items)

    def image(self, index):
        """(1, *size) float32 in [0, 1]."""
        return as_float(torch.from_numpy(np.array(self.images[index]))[None])

    def label(self, index):
        """(1, *size) int16; None where the volume has none."""
        if not self.items[index]["label"]:
            return None
        return torch.from_numpy(np.array(self.labels[index], np.int16))[None]


class Files:
    """Volumes of one kind, read from their NIfTI files each time."""

    def __init__(self, items, kind, cfg):
        self.items, self.kind, self.cfg = items, kind, settings(cfg)

    def __getitem__(self, index):
        return on_grid(self.items[index], self.cfg, (self.kind,))[self.kind]


# ---------------------------------------------------------------------------------------------------------------------
# Batches: what is read ahead, and by whom
# ---------------------------------------------------------------------------------------------------------------------

class Batches(Dataset):
    """What a loader worker has of a data set: batches of (position, index); the position keys the random draws."""

    def __init__(self, images):
        self.images = images

    def __getitems__(self, addresses):
        positions, indices = zip(*addresses)
        images = np.stack([self.images[index] for index in indices])[:, None]
        return torch.from_numpy(images), torch.tensor(positions), torch.tensor(indices)


def as_it_is(batch):
    return batch


def make_loader(dataset, batch_list, cfg):
    """A DataLoader over ready-made batches of (position, index); a batch is (images as stored, positions, indices).

    batch_list may be filled anew when it has been gone through: workers live as long as the loader.
    """
    workers = 0 if cfg["data.in_memory"] and not cfg["data.cache"] else cfg["data.num_workers"]
    options = {}
    if workers:
        # spawn: a forked worker inherits locks of the accelerator's driver in whatever state they are.
        options = {"prefetch_factor": cfg["data.prefetch_factor"], "multiprocessing_context": "spawn",
                   "persistent_workers": True, "worker_init_fn": leave_signals_to_the_rank}
    return DataLoader(Batches(dataset.images), batch_sampler=batch_list, collate_fn=as_it_is, num_workers=workers,
                      **options)


def read_ahead(loader, ahead):
    """What a loader yields; without workers, a thread reads `ahead` batches before they are asked for, if any."""
    if loader.num_workers or not ahead:
        try:
            yield from loader
        except (ConnectionError, EOFError) as error:  # which would look like the death of another rank
            raise RuntimeError("a DataLoader worker was killed while it handed over a batch "
                               f"({type(error).__name__})") from error
        return
    found, thread = iter(loader), ThreadPoolExecutor(1, thread_name_prefix="read_ahead")
    try:
        waiting = collections.deque(thread.submit(next, found, None) for _ in range(ahead))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, found, None))
            yield batch
    finally:  # of an epoch that is left early too
        thread.shutdown(cancel_futures=True)


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


def epoch_batches(cfg, dataset, listed, progress, split, ranks):
    """What a rank does from here to the end of the epoch.

    Returns: iterator of (volumes, pairs), each the step's list of batches (images as stored, positions, subjects); in a
    batch of pairs moving and fixed alternate.
    """
    seed, epoch, mine = cfg["run.seed"], progress["epoch"], (ranks["rank"], ranks["world_size"])
    steps = steps_left(cfg, len(dataset), listed, split, progress["samples"], progress["pairs"])
    count = epoch_pair_count(cfg, len(dataset), listed, split)
    order = epoch_order(seed, epoch, len(dataset), cfg["data.repeats"])
    volumes = batches(order, split["samples"], split["sample_batch"], progress["samples"], *mine)
    drawn = epoch_pairs(seed, epoch, len(dataset), count, listed, dataset.rule)
    drawn = batches(drawn, split["pairs"], split["pair_batch"], progress["pairs"], *mine)
    pairs = [[(2 * position + side, pair[side]) for position, pair in batch for side in (0, 1)] for batch in drawn]
    per_step = split["sample_batches"] + split["pair_batches"]
    if dataset.loader is None:
        dataset.loader = make_loader(dataset, [], cfg)
    # One list, in the order in which the steps want them, so that one set of workers reads both.
    both = ((volumes, split["sample_batches"]), (pairs, split["pair_batches"]))
    dataset.loader.batch_sampler[:] = [batch for step in range(steps) for kind, number in both
                                       for batch in kind[step * number:(step + 1) * number]]
    # Where the step needs the cores itself, a thread would only take them from it.
    on_cpu = cfg["run.device"] == "cpu" or not torch.accelerator.is_available()
    found = read_ahead(dataset.loader, 0 if on_cpu else cfg["data.prefetch_factor"] * per_step)
    found = ((images, positions, dataset.subjects[indices]) for images, positions, indices in found)
    return ((step[:split["sample_batches"]], step[split["sample_batches"]:]) for step in zip(*[found] * per_step))


# ---------------------------------------------------------------------------------------------------------------------
# From a config to data sets
# ---------------------------------------------------------------------------------------------------------------------

def read_datasets(cfg, headers_only=False, ranks=ALONE):
    """Data sets of a config: from the cache of data.cache, else from the files of data.root.

    headers_only: look at the lists but read no volume yet, and neither hold, check nor copy the cache. ranks: of the
    training; rank 0 draws the progress bars, and each checks a share of the cache.
    Returns: training VolumeDataset, validation VolumeDataset (maybe empty), and the listed training pairs or None.
    Raises InputError if a folder is missing, the cache is not that of the config or not whole, or there are fewer
    training volumes than data.expect_samples.
    """
    root, cache = cfg["data.cache"] or cfg["data.root"], None
    if cfg["data.cache"]:
        cache = open_cache(root, cfg, None if headers_only else ranks)
    items = cache["items"] if cache else list_volumes(root, cfg["data.subject_pattern"])
    train, val = split_volumes(root, items, cfg)
    require_usable(root, train, val, cfg, cache)
    rule = pair_rule(cfg, train)
    listed = read_pairs(cfg["data.pair_list"], train) if cfg["data.pair_list"] else None
    if cfg["data.pairing"] == "all":
        listed = all_pairs(len(train), rule)
    source = {"cache": cache, "cfg": cfg, "in_memory": cfg["data.in_memory"] and not headers_only,
              "show": ranks["rank"] == 0}
    return (make_dataset(train, rule, "training volumes", ("image",), **source),
            make_dataset(val, pair_rule(cfg, val) if val else None, "validation volumes", ("image", "label"), **source),
            listed)


def require_usable(root, train, val, cfg, cache):
    """Raises InputError for too few volumes, a subject on both sides, and, without a cache, an unusable first file."""
    if len(train) < cfg["data.expect_samples"]:
        refused = f" ({len(cache['refused'])} were refused when it was prepared)" if cache and cache["refused"] else ""
        held = f" ({len(val)} more are held out)" if val else ""
        raise InputError(f"{root}: {len(train)} training volumes{refused}, but data.expect_samples says "
                         f"{cfg['data.expect_samples']}{held}; restore the missing files, or lower the key if the "
                         "smaller set is meant.")
    shared = sorted({item["subject"] for item in train} & {item["subject"] for item in val})
    if shared:
        raise InputError(f"{root}: {shared[0]} is in the training set and in that of data.val_ids or of the list's "
                         "validation; held-out subjects must be held out: narrow data.train_ids or data.val_ids, or "
                         "correct the list.")
    if len(train) < 2:
        few = "one training volume is" if train else "no training volumes are"
        raise InputError(f"{root}: {few} not enough, mode 3 needs pairs; add volumes, widen data.train_ids or lower "
                         "data.val_fraction.")
    for items in (train, val):
        if items and not cache:
            read_header(items[0]["image"], cfg["model.dims"])


def make_dataset(items, rule, what, kinds, cache, cfg, in_memory, show):
    """A VolumeDataset of some items, and its voxels from the cache, from memory, or from files at each use."""
    if cache:
        place = {item["id"]: number for number, item in enumerate(cache["items"])}
        places = [[cache[column][place[item["id"]]] for item in items] for column in ("groups", "rows")]
        # Pages of a copy in memory would count as this process's own, and look like a leak while they are first used.
        rows = [Rows(cache["folder"], kind, *places, keep=not cache["staged"]) for kind in ("image", "label")]
        return VolumeDataset(items, *rows, rule, cache["hold"])
    if in_memory:
        # All at once also finds every bad file before the training starts.
        bar = tqdm(items, f"reading {what}", unit="vol", leave=False, disable=not show)
        read = [on_grid(item, cfg, kinds) for item in bar]
        return VolumeDataset(items, [found["image"] for found in read], [found["label"] for found in read], rule)
    return VolumeDataset(items, Files(items, "image", cfg), Files(items, "label", cfg), rule)
