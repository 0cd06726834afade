"""Refinement of one pair: it finds known deformations, does not fold, and starts from where it is told."""
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
    best_weight,
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


@pytest.mark.parametrize("weight", ["auto", 0.5])
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


@pytest.mark.slow
def test_the_weight_follows_from_the_pair():
    """One anatomy: little smoothing where it is bent finely and shown clearly, much where smoothly and with noise.

    Means over three draws, since with so few cubes each one is off by a factor of up to two.
    """
    size = (48, 56, 52)
    image = torch.from_numpy(make_subject(3, size)["image"])[None, None].float()
    numbers = torch.Generator().manual_seed(4)
    found, misses = {"fine": [], "noisy": []}, {"fine": [], "noisy": []}
    for _ in range(3):
        fine = smooth(torch.randn(1, 3, *size, generator=numbers), 2.5)
        for name, true, noise in (("fine", fine * (1.5 / fine.abs().max()), 0.0), ("noisy", wave(size, 1.5), 0.15)):
            moving, fixed = (each + noise * torch.randn(image.shape, generator=numbers)
                             for each in (image, warp(image, true, padding="border")))
            found[name].append(inferred_weight(unmasked(moving, fixed), None, config()))
            misses[name].append([float((refined(moving, fixed, None, 30, config(refine__weight=weight)) - true).square()
                                       .mean()) for weight in (found[name][-1], 0.25, 4.0)])
    fine, noisy = (np.exp(np.log(found[name]).mean()) for name in ("fine", "noisy"))
    assert noisy > 1.2 * fine
    (of_noisy, with_least, _), (of_fine, _, with_most) = (np.mean(misses[name], 0) for name in ("noisy", "fine"))
    assert of_noisy < with_least and of_fine < with_most


def test_what_a_mask_leaves_out_has_no_edges():
    """A bright cube that a mask leaves out adds no gradient at its border, and its neighbours keep theirs."""
    image = torch.linspace(0, 1, 20).view(1, 1, 20, 1, 1).expand(1, 1, 20, 18, 16).clone()
    inside, mask = image.clone(), torch.ones_like(image)
    inside[..., 6:12, 6:12, 6:12] += 5.0
    mask[..., 6:12, 6:12, 6:12] = 0.0
    largest, largest_masked = (float(each[mask > 0].max() / each.median()) for each in (edges(inside),
                                                                                        edges(inside, mask)))
    assert largest > 10 and largest_masked < 2


def test_a_number_is_taken_as_it_is_and_auto_is_the_number_inferred():
    moving, fixed, _ = pair(3)
    weight = inferred_weight(unmasked(moving, fixed), None, config())
    by_number, by_pair = (refined(moving, fixed, None, 8, config(refine__weight=each)) for each in (weight, "auto"))
    assert torch.equal(by_number, by_pair)


@pytest.mark.parametrize("best", [0.4, 0.5, 0.9, 2.2])
def test_best_weight_is_the_maximum_of_a_parabola(best):
    assert best_weight(lambda weight: -np.log2(weight / best) ** 2) == pytest.approx(best, rel=1e-6)
    assert best_weight(lambda weight: weight) == WEIGHTS[-1] and best_weight(lambda weight: -weight) == WEIGHTS[0]
    scores = dict(zip(WEIGHTS, (0.0, 2.0, 1.9, 4.0, 3.0)))  # a small step does not keep the search from the maximum
    assert best_weight(scores.__getitem__) == pytest.approx(2.0 * 2 ** 0.177, rel=0.01)


def test_no_window_inside_the_measured_cubes_touches_what_was_seen():
    for size, window in (((20, 24, 17), 5), ((40, 33), 3), ((40, 44, 37), 9)):
        seen, measured = cubes(size, window)
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
