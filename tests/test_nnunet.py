"""OM_augment.py --nnunet: a data set that nnU-Net v2 takes as it is, and data sets of nnU-Net as input."""
import json
import re
import shutil

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk

import OM_augment
from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_field, read_header, read_label, read_volume, write_volume
from Dataloader.synthetic import make_subject
from Inference.augmentation import deform
from Inference.draws import draw_name
from Inference.nnunet import RECORD, cases_of, names_in, numbers_of_regions, regions_in, splits, write_dataset
from tests.test_nifti import OBLIQUE, make_affine, refused
from tests.test_om_augment import WORDS

pytestmark = pytest.mark.usefixtures("no_figures")
SHAPE = (14, 16, 12)
FLIPPED = make_affine((1, 2, 0), (1, -1, 1), (1.3, 1.0, 0.8), (20, -10, 8))
NAME = "Dataset501_Brains"


def write_case(folder, number, affine=OBLIQUE, channels=2, label_affine=None, suffix=".nii.gz"):
    """A case in the layout of nnU-Net: channels of other contrast, a label of the numbers 1 and 5."""
    subject = make_subject(number, SHAPE)
    for channel in range(channels):
        image = np.rint(1000 * np.abs(channel - subject["image"])).astype(np.int16)
        write_volume(folder / f"imagesTr/b_{number:03d}_{channel:04d}{suffix}", image, affine)
    label = np.where(subject["label"] > 2, 5, (subject["label"] > 0).astype(np.uint8))
    write_volume(folder / f"labelsTr/b_{number:03d}{suffix}", label, affine if label_affine is None else label_affine)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three cases of two channels, and what --nnunet makes of them."""
    folder = tmp_path_factory.mktemp("nnunet")
    for number, affine in ((1, OBLIQUE), (2, FLIPPED), (3, OBLIQUE)):
        almost = affine.copy()
        almost[:3, 3] += 0.01  # as two programs write one grid
        write_case(folder / "data", number, affine, label_affine=almost)
    content = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "shell": 1, "rest": 5},
               "numTraining": 3, "file_ending": ".nii.gz"}
    (folder / "data/dataset.json").write_text(json.dumps(content))
    words = ["--data", folder / "data", "--nnunet", NAME, "--draws", 2, "--out", folder / "out", *WORDS]
    assert OM_augment.main([str(word) for word in words]) == 0
    return folder


def test_a_data_set_of_nnunet_is_read(made):
    items = read_datalist(made / "data")
    assert [(item["id"], item["subject"], item["modality"]) for item in items] == [
        (f"b_{number:03d}{tail}", f"b_{number:03d}", modality) for number in (1, 2, 3)
        for tail, modality in (("", "T1"), ("_0001", "T2"))]
    assert all(item["label"].name == f"{item['subject']}.nii.gz" for item in items)
    assert [item["id"] for item in read_datalist(made / "data", ids="2")] == ["b_002", "b_002_0001"]


def test_the_other_channels_of_a_case_are_no_targets(made, tmp_path, capsys):
    """Neither another channel of the same case, whose shape is its own, nor one of another case, of other contrast."""
    words = ["--data", made / "data", "--nnunet", NAME, "--target", made / "data", "--register", 0, "--draws", 3,
             "--out", tmp_path / "out", *WORDS]
    assert OM_augment.main([str(word) for word in words]) == 43
    assert "it holds 2 volumes that b_001 can be registered to" in capsys.readouterr().err


def test_the_layout_is_what_nnunet_checks_before_it_plans(made):
    """Its own rules: names, one file for each channel, one geometry in a case, labels without gaps, all in the list."""
    folder = made / "out" / NAME
    content = json.loads((folder / "dataset.json").read_text())
    assert content == {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "shell": 1, "rest": 2},
                       "numTraining": 9, "file_ending": ".nii.gz"}
    cases = sorted(path.name.removesuffix(".nii.gz") for path in (folder / "labelsTr").iterdir())
    assert cases == sorted(f"b_{number:03d}{tail}" for number in (1, 2, 3) for tail in ("", "_draw00", "_draw01"))
    images = {path.name for path in (folder / "imagesTr").iterdir()}
    assert images == {f"{case}_{channel:04d}.nii.gz" for case in cases for channel in (0, 1)}
    for case in cases:
        label = nibabel.load(folder / f"labelsTr/{case}.nii.gz")
        assert set(np.unique(label.dataobj)) == {0, 1, 2}
        for channel in (0, 1):
            image = nibabel.load(folder / f"imagesTr/{case}_{channel:04d}.nii.gz")
            assert image.shape == label.shape and np.allclose(image.affine, label.affine, atol=1e-6)


def test_originals_are_there_as_they_were(made):
    for channel in (0, 1):
        name = f"imagesTr/b_002_{channel:04d}.nii.gz"
        assert (made / "out" / NAME / name).read_bytes() == (made / "data" / name).read_bytes()
        assert not (made / "out" / NAME / name).samefile(made / "data" / name), "an edit must not reach the original"
    name = "imagesTr/b_002_draw00"
    assert (made / "out" / NAME / f"{name}_0000.nii.gz").samefile(made / "out" / f"{name}.nii.gz")
    before, _ = read_label(made / "data/labelsTr/b_002.nii.gz")
    after, _ = read_label(made / "out" / NAME / "labelsTr/b_002.nii.gz")
    assert np.array_equal(after, np.where(before == 5, 2, before))


def test_all_channels_of_a_case_and_its_label_are_deformed_by_one_field(made):
    folder = made / "out" / NAME
    field, _ = read_field(made / "out/fieldsTr/b_001_draw01.nii.gz")
    assert np.abs(field).max() > 0.5
    for channel in (0, 1):
        image, _ = read_volume(made / f"data/imagesTr/b_001_{channel:04d}.nii.gz")
        copy, _ = read_volume(folder / f"imagesTr/b_001_draw01_{channel:04d}.nii.gz")
        assert np.array_equal(copy, np.rint(deform(image, field)))
    label, _ = read_label(made / "data/labelsTr/b_001.nii.gz")
    copy, _ = read_label(folder / "labelsTr/b_001_draw01.nii.gz")
    assert np.array_equal(copy, deform(np.where(label == 5, 2, label), field, "nearest"))


def test_no_subject_is_on_both_sides_of_a_fold(made):
    folds = json.loads((made / "out" / NAME / "splits_final.json").read_text())
    assert len(folds) == 3 and sorted(name for fold in folds for name in fold["val"]) == ["b_001", "b_002", "b_003"]
    for fold in folds:
        assert len(fold["train"]) == 6
        assert not {name[:5] for name in fold["train"]} & {name[:5] for name in fold["val"]}


@pytest.mark.parametrize("first", [0, 1])
def test_numbered_images_with_a_label_each_are_cases_and_no_channels(tmp_path, first):
    for number in range(first, first + 3):
        for folder in ("imagesTr", "labelsTr"):
            write_volume(tmp_path / f"{folder}/sub_{number:04d}.nii.gz", np.eye(4, dtype=np.uint8)[None], np.eye(4))
    items = read_datalist(tmp_path)
    cases = cases_of(NAME, items)
    assert [(case["id"], case["channels"]) for case in cases] == [
        (f"sub_{number:04d}", []) for number in range(first, first + 3)]
    assert [case["label"] for case in cases] == [item["label"] for item in items]
    (tmp_path / "labelsTr/sub_0002.nii.gz").unlink()
    with refused("sub_0002.nii.gz", "it has no label"):
        cases_of(NAME, [{**item, "label": item["label"] if item["label"].exists() else None} for item in items])


def test_what_other_programs_may_place_elsewhere_is_written_anew_and_the_rest_copied(tmp_path):
    """Two axes, two matrices, two sizes of voxels, no position, or none of it: ITK finds the label on its image."""
    affine, items = make_affine(signs=(-1, 1, 1), spacing=(0.8, 1.2, 3), degrees=(0.05, 0.1, 0.02)), []
    subject = make_subject(0, (16, 18), dims=2)
    for name, axes, shift, zoom, codes in (
            ("two axes", 2, 0, 1, (1, 2)), ("apart", 3, 4, 1, (1, 2)), ("nearly", 3, 0.05, 1, (1, 2)),
            ("zooms", 3, 0, 1.005, (0, 2)), ("nowhere", 3, 0, 1, (0, 0)), ("plain", 3, 0, 1, (1, 2))):
        moved = affine.copy()
        moved[1, 3] += shift
        array = (900 * subject["image"]).astype(np.int16).reshape((16, 18, 1)[:axes])
        image = nibabel.Nifti1Image(array, affine)
        image.set_sform(affine, codes[1])
        image.set_qform(moved, codes[0])
        image.header["pixdim"][1] *= zoom
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
        write_volume(tmp_path / f"label_{name}.nii.gz", subject["label"].astype(np.uint8), affine)
        items.append({"id": name, "image": tmp_path / f"{name}.nii.gz", "label": tmp_path / f"label_{name}.nii.gz",
                      "mask": None, "subject": name, "channels": []})
    folder = write_dataset(tmp_path, NAME, items, 0, 2, None)
    for item in items:
        paths = [folder / f"imagesTr/{item['id']}_0000.nii.gz", folder / f"labelsTr/{item['id']}.nii.gz"]
        image, label = (sitk.ReadImage(str(path)) for path in paths)
        assert image.GetSize() == label.GetSize() == (16, 18, 1)
        for get in ("GetSpacing", "GetOrigin", "GetDirection"):
            np.testing.assert_allclose(getattr(image, get)(), getattr(label, get)(), atol=1e-6, err_msg=item["id"])
        (before, placed), (after, written) = (read_volume(path, 2) for path in (item["image"], paths[0]))
        assert np.array_equal(after, before) and nibabel.load(paths[0]).get_data_dtype() == np.int16
        np.testing.assert_allclose(written, placed, atol=1e-5)
        assert (paths[0].read_bytes() == item["image"].read_bytes()) == (item["id"] == "plain")


def test_folds_of_more_subjects_and_of_one():
    items = [{"id": f"c{number}", "subject": f"s{number // 2}"} for number in range(14)]
    folds = splits(items, 1, {})
    assert len(folds) == 5 and sum(len(fold["val"]) for fold in folds) == 14
    for fold in folds:
        subjects = {f"s{int(name[1:]) // 2}" for name in fold["val"]}
        assert not subjects & {f"s{int(re.match('c([0-9]+)', name)[1]) // 2}" for name in fold["train"]}
    assert splits(items[:2], 1, {}) == []
    shapes = {draw_name(item, 0): "s3" for item in items}  # all copies were made towards subject 3
    for fold in splits(items, 1, shapes):
        assert any("draw" in name for name in fold["train"]) == ("c6" not in fold["val"])


def test_two_cases_of_one_name_are_refused_and_none_takes_the_place_of_the_other(tmp_path):
    for name in ("raw/c_1_0000", "n4/c_1_0000", "c_1_seg"):
        write_volume(tmp_path / f"{name}.nii.gz", np.eye(4, dtype=np.uint8)[None], np.eye(4))
    (tmp_path / "list.csv").write_text("image,label,id\n" + "".join(
        f"{folder}/c_1_0000.nii.gz,c_1_seg.nii.gz,{folder}\n" for folder in ("raw", "n4")))
    with refused("--nnunet Dataset501_Brains", "two cases would be called c_1; rename a file"):
        cases_of(NAME, read_datalist(tmp_path / "list.csv"))


def call(capsys, *words):
    code = OM_augment.main([str(word) for word in (*words, *WORDS)])
    return code, capsys.readouterr().err


@pytest.mark.slow
def test_the_same_command_goes_on_and_other_files_are_converted(tmp_path, capsys):
    """MGZ in, .nii.gz out; the second run makes no draw anew, and writes the same."""
    for number in (1, 2):
        write_case(tmp_path / "data", number, channels=1, suffix=".mgz")
    (tmp_path / "list.csv").write_text("image,label\n" + "".join(
        f"data/imagesTr/b_00{number}_0000.mgz,data/labelsTr/b_00{number}.mgz\n" for number in (1, 2)))
    words = ["--data", tmp_path / "list.csv", "--nnunet", NAME, "--draws", 1, "--out", tmp_path / "out"]
    assert call(capsys, *words)[0] == 0
    folder = tmp_path / "out" / NAME
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(first) == 2 * 2 * 2 + 3
    image, affine = read_volume(folder / "imagesTr/b_001_0000.nii.gz")
    own, own_affine = read_volume(tmp_path / "data/imagesTr/b_001_0000.mgz")
    assert np.array_equal(image, own) and np.allclose(affine, own_affine)
    assert json.loads((folder / "dataset.json").read_text())["labels"] == {"background": 0, "label_1": 1, "label_5": 2}
    draw = tmp_path / "out/imagesTr/b_001_draw00.nii.gz"
    when = draw.stat().st_mtime_ns
    assert call(capsys, *words)[0] == 0 and draw.stat().st_mtime_ns == when
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first


def test_only_files_of_an_earlier_run_are_replaced(tmp_path, capsys):
    for number in (1, 2):
        write_case(tmp_path / "data", number, channels=1)
    folder, out = tmp_path / "out" / NAME, tmp_path / "out"
    words = ["--data", tmp_path / "data/imagesTr", "--nnunet", NAME, "--out", out, "--draws"]
    assert call(capsys, *words, 2)[0] == 0
    before = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    theirs = [folder / name for name in ("imagesTs/b_009_0000.nii.gz", "notes.txt", "imagesTr/._b_001_0000.nii.gz")]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    assert call(capsys, *words, 1)[0] == 0
    after = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} - {*before}
    assert after == {path.relative_to(folder).as_posix() for path in theirs}
    assert all(path.read_text() == "theirs" for path in theirs)
    assert not list(folder.glob("*/*_draw01*")), "fewer draws leave fewer cases"
    (out / "imagesTr/b_001_draw00.nii.gz").unlink()
    for name in ("imagesTr/b_003_0000.nii.gz", "labelsTr/b_003.nii.gz", "splits_final.json", "dataset.json"):
        shutil.rmtree(folder)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("theirs")
        code, error = call(capsys, *words, 1)
        assert code == 43 and f"{folder / name}: it is not of an earlier run" in error
        assert list(folder.rglob("*.*")) == [folder / name] and (folder / name).read_text() == "theirs"
    assert not (out / "imagesTr/b_001_draw00.nii.gz").exists(), "refused before anything is drawn"


@pytest.mark.parametrize("name, spoil, sentence", [
    ("Brains", None, "nnU-Net needs three digits in the name"),
    (NAME, "imagesTr/b_001_0001.nii.gz", "the case b_001 has 1 of 2 channels (b_001_0000."),
    (NAME, "labelsTr/b_002.nii.gz", "has no label"),
    (NAME, "name", "a copy would get the name of the volume b_001_draw00; rename the volume")])
def test_what_nnunet_would_refuse_is_refused_before_anything_is_drawn(tmp_path, capsys, name, spoil, sentence):
    for number in (1, 2):
        write_case(tmp_path / "data", number)
    if spoil == "name":
        for channel in range(2):
            path = tmp_path / f"data/imagesTr/b_002_{channel:04d}.nii.gz"
            path.rename(path.with_name(path.name.replace("002", "001_draw00")))
    elif spoil:
        (tmp_path / "data" / spoil).unlink()
    rows = [f"{path},{label if label.is_file() else ''}" for path in sorted((tmp_path / "data/imagesTr").iterdir())
            for label in [tmp_path / f"data/labelsTr/{path.name[:5]}.nii.gz"]]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    code, error = call(capsys, "--data", tmp_path / "list.csv", "--nnunet", name, "--out", tmp_path / "out")
    assert code == 43 and sentence in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil, sentence", [("grid", "the channel is on another grid than"),
                                             ("header", "b_002_0001.nii.gz: not a readable NIfTI file")])
def test_a_case_with_an_unusable_channel_is_named_and_the_others_are_done(tmp_path, capsys, spoil, sentence):
    for number in (1, 2):
        write_case(tmp_path / "data", number)
    path = tmp_path / "data/imagesTr/b_002_0001.nii.gz"
    if spoil == "grid":
        write_volume(path, np.random.default_rng(0).random((5, 6, 7)), OBLIQUE)
    else:
        path.write_bytes(b"no header")
    content = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0}, "file_ending": ".nii.gz"}
    (tmp_path / "data/dataset.json").write_text(json.dumps(content))
    code, error = call(capsys, "--data", tmp_path / "data", "--nnunet", NAME, "--draws", 1, "--out", tmp_path / "out")
    assert code == 43 and sentence in error
    assert {label.name for label in (tmp_path / "out" / NAME / "labelsTr").iterdir()} == {
        "b_001.nii.gz", "b_001_draw00.nii.gz"}


def test_one_image_and_names_of_a_decathlon_list(tmp_path, capsys, monkeypatch):
    write_case(tmp_path / "data", 1, channels=1)
    words = ["--image", tmp_path / "data/imagesTr/b_001_0000.nii.gz", "--label",
             tmp_path / "data/labelsTr/b_001.nii.gz", "--nnunet", NAME, "--draws", 1, "--out", tmp_path / "out"]
    assert call(capsys, *words, "--set", "data.window=[-1000, 500]")[0] == 0
    content = json.loads((tmp_path / "out" / NAME / "dataset.json").read_text())
    assert content["channel_names"] == {"0": "CT"}, "intensities in Hounsfield units"
    assert read_header(tmp_path / "out" / NAME / "imagesTr/b_001_draw00_0000.nii.gz")[0] == SHAPE
    (tmp_path / "dataset.json").write_text(json.dumps({"modality": {"0": "MRI"}, "labels": {"0": "background",
                                                                                             "1": "Anterior"}}))
    assert names_in(tmp_path) == ({0: "background", 1: "Anterior"}, {0: "MRI"})
    (tmp_path / "dataset.json").rename(tmp_path / "OASIS_dataset.json")
    assert names_in(tmp_path) == ({0: "background", 1: "Anterior"}, {0: "MRI"})
    monkeypatch.chdir(tmp_path)
    assert names_in(None) == ({}, {}) == names_in(tmp_path / "data")


@pytest.mark.parametrize("words, window, names", [
    (("ct", "CT"), (0, 0), ["CT", "channel_1"]), (("CT", "MR"), (0, 0), ["channel_0", "channel_1"]),
    (("FLAIR", "FLAIR"), (0, 0), ["FLAIR", "channel_1"]), (("", ""), (-1000, 500), ["CT", "CT"])])
def test_a_ct_is_called_ct_by_which_nnunet_normalises_it(tmp_path, words, window, names):
    for number in (1, 2):
        write_case(tmp_path / "data", number)
    (tmp_path / "list.csv").write_text("image,label,modality\n" + "".join(
        f"data/imagesTr/b_00{number}_000{channel}.nii.gz,data/labelsTr/b_00{number}.nii.gz,{word * (not channel)}\n"
        for number, word in zip((1, 2), words) for channel in (0, 1)))
    cases = cases_of(NAME, read_datalist(tmp_path / "list.csv"))
    folder = write_dataset(tmp_path, NAME, cases, 0, 3, tmp_path / "list.csv", window)
    assert list(json.loads((folder / "dataset.json").read_text())["channel_names"].values()) == names


@pytest.mark.parametrize("names, written", [
    (["core", "core"], ["core", "core_5"]), (["core", "background"], ["core", "background_5"]),
    (["background", "background"], ["background_1", "background_5"]), (["label_5", ""], ["label_5", "label_5_5"])])
def test_labels_of_one_name_all_stay(tmp_path, names, written):
    write_case(tmp_path, 1, channels=1)
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": dict(zip("15", names))}))
    item = {"id": "b", "image": tmp_path / "imagesTr/b_001_0000.nii.gz", "label": tmp_path / "labelsTr/b_001.nii.gz",
            "subject": "b", "channels": []}
    folder = write_dataset(tmp_path, NAME, [item], 0, 3, tmp_path)
    assert json.loads((folder / "dataset.json").read_text())["labels"] == {
        "background": 0, **dict(zip(written, (1, 2)))}


@pytest.mark.parametrize("named", [{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, {"all": [1, 2, 3, 4, 5], "last": [5]}])
def test_a_named_label_that_no_volume_has_keeps_its_number_free(tmp_path, named):
    write_case(tmp_path, 1, channels=1)
    labels = {"background": 0, **named}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "regions_class_order": [1, 5]}))
    item = {"id": "b", "image": tmp_path / "imagesTr/b_001_0000.nii.gz", "label": tmp_path / "labelsTr/b_001.nii.gz",
            "subject": "b", "channels": []}
    folder = write_dataset(tmp_path, NAME, [item], 0, 3, tmp_path)
    assert json.loads((folder / "dataset.json").read_text())["labels"] == labels
    assert np.unique(read_label(folder / "labelsTr/b.nii.gz")[0]).tolist() == [0, 1, 5]


def test_regions_stay_regions(tmp_path):
    """Labels 1 and 5 become 1 and 2; a region of labels that no case has goes, with its place in the order."""
    labels = {"background": 0, "whole": [1, 5], "lost": [3], "core": [5], "ignore": 7}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "regions_class_order": [1, 3, 5]}))
    assert regions_in(tmp_path, [0, 1, 5]) == {"labels": {"background": 0, "whole": [1, 2], "core": [2]},
                                               "regions_class_order": [1, 2]}
    assert regions_in(tmp_path, [0, 1, 3, 5, 7]) == {
        "labels": {"background": 0, "whole": [1, 3], "lost": [2], "core": [3], "ignore": 4},
        "regions_class_order": [1, 2, 3]}
    for order in ({}, {"regions_class_order": None}):
        (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "shell": 1}, **order}))
        assert regions_in(tmp_path, [0, 1]) == {} == regions_in(None, [0, 1])


def test_the_written_data_set_has_the_regions(tmp_path, capsys):
    write_case(tmp_path / "data", 1, channels=1)
    content = {"channel_names": {"0": "T1"}, "labels": {"background": 0, "whole": [1, 5], "core": 5},
               "regions_class_order": [1, 5], "numTraining": 1, "file_ending": ".nii.gz"}
    (tmp_path / "data/dataset.json").write_text(json.dumps(content))
    assert call(capsys, "--data", tmp_path / "data", "--nnunet", NAME, "--draws", 1, "--out", tmp_path / "out")[0] == 0
    written = json.loads((tmp_path / "out" / NAME / "dataset.json").read_text())
    assert written["labels"] == {"background": 0, "whole": [1, 2], "core": 2}
    assert written["regions_class_order"] == [1, 2]


@pytest.mark.parametrize("recorded", [
    ["../mine.txt", "notes.txt", "imagesTr/../../mine.txt", 5, "imagesTr/b_009_0000.nii.gz"], {"../mine.txt": 1}, 5])
def test_a_record_of_others_names_no_file_that_may_be_removed(tmp_path, recorded):
    write_case(tmp_path, 1, channels=1)
    item = {"id": "b", "image": tmp_path / "imagesTr/b_001_0000.nii.gz", "label": tmp_path / "labelsTr/b_001.nii.gz",
            "subject": "b", "channels": []}
    mine = [tmp_path / "mine.txt", tmp_path / NAME / "notes.txt"]
    old = write_dataset(tmp_path, NAME, [item], 0, 3, None) / "imagesTr/b_009_0000.nii.gz"
    for path in (*mine, old):
        path.write_text("kept")
    named = json.dumps([*recorded, str(mine[0])] if isinstance(recorded, list) else recorded)
    (tmp_path / NAME / RECORD).write_text(named)
    write_dataset(tmp_path, NAME, [item], 0, 3, None)
    assert all(path.read_text() == "kept" for path in mine) and old.exists() == (not isinstance(recorded, list))


@pytest.mark.parametrize("labels, order", [({"whole": [1, "x"]}, [1]), ({"whole": [1, None]}, [1]), ({"whole": [1]}, 5),
                                           ({"whole": [1]}, ["a"]), ({"whole": [1], "core": {}}, [1, 5])])
def test_regions_that_are_no_numbers_are_one_sentence(tmp_path, labels, order):
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "regions_class_order": order}))
    with refused("dataset.json", "must be whole numbers"):
        regions_in(tmp_path, [0, 1, 5])
    with refused("dataset.json", "must be whole numbers"):
        numbers_of_regions(tmp_path)


def test_an_nnunet_list_that_is_broken_is_one_sentence(tmp_path):
    write_case(tmp_path, 1)
    (tmp_path / "dataset.json").write_text('{"channel_names": ["T1"]}')
    with refused("dataset.json", "are not those of nnU-Net"):
        read_datalist(tmp_path)
    (tmp_path / "dataset.json").write_text('{"channel_names": {"0": "T1"}, "file_ending": ".nii.gz"}')
    (tmp_path / "labelsTr/b_001.nii.gz").unlink()
    with refused("b_001.nii.gz", "the label of b_001_0000.nii.gz is missing"):
        read_datalist(tmp_path)
