"""Two grids and one field: the mathematics of Inference/registration.py against SimpleITK, ANTs and known answers."""
import functools
import re
import warnings

import numpy as np
import pytest
import SimpleITK as sitk
import torch
from scipy import ndimage

from Dataloader import grids
from Dataloader.nifti import LPS, move_points, read_field, write_field, write_volume
from Dataloader.prepare import on_grid
from Dataloader.synthetic import make_subject, random_field
from Diffusion.metrics import spread
from Inference import outputs, registration
from Inference.choices import STEPS, STEPS_CONTINUED
from Inference.labels import apply_label, without_affine
from Inference.pair_figures import score_cards
from Inference.registration import apply_field, overlap_percent, working_grid
from Inference.scores import COLUMNS
from Runtime.errors import InputError
from tests import tiny
from tests.test_fields_in_files import FIXED, smooth
from tests.test_nifti import OBLIQUE, make_affine, rotation

register = functools.partial(registration.register, affine=False, refine=False)  # the network alone
apart_is_said_elsewhere = pytest.mark.filterwarnings("ignore:moving covers")


def settings(size=24, spacing_mm=1.2, **changes):
    """The network is asked once, so that its answer is the field."""
    once = {"registration__rounds": 1, "registration__symmetric": False}
    return tiny.config(data__img_size=size, data__spacing_mm=spacing_mm, run__amp="off", **once, **changes)


@functools.cache
def known_field(seed, size):
    """A smooth field, (N, *size), that many tests share; not to be changed."""
    return random_field(seed, size, 0.05, dims=len(size))


class Known(torch.nn.Module):
    """A network whose answer is known: a smooth field. It keeps what it was shown."""

    def __init__(self, amplitude=0.05, seed=3):
        super().__init__()
        self.amplitude, self.seed = amplitude, seed

    def forward(self, image, t, condition=None):
        self.moving, self.condition = image, condition
        self.field = known_field(self.seed, tuple(image.shape[2:])) * np.float32(self.amplitude / 0.05)
        return torch.from_numpy(self.field)[None]


def known_transform(affine, shape):
    """A rotation, scaling and shift about the middle of a volume: T, 4x4."""
    middle = (affine @ [*np.divide(shape, 2), 1])[:3]
    matrix = np.eye(4)
    matrix[:3, :3] = rotation((6, -9, 5)) @ np.diag([1.05, 0.94, 1.02])
    matrix[:3, 3] = middle - matrix[:3, :3] @ middle + [1.5, -2.0, 1.0]
    return matrix


def two_volumes(fixed, moving):
    """A fixed and a moving volume on two grids about the same place of the world, each (array, affine)."""
    (shape, affine), (other_shape, other) = FIXED[fixed], FIXED[moving]
    other = other.copy()
    other[:3, 3] += (affine @ [*np.divide(shape, 2), 1] - other @ [*np.divide(other_shape, 2), 1])[:3]
    return (smooth(shape, affine).astype(np.float32), affine), (smooth(other_shape, other).astype(np.float32), other)


def read_both(tmp_path, fixed, moving):
    for name, (array, affine) in (("fixed", fixed), ("moving", moving)):
        write_volume(tmp_path / f"{name}.nii.gz", array, affine)
    return [sitk.ReadImage(str(tmp_path / f"{name}.nii.gz")) for name in ("fixed", "moving")]


def itk_field(path):
    return sitk.DisplacementFieldTransform(sitk.ReadImage(str(path), sitk.sitkVectorFloat64))


def itk_affine(matrix):
    flip = np.diag([*LPS, 1])
    matrix = flip @ matrix @ flip
    found = sitk.AffineTransform(3)
    found.SetMatrix(matrix[:3, :3].ravel().tolist())
    found.SetTranslation(matrix[:3, 3].tolist())
    return found


def seen_inside(found):
    """Where the fixed grid shows the inside of the moving volume: ITK's ends half a voxel further out than ours."""
    moving, affine = found.moving
    ones = apply_field(np.pad(np.ones(np.subtract(moving.shape, 2), np.float32), 1), affine, found.field,
                       found.fixed.affine)
    return ones > 0.999


@apart_is_said_elsewhere
@pytest.mark.parametrize("fixed, moving", [(0, 0), (0, 1), (1, 2), (2, 3), (3, 0)])
def test_affine_and_field_are_one_field_that_simpleitk_applies_alike(tmp_path, fixed, moving):
    fixed, moving = two_volumes(fixed, moving)
    matrix, net = known_transform(fixed[1], fixed[0].shape), Known()
    found = register(fixed, moving, (net, settings()), start=matrix)
    reference, image = read_both(tmp_path, fixed, moving)
    write_field(tmp_path / "field.nii.gz", found.field, fixed[1])
    saved = sitk.Resample(image, reference, itk_field(tmp_path / "field.nii.gz"), sitk.sitkLinear, 0.0)
    # The same from its parts: the field of the working grid, then the affine (the last added is applied first).
    work_affine = working_grid(fixed[0], fixed[1], settings(), True)[1]
    write_field(tmp_path / "part.nii.gz", net.field, work_affine)
    parts = sitk.CompositeTransform([itk_affine(matrix), itk_field(tmp_path / "part.nii.gz")])
    inside = seen_inside(found)
    assert inside.mean() > 0.15 and found.warped[inside].std() > 0.05
    for theirs in (saved, sitk.Resample(image, reference, parts, sitk.sitkLinear, 0.0)):
        assert np.abs(found.warped - sitk.GetArrayFromImage(theirs).T)[inside].max() < 1e-3 * np.ptp(moving[0])
    plain = sitk.GetArrayFromImage(sitk.Resample(image, reference, itk_affine(matrix), sitk.sitkLinear, 0.0)).T
    assert np.abs(found.warped - plain)[inside].max() > 0.02 * np.ptp(moving[0]), "the field matters"


@apart_is_said_elsewhere
@pytest.mark.parametrize("fixed, moving", [(3, 1), (2, 3)])
def test_ants_applies_the_field_as_we_do(tmp_path, fixed, moving):
    ants = pytest.importorskip("ants")
    fixed, moving = two_volumes(fixed, moving)
    found = register(fixed, moving, (Known(), settings()), start=known_transform(fixed[1], fixed[0].shape))
    read_both(tmp_path, fixed, moving)
    write_field(tmp_path / "field.nii.gz", found.field, fixed[1])
    images = [ants.image_read(str(tmp_path / f"{name}.nii.gz")) for name in ("fixed", "moving")]
    theirs = ants.apply_transforms(*images, transformlist=[str(tmp_path / "field.nii.gz")], interpolator="linear")
    inside = seen_inside(found)
    assert np.abs(found.warped - theirs.numpy())[inside].max() < 1e-3 * np.ptp(moving[0])


@apart_is_said_elsewhere
@pytest.mark.parametrize("fixed, moving", [(1, 3), (3, 2)])
def test_the_inverse_leads_back(fixed, moving):
    fixed, moving = two_volumes(fixed, moving)
    found = register(fixed, moving, (Known(), settings()), start=known_transform(fixed[1], fixed[0].shape),
                     inverse=True)
    shape, affine = moving[0].shape, moving[1]
    assert found.inverse.shape == (3, *shape) and not [said for said in found.warnings if "inverse" in said]
    world = (affine[:3, :3] @ np.indices(shape).reshape(3, -1) + affine[:3, 3:]).T
    there = move_points(world, found.inverse, affine)
    back = move_points(there, found.field, fixed[1])
    voxels = np.linalg.inv(fixed[1])[:3, :3] @ there.T + np.linalg.inv(fixed[1])[:3, 3:]
    within = ((voxels >= 0) & (voxels <= np.reshape(fixed[0].shape, (3, 1)) - 1)).all(0)
    missed_mm = np.linalg.norm(back - world, axis=1)[within]
    assert found.inverse_error_mm == pytest.approx(missed_mm.mean(), rel=1e-2), "of the fields as they are written"
    assert found.inverse_error_max_mm == pytest.approx(missed_mm.max(), rel=1e-2)
    assert 0 < found.inverse_consistency_mm < 0.2
    within = ((voxels > 1) & (voxels < np.reshape(fixed[0].shape, (3, 1)) - 2)).all(0)
    lengths = np.linalg.norm(np.linalg.inv(affine)[:3, :3] @ (back - world).T, axis=0)[within]
    assert within.mean() > 0.2 and lengths.max() < 0.4 and lengths.mean() < 0.08
    assert np.linalg.norm(there - world, axis=1)[within].mean() > 2, "points move by millimetres"


def test_nothing_to_do_is_exactly_nothing():
    fixed, moving = two_volumes(3, 3)
    found = register(fixed, moving)
    assert not found.field.any() and found.folding_percent == 0 and found.sdlogj < 1e-6
    np.testing.assert_allclose(found.warped, moving[0], atol=1e-6)
    assert found.similarity == pytest.approx(1, abs=1e-4) and found.similarity_before == found.similarity
    assert found.overlap_percent == 100 and (found.verdict, found.reason) == ("ok", "")
    assert set(found.seconds) == {"affine", "network", "refine", "total"}


@pytest.mark.parametrize("affine", [make_affine(), make_affine((2, 0, 1), (-1, 1, -1))])
def test_a_working_grid_that_coincides_gives_the_field_itself(affine):
    fixed = (smooth((21, 26, 18), affine).astype(np.float32), affine)
    net = Known()
    found = register(fixed, fixed, (net, settings(8, 1.0))).field
    ornt = [int(np.argmax(np.abs(affine[axis, :3]))) for axis in range(3)]  # voxel axis along each axis of the world
    signs = [int(np.sign(affine[axis, ornt[axis]])) for axis in range(3)]
    assert net.field.shape[1:] == tuple(fixed[0].shape[axis] for axis in ornt), "enlarged until the volume fits"
    expected = np.empty_like(found)
    for axis, (own, sign) in enumerate(zip(ornt, signs)):
        part = np.flip(net.field[axis], [a for a in range(3) if signs[a] < 0]) * sign
        expected[own] = np.moveaxis(part, [0, 1, 2], ornt)
    assert np.abs(found - expected).max() < 1e-4 < np.abs(found).max()


@pytest.mark.parametrize("grid, changes", [
    (0, {}), (3, {}), (0, {"data__crop_above": 0.2}), (3, {"data__window": "[100, 900]"})])
def test_the_network_sees_what_the_training_showed_it(tmp_path, grid, changes):
    (shape, affine), cfg, items = FIXED[grid], settings(48, 1.1, **changes), []
    for seed in (1, 2):
        write_volume(tmp_path / f"{seed}.nii.gz", 1000 * make_subject(seed, shape)["image"], affine)
        items.append({"image": tmp_path / f"{seed}.nii.gz", "label": None, "mask": None})
    net = Known(0)
    register(items[0]["image"], items[1]["image"], (net, cfg))
    shown = [net.condition[:, :1], net.moving]
    for image, item in zip(shown, items):
        if changes.get("data__crop_above") and item is items[1]:
            continue  # the training centres each volume on its own foreground
        np.testing.assert_allclose(image[0, 0], on_grid(item, cfg)["image"], atol=2e-5)


def test_working_grids():
    affine = make_affine(signs=(-1, 1, 1), spacing=(0.5, 0.5, 4.0))
    image = np.random.default_rng(0).random((40, 36, 8)).astype(np.float32)
    work, grid = working_grid(image, affine, settings(), False)
    np.testing.assert_allclose(np.linalg.norm(grid[:3, :3], axis=0), 1.0)
    assert work.shape == (20, 18, 29), "voxels of the geometric mean, between the centres of the outermost ones"
    work, grid = working_grid(image, affine, settings([16, 24, 16], 1.5), True)
    assert work.shape == (16, 24, 22) and np.allclose(np.linalg.norm(grid[:3, :3], axis=0), 1.5)
    work, grid = working_grid(image, affine, settings([16, 24, 16], 0), True)
    assert work.shape == (16, 24, 16) and np.allclose(np.linalg.norm(grid[:3, :3], axis=0), 2.0)
    np.testing.assert_allclose(grid @ [7.5, 11.5, 7.5, 1], affine @ [19.5, 17.5, 3.5, 1], atol=1e-9)


@pytest.mark.parametrize("low, voxels", [(0.0, 0.02), (-1000.0, 0.5)])
def test_the_rim_of_thick_slices_is_no_anatomy(low, voxels, monkeypatch):
    """A volume and a part of it stay where they are, also where 0 is not the lowest intensity of a large one."""
    monkeypatch.setattr(grids, "MOST_VOXELS", 10_000 if low else grids.MOST_VOXELS)
    image, affine = low + 1000 * make_subject(4, (40, 36, 12))["image"], np.diag([1.0, 1.0, 5.0, 1.0])
    part = affine.copy()
    part[2, 3] = 10.0
    found = register((image[..., 2:10], part), (image, affine), refine=30)
    assert np.abs(found.field).max() < voxels


@apart_is_said_elsewhere
@pytest.mark.parametrize("fixed, moving", [(0, 0), (2, 1)])
def test_the_answer_of_a_coarse_network_is_refined_on_the_grid_of_the_volumes(fixed, moving, monkeypatch):
    """Nothing but the grid changes: where refinement does nothing the field is the network's, as far as voxels say."""
    fixed, moving = two_volumes(fixed, moving)
    matrix, net, seen = known_transform(fixed[1], fixed[0].shape), Known(), []

    def nothing(pair, field, *rest):
        seen.append(tuple(pair["fixed"].shape[2:]))
        return field, None

    monkeypatch.setattr(registration, "optimise", nothing)
    models = {grid: (net, settings(16, 0, refine__grid=grid)) for grid in ("own", "trained")}
    plain, trained, own = (register(fixed, moving, models[grid], start=matrix, refine=steps)
                           for grid, steps in (("own", 0), ("trained", 5), ("own", 5)))
    assert seen == [(16, 16, 16), working_grid(*fixed, settings(16, 0), False)[0].shape] and seen[0] != seen[1]
    np.testing.assert_array_equal(trained.field, plain.field)
    assert own.start == plain.start == "matrix" and (own.matrix == plain.matrix).all()
    deformed = np.abs(plain.field - register(fixed, moving, start=matrix).field)
    # Both fields are linear between the points of a grid, but not of the same one.
    assert np.abs(own.field - plain.field).max() < 0.15 * deformed.max() > 0.1
    assert own.overlap_percent == plain.overlap_percent and own.seconds["network"] > 0


def test_refined_on_its_own_grid_a_pair_comes_closer():
    fixed, moving = ((make_subject(seed, (24, 28, 22))["image"], np.diag([0.5, 0.5, 0.5, 1.0])) for seed in (0, 1))
    models = {grid: (Known(0.001), settings(12, 0, refine__grid=grid)) for grid in ("trained", "own")}
    found = {grid: register(fixed, moving, model, start="header", refine=20) for grid, model in models.items()}
    alike = {grid: np.corrcoef(result.warped.ravel(), fixed[0].ravel())[0, 1] for grid, result in found.items()}
    assert alike["own"] > alike["trained"] + 0.01 and found["own"].folding_percent < 0.5


def test_a_volume_beyond_memory_gets_a_coarser_grid_and_a_sentence(monkeypatch):
    monkeypatch.setattr(grids, "MOST_VOXELS", 2000)
    fixed, moving = two_volumes(0, 0)
    with pytest.warns(UserWarning, match="fixed has .* million voxels: the field is found on a grid of 2.* mm"):
        found = register(fixed, moving)
    assert found.field.shape == (3, *fixed[0].shape) and len(found.warnings) == 1


@pytest.mark.slow
def test_a_large_volume_is_refined_on_its_own_grid_if_asked_and_if_memory_allows(monkeypatch):
    monkeypatch.setattr(grids, "MOST_VOXELS", 3000)
    fixed, moving = two_volumes(0, 1)
    words, own = {"start": "header", "affine": False, "refine": 30}, {"config": {"refine.grid": "own"}}
    with pytest.warns(UserWarning, match="own .--set refine.grid=own refines it there, with [0-9]+ GiB of free memory"):
        coarse = register(fixed, moving, **words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = register(fixed, moving, **words, **own)
    alike = [np.corrcoef(found.warped.ravel(), fixed[0].ravel())[0, 1] for found in (coarse, fine)]
    assert 1 - alike[1] < 0.6 * (1 - alike[0]) and fine.folding_percent < 0.5
    monkeypatch.setattr(registration, "FINE", 1e12)
    with pytest.warns(UserWarning, match="to its own, since refining it there takes [0-9]+ GiB of free memory"):
        short = register(fixed, moving, **words, **own)
    np.testing.assert_array_equal(short.field, coarse.field)
    with pytest.warns(UserWarning, match="brought back to its own.$"):
        register(fixed, moving, **{**words, "refine": 2}, **own, similarity="mind")
    thin = np.zeros_like(fixed[0])
    thin[10:12] = 1
    with pytest.raises(InputError, match="fixed: no voxel of the grid .* lies wholly in its mask"):
        register(fixed, moving, **words, fixed_mask=thin)


@pytest.mark.filterwarnings("ignore:fixed has 0 million voxels")
def test_a_coarser_grid_takes_masks_and_channels_with_it(monkeypatch):
    fixed, moving = two_volumes(0, 1)
    sides = {"fixed": (fixed[0] > 0.05).astype(np.float32), "moving": np.ones_like(moving[0])}
    words = {**{f"{side}_mask": mask for side, mask in sides.items()}, "fixed_channels": [fixed[0]],
             "moving_channels": [moving[0]], "inverse": True, "refine": 9, "start": "header"}
    whole = register(fixed, moving, **words)
    monkeypatch.setattr(grids, "MOST_VOXELS", 4000)
    coarse = register(fixed, moving, **words)
    assert coarse.field.shape == whole.field.shape and coarse.inverse.shape == whole.inverse.shape
    assert len(coarse.warped_channels) == 1 and coarse.warped.shape == fixed[0].shape
    assert np.abs(coarse.field - whole.field).mean() < 0.3, "voxels, of which a coarser one is 1.7"
    assert coarse.similarity > coarse.similarity_before and coarse.inverse_error_mm < 0.3


def test_slab_by_slab_is_the_same(monkeypatch, tmp_path):
    """Large volumes are worked on slab by slab: fields, images, labels and determinants are as of the whole."""
    fixed, moving = two_volumes(0, 1)
    label = np.digitize(moving[0], [0.2, 0.5]).astype(np.int16)
    u = torch.from_numpy(random_field(0, (20, 22, 24)))[None]
    work = np.diag([1.3, 1.3, 1.3, 1.0])
    before, after = np.linalg.inv(work) @ fixed[1], np.linalg.inv(fixed[1]) @ work

    def all_of_it():
        field = registration.total_field(u, before, fixed[0].shape, after)
        write_field(tmp_path / "field.nii.gz", field, fixed[1])
        return [field, *registration.inverse_field(u, before, fixed[0].shape, after), outputs.determinants(field),
                apply_field(*moving, field, fixed[1]), apply_field(label, moving[1], field, fixed[1], order=0),
                apply_label(label, moving[1], field, fixed[1]), read_field(tmp_path / "field.nii.gz")[0]]

    whole = all_of_it()
    monkeypatch.setattr(grids, "MOST_VOXELS", 3 * fixed[0][0].size + 1)
    assert len(grids.slabs(fixed[0].shape)) > 3
    for one, other in zip(whole, all_of_it()):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=2e-3 if one.dtype.kind == "f" else 0)


def test_volumes_apart_are_said_and_brought_together_by_their_centres():
    image = smooth(*FIXED[0]).astype(np.float32)
    away = FIXED[0][1].copy()
    away[:3, 3] += [16, 3, -5]
    with pytest.warns(UserWarning, match="moving covers [0-9]+ % .* of the field of view of fixed.*--start centre"):
        register((image, FIXED[0][1]), (image, away), start="header")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = register((image, FIXED[0][1]), (image, away))  # finds that out by itself
    assert found.start == "centre"
    np.testing.assert_allclose(found.matrix[:3, 3], [16, 3, -5])
    assert np.abs(found.warped - image).max() < 1e-4 and found.similarity > found.similarity_before


def test_headers_that_are_right_are_kept_though_the_fields_of_view_differ():
    """Two crops of one volume: their centres are apart, and belong apart."""
    image, affine = smooth(*FIXED[0]).astype(np.float32), FIXED[0][1]
    shifted = affine.copy()
    shifted[:3, 3] += affine[:3, 0] * 5
    found = register((image[:-5], affine), (image[5:], shifted))
    assert found.start == "header" and (found.matrix == np.eye(4)).all()
    assert register((image, affine), (image, affine)).start == "header"


@pytest.mark.parametrize("affine", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_changes_nothing(affine):
    """The body of both volumes fills its field of view, so that its percentiles, moments and grid could be changed."""
    subjects = [make_subject(seed, (30, 36, 28))["image"] + 0.2 for seed in (1, 2)]
    fixed, moving = ((subject[4:-4, 5:-5, 3:-3].astype(np.float32), np.diag([1.1, 0.9, 1.3, 1.0]))
                     for subject in subjects)
    found = register(fixed, moving, affine=affine, refine=6)
    for around_fixed, around_moving, value in ((10, 0, 0.0), (7, 10, -50.0)):
        again = register(padded(fixed, around_fixed, value), padded(moving, around_moving, value), affine=affine,
                         refine=6)
        inner = tuple(slice(around_fixed, around_fixed + n) for n in fixed[0].shape)
        np.testing.assert_allclose(again.matrix, found.matrix, atol=1e-3)
        assert np.abs(again.field[(slice(None), *inner)] - found.field).max() < 0.02


def padded(volume, count, value):
    """(array, affine) with `count` voxels of one value around it, everything else where it was."""
    array, affine = volume
    affine = affine.copy()
    affine[:3, 3] -= affine[:3, :3].sum(1) * count
    return np.pad(array, count, constant_values=value), affine


def test_overlap_is_a_share_of_the_fixed_field_of_view():
    shape, affine = FIXED[2]
    half = affine.copy()
    half[:3, 3] += affine[:3, 0] * shape[0] / 2
    assert overlap_percent(shape, affine, shape, half, np.eye(4)) == pytest.approx(50, abs=3)
    assert overlap_percent(shape, affine, shape, half, half @ np.linalg.inv(affine)) == 100


def test_slices():
    (shape, affine), (other_shape, other) = ((40, 33), make_affine((1, 0, 2), (-1, 1, 1), (0.8, 1.4, 1))), (
        (36, 44), make_affine((0, 1, 2), (1, -1, 1), (1.2, 0.9, 1), (0, 0, 0), (-25, 20, 3)))
    cfg, net = settings([32, 40], 1.0, model__dims=2), Known()
    fixed, moving = ((make_subject(seed, size, dims=2)["image"], grid)
                     for seed, size, grid in ((0, shape, affine), (1, other_shape, other)))
    found = register(fixed, moving, (net, cfg), start="centre", inverse=True)
    assert found.field.shape == (2, *shape) and found.inverse.shape == (2, *other_shape)
    work_affine = working_grid(fixed[0], affine, cfg, True)[1]
    place = np.array([17, 20])
    y = (np.linalg.inv(work_affine) @ affine @ [*place, 0, 1])[:2]
    y = y + [ndimage.map_coordinates(part, y[:, None], order=1)[0] for part in net.field]
    there = np.linalg.inv(other) @ found.matrix @ work_affine @ [*y, 0, 1]
    expected = ndimage.map_coordinates(moving[0], there[:2, None], order=1)[0]
    assert found.warped[tuple(place)] == pytest.approx(expected, abs=1e-4) and expected > 0.01
    assert 0 < found.inverse_error_mm < 0.1


def test_slices_of_a_coronal_plane_and_of_two_planes():
    image = make_subject(0, (40, 44), dims=2)["image"]
    fixed, moving = ((image, make_affine((0, 2, 1), degrees=(0, turn, 0))) for turn in (0, 60))
    found = register(fixed, moving, affine="rigid", inverse=True)
    assert found.turn_degrees == pytest.approx(60, abs=1) and found.similarity > 0.9
    assert found.scale_least == pytest.approx(1) and found.scale_most == pytest.approx(1)
    assert found.inverse_error_mm < 0.01
    with pytest.raises(InputError, match="fixed and moving lie in different planes by their headers"):
        register(fixed, (image, make_affine()))


class Folded(torch.nn.Module):
    """A network whose answer folds, and turns the middle by more than 90 degrees: no steps find its inverse."""

    def forward(self, image, t, condition=None):
        x, y, _ = torch.meshgrid(*[torch.arange(n) - (n - 1) / 2 for n in image.shape[2:]], indexing="ij")
        turn = 3 * torch.exp(-((x ** 2 + y ** 2) / 9) ** 2)
        field = torch.stack([turn.cos() * x - turn.sin() * y - x, turn.sin() * x + turn.cos() * y - y, 0 * x])[None]
        field[:, 2, ..., 8:12] = torch.tensor([4.0, 1.0, -1.0, -4.0])
        return field


def test_an_inverse_that_is_none_is_said_in_millimetres():
    grid = np.diag([2.0, 2.0, 2.0, 1.0])
    fixed, moving = ((make_subject(seed, (20, 20, 20))["image"], grid) for seed in (0, 1))
    with pytest.warns(UserWarning, match="the inverse field did not converge"):
        found = register(fixed, moving, (Folded(), settings(20, 2.0)), start="header", inverse=True)
    assert found.folding_percent > 0
    world = 2.0 * np.indices((20, 20, 20)).reshape(3, -1).T
    back = move_points(move_points(world, found.inverse, grid), found.field, grid)
    missed_mm = np.linalg.norm(back - world, axis=1)
    assert found.inverse_error_max_mm == pytest.approx(missed_mm.max(), rel=1e-3) and missed_mm.max() > 0.2
    assert found.inverse_error_mm == pytest.approx(missed_mm.mean(), rel=1e-3)
    sentence, = [said for said in found.warnings if "inverse" in said]
    assert "mostly where the field folds or stretches strongly" in sentence
    percent, most_mm = map(float, re.search(r"converge: (\S+) % of .* up to (\S+) mm", sentence).groups())
    assert most_mm == pytest.approx(missed_mm.max(), rel=0.06)
    assert percent == pytest.approx(100 * (missed_mm > 0.2).mean(), rel=0.06)


@pytest.mark.parametrize("shape", [(60, 20), (60, 8, 9)])
@pytest.mark.parametrize("most", [5, 12])
def test_a_field_that_stretches_strongly_has_an_inverse(shape, most):
    """Slopes from 0.7 to 5, or to 12, along one axis: half steps jump to and fro where they are above 4."""
    slopes = np.where(abs(np.arange(60) - 30) < 5, most - 1, -0.3)
    slopes[:10] = slopes[-10:] = 0
    field = np.zeros((len(shape), *shape), np.float32)
    field[0] = (np.cumsum(slopes) - np.cumsum(slopes)[30]).reshape(-1, *[1] * (len(shape) - 1))
    before = np.eye(4)
    before[:3, 3] = 0.25
    inverse, missed = registration.inverse_field(torch.from_numpy(field)[None], before, shape, np.linalg.inv(before))
    assert missed.max() < registration.NOT_INVERTED
    there = np.arange(60) + inverse[0].reshape(60, -1)[:, 0] + 0.25
    np.testing.assert_allclose(there + np.interp(there, np.arange(60), field[0].reshape(60, -1)[:, 0]),
                               np.arange(60) + 0.25, atol=0.1)


def test_the_recommended_number_of_steps_needs_no_number(monkeypatch):
    pairs = [(make_subject(seed, (24, 28), dims=2)["image"], np.eye(4)) for seed in (0, 1)]
    asked, optimise = [], registration.optimise

    def one_step(pair, field, steps, *more):
        asked.append(steps)
        return optimise(pair, field, 1, *more)

    monkeypatch.setattr(registration, "optimise", one_step)
    for refine in (True, 7, 0):
        found = register(*pairs, refine=refine, config=settings(model__dims=2, refine__levels=1))
    register(*pairs, refine=True, start=found.known)
    assert asked == [STEPS, 7, STEPS_CONTINUED]


@pytest.mark.slow
@apart_is_said_elsewhere
@pytest.mark.parametrize("fixed, moving, far", [(0, 1, 1.5), (1, 2, 2), (2, 0, 1)])
def test_a_registration_continues_from_an_earlier_one(fixed, moving, far):
    """Without further steps the map stays what it was, on any two grids; with some it gets better."""
    fixed, moving = two_volumes(fixed, moving)
    first = registration.register(fixed, moving, refine=3, similarity="mapped")  # correlation sees that it is done
    same = register(fixed, moving, start=first.known)
    assert np.abs(same.field - first.field).mean() < 0.05 and np.abs(first.field).max() > far  # voxels
    further = register(fixed, moving, start=first.known, refine=True)
    # Part of the body lies beyond the moving field of view, which nothing is stretched to cover, in two of the pairs.
    assert further.similarity > first.similarity or first.overlap_percent < 95
    assert further.similarity > 0.996 * further.covered_percent / 100
    assert first.smoothing == further.smoothing and same.smoothing is None


@pytest.mark.slow
def test_an_earlier_field_of_another_pair_follows_the_affine_part_that_is_found_now():
    """As of the frames of a series."""
    image = np.pad(make_subject(0, (40, 48), dims=2)["image"], 12)
    still, near, far = ((ndimage.shift(image, (shift, 0), order=1), np.eye(4)) for shift in (0, 0.4, 6))
    known = register(still, near, affine="rigid", refine=10).known
    found = register(still, far, affine="rigid", refine=10, start=known)
    assert np.abs(found.field - [[[6]], [[0]]])[:, 20:44, 20:52].mean() < 0.1 and found.similarity > 0.95


@pytest.mark.parametrize("affine", [pytest.param("rigid", marks=pytest.mark.slow), False])
def test_an_affine_part_that_is_in_the_earlier_field_is_not_counted_twice(affine):
    image = np.pad(make_subject(0, (40, 48), dims=2)["image"], 12)
    larger = ndimage.affine_transform(image, np.eye(2) * 0.85, 0.075 * np.array(image.shape), order=1)
    first = register((image, np.eye(4)), (larger, np.eye(4)), affine=affine, refine=40)
    same = register((image, np.eye(4)), (larger, np.eye(4)), affine=True, start=first.known)
    assert same.similarity > first.similarity - 0.02


@pytest.mark.filterwarnings("ignore:.* an array alone has no spacing")
def test_an_earlier_registration_and_a_model_both_tell_where_to_start():
    pair = [make_subject(seed, (24, 28), dims=2)["image"] for seed in (0, 1)]
    known = register(*pair).known
    with pytest.raises(InputError, match="an earlier registration and a model were given"):
        register(*pair, (Known(), settings(model__dims=2)), start=known)
    with pytest.raises(InputError, match="config is for a registration without a model"):
        registration.register(*pair, (Known(), settings(model__dims=2)), config={"refine.levels": 1})
    for volume, words in ((pair[0][None].repeat(8, 0), "is 2D and fixed is 3D"), (pair[0], "is 3D and fixed is 2D")):
        with pytest.raises(InputError, match=f"start: the earlier registration {words}; give one"):
            registration.register(volume, volume, start=known)
        known = registration.Known(np.eye(4), np.zeros((3, 8, 8, 8), np.float32), np.eye(4), None)


def test_labels_are_nearest_and_keep_their_type():
    label = make_subject(0, (20, 22, 24))["label"].astype(np.uint8)
    field = random_field(1, (18, 26, 20), 0.05)
    moved = apply_field(label, OBLIQUE, field, OBLIQUE, order=0)
    where = np.rint(np.indices(field.shape[1:]) + field).astype(int)
    inside = ((where >= 0) & (where < np.reshape(label.shape, (3, 1, 1, 1)))).all(0)
    expected = np.where(inside, label[tuple(np.clip(where, 0, np.reshape(label.shape, (3, 1, 1, 1)) - 1))], 0)
    assert moved.dtype == np.uint8 and (moved == expected).mean() > 0.999 and len(np.unique(moved)) > 3


def test_outside_the_moving_image_is_its_least_intensity():
    image = make_subject(0, (20, 22, 24))["image"] * 2000 - 1000
    far = np.full((3, 20, 22, 24), 30.0, np.float32)
    np.testing.assert_allclose(apply_field(image, OBLIQUE, far, OBLIQUE), -1000, atol=1e-3)


@pytest.mark.slow
def test_affine_alignment_begins_where_the_start_says():
    image = make_subject(0, (26, 30, 28))["image"]
    turned = make_affine(degrees=(0, 0, 8), origin=(40, -7, 3))
    found = register((image, make_affine()), (image, turned), affine=True, start="centre")
    error = np.linalg.inv(turned) @ found.matrix @ make_affine() - np.eye(4)
    assert np.abs(error @ [13, 15, 14, 1])[:3].max() < 1.0 and np.abs(error[:3, :3]).max() < 0.1
    assert found.similarity > 0.9 and found.seconds["affine"] > 0 and found.overlap_percent > 70


@pytest.mark.parametrize("fixed, moving, more, words", [
    (np.ones((8, 9, 10)), None, {}, "fixed: every voxel is 1, so the volume is empty"),
    (None, np.full((8, 9, 10), np.nan), {}, "moving: 720 of 720 voxels are NaN"),
    (None, np.random.default_rng(0).random((8, 9)), {}, "fixed is 3D and moving is 2D"),
    (None, np.random.default_rng(0).random((8, 9, 10, 2)), {}, "moving: shape .8, 9, 10, 2. is neither 2D nor 3D; "
     "give one volume of it, such as array"),
    (np.random.default_rng(0).random((16, 18, 1)), None, {}, "fixed: .* is one plane of 3D.*; drop the last axis,"),
    (np.random.default_rng(0).random((8, 9, 2)), None, {}, "fixed: shape .8, 9, 2. has fewer than 4 voxels"),
    (None, None, {"start": "middle"}, "start must be auto, header, centre or a 4x4 matrix, not 'middle'"),
    (None, None, {"start": np.zeros((4, 4))}, "invertible 4x4 matrix"),
    (None, None, {"start": [*np.eye(4)[:3], [3, 0, 0, 1]]}, "with the last row 0 0 0 1, or Result.known"),
    (None, None, {"start": np.zeros((3, 8, 9, 10))}, "not an array of shape .3, 8, 9, 10.[.]$"),
    (None, None, {"affine": np.eye(4)}, "affine must be True, .*, not of type ndarray; the matrix of a volume"),
    (None, None, {"affine": 2}, "affine must be True, rigid, affine or False, not of type int"),
    (None, None, {"model": torch.nn.Linear(1, 1)}, "model: give a path, .*, not a Linear"),
    (None, None, {"config": tiny.config(model__dims=2)}, "are 3D, but the model, or --dims, is 2D")])
def test_bad_input_is_one_sentence(fixed, moving, more, words):
    good = np.random.default_rng(1).random((8, 9, 10))
    with pytest.raises(InputError, match=words) as found:
        register((good if fixed is None else fixed, np.eye(4)), (good if moving is None else moving, np.eye(4)), **more)
    assert "\n" not in str(found.value)


def test_a_singular_affine_and_a_broken_network_are_refused():
    good = np.random.default_rng(1).random((8, 9, 10))
    with pytest.raises(InputError, match="moving: the affine .* is not an invertible 4x4"):
        register((good, np.eye(4)), (good, np.zeros((4, 4))))
    with pytest.raises(InputError, match="moving: the affine .* with the last row 0 0 0 1; give that of"):
        register((good, np.eye(4)), (good, make_affine().T))
    with pytest.raises(InputError, match="field has NaN"):
        register((good, np.eye(4)), (good, np.eye(4)), (Known(np.inf), settings(16, 1.0)))


def test_the_grid_of_a_picture_is_that_of_the_deformation_alone():
    """A turn, a scale and a shift leave nothing; what they are composed with stays."""
    shape, affine = (16, 20, 18), make_affine()
    matrix = known_transform(affine, shape)
    change = np.linalg.inv(affine) @ matrix @ affine
    u = random_field(3, shape, 0.05)
    for deformation in (np.zeros_like(u), u):
        moved = np.indices(shape) + deformation
        whole = np.einsum("ij,j...->i...", change[:3, :3], moved) + change[:3, 3].reshape(3, 1, 1, 1)
        found = without_affine((whole - np.indices(shape)).astype(np.float32), matrix.tolist(), affine)
        np.testing.assert_allclose(found, deformation, atol=1e-4)


def test_cards_say_whether_a_score_has_become_better():
    rows = [{"dice_before": 0.755, "dice": 0.754, "tre_before_mm": 6.0, "tre_mm": 1.5, "similarity_before": 0.9,
             "similarity": 0.5, "sdlogj": 0.1}]
    cards = {word: (value, note) for word, value, note in score_cards(spread(rows, COLUMNS))}
    assert cards == {"dice": ("0.754", "no better: 0.755 before"), "tre, mm": ("1.50", "better: 6.00 before"),
                     "similarity": ("0.500", "worse: 0.900 before"), "sdlogj": ("0.1000", "")}
