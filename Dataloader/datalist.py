"""Which volumes and pairs a run uses: Decathlon and Learn2Reg JSON files, or plain folders of NIfTI files."""
import itertools
import json
import re
from pathlib import Path

from Dataloader.volume_io import read_header
from Runtime.errors import InputError

SUFFIXES = (".nii.gz", ".nii")
PAIR_KEYS = ("pairs", "registration_val", "registration_test")


def read_datalist(root, dims=3, ids=""):
    """List the volumes of a data set.

    root: a folder with dataset.json (key "training": {"image", "label"} entries or plain paths, relative to root), or
    without one: all NIfTI files in its imagesTr, else anywhere under it, with labels of the same name in labelsTr.
    dims: 2 or 3, checked on the first volume. ids: "1-60,75" picks by the last number in the id; "" takes all.
    Returns: list of dict(id=str, image=Path, label=Path or None), sorted by id; `volume_id` says how ids are derived.
    Raises InputError for a missing or malformed list, missing files, duplicate ids and a selection that is empty.
    """
    root = Path(root)
    if not root.exists():
        raise InputError(f"{root}: no such data folder; check the path.")
    if not root.is_dir():
        raise InputError(f"{root}: a file, not a data folder; give the folder that holds it.")
    items = _from_json(root) if (root / "dataset.json").is_file() else _from_folder(root)
    if not items:
        raise InputError(f"{root}: no .nii or .nii.gz volume found; check the folder.")
    items.sort(key=lambda item: item["id"])
    for before, after in itertools.pairwise(items):
        if before["id"] == after["id"]:
            raise InputError(f"{root}: two volumes have the id {after['id']} ({before['image']} and {after['image']}); "
                             "rename or remove one.")
    chosen = _select(root, items, str(ids))
    read_header(chosen[0]["image"], dims)
    return chosen


def read_pairs(path, items):
    """Read a registration pair list in Learn2Reg JSON.

    path: a list of {"fixed", "moving"}, or an object with such a list under one of PAIR_KEYS. The values are ids or
    paths, compared by id. items: from `read_datalist`.
    Returns: list of (moving index, fixed index) into items.
    Raises InputError for an unreadable or empty list and for an id that is not in items.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such pair list; check the path.")
    pairs = _read_json(path)
    if isinstance(pairs, dict):
        pairs = next((pairs[key] for key in PAIR_KEYS if key in pairs), None)
    if not isinstance(pairs, list) or not pairs:
        raise InputError(f"{path}: no pairs found; give a list of fixed/moving entries, or one under {PAIR_KEYS[0]}.")
    index = {item["id"]: number for number, item in enumerate(items)}
    return [(_lookup(path, pair, "moving", index), _lookup(path, pair, "fixed", index)) for pair in pairs]


def volume_id(path):
    """Id of a volume: its file name without suffixes.

    A channel suffix _0000 goes too, but only after a number (OASIS_0007_0000 is OASIS_0007): in subject_0000 it is
    the number of the subject.
    """
    name = Path(path).name
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return re.sub(r"(?<=\d)_0000$", "", name[:len(name) - len(suffix)])


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); correct the file.") from error


def _from_json(root):
    path = root / "dataset.json"
    content = _read_json(path)
    entries = content.get("training") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path}: no list under \"training\"; add one with an image and a label path per volume.")
    items = []
    for entry in entries:
        entry = {"image": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
            raise InputError(f"{path}: the training entry {entry} has no image path; correct it.")
        image = root / entry["image"]
        if not image.is_file():
            raise InputError(f"{image}: the image listed in {path} is missing; restore it or drop its entry.")
        label = entry.get("label")
        if label is not None and not isinstance(label, str):
            raise InputError(f"{path}: the label {label} of {image.name} is not a path; correct or drop it.")
        if label and not (root / label).is_file():
            raise InputError(f"{root / label}: the label listed in {path} is missing; restore it or drop the label "
                             "entry.")
        items.append({"id": volume_id(image), "image": image, "label": root / label if label else None})
    return items


def _from_folder(root):
    base = root / "imagesTr" if (root / "imagesTr").is_dir() else root
    items = []
    for image in sorted(base.rglob("*")):
        inner = image.relative_to(base).parts
        # Names with a leading dot are unfinished writes and macOS resource forks.
        if image.name.startswith(".") or not image.name.endswith(SUFFIXES) or not image.is_file():
            continue
        if not {"labelsTr", "labelsTs"} & set(inner[:-1]):
            items.append({"id": volume_id(image), "image": image, "label": _sibling_label(root, image)})
    return items


def _sibling_label(root, image):
    """Label file of an image in folder mode, or None where there is no labelsTr."""
    folder = (image.parent.parent if image.parent.name == "imagesTr" else root) / "labelsTr"
    if not folder.is_dir():
        return None
    candidates = [folder / image.name] + [folder / (volume_id(image) + suffix) for suffix in SUFFIXES]
    label = next((candidate for candidate in candidates if candidate.is_file()), None)
    if label is None:
        raise InputError(f"{folder / image.name}: the label of {image} is missing; restore it or list the volumes in "
                         f"{root / 'dataset.json'} without this label.")
    return label


def _select(root, items, ids):
    if not ids.strip():
        return items
    ranges = []
    for part in ids.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{root}: ids \"{ids}\" has the bad part \"{part}\"; write numbers and rising ranges, "
                             "such as \"1-60,75\".")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    chosen = []
    for item in items:
        numbers = re.findall(r"\d+", item["id"])
        if numbers and any(int(numbers[-1]) in span for span in ranges):
            chosen.append(item)
    if not chosen:
        raise InputError(f"{root}: ids \"{ids}\" select none of the {len(items)} volumes from {items[0]['id']} to "
                         f"{items[-1]['id']}; correct the ids.")
    return chosen


def _lookup(path, pair, role, index):
    if not isinstance(pair, dict) or role not in pair:
        raise InputError(f"{path}: the pair {pair} has no \"{role}\"; every pair needs fixed and moving.")
    name = volume_id(str(pair[role]))
    if name not in index:
        raise InputError(f"{path}: the {role} volume {name} is not in the data list; add it there or drop the pair.")
    return index[name]
