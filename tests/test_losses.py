"""Losses against analytic values, known-bad fields and their gradients."""
import math

import numpy as np
import pytest
import torch

from Diffusion.fields import affine_field, exponential, identity, jacobian_determinant, side_lengths
from Diffusion.losses import (
    conditional_means,
    folding,
    info_nce,
    local_correlation,
    mapped_correlation,
    mind,
    recovery_terms,
    regularity,
    roughness,
)
from Inference.registration import register
from Runtime.errors import InputError
from tests.inverse import invert


@pytest.fixture(params=[(24, 33), (16, 21, 26)], ids=["2d", "3d"])
def size(request):
    return request.param


def smooth_field(size, amplitude, batch=2):
    """Half a wave along every axis, zero at the border, so that nothing moves out of the grid."""
    bump = torch.ones(size)
    for axis, n in enumerate(size):
        wave = torch.sin(math.pi * torch.arange(n) / (n - 1))
        bump = bump * wave.view([n if i == axis else 1 for i in range(len(size))])
    directions = torch.randn(batch, len(size), *[1] * len(size), generator=torch.Generator().manual_seed(1))
    return amplitude * directions / directions.norm(dim=1, keepdim=True) * bump


def constant_field(values, size):
    return torch.tensor(values).view(1, -1, *[1] * len(size)).expand(1, -1, *size).contiguous()


def stretch(size, axis, rate):
    matrix = torch.eye(len(size), len(size) + 1)[None].clone()
    matrix[0, axis, axis] = 1.0 + rate
    return affine_field(matrix, size)


def folded_bump(size):
    """A field that falls by more than one voxel per voxel around the centre: it folds there and nowhere else."""
    centred = identity(size) - torch.tensor([(n - 1) / 2 for n in size]).view(1, -1, *[1] * len(size))
    return -2.5 * centred * torch.exp(-centred.square().sum(1, keepdim=True) / 8.0)


def share_of_one(true):
    """What a zero prediction gets: one, less where the field is so small that the term is damped."""
    squared = (true / side_lengths(true.shape[2:])).square().sum(1)
    return (squared / (squared + 1e-7)).flatten(1).mean(1)


def test_perfect_zero_and_opposite_predictions(size):
    true = smooth_field(size, 2.0, batch=3)
    inverse = invert(true)
    dist, ang = recovery_terms(torch.stack([inverse[0], 0 * inverse[1], -inverse[2]]), true)
    assert dist.shape == ang.shape == (3,)
    assert ang[0] < -0.999 and 0 <= dist[0] < 0.01
    share = share_of_one(true)
    assert ang[1] == 0 and dist[1] == pytest.approx(float(share[1]), rel=1e-4)
    assert ang[2] > 0.999 and dist[2] == pytest.approx(4 * float(share[2]), rel=0.02)
    everywhere = constant_field([2.0] * len(size), size)
    assert float(recovery_terms(torch.zeros_like(everywhere), everywhere)[0]) == pytest.approx(1.0, abs=1e-3)


def test_losses_are_float32_under_autocast(size):
    true, pred = smooth_field(size, 2.0), folded_bump(size).expand(2, *[-1] * (len(size) + 1)).bfloat16()
    for loss in (lambda: recovery_terms(pred, true), lambda: [regularity(pred)]):
        with torch.autocast("cpu", torch.bfloat16):
            under = loss()
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(under, loss()))


@pytest.mark.parametrize("sides", [(27, 23), (15, 17, 19)])  # of no other test: constants are kept
def test_under_another_default_dtype_everything_is_the_same(sides):
    """Fields, losses and a registration are float32; a default of float64 ended them, or made them float64."""
    def results():
        generator, options = torch.Generator().manual_seed(0), {"dtype": torch.float32}
        one, other = torch.rand(2, 1, 1, *sides, generator=generator, **options)
        field = torch.randn(1, len(sides), *sides, generator=generator, **options)
        found = [local_correlation(one, other, weight=weight) for weight in (None, other)]
        found += [*recovery_terms(field, field), regularity(field), mapped_correlation(one, other), mind(one, other)]
        found += [exponential(field), affine_field(torch.eye(len(sides), len(sides) + 1, **options)[None], sides)]
        pair = ((each[0, 0].numpy(), np.eye(4)) for each in (one, other))
        return [*found, torch.from_numpy(register(*pair, affine=False, refine=2, device="cpu").field)]

    torch.set_default_dtype(torch.float64)
    try:
        doubles = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(doubles, results(), strict=True))


def test_recovery_of_constant_fields_is_analytic(size):
    label, pred = [1.0, -2.0, 0.5][:len(size)], [0.5, 1.5, -1.0][:len(size)]
    dist, ang = recovery_terms(constant_field(pred, size), constant_field(label, size))
    a, b = ([value / n for value, n in zip(values, size)] for values in (label, pred))
    squared = sum(x * x for x in a)
    assert float(dist) == pytest.approx(sum((x + y) ** 2 for x, y in zip(a, b)) / (squared + 1e-7), rel=1e-4)
    cosine = sum(x * y for x, y in zip(a, b)) / math.sqrt(squared * sum(y * y for y in b))
    assert float(ang) == pytest.approx(cosine, abs=1e-5)


def test_recovery_does_not_count_negligible_voxels(size):
    true = constant_field([1.0] * len(size), size)
    true[:, :, size[0] // 2:] = 0.0
    # The prediction is wrong in the half that does not count.
    pred = torch.where(true == 0, 1.0, -1.0)
    pred[:, :, size[0] // 2 - 1: size[0] // 2 + 2] = -1.0
    assert float(recovery_terms(pred, true)[1]) == pytest.approx(-1.0, abs=1e-4)
    nothing = torch.zeros_like(true)
    dist, ang = recovery_terms(pred, nothing)
    assert float(ang) == 0.0 and torch.isfinite(dist).all()
    assert [float(term) for term in recovery_terms(nothing, nothing)] == [0.0, 0.0]


def test_recovery_refuses_a_field_on_another_grid(size):
    true = constant_field([1.0] * len(size), size)
    with pytest.raises(InputError, match="the network returns a field of shape .* instead of"):
        recovery_terms(true[..., ::2], true)


def test_recovery_gradient_at_zero_prediction_is_finite_and_points_to_the_answer(size):
    true = smooth_field(size, 2.0)
    for term in (0, 1):
        pred = torch.zeros_like(true, requires_grad=True)
        gradient, = torch.autograd.grad(recovery_terms(pred, true)[term].sum(), pred)
        assert torch.isfinite(gradient).all()
        assert (gradient * -true).sum() < 0


def test_identity_and_shift_cost_nothing(size):
    for field in (torch.zeros(1, len(size), *size), constant_field([3.0] * len(size), size)):
        assert float(roughness(field)) == float(folding(field)) == float(regularity(field)) == 0.0


def test_roughness_of_a_stretch_is_analytic(size):
    dims = len(size)
    for axis in range(dims):
        field = stretch(size, axis, 0.3)
        assert float(roughness(field)) == pytest.approx(0.3 / dims ** 2, rel=1e-4)
        assert float(roughness(field, waiver=0.1)) == pytest.approx(0.2 / dims ** 2, rel=1e-4)
        assert float(roughness(field, waiver=0.31)) == 0.0
        assert float(folding(field)) == 0.0
        assert float(regularity(field, waiver=0.1)) == pytest.approx(0.2 / dims ** 2, rel=1e-4)
        assert float(roughness(-field)) == pytest.approx(float(roughness(field)), rel=1e-5)


def test_reflection_folds_everywhere(size):
    for axis in range(len(size)):
        field = stretch(size, axis, -2.0)
        assert float(folding(field)) == pytest.approx(1.0, abs=1e-5)
        difference = regularity(field, waiver=5.0, folding_weight=0.5)
        assert float(difference) == pytest.approx(0.5, abs=1e-5)
        assert float(regularity(field)) > 1.0


def test_local_folding_is_penalised_and_its_gradient_undoes_it(size):
    field = folded_bump(size).requires_grad_()
    folded = jacobian_determinant(field) < 0
    assert 0 < folded.sum() < folded.numel() // 4
    losses = []
    for _ in range(8):
        loss = folding(field)
        gradient, = torch.autograd.grad(loss, field)
        losses.append(float(loss.detach()))
        field = (field - 0.1 * gradient / gradient.abs().max()).detach().requires_grad_()
    assert losses[0] > 0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_the_mean_of_a_constant_over_a_large_volume_is_that_constant():
    """A running sum in float32 stops growing at some million voxels."""
    other = torch.full((1, 1, 200, 200, 200), 0.3)
    table = conditional_means(torch.zeros_like(other), other, None, bins=32)
    assert table.dtype == torch.float32 and table[0, 0].item() == pytest.approx(0.3, rel=1e-6)
    small = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient, = torch.autograd.grad(conditional_means(torch.zeros(2, 1, 5, 6), small, None, bins=4)[:, 0].sum(), small)
    torch.testing.assert_close(gradient, torch.full_like(small, 1 / 30), rtol=1e-4, atol=0)


def unit_vectors(n, width=16):
    vectors = torch.randn(n, width, generator=torch.Generator().manual_seed(n))
    return vectors / vectors.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("negatives", [1, 5])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_info_nce_of_orthogonal_vectors_is_analytic(negatives, temperature):
    axes = torch.eye(2 + negatives)
    allowed = torch.ones(2, negatives, dtype=torch.bool)
    loss = info_nce(axes[:2], axes[:2], axes[2:], allowed, temperature)
    assert float(loss) == pytest.approx(math.log(1 + negatives * math.exp(-1 / temperature)), abs=2e-6)
    unrelated = info_nce(axes[:2], axes[:2].flip(0), axes[2:], allowed, temperature)
    assert float(unrelated) == pytest.approx(math.log(1 + negatives), rel=1e-5)


def test_info_nce_without_negatives_is_zero_with_finite_gradient():
    for queue in (unit_vectors(6), torch.zeros(0, 16)):
        anchors, positives = unit_vectors(3).requires_grad_(), unit_vectors(3).flip(0).clone().requires_grad_()
        loss = info_nce(anchors, positives, queue, torch.zeros(3, len(queue), dtype=torch.bool), 0.1)
        assert float(loss.detach()) == 0.0
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, (anchors, positives)))


def test_info_nce_is_its_definition_in_value_and_gradient():
    """A negative that is not allowed is as if it were not there, for each sample by itself; one sample has none."""
    given = [unit_vectors(3).requires_grad_(), unit_vectors(4)[:3].clone().requires_grad_(),
             unit_vectors(6).requires_grad_()]
    allowed = torch.rand(3, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed[1], allowed[:, 2] = False, False
    anchors, positives, queue = given
    rows = []
    for anchor, positive, known in zip(anchors, positives, allowed):
        likeness = torch.stack([anchor @ positive, *[anchor @ negative for negative in queue[known]]]) / 0.2
        rows.append(-likeness.softmax(0)[0].log())
    loss, expected = info_nce(*given, allowed, 0.2), torch.stack(rows).mean()
    assert rows[1] == 0 < rows[0] and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, plain in zip(torch.autograd.grad(loss, given), torch.autograd.grad(expected, given)):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert (torch.autograd.grad(info_nce(*given, allowed, 0.2), anchors)[0] * positives).sum() < 0
