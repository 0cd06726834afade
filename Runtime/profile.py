"""`--profile START:STEPS`: torch.profiler's trace of some steps, and the operations that took most of the time.

Rank 0 writes `<run>/profile/step<START>.trace.json.gz`, which https://ui.perfetto.dev and chrome://tracing open, and
`<run>/profile/step<START>.json`, which the report of the run shows. Steps are counted from the beginning of the run.
"""
import json
import math
import re
import sys

import torch

from Runtime import watchdog
from Runtime.device import synchronize
from Runtime.errors import InputError
from Runtime.files import write_file

MOST_STEPS, TOP = 100, 25


def parse_steps(text):
    """(first step, number of steps) of "START:STEPS". Raises InputError for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[2]) <= MOST_STEPS:
        raise InputError(f"--profile {text}: write START:STEPS, such as 100:5 for five steps from step 100, and at "
                         f"most {MOST_STEPS} steps, since each adds megabytes to the trace.")
    return int(match[1]), int(match[2])


def new_profile(text, step, rank, run, device):
    """The state for `profile_step`; None without --profile, or if the launch starts after the first of those steps.

    text: value of --profile or None. step: first step of this launch. run: Path of the run folder.
    """
    if not text:
        return None
    first, count = parse_steps(text)
    if step > first:
        if rank == 0:
            print(f"--profile {text}: this launch begins with step {step}, so nothing is profiled", file=sys.stderr)
        return None
    return {"first": first, "last": first + count - 1, "rank": rank, "run": run, "device": device,
            "running": None, "done": False}


def profile_step(profile, step):
    """Begin or end the profile, if it is due. Every rank calls this before each step and at the end of a launch.

    step: the number of the next step. Only rank 0 profiles; the others enter the same phases, since ranks are compared
    by the number of phases they have entered. Returns: whether a profile has just ended.
    """
    if profile is None or profile["done"]:
        return False
    if step == math.inf and profile["running"] is not None:
        profile["last"] = min(profile["last"], profile["seen"])
    profile["seen"] = step
    if profile["running"] is None and profile["first"] <= step <= profile["last"]:
        profile["running"] = "elsewhere"
        if profile["rank"] == 0:
            kinds = {"CPU", profile["device"].type.upper()} & {"CPU", "CUDA", "XPU"}
            profile["running"] = torch.profiler.profile(
                activities=[getattr(torch.profiler.ProfilerActivity, kind) for kind in sorted(kinds)])
            profile["running"].start()
    elif profile["running"] is None and step == math.inf and profile["rank"] == 0:
        print(f"--profile: this launch ended before step {profile['first']}, so nothing was profiled", file=sys.stderr)
    elif profile["running"] is not None and step > profile["last"]:
        watchdog.phase("profile")
        if profile["rank"] == 0:
            write_profile(profile)
        profile.update(running=None, done=True)
        watchdog.phase("between steps")
        return True
    return False


def write_profile(profile):
    """Stop the profiler and write its trace, and a table of the operations with the most self time, on the device if
    it has any. If the disk refuses them, training continues."""
    profiler, folder = profile["running"], profile["run"] / "profile"
    synchronize(profile["device"])
    profiler.stop()
    rows = profiler.key_averages()
    own = {row.key: row.self_device_time_total or 0.0 for row in rows}
    if not any(own.values()):
        own = {row.key: row.self_cpu_time_total for row in rows}
    total = max(sum(own.values()), 1e-9)
    calls = {row.key: row.count for row in rows}
    top = [{"name": key, "calls": calls[key], "ms": own[key] / 1e3, "share": 100 * own[key] / total}
           for key in sorted(own, key=own.get, reverse=True)[:TOP]]
    name = f"step{profile['first']:08d}"
    table = {"first": profile["first"], "last": profile["last"], "rank": 0, "trace": f"{name}.trace.json.gz",
             "top": top}
    try:
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / table["trace"]))
        write_file(folder / f"{name}.json", json.dumps(table, indent=1) + "\n")
    except (OSError, RuntimeError) as error:  # torch writes the trace and has its own errors
        print(f"{folder}: the profile was not written ({error}); training continues", file=sys.stderr)
