"""The pure parts of bench_fewshot.py, bench_spread.py and bench_retrieval.py: draws, shapes, counting, intervals."""

import argparse

import bench_fewshot as few
import bench_retrieval as retrieval
import bench_spread as spread
import numpy as np
import pytest
import torch
from scipy import stats

from Runtime.config import load_config

SIZE = (12, 14, 10)


def blob():
    label = np.zeros(SIZE, np.float32)
    label[4:8, 5:10, 3:7] = 1
    image = np.random.default_rng(0).normal(size=SIZE).astype(np.float32) + 3 * label
    return image, label


@pytest.mark.parametrize("name", ["flips_affine", "elastic", "bigaug"])
def test_an_augmentation_is_a_function_of_its_key_and_keeps_labels_whole(name):
    image, label = blob()
    draws = [few.ANEW[name](image, label, (0, step, 0)) for step in range(6)]
    again = few.ANEW[name](image, label, (0, 3, 0))
    assert all(np.array_equal(one, other) for one, other in zip(draws[3], again))
    assert any(not np.array_equal(draws[0][0], other) for other, _ in draws[1:])
    assert all(one.shape == SIZE and set(np.unique(marked)) <= {0, 1} for one, marked in draws)


def test_elastic_deformations_have_the_strength_of_smoothed_noise():
    field = few.elastic_field((40, 40, 40), np.random.default_rng(1), (6, 6), (100, 100))
    wanted = 100 / 3 ** 0.5 * (2 * np.pi ** 0.5 * 6) ** -1.5  # variance of white noise times the kernel's squared norm
    assert field.std() == pytest.approx(wanted, rel=0.25)


def test_a_volume_keeps_as_many_copies_as_its_fewest_companions_want():
    orders = [[("a",), ("b",), ("c",)], [("c",), ("a",), ("b",)]]
    assert few.counts_of(orders, {1: 16, 3: 4}) == {"a": 16, "b": 4, "c": 16}
    assert few.counts_of(orders, {2: 8}) == {"a": 8, "b": 8, "c": 8}


def test_a_row_is_compared_with_the_best_simple_one_over_the_test_volumes():
    found = {("none", 1, 0): [0.5, 0.6, 0.7], ("none", 1, 1): [0.6, 0.7, 0.9],
             ("moved", 1, 0): [0.7, 0.7, 0.8], ("moved", 1, 1): [0.7, 0.9, 1.0]}
    rows = few.summarised(found)
    assert rows["1"]["best_simple"] == "none"
    moved = rows["1"]["rows"]["moved"]
    assert moved["dice"] == pytest.approx(0.8) and moved["seeds"] == pytest.approx([2.2 / 3, 2.6 / 3])
    wanted = stats.ttest_rel([0.7, 0.8, 0.9], [0.55, 0.65, 0.8])
    assert moved["less_best"]["mean"] == pytest.approx(0.4 / 3)
    assert (moved["less_best"]["low"], moved["less_best"]["high"]) == pytest.approx(wanted.confidence_interval(0.95))


def test_an_affine_map_is_no_change_of_shape():
    counted = blob()[1] > 0
    places = np.indices(SIZE).astype(np.float32)
    turned = np.stack([0.1 * places[1] - 2, 0.3 * places[0], -0.2 * places[2] + 0.1 * places[0]])
    assert np.abs(spread.without_affine(turned, counted)).max() < 1e-5
    bent = turned + 0.1 * (places[:1] - 6) ** 2
    assert np.abs(spread.without_affine(bent, counted)).max() > 0.05


def test_a_shift_changes_no_centred_shape_and_twice_the_volume_is_measured():
    cfg, (_, label) = load_config(spread.CONFIG), blob()
    shifted = np.roll(label, 2, axis=1)
    assert np.array_equal(spread.centred(label, cfg), spread.centred(shifted, cfg))
    doubled = label.copy()
    doubled[8:12, 5:10, 3:7] = 1
    row, change = spread.measured(np.zeros((3, *SIZE), np.float32), label, doubled, cfg)
    assert row["volume"] == pytest.approx(np.log(2)) and row["displacement_mm"] == row["log_jacobian"] == 0
    assert 0 < row["overlap"] < 1 and np.abs(change).max() > 0


def test_the_same_person_is_found_first_among_others():
    persons = [retrieval.person_of(name) for name in ("liver19_cyc_1_6", "liver19_exhmaster", "liver23_cyc_1_4",
                                                      "hippocampus_203", "hippocampus_204", "hippocampus_206")]
    assert persons == ["liver19", "liver19", "liver23", 203, 204, 206]
    likenesses = np.full((6, 6), 0.1)
    likenesses[0, 1] = likenesses[1, 2] = likenesses[3, 4] = likenesses[4, 3] = 0.9
    np.fill_diagonal(likenesses, 1.0)
    assert retrieval.found_first(likenesses, persons, [0, 1]) == 0.5
    assert retrieval.found_first(likenesses, persons, [3, 4]) == 1.0
    assert retrieval.chance(persons, [0, 1], range(6)) == pytest.approx(0.2)
    assert retrieval.chance(persons, [0, 1], [0, 1, 2]) == 0.5


def test_likeness_ignores_brightness_and_what_all_embeddings_share():
    rows = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)).numpy()
    assert np.diag(retrieval.likeness("correlation", 3 * rows + 7, rows)) == pytest.approx(np.ones(4), abs=1e-5)
    shared = retrieval.likeness("embeddings", rows + 100, rows + 100)
    assert shared == pytest.approx(retrieval.likeness("embeddings", rows, rows), abs=1e-3)


@pytest.mark.parametrize("method", ["moved", "towards"])
def test_copies_do_not_depend_on_the_seed_in_which_they_are_drawn_first(monkeypatch, method):
    volumes, asked = [(f"v{number:02d}", number, None, None) for number in range(12)], []
    cfg = {"data.percentiles": [0, 100]}
    monkeypatch.setattr(few, "carried", lambda volume, others, args, cfg: asked.append(others) or {
        other[0]: (None, None) for other in others})
    monkeypatch.setattr(few, "augment", lambda *args, target, **more: asked.append(target) or (None, None, None))
    monkeypatch.setattr(few, "on_grid", lambda *args: None)
    monkeypatch.setattr(few, "intensity_range", lambda *args: (0, 1))
    for order in few.orders_of(volumes, 2):
        few.drawn_copies(method, volumes[0], 3, (None, {}), None, cfg, order)
    assert asked[:len(asked) // 2] == asked[len(asked) // 2:]


def test_a_volume_is_carried_to_each_other_only_once(monkeypatch, tmp_path):
    brought, args = [], argparse.Namespace(out=tmp_path, resume=False)
    monkeypatch.setattr(few, "MADE", set())

    def bring(volume, others, *_):
        for other in others:
            brought.append(other[0])
            yield np.full(SIZE, other[1], np.float32), np.ones(SIZE, np.uint8)

    monkeypatch.setattr(few, "bring", bring)
    volume, *others = [(f"v{number}", number, None, None) for number in range(4)]
    few.carried(volume, others[:2], args, {})
    found = few.carried(volume, others, args, {})
    assert brought == ["v1", "v2", "v3"] and [image.mean() for image, _ in found.values()] == [1, 2, 3]
