import json
import sys

import numpy as np
import pytest
from scipy import ndimage

from Dataloader import synthetic
from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_label, read_volume

SIZES = [(24, 24, 24), (20, 28, 24), (40, 40), (32, 48)]


def determinant(field):
    gradient = np.stack([np.stack(np.gradient(part)) for part in field])
    return np.linalg.det(np.moveaxis(gradient, (0, 1), (-2, -1)) + np.eye(len(field)))


@pytest.mark.parametrize("size", SIZES)
def test_template_has_every_label_and_an_empty_border(size):
    image, label = synthetic.template(size, len(size))
    assert image.shape == label.shape == size
    assert image.dtype == np.float32 and label.dtype == np.int16
    assert np.unique(label).tolist() == list(range(len(synthetic.LABELS)))
    assert 0.8 < image.max() <= 1 and image.min() == 0
    for axis in range(len(size)):
        assert not np.take(image, [0, -1], axis).any()
        assert not np.take(label, [0, -1], axis).any()


def test_template_is_the_same_anatomy_at_every_size():
    small, large = synthetic.template(24, 3)[1], synthetic.template((48, 24, 36), 3)[1]
    share_small, share_large = (np.bincount(x.ravel(), minlength=7) / x.size for x in (small, large))
    np.testing.assert_allclose(share_small[1:], share_large[1:], rtol=0.15)


def test_template_has_contrast_inside_every_structure():
    image, label = synthetic.template(48, 3)
    for number in range(1, 7):
        assert image[label == number].std() > 0.01


@pytest.mark.parametrize("size", SIZES)
def test_subject_is_deterministic_and_seeds_differ(size):
    dims = len(size)
    first, again, other = (synthetic.make_subject(seed, size, dims=dims) for seed in (5, 5, 6))
    for key in ("image", "label", "field"):
        assert np.array_equal(first[key], again[key])
        assert not np.array_equal(first[key], other[key])
    assert first["field"].shape == (dims, *size)
    assert first["image"].dtype == first["field"].dtype == np.float32 and first["label"].dtype == np.int16
    assert first["image"].min() >= 0


@pytest.mark.parametrize("size", SIZES)
def test_subject_is_the_template_warped_by_its_field(size):
    subject = synthetic.make_subject(3, size, dims=len(size))
    image, label = synthetic.template(size, len(size))
    points = np.indices(size) + subject["field"]
    assert np.array_equal(ndimage.map_coordinates(label, points, order=0), subject["label"])
    warped = ndimage.map_coordinates(image, points, order=1)
    assert np.corrcoef(warped.ravel(), subject["image"].ravel())[0, 1] > 0.97
    assert np.corrcoef(image.ravel(), subject["image"].ravel())[0, 1] < 0.95


@pytest.mark.parametrize("size", [(28, 28, 28), (20, 32, 24), (48, 48), (32, 56)])
def test_field_has_the_amplitude_asked_for_and_no_folds(size):
    sides = np.array(size).reshape(-1, *[1] * len(size))
    for seed in range(8):
        field = synthetic.random_field(seed, size, dims=len(size))
        assert np.sqrt(np.mean((field / sides) ** 2)) == pytest.approx(synthetic.AMPLITUDE, rel=0.02)
        assert determinant(field).min() > 0.05
    small = synthetic.random_field(0, size, amplitude=0.01, dims=len(size))
    assert np.sqrt(np.mean((small / sides) ** 2)) == pytest.approx(0.01, rel=0.02)


def test_zero_amplitude_is_the_template():
    subject = synthetic.make_subject(1, 24, amplitude=0)
    assert not subject["field"].any()
    assert np.array_equal(subject["label"], synthetic.template(24)[1])


@pytest.mark.parametrize("size", [(16, 24, 20), (24, 32)])
def test_write_dataset_reads_back(tmp_path, size):
    dims = len(size)
    folder = synthetic.write_dataset(tmp_path / "set", [0, 1, 12], size, dims=dims, with_fields=True)
    items = read_datalist(folder, dims)
    assert [item["id"] for item in items] == ["subject_0000", "subject_0001", "subject_0012"]
    assert [item["id"] for item in read_datalist(folder, dims, ids="1-20")] == ["subject_0001", "subject_0012"]
    subject = synthetic.make_subject(12, size, dims=dims)
    image, affine = read_volume(items[2]["image"], dims)
    label, label_affine = read_label(items[2]["label"], dims)
    assert np.abs(image / 1000 - subject["image"]).max() <= 0.00051
    assert np.array_equal(label, subject["label"])
    assert np.array_equal(affine, np.eye(4)) and np.array_equal(label_affine, np.eye(4))
    assert np.array_equal(np.load(folder / "fieldsTr" / "subject_0012.npy"), subject["field"])
    assert json.loads((folder / "dataset.json").read_text())["labels"] == synthetic.LABELS


def test_too_small_a_size_is_refused():
    with pytest.raises(ValueError, match="too small"):
        synthetic.template(4, 3)


def test_command_line_writes_a_data_set_without_fields(tmp_path, monkeypatch):
    words = "--count 2 --first-seed 7 --size 24 32 --dims 2 --amplitude 0.02".split()
    monkeypatch.setattr(sys, "argv", ["synthetic", "--out", str(tmp_path), *words])
    synthetic.main()
    items = read_datalist(tmp_path, dims=2)
    assert [item["id"] for item in items] == ["subject_0007", "subject_0008"]
    assert np.array_equal(read_label(items[0]["label"], 2)[0],
                          synthetic.make_subject(7, (24, 32), amplitude=0.02, dims=2)["label"])
    assert not (tmp_path / "fieldsTr").exists()


@pytest.mark.parametrize("words", ["--count 0", "--count 1 --size 16 16", "--count 1 --size 4",
                                   "--count 1 --first-seed -1"])
def test_command_line_refuses_bad_numbers(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["synthetic", "--out", str(tmp_path / "new"), *words.split()])
    with pytest.raises(SystemExit) as ended:
        synthetic.main()
    assert ended.value.code == 43 and "error: --" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
