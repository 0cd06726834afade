import json
import re
from pathlib import Path

import nibabel
import numpy as np
import pytest

from Dataloader.datalist import read_datalist, read_pairs, volume_id
from Runtime.errors import InputError

HIPPOCAMPUS = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "hippocampus"


def write(path, shape=(4, 5, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    nibabel.save(nibabel.Nifti1Image(data, np.eye(4)), path)


def decathlon(root, names, labels=True):
    entries = []
    for name in names:
        write(root / "imagesTr" / name)
        entries.append({"image": f"./imagesTr/{name}"})
        if labels:
            write(root / "labelsTr" / name)
            entries[-1]["label"] = f"./labelsTr/{name}"
    (root / "dataset.json").write_text(json.dumps({"training": entries}))


def refused(match):
    return pytest.raises(InputError, match=match)


def test_decathlon_layout(tmp_path):
    decathlon(tmp_path, ["b_002.nii.gz", "a_001.nii.gz"])
    write(tmp_path / "imagesTr" / "unlisted_003.nii.gz")
    items = read_datalist(tmp_path)
    assert [item["id"] for item in items] == ["a_001", "b_002"]
    assert items[0]["image"].samefile(tmp_path / "imagesTr" / "a_001.nii.gz")
    assert items[0]["label"].samefile(tmp_path / "labelsTr" / "a_001.nii.gz")


def test_learn2reg_layout_with_channel_suffixes_and_plain_strings(tmp_path):
    for name in ("OASIS_0001_0000.nii.gz", "OASIS_0002_0000.nii.gz"):
        write(tmp_path / "imagesTr" / name)
    training = ["./imagesTr/OASIS_0002_0000.nii.gz", {"image": "./imagesTr/OASIS_0001_0000.nii.gz"}]
    (tmp_path / "dataset.json").write_text(json.dumps({"training": training}))
    items = read_datalist(tmp_path, ids="2")
    assert [(item["id"], item["label"]) for item in items] == [("OASIS_0002", None)]


@pytest.mark.parametrize("name, expected", [
    ("x/hippocampus_001.nii.gz", "hippocampus_001"), ("a.b_7.nii", "a.b_7"), ("OASIS_0007_0000.nii.gz", "OASIS_0007"),
    ("subject_0000.nii.gz", "subject_0000"), ("OASIS_0007", "OASIS_0007"), ("OASIS_0007_0000", "OASIS_0007")])
def test_volume_id(name, expected):
    assert volume_id(name) == expected


def test_folder_with_images_and_labels(tmp_path):
    for name in ("s_1.nii.gz", "s_2.nii", "nnunet_3_0000.nii.gz"):
        write(tmp_path / "imagesTr" / name)
    for name in ("s_1.nii.gz", "s_2.nii", "nnunet_3.nii.gz"):
        write(tmp_path / "labelsTr" / name)
    write(tmp_path / "elsewhere_9.nii.gz")
    items = read_datalist(tmp_path)
    assert [item["id"] for item in items] == ["nnunet_3", "s_1", "s_2"]
    assert [item["label"].name for item in items] == ["nnunet_3.nii.gz", "s_1.nii.gz", "s_2.nii"]


def test_plain_folder_is_searched_but_not_its_labels(tmp_path):
    for name in ("deep/er/s_1.nii.gz", "s_2.nii", "labelsTs/s_1.nii.gz", "._s_2.nii"):
        write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no volume")
    items = read_datalist(tmp_path)
    assert [(item["id"], item["label"]) for item in items] == [("s_1", None), ("s_2", None)]
    write(tmp_path / "labelsTr" / "s_1.nii.gz")
    write(tmp_path / "labelsTr" / "s_2.nii")
    assert [item["label"].parent.name for item in read_datalist(tmp_path)] == ["labelsTr", "labelsTr"]
    assert len(read_datalist(tmp_path / "deep")) == 1


def test_images_folder_itself_as_root_finds_its_labels(tmp_path):
    write(tmp_path / "imagesTr" / "s_1.nii.gz")
    write(tmp_path / "labelsTr" / "s_1.nii.gz")
    assert read_datalist(tmp_path / "imagesTr")[0]["label"].samefile(tmp_path / "labelsTr" / "s_1.nii.gz")


def test_2d_folder(tmp_path):
    write(tmp_path / "a_1.nii.gz", (6, 5))
    write(tmp_path / "a_2.nii.gz", (7, 5, 1))
    assert len(read_datalist(tmp_path, dims=2)) == 2
    with refused(r"a_1\.nii\.gz: shape \(6, 5\) is not 3D"):
        read_datalist(tmp_path, dims=3)


@pytest.mark.parametrize("ids, expected", [
    ("", [1, 5, 60, 75, 201]), (" ", [1, 5, 60, 75, 201]), ("1-60,75", [1, 5, 60, 75]), (" 5 , 201-230 ", [5, 201]),
    ("2-60", [5, 60]), (75, [75]), ("9-9,1", [1])])
def test_ids_select_by_the_last_number(tmp_path, ids, expected):
    decathlon(tmp_path, [f"t2_{number:03d}.nii.gz" for number in (1, 5, 60, 75, 201)], labels=False)
    assert [int(item["id"][3:]) for item in read_datalist(tmp_path, ids=ids)] == expected


@pytest.mark.parametrize("ids", ["1-", "a", "1,,2", "9-3", "1;2", "-4", "1-2-3"])
def test_bad_ids(tmp_path, ids):
    decathlon(tmp_path, ["a_1.nii.gz"])
    with refused(f"{re.escape(str(tmp_path))}: ids \"{re.escape(ids)}\" has the bad part"):
        read_datalist(tmp_path, ids=ids)


def test_ids_that_select_nothing_name_what_exists(tmp_path):
    decathlon(tmp_path, ["a_3.nii.gz", "a_7.nii.gz", "no_number.nii.gz"])
    with refused(f"{re.escape(str(tmp_path))}: ids \"4-6\" select none of the 3 volumes from a_3 to no_number"):
        read_datalist(tmp_path, ids="4-6")


def test_missing_root(tmp_path):
    with refused("nowhere: no such data folder"):
        read_datalist(tmp_path / "nowhere")


def test_root_is_a_file(tmp_path):
    write(tmp_path / "one.nii.gz")
    with refused(r"one\.nii\.gz: a file, not a data folder"):
        read_datalist(tmp_path / "one.nii.gz")


def test_no_volume(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused("empty: no .nii or .nii.gz volume found"):
        read_datalist(tmp_path / "empty")
    (tmp_path / "empty" / "dataset.json").write_text('{"training": []}')
    with refused("empty: no .nii or .nii.gz volume found"):
        read_datalist(tmp_path / "empty")


@pytest.mark.parametrize("content, reason", [
    (b'{"training": [', "not valid JSON"), (b"\xff\xfe\x00x", "not valid JSON"), (b'{"test": []}', "no list under"),
    (b"[]", "no list under"), (b'{"training": {"image": "a"}}', "no list under"),
    (b'{"training": [{"label": "a"}]}', "has no image path"), (b'{"training": [7]}', "has no image path")])
def test_malformed_json(tmp_path, content, reason):
    (tmp_path / "dataset.json").write_bytes(content)
    with refused(f"dataset.json: .*{reason}"):
        read_datalist(tmp_path)


def test_label_entry_that_is_no_path(tmp_path):
    write(tmp_path / "a_1.nii.gz")
    (tmp_path / "dataset.json").write_text('{"training": [{"image": "a_1.nii.gz", "label": 3}]}')
    with refused(r"dataset.json: the label 3 of a_1\.nii\.gz is not a path"):
        read_datalist(tmp_path)


def test_listed_image_missing(tmp_path):
    decathlon(tmp_path, ["a_1.nii.gz", "a_2.nii.gz"])
    (tmp_path / "imagesTr" / "a_2.nii.gz").unlink()
    with refused(r"imagesTr/a_2\.nii\.gz: the image listed in .*dataset.json is missing"):
        read_datalist(tmp_path)


def test_listed_label_missing(tmp_path):
    decathlon(tmp_path, ["a_1.nii.gz", "a_2.nii.gz"])
    (tmp_path / "labelsTr" / "a_2.nii.gz").unlink()
    with refused(r"labelsTr/a_2\.nii\.gz: the label listed .* is missing; restore it or drop the label entry"):
        read_datalist(tmp_path)


def test_folder_label_missing(tmp_path):
    decathlon(tmp_path, ["a_1.nii.gz", "a_2.nii.gz"])
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "labelsTr" / "a_1.nii.gz").unlink()
    with refused(r"labelsTr/a_1\.nii\.gz: the label of .* is missing; restore it"):
        read_datalist(tmp_path)


def test_duplicate_ids(tmp_path):
    write(tmp_path / "one" / "a_1.nii.gz")
    write(tmp_path / "two" / "a_1.nii")
    with refused(r"two volumes have the id a_1 \(.*one/a_1\.nii\.gz and .*two/a_1\.nii\)"):
        read_datalist(tmp_path)


def test_broken_first_volume_is_named(tmp_path):
    decathlon(tmp_path, ["a_1.nii.gz"])
    (tmp_path / "imagesTr" / "a_1.nii.gz").write_bytes(b"not a volume")
    with refused(r"a_1\.nii\.gz: not a readable NIfTI"):
        read_datalist(tmp_path)


ITEMS = [{"id": "OASIS_0001"}, {"id": "OASIS_0002"}, {"id": "OASIS_0003"}]
PAIRS = [{"fixed": "./imagesTr/OASIS_0001_0000.nii.gz", "moving": "./imagesTr/OASIS_0003_0000.nii.gz"},
         {"fixed": "OASIS_0002", "moving": "OASIS_0001"}]


@pytest.mark.parametrize("content", [PAIRS, {"pairs": PAIRS}, {"registration_val": PAIRS, "name": "x"},
                                     {"registration_test": PAIRS}])
def test_pairs_are_moving_then_fixed(tmp_path, content):
    (tmp_path / "pairs.json").write_text(json.dumps(content))
    assert read_pairs(tmp_path / "pairs.json", ITEMS) == [(2, 0), (0, 1)]


@pytest.mark.parametrize("content, reason", [
    ([{"fixed": "OASIS_0001", "moving": "OASIS_0009"}], "the moving volume OASIS_0009 is not in the data list"),
    ([{"fixed": "x.nii", "moving": "OASIS_0001"}], "the fixed volume x is not in the data list"),
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


@pytest.mark.skipif(not HIPPOCAMPUS.is_dir(), reason="needs the hippocampus volumes")
def test_real_decathlon_folder():
    items = read_datalist(HIPPOCAMPUS)
    assert len(items) == 90 and all(item["label"].is_file() for item in items)
    some = read_datalist(HIPPOCAMPUS, ids="1-8")
    assert [item["id"][-3:] for item in some] == ["001", "003", "004", "006", "007", "008"]
