"""Register two volumes of any size, spacing and orientation: onto the network's grid, and back as one field.

Three grids meet here, each with a 4x4 affine, voxel to world in mm, RAS: A_fixed and A_moving of the files, and
A_work of the working grid, an isotropic canonical grid on the fixed volume. T (4x4) leads from a point of the fixed
volume's world to the same point of the moving one's: the identity where the headers agree, else an affine alignment.
The moving volume is sampled on the working grid through A_moving^-1 T A_work, and network and refinement find a field u
there. Affine and deformation then become one field on the fixed volume's own grid,

    d(x) = A_fixed^-1 T A_work (y + u(y)) - x   with y = A_work^-1 A_fixed x, in voxels,

by which the moving file is interpolated once: warped(x) = moving(A_moving^-1 A_fixed (x + d(x))).

With a network the working grid is that of its training; with refine.grid "own" its answer is refined on another one,
with voxels as large as those of the fixed volume, which is the only working grid without a network.
"""
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from Dataloader.grids import (
    SMOOTH_ABOVE,
    SMOOTH_SIGMA,
    foreground_box,
    require_same_grid,
    rescale,
    to_canonical,
    to_grid,
)
from Dataloader.nifti import open_nifti, read_label, read_volume
from Dataloader.prepare import intensity_limits
from Diffusion.fields import across, resample, warp
from Diffusion.losses import local_correlation, mapped_correlation
from Diffusion.metrics import folding_percent, sdlogj
from Diffusion.validation import best_field, label_map, segmented, segmented_labels
from Inference.affine import WINDOW, align_affine
from Inference.load_model import default_config, load_model
from Inference.refine import STEPS
from Inference.refine import refine as optimise
from Inference.refine import similarity as pair_similarity
from Runtime.device import synchronize
from Runtime.errors import InputError

LEAST_SIDE = 4  # voxels along an axis; fewer give no useful derivatives
MOST_VOXELS = 256 ** 3  # of the working grid where no network sets it
STARTS = ("auto", "header", "centre")
BETTER = 0.02  # similarity by which the centres must beat the headers, which are usually right
AFFINES = ("rigid", "affine")
SIMILARITIES = ("correlation", "mapped", "mind")
NOT_INVERTED = 0.1  # voxels of the working grid that a point there and back may miss by
FAR_APART = 50.0  # percent of the fixed field of view; where the moving one covers less, a warning says so


def register(fixed, moving, model=None, affine=False, refine=0, start="auto", device="cpu", inverse=False,
             config=None, progress=False, similarity=None, fixed_mask=None, moving_mask=None,
             fixed_channels=(), moving_channels=()):
    """Find the field that brings `moving` onto `fixed`.

    fixed, moving: path of a file, or (array, affine 4x4), array (D, H, W) or (H, W) with any intensities.
    model: path for `load_model`, what it returned (net, config), or None. config: flat dict of config keys where there
    is no model; default Config/config_om.yaml.
    affine: False, "rigid", or True or "affine": align by that first.
    refine: steps of optimisation for this pair, True for the recommended number, 0 for none. progress: show a bar.
    start: "header" (as the headers place the volumes), "centre" (of the fields of view on each other), "auto" (the more
    similar one of the two; an affine alignment has starts of its own), or a 4x4 matrix, fixed to moving world in mm.
    inverse: find the inverse too.
    similarity: of SIMILARITIES, as `image_similarity` explains them; None for the config's registration.similarity.
    fixed_mask, moving_mask: file or array; what is not above 0 counts neither for alignment nor refinement nor
    similarity. fixed_channels, moving_channels: lists of files or arrays, further channels, in the same order, which
    refinement and similarity compare too. All on the grids of their volumes. A network sees as many channels as it was
    trained with (data.channels), mostly the volumes alone.
    Returns: dict of
      field (N, *fixed) float32, displacement in voxels of the fixed grid, and inverse (N, *moving) of the moving grid;
      warped (*fixed) float32, intensities of the moving file, and warped_channels, a list of such; fixed, moving:
      (array, affine) as they were read;
      with a network that has model.structures segmented_fixed (*fixed) and segmented_moving (*moving), uint16: what it
      segments in each volume, by the labels of its training's maps, see `segmented_labels`;
      start: what was taken; matrix: T, 4x4; overlap_percent: of the fixed field of view, covered by the moving one;
      similarity_before (as the headers place the volumes), similarity: on the working grid, 1 is perfect;
      folding_percent, sdlogj: of the field; inverse_error_mm, inverse_error_max_mm: how far, on average and at most, a
      point of the moving volume that went there and back is from where it was;
      seconds: dict of affine, network, refine and total, without reading files, loading the model and scoring;
      warnings: sentences about what may be wrong, such as little overlap; also given as warnings.
    Raises InputError for what cannot be read, is not a volume, or does not fit together.
    """
    affine, refine = _options(affine, refine)
    net, cfg, names, fixed, moving = _read_pair(fixed, moving, model, config, device)
    cfg = _compared_by(similarity, cfg)
    masks = {"fixed_mask": read_mask(fixed_mask, names[0], fixed),
             "moving_mask": read_mask(moving_mask, names[1], moving)}
    seen = 1 if net is None else cfg["data.channels"]
    channels = _read_channels(fixed_channels, moving_channels, names, fixed, moving, seen)
    return _find(net, cfg, names, fixed, moving, masks, channels, affine, refine, start, device, inverse, progress)


def _find(net, cfg, names, fixed, moving, masks, channels, affine, refine, start, device, inverse, progress):
    """What `register` returns, from what it has read. masks, channels: as for `_place`."""
    began, seconds = time.perf_counter(), dict.fromkeys(("affine", "network", "refine"), 0.0)
    placed = _place(fixed, moving, masks, channels, affine, start, net is not None, cfg, seconds)
    pair = _on_device(placed["pair"], device)
    work_field, structures = (None, None) if net is None else _ask(net, pair, cfg, seconds)
    own_grid = net is None or bool(refine and cfg["refine.grid"] == "own")
    if own_grid and net is not None:
        placed, work_field, structures = _on_own_grid(work_field, structures, placed, fixed, moving, masks, channels,
                                                      cfg)
        pair = _on_device(placed["pair"], device)
    sentences = _warnings(names, placed, fixed[1] if own_grid else None, cfg["model.dims"])
    work_field = _refined(pair, work_field, structures, refine, cfg, seconds, progress)
    result = _on_fixed_grid(work_field, placed, fixed, moving)
    result["warped_channels"] = [apply_field(channel, moving[1], result["field"], fixed[1])
                                 for channel in channels["moving"]]
    if inverse:
        result.update(_inverse(work_field, placed, moving, names[1], sentences))
    if structures is not None:
        result.update(_segmentations(structures, placed, fixed, moving, segmented_labels(cfg)))
    seconds["total"] = time.perf_counter() - began
    before = pair_similarity(_on_device(placed["by_header"], device), None, cfg)
    return {**result, "fixed": fixed, "moving": moving, "start": placed["start"], "matrix": placed["matrix"],
            "overlap_percent": placed["overlap_percent"], "similarity_before": before,
            "similarity": pair_similarity(pair, work_field.to(device), cfg, padding="zeros"),
            **regularity_scores(result["field"]), "seconds": seconds, "warnings": sentences}


def apply_field(image, affine, field, fixed_affine, order=1):
    """A moving image or label map as a field shows it, on the fixed grid, with one interpolation.

    image: (D, H, W) or (H, W) on its own grid. affine: its 4x4. field: (N, *fixed) in voxels of the fixed grid.
    fixed_affine: 4x4. order: 1 for images (float32 out), 0 for labels (dtype kept).
    Returns: (*fixed); outside the image its least intensity, for labels 0.
    """
    change = np.linalg.inv(affine) @ fixed_affine
    moving_field = across(torch.from_numpy(np.ascontiguousarray(field, dtype=np.float32))[None], change)
    lowest = np.float32(image.min()) if order else 0  # `warp` gives 0 outside
    above = _tensor(np.asarray(image, np.float32) - lowest)
    warped = warp(above, moving_field, mode="bilinear" if order else "nearest")[0, 0].numpy() + lowest
    return warped if order else warped.astype(image.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The volumes
# ---------------------------------------------------------------------------------------------------------------------

def _options(affine, refine):
    """affine and refine of `register`, with the kind and the number that True stands for."""
    affine = "affine" if affine is True else affine
    refine = STEPS if refine is True else refine
    if affine and affine not in AFFINES:
        raise InputError(f"affine is {' or '.join(AFFINES)}, not {affine!r}.")
    return affine, refine


def _read_pair(fixed, moving, model, config, device):
    """net or None, cfg, the names of both volumes, and each as (array, affine): the inputs of `register`, checked."""
    names = [str(source) if isinstance(source, str | Path) else word
             for source, word in ((fixed, "fixed"), (moving, "moving"))]
    dims = _dims(fixed, names[0])
    moving_dims = _dims(moving, names[1])
    if dims != moving_dims:
        raise InputError(f"{names[0]} is {dims}D and {names[1]} is {moving_dims}D; fixed and moving need the same "
                         "number of axes.")
    net, cfg = _net_and_config(model, config, dims, device)
    if cfg["model.dims"] != dims:
        raise InputError(f"{names[0]} and {names[1]} are {dims}D, but the model, or --dims, is {cfg['model.dims']}D; "
                         "give what fits.")
    return net, cfg, names, _volume(fixed, names[0], dims), _volume(moving, names[1], dims)


def _dims(source, name):
    """The number of axes of a path or (array, affine): 2 or 3. Trailing axes of length 1 in a file do not count."""
    if isinstance(source, str | Path):
        shape = open_nifti(source).shape
        while len(shape) > 2 and shape[-1] == 1:
            shape = shape[:-1]
    else:
        shape = np.shape(source[0])
    if len(shape) not in (2, 3):
        raise InputError(f"{name}: shape {tuple(shape)} is neither 2D nor 3D; split it into one file per volume.")
    return len(shape)


def _net_and_config(model, config, dims, device):
    """(net or None, config) of whatever `register` was given as its model."""
    if isinstance(model, str | Path):
        return load_model(model, device)
    if model is not None:
        net, cfg = model
        return net.to(device), cfg
    return None, default_config(dims) if config is None else config


def _volume(source, name, dims):
    """(array float32, affine 4x4) of a path or of (array, affine), checked alike."""
    if isinstance(source, str | Path):
        array, affine = read_volume(source, dims)
    else:
        array, affine = np.ascontiguousarray(source[0], dtype=np.float32), np.array(source[1], np.float64)
        if not np.isfinite(array).all() or array.size == 0 or array.min() == array.max():
            raise InputError(f"{name}: the array is empty, constant or has NaN or infinite voxels; give a volume.")
        if affine.shape != (4, 4) or not np.isfinite(affine).all() or abs(np.linalg.det(affine)) < 1e-12:
            raise InputError(f"{name}: the affine {affine.tolist()} is no invertible 4x4 matrix; give the volume's.")
    if min(array.shape) < LEAST_SIDE:
        raise InputError(f"{name}: shape {array.shape} has fewer than {LEAST_SIDE} voxels along an axis; too few to "
                         "deform, register the slices in 2D.")
    return array, affine


def _compared_by(similarity, cfg):
    """The config with another registration.similarity, or as it is for None."""
    if similarity is None:
        return cfg
    if similarity not in SIMILARITIES:
        raise InputError(f"similarity is {', '.join(SIMILARITIES)}, not {similarity!r}.")
    return {**cfg, "registration.similarity": similarity}


def read_mask(source, name, volume):
    """A mask on the grid of its volume, 0 or 1, float32, or None where there is none.

    source: path of a file, array, or None. name: of the volume. volume: (array, affine).
    Raises InputError where the mask is on another grid, or nowhere above 0.
    """
    if source is None:
        return None
    array, affine = volume
    if isinstance(source, str | Path):
        mask, mask_affine = read_label(source, array.ndim)
        word = str(source)
    else:
        mask, mask_affine, word = np.asarray(source), affine, f"the mask of {name}"
    require_same_grid(f"{word}: the mask", mask.shape, mask_affine, f"its volume {name}", array.shape, affine,
                      "resample it to the volume")
    if not (mask > 0).any():
        raise InputError(f"{word}: the mask is nowhere above 0, so nothing of {name} would count; mark what shall.")
    return (mask > 0).astype(np.float32)


def _read_channels(fixed_channels, moving_channels, names, fixed, moving, seen):
    """The further channels of both volumes: {"fixed": [array, ...], "moving": [array, ...]}, float32.

    names, fixed, moving: of `_read_pair`. seen: how many channels the network needs, the first included.
    Raises InputError for unequal numbers of them, for too few, and for another grid.
    """
    if len(fixed_channels) != len(moving_channels):
        raise InputError(f"{names[0]} has {len(fixed_channels)} further channels, {names[1]} {len(moving_channels)}; "
                         "give equally many, in the same order.")
    if 1 + len(fixed_channels) < seen:
        raise InputError(f"{names[0]}: the model was trained on volumes of {seen} channels (data.channels), and "
                         f"{1 + len(fixed_channels)} is given; add the others of both volumes, --fixed-channels and "
                         "--moving-channels, in the same order.")
    read = {"fixed": [], "moving": []}
    for side, name, sources, (array, affine) in (("fixed", names[0], fixed_channels, fixed),
                                                 ("moving", names[1], moving_channels, moving)):
        for number, source in enumerate(sources, 2):
            word = str(source) if isinstance(source, str | Path) else f"channel {number} of {name}"
            source = source if isinstance(source, str | Path) else (source, affine)
            channel, own_affine = _volume(source, word, array.ndim)
            require_same_grid(f"{word}: the channel", channel.shape, own_affine, f"its volume {name}", array.shape,
                              affine, "resample it to the volume")
            read[side].append(channel)
    return read


def _on_device(pair, device):
    """A dict of arrays (C, *spatial) or None as one of batches of one, (1, C, *spatial), on a device."""
    return {key: None if array is None else torch.from_numpy(array)[None].to(device) for key, array in pair.items()}


def _tensor(array):
    """A volume (*spatial) as a batch of one, (1, 1, *spatial)."""
    return torch.from_numpy(array)[None, None]


# ---------------------------------------------------------------------------------------------------------------------
# From the files to the working grid
# ---------------------------------------------------------------------------------------------------------------------

def _place(fixed, moving, masks, channels, affine, start, has_net, cfg, seconds):
    """Where the moving volume lies before the deformation, and both volumes on the working grid.

    fixed, moving: (array, affine). masks: dict of fixed_mask, moving_mask, each on its volume's grid, or None.
    channels: of `_read_channels`. affine, start: of `register`. seconds: gets what the affine alignment took.
    Returns: dict of start (a word), matrix (T, 4x4), overlap_percent, work_affine; pair (the moving volume under T) and
    by_header (as the headers place it), each a dict of moving and fixed, (C, *work), intensities 0 to 1, and
    moving_mask and fixed_mask, (1, *work) or None, all float32.
    """
    began = time.perf_counter()
    (fixed, fixed_affine), (moving, moving_affine) = fixed, moving
    fixed01 = rescale(fixed, *intensity_limits(fixed, cfg))
    moving01 = rescale(moving, *intensity_limits(moving, cfg))
    fixed_rest, moving_rest = ([rescale(channel, *intensity_limits(channel, cfg)) for channel in channels[side]]
                               for side in ("fixed", "moving"))
    brightest = np.max([fixed01, *fixed_rest[:cfg["data.channels"] - 1]], axis=0)
    work_fixed, work_affine = working_grid(fixed01, fixed_affine, cfg, has_net, brightest)
    if isinstance(start, str) and start == "auto":
        start = "header" if affine else better_start(fixed, fixed_affine, moving01, moving_affine, work_fixed,
                                                     work_affine, cfg["registration.similarity"])
    matrix = start_matrix(start, fixed.shape, fixed_affine, moving.shape, moving_affine)
    if affine:
        started_affine = np.linalg.inv(matrix) @ moving_affine
        finest = max(cfg["data.img_size"]) if has_net else None  # a network sees no more, and mends the rest
        matrix = matrix @ align_affine(fixed01, fixed_affine, moving01, started_affine, affine,
                                       cfg["registration.similarity"], **masks, finest=finest)
        seconds["affine"] = time.perf_counter() - began

    size = work_fixed.shape
    of_fixed = {"fixed": np.stack([work_fixed, *(_on_working_grid(channel, fixed_affine, work_affine, size)
                                                 for channel in fixed_rest)]),
                "fixed_mask": _mask_on_working_grid(masks["fixed_mask"], fixed_affine, work_affine, size)}
    pair, by_header = ({
        "moving": np.stack([_on_working_grid(channel, moving_affine, to_world, size)
                            for channel in (moving01, *moving_rest)]),
        "moving_mask": _mask_on_working_grid(masks["moving_mask"], moving_affine, to_world, size),
        **of_fixed} for to_world in (matrix @ work_affine, work_affine))
    return {"start": start if isinstance(start, str) else "matrix", "matrix": matrix,
            "overlap_percent": overlap_percent(fixed.shape, fixed_affine, moving.shape, moving_affine, matrix),
            "work_affine": work_affine, "pair": pair, "by_header": by_header}


def working_grid(image, affine, cfg, as_trained, brightest=None):
    """The fixed volume on the grid on which the field is found.

    image: (D, H, W) or (H, W) in 0..1. affine: 4x4. as_trained: place it as the training did (data.img_size,
    data.spacing_mm, data.crop_above), with more voxels along an axis that would not fit; else cover its field of view
    with voxels as large as its own, on average. brightest: of a volume of several channels the largest in each voxel,
    by which data.crop_above goes.
    Returns: array (*work) float32; its affine 4x4.
    """
    canonical, canonical_affine = to_canonical(image if brightest is None else brightest, affine)
    shape, dims = canonical.shape, image.ndim
    voxel_mm = np.linalg.norm(canonical_affine[:3, :dims], axis=0)
    if as_trained:
        crop, size, spacing_mm = cfg["data.crop_above"], np.array(cfg["data.img_size"]), cfg["data.spacing_mm"]
        box = foreground_box(canonical > crop) if crop else np.array([[0] * dims, shape])
        if spacing_mm:
            size = np.maximum(size, _covering_size((box[1] - box[0]) * voxel_mm, spacing_mm))
        return to_grid(image, affine, size, spacing_mm, box=box if crop else None)
    spacing_mm = float(np.exp(np.log(voxel_mm).mean()))
    count = float(np.prod(_covering_size(shape * voxel_mm, spacing_mm), dtype=np.float64))
    if count > MOST_VOXELS:
        spacing_mm *= (count / MOST_VOXELS) ** (1 / dims)
    least = max(LEAST_SIDE, 2 ** (cfg["registration.scales"] - 1))  # the similarity halves the grid so often
    return to_grid(image, affine, np.maximum(_covering_size(shape * voxel_mm, spacing_mm), least), spacing_mm)


def _covering_size(extent_mm, spacing_mm):
    """How many voxels cover an extent, per axis; a rounding error more does not need another one."""
    return np.ceil(np.asarray(extent_mm) / spacing_mm - 1e-3).astype(int)


def _on_working_grid(image, affine, work_to_world, size):
    """A volume on another grid, (*size) float32, smoothed first where it shrinks, as `to_grid` does.

    image: (D, H, W) or (H, W). affine: its 4x4. work_to_world: 4x4, voxels of the other grid to the volume's world.
    """
    dims = image.ndim
    change = rows(np.linalg.inv(affine) @ work_to_world, dims)
    steps = np.linalg.norm(change[:, :dims], axis=1)  # voxels of the image in a step of the grid
    sigma = np.where(steps > SMOOTH_ABOVE, SMOOTH_SIGMA * steps, 0)
    image = ndimage.gaussian_filter(image, sigma, mode="nearest") if sigma.any() else image
    return ndimage.affine_transform(image, change[:, :dims], change[:, dims], tuple(size), order=1,
                                    mode="grid-constant", cval=0)


def _mask_on_working_grid(mask, affine, work_to_world, size):
    """A mask on another grid, (1, *size), or None: 1 where an image there shows nothing of what it leaves out."""
    if mask is None:
        return None
    return (_on_working_grid(mask, affine, work_to_world, size) > 0.99).astype(np.float32)[None]


def start_matrix(start, shape, affine, moving_shape, moving_affine):
    """T before any alignment, 4x4: `start` is "header", "centre" of the fields of view, or the matrix itself.

    shape, affine, moving_shape, moving_affine: of the two files. Raises InputError for another start.
    """
    if isinstance(start, str) and start not in STARTS[1:]:
        raise InputError(f"start is {', '.join(STARTS)} or a 4x4 matrix, not {start!r}.")
    if not isinstance(start, str):
        matrix = np.array(start, np.float64)
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-12:
            raise InputError(f"start is {', '.join(STARTS)} or an invertible 4x4 matrix, not {matrix.tolist()}.")
        return matrix
    matrix = np.eye(4)
    if start == "centre":
        matrix[:3, 3] = _middle_mm(moving_shape, moving_affine) - _middle_mm(shape, affine)
    return matrix


def _middle_mm(shape, affine):
    """The world point (3,) in the middle of a field of view."""
    middle = (np.array(shape) - 1) / 2
    return (affine @ [*middle, *[0] * (3 - len(shape)), 1])[:3]


def better_start(fixed, fixed_affine, moving, moving_affine, work_fixed, work_affine, similarity="correlation"):
    """ "header", or "centre" where that makes the volumes clearly more alike, or by the headers they barely meet.

    They are compared where both fields of view are: two crops of one volume have other centres and belong as their
    headers say.
    fixed: (*fixed), of which only the shape counts. moving: (*moving) in 0..1. work_fixed: the fixed volume on the
    working grid. Affines: 4x4. similarity: of `register`.
    """
    compare = local_correlation if similarity == "correlation" else mapped_correlation
    scores = {}
    for start in STARTS[1:]:
        matrix = start_matrix(start, fixed.shape, fixed_affine, moving.shape, moving_affine)
        if overlap_percent(fixed.shape, fixed_affine, moving.shape, moving_affine, matrix) < FAR_APART:
            scores[start] = 0.0
            continue
        to_world = matrix @ work_affine
        work_moving = _tensor(_on_working_grid(moving, moving_affine, to_world, work_fixed.shape))
        inside = _tensor(_on_working_grid(np.ones_like(moving), moving_affine, to_world, work_fixed.shape))
        work_moving = work_moving / inside.clamp(min=1e-3)
        scores[start] = float(compare(work_moving, _tensor(work_fixed), WINDOW, weight=inside))
    return "centre" if scores["centre"] > scores["header"] + BETTER else "header"


def overlap_percent(shape, affine, moving_shape, moving_affine, matrix):
    """How much of the fixed field of view lies within the moving one under T, in percent.

    shape, affine: of the fixed volume. matrix: T, 4x4. Counted on at most 32 points along each axis.
    """
    dims = len(shape)
    axes = [np.linspace(0, n - 1, min(n, 32)) for n in shape]
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(dims, -1)
    change = rows(np.linalg.inv(moving_affine) @ matrix @ affine, dims)
    moving_points = change[:, :dims] @ points + change[:, dims:]
    inside = (moving_points > -0.5) & (moving_points < np.reshape(moving_shape, (dims, 1)) - 0.5)
    return 100.0 * float(inside.all(0).mean())


def rows(matrix, dims):
    """Of a 4x4 the rows and columns of `dims` axes, and the shift: (dims, dims + 1) float64."""
    matrix = np.asarray(matrix, np.float64)
    return np.hstack([matrix[:dims, :dims], matrix[:dims, 3:]])


def _warnings(names, placed, fixed_affine, dims):
    """What the user should know before believing the result, a list of sentences; each is given as a warning too.

    placed: from `_place`. fixed_affine: 4x4, None where a model sets the grid on which the field ends up.
    """
    sentences = []
    if placed["overlap_percent"] < FAR_APART:
        sentences.append(f"{names[1]} covers {placed['overlap_percent']:.0f} % of the field of view of {names[0]}: "
                         "bring them together by --affine or --start centre.")
    if fixed_affine is not None:
        own, used = (abs(np.linalg.det(affine[:dims, :dims])) ** (1 / dims)
                     for affine in (fixed_affine, placed["work_affine"]))
        if used > 1.001 * own:
            sentences.append(f"{names[0]} has more voxels than memory allows for: its field is looked for on a grid of "
                             f"{used:.3g} mm.")
    for sentence in sentences:
        warnings.warn(sentence, stacklevel=3)
    return sentences


# ---------------------------------------------------------------------------------------------------------------------
# The field, and its way back to the files' grids
# ---------------------------------------------------------------------------------------------------------------------

def _ask(net, pair, cfg, seconds):
    """u, (1, N, *work) in voxels, as the network finds it, and the structures that it segments.

    pair: dict of moving, fixed, (1, C, *work), of which it sees the channels that it was trained with. seconds: gets
    what it took.
    Returns: u; shares of the structures in moving and fixed, (2, K, *work), None without model.structures.
    """
    began, seen = time.perf_counter(), cfg["data.channels"]
    with torch.no_grad():
        moving, fixed = segmented(net, pair["moving"][:, :seen], pair["fixed"][:, :seen], cfg)
        field = best_field(net, moving, fixed, cfg)
    synchronize(field.device)
    seconds["network"] = time.perf_counter() - began
    return field, torch.cat([moving, fixed])[:, seen:] if cfg["model.structures"] else None


def _on_own_grid(work_field, structures, placed, fixed, moving, masks, channels, cfg):
    """The network's answer and the pair on the working grid that they have without a network.

    So refinement sees voxels as small as those of the files, whatever grid the network was trained on.
    work_field: (1, N, *work) in voxels of the network's grid. structures: (2, K, *work) or None. placed: from `_place`,
    for that grid. Others: as there.
    Returns: what `_place` does for the other grid, with the same T; the field there, in its voxels, and the structures,
    on their device.
    """
    own = _place(fixed, moving, masks, channels, False, placed["matrix"], False, cfg, {})
    change = np.linalg.inv(placed["work_affine"]) @ own["work_affine"]
    size = own["pair"]["fixed"].shape[1:]
    field = total_field(work_field.float().cpu(), change, np.linalg.inv(change), size)
    if structures is not None:
        structures = resample(structures, change, size)
    return {**own, "start": placed["start"]}, torch.from_numpy(field)[None].to(work_field.device), structures


def _refined(pair, field, structures, steps, cfg, seconds, progress):
    """u, (1, N, *work) float32 on the CPU, refined where steps are asked for.

    pair: dict of moving, fixed, (1, C, *work), and moving_mask, fixed_mask, (1, 1, *work) or None. field: (1, N, *work)
    in voxels to begin from, or None. structures: (2, K, *work) or None. seconds: gets what it took.
    """
    moving, fixed = pair["moving"], pair["fixed"]
    if steps:
        began = time.perf_counter()
        field = optimise(moving, fixed, field, steps, cfg, progress, pair["moving_mask"], pair["fixed_mask"],
                         structures)
        synchronize(fixed.device)
        seconds["refine"] = time.perf_counter() - began
    if field is None:
        field = torch.zeros(1, fixed.dim() - 2, *fixed.shape[2:], device=fixed.device)
    if not bool(torch.isfinite(field).all()):
        raise InputError("The field has NaN or infinite numbers; take another checkpoint, or try --set run.amp=off.")
    return field.cpu()


def _on_fixed_grid(work_field, placed, fixed, moving):
    """The whole way from the fixed to the moving volume as "field", and the moving volume as it shows it, "warped".

    placed: from `_place`. fixed, moving: (array, affine).
    """
    fixed, fixed_affine = fixed
    work_affine = placed["work_affine"]
    field = total_field(work_field, np.linalg.inv(work_affine) @ fixed_affine,
                        np.linalg.inv(fixed_affine) @ placed["matrix"] @ work_affine, fixed.shape)
    return {"field": field, "warped": apply_field(*moving, field, fixed_affine)}


def total_field(work_field, before, after, shape):
    """A field u of the working grid as one of a file's grid: x -> after(y + u(y)) - x with y = before(x).

    work_field: u, (1, N, *work) in voxels of the working grid; outside the grid that of its border. before, after: 4x4,
    voxels of the file's grid to those of the working grid, and from there to the file's. shape: of the file's grid.
    Returns: (N, *shape) float32 in voxels of the file's grid.
    """
    return _joined(resample(work_field, before, shape, padding="border"), before, after)


def inverse_field(work_field, before, after, shape, rounds=50):
    """As `total_field`, of the inverse of u: x -> after(y + v(y)) - x with v(y) = -u(y + v(y)) and y = before(x).

    Fixed-point iteration (Chen et al., Medical Physics 2008), in the points of the file's grid, so that v is not
    interpolated, and with half steps, which converge wherever u does not fold; whole steps need derivatives below one.
    Returns: (N, *shape) float32; lengths of v + u(y + v) that are left, (*shape) in voxels of the working grid.
    """
    v = torch.zeros(1, len(shape), *shape)
    y = across(v, before)
    for _ in range(rounds):
        rest = v + warp(work_field, y + v, padding="border")
        if float(rest.square().sum(1).max()) < 1e-6:
            break
        v = v - 0.5 * rest
    rest = v + warp(work_field, y + v, padding="border")
    return _joined(v, before, after), rest.square().sum(1).sqrt()[0].numpy()


def _joined(sampled, before, after):
    """x -> after(before(x) + sampled(x)) - x, (N, *shape). sampled: (1, N, *shape) in voxels of the working grid.

    The affine part stands on its own, so that it is exactly zero where there is none.
    """
    dims = sampled.shape[1]
    linear = torch.from_numpy(np.asarray(after, np.float64)[:dims, :dims].astype(np.float32))
    turned = (linear @ sampled.flatten(2)).view(sampled.shape)
    return (across(torch.zeros_like(sampled), np.round(after @ before, 12)) + turned)[0].numpy()


def _inverse(work_field, placed, moving, name, sentences):
    """`inverse` of `register` and its errors. Adds to the sentences where it is not an inverse everywhere.

    placed: from `_place`. moving: (array, affine). name: of the moving volume.
    """
    (moving, moving_affine), work_affine = moving, placed["work_affine"]
    field, rest = inverse_field(work_field, np.linalg.inv(placed["matrix"] @ work_affine) @ moving_affine,
                                np.linalg.inv(moving_affine) @ work_affine, moving.shape)
    rest_mm = rest * np.linalg.norm(work_affine[:3, 0])
    missed_percent = 100.0 * float((rest > NOT_INVERTED).mean())
    if missed_percent:
        sentences.append(f"the inverse field did not converge: {missed_percent:.2g} % of the points of {name} that go "
                         f"there and back miss by up to {rest_mm.max():.2g} mm, mostly where the field folds; do not "
                         "use it there.")
        warnings.warn(sentences[-1], stacklevel=3)
    return {"inverse": field, "inverse_error_mm": float(rest_mm.mean()), "inverse_error_max_mm": float(rest_mm.max())}


def _segmentations(structures, placed, fixed, moving, labels):
    """segmented_fixed and segmented_moving of `register`.

    structures: shares in moving and fixed, (2, K, *work). placed: from `_place`. fixed, moving: (array, affine).
    labels: of the structures, K ints.
    """
    found, shares = {}, structures.float().cpu()
    sides = (("moving", moving, placed["matrix"] @ placed["work_affine"]), ("fixed", fixed, placed["work_affine"]))
    for (side, (image, affine), to_world), volume in zip(sides, shares.split(1)):
        carried = resample(volume, np.linalg.inv(to_world) @ affine, image.shape)
        found[f"segmented_{side}"] = label_map(carried, labels)[0].numpy().astype(np.uint16)
    return found


def regularity_scores(field):
    """folding_percent and sdlogj of a field (N, *spatial) in voxels; sdlogj is None where an axis has fewer than 5."""
    tensor = torch.from_numpy(field)[None]
    return {"folding_percent": folding_percent(tensor), "sdlogj": sdlogj(tensor) if min(field.shape[1:]) > 4 else None}
