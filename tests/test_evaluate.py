"""OM_evaluate.py: scores of registrations whose answer is known."""
import csv
import json
import re

import numpy as np
import pytest
import SimpleITK as sitk

import OM_evaluate
from Dataloader.nifti import to_mm, write_field, write_field_learn2reg, write_volume
from Dataloader.synthetic import make_subject
from Dataloader.transforms import write_field_h5
from Dataloader.volume import read_source
from Inference.results import file_digests
from Inference.score_pairs import score_pair
from Inference.scores import field_scores, pair_scores
from tests.test_nifti import OBLIQUE, make_affine, tilted_affine

SHAPE = (24, 28, 32)


def boxes(shift=0, shape=SHAPE):
    label = np.zeros(shape, np.uint8)
    label[6 + shift:14 + shift, 8:16, 10:20] = 1
    label[6 + shift:14 + shift, 18:22, 10:20] = 5
    return label


@pytest.fixture
def pair(tmp_path):
    """Two boxes that are shifted by three voxels of the first axis, and the field that knows it."""
    write_volume(tmp_path / "fixed.nii.gz", boxes(), OBLIQUE)
    write_volume(tmp_path / "moving.nii.gz", boxes(3), OBLIQUE)
    field = np.zeros((3, *SHAPE), np.float32)
    field[0] = 3
    write_field(tmp_path / "field.nii.gz", field, OBLIQUE)
    write_field_learn2reg(tmp_path / "voxels.nii.gz", field, OBLIQUE)
    write_field_h5(tmp_path / "field.h5", field, OBLIQUE)
    return tmp_path


def run(folder, *words):
    return OM_evaluate.main([*map(str, words), "--out", str(folder / "out")])


def scores(folder):
    return json.loads((folder / "out/scores.json").read_text())["pairs"]


@pytest.mark.parametrize("field", ["field.nii.gz", "voxels.nii.gz", "field.h5"])
def test_a_shift_that_the_field_knows(pair, capsys, field):
    words = ("--fixed-label", pair / "fixed.nii.gz", "--moving-label", pair / "moving.nii.gz", "--field", pair / field)
    assert run(pair, *words) == 0
    assert scores(pair)[0]["dice"] == 1, "a shift by whole voxels smooths nothing"
    capsys.readouterr()
    assert run(pair, *words, "--labels", "nearest") == 0
    found = scores(pair)[0]
    assert found["dice"] == 1 and found["hd95_mm"] == 0 and found["folding_percent"] == 0 and found["sdlogj"] < 1e-6
    assert found["dice_before"] == pytest.approx(5 / 8)
    spacing = np.linalg.norm(OBLIQUE[:3, 0])
    assert found["hd95_before_mm"] == pytest.approx(3 * spacing, rel=1e-5)
    assert set(found["labels"]) == {"1", "5"} and found["labels"]["5"]["dice"] == 1
    out = capsys.readouterr().out
    assert "dice" in out and json.loads(out.strip().splitlines()[-1])["dice"] == 1
    with open(pair / "out/scores.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["all", "1", "5"] and float(rows[0]["dice_before"]) == pytest.approx(0.625)
    page = (pair / "out/scores.html").read_text()
    assert "Worst Dice first" in page and "1 pair<" in page and "1 pair.<" in page
    assert "sd" not in out.split() and "<span>sd " not in page, "one value has no deviation"


def test_labels_on_another_grid_agree_with_simpleitk(tmp_path):
    fixed = make_subject(0, SHAPE)
    moving = make_subject(1, (30, 26, 22))
    other = make_affine((1, 2, 0), (1, -1, 1), (1.2, 1.0, 1.3), (8, -4, 2))
    centre = [*np.divide(moving["label"].shape, 2), 1]
    other[:3, 3] += (OBLIQUE @ [*np.divide(SHAPE, 2), 1] - other @ centre)[:3]
    write_volume(tmp_path / "fixed.nii.gz", fixed["label"], OBLIQUE)
    write_volume(tmp_path / "moving.nii.gz", moving["label"], other)
    write_field(tmp_path / "field.nii.gz", fixed["field"], OBLIQUE)
    pair = {key: str(tmp_path / f"{name}.nii.gz") for key, name in (
        ("fixed_label", "fixed"), ("moving_label", "moving"), ("field", "field"))}
    ours = score_pair(pair, carried="nearest")
    images = {name: sitk.ReadImage(str(tmp_path / f"{name}.nii.gz"), sitk.sitkInt16) for name in ("fixed", "moving")}
    transform = sitk.DisplacementFieldTransform(sitk.ReadImage(pair["field"], sitk.sitkVectorFloat64))
    for end, how in (("_before", sitk.Transform()), ("", transform)):
        warped = sitk.Resample(images["moving"], images["fixed"], how, sitk.sitkNearestNeighbor)
        measure = sitk.LabelOverlapMeasuresImageFilter()
        measure.Execute(images["fixed"], warped)
        for label, values in ours["labels"].items():
            assert values[f"dice{end}"] == pytest.approx(measure.GetDiceCoefficient(int(label)), abs=0.01), label


def test_landmarks(pair):
    voxels = np.array([[8.0, 9, 12], [10, 20, 15]])
    for name, points in (("fixed", voxels), ("moving", voxels + [3, 0, 0])):
        world = points @ OBLIQUE[:3, :3].T + OBLIQUE[:3, 3]
        rows = ["{},{},{},{}".format(*point, label) for label, point in zip("ab", world)]
        rows = rows if name == "fixed" else rows[::-1]  # the names pair them
        (pair / f"{name}.csv").write_text("\n".join(["x,y,z,name", *rows]))
    assert run(pair, "--field", pair / "field.nii.gz", "--fixed-points", pair / "fixed.csv",
               "--moving-points", pair / "moving.csv") == 0
    found = scores(pair)[0]
    shift = np.linalg.norm(to_mm(np.array([3.0, 0, 0]).reshape(3, 1, 1, 1), OBLIQUE))
    assert found["tre_before_mm"] == pytest.approx(shift) and found["tre_mm"] == pytest.approx(0, abs=1e-4)
    pairs = ["unregistered,fixed.csv,moving.csv,", "good,fixed.csv,moving.csv,field.nii.gz",
             "bad,moving.csv,fixed.csv,field.nii.gz"]
    (pair / "pairs.csv").write_text("\n".join(["name,fixed_points,moving_points,field", *pairs]))
    assert run(pair, "--pairs", pair / "pairs.csv") == 0
    page = (pair / "out/scores.html").read_text()
    assert re.findall("<td>(good|bad|unregistered)</td>", page) == ["bad", "good", "unregistered"]
    assert "Largest landmark error first" in page and "Dice" not in page


def test_a_list_of_pairs_with_a_folded_field(pair, capsys):
    field = np.zeros((3, *SHAPE), np.float32)
    field[0] = -2.0 * np.arange(SHAPE[0])[:, None, None]
    write_field(pair / "folded.nii.gz", field, OBLIQUE)
    files = {"fixed_label": "fixed.nii.gz", "moving_label": "moving.nii.gz", "field": "field.nii.gz"}
    content = [{"name": "good", **files}, {"name": "folded", "field": "folded.nii.gz"},
               {"fixed_label": "fixed.nii.gz", "warped_label": "moving.nii.gz"}]
    (pair / "pairs.json").write_text(json.dumps({"pairs": content}))
    assert run(pair, "--pairs", pair / "pairs.json", "--labels", "nearest") == 0
    good, folded, warped = scores(pair)
    assert good["dice"] == 1 and folded["folding_percent"] == 100 and "dice" not in folded
    assert warped["name"] == "pair 3" and warped["dice"] == pytest.approx(5 / 8)
    mean = json.loads((pair / "out/scores.json").read_text())["mean"]
    assert mean["dice"] == pytest.approx((1 + 5 / 8) / 2) and mean["folding_percent"] == 50
    before = (pair / "out/scores.json").read_bytes()
    with open(pair / "pairs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["name", *files, "warped_label", "age"])
        writer.writeheader()
        writer.writerows([*content[:2], {**content[2], "name": "pair 3", "age": 30}])
    assert run(pair, "--pairs", pair / "pairs.csv", "--labels", "nearest") == 0
    assert (pair / "out/scores.json").read_bytes() == before
    (pair / "pairs.csv").write_text("fixed_label,moving_labels\na,b\n")
    assert run(pair, "--pairs", pair / "pairs.csv") == 43
    assert "unknown column moving_labels; the columns of a pair are fixed_label" in capsys.readouterr().err


def test_a_bad_pair_of_a_list_is_named_and_the_others_are_scored(pair, capsys):
    files = {"fixed_label": "fixed.nii.gz", "moving_label": "moving.nii.gz", "field": "field.nii.gz"}
    content = [{"name": "NaN lost", **files, "field": "nowhere.nii.gz"}, {"name": "good", **files},
               {"name": "half", "moving_label": "moving.nii.gz", "field": "field.nii.gz"}, {"name": "none"}]
    (pair / "pairs.json").write_text(json.dumps(content))
    assert run(pair, "--pairs", pair / "pairs.json", "--labels", "nearest") == 43
    printed = capsys.readouterr().err
    assert f"error: NaN lost: {pair / 'nowhere.nii.gz'}: no such file" in printed
    assert "error: half: moving_label scores nothing alone: add fixed_label" in printed
    assert "error: none: nothing to score; give a field" in printed
    found = json.loads((pair / "out/scores.json").read_text())
    assert [score["name"] for score in found["pairs"]] == ["good"] and found["mean"]["dice"] == 1
    assert found["failed"][0]["name"] == "NaN lost" and "Not scored" in (pair / "out/scores.html").read_text()
    (pair / "field.nii.gz").write_bytes(b"broken")
    assert run(pair, "--pairs", pair / "pairs.json") == 43
    assert not list((pair / "out").iterdir()), "no scores of the earlier run"


@pytest.mark.parametrize("name, content", [("scores.csv", "mine"), ("scores.json", '{"mine": 1}')])
def test_files_of_the_users_are_not_replaced(pair, name, content, capsys):
    (pair / "out").mkdir()
    (pair / "out" / name).write_text(content)
    assert run(pair, "--field", pair / "field.nii.gz") == 43
    assert f"{name}: it is not of an earlier run" in capsys.readouterr().err
    assert [path.name for path in (pair / "out").iterdir()] == [name] and (pair / "out" / name).read_text() == content


def test_a_label_that_is_nowhere_in_the_moving_image(pair, capsys):
    write_volume(pair / "moving.nii.gz", np.where(boxes() == 5, 0, boxes()), OBLIQUE)
    assert run(pair, "--fixed-label", pair / "fixed.nii.gz", "--moving-label", pair / "moving.nii.gz",
               "--field", pair / "field.nii.gz") == 0
    found = scores(pair)[0]["labels"]["5"]
    far_mm = np.linalg.norm(np.linalg.norm(OBLIQUE[:3, :3], axis=0) * boxes().shape)
    assert found["dice"] == 0 and found["hd95_mm"] == pytest.approx(far_mm), "losing a structure makes it worse"
    assert "the warped labels lack 5, which the fixed ones have." in capsys.readouterr().err


def test_pairs_without_a_common_label_have_no_label_score(pair, capsys):
    write_volume(pair / "empty.nii.gz", 0 * boxes(), OBLIQUE)
    write_volume(pair / "others.nii.gz", 10 * boxes(3), OBLIQUE)
    names = {"good": ("fixed", "moving"), "none moving": ("fixed", "empty"), "none fixed": ("empty", "moving"),
             "none": ("empty", "empty"), "others": ("fixed", "others")}
    pairs = [{"name": name, "fixed_label": f"{fixed}.nii.gz", "moving_label": f"{moving}.nii.gz",
              "field": "field.nii.gz"} for name, (fixed, moving) in names.items()]
    (pair / "pairs.json").write_text(json.dumps(pairs))
    assert run(pair, "--pairs", pair / "pairs.json") == 0
    content = json.loads((pair / "out/scores.json").read_text())
    assert [score.get("dice") for score in content["pairs"]] == [1, None, None, None, None]
    assert content["mean"]["dice"] == 1 and content["mean"]["folding_percent"] == 0
    printed = capsys.readouterr().err
    assert printed.count("empty.nii.gz: it has no label above 0, so no labels are scored.") == 3
    assert printed.count("others.nii.gz have no common label, so no labels are scored.") == 1
    assert run(pair, "--fixed-label", pair / "fixed.nii.gz", "--moving-label", pair / "empty.nii.gz") == 43, "no field"
    assert "error: " in capsys.readouterr().err


def test_hd95_on_a_sheared_grid_is_in_the_world(tmp_path):
    one, other, affine = np.zeros((2, *SHAPE), np.uint8)[0], np.zeros(SHAPE, np.uint8), tilted_affine()
    one[4, 9, 6], other[4, 5, 10] = 1, 1
    write_volume(tmp_path / "fixed.nii.gz", one, affine)
    write_volume(tmp_path / "warped.nii.gz", other, affine)
    assert run(tmp_path, "--fixed-label", tmp_path / "fixed.nii.gz", "--warped-label", tmp_path / "warped.nii.gz") == 0
    assert scores(tmp_path)[0]["hd95_mm"] == pytest.approx(np.linalg.norm(affine[:3, :3] @ [0, -4, 4]), rel=1e-5)


def test_a_large_field_is_scored_on_as_many_voxels_as_by_a_registration(tmp_path, monkeypatch):
    monkeypatch.setattr("Dataloader.grids.MOST_VOXELS", 2000)  # as if 14 x 14 x 14 were beyond 256^3
    field = np.random.default_rng(0).normal(0, 0.3, (3, 14, 14, 14)).astype(np.float32)
    write_field(tmp_path / "field.nii.gz", field, np.eye(4))
    volume = read_source((np.arange(2744.0, dtype=np.float32).reshape(14, 14, 14), np.eye(4)), "volume")
    judged = dict.fromkeys(("compared_by", "one_sign")) | {"overlap_percent": 100.0}
    expected = pair_scores(volume, volume, field, volume.array, np.eye(4), None, judged)
    path = tmp_path / "field.nii.gz"
    found = score_pair({"field": path, "written": (tmp_path, file_digests([path], tmp_path))})
    for key in ("folding_percent", "folding_any_percent", "ndv_percent", "sdlogj"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    whole = score_pair({"field": path})  # of another program, that may fold in single voxels
    assert whole["folding_any_percent"] == pytest.approx(field_scores(field)["folding_any_percent"])
    assert whole["folding_any_percent"] != found["folding_any_percent"]
    assert expected["sdlogj"] > 0 and expected["folding_any_percent"] > 0


def test_slices(tmp_path, capsys):
    affine = make_affine(spacing=(0.8, 1.1, 1))
    write_volume(tmp_path / "fixed.nii.gz", boxes()[:, :, 12], affine)
    write_volume(tmp_path / "moving.nii.gz", boxes(2)[:, :, 12], affine)
    field = np.zeros((2, *SHAPE[:2]), np.float32)
    field[0] = 2
    write_field(tmp_path / "field.nii.gz", field, affine)
    words = ("--fixed-label", tmp_path / "fixed.nii.gz", "--moving-label", tmp_path / "moving.nii.gz", "--field",
             tmp_path / "field.nii.gz")
    assert run(tmp_path, *words, "--dims", 2) == 0
    assert scores(tmp_path)[0]["dice"] == 1
    assert run(tmp_path, *words) == 43
    assert "field.nii.gz: the field has a single plane; for 2D volumes add --dims 2" in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    ((), "give either --pairs or the files of one pair"),
    (("--pairs", "p.json", "--field", "f"), "give either --pairs or the files of one pair"),
    (("--pairs", "nowhere.json"), "nowhere.json: no such list"),
    (("--fixed-label", "nowhere.nii.gz"), "nowhere.nii.gz: no such file"),
    (("--fixed-label", "empty.nii.gz"), "empty.nii.gz: it has no label above 0"),
    (("--fixed-label", "fixed.nii.gz", "--field", "small.nii.gz"), "small.nii.gz: it is on another grid than"),
    (("--fixed-label", "fixed.nii.gz", "--warped-label", "shifted.nii.gz"), "shifted.nii.gz: it is on another grid"),
    (("--fixed-label", "fixed.nii.gz"),
     "error: fixed.nii.gz: nothing to compare it with; add moving_label .with a field.* or warped_label"),
    (("--moving-label", "moving.nii.gz"), "moving_label scores nothing alone: add fixed_label, or leave it out"),
    (("--warped-label", "moving.nii.gz", "--field", "f"), "warped_label scores nothing alone: add fixed_label"),
    (("--fixed-points", "one.csv"), "fixed_points scores nothing alone: add moving_points, or leave it out"),
    (("--fixed-points", "one.csv", "--moving-points", "two.csv"),
     "one.csv has 1 landmarks and .*two.csv has 2; both must list the same points in the same order"),
])
def test_what_does_not_fit_is_one_sentence(pair, monkeypatch, capsys, words, message):
    monkeypatch.chdir(pair)
    write_volume(pair / "empty.nii.gz", np.zeros(SHAPE, np.uint8), OBLIQUE)
    write_field(pair / "small.nii.gz", np.zeros((3, 8, 8, 8), np.float32), OBLIQUE)
    shifted = OBLIQUE.copy()
    shifted[:3, 3] += 4
    write_volume(pair / "shifted.nii.gz", boxes(), shifted)
    (pair / "one.csv").write_text("1,2,3\n")
    (pair / "two.csv").write_text("1,2,3\n4,5,6\n")
    assert run(pair, *words) == 43
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and re.search(message, error[0])
    assert not (pair / "out").exists()


@pytest.mark.parametrize("text, message", [
    ("[]", "no list of pairs"), ('[{"name": "a", "field": "a.nii"}, {"name": "a"}]', "two pairs are called a; give"),
    ('[{"fixed": "a.nii"}]', "pair 1 has the unknown key fixed"),
    ('{"pairs": [{"name": "a"}], "settings": {"program": "template"}}',
     "results of template, not of OM_register.py; list the files"),
    ('[{"fixed_label": ["a.nii", "b.nii"]}]', "pair 1: fixed_label is ['a.nii', 'b.nii'], not a path")])
def test_bad_lists_are_one_sentence(tmp_path, capsys, text, message):
    (tmp_path / "pairs.json").write_text(text)
    assert run(tmp_path, "--pairs", tmp_path / "pairs.json") == 43
    assert f"{tmp_path / 'pairs.json'}: {message}" in capsys.readouterr().err
