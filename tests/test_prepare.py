"""One volume onto the training grid, and into a part of the cache."""
import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch

import OM_prepare
from Dataloader import cache
from Dataloader.dataset import as_float
from Dataloader.grids import SAME_GRID, air_for_filler, plane_normal, require_same_grid, same_grid
from Dataloader.nifti import write_volume
from Dataloader.prepare import on_grid, scaled
from Dataloader.synthetic import make_subject
from Runtime.errors import InputError
from tests.test_nifti import OBLIQUE, make_affine, to_itk
from tests.tiny import config

WAVES = np.array([[0.11, 0.05, -0.07], [-0.04, 0.12, 0.06], [0.03, -0.08, 0.1]])  # radians per mm
LOW, HIGH = -1000.0, 2000.0
PLACES = [  # shape and affine of the file, size of the grid, its spacing in mm
    ((24, 30, 27), OBLIQUE, (26, 24, 28), 1.1),
    ((24, 30, 27), make_affine(signs=(-1, -1, 1), spacing=(0.8, 1.0, 1.9)), (22, 30, 40), 1.1),
    ((31, 18, 24), make_affine((1, 2, 0), (1, -1, 1), (1.3, 1, 0.9), (30, 5, -20)), (32, 32, 32), 1.2),
    ((40, 33), make_affine((1, 0, 2), (-1, 1, 1), (0.8, 1.4, 1)), (30, 38), 1.1),
    ((36, 28), make_affine((0, 2, 1), (1, -1, 1), (1.2, 0.9, 1), (0, 20, 0)), (40, 24), 1.0),
]
COPIES = [  # grids that are only a crop or a padding of the file
    ((20, 26, 31), make_affine((2, 0, 1), (-1, 1, -1), (1, 1, 1), (12, -8, 15)), (24, 24, 24), 1.0),
    ((20, 25, 31), make_affine((1, 2, 0), (1, -1, 1), (1.5, 1.5, 1.5)), (25, 31, 20), 1.5),
    ((20, 27, 31), make_affine(signs=(-1, -1, 1)), (16, 30, 31), 1.0),
    ((40, 33), make_affine((1, 0, 2), (-1, 1, 1)), (36, 36), 1.0),
]


def keys(size, spacing_mm=1.0, **changes):
    """The keys of a config on which a prepared volume depends."""
    known = {"model.dims": len(size), "data.name": "test", "data.root": "data", "data.img_size": list(size),
             "data.spacing_mm": spacing_mm, "data.channels": 1, "data.crop_above": 0.0, "data.percentiles": [0.5, 99.5],
             "data.window": [LOW, HIGH], "data.dtype": "float32"}
    return {**known, **{f"data.{key}": value for key, value in changes.items()}}


def world_size(shape, affine):
    """Positions of all voxels in mm, (3, *shape)."""
    index = np.indices(shape).reshape(len(shape), -1)
    return (affine[:3, :len(shape)] @ index + affine[:3, 3:]).reshape(3, *shape)


def wave(where):
    """A smooth function of the position, between LOW and HIGH."""
    return LOW + (HIGH - LOW) * (0.5 + np.cos(np.tensordot(WAVES, where, 1)).sum(0) / 6)


def bound(affine, step):
    """Greatest error of linear interpolation of `wave` between points `step` voxels of `affine` apart, per axis."""
    bends = (HIGH - LOW) / 6 * ((WAVES @ affine[:3, :len(step)]) ** 2).sum(0)
    return float((np.square(step) * bends / 8).sum())


def save(folder, image, affine, **others):
    """Write an image, and label and mask where given. Returns: the item, as a datalist has it."""
    item = {"id": "v_1", "subject": "v_1", "modality": "", "split": "", "label": None, "mask": None}
    for kind, array in {"image": image, **others}.items():
        item[kind] = folder / f"{kind}.nii.gz"
        write_volume(item[kind], array, affine)
    return item


def in_file(found, size, affine):
    """Where the voxels of the training grid are in the file, in its voxels: (N, *size). found: from `on_grid`."""
    dims, change = len(size), np.linalg.inv(affine) @ found["grid_affine"]
    return np.tensordot(change[:dims, :dims], np.indices(size), 1) + change[:dims, 3].reshape(-1, *[1] * dims)


@pytest.mark.parametrize("shape, affine, size, spacing_mm", PLACES)
def test_each_voxel_of_the_grid_has_what_is_at_its_place_within_the_error_of_one_interpolation(
        tmp_path, shape, affine, size, spacing_mm):
    where = world_size(shape, affine)
    centre = where.reshape(3, -1).mean(1).reshape(3, *[1] * len(shape))
    label = np.where(np.linalg.norm(where - centre, axis=0) < 8, 7, 0).astype(np.int16)
    found = on_grid(save(tmp_path, wave(where).astype(np.float32), affine, label=label), keys(size, spacing_mm))
    there = in_file(found, size, affine)
    sides = np.reshape(shape, (-1, *[1] * len(shape)))
    inner = ((there >= 0) & (there <= sides - 1)).all(0)
    outside = ((there <= -1) | (there >= sides)).any(0)
    assert inner.mean() > 0.2
    where = world_size(size, found["grid_affine"])
    wrong = np.abs(LOW + (HIGH - LOW) * found["image"].astype(np.float64) - wave(where))[inner].max()
    limit = bound(affine, [1] * len(shape))
    assert limit < 0.1 * (HIGH - LOW) and 1 < wrong < limit + 1e-3, "something was interpolated"
    assert not found["image"][outside].any() and not found["label"][outside].any()
    radius = np.linalg.norm(where - centre, axis=0)
    sure = inner & (np.abs(radius - 8) > np.linalg.norm(affine[:3, :3], axis=0).max() * 3 ** 0.5 / 2)
    assert np.array_equal(found["label"][sure], np.where(radius < 8, 7, 0)[sure]) and found["label"].any()


@pytest.mark.parametrize("shape, affine, size, spacing_mm", COPIES)
def test_a_crop_or_padding_is_exact(tmp_path, shape, affine, size, spacing_mm):
    rng = np.random.default_rng(0)
    image, label = rng.uniform(LOW, HIGH, shape).astype(np.float32), rng.integers(-3, 300, shape).astype(np.int16)
    found = on_grid(save(tmp_path, image, affine, label=label), keys(size, spacing_mm))
    index = np.rint(in_file(found, size, affine)).astype(int)
    there = ((index >= 0) & (index < np.reshape(shape, (-1, *[1] * len(shape))))).all(0)
    ours = LOW + (HIGH - LOW) * found["image"].astype(np.float64)
    assert np.abs(ours[there] - image[tuple(index[:, there])]).max() <= (HIGH - LOW) * (2.0 ** -24 + 2.0 ** -22)
    assert np.array_equal(found["label"][there], label[tuple(index[:, there])])
    assert not found["image"][~there].any() and not found["label"][~there].any()
    # The grid shows as many voxels of the file as fit along each axis of either.
    turned = np.abs(np.rint(np.linalg.inv(found["grid_affine"]) @ affine))[:len(size), :len(size)]
    assert there.sum() == np.prod(np.minimum(turned @ shape, size)) > 0.2 * image.size


@pytest.mark.parametrize("shape, affine, size, spacing_mm", PLACES[:3])
def test_the_grid_is_where_itk_says_it_is(tmp_path, shape, affine, size, spacing_mm):
    item = save(tmp_path, wave(world_size(shape, affine)).astype(np.float32), affine)
    found = on_grid(item, keys(size, spacing_mm))
    file = sitk.ReadImage(str(item["image"]))
    reference = to_itk(np.zeros(size, np.float32), found["grid_affine"])
    theirs = sitk.Resample(file, reference, sitk.Transform(), sitk.sitkLinear, np.nan)
    inner = np.isfinite(sitk.GetArrayFromImage(theirs).T)
    apart = np.abs(sitk.GetArrayFromImage(theirs).T - (LOW + (HIGH - LOW) * found["image"].astype(np.float64)))
    # ITK takes the outer half voxel from the edge, this grid fades to 0 there.
    ones = on_grid(save(tmp_path, 0.9995 * inside(shape), affine), keys(size, spacing_mm, window=[0, 1]))["image"]
    assert (inner & (ones > 0.999)).mean() > 0.1 and apart[inner & (ones > 0.999)].max() < 0.05


def inside(shape):
    """1 but for a border of 0."""
    array = np.zeros(shape, np.float32)
    array[tuple(slice(1, -1) for _ in shape)] = 1
    return array


def part(folder, items, cfg):
    """A part of a cache with these volumes: arrays by kind, and the record."""
    record = cache.write_group(folder, 3, items, cfg)
    return {name.split("_")[0]: np.load(folder / name) for name in record["files"]}, record


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("changes", [{"window": [-100.0, 300.0]}, {"window": [0, 0]},
                                     {"window": [0, 0], "percentiles": [5.0, 80.0]}])
def test_stored_intensities_are_those_of_the_window_or_the_percentiles_within_half_a_step(tmp_path, dtype, changes):
    image = np.random.default_rng(2).normal(0, 400, (16, 18, 20)).astype(np.float32)
    cfg = keys((16, 16, 16), **changes, dtype=dtype)
    arrays, record = part(tmp_path, [save(tmp_path, image, np.eye(4))], cfg)
    low, high = cfg["data.window"] if any(cfg["data.window"]) else np.percentile(image, cfg["data.percentiles"])
    expected = np.clip((image.astype(np.float64) - low) / (high - low), 0, 1)[:, 1:17, 2:18]
    stored = arrays["images"][0]
    assert stored.dtype == dtype and set(arrays) == {"images"}
    half_step = {"uint8": 0.5 / 255, "float16": 2.0 ** -12, "float32": 2.0 ** -24}[dtype]
    found = as_float(torch.from_numpy(stored)).numpy()
    assert np.abs(found - expected).max() <= half_step * 1.001
    assert found.min() == 0 and found.max() == 1


@pytest.mark.parametrize("values, dtype", [((0, 255), "uint8"), ((0, 256), "int16"), ((-3, 200), "int16"),
                                           ((0, 32767), "int16")])
def test_labels_take_one_byte_where_they_fit(tmp_path, values, dtype):
    label = np.random.default_rng(0).choice(values, (16, 16, 16)).astype(np.int16)
    image = np.random.default_rng(0).random(label.shape).astype(np.float32)
    item = save(tmp_path, image, np.eye(4), label=label)
    plain = {**item, "label": None, "id": "v_2"}
    arrays, record = part(tmp_path, [item, plain], keys((16, 16, 16)))
    assert arrays["labels"].dtype == dtype and np.array_equal(arrays["labels"][0], label)
    assert not arrays["labels"][1].any() and record["volumes"][1]["label"] is None


@pytest.mark.parametrize("axes", [3, 2])
def test_labels_beyond_the_grid_are_told(tmp_path, axes, capsys):
    image = np.random.default_rng(0).random((24,) * axes).astype(np.float32)
    label = np.zeros(image.shape, np.uint8)
    label[2:14, 4:20] = 1  # of a grid of 16 voxels in the middle, 4 to 20
    item = save(tmp_path, image, np.diag([2.0, 1.5, 1.5, 1.0]), label=label)
    for size, spacing_mm, told in ((16, 1.5, True), (40, 1.5, False), (16, 0.0, False)):
        cfg = {**keys((size,) * axes, spacing_mm), "model.dims": axes}
        OM_prepare.warn_of_cut_labels({0: part(tmp_path, [item], cfg)[1]})
        assert ("1 volumes have labels beyond the training grid, v_1 " in capsys.readouterr().err) == told


def test_label_maps_of_background_alone_are_told(tmp_path, capsys):
    image = np.random.default_rng(0).random((24, 24, 24)).astype(np.float32)
    item = save(tmp_path, image, np.eye(4), label=np.zeros(image.shape, np.uint8))
    plain = {**item, "label": None, "id": "v_2"}
    record = part(tmp_path, [item, plain], keys((16,) * 3))[1]
    OM_prepare.warn_of_cut_labels({0: record})
    assert "the label maps of all 1 volumes that have one, such as v_1, hold only background" in capsys.readouterr().err
    del record["volumes"][0]["label_kept"]  # as in caches before 1.4
    OM_prepare.warn_of_cut_labels({0: record})
    assert not capsys.readouterr().err
    OM_prepare.warn_of_cut_labels({0: part(tmp_path, [plain], keys((16,) * 3))[1]})
    assert not capsys.readouterr().err


def test_a_mask_beyond_the_grid_or_empty_is_told(tmp_path, capsys):
    image, mask = np.random.default_rng(0).random((24, 24, 24)).astype(np.float32), np.zeros((24, 24, 24), np.uint8)
    mask[:2, :2, :2] = 1
    item = save(tmp_path, image, np.eye(4), mask=mask)
    for size, told in ((16, True), (24, False)):
        OM_prepare.warn_of_cut_labels({0: part(tmp_path, [item], keys((size,) * 3))[1]})
        assert ("1 volumes, such as v_1, have nothing of their mask" in capsys.readouterr().err) == told
    write_volume(item["mask"], 0 * mask, np.eye(4))
    OM_prepare.warn_of_cut_labels({0: part(tmp_path, [item], keys((24, 24, 24)))[1]})
    assert "1 volumes, such as v_1, have nothing of their mask" in capsys.readouterr().err


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spacing_mm", [1.0, 0.0])
def test_the_grid_is_centred_on_the_foreground_or_on_the_mask(tmp_path, masked, spacing_mm):
    affine = make_affine((2, 0, 1), (-1, 1, -1))
    image, mask = np.zeros((2, 40, 44, 48), np.float32)
    image[4:14, 6:16, 20:30] = 800.5
    image[30, 30, 30] = 90  # below the threshold: is seen where the grid reaches, but not centred on
    mask[20:32, 24:36, 28:40] = 1
    cfg = keys((16, 16, 16), spacing_mm, crop_above=0.2, window=[0.0, 1000.0])
    item = save(tmp_path, image, affine, **({"mask": mask.astype(np.uint8)} if masked else {}))
    found = on_grid(item, cfg)
    box = ([20, 24, 28], [31, 35, 39]) if masked else ([4, 6, 20], [13, 15, 29])
    centre = affine @ [*np.mean(box, 0), 1]
    step = np.linalg.norm(found["grid_affine"][:3, :3], axis=0)
    apart = np.linalg.inv(found["grid_affine"]) @ centre - [7.5, 7.5, 7.5, 1]
    assert np.abs(apart).max() <= 0.5 + 1e-6
    side = box[1][0] - box[0][0] + 1
    assert step == pytest.approx([spacing_mm or side / 16] * 3)
    assert (found["mask"] is not None) == masked
    if spacing_mm:
        kept, index = 1000 * found["image"], np.rint(in_file(found, (16, 16, 16), affine)).astype(int)
        first = [np.ceil(c - 7.5 - 0.5) for c in np.mean(box, 0)]
        assert np.abs(index.reshape(3, -1).min(1) - first).max() <= 1
        np.testing.assert_allclose(kept, image[tuple(index)], atol=1e-3)
        assert masked == bool((np.abs(kept - 90) < 1e-3).any()), "what is around the box stays"


def test_an_empty_mask_or_foreground_is_the_whole_volume(tmp_path):
    image = np.random.default_rng(0).random((20, 20, 20)).astype(np.float32)
    item = save(tmp_path, image, np.eye(4), mask=np.zeros((20, 20, 20), np.uint8))
    whole = on_grid({**item, "mask": None}, keys((16, 16, 16), window=[0, 1]))
    for other in (item, {**item, "mask": None}):
        found = on_grid(other, keys((16, 16, 16), crop_above=1.0, window=[0, 1]))
        assert np.array_equal(found["image"], whole["image"])


def test_a_soft_mask_counts_wherever_it_is_above_zero(tmp_path):
    image = np.random.default_rng(0).random((16, 18, 20)).astype(np.float32)
    mask = np.maximum(image - 0.4, 0)
    arrays, _ = part(tmp_path, [save(tmp_path, image, np.eye(4), mask=mask)], keys((16, 18, 20), window=[0, 1]))
    assert arrays["masks"].dtype == np.uint8 and np.array_equal(arrays["masks"][0], mask > 0)


def test_a_2d_label_on_another_grid_is_refused_with_the_doubts_about_its_header(tmp_path):
    image = np.random.default_rng(0).random((20, 22)).astype(np.float32)
    paths = [tmp_path / name for name in ("image.nii.gz", "label.nii.gz")]
    for path, array, shift in zip(paths, (200 * image, image > 0.5), (0, 5)):
        nibabel.save(nibabel.Nifti1Image(array.astype(np.uint8), np.eye(4) + shift * np.eye(4, k=3)), path)
    item = {"id": "v_1", "image": paths[0], "label": paths[1], "mask": None, "channels": []}
    with pytest.raises(InputError, match="label.nii.gz: the label of .*is on another grid .*headers is wrong"):
        on_grid(item, {**keys((16, 16)), "model.dims": 2})


def test_a_label_may_differ_by_rounding_of_its_affine_and_no_more(tmp_path):
    image = np.random.default_rng(0).random((20, 22, 24)).astype(np.float32)
    item = save(tmp_path, image, OBLIQUE, label=(image > 0.5).astype(np.uint8))
    near, far = OBLIQUE.copy(), OBLIQUE.copy()
    near[:3, 3] += 0.05
    far[:3, 3] += 0.3
    write_volume(item["label"], (image > 0.5).astype(np.uint8), near)
    assert on_grid(item, keys((16, 16, 16), 1.2))["label"].any()
    write_volume(item["label"], (image > 0.5).astype(np.uint8), far)
    with pytest.raises(InputError, match="label.nii.gz: the label of .*image.nii.gz is on another grid .*fits the "
                                         "image voxel by voxel, one of the two headers is wrong.*order=0\\)\\.$"):
        on_grid(item, keys((16, 16, 16), 1.2))
    header = nibabel.load(item["image"])
    header.set_qform(far + np.eye(4, k=3) * 9)
    nibabel.save(header, item["image"])
    with pytest.raises(InputError, match="headers is wrong.*image.nii.gz: its sform and qform differ by up to 9"):
        on_grid(item, keys((16, 16, 16), 1.2))
    write_volume(item["label"], (image > 0.5)[:-1].astype(np.uint8), OBLIQUE)
    with pytest.raises(InputError, match=r"another grid .*\(19, 22, 24\) and \(20, 22, 24\)"):
        on_grid(item, keys((16, 16, 16), 1.2))


def test_a_segmentation_is_no_image(tmp_path):
    """Listed as an image by mistake: half of a cache once consisted of label maps."""
    label = make_subject(3, (20, 22, 18))["label"]
    item = save(tmp_path, label.astype(np.int16), np.eye(4))
    with pytest.raises(InputError, match="few whole numbers in large patches, so it is a segmentation"):
        on_grid(item, keys((16, 16, 16)))


def test_a_volume_of_one_intensity_on_the_grid_is_refused(tmp_path):
    bright = np.random.default_rng(0).uniform(5000, 6000, (16, 18, 20)).astype(np.float32)
    with pytest.raises(InputError, match="image.nii.gz: all of it is one intensity on the training grid; check its"):
        on_grid(save(tmp_path, bright, np.eye(4)), keys((16, 16, 16), window=[0, 1000]))


def test_a_page_that_cannot_be_written_blames_the_folder_of_logs(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    image = make_subject(0, 8)["image"]
    monkeypatch.setattr("Report.page.write_page", full)
    monkeypatch.setattr(OM_prepare, "sample_of", lambda *arguments: [("one", image, None)])
    volumes = [{"subject": "one", "label": False}]
    with pytest.raises(InputError, match="run.logs .*: the page of the cache cannot be written there .*No space left"):
        OM_prepare.write_report(tmp_path, volumes, [], config(tmp_path), 1)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_page_tells_the_sides_of_a_patient_only_in_3d(tmp_path, monkeypatch, dims):
    """The axes of an image may run anywhere."""
    image = make_subject(0, (8,) * dims, dims=dims)["image"]
    monkeypatch.setattr(OM_prepare, "sample_of", lambda *arguments: [("one", image, None)])
    cfg = config(tmp_path, **{"model.dims": dims, "run.logs": str(tmp_path)})
    page = OM_prepare.write_report(tmp_path, [{"subject": "one", "label": False}], [], cfg, 1)
    assert ("right is on the left" in page.read_text()) == (dims == 3)


@pytest.mark.parametrize("shape", [(20, 22, 24), (20, 22)])
def test_grids_are_the_same_up_to_rounding(shape):
    def moved(voxels):
        affine = OBLIQUE.copy()
        affine[:3, 3] += voxels * OBLIQUE[:3, 0]
        return affine

    assert same_grid(shape, OBLIQUE, list(shape), OBLIQUE.astype(np.float32))
    assert same_grid(shape, OBLIQUE, shape, moved(0.9 * SAME_GRID))
    assert not same_grid(shape, OBLIQUE, shape, moved(1.1 * SAME_GRID))
    assert not same_grid(shape, OBLIQUE, shape[::-1], OBLIQUE)
    turned = OBLIQUE.copy()
    turned[:, 0] *= 1.01
    assert not same_grid(shape, OBLIQUE, shape, turned)


@pytest.mark.parametrize("mm, thicknesses, same", [
    (0, (1, 40), True), (0.4, (1, 1), True), (0.6, (1, 1), False), (-5, (5, 5), False), (2.4, (5, 1), True)])
def test_slices_of_one_grid_lie_in_one_plane(mm, thicknesses, same):
    one, other = (make_affine((0, 2, 1), spacing=(0.9, 1.2, each), degrees=(10, 20, 30)) for each in thicknesses)
    other[:3, 3] += mm * plane_normal(one)
    for pair in ((one, other), (other, one)):
        grids = (20, 22), pair[0], (20, 22), pair[1]
        assert same_grid(*grids) == same and same_grid(*grids, across=False)
    if not same:
        with pytest.raises(InputError, match=f"l.nii is on another grid .*origins.*, {abs(mm):g} mm apart"):
            require_same_grid("l.nii", (20, 22), one, "its image", (20, 22), other, "resample it")


def test_a_slice_of_a_program_that_drops_its_plane_fits():
    """ITK reads a 2D NIfTI file without its plane, and writes what it makes of it at 0."""
    there = np.diag([-0.8, -0.8, 5, 1])
    there[:3, 3] = 30, 40, 37.3
    flat = np.eye(4)
    flat[:2] = there[:2]
    assert same_grid((30, 26), there, (30, 26), flat) and same_grid((30, 26), flat, (30, 26), there)


def test_filler_of_a_ct_is_air():
    array = np.linspace(-1000, 800, 1000, dtype=np.float32).reshape(10, 10, 10)
    filled = np.where(np.arange(10) < 2, np.float32(-3024), array)
    image, limits = scaled(filled, config())
    assert limits[0] >= -1024 and image[..., :2].max() == 0
    np.testing.assert_array_equal(image, scaled(np.maximum(filled, -1024), config())[0])
    assert scaled(array - 5000, config())[1][0] < -5000, "values that no filler explains stay"


def test_the_background_of_a_signed_image_is_no_filler():
    """Unsigned numbers that were shifted to int16: all tissue below -1024 became one value."""
    array = np.linspace(-30000, 12000, 1000, dtype=np.float32).reshape(10, 10, 10)
    signed = np.where(np.arange(10) < 5, np.float32(-32768), array)
    assert np.array_equal(air_for_filler(signed), signed)
    scan = np.where(np.arange(10) < 5, np.float32(-32768), np.maximum(array, -1000))
    scan[0, 0, 7] = -9000  # resampled: an edge between filler and tissue
    scan[:, :4, 7] = -2000  # another filler
    assert np.array_equal(air_for_filler(scan), np.maximum(scan, -1024))
