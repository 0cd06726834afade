"""Scores on shapes whose answer is known."""
import itertools
import math
import time

import numpy as np
import pytest
import torch
from scipy import ndimage

from Diffusion.fields import affine_field
from Diffusion.metrics import average, dice, dice_of_pairs, folding_percent, folding_scores, hd95, sdlogj
from tests.test_nifti import tilted_affine

SIZE = (15, 18, 21)


def cube(start, side, label=1, size=SIZE):
    image = np.zeros(size, dtype=np.int16)
    image[tuple(slice(s, s + side) for s in start)] = label
    return image


def linear_field(diagonal, size):
    matrix = torch.eye(len(size), len(size) + 1)[None].clone()
    matrix[0, range(len(size)), range(len(size))] = torch.tensor(diagonal)
    return affine_field(matrix, size)


def test_dice_is_analytic():
    first, second = cube((4, 4, 4), 6), cube((4, 4, 6), 6)
    first[0, 0, 0] = second[0, 0, 0] = 2
    second[0, 0, 1] = 2
    assert dice(first, second, [1, 2]) == pytest.approx([4 / 6, 2 / 3])
    assert dice(first, first, [0, 1, 2]) == [1.0, 1.0, 1.0]
    assert dice(torch.from_numpy(first), torch.from_numpy(second), [2, 1]) == pytest.approx([2 / 3, 4 / 6])


def test_dice_of_absent_labels():
    first, second = cube((4, 4, 4), 6), cube((4, 4, 4), 6, label=2)
    scores = dice(first, second, [1, 2, 3])
    assert scores[:2] == [0.0, 0.0]
    assert math.isnan(scores[2])


@pytest.mark.parametrize("labels", [[1, 2, 3, 9], [0, 3], [-2, 3], [3, 70_000], np.arange(-2, 7), []])
def test_each_label_has_the_score_it_has_alone(labels):
    rng = np.random.default_rng(0)
    first, second = (rng.choice([-2, 0, 1, 2, 3, 5, 70_000], (6, 7, 8)).astype(np.int32) for _ in range(2))
    second[second == 5] = 0
    first[2:] = np.where(first[2:] == 3, 0, first[2:])
    alone = [((first == label).astype(np.uint8), (second == label).astype(np.uint8)) for label in labels]
    found = dice(first, second, labels), hd95(first, second, labels, (1, 2, 3))
    assert np.array_equal(found, [[dice(*masks, [1])[0] for masks in alone],
                                  [hd95(*masks, [1], (1, 2, 3))[0] for masks in alone]], equal_nan=True)
    assert np.array_equal(found[0], dice(*map(torch.as_tensor, (first, second)), labels), equal_nan=True)


def test_the_mean_dice_of_all_pairs_is_that_of_the_pairs_one_by_one():
    rng = np.random.default_rng(0)
    maps = [rng.choice([0, 1, 2, 3, 5, 70_000], (6, 7, 8)).astype(np.int32) for _ in range(7)]
    maps[2][maps[2] == 5] = 0
    maps[3][:] = 0
    for labels in ([1, 2, 3, 5, 70_000], [9], []):
        one_by_one = [average(dice(one, other, labels)) for number, one in enumerate(maps) for other in maps[:number]]
        # Since Python 3.12, `sum` rounds once: the last bits depend on what is added.
        assert dice_of_pairs(maps, labels) == pytest.approx(average(one_by_one), rel=1e-12)
    assert dice_of_pairs(maps[:1], [1]) is None
    many = [np.roll(np.arange(8000).reshape(20, 20, 20) // 250 % 20, number, 0) for number in range(200)]
    began = time.process_time()
    assert 0 < dice_of_pairs(many, range(1, 20)) < 1 and time.process_time() - began < 3, "one by one they take 12 s"


@pytest.mark.parametrize("score", [dice, lambda *maps: hd95(*maps, (1, 1)), lambda *maps: dice_of_pairs(maps[:2], [1])])
def test_label_maps_of_different_shapes_raise(score):
    """With the same box of the label in both, of which the scores are computed."""
    maps = np.eye(3, 4, dtype=int), np.eye(5, 4, dtype=int)
    maps[1][3] = 0
    with pytest.raises(ValueError, match=r"different shapes: \(3, 4\) and \(5, 4\)"):
        score(*maps, [1])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_hd95_of_a_shifted_cube_is_the_shift_in_mm(axis):
    spacing = (0.5, 1.0, 3.0)
    first, second = cube((4, 4, 4), 6), np.roll(cube((4, 4, 4), 6), 2, axis)
    # The two faces across the shift are 72 of the 152 surface voxels, so the 95th percentile lies on them.
    assert hd95(first, second, [1], spacing) == pytest.approx([2 * spacing[axis]])
    assert hd95(first, first, [1], spacing) == [0.0]


@pytest.mark.parametrize("dims", [2, 3])
def test_hd95_on_sheared_axes_is_that_of_the_places_in_the_world(dims):
    axes_mm, rng = tilted_affine()[:3, [1, 2, 0][:dims]], np.random.default_rng(0)
    places = np.indices((9, 8, 7)[:dims])
    masks = [np.linalg.norm(places - rng.uniform(3, 5, (dims, *[1] * dims)), axis=0) < 3 for _ in range(2)]
    first, second = (mask.astype(np.int16) for mask in masks)
    ends = [(np.argwhere(mask & ~ndimage.binary_erosion(np.pad(mask, 1))[(slice(1, -1),) * dims]) @ axes_mm.T)
            for mask in masks]
    apart = np.linalg.norm(ends[0][:, None] - ends[1][None], axis=2)
    expected = max(np.percentile(apart.min(axis), 95) for axis in (0, 1))
    assert hd95(first, second, [1], axes_mm) == pytest.approx([expected])
    corners = np.array(list(itertools.product((-0.5, 0.5), repeat=dims))) * first.shape @ axes_mm.T
    longest = 2 * np.linalg.norm(corners, axis=1).max()
    assert hd95(first, 0 * second, [1], axes_mm) == pytest.approx([longest])
    upright = np.diag([1.0, 2.0, 0.5])[:, :dims]
    assert hd95(first, second, [1], upright) == hd95(first, second, [1], (1.0, 2.0, 0.5)[:dims])


def test_hd95_ignores_a_few_outliers_and_is_symmetric():
    first, second = cube((4, 4, 4), 6), cube((4, 4, 4), 6)
    second[0, 0, 0] = 1
    assert hd95(first, second, [1], (1, 1, 1)) == hd95(second, first, [1], (1, 1, 1)) == [0.0]
    one, other = np.zeros(SIZE, dtype=int), np.zeros(SIZE, dtype=int)
    one[2, 3, 4], other[5, 7, 4] = 1, 1
    assert hd95(one, other, [1], (1.0, 1.0, 1.0)) == pytest.approx([5.0])
    assert hd95(one, other, [1], (2.0, 0.25, 1.0)) == pytest.approx([math.hypot(6.0, 1.0)])


def test_hd95_is_the_larger_of_both_directions():
    first = cube((4, 4, 4), 6)
    second = first.copy()
    # Four voxels off, 12 of the 164 surface voxels of this image: more than 5 %, but not of those of both together.
    second[13, 4:7, 4:8] = 1
    assert hd95(first, second, [1], (1.5, 1, 1)) == hd95(second, first, [1], (1.5, 1, 1)) == [6.0]


def test_hd95_sees_a_surface_at_the_border_and_works_in_2d():
    first, second = np.zeros((9, 12), dtype=int), np.zeros((9, 12), dtype=int)
    first[:, :4], second[:, :6] = 1, 1
    assert hd95(first, second, [1], (1.0, 0.5)) == pytest.approx([1.0])


def test_a_structure_that_one_image_lacks_is_as_far_off_as_the_image_is_long():
    first, second = cube((4, 4, 4), 6), cube((4, 4, 4), 6, label=2)
    only_first, only_second, neither = hd95(first, second, [1, 2, 3], (1, 2, 0.5))
    assert only_first == only_second == pytest.approx(math.hypot(15, 36, 10.5)) and math.isnan(neither)
    worst = np.zeros(SIZE, dtype=int)
    worst[-1, -1, -1] = 1
    assert hd95(first, worst, [1], (1, 2, 0.5))[0] < only_first, "losing a structure is no better than misplacing it"


@pytest.mark.parametrize("size", [(18, 21), SIZE])
@pytest.mark.parametrize("along_first, percent", [(1.0, 0.0), (-1.0, 100.0)])
def test_the_identity_folds_nowhere_and_a_reflection_everywhere(size, along_first, percent):
    field = linear_field([along_first] + [1.0] * (len(size) - 1), size)
    assert folding_percent(field) == percent
    # The determinant is the same everywhere, so its logarithm does not vary.
    assert sdlogj(field) == pytest.approx(0.0, abs=1e-6)


def test_folding_percent_counts_voxels_and_a_determinant_of_zero():
    field = torch.zeros(1, 2, 20, 30)
    field[:, 0] = -torch.arange(20.0).view(20, 1)
    assert folding_percent(field) == 100.0
    field = torch.zeros(1, 2, 20, 30)
    # Rows 5 .. 14 run backwards; the central differences at the two turning points are half-way, at zero and above.
    field[:, 0, 5:15] = -2.0 * torch.arange(10.0).view(10, 1)
    field[:, 0, 15:] = -18.0
    assert folding_percent(field) == pytest.approx(100 * 10 / 20)


@pytest.mark.parametrize("size", [(18, 21), SIZE])
def test_one_sided_determinants_see_what_central_differences_step_over(size):
    field = torch.zeros(1, len(size), *size)
    field[0, 0, ::2] = 1.5  # back and forth along the first axis; two voxels apart nothing changes
    field[0, 0, 0] = field[0, 0, -1] = field[0, 0, -2] = 0
    assert folding_percent(field) == 0.0
    scores = folding_scores(field[0])
    # Steps along the axis: 1 up to the first 1.5, then down by 0.5 and up by 2.5 in turn, until the last three zeros.
    column = torch.arange(size[0]) + field[0, 0].flatten(1)[:, 0]
    steps = column.diff()
    touching = torch.cat([steps[:1] <= 0, (steps[:-1] <= 0) | (steps[1:] <= 0), steps[-1:] <= 0])
    assert 0.5 < touching.float().mean() < 1
    assert scores["folding_any_percent"] == pytest.approx(100 * float(touching.float().mean()))
    assert scores["ndv_percent"] == pytest.approx(-100 * float(steps.clamp(max=0).mean()), rel=1e-5)
    assert scores["folding_body_percent"] is None
    body = torch.zeros(size, dtype=torch.bool)
    body[0] = True  # the first plane has one side only, and it does not fold
    assert folding_scores(field[0], body)["folding_body_percent"] == 0.0


@pytest.mark.parametrize("size", [(18, 21), SIZE])
def test_of_an_affine_map_all_volumes_are_the_determinant(size):
    assert folding_scores(linear_field([1.3, *[0.8] * (len(size) - 1)], size)[0]) == {
        "folding_any_percent": 0.0, "folding_body_percent": None, "ndv_percent": 0.0}
    scores = folding_scores(linear_field([-0.5, *[1.0] * (len(size) - 1)], size)[0])
    assert scores["folding_any_percent"] == 100.0 and scores["ndv_percent"] == pytest.approx(50.0, rel=1e-4)


def test_ndv_is_the_volume_of_the_inverted_tetrahedra_of_both_ways_to_cut():
    rng = np.random.default_rng(0)
    field = rng.normal(scale=0.6, size=(3, 4, 5, 3))
    places = np.indices(field.shape[1:]) + field
    cuts = [[((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)), ((1, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)),
             ((1, 0, 1), (0, 0, 1), (1, 1, 1), (1, 0, 0)), ((0, 1, 1), (1, 1, 1), (0, 0, 1), (0, 1, 0)),
             ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))]]
    cuts.append([tuple((1 - i, j, k) for i, j, k in cut) for cut in cuts[0]])
    inverted, count = 0.0, 0
    for cell in itertools.product(*(range(n - 1) for n in field.shape[1:])):
        for cut in itertools.chain(*cuts):
            whole, moved = ([array[(slice(None), *np.add(cell, vertex))] for vertex in cut]
                            for array in (np.indices(field.shape[1:]).astype(float), places))
            before, after = (np.linalg.det(np.stack(corners[1:]) - corners[0]) / 6 for corners in (whole, moved))
            inverted += max(-after * np.sign(before), 0) / 2
        count += 1
    assert folding_scores(field)["ndv_percent"] == pytest.approx(100 * inverted / count, rel=1e-4) and inverted > 0


def test_sdlogj_is_analytic_and_crops_two_voxels():
    field = torch.zeros(1, 2, 24, 30)
    rows = torch.arange(24.0)
    # Determinant 1 in the upper half and 1.5 in the lower one, 1.25 on the row between them.
    field[:, 0] = (0.5 * (rows - 12).clamp(min=0)).view(24, 1)
    inner = np.log(np.array([1.0] * 10 + [1.25] + [1.5] * 9) + 3.0)
    assert sdlogj(field) == pytest.approx(inner.std(), rel=1e-4)
    border = field.clone()
    border[:, 0, 0], border[:, 1, :, -1] = 0.7, -0.4
    assert sdlogj(border) == pytest.approx(inner.std(), rel=1e-4)
