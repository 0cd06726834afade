"""Layers and functions that all networks share.

Shapes: B samples, C channels, N spatial axes. Shape comments give 128^3 with the channels of config_om.yaml.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion import device_ops
from Diffusion.device_ops import accelerated, in_float32, kernels_for, product_over_channels
from Diffusion.fields import append_dims, compose, interpolate, side_lengths, warp

SLOPE = 0.2  # of the activation, LeakyReLU, for negative values
HAS_ONEDNN = torch.backends.mkldnn.is_available()

# ---------------------------------------------------------------------------------------------------------------------
# Convolution and normalisation
# ---------------------------------------------------------------------------------------------------------------------

def dtype_on_cpu(x):
    """The dtype in which oneDNN computes a layer of x: autocast's if enabled. None on a device or without oneDNN."""
    if x.device.type != "cpu" or not HAS_ONEDNN:
        return None
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def must_be_float32(x, layer):
    """Whether a convolution of x on a CPU would be in bfloat16 and its kernel is longer than the volume along an axis.

    In that case the weight gradient of oneDNN, on processors with AVX512-BF16 and without AMX, is uninitialised memory
    (torch 2.13): not finite or as large as 1e30, and different each time.
    x: (B, C, *spatial). layer: nn.Conv2d or nn.Conv3d.
    """
    lengths = (step * (k - 1) + 1 for k, step in zip(layer.kernel_size, layer.dilation))
    return dtype_on_cpu(x) == torch.bfloat16 and any(n < length for n, length in zip(x.shape[2:], lengths))


def convolve_in_slabs(x, weight, bias, stride, padding, dilation):
    """The 3D convolution of one sample, cut along the first axis into a batch of two slabs, which oneDNN supports.

    The slabs overlap by the reach of the kernel, so the result equals that of F.conv3d up to rounding.

    x: (1, C, D, H, W). Returns: (1, K, ...).
    """
    extent, step = dilation[0] * (weight.shape[2] - 1) + 1, stride[0]                   # extent: planes under a kernel
    out_planes = (x.shape[2] + 2 * padding[0] - extent) // step + 1
    half = (out_planes + 1) // 2
    slab = step * (half - 1) + extent                                                   # planes in, for `half` out
    pad_end = max(step * half + slab - x.shape[2] - padding[0], 0)                      # one more if out_planes is odd
    x = F.pad(x, [0, 0, 0, 0, padding[0], pad_end])                                     # (1, C, D + padding, H, W)
    x = torch.cat([x.narrow(2, 0, slab), x.narrow(2, step * half, slab)])               # (2, C, slab, H, W)
    x = F.conv3d(x, weight, bias, stride, (0, *padding[1:]), dilation)                  # (2, K, half, ...)
    return torch.cat([x[:1], x[1:, :, :out_planes - half]], dim=2)                      # (1, K, out_planes, ...)


def on_device_in_bfloat16(x):
    """Whether a convolution of x is computed by an accelerator in bfloat16."""
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    return accelerated(x) and dtype == torch.bfloat16


def convolve_in_eights(convolve, x, weight, bias):
    """A bfloat16 convolution of x, zero-padded to a multiple of 8 channels, for which cuDNN is faster.

    On an H200 at 128^3 that saves a tenth with 2 input channels and 40 % with 3; padding the output gains nothing.
    x: (B, C, *spatial). Returns: (B, K, *spatial), what convolve(x, weight, bias) returns up to rounding.
    """
    few = -weight.shape[1] % 8
    if few:
        spatial = [0, 0] * (x.dim() - 2)
        x = F.pad(x.to(torch.bfloat16), [*spatial, 0, few])                             # (B, C + few, *spatial)
        weight = F.pad(weight, [*spatial, 0, few])                                      # (K, C + few, 3, 3, 3)
    return convolve(x, weight, bias)


class Convolution:
    """Mixin for nn.Conv2d and nn.Conv3d that avoids torch's wrong and slow kernels, see the functions above.

    In float32 on a CPU, torch takes `slow_conv3d`, four times slower, for one small sample and, with one thread, for
    1x1x1 kernels (use_mkldnn in ATen/native/Convolution.cpp).
    """

    def _conv_forward(self, x, weight, bias):
        if must_be_float32(x, self):
            with torch.autocast("cpu", enabled=False):
                return self._conv_forward(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
        pointwise = set(self.kernel_size + self.stride) == {1}
        if on_device_in_bfloat16(x):
            if pointwise:
                return product_over_channels(x, weight, bias).movedim(-1, 1)            # (B, K, *spatial)
            kernels, everywhere = kernels_for(x), set(self.stride + self.padding + self.dilation) == {1}
            if kernels and set(self.kernel_size) == {3} and everywhere and kernels.few_channels(x, weight):
                return kernels.ConvolveFew.apply(x.to(torch.bfloat16), weight, bias)    # (B, K, *spatial)
            return convolve_in_eights(super()._conv_forward, x, weight, bias)
        if x.dim() == 5 and dtype_on_cpu(x) == torch.float32:
            if pointwise:
                return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
            if len(x) == 1 and x.shape[1:4].numel() <= 20480:  # torch's limit for a small sample
                return convolve_in_slabs(x, weight, bias, self.stride, self.padding, self.dilation)
        return super()._conv_forward(x, weight, bias)


class Conv3d(Convolution, nn.Conv3d):
    pass


class Conv2d(Convolution, nn.Conv2d):
    pass


def conv(dims, in_channels, out_channels, kernel_size=3, stride=1, dilation=1, bias=True):
    """A convolution in 2D or 3D, padded so that stride 1 keeps the size."""
    layer = Conv3d if dims == 3 else Conv2d
    return layer(in_channels, out_channels, kernel_size, stride, padding=dilation * (kernel_size // 2),
                 dilation=dilation, bias=bias)


def group_norm(channels):
    """Group normalisation over groups of 8 channels, or of the next larger number that divides them (Wu & He, ECCV
    2018).

    Unlike batch norm it has no statistics over the batch: batches hold one or two volumes, and a sample's result must
    not depend on the others in its batch.
    """
    groups = next(count for count in range(max(channels // 8, 1), 0, -1) if channels % count == 0)
    return nn.GroupNorm(groups, channels)


def start_at_zero(layer):
    """Zero a layer's weights, so that a head first predicts no displacement and a residual branch changes nothing."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------

def sinusoids(positions, width, longest):
    """Sinusoidal embedding (Vaswani et al., NeurIPS 2017): [sin(w_k p), cos(w_k p)] with w_k = longest^(-k / (K - 1)).

    positions: any shape (...). width: channels, 2 K. Returns: (..., width).
    """
    rates = torch.exp(-math.log(longest) * torch.arange(width // 2, device=positions.device) / max(width // 2 - 1, 1))
    angles = positions.float()[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeEmbedding(nn.Module):
    """Embeds the time t of the forward process: sinusoids, then a perceptron of two layers.

    t = timesteps means registration. That is a task and not a later time, so it has a learned vector instead of
    sinusoids.
    """

    def __init__(self, timesteps, width):
        super().__init__()
        self.timesteps, self.width = timesteps, width
        self.registration = nn.Parameter(torch.randn(width) * 0.5)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, t):
        """t: (B,) long. Returns: (B, width)."""
        waves = sinusoids(t, self.width, 4.0 * self.timesteps)                              # (B, 64)
        waves = torch.where((t == self.timesteps)[:, None], self.registration, waves)       # (B, 64)
        return in_float32(self.layers, waves)                                               # (B, 64)


class FieldScale(nn.Module):
    """Scales a network's output of order one to voxels: field = field_norm x typical displacement at t x side.

    The deformation that mode 1 undoes grows more than tenfold from t = 1 to the last t. Without the scale the network
    would first have to learn that factor, and every step of registration would disturb predictions at small t.
    """

    def __init__(self, typical_norm):
        """typical_norm: typical displacement at t = 0 .. timesteps, in image sides."""
        super().__init__()
        self.register_buffer("typical", torch.tensor(typical_norm))  # (81,), named as in the checkpoints

    def forward(self, field_norm, t, image_size):
        """field_norm: (B, N, *spatial) on a grid of any size. image_size: N voxels. Returns: the field in voxels."""
        sides = side_lengths(image_size, field_norm.device).view(1, -1)                     # (1, 3)
        scale = self.typical[t].view(-1, 1) * sides                                         # (B, 3)
        return field_norm * append_dims(scale, field_norm)                                  # (B, 3, 128^3)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------------------------

class ConvBlock(nn.Module):
    """Convolution, group norm, scale and shift by time, activation.

    y = LeakyReLU((1 + scale(t)) x GroupNorm(conv(x)) + shift(t)), modulation by channel as in FiLM (Perez et al., AAAI
    2018). Scale and shift start at zero, so that a new block treats all times equally; with time_width None they stay
    zero.
    """

    def __init__(self, dims, in_channels, out_channels, time_width, stride=1, dilation=1):
        super().__init__()
        self.conv = conv(dims, in_channels, out_channels, stride=stride, dilation=dilation)
        self.norm = group_norm(out_channels)
        self.by_time = None if time_width is None else start_at_zero(nn.Linear(time_width, 2 * out_channels))

    def forward(self, x, time):
        """x: (B, in_channels, *spatial). time: (B, time_width), or of `modulations`, or None.

        Shapes are those of OM_net's first block.
        """
        x = self.conv(x)                                                                    # (B, 16, 128^3)
        if self.by_time is None:
            return F.leaky_relu_(self.norm(x), SLOPE)                                       # (B, 16, 128^3)
        if accelerated(x):
            modulation = time[self] if isinstance(time, dict) else in_float32(self.by_time, time)   # (B, 32)
            scale, shift = modulation.chunk(2, dim=1)                                       # (B, 16) each
            kernels = kernels_for(x)
            way = kernels if kernels and kernels.fits(x, self.norm.num_groups) else device_ops
            return way.NormModulateActivate.apply(x, self.norm.num_groups, self.norm.eps, self.norm.weight,
                                                  self.norm.bias, scale, shift, SLOPE)
        x = self.norm(x)                                                                    # (B, 16, 128^3)
        scale, shift = append_dims(self.by_time(time).to(x.dtype), x).chunk(2, dim=1)       # (B, 16, 1^3) each
        x = (x + shift).addcmul_(x, scale)                                                  # (B, 16, 128^3)
        # In place: the backward passes of the activation and of the next convolution need the result only.
        return F.leaky_relu_(x, SLOPE)                                                      # (B, 16, 128^3)


def modulations(blocks, time):
    """Scale and shift of each ConvBlock from the time, on a device by one product for all: {block: (B, 2 C)}.

    time: (B, time_width) or None; returned unchanged on a CPU or if FSDP shards the blocks, which then use it.
    """
    if time is None or not accelerated(time) or any(hasattr(block.by_time.weight, "full_tensor") for block in blocks):
        return time
    layers = [block.by_time for block in blocks]
    weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
    found = in_float32(lambda time: F.linear(time, weight, bias), time)                     # (B, all 2 C)
    return dict(zip(blocks, found.split([len(layer.weight) for layer in layers], dim=1)))


class UpsampleConv(nn.Module):
    """Linear upsampling and a convolution.

    Transposed convolutions leave checkerboards (Odena et al., Distill 2016), and leaked memory with one driver.
    A 1x1x1 convolution reduces the channels first: it commutes with the interpolation, and is factor^N times cheaper
    before it. smooth=False leaves out the 3x3x3 convolution, for use before another one.
    """

    def __init__(self, dims, in_channels, out_channels, smooth=True):
        super().__init__()
        self.reduce = conv(dims, in_channels, out_channels, kernel_size=1)
        self.conv = conv(dims, out_channels, out_channels) if smooth else nn.Identity()

    def forward(self, x, size):
        """x: (B, in_channels, *spatial). size: N voxels. Shapes are those of OM_net's last upsampling."""
        x = self.reduce(x)                                                                  # (B, 16, 64^3)
        x = interpolate(x, size)                                                            # (B, 16, 128^3)
        return self.conv(x)                                                                 # (B, 16, 128^3)


# ---------------------------------------------------------------------------------------------------------------------
# Around a network
# ---------------------------------------------------------------------------------------------------------------------

# Before torch 2.11 autocast reused weights cast without gradient, so that they got none in a later pass either.
OLD_CASTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)


def recurse(one_pass, image, rec_num, detach):
    """Run a network `rec_num` times and compose the fields: recursive cascades (Zhao et al., ICCV 2019).

    field_1 = f(I), field_k = compose(field_(k-1), f(warp(I, field_(k-1)))). All passes share the weights, and each sees
    the original image interpolated once. With `detach` all but the last pass run without gradient.
    """
    field = None
    for index in range(rec_num):
        if OLD_CASTS and detach and index and index == rec_num - 1:
            torch.clear_autocast_cache()
        with torch.set_grad_enabled(torch.is_grad_enabled() and (index == rec_num - 1 or not detach)):
            if field is None:
                field = one_pass(image)
            else:
                field = compose(first=field, then=one_pass(warp(image, field)))
    return field


def unit_embedding(layer, pooled):
    """Unit vectors (B, E) of pooled features (B, C). Float32: bf16 rounds away the differences between subjects."""
    with torch.autocast(pooled.device.type, enabled=False):
        return F.normalize(layer(pooled.float()), dim=1)


def pad_to_multiple(x, multiple):
    """Pad each spatial axis with zeros at its end to a multiple of `multiple`, so that the sides can be halved."""
    padding = [(-n) % multiple for n in x.shape[2:]]
    if not any(padding):
        return x
    return F.pad(x, [p for n in reversed(padding) for p in (0, n)])


def crop(field, size):
    """Undo `pad_to_multiple`: the first `size` voxels of each spatial axis."""
    return field[(..., *[slice(0, n) for n in size])]
