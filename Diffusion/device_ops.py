"""Operations in a form that is faster on accelerators; results equal those of the plain form up to rounding.

The plain form is in the code that uses each operation; a CPU runs it, and the tests compare with it. An accelerator
differs in two respects. It has a hundred processors, most of which a norm of two groups leaves idle. And its autocast
computes norms and upsampling in float32, so that every block would write and keep activations twice as large.
"""
import functools
import importlib
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from Runtime.errors import first_line

# "as on a device": None: as the device of a tensor is. True: where a CPU counts what a device would do
# (Diffusion/fake_device.py). False: to measure what it gains. "kernels": whether Triton's are used where they work.
# "held": a list while a graph is recorded, see `constant`.
SETTINGS = {"as on a device": None, "kernels": True, "held": None}


def accelerated(x):
    """Whether an operation on x uses the code for accelerators."""
    wanted = SETTINGS["as on a device"]
    return (x.device.type != "cpu" if wanted is None else wanted)


def kernels_for(x):
    """Diffusion/kernels.py if an operation on x can use its kernels, else None."""
    if not (accelerated(x) and SETTINGS["kernels"]) or x.device.type not in ("cuda", "xpu") or x.dtype == torch.float64:
        return None
    if x.device.index != torch.get_device_module(x.device).current_device():  # the one that Triton launches on
        return None
    return working_kernels(x.device.type)


@functools.cache
def working_kernels(device_type):
    """Diffusion/kernels.py if it works on such a device. Otherwise print the reason and return None.

    Triton is part of torch for CUDA, ROCm and XPU; it needs a C compiler on the machine where it runs.
    """
    try:
        kernels = importlib.import_module(f"{__package__}.kernels")
        kernels.try_out(device_type)
    # Training continues, more slowly.
    except (ImportError, AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        print("kernels: using torch's operations, because the Triton kernels do not work here "
              f"({type(error).__name__}: {first_line(error)[:200]})", file=sys.stderr)
        return None
    return kernels


# ---------------------------------------------------------------------------------------------------------------------
# Constants and small systems, without waiting for the device
# ---------------------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=512)
def _computed_once(function, *arguments):
    return function(*arguments)


def constant(function, *arguments, device):
    """function(*arguments, device), a small tensor that depends on nothing else: an accelerator computes it once.

    A step needs the same few constants a hundred times. A recorded graph (Diffusion/graphs.py) reads them at the same
    address in each replay, so it must keep them alive: SETTINGS["held"] collects those used during its recording. A
    value computed during a recording is not cached, since it exists only once the graph is replayed; nor is one
    computed in inference mode, since autograd cannot use it.
    """
    device = torch.device(device or "cpu")
    if device.type not in ("cuda", "xpu") or torch.is_inference_mode_enabled():
        return function(*arguments, device)
    held = SETTINGS["held"]
    if held is None:
        return _computed_once(function, *arguments, device)
    before = _computed_once.cache_info().misses
    value = _computed_once(function, *arguments, device)
    if _computed_once.cache_info().misses > before:
        _computed_once.cache_clear()  # a miss: the value exists only once the graph is replayed
    held.append(value)
    return value


class SolvePositive(torch.autograd.Function):
    """X = A^-1 B for symmetric positive definite A (B, n, n), n of a few, and right sides B (B, n, m).

    torch.linalg.solve asks the device whether A was singular, and the host waits for the answer. Gauss-Jordan
    elimination needs no pivots where A is positive definite. dL/dB = A^-1 dL/dX, dL/dA = -dL/dB X^T.
    """

    @staticmethod
    def forward(ctx, matrix, right):
        n = matrix.shape[-1]
        rows = torch.cat([matrix, torch.eye(n, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)], dim=-1)
        for k in range(n):
            pivot = rows[:, k:k + 1] / rows[:, k:k + 1, k:k + 1]                            # (B, 1, 2 n)
            rows = torch.baddbmm(rows, rows[:, :, k:k + 1], pivot, alpha=-1)                # (B, n, 2 n)
            rows[:, k:k + 1] = pivot
        inverse = rows[:, :, n:]                                                            # (B, n, n)
        solution = inverse @ right                                                          # (B, n, m)
        ctx.save_for_backward(inverse, solution)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inverse, solution = ctx.saved_tensors
        by_right = inverse.transpose(1, 2) @ grad                                           # (B, n, m)
        return -by_right @ solution.transpose(1, 2), by_right


# ---------------------------------------------------------------------------------------------------------------------
# Weights in bfloat16, of a module that several passes share
# ---------------------------------------------------------------------------------------------------------------------

class InPasses(torch.autograd.Function):
    """Casts weights for several passes in one operation, as autocast would. The backward pass sums their gradients over
    the passes and casts the sums back, also in one operation each."""

    @staticmethod
    def forward(ctx, count, dtype, *weights):
        """Returns: the cast weights, once for each pass: separate tensors in the same memory."""
        ctx.set_materialize_grads(False)
        ctx.size, ctx.dtype = len(weights), weights[0].dtype
        return tuple(weight.detach() for weights in [_in_type(weights, dtype)] * count for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        passes = [grads[first:first + ctx.size] for first in range(0, len(grads), ctx.size)]
        first, *others = [one for one in passes if one[0] is not None]  # a detached pass has none
        for other in others:
            first = torch._foreach_add(first, other)
        return None, None, *_in_type(first, ctx.dtype)


def _in_type(tensors, dtype):
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def weights_in_passes(module, count):
    """A module's weights for each of `count` passes: a list of {name: tensor} for torch.func.functional_call. Those of
    linear layers are bfloat16. None if FSDP shards the module."""
    weights, lowered = dict(module.named_parameters()), {}
    if any(hasattr(value, "full_tensor") for value in weights.values()):
        return None
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            lowered.update({f"{name}.{own}": weights.pop(f"{name}.{own}") for own, _ in layer.named_parameters()})
    values = []
    for dtype, of_type in ((torch.bfloat16, lowered), (torch.float32, weights)):
        results = InPasses.apply(count, dtype, *of_type.values())
        values.append([results[first:first + len(of_type)] for first in range(0, len(results), len(of_type))])
    return [dict(zip([*lowered, *weights], [*one, *other])) for one, other in zip(*values)]


# ---------------------------------------------------------------------------------------------------------------------
# Products over channels, and along an axis
# ---------------------------------------------------------------------------------------------------------------------

def in_float32(layer, x):
    """layer(x), on an accelerator in float32 even under autocast: casting so small an x takes as long as the layer."""
    if not accelerated(x):
        return layer(x)
    with torch.autocast(x.device.type, enabled=False):
        return layer(x.float())


def product_over_channels(x, weight, bias=None):
    """A 1x1x1 convolution with a weight gradient that uses all processors of a device.

    That gradient is a sum over all voxels. A convolution or one long product takes it on a few processors (27 ms at
    2 x 128^3 x 16 in float32 on an H200); here each plane has a product of its own, and their results are added.

    x: (B, C, *spatial), which may have more channels than weight: zeros, that make C a multiple of 8. weight:
    (K, C, ...). bias: (K,) or None. Returns: (B, *spatial, K), channels last.
    """
    x = x.movedim(1, -1)                                                                # (B, *spatial, C)
    planes = x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])                        # (B D, H W, C)
    if x.shape[-1] > weight.shape[1]:
        weight = F.pad(weight.flatten(1), [0, x.shape[-1] - weight.shape[1]])           # (K, C)
    weight = weight.flatten(1).T.expand(len(planes), -1, -1)                            # (B D, C, K)
    product = torch.bmm(planes, weight) if bias is None else torch.baddbmm(bias, planes, weight)    # (B D, H W, K)
    return product.view(*x.shape[:-1], -1)


def product_along(x, matrix, axis):
    """The product of a matrix (m, n) with every line of x along an axis, of n values each, which become m."""
    if axis == x.dim() - 1:
        return x @ matrix.T
    product = matrix @ x.flatten(axis + 1).flatten(0, axis - 1)
    return product.view(*x.shape[:axis], len(matrix), *x.shape[axis + 1:])


# ---------------------------------------------------------------------------------------------------------------------
# Linear interpolation
# ---------------------------------------------------------------------------------------------------------------------

def interpolation_matrix(old, new, align_corners, dtype, device):
    """(new, old) matrix M such that M x is x, of `old` values, interpolated linearly at `new` places.

    Each row has the values at its place of the hat functions max(1 - |place - k|, 0) of k = 0 .. old - 1. The places
    are those of F.interpolate, outside of which it repeats the border.
    """
    places = torch.arange(new, dtype=torch.float32, device=device)
    if align_corners:
        places = places * ((old - 1) / max(new - 1, 1))
    else:
        places = ((places + 0.5) * (old / new) - 0.5).clamp(0, old - 1)
    return (1 - (places[:, None] - torch.arange(old, device=device)).abs()).clamp(min=0).to(dtype)


def interpolate_by_products(x, size, align_corners):
    """F.interpolate(x, size, mode="trilinear" or "bilinear"), as one product with a banded matrix along each axis.

    The backward pass of F.interpolate adds with atomics: slowly where many fine voxels share a coarse one, and in
    another order each time. Products have a fixed order, and are what the device is made for. In bf16 they keep bf16.

    x: (B, C, *spatial), of either memory format, which the result has too. size: N voxels.
    """
    b, c = x.shape[:2]
    channels_last, kernels = c > 1 and x.movedim(1, -1).is_contiguous(), kernels_for(x)
    if kernels and kernels.interpolates(x, size):
        if channels_last:
            return kernels.Interpolate.apply(x.movedim(1, -1), 1, tuple(size), align_corners).movedim(-1, 1)
        return kernels.Interpolate.apply(x.contiguous(), 2, tuple(size), align_corners)
    x = x.movedim(1, -1) if channels_last else x.flatten(0, 1)                  # (B, *spatial, C) or (B C, *spatial)
    for axis, new in enumerate(size, 1):
        matrix = constant(interpolation_matrix, x.shape[axis], new, align_corners, x.dtype, device=x.device)
        x = product_along(x, matrix, axis)
    return x.movedim(-1, 1) if channels_last else x.view(b, c, *size)


# ---------------------------------------------------------------------------------------------------------------------
# Group norm, modulation and activation
# ---------------------------------------------------------------------------------------------------------------------

class NormModulateActivate(torch.autograd.Function):
    """y = LeakyReLU((1 + scale) x GroupNorm(x) + shift): two passes over x, in its own precision.

    Of each sample and channel only sums are taken, in float32, by reductions that use the whole device. All that stands
    around them is then one factor and one offset for each sample and channel:

        mean, var    of a group, from sum x and sum x^2 of its channels;  r = (var + eps)^-1/2
        z = a x + b  with k = (1 + scale) weight, a = k r, b = (1 + scale) bias + shift - a mean
        y = z where z > 0, slope x z elsewhere

    and with g = dL/dz, s1 = sum g, s2 = r (sum g x - mean s1) of a channel, n voxels in a group's channels,

        dL/dx = a g - r (m1 + m2 xhat)   with m1 = sum of k s1 / n, m2 = sum of k s2 / n over a group's channels,
                                         xhat = r (x - mean)
        dL/dshift = s1,  dL/dscale = weight s2 + bias s1,
        dL/dweight = sum over samples of (1 + scale) s2,  dL/dbias = sum over samples of (1 + scale) s1

    x: (B, C, *spatial). groups, eps, weight, bias: of the norm. scale, shift: (B, C). slope: of the activation.
    Kept for the backward pass are x and y only, both of which the neighbouring convolutions keep anyway.
    """

    @staticmethod
    def forward(ctx, x, groups, eps, weight, bias, scale, shift, slope):
        with torch.autocast(x.device.type, enabled=False):
            axes, per_voxel = tuple(range(2, x.dim())), (*x.shape[:2], *[1] * (x.dim() - 2))
            exact, dtype = torch.promote_types(x.dtype, torch.float32), scale.dtype
            scale, shift = scale.to(exact), shift.to(exact)                                     # (B, C) each
            mean = over_groups(x.sum(axes, dtype=exact), groups, x)                             # (B, C)
            # Row by row first: one long sum would lose digits that var, a difference, needs.
            squares = torch.linalg.vector_norm(x, dim=-1, dtype=exact).square().sum(axes[:-1])  # (B, C)
            var = (over_groups(squares, groups, x) - mean.square()).clamp(min=0)                # (B, C)
            rstd = (var + eps).rsqrt()                                                          # (B, C)
            factor = (1 + scale) * weight * rstd                                                # (B, C)
            offset = (1 + scale) * bias + shift - factor * mean                                 # (B, C)
            y = torch.empty_like(x)
            torch.addcmul(offset.view(per_voxel), x, factor.view(per_voxel), out=y)             # (B, C, *spatial)
            F.leaky_relu_(y, slope)
        ctx.save_for_backward(x, y, weight, bias, scale, mean, rstd)
        ctx.groups, ctx.slope, ctx.dtype = groups, slope, dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, y, weight, bias, scale, mean, rstd = ctx.saved_tensors
        axes, per_voxel = tuple(range(2, x.dim())), (*x.shape[:2], *[1] * (x.dim() - 2))
        # The activation keeps the sign, so that its result says where its slope is 1.
        grad = torch.ops.aten.leaky_relu_backward(grad, y, ctx.slope, True)                     # (B, C, *spatial)
        s1 = grad.sum(axes, dtype=rstd.dtype)                                                   # (B, C)
        s2 = rstd * ((grad * x).sum(axes, dtype=rstd.dtype) - mean * s1)                        # (B, C)
        k = (1 + scale) * weight                                                                # (B, C)
        m1, m2 = over_groups(k * s1, ctx.groups, x), over_groups(k * s2, ctx.groups, x)         # (B, C)
        by_x = -rstd.square() * m2                                                              # (B, C)
        constant = -rstd * m1 - by_x * mean                                                     # (B, C)
        grad_x = torch.empty_like(x)
        torch.addcmul(constant.view(per_voxel), x, by_x.view(per_voxel), out=grad_x)            # (B, C, *spatial)
        grad_x.addcmul_(grad, (k * rstd).view(per_voxel))
        modulated = 1 + scale
        return (grad_x, None, None, (modulated * s2).sum(0), (modulated * s1).sum(0),
                (weight * s2 + bias * s1).to(ctx.dtype), s1.to(ctx.dtype), None)


def over_groups(sums, groups, x):
    """Means over the groups of a norm, from sums over the voxels of each channel. sums: (B, C). Returns: (B, C)."""
    b, c = sums.shape
    means = sums.view(b, groups, c // groups).mean(2, keepdim=True) / x.shape[2:].numel()       # (B, groups, 1)
    return means.expand(b, groups, c // groups).reshape(b, c)
