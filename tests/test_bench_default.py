"""tests/bench/bench_default.py: whose pairs, what a difference is worth, and that a run is logged, kept and scored."""
import itertools
import json
import shutil

import bench_default as bench
import numpy as np
import pytest

from Dataloader.nifti import read_label, write_volume
from Dataloader.synthetic import make_subject
from Runtime.errors import DONE, STOP


@pytest.fixture(scope="module")
def mice(tmp_path_factory):
    """A data folder with three small volumes under the names of the mouse brains."""
    data = tmp_path_factory.mktemp("data")
    for number in (1, 2, 3):
        subject = make_subject(number, (20, 24, 18))
        for folder, part in (("imagesTr", "image"), ("labelsTr", "label")):
            path = data / "mouse" / folder / f"FVB_NCrl_in_vivo_{number}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_volume(path, subject[part], np.diag([0.5, 0.5, 0.5, 1]))
    return data


def rows(pairs, scores):
    return [{"name": f"{b} to {a}", "volumes": [a, b], "dice": score} for (a, b), score in zip(pairs, scores)]


def test_the_pairs_are_those_of_the_seed_and_no_subject_is_on_both_sides():
    written = json.loads(bench.PAIRS.read_text())
    assert {name: written[name] for name in bench.SETS} == bench.draw()
    for name in bench.SETS:
        sides = [{bench.subject(name, volume) for pair in bench.read_pairs(name, part) for volume in pair}
                 for part in ("tuning", "test")]
        assert sides[1] and (name == "mouse" or not sides[0] & sides[1])
        for part, parts in zip(("tuning", "test"), bench.PARTS[name]):
            assert all(volume.startswith(tuple(parts)) for pair in bench.read_pairs(name, part) for volume in pair)
    tuned = bench.read_pairs("mouse", "tuning")
    assert len(tuned) == 1 and tuned[0] not in bench.read_pairs("mouse", "test")


def test_every_peer_has_the_same_budget_and_its_choice_is_one_of_it():
    for settings in (bench.SETTINGS, bench.TWO_MODALITIES):
        assert {len(found) for found in settings.values()} == {4}
    for name, chosen in bench.CHOSEN.items():
        assert all(setting in bench.settings_of(name)[method] for method, setting in chosen.items())


def test_an_interval_is_that_of_volumes_and_too_few_have_none():
    volumes = [f"v{number}" for number in range(8)]
    pairs = [(a, b) for a in volumes for b in volumes if a != b]
    zero = rows(pairs, np.zeros(len(pairs)))
    same = bench.difference("brains", rows(pairs, np.full(len(pairs), 0.02)), zero)
    assert (same["mean"], same["low"], same["high"]) == pytest.approx((0.02, 0.02, 0.02)) and same["p"] < 1e-3
    # What depends on the volume alone: 56 pairs tell no more than 8 volumes do, of which one is far from the others.
    gains = np.array([0.3 if pair[0] == "v0" else -0.01 for pair in pairs])
    found = bench.difference("brains", rows(pairs, gains), zero)
    drawn = np.random.default_rng(0).choice(gains, (2000, len(gains))).mean(1)
    assert found["low"] < np.percentile(drawn, 2.5) and found["high"] > np.percentile(drawn, 97.5)
    assert found["p"] > 0.3 and found["pairs"] == 56
    few = [pair for pair in pairs if set(pair) <= set(volumes[:4])]
    assert bench.difference("brains", rows(few, np.ones(12)), zero) == {
        "pairs": 12, "mean": 1.0, "low": None, "high": None, "p": None}
    persons = [(f"liver{n}_a", f"liver{n}_b") for n in range(8)]
    mine, other = ([{**row, "tre_mm": value} for row in rows(persons, np.ones(8))] for value in (1.0, 1.5))
    assert bench.difference("liver", mine, other)["high"] == pytest.approx(-0.5)


def test_p_values_are_corrected_for_their_number():
    assert bench.holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert bench.holm([0.6, 0.7]) == [1.0, 1.0]


def test_a_point_is_led_by_the_field_in_mm():
    affine = np.diag([2.0, 0.5, 1.0, 1.0])
    field = np.zeros((3, 8, 9, 10), np.float32)
    field[0], field[1] = 1.0, -2.0
    points = np.array([[4.0, 2.0, 3.0], [6.0, 1.5, 5.0]])
    assert bench.tre_mm(field, affine, points, points + [2.0, -1.0, 0.0]) == pytest.approx(0, abs=1e-6)
    assert bench.tre_mm(field, affine, points, points) == pytest.approx(np.sqrt(5))
    assert bench.tre_mm(field, affine, points[:0], points[:0]) is None


def test_a_run_is_written_logged_resumed_and_scored_anew(mice, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    words = ["--sets", "mouse", "--methods", "identity", "ours", "--data", str(mice), "--log", str(log), "--out",
             str(out), "--json"]
    assert bench.main([*words, "--limit", "1"]) == DONE
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["mouse"]
    assert first["pairs"] == 1 and first["greedy"] is None and 0 < first["ours"] <= 1 and first["seconds"] > 0
    assert bench.main([*words, "--limit", "2", "--resume"]) == DONE
    told = capsys.readouterr()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["set"], line["method"], line["pairs"]) for line in lines] == [("mouse", "ours", 1)] * 2
    assert all(line["commit"] and line["date"].startswith("20") for line in lines)
    kept = json.loads((out / "test/mouse/ours/rows.json").read_text())["rows"]
    assert [row["name"] for row in kept] == ["FVB_NCrl_in_vivo_3 to FVB_NCrl_in_vivo_1",
                                             "FVB_NCrl_in_vivo_1 to FVB_NCrl_in_vivo_2"]
    assert first["ours"] == pytest.approx(kept[0]["dice"], abs=1e-5) and "three volumes" in told.err
    # A field of zeros in place of ours: scored anew, it is where the volumes were, and nothing is logged.
    field = out / "test/mouse/ours" / kept[0]["field"]
    np.save(field, np.zeros_like(np.load(field)))
    assert bench.main([*words, "--limit", "2", "--rescore"]) == DONE
    rows_of = {method: json.loads((out / "test/mouse" / method / "rows.json").read_text())["rows"]
               for method in ("identity", "ours")}
    assert rows_of["ours"][0]["dice"] == rows_of["identity"][0]["dice"]
    assert rows_of["ours"][1]["dice"] == kept[1]["dice"] and len(log.read_text().splitlines()) == 2
    capsys.readouterr()
    shutil.rmtree(out / "volumes")  # a report reads no volume
    assert bench.main([*words, "--report"]) == DONE
    last = json.loads(capsys.readouterr().out.splitlines()[-1])["mouse"]
    mean = np.mean([row["dice"] for row in rows_of["ours"]])
    assert last["pairs"] == 2 and last["ours"] == pytest.approx(mean, abs=1e-5)
    assert not (out / "volumes").exists()


def test_one_weight_for_all_and_a_network_are_methods(mice, tmp_path):
    pair = bench.prepare("mouse", "test", mice, tmp_path, 1)[0]
    args = bench.parse_arguments(["--networks", "any=universal", "--refine", "2"])
    fields = []
    for method in ("weight_0.1", "weight_2", "any"):
        generate, settings = bench.method_of("mouse", method, None, args)
        fields.append(next(generate([pair]))[0])
        assert fields[-1].shape == (3, 20, 24, 18) and ("weights" in settings) == (method == "any")
    assert all(np.abs(one - other).max() > 0.05 for one, other in itertools.combinations(fields, 2))
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--networks", "universal"])


def test_what_is_missing_is_named_and_the_other_sets_are_scored(mice, tmp_path, capsys):
    words = ["--methods", "identity", "--data", str(mice), "--log", str(tmp_path / "log"), "--out", str(tmp_path)]
    assert bench.main(["--sets", "cardiac", "mouse", "--limit", "1", "--json", *words]) == STOP
    told = capsys.readouterr()
    assert "imagesTr/heart1_es.nii.gz: no such file" in told.err and "--data" in told.err
    assert json.loads(told.out.splitlines()[-1]).keys() == {"mouse"}


def test_grids_that_differ_begin_with_their_middles_together(mice, tmp_path):
    pair = bench.prepare("mouse", "test", mice, tmp_path, 1)[0]
    assert np.array_equal(pair["start"], np.eye(4))
    label, _ = read_label(pair["moving_label"])
    moved = tmp_path / "moved.nii.gz"
    write_volume(moved, label[:, :-4], np.diag([0.5, 0.5, 0.5, 1]))
    assert np.allclose(bench.centres({**pair, "moving_label": str(moved)})[:3, 3], [0, -1, 0])


def test_another_data_folder_gives_other_volumes(mice, tmp_path):
    words = ["mouse", "test", mice, tmp_path / "out", 1]
    first = bench.prepare(*words)[0]
    other = shutil.copytree(mice, tmp_path / "other")
    image = other / "mouse/imagesTr" / f"{first['volumes'][0]}.nii.gz"
    array, affine = bench.read_volume(image)
    write_volume(image, array[::-1], affine)
    bench.COPIED.clear()  # as in a process of its own
    before = bench.read_volume(first["fixed"])[0]
    after = bench.read_volume(bench.prepare("mouse", "test", other, tmp_path / "out", 1)[0]["fixed"])[0]
    assert np.array_equal(after, before[::-1]) and not np.array_equal(after, before)
