import gzip
import itertools
import os
import re
import struct
import tracemalloc

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
from nibabel.cmdline import convert, roi
from PIL import Image

from Dataloader import nifti
from Dataloader.grids import grid_transform, intensity_range, rescale, to_canonical, to_grid
from Dataloader.nifti import (
    open_nifti,
    placement_doubts,
    read_header,
    read_label,
    read_volume,
    read_voxels,
    write_volume,
)
from Dataloader.prepare import on_grid
from Dataloader.volume import dims_of, read_mask, read_source
from Runtime.errors import InputError
from Runtime.files import partial_path
from tests.tiny import config

LPS = np.diag([-1.0, -1.0, 1.0])


def normalise(array):
    """As Dataloader/prepare.py does."""
    return rescale(array, *intensity_range(array))


def rotation(degrees):
    a, b, c = np.deg2rad(degrees)
    about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    about_y = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    return np.array([[np.cos(c), -np.sin(c), 0], [np.sin(c), np.cos(c), 0], [0, 0, 1]]) @ about_y @ about_x


def make_affine(axes=(0, 1, 2), signs=(1, 1, 1), spacing=(1, 1, 1), degrees=(0, 0, 0), origin=(5, -7, 3)):
    affine = np.eye(4)
    affine[:3, :3] = rotation(degrees) @ np.eye(3)[:, list(axes)] @ np.diag(np.multiply(signs, spacing))
    affine[:3, 3] = origin
    return affine


def tilted_affine(degrees=25):
    """Voxels of 1 x 1 x 2.5 mm of a CT with a tilted gantry, whose slices follow each other along the table."""
    affine = make_affine(spacing=(1, 1, 2.5))
    affine[:3, 2] = 2.5 * np.array([0, np.sin(np.deg2rad(degrees)), np.cos(np.deg2rad(degrees))])
    return affine


OBLIQUE = make_affine((2, 0, 1), (-1, 1, -1), (0.9, 1.6, 1.2), (12, -8, 15))
HEADERS = [((20, 26, 31), make_affine()), ((20, 26, 31), make_affine(signs=(-1, -1, 1), spacing=(0.8, 0.8, 2))),
           ((31, 18, 24), make_affine((1, 2, 0), (1, -1, 1), (1.5, 1, 0.7))), ((24, 18, 29), OBLIQUE)]


def blob(shape, centre, width=2.5):
    grid = np.indices(shape) - np.reshape(centre, (-1,) + (1,) * len(shape))
    return np.exp(-(grid ** 2).sum(0) / (2 * width ** 2)).astype(np.float32)


def noise(shape=(6, 7, 8), dtype=np.float32):
    return (100 * np.random.default_rng(0).random(shape)).astype(dtype)


def save(path, array, affine=None):
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def refused(name, reason):
    return pytest.raises(InputError, match=f"{name}: .*{reason}")


@pytest.mark.parametrize("shape, affine", HEADERS)
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_write_then_read(tmp_path, shape, affine, suffix):
    array = noise(shape)
    path = tmp_path / "new" / f"v{suffix}"
    write_volume(path, array, affine)
    back, back_affine = read_volume(path)
    assert np.array_equal(back, array) and back.dtype == np.float32 and back.flags.c_contiguous
    assert back_affine.dtype == np.float64
    np.testing.assert_allclose(back_affine, affine, atol=1e-5)
    header_shape, header_affine = read_header(path)
    assert header_shape == shape and np.array_equal(header_affine, back_affine)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "float32", "float64", "bool", "float16"])
def test_write_keeps_dtype(tmp_path, dtype):
    array = (noise() > 50).astype(dtype)
    write_volume(tmp_path / "v.nii.gz", array, np.eye(4))
    image = nibabel.load(tmp_path / "v.nii.gz")
    assert image.get_data_dtype() == {"bool": "uint8", "float16": "float32"}.get(dtype, dtype)
    assert np.array_equal(np.asanyarray(image.dataobj), array)


def test_write_keeps_header_fields(tmp_path):
    source = nibabel.Nifti1Image(noise(dtype=np.int16), np.eye(4))
    source.header["descrip"] = b"scanner seven"
    source.set_sform(np.eye(4), 4)
    source.set_qform(np.eye(4), 0)
    write_volume(tmp_path / "v.nii.gz", noise((9, 5, 4)), OBLIQUE, source.header)
    header = nibabel.load(tmp_path / "v.nii.gz").header
    assert header["descrip"].item() == b"scanner seven"
    assert (int(header["sform_code"]), int(header["qform_code"])) == (4, 1)
    assert header.get_data_shape() == (9, 5, 4) and header.get_data_dtype() == np.float32
    np.testing.assert_allclose(header.get_sform(), OBLIQUE, atol=1e-5)
    assert source.header.get_data_shape() == (6, 7, 8) and source.header.get_data_dtype() == np.int16


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_the_bytes_are_those_of_nibabel_whatever_the_name(tmp_path, suffix):
    array = noise((30, 31, 32))
    image = nibabel.Nifti1Image(array, OBLIQUE, dtype=np.float32)
    image.set_qform(OBLIQUE, 1)
    image.set_sform(OBLIQUE, 1)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / f"theirs{suffix}")
    for name in ("a", "another"):
        write_volume(tmp_path / f"{name}{suffix}", array, OBLIQUE)
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_content_and_name_are_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def flushed(handle):
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def renamed(old, new):
        done.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_volume(tmp_path / "v.nii.gz", noise(), np.eye(4))
    assert done == [str(partial_path(tmp_path / "v.nii.gz")), "renamed", str(tmp_path)]


@pytest.mark.parametrize("unit, mm", [("mm", 1), ("micron", 1e-3), ("meter", 1e3), ("unknown", 1)])
@pytest.mark.parametrize("codes", [(1, 1), (0, 1), (1, 0)])
def test_units_of_length_as_in_itk(tmp_path, unit, mm, codes):
    affine = np.diag([1 / mm] * 3 + [1]) @ OBLIQUE
    image = nibabel.Nifti1Image(noise(), affine)
    image.set_qform(affine, codes[0])
    image.set_sform(affine, codes[1])
    image.header.set_xyzt_units(unit, "sec")
    nibabel.save(image, tmp_path / "v.nii.gz")
    array, found = read_volume(tmp_path / "v.nii.gz")
    theirs = sitk.ReadImage(str(tmp_path / "v.nii.gz"))
    np.testing.assert_allclose(np.linalg.norm(found[:3, :3], axis=0), theirs.GetSpacing(), rtol=1e-5)
    np.testing.assert_allclose(LPS @ found[:3, 3], theirs.GetOrigin(), rtol=1e-5)
    np.testing.assert_allclose(read_header(tmp_path / "v.nii.gz")[1], OBLIQUE, atol=1e-4)
    write_volume(tmp_path / "w.nii.gz", array, found, nibabel.load(tmp_path / "v.nii.gz").header)
    again = nibabel.load(tmp_path / "w.nii.gz")
    assert again.header.get_xyzt_units() == ("mm" if unit == "unknown" else unit, "sec")
    np.testing.assert_allclose(again.affine, affine, rtol=1e-5, atol=1e-4 / mm)
    assert sitk.ReadImage(str(tmp_path / "w.nii.gz")).GetSpacing() == pytest.approx(theirs.GetSpacing())


def test_a_code_that_is_no_unit_means_millimetres(tmp_path):
    image = nibabel.Nifti1Image(noise(), OBLIQUE)
    image.header["xyzt_units"] = 5
    nibabel.save(image, tmp_path / "v.nii.gz")
    array, affine = read_volume(tmp_path / "v.nii.gz")
    np.testing.assert_allclose(affine, OBLIQUE, atol=1e-5)
    write_volume(tmp_path / "w.nii.gz", array, affine, nibabel.load(tmp_path / "v.nii.gz").header)
    np.testing.assert_allclose(read_header(tmp_path / "w.nii.gz")[1], OBLIQUE, atol=1e-5)


def test_write_refuses_other_suffixes(tmp_path):
    with refused("v.mhd", "ends in .nii"):
        write_volume(tmp_path / "v.mhd", noise(), np.eye(4))


@pytest.mark.parametrize("shape, dims", [((9, 7), 2), ((9, 7, 1), 2), ((9, 7, 1, 1), 2), ((5, 6, 7, 1, 1), 3)])
def test_trailing_axes_of_one_are_dropped_and_2d_is_written_with_one(tmp_path, shape, dims):
    path = save(tmp_path / "v.nii.gz", noise(shape))
    array, affine = read_volume(path, dims)
    assert np.array_equal(array, noise(shape).reshape(shape[:dims])) and affine.shape == (4, 4)
    write_volume(path, array, affine)
    assert nibabel.load(path).shape == (*shape[:dims], 1)[:3] and read_header(path, dims)[0] == shape[:dims]


def test_2d_file_without_a_third_axis_gets_the_normal(tmp_path):
    affine = make_affine(signs=(-1, 1, 1))
    affine[:3, 2] = 0
    image = nibabel.Nifti1Image(noise((9, 7)), None)
    image.header.set_sform(affine, 1)
    nibabel.save(image, tmp_path / "v.nii")
    np.testing.assert_allclose(read_volume(tmp_path / "v.nii", dims=2)[1][:3, 2], [0, 0, -1])


@pytest.mark.parametrize("suffix", [".mgz", ".mgh"])
def test_a_series_of_freesurfer_keeps_the_time_of_a_frame(tmp_path, suffix):
    image = nibabel.MGHImage(noise((5, 6, 7, 3)), OBLIQUE)
    image.header.set_zooms((0.9, 1.6, 1.2, 2000))
    nibabel.save(image, tmp_path / f"v{suffix}")
    header = nifti.open_nifti(tmp_path / f"v{suffix}").header
    assert header.get_zooms() == pytest.approx((0.9, 1.6, 1.2, 2000)) and header.get_xyzt_units() == ("mm", "msec")


def test_scaled_integers_are_read_scaled(tmp_path):
    image = nibabel.Nifti1Image(noise(dtype=np.int16), np.eye(4))
    image.header.set_slope_inter(0.5, 10)
    nibabel.save(image, tmp_path / "v.nii.gz")
    assert np.array_equal(read_volume(tmp_path / "v.nii.gz")[0], noise(dtype=np.int16) * np.float32(0.5) + 10)


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz", "v.png"])
@pytest.mark.parametrize("content", [b"", b"hello, not a volume", bytes(range(256)) * 4])
def test_not_nifti(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with refused(name, "not a readable NIfTI"):
        read_header(tmp_path / name)


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.float16])
def test_an_array_is_refused_with_the_line_that_saves_it(tmp_path, monkeypatch, kind):
    """NIfTI as nibabel writes it has no float16 and, unless asked for, none of the usual integers of numpy."""
    np.save(tmp_path / "v.npy", noise(dtype=kind))
    with refused("v.npy", "an array has no affine; give both to omnimorph.register, or save") as found:
        read_volume(tmp_path / "v.npy")
    run_advice(str(found.value), tmp_path, monkeypatch)
    array, affine = read_volume(tmp_path / "v.nii.gz")
    assert np.array_equal(array, noise(dtype=kind)) and np.allclose(affine, OBLIQUE, atol=1e-5)


@pytest.mark.parametrize("right, wrong, words", [("v.nii", "w.nii.gz", "not compressed: rename it to end in .nii."),
                                                 ("v.nii.gz", "w.nii", "compressed: rename it to end in .nii.gz.")])
def test_a_name_that_lies_about_compression(tmp_path, right, wrong, words):
    write_volume(tmp_path / right, noise(), OBLIQUE)
    (tmp_path / right).rename(tmp_path / wrong)
    with refused(wrong, words):
        read_volume(tmp_path / wrong)


def test_other_image_format(tmp_path, monkeypatch):
    nibabel.save(nibabel.Nifti1Pair(noise(), OBLIQUE), tmp_path / "v.img")
    with refused("v.img", "Nifti1Pair is not single-file NIfTI; convert it .nib-convert v.img v.nii.gz") as found:
        read_volume(tmp_path / "v.img")
    monkeypatch.chdir(tmp_path)
    convert.main(str(found.value).split("nib-convert ")[1].removesuffix(").").split())
    array, affine = read_volume(tmp_path / "v.nii.gz")
    assert np.array_equal(array, noise()) and np.allclose(affine, OBLIQUE, atol=1e-5)


def test_a_series_is_refused_with_the_command_that_takes_one_volume(tmp_path, monkeypatch):
    nibabel.save(nibabel.Nifti1Image(np.stack([noise(), 2 * noise()], 3), OBLIQUE), tmp_path / "IN.nii.gz")
    with refused("IN.nii.gz", "neither 2D nor 3D; split it into one file per volume .fslsplit., or take") as found:
        dims_of(tmp_path / "IN.nii.gz")
    monkeypatch.chdir(tmp_path)
    command = re.search(r"nib-roi (.* IN OUT)", str(found.value))[1]
    roi.main(re.sub("(IN|OUT)", r"\1.nii.gz", command).split())
    assert dims_of("OUT.nii.gz") == 3 and np.array_equal(read_volume("OUT.nii.gz")[0], noise())


@pytest.mark.parametrize("at, form, value, reason", [
    (254, "<h", 8, "its sform_code is 8"), (252, "<h", -1, "its qform_code is -1"),
    (108, "<f", np.inf, "not a readable NIfTI file")])
def test_header_fields_that_mean_nothing_are_refused(tmp_path, at, form, value, reason):
    """nibabel sets such a code to 0 and goes by the other matrix; ITK goes by the matrix of the code."""
    write_volume(tmp_path / "v.nii", noise(), OBLIQUE)
    content = bytearray((tmp_path / "v.nii").read_bytes())
    struct.pack_into(form, content, at, value)
    (tmp_path / "v.nii").write_bytes(content)
    with pytest.raises(InputError, match=f"v.nii: {reason}"):
        read_header(tmp_path / "v.nii")


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 0.95, 0.999])
def test_truncated_gz(tmp_path, keep):
    path = save(tmp_path / "v.nii.gz", noise((20, 20, 20), np.int16))
    content = path.read_bytes()
    path.write_bytes(content[:int(len(content) * keep)])
    with refused("v.nii.gz", "(truncated|not a readable)"):
        read_volume(path)


@pytest.mark.parametrize("keep", [200, 348, 352, 1000, -1])
def test_truncated_uncompressed(tmp_path, keep):
    path = save(tmp_path / "v.nii", noise((20, 20, 20), np.int16))
    path.write_bytes(path.read_bytes()[:keep])
    with refused("v.nii", "(truncated|not a readable)"):
        read_header(path)


def test_a_gz_cannot_take_all_memory(tmp_path, monkeypatch):
    """A header may ask for anything, and a file of 1 KB can hold a GB of zeros."""
    path = tmp_path / "v.nii"
    write_volume(path, np.arange(1000, dtype=np.int16).reshape(10, 10, 10), np.eye(4))
    content = bytearray(path.read_bytes())
    (tmp_path / "padded.nii.gz").write_bytes(gzip.compress(content + bytes(5000)))
    np.testing.assert_array_equal(read_volume(tmp_path / "padded.nii.gz")[0], read_volume(path)[0])
    monkeypatch.setattr(nifti, "MOST_AFTER", 10 ** 6)
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(content + bytes(5 * 10 ** 7)))
    tracemalloc.start()
    with refused("bomb.nii.gz", "the file has more than 1 MiB after its last voxel; export it again"):
        read_volume(tmp_path / "bomb.nii.gz")
    assert tracemalloc.get_traced_memory()[1] < 4 * nifti.CHUNK
    tracemalloc.stop()
    content[42:48] = np.array([32767, 32767, 9], "<i2").tobytes()  # the shape
    (tmp_path / "huge.nii.gz").write_bytes(gzip.compress(content))
    with refused("huge.nii.gz", "its header asks for 18.0 GiB, and at most 16 are decompressed"):
        read_volume(tmp_path / "huge.nii.gz")
    content[42:48] = np.array([1000, 1000, 1000], "<i2").tobytes()
    (tmp_path / "large.nii.gz").write_bytes(gzip.compress(content))
    with refused("large.nii.gz", "truncated, 2352 of 2000000352 bytes"):
        read_volume(tmp_path / "large.nii.gz")


@pytest.mark.parametrize("where", [0.3, 0.6, 0.9])
def test_flipped_bits_in_gz(tmp_path, where):
    path = save(tmp_path / "v.nii.gz", noise((20, 20, 20)))
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 0xFF
    path.write_bytes(content)
    with refused("v.nii.gz", "truncated or corrupt"):
        read_volume(path)


@pytest.mark.parametrize("read", [read_volume, read_header])
@pytest.mark.parametrize("shape, dims, reason", [
    ((5, 6, 7, 4), 3, "not 3D; split it"), ((5, 6, 7), 2, "not 2D; split it"),
    ((5, 6), 3, "not 3D; check the file; slices need model.dims 2 (--set model.dims=2, or "),
    ((5, 6, 1), 3, "not 3D; check the file; slices"), ((5,), 2, "not 2D; check the file.")])
def test_wrong_dimensionality(tmp_path, read, shape, dims, reason):
    path = save(tmp_path / "v.nii.gz", noise(shape, np.int16))
    with pytest.raises(InputError) as caught:
        read(path, dims)
    assert f"v.nii.gz: shape {shape} is {reason}" in str(caught.value)


@pytest.mark.parametrize("read, value", [(read_volume, np.nan), (read_volume, -np.inf), (read_volume, 1e300),
                                         (read_label, np.nan), (read_label, np.inf)])
def test_not_finite_as_float32(tmp_path, read, value):
    array = noise(dtype=np.float64)
    array[1, 2, 3:6] = value
    with refused("v.nii.gz", "3 of 336 voxels are NaN or infinite"):
        read(save(tmp_path / "v.nii.gz", array))


def test_constant_volume(tmp_path):
    path = save(tmp_path / "v.nii.gz", np.full((4, 5, 6), 7, np.int16))
    with refused("v.nii.gz", "every voxel is 7"):
        read_volume(path)
    assert np.array_equal(read_label(path)[0], np.full((4, 5, 6), 7))


def test_complex_voxels(tmp_path):
    with refused("v.nii", "each voxel must be one real number, but the type is complex64"):
        read_volume(save(tmp_path / "v.nii", noise().astype(np.complex64)))


def run_advice(said, folder, monkeypatch):
    """Run the line of code at the end of a refusal, which writes a NIfTI file."""
    monkeypatch.chdir(folder)
    exec(said[said.index(": ", said.index(" save ")) + 2:].removesuffix("."),
         {"nibabel": nibabel, "numpy": np, "SimpleITK": sitk, "affine": OBLIQUE})


@pytest.mark.parametrize("letters", ["RGB", "RGBA"])
def test_a_colour_volume_is_refused_with_the_line_that_takes_one_channel(tmp_path, monkeypatch, letters):
    colours = np.zeros((4, 5, 6), [(letter, np.uint8) for letter in letters])
    colours["G"] = np.arange(120).reshape(4, 5, 6)
    nibabel.save(nibabel.Nifti1Image(colours, OBLIQUE), tmp_path / "v.nii.gz")
    with refused("v.nii.gz", r"one real number, but it is a colour \(R, G, B") as found:
        read_volume(tmp_path / "v.nii.gz")
    run_advice(str(found.value), tmp_path, monkeypatch)
    array, affine = read_volume(tmp_path / "grey.nii.gz")
    assert np.array_equal(array, colours["G"]) and np.allclose(affine, OBLIQUE, atol=1e-5)


@pytest.mark.parametrize("name, shape", [("v.png", (20, 24)), ("v.JPG", (20, 24, 3)), ("v.tif", (20, 24)),
                                         ("v.png", (20, 24, 3))])
def test_a_picture_is_refused_with_the_line_that_makes_it_grey(tmp_path, monkeypatch, name, shape):
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / name)
    with refused(name, "not a readable NIfTI file .* save it with one grey channel as NIfTI") as found:
        read_volume(tmp_path / name, 2)
    run_advice(str(found.value), tmp_path, monkeypatch)
    array, _ = read_volume(tmp_path / "grey.nii.gz", 2)
    assert array.shape == (24, 20) and (picture.ndim == 3 or np.array_equal(array, picture.T))


@pytest.mark.parametrize("read", [read_volume, read_header])
@pytest.mark.parametrize("column", [(0, 0, 0), (0, 1, 0), (np.nan, 0, 1)])
def test_singular_affine(tmp_path, read, column):
    affine = np.eye(4)
    affine[:3, 2] = column
    image = nibabel.Nifti1Image(noise(dtype=np.int16), None)
    image.header.set_sform(affine, 1)
    nibabel.save(image, tmp_path / "v.nii.gz")
    with refused("v.nii.gz", "is singular"):
        read(tmp_path / "v.nii.gz")


def test_voxels_of_which_one_side_is_absurd_are_refused_before_they_take_hours(tmp_path):
    nibabel.save(nibabel.Nifti1Image(noise(), np.diag([1, 1, 1e8, 1])), tmp_path / "v.nii.gz")
    with refused("v.nii.gz", r"its voxels measure 1 x 1 x 1e\+08 mm, sides that differ by more than a factor of 1000"):
        read_header(tmp_path / "v.nii.gz")


def test_labels(tmp_path):
    array = noise().round()
    label, _ = read_label(save(tmp_path / "v.nii.gz", array))
    assert label.dtype == np.int16 and np.array_equal(label, array)
    array[0, 0, :2] += 0.5
    with refused("v.nii.gz", "2 label voxels are not whole numbers"):
        read_label(save(tmp_path / "v.nii.gz", array))
    label, _ = read_label(save(tmp_path / "v.nii.gz", np.where(array.round() > 50, 581e6, 3)))  # an atlas of mice
    assert label.dtype == np.int32 and set(np.unique(label)) == {3, 581_000_000}
    with refused("v.nii.gz", "do not fit int32"):
        read_label(save(tmp_path / "v.nii.gz", array.round() + 3e9))
    with refused("v.nii.gz", "labels from 3 to 40000 do not fit int16, in which the cache stores them"):
        path = save(tmp_path / "v.nii.gz", np.where(array.round() > 50, 40000.0, 3))
        image = save(tmp_path / "i.nii.gz", noise())
        on_grid({"image": image, "label": path, "mask": None}, config(data__img_size=8))


def test_labels_with_a_scale_factor_are_rounded(tmp_path):
    """nibabel writes a factor such as 1.000015 where floating labels are stored as whole numbers."""
    array = np.arange(336).reshape(6, 7, 8)
    label, _ = read_label(save(tmp_path / "v.nii.gz", array * 1.000015))
    assert label.dtype == np.int16 and np.array_equal(label, array)


@pytest.mark.parametrize("name", ["V.NII.GZ", "V.NII"])
def test_suffixes_in_capitals(tmp_path, name):
    array = noise().astype(np.float32)
    save(tmp_path / "v.nii.gz", array)
    content = (tmp_path / "v.nii.gz").read_bytes()
    (tmp_path / name).write_bytes(content if name.lower().endswith("gz") else gzip.decompress(content))
    np.testing.assert_array_equal(read_volume(tmp_path / name)[0], array)
    write_volume(tmp_path / f"W{name}", array, np.eye(4))
    np.testing.assert_array_equal(read_volume(tmp_path / f"W{name}")[0], array)


def test_files_that_are_not_there_or_packed_otherwise_say_so(tmp_path):
    with refused("gone.nii.gz", "no such file"):
        read_volume(tmp_path / "gone.nii.gz")
    (tmp_path / "annexed.nii.gz").symlink_to("../.git/annex/objects/x.nii.gz")
    with refused("annexed.nii.gz", "a link to ../.git/annex/objects/x.nii.gz, which does not exist; fetch its content"):
        read_volume(tmp_path / "annexed.nii.gz")
    with refused("folder", "a folder, not a file"):
        (tmp_path / "folder").mkdir()
        read_volume(tmp_path / "folder")
    (tmp_path / "v.nii.zst").write_bytes(b"(\xb5/\xfd")
    with refused("v.nii.zst", "compressed as .zst; unpack it, or store it as .nii.gz"):
        read_volume(tmp_path / "v.nii.zst")


@pytest.mark.parametrize("name", ["v.nii.gz", "v.nii"])
def test_a_file_that_is_removed_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch, name):
    path, load = tmp_path / name, nibabel.load
    write_volume(path, noise(), OBLIQUE)
    image = open_nifti(path)
    path.unlink()
    with refused(name, "no such file"):
        read_voxels(path, image)
    write_volume(path, noise(), OBLIQUE)
    monkeypatch.setattr(nibabel, "load", lambda path: path.unlink() or load(path))
    with refused(name, "no such file"):
        open_nifti(path)


@pytest.mark.parametrize("axis", [0, 1])
def test_one_plane_along_another_axis_says_so(tmp_path, axis):
    path = save(tmp_path / "v.nii.gz", np.expand_dims(noise((12, 9)), axis))
    with refused("v.nii.gz", f"is one plane along axis {axis}, but a 2D volume must have it along the last axis"):
        read_volume(path, 2)


def test_soft_and_full_masks(tmp_path):
    image = save(tmp_path / "i.nii.gz", noise())
    volume = read_source(image, "fixed")
    soft = np.clip(noise(), 0, 1)
    assert np.array_equal(read_mask(save(tmp_path / "m.nii.gz", soft), volume), soft > 0)
    assert read_mask(save(tmp_path / "m.nii.gz", np.ones((6, 7, 8))), volume).all()


@pytest.mark.parametrize("scale, shift", [(1, 0), (1e6, -3e5), (1e-4, 5)])
def test_normalise(scale, shift):
    array = np.linspace(0, 1, 2001).reshape(3, 23, 29)
    result = normalise(array * scale + shift)
    assert result.dtype == np.float32 and result.min() == 0 and result.max() == 1
    np.testing.assert_allclose(result, np.clip((array - 0.005) / 0.99, 0, 1), atol=1e-5)


def test_normalise_sparse_and_constant():
    array = np.zeros((20, 20, 20), np.float32)
    assert not normalise(array + 3).any()
    array[3, 4, 5], array[3, 4, 6] = 8, 2
    assert normalise(array)[3, 4, 5] == 1 and normalise(array)[3, 4, 6] == 0.25


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, -1), (-1, -1, -1)])
@pytest.mark.parametrize("shape", [(5, 6, 7), (5, 6)])
def test_canonical_orientation(shape, axes, signs):
    array, dims = noise(shape), len(shape)
    affine = make_affine(axes, signs, (0.9, 1.6, 1.2), (12, -8, 15))
    result, new_affine = to_canonical(array, affine)
    world = np.abs(new_affine[:3, :dims]).argmax(0)
    assert np.all(np.diff(world) > 0) and new_affine[world, range(dims)].min() > 0
    assert np.array_equal(new_affine[:, dims:3], affine[:, dims:3])
    assert result.size == array.size and result.flags.c_contiguous
    for index in np.ndindex(result.shape):
        source = np.linalg.solve(affine, new_affine @ (*index, *[0] * (3 - dims), 1))[:dims]
        np.testing.assert_allclose(source, np.round(source), atol=1e-9)
        assert array[tuple(np.round(source).astype(int))] == result[index]


@pytest.mark.parametrize("shape, size", [((20, 21, 22), (16, 16, 16)), ((9, 10, 11), 16), ((9, 20, 15), (16, 12, 15)),
                                         ((9, 20), (16, 12))])
@pytest.mark.parametrize("order", [0, 1])
def test_grid_of_the_same_spacing_is_an_exact_crop_or_pad(shape, size, order):
    array = noise(shape)
    affine = make_affine(spacing=(0.15, 0.150001, 0.15))
    result, new_affine = to_grid(array, affine, size, 0.15, order)
    assert result.shape == tuple(np.broadcast_to(size, len(shape)))
    move = np.linalg.solve(affine, new_affine)
    np.testing.assert_allclose(move[:3, :3], np.eye(3), atol=1e-12)
    offset = move[:len(shape), 3]
    np.testing.assert_allclose(offset, np.round(offset), atol=1e-9)
    assert np.all(np.abs(offset - (np.array(shape) - result.shape) / 2) <= 0.5 + 1e-9)
    for index in np.ndindex(result.shape):
        source = tuple(np.round(index + offset).astype(int))
        inside = min(source) >= 0 and all(s < n for s, n in zip(source, shape))
        assert result[index] == (array[source] if inside else 0)


def test_spacing_zero_fits_the_whole_field_of_view():
    affine = make_affine(spacing=(1, 2, 0.5))
    scale, offset, new_affine = grid_transform((32, 32, 32), affine, 32, 0)
    np.testing.assert_allclose(np.linalg.norm(new_affine[:3, :3], axis=0), 2)
    np.testing.assert_allclose(scale, [2, 1, 4])
    centre = (31 / 2, 31 / 2, 31 / 2, 1)
    np.testing.assert_allclose(new_affine @ centre, affine @ centre)
    np.testing.assert_allclose(scale * np.array(centre[:3]) + offset, centre[:3])


def test_spacing_zero_on_a_matching_grid_is_a_copy():
    array = noise((32, 20, 31))
    result, new_affine = to_grid(array, make_affine(), (32, 20, 31), 0)
    assert np.array_equal(result, array) and np.array_equal(new_affine, make_affine())


def to_itk(array, affine):
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.T))
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((LPS @ affine[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin((LPS @ affine[:3, 3]).tolist())
    return image


def test_labels_stay_labels_on_a_new_grid():
    label = np.zeros((20, 24, 28), np.int16)
    label[5:15, 6:18, 7:21] = 300
    label[8:12, 8:12, 8:12] = 7
    result, _ = to_grid(label, OBLIQUE, 40, 0.9, order=0)
    assert result.dtype == np.int16 and set(np.unique(result)) == {0, 7, 300}
    volume = (result > 0).sum() * 0.9 ** 3
    assert volume == pytest.approx((label > 0).sum() * abs(np.linalg.det(OBLIQUE)), rel=0.05)
    full, _ = to_grid(np.full((8, 8, 8), 3, np.int16), make_affine(), 20, 0.4, order=0)
    assert np.all(full == 3)


def test_shrinking_smooths_images_first():
    array = np.zeros((48, 48, 48), np.float32)
    array[::2] = 1
    shrunk, _ = to_grid(array, make_affine(), 12, 4.0)
    assert 0.3 < shrunk[2:-2].min() and shrunk[2:-2].max() < 0.7


def test_two_matrices_that_differ_none_and_a_sheared_one_are_told(tmp_path):
    """Compared with where SimpleITK puts the first voxel and the far corner."""
    def placed(name, sform, qform, codes):
        image = nibabel.Nifti1Image(noise(), sform)
        image.set_qform(qform, codes[0])
        image.set_sform(sform, codes[1])
        nibabel.save(image, tmp_path / name)
        theirs, corner = sitk.ReadImage(str(tmp_path / name)), np.array(noise().shape) - 1
        ours = read_header(tmp_path / name)[1]
        points = [(LPS @ theirs.TransformIndexToPhysicalPoint([int(axis) for axis in index]),
                   ours[:3, :3] @ index + ours[:3, 3]) for index in (0 * corner, corner)]
        return placement_doubts(tmp_path / name), max(np.linalg.norm(one - other) for one, other in points)

    moved = OBLIQUE.copy()
    moved[:3, 3] += [0, 8, 0]
    said, apart = placed("same.nii.gz", OBLIQUE, OBLIQUE, (1, 1))
    assert said == [] and apart < 1e-3
    said, apart = placed("one.nii.gz", OBLIQUE, moved, (0, 1))
    assert said == []
    said, apart = placed("two.nii.gz", OBLIQUE, moved, (1, 2))
    assert len(said) == 1 and "differ by up to 8.0 mm" in said[0] and apart == pytest.approx(8, abs=0.01)
    said, _ = placed("none.nii.gz", OBLIQUE, OBLIQUE, (0, 0))
    assert len(said) == 1 and "its header gives no position" in said[0]
    image = nibabel.Nifti1Image(noise(), np.diag([1, 2, 3, 1]))
    image.set_qform(None, 0)
    image.header["pixdim"][1] = 1.5  # as after an edit of pixdim alone
    nibabel.save(image, tmp_path / "zooms.nii.gz")
    said = placement_doubts(tmp_path / "zooms.nii.gz")
    assert len(said) == 1 and "sform measure 1 x 2 x 3, those of its pixdim 1.5 x 2 x 3" in said[0]


def test_a_header_is_not_read_as_voxels(tmp_path):
    path = save(tmp_path / "v.nii", noise())
    content = bytearray(path.read_bytes())
    content[108:112] = bytes(4)  # vox_offset
    path.write_bytes(content)
    with pytest.raises(InputError, match="v.nii: its vox_offset 0 lies within the header"):
        read_volume(path)


def test_a_pair_of_files_in_micrometres_and_an_axis_beyond_32767(tmp_path):
    image = nibabel.Nifti1Pair(noise(), np.diag([1000.0, 2000, 3000, 1]))
    image.header.set_xyzt_units("micron")
    nibabel.save(image, tmp_path / "v.img")
    assert np.allclose(read_source(nibabel.load(tmp_path / "v.img"), "v").affine, np.diag([1, 2, 3, 1]))
    write_volume(tmp_path / "long.nii.gz", np.ones((33000, 4), np.uint8), np.eye(4))
    assert nibabel.load(tmp_path / "long.nii.gz").shape == (33000, 4, 1)


def test_a_sheared_volume_is_written_with_its_sform_alone(tmp_path):
    shear = np.eye(4)
    shear[0, 1] = 0.2
    sheared = OBLIQUE @ shear
    image = nibabel.Nifti1Image(noise(), sheared)
    image.set_sform(sheared, 1)
    nibabel.save(image, tmp_path / "v.nii.gz")
    said = placement_doubts(tmp_path / "v.nii.gz")
    assert len(said) == 1 and "sheared" in said[0]
    write_volume(tmp_path / "w.nii.gz", noise(), sheared, image.header)
    again = nibabel.load(tmp_path / "w.nii.gz").header
    assert (int(again["qform_code"]), int(again["sform_code"])) == (0, 1)
    np.testing.assert_allclose(again.get_sform(), sheared, atol=1e-4)
    write_volume(tmp_path / "x.nii.gz", noise(), OBLIQUE)
    assert int(nibabel.load(tmp_path / "x.nii.gz").header["qform_code"]) == 1
