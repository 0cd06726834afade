"""Labels joined from several atlases: the weights by hand, and the command on files, resumed and with bad ones."""
import argparse
import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

import OM_study
from Dataloader.nifti import read_label, read_volume, write_volume
from Dataloader.synthetic import make_subject
from Diffusion.figures import middle_slices, turn
from Diffusion.metrics import average, dice
from Inference.results import write_results
from Runtime.errors import InputError
from Study.fusion import TRUST, best_shift, by_intensity, count, fuse, is_thick, joint_weights, neighbours
from Study.segment import carry, join_labels, sizes, voters, write_results_page
from Study.thumbnails import COLOURS, GREYS, palette, thumbnail, tile
from tests.test_nifti import tilted_affine

SIZE, AFFINE = (18, 20, 16), np.diag([2.0, 2.0, 2.0, 1.0])


# ---------------------------------------------------------------------------------------------------------------------
# The weights
# ---------------------------------------------------------------------------------------------------------------------

def test_atlases_that_err_together_count_as_one():
    """Of three atlases with errors of one size two are equal: each gets half of what the third one gets."""
    apart = torch.zeros(1, 3, 8)
    apart[0, :2, :4], apart[0, 2, 4:] = 1.0, 1.0
    weights = joint_weights(apart, beta=2.0, alpha=1e-3)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.25, 0.5]]), atol=2e-3, rtol=0)


def test_weights_go_by_the_inverse_of_independent_errors():
    """Without errors in common the weights are as 1 / M_ii: d of 1 and 2 give M of (1/8)^2 and (4/8)^2, with beta 2."""
    apart = torch.zeros(1, 2, 8)
    apart[0, 0, 0], apart[0, 1, 1] = 1.0, 2.0
    torch.testing.assert_close(joint_weights(apart, beta=2.0, alpha=0.0), torch.tensor([[16.0, 1.0]]) / 17,
                               atol=1e-4, rtol=0)


def test_the_atlas_that_looks_like_the_image_decides():
    """Two atlases with the same wrong label and another texture are outvoted by one that is the image."""
    rng = np.random.default_rng(0)
    image, other = rng.random((2, 14, 14, 14), np.float32)
    right = 3 * (np.square(np.indices((14, 14, 14)) - 6).sum(0) < 17).astype(np.int16)
    wrong = np.roll(right, 1, axis=0)
    label, doubt = fuse(image, [image, other, other], [right, wrong, wrong])
    assert dice(label, right, [3])[0] > 0.98 and label.dtype == np.int16
    assert doubt[0, 0, 0] == 0 and doubt.dtype == np.float32 and 0 <= doubt.min() and doubt.max() <= 1
    alone, certain = fuse(image, [other], [wrong])
    np.testing.assert_array_equal(alone, wrong)
    assert not certain.any()


def test_an_atlas_is_moved_to_where_it_fits():
    image = np.random.default_rng(1).random((12, 11, 10), np.float32)
    atlas = np.roll(image, 1, axis=1)  # what the image has at y, the atlas has at y + 1
    places = np.ravel_multi_index((np.full(3, 5), np.array([4, 5, 6]), np.full(3, 5)), image.shape)
    shifts = np.array([0, -110, 110, -10, 10, -1, 1])
    np.testing.assert_array_equal(best_shift(image, atlas, shifts, places), [4, 4, 4])


def test_a_patch_votes_for_all_of_its_voxels():
    """With the labels of its own shift: the second atlas is right by one voxel, and far away it has no label."""
    disputed = np.zeros((20, 20), bool)
    disputed[3, 3] = disputed[12, 12] = disputed[12, 13] = True
    weights = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], np.float32)
    shift = int(np.flatnonzero((neighbours(1, 2) == (0, 1)).all(1))[0])
    numbers = np.zeros((2, 20, 20), int)
    numbers[1, :, 13:] = 1
    votes = count(weights, np.array([[0, shift]] * 3), numbers, 2, disputed)
    np.testing.assert_allclose(25 * votes, [[1.0, 0.0], [0.8, 1.2], [0.8, 1.2]], atol=1e-5)


@pytest.mark.parametrize("thickness, thick", [(1, False), (2, False), (3, True)])
def test_a_structure_and_a_gap_of_three_voxels_are_thick(thickness, thick):
    labels = np.zeros((12, 14, 13), int)
    labels[:, 5:5 + thickness] = 2
    for sheet in (labels, 2 - labels):
        assert is_thick(sheet)[:, 5:5 + thickness].all() == is_thick(sheet)[6, 5, 6] == thick
        assert is_thick(sheet)[:, 9:].all() and is_thick(sheet)[:, :5].all()


def test_even_votes_go_to_the_label_whose_intensity_the_voxel_has():
    sure, values = np.repeat(np.eye(2), 500, axis=0), np.repeat([3.0, 7.0], 500)
    found = by_intensity(np.r_[sure, [[0.5, 0.5], [0.5, 0.5]]], np.r_[values, 3.0, 7.0])
    np.testing.assert_array_equal(found[-2:].argmax(1), [0, 1])
    # Half of all voxels have an intensity, and nearly all of those of its label: it is twice as typical there.
    np.testing.assert_allclose(found[-2:].max(1), 0.5 * 2 ** TRUST, rtol=0.1)
    np.testing.assert_allclose(by_intensity(sure, np.full(1000, 5.0)), sure, atol=1e-6)  # a flat image says nothing


def test_flat_images_give_a_plain_vote():
    flat, maps = np.zeros((8, 8), np.float32), [np.eye(8, dtype=np.int16), np.eye(8, dtype=np.int16), np.zeros((8, 8))]
    label, _ = fuse(flat, [flat] * 3, [each.astype(np.int16) for each in maps])
    np.testing.assert_array_equal(label, np.eye(8))


@pytest.mark.parametrize("noise", [0, 0.02])
def test_the_unit_of_the_intensities_does_not_matter(noise):
    """Maps of diffusivity are about 1e-9 m2/s, and other scanners count in millions; each image has its own unit."""
    size, rng = (20, 22, 18), np.random.default_rng(0)
    subject, images, maps = make_subject(0, size), [], []
    for _ in range(4):
        places = np.indices(size) + 6 * ndimage.gaussian_filter(rng.normal(size=(3, *size)), (0, 2, 2, 2))
        shown = ndimage.map_coordinates(subject["image"], places, order=1, mode="nearest")
        images.append((shown + rng.normal(0, noise, size)).astype(np.float32))
        maps.append(ndimage.map_coordinates(subject["label"], places, order=0, mode="nearest"))
    expected, doubt = fuse(images[0], images[1:], maps[1:])
    for scale in (1e-9, 1e6):
        label, other = fuse(images[0] * scale, [image * np.float32(scale) for image in images[1:]], maps[1:])
        np.testing.assert_array_equal(label, expected)
        np.testing.assert_allclose(other, doubt, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Who votes
# ---------------------------------------------------------------------------------------------------------------------

def item(folder, name, subject, content=b"x"):
    (folder / f"{name}.nii.gz").write_bytes(content)
    return {"id": name, "image": folder / f"{name}.nii.gz", "label": None, "subject": subject, "digests": {}}


def test_a_copy_never_votes_and_another_scan_of_the_subject_only_on_request(tmp_path, monkeypatch):
    image = item(tmp_path, "sub-01_ses-1", "sub-01", b"one")
    atlases = [image, item(tmp_path, "copy", "copy", b"one"), item(tmp_path, "sub-01_ses-2", "sub-01", b"two"),
               item(tmp_path, "sub-02", "sub-02", b"thr")]
    of_it = voters(image, atlases, same_subject=False)
    assert [*of_it["candidates"]] == ["sub-02"] and len(of_it["said"]) == 2
    assert "copy is a copy of it" in of_it["said"][0] and "same subject, sub-01" in of_it["said"][1]
    assert [*voters(image, atlases, same_subject=True)["candidates"]] == ["sub-01_ses-2", "sub-02"]

    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("Dataloader.formats.digest", forbid)  # one that may not be read only loses its own vote, later
    assert [*voters(image, [item(tmp_path, "locked", "locked", b"lck")], False)["candidates"]] == ["locked"]


@pytest.mark.parametrize("images, words", [("P1/P1_b.nii.gz", []), ("P1", []), ("", []),
                                           ("P1/P1_b.nii.gz", ["--subject-pattern", "^([^/]+)/"])])
def test_an_atlas_of_the_same_person_has_no_vote_however_the_image_is_given(tmp_path, capsys, images, words):
    """P1_b alone shows no folder of P1, and the folder of P1 alone counts as a whole data set."""
    for seed, name in enumerate(("P1/P1_a", "P1/P1_b", "P2/P2_a")):
        write_volume(tmp_path / f"data/{name}.nii.gz", make_subject(seed, (16, 17), dims=2)["image"], AFFINE)
    write_volume(tmp_path / "data/P1/P1_a_seg.nii.gz", np.ones((16, 17), np.uint8), AFFINE)
    assert OM_study.main(["segment", "--atlases", str(tmp_path / "data"), "--images", str(tmp_path / "data" / images),
                          "--ids", "1", "--out", str(tmp_path / "out"), "--device", "cpu", *words]) == 43
    assert "P1_b: the atlas P1_a is of the same subject, P1, and does not vote" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The scores
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("values, dices", [((1, 0), {"1": 1}), ((1, 3), {"1": 1, "3": 0}), ((0, 0), {"1": 0})])
def test_a_structure_that_only_the_truth_or_only_the_atlases_have_has_a_dice_of_0(tmp_path, values, dices):
    def write(name, first, second):
        label = np.zeros((10, 11), np.uint8)
        label[2:5, 2:5], label[6:9, 6:9] = first, second
        write_volume(tmp_path / name, label, AFFINE)
        return tmp_path / name

    write_volume(tmp_path / "image.nii.gz", np.random.default_rng(0).random((10, 11), np.float32), AFFINE)
    write("a_to_image/warped_label.nii.gz", 1, 0)
    entry = {"name": "image", "image": tmp_path / "image.nii.gz", "truth": write("truth.nii.gz", *values)}
    voting = {"image": {"atlases": [{"id": "a"}], "candidates": ["a"], "said": []}}
    carried = {"a_to_image": {"folder": str(tmp_path / "a_to_image"), "verdict": "ok", "reason": ""}}
    row = join_labels(str(tmp_path), "majority", voting, carried, entry, tmp_path / "image", None)
    assert {label: found["dice"] for label, found in row["labels"].items()} == dices
    assert row["dice"] == np.mean(list(dices.values()))


def test_a_label_map_without_labels_is_doubtful_although_one_atlas_gives_no_doubt(tmp_path):
    write_volume(tmp_path / "image.nii.gz", np.random.default_rng(0).random((10, 11), np.float32), AFFINE)
    write_volume(tmp_path / "a_to_image/warped_label.nii.gz", np.zeros((10, 11), np.uint8), AFFINE)
    voting = {"image": {"atlases": [{"id": "a"}], "candidates": ["a"], "said": []}}
    carried = {"a_to_image": {"folder": str(tmp_path / "a_to_image"), "verdict": "ok", "reason": ""}}
    entry = {"name": "image", "image": tmp_path / "image.nii.gz"}
    row = join_labels(str(tmp_path), "majority", voting, carried, entry, tmp_path / "image", None)
    assert (row["verdict"], row["labels"]) == ("doubtful", {})


def test_the_volume_of_a_label_is_that_of_its_voxels_on_a_sheared_grid():
    """Slices of 1 mm x 1 mm that are 2.5 mm apart along the table, with the gantry tilted by 25 degrees."""
    tilted, inside, voxel = tilted_affine(), np.ones((4, 5, 6), bool), 2.5 * np.cos(np.deg2rad(25))
    assert sizes(inside, inside, tilted)["mm3"] == pytest.approx(120 * voxel)
    assert sizes(inside[0], inside[0], tilted[:, [1, 2, 0, 3]])["mm2"] == pytest.approx(30 * voxel)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three atlases, two images with labels of their own, of which one is an atlas, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("segment")
    for seed in range(4):
        subject = make_subject(seed, SIZE)
        where = folder / ("atlases" if seed < 3 else "new")
        write_volume(where / f"imagesTr/s_{seed}.nii.gz", subject["image"], AFFINE)
        write_volume(where / f"labelsTr/s_{seed}.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    shutil.copy(folder / "atlases/imagesTr/s_0.nii.gz", folder / "new/imagesTr/twin.nii.gz")
    shutil.copy(folder / "atlases/labelsTr/s_0.nii.gz", folder / "new/labelsTr/twin.nii.gz")
    (folder / "broken.nii.gz").write_bytes(b"not a volume")
    return folder


def run(place, *words, out="out"):
    return OM_study.main(["segment", "--atlases", str(place / "atlases"), "--images", str(place / "new"),
                          str(place / "broken.nii.gz"), "--out", str(place / out), "--device", "cpu", *words])


@pytest.mark.slow
def test_the_command_labels_what_it_can_and_names_the_rest(place, capsys):
    assert run(place) == 0
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert last["done"] == 2 and last["failed"] == 1 and last["atlases"] == 3
    assert "warning: broken is left out: " in printed.err and "copy of it and does not vote" in printed.err
    dices = []
    for name in ("s_3", "twin"):
        label, affine = read_label(place / f"out/{name}/label.nii.gz")
        np.testing.assert_allclose(affine, AFFINE, atol=1e-5)
        doubt, _ = read_volume(place / f"out/{name}/doubt.nii.gz")
        assert label.shape == SIZE and 0 <= doubt.min() and doubt.max() <= 1 and doubt.max() > 0.2
        truth = read_label(place / f"new/labelsTr/{name}.nii.gz")[0]
        values = [int(value) for value in np.unique(truth) if value]
        dices.append(average(dice(label, truth, values)))
    assert last["dice"] == pytest.approx(np.mean(dices), abs=0.02) and min(dices) > 0.5
    results = json.loads((place / "out/results.json").read_text())
    assert results["complete"] and [row["name"] for row in results["pairs"]] == ["s_3", "twin"]
    assert results["pairs"][1]["voted"] == ["s_1", "s_2"]
    head, *lines = (place / "out/labels.tsv").read_text().splitlines()
    assert head.split("\t") == ["image", "label", "mm3", "doubt", "dice"] and len(lines) >= 6
    first = read_label(place / "out/s_3/label.nii.gz")[0]
    assert float(lines[0].split("\t")[2]) == pytest.approx(8 * (first == int(lines[0].split("\t")[1])).sum())
    page = (place / "out/segment.html").read_text()
    assert page.count('class="thumb"') == 2 and "http" not in page.replace("http-equiv", "")
    assert not list((place / "out/atlases").glob("*/warped*"))


@pytest.mark.slow
def test_the_most_similar_atlases_and_two_processes_give_labels_too(place, capsys):
    assert run(place, "--ids", "3", "--most", "2", "--join", "majority", "--workers", "2", out="most") == 0
    [row] = json.loads((place / "most/results.json").read_text())["pairs"]
    assert len(row["taken"]) == 2 and len(row["candidates"]) == 3
    ranking = json.loads((place / "most/ranking/results.json").read_text())["pairs"]
    alike = sorted(ranking, key=lambda pair: pair["similarity"])
    assert {f"{name}_to_s_3" for name in row["taken"]} == {pair["name"] for pair in alike[1:]}


@pytest.mark.parametrize("words, said", [
    (["--atlases", "{}/alone/s_3.nii.gz"], "none of its volumes has a label map"),
    (["--joins", "x"], "unrecognized arguments"), (["--images", "{}/nowhere.nii.gz"], "nowhere.nii.gz: no such file"),
    (["--images", "{}/alone", "--out", "{}/alone"],
     "a later run would take the results in it for images; choose another --out."),
    (["--out", "{}"], "atlases: it is a folder of images, and a later run")])
def test_what_cannot_be_is_refused_in_one_sentence(place, words, said, capsys):
    (place / "alone").mkdir(exist_ok=True)
    shutil.copy(place / "new/imagesTr/s_3.nii.gz", place / "alone/s_3.nii.gz")
    try:
        code = run(place, *(word.format(place) for word in words), out="refused")
    except SystemExit as ended:
        code = ended.code
    assert code == 43
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]


def test_two_registrations_of_one_name_are_refused(tmp_path, capsys):
    for number, name in enumerate(("atlases/a", "atlases/a_to_b", "new/b_to_c", "new/c")):
        write_volume(tmp_path / f"{name}.nii.gz", make_subject(number, (16, 17), dims=2)["image"], AFFINE)
        write_volume(tmp_path / f"{name}_dseg.nii.gz", np.ones((16, 17), np.uint8), AFFINE)
    assert join_in(tmp_path) == 43
    assert "error: a_to_b_to_c: two registrations of an atlas to an image" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """One atlas and two images, of which s_2 has a label map on another grid; the results of the other one."""
    folder = tmp_path_factory.mktemp("joined")
    for seed in range(3):
        subject, where = make_subject(seed, (16, 17), dims=2), folder / ("new" if seed else "atlases")
        write_volume(where / f"s_{seed}.nii.gz", subject["image"], AFFINE)
        write_volume(where / f"s_{seed}_dseg.nii.gz", subject["label"].astype(np.uint8)[seed // 2:], AFFINE)
    assert join_in(folder) == 0
    return folder


@pytest.mark.slow
def test_one_atlas_alone_gives_no_doubt(joined):
    head, *lines = (joined / "out/labels.tsv").read_text().splitlines()
    assert head.split("\t") == ["image", "label", "mm2", "doubt", "dice"]
    at = head.split("\t").index("doubt")
    assert lines and {line.split("\t")[at] for line in lines} == {"n/a"}
    [row] = json.loads((joined / "out/results.json").read_text())["pairs"]
    assert row["doubt"] is None and row["doubtful_percent"] is None
    assert "doubt 0.00" not in (joined / "out/segment.html").read_text()


def join_in(folder, *words):
    return OM_study.main(["segment", "--atlases", str(folder / "atlases"), "--images", str(folder / "new"), "--affine",
                          "rigid", "--device", "cpu", "--out", str(folder / "out"), *words])


def warped_in(folder):
    return {path.parent.name for path in folder.glob("out/atlases/*/warped*.nii.gz")}


@pytest.mark.slow
def test_broken_atlases_and_labels_on_another_grid_are_named_and_only_what_is_missing_is_made_again(joined, tmp_path,
                                                                                                    capsys):
    place = shutil.copytree(joined, tmp_path / "copy")
    shutil.copy(place / "atlases/s_0_dseg.nii.gz", place / "atlases/broken_dseg.nii.gz")
    (place / "atlases/broken.nii.gz").write_bytes(b"not a volume")
    assert join_in(place, "--most", "1") == 0
    printed = capsys.readouterr().err
    assert "s_2_dseg.nii.gz: the label map" in printed and "resample it to its image" in printed
    assert "Traceback" not in printed and "keeping" not in printed
    [row] = json.loads((place / "out/results.json").read_text())["pairs"]
    assert row["name"] == "s_1" and row["taken"] == ["s_0"] and 0 < row["dice"] <= 1
    assert any("the atlas broken does not vote: " in sentence for sentence in row["warnings"])
    before = {path: path.read_bytes() for path in (place / "out").glob("*/*.nii.gz")}
    (place / "out/s_1/doubt.nii.gz").unlink()
    assert len(before) == 2 and join_in(place, "--most", "1", "--strict") == 43
    assert "error: s_2 is left out" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    image, affine = read_volume(place / "new/s_1.nii.gz", 2)
    write_volume(place / "atlases/broken.nii.gz", 2 * image, affine)  # mended, and now the most similar one
    assert join_in(place, "--most", "1") == 0
    assert "keeping" not in capsys.readouterr().err.replace("ranking: keeping", "")
    [row] = json.loads((place / "out/results.json").read_text())["pairs"]
    assert row["taken"] == ["broken"]


def test_labels_of_an_atlas_on_another_grid_are_refused_before_it_is_registered(joined):
    pair = {"name": "s_2_to_s_1", **{key: joined / f"new/{name}.nii.gz" for key, name in (
        ("fixed", "s_1"), ("moving", "s_2"), ("moving_label", "s_2_dseg"))}}
    with pytest.raises(InputError, match="s_2_dseg.nii.gz: the label map is on another grid than"):
        carry(str(joined), {}, {}, "smooth", pair, joined / "none", None)


def test_an_image_that_failed_in_joining_is_only_joined_by_the_next_run(joined, tmp_path, monkeypatch, capsys):
    """Wherever images and results are then, and also through links, whose own names count."""
    place = shutil.copytree(joined, tmp_path / "moved")
    assert warped_in(place) == {"s_0_to_s_2"}
    write_volume(place / "new/s_2_dseg.nii.gz", make_subject(2, (16, 17), dims=2)["label"].astype(np.uint8), AFFINE)
    shutil.move(place / "new/s_2.nii.gz", place / "stored.nii.gz")
    (place / "new/s_2.nii.gz").symlink_to(place / "stored.nii.gz")
    (place / "out/atlases/of_mine").mkdir()
    (place / "out/atlases/of_mine/warped.nii.gz").touch()
    monkeypatch.chdir(place)
    assert join_in(place, "--out", "out") == 0
    printed = capsys.readouterr().err
    assert "out: keeping 1 of 2 images" in printed and "out/atlases: keeping 1 of 1 pairs" in printed
    rows = json.loads((place / "out/results.json").read_text())["pairs"]
    assert [row["image"] for row in rows] == [str(place / f"new/s_{number}.nii.gz") for number in (1, 2)]
    assert warped_in(place) == {"of_mine"}


@pytest.mark.slow
def test_a_label_map_that_was_corrected_is_not_made_anew(joined, tmp_path, capsys):
    place = shutil.copytree(joined, tmp_path / "copy")
    label = place / "out/s_1/label.nii.gz"
    write_volume(label, np.full((16, 17), 7, np.uint8), AFFINE)
    corrected = label.read_bytes()
    assert join_in(place) == 43
    assert f"{label}: it has changed since it was written, and would be replaced" in capsys.readouterr().err
    assert label.read_bytes() == corrected
    results = (place / "out/results.json").read_bytes()
    assert join_in(place, "--images", str(place / "new/s_2.nii.gz"), "--again") == 43  # a third run would not know it
    assert "it has other results (1 in all, such as s_1), which would be dropped" in capsys.readouterr().err
    assert (place / "out/results.json").read_bytes() == results
    label.write_bytes(corrected[:-20])  # cut off by a full disk
    assert join_in(place) == 0 and 7 not in read_label(label, 2)[0]


@pytest.mark.slow
def test_registered_atlases_that_are_to_be_kept_are_made_again_where_they_are_gone(joined, tmp_path, capsys):
    place = shutil.copytree(joined, tmp_path / "copy")
    for kept in ("1 of 2", "1 of 1"):  # the first time s_0_to_s_2, then only the failed image asks for its pair
        assert join_in(place, "--keep") == 0
        printed = capsys.readouterr().err
        assert f"keeping {kept} pairs" in printed and "keeping 1 of 2 images" in printed
        assert warped_in(place) == {"s_0_to_s_1", "s_0_to_s_2"}


def test_one_list_for_atlases_and_images_warns_once(tmp_path, capsys):
    lines = ["image,image_2,label"]
    for name in "ab":
        write_volume(tmp_path / f"{name}.nii", np.random.default_rng(0).random((10, 11), np.float32), AFFINE)
        write_volume(tmp_path / f"{name}_dseg.nii", np.ones((10, 11), np.uint8), AFFINE)
        lines.append(f"{name}.nii,{name}.nii,{name}_dseg.nii")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    both = ["--atlases", str(tmp_path / "list.csv"), "--images", str(tmp_path / "list.csv")]
    assert OM_study.main(["segment", *both, "--bids", "--out", str(tmp_path / "out")]) == 43  # no BIDS names
    assert capsys.readouterr().err.count("only the first channel of each volume is used") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, -1, 1)])
def test_the_right_and_the_front_of_a_volume_are_on_the_left_of_its_slices_however_it_is_stored(signs):
    image = np.zeros((24, 24, 24), np.float32)
    image[3:7] = 1  # its left side, in RAS
    affine = np.diag([*signs, 1.0])
    picture = np.asarray(Image.open(io.BytesIO(thumbnail(image[::signs[0]], affine))).convert("L"))
    tiles = [picture[:, 122 * number:122 * number + 120] for number in range(3)]
    for shown in tiles[1:]:
        assert (shown[:, 85:100] > 200).all() and not shown[:, :80].any()
    image = np.zeros((24, 24, 24), np.float32)
    image[:, 3:7] = 1  # its back, in RAS
    sagittal = np.asarray(Image.open(io.BytesIO(thumbnail(image[:, ::signs[1]], affine))).convert("L"))[:, :120]
    assert (sagittal[:, 85:100] > 200).all() and not sagittal[:, :80].any()


@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, 1), (-1, -1, 1)])
def test_a_picture_of_two_axes_is_shown_as_the_report_of_its_registration_shows_it(signs):
    image, affine = np.kron([[1, 2], [4, 8]], np.ones((15, 20))).astype(np.float32), np.diag([*signs, 1.0])
    shown = np.asarray(Image.open(io.BytesIO(thumbnail(image, affine))).convert("L"))
    (expected,) = middle_slices(turn(image, affine))
    np.testing.assert_array_equal(np.argsort(shown[::119, :90:89], None), np.argsort(expected[::29, ::39].T, None))


def test_the_slices_of_a_volume_have_one_scale():
    """2 mm from head to feet, 1 mm across: an axial slice of 20 x 30 mm beside slices of 40 mm."""
    image = np.random.default_rng(0).random((20, 30, 20), np.float32) + 1
    shown = np.asarray(Image.open(io.BytesIO(thumbnail(image, np.diag([1, 1, 2, 1.0])))).convert("L"))
    seen = shown.any(0)
    assert [len(run) for run in "".join("x" if each else " " for each in seen).split()] == [90, 60, 60]
    assert shown[:, 92:152].any(1).all() and shown[:, 154:].any(1).sum() == 90


def test_a_structure_has_one_colour_in_all_pictures_of_segment_and_qc(tmp_path):
    """One subject has the labels 1 and 2, the other 2 alone."""
    rows = []
    for name, values in (("a", (1, 2)), ("b", (2,))):
        label = np.zeros((20, 20), np.uint8)
        for value in values:
            label[9 * value - 7:9 * value, 4:16] = value
        write_volume(tmp_path / f"{name}.nii.gz", np.random.default_rng(0).random(label.shape, np.float32), AFFINE)
        write_volume(tmp_path / f"out/{name}/label.nii.gz", label, AFFINE)
        write_volume(tmp_path / f"out/{name}/doubt.nii.gz", np.zeros(label.shape, np.float32), AFFINE)
        rows.append({"name": name, "folder": str(tmp_path / "out" / name), "image": str(tmp_path / f"{name}.nii.gz"),
                     "labels": {str(value): {"doubt": 0.0} for value in values}, "verdict": "ok", "reason": "",
                     "voted": ["c"], "doubt": 0.1, "doubtful_percent": 1.0, "warnings": []})
    write_results(tmp_path / "out", rows, [], {"program": "segment"}, complete=True)
    pages = [write_results_page(tmp_path / "out", rows, [], argparse.Namespace(atlases="x", join="joint"), 1)]
    assert OM_study.main(["qc", "--results", str(tmp_path / "out"), "--out", str(tmp_path / "qc")]) == 0
    for page in (*pages, tmp_path / "qc/qc.html"):
        for text, values in zip(re.findall("base64,([^\"]+)", page.read_text()), ((1, 2), (2,)), strict=True):
            picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
            assert set(np.unique(picture[(picture >= GREYS)])) == {GREYS + value - 1 for value in values}, page


def test_a_thumbnail_is_a_png_with_outlines_and_doubt():
    image, label = np.linspace(0, 1, 400, dtype=np.float32).reshape(20, 20), np.zeros((20, 20), np.uint8)
    label[5:15, 5:15] = 1
    png = thumbnail(image, np.diag([1, 1, 1, 1.0]), [(label, 1)], np.ones((20, 20), np.float32))
    assert png.startswith(b"\x89PNG") and len(png) < 20_000
    picture = tile([image, label], np.ones(2), 6, (0, 1), [1], False)
    assert picture.shape == (120, 120) and (picture == GREYS + 1).sum() == 4 * 59  # a square of 60, one pixel wide
    assert palette().shape == (256, 3) and palette()[GREYS + 1].tolist() == list(COLOURS[1])
    apart = tile([image, 7 * label], np.ones(2), 6, (0, 1), [[2, 7]], False)  # a slice that only one label reaches
    assert set(np.unique(apart[apart >= GREYS])) == {GREYS + 1}
    values = np.arange(1, 139)  # left and right in turns, as in whole brains: odd ones too get all colours
    many = tile([np.zeros((120, 120)), np.tile(np.repeat(values[:120:2], 2), (120, 1))], np.ones(2), 1, (0, 1),
                [values], False)
    assert set(np.unique(many)) - {0} == set(range(GREYS, GREYS + len(COLOURS)))
    grown = tile([image, np.where(image < 0.5, -1.0, 1.0)], np.ones(2), 6, (0, 1), [], True)
    (red, _, no_blue), (no_red, _, blue) = palette()[[grown[0, -1], grown[-1, 0]]].astype(int)
    assert red > no_blue + 100 and blue > no_red + 100
