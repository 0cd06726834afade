"""Fields as files: what is written moves other people's images as it moves ours."""
import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

from Dataloader.nifti import (
    into_plane,
    move_points,
    read_field,
    write_field,
    write_field_learn2reg,
    write_volume,
)
from Dataloader.synthetic import random_field
from Diffusion.fields import then_affine, warp
from Inference.scores import moved_points
from Runtime.errors import InputError
from tests.test_nifti import OBLIQUE, blob, make_affine

FIXED = [((20, 26, 31), make_affine()), ((22, 30, 18), make_affine(signs=(-1, -1, 1), spacing=(1.3, 0.8, 2.0))),
         ((24, 18, 29), OBLIQUE), ((31, 18, 24), make_affine((1, 2, 0), (1, -1, 1), (1.5, 1, 0.7), (10, 20, -5)))]


def smooth(shape, affine):
    """Blobs at fixed places of the world."""
    where = np.indices(shape).reshape(3, -1)
    where = (affine[:3, :3] @ where + affine[:3, 3:]).reshape(3, *shape)
    centre = where.reshape(3, -1).mean(1)
    places = [centre + offset for offset in ([0, 0, 0], [5, -4, 3], [-6, 2, -3])]
    return sum(np.exp(-((where - place.reshape(3, 1, 1, 1)) ** 2).sum(0) / (2 * 5.0 ** 2)) for place in places)


def by_itk(folder, moving, fixed):
    """A moving file as SimpleITK shows it by the field.nii.gz beside it, on the grid of a fixed file."""
    vectors = sitk.ReadImage(str(folder / "field.nii.gz"), sitk.sitkVectorFloat64)
    assert vectors.GetDimension() == 3 and vectors.GetNumberOfComponentsPerPixel() == 3
    images = [sitk.ReadImage(str(folder / name)) for name in (moving, fixed)]
    shown = sitk.Resample(*images, sitk.DisplacementFieldTransform(vectors), sitk.sitkLinear, 0.0)
    return sitk.GetArrayFromImage(shown).T


@pytest.mark.parametrize("fixed, moving", [(0, 0), (0, 1), (1, 2), (2, 3), (3, 1)])
def test_simpleitk_warps_by_our_file_as_we_do(tmp_path, fixed, moving):
    (shape, affine), (other_shape, other) = FIXED[fixed], FIXED[moving]
    other = other.copy()  # the moving volume about the same place of the world
    other[:3, 3] += (affine @ [*np.divide(shape, 2), 1] - other @ [*np.divide(other_shape, 2), 1])[:3]
    image = smooth(other_shape, other).astype(np.float32)
    field = random_field(fixed, shape, 0.06)
    write_volume(tmp_path / "moving.nii.gz", image, other)
    write_volume(tmp_path / "fixed.nii.gz", np.zeros(shape, np.float32), affine)
    write_field(tmp_path / "field.nii.gz", field, affine)
    theirs = by_itk(tmp_path, "moving.nii.gz", "fixed.nii.gz")

    change = (np.linalg.inv(other) @ affine)[:3]
    moved = then_affine(torch.from_numpy(field)[None], change)
    ours = warp(torch.from_numpy(image)[None, None], moved)[0, 0].numpy()
    inside = warp(torch.ones(1, 1, *other_shape), moved)[0, 0].numpy() > 0.999  # ITK ends half a voxel further out
    assert inside.mean() > 0.1 and ours[inside].std() > 0.05
    assert np.abs(ours - theirs)[inside].max() < 1e-3 * image.max()
    # The displacement matters: without it the images differ.
    plain = warp(torch.from_numpy(image)[None, None], then_affine(torch.zeros(1, 3, *shape), change))[0, 0].numpy()
    assert np.abs(plain - theirs)[inside].max() > 0.02 * image.max()


@pytest.mark.parametrize("shape, affine", FIXED)
def test_a_field_reads_back(tmp_path, shape, affine):
    field = random_field(1, shape, 0.06)
    write_field(tmp_path / "itk.nii.gz", field, affine)
    write_field_learn2reg(tmp_path / "disp_0001_0002.nii.gz", field, affine)
    image = nibabel.load(tmp_path / "itk.nii.gz")
    assert image.shape == (*shape, 1, 3) and int(image.header["intent_code"]) == 1007
    assert image.header.get_xyzt_units()[0] == "mm" and image.get_data_dtype() == np.float32
    assert nibabel.load(tmp_path / "disp_0001_0002.nii.gz").shape == (*shape, 3)
    for name in ("itk.nii.gz", "disp_0001_0002.nii.gz"):
        found, its_affine = read_field(tmp_path / name)
        assert found.dtype == np.float32 and np.abs(found - field).max() < 1e-4
        np.testing.assert_allclose(its_affine, affine, atol=1e-5)
    first = np.asarray(image.dataobj)[3, 4, 5, 0]
    np.testing.assert_allclose(first, (affine[:3, :3] @ field[:, 3, 4, 5]) * [-1, -1, 1], atol=1e-5)


def test_a_field_keeps_what_the_header_of_the_fixed_volume_says(tmp_path):
    header = nibabel.Nifti1Header()
    header["descrip"] = b"scanner seven"
    header["sform_code"] = 4
    write_field(tmp_path / "field.nii", np.ones((3, 4, 5, 6), np.float32), OBLIQUE, header)
    found = nibabel.load(tmp_path / "field.nii").header
    assert found["descrip"].item() == b"scanner seven" and int(found["sform_code"]) == 4
    assert int(header["intent_code"]) == 0, "the header given is left as it is"


def test_fields_of_slices(tmp_path):
    affine = make_affine(signs=(-1, 1, 1), spacing=(0.7, 1.2, 3))
    field = random_field(2, (20, 24), 0.06, dims=2)
    write_field(tmp_path / "field.nii.gz", field, affine)
    assert nibabel.load(tmp_path / "field.nii.gz").shape == (20, 24, 1, 1, 3)
    write_field_learn2reg(tmp_path / "disp_0001_0002.nii.gz", field, affine)
    assert nibabel.load(tmp_path / "disp_0001_0002.nii.gz").shape == (20, 24, 1, 3)
    for name in ("field.nii.gz", "disp_0001_0002.nii.gz"):
        found, _ = read_field(tmp_path / name, dims=2)
        assert found.shape == (2, 20, 24) and np.abs(found - field).max() < 1e-4
    write_field(tmp_path / "field.nii.gz", random_field(2, (8, 9, 10), 0.06), affine)
    with pytest.raises(InputError, match="field.nii.gz: the field has 10 planes"):
        read_field(tmp_path / "field.nii.gz", dims=2)


@pytest.mark.parametrize("degrees", [(0, 0, 0), (10, -8, 20)])
def test_the_step_into_another_plane_leaves_the_field_in_its_own(tmp_path, degrees):
    affine, other = make_affine((0, 2, 1), (1, -1, 1), (0.7, 1.2, 3)), make_affine((0, 2, 1), degrees=degrees)
    other[:3, 3] += [1, 16, -2]
    field = random_field(2, (20, 24), 0.06, dims=2)
    whole = into_plane(field, affine, other)
    places = np.concatenate([np.indices((20, 24, 1)) + whole, np.ones((1, 20, 24, 1))]).reshape(4, -1)
    np.testing.assert_allclose((np.linalg.inv(other) @ affine @ places)[2], 0, atol=1e-9)
    assert not into_plane(field, affine, affine)[2].any() and into_plane(whole, affine, other) is whole
    write_field(tmp_path / "field.nii.gz", whole, affine)
    np.testing.assert_allclose(read_field(tmp_path / "field.nii.gz", 2)[0], field, atol=1e-5)
    np.testing.assert_allclose(read_field(tmp_path / "field.nii.gz", 2, across=True)[0], whole, atol=1e-5)


def test_points_go_where_the_image_comes_from(tmp_path):
    shape, affine = FIXED[2]
    place = np.array([11, 8, 15])
    field = random_field(4, shape, 0.06)
    there = place + field[:, 11, 8, 15]
    warped = warp(torch.from_numpy(blob(shape, there).astype(np.float32))[None, None], torch.from_numpy(field)[None])
    assert warped[0, 0, 11, 8, 15] > 0.95 * warped.max(), "the blob at `there` shows at `place`"
    world = affine[:3, :3] @ place + affine[:3, 3]
    moved = move_points(world[None], field, affine)
    np.testing.assert_allclose(moved[0], affine[:3, :3] @ there + affine[:3, 3], atol=1e-4)


@pytest.mark.parametrize("affine", [np.eye(4), OBLIQUE])
def test_points_outside_the_grid_follow_the_affine_part_of_the_field(affine):
    """x = 60 of 32 voxels goes to 0.8 * 60; what the border has besides stays with it."""
    shape, turned = (32, 30, 28), np.array([[0.8, 0.1, 0], [-0.1, 0.9, 0.05], [0, 0, 1.1]])
    field = np.einsum("ij,j...->i...", turned - np.eye(3), np.indices(shape)) + np.reshape([2.0, -1, 0.5], (3, 1, 1, 1))
    voxels = np.array([[60.0, 10, 10], [-20, 40, 35], [31.4, 29.4, -0.4], [5, 6, 7]])
    expected = voxels @ turned.T + [2.0, -1, 0.5]
    for grid in (field, field.astype(np.float32)):
        moved = move_points(voxels @ affine[:3, :3].T + affine[:3, 3], grid, affine)
        np.testing.assert_allclose(moved, expected @ affine[:3, :3].T + affine[:3, 3], atol=1e-4)
    bumpy = field + random_field(0, shape, 0.06)
    ends = np.array([[31.0, 10, 10], [31 + 1e-6, 10, 10], [91, 10, 10]])
    one, next_to_it, far = move_points(ends, bumpy, np.eye(4))
    np.testing.assert_allclose(next_to_it, one, atol=1e-4)
    np.testing.assert_allclose(far - one, 60 * turned[:, 0], atol=60 * 0.05)
    pair = move_points(np.array([[5.0, 10, 10]]), field[:, :2], np.eye(4))  # two voxels have a slope, too
    np.testing.assert_allclose(pair[0], turned @ [5, 10, 10] + [2.0, -1, 0.5])
    plane = field[:2, :, :, 0]  # of 2D volumes; the third coordinate stays
    moved = moved_points(np.array([[60.0, 10, 4]]), plane, np.eye(4))
    np.testing.assert_allclose(moved[0], [*(turned[:2, :2] @ [60, 10] + [2.0, -1]), 4])


@pytest.mark.parametrize("kind, words", [
    ("fnirt", "a field of FSL .intent 2006."), ("y_", "a deformation of SPM, which stores positions"),
    ("Mapping", "a deformation of SPM"), ("NREG_TRANS", "a transformation of NiftyReg"),
    ("mgz", "a warp of FreeSurfer")])
def test_fields_of_other_programs_are_not_taken_for_ours(tmp_path, kind, words):
    """An identity of each, by intent code and name as those programs write them."""
    shape = (6, 7, 8, 3) if kind in ("fnirt", "mgz") else (6, 7, 8, 1, 3)
    header = nibabel.Nifti1Header()
    header.set_intent({"fnirt": 2006}.get(kind, 1007), name=kind if kind in ("Mapping", "NREG_TRANS") else "",
                      allow_unknown=True)
    path = tmp_path / {"y_": "y_T1.nii", "mgz": "warp.mgz"}.get(kind, "field.nii.gz")
    write_volume(path, np.zeros(shape, np.float32), np.eye(4), header)
    with pytest.raises(InputError, match=f"{path.name}: {words}.*convert the field to ITK's"):
        read_field(path)


@pytest.mark.parametrize("array, words", [
    (np.zeros((4, 5, 6), np.float32), "shape .4, 5, 6. is not a displacement field"),
    (np.zeros((4, 5, 6, 2), np.float32), "is not a displacement field"),
    (np.zeros((1, 5, 6, 1, 3), np.float32), "has one point along axis 0"),
    (np.zeros((4, 1, 6, 3), np.float32), "has one point along axis 1"),
    (np.full((4, 5, 6, 3), np.nan, np.float32), "360 numbers are NaN")])
def test_what_is_no_field_is_refused(tmp_path, array, words):
    write_volume(tmp_path / "field.nii.gz", array, np.eye(4))
    with pytest.raises(InputError, match=f"field.nii.gz: .*{words}"):
        read_field(tmp_path / "field.nii.gz")


@pytest.mark.parametrize("intent", [1006, 1007])
def test_a_field_whose_shape_and_intent_disagree_is_refused(tmp_path, intent):
    header = nibabel.Nifti1Header()
    header.set_intent(intent)
    write_volume(tmp_path / "field.nii.gz", np.zeros((4, 5, 6, 3), np.float32), np.eye(4), header)
    with pytest.raises(InputError, match=f"field.nii.gz: .* means voxels .* intent {intent} millimetres"):
        read_field(tmp_path / "field.nii.gz")


def test_a_field_is_checked_as_a_volume_is(tmp_path):
    image = nibabel.Nifti1Image(np.ones((5, 6, 7, 3), np.float32), None)
    image.header.set_sform(np.diag([1.0, 1, 0, 1]), 1)
    nibabel.save(image, tmp_path / "field.nii.gz")
    with pytest.raises(InputError, match="field.nii.gz: the affine .* is singular; repair the header"):
        read_field(tmp_path / "field.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.ones((5, 6, 7, 3), np.complex64), np.eye(4)), tmp_path / "field.nii.gz")
    with pytest.raises(InputError, match="field.nii.gz: each voxel must be one real number, but the type is complex64"):
        read_field(tmp_path / "field.nii.gz")


@pytest.mark.parametrize("unit, mm", [("micron", 1e-3), ("meter", 1e3)])
def test_itk_moves_an_image_of_other_units_by_our_field(tmp_path, unit, mm):
    """ITK converts the grid of such files to millimetres, but not the vectors."""
    shape, affine = FIXED[2]
    header = nibabel.Nifti1Header()
    header.set_xyzt_units(unit)
    image = smooth(shape, affine).astype(np.float32)
    write_volume(tmp_path / "image.nii.gz", image, affine, header)
    np.testing.assert_allclose(nibabel.load(tmp_path / "image.nii.gz").affine[:3], affine[:3] / mm, rtol=1e-5)
    field = random_field(1, shape, 0.06)
    write_field(tmp_path / "field.nii.gz", field, affine, header)
    found, its_affine = read_field(tmp_path / "field.nii.gz")
    assert nibabel.load(tmp_path / "field.nii.gz").header.get_xyzt_units()[0] == unit
    assert np.abs(found - field).max() < 1e-4
    np.testing.assert_allclose(its_affine, affine, rtol=1e-5)

    theirs = by_itk(tmp_path, "image.nii.gz", "image.nii.gz")
    ours = warp(torch.from_numpy(image)[None, None], torch.from_numpy(field)[None])[0, 0].numpy()
    inside = warp(torch.ones(1, 1, *shape), torch.from_numpy(field)[None])[0, 0].numpy() > 0.999
    assert inside.mean() > 0.1 and np.abs(ours - theirs)[inside].max() < 1e-3 * image.max()
    assert np.abs(image - theirs)[inside].max() > 0.02 * image.max(), "the displacement matters"
