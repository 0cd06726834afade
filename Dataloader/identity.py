"""Which data a run trains on: what a checkpoint keeps of them, and what that means for its continuation."""
import csv
import io
import json
import os

import torch

from Dataloader.cache import some
from Runtime import agree
from Runtime.errors import InputError


def describe_data(cfg, dataset, held_out):
    """What a checkpoint keeps of a run's data, as text: the name, and id, subject, split and bytes of each volume.

    dataset, held_out: training and validation VolumeDataset. The bytes are those of the image's file; null where a
    cache of an earlier version does not tell. Nothing depends on where the files are.
    """
    rows = [[item["id"], item["subject"], split, item["bytes"] if "bytes" in item else os.stat(item["image"]).st_size]
            for split, volumes in (("train", dataset), ("val", held_out)) for item in volumes.items]
    return json.dumps({"name": cfg["data.name"], "volumes": rows})


def as_csv(described):
    """The volumes of `describe_data` as a table for people: who is trained on, and who is held out."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("id", "subject", "split", "bytes"), *volumes_of(described)])
    return text.getvalue()


def volumes_of(described):
    return json.loads(described)["volumes"]


def require_same_everywhere(ranks, described):
    """Raises InputError on every rank where one reads other data than rank 0. Every rank calls this."""
    found = agree.gather(ranks, torch.tensor(agree.digest(described))).tolist()
    others = [str(rank) for rank, value in enumerate(found) if value != found[0]]
    if others:
        raise InputError(f"rank {', '.join(others)} of {len(found)} reads other data than rank 0: data.root or "
                         "data.cache must be the same on all nodes, and be left alone while ranks start; start again.")


def compare_data(before, now, path):
    """Whether a run that was trained on the data `before` may go on with those of `now` (both by `describe_data`).

    path: of the checkpoint, for the errors. before: None in one of an earlier version.
    Returns: whether the order of the training volumes is another, and sentences about what has changed.
    Raises InputError where fewer than half of the volumes are the same, with the same name and size: that is another
    data set of the same name; and where a subject is held out now that was trained on, whose score would flatter.
    """
    if before is None:
        return False, [f"{path} is of an earlier version and does not say what it was trained on: taken for these data"]
    name, old, new = json.loads(before)["name"], by_id(before), by_id(now)
    same = [identity for identity in old if identity in new and same_size(old[identity], new[identity])]
    if 2 * len(same) < len(old):
        raise InputError(f"{path} was trained on other data of the same name {name}: of its {len(old)} volumes "
                         f"{len(same)} are among the {len(new)} of now; give these a data.name of their own, or start "
                         "a new run with --fresh.")
    trained = {row["subject"] for row in old.values() if row["split"] == "train"}
    if moved := sorted({row["subject"] for row in new.values() if row["split"] == "val"} & trained):
        raise InputError(f"{path} was trained on {some(moved)}, held out for validation now: set the data.* keys or "
                         "the list back, or start a new run with --fresh.")
    return order(old) != order(new), differences(old, new, same)


def by_id(described):
    return {row[0]: dict(zip(("id", "subject", "split", "bytes"), row)) for row in volumes_of(described)}


def same_size(one, other):
    return None in (one["bytes"], other["bytes"]) or one["bytes"] == other["bytes"]


def order(volumes):
    """What an epoch's order is a function of, besides the seed."""
    return sorted(identity for identity, row in volumes.items() if row["split"] == "train")


def differences(old, new, same):
    """Sentences about volumes that were added, are gone, changed, or changed sides."""
    both = old.keys() & new.keys()
    changes = {"added": new.keys() - old.keys(), "gone": old.keys() - new.keys(), "of other content": both - set(same),
               "trained on instead of held out": {one for one in both if (old[one]["split"], new[one]["split"])
                                                  == ("val", "train")}}
    return [f"volumes {what}: {len(names)} ({some(sorted(names))})" for what, names in changes.items() if names]
