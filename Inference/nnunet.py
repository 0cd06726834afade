"""Deformed copies in the layout of nnU-Net v2: cases with all their channels, including the originals.

    Dataset501_Brains/imagesTr/<case>_0000.nii.gz ...   labelsTr/<case>.nii.gz   dataset.json   splits_final.json

nnU-Net splits cases at random, and copies of one subject on both sides would inflate its scores. splits_final.json, to
be copied into nnUNet_preprocessed/<name>, keeps each subject on one side and validates on originals only. RECORD names
all these files: what else lies beside them, such as imagesTs, stays.
"""
import json
import os
import re
from pathlib import Path

import numpy as np

from Dataloader.datalist import case_and_channel, group_channels, list_file, read_json
from Dataloader.nifti import (
    open_nifti,
    placement_doubts,
    read_header,
    read_label,
    read_raw_header,
    read_volume,
    write_volume,
)
from Inference.draws import draw_name, draw_paths
from Inference.outputs import grid_header, write_moved
from Runtime.errors import InputError
from Runtime.files import as_stored, first_repeated, listed, remove_leftovers, write_file

NAME = re.compile(r"Dataset\d{3}_[\w-]+")
FOLDS = 5
LISTS = ("dataset.json", "splits_final.json")
RECORD = "omnimorph_files.json"  # names of our files in the folder of a data set, in which others may lie too
RECORDED = re.compile(r"(?:imagesTr|labelsTr)/[^/\\]+\.nii\.gz|dataset\.json|splits_final\.json")  # a name in it


def cases_of(name, items):
    """The cases of a list of images, `grouped`, each with its "modalities".

    name: of the data set. Raises InputError for a name that nnU-Net would not find, and a case without a label.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"--nnunet {name}: nnU-Net needs three digits in the name, such as Dataset501_Brains.")
    cases = grouped(items)
    if twice := first_repeated(as_stored(case["id"]) for case in cases):
        raise InputError(f"--nnunet {name}: two cases would be called {twice}; rename a file, or leave one out with "
                         "--ids.")
    for case in cases:
        if case["label"] is None:
            raise InputError(f"{case['image']}: it has no label, and nnU-Net needs one for every case; leave it out "
                             "with --ids, or leave out --nnunet.")
    words = {item["image"]: item["modality"] for item in items}
    return [{**case, "modalities": [words.get(path, "") for path in (case["image"], *case["channels"])]}
            for case in cases]


def grouped(items):
    """The items of a list of images as cases with "channels", by `group_channels` if they are not yet.

    Images X_0000 and X_0001 with a label each are two cases, and not two channels of one.
    """
    if any("channels" in item for item in items):
        return items
    labels = {}
    for item in items:
        labels.setdefault(case_and_channel(item["image"])[0], set()).add(item["label"])
    alone = any(len(found - {None}) > 1 for found in labels.values())
    return [{**item, "channels": []} for item in items] if alone else group_channels(items)


def require_no_negative(label, path):
    """Raise InputError for a label map, from the file `path`, with a negative label."""
    if label.min() < 0:
        raise InputError(f"{path}: there is a label {label.min()}, but nnU-Net's labels begin at 0; renumber it, or "
                         "leave out --nnunet.")


def list_of(data):
    """The list of a data set, a dict; empty if it has none. data: folder or list as for `read_datalist`, or None."""
    if not data:
        return {}
    path = list_file(Path(data))
    return read_json(path) if path and path.suffix.lower() == ".json" else {}


def regions_of(data):
    """Labels, {name: number or list of them}, and regions_class_order of an nnU-Net list that segments regions.

    data: as for `list_of`. Returns: ({}, []) if the list has no regions. Raises InputError for labels that are no whole
    numbers.
    """
    content = list_of(data)
    labels, order = content.get("labels", {}), content.get("regions_class_order") or []
    if not isinstance(labels, dict) or not any(isinstance(value, list) for value in labels.values()):
        return {}, []
    try:
        numbers = {name: [*map(int, value)] if isinstance(value, list) else int(value)
                     for name, value in labels.items()}
        return numbers, [*map(int, order)]
    except (TypeError, ValueError):
        raise InputError(f"{list_file(Path(data))}: its labels {labels} and regions_class_order {order} must be whole "
                         "numbers, or lists of them; correct them.") from None


def regions_in(data, numbers):
    """Labels and regions_class_order of an nnU-Net list that segments regions, several labels each, renumbered.

    data: as for `list_of`. numbers: of all labels, which become 0, 1, 2 ... A region that loses all its labels is
    dropped. Returns: {"labels", "regions_class_order"}, entries of dataset.json; empty if the list has no regions.
    """
    labels, order = regions_of(data)
    if not labels:
        return {}
    new, kept, new_order = {int(number): place for place, number in enumerate(numbers)}, {}, []
    for name, value in labels.items():
        left = [new[number] for number in (value if isinstance(value, list) else [value]) if number in new]
        is_region = name != "ignore" and left != [0] and value not in (0, [0])
        paints = new.get(order.pop(0), left[-1] if left else 0) if is_region and order else None
        if left:
            kept[name] = left if isinstance(value, list) else left[0]
            new_order += [] if paints is None else [paints]
    return {"labels": kept, "regions_class_order": new_order}


def numbers_of_regions(data):
    """All labels in the regions of an nnU-Net list, a set; empty if it has none. data: as for `list_of`."""
    regions, _ = regions_of(data)
    return {number for region in regions.values() if isinstance(region, list) for number in region}


def names_in(data):
    """The names of labels and channels in a data set's list: {number: name} twice, empty if it has none.

    data: folder or list as for `read_datalist`, or None. Decathlon has {"1": "name"}, nnU-Net has labels {"name": 1}.
    """
    content = list_of(data)
    labels = content.get("labels", {})
    channels = content.get("channel_names", content.get("modality", {}))
    if not isinstance(labels, dict) or not isinstance(channels, dict):
        return {}, {}
    pairs = [(value, key) if isinstance(value, int) else (key, value) for key, value in labels.items()]
    return tuple({int(number): str(name) for number, name in some if str(number).isdecimal()}
                 for some in (pairs, channels.items()))


def channel_name(number, items, window):
    """The name of a channel that no dataset.json names: its modality if all cases whose modality is known share one.

    nnU-Net normalises a channel by its name: CT by the intensities of the whole data set, others case by case.
    items: of `cases_of`. window: data.window, which only intensities with a unit have, as in CT; [0, 0] if unset.
    """
    words = {item["modalities"][number] for item in items if "modalities" in item} - {""}
    if any(window) or {word.upper() for word in words} == {"CT"}:
        return "CT"
    return words.pop() if len(words) == 1 else f"channel_{number}"


def write_dataset(out, name, items, draws, dims, data, window=(0, 0)):
    """Write the data set of all cases and their draws beside the draws themselves. Returns: Path of its folder.

    out: folder of OM_augment.py. draws: copies of each case. data: the list that names labels and channels, or None.
    window: data.window.
    """
    folder = out / name
    numbers = {0}
    for item in items:
        label, _ = read_label(item["label"], dims)
        require_no_negative(label, item["label"])  # of copies that were drawn without --nnunet
        numbers.update(np.unique(label).tolist())
    label_names, channel_names = names_in(data)
    named = {0, *label_names, *numbers_of_regions(data)}
    if numbers <= named == set(range(len(named))):
        numbers = named  # without gaps already: a label that these volumes lack keeps its number free
    numbers = sorted(map(int, numbers))
    cases = []
    for item in items:
        cases.append((item["id"], [item["image"], *item["channels"]], item["label"], copy))
        for draw in range(draws):
            paths = draw_paths(item, draw)
            images = [out / path for kind, path in paths.items() if kind == "image" or kind.startswith("channel")]
            cases.append((draw_name(item, draw), images, out / paths["label"], link))
    earlier, names = own_files(folder), {*LISTS}.union(*(case_files(case, len(images)) for case, images, *_ in cases))
    write_record(folder, earlier | names)  # before the files, so that what a killed run leaves is known as its own
    remove_leftovers(folder)
    for name in earlier:  # it is made from the draws alone; fewer draws leave fewer cases
        (folder / name).unlink(missing_ok=True)
    for case, images, label, take in cases:
        write_case(folder, case, images, label, numbers, dims, take)
    labels = ["background"]
    for number in numbers[1:]:
        label = label_names.get(number) or f"label_{number}"
        while label in labels:
            label = f"{label}_{number}"
        labels.append(label)
    content = {"channel_names": {str(number): channel_names.get(number) or channel_name(number, items, window)
                                 for number in range(1 + len(items[0]["channels"]))},
               "labels": {label: number for number, label in enumerate(labels)},
               "numTraining": len(items) * (1 + draws), "file_ending": ".nii.gz", **regions_in(data, numbers)}
    write_file(folder / "dataset.json", json.dumps(content, indent=1) + "\n")
    write_record(folder, names)
    return folder


def own_files(folder):
    """Names of the files that an earlier run wrote into the folder of a data set, relative to it: a set.

    They will be removed, so names that no run has written, such as one that leads out of the folder, do not count.
    """
    names = read_json(folder / RECORD) if (folder / RECORD).is_file() else []
    return {name for name in names if RECORDED.fullmatch(str(name))} if isinstance(names, list) else set()


def write_record(folder, names):
    """Record which files of a data set are ours. names: relative to its folder."""
    write_file(folder / RECORD, json.dumps(sorted(names), indent=1) + "\n")


def require_own_dataset(folder):
    """Raise InputError for lists or cases in the folder of a data set that no earlier run wrote. What else lies there,
    such as imagesTs, stays."""
    own = {folder / name for name in own_files(folder)}
    cases = [path for name in ("imagesTr", "labelsTr") for path in listed(folder / name)
             if path.name.endswith(".nii.gz") and path.name[0] != "."]
    for path in [path for path in map(folder.joinpath, LISTS) if os.path.lexists(path)] + cases:
        if path not in own:
            raise InputError(f"{path}: it is not of an earlier run, and --nnunet would replace it or count it among "
                             "its cases; move it elsewhere, or choose another name.")


def case_files(case, channels):
    """Names of the files of a case, relative to the folder of its data set: those of its channels, then the label."""
    return [*(f"imagesTr/{case}_{channel:04d}.nii.gz" for channel in range(channels)), f"labelsTr/{case}.nii.gz"]


def write_case(folder, case, images, label, numbers, dims, take):
    """Write one case. images: paths of its channels. label: path. numbers: of all labels; they become 0, 1, 2 ...

    take: `copy` or `link`, for an image that needs no change.
    All files get three axes and the affine of the first channel: nnU-Net treats any difference as another grid.
    """
    _, affine = read_header(images[0], dims)
    *targets, label_target = map(folder.joinpath, case_files(case, len(images)))
    for target, path in zip(targets, images):
        if path.name.endswith(".nii.gz") and is_placed_by(path, affine, dims):
            target.parent.mkdir(parents=True, exist_ok=True)
            take(path, target)
        else:
            write_moved(target, read_volume(path, dims)[0], path, affine, read_raw_header(images[0]))
    array = np.searchsorted(numbers, read_label(label, dims)[0]).astype(np.int16)
    write_volume(label_target, array, affine, grid_header(read_raw_header(images[0])))


def is_placed_by(path, affine, dims):
    """Whether a file has three axes, and every matrix in its header says that this 4x4 places them."""
    image = open_nifti(path)
    if len(image.shape) != 3 or not np.array_equal(read_header(path, dims)[1], affine) or placement_doubts(path, dims):
        return False
    qform = image.header.get_qform() if int(image.header["qform_code"]) else image.affine
    sizes = np.linalg.norm(image.affine[:3, :3], axis=0)
    # A quaternion in float32 may turn a volume by a thousandth.
    return np.allclose(qform, image.affine, atol=2e-3) and np.allclose(image.header.get_zooms(), sizes)


def copy(path, target):
    """Copy a user's file, so that editing the copy does not change the original."""
    write_file(target, path.read_bytes())


def link(path, target):
    """Hard-link one of our own files, or copy it if the file system has no links."""
    try:
        os.link(path, target)
    except OSError:
        copy(path, target)


def write_splits(folder, items, draws, shapes):
    """Write the `splits` of a data set of `write_dataset`."""
    write_file(folder / "splits_final.json", json.dumps(splits(items, draws, shapes), indent=1) + "\n")


def splits(items, draws, shapes):
    """Folds for nnU-Net: {"train", "val"} lists of cases, by subject, validated on originals.

    With fewer than FOLDS subjects, each makes a fold; a single subject makes none, since nothing is left to validate
    on. shapes: {name of a draw: the subject towards which it was made}; its shape is known from it, so it trains no
    fold that is validated on this subject.
    """
    subjects = sorted({item["subject"] for item in items})
    folds = []
    for fold in range(min(FOLDS, len(subjects)) if len(subjects) > 1 else 0):
        held_out = set(subjects[fold::FOLDS])
        train = [name for item in items if item["subject"] not in held_out
                 for name in (item["id"], *(draw_name(item, draw) for draw in range(draws)))
                 if shapes.get(name) not in held_out]
        folds.append({"train": train, "val": [item["id"] for item in items if item["subject"] in held_out]})
    return folds
