"""DeformDDPM: the random deformations that mode 1 learns to undo, and the conditions that the network sees.

The method: Zheng, Mo, Sun, Li, Wu, Wang, Vincent, Papież, "Deformation-recovery diffusion model (DRDM): instance
deformation for image manipulation and synthesis", Medical Image Analysis 110 (2026) 103987. docs/paper.md lists the
differences.
"""
import math

import torch

from Diffusion.fields import compose, integrate_velocity, interpolate, resize_field, warp
from Runtime.device import autocast, send
from Runtime.keyed_random import generator, normal, uniform


def image_count(t):
    """Compositions of the velocity with itself that deform the image at time t: 1 .. 200."""
    return min(max(math.floor(2 * t ** 1.3 / 3), 1), 200)


def label_count(t):
    """Compositions that the network learns to undo at time t, those of the target field; 0 at t = 0."""
    return math.floor(t ** 0.6 + 1e-9)  # 32 ** 0.6 is 7.999999999999999 in floating point


def draw_velocity(rng_keys, purpose, dims, grids, v_scale):
    """Random velocity fields on the finest control grid: Gaussian noise at several resolutions, stronger where coarse.

    The grid spans about twice the image, so that deformations reach across its border; `middle` selects the part on it.

    rng_keys: B tuples (seed, epoch, sample). purpose: str naming what is drawn. grids: control points per side,
    ascending, the last a multiple of 4. v_scale: standard deviation of the finest grid's noise, fraction of the image
    side.
    Returns: (B, dims, *[finest] * dims) displacement in spacings of the finest grid.
    """
    finest = grids[-1]
    velocity = 0.0
    for grid in grids:
        noise = normal(rng_keys, f"{purpose} {grid}", dims, *[grid] * dims) * (finest / grid)
        velocity = velocity + interpolate(noise, [finest] * dims, align_corners=True)
    return velocity * (v_scale * (finest // 2 - 1))


def typical_displacement(cfg, t):
    """About the standard deviation of the target field at time t, as a fraction of the image side: the size of a
    prediction. The true one in 2D is 1.3 times as large.

    t = diffusion.timesteps stands for registration. Its value is that of the image field at the last time, the largest
    deformation of mode 1.
    """
    grids = cfg["diffusion.grids"]
    # Linear upsampling leaves (2/3)^(N/2) of the standard deviation between the control points: 0.54 in 3D.
    velocity = 0.5 * cfg["diffusion.v_scale"] * math.hypot(*(grids[-1] / grid for grid in grids))
    return velocity * (image_count(t - 1) if t == cfg["diffusion.timesteps"] else max(label_count(t), 1))


def middle(grid, dims):
    """The part of a control grid of `grid` points per side that lies on the image, corner to corner: `dims` slices."""
    return [slice(grid // 4, grid // 4 + grid // 2)] * dims


class DeformDDPM:
    """The forward process: from an image x0 and a time t to the deformed image x_t and the field to be undone.

    cfg: flat config; uses model.dims, diffusion.timesteps, .grids, .v_scale and .noise_ratio.
    """

    def __init__(self, cfg):
        self.dims = cfg["model.dims"]
        self.timesteps = cfg["diffusion.timesteps"]
        self.grids = cfg["diffusion.grids"]
        self.v_scale = cfg["diffusion.v_scale"]
        self.noise_ratio = cfg["diffusion.noise_ratio"]

    def draw_times(self, rng_keys, purpose="time", share=1.0):
        """One time t for each sample, uniform in 1 .. timesteps - 1: list of B ints. At t = 0 nothing is deformed.

        purpose: str naming what is drawn. share: above 0; only this share of the times, the earliest, rounded up.
        """
        latest = math.ceil(share * (self.timesteps - 1))
        return [1 + int(u * latest) for u in uniform(rng_keys, purpose)]

    def draw_pair_fields(self, size, rng_keys, device, share):
        """Random fields that deform the volumes of pairs, so that few volumes show many shapes.

        size: N voxels per side. rng_keys: B tuples (seed, epoch, sample). share: augment.deform; the fields are image
        fields at times from 1 to this share of the last one.
        Returns: (B, N, *size) displacement in voxels; None for share 0.
        """
        if not share:
            return None
        return self.draw_image_field(size, self.draw_times(rng_keys, "pair time", share), rng_keys, device)

    def draw(self, rng_keys):
        """The random numbers of `draw_fields`, on the CPU: a velocity, and noise to compose onto the image field's.

        They are most of a training's random numbers, so a thread may draw them before the step needs them.
        Returns: (B, N, *[finest] * N) each.
        """
        return tuple(draw_velocity(rng_keys, purpose, self.dims, self.grids, self.v_scale)
                     for purpose in ("velocity", "velocity noise"))

    def velocities(self, drawn, device):
        """The velocity of the target field and the noisier one of the image field, from what `draw` returns."""
        velocity, extra = (send(part, device) for part in drawn)
        return velocity, compose(velocity, self.noise_ratio * extra)

    def on_image(self, velocity, counts, size):
        """The displacement after `counts` compositions of a velocity, where it lies on the image: (B, N, *size)."""
        return resize_field(integrate_velocity(velocity, counts, middle(self.grids[-1], self.dims)), size)

    @torch.no_grad()
    def draw_fields(self, size, times, rng_keys, device, drawn=None):
        """Random fields at given times: the ones that deform the images, and the ones that the network learns to undo.

        The target field is label_count(t) compositions of the velocity. The image field is image_count(t) compositions
        of that velocity composed with a second, small draw.

        size: N voxels per side. times: B ints. rng_keys: B tuples (seed, epoch, sample). drawn: draw(rng_keys), if
        already computed.
        Returns: image field and target field, (B, N, *size) displacement in voxels each.
        """
        velocity, noisy = self.velocities(drawn or self.draw(rng_keys), device)
        target = self.on_image(velocity, [label_count(t) for t in times], size)
        return self.on_image(noisy, [image_count(t) for t in times], size), target

    @torch.no_grad()
    def diffuse(self, x0, times, rng_keys, drawn=None):
        """Deform images: x_t = warp(x0, image field).

        x0: (B, C, *spatial). times: B ints. rng_keys: B tuples (seed, epoch, sample). drawn: see `draw_fields`.
        Returns: x_t (B, C, *spatial); target field (B, N, *spatial) in voxels. A perfect prediction p satisfies
        warp(p, target) == -target, which is compose(p, target) == 0.
        """
        image_field, target_field = self.draw_fields(x0.shape[2:], times, rng_keys, x0.device, drawn)
        return warp(x0, image_field), target_field

    @torch.no_grad()
    def draw_image_field(self, size, times, rng_keys, device):
        """The image field of `draw_fields`, bit for bit, without the target, which only training needs."""
        _, noisy = self.velocities(self.draw(rng_keys), device)
        return self.on_image(noisy, [image_count(t) for t in times], size)

    @torch.no_grad()
    def recover(self, net, x0, start, rng_keys, cfg, condition=None, stride=1):
        """Deform an image as at time `start`, then let a network undo what it can, step by step down to time 0.

        At time t the image is deformed by image_count(t) compositions, and a perfect prediction p undoes label_count(t)
        of them, about four times as many as lie between t and t - 1. Each p is therefore scaled by the fraction that
        leads to the next time, so that the steps together undo as many compositions as were made. p is defined on the
        voxels of the deformed image and is applied last: warp(warp(x0, field), p) == warp(x0, compose(field, p)).
        Each step warps x0 itself by the composed field, so that it is interpolated only once. With copies.recover
        "published" see `recover_as_published`.

        net: called as net(image, t, condition), like a network of `build_network`. x0: (B, C, *spatial). start: 1 ..
        timesteps - 1. rng_keys: B tuples (seed, epoch, sample). condition: from `make_condition`: of x0 to return to
        it, of another image to move towards that one, None for any image that the network considers likely. stride:
        times per step of the scaled recovery; with 2 or more, some predictions near the end are stretched.
        Returns: field (B, N, *spatial) in voxels, to warp x0 by.
        """
        field = self.draw_image_field(x0.shape[2:], [start] * len(x0), rng_keys, x0.device)
        if cfg["copies.recover"] == "published":
            return self.recover_as_published(net, x0, field, cfg, condition)
        for t in range(start, 0, -stride):
            left = image_count(t - stride) if t > stride else 0
            fraction = (image_count(t) - left) / label_count(t)
            if fraction:  # 0 at t = 2: its image_count is that of t = 1
                with autocast(x0.device, cfg["run.amp"]):
                    pred = net(warp(x0, field), torch.full((len(x0),), t, device=x0.device), condition)
                field = compose(field, fraction * pred.float())
        return field

    @torch.no_grad()
    def recover_as_published(self, net, x0, field, cfg, condition=None, until=0):
        """Recover a deformed image as Zheng et al. (2026) do: start at the last time and scale no prediction.

        Whatever the strength of the deformation, the network predicts for t = timesteps - 1, ..., `until`, and each
        prediction p is composed in full: field <- p + warp(field, p). Together they could undo the deformation several
        times; the network stops at an image that it considers likely. As in the published settings, 2D images are
        interpolated bicubically and fields are zero outside; 3D images are interpolated linearly and fields keep their
        border values outside.

        field: (B, N, *spatial) in voxels, by which x0 is deformed. Other arguments and the result: as for `recover`.
        """
        mode, outside = {2: ("bicubic", "zeros"), 3: ("bilinear", "border")}[self.dims]
        for t in range(self.timesteps - 1, until - 1, -1):
            with autocast(x0.device, cfg["run.amp"]):
                pred = net(warp(x0, field, mode), torch.full((len(x0),), t, device=x0.device), condition).float()
            field = pred + warp(field, pred, padding=outside)
        return field


def log_uniform(u, most):
    """A whole number from 1 to `most`, both included, with a log-uniform distribution. u: uniform in [0, 1).

    k has the probability log((k + 1) / k) / log(most + 1).
    """
    return min(int((most + 1) ** u), most)


def make_condition(target, kind, rng_keys=None):
    """What the network sees of a target volume: its values times a mask, and the mask as the last channel.

    kind: "volume", all of it; "slice", k whole planes orthogonal to the axes at random places; "none". k is log-uniform
    from 1 to all planes of all axes, so that easy cases are frequent and the full volume is the limit.
    target: (B, C, *spatial). rng_keys: B tuples (seed, epoch, sample), for "slice".
    Returns: (B, C + 1, *spatial); None for kind "none".
    """
    if kind == "none":
        return None
    if kind == "volume":
        return torch.cat([target, torch.ones_like(target[:, :1])], dim=1)
    size = target.shape[2:]
    planes = sum(size)
    hidden = torch.ones(len(target), planes)  # planes of the first axis, then of the second, ...
    for row, rng_key in zip(hidden, rng_keys):
        draws = generator(rng_key[0], "slices", *rng_key[1:])
        count = log_uniform(torch.rand((), generator=draws).item(), planes)
        row[torch.randperm(planes, generator=draws)[:count]] = 0.0
    mask = 1.0
    for axis, of_axis in enumerate(send(hidden, target.device).split(size, dim=1)):  # a voxel is in one plane per axis
        mask = mask * of_axis.view(-1, 1, *[n if i == axis else 1 for i, n in enumerate(size)])
    mask = 1.0 - mask
    return torch.cat([target * mask, mask], dim=1)
