"""OM_register.py from the command line: real files, real processes."""
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

import OM_evaluate
import OM_register
from Dataloader.nifti import move_points, read_field, read_volume, write_volume
from Dataloader.points import read_points
from Dataloader.synthetic import make_subject
from Diffusion.networks import build_network
from Inference import outputs
from Inference.labels import apply_field
from Inference.load_model import load_model
from Inference.pair_lists import read_pairs_to_register
from Inference.registration import memory_needed, register
from Inference.results import kept_rows, read_results
from Inference.score_pairs import score_pair
from Runtime import checkpoint, run_lock
from Runtime.files import partial_path, sha256
from tests import tiny, warm
from tests.test_nifti import OBLIQUE, make_affine

pytestmark = pytest.mark.usefixtures("no_figures")
FLIPPED = make_affine((1, 0, 2), (-1, 1, -1), (1.3, 0.9, 1.1), (5, -3, 8))
GRIDS = {"a_0001": ((22, 26, 30), OBLIQUE), "b_0002": ((28, 24, 26), FLIPPED), "c_0003": ((22, 26, 30), OBLIQUE)}
POINTS = "x,y,z\n-3.5,2.0,1.0\n4.0,-6.0,2.5\n"


def centred(shape, affine):
    """The same grid with its centre in the origin of the world."""
    affine = affine.copy()
    affine[:3, 3] = -affine[:3, :3] @ (np.subtract(shape, 1) / 2)
    return affine


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three subjects on two grids with labels, landmarks, and a checkpoint whose network deforms a little."""
    folder = tmp_path_factory.mktemp("register")
    for seed, (name, (shape, affine)) in enumerate(GRIDS.items()):
        subject = make_subject(seed, shape)
        header = nibabel.Nifti1Header()
        header["descrip"] = name.encode()
        write_volume(folder / f"imagesTr/{name}.nii.gz", np.rint(1000 * subject["image"]).astype(np.int16),
                     centred(shape, affine), header)
        write_volume(folder / f"labelsTr/{name}.nii.gz", subject["label"].astype(np.uint8), centred(shape, affine))
    (folder / "points.csv").write_text(POINTS)
    cfg = tiny.config(data__img_size=24, data__spacing_mm=1.5, run__amp="off")
    net = build_network(cfg)
    for head in (net.fine, net.coarse.conv):
        torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    state = {**dict.fromkeys(checkpoint.REQUIRED), "format": checkpoint.FORMAT, "model": net.state_dict(),
             "config": cfg}
    checkpoint.save(folder / "run", "000001_demo_om_net.pth", state)
    return folder


def run(*words):
    return OM_register.main([str(word) for word in words])


def process(place, *words):
    """OM_register.py in a process of its own."""
    return warm.program(OM_register.main, [str(word) for word in words], place)


def image(place, name, kind="images"):
    return place / f"{kind}Tr/{name}.nii.gz"


def network(place):
    """The words for the answer of the network alone."""
    return ["--model", place / "run", "--affine", "none", "--refine", 0]


def pair_words(place, fixed="a_0001", moving="b_0002"):
    return ["--fixed", image(place, fixed), "--moving", image(place, moving), "--fixed-label",
            image(place, fixed, "labels"), "--moving-label", image(place, moving, "labels")]


def refused(capsys, words, *arguments):
    """The script prints one sentence and ends with 43."""
    assert run(*arguments) == 43
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and re.search(words, lines[0]), printed.err
    assert "Traceback" not in printed.err


@pytest.fixture(scope="module")
def pair(place):
    """One pair, registered by a process of its own, in float32: in bf16 the number of threads shows."""
    found = process(place, *pair_words(place), *network(place), "--inverse", "--points", place / "points.csv",
                    "--out", place / "pair", "--device", "cpu", "--set", "run.amp=off")
    assert found.returncode == 0, found.stderr
    return found


def test_one_pair(place, pair):
    out = place / "pair"
    assert {path.name for path in out.iterdir()} == {
        "warped.nii.gz", "warped_label.nii.gz", "field.nii.gz", "inverse_field.nii.gz", "jacobian.nii.gz",
        "picture.png", "points.csv", "results.json", "results.csv", "report.html"}
    means = json.loads(pair.stdout.strip().splitlines()[-1])
    row = json.loads((out / "results.json").read_text())["pairs"][0]
    assert means["pairs"] == 1 and means["failed"] == 0 and means["dice"] == pytest.approx(row["dice"], abs=1e-5)
    assert row["name"] == "b_0002 to a_0001" and set(row["labels"]) == {"1", "2", "3", "4", "5", "6"}
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 1 and "<table>" in page and not re.search(r"(src|href)=\"http", page)
    assert (out / "picture.png").read_bytes()[:4] == b"\x89PNG"
    with open(out / "results.csv") as file:
        assert [line["label"] for line in csv.DictReader(file)] == ["all", "1", "2", "3", "4", "5", "6"]


def test_the_files_are_what_the_function_returns(place, pair):
    model = load_model(place / "run", overrides=["run.amp=off"])
    ours = register(image(place, "a_0001"), image(place, "b_0002"), model, False, False, inverse=True)
    for name, key, which in (("field", "field", "fixed"), ("inverse_field", "inverse", "moving")):
        field, affine = read_field(place / f"pair/{name}.nii.gz")
        np.testing.assert_allclose(field, getattr(ours, key), atol=2e-3)  # numbers of threads differ
        np.testing.assert_allclose(affine, getattr(ours, which).affine, atol=1e-5)
    assert np.abs(ours.field).max() > 0.1, "the network does something"
    warped = nibabel.load(place / "pair/warped.nii.gz")
    assert warped.get_data_dtype() == np.int16 and warped.header["descrip"].item() == b"a_0001"
    np.testing.assert_allclose(np.asarray(warped.dataobj), ours.warped, atol=3)
    determinant = nibabel.load(place / "pair/jacobian.nii.gz").get_fdata()
    row = json.loads((place / "pair/results.json").read_text())["pairs"][0]
    assert 100 * (determinant <= 0).mean() == pytest.approx(row["folding_percent"], abs=1e-4)
    assert row["similarity"] == pytest.approx(ours.similarity, abs=1e-4)


def test_simpleitk_and_the_scores_agree_with_the_files(place, pair):
    reference = sitk.ReadImage(str(image(place, "a_0001")))
    moving = sitk.ReadImage(str(image(place, "b_0002")), sitk.sitkFloat32)
    field = sitk.DisplacementFieldTransform(sitk.ReadImage(str(place / "pair/field.nii.gz"), sitk.sitkVectorFloat64))
    theirs = sitk.GetArrayFromImage(sitk.Resample(moving, reference, field, sitk.sitkLinear, 0.0)).T
    ours = nibabel.load(place / "pair/warped.nii.gz").get_fdata()
    inner = sitk.ConstantPad(sitk.Crop(moving, [1] * 3, [1] * 3) * 0 + 1, [1] * 3, [1] * 3, 0.0)
    inside = sitk.GetArrayFromImage(sitk.Resample(inner, reference, field, sitk.sitkLinear, 0.0)).T > 0.999
    assert inside.mean() > 0.2 and np.abs(ours - theirs)[inside].max() < 0.51, "rounded to whole numbers"
    scores = score_pair({"fixed_label": image(place, "a_0001", "labels"), "moving_label": image(
        place, "b_0002", "labels"), "field": place / "pair/field.nii.gz", "warped_label": place
        / "pair/warped_label.nii.gz"})
    row = json.loads((place / "pair/results.json").read_text())["pairs"][0]
    for key in ("dice_before", "dice", "folding_percent", "sdlogj"):
        assert scores[key] == pytest.approx(row[key], abs=1e-3), key
    assert nibabel.load(place / "pair/warped_label.nii.gz").get_data_dtype() == np.uint8


def test_landmarks_go_into_the_moving_space(place, pair):
    field, affine = read_field(place / "pair/field.nii.gz")
    moved = read_points(place / "pair/points.csv")
    np.testing.assert_allclose(moved, move_points(read_points(place / "points.csv"), field, affine), atol=1e-3)
    assert (place / "pair/points.csv").read_text().startswith("x,y,z\n")


def test_a_saved_field_for_further_images_labels_and_landmarks(place, pair, capsys):
    assert run("--apply", place / "pair/field.nii.gz", "--moving", image(place, "b_0002"), "--moving-label",
               image(place, "b_0002", "labels"), "--points", place / "points.csv", "--fixed", image(place, "a_0001"),
               "--out", place / "applied") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["images"] == 1
    for name in ("warped", "warped_label"):
        first, again = (nibabel.load(place / f"{folder}/{name}.nii.gz") for folder in ("pair", "applied"))
        assert np.abs(first.get_fdata() - again.get_fdata()).max() <= 1 and first.get_data_dtype() == \
            again.get_data_dtype()
        np.testing.assert_allclose(again.affine, first.affine, atol=1e-5)
        assert again.header["descrip"].item() == b"a_0001"
    assert (place / "applied/points.csv").read_text() == (place / "pair/points.csv").read_text()
    several = [image(place, name) for name in GRIDS]
    assert run("--apply", place / "pair/field.nii.gz", "--moving", *several, "--out", place / "applied") == 0
    assert all((place / f"applied/warped_{name}.nii.gz").is_file() for name in GRIDS)


def test_a_list_goes_on_after_a_bad_pair(place):
    entries = [{"fixed": "imagesTr/a_0001.nii.gz", "moving": "imagesTr/c_0003.nii.gz"},
               {"fixed": "imagesTr/a_0001.nii.gz", "moving": "imagesTr/cut_0009.nii.gz", "name": "bad"},
               {"fixed": "imagesTr/c_0003.nii.gz", "moving": "imagesTr/a_0001.nii.gz"}]
    (place / "pairs.json").write_text(json.dumps({"name": "Learn2Reg", "registration_val": entries}))
    data = image(place, "c_0003").read_bytes()
    image(place, "cut_0009").write_bytes(data[:len(data) // 2])
    words = ["--pairs", place / "pairs.json", *network(place), "--learn2reg", "--out", place / "list",
             "--device", "cpu"]
    found = process(place, *words)
    assert found.returncode == 43 and found.stderr.count("error: ") == 1 and "Traceback" not in found.stderr
    assert re.search(r"error: bad: .*cut_0009.nii.gz: (truncated|not a readable)", found.stderr)
    results = json.loads((place / "list/results.json").read_text())
    assert [row["name"] for row in results["pairs"]] == ["c_0003_to_a_0001", "a_0001_to_c_0003"]
    assert results["failed"][0]["name"] == "bad" and results["mean"]["failed"] == 1
    assert json.loads(found.stdout.strip().splitlines()[-1]) == results["mean"]
    page = (place / "list/report.html").read_text()
    assert "Failed pairs" in page and "application/json" not in page, "each pair has a page of its own"
    assert "a click on a heading sorts" in page and "aria-sort" in page
    for row in results["pairs"]:
        assert f'<a href="{row["name"]}/pair.html">' in page
        own = (place / "list" / row["name"] / "pair.html").read_text()
        assert "application/json" in own and '<a href="warped.nii.gz">' in own and f'<b>{row["verdict"]}</b>' in own
        assert "Judged by itself; the page of the list also compares the pairs" in own
    for row in results["pairs"]:  # the labels beside the images were found
        assert row["dice"] is not None and (place / "list" / row["name"] / "warped_label.nii.gz").is_file()
    voxels, _ = read_field(place / "list/disp_0001_0003.nii.gz")
    field, _ = read_field(place / "list/c_0003_to_a_0001/field.nii.gz")
    np.testing.assert_allclose(voxels, field, atol=1e-4)
    before = (place / "list/c_0003_to_a_0001/field.nii.gz").stat().st_mtime_ns
    assert run(*words) == 43, "over what is there"
    assert (place / "list/c_0003_to_a_0001/field.nii.gz").stat().st_mtime_ns == before, "what is whole is kept"
    assert not list((place / "list").rglob(".*.tmp-*")), "no half-written file is left"


def on_a_strict_terminal(words):
    """Registered and scored with an output that takes nothing but UTF-8."""
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    out = words[-1]
    return OM_register.main(words) or OM_evaluate.main(["--pairs", f"{out}/results.json", "--out", f"{out}/scores"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stores such names")
def test_a_name_that_is_not_utf8_is_like_any_other(place, tmp_path):
    moving = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.nii.gz")
    shutil.copy(image(place, "b_0002"), moving)
    words = ["--fixed", image(place, "a_0001"), "--moving", moving, image(place, "c_0003"), *network(place),
             "--device", "cpu", "--out", tmp_path / "out"]
    found = warm.program(on_a_strict_terminal, [str(word) for word in words], tmp_path)
    assert found.returncode == 0 and "Traceback" not in found.stderr, found.stderr
    assert found.stdout.count(r"caf\udce9") == 2, "in the table of either program"
    page = (tmp_path / "out/report.html").read_text()
    assert '<a href="caf%E9_to_a_0001/pair.html">caf? to a_0001</a>' in page


def listed(place, folder, *more):
    """A list of two pairs and more, registered into folder/out: the words of the command."""
    pairs = [("b_0002", "a_0001"), ("c_0003", "a_0001")]
    entries = [{"moving": str(image(place, moving)), "fixed": str(image(place, fixed))} for moving, fixed in pairs]
    (folder / "pairs.json").write_text(json.dumps([*entries, *more]))
    words = ("--pairs", folder / "pairs.json", *network(place), "--device", "cpu", "--no-picture", "--inverse",
             "--out", folder / "out")
    return [str(word) for word in words]


def killed_in_the_second_pair(words):
    write_field, written = outputs.write_field, []

    def kill_or_write(path, *more):
        written.append(path.parent)
        if len(set(written)) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write_field(path, *more)
    outputs.write_field = kill_or_write
    OM_register.main(words)


@pytest.mark.slow
def test_a_kill_between_two_files_leaves_no_pair_that_looks_whole(place, tmp_path, capsys):
    words, out = listed(place, tmp_path), tmp_path / "out"
    assert OM_register.main(words) == 0, "an earlier registration, with other settings"
    first, second = (row["folder"] for row in json.loads((out / "results.json").read_text())["pairs"])
    assert (first, second) == ("b_0002_to_a_0001", "c_0003_to_a_0001")
    words += ["--start", "header"]
    killed = warm.program(killed_in_the_second_pair, words, tmp_path)
    assert killed.returncode == -9, killed.stderr
    left = json.loads((out / "results.json").read_text())
    assert not left["complete"] and [row["folder"] for row in left["pairs"]] == [first]
    assert {path.name for path in (out / second).iterdir()} == {"warped.nii.gz", "warped_label.nii.gz"}, "no old field"
    assert not (out / "report.html").exists()

    whole = (out / first / "field.nii.gz").stat().st_mtime_ns
    capsys.readouterr()
    assert OM_register.main(words) == 0
    assert "out: keeping 1 of 2 pairs from an earlier run" in capsys.readouterr().err
    assert (out / first / "field.nii.gz").stat().st_mtime_ns == whole
    results = json.loads((out / "results.json").read_text())
    assert results["complete"] and results["mean"]["pairs"] == 2 and (out / "report.html").is_file()
    for row in results["pairs"]:
        assert set(row["files"]) == {f"{row['folder']}/{name}.nii.gz" for name in (
            "warped", "warped_label", "field", "inverse_field", "jacobian")}
        for name, entry in row["files"].items():
            assert sha256(out / name) == entry["sha256"] and (out / name).stat().st_size == entry["bytes"]


def test_only_what_is_whole_and_was_asked_for_alike_is_kept(place, tmp_path):
    words, out = listed(place, tmp_path), tmp_path / "out"
    assert OM_register.main(words) == 0
    pairs, earlier = read_pairs_to_register(tmp_path / "pairs.json"), read_results(out)
    settings, names = earlier["settings"], [pair["name"] for pair in pairs]
    assert list(kept_rows(earlier, settings, pairs, out)) == names
    assert kept_rows({**earlier, "version": "0.0.1"}, settings, pairs, out) == {}
    other = json.loads(json.dumps(settings))
    other["config"]["registration.rounds"] += 1
    for changed in (other, {**settings, "weights": "of another model"}, {**settings, "start": "header"}, None):
        assert kept_rows(earlier, changed, pairs, out) == {}
    moved = [{**pairs[0], "moving": pairs[1]["moving"]}, pairs[1]]
    assert list(kept_rows(earlier, settings, moved, out)) == names[1:], "another volume of the same name"
    field = out / names[0] / "field.nii.gz"
    content = field.read_bytes()
    for damaged in (content[:-9], content[:-9] + bytes(9), b""):
        field.write_bytes(damaged)
        assert list(kept_rows(earlier, settings, pairs, out)) == names[1:]
    field.unlink()
    assert list(kept_rows(earlier, settings, pairs, out)) == names[1:]


def test_a_folder_in_use_is_refused(place, pair, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    token = run_lock.lock(tmp_path / "out", 60.0)
    words = [*pair_words(place), "--model", "none", "--affine", "--device", "cpu"]
    refused(capsys, "out is in use by process .* name another --out", *words, "--out", tmp_path / "out")
    words = ["--apply", place / "pair/field.nii.gz", "--moving", image(place, "b_0002")]
    refused(capsys, "out is in use by process .* name another --out", *words, "--out", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lock.json"}
    run_lock.unlock(tmp_path / "out", token)


def test_a_pair_that_does_not_fit_in_memory_is_refused_before_it_is_read(place, tmp_path, capsys):
    """3000^3 voxels of one byte, of which the disk holds none."""
    header = nibabel.Nifti1Image(np.zeros((1, 1, 1), np.uint8), np.eye(4)).header
    header.set_data_shape((3000, 3000, 3000))
    with open(tmp_path / "huge.nii", "wb") as file:
        header.write_to(file)
        file.truncate(352 + 3000 ** 3)
    refused(capsys, "huge.nii and .*c_0003.nii.gz: to register them takes up to [0-9]{3,4}[.][0-9] GiB of memory, and "
            "[0-9.]+ GiB are free; resample", "--fixed", tmp_path / "huge.nii", "--moving", image(place, "c_0003"),
            "--out", tmp_path / "out")


@pytest.mark.parametrize("workers, label, warns", [(1, False, False), (2, False, True), (1, True, True)])
def test_pairs_that_do_not_fit_in_memory_together_or_with_labels_are_a_warning(workers, label, warns, place, tmp_path,
                                                                               capsys, monkeypatch):
    """Two pairs of which each takes all but a MiB of what is free, without its labels; all zeros,
    they are refused after that."""
    header = nibabel.Nifti1Image(np.zeros((1, 1, 1), np.uint8), np.eye(4)).header
    header.set_data_shape((250, 250, 250))
    with open(tmp_path / "large.nii", "wb") as file:
        header.write_to(file)
        file.truncate(352 + 250 ** 3)
    free = memory_needed((250, 250, 250), (250, 250, 250), 1, False) + 2 ** 20
    monkeypatch.setattr("Runtime.memory.measure", lambda _: {"host_free": free})
    pair = {key: str(tmp_path / "large.nii") for key in ("fixed", "moving", "moving_label")[:2 + label]}
    (tmp_path / "pairs.json").write_text(json.dumps([{**pair, "name": name} for name in "ab"]))
    run("--pairs", tmp_path / "pairs.json", "--workers", str(workers), "--out", tmp_path / "out")
    printed = capsys.readouterr().err
    assert ("warning: only " in printed) == warns and ("use fewer --workers" in printed) == (workers > 1)


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    [], ["--inverse"], ["--similarity", "mind"],
    ["--fixed-channels", *["0.nii.gz"] * 2, "--moving-channels", *["1.nii.gz"] * 2]])
def test_a_pair_stays_below_the_memory_that_it_says(words, tmp_path):
    for seed, shape in enumerate([(96, 112, 104), (88, 120, 96)]):
        write_volume(tmp_path / f"{seed}.nii.gz", make_subject(seed, shape)["image"], np.eye(4))
    # Linux counts what a process had before its exec, all that started it had: so one of little memory starts it.
    small = ("import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
             "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)")
    command = [sys.executable, "-c", small, sys.executable, "OM_register.py", "--fixed", tmp_path / "0.nii.gz",
               "--moving", tmp_path / "1.nii.gz", "--out", tmp_path / "out", "--refine", "3",
               *(tmp_path / word if word.endswith(".gz") else word for word in words)]
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most = float(re.search("memory: up to ([0-9.]+) GiB", done.stderr)[1]) + 0.05  # as rounded
    assert 0.4 * most < int(done.stdout.splitlines()[-1]) / 2 ** 20 < most


@pytest.mark.slow
def test_a_pair_that_needs_more_memory_than_there_is_is_named_and_the_others_are_done(place, tmp_path):
    tiny.write_large(tmp_path / "large_0007.nii.gz")
    words = listed(place, tmp_path, {"fixed": str(tmp_path / "large_0007.nii.gz"), "name": "large", "moving": str(
        image(place, "c_0003"))})
    done = tiny.run_in_little_memory("OM_register", *words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 43 and len(errors) == 1, done.stderr
    assert re.search("error: large: .*large_0007.nii.gz and .*c_0003.nii.gz: there is not enough memory", errors[0])
    assert json.loads((tmp_path / "out/results.json").read_text())["mean"]["pairs"] == 2


@pytest.mark.slow
def test_too_little_memory_to_apply_a_field_is_one_sentence(place, pair, tmp_path):
    tiny.write_large(tmp_path / "large.nii.gz")
    done = tiny.run_in_little_memory("OM_register", "--apply", place / "pair/field.nii.gz", "--moving",
                                     tmp_path / "large.nii.gz", "--out", tmp_path / "out")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 43 and len(errors) == 1 and "out: there is not enough memory" in errors[0], done.stderr


def test_results_are_a_list_to_be_scored(place, tmp_path, capsys, monkeypatch):
    """As the README has it, from any folder."""
    words = listed(place, tmp_path, {"fixed": "nowhere.nii.gz", "moving": "nowhere.nii.gz", "name": "lost"})
    assert OM_register.main(words) == 43
    results = json.loads((tmp_path / "out/results.json").read_text())
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    scored = ["--pairs", "out/results.json", "--out", "scores"]
    assert OM_evaluate.main(scored) == 0
    assert "lost was not registered and is not scored" in capsys.readouterr().err
    scores = json.loads((tmp_path / "scores/scores.json").read_text())["pairs"]
    for ours, theirs in zip(scores, results["pairs"], strict=True):
        assert ours["name"] == theirs["name"]
        for key in ("dice_before", "dice", "folding_percent", "sdlogj"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-3), key
    field = tmp_path / "out" / results["pairs"][0]["folder"] / "field.nii.gz"
    shutil.copy(tmp_path / "out" / results["pairs"][1]["folder"] / "field.nii.gz", field)
    assert OM_evaluate.main(scored) == 43
    assert re.search("error: b_0002_to_a_0001: .*field.nii.gz has changed since it was written: register this pair "
                     "again", capsys.readouterr().err)
    assert len(json.loads((tmp_path / "scores/scores.json").read_text())["pairs"]) == 1
    (tmp_path / "out/results.json").write_text(json.dumps({**results, "complete": False}))
    OM_evaluate.main(scored)
    assert "the registration did not finish" in capsys.readouterr().err


def test_labels_of_a_learn2reg_list(place):
    entries = [{"fixed": "imagesTr/a_0001.nii.gz", "moving": "imagesTr/b_0002.nii.gz"}]
    listed = [{"image": "imagesTr/b_0002.nii.gz", "label": "labelsTr/c_0003.nii.gz"}]
    path = place / "learn2reg.json"
    several = {"image": ["imagesTr/b_0002.nii.gz", "imagesTr/a_0001.nii.gz"], "label": "labelsTr/a_0001.nii.gz"}
    listed += [several, {"image": "imagesTr/b_0002.nii.gz", "label": ["x"]}, None]  # channels: no volume of a pair
    path.write_text(json.dumps({"registration_val": entries, "registration_test": [entries[0]] * 1, "pairs": [],
                                "training": listed}))
    pair, = read_pairs_to_register(path, "registration_val")
    assert pair["moving_label"].name == "c_0003.nii.gz" and pair["fixed_label"] == image(place, "a_0001", "labels")
    assert pair["name"] == "b_0002_to_a_0001" and read_pairs_to_register(path)[0]["fixed"] == image(place, "a_0001")


def test_without_a_model_by_refinement(place):
    assert run(*pair_words(place), "--affine", "none", "--refine", 6, "--out", place / "refined", "--set",
               "refine.levels=2", "--device", "cpu", "--no-picture") == 0
    row = json.loads((place / "refined/results.json").read_text())["pairs"][0]
    assert row["similarity"] > row["similarity_before"] and row["seconds_of"]["refine"] > 0


def test_slices(tmp_path, capsys):
    for seed, name in enumerate(("f", "m")):
        subject = make_subject(seed, (40, 36), dims=2)
        write_volume(tmp_path / f"{name}.nii.gz", subject["image"], make_affine(signs=(-1, 1, 1)))
        write_volume(tmp_path / f"{name}_label.nii.gz", subject["label"], make_affine(signs=(-1, 1, 1)))
    (tmp_path / "points.csv").write_text("1,2,3\n")
    words = ["--fixed", tmp_path / "f.nii.gz", "--moving", tmp_path / "m.nii.gz", "--fixed-label",
             tmp_path / "f_label.nii.gz", "--moving-label", tmp_path / "m_label.nii.gz", "--points",
             tmp_path / "points.csv", "--refine", 4, "--dims", 2, "--out", tmp_path / "out",
             "--set", "refine.levels=1", "--inverse", "--device", "cpu"]
    assert run(*words) == 0
    assert read_field(tmp_path / "out/field.nii.gz", 2)[0].shape == (2, 40, 36)
    assert read_points(tmp_path / "out/points.csv")[0, 2] == pytest.approx(3)
    assert nibabel.load(tmp_path / "out/warped.nii.gz").shape == (40, 36, 1)
    seconds = json.loads((tmp_path / "out/results.json").read_text())["pairs"][0]["seconds_of"]
    assert seconds["network"] == 0 < seconds["affine"], "the network that comes along is not for slices"
    refused(capsys, "field.nii.gz: the field has a single plane; for 2D volumes add --dims 2", "--apply",
            tmp_path / "out/field.nii.gz", "--moving", tmp_path / "m.nii.gz", "--out", tmp_path / "moved")


@pytest.mark.parametrize("axes, degrees", [((0, 1, 2), (0, 0, 0)), ((0, 2, 1), (0, 0, 0)), ((2, 0, 1), (10, 20, 30))])
def test_slices_of_two_parallel_planes(tmp_path, axes, degrees):
    """9 mm apart: SimpleITK finds the moving slice, and points move into its plane; the error is that in the plane."""
    grids = [make_affine(axes, (-1, 1, 1), (1, 1.2, 3), degrees) for _ in range(2)]
    grids[1][:3, 3] += 3 * grids[1][:3, 2]
    for seed, (name, affine) in enumerate(zip("fm", grids)):
        write_volume(tmp_path / f"{name}.nii.gz", make_subject(seed, (40, 36), dims=2)["image"], affine)
        at = affine @ np.array([[12, 20, 0, 1], [25, 15 + seed, 0, 1]]).T
        np.savetxt(tmp_path / f"{name}.csv", at[:3].T, delimiter=",")
    out, other = tmp_path / "out", tmp_path / "m.nii.gz"
    assert run("--fixed", tmp_path / "f.nii.gz", "--moving", other, "--points", tmp_path / "f.csv", "--moving-points",
               tmp_path / "m.csv", "--inverse", "--also", "h5", "--refine", 4, "--set", "refine.levels=1", "--device",
               "cpu", "--no-picture", "--out", out) == 0
    field = read_field(out / "field.nii.gz", 2)[0]
    for name, target, source in (("field", "f", "m"), ("inverse_field", "m", "f")):
        target, source = (sitk.ReadImage(str(tmp_path / f"{each}.nii.gz"), sitk.sitkFloat32)
                          for each in (target, source))
        theirs = sitk.Resample(source, target, sitk.ReadTransform(str(out / f"{name}.h5")), sitk.sitkLinear, 0.0)
        moved = sitk.GetArrayFromImage(theirs)[0].T
        grid, back = (grids if name == "field" else grids[::-1])
        array = sitk.GetArrayFromImage(source)[0].T
        ours = apply_field(array, back, read_field(out / f"{name}.nii.gz", 2)[0], grid)
        assert moved.max() > 0.8 * array.max() and (abs(moved - ours) < 1e-3).mean() > 0.95
    points = read_points(out / "points.csv")
    np.testing.assert_allclose((np.linalg.inv(grids[1]) @ [*points.T, [1, 1]])[2], 0, atol=1e-4)
    apart = np.linalg.norm(points - read_points(tmp_path / "m.csv"), axis=1).mean()
    row = json.loads((out / "results.json").read_text())["pairs"][0]
    assert row["tre_mm"] == pytest.approx(apart, abs=1e-4) and row["tre_before_mm"] == pytest.approx(0.6)
    assert run("--apply", out / "field.h5", "--moving", other, "--points", tmp_path / "f.csv", "--dims", 2, "--out",
               tmp_path / "again") == 0
    np.testing.assert_allclose(read_points(tmp_path / "again/points.csv"), points, atol=1e-4)
    for name in ("again/warped.nii.gz", "out/warped.nii.gz"):
        found = read_volume(tmp_path / name, 2)[0]
        np.testing.assert_allclose(found, apply_field(read_volume(other, 2)[0], grids[1], field, grids[0]), atol=1e-3)


def test_volumes_apart_are_said_on_the_terminal_and_on_the_page(place, tmp_path, capsys):
    array, affine = read_volume(image(place, "c_0003"))
    affine[:3, 3] += [25, 0, 0]
    write_volume(tmp_path / "away.nii.gz", array, affine)
    words = ["--fixed", image(place, "a_0001"), "--moving", tmp_path / "away.nii.gz", *network(place),
             "--device", "cpu", "--no-picture"]
    assert run(*words, "--start", "header", "--out", tmp_path / "out") == 0
    assert re.search(r"warning: .*away.nii.gz covers \d+ % .*--affine or --start centre", capsys.readouterr().err)
    assert "--start centre" in (tmp_path / "out/report.html").read_text()
    assert run(*words, "--start", "centre", "--out", tmp_path / "out") == 0
    assert "field of view" not in capsys.readouterr().err


def test_a_failed_pair_is_told_everywhere_and_ends_a_strict_run(place, tmp_path, capsys):
    array, affine = read_volume(image(place, "a_0001"))
    noise = np.random.default_rng(0).normal(size=array.shape).astype(np.float32)
    write_volume(tmp_path / "noise.nii.gz", noise, affine)
    (tmp_path / "points.csv").write_text("x,y,z\n1,2,3\n")
    words = ["--fixed", image(place, "a_0001"), "--moving", tmp_path / "noise.nii.gz", "--affine", "none",
             "--refine", 5, "--points", tmp_path / "points.csv", "--moving-points", tmp_path / "points.csv",
             "--no-picture", "--device", "cpu", "--out", tmp_path / "out"]
    assert run(*words) == 0
    assert re.search("warning: noise to .*: failed, .*still differ strongly", capsys.readouterr().err)
    results = json.loads((tmp_path / "out/results.json").read_text())
    row, = results["pairs"]
    assert row["verdict"] == "failed" and "still differ strongly" in row["reason"] and row["tre_before_mm"] == 0
    assert results["mean"]["verdict_failed"] == 1 and row["tre_mm"] > 0
    header, line = csv.reader((tmp_path / "out/results.csv").read_text().splitlines())
    assert dict(zip(header, line))["verdict"] == "failed"
    page = (tmp_path / "out/report.html").read_text()
    assert '<li class="failed"><b>failed</b> the volumes still differ' in page
    assert run(*words, "--strict") == 43
    assert re.search("error: noise to .*: failed, .*still differ strongly", capsys.readouterr().err)


def truncated(place, folder):
    """A volume whose file ends early."""
    path = folder / "truncated.nii.gz"
    path.write_bytes(image(place, "b_0002").read_bytes()[:3000])
    return path


def test_labels_that_do_not_belong_to_their_image(place, tmp_path, capsys):
    words = ["--fixed", image(place, "a_0001"), "--moving", image(place, "b_0002"), *network(place), "--out",
             tmp_path / "out", "--device", "cpu", "--moving-label"]
    refused(capsys, "a_0001.nii.gz: the label is on another grid than its image .*b_0002.nii.gz", *words,
            image(place, "a_0001", "labels"))
    label = nibabel.load(image(place, "b_0002", "labels"))
    far = label.affine.copy()
    far[:3, 3] += 500
    write_volume(tmp_path / "far.nii.gz", np.asarray(label.dataobj), far)
    refused(capsys, "far.nii.gz: the label lies outside its image .*b_0002.nii.gz", *words, tmp_path / "far.nii.gz")
    write_volume(tmp_path / "half.nii.gz", np.asarray(label.dataobj) * 0.5, label.affine)
    refused(capsys, "half.nii.gz: .* label voxels are not whole", *words, tmp_path / "half.nii.gz")


@pytest.mark.parametrize("number, words", [(0, "other.nii.gz: it has no label above 0, so no labels are scored"),
                                           (9, "other.nii.gz have no common label, so no labels are scored")])
def test_labels_that_a_pair_does_not_share_fail_no_registration(place, tmp_path, capsys, number, words):
    label = nibabel.load(image(place, "b_0002", "labels"))
    write_volume(tmp_path / "other.nii.gz", np.where(label.get_fdata() > 0, number, 0).astype(np.uint8), label.affine)
    assert run(*pair_words(place)[:-1], tmp_path / "other.nii.gz", "--model", "none", "--affine", "none", "--refine", 2,
               "--no-picture", "--out", tmp_path / "out", "--device", "cpu") == 0
    assert words in capsys.readouterr().err
    content = json.loads((tmp_path / "out/results.json").read_text())
    row = content["pairs"][0]
    assert "dice" not in row and not row["labels"] and row["verdict"] != "failed" and "labels" not in row["reason"]
    assert OM_evaluate.main(["--pairs", str(tmp_path / "out/results.json"), "--out", str(tmp_path / "scores")]) == 0
    assert "dice" not in json.loads((tmp_path / "scores/scores.json").read_text())["mean"]


def test_bad_fields_to_apply(place, pair, tmp_path, capsys):
    field = ["--apply", place / "pair/field.nii.gz", "--out", tmp_path / "out"]
    refused(capsys, r"field.nii.gz: the field is on another grid than .*b_0002.nii.gz \(shapes", *field, "--moving",
            image(place, "a_0001"), "--fixed", image(place, "b_0002"))
    refused(capsys, "a_0001.nii.gz: shape .* is not a displacement field", "--apply", image(place, "a_0001"),
            "--moving", image(place, "a_0001"), "--out", tmp_path / "out")
    refused(capsys, "--apply needs something to move", *field)
    for words in (["--refine", 3], ["--refine", 0], ["--start", "centre"], ["--learn2reg"], ["--list", "x"],
                  ["--strict"]):
        refused(capsys, f"leave out {words[0]}.", *field, "--moving", image(place, "a_0001"), *words)
    refused(capsys, "apply inverse_field.nii.gz", *field, "--moving", image(place, "a_0001"), "--inverse")


def test_a_start_that_the_result_would_replace_is_refused(place, pair, tmp_path, capsys):
    shutil.copy(place / "pair/field.nii.gz", tmp_path)
    shutil.copy(place / "pair/field.nii.gz", tmp_path / "disp_0001_0002.nii.gz")
    kept = (tmp_path / "field.nii.gz").read_bytes()
    words = [*pair_words(place), "--model", "none", "--out", tmp_path, "--initial"]
    refused(capsys, "field.nii.gz: it is not of an earlier run", *words, tmp_path / "field.nii.gz")
    assert (tmp_path / "field.nii.gz").read_bytes() == kept
    (tmp_path / "field.nii.gz").unlink()
    refused(capsys, "disp_0001_0002.nii.gz: a result with the same name would overwrite this input", *words,
            tmp_path / "disp_0001_0002.nii.gz", "--learn2reg")
    assert (tmp_path / "disp_0001_0002.nii.gz").read_bytes() == kept


def test_two_files_that_would_get_one_name_are_refused_and_replace_nothing(place, pair, tmp_path, capsys):
    several = [tmp_path / folder / "T1.nii.gz" for folder in ("a", "b")]
    for path in several:
        path.parent.mkdir()
        shutil.copy(image(place, "b_0002"), path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/warped_T1.nii.gz").write_bytes(b"of somebody else")
    refused(capsys, "warped_T1.nii.gz: two of the files would get this name", "--apply", place / "pair/field.nii.gz",
            "--moving", *several, "--out", tmp_path / "out")
    assert (tmp_path / "out/warped_T1.nii.gz").read_bytes() == b"of somebody else"
    two = ["--apply", place / "pair/field.nii.gz", "--moving", several[0], image(place, "b_0002"), "--out"]
    refused(capsys, "warped_T1.nii.gz: it is not of an earlier run", *two, tmp_path / "out")
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [b"of somebody else"]
    assert run(*two, tmp_path / "own") == 0 == run(*two, tmp_path / "own"), "what it has written itself it replaces"
    points = ["--apply", place / "pair/field.nii.gz", "--points", place / "points.csv", "--out", tmp_path / "own"]
    assert run(*points) == 0 == run(*two, tmp_path / "own") == run(*points)


def test_what_ends_a_registration_after_it_is_told_before(place, tmp_path, capsys, monkeypatch):
    """A missing package, and unequal numbers of landmarks: here the moving volume has not been read yet."""
    words = ["--fixed", image(place, "a_0001"), "--moving", truncated(place, tmp_path), "--device", "cpu",
             "--out", tmp_path / "out"]
    (tmp_path / "one.csv").write_text("1,2,3\n")
    refused(capsys, "points.csv has 2 landmarks and .*one.csv has 1", *words, "--points", place / "points.csv",
            "--moving-points", tmp_path / "one.csv")
    refused(capsys, "one.csv: landmarks of the moving volume score nothing alone", *words, "--moving-points",
            tmp_path / "one.csv")
    refused(capsys, "--fixed-label scores nothing alone", *words, "--fixed-label", image(place, "a_0001", "labels"))
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    for word in ("h5", "nrrd", "mha"):
        refused(capsys, f"[.]{word} files need SimpleITK: pip install", *words, "--also", "mat", word)


@pytest.mark.parametrize("more, words", [
    (["--model", "nowhere.pth"], "nowhere.pth: no such model"), (["--refine", "-3"], "--refine -3"),
    (["--affine", "none", "--refine", "0"], "nothing would be registered"),
    (["--list", "registration_val"], "--list chooses one of the lists in a --pairs file"),
    (["--model", "RUN", "--dims", "2"], "--config and --dims are for --model none"),
    (["--model", "RUN", "--set", "refine.speed=3"], "unknown key refine.speed"),
    (["--model", "RUN", "--pairs", "list.json"], "give either --pairs, or --fixed and --moving"),
    (["--model", "none", "--refine", "2", "--config", "no.yaml"], "no.yaml: there is no such config")])
def test_bad_options(place, tmp_path, capsys, more, words):
    more = [place / "run" if word == "RUN" else word for word in more]
    refused(capsys, words, "--fixed", image(place, "a_0001"), "--moving", image(place, "b_0002"), "--device", "cpu",
            "--out", tmp_path / "out", *more)


def test_the_output_cannot_be_a_file(place, tmp_path, capsys):
    (tmp_path / "out").write_text("here I am")
    refused(capsys, "out: the folder cannot be created", *pair_words(place), *network(place), "--device",
            "cpu", "--out", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "here I am"


def test_results_never_take_the_place_of_what_is_read(place, tmp_path, capsys):
    shutil.copy(place / "points.csv", tmp_path / "points.csv")
    shutil.copy(image(place, "b_0002"), tmp_path / "warped.nii.gz")
    words = ["--fixed", image(place, "a_0001"), *network(place), "--out", tmp_path, "--device", "cpu"]
    for moving in (image(place, "b_0002"), tmp_path / "warped.nii.gz"):
        refused(capsys, "warped.nii.gz: it is not of an earlier run", *words, "--moving", moving)
    (tmp_path / "results.csv").mkdir()
    refused(capsys, "results.csv: it is not of an earlier run", *words, "--moving", image(place, "b_0002"))
    assert not (tmp_path / "results.json").exists(), "once the folder is gone, the file would be taken for a result"
    (tmp_path / "results.csv").rmdir()
    (tmp_path / "warped.nii.gz").unlink()
    refused(capsys, "points.csv: it is not of an earlier run", *words, "--moving", image(place, "b_0002"))
    (tmp_path / "points.csv").unlink()
    assert run(*words, "--moving", image(place, "b_0002")) == 0
    kept = [(tmp_path / name).read_bytes() for name in ("results.json", "report.html")]
    again = (*words, "--moving", tmp_path / "warped.nii.gz")
    refused(capsys, "warped.nii.gz: a result with the same name would overwrite this input", *again)
    assert [(tmp_path / name).read_bytes() for name in ("results.json", "report.html")] == kept
    assert run(*words, "--moving", image(place, "c_0003")) == 0, "a single pair takes the place of another"


def test_results_never_take_the_place_of_others(place, pair, tmp_path, capsys):
    """A later list drops no results of pairs that it does not name, and an applied field replaces none."""
    out = tmp_path / "out"
    assert OM_register.main(listed(place, tmp_path)) == 0
    kept = (out / "results.json").read_bytes()
    names = [row["name"] for row in json.loads(kept)["pairs"]]
    words = [*network(place), "--device", "cpu", "--out"]
    refused(capsys, f"it has other results .{len(names)} in all, such as {names[0]}.,", *pair_words(place), *words, out)
    refused(capsys, "it has other results", "--fixed", image(place, "c_0003"), "--moving",
            image(place, "a_0001"), image(place, "b_0002"), *words, out)
    refused(capsys, "it is a folder of images", "--fixed", image(place, "c_0003"), "--moving", out, *words, out)
    field = out / names[0] / "field.nii.gz"
    refused(capsys, "warped.nii.gz: a result with the same name would overwrite", "--apply", field, "--moving",
            image(place, "b_0002"), "--out", field.parent)
    assert (out / "results.json").read_bytes() == kept
    assert run("--apply", field, "--points", place / "points.csv", "--out", field.parent) == 0
    assert (field.parent / "points.csv").is_file()
    words = listed(place, tmp_path)
    (tmp_path / "pairs.json").write_text(json.dumps(json.loads((tmp_path / "pairs.json").read_text())[:1]))
    refused(capsys, f"or remove folders such as {out / names[1]}", *words)
    shutil.rmtree(out / names[1])
    assert OM_register.main(words) == 0 and list(read_results(out)["pairs"]) == names[:1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence(place, pair, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    partial_path(tmp_path / "out/points.csv").symlink_to("/dev/full")
    refused(capsys, "No space left on device; results cannot be written", "--apply", place / "pair/field.nii.gz",
            "--points", place / "points.csv", "--out", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_learn2reg_names_need_numbers_and_one_grid(place, tmp_path, capsys):
    shutil.copy(image(place, "a_0001"), tmp_path / "nameless.nii.gz")
    words = [*network(place), "--out", tmp_path / "out", "--learn2reg", "--device", "cpu"]
    refused(capsys, "names fields by the numbers", "--fixed", image(place, "c_0003"), "--moving",
            tmp_path / "nameless.nii.gz", *words)
    refused(capsys, "--learn2reg needs both volumes on one grid", "--fixed", image(place, "a_0001"), "--moving",
            image(place, "b_0002"), *words)
