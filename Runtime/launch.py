"""The rank of this process, and how ranks join: environment, rendezvous, process groups.

A single process has no store and no group.
"""
import contextlib
import dataclasses
import datetime
import gc
import json
import os
import re
import socket
import sys
import time

import torch
import torch.distributed as dist

from Runtime import watchdog
from Runtime.device import backend
from Runtime.errors import InputError, first_line, ranges

NAMES = {"rank": ("RANK", "SLURM_PROCID"), "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
         "world_size": ("WORLD_SIZE", "SLURM_NTASKS")}
HEAR_S = 10.0  # time for all ranks to read the result of rank 0's roll call
SAY_AFTER_S = 10.0  # rank 0 then says whom it is waiting for
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
           "ONEAPI_DEVICE_SELECTOR")
OF_A_NODE = ("data.stage", "run.threads")  # keys that may differ between ranks
POLL_S, LONGEST_POLL_S = 0.05, 1.0


class NotMet(RuntimeError):
    """The ranks of a training did not meet. missing: those that did not arrive, [] if rank 0 cannot be asked."""

    def __init__(self, sentence, missing=()):
        super().__init__(sentence)
        self.missing = list(missing)


@dataclasses.dataclass
class Ranks:
    """The rank of this process, and what it shares with the others."""

    rank: int = 0
    local_rank: int = 0          # rank within its node
    world_size: int = 1
    step: dict | None = None     # of `fix_step`: the samples and pairs of a step, fixed by the run's first launch
    store: object = None         # a TCPStore that lives as long as the process
    cpu: object = None           # gloo group for agreements
    generation: int = -1         # of the process groups, counted from 0
    attempt: int | None = None   # without a launcher: the number of this attempt
    token: str | None = None     # without a launcher, on rank 0: the lock's token


def environment():
    """The Ranks of this process.

    RANK, LOCAL_RANK and WORLD_SIZE (torchrun sets them too) take precedence over Slurm's variables; without either,
    this process is alone. Raises InputError for incomplete or contradictory variables.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        column = 0
    elif re.fullmatch(r"\d{1,8}", os.environ.get("SLURM_STEP_ID", "")):  # a task of srun, no batch or interactive step
        column = 1
    else:
        return Ranks()
    ranks = Ranks()
    for key, names in NAMES.items():
        text = os.environ.get(names[column], "0" if key == "local_rank" else "")
        if not text.isdecimal():
            raise InputError(f"{names[column]} is {text or 'not set'}: every rank needs {NAMES['rank'][column]}, "
                             f"{NAMES['local_rank'][column]} and {NAMES['world_size'][column]}, or none of them.")
        setattr(ranks, key, int(text))
    if ranks.rank >= ranks.world_size:
        raise InputError(f"{NAMES['rank'][column]} is {ranks.rank} but {NAMES['world_size'][column]} is "
                         f"{ranks.world_size}: ranks count from 0.")
    return ranks


def debug():
    """Make libraries wait for each kernel, check each collective and log all details; call it before they start."""
    os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_SHOW_CPP_STACKTRACES="1", NCCL_DEBUG="INFO",
                      CUDA_LAUNCH_BLOCKING="1", AMD_SERIALIZE_KERNEL="3", ZE_SERIALIZE="2")  # NVIDIA, AMD, Intel
    dist.set_debug_level_from_env()


def is_port(text):
    """Whether a text is the number of a TCP port."""
    return text.isdecimal() and 0 < int(text) < 2 ** 16


def rendezvous(ranks, seconds, name=""):
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT within `seconds`; sets ranks.store.

    name: name of the run. It keeps apart the ranks of two runs on the same port, for example after a typo.
    No rank polls: each one counts itself, the last one announces itself, and the store wakes the others. A rank sends
    only a handful of requests, whatever the number of ranks.
    Raises NotMet naming the ranks that did not arrive; InputError for a bad address or port.
    """
    if ranks.world_size == 1:
        return
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not is_port(port):
        raise InputError(f"MASTER_ADDR is {address or 'not set'} and MASTER_PORT {port or 'not set'}: with "
                         f"{ranks.world_size} ranks both are needed, the host of rank 0 and a free port on it (1 to "
                         "65535).")
    until = time.monotonic() + seconds
    serves = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has its own
    try:
        store = dist.TCPStore(address, int(port), ranks.world_size, serves, wait_for_workers=False,
                              timeout=datetime.timedelta(seconds=seconds))
        store = dist.PrefixStore(f"{name}/launch{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store.set(f"here/{ranks.rank}", "1")
        if store.add("arrivals", 1) == ranks.world_size:
            store.compare_set("missing", "", "[]")
        missing = roll_call(store, ranks, until)
    except dist.DistError as error:  # rank 0 never came, or it has left after waiting in vain for another rank
        if serves and "address already in use" in str(error).lower():
            raise NotMet(f"port {port} of this host is taken by another program: set MASTER_PORT to a free one, the "
                         "same for all ranks") from error
        raise NotMet(f"rank 0 cannot be reached at {address}:{port} within {seconds:.0f} s ({first_line(error)}): see "
                     "how rank 0 ended; each training needs a MASTER_PORT of its own") from error
    if missing:
        raise NotMet(f"rank {ranges(missing)} of {ranks.world_size} did not arrive within {seconds:.0f} s at {address}:"
                     f"{port}: see how they ended; each training needs a MASTER_PORT of its own", missing)
    ranks.store = store


def roll_call(store, ranks, until):
    """The ranks that rank 0 reports as missing at `until` (time.monotonic); [0] if rank 0 itself is missing.

    Rank 0 serves the store and may leave soon after, so it first waits up to HEAR_S for the others to read the answer.
    """
    first = ranks.rank == 0

    def absent():
        return [rank for rank in range(ranks.world_size) if not store.check([f"here/{rank}"])]

    def left():
        return max(until - time.monotonic(), 0.001)

    if first and left() > SAY_AFTER_S:
        try:
            store.wait(["missing"], datetime.timedelta(seconds=SAY_AFTER_S))
        except dist.DistStoreError:
            print(f"WORLD_SIZE is {ranks.world_size}: rank 0 waits up to {left():.0f} s more for rank "
                  f"{ranges(absent())}", file=sys.stderr, flush=True)
    try:
        store.wait(["missing"], datetime.timedelta(seconds=left() + HEAR_S * (not first)))
    except dist.DistStoreError:
        if first:
            # If the last rank has just arrived and announced itself, its answer stands.
            store.compare_set("missing", "", json.dumps(absent()))
        elif store.check(["here/0"]):
            raise
        else:
            return [0]
    missing = json.loads(store.get("missing"))
    listeners = ranks.world_size - 1 - len(missing)
    if first and listeners:
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["all heard"], datetime.timedelta(seconds=HEAR_S))
    elif ranks.rank not in missing and store.add("listeners", 1) == listeners:
        store.set("all heard", "1")
    return missing


def show_moves(ranks):
    """From now on, count in the store each part of a phase that this rank completes: waiting ranks see it, `arrive`."""
    def beat():
        with contextlib.suppress(dist.DistError):  # rank 0 is gone: the next joint operation reports it
            ranks.store.add("beats", 1)

    if ranks.world_size > 1:
        watchdog.STATE["beat"] = beat


def arrive(ranks, where):
    """Wait until all ranks have reached this point, for as long as the late ones make progress.

    Call this before operations with a timeout of their own: a rank that stages or verifies may take much longer. That
    rank reports each part that it completes (watchdog.phase), and the waiting ranks then restart their deadline.
    """
    if ranks.world_size > 1 and ranks.store.add(f"at {where}", 1) == ranks.world_size:
        ranks.store.set(f"all at {where}", "1")
    wait_while_others_work(ranks, f"all at {where}")


def wait_while_others_work(ranks, key):
    """Wait for a key of the store under this phase's deadline, which restarts when another rank makes progress."""
    if ranks.world_size == 1:
        return
    store, seen, pause = ranks.store, None, POLL_S
    while not store.check([key]):
        if (beats := store.add("beats", 0)) != seen:
            if seen is not None:
                watchdog.wait_on()
            seen = beats
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def wait_for_keys(store, keys, seconds):
    """Wait up to `seconds` until a store has all keys. Returns: whether it has them."""
    until = time.monotonic() + seconds
    while not (complete := store.check(keys)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return complete


def broadcast(ranks, key, value=None):
    """Rank 0's `value` (a str) on every rank, through the store: there is no process group yet.

    The others wait for as long as rank 0 makes progress, see `arrive`.
    """
    if ranks.world_size == 1:
        return value
    if ranks.rank == 0:
        ranks.store.set(key, value)
    wait_while_others_work(ranks, key)
    return ranks.store.get(key).decode()


def refuse_together(ranks, name, value, judge):
    """Raise InputError on every rank if rank 0's judge(values of all ranks) returns a sentence instead of "".

    name: prefix of the keys in the store. value: this rank's, JSON-serialisable.
    """
    if ranks.world_size == 1:
        return
    keys = [f"{name}/{rank}" for rank in range(ranks.world_size)]
    ranks.store.set(keys[ranks.rank], json.dumps(value))
    if ranks.rank == 0:
        ranks.store.set(f"{name}/refused", judge([json.loads(text) for text in ranks.store.multi_get(keys)]))
    if sentence := ranks.store.get(f"{name}/refused").decode():
        raise InputError(sentence)


def other_config(configs):
    """The error sentence for the first rank whose config differs from that of rank 0, or ""."""
    for rank, config in enumerate(configs):
        for key, value in config.items():
            if value != configs[0].get(key) and key not in OF_A_NODE:
                return (f"rank {rank} has {key} {value!r} and rank 0 has {configs[0].get(key)!r}: start all ranks with "
                        "the same config and --set.")
    return ""


def join(ranks, device, cfg):
    """Make the process groups of the next generation: the device's own, and ranks.cpu for agreements.

    Ranks wait for each other in agreements, so the CPU group's timeout exceeds every deadline: it is the watchdog that
    ends a hang and names it. Raises InputError on every rank if two ranks share a device other than a CPU or if their
    devices are of two kinds: the backend would fail too, but with an obscure error or a hang.
    """
    # Longer than the first deadline too: ranks that wait must not die before the one that hangs, and take its blame.
    backend_timeout_s = max(cfg["run.backend_timeout_s"], cfg["run.deadline_first_s"] + 60)
    if ranks.world_size == 1:
        return
    ranks.generation += 1
    if ranks.generation == 0:
        arrive(ranks, "join")
        refuse_together(ranks, "device", identity(device), unfit_devices)
    kind = backend(device)
    if kind == "gloo" and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        # DETAIL wraps each group, and DDP of torch 2.13 mistakes the wrapper for gloo itself: a segmentation fault.
        dist.set_debug_level(dist.DebugLevel.INFO)
    # One prefix per generation: otherwise it would read keys that an earlier one left in the store.
    store = dist.PrefixStore(f"generation{ranks.generation}", ranks.store)
    dist.init_process_group(kind, store=store, rank=ranks.rank, world_size=ranks.world_size,
                            timeout=datetime.timedelta(seconds=backend_timeout_s))
    ranks.cpu = dist.new_group(backend="gloo",
                               timeout=datetime.timedelta(seconds=3600 + 2 * cfg["run.deadline_first_s"]))


def identity(device):
    """What identifies a device: [node, name for a person, kind, index, UUID, visibility variables]."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if device.type == "cpu":
        return [node, "the CPU", "cpu", None, "", []]
    properties = torch.get_device_module(device).get_device_properties(device)
    visible = [os.environ.get(name, "") for name in VISIBLE]  # parts of one device may have the same UUID
    return [node, f"{device} ({properties.name})", device.type, device.index, str(getattr(properties, "uuid", "")),
            visible]


def unfit_devices(identities):
    """The error sentence for the first rank with another kind of device than most, or with the device of an earlier
    rank; else "". identities: of `identity`, by rank."""
    kinds = [kind for _, _, kind, *_ in identities]
    usual = max(kinds, key=kinds.count)
    if usual == "cpu":  # a rank falls back to the CPU if its device is gone
        usual = next((kind for kind in kinds if kind != "cpu"), "cpu")
    first = {}
    for rank, (node, name, kind, index, uuid, visible) in enumerate(identities):
        if kind != usual:
            return (f"rank {rank} on {node} has {name} and other ranks have {usual}: torch does not see the devices of "
                    f"{node}; look at that node or leave it out, or set run.device.")
        other = first.setdefault(json.dumps([node, index, uuid, visible]), rank)
        if other != rank and kind != "cpu":
            return (f"ranks {other} and {rank} share {name} of {node}: start one rank for each device "
                    "(--ntasks-per-node, RANKS), or bind one to each (--gpus-per-task=1).")
    return ""


def leave(ranks):
    """Leave the process groups. The caller must drop DDP first: destroying the group under it deadlocks."""
    if ranks.world_size > 1:
        gc.collect()
        dist.barrier(group=ranks.cpu)
        dist.destroy_process_group()


def refresh(ranks, device, cfg):
    """Replace the process groups within the same process, for drivers that leak memory with every collective."""
    watchdog.phase("refresh")
    leave(ranks)
    join(ranks, device, cfg)
