import contextlib
import csv
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
import pytest

from Dataloader.datalist import (
    held_out_subjects,
    list_file,
    list_volumes,
    pair_files,
    read_datalist,
    read_pairs,
    select,
    split_volumes,
    subject_key,
    volume_id,
)
from Runtime.errors import InputError
from tests.tiny import ROOT


def write(path, shape=(4, 5, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    nibabel.save(nibabel.Nifti1Image(data, np.eye(4)), path)


def make(root, names, listed=None):
    """Volumes with the names in a text, and a dataset.json if entries for its "training" are given."""
    for name in names.split():
        write(root / name)
    if listed is not None:
        (root / "dataset.json").write_text(json.dumps({"training": listed}))


def refused(match):
    return pytest.raises(InputError, match=match)


@pytest.mark.parametrize("names, listed, root, expected", [
    ("imagesTr/b_2.nii.gz labelsTr/b_2.nii.gz imagesTr/a_1.nii.gz imagesTr/unlisted_3.nii.gz",
     [{"image": "./imagesTr/b_2.nii.gz", "label": "./labelsTr/b_2.nii.gz"}, "imagesTr/a_1.nii.gz"], "",
     {"a_1": None, "b_2": "labelsTr/b_2.nii.gz"}),
    ("imagesTr/OASIS_0001_0000.nii.gz", ["./imagesTr/OASIS_0001_0000.nii.gz"], "", {"OASIS_0001": None}),
    ("imagesTr/s_1.nii.gz imagesTr/s_2.nii imagesTr/nnunet_3_0000.nii.gz labelsTr/s_1.nii.gz labelsTr/s_2.nii "
     "labelsTr/nnunet_3.nii.gz elsewhere_9.nii.gz", None, "",
     {"nnunet_3": "labelsTr/nnunet_3.nii.gz", "s_1": "labelsTr/s_1.nii.gz", "s_2": "labelsTr/s_2.nii"}),
    ("imagesTr/s_1.nii.gz labelsTr/s_1.nii.gz", None, "imagesTr", {"s_1": "labelsTr/s_1.nii.gz"}),
    ("deep/er/s_1.nii.gz s_2.nii labelsTs/s_1.nii.gz ._s_2.nii", None, "", {"s_1": None, "s_2": None}),
    ("deep/er/s_1.nii.gz s_2.nii labelsTr/s_1.nii.gz labelsTr/s_2.nii", None, "",
     {"s_1": "labelsTr/s_1.nii.gz", "s_2": "labelsTr/s_2.nii"}),
    ("deep/er/s_1.nii.gz s_2.nii", None, "deep", {"s_1": None})])
def test_layouts(tmp_path, names, listed, root, expected):
    make(tmp_path, names, listed)
    (tmp_path / "notes.txt").write_text("no volume")
    items = read_datalist(tmp_path / root)
    found = {item["id"]: item["label"] and item["label"].resolve().relative_to(tmp_path).as_posix() for item in items}
    assert found == expected and list(found) == sorted(found)


@pytest.mark.parametrize("name, expected", [
    ("x/hippocampus_001.nii.gz", "hippocampus_001"), ("a.b_7.nii", "a.b_7"), ("OASIS_0007_0000.nii.gz", "OASIS_0007"),
    ("subject_0000.nii.gz", "subject_0000"), ("OASIS_0007", "OASIS_0007"), ("OASIS_0007_0000", "OASIS_0007")])
def test_volume_id(name, expected):
    assert volume_id(name) == expected


def test_2d_folder(tmp_path):
    write(tmp_path / "a_1.nii.gz", (6, 5))
    write(tmp_path / "a_2.nii.gz", (7, 5, 1))
    assert len(read_datalist(tmp_path, dims=2)) == 2
    with refused(r"a_1\.nii\.gz: shape \(6, 5\) is not 3D"):
        read_datalist(tmp_path, dims=3)


@pytest.mark.parametrize("ids, expected", [
    ("", [1, 5, 60, 75, 201]), (" ", [1, 5, 60, 75, 201]), ("1-60,75", [1, 5, 60, 75]), (" 5 , 201-230 ", [5, 201]),
    ("75", [75]), ("9-9,1", [1])])
def test_ids_select_by_the_last_number(tmp_path, ids, expected):
    make(tmp_path, " ".join(f"t2_{number:03d}.nii.gz" for number in (1, 5, 60, 75, 201)))
    assert [int(item["id"][3:]) for item in read_datalist(tmp_path, ids=ids)] == expected


@pytest.mark.parametrize("ids", ["1-", "a", "1,,2", "9-3", "1;2", "-4", "1-2-3"])
def test_bad_ids(ids):
    with refused(f"Cache/x: ids \"{re.escape(ids)}\": .* is not a number or a rising range"):
        select("Cache/x", [{"id": "a_1", "subject": "a"}], ids)


def test_ids_that_select_nothing_name_what_exists():
    items = [{"id": name, "subject": name} for name in ("a_3", "a_7", "no_number")]
    with refused("Cache/x: ids \"4-6\" select no volume of the 3 volumes from a_3 to no_number"):
        select("Cache/x", items, "4-6")


@pytest.mark.parametrize("names, listed, root, reason", [
    ("", None, "nowhere.csv", "nowhere.csv: no such data folder or list; check the path"),
    ("one.nii.gz", None, "one.nii.gz", r"one\.nii\.gz: a file, not a data folder, \.json or \.csv list; give"),
    ("", None, "", "found no .nii, .nii.gz or other volume"), ("", [], "", "found no .nii, .nii.gz or other volume"),
    ("a_1.nii.gz", ["a_1.nii.gz", "imagesTr/a_2.nii.gz"], "",
     r"imagesTr/a_2\.nii\.gz: the image listed in .*dataset.json is missing"),
    ("a_1.nii.gz", [{"image": "a_1.nii.gz", "label": "labelsTr/a_1.nii.gz"}], "",
     r"labelsTr/a_1\.nii\.gz: the label listed .* is missing; restore it or drop the label entry"),
    ("a_1.nii.gz", [{"image": "a_1.nii.gz", "mask": "masks/a_1.nii.gz"}], "",
     r"masks/a_1\.nii\.gz: the mask listed in .*dataset\.json is missing; .* drop the mask entry"),
    ("imagesTr/a_1.nii.gz imagesTr/a_2.nii.gz labelsTr/a_2.nii.gz", None, "",
     r"labelsTr/a_1\.nii\.gz: the label of .* is missing; restore it"),
    ("one/a_1.nii.gz two/a_1.nii", None, "",
     r"two volumes have the id a_1 \(.*one/a_1\.nii\.gz and .*two/a_1\.nii\); choose the images by a pattern such as "),
    ("s_1.nii.gz masksTr/mask_1.nii.gz", None, "",
     r"masksTr: no mask has the name of an image, such as s_1\.nii\.gz; rename the masks or remove"),
    ("a_1_seg.nii.gz", None, "",
     r"the names of all 1 volumes mark them as segmentations, such as a_1_seg\.nii\.gz; give the folder"),
    ("a_1.nii.gz", None, "*_FLAIR.nii.gz", r"\*_FLAIR\.nii\.gz: found no \.nii, \.nii\.gz or other volume")])
def test_what_cannot_be_listed_is_one_sentence(tmp_path, names, listed, root, reason):
    make(tmp_path, names, listed)
    with refused(reason):
        read_datalist(tmp_path / root)


@pytest.mark.parametrize("content, reason", [
    (b'{"training": [', "not valid JSON"), (b"\xff\xfe\x00x", "not valid JSON"), (b'{"test": []}', "no list under"),
    (b"[]", "no list under"), (b'{"training": {"image": "a"}}', "no list under"),
    (b'{"training": [{"label": "a"}]}', "has no image path"), (b'{"training": [7]}', "has no image path"),
    (b'{"training": [""]}', "has no image path"), (b'{"training": [{"image": 3}]}', "has no image path"),
    (b'{"training": [{"image": []}]}', "has no image path"),
    (b'{"training": [["a_0000.nii", "a_0001.nii"]]}', "has no image path"), (b"[" * 100000, "not valid JSON"),
    (b'{"training": [], "validation": {"image": "a"}}', "\"validation\" is not a list"),
    (b'{"training": [], "validation": [{"fixed": 3, "moving": "a.nii"}]}', "has no image path"),
    (b'{"training": [], "modality": {"0": "MR", "1": ["CT"]}}', "\"modality\" .* is not one word per channel"),
    *((json.dumps({"training": [{"image": "a_1.nii.gz", role: value}]}).encode(),
       rf"the {role} {re.escape(str(value))} of a_1\.nii\.gz is not {kind}; correct") for role, value, kind in (
        ("label", 3, "a path"), ("label", False, "a path"), ("mask", ["m.nii"], "a path"), ("subject", ["s"], "a word"),
        ("subject", True, "a word"), ("modality", {"0": "CT"}, "a word"), ("split", ["train"], "a word")))])
def test_malformed_json(tmp_path, content, reason):
    (tmp_path / "dataset.json").write_bytes(content)
    with refused(f"dataset.json: .*{reason}"):
        read_datalist(tmp_path)


def test_a_folder_or_a_dead_link_is_no_file(tmp_path):
    make(tmp_path, "", ["a_1.nii.gz"])
    (tmp_path / "a_1.nii.gz").mkdir()
    (tmp_path / "a_2.nii.gz").symlink_to("nowhere.nii.gz")
    with refused(r"a_1\.nii\.gz: the image listed"):
        read_datalist(tmp_path)
    make(tmp_path, "", ["a_2.nii.gz"])
    with refused(r"a_2\.nii\.gz: the image listed"):
        read_datalist(tmp_path)
    write(tmp_path / "nowhere.nii.gz")
    assert [item["id"] for item in read_datalist(tmp_path)] == ["a_2"], "a link to a file is a file"


ITEMS = [{"id": "OASIS_0001"}, {"id": "OASIS_0002"}, {"id": "OASIS_0003"}]
PAIRS = [{"fixed": "./imagesTr/OASIS_0001_0000.nii.gz", "moving": "./imagesTr/OASIS_0003_0000.nii.gz"},
         {"fixed": "OASIS_0002", "moving": "OASIS_0001"}]


@pytest.mark.parametrize("content", [PAIRS, {"pairs": PAIRS}, {"registration_val": PAIRS, "name": "x"},
                                     {"registration_test": PAIRS},
                                     {"registration_val": PAIRS[:1], "training_paired_images": PAIRS}])
def test_pairs_are_moving_then_fixed(tmp_path, content):
    (tmp_path / "pairs.json").write_text(json.dumps(content))
    assert read_pairs(tmp_path / "pairs.json", ITEMS) == [(2, 0), (0, 1)]


@pytest.mark.parametrize("content, reason", [
    ([{"fixed": "OASIS_0001", "moving": "OASIS_0009"}], "OASIS_0009 is not among the training volumes"),
    ([{"fixed": "x.nii", "moving": "OASIS_0001"}], "the fixed volume x is not among the training volumes"),
    ([{"fixed": "OASIS_0001", "moving": ["OASIS_0002"]}], r"the moving volume \['OASIS_0002'\] is neither a path nor"),
    ([{"fixed": None, "moving": "OASIS_0002"}], "the fixed volume None is neither a path nor an id"),
    ([*PAIRS, {"fixed": "OASIS_0002", "moving": "b/OASIS_0002.nii"}], "OASIS_0002 is paired with itself, .*drop the"),
    ([{"fixed": "OASIS_0001"}], "has no \"moving\""), (["OASIS_0001"], "has no \"moving\""),
    ([], "no pairs found"), ({"training": []}, "no pairs found")])
def test_bad_pairs(tmp_path, content, reason):
    (tmp_path / "pairs.json").write_text(json.dumps(content))
    with refused(f"pairs.json: .*{reason}"):
        read_pairs(tmp_path / "pairs.json", ITEMS)


def test_unreadable_pair_lists(tmp_path):
    with refused("pairs.json: no such pair list"):
        read_pairs(tmp_path / "pairs.json", ITEMS)
    (tmp_path / "pairs.json").write_text("[{")
    with refused("pairs.json: not valid JSON"):
        read_pairs(tmp_path / "pairs.json", ITEMS)


def test_files_of_a_pair_are_beside_the_list(tmp_path):
    path, keys = tmp_path / "pairs.json", ("fixed", "moving", "points")
    entry = {"name": 3, "fixed": "a.nii", "moving": "/data/b.nii", "points": None}
    assert pair_files(path, 1, entry, keys) == {"fixed": tmp_path / "a.nii", "moving": Path("/data/b.nii")}
    with refused("pairs.json: pair 2 has the unknown key mask; the keys are fixed, moving, points and name"):
        pair_files(path, 2, {"mask": "c.nii"}, keys)
    with refused("pairs.json: pair 3: moving is 5, not a path"):
        pair_files(path, 3, {"moving": 5}, keys)


def test_pairs_by_ids_that_look_like_file_names(tmp_path):
    (tmp_path / "pairs.json").write_text('[{"fixed": "X_0001_0000", "moving": "data/v1.2_X_0001_0001.nii.gz"}]')
    assert read_pairs(tmp_path / "pairs.json", [{"id": "v1.2_X_0001_0001"}, {"id": "X_0001_0000"}]) == [(0, 1)]


def told(items, *keys):
    return [tuple(item[key] for key in keys) for item in items]


def learn2reg(root, names, modality, roles=("image", "label", "mask")):
    """The layout of a Learn2Reg archive, whose list is named after the task."""
    entries = [{role: f"./{role}sTr/{name}" for role in roles} for name in names]
    for entry in entries:
        for path in entry.values():
            write(root / path)
        entry["keypoints"] = f"./keypointsTr/{entry['image'].split('/')[-1]}"
    path = root / "Task_dataset.json"
    path.write_text(json.dumps({"tensorImageSize": {"0": "3D"}, "modality": modality, "training": entries}))
    return path


def test_learn2reg_channels_are_modalities_of_one_subject(tmp_path):
    names = [f"AbdomenMRCT_{subject:04d}_000{channel}.nii.gz" for subject in (1, 2) for channel in (0, 1)]
    items = read_datalist(learn2reg(tmp_path, names, {"0": "MR", "1": "CT"}))
    assert told(items, "id", "subject", "modality") == [
        ("AbdomenMRCT_0001", "AbdomenMRCT_0001", "MR"), ("AbdomenMRCT_0001_0001", "AbdomenMRCT_0001", "CT"),
        ("AbdomenMRCT_0002", "AbdomenMRCT_0002", "MR"), ("AbdomenMRCT_0002_0001", "AbdomenMRCT_0002", "CT")]
    assert [(item["label"].parent.name, item["mask"].parent.name) for item in items] == [("labelsTr", "masksTr")] * 4
    assert all(item["image"].name == item["label"].name == item["mask"].name for item in items)


def test_a_list_named_after_its_task_is_found_in_the_folder(tmp_path):
    path = learn2reg(tmp_path, [f"LungCT_{subject:04d}_0000.nii.gz" for subject in (1, 2)], {"0": "CT"}, ("image",))
    assert read_datalist(tmp_path) == read_datalist(path) and len(read_datalist(path)) == 2
    path.with_name("Other_dataset.json").write_text(path.read_text())
    with pytest.raises(InputError, match="the folder has two lists, Other_dataset.json and Task_dataset.json"):
        read_datalist(tmp_path)
    path.with_name("dataset.json").write_text(path.read_text())
    assert len(read_datalist(tmp_path)) == 2, "dataset.json is meant"


def test_resource_forks_of_a_mac_are_no_data(tmp_path, capsys):
    path = learn2reg(tmp_path / "l2r", ["LungCT_0001_0000.nii.gz"], {"0": "CT"}, ("image",))
    make(tmp_path / "nnunet", "imagesTr/a_0000.nii.gz labelsTr/a.nii.gz")
    (tmp_path / "nnunet/dataset.json").write_text('{"channel_names": {"0": "T1"}, "file_ending": ".nii.gz"}')
    make(tmp_path / "plain", "images/a.nii.gz images/b.nii.gz labels/a.nii.gz")
    places = [tmp_path / name for name in ("l2r", "nnunet", "plain")]
    before = [list_volumes(place) for place in places]
    for file in [file for file in tmp_path.rglob("*") if file.is_file()]:
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7")
    assert [list_volumes(place) for place in places] == before and list(map(len, before)) == [1, 1, 2]
    assert capsys.readouterr().err == "" and list_file(tmp_path / "l2r") == path


@pytest.mark.parametrize("modality, expected", [
    ({"0": "CT"}, ["", "", ""]), ({}, ["", "", ""]), ("CT", ["", "", ""]), (["MR", "CT"], ["", "", ""]),
    ({"0": "FBCT", "1": "CBCT", "2": "CBCT"}, ["FBCT", "CBCT", "CBCT"]), ({"0": "MR", "1": "CT"}, ["MR", "CT", ""])])
def test_learn2reg_states_of_one_subject(tmp_path, modality, expected):
    names = [f"LungCT_0001_000{channel}.nii.gz" for channel in (0, 1, 2)]
    items = read_datalist(learn2reg(tmp_path, names, modality, roles=("image",)))
    assert told(items, "subject", "modality", "mask") == [("LungCT_0001", word, None) for word in expected]


def test_explicit_subject_and_modality_win(tmp_path):
    make(tmp_path, "X_0001_0000.nii.gz X_0001_0001.nii.gz X_0001_0002.nii.gz")
    entries = [{"image": "X_0001_0000.nii.gz", "subject": " anna\n", "modality": "T1 "},
               {"image": "X_0001_0001.nii.gz", "subject": 7, "id": "other"},
               {"image": "X_0001_0002.nii.gz", "subject": None, "modality": " ", "label": "", "mask": None}]
    (tmp_path / "dataset.json").write_text(json.dumps({"modality": {"0": "MR", "1": "CT"}, "training": entries}))
    assert told(read_datalist(tmp_path), "id", "subject", "modality", "label") == [
        ("X_0001", "anna", "T1", None), ("X_0001_0001", "7", "CT", None), ("X_0001_0002", "X_0001", "", None)]


@pytest.mark.parametrize("name, subject", [
    ("OASIS_0007_0000", "OASIS_0007"), ("OASIS_0007_0003", "OASIS_0007"), ("nnunet_3_0000", "nnunet_3"),
    ("nnunet_3_0001", "nnunet_3"), ("subject_0000", "subject_0000"), ("subject_0012", "subject_0012"),
    ("t2_003", "t2_003"), ("a_1_22", "a_1_22"), ("a_1_22222", "a_1_22222"), ("in_vivo_1", "in_vivo_1"),
    ("sub-01", "sub-01"), ("sub-OAS3_ses-1_T1w", "sub-OAS3"), ("sub-01-T1w", "sub-01"), ("sub_01", "sub_01"),
    ("x_sub-01_T1w", "x_sub-01"), ("sub-", "sub-"), ("p01_tp2_T1w", "p01"), ("anna_T1w", "anna"),
    ("copd1_iBHCT", "copd1"), ("case_07_exp", "case_07"), ("p12_ED", "p12"), ("p12-post-op", "p12"),
    ("hippo_003_L", "hippo_003"), ("case_2_followup_T1w", "case_2"), ("anna_left", "anna_left"),
    # Scans of one person in DIR-Lab, OASIS-3, HCP Aging, OAI, SPIDER, UK Biobank, ADNI and PPMI
    ("case1_T00", "case1"), ("case1_T50", "case1"), ("p1_T0", "p1"), ("OAS30001_MR_d0129", "OAS30001"),
    ("HCA6002236_V1_MR", "HCA6002236"), ("9000099_V00_LEFT", "9000099"), ("group2_v17", "group2_v17"),
    ("2019_V17", "2019_V17"),
    ("site2_d0012", "site2_d0012"), ("knee1_posterior", "knee1_posterior"),
    ("1_t2_SPACE", "1"), ("1000012_20252_3_0", "1000012"), ("002_S_0413_I40657", "002_S_0413"),
    ("ADNI_002_S_0413_MR_MPR_Br_20070216_S14782_I40657", "002_S_0413"),
    ("PPMI_3102_MR_MPRAGE_br_raw_20120101_S1_I3862", "3102")])
def test_subject_of_a_name(tmp_path, name, subject):
    write(tmp_path / f"{name}.nii.gz")
    modality = {"T1w": "T1w", "_MR": "MR", "ACE": "t2_SPACE"}.get(name[-3:], "")
    assert told(read_datalist(tmp_path), "subject", "modality") == [(subject, modality)]


def test_the_dicom_series_of_a_person_belong_together(tmp_path):
    """As ADNI and TCIA lay them out: the names of series do not tell whose they are."""
    series = ["ADNI/002_S_0413/MPRAGE/2006-05-19/I14782", "ADNI/002_S_0413/MPRAGE/2007-05-19/I24782",
              "ADNI/011_S_0002/MPRAGE/2005-05-19/I9107", "PROSTATEx/ProstateX-0000/07-07-2011-NA-MR/3.0-t2sag-75680",
              "PROSTATEx/ProstateX-0000/07-07-2011-NA-MR/4.0-t2tra-00702"]
    for folder in series:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.dcm").write_bytes(bytes(128) + b"DICM")
    assert told(list_volumes(tmp_path), "id", "subject") == [
        ("3.0-t2sag-75680", "ProstateX-0000"), ("4.0-t2tra-00702", "ProstateX-0000"), ("I14782", "002_S_0413"),
        ("I24782", "002_S_0413"), ("I9107", "011_S_0002")]


def test_what_spm_has_made_of_a_scan_belongs_to_its_person(tmp_path):
    """Only beside it, or in CAT12's mri/: elsewhere the same letters may be a name."""
    make(tmp_path, "anna_1.nii.gz c1anna_1.nii.gz y_anna_1.nii.gz mri/mwp1anna_1.nii.gz other/deep/wanna_1.nii.gz "
         "sub-02_ses-1_T1w.nii.gz wmsub-02_ses-1_T1w.nii.gz p1_T1.nii.gz wmaria_2.nii.gz")
    assert dict(told(list_volumes(tmp_path), "id", "subject")) == {
        **dict.fromkeys(("anna_1", "c1anna_1", "y_anna_1", "mwp1anna_1"), "anna_1"), "wanna_1": "wanna_1",
        **dict.fromkeys(("sub-02_ses-1_T1w", "wmsub-02_ses-1_T1w"), "sub-02"), "p1_T1": "p1", "wmaria_2": "wmaria_2"}


def test_a_folder_of_several_persons_with_one_dicom_series_each_is_no_person(tmp_path):
    for folder in ("T1_1mm/p1", "T1_1mm/p2", "T2_1mm/p3", "T2_1mm/p4"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.dcm").write_bytes(bytes(128) + b"DICM")
    assert told(list_volumes(tmp_path), "subject") == [("p1",), ("p2",), ("p3",), ("p4",)]


def test_a_number_before_that_of_the_volume_is_no_subject_unless_all_names_end_in_a_channel(tmp_path):
    make(tmp_path, "site_01_0001.nii.gz site_01_0009.nii.gz site_02_0345.nii.gz")
    assert told(read_datalist(tmp_path), "subject") == [("site_01_0001",), ("site_01_0009",), ("site_02_0345",)]
    assert told(read_datalist(tmp_path, ids="9-400"), "id") == [("site_01_0009",), ("site_02_0345",)]


def test_ids_keep_the_volumes_of_a_subject_together(tmp_path):
    make(tmp_path, " ".join(f"LungCT_000{subject}_000{state}.nii.gz" for subject in range(1, 6) for state in (0, 1)))
    items = read_datalist(tmp_path, ids="2-3")
    assert told(items, "id") == [("LungCT_0002",), ("LungCT_0002_0001",), ("LungCT_0003",), ("LungCT_0003_0001",)]
    assert select("x", [{"id": "k_2", "subject": "p1"}, {"id": "p1_7", "subject": "p1"}], "1") == [
        {"id": "p1_7", "subject": "p1"}]


def test_a_json_file_as_root_is_the_same_as_its_folder(tmp_path):
    make(tmp_path, "a_1.nii.gz a_2.nii.gz", ["a_1.nii.gz", "a_2.nii.gz"])
    assert read_datalist(tmp_path / "dataset.json") == read_datalist(tmp_path)
    (tmp_path / "other.JSON").write_text('{"training": ["a_2.nii.gz"]}')
    assert told(read_datalist(tmp_path / "other.JSON"), "id") == [("a_2",)]


def test_folder_with_some_masks(tmp_path):
    make(tmp_path, "imagesTr/s_1.nii.gz imagesTr/nnunet_3_0000.nii.gz imagesTr/s_2.nii.gz masksTr/s_1.nii.gz "
         "masksTr/nnunet_3.nii.gz")
    for root in (tmp_path, tmp_path / "imagesTr"):
        items = read_datalist(root)
        assert [item["mask"] and item["mask"].name for item in items] == ["nnunet_3.nii.gz", "s_1.nii.gz", None]
        assert items[1]["mask"].samefile(tmp_path / "masksTr" / "s_1.nii.gz") and items[1]["label"] is None


def table(root, text, encoding="utf-8"):
    make(root, "a_1.nii.gz b_2.nii.gz X_0001_0001.nii.gz seg/a_1.nii.gz seg/m.nii.gz")
    (root / "list.csv").write_bytes(text.encode(encoding))
    return root / "list.csv"


@pytest.mark.parametrize("separator, encoding, ending", [(",", "utf-8", "\n"), (";", "utf-8-sig", "\r\n")])
def test_csv_with_every_column(tmp_path, separator, encoding, ending):
    rows = ["modality,Image, note,mask,label,subject,id", "T1,b_2.nii.gz,\u00e4,,,p1,k_2", ",,,,,,",
            f"CT , {tmp_path / 'a_1.nii.gz'},,seg/m.nii.gz,seg/a_1.nii.gz,p1,\"k\u00f6_1\"", "",
            ",X_0001_0001.nii.gz,,,,,"]
    items = read_datalist(table(tmp_path, ending.join(rows).replace(",", separator) + ending, encoding))
    assert told(items, "id", "subject", "modality") == [("X_0001_0001", "X_0001_0001", ""), ("k_2", "p1", "T1"),
                                                        ("k\u00f6_1", "p1", "CT")]
    assert items[2]["label"].samefile(tmp_path / "seg/a_1.nii.gz") and items[2]["mask"].name == "m.nii.gz"
    assert (items[1]["label"], items[1]["mask"], items[1]["image"].name) == (None, None, "b_2.nii.gz")


def test_csv_of_images_alone_and_relative_root(tmp_path, monkeypatch):
    path = table(tmp_path, "image\nb_2.nii.gz\na_1.nii.gz\n")
    items = read_datalist(path)
    assert told(items, "id", "subject", "label", "mask", "modality") == [
        ("a_1", "a_1", None, None, ""), ("b_2", "b_2", None, None, "")]
    monkeypatch.chdir(tmp_path)
    assert told(read_datalist("list.csv"), "id") == told(items, "id")
    assert told(read_datalist("list.csv", ids="2"), "id") == [("b_2",)]


def test_csv_quotes_a_path_that_holds_the_separator(tmp_path):
    write(tmp_path / "a,b_1.nii.gz")
    items = read_datalist(table(tmp_path, 'image,subject\n"a,b_1.nii.gz",s\n'))
    assert told(items, "id", "subject") == [("a,b_1", "s")]


@pytest.mark.parametrize("text, reason", [
    ("", "list.csv: an empty list; write a header"), ("\n \n,,\n", "list.csv: an empty list"),
    ("a_1.nii.gz\n", "list.csv: the header a_1.nii.gz has no column \"image\"; give this name"),
    ("img,label\nx,y\n", "list.csv: the header img,label has no column \"image\""),
    ("image\tlabel\n", "has no column \"image\""),
    ("image,label, Image\n", "list.csv: the header has the column \"image\" twice"),
    ("image,label\n", "list.csv: the list has a header but no volumes; add a row for each"),
    ("image,label\na_1.nii.gz,\n\nb_2.nii.gz\n", "list.csv line 4: 1 cells, but the header has 2; correct the row"),
    ("image;label\na_1.nii.gz;;\n", "list.csv line 2: 3 cells, but the header has 2"),
    ("image,id\na_1.nii.gz,x\n,y\n", "list.csv line 3: no image path; fill the cell"),
    ("image,id\na_1.nii.gz,x/y\n", "list.csv line 2: the id x/y contains a slash"),
    ("image,id\na_1.nii.gz,..\n", "list.csv line 2: the id .. contains only dots"),
    ("image\na_1.nii.gz\nno.nii\n", "no.nii: the image listed in .*list.csv line 3 is missing; .* drop its entry"),
    ("image\n/\n", "/: the image listed in .*list.csv line 2 is missing"),
    ("image,label\na_1.nii.gz,no.nii\n", "no.nii: the label listed in .*list.csv line 2 is missing; .* the label"),
    ("image,mask\na_1.nii.gz,seg\n", "seg: the mask listed in .*list.csv line 2 is missing; .* drop the mask"),
    ("image\n\0/a.nii\n", "list.csv: the text contains zero bytes"),
    ("image,labels\na_1.nii.gz,\n", 'the column "labels" is not known; call it "label" if it is that'),
    ("image,age,Subject_ID\na_1.nii.gz,7,x\n", 'the column "Subject_ID" is not known; call it "subject" if'),
    ("image,labels_path,age\na_1.nii.gz,,1\n", 'the column "labels_path" is not known; call it "label" if it is that'),
    ("image,Patient ID\na_1.nii.gz,7\n", 'the column "Patient ID" is not known; call it "subject" if it is that'),
    ("image,Seg\na_1.nii.gz,\n", 'the column "Seg" is not known; call it "label" if it is that, else give it another'),
    ("image\n\"a_1.nii.gz\nb_2.nii.gz\n", "list.csv line 3: not valid CSV"),
    ("image,id\na_1.nii.gz,x\nb_2.nii.gz,x\n", "two volumes have the id x .*; rename or remove one, or give each its"),
    ("image,split\na_1.nii.gz,Train\nb_2.nii.gz,held out\n", "line 3: the split held out of b_2.nii.gz is not train"),
    ("image\na_1.nii.gz\na_1.nii.gz\n", "two volumes have the id a_1")])
def test_malformed_csv(tmp_path, text, reason):
    with refused(reason) as caught:
        read_datalist(table(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_csv_that_is_not_utf8(tmp_path, encoding):
    with refused(r"list\.csv: not UTF-8 text .*; save it as CSV in UTF-8"):
        read_datalist(table(tmp_path, "image,subject\na_1.nii.gz,J\u00f6rg\n", encoding))


def test_a_list_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "list.json").symlink_to("/proc/self/mem")  # there, and an error whoever reads it
    with refused(r"^\S+list\.json: the list cannot be read \(.*\); correct its permissions"):
        read_datalist(tmp_path / "list.json")


def test_a_bids_name_tells_the_subject_and_its_number(tmp_path):
    make(tmp_path, "sub-01/ses-01/anat/sub-01_ses-01_T1w.nii.gz sub-01/ses-02/anat/sub-01_ses-02_T1w.nii.gz "
         "sub-02/anat/sub-02_T1w.nii.gz sub-02/anat/sub-02_T2w.nii.gz sub-10/anat/sub-10_T1w.nii.gz")
    assert told(read_datalist(tmp_path), "id", "subject") == [
        ("sub-01_ses-01_T1w", "sub-01"), ("sub-01_ses-02_T1w", "sub-01"), ("sub-02_T1w", "sub-02"),
        ("sub-02_T2w", "sub-02"), ("sub-10_T1w", "sub-10")]
    assert told(read_datalist(tmp_path, ids="1"), "id") == [("sub-01_ses-01_T1w",), ("sub-01_ses-02_T1w",)]
    assert told(read_datalist(tmp_path, ids="2-10"), "subject") == [("sub-02",), ("sub-02",), ("sub-10",)]


def test_a_pattern_finds_the_subject_in_the_path_below_the_data_folder(tmp_path):
    make(tmp_path / "data", "anna/a_1.nii.gz anna/a_2.nii.gz bert/b_1.nii.gz")
    assert told(list_volumes(tmp_path / "data", pattern="^([^/]+)/"), "id", "subject") == [
        ("a_1", "anna"), ("a_2", "anna"), ("b_1", "bert")]
    (tmp_path / "data/list.csv").write_text("image,subject\nanna/a_1.nii.gz,\nanna/a_2.nii.gz,\nbert/b_1.nii.gz,otto\n")
    found = list_volumes(tmp_path / "data/list.csv", pattern=r"([a-z])_\d")
    assert told(found, "subject") == [("a",), ("a",), ("otto",)], "the list's own word comes first"
    (tmp_path / "data").rename(tmp_path / "data [1]")  # no pattern of files, although it looks like one
    found = list_volumes(tmp_path / "data [1]/list.csv", pattern="^([^/]+)/")
    assert told(found, "subject") == [("anna",), ("anna",), ("otto",)]
    (tmp_path / "data [1]").rename(tmp_path / "data")
    for pattern, reason in (("(", "not a regular expression"), ("[a-z]+", "has 0 groups; put one pair"),
                            ("(a)(_)", "has 2 groups"), ("^(a.*)/", "finds no subject in bert/b_1.nii.gz; correct it"),
                            ("^(x?)", "finds no subject in anna/a_1.nii.gz")):
        with refused(f"data.subject_pattern \"{re.escape(pattern)}\".*{reason}"):
            list_volumes(tmp_path / "data", pattern=pattern)


def keys(**changes):
    return {"data.train_ids": "", "data.val_ids": "", "data.val_fraction": 0.05,
            **{f"data.{key}": value for key, value in changes.items()}}


def ids_of(two):
    return tuple([item["id"] for item in items] for items in two)


def test_a_split_column_says_who_is_held_out(tmp_path):
    rows = ["image,split", "a_1.nii.gz,", "b_2.nii.gz,Validation", "X_0001_0001.nii.gz,train", "seg/m.nii.gz,TEST"]
    items = list_volumes(table(tmp_path, "\n".join(rows)))
    assert told(items, "id", "split") == [("X_0001_0001", "train"), ("a_1", ""), ("b_2", "val"), ("m", "test")]
    assert ids_of(split_volumes("x", items, keys())) == (["X_0001_0001", "a_1"], ["b_2"])
    assert ids_of(split_volumes("x", items, keys(train_ids="1", val_fraction=0.9))) == (["X_0001_0001", "a_1"], ["b_2"])
    with refused("ids \"1\" select no volume of the 1 volumes"):
        split_volumes("x", items, keys(val_ids="1"))
    assert told(read_datalist(tmp_path / "list.csv"), "id") == [("X_0001_0001",), ("a_1",)], "to train on"
    assert len(list_volumes(tmp_path / "list.csv")) == 4
    with refused("x: the list keeps all 2 volumes for validation or test; mark some as train"):
        split_volumes("x", items[2:], keys(train_ids="1"))


def test_validation_of_a_json_list(tmp_path):
    make(tmp_path, "a_1.nii.gz a_2.nii.gz imagesVal/v_3.nii.gz imagesVal/v_4.nii.gz imagesVal/v_5.nii.gz")
    pairs = [{"fixed": f"imagesVal/v_{one}.nii.gz", "moving": f"imagesVal/v_{other}.nii.gz"}
             for one, other in ((3, 4), (4, 5))]
    for entries in (pairs, [{"image": f"imagesVal/v_{one}.nii.gz", "split": "train"} for one in (3, 4, 5)]):
        (tmp_path / "dataset.json").write_text(json.dumps(
            {"training": ["a_1.nii.gz", "a_2.nii.gz"], "validation": entries}))
        found = split_volumes("x", list_volumes(tmp_path), keys())
        assert ids_of(found) == (["a_1", "a_2"], ["v_3", "v_4", "v_5"])
    make(tmp_path, "", [{"image": "a_1.nii.gz", "split": "val"}, "a_2.nii.gz"])
    assert ids_of(split_volumes("x", list_volumes(tmp_path), keys())) == (["a_2"], ["a_1"])


def people(names, sessions=1):
    return [{"id": f"{name}_{session}", "subject": name, "split": ""} for name in names for session in range(sessions)]


def test_the_held_out_share_is_of_subjects_and_a_function_of_their_names():
    names = [f"sub-{number:03d}" for number in range(400)]
    held = held_out_subjects(people(names, 3), 0.05)
    assert 10 <= len(held) <= 32 and held == held_out_subjects(people(names[::-1]), 0.05)
    train, val = split_volumes("x", people(names, 3), keys())
    assert len(val) == 3 * len(held) and len(train) + len(val) == 1200
    assert {item["subject"] for item in val} == held and not {item["subject"] for item in train} & held
    assert held < held_out_subjects(people(names), 0.2), "a larger share holds out more"
    # As released: a change would move subjects that somebody has trained on.
    assert sorted(held_out_subjects(people(names[:60]), 0.05)) == ["sub-005", "sub-039"]


def test_volumes_that_are_added_move_nobody():
    rng, names = np.random.default_rng(0), [f"case {number}" for number in range(300)]
    everybody = held_out_subjects(people(names), 0.1)
    for count in rng.integers(60, 300, 50):
        some = rng.permutation(names)[:count].tolist()
        assert held_out_subjects(people(some), 0.1) == everybody & set(some)


def test_a_larger_share_of_the_subjects_has_all_of_a_smaller_one_and_nobody_who_is_held_out():
    items = [{"id": f"s{number:03d}_{scan}", "subject": f"s{number:03d}", "split": ""}
             for number in range(80) for scan in "ab"]

    def sides(train_ids, val_ids=""):
        cfg = {"data.train_ids": train_ids, "data.val_ids": val_ids, "data.val_fraction": 0.1}
        return [{item["subject"] for item in side} for side in split_volumes("list", items, cfg)]

    everybody, held_out = sides("")
    assert sides("100%") == [everybody, held_out]
    shares = [sides(f"{percent}%") for percent in (10, 25, 50)]
    assert all(val == held_out for _, val in shares)
    some, more, most = (train for train, _ in shares)
    assert some < more < most < everybody
    assert [len(train) / len(everybody) for train in (some, more, most)] == pytest.approx([0.1, 0.25, 0.5], abs=0.02)
    train, val = sides("50%", "0-9")
    assert len(train) == 35 and val == {f"s00{number}" for number in range(10)} and not train & val
    hundred = [{"id": f"s{number}", "subject": f"s{number}"} for number in range(100)]
    assert [len(select("list", hundred, f"{percent}%")) for percent in range(1, 101)] == [*range(1, 101)]
    for ids in ("0%", "101%", "%", "2 5%", "1_0%", "1-5%"):
        with pytest.raises(InputError, match="share of the subjects|not a number or a rising range"):
            sides(ids)


def test_two_subjects_at_least_are_held_out_for_a_pair_where_subjects_are_not_few():
    for seed in range(40):
        names = [f"{seed} {number}" for number in range(12)]
        for sessions in (1, 2):
            held = held_out_subjects(people(names, sessions), 0.01)
            assert len(held) >= 2, "two scans of one person are no pair to validate on"
            # Who joins later can only take the place of one that was held out for want of others.
            later = held_out_subjects(people([*names, "new"], sessions), 0.01)
            assert not (later - {"new"}) - held
        assert len(held_out_subjects(people(names[:9]), 0.01)) == 0
        assert held_out_subjects(people(names[:4]), 0.5) and not held_out_subjects(people(names), 0)
        assert not held_out_subjects(people(names[:2], 3), 0.5), "nobody would be left to train on"


def test_the_fraction_holds_out_nobody_whom_the_list_marks_for_training():
    items = people([f"s_{number}" for number in range(40)], 2)
    held = held_out_subjects(items, 0.2)
    marked = [{**item, "split": "train" if item["id"] == f"{min(held)}_1" else ""} for item in items]
    train, val = split_volumes("x", marked, keys(val_fraction=0.2))
    assert {item["subject"] for item in val} == held - {min(held)} and len(train) + len(val) == 80
    assert split_volumes("x", [{**item, "split": "train"} for item in items], keys(val_fraction=0.2))[1] == []


def test_ids_hold_out_subjects_with_all_of_their_volumes():
    items = [{"id": f"scan_{number}", "subject": f"anna{number // 2}", "split": ""} for number in range(8)]
    train, val = ids_of(split_volumes("x", items, keys(val_ids="2-3,5")))
    assert (train, val) == (["scan_0", "scan_1", "scan_6", "scan_7"], ["scan_2", "scan_3", "scan_4", "scan_5"])


def test_ids_come_before_the_fraction():
    items = [{"id": f"s_{number}", "subject": f"s_{number}", "split": ""} for number in range(20)]
    names = [item["id"] for item in items]
    assert len(split_volumes("x", items, keys())[1]) >= 2
    assert ids_of(split_volumes("x", items, keys(train_ids="3-18"))) == (names[3:19], [])
    assert ids_of(split_volumes("x", items, keys(val_ids="18-19"))) == (names[:18], names[18:]), "all others"
    both = split_volumes("x", items, keys(train_ids="1-3", val_ids="3-4"))
    assert ids_of(both) == (names[1:4], names[3:5]), "read_datasets refuses a subject on both sides"


def test_the_number_of_a_subject_is_exact_in_a_float64():
    numbers = [subject_key(f"sub-{number}") for number in range(2000)]
    assert len(set(numbers)) == 2000 and numbers[7] == subject_key("sub-7")
    assert all(0 <= number < 2 ** 48 and int(float(number)) == number for number in numbers)


@pytest.mark.slow
def test_fifteen_thousand_volumes_are_listed_fast(tmp_path):
    names = [f"v_{number:05d}.nii.gz" for number in range(15000)]
    write(tmp_path / "imagesTr" / names[0])
    for name in names[1:]:
        os.close(os.open(tmp_path / "imagesTr" / name, os.O_CREAT))
    (tmp_path / "labelsTr").symlink_to("imagesTr")
    (tmp_path / "masksTr").symlink_to("imagesTr")
    entries = [{role: f"./{role}sTr/{name}" for role in ("image", "label", "mask")} for name in names]
    (tmp_path / "list.json").write_text(json.dumps({"training": entries}))
    with open(tmp_path / "list.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "label", "mask"])
        writer.writeheader()
        writer.writerows(entries)
    for root in (tmp_path, tmp_path / "list.json", tmp_path / "list.csv"):
        start = time.process_time()  # the clock would also count the tests beside this one
        items = read_datalist(root)
        assert time.process_time() - start < 3
        assert len(items) == 15000
        assert items[-1]["label"] == tmp_path / "labelsTr" / names[-1]
        assert items[-1]["mask"] == tmp_path / "masksTr" / names[-1]


def test_segmentations_beside_their_images_are_labels_and_no_images(tmp_path):
    """A flat folder, as people have it: the label maps once made half of the images."""
    make(tmp_path, "sub-01_T1w.nii.gz sub-01_T1w_mask.nii.gz sub-01_dseg.nii.gz sub-02_T1w.nii.gz "
         "sub-02_T1w_mask.nii.gz sub-03_ses-1_T1w.nii.gz sub-03_ses-1_space-T1w_desc-hand_dseg.nii.gz case_7.nii.gz "
         "case_7_Label.nii.gz brain_0000.nii.gz brain_seg.nii.gz alone_9.nii.gz")
    found = {item["image"].name: item["label"] and item["label"].name for item in read_datalist(tmp_path)}
    assert found == {"sub-01_T1w.nii.gz": "sub-01_dseg.nii.gz", "sub-02_T1w.nii.gz": "sub-02_T1w_mask.nii.gz",
                     "sub-03_ses-1_T1w.nii.gz": "sub-03_ses-1_space-T1w_desc-hand_dseg.nii.gz",
                     "case_7.nii.gz": "case_7_Label.nii.gz", "brain_0000.nii.gz": None, "alone_9.nii.gz": None}


def test_a_segmentation_belongs_to_the_image_of_its_space(tmp_path):
    """Names of fMRIPrep: its label maps of the template once went to the images of the subject."""
    make(tmp_path, "sub-01_desc-preproc_T1w.nii.gz sub-01_desc-brain_mask.nii.gz sub-01_dseg.nii.gz "
         "sub-01_label-GM_probseg.nii.gz sub-01_space-MNI_res-2_desc-preproc_T1w.nii.gz "
         "sub-01_space-MNI_res-2_dseg.nii.gz sub-01_space-MNI_res-2_desc-brain_mask.nii.gz "
         "sub-01_space-MNI_res-2_label-GM_probseg.nii.gz sub-02_T1w.nii.gz sub-02_space-MNI_dseg.nii.gz "
         "sub-02_label-WM_probseg.nii.gz sub-02_T2w.nii.gz sub-02_space-T2w_dseg.nii.gz "
         "sub-03_space-MNI_T1w.nii.gz sub-03_dseg.nii.gz sub-04_T1w.nii.gz sub-04_space-orig_dseg.nii.gz "
         "sub-05_space-MNI_res-1_T1w.nii.gz sub-05_space-MNI_res-2_dseg.nii.gz sub-06_desc-b_T1w.nii.gz "
         "sub-06_desc-a_dseg.nii.gz sub-06_desc-b_dseg.nii.gz")
    found = {item["id"]: item["label"] and item["label"].name for item in read_datalist(tmp_path)}
    assert found == {"sub-01_desc-preproc_T1w": "sub-01_dseg.nii.gz", "sub-02_T1w": None,
                     "sub-01_space-MNI_res-2_desc-preproc_T1w": "sub-01_space-MNI_res-2_dseg.nii.gz",
                     "sub-02_T2w": "sub-02_space-T2w_dseg.nii.gz", "sub-03_space-MNI_T1w": None,
                     "sub-04_T1w": "sub-04_space-orig_dseg.nii.gz", "sub-05_space-MNI_res-1_T1w": None,
                     "sub-06_desc-b_T1w": "sub-06_desc-b_dseg.nii.gz"}


def test_a_bids_root_from_datalad_has_each_image_once(tmp_path):
    for folder in ("sub-01/anat", "derivatives/fs/sub-01/anat", "sourcedata/sub-01", ".git/annex/objects/x"):
        write(tmp_path / folder / "sub-01_T1w.nii.gz")
    write(tmp_path / "registered/sub-01_to_F/warped.nii.gz")
    for name in ("results.json", "results.csv"):
        (tmp_path / "registered" / name).symlink_to("../.git/annex/objects/y/gone")
    assert [item["image"] for item in read_datalist(tmp_path)] == [tmp_path / "sub-01/anat/sub-01_T1w.nii.gz"]
    assert len(read_datalist(tmp_path / "derivatives")) == 1, "named itself it is read"
    (tmp_path / "sub-02_T1w.nii.gz").symlink_to(".git/annex/objects/y/gone.nii.gz")
    with refused(r"sub-02_T1w\.nii\.gz: a link to \.git/annex/.*, which does not exist \(1 such .*datalad get"):
        read_datalist(tmp_path)


def test_linked_folders_are_found_and_a_circle_of_links_ends(tmp_path):
    make(tmp_path, "data/sub-01/sub-01_T1w.nii.gz elsewhere/sub-02_T1w.nii.gz")
    (tmp_path / "data/sub-02").symlink_to("../elsewhere")
    (tmp_path / "data/sub-01/all").symlink_to("..")
    (tmp_path / "data/sub-01/itself").symlink_to("itself")  # it once hid all volumes beside it
    assert told(read_datalist(tmp_path / "data"), "id") == [("sub-01_T1w",), ("sub-02_T1w",)]


def test_images_on_a_disk_that_is_not_there_are_missed(tmp_path):
    make(tmp_path, "template.nii.gz labels/a.nii.gz")
    (tmp_path / "images").symlink_to("/nowhere/images")
    with refused("images: this folder cannot be read"):
        read_datalist(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="such permissions are not everywhere")
@pytest.mark.parametrize("names, listed, closed", [
    ("imagesTr/a.nii.gz labelsTr/a.nii.gz", None, "labelsTr"),
    ("images/a.nii.gz labels/a.nii.gz", None, "labels"),
    ("imagesTr/a.nii.gz masksTr/a.nii.gz", None, "masksTr"),
    ("imagesTr/a.nii.gz labelsTr/a.nii.gz", [{"image": "imagesTr/a.nii.gz", "label": "labelsTr/a.nii.gz"}], "labelsTr"),
    ("imagesTr/a.nii.gz", None, "imagesTr")])
def test_a_folder_that_this_user_may_not_enter_is_not_a_missing_one(names, listed, closed):
    program = ("import encodings.utf_8_sig, os, sys\nfrom Dataloader.datalist import read_datalist\n"
               "if os.geteuid() == 0:\n    os.setuid(65534)  # root may read everything\n"
               "try:\n    read_datalist(sys.argv[1])\nexcept ValueError as error:\n    print(error)")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        make(Path(folder), names, listed)
        (Path(folder) / closed).chmod(0)
        done = subprocess.run([sys.executable, "-c", program, folder], cwd=ROOT, capture_output=True, text=True)
        (Path(folder) / closed).chmod(0o755)
    assert done.stdout == (f"{folder}/{closed}: this folder cannot be read (Permission denied); have its permissions "
                           "corrected, or move it out of the data set.\n"), done.stderr


def test_files_of_a_folder_whose_listing_breaks_off_are_found(tmp_path, monkeypatch):
    def entries(folder):
        yield from list(scandir(folder))[:1]
        raise OSError(errno.ESTALE, "Stale file handle")

    make(tmp_path, "imagesTr/a.nii.gz imagesTr/b.nii.gz labelsTr/a.nii.gz labelsTr/b.nii.gz")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: contextlib.nullcontext(entries(folder))
                        if os.path.basename(folder) == "labelsTr" else scandir(folder))
    assert all(item["label"] for item in read_datalist(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="neither such names nor /dev/full are everywhere")
def test_subjects_whose_names_are_not_utf8_have_numbers_and_are_held_out(tmp_path):
    make(tmp_path, " ".join(os.fsdecode(b"J\xf6rg_%d.nii" % number) for number in range(12)))
    train, val = split_volumes("x", list_volumes(tmp_path), keys())
    assert len({subject_key(item["subject"]) for item in train + val}) == 12 and len(val) >= 2


def test_a_pattern_chooses_the_images(tmp_path):
    for name in ("sub-01_T1w", "sub-01_T2w", "sub-01_dseg", "sub-02_T1w"):
        write(tmp_path / name[:6] / f"{name}.nii.gz")
    items = read_datalist(f"{tmp_path}/**/*_T1w.nii.gz")
    assert [(item["id"], item["subject"], item["label"] and item["label"].name) for item in items] == [
        ("sub-01_T1w", "sub-01", "sub-01_dseg.nii.gz"), ("sub-02_T1w", "sub-02", None)]
    assert [item["id"] for item in list_volumes(f"{tmp_path}/**/**/*_T1w.nii.gz")] == ["sub-01_T1w", "sub-02_T1w"]
    items = list_volumes(f"{tmp_path}/*/*_T2w.nii.gz", pattern="^([^/]+)/")
    assert [(item["id"], item["subject"]) for item in items] == [("sub-01_T2w", "sub-01")]


@pytest.mark.parametrize("own", ["results.json results.csv", "parts/1_of_2/results.json"])
def test_results_of_an_earlier_run_are_no_images_unless_a_pattern_asks_for_them(tmp_path, own):
    make(tmp_path, "data/a_T1w.nii.gz data/out/a_to_F/warped.nii.gz data/out/bids/a_space-F_T1w.nii.gz")
    for name in own.split():
        (tmp_path / "data/out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data/out" / name).write_text("{}")
    for root in ("data", "data/**/*_T1w.nii.gz", "data/**/*.nii.gz"):
        assert [item["id"] for item in list_volumes(tmp_path / root)] == ["a_T1w"], root
    for root in ("data/out", "data/out/*/warped.nii.gz", "data/*/*/warped.nii.gz"):
        assert "warped" in [item["id"] for item in list_volumes(tmp_path / root)], root


@pytest.mark.parametrize("names, expected", [
    # As BraTS, ACDC, KiTS, LiTS, CHAOS and BTCV, MM-WHS, UK Biobank, ADNI, and folders of people name their files.
    ("B_1/B_1_t1.nii.gz B_1/B_1_t1ce.nii.gz B_1/B_1_seg.nii.gz B_2/B_2_flair.nii.gz B_2/B_2_seg.nii.gz",
     {"B_1_t1": ("B_1", "t1", "B_1_seg"), "B_1_t1ce": ("B_1", "t1ce", "B_1_seg"),
      "B_2_flair": ("B_2", "flair", "B_2_seg")}),
    ("BraTS-GLI-00002-000-t2f.nii.gz BraTS-GLI-00002-000-seg.nii.gz BraTS-GLI-00002-001-t2f.nii.gz",
     {"BraTS-GLI-00002-000-t2f": ("BraTS-GLI-00002", "t2f", "BraTS-GLI-00002-000-seg"),
      "BraTS-GLI-00002-001-t2f": ("BraTS-GLI-00002", "t2f", None)}),
    ("training/p01/p01_frame01.nii.gz training/p01/p01_frame01_gt.nii.gz training/p01/p01_frame12.nii.gz "
     "training/p01/p01_4d.nii.gz training/p02/p02_frame07.nii.gz",
     {"p01_4d": ("p01", "", None), "p01_frame01": ("p01", "", "p01_frame01_gt"), "p01_frame12": ("p01", "", None),
      "p02_frame07": ("p02", "", None)}),
    ("case_1/imaging.nii.gz case_1/segmentation.nii.gz case_2/imaging.nii.gz",
     {"case_1_imaging": ("case_1", "", "segmentation"), "case_2_imaging": ("case_2", "", None)}),
    (" ".join(f"case_{one}/{name}.nii.gz" for one in (1, 2) for name in (
        "imaging", "segmentation", "instances/kidney_instance-1_annotation-1")),  # KiTS23
     {f"case_{one}_imaging": (f"case_{one}", "", "segmentation") for one in (1, 2)}),
    ("s1/norm.nii.gz s1/aseg.nii.gz s1/aparc+aseg.nii.gz s1/wmparc.nii.gz s1/ribbon.nii.gz "
     "s2/norm.nii.gz s2/aseg.nii.gz",
     {"s1_norm": ("s1", "", "aseg"), "s2_norm": ("s2", "", "aseg")}),  # FreeSurfer
    ("s1/s1_ExtractedBrain0N4.nii.gz s1/s1_BrainSegmentationPosteriors1.nii.gz s2/s2_ExtractedBrain0N4.nii.gz",
     {f"s{one}_ExtractedBrain0N4": (f"s{one}", "", None) for one in (1, 2)}),  # ANTs
    ("volume-0.nii.gz segmentation-0.nii.gz volume-1.nii.gz",
     {"volume-0": ("volume-0", "", "segmentation-0"), "volume-1": ("volume-1", "", None)}),
    ("img/img0001.nii.gz Label/label0001.nii.gz img/img0002.nii.gz",
     {"img0001": ("img0001", "", "label0001"), "img0002": ("img0002", "", None)}),
    ("images/a.nii.gz images/b.nii.gz labels/b.nii.gz other.nii.gz", {"a": ("a", "", None), "b": ("b", "", "b")}),
    ("Images/a1/a1.nii.gz Labels/a1/a1.nii.gz Images/b2/b2_img.nii.gz Labels/b2_seg.nii.gz",
     {"a1": ("a1", "", "a1"), "b2_img": ("b2", "", "b2_seg")}),
    ("p1/images/x.nii.gz p1/masks/x.nii.gz p2/images/x.nii.gz", {"p1_x": ("p1", "", "x"), "p2_x": ("p2", "", None)}),
    ("ct_1_image.nii.gz ct_1_label.nii.gz", {"ct_1_image": ("ct_1_image", "", "ct_1_label")}),
    ("s1/a/T1.nii.gz s1/b/T1.nii.gz s1/b/FLAIR.nii.gz s1/b/seg.nii.gz s2/a/T1.nii.gz",
     {"s1_b_FLAIR": ("s1", "FLAIR", "seg"), "s1_a_T1": ("s1", "T1", None), "s1_b_T1": ("s1", "T1", "seg"),
      "s2_a_T1": ("s2", "T1", None)}),
    ("x/1/ADNI_1_a.nii.gz x/1/ADNI_1_b.nii.gz x/11/ADNI_11_c.nii.gz",
     {"ADNI_1_a": ("1", "", None), "ADNI_1_b": ("1", "", None), "ADNI_11_c": ("11", "", None)}),
    ("10/T1_brain.nii.gz 11/T1_brain.nii.gz",
     {"10_T1_brain": ("10", "T1", None), "11_T1_brain": ("11", "T1", None)}),
    # What was done to a scan makes nobody else of its subject.
    ("I2_T1_brain.nii.gz I2_T2_brain.nii.gz I2_T1.nii.gz I3-PD_n4.nii.gz I2_brain_mask.nii.gz",
     {"I2_T1_brain": ("I2", "T1", "I2_brain_mask"), "I2_T2_brain": ("I2", "T2", "I2_brain_mask"),
      "I2_T1": ("I2", "T1", "I2_brain_mask"), "I3-PD_n4": ("I3", "PD", None)}),
    ("c_7_t1_n4_brain.nii.gz c_7_seg.nii.gz c_8_FLAIR_n4_brain.nii.gz control_n3.nii.gz control_n4.nii.gz",
     {"c_7_t1_n4_brain": ("c_7", "t1", "c_7_seg"), "c_8_FLAIR_n4_brain": ("c_8", "FLAIR", None),
      "control_n3": ("control_n3", "", None), "control_n4": ("control", "", None)}),
    ("sub-1_T1w.nii.gz sub-1_desc-brain_mask.nii.gz sub-2_desc-preproc_T1w.nii.gz sub-2_desc-brain_mask.nii.gz",
     {"sub-1_T1w": ("sub-1", "T1w", "sub-1_desc-brain_mask"),
      "sub-2_desc-preproc_T1w": ("sub-2", "T1w", "sub-2_desc-brain_mask")}),
    ("p1/T1.nii.gz p1/T1_brain.nii.gz p1/seg.nii.gz p2/T1_brain.nii.gz",
     {"p1_T1": ("p1", "T1", "seg"), "p1_T1_brain": ("p1", "T1", "seg"), "p2_T1_brain": ("p2", "T1", None)}),
    (" ".join(f"OASIS1/OASIS1_{number}.nii.gz" for number in range(21)),
     {f"OASIS1_{number}": (f"OASIS1_{number}", "", None) for number in range(21)}),
    # A folder for each scan is nobody of its own.
    (" ".join(f"BraTS-GLI-0000{name}/BraTS-GLI-0000{name}-t1n.nii.gz" for name in ("1-000", "1-001", "2-000")),
     {f"BraTS-GLI-0000{name}-t1n": (f"BraTS-GLI-0000{name[0]}", "t1n", None) for name in ("1-000", "1-001", "2-000")}),
    ("OAS1_1_MR1/OAS1_1_MR1_T1w.nii.gz OAS1_1_MR2/OAS1_1_MR2_T1w.nii.gz OAS1_2_MR1/OAS1_2_MR1_T1w.nii.gz",
     {f"OAS1_{one}_MR{visit}_T1w": (f"OAS1_{one}", "T1w", None) for one, visit in ((1, 1), (1, 2), (2, 1))}),
    ("a/1_pre/T1.nii.gz a/1_post/T1.nii.gz b/1_left/T1.nii.gz brain_T1/brain_T1_3.nii.gz brain_T1/brain_T1_4.nii.gz",
     {"a_1_pre_T1": ("a_1", "T1", None), "a_1_post_T1": ("a_1", "T1", None), "b_1_left_T1": ("b_1", "T1", None),
      "brain_T1_3": ("brain_T1", "", None), "brain_T1_4": ("brain_T1", "", None)}),
    ("site1_20200101/T1.nii.gz site1_20200202/T1.nii.gz site2_20200101/T1.nii.gz",
     {f"{name}_T1": (name, "T1", None) for name in ("site1_20200101", "site1_20200202", "site2_20200101")}),
    # Folders that are no people: of a contrast, a site, a visit, a scanner, a year
    ("T1/P1_T1.nii.gz T1/P2_T1.nii.gz T2/P1_T2.nii.gz", {"P1_T1": ("P1", "T1", None), "P2_T1": ("P2", "T1", None),
                                                       "P1_T2": ("P1", "T2", None)}),
    ("site1/P1/v/T1.nii.gz site1/P2/v/T1.nii.gz site2/P3/v/T1.nii.gz",
     {f"site{site}_P{one}_v_T1": (f"P{one}", "T1", None) for site, one in ((1, 1), (1, 2), (2, 3))}),
    ("3T/anna_T1.nii.gz 3T/bob_T1.nii.gz 2019/carl_T1.nii.gz 2019/2019_dora.nii.gz visit1/visit1_eva.nii.gz",
     {"anna_T1": ("anna", "T1", None), "bob_T1": ("bob", "T1", None), "carl_T1": ("carl", "T1", None),
      "2019_dora": ("2019_dora", "", None), "visit1_eva": ("visit1_eva", "", None)})])
def test_layouts_of_well_known_data_sets(tmp_path, capsys, names, expected):
    make(tmp_path, names)
    found = {item["id"]: (item["subject"], item["modality"], item["label"] and volume_id(item["label"]))
             for item in list_volumes(tmp_path)}
    assert found == expected and not capsys.readouterr().err


@pytest.mark.parametrize("names, lost", [
    ("s1/ct.nii.gz s1/segmentations/liver.nii.gz s1/segmentations/spleen.nii.gz s2/ct.nii.gz",
     "2 of 2 volumes have no label, and 2 of the segm.* such as .*s1/segmentations/liver.nii.gz"),
    ("a.nii.gz b.nii.gz mask.nii.gz", "2 of 2 .* and 1 of .* such as .*mask.nii.gz"),
    ("a.nii.gz a_seg.nii.gz b.nii.gz b_lesion_seg.nii.gz", "1 of 2 .* and 1 of .* such as .*b_lesion_seg.nii.gz"),
    ("averaged/d_avg.nii.gz other/d_avg_seg.nii.gz", "1 of 1 .* and 1 of .* such as .*d_avg_seg.nii.gz"),
    ("images/a.nii.gz labels/lab.nii.gz", "1 of 1 .* and 1 of .* such as .*labels/lab.nii.gz"),
    ("s1/norm.nii.gz s1/aparc+aseg.nii.gz", "1 of 1 .* and 1 of .* such as .*s1/aparc.aseg.nii.gz"),
    ("a_T1W.nii.gz a_brainmask.nii.gz a_consensus_gt.nii.gz",
     "1 of 1 volumes have only a mask as label, and 1 of .* such as .*a_consensus_gt.nii.gz")])
def test_segmentations_of_no_image_are_told_and_are_no_images(tmp_path, capsys, names, lost):
    make(tmp_path, names)
    assert not any(re.search("seg|mask|gt", item["id"]) for item in list_volumes(tmp_path))
    assert re.search(lost + ": name them after their images, or list both", capsys.readouterr().err)
    list_volumes(tmp_path, quiet=True)
    assert not capsys.readouterr().err


def test_masks_among_other_labels_are_told(tmp_path, capsys):
    """FSL's mask of the head and the tissues of the brain once were labels of one training."""
    make(tmp_path, "s1.nii.gz s1_brain.nii.gz s1_brain_mask.nii.gz s1_brain_seg.nii.gz s1_brain_pve_0.nii.gz "
         "s1_brain_pveseg.nii.gz")
    assert {item["id"]: item["label"].name for item in list_volumes(tmp_path)} == {
        "s1": "s1_brain_mask.nii.gz", "s1_brain": "s1_brain_seg.nii.gz"}
    assert re.search("1 of 2 labels are masks, such as .*s1_brain_mask.nii.gz, and the others are not: list",
                     capsys.readouterr().err)


@pytest.mark.parametrize("names, told", [
    ("a.nii.gz b.mha c.mha c_seg.mha", "only its NIfTI files are read, not 2 further volumes there, such as .*b.mha"),
    ("a.nii.gz a.mgz a_seg.nrrd mri/brain.mgz s1/1.dcm s1/2.dcm s2/1.dcm", ""), ("b.mha c.mha", "")])
def test_volumes_of_other_formats_beside_nifti_files_are_told(tmp_path, capsys, names, told):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(128) + b"DICM" * name.endswith("dcm"))
    list_volumes(tmp_path)
    said = capsys.readouterr().err
    assert re.search(told + ".*list all volumes in a .csv", said) if told else not said


def test_segmentations_in_derivatives_are_told(tmp_path, capsys):
    make(tmp_path, "sub-1/sub-1_T1w.nii.gz derivatives/fs/sub-1/sub-1_probseg.nii.gz derivatives/fs/sub-1/a_T1w.nii.gz "
         "derivatives/fs/sub-1/sub-1_desc-brain_mask.nii.gz derivatives/fs/func/sub-1_dseg.nii.gz")
    list_volumes(tmp_path)
    assert not capsys.readouterr().err
    make(tmp_path, "derivatives/labels/sub-1/sub-1_T1w_dseg.nii.gz")
    list_volumes(tmp_path)
    assert re.search("1 of 1 volumes have no label, .* such as .*sub-1_T1w_dseg.nii.gz: ", capsys.readouterr().err)


def test_a_label_that_images_share_belongs_to_those_of_its_shape(tmp_path):
    """A FLAIR of thick slices beside a T1 and its label was refused for the label's grid."""
    make(tmp_path / "one", "sub-1_T1w.nii.gz sub-1_dseg.nii.gz p2_t1.nii.gz p2_adc.nii.gz p2_seg.nii.gz")
    for name in ("sub-1_FLAIR", "p2_t2"):
        write(tmp_path / "one" / f"{name}.nii.gz", (4, 5, 2))
    make(tmp_path / "two", "s1/a.nii.gz s2/a.nii.gz labels/a.nii.gz")
    assert not any(item["label"] for item in list_volumes(tmp_path / "two")), "nobody knows whose label it is"
    assert {item["id"]: bool(item["label"]) for item in list_volumes(tmp_path / "one")} == {
        "p2_adc": True, "p2_t1": True, "p2_t2": False, "sub-1_FLAIR": False, "sub-1_T1w": True}


def test_lists_without_ids_tell_files_of_one_name_apart_and_nnunet_v1_lists_cases(tmp_path):
    make(tmp_path, "s1/T1.nii.gz s2/T1.nii.gz imagesTr/b_7_0000.nii.gz")
    items = list_volumes(table(tmp_path, "image,id\ns1/T1.nii.gz,\ns2/T1.nii.gz,\n"))
    assert told(items, "id", "subject") == [("s1_T1", "s1"), ("s2_T1", "s2")]
    make(tmp_path, "", ["s1/T1.nii.gz", "s2/T1.nii.gz", "./imagesTr/b_7.nii.gz"])
    assert told(list_volumes(tmp_path), "id") == [("b_7",), ("s1_T1",), ("s2_T1",)]


def test_labels_lie_beside_the_folder_that_is_named_and_not_above_it(tmp_path):
    make(tmp_path / "images/study", "images/a.nii.gz labels/a.nii.gz")
    write(tmp_path / "labels/study/images/a.nii.gz")
    for root in ("images/study", "images/study/images"):
        item, = list_volumes(tmp_path / root)
        assert item["label"] == tmp_path / "images/study/labels/a.nii.gz"


def test_ids_are_the_numbers_of_people_and_a_second_scan_renames_nobody(tmp_path):
    make(tmp_path, " ".join(f"P{number:02d}/P{number:02d}_T1.nii.gz" for number in range(1, 31)))
    before = list_volumes(tmp_path)
    assert [item["subject"] for item in select("x", before, "2-4")] == ["P02", "P03", "P04"]
    held_out = {item["subject"] for item in split_volumes("x", before, keys(val_fraction=0.1))[1]}
    make(tmp_path, " ".join(f"P{number:02d}/P{number:02d}_FLAIR.nii.gz" for number in range(5, 20)))
    items = list_volumes(tmp_path)
    assert {item["subject"] for item in split_volumes("x", items, keys(val_fraction=0.1))[1]} == held_out
    assert len({item["subject"] for item in items}) == 30 and len(items) == 45


def test_an_empty_imagesTr_is_named_although_a_volume_lies_beside_it(tmp_path):
    make(tmp_path, "brain.nii.gz")
    (tmp_path / "imagesTr").mkdir()
    with refused(r"imagesTr: found no .nii, .nii.gz or other volume; check the folder"):
        list_volumes(tmp_path)


def test_a_folder_of_pictures_is_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "b.png").write_text("a picture")
    with refused(r'found no .nii, .* volume; save it with one grey channel as NIfTI: .*ReadImage\("b.png"'):
        list_volumes(tmp_path)


def test_capitals_in_suffixes(tmp_path):
    write(tmp_path / "a_1.nii.gz")
    (tmp_path / "B_2.NII.GZ").write_bytes((tmp_path / "a_1.nii.gz").read_bytes())
    assert [item["id"] for item in read_datalist(tmp_path)] == ["B_2", "a_1"]
