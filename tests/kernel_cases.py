"""Tests of Diffusion/kernels.py that tests/test_kernels.py runs: on an accelerator, or by Triton's interpreter."""
import pytest
import torch
import torch.nn.functional as F

from Diffusion import device_ops, kernels
from Diffusion.blocks import ConvBlock, convolve_in_eights
from Diffusion.device_ops import product_over_channels
from Diffusion.om_net import CorrelationLayer, NeighbourProducts

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = ACCELERATOR or torch.device("cpu")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def close(ours, plain, rounding=1e-5):
    torch.testing.assert_close(ours, plain, rtol=rounding, atol=rounding * plain.abs().max().item())


@pytest.mark.parametrize("size", [(3, 4, 5), (1, 3, 9), (4, 9), (2, 5, 7)])
def test_the_contrast_of_neighbours_is_that_of_their_products(size):
    torch.manual_seed(0)
    given = [torch.randn(2, *size, 16, device=DEVICE, requires_grad=True) for _ in range(2)]
    given.append(torch.full((1,), 3.0, device=DEVICE, requires_grad=True))
    ours = kernels.NeighbourContrast.apply(*given, torch.float32)
    products = NeighbourProducts.apply(given[0], F.pad(given[1], [0, 0] + [1, 1] * len(size)))
    plain = given[2] * (products - products.mean(1, keepdim=True))
    close(ours, plain)
    weights = torch.randn_like(plain)
    for one, other in zip(*(torch.autograd.grad((y * weights).sum(), given) for y in (ours, plain))):
        close(one, other)


def test_the_contrast_repeats_to_the_bit():
    torch.manual_seed(0)
    given = [torch.randn(1, 5, 6, 6, 16, device=DEVICE, requires_grad=True) for _ in range(2)]
    given.append(torch.ones(1, device=DEVICE, requires_grad=True))
    found = [torch.autograd.grad(kernels.NeighbourContrast.apply(*given, torch.bfloat16).float().square().sum(), given)
             for _ in range(2)]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("channels, groups, size", [(16, 2, (9, 10, 11)), (4, 1, (5, 7)), (256, 32, (3, 4, 5)),
                                                    (32, 4, (12, 13, 14))])
def test_norm_modulation_and_activation_at_once(channels, groups, size):
    torch.manual_seed(0)
    x, grad = (torch.randn(2, channels, *size, device=DEVICE).to(memory_format=FORMATS[len(size) + 2]) for _ in "12")
    by_time = torch.randn(2, 2 * channels, device=DEVICE, requires_grad=True)
    given = [(2 + 3 * x).requires_grad_(), *torch.randn(2, channels, device=DEVICE).requires_grad_().unbind()]
    found = []
    for way in (kernels, device_ops):
        assert kernels.fits(given[0], groups)
        y = way.NormModulateActivate.apply(given[0], groups, 1e-5, *given[1:], *by_time.chunk(2, dim=1), 0.2)
        found.append([y, *torch.autograd.grad(y, [*given, by_time], grad)])
    for one, other in zip(*found):
        close(one, other, 1e-4)
    assert found[0][0].stride() == found[0][1].stride() == x.stride()


def test_the_norm_by_kernels_repeats_to_the_bit():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 10, 11, 12, device=DEVICE).to(memory_format=torch.channels_last_3d).requires_grad_()
    rest = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((8,), (8,), (2, 8), (2, 8))]
    found = [torch.autograd.grad(kernels.NormModulateActivate.apply(x, 1, 1e-5, *rest, 0.2).square().sum(), [x, *rest])
             for _ in range(2)]
    assert all(map(torch.equal, *found))


def test_a_flat_volume_and_one_far_from_zero_have_finite_norms():
    flat = torch.full((1, 8, 4, 4, 4), 3.1, device=DEVICE).to(memory_format=torch.channels_last_3d).requires_grad_()
    ones, zeros = torch.ones(8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    y = kernels.NormModulateActivate.apply(flat, 1, 1e-5, ones, zeros[0], zeros, zeros, 0.2)
    gradient, = torch.autograd.grad(y.sum(), flat)
    assert y.isfinite().all() and gradient.isfinite().all() and y.abs().max() < 0.5


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
    for one, other in zip(*found):
        close(one, other, 1e-3)


@pytest.mark.parametrize("size", [(5, 6, 7), (4, 9)])
def test_a_product_over_channels_is_a_convolution_with_a_kernel_of_one_voxel(size):
    torch.manual_seed(0)
    x = torch.randn(2, 6, *size, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, *[1] * len(size), device=DEVICE, dtype=torch.float64, requires_grad=True)
    plain = (F.conv3d if len(size) == 3 else F.conv2d)(x, weight).movedim(1, -1)
    ours = product_over_channels(x, weight)
    close(ours, plain)
    weights = torch.randn_like(plain)
    for one, other in zip(*(torch.autograd.grad((y * weights).sum(), (x, weight)) for y in (ours, plain))):
        close(one, other)


@pytest.mark.parametrize("channels_in, channels_out, bias", [(2, 16, True), (5, 6, False), (8, 3, True)])
def test_channels_of_zeros_change_nothing(channels_in, channels_out, bias):
    """In steps of a quarter, which bfloat16 holds exactly."""
    torch.manual_seed(0)
    shapes = (2, channels_in, 5, 6, 7), (channels_out, channels_in, 3, 3, 3), (channels_out,)
    given = [(torch.randint(-3, 4, shape) / 4).bfloat16().to(DEVICE).requires_grad_() for shape in shapes]
    x, weight, offset = given[0], given[1], given[2] if bias else None
    found = []
    for y in (convolve_in_eights(lambda *a: F.conv3d(*a, padding=1), x, weight, offset),
              F.conv3d(x, weight, offset, padding=1)):
        found.append([y, *torch.autograd.grad(y.float().square().sum(), given if bias else given[:2])])
    for one, other in zip(*found):
        close(one.float(), other.float(), 2 ** -7)
    assert found[0][0].shape == found[1][0].shape


@pytest.mark.parametrize("channels, size", [(16, (3, 4, 5)), (8, (5, 7)), (40, (4, 3, 6)), (128, (2, 3, 3))])
def test_unit_vectors_of_a_projection(channels, size):
    """One voxel is shorter than the least length, another has no length."""
    torch.manual_seed(0)
    x = torch.randn(2, *size, channels, device=DEVICE, dtype=torch.float64)
    x[0, 0, 0], x[0, 0, 1] = 1e-5 * x[0, 0, 0], 0.0
    weight = torch.randn(16, channels, device=DEVICE, dtype=torch.float64)
    found = []
    for way in ("kernels", "plain"):
        given = [(value.float() if way == "kernels" else value).clone().requires_grad_() for value in (x, weight)]
        y = (kernels.UnitFeatures.apply(*given, 1e-3) if way == "kernels"
             else F.normalize(given[0] @ given[1].T, dim=-1, eps=1e-3))
        grad = torch.linspace(-1, 1, y.numel(), device=DEVICE, dtype=y.dtype).view(y.shape)
        found.append([y, *torch.autograd.grad((y * grad).sum(), given)])
    for one, other in zip(*found):
        close(one.double(), other, 1e-5)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("old, new", [((5, 6), (10, 12)), ((7, 4), (3, 9)), ((4, 5, 6), (8, 10, 12)),
                                      ((6, 8, 4), (3, 2, 4)), ((2, 2, 2), (16, 15, 2)), ((5, 3, 8), (9, 3, 1))])
def test_interpolation_by_kernels_is_that_of_torch(old, new, align_corners):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *old, device=DEVICE)
    plain_x = x.double().requires_grad_()
    assert kernels.interpolates(x, new)
    plain = F.interpolate(plain_x, new, mode={2: "bilinear", 3: "trilinear"}[len(new)], align_corners=align_corners)
    grad = torch.randn(plain.shape, device=DEVICE)
    by_x, = torch.autograd.grad((plain * grad).sum(), plain_x)
    for last in (False, True):
        given = (x.movedim(1, -1) if last else x).contiguous().requires_grad_()
        ours = kernels.Interpolate.apply(given, 1 if last else 2, new, align_corners)
        back, = torch.autograd.grad((ours * (grad.movedim(1, -1) if last else grad)).sum(), given)
        close((ours.movedim(-1, 1) if last else ours).double(), plain)
        close((back.movedim(-1, 1) if last else back).double(), by_x)


@pytest.mark.parametrize("channels, results, size", [(2, 16, (3, 5, 6)), (16, 3, (4, 3, 5)), (3, 3, (4, 5, 3)),
                                                     (1, 32, (2, 4, 70)), (64, 2, (6, 7)), (128, 3, (3, 3, 3))])
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (ACCELERATOR is not None))  # not interpreted
def test_convolutions_from_and_to_a_few_channels(channels, results, size, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, *size, channels, device=DEVICE).to(dtype)
    weight = torch.randn(results, channels, *[3] * len(size), device=DEVICE) / channels ** 0.5
    bias, grad = torch.randn(results, device=DEVICE), torch.randn(2, *size, results, device=DEVICE).to(dtype)
    ours = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    exact = [value.detach().to(dtype if value is weight else value.dtype).double().requires_grad_() for value in ours]
    assert kernels.few_channels(x.movedim(-1, 1), weight)
    y = kernels.ConvolveFew.apply(*ours)
    plain = (F.conv3d if len(size) == 3 else F.conv2d)(exact[0].movedim(-1, 1), *exact[1:], padding=1).movedim(1, -1)
    found = [[y, *torch.autograd.grad(y, ours, grad)], [plain, *torch.autograd.grad(plain, exact, grad.double())]]
    for one, other in zip(*found):
        close(one.double(), other, 1e-5 if dtype == torch.float32 else 2 ** -8)


@pytest.mark.parametrize("channels, size", [(16, (3, 5, 6)), (4, (5, 9)), (32, (4, 1, 3))])
def test_warped_features_are_those_of_grid_sample(channels, size):
    """Far beyond the border too, and at voxels themselves."""
    torch.manual_seed(0)
    x = torch.randn(2, *size, channels, device=DEVICE)
    field = 3 * torch.randn(2, len(size), *size, device=DEVICE)
    field[0, :, 0] = 0.25
    grad, found = torch.randn_like(x), []
    for way in ("kernel", "plain"):
        given = [(value if way == "kernel" else value.double()).clone().requires_grad_() for value in (x, field)]
        if way == "kernel":
            y = kernels.Warp.apply(*given)
        else:
            y = warp_in_float64(given[0].movedim(-1, 1), given[1]).movedim(1, -1)
        found.append([y, *torch.autograd.grad(y, given, grad.to(y.dtype))])
    for one, other in zip(*found):
        close(one.double(), other, 1e-5)


def warp_in_float64(image, field):
    size = torch.tensor(field.shape[2:], dtype=torch.float64, device=DEVICE)
    at = torch.stack(torch.meshgrid(*[torch.arange(n, device=DEVICE) for n in field.shape[2:]], indexing="ij")) + field
    at = at.flip(1).movedim(1, -1) * (2 / (size.flip(0) - 1).clamp(min=1)) - 1
    return F.grid_sample(image, at, padding_mode="border", align_corners=True)


@pytest.mark.parametrize("size", [(3, 4, 5), (6, 7)])
def test_features_side_by_side_are_those_of_cat(size):
    """Of parts channels last, channels first, and neither; with channels of zeros and without."""
    torch.manual_seed(0)
    parts = [torch.randn(2, *size, 16, device=DEVICE).movedim(-1, 1), torch.randn(2, 5, *size, device=DEVICE),
             torch.randn(2, *size[::-1], 4, device=DEVICE).movedim(-1, 1).transpose(2, -1)]
    for zeros in (0, 7):
        given = [part.clone().as_strided(part.shape, part.stride()).copy_(part).requires_grad_() for part in parts]
        ours = kernels.SideBySide.apply(zeros, *given)
        plain = torch.cat([*given, torch.zeros(2, zeros, *size, device=DEVICE)], dim=1)
        assert torch.equal(ours, plain) and ours.movedim(1, -1).is_contiguous()
        for grad in (torch.randn_like(ours), torch.randn(ours.shape, device=DEVICE)):
            for one, other in zip(*(torch.autograd.grad(y, given, grad, retain_graph=True) for y in (ours, plain))):
                assert torch.equal(one, other)


def test_the_trial_passes_and_finds_a_wrong_gradient(monkeypatch):
    kernels.try_out(DEVICE.type)
    backward = kernels.NeighbourContrast.backward
    monkeypatch.setattr(kernels.NeighbourContrast, "backward",
                        staticmethod(lambda *a: (1.1 * backward(*a)[0], *backward(*a)[1:])))
    with pytest.raises(RuntimeError, match="wrong values: gradient of the neighbours$"):
        kernels.try_out(DEVICE.type)


@pytest.mark.skipif(ACCELERATOR is None, reason="this machine has no accelerator")
def test_on_an_accelerator_the_layers_take_the_kernels():
    assert device_ops.working_kernels(ACCELERATOR.type) is kernels
    y = ConvBlock(3, 8, 8, 4).to(DEVICE)(torch.randn(1, 8, 4, 4, 4, device=DEVICE).to(memory_format=FORMATS[5]),
                                         torch.randn(1, 4, device=DEVICE))
    assert type(y.grad_fn) is kernels.NormModulateActivate._backward_cls
