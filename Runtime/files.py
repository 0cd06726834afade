"""The one way in which files are written: whole or not at all, and still there after a power cut. Needs no torch.

A file is written beside its place as `.<name>.tmp-<pid>`, flushed to the disk, and only then given its name. Whoever
reads it sees the old content or the new one, never half of it.
"""
import hashlib
import os
import time
from pathlib import Path

A_DAY_S = 86400.0


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
