"""The one way to write files: whole or not at all, and durable through a power cut. Needs no torch.

A file is written beside its final place as `.<name>.tmp-<host>-<pid>`, flushed to the disk, and then renamed. A reader
sees the old content or the new content, never a part.
"""
import contextlib
import csv
import ctypes
import errno
import hashlib
import io
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

from Runtime.errors import InputError

A_DAY_S = 86400.0
LONGEST_NAME = 255  # bytes of a file's name, on nearly all file systems
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # between two tries of `patiently`
# Errors of a file system that is full or does not respond. They may pass within a minute; no input is wrong.
# macOS and Windows lack some of them.
PASSING = {getattr(errno, name) for name in (
    "ENOSPC", "EDQUOT", "EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EINTR", "EBUSY", "ENOLCK", "ENOTCONN", "ESHUTDOWN",
    "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "EREMOTEIO") if hasattr(errno, name)}


def as_stored(name):
    """A name as the file system compares it: without case on macOS and Windows."""
    return name.casefold() if sys.platform in ("darwin", "win32") else name


def unfit_for_a_file(name):
    """What this system allows in no file name, such as a slash, as words for a message; None if there is none of it."""
    if name in (".", ".."):  # the folder itself, and the one around it
        return "only dots"
    found = re.search(r'[\\/:*?"<>|]' if sys.platform == "win32" else "/", name)
    return found and ("a slash" if found[0] == "/" else found[0])


def with_slashes(files):
    """{path: entry} of results with slashes in each path. On Windows, versions before 1.5.0 wrote backslashes."""
    return {name.replace("\\", "/") if sys.platform == "win32" else name: entry for name, entry in files.items()}


def require_file(path):
    """Raise InputError if a file is missing or may not be read; for a dangling link the sentence names its target."""
    path = Path(path)
    try:
        there = path.is_file()
    except PermissionError:
        raise InputError(f"{path}: this user may not enter its folder or one above it; ask the owner to allow it "
                         "(chmod a+x).") from None
    if there:
        if not os.access(path, os.R_OK):
            raise InputError(f"{path}: this user may not read it; ask its owner to allow it (chmod a+r).")
        return
    if path.is_symlink():
        raise InputError(f"{path}: a link to {os.readlink(path)}, which does not exist; fetch its content, for "
                         "example with `datalad get` or `git annex get`.")
    what = "a folder, not a file" if path.is_dir() else "no such file"
    raise InputError(f"{path}: {what}; check the path.")


def is_there(path):
    """Whether a file or folder exists. Raises OSError if the file system does not respond, unlike Path.exists."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def listed(folder):
    """Paths of what a folder holds, sorted; [] if there is no such folder.

    Raises OSError if the file system does not respond: from Python 3.12 on, Path.glob then finds nothing.
    """
    try:
        return sorted(Path(folder, name) for name in os.listdir(folder))
    except FileNotFoundError:
        return []


def no_name_twice(pairs):
    """A JSON object as a dict, for object_pairs_hook. Raises ValueError for a duplicate name; json keeps the last."""
    if twice := first_repeated(name for name, _ in pairs):
        raise ValueError(f"{twice} stands twice in one object")
    return dict(pairs)


def first_repeated(names):
    """The first of some names that has occurred before, or None."""
    seen = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def write_file(path, content):
    """Write a file atomically and durably; its folder is created if missing.

    content: bytes, text (stored as UTF-8), or a function that writes to the open binary file it is given.
    Raises OSError if it cannot be written; the previous content then remains.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as partial:
        write_flushed(partial, content)
        replace(partial, path)


def save_array(path, array):
    """Write an array as .npy with `write_file`: np.save to an open file raises OSError without a reason."""
    import numpy as np  # here: the launcher needs no numpy

    content = io.BytesIO()
    np.save(content, array)
    write_file(path, content.getbuffer())


@contextlib.contextmanager
def beside(path):
    """Context with the partial file of `path` (see `partial_path`), removed at the end. An OSError names `path`."""
    partial = partial_path(path)
    try:
        yield partial
    except OSError as error:
        if error.errno and error.filename in (None, str(partial)):  # Python names none if a write or a flush fails
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # report the first fault, such as of a read-only file system, not this one
            partial.unlink(missing_ok=True)


def write_flushed(path, content):
    """Write a file in place and flush it to the disk: the first half of `write_file`. content: as there."""
    with open(path, "wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def signed(text, line):
    """A text and a last line with its SHA-256, which `is_unedited` checks. line: that line with {} for the hash."""
    return f"{text}{line.format(hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest())}\n"


def is_unedited(path):
    """Whether a file still is what `signed` returned, except for line breaks at its end."""
    text, newline, last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    return hashlib.sha256(text + newline).hexdigest().encode() in last


def require_apart(targets, is_own=None, inputs=()):
    """Raise InputError if a run that writes `targets` would overwrite one of its inputs or a file of somebody else.

    targets, inputs: paths; None and what does not exist is skipped. is_own(path): whether a file is the unedited result
    of an earlier run; without it, any file may be overwritten that is no input.
    """
    there = [path for path in targets if path and os.path.lexists(path)]
    places = {_place(os.path.realpath(path) if os.path.isdir(path) else path) for path in there}
    for path in inputs:
        if path and os.path.exists(path) and not places.isdisjoint(map(_place, (path, os.path.realpath(path)))):
            if os.path.isdir(path):
                raise InputError(f"{path}: it is a folder of images, and a later run would take the results in it for "
                                 "images; choose another --out.")
            raise InputError(f"{path}: a result with the same name would overwrite this input or result; choose "
                             "another --out.")
    for path in there if is_own else ():
        if os.path.isdir(path) or not (os.path.exists(path) and is_own(path)):
            raise InputError(f"{path}: it is not of an earlier run, or not as this version wrote it, and would be "
                             "replaced; keep it under another name, or choose another --out.")


def _place(path):
    """((inode, device) of the folder, of the file): equal for two spellings of a path, as on a disk that ignores case.

    The folder counts because results are renamed into place: a hard link in another folder keeps its content.
    """
    return tuple(os.stat(each)[1:3] if os.path.exists(each) else None for each in (os.path.dirname(path) or ".", path))


def csv_text(rows, delimiter=","):
    """The text of a table. rows: lists of values, the column names first; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


def partial_path(path):
    """Where this process writes a file before the rename. The name is hidden: listings of volumes skip it."""
    path, end = Path(path), f".tmp-{socket.gethostname()}-{os.getpid()}"
    name = path.name
    if len(os.fsencode(f".{name}{end}")) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return path.with_name(f".{name}{end}")


def replace(partial, path):
    """Rename a file that has been written and flushed; it replaces the file at `path`, if any."""
    if os.name == "nt":
        return _replace_on_windows(partial, path)
    os.replace(partial, path)
    folder = os.open(Path(path).parent, os.O_RDONLY)  # the rename is durable only after the folder is flushed
    try:
        os.fsync(folder)
    except OSError as error:
        # Shared folders of virtual machines, encrypted folders (gocryptfs) and others cannot.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def _replace_on_windows(partial, path):
    """Rename, for up to 10 s: a virus scanner or OneDrive holds new files for a moment. Folders cannot be flushed."""
    until = time.monotonic() + 10
    while True:
        try:
            return os.replace(partial, path)
        except PermissionError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def remove_leftovers(folder):
    """Remove partial files below `folder` that are a day old or that a dead process of this host left.

    Returns: list of the removed paths.
    """
    removed = []
    for path in Path(folder).rglob("*.tmp-*"):
        host, _, pid = path.name.rpartition(".tmp-")[2].rpartition("-")
        if not pid.isdecimal() or len(pid) >= 10:
            continue
        try:
            is_old = time.time() - path.stat().st_mtime > A_DAY_S
            if path.is_file() and (is_old or host == socket.gethostname() and not is_alive(int(pid))):
                path.unlink()
                removed.append(path)
        except (FileNotFoundError, PermissionError):
            continue  # its process has renamed it in the meantime, or its user alone may remove it
    return removed


def is_passing(error):
    """Whether an exception is a transient fault of the file system: it passes by itself or once someone frees space."""
    return isinstance(error, OSError) and error.errno in PASSING


def passing_fault(error):
    """The errno of the transient fault behind an exception; None if there is none.

    The exception may be raised from the fault or quote it, as a loader worker's does. A full disk does not count:
    someone has to make room.
    """
    quoted = [int(number) for number in re.findall(r"\[Errno (\d+)\]", str(error))]
    numbers = [getattr(error.__cause__, "errno", None), *quoted]
    return next((number for number in numbers if number in PASSING - {errno.ENOSPC, errno.EDQUOT}), None)


def patiently(action, seconds, subject):
    """Retry `action()` after transient faults, at growing intervals, for at most `seconds`.

    subject: path or name for the one line on standard error that reports the first fault.
    Returns: what `action` returns. Raises the last transient fault after `seconds`, any other exception at once.
    """
    until = time.monotonic() + seconds
    pause = FIRST_PAUSE_S
    while True:
        try:
            return action()
        except OSError as error:
            left = until - time.monotonic()
            if not is_passing(error) or left <= 0:
                raise
            if pause == FIRST_PAUSE_S:
                print(f"{subject}: {error.strerror or error}; tried again for up to {seconds:.0f} s", file=sys.stderr,
                      flush=True)
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def read_lines(path, tail=None):
    """The objects of a file with one JSON object per line; [] if there is no such file.

    tail: most bytes to read, from the end; None reads all. A line cut off by `tail` or by a machine's death is
    skipped.
    """
    try:
        with open(path, "rb") as file:
            if tail is not None:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - tail, 0))
            texts = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = []
    for text in texts:
        try:
            lines.append(json.loads(text.decode(errors="replace")))
        except ValueError:
            continue
    return lines


def append_line(path, line):
    """Append one JSON object as a line, durably: all of it or nothing. Raises OSError if that fails."""
    append_bytes(path, json.dumps(line).encode() + b"\n", begin_a_line=True)


def append_bytes(path, content, begin_a_line=False):
    """Append bytes durably: all of them or none, so that the call may be repeated. Creates the file and its folder.

    begin_a_line: write a line break first if the file ends mid-line, as after a machine died.
    Raises OSError if that fails; the file then has its previous length.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if begin_a_line and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            content = b"\n" + content
        try:
            if file.write(content) < len(content):  # the last block of a full disk takes only a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)  # Python names none here
            with contextlib.suppress(OSError):  # report the first fault, not this one
                os.ftruncate(file.fileno(), size)
            raise


def sha256(path):
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_alive(pid):
    """Whether a process of this host exists, as far as this user can see."""
    if os.name == "nt":  # os.kill(pid, 0) is Ctrl-C there
        kernel, code = ctypes.WinDLL("kernel32", use_last_error=True), ctypes.c_ulong()
        process = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not process:
            return ctypes.get_last_error() == 5  # access denied: of another user
        kernel.GetExitCodeProcess(process, ctypes.byref(code))
        kernel.CloseHandle(process)
        return code.value == 259  # STILL_ACTIVE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # alive, but of another user
    return True
