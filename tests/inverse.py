"""The inverse of a field, for tests of what must undo it."""
import torch

from Diffusion.fields import warp


def invert(field, iterations=20):
    """Inverse field by the fixed-point iteration inverse(x) = -field(x + inverse(x)) (Chen et al., Med Phys 2008).

    compose(field, inverse) is zero up to interpolation. Each iteration shrinks the error by the largest derivative of
    the field, so it converges where that stays below one, which also means no folding.

    field: (B, N, *spatial) displacement in voxels. Returns: the same shape.
    """
    inverse = torch.zeros_like(field)
    for _ in range(iterations):
        inverse = -warp(field, inverse, padding="border")
    return inverse
