"""Carrying label maps: against the plain way on the whole volume, and what must not get lost."""
import nibabel
import numpy as np
import pytest
import torch
from scipy import ndimage

from Diffusion.metrics import dice
from Inference.augmentation import deform
from Inference.labels import AT_VOXEL, SIGMA, apply_label, label_at
from Inference.registration import apply_field
from Runtime.errors import InputError


def ellipsoid(shape, centre, radii):
    """Voxels within an ellipsoid; centre and radii in voxels."""
    distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip(np.indices(shape), centre, radii))
    return distance < 1


def two_structures(shape=(28, 24, 26), centre=(13.2, 11.4, 12.7)):
    """An ellipsoid whose halves are the labels 2 and 5, touching each other."""
    inside = ellipsoid(shape, centre, (9, 6, 7))
    label = np.where(inside, 2, 0).astype(np.int16)
    label[inside & (np.indices(shape)[0] > 14)] = 5
    return label


def plain_smooth(label, points):
    """The definition, on whole volumes: smooth each label's indicator, the background's too, sample, arg max."""
    values = np.unique(label)
    shares = [ndimage.map_coordinates(ndimage.gaussian_filter((label == value).astype(np.float32), SIGMA,
                                                              mode="nearest", radius=4), points, order=1,
                                      mode="nearest") for value in values]
    return values[np.argmax(shares, 0)]


def random_points(shape, seed=0):
    """Every voxel, moved by a smooth random field of some voxels."""
    rng = np.random.default_rng(seed)
    field = np.stack([ndimage.gaussian_filter(rng.normal(size=shape), 4) for _ in shape])
    return np.indices(shape) + 3 * field / field.std()


def test_labels_are_the_arg_max_of_their_smoothed_indicators():
    label = two_structures()
    points = np.clip(random_points(label.shape), 0, np.reshape(label.shape, (3, 1, 1, 1)) - 1)
    found = label_at(label, points)
    assert found.dtype == label.dtype
    between = (np.abs(points - np.rint(points)) > AT_VOXEL).any(0)
    assert np.array_equal(found[between], plain_smooth(label, points)[between]) and between.mean() > 0.97
    assert np.array_equal(found[~between], label[tuple(np.rint(points).astype(int))][~between])
    assert not np.array_equal(found, ndimage.map_coordinates(label, points, order=0))


@pytest.mark.parametrize("angle", [10, 33])
def test_smooth_labels_are_nearer_to_the_true_shape_than_nearest_ones(angle):
    """A turned ellipsoid, carried from its voxels, beside the same ellipsoid cut out of the turned space itself."""
    shape, centre = (28, 24, 26), np.array([13.2, 11.4, 12.7])
    turn = np.array([[np.cos(np.deg2rad(angle)), -np.sin(np.deg2rad(angle)), 0],
                     [np.sin(np.deg2rad(angle)), np.cos(np.deg2rad(angle)), 0], [0, 0, 1]])
    label = ellipsoid(shape, centre, (9, 5, 6)).astype(np.uint8)
    points = np.einsum("ij,j...->i...", turn, np.indices(shape) - centre.reshape(3, 1, 1, 1))
    true = (points / np.reshape([9, 5, 6], (3, 1, 1, 1))) ** 2
    true = (true.sum(0) < 1).astype(np.uint8)
    points = points + centre.reshape(3, 1, 1, 1)
    smooth, = dice(label_at(label, points), true, [1])
    nearest, = dice(ndimage.map_coordinates(label, points, order=0), true, [1])
    assert smooth > nearest + 0.005 and smooth > 0.97


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_thin_structures_and_single_voxels_are_not_lost(shift):
    label = np.zeros((20, 24, 22), np.int16)
    label[4:12, 5:14, 6:15] = 3
    label[18, 3:20, 10] = 9  # a line
    label[2, 2, 2] = 5  # a voxel
    label[15, :, 18] = 7  # a line through the whole volume
    label[8, 9, 5:16] = 0  # a channel through the block
    found = label_at(label, np.indices(label.shape) + shift)
    for value in (5, 7, 9):
        assert (found[label == value] == value).all()
    assert (found[8, 9, 8:13] == 0).all()  # but for its mouths, which the space around widens
    plain = plain_smooth(label, np.indices(label.shape))
    assert not {5, 7, 9} & set(np.unique(plain))  # the smoothing alone does lose them


def test_a_label_that_is_not_there_never_appears():
    """Between the labels 1 and 3 there is no 2, as there would be between their numbers."""
    label = np.ones((12, 12, 12), np.uint8)
    label[6:] = 3
    points = random_points(label.shape, seed=1)
    outside = (points < -0.5).any(0) | (points >= 11.5).any(0)
    found = label_at(label, points)
    assert set(np.unique(found)) == {0, 1, 3}
    assert np.array_equal(found == 0, outside)  # a structure that the field of view cuts off goes on to its border


def test_labels_of_an_empty_map_of_two_axes_and_of_other_types():
    assert not label_at(np.zeros((6, 7, 8), np.int16), np.indices((6, 7, 8)) + 0.2).any()
    label = two_structures()[:, 11]
    points = np.indices(label.shape) + 0.25
    inside = (points < np.reshape(label.shape, (2, 1, 1)) - 0.5).all(0)
    assert np.array_equal(label_at(label, points), plain_smooth(label, points) * inside)
    floats = label_at(label.astype(np.float64), points)
    assert floats.dtype == np.float64 and np.array_equal(floats, label_at(label, points))
    large = label_at(np.where(label == 5, 2 ** 30 + 1, label.astype(np.int64)), points)
    assert set(np.unique(large)) == {0, 2, 2 ** 30 + 1}  # a number that float32 does not have


def test_between_two_grids_the_field_and_both_affines_are_followed():
    """A moving map on a flipped, anisotropic, shifted grid, under a field of whole voxels of the fixed grid."""
    label = two_structures()
    affine = np.array([[-2.0, 0, 0, 30], [0, 1.5, 0, -4], [0, 0, 1, 7], [0, 0, 0, 1]])
    fixed_affine = np.array([[1.0, 0, 0, -20], [0, 1.5, 0, -4], [0, 0, 2, 7], [0, 0, 0, 1]])
    shape = (30, 22, 13)
    field = np.zeros((3, *shape), np.float32)
    field[1] = 2
    moved = np.indices(shape) + field
    world = np.einsum("ij,j...->i...", fixed_affine[:3, :3], moved) + fixed_affine[:3, 3].reshape(3, 1, 1, 1)
    points = np.einsum("ij,j...->i...", np.linalg.inv(affine[:3, :3]), world - affine[:3, 3].reshape(3, 1, 1, 1))
    assert np.array_equal(apply_label(label, affine, field, fixed_affine), label_at(label, points.round(6)))
    nearest = apply_label(label, affine, field, fixed_affine, "nearest")
    assert np.array_equal(nearest, apply_field(label, affine, field, fixed_affine, order=0))
    assert nearest.any() and dice(nearest, apply_label(label, affine, field, fixed_affine), [2])[0] > 0.9


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_the_nearest_label_keeps_a_number_that_float32_does_not_have(dtype):
    label = np.choose(two_structures() % 4, (-312782547, 614454277, 312782546)).astype(dtype)
    field = np.zeros((3, *label.shape), np.float32)
    field[0] = 3
    found = apply_label(label, np.eye(4), field, np.eye(4), "nearest")
    assert found.dtype == dtype and np.array_equal(found[:-3], label[3:]) and not found[-3:].any()


def test_deformed_labels_continue_beyond_the_border():
    label = two_structures()[5:20]
    field = np.zeros((3, *label.shape), np.float32)
    field[0] = -3
    moved = deform(label, field, "smooth")
    assert moved.dtype == label.dtype and np.array_equal(moved[0], moved[3]) and moved[0].any()


def test_a_map_that_goes_nowhere_stays_as_it_is():
    label = two_structures()
    label[1, 1, 1] = 3
    assert not np.array_equal(plain_smooth(label, np.indices(label.shape)), label), "smoothing alone loses a voxel"
    for shift in (0, 0.08):
        field = np.full((3, *label.shape), shift, np.float32)
        assert np.array_equal(apply_label(label, np.eye(4), field, np.eye(4)), label)


@pytest.mark.parametrize("shape, size, affine, words", [
    ((8, 8), (3, 8, 8, 8), np.eye(4), "a field of shape (3, 8, 8, 8) cannot warp an image of shape (8, 8); give a 3D"),
    ((8, 8, 8), (2, 8, 8), np.eye(4), "a field of shape (2, 8, 8) cannot warp an image of shape (8, 8, 8)"),
    ((8, 8, 8), (8, 8, 8, 3), np.eye(4), "a field of shape (8, 8, 8, 3) cannot warp"),
    ((8, 8), (2, 8, 8), np.eye(3), "the image: the affine [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, "),
    ((8, 8), (2, 8, 8), np.diag([1, 0, 1, 1]), "is not an invertible 4x4 matrix with the last row 0 0 0 1; give")])
def test_what_does_not_fit_together_is_one_sentence(shape, size, affine, words):
    for function in (apply_field, apply_label):
        with pytest.raises(InputError) as found:
            function(np.ones(shape, np.uint8), affine, np.zeros(size, np.float32), np.eye(4))
        assert words in str(found.value)


@pytest.mark.parametrize("displacement, order, words", [
    (0.0, "nearest", "order must be 1 (linear, for images) or 0 (nearest, for labels), not 'nearest'"),
    (0.0, 3, "not 3"), (np.nan, 1, "the field: 1008 numbers are NaN or infinite; compute the field again")])
def test_what_apply_field_would_do_otherwise_than_asked_is_refused(displacement, order, words):
    with pytest.raises(InputError) as found:
        apply_field(np.ones((6, 7, 8)), np.eye(4), np.full((3, 6, 7, 8), displacement), np.eye(4), order)
    assert words in str(found.value)


def test_a_field_that_is_read_from_a_file_in_place_is_taken(tmp_path, recwarn):
    np.save(tmp_path / "field.npy", np.zeros((3, 6, 7, 8), np.float32))
    field, label = np.load(tmp_path / "field.npy", mmap_mode="r"), np.ones((6, 7, 8), np.uint8)
    assert np.array_equal(apply_label(label, np.eye(4), field, np.eye(4)), label) and not recwarn.list


def test_tensors_are_arrays_and_images_of_a_library_are_named():
    label = np.random.default_rng(0).integers(0, 3, (6, 7, 8)).astype(np.uint8)
    field = np.zeros((3, *label.shape), np.float32)
    for function in (apply_field, apply_label):
        arrays = label, np.eye(4), field, np.eye(4)
        wanted, found = function(*arrays), function(*(torch.tensor(array, requires_grad=array.dtype != np.uint8)
                                                      for array in arrays))
        assert np.array_equal(found, wanted) and found.dtype == wanted.dtype
        with pytest.raises(InputError, match="the image: Nifti1Image is not a volume; give an array"):
            function(nibabel.Nifti1Image(label, np.eye(4)), np.eye(4), field, np.eye(4))
