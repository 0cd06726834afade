"""Deformed copies of a volume on its own grid: random deformations, which a trained network may partly undo.

Fields are drawn on the training grid (isotropic, canonical, see Dataloader/prepare.py) and brought to the grid of the
volume, which is then interpolated once. Every draw depends only on (seed, subject, draw).
"""
import numbers
import re
import warnings

import numpy as np
import torch

from Dataloader.grids import grid_transform, to_canonical, to_grid
from Dataloader.nifti import require_finite_voxels, rounded
from Dataloader.prepare import focus, scaled
from Dataloader.volume import as_array, checked_affine
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.fields import jacobian_determinant, then_affine, warp
from Inference.choices import LABELS, STRIDE
from Inference.labels import EXACT, label_at
from Inference.load_model import changed_config, loaded
from Inference.registration import corners_on_corners, total_field
from Runtime.device import own_settings
from Runtime.errors import InputError
from Runtime.keyed_random import generator, hashed, uniform

MODES = ("bilinear", "smooth", "nearest")


@own_settings()
def augment(image, label=None, affine=None, model=None, start=None, seed=0, draw=0, target=None, target_affine=None,
            condition=None, slices=0, stride=STRIDE, subject="", mask=None, cfg=None, device="cpu", labels="nearest",
            channels=(), target_channels=()) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """A deformed copy of a volume.

    image: (D, H, W) or (H, W), any real numbers. label: the same shape, or None.
    affine: 4x4, voxel to world in millimetres; default the identity.
    model: path for `load_model`, or what it returned (network, config); None: the random deformation alone.
    start: time of the random deformation, 1 .. diffusion.timesteps - 1; larger is stronger. (low, high) draws it from
    that range; a string follows the rules of copies.start in the config, which is also the default.
    seed, subject, draw: the key of the draw. OM_augment.py uses the volume's id as subject.
    target: volume (same number of axes) towards which the network deforms, on its own grid (target_affine).
    condition: what the network sees of the target: "slice" for `slices` planes (0: a random number, as in training),
    "volume" for all of it, None for planes if `slices` is given, otherwise for what it was trained with.
    stride: times per step of the scaled recovery, see `DeformDDPM.recover`. mask: (*spatial), on which data.crop_above
    centres the training grid. cfg: config for diffusion.*, copies.* and data.* if there is no model: a flat dict of
    keys that differ from Config/config_om.yaml. device: for a network from a path. labels: interpolation of the
    label, nearest or smooth.
    channels, target_channels: further channels of image and target, for a network that was trained with several; they
    are not deformed here, see `deform`.
    Returns: the image in its own dtype, whole numbers rounded; the label or None; the field (N, *spatial) float32 in
    voxels: image(x) is what was at x + field(x).
    Raises InputError for unusable input.
    """
    image = require_volume(image, "image")
    label = None if label is None else as_array(label, "label", "give an array")
    if label is not None and label.shape != image.shape:
        raise InputError(f"label: shape {label.shape} is not that of the image, {image.shape}; give its own label.")
    mask = None if mask is None else as_array(mask, "mask", "give an array")
    if mask is not None and mask.shape != image.shape:
        raise InputError(f"mask: shape {mask.shape} is not that of the image, {image.shape}; give its own mask.")
    if labels not in LABELS:
        raise InputError(f"labels must be {' or '.join(LABELS)}, not {labels!r}.")
    if not isinstance(seed, numbers.Integral) or not isinstance(draw, numbers.Integral):
        raise InputError(f"seed and draw must be whole numbers, not {seed!r} and {draw!r}.")
    affine = np.eye(4) if affine is None else checked_affine(affine, "image")
    net, cfg = deformed_by(model, cfg, image.ndim, device)
    device = next(net.parameters()).device if isinstance(net, torch.nn.Module) else device
    rng_key = (seed, subject_number(subject), draw)
    shown = None
    if target is not None:
        if net is None:
            raise InputError("target: only a network can deform an image towards a target; give a model.")
        target = require_volume(target, "target", image.ndim)
        target_affine = np.eye(4) if target_affine is None else checked_affine(target_affine, "target")
        placed_target, _ = place(target, target_affine, cfg, channels=target_channels)
        shown = show(placed_target, condition, slices, rng_key, cfg).to(device)
    field = draw_field(image, affine, cfg, rng_key, start, net, shown, stride, mask, device, channels)
    deformed_label = None if label is None else deform(label, field, labels)
    return deform(image, field), deformed_label, field


def deformed_by(model, cfg, dims, device="cpu"):
    """(net or None, config) of a deformation. model, cfg: of `augment`; a model has its own config."""
    model = loaded(model, device)
    if model is not None and cfg is not None and cfg != model[1]:
        warnings.warn("cfg has no effect beside a model, which has its own config; to change that, give "
                      "load_model(path, overrides=[\"key=value\"]) as the model.", stacklevel=3)
    return model or (None, changed_config(dims, cfg))


@own_settings()
def draw_field(image, affine, cfg, rng_key, start=None, net=None, condition=None, stride=STRIDE, mask=None,
               device="cpu", channels=()):
    """A random deformation of one volume, on its own grid: (N, *spatial) float32 in voxels.

    image: (*spatial); without a network and without data.crop_above only its shape counts. rng_key: (seed, subject,
    draw), ints. condition: (1, C + 1, *size) on the training grid, from `show`, or None. Others as in `augment`.
    Raises InputError for an image or a start that does not fit the config.
    """
    if not isinstance(stride, numbers.Integral) or stride < 1:
        raise InputError(f"stride must be a whole number of 1 or more, not {stride!r}.")
    dims = cfg["model.dims"]
    if image.ndim != dims:
        raise InputError(f"image: shape {image.shape} is not {dims}D, which model.dims requires; give a {dims}D "
                         "volume, or another model or config.")
    turn = None if condition is not None else draw_turn(image.shape, affine, rng_key, cfg)
    if turn is not None:
        image, mask, *channels = (None if one is None else turned(one, turn) for one in (image, mask, *channels))
    ddpm, t = DeformDDPM(cfg), draw_start(start, rng_key, cfg)
    if net is not None:
        placed, grid_affine = place(image, affine, cfg, mask, channels)
        field = ddpm.recover(net, placed.to(device), t, [rng_key], cfg, condition, stride).cpu()
    else:  # straight from the control points, which span the training grid from corner to corner
        points = cfg["diffusion.grids"][-1] // 2
        field = ddpm.draw_image_field([points] * dims, [t], [rng_key], "cpu")
        size = np.broadcast_to(cfg["data.img_size"], (dims,))
        grid_affine = training_grid(image, affine, cfg, mask) @ corners_on_corners([points] * dims, size)
    field = total_field(field, np.linalg.inv(grid_affine) @ affine, image.shape)
    return field if turn is None else then_affine(torch.from_numpy(field)[None], turn)[0].numpy()


@own_settings()
def deform(array, field, mode="bilinear"):
    """The array warped by a field: out(x) = array(x + field(x)), with the border value beyond the border.

    array: (*spatial); of images, values up to 2^24 are exact. field: (N, *spatial) in voxels. mode: "bilinear" for
    images (linear along each axis); for labels "smooth" (see `label_at`) or "nearest". Returns: the same shape and
    dtype, whole numbers rounded.
    """
    array = np.asarray(array)
    if mode == "smooth":
        last = np.reshape(array.shape, (-1, *[1] * array.ndim)) - 1
        return label_at(array, np.clip(np.indices(array.shape, np.float32) + field, 0, last))
    if mode == "nearest" and array.size and max(float(array.max()), -float(array.min())) > EXACT:
        values, index = np.unique(array, return_inverse=True)
        return values[deform(index.reshape(array.shape), field, mode)]
    image = torch.from_numpy(np.ascontiguousarray(array, np.float32))[None, None]
    warped = warp(image, torch.from_numpy(field)[None], mode=mode, padding="border")[0, 0].numpy()
    if array.dtype.kind in "iu":  # float32 rounds the largest ones up
        return rounded(warped, array.dtype)
    return (np.rint(warped) if array.dtype.kind == "b" else warped).astype(array.dtype)


def measure(field, affine):
    """How much a field deforms.

    field: (N, *spatial) in voxels. affine: 4x4 of its grid.
    Returns: dict of mean, p95 and max of the displacement's length over the voxels, in percent of the longest side of
    the field of view (both in millimetres); and folding, the percentage of voxels whose determinant is <= 0.
    """
    axes_mm = affine[:3, :len(field)]
    side_mm = (np.linalg.norm(axes_mm, axis=0) * field.shape[1:]).max()
    length_mm = np.linalg.norm(np.tensordot(axes_mm, field, 1), axis=0)
    percent = 100 * length_mm / side_mm
    determinant = jacobian_determinant(torch.from_numpy(field)[None])
    return {"mean": float(percent.mean()), "p95": float(np.percentile(percent, 95)), "max": float(percent.max()),
            "folding": 100 * float((determinant <= 0).double().mean())}


def subject_number(subject):
    """The hash of a subject's name, an int for the key of a draw."""
    return int.from_bytes(hashed(0, f"subject {subject}"), "little")


def draw_start(start, rng_key, cfg):
    """The time of the random deformation, an int.

    start: int, (low, high), a text as copies.start of the config explains it, or None for that key. rng_key: (seed,
    subject, draw). Raises InputError for a time outside 1 .. diffusion.timesteps - 1.
    """
    last, draw = cfg["diffusion.timesteps"] - 1, rng_key[-1]
    said = start = cfg["copies.start"] if start is None else start
    if isinstance(start, str):
        words = re.fullmatch(r"\s*(?:(\d+)\s*(?:([-+])\s*(\d+)\s*)?)?", start)
        if not words:
            raise InputError(f"start {start}: give one time such as 79, a range such as 40-79, or 48+2 for a time "
                             "that starts at 48 and rises by 2 with every second copy.")
        low, sign, number = words.groups()
        low, number = int(low or last), int(number or 0)
        rising = min(low + number * ((draw + 1) // 2), max(low, last))
        start = (low, number) if sign == "-" else rising
    try:
        low, high = map(int, (start, start) if np.ndim(start) == 0 else start)
    except (TypeError, ValueError, OverflowError):  # the last for infinity
        low = high = 0
    if not 1 <= low <= high <= last:
        raise InputError(f"start {said}: the time of a random deformation is from 1 to {last} (diffusion.timesteps "
                         "- 1); give one such time, or a rising range.")
    return low + int(float(uniform([rng_key], "start")) * (high - low + 1))


def draw_turn(shape, affine, rng_key, cfg):
    """The random flips and axis swaps of copies.permute: a 4x4 matrix from each voxel to the voxel it shows, or None.

    Each axis is mirrored with probability 1/2, and axes with the same number and size of voxels are swapped at random,
    so the grid stays the same and no interpolation is needed.
    """
    if not cfg["copies.permute"]:
        return None
    draws, dims = generator(rng_key[0], "turn", *rng_key[1:]), len(shape)
    size_mm = np.linalg.norm(affine[:3, :dims], axis=0)
    source, turn = list(range(dims)), np.eye(4)
    for axis in torch.randperm(dims, generator=draws).tolist():
        alike = [other for other in range(dims) if shape[other] == shape[axis]
                 and abs(size_mm[other] - size_mm[axis]) < 1e-3 * size_mm[axis]]
        other = alike[int(torch.randint(len(alike), (), generator=draws))]
        source[axis], source[other] = source[other], source[axis]
    for axis, mirrored in enumerate((torch.rand(dims, generator=draws) < 0.5).tolist()):
        turn[axis, :dims] = 0.0
        turn[axis, source[axis]] = -1.0 if mirrored else 1.0
        turn[axis, 3] = shape[axis] - 1 if mirrored else 0.0
    return turn


def turned(array, turn):
    """The array under a turn of `draw_turn`, without interpolation: turned(x) = array(turn(x)). array: (*spatial)."""
    dims = np.ndim(array)
    source = np.abs(turn[:dims, :dims]).argmax(1)
    mirrored = [axis for axis in range(dims) if turn[axis, source[axis]] < 0]
    return np.transpose(np.flip(array, mirrored), np.argsort(source))


def require_volume(array, name, dims=None):
    """The array, which must have two or three axes and finite real numbers. Raises InputError naming the problem."""
    array = as_array(array, name, "give an array (D, H, W) or (H, W)")
    if array.ndim not in (2, 3) or dims not in (None, array.ndim):
        raise InputError(f"{name}: shape {array.shape} is not {dims or '2D or 3'}D; give one {dims or 3}D volume.")
    require_finite_voxels(name, array)
    return array


def pick_target(others, rng_key):
    """The target of a draw, one of the list `others`. rng_key: of the draw."""
    return others[int(float(uniform([rng_key], "target")) * len(others))]


def shown_kind(kind, slices, cfg):
    """What a network sees of a target: as requested, else planes if a number is given, else as in training."""
    return kind or ("slice" if slices else cfg["model.condition_type"])


def show(target, kind, slices, rng_key, cfg):
    """What the network sees of a target, drawn once for all steps: values and mask, (1, C + 1, *size).

    target: (1, C, *size) on the training grid. kind, slices: condition and slices of `augment`. rng_key: of the draw.
    Raises InputError if the model takes no condition or the grid has fewer planes than requested.
    """
    if cfg["model.condition_type"] == "none":
        raise InputError("target: the model was trained without a condition (model.condition_type none) and cannot "
                         "use a target; use another model, or leave out the target.")
    kind = shown_kind(kind, slices, cfg)
    if kind not in ("slice", "volume"):
        raise InputError(f"condition {kind}: the network can see the target as slice or volume; give one of these.")
    if not slices or kind == "volume":
        return make_condition(target, kind, [rng_key])
    planes = [(axis, plane) for axis, n in enumerate(target.shape[2:]) for plane in range(n)]
    if not 1 <= slices <= len(planes):
        raise InputError(f"slices {slices}: the training grid has {len(planes)} planes; give 1 to {len(planes)}, or 0 "
                         "for a random number.")
    order = torch.randperm(len(planes), generator=generator(rng_key[0], "planes", *rng_key[1:]))
    mask = torch.zeros_like(target[:, :1])
    for number in order[:slices].tolist():
        axis, plane = planes[number]
        mask.select(axis + 2, plane).fill_(1.0)
    return torch.cat([target * mask, mask], dim=1)


def training_grid(image, affine, cfg, mask=None):
    """The affine of the training grid of a volume, 4x4, without resampling it. image, affine, mask: as in `augment`."""
    box = focus((scaled(one, cfg)[0] for one in [image]), affine, cfg, mask)  # scaled only if it is looked at
    empty, affine = to_canonical(np.broadcast_to(np.uint8(0), image.shape), affine)
    return grid_transform(empty.shape, affine, cfg["data.img_size"], cfg["data.spacing_mm"], box)[2]


def place(image, affine, cfg, mask=None, channels=()):
    """A volume on the training grid, just as `on_grid` puts a file there: (1, C, *size), and the grid's affine 4x4.

    channels: further channels of the image. Raises InputError if their number differs from the config's or their shape
    from the image's.
    """
    if 1 + len(channels) != cfg["data.channels"]:
        raise InputError(f"image: it has {1 + len(channels)} of the {cfg['data.channels']} channels that the model "
                         "was trained with (data.channels); give all of them, in the same order.")
    for number, channel in enumerate(channels, 2):
        if np.shape(channel) != np.shape(image):
            raise InputError(f"channel {number}: shape {np.shape(channel)} is not that of the image, "
                             f"{np.shape(image)}; bring it to the image's grid.")
    images = [scaled(one, cfg)[0] for one in (image, *channels)]
    box = focus(images, affine, cfg, mask)
    placed = [to_grid(one, affine, cfg["data.img_size"], cfg["data.spacing_mm"], box=box) for one in images]
    return torch.from_numpy(np.stack([array for array, _ in placed]))[None], placed[0][1]
