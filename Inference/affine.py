"""The affine stage: an affine or rigid map between two volumes, found on the similarity that the networks train on.

Everything is done in two frames, one for each volume: millimetres along its (orthonormalised) axes from its centre of
intensity. There a map has small numbers whatever the headers say, and 2D and 3D are the same code.
Several starts are compared on a coarse grid, the best are optimised there, and what is left goes on to finer grids.
"""
import itertools

import numpy as np
import torch

from Dataloader.grids import foreground_box, rescale, to_canonical, to_grid
from Diffusion.fields import across, warp
from Diffusion.losses import box_mean
from Runtime.errors import InputError

SIDES = {2: (24, 48, 96, 192), 3: (16, 32, 64, 96)}  # voxels along the longest side, never finer than the volume
# Level, similarity, maps that are carried on, at most, and iterations for each.
STAGES = [(0, "global", 7, 10), (0, "local", 4, 15), (1, "local", 3, 20), (2, "local", 2, 20), (3, "local", 1, 10)]
HOPEFUL = 0.8  # similarity, as a fraction of the best map's, below which a map is given up
WINDOW = 7  # of the local correlation, in voxels of the level
TURNED = np.deg2rad(25.0)  # of the starts that are turned against the headers
FOREGROUND = 0.05  # intensity above which a voxel counts for centre, moments and box
MARGIN = 0.1  # around the foreground of the fixed volume, as a fraction of its box
THINNEST = 4  # voxels that a level has at least along the shortest side
STRAIN = 0.7  # norm of the logarithmic strain that costs nothing: 1.5 times as large along every axis
OVERLAP = 0.5  # part of the fixed intensity that has to fall into the moving volume at no cost


def align_affine(fixed, fixed_affine, moving, moving_affine, kind="affine"):
    """The affine or rigid map that aligns two volumes: where a world point of the fixed one is in the moving one.

    fixed, moving: (D, H, W), or both (H, W), intensities 0 .. 1, of any size, spacing and orientation. Their affines:
    4x4, voxel to world in millimetres, RAS. kind: "affine", or "rigid" (rotation and shift).
    Returns: 4x4 float64, millimetres to millimetres: warped(x) = moving(A_moving^-1 T A_fixed x). In 2D the map stays
    in the planes of the images. The same input gives the same result; the volumes need not overlap.
    Raises InputError for constant or non-finite volumes, singular affines, different numbers of axes, unknown kinds.
    """
    if kind not in ("affine", "rigid"):
        raise InputError(f"the kind of affine alignment is {kind!r}; give affine or rigid.")
    fixed, fixed_affine = _checked("fixed", fixed, fixed_affine)
    moving, moving_affine = _checked("moving", moving, moving_affine)
    if fixed.ndim != moving.ndim:
        raise InputError(f"the fixed volume has {fixed.ndim} axes, the moving one {moving.ndim}; give two of the same "
                         "kind.")
    starts, frames = _starts(fixed, fixed_affine, moving, moving_affine)
    levels = _levels((fixed, fixed_affine, moving, moving_affine), frames, _basis(fixed.ndim, kind))
    none = torch.zeros(len(levels[0]["basis"]), dtype=torch.float64)
    found, done = [(start, none) for start in starts], set()
    for number, similarity, carried, iterations in STAGES:
        level = levels[number]
        if (similarity, level["spacing_mm"]) not in done:
            found = [_optimise(*one, level, similarity, iterations) for one in _best(found, carried, level, similarity)]
            done.add((similarity, level["spacing_mm"]))
    (start, parameters), = _best(found, 1, level, "local")
    matrix = _matrix(start, parameters, level)[0].numpy()
    return frames[1] @ _embed(matrix) @ np.linalg.inv(frames[0])


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


def _frame(affine, origin):
    """4x4, frame to world: the rotation closest to an affine, and the frame's origin in the world."""
    left, _, right = np.linalg.svd(affine[:3, :3])
    frame = np.eye(4)
    frame[:3, :3], frame[:3, 3] = left @ right, origin
    return frame


def _embed(matrix):
    """4x4 of an (N, N + 1) matrix; an axis beyond N stays."""
    dims, full = len(matrix), np.eye(4)
    full[:dims, :dims], full[:dims, 3] = matrix[:, :dims], matrix[:, dims]
    return full


def _in_plane(full, dims):
    """(N + 1, N + 1): the rows and columns of a 4x4 that concern the N axes."""
    kept = [*range(dims), 3]
    return full[np.ix_(kept, kept)]


def _moments(array):
    """Centre (N,) and covariance (N, N) of the intensities of the foreground, in voxels."""
    weight = np.where(array > FOREGROUND, array, 0).astype(np.float64)
    weight /= weight.sum()
    dims, axes = array.ndim, [np.arange(n) for n in array.shape]
    # Sums over all axes but two serve every moment.
    sums = {pair: weight.sum(tuple(k for k in range(dims) if k not in pair))
            for pair in itertools.combinations(range(dims), 2)}
    centre, covariance = np.zeros(dims), np.zeros((dims, dims))
    for (a, b), plane in sums.items():
        along = plane.sum(1), plane.sum(0)
        centre[[a, b]] = along[0] @ axes[a], along[1] @ axes[b]
        from_a, from_b = axes[a] - centre[a], axes[b] - centre[b]
        covariance[a, b] = covariance[b, a] = from_a @ plane @ from_b
        covariance[a, a], covariance[b, b] = along[0] @ from_a ** 2, along[1] @ from_b ** 2
    return centre, covariance


def _starts(fixed, fixed_affine, moving, moving_affine):
    """Maps to start from, (N, N + 1) each from the fixed to the moving frame, and the two frames, 4x4 to the world.

    What the headers say; their orientation with the centres of the fields of view, or of the intensities, matched; and
    the principal axes of the intensities matched, with all signs that are rotations; and small turns about the centre
    of intensity, for volumes cut off by their field of view, whose moments tell little.
    """
    dims, frames, middles, axes = fixed.ndim, [], [], []
    for array, affine in ((fixed, fixed_affine), (moving, moving_affine)):
        centre, covariance = _moments(array)
        centre, middle = [(affine @ [*point, *[0] * (3 - dims), 1])[:3]
                          for point in (centre, (np.array(array.shape) - 1) / 2)]
        frames.append(_frame(affine, centre))
        to_frame = np.linalg.inv(frames[-1])
        middles.append((to_frame @ [*middle, 1])[:dims])
        along = (to_frame @ affine)[:dims, :dims]
        axes.append(np.linalg.eigh(along @ covariance @ along.T)[1])
    header = _in_plane(np.linalg.inv(frames[1]) @ frames[0], dims)
    left, _, right = np.linalg.svd(header[:dims, :dims])
    turn = left @ right  # the turn between the headers; in 2D their planes may differ
    starts = [(turn, header[:dims, dims]), (turn, middles[1] - turn @ middles[0]), (turn, np.zeros(dims))]
    for signs in itertools.product((1.0, -1.0), repeat=dims):
        matched = axes[1] @ np.diag(signs) @ axes[0].T
        if np.linalg.det(matched) * np.linalg.det(turn) > 0:
            starts.append((matched, np.zeros(dims)))
    for (a, b), angle in itertools.product(itertools.combinations(range(dims), 2), (-TURNED, TURNED)):
        turned = np.eye(dims)
        turned[[a, b], [a, b]], turned[a, b], turned[b, a] = np.cos(angle), -np.sin(angle), np.sin(angle)
        starts.append((turn @ turned, np.zeros(dims)))
    return [np.column_stack(start) for start in starts], frames


def _levels(volumes, frames, basis):
    """All levels, coarse to fine. Each is made from the next finer one: large volumes are smoothed only once."""
    fixed = volumes[0]
    box = foreground_box(fixed > FOREGROUND).astype(np.float64)
    margin = MARGIN * (box[1] - box[0])
    box, levels = np.stack([np.maximum(box[0] - margin, 0), np.minimum(box[1] + margin, fixed.shape)]), []
    for side in reversed(SIDES[fixed.ndim]):
        level, volumes = _level(*volumes, box, frames, side)
        box = np.array([[0] * fixed.ndim, volumes[0].shape], np.float64)
        levels.insert(0, {**level, "basis": basis})
    for level in levels:  # a unit of the shift has to mean the same at all of them
        level["extent_mm"] = levels[-1]["extent_mm"]
    return levels


def _level(fixed, fixed_affine, moving, moving_affine, box, frames, side):
    """Both volumes smoothed and on isotropic grids, the box of the fixed one about `side` voxels long.

    Returns: what the loss needs, a dict; and both volumes and affines anew.
    """
    dims = fixed.ndim
    voxel_mm, moving_voxel_mm = [np.linalg.norm(a[:3, :dims], axis=0) for a in (fixed_affine, moving_affine)]
    extent_mm, moving_extent_mm = voxel_mm * (box[1] - box[0]), moving_voxel_mm * moving.shape
    spacing_mm = max(min(extent_mm.max() / side, extent_mm.min() / THINNEST), voxel_mm.min())
    # A moving volume that is far larger than the fixed one must not fill the memory.
    moving_mm = max(spacing_mm, moving_extent_mm.max() / (4 * side), moving_voxel_mm.min())
    size, moving_size = [np.maximum(np.floor(extent / mm + 1e-3), 1).astype(int)
                         for extent, mm in ((extent_mm, spacing_mm), (moving_extent_mm, moving_mm))]
    fixed, fixed_affine = to_grid(fixed, fixed_affine, size, spacing_mm, box=box)
    moving, moving_affine = to_grid(moving, moving_affine, moving_size, moving_mm)
    ratio = min(moving_extent_mm.prod() / extent_mm.prod(), 1.0)
    level = {"fixed": torch.from_numpy(fixed)[None, None], "spacing_mm": float(f"{spacing_mm:.6g}"),
             # Beside the intensities a volume of ones, which tells what is outside.
             "moving": torch.from_numpy(np.stack([moving, np.ones_like(moving)]))[None],
             "extent_mm": float(extent_mm.max()), "overlap": OVERLAP * ratio,
             "from_fixed": torch.from_numpy(_in_plane(np.linalg.inv(frames[0]) @ fixed_affine, dims)),
             "to_moving": torch.from_numpy(_in_plane(np.linalg.inv(moving_affine) @ frames[1], dims))}
    return level, (fixed, fixed_affine, moving, moving_affine)


def _basis(dims, kind):
    """(P, N, N + 1): what each parameter adds to the generator (first N columns) and to the shift (last column)."""
    basis = []
    for a, b in itertools.product(range(dims), repeat=2):
        one = torch.zeros(dims, dims + 1, dtype=torch.float64)
        one[a, b] += 1.0
        if kind == "rigid":
            one[b, a] -= 1.0
        if kind == "affine" or a < b:
            basis.append(one)
    for a in range(dims):
        one = torch.zeros(dims, dims + 1, dtype=torch.float64)
        one[a, dims] = 1.0
        basis.append(one)
    return torch.stack(basis)


def _matrix(start, parameters, level):
    """The map (N, N + 1) of some parameters, and the norm of its logarithmic strain.

    The generator's entries are angles, logarithms of scales and shears, the shift is a fraction of the longest side:
    numbers of comparable size, about the centre of intensity.
    """
    start, dims = torch.from_numpy(start), len(start)
    change = torch.tensordot(parameters, level["basis"], 1)
    generator, shift = change[:, :dims], change[:, dims:]
    strain = (generator + generator.T).square().sum().add(1e-12).sqrt() / 2
    return torch.cat([start[:, :dims] @ torch.matrix_exp(generator),
                      start[:, dims:] + level["extent_mm"] * shift], dim=1), strain


def global_correlation(image, target, weight):
    """Normalised cross-correlation of all voxels under a weight of the same shape. Returns a scalar, -1 .. 1."""
    total = weight.sum().clamp(min=1.0)
    image = image - (weight * image).sum() / total
    target = target - (weight * target).sum() / total
    variances = (weight * image.square()).sum() / total * (weight * target.square()).sum() / total
    return (weight * image * target).sum() / total * (variances + 1e-10).rsqrt()


def weighted_correlation(image, target, weight, window=WINDOW):
    """Squared local correlation as in `losses.local_correlation`, of the voxels that a weight of 0 .. 1 lets in.

    image, target, weight: (B, 1, *spatial). Returns a scalar, 0 .. 1, the weighted mean over the voxels.
    """
    count = box_mean(weight, window).clamp(min=1e-4)
    means = [box_mean(weight * x, window) / count for x in (image, target)]
    variances = [(box_mean(weight * x * x, window) / count - mean * mean).clamp(min=0.0)
                 for x, mean in zip((image, target), means)]
    covariance = box_mean(weight * image * target, window) / count - means[0] * means[1]
    squared = covariance.square() / (variances[0] * variances[1] + 1e-10)
    return (weight * squared).sum() / weight.sum().clamp(min=1.0)


def _loss(start, parameters, level, similarity):
    """1 - similarity where the volumes overlap, plus what too much strain and too little overlap cost."""
    matrix, strain = _matrix(start, parameters, level)
    fixed, dims = level["fixed"], len(start)
    change = (level["to_moving"][:dims, :dims] @ matrix @ level["from_fixed"]).clone()
    change[:, dims] += level["to_moving"][:dims, dims]
    seen = warp(level["moving"], across(torch.zeros(1, dims, *fixed.shape[2:]), change))
    weight = seen[:, 1:]
    warped = seen[:, :1] / weight.clamp(min=1e-3)
    score = (global_correlation if similarity == "global" else weighted_correlation)(fixed, warped, weight)
    overlap = (weight * fixed).sum() / fixed.sum().clamp(min=1e-6)
    # Outside the moving volume nothing is known, so it neither helps nor hurts; but a map must not leave it altogether.
    return 1.0 - score + torch.relu(strain - STRAIN) ** 2 + 4.0 * torch.relu(level["overlap"] - overlap) ** 2


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
    # Where nothing is to be seen, as in volumes of a few voxels, the numbers can run away.
    return start, parameters.detach() if bool(parameters.isfinite().all()) else before


@torch.no_grad()
def _best(found, count, level, similarity):
    """The `count` best of some (start, parameters), without those that are the same map to within a voxel."""
    if len(found) == 1:
        return found
    scores = [1.0 - float(_loss(*one, level, similarity)) for one in found]
    enough = max(scores) - (1.0 - HOPEFUL) * abs(max(scores))
    half = level["extent_mm"] / 2
    corners = torch.tensor([[*corner, 1.0] for corner in itertools.product((-half, half), repeat=len(found[0][0]))],
                           dtype=torch.float64).T
    kept = []
    for k in sorted(range(len(found)), key=lambda k: -scores[k]):
        moved = _matrix(*found[k], level)[0] @ corners
        new = all(float((moved - other).norm(dim=0).max()) > level["spacing_mm"] for _, other in kept)
        if not kept or new and (similarity == "global" or scores[k] >= enough):
            kept.append((found[k], moved))
    return [one for one, _ in kept[:count]]
