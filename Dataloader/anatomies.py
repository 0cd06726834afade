"""Synthetic anatomies from noise, in random contrasts, to train a network for any kind of volume.

Based on SynthMorph (Hoffmann et al., IEEE TMI 2022): several maps of smooth noise are warped, each label is the region
where its map is the largest, and each label gets random intensities. So the network learns neither the shape nor the
contrast of any real organ. This version adds nested structures, fields of view and spacings. The views of an anatomy
differ in deformation, contrast, blur, bias, noise, field of view and spacing; two of them form a pair with true labels.

Everything is a function of (seed, number of the anatomy, number of the view) alone.
Scripts/make_anatomies.py writes a data set of anatomies.
"""
import itertools

import numpy as np
from scipy import ndimage

from Runtime.keyed_random import hashed

REGIONS = (4, 10)  # regions of an anatomy; their labels count from 1
NESTS = (1, 2)  # groups of nested structures in an anatomy; their labels follow
NESTED = (1, 3)  # structures in such a group
MOST_LABELS = REGIONS[1] + NESTS[1] * NESTED[1]
CELLS = (2, 6)  # noise cells along a side: the range makes large and small regions
WARP_CELLS, WARP = (3, 7), 0.06  # cells of the field that warps a map; its root mean square, as a fraction of the side
BODY = 0.6  # probability of a body in empty space; otherwise the regions fill the volume, as in a crop
AIR = 0.8  # probability that the space around a body is black
TEXTURE = 0.06  # largest standard deviation of a label; its mean is between 0 and 1
VOXEL_MM = (0.1, 2.0)  # voxel side of the anatomy's own grid, from mice to humans
SIDES = (0.6, 1.0)  # field of view of an anatomy along each axis, as a fraction of the side
FOV_CHANGE, FOV_SHIFT = 0.08, 0.04  # most that a view changes its log size, and shifts, in sides; 0 beyond the anatomy
SPACING = (0.9, 1.5)  # voxel side of a view, in voxels of the anatomy
THICK, THICKNESS = 0.4, (2.0, 4.0)  # probability of thick slices, and their thickness in voxels of the view
LEAST_SIDE = 8  # voxels along an axis, of an anatomy or a view
BLUR = 1.0  # largest sigma of the Gaussian, in voxels of the anatomy
BIAS = 0.4  # largest log of the bias field
GAMMA = 0.3  # largest log of the exponent
NOISE = (0.005, 0.06)  # standard deviation; never 0, because constant volumes are refused


def contrast_of(view):
    """The contrast number of a view: views 2k and 2k + 1 share one, so pairs within and across contrasts exist."""
    return view // 2


def label_map(seed, number, size):
    """The labels of one anatomy on its own grid.

    seed, number: ints. size: (D, H, W) or (H, W), of at least LEAST_SIDE voxels each.
    Returns: int16 (*size), 0 to MOST_LABELS; 0 is the space around a body, if there is any. Not every label occurs.
    """
    rng = _rng(seed, "anatomy", number)
    count = rng.integers(REGIONS[0], REGIONS[1] + 1)
    highest, label = np.full(size, -np.inf), np.zeros(size, np.int16)
    for region in range(1, count + 1):
        noise = smooth_noise(rng, size, rng.integers(CELLS[0], CELLS[1] + 1))
        cells = rng.integers(WARP_CELLS[0], WARP_CELLS[1] + 1)
        points = [place + WARP * n * smooth_noise(rng, size, cells) for place, n in zip(np.indices(size), size)]
        noise = ndimage.map_coordinates(noise, np.stack(points), order=1, mode="nearest")
        label[noise > highest] = region
        highest = np.maximum(noise, highest)
    place_norm = np.stack(np.meshgrid(*[(np.arange(n) + 0.5) * 2 / n - 1 for n in size], indexing="ij"))
    following = itertools.count(count + 1)
    for _ in range(rng.integers(NESTS[0], NESTS[1] + 1)):
        _nest(rng, label, place_norm, following)
    if rng.random() < BODY:
        radii = rng.uniform(0.7, 0.95, len(size))
        label[_distance(rng, place_norm, np.zeros(len(size)), radii, 0.1) > 1] = 0
    return label


def _nest(rng, label, place_norm, following):
    """Draw a group of nested structures into a label map, in place; their labels come from `following`.

    place_norm: (N, *size) position of each voxel, -1 to 1 from face to face.
    """
    dims = label.ndim
    distance = _distance(rng, place_norm, rng.uniform(-0.5, 0.5, dims), rng.uniform(0.2, 0.45, dims), 0.15)
    depth = rng.integers(NESTED[0], NESTED[1] + 1)
    for level in range(depth):
        label[distance < 1 - level / depth] = next(following)


def _distance(rng, place_norm, centre, radii, wobble):
    """(*size), 1 on the surface of an ellipsoid deformed by noise, less inside. centre, radii: (N,) in -1 .. 1.

    wobble: root mean square of the logarithm of its radius.
    """
    column = (-1, *[1] * (place_norm.ndim - 1))
    scaled = (place_norm - centre.reshape(column)) / radii.reshape(column)
    return np.sqrt((scaled ** 2).sum(0)) * np.exp(wobble * smooth_noise(rng, place_norm.shape[1:], 4))


def render(label, seed, number, contrast):
    """The intensities of an anatomy in one of its contrasts, before `make_view` deforms and degrades them.

    label: (*size) from `label_map`. contrast: its number. Each label has a mean and a texture. The texture belongs to
    the anatomy; a contrast makes it fainter or stronger, or inverts it.
    Returns: float64 (*size), about 0 to 1.
    """
    texture = smooth_noise(_rng(seed, "texture", number), label.shape, max(min(label.shape) // 4, 2))
    rng = _rng(seed, "contrast", number, contrast)
    means, strengths = rng.random(MOST_LABELS + 1), rng.uniform(-TEXTURE, TEXTURE, MOST_LABELS + 1)
    if rng.random() < AIR:
        means[0] = strengths[0] = 0.0
    return means[label] + strengths[label] * texture


def make_view(label, field, seed, number, view):
    """One view of an anatomy: a simulated scan of a deformed copy.

    label: (*size) from `label_map`. field: (N, *size) displacement in voxels of the anatomy's grid; the copy is
    anatomy(x + field(x)). seed, number: of the anatomy. view: number of the view.
    Returns: dict of image, int16 (1000 is white before the bias), and label, uint8, both on one grid of the view's own
    shape; affine, 4x4, voxel to world in mm. All views of an anatomy share one world.
    """
    rng = _rng(seed, "view", number, view)
    points = np.indices(label.shape) + field
    image = render(label, seed, number, contrast_of(view))
    image = ndimage.map_coordinates(image, points, order=1, mode="grid-constant")
    label = ndimage.map_coordinates(label, points, order=0, mode="grid-constant")
    scale, offset, shape, affine = view_grid(rng, label.shape, seed, number)
    sigma = np.hypot(rng.uniform(0, BLUR), np.where(scale > 1.5, 0.4 * scale, 0))  # a thick slice averages over depth
    image = ndimage.gaussian_filter(image, sigma, mode="nearest")
    image = ndimage.affine_transform(image, scale, offset, shape, order=1, mode="grid-constant")
    label = ndimage.affine_transform(label, scale, offset, shape, order=0, mode="grid-constant")
    image = _as_measured(rng, np.clip(image, 0, 1))
    return {"image": np.rint(1000 * image).astype(np.int16), "label": label.astype(np.uint8), "affine": affine}


def _as_measured(rng, image):
    """Intensities after gamma, bias field and noise. image: (*shape) in 0 .. 1. Returns: (*shape), at least 0."""
    image = image ** np.exp(rng.uniform(-GAMMA, GAMMA))
    bias = smooth_noise(rng, image.shape, rng.integers(1, 4))
    image = image * np.exp(rng.uniform(0, BIAS) * bias / np.abs(bias).max())
    return np.maximum(image + rng.uniform(*NOISE) * rng.standard_normal(image.shape), 0)


def view_grid(rng, size, seed, number):
    """The grid of a view: voxel i lies at scale * i + offset in the anatomy.

    rng: of the view. size, seed, number: of the anatomy, which sets the base field of view and the voxel side in mm.
    Returns: scale and offset, (N,); shape, N ints; affine, 4x4 to the world in mm.
    """
    of_anatomy, size = _rng(seed, "field of view", number), np.array(size)
    dims = len(size)
    sides, low, high = of_anatomy.uniform(*SIDES, dims), *np.log(VOXEL_MM)
    voxel_mm = np.exp(of_anatomy.uniform(low, high))
    extent = size * sides * np.exp(rng.uniform(-FOV_CHANGE, FOV_CHANGE, dims))
    middle = (size - 1) / 2 + size * rng.uniform(-FOV_SHIFT, FOV_SHIFT, dims)
    scale = np.repeat(rng.uniform(*SPACING), dims)
    axis, thickness = rng.integers(dims), rng.uniform(*THICKNESS)
    if rng.random() < THICK:
        scale[axis] *= thickness
    shape = np.maximum(np.rint(extent / scale).astype(int), LEAST_SIDE)
    offset = middle - scale * (shape - 1) / 2
    affine = np.eye(4)
    affine[:dims, :dims] = np.diag(scale * voxel_mm)
    affine[:dims, 3] = offset * voxel_mm
    if dims == 2:
        affine[2, 2] = voxel_mm
    return scale, offset, tuple(shape.tolist()), affine


def smooth_noise(rng, size, cells):
    """Noise with unit root mean square: a cubic B-spline with normal coefficients.

    size: of the result. cells: of the spline along each axis; the fewer the smoother.
    Returns: float64 (*size). It uses only sums and products of arrays, so its bits do not depend on threads.
    """
    values = rng.standard_normal([cells + 3] * len(size))
    for axis, count in enumerate(size):
        places = (np.arange(count) + 0.5) * cells / count
        first = np.minimum(places.astype(int), cells - 1)
        f = (places - first).reshape([-1 if one == axis else 1 for one in range(len(size))])
        weights = (1 - f) ** 3, 3 * f ** 3 - 6 * f ** 2 + 4, -3 * f ** 3 + 3 * f ** 2 + 3 * f + 1, f ** 3
        values = sum(weight * np.take(values, first + k, axis) for k, weight in enumerate(weights)) / 6
    return values / max(np.sqrt(np.mean(values ** 2)), 1e-12)


def _rng(seed, purpose, *counters):
    """A numpy generator for one purpose, seeded by the hash of its arguments (Runtime/keyed_random.py)."""
    return np.random.default_rng(int.from_bytes(hashed(seed, f"anatomies: {purpose}", *counters), "little"))
