"""The first day on a device: everything to know about it, in ten minutes and one command.

    python tests/bench/first_day.py [--device auto] [--out Logs/first_day.json] [--section NAME ...]
    python tests/bench/first_day.py --device cpu --rehearse           the same on small volumes

Each section runs in a process of its own, so that a crash, a hang or running out of memory costs that section only.
After each section its figures are printed as a JSON object, and the file of --out is rewritten with all sections so
far. A section says in a sentence what it cannot measure on this device. Sizes are those of config_om.yaml, 128^3, times
--scale; below 1 its network is narrower too, down to a quarter of the channels.
"""
import argparse
import contextlib
import cProfile
import functools
import importlib
import json
import math
import os
import platform
import pstats
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT
from scipy import ndimage

import OM_train_3modes as om
from Dataloader.dataset import epoch_batches
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject, write_dataset
from Diffusion import device_ops
from Diffusion.cost import mode_costs, step_memory
from Diffusion.diffuser import draw_velocity, middle
from Diffusion.fake_device import DeviceAutocast
from Diffusion.fields import integrate_velocity, resize_field, warp
from Diffusion.losses import recovery_terms, regularity
from Diffusion.om_net import CorrelationLayer
from Inference.registration import register
from Runtime.config import load_config
from Runtime.device import computes_bf16, describe, pick_device, precision, prepare_device, synchronize
from Runtime.errors import InputError
from Runtime.files import write_file
from Runtime.global_batch import split_step
from Runtime.run_lock import run_folder
from tests.plain_step import mslncc
from tests.tiny import begin

GIB = 2 ** 30
SIDE = 128
LEAST_CUDNN = 91500  # below, bf16 convolutions in 3D were wrong or bypassed on some devices
SECTION_S = 240  # after so long a section is ended: one that hangs must not take the day
NO_DEVICE = "not on a CPU: "
RANGE = "part: "  # before the names of the parts of the network in a profile


# ---------------------------------------------------------------------------------------------------------------------
# Means
# ---------------------------------------------------------------------------------------------------------------------

def side_of(args):
    """Voxels a side: a multiple of 16, by which the network's levels divide."""
    return max(round(SIDE * args.scale / 16), 1) * 16


def configuration(args, folder, name="config_om", **changes):
    """A shipped config on synthetic volumes, mode 3 in every step."""
    side = side_of(args)
    words = {"data.root": args.data, "data.img_size": side, "data.cache": "", "data.train_ids": "0-7",
             "data.val_ids": "", "data.val_fraction": 0, "data.expect_samples": 0, "data.in_memory": True,
             "registration.gate": 2, "data.repeats": 1000, "run.models": f"{folder}/Models",
             "run.logs": f"{folder}/Logs", "run.device": args.device}
    if args.scale < 1 and name == "config_om":
        narrower = max(args.scale, 0.25)
        words.update({"model.channels": [int(narrower * width) for width in (16, 32, 64, 128, 256)],
                      "model.attention_width": 16 * int(64 * narrower)})
    words.update({key.replace("__", "."): value for key, value in changes.items()})
    words["diffusion.grids"] = [grid for grid in (8, 16, 32, 64) if grid <= words["data.img_size"]]
    cfg = load_config(ROOT / f"Config/{name}.yaml", [f"{key}={value}" for key, value in words.items()])
    cfg["run.amp"] = precision(cfg["run.amp"], args.where)
    return cfg


def new_state(cfg, device):
    """What om.train_step needs, and the batches of its steps."""
    state = begin({**cfg, "run.device": str(device)}, Path(cfg["run.models"]))
    batches = iter(epoch_batches(cfg, state.dataset, state.listed, state.progress, state.split, state.ranks,
                                 draw=state.ddpm.draw))
    return state, batches


def steps(state, batches, cfg, count):
    """Seconds of each of so many steps, data included, as a training makes them."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        om.train_step(state, *next(batches))
        om.advance(state.progress, state.split)
        synchronize(state.device)
        seconds.append(time.perf_counter() - began)
    return seconds


def on_device(profile):
    """Rows of a profile that are kernels and copies of the device, those that take longest first."""
    rows = [row for row in profile.key_averages() if "cuda" in str(row.device_type).lower()
            and row.self_device_time_total and not row.key.startswith(RANGE)]
    return sorted(rows, key=lambda row: row.self_device_time_total, reverse=True)


def busy(function, device):
    """Milliseconds for which a CUDA device works on a function, and how many kernels and copies that are."""
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        synchronize(device)
    rows = on_device(profile)
    return {"busy_ms": sum(row.self_device_time_total for row in rows) / 1e3,
            "launches": sum(row.count for row in rows)}


def timed(function, device, repeats=5):
    """Median seconds of a function, after two calls that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def peak_bytes(device):
    """(allocated, reserved) at their highest; None on a CPU."""
    if device.type == "cpu":
        return None, None
    module = torch.get_device_module(device)
    return module.max_memory_allocated(device), module.max_memory_reserved(device)


def forget_peak(device):
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats(device)


@contextlib.contextmanager
def parts_of_a_step(device):
    """Seconds by phase and mode, with the device at rest at each border. Yields {"phase mode": [seconds]}."""
    spent, last, real = {}, [None, 0.0], om.watchdog.phase

    def phase(name, mode=""):
        synchronize(device)
        now = time.perf_counter()
        if last[0]:
            spent.setdefault(last[0], []).append(now - last[1])
        last[:] = [f"{name} {mode}".strip(), now]
        real(name, mode)
    om.watchdog.phase = phase
    try:
        yield spent
    finally:
        om.watchdog.phase = real


# ---------------------------------------------------------------------------------------------------------------------
# Sections: each a function of the arguments and a folder of its own, that returns its figures
# ---------------------------------------------------------------------------------------------------------------------

def versions(args, folder):
    """What this is. Stops the day where cuDNN is known to be wrong."""
    device = args.where
    found = {"torch": torch.__version__, "python": platform.python_version(), "device": describe(device),
             "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability(),
             "bf16": computes_bf16(device), "cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type == "cuda":
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["cudnn"] = torch.backends.cudnn.version()
        if torch.version.hip is None and (found["cudnn"] or 0) < LEAST_CUDNN:
            raise InputError(f"cuDNN {found['cudnn']} computes bf16 convolutions in 3D wrongly or slowly: install a "
                             f"torch with cuDNN {LEAST_CUDNN // 10000}.{LEAST_CUDNN // 100 % 100} or newer.")
    return found


def peaks(args, folder):
    """How fast the device is at best: products, copies, a convolution."""
    device, found = args.where, {}
    n = max(int(8192 * args.scale), 256)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(n, n, device=device, dtype=dtype)
        found[f"matmul_{str(dtype)[6:]}_tflops"] = 2 * n ** 3 / timed(lambda a=a: a @ a, device) / 1e12
    source = torch.empty(int(GIB * args.scale), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy_gb_s"] = 2 * len(source) / timed(lambda: target.copy_(source), device) / 1e9
    side = side_of(args)
    for channels in (16, 32, 64):
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            x = torch.randn(1, channels, side, side, side, device=device, dtype=torch.bfloat16)
            x = x.contiguous(memory_format=layout).requires_grad_()
            layer = torch.nn.Conv3d(channels, channels, 3, padding=1, device=device, dtype=torch.bfloat16)
            layer = layer.to(memory_format=layout)
            y = layer(x)
            gradient = torch.ones_like(y)
            forward = timed(lambda layer=layer, x=x: layer(x), device)
            both = timed(lambda layer=layer, x=x, gradient=gradient: layer(x).backward(gradient), device)
            flops = 2 * channels ** 2 * 27 * side ** 3
            name = f"conv3d_{channels}_{'last' if layout is torch.channels_last_3d else 'first'}"
            found[name] = {"forward_ms": 1e3 * forward, "both_ms": 1e3 * both, "tflops": 3 * flops / both / 1e12}
    return found


def tests(args, folder):
    """The tests that need an accelerator."""
    if args.where.type == "cpu":
        return {"left_out": NO_DEVICE + "these tests need an accelerator."}
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    summary = (ended.stdout.strip().splitlines() or [ended.stderr[-300:]])[-1]
    return {"exit_code": ended.returncode, "summary": summary, "failed": failed,
            **({"error": summary} if ended.returncode else {})}


def losses_and_gradients(cfg, device):
    """{mode: (loss, gradient)} of one network and batch, the same on every device."""
    torch.manual_seed(0)
    net = om.build_network({**cfg, "run.channels_last": False}, "cpu")
    with torch.no_grad():
        for parameter in net.parameters():  # heads start at zero, and would hide what is behind them
            if not parameter.any():
                parameter.normal_(std=0.02)
    net = net.to(device)
    rng_keys = [(0, 0, 0), (0, 0, 1)]
    volumes = torch.rand(2, 1, *cfg["data.img_size"]).to(device)
    batch = {**om.deform_batch(volumes, rng_keys, om.DeformDDPM(cfg), cfg),
             "queue": om.embeddings.new_queue(cfg, device),
             "subjects": torch.arange(2, device=device), "targets": None, "moving": volumes[:1], "fixed": volumes[1:]}
    for name in ("images", "conditions"):
        values = torch.randn(batch["queue"][name].shape, generator=torch.Generator().manual_seed(1))
        batch["queue"][name].copy_(F.normalize(values, dim=1))
    batch["queue"]["subjects"].copy_(torch.arange(len(batch["queue"]["subjects"])) + 100)
    found = {}
    for name, mode in om.MODES.items():
        net.zero_grad(set_to_none=True)
        loss = mode.step(net, batch, cfg)[0]
        loss.backward()
        gradient = torch.cat([p.grad.flatten().cpu().double() for p in net.parameters() if p.grad is not None])
        found[name] = loss.item(), gradient
    return found


def agreement(args, folder):
    """Each mode's loss and gradient beside those of the CPU in float32: the recipe of the small configs at 32^3."""
    wanted, found = None, {}
    for where, amp in (("cpu", "off"), (args.device, "off"), (args.device, "bf16")):
        device = torch.device("cpu") if where == "cpu" else args.where
        cfg = configuration(args, folder, "config_hippocampus", data__img_size=32, run__amp=amp)
        cfg["run.amp"] = amp
        ours = losses_and_gradients(cfg, device)
        if wanted is None:
            wanted = ours
            continue
        for name, (loss, gradient) in ours.items():
            base_loss, base = wanted[name]
            found[f"{name} {'float32' if amp == 'off' else amp}"] = {
                "loss_relative": abs(loss - base_loss) / abs(base_loss),
                "gradient_relative": ((gradient - base).norm() / base.norm()).item(),
                "gradient_cosine": F.cosine_similarity(gradient, base, dim=0).item()}
    return found


def step(args, folder):
    """config_om.yaml, 5 and 20 steps: seconds of a step, of each mode and part, memory beside what was counted."""
    cfg, device = configuration(args, folder), args.where
    forget_peak(device)
    state, batches = new_state(cfg, device)
    first = steps(state, batches, cfg, 5)
    seconds = steps(state, batches, cfg, 20)
    allocated, reserved = peak_bytes(device)
    with parts_of_a_step(device) as spent:
        steps(state, batches, cfg, 6)
    rules = None if device.type == "cpu" else DeviceAutocast()
    net, costs = mode_costs(cfg, split_step(cfg, 1).pair_batch, om.MODES, rules)
    flops = sum(cost["flops"] for cost in costs.values())
    median = statistics.median(seconds)
    return {"batch": cfg["data.batchsize"], "precision": cfg["run.amp"], "first_steps_s": first, "step_s": median,
            "slowest_s": max(seconds), "tflops_s": flops / median / 1e12, "counted_bytes": step_memory(costs, net, cfg),
            "allocated_bytes": allocated, "reserved_bytes": reserved,
            "parts_ms": {name: 1e3 * statistics.median(values[1:] or values) for name, values in spent.items()}}


def syncs(args, folder):
    """How often a step waits for the device, and on which lines: on CUDA as torch warns, else on the simulated one."""
    if args.where.type != "cuda":
        command = [sys.executable, "-m", "tests.simulated_device"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECTION_S)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
        return {"by": "the simulated device", **json.loads(ended.stdout.splitlines()[-1])}
    line_of_repository = importlib.import_module("tests.simulated_device").line_of_repository
    return {"by": "torch.cuda.set_sync_debug_mode", "wrong_device": 0,
            **{way: waits(args, folder, graphs_key, line_of_repository)
               for way, graphs_key in (("plain", "off"), ("graphs", "auto"))}}


def waits(args, folder, graphs_key, line_of_repository):
    """The waits of a step by line. graphs_key: value of run.graphs."""
    cfg, counted, lines = configuration(args, folder, run__graphs=graphs_key), 4, {}
    state, batches = new_state(cfg, args.where)
    steps(state, batches, cfg, 4)

    def note(message, category, filename, lineno, file=None, line=None):
        if "synchronizing" in str(message):
            where = line_of_repository(__file__)
            lines[where] = lines.get(where, 0) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(counted):
                om.train_step(state, *next(batches))
                om.advance(state.progress, state.split)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"lines": {line: n / counted for line, n in lines.items()}, "host_syncs": sum(lines.values()) / counted}


def named_parts(net):
    """{module: name} of the parts of a network whose time is told apart."""
    parts = {}
    for name, module in net.named_children():
        children = dict(module.named_children())
        listed = isinstance(module, torch.nn.ModuleList)
        for child, part in children.items() if listed or name == "encoder" else [("", module)]:
            if isinstance(part, torch.nn.ModuleList):
                parts.update({each: f"{name}.{child}.{place}" for place, each in enumerate(part)})
            else:
                parts[part] = f"{name}.{child}".strip(".")
    return parts


@contextlib.contextmanager
def ranges(net):
    """Within this context a profile shows the parts of a network, its functions and the losses as ranges."""
    open_ranges, undo = [], []

    def enter(name):
        open_ranges.append(torch.profiler.record_function(RANGE + name))
        open_ranges[-1].__enter__()

    def leave(*_):
        open_ranges.pop().__exit__(None, None, None)
    for module, name in named_parts(net).items():
        undo += [module.register_forward_pre_hook(lambda *_, name=name: enter(name)).remove,
                 module.register_forward_hook(leave).remove]

    def as_range(name, plain):
        def within(*given, **more):
            with torch.profiler.record_function(RANGE + name):
                return plain(*given, **more)
        return within
    for place, name in ((type(net), "align"), (om.losses, "recovery_terms"), (om.losses, "regularity"),
                        (om.losses, "image_similarity"), (om, "warp"), (om, "deform_batch"), (om, "get_total_norm"),
                        (om.optim, "update_ema")):
        undo.append(functools.partial(setattr, place, name, getattr(place, name)))
        setattr(place, name, as_range(name, getattr(place, name)))
    try:
        yield
    finally:
        for function in undo:
            function()


def parts_ms(profile):
    """{part: [ms in forward passes, ms in backward passes]} of a profile within `ranges`.

    A kernel belongs to the innermost range around the operation that launched it. In a backward pass that is the range
    of the forward operation with the same number; what is computed again there has a range of its own.
    """
    found, forward_parts = {}, {}

    def part_of(event):
        backward = None
        while event is not None:
            if event.name.startswith(RANGE):
                return event.name[len(RANGE):]
            if event.name.startswith("autograd::engine::evaluate_function"):
                backward = event.sequence_nr
            event = event.cpu_parent
        return backward
    events = [event for event in profile.events() if "cpu" in str(event.device_type).lower()]
    for event in events:
        part = part_of(event)
        if isinstance(part, str) and event.sequence_nr >= 0:
            forward_parts[event.sequence_nr] = part
    for event in events:
        took = sum(kernel.duration for kernel in event.kernels) / 1e3
        if took:
            part = part_of(event)
            behind = not isinstance(part, str)
            name = forward_parts.get(part, "other") if behind else part
            found.setdefault(name, [0.0, 0.0])[behind] += took
    return dict(sorted(found.items(), key=lambda item: -sum(item[1])))


def kernels(args, folder):
    """What the time of a plain step goes to, by kernel and by part of the network, and how long the device is idle."""
    cfg, device, counted = configuration(args, folder, run__graphs="off"), args.where, 2
    state, batches = new_state(cfg, device)
    steps(state, batches, cfg, 3)
    if device.type == "cpu":
        with torch.profiler.profile() as profile:
            seconds = sum(steps(state, batches, cfg, counted))
        rows = sorted(profile.key_averages(), key=lambda row: row.self_cpu_time_total, reverse=True)
        top = [{"name": row.key[:100], "ms": row.self_cpu_time_total / counted / 1e3, "calls": row.count / counted}
               for row in rows[:25]]
        return {"step_s": seconds / counted, "top": top}
    seconds = statistics.median(steps(state, batches, cfg, 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps(state, batches, cfg, counted)
    rows = on_device(profile)
    total = sum(row.self_device_time_total for row in rows) / counted / 1e3
    found = {"step_s": seconds, "busy_ms": total, "launches": sum(row.count for row in rows) / counted,
             "idle_share": max(1 - total / 1e3 / seconds, 0.0),
             "top": [{"name": row.key[:100], "ms": row.self_device_time_total / counted / 1e3,
                      "calls": row.count / counted} for row in rows[:40]]}
    print(json.dumps(rounded(found)), flush=True)
    with ranges(state.net), torch.profiler.profile() as profile:
        steps(state, batches, cfg, 1)
    return {**found, "parts_ms": parts_ms(profile)}


CASES = {"as it is": {}, "as it is again": {}, "no checkpointing": {"model__use_checkpoint": False},
         "field_stride 2, no checkpointing": {"model__use_checkpoint": False, "model__field_stride": 2},
         "plain": {"run__graphs": "off"}, "batch 4": {"data__batchsize": 4}}


def graph_steps(args, folder):
    """The step as graphs beside the plain one, and with what makes it cheaper, in turn."""
    device, found = args.where, {}
    if device.type != "cuda":
        return {"left_out": NO_DEVICE + "graphs are those of CUDA."}
    for name, changes in CASES.items():
        forget_peak(device)
        began, state, batches = time.perf_counter(), None, None
        try:
            cfg = configuration(args, folder, **changes)
            state, batches = new_state(cfg, device)
            first = steps(state, batches, cfg, 4)
            seconds, peak = steps(state, batches, cfg, 6), peak_bytes(device)
            recorded = (state.graphs or {}).get("recorded", {})
            with parts_of_a_step(device) as spent:
                steps(state, batches, cfg, 3)
            work = busy(functools.partial(steps, state, batches, cfg, 1), device)
            found[name] = {"step_s": statistics.median(seconds), "slowest_s": max(seconds), **work, "first_s": first,
                           "recorded": sorted(key for key, value in recorded.items() if value),
                           "allocated_bytes": peak[0], "reserved_bytes": peak[1],
                           "reserved_then_bytes": torch.cuda.memory_reserved(device),
                           "losses": om.averages(state.progress.sums),
                           "parts_ms": {key: 1e3 * statistics.median(values) for key, values in spent.items()}}
        except Exception as error:  # the others still count
            found[name] = {"left_out": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}
        found[name]["seconds"] = time.perf_counter() - began
        print(json.dumps(rounded({name: found[name]})), flush=True)
    return found


def choices(args, folder):
    """Seconds of a step and memory with one thing changed at a time."""
    device = args.where
    cases = {"as it is": {}, "channels_last off": {"run__channels_last": False},
             "checkpointing off": {"model__use_checkpoint": False}, "batch 4": {"data__batchsize": 4},
             "batch 8": {"data__batchsize": 8}, "local_match off": {"model__local_match": False},
             "kernels off": {}, "plain norm and upsampling": {}, "exact_sums off": {"run__exact_sums": False},
             "cudnn.benchmark": {}}
    if device.type == "cpu":
        cases = {name: cases[name] for name in ("as it is", "channels_last off", "checkpointing off")}
    found = {}
    for name, changes in cases.items():
        forget_peak(device)
        torch.backends.cudnn.benchmark = name == "cudnn.benchmark"
        device_ops.SETTINGS["kernels"] = name != "kernels off"
        device_ops.SETTINGS["as on a device"] = False if name == "plain norm and upsampling" else None
        try:
            cfg = configuration(args, folder, **changes)
            state, batches = new_state(cfg, device)
            first = steps(state, batches, cfg, 3)
            found[name] = {"step_s": statistics.median(steps(state, batches, cfg, 5)), "first_s": first[0],
                           "allocated_bytes": peak_bytes(device)[0], "reserved_bytes": peak_bytes(device)[1]}
        except Exception as error:  # one that does not fit; the others still count
            found[name] = {"left_out": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        state = batches = None
    return found


def operations_of(args):
    """{operation: a function of nothing that runs it, and its backward where it has one} at the size of a step."""
    device, side = args.where, side_of(args)
    size, batch = (side,) * 3, 2
    numbers = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=numbers).to(device)
    image, other = torch.rand(batch, 1, *size, device=device), torch.rand(batch, 1, *size, device=device)
    field = (random(batch, 3, *size) * 0.5).requires_grad_()
    features = random(batch, 16, *size).to(torch.bfloat16).requires_grad_()
    coarse = random(batch, 16, *(side // 2,) * 3).requires_grad_()
    velocity = draw_velocity([(0, 0, 0), (0, 0, 1)], "velocity", 3, [8, 16, 32, 64], 4e-5).to(device)
    region = middle(64, 3)
    weight, *zeros = torch.ones(16, device=device), *torch.zeros(3, 2, 16, device=device)
    last = features.detach().to(memory_format=torch.channels_last_3d).requires_grad_()
    by_kernels, correlate = device_ops.kernels_for(last) or device_ops, CorrelationLayer(3, 16).to(device)
    modulation = weight, zeros[0][0], *zeros[1:]  # weight and bias of the norm, scale and shift of each sample

    def both(function, *inputs):
        def run():
            for x in inputs:
                x.grad = None
            value = function(*inputs)
            (value if value.dim() == 0 else value.float().square().mean()).backward()
            return [x.grad for x in inputs]
        return run
    return {
        "group_norm 16": both(lambda x: F.group_norm(x.float(), 2), features),
        "norm, modulation, activation at once": both(
            lambda x: device_ops.NormModulateActivate.apply(x, 2, 1e-5, *modulation, 0.2), last),
        "the same by kernels where they work": both(
            lambda x: by_kernels.NormModulateActivate.apply(x, 2, 1e-5, *modulation, 0.2), last),
        "correlation of neighbours": both(lambda x: correlate(x, x), last),
        "upsample trilinear 2x": both(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), coarse),
        "upsample 1/16 to full": both(lambda x: F.interpolate(x[..., ::8, ::8, ::8], size=size, mode="trilinear"),
                                      coarse),
        "upsample by products 2x": both(lambda x: device_ops.interpolate_by_products(x, size, False), coarse),
        "upsample by products 1/16 to full": both(
            lambda x: device_ops.interpolate_by_products(x[..., ::8, ::8, ::8], size, False), coarse),
        "avg_pool 2": both(lambda x: F.avg_pool3d(x.float(), 2), features),
        "warp image": both(lambda f: warp(image, f), field),
        "warp field": both(lambda f: warp(f, 0.1 * f, padding="border"), field),
        "mslncc": both(lambda f: mslncc(warp(image, f), other), field),
        "regularity": both(lambda f: regularity(f, 0.0, 1.0), field),
        "recovery_terms": both(lambda f: sum(term.mean() for term in recovery_terms(f, 0.1 * f.detach())), field),
        "integrate_velocity": lambda: [resize_field(integrate_velocity(velocity, [195, 13], region), size)],
        "draws on the CPU": lambda: [draw_velocity([(0, 0, 2), (0, 0, 3)], "velocity", 3, [8, 16, 32, 64], 4e-5)],
    }


def operations(args, folder):
    """Milliseconds of the operations of a step beside the convolutions, forward and backward together."""
    return {name: 1e3 * timed(function, args.where) for name, function in operations_of(args).items()}


def determinism(args, folder):
    """Which operations give other bits when they are repeated, and whether two equal trainings end equally."""
    different = []
    for name, function in operations_of(args).items():
        answers = [[tensor.detach().clone() for tensor in function()] for _ in range(4)]
        if any(not torch.equal(a, b) for answer in answers[1:] for a, b in zip(answers[0], answer)):
            different.append(name)
    weights, losses = [], []
    for _ in range(2):
        cfg = configuration(args, folder, "config_demo", data__img_size=min(side_of(args), 48))
        torch.manual_seed(0)
        state, batches = new_state(cfg, args.where)
        steps(state, batches, cfg, 5)
        weights.append(om.checkpoint.weights_sha256(state.net.state_dict()))
        losses.append(om.averages(state.progress.sums)["regist"])
    return {"not_deterministic": different, "equal_trainings_end_equally": weights[0] == weights[1],
            "loss_difference": abs(losses[0] - losses[1]) / abs(losses[0])}


def ddp(args, folder):
    """What DDP and the hook that sums gradients cost at one rank, over the device's own backend."""
    device = args.where
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    torch.distributed.init_process_group(om.launch.backend(device), store=store, rank=0, world_size=1)
    found = {"backend": torch.distributed.get_backend()}
    for name, exact in (("without", None), ("float64 sums", True), ("float32 sums", False)):
        cfg = configuration(args, folder, run__graphs="off", run__exact_sums=bool(exact))  # a graph calls no DDP
        state, batches = new_state(cfg, device)
        if exact is not None:
            state.model = om.optim.wrap(state.net, om.launch.Ranks(world_size=2), device, state.gradients, cfg)
        steps(state, batches, cfg, 3)
        found[f"{name}_step_s"] = statistics.median(steps(state, batches, cfg, 6))
        state = batches = None
    torch.distributed.destroy_process_group()
    return found


def launched(folder, args, name, faults=(), **changes):
    """A launch of the tiny training of tests/faults on this device. Returns its folder and process."""
    common = importlib.import_module("tests.faults.common")
    place = common.new_folder(Path(folder), name)
    return common, place, common.launch(place, 1, faults, run__device=args.device, **changes)


def hang(args, folder):
    """A device that does not answer: how long until the launcher knows, what it says, and that the run goes on."""
    at = {"rank": 0, "phase": "forward", "mode": "diffusion", "step": 9, "do": "hang_device"}
    common, place, process = launched(folder, args, "hang", [at])
    code, end = common.wait(process, SECTION_S - 20), common.ends(place).get(0)
    if not end:
        raise RuntimeError((place / "log.txt").read_text()[-2000:])
    struck = float((place / "fault").read_text())
    return {"exit_code": code, "cause": end["verdict"]["cause"], "phase": end["verdict"]["phase"],
            "sentence": end["verdict"].get("sentence"), "detected_s": end["time"] - struck,
            "attempts": len(common.ends(place)), "went_on": common.final_weights(place) is not None}


def kill(args, folder):
    """SIGKILL in the middle: whether the resumed run ends with the weights of an undisturbed one, or how near."""
    runs = {}
    for name in ("undisturbed", "killed"):
        common, place, process = launched(folder, args, name)
        if name == "killed":
            common.until(lambda place=place, common=common: common.steps_done(place) >= 5)
            os.kill(common.rank_pid(place, 0), signal.SIGKILL)
        if common.wait(process, SECTION_S // 2):
            raise RuntimeError((place / "log.txt").read_text()[-2000:])
        lines = common.read_lines(common.run_of(place) / "rank0.jsonl")
        last = [line["terms"] for line in lines if line["event"] == "step"][-1]
        runs[name] = common.final_weights(place), last, len(common.ends(place))
    (first, one, _), (second, other, attempts) = runs.values()
    return {"weights_equal": first == second is not None, "attempts": attempts,
            "largest_difference_of_a_term": max(abs(one[name] - other[name]) / max(abs(one[name]), 1e-9)
                                                for name in one)}


def memory(args, folder):
    """A batch that cannot fit: one sentence, and not a traceback."""
    if args.where.type == "cpu":
        return {"left_out": NO_DEVICE + "it would take the host's memory; the kernel's killer is in the fault matrix."}
    cfg = configuration(args, folder)
    words = ["--config", str(ROOT / "Config/config_om.yaml")]
    changes = {"data.root": cfg["data.root"], "data.img_size": side_of(args), "data.batchsize": 32, "data.cache": "",
               "data.val_fraction": 0, "data.repeats": 1000, "run.models": f"{folder}/Models",
               "run.logs": f"{folder}/Logs", "run.device": args.device, "model.use_checkpoint": False,
               "run.round_seconds": 60}
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    environment = importlib.import_module("tests.tiny").launcher_environment(1)
    ended = subprocess.run(["bash", str(ROOT / "bash_train_multi_nodes.sh"), *words], cwd=ROOT, env=environment,
                           capture_output=True, text=True, timeout=SECTION_S)
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "out of device memory" in line]
    return {"exit_code": ended.returncode, "said": said[:1]}


def checkpoints(args, folder):
    """What a step waits for a checkpoint of the production network, and how long the thread then writes."""
    cfg, device = configuration(args, folder), args.where
    state, batches = new_state(cfg, device)
    state.folder = run_folder({"run.models": Path(folder) / "Models", "data.name": "day", "model.name": "om_net"})
    steps(state, batches, cfg, 2)
    stalls, writes = [], []
    for number in range(3):
        synchronize(device)
        began = time.perf_counter()
        om.training_state.save(state, f"tmp/000000_step{number:04d}_day_om_net.pth")
        stalls.append(time.perf_counter() - began)
        om.training_state.finish_saving(state)
        writes.append(state.write_s)
    return {"stall_s": statistics.median(stalls), "write_s": statistics.median(writes),
            "bytes": sum(path.stat().st_size for path in state.folder.rglob("*.pth")) // 3}


def volumes_of_pairs(args, count):
    """Synthetic volumes of 160x192x224 voxels times --scale: a list of float32 arrays."""
    size = [max(round(n * args.scale), 16) for n in (160, 192, 224)]
    half = [n // 2 for n in size]
    volumes = []
    for seed in range(1, count + 1):  # at half size: a whole one takes half a minute to make
        image = ndimage.zoom(make_subject(seed, half)["image"], [n / h for n, h in zip(size, half)], order=1)
        volumes.append(image + np.random.default_rng(seed).normal(0, 0.01, image.shape).astype(np.float32))
    return volumes


def pair(args, folder):
    """One pair of 160x192x224 voxels, as `omnimorph.register` does it by default: seconds by part and by function."""
    volumes = volumes_of_pairs(args, 2)
    found = {"voxels": list(volumes[0].shape)}
    for name in ("first", "then"):
        forget_peak(args.where)
        began = time.perf_counter()
        result = register(*volumes, device=args.where)
        found[name] = {"with_scores_s": time.perf_counter() - began, "peak_bytes": peak_bytes(args.where)[0],
                       **{f"{part}_s": seconds for part, seconds in result.seconds.items()},
                       "similarity_before": result.similarity_before, "similarity": result.similarity}
        print(json.dumps(rounded(found)), flush=True)
    profile = cProfile.Profile()
    profile.runcall(register, *volumes, device=args.where)
    rows = [{"function": f"{Path(place[0]).name}:{place[2]}", "calls": calls, "s": total}
            for place, (_, calls, _, total, _) in pstats.Stats(profile).stats.items() if str(ROOT) in place[0]]
    return {**found, "functions": sorted(rows, key=lambda row: -row["s"])[:45]}


def pairs(args, folder):
    """Pairs of such volumes from files to files, one at a time and four: seconds a pair."""
    first, *others = volumes_of_pairs(args, 5)
    write_volume(f"{folder}/fixed.nii.gz", first, np.eye(4))
    found = {}
    for at_once in (1, 4):
        for number, volume in enumerate(others[:2 * at_once]):
            write_volume(f"{folder}/moving_{at_once}/{number}.nii.gz", volume, np.eye(4))
        command = [sys.executable, str(ROOT / "OM_register.py"), "--fixed", f"{folder}/fixed.nii.gz", "--moving",
                   f"{folder}/moving_{at_once}", "--device", str(args.where.type), "--workers", str(at_once),
                   "--out", f"{folder}/results_{at_once}"]
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        found[f"{at_once}_at_once_s"] = (time.perf_counter() - began) / len(others[:2 * at_once])
    return found


SECTIONS = (versions, pair, pairs, graph_steps, kernels, peaks, syncs, operations, determinism, checkpoints, tests,
            agreement, step, choices, ddp, hang, kill, memory)


# ---------------------------------------------------------------------------------------------------------------------
# The day
# ---------------------------------------------------------------------------------------------------------------------

def rounded(value):
    """Numbers with five digits, in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def run_here(args):
    """One section in this process. Prints its figures as the last line."""
    section = next(section for section in SECTIONS if section.__name__ == args.section[0])
    args.where = pick_device(args.device)
    prepare_device(args.where, 0)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(rounded(section(args, folder))))


def run_apart(section, args):
    """One section in a process of its own: its figures, or what went wrong, and the seconds that it took."""
    command = [sys.executable, __file__, "--inside", "--section", section.__name__, "--device", args.device, "--scale",
               str(args.scale), "--data", str(args.data)]
    began = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        out, err = process.communicate(timeout=args.limit)
        found = {"error": (err.strip().splitlines() or ["no output"])[-1]} if process.returncode else {}
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        found = {"error": f"not done within {args.limit} s, and ended"}
    lines = []
    for line in out.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a process that was killed may be cut
            lines += [json.loads(line)] if line.startswith("{") else []
    said = [line for line in err.splitlines() if line.startswith(("graphs:", "kernels:"))]
    found = found or lines.pop()
    if "error" in found and lines:
        found["so_far"] = lines
    if said:
        found["said"] = said
    return {"section": section.__name__, "seconds": round(time.time() - began, 1), **found}


def parse_arguments():
    names = [section.__name__ for section in SECTIONS]
    parser = argparse.ArgumentParser(description="Everything that has to be known of a device, in ten minutes.",
                                     epilog="sections: " + ", ".join(names))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or xpu (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the volumes' sides, 1 = 128^3 (%(default)s)")
    parser.add_argument("--section", nargs="+", choices=names, default=names, metavar="NAME", help="only these")
    parser.add_argument("--data", type=Path, metavar="FOLDER",
                        help="where the synthetic volumes are kept, and made if they are not there (default: made anew "
                             "for this call)")
    parser.add_argument("--out", type=Path, default=Path("Logs/first_day.json"), help="(%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="all sections at --scale 0.125")
    parser.add_argument("--limit", type=float, default=SECTION_S, metavar="S",
                        help="a section is ended after so many seconds (%(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.scale = 0.125 if args.rehearse else args.scale
    return args


def main():
    args = parse_arguments()
    if args.inside:
        try:
            run_here(args)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    with tempfile.TemporaryDirectory() as folder:
        args.data = args.data or Path(folder) / "data"
        if not (args.data / "dataset.json").exists():
            write_dataset(args.data, range(8), side_of(args))
        return run_sections(args)


def run_sections(args):
    """All sections asked for, one after the other. Returns how many could not be shown."""
    found, began = [], time.time()
    for section in SECTIONS:
        if section.__name__ in args.section:
            print(f"{section.__name__}: {section.__doc__.splitlines()[0]}", file=sys.stderr, flush=True)
            found.append(run_apart(section, args))
            print(json.dumps(found[-1]), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_file(args.out, json.dumps(found, indent=1) + "\n")
            if section is versions and "cuDNN" in found[-1].get("error", ""):
                break
    failed = sum("error" in entry for entry in found)
    if len(args.section) > 1:  # the line of a single section is the last one, for programs that read that
        print(json.dumps({"sections": len(found), "seconds": round(time.time() - began, 1), "failed": failed}))
    return failed


if __name__ == "__main__":
    sys.exit(main())
