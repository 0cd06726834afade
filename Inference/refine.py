"""Deform one pair by optimisation, from a network's prediction or from zero; the network stays unchanged.

The field moves step by step along the force of the similarity, first on small images, then on larger ones. The force at
a voxel is the derivative of the similarity with respect to the warped image's value there, times the gradient of that
image. It is smoothed, scaled so that its longest vector is refine.step voxels, and composed onto the field. Then the
whole field is smoothed slightly, which keeps it regular. Each step is short and smooth, hence invertible, and so is the
field composed of them.

Composed small steps are the greedy diffeomorphism of Christensen et al., IEEE TIP 1996, and Avants et al., Med Image
Anal 2008, here with both smoothings as in Yushkevich et al., "Fast Automatic Segmentation of Hippocampal Subfields and
Medial Temporal Lobe Subregions in 3 Tesla and 7 Tesla T2-weighted MRI", Alzheimer's & Dementia 2016 (Greedy). The field
is defined on a control grid, which in large images has a point at every second voxel.

Cross-validation on the pair itself, without labels, chooses how much to smooth the field. With too little smoothing the
field follows the noise of the images; with too much it cannot follow their anatomy. A fixed number that suits human
brains is wrong for mice. The fixed volume is cut into cubes of two colours. A field is found from each colour, and the
similarity is measured inside the cubes of the other: a field that follows anatomy is right there too, one that follows
noise is not (as for splines in Wahba, "Spline Models for Observational Data", 1990). The score as a function of the
smoothing has one maximum, which is found on small images with few steps. Each place has its own, from the cubes around
it, since a heart beats in a chest that hardly moves: one number for both would suit the chest, which is larger. A field
found from all voxels then needs less smoothing than those found from half of them.

The gross motion is found first, from all voxels at the coarsest resolution. Otherwise the cubes would hide the whole of
a structure that moves by the side of a cube, such as the wall of a beating heart.
"""
import math

import torch
from tqdm import tqdm

from Dataloader.grids import slabs
from Diffusion import graphs
from Diffusion.device_ops import interpolation_matrix, product_along
from Diffusion.fields import compose, interpolate, masked, resize_field, side_lengths, warp
from Diffusion.losses import (
    MEASURES,
    OF_TWO_MODALITIES,
    conditional_means,
    correlation_slope,
    each_channel,
    local_correlation_map,
    self_similarity,
    soft_dice,
    table_lookup,
    window_statistics,
)

CORRELATION = ("auto", "correlation")
BINS = 32  # of the intensities that are mapped to those of the other modality
# Weight of the correlation of gradient magnitudes, relative to that of intensities. With 0.3 hippocampi gain 0.01 Dice,
# and brains, mice and livers a little; with 1 hippocampi gain 0.014 and brains lose 0.01.
EDGES = 0.3
FILLED = 2.0  # voxels: standard deviation of the Gaussian that fills masked-out voxels before taking gradients
# Weights of a Gaussian below this are set to zero. Products with smaller ones are subnormal numbers, which Intel's CPUs
# process a hundred times more slowly; they would take a third of the time of a small pair.
NOTHING = 1e-20
SMALL = 2 ** 18  # voxels of an image up to which every voxel is a control point, because that hardly takes time
# To infer the smoothing:
BLOCK, RIM = 8, 2  # voxels: least side of the cubes, and of their rim near the other colour, which is not measured
MOST_VOXELS = 750_000  # of the images that infer the smoothing (larger ones are halved along each axis), or judge it
LEAST_SIDE = 2 * BLOCK  # voxels: with fewer along an axis the images are not halved
AROUND = 8.0  # voxels: standard deviation of the Gaussian by which the cubes around a place count there
ELSEWHERE = 0.1  # how much all cubes together count at each place, relative to the mean of those around it
SHORTER = (1.0, 0.25, 0.0625)  # shares of refine.step, tried in turn while the field found makes a pair less alike
ALIKE = 0.9  # mean local correlation above which a pair hardly differs; below, refinement has something to find
WEIGHTS, APART = (0.5, 2.0, 8.0), 4.0  # values to try; each as many times the previous
SEEING_ALL = 0.5  # the weight for a field found from all voxels, relative to the best for one found from half of them
GROSS = 1.0  # weight with which the gross motion is found
TRIAL_STEPS = 15  # of optimisation at each resolution
# The weight for two modalities. Cross-validation fails there: neighbouring cubes share structures of one modality only.
OTHER_MEASURE = 2.0


def refine(pair, field, steps, cfg, progress=False):
    """Optimise the field of one pair.

    pair: dict of moving and fixed, (1, C, *spatial), intensities in 0 .. 1 on one isotropic grid, channels of equal
    weight; moving_mask and fixed_mask, (1, 1, *spatial), 0 .. 1, the weight of each voxel, or None for equal weights;
    and structures, a network's segmentations of moving and fixed, (2, K, *spatial), 0 .. 1, or None.
    field: (1, N, *spatial) displacement in voxels to start from, or None.
    steps: total number, 1 or more, divided equally among refine.levels resolutions.
    cfg: flat config with its refine.* and registration.* keys and run.graphs; refine.weight may be a tensor, as for
    `deformed`. progress: show a bar.
    Returns: field (1, N, *spatial) in voxels; refine.weight, as for `deformed`. The same input gives the same result.
    """
    size, weight = pair["fixed"].shape[2:], cfg["refine.weight"]
    with torch.no_grad(), tqdm(total=steps, desc="refining", unit="step", leave=False, disable=not progress) as bar:
        if isinstance(weight, str):  # auto
            two_modalities = cfg["registration.similarity"] in OF_TWO_MODALITIES
            weight = OTHER_MEASURE if two_modalities else inferred_weight(pair, field, cfg)
        unmoved = None if field is not None else alike_unmoved(pair, cfg)
        for share in SHORTER:
            if share < 1:
                bar.reset()
                bar.set_description("refining, shorter steps")
            shorter = cfg | {"refine.step": share * cfg["refine.step"]}
            found = deformed(pair, field, level_steps(size, steps, cfg), weight, shorter, bar.update)
            found = resize_field(found, size)
            if unmoved is None or correlation_under(unmoved[0], found, cfg) >= unmoved[1]:
                return found, weight
        return torch.zeros_like(found), weight


def alike_unmoved(pair, cfg):
    """(pair at full size, from `pair_at_level`; its similarity without a deformation) if the images are alike already.

    Every step has the same length, even if little or nothing is left to find: a volume would be moved away from itself,
    by a tenth of a voxel on average in one of 24^3, which hides smaller changes between two scans. So `refine` drops a
    field that makes such images less alike, and tries shorter steps. They find a small change; if two scans differ only
    by noise, they move voxels by some hundredths. `refine` does not ask if it starts from a deformation: that may have
    to become smoother, and the images less alike.
    pair: as for `refine`. Returns None for other images, and for large ones: there the effect is small, and measuring
    it takes time.
    """
    by_structures = pair["structures"] is not None and cfg["refine.structures"]
    size = pair["fixed"].shape[2:]
    if size.numel() > MOST_VOXELS or by_structures or cfg["registration.similarity"] not in CORRELATION:
        return None
    whole = pair_at_level({**pair, "structures": None}, 1, cfg)
    alike = correlation_under(whole, pair["fixed"].new_zeros(1, len(size), *size), cfg)
    return (whole, alike) if alike > ALIKE else None


def correlation_under(whole, field, cfg):
    """Mean local correlation of a pair under a field: a float. whole: from `pair_at_level`. field: in voxels."""
    values, counted = (part.sum() for part in correlations_under(whole, field, cfg))
    return float(values / counted.clamp(min=1e-6))


def correlations_under(whole, field, cfg, measured=1.0):
    """The local correlation around each voxel, times how much the voxel counts, and that weight: (1, C, *spatial) each.

    whole, field: as above. measured: (1, 1, *spatial), what counts besides the masks.
    """
    images = whole["images"]
    warped, counts = warp_pair(whole, field)
    values, counted = local_correlation_map(warped[:, :images], whole["fixed"][:, :images], cfg["refine.window"],
                                            cfg["registration.squared"], counts)
    counted = counted * measured if counts is None else counted * measured * counts
    return values * counted, counted


def inferred_weight(pair, field, cfg):
    """The refine.weight that suits a pair of one modality, as for `deformed`. pair, field: as for `refine`."""
    factor, structures = shrinking(pair["fixed"].shape[2:]), pair["structures"]
    small = {"structures": None if structures is None else smaller(structures, factor)}
    for side in ("moving", "fixed"):
        small[side], small[f"{side}_mask"] = masked(lambda volume: smaller(volume, factor), pair[side],
                                                    pair[f"{side}_mask"])
    size = small["fixed"].shape[2:]
    halves = cubes(size, cfg["refine.window"], small["fixed"].device)
    inside = 1.0 if small["fixed_mask"] is None else small["fixed_mask"]
    if not all((inside * part).any() for half in halves for part in half):
        return GROSS  # too small a volume or mask to hold anything out
    start = None if field is None else resize_field(field, size)
    levels = [(each, TRIAL_STEPS) for each, _ in level_steps(size, 1, cfg)]
    # A control point at every second voxel, whatever the size, is enough to show which weight is best.
    cfg = {**cfg, "refine.stride": max(cfg["refine.stride"], 2)}
    if len(levels) > 1:
        gross, *levels = levels
        start = resize_field(deformed(small, start, [gross], GROSS, cfg), size)
    whole, scores = pair_at_level({**small, "structures": None}, 1, cfg), []
    for weight in WEIGHTS:
        values = counted = 0.0
        for seen, measured in halves:
            found = deformed({**small, "fixed_mask": inside * seen}, start, levels, weight, cfg)
            more = correlations_under(whole, resize_field(found, size), cfg, measured)
            values, counted = (before + part.sum(1, keepdim=True) for before, part in zip((values, counted), more))
        values, counted = (smooth(part, AROUND) + ELSEWHERE * part.mean() for part in (values, counted))
        scores.append(values / counted.clamp(min=1e-6))
    return SEEING_ALL * best_weights(torch.cat(scores, dim=1))


def cubes(size, window, device="cpu"):
    """For both colours what the optimisation sees, and what is measured: (1, 1, *size) float32 each, 0 or 1.

    window: side of the similarity's windows. They reach half of it into the other colour, so wider windows get larger
    cubes.
    """
    dims, rim = len(size), max(RIM, window // 2)
    side = BLOCK + 2 * (rim - RIM)
    places = [torch.arange(n, device=device).view([-1 if k == axis else 1 for k in range(dims)])
              for axis, n in enumerate(size)]
    seen = sum(place // side for place in places) % 2 == 0
    inner = math.prod((place % side >= rim) & (place % side < side - rim) for place in places)
    return [(each.float()[None, None], (inner * ~each).float()[None, None]) for each in (seen, ~seen)]


def shrinking(size):
    """The factor, a power of 2, by which a pair of this size is shrunk before its smoothing is inferred."""
    factor = 1
    while math.prod(-(-n // factor) for n in size) > MOST_VOXELS and min(size) >= 2 * factor * LEAST_SIDE:
        factor *= 2
    return factor


def best_weights(scores):
    """The best of WEIGHTS at each place, moved to the maximum of the parabola through its score and its neighbours'.

    All are tried, because noise gives the curve small bumps at which a search would stop. The parabola is a function of
    the logarithm of the weight. scores: (1, weights, *spatial). Returns: (1, 1, *spatial).
    """
    best = scores.argmax(1, keepdim=True)
    inner = best.clamp(1, len(WEIGHTS) - 2)
    below, highest, above = (scores.gather(1, inner + beside) for beside in (-1, 0, 1))
    curvature = below - 2 * highest + above
    moved = (0.5 * (below - above) / curvature).where((best == inner) & (curvature < 0), 0.0)
    return torch.tensor(WEIGHTS, device=scores.device)[best] * APART ** moved


def level_steps(size, steps, cfg):
    """(factor by which the images shrink, number of steps) for each level, coarse to fine.

    Levels whose images would be no larger than two windows of the correlation are left out, because images that small
    mislead.
    """
    factors = [2 ** level for level in reversed(range(cfg["refine.levels"]))]
    factors = [factor for factor in factors if factor == 1 or min(size) // factor > 2 * cfg["refine.window"]]
    each, rest = divmod(steps, len(factors))
    return [(factor, each + (number < rest)) for number, factor in enumerate(factors)]


def deformed(pair, field, levels, weight, cfg, tick=lambda: None):
    """The field after all steps, on its last control grid: (1, N, *control) in voxels of that grid.

    pair, field: as for `refine`. levels: from `level_steps`. weight: variance in voxels^2 of the Gaussian that smooths
    the field after each step: a number, or a tensor of one for each place, (1, 1, *any), corners on corners. tick:
    called after each step.
    """
    for factor, count in levels:
        field = deformed_at_level(pair_at_level(pair, factor, cfg), field, count, weight, cfg, tick)
    return field


def deformed_at_level(small, field, count, weight, cfg, tick):
    """The field after `count` steps of one level, on its control grid. small: from `pair_at_level`; else as above."""
    size, device = small["fixed"].shape[2:], small["fixed"].device
    stride = cfg["refine.stride"] or (1 if size.numel() <= SMALL else 2)
    control = [min(max(-(-n // stride), 2), n) for n in size]
    options = {"dtype": torch.float32, "device": device}
    field = torch.zeros(1, len(size), *control, **options) if field is None else resize_field(field, control)
    ratio = [(c - 1) / max(n - 1, 1) for c, n in zip(control, size)]
    to_control = [onto_control_grid(n, c, cfg["refine.smooth"] * r, device) for n, c, r in zip(size, control, ratio)]
    spread = spreading(weight, control, ratio, device)
    parts, lines = slabs(size), torch.eye(size[0], **options) if to_control[0] is None else to_control[0]
    statistics = None
    if len(parts) == 1 and small["moving_mask"] is None and cfg["registration.similarity"] in CORRELATION:
        statistics = window_statistics(small["fixed"][:, :small["compared"]], cfg["refine.window"], small["fixed_mask"])

    def moved(field):
        """One more step, and the field after it."""
        if len(parts) == 1:
            warped, counted = warp_pair(small, resize_field(field, size))
            step = along_axes(force(warped, counted, small, statistics, cfg), to_control)
        else:  # the first axis last: along it a slab becomes as long as the whole
            step = sum(product_along(along_axes(force_in_slab(small, field, slab, cfg), [None, *to_control[1:]]),
                                     lines[:, slab], 2) for slab in parts)
        longest = step.square().sum(1).max().sqrt().clamp(min=1e-20)
        step = step * (side_lengths(ratio, device) * (cfg["refine.step"] / longest))
        return step, spread(compose(first=field, then=step))

    # Operations on slabs take longer than their launches, so that a graph would gain nothing.
    recorded = graphs.graphs_on(device, cfg["run.graphs"], graphs.IN_NO_PAIR) if len(parts) == 1 else None
    for _ in range(count):
        _, field = graphs.run(recorded, "a step of the refinement", moved, field)
        tick()
    return field


def spreading(weight, control, ratio, device):
    """The function that smooths a field (1, N, *control) after each step. weight: as for `deformed`.

    ratio: control spacings in a voxel, by axis. Each place gets its variance from the least and the largest, by mixing:
    the variance of a mixture of two Gaussians is the mean of theirs.
    """
    def gaussians(variance):
        return [gaussian(c, variance ** 0.5 * r, device) for c, r in zip(control, ratio)]

    if not torch.is_tensor(weight):
        spread = gaussians(weight)
        return lambda field: along_axes(field, spread)
    weight = interpolate(weight, control, align_corners=True)
    least, most = float(weight.min()), float(weight.max())
    share = (weight - least) / max(most - least, 1e-6)
    spread, further = gaussians(least), gaussians(most - least)

    def smoothed(field):
        field = along_axes(field, spread)
        return torch.lerp(field, along_axes(field, further), share)

    return smoothed


def pair_at_level(pair, factor, cfg):
    """A pair with 1 / factor of the voxels per side, as `force` compares it.

    With registration.similarity "mind" the MIND descriptors replace the images and are warped themselves, which is
    cheaper than describing the warped image in each step. With "correlation" the gradient magnitudes are further
    channels. The structures are the last channels, so that one interpolation warps everything.
    Returns: dict of moving, fixed, (1, C + E + K, *small), moving_mask, fixed_mask, (1, 1, *small) or None, and the
    channel counts images, C, and compared, C + E, with the edges.
    """
    structures, small, kind = pair["structures"], {}, cfg["registration.similarity"]
    with_edges = kind in CORRELATION
    for number, side in enumerate(("moving", "fixed")):
        image, mask = pair[side], pair[f"{side}_mask"]
        shown = torch.cat([image, edges(image, mask)], dim=1) if with_edges else image
        small[side], small[f"{side}_mask"] = masked(lambda volume: smaller(volume, factor), shown, mask)
        if kind == "mind":
            small[side] = self_similarity(small[side])
        small["compared"] = small[side].shape[1]
        small["images"] = image.shape[1] if with_edges else small["compared"]
        if structures is not None:
            small[side] = torch.cat([small[side], smaller(structures[number:number + 1], factor)], dim=1)
    return small


def edges(image, mask=None):
    """The gradient magnitude of each channel, divided by its maximum.

    Voxels outside the mask are first filled from their surroundings. image: (1, C, *spatial). mask: (1, 1, *spatial),
    0 .. 1, or None. Returns: as image.
    """
    if mask is not None:
        image = torch.lerp(masked(lambda volume: smooth(volume, FILLED), image, mask)[0], image, mask)
    square = torch.zeros_like(image)
    for channel in range(image.shape[1]):
        for axis in range(1, image.dim() - 1):
            slope = torch.zeros_like(image[:, channel])
            add_slope_(slope, image[:, channel], axis, torch.ones_like(slope))
            square[:, channel].addcmul_(slope, slope)
    length = square.sqrt()
    return length / length.amax(tuple(range(2, image.dim())), keepdim=True).clamp(min=1e-12)


def force_in_slab(pair, field, slab, cfg):
    """The `force` in a slab of the first axis, (1, N, *slab), times the number of windows, which differs by slab.

    pair: from `pair_at_level`, without structures. field: (1, N, *control) in voxels of its grid.
    """
    size, control = pair["fixed"].shape[2:], field.shape[2:]
    beside = cfg["refine.window"] // 2 + 1  # planes that a window and a difference need beside the slab
    first = max(slab.start - beside, 0)
    wide, within = slice(first, slab.stop + beside), slice(slab.start - first, slab.stop - first)
    part = {**pair, "fixed": pair["fixed"][:, :, wide]}
    if pair["fixed_mask"] is not None:
        part["fixed_mask"] = pair["fixed_mask"][:, :, wide]
    # What `resize_field` does, in the slab.
    there = field * side_lengths([(n - 1) / max(c - 1, 1) for n, c in zip(size, control)], field.device)
    there = product_along(there, interpolation_matrix(control[0], size[0], True, there.dtype, there.device)[wide], 2)
    there = interpolate(there, part["fixed"].shape[2:], align_corners=True)
    warped, weight = warp_pair(part, there, (first, *[0] * (len(size) - 1)))
    return force(warped, weight, part, None, cfg, mean_of_all=False)[:, :, within]


def force(warped, weight, pair, statistics, cfg, mean_of_all=True):
    """The force: the direction in which to sample the moving image so that the similarity grows, (1, N, *spatial).

    warped, weight: from `warp_pair`. pair: from `pair_at_level`. statistics: of its fixed image, or None. mean_of_all:
    of `correlation_slope`.
    """
    compared, window, kind = pair["compared"], cfg["refine.window"], cfg["registration.similarity"]
    image, fixed, there = warped[:, :compared], pair["fixed"][:, :compared], pair["fixed"][:, compared:]
    squared = cfg["registration.squared"]
    if kind in (*CORRELATION, "mapped"):
        if kind == "mapped":  # each intensity becomes the mean of the moving image at the same voxels
            own = each_channel(fixed)
            fixed = table_lookup(own, conditional_means(own, each_channel(image), weight, BINS)).view(fixed.shape)
        statistics = statistics or window_statistics(fixed, window, weight)
        by_value = correlation_slope(image, fixed, statistics, window, squared, weight, mean_of_all)
        by_value[:, pair["images"]:] *= EDGES
    elif kind == "mind":  # the slope of `mind_similarity`; autograd would hold four more copies of all descriptions
        counts = image.numel() if weight is None else (compared * weight.sum()).clamp(min=1.0)
        by_value = (fixed - image).mul_((1.0 if weight is None else weight) * (2 / counts))
    else:
        by_value = slope_of(lambda seen: MEASURES[kind](seen, fixed, window, squared, weight), image)
    if there.shape[1] and cfg["refine.structures"]:
        overlap = slope_of(lambda seen: soft_dice(seen, there, there.new_ones(there.shape[:2])).mean(),
                           warped[:, compared:])
        by_value = torch.cat([by_value, cfg["refine.structures"] * overlap], dim=1)
    total = torch.zeros(1, warped.dim() - 2, *warped.shape[2:], dtype=torch.float32, device=warped.device)
    for channel in range(by_value.shape[1]):
        for axis in range(total.shape[1]):
            add_slope_(total[:, axis], warped[:, channel], axis + 1, by_value[:, channel])
    return total


def slope_of(function, image):
    """The gradient of a scalar function at an image, of the image's shape."""
    with torch.enable_grad():
        image = image.detach().requires_grad_()
        return torch.autograd.grad(function(image), image)[0]


def add_slope_(total, image, axis, factor):
    """Add the derivative of an image along an axis, by central differences, times a factor; all (1, *spatial)."""
    n = image.shape[axis]
    if n == 1:
        return
    for start, length, back, ahead, scale in ((1, n - 2, 0, 2, 0.5), (0, 1, 0, 1, 1.0), (n - 1, 1, n - 2, n - 1, 1.0)):
        if length:
            rise = image.narrow(axis, ahead, length) - image.narrow(axis, back, length)
            total.narrow(axis, start, length).addcmul_(rise, factor.narrow(axis, start, length), value=scale)


def warp_pair(pair, field, origin=None):
    """The moving image of a pair warped by a field, and the weight of each voxel of the fixed grid.

    pair: dict of moving, moving_mask and fixed_mask. field: (1, N, *spatial) in voxels. origin: of `warp`.
    Returns: (1, C, *spatial); and the weight (1, 1, *spatial), or None if all voxels count equally.
    """
    warped, weight = masked(lambda image: warp(image, field, padding="border", origin=origin), pair["moving"],
                            pair["moving_mask"])
    if weight is None:
        return warped, pair["fixed_mask"]
    return warped, weight if pair["fixed_mask"] is None else pair["fixed_mask"] * weight


def gaussian(n, sigma, device="cpu"):
    """(n, n) matrix that smooths along an axis, its weights renormalised at the border; None for sigma 0.

    sigma: standard deviation in voxels.
    """
    if sigma <= 0:
        return None
    places = torch.arange(n, device=device, dtype=torch.float32)
    weights = torch.exp(-0.5 * ((places[:, None] - places) / sigma).square())
    weights = weights.where(weights > NOTHING, 0.0)
    return weights / weights.sum(1, keepdim=True)


def onto_control_grid(n, control, sigma, device="cpu"):
    """(control, n) matrix that averages around each control point, then smooths; None if it would change nothing.

    sigma: standard deviation in control spacings.
    """
    smoothing = gaussian(control, sigma, device)
    if control == n:
        return smoothing
    places = torch.arange(n, device=device, dtype=torch.float32) * ((control - 1) / max(n - 1, 1))
    points = torch.arange(control, device=device, dtype=torch.float32)
    weights = (1.0 - (places - points[:, None]).abs()).clamp(min=0.0)
    weights = weights / weights.sum(1, keepdim=True)
    return weights if smoothing is None else smoothing @ weights


def along_axes(x, matrices):
    """x (B, C, *spatial) multiplied by one matrix along each spatial axis; None leaves an axis as it is."""
    for axis, matrix in enumerate(matrices, 2):
        if matrix is not None:
            x = product_along(x, matrix, axis)
    return x


def smooth(x, sigma):
    """Gaussian smoothing along every spatial axis. x: (B, C, *spatial). sigma: in voxels; 0 returns x itself."""
    return along_axes(x, [gaussian(n, sigma, x.device) for n in x.shape[2:]])


def smaller(image, factor):
    """An image with 1 / factor of the voxels per side, corners on corners as in `resize_field`.

    image: (B, C, *spatial). Returns: (B, C, *smaller), each side at least 2.
    """
    if factor == 1:
        return image
    size = [max(-(-n // factor), 2) for n in image.shape[2:]]
    return interpolate(smooth(image, 0.4 * factor), size, align_corners=True)
