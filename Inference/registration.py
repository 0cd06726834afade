"""Register two volumes of any size, spacing and orientation: onto the network's grid, and back as one field.

Three grids meet here, each with a 4x4 affine, voxel to world in mm, RAS: A_fixed and A_moving of the files, and
A_work of the working grid, an isotropic canonical grid on the fixed volume. T (4x4) leads from a point of the fixed
volume's world to the same point of the moving one's: the identity where the headers agree, else an affine alignment.
The moving volume is sampled on the working grid through A_moving^-1 T A_work, and network and refinement find a field u
there. Affine and deformation then become one field on the fixed volume's own grid,

    d(x) = A_fixed^-1 T A_work (y + u(y)) - x   with y = A_work^-1 A_fixed x, in voxels,

by which the moving file is interpolated once: warped(x) = moving(A_moving^-1 A_fixed (x + d(x))).
"""
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from Dataloader.grids import SMOOTH_ABOVE, SMOOTH_SIGMA, foreground_box, rescale, to_canonical, to_grid
from Dataloader.nifti import open_nifti, read_volume
from Dataloader.prepare import intensity_limits
from Diffusion.fields import across, warp
from Diffusion.losses import mslncc
from Diffusion.metrics import folding_percent, sdlogj
from Diffusion.validation import best_field
from Inference.affine import align_affine, weighted_correlation
from Inference.load_model import default_config, load_model
from Inference.refine import STEPS
from Inference.refine import refine as optimise
from Runtime.device import synchronize
from Runtime.errors import InputError

LEAST_SIDE = 4  # voxels: fewer along an axis have no derivatives worth the name
MOST_VOXELS = 256 ** 3  # of a working grid that no network asks for
STARTS = ("auto", "header", "centre")
BETTER = 0.02  # of similarity that the centres need over the headers, which usually know
AFFINES = ("rigid", "affine")
NOT_INVERTED = 0.1  # voxels of the working grid that a point there and back may miss by
FAR_APART = 50.0  # percent of the fixed field of view that the moving one has to cover before we say nothing


def register(fixed, moving, model=None, affine=False, refine=0, start="auto", device="cpu", inverse=False,
             config=None, progress=False):
    """Find the field that brings `moving` onto `fixed`.

    fixed, moving: path of a NIfTI file, or (array, affine 4x4), array (D, H, W) or (H, W) with any intensities.
    model: path for `load_model`, what it returned (net, config), or None. affine: False, "rigid", or True or "affine":
    align by that first. refine: steps of optimisation for this pair, True for the recommended number,
    0 for none. start: "header" (as the headers place
    the volumes), "centre" (of the fields of view on each other), "auto" (the more similar one of the two; an affine
    alignment has starts of its own), or a 4x4 matrix, fixed world to moving world in mm. inverse: find the inverse too.
    config: flat dict of config keys where there is no model; default Config/config_om.yaml. progress: show a bar.
    Returns: dict of
      field (N, *fixed) float32, displacement in voxels of the fixed grid, and inverse (N, *moving) of the moving grid;
      warped (*fixed) float32, intensities of the moving file; fixed, moving: (array, affine) as they were read;
      start: what was taken; matrix: T, 4x4; overlap_percent: how much of the fixed field of view the moving one covers
      under it;
      similarity_before (as the headers place the volumes), similarity: multi-scale local correlation on the working
      grid, 1 is perfect; folding_percent, sdlogj: of the field; inverse_error_mm, inverse_error_max_mm: how far, on
      average and at most, a point of the moving volume that went there and back is from where it was;
      seconds: dict of affine, network, refine and total, without reading files, loading the model and scoring;
      warnings: sentences about what may be wrong, such as fields of view that barely overlap; also given as warnings.
    Raises InputError for what cannot be read, is not a volume, or does not fit together.
    """
    affine, refine = "affine" if affine is True else affine, STEPS if refine is True else refine
    if affine and affine not in AFFINES:
        raise InputError(f"affine is {' or '.join(AFFINES)}, not {affine!r}.")
    net, cfg, names, fixed, moving = _read_pair(fixed, moving, model, config, device)
    began, seconds = time.perf_counter(), dict.fromkeys(("affine", "network", "refine"), 0.0)
    pair = _place(fixed, moving, affine, start, net is not None, cfg, seconds)
    said = _warnings(names, pair["overlap_percent"], pair["work_affine"], None if net else fixed[1], cfg["model.dims"])
    seen, work = (torch.from_numpy(part)[None, None].to(device) for part in (pair["seen"], pair["work"]))
    u = _find_field(net, seen, work, refine, cfg, seconds, progress)
    found = _on_fixed_grid(u, pair, fixed, moving)
    if inverse:
        found.update(_inverse(u, pair["matrix"], pair["work_affine"], moving[0].shape, moving[1], names[1], said))
    seconds["total"] = time.perf_counter() - began
    by_header = torch.from_numpy(pair["by_header"])[None, None].to(device)
    return {**found, "fixed": fixed, "moving": moving, "start": pair["start"], "matrix": pair["matrix"],
            "overlap_percent": pair["overlap_percent"], "similarity_before": _similarity(by_header, work, cfg),
            "similarity": _similarity(warp(seen, u.to(device)), work, cfg), **regularity_scores(found["field"]),
            "seconds": seconds, "warnings": said}


def _read_pair(fixed, moving, model, config, device):
    """net or None, cfg, the names of both volumes, and each as (array, affine): the inputs of `register`, checked."""
    names = [str(given) if isinstance(given, str | Path) else word
             for given, word in ((fixed, "fixed"), (moving, "moving"))]
    dims = _dims(fixed, moving, names)
    net, cfg = _settings(model, config, dims, device)
    if cfg["model.dims"] != dims:
        raise InputError(f"{names[0]} and {names[1]} are {dims}D, but the model, or --dims, is {cfg['model.dims']}D; "
                         "give what fits.")
    return net, cfg, names, _volume(fixed, names[0], dims), _volume(moving, names[1], dims)


def _place(fixed, moving, affine, start, has_net, cfg, seconds):
    """Where the moving volume lies before the deformation, and both volumes on the working grid.

    fixed, moving: (array, affine). affine, start: of `register`. seconds: gets what the affine alignment took.
    Returns: dict of start (a word), matrix (T, 4x4), overlap_percent, work_affine; work (the fixed volume), seen (the
    moving one under T) and by_header (as the headers place it), each (*work) float32, intensities 0 to 1.
    """
    (fixed, fixed_affine), (moving, moving_affine), began = fixed, moving, time.perf_counter()
    fixed01, moving01 = (rescale(array, *intensity_limits(array, cfg)) for array in (fixed, moving))
    work, work_affine = working_grid(fixed01, fixed_affine, cfg, has_net)
    if isinstance(start, str) and start == "auto":
        start = "header" if affine else better_start(fixed, fixed_affine, moving01, moving_affine, work, work_affine)
    matrix = start_matrix(start, fixed.shape, fixed_affine, moving.shape, moving_affine)
    if affine:
        matrix = _aligned(fixed01, fixed_affine, moving01, moving_affine, matrix, affine)
        seconds["affine"] = time.perf_counter() - began
    return {"start": start if isinstance(start, str) else "matrix", "matrix": matrix, "work": work,
            "work_affine": work_affine,
            "overlap_percent": overlap_percent(fixed.shape, fixed_affine, moving.shape, moving_affine, matrix),
            "seen": _on_working_grid(moving01, moving_affine, matrix @ work_affine, work.shape),
            "by_header": _on_working_grid(moving01, moving_affine, work_affine, work.shape)}


def _on_fixed_grid(u, pair, fixed, moving):
    """The whole way from the fixed to the moving volume as "field", and the moving volume as it shows it, "warped"."""
    (fixed, fixed_affine), work_affine = fixed, pair["work_affine"]
    field = total_field(u, np.linalg.inv(work_affine) @ fixed_affine,
                        np.linalg.inv(fixed_affine) @ pair["matrix"] @ work_affine, fixed.shape)
    return {"field": field, "warped": apply_field(*moving, field, fixed_affine)}


def apply_field(image, affine, field, fixed_affine, order=1):
    """A moving image or label map as a field shows it, on the fixed grid, with one interpolation.

    image: (D, H, W) or (H, W) on its own grid. affine: its 4x4. field: (N, *fixed) in voxels of the fixed grid.
    fixed_affine: 4x4. order: 1 for images (float32 out), 0 for labels (dtype kept).
    Returns: (*fixed); outside the image its least intensity, for labels 0.
    """
    change = np.linalg.inv(affine) @ fixed_affine
    there = across(torch.from_numpy(np.ascontiguousarray(field, dtype=np.float32))[None], change)
    lowest = np.float32(image.min()) if order else 0
    shown = torch.from_numpy(np.asarray(image, np.float32) - lowest)[None, None]
    warped = warp(shown, there, mode="bilinear" if order else "nearest")[0, 0].numpy() + lowest
    return warped if order else warped.astype(image.dtype)


def start_matrix(start, shape, affine, moving_shape, moving_affine):
    """T before any alignment, 4x4: `start` is "header", "centre" of the fields of view, or the matrix itself."""
    if isinstance(start, str) and start not in STARTS[1:]:
        raise InputError(f"start is {', '.join(STARTS)} or a 4x4 matrix, not {start!r}.")
    if not isinstance(start, str):
        matrix = np.array(start, np.float64)
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-12:
            raise InputError(f"start is {', '.join(STARTS)} or an invertible 4x4 matrix, not {matrix.tolist()}.")
        return matrix
    matrix = np.eye(4)
    if start == "centre":
        middles = [grid @ [*(np.subtract(size, 1) / 2), *[0] * (3 - len(size)), 1]
                   for size, grid in ((shape, affine), (moving_shape, moving_affine))]
        matrix[:3, 3] = (middles[1] - middles[0])[:3]
    return matrix


def better_start(fixed, fixed_affine, moving, moving_affine, work, work_affine):
    """ "header", or "centre" where that makes the volumes clearly more alike, or by the headers they barely meet.

    moving: in 0..1. work: the fixed volume on the working grid. Compared where both fields of view are: two crops of
    one volume have other centres and belong as their headers say.
    """
    similarity = {}
    for start in STARTS[1:]:
        matrix = start_matrix(start, fixed.shape, fixed_affine, moving.shape, moving_affine)
        if overlap_percent(fixed.shape, fixed_affine, moving.shape, moving_affine, matrix) < FAR_APART:
            similarity[start] = 0.0
            continue
        seen, inside = (torch.from_numpy(_on_working_grid(part, moving_affine, matrix @ work_affine, work.shape))
                        for part in (moving, np.ones_like(moving)))
        images = (part[None, None] for part in (seen / inside.clamp(min=1e-3), torch.from_numpy(work), inside))
        similarity[start] = float(weighted_correlation(*images))
    return "centre" if similarity["centre"] > similarity["header"] + BETTER else "header"


def overlap_percent(shape, affine, moving_shape, moving_affine, matrix):
    """How much of the fixed field of view lies within the moving one under T, in percent."""
    dims = len(shape)
    axes = [np.linspace(0, n - 1, min(n, 32)) for n in shape]
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(dims, -1)
    change = rows(np.linalg.inv(moving_affine) @ matrix @ affine, dims)
    there = change[:, :dims] @ points + change[:, dims:]
    inside = (there > -0.5) & (there < np.reshape(moving_shape, (dims, 1)) - 0.5)
    return 100.0 * float(inside.all(0).mean())


def working_grid(image, affine, cfg, as_trained):
    """The fixed volume on the grid where the field is looked for.

    image: (D, H, W) or (H, W) in 0..1. as_trained: place it as the training did (data.img_size, data.spacing_mm,
    data.crop_above), with more voxels along an axis that would not fit; else cover its field of view with voxels as
    large as its own, on average.
    Returns: array; its affine 4x4.
    """
    canonical, canonical_affine = to_canonical(image, affine)
    shape, dims = canonical.shape, image.ndim
    voxel_mm = np.linalg.norm(canonical_affine[:3, :dims], axis=0)
    if as_trained:
        crop, size, spacing_mm = cfg["data.crop_above"], np.array(cfg["data.img_size"]), cfg["data.spacing_mm"]
        box = foreground_box(canonical > crop) if crop else np.array([[0] * dims, shape])
        if spacing_mm:
            size = np.maximum(size, _voxels((box[1] - box[0]) * voxel_mm, spacing_mm))
        return to_grid(image, affine, size, spacing_mm, box=box if crop else None)
    spacing_mm = float(np.exp(np.log(voxel_mm).mean()))
    count = float(np.prod(_voxels(shape * voxel_mm, spacing_mm), dtype=np.float64))
    if count > MOST_VOXELS:
        spacing_mm *= (count / MOST_VOXELS) ** (1 / dims)
    least = max(LEAST_SIDE, 2 ** (cfg["registration.scales"] - 1))  # the similarity halves the grid so often
    return to_grid(image, affine, np.maximum(_voxels(shape * voxel_mm, spacing_mm), least), spacing_mm)


def total_field(u, before, after, shape):
    """A field of the working grid as one of a file's grid: x -> after(y + u(y)) - x with y = before(x).

    u: (1, N, *work) in voxels of the working grid; outside it that of its border. before, after: 4x4, voxels of the
    file's grid to those of the working grid, and from there to the file's. shape: of the file's grid.
    Returns: (N, *shape) float32 in voxels of the file's grid.
    """
    still = torch.zeros(1, len(shape), *shape)
    moved = warp(u, across(still, before), padding="border")
    return _joined(moved, before, after, still)


def inverse_field(u, before, after, shape, rounds=50):
    """As `total_field`, of the inverse of u: x -> after(y + v(y)) - x with v(y) = -u(y + v(y)) and y = before(x).

    Fixed-point iteration, in the points of the file's grid, so that v is not interpolated, and with half steps, which
    converge wherever u does not fold; whole ones need derivatives below one.
    Returns: (N, *shape) float32; lengths of v + u(y + v) that are left, (*shape) in voxels of the working grid.
    """
    still = torch.zeros(1, len(shape), *shape)
    there, v = across(still, before), still
    for _ in range(rounds):
        rest = v + warp(u, there + v, padding="border")
        if float(rest.square().sum(1).max()) < 1e-6:
            break
        v = v - 0.5 * rest
    rest = v + warp(u, there + v, padding="border")
    return _joined(v, before, after, still), rest.square().sum(1).sqrt()[0].numpy()


def regularity_scores(field):
    """folding_percent and sdlogj of a field (N, *spatial) in voxels; sdlogj is None where fewer than 5 voxels are."""
    tensor = torch.from_numpy(field)[None]
    return {"folding_percent": folding_percent(tensor), "sdlogj": sdlogj(tensor) if min(field.shape[1:]) > 4 else None}


def rows(matrix, dims):
    """Of a 4x4 the rows and columns of `dims` axes, and the shift: (dims, dims + 1) float64."""
    matrix = np.asarray(matrix, np.float64)
    return np.hstack([matrix[:dims, :dims], matrix[:dims, 3:]])


def _joined(moved, before, after, still):
    """after(before(x) + moved) - x. The affine part on its own, so that it is exactly zero where there is none."""
    dims = moved.shape[1]
    linear = torch.from_numpy(np.asarray(after, np.float64)[:dims, :dims].astype(np.float32))
    rest = (linear @ moved.flatten(2)).view(still.shape)
    return (across(still, np.round(after @ before, 12)) + rest)[0].numpy()


def _settings(model, config, dims, device):
    """(net or None, config) of whatever `register` was given as its model."""
    if isinstance(model, str | Path):
        return load_model(model, device)
    if model is not None:
        net, cfg = model
        return net.to(device), cfg
    return None, default_config(dims) if config is None else config


def _dims(fixed, moving, names):
    """The number of axes of both volumes: 2 or 3."""
    found = []
    for source, name in zip((fixed, moving), names):
        shape = open_nifti(source).shape if isinstance(source, str | Path) else np.shape(source[0])
        while isinstance(source, str | Path) and len(shape) > 2 and shape[-1] == 1:
            shape = shape[:-1]
        found.append(len(shape))
        if found[-1] not in (2, 3):
            raise InputError(f"{name}: shape {tuple(shape)} is neither 2D nor 3D; split it into one file per volume.")
    if found[0] != found[1]:
        raise InputError(f"{names[0]} is {found[0]}D and {names[1]} is {found[1]}D; fixed and moving need the same "
                         "number of axes.")
    return found[0]


def _volume(source, name, dims):
    """(array float32, affine) of a path or of (array, affine), checked alike."""
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


def _warnings(names, covered, work_affine, fixed_affine, dims):
    """What the user should know before believing the result. fixed_affine: None where a model sets the grid."""
    said = []
    if covered < FAR_APART:
        said.append(f"{names[1]} covers {covered:.0f} % of the field of view of {names[0]}: bring them together by "
                    "--affine or --start centre.")
    if fixed_affine is not None:
        own, used = (abs(np.linalg.det(grid[:dims, :dims])) ** (1 / dims) for grid in (fixed_affine, work_affine))
        if used > 1.001 * own:
            said.append(f"{names[0]} has more voxels than memory allows for: its field is looked for on a grid of "
                        f"{used:.3g} mm.")
    for sentence in said:
        warnings.warn(sentence, stacklevel=3)
    return said


def _inverse(u, matrix, work_affine, moving_shape, moving_affine, name, said):
    """`inverse` of `register`, its errors, and among the sentences `said` one where it is not an inverse everywhere."""
    field, rest = inverse_field(u, np.linalg.inv(matrix @ work_affine) @ moving_affine,
                                np.linalg.inv(moving_affine) @ work_affine, moving_shape)
    rest_mm = rest * np.linalg.norm(work_affine[:3, 0])
    wrong = 100.0 * float((rest > NOT_INVERTED).mean())
    if wrong:
        said.append(f"the inverse field did not converge: {wrong:.2g} % of the points of {name} that go there and back "
                    f"miss by up to {rest_mm.max():.2g} mm, mostly where the field folds; do not use it there.")
        warnings.warn(said[-1], stacklevel=3)
    return {"inverse": field, "inverse_error_mm": float(rest_mm.mean()), "inverse_error_max_mm": float(rest_mm.max())}


def _aligned(fixed, fixed_affine, moving, moving_affine, matrix, kind):
    """T by an affine alignment that begins at `matrix`."""
    return matrix @ align_affine(fixed, fixed_affine, moving, np.linalg.inv(matrix) @ moving_affine, kind)


def _on_working_grid(image, affine, work_to_world, size):
    """A volume on another grid, (D, H, W) or (H, W) float32, smoothed first where it shrinks, as `to_grid` does."""
    dims = image.ndim
    change = rows(np.linalg.inv(affine) @ work_to_world, dims)
    steps = np.linalg.norm(change[:, :dims], axis=1)  # voxels of the image in a step of the grid
    sigma = np.where(steps > SMOOTH_ABOVE, SMOOTH_SIGMA * steps, 0)
    image = ndimage.gaussian_filter(image, sigma, mode="nearest") if sigma.any() else image
    return ndimage.affine_transform(image, change[:, :dims], change[:, dims], tuple(size), order=1,
                                    mode="grid-constant", cval=0)


def _voxels(extent_mm, spacing_mm):
    """How many voxels cover an extent, per axis; a rounding error more does not need another one."""
    return np.ceil(np.asarray(extent_mm) / spacing_mm - 1e-3).astype(int)


def _find_field(net, moving, fixed, refine, cfg, seconds, progress):
    """u, (1, N, *work) float32 on the CPU, by network and refinement."""
    field, device = None, fixed.device
    if net is not None:
        began = time.perf_counter()
        with torch.no_grad():
            field = best_field(net, moving, fixed, cfg)
        synchronize(device)
        seconds["network"] = time.perf_counter() - began
    if refine:
        began = time.perf_counter()
        field = optimise(moving, fixed, field, refine, cfg, progress)[0].detach()
        synchronize(device)
        seconds["refine"] = time.perf_counter() - began
    if field is None:
        field = torch.zeros(1, fixed.dim() - 2, *fixed.shape[2:], device=device)
    if not bool(torch.isfinite(field).all()):
        raise InputError("The field has NaN or infinite numbers; take another checkpoint, or try --set run.amp=off.")
    return field.cpu()


def _similarity(image, fixed, cfg):
    return float(mslncc(image, fixed, cfg["registration.window"], cfg["registration.scales"],
                        cfg["registration.squared"]))
