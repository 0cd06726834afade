"""Memory: empty caches, find leaks, and predict when memory runs out."""
import collections
import contextlib
import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from Runtime import watchdog
from Runtime.errors import keep_freed_memory

XPU_SHARE = 0.7
SHORT = 0.5  # once less than this fraction of the used host memory is free, malloc stops keeping freed memory
TOLD_AGAIN = 1000  # steps after which a leak that continues is logged again, for the report
WINDOW = 20  # samples needed to judge
EARLY = 6  # samples needed if memory would run out too soon to wait for WINDOW of them
# A leak is a straight line through the samples that rises
LEAST_SLOPE = 2 ** 20  # by at least this many bytes per step,
LEAST_GROWTH = 12  # over the window by this many standard deviations from the line (a single jump reaches 6),
LEAST_HALF_SLOPE = 0.7  # and in each half by this fraction of the slope (0 beside a jump, low when growth ends)


def empty_cache(cfg, device):
    """Collect garbage and return cached blocks to the driver, if run.empty_cache is set. Called between modes."""
    if cfg["run.empty_cache"]:
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def trim():
    """Return to the system the freed memory that glibc keeps; no effect with another C library."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def peak_bytes(device):
    """Most bytes in use so far: of the device by torch, or on a CPU by the process."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    import resource  # not there on Windows, where the tools run too
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def new_watch(device, limit_gb):
    """State of `watch`: the last samples, and the current leak or None.

    device: torch.device. limit_gb: GiB that host_used may reach, 0 = no limit.
    """
    return {"device": device, "limit": int(limit_gb * 2 ** 30), "samples": collections.deque(maxlen=3 * WINDOW),
            "steps": collections.deque(maxlen=3 * WINDOW), "count": 0, "leak": None, "told": 0}


def watch(state, step):
    """Measure memory after a step, and log a leak when it begins and every TOLD_AGAIN steps of it.

    state: of `new_watch`; step: of the run. Returns: whether memory runs out soon.
    """
    state["count"] += 1
    sample = measure(state["device"], state["limit"])
    if state["count"] == 1 and (sentence := not_seen(state["device"], sample)):
        watchdog.event("leaks not seen", what=sentence)
        if watchdog.STATE.get("rank", 0) == 0:
            print(f"{sentence}.", file=sys.stderr, flush=True)
    if sample["host_free"] is not None and sample["host_free"] < SHORT * sample["host_used"]:
        keep_freed_memory(False)
        trim()
    if state["count"] > 2:  # the jump of the first steps would hide a small leak
        state["samples"].append(sample)
        state["steps"].append(step)
        leak = find_leak(state["samples"], state["steps"])
        if leak and (not state["leak"] or step >= state["told"] + TOLD_AGAIN):
            watchdog.event("leak", **leak)
            state["told"] = step
            if not state["leak"]:
                print(f"{leak['sentence']}.", file=sys.stderr, flush=True)
        state["leak"] = leak
    return runs_out_soon(state["leak"])


def measure(device, limit_bytes=0):
    """Used and free memory: a dict of bytes, None where unknown. Takes well under 1 ms without children.

    device: torch.device. limit_bytes: the most that host_used may reach, 0 = no limit.
    host_used: anonymous memory of this process and all its descendants (loader workers), and the shared memory that
    this process maps. Mapped files are left out, since the kernel can drop them; so is memory that workers share, which
    would count twice. Linux only.
    host_free: the least that the machine, the control groups of this process and limit_bytes leave. Linux only.
    device_free: free on the whole device, for all its processes. device_reserved: held by torch's allocator;
    device_allocated: the part of it that tensors use. device_unreserved: what the allocator has left of the device,
    given only where the driver does not report what is free.
    """
    used = host_free = device_free = unreserved = reserved = allocated = None
    if sys.platform == "linux":
        used = _host_used()
        available = _number("MemAvailable", "/proc/meminfo") or _number("MemFree", "/proc/meminfo")  # WSL 1: MemFree
        room = [1024 * available, *_room_in_groups()] if available else _room_in_groups()
        if limit_bytes > 0:
            room.append(limit_bytes - used)
        host_free = min(room, default=None)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        reserved, allocated = module.memory_reserved(device), module.memory_allocated(device)
        total = module.get_device_properties(device).total_memory
        # Observed: torch's allocator and an Intel driver got at most 44.8 of 64 GiB together.
        out_of_reach = int((1 - XPU_SHARE) * total) if device.type == "xpu" else 0
        try:
            device_free = module.mem_get_info(device)[0] - out_of_reach
        except RuntimeError:  # Intel drivers report it only with ZES_ENABLE_SYSMAN=1
            unreserved = total - reserved - out_of_reach
    return {"host_used": used, "host_free": host_free, "device_free": device_free, "device_unreserved": unreserved,
            "device_reserved": reserved, "device_allocated": allocated}


def not_seen(device, sample):
    """Which leaks `find_leak` cannot see in samples of `measure` like this one, and what to do; "" if it sees all."""
    if device.type == "cpu" or sample["device_free"] is not None:
        return ""
    advice = "; set ZES_ENABLE_SYSMAN=1 before the start" if device.type == "xpu" else ""
    return f"this driver does not report free memory, so leaks of the driver are not seen{advice}"


def find_leak(samples, steps):
    """The leak that exhausts its memory first, or None.

    samples: dicts of `measure`, oldest first; fewer than WINDOW give None unless memory runs out first, see EARLY; more
    find leaks in rarer or noisier blocks.
    steps: their step numbers, rising.
    Returns: {"bytes_per_step", "steps_left" (by the fall of free memory, or by the leak itself if that is faster),
    "sentence", "place" ("host" or "device"), "who"}. who: "graph" (tensors in use), "driver or communication" (the
    rest of the device), "loader or Python objects" (this process and its children) or "host, outside this run" (other
    processes, or pages that forked workers copy; returned only if memory runs out soon).
    """
    if len(samples) < EARLY:
        return None
    keys = ("host_used", "host_free", "device_free", "device_unreserved", "device_reserved", "device_allocated")
    host_used, host_free, device_free, unreserved, reserved, allocated = (
        np.array([sample.get(key) for sample in samples], float) for key in keys)
    steps = np.array(steps, float) - steps[-1]
    # The allocator returns unused memory before memory runs out, so only memory in use reveals a growing graph.
    left = np.where(np.isnan(device_free), unreserved, device_free)
    graph = _leak("graph", "device", allocated, left + reserved - allocated, steps)
    driver = _leak("driver or communication", "device", -reserved - device_free, device_free, steps)
    device = max(filter(None, (graph, driver)), key=lambda leak: leak["bytes_per_step"], default=None)
    host = _leak("loader or Python objects", "host", host_used, host_free, steps)
    outside = _leak("host, outside this run", "host", -host_used - host_free, host_free, steps)
    host = host or (outside if runs_out_soon(outside) else None)
    first = min(filter(None, (device, host)), key=lambda leak: leak["steps_left"], default=None)
    enough = len(samples) >= WINDOW or first and first["steps_left"] < WINDOW + EARLY - len(samples)
    return first if enough else None


def runs_out_soon(leak):
    """Whether a result of `find_leak` leaves fewer than two windows of steps: then save and restart."""
    return leak is not None and leak["steps_left"] < 2 * WINDOW


def _leak(who, place, used, free, steps):
    """The leak dict of `find_leak` if `used` rises in a straight line, else None.

    used, free: bytes at each of `steps`. Values that were not measured are NaN, which fails the comparisons.
    """
    rate, start = np.polyfit(steps, used, 1)
    growth = rate * (steps[-1] - steps[0])
    scatter = np.std(used - np.polyval((rate, start), steps))
    halves = [np.polyfit(*half, 1)[0] for half in zip(np.array_split(steps, 2), np.array_split(used, 2))]
    if not (rate >= LEAST_SLOPE and growth >= LEAST_GROWTH * scatter and min(halves) >= LEAST_HALF_SLOPE * rate):
        return None
    fall = -np.polyfit(steps, free, 1)[0]
    left = max(0, round(free[-1] / max(rate, fall)))
    sentence = f"{place} memory grows by {rate / 2 ** 20:.1f} MiB a step ({who}) and runs out in about {left} steps"
    return {"who": who, "place": place, "bytes_per_step": float(rate), "steps_left": left, "sentence": sentence}


def _host_used():
    """Bytes of `measure`'s host_used."""
    pids = [os.getpid()]
    used_kib = _number("RssShmem", "/proc/self/status")
    for pid in pids:  # the list grows in the loop, by the children of each process
        used_kib += _number("RssAnon", f"/proc/{pid}/status")
        pids += children(pid)
    return 1024 * used_kib


def children(pid):
    """PIDs of the children of a process; not an error if it has ended or ends meanwhile."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def _room_in_groups(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """Bytes that each control group of this process still allows, v1 or v2.

    Cached files count as used in a group, but the kernel can drop them, so they count as free here.
    """
    room = []
    for v1, path in re.findall(r"^\d+:([^:]*\bmemory\b[^:]*|):/(.*)$", _read(membership), re.M):
        limit, usage, total = ("limit_in_bytes", "usage_in_bytes", "total_") if v1 else ("max", "current", "")
        folder = Path(root, "memory" if v1 else "", path)
        for group in (folder, *folder.parents):  # those above `root` have no such files
            allowed = _number("", group / f"memory.{limit}")
            if 0 < allowed < 2 ** 60:  # larger values mean no limit
                cached = re.findall(rf"^{total}(?:in)?active_file (\d+)", _read(group / "memory.stat"), re.M)
                room.append(allowed - _number("", group / f"memory.{usage}") + sum(map(int, cached)))
    return room


def _number(name, path):
    """The number after `name` at the beginning of a line of a file; 0 if there is none."""
    return int((re.findall(rf"^{name}:?\s*(\d+)", _read(path), re.M) or [0])[0])


def _read(path):
    """The file's text; "" if the process has ended or this kernel has no such file."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
