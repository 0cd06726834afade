"""Augmentation: a function of the keys, the same on every device and in every batch."""
import hashlib
import math

import pytest
import torch

from Diffusion.batch_augment import _quantiles, augment, augment_maps, noise, random_affine, remap_intensities
from Diffusion.diffuser import DeformDDPM, image_count
from Diffusion.fields import affine_field, warp
from Runtime.keyed_random import uniform
from tests.tiny import config

KEYS = [(0, 3, position) for position in range(4)]
SIZES = [(22, 18), (12, 14, 17)]
NOTHING = dict(rotation=0, scaling=0, shift=0, flip=0, gamma=0, contrast=0, brightness=0, noise=0, deform=0, remap=0)
EVERYTHING = dict(rotation=10, scaling=0.1, shift=0.05, flip=0.5, gamma=0.3, contrast=0.2, brightness=0.1, noise=0.05)
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)


def only(**on):
    """A configuration in which nothing but `on` is augmented."""
    return config(**{f"augment__{name}": value for name, value in {**NOTHING, **on}.items()})


def signed(name, images):
    """The draws in [-1, 1) behind one intensity change, shaped to multiply the images."""
    return (uniform(KEYS, name) * 2 - 1).view(-1, *[1] * (images.dim() - 1))


def hashed(seed, count, size=(64, 64, 64)):
    """Noise of `count` samples with neighbouring keys: (count, *size) in float64."""
    return torch.stack([noise((seed, 0, sample), "test", size) for sample in range(count)]).double()


def test_augmentation_that_is_off_is_the_identity():
    images = torch.rand(4, 1, 12, 14, 16)
    assert augment(images, KEYS, only()) is images
    # What a user adds is done also where it is alone; what other functions do is not.
    assert augment(images, KEYS, only() | {"augment.own": 0.1}) is not images
    assert augment(images, KEYS, only(deform=0.5, remap=0.5)) is images


@pytest.mark.parametrize("dims", [2, 3])
def test_random_affine_stays_within_its_limits(dims):
    cfg = config(augment__rotation=0, augment__scaling=0.2, augment__shift=0.1, augment__flip=0.5)
    rng_keys = [(0, 0, i) for i in range(300)]
    matrix = random_affine(rng_keys, dims, [20, 30, 40][:dims], cfg)
    linear, shift = matrix[:, :, :dims], matrix[:, :, dims]
    diagonal = torch.diagonal(linear, dim1=1, dim2=2)
    assert torch.equal(torch.diag_embed(diagonal), linear)
    assert diagonal.abs().max() <= 1.2 + 1e-5 and diagonal.abs().min() >= 1 / 1.2 - 1e-5
    assert (shift.abs() <= torch.tensor([2.0, 3.0, 4.0][:dims]) + 1e-5).all()
    assert 100 < (diagonal[:, 0] < 0).sum() < 200 and (diagonal[:, 1:] > 0).all(), "only the first axis is mirrored"
    turned = random_affine(rng_keys, dims, [20, 30, 40][:dims], config(augment__rotation=30, augment__scaling=0,
                                                                   augment__shift=0))[:, :, :dims]
    assert torch.allclose(turned @ turned.mT, torch.eye(dims).expand(300, -1, -1), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("on", [{name: value} for name, value in EVERYTHING.items()] + [EVERYTHING])
def test_a_sample_depends_on_its_key_alone_and_the_input_is_left_as_it_is(size, on):
    images = torch.rand(4, 1, *size)
    before, cfg = images.clone(), only(**on)
    together = augment(images, KEYS, cfg)
    assert torch.equal(images, before) and together.shape == images.shape and together.dtype == torch.float32
    assert torch.equal(together, augment(images, KEYS, cfg)) and not torch.allclose(together, images, atol=0.01)
    for order in ([2], [3, 0], [1, 2, 3]):
        alone = augment(images[order], [KEYS[i] for i in order], cfg)
        assert torch.allclose(alone, together[order], atol=1e-6)
    other = augment(images, [(1, 3, position) for position in range(4)], cfg)
    assert not torch.allclose(other, together, atol=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_the_affine_is_one_warp_by_the_drawn_matrices(size):
    images, cfg = torch.rand(4, 1, *size), only(rotation=10, scaling=0.1, shift=0.05, flip=0.5)
    field = affine_field(random_affine(KEYS, len(size), size, cfg), size)
    assert torch.equal(augment(images, KEYS, cfg), warp(images, field, padding="border"))


@pytest.mark.parametrize("size", SIZES)
def test_each_intensity_change_follows_its_formula(size):
    images = torch.rand(4, 1, *size)
    gamma = images ** torch.exp(0.3 * signed("gamma", images))
    assert torch.equal(augment(images, KEYS, only(gamma=0.3)), gamma)
    factor = torch.exp(0.4 * signed("contrast", images))
    contrast = 0.5 + (images - 0.5) * factor
    assert torch.allclose(augment(images, KEYS, only(contrast=0.4)), contrast, atol=1e-6)
    shift = 0.2 * signed("brightness", images)
    assert torch.allclose(augment(images, KEYS, only(brightness=0.2)), images + shift, atol=1e-6)
    added = 0.05 * torch.stack([noise(key, "noise", size) for key in KEYS])[:, None]
    assert torch.allclose(augment(images, KEYS, only(noise=0.05)), images + added, atol=1e-6)
    every = 0.5 + (gamma - 0.5) * factor + shift + added
    assert torch.allclose(augment(images, KEYS, only(gamma=0.3, contrast=0.4, brightness=0.2, noise=0.05)), every,
                          atol=1e-6)


def test_intensity_draws_differ_between_purposes_and_samples_and_reach_both_signs():
    images = torch.zeros(2, 1, 4, 4)
    draws = torch.stack([signed(name, images).flatten() for name in ("gamma", "contrast", "brightness")])
    assert len(draws.unique()) == 12
    many = augment(torch.full((200, 1, 2, 2), 0.5), [(0, 0, i) for i in range(200)], only(brightness=0.25))[:, 0, 0, 0]
    assert 0.25 < many.min() < 0.28 and 0.72 < many.max() < 0.75
    still = augment(torch.full((200, 1, 2, 2), 0.5), [(0, 0, i) for i in range(200)], only(contrast=1.0))
    assert torch.allclose(still, torch.tensor(0.5), atol=1e-6), "contrast turns about 0.5"


def test_noise_has_the_moments_and_tails_of_a_normal_variable():
    values = hashed(0, 16).flatten()
    n, mean = values.numel(), values.mean()
    deviation = values.std()
    centred = (values - mean) / deviation
    # Standard errors of the estimates from n normal values; five of them pass by chance once in two million.
    assert abs(mean) < 5 / n ** 0.5 and abs(deviation - 1) < 5 / (2 * n) ** 0.5
    assert abs((centred ** 3).mean()) < 5 * (6 / n) ** 0.5
    assert abs((centred ** 4).mean() - 3) < 5 * (24 / n) ** 0.5
    for sigma in (0.5, 1.0, 2.0, 3.0, 3.5, 4.0):
        expected = math.erfc(sigma / 2 ** 0.5) / 2
        # Table steps of 1/65536 are the second term.
        bound = 5 * (expected / n) ** 0.5 + 2 ** -16
        assert abs((values > sigma).double().mean() - expected) < bound
        assert abs((values < -sigma).double().mean() - expected) < bound


def test_noise_does_not_correlate_between_voxels_axes_samples_and_purposes():
    size = (32, 48, 64)
    values = hashed(7, 24, size)
    pairs = [(values[:-1], values[1:]), (values[:, :16], values[:, 16:]),
             (values[0], noise((7, 0, 0), "other", size)), (values[0], noise((7, 1, 0), "test", size)),
             (values[0], noise((8, 0, 0), "test", size))]
    for axis in (1, 2, 3):
        for step in (1, 2, 16):
            length = values.shape[axis] - step
            pairs.append((values.narrow(axis, 0, length), values.narrow(axis, step, length)))
    for left, right in pairs:
        for power in (1, 2):  # the squares too: uncorrelated values may still share their spread
            a, b = (part ** power - (power - 1) for part in (left, right))
            assert abs((a * b).mean() / (a.std() * b.std())) < 5 / a.numel() ** 0.5
    for mean in (values.mean((0, 2, 3)), values.mean((0, 1, 3)), values.mean((0, 1, 2))):
        each = values.numel() / len(mean)
        assert mean.abs().max() < 5 / each ** 0.5, "no plane stands out"


def test_noise_is_the_exact_hash_computed_in_python():
    """Wrapping int32 products against Python's unlimited integers: bulk and tail of the vector loops."""
    key, count = (5, 2, 11), 2 ** 17 + 2 * 1237 + 5  # more than two pieces on a CPU
    words = hashlib.blake2b(repr((5, "test", 2, 11)).encode(), digest_size=8).digest()
    a, b = int.from_bytes(words[:4], "little") | 1, int.from_bytes(words[4:], "little")
    half, low, high = (count + 1) // 2, [], []
    for i in range(half):
        x = (a * i + b) % 2 ** 32
        x = (x ^ x >> 16) * 0x7FEB352D % 2 ** 32
        x = (x ^ x >> 15) * 0x846CA68B % 2 ** 32
        x ^= x >> 16
        low.append(x % 2 ** 16)
        high.append(x >> 16)
    expected = _quantiles(torch.device("cpu"))[torch.tensor(low + high)][:count]
    assert torch.equal(noise(key, "test", (count,)), expected)


def test_noise_and_augmentation_are_the_same_with_one_and_two_threads():
    images, before = torch.rand(2, 1, 40, 48, 56), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((noise((0, 1, 2), "noise", (57, 64, 71)), augment(images, KEYS[:2], only(**EVERYTHING))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found))


@pytest.mark.gpu
@pytest.mark.skipif(ACCELERATOR is None, reason="this machine has no accelerator")
@pytest.mark.parametrize("size", [(61, 37), (64, 48, 45)])
def test_noise_on_the_accelerator_has_the_bits_of_the_cpu(size):
    for sample in range(8):
        there = noise((0, 2, sample), "noise", size, ACCELERATOR)
        assert there.device.type == ACCELERATOR.type
        assert torch.equal(there.cpu(), noise((0, 2, sample), "noise", size))
    images = torch.rand(4, 1, *size)
    moved = augment(images.to(ACCELERATOR), KEYS, only(**EVERYTHING)).cpu()
    assert torch.allclose(moved, augment(images, KEYS, only(**EVERYTHING)), atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs of mode 3: deformed besides, and seen in other intensities
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES)
def test_a_deformation_comes_after_the_affine_map_in_one_interpolation(size):
    cfg = only(rotation=10, scaling=0.1)
    images, shift = torch.rand(4, 1, *size), torch.zeros(4, len(size), *size)
    shift[:, 0] = 3.0  # whole voxels, so that two interpolations are as exact as one
    moved, both = augment(images, KEYS, cfg), augment(images, KEYS, cfg, shift)
    assert torch.allclose(both[:, :, :-3], moved[:, :, 3:], atol=1e-5)
    label = (images > 0.5).float()
    assert torch.equal(augment_maps(label, KEYS, cfg, shift)[:, :, :-3], augment_maps(label, KEYS, cfg)[:, :, 3:])
    alone = augment(images, KEYS, only(), shift)
    assert torch.allclose(alone[:, :, :-3], images[:, :, 3:], atol=1e-5), "also where all else is off"


def test_a_pair_is_mirrored_as_a_whole_and_all_else_is_drawn_for_each_volume():
    """A reflection between the two cannot be undone by any field that does not fold."""
    rng_keys = [(0, 0, -1 - position) for position in range(200)]
    cfg = config(augment__rotation=0, augment__scaling=0.2, augment__shift=0.1, augment__flip=0.5)
    alone, paired = (random_affine(rng_keys, 3, [20, 30, 40], cfg, paired) for paired in (False, True))
    assert torch.equal(alone.abs(), paired.abs()) and torch.equal(alone[..., 3], paired[..., 3])
    flipped = paired[:, 0, 0] < 0
    assert torch.equal(flipped[0::2], flipped[1::2]) and 30 < flipped[0::2].sum() < 70
    plain = {**cfg, "augment.flip": 0.0}
    assert torch.equal(random_affine(rng_keys, 3, [20, 30, 40], plain, True),
                       random_affine(rng_keys, 3, [20, 30, 40], plain))


@pytest.mark.parametrize("size", SIZES)
def test_fields_of_pairs_are_keyed_and_grow_with_their_share(size):
    ddpm = DeformDDPM(config(model__dims=len(size), diffusion__grids=[4, 8], diffusion__v_scale=1e-3))
    assert ddpm.draw_pair_fields(size, KEYS, "cpu", 0.0) is None
    fields = ddpm.draw_pair_fields(size, KEYS, "cpu", 0.6)
    assert fields.shape == (4, len(size), *size) and torch.equal(fields, ddpm.draw_pair_fields(size, KEYS, "cpu", 0.6))
    assert torch.allclose(fields[2:3], ddpm.draw_pair_fields(size, KEYS[2:3], "cpu", 0.6), atol=1e-5)
    many = [(0, 0, position) for position in range(24)]
    weak, strong = (ddpm.draw_pair_fields(size, many, "cpu", share).square().mean((1, 2, 3)).sqrt().mean()
                    for share in (0.1, 1.0))
    assert 0 < weak < 0.3 * strong
    latest = math.ceil(0.1 * (ddpm.timesteps - 1))
    most = ddpm.draw_image_field(size, [latest] * 24, many, "cpu")
    assert image_count(latest) > 1 and weak <= most.square().mean((1, 2, 3)).sqrt().mean(), "no time is later"


def test_remapped_intensities_are_a_function_of_the_intensity_alone():
    cfg = only(remap=1.0)
    ramp = torch.linspace(0, 1, 6 * 7 * 8).view(1, 1, 6, 7, 8)
    images = torch.cat([ramp, ramp.flip(2, 3, 4)]).repeat(2, 1, 1, 1, 1)
    mapped = remap_intensities(images, [KEYS[0], KEYS[0], KEYS[1], KEYS[1]], cfg)
    assert torch.allclose(mapped[0], mapped[1].flip(1, 2, 3), atol=1e-5) and not torch.allclose(mapped[0], mapped[2])
    many = [(0, 0, position) for position in range(200)]
    values = remap_intensities(ramp.expand(200, -1, -1, -1, -1), many, cfg).flatten(1)
    assert values.min() >= 0 and values.max() <= 1 and (values.amax(1) > 0.95).all() and (values.amin(1) < 0.05).all()
    falling, rising = (values.diff(dim=1) <= 1e-6).all(1), (values.diff(dim=1) >= -1e-6).all(1)
    assert falling.any() and rising.any() and not (falling | rising).all(), "brighter, darker, and neither"


def test_a_share_of_the_volumes_is_remapped_and_channels_by_functions_of_their_own():
    images = torch.rand(200, 2, 4, 5, 6)
    rng_keys = [(0, 0, position) for position in range(200)]
    mapped = remap_intensities(images, rng_keys, only(remap=0.3))
    changed = (mapped != images).flatten(1).any(1)
    assert 35 < changed.sum() < 85
    same = torch.rand(1, 1, 4, 5, 6).expand(4, 2, -1, -1, -1)
    both = remap_intensities(same, KEYS, only(remap=1.0))
    assert (both[:, 0] != both[:, 1]).flatten(1).any(1).all()
