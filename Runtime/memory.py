"""Memory: cache hygiene; who leaks, and when memory runs out."""
import collections
import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from Runtime import watchdog

WINDOW = 20  # samples before anything is said
LEAST_LEAK = 2 ** 20  # bytes per step
LEAST_GROWTH = 12  # of the line over the window, in standard deviations from it; a single jump reaches 6
LEAST_SHARE = 0.7  # of the slope, in each half of the window: 0 beside a jump, less where growth levels off


def empty_cache(cfg, device):
    """Between modes, where run.empty_cache asks for it: collect garbage and return cached blocks to the driver."""
    if cfg["run.empty_cache"]:
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def new_watch(device, limit_gb):
    """What `watch` remembers: the last samples, and the leak found if any. limit_gb: GiB of host_used, 0 = no limit."""
    return {"device": device, "limit": int(limit_gb * 2 ** 30), "samples": collections.deque(maxlen=3 * WINDOW),
            "steps": collections.deque(maxlen=3 * WINDOW), "count": 0, "leak": None}


def watch(state, step):
    """Measure once a step and log a leak when it shows. Returns whether memory runs out soon."""
    state["count"] += 1
    if state["count"] > 2:  # the jump of the first steps would hide a small leak
        state["samples"].append(measure(state["device"], state["limit"]))
        state["steps"].append(step)
        before, state["leak"] = state["leak"], find_leak(state["samples"], state["steps"])
        if state["leak"] and not before:
            watchdog.event("leak", **state["leak"])
            print(f"{state['leak']['sentence']}.", file=sys.stderr, flush=True)
    return runs_out_soon(state["leak"])


def measure(device, limit_bytes=0):
    """What is used and what is left now: a dict of bytes, None where nobody can tell. Well below 1 ms without children.

    device: torch.device. limit_bytes: what host_used may reach at most, 0 = no such limit.
    host_used: anonymous memory of this process and all it started (loader workers), and the shared memory that it maps
    itself. Mapped files give way and are left out; so is what workers share, which would count twice. Linux only.
    host_free: the least of what the machine, the control groups above this process and limit_bytes leave. Linux only.
    device_free: of the whole device, for all its processes. device_reserved: held by torch's allocator.
    """
    used = host_free = device_free = reserved = None
    if sys.platform == "linux":
        used = _host_used()
        room = [1024 * _number("MemAvailable", "/proc/meminfo"), *_room_in_groups()]
        host_free = min(room + [limit_bytes - used] * (limit_bytes > 0))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        reserved = module.memory_reserved(device)
        try:
            device_free = module.mem_get_info(device)[0]
        except RuntimeError:  # some Intel drivers do not tell
            device_free = module.get_device_properties(device).total_memory - reserved
    return {"host_used": used, "host_free": host_free, "device_free": device_free, "device_reserved": reserved}


def find_leak(samples, steps):
    """Who takes more memory with every step, and when it runs out; None where nobody does.

    samples: dicts of `measure`, oldest first; below WINDOW nothing is said, more show leaks in rarer or noisier blocks.
    steps: their numbers, rising. Returns, for what runs out first, a dict: bytes_per_step, steps_left (by the fall of
    free memory, or by the leak itself if faster), sentence, and who: "graph" (torch's allocator), "driver or
    communication" (the rest of the device), "loader or Python objects" (this process and its children) or "host,
    outside this run" (others, or pages that forked workers copy; said only if it runs out soon).
    """
    if len(samples) < WINDOW:
        return None
    host_used, host_free, device_free, reserved = (np.array([sample[key] for sample in samples], float) for key in (
        "host_used", "host_free", "device_free", "device_reserved"))
    steps = np.array(steps, float) - steps[-1]
    graph = _leak("graph", "device", reserved, device_free, steps)
    driver = _leak("driver or communication", "device", -reserved - device_free, device_free, steps)
    device = max(filter(None, (graph, driver)), key=lambda leak: leak["bytes_per_step"], default=None)
    host = _leak("loader or Python objects", "host", host_used, host_free, steps)
    outside = _leak("host, outside this run", "host", -host_used - host_free, host_free, steps)
    host = host or (outside if runs_out_soon(outside) else None)
    return min(filter(None, (device, host)), key=lambda leak: leak["steps_left"], default=None)


def runs_out_soon(leak):
    """Whether a result of `find_leak` leaves less than two windows: time to save and start again."""
    return leak is not None and leak["steps_left"] < 2 * WINDOW


def _leak(who, place, used, free, steps):
    """A leak if `used` is a straight line up; NaN, where nothing was measured, fails the comparisons."""
    rate, start = np.polyfit(steps, used, 1)
    grown, scatter = rate * (steps[-1] - steps[0]), np.std(used - np.polyval((rate, start), steps))
    halves = [np.polyfit(*half, 1)[0] for half in zip(np.array_split(steps, 2), np.array_split(used, 2))]
    if not (rate >= LEAST_LEAK and grown >= LEAST_GROWTH * scatter and min(halves) >= LEAST_SHARE * rate):
        return None
    left = max(0, round(free[-1] / max(rate, -np.polyfit(steps, free, 1)[0])))
    sentence = f"{place} memory grows by {rate / 2 ** 20:.1f} MiB a step ({who}) and runs out in about {left} steps"
    return {"who": who, "bytes_per_step": float(rate), "steps_left": left, "sentence": sentence}


def _host_used():
    pids = [os.getpid()]
    used = _number("RssShmem", "/proc/self/status")
    for pid in pids:  # grows on the way, by the children of each
        used += _number("RssAnon", f"/proc/{pid}/status")
        pids += " ".join(map(_read, Path(f"/proc/{pid}/task").glob("*/children"))).split()
    return 1024 * used


def _room_in_groups(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """What each control group, v1 or v2, above this process still allows; cached files count as used but give way."""
    room = []
    for v1, path in re.findall(r"^\d+:([^:]*\bmemory\b[^:]*|):/(.*)$", _read(membership), re.M):
        limit, usage, total = ("limit_in_bytes", "usage_in_bytes", "total_") if v1 else ("max", "current", "")
        folder = Path(root, "memory" if v1 else "", path)
        for group in (folder, *folder.parents):  # those above `root` have no such files
            if 0 < (allowed := _number("", group / f"memory.{limit}")) < 2 ** 60:
                cached = re.findall(rf"^{total}(?:in)?active_file (\d+)", _read(group / "memory.stat"), re.M)
                room.append(allowed - _number("", group / f"memory.{usage}") + sum(map(int, cached)))
    return room


def _number(name, path):
    return int((re.findall(rf"^{name}:?\s*(\d+)", _read(path), re.M) or [0])[0])


def _read(path):
    """The file's text, empty where a process has gone or this kernel has no such file."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
