"""Volumes of several channels, data.channels: lists, files, cache, augmentation, networks, trainings and the tools."""
import itertools
import json

import nibabel
import numpy as np
import pytest
import torch

import OM_augment
import OM_register
import OM_train_3modes as om
from Dataloader import cache
from Dataloader.cache import open_cache
from Dataloader.datalist import list_single, read_datalist
from Dataloader.dataset import read_datasets
from Dataloader.nifti import read_channels, read_header, read_volume, write_volume
from Dataloader.prepare import on_grid
from Diffusion.batch_augment import augment
from Diffusion.diffuser import make_condition
from Diffusion.losses import image_similarity
from Diffusion.networks import NETWORKS, build_network
from Inference.augmentation import augment as deformed_copy
from Inference.load_model import load_model
from Inference.registration import register
from OM_prepare import sample_of
from Runtime.errors import InputError
from tests import tiny
from tests.tiny import QUICK, config, final_sha256, log_lines, make_data, run_prepare

pytestmark = pytest.mark.usefixtures("no_figures")
ROW = {"model__name": "om_net", **QUICK}
TWO = {**ROW, "data__channels": 2}


def second_channel(image):
    """Another view of the same anatomy: bright is dark, and the middle is the brightest."""
    return (100 - np.abs(image - np.median(image))).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder data with eight synthetic subjects, whose list names two files for each, T1 and T2."""
    folder = make_data(tmp_path_factory.mktemp("channels"))
    path = folder / "data/dataset.json"
    content = json.loads(path.read_text())
    for entry in content["training"]:
        array, affine = read_volume(folder / "data" / entry["image"])
        other = entry["image"].replace("imagesTr", "others")
        write_volume(folder / "data" / other, second_channel(array), affine)
        entry["image"] = [entry["image"], other]
    path.write_text(json.dumps(content))
    return folder


def options(data, folder, *more, **changes):
    return tiny.options(data, folder, *more, **{**TWO, **changes})


def files(folder, names, shape=(6, 7, 8)):
    """Random volumes with these names. Returns: their paths."""
    random = np.random.default_rng(0)
    for name in names:
        write_volume(folder / name, random.random(shape).astype(np.float32), np.diag([1.5, 1, 2, 1]))
    return [folder / name for name in names]


# ---------------------------------------------------------------------------------------------------------------------
# Lists and files
# ---------------------------------------------------------------------------------------------------------------------

def listed(folder, channels=2):
    return [(item["id"], item["image"].name, [path.name for path in item.get("channels", [])],
             item["label"] and item["label"].name) for item in read_datalist(folder, channels=channels)]


def test_a_json_list_names_the_channels_together(tmp_path):
    files(tmp_path, ["a.nii", "a_flair.nii", "b.nii", "b_flair.nii"])
    entries = [{"image": ["a.nii", "a_flair.nii"]}, {"image": ["./b.nii", "./b_flair.nii"], "label": "a.nii"}]
    (tmp_path / "dataset.json").write_text(json.dumps({"training": entries}))
    assert listed(tmp_path) == [("a", "a.nii", ["a_flair.nii"], None), ("b", "b.nii", ["b_flair.nii"], "a.nii")]


def test_a_csv_list_has_a_column_for_each(tmp_path, capsys):
    files(tmp_path, ["a.nii", "a2.nii", "a3.nii"])
    (tmp_path / "list.csv").write_text("image_3,image,image_2\na3.nii,a.nii,a2.nii\n")
    assert listed(tmp_path / "list.csv", 3) == [("a", "a.nii", ["a2.nii", "a3.nii"], None)]
    [item] = list_single(tmp_path / "list.csv")  # for programs that have no data.channels
    assert item["image"].name == "a.nii" and "only the first channel of each volume is used, such as a.nii" in (
        capsys.readouterr().err)
    (tmp_path / "list.csv").write_text("image,image_2,image_3\na.nii,,a3.nii\n")
    with pytest.raises(InputError, match="list.csv line 2: a.nii has image_3 but no image_2, so a channel would be"):
        listed(tmp_path / "list.csv", 2)


@pytest.mark.parametrize("with_list", [True, False])
def test_names_of_nnunet_are_grouped(tmp_path, with_list):
    files(tmp_path, [f"imagesTr/{case}_{number:04d}.nii.gz" for case in ("one", "x_2") for number in (0, 1)])
    files(tmp_path, ["labelsTr/one.nii.gz", "labelsTr/x_2.nii.gz"])
    if with_list:
        names = {"channel_names": {"0": "T1", "1": "T2"}, "file_ending": ".nii.gz"}
        (tmp_path / "dataset.json").write_text(json.dumps(names))
    assert listed(tmp_path) == [("one", "one_0000.nii.gz", ["one_0001.nii.gz"], "one.nii.gz"),
                                ("x_2", "x_2_0000.nii.gz", ["x_2_0001.nii.gz"], "x_2.nii.gz")]
    assert len({item["subject"] for item in read_datalist(tmp_path, channels=2)}) == 2


@pytest.mark.parametrize("names, expected", [
    ("p1/img_0000 p1/img_0001 p2/img_0000 p2/img_0001 p3/img_0000 p3/img_0001",
     [(f"p{one}_img", f"p{one}/img_0000.nii", [f"p{one}/img_0001.nii"]) for one in (1, 2, 3)]),
    ("T1/x_0000 T2/x_0001 T1/y_0000 T2/y_0001",
     [(case, f"T1/{case}_0000.nii", [f"T2/{case}_0001.nii"]) for case in "xy"]),
    ("A/c_1_0000 A/c_1_0001 B/c_1_0000 B/c_1_0001",
     r"two volumes have the id c_1 \(.*A/c_1_0000.nii and .*B/c_1_0000.nii\)"),
    ("A/c_1_0000 A/c_1_0001 B/c_1_0000", r"B/c_1_0000.nii: the case c_1 has 1 of 2 channels \(c_1_0000.nii\) in its "
     "folder, and .*A/c_1_0000.nii and .*B/c_1_0000.nii cannot be one case; add what is missing"),
    ("T1/a/x_0000 T1/b/x_0000 T2/a/x_0001 T2/b/x_0001", r"T1/a/x_0000.nii: the case x has 1 of 2 channels"),
    ("x_0000 x_0000.nii.gz x_0001", "x_0000.nii and .*x_0000.nii.gz: both are channel 0 of the case x; rename or")])
def test_cases_of_one_name_in_several_folders_are_not_mixed(tmp_path, names, expected):
    files(tmp_path, [name if name.endswith(".gz") else f"{name}.nii" for name in names.split()])
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            read_datalist(tmp_path, channels=2)
        return
    items = read_datalist(tmp_path, channels=2)
    below = [[path.relative_to(tmp_path).as_posix() for path in (item["image"], *item["channels"])] for item in items]
    assert [(item["id"], image, others) for item, (image, *others) in zip(items, below)] == expected
    assert [item["subject"] for item in items] == [item["id"].removesuffix("_img") for item in items]


@pytest.mark.parametrize("shape", [(6, 7, 8, 3), (6, 7, 8, 1, 3), (6, 7, 8, 3, 1)])
def test_one_file_with_an_axis_more_holds_all_channels(tmp_path, shape):
    images = np.random.default_rng(1).random(shape).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(images, np.diag([2, 2, 2, 1])), tmp_path / "all.nii.gz")
    files(tmp_path, ["1.nii", "2.nii", "3.nii"], shape[:3])
    for number, path in enumerate(["1.nii", "2.nii", "3.nii"]):
        write_volume(tmp_path / path, np.moveaxis(images.reshape(*shape[:3], 3), -1, 0)[number], np.diag([2, 2, 2, 1]))
    item = {"image": tmp_path / "all.nii.gz", "label": None, "mask": None}
    apart = {**item, "image": tmp_path / "1.nii", "channels": [tmp_path / "2.nii", tmp_path / "3.nii"]}
    cfg = config(data__channels=3, data__img_size=8)
    one, other = on_grid(item, cfg), on_grid(apart, cfg)
    assert one["image"].shape == (3, 8, 8, 8) and np.array_equal(one["image"], other["image"])


@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3), range(7)])
def test_volumes_with_all_channels_may_be_numbered(tmp_path, numbers):
    files(tmp_path, [f"subject_{number:04d}.nii.gz" for number in numbers], (4, 5, 6, 2))
    items = read_datalist(tmp_path, channels=2)
    assert [item["id"] for item in items] == [f"subject_{number:04d}" for number in numbers]
    for item in items:
        assert on_grid(item, config(data__channels=2))["image"].shape == (2, 16, 16, 16)


@pytest.mark.parametrize("names", [
    [f"{case}/{case}-{name}.nii.gz" for case in ("case-1", "case-2") for name in ("t2f", "t1n", "t1c")],
    [f"{case}/{name}.nii.gz" for case in ("case-1", "case-2") for name in ("T2W", "FLAIR", "T1")],
    [f"{name}/{case}_{name}_brain.nii.gz" for case in ("case-1", "case-2") for name in ("FLAIR", "T1", "T2")]])
def test_the_contrasts_of_a_case_are_its_channels(tmp_path, names):
    paths = files(tmp_path, names)
    items = read_datalist(tmp_path, channels=3)
    first, second = ([path for path in sorted(paths, key=lambda path: path.name) if case in str(path)]
                     for case in ("case-1", "case-2"))
    assert [[item["image"], *item["channels"]] for item in items] == [first, second]
    assert [(item["id"], item["subject"]) for item in items] == [("case-1", "case-1"), ("case-2", "case-2")]
    assert len(read_datalist(tmp_path)) == 6  # each a volume
    files(tmp_path, [names[0].replace("case-1", "case-3")])
    with pytest.raises(InputError, match="the case case-3 has 1 of 3 channels"):
        read_datalist(tmp_path, channels=3)


def test_files_of_several_channels_named_by_contrasts_are_volumes(tmp_path):
    for names in (["a_1_t1.nii", "a_1_t2.nii"], ["a_1_t1.nii", "a_2_t2.nii"]):
        folder = tmp_path / names[1]
        files(folder, names, (6, 7, 8, 2))
        assert len(read_datalist(folder, channels=2)) == 2


@pytest.mark.parametrize("make, channels, words", [
    (lambda f: {"training": [{"image": ["a.nii", "b.nii"]}]}, 1, ["a.nii has 2 channels", "data.channels is 1"]),
    (lambda f: {"training": [{"image": ["a.nii", "b.nii"]}]}, 3, ["a.nii has 2 channels", "data.channels is 3"]),
    (lambda f: {"training": [{"image": ["a.nii", "gone.nii"]}]}, 2, ["gone.nii", "is missing; restore it"]),
    (lambda f: {"training": [{"image": ["a.nii", 3]}]}, 2, ["has no image path"]),
    (lambda f: {"training": [{"image": ["a.nii"] * 6}]}, 5, ["6 channels", "at most 5"]),
    (lambda f: {"training": ["c_0000.nii", "c_0001.nii", "d_0000.nii"]}, 2,
     ["the case d has 1 of 2 channels (d_0000.nii)", "remove the case from the data set"])])
def test_lists_that_do_not_fit_are_one_sentence(tmp_path, make, channels, words):
    files(tmp_path, ["a.nii", "b.nii", "c_0000.nii", "c_0001.nii", "d_0000.nii"])
    (tmp_path / "dataset.json").write_text(json.dumps(make(tmp_path)))
    with pytest.raises(InputError) as refused:
        read_datalist(tmp_path, channels=channels)
    assert all(word in str(refused.value) for word in words), refused.value


def test_files_that_do_not_fit_are_one_sentence(tmp_path):
    (one, other), (large,) = files(tmp_path, ["a.nii", "b.nii"]), files(tmp_path, ["large.nii"], (9, 9, 9))
    item = {"image": one, "label": None, "mask": None}
    nibabel.save(nibabel.Nifti1Image(np.random.rand(4, 4, 4, 4), np.eye(4)), tmp_path / "four.nii")
    nibabel.save(nibabel.Nifti1Image(np.random.rand(4, 4, 4, 2, 3), np.eye(4)), tmp_path / "six.nii")
    for changes, words in (({"channels": [large]}, "large.nii: the channel is on another grid than"),
                           ({}, "a.nii: 1 of 2 channels"),
                           ({"image": tmp_path / "four.nii"}, "four.nii: 4 of 2 channels"),
                           ({"image": tmp_path / "six.nii"}, "six.nii: shape (4, 4, 4, 2, 3) is not 3D plus")):
        with pytest.raises(InputError) as refused:
            on_grid({**item, **changes}, config(data__channels=2))
        assert words in str(refused.value)
    assert on_grid({**item, "channels": [other]}, config(data__channels=2))["image"].shape == (2, 16, 16, 16)


@pytest.mark.parametrize("read, end", [
    (read_volume, "per volume."), (read_header, "per volume."),
    (lambda path: read_header(path, channels=1), "or set data.channels if its last axis holds the channels of one."),
    (read_channels, "or set data.channels if its last axis holds the channels of one.")])
def test_data_channels_is_named_only_where_it_counts(tmp_path, read, end):
    nibabel.save(nibabel.Nifti1Image(np.random.rand(4, 4, 4, 3), np.eye(4)), tmp_path / "three.nii")
    with pytest.raises(InputError, match=r"three.nii: shape \(4, 4, 4, 3\) is not 3D; split it into one .*") as refused:
        read(tmp_path / "three.nii")
    assert str(refused.value).endswith(end)


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------

def test_a_cache_gives_back_each_channel(data, tmp_path):
    changes = {"data__cache": tmp_path / "cache", "run__logs": tmp_path / "Logs", "data__dtype": "float32"}
    cfg, command = config(data, **TWO, **changes), options(data, tmp_path, **changes)
    assert run_prepare(command) == 0
    train, _, _ = read_datasets(cfg)
    shown = sample_of(tmp_path / "cache", train.items, 2)
    assert {image.shape for _, image, _ in shown} == {tuple(cfg["data.img_size"])}, "the page shows the first channel"
    item = next(item for item in read_datalist(data / "data", channels=2) if item["id"] == train.items[3]["id"])
    prepared = on_grid(item, cfg)
    assert train.image(3).shape == (2, 8, 8, 8) and np.array_equal(train.image(3), prepared["image"])


def test_a_changed_channel_is_prepared_anew(tmp_path):
    files(tmp_path / "data", [f"{name}_{number:04d}.nii" for name in "abc" for number in (0, 1)])
    cfg = config(tmp_path, **TWO, data__cache=tmp_path / "cache")
    command = options(tmp_path, tmp_path, data__cache=tmp_path / "cache", data__train_ids="", data__val_ids="")
    assert run_prepare(command) == 0
    before = open_cache(tmp_path / "cache", cfg)
    old = np.array(cache.Rows(before["folder"], "image", before["items"], keep=False)[0])
    array, affine = read_volume(tmp_path / "data/a_0001.nii")
    write_volume(tmp_path / "data/a_0001.nii", array[::-1], affine)
    assert run_prepare(command) == 0
    after = open_cache(tmp_path / "cache", cfg)
    new = np.array(cache.Rows(after["folder"], "image", after["items"], keep=False)[0])
    assert np.array_equal(new[0], old[0]) and not np.array_equal(new[1], old[1])


# ---------------------------------------------------------------------------------------------------------------------
# What learns
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(10, 12), (8, 10, 12)])
def test_channels_move_alike_and_are_coloured_apart(size):
    dims = len(size)
    cfg = config(model__dims=dims, data__img_size=16, augment__gamma=0.3, augment__contrast=0.2,
                 augment__brightness=0.1, augment__noise=0.05)
    image, keys = torch.rand(2, 1, *size), [(0, 1, 5), (0, 1, 6)]
    both = augment(torch.cat([image, image], dim=1), keys, cfg)
    assert torch.equal(both[:, :1], augment(image, keys, cfg)), "the first channel is as it would be alone"
    assert not torch.allclose(both[:, 1], both[:, 0], atol=0.02)
    plain = {**cfg, **{f"augment.{name}": 0.0 for name in ("gamma", "contrast", "brightness", "noise")}}
    moved = augment(torch.cat([image, 1 - image], dim=1), keys, plain)
    torch.testing.assert_close(moved[:, 0], 1 - moved[:, 1])


@pytest.mark.parametrize("name, dims", list(itertools.product(NETWORKS, (2, 3))))
def test_every_network_sees_every_channel(name, dims):
    cfg = config(model__name=name, model__dims=dims, data__channels=3, **QUICK)
    torch.manual_seed(0)
    net, (image, fixed) = build_network(cfg), torch.rand(2, 2, 3, *[8] * dims)
    with torch.no_grad():
        for parameter in net.parameters():  # heads start at zero
            parameter.add_(0.05 * torch.randn_like(parameter))
    for kind in ("volume", "slice"):
        condition = make_condition(fixed, kind, [(0, 0, 0), (0, 0, 1)])
        assert condition.shape == (2, 4, *[8] * dims)
    image.requires_grad_()
    condition = make_condition(fixed, "volume").requires_grad_()  # its last channel is the mask
    field = net(image, torch.full((2,), cfg["diffusion.timesteps"]), condition)
    assert field.shape == (2, dims, *[8] * dims)
    for seen in torch.autograd.grad(field.square().sum(), (image, condition)):
        assert seen[:, :3].abs().amax((0, *range(2, 2 + dims))).min() > 0


def test_a_channel_that_shows_more_finds_more():
    """One channel is empty noise. Both together know where the shift is, the first one alone does not."""
    torch.manual_seed(0)
    noise, anatomy = torch.rand(2, 1, 1, 16, 16, 16), torch.rand(1, 1, 20, 16, 16)
    cfg = config(registration__window=5, registration__scales=1)
    there, shifted = anatomy[:, :, :16], anatomy[:, :, 2:18]

    def gain(with_second):
        images = [[noise[0], there], [noise[1], there], [noise[1], shifted]]
        seen, right, wrong = (torch.cat(pair[:1 + with_second], dim=1) for pair in images)
        return image_similarity(seen, right, cfg) - image_similarity(seen, wrong, cfg)

    assert gain(False) == 0 and gain(True) > 0.2


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folder of a run with two channels, an epoch of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert om.main(options(data, folder, run__epochs=1, data__in_memory=True)) == 0
    return folder


def test_a_training_goes_on_with_the_same_bits(data, trained, tmp_path):
    steps = log_lines(trained, "step")
    assert len(steps) == 6 and all({"imgsim", "ang", "contrastive"} <= set(line["terms"]) for line in steps)
    assert log_lines(trained, "epoch")[-1]["val_dice"] > 0
    for code, words in ((42, ["--max-steps-before-restart", "4"]), (0, [])):  # and from the files
        assert om.main(options(data, tmp_path, *words, run__epochs=1)) == code
    assert final_sha256(tmp_path) == final_sha256(trained)


def test_weights_of_another_number_of_channels_are_refused(data, trained, tmp_path, capsys):
    assert om.main(options(data, trained, data__channels=1)) == 43
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "data.channels is 1" in message, "the list is looked at first"
    single = make_data(tmp_path)
    assert om.main(options(single, trained, data__channels=1)) == 43
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "data.channels is 2 in the checkpoint and 1 in the config" in message


@pytest.mark.slow
def test_the_dry_run_counts_channels(data, tmp_path, capsys):
    flops = []
    for channels, place in ((1, make_data(tmp_path)), (2, data)):
        assert om.main([*options(place, tmp_path, data__channels=channels), "--dry-run"]) == 0
        flops.append(json.loads(capsys.readouterr().out.splitlines()[-1])["step_flops"])
    assert flops[1] > 1.005 * flops[0]


# ---------------------------------------------------------------------------------------------------------------------
# The tools
# ---------------------------------------------------------------------------------------------------------------------

def pair_of(data):
    """(fixed, moving), the two files of each."""
    items = read_datalist(data / "data", channels=2)[6:8]
    return [[str(item["image"]), *map(str, item["channels"])] for item in items]


def test_a_network_registers_what_it_was_trained_with(data, trained, tmp_path, capsys):
    (fixed, fixed_2), (moving, moving_2) = pair_of(data)
    command = ["--fixed", fixed, "--moving", moving, "--model", str(trained / "Models/demo_om_net"), "--affine", "none",
               "--refine", "0", "--device", "cpu"]
    assert OM_register.main([*command, "--out", str(tmp_path / "one")]) == 43
    assert "trained on volumes with 2 channels (data.channels), but 1 is given" in capsys.readouterr().err
    both = ["--fixed-channels", fixed_2, "--moving-channels", moving_2]
    assert OM_register.main([*command, *both, "--out", str(tmp_path / "two")]) == 0
    assert (tmp_path / "two/warped_channel_2.nii.gz").is_file()
    model = load_model(trained / "Models/demo_om_net")
    found = register(fixed, moving, model, False, False, fixed_channels=[fixed_2], moving_channels=[moving_2])
    other = register(fixed, moving, model, False, False, fixed_channels=[fixed_2], moving_channels=[moving])
    assert np.isfinite(found.field).all() and not np.array_equal(found.field, other.field)


@pytest.mark.slow
def test_a_network_draws_copies_of_all_channels(data, trained, tmp_path, capsys):
    command = ["--data", str(data / "data"), "--ids", "6-7", "--model", str(trained / "Models/demo_om_net"), "--draws",
               "1", "--device", "cpu", "--out", str(tmp_path / "copies")]
    assert OM_augment.main(command) == 0
    names = sorted(path.name for path in (tmp_path / "copies/channelsTr").iterdir())
    assert len(names) == 2 and all(name.endswith("_0001.nii.gz") for name in names)
    assert listed(tmp_path / "copies") == [
        (name, f"{name}.nii.gz", [f"{name}_0001.nii.gz"], f"{name}.nii.gz")
        for name in ("subject_0006_draw00", "subject_0007_draw00")]
    (first, second), _ = pair_of(data)
    assert OM_augment.main(["--image", first, *command[4:]]) == 43
    assert "was trained with 2 channels of each volume, and this is one; give them by --data" in capsys.readouterr().err
    model = load_model(trained / "Models/demo_om_net")
    (image, affine), (channel, _) = read_volume(first), read_volume(second)
    fields = [deformed_copy(image, affine=affine, model=model, channels=[other])[2] for other in (channel, image)]
    assert not np.array_equal(*fields)
    with pytest.raises(InputError, match="1 of the 2 channels that the model was trained with"):
        deformed_copy(image, affine=affine, model=model)


@pytest.mark.parametrize("names, expected", [
    (["a_0000", "a_0001", "b_0000", "b_0001"], ["a_0000", "b_0000"]),
    (["a_0000", "a_0001", "b_0000"], ["a_0000", "a_0001", "b_0000"])], ids=["whole", "one lacks a channel"])
def test_numbered_files_of_one_label_are_one_volume_where_all_cases_have_them(tmp_path, names, expected):
    """For programs that have no data.channels. The rows of a .csv stay volumes."""
    for name in names:
        write_volume(tmp_path / f"imagesTr/{name}.nii", np.ones((6, 7), np.float32), np.eye(4))
        write_volume(tmp_path / f"labelsTr/{name[0]}.nii", np.ones((6, 7), np.uint8), np.eye(4))
    assert [item["image"].name for item in list_single(tmp_path)] == [f"{name}.nii" for name in expected]
    rows = [f"imagesTr/{name}.nii,labelsTr/{name[0]}.nii,id {name}" for name in names]
    (tmp_path / "list.csv").write_text("\n".join(["image,label,id", *rows]))
    assert [item["id"] for item in list_single(tmp_path / "list.csv")] == [f"id {name}" for name in names]
