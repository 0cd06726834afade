"""Learned descent steps that end a pass of OM_net, driven by the remaining difference between image and condition.

A forward pass predicts a field without seeing its effect. These steps see it. Each one warps the image by the field so
far, computes at each voxel the force that brings its values closer to the condition's, and lets a small network turn
the forces into a displacement. Unrolled gradient steps in a registration network: Qiu et al., "Embedding Gradient-based
Optimization in Image Registration Networks", MICCAI 2022; a network that updates its answer iteratively: Teed and Deng,
"RAFT", ECCV 2020.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from Diffusion.blocks import SLOPE, conv, start_at_zero
from Diffusion.fields import append_dims, interpolate, warp
from Diffusion.losses import box_mean, weighted_variance

WIDTH, FINE_WIDTH = 16, 8  # channels of the steps on the field's grid, and at full resolution, which has more voxels
WINDOW = 5  # voxels, side of the cubes for local mean and standard deviation of intensities
FLAT = 1e-3  # added to the local variance of intensities 0 .. 1: noise in flat regions exerts no force


def locally_normalised(image, mask, shown):
    """Intensities minus their local mean, in local standard deviations, within a mask.

    image: (B, C, *spatial). mask: (B, 1, *spatial), 0 .. 1. shown: its `shown_share`. Returns: shape of image; further
    outside the mask than the window reaches, the values mean nothing.
    """
    mean = box_mean(mask * image, WINDOW) / shown
    return (image - mean) / (weighted_variance(image, mean, mask, shown, WINDOW) + FLAT).sqrt()


def shown_share(mask):
    """Mean of a mask over the window around each voxel, within the volume: the mask's shape, at least 0.001."""
    return box_mean(mask, WINDOW).clamp(min=1e-3)


def demons_force(warped, target, mask):
    """Displacement that brings each voxel's values closer to the target's, in voxels, at most 0.5 long.

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
    """The target of the forces, from a condition (B, C + 1, *spatial) float32: `compared` values, mask, `shown_share`.

    use_condition: (B,) bool or None; False makes the mask zero, and so the forces. groups: as in `LearnedDescent`.
    """
    values, mask = condition[:, :-1], condition[:, -1:]                                         # (B, 1, 128^3) each
    if use_condition is not None:
        mask = mask * append_dims(use_condition, mask)                                          # (B, 1, 128^3)
    shown = shown_share(mask)                                                                   # (B, 1, 128^3)
    return compared(values, mask, shown, groups), mask, shown


def compared(values, mask, shown, groups):
    """Values (B, C, *spatial) with the intensities `locally_normalised`: brightness and contrast have no effect."""
    intensities = groups[0]
    rest = values[:, intensities.stop:]                                                         # (B, K, 128^3)
    return torch.cat([locally_normalised(values[:, intensities], mask, shown), rest], dim=1)


class LearnedDescent(nn.Module):
    """A step of descent: step = W3 act(W2 act(context + W1 force)), W 3x3x3 convolutions without normalisation.

    It has no normalisation, because force and step must vanish as image and condition come to match. The last layer
    starts at zero, so a new network makes no step. The force has no gradient; the steps add up, and each learns from
    the loss of the final field.
    Shape comments assume 128^3 and stride 1; with stride 2 forces are averaged over 2^3 voxels.
    """

    def __init__(self, dims, channels, width, groups, count, stride):
        """channels: of the decoder's last features. groups: slices of the image's channels, with one force each: the
        intensities, and the structures if any. count: number of steps. stride: of their grid, in voxels."""
        super().__init__()
        self.groups, self.count, self.stride = groups, count, stride
        self.pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
        self.enter = conv(dims, channels, width)
        self.forces = conv(dims, dims * len(groups), width, bias=False)
        self.mix = conv(dims, width, width)
        self.leave = start_at_zero(conv(dims, width, dims))

    def context(self, x, grid):
        """What the steps see besides forces, (B, width, *grid). x: the decoder's last features, maybe coarser."""
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
        """context, force: from the methods of these names. Returns: (B, N, *grid) in voxels."""
        x = F.leaky_relu(context + self.forces(force), SLOPE)                                   # (B, 16, 128^3)
        x = F.leaky_relu(self.mix(x), SLOPE)                                                    # (B, 16, 128^3)
        return self.leave(x).float()                                                            # (B, 3, 128^3)
