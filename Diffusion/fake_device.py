"""Makes a CPU behave like an accelerator in two ways, to count its memory on tensors without values.

Autocast follows other rules on CUDA, ROCm and XPU devices and so keeps more: it computes layer norms, powers and sums
in float32. `DeviceAutocast` applies these rules on any machine, and makes Diffusion/device_ops.py behave as on a
device. `AliveBytes` counts what is alive after each operation, as the allocator of a device does.
"""
import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from Diffusion import device_ops

# Autocast's lists for CUDA, which XPU shares, by the names under which Python calls the functions. (PyTorch's reference
# of torch.amp, "CUDA Ops that can autocast to float16", "to float32", "that promote to the widest input type".)
TO_BFLOAT16 = set("""
    __matmul__ __rmatmul__ addbmm addmm addmv baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d linear matmul mm mv prelu scaled_dot_product_attention""".split())
TO_FLOAT32 = set("""
    __pow__ __rpow__ acos asin binary_cross_entropy_with_logits cdist cosh cosine_similarity cross_entropy cumprod
    cumsum dist exp expm1 group_norm huber_loss interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax
    logsumexp mse_loss nll_loss norm pow prod reciprocal renorm rsqrt sinh smooth_l1_loss softmax softplus sum
    tan""".split())
TO_WIDEST = set("""
    addcdiv addcmul atan2 bilinear cat cross dot grid_sample index_put scatter_add stack tensordot""".split())
HALVES = (torch.float32, torch.bfloat16)


class DeviceAutocast(TorchFunctionMode):
    """Within torch.autocast("cpu"), cast as torch.autocast("cuda") or ("xpu") would."""

    def __init__(self):
        super().__init__()
        self.cast_weights = {}  # as autocast does, each weight is cast once
        self.depth = 0          # the mode is entered again for a backward pass

    def __enter__(self):
        self.depth += 1
        device_ops.SETTINGS["as on a device"] = True
        return super().__enter__()

    def __exit__(self, *error):
        self.depth -= 1
        device_ops.SETTINGS["as on a device"] = True if self.depth else None
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function in (torch.Tensor.backward, torch.autograd.backward):
            return self.run_backward(args[0])  # recomputes checkpointed parts by the same rules
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        dtype = torch.bfloat16 if name in TO_BFLOAT16 else torch.float32 if name in TO_FLOAT32 else None
        if name in TO_WIDEST and any(isinstance(x, torch.Tensor) and x.dtype == torch.float32
                                     for x in tree_leaves((args, kwargs))):
            dtype = torch.float32
        with torch.autocast("cpu", enabled=False):
            if dtype:
                args, kwargs = tree_map_only(torch.Tensor, lambda x: self.cast(x, dtype), (args, kwargs))
            return function(*args, **kwargs)

    def cast(self, x, dtype):
        if x.dtype == dtype or x.dtype not in HALVES:
            return x
        if not isinstance(x, torch.nn.Parameter):  # the id of a temporary tensor may be used again
            return x.to(dtype)
        key = id(x), torch.is_grad_enabled()
        if key not in self.cast_weights:
            self.cast_weights[key] = x.to(dtype)
        return self.cast_weights[key]

    def run_backward(self, losses):
        losses = losses if isinstance(losses, tuple) else (losses,)
        self.cast_weights.clear()
        with self:  # a mode is off while it handles a function
            torch.autograd.graph._engine_run_backward(losses, tuple(map(torch.ones_like, losses)), False, False, (),
                                                      allow_unreachable=True, accumulate_grad=True)
        self.cast_weights.clear()


class AliveBytes(TorchDispatchMode):
    """Counts the bytes that operations return, each storage once, until it is freed: `now` and `peak`."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.add(value.untyped_storage())
        return result

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, key, size)

    def remove(self, key, size):
        self.known.discard(key)
        self.now -= size
