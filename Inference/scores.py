"""Scores of a registered pair on the fixed grid, the same in every program and for every method."""
import numpy as np
import torch

from Dataloader.grids import intensity_range, plane_normal, thinning
from Dataloader.nifti import is_segmentation, move_points
from Dataloader.volume import without_filler
from Diffusion.fields import jacobian_determinant, then_affine, warp
from Diffusion.losses import box_mean, weighted_variance
from Diffusion.metrics import average, dice, folding_percent, folding_scores, hd95, sdlogj
from Inference.labels import apply_field
from Inference.verdict import judge
from Runtime.errors import InputError

# Columns of tables, CSV and JSON in this order, with the format of each.
COLUMNS = {"dice_before": ".3f", "dice": ".3f", "hd95_before_mm": ".2f", "hd95_mm": ".2f", "tre_before_mm": ".2f",
           "tre_mm": ".2f", "similarity_before": ".3f", "similarity": ".3f", "folding_percent": ".4f",
           "folding_any_percent": ".4f", "ndv_percent": ".4f", "sdlogj": ".4f", "inverse_error_mm": ".3f",
           "inverse_consistency_mm": ".3f", "seconds": ".2f"}
WINDOW = 9  # voxels of the fixed grid, side of the cubes of `local_similarity`
STRETCHED = 5  # factor by which a deformation changes volume; no anatomical change is that large
CONTRAST = 0.03  # standard deviation in a cube, as a part of the volume's range; above it the cube shows something
SHOWN = CONTRAST / 2  # the same for the moved volume, since interpolation and another range of intensities lower it
NOISE_SAMPLES = 100_000  # voxels at most in the quantile of the noise


def pair_scores(fixed, moving, field, warped, matrix, inverse, judged, device="cpu"):
    """All scores of a registered pair except labels and landmarks, and the verdict: this part of its Result.

    Both similarities, and the body of the fixed volume, use the first channel only.
    Above MOST_VOXELS voxels, only every second or third along each axis counts.
    fixed, moving: Volumes. field, warped, matrix, inverse: of the Result. judged: its compared_by, one_sign,
    mirror_gain and overlap_percent, which the verdict needs too. device: for the similarities. Returns: dict.
    """
    step, moving_step = thinning(fixed.array.shape), thinning(moving.array.shape)
    filled, fixed, moving = moving, without_filler(fixed), without_filler(moving)
    fixed, warped, field = fixed.every(step), warped[(slice(None, None, step),) * warped.ndim], every(field, step)
    by_header = np.zeros_like(field)
    before = apply_field(moving.array, moving.affine, by_header, fixed.affine)
    is_whole = moving.mask is None or (moving.mask > 0).all()
    if is_whole:
        known, least, source = whole_with_rim(moving.array.shape, moving.affine), 0.5, moving.array
    else:  # interpolated like the image, so that voxels partly outside the mask do not count; its 0 is outside too
        known, least = ((moving.mask > 0).astype(np.float32), moving.affine), 0.999
        source = moving.array[moving.mask > 0]
    parts = [apply_field(*known, each, fixed.affine) for each in (by_header, field)]
    seen_before, seen = (part > least for part in parts)
    if is_whole:  # the outer half voxel counts, where `apply_field` fades to the lowest intensity
        before, warped = (low + (image - low) / np.maximum(part, least) for image, part, low in zip(
            (before, warped), parts, (moving.array.min(), filled.array.min())))
    warped = warped if filled is moving else np.maximum(warped, moving.array.min())
    scores, body = image_scores(fixed.array, source, before, warped, seen_before, seen, fixed.mask, device)
    scores["stretched_percent"] = stretched_percent(field, np.linalg.inv(fixed.affine) @ matrix @ fixed.affine, body)
    scores.update(field_scores(field, body), **affine_scores(matrix, len(field), fixed.affine),
                  compared_by=judged["compared_by"],
                  segmentations=[side for side, volume in (("fixed", fixed), ("moving", moving))
                                 if is_segmentation(volume.array)])
    if inverse is not None:
        scores.update(inverse_scores(field, fixed.affine, every(inverse, moving_step),
                                     moving.every(moving_step).affine, body, moving_step))
    scores["verdict"], scores["reason"] = judge({**scores, **judged})
    return scores


def whole_with_rim(shape, affine):
    """What a volume of this shape covers, for `apply_field`: ones with a rim of a voxel of zeros; its affine 4x4."""
    affine = affine.copy()
    affine[:3, 3] -= affine[:3, :len(shape)].sum(1)
    return np.pad(np.ones(shape, np.float32), 1), affine


def every(field, step):
    """A field (N, *spatial) at every step-th voxel along each axis, in voxels of that grid; itself for a step of 1."""
    return field if step == 1 else field[(slice(None), *[slice(None, None, step)] * len(field))] / step


def image_scores(fixed, moving, before, after, seen_before, seen_after, fixed_mask=None, device="cpu"):
    """How alike a pair is as the headers place it and after the registration, and how far its bodies overlap.

    The body of a volume is where it has contrast, see `body_of`. The similarity is the squared local correlation, 0 ..
    1, averaged over the body of the fixed volume; it is 0 where the moving volume is constant, so uncovered parts lower
    it, before and after.

    fixed, before, after: (*fixed), the fixed volume and the moving one on its grid. moving: intensities of the moving
    one, of any shape, for their range. seen_before, seen_after: where the moving volume, and its mask, cover the grid.
    Returns: dict of similarity_before, similarity, similarity_attainable (by a perfect registration, with the noise of
    both volumes, see `signal_share`; None if no more than chance is alike), covered_percent (of the fixed body by the
    moving one), body_overlap (Dice of both bodies); and the fixed body, booleans (*fixed).
    """
    counts = np.ones(fixed.shape, bool) if fixed_mask is None else fixed_mask > 0
    given = in_range(fixed, fixed[counts]), in_range(before, moving), in_range(after, moving)
    fixed01, before01, after01, counts, seen_before, seen_after = (
        torch.from_numpy(array)[None, None].to(device) for array in (*given, counts, seen_before, seen_after))
    _, fixed_mean, fixed_variance = contrast(fixed01, counts.float())
    fixed_noise = noise_variance(fixed01, counts)
    body = body_of(fixed_variance - fixed_noise, counts, CONTRAST)
    body = body if body.any() else counts
    seen_before, seen_after = seen_before & counts, seen_after & counts
    scores = {"similarity_before": local_similarity(fixed01, before01, body, seen_before)[0]}
    scores["similarity"], mean, variance = local_similarity(fixed01, after01, body, seen_after)
    noise = noise_variance(after01, seen_after)
    shown, own = (body_of(variance - noise, seen_after, least) for least in (SHOWN, CONTRAST))
    # The covariance has no part of independent noise, so that squared correlation falls by the product of both shares.
    scores["similarity_attainable"] = (signal_share(fixed01, fixed_mean, fixed_variance, body, fixed_noise)
                                       * signal_share(after01, mean, variance, own, noise))
    if scores["similarity"] < 2.0 / (WINDOW ** fixed.ndim - 1):  # chance gives half of that: nothing is alike
        scores["similarity_attainable"] = None
    scores["covered_percent"] = 100.0 * float((shown & body).sum()) / float(body.sum())
    scores["body_overlap"] = 2.0 * float((own & body).sum()) / float(own.sum() + body.sum())
    return scores, body[0, 0].cpu().numpy()


def body_of(variance, seen, least):
    """Where a volume has contrast above `least`: booleans (1, 1, *spatial), within `seen`.

    A voxel belongs to it if there is contrast in the cube around it and around each seen voxel of that cube. Without
    the second condition, the body would reach half a cube into empty space, where cubes hold only the outline.
    variance: of the cube around each voxel, see `contrast`, minus `noise_variance`; (1, 1, *spatial) float32. seen:
    booleans of that shape.
    """
    flat = seen & (variance <= least ** 2)
    return seen & (box_mean(flat.float(), WINDOW) < 0.5 / WINDOW ** (variance.dim() - 2))


def noise_variance(volume, seen):
    """The variance of a volume's noise: its `roughness` in the calmest twentieth of what is seen, where there is hardly
    any anatomy.

    volume: (1, 1, *spatial) float32. seen: booleans of that shape. Returns: a tensor of one number, or 0.0.
    """
    return low_quantile(roughness(volume)[seen], 0.05)


def roughness(volume):
    """The variance of the differences from the mean of 3 voxels along each axis, in the cube around each voxel: that of
    white noise, and more where there is anatomy. volume: (1, 1, *spatial) float32.
    """
    count = 3 ** (volume.dim() - 2)
    return box_mean((volume - box_mean(volume, 3)).square() * count / (count - 1), WINDOW)


def low_quantile(values, share):
    """A quantile of values (K,), from NOISE_SAMPLES or a few more of them: a tensor of one number, or 0.0 if none."""
    every = max(1, values.numel() // NOISE_SAMPLES)
    return torch.quantile(values[::every], share) if values.numel() else 0.0


def signal_share(volume, mean, variance, body, noise):
    """How much of the local variance of a volume is not noise, 0 .. 1, averaged over its body; 1.0 without a body.

    Noise may grow with the intensity, as speckle does, or lie in the body alone, as after skull-stripping. So it is at
    least as large, for its local mean, as in the calmest hundredth of the body. Fine anatomy counts as noise, so
    that real volumes with hardly any noise have about 0.93.
    volume, mean, variance: (1, 1, *spatial) float32, the latter two from `contrast`. body: booleans of that shape.
    noise: of `noise_variance`.
    """
    mean, variance = mean[body].square().clamp(min=1e-6), variance[body].clamp(min=1e-6)
    noise = (low_quantile(roughness(volume)[body] / mean, 0.01) * mean).clamp(min=float(noise))
    return float((1 - noise / variance).clamp(0, 1).mean()) if len(mean) else 1.0


def in_range(volume, source):
    """A volume scaled by the range of a source, its percentiles 0.5 to 99.5; float32."""
    low, high = intensity_range(source)
    return ((np.asarray(volume, np.float32) - np.float32(low)) / np.float32(high - low or 1)).clip(-1, 2)


def contrast(volume, weight):
    """Count, mean and variance in the cube around each voxel, over its voxels that are in the grid, under a weight.

    weight: 0 .. 1; the count is its mean in the cube. All (1, 1, *spatial) float32.
    """
    count = box_mean(weight, WINDOW).clamp(min=1e-6)
    mean = box_mean(weight * volume, WINDOW) / count
    return count, mean, weighted_variance(volume, mean, weight, count, WINDOW)


def local_similarity(fixed, moved, body, seen):
    """Mean squared local correlation over a body, a float, 0 .. 1; and local mean and variance of the moved volume.

    cov^2 / (var_F var_M) in the cube around each voxel (Avants et al., Med Image Anal 2008).
    Arguments as in `image_scores`, all (1, 1, *fixed).
    """
    weight = seen.float()
    count, fixed_mean, fixed_variance = contrast(fixed, weight)
    _, moved_mean, moved_variance = contrast(moved, weight)
    covariance = box_mean(weight * fixed * moved, WINDOW) / count - fixed_mean * moved_mean
    correlation = covariance ** 2 / (fixed_variance.clamp(min=1e-6) * moved_variance.clamp(min=1e-6))
    return float(torch.where(seen, correlation.clamp(max=1), 0)[body].mean()), moved_mean, moved_variance


def field_scores(field, body=None):
    """How regular a field is: folding_percent, those of `folding_scores`, and sdlogj.

    field: (N, *spatial) in voxels. body: booleans (*spatial) or None. sdlogj is None where an axis has fewer than 5.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(field, np.float32))
    return {"folding_percent": folding_percent(tensor[None]), **folding_scores(tensor, body),
            "sdlogj": sdlogj(tensor[None]) if min(field.shape[1:]) > 4 else None}


def stretched_percent(field, affine_part, body):
    """Share of the body where the deformation, without its affine part, changes the volume more than STRETCHED times.

    If the moving volume lacks a part, the rest is stretched over the gap. affine_part: 4x4, in voxels as the field.
    """
    dims = len(field)
    change = jacobian_determinant(torch.from_numpy(np.ascontiguousarray(field, np.float32))[None])[0].numpy()
    change = change.reshape(body.shape)[body] / np.linalg.det(affine_part[:dims, :dims])
    return 100.0 * float(((change < 1 / STRETCHED) | (change > STRETCHED)).mean())


def there_and_back_mm(field, affine, back, back_affine):
    """The round-trip error of points by one field and back by the other, in mm; NaN where they leave the grid.

    Both fields are used as written and interpolated linearly between voxels, as other programs do.
    field: (N, *size), the way there. back: (N, *other), the way back. Each is in voxels of its own grid, with the 4x4
    affine and back_affine. Returns: (*size) float32.
    """
    dims = len(field)
    tensor, back = (torch.from_numpy(np.ascontiguousarray(each, np.float32))[None] for each in (field, back))
    change = np.linalg.inv(back_affine) @ affine
    there = then_affine(tensor, change)  # where voxels of `field` go, in voxels of the other grid, minus their index
    step = warp(back, there, padding="border")
    rows = torch.from_numpy(change[:dims, :dims].astype(np.float32))
    came_to = (rows @ tensor.flatten(2)).view_as(tensor) + step  # as a vector in voxels of the other grid
    to_mm = torch.from_numpy(back_affine[:3, :dims].astype(np.float32))
    missed_mm = (to_mm @ came_to.flatten(2))[0].square().sum(0).sqrt().view(field.shape[1:]).numpy()
    places = there[0].numpy() + np.indices(field.shape[1:], np.float32)
    last = np.reshape(back.shape[2:], (-1, *[1] * dims)) - 1
    return np.where(((places >= 0) & (places <= last)).all(0), missed_mm, np.float32("nan"))


def inverse_scores(field, affine, inverse, moving_affine, body=None, step=1):
    """How well two fields undo each other, starting from the moving volume and from the fixed one.

    field: (N, *fixed) and inverse: (N, *moving), each in voxels of its grid. body: booleans (*fixed) or None. step: the
    moving grid has every step-th voxel of the volume.
    Returns: inverse_error_mm and inverse_error_max_mm over the moving grid, inverse_error_voxels, the former in sides
    of the moving volume's voxels, and inverse_consistency_mm, the mean over the body; None if all points leave the
    other grid.
    """
    missed_mm = there_and_back_mm(inverse, moving_affine, field, affine)
    consistent_mm = there_and_back_mm(field, affine, inverse, moving_affine)
    missed_mm, consistent_mm = (each[np.isfinite(each)] for each in
                                (missed_mm, consistent_mm if body is None else consistent_mm[body]))
    side_mm = np.linalg.norm(moving_affine[:3, :len(inverse)], axis=0).mean() / step
    return {"inverse_error_mm": float(missed_mm.mean()) if missed_mm.size else None,
            "inverse_error_voxels": float(missed_mm.mean() / side_mm) if missed_mm.size else None,
            "inverse_error_max_mm": float(missed_mm.max()) if missed_mm.size else None,
            "inverse_consistency_mm": float(consistent_mm.mean()) if consistent_mm.size else None}


def label_scores(label_maps, fixed, spacing_mm=None):
    """Dice, and HD95 if requested, of each label of the fixed image: this part of a row.

    label_maps: {suffix of the columns: (*fixed)}: "_before", as the headers place the moving labels, and "", after the
    registration; either may be missing. fixed: label map (*fixed). spacing_mm: of the fixed grid, for HD95; None for
    Dice alone.
    Returns: dict of "labels" ({str(label): scores}), their means (labels that are in neither map do not count), and
    "labels_lost", those of the fixed image that the registered map lacks, and "labels_extra", those only it has.
    """
    labels = sorted(set(np.unique(fixed).tolist()) - {0})
    scores = {"labels": {str(label): {} for label in labels}}
    for suffix, label_map in label_maps.items():
        columns = {f"dice{suffix}": dice(label_map, fixed, labels)}
        if spacing_mm is not None:
            columns[f"hd95{suffix}_mm"] = hd95(label_map, fixed, labels, spacing_mm)
        for name, values in columns.items():
            scores[name] = average(values)
            for label, value in zip(labels, values):
                scores["labels"][str(label)][name] = value
        there = set(np.unique(label_map).tolist()) - {0}
        scores["labels_lost"] = sorted(set(labels) - there)
        scores["labels_extra"] = sorted(there - set(labels))
    return scores


def unscored(pair, fixed, moving=None):
    """Why the labels of a pair are not scored, in one sentence; "" if they are.

    A map without a label, or two maps without a common one, say nothing about the registration.
    pair: the paths of their files. fixed, moving: label maps, each on its own grid; moving may be missing.
    """
    for key, label_map in (("fixed_label", fixed), ("moving_label", moving)):
        if label_map is not None and not label_map.any():
            return f"{pair[key]}: it has no label above 0, so no labels are scored."
    if moving is not None and not np.intersect1d(fixed, moving).any():
        return f"{pair['fixed_label']} and {pair['moving_label']} have no common label, so no labels are scored."
    return ""


def said_of_labels(scores):
    """Sentences about structures that only one of two label maps has; they name some. scores: of `label_scores`."""
    sentences = []
    for key, lacking, having in (("labels_lost", "warped labels", "fixed ones"),
                                 ("labels_extra", "fixed labels", "warped ones")):
        if labels := scores.get(key):
            words = ", ".join(map(str, labels[:5])) + f" and {len(labels) - 5} more" * (len(labels) > 5)
            sentences.append(f"the {lacking} lack {words}, which the {having} have.")
    return sentences


def point_scores(fixed_mm, moving_mm, pair, field, affine):
    """Mean distance of landmarks in mm, as the headers place them and after the registration, and by how many voxels of
    the fixed volume it has grown: this part of a row.

    In 2D, what lies across the fixed plane does not count, since no 2D registration changes it.
    fixed_mm, moving_mm: (P, 3) mm, RAS, the same points of both volumes. pair: the paths of their files, for the error
    if their numbers differ. field: (N, *fixed) in voxels or None. affine: 4x4 of the fixed volume.
    """
    if len(fixed_mm) != len(moving_mm):
        raise InputError(f"{pair.get('fixed_points') or pair.get('points')} has {len(fixed_mm)} landmarks and "
                         f"{pair['moving_points']} has {len(moving_mm)}; both must list the same points in the same "
                         "order.")
    normal = plane_normal(affine) if field is not None and len(field) == 2 else np.zeros(3)

    def distance_mm(points_mm):
        apart = points_mm - moving_mm
        return float(np.linalg.norm(apart - np.outer(apart @ normal, normal), axis=1).mean())

    scores = {"tre_before_mm": distance_mm(fixed_mm)}
    if field is not None:
        scores["tre_mm"] = distance_mm(moved_points(fixed_mm, field, affine))
        voxel_mm = float(np.linalg.norm(affine[:3, :len(field)], axis=0).mean())
        scores["tre_gained_voxels"] = (scores["tre_mm"] - scores["tre_before_mm"]) / voxel_mm
    return scores


def moved_points(points_mm, field, affine):
    """`move_points` for a field of 2D volumes too, one plane of a 3D one."""
    if len(field) == 2:
        field = np.concatenate([field, np.zeros_like(field[:1])])[..., None]
    return move_points(points_mm, field, affine)


def heading(column):
    """The name of a column in tables on a page and a terminal."""
    return column.replace("_percent", " %").replace("_mm", ", mm").replace("_", " ")


def affine_scores(matrix, dims, affine=None):
    """The effect of an affine map: scale_least and scale_most, turn_degrees, shear_degrees and mirrors.

    matrix: 4x4, fixed to moving world in mm. The scales are its singular values. The turn is the angle of the closest
    rotation. The shear is the largest deviation from a right angle between two axes of the fixed world after the map.
    affine: 4x4 of the fixed grid, None: identity; in 2D its plane counts.
    """
    linear = np.asarray(matrix, np.float64)[:3, :3]
    if dims == 2:  # the plane may lie anywhere in the world
        left, _, right = np.linalg.svd(np.eye(3) if affine is None else affine[:3, :3])
        linear = ((left @ right).T @ linear @ (left @ right))[:2, :2]
    left, scales, right = np.linalg.svd(linear)
    turn, mirrors = left @ right, bool(np.linalg.det(linear) < 0)
    axes = linear / np.linalg.norm(linear, axis=0)
    oblique = np.degrees(np.arcsin(np.clip(np.abs(axes.T @ axes - np.eye(dims)).max(), 0, 1)))
    cosine = (np.trace(turn) - 1) / 2 if dims == 3 else turn[0, 0]
    return {"scale_least": float(scales.min()), "scale_most": float(scales.max()),
            "turn_degrees": float(np.degrees(np.arccos(np.clip(cosine, -1, 1)))), "shear_degrees": float(oblique),
            "mirrors": mirrors}
