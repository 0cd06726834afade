"""Losses: one short function each. All work in float32 with autocast off, whatever the network ran in.

Fields are (B, N, *spatial) displacements in voxels, images (B, C, *spatial).
"""
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from Diffusion.fields import jacobian_determinant, side_lengths, warp

# Squared fraction of the image side below which a displacement counts as none (0.04 voxels at 128).
NEGLIGIBLE = 1e-7


def recovery_terms(pred_field, target_field):
    """How well `pred_field` undoes `target_field`: the terms `dist` and `ang`, per sample.

    With r(x) = p(x + target(x)), a perfect prediction gives r = -target.
    dist: mean over voxels of |r + target|^2 / (|target|^2 + 1e-7); 0 is perfect, 1 is what a zero prediction gets.
    ang: mean cosine of r and target where the target is not negligible; -1 is perfect, 0 unrelated, +1 opposite.
    Lengths are fractions of the image side, axis by axis, as the noise is drawn.

    pred_field, target_field: (B, N, *spatial). Returns: two tensors (B,).
    """
    side = side_lengths(target_field.shape[2:], target_field.device)
    target = target_field.float() / side
    r = warp(pred_field, target_field, padding="border") / side
    squared = target.square().sum(1)
    dist = ((r + target).square().sum(1) / (squared + NEGLIGIBLE)).flatten(1).mean(1)
    # The clamp keeps the gradient finite where the prediction is still zero. (F.cosine_similarity takes its norms over
    # the channels of a volume five times slower.)
    lengths = r.square().sum(1).clamp(min=NEGLIGIBLE) * squared.clamp(min=NEGLIGIBLE)
    cosine = (r * target).sum(1) * lengths.rsqrt()
    counted = (squared > NEGLIGIBLE).float()
    ang = (cosine * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1.0)
    return dist, ang


def roughness(field, waiver=0.0):
    """Mean absolute difference of neighbouring displacements (voxels per voxel) above `waiver`; 0 where smooth.

    field: (B, N, *spatial). Returns a scalar >= 0.
    """
    axes = range(2, field.dim())
    return sum(F.relu(field.float().diff(dim=axis).abs() - waiver).mean() for axis in axes) / len(axes)


def folding(field):
    """Mean of the negative part of the Jacobian determinant of id + field; 0 where nothing folds, 1 for a reflection.

    field: (B, N, *spatial). Returns a scalar >= 0.
    """
    return F.relu(-jacobian_determinant(field)).mean()


def regularity(field, waiver=0.0, folding_weight=1.0):
    """The regulariser of all modes: roughness above a waiver plus weighted folding. Returns a scalar >= 0."""
    return roughness(field, waiver) + folding_weight * folding(field)


def _band(n, window, device):
    """(n, n) matrix whose product is the mean over `window` neighbours, zeros outside."""
    return torch.full((n, n), 1.0 / window, device=device).triu(-(window // 2)).tril(window // 2)


def box_mean(x, window):
    """Mean over the cube of `window` voxels around each voxel, zeros outside. x: (B, C, *spatial) float32.

    One banded matrix product along each axis. For sides of some hundred voxels that is faster than running sums,
    pooling or convolutions, and it has no long sums to lose digits in. It is its own transpose.
    """
    for axis in range(2, x.dim()):
        band = _band(x.shape[axis], window, x.device)
        if axis == x.dim() - 1:
            x = x @ band
        else:
            x = (band @ x.flatten(axis + 1).flatten(0, axis - 1)).view(x.shape)
    return x


class _LocalCorrelation(torch.autograd.Function):
    """Mean local correlation with its gradient written out: three box means per image instead of autograd's five."""

    @staticmethod
    def forward(ctx, a, b, window, squared, eps):
        mean_a, mean_b = box_mean(a, window), box_mean(b, window)
        # Variances are clamped at zero: a difference of means can come out slightly negative where an image is flat.
        var_a = box_mean(a * a, window).addcmul_(mean_a, mean_a, value=-1.0).clamp_(min=0.0)
        var_b = box_mean(b * b, window).addcmul_(mean_b, mean_b, value=-1.0).clamp_(min=0.0)
        covariance = box_mean(a * b, window).addcmul_(mean_a, mean_b, value=-1.0)
        variances = (var_a * var_b).add_(eps ** 2)
        ctx.save_for_backward(a, b, mean_a, mean_b, var_a, var_b, covariance, variances)
        ctx.window, ctx.squared = window, squared
        return (covariance.square() / variances if squared else covariance * variances.rsqrt()).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b, mean_a, mean_b, var_a, var_b, covariance, variances = ctx.saved_tensors
        by_covariance = (covariance / variances).mul_(2.0) if ctx.squared else variances.rsqrt()
        by_covariance = by_covariance.mul_(grad / a.numel())
        # Derivative by one variance, short of the other variance.
        by_variance = (by_covariance * covariance).div_(variances).mul_(-0.5)
        spread = box_mean(by_covariance, ctx.window)
        results = []
        for needed, own, other, mean, other_mean, var, other_var in (
                (ctx.needs_input_grad[0], a, b, mean_a, mean_b, var_a, var_b),
                (ctx.needs_input_grad[1], b, a, mean_b, mean_a, var_b, var_a)):
            if not needed:
                results.append(None)
                continue
            by_own = (by_variance * other_var).mul_(var > 0).mul_(2.0)
            by_mean = (by_covariance * other_mean).addcmul_(by_own, mean)
            results.append((spread * other).addcmul_(own, box_mean(by_own, ctx.window))
                           .sub_(box_mean(by_mean, ctx.window)))
        return (*results, None, None, None)


def local_correlation(image, target, window=9, squared=True, eps=1e-5):
    """Mean local normalised cross-correlation over cubes of `window` voxels (zeros outside the image).

    image, target: (B, C, *spatial), intensities of order one. window: odd, voxels. eps: a variance that counts as none.
    Returns a scalar: squared, 0 .. 1; signed, -1 .. 1; 1 is perfect. (Avants et al., Med Image Anal 2008.)
    """
    with torch.autocast(image.device.type, enabled=False):
        return _LocalCorrelation.apply(image.float(), target.float(), window, squared, eps)


def mslncc(image, target, window=9, scales=3, squared=True):
    """Local correlation averaged over scales 1, 1/2, 1/4, ... made by average pooling. Same range as at one scale."""
    total = 0.0
    for level in range(scales):
        if level:
            pool = F.avg_pool3d if image.dim() == 5 else F.avg_pool2d
            image, target = pool(image, 2), pool(target, 2)
        total = total + local_correlation(image, target, window, squared)
    return total / scales


def info_nce(anchors, positives, negatives, allowed, temperature):
    """Cross-entropy of picking the own positive among the queue's negatives.

    anchors, positives: (B, E) unit vectors. negatives: (K, E) unit vectors, no gradient.
    allowed: (B, K) bool, False where the negative is of the same subject (or an empty place).
    Returns a scalar >= 0; 0 where a sample has no allowed negative.
    """
    positive = (anchors * positives).sum(1, keepdim=True)
    others = (anchors @ negatives.T).masked_fill(~allowed, float("-inf"))
    logits = torch.cat([positive, others], dim=1) / temperature
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()
