"""Faults for tests: this folder on PYTHONPATH makes any training fail as FAULTS says. The product knows nothing of it.

FAULTS is a JSON list of {"id", "do", "rank", and where: "phase", and optionally "mode", "step" and "attempt" (at
least), "last_step" and "last_attempt"}.
The moment is found by wrapping Runtime.watchdog.phase once that module has been imported. Each fault strikes once and
leaves <FAULT_DIR>/<id> with the time, or every time with "always".
"""
import collections
import ctypes
import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

KEPT = []
TOOK = {}  # (phase, mode): seconds, the last time


def strike(fault, frame):
    """Do it. frame: that of the caller of watchdog.phase, in the training script."""
    globals()[fault["do"]](fault, frame)


def kill(fault, frame):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(fault, frame):
    os.kill(os.getpid(), signal.SIGTERM)


def fill_disk_and_die(fault, frame):
    fill_disk(fault, frame)
    kill(fault, frame)


def stop(fault, frame):
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_gil(fault, frame):
    while True:  # a signal ends the sleep, but must not end the hang
        ctypes.PyDLL(None).sleep(10 ** 6)


def hang_device(fault, frame):
    """The device is given work that does not end; the host goes on until it needs a value of it."""
    import torch
    if torch.cuda.is_available():
        torch.cuda._sleep(2 ** 62)
    else:
        hold_gil(fault, frame)


def endless_c_call(fault, frame):
    collections.deque(iter(int, 1), maxlen=0)


def segfault(fault, frame):
    ctypes.string_at(0)


def slow_down(fault, frame):
    """A rank that takes longer, by a share of the phase's own time: as a device whose clock is lowered."""
    state = sys.modules["Runtime.watchdog"].STATE
    own = TOOK.get((state["name"], state["mode"]), 0)
    time.sleep(fault["share"] * own)
    TOOK["slept"] = fault["share"] * own


def raise_error(fault, frame):
    raise RuntimeError("the same crash every time")


def out_of_memory(fault, frame):
    import torch
    torch.empty(2 ** 50)


def nan_batch(fault, frame):
    frame.f_locals["batch"]["xt"].fill_(float("nan"))


def nan_weights(fault, frame):
    import torch
    with torch.no_grad():
        next(frame.f_locals["run"].net.parameters()).view(-1)[0] = float("nan")


def flip_weight(fault, frame):
    """One bit of one weight: a memory error that nobody reports."""
    import torch
    first = next(frame.f_locals["run"].net.parameters()).data.view(-1)[:1].view(torch.int32)
    first ^= 1 << 12


def smaller_batch(fault, frame):
    batch = frame.f_locals["batch"]
    for key in ("xt", "target_field", "condition"):
        batch[key] = batch[key][..., :batch[key].shape[-1] // 2]


def skip_gradient_sum(fault, frame):
    """As if one rank had taken a branch with no_sync: this backward does not sum over ranks there."""
    # A hook, because leaving the no_sync of a batch that only adds up would undo it.
    frame.f_locals["run"].model.register_forward_pre_hook(
        lambda model, args: setattr(model, "require_backward_grad_sync", False))


def other_branch(fault, frame):
    """This rank believes that the gate is closed, for one step."""
    agree = sys.modules["Runtime.agree"]
    real = agree.agree

    def believe(*args, **kwargs):
        agree.agree = real
        agreed = real(*args, **kwargs)
        return dataclasses.replace(agreed, terms=[9.0 for _ in agreed.terms])
    agree.agree = believe


def leak(fault, frame):
    KEPT.append(bytearray(b"x") * (50 * 10 ** 6))


def never_exit(fault, frame):
    """As a driver's thread that never ends: the interpreter waits for it on its way out."""
    threading.Thread(target=time.sleep, args=(10 ** 6,)).start()


def kill_while_saving(fault, frame):
    """Dies when the next checkpoint is about to get its name."""
    def hook(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith(".pth"):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)


def oldest_first(manifest):
    entries = manifest["checkpoints"]
    return sorted(entries, key=lambda name: (entries[name]["epoch"], entries[name]["step"]))


def newest_file(run):
    manifest = json.loads((run / "manifest.json").read_text())
    return manifest, oldest_first(manifest)[-1]


def spoil_two(fault, frame):
    """One bit in each of the two newest checkpoints."""
    run = Path(os.environ["OMNIMORPH_RUN"])
    for name in oldest_first(json.loads((run / "manifest.json").read_text()))[-2:]:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 8
        (run / name).write_bytes(data)


def truncate(fault, frame):
    run = Path(os.environ["OMNIMORPH_RUN"])
    path = run / newest_file(run)[1]
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(fault, frame):
    run = Path(os.environ["OMNIMORPH_RUN"])
    path = run / newest_file(run)[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def unloadable(fault, frame):
    """Garbage of which even the manifest believes that it is right."""
    import hashlib
    run = Path(os.environ["OMNIMORPH_RUN"])
    manifest, name = newest_file(run)
    (run / name).write_bytes(b"not a checkpoint" * 1000)
    manifest["checkpoints"][name].update(bytes=16000, sha256=hashlib.sha256(b"not a checkpoint" * 1000).hexdigest())
    (run / "manifest.json").write_text(json.dumps(manifest))


def poison_volume(fault, frame):
    import nibabel
    path = Path(fault["path"])
    path.with_name("good").write_bytes(path.read_bytes())
    image = nibabel.load(path)
    array = image.get_fdata()
    array[3, 3, 3] = float("nan")
    nibabel.save(nibabel.Nifti1Image(array.astype("float32"), image.affine), path)


def move_away(fault, frame):
    os.rename(fault["path"], fault["path"] + ".away")
    kill(fault, frame)


def fill_disk(fault, frame):
    with open(Path(fault.get("path") or os.environ["OMNIMORPH_RUN"]) / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def free_disk(fault, frame):
    (Path(os.environ["OMNIMORPH_RUN"]) / "ballast").unlink()


def ignore_everything(fault, frame):
    """Stuck before it has said a word, and deaf to TERM: a file system that does not answer."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(10 ** 6)


def limit_files(fault, frame):
    """The kernel refuses files as large as a checkpoint: what a full disk is without the right to mount a small one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))


def unlimit_files(fault, frame):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def nap(fault, frame):
    """Slow, but well."""
    time.sleep(fault.get("seconds", 2))


def slow_calls(fault, frame):
    """Each call of a function takes so many seconds longer: parts of a phase that are slow, but well."""
    module = sys.modules[fault["module"]]
    real = getattr(module, fault["function"])

    def slow(*args, **kwargs):
        time.sleep(fault["seconds"])
        return real(*args, **kwargs)
    setattr(module, fault["function"], slow)


def stale_copies(fault, frame):
    """The copy is gone, and the file handles of what is copied are stale, as after an NFS server has started anew."""
    for copy in (Path(os.environ["FAULT_DIR"]) / "memory").iterdir():
        shutil.rmtree(copy, ignore_errors=True)  # else the copy of the round before would be taken

    def stale(path, target, checksum=None):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    sys.modules["Dataloader.staging"].copy_file = stale


def sleep_long(fault, frame):
    """A hang without end in Python."""
    while True:
        time.sleep(1)


def watch_phases(module):
    real, faults = module.phase, json.loads(os.environ["FAULTS"])
    rank, attempt = int(os.environ.get("RANK", 0)), int(os.environ.get("OMNIMORPH_ATTEMPT", 0))

    def look(name, mode, step):
        for fault in faults:
            marker = Path(os.environ["FAULT_DIR"]) / fault["id"]
            if (rank == fault["rank"] and name == fault["phase"] and mode == fault.get("mode", mode)
                    and fault.get("step", 0) <= step <= fault.get("last_step", 10 ** 6)
                    and fault.get("attempt", 0) <= attempt <= fault.get("last_attempt", 10 ** 6)
                    and (fault.get("always") or not marker.exists())):
                if not marker.exists():
                    marker.write_text(str(time.time()))
                strike(fault, sys._getframe(2))

    def phase(name, mode="", **more):
        if "since" in module.STATE:
            took = time.monotonic() - module.STATE["since"] - TOOK.pop("slept", 0)
            TOOK[module.STATE["name"], module.STATE["mode"]] = took
        real(name, mode, **more)
        look(name, mode, module.STATE["step"])
    module.phase = phase
    look("import", "", 0)


if os.environ.get("FAULTS"):
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from after_import import after_import
    after_import("Runtime.watchdog", watch_phases)
