"""What the leak diagnostics share: do something twenty times, and say whether memory stays where it was."""
import argparse
import gc
import json
import re
import sys

import torch
from tqdm import tqdm

from Report.page import text_table
from Runtime.device import describe, pick_device, prepare_device, synchronize
from Runtime.errors import DONE, STOP, InputError, is_out_of_memory, parse_options
from Runtime.memory import WINDOW, find_leak, measure, not_seen, trim

GIB = 2 ** 30
ONE_TIME = 2 ** 20  # bytes; less than this is nothing
LEAKS = 1  # exit code
UNKNOWN = "no verdict"  # what a case has that shows no leak where one of the driver would not be seen
PLANTED = []  # what --plant leaks is never given back, or the next case would find its room free


def parse_arguments(description, argv=None):
    parser = argparse.ArgumentParser(description=description, epilog="Exit code: 0 nothing grows, 1 something grows "
                                     "with every iteration, 43 this cannot run or has no verdict.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or xpu (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0,
                        help="of sides and channels: 1 is production, 0.125 suits a CPU (%(default)s)")
    parser.add_argument("--iterations", type=int, default=WINDOW, help=f"of each case, at least {WINDOW} (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--plant", type=float, default=0, metavar="MIB",
                        help="keep so many MiB more with every iteration, to see that a leak is found")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of config_om.yaml, such as model.name; may be repeated")
    args = parse_options(parser, argv)
    if args.iterations < WINDOW:
        parser.error(f"--iterations {args.iterations}: a straight line wants at least {WINDOW}.")
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale}: it lies above 0 and up to 1.")
    return args


def scaled(number, scale, least, multiple=1):
    """A side or a number of channels, scaled, rounded to a multiple and not below the least."""
    return max(round(number * scale / multiple) * multiple, least)


def chosen(names, words):
    """Those names that have one of the words in them; all without words. Raises InputError where that leaves none."""
    found = [name for name in names
             if not words or any(re.search(rf"\b{re.escape(word)}\b", name, re.I) for word in words)]
    if not found:
        raise InputError(f"--only {' '.join(words)}: no case has that in its name; they are {', '.join(names)}.")
    return found


def judge(samples, device):
    """What a list of `measure`, the first from before the first iteration, says.

    Returns: gib_per_step (slope of what is taken over all iterations but the first), gib_reserved_per_step (of it what
    torch's allocator holds), gib_once (what the first iteration took), and verdict: "linear (who)", "one-time", "none",
    or UNKNOWN.
    """
    taken = taken_of(samples, device)
    reserved = [sample["device_reserved"] or 0 for sample in samples]
    steps = len(samples) - 2
    leak = find_leak(samples[1:], range(1, len(samples)))
    once = taken[1] - taken[0]
    verdict = "none"
    if leak:
        verdict = f"linear ({leak['who']})"
    elif not_seen(device, samples[0]):
        verdict = UNKNOWN
    elif max(once, taken[-1] - taken[0]) > ONE_TIME:
        verdict = "one-time"
    return {"gib_per_step": (taken[-1] - taken[1]) / steps / GIB,
            "gib_reserved_per_step": (reserved[-1] - reserved[1]) / steps / GIB, "gib_once": once / GIB,
            "verdict": verdict}


def taken_of(samples, device):
    """Bytes that each of a list of `measure` has taken: by this process, or from the device's free memory. If that is
    unknown, by torch's allocator."""
    if device.type == "cpu":
        return [sample["host_used"] for sample in samples]
    if not_seen(device, samples[0]):
        return [sample["device_reserved"] for sample in samples]
    return [-sample["device_free"] for sample in samples]


def in_use(device):
    """`measure`, once the C library has returned to the system what it keeps of freed memory.

    That changes from iteration to iteration, and for some dozens of them it may grow in a straight line: 2.8 MiB with
    each forward of a small network in emulated bfloat16, of which nothing was in use.
    """
    trim()
    return measure(device)


def watch(name, iteration, device, args, shown=True):
    """Do iteration() again and again, and judge what it leaves behind."""
    gc.collect()
    samples = [in_use(device)]
    for number in tqdm(range(args.iterations), name, leave=False, disable=not shown):
        try:
            iteration()
            if args.plant:
                PLANTED.append(torch.ones(int(args.plant * 2 ** 20), dtype=torch.uint8, device=device))
            synchronize(device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return exhausted(samples, number, device)
        samples.append(in_use(device))
    return judge(samples, device)


def exhausted(samples, number, device):
    """What to say of a case that ran out of memory in iteration `number`, from 0: too large, or a fast leak."""
    taken = taken_of(samples, device)
    steps = max(len(samples) - 2, 1)
    verdict = "out of memory: try a smaller --scale"
    if number > 1:
        verdict = f"linear, out of memory in iteration {number + 1}"
    return {"gib_per_step": (taken[-1] - taken[min(1, len(taken) - 1)]) / steps / GIB, "gib_reserved_per_step": 0.0,
            "gib_once": (taken[min(1, len(taken) - 1)] - taken[0]) / GIB, "verdict": verdict}


def start(args, local_rank=0):
    """The device, ready."""
    device = pick_device(args.device, local_rank)
    prepare_device(device, 0)
    return device


def tell(results, device, args):
    """Print a table and, last, one line of JSON. results: {case: of `judge`}. Returns the exit code."""
    print(f"{describe(device)}, torch {torch.__version__}, scale {args.scale:g}, {args.iterations} iterations each")
    rows = [[name, found["gib_per_step"], found["gib_reserved_per_step"], found["gib_once"], found["verdict"]]
            for name, found in results.items()]
    print(text_table(["case", "GiB a step", "of it reserved", "GiB at first", "verdict"], rows,
                     [None, "+.5f", "+.5f", "+.5f", None]))
    leaks = [name for name, found in results.items() if found["verdict"].startswith("linear")]
    unknown = [name for name, found in results.items() if found["verdict"] == UNKNOWN]
    print(f"what grows with every iteration: {', '.join(leaks) or ('unknown' if unknown else 'nothing')}")
    print(json.dumps({name: {key: value if key == "verdict" else round(value, 6) for key, value in found.items()}
                      for name, found in results.items()}))
    too_large = any(found["verdict"].startswith("out of memory") for found in results.values())
    if unknown:
        print(f"{not_seen(device, {'device_free': None})}: no verdict on {', '.join(unknown)}.", file=sys.stderr)
    return LEAKS if leaks else STOP if too_large or unknown else DONE
