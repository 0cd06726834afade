"""Blank parts of a volume: background, corners left by a rotation, and what the field of view cuts off.

Registration must not take them for anatomy. `outlined_side` and `blank_corners` find volumes that may need a mask;
`place` in registration.py compares them with the other volume and decides.
"""
import dataclasses
import math

import numpy as np
from scipy import ndimage

from Dataloader import grids
from Dataloader.prepare import scaled
from Dataloader.volume import unpadded_box
from Inference.affine import FOREGROUND

CUT = 0.25  # of a side of the field of view; if more is foreground, it cuts off what the volume shows
# A volume with a constant background, such as a skull-stripped brain, is compared only inside its content and a rim
# (RIM of its size) if the other volume shows LARGER times as much and, once aligned, has BEYOND of that outside the
# rim. This share is 0.27 or more for six brains and heads, and 0.01 or less for the good pairs of bench_verdict.py.
BLANK, RIM, LARGER, BEYOND = 0.2, 0.02, 1.4, 0.15
EVEN = 0.002  # of the intensity range, within which a background is constant: interpolation leaves ripples in it
# A volume that was resampled at an angle is blank beyond planes. It counts as such if EMPTY of it is blank, and FLAT of
# the border of that has one of as many directions as there are axes, within ALONG degrees; this share is 0.84 or more
# for such volumes and 0.17 or less for 26 skull-stripped brains. The other volume must show something in SHOWN of it:
# it does in 0.95 for such volumes, and in a few hundredths of the air around a trunk, whose sides are flat too.
EMPTY, FLAT, ALONG, SHOWN = 0.005, 0.75, 5.0, 0.7
SOFT, LEAST_BORDER, MOST_BORDER = 2.0, 50, 1500  # voxels: smoothing of the border, and how many of them are compared
MOST_SHOWN = 2 ** 21  # voxels of a grid that is enough to see planes on; larger ones are thinned


def outlined_side(fixed, moving, affine, cfg):
    """Which of two Volumes may lack what the other one shows: "fixed", "moving", or "" if neither or if one has a mask.

    It has a constant background, nothing in it is cut off by its field of view, and it shows less than 1 / LARGER of
    the other's volume in mm^3. affine: as for `align`; two such volumes under a rigid map may just differ in size.
    """
    blank = [is_background(volume.array).mean() >= BLANK for volume in (fixed, moving)]
    masked = fixed.mask is not None or moving.mask is not None
    if not affine or masked or not any(blank) or affine == "rigid" and all(blank):
        return ""
    images, shown_mm = [], []
    for volume in (fixed, moving):
        volume = volume.every(grids.thinning(volume.array.shape))
        images.append(scaled(volume.array, cfg)[0])
        voxel_mm = grids.voxel_volume(volume.affine, volume.array.ndim)
        shown_mm.append(np.count_nonzero(images[-1] > FOREGROUND) * voxel_mm)
    less = int(shown_mm[1] <= shown_mm[0])
    if not blank[less] or is_cut_off(images[less]) or shown_mm[1 - less] < LARGER * shown_mm[less]:
        return ""
    return ("fixed", "moving")[less]


def is_background(image):
    """Booleans: where an image has the most frequent value of its corners, up to EVEN of its intensity range."""
    low, high = grids.intensity_range(image.ravel()[::max(image.size // 10 ** 6, 1)])
    corners, within = image[np.ix_(*[[0, -1]] * image.ndim)].ravel(), EVEN * (high - low)
    alike = np.abs(corners[:, None] - corners) <= within
    return np.abs(image - corners[alike.sum(1).argmax()]) <= within


def outlined(volume):
    """A Volume with a mask: all that is not `is_background`, and a rim of RIM times its size."""
    shown = ~is_background(volume.array)
    rim = np.maximum(np.round(RIM * np.diff(grids.foreground_box(shown), axis=0)[0]), 1).astype(int)
    return dataclasses.replace(volume, mask=ndimage.maximum_filter(shown.astype(np.float32), 2 * rim + 1))


def blank_corners(volume, cfg):
    """Where a Volume has blank corners, as after resampling at an angle (see EMPTY), without padding: booleans
    (*spatial); None if there are none, or above MOST_VOXELS."""
    if volume.array.size > grids.MOST_VOXELS:
        return None
    box = unpadded_box(volume)
    image = volume.array[box]
    blank = is_background(image)
    if blank.mean() < EMPTY or not is_cut_off(image := scaled(image, cfg)[0]):
        return None
    parts, count = ndimage.label(blank)
    reaches = np.zeros(count + 1, bool)
    reaches[parts[np.ix_(*[[0, -1]] * image.ndim)]] = True
    blank &= reaches[parts]
    near = grown(blank)
    beside = image[grown(near) & ~near] > FOREGROUND
    if not beside.any() or beside.mean() <= CUT or not has_flat_border(blank):
        return None
    corners = np.zeros(volume.array.shape, bool)
    corners[box] = blank
    return corners


def without(volume, blank):
    """A Volume whose mask excludes a blank part, booleans (*spatial), the voxels beside it, which may be interpolated
    from both, and padding."""
    mask = np.zeros(blank.shape, np.float32)
    box = unpadded_box(volume)
    mask[box] = ~grown(blank[box])
    return dataclasses.replace(volume, mask=mask)


def grown(inside):
    """Booleans (*spatial), and all neighbours of what is True."""
    return ndimage.binary_dilation(inside, np.ones([3] * inside.ndim))


def has_flat_border(blank):
    """Whether the border of `blank`, booleans (*spatial), is mostly planes, in at most as many directions as axes."""
    blank = blank[(slice(None, None, math.ceil((blank.size / MOST_SHOWN) ** (1 / blank.ndim))),) * blank.ndim]
    slope = np.stack(np.gradient(ndimage.gaussian_filter(blank.astype(np.float32), SOFT)))
    slope = slope[(slice(None), *[slice(int(2 * SOFT), -int(2 * SOFT))] * blank.ndim)].reshape(blank.ndim, -1)
    steep = np.linalg.norm(slope, axis=0)
    border = np.flatnonzero(steep > 0.24 / SOFT)  # that of a plane is 0.4 / SOFT
    if len(border) < LEAST_BORDER:
        return False
    border = border[::max(len(border) // MOST_BORDER, 1)]
    directions = slope[:, border] / steep[border]
    alike = np.abs(directions.T @ directions) > math.cos(math.radians(ALONG))
    left = np.ones(len(alike), bool)
    for _ in range(blank.ndim):
        left &= ~alike[(alike & left).sum(1).argmax()]
    return left.mean() <= 1 - FLAT


def is_cut_off(image):
    """Whether a side of the field of view cuts through what a volume shows. image: (*spatial), in 0 .. 1."""
    faces = [np.take(image, end, axis) for axis in range(image.ndim) for end in (0, -1)]
    return any((face > FOREGROUND).mean() > CUT for face in faces)
