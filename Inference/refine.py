"""Refine a field for one pair by optimisation, from a network's answer or from nothing. The network stays as it is.

The update is the flow of a stationary velocity on a coarse control grid, found by Adam on the similarity that training
uses, from coarse to fine images. It is composed onto the field given: total = compose(first=field, then=exp(velocity)).
Such a flow does not fold.
"""
import torch
import torch.nn.functional as F
from tqdm import tqdm

from Diffusion.fields import LINEAR, compose, flow, resize_field, warp
from Diffusion.losses import local_correlation, mslncc
from Diffusion.metrics import folding_percent

STEPS = 100  # recommended: beyond about 50 the Dice of the hippocampus pairs gains 0.002, and 100 take a second or two


def smooth(x, sigma):
    """Gaussian smoothing along every spatial axis, weights renormalised at the border. x: (B, C, *spatial); 0 = none.

    One matrix product along each axis, as in Diffusion.losses.box_mean.
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
    """An image on a grid with 1 / factor of the voxels per side, corner to corner as `resize_field` has it."""
    if factor == 1:
        return image
    size = [max(-(-n // factor), 2) for n in image.shape[2:]]
    return F.interpolate(smooth(image, 0.4 * factor), size=size, mode=LINEAR[len(size)], align_corners=True)


def update_field(velocity, size, cfg, sign=1.0):
    """What a velocity on the control grid does to a grid of `size`: displacement in its voxels."""
    velocity = sign * smooth(velocity, cfg["refine.smooth"])
    return resize_field(velocity if cfg["refine.kind"] == "displacement" else flow(velocity), size)


def pair_loss(moving, fixed, field, velocity, cfg):
    """What refinement lowers, on the grid of these images: minus the local correlation plus the roughness's weight.

    moving: the image itself, which is always interpolated once. field: (1, N, *spatial) or None.
    """
    size = fixed.shape[2:]
    update = update_field(velocity, size, cfg)
    total = update if field is None else compose(first=field, then=update)
    window, squared = cfg["refine.window"], cfg["registration.squared"]
    similarity = local_correlation(warp(moving, total, padding="border"), fixed, window, squared)
    if cfg["refine.kind"] == "symmetric":
        back = warp(fixed, update_field(velocity, size, cfg, sign=-1.0), padding="border")
        before = moving if field is None else warp(moving, field, padding="border")
        similarity = 0.5 * (similarity + local_correlation(back, before, window, squared))
    rough = smooth(velocity, cfg["refine.smooth"])
    rough = sum(rough.diff(dim=axis).square().mean() for axis in range(2, rough.dim()))
    return cfg["refine.weight"] * rough - similarity


def refine(moving, fixed, field, steps, cfg, progress=False):
    """Optimise the field of one pair.

    moving, fixed: (1, 1, *spatial) intensities in 0 .. 1 on one isotropic grid. field: (1, N, *spatial) displacement in
    voxels to start from, or None. steps: optimiser steps, shared equally among refine.levels resolutions. cfg: its
    refine.* and registration.* keys. progress: show a bar.
    Returns: field (1, N, *spatial), and a dict of similarity_before, similarity_after (multi-scale local correlation,
    1 is perfect) and folding_percent.
    """
    size, device = fixed.shape[2:], fixed.device
    control = [max(-(-n // cfg["refine.stride"]), 2) for n in size]
    velocity = torch.zeros(1, len(size), *control, device=device, requires_grad=True)
    factors = [2 ** level for level in reversed(range(cfg["refine.levels"]))]
    # A level of which fewer than a window's voxels are left says nothing.
    factors = [factor for factor in factors if min(size) // factor > cfg["refine.window"]] or [1]
    per_level = [steps // len(factors) + (place < steps % len(factors)) for place in range(len(factors))]
    with torch.enable_grad(), tqdm(total=steps, desc="refining", unit="step", leave=False, disable=not progress) as bar:
        for factor, count in zip(factors, per_level):
            images = smaller(moving, factor), smaller(fixed, factor)
            start = None if field is None else resize_field(field, images[1].shape[2:])
            # A new Adam for each level: the moments of another resolution are those of another function.
            optimizer = torch.optim.Adam([velocity], lr=cfg["refine.lr"])
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                pair_loss(*images, start, velocity, cfg).backward()
                optimizer.step()
                bar.update()
    with torch.no_grad():
        update = update_field(velocity, size, cfg)
        total = update if field is None else compose(first=field, then=update)
        scores = [mslncc(image, fixed, cfg["registration.window"], cfg["registration.scales"],
                         cfg["registration.squared"]).item()
                  for image in (moving if field is None else warp(moving, field, padding="border"),
                                warp(moving, total, padding="border"))]
    return total, {"similarity_before": scores[0], "similarity_after": scores[1],
                   "folding_percent": folding_percent(total)}
