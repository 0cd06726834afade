"""Triton kernels for the operations that take most of a device's time besides convolutions and are slow in torch.

Each has a plain way in the code that uses it, with which the tests compare it. Only `kernels_for` of
Diffusion/device_ops.py imports this module; without Triton or a C compiler it takes the plain way. All but
the gradient of the warp give the same bits each time: that one adds with atomics.

Volumes are channels last in memory: rows of C values, one for each voxel. Sums are taken in float32.
"""
import functools
import inspect
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.errors import TritonError

ELEMENTS = 2048  # that a program of the norm holds at a time
MOST_STEPS = 16  # of which it takes so many, one after the other
VOXELS = 32  # of a program of the neighbours: 3.3 ms there and back at 2 x 128^3 on an H200, with 64 or 128 5.3 ms
VOXELS_OF_UNITS = 64  # of a program of the unit vectors, and of a convolution
FEW_CHANNELS = 4
SIZES = {"voxels", "depth", "height", "width", "count", "old", "new", "taps"}  # of volumes: not compiled anew for each


def _jit(function):
    """triton.jit without specialisation on the sizes of volumes: compiling a kernel takes seconds."""
    sizes = SIZES.intersection(inspect.signature(function).parameters)
    return triton.jit(function, do_not_specialize=sorted(sizes))


# ---------------------------------------------------------------------------------------------------------------------
# Group norm, modulation and activation: the two passes of each direction
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _block(sample, first, voxels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Offsets in memory of ROWS voxels with all their channels (ROWS, CHANNELS), and which voxels exist (ROWS, 1)."""
    row = first + tl.arange(0, ROWS)
    return (sample * voxels + row[:, None]) * CHANNELS + tl.arange(0, CHANNELS)[None, :], (row < voxels)[:, None]


@triton.jit
def _added(parts, number, count, sample, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sum over the programs of a sample's parts (B, count, 2, C); number: 0 or 1, which of the two. Returns: (C,)."""
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)[:, None]
        place = ((sample * count + part) * 2 + number) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        total += tl.load(parts + place, mask=part < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _per_channel(values, number, sample, COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """values[sample, number], (C,), of values (B, COUNT, C)."""
    return tl.load(values + (sample * COUNT + number) * CHANNELS + tl.arange(0, CHANNELS))


@triton.jit
def _store_sums(parts, one, other, sample, CHANNELS: tl.constexpr):
    """Write this program's sums over its voxels to parts (B, programs, 2, C)."""
    place = parts + (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(place, tl.sum(one, 0))
    tl.store(place + CHANNELS, tl.sum(other, 0))


@triton.jit
def _sums(x, parts, voxels, STEPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums of x and x^2."""
    sample = tl.program_id(1).to(tl.int64)
    total, squares = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in range(STEPS):
        place, inside = _block(sample, (tl.program_id(0) * STEPS + step) * ROWS, voxels, ROWS, CHANNELS)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    _store_sums(parts, total, squares, sample, CHANNELS)


@triton.jit
def _group_means(sums, voxels, GROUP: tl.constexpr, CHANNELS: tl.constexpr):
    """For each channel the mean over all voxels of its group, from the sums of the channels."""
    count = 1.0 * GROUP * voxels  # an int32 would overflow at 2^28 voxels and eight channels
    means = tl.sum(tl.reshape(sums, (CHANNELS // GROUP, GROUP)), 1) / count
    return tl.reshape(tl.broadcast_to(means[:, None], (CHANNELS // GROUP, GROUP)), (CHANNELS,))


@triton.jit
def _factors(parts, count, weight, bias, scale, shift, row, statistics, voxels, eps, GROUP: tl.constexpr,
             ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """statistics (B, 4, C): mean and 1 / deviation of the group, and a and b of the map x -> a x + b."""
    sample, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    mean = _group_means(_added(parts, 0, count, sample, ROWS, CHANNELS), voxels, GROUP, CHANNELS)
    squares = _group_means(_added(parts, 1, count, sample, ROWS, CHANNELS), voxels, GROUP, CHANNELS)
    rstd = 1.0 / tl.sqrt(tl.maximum(squares - mean * mean, 0.0) + eps)
    modulated = 1.0 + tl.load(scale + sample * row + channel).to(tl.float32)
    factor = modulated * tl.load(weight + channel) * rstd
    offset = modulated * tl.load(bias + channel) + tl.load(shift + sample * row + channel).to(tl.float32)
    place = statistics + sample * 4 * CHANNELS + channel
    tl.store(place, mean)
    tl.store(place + CHANNELS, rstd)
    tl.store(place + 2 * CHANNELS, factor)
    tl.store(place + 3 * CHANNELS, offset - factor * mean)


@triton.jit
def _scaled(x, statistics, slope, y, voxels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """y = LeakyReLU(a x + b)."""
    sample = tl.program_id(1).to(tl.int64)
    place, inside = _block(sample, tl.program_id(0) * ROWS, voxels, ROWS, CHANNELS)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = value * _per_channel(statistics, 2, sample, 4, CHANNELS)[None, :]
    value += _per_channel(statistics, 3, sample, 4, CHANNELS)[None, :]
    tl.store(y + place, tl.where(value > 0, value, value * slope).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _through_activation(x, grad, statistics, slope, sample, place, inside, CHANNELS: tl.constexpr):
    """x, and the gradient by a x + b, in float32."""
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    z = value * _per_channel(statistics, 2, sample, 4, CHANNELS)[None, :]
    z += _per_channel(statistics, 3, sample, 4, CHANNELS)[None, :]
    return value, tl.where(z > 0, gradient, gradient * slope)


@triton.jit
def _gradient_sums(x, grad, statistics, slope, parts, voxels, STEPS: tl.constexpr, ROWS: tl.constexpr,
                   CHANNELS: tl.constexpr):
    """Sums of g and g x, with g the gradient behind the activation."""
    sample = tl.program_id(1).to(tl.int64)
    total, products = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS, CHANNELS), tl.float32)
    for step in range(STEPS):
        place, inside = _block(sample, (tl.program_id(0) * STEPS + step) * ROWS, voxels, ROWS, CHANNELS)
        value, gradient = _through_activation(x, grad, statistics, slope, sample, place, inside, CHANNELS)
        total += gradient
        products += gradient * value
    _store_sums(parts, total, products, sample, CHANNELS)


@triton.jit
def _gradient_factors(parts, count, statistics, weight, bias, scale, row, by_norm, by_time, voxels,
                      GROUP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """by_norm (B, 4, C): constant and factor of x in dL/dx, then dL/dweight and dL/dbias. by_time: (B, 2 C)."""
    sample, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    mean, rstd = _per_channel(statistics, 0, sample, 4, CHANNELS), _per_channel(statistics, 1, sample, 4, CHANNELS)
    s1 = _added(parts, 0, count, sample, ROWS, CHANNELS)
    s2 = rstd * (_added(parts, 1, count, sample, ROWS, CHANNELS) - mean * s1)
    modulated, weight = 1.0 + tl.load(scale + sample * row + channel).to(tl.float32), tl.load(weight + channel)
    m1 = _group_means(modulated * weight * s1, voxels, GROUP, CHANNELS)
    by_x = -rstd * rstd * _group_means(modulated * weight * s2, voxels, GROUP, CHANNELS)
    place = by_norm + sample * 4 * CHANNELS + channel
    tl.store(place, -rstd * m1 - by_x * mean)
    tl.store(place + CHANNELS, by_x)
    tl.store(place + 2 * CHANNELS, modulated * s2)
    tl.store(place + 3 * CHANNELS, modulated * s1)
    place = by_time + sample * 2 * CHANNELS + channel
    tl.store(place, (weight * s2 + tl.load(bias + channel) * s1).to(by_time.dtype.element_ty))
    tl.store(place + CHANNELS, s1.to(by_time.dtype.element_ty))


@triton.jit
def _gradient(x, grad, statistics, by_norm, slope, grad_x, voxels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """dL/dx = constant + by_x x + a g."""
    sample = tl.program_id(1).to(tl.int64)
    place, inside = _block(sample, tl.program_id(0) * ROWS, voxels, ROWS, CHANNELS)
    value, gradient = _through_activation(x, grad, statistics, slope, sample, place, inside, CHANNELS)
    result = _per_channel(statistics, 2, sample, 4, CHANNELS)[None, :] * gradient
    result += _per_channel(by_norm, 1, sample, 4, CHANNELS)[None, :] * value
    result += _per_channel(by_norm, 0, sample, 4, CHANNELS)[None, :]
    tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=inside)


def fits(x, groups):
    """Whether the kernels of the norm can take x (B, C, *spatial): channels last, C a power of two."""
    channels = x.shape[1]
    return channels & (channels - 1) == 0 and channels % groups == 0 and x.movedim(1, -1).is_contiguous()


def _cut(x):
    """How x (B, C, *spatial) is cut: voxels of a sample, and the kernels' constants."""
    return x.shape[2:].numel(), {"ROWS": max(ELEMENTS // x.shape[1], 1), "CHANNELS": x.shape[1]}


def _summed(kernel, x, *given):
    """Run a kernel that sums over voxels. Returns: the two sums of each program, (B, count, 2, C) float32; count."""
    voxels, constants = _cut(x)
    steps = MOST_STEPS if voxels * x.shape[1] > 2 ** 20 else 2
    programs = triton.cdiv(voxels, constants["ROWS"] * steps)
    parts = torch.empty(len(x), programs, 2, x.shape[1], device=x.device)
    kernel[(programs, len(x))](x, *given, parts, voxels, STEPS=steps, **constants)
    return parts, programs


def _mapped(kernel, x, *given):
    """Run a kernel that maps each value of x. Returns: a tensor with the shape, precision and memory format of x."""
    voxels, constants = _cut(x)
    result = torch.empty_like(x)
    kernel[(triton.cdiv(voxels, constants["ROWS"]), len(x))](x, *given, result, voxels, **constants)
    return result                                                                           # (B, C, *spatial)


class NormModulateActivate(torch.autograd.Function):
    """`NormModulateActivate` of Diffusion/device_ops.py (see its formulas) for an x that `fits`. Keeps only x."""

    @staticmethod
    def forward(ctx, x, groups, eps, weight, bias, scale, shift, slope):
        voxels, constants = _cut(x)
        channels = {"GROUP": x.shape[1] // groups, **constants}
        statistics = torch.empty(len(x), 4, x.shape[1], device=x.device)
        _factors[(len(x),)](*_summed(_sums, x), weight, bias, scale, shift, scale.stride(0), statistics, voxels, eps,
                            **channels)
        ctx.save_for_backward(x, weight, bias, scale, statistics)
        ctx.channels, ctx.slope = channels, slope
        return _mapped(_scaled, x, statistics, slope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, bias, scale, statistics = ctx.saved_tensors
        grad = grad.movedim(1, -1).contiguous()                                             # (B, *spatial, C)
        parts, count = _summed(_gradient_sums, x, grad, statistics, ctx.slope)              # (B, count, 2, C)
        by_norm, by_time = torch.empty_like(statistics), scale.new_empty(len(x), 2 * x.shape[1])
        _gradient_factors[(len(x),)](parts, count, statistics, weight, bias, scale, scale.stride(0), by_norm, by_time,
                                     x.shape[2:].numel(), **ctx.channels)
        grad_x = _mapped(_gradient, x, grad, statistics, by_norm, ctx.slope)                # (B, C, *spatial)
        return (grad_x, None, None, *by_norm[:, 2:].sum(0), *by_time.chunk(2, dim=1), None)


# ---------------------------------------------------------------------------------------------------------------------
# Layer norm of a sum
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _standardised(value, known, eps, WIDTH: tl.constexpr):
    """A row with mean 0 and variance 1, and what it was multiplied by."""
    centred = tl.where(known, value - tl.sum(value, 0) / WIDTH, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    return centred * factor, factor


@triton.jit
def _normed_sum(x, branch, weight, bias, total, y, eps, ADDED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """total = x + branch and y = LayerNorm(total), for the row of this program. Without ADDED x is the total."""
    column = tl.arange(0, PADDED)
    known, place = column < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + place, mask=known, other=0.0)
    if ADDED:
        value += tl.load(branch + place, mask=known, other=0.0).to(tl.float32)
        tl.store(total + place, value, mask=known)
    value, _ = _standardised(value, known, eps, WIDTH)
    value = value * tl.load(weight + column, mask=known, other=0.0) + tl.load(bias + column, mask=known, other=0.0)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=known)


@triton.jit
def _normed_sum_gradient(total, weight, by_total, by_y, by_x, by_branch, parts, rows, eps, STEPS: tl.constexpr,
                         ADDED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Gradients by x and branch of STEPS rows, and their share of those by weight and bias: parts (programs, 2, C)."""
    column = tl.arange(0, PADDED)
    factors = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    by_weight, by_bias = tl.zeros((PADDED,), tl.float32), tl.zeros((PADDED,), tl.float32)
    for step in range(STEPS):
        row = tl.program_id(0).to(tl.int64) * STEPS + step
        known, place = (column < WIDTH) & (row < rows), row * WIDTH + column
        normed, factor = _standardised(tl.load(total + place, mask=known, other=0.0), known, eps, WIDTH)
        gradient = tl.load(by_y + place, mask=known, other=0.0).to(tl.float32)
        by_weight += gradient * normed
        by_bias += gradient
        gradient *= factors
        along = tl.sum(gradient * normed, 0) / WIDTH
        gradient = (gradient - tl.sum(gradient, 0) / WIDTH - normed * along) * factor
        gradient += tl.load(by_total + place, mask=known, other=0.0)
        tl.store(by_x + place, gradient, mask=known)
        if ADDED:
            tl.store(by_branch + place, gradient.to(by_branch.dtype.element_ty), mask=known)
    place = parts + tl.program_id(0) * 2 * WIDTH + column
    tl.store(place, by_weight, mask=column < WIDTH)
    tl.store(place + WIDTH, by_bias, mask=column < WIDTH)


class NormedSum(torch.autograd.Function):
    """`normed_sum` of Diffusion/om_net.py: float32 x and what is added to it, and the norm of the sum in bfloat16.

    With n the row of mean 0 and variance 1, r what it was multiplied by and g = weight x dL/dy,
    dL/dx = dL/dtotal + r (g - mean g - n mean(g n)).
    """

    @staticmethod
    def forward(ctx, x, branch, weight, bias, eps):
        """x: (..., C) float32. branch: the same, of any precision, or None. Returns: x + branch, and y in bfloat16."""
        x, branch = x.contiguous(), None if branch is None else branch.contiguous()
        total, y = x if branch is None else torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
        ctx.constants = {"WIDTH": x.shape[-1], "PADDED": triton.next_power_of_2(x.shape[-1])}
        _normed_sum[(x.numel() // x.shape[-1],)](x, branch, weight, bias, total, y, eps, ADDED=branch is not None,
                                                 **ctx.constants)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtype = eps, None if branch is None else branch.dtype
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_total, by_y):
        total, weight = ctx.saved_tensors
        rows, by_x = total.numel() // total.shape[-1], torch.empty_like(total)
        by_branch = None if ctx.dtype is None else torch.empty_like(total, dtype=ctx.dtype)
        programs = triton.cdiv(rows, MOST_STEPS)
        parts = torch.empty(programs, 2, total.shape[-1], device=total.device)
        _normed_sum_gradient[(programs,)](total, weight, by_total.contiguous(), by_y.contiguous(), by_x, by_branch,
                                          parts, rows, ctx.eps, STEPS=MOST_STEPS, ADDED=by_branch is not None,
                                          **ctx.constants)
        return by_x, by_branch, *parts.sum(0), None


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _neighbour(number, sign, place, voxels, depth, height, width, REACH: tl.constexpr):
    """Offset in voxels of a voxel's neighbour `number`, or of the opposite one if sign is -1; and where it exists.

    place: number of the voxel, counted across all samples, which together have `voxels`.
    """
    dz, dy, dx = sign * (number // 9 - REACH), sign * (number // 3 % 3 - 1), sign * (number % 3 - 1)
    x, y, z = place % width + dx, place // width % height + dy, place // (width * height) % depth + dz
    exists = (place < voxels) & (x >= 0) & (x < width) & (y >= 0) & (y < height) & (z >= 0) & (z < depth)
    return (dz * height + dy) * width + dx, exists


@triton.jit
def _features(features, place, inside, CHANNELS: tl.constexpr):
    """All channels of the voxels at these places, (places, C); 0 where there is none."""
    return tl.load(features + place[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], mask=inside[:, None],
                   other=0.0)


@triton.jit
def _contrast(f, g, sharpness, out, depth, height, width, CHANNELS: tl.constexpr, REACH: tl.constexpr,
              COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out_k(x) = sharpness x (<f(x), g(x + k)> - mean over k)."""
    voxels, sample = depth * height * width, tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, g, out = f + sample * voxels * CHANNELS, g + sample * voxels * CHANNELS, out + sample * voxels * COUNT
    own = _features(f, place, place < voxels, CHANNELS)
    around = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for number in tl.static_range(COUNT):
        shift, exists = _neighbour(number, 1, place, voxels, depth, height, width, REACH)
        around += _features(g, place + shift, exists, CHANNELS)
    mean, scale = tl.sum(own * around, 1) / COUNT, tl.load(sharpness)
    for number in tl.static_range(COUNT):
        shift, exists = _neighbour(number, 1, place, voxels, depth, height, width, REACH)
        value = scale * (tl.sum(own * _features(g, place + shift, exists, CHANNELS), 1) - mean)
        tl.store(out + number * voxels + place, value.to(out.dtype.element_ty), mask=place < voxels)


@triton.jit
def _contrast_gradient(f, g, grad, mean, sharpness, grad_f, grad_g, parts, depth, height, width,
                       CHANNELS: tl.constexpr, REACH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients by f and g, each voxel gathering its own; parts: this program's share of the gradient by sharpness."""
    voxels, sample = depth * height * width, tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < voxels
    f, g = f + sample * voxels * CHANNELS, g + sample * voxels * CHANNELS
    grad, mean = grad + sample * voxels * COUNT, mean + sample * voxels
    own_mean = tl.load(mean + place, mask=inside, other=0.0)
    by_f, by_g = tl.zeros((BLOCK, CHANNELS), tl.float32), tl.zeros((BLOCK, CHANNELS), tl.float32)
    for number in tl.static_range(COUNT):
        shift, exists = _neighbour(number, 1, place, voxels, depth, height, width, REACH)
        weight = tl.load(grad + number * voxels + place, mask=inside, other=0.0).to(tl.float32) - own_mean
        by_f += weight[:, None] * _features(g, place + shift, exists, CHANNELS)
        # The voxel on the other side has this one as its neighbour of that number.
        shift, exists = _neighbour(number, -1, place, voxels, depth, height, width, REACH)
        weight = tl.load(grad + number * voxels + place + shift, mask=exists, other=0.0).to(tl.float32)
        weight -= tl.load(mean + place + shift, mask=exists, other=0.0)
        by_g += weight[:, None] * _features(f, place + shift, exists, CHANNELS)
    own, scale = _features(f, place, inside, CHANNELS), tl.load(sharpness)
    at = sample * voxels * CHANNELS + place[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(grad_f + at, scale * by_f, mask=inside[:, None])
    tl.store(grad_g + at, scale * by_g, mask=inside[:, None])
    tl.store(parts + sample * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(own * by_f, 1), 0))


class NeighbourContrast(torch.autograd.Function):
    """y_k(x) = sharpness x (<f(x), g(x + k)> - mean over k), k the 3^N neighbours of a voxel, zeros outside of g.

    The gradient by sharpness is sum over x of <f, A> where sharpness x A is the gradient by f, as the products are
    linear in f.
    """

    @staticmethod
    def forward(ctx, f, g, sharpness, dtype):
        """f, g: (B, *size, C) float32, C a power of two. sharpness: (1,). Returns: (B, 3^N, *size) of the dtype."""
        f, g = f.contiguous(), g.contiguous()
        size, count = f.shape[1:-1], 3 ** (f.dim() - 2)
        out = torch.empty(len(f), count, *size, dtype=dtype, device=f.device)
        _contrast[_grid(f)](f, g, sharpness, out, *_sides(size), **_constants(f))
        ctx.save_for_backward(f, g, sharpness)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        f, g, sharpness = ctx.saved_tensors
        grad, grid = grad.contiguous(), _grid(f)
        mean = grad.mean(1, dtype=torch.float32)                                            # (B, *size)
        grad_f, grad_g = torch.empty_like(f), torch.empty_like(g)
        parts = torch.empty(grid[1], grid[0], device=f.device)
        _contrast_gradient[grid](f, g, grad, mean, sharpness, grad_f, grad_g, parts, *_sides(f.shape[1:-1]),
                                 **_constants(f))
        return grad_f, grad_g, parts.sum().view(1), None


def _grid(f):
    return triton.cdiv(f.shape[1:-1].numel(), VOXELS), len(f)


def _sides(size):
    """Depth, height and width; a plane is a volume of depth 1."""
    return (1,) * (3 - len(size)) + tuple(size)


def _constants(f):
    return {"CHANNELS": f.shape[-1], "REACH": f.dim() - 4, "COUNT": 3 ** (f.dim() - 2), "BLOCK": VOXELS}


# ---------------------------------------------------------------------------------------------------------------------
# Unit vectors of projected features
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _rows(x, place, inside, first, CHANNELS: tl.constexpr, SOME: tl.constexpr):
    """SOME channels from the first on of the voxels at these places, (places, SOME) float32."""
    channel = first + tl.arange(0, SOME)
    return tl.load(x + place[:, None] * CHANNELS + channel[None, :], mask=inside[:, None] & (channel < CHANNELS)[None],
                   other=0.0).to(tl.float32)


@triton.jit
def _weights(weight, first, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SOME: tl.constexpr):
    """SOME columns from the first on of weight (WIDTH, CHANNELS)."""
    channel = first + tl.arange(0, SOME)
    return tl.load(weight + tl.arange(0, WIDTH)[:, None] * CHANNELS + channel[None, :],
                   mask=(channel < CHANNELS)[None], other=0.0)


@_jit
def _unit(x, weight, y, inverse, voxels, least, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SOME: tl.constexpr,
          BLOCK: tl.constexpr):
    """y = W x / max(|W x|, least), and the inverse of that length."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < voxels
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in tl.static_range(0, CHANNELS, SOME):
        columns = _weights(weight, first, WIDTH, CHANNELS, SOME)
        total = tl.dot(_rows(x, place, inside, first, CHANNELS, SOME), tl.trans(columns), total, input_precision="ieee")
    factor = 1.0 / tl.maximum(tl.sqrt(tl.sum(total * total, 1)), least)
    tl.store(y + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], total * factor[:, None], mask=inside[:, None])
    tl.store(inverse + place, factor, mask=inside)


@_jit
def _unit_gradient(x, weight, y, inverse, grad, grad_x, parts, voxels, least, STEPS: tl.constexpr, WIDTH: tl.constexpr,
                   CHANNELS: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr):
    """dL/dx, and this program's share of dL/dW for SOME channels: parts (programs, WIDTH, CHANNELS)."""
    program, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SOME
    columns = _weights(weight, first, WIDTH, CHANNELS, SOME)
    by_weight = tl.zeros((WIDTH, SOME), tl.float32)
    channel, component = first + tl.arange(0, SOME), tl.arange(0, WIDTH)
    for step in range(STEPS):
        place = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = place < voxels
        unit, by_unit = _rows(y, place, inside, 0, WIDTH, WIDTH), _rows(grad, place, inside, 0, WIDTH, WIDTH)
        factor = tl.load(inverse + place, mask=inside, other=0.0)
        along = tl.where(factor * least < 1.0, tl.sum(unit * by_unit, 1), 0.0)  # a length below the least is constant
        by_product = (by_unit - unit * along[:, None]) * factor[:, None]
        by_x = tl.dot(by_product, columns, input_precision="ieee")
        tl.store(grad_x + place[:, None] * CHANNELS + channel[None, :], by_x.to(grad_x.dtype.element_ty),
                 mask=inside[:, None] & (channel < CHANNELS)[None, :])
        rows = _rows(x, place, inside, first, CHANNELS, SOME)
        by_weight = tl.dot(tl.trans(by_product), rows, by_weight, input_precision="ieee")
    tl.store(parts + (program * WIDTH + component[:, None]) * CHANNELS + channel[None, :], by_weight,
             mask=(channel < CHANNELS)[None, :])


class UnitFeatures(torch.autograd.Function):
    """y = W x / max(|W x|, least) at each voxel, in float32: the plain way is `features` of CorrelationLayer.

    With p = W x and r = 1 / max(|p|, least): dL/dp = r (g - y <y, g>), without the second term where |p| < least;
    dL/dx = W^T dL/dp, dL/dW = sum over voxels of dL/dp x^T.
    """

    @staticmethod
    def forward(ctx, x, weight, least):
        """x: (B, *size, C), of any precision. weight: (K, C) float32, K a power of two, at least 16. Returns:
        (B, *size, K) float32.
        """
        x, weight = x.contiguous(), weight.contiguous()
        constants = {"WIDTH": len(weight), "CHANNELS": x.shape[-1], "SOME": 16, "BLOCK": VOXELS_OF_UNITS}
        y = torch.empty(*x.shape[:-1], len(weight), device=x.device)
        inverse, voxels = torch.empty(x.shape[:-1], device=x.device), x.shape[:-1].numel()
        _unit[(triton.cdiv(voxels, VOXELS_OF_UNITS),)](x, weight, y, inverse, voxels, least, **constants)
        ctx.save_for_backward(x, weight, y, inverse)
        ctx.least, ctx.constants = least, constants
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, y, inverse = ctx.saved_tensors
        voxels, channels = inverse.numel(), x.shape[-1]
        steps = MOST_STEPS if voxels > 2 ** 16 else 1
        programs = triton.cdiv(voxels, VOXELS_OF_UNITS * steps)
        grad_x, parts = torch.empty_like(x), torch.empty(programs, *weight.shape, device=x.device)
        _unit_gradient[(programs, triton.cdiv(channels, 16))](x, weight, y, inverse, grad.contiguous(), grad_x, parts,
                                                              voxels, ctx.least, STEPS=steps, num_warps=8,
                                                              **ctx.constants)
        return grad_x, parts.sum(0), None


# ---------------------------------------------------------------------------------------------------------------------
# Linear interpolation along one axis
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _place_of(fine, scale, offset, last):
    """Coordinate on the grid of the values, in its voxels, of voxel `fine` of the other grid."""
    return tl.minimum(tl.maximum(fine.to(tl.float32) * scale + offset, 0.0), last)


@_jit
def _along_axis(x, out, count, old, new, after, taps, scale, offset, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr):
    """out (before, new, after) from x (before, old, after): out_j = sum_i M_ji x_i with the hat functions
    M_ji = max(1 - |place_j - i|, 0); TRANSPOSED: with M_ij.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, behind = number < count, number % after
    j, before = number // after % new, number // after // new
    if TRANSPOSED:  # all whose place is less than one away
        first = tl.ceil((j.to(tl.float32) - 1.0 - offset) / scale).to(tl.int32)
        first = tl.where(j == 0, 0, tl.maximum(first, 0))
        last = (new - 1).to(tl.float32)
    else:
        last = (old - 1).to(tl.float32)
        first = tl.floor(_place_of(j, scale, offset, last)).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(taps):
        i = first + tap
        if TRANSPOSED:
            distance = tl.abs(_place_of(i, scale, offset, last) - j.to(tl.float32))
        else:
            distance = tl.abs(_place_of(j, scale, offset, last) - i.to(tl.float32))
        value = tl.load(x + (before * old + i) * after + behind, mask=inside & (i < old), other=0.0).to(tl.float32)
        total += tl.maximum(1.0 - distance, 0.0) * value
    tl.store(out + number, total.to(out.dtype.element_ty), mask=inside)


def _interpolated(x, axis, new, scale, offset, transposed):
    """x, contiguous, interpolated to another length along an axis. scale, offset: from `places`."""
    old, out = x.shape[axis], x.new_empty(*x.shape[:axis], new, *x.shape[axis + 1:])
    taps = min(math.ceil(2 / scale) + 1, old) if transposed else 2  # all places less than one away, to both sides
    _along_axis[(triton.cdiv(out.numel(), 1024),)](x, out, out.numel(), old, new, x.shape[axis + 1:].numel(), taps,
                                                   scale, offset, TRANSPOSED=transposed, BLOCK=1024)
    return out


def interpolates(x, size):
    """Whether `Interpolate` can take x (B, C, *spatial): no axis of one value, and places that 32 bits can count."""
    largest = x.shape[:2].numel() * math.prod(map(max, x.shape[2:], size))
    return min(x.shape[2:]) > 1 and largest < 2 ** 31


class Interpolate(torch.autograd.Function):
    """`interpolate_by_products` of Diffusion/device_ops.py without the products: two values a place and axis.

    Its gradient gathers, with the same weights, what each value went into.
    """

    @staticmethod
    def forward(ctx, x, first_axis, size, align_corners):
        """x: contiguous, of any shape. first_axis: of the N that are interpolated. size: their new lengths."""
        ctx.first_axis, ctx.align_corners, ctx.old = first_axis, align_corners, x.shape[first_axis:][:len(size)]
        for axis, new in enumerate(size, first_axis):
            if new != x.shape[axis]:
                x = _interpolated(x, axis, new, *places(x.shape[axis], new, align_corners), False)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad = grad.contiguous()
        for axis, old in reversed(list(enumerate(ctx.old, ctx.first_axis))):
            if old != grad.shape[axis]:
                grad = _interpolated(grad, axis, old, *places(old, grad.shape[axis], ctx.align_corners), True)
        return grad, None, None, None


def places(old, new, align_corners):
    """(scale, offset) of F.interpolate: voxel j of the `new` lies at scale j + offset among the `old` voxels."""
    if align_corners:
        return (old - 1) / max(new - 1, 1), 0.0
    return old / new, 0.5 * old / new - 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions from or to a few channels
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _spaced(place, channel, of_sample, of_voxel, of_channel, depth, height, width):
    """Offset in memory of a channel of a voxel, by three strides. place: number of the voxel across all samples."""
    voxels = depth * height * width
    return place // voxels * of_sample + place % voxels * of_voxel + channel * of_channel


@triton.jit
def _weight_at(weight, tap, channel, result, known, of_channel, of_result, of_tap):
    """Values of a weight, by three strides; 0 where it has none."""
    return tl.load(weight + channel * of_channel + result * of_result + tap * of_tap, mask=known, other=0.0)


@triton.jit
def _offset(bias, result, RESULTS: tl.constexpr, BIASED: tl.constexpr):
    """Each result's bias as a float32 row (1, results); zeros if the layer has no bias."""
    offset = tl.zeros_like(result).to(tl.float32)
    if BIASED:
        offset += tl.load(bias + result, mask=result < RESULTS, other=0.0)
    return offset[None, :]


@triton.jit
def _gathered(x, place, voxels, of_sample, of_voxel, of_channel, depth, height, width, FEW: tl.constexpr,
              TAPS: tl.constexpr, REACH: tl.constexpr, SIGN: tl.constexpr, COLUMNS: tl.constexpr):
    """All neighbours of each voxel side by side: (places, COLUMNS), column tap x FEW + channel; the rest are zeros."""
    column, place = tl.arange(0, COLUMNS)[None, :], place[:, None]
    shift, exists = _neighbour(column // FEW, SIGN, place, voxels, depth, height, width, REACH)
    at = _spaced(place, column % FEW, of_sample, of_voxel, of_channel, depth, height, width) + shift * of_voxel
    return tl.load(x + at, mask=exists & (column < TAPS * FEW), other=0.0)


@_jit
def _from_few(x, weight, bias, out, x_sample, x_voxel, x_channel, of_channel, of_result, of_tap, out_sample, out_voxel,
              out_channel, voxels, depth, height, width, FEW: tl.constexpr, MANY: tl.constexpr, PADDED: tl.constexpr,
              BIASED: tl.constexpr, TAPS: tl.constexpr, REACH: tl.constexpr, SIGN: tl.constexpr, COLUMNS: tl.constexpr,
              BLOCK: tl.constexpr):
    """out, of MANY channels, of x, of FEW. weight: (FEW, MANY, TAPS). bias: (MANY,)."""
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    columns = _gathered(x, place, voxels, x_sample, x_voxel, x_channel, depth, height, width, FEW, TAPS, REACH, SIGN,
                        COLUMNS)
    row = tl.arange(0, COLUMNS)[:, None]
    known = (row < TAPS * FEW) & (channel < MANY)[None, :]
    factors = _weight_at(weight, row // FEW, row % FEW, channel[None, :], known, of_channel, of_result, of_tap)
    factors = factors.to(columns.dtype)
    total = tl.dot(columns, factors, input_precision="ieee") + _offset(bias, channel, MANY, BIASED)
    at = _spaced(place[:, None], channel[None, :], out_sample, out_voxel, out_channel, depth, height, width)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(place < voxels)[:, None] & (channel < MANY)[None, :])


@_jit
def _to_few(x, weight, bias, out, of_channel, of_result, of_tap, out_sample, out_voxel, out_channel, voxels, depth,
            height, width, FEW: tl.constexpr, MANY: tl.constexpr, BIASED: tl.constexpr, TAPS: tl.constexpr,
            REACH: tl.constexpr, SIGN: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr):
    """out, of FEW channels, of x (voxels, MANY), where SOME divides MANY. weight: (MANY, FEW, TAPS). bias: (FEW,)."""
    place, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 16)
    total = tl.zeros((BLOCK, 16), tl.float32) + _offset(bias, column, FEW, BIASED)
    for tap in range(TAPS):
        shift, exists = _neighbour(tap, SIGN, place, voxels, depth, height, width, REACH)
        for first in tl.static_range(0, MANY, SOME):
            channel = first + tl.arange(0, SOME)
            rows = tl.load(x + (place + shift)[:, None] * MANY + channel[None, :], mask=exists[:, None], other=0.0)
            factors = _weight_at(weight, tap, channel[:, None], column[None, :], (column < FEW)[None, :], of_channel,
                                 of_result, of_tap).to(rows.dtype)
            total = tl.dot(rows, factors, total, input_precision="ieee")
    at = _spaced(place[:, None], column[None, :], out_sample, out_voxel, out_channel, depth, height, width)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(place < voxels)[:, None] & (column < FEW)[None, :])


@_jit
def _weight_of_few(x, dense, parts, x_sample, x_voxel, x_channel, dense_sample, dense_voxel, dense_channel, voxels,
                   depth, height, width, STEPS: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
                   PADDED: tl.constexpr, TAPS: tl.constexpr, REACH: tl.constexpr, SIGN: tl.constexpr,
                   COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's share of dense^T (the gathered x): parts (programs, PADDED, COLUMNS) float32."""
    channel, total = tl.arange(0, PADDED), tl.zeros((PADDED, COLUMNS), tl.float32)
    for step in range(STEPS):
        place = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        columns = _gathered(x, place, voxels, x_sample, x_voxel, x_channel, depth, height, width, FEW, TAPS, REACH,
                            SIGN, COLUMNS)
        at = _spaced(place[:, None], channel[None, :], dense_sample, dense_voxel, dense_channel, depth, height, width)
        rows = tl.load(dense + at, mask=(place < voxels)[:, None] & (channel < MANY)[None, :], other=0.0)
        total = tl.dot(tl.trans(rows), columns, total, input_precision="ieee")
    at = (tl.program_id(0) * PADDED + channel[:, None]) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(parts + at, total)


def few_channels(x, weight):
    """Whether `ConvolveFew` can take a convolution of x (B, C, *spatial) with that weight, stride 1 and padding 1."""
    narrow, wide = sorted(weight.shape[:2])
    power_of_two = wide & (wide - 1) == 0 and 16 <= wide <= 128
    countable = len(x) * x.shape[2:].numel() * wide < 2 ** 31
    return narrow <= FEW_CHANNELS and (power_of_two or wide <= FEW_CHANNELS) and countable


class ConvolveFew(torch.autograd.Function):
    """A convolution with kernels of 3 voxels a side, of which input or output has a few channels, on all processors.

    All neighbours of a voxel in the few channels make one row of a matrix product with the many: forwards, by x, and,
    summed over the voxels, by the weight. Many channels are last in memory; a few are where x has them, and first in
    the result, as in images and fields.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        """x: (B, C, *size). weight: (K, C, 3, ...). bias: (K,) or None. Returns: (B, K, *size) of x's dtype."""
        x = _in_order(x)
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        return _convolved(x, weight.transpose(0, 1), bias, 1, last=len(weight) > FEW_CHANNELS)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad, last = _in_order(grad), x.movedim(1, -1).is_contiguous()                      # (B, K, *size)
        by_x = _convolved(grad, weight, None, -1, last) if ctx.needs_input_grad[0] else None    # (B, C, *size)
        if weight.shape[1] <= weight.shape[0]:
            by_weight = _weight_gradient(x, grad, weight.shape[2:], 1).movedim(-1, 1)       # (K, C, 3, 3, 3)
        else:
            by_weight = _weight_gradient(grad, x, weight.shape[2:], -1).movedim(-1, 0)      # (K, C, 3, 3, 3)
        by_bias = grad.sum([0, *range(2, grad.dim())], dtype=torch.float32) if ctx.bias else None
        return by_x, by_weight.to(weight.dtype), by_bias


def _in_order(x):
    """x (B, C, *size) with channels last, copied if needed; up to FEW_CHANNELS channels may also be first."""
    return _evenly_spaced(x) if x.shape[1] <= FEW_CHANNELS else x.movedim(1, -1).contiguous().movedim(-1, 1)


def _where(x):
    """Strides of samples, voxels and channels of x (B, C, *size), whose channels are last or first in memory."""
    channels, voxels = x.shape[1], x.shape[2:].numel()
    return channels * voxels, *((channels, 1) if x.movedim(1, -1).is_contiguous() else (1, voxels))


def _voxels_and_sides(x):
    """Number of voxels in all samples of x (B, C, *size); depth, height and width of one."""
    return len(x) * x.shape[2:].numel(), *_sides(x.shape[2:])


def _taps(x, sign):
    return {"TAPS": 3 ** (x.dim() - 2), "REACH": x.dim() - 4, "SIGN": sign}


def _convolved(x, weight, bias, sign, last):
    """x (B, C, *size) convolved with weight (C, K, 3, ...), mirrored where sign is -1: (B, K, *size) of x's dtype.

    last: whether its channels are to be last in memory.
    """
    weight, voxels_and_sides = weight.flatten(2), _voxels_and_sides(x)                      # (C, K, 27)
    (channels, results, _), (b, _, *size) = weight.shape, x.shape
    out = x.new_empty(b, *size, results).movedim(-1, 1) if last else x.new_empty(b, results, *size)
    grid = (triton.cdiv(voxels_and_sides[0], VOXELS_OF_UNITS),)
    constants = {**_taps(x, sign), "BIASED": bias is not None, "BLOCK": VOXELS_OF_UNITS}
    if channels <= FEW_CHANNELS:
        padded, columns = (max(triton.next_power_of_2(n), 16) for n in (results, weight.shape[2] * channels))
        _from_few[grid](x, weight, bias, out, *_where(x), *weight.stride(), *_where(out), *voxels_and_sides,
                        FEW=channels, MANY=results, PADDED=padded, COLUMNS=columns, num_warps=8, **constants)
    else:
        _to_few[grid](x, weight, bias, out, *weight.stride(), *_where(out), *voxels_and_sides, FEW=results,
                      MANY=channels, SOME=min(channels, 64), num_warps=4 if channels < 64 else 8, **constants)
    return out


def _weight_gradient(x, dense, kernel, sign):
    """sum over voxels of dense_m(v) x_c(v + sign tap): (M, *kernel, C) float32. x: (B, C, *size), dense: (B, M, ...).
    """
    (voxels, *sides), few, many = _voxels_and_sides(x), x.shape[1], dense.shape[1]
    padded, columns = (max(triton.next_power_of_2(n), 16) for n in (many, kernel.numel() * few))
    steps = MOST_STEPS if voxels > 2 ** 16 else 1
    programs = triton.cdiv(voxels, VOXELS_OF_UNITS * steps)
    parts = torch.empty(programs, padded, columns, device=x.device)
    _weight_of_few[(programs,)](x, dense, parts, *_where(x), *_where(dense), voxels, *sides, STEPS=steps, FEW=few,
                                MANY=many, PADDED=padded, COLUMNS=columns, BLOCK=VOXELS_OF_UNITS, num_warps=8,
                                **_taps(x, sign))
    return parts.sum(0)[:many, :kernel.numel() * few].view(many, *kernel, few)


# ---------------------------------------------------------------------------------------------------------------------
# Warped features
# ---------------------------------------------------------------------------------------------------------------------

@triton.jit
def _sampled_at(field, place, voxels, inside, axis, index, length):
    """Along one axis: the voxel below the sampled point, the fraction to the next, and 1 where the point is inside."""
    point = index.to(tl.float32) + tl.load(field + axis * voxels + place, mask=inside, other=0.0)
    free = tl.where((point > 0) & (point < length - 1), 1.0, 0.0)
    point = tl.minimum(tl.maximum(point, 0.0), (length - 1).to(tl.float32))
    below = tl.minimum(tl.floor(point).to(tl.int32), tl.maximum(length - 2, 0))
    return below, point - below.to(tl.float32), free


@triton.jit
def _points(field, place, voxels, inside, depth, height, width, DIMS: tl.constexpr):
    """`_sampled_at` along depth, height and width; in 2D the depth is 0."""
    x, y, z = place % width, place // width % height, place // (width * height)
    x, wx, fx = _sampled_at(field, place, voxels, inside, DIMS - 1, x, width)
    y, wy, fy = _sampled_at(field, place, voxels, inside, DIMS - 2, y, height)
    if DIMS == 3:
        z, wz, fz = _sampled_at(field, place, voxels, inside, 0, z, depth)
    else:
        wz, fz = tl.zeros_like(wx), tl.zeros_like(fx)
    return z, wz, fz, y, wy, fy, x, wx, fx


@triton.jit
def _corner(number, z, wz, y, wy, x, wx, depth, height, width):
    """Place of a corner of the cell around each point, its weights along the axes, and whether it exists."""
    dz, dy, dx = number // 4, number // 2 % 2, number % 2
    vz, vy, vx = tl.where(dz == 1, wz, 1 - wz), tl.where(dy == 1, wy, 1 - wy), tl.where(dx == 1, wx, 1 - wx)
    exists = (z + dz < depth) & (y + dy < height) & (x + dx < width)
    return ((z + dz) * height + y + dy) * width + x + dx, vz, vy, vx, exists


@_jit
def _warp(x, field, out, depth, height, width, DIMS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """out(v) = x(v + field(v)), interpolated linearly; points outside take the nearest voxel on the border."""
    voxels, sample = depth * height * width, tl.program_id(1).to(tl.int64)
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    inside, x, field = place < voxels, x + sample * voxels * CHANNELS, field + sample * voxels * DIMS
    z, wz, fz, y, wy, fy, px, wx, fx = _points(field, place, voxels, inside, depth, height, width, DIMS)
    total = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for number in tl.static_range(2 ** DIMS):
        at, vz, vy, vx, exists = _corner(number, z, wz, y, wy, px, wx, depth, height, width)
        value = tl.load(x + at[:, None] * CHANNELS + channel[None, :], mask=(inside & exists)[:, None], other=0.0)
        total += (vz * vy * vx)[:, None] * value.to(tl.float32)
    at = out + sample * voxels * CHANNELS + place[:, None] * CHANNELS + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None])


@_jit
def _warp_gradient(x, field, grad, grad_x, grad_field, depth, height, width, DIMS: tl.constexpr,
                   CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """grad_x (float32, zeros before) += each voxel's share; grad_field, where the sampled point is inside."""
    voxels, sample = depth * height * width, tl.program_id(1).to(tl.int64)
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    inside, x, field = place < voxels, x + sample * voxels * CHANNELS, field + sample * voxels * DIMS
    grad_x, grad_field = grad_x + sample * voxels * CHANNELS, grad_field + sample * voxels * DIMS
    z, wz, fz, y, wy, fy, px, wx, fx = _points(field, place, voxels, inside, depth, height, width, DIMS)
    own = tl.load(grad + sample * voxels * CHANNELS + place[:, None] * CHANNELS + channel[None, :],
                  mask=inside[:, None], other=0.0).to(tl.float32)
    by_z, by_y, by_x = (tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32))
    for number in tl.static_range(2 ** DIMS):
        at, vz, vy, vx, exists = _corner(number, z, wz, y, wy, px, wx, depth, height, width)
        at, known = at[:, None] * CHANNELS + channel[None, :], (inside & exists)[:, None]
        tl.atomic_add(grad_x + at, (vz * vy * vx)[:, None] * own, mask=known, sem="relaxed")
        product = tl.sum(own * tl.load(x + at, mask=known, other=0.0).to(tl.float32), 1)
        by_z += (2 * (number // 4) - 1) * vy * vx * product
        by_y += (2 * (number // 2 % 2) - 1) * vz * vx * product
        by_x += (2 * (number % 2) - 1) * vz * vy * product
    if DIMS == 3:
        tl.store(grad_field + place, fz * by_z, mask=inside)
    tl.store(grad_field + (DIMS - 2) * voxels + place, fy * by_y, mask=inside)
    tl.store(grad_field + (DIMS - 1) * voxels + place, fx * by_x, mask=inside)


class Warp(torch.autograd.Function):
    """`warp` of Diffusion/fields.py with padding "border", of features channels last and in their own precision.

    The gradient by the features adds with atomics, as that of grid_sample does: in another order each time.
    """

    @staticmethod
    def forward(ctx, x, field):
        """x: (B, *size, C) contiguous, C a power of two. field: (B, N, *size) in voxels. Returns: as x."""
        field, out = field.float().contiguous(), torch.empty_like(x)
        _warp[_warp_grid(x)](x, field, out, *_sides(x.shape[1:-1]), **_warp_constants(x))
        ctx.save_for_backward(x, field)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, field = ctx.saved_tensors
        grad_x, grad_field = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(field)
        _warp_gradient[_warp_grid(x)](x, field, grad.contiguous(), grad_x, grad_field, *_sides(x.shape[1:-1]),
                                      **_warp_constants(x))
        return grad_x.to(x.dtype), grad_field


def _warp_constants(x):
    return {"DIMS": x.dim() - 2, "CHANNELS": x.shape[-1], "BLOCK": max(1024 // x.shape[-1], 1)}


def _warp_grid(x):
    return triton.cdiv(x.shape[1:-1].numel(), _warp_constants(x)["BLOCK"]), len(x)


def warps(x):
    """Whether `Warp` can take features x (B, C, *spatial)."""
    return x.shape[1] & (x.shape[1] - 1) == 0 and x[0].numel() < 2 ** 31


# ---------------------------------------------------------------------------------------------------------------------
# Features side by side
# ---------------------------------------------------------------------------------------------------------------------

@_jit
def _copy_channels(x, out, voxels, x_sample, x_voxel, x_channel, out_sample, out_voxel, out_channel,
                   CHANNELS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """out = x, both of the same sizes and of any strides."""
    place, sample = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, PADDED).to(tl.int64)
    known = (place < voxels)[:, None] & (channel < CHANNELS)[None, :]
    x, out = x + sample.to(tl.int64) * x_sample, out + sample.to(tl.int64) * out_sample
    value = tl.load(x + place[:, None] * x_voxel + channel[None, :] * x_channel, mask=known, other=0.0)
    tl.store(out + place[:, None] * out_voxel + channel[None, :] * out_channel, value, mask=known)


def _copied(x, out):
    """Copy x to out, both (B, C, *spatial), each with channels first or last in memory, maybe part of more channels."""
    strides = [stride for each in (x, out) for stride in (each.stride(0), each.stride(-1), each.stride(1))]
    voxels, channels = x.shape[2:].numel(), x.shape[1]
    padded = triton.next_power_of_2(channels)
    block = max(ELEMENTS // padded, 1)
    _copy_channels[(triton.cdiv(voxels, block), len(x))](x, out, voxels, *strides, CHANNELS=channels, PADDED=padded,
                                                         BLOCK=block)


def _evenly_spaced(x):
    """x (B, C, *spatial), copied unless it is contiguous with channels first or last."""
    return x if x.is_contiguous() or x.movedim(1, -1).is_contiguous() else x.contiguous()


class SideBySide(torch.autograd.Function):
    """torch.cat of parts and of channels of zeros, over the channels; the result is channels last.

    Each part is copied once, and so is its gradient, which has the part's memory format.
    """

    @staticmethod
    def forward(ctx, zeros, *parts):
        """zeros: how many channels. parts: (B, C, *spatial) of one dtype. Returns: (B, sum of C + zeros, *spatial)."""
        parts, (b, _, *size) = [_evenly_spaced(part) for part in parts], parts[0].shape
        ctx.channels = [part.shape[1] for part in parts]
        ctx.last = [part.movedim(1, -1).is_contiguous() for part in parts]
        out = parts[0].new_empty(b, *size, sum(ctx.channels) + zeros)
        out[..., out.shape[-1] - zeros:] = 0
        out = out.movedim(-1, 1)
        for part, place in zip(parts, out.split([*ctx.channels, zeros], dim=1)):
            _copied(part, place)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad, results = _evenly_spaced(grad), []
        zeros = grad.shape[1] - sum(ctx.channels)
        for place, last in zip(grad.split([*ctx.channels, zeros], dim=1), ctx.last):
            b, channels, *size = place.shape
            results.append(grad.new_empty(b, *size, channels).movedim(-1, 1) if last else grad.new_empty(place.shape))
            _copied(place, results[-1])
        return None, *results


# ---------------------------------------------------------------------------------------------------------------------
# A trial
# ---------------------------------------------------------------------------------------------------------------------

def try_out(device_type):
    """Compile each kernel, run it once in both directions, and compare it with the plain way.

    It is called within a forward pass, which may be checkpointed or in inference and must see nothing of this.
    Raises RuntimeError, OSError or SubprocessError where a kernel does not work.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device_type, enabled=False), \
                torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            failed = [what for what, ours, plain, given in trials(device_type) if not _alike(ours, plain, given)]
    except TritonError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if failed:
        raise RuntimeError("wrong values: " + ", ".join(failed))


def _waves(*shape, device):
    """Values in -1 .. 1 that look random."""
    return torch.arange(math.prod(shape), device=device).mul(0.7).sin().view(shape)


def results(function, given):
    """The result of a function of tensors, then its gradient by each of them. given: the tensors."""
    given = [value.detach().requires_grad_() for value in given]
    y = function(*given)
    grad = _waves(*y.shape, device=y.device).roll(1).bfloat16()
    return [y, *torch.autograd.grad(y, given, grad.to(y.dtype))]


def _alike(ours, plain, given):
    """Whether results and gradients equal those of the plain way in float32, up to rounding of bfloat16."""
    pairs = zip(results(ours, given), results(plain, [value.float() for value in given]))
    return all((one - other).abs().max() <= 0.02 * other.abs().max() for one, other in pairs)


def trials(device):
    """For each kernel: its name, the kernel and the plain way as functions of the same tensors, and these tensors."""
    waves = functools.partial(_waves, device=device)
    yield "norm", lambda *given: NormModulateActivate.apply(given[0], 2, 1e-5, *given[1:], 0.2), plain_norm, (
        waves(2, 4, 4, 4, 16).bfloat16().movedim(-1, 1), *waves(2, 16), *waves(2, 2, 16))
    yield "norm of a sum", lambda *given: torch.cat(NormedSum.apply(*given, 1e-5)), plain_normed_sum, (
        waves(2, 3, 24), waves(2, 3, 24).bfloat16(), *waves(2, 24))
    yield "neighbours", lambda f, g, sharpness: NeighbourContrast.apply(f, g, sharpness, torch.bfloat16), (
        plain_contrast), (*waves(2, 1, 4, 4, 4, 16), torch.full((1,), 3.0, device=device))
    yield "unit vectors", lambda x, weight: UnitFeatures.apply(x, weight, 1e-3), (
        lambda x, weight: F.normalize(x @ weight.T, dim=-1, eps=1e-3)), (
        waves(2, 4, 5, 16).bfloat16(), waves(16, 16))
    yield "interpolation", lambda x: Interpolate.apply(x, 2, (8, 5, 3), False), (
        lambda x: F.interpolate(x, (8, 5, 3), mode="trilinear")), (waves(2, 3, 4, 5, 6),)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # of which Triton interprets no products
    for few, many in ((2, 16), (16, 3)):
        yield f"convolution from {few} to {many} channels", ConvolveFew.apply, plain_convolution, (
            waves(2, few, 3, 4, 5).to(dtype), waves(many, few, 3, 3, 3).to(dtype).float(), waves(many))
    yield "warp", Warp.apply, plain_warp, (waves(2, 4, 5, 6, 16).bfloat16(), 1.5 * waves(2, 3, 4, 5, 6))
    yield "side by side", functools.partial(SideBySide.apply, 3), (
        lambda *parts: F.pad(torch.cat(parts, dim=1), [0] * 7 + [3])), (
        waves(2, 3, 4, 5, 16).movedim(-1, 1), waves(2, 5, 3, 4, 5))


def plain_norm(x, weight, bias, scale, shift):
    per_voxel = (len(x), -1, *[1] * (x.dim() - 2))
    return F.leaky_relu(F.group_norm(x, 2, weight, bias) * (1 + scale.view(per_voxel)) + shift.view(per_voxel), 0.2)


def plain_normed_sum(x, branch, weight, bias):
    total = x + branch
    return torch.cat([total, F.layer_norm(total, weight.shape, weight, bias)])


def plain_contrast(f, g, sharpness):
    around = F.pad(g, [0, 0, 1, 1, 1, 1, 1, 1]).unfold(1, 3, 1).unfold(2, 3, 1).unfold(3, 3, 1)
    products = torch.einsum("bzyxc,bzyxcijk->bijkzyx", f, around).flatten(1, 3)             # (B, 27, *size)
    return sharpness * (products - products.mean(1, keepdim=True))


def plain_convolution(x, weight, bias):
    return (F.conv3d if x.dim() == 5 else F.conv2d)(x, weight, bias, padding=1)


def plain_warp(x, field):
    """x: (B, *size, C). field: (B, N, *size) in voxels."""
    size = x.shape[1:-1]
    at = torch.stack(torch.meshgrid(*[torch.arange(n, device=x.device) for n in size], indexing="ij")) + field
    lengths = torch.tensor(size[::-1], device=x.device)
    at = at.flip(1).movedim(1, -1) * (2 / (lengths - 1).clamp(min=1)) - 1                   # (B, *size, N)
    return F.grid_sample(x.movedim(-1, 1), at, padding_mode="border", align_corners=True).movedim(1, -1)
