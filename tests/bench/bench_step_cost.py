"""What the network and losses of a training step cost on a device, counted without one.

    python tests/bench/bench_step_cost.py [--json] [--config FILE] [--set key=value ...] [--tree FOLDER]

Forward and backward pass of each mode run on tensors without values (FakeTensor) by the rules of a device: its
autocast, its way of each operation, and Triton's kernels, which are counted instead of launched. Each operation except
views counts as one kernel (a convolution's gradient: two, and one for a bias), with the bytes that it reads and writes,
and its flops.
  copies      transposing ones: more than 8 MB written in another axis order than read
  waits       of the host for the device in a whole step: those counted here, and the seven around the passes (terms and
              norm of each mode, embeddings for the queue)
  device_ms   sum over kernels of the longest of bytes / 4.17 TB/s, flops / 784 Tflop/s (float32: 51) and 2 us, as
              measured on an H200. It is a lower bound for these operations: at 4bf4914 an H200 was busy for 375 ms.
BEFORE is what this script counted for commit 4bf4914, when it called that commit's functions differently.
"""
import argparse
import collections
import functools
import json
import sys
from pathlib import Path

COPY_BYTES, BYTES_PER_S, FLOPS_PER_S, LEAST_S, AROUND = 8e6, 4.17e12, {2: 784e12, 4: 51e12}, 2e-6, 7
BEFORE = {"kernels": 16954, "gb": 424.0, "tflop": 22.01, "waits": 11, "copies": 152, "device_ms": 136.0}
VIEWS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}


def counted_step(overrides, config):
    """{"kernels", "gb", "tflop", "waits", "copies", "device_ms"} of a step of a config, by this process's tree."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    import OM_train_3modes as om
    from Diffusion import blocks, device_ops, fields, kernels, losses, om_net
    from Diffusion.cost import stand_in
    from Diffusion.fake_device import DeviceAutocast
    from Runtime.config import load_config, modes_of
    from Runtime.global_batch import split_step
    total = collections.Counter()

    def tensors_of(values):
        return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]

    def size(tensor):
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())

    def add(read, written, flops=0, count=1, width=4):
        moved = sum(map(size, read)) + sum(map(size, written))
        total.update(kernels=count, bytes=moved, flops=flops)
        total["seconds"] += max(moved / BYTES_PER_S, flops / FLOPS_PER_S.get(width, 784e12), count * LEAST_S)

    def order(tensor):
        return sorted((axis for axis, n in enumerate(tensor.shape) if n > 1), key=lambda axis: -tensor.stride(axis))

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
            if name in ("_local_scalar_dense", "_linalg_check_errors", "nonzero"):
                total["waits"] += 1
            given, made = tensors_of((args, kwargs)), tensors_of(result)
            known = {tensor.untyped_storage()._cdata for tensor in given}
            is_view = made and not name.endswith("_") and all(t.untyped_storage()._cdata in known for t in made)
            if name in VIEWS or is_view or not made:
                return result
            flops = flop_registry.get(function.overloadpacket)
            flops = flops(*args, **(kwargs or {}), out_val=result) if flops else 0
            count = 1
            if name == "convolution_backward":
                count = sum(args[-1])
            add(given, made, flops, count, min(tensor.element_size() for tensor in made))
            if (name in ("copy_", "clone", "_to_copy") and size(made[0]) > COPY_BYTES
                    and order(given[-1] if name == "copy_" else given[0]) != order(made[0])):
                total["copies"] += 1
            return result

    class Launch:
        """A kernel of Triton's: counted, with all tensors that it is given."""

        def __getitem__(self, grid):
            return lambda *args, **constants: add(tensors_of(args), [])
    for name, value in list(vars(kernels).items()):
        if hasattr(value, "fn") and name.startswith("_"):
            setattr(kernels, name, Launch())
    for module in (device_ops, blocks, om_net):
        module.kernels_for = lambda x: kernels if device_ops.accelerated(x) else None
    # What a device computes once and keeps, here within this count. (Older trees have no `constant`.)
    keep = functools.cache(lambda function, *arguments: function(*arguments))
    for module in (device_ops, blocks, fields, losses, om_net):
        if hasattr(module, "constant"):
            module.constant = lambda function, *arguments, device: keep(function, *arguments, torch.device("cpu"))
    for module, name in ((device_ops, "interpolation_matrix"), (fields, "_side_lengths")):
        if hasattr(module, name):
            setattr(module, name, functools.cache(getattr(module, name)))
    # A convolution without values keeps channels last only where this processor computes its precision.
    backend = torch._C._select_conv_backend
    torch._C._select_conv_backend = lambda x, *more, **named: (
        torch._C._ConvBackend.Mkldnn if x.dtype == torch.bfloat16 else backend(x, *more, **named))
    cfg = load_config(config, [*overrides, "run.amp=bf16"])
    with FakeTensorMode(), DeviceAutocast() as rules:
        net, loss_of = stand_in(cfg, split_step(cfg, 1).pair_batch, 1)
        modes = modes_of(cfg, om.MODES)
        for mode in modes:
            loss_of(mode)  # what is kept
        total.clear()
        rules.cast_weights.clear()
        for mode in modes:
            with Count():
                loss_of(mode).backward()
            net.zero_grad(set_to_none=True)
    return {"kernels": total["kernels"], "gb": round(total["bytes"] / 1e9, 1), "tflop": round(total["flops"] / 1e12, 2),
            "waits": total["waits"] + AROUND, "copies": total["copies"],
            "device_ms": round(1e3 * total["seconds"], 1)}


def main():
    parser = argparse.ArgumentParser(description="What network and losses of a step cost a device, counted.")
    parser.add_argument("--config", default="config_om.yaml", help="(%(default)s)")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--tree", default=Path(__file__).resolve().parent.parent.parent, type=Path, metavar="FOLDER",
                        help="the checkout whose code is counted (default: this one)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON only")
    args = parser.parse_args()
    sys.path.insert(0, str(args.tree))
    found = {"before": BEFORE, "now": counted_step(args.overrides, args.config)}
    if not args.json:
        for name in found["now"]:
            print(f"{name:>10} {found['before'][name]:>10} {found['now'][name]:>10}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
