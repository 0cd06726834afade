"""Recovery sampling: a network that knows the deformation brings the image back, one that says nothing leaves it."""
import pytest
import torch

from Diffusion.diffuser import DeformDDPM, draw_velocity, image_count, label_count, make_condition, middle
from Diffusion.fields import compose, integrate_velocity, resize_field, warp
from tests.inverse import invert

GRIDS = {2: [8, 16, 32], 3: [4, 8, 16]}
KEYS = [(7, 0, 1), (7, 0, 2)]


@pytest.fixture(params=[(34, 46), (26, 31, 36)], ids=["2d", "3d"])
def size(request):
    return request.param


def config(size, **changes):
    return {"model.dims": len(size), "diffusion.timesteps": 80, "diffusion.grids": GRIDS[len(size)], "run.amp": "off",
            "copies.recover": "scaled", "diffusion.v_scale": 4e-5, "diffusion.noise_ratio": 0.0,
            **{f"diffusion.{name}": value for name, value in changes.items()}}


def smooth(size, samples=2):
    """Images of a few periods, so that interpolation costs little."""
    x = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, n) for n in size], indexing="ij"))
    waves = [torch.cos(9.0 * x[0] + k) * torch.sin(7.0 * x[1] - k) + torch.cos(8.0 * x[-1] - k) for k in range(samples)]
    return torch.stack(waves)[:, None]


def inverse_of_label(size, cfg, calls=None):
    """A network that knows the velocity: it undoes exactly label_count(t) of its compositions."""
    dims, grids = len(size), cfg["diffusion.grids"]
    backwards = invert(draw_velocity(KEYS, "velocity", dims, grids, cfg["diffusion.v_scale"]))

    def net(image, t, condition=None):
        if calls is not None:
            calls.append((image, t, condition))
        undone = integrate_velocity(backwards, [label_count(int(time)) for time in t], middle(grids[-1], dims))
        return resize_field(undone, size)

    return net


def inside(volume):
    """Without the border, over which content has moved in or out."""
    return volume[(..., *[slice(6, -6)] * (volume.dim() - 2))]


@pytest.mark.parametrize("start, stride", [(79, 4), (40, 3), (2, 1)])
def test_a_network_that_knows_the_velocity_brings_the_image_back(size, start, stride):
    cfg, x0 = config(size), smooth(size)
    ddpm = DeformDDPM(cfg)
    field = ddpm.recover(inverse_of_label(size, cfg), x0, start, KEYS, cfg, make_condition(x0, "volume"), stride)
    before = ddpm.draw_image_field(size, [start] * 2, KEYS, "cpu")
    assert field.shape == before.shape
    # What remains is the interpolation of some fifty compositions of a rough field.
    assert inside(field).norm() < 0.15 * inside(before).norm()
    lost, left = ((inside(warp(x0, f) - x0)).norm() for f in (before, field))
    assert left < 0.15 * lost


def test_with_the_second_draw_only_that_one_stays(size):
    cfg = config(size, noise_ratio=0.08)
    field = DeformDDPM(cfg).recover(inverse_of_label(size, cfg), smooth(size), 79, KEYS, cfg, stride=4)
    before = DeformDDPM(cfg).draw_image_field(size, [79] * 2, KEYS, "cpu")
    assert 0.05 < inside(field).norm() / inside(before).norm() < 0.25


def test_the_image_field_alone_is_that_of_draw_fields(size):
    ddpm = DeformDDPM(config(size, noise_ratio=0.08))
    assert torch.equal(ddpm.draw_image_field(size, [79, 3], KEYS, "cpu"),
                       ddpm.draw_fields(size, [79, 3], KEYS, "cpu")[0])


def test_always_the_original_is_warped_by_all_so_far(size):
    cfg, x0, calls = config(size), smooth(size), []
    condition = make_condition(x0, "slice", KEYS)
    field = DeformDDPM(cfg).recover(inverse_of_label(size, cfg, calls), x0, 12, KEYS, cfg, condition, stride=5)
    assert [t.tolist() for _, t, _ in calls] == [[12, 12], [7, 7], [2, 2]]
    assert all(seen is condition for _, _, seen in calls)
    so_far = DeformDDPM(cfg).draw_image_field(size, [12, 12], KEYS, "cpu")
    oracle = inverse_of_label(size, cfg)
    for image, t, _ in calls:
        assert torch.equal(image, warp(x0, so_far))
        time = int(t[0])
        done = image_count(time) - (image_count(time - 5) if time > 5 else 0)
        so_far = compose(so_far, done / label_count(time) * oracle(image, t))
    assert torch.equal(field, so_far)


def test_the_published_recovery_takes_every_prediction_from_the_last_time_on_whole(size):
    cfg, x0, calls = {**config(size, timesteps=5), "copies.recover": "published"}, smooth(size), []

    def net(image, t, condition=None):
        calls.append((image, t.tolist()))
        return 0.2 * image.repeat(1, len(size), *[1] * len(size))

    field = DeformDDPM(cfg).recover(net, x0, 2, KEYS, cfg, stride=4)
    assert [t for _, t in calls] == [[t, t] for t in (4, 3, 2, 1, 0)]
    mode, outside = ("bicubic", "zeros") if len(size) == 2 else ("bilinear", "border")
    so_far = DeformDDPM(cfg).draw_image_field(size, [2, 2], KEYS, "cpu")
    for image, _ in calls:
        assert torch.equal(image, warp(x0, so_far, mode))
        pred = 0.2 * image.repeat(1, len(size), *[1] * len(size))
        so_far = pred + warp(so_far, pred, padding=outside)
    assert torch.equal(field, so_far)


def test_a_sample_does_not_depend_on_the_rest_of_the_batch(size):
    cfg, x0 = config(size), smooth(size)

    def net(image, t, condition=None):
        return 0.1 * image.repeat(1, len(size), *[1] * len(size)) * t.view(-1, *[1] * (len(size) + 1)) / 80

    both = DeformDDPM(cfg).recover(net, x0, 30, KEYS, cfg, stride=4)
    alone = DeformDDPM(cfg).recover(net, x0[1:], 30, KEYS[1:], cfg, stride=4)
    assert torch.allclose(both[1:], alone, rtol=0, atol=1e-5)
    assert not both.requires_grad
