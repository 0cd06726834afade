"""Inference/outputs.py: number types and headers of what is written."""
import nibabel
import numpy as np
import pytest

from Dataloader.nifti import read_field, read_raw_header, read_volume, write_field, write_volume
from Inference.outputs import write_moved, write_warped
from tests.test_nifti import OBLIQUE

ARRAY = np.linspace(-3.6, 300.6, 60, dtype=np.float32).reshape(3, 4, 5)


def write_source(folder, dtype, slope=None):
    header = nibabel.Nifti1Header()
    header["descrip"], header["cal_max"] = b"a scanner", 777
    path = folder / "source.nii.gz"
    write_volume(path, np.zeros(ARRAY.shape, dtype), OBLIQUE, header)
    if slope:
        image = nibabel.load(path)
        scaled = nibabel.Nifti1Image(image.get_fdata() + 2.5, OBLIQUE, header)
        scaled.header.set_slope_inter(slope, 0)
        scaled.set_data_dtype(dtype)
        nibabel.save(scaled, path)
    return path


@pytest.mark.parametrize("dtype, slope, moved, warped", [
    (np.uint8, None, np.uint8, np.uint8), (">i2", None, np.int16, np.int16), (np.float64, None, np.float64, np.float32),
    (np.float32, None, np.float32, np.float32), (np.int16, 0.5, np.float32, np.float32)])
def test_the_number_type_of_the_source_is_kept(tmp_path, dtype, slope, moved, warped):
    source = write_source(tmp_path, dtype, slope)
    header = read_raw_header(source)
    write_moved(tmp_path / "moved.nii.gz", ARRAY, source, OBLIQUE, header)
    write_warped(tmp_path / "warped.nii.gz", ARRAY, source, OBLIQUE, header)
    for name, expected, cal_max in (("moved", moved, 777), ("warped", warped, 0)):
        image = nibabel.load(tmp_path / f"{name}.nii.gz")
        assert image.get_data_dtype() == expected
        assert image.header["descrip"].item() == b"a scanner" and image.header["cal_max"] == cal_max
        whole = np.issubdtype(expected, np.integer)
        limits = (0, 255) if expected == np.uint8 else (-32768, 32767)
        values = np.clip(np.rint(ARRAY), *limits) if whole else ARRAY
        np.testing.assert_array_equal(np.asarray(image.dataobj), values.astype(expected))


def test_an_axis_longer_than_nifti_1_has_is_written_as_nifti_2(tmp_path):
    source, shape = tmp_path / "source.nii", (33000, 2)
    write_volume(source, np.zeros(shape, np.uint8), OBLIQUE)
    header, array = read_raw_header(source), np.float32(np.arange(66000).reshape(shape) % 200)
    write_warped(tmp_path / "warped.nii", array, source, OBLIQUE, header)
    write_field(tmp_path / "field.nii", np.ones((2, *shape), np.float32), OBLIQUE, header)
    assert isinstance(nibabel.load(tmp_path / "warped.nii"), nibabel.Nifti2Image)
    np.testing.assert_array_equal(read_volume(tmp_path / "warped.nii", 2)[0], array)
    np.testing.assert_allclose(read_field(tmp_path / "field.nii", 2)[0], 1, atol=1e-4)
