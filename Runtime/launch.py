"""Who am I among the ranks, and how they are joined: environment, rendezvous, process groups.

`ranks` is a plain dict: rank, local_rank, world, store (one long-lived TCPStore), cpu (gloo group for agreements) and
generation (how often the groups have been made). With one process there is no store and no group.
"""
import contextlib
import datetime
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from Runtime import attempts, watchdog
from Runtime.device import backend
from Runtime.errors import InputError
from Runtime.files import patiently
from Runtime.global_batch import fix_step
from Runtime.run_lock import hold, is_held, lock, run_folder, unlock

NAMES = {"rank": ("RANK", "SLURM_PROCID"), "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
         "world_size": ("WORLD_SIZE", "SLURM_NTASKS")}
HEAR_S = 10.0  # after rank 0 has found who is there, until all have heard it
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
LOCK_S = 60.0  # so long rank 0 tries to write the lock, while the others wait for it
LAST_WORDS_S = 10.0  # rank 0 judges the attempt when all have said theirs, or after this


def environment():
    """rank, local_rank and world of this process: plain variables (torchrun sets them too), then Slurm's, else alone.

    Raises InputError for a set of variables that contradicts itself.
    """
    # An sbatch script itself has SLURM_NTASKS but is no task; a task of srun has SLURM_STEP_ID beside it.
    column = 0 if "RANK" in os.environ or "WORLD_SIZE" in os.environ else 1 if "SLURM_STEP_ID" in os.environ else None
    if column is None:
        return {"rank": 0, "local_rank": 0, "world_size": 1, "step": None}
    found = {}
    for key, names in NAMES.items():
        text = os.environ.get(names[column], "0" if key == "local_rank" else "")
        if not text.isdecimal():
            raise InputError(f"{names[column]} is {text or 'not set'}: every rank needs {NAMES['rank'][column]}, "
                             f"{NAMES['local_rank'][column]} and {NAMES['world_size'][column]}, or none of them.")
        found[key] = int(text)
    if found["rank"] >= found["world_size"]:
        raise InputError(f"{NAMES['rank'][column]} is {found['rank']} but {NAMES['world_size'][column]} is "
                         f"{found['world_size']}: ranks count from 0.")
    return {**found, "step": None}


def debug():
    """Let libraries wait for each launch, check each collective and tell all they know; before any of them works."""
    os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_SHOW_CPP_STACKTRACES="1", NCCL_DEBUG="INFO",
                      CUDA_LAUNCH_BLOCKING="1", AMD_SERIALIZE_KERNEL="3", ZE_SERIALIZE="2")  # NVIDIA, AMD, Intel
    dist.set_debug_level_from_env()


def meet(ranks, seconds):
    """Find each other at MASTER_ADDR:MASTER_PORT. Raises RuntimeError naming the ranks that did not come.

    Only rank 0 looks who is there, in one request for all; the others wait for its answer. So hundreds of ranks ask the
    store for little more than a few do each.
    """
    if ranks["world_size"] == 1:
        return
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise InputError(f"MASTER_ADDR is {address or 'not set'} and MASTER_PORT {port or 'not set'}: with "
                         f"{ranks['world_size']} ranks both are needed, the host of rank 0 and a free port on it.")
    ends = time.time() + seconds
    serves = ranks["rank"] == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has its own
    try:
        store = dist.TCPStore(address, int(port), ranks["world_size"], serves, wait_for_workers=False,
                              timeout=datetime.timedelta(seconds=seconds))
        store = dist.PrefixStore(f"launch{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store.set(f"here/{ranks['rank']}", "1")
        missing = roll_call(store, ranks, ends) if ranks["rank"] == 0 else hear(store, ranks, ends)
    except dist.DistError as error:  # never there, or gone because it waited in vain for another
        raise RuntimeError(f"rank 0 cannot be reached at {address}:{port} within {seconds:.0f} s ({error})") from error
    if missing:
        raise RuntimeError(f"rank {missing} of {ranks['world_size']} did not arrive within {seconds:.0f} s")
    ranks["store"] = store


def roll_call(store, ranks, ends):
    """Rank 0: who has not come until then, as "3, 5" or "", which the others hear too.

    Rank 0, which serves the store, may leave soon after: not before all that are here have heard it.
    """
    every = [f"here/{rank}" for rank in range(ranks["world_size"])]
    while not (complete := store.check(every)) and time.time() < ends:
        time.sleep(0.05)
    missing = [] if complete else [rank for rank, key in enumerate(every) if not store.check([key])]
    answer = ", ".join(map(str, missing))
    store.set("missing", answer)
    heard = [f"heard/{rank}" for rank in range(1, ranks["world_size"]) if rank not in missing]
    patience = time.time() + HEAR_S
    while heard and not store.check(heard) and time.time() < patience:
        time.sleep(0.05)
    return answer


def hear(store, ranks, ends):
    """Another rank: what rank 0 has found. Where rank 0 itself has not come, nobody answers."""
    patience = datetime.timedelta(seconds=max(ends - time.time(), 0) + HEAR_S)
    try:
        store.wait(["missing"], patience)
    except dist.DistStoreError:
        if store.check(["here/0"]):
            raise
        return "0"
    missing = store.get("missing").decode()
    store.set(f"heard/{ranks['rank']}", "")
    return missing


def tell(ranks, key, value=None):
    """Rank 0's `value` on every rank, before there is a process group."""
    if ranks["world_size"] == 1:
        return value
    if ranks["rank"] == 0:
        ranks["store"].set(key, value)
    return ranks["store"].get(key).decode()


def open_run(ranks, cfg, fresh):
    """Find the other ranks and agree on the run's folder; lock it, number the attempt, start the watchdog.

    Sets ranks["step"]: samples and pairs of a step, fixed by the first launch of the run (Runtime/global_batch.py).
    A launcher has done all but the meeting, and says so by OMNIMORPH_* variables. Returns the folder.
    """
    seconds, launched = cfg["run.join_s"], "OMNIMORPH_RUN" in os.environ
    if launched:
        run, attempt = Path(os.environ["OMNIMORPH_RUN"]), int(os.environ["OMNIMORPH_ATTEMPT"])
        ranks["step"] = json.loads(os.environ["OMNIMORPH_STEP"])
        watchdog.start(run, ranks["rank"], attempt, cfg, launched)
        hold(run, os.environ["OMNIMORPH_TOKEN"])
        if ranks["rank"] == 0:
            patiently(lambda: lock(run, attempts.stale_after_s(cfg), token=os.environ["OMNIMORPH_TOKEN"]),
                      min(cfg["run.patience_s"], LOCK_S), f"the lock of {run}")
        watchdog.phase("meet")
        meet(ranks, seconds)
        return run
    meet(ranks, seconds)
    if ranks["rank"] == 0:
        run = run_folder(cfg["run.models"], cfg["data.name"], cfg["model.name"], fresh)
        ranks["token"] = patiently(lambda: lock(run, attempts.stale_after_s(cfg)),
                                   min(cfg["run.patience_s"], LOCK_S), f"the lock of {run}")
        ranks["step"] = fix_step(run, cfg, ranks["world_size"])
        ranks["attempt"] = attempts.begin(run, ranks["token"], ranks["world_size"])
    run = Path(tell(ranks, "run", str(run) if ranks["rank"] == 0 else None))
    ranks["attempt"] = int(tell(ranks, "attempt", str(ranks.get("attempt"))))
    ranks["step"] = json.loads(tell(ranks, "step", json.dumps(ranks["step"])))
    hold(run, tell(ranks, "token", ranks.get("token")))
    watchdog.start(run, ranks["rank"], ranks["attempt"], cfg, launched)
    return run


def close_run(ranks, run, code):
    """After training: without a launcher, rank 0 writes down how the attempt ended and gives the folder back."""
    if not is_held(run):
        return  # somebody else writes there now
    watchdog.finish()
    if "attempt" in ranks and ranks["world_size"] > 1:
        with contextlib.suppress(dist.DistError):  # rank 0, which serves the store, may be dead
            ranks["store"].set(f"closed/{ranks['rank']}", "1")
        every, ends = [f"closed/{rank}" for rank in range(ranks["world_size"])], time.time() + LAST_WORDS_S
        while ranks["rank"] == 0 and time.time() < ends and not ranks["store"].check(every):
            time.sleep(0.05)
    if "token" in ranks:
        try:
            attempts.end(run, ranks["attempt"], code, quiet=True, patience_s=LOCK_S)
            unlock(run, ranks["token"])
        except OSError as error:  # the next start finds out by itself
            print(f"{run}: how this attempt ended could not be written: {error}", file=sys.stderr)


def join(ranks, device, cfg):
    """Make the process groups of the next generation: the device's own, and a CPU group for agreements.

    Ranks wait for each other in agreements, as long as a deadline allows: deadlines end a hang, and name it.
    """
    ranks["generation"] = ranks.get("generation", -1) + 1
    ranks["cpu"] = None
    patience = datetime.timedelta(seconds=cfg["run.backend_timeout_s"])
    if ranks["world_size"] == 1:
        return
    if ranks["generation"] == 0:
        refuse_shared_devices(ranks, device)
    kind = backend(device)
    if kind == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # DETAIL wraps each group, and DDP of torch 2.13 takes the wrapper for gloo itself: a segmentation fault.
        dist.set_debug_level(dist.DebugLevel.INFO)
    # A fresh rendezvous each time: keys that an old generation left in the store would be taken for its own.
    store = dist.PrefixStore(f"generation{ranks['generation']}", ranks["store"])
    dist.init_process_group(kind, store=store, rank=ranks["rank"], world_size=ranks["world_size"],
                            timeout=patience)
    timeout = datetime.timedelta(seconds=3600 + 2 * cfg["run.deadline_first_s"])
    ranks["cpu"] = dist.new_group(backend="gloo", timeout=timeout)


def refuse_shared_devices(ranks, device):
    """Two ranks on one device are a mistake, which the backend would answer by an error of its own. A CPU is shared.

    Raises InputError on every rank, naming the first two and their device.
    """
    if device.type == "cpu":
        return
    store, every = ranks["store"], [f"device/{rank}" for rank in range(ranks["world_size"])]
    store.set(every[ranks["rank"]], json.dumps(identity(device)))
    if ranks["rank"] == 0:
        store.set("shared device", shared_device([json.loads(found) for found in store.multi_get(every)]))
    if sentence := store.get("shared device").decode():
        raise InputError(sentence)


def identity(device):
    """What tells a device from all others: [node, name for a person, number, unique name, what is visible here]."""
    properties = torch.get_device_module(device).get_device_properties(device)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    visible = [os.environ.get(name, "") for name in VISIBLE]  # parts of a device may have its unique name
    return [node, f"{device} ({properties.name})", device.index, str(getattr(properties, "uuid", "")), visible]


def shared_device(identities):
    """The sentence that refuses two ranks with the same device, or "". identities: of `identity`, by rank."""
    first = {}
    for rank, (node, name, index, unique, visible) in enumerate(identities):
        other = first.setdefault(json.dumps([node, index, unique, visible]), rank)
        if other != rank:
            return (f"ranks {other} and {rank} share {name} of {node}: start one rank for each device "
                    "(--ntasks-per-node, RANKS), or bind one to each (--gpus-per-task=1).")
    return ""


def leave(ranks):
    """Leave the process groups. The caller has let go of what uses them: destroying a group before DDP deadlocks."""
    if ranks["world_size"] > 1:
        gc.collect()
        dist.barrier(group=ranks["cpu"])
        dist.destroy_process_group()


def refresh(ranks, device, cfg):
    """Leave the old communicator and join a new one without leaving the process (against drivers that leak by use)."""
    watchdog.phase("refresh")
    leave(ranks)
    join(ranks, device, cfg)
