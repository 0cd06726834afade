"""Data sets and batches: volumes on the training grid, from a prepared cache or from files; and which data they are."""
import atexit
import collections
import dataclasses
import errno
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_convert
from tqdm import tqdm

from Dataloader.cache import Rows, for_this_user, open_cache, settings, some
from Dataloader.datalist import list_volumes, read_pairs, read_ranges, select, split_volumes, subject_key
from Dataloader.formats import size_and_time
from Dataloader.nifti import read_header
from Dataloader.prepare import KINDS, on_grid
from Dataloader.sampler import (
    INPUTS,
    batches,
    epoch_order,
    epoch_pair_count,
    epoch_pairs,
    pair_rule,
    steps_left,
    with_labelled,
)
from Runtime import agree, watchdog
from Runtime.device import UNFIT
from Runtime.errors import InputError
from Runtime.files import csv_text
from Runtime.global_batch import most_pairs
from Runtime.launch import Ranks
from Runtime.workers import starts_processes

ALONE = Ranks()
PIECE = 2 ** 18  # voxels: 1 MiB of float32 stays in a processor's cache between two operations
SHARED, MOST_SOCKET_PATH = "/dev/shm", 107  # where torch's workers put batches; most bytes of a socket path on Linux
NO_LABELS = -2 ** 15  # value of every voxel in the label map of a volume without labels
COLUMNS = ("id", "subject", "split", "bytes")  # what is stored about a volume; bytes: size of the image file
MOST_LABELS = 64  # limit for loss.dice


def as_float(images):
    """Stored images (uint8 0 .. 255, or 0.0 .. 1.0) as float32 in [0, 1], on their device. Any shape."""
    if images.dtype != torch.uint8:
        return images.float()
    if images.device.type != "cpu":
        return images.float().mul_(1 / 255)
    result = torch.empty(images.shape)
    for values, stored in zip(result.view(-1).split(PIECE), images.reshape(-1).split(PIECE)):
        values.copy_(stored).mul_(1 / 255)
    return result


@dataclasses.dataclass(eq=False, repr=False)
class VolumeDataset:
    """Volumes by number: images[i], labels[i] and masks[i] are (D, H, W), images with several channels (C, D, H, W)."""

    items: list  # from the datalist or the cache; a label or mask is read only if the item has one
    images: object
    labels: object
    rule: dict | None  # which pairs are permitted, from `pair_rule`
    hold: object = None  # an open lock file that lives as long as this object, so that the cache is not removed
    masks: object = None
    channels: int = 1
    found_labels: list | None = None  # from `find_labels`
    labelled: dict | None = None  # from `labelled_volumes`
    loader: DataLoader | None = None  # made once by `epoch_batches`

    def __post_init__(self):
        self.subjects = torch.tensor([subject_key(item["subject"]) for item in self.items], dtype=torch.int64)  # (N,)

    def __len__(self):
        return len(self.items)

    def image(self, index):
        """One image: (C, *size) float32 in [0, 1]."""
        return as_float(stacked(self.images, [index], self.channels)[0])

    def label(self, index):
        """One label map: (1, *size) int16; None if the volume has none."""
        if not self.items[index]["label"]:
            return None
        return torch.from_numpy(np.array(self.labels[index], np.int16))[None]


class Files:
    """Volumes of one kind, by number, read from their NIfTI files at each use. kind: "image", "label" or "mask"."""

    def __init__(self, items, kind, cfg):
        self.items, self.kind, self.cfg = items, kind, settings(cfg)  # the rest of the config need not go to workers

    def __getitem__(self, index):
        return on_grid(self.items[index], self.cfg, (self.kind,))[self.kind]


class Maps:
    """The label maps or masks of all volumes, by number: (D, H, W) int16.

    A volume without one gets NO_LABELS, or a mask of ones: all of it counts. kind: "label" or "mask". size: of the
    grid.
    """

    def __init__(self, dataset, kind, size):
        self.arrays, self.missing = (dataset.labels, NO_LABELS) if kind == "label" else (dataset.masks, 1)
        self.has = np.array([bool(item[kind]) for item in dataset.items])
        self.size = size

    def __getitem__(self, index):
        if not self.has[index]:
            return np.full(self.size, self.missing, np.int16)
        return np.asarray(self.arrays[index], np.int16)


def wanted_maps(cfg):
    """The kinds of maps that mode 3 needs: none, "label", "mask" or both."""
    needs = {"label": cfg["loss.dice"] > 0, "mask": cfg["registration.masks"]}
    return tuple(kind for kind, needed in needs.items() if needed)


# ---------------------------------------------------------------------------------------------------------------------
# Batches: read ahead by loader workers or by a thread
# ---------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Batches(Dataset):
    """The part of a data set that goes to loader workers: batches by (position, index) or (position, index, "pair").

    The position in the epoch's order keys the random draws; the index selects the volume.
    """

    images: object
    channels: int  # of an image
    maps: dict  # {kind: Maps}, read only for the volumes of pairs

    def __getitems__(self, addresses):
        positions, indices, *of_pairs = zip(*addresses)
        maps = {kind: stacked(self.maps[kind], indices) for kind in self.maps if of_pairs}
        images = stacked(self.images, indices, self.channels)
        return images, torch.tensor(positions), torch.tensor(indices), maps


def stacked(arrays, indices, channels=1):
    """Arrays of one shape as a batch: (B, 1, *shape), or (B, C, *spatial) if their first axis is several channels."""
    batch = torch.from_numpy(np.stack([arrays[index] for index in indices]))
    return batch.unsqueeze(1) if channels == 1 else batch


def make_loader(dataset, batch_list, cfg):
    """A DataLoader over given batches.

    batch_list: list of lists of addresses, see Batches. Replace its content between two passes, and the workers live as
    long as the loader.
    Yields: images as stored (B, C, *size), positions (B,), indices (B,), maps {kind: (B, 1, *size) int16}.
    """
    workers, options = workers_of(cfg), {"collate_fn": default_convert}
    if workers:
        # spawn: a forked worker inherits the locks of the accelerator's driver, which another thread may hold.
        options = {"collate_fn": hand_over, "prefetch_factor": cfg["data.prefetch_factor"],
                   "multiprocessing_context": "spawn", "persistent_workers": True,
                   "worker_init_fn": leave_signals_to_the_rank}
    maps = {kind: Maps(dataset, kind, cfg["data.img_size"]) for kind in wanted_maps(cfg)}
    return DataLoader(Batches(dataset.images, dataset.channels, maps), batch_sampler=batch_list,
                      num_workers=workers, **options)


def hand_over(batch):
    """A worker's batch, moved to shared memory. torch would move it in a thread, whose failure nobody learns of."""
    images, positions, indices, maps = batch
    try:
        for tensor in (images, positions, indices, *maps.values()):
            tensor.share_memory_()
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise InputError(f"{SHARED} is too small for the batches that loader workers read ahead: make room there, or "
                         "set data.num_workers to 0.") from error
    return batch


def starting_workers():
    """Context for what starts loader workers, see `starts_processes`."""
    return starts_processes("data.num_workers", "set it to 0")


def workers_of(cfg):
    """How many processes read batches: none if all volumes are in memory."""
    return 0 if cfg["data.in_memory"] and not cfg["data.cache"] else cfg["data.num_workers"]


def require_room_for_workers(cfg):
    """Raise InputError if a worker could not hand over a batch: it would fail in a torch thread, without a message.

    A worker needs semaphores and room in /dev/shm, and a socket in the temporary folder, with a short path.
    """
    if not workers_of(cfg):
        return
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(f"loader workers need a temporary folder for their sockets ({error.strerror}): export TMPDIR "
                         "with a writable one, or set data.num_workers to 0.") from error
    if len(folder) > MOST_SOCKET_PATH - len("/pymp-12345678/listener-12345678"):
        raise InputError(f"TMPDIR is {folder}, too long a path for the sockets of loader workers: export TMPDIR=/tmp, "
                         "or set data.num_workers to 0.")
    need = workers_of(cfg) * cfg["data.prefetch_factor"] * batch_bytes(cfg, cfg["data.batchsize"], most_pairs(cfg))
    free = shutil.disk_usage(SHARED).free if os.path.isdir(SHARED) else 0
    if sys.platform == "linux" and free < need:
        raise InputError(f"{SHARED} has {free / 2 ** 20:.0f} MiB free and the loader workers of one rank need "
                         f"{need / 2 ** 20:.0f}: make room there, or set data.num_workers to 0.")
    with starting_workers():
        multiprocessing.get_context("spawn").Lock()


def batch_bytes(cfg, samples, pairs):
    """Bytes of the larger batch that is read: that many samples, or pairs with their maps."""
    image = cfg["data.channels"] * np.dtype(cfg["data.dtype"] if cfg["data.cache"] else np.float32).itemsize
    pair = 2 * (image + len(wanted_maps(cfg)) * np.dtype(np.int16).itemsize)
    return math.prod(cfg["data.img_size"]) * max(samples * image, pairs * pair)


def read_ahead(loader, ahead, prepare=lambda number, batch: batch):
    """prepare(number, batch) of each batch that a loader yields, numbered from 0.

    ahead: how many batches a thread reads and prepares before they are needed; 0: no thread. If the loader has workers,
    they read ahead instead, and each batch is prepared when it is needed.
    Raises RuntimeError if a worker is killed.
    """
    if loader.num_workers or not ahead:
        try:
            with starting_workers():
                loaded = iter(loader)
            for number, batch in enumerate(loaded):
                yield prepare(number, batch)
        except (ConnectionError, EOFError) as error:  # these look like the death of another rank
            raise RuntimeError("a DataLoader worker was killed while it handed over a batch "
                               f"({type(error).__name__})") from error
        return
    prepared = itertools.starmap(prepare, enumerate(loader))
    thread = ThreadPoolExecutor(1, thread_name_prefix="read_ahead")
    try:
        waiting = collections.deque(thread.submit(next, prepared, None) for _ in range(ahead))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, prepared, None))
            yield batch
    finally:  # also if an epoch ends early
        thread.shutdown(cancel_futures=True)


def leave_signals_to_the_rank(worker):
    """Ignore signals in a worker.

    A scheduler signals every process of a job, and a terminal every process of a command. The rank then saves and
    exits, and needs its workers until then.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # torch records the parent only later: if the rank has died by then, the worker would wait for work forever.
    if os.getppid() != multiprocessing.parent_process().pid:
        sys.exit(1)


@atexit.register
def end_workers():
    """Kill the workers at exit: multiprocessing sends SIGTERM, which they ignore, and then waits forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch reports the death of a worker as an error
    for worker in multiprocessing.active_children():
        worker.kill()


def epoch_batches(cfg, dataset, listed, progress, split, ranks, draw=None, inputs=INPUTS):
    """The batches of one rank from here to the end of the epoch.

    dataset: the training set. listed: pairs, or None. progress: epoch, samples and pairs done. split: from
    `split_step`. draw: a function of the rng keys of a batch of volumes, for slow draws; a thread may call it early.
    inputs: as in `steps_left`; of others the lists are empty, and nothing is read or drawn.
    Returns: iterator over steps of (volumes, pairs), two lists of batches (images as stored, positions, subjects, x).
    For volumes, x is the result of `draw` or None; for pairs, the maps that `make_loader` yields. In a batch of
    pairs, moving and fixed alternate.
    """
    seed, epoch = cfg["run.seed"], progress.epoch
    rank, world_size = ranks.rank, ranks.world_size
    volumes, pairs, sample_batches, pair_batches = [], [], 0, 0
    if "volumes" in inputs:
        order = epoch_order(seed, epoch, len(dataset), cfg["data.repeats"])
        sample_batches = split.sample_batches
        volumes = batches(order, split.samples, split.sample_batch, progress.samples, rank, world_size)
    if "pairs" in inputs:
        count = epoch_pair_count(cfg, len(dataset), listed, split, progress.samples, progress.pairs)
        drawn_pairs = epoch_pairs(seed, epoch, len(dataset), count, listed, dataset.rule)
        if dataset.labelled:
            drawn_pairs = with_labelled(drawn_pairs, cfg, epoch, **dataset.labelled)
        pair_batches = split.pair_batches
        for batch in batches(drawn_pairs, split.pairs, split.pair_batch, progress.pairs, rank, world_size):
            pairs.append([(2 * position + side, pair[side], "pair") for position, pair in batch for side in (0, 1)])
    # One list, in the order of the steps, so that one set of workers reads both.
    in_order = []
    for step in range(steps_left(cfg, len(dataset), listed, split, progress.samples, progress.pairs, inputs)):
        in_order += volumes[step * sample_batches:(step + 1) * sample_batches]
        in_order += pairs[step * pair_batches:(step + 1) * pair_batches]
    if dataset.loader is None:
        dataset.loader = make_loader(dataset, [], cfg)
    dataset.loader.batch_sampler[:] = in_order
    # On a CPU the step uses all cores; do not prefetch.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = cfg["run.device"] == "cpu" or accelerator is None or accelerator.type in UNFIT
    per_step = sample_batches + pair_batches

    def prepare(number, batch):
        images, positions, indices, maps = batch
        if number % per_step >= sample_batches:
            return images, positions, dataset.subjects[indices], maps
        drawn = draw([(seed, epoch, position) for position in positions.tolist()]) if draw else None
        return images, positions, dataset.subjects[indices], drawn

    loaded = read_ahead(dataset.loader, 0 if on_cpu else cfg["data.prefetch_factor"] * per_step, prepare)
    return ((step[:sample_batches], step[sample_batches:]) for step in zip(*[loaded] * per_step))


# ---------------------------------------------------------------------------------------------------------------------
# From a config to data sets
# ---------------------------------------------------------------------------------------------------------------------

def read_datasets(cfg, headers_only=False, ranks=ALONE, inputs=INPUTS):
    """The data sets of a config: from the cache of data.cache, else from the files of data.root.

    headers_only: read the lists but no volumes; do not lock, check or copy the cache. ranks: of the training; rank 0
    draws the progress bars, and each rank checks a part of the cache. inputs: as in `steps_left`; without pairs, what
    only these need is neither read nor required.
    Returns: training VolumeDataset, whose found_labels, if loss.dice is used, are those in this rank's part of the
    label maps; validation VolumeDataset, maybe empty; the listed training pairs or None.
    Raises InputError if a folder is missing, if the cache is incomplete or was made with other settings, if there are
    fewer training volumes than data.expect_samples, if loss.dice is used and fewer than two have labels, or if
    registration.masks is set and none has a mask.
    """
    root, cache = cfg["data.cache"] or cfg["data.root"], None
    if not headers_only:
        require_room_for_workers(cfg)
    if cfg["data.cache"]:
        cache = open_cache(root, cfg, None if headers_only else ranks)
        items = cache["items"]
    else:
        with for_this_user(f"data.root {root}"):
            items = list_volumes(root, cfg["data.subject_pattern"], cfg["data.channels"], quiet=ranks.rank > 0)
    train, val = split_volumes(root, items, cfg)
    paired = "pairs" in inputs
    require_usable(root, train, val, cfg, cache, paired)
    if cfg["loss.dice"]:
        train = with_usable_labels(root, train, cfg)
    if paired and cfg["registration.masks"] and not any(item["mask"] for item in train):
        raise InputError(f"{root}: registration.masks is true, but none of {len(train)} training volumes has a "
                         "mask: name masks in the data list (and run OM_prepare.py again if you use a cache), or "
                         "set registration.masks to false.")
    rule = pair_rule(cfg, train) if paired else None
    listed = read_pairs(cfg["data.pair_list"], train) if paired and cfg["data.pair_list"] else None
    source = {"cache": cache, "cfg": cfg, "in_memory": cfg["data.in_memory"] and not headers_only,
              "show": ranks.rank == 0}
    kinds = ("image", *(wanted_maps(cfg) if paired else ()))
    train_set = make_dataset(train, rule, "training volumes", kinds, **source)
    train_set.labelled = labelled_volumes(train, cfg)
    if cfg["loss.dice"] and not headers_only:
        train_set.found_labels = find_labels(train_set, ranks, cfg)
    try:
        val_rule = pair_rule(cfg, val) if val else None
    except InputError as error:
        raise InputError(f"{root}: the {len(val)} held-out volumes: {str(error).removesuffix('.')}; or hold out more "
                         "of them (data.val_fraction, data.val_ids), or none (data.val_fraction=0).") from error
    kinds = ("image", "label", *["mask"] * cfg["registration.masks"])
    val_set = make_dataset(val, val_rule, "validation volumes", kinds, **source)
    return train_set, val_set, listed


def require_usable(root, train, val, cfg, cache, paired):
    """Raises InputError for too few volumes, a subject in both sets, or, without a cache, an unusable first file.

    paired: whether a mode takes pairs of training volumes.
    """
    if len(train) < cfg["data.expect_samples"]:
        refused = f" ({len(cache['refused'])} were refused when it was prepared)" if cache and cache["refused"] else ""
        held = f" ({len(val)} more are held out)" if val else ""
        raise InputError(f"{root}: {len(train)} training volumes{refused}, but data.expect_samples says "
                         f"{cfg['data.expect_samples']}{held}; restore the missing files, or lower the key if you "
                         "mean the smaller set.")
    shared = sorted({item["subject"] for item in train} & {item["subject"] for item in val})
    if shared:
        raise InputError(f"{root}: {shared[0]} is in the training set and in that of data.val_ids or of the list's "
                         "validation; held-out subjects must be held out: narrow data.train_ids or data.val_ids, or "
                         "correct the list.")
    if len(train) < (2 if paired else 1):
        few = "one training volume is not enough, because mode 3 needs pairs" if train else "no training volume is left"
        raise InputError(f"{root}: {few}; add volumes, widen data.train_ids or lower data.val_fraction.")
    for items in (train, val):
        if items and not cache:
            read_header(items[0]["image"], cfg["model.dims"], cfg["data.channels"])


def with_usable_labels(root, items, cfg):
    """The training volumes; only those that data.label_ids selects keep their label. items: dicts, not changed.

    Raises InputError if fewer than two keep one, because loss.dice compares the labels of a pair.
    """
    usable = {item["id"] for item in select(root, items, cfg["data.label_ids"]) if item["label"]}
    if len(usable) < 2:
        permitted = f" that data.label_ids {cfg['data.label_ids']} permits" if cfg["data.label_ids"] else ""
        raise InputError(f"{root}: loss.dice {cfg['loss.dice']} compares the labels of pairs, but {len(usable)} of "
                         f"{len(items)} training volumes have labels{permitted}, and two are needed; name more (and "
                         "run OM_prepare.py again if you use a cache), or set loss.dice to 0.")
    return [item if item["id"] in usable else {**item, "label": None} for item in items]


def labelled_volumes(items, cfg):
    """Arguments for `with_labelled`: the labelled volumes and the rule for their pairs; None without such pairs.

    items: of the training, after `with_usable_labels`. Raises InputError if data.labelled_pairs is set without
    loss.dice, or if no pair of labelled volumes is permitted.
    """
    if not cfg["data.labelled_pairs"]:
        return None
    if not cfg["loss.dice"]:
        raise InputError(f"data.labelled_pairs={cfg['data.labelled_pairs']} draws more pairs of labelled volumes, "
                         "but loss.dice is 0, so their labels are not used: set data.labelled_pairs to 0, or "
                         "loss.dice to a value above 0.")
    labelled = [number for number, item in enumerate(items) if item["label"]]
    return {"labelled": labelled, "rule": pair_rule(cfg, [items[number] for number in labelled])}


def find_labels(dataset, ranks, cfg):
    """The labels for loss.dice that occur in this rank's part of the label maps: sorted list of ints.

    Background (0) does not count, nor do labels that registration.labels leaves out.
    """
    labelled = [number for number, item in enumerate(dataset.items) if item["label"]]
    found, wanted = set(), cfg["registration.labels"].strip()
    spans = read_ranges(wanted, "registration.labels") if wanted else [range(1, 2 ** 15)]
    for number in tqdm(labelled[ranks.rank::ranks.world_size], "finding labels", unit="vol", leave=False, delay=1,
                       disable=ranks.rank > 0):
        watchdog.goes_on()
        found.update(np.unique(dataset.labels[number]).tolist())
    return [label for label in sorted(found) if label > 0 and any(label in span for span in spans)]


def make_dataset(items, rule, what, kinds, cache, cfg, in_memory, show):
    """The VolumeDataset of some items, with voxels from the cache, from memory, or from files at each use.

    rule: from `pair_rule`. what, show: text of the progress bar, and whether to draw it. kinds: those to read into
    memory. cache: from `open_cache`, or None. in_memory: read all volumes now.
    """
    if cache:
        # Pages of a copy in memory count as this process's own; maps kept open look like a leak until all are in use.
        images, labels, masks = (Rows(cache["folder"], kind, items, keep=not cache["staged"]) for kind in KINDS)
    elif in_memory:
        # Reading all at once also finds every bad file before the training starts.
        volumes = []
        for item in tqdm(items, f"reading {what}", unit="vol", leave=False, disable=not show):
            watchdog.goes_on()
            volumes.append(on_grid(item, cfg, kinds))
        images, labels, masks = ([volume[kind] for volume in volumes] for kind in KINDS)
    else:
        images, labels, masks = (Files(items, kind, cfg) for kind in KINDS)
    return VolumeDataset(items, images, labels, rule, cache and cache["hold"], masks, cfg["data.channels"])


# ---------------------------------------------------------------------------------------------------------------------
# Which data a run trains on: what a checkpoint stores about them, and whether a run may continue with other data
# ---------------------------------------------------------------------------------------------------------------------

def describe_data(cfg, dataset, held_out):
    """A run's data as a checkpoint stores them, as JSON: the name, and COLUMNS of each volume, not where the files lie.

    dataset, held_out: training and validation VolumeDataset.
    """
    rows = []
    for split, volumes in (("train", dataset), ("val", held_out)):
        for item in volumes.items:
            size = item["bytes"] if "bytes" in item else size_and_time(item["image"])[0]
            rows.append([item["id"], item["subject"], split, size])
    return json.dumps({"name": cfg["data.name"], "volumes": rows})


def with_gone(before, now):
    """The data of a resumed run, with the volumes that it was trained on and no longer has: these may not be held out
    later. before, now: from `describe_data`, or this function."""
    rows, kept = rows_of(now), by_id(now)
    gone = [[row["id"], row["subject"], "gone", row["bytes"]] for identity, row in by_id(before).items()
            if row["split"] in ("train", "gone") and identity not in kept]
    return json.dumps({**json.loads(now), "volumes": rows + gone})


def as_csv(described):
    """The volumes of `describe_data` as a CSV table for people."""
    return csv_text([COLUMNS, *rows_of(described)])


def rows_of(described):
    """The values of COLUMNS for each volume. described: from `describe_data`."""
    return json.loads(described)["volumes"]


def require_same_everywhere(ranks, described):
    """Raises InputError, on every rank, if any rank reads different data from rank 0. Every rank calls this."""
    digests = agree.gather(ranks, torch.tensor(agree.digest(described))).tolist()
    others = [str(rank) for rank, value in enumerate(digests) if value != digests[0]]
    if others:
        raise InputError(f"rank {', '.join(others)} of {len(digests)} reads different data from rank 0: data.root "
                         "and data.cache must be the same on all nodes and must not change while ranks start; start "
                         "again.")


def agree_on_labels(ranks, own, cfg):
    """The labels that loss.dice compares: the same list on all ranks, so that the tensors of a step have one shape.

    own: sorted list of the labels that this rank has found, see `find_labels`. Every rank calls this.
    Returns: sorted list of ints. Raises InputError, on every rank, for no labels, for more than MOST_LABELS, and if the
    network would learn to segment a different number of labels.
    """
    labels = sorted(set(itertools.chain(*agree.gather_objects(ranks, own))))
    if not labels:
        only = f" among registration.labels {cfg['registration.labels']}" if cfg["registration.labels"] else ""
        raise InputError(f"loss.dice {cfg['loss.dice']}: the label maps of the training volumes hold no label but the "
                         f"background{only}; correct the key or the maps, or set loss.dice to 0.")
    if len(labels) > MOST_LABELS:
        raise InputError(f"loss.dice {cfg['loss.dice']}: the training volumes have {len(labels)} labels from "
                         f"{labels[0]} to {labels[-1]}, each of which takes memory; name at most {MOST_LABELS} "
                         f"by registration.labels, such as \"{labels[0]}-{labels[MOST_LABELS - 1]}\".")
    if cfg["loss.segment"] and cfg["model.structures"] != len(labels):
        shown = ", ".join(map(str, labels[:8])) + ", ..." * (len(labels) > 8)
        raise InputError(f"model.structures is {cfg['model.structures']}, but the label maps of the training volumes "
                         f"hold {len(labels)} labels ({shown}): set it to that number, or name those that count by "
                         "registration.labels.")
    return labels


def compare_data(before, now, path):
    """Check that a run may continue with the data it has now.

    before: from `describe_data` or `with_gone`. now: from `describe_data`. path: of the checkpoint.
    Returns: whether the order of the training volumes has changed; sentences about the changes.
    Raises InputError if fewer than half of the volumes have the same id and size (another data set with the same name),
    or if a subject or volume that was trained on is now held out (its scores would be too good).
    """
    name = json.loads(before)["name"]
    known, new = by_id(before), by_id(now)
    old = {identity: row for identity, row in known.items() if row["split"] != "gone"}
    same = [identity for identity in old if identity in new and old[identity]["bytes"] == new[identity]["bytes"]]
    if 2 * len(same) < len(old):
        raise InputError(f"{path} was trained on different data with the same name {name}: of its {len(old)} "
                         f"volumes, {len(same)} are among the {len(new)} of this data set; give this data set its "
                         "own data.name, or start a new run with --fresh.")
    trained, held_out = ([row for row in rows.values() if row["split"] in splits]
                         for rows, splits in ((known, ("train", "gone")), (new, ("val",))))
    # By subjects, else by volumes: they may have other subjects now.
    moved = sorted({row["subject"] for row in held_out} & {row["subject"] for row in trained}
                   or {row["id"] for row in held_out} & {row["id"] for row in trained})
    if moved:
        advice = "set the data.* keys or the list back (data.val_fraction=0 if none was held out)"
        renamed = [(identity, row["subject"], new[identity]["subject"]) for identity, row in known.items()
                   if {identity, row["subject"]} & {*moved} and row["subject"] != new.get(identity, row)["subject"]]
        if renamed:
            identity, was, by_now = renamed[0]
            advice = (f"subjects have other names now ({identity} is of {by_now}, and was of {was}), from another "
                      "data.subject_pattern or an update: set the key back, or give a list whose column subject has "
                      "the names in data.csv of the run")
        raise InputError(f"{path} was trained on {some(moved)}, which would now be held out for validation: {advice}, "
                         "or start a new run with --fresh.")
    # Besides the seed, the order of an epoch depends on the ids of the training volumes alone.
    old_order, new_order = ({identity for identity, row in rows.items() if row["split"] == "train"}
                            for rows in (old, new))
    changes = {"added": new.keys() - old.keys(), "gone": old.keys() - new.keys(),
               "of other content": (old.keys() & new.keys()) - set(same),
               "of another subject": {each for each in old.keys() & new.keys()
                                      if old[each]["subject"] != new[each]["subject"]},
               "trained on instead of held out": (new_order & old.keys()) - old_order}
    said = [f"volumes {what}: {len(names)} ({some(sorted(names))})" for what, names in changes.items() if names]
    return old_order != new_order, said


def seen_by(before, now):
    """Ids of the volumes that are held out now and on which another run was trained, by id and size.

    before: of that run, from `describe_data` or `with_gone`. now: from `describe_data`.
    """
    trained = {(identity, size) for identity, _, split, size in rows_of(before) if split in ("train", "gone")}
    return sorted(identity for identity, _, split, size in rows_of(now)
                  if split == "val" and (identity, size) in trained)


def by_id(described):
    """{id: dict of COLUMNS}. described: from `describe_data`."""
    return {row[0]: dict(zip(COLUMNS, row)) for row in rows_of(described)}
