"""Properties of the field operations, in 2D and 3D with unequal sides."""
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from Diffusion.fields import (
    affine_field,
    compose,
    identity,
    integrate_velocity,
    jacobian_determinant,
    resample,
    resize_field,
    side_lengths,
    warp,
)

MATRICES = {2: [[1.10, 0.20, 1.5], [-0.05, 0.85, -0.7]],
            3: [[1.10, 0.20, 0.05, 1.5], [-0.05, 0.85, 0.10, -0.7], [0.03, -0.12, 1.30, 0.4]]}


@pytest.fixture(params=[(29, 38), (21, 26, 31)], ids=["2d", "3d"])
def size(request):
    return request.param


def noise_image(size, batch=1, channels=1, seed=0):
    return torch.rand(batch, channels, *size, generator=torch.Generator().manual_seed(seed))


def waves(size, channels, batch=1, seed=0):
    """Smooth values in -1 .. 1: products of a cosine of two thirds of a period per axis, (B, channels, *size)."""
    numbers = torch.Generator().manual_seed(seed)
    result = torch.ones(batch, channels, *size)
    for axis, n in enumerate(size):
        phase = 2 * math.pi * torch.rand(batch, channels, 1, generator=numbers)
        wave = torch.cos(4 / 3 * math.pi * torch.arange(n) / n + phase)
        result = result * wave.view(batch, channels, *[n if i == axis else 1 for i in range(len(size))])
    return result


def smooth_field(size, amplitude, batch=1, seed=0):
    return amplitude * waves(size, len(size), batch, seed)


def inside(x, margin):
    return x[(..., *[slice(margin, -margin)] * (x.dim() - 2))]


def affine_matrix(dims):
    return torch.tensor([MATRICES[dims]])


def relative(x, exact):
    return float((x - exact).norm() / exact.norm())


def test_zero_field_is_the_identity(size):
    image, zero = noise_image(size, 2, 3), torch.zeros(2, len(size), *size)
    field = smooth_field(size, 2.0, 2)
    for padding in ("zeros", "border"):
        assert torch.allclose(warp(image, zero, padding=padding), image, rtol=0, atol=1e-5)
    assert torch.equal(warp(image.round(), zero, mode="nearest"), image.round())
    assert torch.allclose(warp(image[:, :, :1], zero[:, :, :1]), image[:, :, :1], rtol=0, atol=1e-5), "one voxel thick"
    assert torch.equal(compose(zero, field), field)
    assert torch.allclose(compose(field, zero), field, rtol=0, atol=1e-5)
    assert torch.equal(compose(zero, zero), zero)
    assert torch.equal(jacobian_determinant(zero), torch.ones(2, *size))


def test_integer_shift_is_exact_and_channel_zero_moves_along_the_first_axis(size):
    image = noise_image(size)
    labels = torch.randint(0, 40, (1, 1, *size), generator=torch.Generator().manual_seed(3)).float()
    for axis, n in enumerate(size):
        field = torch.zeros(1, len(size), *size)
        field[:, axis] = 3.0
        kept, source = image.narrow(2 + axis, 0, n - 3), image.narrow(2 + axis, 3, n - 3)
        assert not torch.allclose(kept, source, atol=0.1)
        assert torch.allclose(warp(image, field).narrow(2 + axis, 0, n - 3), source, rtol=0, atol=2e-5)
        moved = warp(labels, field, mode="nearest")
        assert torch.equal(moved.narrow(2 + axis, 0, n - 3), labels.narrow(2 + axis, 3, n - 3))
        assert not moved.narrow(2 + axis, n - 3, 3).any()
        border = warp(labels, field, mode="nearest", padding="border")
        last = labels.narrow(2 + axis, n - 1, 1).expand_as(border.narrow(2 + axis, n - 3, 3))
        assert torch.equal(border.narrow(2 + axis, n - 3, 3), last)


def test_compose_equals_warping_twice(size):
    first, then = smooth_field(size, 2.0, 2, seed=1), smooth_field(size, 1.5, 2, seed=2)
    image = waves(size, 1, 2, seed=3)
    twice, once = warp(warp(image, first), then), warp(image, compose(first, then))
    error = relative(inside(once, 5), inside(twice, 5))
    assert error < 0.02
    wrong = warp(image, compose(then, first))
    assert relative(inside(wrong, 5), inside(twice, 5)) > 3 * error


def test_compose_of_affine_maps_is_exact(size):
    dims, outer = len(size), torch.tensor([[0.0] * (len(size) + 1)])
    a, b = affine_matrix(dims), affine_matrix(dims).clone()
    b[:, :, :dims] = torch.eye(dims) + 0.3 * (b[:, :, :dims] - torch.eye(dims)).transpose(1, 2)
    outer[0, -1] = 1.0
    product = (torch.cat([a[0], outer]) @ torch.cat([b[0], outer]))[None, :dims]
    result = compose(affine_field(a, size), affine_field(b, size))
    assert torch.allclose(inside(result, 5), inside(affine_field(product, size), 5), rtol=0, atol=1e-4)


def test_a_field_continues_beyond_its_border(size):
    shift = torch.ones(1, len(size), *size)
    assert torch.allclose(compose(3 * shift, -2 * shift), shift, rtol=0, atol=1e-5)
    assert torch.allclose(integrate_velocity(shift, [13]), 13 * shift, rtol=0, atol=1e-4)


def test_jacobian_of_an_affine_is_its_determinant(size):
    matrix = affine_matrix(len(size))
    expected = torch.linalg.det(matrix[0, :, :-1])
    assert abs(float(expected) - 1.0) > 0.05
    determinant = jacobian_determinant(affine_field(matrix, size))
    assert determinant.shape == (1, *size)
    assert torch.allclose(determinant, expected.expand_as(determinant), rtol=0, atol=1e-4)


def test_jacobian_of_a_reflection_is_minus_one(size):
    for axis in range(len(size)):
        matrix = torch.eye(len(size), len(size) + 1)[None].clone()
        matrix[0, axis, axis] = -1.0
        field = affine_field(matrix, size)
        determinant = jacobian_determinant(field)
        assert torch.allclose(determinant, -torch.ones_like(determinant), rtol=0, atol=1e-5)
        image = noise_image(size)
        assert torch.allclose(warp(image, field), image.flip(2 + axis), rtol=0, atol=2e-5)


def test_affine_field_is_the_matrix_about_the_centre(size):
    dims, matrix = len(size), affine_matrix(len(size))
    field = affine_field(matrix, size)
    point = [1] * dims
    centre = (torch.tensor(size) - 1) / 2
    expected = centre + matrix[0, :, :dims] @ (torch.tensor(point) - centre) + matrix[0, :, dims]
    assert torch.allclose(field[(0, slice(None), *point)] + torch.tensor(point), expected, rtol=0, atol=1e-4)
    shift = torch.eye(dims, dims + 1)[None].clone()
    shift[0, :, dims] = torch.arange(dims) + 1.0
    expected = shift[:, :, dims].view(1, dims, *[1] * dims).expand(1, dims, *size)
    assert torch.equal(affine_field(shift, size), expected)


def test_warp_reads_an_image_of_another_size_at_an_origin(size):
    image = noise_image([n + 9 for n in size])
    zero = torch.zeros(1, len(size), *size)
    origin = [2 + axis for axis in range(len(size))]
    crop = image[(..., *[slice(o, o + n) for o, n in zip(origin, size)])]
    assert torch.allclose(warp(image, zero, origin=origin), crop, rtol=0, atol=2e-5)
    at_zero = image[(..., *[slice(0, n) for n in size])]
    assert torch.allclose(warp(image, zero), at_zero, rtol=0, atol=2e-5)
    field = smooth_field(size, 1.7)
    full = torch.zeros(1, len(size), *image.shape[2:])
    where = (..., *[slice(o, o + n) for o, n in zip(origin, size)])
    full[where] = field
    assert torch.allclose(warp(image, field, origin=origin), warp(image, full)[where], rtol=0, atol=2e-5)


@pytest.mark.parametrize("padding, mode", [("zeros", "grid-constant"), ("border", "nearest")])
def test_resample_agrees_with_scipy_on_a_grid_of_another_size(size, padding, mode):
    volumes, dims, other = noise_image(size, batch=2), len(size), tuple(n + 5 for n in size)
    change = np.array(MATRICES[dims])
    found = resample(volumes, change, other, padding)
    assert found.shape == (2, 1, *other)
    points = change[:, :dims] @ np.indices(other).reshape(dims, -1) + change[:, dims:]
    for volume, resampled in zip(volumes, found):
        expected = map_coordinates(volume[0].double().numpy(), points, order=1, mode=mode).reshape(other)
        assert np.abs(resampled[0].numpy() - expected).max() < 2e-4


@pytest.mark.parametrize("count", [0, 1, 2, 13])
def test_integrate_velocity_of_an_affine_is_the_power_of_its_matrix(size, count):
    dims = len(size)
    matrix = torch.eye(dims, dims + 1)[None].clone()
    matrix[0, :, :dims] += 0.1 * (affine_matrix(dims)[0, :, :dims] - torch.eye(dims))
    power = matrix.clone()
    power[0, :, :dims] = torch.linalg.matrix_power(matrix[0, :, :dims], count)
    result = integrate_velocity(affine_field(matrix, size), [count])
    assert torch.allclose(inside(result, 7), inside(affine_field(power, size), 7), rtol=0, atol=1e-3)


def test_integrate_velocity_with_mixed_counts_equals_the_separate_ones(size):
    counts = [5, 0, 13, 1, 8]
    field = smooth_field(size, 0.3, len(counts), seed=9)
    mixed = integrate_velocity(field, counts)
    for i, count in enumerate(counts):
        assert torch.allclose(mixed[i:i + 1], integrate_velocity(field[i:i + 1], [count]), rtol=0, atol=1e-6)
    assert torch.equal(mixed, integrate_velocity(field, torch.tensor(counts)))


def test_integrate_velocity_on_a_region_equals_the_crop_of_the_whole(size):
    counts = [6, 13]
    field = smooth_field(size, 0.4, 2, seed=10)
    region = [slice(2 + axis, n - 4) for axis, n in enumerate(size)]
    part = integrate_velocity(field, counts, region)
    assert part.shape == (2, len(size), *[r.stop - r.start for r in region])
    assert torch.allclose(part, integrate_velocity(field, counts)[(..., *region)], rtol=0, atol=2e-5)


def test_resize_field_keeps_an_affine_map(size):
    dims, matrix = len(size), affine_matrix(len(size))
    finer = [2 * n - 1 + axis for axis, n in enumerate(size)]
    scale = torch.tensor([(new - 1) / (old - 1) for new, old in zip(finer, size)])
    rescaled = matrix.clone()
    rescaled[0, :, :dims] *= scale[:, None] / scale[None]
    rescaled[0, :, dims] *= scale
    finer_field = resize_field(affine_field(matrix, size), finer)
    assert torch.allclose(finer_field, affine_field(rescaled, finer), rtol=0, atol=1e-4)
    assert torch.allclose(resize_field(finer_field, size), affine_field(matrix, size), rtol=0, atol=1e-4)
    assert torch.equal(resize_field(affine_field(matrix, size), size), affine_field(matrix, size))


def test_which_place_a_coarse_voxel_has_depends_on_how_its_grid_was_made():
    """Both resamplings are exact for what is linear, each on grids of its own kind: corners, or cells of 2 x 2 x 2."""
    size, finer = (6, 7, 8), (12, 14, 16)
    places = identity(size)  # of the coarse voxels
    cells = resize_field(2 * places + 0.5, finer, align="cells")  # of the same on the fine grid
    inner = (..., *[slice(1, -1)] * 3)  # beyond the outermost cell centres nothing is known
    assert torch.allclose(cells[inner], identity(finer)[inner], atol=1e-5)
    corners = resize_field(places, finer)  # each axis scaled by the ratio of its steps
    assert torch.allclose(corners, identity(finer), atol=1e-5)
    other = resize_field(corners[..., ::2, ::2, ::2], finer, align="cells")
    assert (other - identity(finer))[inner].abs().max() > 0.3, "one in place of the other is off by half a voxel"


def away_from_kinks(size, seed):
    """A field whose points all fall in the middle of a cell, where interpolation is differentiable, and in the grid."""
    numbers = torch.Generator().manual_seed(seed)
    top = side_lengths(size) - 2
    cells = (identity(size) + torch.randint(-2, 3, (1, len(size), *size), generator=numbers)).clamp(min=0).minimum(top)
    return cells + 0.3 + 0.4 * torch.rand(cells.shape, generator=numbers) - identity(size)


def derivative_both_ways(function, x, seed, step=0.02):
    """Derivative of a scalar along a random direction: by autograd and by central differences."""
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).clamp(-3.0, 3.0)
    x = x.clone().requires_grad_()
    gradient, = torch.autograd.grad(function(x), x)
    with torch.no_grad():
        numeric = (function(x + step * direction) - function(x - step * direction)) / (2 * step)
    return float((gradient * direction).sum()), float(numeric)


def test_gradients_agree_with_central_differences(size):
    # Gradcheck needs float64, which warp does not keep.
    field, image = away_from_kinks(size, 1), noise_image(size, 1, 2)
    other = smooth_field(size, 1.0, seed=13)
    weights, field_weights = noise_image(size, 1, 2, seed=14) - 0.5, noise_image(size, 1, len(size), seed=15) - 0.5
    functions = {
        "warp, field": (lambda f: (warp(image, f).double() * weights).sum(), field),
        "warp, image": (lambda i: (warp(i, field).double() * weights).sum(), image),
        "compose, first": (lambda f: (compose(f, field).double() * field_weights).sum(), other),
        "compose, then": (lambda f: (compose(other, f).double() * field_weights).sum(), field),
    }
    for name, (function, x) in functions.items():
        for seed in range(3):
            gradient, numeric = derivative_both_ways(function, x, seed)
            assert gradient == pytest.approx(numeric, rel=1e-2, abs=1e-2), name


def test_fields_stay_float32_under_autocast(size):
    field, image = smooth_field(size, 1.3, seed=16), noise_image(size)
    operations = [lambda: warp(image, field), lambda: compose(field, field), lambda: integrate_velocity(field, [5]),
                  lambda: resize_field(field, [2 * n for n in size]),
                  lambda: resize_field(field, [2 * n for n in size], align="cells"),
                  lambda: jacobian_determinant(field), lambda: affine_field(affine_matrix(len(size)), size)]
    for operation in operations:
        with torch.autocast("cpu", torch.bfloat16):
            under = operation()
        assert under.dtype == torch.float32
        assert torch.equal(under, operation())
    with torch.autocast("cpu", torch.bfloat16):
        assert warp(image.bfloat16(), field.bfloat16()).dtype == torch.float32


def test_wrong_shapes_raise(size):
    field = torch.zeros(1, len(size), *size)
    with pytest.raises(ValueError, match="cannot warp"):
        warp(torch.zeros(1, 1, *size), torch.zeros(1, len(size) + 1, *size))
    with pytest.raises(ValueError, match="cannot warp"):
        warp(torch.zeros(1, 1, *size, 4), field)
    with pytest.raises(ValueError, match="cannot compose"):
        compose(field, torch.zeros(1, len(size), *[n + 1 for n in size]))
    with pytest.raises(ValueError, match="one count"):
        integrate_velocity(field, [1, 2])
    with pytest.raises(ValueError, match="one count"):
        integrate_velocity(field, [-1])


@pytest.mark.parametrize("size", [(5, 7, 6), (4, 6, 5), (6, 5, 3), (8, 6), (7, 5)])
def test_a_volume_on_its_own_is_warped_as_in_a_batch(size):
    """On a CPU one volume is cut into slabs: values and gradients must not show where."""
    torch.manual_seed(0)
    image, field = torch.rand(2, 2, *size), torch.randn(2, len(size), *size)
    grads = []
    for batched in (True, False):
        i, f = image.clone().requires_grad_(), field.clone().requires_grad_()
        out = warp(i, f) if batched else torch.cat([warp(i[k:k + 1], f[k:k + 1]) for k in range(2)])
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        grads.append((out.detach(), i.grad, f.grad))
    for one, other in zip(*grads):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-4)
    assert torch.equal(grads[0][0], grads[1][0])
