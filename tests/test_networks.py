"""Networks: shapes, sizes, recursion, condition, and what training relies on."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from Diffusion.blocks import (
    ConvBlock,
    FieldScale,
    UpsampleConv,
    conv,
    convolve_in_slabs,
    group_norm,
    recurse,
)
from Diffusion.diffuser import make_condition, typical_displacement
from Diffusion.fields import compose, identity, side_lengths, warp
from Diffusion.networks import NETWORKS, build_network, network_arguments, new_network
from Diffusion.om_net import AffineMatch, CorrelationLayer, NeighbourProducts
from Runtime.checkpoint import weights_sha256
from Runtime.config import load_config
from tests.tiny import ROOT, config

SIZES = {2: (18, 25), 3: (9, 7, 13)}  # nothing here divides by anything


def tiny(name="om_net", dims=3, **changes):
    cfg = config(model__name=name, model__dims=dims, **changes)
    return build_network(cfg), cfg


def inputs(dims):
    torch.manual_seed(0)
    return torch.rand(2, 1, *SIZES[dims]), torch.tensor([0, 40]), torch.rand(2, 2, *SIZES[dims])


def wake(net):
    """Random numbers into what starts at zero, so that outputs depend on everything."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return net


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_any_size_gives_a_field_of_that_size_that_starts_at_zero(name, dims, stride):
    net, _ = tiny(name, dims, model__field_stride=stride)
    image, t, condition = inputs(dims)
    field = net(image, t, condition)
    assert field.shape == (2, dims, *SIZES[dims]) and field.dtype == torch.float32
    assert field.abs().max() == 0
    assert wake(net)(image, t, condition).abs().max() > 0


@pytest.mark.parametrize("name, changes", [
    *((name, {}) for name in NETWORKS), ("om_net", {"model__descents": 2}), ("om_net", {"model__fine_descents": 1})])
def test_the_field_depends_on_image_time_condition_and_keep(name, changes):
    net, _ = tiny(name, **changes)
    wake(net)
    image, t, condition = inputs(3)
    field = net(image, t, condition)
    assert not torch.equal(field, net(image.flip(2), t, condition))
    assert not torch.equal(field, net(image, t + 1, condition))
    assert not torch.equal(field, net(image, t, condition.flip(2)))
    dropped = net(image, t, condition, torch.tensor([True, False]))
    assert torch.equal(dropped[0], field[0]) and not torch.equal(dropped[1], field[1])
    assert torch.allclose(dropped[1], net(image, t)[1], atol=4e-6), "a dropped condition is no condition"


def test_channels_of_any_width_make_a_network():
    """Those that 8 does not divide too; what it divides keeps the groups of all saved weights."""
    net, _ = tiny(model__channels=[25, 28, 44])
    image, t, condition = inputs(3)
    assert net(image, t, condition).shape == (2, 3, *image.shape[2:])
    assert [group_norm(count).num_groups for count in (1, 7, 8, 16, 24, 64, 256)] == [1, 1, 1, 2, 3, 8, 32]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sample_does_not_depend_on_the_rest_of_its_batch(name):
    net, _ = tiny(name)
    wake(net)
    image, t, condition = inputs(3)
    assert torch.allclose(net(image, t, condition)[:1], net(image[:1], t[:1], condition[:1]), atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_embeddings_are_unit_vectors_of_their_own_input(name):
    net, cfg = tiny(name)
    wake(net)
    image, t, condition = inputs(3)
    of_image, of_condition = net(image, t, condition, embed=True)
    assert of_image.shape == of_condition.shape == (2, cfg["contrastive.embedding"])
    assert torch.allclose(of_image.norm(dim=1), torch.ones(2), atol=1e-5)
    other_image, same_condition = net(image.flip(2), t, condition, embed=True)
    assert torch.equal(same_condition, of_condition), "the condition's embedding must not see the image"
    assert not torch.equal(other_image, of_image)
    assert all(map(torch.equal, net(image, t.flip(0) + 1, condition, embed=True), (of_image, of_condition))), (
        "samples must not be known by their times")


def test_recursion_warps_the_original_and_composes():
    torch.manual_seed(0)
    image, seen = torch.rand(1, 1, 8, 9, 10), []
    answers = [torch.randn(1, 3, 8, 9, 10) * 0.3 for _ in range(3)]

    def one_pass(x):
        seen.append(x)
        return answers[len(seen) - 1]

    field = recurse(one_pass, image, 3, detach=False)
    first = compose(answers[0], answers[1])
    assert torch.equal(seen[0], image)
    assert torch.equal(seen[1], warp(image, answers[0]))
    assert torch.equal(seen[2], warp(image, first))
    assert torch.equal(field, compose(first, answers[2]))


@pytest.mark.parametrize("detach", [False, True])
def test_detached_recursion_keeps_the_value_and_only_the_last_gradient(detach):
    weight, image = torch.tensor(0.2, requires_grad=True), torch.rand(1, 1, 8, 9, 10)
    passes = []

    def one_pass(x):
        passes.append(weight * torch.ones(1, 3, 8, 9, 10))
        return passes[-1]

    field = recurse(one_pass, image, 2, detach)
    assert torch.allclose(field, torch.full_like(field, 0.4))
    assert [p.requires_grad for p in passes] == [not detach, True]


def test_checkpointing_computes_three_levels_again_and_changes_neither_field_nor_gradients():
    image, t, condition = inputs(3)
    gradients, calls = [], []
    for saving in ("false", "true"):
        net, called = wake(tiny(model__use_checkpoint=saving, model__channels="[8, 8, 8, 16]")[0]), []
        for name, block in net.named_modules():
            if isinstance(block, ConvBlock):
                block.register_forward_pre_hook(lambda module, x, name=name, called=called: called.append(name))
        loss = net(image, t, condition).square().sum()
        forward = len(called)
        loss.backward()
        gradients.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
        calls.append((called[:forward], called[forward:]))
    (plain, nothing), (same, again) = calls
    assert same == plain and not nothing, "all blocks once in the forward, none in the backward pass"
    assert set(again) == {f"encoder.{name}" for name in ("first", "down.0", "same.0", "down.1", "same.1")}
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[0][n], gradients[1][n], rtol=1e-4, atol=1e-5) for n in gradients[0])


def test_transposed_convolutions_only_in_the_older_decoders():
    kinds = {name: any("ConvTranspose" in type(m).__name__ for m in tiny(name)[0].modules()) for name in NETWORKS}
    assert kinds == {name: name in ("recresacnet", "recmulmodmutattnnet") for name in NETWORKS}


def test_production_network_as_specified():
    cfg = load_config(ROOT / "Config/config_om.yaml")
    with torch.device("meta"):
        net = new_network(cfg)
    assert len([m for m in net.modules() if isinstance(m, UpsampleConv)]) == 5
    assert [block.conv.out_channels for block in (net.encoder.first, *net.encoder.down)] == [16, 32, 64, 128, 256]
    assert net.coarse.reduce.in_channels == 256 and net.coarse.conv.out_channels == 3
    assert 216e6 <= sum(p.numel() for p in net.parameters()) <= 264e6


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first, _ = tiny()
    torch.rand(3)
    state = torch.get_rng_state()
    second, _ = tiny()
    assert weights_sha256(first.state_dict()) == weights_sha256(second.state_dict())
    assert torch.equal(state, torch.get_rng_state()), "building a network must not touch torch's generator"
    assert weights_sha256(tiny(run__seed=1)[0].state_dict()) != weights_sha256(first.state_dict())


def test_field_scale_grows_with_time_and_with_the_side():
    scale = FieldScale(network_arguments(config())["typical_norm"])
    ones = torch.ones(3, 3, 8, 16, 32)
    field = scale(ones, torch.tensor([1, 79, 80]), (8, 16, 32))
    assert torch.allclose(field[:, 1], 2 * field[:, 0]) and torch.allclose(field[:, 2], 4 * field[:, 0])
    assert torch.allclose(field[1], 13 * field[0]) and torch.allclose(field[2], 195 * field[0])


def test_a_network_takes_the_arguments_that_it_names(monkeypatch):
    """So a further one is a class and a line of the registry."""
    class Constant(torch.nn.Module):
        def __init__(self, dims, timesteps, shift=1.0):
            super().__init__()
            self.field = torch.nn.Parameter(torch.full((dims,), shift / timesteps))

    monkeypatch.setitem(NETWORKS, "constant", Constant)
    net, _ = tiny("constant", dims=2)
    assert net.field.tolist() == pytest.approx([1 / 80] * 2)


def matched(features_at, grid=(7, 9, 8)):
    """An AffineMatch; features of image and condition, by features_at(places) -> (T, C) each; and their size."""
    torch.manual_seed(0)
    match = AffineMatch(channels=16, width=64, typical_norm=network_arguments(config())["typical_norm"])
    with torch.no_grad():
        match.project.weight.copy_(torch.randn(64, 16))
        match.log_sharpness.fill_(math.log(200.0))
        match.log_reach.fill_(math.log(30.0))
    places = identity(grid)[0].flatten(1).T
    image, condition = (features.T.reshape(1, -1, *grid) for features in features_at(places))
    return match, image, condition, tuple(4 * n for n in grid)


def shifted():
    """`matched` for a condition that is half a token away."""
    return matched(lambda places: (waves(places), waves(places + 0.5)))


def field_of(match, image, condition, size, t=80, shown=1.0):
    return match(image, condition, torch.tensor([shown]), torch.tensor([t]), size)


def waves(places):
    """Smooth features that tell every place from every other: (T, 16)."""
    directions = torch.randn(places.shape[1], 8, generator=torch.Generator().manual_seed(1)) * 0.35
    return torch.cat([(places @ directions).sin(), (places @ directions).cos()], dim=1)


@pytest.mark.parametrize("dims", [2, 3])
def test_affine_match_finds_an_affine_map_of_the_features(dims):
    """The condition's token at x looks like the image's at A x + b: the field has to lead there."""
    linear = torch.eye(dims) + torch.tensor([[-0.12, 0.1, 0], [-0.08, -0.15, 0.07], [0.1, 0, -0.1]])[:dims, :dims]
    shift, centre = torch.tensor([0.6, -0.4, 0.5])[:dims], torch.tensor([7.0, 8.0, 7.0])[:dims]

    def features_at(places):
        return waves(places), waves((places - centre) @ linear.T + centre + shift)

    *given, size = matched(features_at, {2: (30, 34), 3: (12, 14, 13)}[dims])
    field = field_of(*given, size)
    voxels = identity(size)[0].flatten(1).T / 4  # in tokens
    true = ((voxels - centre) @ linear.T + centre + shift - voxels).T.reshape(1, dims, *size) * 4
    assert (field - true).square().sum(1).sqrt().mean() < 0.2 * true.square().sum(1).sqrt().mean()


def test_affine_match_of_equal_volumes_and_of_a_dropped_condition_is_zero():
    assert field_of(*matched(lambda places: (waves(places), waves(places)))).abs().max() < 1e-3
    match, image, condition, size = shifted()
    assert field_of(match, image, condition, size).abs().max() > 0.5
    assert not field_of(match, image, torch.zeros_like(condition), size, shown=0.0).any()


@pytest.mark.parametrize("size", [(16, 16, 16), (18, 20, 23)])
def test_a_new_network_moves_no_volume_onto_itself_at_a_padded_size_either(size):
    net = build_network(config(model__affine_match=True, model__local_match=True))
    torch.manual_seed(0)
    image, t = torch.rand(1, 1, *size), torch.tensor([80])
    condition = make_condition(image, "volume")
    features, encoded = net.encode(image, condition, None, net.time(t), together=True)
    assert all(torch.equal(one, other) for one, other in zip(features, encoded))
    assert net(image, t, condition).abs().max() < 1e-3


def test_affine_match_counts_as_much_as_the_condition_shows_of_the_volume():
    given = shifted()
    assert torch.allclose(field_of(*given, shown=0.1), 0.1 * field_of(*given), atol=1e-4)


def test_what_a_condition_shows_is_its_mask_unless_it_is_dropped():
    net = build_network(config(model__affine_match=True))
    image, condition = torch.rand(3, 1, 16, 18, 20), torch.zeros(3, 2, 16, 18, 20)
    condition[1:, 1, :4] = 1
    assert net.shown_fraction(image, condition, torch.tensor([True, True, False])).tolist() == [0, 0.25, 0]
    assert net.shown_fraction(image, condition, None).tolist() == [0, 0.25, 0.25]
    assert net.shown_fraction(image, None, None).tolist() == [0, 0, 0]


def test_a_network_of_the_shipped_recipe_begins_with_little_to_undo_of_its_own():
    """Matched by a few slices as if by all of the volume, it began with fields of many voxels."""
    cfg = load_config(ROOT / "Config/config_om.yaml", ["model.channels=[8, 16, 16, 32, 32]", "model.attention_width=32",
                                                        "model.attention_heads=1"])
    net, image = build_network(cfg), F.interpolate(torch.rand(2, 1, 6, 6, 6), size=(32, 32, 32), mode="trilinear")
    t = torch.tensor([2, 40])
    conditions = [make_condition(image, cfg["model.condition_type"], [(0, 0, n), (1, 0, n)]) for n in range(2)]
    with torch.no_grad():
        fields = torch.stack([net(image, t, condition) for condition in conditions])
        typical = net.field_scale(torch.ones_like(fields[0]), t, image.shape[2:])
    # A network that says nothing has a mode 1 loss of 1; this one had 500,000.
    assert (fields / typical).square().mean() < 5


def test_affine_match_takes_the_part_of_the_way_that_time_t_asks_for():
    match, *given = shifted()
    match.limit.fill_(match.NO_LIMIT)
    assert torch.allclose(field_of(match, *given, t=79), field_of(match, *given) * 13 / 195, atol=1e-4)


def test_affine_match_is_limited_by_what_is_typical_of_time_t_but_not_in_registration():
    match, *features, size = shifted()
    asked = field_of(match, *features, size) * match.share[2]
    given = field_of(match, *features, size, t=2)
    limit = 2 * typical_displacement(config(), 2)

    def length(field):
        return (field / side_lengths(size)).square().mean().sqrt()
    assert length(asked) > 10 * limit and 0.9 * limit < length(given) < limit
    assert torch.allclose(given / length(given), asked / length(asked), atol=1e-3)


@pytest.mark.parametrize("size", [(20, 14, 12), (5, 7, 5), (1, 4, 4), (2, 3, 9)])
@pytest.mark.parametrize("kernel, stride, dilation", [(3, 1, 1), (3, 2, 1), (1, 1, 1), (3, 1, 2), (3, 1, 4)])
def test_a_convolution_in_slabs_is_the_convolution(size, kernel, stride, dilation):
    torch.manual_seed(0)
    layer = conv(3, 5, 6, kernel, stride, dilation).double()
    x = torch.randn(1, 5, *size, dtype=torch.float64, requires_grad=True)
    arguments = (layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation)
    plain, slabs = F.conv3d(x, *arguments), convolve_in_slabs(x, *arguments)
    assert torch.allclose(plain, slabs, atol=1e-12)
    weights = torch.randn_like(plain)
    for inputs in (x, layer.weight, layer.bias):
        wanted, given = (torch.autograd.grad(y, inputs, weights, retain_graph=True)[0] for y in (plain, slabs))
        assert torch.allclose(wanted, given, atol=1e-10)


@pytest.mark.parametrize("size", [(1, 1), (4, 1), (2, 2, 2), (2, 8, 8), (4, 1, 4), (4, 4, 1), (1, 4, 4), (3, 3, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_in_bfloat16_are_right_where_the_kernel_is_longer_than_the_volume(size, stride):
    """oneDNN gave memory that nobody had written, on processors with AVX512-BF16 and without AMX."""
    torch.manual_seed(0)
    order = torch.channels_last if len(size) == 2 else torch.channels_last_3d  # as run.channels_last has it
    layer = conv(len(size), 3, 4, stride=stride).to(memory_format=order)
    x = torch.randn(2, 3, *size).to(memory_format=order).requires_grad_()
    inputs = (x, layer.weight, layer.bias)

    def gradients(**precision):
        with torch.autocast("cpu", **precision):
            y = layer(x)
        filth = [torch.full((count,), math.nan) for count in (64, 256, 1024, 4096, 16384)]
        del filth  # what is allocated next may hold it
        return y.float(), *torch.autograd.grad(y.float().square().sum(), inputs)
    for wanted, found in zip(gradients(enabled=False), gradients(dtype=torch.bfloat16)):
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.fixture
def any_threads():
    """Leaves the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("name", ["config_demo", "config_hippocampus", "config_medium", "config_om"])
def test_torch_chooses_the_slow_loop_for_no_convolution_of_a_shipped_config(name, any_threads):
    """At the size of its volumes, for one sample: what torch itself answers when it is asked for the kernel."""
    chosen = set()
    for arguments in convolutions(load_config(ROOT / f"Config/{name}.yaml")):
        for count in (1, 2):  # torch chooses by the number of threads too
            torch.set_num_threads(count)
            chosen.add(torch._C._select_conv_backend(*arguments).name)
    assert "Mkldnn" in chosen and "Slow3d" not in chosen


class Recorder(TorchDispatchMode):
    """Keeps the arguments of each convolution, once for all that have the same shapes."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.seen[str([(x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in args])] = args
        return function(*args, **(kwargs or {}))


def convolutions(cfg):
    """Arguments of every convolution of the field and of the embeddings, on tensors that nobody has written to."""
    with torch.no_grad(), FakeTensorMode(), Recorder() as recorder:
        net, image = new_network(cfg), torch.zeros(1, 1, *cfg["data.img_size"])
        for words in ({}, {"embed": True}):
            net(image, torch.tensor([3]), make_condition(image, "volume"), **words)
    assert recorder.seen
    for args in recorder.seen.values():
        yield [torch.empty_strided(x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in args]


def test_a_convolution_with_a_kernel_of_one_voxel_is_a_product():
    x, layer = torch.randn(2, 5, 4, 3, 6), conv(3, 5, 7, kernel_size=1)
    assert torch.allclose(layer(x), F.conv3d(x, layer.weight, layer.bias), atol=1e-5)


@pytest.mark.parametrize("dims", [2, 3])
def test_neighbour_products_are_those_of_the_shifted_volumes(dims):
    torch.manual_seed(0)
    size = (2, 1, 3)[:dims]
    image = torch.randn(2, *size, 2, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(2, *[n + 2 for n in size], 2, dtype=torch.float64, requires_grad=True)
    products = NeighbourProducts.apply(image, padded)
    for channel, offset in enumerate(itertools.product(range(3), repeat=dims)):
        shifted = padded[(slice(None), *[slice(i, i + n) for i, n in zip(offset, size)])]
        assert torch.allclose(products[:, channel], (image * shifted).sum(-1))
    assert torch.autograd.gradcheck(NeighbourProducts.apply, (image, padded), fast_mode=True)


@pytest.mark.parametrize("detach", ["true", "false"])
def test_the_condition_has_the_same_gradient_encoded_alone_or_with_the_image(detach):
    """With earlier passes detached the condition is encoded by itself, otherwise beside the image."""
    net, _ = tiny(model__detach_recovery=detach, model__rec_num=1)
    image, t, condition = inputs(3)
    time = wake(net).time(t)
    alone = net.encode(image, condition, None, time, together=False)
    both = net.encode(image, condition, None, time, together=True)
    assert alone[0] is None and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone[1], both[1]))
    for own, other in zip(net.encoder(net.fully_shown(image), time), both[0]):
        assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("dims", [2, 3])
def test_correlation_tells_in_which_direction_the_condition_is_alike(dims):
    torch.manual_seed(0)
    layer, image = CorrelationLayer(dims, 24), torch.randn(2, 24, *(9, 10, 8)[:dims])
    for number, offset in enumerate(itertools.product(range(3), repeat=dims)):
        there = image.roll([i - 1 for i in offset], dims=tuple(range(2, 2 + dims)))
        correlation = layer(image, there)[(..., *[slice(2, -2)] * dims)]
        assert correlation.shape[1] == 3 ** dims
        assert (correlation.argmax(1) == number).float().mean() > 0.99
    assert not layer(image, torch.zeros_like(image)).any(), "a zeroed condition gives zero correlation"


@pytest.mark.parametrize("affine", [True, False])
def test_a_network_learns_through_its_matches(affine):
    cfg = config(model__local_match=True, model__affine_match=affine, model__condition_type="volume")
    net = build_network(cfg)
    image, fixed = torch.rand(2, 2, 1, 16, 18, 20)
    with torch.no_grad():
        for layer in (net.fine, net.coarse.conv):
            torch.nn.init.normal_(layer.weight, std=0.1)
    field = net(image, torch.tensor([80, 5]), make_condition(fixed, "volume"), torch.tensor([True, False]))
    field.square().mean().backward()
    new = {name: parameter for name, parameter in net.named_parameters()
           if name.startswith(("local.", "middle.", "match."))}
    assert len(new) > 4 and all(parameter.grad.any() for parameter in new.values())
    assert affine == any(name.startswith("match.") for name in new)


def test_features_are_compared_where_the_bottleneck_has_brought_them():
    """With the coarse answer set to the true shift, equal features meet at the middle place."""
    cfg = config(model__local_match=True, model__condition_type="volume", model__rec_num=1)
    net, seen = build_network(cfg).eval(), []
    image = torch.rand(1, 1, 32, 32, 32)
    fixed = image.roll(-4, dims=2)  # fixed(x) = image(x + 4)
    with torch.no_grad():
        net.coarse.conv.bias.copy_(torch.tensor([4.0, 0, 0]) / net.field_scale.typical[80] / 32)
        net.local[-1].register_forward_hook(lambda module, args, output: seen.append(output.argmax(1)))
        net(image, torch.tensor([80]), make_condition(fixed, "volume"))
        net.coarse.conv.bias.zero_()
        net(image, torch.tensor([80]), make_condition(fixed, "volume"))
    fractions = [(best[:, 3:-3, 3:-3, 3:-3] == 3 ** 3 // 2).float().mean() for best in seen]
    assert fractions[0] > 0.9 and fractions[1] < 0.3


@pytest.mark.parametrize("amp", [False, True])
def test_gradients_lie_in_memory_as_their_weights_do(amp):
    """Otherwise DDP would copy each of them, and the warning that Diffusion/optim.py leaves unsaid would be true."""
    net, t = build_network(config()), torch.tensor([3])
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        field = net(torch.rand(1, 1, 16, 16, 16), t, torch.rand(1, 2, 16, 16, 16))
    field.float().square().sum().backward()
    gradients = [(name, p.grad, p) for name, p in net.named_parameters() if p.grad is not None]
    assert len(gradients) > 50
    for name, grad, parameter in gradients:
        long = [axis for axis, side in enumerate(parameter.shape) if side > 1]
        assert [grad.stride(axis) for axis in long] == [parameter.stride(axis) for axis in long], name
