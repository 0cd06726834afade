"""Layers and functions that all networks share; shape comments give 128^3 with the channels of config_om.yaml."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion.fields import LINEAR, compose, side_lengths, warp


def is_float32_on_cpu(x):
    """Whether a CPU computes a layer of x in float32, where torch leaves oneDNN out of some 3D convolutions.

    It does so for one small sample, and with one thread for kernels of one voxel (use_mkldnn in
    ATen/native/Convolution.cpp); `slow_conv3d`, which it takes instead, needs four times as long.
    """
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return x.device.type == "cpu" and kind == torch.float32 and torch.backends.mkldnn.is_available()


def convolve_voxels(x, weight, bias):
    """The convolution with a kernel of one voxel, which is a product of matrices. (B, C, *size) -> (B, K, *size)."""
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def convolve_in_slabs(x, weight, bias, stride, padding, dilation):
    """The 3D convolution of one sample, as a batch of its two halves along the first axis, which share a border.

    x: (1, C, D, H, W). Returns: (1, K, ...), what F.conv3d returns up to rounding.
    """
    reach, step = dilation[0] * (weight.shape[2] - 1) + 1, stride[0]
    planes = (x.shape[2] + 2 * padding[0] - reach) // step + 1
    half = (planes + 1) // 2
    slab = step * (half - 1) + reach                                    # planes of the input that make `half` planes
    behind = max(step * half + slab - x.shape[2] - padding[0], 0)       # at least the padding; more for an odd number
    x = F.pad(x, [0, 0, 0, 0, padding[0], behind])
    x = torch.cat([x.narrow(2, 0, slab), x.narrow(2, step * half, slab)])
    x = F.conv3d(x, weight, bias, stride, (0, *padding[1:]), dilation)                  # (2, K, half, ...)
    return torch.cat([x[:1], x[1:, :, :planes - half]], dim=2)


class Conv3d(nn.Conv3d):
    """nn.Conv3d that keeps to oneDNN on a CPU."""

    def _conv_forward(self, x, weight, bias):
        if is_float32_on_cpu(x):
            if set(self.kernel_size + self.stride) == {1}:
                return convolve_voxels(x, weight, bias)
            if len(x) == 1 and x.shape[1:4].numel() <= 20480:
                return convolve_in_slabs(x, weight, bias, self.stride, self.padding, self.dilation)
        return super()._conv_forward(x, weight, bias)


def conv(dims, inputs, outputs, kernel=3, stride=1, dilation=1, bias=True):
    layer = Conv3d if dims == 3 else nn.Conv2d
    return layer(inputs, outputs, kernel, stride, padding=dilation * (kernel // 2), dilation=dilation, bias=bias)


def group_norm(channels):
    """Groups of 8 channels: no statistics over the batch, so the result does not depend on who else is in it."""
    return nn.GroupNorm(max(channels // 8, 1), channels)


def start_at_zero(layer):
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def sinusoids(positions, width, longest):
    """Sines and cosines of geometrically spaced wavelengths up to `longest`: (..., width) for any shape (...)."""
    rates = torch.exp(-math.log(longest) * torch.arange(width // 2, device=positions.device) / max(width // 2 - 1, 1))
    angles = positions.float()[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TimeEmbedding(nn.Module):
    """Time index to a vector: sinusoids, then two layers. Registration's index gets a learned vector of its own."""

    def __init__(self, timesteps, width):
        super().__init__()
        self.timesteps, self.width = timesteps, width
        self.registration = nn.Parameter(torch.randn(width) * 0.5)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, t):
        waves = sinusoids(t, self.width, 4.0 * self.timesteps)
        return self.layers(torch.where((t == self.timesteps)[:, None], self.registration, waves))


class FieldScale(nn.Module):
    """Outputs of order one to a field in voxels: times the displacement that is typical of each time, and the side.

    What mode 1 has to undo grows a hundredfold from t = 1 to the last t; without this the network would have to learn
    that factor first, and every step of registration would upset the smallest t.
    """

    def __init__(self, typical_norm):
        super().__init__()
        self.register_buffer("typical", torch.tensor(typical_norm))  # float32, in image sides

    def forward(self, output, t, size):
        scale = self.typical[t].view(-1, 1) * side_lengths(size, output.device).view(1, -1)
        return output * scale.view(*scale.shape, *[1] * len(size))


class ConvBlock(nn.Module):
    """Convolution, group norm, scale and shift by time, activation."""

    def __init__(self, dims, inputs, outputs, time_width=0, stride=1, dilation=1):
        super().__init__()
        self.conv = conv(dims, inputs, outputs, stride=stride, dilation=dilation)
        self.norm = group_norm(outputs)
        self.by_time = start_at_zero(nn.Linear(time_width, 2 * outputs)) if time_width else None

    def forward(self, x, time=None):
        x = self.norm(self.conv(x))
        if self.by_time is not None:
            shape = (len(x), -1, *[1] * (x.dim() - 2))
            scale, shift = self.by_time(time).to(x.dtype).view(shape).chunk(2, dim=1)
            x = (x + shift).addcmul_(x, scale)
        return F.leaky_relu_(x, 0.2)  # its backward pass needs the result only, as does the convolution that follows


class UpsampleConv(nn.Module):
    """Linear upsampling and a convolution. (ConvTranspose3d leaves checkerboards and leaked memory on one driver.)

    Channels are reduced first, by a 1x1 convolution at the low resolution: it commutes with the interpolation and is
    scale^dims cheaper there. The 3x3x3 convolution after it can be left out where another one follows.
    """

    def __init__(self, dims, inputs, outputs, smooth=True):
        super().__init__()
        self.mode = LINEAR[dims]
        self.reduce = conv(dims, inputs, outputs, kernel=1)
        self.conv = conv(dims, outputs, outputs) if smooth else nn.Identity()

    def forward(self, x, size):
        x = F.interpolate(self.reduce(x), size=size, mode=self.mode, align_corners=False)
        return self.conv(x)


def recurse(one_pass, image, rec_num, detach):
    """Run a network `rec_num` times with the same weights and compose the answers.

    Pass k sees the original image warped by the field so far: field = pass_k + warp(field, pass_k). With `detach` the
    earlier passes run without gradient.
    """
    field = None
    for index in range(rec_num):
        with torch.set_grad_enabled(torch.is_grad_enabled() and (index == rec_num - 1 or not detach)):
            if field is None:
                field = one_pass(image)
            else:
                field = compose(first=field, then=one_pass(warp(image, field)))
    return field


def unit_embedding(layer, pooled):
    """Unit vectors (B, E) of pooled features (B, C), in float32: subjects differ by less than bf16 can tell."""
    with torch.autocast(pooled.device.type, enabled=False):
        return F.normalize(layer(pooled.float()), dim=1)


def pad_to_multiple(x, multiple):
    """Zeros at the end of each spatial axis, so that the sides can be halved often enough."""
    padding = [(-n) % multiple for n in x.shape[2:]]
    if not any(padding):
        return x
    return F.pad(x, [p for n in reversed(padding) for p in (0, n)])


def crop(field, size):
    return field[(..., *[slice(0, n) for n in size])]
