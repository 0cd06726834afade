"""Lists of pairs for the tools: which to register (OM_register.py) and which to score (OM_evaluate.py).

A list is Learn2Reg JSON, a plain list, a CSV table, a folder whose volumes are all registered to one volume, or the
results.json of a registration; paths are relative to the list. A training's pair list names volumes of its data set
instead of files: Dataloader/datalist.py reads it.
"""
import functools
import sys
from pathlib import Path

from Dataloader.datalist import (
    MOST_CHANNELS,
    PAIR_KEYS,
    Folder,
    is_one_volume,
    label_beside,
    list_file,
    list_single,
    names_apart,
    pair_files,
    read_csv,
    read_json,
    volume_id,
    without_segmentations,
)
from Inference.choices import TO_SCORE
from Runtime.errors import InputError
from Runtime.files import as_stored, first_repeated, unfit_for_a_file, with_slashes

CHANNELS = {side: tuple(f"{side}_channel_{number}" for number in range(2, MOST_CHANNELS + 1))
            for side in ("fixed", "moving")}
TO_REGISTER = ("fixed", "moving", "fixed_label", "moving_label", "fixed_mask", "moving_mask", "points",
               "moving_points", *CHANNELS["fixed"], *CHANNELS["moving"])
LISTS = ("pairs", "registration_test", "registration_val", *PAIR_KEYS)  # in a JSON file; the first non-empty one counts


def read_pairs_to_register(path, key=None):
    """The pairs to register.

    path: a JSON list of objects with TO_REGISTER and "name", or an object that has such a list; a .csv table with these
    columns; or a folder with one dataset.json that lists pairs. key: which list, if the file has several.
    Learn2Reg's entries have no labels. A volume then gets the first of these that exists: the label that the list
    "training" names for it, the label beside it, the file of the same name in a labelsTr or labelsTs beside the images.
    Returns: list of dict(name=str, fixed=Path, moving=Path and a Path for every other key of TO_REGISTER it has).
    Raises InputError naming the file for a list that cannot be read, unknown keys and repeated names.
    """
    path = _list_of(Path(path))
    content = _read_list(path, (*TO_REGISTER, "name"))
    entries, training = content, []
    if key and not isinstance(content, dict):
        raise InputError(f"{path}: it is one list of pairs, so --list {key} chooses nothing; leave it out.")
    if isinstance(content, dict):
        key = key or next((name for name in LISTS if content.get(name)), "pairs")
        entries, training = content.get(key), content.get("training", [])
    _require_entries(path, entries, "fixed and moving", key)
    files = [(entry.get("image"), entry.get("label")) for entry in training if isinstance(entry, dict)]
    labels = {path.parent / image: path.parent / label for image, label in files  # a pair needs single channels
              if isinstance(image, str) and isinstance(label, str)}
    listed = functools.cache(Folder)
    pairs = [_pair_to_register(path, number, entry, labels, listed) for number, entry in enumerate(entries, 1)]
    _require_own_names(path, pairs)
    return pairs


def _list_of(path):
    """The pair list in a folder, or the path itself if it is no folder. Raises InputError for a folder without one."""
    if not path.is_dir():
        return path
    found = list_file(path)
    content = read_json(found) if found else None
    if isinstance(content, dict) and any(content.get(name) for name in LISTS):
        return found
    raise InputError(f"{path}: a folder does not define pairs; add --fixed F to register all of its volumes to F, "
                     "or list the pairs in a .csv with the columns fixed and moving.")


def pairs_onto(fixed, moving, labels=(), fixed_label=None):
    """Pairs of several moving volumes with one fixed volume, as `read_pairs_to_register` returns them.

    fixed: path. moving: volumes, or folders, lists and patterns of them (Dataloader/datalist.py).
    labels: of the moving volumes, one file for each in the same order; by default they are found by folder and name.
    fixed_label: path; None: found in the same way.
    Raises InputError if there is no pair, or if the numbers of labels and moving volumes differ.
    """
    fixed, items, listed = Path(fixed), [], functools.cache(Folder)
    for source in without_segmentations(moving):
        if is_one_volume(source):
            items.append({"id": volume_id(source), "image": Path(source),
                          "label": label_beside(source, listed(Path(source).parent))})
        else:
            items += list_single(source)
    own = fixed.resolve()
    fixed_label = fixed_label or next((item["label"] for item in items if item["image"].resolve() == own), None)
    items = [item for item in items if item["image"].resolve() != own]
    if not items:
        raise InputError(f"{', '.join(map(str, moving))}: besides segmentations it contains only the fixed volume, "
                         "so nothing would be registered; give a moving volume.")
    if labels and len(labels) != len(items):
        raise InputError(f"--moving-label names {len(labels)} files for {len(items)} moving volumes; name one for "
                         "each, in the same order, or leave them out.")
    if labels:
        items = [{**item, "label": Path(label)} for item, label in zip(items, labels)]
    fixed_label = Path(fixed_label) if fixed_label else label_beside(fixed)
    names = names_apart([item["id"] for item in items], [item["image"] for item in items])
    if repeated := first_repeated(map(as_stored, names)):
        raise InputError(f"{repeated}: two moving volumes have this name; list the pairs in a .csv with a column name.")
    pairs = []
    for name, item in zip(names, items):
        files = {"fixed": fixed, "moving": item["image"], "fixed_label": fixed_label, "moving_label": item["label"]}
        pairs.append({"name": f"{name}_to_{volume_id(fixed)}", **{key: path for key, path in files.items() if path}})
    return pairs


def channels_of(pair, side):
    """The files of the further channels of one side of a pair, "fixed" or "moving", in their order."""
    return [pair[key] for key in CHANNELS[side] if key in pair]


def require_like_channels(pair):
    """Raise InputError unless both sides of a pair have the same channels, from 2 on without a gap: else different
    modalities would be compared, or a network would take one channel for another."""
    fixed, moving = ([number for number, key in enumerate(CHANNELS[side], 2) if key in pair] for side in CHANNELS)
    if not fixed == moving == [*range(2, 2 + len(fixed))]:
        fixed, moving = (", ".join(map(str, numbers)) or "none" for numbers in (fixed, moving))
        raise InputError(f"{pair['fixed']} has the further channels {fixed} and {pair['moving']} has {moving}; give "
                         "both the same ones, from 2 on without a gap.")


def read_pairs_to_score(path):
    """The pairs to score.

    path: results.json of OM_register.py or its folder, or a JSON list (or an object with such a list under "pairs") of
    objects with TO_SCORE and "name", or a .csv table with these columns. Warns about pairs that could not be registered
    and about an unfinished registration.
    Returns: list of dict(name=str, and a Path for each key of TO_SCORE it has; for a registered pair "written", the
    folder and the `file_digests` of its field, "resample", the path of its moving volume if its labels were resampled
    to its volumes, and "carried", how they were warped); the number of axes, None if the list does not say.
    Raises InputError naming the file for a list that cannot be read, unknown keys and repeated names.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    content = _read_list(path, (*TO_SCORE, "name"))
    entries = content.get("pairs") if isinstance(content, dict) else content
    _require_entries(path, entries, "fixed_label, moving_label, field")
    if not isinstance(content, dict) or "settings" not in content:
        pairs = [{"name": _name_of(entry, number), **pair_files(path, number, entry, TO_SCORE)}
                 for number, entry in enumerate(entries, 1)]
        _require_own_names(path, pairs)
        return pairs, None
    if "config" not in content["settings"]:
        raise InputError(f"{path}: results of {content['settings'].get('program', 'another program')}, not of "
                         "OM_register.py; list the files to score in a JSON list.")
    for entry in content["failed"]:
        print(f"warning: {path}: {entry['name']} was not registered and is not scored: {entry['reason']}",
              file=sys.stderr)
    for sentence in said_if_unfinished(path, content):
        print(f"warning: {sentence}", file=sys.stderr)
    pairs, settings = [], content["settings"]
    resampled, carried = settings.get("resample_labels", False), settings.get("labels", "smooth")
    keys = {"fixed_label": "fixed_label", "moving_label": "moving_label", "points": "fixed_points",
            "moving_points": "moving_points"}
    for row in entries:
        relative = Path(row["folder"], "field.nii.gz").as_posix()
        files = {ours: Path(row[key]) for key, ours in keys.items() if key in row}
        pairs.append({"name": row["name"], **files, "field": path.parent / relative, "carried": carried,
                      "resample": Path(row["moving"]) if resampled else None,
                      "written": (path.parent, {relative: with_slashes(row["files"])[relative]})})
    return pairs, settings["config"]["model.dims"]


def said_if_unfinished(source, results):
    """[sentence] if the run that left these results did not finish, else []. source: their path. results: from
    `read_results`, or the content of results.json."""
    doing = "run" if "program" in (results["settings"] or {}) else "registration"
    return [] if results["complete"] else [f"{source}: the {doing} did not finish; run it again to continue"]


def _read_list(path, columns):
    """The content of a JSON file, or the rows of a .csv table of these columns as a JSON list would have them."""
    if not path.is_file():
        raise InputError(f"{path}: no such list of pairs; check the path.")
    if path.suffix.lower() == ".csv":
        header, rows = read_csv(path, columns)
        words = tuple({column.partition("_")[0] for column in columns} - {"name"})
        others = [cell for cell in header if cell.lower().startswith(words)]
        if unknown := next((cell for cell in others if cell.lower() not in (*columns, *TO_REGISTER)), None):
            raise InputError(f"{path}: unknown column {unknown}; the columns of a pair are {', '.join(columns)}.")
        return [entry for _, entry in rows]
    return read_json(path)


def _require_entries(path, entries, wanted, key=None):
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: no list of pairs{f' under {key}' if key else ''}; write objects with {wanted}.")


def _name_of(entry, number):
    return f"pair {number}" if entry.get("name") in (None, "") else str(entry["name"])


def _require_own_names(path, pairs):
    if repeated := first_repeated(as_stored(pair["name"]) for pair in pairs):
        raise InputError(f"{path}: two pairs are called {repeated}; give each its own name.")


def _pair_to_register(path, number, entry, labels, listed):
    pair = pair_files(path, number, entry, TO_REGISTER)
    if "fixed" not in pair or "moving" not in pair:
        raise InputError(f"{path}: pair {number} has no fixed or no moving volume; give both.")
    for side in ("fixed", "moving"):
        if f"{side}_label" not in entry and (label := _label_of(pair[side], labels, listed)):
            pair[f"{side}_label"] = label
    name = str(entry.get("name") or f"{volume_id(pair['moving'])}_to_{volume_id(pair['fixed'])}")
    unfit = unfit_for_a_file(name) or not name.isprintable() or name.startswith(".")
    if unfit or name.endswith((".html", ".json", ".csv")):
        raise InputError(f"{path}: pair {number}: its folder cannot have the name {name}; leave out slashes, line "
                         "breaks, a leading dot, and .html, .json or .csv at its end"
                         + (', and on Windows \\ : * ? " < > |.' if sys.platform == "win32" else "."))
    return {"name": name, **pair}


def _label_of(image, labels, listed):
    """The existing label file of an image, or None. labels: those that the list "training" names, {image: label}.
    listed: gives the Folder of a path, each listed once."""
    candidates, folder = [labels.get(image), label_beside(image, listed(image.parent))], image.parent
    if folder.name.startswith("images"):
        candidates.append(folder.parent / folder.name.replace("images", "labels") / image.name)
    return next((path for path in candidates if path and path.is_file()), None)
