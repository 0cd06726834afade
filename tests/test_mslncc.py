"""Local correlation by running sums against the plain dense convolution, in value and gradient."""
import math

import bench_ops
import pytest
import torch
import torch.nn.functional as F

from Diffusion.losses import local_correlation
from tests import plain_step
from tests.plain_step import mslncc


@pytest.fixture(params=[(17, 23), (10, 13, 11)], ids=["2d", "3d"])
def size(request):
    return request.param


def dense_correlation(image, target, *options, **named):
    return plain_step.dense_correlation(image.double(), target.double(), *options, **named)


def pair(size, batch=2, channels=1, likeness=0.7, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(batch, channels, *size, generator=numbers) for _ in range(2))
    return a, likeness * a + (1 - likeness) * b


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("window", [3, 9])
def test_value_equals_the_dense_convolution(size, window, squared):
    a, b = pair(size, channels=2)
    ours = local_correlation(a, b, window, squared)
    assert ours.dim() == 0 and 0.1 < float(ours) < 0.99
    assert float(ours) == pytest.approx(float(dense_correlation(a, b, window, squared)), abs=2e-6)


@pytest.mark.parametrize("sides, window", [((5, 23), 9), ((3, 4), 9), ((5, 6, 7), 11), ((1, 8, 3), 5), ((4, 5, 4), 9)])
def test_window_larger_than_the_image(sides, window):
    a, b = pair(sides)
    assert float(local_correlation(a, b, window)) == pytest.approx(float(dense_correlation(a, b, window)), abs=5e-6)


def test_scales_are_averaged(size):
    a, b = pair([n + 6 for n in size])
    pool = F.avg_pool3d if len(size) == 3 else F.avg_pool2d
    levels = []
    x, y = a, b
    for _ in range(3):
        levels.append(float(dense_correlation(x, y)))
        x, y = pool(x, 2), pool(y, 2)
    assert float(mslncc(a, b)) == pytest.approx(sum(levels) / 3, abs=1e-5)
    assert float(mslncc(a, b, scales=1)) == pytest.approx(levels[0], abs=1e-5)
    assert levels[0] != pytest.approx(levels[2], abs=1e-3)


def test_identical_and_inverted_images(size):
    a, _ = pair([2 * n for n in size])
    for squared in (True, False):
        assert float(mslncc(a, a, squared=squared)) == pytest.approx(1.0, abs=1e-4)
    assert float(local_correlation(a, -a, squared=False)) == pytest.approx(-1.0, abs=1e-4)
    assert float(local_correlation(a, -a, squared=True)) == pytest.approx(1.0, abs=1e-4)


def test_flat_images_are_not_alike_and_have_a_finite_gradient(size):
    big = [4 * n for n in size] if len(size) == 2 else [2 * n for n in size]
    textured, _ = pair(big, 1)
    for first, second in [(0.0, 0.0), (0.0, None), (0.7, 0.3), (1.0, None)]:
        a = torch.full((1, 1, *big), first, requires_grad=True)
        b = textured if second is None else torch.full((1, 1, *big), second)
        for squared in (True, False):
            value = mslncc(a, b, squared=squared)
            gradient, = torch.autograd.grad(value, a)
            assert torch.isfinite(value) and torch.isfinite(gradient).all()
            assert not squared or value.abs() < 0.01
            if first == 0.0:
                assert float(value.detach()) == 0.0


def with_frame(image, width, value=0.0):
    return F.pad(image, [width] * (2 * (image.dim() - 2)), value=value)


@pytest.mark.parametrize("squared", [True, False])
def test_a_mask_of_ones_is_no_mask(size, squared):
    a, b = (x.requires_grad_() for x in pair([2 * n for n in size], channels=2))
    plain = mslncc(a, b, 5, squared=squared)
    masked = mslncc(a, b, 5, squared=squared, weight=torch.ones_like(a[:, :1]))
    assert float(plain.detach()) == pytest.approx(float(masked.detach()), abs=2e-6)
    for one, other in zip(torch.autograd.grad(plain, (a, b)), torch.autograd.grad(masked, (a, b))):
        assert float((one - other).norm() / one.norm()) < 1e-4


@pytest.mark.parametrize("squared, masks", [(True, False), (False, True)])
def test_windows_in_which_the_target_is_flat_do_not_count(size, squared, masks):
    narrow, wide = ([with_frame(x, width) for x in pair(size)] for width in (4, 6))
    values = [float(local_correlation(*x, 5, squared, weight=torch.ones_like(x[0]) if masks else None))
              for x in (narrow, wide)]
    assert values[0] > 0.1
    assert values[1] == pytest.approx(values[0], abs=1e-6)
    assert values[1] == pytest.approx(float(dense_correlation(*wide, 5, squared)), abs=5e-6)
    # What the image shows where no window sees the target neither helps nor hurts.
    far = with_frame(torch.zeros_like(narrow[0]), 2, value=1.0)
    busy = torch.where(far > 0, torch.rand(far.shape), wide[0])
    assert float((busy - wide[0]).abs().max()) > 0.5
    again = local_correlation(busy, wide[1], 5, squared, weight=torch.ones_like(busy) if masks else None)
    assert float(again) == pytest.approx(values[1], abs=1e-6)


def test_each_sample_counts_alike():
    a, b = pair((30, 40), 1)
    half = [torch.where(torch.arange(40) < 20, x, torch.zeros(())) for x in pair((30, 40), 1, likeness=0.3, seed=1)]
    apart = [float(local_correlation(*x)) for x in ((a, b), half)]
    together = float(local_correlation(torch.cat([a, half[0]]), torch.cat([b, half[1]])))
    assert together == pytest.approx(sum(apart) / 2, abs=1e-6)
    assert abs(apart[0] - apart[1]) > 0.1


def test_float32_under_autocast(size):
    a, b = pair([2 * n for n in size])
    with torch.autocast("cpu", torch.bfloat16):
        under = mslncc(a, b)
    assert under.dtype == torch.float32
    assert float(under) == float(mslncc(a, b))
    with torch.autocast("cpu", torch.bfloat16):
        assert local_correlation(a.bfloat16(), b.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("squared", [True, False])
def test_gradient_equals_that_of_the_dense_convolution(size, squared):
    ours, dense = pair(size), pair(size)
    for pairs in (ours, dense):
        pairs[1][..., :5] = 0.4  # some windows of the target do not count
        for x in pairs:
            x.requires_grad_()
    of_ours = torch.autograd.grad(local_correlation(*ours, squared=squared), ours)
    of_dense = torch.autograd.grad(dense_correlation(*dense, squared=squared), dense)
    for gradient, exact in zip(of_ours, of_dense):
        assert exact.abs().max() > 0
        assert float((gradient - exact).norm() / exact.norm()) < 1e-4


def test_agrees_with_monai(size):
    losses = pytest.importorskip("monai.losses")
    # MONAI's loss is the negative of the squared correlation, and its variances are sums over the window. It pads with
    # zeros, as these images do, and counts windows of zeros, which we leave out.
    a, b = (with_frame(x, 8) for x in pair(size, 1))
    counted = math.prod((n + 8) / (n + 16) for n in size)
    monai = losses.LocalNormalizedCrossCorrelationLoss(spatial_dims=len(size), kernel_size=9)
    assert counted * float(local_correlation(a, b)) == pytest.approx(-float(monai(a, b)), abs=1e-3)


def test_the_benchmark_compares_with_monai_where_both_count_the_same_voxels():
    pytest.importorskip("monai.losses")
    row, _ = bench_ops.bench_correlation(16, "MONAI", bench_ops.monai_correlation(), 20)
    assert float(row[4]) < 1e-4


@pytest.mark.parametrize("squared", [True, False])
def test_what_has_no_weight_does_not_count(squared):
    a, b = pair((20, 24, 16), batch=1)
    weight = torch.ones(1, 1, 20, 24, 16)
    weight[:, :, :, :9] = 0.0
    changed = torch.where(weight > 0, a, 5.0 * b + 1.0).requires_grad_()
    plain = mslncc(a, b, squared=squared, weight=weight)
    value = mslncc(changed, b, squared=squared, weight=weight)
    assert float(value.detach()) == pytest.approx(float(plain), abs=1e-6)
    assert float(mslncc(changed.detach(), b, squared=squared)) != pytest.approx(float(plain), abs=1e-3)
    gradient, = torch.autograd.grad(value, changed)
    assert gradient[:, :, :, :9].abs().max() == 0 and gradient[:, :, :, 9:].abs().max() > 0
    assert float(mslncc(a, b, squared=squared, weight=torch.zeros_like(weight))) == 0.0
