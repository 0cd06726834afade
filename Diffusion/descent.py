"""Learned steps of descent at the end of a pass of OM_net, from the remaining difference between image and condition.

A forward pass predicts a field without seeing its effect. These steps see it: the image is warped by the field so far,
a force at each voxel points in the direction in which its values approach those of the condition, and a small network
turns the forces into a step, several times. Unrolled gradient steps of a registration network: Qiu et al., "Embedding
Gradient-based Optimization in Image Registration Networks", MICCAI 2022; a network that updates its answer again and
again: Teed and Deng, "RAFT", ECCV 2020.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion.blocks import SLOPE, conv, start_at_zero
from Diffusion.fields import interpolate, warp
from Diffusion.losses import box_mean, weighted_variance

WIDTH, FINE_WIDTH = 16, 8  # channels of the steps on the field's grid, and at full resolution, where voxels are many
WINDOW = 5  # voxels, side of the cubes by whose mean and deviation intensities are normalised
FLAT = 1e-3  # variance added to theirs, of intensities 0 .. 1: noise in flat parts is no force


def locally_normalised(image, mask, shown):
    """Intensities minus their local mean, in local standard deviations, within a mask; zero outside.

    image: (B, C, *spatial). mask: (B, 1, *spatial), 0 .. 1. shown: `shown_share` of it. Returns: as image.
    """
    mean = box_mean(mask * image, WINDOW) / shown
    return (image - mean) / (weighted_variance(image, mean, mask, shown, WINDOW) + FLAT).sqrt()


def shown_share(mask):
    """How much of the cube around each voxel, as far as it is in the volume, a mask shows: its shape, above 0."""
    return box_mean(mask, WINDOW).clamp(min=1e-3)


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


def target_of(condition, use_condition, groups):
    """What a condition, (B, C + 1, *spatial) float32, is compared as: values, as `compared`; mask; `shown_share`.

    use_condition: (B,) bool or None; where it is False, the mask is zero, and so are the forces. groups: of
    `LearnedDescent`.
    """
    values, mask = condition[:, :-1], condition[:, -1:]                                         # (B, 1, 128^3) each
    if use_condition is not None:
        mask = mask * use_condition.view(-1, *[1] * (mask.dim() - 1))                           # (B, 1, 128^3)
    shown = shown_share(mask)                                                                   # (B, 1, 128^3)
    return compared(values, mask, shown, groups), mask, shown


def compared(values, mask, shown, groups):
    """The channels of an image with its intensities normalised: brightness and contrast do not count."""
    intensities = groups[0]
    rest = values[:, intensities.stop:]                                                         # (B, K, 128^3)
    return torch.cat([locally_normalised(values[:, intensities], mask, shown), rest], dim=1)


class LearnedDescent(nn.Module):
    """A step of descent: step = W3 act(W2 act(context + W1 force)), W 3x3x3 convolutions without normalisation.

    It has no normalisation, because the force, and the step with it, must become small as image and condition come
    together. The last layer starts at zero, so a new network makes no step. The force has no gradient; the steps add
    up, and each learns from the loss of the final field.
    Shapes are those of 128^3 with stride 1; with stride 2 forces are averaged over 2^3 voxels.
    """

    def __init__(self, dims, channels, width, groups, count, stride):
        """channels: of the decoder's last features. groups: slices of the image's channels, which have a force each:
        the intensities, and the structures if there are any. count: of the steps. stride: voxels between the places of
        their grid."""
        super().__init__()
        self.groups, self.count, self.stride = groups, count, stride
        self.pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
        self.enter = conv(dims, channels, width)
        self.forces = conv(dims, dims * len(groups), width, bias=False)
        self.mix = conv(dims, width, width)
        self.leave = start_at_zero(conv(dims, width, dims))

    def context(self, x, grid):
        """What the steps see besides forces, (B, 16, *grid), of the decoder's last features, maybe on a coarser one."""
        context = self.enter(x)                                                                 # (B, 16, 128^3)
        return context if tuple(context.shape[2:]) == tuple(grid) else interpolate(context, grid)

    def force(self, image, field, target):
        """The forces of all groups, (B, N x groups, *grid).

        image: (B, C, *spatial), warped by field, (B, N, *spatial) in voxels. target: from `target_of`.
        """
        values, mask, shown = target
        warped = compared(warp(image, field, padding="border"), mask, shown, self.groups)       # (B, 1, 128^3)
        forces = [demons_force(warped[:, group], values[:, group], mask) for group in self.groups]
        return self.pool(torch.cat(forces, dim=1), self.stride)                                 # (B, 3, 128^3)

    def forward(self, context, force):
        """context, force: from the functions of these names. Returns: (B, N, *grid) in voxels."""
        x = F.leaky_relu(context + self.forces(force), SLOPE)                                   # (B, 16, 128^3)
        x = F.leaky_relu(self.mix(x), SLOPE)                                                    # (B, 16, 128^3)
        return self.leave(x).float()                                                            # (B, 3, 128^3)
