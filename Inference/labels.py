"""Carry images and label maps through deformations, and let several label maps vote."""
import functools

import numpy as np
import torch
from scipy import ndimage

from Dataloader.grids import boxes_of, of_slab, slabs
from Dataloader.nifti import require_finite
from Dataloader.volume import as_array, checked_affine
from Diffusion.fields import then_affine, warp
from Inference.choices import LABELS
from Runtime.device import own_settings
from Runtime.errors import InputError

# Voxels, smoothing of labels; chosen on hippocampi, and on brains at 1, 2 and 3 mm, that no test has seen. With 0.8 the
# Dice of tissues is 0.001, 0.015 and 0.017 lower, because structures of one or two voxels become thinner.
SIGMA = 0.6
VOTE_SIGMA = 0.5  # voxels, smoothing of votes; decides ties
AT_VOXEL = 0.1  # voxels along each axis; a point this close to a voxel's centre counts as lying at that voxel
EXACT = 2 ** 24  # whole numbers above this do not survive float32; the labels of mouse atlases reach 614454277
FEW_VOXELS = 2 ** 18  # warped at once: most labels are far from them, and what is near stays in the processor's cache
REACH = 5  # voxels around a label: as far as its smoothed share can be above zero, plus one


@own_settings()
def apply_field(image: np.ndarray, affine: np.ndarray, field: np.ndarray, fixed_affine: np.ndarray,
                order: int = 1) -> np.ndarray:
    """A moving image or label map warped by a field onto the fixed grid, with one interpolation.

    image: (D, H, W) or (H, W) on its own grid. affine: its 4x4. field: (N, *fixed) in voxels of the fixed grid.
    fixed_affine: 4x4. order: 1 for images (float32 out), 0 for labels (dtype kept).
    Returns: (*fixed); outside the image its lowest finite intensity, or 0 for labels. Raises InputError if image,
    field and affines do not fit together.
    """
    image, affine, field, fixed_affine = _fitting(image, affine, field, fixed_affine)
    if order not in (0, 1):
        raise InputError(f"order must be 1 (linear, for images) or 0 (nearest, for labels), not {order!r}.")
    if not order and image.size and np.abs(image).max() > EXACT:
        values = np.union1d(image, [0]).astype(image.dtype)
        zero = np.searchsorted(values, 0)
        return values[apply_field(np.searchsorted(values, image) - zero, affine, field, fixed_affine, 0) + zero]
    change = np.linalg.inv(affine) @ fixed_affine
    lowest = np.float32(image.min()) if order else np.float32(0)  # `warp` gives 0 outside
    if not np.isfinite(lowest):  # a map may be undefined in places, and is undefined near them afterwards
        lowest = np.float32(np.min(image, where=np.isfinite(image), initial=np.finfo(np.float32).max))
    above = torch.from_numpy(np.asarray(image, np.float32) - lowest)[None, None]
    warped = np.empty(field.shape[1:], np.float32 if order else image.dtype)
    for slab in slabs(warped.shape):
        there = warp(above, _to_moving(field, change, slab), mode="bilinear" if order else "nearest")
        warped[slab] = there[0, 0].numpy() + lowest
    return warped


def _fitting(image, affine, field, fixed_affine):
    """The four arguments, arrays or tensors, as numpy arrays.

    Raises InputError unless the field has a component for each axis of the image, and both affines place a volume.
    """
    image, field = as_array(image, "the image", "give an array"), as_array(field, "the field", "give an array")
    if image.ndim not in (2, 3) or field.ndim != image.ndim + 1 or len(field) != image.ndim:
        raise InputError(f"a field of shape {field.shape} cannot warp an image of shape {image.shape}; give a 3D image "
                         "and a field (3, D, H, W), or a 2D one and (2, H, W).")
    require_finite("the field", field)
    return image, checked_affine(affine, "the image"), field, checked_affine(fixed_affine, "the fixed volume")


def _to_moving(field, change, slab):
    """The field by which `warp` samples the moving volume on a slab of the fixed grid. change: as for `then_affine`."""
    part = torch.from_numpy(np.require(field[:, slab], np.float32, ["C", "W"]))[None]  # of a file it may be read-only
    return then_affine(part, of_slab(change, slab))


@own_settings()
def apply_label(label: np.ndarray, affine: np.ndarray, field: np.ndarray, fixed_affine: np.ndarray,
                labels: str = "smooth") -> np.ndarray:
    """A moving label map warped by a field onto the fixed grid.

    label: (D, H, W) or (H, W) integers on its own grid. affine: its 4x4. field: (N, *fixed) in voxels of the fixed
    grid. fixed_affine: 4x4. labels: "smooth" (see `label_at`) or "nearest", the label of the nearest voxel.
    Returns: (*fixed) of the label's dtype; 0 outside the moving volume. Raises InputError for other words, or if
    label, field and affines do not fit together.
    """
    label, affine, field, fixed_affine = _fitting(label, affine, field, fixed_affine)
    if labels not in LABELS:
        raise InputError(f"labels must be {' or '.join(LABELS)}, not {labels!r}.")
    if labels == "nearest":
        return apply_field(label, affine, field, fixed_affine, order=0)
    change, warped = np.linalg.inv(affine) @ fixed_affine, np.empty(field.shape[1:], label.dtype)
    once = functools.cache(functools.partial(smoothed, label))
    for slab in slabs(warped.shape, FEW_VOXELS):
        there = np.indices(warped[slab].shape, np.float32)
        there += _to_moving(field, change, slab)[0].numpy()
        warped[slab] = label_at(label, there, once)
    return warped


def label_on(label, affine, shape, onto, labels):
    """A label map on another grid, (*shape) with the 4x4 affine `onto`, as the headers place both: `apply_label`."""
    return apply_label(label, affine, np.zeros((len(shape), *shape), np.float32), onto, labels)


def carry(array, affine, field, fixed_affine, mode):
    """An image (mode "bilinear") or a label map ("smooth", "nearest") warped by `apply_field` or `apply_label`."""
    if mode == "bilinear":
        return apply_field(array, affine, field, fixed_affine)
    return apply_label(array, affine, field, fixed_affine, mode)


def without_affine(field, matrix, affine):
    """A field without its affine part: B^-1(x + field(x)) - x with B = affine^-1 matrix affine.

    field: (N, *fixed) in voxels. matrix: 4x4, fixed to moving world. affine: 4x4 of the fixed grid.
    Returns: as field.
    """
    back = np.linalg.inv(np.linalg.inv(affine) @ matrix @ affine)
    return then_affine(torch.from_numpy(np.ascontiguousarray(field, np.float32))[None], back)[0].numpy()


def label_at(label, points, once=None):
    """A label map at points between its voxels, without the staircase of nearest-neighbour sampling.

    Each label becomes an image, 1 in its voxels and 0 elsewhere. Smoothing this image and sampling it linearly gives
    the label's share at each point; the background has the rest up to 1. The label with the largest share wins.
    Smoothing removes parts thinner than about two voxels: there points get the label of the nearest voxel. So do points
    at a voxel, so that a zero field changes nothing.
    label: (D, H, W) or (H, W) integers. points: (N, *out) in voxels of it. once: function without arguments that
    returns `smoothed` of this label map, so that several calls share it.
    Returns: (*out) of the label's dtype; 0 outside the volume. A label that is not in the volume never appears.
    """
    last = np.reshape(label.shape, (-1, 1)) - 1
    points, shape = points.reshape(len(points), -1), points.shape[1:]
    inside = np.flatnonzero(((points > -0.5) & (points < last + 0.5)).all(0))
    points = np.clip(points[:, inside], 0, last)  # the border's values extend by half a voxel
    nearest = np.rint(points).astype(np.int64)
    found = label[tuple(nearest)]
    between = np.flatnonzero((np.abs(points - nearest) > AT_VOXEL).any(0))
    if between.size:
        shares, lost = once() if once else smoothed(label)
        thin = lost[tuple(nearest[:, between])]
        found[between] = np.where(thin, found[between], largest_share(shares, points[:, between], label.dtype))
    out = np.zeros(np.prod(shape), label.dtype)
    out[inside] = found
    return out.reshape(shape)


def smoothed(label):
    """What `label_at` needs of a label map between its voxels: `label_shares` and `lost_voxels`."""
    shares = label_shares(label)
    return shares, lost_voxels(label, shares)


def label_shares(label):
    """The share of every label of a map but 0: {value: (corner, share)}, ascending.

    label: (D, H, W) or (H, W) integers. corner: (N, 1), the first voxel of the box in which the share may be above 0.
    share: float32 in 0..1 in that box.
    """
    shares = {}
    for value, box in boxes_of(label).items():
        wide = tuple(slice(max(side.start - REACH, 0), side.stop + REACH) for side in box)
        # mode "nearest": a structure cut off by the field of view continues beyond it.
        share = ndimage.gaussian_filter((label[wide] == value).astype(np.float32), SIGMA, mode="nearest",
                                        radius=REACH - 1)
        shares[value] = np.reshape([side.start for side in wide], (-1, 1)), share
    return shares


def largest_share(shares, points, dtype):
    """The label with the largest share at each point, 0 where the background has it.

    shares: from `label_shares`. points: (N, points) in voxels, within the volume. Returns: (points,) of the dtype.
    """
    winner = np.zeros(points.shape[1], dtype)
    largest = np.zeros(points.shape[1], np.float32)
    background = np.ones(points.shape[1], np.float32)
    least, most = points.min(1, keepdims=True), points.max(1, keepdims=True)
    for value, (corner, share) in shares.items():
        end = corner + np.reshape(share.shape, (-1, 1))
        if (corner > most + 1).any() or (end < least).any():
            continue
        near = np.flatnonzero((points[0] > corner[0] - 1) & (points[0] < end[0]))
        for axis, first, last in zip(points[1:], corner[1:] - 1, end[1:]):  # only few points are left
            near = near[(axis[near] > first) & (axis[near] < last)]
        here = ndimage.map_coordinates(share, points[:, near] - corner, order=1, mode="nearest")
        background[near] -= here
        better = here > largest[near]
        winner[near[better]] = value
        largest[near[better]] = here[better]
    winner[background >= largest] = 0
    return winner


def lost_voxels(label, shares):
    """Where smoothing removes a part of a structure, or a gap between structures: booleans like `label`.

    A voxel is lost if its label has the largest share neither there nor in any neighbouring voxel.
    """
    boxes = {value: tuple(slice(start, start + side) for start, side in zip(corner[:, 0], share.shape))
             for value, (corner, share) in shares.items()}
    winner, largest = np.zeros(label.shape, label.dtype), np.zeros(label.shape, np.float32)
    background = np.ones(label.shape, np.float32)
    for value, box in boxes.items():
        share = shares[value][1]
        background[box] -= share
        better = share > largest[box]
        winner[box][better] = value
        largest[box][better] = share[better]
    winner[background >= largest] = 0
    lost, around = winner != label, np.ones((3,) * label.ndim, bool)
    for value in np.unique(label[lost]):
        box = boxes.get(value, ...)  # the background is everywhere
        lost[box] &= ~((label[box] == value) & ndimage.binary_dilation(winner[box] == value, around))
    return lost


def vote(maps):
    """The majority label in each voxel of several maps of one volume, such as several labelled volumes warped to it.

    The votes are smoothed slightly, so that the neighbourhood decides between labels with equal votes, and isolated
    voxels follow the majority around them.
    maps: list of (*size) integers.
    Returns: label (*size) of the maps' dtype; agreement (*size) float32, the share of the maps that have this label.
    """
    winner = np.zeros(maps[0].shape, np.result_type(*maps))
    most = np.full(winner.shape, -1.0, np.float32)

    def share(value):  # map by map: stacked, those of hundreds of brains would not fit into memory
        return sum((each == value).astype(np.float32) for each in maps) / len(maps)

    for value in functools.reduce(np.union1d, map(np.unique, maps)):
        votes = ndimage.gaussian_filter(share(value), VOTE_SIGMA) if len(maps) > 1 else share(value)
        winner = np.where(votes > most, value, winner)
        most = np.maximum(votes, most)
    return winner, share(winner)
