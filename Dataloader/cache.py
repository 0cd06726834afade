"""The prepared cache: every volume once on the training grid, in a few large files that all ranks of a node map.

    images_00000.npy   (n, D, H, W) of data.dtype: the volumes of part 0, whole numbers 0 .. 255 or 0.0 .. 1.0
    labels_00000.npy   (n, D, H, W) uint8 or int16, masks_00000.npy likewise: only where a volume of the part has one
    volumes_00000.json what came from where, headers and grids; written last, so a part is there when this file is
    plan.json          which parts there will be, while OM_prepare.py is not through
    refused.csv        which volumes are left out, and why
    manifest.json      settings, volumes, size and SHA-256 of every file; written last, so a cache is whole when it is
    .readers           locked, shared, by every training that reads the cache

Every file is written under another name, flushed and renamed. OM_prepare.py writes, everything else only reads.
"""
import contextlib
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from Dataloader.datalist import bids_subject
from Dataloader.prepare import KINDS, describe, on_grid
from Dataloader.staging import damaged, file_sizes, stage
from Runtime.errors import InputError
from Runtime.files import sha256, write_file

FORMAT = 1
SETTINGS = ("data.name", "data.root", "model.dims", "data.img_size", "data.spacing_mm", "data.crop_above",
            "data.percentiles", "data.window", "data.dtype")
MOST_VOLUMES, MOST_BYTES = 16, 64 * 2 ** 20  # of a part, images alone
OPEN_FILES = 128  # mapped at a time by a process; each takes a file handle, of which some systems give only 1024
WORDS = ("subject", "modality", "split")  # what the list says of a volume
LINE = ("id", "subject", "modality", "group", "row", "label", "mask", "split", "bytes")  # of a volume in the manifest
PATIENCE_S = 10.0  # OM_prepare.py removes old parts in less
OURS = re.compile(r"\.?(?:(?:images|labels|masks|volumes)_(\d{5,})\.(?:npy|json)|(?:plan|manifest)\.json|refused\.csv)"
                  r"(\.tmp-\d+)?")


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------

def settings(cfg):
    """What the content of a cache depends on, of a config."""
    return {"format": FORMAT, **{key: cfg[key] for key in SETTINGS}}


def group_size(cfg):
    """Volumes of a part."""
    volume = math.prod(cfg["data.img_size"]) * np.dtype(cfg["data.dtype"]).itemsize
    return max(min(MOST_VOLUMES, MOST_BYTES // volume), 1)


def encode(image, dtype):
    """Intensities 0 .. 1 as they are stored."""
    return np.rint(image * 255).astype(np.uint8) if dtype == "uint8" else image.astype(dtype)


def decode(image):
    """Intensities 0 .. 1, float32, of a stored array."""
    return image.astype(np.float32) * np.float32(1 / 255) if image.dtype == np.uint8 else image.astype(np.float32)


def source(item):
    """What tells whether the files of a volume have changed: size and time of each; None where one is missing."""
    paths = [item[kind] for kind in KINDS if item[kind]]
    try:
        return [[found.st_size, found.st_mtime_ns] for found in map(os.stat, paths)]
    except FileNotFoundError:
        return None


def entry(item, root):
    """The lines of a volume that the datalist knows, as they are stored."""
    base = Path(root) if Path(root).is_dir() else Path(root).parent
    paths = {kind: item[kind] and os.path.relpath(item[kind], base) for kind in KINDS}
    return {"id": item["id"], **paths, **{word: item[word] for word in WORDS}}


def plan(folder, items, cfg):
    """What of a cache is there already, and what is to be made: the same parts whenever it was interrupted.

    Returns: {number: record} of the parts that stay; {number: items} of those to make. A part whose source files have
    changed, or are not in the list any more, is made anew under another number while a finished cache still needs it.
    A part of whose volumes the list only says other words (subject, modality, split) stays, with these in its record.
    """
    wanted = {item["id"]: {**entry(item, cfg["data.root"]), "source": source(item)} for item in items}
    kept, taken, sizes = {}, set(), file_sizes(folder)
    for path in record_paths(folder):
        number, found = int(path.stem.split("_")[1]), read_json(path)
        taken.add(number)
        usable = found and found["settings"] == settings(cfg) and not wrong_files(sizes, found["files"])
        lines = found["volumes"] + found["refused"] if usable else []
        if lines and all(line["id"] in wanted and same_files(line, wanted[line["id"]]) for line in lines):
            for line in lines:
                line.update({word: wanted[line["id"]][word] for word in WORDS})
            kept[number] = found
    if not (Path(folder) / "manifest.json").is_file():
        taken = set(kept)
    there = {line["id"] for found in kept.values() for line in found["volumes"] + found["refused"]}
    left = [item for item in items if item["id"] not in there]
    numbers, size = (number for number in itertools.count() if number not in taken), group_size(cfg)
    return kept, {next(numbers): left[first:first + size] for first in range(0, len(left), size)}


def same_files(line, wanted):
    """Whether a volume of a record has the files that the list now names, unchanged."""
    return all(line[key] == value for key, value in wanted.items() if key not in WORDS)


def record_paths(folder):
    """The volumes_*.json that are there, in the order of the parts."""
    return sorted(path for path in Path(folder).glob("volumes_*.json") if OURS.fullmatch(path.name))


def write_group(folder, number, items, cfg, done=lambda: None):
    """Prepare one part of the cache. done() is called after each volume.

    A volume that cannot be used is left out, with the reason in the part's record. Returns: the record.
    """
    volumes, refused, arrays = [], [], {kind: [] for kind in KINDS}
    for item in items:
        line = {**entry(item, cfg["data.root"]), "source": source(item)}
        try:
            found = on_grid(item, cfg)
            found["image"] = encode(found["image"], cfg["data.dtype"])
            volumes.append({**line, **describe(item, found)})
            for kind in KINDS:
                arrays[kind].append(found[kind])
        except InputError as error:
            refused.append({**line, "reason": str(error)})
        done()
    files = {}
    if volumes:
        name = f"images_{number:05d}.npy"
        files[name] = write_array(folder, name, np.stack(arrays["image"]))
    for kind in KINDS[1:]:
        if any(array is not None for array in arrays[kind]):
            empty = np.zeros(cfg["data.img_size"], np.int16)
            stack = np.stack([empty if array is None else array for array in arrays[kind]])
            stack = stack.astype(np.uint8) if stack.min() >= 0 and stack.max() <= 255 else stack
            files[f"{kind}s_{number:05d}.npy"] = write_array(folder, f"{kind}s_{number:05d}.npy", stack)
    record = {"settings": settings(cfg), "volumes": volumes, "refused": refused, "files": files}
    write_json(folder, f"volumes_{number:05d}.json", record)
    return record


def write_array(folder, name, array):
    """Write an array as .npy. Returns: [bytes, SHA-256]."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return write_bytes(folder, name, buffer.getbuffer())


def write_json(folder, name, content):
    """Write a record, plan or manifest, with its own checksum. Returns: [bytes, SHA-256]."""
    return write_bytes(folder, name, as_bytes({**content, "sha256": digest(content)}))


def as_bytes(content):
    return (json.dumps(content, allow_nan=False) + "\n").encode()


def write_bytes(folder, name, data):
    """Write a file of the cache. Returns: [bytes, SHA-256]."""
    write_file(Path(folder) / name, data)
    return [len(data), hashlib.sha256(data).hexdigest()]


def write_manifest(folder, cfg, groups):
    """The cache is whole: say so. groups: {number: record of `write_group` or `plan`}. Returns: the manifest."""
    volumes, refused, files = [], [], {}
    for number, record in sorted(groups.items()):
        name = f"volumes_{number:05d}.json"
        volumes += [[line["id"], line["subject"], line["modality"], number, row, bool(line["label"]),
                     bool(line["mask"]), line["split"], line["source"][0][0]]
                    for row, line in enumerate(record["volumes"])]
        refused += [[line["id"], line["image"], line["reason"]] for line in record["refused"]]
        files.update(record["files"])
        data = as_bytes({**record, "sha256": digest(record)})
        files[name] = [len(data), hashlib.sha256(data).hexdigest()]
        # Only where words have changed, and only now: until the manifest is new, the old one still needs it as it was.
        if (Path(folder) / name).read_bytes() != data:
            write_bytes(folder, name, data)
    manifest = {"settings": settings(cfg), "subject_pattern": cfg["data.subject_pattern"], "volumes": sorted(volumes),
                "refused": sorted(refused), "files": files}
    write_json(folder, "manifest.json", manifest)
    return manifest


def digest(content):
    """SHA-256 of a record or manifest, which carries it under "sha256"."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Opening, checking
# ---------------------------------------------------------------------------------------------------------------------

def read_json(path):
    """A record, plan or manifest; None where it is missing or damaged."""
    try:
        data = Path(path).read_bytes()
        content = json.loads(data)
        # The bytes too: 1e-05 and 1E-05 are the same number, but one flipped bit apart.
        return content if content["sha256"] == digest(content) and data == as_bytes(content) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None


def read_manifest(folder, cfg):
    """The manifest of a cache made with this config's settings.

    Raises InputError for a cache that is not there, not complete (naming volumes that are missing), or another one.
    """
    folder, again = Path(folder), "run OM_prepare.py with this config"
    if not (folder / "manifest.json").is_file():
        plan = read_json(folder / "plan.json")
        if not plan:
            raise InputError(f"data.cache {folder}: there is no prepared cache; {again} first.")
        check_settings(folder, plan["settings"], cfg)
        missing = {number: ids for number, ids in plan["groups"].items()
                   if not (folder / f"volumes_{number}.json").is_file()}
        names = [name for ids in missing.values() for name in ids]
        raise InputError(f"data.cache {folder} is not complete: {len(names)} of its "
                         f"{sum(map(len, plan['groups'].values()))} volumes are missing "
                         f"({some(names) or 'the manifest is'}); {again}, which goes on where it stopped.")
    manifest = read_json(folder / "manifest.json")
    if not manifest:
        raise InputError(f"{folder / 'manifest.json'} is damaged; {again} and --repair.")
    check_settings(folder, manifest["settings"], cfg)
    return manifest


def check_settings(folder, found, cfg):
    """Raises InputError naming what was different when the cache was made."""
    wrong = [f"{key} {found.get(key)} (the config says {value})" for key, value in settings(cfg).items()
             if found.get(key) != value]
    if wrong:
        raise InputError(f"data.cache {folder} was made with {', '.join(wrong)}; set these back, name another "
                         "data.cache, or make it anew: OM_prepare.py with this config and --fresh.")


def forget_damaged(folder, progress=iter):
    """Remove the records of parts that are damaged or lack refused volumes, and the manifest: they are made anew.

    progress: see `verify`. Returns: the names of the records removed.
    """
    removed, sizes = [], file_sizes(folder)
    for name in progress([path.name for path in record_paths(folder)]):
        found = read_json(Path(folder) / name)
        if not found or found["refused"] or wrong_files(sizes, found["files"]) or any(
                sha256(Path(folder) / file) != checksum for file, (_, checksum) in found["files"].items()):
            removed.append(name)
    for name in ["manifest.json", *removed]:
        (Path(folder) / name).unlink(missing_ok=True)
    return removed


def remove_all(folder, keep=()):
    """Remove the files of a cache that are not in `keep`; nothing that is not of its making."""
    for name in os.listdir(folder):
        if OURS.fullmatch(name) and name not in keep:
            (Path(folder) / name).unlink()


def some(names, most=5):
    """A few of many names for a sentence."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def wrong_files(found, files):
    """What is missing or of another size, as a list of texts. found: from `file_sizes`. files: {name: [bytes, ...]}."""
    return ([f"{name} is missing" for name in files if name not in found]
            + [f"{name} is truncated: {found[name]} of {size} bytes" if found[name] < size else
               f"{name} has {found[name]} bytes instead of {size}" for name, (size, _) in files.items()
               if found.get(name, size) != size])


def verify(folder, manifest, progress=iter):
    """Read every file and compare it with its checksum. progress: takes and gives the list of files, e.g. tqdm.

    Returns: {file: what is wrong}, in the order of names; files that do not belong to the cache too.
    """
    wrong = {text.split(" ")[0]: text for text in wrong_files(file_sizes(folder), manifest["files"])}
    known = {*manifest["files"], "manifest.json", "refused.csv", "plan.json", ".lock", "lock.json", ".readers"}
    for name in sorted(set(os.listdir(folder)) - known):
        wrong[name] = (f"{name} is of a run of OM_prepare.py that has not ended" if OURS.fullmatch(name) else
                       f"{name} does not belong to the cache")
    for name in progress(sorted(set(manifest["files"]) - set(wrong))):
        if sha256(Path(folder) / name) != manifest["files"][name][1]:
            wrong[name] = f"{name} is damaged: its checksum is not that of the manifest"
    return dict(sorted(wrong.items()))


class Rows:
    """Volumes of one kind by number: `rows[i]` is a read-only (D, H, W) array in the page cache of the machine.

    A pickle of it, for a loader worker, holds two short integers a volume. keep: whether maps stay for the next use.
    """

    def __init__(self, folder, kind, groups, rows, keep=True):
        self.folder, self.kind, self.open = Path(folder), kind, map_once if keep else map_part
        self.groups, self.rows = np.asarray(groups, np.int32), np.asarray(rows, np.int32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.open(self.folder / f"{self.kind}s_{self.groups[index]:05d}.npy")[self.rows[index]]


def map_part(path):
    return np.load(path, mmap_mode="r")


@functools.lru_cache(OPEN_FILES)
def map_once(path):
    return map_part(path)


def open_cache(folder, cfg, ranks=None):
    """Open the cache of a config.

    ranks: of a training, which holds the cache as long as it reads it, and compares it with its checksums where
    data.verify is true, each rank a share of the files; None: only look, wherever the files are.
    Returns: dict of folder, items (dict(id, subject, modality, split, bytes (of the image's file), label, mask; the
    last two say whether there is one), sorted by id), groups and rows (where each is), refused (id, file, reason),
    staged (whether folder is a copy), hold (what is to be kept while the cache is read, or None).
    Raises InputError naming what is missing, damaged or different, and where OM_prepare.py is at work on the cache.
    """
    show = ranks is not None and ranks["rank"] == 0
    held = hold(folder, show) if ranks else None
    with contextlib.ExitStack() as stack:
        if held:
            stack.enter_context(held)
        found = look_into(folder, cfg, ranks, show)
        if not found["staged"]:
            stack.pop_all()  # the caller's now
    return {**found, "hold": None if found["staged"] else held}


def look_into(folder, cfg, ranks, show):
    """What `open_cache` returns, of a cache that is held."""
    manifest = read_manifest(folder, cfg)
    if problems := wrong_files(file_sizes(folder), manifest["files"]):
        raise InputError(f"data.cache {folder} is not complete: {some(problems)}; run OM_prepare.py with this "
                         "config and --repair.")
    pattern = manifest.get("subject_pattern", "")
    if pattern != cfg["data.subject_pattern"]:
        raise InputError(f"data.cache {folder} was made with data.subject_pattern \"{pattern}\" (the config says "
                         f"\"{cfg['data.subject_pattern']}\"); run OM_prepare.py with this config, which reads no "
                         "volume again for that.")
    staged = bool(ranks and cfg["data.stage"])
    if staged:
        folder = stage(folder, manifest, cfg["data.stage"], show)
    elif ranks and cfg["data.verify"]:
        require_undamaged(folder, manifest, ranks, show)
    volumes = [{"split": "", "bytes": None, **dict(zip(LINE, line))} for line in manifest["volumes"]]
    if "subject_pattern" not in manifest:  # of an earlier version, which did not know BIDS names
        for line in volumes:
            line["subject"] = (line["subject"] == line["id"] and bids_subject(line["id"])) or line["subject"]
    return {"folder": Path(folder), "groups": [line.pop("group") for line in volumes],
            "rows": [line.pop("row") for line in volumes], "items": volumes, "refused": manifest["refused"],
            "staged": staged}


def require_undamaged(folder, manifest, ranks, show):
    """Compare this rank's share of the files with their checksums. Raises InputError naming those that are damaged."""
    mine = sorted(manifest["files"])[ranks["rank"]::ranks["world_size"]]
    if wrong := damaged(folder, mine, manifest, "data set", f"comparing {folder} with its checksums", show):
        raise InputError(f"data.cache {folder} is damaged: {some(wrong)} differ from what was prepared; run "
                         "OM_prepare.py with this config and --repair.")


# ---------------------------------------------------------------------------------------------------------------------
# Who reads it: a shared lock, which ends with the process, however it ends, on whichever node
# ---------------------------------------------------------------------------------------------------------------------

def hold(folder, show):
    """Hold a cache for reading. Returns: the open file that does, None where there is no cache or no lock.

    show: say so where the file system has no locks. Raises InputError while OM_prepare.py has the cache to itself.
    """
    if not (Path(folder) / "manifest.json").is_file():
        return None
    readers, ends = open_readers(folder), time.monotonic() + PATIENCE_S
    if readers is None:
        cannot_lock(folder, "no file can be made there", show)
    while readers is not None:
        try:
            if lock_now(readers, fcntl.LOCK_SH):
                return readers
        except OSError as error:
            cannot_lock(folder, error.strerror, show)
            readers.close()
            return None
        if time.monotonic() > ends:
            readers.close()
            raise InputError(f"data.cache {folder}: OM_prepare.py is making it anew; wait for its end and start again.")
        time.sleep(0.1)


@contextlib.contextmanager
def without_readers(folder):
    """Keep trainings from a cache for a while. Yields: whether none reads it; True too where nobody can tell."""
    readers, free = open_readers(folder), True
    try:
        free = readers is None or lock_now(readers, fcntl.LOCK_EX)
    except OSError as error:
        cannot_lock(folder, error.strerror, show=True)
    try:
        yield free
    finally:
        if readers is not None:
            readers.close()


def open_readers(folder):
    """The open .readers of a cache; None where there is no cache, or none may be made there."""
    for mode in ("a+b", "rb"):  # somebody else's cache may be read, and locked, too
        with contextlib.suppress(OSError):
            return open(Path(folder) / ".readers", mode)


def lock_now(readers, kind):
    """Whether the lock could be had at once. Raises OSError where the file system has none."""
    try:
        fcntl.flock(readers, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cannot_lock(folder, reason, show):
    if show:
        print(f"data.cache {folder} cannot be locked ({reason}): do not run OM_prepare.py on it while a training reads "
              "it", file=sys.stderr, flush=True)


def record(folder, identity):
    """What is known of a volume besides its voxels, for `to_original`. Raises InputError for an unknown id."""
    manifest = read_json(Path(folder) / "manifest.json") or {"volumes": []}
    for line in (dict(zip(LINE, line)) for line in manifest["volumes"]):
        if line["id"] == identity:
            return read_json(Path(folder) / f"volumes_{line['group']:05d}.json")["volumes"][line["row"]]
    raise InputError(f"{folder}: there is no volume {identity} in this cache.")
