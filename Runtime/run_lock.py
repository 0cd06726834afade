"""The run folder: its name, and the lock that lets one run at a time have it. Needs no torch.

The lock is `<run>/lock.json`. Whoever has it looks now and then whether it is still his (`touch`, `assert_held`): a
process that stood still may wake up after another one has taken the folder over, and must not write there any more.
"""
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from Runtime.config import check_name
from Runtime.errors import InputError
from Runtime.files import read_lines, write_file

try:
    import fcntl
except ImportError:  # Windows, where the tools run too
    fcntl = None

CLAIM_S = 30.0  # longer than anybody needs between reading and writing a lock
HELD = {}  # folders that this process has the lock of, or shares it, with its token


class TakenOver(InputError):
    """Somebody else has taken the folder over that this process had."""


def run_folder(root, data_name, net_name, fresh=False):
    """Folder of the run, created with its `tmp/`: the newest generation of `<root>/<data>_<net>`, `...-2`, `...-3`.

    fresh: make the next generation instead of continuing the newest one. Returns: Path.
    Raises InputError for a name that cannot be part of a file's name.
    """
    check_name("data.name", data_name)
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
    process is; one of another Slurm job when Slurm says so; any other on another machine when the lock has not been
    touched for the time that the holder itself promised.
    stale_after_s: longest time between two touches. pid: the holder, else this process. instead: what else to do.
    Raises InputError naming the holder of a lock that is alive, and OSError where nobody can tell at the moment.
    """
    path, me = run / "lock.json", _identity(pid or os.getpid())
    while True:
        found = _read(path)
        ours = found is not None and found["token"] == token
        if found and not ours and (holder := _living(found, run)):
            job = found["job"]
            raise InputError(f"{run} is in use by process {holder['pid']} on {holder['host']}"
                             f"{f' (job {job})' if job else ''} since {found['since']}: let it finish or stop it, or "
                             f"{instead}; if you know that it is dead, remove {path}.")
        with _one_at_a_time(run):
            if (now := _read(path)) and now["token"] != (found or {}).get("token"):
                continue  # somebody was faster: ask about that one
            if ours and now:
                new = {**now, "holders": [now["holders"][0], me] if me != now["holders"][0] else [me]}
            else:
                new = {"token": secrets.token_hex(8), "since": time.strftime("%Y-%m-%d %H:%M:%S"), "holders": [me],
                       "job": os.environ.get("SLURM_JOB_ID", ""), "start": os.environ.get("SLURM_RESTART_COUNT", "0"),
                       "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
            write_file(path, json.dumps({**new, "stale_after_s": stale_after_s}))
        hold(run, new["token"])
        return new["token"]


def hold(run, token):
    """Remember that this process works in a folder under a lock that it, or its launcher, or its first rank has."""
    HELD[_key(run)] = token


def assert_held(run):
    """Raise TakenOver where somebody else has the folder now that this process had. Processes that never had it pass.

    Where the lock was removed, the last attempt that began there decides: whoever took the folder over and is done
    with it has left one.
    """
    token = HELD.get(_key(run))
    if token is None:
        return
    try:
        found = _read(run / "lock.json")
        begun = [] if found else [line for line in read_lines(run / "attempts.jsonl") if line["event"] == "begin"]
    except OSError:
        return  # the file system does not answer now; it is asked again
    by = None
    if found and found["token"] != token:
        job = f" (job {found['job']})" if found.get("job") else ""
        by = f"process {found['holders'][0]['pid']} on {found['holders'][0]['host']}{job} since {found['since']}"
    if begun and begun[-1]["loop"] != token:
        by = "another run, which has ended since"
    if by:
        raise TakenOver(f"{run} was taken over by {by}, while this process stood still or was cut off: it leaves and "
                        "writes nothing there. Whoever has the folder continues the run.")


def is_held(run):
    """Whether `assert_held` lets this process write."""
    try:
        assert_held(run)
    except TakenOver:
        return False
    return True


def touch(run):
    """Show holders on other machines that this one lives; a lock that someone has removed stays removed.

    Raises TakenOver as `assert_held` does.
    """
    assert_held(run)
    with contextlib.suppress(OSError):  # it is touched again soon
        os.utime(run / "lock.json")


def unlock(run, token):
    """Give the folder back, if the lock is still ours."""
    HELD.pop(_key(run), None)
    if (_read(run / "lock.json") or {}).get("token") != token:
        return
    with _one_at_a_time(run):
        if (_read(run / "lock.json") or {}).get("token") == token:
            (run / "lock.json").unlink()


def _key(run):
    return os.path.abspath(run)


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


def _living(found, run):
    """The first holder that is alive, or None. Raises OSError where nobody can tell at the moment.

    Processes of this machine are asked themselves; for the others Slurm is, and else the time of their last touch.
    """
    me, elsewhere = _identity(os.getpid()), []
    for holder in found["holders"]:
        rebooted = holder["host"] == me["host"] and holder["boot"] != me["boot"]
        visible = holder["began"] is not None and all(holder[key] == me[key] for key in ("boot", "namespace"))
        if visible and _began(holder["pid"]) == holder["began"]:
            if _is_former_start(found):  # Slurm has ended it; it only has to go
                raise OSError(errno.EBUSY, f"process {holder['pid']} of the former start of this job is still there")
            return holder
        if not visible and not rebooted:
            elsewhere.append(holder)
    if not elsewhere:
        return None
    state = _job_state(found)
    if state is None:
        touched = (run / "lock.json").stat().st_mtime
        state = "running" if _time_there(run) - touched < found["stale_after_s"] else "over"
    return elsewhere[0] if state == "running" else None


def _is_former_start(found):
    """Whether a lock is of this very job, before it was put back into the queue and started again."""
    return (found.get("job") and found["job"] == os.environ.get("SLURM_JOB_ID")
            and found.get("cluster", "") in ("", os.environ.get("SLURM_CLUSTER_NAME", ""))
            and found.get("start", "0") != os.environ.get("SLURM_RESTART_COUNT", "0"))


def _job_state(found):
    """What Slurm says of the job of a lock: "running", "over", or None where there is no job or no Slurm that knows it.

    Raises OSError while the job is ending, and where Slurm does not answer: the next minute will tell.
    """
    job, cluster = found.get("job"), found.get("cluster", "")
    if not job or (cluster and cluster != (_own_cluster() or cluster)):
        return None  # another cluster counts its own jobs
    if job == os.environ.get("SLURM_JOB_ID"):
        return "over" if _is_former_start(found) else None
    if not shutil.which("squeue"):
        return None
    try:
        asked = subprocess.run(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"],
                               capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, f"Slurm does not say within 20 s whether job {job} still runs") from None
    if re.search("RUNNING|SUSPENDED|STOPPED|CONFIGURING|RESIZING", asked.stdout):
        return "running"
    if re.search("COMPLETING|SIGNALING|STAGE_OUT", asked.stdout):
        raise OSError(errno.EBUSY, f"job {job} is just ending")
    if asked.returncode and "Invalid job id" not in asked.stderr:  # which is how Slurm says that it has forgotten it
        raise OSError(errno.ETIMEDOUT, f"Slurm does not say whether job {job} still runs ({asked.stderr.strip()})")
    return "over"


def _own_cluster():
    """Slurm's name of this cluster, also outside of any job; "" where there is none."""
    if "SLURM_CLUSTER_NAME" in os.environ or not shutil.which("scontrol"):
        return os.environ.get("SLURM_CLUSTER_NAME", "")
    with contextlib.suppress(subprocess.TimeoutExpired):
        said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20).stdout
        if found := re.search(r"^ClusterName\s*=\s*(\S+)", said, re.M):
            return found[1]
    return ""


def _time_there(run):
    """The time by the clock that stamps the files of this folder: on a shared file system another host's."""
    (run / ".lock").touch()
    return (run / ".lock").stat().st_mtime


def _read(path):
    try:
        found = json.loads(path.read_text())
        return found if found["holders"][0]["pid"] and found["token"] else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # none, or one that a dying machine left half written


@contextlib.contextmanager
def _one_at_a_time(run):
    """Two starts at the same moment: one after the other.

    Some file systems have no locks, or keep them to one node. There a file that only one can make does it. What is
    left of it after a death in these milliseconds is removed after CLAIM_S. (Should two get through even so, the one
    whose lock was replaced finds that out at its next touch, before it has written anything that lasts.)
    """
    claim = run / ".lock.claim"
    with open(run / ".lock", "w") as handle:
        with contextlib.suppress(OSError):
            if fcntl:
                fcntl.flock(handle, fcntl.LOCK_EX)
        while True:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                break
            with contextlib.suppress(FileNotFoundError):
                if _time_there(run) - claim.stat().st_mtime > CLAIM_S:
                    claim.unlink()
            time.sleep(0.02)
        try:
            yield
        finally:
            claim.unlink(missing_ok=True)
