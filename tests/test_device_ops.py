"""The device's way of an operation gives what the plain way gives: values, gradients, precision, memory format."""
import pytest
import torch
import torch.nn.functional as F

from Diffusion import device_ops, fields, om_net
from Diffusion.blocks import ConvBlock, UpsampleConv
from Diffusion.device_ops import NormModulateActivate, interpolate_by_products
from Diffusion.fields import LINEAR, jacobian_determinant, resize_field
from Diffusion.networks import build_network
from tests.tiny import config

SHAPES = [((5, 6), (10, 12)), ((7, 4), (3, 9)), ((1, 3), (4, 3)), ((4, 5, 6), (8, 10, 12)), ((5, 3, 1), (9, 3, 4)),
          ((6, 8, 4), (3, 4, 2)), ((2, 2, 2), (16, 16, 16))]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture
def as_on_a_device(monkeypatch):
    """A function that switches the device's way on."""
    return lambda: monkeypatch.setitem(device_ops.SETTINGS, "as on a device", True)


@pytest.fixture
def calls_of(monkeypatch):
    """calls_of(module, name): a list that grows by the name with each call of that function by that module."""
    def count(module, name):
        function, calls = getattr(module, name), []

        def counted(*given):
            calls.append(name)
            return function(*given)
        monkeypatch.setattr(module, name, counted)
        return calls
    return count


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("old, new", SHAPES)
def test_interpolation_by_products_is_that_of_torch(old, new, align_corners, channels_last):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *old)
    x = x.to(memory_format=FORMATS[x.dim()]) if channels_last else x
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    by_products = interpolate_by_products(ours, new, align_corners)
    plain = F.interpolate(theirs, size=new, mode=LINEAR[len(new)], align_corners=align_corners)
    assert by_products.shape == plain.shape
    torch.testing.assert_close(by_products, plain, rtol=1e-5, atol=1e-5)
    if channels_last:
        assert by_products.is_contiguous(memory_format=FORMATS[x.dim()])
    weights = torch.randn(plain.shape)
    (by_products * weights).sum().backward()
    (plain * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_interpolation_keeps_bfloat16_whose_weights_are_exact_where_sides_double():
    x = torch.randn(1, 4, 6, 8, 4).bfloat16()
    assert interpolate_by_products(x, (12, 16, 8), False).dtype == torch.bfloat16
    matrix = device_ops.interpolation_matrix(8, 128, False, torch.float32, "cpu")
    assert torch.equal(matrix.bfloat16().float(), matrix) and torch.equal(matrix.sum(1), torch.ones(128))


def test_fields_and_upsampling_take_it(as_on_a_device, calls_of):
    torch.manual_seed(0)
    calls = calls_of(fields, "interpolate_by_products")
    field, x, up = torch.randn(2, 3, 8, 7, 6), torch.randn(2, 8, 4, 4, 4), UpsampleConv(3, 8, 4)

    def results():
        return resize_field(field, (16, 14, 9)), resize_field(field, (16, 14, 12), align="cells"), up(x, (8, 8, 8))
    plain = results()
    assert not calls
    as_on_a_device()
    for one, other in zip(results(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len(calls) == 3


@pytest.mark.parametrize("size", [(5, 6), (4, 2, 7)])
def test_a_jacobian_by_products_is_that_of_differences(as_on_a_device, calls_of, size):
    """Each product adds two numbers, times a half or one, to zeros."""
    torch.manual_seed(0)
    calls = calls_of(fields, "product_along")
    field, found = torch.randn(2, len(size), *size, requires_grad=True), []
    for change, products in ((lambda: None, 0), (as_on_a_device, len(size))):
        change()
        determinant = jacobian_determinant(field)
        assert len(calls) == products
        found.append([determinant, *torch.autograd.grad(determinant.square().sum(), field)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def block_of(dims, channels):
    torch.manual_seed(0)
    block = ConvBlock(dims, 3, channels, 6)
    for parameter in (*block.norm.parameters(), *block.by_time.parameters()):
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    return block


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dims, channels", [(2, 8), (3, 16), (3, 4)])
def test_a_block_is_the_same_in_both_ways(as_on_a_device, dims, channels, channels_last):
    block, size = block_of(dims, channels), (6, 8, 10)[:dims]
    found = []
    for way in ("plain", "device"):
        if way == "device":
            as_on_a_device()
        torch.manual_seed(1)
        x = (2.0 + 3.0 * torch.randn(2, 3, *size)).requires_grad_()
        given = x.to(memory_format=FORMATS[x.dim()]) if channels_last else x
        time = torch.randn(2, 6, requires_grad=True)
        block.zero_grad()
        y = block(given, time)
        (y * torch.randn(y.shape)).sum().backward()
        found.append([y, x.grad, time.grad, *[parameter.grad.clone() for parameter in block.parameters()]])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * other.abs().max().item())
    assert found[1][0].grad_fn.name().startswith("NormModulateActivate")


def test_its_gradient_is_that_of_the_formula():
    """Against finite differences, in float64."""
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
             for shape in ((2, 4, 3, 2, 3), (4,), (4,), (2, 4), (2, 4))]
    assert torch.autograd.gradcheck(
        lambda x, *rest: NormModulateActivate.apply(x, 2, 1e-5, *rest, 0.2), given)


def test_in_bfloat16_it_is_as_close_to_float32_as_rounding_once_allows():
    """Sums are taken in float32, also of a volume that is far from zero; values are rounded to bfloat16 once."""
    torch.manual_seed(0)
    x = (20.0 + torch.randn(1, 16, 32, 32, 32)).bfloat16()
    weight, bias, scale, shift = torch.rand(16), torch.randn(16), torch.rand(1, 16), torch.randn(1, 16)
    y = NormModulateActivate.apply(x, 2, 1e-5, weight, bias, scale.bfloat16(), shift.bfloat16(), 0.2)
    exact = F.group_norm(x.double(), 2, weight.double(), bias.double())
    per_voxel = (1, 16, 1, 1, 1)
    exact = F.leaky_relu(exact * (1 + scale.bfloat16().double().view(per_voxel))
                         + shift.bfloat16().double().view(per_voxel), 0.2)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2 ** -8 * exact.abs() + 2e-3).all()


def test_a_flat_volume_has_no_negative_variance():
    x = torch.full((1, 8, 4, 4, 4), 3.1, requires_grad=True)
    y = NormModulateActivate.apply(x, 1, 1e-5, torch.ones(8), torch.zeros(8), torch.zeros(1, 8), torch.zeros(1, 8), 0.2)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and y.abs().max() < 0.5


@pytest.mark.parametrize("n", [3, 4])
def test_small_positive_systems_are_solved_without_a_pivot(n):
    torch.manual_seed(0)
    half, right = torch.randn(2, n, n, dtype=torch.float64), torch.randn(2, n, 3, dtype=torch.float64)

    def solve(half, right):
        return device_ops.SolvePositive.apply(half @ half.mT + 0.01 * torch.eye(n), right)
    torch.testing.assert_close(solve(half, right), torch.linalg.solve(half @ half.mT + 0.01 * torch.eye(n), right))
    assert torch.autograd.gradcheck(solve, (half.requires_grad_(), right.requires_grad_()))


def test_constants_are_computed_once_on_a_device_and_held_by_a_graph(monkeypatch):
    """The device's kind decides; the values lie on the CPU."""
    calls, accelerator = [], torch.device("cuda", 0)

    def value(n, device):
        calls.append(device)
        return torch.full((n,), 1.0)
    first = device_ops.constant(value, 3, device=accelerator)
    assert device_ops.constant(value, 3, device=accelerator) is first and calls == [accelerator]
    assert device_ops.constant(value, 3, device="cpu") is not device_ops.constant(value, 3, device="cpu")
    monkeypatch.setitem(device_ops.SETTINGS, "held", [])
    device_ops.constant(value, 3, device=accelerator)
    assert device_ops.SETTINGS["held"] == [first]
    device_ops.constant(value, 4, device=accelerator)  # while recording: not kept, as it has no values yet
    calls.clear()
    device_ops.SETTINGS["held"] = None
    device_ops.constant(value, 4, device=accelerator)
    assert calls == [accelerator]


def network_and_inputs(**changes):
    torch.manual_seed(0)
    net = build_network(config(model__rec_num=2, **changes))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    return net, (torch.rand(2, 1, 8, 8, 8), torch.tensor([3, 5]), torch.rand(2, 2, 8, 8, 8))


def gradients_of(net, results):
    """{name: gradient} of a weighted sum of results, without those that it does not depend on."""
    net.zero_grad()
    sum((y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in results).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("embed, detach", [(False, "false"), (False, "true"), (True, "false")])
def test_weights_that_are_cast_together_give_the_same_bits(as_on_a_device, calls_of, monkeypatch, embed, detach):
    net, inputs = network_and_inputs(model__detach_recovery=detach)
    as_on_a_device()
    calls, counts, found = calls_of(device_ops.InPasses, "apply"), [], []
    for change in (lambda: None, lambda: monkeypatch.setattr(om_net, "weights_in_passes", lambda *given: None)):
        change()
        with torch.autocast("cpu", torch.bfloat16):
            results = net(*inputs, embed=embed)
        results = results if embed else [results]
        found.append([*results, *gradients_of(net, results).values()])
        counts.append(len(calls))
    assert 0 < counts[0] == counts[1], "together in the first way alone"
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())


@pytest.mark.parametrize("embed", [False, True])
def test_a_network_is_the_same_in_both_ways(as_on_a_device, calls_of, embed):
    net, inputs = network_and_inputs()
    upsampled, blocks = calls_of(fields, "interpolate_by_products"), calls_of(NormModulateActivate, "apply")
    found = []
    for change in (lambda: None, as_on_a_device):
        assert not upsampled and not blocks
        change()
        results = net(*inputs, embed=embed)
        results = results if embed else [results]
        found.append([*results, *gradients_of(net, results).values()])
    assert upsampled or embed, "an embedding needs no field"
    assert blocks
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())
