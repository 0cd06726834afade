"""OM_augment.py and the functions behind it: geometry, files, repeatability, the dictionary transform, bad input."""
import csv
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

import OM_augment
import OM_register
from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_field, read_label, read_volume, write_volume
from Dataloader.prepare import on_grid
from Dataloader.synthetic import make_subject
from Diffusion.metrics import average, dice
from Diffusion.networks import build_network
from Inference import augment_report, augment_volumes, results
from Inference.augmentation import augment, deform, measure, place, training_grid
from Inference.draws import claim_folder
from Inference.labels import apply_label
from Inference.load_model import load_model
from Inference.monai_transforms import RandDeformationd
from Inference.registration import register, total_field
from Runtime import checkpoint, run_lock
from Runtime.config import load_config
from Runtime.errors import InputError
from tests import launching
from tests.test_nifti import OBLIQUE, make_affine
from tests.tiny import CONFIG, ROOT, config, run_in_little_memory, write_large

pytestmark = pytest.mark.usefixtures("no_figures")
SHAPE = (24, 28, 33)
FLIPPED = make_affine((1, 2, 0), (1, -1, 1), (1.3, 1.0, 0.8), (20, -10, 8))
SMALL = ["diffusion.grids=[4,8]", "data.img_size=24", "data.spacing_mm=0"]
WORDS = ["--model", "none", "--config", CONFIG, *[word for key in SMALL for word in ("--set", key)]]
CFG = load_config(CONFIG, SMALL)


@functools.cache
def first_subject():
    """Not to be changed."""
    return make_subject(0, SHAPE)


def write_subject(folder, number, affine=OBLIQUE, shape=SHAPE):
    """One subject in the Decathlon layout: image of int16 up to 1000, label of uint8."""
    subject = make_subject(number, shape)
    header = nibabel.Nifti1Header()
    header["descrip"], header["cal_max"] = b"a scanner", 777
    header.set_xyzt_units("mm", "sec")
    image = (1000 * subject["image"]).astype(np.int16)
    for kind, array in (("imagesTr", image), ("labelsTr", subject["label"].astype(np.uint8))):
        write_volume(folder / kind / f"s_{number:03d}.nii.gz", array, affine, header)
    return folder


def run(*words):
    return OM_augment.main([str(word) for word in words])


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Two subjects on two grids, s_001 and s_002, in the folder data, three copies of each in out; to be read only."""
    folder = tmp_path_factory.mktemp("copies")
    for number, affine in ((1, OBLIQUE), (2, FLIPPED)):
        write_subject(folder / "data", number, affine)
    assert run("--data", folder / "data", *WORDS, "--out", folder / "out", "--draws", 3) == 0
    return folder


@pytest.fixture
def data(copies, tmp_path):
    """The two subjects in a folder data that may be changed."""
    shutil.copytree(copies / "data", tmp_path / "data")
    return tmp_path


def said_before(capsys, *words):
    """What the program says before it draws."""
    threads = torch.get_num_threads()
    augment_volumes.make_job(OM_augment.parse_arguments([str(word) for word in (*words, "--out", "nowhere")]))
    torch.set_num_threads(threads)
    return capsys.readouterr().err


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def table_of(folder):
    with open(folder / "draws.csv", newline="", encoding="utf-8") as table:
        return list(csv.DictReader(table))


def contents(folder):
    """All files of a result but the page, which has the time on it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "report.html"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of a tiny network with random weights, whose predictions are small but not zero."""
    folder = tmp_path_factory.mktemp("model")
    changes = {"model__condition_type": "slice", "diffusion__timesteps": 12, "run__amp": "off"}
    cfg = config(folder, **changes)
    net = build_network(cfg, "cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    state = {"format": 1, "model": net.state_dict(), "optimizer": {}, "epoch": 1, "step_in_epoch": 0, "step": 1,
             "config": cfg}
    checkpoint.save(folder, "000001_demo_om_net.pth", state)
    return folder / "000001_demo_om_net.pth"


# ---------------------------------------------------------------------------------------------------------------------
# Geometry
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("affine", [OBLIQUE, FLIPPED, make_affine(signs=(-1, -1, 1), spacing=(0.7, 1, 2.1))])
def test_a_deformation_of_the_world_is_the_same_on_every_grid(affine):
    cfg = {**CFG, "data.img_size": [48, 44, 52], "data.spacing_mm": 1.5}
    grid_affine = training_grid(np.zeros(SHAPE), affine, cfg)
    matrix = np.array([[0.05, -0.02, 0.01], [0.03, -0.04, 0.02], [-0.01, 0.06, 0.03]])
    shift = np.array([1.5, -2.0, 0.7])

    def bent(shape, affine):
        """The displacement p -> matrix p + shift of the world, in voxels of a grid."""
        world = np.tensordot(affine[:3, :3], np.indices(shape), 1) + affine[:3, 3].reshape(3, 1, 1, 1)
        moved = np.tensordot(matrix, world, 1) + shift.reshape(3, 1, 1, 1)
        return np.tensordot(np.linalg.inv(affine[:3, :3]), moved, 1)

    field = torch.from_numpy(bent((48, 44, 52), grid_affine)[None].astype(np.float32))
    where = np.linalg.inv(grid_affine) @ affine
    found = total_field(field, where, SHAPE)
    voxels = np.tensordot(where[:3, :3], np.indices(SHAPE), 1) + where[:3, 3].reshape(3, 1, 1, 1)
    inside = np.all((voxels >= 0) & (voxels <= np.reshape([47, 43, 51], (3, 1, 1, 1))), axis=0)
    assert inside.mean() > 0.5
    assert np.abs(found - bent(SHAPE, affine))[:, inside].max() < 1e-3


@pytest.mark.slow
def test_the_grid_is_that_of_the_training(copies):
    for number, changes in ((1, {}), (2, {"data.crop_above": 0.2}), (2, {"data.img_size": [20, 26, 30],
                                                                        "data.spacing_mm": 1.1})):
        cfg = {**CFG, **changes}
        path = copies / f"data/imagesTr/s_00{number}.nii.gz"
        found = on_grid({"image": path, "label": None, "mask": None}, cfg)
        image, affine = read_volume(path)
        placed, grid_affine = place(image, affine, cfg)
        assert np.array_equal(placed[0, 0].numpy(), found["image"])
        assert np.array_equal(grid_affine, found["grid_affine"])
        assert np.array_equal(training_grid(image, affine, cfg), grid_affine)


def test_simpleitk_finds_the_same_images(copies):
    items = read_datalist(copies / "out")
    for item in (*items[:2], *items[3:5]):  # two copies of each subject
        source = copies / "data/imagesTr" / f"{item['subject']}.nii.gz"
        original = sitk.ReadImage(str(source), sitk.sitkFloat32)
        field = sitk.ReadImage(str(item["image"]).replace("imagesTr", "fieldsTr"), sitk.sitkVectorFloat64)
        warped = sitk.Resample(original, original, sitk.DisplacementFieldTransform(field), sitk.sitkLinear, -1e4)
        theirs, ours = sitk.GetArrayFromImage(warped), sitk.GetArrayFromImage(sitk.ReadImage(str(item["image"])))
        seen = theirs > -1  # where the field does not point out of the image
        assert seen.mean() > 0.8 and np.abs(theirs - ours)[seen].max() < 0.5 + 1e-3 * 1000


def test_measures_of_known_fields():
    affine = np.diag([2.0, 1.0, 0.5, 1.0])
    field = np.zeros((3, 10, 30, 20), np.float32)
    field[0] = 1.5  # 3 mm, of sides of 20, 30 and 10 mm
    found = measure(field, affine)
    assert found == pytest.approx({"mean": 10, "p95": 10, "max": 10, "folding": 0})
    field[0] = -2.0 * np.arange(10)[:, None, None]
    assert measure(field, affine)["folding"] == 100


@pytest.mark.slow
def test_the_deformation_is_strong_and_does_not_fold(tmp_path, capsys):
    """32 draws for each volume, as the hippocampus config makes them."""
    real = ROOT.parent / "shared/data/hippocampus"
    write_subject(tmp_path / "data", 1, make_affine(signs=(-1, 1, 1)), (35, 50, 36))
    words = ["--data", real, "--ids", "231"] if real.is_dir() else ["--data", tmp_path / "data"]
    assert run(*words, "--model", "none", "--config", ROOT / "Config/config_hippocampus.yaml", "--draws", 32, "--out",
               tmp_path / "out") == 0
    result = last_line(capsys)
    assert result["draws"] == 32 * result["subjects"] >= 32
    assert result["folding_percent_max"] < 1 and result["deformation_percent_mean"] > 5
    items = read_datalist(tmp_path / "out")
    assert len(items) == result["draws"] and all(item["label"] for item in items)


def test_start_is_the_strength():
    image = first_subject()["image"]
    means = [measure(augment(image, start=start, cfg=CFG)[2], np.eye(4))["mean"] for start in (1, 20, 50, 79)]
    assert means == sorted(means) and means[0] < 0.05 and means[-1] > 0.8
    assert np.array_equal(augment(image, cfg=CFG)[2], augment(image, start=79, cfg=CFG)[2])
    drawn = [measure(augment(image, start=(1, 79), draw=draw, cfg=CFG)[2], np.eye(4))["mean"] for draw in range(8)]
    assert min(drawn) < 0.5 * max(drawn)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------

def test_headers_dtypes_and_labels_are_kept(copies):
    items = read_datalist(copies / "out")
    assert [item["id"] for item in items] == [f"s_00{n}_draw0{k}" for n in (1, 2) for k in range(3)]
    assert len(read_datalist(copies / "out", ids="2")) == 3, "by the number of the subject"
    for item in items:
        assert item["subject"] == item["id"][:5]
        for kind, folder in (("image", "imagesTr"), ("label", "labelsTr")):
            source = copies / f"data/{folder}/{item['subject']}.nii.gz"
            ours, theirs = nibabel.load(item[kind]), nibabel.load(source)
            assert ours.shape == theirs.shape and ours.get_data_dtype() == theirs.get_data_dtype()
            assert np.array_equal(ours.affine, theirs.affine)
            for field in ("descrip", "cal_max", "xyzt_units", "sform_code", "qform_code", "pixdim"):
                assert np.array_equal(ours.header[field], theirs.header[field]), field
            if kind == "label":
                assert set(np.unique(ours.dataobj)) <= set(np.unique(theirs.dataobj))
                assert not np.array_equal(ours.dataobj, theirs.dataobj)
        header = nibabel.load(str(item["image"]).replace("imagesTr", "fieldsTr")).header
        assert header.get_data_shape() == (*SHAPE, 1, 3) and int(header["intent_code"]) == 1007
    page = (copies / "out/report.html").read_text()
    assert page.count("data:image/png") == 2 and "s_002_draw02" in page and "://" not in page


def test_same_seed_same_files_in_any_list(copies, tmp_path):
    whole = contents(copies / "out")
    assert len(whole) == 2 * 3 * 3 + 4
    image, label = (copies / f"data/{folder}/s_002.nii.gz" for folder in ("imagesTr", "labelsTr"))
    for seed in (0, 1):
        assert run("--image", image, "--label", label, *WORDS, "--draws", 2, "--seed", seed, "--out",
                   tmp_path / str(seed)) == 0
    one = {name: content for name, content in contents(tmp_path / "0").items() if name.endswith(".nii.gz")}
    assert len(one) == 6 and all(whole[name] == content for name, content in one.items())
    other = contents(tmp_path / "1")
    assert not any(other[name] == one[name] for name in one)
    assert len({content for name, content in one.items() if "field" in name}) == 2


def test_the_function_gives_what_the_script_writes(copies, tmp_path):
    path, label_path = (copies / f"data/{folder}/s_002.nii.gz" for folder in ("imagesTr", "labelsTr"))
    assert run("--image", path, "--label", label_path, *WORDS, "--out", tmp_path, "--draws", 2, "--start", "30-60") == 0
    image, affine = read_volume(path)
    label = np.asarray(nibabel.load(label_path).dataobj)
    image = image.astype(np.int16)
    copy, moved, field = augment(image, label, affine, start=(30, 60), draw=1, subject="s_002", cfg=CFG)
    assert copy.dtype == np.int16 and moved.dtype == label.dtype and field.dtype == np.float32
    for folder, array in (("imagesTr", copy), ("labelsTr", moved)):
        assert np.array_equal(np.asarray(nibabel.load(tmp_path / f"{folder}/s_002_draw01.nii.gz").dataobj), array)
    assert np.allclose(read_field(tmp_path / "fieldsTr/s_002_draw01.nii.gz")[0], field, atol=1e-4)
    assert np.array_equal(deform(label, field, "nearest"), moved)
    smooth = augment(image, label, affine, start=(30, 60), draw=1, subject="s_002", cfg=CFG, labels="smooth")[1]
    assert np.array_equal(smooth, deform(label, field, "smooth")) and not np.array_equal(smooth, moved)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype, value, modes", [
    (np.int32, 2 ** 31 - 1, ("bilinear", "smooth", "nearest")), (np.int64, 2 ** 63 - 1, ("smooth", "nearest")),
    (np.uint32, 2 ** 32 - 1, ("bilinear", "smooth", "nearest")), (np.float16, 3, ("smooth", "nearest"))])
def test_the_largest_numbers_and_labels_of_half_precision_stay_under_a_field_of_zeros(dtype, value, modes):
    array = np.array([[0, value, 1], [value, 1, 0]], dtype)
    for mode in modes:
        still = deform(array, np.zeros((2, 2, 3), np.float32), mode)
        assert still.dtype == dtype and np.array_equal(still, array), mode


def test_numbers_of_64_bits_at_their_limit_do_not_turn_negative():
    still = deform(np.full((2, 3), 2 ** 63 - 1), np.zeros((2, 2, 3), np.float32), "bilinear")
    assert (still > 2 ** 63 - 2 ** 11).all()


def test_slices(tmp_path, capsys):
    subject = make_subject(0, (40, 52), dims=2)
    affine = make_affine((1, 0, 2), (1, -1, 1), (0.8, 1.2, 3))
    for kind in ("image", "label"):
        array = subject[kind] if kind == "image" else subject[kind].astype(np.int16)
        write_volume(tmp_path / f"{kind}.nii.gz", array, affine)
    assert run("--image", tmp_path / "image.nii.gz", "--label", tmp_path / "label.nii.gz", *WORDS, "--set",
               "model.dims=2", "--out", tmp_path / "out", "--draws", 2) == 0
    assert last_line(capsys)["deformation_percent_mean"] > 1
    item = read_datalist(tmp_path / "out", dims=2)[1]
    field, _ = read_field(tmp_path / "out/fieldsTr/image_draw01.nii.gz", dims=2)
    assert np.abs(read_volume(item["image"], 2)[0] - deform(subject["image"], field)).max() < 1e-3


def test_masks_move_along(data):
    shutil.copytree(data / "data/labelsTr", data / "data/masksTr")
    more = ["--set", "data.crop_above=0.1", "--draws", 1]
    assert run("--data", data / "data", *WORDS, *more, "--out", data / "out") == 0
    for item in read_datalist(data / "out"):
        assert item["mask"].read_bytes() == item["label"].read_bytes()


def test_bad_volumes_among_others_are_named_and_the_others_are_done(data, capsys):
    bad = {"s_001": "1 of .* NaN", "s_003": r"shape \(1, 28, 33\) is one plane along axis 0",
           "s_004": "not a readable NIfTI"}
    for number in (3, 4):
        write_subject(data / "data", number)
    hole, plane, torn = (data / f"data/imagesTr/{name}.nii.gz" for name in bad)
    array, affine = read_volume(hole)
    array[3, 4, 5] = np.nan
    write_volume(hole, array, affine)
    write_volume(plane, array[12:13], affine)
    torn.write_bytes(b"no volume")
    assert run("--data", data / "data", *WORDS, "--out", data / "out", "--draws", 2) == 43
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    for error, (name, reason) in zip(errors, bad.items()):
        assert re.search(f"{name}.nii.gz: {reason}", error), errors
    result = json.loads(printed.out.strip().splitlines()[-1])
    assert (result["draws"], result["subjects"], result["refused"]) == (2, 1, 3)
    assert {item["subject"] for item in read_datalist(data / "out")} == {"s_002"}
    assert "Left out" in (data / "out/report.html").read_text()
    assert not [path for name in bad for path in (data / "out").rglob(f"{name}*")]


def test_a_channel_on_another_grid_is_named_and_the_other_volumes_are_done(tmp_path, capsys):
    small, entries = (10, 12, 14), []
    for number, shape, affine in ((1, small, OBLIQUE), (2, small, FLIPPED), (3, (10, 12, 13), OBLIQUE)):
        write_subject(tmp_path / "data", number, OBLIQUE, small)
        write_subject(tmp_path / "other", number, affine, shape)
        entries.append({"image": [f"{folder}/imagesTr/s_{number:03d}.nii.gz" for folder in ("data", "other")]})
    (tmp_path / "list.json").write_text(json.dumps({"training": entries}))
    assert run("--data", tmp_path / "list.json", *WORDS, "--set", "data.channels=2", "--draws", 1, "--out",
               tmp_path / "out") == 43
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    for error, name in zip(errors, ("s_002", "s_003")):
        assert re.search(f"other/imagesTr/{name}.nii.gz: the channel is on another grid than .*data/.*{name}", error)
    assert sorted(path.name for path in (tmp_path / "out/channelsTr").iterdir()) == ["s_001_draw00_0001.nii.gz"]


@pytest.mark.parametrize("channels, cases, warns", [(1, "xx", True), (2, "xx", False), (1, "xy", False)])
def test_files_numbered_as_channels_that_are_deformed_apart_are_a_warning(channels, cases, warns, data, capsys):
    """Unless each is a case of its own."""
    (data / "both").mkdir()
    for number, case in enumerate(cases):
        shutil.copy(data / "data/imagesTr/s_001.nii.gz", data / f"both/{case}_000{number}.nii.gz")
    assert run("--data", data / "both", *WORDS, "--set", f"data.channels={channels}", "--draws", 1, "--out",
               data / "out") == 0
    printed = capsys.readouterr()
    said = ("do, but each one is deformed by itself; to deform the channels of a case together, give --set "
            "data.channels=N")
    assert (said in printed.err) == warns and json.loads(printed.out.splitlines()[-1])["draws"] == 3 - channels


@pytest.mark.slow
def test_a_volume_that_needs_more_memory_than_there_is_is_named_and_the_others_are_done(data):
    for folder in ("imagesTr", "labelsTr"):
        write_large(data / f"data/{folder}/s_003.nii.gz")
    words = ["--data", data / "data", *WORDS, "--out", data / "out", "--draws", 2]
    done = run_in_little_memory("OM_augment", *words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 43 and len(errors) == 1 and "s_003.nii.gz: there is not enough memory (" in errors[0]
    assert json.loads(done.stdout.strip().splitlines()[-1])["draws"] == 4


def test_a_second_run_makes_torn_files_anew(copies, tmp_path):
    out, whole = shutil.copytree(copies / "out", tmp_path / "out"), contents(copies / "out")
    (out / "imagesTr/s_001_draw00.nii.gz").write_bytes(b"")
    torn = out / "fieldsTr/s_002_draw01.nii.gz"
    torn.write_bytes(torn.read_bytes()[:1000])
    (out / "labelsTr/s_002_draw00.nii.gz").unlink()
    (out / "fieldsTr/.s_001_draw01.nii.gz.tmp-123").write_bytes(b"half")
    assert run("--data", copies / "data", *WORDS, "--out", out, "--draws", 3) == 0
    assert contents(out) == whole


def test_a_second_run_goes_on(copies, tmp_path, capsys):
    data, out = (shutil.copytree(copies / name, tmp_path / name) for name in ("data", "out"))
    words = ["--data", data, *WORDS, "--out", out]
    first = {path: path.stat().st_mtime_ns for path in out.rglob("*.nii.gz")}
    lines = (out / "draws.jsonl").read_text()
    (out / "draws.jsonl").write_text(lines[:-20])  # the last line cut, as by a kill
    write_subject(data, 1, OBLIQUE @ np.diag([1, 1, 1.1, 1]))  # and a file that has changed since
    assert run(*words, "--draws", 4) == 0
    assert last_line(capsys)["draws"] == 8
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.nii.gz")}
    assert len(after) == 24
    kept = {path.name for path in first if after[path] == first[path]}
    assert kept == {"s_002_draw00.nii.gz", "s_002_draw01.nii.gz"}
    assert run(*words, "--seed", 5) == 43
    assert "has draws with seed 0, not 5" in capsys.readouterr().err
    assert run("--data", data, *WORDS, "--out", data) == 43
    assert "contains other files" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"editor.tabSize": 4}', "[]", '{"seed": 0, "vers'])
def test_a_folder_with_the_settings_of_another_program_is_not_claimed(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(InputError, match=r"contains other files \(settings.json\); name a new folder"):
        claim_folder(tmp_path, {"seed": 0, "version": "1"}, [], True)
    assert (tmp_path / "settings.json").read_text() == content


def test_copies_of_the_first_version_are_not_continued_and_the_version_is_named(tmp_path):
    """It did not write its number."""
    (tmp_path / "settings.json").write_text('{"seed": 0, "stride": 4, "labels": "smooth"}')
    (tmp_path / "draws.jsonl").write_text('{"id": "a", "name": "a_draw00"}\n')
    with pytest.raises(InputError, match="has draws with version 1.0.0, not 1.7.1; name a new folder"):
        claim_folder(tmp_path, {"seed": 0, "version": "1.7.1"}, [], True)


def test_one_of_two_images_into_the_same_folder_is_refused_and_nothing_is_lost(copies, tmp_path, capsys):
    out = shutil.copytree(copies / "out", tmp_path / "out")
    assert run("--image", copies / "data/imagesTr/s_001.nii.gz", *WORDS, "--draws", 1, "--out", out) == 43
    assert "has draws of s_002, which its list would lose; give all volumes at once" in capsys.readouterr().err
    assert contents(out) == contents(copies / "out")


def test_results_inside_a_flat_data_folder_are_no_scans(data, capsys):
    flat = data / "data/imagesTr"
    words = ["--data", flat, *WORDS, "--draws", 1, "--out", flat / "copies"]
    assert run(*words) == 0
    pair = ["--fixed", flat / "s_001.nii.gz", "--moving", flat / "s_002.nii.gz", "--model", "none", "--affine", "none",
            "--refine", 1, "--device", "cpu", "--no-picture", "--out", flat / "registered"]
    assert OM_register.main([str(word) for word in pair]) == 0
    assert run(*words) == 0 and last_line(capsys)["draws"] == 2
    assert [item["id"] for item in read_datalist(flat)] == ["s_001", "s_002"]


def test_nnunet_has_no_negative_labels(data, capsys):
    path = data / "data/labelsTr/s_001.nii.gz"
    label, affine = read_label(path)
    write_volume(path, np.where(label == 1, -1, label), affine)
    words = ["--image", data / "data/imagesTr/s_001.nii.gz", "--label", path, *WORDS, "--draws", 1,
             "--out", data / "out"]
    for drawn in (0, 3):  # image, label and field
        assert run(*words, "--nnunet", "Dataset501_Brains") == 43
        assert "there is a label -1, but nnU-Net's labels begin at 0" in capsys.readouterr().err
        assert len(list((data / "out").rglob("*.nii.gz"))) == drawn, "it is told before anything is drawn"
        assert run(*words) == 0


@pytest.mark.slow
def test_a_killed_run_leaves_whole_files_and_ends_as_an_undisturbed_one(data):
    words = ["--data", data / "data", *WORDS, "--draws", "60"]
    assert run(*words, "--out", data / "whole") == 0
    command = [sys.executable, ROOT / "OM_augment.py", *words, "--out", data / "out", "--workers", "2"]
    process = launching.start([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    launching.until(lambda: list((data / "out").rglob("fieldsTr/*_draw0*.nii.gz")), 100)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2)  # the workers end with it
    (data / "out/fieldsTr/.s_001_draw07.nii.gz.tmp-123").write_bytes(b"half")
    assert not (data / "out/dataset.json").exists()
    for path in (data / "out").rglob("[!.]*.nii.gz"):
        assert np.isfinite(nibabel.load(path).get_fdata()).all()
    assert run(*words, "--out", data / "out") == 0
    assert set(contents(data / "out")) == set(contents(data / "whole"))
    for name, content in contents(data / "whole").items():
        assert (data / "out" / name).read_bytes() == content, name


# ---------------------------------------------------------------------------------------------------------------------
# With a network
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_network_changes_the_draws_and_a_target_changes_them_again(data, model):
    image, label = (data / f"data/{folder}/s_001.nii.gz" for folder in ("imagesTr", "labelsTr"))
    target = data / "data/imagesTr/s_002.nii.gz"
    # In float32, where one thread and two differ by less than what rounding to whole numbers shows.
    words = ["--image", image, "--label", label, "--model", model, "--set", "run.amp=off"]
    fields, loaded = {}, load_model(model, overrides=["run.amp=off"])
    for name, more in (("alone", []), ("finer", ["--stride", 2]), ("slices", ["--target", target, "--slices", 3]),
                       ("random", ["--target", target]), ("volume", ["--target", target, "--condition", "volume"])):
        assert run(*words, *more, "--draws", 1 + (name == "slices"), "--out", data / name) == 0
        fields[name] = read_field(data / name / "fieldsTr/s_001_draw00.nii.gz")[0]
    names = list(fields)
    assert [(a, b) for a in names for b in names if a < b and np.abs(fields[a] - fields[b]).max() < 1e-5] == []
    assert "3 planes" in (data / "slices/report.html").read_text()
    array, affine = read_volume(image)
    shown, shown_affine = read_volume(target)
    copy, _, field = augment(array, None, affine, loaded, draw=1, target=shown, target_affine=shown_affine, slices=3,
                             subject="s_001")
    assert np.allclose(field, read_field(data / "slices/fieldsTr/s_001_draw01.nii.gz")[0], atol=1e-4)
    drawn = [RandDeformationd("image", prob=1.0, seed=0, field_key="field", **words)({"image": array[None]})["field"]
             for words in ({"model": loaded}, {"cfg": loaded[1]})]
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3
    written = np.asarray(nibabel.load(data / "slices/imagesTr/s_001_draw01.nii.gz").dataobj)
    assert np.array_equal(np.rint(copy), written)


@pytest.mark.slow
def test_every_draw_goes_towards_another_volume_of_a_data_set(data, model, capsys):
    image, others = data / "data/imagesTr/s_001.nii.gz", data / "data/imagesTr"
    write_subject(data / "data", 3)
    words = ["--image", image, "--model", model, "--draws", 6]
    assert run(*words, "--target", others, "--out", data / "all") == 0
    assert "towards others of imagesTr" in (data / "all/report.html").read_text()
    targets = [line["target"] for line in table_of(data / "all")]
    assert set(targets) == {"s_002", "s_003"}, "never the volume itself"
    fields = [read_field(data / f"all/fieldsTr/s_001_draw0{draw}.nii.gz")[0] for draw in range(6)]
    draw = targets.index("s_003")
    array, affine = read_volume(image)
    shown, shown_affine = read_volume(others / "s_003.nii.gz")
    field = augment(array, None, affine, load_model(model), draw=draw, target=shown, target_affine=shown_affine,
                    subject="s_001")[2]
    assert np.allclose(field, fields[draw], atol=1e-4)
    assert run(*words, "--target", others, "--workers", 2, "--out", data / "by two") == 0
    for name, content in contents(data / "all").items():
        assert (data / "by two" / name).read_bytes() == content, name
    capsys.readouterr()
    assert run(*words, "--target", others, "--slices", 3, "--out", data / "all") == 43
    assert "has draws with slices 0, not 3" in capsys.readouterr().err
    spoilt = np.asarray(read_volume(others / "s_002.nii.gz")[0]).copy()
    spoilt[0, 0, 0] = np.nan
    write_volume(data / "more/spoilt.nii.gz", spoilt, affine)
    assert run(*words, "--target", data / "more", "--out", data / "none") == 43
    assert "spoilt.nii.gz" in capsys.readouterr().err and not (data / "none").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Registered copies
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_registered_copy_has_the_shape_and_the_grid_of_its_target(data, capsys):
    sources, labels = data / "data/imagesTr", data / "data/labelsTr"
    for number, stretch, shape in ((2, [1.1, 0.9, 1.2, 1], (28, 26, 30)), (3, [0.8, 1, 0.9, 1], (26, 30, 28))):
        affine = OBLIQUE @ np.diag(stretch)  # the same way round as the first one, elsewhere
        affine[:3, 3] += 20 * number
        write_subject(data / "data", number, affine, shape)
    image, label = sources / "s_001.nii.gz", labels / "s_001.nii.gz"
    words = ["--image", image, "--label", label, *WORDS, "--target", sources, "--set", "refine.weight=0.3"]
    assert run(*words, "--register", 30, "--nnunet", "Dataset501_Moved", "--out", data / "moved") == 0
    assert last_line(capsys)["draws"] == 2 and "affine stage and 30 steps" in (data / "moved/report.html").read_text()
    lines, (own, own_affine) = table_of(data / "moved"), read_label(label)
    assert {line["target"] for line in lines} == {"s_002", "s_003"}, "each target once, never the volume itself"
    for line in lines:
        copy, moved = (nibabel.load(data / f"moved/{kind}/{line['name']}.nii.gz") for kind in ("imagesTr", "labelsTr"))
        target, (there, affine) = nibabel.load(sources / f"{line['target']}.nii.gz"), read_label(
            labels / f"{line['target']}.nii.gz")
        assert (copy.shape, copy.get_data_dtype(), moved.get_data_dtype()) == (target.shape, np.int16, np.uint8)
        for found in (copy, moved, nibabel.load(data / f"moved/Dataset501_Moved/labelsTr/{line['name']}.nii.gz")):
            np.testing.assert_allclose(found.affine, target.affine, atol=1e-4)
        still = apply_label(own, own_affine, np.zeros((3, *there.shape), np.float32), affine)
        before, after = (average(dice(torch.from_numpy(one), torch.from_numpy(there), range(1, 7)))
                         for one in (still, np.asarray(moved.dataobj, np.int16)))
        assert after > max(0.65, before + 0.1), (line["target"], before, after)
        field = read_field(data / f"moved/fieldsTr/{line['name']}.nii.gz")[0]
        wanted = register(sources / f"{line['target']}.nii.gz", image, affine=True, refine=30,
                          config={**CFG, "refine.weight": 0.3})
        np.testing.assert_allclose(field, wanted.field, atol=1e-3)
        assert float(line["deformation_percent_mean"]) < measure(field, affine)["mean"], "the affine map does not count"


@pytest.mark.slow
def test_targets_that_are_copies_renamed_or_masked_anew(tmp_path, capsys, monkeypatch):
    """Two scans of one person, and two targets, of which one is a byte copy of the first scan."""
    monkeypatch.setattr(augment_volumes, "register",
                        lambda *sides, **words: register(*sides, **{**words, "affine": False}))
    monkeypatch.setattr(augment_report, "PICTURED", 1)
    header = nibabel.Nifti1Header()
    header["cal_max"] = 777
    above = make_affine(origin=(0, 0, 5))
    images = {"data/sub-01_ses-1": (24, 28), "data/sub-01_ses-2": (24, 28), "targets/imagesTr/other": (26, 30)}
    for number, (name, shape) in enumerate(images.items()):
        image = (1000 * make_subject(number, shape, dims=2)["image"]).astype(np.int16)
        write_volume(tmp_path / f"{name}.nii.gz", image, above if "other" in name else np.eye(4), header)
    mask = np.ones((26, 30), np.uint8)
    write_volume(tmp_path / "targets/masksTr/other.nii.gz", mask, above)
    shutil.copy(tmp_path / "data/sub-01_ses-1.nii.gz", tmp_path / "targets/imagesTr/twin.nii.gz")
    words = ["--data", tmp_path / "data", *WORDS, "--set", "model.dims=2", "--target", tmp_path / "targets",
             "--register", 1, "--out", tmp_path / "out"]
    assert run(*words) == 0
    found = last_line(capsys)
    assert (found["draws"], found["subjects"]) == (2, 1) and table_of(tmp_path / "out")[0]["target"] == "other"
    copy = nibabel.load(tmp_path / "out/imagesTr/sub-01_ses-1_draw00.nii.gz")
    assert copy.shape == (26, 30, 1) and copy.header["cal_max"] == 0
    field, _ = read_field(tmp_path / "out/fieldsTr/sub-01_ses-1_draw00.nii.gz", 2, across=True)
    np.testing.assert_allclose(field[2], -5, err_msg="from the plane of the target to that of the scan")
    before, viewer = contents(tmp_path / "out"), 'class="viewer"'
    page = (tmp_path / "out/report.html").read_text()
    assert viewer in page and "where the points of a regular one come from, x + field(x), without the affine" in page
    for folder in ("imagesTr", "masksTr"):
        (tmp_path / f"targets/{folder}/other.nii.gz").rename(tmp_path / f"targets/{folder}/outer.nii.gz")
    assert run(*words) == 0 and contents(tmp_path / "out") == before
    assert viewer not in (tmp_path / "out/report.html").read_text()
    mask[0] = 0
    write_volume(tmp_path / "targets/masksTr/outer.nii.gz", mask, above)
    capsys.readouterr()
    assert run(*words) == 43
    assert "has draws with another --target, or other content in it; name a new folder" in capsys.readouterr().err


def test_each_volume_is_looked_up_once_for_all_targets(tmp_path, monkeypatch):
    """2000 volumes and 2000 targets are 4 million comparisons, which took minutes in each process."""
    paths, looked_up, found = [tmp_path / f"v{number}.nii.gz" for number in range(6)], [], os.path.realpath
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * (number % 5))  # the first and the last are copies
    monkeypatch.setattr(augment_volumes, "WORKER", {})
    monkeypatch.setattr(os.path, "realpath", lambda path, **more: looked_up.append(path) or found(path, **more))
    augment_volumes.set_targets([{"id": path.name, "image": path} for path in paths], {"unusable": {}})
    assert [len(augment_volumes.targets_of(path)) for path in paths] == [4, 5, 5, 5, 5, 4]
    assert sorted(looked_up) == paths


def test_a_target_that_cannot_be_used_is_left_out_in_every_process(data, capsys):
    (data / "data/imagesTr").rename(data / "targets")
    words = ["--image", data / "targets/s_002.nii.gz", *WORDS, "--target", data / "targets", "--register"]
    (data / "targets/s_001.nii.gz").write_bytes(b"")  # the first one
    assert "warning: the target s_001 is left out: " in said_before(capsys, *words)
    augment_volumes.prepare_worker(augment_volumes.WORKER["job"])
    assert [target["id"] for target in augment_volumes.WORKER["targets"]] == ["s_002"]


def test_one_file_has_the_subject_that_a_data_set_would_give_it(tmp_path):
    for name, subject in (("sub-01_T1w", "sub-01"), ("case_7_t1", "case_7"), ("b_001", "b_001")):
        write_volume(tmp_path / f"{name}.nii.gz", np.ones((4, 5, 6), np.float32), np.eye(4))
        assert augment_volumes.read_one(tmp_path / f"{name}.nii.gz", 3)["subject"] == subject


def test_a_file_that_may_not_be_read_costs_the_other_volumes_nothing(data, capsys, monkeypatch):
    """As root reads everything, the refusal of the system is made up."""
    locked, digest = data / "data/imagesTr/s_002.nii.gz", results.digest

    def refuse(path):
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return digest(path)

    monkeypatch.setattr(results, "digest", refuse)
    for draws in (1, 2):
        run("--data", data / "data", *WORDS, "--out", data / "out", "--draws", draws)
        assert (data / f"out/imagesTr/s_001_draw{draws - 1:02d}.nii.gz").is_file()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_registered_copies_are_the_same_for_any_workers_and_do_not_mix_with_others(data, capsys):
    sources = data / "data/imagesTr"
    write_subject(data / "data", 3)
    words = ["--data", data / "data", "--ids", "1-2", *WORDS, "--target", sources, "--register", 3]
    assert run(*words, "--out", data / "one") == run(*words, "--workers", 2, "--out", data / "two") == 0
    assert contents(data / "one") == contents(data / "two") and len(table_of(data / "one")) == 4
    capsys.readouterr()
    assert run(*words[:-1], 4, "--out", data / "one") == 43
    assert "has draws with register 3, not 4" in capsys.readouterr().err
    assert run(*words, "--draws", 3, "--out", data / "more") == 43
    said = capsys.readouterr().err
    assert "it holds 2 volumes that s_001 can be registered to, each for one copy" in said
    assert not (data / "more").exists()


@pytest.mark.slow
def test_a_network_registers_copies_too(data, model):
    words = ["--image", data / "data/imagesTr/s_001.nii.gz", "--target", data / "data/imagesTr/s_002.nii.gz"]
    fields = []
    for name, more in (("with", ["--model", model]), ("without", WORDS)):
        assert run(*words, *more, "--register", 0, "--out", data / name) == 0
        fields.append(read_field(data / name / "fieldsTr/s_001_draw00.nii.gz")[0])
    assert fields[0].shape == fields[1].shape and np.abs(fields[0] - fields[1]).max() > 1e-2


def test_without_a_word_a_target_is_shown_as_in_training(data, model, capsys):
    net, cfg = load_model(model)
    array, target = (read_volume(data / f"data/imagesTr/s_00{number}.nii.gz")[0] for number in (1, 2))
    fields = {}
    for trained in ("slice", "volume"):
        for asked in (None, trained):
            whole = {**cfg, "model.condition_type": trained}
            fields[trained, asked] = augment(array, model=(net, whole), target=target, condition=asked)[2]
        assert np.array_equal(fields[trained, None], fields[trained, trained])
    assert np.abs(fields["slice", None] - fields["volume", None]).max() > 1e-5
    content = checkpoint.load(model)
    content["config"]["model.condition_type"] = "volume"
    checkpoint.save(data / "whole", "000001_demo_om_net.pth", content)
    words = ["--image", data / "data/imagesTr/s_001.nii.gz", "--model", data / "whole/000001_demo_om_net.pth",
             "--target", data / "data/imagesTr/s_002.nii.gz"]
    for more, warned in (([], False), (["--slices", 3], True), (["--condition", "slice"], True)):
        assert ("has not learned to use a few planes" in said_before(capsys, *words, *more)) == warned


def test_a_silent_network_leaves_the_random_deformation():
    cfg, image = {**CFG, "run.amp": "off"}, first_subject()["image"]

    def silent(image, t, condition):
        return torch.zeros(len(image), 3, *image.shape[2:])

    fields = [augment(image, affine=FLIPPED, model=(silent, cfg), draw=4)[2],
              augment(image, affine=FLIPPED, cfg=cfg, draw=4)[2]]
    # Once by way of the training grid, once straight from the control points.
    assert np.abs(fields[0] - fields[1]).max() < 0.1 * np.abs(fields[1]).max()


# ---------------------------------------------------------------------------------------------------------------------
# The dictionary transform
# ---------------------------------------------------------------------------------------------------------------------

def sample():
    subject = first_subject()
    return {"image": np.stack([subject["image"]] * 2), "label": subject["label"][None].astype(np.uint8), "name": "s"}


def transform(**changes):
    return RandDeformationd(["image", "label"], ["bilinear", "nearest"],
                            **{"prob": 1.0, "cfg": CFG, "seed": 0, "field_key": "field", **changes})


def test_the_transform_moves_image_and_label_together():
    data = sample()
    before = {key: value.copy() for key, value in data.items() if key != "name"}
    found = transform()(data)
    assert all(np.array_equal(data[key], before[key]) for key in before), "the input is left as it is"
    assert found["name"] == "s" and found["label"].dtype == np.uint8 and found["image"].dtype == np.float32
    field = found["field"]
    assert np.array_equal(found["image"][1], deform(data["image"][1], field))
    assert np.array_equal(found["label"][0], deform(data["label"][0], field, "nearest"))
    tensors = transform()({key: torch.from_numpy(before[key]) for key in before})
    assert tensors["label"].dtype == torch.uint8
    assert all(np.array_equal(tensors[key].numpy(), found[key]) for key in before)


def test_the_state_of_the_transform():
    first, again = transform(start=(1, 79)), transform(start=(1, 79))
    draws = [first(sample())["field"] for _ in range(3)]
    assert all(np.array_equal(again(sample())["field"], field) for field in draws)
    assert not np.array_equal(draws[0], draws[1])
    assert np.array_equal(first.set_random_state(seed=0)(sample())["field"], draws[0])
    assert np.array_equal(first.set_random_state(state=np.random.RandomState(0))(sample())["field"], draws[0])
    rare, data = transform(prob=0.3), sample()
    done = [bool(rare(data)["field"].any()) for _ in range(20)]
    assert 1 <= sum(done) <= 12
    assert transform(prob=0.0, field_key=None)(data)["image"] is data["image"]
    with pytest.warns(UserWarning, match="cfg has no effect beside a model"):
        assert isinstance(transform(model="universal").net, torch.nn.Module)


class Samples(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(sample())["field"][:, ::6, ::6, ::6].copy()


def test_workers_of_a_loader_draw_different_fields():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Samples(transform()), batch_size=None, num_workers=2)
    fields = [field.numpy() for field in loader]
    assert all(not np.array_equal(a, b) for number, a in enumerate(fields) for b in fields[:number])


def test_inside_monai():
    monai = pytest.importorskip("monai")
    from monai.transforms import Compose, EnsureTyped, RandFlipd
    affine = torch.from_numpy(FLIPPED)
    data = {key: monai.data.MetaTensor(torch.from_numpy(value), affine=affine, meta={"patient": 7})
            for key, value in sample().items() if key != "name"}
    chain = Compose([EnsureTyped(["image", "label"]), transform(seed=None), RandFlipd("image", prob=0.0)])
    found = [chain.set_random_state(seed)(data) for seed in (3, 3, 4)]
    assert isinstance(found[0]["image"], monai.data.MetaTensor) and found[0]["label"].meta["patient"] == 7
    assert torch.equal(found[0]["image"].affine, affine) and found[0]["label"].dtype == torch.uint8
    assert torch.equal(found[0]["image"], found[1]["image"]) and not torch.equal(found[0]["image"], found[2]["image"])
    plain = {key: torch.from_numpy(value) for key, value in sample().items() if key != "name"}
    plain["image_meta_dict"] = {"affine": FLIPPED}
    again = Compose([transform(seed=None)]).set_random_state(3)
    chain = Compose([transform(seed=None)]).set_random_state(3)
    assert torch.equal(again(plain)["image"], chain(data)["image"].as_tensor()), "the affine counts, wherever it is"


def test_without_monai(monkeypatch):
    for name in ("monai", "monai.transforms"):  # as where it is not installed, also after a test that imported it
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "Inference.monai_transforms")
    alone = importlib.import_module("Inference.monai_transforms").RandDeformationd
    found = alone("image", prob=1.0, seed=0)({"image": np.random.default_rng(0).random((1, 12, 14, 16))})
    assert found["image"].shape == (1, 12, 14, 16) and alone.__mro__[1] is object


@pytest.mark.parametrize("changes, entries, message", [
    ({"mode": "cubic"}, {}, "mode cubic: give bilinear, smooth, nearest"),
    ({"keys": ["image", "mask"]}, {}, "mask: no such entry"),
    ({}, {"label": np.zeros((1, 5, 5, 5))}, "label: shape .* is not that of image"),
    ({}, {"image_meta_dict": {"affine": OBLIQUE}, "label_meta_dict": {"affine": FLIPPED}},
     "label: its affine is not that of image"),
    ({"cfg": {**CFG, "model.dims": 2, "data.img_size": [24, 24]}}, {}, "is not 2D, which model.dims requires"),
    ({"start": 80}, {}, "start 80: .* from 1 to 79"),
])
def test_what_the_transform_refuses(changes, entries, message):
    words = {"keys": ["image", "label"], "mode": "nearest", "prob": 1.0, "cfg": CFG, **changes}
    with pytest.raises(InputError, match=message):
        RandDeformationd(**words)({**sample(), **entries})


def test_an_entry_without_an_affine_is_on_the_grid_of_the_first_one():
    plain = transform()(sample())
    for entries in ({"image": OBLIQUE}, {"label": FLIPPED}, {"image": OBLIQUE, "label": OBLIQUE + 1e-6}):
        found = transform()({**sample(), **{f"{key}_meta_dict": {"affine": affine} for key, affine in entries.items()}})
        assert np.array_equal(found["label"], plain["label"]) == ("image" not in entries)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """A good volume, its copy, and others that are bad in one way; to be read only."""
    folder, good = tmp_path_factory.mktemp("volumes"), np.random.default_rng(0).integers(0, 9, (8, 8, 8)) * 1.0
    spoilt = good.copy()
    spoilt[1, 2, 3] = np.nan
    for name, array in {"good": good, "copy": good, "nan": spoilt, "flat": np.full((8, 8, 8), 4.0), "other": good[1:],
                        "half": good / 2}.items():
        write_volume(folder / f"{name}.nii.gz", array, np.eye(4))
    return folder


@pytest.mark.parametrize("words, message", [
    (["--image", "nowhere.nii.gz"], "nowhere.nii.gz: no such file"),
    (["--data", "nowhere"], "nowhere: no such data folder"),
    (["--image", "nan.nii.gz"], "nan.nii.gz: 1 of 512 voxels are NaN"),
    (["--image", "flat.nii.gz"], "flat.nii.gz: every voxel is 4"),
    (["--image", "good.nii.gz", "--label", "other.nii.gz"], "other.nii.gz: the label of .* is on another grid"),
    (["--image", "good.nii.gz", "--label", "half.nii.gz"], "half.nii.gz: .* not whole numbers"),
    (["--image", "good.nii.gz", "--start", "80"], "start 80: the time of a random deformation is from 1 to 79"),
    (["--image", "good.nii.gz", "--start", "0"], "start 0: the time of a random deformation is from 1 to 79"),
    (["--image", "good.nii.gz", "--start", "60-20"], "give one such time, or a rising range"),
    (["--image", "good.nii.gz", "--start", "much"], "start much: give one time such as 79"),
    (["--image", "good.nii.gz", "--draws", "0"], "--draws 0: at least 1"),
    (["--image", "good.nii.gz", "--workers", "0"], "--workers 0"),
    (["--image", "good.nii.gz", "--stride", "0"], "--stride 0"),
    ([], "give either --image or --data"),
    (["--image", "good.nii.gz", "--data", "."], "give either --image or --data"),
    (["--image", "good.nii.gz", "--target", "good.nii.gz"], "--target: only a network"),
    (["--image", "good.nii.gz", "--condition", "slice"], "--condition slice needs a --target"),
    (["--image", "good.nii.gz", "--slices", "3"], "--slices needs a --target, whose planes the network sees"),
    (["--image", "good.nii.gz", "--stride", "2"], "--stride: only a network that recovers takes steps"),
    (["--image", "good.nii.gz", "--register"], "--register: name the volumes to register to by --target"),
    (["--image", "good.nii.gz", "--target", "good.nii.gz", "--register"], "it holds 0 volumes that good can be"),
    (["--image", "good.nii.gz", "--target", "copy.nii.gz", "--register"], "it holds 0 volumes that good can be"),
    (["--image", "good.nii.gz", "--target", "good.nii.gz", "--register", "-1"], "--register -1: the number of steps"),
    (["--image", "good.nii.gz", "--target", "good.nii.gz", "--register", "--start", "20"], "leave out --start"),
    (["--image", "good.nii.gz", "--set", "diffusion.size=3"], "unknown key diffusion.size"),
])
def test_bad_input_is_one_sentence(volumes, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(volumes)
    assert run(*words, *WORDS, "--out", tmp_path / "out") == 43
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert not list(tmp_path.glob("out/**/*.nii.gz")) and not (tmp_path / "out/dataset.json").exists()


def test_what_does_not_fit_a_model(data, model, capsys):
    image, flat = data / "data/imagesTr/s_001.nii.gz", data / "flat.nii.gz"
    write_volume(flat, np.random.default_rng(0).random((20, 24)), np.eye(4))
    for words, message in (
            (["--target", flat], r"flat.nii.gz: shape .* is not 3D"),
            (["--target", data / "nowhere.nii.gz"], "nowhere.nii.gz: no such file"),
            (["--target", image, "--slices", 99], "slices 99: the training grid has 48 planes"),
            (["--target", image, "--slices", -1], "--slices -1"),
            (["--target", image, "--register", "--stride", 2], "--stride: only a network that recovers takes steps"),
            (["--target", image, "--condition", "none"], "with --condition none the target is not used"),
            (["--config", CONFIG], "--config is for --model none"),
            (["--start", "12"], "deformation is from 1 to 11")):
        assert run("--image", image, "--model", model, *words, "--out", data / "out") == 43
        assert re.search(message, capsys.readouterr().err), message
    assert run("--image", image, "--model", data / "nowhere.pth", "--out", data / "out") == 43
    assert "no such model" in capsys.readouterr().err
    cfg = {**load_model(model)[1], "model.condition_type": "none"}
    array = first_subject()["image"]
    with pytest.raises(InputError, match="trained without a condition"):
        augment(array, model=(load_model(model)[0], cfg), target=array)


def test_what_the_function_refuses():
    image = first_subject()["image"]
    spoilt = image.copy()
    spoilt[0, 0, 0] = np.inf
    for words, message in (
            ({"image": spoilt}, "image: 1 of .* NaN or infinite"), ({"image": image[0, 0]}, "image: shape .* is not"),
            ({"label": image[1:]}, "label: shape"), ({"mask": image[1:]}, "mask: shape"), ({"start": 80}, "start 80"),
            ({"target": image}, "give a model"), ({"stride": 2.5}, "stride must be a whole number of 1 or more"),
            ({"model": torch.nn.Linear(1, 1)}, "model: give a path, .*, not a Linear"),
            ({"image": image[0]}, "is not 3D, which model.dims requires")):
        with pytest.raises(InputError, match=message):
            augment(**{"image": image, "cfg": CFG, **words})


def test_an_interrupt_while_torch_is_imported_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    words = [sys.executable, ROOT / "OM_augment.py", "--image", "a.nii", "--model", "none", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted: run the same command again to continue\n")


def test_one_run_at_a_time(data, capsys):
    (data / "out").mkdir()
    token = run_lock.lock(data / "out", 60, pid=os.getpid())
    assert run("--data", data / "data", *WORDS, "--out", data / "out") == 43
    assert "is in use by process" in capsys.readouterr().err
    run_lock.unlock(data / "out", token)


def test_a_network_that_has_not_learned_to_recover_is_named(data, model, capsys):
    content = checkpoint.load(model)
    content["config"] |= {"loss.dist": 0.0, "loss.ang": 0.0}
    checkpoint.save(data / "registers", "000001_demo_om_net.pth", content)
    image, registers = data / "data/imagesTr/s_001.nii.gz", ["--model", data / "registers/000001_demo_om_net.pth"]
    target = ["--target", data / "data/imagesTr/s_002.nii.gz"]
    for more, warned in ((["--model", model], False), (registers, True), ([*registers, *target], False),
                         (["--model", "none"], False)):
        assert ("was not trained to recover" in said_before(capsys, "--image", image, *more)) == warned
