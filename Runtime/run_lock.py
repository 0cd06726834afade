"""The run folder: its name, and the lock that gives it to one launch at a time. Needs no torch.

The lock is `<run>/lock.json`: {"token", "since", "holders" (processes), "user", "job", "start", "cluster" (of Slurm),
"stale_after_s"}. Its holders check regularly that it is still theirs (`touch`, `assert_held`): a process that was
stopped may wake up after another launch has taken over the folder, and must no longer write there.
"""
import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from Runtime.config import PATHS, load_config
from Runtime.errors import InputError
from Runtime.files import is_alive, is_there, listed, patiently, read_lines, write_file

STALE_S = 3600.0  # for tool outputs: a lock of another machine untouched for this long belongs to a dead process
CLAIM_S = 30.0  # longer than reading and writing a lock ever takes
MAY_DIFFER = {*PATHS, "data.stage", "data.num_workers", "data.prefetch_factor", "data.in_memory",
              "registration.labels"}  # between launches of one run; the training finds the labels
HIDDEN = -1  # in place of the start time of a process
HELD = {}  # {run folder: (token, its number on the disk)} of the locks under which this process works


class TakenOver(InputError):
    """Another launch has taken over the folder in which this process worked."""


def generations(cfg):
    """Folders of the runs of a config's name, newest first: {number: `<run.models>/<data>_<net>`, `...-2`, `...-3`}.

    Without those of other users in which this user may not write: they cannot be continued.
    """
    name = f"{cfg['data.name']}_{cfg['model.name']}"
    matches = [(re.fullmatch(re.escape(name) + r"(?:-([1-9]\d*))?", path.name), path)
               for path in listed(cfg["run.models"])]
    return dict(sorted(((int(match[1] or 1), path) for match, path in matches if match and not _is_closed(path)),
                       reverse=True))


def _is_closed(folder):
    """Whether a folder belongs to another user, and this one may not write there."""
    # The owner counts because os.access also says no if the file system does not respond.
    with contextlib.suppress(FileNotFoundError):
        return os.stat(folder).st_uid != _user() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def run_folder(cfg, fresh=False):
    """Folder of the run: the newest of its `generations`; created with its `tmp/`.

    fresh: begin the next generation instead of continuing one. Among several generations this picks the newest one
    trained with these settings, else the newest of all, and prints which. Returns: Path.
    """
    folders, models = generations(cfg), Path(cfg["run.models"])
    if fresh or not folders:
        models.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(max(folders, default=0) + 1):
            run = models / (f"{cfg['data.name']}_{cfg['model.name']}" + f"-{number}" * (number > 1))
            with contextlib.suppress(FileExistsError):  # another --fresh was faster, or NFS has listed an old state
                run.mkdir(exist_ok=not fresh)
                break
        folders = {number: run}
    run, why = continued(list(folders.values()), cfg)
    if why:
        print(f"{run} is continued: {why}", file=sys.stderr)
    (run / "tmp").mkdir(parents=True, exist_ok=True)
    return run


def continued(folders, cfg):
    """(folder of the run that a config continues, the reason to print or ""). folders: of `generations`, in order."""
    newest, *others = folders
    if not others or has_settings(newest, cfg):
        return newest, ""
    for other in others:
        if has_settings(other, cfg):
            return other, f"it has these settings, {newest} has others"
    return newest, "no run of this name has these settings"


def launch_files(run, name):
    """Paths of a file of each launch of a run, oldest first. Raises OSError if the file system does not respond."""
    return [path for path in (folder / name for folder in listed(run / "launches")) if is_there(path)]


def settings_in(keys):
    """The keys of a config that make a run what it is: not those in MAY_DIFFER and, but for the seed, in `run`."""
    return {key for key in keys if key == "run.seed" or not key.startswith("run.")} - MAY_DIFFER


def has_settings(run, cfg):
    """Whether a run was last trained with the settings of a config, see `settings_in`, or never trained."""
    files = launch_files(run, "config.yaml")
    try:
        trained = load_config(files[-1]) if files else cfg
    except InputError:  # of another version
        return False
    return all(trained[key] == cfg[key] for key in settings_in(cfg))


def lock(run, stale_after_s, pid=None, token=None, instead="start a new run with --fresh"):
    """Take the lock of a run folder, or join it as the second holder if `token` is the lock's.

    A launcher (`pid`) gets back the lock it already holds: its first `begin` may have died before printing the token.
    The lock outlives a crash. A holder on this machine is dead if its process is; a holder in another Slurm job is dead
    if Slurm says so; any other holder on another machine is dead if the lock has not been touched for as long as the
    holder itself set.
    stale_after_s: longest time between two touches. pid: of the holder, None for this process. instead: advice for the
    error. Returns: the lock's token.
    Raises InputError naming a holder that is alive, and OSError if that is unknown at the moment.
    """
    path, me = run / "lock.json", _identity(pid or os.getpid())
    while True:
        seen = _read(path)
        is_again = seen is not None and pid is not None and me["began"] is not None and seen["holders"][0] == me
        is_ours = is_again or seen is not None and seen["token"] == token
        if seen and not is_ours and (holder := _living_holder(seen, run)):
            raise (TakenOver if token else InputError)(_in_use(run, seen, holder, instead))
        with _one_at_a_time(run):
            current = _read(path)
            if current and (seen is None or current["token"] != seen["token"]):
                continue  # another launch was faster: judge its lock
            if is_ours and current:
                first = current["holders"][0]
                content = {**current, "holders": [first, me] if me != first else [me]}
            else:
                content = {"token": token or secrets.token_hex(8), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                           "holders": [me], "user": _user(), "job": slurm_job(),
                           "start": os.environ.get("SLURM_RESTART_COUNT", "0"),
                           "cluster": os.environ.get("SLURM_CLUSTER_NAME", "")}
            for half in run.glob(f".{path.name}.tmp-*"):  # of a process that was killed while it wrote
                half.unlink(missing_ok=True)
            write_file(path, json.dumps({**content, "stale_after_s": stale_after_s}))
        hold(run, content["token"])
        return content["token"]


def slurm_job():
    """Slurm's id of this job, "" outside a job. In an array, the id of this task alone: squeue and scontrol take the
    first task's plain number to mean the whole array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return os.environ.get("SLURM_JOB_ID", "")


def _describe(content, holder):
    """A holder of a lock in words: process, host, Slurm job, since when."""
    job = f" (job {content['job']})" if content["job"] else ""
    return f"process {holder['pid']} on {holder['host']}{job} since {content['since']}"


def _in_use(run, content, holder, instead):
    """The sentence for a folder whose lock has a living holder. instead: advice, as for `lock`."""
    return (f"{run} is in use by {_describe(content, holder)}: let it finish or stop it, or {instead}; if you know "
            f"that it is dead, or that this is a copy of its folder, remove {run / 'lock.json'}.")


def hold(run, token):
    """Remember that this process works in a folder under a lock: its own, its launcher's or rank 0's."""
    HELD[os.path.abspath(run)] = token, _number_on_disk(run)


def _number_on_disk(folder):
    """What tells a folder from a new one of the same name; None if there is no folder."""
    with contextlib.suppress(OSError):
        return os.stat(folder).st_ino


@contextlib.contextmanager
def held_results(folder, instead="name another --out"):
    """Context that holds the `lock` of a results folder; retries for two minutes while Slurm does not answer."""
    def take():
        try:
            return lock(folder, STALE_S, instead=instead)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InputError(f"{folder}: {error.strerror}; make room, or {instead}.") from error
            raise
    token = patiently(take, 120, folder)
    try:
        yield
    finally:
        unlock(folder, token)


def require_free(folder, instead="name another --out"):
    """Raise InputError as `lock` does if a living process holds a folder, without taking it."""
    content = _read(folder / "lock.json")
    if content and (holder := patiently(lambda: _living_holder(content, folder), 120, folder)):
        raise InputError(_in_use(folder, content, holder, instead))


def assert_held(run):
    """Raise TakenOver if another launch has taken over the folder that this process holds, or if the folder was moved
    or removed and a later write has made a new one. Other folders pass.

    If there is no lock, the last attempt that began in the folder decides: a launch that took over the folder and has
    ended since left one. Only without both does the folder's number on the disk count, which some file systems change.
    """
    token, number = HELD.get(os.path.abspath(run), (None, None))
    if token is None:
        return
    try:
        content = _read(run / "lock.json")
        lines = [] if content else read_lines(run / "attempts.jsonl")
    except OSError:
        return  # the file system does not answer now; the next check asks again
    begins = [line for line in lines if line["event"] == "begin"]
    owner = None
    if content and content["token"] != token:
        owner = _describe(content, content["holders"][0])
    if begins and begins[-1]["loop"] != token:
        owner = "another run, which has ended since"
    if owner:
        raise TakenOver(f"{run} was taken over by {owner}, while this process stood still or was cut off: it leaves "
                        "and writes nothing there. Whoever has the folder continues the run.")
    numbers = {number, _number_on_disk(run)} - {None}
    if not content and not begins and len(numbers) > 1:
        raise TakenOver(f"{run} was moved or removed while this process wrote there, and is a new folder now; put the "
                        "old one in its place, and run the same command again.")


def touch(run):
    """Show other machines that this holder is alive. A lock that someone removed stays removed.

    Raises TakenOver as `assert_held` does.
    """
    assert_held(run)
    with contextlib.suppress(OSError):  # the next touch comes soon
        os.utime(run / "lock.json")


def unlock(run, token):
    """Remove the lock if its token is `token`."""
    def is_its():
        return (_read(run / "lock.json") or {}).get("token") == token

    HELD.pop(os.path.abspath(run), None)
    if is_its():
        with _one_at_a_time(run):
            if is_its():
                (run / "lock.json").unlink()


def _identity(pid):
    """What identifies a process: host, machine, boot id, PID namespace (containers have their own), PID, start time.

    Several machines may share a name, such as localhost, so a new boot id proves a reboot only on the same machine.
    """
    who = {"pid": pid, "host": socket.gethostname(), "machine": "", "boot": "", "namespace": "", "began": None}
    with contextlib.suppress(OSError):  # no Linux
        who.update(boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(), machine=_machine(),
                   namespace=os.readlink("/proc/self/ns/pid"), began=_began(pid))
    return who


def _user():
    """The number of this user; None where users have none. Not that of a file's owner, which a file system may map."""
    return os.getuid() if hasattr(os, "getuid") else None


def _machine():
    """Text that identifies this machine: host name, installation id and MAC address; "" if unknown."""
    card = uuid.getnode()
    with contextlib.suppress(OSError):
        installation = Path("/etc/machine-id").read_text().strip()
        if installation and not card >> 40 & 1:  # with that bit there is no card, and the number is random
            return f"{socket.gethostname()} {installation} {card:x}"
    return ""


def _began(pid):
    """Start time of a process in ticks since boot; None if it is dead, HIDDEN if this user may not know (hidepid)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return HIDDEN if is_alive(pid) else None
    return None if fields[0] in "ZX" else int(fields[19])


def _living_holder(content, run):
    """The first holder of a lock that is alive, or None. Raises OSError if that is unknown at the moment.

    On this machine the process table decides; elsewhere, and where it hides other users' processes, Slurm does, or else
    the time of the last touch.
    """
    me = _identity(os.getpid())
    elsewhere = []
    for holder in content["holders"]:
        is_here = holder["host"] == me["host"] and holder["machine"] == me["machine"] != ""
        rebooted = is_here and holder["boot"] != me["boot"]
        visible = holder["began"] is not None and all(holder[key] == me[key] for key in ("boot", "namespace"))
        began = _began(holder["pid"]) if visible else None
        if visible and began == holder["began"]:
            if _is_former_start(content):  # Slurm has told it to end, so it will
                raise OSError(errno.EBUSY, f"process {holder['pid']} of the former start of this job is still there")
            return holder
        # Without /proc, as on macOS and Windows, the process table tells no more than this.
        gone = holder["boot"] == me["boot"] == "" and holder["host"] == me["host"] and not is_alive(holder["pid"])
        if (not visible or began == HIDDEN) and not rebooted and not gone:
            elsewhere.append(holder)
    if not elsewhere:
        return None
    state = _job_state(content, run)
    if state is None:
        touched = (run / "lock.json").stat().st_mtime
        state = "running" if _time_there(run) - touched < content["stale_after_s"] else "over"
    return elsewhere[0] if state == "running" else None


def _is_former_start(content):
    """Whether a lock belongs to this Slurm job, before the job was requeued and started again."""
    return (content["job"] and content["job"] == slurm_job()
            and content["cluster"] in ("", os.environ.get("SLURM_CLUSTER_NAME", ""))
            and content["start"] != os.environ.get("SLURM_RESTART_COUNT", "0"))


def _job_state(content, run):
    """State of a lock's Slurm job: "running", "over", or None if it has no job or none that Slurm here can judge.

    In a container without Slurm, the launcher outside has asked for the jobs of its user (OMNIMORPH_JOBS). Where Slurm
    does not know the job of another user, it may only hide it (PrivateData=jobs).
    Raises OSError while the job is ending, and if Slurm does not answer: ask again in a minute.
    """
    job, cluster = content["job"], content["cluster"]
    if not job or (cluster and cluster != (_own_cluster() or cluster)):
        return None  # another cluster numbers its own jobs
    if job == slurm_job():
        return "over" if _is_former_start(content) else None
    if not shutil.which("squeue"):
        told, owner = os.environ.get("OMNIMORPH_JOBS"), (run / "lock.json").stat().st_uid
        if told is None or owner != os.getuid():
            return None
        state = dict(word.split("=", 1) for word in told.split()).get(job, "")
    else:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # no own filters
        try:
            answer = subprocess.run(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"],
                                    capture_output=True, text=True, timeout=20, env=plain)
        except subprocess.TimeoutExpired:
            raise OSError(errno.ETIMEDOUT, f"Slurm does not say within 20 s whether job {job} still runs") from None
        if answer.returncode and "Invalid job id" not in answer.stderr:  # Slurm's words for a job it has forgotten
            raise OSError(errno.ETIMEDOUT, f"Slurm does not say whether job {job} still runs ({answer.stderr.strip()})")
        state = answer.stdout.strip()
        if not state and content.get("user", (run / "lock.json").stat().st_uid) != _user():
            return None
    if re.search("RUNNING|SUSPENDED|STOPPED|CONFIGURING|RESIZING", state):
        return "running"
    if re.search("COMPLETING|SIGNALING|STAGE_OUT", state):
        raise OSError(errno.EBUSY, f"job {job} is just ending")
    return "over"


def _own_cluster():
    """Slurm's name of this cluster, also outside of any job; "" if there is none."""
    if "SLURM_CLUSTER_NAME" in os.environ or not shutil.which("scontrol"):
        return os.environ.get("SLURM_CLUSTER_NAME", "")
    with contextlib.suppress(subprocess.TimeoutExpired):
        answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20)
        if match := re.search(r"^ClusterName\s*=\s*(\S+)", answer.stdout, re.M):
            return match[1]
    return ""


def _time_there(run):
    """The time on the clock that stamps this folder's files: on a shared file system, another host's clock."""
    # A file that stays could be touched by the user who made it only.
    with tempfile.TemporaryFile(dir=run) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _read(path):
    """The content of a lock; None if there is none or a dying machine has left it half written."""
    try:
        content = json.loads(path.read_text())
        return content if content["holders"][0]["pid"] and content["token"] else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


@contextlib.contextmanager
def _one_at_a_time(run):
    """Let only one process at a time read and write the lock of a folder.

    A claim file, which only one process can create, works on all file systems; some have no file locks, or only
    node-local ones. If a process dies while it holds the claim, others remove it after CLAIM_S. (Should two processes
    get through anyway, the one whose lock was replaced notices at its next touch, before it writes anything lasting.)
    """
    claim = run / ".lock.claim"
    while True:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        with contextlib.suppress(FileNotFoundError):
            if abs(_time_there(run) - claim.stat().st_mtime) > CLAIM_S:  # or the clock was set back
                claim.unlink()
        time.sleep(0.02)
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)
