"""A copy of the cache on each node's own disk or in its memory: made once for all ranks of the node, and shared.

Ranks of a node find each other by a lock on the copy. A copy that nobody holds is left for the next round of the same
training, whose first rank compares it with its checksums. The last rank of a training that is done removes it, or the
next training that puts another cache there.

The place may be one where everybody writes (/dev/shm). So a copy is a folder of this user that nobody else may enter;
what another user has put there under its name is left alone, and the copy gets another name.
"""
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from Runtime import watchdog
from Runtime.errors import InputError
from Runtime.files import sha256

CHUNK = 8 * 2 ** 20
HASHING = 4  # threads: hashlib lets others work meanwhile
MOST_TAKEN = 100  # names of a copy that other users may have taken
HELD = {}  # folder: the open lock file; closing it, or the end of the process, gives it back


def stage(folder, manifest, place, show=True):
    """Copy a cache to its folder in `place`, unless it is there. Returns: that folder.

    place: a folder; ~ and $VARIABLES are expanded. show: draw progress bars.
    Every file is compared with its checksum: while it is copied, or, of an earlier round's copy, by the first rank that
    comes; what is damaged there is copied again.
    Raises InputError where the place is missing or too small, and for a damaged file.
    """
    parent = expanded(place)
    if "$" in str(parent) or not parent.is_dir():
        raise InputError(f"data.stage {place}: no folder {parent} on this node; correct it, or set it to \"\".")
    remove_unused(parent, copy_of(manifest, parent))
    while (target := copy_of(manifest, parent)) not in HELD:
        if not make_private(target):
            continue  # somebody else was faster: under the next name
        handle, alone = open_lock(target, len(manifest["files"]), show)
        if handle and alone:
            try:
                make_whole(Path(folder), manifest, target, show)
            except OSError as error:
                raise InputError(f"data.stage {place}: copying {folder} failed ({error}); make room, name another "
                                 "folder, or set data.stage to \"\".") from error
            while not lock_at_once(handle, fcntl.LOCK_SH):
                time.sleep(0.2)
        if handle:
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
    """The folder of a cache's copy: of this user, and of this content. It may not be there yet.

    Raises InputError where other users have taken all of its names.
    """
    name = f"omnimorph_{os.getuid()}_{manifest['sha256'][:16]}"
    for number in range(MOST_TAKEN):
        target = parent / (f"{name}.{number}" if number else name)
        if not os.path.lexists(target) or is_ours(target):
            return target
    raise InputError(f"data.stage {parent}: {name} and {MOST_TAKEN - 1} names like it belong to other users; name "
                     "another folder, or set data.stage to \"\".")


def is_ours(path):
    """Whether a path is a folder of this user, and no link to one."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def make_private(target):
    """Make a folder that only this user may enter, unless it is there. Returns: whether it is ours."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(target, 0o700)
    if not is_ours(target):
        return False
    os.chmod(target, 0o700)  # one that an earlier version made for all to read
    return True


def private(path, flags):
    """Opener of a file that only this user may read; a link in its place is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def release(remove=False):
    """Give back what this process holds. remove: delete copies that no other process holds."""
    for target, handle in list(HELD.items()):
        if remove:
            remove_if_unused(target, handle)
        handle.close()
        del HELD[target]


# ---------------------------------------------------------------------------------------------------------------------
# The lock of a copy
# ---------------------------------------------------------------------------------------------------------------------

def open_lock(target, files, show):
    """Get the lock of a copy, which grows to `files` files while another rank makes it.

    Returns: the open lock file and True where this process is alone with the copy, False where it shares one that is
    whole; (None, False) where the copy was removed meanwhile.
    """
    try:
        handle = open(target / ".lock", "a", opener=private)
    except FileNotFoundError:
        return None, False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{target / '.lock'} is a link, which no training makes; remove {target}.") from error
    alone = wait_for(handle, target, files, show)
    if is_lock_of(handle, target):
        return handle, alone
    handle.close()
    return None, False


def is_lock_of(handle, target):
    """Whether a lock file is still that of the copy, which another process may have removed or made anew."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(target / ".lock"), os.fstat(handle.fileno()))
    return False


def wait_for(handle, target, files, show):
    """Get the lock: alone where nobody holds it, else shared once the copy is whole. Returns: whether alone."""
    seen = -1
    with tqdm(total=files, desc=f"waiting for {target}", unit="file", leave=False, delay=1, disable=not show) as bar:
        while not lock_at_once(handle):
            if (target / "manifest.json").is_file() and lock_at_once(handle, fcntl.LOCK_SH):
                return False
            with contextlib.suppress(FileNotFoundError):  # it is being removed, and its lock is free after that
                if (count := len(os.listdir(target))) != seen:  # each new file shows that the other rank lives
                    watchdog.phase("stage")
                    seen = count
                    bar.update(min(count, files) - bar.n)
            time.sleep(0.2)
    return True


def lock_at_once(handle, kind=fcntl.LOCK_EX):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Its files
# ---------------------------------------------------------------------------------------------------------------------

def file_sizes(folder):
    """Bytes of every file of a folder, by name."""
    with os.scandir(folder) as listing:
        return {item.name: item.stat().st_size for item in listing}


def not_copied(manifest, target):
    """Files of the cache that are not there, or not whole: {name: bytes}."""
    there = file_sizes(target)
    return {name: size for name, (size, _) in manifest["files"].items() if there.get(name) != size}


def damaged(folder, names, manifest, phase, text, show):
    """Which of the named files do not have the checksum of the manifest. phase: of the watchdog, entered per file."""
    pool, found = ThreadPoolExecutor(HASHING, thread_name_prefix="checksums"), []
    size = sum(manifest["files"][name][0] for name in names)
    bar = tqdm(total=size, desc=text, unit="B", unit_scale=True, leave=False, delay=1, disable=not show)
    with pool, bar:
        for name, checksum in zip(names, pool.map(lambda name: sha256(Path(folder) / name), names)):
            watchdog.phase(phase)
            bar.update(manifest["files"][name][0])
            if checksum != manifest["files"][name][1]:
                found.append(name)
    return found


def make_whole(folder, manifest, target, show):
    """Copy what is not there, or not as it was; the manifest last."""
    there = [name for name in manifest["files"] if name not in not_copied(manifest, target)]
    for name in damaged(target, there, manifest, "stage", f"comparing {target} with its checksums", show):
        (target / name).unlink()
    if (files := not_copied(manifest, target)) or not (target / "manifest.json").is_file():
        copy_all(folder, manifest, target, files, show)


def copy_all(folder, manifest, target, files, show):
    """Copy files ({name: bytes}) of a cache, and the manifest after them."""
    need, free = sum(files.values()), shutil.disk_usage(target).free
    if need > free:
        raise InputError(f"data.stage {target.parent}: the cache needs {need / 2 ** 30:.1f} GiB, free are "
                         f"{free / 2 ** 30:.1f}; name a larger folder, or set data.stage to \"\".")
    for name in tqdm(files, f"copying the cache to {target}", unit="file", leave=False, disable=not show):
        watchdog.phase("stage")
        copy_file(folder / name, target / name, manifest["files"][name][1])
    copy_file(folder / "manifest.json", target / "manifest.json")


def copy_file(path, target, checksum=None):
    """Copy a file for this user alone. Raises InputError where its content has another checksum than it should."""
    partial, total = target.with_name(f"{target.name}.tmp"), hashlib.sha256()
    with open(path, "rb") as file, open(partial, "wb", opener=private) as copy:
        while chunk := file.read(CHUNK):
            total.update(chunk)
            copy.write(chunk)
    if checksum and total.hexdigest() != checksum:
        partial.unlink()
        raise InputError(f"{path} is damaged: its checksum is not that of the manifest; run OM_prepare.py with this "
                         "config and --repair.")
    os.replace(partial, target)


def remove_unused(parent, target):
    """Delete copies of other caches that no process of this user holds any more; nobody else's are touched."""
    for other in parent.glob(f"omnimorph_{os.getuid()}_*"):
        if other != target and is_ours(other) and os.path.lexists(other / ".lock"):
            # One that cannot be opened or removed must not stop a training that does not need it.
            with contextlib.suppress(OSError), open(other / ".lock", opener=private) as handle:
                remove_if_unused(other, handle)


def remove_if_unused(target, handle):
    """Delete a copy that no other process holds."""
    if lock_at_once(handle) and is_lock_of(handle, target):
        # Under another name at once, so that nobody takes what is half removed for a copy.
        removed = target.with_name(f"{target.name}.removed-{os.getpid()}")
        os.replace(target, removed)
        shutil.rmtree(removed, ignore_errors=True)
