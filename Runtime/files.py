"""The one way in which files are written: whole or not at all, and still there after a power cut. Needs no torch.

A file is written beside its place as `.<name>.tmp-<pid>`, flushed to the disk, and only then given its name. Whoever
reads it sees the old content or the new one, never half of it.
"""
import contextlib
import errno
import hashlib
import json
import os
import sys
import time
from pathlib import Path

A_DAY_S = 86400.0
# What a file system that is full or does not answer says: it may well be over in a minute, and nobody's input is wrong.
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY,
           errno.ENOLCK, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
           errno.ENETUNREACH, errno.EREMOTEIO}


def write_file(path, content):
    """Write a file atomically and durably; its folder is made if missing.

    content: bytes, text (stored as UTF-8), or a function that writes to the open binary file it is given.
    Raises OSError where it cannot be written; what stood there before then still stands.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with open(partial, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_path(path):
    """Where this process writes a file before it gets its name: hidden, so that no listing of volumes takes it up."""
    path = Path(path)
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def replace(partial, path):
    """Give a file that has been written and flushed its name, whatever had it before."""
    os.replace(partial, path)
    if os.name == "nt":
        return  # Windows opens no folders
    folder = os.open(Path(path).parent, os.O_RDONLY)  # the new name itself is durable only after this
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_leftovers(folder):
    """Remove partial files below `folder` whose process is dead on this host, or that are a day old. Returns a list."""
    removed = []
    for path in Path(folder).rglob("*.tmp-*"):
        pid = path.name.rpartition(".tmp-")[2]
        try:
            old = time.time() - path.stat().st_mtime > A_DAY_S
            if pid.isdecimal() and len(pid) < 10 and path.is_file() and (old or not _is_alive(int(pid))):
                path.unlink()
                removed.append(path)
        except FileNotFoundError:
            continue  # its owner finished in the meantime
    return removed


def is_passing(error):
    """Whether an exception is a fault that passes by itself, or by somebody making room."""
    return isinstance(error, OSError) and error.errno in PASSING


def patiently(do, seconds, what):
    """What `do()` returns, tried again at growing intervals as long as a passing fault lasts, for `seconds` at most.

    what: the thing that is waited for, for the one line that says so on standard error. Raises the last fault.
    """
    ends, pause = time.monotonic() + seconds, 0.5
    while True:
        try:
            return do()
        except OSError as error:
            left = ends - time.monotonic()
            if not is_passing(error) or left <= 0:
                raise
            if pause == 0.5:
                print(f"{what}: {error.strerror or error}; tried again for up to {seconds:.0f} s", file=sys.stderr,
                      flush=True)
        time.sleep(min(pause, left))
        pause = min(2 * pause, 15.0)


def read_lines(path):
    """The objects of a file with one JSON object per line; a line that a dying machine cut short is left out."""
    lines = []
    if path.exists():
        with open(path, errors="replace") as file:
            for line in file:
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    continue
    return lines


def append_line(path, line):
    """Add one JSON object to such a file, durably: all of it or nothing. Raises OSError where it cannot be written."""
    append_bytes(path, json.dumps(line).encode() + b"\n", begin_a_line=True)


def append_bytes(path, content, begin_a_line=False):
    """Add bytes to a file, durably: all of them or none, so that it may be tried again. Makes the file and its folder.

    begin_a_line: whether to go to a new line first, where a machine died in the middle of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if begin_a_line and end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            content = b"\n" + content
        try:
            if file.write(content) < len(content):  # the last block of a full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # the first fault is the one to tell
                os.ftruncate(file.fileno(), end)
            raise


def sha256(path):
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True
