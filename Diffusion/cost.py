"""The cost of a training step, counted without computing it: `python OM_train_3modes.py --config C --dry-run`."""
import contextlib
import functools
import glob
import json
import math
import sys
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from Dataloader.dataset import ALONE, agree_on_labels, find_labels, read_datasets
from Dataloader.sampler import epoch_pair_count, steps_left
from Diffusion.diffuser import make_condition
from Diffusion.embeddings import embed, new_queue
from Diffusion.fake_device import AliveBytes, DeviceAutocast
from Diffusion.losses import checked
from Diffusion.networks import new_network
from Diffusion.optim import adam_names, local_bytes, new_gradients
from Runtime.config import modes_of
from Runtime.device import PRECISIONS, pick_device, precision, prepare_device, synchronize
from Runtime.errors import DONE, InputError, is_out_of_memory
from Runtime.global_batch import split_step
from Runtime.memory import measure

TRIAL_VOXELS = 2 ** 17  # of the grid on which a CPU tries a step


def count_costs(loss_function, network, alive):
    """Cost of one forward and backward pass of a mode, on tensors without values: call under torch's FakeTensorMode.

    loss_function: computes the loss from scratch. network: its weights are not counted as activations. alive: an
    AliveBytes that was active while network and batch were made.
    Returns: {"flops": floating-point operations of matrix products, convolutions and attention, "kept": bytes of the
    activations that the forward pass keeps for the backward pass, each storage once, "peak": the most bytes alive at
    once besides the weights: batch, activations and gradients, "batch": those of the batch}.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    own, alive.peak = local_bytes(network.parameters()), alive.now
    batch = alive.now - own
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_function()
        loss.backward()
    network.zero_grad(set_to_none=True)
    return {"flops": counter.get_total_flops(), "kept": sum(kept.values()),
            "peak": alive.peak - own, "batch": batch}


def stand_in(cfg, pair_batch, labels):
    """A network and a batch of noise: under FakeTensorMode without values, to count the cost of a config.

    pair_batch: pairs per forward pass. labels: number that loss.dice compares.
    Returns: the network; a function from a mode to its loss.
    """
    size, batchsize = cfg["data.img_size"], cfg["data.batchsize"]
    kind = "none" if cfg["model.condition_type"] == "none" else "volume"
    net, values = new_network(cfg), torch.zeros(cfg["model.structures"] if cfg["loss.segment"] else labels)
    image = torch.rand(batchsize, cfg["data.channels"], *size)
    t = torch.zeros(batchsize, dtype=torch.long)
    moving, fixed = torch.rand(2, pair_batch, cfg["data.channels"], *size)
    maps = {"moving": moving[:, :1], "fixed": fixed[:, :1]}
    batch = {"xt": image, "t": t, "target_field": torch.zeros(batchsize, len(size), *size), "use_condition": t == 0,
             "condition": make_condition(image, kind), "subjects": t, "queue": new_queue(cfg, image.device),
             "targets": None, "moving": moving, "fixed": fixed, "mask": maps,
             "label": {**maps, "labelled": [(True, True)] * pair_batch, "values": values}}

    def loss_of(mode):
        if mode.name == "contrastive" and cfg["optim.average"]:
            with torch.no_grad():
                embed(net, batch, cfg)  # the target embeddings, from the averaged weights
        return checked(mode, mode.step(net, batch, cfg))[0]

    return net, loss_of


def mode_costs(cfg, pair_batch, modes, rules=None, labels=1):
    """`count_costs` of each mode of a config.

    pair_batch: pairs per forward pass. modes: MODES of the training script. rules: DeviceAutocast() to cast as an
    accelerator does; None to cast as a CPU. labels: number that loss.dice compares, see `training_volumes`.
    Returns: the network, on tensors without values; {mode: costs}.
    """
    with FakeTensorMode(), AliveBytes() as alive, rules or contextlib.nullcontext():
        net, loss_of = stand_in(cfg, pair_batch, labels)
        return net, {mode.name: count_costs(functools.partial(loss_of, mode), net, alive)
                     for mode in modes_of(cfg, modes)}


def step_memory(costs, network, cfg, batches=1):
    """Bytes that the step of one rank takes at its peak, without sharding: weights, Adam's moments, average, a mode.

    This leaves out the workspace of kernels (a few hundred MiB of cuDNN on a GPU), the allocator's rounding, and the
    driver's context. costs, network: from `mode_costs`. batches: most forward passes of a mode in a step; with several,
    all their batches and the sums of their gradients are kept.
    """
    copies = 1 + 2 * len(adam_names(costs, cfg)) + bool(cfg["optim.average"])
    if batches > 1:
        copies += new_gradients(cfg).dtype.itemsize // torch.float32.itemsize
    return copies * local_bytes(network.parameters()) + max(
        cost["peak"] + (batches - 1) * cost["batch"] for cost in costs.values())


def training_volumes(cfg, inputs):
    """Number of training volumes: counted in the cache, else in the files, else data.expect_samples.

    inputs: what the modes of the training take, as in `steps_left`.
    Returns: number of volumes; listed pairs or None; the source of the number, as text; how many labels loss.dice
    compares, else 1.
    Raises InputError for data that exist but are refused, such as ids that select nothing, and for refused labels.
    """
    why, refused = "", None
    for place, source_cfg in ((cfg["data.cache"], cfg), (cfg["data.root"], {**cfg, "data.cache": ""})):
        if place:
            try:
                dataset, _, listed = read_datasets(source_cfg, headers_only=True, inputs=inputs)
                labels = 1
                if cfg["loss.dice"] and "pairs" in inputs:
                    labels = len(agree_on_labels(ALONE, find_labels(dataset, ALONE, source_cfg), cfg))
                return len(dataset), listed, place + why, labels
            except InputError as error:
                why = f", since {error}"
                refused = error if glob.glob(str(place)) else refused
    if refused:
        raise refused
    return cfg["data.expect_samples"], None, f"data.expect_samples{why}", 1


def step_seconds(cfg, split, modes, labels, device):
    """Seconds of a step of one rank on this machine: forward and backward of each mode, tried on a batch of noise.

    On a CPU a large grid is cut to TRIAL_VOXELS, and the seconds grow with the voxels; a device would idle on such a
    grid, so there it stays whole. Reading, the optimizer and the sums over ranks are left out, and so are the graphs of
    run.graphs, which make a step on a device up to twice as fast.

    split: from `split_step`. labels: number that loss.dice compares.
    """
    size = list(cfg["data.img_size"])
    while device.type == "cpu" and math.prod(size) > TRIAL_VOXELS:
        size[size.index(max(size))] //= 2
    prepare_device(device, cfg["run.threads"])
    torch.set_flush_denormal(True)  # as in a training
    with torch.device(device):
        scales = min(cfg["registration.scales"], min(size).bit_length())  # each halves the volume
        _, loss_of = stand_in({**cfg, "data.img_size": size, "registration.scales": scales}, split.pair_batch, labels)
    seconds = 0.0
    for mode in modes_of(cfg, modes):
        for _ in range(2):  # the first one is slow
            began = time.perf_counter()
            loss_of(mode).backward()
            synchronize(device)
            took = time.perf_counter() - began
        seconds += took * (split.pair_batches if mode.data == "pairs" else split.sample_batches)
    return seconds * math.prod(cfg["data.img_size"]) / math.prod(size)


def this_machine(cfg, memory, split, modes, labels):
    """Cost of a step on this machine: {"device", "free_bytes" (None if unknown), "fits", "step_seconds" (None if it
    does not fit)}; {} if run.device is absent, as on a login node.

    memory: {device type: bytes of a step}. split, labels: as in `step_seconds`.
    """
    try:
        device = pick_device(cfg["run.device"])
    except InputError:
        return {}
    room = measure(device)
    free = room["host_free"] if device.type == "cpu" else room["device_free"]
    free = room["device_unreserved"] if free is None else free
    fits = None if free is None else memory.get(device.type, memory["cpu"]) <= free
    seconds = None
    if fits is not False:
        try:
            seconds = step_seconds(cfg, split, modes, labels, device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False  # what kernels need beside the tensors is not in the estimate
    return {"device": device.type, "free_bytes": free, "fits": fits, "step_seconds": seconds}


def fit_text(here, cfg):
    """Whether a step fits into the free memory, in words. here: from `this_machine`."""
    if here["fits"] is None:
        return "its free memory is unknown"
    free = "a trial step ran out of memory" if here["free_bytes"] is None else (
        f"{here['free_bytes'] / 2 ** 30:.1f} GiB are free")
    if here["fits"]:
        return f"it fits ({free})"
    lower = "lower data.batchsize" if cfg["data.batchsize"] > 1 else "set a smaller data.img_size"
    other = "" if cfg["model.use_checkpoint"] else ", or set model.use_checkpoint to true"
    return f"it does NOT fit ({free}): {lower}{other}"


def dry_run(cfg, world_size, modes):
    """Build everything on tensors without values and print the cost of a step, with JSON as the last line.

    world_size: planned number of ranks. modes: MODES of the training script. Returns: the exit code.
    """
    size, word = "x".join(map(str, cfg["data.img_size"])), cfg["model.condition_type"]
    inputs = {mode.data for mode in modes_of(cfg, modes)}
    volumes, listed, source, labels = training_volumes(cfg, inputs)
    split = split_step(cfg, world_size)
    steps = steps_left(cfg, volumes, listed, split, inputs=inputs)
    pairs = epoch_pair_count(cfg, volumes, listed, split) if "pairs" in inputs else 0
    on_cpu = {**cfg, "run.amp": precision(cfg["run.amp"], torch.device("cpu"))}
    on_device = {**cfg, "run.amp": "bf16" if cfg["run.amp"] == "auto" else cfg["run.amp"],
                 "run.exact_sums": cfg["run.exact_sums"] is True}
    net, costs = mode_costs(on_cpu, split.pair_batch, modes, None, labels)
    device_costs = costs
    if on_device["run.amp"] != "off":
        _, device_costs = mode_costs(on_device, split.pair_batch, modes, DeviceAutocast(), labels)
    batches = max(number for data, number in (("volumes", split.sample_batches), ("pairs", split.pair_batches))
                  if data in inputs)
    memory = {"cuda": step_memory(device_costs, net, on_device, batches),
              "cpu": step_memory(costs, net, on_cpu, batches)}
    memory["xpu"] = memory["cuda"]  # the same rules
    parameters = sum(p.numel() for p in net.parameters())
    print(f"{cfg['model.name']}: {parameters / 1e6:.1f} M parameters, {size} voxels, batch {cfg['data.batchsize']}, "
          f"{cfg['diffusion.timesteps']} timesteps, condition {word}")
    for mode, cost in costs.items():
        print(f"{mode:>13}: {cost['flops'] / 1e12:8.3f} Tflop, activations {cost['kept'] / 2 ** 30:6.2f} GiB on a CPU, "
              f"{device_costs[mode]['kept'] / 2 ** 30:6.2f} GiB on a GPU")
    on_gpu, beside = PRECISIONS[on_device["run.amp"]], PRECISIONS[on_cpu["run.amp"]]
    print(f"memory of a step at its peak: about {memory['cuda'] / 2 ** 30:.1f} GiB on a GPU (CUDA, ROCm or XPU, "
          f"{on_gpu}), {memory['cpu'] / 2 ** 30:.1f} on a CPU ({beside}): "
          f"{(memory['cpu'] - max(cost['peak'] for cost in costs.values())) / 2 ** 30:.1f} for weights, moments, "
          f"averages{', gradient sums and all batches' * (batches > 1)}, the rest for the largest mode")
    each = f" x {split.sample_batches} batches, one after another" * (split.sample_batches > 1)
    batch = f"effective batch {split.samples} (ranks: {world_size}{each})"
    if volumes:
        print(f"{steps} steps per epoch: {volumes} volumes (from {source}), {pairs} pairs; {batch}")
    else:
        print(f"steps per epoch: unknown without the volumes ({source}); {batch}")
    sys.stdout.flush()  # into a file or pipe too, since the trial takes minutes on a CPU, and the kernel may end it
    here = this_machine(cfg, memory, split, modes, labels)
    if here:
        seconds, line = here["step_seconds"], f"on this machine ({here['device']}): {fit_text(here, cfg)}"
        if seconds is not None:
            hours = seconds * steps * cfg["run.epochs"] / 3600
            line += f"; a step takes about {seconds:.2g} s"
            line += f", all {cfg['run.epochs']} epochs {hours:.3g} h" * bool(volumes) + ", by a trial on noise"
        print(line)
    else:
        print(f"on this machine: no {cfg['run.device']}, so the time is unknown")
    print(json.dumps({"parameters": parameters, "step_flops": sum(cost["flops"] for cost in costs.values()),
                      "step_memory_bytes": memory, "steps_per_epoch": steps, "effective_batch": split.samples, **here}))
    return DONE
