"""Augmentation of whole batches on the device, keyed by sample."""
import math

import torch

from Diffusion.draws import normal, uniform
from Diffusion.fields import affine_field, warp


def random_affine(keys, dims, size, cfg):
    """Affine matrices about the image centre, (B, dims, dims + 1) in voxels: rotation, scaling, shift, flip."""
    numbers = uniform(keys, "affine", 3 * 3 + 1) * 2 - 1
    angles = numbers[:, :3] * math.radians(cfg["augment.rotation"])
    scales = torch.exp(numbers[:, 3:3 + dims] * math.log1p(cfg["augment.scaling"]))
    shift = numbers[:, 6:6 + dims] * cfg["augment.shift"] * torch.tensor(size, dtype=torch.float32)
    linear = torch.diag_embed(scales)
    planes = [(0, 1), (1, 2), (0, 2)] if dims == 3 else [(0, 1)]
    for index, (i, j) in enumerate(planes):
        cos, sin = torch.cos(angles[:, index]), torch.sin(angles[:, index])
        turn = torch.eye(dims).repeat(len(linear), 1, 1)
        turn[:, i, i], turn[:, j, j], turn[:, i, j], turn[:, j, i] = cos, cos, -sin, sin
        linear = turn @ linear
    flipped = (numbers[:, 9] + 1) / 2 < cfg["augment.flip"]
    linear[:, :, 0] = torch.where(flipped[:, None], -linear[:, :, 0], linear[:, :, 0])
    return torch.cat([linear, shift[:, :, None]], dim=2)


def augment(images, keys, cfg):
    """Randomly moved and re-contrasted copies of a batch; what is switched off costs nothing.

    images: (B, 1, *spatial) in [0, 1] on any device. keys: B tuples (seed, epoch, sample).
    Returns: (B, 1, *spatial).
    """
    dims, size = images.dim() - 2, images.shape[2:]
    if cfg["augment.rotation"] or cfg["augment.scaling"] or cfg["augment.shift"] or cfg["augment.flip"]:
        matrix = random_affine(keys, dims, size, cfg).to(images.device)
        images = warp(images, affine_field(matrix, size), padding="border")
    if cfg["augment.gamma"]:
        power = torch.exp((uniform(keys, "gamma") * 2 - 1) * cfg["augment.gamma"])
        images = images.clamp(min=0.0) ** power.view(-1, *[1] * (dims + 1)).to(images.device)
    if cfg["augment.noise"]:
        images = images + cfg["augment.noise"] * normal(keys, "noise", 1, *size).to(images.device)
    return images
