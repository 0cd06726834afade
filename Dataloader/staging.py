"""A copy of the cache on each node's own disk or in its memory, made once for all ranks of the node.

The ranks of a node coordinate through a lock on the copy. A copy stays between two rounds of a run; the first rank of
the next round compares it with its checksums. When training is done, the last rank removes it. A run that copies
another cache to the same place removes copies that no process holds. So does the launcher on each node when it ends,
however the ranks ended: `python -m Dataloader.staging PLACE`.

Anyone may write to the place (/dev/shm), so a copy is a folder that only this user may enter. If another user has taken
its name, that folder is left alone and the copy gets another name.
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from Runtime import watchdog
from Runtime.errors import InputError
from Runtime.files import sha256

CHUNK = 8 * 2 ** 20  # bytes copied at a time
HASHING = 4  # threads; hashlib releases the GIL
MOST_TAKEN = 100  # names to try for a copy, because other users may have taken some
HELD = {}  # {folder of a copy: its open lock file}; the lock ends when the file is closed, or with the process


def stage(folder, manifest, place, show=True):
    """Copy a cache to its own folder in `place`, unless it is there. Returns: that folder.

    Every file is compared with its checksum: while it is copied, or by the first rank if an earlier round copied it.
    Damaged files of a copy are copied again.
    folder: of the cache. place: a folder; ~ and $VARIABLES are expanded. show: draw progress bars.
    Raises InputError if the place is missing or too small, and for a damaged file of the cache.
    """
    parent = expanded(place)
    if "$" in str(parent) or not parent.is_dir():
        raise InputError(f"data.stage {place}: no folder {parent} on this node; correct it, or set it to \"\".")
    target = copy_of(manifest, parent)
    remove_unused(parent, target)
    # On every rank, also on one that finds the copy complete: ranks are compared by their phases.
    watchdog.phase("stage")
    while target not in HELD:
        try:
            os.mkdir(target, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise InputError(f"data.stage {place}: no folder can be made in {parent} ({error.strerror}); name another "
                             'folder, or set data.stage to "".') from error
        handle = open_lock(target) if is_ours(target) else None
        try:
            alone = handle and wait_for(handle, target, len(manifest["files"]), show)
        except OSError as error:
            raise InputError(f"data.stage {place}: {parent} has no file locks ({error.strerror}); name another folder, "
                             'or set data.stage to "".') from error
        if alone and is_lock_of(handle, target):
            try:
                make_whole(Path(folder), manifest, target, show)
            except OSError as error:
                raise InputError(f"data.stage {place}: copying {folder} failed ({error}); make room, name another "
                                 "folder, or set data.stage to \"\".") from error
            while not lock_at_once(handle, fcntl.LOCK_SH):
                time.sleep(0.2)
        # Another training may have removed the copy while nobody held its lock.
        if handle and is_lock_of(handle, target):
            HELD[target] = handle
        elif handle:
            handle.close()
        target = copy_of(manifest, parent)  # another user may have taken the name meanwhile
    wrong = wrong_files(file_sizes(target), manifest["files"])
    if wrong:
        raise InputError(f"data.stage {place}: {next(iter(wrong))} of the copy is missing or incomplete; remove "
                         f"{target} and start again.")
    return target


def expanded(place):
    """data.stage as a path, with ~ and $VARIABLES expanded."""
    return Path(os.path.expandvars(place)).expanduser()


def copy_of(manifest, parent):
    """The folder for the copy of a cache, named after this user and the cache's content. It may not exist yet.

    Raises InputError if other users have taken all of its names.
    """
    name = f"omnimorph_{os.getuid()}_{manifest['sha256'][:16]}"
    for number in range(MOST_TAKEN):
        target = parent / (f"{name}.{number}" if number else name)
        if not os.path.lexists(target) or is_ours(target):
            return target
    raise InputError(f"data.stage {parent}: {name} and {MOST_TAKEN - 1} folders with similar names belong to other "
                     'users; name another folder, or set data.stage to "".')


def is_ours(path):
    """Whether a path is a folder of this user, and not a link to one."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def private(path, flags):
    """Opener for files that only this user may read; it refuses links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def release(remove=False):
    """Release all copies that this process holds. remove: delete those that no other process holds."""
    for target, handle in list(HELD.items()):
        if remove:
            remove_if_unused(target, handle)
        handle.close()
        del HELD[target]


# ---------------------------------------------------------------------------------------------------------------------
# The lock of a copy
# ---------------------------------------------------------------------------------------------------------------------

def open_lock(target):
    """The open lock file of a copy; None if the copy was removed meanwhile. Raises InputError for a link."""
    try:
        return open(target / ".lock", "a", opener=private)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{target / '.lock'} is a link, which OmniMorph never creates; remove {target}.") from error


def is_lock_of(handle, target):
    """Whether an open lock file still belongs to the copy, which another process may have removed or made anew."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(target / ".lock"), os.fstat(handle.fileno()))
    return False


def wait_for(handle, target, files, show):
    """Get the lock: exclusively if nobody holds it, shared once the copy is complete. Returns: whether exclusively.

    files: number of files in the complete copy, for the progress bar while another rank makes it.
    """
    seen = -1  # files of the copy when last counted
    with tqdm(total=files, desc=f"waiting for {target}", unit="file", leave=False, delay=1, disable=not show) as bar:
        while not lock_at_once(handle):
            if (target / "manifest.json").is_file() and lock_at_once(handle, fcntl.LOCK_SH):
                return False
            with contextlib.suppress(FileNotFoundError):  # the copy is being removed; then its lock is free
                count = len(os.listdir(target))
                if count != seen:  # a new file shows that the other rank is alive
                    watchdog.phase("stage")
                    seen = count
                    bar.update(min(count, files) - bar.n)
            time.sleep(0.2)
    return True


def lock_at_once(handle, kind=fcntl.LOCK_EX):
    """Take a lock without waiting. Returns: whether it was free. Raises OSError if the file system has no locks."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# The files of a copy
# ---------------------------------------------------------------------------------------------------------------------

def file_sizes(folder):
    """Bytes of every file of a folder, by name."""
    sizes = {}
    with os.scandir(folder) as listing:
        for item in listing:
            with contextlib.suppress(FileNotFoundError):  # a partial file that another process has renamed meanwhile
                sizes[item.name] = item.stat().st_size
    return sizes


def wrong_files(sizes, files):
    """{file: what is wrong} of files that are missing or have another size.

    sizes: from `file_sizes`. files: {name: [bytes, SHA-256]}.
    """
    wrong = {}
    for name, (size, _) in files.items():
        found = sizes.get(name)
        if found is None:
            wrong[name] = f"{name} is missing"
        elif found != size:
            wrong[name] = (f"{name} is truncated: {found} of {size} bytes" if found < size else
                           f"{name} has {found} bytes instead of {size}")
    return wrong


def damaged(folder, files, text, alive=watchdog.goes_on, show=True):
    """Names of the files that differ from their checksum: a list. files: {name: [bytes, SHA-256]}.

    text, show: of the progress bar, and whether to draw it. alive: called after each file.
    """
    pool = ThreadPoolExecutor(HASHING, thread_name_prefix="checksums")
    wrong = []
    size = sum(length for length, _ in files.values())
    bar = tqdm(total=size, desc=text, unit="B", unit_scale=True, leave=False, delay=1, disable=not show)
    with pool, bar:
        found = pool.map(lambda name: sha256(Path(folder) / name), files)
        for (name, (length, expected)), checksum in zip(files.items(), found):
            alive()
            bar.update(length)
            if checksum != expected:
                wrong.append(name)
    return wrong


def make_whole(folder, manifest, target, show):
    """Copy missing and damaged files, then the manifest."""
    files, wrong = manifest["files"], wrong_files(file_sizes(target), manifest["files"])
    copied = {name: mark for name, mark in files.items() if name not in wrong}
    for name in damaged(target, copied, f"comparing {target} with its checksums", show=show):
        (target / name).unlink()
        wrong[name] = "damaged"
    if not wrong and (target / "manifest.json").is_file():
        return
    need, free = sum(files[name][0] for name in wrong), shutil.disk_usage(target).free
    if need > free:
        raise InputError(f"data.stage {target.parent}: the cache needs {need / 2 ** 30:.1f} GiB, but only "
                         f'{free / 2 ** 30:.1f} are free; name a larger folder, or set data.stage to "".')
    for name in tqdm(wrong, f"copying the cache to {target}", unit="file", leave=False, disable=not show):
        watchdog.goes_on()
        copy_file(folder / name, target / name, files[name][1])
    copy_file(folder / "manifest.json", target / "manifest.json")


def copy_file(path, target, checksum=None):
    """Copy a file, readable by this user only. Raises InputError if its content has another checksum."""
    partial = target.with_name(f"{target.name}.tmp")
    total = hashlib.sha256()
    with open(path, "rb") as file, open(partial, "wb", opener=private) as copy:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            total.update(chunk)
            copy.write(chunk)
    if checksum and total.hexdigest() != checksum:
        partial.unlink()
        raise InputError(f"{path} is damaged: its checksum is not that of the manifest; run OM_prepare.py with this "
                         "config and --repair.")
    os.replace(partial, target)


def remove_unused(parent, target=None):
    """Delete this user's copies that no process holds, except `target`. Copies of other users are not touched."""
    for other in parent.glob(f"omnimorph_{os.getuid()}_*"):
        if is_ours(other) and ".removed-" in other.name:  # by a process that was killed before it was done
            shutil.rmtree(other, ignore_errors=True)
        elif other != target and is_ours(other) and os.path.lexists(other / ".lock"):
            # Another copy that cannot be opened or removed must not stop this training.
            with contextlib.suppress(OSError), open(other / ".lock", opener=private) as handle:
                remove_if_unused(other, handle)


def remove_if_unused(target, handle):
    """Delete a copy that no other process holds."""
    if lock_at_once(handle) and is_lock_of(handle, target):
        # Renamed first, so that nobody takes a half removed folder for a copy.
        removed = target.with_name(f"{target.name}.removed-{os.getpid()}")
        os.replace(target, removed)
        shutil.rmtree(removed, ignore_errors=True)


if __name__ == "__main__":
    remove_unused(expanded(sys.argv[1]))
