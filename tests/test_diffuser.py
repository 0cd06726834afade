"""The forward process: schedule, statelessness of the draws, scale of the noise, and what must be undone."""
import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from Diffusion.diffuser import DeformDDPM, draw_velocity, image_count, label_count, middle
from Diffusion.fields import resize_field, side_lengths, warp

GRIDS = {2: [8, 16, 32], 3: [4, 8, 16]}


@pytest.fixture(params=[(30, 41), (19, 24, 29)], ids=["2d", "3d"])
def size(request):
    return request.param


def make(size, **changes):
    dims = len(size)
    cfg = {"model.dims": dims, "diffusion.timesteps": 80, "diffusion.grids": GRIDS[dims], "diffusion.v_scale": 1e-4,
           "diffusion.noise_ratio": 0.08}
    return DeformDDPM({**cfg, **{f"diffusion.{name}": value for name, value in changes.items()}})


def rng_keys(*samples, seed=7, epoch=0):
    return [(seed, epoch, sample) for sample in samples]


def test_counts_of_the_schedule():
    assert (image_count(79), label_count(79)) == (195, 13)
    assert (image_count(1), label_count(1)) == (1, 1)
    assert label_count(0) == 0
    assert label_count(32) == 8, "32 ** 0.6 is just below 8 in floating point"
    assert image_count(1000) == 200
    images, labels = [image_count(t) for t in range(1, 80)], [label_count(t) for t in range(1, 80)]
    assert images == sorted(images) and labels == sorted(labels)
    assert all(label <= image for label, image in zip(labels[5:], images[5:]))


def test_times_are_never_zero_and_cover_the_rest():
    times = make((30, 41), timesteps=8).draw_times(rng_keys(*range(400)))
    assert set(times) == set(range(1, 8))
    assert all(isinstance(t, int) for t in times)
    counts = [times.count(t) for t in range(1, 8)]
    assert min(counts) > 30 and max(counts) < 90
    assert make((30, 41), timesteps=2).draw_times(rng_keys(*range(20))) == [1] * 20


def test_fields_do_not_depend_on_the_batch_or_the_global_generator(size):
    process = make(size)
    torch.manual_seed(1)
    image, target = process.draw_fields(size, [40, 79, 3], rng_keys(11, 12, 13), "cpu")
    state = torch.get_rng_state()
    torch.manual_seed(2)
    alone_image, alone_target = process.draw_fields(size, [79], rng_keys(12), "cpu")
    assert torch.equal(alone_target[0], target[1]) and torch.equal(alone_image[0], image[1])
    reordered, _ = process.draw_fields(size, [3, 40], rng_keys(13, 11), "cpu")
    assert torch.equal(reordered, image[[2, 0]])
    torch.set_rng_state(state)
    process.draw_fields(size, [5], rng_keys(1), "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert process.draw_times(rng_keys(11, 12)) == process.draw_times(rng_keys(11)) + process.draw_times(rng_keys(12))


def test_samples_epochs_and_seeds_differ(size):
    process = make(size)
    different = [(7, 0, 1), (7, 0, 2), (7, 1, 1), (8, 0, 1)]
    fields = process.draw_fields(size, [20] * 4, different, "cpu")[1].flatten(1)
    correlation = torch.corrcoef(fields)
    assert (correlation - torch.eye(4)).abs().max() < 0.9
    assert len({tuple(row.tolist()) for row in fields[:, :5]}) == 4


def test_shapes_and_per_sample_times(size):
    process = make(size)
    image, target = process.draw_fields(size, [1, 79], rng_keys(3, 3), "cpu")
    assert image.shape == target.shape == (2, len(size), *size)
    assert image.dtype == target.dtype == torch.float32
    assert 8 < target[1].norm() / target[0].norm() < 20
    assert image[1].norm() / target[1].norm() > 5
    # The same sample at t = 1: both fields are one composition, the image's with the small second draw.
    ratio = (image[0] - target[0]).norm() / target[0].norm()
    assert 0.03 < ratio < 0.2
    without, _ = make(size, noise_ratio=0.0).draw_fields(size, [1], rng_keys(3), "cpu")
    assert torch.allclose(without[0], target[0], rtol=0, atol=1e-5)


def test_second_draw_is_independent_of_the_first(size):
    image, target = make(size).draw_fields(size, [1] * 12, rng_keys(*range(12)), "cpu")
    cosine = torch.nn.functional.cosine_similarity((image - target).flatten(1), target.flatten(1))
    assert abs(float(cosine.mean())) < 0.4


def test_velocity_has_the_standard_deviation_asked_for():
    for dims, grid in ((2, 64), (3, 16)):
        velocity = draw_velocity(rng_keys(*range(20)), "velocity", dims, [grid], 1e-3)
        assert velocity.shape == (20, dims, *[grid] * dims)
        assert float(velocity.std()) == pytest.approx(1e-3 * (grid // 2 - 1), rel=0.03)
        assert float(velocity.mean()) == pytest.approx(0.0, abs=float(velocity.std()) / 50)


def test_coarse_noise_is_stronger():
    coarse = draw_velocity(rng_keys(*range(40)), "velocity", 2, [8, 64], 1e-3)
    fine = draw_velocity(rng_keys(*range(40)), "velocity", 2, [64], 1e-3)
    corner = (..., 0, 0)
    # The corner of the grid is a control point at every resolution: there the variances simply add up.
    assert float(coarse[corner].std() / fine[corner].std()) == pytest.approx((1 + 8 ** 2) ** 0.5, rel=0.3)


def test_field_scales_with_v_scale_and_image_size(size):
    one = make(size).draw_fields(size, [1, 1], rng_keys(1, 2), "cpu")[1]
    three = make(size, v_scale=3e-4).draw_fields(size, [1, 1], rng_keys(1, 2), "cpu")[1]
    assert torch.allclose(three, 3 * one, rtol=1e-3, atol=1e-6)
    larger = [2 * n for n in size]
    field = make(size).draw_fields(larger, [1, 1], rng_keys(1, 2), "cpu")[1]
    for axis, n in enumerate(size):
        expected = (2 * n - 1) / (n - 1)
        assert float(field[:, axis].std() / one[:, axis].std()) == pytest.approx(expected, rel=0.05)
    fraction = one / (side_lengths(size) - 1)
    finest = GRIDS[len(size)][-1]
    on_grid = draw_velocity(rng_keys(1, 2), "velocity", len(size), GRIDS[len(size)], 1e-4) / (finest // 2 - 1)
    on_grid = on_grid[(..., *middle(finest, len(size)))]
    assert float(fraction.std()) == pytest.approx(float(on_grid.std()), rel=0.1)


def test_target_field_is_what_particle_composition_gives(size):
    dims, grids = len(size), GRIDS[len(size)]
    # Strong enough for particles to leave their cell of the control grid; one step is an eleventh of the way.
    process = make(size, v_scale=1e-3)
    velocity = draw_velocity(rng_keys(5), "velocity", dims, grids, 1e-3)[0].double().numpy()
    region = middle(grids[-1], dims)
    start = np.stack(np.mgrid[tuple(region)]).astype(np.float64)
    points = start.copy()
    for _ in range(label_count(60)):
        points += np.stack([map_coordinates(v, points, order=1, mode="nearest") for v in velocity])
    moved = torch.from_numpy(points - start)[None].float()
    assert moved.abs().max() > 0.5
    target = process.draw_fields(size, [60], rng_keys(5), "cpu")[1]
    expected = resize_field(moved, size)
    assert float((target - expected).norm() / expected.norm()) < 0.03


def test_diffuse_warps_by_the_image_field(size):
    process, times, chosen = make(size), [30, 79], rng_keys(1, 2)
    x0 = torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(0))
    xt, target_field = process.diffuse(x0, times, chosen)
    image_field, target_field_alone = process.draw_fields(size, times, chosen, "cpu")
    assert torch.equal(xt, warp(x0, image_field))
    assert torch.equal(target_field, target_field_alone)
    assert not torch.allclose(xt, x0, atol=0.1)
    assert not xt.requires_grad and not target_field.requires_grad
