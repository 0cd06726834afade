"""Scores of a registration: Dice, HD95, folding, SDlogJ. Plain functions on single cases."""
import math
import statistics

import numpy as np
import torch
from scipy.ndimage import binary_erosion, distance_transform_edt

from Diffusion.fields import jacobian_determinant, warp


def dice(first, second, labels):
    """Dice overlap 2 |A and B| / (|A| + |B|) of each label; NaN where a label is in neither image.

    first, second: integer arrays or tensors of one shape. labels: the label values. Returns: list of floats.
    """
    if tuple(first.shape) != tuple(second.shape):
        raise ValueError(f"label images of different shapes: {tuple(first.shape)} and {tuple(second.shape)}")
    scores = []
    for label in labels:
        a, b = first == label, second == label
        size = int(a.sum()) + int(b.sum())
        scores.append(2.0 * int((a & b).sum()) / size if size else float("nan"))
    return scores


def dice_before_after(moving_label, fixed_label, field):
    """Mean Dice over the fixed image's labels without and with a field.

    moving_label, fixed_label: (1, 1, *spatial). field: (1, N, *spatial) in voxels; labels are warped nearest neighbour.
    Returns: Dice before, Dice after, warped label (1, 1, *spatial).
    """
    warped_label = warp(moving_label, field, mode="nearest")
    labels = sorted(set(fixed_label.unique().tolist()) - {0})
    return (average(dice(moving_label, fixed_label, labels)), average(dice(warped_label, fixed_label, labels)),
            warped_label)


def average(values):
    """Mean of the finite values; None if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def spread(rows, columns):
    """Mean, standard deviation and number of the values of each column that there is: {column: (mean, sd, count)}.

    rows: dicts, one for each case; what is None or missing does not count.
    """
    found = {}
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            found[column] = (statistics.fmean(values), deviation, len(values))
    return found


def hd95(first, second, labels, spacing_mm):
    """95th percentile of the surface distances of each label, in mm; NaN where one image lacks the label.

    The larger of both directions, as Learn2Reg has it: pooled, a part that one image lacks would hide among all others.
    first, second: integer numpy arrays of one shape. spacing_mm: voxel size per axis. Returns: list of floats.
    """
    scores = []
    for label in labels:
        a, b = first == label, second == label
        if not a.any() or not b.any():
            scores.append(float("nan"))
            continue
        surface_a, surface_b = a & ~binary_erosion(a), b & ~binary_erosion(b)
        to_b = distance_transform_edt(~surface_b, sampling=spacing_mm)[surface_a]
        to_a = distance_transform_edt(~surface_a, sampling=spacing_mm)[surface_b]
        scores.append(float(max(np.percentile(to_a, 95), np.percentile(to_b, 95))))
    return scores


def folding_percent(field):
    """Percentage of voxels whose Jacobian determinant is <= 0. field: (B, N, *spatial) in voxels. Returns a float."""
    return 100.0 * float((jacobian_determinant(field) <= 0).float().mean())


def sdlogj(field):
    """Standard deviation of log(clip(det + 3, 1e-9, 1e9)), two voxels cropped on every side: Learn2Reg's convention.

    field: (B, N, *spatial) in voxels. Returns a float.
    """
    inner = (slice(None), *[slice(2, -2)] * (field.dim() - 2))
    determinant = jacobian_determinant(field)[inner]
    return float(torch.log((determinant + 3.0).clamp(1e-9, 1e9)).std(unbiased=False))
