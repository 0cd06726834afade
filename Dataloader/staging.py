"""A copy of the cache on each node's own disk or in its memory: made once for all ranks of the node, and shared.

Ranks of a node find each other by a lock on the copy. A copy that nobody holds is left for the next round of the same
training. The last rank of a training that is done removes it, or the next training that puts another cache there.
"""
import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path

from tqdm import tqdm

from Runtime import watchdog
from Runtime.errors import InputError

CHUNK = 8 * 2 ** 20
HELD = {}  # folder: the open lock file; closing it, or the end of the process, gives it back


def stage(folder, manifest, place):
    """Copy a cache to its folder in `place`, unless it is there. Returns: that folder.

    place: a folder; ~ and $VARIABLES are expanded. Every file is compared with its checksum on the way.
    Raises InputError where the place is missing or too small, and for a damaged file.
    """
    parent = expanded(place)
    if "$" in str(parent) or not parent.is_dir():
        raise InputError(f"data.stage {place}: no folder {parent} on this node; correct it, or set it to \"\".")
    target = copy_of(manifest, parent)
    remove_unused(parent, target)
    while target not in HELD:
        target.mkdir(exist_ok=True)
        handle = open_lock(target)
        if handle and not (target / "manifest.json").is_file():
            try:
                copy_all(Path(folder), manifest, target)
            except OSError as error:
                raise InputError(f"data.stage {place}: copying {folder} failed ({error}); make room, name another "
                                 "folder, or set data.stage to \"\".") from error
        if handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            # Between the two locks another training may have found it unused and removed it.
            if is_lock_of(handle, target):
                HELD[target] = handle
            else:
                handle.close()
    if missing := not_copied(manifest, target):
        raise InputError(f"data.stage {place}: {next(iter(missing))} of the copy is gone or not whole; remove {target} "
                         "and start again.")
    return target


def expanded(place):
    return Path(os.path.expandvars(place)).expanduser()


def copy_of(manifest, parent):
    """The folder of a cache's copy: of this user, and of this content."""
    return parent / f"omnimorph_{os.getuid()}_{manifest['sha256'][:16]}"


def release(remove=False):
    """Give back what this process holds. remove: delete copies that no other process holds."""
    for target, handle in list(HELD.items()):
        if remove:
            remove_if_unused(target, handle)
        handle.close()
        del HELD[target]


def open_lock(target):
    """The lock of a copy: shared where it is whole, else ours alone; None where it was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        handle = open(target / ".lock", "w")
        wait_for(handle, target)
        if is_lock_of(handle, target):
            return handle
        handle.close()


def is_lock_of(handle, target):
    """Whether a lock file is still that of the copy, which another process may have removed or made anew."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(target / ".lock"), os.fstat(handle.fileno()))
    return False


def wait_for(handle, target):
    """Get the lock. While another rank copies, each new file shows that it lives."""
    seen = -1
    while not lock_at_once(handle, fcntl.LOCK_SH if (target / "manifest.json").is_file() else fcntl.LOCK_EX):
        if (count := len(os.listdir(target))) != seen:
            watchdog.phase("stage")
            seen = count
        time.sleep(0.2)


def lock_at_once(handle, kind=fcntl.LOCK_EX):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    return False


def file_sizes(folder):
    """Bytes of every file of a folder, by name."""
    with os.scandir(folder) as listing:
        return {item.name: item.stat().st_size for item in listing}


def not_copied(manifest, target):
    """Files of the cache that are not there, or not whole: {name: bytes}."""
    there = file_sizes(target)
    return {name: size for name, (size, _) in manifest["files"].items() if there.get(name) != size}


def copy_all(folder, manifest, target):
    """Copy what is not there yet; the manifest last."""
    files = not_copied(manifest, target)
    need, free = sum(files.values()), shutil.disk_usage(target).free
    if need > free:
        raise InputError(f"data.stage {target.parent}: the cache needs {need / 2 ** 30:.1f} GiB, free are "
                         f"{free / 2 ** 30:.1f}; name a larger folder, or set data.stage to \"\".")
    for name in tqdm(files, f"copying the cache to {target}", unit="file", leave=False):
        watchdog.phase("stage")
        copy_file(folder / name, target / name, manifest["files"][name][1])
    shutil.copyfile(folder / "manifest.json", target / "manifest.json.tmp")
    os.replace(target / "manifest.json.tmp", target / "manifest.json")


def copy_file(path, target, checksum):
    partial, total = target.with_name(f"{target.name}.tmp"), hashlib.sha256()
    with open(path, "rb") as file, open(partial, "wb") as copy:
        while chunk := file.read(CHUNK):
            total.update(chunk)
            copy.write(chunk)
    if total.hexdigest() != checksum:
        partial.unlink()
        raise InputError(f"{path} is damaged: its checksum is not that of the manifest; run OM_prepare.py with this "
                         "config and --repair.")
    os.replace(partial, target)


def remove_unused(parent, target):
    """Delete copies of other caches that no process of this user holds any more."""
    for other in parent.glob(f"omnimorph_{os.getuid()}_*"):
        if other != target and (other / ".lock").is_file():
            with contextlib.suppress(FileNotFoundError), open(other / ".lock") as handle:
                remove_if_unused(other, handle)


def remove_if_unused(target, handle):
    """Delete a copy that no other process holds."""
    if lock_at_once(handle) and is_lock_of(handle, target):
        # Under another name at once, so that nobody takes what is half removed for a copy.
        removed = target.with_name(f"{target.name}.removed-{os.getpid()}")
        os.replace(target, removed)
        shutil.rmtree(removed, ignore_errors=True)
