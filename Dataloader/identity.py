"""Which data a run trains on: what a checkpoint stores about them, and whether a run may continue with other data."""
import itertools
import json

import torch

from Dataloader.cache import some
from Dataloader.formats import size_and_time
from Runtime import agree
from Runtime.errors import InputError
from Runtime.files import csv_text

COLUMNS = ("id", "subject", "split", "bytes")  # what is stored about a volume; bytes: size of the image file
MOST_LABELS = 64  # limit for loss.dice


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


def as_csv(described):
    """The volumes of `describe_data` as a CSV table for people."""
    return csv_text([COLUMNS, *volumes_of(described)])


def volumes_of(described):
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

    own: sorted list of the labels that this rank has found, see `dataset.find_labels`. Every rank calls this.
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

    before, now: from `describe_data`. path: of the checkpoint.
    Returns: whether the order of the training volumes has changed; sentences about the changes.
    Raises InputError if fewer than half of the volumes have the same id and size (another data set with the same name),
    or if a subject or volume that was trained on is now held out (its scores would be too good).
    """
    name = json.loads(before)["name"]
    old, new = by_id(before), by_id(now)
    same = [identity for identity in old if identity in new and old[identity]["bytes"] == new[identity]["bytes"]]
    if 2 * len(same) < len(old):
        raise InputError(f"{path} was trained on different data with the same name {name}: of its {len(old)} "
                         f"volumes, {len(same)} are among the {len(new)} of this data set; give this data set its "
                         "own data.name, or start a new run with --fresh.")
    trained, held_out = ([row for row in rows.values() if row["split"] == split]
                         for rows, split in ((old, "train"), (new, "val")))
    # By subjects, else by volumes: they may have other subjects now.
    moved = sorted({row["subject"] for row in held_out} & {row["subject"] for row in trained}
                   or {row["id"] for row in held_out} & {row["id"] for row in trained})
    if moved:
        raise InputError(f"{path} was trained on {some(moved)}, which would now be held out for validation: set the "
                         "data.* keys or the list back (data.val_fraction=0 if none was held out), or start a new run "
                         "with --fresh.")
    # Besides the seed, the order of an epoch depends on the ids of the training volumes alone.
    old_order, new_order = ({identity for identity, row in rows.items() if row["split"] == "train"}
                            for rows in (old, new))
    changes = {"added": new.keys() - old.keys(), "gone": old.keys() - new.keys(),
               "of other content": (old.keys() & new.keys()) - set(same),
               "trained on instead of held out": (new_order & old.keys()) - old_order}
    said = [f"volumes {what}: {len(names)} ({some(sorted(names))})" for what, names in changes.items() if names]
    return old_order != new_order, said


def by_id(described):
    """{id: dict of COLUMNS}. described: from `describe_data`."""
    return {row[0]: dict(zip(COLUMNS, row)) for row in volumes_of(described)}
