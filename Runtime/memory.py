"""What a step costs: floating-point operations and memory, counted without doing the work; and cache hygiene."""
import gc

import torch
from torch.utils.flop_counter import FlopCounterMode


def empty_cache(cfg, device):
    """Between modes, where run.empty_cache asks for it: collect garbage and return cached blocks to the driver."""
    if cfg["run.empty_cache"]:
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def count_costs(loss_function, network):
    """Cost of one forward and backward pass of a mode, without doing it: call under torch's FakeTensorMode.

    loss_function: builds the loss from scratch. network: its weights are not counted as activations.
    Returns: (floating-point operations of matrix products, convolutions and attention; bytes of the activations that
    the forward pass keeps for the backward pass, each storage counted once).
    """
    own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # holding it keeps its address from being used again
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_function()
        loss.backward()
    return counter.get_total_flops(), sum(storage.nbytes() for storage in kept.values())


def weights_and_optimizer_bytes(network):
    """Float32 weights, gradients and Adam's two moments."""
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
