"""Register two volumes of any size, spacing and orientation: onto the network's grid, and back as one field.

Three grids meet here, each with a 4x4 affine, voxel to world in mm, RAS: A_fixed and A_moving of the files, and
A_work of the working grid, an isotropic canonical grid on the fixed volume. T (4x4) maps world points of the fixed
volume to the moving one: the identity if the headers agree, else an affine alignment. The moving volume is sampled on
the working grid through A_moving^-1 T A_work, and network and refinement find a field u there. Affine map and
deformation are then combined into one field on the fixed volume's own grid,

    d(x) = A_fixed^-1 T A_work (y + u(y)) - x   with y = A_work^-1 A_fixed x, in voxels,

by which the moving file is interpolated once: warped(x) = moving(A_moving^-1 A_fixed (x + d(x))).

With a network the working grid is its training grid; with refine.grid "own" its field is then refined on a second grid,
with voxels as large as those of the fixed volume. Without a network the second grid is the only one, and has larger
voxels if there would be more than MOST_VOXELS; "own" then refines the field further, slab by slab.
"""
import contextlib
import dataclasses
import math
import numbers
import time
import warnings

import numpy as np
import torch
from scipy import ndimage

from Dataloader import grids
from Dataloader.grids import (
    SMOOTH_ABOVE,
    SMOOTH_SIGMA,
    air_for_filler,
    grid_transform,
    is_singular,
    of_slab,
    same_grid,
    to_canonical,
    to_grid,
)
from Dataloader.nifti import fitted_affine, one_plane
from Dataloader.prepare import focus, scaled
from Dataloader.transforms import is_field, read_any_field, read_matrix
from Dataloader.volume import (
    Volume,
    further_sources,
    is_path,
    read_further,
    read_mask,
    read_source,
    shape_of,
    unpadded_box,
    without_filler,
    without_padding,
)
from Diffusion.fields import compose, resample, then_affine, warp
from Diffusion.losses import local_correlation, mapped_correlation
from Diffusion.predict import best_field, label_map, segmented, segmented_labels
from Inference.affine import FOREGROUND, ONE_SIGN, WINDOW, align_affine
from Inference.blank import BEYOND, SHOWN, blank_corners, is_cut_off, outlined, outlined_side, without
from Inference.choices import AFFINES, SIMILARITIES, STARTS, STEPS, STEPS_CONTINUED
from Inference.labels import apply_field
from Inference.load_model import changed_config, loaded
from Inference.refine import correlation_under, pair_at_level
from Inference.refine import refine as optimise
from Inference.scores import pair_scores, whole_with_rim
from Runtime import memory
from Runtime.device import own_settings, pick_device, synchronize
from Runtime.errors import InputError, MemoryShort

LEAST_SIDE = 4  # voxels along an axis; fewer give no useful derivatives
BETTER = 0.02  # similarity by which the centres must beat the headers, which are usually right
# Host memory in bytes: for the program; for each voxel read (an image and its mask; a label map and what smooths it);
# for each voxel of the fixed grid (field and warped image, and both again, read back for the picture); for each voxel
# of the moving grid, for the inverse; and for each voxel processed at once, AT_ONCE for each channel. Measured with 1
# to 157 million voxels (notebook of 2026-11 and 2026-12).
PROGRAM, READ, LABELLED, WRITTEN, INVERSE = 0.5 * 2 ** 30, 8, 4, 42, 12
AT_ONCE, AT_ONCE_MOVING, AT_ONCE_INVERSE = 240, 20, 50
FINE = 52  # for each voxel of the fixed grid, while it is refined slab by slab
NOT_INVERTED = 0.1  # voxels of the working grid by which a point may miss its start after going there and back
SHORTER = {0.2: 100, 0.1: 200}  # steps of the inverse where half ones have not converged, and how many of each
MOST_SLOWLY = 2 ** 18  # points of a slab for which those are taken: with more, the field is wrong as a whole
FAR_APART = 50.0  # percent of the fixed field of view; if the moving one covers less, a warning says so
# A moving volume that covers less of the fixed field of view, and is cut off by its own (`is_cut_off`), is compared
# only where it was scanned: its border is no anatomy.
WHOLE_PERCENT = 95.0


@dataclasses.dataclass(eq=False, repr=False)
class Result:
    """What `register` returns. The comments name the options without which a field is None or empty."""

    fixed: Volume
    moving: Volume
    field: np.ndarray  # (N, *fixed) float32, displacement in voxels of the fixed grid
    warped: np.ndarray  # (*fixed) float32, intensities of the moving volume
    warped_channels: list[np.ndarray]  # of the further channels of the moving volume
    start: str  # header, centre, matrix or field: the first placement of the moving volume
    matrix: np.ndarray  # T, 4x4, fixed to moving world in mm: start and affine alignment; after a field its affine part
    overlap_percent: float  # of the fixed field of view, covered by the moving one under T or the field of the start
    verdict: str  # ok, doubtful or failed, see Inference/verdict.py
    reason: str  # for the verdict, in one sentence; "" where it is ok
    similarity_before: float  # as the headers place the volumes; on the fixed grid, 1 is perfect, see `image_scores`
    similarity: float
    similarity_attainable: float | None  # at most about this much with the noise of both volumes, see `signal_share`;
    # None if they are no more alike than chance makes them
    covered_percent: float  # of the body of the fixed volume, covered by that of the moving one
    body_overlap: float  # Dice of both bodies
    folding_percent: float
    folding_any_percent: float  # by one-sided determinants, see `folding_scores`; and within the fixed body
    folding_body_percent: float
    ndv_percent: float
    stretched_percent: float  # of the fixed body, where the deformation changes volume implausibly
    sdlogj: float | None  # None with fewer than 5 voxels along an axis
    scale_least: float  # of the matrix, see `affine_scores`
    scale_most: float
    turn_degrees: float
    shear_degrees: float
    mirrors: bool
    segmentations: list[str]  # which of "fixed" and "moving" look like label maps
    compared_by: str  # correlation, mapped or mind: registration.similarity, or what "auto" chose
    seconds: dict[str, float]  # affine, network, refine, total, without reading, loading the model and scoring
    warnings: list[str]  # sentences about what may be wrong, such as little overlap; also issued as warnings
    affine_similarity: float | None = None  # how far to trust the affine alignment, see `align_affine`
    affine_similarity_before: float | None = None
    affine_runner_up: float | None = None
    one_sign: float | None = None
    mirror_gain: float | None = None
    smoothing: float | None = None  # refine.weight, as set or inferred; the geometric mean over all places; or None
    weights: tuple | float | None = None  # refine.weight by place, (array, affine), or as set; None without refinement
    inverse: np.ndarray | None = None  # (N, *moving) in voxels of the moving grid
    inverse_error_mm: float | None = None  # mean round-trip error of the moving volume's points by both written fields
    inverse_error_max_mm: float | None = None  # the largest of these errors
    inverse_error_voxels: float | None = None  # their mean in sides of the moving volume's voxels
    inverse_consistency_mm: float | None = None  # mean round-trip error of the points of the fixed body
    segmented_fixed: np.ndarray | None = None  # (*fixed) uint16, segmentation by a network with model.structures
    segmented_moving: np.ndarray | None = None  # (*moving), with the label values of its training maps

    def __repr__(self):
        return (f"<Result: {self.moving.name} on {self.fixed.name}, {self.fixed.array.shape}, verdict {self.verdict}, "
                f"similarity {self.similarity_before:.3f} -> {self.similarity:.3f}>")

    @property
    def known(self) -> "Known":
        """What another registration onto the same fixed volume, or one like it, may start from."""
        return Known(self.matrix, self.field, self.fixed.affine, self.weights)

    def save(self, folder) -> None:
        """Write into a folder what the command writes for a pair: files, picture, results and report."""
        from Inference.outputs import save  # here: matplotlib takes a second

        save(self, folder)


@dataclasses.dataclass
class Known:
    """A registration that another one continues, at the finest resolution only."""

    matrix: np.ndarray  # T, 4x4
    field: np.ndarray  # (N, *size), displacement in voxels of its grid, T included
    affine: np.ndarray  # 4x4, of that grid
    weights: tuple | float | None  # refine.weight by place, (array, affine), or for all; None: that of the config


@dataclasses.dataclass
class Placed:
    """Two volumes on the working grid before the deformation."""

    start: str
    matrix: np.ndarray  # T, 4x4
    overlap_percent: float
    work_affine: np.ndarray  # 4x4, of the working grid
    pair: dict  # moving (under T) and fixed, (C, *work), 0 to 1; moving_mask, fixed_mask, (1, *work) or None; float32
    alignment: dict  # how far to trust the alignment, from `align_affine`; empty without one
    compared_by: str  # correlation, mapped or mind
    outlined: str = ""  # side around whose content `place` has made a mask, fixed or moving
    cornered: tuple = ()  # sides whose blank corners `place` has masked out


@dataclasses.dataclass
class Solution:
    """The field of the working grid."""

    placed: Placed  # on the grid of the field
    field: torch.Tensor  # u, (1, N, *work) float32 on the CPU, in voxels
    structures: torch.Tensor | None  # a network's segmentations of moving and fixed, as shares, (2, K, *work)
    weights: tuple | float | None  # refine.weight by place, (array, affine), or for all; None without refinement
    seconds: dict[str, float]  # affine, network, refine


def register(fixed, moving, model=None, affine: bool | str = True, refine: bool | int = True, start="auto",
             device="auto", inverse: bool = False, config: dict | None = None, progress: bool = False,
             similarity: str | None = None, fixed_mask=None, moving_mask=None, fixed_channels=(),
             moving_channels=()) -> Result:
    """Find the field that warps `moving` onto `fixed`.

    fixed, moving: path of a file, nibabel or SimpleITK image, (array, affine 4x4), or an array (D, H, W) or (H, W)
    alone, with any intensities.
    model: None, path for `load_model` ("universal" is the bundled network), or what it returned (net, config).
    config: flat dict of config keys that differ from Config/config_om.yaml, if there is no model.
    affine: the alignment before the deformation: True or "affine", "rigid", or False for none.
    refine: steps of optimisation for this pair, True for the recommended number, False for none. progress: show a bar.
    start: "header" (as the headers place the volumes), "centre" (the centres of the fields of view coincide), "auto"
    (the more similar of the two; the affine alignment tries its own starts), or a 4x4 matrix, fixed to moving world in
    mm. Without a model it may be `Result.known` of an earlier registration: its field is refined further at the finest
    resolution, with its smoothing, and refine=True takes as many steps as a whole registration takes there.
    device: auto, cpu, cuda, xpu, or a torch.device. inverse: find the inverse too.
    similarity: one of SIMILARITIES, see `image_similarity`. With "auto", an affine alignment by correlation decides
    whether the pair shows two modalities, which are then compared by "mind". None: the config's
    registration.similarity.
    fixed_mask, moving_mask: as the volumes; alignment, refinement and similarity use only voxels above 0. Without a
    moving mask, what lies beyond a moving field of view that cuts the anatomy does not count in the refinement either.
    Without masks, if only one volume is skull-stripped, what lies outside it does not count, nor do blank corners of a
    volume that was resampled at an angle, see `place`.
    fixed_channels, moving_channels: lists of further channels, as the volumes, in the same order, or one image or array
    alone; refinement and similarity compare them too. Masks and channels are on the grids of their volumes. A network
    sees as many channels as it was trained with (data.channels), usually only the first.
    Raises InputError for input that cannot be read, is not a volume, or does not fit together.
    """
    known, start = (start, start.matrix) if isinstance(start, Known) else (None, start)
    if isinstance(affine, bool | np.bool_ | None) or (isinstance(affine, int | str) and not affine):
        affine = "affine" if affine else False
    elif not isinstance(affine, str) or affine not in AFFINES:
        shown = repr(affine) if isinstance(affine, str) else f"of type {type(affine).__name__}"
        raise InputError(f"affine must be True, {', '.join(AFFINES)} or False, not {shown}; the matrix of a volume "
                         "belongs beside its array: (array, affine).")
    if not isinstance(refine, numbers.Integral) or refine < 0:
        raise InputError(f"refine must be True, False or a number of steps, not {refine!r}.")
    refine = (STEPS if known is None else STEPS_CONTINUED) if refine is True else int(refine)
    if known is not None and model is not None:
        raise InputError("start: an earlier registration and a model were given, but only one can set the start; leave "
                         "out one of them.")
    device = pick_device(device)
    fixed, moving = read_sides(fixed, moving, inverse, fixed_mask, moving_mask, fixed_channels, moving_channels)
    if known is not None and len(known.field) != fixed.array.ndim:
        raise InputError(f"start: the earlier registration is {len(known.field)}D and {fixed.name} is "
                         f"{fixed.array.ndim}D; give one with the same number of axes.")
    net, cfg = _net_and_config(model, config, similarity, fixed, moving, device)
    began = time.perf_counter()
    with own_settings(fixed.array.size):
        (fixed, moving), (seen_fixed, seen_moving), placed = place(fixed, moving, affine, start, cfg, device,
                                                                   as_trained=net is not None)
        cfg = cfg | {"registration.similarity": placed.compared_by}
        if known is not None:
            cfg = cfg | {"refine.levels": 1}
        solution = solve(net, placed, seen_fixed, seen_moving, refine, cfg, began, device, progress, known)
        if refine and cfg["refine.grid"] == "own":
            solution = at_full_resolution(solution, fixed, moving, refine, cfg, device, progress)
        return bring_back(solution, fixed, moving, inverse, cfg, began, device)


def register_from(initial, fixed, moving, start="auto", inverse=False, dims=3, **options):
    """`register`, started from another program's transform file.

    initial: path of a matrix or a field, see Dataloader/transforms.py; None: use `start`, as `register` does.
    fixed, moving: paths. dims: axes of the volumes. options: those of `register`.
    Returns: what `register` does. If `initial` is a field, the field of the result is the whole transform, the matrix
    is the affine map that fits it best, and segmented_moving is None.
    Raises InputError as `register` does, and for an inverse if `initial` is a field.
    """
    if initial is None:
        return register(fixed, moving, start=start, inverse=inverse, **options)
    if not is_field(initial):
        return register(fixed, moving, start=read_matrix(initial, fixed, moving, dims), inverse=inverse, **options)
    if inverse:
        raise InputError(f"{initial}: a registration that starts from a field cannot be inverted; leave out "
                         "--inverse, or start from a matrix.")
    beside = {key: options.pop(key) for key in ("fixed_mask", "moving_mask", "fixed_channels", "moving_channels")
              if key in options}
    fixed, moving = read_sides(fixed, moving, inverse, **beside)
    first, first_affine = read_any_field(initial, dims)
    doubt = doubt_of_grid(initial, first.shape[1:], first_affine, fixed, moving)
    first = total_field(torch.from_numpy(first)[None], np.linalg.inv(first_affine) @ fixed.affine, fixed.array.shape)
    shown, *shown_channels = (apply_field(array, moving.affine, first, fixed.affine) for array in moving.images)
    if shown.min() == shown.max():
        raise InputError(f"{initial}: this field shows nothing of the moving volume; check that it leads from fixed "
                         "to moving, and that it is the right file.")
    overlap, shown_mask = shown_part(fixed, moving, first)
    # As Volumes, whose names the warnings have; a matrix, since the start by the headers cannot be changed here.
    result = register(fixed, Volume(shown, fixed.affine, moving.name), start=np.eye(4), fixed_mask=fixed.mask,
                      fixed_channels=fixed.channels, moving_mask=shown_mask, moving_channels=shown_channels,
                      **options)
    own = [doubt] if doubt else []
    if result.segmented_moving is not None:
        own.append(f"{moving.name}: the network has seen it only as the field of {initial} warps it, so its "
                   "segmentation is left out; start from a matrix to get it.")
    for sentence in own:
        warnings.warn(sentence, stacklevel=2)
    field = compose(torch.from_numpy(first)[None], torch.from_numpy(result.field)[None])[0].numpy()
    warped, *warped_channels = (apply_field(array, moving.affine, field, fixed.affine) for array in moving.images)
    fixed = dataclasses.replace(fixed, mask=result.fixed.mask)  # `place` may have made one
    if shown_mask is None and result.moving.mask is not None:
        blank = blank_corners(moving, changed_config(dims, options.get("config")))
        moving = outlined(moving) if blank is None else without(moving, blank)
    judged = {"compared_by": result.compared_by, "one_sign": result.one_sign, "mirror_gain": result.mirror_gain,
              "overlap_percent": overlap}
    matrix = fixed.affine @ fitted_affine(field) @ np.linalg.inv(fixed.affine)
    scores = pair_scores(fixed, moving, field, warped, matrix, None, judged)
    return dataclasses.replace(result, fixed=fixed, moving=moving, field=field, warped=warped, matrix=matrix,
                               warped_channels=warped_channels, start="field", overlap_percent=overlap,
                               warnings=[*result.warnings, *own], segmented_moving=None, **scores)


def doubt_of_grid(path, shape, affine, fixed, moving):
    """Why a field may be of the other direction or of another pair, as a sentence; "" if its grid is the fixed one.

    path: of its file. shape, affine: of its grid. fixed, moving: Volumes.
    """
    if same_grid(shape, affine, fixed.array.shape, fixed.affine):
        return ""
    if same_grid(shape, affine, moving.array.shape, moving.affine):
        return (f"{path}: it lies on the grid of {moving.name}, and not of {fixed.name}: check that it leads from the "
                "fixed to the moving volume.")
    covered = overlap_percent(fixed.array.shape, fixed.affine, shape, affine, np.eye(4))
    return "" if covered >= FAR_APART else (
        f"{path}: it covers {covered:.0f} % of the field of view of {fixed.name}, and is extrapolated beyond: check "
        "that it belongs to this volume.")


def shown_part(fixed, moving, field):
    """How much of a fixed Volume a moving one covers under a field, in percent, and its mask there, (*fixed), or None.

    As in `align` padding does not count, and a moving volume without a mask has one if its field of view cuts the body:
    the voxels to which nothing beyond contributes. field: (N, *fixed) in voxels.
    """
    scanned = without_padding(without_filler(moving))
    seen = apply_field(*whole_with_rim(scanned.array.shape, scanned.affine), field, fixed.affine)
    covered = 100.0 * float((seen[unpadded_box(fixed)] > 0.5).mean())
    if moving.mask is not None:
        return covered, apply_field(moving.mask, moving.affine, field, fixed.affine, order=0)
    image = grids.rescale(scanned.array, *grids.intensity_range(scanned.array))
    partial = covered < WHOLE_PERCENT and is_cut_off(image)
    return covered, (seen > 0.99).astype(np.float32) if partial else None


# ---------------------------------------------------------------------------------------------------------------------
# Read: the volumes and the network
# ---------------------------------------------------------------------------------------------------------------------

def memory_needed(shape, moving_shape, channels, inverse, own_grid=False, labels=False):
    """The most host memory that `register` takes, in bytes, without that of a network.

    channels: images on each grid. own_grid: whether large volumes are refined on their own. labels: whether label maps
    are warped and scored too.
    """
    fixed, moving = math.prod(shape), math.prod(moving_shape)
    fixed_part, moving_part = (min(voxels, grids.MOST_VOXELS) for voxels in (fixed, moving))
    whole = (WRITTEN * fixed + INVERSE * moving * inverse + AT_ONCE * channels * fixed_part
             + (AT_ONCE_MOVING + AT_ONCE_INVERSE * inverse) * moving_part)
    fine = fine_bytes(fixed, channels) if own_grid and fixed > grids.MOST_VOXELS else 0
    return int(PROGRAM + (READ * channels + LABELLED * labels) * (fixed + moving) + max(whole, fine))


def require_memory(fixed, moving, channels, inverse):
    """Raise MemoryShort for a pair that needs more memory than is free. fixed, moving: as for `register`."""
    shapes = shape_of(fixed), shape_of(moving)
    if None in shapes:
        return  # reading the file reports the problem
    needed, free = memory_needed(*shapes, channels, inverse), memory.measure(torch.device("cpu"))["host_free"]
    if free is not None and needed > free:
        memory.trim()  # the C library may still hold what the previous pair freed
        free = memory.measure(torch.device("cpu"))["host_free"]
    if free is not None and needed > free:
        names = [str(side) if is_path(side) else word for side, word in ((fixed, "fixed"), (moving, "moving"))]
        raise MemoryShort(f"{' and '.join(names)}: to register them takes up to {needed / 2 ** 30:.1f} GiB of memory, "
                          f"and {free / 2 ** 30:.1f} GiB are free; resample them to larger voxels, leave out the "
                          "inverse, use fewer workers, or take a machine with more.")


def read_sides(fixed, moving, inverse, fixed_mask=None, moving_mask=None, fixed_channels=(), moving_channels=()):
    """Both Volumes of a pair with their masks and further channels, if there is memory for them; as for `register`."""
    fixed_channels, moving_channels = (further_sources(given, side) for given, side in (
        (fixed_channels, fixed), (moving_channels, moving)))
    require_memory(fixed, moving, 1 + len(fixed_channels), inverse)
    pair = []
    for side, source, mask, channels in (("fixed", fixed, fixed_mask, fixed_channels),
                                         ("moving", moving, moving_mask, moving_channels)):
        volume = read_source(source, side)
        if 1 in volume.array.shape:
            raise InputError(f"{volume.name}: {one_plane(volume.array.shape)}")
        if min(volume.array.shape) < LEAST_SIDE:
            raise InputError(f"{volume.name}: shape {volume.array.shape} has fewer than {LEAST_SIDE} voxels along an "
                             "axis, which is too few to deform; register the slices in 2D.")
        pair.append(dataclasses.replace(volume, mask=read_mask(mask, volume), channels=read_further(channels, volume)))
    return pair


def _net_and_config(model, config, similarity, fixed, moving, device):
    """(net or None, config) for whatever model `register` was given, and these two Volumes."""
    dims = fixed.array.ndim
    if dims != moving.array.ndim:
        raise InputError(f"{fixed.name} is {dims}D and {moving.name} is {moving.array.ndim}D; fixed and moving need "
                         "the same number of axes.")
    if dims == 2:
        planes = [np.cross(*volume.affine[:3, :2].T) for volume in (fixed, moving)]
        if abs(planes[0] @ planes[1]) < 0.9 * np.linalg.norm(planes[0]) * np.linalg.norm(planes[1]):
            raise InputError(f"{fixed.name} and {moving.name} lie in different planes by their headers, but a 2D field "
                             "stays in one plane; give both headers the same directions.")
    model = loaded(model, device)
    net, cfg = (None, changed_config(dims, config)) if model is None else (model[0].to(device), model[1])
    if net is not None and config is not None and config is not cfg:
        raise InputError("config is for a registration without a model, which has its own: leave out one of them.")
    if net is not None and cfg["model.condition_type"] == "none":
        raise InputError(f"the network {cfg['model.name']} of this model only recovers deformed volumes and cannot "
                         "register, since it never sees a second one (model.condition_type none): register with "
                         "--model none, --model universal or a network trained with a condition, and use this one with "
                         "OM_augment.py.")
    if cfg["model.dims"] != dims:
        raise InputError(f"{fixed.name} and {moving.name} are {dims}D, but the model, or --dims, is "
                         f"{cfg['model.dims']}D; give volumes that match it, or change --dims.")
    if len(fixed.channels) != len(moving.channels):
        raise InputError(f"{fixed.name} has {len(fixed.channels)} further channels and {moving.name} has "
                         f"{len(moving.channels)}; give the same channels for both, in the same order.")
    if net is not None and 1 + len(fixed.channels) < cfg["data.channels"]:
        raise InputError(f"{fixed.name}: the model was trained on volumes with {cfg['data.channels']} channels "
                         f"(data.channels), but {1 + len(fixed.channels)} is given; add the others of both volumes "
                         "with --fixed-channels and --moving-channels, in the same order.")
    if similarity is None:
        return net, cfg
    if similarity not in SIMILARITIES:
        raise InputError(f"similarity must be {', '.join(SIMILARITIES)}, not {similarity!r}.")
    return net, {**cfg, "registration.similarity": similarity}


# ---------------------------------------------------------------------------------------------------------------------
# Align: from the files to the working grid
# ---------------------------------------------------------------------------------------------------------------------

def place(fixed, moving, affine, start, cfg, device, as_trained):
    """`align`, with a mask around what a volume shows if its blank part would be taken for anatomy.

    If one volume shows more than the other, as a head does beside its brain, the mask is around what the other shows;
    otherwise the outline of the brain is matched to that of the head. Without an affine alignment, whose result
    decides, there is no such mask. Else the blank corners of volumes that were resampled at an angle are masked, if
    the other volume shows something there. affine to as_trained: as for `align`.
    Returns: (fixed, moving), Volumes with the masks; the same two `within_memory`, as they were aligned; Placed.
    """
    def aligned(pair):
        seen = [within_memory(without_filler(volume)) for volume in pair]
        return pair, seen, align(*seen, affine, start, cfg, device, as_trained)

    side = outlined_side(fixed, moving, affine, cfg)
    if side:
        with contextlib.suppress(InputError):  # the mask may leave nothing to compare
            pair, seen, placed = aligned((outlined(fixed), moving) if side == "fixed" else (fixed, outlined(moving)))
            other = placed.pair["moving" if side == "fixed" else "fixed"][:1] > FOREGROUND
            if other[placed.pair[f"{side}_mask"] == 0].sum() > BEYOND * other.sum():
                return pair, seen, dataclasses.replace(placed, outlined=side)
    found = aligned((fixed, moving))
    if fixed.mask is None and moving.mask is None:
        pair, cornered = without_corners(found, cfg)
        with contextlib.suppress(InputError):
            if cornered:
                pair, seen, placed = aligned(pair)
                one, two = map(without_padding, seen)
                overlap = overlap_percent(one.array.shape, one.affine, two.array.shape, two.affine, placed.matrix,
                                          two.mask)
                return pair, seen, dataclasses.replace(placed, cornered=cornered, overlap_percent=overlap)
    return found


def without_corners(found, cfg):
    """Two Volumes, and the sides that got a mask: those with `blank_corners` in which the other volume, as placed,
    shows something or was not scanned. found: what `place` returns, without masks."""
    volumes, seen, placed = found
    volumes, cornered, size = list(volumes), (), placed.pair["fixed"].shape[1:]
    to_world = placed.work_affine, placed.matrix @ placed.work_affine
    for number, side in enumerate(("fixed", "moving")):
        volume, other = volumes[number], seen[1 - number]
        blank = blank_corners(volume, cfg)
        if blank is None:
            continue
        beyond = _on_working_grid(np.float32(blank), volume.affine, to_world[number], size) > 0.99
        scanned = _on_working_grid(np.ones(other.array.shape, np.float32), other.affine, to_world[1 - number], size)
        shown = placed.pair[("moving", "fixed")[number]][0][beyond & (scanned > 0.99)] > FOREGROUND
        if not shown.size or shown.mean() > SHOWN:
            volumes[number] = without(volume, blank)
            cornered += (side,)
    return tuple(volumes), cornered


def align(fixed, moving, affine, start, cfg, device, as_trained=False, most=None):
    """Place the moving volume before the deformation, and sample both volumes on the working grid: Placed.

    fixed, moving: Volumes. affine: "rigid", "affine" or False. as_trained, most: see `working_grid`.
    """
    similarity = cfg["registration.similarity"]
    compared_by = "correlation" if similarity == "auto" else similarity
    for volume in (fixed, moving):
        inside = volume.array[:0] if volume.mask is None else volume.array[volume.mask > 0]
        if inside.size and inside.min() == inside.max():
            raise InputError(f"{volume.name}: it has one intensity, {inside.flat[0]:g}, in all voxels of its mask; "
                             "check the mask, which is above 0 where voxels count.")
    if not as_trained:
        fixed, moving = without_padding(fixed), without_padding(moving)
    (fixed01, *fixed_rest), (moving01, *moving_rest) = (
        [scaled(array, cfg, None if volume.mask is None or as_trained else air_for_filler(array)[volume.mask > 0])[0]
         for array in volume.images] for volume in (fixed, moving))
    work_fixed, work_affine = working_grid(fixed01, fixed.affine, cfg, as_trained,
                                           fixed_rest[:cfg["data.channels"] - 1], most)
    if isinstance(start, str) and start == "auto":
        start = "header" if affine else better_start(fixed, moving, moving01, work_fixed, work_affine, similarity)
    matrix, alignment = start_matrix(start, fixed.array.shape, fixed.affine, moving.array.shape, moving.affine), {}
    if affine:
        started_affine = np.linalg.inv(matrix) @ moving.affine
        finest = max(cfg["data.img_size"]) if as_trained else None  # a network sees no finer, and corrects the rest
        found, alignment = align_affine(fixed01, fixed.affine, moving01, started_affine, affine, similarity,
                                        fixed_mask=fixed.mask, moving_mask=moving.mask, finest=finest,
                                        device=device if device.type == "cuda" else "cpu",  # others may lack float64
                                        recorded=cfg["run.graphs"])
        matrix = matrix @ found
        if similarity == "auto" and alignment["one_sign"] is not None and alignment["one_sign"] < ONE_SIGN:
            compared_by = "mind"

    pair, overlap = {}, overlap_percent(fixed.array.shape, fixed.affine, moving.array.shape, moving.affine, matrix)
    for side, volume, images, to_world in (("fixed", fixed, fixed_rest, work_affine),
                                           ("moving", moving, [moving01, *moving_rest], matrix @ work_affine)):
        images = [_on_working_grid(image, volume.affine, to_world, work_fixed.shape) for image in images]
        pair[side] = np.stack([work_fixed, *images] if side == "fixed" else images)
        pair[f"{side}_mask"] = None
        if volume.mask is not None:  # keep only voxels to which nothing outside the mask contributes
            mask = _on_working_grid(volume.mask, volume.affine, to_world, work_fixed.shape)
            pair[f"{side}_mask"] = (mask > 0.99).astype(np.float32)[None]
            require_mask(pair[f"{side}_mask"], volume)
    if not as_trained and moving.mask is None and overlap < WHOLE_PERCENT and is_cut_off(moving01):
        seen = _on_working_grid(np.ones_like(moving01), moving.affine, matrix @ work_affine, work_fixed.shape) > 0.99
        pair["moving_mask"] = seen.astype(np.float32)[None] if seen.any() else None
    return Placed(start if isinstance(start, str) else "matrix", matrix, overlap, work_affine, pair, alignment,
                  compared_by)


def within_memory(volume):
    """A Volume; above MOST_VOXELS it loses its padding, and if it is still too large it goes to `isotropic_grid`."""
    for shrink in (without_padding, onto_isotropic_grid):
        if volume.array.size > grids.MOST_VOXELS:
            volume = shrink(volume)
    return volume


def onto_isotropic_grid(volume):
    """A Volume on its `isotropic_grid`, with its channels and its mask; only voxels wholly in the mask count."""
    canonical, affine = to_canonical(volume.array, volume.affine)
    grid = isotropic_grid(canonical.shape, affine)
    affine = grid_transform(canonical.shape, affine, *grid)[2]
    del canonical  # as large as the volume
    volume = volume.changed(lambda array: to_grid(array, volume.affine, *grid)[0], affine)
    if volume.mask is not None:
        volume = dataclasses.replace(volume, mask=(volume.mask > 0.99).astype(np.float32))
        require_mask(volume.mask, volume)
    return volume


def require_mask(mask, volume):
    """Raise InputError if a Volume's mask, on the grid on which volumes are compared, is empty."""
    if not mask.any():
        raise InputError(f"{volume.name}: no voxel of the grid on which the volumes are compared lies wholly in its "
                         "mask: make a thin mask a voxel thicker on each side, or check that both volumes show the "
                         "same place.")


def working_grid(image, affine, cfg, as_trained, further=(), most=None):
    """The fixed volume on the grid on which the field is found: array (*work) float32; its affine 4x4.

    image: in 0..1. as_trained: place it as the training did (data.img_size, data.spacing_mm, data.crop_above), with
    more voxels along an axis that would not fit; else cover its field of view with voxels as large as its own, on
    average, and at most `most` of them. further: channels that a network sees too; data.crop_above applies to them.
    """
    canonical, canonical_affine = to_canonical(image, affine)
    shape, dims = canonical.shape, image.ndim
    if as_trained:
        size, spacing_mm = np.array(cfg["data.img_size"]), cfg["data.spacing_mm"]
        box = focus([image, *further], affine, cfg)
        if spacing_mm:
            first, stop = [[0] * dims, shape] if box is None else box
            extent_mm = np.subtract(stop, first) * np.linalg.norm(canonical_affine[:3, :dims], axis=0)
            size = np.maximum(size, _covering_size(extent_mm, spacing_mm))
        return to_grid(image, affine, size, spacing_mm, box=box)
    size, spacing_mm = isotropic_grid(shape, canonical_affine, most)
    least = max(LEAST_SIDE, 2 ** (cfg["registration.scales"] - 1))  # the similarity halves the grid scales - 1 times
    return to_grid(image, affine, np.maximum(size, least), spacing_mm)


def isotropic_grid(shape, affine, most=None):
    """Size and spacing in mm of a grid over the field of view of a canonical volume, for `to_grid`.

    Its voxels are as large as the volume's on average, or larger if there would be more than `most` (MOST_VOXELS). All
    lie between the centres of the volume's outermost ones, since further out values blend with what is outside.
    """
    most, dims = most or grids.MOST_VOXELS, len(shape)
    sides_mm = np.linalg.norm(affine[:3, :dims], axis=0)
    spacing_mm, extent_mm = mean_spacing_mm(affine, dims), (np.array(shape) - 1) * sides_mm
    while (count := math.prod(size := (1 + np.floor(extent_mm / spacing_mm + 1e-3).astype(int)).tolist())) > most:
        spacing_mm *= max((count / most) ** (1 / dims), 1.001)
    return size, spacing_mm


def _covering_size(extent_mm, spacing_mm):
    """How many voxels cover an extent, per axis; a rounding error does not add a voxel."""
    return np.ceil(np.asarray(extent_mm) / spacing_mm - 1e-3).astype(int)


def _on_working_grid(image, affine, work_to_world, size):
    """A volume on another grid, (*size) float32, smoothed first where it shrinks, as `to_grid` does.

    work_to_world: 4x4, voxels of the other grid to the volume's world.
    """
    dims = image.ndim
    change = np.linalg.inv(affine) @ work_to_world
    steps = np.linalg.norm(change[:dims, :dims], axis=1)  # voxels of the image in a step of the grid
    sigma = np.where(steps > SMOOTH_ABOVE, SMOOTH_SIGMA * steps, 0)
    image = ndimage.gaussian_filter(image, sigma, mode="nearest") if sigma.any() else image
    return ndimage.affine_transform(image, change[:dims, :dims], change[:dims, 3], tuple(size), order=1,
                                    mode="grid-constant", cval=0)


def start_matrix(start, shape, affine, moving_shape, moving_affine):
    """T before any alignment, 4x4: `start` is "header", "centre" of the fields of view, or the matrix itself.

    Raises InputError for another start.
    """
    if not isinstance(start, str):
        try:
            matrix = np.array(start.detach().cpu() if hasattr(start, "detach") else start, np.float64)
        except (TypeError, ValueError):
            raise InputError(f"start must be {', '.join(STARTS)}, an invertible 4x4 matrix or Result.known, not a "
                             f"{type(start).__name__}.") from None
        if is_singular(matrix):
            shown = matrix.tolist() if matrix.size <= 16 else f"an array of shape {matrix.shape}"
            raise InputError(f"start must be {', '.join(STARTS)}, an invertible 4x4 matrix with the last row 0 0 0 1, "
                             f"or Result.known, which begins with the field of a registration; not {shown}.")
        return matrix
    if start not in STARTS[1:]:
        raise InputError(f"start must be {', '.join(STARTS)} or a 4x4 matrix, not {start!r}.")
    matrix = np.eye(4)
    if start == "centre":
        middle_mm, moving_middle_mm = (own @ [*((np.array(size) - 1) / 2), *[0] * (3 - len(size)), 1]
                                       for size, own in ((shape, affine), (moving_shape, moving_affine)))
        matrix[:3, 3] = (moving_middle_mm - middle_mm)[:3]
    return matrix


def better_start(fixed, moving, moving01, work_fixed, work_affine, similarity):
    """ "header"; or "centre" if that makes the volumes clearly more alike, or if they barely overlap by their headers.

    They are compared only where both fields of view, or their masks, overlap, because two crops of one volume have
    different centres but correct headers. fixed, moving: Volumes. moving01, work_fixed: their intensities in 0..1, the
    latter on the working grid.
    """
    (shape, affine), (moving_shape, moving_affine) = ((each.array.shape, each.affine) for each in (fixed, moving))
    counted = np.ones_like(moving01) if moving.mask is None else moving.mask
    weight = 1.0 if fixed.mask is None else _on_working_grid(fixed.mask, affine, work_affine, work_fixed.shape)
    compare = local_correlation if similarity in ("correlation", "auto") else mapped_correlation
    scores = {}
    for start in STARTS[1:]:
        matrix = start_matrix(start, shape, affine, moving_shape, moving_affine)
        if overlap_percent(shape, affine, moving_shape, moving_affine, matrix) < FAR_APART:
            scores[start] = 0.0
            continue
        work_moving, inside = (_on_working_grid(array, moving_affine, matrix @ work_affine, work_fixed.shape)
                               for array in (moving01 * counted, counted))
        warped, target, inside = (torch.from_numpy(each)[None, None] for each in (
            work_moving / np.maximum(inside, 1e-3), work_fixed, inside * weight))
        scores[start] = float(compare(warped, target, WINDOW, weight=inside))
    return "centre" if scores["centre"] > scores["header"] + BETTER else "header"


def overlap_percent(shape, affine, moving_shape, moving_affine, matrix, mask=None):
    """How much of the fixed field of view lies within the moving one under T, and within its mask, in percent.

    Counted on at most 32 points along each axis. mask: (*moving) or None.
    """
    dims = len(shape)
    axes = [np.linspace(0, n - 1, min(n, 32)) for n in shape]
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(dims, -1)
    change = np.linalg.inv(moving_affine) @ matrix @ affine
    moving_points = change[:dims, :dims] @ points + change[:dims, 3:]
    inside = ((moving_points > -0.5) & (moving_points < np.reshape(moving_shape, (dims, 1)) - 0.5)).all(0)
    if mask is not None:
        inside[inside] = mask[tuple(np.rint(moving_points[:, inside]).astype(int))] > 0
    return 100.0 * float(inside.mean())


# ---------------------------------------------------------------------------------------------------------------------
# Solve: the field of the working grid
# ---------------------------------------------------------------------------------------------------------------------

def solve(net, placed, fixed, moving, refine, cfg, began, device, progress, known):
    """The field that the network, the refinement or both find for a placed pair: Solution.

    net, known: or None. placed: from `align`. refine: steps, 0 for none. began: clock time when the alignment began.
    """
    seconds = {"affine": time.perf_counter() - began, "network": 0.0, "refine": 0.0}
    pair, field, structures, weights = _on_device(placed.pair, device), None, None, None
    if known is not None:
        field = field_of_known(known, placed, pair, cfg)
        cfg = with_weights(cfg, known.weights, placed.work_affine, pair["fixed"].shape[2:], device)
    if net is not None:
        started, seen = time.perf_counter(), cfg["data.channels"]
        with torch.no_grad():
            parts = segmented(net, pair["moving"][:, :seen], pair["fixed"][:, :seen], cfg)
            field = best_field(net, *parts, cfg)
        structures = torch.cat(parts)[:, seen:] if cfg["model.structures"] else None
        synchronize(device)
        seconds["network"] = time.perf_counter() - started
    if net is not None and refine and cfg["refine.grid"] == "own":  # with voxels as small as those of the files
        own = align(fixed, moving, False, placed.matrix, cfg, device)
        change, size = np.linalg.inv(placed.work_affine) @ own.work_affine, own.pair["fixed"].shape[1:]
        field = torch.from_numpy(total_field(field.float().cpu(), change, size))[None].to(device)
        structures = None if structures is None else resample(structures, change, size)
        overlap = placed.overlap_percent if placed.cornered else own.overlap_percent
        placed = dataclasses.replace(placed, overlap_percent=overlap, work_affine=own.work_affine, pair=own.pair)
        pair = _on_device(placed.pair, device)
    if refine:
        started = time.perf_counter()
        field, weights = optimise({**pair, "structures": structures}, field, refine, cfg, progress)
        synchronize(device)
        seconds["refine"] = time.perf_counter() - started
    if field is None:
        field = torch.zeros(1, fixed.array.ndim, *pair["fixed"].shape[2:])
    if not bool(torch.isfinite(field).all()):
        raise InputError("The field has NaN or infinite numbers; use another checkpoint, or try --set run.amp=off.")
    if torch.is_tensor(weights):
        spread = corners_on_corners(weights.shape[2:], pair["fixed"].shape[2:])
        weights = weights[0, 0].cpu().numpy(), placed.work_affine @ spread
    return Solution(placed, field.cpu(), structures, weights, seconds)


def with_weights(cfg, weights, work_affine, size, device):
    """The config with the refine.weight of another registration, brought onto a working grid of this size.

    weights: as in Known; None leaves the config as it is.
    """
    if isinstance(weights, tuple):
        array, affine = weights
        change = np.linalg.inv(affine) @ work_affine @ corners_on_corners(array.shape, size)
        weights = resample(torch.from_numpy(array)[None, None], change, array.shape, padding="border").to(device)
    return cfg if weights is None else cfg | {"refine.weight": weights}


def corners_on_corners(few, size):
    """4x4, voxels of a grid of `few` points to those of one of `size` that has the same corners."""
    return np.diag([*((np.array(size) - 1) / np.maximum(np.array(few) - 1, 1)), *[1] * (4 - len(size))])


def field_of_known(known, placed, pair, cfg):
    """The field with which an earlier registration begins this one: (1, N, *work) in voxels of the working grid.

    It reproduces the earlier map as a whole, or applies the earlier deformation after the affine part found now,
    whichever makes the pair more alike. Another pair, such as a later frame, has moved as a whole; an affine part that
    the earlier registration left out is in its field already.
    known: Known. placed: from `align`. pair: its pair, on the device.
    """
    size, before = placed.pair["fixed"].shape[1:], np.linalg.inv(known.affine) @ placed.work_affine
    starts = [placed.matrix] if np.array_equal(placed.matrix, known.matrix) else [placed.matrix, known.matrix]
    fields = [total_field(torch.from_numpy(known.field)[None], before, size,
                          np.linalg.inv(matrix @ placed.work_affine) @ known.affine) for matrix in starts]
    fields = [torch.from_numpy(field)[None].to(pair["fixed"].device) for field in fields]
    if len(fields) == 1:
        return fields[0]
    whole = pair_at_level({**pair, "structures": None}, 1, cfg)
    return max(fields, key=lambda field: correlation_under(whole, field, cfg))


def at_full_resolution(solution, fixed, moving, refine, cfg, device, progress):
    """The Solution, refined further on voxels as small as those of the Volume `fixed`, if those of its grid are larger.

    The finest resolution gets its share of the steps. Each step works slab by slab, with the same result as on the
    whole volume. Returns the Solution unchanged if memory is short, and for two modalities or a network's structures,
    which cannot be compared slab by slab.
    """
    placed, free = solution.placed, memory.measure(torch.device("cpu"))["host_free"]
    if (not is_coarser(placed.work_affine, fixed) or not is_comparable_in_slabs(solution)
            or free is not None and free < fine_bytes(fixed.array.size, 1 + len(fixed.channels))):
        return solution
    fine = align(fixed, moving, False, placed.matrix, cfg, device, most=math.inf)
    size = np.array(fine.pair["fixed"].shape[1:])
    control = np.maximum(-(-size // 2), 2)  # a grid of half as many points, corners on corners
    thinner = np.linalg.inv(placed.work_affine) @ fine.work_affine @ corners_on_corners(control, size)
    field = torch.from_numpy(total_field(solution.field, thinner, control))[None].to(device)
    began, steps = time.perf_counter(), max(refine // cfg["refine.levels"], 1)
    cfg = with_weights(cfg | {"refine.levels": 1}, solution.weights, fine.work_affine, size, device)
    field, _ = optimise({**_on_device(fine.pair, device), "structures": None}, field, steps, cfg, progress)
    synchronize(device)
    seconds = {**solution.seconds, "refine": solution.seconds["refine"] + time.perf_counter() - began}
    placed = dataclasses.replace(placed, work_affine=fine.work_affine, pair={})
    return dataclasses.replace(solution, placed=placed, field=field.cpu(), seconds=seconds)


def is_coarser(work_affine, fixed):
    """Whether the voxels of a working grid are larger than those of the Volume `fixed`, by their mean side."""
    dims = fixed.array.ndim
    return mean_spacing_mm(work_affine, dims) > 1.001 * mean_spacing_mm(fixed.affine, dims)


def is_comparable_in_slabs(solution):
    """Whether a pair is compared by windows alone; two modalities and structures need the whole images."""
    return solution.placed.compared_by == "correlation" and solution.structures is None


def mean_spacing_mm(affine, dims):
    """The geometric mean of the sides of a grid's voxels in mm. affine: 4x4."""
    return float(np.exp(np.log(np.linalg.norm(affine[:3, :dims], axis=0)).mean()))


def fine_bytes(voxels, channels):
    """The memory in bytes that `at_full_resolution` takes beside both volumes: voxels and images of the fixed grid."""
    return FINE * channels * voxels + AT_ONCE * grids.MOST_VOXELS


def _on_device(pair, device):
    """A dict of arrays (C, *spatial) or None as tensors with a batch axis, (1, C, *spatial), on a device."""
    return {key: None if array is None else torch.from_numpy(array)[None].to(device) for key, array in pair.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Bring back: the field on the files' grids, and its scores
# ---------------------------------------------------------------------------------------------------------------------

def bring_back(solution, fixed, moving, inverse, cfg, began, device):
    """The solution on the grids of the files, with its scores: Result. began: clock time when the alignment began."""
    placed, work_affine = solution.placed, solution.placed.work_affine
    field = total_field(solution.field, np.linalg.inv(work_affine) @ fixed.affine, fixed.array.shape,
                        np.linalg.inv(fixed.affine) @ placed.matrix @ work_affine)
    warped, *warped_channels = (apply_field(array, moving.affine, field, fixed.affine) for array in moving.images)
    sentences, more = [], {}
    if placed.overlap_percent < FAR_APART:
        advice = "check that both show the same part of the body" if placed.alignment else (
            "check that the start leads from fixed to moving, or align them first with --affine"
            if placed.start == "matrix" else
            "align them first with --affine" + " or --start centre" * (placed.start == "header"))
        sentences.append(f"{moving.name} covers {placed.overlap_percent:.0f} % (blank borders left out) of the field "
                         f"of view of {fixed.name}: {advice}.")
    for side in placed.cornered:
        volume = fixed if side == "fixed" else moving
        sentences.append(f"{volume.name} has blank corners, as after resampling at an angle: they are ignored, as with "
                         "a mask.")
    if placed.outlined:
        one, other = (fixed, moving) if placed.outlined == "fixed" else (moving, fixed)
        sentences.append(f"{one.name} is blank around its content, as if skull-stripped, and {other.name} is not blank "
                         "there: everything outside that content is ignored, as with a mask.")
    if fixed.array.size > grids.MOST_VOXELS and is_coarser(work_affine, fixed):
        advice, gib = "", math.ceil(fine_bytes(fixed.array.size, 1 + len(fixed.channels)) / 2 ** 30)
        if solution.weights is not None and is_comparable_in_slabs(solution):
            advice = (f", since refining it there takes {gib} GiB of free memory" if cfg["refine.grid"] == "own" else
                      f" (--set refine.grid=own refines it there, with {gib} GiB of free memory)")
        sentences.append(f"{fixed.name} has {fixed.array.size / 1e6:.0f} million voxels: the field is found on a grid "
                         f"of {mean_spacing_mm(work_affine, fixed.array.ndim):.3g} mm and brought back to its "
                         f"own{advice}.")
    if inverse:
        more["inverse"], rest = inverse_field(
            solution.field, np.linalg.inv(placed.matrix @ work_affine) @ moving.affine, moving.array.shape,
            np.linalg.inv(moving.affine) @ work_affine)
        missed_percent = 100.0 * float((rest > NOT_INVERTED).mean())
        if missed_percent:
            most_mm = (rest * np.linalg.norm(work_affine[:3, 0])).max()
            sentences.append(f"the inverse field did not converge: {missed_percent:.2g} % of the points of "
                             f"{moving.name} miss by up to {most_mm:.2g} mm after going there and back, mostly where "
                             "the field folds or stretches strongly; do not use the inverse there.")
    for sentence in sentences:
        warnings.warn(sentence, stacklevel=3)
    if solution.structures is not None:
        shares, labels = solution.structures.float().cpu(), segmented_labels(cfg)
        for side, volume, share, to_world in (("moving", moving, shares[:1], placed.matrix @ work_affine),
                                              ("fixed", fixed, shares[1:], work_affine)):
            carried = resample(share, np.linalg.inv(to_world) @ volume.affine, volume.array.shape)
            more[f"segmented_{side}"] = label_map(carried, labels)[0].numpy().astype(np.uint16)
    seconds, smoothing = {**solution.seconds, "total": time.perf_counter() - began}, solution.weights
    if isinstance(smoothing, tuple):
        smoothing = float(np.exp(np.log(smoothing[0]).mean()))
    judged = {"compared_by": placed.compared_by, "one_sign": placed.alignment.get("one_sign"),
              "mirror_gain": placed.alignment.get("mirror_gain"), "overlap_percent": placed.overlap_percent}
    scores = pair_scores(fixed, moving, field, warped, placed.matrix, more.get("inverse"), judged, device)
    return Result(fixed=fixed, moving=moving, field=field, warped=warped, warped_channels=warped_channels,
                  start=placed.start, matrix=placed.matrix, overlap_percent=placed.overlap_percent,
                  smoothing=smoothing, weights=solution.weights, seconds=seconds, warnings=sentences, **scores,
                  **placed.alignment, **more)


def total_field(work_field, before, shape, after=None):
    """A field u of the working grid as one of a file's grid: x -> after(y + u(y)) - x with y = before(x).

    work_field: u, (1, N, *work) in voxels of the working grid; its border values extend outwards. before, after: 4x4,
    voxels of the file's grid to those of the working grid, and from there to the file's (None: the same way back).
    shape: of the file's grid. Returns: (N, *shape) float32 in voxels of the file's grid.
    """
    field = np.empty((len(shape), *shape), np.float32)
    after = np.linalg.inv(before) if after is None else after
    for slab in grids.slabs(shape):
        sampled = resample(work_field, of_slab(before, slab), field[0, slab].shape, padding="border")
        field[:, slab] = _joined(sampled, before, after, slab)
    return field


def inverse_field(work_field, before, shape, after):
    """As `total_field`, for the inverse of u: x -> after(y + v(y)) - x with v(y) = -u(y + v(y)) and y = before(x).

    Fixed-point iteration (Chen et al., Medical Physics 2008) at the points of the file's grid, so that v is not
    interpolated. Half steps converge where x + u(x) stretches less than fourfold and does not fold; whole steps need
    derivatives of u below one. Points that still miss by more than NOT_INVERTED take SHORTER steps.
    Returns: (N, *shape) float32; the remaining lengths of v + u(y + v), (*shape) in voxels of the working grid.
    """
    inverse, missed = np.empty((len(shape), *shape), np.float32), np.empty(shape, np.float32)
    for slab in grids.slabs(shape):
        v = torch.zeros(1, len(shape), *missed[slab].shape)
        y = then_affine(v, of_slab(before, slab))
        for steps_left in reversed(range(51)):
            rest = v + warp(work_field, y + v, padding="border")
            if not steps_left or float(rest.square().sum(1).max()) < 1e-6:
                break
            v = v - 0.5 * rest
        length = rest.square().sum(1).sqrt()[0]
        for step, count in SHORTER.items():
            far = (length > NOT_INVERTED).nonzero(as_tuple=True)
            if not 0 < len(far[0]) <= MOST_SLOWLY:
                break
            at = (slice(None), *far)
            v[0][at], length[far] = _more_slowly(work_field, torch.stack(far) + y[0][at], v[0][at], length[far], step,
                                                 count)
        inverse[:, slab], missed[slab] = _joined(v, before, after, slab), length.numpy()
    return inverse, missed


def _more_slowly(work_field, start, v, length, step, count):
    """`count` steps of `inverse_field` for some points: v, (N, K), where each misses least, and by how much, (K,).

    start: (N, K), the points y. v: where they begin. length: (K,), by how much they miss there. step: its size.
    """
    def missing(v):  # each point is a grid of one voxel
        places = (start + v).T.reshape(-1, len(v), *[1] * len(v))
        return v + warp(work_field.expand(len(places), *work_field.shape[1:]), places, padding="border").flatten(1).T

    moved, rest = v, missing(v)
    for _ in range(count):
        moved = moved - step * rest
        rest = missing(moved)
        found = rest.square().sum(0).sqrt()
        v, length = torch.where(found < length, moved, v), torch.minimum(found, length)
        if bool((length < 1e-3).all()):
            break
    return v, length


def _joined(sampled, before, after, slab):
    """x -> after(before(x) + sampled(x)) - x in a slab, (N, *slab). sampled: (1, N, *slab) in working voxels.

    The affine part is computed separately, so that it is exactly zero if there is none.
    """
    dims = sampled.shape[1]
    before, after = of_slab(before, slab), np.linalg.inv(of_slab(np.eye(4), slab)) @ after
    linear = torch.from_numpy(after[:dims, :dims].astype(np.float32))
    turned = (linear @ sampled.flatten(2)).view(sampled.shape)
    return (then_affine(torch.zeros_like(sampled), np.round(after @ before, 12)) + turned)[0].numpy()
