"""Which volumes and pairs a run uses: Decathlon and Learn2Reg JSON files, CSV lists, or folders of NIfTI files."""
import csv
import io
import itertools
import json
import os
import re
from pathlib import Path

from Dataloader.volume_io import read_header
from Runtime.errors import InputError

SUFFIXES = (".nii.gz", ".nii")
PAIR_KEYS = ("pairs", "training_paired_images", "registration_val", "registration_test")  # the first there is
SIDE_FOLDERS = {"labelsTr", "labelsTs", "masksTr", "masksTs"}
CHANNEL = re.compile(r"_\d+_(000\d)$")  # a channel or state, behind the number of the subject
COLUMNS = ("image", "label", "mask", "id", "subject", "modality")


def read_datalist(root, dims=3, ids=""):
    """List the volumes of a data set.

    root: one of
    - a folder with dataset.json (or one <task>_dataset.json), or a .json file: key "training" holds plain paths or
      {"image", "label", "mask", "subject", "modality"} entries, of which only the image is needed; other keys are
      ignored;
    - a .csv file: a header row with the column image and, if wanted, label, mask, id, subject, modality; comma or
      semicolon, UTF-8; an empty cell is absent, other columns are ignored;
    - another folder: all NIfTI files in its imagesTr, else anywhere under it. A labelsTr beside them must hold the
      label of every image, a masksTr the mask of at least one: an image without a mask is used as a whole.
    Paths in a list are absolute or relative to the folder of the list.
    dims: 2 or 3, checked on the first volume. ids: as in `select`.

    Returns: list of dict(id=str, image=Path, label=Path or None, mask=Path or None, subject=str, modality=str), sorted
    by id; `volume_id` says how ids are derived. Where the list names no subject, each volume is one, named as its id;
    but where all names end like X_0001_0000 and X_0001_0001, these are of subject X_0001. Where it names no modality,
    the last number of such a name picks one from the "modality" of the JSON file, if that has several; else it is "".
    Raises InputError for a missing or malformed list, missing files, duplicate ids and a selection that is empty.
    """
    root = Path(root)
    if not root.exists():
        raise InputError(f"{root}: no such data folder or list; check the path.")
    items = _read_items(root)
    if not items:
        raise InputError(f"{root}: no .nii or .nii.gz volume found; check the folder.")
    items.sort(key=lambda item: item["id"])
    for before, after in itertools.pairwise(items):
        if before["id"] == after["id"]:
            raise InputError(f"{root}: two volumes have the id {after['id']} ({before['image']} and {after['image']}); "
                             "rename or remove one, or give each its own id in a .csv list.")
    channels = [CHANNEL.search(_stem(item["image"])) for item in items]
    for item, channel in zip(items, channels):
        guessed = _stem(item["image"])[:channel.start(1) - 1] if all(channels) else item["id"]
        item["subject"] = item["subject"] or guessed
    chosen = select(root, items, ids)
    read_header(chosen[0]["image"], dims)
    return chosen


def select(source, items, ids):
    """The items that `ids` names.

    source: what the errors begin with, such as the data folder. items: dicts with "id" and maybe "subject". ids:
    numbers and rising ranges such as "1-60,75", compared with the last number in each id, or in the subject where the
    id begins with it, so that the volumes of a subject stay together; "" takes all.
    Returns: list of items in their order. Raises InputError for ids that cannot be read or select nothing.
    """
    ids = str(ids)
    if not ids.strip():
        return items
    ranges = []
    for part in ids.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{source}: ids \"{ids}\" has the bad part \"{part}\"; write numbers and rising ranges, "
                             "such as \"1-60,75\".")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    chosen = []
    for item in items:
        subject = item.get("subject", item["id"])
        numbers = re.findall(r"\d+", subject if item["id"].startswith(subject) else item["id"])
        if numbers and any(int(numbers[-1]) in span for span in ranges):
            chosen.append(item)
    if not chosen:
        raise InputError(f"{source}: ids \"{ids}\" select none of the {len(items)} volumes from {items[0]['id']} to "
                         f"{items[-1]['id']}; correct the ids.")
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
    return re.sub(r"(?<=\d)_0000$", "", _stem(path))


def _stem(path):
    name = os.path.basename(path)
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name[:len(name) - len(suffix)]


def _read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); correct the file.") from error


def _read_items(root):
    if root.is_dir():
        # Learn2Reg names its list after the task.
        lists = [root / "dataset.json"] if (root / "dataset.json").is_file() else sorted(root.glob("*_dataset.json"))
        if len(lists) > 1:
            raise InputError(f"{root}: which list, {lists[0].name} or {lists[1].name}? Give the file instead of the "
                             "folder.")
        return _from_json(lists[0]) if lists else _from_folder(root)
    if root.suffix.lower() not in (".json", ".csv"):
        raise InputError(f"{root}: a file, not a data folder, .json or .csv list; give the folder that holds it.")
    return _from_json(root) if root.suffix.lower() == ".json" else _from_csv(root)


def _from_json(path):
    content = _read_json(path)
    entries = content.get("training") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path}: no list under \"training\"; add one with an image and a label path per volume.")
    modalities = content.get("modality")
    if not isinstance(modalities, dict) or len(modalities) < 2:
        modalities = {}
    if not all(isinstance(word, str) for word in modalities.values()):
        raise InputError(f"{path}: \"modality\" {modalities} is not one word per channel; correct it.")
    listings = {}
    return [_listed_item(path, path.parent, _checked_entry(path, entry), listings, modalities) for entry in entries]


def _checked_entry(path, entry):
    """What a training entry says, without the keys that are absent or empty."""
    entry = {"image": entry} if isinstance(entry, str) else entry
    image = entry.get("image") if isinstance(entry, dict) else None
    if isinstance(image, list):
        raise InputError(f"{path}: the image of the training entry {entry} is a list; give each file an entry of its "
                         "own, with the same \"subject\".")
    if not image or not isinstance(image, str):
        raise InputError(f"{path}: the training entry {entry} has no image path; correct it.")
    for role in ("label", "mask"):
        if not isinstance(entry.get(role), str | None):
            raise InputError(f"{path}: the {role} {entry[role]} of {Path(image).name} is not a path; correct or drop "
                             "it.")
    for role in ("subject", "modality"):
        if isinstance(entry.get(role), bool) or not isinstance(entry.get(role), str | int | None):
            raise InputError(f"{path}: the {role} {entry[role]} of {Path(image).name} is not a word; correct or drop "
                             "it.")
    # An "id" here may be another program's; a .csv list is written for this one.
    return {role: str(entry[role]) for role in COLUMNS if role != "id" and entry.get(role) not in (None, "")}


def _from_csv(path):
    (_, header), *rows = _read_csv(path)
    columns = [cell.lower() for cell in header]
    if "image" not in columns:
        raise InputError(f"{path}: no column \"image\" in the header {','.join(header)}; name the column of the image "
                         "paths so.")
    for name in COLUMNS:
        if columns.count(name) > 1:
            raise InputError(f"{path}: the header has the column \"{name}\" twice; rename or remove one.")
    if not rows:
        raise InputError(f"{path}: a header but no volume; add a row for each.")
    items, listings = [], {}
    for line, cells in rows:
        where = f"{path} line {line}"
        if len(cells) != len(columns):
            raise InputError(f"{where}: {len(cells)} cells, but the header has {len(columns)}; correct the row, and "
                             "quote a path that holds the separator.")
        entry = {name: cell for name, cell in zip(columns, cells) if cell and name in COLUMNS}
        if "image" not in entry:
            raise InputError(f"{where}: no image path; fill the cell or remove the row.")
        if "/" in entry.get("id", ""):
            raise InputError(f"{where}: the id {entry['id']} holds a slash, which no file name can; choose another.")
        items.append(_listed_item(where, path.parent, entry, listings, {}))
    return items


def _read_csv(path):
    """(line number, stripped cells) of the rows that are not blank, the header first."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); save it as CSV in UTF-8.") from error
    # The names of the columns hold neither, so the header tells more surely than csv.Sniffer, which guesses.
    header = next((line for line in text.split("\n") if line.strip()), "")
    reader = csv.reader(io.StringIO(text), delimiter=";" if header.count(";") > header.count(",") else ",", strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: not valid CSV ({error}); correct the line.") from error
    rows = [(line, cells) for line, cells in rows if any(cells)]
    if not rows:
        raise InputError(f"{path}: an empty list; write a header with the column image, and a row per volume.")
    return rows


def _listed_item(where, folder, entry, listings, modalities):
    """The item of a list entry whose files are all there. where: the list, and the line if it has lines."""
    paths = {role: folder / entry[role] if role in entry else None for role in ("image", "label", "mask")}
    for role, path in paths.items():
        if path and not _is_file(path, listings):
            whose = "its" if role == "image" else f"the {role}"
            raise InputError(f"{path}: the {role} listed in {where} is missing; restore it or drop {whose} entry.")
    return _item(**paths, words=entry, modalities=modalities)


def _from_folder(root):
    base = root / "imagesTr" if (root / "imagesTr").is_dir() else root
    items, listings = [], {}
    for folder, inner, _ in os.walk(base):
        inner[:] = sorted(set(inner) - SIDE_FOLDERS)
        for name in sorted(_file_names(folder)):
            # Names with a leading dot are unfinished writes and macOS resource forks.
            if name.endswith(SUFFIXES) and not name.startswith("."):
                image = Path(folder, name)
                items.append(_item(image, *(_sibling(root, image, kind, listings) for kind in ("labelsTr", "masksTr"))))
    masks = [folder for folder, names in listings.items() if names is not None and Path(folder).name == "masksTr"]
    if masks and not any(item["mask"] for item in items):
        raise InputError(f"{masks[0]}: no mask has the name of an image, such as {items[0]['image'].name}; rename the "
                         "masks or remove the folder.")
    return items


def _sibling(root, image, kind, listings):
    """Label (labelsTr) or mask (masksTr) of an image in folder mode, or None."""
    folder = (image.parent.parent if image.parent.name == "imagesTr" else root) / kind
    if _listing(str(folder), listings) is None:
        return None
    names = [image.name] + [volume_id(image) + suffix for suffix in SUFFIXES]
    found = next((folder / name for name in names if _is_file(folder / name, listings)), None)
    if found is None and kind == "labelsTr":
        raise InputError(f"{folder / image.name}: the label of {image} is missing; restore it or list the volumes in "
                         f"{root / 'dataset.json'} without this label.")
    return found


def _item(image, label, mask, words=None, modalities=None):
    """words: id, subject and modality as far as the list says them. modalities: by the number of the channel."""
    words, channel = words or {}, CHANNEL.search(_stem(image))
    modality = words.get("modality") or ((modalities or {}).get(str(int(channel[1])), "") if channel else "")
    return {"id": words.get("id") or volume_id(image), "image": image, "label": label, "mask": mask,
            "subject": words.get("subject", ""), "modality": modality}


def _is_file(path, listings):
    """Whether a file is there. Each folder is listed once: asking for file after file is slow on a network disk."""
    folder, name = os.path.split(path)
    names = _listing(folder, listings)
    return name in names if names else os.path.isfile(path)


def _listing(folder, listings):
    if folder not in listings:
        listings[folder] = _file_names(folder)
    return listings[folder]


def _file_names(folder):
    """Names of the files in a folder; none of them where it may not be listed, None where it is not there."""
    try:
        with os.scandir(folder or ".") as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except (OSError, ValueError):
        return set() if os.path.isdir(folder) else None


def _lookup(path, pair, role, index):
    if not isinstance(pair, dict) or role not in pair:
        raise InputError(f"{path}: the pair {pair} has no \"{role}\"; every pair needs fixed and moving.")
    # An id from a .csv list is taken as it is: volume_id would shorten some.
    name = str(pair[role]) if str(pair[role]) in index else volume_id(str(pair[role]))
    if name not in index:
        raise InputError(f"{path}: the {role} volume {name} is not in the data list; add it there or drop the pair.")
    return index[name]
