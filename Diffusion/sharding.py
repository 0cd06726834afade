"""What each rank holds of weights, gradients and Adam's moments (run.strategy), and how it becomes whole again.

ddp: everything. zero1: everything but the moments of other ranks' parameters. fsdp: a slice of each weight, gradient
and moment; a block's weights are whole only while it works. With one rank each is the plain network and plain Adam.
A checkpoint holds whole tensors, and so loads with any strategy and any number of ranks.
"""
import inspect
import resource
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from Diffusion.blocks import ConvBlock, UpsampleConv
from Diffusion.gradients import sum_over_ranks
from Diffusion.networks_older import TransposedConv
from Diffusion.om_net import AttentionBlock
from Runtime import agree

# FSDP collects a module's weights when the module is called. These always are; what is left belongs to the network.
BLOCKS = (ConvBlock, UpsampleConv, TransposedConv, AttentionBlock)
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def wrap(net, ranks, device, gradients, cfg):
    """The network as the step functions call it: DDP over all ranks, or `net` itself, on one rank or sharded in place.

    gradients: how they are summed. find_unused_parameters also keeps a resumed run bitwise: without it, DDP regroups
    its buckets after the first backward, and sums are then taken in another order than in a run that starts anew.
    """
    if ranks["world_size"] == 1:
        return net.to(device)
    if cfg["run.strategy"] == "fsdp":
        return shard(net, device, gradients["dtype"], cfg["run.channels_last"])
    known = inspect.signature(DistributedDataParallel).parameters
    # Of kernels of one voxel: torch compares strides of axes of length one too, where they mean nothing.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
    ddp = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [device], **{buffers: False},
                                  find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp.register_comm_hook(gradients, sum_over_ranks)
    return ddp


def shard(net, device, dtype, channels_last):
    """Leave this rank its slice of each tensor, block by block, on the device. dtype: of the sums over the ranks.

    A backward leaves the mean over the ranks of one batch each as the slice's gradient.
    """
    from torch.distributed.device_mesh import DeviceMesh  # here: these take a second that the other strategies save
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    net.to(memory_format=torch.contiguous_format)  # FSDP slices no other; so the inputs carry the memory format
    net.register_forward_pre_hook(cast_anew)
    modules = list(net.modules())
    for module in modules:
        if channels_last and isinstance(module, CONVOLUTIONS):
            module.register_forward_pre_hook(to_channels_last)
    for module in [*(module for module in modules if isinstance(module, BLOCKS)), net]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
    return net


def cast_anew(module, inputs):
    """Without autocast's cache: by a cast of an earlier pass, gradients would arrive when slices are summed already."""
    if torch.is_autocast_enabled(inputs[0].device.type):
        torch.set_autocast_cache_enabled(False)  # to the end of the surrounding torch.autocast


def to_channels_last(module, inputs):
    x, *rest = inputs
    return x.contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last), *rest


def make_optimizer(net, ranks, cfg):
    """Adam over the parameters of a network that is wrapped already."""
    options = {"lr": cfg["optim.lr"], "fused": True}
    if ranks["world_size"] > 1 and cfg["run.strategy"] == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, **options)
    return torch.optim.Adam(net.parameters(), **options)


def own_adam(optimizer):
    """The Adam that has this rank's moments: zero1 keeps one inside, of this rank's parameters alone."""
    return getattr(optimizer, "optim", optimizer)


def load_optimizer(optimizer, saved):
    """Take this rank's part of a whole Adam state, whose numbers count all parameters in order."""
    adam, group = own_adam(optimizer), {name: v for name, v in saved["param_groups"][0].items() if name != "params"}
    numbers = {parameter: number for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
    parameters = adam.param_groups[0]["params"]
    state = {place: {name: part_like(parameter, value) for name, value in saved["state"][numbers[parameter]].items()}
             for place, parameter in enumerate(parameters) if numbers[parameter] in saved["state"]}
    adam.load_state_dict({"state": state, "param_groups": [{**group, "params": list(range(len(parameters)))}]})
    optimizer.param_groups[0].update(group)


def part_like(parameter, value):
    """What this rank has of a whole moment, in memory as the parameter lies: fused Adam reads both in storage order."""
    if value.shape != parameter.shape:
        return value
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return torch.empty_like(parameter).copy_(value)


def whole(tensor):
    """A sliced tensor from the slices of all ranks, which all call this; another one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather(value, ranks):
    """Nested dicts with sliced tensors made whole: in CPU memory of rank 0, one after the other; elsewhere None."""
    if isinstance(value, dict):
        return {name: gather(item, ranks) for name, item in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    value = whole(value)
    return value.cpu() if ranks["rank"] == 0 else None


def gather_state(net, optimizer, ranks):
    """Weights and Adam's state as a checkpoint holds them; only rank 0 has all of them. Every rank calls this."""
    adam = gather(optimizer.state_dict(), ranks) if own_adam(optimizer) is optimizer else collect(optimizer, ranks)
    return gather(net.state_dict(), ranks), adam


def collect(optimizer, ranks):
    """zero1: the state of a whole Adam on rank 0, in CPU memory, to which each rank sends its parameters' moments.

    consolidate_state_dict of ZeroRedundancyOptimizer does the same, but a minute long for each GB.
    """
    adam, parameters = optimizer.optim, optimizer.param_groups[0]["params"]
    own = {number: adam.state[parameter] for number, parameter in enumerate(parameters) if parameter in adam.state}
    sizes = agree.gather_objects(ranks, {number: {name: tensor.shape for name, tensor in entry.items()}
                                         for number, entry in own.items()})
    state = {number: dict(own.get(number, {})) for number in sorted(number for part in sizes for number in part)}
    for sender, part in enumerate(sizes[1:], 1):
        for number, name, size in [(number, *item) for number, entry in part.items() for item in entry.items()]:
            if ranks["rank"] == sender:
                dist.send(own[number][name].cpu().contiguous(), 0, group=ranks["cpu"])
            elif ranks["rank"] == 0:
                state[number][name] = torch.empty(size)
                dist.recv(state[number][name], sender, group=ranks["cpu"])
    return {"state": state, "param_groups": [{**adam.param_groups[0], "params": list(range(len(parameters)))}]}


def replicated(net, optimizer=None):
    """{name: tensor} of what every rank must hold the same: with fsdp buffers, with zero1 weights, else moments too."""
    tensors = dict(net.state_dict())
    if isinstance(optimizer, torch.optim.Adam):
        tensors.update({f"Adam's {name} of parameter {number}": tensor
                        for number, entry in optimizer.state_dict()["state"].items() for name, tensor in entry.items()})
    return {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "full_tensor")}


def footprint(net, optimizer, device):
    """Bytes that this rank holds of weights and of Adam's state, and the most in use of the device (CPU: process)."""
    moments = [tensor for entry in own_adam(optimizer).state.values() for tensor in entry.values()]
    weights, moments = (sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)
                        for tensors in (net.parameters(), moments))
    peak = (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if device.type == "cpu"
            else torch.get_device_module(device).max_memory_allocated(device))
    return {"weights_bytes": weights, "optimizer_bytes": moments, "peak_bytes": peak}
