"""Two older networks: the published one, and one for comparison. Shape comments assume 128^3.

The published method: Zheng, Mo, Sun, Li, Wu, Wang, Vincent, Papież, "Deformation-recovery diffusion model (DRDM):
instance deformation for image manipulation and synthesis", Medical Image Analysis 110 (2026) 103987.
"""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion.blocks import (
    Conv2d,
    Conv3d,
    conv,
    crop,
    pad_to_multiple,
    recurse,
    start_at_zero,
    unit_embedding,
)
from Diffusion.fields import append_dims, side_lengths
from Diffusion.om_net import OM_net

NEARLY_RELU = 1e-6  # slope of the published network's activation for negative values


class TransposedConv(nn.Module):
    """Upsampling by a transposed convolution whose kernel equals its stride."""

    def __init__(self, dims, in_channels, out_channels, factor=2):
        super().__init__()
        layer = nn.ConvTranspose3d if dims == 3 else nn.ConvTranspose2d
        self.up = layer(in_channels, out_channels, kernel_size=factor, stride=factor)

    def forward(self, x, size):
        """x: (B, in_channels, *spatial). size: as for UpsampleConv; unused, because the factor decides."""
        return self.up(x)                                                            # (B, out_channels, *size)


class RecMulModMutAttnNet(OM_net):
    """OM_net with a decoder of transposed convolutions: for comparison, and to diagnose their memory leak."""

    def make_upsampling(self, in_channels, out_channels):
        return TransposedConv(self.dims, in_channels, out_channels)

    def make_coarse_head(self, in_channels):
        head = TransposedConv(self.dims, in_channels, self.dims, self.multiple // self.stride)
        start_at_zero(head.up)
        return head


class InstanceNorm(nn.Module):
    """Instance normalisation (Ulyanov et al., 2016) of each channel of each sample, with learned scale and shift.

    Unlike torch's module it accepts a bottleneck of a single voxel. Group norm with one channel per group would be the
    same, but on a CPU torch sums it less exactly in channels_last: predictions differed by 1e-4 of the image side.
    """

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        """x: (B, channels, *spatial)."""
        x = x.contiguous()
        return torch.instance_norm(x, self.weight, self.bias, None, None, True, 0.0, 1e-5, True)  # as x


class AtrousBlock(nn.Module):
    """A convolution, then two more beside a residual connection, the second one dilated: y = f(u + g(f(u))), u = h(x).

    f is the activation; g the convolutions of dilation 1 and 3, which widen the receptive field at full resolution
    (Chen et al., "DeepLab", TPAMI 2018); h the first convolution and, up to the bottleneck, an instance norm.
    """

    def __init__(self, dims, in_channels, out_channels, norm):
        super().__init__()
        self.conv0 = conv(dims, in_channels, out_channels)
        self.ln = InstanceNorm(out_channels) if norm else nn.Identity()
        self.convs = nn.ModuleList(conv(dims, out_channels, out_channels, dilation=dilation) for dilation in (1, 3))

    def forward(self, x):
        """x: (B, in_channels, *spatial)."""
        x = branch = self.ln(self.conv0(x))                                          # (B, out_channels, *spatial)
        for layer in self.convs:
            branch = layer(F.leaky_relu(branch, NEARLY_RELU))                        # (B, out_channels, *spatial)
        return F.leaky_relu(x + branch, NEARLY_RELU)                                 # (B, out_channels, *spatial)


class TimeTable(nn.Module):
    """Fixed sinusoids of the times, (T, 100): sin in even and cos in odd columns, of t x 10000^(-2 c / 100), c even."""

    def __init__(self, timesteps, width=100):
        super().__init__()
        rates = 10000.0 ** (-2.0 / width * torch.arange(0, width, 2))
        angles = torch.arange(timesteps)[:, None] * rates
        self.register_buffer("weight", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))


def halving(dims, channels):
    """A strided convolution that halves the sides, which are even."""
    return (Conv3d if dims == 3 else Conv2d)(channels, channels, kernel_size=4, stride=2, padding=1)


def doubling(dims, channels):
    """A transposed convolution that doubles the sides."""
    layer = nn.ConvTranspose3d if dims == 3 else nn.ConvTranspose2d
    return layer(channels, channels, kernel_size=4, stride=2, padding=1)


class RecResACNet(nn.Module):
    """The recursive residual atrous network of the published method (Zheng et al., Medical Image Analysis 110, 2026).

    Module names are those of the published weights, 443,435 numbers in 2D, which therefore load directly
    (Inference/load_model.py). The published network sees only the image, so it can recover but not register. With a
    condition, two more input channels, it gains a vector that replaces the time in registration, and mode 2's
    embedding. Without one, t = timesteps counts as the last time, and embeddings are the pooled features.
    """

    def __init__(self, *, dims, image_channels, timesteps, conditioned, rec_num, detach, embedding_width):
        super().__init__()
        self.dims, self.conditioned, self.rec_num, self.detach = dims, conditioned, rec_num, detach
        self.multiple = 8  # three levels halve the sides
        self.shown_channels = image_channels + 1  # of the condition: values and mask
        a, b, c = 10, 20, 40  # channels of the levels
        first = image_channels + (self.shown_channels if conditioned else 0)

        def by_time(channels):
            return nn.Sequential(nn.Linear(100, channels), nn.LeakyReLU(NEARLY_RELU), nn.Linear(channels, channels))

        def level(*channels, norm=True):
            return nn.Sequential(*[AtrousBlock(dims, *pair, norm) for pair in itertools.pairwise(channels)])

        self.time_embed = TimeTable(timesteps)
        self.te1, self.b1, self.down1 = by_time(first), level(first, a, a, a), halving(dims, a)
        self.te2, self.b2, self.down2 = by_time(a), level(a, b, b, b), halving(dims, b)
        self.te3, self.b3, self.down3 = by_time(b), level(b, c, c, c), halving(dims, c)
        self.te_mid, self.b_mid, self.up1 = by_time(c), level(c, b, b, c), doubling(dims, c)
        self.te4, self.b4, self.up2 = by_time(2 * c), level(2 * c, c, b, b, norm=False), doubling(dims, b)
        self.te5, self.b5, self.up3 = by_time(2 * b), level(2 * b, b, a, a, norm=False), doubling(dims, a)
        self.te_out, self.b_out = by_time(2 * a), level(2 * a, a, a, a, norm=False)
        self.conv_out = start_at_zero(conv(dims, a, dims))
        if conditioned:
            self.registration = nn.Parameter(0.5 * torch.randn(100))
            self.embedding = nn.Linear(c, embedding_width)

    def at_time(self, layer, time):
        """What a level adds to its channels, or multiplies them by, at each sample's time: (B, C, 1^3)."""
        return layer(time).view(len(time), -1, *[1] * self.dims)

    def features(self, image, condition, time):
        """Features of four levels, finest first: three on the way down and the bottleneck."""
        x = image if condition is None else torch.cat([image, condition], dim=1)     # (B, 3, 128^3)
        fine = self.b1(x + self.at_time(self.te1, time))                             # (B, 10, 128^3)
        half = self.b2(self.down1(fine) + self.at_time(self.te2, time))              # (B, 20, 64^3)
        quarter = self.b3(self.down2(half) + self.at_time(self.te3, time))           # (B, 40, 32^3)
        eighth = self.b_mid(self.down3(quarter) * self.at_time(self.te_mid, time))   # (B, 40, 16^3)
        return fine, half, quarter, eighth

    def one_pass(self, image, condition, time):
        """The field of one pass, in voxels. condition: padded for `features`."""
        fine, half, quarter, x = self.features(pad_to_multiple(image, self.multiple), condition, time)
        for skip, up, by_time, level in ((quarter, self.up1, self.te4, self.b4),     # (B, 20, 32^3)
                                         (half, self.up2, self.te5, self.b5),        # (B, 10, 64^3)
                                         (fine, self.up3, self.te_out, self.b_out)):  # (B, 10, 128^3)
            x = level(torch.cat([skip, up(x)], dim=1) + self.at_time(by_time, time))
        size = image.shape[2:]
        return crop(self.conv_out(x).float(), size) * side_lengths(size, x.device)   # (B, 3, 128^3)

    def masked(self, image, condition, use_condition):
        """The condition, padded; zeros if absent or dropped. None for a network without conditions."""
        if not self.conditioned:
            return None
        empty = image.new_zeros(len(image), self.shown_channels, *image.shape[2:])   # (B, 2, 128^3)
        condition = empty if condition is None else condition                        # (B, 2, 128^3)
        if use_condition is not None:
            condition = torch.where(append_dims(use_condition, empty), condition, empty)     # (B, 2, 128^3)
        return pad_to_multiple(condition, self.multiple)                             # (B, 2, 128^3)

    def embeddings(self, image, condition, time):
        """Unit vectors of the image and of the condition, each encoded with zeros in the other's channels."""
        image = pad_to_multiple(image, self.multiple)                                # (B, 1, 128^3)
        if not self.conditioned:
            return [F.normalize(self.features(image, None, time)[-1].float().flatten(2).mean(2), dim=1)] * 2
        of_image = self.features(image, torch.zeros_like(condition), time)[-1]       # (B, 40, 16^3)
        of_condition = self.features(torch.zeros_like(image), condition, time)[-1]   # (B, 40, 16^3)
        return [unit_embedding(self.embedding, features.flatten(2).mean(2)) for features in (of_image, of_condition)]

    def forward(self, image, t, condition=None, use_condition=None, embed=False):
        """Like every network, see Diffusion/networks.py. Runs in float32: in bfloat16 a recovery drifts."""
        with torch.autocast(image.device.type, enabled=False):
            # Embeddings use t = 0; otherwise pairs could be matched by time instead of subject.
            t, last = torch.zeros_like(t) if embed else t, len(self.time_embed.weight) - 1
            time = self.time_embed.weight[t.clamp(max=last)]                         # (B, 100)
            if self.conditioned:
                time = torch.where((t > last)[:, None], self.registration, time)     # (B, 100)
            condition = self.masked(image, condition, use_condition)                 # (B, 2, 128^3)
            if embed:
                return self.embeddings(image, condition, time)                       # (B, 128) each
            return recurse(lambda warped: self.one_pass(warped, condition, time), image, self.rec_num,
                           self.detach)                                              # (B, 3, 128^3)
