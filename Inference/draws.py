"""The folder that OM_augment.py fills: names of its files, records of its draws, and which of them are complete.

A draw is done if draws.jsonl has its record, the files of its volume are unchanged, and its own files have the sizes
that were written. settings.json has the settings of all draws; dataset.json lists them for training.
"""
import contextlib
import hashlib
import json

from Inference import results
from Runtime import __version__
from Runtime.errors import InputError
from Runtime.files import csv_text, read_lines, sha256, write_file

FOLDERS = {"image": "imagesTr", "label": "labelsTr", "mask": "masksTr", "field": "fieldsTr"}
MEASURES = {"mean": "deformation_percent_mean", "p95": "deformation_percent_p95", "max": "deformation_percent_max",
            "folding": "folding_percent"}  # of a record: its column in draws.csv
DATA_KEYS = ("data.img_size", "data.spacing_mm", "data.crop_above", "data.percentiles", "data.window", "run.amp")


def draw_name(item, draw):
    """The name of a draw, and of its files without folder and suffix. item: of the volume. draw: its number."""
    return f"{item['id']}_draw{draw:02d}"


def draw_paths(item, draw):
    """The paths of a draw's files, relative to the output folder: {kind: path}."""
    name = draw_name(item, draw)
    paths = {kind: f"{folder}/{name}.nii.gz" for kind, folder in FOLDERS.items() if kind == "field" or item[kind]}
    for channel in range(1, 1 + len(item.get("channels", []))):
        paths[f"channel{channel}"] = f"channelsTr/{name}_{channel:04d}.nii.gz"
    return paths


def draw_settings(job, cfg, targets):
    """What must be the same for earlier draws to be kept, as plain JSON. job: of OM_augment.py."""
    aims = [digest for item in targets for digest in source_digests({**item, "label": None})]
    if len(aims) > 1:
        aims = [hashlib.sha256("".join(aims).encode()).hexdigest()]
    settings = {key: job[key] for key in ("seed", "start", "stride", "register", "condition", "slices", "labels")}
    settings["model"] = job["model"] and sha256(job["model"])
    settings |= {"target": aims[0] if aims else None, "version": __version__}
    families = ("model", "diffusion", "copies", *(("registration", "refine") if job["register"] is not None else ()))
    settings.update({key: value for key, value in cfg.items()
                     if key.split(".")[0] in families or key in DATA_KEYS})
    return json.loads(json.dumps(settings))


def claim_folder(out, settings, items, whole):
    """Use an empty folder, or continue in one whose draws were made with the same settings.

    out: Path of a folder that this process has locked. whole: items are a whole list, which may have lost some volumes.
    Returns: the records of the draws already there, {name: record}.
    Raises InputError if the folder holds other things, or draws of other volumes or made with other settings.
    """
    path, log = out / "settings.json", out / "draws.jsonl"
    records, earlier = read_lines(log), {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        earlier = json.loads(path.read_text())
    # Other programs have a settings.json too.
    if not isinstance(earlier, dict) or not {"seed", "stride", "labels"} <= earlier.keys():
        others = [entry.name for entry in out.iterdir() if entry.name not in (
            "lock.json", ".lock", ".DS_Store", "desktop.ini")]
        if others:
            raise InputError(f"{out} contains other files ({sorted(others)[0]}); name a new folder.")
    elif records:
        earlier = {"version": "1.0.0", **earlier}  # which did not write it
        for key in settings:
            if earlier.get(key) != settings[key]:
                other = (f"another --{key}, or other content in it" if key in ("model", "target") else
                         f"{key} {earlier.get(key)}, not {settings[key]}")
                raise InputError(f"{out} has draws with {other}; name a new folder.")
        ids, known = {item["id"] for item in items}, {record["id"] for record in records}
        others = sorted(known - ids)
        if others and not (whole and known & ids):
            raise InputError(f"{out} has draws of {', '.join(others[:3])}, which its list would lose; give all volumes "
                             "at once by --data, or name a new folder.")
    write_file(path, (json.dumps(settings, indent=1) + "\n").encode())
    for unfinished in out.glob("*Tr/.*.tmp-*"):  # of a killed run; the lock shows that no other run is active
        unfinished.unlink(missing_ok=True)
    return {record["name"]: record for record in records}


def missing_draws(item, draws, records, out):
    """Numbers of a volume's draws still to be made: those without a record, or with files that differ from it."""
    digests = source_digests(item) if records else None
    missing = []
    for draw in range(draws):
        record = records.get(draw_name(item, draw), {})
        if record.get("source") != digests or record.get("bytes") != file_sizes(draw_paths(item, draw), out):
            missing.append(draw)
    return missing


def source_digests(item):
    """SHA-256 of each file, or folder of slices, of a volume, so that a changed one is deformed again; None if missing,
    or if this user may not read it."""
    paths = [item[kind] for kind in ("image", "label", "mask") if item[kind]]
    return list(results.source_digests(dict(enumerate([*paths, *item.get("channels", [])]))).values())


def file_sizes(paths, out):
    """Bytes of the files of a draw, {kind: int}; None for one that is missing.

    Every file is flushed to disk before it gets its name, so the size reveals a file that was truncated later.
    """
    files = {kind: out / path for kind, path in paths.items()}
    return {kind: file.stat().st_size if file.is_file() else None for kind, file in files.items()}


def write_lists(out, items, draws, records):
    """Write dataset.json (for any reader of Decathlon lists), draws.csv and draws.jsonl.

    draws: number of draws of each of the items. records: {name: record}; it may hold others too.
    Returns: the records of these draws, in the order of the lists.
    """
    entries, kept = [], []
    for item in items:
        for draw in range(draws):
            kept.append(records[draw_name(item, draw)])
            paths = draw_paths(item, draw)
            images = [path for kind, path in paths.items() if kind == "image" or kind.startswith("channel")]
            entry = {kind: path for kind, path in paths.items() if not kind.startswith("channel")}
            entry.update(image=images if len(images) > 1 else images[0], subject=item["subject"])
            if item["modality"]:
                entry["modality"] = item["modality"]
            entries.append({**entry, "draw": draw})
    write_file(out / "draws.jsonl", "".join(json.dumps(record) + "\n" for record in kept).encode())
    named = ("name", "id", "draw", "target")
    table = [(*named, *MEASURES.values()), *([record[key] for key in (*named, *MEASURES)] for record in kept)]
    write_file(out / "draws.csv", csv_text(table))
    content = {"name": "deformed copies", "numTraining": len(entries), "training": entries}
    write_file(out / "dataset.json", (json.dumps(content, indent=1) + "\n").encode())
    return kept
