"""How much a field is smoothed, inferred from the pair by cross-validation.

With too little smoothing a field follows the noise of the images, with too much it cannot follow their anatomy. The
best amount depends on both: a fixed number that suits human brains is wrong for mice. The images alone determine it,
without labels. The fixed volume is cut into cubes of two colours. The field is found from one colour alone, and the
similarity is measured inside the cubes of the other: a field that follows anatomy is right there too, one that follows
noise is not. That is cross-validation, as Wahba, "Spline Models for Observational Data", 1990, chooses the smoothness
of splines. The curve over the smoothing has one maximum, and it is found on small images, with few steps.

The gross motion is found from all voxels first, at the coarsest resolution. Otherwise structures that move by the side
of a cube, such as the wall of a beating heart, are hidden whole, and the smoothest field guesses them best.
"""
import math

import torch

BLOCK, RIM = 8, 2  # voxels: side of the cubes, and what of them lies near the other colour and is not measured
MOST_VOXELS = 750_000  # of the images on which the curve is looked for; larger ones are halved along each axis
LEAST_SIDE = 2 * BLOCK  # voxels: with fewer along an axis the images are not halved
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0)  # that are tried, each twice the one before
GROSS = 1.0  # weight with which the gross motion is found
STEPS = 15  # of optimisation at each resolution
# Of two modalities. Cubes tell nothing there: neighbours share structures of one modality alone, and the curve falls.
OTHER_MEASURE = 2.0


def cubes(size, device="cpu"):
    """The two colours: what the optimisation sees, and what is measured; (1, 1, *size) float32 each, 0 or 1."""
    dims = len(size)
    places = [torch.arange(n, device=device).view([-1 if k == axis else 1 for k in range(dims)])
              for axis, n in enumerate(size)]
    seen = sum(place // BLOCK for place in places) % 2 == 0
    inner = math.prod((place % BLOCK >= RIM) & (place % BLOCK < BLOCK - RIM) for place in places)
    return seen.float()[None, None], (inner * ~seen).float()[None, None]


def shrinking(size):
    """The factor by which a pair of this size is shrunk before the curve is computed: a power of 2."""
    factor = 1
    while math.prod(-(-n // factor) for n in size) > MOST_VOXELS and min(size) >= 2 * factor * LEAST_SIDE:
        factor *= 2
    return factor


def best_weight(score):
    """The weight with the highest score: that of WEIGHTS, moved to the maximum of the parabola through its neighbours.

    All are tried, since noise gives the curve small steps that a search would stop at. The parabola is over the
    logarithm of the weight. score: a function of a weight. Returns: a float.
    """
    scores = [score(weight) for weight in WEIGHTS]
    best = max(range(len(scores)), key=scores.__getitem__)
    if best in (0, len(scores) - 1):
        return WEIGHTS[best]
    below, highest, above = scores[best - 1:best + 2]
    curvature = below - 2 * highest + above
    return WEIGHTS[best] * 2 ** (0.5 * (below - above) / curvature) if curvature < 0 else WEIGHTS[best]
