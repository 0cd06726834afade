"""Other modalities made from one: six remappings of intensities, each a pure function of its name and a key.

A remapping changes the intensity of a voxel and never its place, so the labels of a volume stay valid. Five of them
apply to the moving volume of a pair, `t1_t2` to both. Volumes are arrays (D, H, W) in 0..1, before and after.
"""
import zlib

import numpy as np
from scipy import ndimage


def remap(name, fixed, moving, key):
    """A pair of volumes as two modalities.

    name: of REMAPPINGS. fixed, moving: (D, H, W) in 0..1. key: any text, such as the name of the pair; what is drawn
    depends on it, on the name and on nothing else.
    Returns: fixed, moving, float32 in 0..1; the fixed one as it was unless the remapping is for both.
    """
    for_fixed, for_moving = REMAPPINGS[name]
    rngs = [np.random.default_rng([zlib.crc32(f"{name} {key}".encode()), number]) for number in range(2)]
    fixed = for_fixed(fixed, rngs[0]) if for_fixed else fixed
    return tuple(np.clip(array, 0, 1).astype(np.float32) for array in (fixed, for_moving(moving, rngs[1])))


def inverted(array, rng):
    """Dark is bright and bright is dark; nothing is lost."""
    return 1 - array


def folded(array, rng):
    """A tent: a middle grey becomes the brightest, dark and bright both become dark. Two tissues look alike then."""
    top = rng.uniform(0.4, 0.6)
    return np.interp(array, [0, top, 1], [0, 1, 0])


def biased(array, rng):
    """A gamma of 1.5 to 2, or one over that, and a smooth bias field between 0.4 and 2.5: grey depends on the place."""
    gamma = rng.uniform(1.5, 2) ** rng.choice([-1, 1])
    return array ** gamma * bias_field(rng, array.shape) / 2.5


def levels(array, rng, count=6):
    """Six grey levels in a random order: a lookup table without any order of dark and bright."""
    order = rng.permutation(count)
    while len(np.unique(np.sign(np.diff(order)))) == 1:  # neither as it was nor inverted
        order = rng.permutation(count)
    return order[np.minimum((array * count).astype(int), count - 1)] / (count - 1)


def blurred(array, rng):
    """Inverted, blurred by a Gaussian of one voxel, with noise of 0.05: a coarser, worse scanner."""
    return 1 - ndimage.gaussian_filter(array, 1) + rng.normal(0, 0.05, array.shape)


def t1_like(array, rng):
    """Fluid dark, grey matter grey, white matter bright, in flat tissues with noise of 0.04."""
    return by_tissue(array, (0.1, 0.55, 0.85)) + rng.normal(0, 0.04, array.shape)


def t2_like(array, rng):
    """Fluid by far the brightest, grey matter a little brighter than white matter, noise of 0.04."""
    return by_tissue(array, (0.95, 0.5, 0.3)) + rng.normal(0, 0.04, array.shape)


REMAPPINGS = {"inverted": (None, inverted), "folded": (None, folded), "biased": (None, biased),
              "t1_t2": (t1_like, t2_like), "levels": (None, levels), "blurred": (None, blurred)}


def bias_field(rng, shape, strength=2.5):
    """A positive field (*shape) between 1/strength and strength, which changes over a quarter of the volume."""
    sigma = np.array(shape) / 4
    noise = ndimage.gaussian_filter(rng.normal(size=shape), sigma, mode="reflect")
    noise = noise - noise.mean()
    return strength ** (noise / np.abs(noise).max())


def by_tissue(array, greys):
    """A volume as three tissues, dark to bright, that have one grey value each and blend at their borders.

    Their centres are those of k-means on the intensities, from the 10th, 50th and 90th percentile.
    """
    centres = np.percentile(array, [10, 50, 90])
    for _ in range(20):
        nearest = np.abs(array[..., None] - centres).argmin(-1)
        centres = np.array([array[nearest == number].mean() if (nearest == number).any() else centres[number]
                            for number in range(3)])
    width = np.diff(centres).mean() / 3
    shares = np.exp(-((array[..., None] - centres) / width) ** 2 / 2) + 1e-30  # far from all: still a share each
    return (shares * greys).sum(-1) / shares.sum(-1)
