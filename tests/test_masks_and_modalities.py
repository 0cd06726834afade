"""Masks, channels and similarities for two modalities: what does not count does not pull, contrast does not matter."""
import json
import warnings

import nibabel
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from scipy.spatial.transform import Rotation

from Dataloader.nifti import read_field, read_volume, write_field, write_volume
from Dataloader.synthetic import make_subject
from Diffusion.losses import (
    conditional_means,
    image_similarity,
    mapped_correlation,
    mind_similarity,
    mutual_information,
    self_similarity,
    table_lookup,
)
from Diffusion.metrics import average, dice, folding_percent
from Inference.affine import ONE_SIGN, align_affine
from Inference.blank import blank_corners, outlined_side
from Inference.choices import SIMILARITIES
from Inference.labels import apply_label
from Inference.registration import apply_field, read_sides, register, register_from
from OM_register import main as om_register
from Runtime.errors import InputError
from tests.test_refine import alike, refined
from tests.test_refine import pair as known_pair
from tests.tiny import config

pytestmark = pytest.mark.usefixtures("no_figures")
SIZE = (30, 34, 28)
SPACING_MM = np.diag([1.5, 1.2, 1.8, 1.0])
COLOUR = [(name, np.uint8) for name in "RGB"]  # of voxels in NIfTI


def smooth_noise(size, seed=0):
    noise = torch.rand(1, 1, *[max(n // 4, 2) for n in size], generator=torch.Generator().manual_seed(seed))
    return F.interpolate(noise, size, mode="trilinear" if len(size) == 3 else "bilinear")


def other_contrast(image):
    """The same anatomy with intensities that neither rise nor fall with the first ones; the background stays dark."""
    return 4.0 * (image - 0.5) ** 2 * (image > 0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Similarities
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(20, 24, 18), (26, 30)])
def test_self_similarity_is_the_same_for_inverted_contrast(size):
    image, other = smooth_noise(size), smooth_noise(size, seed=1)
    described = self_similarity(image)
    assert described.shape == (1, 12 if len(size) == 3 else 4, *size)
    assert 0 <= described.min() and described.max() <= 1
    assert float(mind_similarity(described, self_similarity(1.0 - image))) == pytest.approx(1.0, abs=1e-4)
    assert float(mind_similarity(described, self_similarity(3.0 * image + 2.0))) == pytest.approx(1.0, abs=1e-3)
    assert float(mind_similarity(described, self_similarity(other))) < 0.95


def test_self_similarity_of_an_edge_is_analytic():
    """Far from the plane where a step is, all neighbours are alike; two voxels before it, the one beyond differs."""
    image = torch.zeros(1, 1, 16, 16, 16)
    image[:, :, 8:] = 1.0
    described = self_similarity(image, distance=2, window=3)
    assert torch.allclose(described[..., 2, 8, 8], torch.ones(1, 12))
    at_edge = described[0, :, 6, 8, 8]  # pairs with the neighbour at +2 along the first axis: 4 of 12
    assert int((at_edge < 0.5).sum()) == 4 and torch.allclose(at_edge[at_edge > 0.5], torch.ones(8))


def test_mutual_information_of_known_images():
    image = smooth_noise((16, 18, 14))
    weight = torch.ones_like(image)
    same, inverted, unrelated = (float(mutual_information(other, image, weight, bins=16)) for other in
                                 (image, 1.0 - image, torch.rand(image.shape, generator=torch.Generator())))
    assert same == pytest.approx(inverted, abs=1e-6) and same > 0.5 and abs(unrelated) < 0.1
    assert float(mutual_information(torch.full_like(image, 0.3), image, weight)) == pytest.approx(0.0, abs=1e-9)


def test_mutual_information_has_the_gradient_of_its_value():
    numbers = torch.Generator().manual_seed(0)
    target = torch.rand(1, 1, 4, 5, 3, generator=numbers, dtype=torch.float64)
    image = (0.1 + 0.8 * torch.rand(target.shape, generator=numbers, dtype=torch.float64)).requires_grad_()
    weight = (0.2 + torch.rand(target.shape, generator=numbers, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda i, w: mutual_information(i, target, w, bins=6), (image, weight))


def test_conditional_means_give_back_a_function_of_the_intensity():
    image = torch.cat([smooth_noise((14, 16, 12), seed) for seed in (0, 1)])
    table = conditional_means(image, torch.cat([2.0 * image[:1], 1.0 - image[1:]]), None, bins=16)
    assert table.shape == (2, 16)
    mapped = table_lookup(image, table)
    assert torch.allclose(mapped[0], 2.0 * image[0], atol=0.1) and torch.allclose(mapped[1], 1.0 - image[1], atol=0.05)
    ramp = table_lookup(torch.tensor([[[0.0, 0.25, 0.5, 1.0]]]), torch.tensor([[0.0, 10.0, 30.0]]))
    assert ramp.flatten().tolist() == pytest.approx([0.0, 5.0, 10.0, 30.0])


@pytest.mark.parametrize("kind", ["correlation", "mapped", "mind"])
def test_image_similarity_is_one_for_equal_images_and_has_a_gradient(kind):
    cfg = config(registration__similarity=kind, registration__scales=2)
    image = smooth_noise((20, 22, 18))
    moved = image.roll(2, 3).requires_grad_()
    value = image_similarity(moved, image, cfg)
    assert float(image_similarity(image, image, cfg)) == pytest.approx(1.0, abs=0.02)
    assert float(value.detach()) < 0.98
    gradient, = torch.autograd.grad(value, moved)
    assert gradient.isfinite().all() and gradient.abs().max() > 0


@pytest.mark.parametrize("kind", ["correlation", "mapped", "mind"])
def test_what_has_no_weight_says_nothing(kind):
    cfg = config(registration__similarity=kind, registration__scales=1)
    image, target = smooth_noise((20, 22, 18)), smooth_noise((20, 22, 18), seed=1)
    weight = torch.ones_like(image)
    weight[:, :, 10:] = 0.0
    changed = torch.where(weight > 0, image, 1.0 - image)
    values = [float(image_similarity(each, target, cfg, weight)) for each in (image, changed)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert float(image_similarity(image, target, cfg)) != pytest.approx(values[0], abs=1e-5)


def test_mapped_correlation_recognises_an_anatomy_of_another_contrast():
    image = torch.from_numpy(make_subject(3, SIZE)["image"])[None, None].float()
    other = torch.from_numpy(make_subject(4, SIZE)["image"])[None, None].float()
    contrast = other_contrast(image).float()
    assert float(mapped_correlation(contrast, image)) > float(mapped_correlation(contrast, other)) + 0.2


# ---------------------------------------------------------------------------------------------------------------------
# Two modalities
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["mapped", "mind"])
def test_refinement_finds_a_known_deformation_in_another_contrast(kind):
    moving, fixed, true = known_pair(3)
    seen = ((moving - fixed).abs() > 0.05)[0, 0]
    cfg = config(refine__levels=2, registration__similarity=kind)
    field = refined(other_contrast(moving), fixed, None, 60, cfg)
    error, size = (part.square().sum(1).sqrt()[0][seen].mean() for part in (field - true, true))
    assert error < 0.7 * size
    assert alike(other_contrast(moving), fixed, field, cfg) > alike(other_contrast(moving), fixed, None, cfg)
    assert folding_percent(field) < 0.1


@pytest.mark.parametrize("contrast, compared_by", [
    pytest.param(lambda image: image, "correlation", marks=pytest.mark.slow),
    (lambda image: 1.0 - image, "correlation"),
    pytest.param(other_contrast, "mind", marks=pytest.mark.slow)])
def test_the_pair_tells_whether_it_is_of_two_modalities(contrast, compared_by):
    fixed, moving = (make_subject(seed, (24, 26, 22))["image"] for seed in (3, 4))
    found = register((fixed, SPACING_MM), (contrast(moving), SPACING_MM), refine=5, config=config())
    assert found.compared_by == compared_by and (found.one_sign < ONE_SIGN) == (compared_by == "mind")
    if compared_by == "mind":
        assert found.verdict != "ok" and ("two modalities" in found.reason or found.verdict == "failed")


def test_a_similarity_that_is_asked_for_is_taken():
    fixed, moving = (make_subject(seed, SIZE)["image"] for seed in (3, 4))
    asked = register((fixed, SPACING_MM), (moving, SPACING_MM), affine=False, refine=1, config=config(),
                     similarity="mind")
    assert asked.compared_by == "mind"


def test_affine_alignment_by_mutual_information_finds_a_known_map():
    subject = make_subject(5, SIZE)["image"]
    turn = np.eye(4)
    angle = np.deg2rad(12.0)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    turn[:3, 3] = [4.0, -3.0, 5.0]
    found, alignment = align_affine(subject, SPACING_MM, other_contrast(subject), turn @ SPACING_MM,
                                    similarity="mapped")
    assert alignment["one_sign"] is None, "only auto has to find out"
    corners = np.array([[x, y, z, 1.0] for x in (0, 29) for y in (0, 33) for z in (0, 27)]).T
    points = SPACING_MM @ corners
    assert np.linalg.norm(((found - turn) @ points)[:3], axis=0).max() < 2.0


# ---------------------------------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------------------------------

def lesioned(image, centre=(14, 14, 12), radius=4.0, value=1.0):
    """The volume with a bright ball in it, and a mask that is 1 outside of the ball and its rim."""
    far = np.sqrt(sum((axis - c) ** 2 for axis, c in zip(np.indices(image.shape), centre)))
    return np.where(far < radius, value, image).astype(np.float32), (far >= radius + 1).astype(np.float32)


@pytest.mark.slow
def test_masked_lesions_do_not_pull_on_each_other():
    """Both volumes have a bright lesion, at different places: what is around them is aligned as if they had none."""
    everywhere = np.ones(SIZE)
    misses, scores = [], []
    for seeds in ((7, 8), (3, 4)):
        fixed, moving = (make_subject(seed, SIZE) for seed in seeds)
        image, fixed_mask = lesioned(fixed["image"])
        other, moving_mask = lesioned(moving["image"], centre=(14, 19, 12))
        masked, pulled, clean = (
            register((volume, SPACING_MM), (another, SPACING_MM), affine=False, refine=40, **masks,
                     config=config(refine__levels=2, refine__weight=0.5)).field
            for volume, another, masks in ((image, other, {"fixed_mask": fixed_mask, "moving_mask": moving_mask}),
                                           (image, other, {"fixed_mask": everywhere}),
                                           (fixed["image"], moving["image"], {"fixed_mask": everywhere})))
        beside = (fixed_mask > 0) & (fixed["label"] > 0)
        labels = sorted(set(np.unique(fixed["label"])) - {0})
        warped = [apply_label(moving["label"], SPACING_MM, field, SPACING_MM, "nearest") for field in (masked, pulled)]
        misses.append([np.linalg.norm(field - clean, axis=0)[beside].mean() for field in (masked, pulled)])
        scores.append([average(dice(each * beside, fixed["label"] * beside, labels)) for each in warped])
    (missed, missed_pulled), (with_masks, without) = np.mean(misses, 0), np.mean(scores, 0)
    assert missed < 0.6 * missed_pulled and with_masks > without + 0.03


@pytest.mark.slow
def test_intensities_that_a_mask_leaves_out_change_nothing():
    """Whatever lies in the lesion of either volume: the same alignment, field and similarity."""
    fixed, moving = (make_subject(seed, SIZE)["image"] for seed in (7, 8))
    results = []
    for value in (50.0, 1.0, 0.4):
        (image, fixed_mask), (other, moving_mask) = lesioned(fixed, value=value), lesioned(moving, value=value)
        results.append(register((image, SPACING_MM), (other, SPACING_MM), affine="rigid", refine=8,
                                fixed_mask=fixed_mask, moving_mask=moving_mask))
    for result in results[1:]:
        np.testing.assert_allclose(results[0].matrix, result.matrix, atol=1e-4)
        np.testing.assert_allclose(results[0].field, result.field, atol=2e-3)
        assert results[0].similarity == pytest.approx(result.similarity, abs=1e-4)


@pytest.mark.slow
def test_beyond_a_field_of_view_that_cuts_the_anatomy_nothing_counts():
    """The error in what the moving volume shows is that of the whole volume, or the border would pull on the field."""
    fixed, moving = (volume[0, 0].numpy() for volume in known_pair(3)[:2])
    kept = round(0.6 * moving.shape[1])
    whole, half = (register((fixed, np.eye(4)), (image, np.eye(4)), affine=False, device="cpu").field
                   for image in (moving, moving[:, :kept]))
    seen = np.s_[:, :, :kept - 4]
    apart, far = np.abs(half[seen] - whole[seen]).max(), np.abs(whole[seen]).max()
    assert apart < 0.25 * far


def test_after_a_start_from_a_field_nothing_beyond_the_field_of_view_counts_either(tmp_path):
    """A zero field is the start by the headers. The field of view is oblique: it is no box of the fixed grid."""
    i, j = places = np.indices((60, 60)).astype(np.float32)
    fixed = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(60, 60)), 2.5)
    fixed = (1 + fixed / np.ptp(fixed)) * (np.hypot(i - 30, j - 30) < 27)
    turn, affine = np.radians(12), np.eye(4)
    affine[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    affine[:2, 3] = -2, 32
    world = np.einsum("ij,j...->i...", affine[:2, :2], np.indices((68, 38))) + affine[:2, 3].reshape(2, 1, 1)
    moved = ndimage.map_coordinates(fixed, [i, j + 1.5 * np.sin(i / 7)], order=1)
    write_volume(tmp_path / "F.nii.gz", fixed.astype(np.float32), np.eye(4))
    write_volume(tmp_path / "M.nii.gz", ndimage.map_coordinates(moved, world, order=1).astype(np.float32), affine)
    write_field(tmp_path / "zero.nii.gz", np.zeros((2, 60, 60), np.float32), np.eye(4))
    paths, options = [tmp_path / f"{side}.nii.gz" for side in "FM"], {"affine": False, "refine": 30, "device": "cpu"}
    by_header = register(*paths, start="header", config={"refine.weight": 0.5}, **options)
    by_field = register_from(tmp_path / "zero.nii.gz", *paths, dims=2, config={"refine.weight": 0.5}, **options)
    own = np.linalg.inv(affine)
    seen = (own[:2, :2] @ places.reshape(2, -1) + own[:2, 3:])[1].reshape(60, 60) > 1
    assert np.abs(by_field.field - by_header.field)[:, seen & (fixed > 0)].mean() < 0.05
    assert by_field.overlap_percent == pytest.approx(by_header.overlap_percent, abs=2)
    assert by_field.similarity == pytest.approx(by_header.similarity, abs=0.01)


@pytest.mark.slow
def test_what_a_scanner_has_not_reconstructed_is_air():
    image, target = (1500.0 * make_subject(seed, SIZE)["image"] - 1000.0 for seed in (0, 1))
    circle = np.hypot(*np.meshgrid(*(np.linspace(-1, 1, n) for n in SIZE[:2]), indexing="ij"))[..., None] < 1.0
    air, *others = [register((target, SPACING_MM), (np.where(circle, image, value), SPACING_MM), affine=False, refine=3,
                             device="cpu") for value in (-1024.0, -3024.0, -2000.0)]
    for found in others:
        assert found.warped.min() < -1500, "the result has what the file has"
        np.testing.assert_array_equal(found.field, air.field)
        assert found.similarity == pytest.approx(air.similarity, abs=1e-3) and found.verdict == air.verdict


def resampled(image, degrees):
    """An image turned about an oblique axis through its middle, blank where it shows nothing, and the map there."""
    axis = np.array([2.0, 1.0, 2.0]) / 3 if image.ndim == 3 else np.array([0.0, 0.0, 1.0])
    turn = Rotation.from_rotvec(np.radians(degrees) * axis).as_matrix()
    turn, middle = turn[:image.ndim, :image.ndim], (np.array(image.shape) - 1) / 2
    return ndimage.affine_transform(image, turn, middle - turn @ middle, order=1), turn.T, middle - turn.T @ middle


@pytest.mark.parametrize("side", ["fixed", "moving"])
@pytest.mark.parametrize("size", [pytest.param((44, 40, 48), marks=pytest.mark.slow), (90, 96)])
def test_blank_corners_of_a_resampled_volume_do_not_count(size, side):
    """They cut the anatomy, and are none: with them, the affine part misses by many times as much."""
    image = 100 * (0.3 + smooth_noise(size)[0, 0].numpy())
    turned, turn, shift = resampled(image, 11.0)
    pair = (turned, image) if side == "fixed" else (image, turned)
    if side == "fixed":
        turn, shift = turn.T, -turn.T @ shift
    points = np.stack(np.meshgrid(*(np.arange(8, n - 8) for n in size), indexing="ij")).reshape(len(size), -1)

    def missed(**masks):
        found = quietly(register, *((each, np.eye(4)) for each in pair), refine=0, device="cpu", **masks)
        there = found.field[(slice(None), *points)] + points
        return np.linalg.norm(there - turn @ points - shift[:, None], axis=0).mean(), found

    miss, found = missed()
    assert any("blank corners" in sentence for sentence in found.warnings)
    assert getattr(found, side).mask is not None and found.verdict == "ok", found.reason
    assert side == "fixed" or 0.8 < found.overlap_percent / 100 / (turned > 0).mean() < 1.0
    shifted = np.eye(4)
    shifted[:len(size), 3] = -12.0
    padded = quietly(register, *((np.pad(each, 12), shifted) if each is turned else (each, np.eye(4)) for each in pair),
                     refine=0, device="cpu")
    assert padded.similarity == pytest.approx(found.similarity, abs=0.02)
    assert padded.overlap_percent == pytest.approx(found.overlap_percent, abs=2)
    assert miss < 0.05 and miss < 0.2 * missed(fixed_mask=np.ones(size))[0]


def test_only_planes_that_cut_what_a_volume_shows_bound_it():
    def corners(image):
        return blank_corners(read_sides((np.float32(image), np.eye(4)), (noise, np.eye(4)), False)[0], config())

    noise = smooth_noise((40, 44, 36))[0, 0].numpy() + 0.2
    whole, brain, _ = head(3)
    turned = resampled(noise, 12.0)[0]
    assert np.array_equal(corners(turned), turned == 0)
    assert corners(noise) is corners(whole) is corners(brain) is corners(noise[:, :, :6]) is None
    assert corners(resampled(0.01 + head(4)[0], 8.0)[0]) is None, "only the air around the head is cut"
    assert corners(np.pad(noise, ((0, 0), (5, 9), (0, 0)))) is None, "padding"
    padded = corners(np.pad(turned, ((0, 0), (0, 9), (0, 0))))
    assert np.array_equal(padded[:, :44], turned == 0) and not padded[:, 44:].any()


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["bar", "trunk"])
def test_air_with_flat_sides_counts_as_before(shown):
    """Nothing is shown there by the other volume, so it is no corner of a resampled one: no mask, and no change."""
    pair = []
    for seed, (length, depth) in enumerate(((26, 18), (30, 20))):
        across, along = np.meshgrid(np.arange(68) - 33.5, np.arange(76) - 37.5, indexing="ij")
        across, along = 0.96 * across - 0.28 * along, 0.28 * across + 0.96 * along
        power = {"bar": 40, "trunk": 8}[shown]
        inside = (across / depth) ** power + (along / length) ** power < 1
        pair.append(inside[..., None] * (0.8 + 0.2 * smooth_noise((68, 76, 24), seed)[0, 0].numpy()))
    fixed, moving = read_sides(*((image, np.eye(4)) for image in pair), False)
    assert any(blank_corners(side, config()) is not None for side in (fixed, moving))
    found = quietly(register, fixed, moving, refine=10, device="cpu")
    inside, wanted = found.warped > 0.5, pair[0] > 0.5
    assert 2 * (inside & wanted).sum() / (inside.sum() + wanted.sum()) > 0.97
    assert found.fixed.mask is found.moving.mask is None


def quietly(function, *given, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(*given, **options)


def head(seed, size=(40, 44, 36)):
    """A made-up head in noisy air, the same without scalp and air, and its labels; (*size) each."""
    subject = make_subject(seed, size)
    brain = ndimage.binary_fill_holes(ndimage.binary_opening(subject["image"] > 0.15))
    far = ndimage.distance_transform_edt(~brain)
    air = 0.01 * np.random.default_rng(seed).random(size)
    whole = np.where(brain, subject["image"], 0.9 * ((far > 2) & (far < 5))) + air
    return whole, np.where(brain, subject["image"], 0), subject["label"]


@pytest.mark.slow
def test_two_volumes_alike_and_parts_have_no_mask_of_their_own():
    """Nor two stripped volumes of one content that a rigid map leaves at different sizes, nor half of a head."""
    def side(*pair):
        return outlined_side(*read_sides(*pair[:2], False), (*pair[2:], "affine")[0], config())

    (whole, brain, _), (other, other_brain, _) = head(3), head(4)
    assert side(whole, other) == side(brain, other_brain) == ""
    assert side(brain, other) == side(brain, other, "rigid") == "fixed"
    small, body = (ndimage.zoom(np.pad(brain, pad), 44 / (44 + 2 * pad), order=1) for pad in (10, 0))
    assert side(body, small) == "moving" and side(body, small, "rigid") == "" and side(brain, other, False) == ""
    found = quietly(register, body, small, affine="affine", refine=2, device="cpu")
    assert found.moving.mask is None, "they fit as a whole"
    # Interpolation leaves ripples around it.
    rippled = ndimage.shift(brain, 0.5, order=3)
    assert np.count_nonzero(rippled == 0) < 0.2 * rippled.size and side(rippled, other) == "fixed"
    half = np.where(whole > 0.02, whole, 0)[:, :20]
    assert side(other, half) == side(half, other) == ""


@pytest.mark.slow
@pytest.mark.parametrize("stripped", ["fixed", "moving"])
def test_one_skull_stripped_volume_counts_only_where_it_shows_something(stripped, tmp_path):
    """Its outline is not matched to that of the whole head, as it is with a mask that switches this off."""
    (fixed, moving), labels = zip(*((each[:2], each[2]) for each in (head(3), head(4))))
    pair, affine = (fixed[stripped == "fixed"], moving[stripped == "moving"]), np.diag([4.0, 4, 4, 1])

    def registered(**masks):
        found = quietly(register, *((image, affine) for image in pair), refine=10, device="cpu", **masks)
        warped = apply_label(labels[1], affine, found.field, affine, "nearest")
        return found, average(dice(warped, labels[0], range(1, 7)))

    found, overlap = registered()
    assert [side for side in ("fixed", "moving") if getattr(found, side).mask is not None] == [stripped]
    assert any("skull-stripped" in sentence for sentence in found.warnings)
    assert overlap > 0.8 and found.verdict == ("doubtful" if stripped == "moving" else "ok"), found.reason
    if stripped == "fixed":  # for the other side too the overlap would be below 0.8, but that takes long
        assert overlap > registered(fixed_mask=np.ones(pair[0].shape))[1] + 0.15
    for image, name in zip(pair, ("fixed", "moving")):
        write_volume(tmp_path / f"{name}.nii.gz", image, affine)
    write_field(tmp_path / "zero.nii.gz", np.zeros((3, *pair[0].shape), np.float32), affine)
    paths = [tmp_path / f"{name}.nii.gz" for name in ("zero", "fixed", "moving")]
    again = quietly(register_from, *paths, refine=10, affine="affine", device="cpu")
    assert getattr(again, stripped).mask is not None and again.similarity == pytest.approx(found.similarity, abs=0.1)


def test_a_mask_too_thin_to_count_is_one_sentence():
    """On the isotropic grid no voxel lies wholly within one thick slice: nothing moved, without a word."""
    volume, thin = (make_subject(7, SIZE)["image"], np.diag([0.5, 0.5, 3.7, 1])), np.zeros(SIZE)
    thin[:, :, 14] = 1
    with pytest.raises(InputError, match="fixed: no voxel of the grid .* lies wholly in its mask"):
        register(volume, volume, affine=False, refine=1, fixed_mask=thin)
    with pytest.raises(InputError, match="the fixed volume shows something in a single plane only .* a thicker one"):
        register(volume, volume, refine=1, fixed_mask=thin)
    with pytest.raises(InputError, match="fixed: it has one intensity, 0, in all voxels of its mask"):
        register(volume, volume, refine=1, fixed_mask=volume[0] == 0)


def test_masks_that_do_not_fit_are_one_sentence():
    volume = (make_subject(7, SIZE)["image"], SPACING_MM)
    for mask, words in ((np.zeros(SIZE), "nowhere above 0"), (np.ones((3, 4, 5)), "on another grid"),
                        (np.full(SIZE, np.nan), "mask of fixed: .* voxels are NaN or infinite"),
                        (nibabel.Nifti1Image(np.zeros(SIZE, COLOUR), SPACING_MM), "must be one real number")):
        with pytest.raises(InputError, match=words):
            register(volume, volume, refine=1, fixed_mask=mask, config=config())
    with pytest.raises(InputError, match=f"similarity must be {', '.join(SIMILARITIES)}, not 'nmi'"):
        register(volume, volume, refine=1, similarity="nmi", config=config())


def test_the_program_takes_masks_and_modalities(tmp_path):
    fixed, moving = (make_subject(seed, SIZE)["image"] for seed in (7, 8))
    image, mask = lesioned(fixed)
    for name, array in (("fixed", image), ("moving", other_contrast(moving)), ("mask", mask),
                        ("small", mask[2:])):
        write_volume(tmp_path / f"{name}.nii.gz", array.astype(np.float32), SPACING_MM)
    (tmp_path / "pairs.json").write_text(json.dumps([
        {"name": "a", "fixed": "fixed.nii.gz", "moving": "moving.nii.gz", "fixed_mask": "mask.nii.gz"},
        {"name": "b", "fixed": "fixed.nii.gz", "moving": "moving.nii.gz", "moving_mask": "small.nii.gz"}]))
    options = ["--affine", "none", "--refine", "2", "--similarity", "mapped", "--no-picture", "--device", "cpu"]
    assert om_register(["--pairs", str(tmp_path / "pairs.json"), "--out", str(tmp_path / "out"), *options]) == 43
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    row, = results["pairs"]
    assert row["fixed_mask"] == str(tmp_path / "mask.nii.gz") and "fixed_mask" in row["source"]
    assert results["failed"][0]["name"] == "b" and "on another grid" in results["failed"][0]["reason"]
    assert results["settings"]["similarity"] == "mapped"
    one = ["--fixed", str(tmp_path / "fixed.nii.gz"), "--moving", str(tmp_path / "moving.nii.gz")]
    assert om_register([*one, "--fixed-mask", str(tmp_path / "mask.nii.gz"), "--out", str(tmp_path / "one"),
                        *options]) == 0
    single = json.loads((tmp_path / "one" / "results.json").read_text())["pairs"][0]
    assert single["similarity"] == pytest.approx(row["similarity"], abs=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Channels
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["correlation", "mapped", "mind"])
def test_the_similarity_of_channels_is_the_mean_of_theirs(kind):
    cfg = config(registration__similarity=kind, registration__scales=2)
    images, targets = (torch.cat([smooth_noise((20, 22, 18), seed + shift) for seed in (0, 1)], dim=1)
                       for shift in (0, 5))
    weight = smooth_noise((20, 22, 18), seed=9)
    for counts in (None, weight):
        together = float(image_similarity(images, targets, cfg, counts))
        each = [float(image_similarity(images[:, c:c + 1], targets[:, c:c + 1], cfg, counts)) for c in (0, 1)]
        assert together == pytest.approx(sum(each) / 2, abs=1e-5)


def test_a_second_channel_shows_what_the_first_does_not():
    """The first channel is a flat ball that has no inside; what moves inside of it shows only in the second."""
    moving, fixed, true = known_pair(3)
    seen = ((moving - fixed).abs() > 0.05)[0, 0]
    balls = [(image > 0.02).float() * 0.5 for image in (moving, fixed)]
    cfg = config(refine__levels=2)
    errors = [float((refined(torch.cat(first, 1), torch.cat(second, 1), None, 40, cfg) - true)
                    .square().sum(1).sqrt()[0][seen].mean())
              for first, second in ((balls[:1], balls[1:]), ((balls[0], moving), (balls[1], fixed)))]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.slow
def test_the_program_takes_channels_and_warps_them(tmp_path):
    fixed, moving = (make_subject(seed, SIZE)["image"] for seed in (7, 8))
    for name, array in (("f", fixed), ("m", moving), ("f2", other_contrast(fixed)), ("m2", other_contrast(moving)),
                        ("small", moving[2:])):
        write_volume(tmp_path / f"{name}.nii.gz", array.astype(np.float32), SPACING_MM)
    path = {name: str(tmp_path / f"{name}.nii.gz") for name in ("f", "m", "f2", "m2", "small")}
    options = ["--fixed", path["f"], "--moving", path["m"], "--fixed-channels", path["f2"], "--affine", "none",
               "--refine", "4", "--no-picture", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert om_register([*options, "--moving-channels", path["m2"]]) == 0
    field, affine = read_field(tmp_path / "out/field.nii.gz")
    warped, _ = read_volume(tmp_path / "out/warped_channel_2.nii.gz")
    np.testing.assert_allclose(warped, apply_field(*read_volume(path["m2"]), field, affine), atol=1e-4)
    row, = json.loads((tmp_path / "out/results.json").read_text())["pairs"]
    assert "warped_channel_2.nii.gz" in row["files"] and row["moving_channel_2"] == path["m2"]
    alone = register(path["f"], path["m"], affine=False, refine=4)
    assert not np.array_equal(alone.field, register(path["f"], path["m"], refine=4, fixed_channels=[path["f2"]],
                                                       moving_channels=[path["m2"]], affine=False).field)
    assert om_register(options) == 43 and om_register([*options, "--moving-channels", path["small"]]) == 43
    again, = json.loads((tmp_path / "out/results.json").read_text())["failed"]
    assert "on another grid" in again["reason"]


@pytest.mark.parametrize("beyond", ["alike by index", "noise"])
def test_what_masks_exclude_does_not_choose_the_start(beyond):
    rng = np.random.default_rng(0)
    one, other, third = (ndimage.gaussian_filter(rng.random((24, 24, 24)), 1.2) for _ in range(3))
    fixed, moving, mask = one.copy(), np.concatenate([one[4:], third[:4]]), np.zeros(one.shape)
    mask[:, :, :9] = 1
    for each in (fixed, moving):
        each[:, :, 9:] = other[:, :, 9:] if beyond == "alike by index" else rng.random(other[:, :, 9:].shape) / 2
    moving_affine = np.eye(4) + 4 * np.eye(4, k=3) * np.eye(4)[0][:, None]
    found = register((fixed, np.eye(4)), (moving, moving_affine), affine=False, refine=False, device="cpu",
                     fixed_mask=mask, moving_mask=mask)
    assert found.start == "header"
