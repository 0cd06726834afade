"""The affine stage: an affine or rigid map between two volumes, by the similarity that the networks train on.

Multi-start optimisation. On a coarse grid it tries evenly spread rotations, each with the scale from the headers and
with the scale from the moments of the volumes, in case a header has lost orientation or spacing. The quick correlation
of all voxels selects candidates. The local correlation ranks them: it separates the true map from the others even on
this grid. Adam optimises the best maps and the best start of the headers together; L-BFGS then refines the best of
these on finer grids. A map is its start times the matrix exponential of a generator, so the parameters of rotation,
scale and shear have similar magnitudes.

Each map leads from the fixed to the moving frame. The frame of a volume is in millimetres along its (orthonormalised)
axes from its centre of intensity, so a map has small entries whatever the headers contain. 2D and 3D share the code.
"""
import itertools

import numpy as np
import torch
from scipy import optimize
from scipy.spatial.transform import Rotation

from Dataloader.grids import foreground_box, is_singular, rescale, to_canonical, to_grid
from Diffusion import graphs
from Diffusion.fields import identity, warp
from Diffusion.losses import (
    OF_TWO_MODALITIES,
    box_mean,
    counted_means,
    local_correlation_map,
    mind_similarity,
    mutual_information,
    self_similarity,
    weighted_variance,
)
from Runtime.errors import InputError

SIDES = {2: (24, 48, 96, 192), 3: (16, 32, 64, 96)}  # voxels along the longest side, never finer than the volume
# (level, similarity, most maps to keep, iterations for each map), for one modality and for two. Of the measures for
# two, only mutual information does not depend on a volume's orientation.
STAGES = [(1, "local", 8, 10), (2, "local", 1, 20), (3, "local", 1, 20)]
STAGES_OF_TWO = [(1, "mutual", 4, 20), (2, "mutual", 2, 20), (3, "mutual", 1, 10)]
TURNS = {"local": 500, "mutual": 100}  # rotations tried in 3D; neighbours are about 20 and 35 degrees apart
TURNS_2D = 24
SIFTED = 400  # maps that the correlation of all voxels passes on to the local correlation
MOST_AT_ONCE = 2 ** 22  # voxels sampled at once while maps are tried
TRIED = {"local": 12, "mutual": 6}  # maps optimised at the coarsest level
MIRRORS = 6  # of a mirrored moving volume, to see whether left and right are swapped
STEPS, STEP = 25, 0.03  # of Adam at the coarsest level
HOPEFUL = 0.8  # a map with less than this fraction of the best map's similarity is dropped
WINDOW = 7  # of the local correlation, in voxels of the level
FLAT = 1e-4  # local intensity variance; a window with no more is too flat to compare, as in local_correlation
FOREGROUND = 0.05  # intensity above which a voxel counts for centre, moments and box
MARGIN = 0.1  # around the foreground of the fixed volume, as a fraction of its box
THINNEST = 4  # fewest voxels of a level along the shortest side
# Norm of the logarithmic strain above which it is penalised; 0.7 is 1.5 times as large along every axis. Mutual
# information gains from squeezing one volume into a bright part of the other, so there every strain is penalised.
STRAIN = {"local": 0.7, "mutual": 0.0}
OTHER_SIZE = 1.5  # ratio of sizes above which the moments are trusted instead of the headers
SLAB = 0.5  # of the fullest plane; if both outermost planes along an axis show more, the field of view cuts there
APART = 4  # voxels of the coarsest level; two maps further apart count as different answers
MOST_BINS = 32  # of the joint histogram; small volumes get fewer, because their voxels would not fill it
NEAR = 75.0  # degrees; a map that turns less from the headers agrees with their orientation
# A map that turns further must close this share of the best near map's gap to perfect similarity; one that turns less,
# a part of it that grows with the square of the turn.
LEAP = 0.2
USUAL = 30.0  # degrees, the turn of a patient in the scanner; no map is dropped for less
# The same for a map far from the headers against the best start, by the similarity of structures, if two modalities
# are suspected. True maps far from the headers close 0.6 to 0.86 of the gap, wrong ones up to 0.31. A map near them
# must close BETTER: noise leaves little of the gap to close.
LEAP_OF_TWO = 0.45
# The same for a map that turns by NEAR and scales an axis by OTHER_SIZE: a squeezed volume can hide in a part of the
# other one. Of twelve true ones the lowest closes 0.61; the one that squeezed an MR into an ultrasound volume, 0.52.
LEAP_OF_BOTH = 0.57
BETTER = 0.02  # another map must close this share of the header map's gap to perfect similarity
LEAST_GAIN = 0.001  # and must gain at least this: rounding leaves two equal volumes at 0.999
ONE_SIGN = 0.87  # two volumes count as one modality if this share of the correlation in all windows has one sign
COMPARED = 2  # level on which structures are compared
# A map whose shift differs from that of the headers by ASIDE of the fixed volume's longest side or more must close
# this share of the gap to perfect similarity of a map nearer to them; a smaller shift, a proportional part.
STEP_ASIDE, ASIDE = 0.05, 0.15
ROUNDED = 0.01  # added to each gap: of two nearly perfect maps, neither is much nearer to perfect similarity
TRUSTED = 0.4  # least part of the attainable share that the headers must show to be trusted to limit it


@torch.no_grad()
def align_affine(fixed, fixed_affine, moving, moving_affine, kind="affine", similarity="correlation", fixed_mask=None,
                 moving_mask=None, finest=None, device="cpu", recorded="auto"):
    """The affine or rigid map T that aligns two volumes, from world points of the fixed one to the moving one.

    fixed, moving: (D, H, W), or both (H, W), intensities 0 .. 1, of any size, spacing and orientation; they need not
    overlap. fixed_affine, moving_affine: 4x4, voxel to world in millimetres, RAS. kind: "affine", or "rigid" (rotation
    and shift). similarity: "correlation"; "mapped" or "mind" for two modalities: mutual information finds the map and
    the similarity of structures judges it; "auto": correlation, then "mind" if that shows two modalities.
    fixed_mask, moving_mask: 0 .. 1 in the shape of the volume, the weight of each voxel; None for equal weights.
    finest: most voxels along the longest side; finer levels are skipped, except the first. None: no level is skipped.
    device: where volumes are sampled and compared; it must support float64. The maps stay on the CPU. recorded:
    run.graphs, see Diffusion/graphs.py.
    Returns: T, 4x4 float64, millimetres to millimetres: warped(x) = moving(A_moving^-1 T A_fixed x). In 2D the map
    stays in the planes of the images. The same input gives the same result. T never mirrors unless the headers do.
    Also a dict that shows how far to trust T: affine_similarity, at the finest level, with 0 for each voxel of the
    fixed volume outside the moving one; affine_similarity_before, as the headers place the volumes; affine_runner_up,
    the similarity of the best other candidate as a fraction of T's, at the first level with several candidates, else
    0; one_sign and mirror_gain, see `_one_sign` and `_mirror_gain`, None with a similarity for two modalities.
    Raises InputError for constant or non-finite volumes, singular affines, different numbers of axes, unknown kinds.
    """
    if kind not in ("affine", "rigid"):
        raise InputError(f"the kind of affine alignment is {kind!r}; give affine or rigid.")
    fixed, fixed_mask, fixed_affine = _checked("fixed", fixed, fixed_mask, fixed_affine)
    moving, moving_mask, moving_affine = _checked("moving", moving, moving_mask, moving_affine)
    if fixed.ndim != moving.ndim:
        raise InputError(f"the fixed volume has {fixed.ndim} axes and the moving one {moving.ndim}; give two with "
                         "the same number.")
    dims = fixed.ndim
    fixed_frame, fixed_middle, fixed_shape = _frame("fixed", fixed, fixed_affine)
    moving_frame, moving_middle, moving_shape = _frame("moving", moving, moving_affine)
    frames, shapes = (fixed_frame, moving_frame), (fixed_shape, moving_shape)
    header = _in_plane(np.linalg.inv(moving_frame) @ fixed_frame, dims)
    left, _, right = np.linalg.svd(header[:dims, :dims])
    turn = left @ right  # the turn between the headers; in 2D their planes may differ a little
    # From the fixed to the moving frame: as the headers say, and their orientation with the centres of the fields of
    # view, or of the intensities, matched.
    shifts = header[:dims, dims], moving_middle - turn @ fixed_middle, np.zeros(dims)
    starts = [np.column_stack([turn, shift]) for shift in shifts]
    size_ratio = _size_ratio(shapes, (fixed, moving))

    def search(kind, stages):
        levels = _levels(fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine, frames,
                         _basis(dims, kind), size_ratio if kind == "affine" else 1.0, device, recorded)
        shown = _as_headers_show(levels, starts[0])
        result = _search(shown, starts, shapes, kind, stages, finest)
        if shown is not levels and not _is_near(result[0].numpy(), starts[0], levels[0]["extent_mm"]):
            result = _search(levels, starts, shapes, kind, stages, finest)  # the headers are wrong, and so is the share
        return (*result, levels)

    found = one_sign = gain = None
    if similarity not in OF_TWO_MODALITIES:
        found = search(kind, STAGES)
        one_sign, gain = _one_sign(found), _mirror_gain(found, starts[0])
    if found is None or (similarity == "auto" and (one_sign < ONE_SIGN or _leads_astray(found, starts))):
        others = [search(each, STAGES_OF_TWO) for each in dict.fromkeys(("rigid", kind))]
        if one_sign is not None and one_sign >= ONE_SIGN:
            others.append(found)
        # A user who names the measure has decided that mutual information suits the pair.
        leap = LEAP_OF_TWO if similarity == "auto" else 0.0
        found = _by_structures(others, starts, leap, leap if one_sign is None or one_sign >= ONE_SIGN else BETTER)
        one_sign = _one_sign(found) if similarity == "auto" else None
    matrix, scores, _ = found
    full = np.eye(4)
    full[:dims, [*range(dims), 3]] = matrix
    return moving_frame @ full @ np.linalg.inv(fixed_frame), {**scores, "one_sign": one_sign, "mirror_gain": gain}


# ---------------------------------------------------------------------------------------------------------------------
# What is compared: the volumes, their frames, and both on the grids of all levels
# ---------------------------------------------------------------------------------------------------------------------

def _checked(name, array, mask, affine):
    """The volume as float32 in 0 .. 1, times its mask; the mask or None; the affine; all canonical."""
    array, affine = np.asarray(array), np.asarray(affine, np.float64)
    if array.ndim not in (2, 3) or min(array.shape) < 1:
        raise InputError(f"the {name} volume has the shape {array.shape}; give (D, H, W) or (H, W).")
    if not np.isfinite(array).all():
        raise InputError(f"the {name} volume has NaN or infinite voxels; repair it.")
    if array.min() == array.max():
        raise InputError(f"the {name} volume is {array.flat[0]:g} everywhere and cannot be aligned; give another "
                         "volume.")
    if is_singular(affine):
        raise InputError(f"the affine of the {name} volume is singular; repair the header.")
    counted = array if mask is None or np.shape(mask) != array.shape else array[np.asarray(mask) > 0]
    limits = (float(counted.min()), float(counted.max())) if counted.size else (0.0, 0.0)
    array, canonical_affine = to_canonical(rescale(array, *limits), affine)
    if mask is None:
        return array, None, canonical_affine
    mask = to_canonical(np.asarray(mask, np.float32), affine)[0]
    if mask.shape != array.shape:
        raise InputError(f"the {name} mask has the shape {mask.shape}, but its volume has {array.shape}; give a "
                         "mask of that shape.")
    if not (array * mask > FOREGROUND).any():
        raise InputError(f"the {name} mask excludes its whole volume; give one that is above 0 where voxels should "
                         "count.")
    return array * mask, mask, canonical_affine


def _frame(name, array, affine):
    """The frame of a volume, 4x4 to the world: the orthogonal matrix closest to its affine, about its centre.

    The centre is the foreground's centre of intensity.
    Returns: the frame; the middle of the field of view (N,) and the covariance of the intensities (N, N), mm^2, in it.
    """
    dims = array.ndim
    weight = np.where(array > FOREGROUND, array, 0).astype(np.float64)
    weight /= weight.sum()
    axes = [np.arange(n) for n in array.shape]
    centre, covariance = np.zeros(dims), np.zeros((dims, dims))
    # Sums over all axes but two are enough for every moment.
    for a, b in itertools.combinations(range(dims), 2):
        plane = weight.sum(tuple(k for k in range(dims) if k not in (a, b)))
        along_a, along_b = plane.sum(1), plane.sum(0)
        centre[a] = along_a @ axes[a]
        centre[b] = along_b @ axes[b]
        from_a, from_b = axes[a] - centre[a], axes[b] - centre[b]
        covariance[a, b] = covariance[b, a] = from_a @ plane @ from_b
        covariance[a, a] = along_a @ from_a ** 2
        covariance[b, b] = along_b @ from_b ** 2

    def in_world(voxel):
        return affine @ [*voxel, *[0] * (3 - dims), 1]

    if np.linalg.eigvalsh(covariance).min() < 1e-3:  # voxels^2
        raise InputError(f"the {name} volume shows something in a single plane only and cannot be aligned: use "
                         "--affine none or, if it has a mask, a thicker one.")
    left, _, right = np.linalg.svd(affine[:3, :3])
    frame = np.eye(4)
    frame[:3, :3] = left @ right
    frame[:3, 3] = in_world(centre)[:3]
    to_frame = np.linalg.inv(frame)
    middle = to_frame @ [*in_world((np.array(array.shape) - 1) / 2)[:3], 1]
    to_frame_axes = (to_frame @ affine)[:dims, :dims]
    return frame, middle[:dims], to_frame_axes @ covariance @ to_frame_axes.T


def _in_plane(full, dims):
    """(N + 1, N + 1): the rows and columns of a 4x4 that concern the N axes."""
    kept = [*range(dims), 3]
    return full[np.ix_(kept, kept)]


def _size_ratio(shapes, volumes):
    """Size of the moving volume over that of the fixed one, by their moments; 1 if they differ less than OTHER_SIZE.

    Smaller differences are unreliable, because fields of view cut volumes off. The same holds for a part of what the
    other volume shows, cut at both ends of more axes: a slab that is as wide, or a box, cut along all axes of a whole.
    shapes: the covariances of both volumes.
    """
    ratio = float(np.exp(np.subtract(*(np.linalg.slogdet(shape)[1] for shape in shapes[::-1])) / (2 * len(shapes[0]))))
    if max(ratio, 1 / ratio) <= OTHER_SIZE:
        return 1.0
    smaller, larger = (1, 0) if ratio < 1 else (0, 1)
    widths = [np.linalg.eigvalsh(shape)[-1] ** 0.5 for shape in shapes]
    cut, other_cut = _cut_axes(volumes[smaller]), _cut_axes(volumes[larger])
    is_slab = cut > other_cut and widths[larger] <= OTHER_SIZE * widths[smaller]
    is_box = cut == volumes[smaller].ndim and not other_cut
    return 1.0 if is_slab or is_box else ratio


def _cut_axes(volume):
    """Along how many axes the field of view cuts both ends of what a volume shows."""
    shown = np.where(volume > FOREGROUND, volume, 0)
    planes = [shown.sum(tuple(k for k in range(volume.ndim) if k != axis)) for axis in range(volume.ndim)]
    return sum(min(each[0], each[-1]) > SLAB * each.max() for each in planes)


def _levels(fixed, fixed_mask, fixed_affine, moving, moving_mask, moving_affine, frames, basis, size_ratio, device,
            recorded):
    """Both volumes on the isotropic grids of all levels, coarse to fine.

    Each level is made from the next finer one, so large volumes are smoothed only once. The box of the fixed foreground
    is about SIDES voxels long. frames: two 4x4. device: for the volumes and masks. recorded: of `align_affine`.
    Returns: a list of dicts with what the loss needs.
    """
    dims, levels = fixed.ndim, []
    box = foreground_box(fixed > FOREGROUND).astype(np.float64)
    margin = MARGIN * (box[1] - box[0])
    box = np.stack([np.maximum(box[0] - margin, 0), np.minimum(box[1] + margin, fixed.shape)])
    for side in reversed(SIDES[dims]):
        voxel_mm = np.linalg.norm(fixed_affine[:3, :dims], axis=0)
        moving_voxel_mm = np.linalg.norm(moving_affine[:3, :dims], axis=0)
        extent_mm = voxel_mm * (box[1] - box[0])
        moving_extent_mm = moving_voxel_mm * moving.shape
        spacing_mm = max(min(extent_mm.max() / side, extent_mm.min() / THINNEST), voxel_mm.min())
        # A moving volume that is far larger than the fixed one must not fill the memory.
        moving_spacing_mm = max(size_ratio * spacing_mm, moving_extent_mm.max() / (4 * side), moving_voxel_mm.min())
        ratio = min((moving_extent_mm / size_ratio).prod() / extent_mm.prod(), 1.0)
        fixed, fixed_mask, fixed_affine = _onto_grid(fixed, fixed_mask, fixed_affine, extent_mm, spacing_mm, box)
        moving, moving_mask, moving_affine = _onto_grid(moving, moving_mask, moving_affine, moving_extent_mm,
                                                        moving_spacing_mm)
        box = np.array([[0] * dims, fixed.shape], np.float64)
        # The volume is zero outside its mask. Dividing by the equally smoothed mask removes the zeros that leaked in.
        shown = torch.from_numpy(fixed if fixed_mask is None else fixed / fixed_mask.clip(min=1e-3))[None, None]
        weight = torch.ones_like(shown) if fixed_mask is None else torch.from_numpy(fixed_mask)[None, None]
        count = box_mean(weight, WINDOW).clamp(min=1e-4)
        mean = box_mean(weight * shown, WINDOW) / count
        textured = weight * (weighted_variance(shown, mean, weight, count, WINDOW) > FLAT)
        # The second channel shows what lies outside the moving volume: its mask, else ones.
        inside = np.ones_like(moving) if moving_mask is None else moving_mask
        levels.append({
            "fixed": shown.to(device), "fixed_mask": None if fixed_mask is None else weight.to(device),
            "moving": torch.from_numpy(np.stack([moving, inside]))[None].to(device),
            # Flat windows correlate with nothing, so only the others count.
            "textured": (textured if textured.any() else weight).to(device),
            "attainable": ratio * float(inside.mean()), "basis": basis, "spacing_mm": float(f"{spacing_mm:.6g}"),
            "graphs": graphs.graphs_on(torch.device(device), recorded, graphs.IN_NO_PAIR),
            # From the finest level, so that a unit of the shift means the same at all levels.
            "extent_mm": levels[0]["extent_mm"] if levels else float(extent_mm.max()),
            "from_fixed": torch.from_numpy(_in_plane(np.linalg.inv(frames[0]) @ fixed_affine, dims)),
            "to_moving": torch.from_numpy(_in_plane(np.linalg.inv(moving_affine) @ frames[1], dims))})
    return levels[::-1]


def _onto_grid(array, mask, affine, extent_mm, spacing_mm, box=None):
    """A volume and its mask (or None) on a grid that covers an extent, and the affine of that grid; see `to_grid`."""
    size = np.maximum(np.floor(extent_mm / spacing_mm + 1e-3), 1).astype(int)  # a rounding error must not cost a voxel
    on_grid, new_affine = to_grid(array, affine, size, spacing_mm, box=box)
    return on_grid, None if mask is None else to_grid(mask, affine, size, spacing_mm, box=box)[0], new_affine


# ---------------------------------------------------------------------------------------------------------------------
# Maps, and how alike the volumes are under them
# ---------------------------------------------------------------------------------------------------------------------

def _basis(dims, kind):
    """(P, N, N + 1): what each parameter adds to the generator (first N columns) and to the shift (last column)."""
    pairs = [(a, b) for a in range(dims) for b in range(dims) if kind == "affine" or a < b]
    basis = torch.zeros(len(pairs) + dims, dims, dims + 1, dtype=torch.float64)
    for number, (a, b) in enumerate(pairs):
        basis[number, a, b] = 1.0
        if kind == "rigid":
            basis[number, b, a] = -1.0
    for axis in range(dims):
        basis[len(pairs) + axis, axis, dims] = 1.0
    return basis


def _matrix(start, parameters, level):
    """The maps (.., N, N + 1) of some parameters (.., P), and the norms (..,) of their logarithmic strains.

    The parameters have similar magnitudes. The entries of the generator are angles, logarithms of scales and shears
    about the centre of intensity; the shift is a fraction of the longest side. start: (.., N, N + 1).
    """
    dims = start.shape[-2]
    change = torch.tensordot(parameters, level["basis"], 1)
    generator, shift = change[..., :dims], change[..., dims:]
    strain = (generator + generator.mT).square().sum((-2, -1)).add(1e-12).sqrt() / 2
    linear = start[..., :dims] @ torch.matrix_exp(generator)
    shift_mm = start[..., dims:] + level["extent_mm"] * shift
    return torch.cat([linear, shift_mm], dim=-1), strain


def _in_voxels(maps, level):
    """Maps (B, N, N + 1) as they lead from voxels of a level's fixed grid to those of its moving one; float32."""
    dims = maps.shape[1]
    linear = level["to_moving"][:dims, :dims] @ maps @ level["from_fixed"]
    shift = linear[:, :, dims:] + level["to_moving"][:dims, dims:]
    return torch.cat([linear[:, :, :dims], shift], dim=2).float()


def _shown(voxel_maps, level):
    """The moving image on a level's fixed grid, and its voxel weights: (B, 1, *fixed) each.

    voxel_maps: from `_in_voxels`.
    """
    count, dims = voxel_maps.shape[:2]
    size, device = level["fixed"].shape[2:], level["fixed"].device
    voxel_maps, points = voxel_maps.to(device), identity(size, device).flatten(2)[0]         # (B, N, N + 1), (N, V)
    there = (voxel_maps[:, :, :dims] @ points + voxel_maps[:, :, dims:]).movedim(1, 0)               # (N, B, V)
    grid = (count * size[0], *size[1:])  # all maps in one call, stacked along the first axis
    sampled = warp(level["moving"], there.reshape(1, dims, *grid) - identity(grid, device)).reshape(2, count, 1, *size)
    weight = sampled[1] if level["fixed_mask"] is None else sampled[1] * level["fixed_mask"]
    return sampled[0] / sampled[1].clamp(min=1e-3), weight


def _alike(voxel_maps, level, similarity):
    """The similarity (B,) of the volumes under maps from `_in_voxels`, times the share of them that can be compared."""
    alike, share = _compared(voxel_maps, level, similarity)
    # A mean over the overlap grows when dissimilar voxels leave the moving volume. Times the share of the comparable
    # voxels inside the moving volume, of the most that can be inside, it is a sum over one fixed set of voxels.
    return alike * (share / level["attainable"]).clamp(max=1.0)


def _alike_and_slope(voxel_maps, level, similarity):
    """What `_alike` returns and its gradient with respect to the maps, in one tensor (B + B N (N + 1),)."""
    with torch.enable_grad():
        voxel_maps = voxel_maps.detach().requires_grad_()
        alike = _alike(voxel_maps, level, similarity)
        slope = torch.autograd.grad(alike.sum(), voxel_maps)[0]
    return torch.cat([alike.detach(), slope.flatten()])


def _compared(voxel_maps, level, similarity):
    """The similarity (B,) of the volumes under maps from `_in_voxels` where they overlap, and their `_share`."""
    warped, weight = _shown(voxel_maps, level)
    fixed = level["fixed"].expand_as(warped)
    if similarity == "global":
        alike = global_correlation(fixed, warped, weight)
    elif similarity == "local":
        values, counted = local_correlation_map(warped, fixed, WINDOW, weight=weight)
        alike = counted_means(values, weight * counted)
    else:
        bins = min(MOST_BINS, round(level["fixed"].numel() ** (1 / 3)))
        alike = torch.stack([mutual_information(image, target, count, bins)
                             for image, target, count in zip(warped, fixed, weight)])
    return alike, _share(weight, level)


def _share(weight, level):
    """The share of a level's comparable voxels that maps show, (B,). weight: (B, 1, *fixed), from `_shown`."""
    return (weight * level["textured"]).flatten(1).sum(1) / level["textured"].sum()


def _as_headers_show(levels, header):
    """Levels whose attainable share is limited to what the headers' map (N, N + 1) shows; unchanged if that is little.

    If the fields of view overlap only in part, a map must not gain by showing more than true headers do: it could shift
    to the next vertebra, or squeeze an axis.
    """
    level = levels[COMPARED]
    share = float(_share(_shown(_in_voxels(torch.from_numpy(header)[None], level), level)[1], level))
    if not TRUSTED * level["attainable"] <= share < level["attainable"]:
        return levels
    return [{**level, "attainable": min(level["attainable"], share)} for level in levels]


def _is_near(found, header, extent_mm):
    """Whether a map (N, N + 1) shifts and turns little from that of the headers, which then were about right."""
    dims = len(header)
    shift_mm = np.linalg.norm(found[:, dims] - header[:, dims])
    return shift_mm < ASIDE * extent_mm and _turn(found[:, :dims] @ np.linalg.inv(header[:, :dims])) < USUAL


def global_correlation(image, target, weight):
    """Normalised cross-correlation of all voxels of each sample, (B,). image, target, weight: (B, 1, *spatial)."""
    image, target, weight = (each.flatten(1) for each in (image, target, weight))
    total = weight.sum(1, keepdim=True).clamp(min=1.0)
    image = image - (weight * image).sum(1, keepdim=True) / total
    target = target - (weight * target).sum(1, keepdim=True) / total
    covariance, image_variance, target_variance = ((weight * a * b).sum(1) / total[:, 0] for a, b in (
        (image, target), (image, image), (target, target)))
    return covariance * (image_variance * target_variance + 1e-10).rsqrt()


def _penalty(strain, similarity):
    """What is added to 1 - similarity for too much strain, (B,)."""
    return torch.relu(strain - STRAIN[similarity]) ** 2


def _slope(starts, parameters, level, similarity):
    """The sum over some maps of 1 - similarity + penalty, and its gradient with respect to their parameters (B, P)."""
    with torch.enable_grad():
        parameters = parameters.detach().requires_grad_()
        maps, strain = _matrix(starts, parameters, level)
        maps, penalty = _in_voxels(maps, level), _penalty(strain, similarity)
        # A graph holds what is attainable as a number, so a batch with another one must not replay it.
        found = graphs.run(level["graphs"], f"a comparison of the affine part ({similarity})",
                           lambda given: _alike_and_slope(given["maps"], level, similarity),
                           {"maps": maps.detach().to(level["fixed"].device), "attainable": level["attainable"]}).cpu()
        alike, slope = found[:len(maps)], found[len(maps):].view_as(maps).to(maps.dtype)
        gradient, = torch.autograd.grad([maps, penalty], parameters, [-slope, torch.ones_like(penalty)])
    return (1.0 - alike + penalty.detach()).sum(), gradient


def _scores(candidates, level, similarity):
    """Similarity minus penalty, at most 1: a float for each (start, parameters)."""
    scores = []
    for start, parameters in candidates:
        maps, strain = _matrix(start[None], parameters[None], level)
        alike = _alike(_in_voxels(maps, level), level, similarity).cpu()
        scores.append(1.0 - float(1.0 - alike + _penalty(strain, similarity)))
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------------------------------

def _search(levels, starts, shapes, kind, stages, finest):
    """The best map (N, N + 1) of a kind, and the scores that `align_affine` returns.

    levels: from `_levels`. starts: maps (N, N + 1), the headers' map first. shapes: the covariances.
    """
    first, *finer = stages
    sides, measure = SIDES[len(shapes[0])], first[1]
    tried = torch.from_numpy(np.stack([*starts, *_turned(starts[0], shapes, kind, TURNS[measure])]))
    candidates = _together(_first(tried, len(starts), levels[0], measure), levels[0], measure)
    header, done, runner_up = tried[0], set(), None
    for number, measure, count, iterations in (
            first, *(stage for stage in finer if finest is None or sides[stage[0]] <= finest)):
        level = levels[number]
        if (measure, level["spacing_mm"]) in done:
            continue  # a small volume may have equal levels; the best map is already optimised at this one
        best = (_nearest(candidates, header, level) if count == 1 and measure == "local" else
                _best(candidates, count, level, measure))
        if runner_up is None and min(_turns(best, header, level)) >= NEAR:
            near = [candidate for candidate, turn in zip(candidates, _turns(candidates, header, level)) if turn < NEAR]
            best = [*best, *_best(near, 1, level, measure)] if near else best
        candidates = [_optimise(start, parameters, level, measure, iterations) for start, parameters in best]
        if count == 1:
            done.add((measure, level["spacing_mm"]))
        if runner_up is None:
            scores = [score for score, _ in _ranked(candidates, level, measure, APART * levels[0]["spacing_mm"])]
            runner_up = scores[1] / max(scores[0], 1e-6) if len(scores) > 1 else 0.0
            candidates = _worth_their_turn(candidates, header, level, measure)
    (start, parameters), = _best(candidates, 1, level, measure)
    found = _matrix(start, parameters, level)[0]
    alike, share = _compared(_in_voxels(torch.stack([header, found]), level), level, measure)
    before, after = (alike * (share / level["attainable"]).clamp(max=1.0)).tolist()
    is_better = after > before + max(BETTER * (1.0 - before), LEAST_GAIN)
    # Over the same voxels of the fixed grid; a voxel that maps outside the moving volume counts as 0.
    before, after = (alike * share.clamp(max=1.0)).tolist()
    return found if is_better else header, {"affine_similarity": after if is_better else before,
                                            "affine_similarity_before": before, "affine_runner_up": runner_up}


def _turned(header, shapes, kind, count):
    """Maps (N, N + 1) that match the centres of intensity under evenly spread rotations, mirrored as the headers say.

    Rotations that match the principal axes are added. The maps take their scale from the headers. If kind is "affine",
    further maps match the moments of the volumes, with one scale or with one for each axis; the latter, with the right
    rotation, is any affine map between two equal volumes. They help when headers are wrong.
    """
    dims = len(shapes[0])
    (fixed_values, fixed_axes), (moving_values, moving_axes) = (np.linalg.eigh(shape) for shape in shapes)
    principal = [moving_axes @ np.diag(signs) @ fixed_axes.T for signs in itertools.product((1.0, -1.0), repeat=dims)]
    mirrors = np.linalg.det(header[:, :dims])
    turns = np.stack([*(header[:, :dims] @ all_turns(count if dims == 3 else TURNS_2D, dims)),
                      *(turn for turn in principal if np.linalg.det(turn) * mirrors > 0)])
    linear = [turns]
    if kind == "affine":
        fixed_root, moving_root = (axes @ np.diag(np.sqrt(np.maximum(values, 1e-6 * values.max()))) @ axes.T
                                   for values, axes in ((fixed_values, fixed_axes), (moving_values, moving_axes)))
        size = np.exp(np.subtract(*(np.linalg.slogdet(root)[1] for root in (moving_root, fixed_root))) / dims)
        linear += [size * turns, moving_root @ turns @ np.linalg.inv(fixed_root)]
    linear = np.concatenate(linear)
    return np.concatenate([linear, np.zeros((len(linear), dims, 1))], axis=2)


def all_turns(count, dims):
    """Rotation matrices (count, dims, dims), evenly spread and always the same.

    In 3D they are super-Fibonacci spirals (Alexa, CVPR 2022): quaternions along a spiral whose two angles advance by
    irrational fractions of a turn.
    """
    if dims == 2:
        angle = 2 * np.pi * np.arange(count) / count
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    place = np.arange(count) + 0.5
    first, second = 2 * np.pi * place / 2 ** 0.5, 2 * np.pi * place / 1.533751168755204288
    inner, outer = np.sqrt(place / count), np.sqrt(1 - place / count)
    quaternions = [inner * np.sin(first), inner * np.cos(first), outer * np.sin(second), outer * np.cos(second)]
    return Rotation.from_quat(np.stack(quaternions, axis=1)).as_matrix()


def _first(maps, kept, level, similarity):
    """The best of many maps (B, N, N + 1), without near duplicates; the best of the first `kept` comes first.

    Returns: (K, N, N + 1), at most TRIED of them.
    """
    def scores_of(some, measure):
        at_once = max(1, min(100, MOST_AT_ONCE // level["fixed"].numel()))
        return torch.cat([_alike(_in_voxels(part, level), level, measure).cpu() for part in some.split(at_once)])

    if similarity == "local":
        best = scores_of(maps[kept:], "global").topk(min(SIFTED, len(maps) - kept)).indices
        maps = torch.cat([maps[:kept], maps[kept:][best]])
    scores = scores_of(maps, similarity)
    best = int(scores[:kept].argmax())
    order = [best, *(number for number in scores.argsort(descending=True, stable=True).tolist() if number != best)]
    chosen = _distinct([maps[number] for number in order], TRIED[similarity], level, APART * level["spacing_mm"])
    return torch.stack([maps[order[number]] for number in chosen])


def _together(starts, level, similarity):
    """All starts (B, N, N + 1) with parameters after some steps of Adam: list of (start, parameters)."""
    # Adam by hand (Kingma and Ba, ICLR 2015): torch.optim takes over a second to import torch._dynamo.
    parameters = torch.zeros(len(starts), len(level["basis"]), dtype=torch.float64)
    mean, square = torch.zeros_like(parameters), torch.zeros_like(parameters)
    for number in range(STEPS):
        slope = _slope(starts, parameters, level, similarity)[1]
        mean, square = torch.lerp(mean, slope, 0.1), torch.lerp(square, slope.square(), 0.001)
        step = STEP * (1.0 - 0.9 * number / STEPS)
        first, second = (1.0 - decay ** (number + 1) for decay in (0.9, 0.999))
        parameters = parameters - step * (mean / first) / ((square / second).sqrt() + 1e-8)
    # The first start also stays without any step: it may be perfect already.
    return [*zip(starts[:1], torch.zeros_like(parameters[:1])), *zip(starts, parameters)]


def _optimise(start, parameters, level, similarity, iterations):
    """The start and its parameters after some iterations of L-BFGS at one level."""
    def loss_and_slope(values):
        loss, slope = _slope(start[None], torch.from_numpy(values)[None], level, similarity)
        return float(loss), slope[0].numpy()

    found = optimize.minimize(loss_and_slope, parameters.numpy(), jac=True, method="L-BFGS-B", options={
        "maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 12, "gtol": 1e-6, "ftol": 1e-7})
    # Volumes of a few voxels show too little, so the parameters can diverge.
    return start, torch.from_numpy(found.x) if np.isfinite(found.x).all() else parameters


def _best(candidates, count, level, similarity):
    """The `count` best of some (start, parameters), without maps that are the same to within a voxel.

    Maps below HOPEFUL are dropped too; the best one always stays.
    """
    if len(candidates) == 1:
        return candidates
    (best, first), *others = _ranked(candidates, level, similarity, level["spacing_mm"])
    enough = best - (1.0 - HOPEFUL) * abs(best)
    return [first, *(candidate for score, candidate in others if score >= enough)][:count]


def _nearest(candidates, header, level):
    """The best of some (start, parameters), in a list; one of those nearly as good if it is nearer to the headers' map.

    Along a spine, or between ribs and fingers, a map to the neighbour is as good as the true one.
    """
    shifts = [float((_matrix(*candidate, level)[0] - header)[:, -1].norm()) / level["extent_mm"]
              for candidate in candidates]
    missing = [(1.0 - score + ROUNDED) / (1.0 - STEP_ASIDE * min(1.0, shift / ASIDE))
               for score, shift in zip(_scores(candidates, level, "local"), shifts)]
    return [candidates[int(np.argmin(missing))]]


def _ranked(candidates, level, similarity, distance_mm):
    """Pairs of score and (start, parameters), best first, without maps within a distance of a better one."""
    scores = _scores(candidates, level, similarity)
    ranked = sorted(zip(scores, candidates), key=lambda pair: -pair[0])
    maps = [_matrix(*candidate, level)[0] for _, candidate in ranked]
    return [ranked[number] for number in _distinct(maps, len(maps), level, distance_mm)]


def _distinct(maps, count, level, distance_mm):
    """Indices of the first `count` maps (N, N + 1) in a list that are further apart than a distance.

    The distance between two maps is the largest distance between their images of one corner of the fixed volume.
    """
    half, dims = level["extent_mm"] / 2, len(maps[0])
    corners = [[*corner, 1.0] for corner in itertools.product((-half, half), repeat=dims)]
    corners = torch.tensor(corners, dtype=torch.float64).T
    places, chosen = [], []
    for number, matrix in enumerate(maps):
        place = matrix @ corners
        # A map to a larger moving volume stretches these distances too.
        unit = float(torch.linalg.det(matrix[:, :dims]).abs()) ** (1 / dims)
        if all(float((place - other).norm(dim=0).max()) > unit * distance_mm for other in places):
            places.append(place)
            chosen.append(number)
        if len(chosen) == count:
            break
    return chosen


def _worth_their_turn(candidates, header, level, similarity):
    """Those of the (start, parameters) whose turn from the headers' map is justified by their similarity.

    Many organs look about the same after a turn, and headers are usually right.
    """
    turns, scores = _turns(candidates, header, level), _scores(candidates, level, similarity)
    missing = [(1.0 - score + ROUNDED) / (1.0 - LEAP * min(1.0, turn / NEAR) ** 2)
               for score, turn in zip(scores, turns)]
    furthest = max(turns[int(np.argmin(missing))], USUAL)
    return [candidate for candidate, turn in zip(candidates, turns) if turn <= furthest]


def _turns(candidates, header, level):
    """By how many degrees the maps of some (start, parameters) turn from the headers' map, (N, N + 1)."""
    dims = len(header)
    back = torch.linalg.inv(header[:, :dims])
    return [_turn((_matrix(*candidate, level)[0][:, :dims] @ back).numpy()) for candidate in candidates]


def _turn(change):
    """The angle of the rotation in a linear map (N, N), in degrees; 90 or more for one that mirrors."""
    left, _, right = np.linalg.svd(change)
    trace = np.trace(left @ right)
    return float(np.degrees(np.arccos(np.clip((trace - 1) / 2 if len(change) == 3 else trace / 2, -1.0, 1.0))))


# ---------------------------------------------------------------------------------------------------------------------
# One modality or two, and which answer to believe. found: the map (N, N + 1), the scores and the levels of a search
# ---------------------------------------------------------------------------------------------------------------------

def _one_sign(found):
    """The share of the absolute correlation in all windows that has the majority sign: 0.5 .. 1.

    Volumes of one modality correlate with one sign in nearly all windows; with two modalities the signs are mixed.
    """
    matrix, _, levels = found
    level = levels[COMPARED]
    warped, weight = _shown(_in_voxels(matrix[None], level), level)
    values, counted = local_correlation_map(warped, level["fixed"], WINDOW, False, weight * level["textured"])
    values = values * counted
    positive = float(values.clamp(min=0).sum() / values.abs().sum().clamp(min=1e-6))
    return max(positive, 1.0 - positive)


def _mirror_gain(found, header):
    """By how much a mirror image of the moving volume is more similar at the coarsest level; mostly negative.

    Mirror images are tried as they result from a header with axes exchanged or reversed, about the centres of
    intensity. If such an image is clearly more similar, left and right are swapped in one of the volumes. header: map
    (N, N + 1).
    """
    matrix, _, (level, *_) = found
    dims, axes = len(header), np.eye(len(header))
    mirrors = [header[:, :dims] @ (axes[list(order)] * signs) for order in itertools.permutations(range(dims))
               for signs in itertools.product((1.0, -1.0), repeat=dims)]
    mirrors = [np.column_stack([mirror, np.zeros(dims)]) for mirror in mirrors
               if np.linalg.det(mirror) * np.linalg.det(header[:, :dims]) < 0]
    mirrors = _first(torch.from_numpy(np.stack(mirrors)), 1, level, "local")[:MIRRORS]
    candidates = _together(torch.cat([matrix[None], mirrors]), level, "local")
    scores = _scores(candidates, level, "local")
    return max(scores[2:]) - max(scores[:2])  # the first start is there twice, without steps and with


def _leads_astray(found, starts):
    """Whether a map turns by NEAR or scales an axis by OTHER_SIZE from the headers, but hardly gains similarity."""
    dims = len(starts[0])
    change = found[0][:, :dims].numpy() @ np.linalg.inv(starts[0][:, :dims])
    if _turn(change) < NEAR and _keeps_sizes(change):
        return False
    of_starts, (of_found,) = _structures_alike([found], starts)
    return of_found - max(of_starts) < _leap(change, LEAP_OF_TWO) * (1.0 - max(of_starts))


def _leap(change, leap):
    """`leap`, or more for a linear map (N, N) that both turns and scales; 0 stays 0."""
    return LEAP_OF_BOTH if leap and _turn(change) >= NEAR and not _keeps_sizes(change) else leap


def _keeps_sizes(change):
    """Whether a linear map (N, N) scales no axis by more than OTHER_SIZE."""
    sizes = np.linalg.svd(change)[1]
    return sizes.max() <= OTHER_SIZE and sizes.min() >= 1 / OTHER_SIZE


def _by_structures(found, starts, leap, near_leap):
    """The result with the most similar structures, or the best start if no result gains enough over it.

    Mutual information of two modalities is small everywhere, and its maximum may not match the anatomy; nor may that
    of the correlation. So a map far from the headers must gain `leap` of what is missing; one near them, as between
    two persons in the same scanner, `near_leap`.
    """
    of_starts, of_found = _structures_alike(found, starts)
    best, believed = max(of_starts), []
    for result, alike in zip(found, of_found):
        matrix, levels = result[0].numpy(), result[2]
        change = matrix[:, :-1] @ np.linalg.inv(starts[0][:, :-1])
        near = _is_near(matrix, starts[0], levels[0]["extent_mm"]) and _keeps_sizes(change)
        if alike - best >= (near_leap if near else _leap(change, leap)) * (1.0 - best):
            believed.append((alike, result))
    if believed:
        return max(believed, key=lambda pair: pair[0])[1]
    _, scores, levels = found[int(np.argmax(of_found))]
    start = torch.from_numpy(starts[int(np.argmax(of_starts))])
    return start, {**scores, "affine_similarity": scores["affine_similarity_before"]}, levels


def _structures_alike(found, starts):
    """The similarity of the structures of two volumes under the starts and under some results: two lists of floats.

    The last start is left out: it matches the centres of intensity, which are different places in two modalities.
    """
    level = found[-1][2][COMPARED]
    described, alike = self_similarity(level["fixed"]), []
    for matrix in (*map(torch.from_numpy, starts[:2]), *(matrix for matrix, *_ in found)):
        warped, weight = _shown(_in_voxels(matrix[None], level), level)
        alike.append(float(mind_similarity(self_similarity(warped * (weight > 0)), described, level["textured"])))
    return alike[:2], alike[2:]
