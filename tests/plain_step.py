"""The three modes of a training step written plainly, from their definitions: slow, for comparison with what is used.

Deformations are composed one after the other, local correlations are five convolutions with a cube of ones. Arguments
and results are those of the functions in OM_train_3modes.py, Diffusion/diffuser.py and Diffusion/losses.py.
"""
import torch
import torch.nn.functional as F

import OM_train_3modes as om
from Diffusion.diffuser import DeformDDPM, draw_velocity, image_count, label_count, middle
from Diffusion.fields import compose, resize_field, warp
from Diffusion.losses import NEGLIGIBLE, local_correlation, over_scales, regularity
from Diffusion.predict import align
from Runtime.device import autocast

EPS = 1e-5


def step_by_step(velocity, count, region):
    """A velocity composed with itself `count` times, 1 or more, on a region of its grid."""
    result = velocity
    for _ in range(count - 1):
        result = compose(result, velocity)
    return result[(..., *region)]


def mslncc(image, target, window=9, scales=3, squared=True, weight=None):
    """The similarity of mode 3 with the keys of config_om.yaml: the local correlation over three scales."""
    return over_scales(local_correlation, image, target, scales, weight, window=window, squared=squared)


def dense_correlation(a, b, window=9, squared=True):
    """Local correlation as several packages write it: five convolutions with a cube of ones."""
    channels, dims = a.shape[1], a.dim() - 2
    ones = a.new_ones(channels, 1, *[window] * dims)

    def box(x):
        return (F.conv3d if dims == 3 else F.conv2d)(x, ones, padding=window // 2, groups=channels)
    mean_a, mean_b, aa, bb, ab = (box(x) / box(torch.ones_like(a)) for x in (a, b, a * a, b * b, a * b))
    of_a, of_b = (aa - mean_a * mean_a).clamp(min=0), (bb - mean_b * mean_b).clamp(min=0)
    covariance, variances, counted = ab - mean_a * mean_b, of_a * of_b + EPS ** 2, (of_b > 10 * EPS).to(a.dtype)
    correlation = covariance ** 2 / variances if squared else covariance / variances.sqrt()
    return ((correlation * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)).mean()


class PlainDDPM(DeformDDPM):
    """The same deformations, one sample and one composition after the other."""

    @torch.no_grad()
    def diffuse(self, x0, times, rng_keys, drawn=None):
        images, fields = [], []
        for image, t, rng_key in zip(x0, times, rng_keys):
            velocity, extra = (draw_velocity([rng_key], word, self.dims, self.grids, self.v_scale).to(x0.device)
                               for word in ("velocity", "velocity noise"))
            region, size = middle(self.grids[-1], self.dims), x0.shape[2:]
            fields.append(resize_field(step_by_step(velocity, label_count(t), region), size))
            noisy = compose(velocity, self.noise_ratio * extra)
            images.append(warp(image[None], resize_field(step_by_step(noisy, image_count(t), region), size)))
        return torch.cat(images), torch.cat(fields)


def step_diffusion(net, batch, cfg):
    with autocast(batch["xt"].device, cfg["run.amp"]):
        pred_field = net(batch["xt"], batch["t"], batch["condition"], batch["use_condition"])
    target_field = batch["target_field"]
    side = torch.tensor(target_field.shape[2:], device=target_field.device).view(1, -1, *[1] * (target_field.dim() - 2))
    target, undone = target_field / side, warp(pred_field.float(), target_field, padding="border") / side
    lengths = target.norm(dim=1)
    dist = ((undone + target).norm(dim=1) ** 2 / (lengths ** 2 + NEGLIGIBLE)).mean()
    cosine = (undone * target).sum(1) / (undone.norm(dim=1).clamp(min=NEGLIGIBLE ** 0.5)
                                        * lengths.clamp(min=NEGLIGIBLE ** 0.5))
    ang = torch.stack([one[known].mean() for one, known in zip(cosine, lengths > NEGLIGIBLE ** 0.5)]).mean()
    regul = regularity(pred_field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.dist"] * dist + cfg["loss.ang"] * ang + cfg["loss.regul"] * regul
    return loss, {"ang": ang, "dist": dist, "regul": regul}


step_contrastive = om.step_contrastive  # nothing in it was written for speed


def step_registration(net, batch, cfg):
    moving, fixed = batch["moving"], batch["fixed"]
    field = align(net, moving, fixed, cfg)
    warped = warp(moving, field)
    imgsim, pool = 0.0, F.avg_pool3d if moving.dim() == 5 else F.avg_pool2d
    for level in range(cfg["registration.scales"]):
        image, target = (pool(x, 2 ** level) if level else x for x in (warped, fixed))
        imgsim = imgsim - dense_correlation(image, target, cfg["registration.window"]) / cfg["registration.scales"]
    imgmse = ((warped - fixed) ** 2).mean()
    ddf = regularity(field, cfg["loss.waiver"], cfg["loss.folding"])
    loss = cfg["loss.imgsim"] * imgsim + cfg["loss.imgmse"] * imgmse + cfg["loss.ddf"] * ddf
    return loss, {"imgsim": imgsim, "imgmse": imgmse, "ddf": ddf}
