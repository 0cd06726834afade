"""Refine the field of one pair by optimisation, from a network's answer or from zero; the network stays as it is.

Adam optimises a stationary velocity on a coarse control grid: it raises the local correlation, the similarity of the
training, and keeps the velocity smooth; first on small images, then on larger ones. The flow of the velocity, which
does not fold (see `fields.flow`), is composed onto the field given: total = compose(first=field, then=flow(velocity)).

Optimisation for the pair after a network: Balakrishnan et al., TMI 2019. With Adam on a coarse grid: Siebert et al.,
Learn2Reg 2021 (ConvexAdam).
"""
import torch
from tqdm import tqdm

from Diffusion.fields import compose, flow, interpolate, masked, resize_field, warp
from Diffusion.losses import (
    image_similarity,
    likeness,
    local_correlation,
    mapped_correlation,
    self_similarity,
    soft_dice,
)

NO_DETAIL = 0.03  # voxels, root mean square: what a field may lose on the control grid
MIND_GAIN = 1.0  # of the likeness of descriptions against roughness of the velocity: 3 costs 0.007 of Dice


def refine(moving, fixed, field, steps, cfg, progress=False, moving_mask=None, fixed_mask=None, structures=None):
    """Optimise the field of one pair.

    moving, fixed: (1, C, *spatial) intensities in 0 .. 1 on one isotropic grid; channels count alike.
    field: (1, N, *spatial) displacement in voxels to start from, or None.
    steps: optimiser steps, divided equally among refine.levels resolutions.
    cfg: flat config with its refine.* and registration.* keys. progress: show a bar.
    moving_mask, fixed_mask: (1, 1, *spatial), 0 .. 1, how much each voxel of the two counts; None for all alike.
    structures: what a network segments in moving and fixed, (2, K, *spatial), 0 .. 1; None for nothing.
    Returns: field (1, N, *spatial) in voxels.
    """
    size = fixed.shape[2:]
    pair = {"moving": moving, "fixed": fixed, "moving_mask": moving_mask, "fixed_mask": fixed_mask,
            "structures": structures}
    control_size = [max(-(-n // cfg["refine.stride"]), 2) for n in size]
    velocity = torch.zeros(1, len(size), *control_size, device=fixed.device, requires_grad=True)
    coarse = on_control_grid(field, control_size)
    with torch.enable_grad(), tqdm(total=steps, desc="refining", unit="step", leave=False, disable=not progress) as bar:
        levels = level_steps(size, steps, cfg)
        for factor, count in levels:
            small = pair_at_level(pair, factor, cfg)
            start = (None if field is None else resize_field(field, small["fixed"].shape[2:])), coarse
            # A new Adam for each level: its moments of another resolution belong to another function.
            optimizer = torch.optim.Adam([velocity], lr=cfg["refine.lr"])
            left = cfg["refine.last_lr"] if factor == levels[-1][0] else 1.0
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, left, total_iters=count)
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                pair_loss(small, start, velocity, cfg).backward()
                optimizer.step()
                schedule.step()
                bar.update()
    with torch.no_grad():
        return updated(field, flow(smooth(velocity, cfg["refine.smooth"])), size)


def level_steps(size, steps, cfg):
    """(factor by which the images shrink, number of steps) for each level, coarse to fine.

    A level on which the images would be no larger than the window of the correlation is left out: it says nothing.
    """
    factors = [2 ** level for level in reversed(range(cfg["refine.levels"]))]
    factors = [factor for factor in factors if min(size) // factor > cfg["refine.window"]] or [1]
    each, rest = divmod(steps, len(factors))
    return [(factor, each + (number < rest)) for number, factor in enumerate(factors)]


def pair_at_level(pair, factor, cfg):
    """A pair with 1 / factor of the voxels per side, as `pair_loss` compares it.

    pair: dict of moving, fixed, (1, C, *spatial), moving_mask, fixed_mask, (1, 1, *spatial) or None, and structures,
    (2, K, *spatial) or None. What a mask leaves out does not leak into the smaller images. With registration.similarity
    "mind" the images become their descriptions, which are then moved in their place: cheaper than describing the moved
    image in each step. The structures become the last channels, so that one interpolation moves all.
    """
    structures = pair["structures"]
    small = {"structures": 0 if structures is None else structures.shape[1]}
    for number, side in enumerate(("moving", "fixed")):
        image, mask = pair[side], pair[f"{side}_mask"]
        small[side], small[f"{side}_mask"] = masked(lambda volume: smaller(volume, factor), image, mask)
        if cfg["registration.similarity"] == "mind":
            small[side] = self_similarity(small[side])
        if structures is not None:
            small[side] = torch.cat([small[side], smaller(structures[number:number + 1], factor)], dim=1)
    return small


def pair_loss(pair, start, velocity, cfg):
    """What refinement lowers: minus the similarity, plus refine.weight times the velocity's roughness.

    Where a network has segmented structures, also minus refine.structures times their Dice.

    pair: from `pair_at_level`. The moving image itself is interpolated, only once.
    start: the field to begin with, (1, N, *spatial) in voxels of the pair or None, and what `on_control_grid` made of
    it. velocity: (1, N, *control). Returns a scalar, -1 at best, with structures -1 - refine.structures.
    """
    field, coarse = start
    size = pair["fixed"].shape[2:]
    smoothed = smooth(velocity, cfg["refine.smooth"])
    then = flow(smoothed)
    if coarse is None:
        total = updated(field, then, size)
    else:  # the flow carries the field by little, and by how much changes slowly: found on the control grid
        total = field + resize_field(compose(first=coarse, then=then) - coarse, size)
    warped, weight = warp_pair(pair, total)
    images = warped.shape[1] - pair["structures"]
    (warped, brought), (fixed, there) = (volume.split([images, pair["structures"]], dim=1)
                                         for volume in (warped, pair["fixed"]))
    if cfg["registration.similarity"] == "mind":
        alike = MIND_GAIN * likeness(warped, fixed, weight)
    else:
        correlation = local_correlation if cfg["registration.similarity"] == "correlation" else mapped_correlation
        alike = correlation(warped, fixed, cfg["refine.window"], cfg["registration.squared"], weight=weight)
    if pair["structures"]:
        overlap = soft_dice(brought, there, there.new_ones(there.shape[:2])).mean()
        alike = alike + cfg["refine.structures"] * overlap
    roughness = sum(smoothed.diff(dim=axis).square().mean() for axis in range(2, smoothed.dim()))
    return cfg["refine.weight"] * roughness - alike


def warp_pair(pair, field, padding="border"):
    """The moving image of a pair as a field shows it, and how much each voxel of the fixed grid counts.

    pair: dict of moving, moving_mask and fixed_mask. field: (1, N, *spatial) in voxels, or None. padding: of `warp`.
    Returns: (1, C, *spatial); (1, 1, *spatial) without gradient, so that no field gains by leaving the mask, or None
    where all count alike.
    """
    warped, weight = pair["moving"], pair["moving_mask"]
    if field is not None:
        warped, weight = masked(lambda image: warp(image, field, padding=padding), warped, weight)
    for_fixed = pair["fixed_mask"]
    if weight is None or for_fixed is None:
        return warped, for_fixed if weight is None else weight.detach()
    return warped, for_fixed * weight.detach()


def updated(field, then, size):
    """The field given, then another one, on a grid of `size`.

    field: (1, N, *size) in voxels or None. then: (1, N, *control) in its voxels. Returns: (1, N, *size) in voxels.
    """
    update = resize_field(then, size)
    return update if field is None else compose(first=field, then=update)


def on_control_grid(field, size):
    """A field on the control grid, where composing takes a fraction of the time; None where that would lose detail.

    A network's answer on few voxels, refined on many, has no detail that the control grid could lose.
    field: (1, N, *spatial) in voxels or None. size: of the control grid. Returns: (1, N, *size) in its voxels or None.
    """
    if field is None:
        return None
    coarse = resize_field(field, size)
    lost = resize_field(coarse, field.shape[2:]) - field
    return coarse if float(lost.square().sum(1).mean().sqrt()) < NO_DETAIL else None


def similarity(pair, field, cfg, padding="border"):
    """How alike a pair is under a field, by `image_similarity` as in training, a float; 1 is perfect.

    pair: dict of moving, fixed, (1, C, *spatial), and moving_mask, fixed_mask, (1, 1, *spatial) or None. field:
    (1, N, *spatial) in voxels, or None. padding: what lies outside the moving volume, see `warp`.
    """
    warped, weight = warp_pair(pair, field, padding)
    return float(image_similarity(warped, pair["fixed"], cfg, weight))


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
