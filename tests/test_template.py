"""The template of a group: logarithms, the middle of known deformations, and the command on files, resumed."""
import argparse
import json
import shutil

import numpy as np
import pytest
import torch
from scipy import linalg, ndimage

import OM_study
from Dataloader.nifti import read_field, read_volume, write_volume
from Dataloader.synthetic import make_subject
from Diffusion.fields import exponential
from Inference.labels import apply_field
from Report.charts import number as number_text
from Runtime.errors import InputError
from Study.common import volumes_of
from Study.template import (
    DEFORMATION,
    FIELD,
    TEMPLATE,
    WEIGHTS,
    centre,
    centred_deformation,
    finish,
    log_matrix,
    logarithm,
    middle_subject,
    sharpness,
    upright,
    write_template_page,
)
from tests.test_nifti import make_affine, tilted_affine

SIZE, AFFINE = (20, 22, 18), np.diag([2.0, 2.0, 2.0, 1.0])


def smooth_velocity(seed, size=SIZE, most=2.0):
    """A smooth field that is zero at the border, of at most so many voxels: (1, 3, *size)."""
    noise = np.random.default_rng(seed).normal(size=(3, *size))
    field = torch.from_numpy(ndimage.gaussian_filter(noise, (0, 3.5, 3.5, 3.5)).astype(np.float32))[None]
    window = torch.ones(1)
    for axis, n in enumerate(size):
        shape = [1] * 5
        shape[axis + 2] = n
        window = window * torch.sin(torch.linspace(0, torch.pi, n)).view(shape)
    field = field * window
    return most * field / field.square().sum(1).sqrt().max()


def test_the_logarithm_undoes_the_exponential():
    velocity = smooth_velocity(0, most=1.0)
    found = logarithm(exponential(velocity))
    apart = [(exponential(found) - exponential(velocity)).abs(), (found - velocity).abs()]
    assert all(float(each.mean()) < 0.005 and float(each.max()) < 0.06 for each in apart)  # linear interpolation
    matrix = np.eye(4)
    matrix[:3, :3] = [[1.1, 0.1, 0], [-0.1, 0.9, 0], [0, 0, 1.05]]
    matrix[:3, 3] = 3, -2, 1
    np.testing.assert_allclose(linalg.expm(log_matrix(matrix)), matrix, atol=1e-10)
    np.testing.assert_array_equal(log_matrix(np.diag([-1, 1, 1, 1])), np.zeros((4, 4)))  # a mirror has none


def rows_of(folder, fields, matrices):
    rows = []
    for number, (field, matrix) in enumerate(zip(fields, matrices)):
        (folder / str(number)).mkdir()
        np.save(folder / str(number) / DEFORMATION, field[0].numpy())
        rows.append({"name": str(number), "folder": str(folder / str(number)), "matrix": matrix.tolist()})
    return rows


def test_the_middle_of_known_maps_is_found(tmp_path):
    """Subjects at exp(c + a), exp(c - a) of the template: it moves by c, and nothing of the mean is left."""
    both, apart = smooth_velocity(1, most=1.5), smooth_velocity(2, most=1.0)
    shift = np.eye(4)
    shift[:3, 3] = 1.0, -2.0, 0.5
    matrices = [np.diag([1.05, 1, 1, 1]) @ shift, np.diag([1 / 1.05, 1, 1, 1]) @ shift]
    rows = rows_of(tmp_path, [exponential(both + apart), exponential(both - apart)], matrices)
    middle = centre(rows, AFFINE, exact=True)
    assert middle["left"] < 0.02 and middle["most_left"] < 0.2 and middle["moved"] > 0.1
    mean = sum(centred_deformation(row, middle, True) for row in rows) / 2
    assert float(mean.square().sum(1).sqrt().mean()) < 0.02
    left = sum(log_matrix(np.array(row["matrix"]) @ middle["before"]) for row in rows) / 2
    assert np.abs(left[:3, :3]).max() < 1e-6 and np.abs(left[:3, 3]).max() < 0.05


def test_the_middle_of_subjects_and_their_mirror_images_is_the_middle_of_both_groups(tmp_path):
    """The mirrored maps are made by hand: x -> F T F x, in voxels x_0 -> n_0 - 1 - x_0 in place and in direction."""
    fields = [exponential(smooth_velocity(seed, most=1.5)) for seed in (1, 2)]
    turn = linalg.expm(np.array([[0, -0.1, 0.02, 1], [0.1, 0, 0.03, 2], [-0.02, -0.03, 0, -1], [0, 0, 0, 0]]))
    matrices = [turn, np.diag([1.05, 1, 0.97, 1])]
    flip = np.diag([-1.0, 1, 1, 1])
    flip[0, 3] = 2 * (SIZE[0] - 1)  # the grid's voxels are 2 mm apart
    others = [field.flip(2) * torch.tensor([-1.0, 1, 1]).view(1, 3, 1, 1, 1) for field in fields]
    for name in ("half", "all"):
        (tmp_path / name).mkdir()
    half = centre(rows_of(tmp_path / "half", fields, matrices), AFFINE, True, symmetric=True)
    whole = rows_of(tmp_path / "all", fields + others, matrices + [flip @ matrix @ flip for matrix in matrices])
    whole = centre(whole, AFFINE, True)
    np.testing.assert_allclose(half["before"], whole["before"], atol=1e-6)
    np.testing.assert_allclose(half["way"], whole["way"], atol=0.02)
    assert half["left"] < 0.02 and float(half["way"].abs().max()) > 1


@pytest.mark.slow
def test_a_symmetric_volume_is_turned_upright():
    image = make_subject(0, (22, 20, 18))["image"]
    image = (image + image[::-1]) / 2
    affine = tilted_affine()
    inner = np.pad(image, 4)
    moved = linalg.expm(np.array([[0, -0.2, 0.1, 4], [0.2, 0, 0.05, -2], [-0.1, -0.05, 0, 3], [0, 0, 0, 0]]))
    centre_at = affine.copy()
    centre_at[:3, 3] += affine[:3, :3] @ ((np.array(inner.shape) - 1) / 2)
    around = np.eye(4)
    around[:3, 3] = centre_at[:3, 3]
    askew = apply_field(inner, around @ moved @ np.linalg.inv(around) @ affine,
                        np.zeros((3, *inner.shape), np.float32), affine)

    def alike(volume):
        return np.corrcoef(volume.ravel(), volume[::-1].ravel())[0, 1]

    assert alike(askew) < 0.9 and alike(upright(askew, affine, "it", "cpu")) > 0.98
    with pytest.raises(InputError, match="it: --symmetric needs volumes with a left and a right side"):
        upright(np.random.default_rng(0).random((16, 16, 16), np.float32), affine, "it", "cpu")


def test_sharpness_is_the_mean_gradient():
    ramp = np.broadcast_to(np.arange(10.0)[:, None, None] / 10, (10, 10, 10))
    assert sharpness(ramp) == pytest.approx(0.1)


def test_the_subject_of_median_size_is_chosen_by_true_volumes(tmp_path):
    """115 voxels of a sheared grid are as large as 104 upright ones."""
    items = []
    for name, affine, voxels in (("small", np.diag([1, 1, 2.5, 1]), 100), ("tilted", tilted_affine(), 115),
                                 ("large", np.diag([1, 1, 2.5, 1]), 110)):
        image = np.zeros(10 ** 3, np.float32)
        image[:voxels] = 1
        write_volume(tmp_path / f"{name}.nii.gz", image.reshape(10, 10, 10), affine)
        items.append({"id": name, "image": tmp_path / f"{name}.nii.gz"})
    assert middle_subject(items, {}).name == "tilted.nii.gz"


# ---------------------------------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------------------------------

def three_at_the_end(folder, lesion, organ):
    """What `finish` gets of three equal subjects, each with a lesion of its own and an organ, but no history."""
    image, affine, items, rows = make_subject(0, (16, 17), dims=2)["image"], np.diag([1.0, 1, 1, 1]), [], []
    for number in range(3):
        label = np.zeros(image.shape, np.uint8)
        label[4 * number + 1:4 * number + 3, 5:8], label[4:9, 10:14] = lesion, organ
        item = {"id": f"s_{number}", "image": folder / f"s_{number}.nii.gz", "label": folder / f"l_{number}.nii.gz"}
        above = make_affine(origin=(0, 0, 4 * number))  # in three planes, as slices of three persons
        write_volume(item["image"], image, above)
        write_volume(item["label"], label, above)
        (folder / item["id"]).mkdir()
        np.save(folder / item["id"] / FIELD, np.zeros((2, *image.shape), np.float32))
        rows.append({"name": item["id"], "folder": str(folder / item["id"]), "moving": str(item["image"]),
                     "matrix": np.eye(4).tolist(), "similarity": 0.9, "verdict": "ok", "reason": ""})
        items.append({**item, "source": {}})
    write_volume(folder / "round_0" / TEMPLATE, image, affine)
    return rows, image, affine, items


@pytest.mark.parametrize("lesion, organ, dices, pairs", [(1, 2, {"1": 0.0, "2": 1.0}, 0.5), (1, 0, {}, 0.0),
                                                         (0, 0, {}, None)])
def test_lesions_that_no_two_subjects_share_are_a_dice_of_0(tmp_path, lesion, organ, dices, pairs):
    """They lose the vote. Where nothing wins it, the template has no label, and its subjects no Dice and no verdict by
    one."""
    history = [{"round": 0, "spacing_mm": 1.0, "moved": 0.0, "mean_left": 0.0, "most_left": 0.0, "sharpness": 0.1,
                "similarity": 0.9}]
    done, failed, history = finish(tmp_path, *three_at_the_end(tmp_path, lesion, organ), {}, history)
    args = argparse.Namespace(rounds=0, symmetric=False)
    page = write_template_page(tmp_path, done, failed, history, args).read_text()
    assert history[-1].get("dice_pairs") == pairs and ("similarity 0.90, Dice 0.500" in page) == bool(organ)
    for row in done:
        assert {label: found["dice"] for label, found in row["labels"].items()} == dices and row["verdict"] == "ok"
        assert row.get("dice") == (0.5 if organ else None)
        field, _ = read_field(f"{row['folder']}/field.nii.gz", 2, across=True)
        assert (field[2] == 4 * int(row["name"][-1])).all(), "from the plane of the template to that of the subject"


def test_label_maps_that_do_not_fit_or_are_gone_do_not_count_and_leave_nothing_of_an_earlier_run(tmp_path):
    """The rows have the digests from before the work; a file that this user may not read has none."""
    rows, image, affine, items = three_at_the_end(tmp_path, 0, 2)
    items.append({"id": "s_3", "image": tmp_path / "s_3.nii.gz", "label": None, "source": {"moving": None}})
    args = tmp_path, rows, image, affine, items, {"s_3": "Permission denied"}, [{"round": 0}]
    done, _, history = finish(*args)
    assert [row["dice"] for row in done] == [1, 1, 1] and history[-1]["dice_pairs"] == 1
    write_volume(items[0]["label"], np.ones((16, 17), np.uint8), np.diag([2.0, 1, 1, 1]))
    write_volume(tmp_path / "subjects/s_3/warped_label.nii.gz", np.ones((16, 17), np.uint8), np.eye(4))
    items[1]["label"] = None
    items[2]["source"] = {"moving": "hex", "moving_label": None}
    done, failed, _ = finish(*args)
    assert "l_0.nii.gz: the label map is on another grid than" in done[0]["warnings"][0]
    assert [row.get("dice") for row in done] == [None, None, 1] and "moving_label" not in done[0]
    assert list(tmp_path.glob("subjects/*/warped_label.nii.gz")) == [tmp_path / "subjects/s_2/warped_label.nii.gz"]
    assert done[2]["source"] == {"moving": "hex", "moving_label": None} and failed[0]["source"] == {"moving": None}


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three labelled subjects, one that cannot be read, and the template of the others."""
    folder = tmp_path_factory.mktemp("template")
    for seed in range(3):
        subject = make_subject(seed, SIZE)
        write_volume(folder / f"group/imagesTr/s_{seed}.nii.gz", subject["image"], AFFINE)
        write_volume(folder / f"group/labelsTr/s_{seed}.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    (folder / "broken.nii.gz").write_bytes(b"not a volume")
    assert run(folder) == 0
    return folder


def run(place, *words, out="out"):
    return OM_study.main(["template", "--images", str(place / "group"), str(place / "broken.nii.gz"), "--rounds", "2",
                          "--device", "cpu", "--out", str(place / out), *words])


@pytest.mark.slow
def test_the_template_lies_in_the_middle_and_is_sharper_than_the_mean(place):
    results = json.loads((place / "out/results.json").read_text())
    assert results["complete"] and len(results["pairs"]) == 3
    assert [entry["name"] for entry in results["failed"]] == ["broken"]
    image, affine = read_volume(place / "out/template.nii.gz")
    history = json.loads((place / "out/convergence.json").read_text())
    assert [entry["spacing_mm"] for entry in history] == pytest.approx([4, 4, 2])
    assert history[-1]["mean_left"] < 0.05 and history[-1]["similarity"] > history[0]["similarity"]
    assert sharpness(image) / 2 > history[-1]["sharpness"] > 0  # voxels of 2 mm
    plain = np.mean([read_volume(place / f"group/imagesTr/s_{seed}.nii.gz")[0] for seed in range(3)], axis=0)
    assert history[-1]["sharpness"] > sharpness(plain / plain.max()) / 2
    assert history[-1]["dice_pairs"] > 0.6
    logs = []
    for row in results["pairs"]:
        field, own = read_field(place / "out" / row["folder"] / "field.nii.gz")
        np.testing.assert_allclose(own, affine, atol=1e-4)
        warped = apply_field(*read_volume(row["moving"]), field, affine)
        np.testing.assert_allclose(warped, read_volume(place / "out" / row["folder"] / "warped.nii.gz")[0], atol=2e-3)
        logs.append(log_matrix(np.array(row["matrix"])))
    assert np.abs(np.mean(logs, axis=0)).max() < 0.02  # the mean map neither moves nor grows
    page = (place / "out/template.html").read_text()
    assert page.count('class="thumb"') == 3 + 3 + 1 and "http" not in page.replace("http-equiv", "")


@pytest.mark.slow
def test_the_sides_of_a_symmetric_template_are_mirror_images(place):
    assert run(place, "--symmetric", out="sides") == 0
    image, _ = read_volume(place / "sides/template.nii.gz")
    np.testing.assert_allclose(image, image[::-1], atol=1e-6)
    history = [json.loads((place / name / "convergence.json").read_text())[-1] for name in ("out", "sides")]
    assert history[1]["mean_left"] < 0.05 and history[1]["similarity"] > history[0]["similarity"] - 0.05
    assert "and their mirror images" in (place / "sides/template.html").read_text()


@pytest.mark.slow
def test_a_second_run_keeps_it_and_a_broken_off_one_gives_the_same(place, capsys):
    template = (place / "out/template.nii.gz").read_bytes()
    assert run(place) == 0 and "keeping the finished template of an earlier run" in capsys.readouterr().out
    results = place / "out/results.json"
    content = json.loads(results.read_text())
    results.write_text(json.dumps({**content, "complete": False}))
    images = [place / "broken.nii.gz", *sorted((place / "group/imagesTr").iterdir(), reverse=True)]
    assert run(place, "--strict", "--images", *map(str, images)) == 43  # all anew, and one subject is left out
    assert "error: broken is left out" in capsys.readouterr().err
    assert (place / "out/template.nii.gz").read_bytes() == template


# ---------------------------------------------------------------------------------------------------------------------
# What is made again
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two small subjects, of which the second has a label map that cannot be read, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("small")
    for seed in range(2):
        subject = make_subject(seed, (16, 17), dims=2)
        write_volume(folder / f"group/s_{seed}.nii.gz", subject["image"], AFFINE)
        write_volume(folder / f"group/s_{seed}_dseg.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    shutil.copy(folder / "group/s_0.nii.gz", folder / "start.nii.gz")
    for name in ("s_1_dseg", "s_2"):
        (folder / f"group/{name}.nii.gz").write_bytes(b"not a volume")
    return folder


def make(folder, *words):
    """Run the command. Returns: its exit code."""
    return OM_study.main(["template", "--images", str(folder / "group"), "--start", str(folder / "start.nii.gz"),
                          "--rounds", "1", "--affine", "rigid", "--device", "cpu", "--out", str(folder / "out"),
                          *map(str, words)])


def files_in(folder):
    """Every file in a folder of results but its lock: {path: content}."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_makes_no_group_is_refused(small, capsys):
    words = ["template", "--images", str(small / "group/s_0.nii.gz"), "--out", str(small / "none")]
    assert OM_study.main(words) == 43 and "a template needs 2 subjects" in capsys.readouterr().err


@pytest.mark.parametrize("names, modalities", [(("sub-01_T1w", "sub-01_T2w"), "T1w, T2w"),
                                               (("p_0000", "p_0001"), "0000, 0001")])
def test_two_modalities_in_one_template_are_told_and_its_moves_are_in_millimetres(small, tmp_path, capsys, names,
                                                                                 modalities):
    for number, name in enumerate(names):
        shutil.copy(small / f"group/s_{number}.nii.gz", tmp_path / f"{name}.nii.gz")
    assert make(small, "--images", tmp_path, "--out", tmp_path / "out") == 0
    said = f"{tmp_path}: the volumes have 2 modalities ({modalities}), and the template is the mean of all of them"
    page, history = (tmp_path / "out/template.html").read_text(), json.loads(
        (tmp_path / "out/convergence.json").read_text())
    assert capsys.readouterr().err.count(said) == 1 and said in page
    assert [entry["spacing_mm"] for entry in history] == [4, 2] and history[-1]["moved"] > 0
    assert f"template moved, mean, mm</b> <span>{number_text(2 * history[-1]['moved'])}</span>" in page


@pytest.mark.slow
def test_a_template_that_is_broken_off_at_its_end_repeats_no_round(small, tmp_path, capsys):
    """Not even if the subjects lie elsewhere by then."""
    shutil.rmtree(small / "out", ignore_errors=True)  # where another test comes first
    (small / "out/template.html").mkdir(parents=True)  # in the way of the page, which comes after the rounds
    assert make(small) == 43 and "template.html" in capsys.readouterr().err
    (small / "out/template.html").rmdir()
    moved = shutil.copytree(small / "group", tmp_path / "moved")
    assert make(small, "--images", moved) == 0
    assert capsys.readouterr().err.count("keeping 2 of") == 2  # of each round
    assert not list((small / "out").glob("round_*/*/*.npy"))
    one, two = json.loads((small / "out/results.json").read_text())["pairs"]
    assert not one["warnings"] and one["dice"] == 1 and "dice" not in two
    assert "s_1_dseg.nii.gz: not a readable NIfTI file" in two["warnings"][0]
    for row in (one, *json.loads((small / "out/round_0/results.json").read_text())["pairs"]):
        assert row["moving"] == str(moved / f"{row['name']}.nii.gz")
    assert make(small) == 0 and "keeping the finished template" in capsys.readouterr().out
    one, _ = json.loads((small / "out/results.json").read_text())["pairs"]
    assert one["moving"] == str(small / "group/s_0.nii.gz")
    assert one["moving_label"] == str(small / "group/s_0_dseg.nii.gz")


@pytest.mark.slow
def test_a_template_that_was_broken_off_leaves_no_smoothing_to_one_with_other_options(small, tmp_path):
    out = tmp_path / "out"
    (out / "template.html").mkdir(parents=True)  # the run ends here
    assert make(small, "--out", out) == 43 and list(out.glob(f"round_1/*/{WEIGHTS}"))
    (out / "template.html").rmdir()
    for folder in (out, tmp_path / "fresh"):
        assert make(small, "--rounds", 2, "--out", folder) == 0  # round 1 has voxels twice as large: none to infer
    assert (out / TEMPLATE).read_bytes() == (tmp_path / "fresh" / TEMPLATE).read_bytes()


@pytest.mark.parametrize("name, said", [("nowhere.nii.gz", "no such file"), ("group/s_2.nii.gz", "not a readable")])
def test_a_start_that_is_none_leaves_a_finished_template_as_it_was(small, name, said, capsys):
    assert make(small) == 0
    before = files_in(small / "out")
    assert make(small, "--start", small / name) == 43 and said in capsys.readouterr().err
    assert files_in(small / "out") == before


def test_a_template_that_is_broken_off_below_its_subjects_is_none_of_them(small, tmp_path, capsys):
    assert make(small) == 0
    shutil.copytree(small / "group", tmp_path / "group")
    out = tmp_path / "group/out"
    shutil.copytree(small / "out", out)
    (out / "round_0/results.json").unlink()
    (out / "round_0/results.json").mkdir()  # the rounds end here
    for _ in range(2):
        assert make(small, "--images", tmp_path / "group", "--out", out, "--again") == 43
        assert f"error: {out}/round_0/results.json" in capsys.readouterr().err
    results = json.loads((out / "results.json").read_text())
    assert not results["complete"] and not results["pairs"]
    assert [item["id"] for item in volumes_of([tmp_path / "group"])] == ["s_0", "s_1", "s_2"]


def test_a_template_that_was_moved_is_read_where_it_lies(small, tmp_path, capsys):
    assert make(small) == 0
    for name in ("one", "two"):
        shutil.copytree(small / "out", tmp_path / name)
        results = tmp_path / name / "results.json"
        results.write_text(results.read_text().replace(str(small / "out"), "/nowhere"))
        for task in ("jacobian", "qc"):
            assert OM_study.main([task, "--results", str(tmp_path / name), "--out", str(tmp_path / task)]) == 0
            assert ("keeping 2 of 2 subjects" in capsys.readouterr().err) == (name == "two")
            rows = json.loads((tmp_path / task / "results.json").read_text())["pairs"]
            assert [row["fixed"] for row in rows] == [str(tmp_path / name / TEMPLATE)] * 2
        labels = json.loads((tmp_path / "jacobian/results.json").read_text())["pairs"][0]["labels"]
        assert labels and rows[0]["fixed_label"] == str(tmp_path / name / "template_label.nii.gz")
        shutil.rmtree(tmp_path / name)


@pytest.mark.slow
def test_whatever_a_template_depends_on_makes_it_again(small, tmp_path, capsys):
    assert make(small) == 0
    small = shutil.copytree(small, tmp_path / "small")
    out, group, start = small / "out", small / "group", small / "start.nii.gz"
    obstacle, results = out / "round_0/results.json", out / "results.json"
    obstacle.unlink()
    obstacle.mkdir()  # whatever begins the rounds again ends here, before any work
    finished, repaired = results.read_bytes(), start.read_bytes()
    other_version = json.dumps({**json.loads(finished), "version": "0.0.1"}).encode()
    for path, content in ((out / "template.nii.gz", b"damaged"), (group / "s_2.nii.gz", repaired),
                          (results, other_version), (start, (group / "s_1.nii.gz").read_bytes())):
        assert make(small) == 0 and "keeping the finished template" in capsys.readouterr().out
        before = path.read_bytes()
        path.write_bytes(content)
        assert make(small) == 43 and str(obstacle) in capsys.readouterr().err, path
        path.write_bytes(before)
        results.write_bytes(finished)
    obstacle.rmdir()
    (group / "s_2.nii.gz").write_bytes(repaired)
    for path in (*group.glob("*_dseg.nii.gz"), group / "s_1.nii.gz"):
        path.unlink()
    corrected = out / "subjects/s_1/warped.nii.gz"
    corrected.write_bytes(b"mine")
    assert (out / "template_label.nii.gz").exists() and make(small) == 0
    assert [row["name"] for row in json.loads(results.read_text())["pairs"]] == ["s_0", "s_2"]
    assert not list(out.rglob("*_label.nii.gz"))
    assert [*out.glob("subjects/s_1/*")] == [corrected], "no field from the old template"


@pytest.mark.parametrize("option, value, least", [("--spacing", "nan", 0), ("--spacing", "inf", 0),
                                                  ("--sharpen", "nan", 0), ("--rounds", "0", 1), ("--workers", "0", 1)])
def test_a_number_that_is_none_or_too_small_is_refused(tmp_path, capsys, option, value, least):
    assert OM_study.main(["template", "--images", str(tmp_path), option, value, "--out", str(tmp_path / "out")]) == 43
    assert f"{option} {value}: it must be a number of {least} or more" in capsys.readouterr().err
