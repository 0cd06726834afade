"""The prepared cache: every volume once, on the training grid, in a few large files that all ranks of a node map.

    images_00000.npy   (n, D, H, W) of data.dtype: the volumes of part 0, whole numbers 0 .. 255 or 0.0 .. 1.0; with
                       data.channels C > 1 (n, C, D, H, W)
    labels_00000.npy   (n, D, H, W) uint8 or int16, masks_00000.npy likewise: only if a volume of the part has one
    volumes_00000.json the source files of the volumes; written last: a part exists when this file does
    plan.json          the parts that will be made, until OM_prepare.py is done
    refused.csv        which volumes are left out, and why
    manifest.json      settings, volumes, size and SHA-256 of every file, SHA-256 of the data list; written last:
                       without it a cache is incomplete
    .readers           every training that reads the cache holds a shared lock on it

Every file is written under a temporary name, flushed and renamed. OM_prepare.py writes, everything else only reads.
"""
import ast
import contextlib
import errno
import fcntl
import functools
import glob
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

from Dataloader.datalist import list_file
from Dataloader.formats import size_and_time
from Dataloader.prepare import KINDS, on_grid
from Dataloader.staging import damaged, file_sizes, lock_at_once, stage, wrong_files
from Runtime.errors import InputError, attempt
from Runtime.files import sha256, write_file

FORMAT = 1
SETTINGS = ("data.name", "data.root", "model.dims", "data.img_size", "data.spacing_mm", "data.crop_above",
            "data.percentiles", "data.window", "data.dtype", "data.channels")
MOST_VOLUMES = 16  # limit for a part
MOST_BYTES = 64 * 2 ** 20  # limit for the images of a part
LEAST_CONTRAST = 1e-4  # of 0 .. 1, between the voxels of a volume; less is noise of the interpolation
OPEN_FILES = 128  # mapped at a time by a process; each takes a file handle, and some systems allow only 1024
WORDS = ("subject", "modality", "split")  # what the data list says about a volume
# What the manifest says about a volume: its part and its place in there, whether it has a label and a mask, the size of
# its image's file.
LINE = ("id", "subject", "modality", "group", "row", "label", "mask", "split", "bytes")
PATIENCE_S = 10.0  # longer than OM_prepare.py needs to remove old parts
OURS = re.compile(r"\.?(?:(?:images|labels|masks|volumes)_(\d{5,})\.(?:npy|json)|(?:plan|manifest)\.json|refused\.csv)"
                  r"(\.tmp-(?:.+-)?\d+)?")


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------

def settings(cfg):
    """The config keys that determine the content of a cache, with their values, as plain JSON."""
    return {"format": FORMAT, **{key: cfg[key] for key in SETTINGS}}


def other_settings(made_with, cfg):
    """The `settings` of the config that differ from those a cache was made with. A folder has several spellings."""
    return {key: value for key, value in settings(cfg).items() if made_with.get(key) != value and not (
        key == "data.root" and value and made_with.get(key)
        and os.path.abspath(value) == os.path.abspath(made_with[key]))}


def encode(image, dtype):
    """Intensities 0 .. 1 as the cache stores them: "uint8" as 0 .. 255, "float16" or "float32" as they are.

    `as_float` in Dataloader/dataset.py is its inverse.
    """
    return np.rint(image * 255).astype(np.uint8) if dtype == "uint8" else image.astype(dtype)


@functools.cache
def code_mark():
    """SHA-256 of the code that brings a volume onto the training grid, which researchers edit. Lines of comments and
    docstrings do not count; a comment behind code does. The same under every Python."""
    total = hashlib.sha256()
    for name in ("prepare.py", "grids.py"):
        text = Path(__file__).with_name(name).read_text("utf-8")
        lines = dict(enumerate(text.splitlines(), 1))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                for number in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                    del lines[number]
        kept = (line for line in lines.values() if line.strip() and line.strip()[0] != "#")
        total.update("\n".join(kept).encode())
    return total.hexdigest()


def list_mark(root):
    """(Path, SHA-256) of the list that data.root names or contains; (None, "") if there is none that can be read."""
    try:
        path = list_file(Path(root))
        return path, sha256(path) if path else ""
    except OSError:  # such as a data folder that only those who prepare may enter
        return None, ""


def entry(item, root):
    """The part of a volume's record that comes from the data list: id, words, and files relative to the data folder.

    The list may change the words later; those of the manifest count.
    "source" has the size and time of each file, to detect changes; it is None if a file is missing.
    """
    base = Path(root) if Path(root).is_dir() else Path(root).parent
    paths = {kind: item[kind] and os.path.relpath(item[kind], base) for kind in KINDS}
    if item.get("channels"):
        paths["channels"] = [os.path.relpath(path, base) for path in item["channels"]]
    files = [item[kind] for kind in KINDS if item[kind]] + item.get("channels", [])
    try:
        source = [size_and_time(path) for path in files]
    except FileNotFoundError:
        source = None
    return {"id": item["id"], **paths, **{word: item[word] for word in WORDS}, "source": source}


def plan(folder, items, cfg, alive=lambda: None):
    """Divide a cache into parts that exist and parts to make; an interrupted run resumes with the same parts.

    A part is rebuilt if its source files have changed or left the list, or if one that was refused can be used now; it
    gets a new number while a finished cache still needs the old part. If the list only changes words of its volumes
    (subject, modality, split), the part stays, and its record has the new ones here and the old ones on disk.
    folder: of the cache. items: from the data list. alive: called before each refused volume is tried again.
    Returns: {number: record} of the parts that stay; {number: items} of those to make.
    """
    by_id = {item["id"]: item for item in items}
    kept, taken, prepared = {}, set(), set()
    sizes = file_sizes(folder)
    for path in record_paths(folder):
        number, record = int(path.stem.split("_")[1]), read_json(path)
        taken.add(number)
        ids = {line["id"] for line in all_lines(record)} if record else set()
        # A part that an earlier cache left may hold volumes that another one holds too: they would count twice.
        if ids and ids.isdisjoint(prepared) and stays(record, by_id, cfg, sizes, alive):
            for line in all_lines(record):
                line.update({word: by_id[line["id"]][word] for word in WORDS})
            kept[number] = record
            prepared |= ids
    if not (Path(folder) / "manifest.json").is_file():
        taken = set(kept)
    left = [item for item in items if item["id"] not in prepared]
    free_numbers = (number for number in itertools.count() if number not in taken)
    volume_bytes = cfg["data.channels"] * math.prod(cfg["data.img_size"]) * np.dtype(cfg["data.dtype"]).itemsize
    size = max(min(MOST_VOLUMES, MOST_BYTES // volume_bytes), 1)
    return kept, {next(free_numbers): left[first:first + size] for first in range(0, len(left), size)}


def stays(record, by_id, cfg, sizes, alive):
    """Whether a part is as `plan` would make it now. by_id: {id: item of the data list}. sizes: from `file_sizes`."""
    if other_settings(record["settings"], cfg) or wrong_files(sizes, record["files"]):
        return False
    for line in all_lines(record):
        item = by_id.get(line["id"])
        if item is None or any(line.get(key) != value for key, value in entry(item, cfg["data.root"]).items()
                               if key not in WORDS):
            return False
    for line in record["refused"]:  # what it lacked, such as a package or a disk, may be there by now
        alive()
        if not isinstance(attempt(line["id"], on_grid, by_id[line["id"]], cfg), str):
            return False
    return True


def all_lines(record):
    """The lines of a part's volumes, refused ones included."""
    return record["volumes"] + record["refused"]


def record_paths(folder):
    """The volumes_*.json of a folder, in the order of the parts."""
    return sorted(path for path in Path(folder).glob("volumes_*.json") if OURS.fullmatch(path.name))


def write_group(folder, number, items, cfg, done=lambda: None):
    """Prepare and write one part of the cache.

    An unusable volume is left out, and the part's record gives the reason. items: from the data list. done: called
    after each volume. Returns: the record.
    """
    # An old record would describe the new arrays if this run ended between them.
    (Path(folder) / f"volumes_{number:05d}.json").unlink(missing_ok=True)
    volumes, refused = [], []
    arrays = {kind: [] for kind in KINDS}
    for item in items:
        line = entry(item, cfg["data.root"])
        try:
            prepared = on_grid(item, cfg)
            least = 1 / 255 if cfg["data.dtype"] == "uint8" else LEAST_CONTRAST
            if np.ptp(prepared["image"].reshape(cfg["data.channels"], -1), axis=1).min() < least:
                raise InputError(f"{item['image']}: all of it is nearly one intensity on the training grid; check its "
                                 "voxel size in the header, data.spacing_mm and data.window.")
            prepared["image"] = encode(prepared["image"], cfg["data.dtype"])
            volumes.append({**line, **{key: prepared[key] for key in ("label_kept", "mask_kept")}})
            for kind in KINDS:
                arrays[kind].append(prepared[kind])
        except InputError as error:
            refused.append({**line, "reason": str(error)})
        except MemoryError as error:
            refused.append({**line, "reason": f"{item['image']}: too large for the free memory ({error}); run the same "
                            "command again with fewer --workers, or on a machine with more memory."})
        done()
    files, empty = {}, np.zeros(cfg["data.img_size"], np.int16)  # for a label or mask that a volume lacks
    for kind in KINDS:
        if all(array is None for array in arrays[kind]):
            continue
        stack = np.stack([empty if array is None else array for array in arrays[kind]])
        if kind != "image" and stack.min() >= 0 and stack.max() <= 255:
            stack = stack.astype(np.uint8)
        name, buffer = f"{kind}s_{number:05d}.npy", io.BytesIO()
        np.save(buffer, stack)
        files[name] = write_bytes(folder, name, buffer.getbuffer())
    record = {"settings": settings(cfg), "code": code_mark(), "volumes": volumes, "refused": refused, "files": files}
    write_json(folder, f"volumes_{number:05d}.json", record)
    return record


def as_bytes(content):
    """The content of a record, plan or manifest file: JSON, with the SHA-256 of its other keys under "sha256"."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": checksum}, allow_nan=False) + "\n").encode()


def write_json(folder, name, content):
    """Write a record, plan or manifest."""
    write_bytes(folder, name, as_bytes(content))


def write_bytes(folder, name, data):
    """Write a file of the cache. Returns: [bytes, SHA-256]."""
    write_file(Path(folder) / name, data)
    return [len(data), hashlib.sha256(data).hexdigest()]


def write_manifest(folder, cfg, groups, mark):
    """Write the manifest of a complete cache, and return it.

    groups: {number: record of `write_group` or `plan`}. mark: SHA-256 of `list_mark`, from before the list was read.
    """
    volumes, refused, files = [], [], {}
    for number, record in sorted(groups.items()):
        name = f"volumes_{number:05d}.json"
        volumes += [[line["id"], line["subject"], line["modality"], number, row, bool(line["label"]),
                     bool(line["mask"]), line["split"], line["source"][0][0]]
                    for row, line in enumerate(record["volumes"])]
        refused += [[line["id"], line["image"], line["reason"]] for line in record["refused"]]
        files.update(record["files"])
        # Words of the list may have changed. The record on disk keeps the old ones, because the old manifest, which a
        # training may read until the new one is there, has its checksum.
        data = (Path(folder) / name).read_bytes()
        files[name] = [len(data), hashlib.sha256(data).hexdigest()]
    manifest = {"settings": settings(cfg), "subject_pattern": cfg["data.subject_pattern"], "list": mark,
                "volumes": sorted(volumes), "refused": sorted(refused), "files": files}
    write_json(folder, "manifest.json", manifest)
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# Opening, checking
# ---------------------------------------------------------------------------------------------------------------------

def read_json(path):
    """A record, plan or manifest; None if it is missing or damaged."""
    try:
        data = Path(path).read_bytes()
        content = json.loads(data)
        # Compare all bytes, checksum included: a flipped bit can turn 1e-05 into 1E-05, the same number.
        return content if data == as_bytes(content) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return None


def require_root(cfg):
    """Raises InputError if the config's volumes do not exist, as in a fresh clone."""
    if not Path(cfg["data.root"]).exists() and not glob.glob(cfg["data.root"], recursive=True):
        raise InputError(f"data.root {cfg['data.root']}: there is no such data folder or list; name your volumes by "
                         "--set data.root=FOLDER.")


def read_manifest(folder, cfg):
    """The manifest of a cache made with this config's settings.

    Raises InputError for a cache that is missing, incomplete (naming the missing volumes), damaged, or made with other
    settings.
    """
    folder = Path(folder)
    again = "run OM_prepare.py with this config"
    if not (folder / "manifest.json").is_file():
        plan = read_json(folder / "plan.json")
        if not plan:
            require_root(cfg)
            raise InputError(f"data.cache {folder}: there is no prepared cache; {again} first.")
        check_settings(folder, plan["settings"], cfg)
        missing = {number: ids for number, ids in plan["groups"].items()
                   if not (folder / f"volumes_{number}.json").is_file()}
        names = [name for ids in missing.values() for name in ids]
        raise InputError(f"data.cache {folder} is not complete: {len(names)} of its "
                         f"{sum(map(len, plan['groups'].values()))} volumes are missing "
                         f"({some(names) or 'the manifest is'}); {again}, which continues where it stopped.")
    manifest = read_json(folder / "manifest.json")
    if not manifest:
        raise InputError(f"{folder / 'manifest.json'} is damaged; {again} and --repair.")
    check_settings(folder, manifest["settings"], cfg)
    return manifest


def check_settings(folder, made_with, cfg):
    """Raises InputError naming the settings that were different when the cache was made. made_with: its settings."""
    wrong = [f"{key} {made_with.get(key)} (the config says {value})"
             for key, value in other_settings(made_with, cfg).items()]
    if wrong:
        raise InputError(f"data.cache {folder} was made with {', '.join(wrong)}; set these back, name another "
                         "data.cache, or rebuild it: OM_prepare.py with this config and --fresh.")


def forget_damaged(folder, alive):
    """Remove the manifest, and the records of parts that are damaged or refused a volume, so that they are rebuilt.

    alive: called after each file. Returns: the number of records removed.
    """
    sizes, records = file_sizes(folder), {path: read_json(path) for path in record_paths(folder)}
    files = {path: record["files"] for path, record in records.items()
             if record and not record["refused"] and not wrong_files(sizes, record["files"])}
    wrong = damaged(folder, {name: mark for marks in files.values() for name, mark in marks.items()},
                    f"verifying {folder}", alive)
    removed = [path for path in records if path not in files or not files[path].keys().isdisjoint(wrong)]
    for path in (Path(folder) / "manifest.json", *removed):
        path.unlink(missing_ok=True)
    return len(removed)


def own_files(folder):
    """Names of the files in a folder that OM_prepare.py has written."""
    return {name for name in os.listdir(folder) if OURS.fullmatch(name)}


def require_ours(folder):
    """Raises InputError if files in a folder are named like those of a cache, but nothing shows that we wrote them.

    A cache that was begun has its plan, a record or its manifest, each with its checksum, or else .readers.
    """
    names = sorted(name for name in own_files(folder) if not OURS.fullmatch(name)[2]) if folder.is_dir() else []
    proofs = (folder / "manifest.json", folder / "plan.json", *record_paths(folder))
    if names and not (folder / ".readers").is_file() and not any(map(read_json, proofs)):
        raise InputError(f"data.cache {folder}: OM_prepare.py did not write its {some(names)}, and would replace them; "
                         "name another data.cache, or move these files away.")


def some(names, most=5):
    """The first names of a list and how many more there are, as text."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def verify(folder, manifest):
    """Read every file and compare it with its checksum.

    Returns: {file: what is wrong}, sorted by name, including files that do not belong to the cache.
    """
    wrong = wrong_files(file_sizes(folder), manifest["files"])
    known = {*manifest["files"], "manifest.json", "refused.csv", "plan.json", ".lock", ".lock.claim", "lock.json",
             ".readers"}
    for name in sorted(set(os.listdir(folder)) - known):
        wrong[name] = (f"{name} belongs to an earlier state of the cache, or to a run of OM_prepare.py that has not "
                       "ended" if OURS.fullmatch(name) else
                       f"{name} does not belong to the cache")
    files = {name: mark for name, mark in manifest["files"].items() if name not in wrong}
    for name in damaged(folder, files, f"verifying {folder}"):
        wrong[name] = f"{name} is damaged: its checksum is not that of the manifest"
    return dict(sorted(wrong.items()))


class Rows:
    """Volumes of one kind by number: `rows[i]` is a read-only (D, H, W) or (C, D, H, W) array, mapped from the cache.

    Its pickle, for a loader worker, holds two int32 for each volume.
    folder: of the cache. kind: "image", "label" or "mask". items: from `open_cache`. keep: whether a mapped file stays
    open for the next use.
    """

    def __init__(self, folder, kind, items, keep=True):
        self.folder, self.kind, self.keep = Path(folder), kind, keep
        self.groups, self.rows = (np.array([item[key] for item in items], np.int32) for key in ("group", "row"))

    def __getitem__(self, index):
        path = self.folder / f"{self.kind}s_{self.groups[index]:05d}.npy"
        part = map_once(path) if self.keep else np.load(path, mmap_mode="r")
        return part[self.rows[index]]


@functools.lru_cache(OPEN_FILES)
def map_once(path):
    """The array of a part, mapped read-only; the OPEN_FILES most recently used files stay open."""
    return np.load(path, mmap_mode="r")


@contextlib.contextmanager
def for_this_user(given):
    """Context that raises InputError instead of PermissionError: somebody else's folder, or what is around it.

    given: how the user named it, such as "data.cache Cache/brains".
    """
    try:
        yield
    except PermissionError as error:
        if error.filename is None:  # of no file, such as of a semaphore
            raise
        raise InputError(f"{given}: this user may not read or write {error.filename}; ask its owner to allow it, or "
                         "name another.") from error


def open_cache(folder, cfg, ranks=None):
    """Open the cache of a config.

    ranks: those of a training, which locks the cache while it reads; with data.verify, its ranks divide up the files
    and compare them with their checksums. None: only read the manifest; do not lock, check or copy.
    Returns: dict of
      folder  where to read: the cache, or its staged copy
      items   dicts of LINE, sorted by id
      refused [id, file, reason] of each volume left out
      staged  whether folder is a copy
      hold    the open lock file, to be kept while the cache is read, or None
    Raises InputError naming what is missing, damaged, different or not for this user, and while OM_prepare.py works on
    the cache.
    """
    show = ranks is not None and ranks.rank == 0
    staged = bool(ranks and cfg["data.stage"])
    with for_this_user(f"data.cache {folder}"), contextlib.ExitStack() as stack:
        lock = hold(folder, show) if ranks else None
        if lock:
            stack.enter_context(lock)
        manifest = read_manifest(folder, cfg)
        wrong = wrong_files(file_sizes(folder), manifest["files"])
        if wrong:
            raise InputError(f"data.cache {folder} is not complete: {some([*wrong.values()])}; run OM_prepare.py with "
                             "this config and --repair.")
        for path in map(Path(folder).joinpath, manifest["files"]):  # else a step would be the first to notice
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        pattern = manifest["subject_pattern"]
        if pattern != cfg["data.subject_pattern"]:
            raise InputError(f"data.cache {folder} was made with data.subject_pattern \"{pattern}\" (the config says "
                             f"\"{cfg['data.subject_pattern']}\"); run OM_prepare.py with this config, which reads no "
                             "volume again for that.")
        path, mark = list_mark(cfg["data.root"])
        if path and mark != manifest.get("list", mark):  # caches of earlier versions have no mark
            sentence = (f"the list {path} has changed since data.cache {folder} was made; run OM_prepare.py with this "
                        "config, which reads no volume again for new subjects, modalities or splits.")
            if os.environ.get("OMNIMORPH_ROUND", "0") in ("", "0"):
                raise InputError(sentence)
            if show:  # An edit must not stop a campaign, so its restarts keep the volumes of the cache.
                print(f"warning: {sentence}", file=sys.stderr)
        if staged:
            folder, lock = stage(folder, manifest, cfg["data.stage"], show), None
        elif ranks and cfg["data.verify"]:
            own = dict(sorted(manifest["files"].items())[ranks.rank::ranks.world_size])
            wrong = damaged(folder, own, f"comparing {folder} with its checksums", show=show)
            if wrong:
                raise InputError(f"data.cache {folder} is damaged: {some(wrong)} differ from what was prepared; run "
                                 "OM_prepare.py with this config and --repair.")
        if not staged:
            stack.pop_all()  # the caller closes the lock
    return {"folder": Path(folder), "items": items_of(manifest), "refused": manifest["refused"], "staged": staged,
            "hold": lock}


def items_of(manifest):
    """A dict of LINE for each volume of a cache, sorted by id."""
    return [dict(zip(LINE, line)) for line in manifest["volumes"]]


# ---------------------------------------------------------------------------------------------------------------------
# Readers hold a shared lock. The system releases it when the process ends, however it ends and on any node.
# ---------------------------------------------------------------------------------------------------------------------

def hold(folder, show):
    """Lock a cache for reading, shared with other readers.

    show: print a warning if the file system has no locks. Returns: the open lock file; None if there is no cache or no
    lock. Raises InputError if OM_prepare.py keeps the cache locked for more than PATIENCE_S seconds.
    """
    # --repair removes the manifest first.
    if not (Path(folder) / ".readers").is_file() and not read_json(Path(folder) / "manifest.json"):
        return None  # and leave no .readers in a folder that is no cache, see `require_ours`
    ends = time.monotonic() + PATIENCE_S
    readers = open_readers(folder)
    if readers is None:
        cannot_lock(folder, "no file can be created there", show)
        return None
    try:
        while not lock_at_once(readers, fcntl.LOCK_SH):
            if time.monotonic() > ends:
                readers.close()
                raise InputError(f"data.cache {folder}: OM_prepare.py is rebuilding it; wait until it has finished "
                                 "and start again.")
            time.sleep(0.1)
    except OSError as error:
        cannot_lock(folder, error.strerror, show)
        readers.close()
        return None
    return readers


@contextlib.contextmanager
def without_readers(folder):
    """Keep training runs from opening a cache. Yields: whether no run reads it; True if there are no file locks."""
    readers = open_readers(folder)
    free = True
    try:
        free = readers is None or lock_at_once(readers)
    except OSError as error:
        cannot_lock(folder, error.strerror, show=True)
    try:
        yield free
    finally:
        if readers is not None:
            readers.close()


def open_readers(folder):
    """The open .readers of a cache; None if there is no cache, or the file is missing and cannot be created."""
    for mode in ("a+b", "rb"):  # another user's file can only be read, which is enough to lock it
        with contextlib.suppress(OSError):
            return open(Path(folder) / ".readers", mode)


def cannot_lock(folder, reason, show):
    """Warn, if `show` is set, that nothing keeps OM_prepare.py from changing a cache that is being read."""
    if show:
        print(f"data.cache {folder} cannot be locked ({reason}): do not run OM_prepare.py on it during training",
              file=sys.stderr, flush=True)
