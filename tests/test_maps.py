"""Labels and masks of training volumes in mode 3: their losses, their augmentation, and trainings that read them."""
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import OM_train_3modes as om
from Dataloader import dataset as datasets
from Dataloader.dataset import NO_LABELS, Files, epoch_batches, find_labels, read_datasets
from Dataloader.nifti import read_label
from Diffusion.batch_augment import augment, augment_maps
from Diffusion.losses import label_terms, soft_dice, warp_inside
from Diffusion.metrics import dice
from Runtime.global_batch import split_step
from Runtime.launch import Ranks
from Runtime.progress import Progress
from tests import tiny
from tests.tiny import MASKED, QUICK, add_masks, begin, config, final_sha256, log_lines, make_data, prepare

SIZES = [(13, 16), (10, 13, 16)]
KEYS = [(0, 3, position) for position in range(4)]
COLOURS = {"augment__gamma": 0.3, "augment__contrast": 0.2, "augment__brightness": 0.1, "augment__noise": 0.05}
# Of six training volumes four have labels; in mode 3 a pair counts where both have.
SOME = {**QUICK, "loss__dice": 0.1, "data__label_ids": "0-3"}
BOTH = (True, True)  # volumes of a pair with labels


# ---------------------------------------------------------------------------------------------------------------------
# The losses
# ---------------------------------------------------------------------------------------------------------------------

def blocks(size, *places):
    """A label map (1, 1, *size): label k + 1 in the cube of three voxels that begins at places[k] along every axis."""
    label = torch.zeros(1, 1, *size)
    for number, place in enumerate(places, 1):
        label[(0, 0, *[slice(place, place + 3)] * len(size))] = number
    return label


def shift(size, voxels):
    return torch.full((1, len(size), *size), float(voxels))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_one_minus_the_dice_of_the_metrics_and_zero_where_a_field_brings_the_labels_together(size):
    moving, fixed, values = blocks(size, 2, 6), blocks(size, 3, 5), torch.tensor([1, 2])
    found, share = label_terms(shift(size, 0), moving, fixed, [BOTH], values)
    assert found.item() == pytest.approx(1 - np.mean(dice(moving, fixed, [1, 2])), abs=1e-6) and 0.2 < found < 0.9
    assert share.item() == 1.0
    together, _ = label_terms(shift(size, 1), moving, blocks(size, 1, 5), [BOTH], values)
    assert together.item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_labels_count_in_a_pair_that_has_them(size):
    """One in neither map is left out; one in a single map has overlapped by nothing."""
    values, zero = torch.tensor([1, 2, 9]), shift(size, 0)
    for moving, fixed, expected in ((blocks(size, 2, 6), blocks(size, 2, 6), 0.0),
                                    (blocks(size, 2, 6), blocks(size, 2), 0.5),
                                    (blocks(size, 2), blocks(size, 2, 6), 0.5),
                                    (blocks(size), blocks(size), 0.0)):
        assert label_terms(zero, moving, fixed, [BOTH], values)[0].item() == pytest.approx(expected, abs=1e-6)
    only_one = label_terms(zero, blocks(size, 2, 6), blocks(size, 2), [BOTH], torch.tensor([1]))[0]
    assert only_one.item() == pytest.approx(0.0, abs=1e-6), "a label that is not compared is background"


@pytest.mark.parametrize("size", SIZES)
def test_pairs_without_labels_add_nothing(size):
    values = torch.tensor([1, 2])
    moving, fixed, none = blocks(size, 2, 6), blocks(size, 3, 5), torch.full((1, 1, *size), float(NO_LABELS))
    field = (0.3 * torch.randn(3, len(size), *size)).requires_grad_()
    one, _ = label_terms(field[1:2], moving, fixed, [BOTH], values)
    of_three, share = label_terms(field, torch.cat([none, moving, moving]), torch.cat([fixed, fixed, none]),
                                  [(False, True), BOTH, (True, False)], values)
    assert of_three.item() == one.item() and share.item() == pytest.approx(1 / 3)
    of_three.backward()
    assert field.grad[1].any() and not field.grad[[0, 2]].any()
    nothing, share = label_terms(field, *[torch.cat([none] * 3)] * 2, [(False, False)] * 3, values)
    assert nothing.item() == share.item() == 0.0 and (field.sum() + nothing).isfinite()


def test_what_is_segmented_stands_in_for_labels_that_a_volume_lacks():
    size, values = SIZES[1], torch.tensor([1, 2])
    moving, fixed = blocks(size, 2, 6), blocks(size, 1, 5)
    none = torch.full((1, 1, *size), float(NO_LABELS))
    one_hot = [torch.cat([label == value for value in values], dim=1).float() for label in (moving, fixed)]
    for field in (shift(size, 0), shift(size, 1)):
        expected, _ = label_terms(field, moving, fixed, [BOTH], values)
        for start, end, has in ((none, fixed, (False, True)), (moving, none, (True, False)),
                                (none, none, (False, False))):
            found, share = label_terms(field, start, end, [has], values, one_hot)
            assert share.item() == 1.0 and found.item() == pytest.approx(expected.item(), abs=1e-6)
        found, _ = label_terms(field, moving, fixed, [BOTH], values, [torch.zeros_like(one) for one in one_hot])
        assert found.item() == expected.item(), "where labels are, they count"


def test_soft_dice_of_fractions_is_analytic_and_its_gradient_right():
    first = torch.tensor([0.5, 1.0, 0.0]).view(1, 1, 3).repeat(2, 2, 1).double()
    second = torch.tensor([1.0, 0.5, 0.5]).view(1, 1, 3).repeat(2, 2, 1).double()
    second[:, 1] = 0
    counted = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double()
    expected = 2 * 1.0 / (1.5 + 2.0)
    assert soft_dice(first, second, counted).tolist() == pytest.approx([expected / 2, expected])
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, 3, 4, 3, generator=generator).double().requires_grad_() for _ in range(2)]
    counted = torch.tensor([[1, 0, 1], [0, 0, 0]]).double()
    assert torch.autograd.gradcheck(lambda a, b: soft_dice(a, b, counted), maps)
    assert soft_dice(*maps, counted)[1].item() == 1.0


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_reaches_the_field(size):
    """Along the gradient the loss changes as it says."""
    moving, fixed, values = blocks(size, 2, 6), blocks(size, 3, 5), torch.tensor([1, 2])
    field = (0.3 + 0.1 * torch.rand(1, len(size), *size)).requires_grad_()

    def loss(field):
        return label_terms(field, moving, fixed, [BOTH], values)[0]

    gradient, = torch.autograd.grad(loss(field), field)
    step = 0.02 * gradient / gradient.abs().max()
    change = loss(field + step) - loss(field - step)
    assert change.item() == pytest.approx(2 * (gradient * step).sum().item(), rel=0.05) and change > 0


@pytest.mark.parametrize("size", SIZES)
def test_what_counts_with_masks_is_sampled_inside_of_both(size):
    mask, whole = torch.zeros(2, 1, *size), torch.ones(2, 1, *size)
    mask[(slice(None), slice(None), *[slice(2, 8)] * len(size))] = 3  # any number above zero
    image = torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(1))
    still = shift(size, 0).repeat(2, *[1] * (len(size) + 1))
    warped, inside = warp_inside(image, still, mask, whole)
    assert torch.allclose(inside, (mask > 0).float(), atol=1e-5)
    assert torch.allclose(warped * inside, image * inside, atol=1e-5)
    warped, inside = warp_inside(torch.where(mask > 0, 0.25, 7.0)[:1], shift(size, 1.5), mask[:1], mask[:1])
    expected = torch.ones(1, 1, *size)
    for axis in range(2, 2 + len(size)):  # voxel 6 is sampled at 7.5, between the last that the mask has and the next
        along = torch.zeros(size[axis - 2])
        along[2:6], along[6] = 1.0, 0.5
        expected *= along.view(-1, *[1] * (1 + len(size) - axis))
    assert torch.allclose(inside, expected, atol=1e-5) and torch.allclose(warped[inside > 1e-2], torch.tensor(0.25))
    assert warp_inside(image[:1], shift(size, 100), whole[:1], whole[:1])[1].sum() == 0, "outside of the volume"


def steady_loss(batch, masks, cfg):
    """Loss and terms of mode 3 by a network whose field does not depend on what it sees."""
    field = 0.4 * torch.sin(torch.arange(batch["moving"][:, :1].numel())).view_as(batch["moving"])

    def net(moving, t, condition):
        return field.repeat(1, moving.dim() - 2, *[1] * (moving.dim() - 2))

    return om.step_registration(net, {**batch, "mask": masks}, cfg)


@pytest.mark.parametrize("dims", [2, 3])
def test_intensities_outside_the_masks_do_not_matter(dims):
    cfg = config(model__dims=dims, registration__masks=True, registration__scales=3, data__img_size=24)
    size = [24] * dims
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.rand(2, 1, *size, generator=generator) for name in ("moving", "fixed")}
    masks = {name: (torch.rand(2, 1, *size, generator=generator) > 0.02).float() for name in batch}
    before = steady_loss(batch, masks, cfg)[1]
    painted = {name: torch.where(masks[name] > 0, image, 5.0) for name, image in batch.items()}
    assert {name: value.item() for name, value in steady_loss(painted, masks, cfg)[1].items()} == pytest.approx(
        {name: value.item() for name, value in before.items()}, rel=1e-4)
    plain = steady_loss(painted, masks, {**cfg, "registration.masks": False})[1]
    assert plain["imgmse"] > 3 * before["imgmse"]
    changed = {**batch, "fixed": torch.where(masks["fixed"] > 0, 0.0, batch["fixed"])}
    assert abs(steady_loss(changed, masks, cfg)[1]["imgmse"] - before["imgmse"]) > 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Augmentation, and what is read
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES)
def test_maps_are_moved_as_their_images_and_keep_their_numbers(size):
    cfg = config(augment__rotation=20, augment__scaling=0.2, augment__shift=0.1, augment__flip=0.5, augment__gamma=0)
    label = torch.cat([blocks(size, 2, 6)] * 4).short()
    moved = augment_maps(label, KEYS, cfg)
    assert moved.dtype == torch.float32 and set(moved.unique().tolist()) == {0.0, 1.0, 2.0}
    for value in (1, 2):
        image = augment((label == value).float(), KEYS, cfg)  # linear: above one half where the nearest voxel has it
        sure = (image - 0.5).abs() > 0.499
        assert torch.equal((moved == value)[sure], (image > 0.5)[sure]) and (moved != label).any()
    coloured = config(**COLOURS, augment__rotation=20, augment__scaling=0.2, augment__shift=0.1, augment__flip=0.5)
    assert torch.equal(augment_maps(label, KEYS, coloured), moved), "their numbers are no intensities"
    nothing = config(augment__rotation=0, augment__scaling=0, augment__shift=0, augment__flip=0)
    assert torch.equal(augment_maps(label, KEYS, nothing), label.float())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return add_masks(make_data(tmp_path_factory.mktemp("maps"), size=8))


def maps_of_pairs(cfg, most=4):
    """The maps of the first pairs of an epoch: [(kind, indices, maps (2, 1, *size))], and the data set."""
    dataset, _, listed = read_datasets(cfg)
    steps = epoch_batches(cfg, dataset, listed, Progress(), split_step(cfg, 1),
                          Ranks())
    names = {subject.item(): index for index, subject in enumerate(dataset.subjects)}
    found = []
    for _, ((_, _, subjects, maps),) in itertools.islice(steps, most):
        found += [(kind, [names[one.item()] for one in subjects], of_both) for kind, of_both in maps.items()]
    return found, dataset


def test_maps_are_those_of_the_volumes_from_files_from_memory_and_from_the_cache(data, tmp_path):
    changes = {**SOME, "registration__masks": True}
    changes["data__cache"] = prepare(data, tmp_path / "cache", **changes)
    sources = [{"data__cache": "", "data__in_memory": False}, {"data__cache": "", "data__in_memory": True}, {}]
    (files, dataset), (memory, _), (cache, _) = (maps_of_pairs(config(data, **{**changes, **source}))
                                                 for source in sources)
    assert isinstance(dataset.labels, Files)
    for one, two, three in zip(files, memory, cache, strict=True):
        assert one[:2] == two[:2] == three[:2] and one[2].dtype == torch.int16
        assert torch.equal(one[2], two[2]) and torch.equal(one[2], three[2])
    seen = set()
    for kind, indices, maps in files:
        for index, found in zip(indices, maps[:, 0]):
            path = data / f"data/labelsTr/subject_{index:04d}.nii.gz"
            label = torch.from_numpy(read_label(path)[0])
            has = index < 4 if kind == "label" else index in MASKED
            missing = NO_LABELS if kind == "label" else 1
            wanted = (label if kind == "label" else label > 0) if has else torch.full_like(label, missing)
            assert torch.equal(found, wanted.short()), (kind, index)
            seen.add((kind, has))
    assert len(seen) == 4, "with and without, of both kinds"


def test_nothing_is_read_that_nobody_asked_for(data):
    found, dataset = maps_of_pairs(config(data, **QUICK))
    assert found == [] and dataset.found_labels is None
    assert all(label is None for label in dataset.labels) and all(mask is None for mask in dataset.masks)


def test_labels_are_found_by_all_ranks_together(data):
    cfg = config(data, **SOME)
    dataset = read_datasets(cfg)[0]
    alone = find_labels(dataset, Ranks(), cfg)
    shares = [find_labels(dataset, Ranks(rank=rank, world_size=8), cfg) for rank in range(8)]
    assert alone == sorted(set().union(*shares)) == [1, 2, 3, 4, 5, 6] and shares[4:] == [[]] * 4
    assert find_labels(dataset, Ranks(), {**cfg, "registration.labels": "2-3,6"}) == [2, 3, 6]
    assert find_labels(dataset, Ranks(), {**cfg, "registration.labels": "0-5"}) == [1, 2, 3, 4, 5], "no background"


@pytest.mark.parametrize("changes, words", [
    ({"data__label_ids": "3"}, ["but 1 of 6 training volumes have labels that data.label_ids 3 permits",
                               "run OM_prepare.py again if you use a cache), or set"]),
    ({"data__labelled_pairs": 0.5, "loss__dice": 0}, ["data.labelled_pairs=0.5", "loss.dice is 0"]),
    ({"data__labelled_pairs": 0.5, "data__pair_subjects": "same"}, ["no pair is left among"]),
    ({"data__label_ids": "70-80"}, ["ids \"70-80\" select no volume"]),
    ({"registration__masks": True, "data__train_ids": "2,3", "data__expect_samples": 2}, ["none of 2", "has a mask"]),
    ({"registration__labels": "7-9"}, ["no label but the background among registration.labels 7-9"]),
    ({"registration__labels": "3-1"}, ["registration.labels \"3-1\": \"3-1\" is not a number"]),
    ({}, ["6 labels from 1 to 6", "at most 5 by registration.labels, such as \"1-5\""])])
def test_labels_that_cannot_be_used_are_one_sentence(data, tmp_path, monkeypatch, capfd, changes, words):
    monkeypatch.setattr(datasets, "MOST_LABELS", 5)
    assert om.main(options(data, tmp_path, **changes)) == 43
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words), message


# ---------------------------------------------------------------------------------------------------------------------
# Trainings
# ---------------------------------------------------------------------------------------------------------------------

def options(data, folder, *more, **changes):
    return tiny.options(data, folder, *more, **{**SOME, "registration__masks": True, **changes})


@pytest.mark.slow
def test_a_training_with_labels_of_some_volumes_is_logged_and_resumes_exactly(data, tmp_path):
    """Some pairs deformed, and some seen in other intensities."""
    whole, parts, both = tmp_path / "whole", tmp_path / "parts", {"augment__deform": 0.5, "augment__remap": 0.5}
    assert om.main(options(data, whole, **both)) == 0
    steps = log_lines(whole, "step")
    labelled = [line["terms"]["labelled"] for line in steps]
    assert set(labelled) == {0.0, 1.0} and len(steps) == 12
    assert [("dice" in line["terms"]) for line in steps] == [bool(share) for share in labelled]
    for number, epoch in enumerate(log_lines(whole, "epoch")):
        terms = [line["terms"] for line in steps if line["epoch"] == number]
        known = [one["dice"] for one in terms if "dice" in one]
        assert epoch["labelled"] == pytest.approx(len(known) / len(terms))
        assert epoch["dice"] == (pytest.approx(np.mean(known)) if known else None)
    for code, words in ((42, ["--max-steps-before-restart", "9"]), (0, [])):
        assert om.main(options(data, parts, *words, **both)) == code
    assert final_sha256(parts) == final_sha256(whole)
    assert log_lines(parts, "epoch")[-1]["dice"] == log_lines(whole, "epoch")[-1]["dice"]


def test_labels_are_met_as_often_as_the_config_says(data, tmp_path):
    changes = {"data__labelled_pairs": 1.0, "data__label_ids": "1-2"}
    assert om.main(options(data, tmp_path, "--max-steps-before-restart", "4", **changes)) == 42
    assert [line["terms"]["labelled"] for line in log_lines(tmp_path, "step")] == [1.0] * 4


def run_and_pair(cfg):
    """A training, and two volumes with labels as the loader gives them to mode 3."""
    torch.manual_seed(0)
    run = begin(cfg)
    run.labels = torch.tensor(range(1, 7))
    dataset = read_datasets(cfg)[0]
    images, labels = (torch.stack([read(number) for number in (2, 1)]) for read in (dataset.image, dataset.label))
    return run, (images, torch.tensor([0, 1]), dataset.subjects[[2, 1]], {"label": labels})


def test_the_labels_of_a_pair_are_brought_together(data):
    """By mode 3 alone; without the term they would stay apart, as intensities count for nothing here."""
    alone = {"loss__dice": 1, "loss__imgsim": 0, "loss__imgmse": 0, "loss__ddf": 0, "registration__clip_norm": 10}
    cfg = config(data, **{**SOME, **alone})
    run, pair = run_and_pair(cfg)
    run.optimizers["shared"].param_groups[0]["lr"] = 1e-2
    found = [om.run_mode(run, om.MODES["registration"], om.pair_batches(run, [pair])).terms["dice"] for _ in range(25)]
    assert found[-1] < 0.9 * found[0], found


# ---------------------------------------------------------------------------------------------------------------------
# Pairs that are deformed, and seen in other intensities
# ---------------------------------------------------------------------------------------------------------------------

def test_the_network_sees_other_intensities_than_the_loss_compares(data):
    cfg = config(data, **SOME, augment__remap=1.0)
    run, pair = run_and_pair(cfg)
    (plain,), (batch,) = (om.pair_batches(replace(run, cfg=each), [pair]) for each in (config(data, **SOME), cfg))
    assert "seen" not in plain and all(torch.equal(batch[side], plain[side]) for side in ("moving", "fixed"))
    assert all((batch["seen"][side] != batch[side]).any() for side in ("moving", "fixed"))
    # A new network moves nothing, whatever it sees: the loss is that of the volumes as they are.
    assert om.step_registration(run.net, batch, cfg)[0] == om.step_registration(run.net, plain, cfg)[0]
    with torch.no_grad():
        run.net.fine.weight.normal_(std=0.1)
    assert om.step_registration(run.net, batch, cfg)[0] != om.step_registration(run.net, plain, cfg)[0]


def test_a_pair_is_mirrored_with_its_labels_or_not_at_all(data):
    """Two volumes that are the same stay so: drawn for each, every second of these pairs would ask for a reflection."""
    still = {f"augment__{name}": 0 for name in ("rotation", "scaling", "shift", "gamma")}
    run, (images, _, subjects, maps) = run_and_pair(config(data, **SOME, **still, augment__flip=0.5))
    batch, = om.pair_batches(run, [(images[:1].repeat(40, 1, 1, 1, 1), torch.arange(40), subjects[:1].repeat(40),
                                    {"label": maps["label"][:1].repeat(40, 1, 1, 1, 1)})])
    for kind in (batch, batch["label"]):
        assert torch.equal(kind["moving"], kind["fixed"]) and len(kind["fixed"].unique(dim=0)) == 2


def test_labels_of_a_pair_are_deformed_with_its_images(data):
    """Images that are their own labels stay so."""
    cfg = config(data, **SOME, augment__deform=1.0, augment__gamma=0, diffusion__v_scale=2e-3)
    run, (_, *rest) = run_and_pair(cfg)
    images = (rest[-1]["label"] == 2).float()
    batch, = om.pair_batches(run, [(images, *rest)])
    for side, stored in (("moving", images[:1]), ("fixed", images[1:])):
        sure = (batch[side] - 0.5).abs() > 0.499
        assert torch.equal((batch["label"][side] == 2)[sure], (batch[side] > 0.5)[sure])
        assert (batch[side] - stored).abs().mean() > 0.01, "it is deformed"
