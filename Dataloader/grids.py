"""Grids: bring volumes onto the training grid with one interpolation, and compare grids.

Arrays and affines are those of Dataloader/nifti.py: axes i, j, k of the file, voxel to world in millimetres, RAS.
"""
import itertools
import math

import numpy as np
from nibabel import orientations
from scipy import ndimage

from Runtime.errors import InputError

SMOOTH_ABOVE = 1.5  # an axis that shrinks by more is smoothed first
SMOOTH_SIGMA = 0.4  # sigma of that Gaussian, in voxels of the target grid
SAME_GRID = 0.1  # largest distance, in voxels, between the corners of two grids that count as the same
MOST_VOXELS = 256 ** 3  # processed at once; larger volumes use a coarser grid, or one slab after the other
DEEPEST, BETWEEN = -4096, 0.1  # HU, share of all voxels: a darker filler counts only if fewer lie between the two
AIR, CLEAR = -1024, 76  # HU: no tissue is darker than the first; less than that by the second is no noise of air


def intensity_range(array, low=0.5, high=99.5):
    """The two intensities of an array that become 0 and 1: its percentiles, or minimum and maximum if these are equal.

    low, high: percentiles, in percent; in a sparse volume both can be intensity 0.
    Returns: two floats; equal for a constant array.
    """
    bottom, top = np.percentile(array, [low, high])
    return (float(bottom), float(top)) if top > bottom else (float(array.min()), float(array.max()))


def air_for_filler(array):
    """A CT volume with air in place of the filler outside the scanner's reconstruction, such as -3024 or -2000 HU.

    Returns the array itself if it has no filler.
    """
    below = array[array < AIR - CLEAR]
    if not below.size or (below == below.min()).mean() < 0.5:
        return array
    # The background of signed images may lie far below, such as -32768, but their tissue lies above it.
    if np.count_nonzero((below > below.min()) & (below < DEEPEST)) > BETWEEN * array.size:
        return array
    return np.maximum(array, np.float32(AIR))


def rescale(array, bottom, top):
    """(array - bottom) / (top - bottom), clipped to 0 .. 1; 0 everywhere if top <= bottom. Returns: float32."""
    if top <= bottom:
        return np.zeros(array.shape, np.float32)
    return np.clip((array.astype(np.float64) - bottom) / (top - bottom), 0, 1).astype(np.float32)


def is_singular(affine):
    """Whether an array cannot be the affine of a volume: it is not 4x4, not finite, its axes lie in one plane, or its
    last row is not 0 0 0 1 to within rounding in single precision, as in a transposed one. Voxels may have any size."""
    if affine.shape != (4, 4) or not np.isfinite(affine).all() or not np.allclose(affine[3], [0, 0, 0, 1], atol=1e-4):
        return True
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    return lengths.min() == 0 or abs(np.linalg.det(affine / [*lengths, 1])) < 1e-6


def to_canonical(array, affine):
    """Flip and permute axes to the orientation closest to RAS; every voxel keeps its world position.

    array: (D, H, W), or (H, W), where only those two axes are exchanged or flipped and the third column of the
    affine stays. affine: 4x4.
    Returns: array, C-contiguous; affine 4x4.
    """
    ornt = orientations.io_orientation(affine)[:array.ndim]
    # A 2D slice may lie in any world plane: only the order of its two world axes counts.
    ornt[:, 0] = np.argsort(np.argsort(ornt[:, 0]))
    change = orientations.inv_ornt_aff(ornt, array.shape)
    new_affine = np.asarray(affine, np.float64) @ _embed(change[:-1, :-1], change[:-1, -1])
    return np.ascontiguousarray(orientations.apply_orientation(array, ornt)), new_affine


def slabs(shape, most=None):
    """Slices that divide the first axis into slabs of at most `most` voxels each, by default MOST_VOXELS: a list."""
    rows = max(1, (most or MOST_VOXELS) // math.prod(shape[1:]))
    return [slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def of_slab(matrix, slab):
    """Turn a 4x4 that maps voxels of a grid into one that maps voxels of its slab. slab: from `slabs`."""
    return matrix @ _embed(np.eye(3), (slab.start, 0, 0))


def boxes_of(label):
    """{value: its box, a tuple of slices} for every value of a label map but 0, ascending. label: a numpy array."""
    small = np.issubdtype(label.dtype, np.integer) and label.dtype.isnative and label.size
    if small and 0 <= label.min() and label.max() < 2 ** 16:
        found = enumerate(ndimage.find_objects(label), 1)  # without sorting all voxels
    else:
        values, index = np.unique(label, return_inverse=True)
        found = zip(values, ndimage.find_objects(index.reshape(label.shape) + 1))
    return {value: box for value, box in found if box and value}


def thinning(shape):
    """The smallest step at which every step-th voxel along each axis gives a grid of at most MOST_VOXELS."""
    return next(step for step in itertools.count(1) if math.prod(-(-n // step) for n in shape) <= MOST_VOXELS)


def corners(shape):
    """The corner voxels of a grid with up to three axes, as homogeneous columns: (4, number of corners)."""
    return np.array([[*np.multiply(index, np.subtract(shape, 1)), *[0] * (3 - len(shape)), 1]
                     for index in np.ndindex(*[2] * len(shape))], np.float64).T


def plane_normal(affine):
    """The unit normal of the plane of a 2D grid, (3,), in its world. affine: 4x4."""
    normal = np.cross(affine[:3, 0], affine[:3, 1])
    return normal / np.linalg.norm(normal)


def same_grid(shape, affine, other_shape, other_affine, across=True):
    """Whether two grids have the same shape and corners at most SAME_GRID voxels apart along each axis.

    Slices lie in one plane too, within half the thickness of the thicker one, unless one grid knows no plane, as in the
    2D files of ITK, whose third row is 0 0 1 0. across: False if their planes may differ.
    shape, other_shape: D, H, W or H, W. affine, other_affine: 4x4, voxel to world in mm. Programs round the affine of
    the same grid differently.
    """
    if tuple(shape) != tuple(other_shape):
        return False
    ends = corners(shape)
    if len(shape) == 2 and across and not any(np.array_equal(each[2], [0, 0, 1, 0]) for each in (affine, other_affine)):
        mm = plane_normal(affine) @ np.subtract(affine, other_affine)[:3] @ ends
        thickness = max(abs(plane_normal(each) @ each[:3, 2]) for each in (affine, other_affine))
        if np.abs(mm).max() > thickness / 2:
            return False
    return bool(np.abs(np.linalg.inv(affine) @ other_affine @ ends - ends)[:len(shape)].max() <= SAME_GRID)


def require_same_grid(what, shape, affine, other, other_shape, other_affine, advice):
    """Raise InputError unless two grids are the same, see `same_grid`.

    what: file and its role, such as "F.nii.gz: the mask". other: the volume that it must match. advice: what to do.
    """
    if not same_grid(shape, affine, other_shape, other_affine):
        differs = grid_difference(shape, affine, other_shape, other_affine)
        raise InputError(f"{what} is on another grid than {other} ({differs}); {advice}.")


def grid_difference(shape, affine, other_shape, other_affine):
    """What differs between two grids, in numbers, as a phrase: shape, spacing in mm, directions, origin in mm."""
    dims, phrases = len(shape), []
    if tuple(shape) != tuple(other_shape):
        phrases.append(f"shapes {tuple(shape)} and {tuple(other_shape)}")
    voxels = [np.asarray(one, np.float64)[:3, :dims] for one in (affine, other_affine)]
    spacings = [np.linalg.norm(one, axis=0) for one in voxels]
    if np.abs(spacings[0] / spacings[1] - 1).max() > 1e-3:
        phrases.append("spacings " + " and ".join(" x ".join(f"{mm:.4g}" for mm in one) for one in spacings) + " mm")
    cosines = [one / spacing for one, spacing in zip(voxels, spacings)]
    degrees = np.rad2deg(np.arccos(np.clip((cosines[0] * cosines[1]).sum(0), -1, 1))).max()
    if degrees > 0.1:
        phrases.append(f"axes up to {degrees:.3g} degrees apart")
    origins = [np.asarray(one, np.float64)[:3, 3] for one in (affine, other_affine)]
    apart_mm = np.linalg.norm(origins[0] - origins[1])
    if apart_mm > 1e-3 * min(spacings[0].min(), spacings[1].min()) or not phrases:
        phrases.append("origins " + " and ".join(f"({', '.join(f'{mm:.4g}' for mm in one)})" for one in origins)
                       + f", {apart_mm:.3g} mm apart")
    return ", ".join(phrases)


def foreground_box(inside):
    """The smallest box around the True voxels of an array; the whole array if none is True.

    Returns: (2, dims) ints, the first and the past-the-end index of each axis.
    """
    if not inside.any():
        return np.array([[0] * inside.ndim, inside.shape])
    (spans,) = ndimage.find_objects(inside.astype(np.int8))
    return np.array([[span.start for span in spans], [span.stop for span in spans]])


def varying_box(images, least=4):
    """The box that is left of a grid without outer planes in which every image is constant, such as padding.

    images: list of arrays (D, H, W) or (H, W). least: smallest number of voxels to keep along each axis.
    Returns: (2, dims) ints, the first and the past-the-end index of each axis.
    """
    box = np.array([[0] * images[0].ndim, images[0].shape])
    shrinks = True
    while shrinks:
        shrinks = False
        for side, axis in np.ndindex(box.shape):
            while box[1, axis] - box[0, axis] > least:
                plane = [slice(*ends) for ends in box.T]
                plane[axis] = box[0, axis] if side == 0 else box[1, axis] - 1
                if any(np.ptp(image[tuple(plane)]) > 0 for image in images):
                    break
                box[side, axis] += 1 - 2 * side
                shrinks = True
    return box


def voxel_volume(affine, dims):
    """Volume of a voxel in mm3 (2D: area in mm2), of sheared grids too. affine: 4x4."""
    axes_mm = affine[:3, :dims]
    return float(np.sqrt(np.linalg.det(axes_mm.T @ axes_mm)))


def grid_transform(shape, affine, size, spacing_mm, box=None):
    """Place an isotropic grid centred on a canonical volume, or on a box in it.

    shape: of the canonical array, D, H, W or H, W. affine: 4x4. size: target shape, an int or one per axis.
    spacing_mm: target voxel side in millimetres; 0: the smallest at which the whole field of view fits in `size`.
    box: from `foreground_box`; it is centred and fitted instead of the field of view. Nothing is cut out: the grid
    still shows what is around the box.
    Returns: scale (dims,), offset (dims,), with index_in = scale * index_out + offset; new_affine 4x4.
    An axis whose scale is 1 within 1e-4 gets exactly 1 and a whole offset, so that it is copied, not interpolated.
    """
    dims = len(shape)
    first, stop = np.asarray([[0] * dims, shape] if box is None else box, np.float64)
    size = np.broadcast_to(np.asarray(size, np.float64), (dims,))
    voxel_mm = np.linalg.norm(affine[:3, :dims], axis=0)
    target_mm = spacing_mm or np.max((stop - first) * voxel_mm / size)
    scale = target_mm / voxel_mm
    copied = np.abs(scale - 1) < 1e-4
    scale = np.where(copied, 1.0, scale)
    offset = (first + stop - 1) / 2 - scale * (size - 1) / 2
    # Whole offsets: if the shapes differ by an odd number, exact centring would blur every voxel by half a voxel.
    offset = np.where(copied, np.floor(offset), offset)
    return scale, offset, np.asarray(affine, np.float64) @ _embed(np.diag(scale), offset)


def to_grid(array, affine, size, spacing_mm, order=1, box=None):
    """Bring a volume to canonical orientation and onto the grid of `grid_transform`, interpolating at most once.

    array: (D, H, W) or (H, W). affine: 4x4. size: int or one per axis. spacing_mm: millimetres, 0 fits the volume.
    box: in the canonical array, see `grid_transform`.
    order: 1 for images (float32 out; smoothed first along axes that shrink by more than SMOOTH_ABOVE), 0 for labels
    (dtype kept). Outside the volume: 0.
    Returns: array of shape `size`; its affine 4x4. If a crop or padding is enough, the values are exact copies.
    """
    array, affine = to_canonical(array, affine)
    scale, offset, new_affine = grid_transform(array.shape, affine, size, spacing_mm, box)
    size = tuple(np.broadcast_to(size, (array.ndim,)).tolist())
    array = array.astype(np.float32 if order else array.dtype, copy=False)
    if (scale == 1).all():  # out[i] = array[i + offset]
        out, offset = np.zeros(size, array.dtype), offset.astype(int)
        first, stop = np.maximum(0, -offset), np.minimum(size, np.array(array.shape) - offset)
        if np.all(stop > first):
            out[tuple(map(slice, first, stop))] = array[tuple(map(slice, first + offset, stop + offset))]
        return out, new_affine
    sigma = np.where(scale > SMOOTH_ABOVE, SMOOTH_SIGMA * scale, 0)
    if order and sigma.any():
        array = ndimage.gaussian_filter(array, sigma, mode="nearest")
    # grid-constant: "constant" drops the outer half voxel, and with a rounding error a whole border plane.
    array = ndimage.affine_transform(array, scale, offset, size, order=order, mode="grid-constant", cval=0)
    return array, new_affine


def _embed(matrix, offset):
    """4x4 of a (dims, dims) matrix and a (dims,) offset; axes beyond `dims` stay."""
    dims = len(offset)
    full = np.eye(4)
    full[:dims, :dims] = matrix
    full[:dims, 3] = offset
    return full
