"""A registration that begins where another program has stopped: at its matrix or its field."""
import numpy as np
import torch

from Dataloader.nifti import read_volume
from Dataloader.transforms import is_field, read_any_field, read_matrix
from Diffusion.fields import compose
from Inference.registration import apply_field, read_mask, register, regularity_scores, total_field
from Runtime.errors import InputError


def register_from(initial, fixed, moving, start="auto", inverse=False, dims=3, **options):
    """`register`, begun from the transform in a file.

    initial: path of a matrix or a field, see Dataloader/transforms.py; None: from `start`, as `register` does it.
    fixed, moving: paths. dims: axes of the volumes. options: those of `register`.
    Returns: what `register` does. After a field, the field is the whole way, overlap_percent, similarity_before and
    matrix are those between the fixed volume and the moving one as the first field shows it.
    Raises InputError as `register` does, and for an inverse after a field, which there is none of.
    """
    if initial is None:
        return register(fixed, moving, start=start, inverse=inverse, **options)
    if not is_field(initial):
        return register(fixed, moving, start=read_matrix(initial, fixed, moving, dims), inverse=inverse, **options)
    if inverse:
        raise InputError(f"{initial}: after a field there is no inverse of the whole way; leave out --inverse, or "
                         "begin from a matrix.")
    moving_mask, moving_file = options.pop("moving_mask", None), moving
    channels = [read_volume(path, dims)[0] for path in options.pop("moving_channels", ())]
    fixed, moving = read_volume(fixed, dims), read_volume(moving, dims)
    moving_mask = read_mask(moving_mask, str(moving_file), moving)
    first = on_grid_of(read_any_field(initial, dims), fixed)
    shown = apply_field(*moving, first, fixed[1])
    if shown.min() == shown.max():
        raise InputError(f"{initial}: it shows nothing of the moving volume; check its direction, which is from fixed "
                         "to moving, and its file.")
    if moving_mask is not None:
        moving_mask = apply_field(moving_mask, moving[1], first, fixed[1], order=0)
    shown_channels = [apply_field(channel, moving[1], first, fixed[1]) for channel in channels]
    result = register(fixed, (shown, fixed[1]), start="header", moving_mask=moving_mask, moving_channels=shown_channels,
                      **options)
    field = compose(torch.from_numpy(first)[None], torch.from_numpy(result["field"])[None])[0].numpy()
    return {**result, "field": field, "warped": apply_field(*moving, field, fixed[1]), "moving": moving,
            "warped_channels": [apply_field(channel, moving[1], field, fixed[1]) for channel in channels],
            "start": "field", **regularity_scores(field)}


def on_grid_of(placed_field, volume):
    """A field on the grid of a volume, (N, *spatial) float32 in its voxels. placed_field: (field, affine) of its own.

    volume: (array, affine). Beyond its own grid the field is that of its border.
    """
    (field, field_affine), (array, affine) = placed_field, volume
    to_field = np.linalg.inv(field_affine) @ affine
    return total_field(torch.from_numpy(field)[None], to_field, np.linalg.inv(to_field), array.shape)
