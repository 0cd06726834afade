"""The run folder: its name, and the lock that lets one run at a time have it. Needs no torch."""
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from Runtime.errors import InputError
from Runtime.files import write_file

try:
    import fcntl
except ImportError:  # Windows, where the tools run too: there the file lock.json is all that keeps two starts apart
    fcntl = None


def run_folder(root, data_name, net_name, fresh=False):
    """Folder of the run, created with its `tmp/`: the newest generation of `<root>/<data>_<net>`, `...-2`, `...-3`.

    fresh: make the next generation instead of continuing the newest one. Returns: Path.
    """
    root, name = Path(root), f"{data_name}_{net_name}"
    found = [re.fullmatch(re.escape(name) + r"(?:-([1-9]\d*))?", path.name) for path in root.glob("*")]
    highest = max([int(match[1] or 1) for match in found if match], default=0)
    generation = highest + 1 if fresh else max(highest, 1)
    run = root / (name if generation == 1 else f"{name}-{generation}")
    (run / "tmp").mkdir(parents=True, exist_ok=True)
    return run


def lock(run, stale_after_s, pid=None, token=None, instead="start a new run with --fresh"):
    """Take the lock of a run folder, or join it as the second holder where `token` is the lock's. Returns its token.

    The lock (`<run>/lock.json`) outlives a crash and names its holders. A holder on this machine is dead when its
    process is; one of a Slurm job when the job is over or has been started anew; any other on another machine when the
    lock has not been touched for the time that the holder itself promised.
    stale_after_s: longest time between two touches. pid: the holder, else this process. instead: what else to do.
    Raises InputError naming the holder of a lock that is alive.
    """
    path, me = run / "lock.json", _identity(pid or os.getpid())
    with _one_at_a_time(run):
        found = _read(path)
        if found and found["token"] == token:
            found["holders"] = [found["holders"][0], me] if me != found["holders"][0] else [me]
        elif found and (holder := _living(found, path)):
            job = found["job"]
            raise InputError(f"{run} is in use by process {holder['pid']} on {holder['host']}"
                             f"{f' (job {job})' if job else ''} since {found['since']}: let it finish or stop it, or "
                             f"{instead}; if you know that it is dead, remove {path}.")
        else:
            found = {"token": secrets.token_hex(8), "since": time.strftime("%Y-%m-%d %H:%M:%S"), "holders": [me],
                     "job": os.environ.get("SLURM_JOB_ID", ""), "start": os.environ.get("SLURM_RESTART_COUNT", "0")}
        found["stale_after_s"] = stale_after_s
        write_file(path, json.dumps(found))
    return found["token"]


def touch(run):
    """Show holders on other machines that this one lives. A lock that someone has removed stays removed."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(run / "lock.json")


def unlock(run, token):
    """Give the folder back, if the lock is still ours."""
    with _one_at_a_time(run):
        found = _read(run / "lock.json")
        if found and found["token"] == token:
            (run / "lock.json").unlink()


def _identity(pid):
    """A process, beyond doubt: host, boot, process namespace (containers count their own), number and start time."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"pid": pid, "host": socket.gethostname(), "boot": boot, "namespace": os.readlink("/proc/self/ns/pid"),
                "began": _began(pid)}
    return {"pid": pid, "host": socket.gethostname(), "boot": "", "namespace": "", "began": None}


def _began(pid):
    """Start time of a process in ticks since boot; None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _living(found, path):
    """The first holder that is alive, or None."""
    if found.get("job") and _job_is_over(found):
        return None
    me, fresh = _identity(os.getpid()), time.time() - path.stat().st_mtime < found["stale_after_s"]
    for holder in found["holders"]:
        rebooted = holder["host"] == me["host"] and holder["boot"] != me["boot"]
        visible = holder["began"] is not None and all(holder[key] == me[key] for key in ("boot", "namespace"))
        if not rebooted and (_began(holder["pid"]) == holder["began"] if visible else fresh):
            return holder
    return None


def _job_is_over(found):
    """Whether Slurm says that the job of a lock has ended; False where nobody can tell."""
    if found["job"] == os.environ.get("SLURM_JOB_ID"):
        return found.get("start", "0") != os.environ.get("SLURM_RESTART_COUNT", "0")
    if not shutil.which("squeue"):
        return False
    asked = subprocess.run(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={found['job']}"],
                           capture_output=True, text=True, timeout=60)
    alive = re.search("RUNNING|COMPLETING|SUSPENDED|STOPPED|SIGNALING|STAGE_OUT|CONFIGURING|RESIZING", asked.stdout)
    # A job that Slurm has forgotten is over; but a controller that does not answer knows nothing.
    return not alive and (asked.returncode == 0 or "Invalid job id" in asked.stderr)


def _read(path):
    try:
        found = json.loads(path.read_text())
        return found if found["holders"][0]["pid"] and found["token"] else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # none, or one that a dying machine left half written


@contextlib.contextmanager
def _one_at_a_time(run):
    """Two starts at the same moment: one after the other, where the file system has locks."""
    with open(run / ".lock", "w") as handle:
        with contextlib.suppress(OSError):
            if fcntl:
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
