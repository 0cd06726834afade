"""The learning rate over a run, and the moving average of the weights with which registration and augmentation work."""
import contextlib
import math

import torch

from Diffusion.sharding import part_like


def learning_rate(cfg, step, done):
    """The learning rate of one step: linear over optim.warmup_steps, then constant or half a cosine down to zero.

    step: from 0. done: the share of the run, by epochs, at whose end the cosine is zero. Steps would not do: how many
    an epoch has changes with the samples of a step and with the data set.
    """
    rate = cfg["optim.lr"] * min((step + 1) / max(cfg["optim.warmup_steps"], 1), 1.0)
    if cfg["optim.schedule"] == "cosine":
        rate *= 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))
    return rate


def new_ema(net, cfg, saved=None):
    """The moving average {name: tensor} of a network's parameters, sliced as they are; None where optim.average is 0.

    saved: the whole average of a checkpoint, to go on from; otherwise it starts from the weights.
    """
    if not cfg["optim.average"]:
        return None
    return {name: parameter.detach().clone() if saved is None else part_like(parameter, saved[name]).clone()
            for name, parameter in net.named_parameters()}


@torch.no_grad()
def update_ema(ema, net, cfg, step):
    """Move the average towards the weights after step `step` (from 0): by 1 - optim.average, more in the first steps.

    With a constant weight the first averages would consist of the weights before the training.
    """
    if ema:
        decay = min(cfg["optim.average"], (1 + step) / (10 + step))
        for name, parameter in net.named_parameters():
            ema[name].lerp_(parameter, 1 - decay)


@contextlib.contextmanager
def ema_weights(net, ema):
    """Within it, the network has the averaged weights; without an average, its own."""
    own = {name: parameter.detach().clone() for name, parameter in net.named_parameters()} if ema else {}
    try:
        put_weights(net, ema)
        yield net
    finally:
        put_weights(net, own)


@torch.no_grad()
def put_weights(net, weights):
    for name, parameter in net.named_parameters() if weights else ():
        parameter.copy_(weights[name])
