"""Refinement of one pair: it finds known deformations, does not fold, and starts from where it is told."""
import itertools

import numpy as np
import pytest
import torch

from Dataloader import grids
from Dataloader.synthetic import make_subject
from Diffusion import losses
from Diffusion.fields import exponential, warp
from Diffusion.losses import image_similarity, local_correlation
from Diffusion.metrics import folding_percent
from Inference.refine import (
    EDGES,
    RIM,
    WEIGHTS,
    add_slope_,
    best_weights,
    cubes,
    edges,
    force,
    gaussian,
    inferred_weight,
    level_steps,
    onto_control_grid,
    pair_at_level,
    refine,
    shrinking,
    smaller,
    smooth,
    spreading,
)
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


def unmasked(moving, fixed, structures=None):
    """A pair as `refine` takes it, without masks."""
    return {"moving": moving, "fixed": fixed, "moving_mask": None, "fixed_mask": None, "structures": structures}


def refined(moving, fixed, field, steps, cfg, structures=None):
    """The field of `refine`."""
    return refine(unmasked(moving, fixed, structures), field, steps, cfg)[0]


def alike(moving, fixed, field, cfg):
    """The similarity of a pair under a field (1, N, *size) or None."""
    warped = moving if field is None else warp(moving, field, padding="border")
    return float(image_similarity(warped, fixed, cfg))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_known_deformation_is_found(dims):
    moving, fixed, true = pair(dims)
    cfg = config(refine__levels=2)
    field = refined(moving, fixed, None, 60, cfg)
    inside = (..., *[slice(4, -4)] * dims)
    seen = ((moving - fixed).abs() > 0.05)[0, 0]
    error, size = (part.square().sum(1).sqrt()[0][seen].mean() for part in (field - true, true))
    assert error < 0.5 * size and field[inside].abs().mean() > 0.2
    before, after = ((image - fixed).square().mean() for image in (moving, warp(moving, field, padding="border")))
    assert after < 0.15 * before
    assert alike(moving, fixed, field, cfg) > alike(moving, fixed, None, cfg) + 0.05


def test_a_measure_of_ones_own_is_the_one_that_grows(monkeypatch):
    def squares(image, target, window, squared, weight):
        return 1.0 - (image - target).square().mean()

    monkeypatch.setitem(losses.MEASURES, "squares", squares)
    moving, fixed, _ = pair(3)
    cfg = {**config(refine__levels=2), "registration.similarity": "squares", "refine.weight": 1.0}
    field, other = (refined(moving, fixed, None, 30, {**cfg, **more}) for more in (
        {}, {"registration.similarity": "correlation"}))
    assert alike(moving, fixed, field, cfg) > alike(moving, fixed, None, cfg) and not torch.equal(field, other)


def test_it_goes_on_from_the_field_given_and_interpolates_once():
    moving, fixed, true = pair(3)
    cfg, half = config(), 0.5 * true
    further, from_zero = (alike(moving, fixed, refined(moving, fixed, start, 4, cfg), cfg) for start in (half, None))
    assert further > alike(moving, fixed, half, cfg) > alike(moving, fixed, None, cfg) and further > from_zero


@pytest.mark.parametrize("weight", [pytest.param("auto", marks=pytest.mark.slow), 0.5])
def test_a_volume_stays_where_it_is_already_itself(weight):
    """Each step moves its fastest voxel by a whole step, however little force is left."""
    moving, fixed, true = pair(3)
    cfg = config() | {"refine.weight": weight}
    assert not refined(fixed, fixed.clone(), None, 20, cfg).any()
    assert refined(moving, fixed, None, 20, cfg).abs().max() > 1
    # A rough start may fit better than what is as smooth as asked.
    rough = true + 0.2 * torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    fitting = warp(moving, rough, padding="border")
    smoother = refined(moving, fitting, rough, 20, cfg | {"refine.weight": 2.0})
    assert alike(moving, fitting, smoother, cfg) < alike(moving, fitting, rough, cfg)


def test_a_change_that_whole_steps_would_drown_is_found_by_shorter_ones():
    """By a tenth of a voxel at most: whole steps leave more than that behind, and the pair less alike."""
    moving, fixed, true = pair(3, amplitude=0.1)
    cfg = config(refine__levels=2) | {"refine.weight": 1.0}
    before = alike(moving, fixed, None, cfg)
    whole, field = (refined(moving, fixed, start, 40, cfg) for start in (torch.zeros_like(true), None))
    assert before > 0.99 and alike(moving, fixed, whole, cfg) < before < alike(moving, fixed, field, cfg)
    seen = ((moving - fixed).abs() > 0.002)[0, 0]
    error, size = (part.square().sum(1).sqrt()[0][seen].mean() for part in (field - true, true))
    assert error < 0.6 * size


def test_the_force_is_how_the_similarity_grows_along_the_field():
    """Against finite differences of both local correlations under a smooth change of the field."""
    moving, fixed, true = pair(3, amplitude=1.0)
    cfg = config()
    small = pair_at_level(unmasked(moving, fixed), 1, cfg)
    pulled = force(small["moving"], None, small, None, cfg)

    def similarity(field):
        warped = warp(small["moving"], field, padding="border")
        return sum(weight * float(local_correlation(warped[:, each], small["fixed"][:, each], cfg["refine.window"]))
                   for each, weight in ((slice(0, 1), 1.0), (slice(1, 2), EDGES)))

    slopes = []
    for seed in range(12):
        way = smooth(torch.randn(true.shape, generator=torch.Generator().manual_seed(seed)), 2.0)
        ahead, back = (similarity(sign * 0.05 * way) for sign in (1, -1))
        slopes.append((float((pulled * way).sum()), (ahead - back) / 0.1))
    found, exact = np.array(slopes).T
    assert np.abs(exact).max() > 1e-4
    assert np.corrcoef(found, exact)[0, 1] > 0.65  # one window stands for all that a voxel lies in


def test_slopes_are_central_differences_and_one_sided_at_the_border():
    image, factor = torch.rand(1, 7, 9), torch.rand(1, 7, 9)
    for axis in (1, 2):
        total = torch.zeros(1, 7, 9)
        add_slope_(total, image, axis, factor)
        assert torch.allclose(total, factor * torch.gradient(image, dim=axis)[0], atol=1e-6)
    thin = torch.zeros(1, 1, 9)
    add_slope_(thin, image[:, :1], 1, factor[:, :1])
    assert float(thin.abs().max()) == 0.0


@pytest.mark.parametrize("stride", [1, 2])
def test_the_field_hardly_folds_even_where_everything_asks_it_to(stride):
    """Unrelated noise pulls as hard as anything can."""
    moving, fixed = (torch.rand(1, 1, 20, 24, 22, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    field = refined(moving, fixed, None, 60, config(refine__weight=0.3, refine__stride=stride))
    wild = refined(moving, fixed, None, 60, config(refine__weight=0, refine__smooth=0, refine__stride=stride))
    assert folding_percent(field) < 0.1 < folding_percent(wild)


def test_more_weight_is_a_smoother_field():
    moving, fixed, _ = pair(3)
    rough = [float(refined(moving, fixed, None, 30, config(refine__weight=weight)).diff(dim=3).square().mean())
             for weight in (0.25, 1.0, 4.0)]
    assert rough[0] > 1.2 * rough[1] > 1.44 * rough[2] > 0


def fine_and_noisy(size, numbers):
    """(moving, fixed, field) twice, of one anatomy: bent finely and shown clearly; bent smoothly, with noise."""
    image = torch.from_numpy(make_subject(3, size)["image"])[None, None].float()
    fine = smooth(torch.randn(1, 3, *size, generator=numbers), 2.5)
    for true, noise in ((fine * (1.5 / fine.abs().max()), 0.0), (wave(size, 1.5), 0.15)):
        yield *(each + noise * torch.randn(image.shape, generator=numbers)
                for each in (image, warp(image, true, padding="border"))), true


@pytest.mark.slow
def test_the_weight_follows_from_the_pair():
    """Little smoothing where an anatomy is bent finely and shown clearly, much where smoothly and with noise.

    Means over three draws, since with so few cubes each one is off by a factor of up to two.
    """
    numbers, (weights, misses) = torch.Generator().manual_seed(4), ([], [])
    for moving, fixed, true in itertools.chain(*(fine_and_noisy((48, 56, 52), numbers) for _ in range(3))):
        weights.append(inferred_weight(unmasked(moving, fixed), None, config()))
        misses.append([float((refined(moving, fixed, None, 30, config() | {"refine.weight": weight}) - true).square()
                             .mean()) for weight in (weights[-1], 0.25, 4.0)])
    fine, noisy = (np.mean([float(weight.log2().mean()) for weight in weights[kind::2]]) for kind in (0, 1))
    assert noisy > fine + 1
    (of_fine, _, with_most), (of_noisy, with_least, _) = (np.mean(misses[kind::2], 0) for kind in (0, 1))
    assert of_noisy < with_least and of_fine < with_most


@pytest.mark.slow
def test_each_place_has_the_smoothing_that_suits_it():
    """Both pairs of the test above, side by side in one volume."""
    moving, fixed, _ = (torch.cat(sides, dim=2) for sides in zip(*fine_and_noisy(
        (48, 56, 52), torch.Generator().manual_seed(4))))
    weight = smaller(inferred_weight(unmasked(moving, fixed), None, config()), 4)[0, 0].log2().mean((1, 2))
    assert weight[:8].max() + 1 < weight[-8:].min()


def test_what_a_mask_leaves_out_has_no_edges():
    """A bright cube that a mask leaves out adds no gradient at its border, and its neighbours keep theirs."""
    image = torch.linspace(0, 1, 20).view(1, 1, 20, 1, 1).expand(1, 1, 20, 18, 16).clone()
    inside, mask = image.clone(), torch.ones_like(image)
    inside[..., 6:12, 6:12, 6:12] += 5.0
    mask[..., 6:12, 6:12, 6:12] = 0.0
    largest, largest_masked = (float(each[mask > 0].max() / each.median()) for each in (edges(inside),
                                                                                        edges(inside, mask)))
    assert largest > 10 and largest_masked < 2


@pytest.mark.slow
def test_auto_is_the_weight_inferred_and_equal_weights_everywhere_are_one_number():
    moving, fixed, _ = pair(3)
    weight = inferred_weight(unmasked(moving, fixed), None, config())
    by_weight, by_pair, by_number, by_equals = (
        refined(moving, fixed, None, 8, config() | {"refine.weight": each}) for each in (
            weight, "auto", 1.7, torch.full((1, 1, 3, 2, 4), 1.7)))
    assert torch.equal(by_weight, by_pair) and torch.allclose(by_number, by_equals, atol=1e-4)
    assert not torch.allclose(by_pair, by_number, atol=1e-2)


@pytest.mark.parametrize("variance", [0.5, 2.0, 4.0])
def test_a_mixture_of_gaussians_has_the_variance_asked_for(variance):
    """Between other places that ask for the least and the most. A point at each place shows how it is spread."""
    weight = torch.full((1, 1, 40, 4), variance)
    weight[..., 0, :], weight[..., -1, :] = 0.5, 4.0
    point = torch.zeros(1, 1, 40, 4)
    point[..., 20, :] = 1.0
    spread = spreading(weight, [40, 4], [1.0, 1.0], "cpu")(point)[0, 0, :, 1]
    assert float(spread.sum()) == pytest.approx(1.0, abs=1e-3)
    assert float((spread * (torch.arange(40) - 20.0) ** 2).sum()) == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("best", [1.2, 2.0, 3.1])
def test_the_best_weight_is_the_maximum_of_a_parabola(best):
    weights = torch.tensor(WEIGHTS)
    scores = torch.stack([-(weights / best).log2() ** 2, weights, -weights])  # of three places
    found = best_weights(scores.T[None, :, :, None])[0, 0, :, 0].tolist()
    assert found == pytest.approx([best, WEIGHTS[-1], WEIGHTS[0]], rel=1e-5)


def test_no_window_inside_the_measured_cubes_touches_what_was_seen():
    for size, window in (((20, 24, 17), 5), ((40, 33), 3), ((40, 44, 37), 9)):
        (seen, measured), (other, _) = cubes(size, window)
        assert torch.equal(seen, 1 - other)
        assert seen.shape == measured.shape == (1, 1, *size)
        assert 0.4 < float(seen.mean()) < 0.6 and 0.015 < float(measured.mean()) < 0.2
        rim = max(RIM, window // 2)
        pool = torch.nn.functional.max_pool3d if len(size) == 3 else torch.nn.functional.max_pool2d
        assert float((pool(measured, 2 * rim + 1, 1, rim) * seen).max()) == 0.0


def test_large_pairs_are_shrunk_before_the_weight_is_inferred():
    assert [shrinking(size) for size in ((40, 50, 40), (160, 200, 160), (400, 500, 400), (600, 700))] \
        == [1, 2, 8, 1]
    assert shrinking((4000, 4000, 20)) == 1, "too few voxels along an axis would be left"


def test_steps_are_divided_among_the_levels():
    cfg = config(refine__levels=3, refine__window=5)
    assert level_steps((48, 48, 44), 10, cfg) == [(4, 4), (2, 3), (1, 3)]
    assert level_steps((40, 48, 44), 10, {**cfg, "refine.window": 3}) == [(4, 4), (2, 3), (1, 3)]
    assert level_steps((24, 48, 44), 10, cfg) == [(2, 5), (1, 5)], "a quarter of 24 is no larger than two windows"
    assert level_steps((4, 4, 4), 3, cfg) == [(1, 3)]


@pytest.mark.parametrize("dims, masked, smooth", [(3, False, 1.5), (3, True, 1.5), (2, False, 0.0)])
def test_slab_by_slab_is_the_same(monkeypatch, dims, masked, smooth):
    """Up to rounding: sums over slabs are sums over the whole, and the planes beside a slab belong to its windows."""
    moving, fixed, _ = pair(dims)
    both = unmasked(moving, fixed)
    if masked:
        both.update({f"{side}_mask": (image > 0.05).float() for side, image in (("moving", moving), ("fixed", fixed))})
    cfg = config(model__dims=dims, refine__weight=0.5, refine__levels=1, refine__smooth=smooth)
    whole, _ = refine(both, None, 6, cfg)
    monkeypatch.setattr(grids, "MOST_VOXELS", 7 * fixed[0, 0, 0].numel())
    assert len(grids.slabs(fixed.shape[2:])) > 2
    slabs, _ = refine(both, None, 6, cfg)
    assert float(whole.abs().max()) > 1 and float((whole - slabs).abs().max()) < 1e-3


@pytest.mark.parametrize("step", [0.3, 1.2])
@pytest.mark.parametrize("slabs", [False, True])
def test_the_fastest_voxel_moves_as_far_as_asked_in_a_step(monkeypatch, step, slabs):
    """Of a field that is not smoothed, so that it stays as far."""
    moving, fixed, _ = pair(3)
    if slabs:
        monkeypatch.setattr(grids, "MOST_VOXELS", 7 * fixed[0, 0, 0].numel())
    field = refined(moving, fixed, None, 1, config(refine__step=step, refine__weight=0, refine__levels=1))
    assert field.square().sum(1).max().sqrt().item() == pytest.approx(step, rel=1e-4)


def test_same_input_same_bits_and_no_gradient_is_left_behind():
    moving, fixed, _ = pair(3)
    with torch.no_grad():
        first, second = (refined(moving, fixed, None, 6, config()) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad


def test_small_volumes_leave_out_the_levels_that_would_be_too_small():
    image = torch.rand(1, 1, 9, 11, 10, generator=torch.Generator().manual_seed(0))
    field = refined(image, image.roll(1, 2), None, 4, config(refine__levels=8))
    assert field.shape == (1, 3, 9, 11, 10) and field.isfinite().all()


def test_flow_of_a_linear_velocity_is_the_exponential():
    """v(x) = a x flows to x exp(a) (in one axis, away from the border)."""
    x = torch.arange(41.0) - 20
    velocity = torch.zeros(1, 2, 41, 41)
    velocity[0, 0] = (0.2 * x)[:, None]
    found = exponential(velocity)[0, 0, 10:31, 20]
    assert torch.allclose(found, x[10:31] * (np.exp(0.2) - 1), atol=0.02)


def test_the_control_grid_gets_means_that_keep_constants_and_corners():
    for n, control in ((9, 5), (10, 5), (7, 7), (4, 2), (1, 1)):
        matrix = onto_control_grid(n, control, 0.8)
        assert matrix.shape == (control, n) and torch.allclose(matrix.sum(1), torch.ones(control))
        assert torch.allclose(matrix.flip(0, 1), matrix, atol=1e-6)
    assert onto_control_grid(6, 6, 0) is None and gaussian(6, 0) is None
    assert onto_control_grid(9, 5, 0)[2, 4] == 0.5 == 2 * onto_control_grid(9, 5, 0)[2, 3]


def test_smoothing_keeps_constants_and_shrinking_keeps_corners():
    x = torch.rand(1, 2, 7, 9, 8)
    assert torch.allclose(smooth(torch.ones_like(x), 1.7), torch.ones_like(x), atol=1e-6)
    assert smooth(x, 0) is x and smooth(x, 3.0).std() < 0.3 * x.std()
    ramp = torch.linspace(0, 1, 21)[None, None, :, None].expand(1, 1, 21, 15)
    small = smaller(ramp, 2)
    assert small.shape == (1, 1, 11, 8)
    assert torch.allclose(small[0, 0, 2:-2, 4], torch.linspace(0, 1, 11)[2:-2], atol=1e-3)
