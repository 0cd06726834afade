"""Refinement of one pair: it finds known deformations, does not fold, and starts from where it is told."""
import numpy as np
import pytest
import torch

from Dataloader.synthetic import make_subject
from Diffusion.fields import flow, warp
from Diffusion.metrics import folding_percent
from Inference.refine import level_steps, on_control_grid, pair_loss, refine, similarity, smaller, smooth
from tests.tiny import config

SIZES = {3: (24, 32, 28), 2: (40, 48)}


def wave(size, amplitude):
    """A smooth field (1, N, *size) that vanishes at the border."""
    axes = torch.meshgrid(*[torch.linspace(0, np.pi, n) for n in size], indexing="ij")
    bump = torch.stack([axis.sin() for axis in axes]).prod(0)
    return amplitude * torch.stack([bump * (1 if i % 2 else -1) for i in range(len(size))])[None]


def pair(dims, amplitude=2.5):
    image = torch.from_numpy(make_subject(3, SIZES[dims], dims=dims)["image"])[None, None].float()
    true = wave(SIZES[dims], amplitude)
    return image, warp(image, true, padding="border"), true


def alike(moving, fixed, field, cfg):
    """The similarity of a pair under a field (1, N, *size) or None."""
    return similarity({"moving": moving, "fixed": fixed, "moving_mask": None, "fixed_mask": None}, field, cfg)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_known_deformation_is_found(dims):
    moving, fixed, true = pair(dims)
    cfg = config(refine__levels=2)
    field = refine(moving, fixed, None, 60, cfg)
    inside = (..., *[slice(4, -4)] * dims)
    seen = ((moving - fixed).abs() > 0.05)[0, 0]
    error, size = (part.square().sum(1).sqrt()[0][seen].mean() for part in (field - true, true))
    assert error < 0.5 * size and field[inside].abs().mean() > 0.2
    before, after = ((image - fixed).square().mean() for image in (moving, warp(moving, field, padding="border")))
    assert after < 0.15 * before
    assert alike(moving, fixed, field, cfg) > alike(moving, fixed, None, cfg) + 0.05


def test_it_goes_on_from_the_field_given_and_interpolates_once():
    moving, fixed, true = pair(3)
    cfg = config()
    assert torch.allclose(refine(moving, fixed, true, 0, cfg), true, atol=1e-5)  # but for the rounding of coordinates
    half = 0.5 * true
    further, from_zero = (alike(moving, fixed, refine(moving, fixed, start, 20, cfg), cfg) for start in (half, None))
    assert further > alike(moving, fixed, half, cfg) > alike(moving, fixed, None, cfg) and further > from_zero


def test_a_start_without_detail_is_composed_on_the_control_grid_to_the_same_loss():
    moving, fixed, true = pair(3)
    true, cfg, control = 0.5 * true, config(), [n // 2 for n in SIZES[3]]
    coarse = on_control_grid(true, control)
    assert coarse.shape == (1, 3, *control)
    rough = torch.randn(true.shape, generator=torch.Generator().manual_seed(0))
    assert on_control_grid(rough, control) is None and on_control_grid(None, control) is None
    small = {"moving": moving, "fixed": fixed, "moving_mask": None, "fixed_mask": None, "structures": 0}
    still, moved = torch.zeros(1, 3, *control), wave(control, -0.5)
    fast, exact = (float(pair_loss(small, (true, each), moved, cfg)) for each in (coarse, None))
    assert abs(fast - exact) < 0.02 * abs(exact - float(pair_loss(small, (true, None), still, cfg)))


def test_the_update_hardly_folds_even_where_everything_asks_it_to():
    """Unrelated noise pulls as hard as anything can, and nothing keeps the velocity smooth."""
    moving, fixed = (torch.rand(1, 1, 20, 24, 22, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    field = refine(moving, fixed, None, 60, config(refine__weight=0, refine__lr=0.3, refine__smooth=1.0))
    assert folding_percent(field) < 2


def test_steps_are_divided_among_the_levels():
    cfg = config(refine__levels=3, refine__window=5)
    assert level_steps((40, 48, 44), 10, cfg) == [(4, 4), (2, 3), (1, 3)]
    assert level_steps((20, 48, 44), 10, cfg) == [(2, 5), (1, 5)], "a quarter of 20 is no larger than the window"
    assert level_steps((4, 4, 4), 3, cfg) == [(1, 3)]


def test_at_the_finest_level_the_step_of_adam_falls_to_the_share_asked_for(monkeypatch):
    taken = []

    class Watched(torch.optim.Adam):
        def step(self, *args, **options):
            taken.append(self.param_groups[0]["lr"])
            return super().step(*args, **options)

    monkeypatch.setattr(torch.optim, "Adam", Watched)
    moving, fixed, _ = pair(2)
    for share, last in ((1.0, [0.5, 0.5, 0.5, 0.5]), (0.2, [0.5, 0.4, 0.3, 0.2]), (0.0, [0.5, 0.375, 0.25, 0.125])):
        taken.clear()
        refine(moving, fixed, None, 8, config(refine__levels=2, refine__lr=0.5, refine__last_lr=share))
        assert taken == pytest.approx([0.5] * 4 + last), share


def test_same_input_same_bits_and_no_gradient_is_left_behind():
    moving, fixed, _ = pair(3)
    with torch.no_grad():
        first, second = (refine(moving, fixed, None, 6, config()) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad


def test_small_volumes_leave_out_the_levels_that_would_be_smaller_than_a_window():
    image = torch.rand(1, 1, 9, 11, 10, generator=torch.Generator().manual_seed(0))
    field = refine(image, image.roll(1, 2), None, 4, config(refine__levels=8))
    assert field.shape == (1, 3, 9, 11, 10) and field.isfinite().all()


def test_flow_of_a_linear_velocity_is_the_exponential():
    """v(x) = a x flows to x exp(a) (in one axis, away from the border)."""
    x = torch.arange(41.0) - 20
    velocity = torch.zeros(1, 2, 41, 41)
    velocity[0, 0] = (0.2 * x)[:, None]
    found = flow(velocity)[0, 0, 10:31, 20]
    assert torch.allclose(found, x[10:31] * (np.exp(0.2) - 1), atol=0.02)


def test_smoothing_keeps_constants_and_shrinking_keeps_corners():
    x = torch.rand(1, 2, 7, 9, 8)
    assert torch.allclose(smooth(torch.ones_like(x), 1.7), torch.ones_like(x), atol=1e-6)
    assert smooth(x, 0) is x and smooth(x, 3.0).std() < 0.3 * x.std()
    ramp = torch.linspace(0, 1, 21)[None, None, :, None].expand(1, 1, 21, 15)
    small = smaller(ramp, 2)
    assert small.shape == (1, 1, 11, 8)
    assert torch.allclose(small[0, 0, 2:-2, 4], torch.linspace(0, 1, 11)[2:-2], atol=1e-3)
