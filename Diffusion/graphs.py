"""CUDA graphs: the passes of a mode, recorded once and replayed (run.graphs).

In the registration of a pair, a comparison of the affine part and a step of the refinement are recorded instead.

A training step of config_om launches thousands of operations, and the host takes longer to launch them than the device
to run them. A graph launches a whole pass at once. It replays the recorded operations at the recorded memory addresses,
so all batches must have the same shapes, on one rank and a CUDA device.

The first calls of a function run eagerly, which compiles kernels and creates cuDNN plans and constants. The next call
records the graphs, and compares their first result, such as the loss, and its gradient with the eager ones on the same
batch. If recording fails or the two differ, one sentence reports it and the function stays eager.
"""
import sys
import threading

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from Diffusion import device_ops
from Runtime.errors import first_line

WARM_UP = 2       # eager calls of a function before it is recorded
IN_NO_PAIR = set()  # names that could not be recorded in one pair of this process, so that no other pair tries
TOLERANCE = 0.05  # of the result, and of the gradient's norm: some operations sum in another order each time


def new_graphs(cfg, device, ranks):
    """The empty set of graphs of a training, or None to run eagerly; see `graphs_on`.

    Batches with masks or label maps run eagerly, because their contents vary from batch to batch.
    """
    plain = cfg["loss.dice"] or cfg["registration.masks"] or ranks.world_size > 1 or cfg["run.strategy"] == "fsdp"
    return None if plain else graphs_on(device, cfg["run.graphs"])


def graphs_on(device, wanted, given_up=None):
    """An empty set of graphs that `run` fills, or None if `wanted` (run.graphs), the device or the thread allows none.

    torch records one graph at a time, on the current device: only the main thread records. given_up: set of names that
    are no longer recorded, shared between several sets of graphs.
    """
    if wanted == "off" or device.type != "cuda" or torch.version.hip:
        return None
    if device.index not in (None, torch.cuda.current_device()) or threading.current_thread() != threading.main_thread():
        return None
    return {"calls": {}, "recorded": {}, "pool": None, "given_up": set() if given_up is None else given_up}


def run(graphs, name, function, batch, parameters=()):
    """function(batch), replayed from its graphs once they are recorded.

    graphs: from `graphs_on`; None to run eagerly. name: of the function, in sentences. function: maps a batch, a nested
    dict of tensors, to nested tensors; with parameters the first is the loss. The next call overwrites none of them.
    parameters: to differentiate the loss by; without any, nothing is differentiated.
    """
    if graphs is None or name in graphs["given_up"]:
        return function(batch)
    calls = graphs["calls"][name] = graphs["calls"].get(name, 0) + 1
    if calls == WARM_UP + 1:
        graphs["recorded"][name] = recorded_or_none(graphs, name, function, batch, list(parameters))
    recorded = graphs["recorded"].get(name)
    return recorded.replay(batch) if recorded and recorded.takes(batch) else function(batch)


def recorded_or_none(graphs, name, function, batch, parameters):
    """The graphs of a function. None if they fail, which is printed, or if the loss is not finite, which is retried."""
    stream = torch.cuda.current_stream()
    try:
        plain = loss_and_gradient(function(batch), parameters)
        if not plain[0].isfinite().all():  # nothing to compare with: try the next batch
            graphs["calls"][name] -= 1
            return None
        recorded = Recorded(function, batch, parameters, graphs["pool"])
        difference = recorded.difference(batch, *plain)
    except RuntimeError as error:  # an operation that graphs cannot hold, or lack of memory
        torch.cuda.set_stream(stream)  # a recording that failed leaves its own behind
        torch.cuda.synchronize()
        graphs["given_up"].add(name)
        print(f"graphs: {name} runs operation by operation, because recording it failed ({type(error).__name__}: "
              f"{first_line(error)[:200]})", file=sys.stderr)
        return None
    if not difference <= TOLERANCE:
        graphs["given_up"].add(name)
        print(f"graphs: {name} runs operation by operation, because its graphs differ from it by {difference:.2g}",
              file=sys.stderr)
        return None
    graphs["pool"] = graphs["pool"] or recorded.forward.pool()
    del plain
    if parameters:
        torch.cuda.empty_cache()  # of eager execution, which no step uses any more
    return recorded


def loss_and_gradient(result, parameters):
    """The first tensor of a result, detached, and its gradient by the parameters, if any."""
    first = tree_flatten(result)[0][0]
    gradient = torch.autograd.grad(first, parameters, allow_unused=True) if parameters else []
    return first.detach(), gradient


def relative(one, other):
    """Distance of one list of tensors from another, relative to the norm of the other."""
    pairs = [(a, b) for a, b in zip(one, other) if b is not None]
    if any((a is None) != (b is None) for a, b in zip(one, other)):
        return float("inf")
    if not pairs:
        return 0.0
    length = torch.stack([b.float().norm() for _, b in pairs]).norm().item()
    distance = torch.stack([(a.float() - b.float()).norm() for a, b in pairs]).norm().item()
    return distance / length if length else distance


class Recorded:
    """A function of a batch as one graph, and its backward pass as another; they share memory."""

    def __init__(self, function, batch, parameters, pool):
        self.parameters, self.held = parameters, []
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph() if parameters else None
        values, self.structure = tree_flatten(batch)
        self.given = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        device_ops.SETTINGS["held"] = self.held
        # Other threads load and save meanwhile; they must not be captured.
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
        """Whether a batch matches the recorded one: structure, shapes, dtypes, and values that are no tensors."""
        values, structure = tree_flatten(batch)
        return structure == self.structure and all(
            isinstance(value, torch.Tensor) and value.shape == own.shape and value.dtype == own.dtype
            if isinstance(own, torch.Tensor) else value == own for value, own in zip(values, self.given))

    def replay(self, batch):
        """The results of the function for a batch. The loss can be differentiated."""
        for value, own in zip(tree_flatten(batch)[0], self.given):
            if isinstance(own, torch.Tensor):
                own.copy_(value)
        if not self.parameters:
            self.forward.replay()
            return tree_unflatten([value.clone() for value in self.results], self.result_structure)
        loss = Replayed.apply(self, *self.parameters)
        return tree_unflatten([loss, *[value.clone() for value in self.results[1:]]], self.result_structure)

    def difference(self, batch, loss, gradient):
        """The larger of the relative distances of a replay's loss and gradient from those given."""
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
