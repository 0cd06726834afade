"""Save, verify, load and prune checkpoints. A checkpoint counts only once it has been read back.

A run folder `<root>/<data>_<net>` holds epoch checkpoints, `tmp/` with those written within an epoch, and
`manifest.json`, which names every checkpoint with its size and SHA-256. Below, `run` is the Path of this folder and
`relative` or `name` is the path of a checkpoint in it. A state is a plain dict:
{"format": 1, "model", "optimizer", "epoch" (to resume in), "step_in_epoch" (steps done in it), "step" (of the run),
"config" (flat, dotted keys), ...}. One process writes a run folder, one thread at a time; any number may read it.
"""
import concurrent.futures
import datetime
import errno
import hashlib
import itertools
import json
import math
import pickle
import re
import shutil
import struct
import sys
import zipfile
from operator import itemgetter

import numpy as np
import torch

from Runtime import watchdog
from Runtime.config import MODEL_KEYS
from Runtime.device import synchronize
from Runtime.errors import InputError, is_out_of_memory
from Runtime.files import is_passing, partial_path, patiently, replace, sha256, write_flushed
from Runtime.manifest import (
    LOST,
    checkpoint_files,
    damage,
    new_best,
    newest_first,
    read_manifest,
    standing,
    write_manifest,
)
from Runtime.run_lock import assert_held

FORMAT = 1
REQUIRED = ("format", "model", "optimizer", "epoch", "step_in_epoch", "step", "config")
# What reading a damaged or foreign file may raise: flipped bits in a pickle lead to all of these.
UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError,
              OverflowError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile)


def _stderr(message):
    print(message, file=sys.stderr, flush=True)


def epoch_name(epoch, data_name, net_name):
    """Path of an epoch checkpoint, relative to the run folder."""
    return f"{epoch:06d}_{data_name}_{net_name}.pth"


def step_name(epoch, step_in_epoch, data_name, net_name):
    """Path of a checkpoint within an epoch, relative to the run folder."""
    return f"tmp/{epoch:06d}_step{step_in_epoch:04d}_{data_name}_{net_name}.pth"


def save(run, relative, state, metrics=None, best=None):
    """Write `state` to `run/relative`, read it back, then list it in the manifest.

    metrics: {name: number or None}; NaN becomes null. best: the score that the manifest's best is chosen by, higher is
    better: (metric name, value, name of the data measured); None if nothing was measured now; () if nothing can be, as
    too few volumes are held out: then no checkpoint is the best. A crash leaves the old file or the new one.
    Returns: the manifest entry.
    Raises OSError naming the file and the free space if it cannot be written or reads back differently (earlier files
    stay), ValueError for a missing key or non-finite weights, TypeError for a value that torch.load would refuse.
    """
    plain = _savable(state, relative, copy=False)
    target = run / relative
    if metrics:
        metrics = {name: float(value) if value is not None and math.isfinite(value) else None
                   for name, value in metrics.items()}
    score = best and {"checkpoint": relative, "metric": best[0], "value": float(best[1]), "measured_on": best[2]}
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_and_read_back(partial, plain)
        entry = {**_entry(partial, plain, metrics), **({"score": score} if score else {})}
        manifest = _manifest(run, _stderr)
        if best == ():
            manifest["best"] = None
        best = new_best(run, manifest, relative, entry)
        # Announced before the rename, so that a kill on either side of it leaves a file whose SHA-256 is known.
        write_manifest(run, manifest | {"pending": {"checkpoint": relative, "entry": entry, "best": best}})
        replace(partial, target)
        manifest["checkpoints"][relative] = entry
        write_manifest(run, manifest | {"best": best})
    except (OSError, RuntimeError) as error:
        _raise_write_failure(error, target)
    finally:
        if partial.exists():
            partial.unlink()
    return entry


def save_in_background(run, relative, state, metrics=None, best=None, keep=None):
    """Copy `state` to CPU memory, then `save` the copy in a thread. The caller waits for it before the next save.

    metrics, best: as in `save`. keep: (keep_last, keep_every, keep_tmp) of `prune`, which runs after the save and, if
    the disk is full, before a second try. Python exits only after the write.
    Returns: Future of the result of `save`. Raises at once for a state that `save` refuses.
    """
    plain = _savable(state, relative, copy=True)
    # A new thread per file: once torch computes in a thread, OpenMP keeps helper threads for it until it ends. If
    # helpers outnumber the cores, all of them sleep between operations. With one permanent thread, each step on a CPU
    # took 50 % longer after the first checkpoint.
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = thread.submit(_save_and_prune, run, relative, plain, metrics and dict(metrics), best, keep)
    thread.shutdown(wait=False)
    return future


def verify(run, relative):
    """None if the file matches the manifest (size, SHA-256) and loads; otherwise a phrase that says what is wrong."""
    path = run / relative
    if not path.is_file():
        return "missing"
    try:
        entry = read_manifest(run)["checkpoints"].get(relative)
    except UNREADABLE as error:
        return f"the manifest {_reason(error)}"
    try:
        return _mismatch(path, entry) if entry else "not in the manifest"
    except OSError as error:
        return _reason(error)


def newest(run, warn=_stderr, record=False, patience_s=0.0):
    """The newest checkpoint by (epoch, step) that verifies; a doubtful one (`step_back`) only if no other does.

    A lost manifest is rebuilt from the files that load. warn: called with a message for each rejected file. record:
    whether to mark damaged files in the manifest, so that they no longer count; only for the process that holds the
    lock. patience_s: how long to wait for a file that the file system does not deliver.
    Returns: its relative path; None in a folder without checkpoints.
    Raises InputError if there are checkpoints and none verifies: a run never silently starts over. If some of them
    could not be read, they may be intact, and it raises OSError instead.
    """
    # First: a run that is being trained names a file in the manifest before it appears.
    files = patiently(lambda: checkpoint_files(run), patience_s, run)
    manifest = patiently(lambda: _manifest(run, warn), patience_s, run / "manifest.json")
    entries = manifest["checkpoints"]
    unlisted = [relative for relative in files if relative not in entries and (run / relative).exists()]
    for relative in unlisted:
        warn(f"{run / relative} is skipped: not in the manifest")
    doubtful = {relative: entry["doubtful"] for relative, entry in entries.items() if "doubtful" in entry}
    for relative, reason in doubtful.items():
        warn(f"{run / relative} is doubtful and comes last: {reason}")
    sound, read_error, before = None, None, json.dumps(manifest)
    for name in sorted(newest_first(entries), key=doubtful.__contains__):
        watchdog.goes_on()
        try:
            problem = patiently(lambda name=name: _mismatch(run / name, entries[name]), patience_s, run / name)
        except OSError as error:
            problem, read_error = _reason(error), error
        entries[name].pop("damaged", None)
        if not problem:
            sound = name
            break
        entries[name]["damaged"] = problem
        warn(f"{run / name} is skipped: {problem}")
    if record and json.dumps(manifest) != before:
        write_manifest(run, manifest)
    if sound in doubtful:
        warn(f"{run / sound} is used although it is doubtful, because no other checkpoint is intact")
    if sound is None and read_error:
        fault = read_error.strerror or read_error
        raise OSError(read_error.errno, f"no checkpoint in {run} can be read at the moment ({fault})")
    if sound is None and (entries or unlisted):
        raise InputError(f"no checkpoint in {run} can be used: restore one of its files, train anew with --fresh, or "
                         "give another --model.")
    return sound


def step_back(run, reason):
    """Mark the newest checkpoint that verifies as doubtful until it is saved again; `newest` then picks the previous.

    reason: a sentence for the manifest.
    Returns: relative path of the previous one. If no earlier one verifies and counts: None, and nothing is marked.
    """
    manifest = _manifest(run, _stderr)
    entries = manifest["checkpoints"]
    sound = (name for name in standing(run, entries) if _mismatch(run / name, entries[name]) is None)
    doubted = next(sound, None)
    before = next(sound, None)
    if before:
        entries[doubted]["doubtful"] = reason
        write_manifest(run, manifest)
    return before


def read(path, map_location="cpu"):
    """The object that torch saved at `path`, with its tensors on map_location.

    Raises InputError naming a damaged file or one that is no checkpoint, and OSError for a transient fault.
    """
    try:
        return torch.load(path, weights_only=True, map_location=map_location)
    except UNREADABLE as error:
        if is_passing(error) or is_out_of_memory(error):
            raise
        if not isinstance(error, OSError) and not _is_saved_by_torch(path):
            raise InputError(f"{path} cannot be read as a checkpoint, because it does not start like one: give a "
                             "checkpoint (.pth), a .safetensors file, a run's folder or the word universal; if it was "
                             "a checkpoint, restore it.") from error
        if found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise InputError(f"{path} holds Python objects ({found[1]}), which are not loaded since they may run code: "
                             "save it again with the program that wrote it, plain tensors and numbers only.") from error
        raise InputError(f"{path} {_reason(error)}: restore the file or use another checkpoint.") from error


def _is_saved_by_torch(path):
    """Whether a file begins as the archives of torch.save do, or as its older pickles."""
    with open(path, "rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))


def load(path):
    """State of the checkpoint at `path`, with tensors on the CPU. Raises what `read` and `require_own` raise."""
    return require_own(read(path), path)


def require_own(state, path):
    """Return the state that `read` found. Raises InputError if it is foreign or too new."""
    format_number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(format_number, int) or not isinstance(state.get("model"), dict):
        raise InputError(f"{path} is not an OmniMorph checkpoint: it has no format number or no model.")
    for name, tensor in {**state["model"], **(state.get("ema") or {})}.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{path}: its weight {name} is not a tensor; use another checkpoint.")
    try:
        json.dumps(state.get("config"))
    except (TypeError, ValueError, RecursionError):
        raise InputError(f"{path}: its config has values that no config can have; use another checkpoint.") from None
    if format_number > FORMAT:
        raise InputError(f"{path} has format {format_number} and this code reads up to {FORMAT}: update the code.")
    return state


def check_compatible(state, cfg, path, continues=True):
    """Compare the config in `state` with `cfg` (both flat, dotted keys). path: of the checkpoint, for the error.

    continues: whether the run resumes. If it only takes the weights, the number of passes and the condition's extent
    may differ, since neither has weights.
    Returns: a text "key: before -> after" for each key that differs and is none of MODEL_KEYS.
    Raises InputError naming the first of MODEL_KEYS that differs.
    """
    config = state.get("config")
    instead = "start a new run with --fresh" if continues else "begin without it (leave out --init-from)"
    if not isinstance(config, dict):
        raise InputError(f"{path} has no config, so its network is unknown: use another checkpoint, or {instead}.")
    # Through JSON, since a saved tuple and a YAML list are the same setting.
    old, new = json.loads(json.dumps(config)), json.loads(json.dumps(cfg))
    changed = {key: (old.get(key, "not set"), new.get(key, "not set")) for key in {**old, **new}
               if key not in old or key not in new or old[key] != new[key]}
    free = () if continues else ("model.rec_num", "model.condition_type")
    for key in sorted(MODEL_KEYS, key=lambda key: key != "model.name"):
        if key in changed and (key not in free or "none" in changed[key]):
            problem = "is a checkpoint of another network" if key == "model.name" else "does not match the config"
            raise InputError(f"{path} {problem} ({key} is {changed[key][0]} in the checkpoint and {changed[key][1]} in "
                             f"the config): use the config it was trained with, or {instead}.")
    return [f"{key}: {before} -> {after}" for key, (before, after) in changed.items() if key not in MODEL_KEYS]


def load_weights(model, state, path):
    """Copy the weights of `state` into `model`, strictly. Raises InputError naming the first tensor that differs,
    or that holds anything but finite real numbers."""
    own, theirs = model.state_dict(), state["model"]
    missing = [f"{name} is missing" for name in own if name not in theirs]
    unexpected = [f"{name} is unexpected" for name in theirs if name not in own]
    shapes = [f"{name} is {tuple(theirs[name].shape)} in the file and {tuple(own[name].shape)} in the network"
              for name in own if name in theirs and own[name].shape != theirs[name].shape]
    differences = missing + unexpected + shapes
    odd = next((name for name in own if not differences and (
        theirs[name].layout != torch.strided or theirs[name].is_floating_point() != own[name].is_floating_point()
        or not theirs[name].float().isfinite().all())), None)
    if odd:
        raise InputError(f"{path}: its weight {odd} is not all finite real numbers; use another checkpoint.")
    if differences:
        raise InputError(f"the weights in {path} do not fit the network ({differences[0]}; "
                         f"{len(missing)} missing, {len(unexpected)} unexpected, {len(shapes)} mis-shaped): use the "
                         "config, and the version of this code, that it was trained with.")
    model.load_state_dict(theirs, strict=True)


def weights_sha256(state_dict):
    """Hex SHA-256 of the names (sorted), dtypes, shapes and bytes of all tensors: the same on every device."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_raw(tensor).numpy())
    return digest.hexdigest()


def prune(run, keep_last, keep_every, keep_tmp, trusted=()):
    """Remove old checkpoints.

    Of those that count, this keeps the newest `keep_last` epoch checkpoints, each whose epoch is divisible by
    `keep_every` (0: none), the best one of each metric and held-out data, so that these may be changed back, the newest
    `keep_tmp` within an epoch, and always at least one that verifies (a doubtful one if no other does). Damaged and
    doubtful ones do not use up these numbers and go once a newer one verifies. Epochs come from the states, not from
    file names. trusted: names just read back; they are kept and not read again.
    Returns: list of the removed relative paths.
    """
    manifest = _manifest(run, _stderr)
    entries, best = manifest["checkpoints"], manifest["best"] or {}
    ordered, counted = newest_first(entries), standing(run, entries)
    epochs = [name for name in counted if not name.startswith("tmp/")]
    steps = [name for name in counted if name.startswith("tmp/")]
    keep = {*epochs[:keep_last], *steps[:keep_tmp], best.get("checkpoint"), *trusted}
    keep.update(name for name in epochs if keep_every and entries[name]["epoch"] % keep_every == 0)
    scores = sorted((entries[name]["score"] for name in epochs if "score" in entries[name]), key=itemgetter("value"))
    keep.update({(each["metric"], each.get("measured_on")): each["checkpoint"] for each in scores}.values())
    if keep.issuperset(ordered):
        return []
    # The kept ones first: usually the newest verifies at once and nothing else has to be read.
    likely = sorted(ordered, key=lambda name: (name not in counted, name not in keep, name not in trusted))
    intact = next((name for name in likely if name in trusted or not _mismatch(run / name, entries[name])), None)
    if intact is None:
        return []
    assert_held(run)
    older = ordered[ordered.index(intact) + 1:]
    removed = [name for name in ordered if name not in keep | {intact} and (name in counted or name in older)]
    for name in removed:  # before the manifest is written: on a full disk it needs their space
        (run / name).unlink(missing_ok=True)
    write_manifest(run, manifest | {"checkpoints": {key: entries[key] for key in entries if key not in removed}})
    return removed


def _save_and_prune(run, relative, plain, metrics, best, keep):
    """`save`, then `prune`; on a full disk `prune` and `save` again. Returns the entry."""
    try:
        entry = save(run, relative, plain, metrics, best)
    except OSError as error:
        if keep is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        prune(run, *keep)
        entry = save(run, relative, plain, metrics, best)
    try:
        if keep is not None:
            prune(run, *keep, trusted=(relative,))
    except OSError as error:  # the checkpoint itself is safe
        _stderr(f"{run} could not be pruned: {error}")
    return entry


def _savable(state, relative, copy):
    """The state on the CPU, checked. copy: whether to copy tensors that are already there."""
    missing = [key for key in REQUIRED if key not in state]
    if missing:
        raise ValueError(f"the state to save in {relative} lacks {', '.join(missing)}")
    plain = _plain(state, "state", copy)
    devices = {value.device for part in ("model", "queue") for value in (state.get(part) or {}).values()
               if isinstance(value, torch.Tensor)}
    for device in devices:  # so far, copies from it are only queued
        synchronize(device)
    bad = [name for name, tensor in plain["model"].items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ValueError(f"the weights to save in {relative} are not finite: {bad[0]}")
    return plain


def _plain(value, where, copy):
    """`value` with every tensor on the CPU and only types that torch.load(weights_only=True) accepts.

    where: its dotted name, for the TypeError.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return value.detach().to("cpu", copy=copy)
        # Into pinned memory, at bus speed: the copies run one after the other while the host continues.
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}.{key}", copy) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return kind(_plain(item, f"{where}.{index}", copy) for index, item in enumerate(value))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain Python values only")


def _leaves(value, where):
    """(dotted name, description, bytes) of every tensor and plain value. Compared this way, NaN equals NaN."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{where}.{key}")
    elif isinstance(value, torch.Tensor):
        yield where, (value.dtype, value.shape), _raw(value)
    else:
        yield where, repr(value), torch.empty(0)


def _raw(tensor):
    """The bytes of a tensor: (bytes,) uint8 on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _write_and_read_back(path, plain):
    """Write a state and compare every tensor and value with the file. Raises OSError naming the first that differs."""
    write_flushed(path, lambda file: torch.save(plain, file))
    try:
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UNREADABLE as error:
        raise OSError(getattr(error, "errno", None) or errno.EIO, f"reads back damaged: {_reason(error)}") from error
    for saved, read in itertools.zip_longest(_leaves(plain, "state"), _leaves(content, "state"), fillvalue=()):
        if saved[:2] != read[:2] or not torch.equal(saved[2], read[2]):  # torch.equal releases the GIL for training
            raise OSError(errno.EIO, f"{(saved or read)[0]} reads back differently")


def _raise_write_failure(error, target):
    """Raise an OSError that names the free space. torch.save hides the OSError in the context of a RuntimeError."""
    cause = error
    while not isinstance(cause, OSError):
        if cause is None:
            raise error
        cause = cause.__cause__ or cause.__context__
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free"
    raise OSError(cause.errno, f"{target} could not be written ({cause.strerror or cause}; {free})") from error


def _entry(path, state, metrics):
    """The manifest entry of a file with this state."""
    status = path.stat()
    written = datetime.datetime.fromtimestamp(status.st_mtime, datetime.timezone.utc).isoformat(timespec="seconds")
    return {"epoch": state["epoch"], "step": state["step"], "sha256": sha256(path), "bytes": status.st_size,
            "weights_sha256": weights_sha256(state["model"]), "written": written, "metrics": metrics}


def _mismatch(path, entry):
    """None if the file matches its entry and loads, else a phrase. Raises OSError if it cannot be read."""
    if problem := damage(path, entry):
        return problem
    try:
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except FileNotFoundError:
        return "missing"
    except OSError:
        raise
    except UNREADABLE as error:
        return _reason(error)
    return None


def _reason(error):
    """A read error as a phrase."""
    if isinstance(error, InputError):
        return str(error)
    text = getattr(error, "strerror", None) or str(error).split("\n")[0].split(". ")[0] or "it ends too early"
    return f"cannot be read: {type(error).__name__}: {text}"


def _manifest(run, warn):
    """The manifest; if it is lost, it is rebuilt from the files that load."""
    try:
        return read_manifest(run)
    except LOST as error:
        reason = _reason(error)
    manifest = {"checkpoints": {}, "best": None}
    files = checkpoint_files(run)
    if not files:
        return manifest
    warn(f"{run / 'manifest.json'} {reason}; rebuilding it from the files that can be read, without their metrics")
    for relative in files:
        watchdog.goes_on()
        try:
            with zipfile.ZipFile(run / relative) as archive:  # torch.load does not check the CRCs
                damaged = archive.testzip()
            if damaged:
                raise InputError(f"CRC of {damaged} differs")
            manifest["checkpoints"][relative] = _entry(run / relative, load(run / relative), None)
        except UNREADABLE as error:
            # It may be intact, and what the new manifest lacks would never be found again.
            if is_passing(error) or is_out_of_memory(error):
                raise
            warn(f"{run / relative} is skipped: {_reason(error)}")
    if manifest["checkpoints"]:
        write_manifest(run, manifest)
    return manifest
