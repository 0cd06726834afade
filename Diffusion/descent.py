"""Learned steps of descent at the end of a pass of OM_net: from what still differs between image and condition.

A forward pass predicts a field without looking at what it does. Here it does look: the image is warped by the field so
far, at each voxel a force says which way its values come closer to the condition's, and a small network makes a step of
that, several times over. Unrolled gradient steps of a registration network: Qiu et al., "Embedding Gradient-based
Optimization in Image Registration Networks", MICCAI 2022; a network that updates its answer again and again: Teed and
Deng, "RAFT", ECCV 2020.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion.blocks import SLOPE, conv, start_at_zero
from Diffusion.fields import warp
from Diffusion.losses import box_mean, weighted_moments

WINDOW = 5  # voxels, side of the cubes by whose mean and deviation intensities are normalised
FLAT = 1e-3  # variance added to theirs, of intensities 0 .. 1: noise in flat parts is no force


def locally_normalised(image, mask, shown):
    """Intensities less their local mean, in local standard deviations, of what a mask shows; outside there are zeros.

    image: (B, C, *spatial). mask: (B, 1, *spatial), 0 .. 1. shown: `shown_share` of it. Returns: as image.
    """
    mean, variance = weighted_moments(image, mask, shown, WINDOW)
    return (image - mean) / (variance + FLAT).sqrt()


def shown_share(mask):
    """How much of the cube around each voxel, as far as it is in the volume, a mask shows: its shape, above 0."""
    return (box_mean(mask, WINDOW) / box_mean(torch.ones_like(mask), WINDOW)).clamp(min=1e-3)


def demons_force(warped, target, mask):
    """The displacement of each voxel that brings its values closer to the target's, in voxels, at most 0.5 long.

    With a the warped channels, b those of the target, d = mask (b - a):
    f = sum_c d_c grad a_c / (sum_c |grad a_c|^2 + sum_c d_c^2 + 1e-3)
    (Thirion, "Image matching as a diffusion process: an analogy with Maxwell's demons", Medical Image Analysis 1998;
    here over several channels).

    warped, target: (B, C, *spatial). mask: (B, 1, *spatial), 0 .. 1. Returns: (B, N, *spatial).
    """
    slopes = torch.stack(torch.gradient(warped, dim=list(range(2, warped.dim()))), dim=1)       # (B, 3, C, 128^3)
    missing = ((target - warped) * mask).unsqueeze(1)                                           # (B, 1, C, 128^3)
    size = slopes.square().sum((1, 2)) + missing.square().sum((1, 2)) + 1e-3                    # (B, 128^3)
    return (missing * slopes).sum(2) / size.unsqueeze(1)                                        # (B, 3, 128^3)


class LearnedDescent(nn.Module):
    """A step of descent: step = W3 act(W2 act(context + W1 force)), W 3x3x3 convolutions without normalisation.

    Without, because the force becomes small as image and condition come together, and the step with it. The last layer
    starts at zero: a new network makes no step. The force carries no gradient; the steps add up, and each learns from
    the loss of the field that all of them have made.
    Shapes are those of 128^3 with field_stride 1; with field_stride 2 forces are averaged over 2^3 voxels.
    """

    WIDTH = 16

    def __init__(self, dims, channels, groups):
        """channels: of the decoder's last features. groups: slices of the image's channels, which have a force each:
        the intensities, and the structures if there are any."""
        super().__init__()
        self.groups = groups
        self.pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
        self.enter = conv(dims, channels, self.WIDTH)
        self.forces = conv(dims, dims * len(groups), self.WIDTH, bias=False)
        self.mix = conv(dims, self.WIDTH, self.WIDTH)
        self.leave = start_at_zero(conv(dims, self.WIDTH, dims))

    def target(self, condition, keep):
        """What a condition, (B, C + 1, *spatial) float32, is compared as: values, as `compared`; mask; `shown_share`.

        keep: (B,) bool or None; where it is False, the mask is zero, and so are the forces.
        """
        values, mask = condition[:, :-1], condition[:, -1:]                                     # (B, 1, 128^3) each
        if keep is not None:
            mask = mask * keep.view(-1, *[1] * (mask.dim() - 1))                                # (B, 1, 128^3)
        shown = shown_share(mask)                                                               # (B, 1, 128^3)
        return self.compared(values, mask, shown), mask, shown

    def compared(self, values, mask, shown):
        """The channels of an image with its intensities normalised: brightness and contrast do not count."""
        intensities = self.groups[0]
        rest = values[:, intensities.stop:]                                                     # (B, K, 128^3)
        return torch.cat([locally_normalised(values[:, intensities], mask, shown), rest], dim=1)

    def force(self, image, field, target, stride):
        """The forces of all groups, (B, N x groups, *grid), on a grid with 1 / stride of the voxels per side.

        image: (B, C, *spatial), warped by field, (B, N, *spatial) in voxels. target: from `target`.
        """
        values, mask, shown = target
        warped = self.compared(warp(image, field, padding="border"), mask, shown)               # (B, 1, 128^3)
        forces = [demons_force(warped[:, group], values[:, group], mask) for group in self.groups]
        return self.pool(torch.cat(forces, dim=1), stride)                                      # (B, 3, 128^3)

    def forward(self, context, force):
        """context: of the layer `enter`, (B, 16, *grid). force: from `force`. Returns: (B, N, *grid) in voxels."""
        x = F.leaky_relu(context + self.forces(force), SLOPE)                                   # (B, 16, 128^3)
        x = F.leaky_relu(self.mix(x), SLOPE)                                                    # (B, 16, 128^3)
        return self.leave(x).float()                                                            # (B, 3, 128^3)
