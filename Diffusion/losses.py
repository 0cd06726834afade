"""Losses: one short function each. All work in float32 with autocast off, whatever the network ran in.

Fields are (B, N, *spatial) displacements in voxels, images (B, C, *spatial). To add a loss, write a function here and a
line in its step function in OM_train_3modes.py.
"""
import itertools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from Diffusion.device_ops import accelerated, constant, product_along
from Diffusion.fields import append_dims, jacobian_determinant, masked, side_lengths, warp
from Runtime.errors import InputError

# A displacement counts as zero where its squared length, as a fraction of the image side, is below this: 0.04 voxels at
# a side of 128.
NEGLIGIBLE = 1e-7
FLAT = 1e-5  # a variance that counts as zero, of intensities of order one
FEW_SHIFTS = 5  # voxels: the largest window that a CPU sums by shifted copies; beyond it matrix products are as fast


def recovery_terms(pred_field, target_field):
    """How well a predicted field p undoes the target field u: the terms `dist` and `ang` of each sample.

    The losses of Zheng et al., "Deformation-recovery diffusion model (DRDM)", Medical Image Analysis 110 (2026) 103987.
    With r(x) = p(x + u(x)), compose(p, u) = r + u is zero for a perfect prediction.
    dist = mean over voxels of |r + u|^2 / (|u|^2 + 1e-7): >= 0, 0 is perfect. A prediction of zero gets 1 only where
    the target is large: about 0.5 at t = 1 and 0.98 at t = 79 with the keys of config_om, 0.92 on average.
    ang = mean of cos(r, u) over voxels with |u|^2 > 1e-7: -1 is perfect, 0 unrelated, +1 opposite.
    Lengths are fractions of the image side, axis by axis, as the noise is drawn.

    pred_field, target_field: (B, N, *spatial) in voxels. Returns: dist and ang, (B,) each.
    Raises InputError if their shapes differ, since `warp` would sample a field of any size.
    """
    if pred_field.shape != target_field.shape:
        raise InputError(f"the network returns a field of shape {tuple(pred_field.shape)} instead of "
                         f"{tuple(target_field.shape)}; return a displacement in voxels for each voxel of its image.")
    side = side_lengths(target_field.shape[2:], target_field.device)
    target = target_field.float() / side
    r = warp(pred_field, target_field, padding="border") / side
    squared = target.square().sum(1)
    dist = ((r + target).square().sum(1) / (squared + NEGLIGIBLE)).flatten(1).mean(1)
    # The clamp keeps the gradient finite where the prediction is still zero. Written out, because the norms of
    # F.cosine_similarity over the channels of a volume are five times slower.
    lengths = r.square().sum(1).clamp(min=NEGLIGIBLE) * squared.clamp(min=NEGLIGIBLE)
    cosine = (r * target).sum(1) * lengths.rsqrt()
    return dist, counted_means(cosine, (squared > NEGLIGIBLE).float())


def roughness(field, waiver=0.0):
    """Mean over axes a, channels i and voxels x of max(|u_i(x + e_a) - u_i(x)| - waiver, 0), where u is the field.

    field: (B, N, *spatial) in voxels. waiver: a difference that is not penalised, in voxels per voxel.
    Returns: a scalar >= 0; 0 for a shift.
    """
    axes = range(2, field.dim())
    return sum(F.relu(field.float().diff(dim=axis).abs() - waiver).mean() for axis in axes) / len(axes)


def folding(field):
    """Mean of max(-det J, 0), J the Jacobian of x -> x + field(x): the volume that is turned inside out.

    The penalty of negative Jacobian determinants as in Mok and Chung, CVPR 2020.
    field: (B, N, *spatial) in voxels. Returns: a scalar >= 0; 0 where nothing folds, 1 for a reflection.
    """
    return F.relu(-jacobian_determinant(field)).mean()


def regularity(field, waiver=0.0, folding_weight=1.0):
    """The regulariser of modes 1 and 3: roughness(field, waiver) + folding_weight * folding(field).

    field: (B, N, *spatial) in voxels. Returns: a scalar >= 0.
    """
    return roughness(field, waiver) + folding_weight * folding(field)


def _band(n, window, device):
    """(n, n) matrix M such that M x is the mean of x over the `window` neighbours, as many of them as there are."""
    band = torch.ones(n, n, dtype=torch.float32, device=device).triu(-(window // 2)).tril(window // 2)
    return band / band.sum(1, keepdim=True)


def box_mean(x, window, transposed=False):
    """Mean over the cube of `window` voxels around each voxel, counting only voxels in the image.

    One banded matrix product along each axis. At sides of some hundred voxels that is faster than running sums, pooling
    or convolutions, and it has no long sums that lose digits. How many voxels of a cube lie in the image is a product
    of one number for each axis, so the matrices hold that, too. On a CPU a small cube is summed by adding shifted
    copies, in a third of the time.
    x: (B, C, *spatial) float32. transposed: the transposed operator, as gradients need it.
    """
    if window <= FEW_SHIFTS and not accelerated(x):
        return _ShiftedMean.apply(x, window, transposed)
    for axis in range(2, x.dim()):
        band = constant(_band, x.shape[axis], window, device=x.device)
        x = product_along(x, band.T if transposed else band, axis)
    return x


class _ShiftedMean(torch.autograd.Function):
    """`box_mean` as a sum of shifted copies; its gradient is the transposed operator."""

    @staticmethod
    def forward(ctx, x, window, transposed):
        ctx.window, ctx.transposed = window, transposed
        shares = 1.0
        for axis in range(2, x.dim()):
            n, reach = x.shape[axis], window // 2
            place = torch.arange(n, device=x.device)
            count = (place + reach).clamp(max=n - 1) - (place - reach).clamp(min=0) + 1
            shares = shares / count.to(x.dtype).view([-1 if k == axis else 1 for k in range(x.dim())])
        x = x * shares if transposed else x
        for axis in range(2, x.dim()):
            n, total = x.shape[axis], x.clone()
            for k in range(1, min(window // 2, n - 1) + 1):
                total.narrow(axis, 0, n - k).add_(x.narrow(axis, k, n - k))
                total.narrow(axis, k, n - k).add_(x.narrow(axis, 0, n - k))
            x = total
        return x if transposed else x.mul_(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _ShiftedMean.apply(grad, ctx.window, not ctx.transposed), None, None


def counted_means(values, counted):
    """Each sample's mean of values (B, ...) under `counted`, of the same shape: (B,); 0 if nothing counts."""
    return (values * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1.0)


class _LocalCorrelation(torch.autograd.Function):
    """`local_correlation` with its gradient written out: three box means for each image instead of autograd's five."""

    @staticmethod
    def forward(ctx, a, b, window, squared):
        mean_a = box_mean(a, window)
        mean_b = box_mean(b, window)
        # Clamped: rounding can make this difference of means slightly negative where an image is flat.
        var_a = box_mean(a * a, window).addcmul_(mean_a, mean_a, value=-1.0).clamp_(min=0.0)
        var_b = box_mean(b * b, window).addcmul_(mean_b, mean_b, value=-1.0).clamp_(min=0.0)
        covariance = box_mean(a * b, window).addcmul_(mean_a, mean_b, value=-1.0)
        variances = (var_a * var_b).add_(FLAT ** 2)
        counted = (var_b > 10 * FLAT).float()
        ctx.save_for_backward(a, b, mean_a, mean_b, var_a, var_b, covariance, variances, counted)
        ctx.window, ctx.squared = window, squared
        correlation = covariance.square() / variances if squared else covariance * variances.rsqrt()
        return counted_means(correlation, counted).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, mean_a, mean_b, var_a, var_b, covariance, variances, counted = ctx.saved_tensors
        number = append_dims(counted.flatten(1).sum(1).clamp(min=1.0), a)
        by_covariance = (covariance / variances).mul_(2.0) if ctx.squared else variances.rsqrt()
        by_covariance = by_covariance.mul_(counted).mul_(grad / (len(a) * number))
        # The derivative by one variance, without the factor of the other variance.
        by_variance = (by_covariance * covariance).div_(variances).mul_(-0.5)
        spread = box_mean(by_covariance, ctx.window, transposed=True)
        results = []
        for needed, own, other, mean, other_mean, var, other_var in (
                (ctx.needs_input_grad[0], a, b, mean_a, mean_b, var_a, var_b),
                (ctx.needs_input_grad[1], b, a, mean_b, mean_a, var_b, var_a)):
            if not needed:
                results.append(None)
                continue
            by_own = (by_variance * other_var).mul_(var > 0).mul_(2.0)
            by_mean = (by_covariance * other_mean).addcmul_(by_own, mean)
            results.append((spread * other).addcmul_(own, box_mean(by_own, ctx.window, transposed=True))
                           .sub_(box_mean(by_mean, ctx.window, transposed=True)))
        return (*results, None, None)


def local_correlation(image, target, window=9, squared=True, weight=None):
    """Mean local normalised cross-correlation of two images.

    With means <.> over the cube of `window` voxels around each voxel, of those that lie in the image,
      cov = <I T> - <I><T>,  var_I = <I I> - <I>^2,  var_T = <T T> - <T>^2,
      squared:  mean of cov^2 / (var_I var_T + FLAT^2), 0 .. 1 (Avants et al., Med Image Anal 2008)
      else:     mean of cov / sqrt(var_I var_T + FLAT^2), -1 .. 1 (Cachier et al., CVIU 2003, by Gaussian windows)
    and 1 is perfect, so the loss is its negative. The mean is over voxels with var_T > 10 FLAT: a flat target cannot be
    compared, and the size of that part must not matter. The choice of voxels does not depend on the image, which could
    otherwise hide differences. Each sample counts equally.

    image, target: (B, C, *spatial), intensities of order one. window: odd, in voxels. weight: (B, 1, *spatial),
    0 .. 1, how much each voxel counts, in the means of a window and in the mean of all; None for all alike.
    Returns: a scalar; 0 where nothing counts.
    """
    with torch.autocast(image.device.type, enabled=False):
        image, target = image.float(), target.float()
        if weight is None:
            return _LocalCorrelation.apply(image, target, window, squared)
        weight = weight.float()
        correlation, counted = local_correlation_map(image, target, window, squared, weight)
        return counted_means(correlation, weight * counted).mean()


def local_correlation_map(image, target, window=9, squared=True, weight=None):
    """The local correlation in the window around each voxel, and where it is defined: (B, C, *spatial) float32 each.

    Arguments as for `local_correlation`. The second is 1 where the target is not flat, else 0.
    """
    weight = torch.ones_like(image[:, :1]) if weight is None else weight
    count = box_mean(weight, window).clamp(min=1e-4)
    image_mean = box_mean(weight * image, window) / count
    target_mean = box_mean(weight * target, window) / count
    image_variance = weighted_variance(image, image_mean, weight, count, window)
    target_variance = weighted_variance(target, target_mean, weight, count, window)
    covariance = box_mean(weight * image * target, window) / count - image_mean * target_mean
    variances = image_variance * target_variance + FLAT ** 2
    correlation = covariance.square() / variances if squared else covariance * variances.rsqrt()
    return correlation, (target_variance > 10 * FLAT).float()


def window_statistics(target, window, weight=None):
    """The statistics of a fixed target for `correlation_slope`: a tuple of count, mean, variance and `counted`.

    target: (B, C, *spatial) float32. weight: (B, 1, *spatial) or None. Returns: count, the mean of the weight in each
    cube, or None; mean and variance of the target there; how much each window counts.
    """
    count = None if weight is None else box_mean(weight, window).clamp(min=1e-4)

    def mean_of(values):
        return box_mean(values, window) if weight is None else box_mean(weight * values, window).div_(count)

    mean = mean_of(target)
    variance = mean_of(target.square()).addcmul_(mean, mean, value=-1.0).clamp_(min=0.0)
    counted = (variance > 10 * FLAT).float()  # as in `local_correlation_map`
    return count, mean, variance, counted if weight is None else counted * weight


def correlation_slope(image, target, statistics, window=9, squared=True, weight=None, mean_of_all=True):
    """Gradient of `local_correlation` by the image, approximated by the window around each voxel alone.

    The derivative of the mean over all windows sums what the voxel does to each window that it lies in. These differ
    little, so the window around the voxel stands for all, as in Avants et al., Med Image Anal 2008. That takes half the
    time, and the resulting fields are no worse.

    image, target: (B, C, *spatial) float32. statistics: `window_statistics` of the target, under the same weight.
    mean_of_all: False for the sum over the windows instead of their mean, which can be compared between parts of an
    image. Returns: (B, C, *spatial).
    """
    count, target_mean, target_variance, counted = statistics
    seen = image if weight is None else weight * image
    mean, variance, covariance = (box_mean(each, window) for each in (seen, seen * image, seen * target))
    if weight is not None:
        mean, variance, covariance = (each.div_(count) for each in (mean, variance, covariance))
    variance.addcmul_(mean, mean, value=-1.0).clamp_(min=0.0)
    covariance.addcmul_(mean, target_mean, value=-1.0)
    variances = variance.mul_(target_variance).add_(FLAT ** 2)
    by_covariance = (covariance / variances).mul_(2.0) if squared else variances.rsqrt()
    by_covariance.mul_(counted)
    if mean_of_all:
        by_covariance.div_(counted.sum().clamp(min=1.0))
    by_image = covariance.div_(variances).mul_(target_variance).mul_(mean.neg_().add_(image))
    return (target - target_mean).sub_(by_image).mul_(by_covariance)


def weighted_variance(image, mean, weight, count, window):
    """Variance of an image in the cube of `window` voxels around each voxel, under a weight.

    image: (B, C, *spatial). mean: the same, box_mean(weight * image, window) / count. weight: (B, 1, *spatial). count:
    the same, the mean of the weight in each cube, above 0. Returns: of the image's shape.
    """
    return (box_mean(weight * image * image, window) / count - mean * mean).clamp(min=0.0)


def weighted_mean(values, weight):
    """The mean of values (B, C, *spatial) under a weight (B, 1, *spatial), a scalar; 0 where nothing counts."""
    return (weight * values).sum() / (values.shape[1] * weight.sum()).clamp(min=1.0)


def mean_square(difference, weight=None):
    """Mean of a squared difference (B, C, *spatial). weight: (B, 1, *spatial), see `weighted_mean`; None for none."""
    return difference.square().mean() if weight is None else weighted_mean(difference.square(), weight)


def over_scales(similarity, image, target, scales, weight, **options):
    """The mean of a similarity at scales 1, 1/2, 1/4, ..., by average pooling (`masked`).

    similarity: one of MEASURES, called with options. image, target: (B, C, *spatial). scales: how many. weight:
    (B, 1, *spatial), 0 .. 1, or None.
    """
    total, pool = 0.0, F.avg_pool3d if image.dim() == 5 else F.avg_pool2d
    for level in range(scales):
        if level:
            (image, count), (target, _) = (masked(lambda volume: pool(volume, 2), each, weight)
                                           for each in (image, target))
            weight = count
        total = total + similarity(image, target, weight=weight, **options)
    return total / scales


def self_similarity(image, distance=1, window=3):
    """How the surroundings of each voxel resemble each other, which is similar in every modality (MIND-SSC).

    Of the neighbours at `distance` along the axes, both ways, take all pairs (i, j) on two different axes; with I_i the
    image seen from neighbour i, and the mean over the cube of `window` voxels,
      D_ij = mean (I_i - I_j)^2,  channel ij = exp(-(D_ij - min D) / V),  V = mean over ij of (D_ij - min D).
    Heinrich et al., "Towards Realtime Multimodal Fusion for Image-Guided Interventions Using Self-similarities",
    MICCAI 2013.

    image: (B, C, *spatial). distance: in voxels. window: odd, in voxels.
    Returns: (B, 12 C, *spatial), of 2D images (B, 4 C, *spatial); float32, 0 .. 1.
    """
    dims, batch = image.dim() - 2, len(image)
    with torch.autocast(image.device.type, enabled=False):
        image = each_channel(image.float())
        padded = F.pad(image, [distance] * (2 * dims), mode="replicate")
        inner = [slice(distance, distance + n) for n in image.shape[2:]]
        seen = {}
        for axis, step in itertools.product(range(dims), (-distance, distance)):
            start = distance + step
            at = [*inner[:axis], slice(start, start + image.shape[2 + axis]), *inner[axis + 1:]]
            seen[axis, step] = padded[:, :, *at]
        pairs = [(a, b) for a, b in itertools.combinations(seen, 2) if a[0] != b[0]]
        distances = torch.cat([box_mean((seen[a] - seen[b]).square(), window) for a, b in pairs], dim=1)
        distances = distances - distances.amin(1, keepdim=True)
        variance = distances.mean(1, keepdim=True)
        # Between a thousandth and a thousand times its mean over the image, so that noise in flat parts says nothing.
        mean = variance.mean(list(range(1, dims + 2)), keepdim=True).detach().clamp(min=1e-12)
        variance = torch.minimum(torch.maximum(variance, 1e-3 * mean), 1e3 * mean)
        return (distances / -variance).exp_().view(batch, -1, *image.shape[2:])


def each_channel(image):
    """An image (B, C, *spatial) as B C samples of one channel, (B C, 1, *spatial)."""
    return image.flatten(0, 1).unsqueeze(1)


def mind_similarity(described, target, weight=None):
    """How alike the descriptions of two images by `self_similarity` are: 1 - mean squared difference, 1 is perfect.

    described, target: (B, C, *spatial). weight: (B, 1, *spatial) or None. Returns: a scalar, 0 .. 1.
    """
    return 1.0 - mean_square(described - target, weight)


def mapped_correlation(image, target, window=9, squared=True, weight=None, bins=32):
    """Local correlation of images whose intensities mean different things, as of two modalities.

    The mean of local_correlation(image, f(target)) and local_correlation(g(image), target). f maps an intensity of the
    target to the mean intensity of the image there, and g the other way round, in the current alignment: the best
    functions of one intensity (the correlation ratio, Roche et al., MICCAI 1998). f and g are without gradient.

    image, target: (B, C, *spatial), intensities 0 .. 1, each channel with functions of its own. window, squared,
    weight: of `local_correlation`. bins: knots of f and g, which are linear between them.
    Returns: a scalar; 1 is perfect.
    """
    if weight is not None:
        weight = weight.repeat_interleave(image.shape[1], dim=0)
    with torch.autocast(image.device.type, enabled=False):
        image, target = each_channel(image.float()), each_channel(target.float())
        as_image = table_lookup(target, conditional_means(target.detach(), image.detach(), weight, bins))
        as_target = table_lookup(image, conditional_means(image.detach(), target.detach(), weight, bins))
        return 0.5 * (local_correlation(image, as_image, window, squared, weight=weight)
                      + local_correlation(as_target, target, window, squared, weight=weight))


def _knots(image, bins):
    """For each intensity of an image (B, ...): number of the knot below, across samples, and fraction to the next."""
    place = image.clamp(0, 1).flatten(1) * (bins - 1)
    below = place.detach().floor().clamp(max=bins - 2)
    first = bins * torch.arange(len(image), device=image.device)
    return below.long() + first[:, None], place - below


def conditional_means(image, other, weight, bins):
    """The mean of `other` for each intensity of an image: (B, bins), for intensities from 0 to 1.

    image, other: (B, 1, *spatial). weight: (B, 1, *spatial) or None. An intensity that does not occur gets about the
    mean of all. Summed in float64, which some Intel GPUs lack: a sum in float32 stops growing at some million voxels.
    """
    below, rest = _knots(image, bins)
    other = other.flatten(1)
    weight = torch.ones_like(other) if weight is None else weight.detach().float().flatten(1)
    dtype = torch.float32 if image.device.type == "xpu" else torch.float64
    count, total = torch.zeros(2, len(image) * bins, dtype=dtype, device=image.device)
    for knot, share in ((below, weight * (1 - rest)), (below + 1, weight * rest)):
        count = count.index_add(0, knot.flatten(), share.flatten().to(dtype))
        total = total.index_add(0, knot.flatten(), (share * other).flatten().to(dtype))
    count, total = count.view(-1, bins), total.view(-1, bins)
    of_all = total.sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp(min=1.0)
    return ((total + 1e-3 * of_all) / (count + 1e-3)).float()


def table_lookup(image, table):
    """An image with its intensities mapped by a table (B, bins), linearly between knots from 0 to 1; its own shape."""
    below, rest = _knots(image, table.shape[1])
    table = table.flatten()
    return torch.lerp(table[below], table[below + 1], rest).view(image.shape)


def mind(image, target, window=None, squared=None, weight=None):
    """The `mind_similarity` of two images (B, C, *spatial); `window` and `squared` have no effect.

    Voxels of weight 0 are set to 0 in both, or they would show in their neighbours. weight: (B, 1, *spatial) or None.
    """
    if weight is not None:
        image, target = image * (weight > 0), target * (weight > 0)
    return mind_similarity(self_similarity(image), self_similarity(target), weight)


# What registration.similarity may name: functions of (image, target, window, squared, weight), a scalar of which 1 is
# perfect. The affine stage aligns by correlation, or by mutual information with those of OF_TWO_MODALITIES.
MEASURES = {"auto": local_correlation,  # of a training; the volumes of one data set usually have one modality
            "correlation": local_correlation, "mapped": mapped_correlation, "mind": mind}
OF_TWO_MODALITIES = ("mapped", "mind")


def image_similarity(image, target, cfg, weight=None):
    """The similarity that mode 3 maximises: the function of MEASURES that the config names, averaged over the scales.

    image, target: (B, C, *spatial). cfg: with its registration.* keys. weight: (B, 1, *spatial) or None.
    Returns: a scalar, at most 1, which is perfect.
    """
    return over_scales(MEASURES[cfg["registration.similarity"]], image, target, cfg["registration.scales"], weight,
                       window=cfg["registration.window"], squared=cfg["registration.squared"])


def mutual_information(image, target, weight, bins=32):
    """Normalised mutual information of all voxels under a weight.

    2 (1 - H(I, T) / (H(I) + H(T))) with the entropies H of a joint histogram: 0 for independent images. The target's
    intensities fall into one bin each, the image's spread over four by a cubic B-spline, so that the gradient is smooth
    (Mattes et al., "PET-CT image registration in the chest using free-form deformations", TMI 2003). Because of that
    spread, an image compared with itself gets 0.6 to 0.75, depending on its histogram, and not 1.

    image, target, weight: the same shape, intensities 0 .. 1. Returns: a scalar; float64, whose sums keep every voxel.
    """
    rows = (target.clamp(0, 1) * (bins - 1)).round().long().flatten()
    place = image.double().clamp(0, 1).flatten() * (bins - 1)
    first = place.detach().floor()
    r = place - first
    splines = [(1 - r) ** 3, 3 * r ** 3 - 6 * r ** 2 + 4, -3 * r ** 3 + 3 * r ** 2 + 3 * r + 1, r ** 3]
    joint = torch.zeros(bins * (bins + 3), dtype=torch.float64, device=image.device)
    cells = rows * (bins + 3) + first.long()
    for shift, spline in enumerate(splines):
        joint = joint.index_add(0, cells + shift, weight.double().flatten() * spline / 6)
    joint = (joint / joint.sum().clamp(min=1e-6)).view(bins, bins + 3)
    both, one, other = (-torch.xlogy(p, p.clamp(min=1e-12)).sum() for p in (joint, joint.sum(0), joint.sum(1)))
    return 2.0 * (1.0 - both / (one + other).clamp(min=1e-6))


def warp_inside(image, field, moving, fixed):
    """The moving images warped by fields, and the weight of each voxel if volumes have masks.

    The weight has no gradient; otherwise a field would gain by moving dissimilar parts out of the mask.
    image: (B, 1, *spatial). field: (B, N, *spatial) in voxels. moving, fixed: masks (B, 1, *spatial), above 0 inside.
    Returns: (B, 1, *spatial), see `masked`; (B, 1, *spatial), 0 .. 1: how far a voxel is inside of both masks, 0 where
    its field leads out of the moving volume.
    """
    warped, weight = masked(lambda volume: warp(volume, field), image, (moving > 0).float())
    return warped, (fixed > 0) * weight.detach()


def one_hot(label, values):
    """One channel for each label: 1 where the map has it, else 0.

    label: (B, 1, *spatial) whole numbers. values: (L,), the labels. Returns: (B, L, *spatial) float32.
    """
    return (label == values.view(1, -1, *[1] * (label.dim() - 2))).float()


def structure_shares(logits):
    """How much of each structure is in each voxel: (B, L, *spatial), 0 .. 1.

    logits: (B, L + 1, *spatial), of the background, then of the structures.
    """
    return logits.softmax(1)[:, 1:]


def soft_dice(first, second, counted):
    """Dice of two soft label maps: the mean over the labels that count of 2 sum(a b) / (sum(a) + sum(b)).

    For maps of zeros and ones this is the Dice of `metrics.dice`; with fractions it has a gradient (after Milletari et
    al., "V-Net", 3DV 2016, whose sums below are of squares).
    first, second: (B, L, *spatial), 0 .. 1. counted: (B, L), 1 for a label that counts, else 0.
    Returns: (B,), 0 .. 1; 1 is perfect, and for a pair of maps in which no label counts.
    """
    common = 2.0 * (first * second).flatten(2).sum(2)                          # (B, L)
    both = first.flatten(2).sum(2) + second.flatten(2).sum(2)
    # Clamped: a label without a voxel in either map has Dice 0, not 0 / 0.
    missing = counted * (1.0 - common / both.clamp(min=1e-3))
    return 1.0 - missing.sum(1) / counted.sum(1).clamp(min=1.0)


def label_terms(field, moving, fixed, labelled, values, shares=None):
    """How far the warped labels of pairs are from overlapping: 1 - `soft_dice`.

    Each label is warped like an image of zeros and ones, by linear interpolation, so that the field has a gradient. In
    each pair those labels count that one of its two maps has.
    field: (B, N, *spatial) in voxels. moving, fixed: label maps (B, 1, *spatial), whole numbers. labelled: B pairs of
    bools, whether moving and fixed volume have labels. values: (L,), all labels that may count. shares: what the
    network segments in the moving and in the fixed volumes, (B, L, *spatial) each, without gradient; it replaces
    missing labels. None: pairs without labels on both sides add nothing.
    Returns: the mean over the pairs that count, 0 .. 1, 0 is perfect (0 without such a pair); their share, 0 .. 1.
    """
    found = []
    for number, has in enumerate(labelled):
        if not all(has) and shares is None:
            continue
        one = slice(number, number + 1)
        start, end = (one_hot(maps[one], values) if known else share[one]
                      for maps, known, share in zip((moving, fixed), has, shares or (None, None)))
        occurs = (torch.maximum(start.flatten(2).amax(2), end.flatten(2).amax(2)) > 0.5).float()    # (1, L)
        found.append(1.0 - soft_dice(warp(start, field[one]), end, occurs))
    mean = torch.cat(found).mean() if found else field.new_zeros((), dtype=torch.float32)
    return mean, torch.full_like(mean, len(found) / len(labelled))


def segmentation_terms(logits, moving, fixed, labelled, values):
    """How far the segmentation of volumes is from their label maps: cross-entropy + 1 - `soft_dice` of each volume.

    logits: (2 B, L + 1, *spatial), float32, of background and labels, first of the moving, then of the fixed volumes.
    Others: as for `label_terms`; here a volume counts by itself. A label that the map lacks counts for the
    cross-entropy only.
    Returns: the mean over the volumes with labels, >= 0 (0 without one); their share, 0 .. 1.
    """
    has = [of_moving for of_moving, _ in labelled] + [of_fixed for _, of_fixed in labelled]
    maps, found = torch.cat([moving, fixed]), []
    for number in (number for number, known in enumerate(has) if known):
        hot, one = one_hot(maps[number:number + 1], values), logits[number:number + 1]      # (1, L or L + 1, ...)
        target = torch.cat([1.0 - hot.sum(1, keepdim=True), hot], dim=1)                        # (1, L + 1, *spatial)
        entropy = -(target * one.log_softmax(1)).sum(1).mean()
        found.append(entropy + 1.0 - soft_dice(structure_shares(one), hot, hot.flatten(2).amax(2)).mean())
    # Of no volume: zero, with a gradient of zeros, so that every rank sums the same gradients.
    mean = torch.stack(found).mean() if found else 0.0 * logits.sum()
    return mean, torch.full_like(mean.detach(), len(found) / len(has))


def info_nce(anchors, positives, negatives, allowed, temperature):
    """InfoNCE: the cross-entropy of picking a sample's positive among the negatives of a queue.

    loss = mean over samples of -log(exp(a.p / T) / (exp(a.p / T) + sum over allowed n of exp(a.n / T)))
    (van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018; with a queue as in He et
    al., "Momentum Contrast", CVPR 2020).

    anchors, positives: (B, E) unit vectors. negatives: (K, E) unit vectors, without gradient. allowed: (B, K) bool,
    False where the negative is of the same subject, or an empty place. temperature: T > 0.
    Returns: a scalar >= 0; a sample without an allowed negative adds 0.
    """
    positive = (anchors * positives).sum(1, keepdim=True)
    others = (anchors @ negatives.T).masked_fill(~allowed, float("-inf"))
    logits = torch.cat([positive, others], dim=1) / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()


def checked(mode, result):
    """Return the result of a step function unchanged. mode: its entry in MODES of the training script.

    Raises InputError naming the mode and the term if it cannot be trained on.
    """
    if not isinstance(result, (tuple, list)) or len(result) < 2 or not isinstance(result[1], dict):
        raise InputError(f"mode {mode.name}: its step function returns no loss with a dict of terms; end it with "
                         "`return loss, terms`.")
    loss, terms = result[:2]
    if mode.curve in terms:
        raise InputError(f"mode {mode.name} returns a term {mode.curve}, which is the name of its curve; rename one.")
    for name, value in {"loss": loss, **terms}.items():
        if not isinstance(value, torch.Tensor) or value.dim():
            found = f"of shape {[*value.shape]}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise InputError(f"mode {mode.name}: its {name} is {found}, not a tensor of one number; take the mean of a "
                             "larger one, and loss.new_tensor of a plain number.")
    if not loss.requires_grad:
        raise InputError(f"mode {mode.name}: its loss has no gradient, so nothing would be learned; compute it from "
                         "what the network returns, without detach, item or no_grad.")
    return result
