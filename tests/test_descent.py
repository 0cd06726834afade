"""Learned steps of descent: what the forces are, and what a network makes of them."""
import pytest
import torch

from Diffusion.blocks import SLOPE
from Diffusion.descent import LearnedDescent, demons_force, locally_normalised, shown_share, target_of
from Diffusion.diffuser import make_condition
from Diffusion.fields import identity, interpolate, warp
from Diffusion.networks import build_network
from Runtime.errors import InputError
from tests.tiny import config

SIZES = {2: (18, 25), 3: (9, 7, 13)}  # nothing here divides by anything


def blob(size, centre, radius=5.0):
    """A soft ball, (1, 1, *size), 0 .. 1."""
    away = (identity(size) - torch.tensor(centre).view(1, -1, *[1] * len(size))).square().sum(1, keepdim=True)
    return torch.exp(-away / (2 * radius ** 2))


def tiny(dims=3, **changes):
    cfg = config(model__dims=dims, **{"model__descents": 3, "model__condition_type": "volume", **changes})
    return build_network(cfg).eval(), cfg


@torch.no_grad()
def as_plain_demons(net):
    """Weights by hand, so that a step is the force of the intensities, smoothed by the mean of 3^N voxels.

    f = (act(act(f)) - act(act(-f))) / (1 + slope^2), as negative values pass both activations.
    """
    dims = net.dims
    centre = (slice(None), slice(None), *[1] * dims)
    for descent in filter(None, (net.descent, net.fine_descent)):
        for parameter in descent.parameters():
            parameter.zero_()
        for axis in range(dims):
            for sign, channel in ((1.0, axis), (-1.0, dims + axis)):
                descent.forces.weight[centre][channel, axis] = sign
                descent.mix.weight[centre][channel, channel] = 1.0
                descent.leave.weight[axis, channel] = sign / (1 + SLOPE ** 2) / 3 ** dims
    return net


# ---------------------------------------------------------------------------------------------------------------------
# Forces
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("missing", [0.05, 0.3, -0.2, 3.0])
def test_the_force_on_a_ramp_is_that_of_the_formula(dims, missing):
    slope, axis = 0.1, dims - 1
    ramp = slope * identity((9,) * dims)[:, axis:axis + 1]
    force = demons_force(ramp, ramp + missing, torch.ones_like(ramp))
    assert force.shape == (1, dims, *(9,) * dims)
    expected = missing * slope / (slope ** 2 + missing ** 2 + 1e-3)
    assert torch.allclose(force[:, axis], torch.tensor(expected), atol=1e-5) and abs(expected) < 0.5
    others = [other for other in range(dims) if other != axis]
    assert force[:, others].abs().max() < 1e-5


@pytest.mark.parametrize("channels", [1, 3])
def test_forces_bring_values_closer_and_are_never_long(channels):
    torch.manual_seed(0)
    noise = torch.rand(1, channels, 12, 14, 13)
    assert demons_force(noise, 10 * torch.rand_like(noise), torch.ones(1, 1, 12, 14, 13)).norm(dim=1).max() <= 0.5
    moving, fixed = (torch.cat([blob((20, 22, 24), (9.0, 11, 12 + shift), radius) for radius in (3.0, 5.0, 7.0)], 1)
                     for shift in (0, 1.5))
    moving, fixed = moving[:, :channels], fixed[:, :channels]
    closer = warp(moving, demons_force(moving, fixed, torch.ones_like(fixed[:, :1])), padding="border")
    assert (closer - fixed).square().mean() < 0.6 * (moving - fixed).square().mean()


def test_there_is_no_force_where_nothing_is_shown_nor_between_equal_volumes():
    moving, fixed = blob((16, 16, 16), (7.0, 8, 8)), blob((16, 16, 16), (8.0, 8, 8))
    mask = torch.zeros_like(fixed)
    mask[:, :, 6:8] = 1
    force = demons_force(moving, fixed, mask)
    assert force[:, :, 6:8].any() and not force[:, :, :6].any() and not force[:, :, 8:].any()
    descent = LearnedDescent(3, 8, 16, [slice(0, 1)], count=1, stride=1)
    still = torch.zeros(1, 3, 16, 16, 16)
    for shown in (torch.ones_like(mask), mask):  # of a slice, too: both are normalised by what it shows
        condition = torch.cat([moving * shown, shown], dim=1)
        assert descent.force(moving, still, target_of(condition, None, descent.groups)).abs().max() < 1e-4
    dropped = target_of(torch.cat([fixed, torch.ones_like(mask)], dim=1), torch.tensor([False]), descent.groups)
    assert not descent.force(moving, still, dropped).any()


def test_brightness_and_contrast_are_no_force_and_intensities_are_compared_locally():
    torch.manual_seed(0)
    image, mask = torch.rand(1, 1, 14, 15, 16), torch.ones(1, 1, 14, 15, 16)
    shown = shown_share(mask)
    torch.testing.assert_close(shown, torch.ones_like(mask))  # also at the border
    one, other = (locally_normalised(seen, mask, shown) for seen in (image, 0.7 * image + 0.2))
    assert (one - other).abs().max() < 0.05 < (image - 0.7 * image - 0.2).abs().max()
    assert abs(float(one.mean())) < 0.05
    flat = locally_normalised(torch.full_like(image, 0.4), mask, shown)
    assert flat.abs().max() < 1e-2


def test_structures_have_a_force_of_their_own():
    """In the intensities nothing differs; one structure has moved."""
    flat, mask = torch.full((1, 1, 16, 16, 16), 0.5), torch.ones(1, 1, 16, 16, 16)
    moving, fixed = (torch.cat([flat, blob((16, 16, 16), (z, 8, 8), 3.0)], 1) for z in (7.0, 8.0))
    groups = [slice(0, 1), slice(1, 2)]
    target, still = target_of(torch.cat([fixed, mask], dim=1), None, groups), torch.zeros(1, 3, 16, 16, 16)
    force, halved = (LearnedDescent(3, 8, 16, groups, 1, stride).force(moving, still, target) for stride in (1, 2))
    assert force.shape == (1, 6, 16, 16, 16) and not force[:, :3].any() and force[:, 3:].any()
    assert halved.shape == (1, 6, 8, 8, 8) and torch.allclose(halved.mean(), force.mean(), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# In the network
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dims, kind, stride", [(2, "slice", 1), (2, "volume", 2), (3, "slice", 2), (3, "volume", 1),
                                                (3, "none", 1)])
def test_a_new_network_moves_nothing_and_learns_through_its_steps(dims, kind, stride):
    net, cfg = tiny(dims, model__condition_type=kind, model__field_stride=stride, model__affine_match=False,
                    model__fine_descents=2)
    torch.manual_seed(0)
    image, fixed = torch.rand(2, 2, 1, *SIZES[dims])
    inputs = image, torch.tensor([3, 40]), make_condition(fixed, kind, [(0, 0, 0), (0, 0, 1)])
    assert not net(*inputs).any()
    steps = net.descent, net.fine_descent
    assert (kind == "none") == (steps == (None, None)), "they need a condition"
    if kind == "none":
        return
    for descent in steps:
        torch.nn.init.normal_(descent.leave.weight, std=0.1)
    field = net(*inputs, use_condition=torch.tensor([True, False]))
    assert field.shape == (2, dims, *SIZES[dims]) and field.dtype == torch.float32
    assert torch.equal(field, net(*inputs, use_condition=torch.tensor([True, False])))
    field.square().sum().backward()
    assert all(parameter.grad.any() for descent in steps for parameter in descent.parameters())
    assert net(*inputs[:2]).shape == field.shape, "without a condition there is nothing to descend to"


@pytest.mark.parametrize("dims, stride, kind", [(2, 1, "descents"), (3, 1, "descents"), (3, 2, "descents"),
                                                (2, 2, "fine_descents"), (3, 2, "fine_descents")])
def test_steps_of_plain_demons_align_a_ball_the_better_the_more_there_are(dims, stride, kind):
    size, centre = (24,) * dims, [12.0] * dims
    moving, fixed = blob(size, centre), blob(size, [14.0, *centre[1:]])
    missing = [float((moving - fixed).square().mean())]
    for count in (1, 2, 6):
        net, cfg = tiny(dims, **{"model__descents": 0, f"model__{kind}": count}, model__field_stride=stride,
                        model__affine_match=False, model__rec_num=1)
        net = as_plain_demons(net)
        with torch.no_grad():
            field = net(moving, torch.tensor([cfg["diffusion.timesteps"]]), make_condition(fixed, "volume"))
        missing.append(float((warp(moving, field, padding="border") - fixed).square().mean()))
    assert missing == sorted(missing, reverse=True) and missing[-1] < 0.4 * missing[0], missing


def test_fine_steps_make_detail_that_the_grid_of_the_field_cannot_have():
    """Lines of a field that was interpolated from half as many places are sums of as many tents; others are not."""
    tents = interpolate(torch.eye(8)[None, None], (8, 16))[0, 0].T                                # (16, 8)
    torch.manual_seed(0)
    moving, fixed = torch.rand(2, 1, 1, 16, 16, 16)
    for fine in (0, 2):
        net, cfg = tiny(model__field_stride=2, model__fine_descents=fine, model__affine_match=False, model__rec_num=1)
        for descent in filter(None, (net.descent, net.fine_descent)):
            torch.nn.init.normal_(descent.leave.weight, std=0.1)
        with torch.no_grad():
            field = net(moving, torch.tensor([cfg["diffusion.timesteps"]]), make_condition(fixed, "volume"))
        lines = field.movedim(2, 0).flatten(1)                                                  # (16, lines)
        detail = lines - tents @ torch.linalg.lstsq(tents, lines).solution
        assert lines.abs().max() > 0.01
        assert bool(fine) == (float(detail.abs().max()) > 1e-2 * float(lines.abs().max()))


def test_steps_begin_where_the_affine_match_and_the_heads_have_brought_the_image():
    """Where these have done all of it, no force is left, so that no step is made."""
    net, cfg = tiny(model__rec_num=1, model__local_match=False, model__affine_match=False)
    as_plain_demons(net)
    moving = blob((24, 24, 24), (12.0, 12, 12), 2.5)
    fixed, t = moving.roll(2, dims=2), torch.tensor([cfg["diffusion.timesteps"]])
    with torch.no_grad():
        alone = net(moving, t, make_condition(fixed, "volume"))
        net.coarse.conv.bias.copy_(torch.tensor([-2.0, 0, 0]) / net.field_scale.typical[t] / 24)
        brought = net(moving, t, make_condition(fixed, "volume"))
    inner = (..., *[slice(6, -6)] * 3)
    assert float(alone[inner][:, 0].mean()) < -0.3
    assert torch.allclose(brought[inner][:, 0], torch.tensor(-2.0), atol=0.02)


def trained_once(use_checkpoint):
    """One forward and backward pass in bfloat16: the field, the gradients of the steps, all forces."""
    net, _ = tiny(model__use_checkpoint=use_checkpoint, model__rec_num=2, model__field_stride=2,
                  model__fine_descents=2)
    torch.manual_seed(0)
    seen, steps = [], (net.descent, net.fine_descent)
    for descent in steps:
        torch.nn.init.normal_(descent.leave.weight, std=0.1)
        descent.force = lambda *inputs, force=descent.force: seen.append(force(*inputs)) or seen[-1]
    image, fixed = torch.rand(2, 1, 1, *SIZES[3])
    with torch.autocast("cpu", torch.bfloat16):
        field = net.train()(image, torch.tensor([80]), make_condition(fixed, "volume"))
    field.square().sum().backward()
    return field, [parameter.grad for descent in steps for parameter in descent.parameters()], seen


def test_in_bfloat16_the_forces_stay_float32_and_recomputed_steps_are_the_same():
    (field, gradients, seen), (again, recomputed, _) = map(trained_once, (False, True))
    assert len(seen) == (3 + 2) * 2, "three and two finer ones in each of two passes"
    assert {one.dtype for one in seen} == {torch.float32} and not any(one.requires_grad for one in seen)
    assert torch.equal(field, again) and all(torch.equal(*pair) for pair in zip(gradients, recomputed))


@pytest.mark.parametrize("name", ["descents", "fine_descents"])
def test_networks_without_such_steps_say_so(name):
    says = f"model.{name}: the network 'recresacnet' makes no learned steps; set it to 0, or model.name to om_net"
    with pytest.raises(InputError, match=says):
        tiny(**{"model__name": "recresacnet", "model__descents": 0, f"model__{name}": 3})
