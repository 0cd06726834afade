"""The learning rate over a run, and the moving average of the weights with which registration and augmentation work."""
import contextlib
import math

import torch

from Diffusion.sharding import own_part, part_like


def learning_rate(cfg, step, done):
    """The learning rate of one step: a linear warm-up, then constant, or a cosine down to zero.

    rate = optim.lr * min((step + 1) / optim.warmup_steps, 1), with optim.schedule "cosine" times
    (1 + cos(pi done)) / 2 (Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts).
    step: from 0, over the whole run. done: fraction of the run's epochs that is done. It is not counted in steps: an
    epoch has another number of them when the samples of a step or the data set change.
    """
    rate = cfg["optim.lr"] * min((step + 1) / max(cfg["optim.warmup_steps"], 1), 1.0)
    if cfg["optim.schedule"] == "cosine":
        rate *= 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))
    return rate


def new_ema(net, cfg, saved=None):
    """The exponential moving average of a network's parameters, at its start.

    saved: {name: whole tensor} of a checkpoint, to go on from; None: start from the weights.
    Returns: {name: tensor}, with fsdp slices like the parameters; None where optim.average is 0.
    """
    if not cfg["optim.average"]:
        return None
    return {name: parameter.detach().clone() if saved is None else part_like(parameter, saved[name])
            for name, parameter in net.named_parameters()}


@torch.no_grad()
def update_ema(ema, net, cfg, step):
    """Move the average towards the weights, in place: ema = decay * ema + (1 - decay) * weights.

    decay = min(optim.average, (1 + step) / (10 + step)), step from 0. It is smaller at first: with a constant decay the
    first averages would be little but the weights before the training.
    """
    if ema:
        decay = min(cfg["optim.average"], (1 + step) / (10 + step))
        pairs = [(own_part(ema[name]), own_part(parameter)) for name, parameter in net.named_parameters()]
        torch._foreach_lerp_(*map(list, zip(*pairs)), 1 - decay)  # a few kernels on a device instead of hundreds


@contextlib.contextmanager
def ema_weights(net, ema):
    """Within this context the network has the averaged weights; without an average (None), its own."""
    own = {name: parameter.detach().clone() for name, parameter in net.named_parameters()} if ema else {}
    try:
        put_weights(net, ema)
        yield net
    finally:
        put_weights(net, own)


@torch.no_grad()
def put_weights(net, weights):
    """Copy {name: tensor} into the network's parameters; nothing where there are none."""
    if weights:
        pairs = [(own_part(parameter), own_part(weights[name])) for name, parameter in net.named_parameters()]
        torch._foreach_copy_(*map(list, zip(*pairs)))
