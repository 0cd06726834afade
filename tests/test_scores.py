"""Inference/scores.py: scores on the fixed grid, against known answers."""
import dataclasses

import numpy as np
import pytest
from scipy import ndimage

from Dataloader.nifti import is_segmentation
from Dataloader.synthetic import make_subject
from Dataloader.volume import Volume
from Inference.labels import apply_field
from Inference.registration import register
from Inference.scores import affine_scores, image_scores, inverse_scores, label_scores, pair_scores, said_of_labels
from Inference.verdict import judge
from tests import tiny
from tests.test_nifti import make_affine, rotation

SHAPE = (24, 28, 22)


@pytest.fixture(scope="module")
def textured():
    rng = np.random.default_rng(0)
    return ndimage.gaussian_filter(rng.normal(size=SHAPE), 1.5).astype(np.float32)


def everywhere(shape=SHAPE):
    return np.ones(shape, bool)


def test_similarity_is_one_for_itself_in_any_contrast_and_near_zero_for_noise(textured):
    noise = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    scores, body = image_scores(textured, textured, noise, textured, everywhere(), everywhere())
    assert scores["similarity"] == pytest.approx(1, abs=1e-4) and scores["similarity_before"] < 0.05
    assert scores["covered_percent"] == 100 and scores["body_overlap"] == 1 and body.all()
    inverted = 500 - 30 * textured
    scores, _ = image_scores(textured, inverted, inverted, inverted, everywhere(), everywhere())
    assert scores["similarity"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.03])
def test_noise_is_no_anatomy(noise):
    """Half of the anatomy is missing in the moving volume; its noise counted as what the fixed one shows there."""
    rng = np.random.default_rng(0)
    ball = sum(((axis - 24) / 16.0) ** 2 for axis in np.mgrid[:48, :48, :48]) < 1
    whole = np.where(ball, 0.5 + ndimage.gaussian_filter(rng.normal(size=ball.shape), 2) * 2, 0)
    half = np.where(np.arange(48).reshape(-1, 1, 1) < 24, whole, 0)
    fixed, moved, again = (each + noise * rng.normal(size=each.shape) for each in (whole, half, whole))
    seen = everywhere(ball.shape)
    scores, body = image_scores(fixed, moved, again, moved, seen, seen)
    assert 40 < scores["covered_percent"] < 60 and 0.8 * ball.mean() < body.mean() < 1.2 * ball.mean()
    assert image_scores(fixed, again, again, again, seen, seen)[0]["body_overlap"] > 0.97


def blobs(seed):
    return 0.5 + ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(40, 40, 40)), 4) * 10


def speckle(rng):
    """Multiplies an image as speckle does: independent of the anatomy, and alike in neighbouring voxels."""
    parts = [ndimage.gaussian_filter(rng.normal(size=(40, 40, 40)), 0.8) for _ in range(2)]
    return np.hypot(*parts) / np.hypot(*parts).mean()


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.06, 0.1, 0.3, "speckle"])
def test_noise_limits_the_similarity_that_is_attainable(noise):
    """A pair in place does not fail for it; two volumes that show different things do, unless noise hides both."""
    rng, seen = np.random.default_rng(0), everywhere((40, 40, 40))
    spoil = (lambda image: image * speckle(rng)) if noise == "speckle" else (
        lambda image: image + noise * rng.normal(size=image.shape))
    fixed, again, other = (spoil(blobs(seed)) for seed in (0, 0, 1))
    same, wrong = (image_scores(fixed, moved, moved, moved, seen, seen)[0] for moved in (again, other))
    if noise == "speckle":  # what is alike in neighbouring voxels is not all seen as noise
        assert same["similarity"] < same["similarity_attainable"] < 0.6
    else:
        assert same["similarity_attainable"] == pytest.approx(same["similarity"], abs=0.08)
    assert judge(same)[0] == ("doubtful" if noise in (0.3, "speckle") else "ok")
    assert judge(wrong)[0] == ("doubtful" if noise == 0.3 else "failed")


def test_what_the_moving_volume_does_not_cover_counts_against_it(textured):
    seen = everywhere()
    seen[:12] = False
    scores, _ = image_scores(textured, textured, textured, np.where(seen, textured, 0), everywhere(), seen)
    assert scores["similarity"] == pytest.approx(0.5, abs=0.01) and scores["similarity_before"] > 0.999
    assert scores["covered_percent"] == pytest.approx(50)


@pytest.mark.parametrize("filler", [None, -2000])
def test_slices_that_begin_within_half_a_voxel_of_each_other_are_alike(filler):
    """One anatomy in thick slices, which begin at another height, also beside what a CT has not reconstructed."""
    tall = ndimage.gaussian_filter(np.random.default_rng(0).random((40, 36, 80)), (2.5, 2.5, 6)).astype(np.float32)
    tall = 4000 * (tall - tall.mean())
    stacks = [(ndimage.uniform_filter1d(tall, 8, axis=2)[..., 4 + start::8][..., :8], np.diag([1.0, 1.0, 8.0, 1.0]))
              for start in range(4)]
    found = []
    for start, (array, affine) in enumerate(stacks):
        affine[2, 3] = start
        array[:8] = array[:8] if filler is None else filler
        found.append(register(stacks[0], (array, affine), affine=False, refine=False, start="header").similarity)
    assert found[0] > 0.999 and np.all(np.diff(found) < 0) and found[-1] > 0.9


def test_empty_space_around_the_fixed_volume_changes_nothing(textured):
    moved = np.roll(textured, 1, 0)
    plain, body = image_scores(textured, moved, moved, moved, everywhere(), everywhere())
    wide, moved_wide, seen = (np.pad(each, 12) for each in (textured - textured.min(), moved - moved.min(),
                                                           everywhere()))
    padded, wide_body = image_scores(wide, moved, moved_wide, moved_wide, seen, seen)
    inner = wide_body[12:-12, 12:-12, 12:-12]
    assert inner.mean() > 0.9 and wide_body.sum() - inner.sum() < 0.05 * inner.sum(), "no more of it than is shown"
    assert padded["similarity"] == pytest.approx(plain["similarity"], abs=0.1)
    wider = [np.pad(each, 8) for each in (wide, moved_wide, seen)]
    more, _ = image_scores(wider[0], moved, wider[1], wider[1], wider[2], wider[2])
    assert more["similarity"] == pytest.approx(padded["similarity"], abs=0.02)


def test_a_mask_says_what_counts(textured):
    broken = textured.copy()
    broken[12:] = np.random.default_rng(1).normal(size=(12, *SHAPE[1:]))
    mask = np.zeros(SHAPE, np.float32)
    mask[:8] = 1
    scores, body = image_scores(textured, textured, broken, broken, everywhere(), everywhere(), mask)
    assert scores["similarity"] > 0.999 and body.sum() == 8 * 28 * 22


def test_a_moving_mask_that_leaves_nothing_out_scores_as_none(textured):
    """Beyond the moving field of view nothing is seen, though such a mask has no 0 that could say so."""
    fixed, moving = (Volume(array, np.eye(4), word) for array, word in ((textured, "fixed"), (textured[:12], "moving")))
    field = np.zeros((3, *SHAPE), np.float32)
    warped = apply_field(*moving, field, np.eye(4))
    judged = {"compared_by": "correlation", "one_sign": None, "overlap_percent": 50.0}
    plain, masked = (pair_scores(fixed, dataclasses.replace(moving, mask=mask), field, warped, np.eye(4), None, judged)
                     for mask in (None, np.ones(moving.array.shape, np.float32)))
    assert masked == plain and masked["covered_percent"] == pytest.approx(50)


def test_similarity_before_does_not_depend_on_model_or_config():
    fixed, moving = ((make_subject(seed, (14, 14, 14))["image"], np.eye(4)) for seed in (0, 1))
    configs = [tiny.config(data__img_size=size, registration__scales=scales, registration__squared=squared)
               for size, scales, squared in ((16, 1, True), (24, 2, False))]
    found = [register(fixed, moving, config=cfg, start="header", affine=False, refine=False) for cfg in configs]
    assert found[0].similarity_before == found[1].similarity_before > 0


def test_inverse_errors_are_those_of_the_two_fields_composed():
    affine, moving_affine = make_affine(), make_affine((1, 2, 0), (-1, 1, 1), (1.5, 1.0, 2.0), (4, 1, -6))
    # Both fields take every point of the one grid to the same world point plus a shift, and back with 0.3 mm missing.
    shift_mm, missing_mm = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.0, 0.0])
    field, inverse = (np.zeros((3, *shape), np.float32) for shape in ((20, 22, 18), (24, 16, 20)))
    field += np.linalg.solve(affine[:3, :3], shift_mm).reshape(3, 1, 1, 1).astype(np.float32)
    inverse += np.linalg.solve(moving_affine[:3, :3], missing_mm - shift_mm).reshape(3, 1, 1, 1).astype(np.float32)
    middles = [a[:3, :3] @ (np.array(s) / 2) + a[:3, 3] for a, s in ((affine, (20, 22, 18)),
                                                                     (moving_affine, (24, 16, 20)))]
    moving_affine[:3, 3] += middles[0] - middles[1]
    scores = inverse_scores(field, affine, inverse, moving_affine)
    for name in ("inverse_error_mm", "inverse_error_max_mm", "inverse_consistency_mm"):
        assert scores[name] == pytest.approx(0.3, abs=1e-4)
    moving_affine[:3, 3] += 1000
    assert inverse_scores(field, affine, inverse, moving_affine)["inverse_error_mm"] is None, "nothing meets"


def test_inverse_errors_of_slices_are_in_millimetres_in_any_plane():
    """In a coronal plane, where the second axis is the third of the world: a quarter of 2 mm is missing."""
    affine = make_affine((0, 2, 1), spacing=(1, 2, 1))
    field, inverse = np.zeros((2, 2, 20, 22), np.float32)
    field[1], inverse[1] = 1, -0.75
    scores = inverse_scores(field, affine, inverse, affine)
    assert scores.pop("inverse_error_voxels") == pytest.approx(0.5 / 1.5), "the mean side is 1.5 mm"
    for error in scores.values():
        assert error == pytest.approx(0.5)


def test_an_affine_part_in_numbers():
    matrix = np.eye(4)
    matrix[:3, :3] = rotation((0, 0, 40)) @ np.diag([2.0, 0.5, 1.0])
    scores = affine_scores(matrix, 3)
    assert scores["scale_most"] == pytest.approx(2) and scores["scale_least"] == pytest.approx(0.5)
    assert scores["turn_degrees"] == pytest.approx(40) and scores["shear_degrees"] == pytest.approx(0, abs=1e-6)
    assert not scores["mirrors"] and affine_scores(np.diag([-1, 1, 1, 1]), 3)["mirrors"]
    sheared = np.eye(4)
    sheared[0, 1] = np.tan(np.deg2rad(30))
    assert affine_scores(sheared, 3)["shear_degrees"] == pytest.approx(30)
    assert affine_scores(matrix, 2)["turn_degrees"] == pytest.approx(40)
    matrix[:3, :3] = rotation((0, 60, 0))
    scores = affine_scores(matrix, 2, make_affine((0, 2, 1), spacing=(0.8, 1.2, 3)))  # of a coronal slice
    assert scores["turn_degrees"] == pytest.approx(60)
    assert scores["scale_least"] == pytest.approx(1) and scores["scale_most"] == pytest.approx(1)


def test_label_maps_are_told_from_images_of_few_grey_levels():
    subject = make_subject(0, (20, 20, 20))
    assert is_segmentation(subject["label"].astype(np.float32))
    assert is_segmentation((subject["label"] > 0).astype(np.float32)), "a mask"
    noisy = subject["image"] + np.random.default_rng(0).normal(scale=0.02, size=(20, 20, 20))
    assert not is_segmentation(np.rint(100 * noisy).astype(np.float32)), "an image of a hundred grey levels"
    assert not is_segmentation(subject["image"])
    on_white = np.pad(np.rint(100 - 100 * np.clip(noisy, 0, 1)), 20, constant_values=100).astype(np.float32)
    assert not is_segmentation(on_white), "the background is the most frequent number, not the smallest"


def test_structures_that_one_map_lacks_are_named():
    fixed, moved = np.zeros((2, 12, 12, 12), int)
    fixed[2:5], moved[2:5] = 1, 1
    fixed[7:9], moved[10:] = 2, 9
    scores = label_scores({"": moved}, fixed, (1, 1, 1))
    assert scores["labels"]["1"] == {"dice": 1.0, "hd95_mm": 0.0} and scores["dice"] == 0.5
    assert scores["hd95_mm"] == pytest.approx(0.5 * np.sqrt(3) * 12), "a lost structure makes it worse, not better"
    assert scores["labels_lost"] == [2] and scores["labels_extra"] == [9]
    lost, extra = said_of_labels(scores)
    assert "2" in lost and "9" in extra
