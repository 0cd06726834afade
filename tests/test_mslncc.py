"""Local correlation by running sums against the plain dense convolution, in value and gradient."""
import pytest
import torch
import torch.nn.functional as F

from Diffusion.losses import local_correlation, mslncc

SIZES = [(17, 23), (13, 19, 15)]


@pytest.fixture(params=SIZES, ids=["2d", "3d"])
def size(request):
    return request.param


def dense_correlation(image, target, window=9, squared=True, eps=1e-5):
    """The same loss in float64 with a kernel of ones."""
    a, b = image.double(), target.double()
    dims, channels = a.dim() - 2, a.shape[1]
    conv = F.conv3d if dims == 3 else F.conv2d
    kernel = torch.full((channels, 1, *[window] * dims), 1.0 / window ** dims, dtype=torch.float64)

    def box(x):
        return conv(x, kernel, padding=window // 2, groups=channels)

    mean_a, mean_b = box(a), box(b)
    variances = (box(a * a) - mean_a ** 2).clamp(min=0) * (box(b * b) - mean_b ** 2).clamp(min=0)
    covariance = box(a * b) - mean_a * mean_b
    if squared:
        return (covariance ** 2 / (variances + eps ** 2)).mean()
    return (covariance / (variances + eps ** 2).sqrt()).mean()


def pair(size, batch=2, channels=1, likeness=0.7, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    a, b = (torch.rand(batch, channels, *size, generator=numbers) for _ in range(2))
    return a, likeness * a + (1 - likeness) * b


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("window", [3, 9])
def test_value_equals_the_dense_convolution(size, window, squared):
    for channels in (1, 2):
        a, b = pair(size, 3, channels)
        ours = local_correlation(a, b, window, squared)
        assert ours.dim() == 0
        assert 0.1 < float(ours) < 0.99
        assert float(ours) == pytest.approx(float(dense_correlation(a, b, window, squared)), abs=2e-6)


@pytest.mark.parametrize("sides, window", [((5, 23), 9), ((3, 4), 9), ((5, 6, 7), 11), ((1, 8, 3), 5), ((4, 5, 4), 9)])
def test_window_larger_than_the_image(sides, window):
    a, b = pair(sides)
    assert float(local_correlation(a, b, window)) == pytest.approx(float(dense_correlation(a, b, window)), abs=5e-6)


def test_scales_are_averaged(size):
    a, b = pair([2 * n for n in size])
    pool = F.avg_pool3d if len(size) == 3 else F.avg_pool2d
    levels = []
    x, y = a, b
    for _ in range(3):
        levels.append(float(dense_correlation(x, y)))
        x, y = pool(x, 2), pool(y, 2)
    assert float(mslncc(a, b)) == pytest.approx(sum(levels) / 3, abs=1e-5)
    assert float(mslncc(a, b, scales=1)) == pytest.approx(levels[0], abs=1e-5)
    assert levels[0] != pytest.approx(levels[2], abs=1e-3)


def test_identical_images_give_one(size):
    a, _ = pair([2 * n for n in size])
    for squared in (True, False):
        assert float(mslncc(a, a, squared=squared)) == pytest.approx(1.0, abs=1e-4)


def test_inverted_contrast(size):
    a, _ = pair(size)
    assert float(local_correlation(a, -a, squared=False)) == pytest.approx(-1.0, abs=1e-4)
    assert float(local_correlation(a, -a, squared=True)) == pytest.approx(1.0, abs=1e-4)


def test_gain_does_not_matter(size):
    a, b = pair(size)
    assert float(local_correlation(a, 2.5 * b)) == pytest.approx(float(local_correlation(a, b)), abs=1e-4)


def test_slowly_varying_gain_and_offset_do_not_matter():
    a, b = pair((200, 220), 1)
    slope = torch.linspace(0.0, 1.0, 220)
    changed = (1.0 + slope) * b + 0.5 * slope
    value = float(local_correlation(a, b, window=3))
    # The zeros outside do not follow the offset: 2 % of the voxels see them.
    assert value < 0.95
    assert float(local_correlation(a, changed, window=3)) == pytest.approx(value, abs=0.01)


def test_range(size):
    for seed, likeness in enumerate([0.0, 0.5, 1.0]):
        a, b = pair(size, likeness=likeness, seed=seed)
        assert 0.0 <= float(local_correlation(a, b)) <= 1.0
        assert -1.0 <= float(local_correlation(a, b, squared=False)) <= 1.0
        assert 0.0 <= float(mslncc(a, b, window=5)) <= 1.0


def test_empty_images_give_zero_and_flat_ones_a_finite_gradient(size):
    big = [4 * n for n in size] if len(size) == 2 else [2 * n for n in size]
    textured, _ = pair(big, 1)
    for first, second in [(0.0, 0.0), (0.0, None), (0.7, 0.3), (1.0, None)]:
        a = torch.full((1, 1, *big), first, requires_grad=True)
        b = textured if second is None else torch.full((1, 1, *big), second)
        for squared in (True, False):
            value = mslncc(a, b, squared=squared)
            gradient, = torch.autograd.grad(value, a)
            assert torch.isfinite(value) and torch.isfinite(gradient).all()
            if first == 0.0:
                assert float(value.detach()) == 0.0


def test_flat_images_give_zero_away_from_the_border():
    a = torch.full((1, 1, 200, 200), 0.7)
    b = torch.full((1, 1, 200, 200), 0.3)
    # The zeros outside are seen by the windows of an outermost frame of four voxels only.
    frame = 1 - (192 / 200) ** 2
    assert float(local_correlation(a, b)) == pytest.approx(frame, abs=0.01)


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
    for x in (*ours, *dense):
        x.requires_grad_()
    of_ours = torch.autograd.grad(local_correlation(*ours, squared=squared), ours)
    of_dense = torch.autograd.grad(dense_correlation(*dense, squared=squared), dense)
    for gradient, exact in zip(of_ours, of_dense):
        assert exact.abs().max() > 0
        assert float((gradient - exact).norm() / exact.norm()) < 1e-4


def test_agrees_with_monai(size):
    losses = pytest.importorskip("monai.losses")
    a, b = pair(size)
    # MONAI's loss is the negative of the squared correlation, and its variances are sums over the window.
    monai = losses.LocalNormalizedCrossCorrelationLoss(spatial_dims=len(size), kernel_size=9)
    assert float(local_correlation(a, b)) == pytest.approx(-float(monai(a, b)), abs=1e-5)


@pytest.mark.parametrize("squared", [True, False])
def test_what_has_no_weight_does_not_count(squared):
    a, b = pair((20, 24, 16), batch=1)
    weight = torch.ones(1, 1, 20, 24, 16)
    weight[:, :, :, :9] = 0.0
    changed = torch.where(weight > 0, a, 5.0 * b + 1.0).requires_grad_()
    plain = mslncc(a, b, squared=squared, weight=weight)
    value = mslncc(changed, b, squared=squared, weight=weight)
    assert float(value.detach()) == pytest.approx(float(plain), abs=1e-6)
    assert float(mslncc(a, b, squared=squared)) != pytest.approx(float(plain), abs=1e-3)
    gradient, = torch.autograd.grad(value, changed)
    assert gradient[:, :, :, :9].abs().max() == 0 and gradient[:, :, :, 9:].abs().max() > 0
    assert float(mslncc(a, b, squared=squared, weight=torch.zeros_like(weight))) == 0.0
