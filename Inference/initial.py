"""A registration that starts from the result of another program: a matrix or a field."""
import dataclasses

import numpy as np
import torch

from Dataloader.transforms import is_field, read_any_field, read_matrix
from Diffusion.fields import compose
from Inference.labels import apply_field
from Inference.registration import arrays, read_side, register, total_field
from Inference.scores import pair_scores
from Runtime.errors import InputError


def register_from(initial, fixed, moving, start="auto", inverse=False, dims=3, **options):
    """`register`, started from the transform in a file.

    initial: path of a matrix or a field, see Dataloader/transforms.py; None: from `start`, as `register` does it.
    fixed, moving: paths. dims: axes of the volumes. options: those of `register`.
    Returns: what `register` does. If `initial` is a field, the result's field is the whole transform, and
    overlap_percent and matrix are between the fixed volume and the moving one warped by `initial`.
    Raises InputError as `register` does, and for an inverse if `initial` is a field.
    """
    if initial is None:
        return register(fixed, moving, start=start, inverse=inverse, **options)
    if not is_field(initial):
        return register(fixed, moving, start=read_matrix(initial, fixed, moving, dims), inverse=inverse, **options)
    if inverse:
        raise InputError(f"{initial}: a registration that starts from a field cannot be inverted; leave out "
                         "--inverse, or start from a matrix.")
    fixed = read_side(fixed, "fixed", options.pop("fixed_mask", None), options.pop("fixed_channels", ()))
    moving = read_side(moving, "moving", options.pop("moving_mask", None), options.pop("moving_channels", ()))
    first = on_grid_of(read_any_field(initial, dims), fixed)
    shown, *shown_channels = (apply_field(array, moving.affine, first, fixed.affine) for array in arrays(moving))
    if shown.min() == shown.max():
        raise InputError(f"{initial}: this field shows nothing of the moving volume; check that it leads from fixed "
                         "to moving, and that it is the right file.")
    shown_mask = None if moving.mask is None else apply_field(moving.mask, moving.affine, first, fixed.affine, order=0)
    result = register(tuple(fixed), (shown, fixed.affine), start="header", fixed_mask=fixed.mask,
                      fixed_channels=arrays(fixed)[1:], moving_mask=shown_mask, moving_channels=shown_channels,
                      **options)
    field = compose(torch.from_numpy(first)[None], torch.from_numpy(result.field)[None])[0].numpy()
    warped, *warped_channels = (apply_field(array, moving.affine, field, fixed.affine) for array in arrays(moving))
    return dataclasses.replace(result, fixed=fixed, moving=moving, field=field, warped=warped,
                               warped_channels=warped_channels, start="field",
                               **pair_scores(fixed, moving, field, warped, result.matrix, None, result.compared_by,
                                              result.one_sign))


def on_grid_of(placed_field, volume):
    """A field on the grid of a volume, (N, *spatial) float32 in its voxels. placed_field: (field, affine) of its own.

    volume: a Volume. Beyond its own grid the field is that of its border.
    """
    field, field_affine = placed_field
    to_field = np.linalg.inv(field_affine) @ volume.affine
    return total_field(torch.from_numpy(field)[None], to_field, np.linalg.inv(to_field), volume.array.shape)
