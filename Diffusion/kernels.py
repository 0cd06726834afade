"""Triton kernels of what takes a device most time beside its convolutions and is slow there by torch's operations.

Each has its plain way, which the tests hold it against: `NormModulateActivate` of Diffusion/device_ops.py and
`NeighbourProducts` of Diffusion/om_net.py. Only `kernels_for` of Diffusion/device_ops.py imports this module: where
there is no Triton or no C compiler, the plain way is taken. No kernel adds with atomics, so that all give the same bits
each time.

Volumes are channels last in memory: rows of C values, one for each voxel. Sums are taken in float32.
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.errors import TritonError

ELEMENTS = 2048  # that a program of the norm holds at a time
MOST_STEPS = 16  # of which it takes so many, one after the other
VOXELS = 32      # of a program of the neighbours: 3.3 ms there and back at 2 x 128^3 on an H200, with 64 or 128 5.3 ms


# ---------------------------------------------------------------------------------------------------------------------
# Group norm, modulation and activation: the two passes of each direction
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _block(sample, first, voxels, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Places in memory, and which of them exist, of ROWS voxels with all their channels."""
    row = first + tl.arange(0, ROWS)
    return (sample * voxels + row[:, None]) * CHANNELS + tl.arange(0, CHANNELS)[None, :], (row < voxels)[:, None]


@triton.jit
def _per_channel(values, number, sample, COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """The C values of that number of values (B, COUNT, C)."""
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
    means = tl.sum(tl.reshape(sums, (CHANNELS // GROUP, GROUP)), 1) / (GROUP * voxels)
    return tl.reshape(tl.broadcast_to(means[:, None], (CHANNELS // GROUP, GROUP)), (CHANNELS,))


@triton.jit
def _factors(sums, weight, bias, scale, shift, row, statistics, voxels, eps, GROUP: tl.constexpr,
             CHANNELS: tl.constexpr):
    """statistics (B, 4, C): mean and 1 / deviation of the group, and a and b of the map x -> a x + b."""
    sample, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    mean = _group_means(_per_channel(sums, 0, sample, 2, CHANNELS), voxels, GROUP, CHANNELS)
    squares = _group_means(_per_channel(sums, 1, sample, 2, CHANNELS), voxels, GROUP, CHANNELS)
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
def _gradient_factors(sums, statistics, weight, bias, scale, row, by_norm, by_time, voxels, GROUP: tl.constexpr,
                      CHANNELS: tl.constexpr):
    """by_norm (B, 4, C): constant and factor of x in dL/dx, then dL/dweight and dL/dbias. by_time: (B, 2 C)."""
    sample, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    mean, rstd = _per_channel(statistics, 0, sample, 4, CHANNELS), _per_channel(statistics, 1, sample, 4, CHANNELS)
    s1 = _per_channel(sums, 0, sample, 2, CHANNELS)
    s2 = rstd * (_per_channel(sums, 1, sample, 2, CHANNELS) - mean * s1)
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
    """Whether the kernels of the norm can take x (B, C, *spatial): channels last, and powers of two."""
    channels = x.shape[1]
    return channels & (channels - 1) == 0 and channels % groups == 0 and x.movedim(1, -1).is_contiguous()


def _cut(x):
    """How x (B, C, *spatial) is cut: voxels of a sample, and the kernels' constants."""
    return x.shape[2:].numel(), {"ROWS": max(ELEMENTS // x.shape[1], 1), "CHANNELS": x.shape[1]}


def _summed(kernel, x, *given):
    """The two sums over voxels that a kernel takes of x and what else it is given: (B, 2, C) float32."""
    voxels, constants = _cut(x)
    steps = MOST_STEPS if voxels * x.shape[1] > 2 ** 20 else 2
    programs = triton.cdiv(voxels, constants["ROWS"] * steps)
    parts = torch.empty(len(x), programs, 2, x.shape[1], device=x.device)
    kernel[(programs, len(x))](x, *given, parts, voxels, STEPS=steps, **constants)
    return parts.sum(1)                                                                     # (B, 2, C)


def _mapped(kernel, x, *given):
    """What a kernel makes of each value of x and what else it is given, in x's precision and memory format."""
    voxels, constants = _cut(x)
    result = torch.empty_like(x)
    kernel[(triton.cdiv(voxels, constants["ROWS"]), len(x))](x, *given, result, voxels, **constants)
    return result                                                                           # (B, C, *spatial)


def sums(x):
    """Sums over the voxels of x and of x^2. x: (B, C, *spatial), see `fits`. Returns: (B, 2, C) float32."""
    return _summed(_sums, x)


class NormModulateActivate(torch.autograd.Function):
    """`NormModulateActivate` of Diffusion/device_ops.py, which has the formulas, for what `fits`. Keeps x alone."""

    @staticmethod
    def forward(ctx, x, groups, eps, weight, bias, scale, shift, slope):
        channels = {"GROUP": x.shape[1] // groups, "CHANNELS": x.shape[1]}
        statistics = torch.empty(len(x), 4, x.shape[1], device=x.device)
        _factors[(len(x),)](sums(x), weight, bias, scale, shift, scale.stride(0), statistics, x.shape[2:].numel(), eps,
                            **channels)
        ctx.save_for_backward(x, weight, bias, scale, statistics)
        ctx.channels, ctx.slope = channels, slope
        return _mapped(_scaled, x, statistics, slope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, bias, scale, statistics = ctx.saved_tensors
        grad = grad.movedim(1, -1).contiguous()                                             # (B, *spatial, C)
        sums = _summed(_gradient_sums, x, grad, statistics, ctx.slope)                      # (B, 2, C)
        by_norm, by_time = torch.empty_like(statistics), scale.new_empty(len(x), 2 * x.shape[1])
        _gradient_factors[(len(x),)](sums, statistics, weight, bias, scale, scale.stride(0), by_norm, by_time,
                                     x.shape[2:].numel(), **ctx.channels)
        grad_x = _mapped(_gradient, x, grad, statistics, by_norm, ctx.slope)                # (B, C, *spatial)
        return (grad_x, None, None, *by_norm[:, 2:].sum(0), *by_time.chunk(2, dim=1), None)


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _neighbour(number, sign, place, depth, height, width, REACH: tl.constexpr):
    """How far in memory the neighbour of that number is, to the other side where sign is -1, and where it exists."""
    dz, dy, dx = sign * (number // 9 - REACH), sign * (number // 3 % 3 - 1), sign * (number % 3 - 1)
    x, y, z = place % width + dx, place // width % height + dy, place // (width * height) + dz
    exists = (place < depth * height * width) & (x >= 0) & (x < width) & (y >= 0) & (y < height) & (z >= 0)
    return (dz * height + dy) * width + dx, exists & (z < depth)


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
        shift, exists = _neighbour(number, 1, place, depth, height, width, REACH)
        around += _features(g, place + shift, exists, CHANNELS)
    mean, scale = tl.sum(own * around, 1) / COUNT, tl.load(sharpness)
    for number in tl.static_range(COUNT):
        shift, exists = _neighbour(number, 1, place, depth, height, width, REACH)
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
        shift, exists = _neighbour(number, 1, place, depth, height, width, REACH)
        weight = tl.load(grad + number * voxels + place, mask=inside, other=0.0).to(tl.float32) - own_mean
        by_f += weight[:, None] * _features(g, place + shift, exists, CHANNELS)
        # The voxel on the other side has this one as its neighbour of that number.
        shift, exists = _neighbour(number, -1, place, depth, height, width, REACH)
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
# A trial
# ---------------------------------------------------------------------------------------------------------------------


class _Context:
    """What autograd hands to forward and backward, without autograd."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def try_out(device_type):
    """Compile each kernel and run it once, on values that are the same each time.

    It is called within a forward, maybe one that is computed again for its backward pass and counts what it saves. So
    autograd has no part in this; gradients are checked by what is linear: y in each factor a has sum a dL/da = sum y
    dL/dy.
    Raises RuntimeError, OSError or SubprocessError where a kernel does not work.
    """
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            failed = [*_norm_fails(device_type), *_contrast_fails(device_type)]
    except TritonError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if failed:
        raise RuntimeError("wrong values: " + ", ".join(failed))


def _waves(*shape, device):
    """Values in -1 .. 1 that look random."""
    return torch.arange(math.prod(shape), device=device).mul(0.7).sin().view(shape)


def _differ(what, ours, plain):
    """[what] where values differ by more than bfloat16 rounds, else []."""
    return [] if (ours - plain).abs().max() <= 0.02 * plain.abs().max() else [what]


def _norm_fails(device):
    context, channels = _Context(), 16
    x, grad = (_waves(2, 4, 4, 4, channels, device=device).roll(i, 1).bfloat16().movedim(-1, 1) for i in (0, 1))
    weight, bias, *by_time = _waves(6, channels, device=device).split([1, 1, 2, 2])
    given = weight[0], bias[0], *by_time                                                    # (C,) and (B, C)
    y = NormModulateActivate.forward(context, x, 2, 1e-5, *given, 0.2)
    per_voxel = [values.view(2, channels, 1, 1, 1) for values in by_time]
    plain = F.leaky_relu(F.group_norm(x.float(), 2, *given[:2]) * (1 + per_voxel[0]) + per_voxel[1], 0.2)
    grad_x, _, _, by_weight, by_bias, _, by_shift, _ = NormModulateActivate.backward(context, grad)
    linear = (by_weight * weight).sum() + (by_bias * bias).sum() + (by_shift * by_time[1]).sum()
    balance = grad_x.float().flatten(2).sum(2).view(2, 2, -1).sum(2)                        # 0 in each group
    return (_differ("norm", y.float(), plain) + _differ("gradient of the norm", linear, (grad.float() * plain).sum())
            + _differ("gradient through the norm", 1 + balance / grad_x.float().abs().sum(), torch.ones_like(balance)))


def _contrast_fails(device):
    context, size = _Context(), (4, 4, 4)
    f, g = _waves(2, 1, *size, 16, device=device)                                           # (1, *size, 16) each
    sharpness, grad = torch.full((1,), 3.0, device=device), _waves(1, 27, *size, device=device).bfloat16()
    y = NeighbourContrast.forward(context, f, g, sharpness, torch.bfloat16).float()
    around = F.pad(g, [0, 0, 1, 1, 1, 1, 1, 1]).unfold(1, 3, 1).unfold(2, 3, 1).unfold(3, 3, 1)
    products = torch.einsum("bzyxc,bzyxcijk->bijkzyx", f, around).flatten(1, 3)             # (1, 27, *size)
    plain = sharpness * (products - products.mean(1, keepdim=True))
    found, linear = _differ("neighbours", y, plain), (plain * grad.float()).sum()
    by_f, by_g, by_sharpness, _ = NeighbourContrast.backward(context, grad)
    for factor, by_factor in ((f, by_f), (g, by_g), (sharpness, by_sharpness)):
        found += _differ("gradient of the neighbours", (factor * by_factor).sum(), linear)
    return found
