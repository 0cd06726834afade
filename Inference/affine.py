"""The affine stage: an affine or rigid map between two volumes, by the similarity that the networks train on.

Multi-start optimisation: several starts are optimised by L-BFGS on a coarse grid, the best go on to finer grids. A map
is its start times the matrix exponential of a generator, so that rotation, scale and shear are numbers of one size.

The maps live between two frames, one for each volume: millimetres along its (orthonormalised) axes from its centre of
intensity. There a map has small numbers whatever the headers say, and 2D and 3D are the same code.
"""
import itertools

import numpy as np
import torch

from Dataloader.grids import foreground_box, rescale, to_canonical, to_grid
from Diffusion.fields import resample
from Diffusion.losses import local_correlation, mutual_information
from Runtime.errors import InputError

SIDES = {2: (24, 48, 96, 192), 3: (16, 32, 64, 96)}  # voxels along the longest side, never finer than the volume
# By registration.similarity: (level, similarity, how many maps go on at most, iterations for each of them).
STAGES = {"correlation": [(0, "global", 7, 10), (0, "local", 4, 10), (1, "local", 3, 15), (2, "local", 1, 10),
                          (3, "local", 1, 20)]}
# Of what compares volumes of different modalities, mutual information alone does not mind how a volume is turned.
STAGES["mapped"] = STAGES["mind"] = [(0, "mutual", 7, 20), (1, "mutual", 4, 20), (2, "mutual", 2, 20),
                                     (3, "mutual", 1, 10)]
HOPEFUL = 0.8  # similarity, as a fraction of the best map's, below which a map is given up
WINDOW = 7  # of the local correlation, in voxels of the level
TURNED = np.deg2rad(25.0)  # angle of the starts that are turned against the headers
FOREGROUND = 0.05  # intensity above which a voxel counts for centre, moments and box
MARGIN = 0.1  # around the foreground of the fixed volume, as a fraction of its box
THINNEST = 4  # voxels that a level has at least along the shortest side
STRAIN = 0.7  # norm of the logarithmic strain above which it costs: 1.5 times as large along every axis
MOST_BINS = 32  # of the joint histogram; small volumes, whose voxels would not fill it, have fewer
OVERLAP = 0.5  # part of the fixed intensity that has to lie in the moving volume; less costs


def align_affine(fixed, fixed_affine, moving, moving_affine, kind="affine", similarity="correlation", fixed_mask=None,
                 moving_mask=None, finest=None):
    """The affine or rigid map T that aligns two volumes: where a world point of the fixed one is in the moving one.

    fixed, moving: (D, H, W), or both (H, W), intensities 0 .. 1, of any size, spacing and orientation; they need not
    overlap. fixed_affine, moving_affine: 4x4, voxel to world in millimetres, RAS. kind: "affine", or "rigid" (rotation
    and shift). similarity: "correlation", or for two modalities "mapped" or "mind": mutual information, see STAGES.
    fixed_mask, moving_mask: 0 .. 1 in the shape of the volume, how much each voxel counts; None for all alike.
    finest: voxels along the longest side beyond which no level but the first is taken; None for all.
    Returns: T, 4x4 float64, millimetres to millimetres: warped(x) = moving(A_moving^-1 T A_fixed x). In 2D the map
    stays in the planes of the images. The same input gives the same result.
    Raises InputError for constant or non-finite volumes, singular affines, different numbers of axes, unknown kinds.
    """
    if kind not in ("affine", "rigid"):
        raise InputError(f"the kind of affine alignment is {kind!r}; give affine or rigid.")
    given_affines = fixed_affine, moving_affine
    fixed, fixed_affine = _checked("fixed", fixed, fixed_affine)
    moving, moving_affine = _checked("moving", moving, moving_affine)
    if fixed.ndim != moving.ndim:
        raise InputError(f"the fixed volume has {fixed.ndim} axes, the moving one {moving.ndim}; give two of the same "
                         "kind.")
    fixed, fixed_mask = _masked("fixed", fixed, given_affines[0], fixed_mask)
    moving, moving_mask = _masked("moving", moving, given_affines[1], moving_mask)
    starts, frames = _starts(fixed, fixed_affine, moving, moving_affine)
    volumes = (fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine)
    levels = _levels(volumes, frames, _basis(fixed.ndim, kind))
    zero = torch.zeros(len(levels[0]["basis"]), dtype=torch.float64)
    candidates = [(start, zero) for start in starts]
    done = set()
    for number, compared_by, count, iterations in _stages(similarity, fixed.ndim, finest):
        level = levels[number]
        stage = (compared_by, level["spacing_mm"])
        if stage in done:
            continue  # of a small volume several levels are the same
        best = _best(candidates, count, level, compared_by)
        candidates = [_optimise(start, parameters, level, compared_by, iterations) for start, parameters in best]
        done.add(stage)
    (start, parameters), = _best(candidates, 1, level, compared_by)
    matrix = _matrix(start, parameters, level)[0].numpy()
    return frames[1] @ _embed(matrix) @ np.linalg.inv(frames[0])


def _stages(similarity, dims, finest):
    """The rows of STAGES whose level has no more than `finest` voxels a side, and those of the first level."""
    sides = SIDES[dims]
    return [stage for stage in STAGES[similarity] if not stage[0] or finest is None or sides[stage[0]] <= finest]


def _checked(name, array, affine):
    """The volume as float32 in 0 .. 1 and its affine, both in canonical orientation."""
    array, affine = np.asarray(array), np.asarray(affine, np.float64)
    if array.ndim not in (2, 3) or min(array.shape) < 1:
        raise InputError(f"the {name} volume has the shape {array.shape}; give (D, H, W) or (H, W).")
    if not np.isfinite(array).all():
        raise InputError(f"the {name} volume has NaN or infinite voxels; repair it.")
    if array.min() == array.max():
        raise InputError(f"the {name} volume is {array.flat[0]:g} everywhere and cannot be aligned; give another one.")
    lengths = np.linalg.norm(affine[:3, :3], axis=0) if affine.shape == (4, 4) else np.zeros(3)
    if not np.isfinite(affine).all() or lengths.min() == 0 or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-6:
        raise InputError(f"the affine of the {name} volume is singular; repair the header.")
    return to_canonical(rescale(array, float(array.min()), float(array.max())), affine)


def _masked(name, array, affine, mask):
    """A canonical volume, zero where its mask is, and the mask in the same orientation, or None.

    affine: of the volume as it was given, 4x4. mask: 0 .. 1 in the shape of the volume as it was given, or None.
    """
    if mask is None:
        return array, None
    mask = to_canonical(np.asarray(mask, np.float32), np.asarray(affine, np.float64))[0]
    if mask.shape != array.shape:
        raise InputError(f"the {name} mask has the shape {mask.shape}, its volume {array.shape}; give one for it.")
    if not (array * mask > FOREGROUND).any():
        raise InputError(f"the {name} mask shows nothing of its volume; give one that is above 0 where voxels count.")
    return array * mask, mask


def _frame(affine, origin):
    """4x4, frame to world in mm: the orthogonal matrix closest to an affine, and the frame's origin in the world."""
    left, _, right = np.linalg.svd(affine[:3, :3])
    frame = np.eye(4)
    frame[:3, :3] = left @ right
    frame[:3, 3] = origin
    return frame


def _embed(matrix):
    """4x4 of an (N, N + 1) matrix; an axis beyond N is left as it is."""
    dims = len(matrix)
    full = np.eye(4)
    full[:dims, :dims] = matrix[:, :dims]
    full[:dims, 3] = matrix[:, dims]
    return full


def _in_plane(full, dims):
    """(N + 1, N + 1): the rows and columns of a 4x4 that concern the N axes."""
    kept = [*range(dims), 3]
    return full[np.ix_(kept, kept)]


def _moments(array):
    """Centre (N,) and covariance (N, N) of the intensities of the foreground, in voxels."""
    weight = np.where(array > FOREGROUND, array, 0).astype(np.float64)
    weight /= weight.sum()
    dims = array.ndim
    axes = [np.arange(n) for n in array.shape]
    centre, covariance = np.zeros(dims), np.zeros((dims, dims))
    # Sums over all axes but two serve every moment.
    for a, b in itertools.combinations(range(dims), 2):
        plane = weight.sum(tuple(k for k in range(dims) if k not in (a, b)))
        along_a, along_b = plane.sum(1), plane.sum(0)
        centre[a] = along_a @ axes[a]
        centre[b] = along_b @ axes[b]
        from_a, from_b = axes[a] - centre[a], axes[b] - centre[b]
        covariance[a, b] = covariance[b, a] = from_a @ plane @ from_b
        covariance[a, a] = along_a @ from_a ** 2
        covariance[b, b] = along_b @ from_b ** 2
    return centre, covariance


def _starts(fixed, fixed_affine, moving, moving_affine):
    """Maps to start from, (N, N + 1) each from the fixed to the moving frame; and the two frames, 4x4 to the world.

    The starts are: what the headers say; their orientation with the centres of the fields of view, or of the
    intensities, matched; the principal axes of the intensities matched, with all signs that are rotations; and small
    turns about the centre of intensity, for volumes cut off by their field of view, whose moments tell little.
    """
    dims = fixed.ndim
    fixed_frame, fixed_middle, fixed_axes = _place_in_frame(fixed, fixed_affine)
    moving_frame, moving_middle, moving_axes = _place_in_frame(moving, moving_affine)
    header = _in_plane(np.linalg.inv(moving_frame) @ fixed_frame, dims)
    left, _, right = np.linalg.svd(header[:dims, :dims])
    turn = left @ right  # the turn between the headers; in 2D their planes may differ
    no_shift = np.zeros(dims)
    starts = [(turn, header[:dims, dims]), (turn, moving_middle - turn @ fixed_middle), (turn, no_shift)]
    for signs in itertools.product((1.0, -1.0), repeat=dims):
        matched = moving_axes @ np.diag(signs) @ fixed_axes.T
        if np.linalg.det(matched) * np.linalg.det(turn) > 0:
            starts.append((matched, no_shift))
    for (a, b), angle in itertools.product(itertools.combinations(range(dims), 2), (-TURNED, TURNED)):
        turned = np.eye(dims)
        turned[a, a] = turned[b, b] = np.cos(angle)
        turned[a, b] = -np.sin(angle)
        turned[b, a] = np.sin(angle)
        starts.append((turn @ turned, no_shift))
    return [np.column_stack(start) for start in starts], (fixed_frame, moving_frame)


def _place_in_frame(array, affine):
    """The frame of a volume, 4x4 to the world; in it the middle of the field of view (N,) and principal axes (N, N)."""
    dims = array.ndim
    centre, covariance = _moments(array)
    frame = _frame(affine, _to_world(affine, centre))
    to_frame = np.linalg.inv(frame)
    middle = to_frame @ [*_to_world(affine, (np.array(array.shape) - 1) / 2), 1]
    to_frame_axes = (to_frame @ affine)[:dims, :dims]
    axes = np.linalg.eigh(to_frame_axes @ covariance @ to_frame_axes.T)[1]
    return frame, middle[:dims], axes


def _to_world(affine, voxel):
    """The world point (3,) in mm of a voxel (N,)."""
    return (affine @ [*voxel, *[0] * (3 - len(voxel)), 1])[:3]


def _levels(volumes, frames, basis):
    """All levels, coarse to fine, as `_level` makes them, each from the next finer: large volumes are smoothed once.

    volumes: fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine. frames: two 4x4. basis: from `_basis`.
    """
    fixed = volumes[0]
    box = foreground_box(fixed > FOREGROUND).astype(np.float64)
    margin = MARGIN * (box[1] - box[0])
    box = np.stack([np.maximum(box[0] - margin, 0), np.minimum(box[1] + margin, fixed.shape)])
    levels = []
    for side in reversed(SIDES[fixed.ndim]):
        level, volumes = _level(*volumes, box, frames, side)
        box = np.array([[0] * fixed.ndim, volumes[0].shape], np.float64)
        levels.insert(0, {**level, "basis": basis})
    for level in levels:  # a unit of the shift has to mean the same at all of them
        level["extent_mm"] = levels[-1]["extent_mm"]
    return levels


def _level(fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine, box, frames, side):
    """Both volumes smoothed and on isotropic grids, the box of the fixed one about `side` voxels long.

    Returns: dict of what the loss needs; the volumes, masks and affines of this level, in the order of the arguments.
    """
    dims = fixed.ndim
    voxel_mm = np.linalg.norm(fixed_affine[:3, :dims], axis=0)
    moving_voxel_mm = np.linalg.norm(moving_affine[:3, :dims], axis=0)
    extent_mm = voxel_mm * (box[1] - box[0])
    moving_extent_mm = moving_voxel_mm * moving.shape
    spacing_mm = max(min(extent_mm.max() / side, extent_mm.min() / THINNEST), voxel_mm.min())
    # A moving volume that is far larger than the fixed one must not fill the memory.
    moving_spacing_mm = max(spacing_mm, moving_extent_mm.max() / (4 * side), moving_voxel_mm.min())
    ratio = min(moving_extent_mm.prod() / extent_mm.prod(), 1.0)
    fixed, fixed_mask, fixed_affine = _both_to_grid(fixed, fixed_mask, fixed_affine, _size(extent_mm, spacing_mm),
                                                    spacing_mm, box)
    moving, moving_mask, moving_affine = _both_to_grid(moving, moving_mask, moving_affine,
                                                       _size(moving_extent_mm, moving_spacing_mm), moving_spacing_mm)
    # What a mask leaves out is zero in the volume; divided by the mask, smoothed alike, it has not leaked in.
    shown = fixed if fixed_mask is None else fixed / fixed_mask.clip(min=1e-3)
    # Beside the moving intensities its mask, else a volume of ones, which shows what lies outside.
    inside = np.ones_like(moving) if moving_mask is None else moving_mask
    level = {"fixed": torch.from_numpy(shown)[None, None], "spacing_mm": float(f"{spacing_mm:.6g}"),
             "fixed_mask": None if fixed_mask is None else torch.from_numpy(fixed_mask)[None, None],
             "moving": torch.from_numpy(np.stack([moving, inside]))[None],
             "extent_mm": float(extent_mm.max()), "overlap": OVERLAP * ratio * float(inside.mean()),
             "from_fixed": torch.from_numpy(_in_plane(np.linalg.inv(frames[0]) @ fixed_affine, dims)),
             "to_moving": torch.from_numpy(_in_plane(np.linalg.inv(moving_affine) @ frames[1], dims))}
    return level, (fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine)


def _both_to_grid(array, mask, affine, size, spacing_mm, box=None):
    """A volume and its mask or None on another grid, and the affine of that, see `to_grid`."""
    on_grid, new_affine = to_grid(array, affine, size, spacing_mm, box=box)
    return on_grid, None if mask is None else to_grid(mask, affine, size, spacing_mm, box=box)[0], new_affine


def _size(extent_mm, spacing_mm):
    """How many whole voxels an extent holds, per axis, at least one; a rounding error must not cost one."""
    return np.maximum(np.floor(extent_mm / spacing_mm + 1e-3), 1).astype(int)


def _basis(dims, kind):
    """(P, N, N + 1): what each parameter adds to the generator (first N columns) and to the shift (last column)."""
    basis = []
    for a, b in itertools.product(range(dims), repeat=2):
        entry = torch.zeros(dims, dims + 1, dtype=torch.float64)
        entry[a, b] += 1.0
        if kind == "rigid":
            entry[b, a] -= 1.0
        if kind == "affine" or a < b:
            basis.append(entry)
    for a in range(dims):
        entry = torch.zeros(dims, dims + 1, dtype=torch.float64)
        entry[a, dims] = 1.0
        basis.append(entry)
    return torch.stack(basis)


def _matrix(start, parameters, level):
    """The map (N, N + 1) of some parameters (P,), and the norm of its logarithmic strain, a scalar.

    The entries of the generator are angles, logarithms of scales and shears, the shift is a fraction of the longest
    side: numbers of comparable size, about the centre of intensity.
    """
    start = torch.from_numpy(start)
    dims = len(start)
    change = torch.tensordot(parameters, level["basis"], 1)
    generator, shift = change[:, :dims], change[:, dims:]
    strain = (generator + generator.T).square().sum().add(1e-12).sqrt() / 2
    linear = start[:, :dims] @ torch.matrix_exp(generator)
    shift_mm = start[:, dims:] + level["extent_mm"] * shift
    return torch.cat([linear, shift_mm], dim=1), strain


def global_correlation(image, target, weight):
    """Normalised cross-correlation of all voxels under a weight of the same shape. Returns a scalar, -1 .. 1."""
    total = weight.sum().clamp(min=1.0)
    image = image - (weight * image).sum() / total
    target = target - (weight * target).sum() / total
    variances = (weight * image.square()).sum() / total * (weight * target.square()).sum() / total
    return (weight * image * target).sum() / total * (variances + 1e-10).rsqrt()


def _loss(start, parameters, level, similarity):
    """1 - similarity where both volumes count, plus the costs of too much strain and too little overlap; a scalar."""
    matrix, strain = _matrix(start, parameters, level)
    fixed, dims = level["fixed"], len(start)
    change = (level["to_moving"][:dims, :dims] @ matrix @ level["from_fixed"]).clone()
    change[:, dims] += level["to_moving"][:dims, dims]
    sampled = resample(level["moving"], change, fixed.shape[2:])
    weight = sampled[:, 1:]
    warped = sampled[:, :1] / weight.clamp(min=1e-3)
    seen = fixed
    if level["fixed_mask"] is not None:
        weight = weight * level["fixed_mask"]
        seen = fixed * level["fixed_mask"]
    if similarity == "global":
        alike = global_correlation(fixed, warped, weight)
    elif similarity == "local":
        alike = local_correlation(warped, fixed, WINDOW, weight=weight)
    else:
        alike = mutual_information(warped, fixed, weight, bins=min(MOST_BINS, round(fixed.numel() ** (1 / 3))))
    overlap = (weight * fixed).sum() / seen.sum().clamp(min=1e-6)
    # Points outside the moving volume neither help nor hurt, so a map must not be free to leave the volume altogether.
    too_strained = torch.relu(strain - STRAIN) ** 2
    too_far = 4.0 * torch.relu(level["overlap"] - overlap) ** 2
    return 1.0 - alike + too_strained + too_far


def _optimise(start, parameters, level, similarity, iterations):
    """The start and its parameters after some iterations of L-BFGS at one level."""
    parameters = parameters.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([parameters], max_iter=iterations, max_eval=2 * iterations, history_size=12,
                                  tolerance_grad=1e-6, tolerance_change=1e-7, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = _loss(start, parameters, level, similarity)
        loss.backward()
        return loss

    before = parameters.detach().clone()
    optimizer.step(closure)
    # In volumes of a few voxels, which show too little, the parameters can diverge.
    return start, parameters.detach() if bool(parameters.isfinite().all()) else before


@torch.no_grad()
def _best(candidates, count, level, similarity):
    """The `count` best of some (start, parameters), without those that are the same map to within a voxel.

    Of the local similarity those below HOPEFUL are given up too; the best one always stays.
    """
    if len(candidates) == 1:
        return candidates
    scores = [1.0 - float(_loss(start, parameters, level, similarity)) for start, parameters in candidates]
    enough = max(scores) - (1.0 - HOPEFUL) * abs(max(scores))
    half = level["extent_mm"] / 2
    dims = len(candidates[0][0])
    corners = [[*corner, 1.0] for corner in itertools.product((-half, half), repeat=dims)]
    corners = torch.tensor(corners, dtype=torch.float64).T
    kept = []
    for number in sorted(range(len(candidates)), key=lambda number: -scores[number]):
        start, parameters = candidates[number]
        moved = _matrix(start, parameters, level)[0] @ corners
        is_new = all(float((moved - other).norm(dim=0).max()) > level["spacing_mm"] for _, other in kept)
        is_hopeful = similarity == "global" or scores[number] >= enough
        if not kept or (is_new and is_hopeful):
            kept.append((candidates[number], moved))
    return [candidate for candidate, _ in kept[:count]]
