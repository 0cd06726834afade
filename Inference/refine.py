"""Refine the field of one pair by optimisation, from a network's answer or from zero; the network stays as it is.

Adam optimises a stationary velocity on a coarse control grid: it raises the local correlation, the similarity of the
training, and keeps the velocity smooth; first on small images, then on larger ones. The flow of the velocity, which
does not fold (see `fields.flow`), is composed onto the field given: total = compose(first=field, then=flow(velocity)).

Optimisation for the pair after a network: Balakrishnan et al., TMI 2019. With Adam on a coarse grid: Siebert et al.,
Learn2Reg 2021 (ConvexAdam).
"""
import torch
from tqdm import tqdm

from Diffusion.fields import compose, flow, interpolate, resize_field, warp
from Diffusion.losses import local_correlation, mslncc
from Diffusion.metrics import folding_percent

STEPS = 100  # recommended: beyond about 50 the Dice of the hippocampus pairs gains 0.002, and 100 take a second or two


def refine(moving, fixed, field, steps, cfg, progress=False):
    """Optimise the field of one pair.

    moving, fixed: (1, 1, *spatial) intensities in 0 .. 1 on one isotropic grid.
    field: (1, N, *spatial) displacement in voxels to start from, or None.
    steps: optimiser steps, divided equally among refine.levels resolutions.
    cfg: flat config with its refine.* and registration.* keys. progress: show a bar.
    Returns: field (1, N, *spatial) in voxels; dict of similarity_before, similarity_after (multi-scale local
    correlation, 1 is perfect) and folding_percent.
    """
    size = fixed.shape[2:]
    control_size = [max(-(-n // cfg["refine.stride"]), 2) for n in size]
    velocity = torch.zeros(1, len(size), *control_size, device=fixed.device, requires_grad=True)
    with torch.enable_grad(), tqdm(total=steps, desc="refining", unit="step", leave=False, disable=not progress) as bar:
        for factor, count in level_steps(size, steps, cfg):
            small_moving, small_fixed = smaller(moving, factor), smaller(fixed, factor)
            start = None if field is None else resize_field(field, small_fixed.shape[2:])
            # A new Adam for each level: its moments of another resolution belong to another function.
            optimizer = torch.optim.Adam([velocity], lr=cfg["refine.lr"])
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                pair_loss(small_moving, small_fixed, start, velocity, cfg).backward()
                optimizer.step()
                bar.update()
    with torch.no_grad():
        total = updated(field, velocity, size, cfg)
        before = moving if field is None else warp(moving, field, padding="border")
        after = warp(moving, total, padding="border")
        scores = {"similarity_before": similarity(before, fixed, cfg),
                  "similarity_after": similarity(after, fixed, cfg),
                  "folding_percent": folding_percent(total)}
    return total, scores


def level_steps(size, steps, cfg):
    """(factor by which the images shrink, number of steps) for each level, coarse to fine.

    A level on which the images would be no larger than the window of the correlation is left out: it says nothing.
    """
    factors = [2 ** level for level in reversed(range(cfg["refine.levels"]))]
    factors = [factor for factor in factors if min(size) // factor > cfg["refine.window"]] or [1]
    each, rest = divmod(steps, len(factors))
    return [(factor, each + (number < rest)) for number, factor in enumerate(factors)]


def pair_loss(moving, fixed, field, velocity, cfg):
    """What refinement lowers: minus the local correlation, plus refine.weight times the velocity's roughness.

    moving, fixed: (1, 1, *spatial). The moving image itself is interpolated, only once.
    field: (1, N, *spatial) in voxels or None. velocity: (1, N, *control). Returns a scalar, -1 at best.
    """
    total = updated(field, velocity, fixed.shape[2:], cfg)
    warped = warp(moving, total, padding="border")
    correlation = local_correlation(warped, fixed, cfg["refine.window"], cfg["registration.squared"])
    smoothed = smooth(velocity, cfg["refine.smooth"])
    roughness = sum(smoothed.diff(dim=axis).square().mean() for axis in range(2, smoothed.dim()))
    return cfg["refine.weight"] * roughness - correlation


def updated(field, velocity, size, cfg):
    """The field given, then the flow of the smoothed velocity, on a grid of `size`.

    field: (1, N, *size) in voxels or None. velocity: (1, N, *control). Returns: (1, N, *size) in voxels.
    """
    update = resize_field(flow(smooth(velocity, cfg["refine.smooth"])), size)
    return update if field is None else compose(first=field, then=update)


def similarity(image, fixed, cfg):
    """Multi-scale local correlation as in training, a float; 1 is perfect. image, fixed: (1, 1, *spatial)."""
    return float(mslncc(image, fixed, cfg["registration.window"], cfg["registration.scales"],
                        cfg["registration.squared"]))


def smooth(x, sigma):
    """Gaussian smoothing along every spatial axis, its weights renormalised at the border.

    One matrix product along each axis, as in Diffusion.losses.box_mean.
    x: (B, C, *spatial). sigma: in voxels; 0 returns x itself. Returns: the shape of x.
    """
    if sigma <= 0:
        return x
    for axis in range(2, x.dim()):
        places = torch.arange(x.shape[axis], device=x.device, dtype=torch.float32)
        weights = torch.exp(-0.5 * ((places[:, None] - places) / sigma).square())
        weights = weights / weights.sum(1, keepdim=True)
        x = (x.transpose(axis, -1) @ weights.T).transpose(axis, -1)
    return x


def smaller(image, factor):
    """An image with 1 / factor of the voxels per side, corners on corners as in `resize_field`.

    image: (B, C, *spatial). Returns: (B, C, *smaller), each side at least 2.
    """
    if factor == 1:
        return image
    size = [max(-(-n // factor), 2) for n in image.shape[2:]]
    return interpolate(smooth(image, 0.4 * factor), size, align_corners=True)
