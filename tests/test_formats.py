"""NRRD, MetaImage and MGZ: there and back, and voxel by voxel where SimpleITK and FreeSurfer's header put them."""
import gzip
import json
import os
import re
import struct
import subprocess
import sys

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk

import OM_register
from Dataloader import formats
from Dataloader.datalist import read_datalist, volume_id
from Dataloader.nifti import SUFFIXES, WRITTEN, read_header, read_label, read_volume, stored_type, write_volume
from Dataloader.prepare import on_grid
from Dataloader.synthetic import make_subject
from tests import tiny
from tests.test_nifti import OBLIQUE, make_affine, refused

OTHERS = [suffix for suffix in WRITTEN if not suffix.startswith(".nii")]
ITK = [".nrrd", ".mha"]
GRIDS = {"plain": make_affine(), "oblique": make_affine((2, 0, 1), (-1, 1, -1), (0.9, 1.6, 1.2), (12, -8, 15)),
         "flipped": make_affine((1, 0, 2), (-1, 1, -1), (1.3, 0.9, 2.1), (0, 0, 0)),
         "LPS": make_affine(signs=(-1, -1, 1), spacing=(0.8, 0.8, 3))}
SHAPE = (7, 9, 11)


def numbers(dtype=np.int16, shape=SHAPE):
    """An array whose every voxel is another number."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def place_of(path, index):
    """Where SimpleITK puts a voxel, mm, RAS."""
    return np.array(sitk.ReadImage(str(path)).TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)


@pytest.mark.parametrize("suffix", OTHERS)
@pytest.mark.parametrize("grid", GRIDS)
def test_there_and_back(tmp_path, suffix, grid):
    path, array = tmp_path / f"v{suffix}", numbers()
    write_volume(path, array, GRIDS[grid])
    back, affine = read_volume(path)
    np.testing.assert_array_equal(back, array)
    np.testing.assert_allclose(affine, GRIDS[grid], atol=1e-5)
    shape, same = read_header(path)
    assert shape == SHAPE and np.array_equal(same, affine) and stored_type(path) == np.int16
    label, _ = read_label(path)
    assert label.dtype == np.int16 and np.array_equal(label, array)
    first = path.read_bytes()
    write_volume(path, array, GRIDS[grid])
    assert path.read_bytes() == first, "the same input gives the same bytes"


@pytest.mark.parametrize("suffix", ITK)
@pytest.mark.parametrize("grid", GRIDS)
def test_itk_and_we_agree_about_every_voxel(tmp_path, suffix, grid):
    """Ours read by SimpleITK, and SimpleITK's own files read by us, compared with the NIfTI file of the same volume."""
    array, affine = numbers(np.float32), GRIDS[grid]
    write_volume(tmp_path / f"ours{suffix}", array, affine)
    write_volume(tmp_path / "ours.nii.gz", array, affine)
    theirs = sitk.ReadImage(str(tmp_path / "ours.nii.gz"))
    sitk.WriteImage(theirs, str(tmp_path / f"theirs{suffix}"))
    for index in ((0, 0, 0), (6, 0, 0), (0, 8, 0), (3, 2, 10)):
        assert place_of(tmp_path / f"ours{suffix}", index) == pytest.approx((affine @ [*index, 1])[:3], abs=1e-4)
        assert sitk.ReadImage(str(tmp_path / f"ours{suffix}"))[index] == array[index]
    back, own = read_volume(tmp_path / f"theirs{suffix}")
    np.testing.assert_array_equal(back, array)
    np.testing.assert_allclose(own, affine, atol=1e-5)


@pytest.mark.parametrize("suffix", [".mgz", ".mgh"])
def test_freesurfers_header_says_where_the_voxels_are(tmp_path, suffix):
    write_volume(tmp_path / f"v{suffix}", numbers(), OBLIQUE)
    header = nibabel.load(tmp_path / f"v{suffix}").header
    centre = OBLIQUE @ [3.5, 4.5, 5.5, 1]  # c_ras: of the voxel shape / 2
    np.testing.assert_allclose(header["Pxyz_c"], centre[:3], atol=1e-4)
    np.testing.assert_allclose(header["delta"], [0.9, 1.6, 1.2], atol=1e-5)
    np.testing.assert_allclose(header["Mdc"].T * header["delta"], OBLIQUE[:3, :3], atol=1e-5)


def test_a_nrrd_file_that_says_ras_is_placed_as_one_that_says_lps(tmp_path):
    head = ("NRRD0004\ntype: short\ndimension: 3\nspace: {space}\nsizes: 2 3 4\nspace directions: {x} {y} (0,0,3)\n"
            "kinds: domain domain domain\nendian: little\nencoding: raw\nspace origin: {origin}\n\n")
    lps = head.format(space="left-posterior-superior", x="(2,0,0)", y="(0,1.5,0)", origin="(5,6,7)")
    ras = head.format(space="right-anterior-superior", x="(-2,0,0)", y="(0,-1.5,0)", origin="(-5,-6,7)")
    for name, text in (("lps", lps), ("ras", ras)):
        (tmp_path / f"{name}.nrrd").write_bytes(text.encode() + numbers(np.int16, (2, 3, 4)).tobytes("F"))
        array, affine = read_volume(tmp_path / f"{name}.nrrd")
        np.testing.assert_array_equal(array, numbers(np.int16, (2, 3, 4)))
        np.testing.assert_allclose(affine, [[-2, 0, 0, -5], [0, -1.5, 0, -6], [0, 0, 3, 7], [0, 0, 0, 1]], atol=1e-6)


def test_detached_files_are_read(tmp_path):
    for suffix in (".nhdr", ".mhd"):
        image = formats.itk_image(sitk, numbers(), OBLIQUE)
        sitk.WriteImage(image, str(tmp_path / f"v{suffix}"))
        back, affine = read_volume(tmp_path / f"v{suffix}")
        assert np.array_equal(back, numbers()) and np.allclose(affine, OBLIQUE, atol=1e-5)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("suffix", [".nhdr", ".mhd"])
def test_other_voxels_beside_a_header_are_noticed(tmp_path, suffix, compressed):
    header = tmp_path / f"v{suffix}"
    sitk.WriteImage(formats.itk_image(sitk, numbers(), OBLIQUE), str(header), compressed)
    [voxels] = set(tmp_path.iterdir()) - {header}
    for path in (header, voxels):
        os.utime(path, (1e9, 1e9))
    before = formats.size_and_time(header), formats.digest(header)
    voxels.write_bytes(voxels.read_bytes()[::-1])
    after = formats.size_and_time(header), formats.digest(header)
    assert after[0][0] == before[0][0] and after[0] != before[0] and after[1] != before[1]


@pytest.mark.parametrize("suffix, word", [(".mhd", "ElementDataFile = "), (".nhdr", "data file: ")])
def test_so_are_voxels_of_another_name(tmp_path, suffix, word):
    header, voxels = tmp_path / f"v{suffix}", tmp_path / "other Würfel.raw"
    (tmp_path / "of another volume").write_text("")
    sitk.WriteImage(formats.itk_image(sitk, numbers(), OBLIQUE), str(header))
    [own] = {file for file in tmp_path.iterdir() if file.suffix} - {header}
    own.rename(voxels)
    header.write_text(header.read_text().replace(word + own.name, word + voxels.name))
    assert np.array_equal(read_volume(header)[0], numbers()) and formats.parts_of(header) == sorted([header, voxels])
    before = formats.digest(header)
    voxels.write_bytes(voxels.read_bytes()[::-1])
    assert formats.digest(header) != before


@pytest.mark.parametrize("suffix", [".nii.gz", ".mhd"])
def test_links_and_copies_lead_to_the_same_volume_and_edited_ones_do_not(tmp_path, suffix):
    for folder in ("one", "copy", "edited"):
        (tmp_path / folder).mkdir()
        image = formats.itk_image(sitk, numbers() + (folder == "edited"), OBLIQUE)
        sitk.WriteImage(image, str(tmp_path / folder / f"v{suffix}"))
    (tmp_path / "link").symlink_to(tmp_path / "one")
    paths = {folder: tmp_path / folder / f"v{suffix}" for folder in ("one", "link", "copy", "edited")}
    assert [folder for folder, path in paths.items() if formats.same_volume(paths["one"], path)] == [
        "one", "link", "copy"]
    for path in formats.parts_of(paths["copy"]):
        path.write_bytes((paths["edited"].parent / path.name).read_bytes())
    assert not formats.same_volume(paths["one"], paths["copy"]) and formats.same_volume(paths["edited"], paths["copy"])


@pytest.mark.parametrize("line, other", [(b"ElementSpacing = ", b"ElementSpacing = 1 1 0"),
                                         (b"DimSize = ", b"DimSize = 33000 2 3")])
def test_a_header_that_no_nifti_header_can_hold_is_one_sentence(tmp_path, line, other):
    """nibabel's error ended a whole list, or the preparation of all volumes."""
    path = tmp_path / "v.mha"
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((3, 2, 33000), np.uint8)), str(path))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(other if each.startswith(line) else each for each in lines))
    with refused("v.mha", "(no usable position or size .*; export it again.|not readable)"):
        read_header(path)


@pytest.mark.parametrize("suffix", [".mgh", ".mgz"])
@pytest.mark.parametrize("offset, changed", [(4, ">i0"), (4, ">i33000"), (20, ">i7"), (30, ">f0"), (30, ">fnan")])
def test_a_damaged_header_of_freesurfer_is_one_sentence(tmp_path, suffix, offset, changed):
    """No voxels, too many along an axis, colours, voxels without a size: nibabel's errors ended a whole list too."""
    content = bytearray(nibabel.MGHImage(numbers(), np.eye(4)).to_bytes())
    struct.pack_into(changed[:2], content, offset, (float if "f" in changed[:2] else int)(changed[2:]))
    (tmp_path / f"v{suffix}").write_bytes(gzip.compress(content) if suffix == ".mgz" else content)
    with refused(f"v{suffix}", "(no usable position or size .*; export it again.|not a readable FreeSurfer file)"):
        read_header(tmp_path / f"v{suffix}")


@pytest.mark.parametrize("suffix", OTHERS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.float32, np.float64, bool])
def test_number_types(tmp_path, suffix, dtype):
    array = (numbers() % 120).astype(dtype)
    write_volume(tmp_path / f"v{suffix}", array, np.eye(4))
    assert np.array_equal(read_label(tmp_path / f"v{suffix}")[0], array)
    if suffix in ITK:
        assert stored_type(tmp_path / f"v{suffix}") == (np.uint8 if dtype is bool else dtype)


def test_two_axes(tmp_path):
    plane = numbers(np.float32, (8, 6))
    for suffix in OTHERS:
        write_volume(tmp_path / f"v{suffix}", plane, GRIDS["flipped"])
        back, affine = read_volume(tmp_path / f"v{suffix}", dims=2)
        assert np.array_equal(back, plane) and np.allclose(affine, GRIDS["flipped"], atol=1e-5)
    image = sitk.GetImageFromArray(plane.T)  # two axes in the file itself
    image.SetSpacing((0.5, 2.0))
    image.SetOrigin((3.0, 4.0))
    sitk.WriteImage(image, str(tmp_path / "flat.mha"))
    back, affine = read_volume(tmp_path / "flat.mha", dims=2)
    assert np.array_equal(back, plane) and np.allclose(affine, np.diag([-0.5, -2, 1, 1]) + [
        [0, 0, 0, -3], [0, 0, 0, -4], [0] * 4, [0] * 4])


def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    for suffix in OTHERS:
        path = tmp_path / f"v{suffix}"
        path.write_bytes(b"no volume at all")
        with refused(path.name, "not (a )?readable"):
            read_volume(path)
        write_volume(path, numbers(np.float64, (20, 20, 20)), np.eye(4))
        path.write_bytes(path.read_bytes()[:-400])
        with refused(path.name, "truncated or corrupt" if suffix == ".mha" else "(truncated|not (a )?readable)"):
            read_volume(path)
    sitk.WriteImage(sitk.Image([4, 4, 4], sitk.sitkVectorFloat32, 3), str(tmp_path / "colour.nrrd"))
    with refused("colour.nrrd", "each voxel must be one real number.* save it with one grey channel as NIfTI"):
        read_volume(tmp_path / "colour.nrrd")
    sitk.WriteImage(sitk.Image([4, 4, 4, 2], sitk.sitkFloat32), str(tmp_path / "four.nrrd"))
    with refused("four.nrrd", "is not 3D"):
        read_volume(tmp_path / "four.nrrd")
    with refused("v.mgz", "do not fit a .mgz file"):
        write_volume(tmp_path / "v.mgz", np.array([[[2 ** 40]]]), np.eye(4))
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    for call in (read_volume, read_header, lambda path: write_volume(path, numbers(), np.eye(4))):
        with refused("four.nrrd", "pip install SimpleITK"):
            call(tmp_path / "four.nrrd")


@pytest.mark.parametrize("key, number, words", [
    *(("NDims", axes, f"its header has NDims = {axes}, which is no number of axes") for axes in ("-1", "10", "9999")),
    ("DimSize", "2000000000 2000000000 4", "its header claims 2000000000 x 2000000000 x 4 voxels")])
def test_a_header_with_numbers_that_crash_itk_or_numpy_is_one_sentence(tmp_path, key, number, words):
    write_volume(tmp_path / "v.mha", numbers(), np.eye(4))
    content, changed = re.subn(rf"(?m)^{key} = .*$".encode(), f"{key} = {number}".encode(),
                               (tmp_path / "v.mha").read_bytes())
    assert changed == 1
    (tmp_path / "v.mha").write_bytes(content)
    with refused("v.mha", words):
        read_header(tmp_path / "v.mha")


@pytest.mark.parametrize("name", ["%s%s%n.raw 1 8 1", "%d%d.raw 1 8 1", "50%.raw", "pipe", "s%02d.raw 0 7",
                                  "s%02d.raw 0 7 0", "LIST 3D"])
def test_a_metaimage_that_names_no_file_of_voxels_neither_crashes_itk_nor_waits(tmp_path, name):
    sitk.WriteImage(sitk.Image([8, 8, 8], sitk.sitkInt16), str(tmp_path / "v.mhd"))
    os.mkfifo(tmp_path / "pipe")
    text = (tmp_path / "v.mhd").read_text()
    (tmp_path / "v.mhd").write_text(text.replace("v.raw", name))
    with refused("v.mhd", f"its ElementDataFile = {name} is neither a file nor a pattern"):
        read_volume(tmp_path / "v.mhd")
    for number in range(8):
        (tmp_path / f"s{number:02d}.raw").write_bytes(np.arange(64, dtype=np.int16).tobytes())
    for whole in ("s%02d.raw 0 7 1", "s%02i.raw 0", "s%02u.raw 0.0 8"):
        (tmp_path / "v.mhd").write_text(text.replace("v.raw", whole))
        assert read_volume(tmp_path / "v.mhd")[0].max() == 63
    names = [f"s{number:02d}.raw" for number in range(8)]
    (tmp_path / "v.mhd").write_text(text.replace("v.raw", "\n".join(["LIST", *names])))
    assert read_volume(tmp_path / "v.mhd")[0].max() == 63
    for few in ("s%02d.raw 0 6 1", "s%02d.raw 0 7 2", "\n".join(["LIST", *names[:7]]), "LIST 2D\ns00.raw", "LIST"):
        (tmp_path / "v.mhd").write_text(text.replace("v.raw", few))
        with refused("v.mhd", r"its header names \d of 8 files of voxels"):
            read_volume(tmp_path / "v.mhd")


@pytest.mark.parametrize("suffix, key", [(".mha", b"DimSize = "), (".nrrd", b"sizes: ")])
def test_a_header_that_claims_all_memory_is_refused_before_itk_takes_it(tmp_path, suffix, key):
    path = tmp_path / f"v{suffix}"
    write_volume(path, numbers(), np.eye(4))
    path.write_bytes(re.sub(key + rb"[0-9 ]+", key + b"900 900 900", path.read_bytes()))
    with refused(path.name, "its header claims 900 x 900 x 900 voxels, more than the file can hold"):
        read_volume(path)


def test_a_long_header_may_name_a_large_file_of_voxels(tmp_path):
    path, comments = tmp_path / "v.nhdr", "# of a long protocol\n" * 4000
    sitk.WriteImage(sitk.Image([8, 8, 8], sitk.sitkUInt8), str(path))
    header = path.read_text().replace("sizes: 8 8 8", "sizes: 900 900 900")
    path.write_text(header.replace("data file", comments + "data file"))
    assert read_header(path)[0] == (900, 900, 900)


@pytest.mark.parametrize("suffix, names", [
    (".mhd", "ElementDataFile = LIST\n" + "s0.raw\n" * 7 + "pipe1"), (".mhd", "ElementDataFile = pipe%d 1 8 1"),
    (".nhdr", "data file: pipe1"), (".nhdr", "DataFile: LIST\n" + "s0.raw\n" * 7 + "pipe1"),
    (".nhdr", "data file: pipe%d 1 8 1")])
def test_itk_waits_for_no_pipe_among_the_files_of_voxels(tmp_path, suffix, names):
    path = tmp_path / f"v{suffix}"
    sitk.WriteImage(sitk.Image([8, 8, 8], sitk.sitkInt16), str(path))
    os.mkfifo(tmp_path / "pipe1")
    (tmp_path / "s0.raw").write_bytes(bytes(128))
    named = re.compile(r"^(ElementDataFile|data file).*\n", re.M)
    path.write_text(named.sub("", path.read_text()) + names + "\n")
    with refused(path.name, f"its file of voxels {tmp_path / 'pipe1'} is a pipe or a device"):
        read_volume(path)


def test_the_name_of_the_voxels_may_be_that_of_a_folder_or_too_long(tmp_path):
    write_volume(tmp_path / "v.mha", numbers(), np.eye(4))
    (tmp_path / "LOCAL").mkdir()
    np.testing.assert_array_equal(read_volume(tmp_path / "v.mha")[0], numbers())
    content = (tmp_path / "v.mha").read_bytes()
    (tmp_path / "v.mha").write_bytes(content.replace(b"= LOCAL", b"= " + 300 * b"x"))
    with refused("v.mha", "truncated or corrupt"):
        read_volume(tmp_path / "v.mha")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the limit holds for a whole process")
@pytest.mark.parametrize("suffix, write, axes", [(".mha", "write_volume", 3), (".nrrd", "write_volume", 3),
                                                 (".h5", "write_field_h5", 4)])
def test_a_full_folder_of_temporary_files_is_one_sentence(tmp_path, suffix, write, axes):
    program = f"""if True:
        import resource, sys
        import numpy as np
        from Dataloader.nifti import write_volume
        from Dataloader.transforms import write_field_h5
        from Runtime.errors import InputError
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            {write}(sys.argv[1], np.random.default_rng(0).random((3, 30, 30, 30)[-{axes}:]), np.eye(4))
        except InputError as error:
            print(error)"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / f"v{suffix}")], cwd=tiny.ROOT, text=True,
                          capture_output=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stdout.startswith(f"{tmp_path}/v{suffix}: its temporary file {tmp_path}/"), done.stderr
    assert "make room there, or set TMPDIR" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["h5", "nrrd"])
def test_a_missing_folder_of_temporary_files_is_told_before_a_registration(tmp_path, monkeypatch, capsys, suffix):
    write_volume(tmp_path / "v.nii.gz", numbers(), np.eye(4))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    words = ["--fixed", str(tmp_path / "v.nii.gz"), "--moving", str(tmp_path / "v.nii.gz"), "--also", suffix]
    assert OM_register.main([*words, "--out", str(tmp_path / "out")]) == 43
    assert re.search(rf"field.{suffix}: writing it needs a temporary folder .*export TMPDIR", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".mha", ".mhd"])
def test_a_damaged_metaimage_is_found(tmp_path, suffix):
    """ITK prints "Uncompress failed" and returns noise."""
    array, path = np.random.default_rng(0).integers(0, 1000, (30, 20, 10)).astype(np.int16), tmp_path / f"v{suffix}"
    sitk.WriteImage(formats.itk_image(sitk, array, OBLIQUE), str(path), True)
    voxels = path if suffix == ".mha" else tmp_path / "v.zraw"
    assert np.array_equal(read_volume(path)[0], array)
    whole = voxels.read_bytes()
    for content in (whole[:5000] + bytes([whole[5000] ^ 16]) + whole[5001:], whole[:5000], whole[:-2]):
        voxels.write_bytes(content)
        with refused(path.name, r"truncated or corrupt.*; copy or download it again\.$"):
            read_label(path)
    voxels.write_bytes(whole)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(line for line in lines if not line.startswith(b"CompressedDataSize")))
    if suffix == ".mha":
        with refused(path.name, "truncated or corrupt"):
            read_volume(path)
    else:
        assert np.array_equal(read_volume(path)[0], array), "the file of voxels begins with them"


def test_a_damaged_mgz_is_found_by_its_checksum(tmp_path):
    write_volume(tmp_path / "v.mgz", numbers(), np.eye(4))
    content = bytearray((tmp_path / "v.mgz").read_bytes())
    content[-6] ^= 255
    (tmp_path / "v.mgz").write_bytes(bytes(content))
    with refused("v.mgz", "truncated or corrupt"):
        read_volume(tmp_path / "v.mgz")
    nibabel.save(nibabel.MGHImage(np.ones((4, 5, 6, 3), np.float32), np.eye(4)), tmp_path / "v.mgz")
    with refused("v.mgz", r"shape \(4, 5, 6, 3\) is not 3D"):
        read_volume(tmp_path / "v.mgz")


# ---------------------------------------------------------------------------------------------------------------------
# The programs
# ---------------------------------------------------------------------------------------------------------------------

def test_a_folder_of_other_volumes_is_a_data_set(tmp_path):
    for number, suffix in enumerate(OTHERS):
        write_volume(tmp_path / f"imagesTr/v_{number}{suffix}", numbers(), np.eye(4))
        write_volume(tmp_path / f"labelsTr/v_{number}.nii.gz", numbers(), np.eye(4))
    items = read_datalist(tmp_path)
    assert [item["id"] for item in items] == [f"v_{number}" for number in range(len(OTHERS))]
    assert all(item["label"].name.endswith(".nii.gz") for item in items)
    assert all(volume_id(f"a/b_0{suffix}") == "b_0" for suffix in SUFFIXES)
    # What FreeSurfer leaves beside NIfTI files does not count as volumes of the data set.
    write_volume(tmp_path / "imagesTr/own.nii.gz", numbers(), np.eye(4))
    write_volume(tmp_path / "labelsTr/own.nii.gz", numbers(), np.eye(4))
    assert [item["id"] for item in read_datalist(tmp_path)] == ["own"]


def test_nifti_segmentations_do_not_hide_images_of_another_format(tmp_path):
    for name in ("v_0.nrrd", "v_0_seg.nii.gz", "v_1.nrrd"):
        write_volume(tmp_path / name, numbers(), np.eye(4))
    assert [(item["id"], item["label"] and item["label"].name) for item in read_datalist(tmp_path)] == [
        ("v_0", "v_0_seg.nii.gz"), ("v_1", None)]


def test_volumes_of_all_formats_are_prepared_alike(tmp_path):
    subject, cfg, prepared = make_subject(0, (12, 14, 16))["image"], tiny.config(), {}
    for suffix in (".nii.gz", *OTHERS):
        path = tmp_path / f"v{suffix}"
        write_volume(path, subject, GRIDS["oblique"])
        prepared[suffix] = on_grid({"image": path, "label": None, "mask": None}, cfg)
    expected = prepared.pop(".nii.gz")
    assert all(np.abs(found["image"] - expected["image"]).max() < 1e-5 for found in prepared.values())


@pytest.mark.slow
def test_a_pair_of_two_formats_is_registered(tmp_path, capsys):
    shape, affine = (16, 18, 14), make_affine(spacing=(1.1, 0.9, 1.3), degrees=(4, 0, 5))
    for seed, name in enumerate(("fixed.mgz", "moving.nrrd")):
        subject = make_subject(seed, shape)
        write_volume(tmp_path / name, np.rint(1000 * subject["image"]).astype(np.int16), affine)
        write_volume(tmp_path / f"label_{name}", subject["label"].astype(np.uint8), affine)
    words = ["--fixed", tmp_path / "fixed.mgz", "--moving", tmp_path / "moving.nrrd", "--fixed-label",
             tmp_path / "label_fixed.mgz", "--moving-label", tmp_path / "label_moving.nrrd", "--model", "none",
             "--refine", "3", "--device", "cpu", "--also", "nrrd", "mha", "mgz", "--out", tmp_path / "out",
             "--no-picture"]
    assert OM_register.main([str(word) for word in words]) == 0, capsys.readouterr().err
    expected, placed = read_volume(tmp_path / "out/warped.nii.gz")
    np.testing.assert_allclose(placed, affine, atol=1e-5)
    label, _ = read_label(tmp_path / "out/warped_label.nii.gz")
    for suffix in ("nrrd", "mha", "mgz"):
        array, own = read_volume(tmp_path / f"out/warped.{suffix}")
        assert np.array_equal(array, expected) and np.allclose(own, affine, atol=1e-5)
        assert stored_type(tmp_path / f"out/warped.{suffix}") == np.int16
        assert np.array_equal(read_label(tmp_path / f"out/warped_label.{suffix}")[0], label)
    [row] = json.loads((tmp_path / "out/results.json").read_text())["pairs"]
    assert "warped.mgz" in row["files"] and row["dice"] > 0
