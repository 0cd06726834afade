"""Scores of a registration: Dice, HD95, folding, NDV, SDlogJ. Plain functions on single cases."""
import itertools
import math
import statistics

import numpy as np
import torch
from scipy import ndimage
from scipy.spatial import cKDTree

from Dataloader.grids import boxes_of
from Dataloader.nifti import is_rigid_and_scaled
from Diffusion.fields import determinant, identity, jacobian_determinant

COUNTED = 2 ** 16  # voxels in a product of matrices: with the masks of a thousand maps 256 MiB


def dice(first, second, labels):
    """Overlap of each label: 2 |A and B| / (|A| + |B|), 0 .. 1, 1 is perfect (Dice, Ecology 1945).

    first, second: integer arrays or tensors of one shape. labels: the label values.
    Returns: list of floats; NaN where a label is in neither image.
    Raises ValueError if the shapes differ.
    """
    scores = []
    for a, b in masks_of((first, second), labels):
        size = int(a.sum()) + int(b.sum())
        scores.append(2.0 * int((a & b).sum()) / size if size else float("nan"))
    return scores


def dice_of_pairs(maps, labels):
    """The mean over all pairs of label maps of a pair's mean `dice`; None if no pair has any of the labels.

    maps: list of integer arrays of one shape, at least one. The voxels that two maps share are a product of matrices,
    in pieces whose counts are exact in float32: one by one, the pairs of hundreds of maps took hours.
    """
    scores, known = np.zeros((2, len(maps), len(maps)))
    for masks in masks_of(maps, labels):
        masks, shared = [mask.reshape(-1) for mask in masks], np.zeros((len(maps), len(maps)))
        for first in range(0, masks[0].size, COUNTED):
            piece = np.stack([mask[first:first + COUNTED] for mask in masks])
            piece = piece[:, piece.any(0)].astype(np.float32)
            shared += piece @ piece.T
        sizes = shared.diagonal()[:, None] + shared.diagonal()
        scores += 2 * shared / np.maximum(sizes, 1)
        known += sizes > 0
    pairs = np.tril_indices(len(maps), -1)
    return average([score / count if count else None for score, count in zip(scores[pairs], known[pairs])])


def masks_of(maps, labels):
    """For each label its masks in some label maps of one shape, of arrays cropped to the box that holds them all:
    hundreds of labels in a large volume take seconds, not minutes. Raises ValueError if the shapes differ."""
    shapes = list(dict.fromkeys(tuple(each.shape) for each in maps))
    if len(shapes) > 1:
        raise ValueError(f"label images of different shapes: {shapes[0]} and {shapes[1]}")
    boxes = list(map(boxes_of, maps)) if all(isinstance(each, np.ndarray) for each in maps) else []
    for label in labels:
        found = [each[label] for each in boxes if label in each]
        box = tuple(slice(min(span.start for span in spans), max(span.stop for span in spans))
                    for spans in zip(*found)) or ...  # whole, also if it is the background or in none of them
        yield [each[box] == label for each in maps]


def average(values):
    """Mean of the finite values, None if there are none. values: numbers or None."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def spread(rows, columns):
    """Mean, standard deviation and number of the values in each column.

    rows: dicts, one for each case; values that are None or missing do not count.
    Returns: {column: (mean, standard deviation (n - 1) or None for one value, count)}, without columns of no value.
    """
    summary = {}
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summary[column] = (statistics.fmean(values), deviation, len(values))
    return summary


def hd95(first, second, labels, spacing_mm):
    """95th percentile Hausdorff distance of each label, in mm: max(P95 of d(a, B), P95 of d(b, A)).

    a and b run over the surface voxels A and B of a label in the two images, d is the distance to the nearest voxel of
    the other surface (partial Hausdorff distance: Huttenlocher et al., PAMI 1993). The two directions are not pooled,
    because a part that one image lacks would be lost among all other distances. Learn2Reg also takes the larger one,
    but weights surface voxels by their area.

    A label that only one image has gets the largest possible distance, the diagonal of the image, so that losing a
    structure never improves the score.

    first, second: integer numpy arrays of one shape. labels: the label values. spacing_mm: voxel size for each axis,
    (N,), or the axes of a voxel in the world, the columns of (3, N), which may be sheared.
    Returns: list of floats >= 0; NaN where neither image has the label.
    Raises ValueError if the shapes differ.
    """
    axes_mm = np.diag(spacing_mm) if np.ndim(spacing_mm) == 1 else np.asarray(spacing_mm, np.float64)
    spacing_mm, upright = np.linalg.norm(axes_mm, axis=0), is_rigid_and_scaled(axes_mm)
    diagonals = np.array(list(itertools.product((-1, 1), repeat=first.ndim))) * first.shape
    scores, furthest_mm = [], float(np.linalg.norm(diagonals @ axes_mm.T, axis=1).max())
    for a, b in masks_of((first, second), labels):
        if not a.any() or not b.any():
            scores.append(furthest_mm if a.any() or b.any() else float("nan"))
            continue
        a, b = np.pad(a, 1), np.pad(b, 1)  # distances need no more of the image than the box and a voxel around it
        surface_a = a & ~ndimage.binary_erosion(a)
        surface_b = b & ~ndimage.binary_erosion(b)
        if upright:
            to_b_mm = ndimage.distance_transform_edt(~surface_b, sampling=spacing_mm)[surface_a]
            to_a_mm = ndimage.distance_transform_edt(~surface_a, sampling=spacing_mm)[surface_b]
        else:  # the distance transform knows no other axes
            places_a, places_b = (np.argwhere(surface) @ axes_mm.T for surface in (surface_a, surface_b))
            to_b_mm, to_a_mm = cKDTree(places_b).query(places_a)[0], cKDTree(places_a).query(places_b)[0]
        scores.append(float(max(np.percentile(to_a_mm, 95), np.percentile(to_b_mm, 95))))
    return scores


def folding_percent(field):
    """100 x the fraction of voxels with det J <= 0, J the Jacobian of x -> x + field(x): where the deformation folds.

    field: (B, N, *spatial) in voxels. Returns: a float, 0 .. 100.
    """
    return 100.0 * float((jacobian_determinant(field) <= 0).float().mean())


def folding_scores(field, body=None):
    """How much of a deformation folds, measured between the voxels, where central differences miss folds.

    Each cell of 2^N voxels is cut at its corners: the volume of a corner piece is a one-sided Jacobian determinant over
    N!. In 3D every second corner is cut off, in two ways, and a tetrahedron is left in the middle. If all these volumes
    are above 0, the deformation, linear in each piece, folds nowhere (Liu et al., "On finite difference Jacobian
    computation in deformable image registration", IJCV 2024).

    field: (N, *spatial) array or tensor in voxels, at least two voxels a side. body: booleans (*spatial), or None.
    Returns: dict of percentages: folding_any_percent, voxels at which any of the 2^N one-sided determinants is <= 0,
    folding_body_percent, the same within the body (None without one), and ndv_percent, the non-diffeomorphic volume:
    that of the inverted pieces, averaged over both ways to cut, over that of the grid.
    """
    field = torch.as_tensor(field).float()
    dims, shape = len(field), field.shape[1:]
    folded = torch.zeros(shape, dtype=torch.bool)
    inverted = 0.0
    # Slabs along the first axis that share one voxel, so that their values stay in the processor's cache.
    thick = max(1, 100_000 // math.prod(shape[1:]))
    for first in range(0, shape[0] - 1, thick):
        slab = field[:, first:first + thick + 1]
        position = slab + identity(slab.shape[1:])[0]
        edges = [position.diff(dim=axis + 1) for axis in range(dims)]
        for corner in itertools.product((0, 1), repeat=dims):
            # The edge along an axis at this corner of each cell: chosen along the other axes.
            at = [tuple(slice(None) if other == axis else slice(corner[other], n - 1 + corner[other])
                        for other, n in enumerate(slab.shape[1:])) for axis in range(dims)]
            volume = determinant([edge[(slice(None), *place)] for edge, place in zip(edges, at)])
            inverted += float(volume.clamp(max=0).sum(dtype=torch.float64))
            here = tuple(slice(c, n - 1 + c) for c, n in zip(corner, slab.shape[1:]))
            folded[first:first + thick + 1][here] |= volume <= 0
        if dims == 3:
            inverted += _inverted_middles(position)
    cells = math.prod(n - 1 for n in shape)
    any_percent = 100.0 * float(folded.float().mean())
    within = None
    if body is not None:
        inside = folded[torch.as_tensor(body)]
        within = 100.0 * float(inside.float().mean()) if len(inside) else 0.0
    return {"folding_any_percent": any_percent, "folding_body_percent": within,
            "ndv_percent": 100.0 * abs(inverted) / math.factorial(dims) / 2 / cells}


def _inverted_middles(position):
    """3! times the sum of the negative volumes of the middle tetrahedra of all cells, for both ways to cut.

    position: (3, D, H, W) in voxels, where each voxel goes. Returns: a float <= 0.
    """
    def at(*corner):
        return position[(slice(None), *(slice(c, n - 1 + c) for c, n in zip(corner, position.shape[1:])))]

    total = 0.0
    for apex, others in (((0, 0, 0), ((1, 1, 0), (0, 1, 1), (1, 0, 1))),
                         ((1, 1, 1), ((0, 0, 1), (1, 0, 0), (0, 1, 0)))):
        start = at(*apex)
        volume = determinant([at(*other) - start for other in others])
        sign = determinant([torch.tensor(other) - torch.tensor(apex) for other in others]).sign()
        total += float((sign * volume).clamp(max=0).sum(dtype=torch.float64))
    return total


def sdlogj(field):
    """SDlogJ: standard deviation of log(clip(det J + 3, 1e-9, 1e9)) without two voxels on every side.

    The convention of Learn2Reg, the + 3 included (Hering et al., IEEE TMI 2023), so that values are comparable. 0 if
    the change of volume is the same everywhere.
    field: (B, N, *spatial) in voxels. Returns: a float >= 0.
    """
    inner = (slice(None), *[slice(2, -2)] * (field.dim() - 2))
    change = jacobian_determinant(field)[inner]
    return float(torch.log((change + 3.0).clamp(1e-9, 1e9)).std(unbiased=False))
