"""Registration as a dictionary transform; that of the random deformations is in tests/test_om_augment.py."""
import numpy as np
import pytest
import torch

from Dataloader.nifti import read_volume, write_volume
from Dataloader.synthetic import make_subject
from Diffusion.networks import build_network
from Inference.load_model import load_model
from Inference.monai_transforms import Registerd
from Inference.registration import apply_field, register
from Runtime import checkpoint
from Runtime.errors import InputError
from tests.test_nifti import make_affine
from tests.tiny import config

FIXED = ((16, 18, 14), make_affine(spacing=(1.1, 0.9, 1.3), degrees=(4, 0, 5)))
MOVING = ((18, 15, 17), make_affine((1, 0, 2), (-1, 1, -1), (1.0, 1.1, 0.9), (5, -7, 3)))


@pytest.fixture(scope="module")
def sample():
    """A dictionary of two subjects on two grids, centred on each other, and what `register` finds for them."""
    data = {}
    for seed, (name, (shape, affine)) in enumerate((("fixed", FIXED), ("moving", MOVING))):
        subject, affine = make_subject(seed, shape), affine.copy()
        affine[:3, 3] = -affine[:3, :3] @ (np.subtract(shape, 1) / 2)
        data[name] = np.stack([subject["image"], 1 - subject["image"]]).astype(np.float32)
        data[f"{name}_label"] = subject["label"][None].astype(np.uint8)
        for key in (name, f"{name}_label"):
            data[f"{key}_meta_dict"] = {"affine": affine, "patient": seed}
    found = register((data["fixed"][0], data["fixed_meta_dict"]["affine"]),
                     (data["moving"][0], data["moving_meta_dict"]["affine"]), affine=False, refine=3)
    return data, found


def transform(**options):
    return Registerd("fixed", "moving", ["moving", "moving_label"], ["bilinear", "nearest"], affine=False, refine=3,
                     field_key="field", **options)


def test_all_entries_come_onto_the_fixed_grid(sample):
    data, found = sample
    before = {key: value.copy() for key, value in data.items() if isinstance(value, np.ndarray)}
    result = transform()(data)
    affines = [data[f"{name}_meta_dict"]["affine"] for name in ("moving", "fixed")]
    np.testing.assert_array_equal(result["field"], found.field)
    assert result["moving"].shape == (2, *FIXED[0]) and result["moving"].dtype == np.float32
    for channel in range(2):
        expected = apply_field(data["moving"][channel], affines[0], found.field, affines[1])
        np.testing.assert_array_equal(result["moving"][channel], expected)
    label = apply_field(data["moving_label"][0], affines[0], found.field, affines[1], order=0)
    assert np.array_equal(result["moving_label"][0], label) and result["moving_label"].dtype == np.uint8 and label.any()
    meta = result["moving_label_meta_dict"]
    assert np.array_equal(meta["affine"], affines[1]) and meta["patient"] == 1
    assert tuple(meta["spatial_shape"]) == FIXED[0]
    assert result["fixed"] is data["fixed"]
    assert all(np.array_equal(data[key], value) for key, value in before.items()), "the one given stays as it is"


def test_tensors_stay_tensors_of_their_type(sample):
    data, found = sample
    tensors = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in data.items()}
    del tensors["moving_label_meta_dict"]  # it lies on the grid of the moving volume then
    result = transform()(tensors)
    assert result["moving"].dtype == torch.float32 and result["moving_label"].dtype == torch.uint8
    np.testing.assert_array_equal(result["moving"][0].numpy(), found.warped)
    np.testing.assert_array_equal(result["moving_label"], transform()(data)["moving_label"])


def test_the_moving_volume_alone(sample):
    data, found = sample
    result = Registerd("fixed", "moving", affine=False, refine=3)(data)
    np.testing.assert_array_equal(result["moving"][0], found.warped)
    assert result["moving_label"] is data["moving_label"] and set(result) == set(data)


@pytest.mark.parametrize("words, changes, sentence", [
    ({"keys": ["moving", "other"]}, {}, "other: no such entry"),
    ({"mode": "cubic"}, {}, "give bilinear, smooth, nearest"),
    ({"keys": ["moving", "moving_label"]}, {"moving_label": np.zeros((1, 3, 4, 5))}, "is not that of moving"),
    ({"keys": ["moving", "moving_label"]}, {"moving_label_meta_dict": {"affine": FIXED[1]}},
     "moving_label: its affine is not that of moving"),
    ({}, {"fixed": np.eye(16, 18)[None, ..., None]}, "fixed: shape .16, 18, 1. is one plane of 3D, and not a 2D"),
    ({}, {"fixed": np.zeros((1, 8, 8, 8))}, "fixed: every voxel is 0"),
    ({}, {"fixed": "F.nii.gz"}, "the entry fixed: str is not a volume; load it first .LoadImaged."),
    ({}, {"moving": np.zeros((1, 1, 8, 8, 8))}, "moving: shape .* is neither .*; put the channels first")])
def test_what_cannot_be_used_is_one_sentence(sample, words, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        Registerd("fixed", "moving", affine=False, refine=1, **words)({**sample[0], **changes})


def test_a_volume_without_an_axis_for_its_channels_is_told(sample):
    flat = {key: sample[0][key][0] for key in ("fixed", "moving")}
    with pytest.warns(UserWarning, match="fixed: shape .16, 18, 16. is taken for 16 channels of a 2D image"):
        Registerd("fixed", "moving", affine=False, refine=0)({"fixed": np.pad(flat["fixed"], ((0, 0), (0, 0), (0, 2))),
                                                               "moving": flat["moving"]})


def test_the_path_of_a_network_of_several_channels_is_enough(sample, tmp_path):
    cfg = config(data__channels=2)
    torch.save({**dict.fromkeys(checkpoint.REQUIRED), "format": checkpoint.FORMAT, "config": cfg,
                "model": build_network(cfg, "cpu").state_dict()}, tmp_path / "two.pth")
    by_path, loaded = (Registerd("fixed", "moving", model=model, refine=0, affine=False)(sample[0])["moving"]
                       for model in (tmp_path / "two.pth", load_model(tmp_path / "two.pth")))
    np.testing.assert_array_equal(by_path, loaded)


def test_absent_keys_where_they_are_allowed(sample):
    words = {"keys": ["moving", "other"], "mode": "nearest", "allow_missing_keys": True, "affine": False,
             "refine": 1}
    result = Registerd("fixed", "moving", **words)(sample[0])
    assert "other" not in result and result["moving"].shape == (2, *FIXED[0])


def test_inside_monai(sample):
    monai = pytest.importorskip("monai")
    from monai.transforms import Compose, EnsureTyped
    data, found = sample
    metas = {key: monai.data.MetaTensor(torch.from_numpy(value), affine=torch.from_numpy(data[f"{key}_meta_dict"][
        "affine"]), meta={"patient": data[f"{key}_meta_dict"]["patient"]}) for key, value in data.items()
        if isinstance(value, np.ndarray)}
    result = Compose([EnsureTyped(list(metas)), transform()])(metas)
    assert isinstance(result["moving"], monai.data.MetaTensor) and result["moving"].meta["patient"] == 1
    np.testing.assert_array_equal(result["moving"][0].numpy(), found.warped)
    np.testing.assert_allclose(result["moving_label"].affine.numpy(), data["fixed_meta_dict"]["affine"])
    assert result["moving_label"].meta["affine"] is not None and result["moving_label"].dtype == torch.uint8
    cached = monai.data.CacheDataset([metas], Compose([EnsureTyped(list(metas)), transform()]), progress=False)
    assert cached[0] is cached[0], "registered once, not in each epoch"


@pytest.mark.parametrize("steps", [0, 1])
def test_monai_saves_it_on_the_grid_of_the_fixed_file(sample, tmp_path, steps):
    pytest.importorskip("monai")
    from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, SaveImaged, Spacingd
    both, data = ["fixed", "moving"], sample[0]
    for key in both:
        write_volume(tmp_path / f"{key}.nii.gz", data[key][0], data[f"{key}_meta_dict"]["affine"])
    Compose([LoadImaged(both), EnsureChannelFirstd(both), *[Spacingd(both, (2, 2, 2))] * steps,
             Registerd(*both, affine=False, refine=0),
             SaveImaged("moving", output_dir=tmp_path, output_postfix="registered", separate_folder=False,
                        resample=True, print_log=False)])({key: tmp_path / f"{key}.nii.gz" for key in both})
    saved, affine = read_volume(tmp_path / "moving_registered.nii.gz")
    assert saved.shape == FIXED[0]
    np.testing.assert_allclose(affine, data["fixed_meta_dict"]["affine"], atol=1e-4)
