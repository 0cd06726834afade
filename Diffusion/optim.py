"""How weights are updated: gradient sums, sharding, Adam, the learning rate, and the average of the weights.

run.strategy says what each rank holds. ddp: everything. zero1: everything but the moments of other ranks' parameters.
fsdp: a slice of each weight, gradient and moment; the weights of a block are gathered only while it computes. With one
rank, each strategy is the plain network and plain Adam. A checkpoint holds whole tensors, so it loads with any strategy
and any number of ranks.
"""
import contextlib
import dataclasses
import inspect
import math
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from Diffusion.blocks import ConvBlock, UpsampleConv
from Diffusion.networks_older import TransposedConv
from Diffusion.om_net import AttentionBlock
from Runtime import agree, memory
from Runtime.errors import InputError, first_line

# FSDP gathers the weights of a module when it is called. These are always called; the weights of other modules are
# gathered with the network.
BLOCKS = (ConvBlock, UpsampleConv, TransposedConv, AttentionBlock)
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Options of Adam and RMSprop, and what they keep for each parameter beside the rest: {option: name in the state}.
ADDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


# ---------------------------------------------------------------------------------------------------------------------
# Sums of gradients over the batches of a step and over the ranks: in float64, or, by key, in float32 or bf16
# ---------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class GradientSums:
    """Gradients of the batches of a step.

    float32 gradients summed in float64 and rounded once at the end give the same float32 in any order. So a step is
    bitwise the same for any number of ranks, as long as each forward pass gets the same batches. DDP hands over one
    bucket after another during the backward pass: the ranks exchange the first sums while the last gradients are
    computed.
    """

    dtype: torch.dtype  # of the sums
    wire: torch.dtype   # in which the ranks exchange them
    totals: dict = dataclasses.field(default_factory=dict)  # {parameter: sum so far}
    # Batches of this step on all ranks; with fsdp on this rank, because FSDP averages over the ranks after each.
    parts: int = 1


def new_gradients(cfg, device="cpu"):
    """The GradientSums of a run.

    cfg: run.exact_sums (true: in float64; false: in float32; auto: in float64 on a CPU) and run.bf16_sums (the ranks
    exchange half the bytes of float32).

    On an accelerator float64 doubles communication, and other operations are not bitwise reproducible anyway.
    Raises InputError for exact sums on a device without float64, which is tested once.
    """
    exact, bf16 = cfg["run.exact_sums"], cfg["run.bf16_sums"]
    if exact == "auto":
        exact = torch.device(device).type == "cpu" and not bf16
    if exact:
        try:
            torch.ones(2, dtype=torch.float64, device=device).sum().item()
        except RuntimeError as error:  # some Intel GPUs
            raise InputError(f"run.exact_sums: {device} has no float64 ({first_line(error)}); set it to false, and "
                             "results depend slightly on the number of ranks.") from error
    dtype = torch.float64 if exact else torch.float32
    return GradientSums(dtype, wire=torch.bfloat16 if bf16 else dtype)


def set_aside(sums, parameters):
    """Add the gradients of one batch to the totals, and clear the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to(sums.dtype, copy=True)  # a CUDA graph overwrites its own
            before = sums.totals.get(parameter)
            sums.totals[parameter] = gradient if before is None else before.add_(gradient)
            parameter.grad = None


def put_together(sums, parameters):
    """Set the gradients to the mean over all batches, which a communication hook does under DDP."""
    if sums.parts > 1:
        set_aside(sums, parameters)
        for parameter, total in sums.totals.items():
            parameter.grad = (total / sums.parts).to(parameter.dtype)
    sums.totals.clear()


def sum_over_ranks(sums, bucket):
    """Communication hook of DDP: the mean over all batches of all ranks, for one bucket of gradients.

    Returns: a future of the bucket's buffer, which then holds the means.
    """
    buffer = bucket.buffer()
    total = buffer.to(sums.dtype, copy=True)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        before = sums.totals.pop(parameter, None)
        if before is not None:
            # In the buffer a gradient has its parameter's strides, even channels last; bucket.gradients() does not show
            # that.
            place = gradient.storage_offset() - buffer.storage_offset()
            total.as_strided(parameter.size(), parameter.stride(), place).add_(before)

    def mean(future):
        return buffer.copy_(future.value()[0].to(sums.dtype).div_(sums.parts))
    return dist.all_reduce(total.to(sums.wire), async_op=True).get_future().then(mean)


# ---------------------------------------------------------------------------------------------------------------------
# The network on its ranks, and Adam
# ---------------------------------------------------------------------------------------------------------------------

def wrap(net, ranks, device, gradients, cfg):
    """The network as the step functions call it: DDP over all ranks, or `net` itself, on one rank or sharded in place.

    gradients: from `new_gradients`, how gradients are summed. find_unused_parameters also makes resuming exact: without
    it, DDP regroups its buckets after the first backward pass of a process, and then sums in another order.
    Raises InputError on several ranks for layers that keep running averages of their batches: each rank has its own.
    """
    if ranks.world_size == 1:
        return net.to(device)
    for name, module in net.named_modules():
        if getattr(module, "running_mean", None) is not None and not isinstance(module, nn.SyncBatchNorm):
            raise InputError(f"{cfg['model.name']}: {name} ({type(module).__name__}) keeps running averages of its "
                             "batches, which differ from rank to rank: use GroupNorm or InstanceNorm, or train on one "
                             "rank.")
    if cfg["run.strategy"] == "fsdp":
        return shard(net, device, gradients.wire, cfg["run.channels_last"])
    known = inspect.signature(DistributedDataParallel).parameters
    # DDP warns about kernels of one voxel: it also compares strides of axes of length one, which mean nothing.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
    ddp = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [device], **{buffers: False},
                                  find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp.register_comm_hook(gradients, sum_over_ranks)
    return ddp


def shard(net, device, dtype, channels_last):
    """Shard a network in place, block by block: this rank keeps a slice of each tensor, on the device.

    A backward pass sets the gradient of a slice to the mean over the ranks, one batch each. dtype: of these sums.
    Returns: `net`.
    """
    from torch.distributed.device_mesh import DeviceMesh  # here: these take a second that other strategies save
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    net.to(memory_format=torch.contiguous_format)  # FSDP shards no other; inputs become channels last instead
    net.register_forward_pre_hook(cast_anew)
    modules = list(net.modules())
    for module in modules:
        if channels_last and isinstance(module, CONVOLUTIONS):
            module.register_forward_pre_hook(to_channels_last)
    for module in [*(module for module in modules if isinstance(module, BLOCKS)), net]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
        if module is not net:
            module.register_forward_pre_hook(gather_again)
    return net


def gather_again(module, inputs):
    """Gather the weights of a block that the backward pass recomputes (model.use_checkpoint).

    Older versions of torch (2.8 among them) gather at the gradient of the block's output. If the block runs in two
    passes (model.rec_num), its weights are already resharded by then, after the gradient of the later pass.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        module.unshard()


def cast_anew(module, inputs):
    """Disable autocast's cache: with a cast from an earlier pass, gradients arrive after the slices are summed."""
    if torch.is_autocast_enabled(inputs[0].device.type):
        torch.set_autocast_cache_enabled(False)  # until the surrounding torch.autocast ends


def to_channels_last(module, inputs):
    """Forward pre-hook: the first input in channels-last memory format."""
    x, *rest = inputs
    return x.contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last), *rest


def adam_names(modes, cfg):
    """Names of the Adams of a training (optim.moments): one for each of its modes, or "shared" alone."""
    return list(modes) if cfg["optim.moments"] == "per_mode" else ["shared"]


def make_optimizer(net, ranks, cfg):
    """Adam over the parameters of a network; with fsdp, call it after `wrap`, which replaces the parameters.

    Another optimizer has to be named twice, and without `fused` unless it is a kind of Adam: torch's fused SGD with
    momentum fails where a parameter has had no gradient yet. Parameters may come in several groups: one with a rate of
    its own keeps that rate's ratio to optim.lr, see `make_optimizers`.
    """
    options = {"lr": cfg["optim.lr"], "fused": True}
    if ranks.world_size > 1 and cfg["run.strategy"] == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, **options)
    return torch.optim.Adam(net.parameters(), **options)


def make_optimizers(net, ranks, cfg, modes):
    """{name: optimizer} of a training: see `adam_names`, `make_optimizer`. Each group gets its share of the rate."""
    optimizers = {name: make_optimizer(net, ranks, cfg) for name in adam_names(modes, cfg)}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["share"] = group["lr"] / own_adam(optimizer).defaults["lr"]
    return optimizers


def own_adam(optimizer):
    """The Adam that holds this rank's moments: with zero1 the inner one, of this rank's parameters only."""
    return getattr(optimizer, "optim", optimizer)


def compare_moments(saved, modes, cfg, path):
    """Compare the moments of a checkpoint with those that the config needs. Returns sentences on what changes.

    saved: from `gather_state`. modes: of the training. path: of the checkpoint, for the error.
    Raises InputError for per-mode moments if the config needs shared ones, which cannot be derived from them.
    """
    if "param_groups" in saved:
        return ["Adam's moments: each mode starts with the shared ones"] if cfg["optim.moments"] == "per_mode" else []
    if cfg["optim.moments"] == "shared":
        raise InputError(f"{path} has separate moments for each mode, and optim.moments shared cannot continue from "
                         f"them: set optim.moments to per_mode, or start a new run with --fresh --init-from {path}.")
    return [f"Adam's moments of mode {name} start from zero, because the checkpoint has none"
            for name in modes if name not in saved]


def numbered(net, optimizer):
    """{parameter: its number in a checkpoint}: those of the network in its order, then any others."""
    others = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {parameter: number for number, parameter in enumerate(dict.fromkeys([*net.parameters(), *others]))}


def load_optimizers(net, optimizers, saved):
    """Load this rank's part of a checkpoint's Adam state; see `compare_moments`. saved: from `gather_state`.

    Options such as the weight decay stay those of the optimizers, which the code or the config may have changed. What
    an option of ADDED adds starts from zero if the checkpoint was written without it.
    Returns: sentences on what is not loaded, because the state is of another kind of optimizer or lacks a part.
    """
    changes = []
    for name, optimizer in optimizers.items():
        whole_state = saved if "param_groups" in saved else saved.get(name)  # it numbers all parameters in order
        if not whole_state:
            continue
        adam, numbers = own_adam(optimizer), numbered(net, optimizer)
        kind = whole_state["param_groups"][0].get("kind")
        if kind is None:  # written up to 1.9.0, with the optimizer's own numbers
            numbers = {parameter: number for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
            kind = older_kind(whole_state["state"].values(), adam)
        if kind not in [parent.__name__ for parent in type(adam).__mro__]:
            changes.append("the optimizer starts afresh, because the checkpoint has the state of another one: "
                           f"{kind} -> {type(adam).__name__}")
            continue
        for groups in (optimizer.param_groups, adam.param_groups):
            for group, before in zip(groups, whole_state["param_groups"]):
                group["lr"] = before["lr"]  # of the last step: saving again before a next one keeps it
        state, groups = {}, []
        for group in adam.param_groups:
            for parameter in group["params"]:
                if entry := whole_state["state"].get(numbers[parameter]):
                    entry = {key: part_like(parameter, value) for key, value in entry.items()}
                    for part in [part for option, part in ADDED.items() if group.get(option) and part not in entry]:
                        entry[part] = torch.zeros_like(parameter)
                        changes.append(f"the optimizer's {part} starts from zero, because the checkpoint has none")
                    state[numbers[parameter]] = entry
            groups.append({**group, "params": [numbers[parameter] for parameter in group["params"]]})
        adam.load_state_dict({"state": state, "param_groups": groups})
    return dict.fromkeys(changes)


def older_kind(entries, optimizer):
    """Name of the optimizer class that wrote an unnamed state, guessed from its entries: `optimizer`'s if they fit."""
    of_adam = any("exp_avg_sq" in entry for entry in entries)
    if not entries or of_adam == isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return type(optimizer).__name__
    return "Adam" if of_adam else "not Adam"


def part_like(parameter, value):
    """This rank's part of a whole moment or average, copied because several Adams may start from one value.

    It has the parameter's strides, which fused Adam needs.
    """
    if value.shape != parameter.shape:
        return value.clone()
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor
        return distribute_tensor(value.contiguous(), parameter.device_mesh, parameter.placements,
                                 src_data_rank=None).clone()
    return torch.empty_like(parameter).copy_(value)


def own_part(tensor):
    """This rank's part of a tensor: the slice of a sharded one, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    """A sharded tensor gathered from all ranks, which all call this; any other tensor unchanged.

    Slices come by a plain all_gather, filled up to equal length: torch's DTensor.full_tensor over gloo crashed twice in
    some thousand trainings. It remains for the norm of the gradients, which is not in slices.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if not tensor.placements[0].is_shard():
        return tensor.full_tensor()
    mesh, part = tensor.device_mesh, tensor.detach().to_local()
    filled = part.new_zeros(-(-len(tensor) // mesh.size()), *tensor.shape[1:])
    filled[:len(part)] = part
    parts = [torch.empty_like(filled) for _ in range(mesh.size())]
    dist.all_gather(parts, filled, group=mesh.get_group())
    return torch.cat(parts)[:len(tensor)]


def gather(value, ranks):
    """Nested dicts with their sharded tensors gathered one by one: in CPU memory on rank 0, None elsewhere."""
    if isinstance(value, dict):
        return {name: gather(item, ranks) for name, item in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    value = whole(value)
    return value.cpu() if ranks.rank == 0 else None


def gather_state(net, optimizers, ranks):
    """Weights and Adam's state as a checkpoint holds them; complete on rank 0 only. Every rank calls this.

    Returns: {name: tensor}; the state_dict of the shared Adam, or {mode: state_dict}. Parameters are `numbered`, so
    that their groups may change.
    """
    adams = {}
    for name, optimizer in optimizers.items():
        adam, numbers = own_adam(optimizer), numbered(net, optimizer)
        own = {numbers[parameter]: entry for parameter, entry in adam.state.items()}
        groups = [{**group, "kind": type(adam).__name__, "params": [numbers[one] for one in group["params"]]}
                  for group in optimizer.param_groups]
        adams[name] = {"state": gather(own, ranks) if adam is optimizer else collect(own, ranks),
                       "param_groups": groups}
    return gather(net.state_dict(), ranks), adams.get("shared", adams)


def collect(own, ranks):
    """zero1: the state of a whole Adam on rank 0, in CPU memory; each rank sends the moments of its parameters.

    own: {number of a parameter: {name: tensor}} of this rank. Returns: the same of all ranks.
    ZeroRedundancyOptimizer.consolidate_state_dict does the same, but takes a minute per GB.
    """
    own_sizes = {number: {name: tensor.shape for name, tensor in entry.items()} for number, entry in own.items()}
    sizes = agree.gather_objects(ranks, own_sizes)
    numbers = sorted(number for sizes_of_rank in sizes for number in sizes_of_rank)
    state = {number: dict(own.get(number, {})) for number in numbers}
    for sender, sizes_of_rank in enumerate(sizes[1:], 1):
        for number, entry in sizes_of_rank.items():
            for name, size in entry.items():
                if ranks.rank == sender:
                    dist.send(own[number][name].cpu().contiguous(), 0, group=ranks.cpu)
                elif ranks.rank == 0:
                    state[number][name] = torch.empty(size)
                    dist.recv(state[number][name], sender, group=ranks.cpu)
    return state


def replicated(net, optimizers=None):
    """{name: tensor} that must be equal on every rank: buffers (fsdp), also weights (zero1), also moments (ddp)."""
    tensors = dict(net.state_dict())
    for adam, optimizer in (optimizers or {}).items():
        if isinstance(optimizer, torch.optim.Adam):
            for number, entry in optimizer.state_dict()["state"].items():
                tensors.update({f"{adam} Adam's {name} of parameter {number}": value for name, value in entry.items()})
    return {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "full_tensor")}


def footprint(net, optimizers, device):
    """Bytes of weights and Adam's state on this rank, and peak memory: of the device, or on a CPU of the process."""
    moments = [tensor for optimizer in optimizers.values() for entry in own_adam(optimizer).state.values()
               for tensor in entry.values()]
    return {"weights_bytes": local_bytes(net.parameters()), "optimizer_bytes": local_bytes(moments),
            "peak_bytes": memory.peak_bytes(device)}


def local_bytes(tensors):
    """Bytes of tensors on this rank: for a sharded one, of its slice."""
    return sum(own_part(tensor).nbytes for tensor in tensors)


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate over a run, and the moving average of the weights, which registration and augmentation use
# ---------------------------------------------------------------------------------------------------------------------

def learning_rate(cfg, step, done):
    """The learning rate of one step: a linear warm-up, then constant, or a cosine down to zero.

    rate = optim.lr * min((step + 1) / optim.warmup_steps, 1), with optim.schedule "cosine" times
    (1 + cos(pi done)) / 2 (Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts).
    step: from 0, over the whole run. done: fraction of the run's epochs done. It is not counted in steps, because their
    number per epoch changes with the batch and the data set.
    """
    rate = cfg["optim.lr"] * min((step + 1) / max(cfg["optim.warmup_steps"], 1), 1.0)
    if cfg["optim.schedule"] == "cosine":
        rate *= 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))
    return rate


def new_ema(net, cfg, saved=None):
    """The exponential moving average of a network's parameters, at its start.

    saved: {name: whole tensor} of a checkpoint, to continue from; None: start from the weights.
    Returns: {name: tensor}, with fsdp slices like the parameters; None if optim.average is 0.
    """
    if not cfg["optim.average"]:
        return None
    return {name: parameter.detach().clone() if saved is None else part_like(parameter, saved[name])
            for name, parameter in net.named_parameters()}


@torch.no_grad()
def update_ema(ema, net, cfg, step):
    """Move the average towards the weights, in place: ema = decay * ema + (1 - decay) * weights.

    decay = min(optim.average, (1 + step) / (10 + step)), step from 0. It starts small: with a constant decay the first
    averages would be mostly the untrained weights.
    """
    if ema:
        decay = min(cfg["optim.average"], (1 + step) / (10 + step))
        pairs = [(own_part(ema[name]), own_part(parameter)) for name, parameter in net.named_parameters()]
        torch._foreach_lerp_(*map(list, zip(*pairs)), 1 - decay)  # a few kernels on a device instead of hundreds


@contextlib.contextmanager
@torch.no_grad()  # for this function: code within the context keeps its own mode
def ema_weights(net, ema):
    """Within this context the network has the averaged weights; without an average (None), its own."""
    if not ema:
        yield net
        return
    parameters = [own_part(parameter) for parameter in net.parameters()]
    own = [parameter.detach().clone() for parameter in parameters]
    try:
        torch._foreach_copy_(parameters, [own_part(ema[name]) for name, _ in net.named_parameters()])
        yield net
    finally:
        torch._foreach_copy_(parameters, own)
