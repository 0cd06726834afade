"""The remappings of tests/bench/bench_multimodal.py: what other modalities are made of."""
import numpy as np
import pytest
from remappings import REMAPPINGS, bias_field, by_tissue, remap

from Dataloader.synthetic import make_subject

FIXED, MOVING = (np.clip(make_subject(seed, (20, 24, 18))["image"], 0, 1) for seed in (0, 1))
BOTH = ("t1_t2",)


@pytest.mark.parametrize("name", REMAPPINGS)
def test_a_remapping_is_a_function_of_its_key(name):
    fixed, moving = remap(name, FIXED, MOVING, "1 to 0")
    again = remap(name, FIXED.copy(), MOVING.copy(), "1 to 0")
    np.testing.assert_array_equal(fixed, again[0])
    np.testing.assert_array_equal(moving, again[1])
    drawn = not np.array_equal(moving, remap(name, FIXED, MOVING, "2 to 0")[1])
    assert drawn == (name != "inverted")


@pytest.mark.parametrize("name", REMAPPINGS)
def test_volumes_stay_volumes(name):
    before = FIXED.copy(), MOVING.copy()
    fixed, moving = remap(name, FIXED, MOVING, "1 to 0")
    np.testing.assert_array_equal(before, (FIXED, MOVING))
    for array, source in ((fixed, FIXED), (moving, MOVING)):
        assert array.shape == source.shape and array.dtype == np.float32
        assert array.min() >= 0 and array.max() <= 1 and array.std() > 0.05
    assert np.array_equal(fixed, FIXED) == (name not in BOTH)
    assert np.abs(moving - MOVING).mean() > 0.05


def test_what_each_does():
    ramp = np.linspace(0, 1, 8000, dtype=np.float32).reshape(20, 20, 20)
    shown = {name: [remap(name, ramp, ramp, key)[1].ravel() for key in range(6)] for name in REMAPPINGS}
    np.testing.assert_allclose(shown["inverted"][0], 1 - ramp.ravel(), atol=1e-6)
    for array in shown["folded"]:  # up, then down
        top = array.argmax()
        assert (np.diff(array[:top]) > 0).all() and (np.diff(array[top:]) < 0).all() and 0.39 < top / 8000 < 0.61
    for array in shown["levels"]:  # neither the old order nor its inverse
        steps = array[np.linspace(0, 7999, 12).astype(int)]
        assert len(np.unique(array)) == 6 and (np.diff(steps) > 0).any() and (np.diff(steps) < 0).any()
    for array in shown["t1_t2"]:  # bright fluid, dark white matter
        assert array[:1000].mean() > array[3500:4500].mean() > array[-1000:].mean()
    for array in shown["blurred"]:
        assert np.corrcoef(array, ramp.ravel())[0, 1] < -0.9


def test_the_bias_is_strong_and_smooth():
    for seed in range(2):
        field = np.log(bias_field(np.random.default_rng(seed), (35, 50, 36)))
        assert np.abs(field).max() == pytest.approx(np.log(2.5)) and np.ptp(field) > np.log(2.5)
        assert all(np.abs(np.diff(field, axis=axis)).max() < 0.2 for axis in range(3))


def test_tissues_are_flat_and_in_their_order():
    noise = np.random.default_rng(0).normal(0, 0.02, (3, 4000))
    volume = (np.array([[0.1], [0.5], [0.8]]) + noise).reshape(30, 20, 20)
    shown = by_tissue(volume, (0.9, 0.5, 0.2)).reshape(3, 4000)
    np.testing.assert_allclose(shown.mean(1), (0.9, 0.5, 0.2), atol=0.02)
    assert (shown.std(1) < 0.02).all()
