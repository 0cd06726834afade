"""DICOM series in (finding E6): pydicom, which the program does not use, writes them."""
import json
import os

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    NuclearMedicineImageStorage,
    RTDoseStorage,
    RTStructureSetStorage,
    UltrasoundMultiFrameImageStorage,
    XRayAngiographicImageStorage,
    generate_uid,
)

import OM_augment
import OM_register
from Dataloader.datalist import list_volumes, read_datalist
from Dataloader.formats import digest, is_series, size_and_time
from Dataloader.nifti import read_header, read_volume, write_volume
from Dataloader.synthetic import make_subject
from Runtime.errors import InputError
from tests.test_om_augment import WORDS

SERIES = "1.2.826.0.1.3680043.8.498.1"
ROW, COLUMN = np.array([0.96, 0.28, 0.0]), np.array([-0.28, 0.96, 0.0])  # LPS: of the columns' index, of the rows'
STEP = np.array([0.0, 0.3, 2.5])  # a tilted gantry: not along the normal
ORIGIN, SPACING = np.array([-40.0, 25.0, 7.0]), (1.5, 0.8)  # of rows, of columns, mm


def image_of(kind, series=SERIES):
    """An image of a kind of storage, without what lies where, and without voxels."""
    item = Dataset()
    item.file_meta = FileMetaDataset()
    item.file_meta.TransferSyntaxUID, item.file_meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, kind
    item.SOPClassUID, item.SOPInstanceUID, item.Modality = kind, generate_uid(), "CT"
    item.file_meta.MediaStorageSOPInstanceUID = item.SOPInstanceUID
    item.StudyInstanceUID, item.SeriesInstanceUID, item.FrameOfReferenceUID = SERIES + ".9", series, SERIES + ".8"
    item.SamplesPerPixel, item.PhotometricInterpretation = 1, "MONOCHROME2"
    item.BitsAllocated, item.BitsStored, item.HighBit, item.PixelRepresentation = 16, 16, 15, 1
    return item


def affine_of(step):
    """Voxel to world, RAS, of slices that lie a step apart."""
    lps = np.eye(4)
    lps[:3] = np.stack([ROW * SPACING[1], COLUMN * SPACING[0], step, ORIGIN], axis=1)
    return np.diag([-1, -1, 1, 1]) @ lps


def write_slice(path, plane, number, series=SERIES, slope=2, step=STEP):
    """One slice, (rows, columns) of int16, stored as (value + 100) / 2, read again as slope / 2 times that."""
    item = image_of(CTImageStorage, series)
    item.InstanceNumber, item.PatientName, item.PatientID = number + 1, "A^B", "1"
    item.Rows, item.Columns = plane.shape[-2:]
    item.PixelSpacing, item.SliceThickness = list(SPACING), 2.5
    item.ImageOrientationPatient = [*ROW, *COLUMN]
    item.ImagePositionPatient = [round(float(value), 4) for value in ORIGIN + number * step]
    item.RescaleSlope, item.RescaleIntercept = slope, -100
    item.PixelData = ((plane + 100) // 2).astype("<i2").tobytes()
    pydicom.dcmwrite(path, item, enforce_file_format=True)


def write_series(folder, volume, **options):
    """volume: (columns, rows, slices), as it is read again. The names say nothing of the order."""
    folder.mkdir(parents=True)
    for number in range(volume.shape[2]):
        write_slice(folder / f"IM{number * 7 % 19:03d}", volume[:, :, number].T, number, **options)
    return folder


@pytest.fixture
def volume():
    return 2 * np.random.default_rng(0).integers(-50, 400, (7, 9, 6)).astype(np.int16)


def test_a_folder_of_slices(tmp_path, volume):
    array, affine = read_volume(write_series(tmp_path / "sub-01", volume))
    np.testing.assert_array_equal(array, volume)
    np.testing.assert_allclose(affine, affine_of(STEP), atol=1e-3)
    assert read_header(tmp_path / "sub-01")[0] == volume.shape
    large = np.zeros((1024, 1024, 3), np.int16)
    assert read_header(write_series(tmp_path / "named_like_a_file.mha", large))[0] == large.shape


def write_frames(path, volume, places):
    """All slices in one file. places: (slices, 3) mm, LPS."""
    item = image_of(EnhancedCTImageStorage)
    item.Columns, item.Rows, item.NumberOfFrames = volume.shape

    def group(**sequences):
        found = Dataset()
        for name, values in sequences.items():
            part = Dataset()
            for key, value in values.items():
                setattr(part, key, value)
            setattr(found, name, [part])
        return found

    item.SharedFunctionalGroupsSequence = [group(
        PixelMeasuresSequence={"PixelSpacing": list(SPACING), "SliceThickness": 2.5, "SpacingBetweenSlices": 2.5},
        PlaneOrientationSequence={"ImageOrientationPatient": [*ROW, *COLUMN]},
        PixelValueTransformationSequence={"RescaleSlope": 2, "RescaleIntercept": -100, "RescaleType": "HU"})]
    item.PerFrameFunctionalGroupsSequence = [group(PlanePositionSequence={
        "ImagePositionPatient": [round(float(value), 4) for value in place]}) for place in places]
    item.PixelData = ((volume.transpose(2, 1, 0) + 100) // 2).astype("<i2").tobytes()
    pydicom.dcmwrite(path, item, enforce_file_format=True)


@pytest.mark.parametrize("step", [np.cross(ROW, COLUMN) * 2.5, np.cross(ROW, COLUMN) * -2.5, STEP],
                         ids=["up", "down", "tilted"])
def test_a_file_of_several_frames(tmp_path, volume, step):
    write_frames(tmp_path / "scan.dcm", volume, ORIGIN + np.outer(range(6), step))
    array, affine = read_volume(tmp_path / "scan.dcm")
    i, j, k = np.rint(np.linalg.inv(affine_of(step)) @ affine @ [1, 2, 3, 1])[:3].astype(int)
    assert array.shape == volume.shape and array[1, 2, 3] == volume[i, j, k]
    np.testing.assert_allclose(affine, affine_of(step), atol=1e-3)


@pytest.mark.parametrize("order, said", [
    ([0, 1, 2, 5, 6, 7], "distances between its 6 slices range from 2.50 to 7.50 mm, .*: export all slices of one"),
    ([0, 3, 1, 4, 2, 5], "range from 5.00 to 7.50 mm"), ([0, 1, 2, 0, 1, 2], "range from 2.50 to 5.00 mm"),
    ([0] * 6, "all slices lie at one place")], ids=["gap", "mixed", "echoes", "cine"])
def test_frames_that_are_no_even_stack_are_refused(tmp_path, volume, order, said):
    """ITK took them for slices 1 mm apart."""
    write_frames(tmp_path / "scan.dcm", volume, ORIGIN + np.outer(order, np.cross(ROW, COLUMN) * 2.5))
    with pytest.raises(InputError, match=f"scan.dcm: .*{said}"):
        read_header(tmp_path / "scan.dcm")


@pytest.mark.parametrize("kind, tags, step", [
    (XRayAngiographicImageStorage, {}, None), (UltrasoundMultiFrameImageStorage, {"SliceThickness": 3}, None),
    (NuclearMedicineImageStorage, {"SpacingBetweenSlices": 2.5}, 2.5),
    (NuclearMedicineImageStorage, {"SpacingBetweenSlices": 1}, 1),
    (RTDoseStorage, {"GridFrameOffsetVector": [0, 1, 2, 3, 4, 5]}, 1)],
    ids=["angiogram", "ultrasound", "tomogram", "tomogram of 1 mm", "dose of 1 mm"])
def test_frames_without_positions_need_a_spacing(tmp_path, volume, kind, tags, step):
    """ITK takes steps of 1 mm for those that have none."""
    item = image_of(kind)
    item.Columns, item.Rows, item.NumberOfFrames = volume.shape
    item.PixelData = volume.T.astype("<i2").tobytes()
    for name, value in tags.items():
        setattr(item, name, value)
    pydicom.dcmwrite(tmp_path / "run.dcm", item, enforce_file_format=True)
    if step:
        shape, affine = read_header(tmp_path / "run.dcm")
        assert shape == volume.shape and np.linalg.norm(affine[:3, 2]) == step
        return
    with pytest.raises(InputError, match="run.dcm: all slices lie at one place, as in a time series or without pos"):
        read_header(tmp_path / "run.dcm")


def test_folders_of_a_study_are_its_volumes(tmp_path, volume):
    for name in ("sub-01", "sub-02/ses-1"):
        write_series(tmp_path / name, volume)
    items = list_volumes(tmp_path)
    assert [(item["id"], item["image"]) for item in items] == [
        ("ses-1", tmp_path / "sub-02/ses-1"), ("sub-01", tmp_path / "sub-01")]


def test_a_folder_of_series_names_one_to_give(tmp_path, volume, capsys):
    series = [write_series(tmp_path / "study" / name, volume) for name in ("CT5N", "CT2N")]
    (tmp_path / "study/a_note").mkdir()
    said = "study: a folder of DICOM series, not a series; give one of them, such as CT2N."
    with pytest.raises(InputError, match=said):
        read_header(tmp_path / "study")
    assert OM_register.main(["--fixed", str(tmp_path / "study"), "--moving", str(series[0]), "--out",
                             str(tmp_path / "out")]) == 43
    assert said in capsys.readouterr().err


def test_other_files_beside_slices_hide_no_volume(tmp_path, volume):
    folder = write_series(tmp_path / "scan", volume)
    (folder / "A note").write_text("first of the folder")
    (folder / "a note.txt").write_text("and of its suffix")
    write_volume(folder / "z_seg.nii.gz", volume, np.eye(4))
    assert [item["image"] for item in list_volumes(tmp_path)] == [folder]
    assert np.array_equal(read_volume(folder)[0], volume)
    write_volume(folder / "z.nii.gz", volume, np.eye(4))
    assert [item["image"] for item in list_volumes(tmp_path)] == [folder / "z.nii.gz"], "NIfTI comes first"
    (folder / "z.nii.gz").rename(folder / "A.nii.gz")
    assert not is_series(folder), "a folder of volumes with slices among them"


def test_a_list_may_name_folders_of_slices(tmp_path, volume):
    folder = write_series(tmp_path / "scans/one", volume)
    (tmp_path / "list.csv").write_text("image,subject\nscans/one/,anna\n")
    [item] = read_datalist(tmp_path / "list.csv")
    assert (item["id"], item["image"], item["subject"]) == ("one", folder, "anna")


def test_a_folder_without_a_file_has_no_size_or_time(tmp_path):
    (tmp_path / "study/series").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        size_and_time(tmp_path / "study")


def test_another_slice_makes_another_volume(tmp_path, volume):
    folder = write_series(tmp_path / "scan", volume)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    before = size_and_time(folder), digest(folder)
    assert before == (size_and_time(folder), digest(folder))
    write_slice(folder / "IM007", volume[:, :, 1].T + 2, 1)
    assert size_and_time(folder) != before[0] and digest(folder) != before[1]


def test_what_is_no_whole_volume_is_one_sentence(tmp_path, volume):
    folder = write_series(tmp_path / "gap", volume)
    (folder / "IM009").unlink()
    with pytest.raises(InputError, match=r"gap: the distances between its 5 slices range from 2\.52 to 5\.04 mm"):
        read_header(folder)
    folder = write_series(tmp_path / "two", volume)
    write_slice(folder / "other", volume[:, :, 0].T, 0, series=SERIES + ".5")
    with pytest.raises(InputError, match="two: the folder has 2 DICOM series; put each into its own folder"):
        read_header(folder)
    write_slice(tmp_path / "one.dcm", volume[:, :, 0].T, 0)
    with pytest.raises(InputError, match="one.dcm: this is one slice of a DICOM series; give the folder with all .* an "
                                         "X-ray, needs a folder of its own: give that folder.$"):
        read_header(tmp_path / "one.dcm")
    folder = write_series(tmp_path / "turned", volume)
    write_slice(folder / "IM000", volume[:, :5, 0].T, 0)
    with pytest.raises(InputError, match="turned: the slices have several sizes or directions"):
        read_header(folder)
    folder = write_series(tmp_path / "treated", volume)
    item = image_of(RTStructureSetStorage, SERIES + ".7")
    pydicom.dcmwrite(folder / "RS", item, enforce_file_format=True)
    assert np.array_equal(read_volume(folder)[0], volume), "what is no image may lie beside them"
    folder = write_series(tmp_path / "cut", volume)
    last = folder / f"IM{5 * 7 % 19:03d}"  # without it, the others are a whole volume
    last.write_bytes(last.read_bytes()[:400])
    with pytest.raises(InputError, match=f"cut: {last.name} belongs to no series or cannot be read, .*copy it again"):
        read_volume(folder)
    folder = write_series(tmp_path / "cine", volume, step=0 * STEP)
    with pytest.raises(InputError, match="cine: all slices lie at one place"):
        read_header(folder)


def test_slices_with_scales_of_their_own(tmp_path, volume):
    """As in PET. ITK takes the number type of the first slice for all: values were wrapped or cut to whole numbers."""
    folder, wanted = tmp_path / "pet", []
    folder.mkdir()
    for number, slope in enumerate([1, 2.5, 0.25, 40.0, 3, 1][:volume.shape[2]]):
        write_slice(folder / f"IM{number:03d}", volume[:, :, number].T, number, slope=slope)
        wanted.append((volume[:, :, number] + 100) // 2 * slope - 100)
    found = read_volume(folder)[0]
    assert np.array_equal(found, np.float32(np.stack(wanted, 2))) and (found % 1).any()


def test_without_simpleitk_a_sentence_says_what_to_install(tmp_path, volume, monkeypatch):
    folder = write_series(tmp_path / "scan", volume)
    monkeypatch.setitem(__import__("sys").modules, "SimpleITK", None)
    with pytest.raises(InputError, match="scan: a DICOM series needs SimpleITK: pip install SimpleITK, or convert"):
        read_volume(folder)


def test_a_series_is_registered(tmp_path, capsys):
    for number, name in enumerate(("F", "M")):
        image = make_subject(number, (14, 16, 18))["image"]
        write_series(tmp_path / name, 2 * np.round(400 * image).astype(np.int16))
    words = ["--fixed", tmp_path / "F", "--moving", f"{tmp_path}/M/", "--affine", "none", "--refine", "2", "--device",
             "cpu", "--out", tmp_path / "out"]  # a shell completes the name of a folder with a slash
    assert OM_register.main(list(map(str, words))) == 0, capsys.readouterr().err
    [row] = json.loads((tmp_path / "out/results.json").read_text())["pairs"]
    assert row["name"] == "M to F" and len(row["source"]["moving"]) == 64
    warped, affine = read_volume(tmp_path / "out/warped.nii.gz")
    assert warped.shape == (14, 16, 18)
    np.testing.assert_allclose(affine, read_header(tmp_path / "F")[1], atol=1e-4)


@pytest.mark.slow
def test_copies_of_series_are_made_and_made_anew_after_a_change(tmp_path):
    for number, name in enumerate(("A", "B")):
        image = make_subject(number, (14, 16, 18))["image"]
        write_series(tmp_path / "data" / name, 2 * np.round(400 * image).astype(np.int16))
    words = [*WORDS, "--draws", "1", "--out"]
    every, copies = ["--data", str(tmp_path / "data"), *words, str(tmp_path / "all")], tmp_path / "all/imagesTr"
    assert OM_augment.main(every) == 0
    before = {path.name: path.stat().st_mtime_ns for path in copies.iterdir()}
    assert set(before) == {"A_draw00.nii.gz", "B_draw00.nii.gz"}
    assert OM_augment.main(["--image", f"{tmp_path}/data/A/", *words, str(tmp_path / "one")]) == 0
    [copy] = (tmp_path / "one/imagesTr").iterdir()
    assert copy.name == "A_draw00.nii.gz" and copy.read_bytes() == (copies / copy.name).read_bytes()
    write_slice(tmp_path / "data/A/IM000", np.full((16, 14), 6, np.int16), 0)
    assert OM_augment.main(every) == 0
    assert [name for name in before if (copies / name).stat().st_mtime_ns != before[name]] == [copy.name]
