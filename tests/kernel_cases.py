"""Tests of Diffusion/kernels.py that tests/test_kernels.py runs: on an accelerator, or by Triton's interpreter."""
import pytest
import torch
import torch.nn.functional as F

from Diffusion import device_ops, kernels
from Diffusion.blocks import ConvBlock, convolve_in_eights
from Diffusion.device_ops import product_over_channels
from Diffusion.fields import LINEAR
from Diffusion.om_net import CorrelationLayer, NeighbourProducts

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = ACCELERATOR or torch.device("cpu")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def close(ours, plain, rounding=1e-5):
    for one, other in zip(ours, plain, strict=True):
        other = other.to(one.dtype)
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * other.abs().max().item())


def compare(ours, plain, given, rounding=1e-5):
    """Results and gradients of a kernel, and those of the plain way in float64."""
    close(kernels.results(ours, given), kernels.results(plain, [value.double() for value in given]), rounding)


def randoms(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize("size", [(3, 4, 5), (1, 3, 9), (4, 9)])
def test_the_contrast_of_neighbours_is_that_of_their_products(size):
    def plain(f, g, sharpness):
        products = NeighbourProducts.apply(f, F.pad(g, [0, 0] + [1, 1] * len(size)))
        return sharpness * (products - products.mean(1, keepdim=True))
    given = [*randoms((2, *size, 16), (2, *size, 16)), torch.full((1,), 3.0, device=DEVICE)]
    compare(lambda *given: kernels.NeighbourContrast.apply(*given, torch.float32), plain, given)


@pytest.mark.parametrize("channels, groups, size", [(16, 2, (9, 10, 11)), (4, 1, (5, 7)), (256, 32, (3, 4, 5)),
                                                    (32, 4, (12, 13, 14))])
def test_norm_modulation_and_activation_at_once(channels, groups, size):
    x, *given = randoms((2, channels, *size), *[(channels,)] * 2, *[(2, channels)] * 2)
    x = (2 + 3 * x).to(memory_format=FORMATS[x.dim()])
    assert kernels.fits(x, groups)

    def by(way):
        return lambda x, *rest: way.NormModulateActivate.apply(x, groups, 1e-5, *rest, 0.2)
    compare(by(kernels), by(device_ops), [x, *given], 1e-4)
    y, by_x, *_ = kernels.results(by(kernels), [x, *given])
    assert y.stride() == by_x.stride() == x.stride()


@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("added", [False, True])
def test_the_norm_of_a_sum(width, added):
    """Of rows that are no multiple of those of a program. The norm is in bfloat16."""
    x, branch, weight, bias = randoms((3, 7, width), (3, 7, width), (width,), (width,))
    given = [x + 2, *[branch] * added, weight, bias]

    def ours(x, *rest):
        branch, weight, bias = rest if added else (None, *rest)
        total, y = kernels.NormedSum.apply(x, branch, weight, bias, 1e-5)
        return torch.stack([total, y])

    def plain(x, *rest):
        branch, weight, bias = rest if added else (0, *rest)
        return torch.stack([x + branch, F.layer_norm(x + branch, (width,), weight, bias)])
    compare(ours, plain, given, 2 ** -7)
    assert torch.equal(ours(*given)[0], given[0] + branch if added else given[0])


@pytest.mark.parametrize("function, shapes", [
    (lambda *given: kernels.NeighbourContrast.apply(*given, torch.bfloat16), [*[(1, 5, 6, 6, 16)] * 2, (1,)]),
    (lambda x, *rest: kernels.NormModulateActivate.apply(x.movedim(-1, 1), 1, 1e-5, *rest, 0.2),
     [(2, 10, 11, 12, 8), (8,), (8,), (2, 8), (2, 8)])], ids=["contrast", "norm"])
def test_kernels_repeat_to_the_bit(function, shapes):
    given = randoms(*shapes)
    assert all(map(torch.equal, *(kernels.results(function, given) for _ in range(2))))


def test_a_flat_volume_and_one_far_from_zero_have_finite_norms():
    flat = torch.full((1, 8, 4, 4, 4), 3.1, device=DEVICE).to(memory_format=torch.channels_last_3d).requires_grad_()
    ones, zeros = torch.ones(8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    y = kernels.NormModulateActivate.apply(flat, 1, 1e-5, ones, zeros[0], zeros, zeros, 0.2)
    gradient, = torch.autograd.grad(y.sum(), flat)
    assert y.isfinite().all() and gradient.isfinite().all() and y.abs().max() < 0.5


def test_the_statistics_of_a_group_with_more_values_than_32_bits_count():
    """From the sums over such a volume: of 8 channels of 2^28 voxels with mean 3 and variance 1."""
    voxels, channels = 2 ** 28, 8
    sums = voxels * torch.tensor([3.0, 10.0], device=DEVICE).repeat_interleave(channels).view(1, 1, 2, channels)
    ones, zeros = torch.ones(channels, device=DEVICE), torch.zeros(1, channels, device=DEVICE)
    statistics = torch.empty(1, 4, channels, device=DEVICE)
    kernels._factors[(1,)](sums, 1, ones, zeros, zeros, zeros, channels, statistics, voxels, 1e-5, GROUP=channels,
                           ROWS=1, CHANNELS=channels)
    assert statistics[0, :, 0].tolist() == pytest.approx([3, 1, 1, -3], rel=1e-4)


@pytest.fixture
def with_kernels(monkeypatch):
    """A function that has the layers take the kernels, or not; on a CPU as if it were a device."""
    monkeypatch.setitem(device_ops.SETTINGS, "as on a device", True)
    return lambda on: monkeypatch.setattr(device_ops, "kernels_for", lambda x: kernels if on else None)


def test_layers_have_the_same_results_and_gradients_with_kernels(with_kernels, monkeypatch):
    torch.manual_seed(0)
    block, layer = ConvBlock(3, 16, 16, 8).to(DEVICE), CorrelationLayer(3, 16).to(DEVICE)
    for parameter in (*block.norm.parameters(), *block.by_time.parameters()):
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    x, time = torch.randn(2, 16, 3, 5, 4, device=DEVICE, requires_grad=True), torch.randn(2, 8, device=DEVICE)
    found = []
    for on in (True, False):
        with_kernels(on)
        for module in ("blocks", "om_net"):
            monkeypatch.setattr(f"Diffusion.{module}.kernels_for", device_ops.kernels_for)
        y = block(x.to(memory_format=torch.channels_last_3d), time)
        z = layer(y, y.roll(1, 2))
        weights = torch.linspace(-1, 1, z.numel(), device=DEVICE).view(z.shape)
        found.append([y, z, *torch.autograd.grad((z * weights).sum(), [x, *block.parameters(), *layer.parameters()])])
    close(*found, 1e-3)


@pytest.mark.parametrize("size", [(5, 6, 7), (4, 9)])
def test_a_product_over_channels_is_a_convolution_with_a_kernel_of_one_voxel(size):
    def plain(x, weight):
        return (F.conv3d if len(size) == 3 else F.conv2d)(x, weight).movedim(1, -1)
    compare(product_over_channels, plain, randoms((2, 6, *size), (4, 6, *[1] * len(size))))


@pytest.mark.parametrize("channels_in, channels_out, bias", [(2, 16, True), (5, 6, False), (8, 3, True)])
def test_channels_of_zeros_change_nothing(channels_in, channels_out, bias):
    """In steps of a quarter, which bfloat16 holds exactly."""
    torch.manual_seed(0)
    shapes = (2, channels_in, 5, 6, 7), (channels_out, channels_in, 3, 3, 3), *[(channels_out,)] * bias
    given = [(torch.randint(-3, 4, shape) / 4).bfloat16().to(DEVICE) for shape in shapes]

    def plain(x, weight, offset=None):
        return F.conv3d(x, weight, offset, padding=1)
    close(kernels.results(lambda x, weight, offset=None: convolve_in_eights(plain, x, weight, offset), given),
          kernels.results(plain, given), 2 ** -7)


@pytest.mark.parametrize("channels, size", [(16, (3, 4, 5)), (8, (5, 7)), (40, (4, 3, 6)), (128, (2, 3, 3))])
def test_unit_vectors_of_a_projection(channels, size):
    """One voxel is shorter than the least length, another has no length."""
    x, weight = randoms((2, *size, channels), (16, channels))
    x[0, 0, 0], x[0, 0, 1] = 1e-5 * x[0, 0, 0], 0.0
    compare(lambda x, weight: kernels.UnitFeatures.apply(x, weight, 1e-3),
            lambda x, weight: F.normalize(x @ weight.T, dim=-1, eps=1e-3), [x, weight])


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("old, new", [((7, 4), (3, 9)), ((4, 5, 6), (8, 10, 12)), ((6, 8, 4), (3, 2, 4)),
                                      ((2, 2, 2), (16, 15, 2)), ((5, 3, 8), (9, 3, 1))])
def test_interpolation_by_kernels_is_that_of_torch(old, new, align_corners):
    def plain(x):
        return F.interpolate(x, new, mode=LINEAR[len(new)], align_corners=align_corners)
    x, = randoms((2, 3, *old))
    assert kernels.interpolates(x, new)
    compare(lambda x: kernels.Interpolate.apply(x, 2, new, align_corners), plain, [x])
    compare(lambda x: kernels.Interpolate.apply(x, 1, new, align_corners),
            lambda x: plain(x.movedim(-1, 1)).movedim(1, -1), [x.movedim(1, -1).contiguous()])


@pytest.mark.parametrize("channels, results, size, last", [
    (2, 16, (3, 5, 6), False), (16, 3, (4, 3, 5), True), (3, 3, (4, 5, 3), True), (1, 32, (2, 4, 70), False),
    (64, 2, (6, 7), False), (128, 3, (3, 3, 3), True)])
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (ACCELERATOR is not None))  # not interpreted
def test_convolutions_from_and_to_a_few_channels(channels, results, size, last, dtype):
    """Many channels are last in memory, a few first, but for an input that has them last, and its gradient."""
    x, weight, bias = randoms((2, channels, *size), (results, channels, *[3] * len(size)), (results,))
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    given = [x.to(dtype), (weight / channels ** 0.5).to(dtype).float(), bias]
    assert kernels.few_channels(x, weight)
    ours = kernels.results(kernels.ConvolveFew.apply, given)
    close(ours, kernels.results(kernels.plain_convolution, [value.double() for value in given]),
          1e-5 if dtype == torch.float32 else 2 ** -8)
    assert (ours[0].movedim(1, -1) if results > 4 else ours[0]).is_contiguous()
    assert (ours[1].movedim(1, -1) if last or channels > 4 else ours[1]).is_contiguous()


@pytest.mark.parametrize("channels, size", [(16, (3, 5, 6)), (4, (5, 9)), (32, (4, 1, 3))])
def test_warped_features_are_those_of_grid_sample(channels, size):
    """Far beyond the border too, and at voxels themselves."""
    x, field = randoms((2, *size, channels), (2, len(size), *size))
    field *= 3
    field[0, :, 0] = 0.25
    compare(kernels.Warp.apply, kernels.plain_warp, [x, field])


@pytest.mark.parametrize("zeros", [0, 7])
@pytest.mark.parametrize("size", [(3, 4, 5), (6, 7)])
def test_features_side_by_side_are_those_of_cat(size, zeros):
    """Of parts channels last, channels first, and neither; with channels of zeros and without."""
    last, first, neither = randoms((2, *size, 16), (2, 5, *size), (2, *size[::-1], 4))
    given = [last.movedim(-1, 1), first, neither.movedim(-1, 1).transpose(2, -1)]
    ours = kernels.results(lambda *parts: kernels.SideBySide.apply(zeros, *parts), given)
    plain = kernels.results(lambda *parts: F.pad(torch.cat(parts, dim=1), [0] * (2 * len(size) + 1) + [zeros]), given)
    assert all(map(torch.equal, ours, plain)) and ours[0].movedim(1, -1).is_contiguous()


def test_the_trial_passes_and_finds_a_wrong_gradient(monkeypatch):
    kernels.try_out(DEVICE.type)
    backward = kernels.NeighbourContrast.backward
    monkeypatch.setattr(kernels.NeighbourContrast, "backward",
                        staticmethod(lambda *a: (1.1 * backward(*a)[0], *backward(*a)[1:])))
    with pytest.raises(RuntimeError, match="wrong values: neighbours$"):
        kernels.try_out(DEVICE.type)


@pytest.mark.skipif(ACCELERATOR is None, reason="this machine has no accelerator")
def test_on_an_accelerator_the_layers_take_the_kernels():
    assert device_ops.working_kernels(ACCELERATOR.type) is kernels
    y = ConvBlock(3, 8, 8, 4).to(DEVICE)(torch.randn(1, 8, 4, 4, 4, device=DEVICE).to(memory_format=FORMATS[5]),
                                         torch.randn(1, 4, device=DEVICE))
    assert type(y.grad_fn) is kernels.NormModulateActivate._backward_cls
