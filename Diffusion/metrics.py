"""Scores of a registration: Dice, HD95, folding, SDlogJ. Plain functions on single cases."""
import math
import statistics

import numpy as np
import torch
from scipy.ndimage import binary_erosion, distance_transform_edt

from Diffusion.fields import jacobian_determinant, warp


def dice(first, second, labels):
    """Overlap of each label: 2 |A and B| / (|A| + |B|), 0 .. 1, 1 is perfect (Dice, Ecology 1945).

    first, second: integer arrays or tensors of one shape. labels: the label values.
    Returns: list of floats; NaN where a label is in neither image.
    Raises ValueError if the shapes differ.
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
    """Mean Dice over the fixed image's labels, without and with a field.

    moving_label, fixed_label: (1, 1, *spatial). field: (1, N, *spatial) in voxels; labels are warped nearest neighbour.
    Returns: Dice before and after, None where the fixed image has no label; the warped label (1, 1, *spatial).
    """
    warped_label = warp(moving_label, field, mode="nearest")
    labels = sorted(set(fixed_label.unique().tolist()) - {0})
    before = average(dice(moving_label, fixed_label, labels))
    after = average(dice(warped_label, fixed_label, labels))
    return before, after, warped_label


def average(values):
    """Mean of the finite values, None if there are none. values: numbers or None."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def spread(rows, columns):
    """Mean, standard deviation and number of the values in each column.

    rows: dicts, one for each case; values that are None or missing do not count.
    Returns: {column: (mean, standard deviation (n - 1; 0 for one value), count)}, without columns that have no value.
    """
    summary = {}
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            summary[column] = (statistics.fmean(values), deviation, len(values))
    return summary


def hd95(first, second, labels, spacing_mm):
    """95th percentile Hausdorff distance of each label, in mm: max(P95 of d(a, B), P95 of d(b, A)).

    a and b run over the surface voxels A and B of a label in the two images, d is the distance to the nearest voxel of
    the other surface (partial Hausdorff distance: Huttenlocher et al., PAMI 1993). The two directions are not pooled:
    a part that one image lacks would hide among the distances of all others. Learn2Reg also takes the larger one, but
    weights surface voxels by their area.

    first, second: integer numpy arrays of one shape. labels: the label values. spacing_mm: voxel size for each axis.
    Returns: list of floats >= 0; NaN where one image lacks the label.
    """
    scores = []
    for label in labels:
        a, b = first == label, second == label
        if not a.any() or not b.any():
            scores.append(float("nan"))
            continue
        surface_a = a & ~binary_erosion(a)
        surface_b = b & ~binary_erosion(b)
        to_b_mm = distance_transform_edt(~surface_b, sampling=spacing_mm)[surface_a]
        to_a_mm = distance_transform_edt(~surface_a, sampling=spacing_mm)[surface_b]
        scores.append(float(max(np.percentile(to_a_mm, 95), np.percentile(to_b_mm, 95))))
    return scores


def folding_percent(field):
    """100 x the fraction of voxels with det J <= 0, J the Jacobian of x -> x + field(x): where the deformation folds.

    field: (B, N, *spatial) in voxels. Returns: a float, 0 .. 100.
    """
    return 100.0 * float((jacobian_determinant(field) <= 0).float().mean())


def sdlogj(field):
    """SDlogJ: standard deviation of log(clip(det J + 3, 1e-9, 1e9)) without two voxels on every side.

    The convention of Learn2Reg, the + 3 included (Hering et al., IEEE TMI 2023), so that values are comparable. 0 where
    the change of volume is the same everywhere.
    field: (B, N, *spatial) in voxels. Returns: a float >= 0.
    """
    inner = (slice(None), *[slice(2, -2)] * (field.dim() - 2))
    determinant = jacobian_determinant(field)[inner]
    return float(torch.log((determinant + 3.0).clamp(1e-9, 1e9)).std(unbiased=False))
