"""CUDA graphs: forward and backward pass of a mode, recorded once and replayed (run.graphs).

A step of config_om starts thousands of operations, and the host takes longer to start them than the device to do
them. A graph starts all those of a pass at once. It replays the recorded operations at the recorded places in memory,
so a mode is recorded only where all of its batches have the same shapes, on one rank and a CUDA device.

The first calls of a mode run in the plain way, which creates compiled kernels, cuDNN's plans and constants. The next
call records, and compares loss and gradient of the graphs with those of the plain way on the same batch. If recording
fails or the two differ, one sentence reports it and the plain way is kept.
"""
import sys

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from Diffusion import device_ops
from Runtime.errors import first_line

WARM_UP = 2       # plain calls of each mode before it is recorded
TOLERANCE = 0.05  # of the loss, and of the gradient's norm: some operations add in another order each time


def new_graphs(cfg, device, ranks):
    """The graphs of a run, which `run` fills, or None if the run is to have none: see run.graphs.

    Batches with masks or label maps use the plain way, because their contents vary from batch to batch.
    """
    plain = cfg["run.graphs"] == "off" or cfg["loss.dice"] or cfg["registration.masks"]
    if plain or device.type != "cuda" or torch.version.hip or ranks.world_size > 1 or cfg["run.strategy"] == "fsdp":
        return None
    return {"calls": {}, "recorded": {}, "pool": None}


def run(graphs, name, function, batch, parameters=()):
    """function(batch), by its graphs once they are recorded.

    graphs: of `new_graphs`; None for the plain way. name: of the function in this run. function: of a batch, a dict of
    tensors, nested; it returns tensors, nested; with parameters the first is the loss. Nothing that it
    returns is overwritten by the next call. parameters: by which the loss is differentiated; without any nothing is.
    """
    if graphs is None:
        return function(batch)
    calls = graphs["calls"][name] = graphs["calls"].get(name, 0) + 1
    if calls == WARM_UP + 1:
        graphs["recorded"][name] = recorded_or_none(graphs, name, function, batch, list(parameters))
    recorded = graphs["recorded"].get(name)
    return recorded.replay(batch) if recorded and recorded.takes(batch) else function(batch)


def recorded_or_none(graphs, name, function, batch, parameters):
    """The graphs of a function, or None after a sentence with the reason."""
    try:
        plain = loss_and_gradient(function(batch), parameters)
        if not plain[0].isfinite().all():  # nothing to compare with: the next batch is as good
            graphs["calls"][name] -= 1
            return None
        recorded = Recorded(function, batch, parameters, graphs["pool"])
        difference = recorded.difference(batch, *plain)
    except RuntimeError as error:  # what a graph cannot hold, or memory
        torch.cuda.synchronize()
        print(f"graphs: {name} runs operation by operation, because recording it failed ({type(error).__name__}: "
              f"{first_line(error)[:200]})", file=sys.stderr)
        return None
    if not difference <= TOLERANCE:
        print(f"graphs: {name} runs operation by operation, because its graphs differ from it by {difference:.2g}",
              file=sys.stderr)
        return None
    graphs["pool"] = graphs["pool"] or recorded.forward.pool()
    del plain
    torch.cuda.empty_cache()  # of the plain way, which no step takes any more
    return recorded


def loss_and_gradient(result, parameters):
    """The first tensor of a result, detached, and its gradient by the parameters, if any."""
    first = tree_flatten(result)[0][0]
    gradient = torch.autograd.grad(first, parameters, allow_unused=True) if parameters else []
    return first.detach(), gradient


def relative(one, other):
    """How far one list of tensors is from another, as a share of the other's length."""
    pairs = [(a, b) for a, b in zip(one, other) if b is not None]
    if any((a is None) != (b is None) for a, b in zip(one, other)):
        return float("inf")
    if not pairs:
        return 0.0
    length = torch.stack([b.float().norm() for _, b in pairs]).norm().item()
    distance = torch.stack([(a.float() - b.float()).norm() for a, b in pairs]).norm().item()
    return distance / length if length else distance


class Recorded:
    """A function of a batch as one graph, and its backward pass as another, which share their memory."""

    def __init__(self, function, batch, parameters, pool):
        self.parameters, self.held = parameters, []
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph() if parameters else None
        values, self.structure = tree_flatten(batch)
        self.given = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        device_ops.SETTINGS["held"] = self.held
        # Other threads load and save meanwhile, which is no part of this.
        how = {"pool": pool, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(self.forward, **how):
                result = function(tree_unflatten(self.given, self.structure))
                results, self.result_structure = tree_flatten(result)
                self.results = [value.detach() for value in results]
            if parameters:
                self.by_loss = torch.ones_like(self.results[0])
                how["pool"] = self.forward.pool()
                with torch.cuda.graph(self.backward, **how):
                    self.gradient = torch.autograd.grad(results[0], parameters, self.by_loss, allow_unused=True)
        finally:
            device_ops.SETTINGS["held"] = None

    def takes(self, batch):
        """Whether a batch is like the recorded one: its structure, its shapes, and whatever in it is no tensor."""
        values, structure = tree_flatten(batch)
        return structure == self.structure and all(
            isinstance(value, torch.Tensor) and value.shape == own.shape and value.dtype == own.dtype
            if isinstance(own, torch.Tensor) else value == own for value, own in zip(values, self.given))

    def replay(self, batch):
        """What the function returns for a batch. The loss has its backward pass."""
        for value, own in zip(tree_flatten(batch)[0], self.given):
            if isinstance(own, torch.Tensor):
                own.copy_(value)
        if not self.parameters:
            self.forward.replay()
            return tree_unflatten([value.clone() for value in self.results], self.result_structure)
        loss = Replayed.apply(self, *self.parameters)
        return tree_unflatten([loss, *[value.clone() for value in self.results[1:]]], self.result_structure)

    def difference(self, batch, loss, gradient):
        """How far loss and gradient of a replay are from those given, the larger of the two relative distances."""
        replayed, by_graph = loss_and_gradient(self.replay(batch), self.parameters)
        return max(relative([replayed], [loss]), relative(by_graph, gradient))


class Replayed(torch.autograd.Function):
    """The loss of a recorded function. Its gradient is overwritten by the next backward pass."""

    @staticmethod
    def forward(ctx, recorded, *parameters):
        ctx.recorded = recorded
        recorded.forward.replay()
        return recorded.results[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recorded = ctx.recorded
        recorded.by_loss.copy_(grad)
        recorded.backward.replay()
        return None, *[None if value is None else value.detach() for value in recorded.gradient]
