"""Displacement fields: warp, compose, integrate, Jacobian, change of grid. Pure functions, 2D and 3D.

Conventions, used everywhere in the project:
  image  (B, C, *spatial), spatial = (D, H, W) or (H, W)
  field  (B, N, *spatial), N = len(spatial): displacement in voxels of the grid it lives on; channel 0 moves along
         the first spatial axis (D in 3D)
  warp(image, field)(x) = image(x + field(x))
Fields are float32 throughout, also under autocast: half precision cannot resolve a tenth of a voxel at x = 100.
"""
import math

import torch
import torch.nn.functional as F

from Diffusion.device_ops import accelerated, constant, interpolate_by_products, product_along
from Runtime.device import send

SLABS = 4  # pieces of one sample in `warp`: on a CPU grid_sample runs in parallel over the batch only
LINEAR = {2: "bilinear", 3: "trilinear"}  # F.interpolate's names of linear interpolation in N dimensions


def side_lengths(size, device=None):
    """Image sides in voxels, (1, N, 1, ..., 1) float32: a field divided by them is in fractions of the image side."""
    return constant(_side_lengths, tuple(map(float, size)), device=device)


def _side_lengths(sides, device):
    return send(torch.tensor(sides, dtype=torch.float32), device).view(1, -1, *[1] * len(sides))


def append_dims(values, x):
    """Values (B,) or (B, C) with axes of length 1 appended, so that they broadcast over x (B, C, *spatial)."""
    return values.view(*values.shape, *[1] * (x.dim() - values.dim()))


def identity(size, device="cpu"):
    """Voxel coordinates of every voxel: (1, N, *size) float32."""
    axes = [torch.arange(int(n), dtype=torch.float32, device=device) for n in size]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))[None]


def _identity_norm(size, image_size, origin, device):
    """The identity in normalised units of the image, voxel 0 at -1 and voxel n - 1 at +1: one tensor for each axis.

    Each is broadcastable, (1, 1, .., n, .., 1). size: of the grid. origin: the image's voxel where the grid starts.
    """
    axes = []
    for i, (n, image_n) in enumerate(zip(size, image_size)):
        voxels = torch.arange(n, dtype=torch.float32, device=device) + origin[i]
        norm = voxels * (2.0 / (image_n - 1)) - 1.0 if image_n > 1 else torch.zeros_like(voxels)
        axes.append(norm.view(1, *[n if k == i else 1 for k in range(len(size))]))
    return axes


def warp(image, field, mode="bilinear", padding="zeros", origin=None):
    """warped(x) = image(x + field(x)).

    The only place that knows the layout of grid_sample: last axis first (x, y, z), coordinates in -1 .. 1.

    image: (B, C, *spatial_image). field: (B, N, *spatial) in voxels; the grids share their spacing, sizes may differ.
    mode: "bilinear" (linear along each axis) for images and fields, "nearest" for labels; in 2D "bicubic" too.
    padding: value outside the image, "zeros" or "border" (that of the nearest voxel).
    origin: N integers, the voxel of the image where the field's grid starts; default the first.
    Returns: (B, C, *spatial) float32.
    Raises ValueError if the number of channels of the field is not the number of spatial axes of the image.
    """
    image_size, size = tuple(image.shape[2:]), tuple(field.shape[2:])
    if not field.shape[1] == len(size) == len(image_size):
        raise ValueError(f"a field of shape {tuple(field.shape)} cannot warp an image of shape {tuple(image.shape)}")
    identity_norm = constant(_identity_norm, size, image_size, tuple(origin or [0] * len(size)), device=field.device)
    options = {"mode": mode, "padding_mode": padding, "align_corners": True}
    with torch.autocast(image.device.type, enabled=False):
        image = image.float()
        axes_norm = [torch.add(identity_norm[i], field[:, i].float(), alpha=2.0 / max(image_size[i] - 1, 1))
                     for i in reversed(range(len(size)))]
        grid_norm = torch.stack(axes_norm, dim=1).movedim(1, -1)                    # (B, *spatial, N)
        rows = math.prod(size[:-1])
        parts = next(k for k in (SLABS, 2, 1) if rows % k == 0)
        if len(grid_norm) > 1 or grid_norm.device.type != "cpu" or parts == 1:
            return F.grid_sample(image, grid_norm, **options)
        grid_norm = grid_norm.reshape(parts, rows // parts, *[1] * (len(size) - 2), size[-1], len(size))
        slabs = F.grid_sample(image.expand(parts, *image.shape[1:]), grid_norm, **options)
        return slabs.transpose(0, 1).reshape(1, -1, *size)


def masked(resample, image, mask):
    """An image and its mask, or None, resampled so that voxels outside the mask do not leak into those inside.

    resample: a linear function of an image. image: (B, C, *spatial). mask: (B, 1, *spatial), 0 .. 1, or None.
    Returns: the image, divided by how much of each voxel the mask shows (Knutsson and Westin, "Normalized and
    differential convolution", CVPR 1993); the mask, 0 .. 1.
    """
    if mask is None:
        return resample(image), None
    shown = resample(mask)
    return resample(image * mask) / shown.clamp(min=1e-3), shown


def then_affine(field, change):
    """The field by which `warp` samples a volume on another grid: x -> change(x + field(x)) - x.

    field: (B, N, *spatial) displacement in voxels of its own, fixed grid. change: from voxels of that grid to voxels of
    the other, A_moving^-1 A_fixed; 4x4, of which the N axes and the shift are taken, or just these, (N, N + 1).
    Returns: (B, N, *spatial) displacement in voxels of the other grid.
    """
    dims, size = field.shape[1], tuple(field.shape[2:])
    start = identity(size, field.device)
    change = torch.as_tensor(change, dtype=torch.float32, device=field.device)
    with torch.autocast(field.device.type, enabled=False):
        there = change[:dims, :dims] @ (start + field.float()).flatten(2) + change[:dims, -1:]
    return there.view(len(field), dims, *size) - start


def resample(volumes, change, size, padding="zeros"):
    """Volumes, or fields, on another grid, interpolated linearly; the numbers of a field stay in voxels of its own.

    volumes: (B, C, *spatial). change: from voxels of the other grid to theirs, as for `then_affine`. size: of the other
    grid. padding: what lies outside, see `warp`. Returns: (B, C, *size) float32.
    """
    there = then_affine(torch.zeros(1, len(size), *size, dtype=torch.float32, device=volumes.device), change)
    return warp(volumes, there.expand(len(volumes), *there.shape[1:]), padding=padding)


def compose(first, then):
    """Field that applies `first`, then `then`.

    compose(f, g)(x) = g(x) + f(x + g(x)), so warp(warp(I, f), g) == warp(I, compose(f, g)) up to interpolation.

    first, then: (B, N, *spatial) displacement in voxels, same shape.
    Returns: (B, N, *spatial) displacement in voxels.
    Raises ValueError if the shapes differ.
    """
    if first.shape != then.shape:
        raise ValueError(f"cannot compose fields of shapes {tuple(first.shape)} and {tuple(then.shape)}")
    return then + warp(first, then, padding="border")


def integrate_velocity(velocity, counts, region=None):
    """The displacement after `counts` units of time along a velocity: composed with itself that many times.

    n = 0 gives the identity, 1 the velocity itself, 2 compose(velocity, velocity), and so on. Composition is
    associative: the powers velocity^1, ^2, ^4, ^8, ... are made by squaring, once for the whole batch, and each sample
    takes those of the binary digits of its count. So there are log2(n) squarings instead of n - 1 compositions, and
    fewer interpolations. The digits are applied to points that move through the powers, so only `region` is computed.
    (Squaring as in Arsigny et al., MICCAI 2006, for any n and without scaling; see `exponential` for unit time.)

    velocity: (B, N, *spatial) displacement in voxels per unit of time. counts: B integers >= 0.
    region: N slices (non-negative start, step 1) of the grid where the result is wanted; default all of it.
    Returns: (B, N, *region) displacement in voxels.
    Raises ValueError unless there is one count >= 0 for each sample.
    """
    region = region or [slice(0, n) for n in velocity.shape[2:]]
    counts = torch.as_tensor(counts, dtype=torch.long)
    if len(counts) != len(velocity) or bool((counts < 0).any()):
        raise ValueError(f"one count >= 0 is needed for each of the {len(velocity)} fields, got {counts.tolist()}")
    result = torch.zeros_like(velocity[(..., *region)])
    origin = [r.start or 0 for r in region]
    power = velocity  # of the samples whose counts have this binary digit or a higher one
    rows = torch.arange(len(velocity))  # their numbers in the batch
    for bit in range(int(counts.max()).bit_length()):
        if bit:
            keep = (counts[rows] >> bit) > 0
            rows = rows[keep]
            power = power if bool(keep.all()) else power[numbers_of(keep, velocity.device)]
            power = compose(power, power)
        chosen = ((counts[rows] >> bit) & 1).bool()
        if bool(chosen.any()):
            at = send(rows[chosen], velocity.device)
            moved = result[at]
            stepped = power[numbers_of(chosen, velocity.device)]
            result[at] = moved + warp(stepped, moved, padding="border", origin=origin)
    return result


def numbers_of(mask, device):
    """Indices, on the device, of the true values of a CPU mask. Indexing by a mask there would make the host wait."""
    return send(mask.nonzero()[:, 0], device)


def exponential(velocity, squarings=5):
    """The displacement after unit time along a stationary velocity: exp(velocity), by scaling and squaring.

    exp(v) = exp(v / 2^n) composed with itself 2^n times, n = squarings (Arsigny et al., "A Log-Euclidean Framework for
    Statistics on Diffeomorphisms", MICCAI 2006). It does not fold, up to the interpolation of its samples. Five
    squarings are 32 steps of a fraction of a voxel each, for all that registration needs.

    velocity: (B, N, *spatial) in voxels per unit of time. Returns: (B, N, *spatial) displacement in voxels.
    """
    field = velocity / 2 ** squarings
    for _ in range(squarings):
        field = compose(field, field)
    return field


def resize_field(field, size, align="corners"):
    """The same deformation sampled on a grid with another number of voxels over the same extent.

    align: which points of the two grids coincide. The project has both kinds of grids; mistaking one for the other
    shifts everything by half a voxel.
      "corners": the centres of the first voxels, and of the last. Used for control grids on images, and for the smaller
        images of the refinement. The displacement is scaled by the ratio of the grid steps: `field` is in voxels of its
        own grid, the result in voxels of the new one.
      "cells": the outer faces, so that a coarse voxel covers 2^N finer ones. Used for the levels of a network and the
        upsampling of its features. (Its strided convolutions centre level l on the voxels 2^l i, which is (2^l - 1) / 2
        voxels lower; the weights learn to make up for that.) The values are not scaled: a network keeps one unit at all
        of its levels.

    field: (B, N, *spatial). Returns: (B, N, *size), float32.
    """
    align_corners = {"corners": True, "cells": False}[align]
    old = field.shape[2:]
    if tuple(old) == tuple(size):
        return field
    if align_corners:
        steps = [(new - 1) / max(n - 1, 1) for new, n in zip(size, old)]
        field = field.float() * side_lengths(steps, field.device)
    with torch.autocast(field.device.type, enabled=False):
        return interpolate(field.float(), size, align_corners)


def interpolate(x, size, align_corners=False):
    """x on another grid, by linear interpolation along each axis. x: (B, C, *spatial). Returns: (B, C, *size)."""
    # Products pay off in the backward pass, or if they keep a lower precision.
    if accelerated(x) and (torch.is_grad_enabled() or x.dtype != torch.float32):
        return interpolate_by_products(x, size, align_corners)
    return F.interpolate(x, size=tuple(size), mode=LINEAR[len(size)], align_corners=align_corners)


def jacobian_determinant(field):
    """det(I + d field / d x), the change of volume by x -> x + field(x); <= 0 where the deformation folds.

    Central differences inside, one-sided at the border, so it is exact for affine maps.
    field: (B, N, *spatial) displacement in voxels. Returns: (B, *spatial) float32.
    """
    field, axes = field.float(), range(2, field.dim())
    if accelerated(field):
        slopes = [product_along(field, constant(_slopes, n, device=field.device), axis)
                  for axis, n in zip(axes, field.shape[2:])]
        if len(axes) == 3:  # as a triple product, with a quarter of the operations
            x, y, z = map(torch.add, slopes, constant(_unit_vectors, device=field.device))
            return (x * torch.linalg.cross(y, z, dim=1)).sum(1)
    else:
        slopes = torch.gradient(field, dim=tuple(axes))
    rows = [list(row) for row in zip(*[slope.unbind(1) for slope in slopes])]
    for i, row in enumerate(rows):
        row[i] = row[i] + 1.0
    return determinant(rows)


def _unit_vectors(device):
    """Unit vectors along three axes, (1, 3, 1, 1, 1) each."""
    return torch.eye(3, dtype=torch.float32, device=device).view(3, 1, 3, 1, 1, 1).unbind()


def _slopes(n, device):
    """(n, n) matrix M such that M x is torch.gradient(x), which an accelerator then computes as one product."""
    return torch.gradient(torch.eye(n, dtype=torch.float32, device=device), dim=0)[0]


def determinant(vectors):
    """The determinant of N vectors, each with N components, tensors of one shape; as linalg.det, without its copies."""
    if len(vectors) == 2:
        (a, b), (c, d) = vectors
        return a * d - b * c
    (a, b, c), (d, e, f), (g, h, i) = vectors
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def _centred(size, device):
    """Coordinates of the voxels of each axis, in voxels from its centre: a list of (n,)."""
    return [torch.arange(n, dtype=torch.float32, device=device) - (n - 1) / 2 for n in size]


def affine_field(matrix, size):
    """Displacement of an affine map about the centre c of the grid: x -> c + A (x - c) + b.

    matrix: (B, N, N + 1), A in the first N columns, shift b in voxels in the last. size: N voxels per side.
    Returns: (B, N, *size) displacement in voxels.
    """
    dims = len(size)
    axes = constant(_centred, tuple(map(int, size)), device=matrix.device)
    change = matrix[:, :, :dims].float() - torch.eye(dims, dtype=torch.float32, device=matrix.device)
    if accelerated(matrix):
        # Axis by axis: the gradient of one product over all voxels would be a sum on a few processors (17 ms at 128^3).
        parts = [change[:, :, i].view(-1, dims, *[1] * dims) * axis.view([-1 if k == i else 1 for k in range(dims)])
                 for i, axis in enumerate(axes)]
        return sum(parts, matrix[:, :, dims].float().view(-1, dims, *[1] * dims))
    centred = torch.stack(torch.meshgrid(*axes, indexing="ij"))[None].flatten(2)
    with torch.autocast(matrix.device.type, enabled=False):
        return (change @ centred).add_(matrix[:, :, dims:].float()).view(len(matrix), dims, *size)
