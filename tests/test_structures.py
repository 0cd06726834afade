"""Structures that the network segments by itself: its layers, their loss, refinement by them, and trainings."""
import json
import math

import numpy as np
import pytest
import torch
from scipy import ndimage

import OM_register
import OM_train_3modes as om
from Dataloader.nifti import read_label, write_field, write_volume
from Dataloader.prepare import scaled
from Dataloader.synthetic import make_subject
from Diffusion.diffuser import make_condition
from Diffusion.fields import warp
from Diffusion.losses import segmentation_terms
from Diffusion.metrics import average, dice
from Diffusion.networks import build_network
from Diffusion.predict import align, best_field, label_map, segmented, segmented_labels
from Diffusion.validation import segmentation_dice
from Inference.labels import apply_label
from Inference.load_model import load_model
from Inference.registration import register, register_from
from Runtime.config import load_config
from Runtime.errors import InputError
from tests.test_refine import refined
from tests.tiny import QUICK, ROOT, SHARED, arguments, config, final_sha256, log_lines, make_data, options

SIZES = {2: (18, 25), 3: (10, 13, 16)}  # nothing that could be halved twice
LEARNED = {"loss__dice": 0.03, "loss__segment": 0.1, "model__structures": 6}
REGISTRATION_ALONE = {"loss__dist": 0, "loss__ang": 0, "loss__regul": 0, "loss__contrastive": 0}


def tiny(dims=3, structures=2, **changes):
    cfg = config(model__dims=dims, model__structures=structures, **changes)
    return build_network(cfg), cfg


def volumes(dims, batch=2, channels=1):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, channels, *SIZES[dims], generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# The network
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", ["none", "slice", "volume"])
def test_the_field_and_the_logits_of_both_volumes_have_the_size_of_the_image(dims, kind):
    net, cfg = tiny(dims, model__condition_type=kind, model__use_checkpoint=True)
    image, t = volumes(dims), torch.tensor([3, 40])
    condition = make_condition(image, kind, [(0, 0, 0), (0, 0, 1)])
    field, logits = net(image, t, condition, segment=True)
    assert field.shape == (2, dims, *SIZES[dims]) and not field.any(), "a new network moves nothing"
    assert logits.shape == (2 if kind == "none" else 4, 3, *SIZES[dims]) and logits.dtype == torch.float32
    embeddings = net(image, t, condition, embed=True)
    assert [one.shape for one in embeddings] == [(2, cfg["contrastive.embedding"])] * 2
    (field.sum() + logits.sum()).backward()
    assert all(parameter.grad is not None for parameter in net.segmenter.parameters())


def test_what_it_segments_is_the_same_for_moving_and_fixed_and_does_not_depend_on_the_other():
    net, cfg = tiny()
    one, other = volumes(3, 1), 1 - volumes(3, 1)
    _, logits = align(net, one, other, cfg, segment=True)
    _, swapped = align(net, other, one, cfg, segment=True)
    assert torch.allclose(logits[0], swapped[1], atol=1e-5) and torch.allclose(logits[1], swapped[0], atol=1e-5)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)
    assert torch.allclose(logits, net.segmenter(torch.cat([one, other])), atol=1e-5)


def test_the_network_sees_what_is_segmented_and_only_labels_teach_it():
    net, cfg = tiny()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():  # heads start at zero
            if not parameter.any() and "segmenter" not in name:
                parameter.normal_(std=0.05, generator=generator)
    moving, fixed = volumes(3, 1), 1 - volumes(3, 1)
    field, logits = align(net, moving, fixed, cfg, segment=True)
    field.square().sum().backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in net.segmenter.parameters())
    encoder = net.encoder.first.conv.weight.grad
    assert encoder.shape[1] == 1 + 2 + 1 and encoder[:, 1:3].any(), "image, two structures, mask"
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in net.segmenter.parameters())
    with torch.no_grad():
        net.segmenter.head.bias[1] += 3.0
        changed = align(net, moving, fixed, cfg)
    assert not torch.allclose(changed, field, atol=1e-3)


def test_of_what_is_not_shown_nothing_is_segmented():
    net, _ = tiny()
    image = volumes(3)
    mask = torch.zeros_like(image)
    mask[:, :, 3] = 1
    _, condition, _ = net.with_structures(image, torch.cat([image * mask, mask], dim=1), False)
    assert condition.shape[1] == 1 + 2 + 1 and condition[:, :, 3].any()
    assert not condition[:, :, :3].any() and not condition[:, :, 4:].any()


def test_volumes_are_segmented_once_and_what_was_found_is_carried_along():
    net, cfg = tiny()
    moving, fixed = volumes(3, 1), 1 - volumes(3, 1)
    pair = segmented(net, moving, fixed, cfg)
    both = torch.cat(pair)
    shares = net.segmenter(torch.cat([moving, fixed])).softmax(1)[:, 1:]
    assert torch.equal(both[:, :1], torch.cat([moving, fixed])) and torch.allclose(both[:, 1:], shares)
    assert all(again is one for again, one in zip(segmented(net, *pair, cfg), pair))
    with torch.no_grad():
        expected = align(net, moving, fixed, cfg)
        net.segmenter.head.bias.fill_(9.0)  # who asks it again gets something else
        assert torch.equal(align(net, *pair, cfg), expected)
    without, plain_cfg = tiny(structures=0)
    plain = segmented(without, moving, fixed, plain_cfg)
    assert plain[0] is moving and plain[1] is fixed


def test_networks_that_segment_nothing_say_so():
    with pytest.raises(InputError, match="'recresacnet' segments nothing; set it to 0, or model.name to om_net"):
        tiny(model__name="recresacnet")


@pytest.mark.parametrize("changes", [{"model__structures": 2}, {"loss__dice": 0.1}, {}])
def test_learning_to_segment_needs_structures_and_labels(changes):
    with pytest.raises(InputError, match="loss.segment 0.5 teaches a network with model.structures from the labels"):
        config(loss__segment=0.5, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------

def labels_of(size):
    """A map (1, 1, *size) with a cube of label 3 and one of label 7."""
    label = torch.zeros(1, 1, *size)
    label[(0, 0, *[slice(1, 4)] * len(size))], label[(0, 0, *[slice(5, 9)] * len(size))] = 3, 7
    return label


def certain(label, values, size):
    """Logits (1, 1 + L, *size) that leave no doubt."""
    places = torch.stack([(label[0, 0] == value) for value in values])
    return 50.0 * torch.cat([~places.any(0, keepdim=True), places]).float()[None]


@pytest.mark.parametrize("dims", [2, 3])
def test_the_loss_is_zero_for_the_labels_themselves_and_analytic_for_no_idea(dims):
    size, values = SIZES[dims], torch.tensor([3, 7])
    label = labels_of(size)
    right = certain(label, (3, 7), size)
    loss, share = segmentation_terms(torch.cat([right, right]), label, label, [(True, True)], values)
    assert loss.item() == pytest.approx(0.0, abs=1e-5) and share.item() == 1.0
    voxels, counts = math.prod(size), [3 ** dims, 4 ** dims]
    no_idea = torch.zeros(2, 3, *size)
    loss, _ = segmentation_terms(no_idea, label, label, [(True, True)], values)
    overlap = np.mean([2 * count / 3 / (voxels / 3 + count) for count in counts])
    assert loss.item() == pytest.approx(math.log(3) + 1 - overlap, rel=1e-5)
    swapped, _ = segmentation_terms(certain(label, (7, 3), size).repeat(2, 1, *[1] * dims), label, label,
                                    [(True, True)], values)
    assert swapped > 1.0 + 50 * sum(counts) / voxels - 1e-3, "each label has a channel of its own"


def test_a_label_that_a_map_lacks_has_no_dice_and_other_labels_are_background():
    size, label = SIZES[3], labels_of(SIZES[3])
    loss, _ = segmentation_terms(certain(label, (3, 9), size).repeat(2, 1, 1, 1, 1), label, label, [(True, True)],
                                 torch.tensor([3, 9]))
    assert loss.item() == pytest.approx(0.0, abs=1e-5)


def test_volumes_count_by_themselves_and_without_labels_not_at_all():
    size, values = SIZES[3], torch.tensor([3, 7])
    label, none = labels_of(size), torch.full((1, 1, *size), -1.0)
    logits = torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss, share = segmentation_terms(logits, torch.cat([label, none]), torch.cat([none, none]),
                                     [(True, False), (False, False)], values)
    alone, _ = segmentation_terms(logits[[0, 0]], label, label, [(True, True)], values)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6) and share.item() == 0.25
    loss.backward()
    assert logits.grad[0].any() and not logits.grad[1:].any()
    nothing, share = segmentation_terms(logits, *[torch.cat([none, none])] * 2, [(False, False)] * 2, values)
    logits.grad = None
    nothing.backward()
    assert nothing.item() == share.item() == 0.0 and not logits.grad.any(), "there, and zero"


# ---------------------------------------------------------------------------------------------------------------------
# Refinement
# ---------------------------------------------------------------------------------------------------------------------

def ball(size, centre, radius=4.0):
    axes = torch.meshgrid(*[torch.arange(n) for n in size], indexing="ij")
    distance = sum((axis - middle) ** 2 for axis, middle in zip(axes, centre)).sqrt()
    return torch.sigmoid(2 * (radius - distance))[None, None]


@pytest.mark.parametrize("dims, similarity", [(3, "correlation"), (3, "mind"), (2, "correlation")])
def test_refinement_brings_structures_together_that_the_intensities_do_not_show(dims, similarity):
    size = (24, 26, 22)[:dims]
    image = make_subject(1, size, dims=dims)["image"]
    image = torch.from_numpy(np.ascontiguousarray(image))[None, None].float()
    middle = [n // 2 for n in size]
    moving, fixed = ball(size, middle), ball(size, [middle[0] + 3, *middle[1:]])
    cfg = config(model__dims=dims, refine__levels=2, refine__weight=0.1, registration__similarity=similarity)
    structures = torch.cat([moving, fixed])

    def overlap(field):
        return average(dice(warp(moving, field) > 0.5, fixed > 0.5, [1]))

    still = refined(image, image, None, 60, cfg)
    found = refined(image, image, None, 60, cfg, structures=structures)
    assert overlap(still) < 0.7 < 0.85 < overlap(found)
    if dims == 2:
        ignored = refined(image, image, None, 60, {**cfg, "refine.structures": 0.0}, structures=structures)
        assert torch.equal(ignored, still)


# ---------------------------------------------------------------------------------------------------------------------
# Trainings, and registration after them
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network whose training was registration and segmentation alone."""
    folder = make_data(tmp_path_factory.mktemp("trained"))
    changes = {**LEARNED, **REGISTRATION_ALONE, "run__epochs": 12, "optim__lr": 2e-2}
    assert om.main(arguments(folder, **changes)) == 0
    return folder


@pytest.mark.slow
def test_a_training_learns_to_segment(trained):
    epochs = log_lines(trained, "epoch")
    assert epochs[-1]["segment"] < 0.75 * epochs[0]["segment"] and epochs[-1]["segmented"] == 1.0
    assert epochs[0]["val_segment"] < 0.05 and epochs[-1]["val_segment"] > 0.15
    assert segmented_labels(load_model(trained / "Models/demo_om_net")[1]) == [1, 2, 3, 4, 5, 6]


def test_the_dice_of_what_is_segmented_is_over_the_labels_there_are():
    cfg = config(model__structures=2, registration__labels="3,7")
    truth = torch.tensor([[0, 3, 3, 7, 7, 7]])
    shares = torch.tensor([[[0.2, 0.9, 0.1, 0.0, 0.0, 0.1], [0.3, 0.1, 0.2, 1.0, 0.8, 0.4]]])  # (1, 2, 6)
    assert label_map(shares, segmented_labels(cfg)).tolist() == [[0, 3, 0, 7, 7, 0]]
    volume = torch.cat([torch.zeros(1, 1, 6), shares], dim=1)
    assert segmentation_dice([volume, volume], [truth, None], cfg) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert segmentation_dice([volume], [truth.clamp(max=3)], cfg) == pytest.approx(2 / 6)
    assert segmentation_dice([volume], [0 * truth], cfg) is segmentation_dice([volume], [None], cfg) is None


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["trained", "own"])
def test_registration_refines_by_what_it_segments_on_either_grid(trained, grid):
    net, cfg = load_model(trained / "Models/demo_om_net", overrides=[f"refine.grid={grid}", "refine.weight=0.2"])
    pair = [make_subject(number, (20, 18, 22)) for number in (6, 7)]
    (fixed, moving), affine = [volume["image"] for volume in pair], np.diag([0.8, 0.9, 0.75, 1.0])
    fields = {weight: register((fixed, affine), (moving, affine), model=(net, {**cfg, "refine.structures": weight}),
                               refine=30, affine=False, start="header").field for weight in (0.0, 3.0)}

    def overlap(field):
        moved = apply_label(pair[1]["label"], affine, field, affine, "nearest")
        return average(dice(torch.from_numpy(moved), torch.from_numpy(pair[0]["label"]), range(1, 7)))

    assert not np.allclose(fields[0.0], fields[3.0], atol=1e-2)
    assert overlap(fields[3.0]) > overlap(fields[0.0]) - 0.02
    alone = register((fixed, affine), (moving, affine), (net, cfg), False, False, start="header").field
    assert alone.shape == (3, *fixed.shape)


class Bands(torch.nn.Module):
    """Segments by intensity alone, so that one knows what is to be found: 1 is grey, 2 is bright."""

    def forward(self, volumes):
        centres = torch.tensor([0.0, 0.4, 0.9]).view(1, 3, *[1] * (volumes.dim() - 2))
        return -200.0 * (volumes - centres).square()


def turned_pair():
    """(array, affine) of two subjects of different voxels, the second one stored flipped and with axes exchanged."""
    turned = np.array([[-0.8, 0, 0, 30], [0, 0, 0.75, -7], [0, 0.9, 0, 4], [0, 0, 0, 1]])
    first, second = (ndimage.gaussian_filter(make_subject(number, size)["image"], 1.5)  # bands of several voxels
                     for number, size in ((6, (20, 18, 22)), (7, (22, 24, 20))))
    return (first, np.diag([0.8, 0.9, 0.75, 1.0])), (np.ascontiguousarray(second[::-1].swapaxes(1, 2)), turned)


@pytest.mark.parametrize("grid, labels, named", [("trained", "", (0, 1, 2)), ("own", "5-6,17", (0, 1, 2)),
                                                 ("own", "4,1201", (0, 4, 1201))])
def test_what_is_segmented_lies_on_the_grid_of_each_volume_by_its_label(grid, labels, named):
    net, cfg = tiny(registration__labels=labels, refine__grid=grid, data__img_size=[32, 32, 32], data__crop_above=0,
                    data__spacing_mm=0.7)
    net.segmenter = Bands()
    fixed, moving = turned_pair()
    found = register(fixed, moving, model=(net, cfg), affine=False, start="centre", refine=2)
    for side, (image, _) in (("fixed", fixed), ("moving", moving)):
        expected = Bands()(torch.from_numpy(scaled(image, cfg)[0])[None, None])[0].argmax(0)
        there = torch.from_numpy(getattr(found, f"segmented_{side}").astype(np.int64))
        assert there.shape == image.shape and tuple(there.unique().tolist()) == named, side
        assert min(dice(there, torch.tensor(named)[expected], named[1:])) > 0.85, side


def test_after_a_start_from_a_field_the_moving_volume_has_no_segmentation(tmp_path):
    """It would be one of the warped volume, on the grid of the fixed one."""
    net, cfg = tiny(data__img_size=[32, 32, 32], data__crop_above=0, data__spacing_mm=0.7)
    paths = [tmp_path / f"{side}.nii.gz" for side in ("zero", "fixed", "moving")]
    (fixed, affine), moving = turned_pair()
    write_field(paths[0], np.zeros((3, *fixed.shape), np.float32), affine)
    for path, (image, own) in zip(paths[1:], ((fixed, affine), (moving[0], affine))):
        write_volume(path, image.astype(np.float32), own)
    with pytest.warns(UserWarning, match="moving.nii.gz: the network has seen it only as the field of .*zero.nii.gz"):
        found = register_from(*paths, model=(net, cfg), affine=False, refine=0)
    assert found.segmented_fixed.shape == fixed.shape and found.segmented_moving is None
    assert "its segmentation is left out" in found.warnings[-1]


def test_it_is_written_where_the_network_segments_and_goes_where_another_does_not(finished_run, tmp_path,
                                                                                  no_figures):
    model = finished_run(**SHARED) / "Models/demo_om_net"
    sides = dict(zip(("fixed", "moving"), turned_pair()))
    for side, (image, affine) in sides.items():
        write_volume(tmp_path / f"{side}.nii.gz", image.astype(np.float32), affine)
    words = ["--fixed", tmp_path / "fixed.nii.gz", "--moving", tmp_path / "moving.nii.gz", "--start", "centre",
             "--device", "cpu", "--no-picture", "--out", tmp_path / "out"]
    assert OM_register.main([str(word) for word in [*words, "--model", model, "--affine", "none", "--refine",
                                                         "0"]]) == 0
    for side, (image, affine) in sides.items():
        found, placed = read_label(tmp_path / f"out/segmented_{side}.nii.gz", 3)
        assert found.shape == image.shape and np.allclose(placed, affine, atol=1e-5) and found.max() <= 6
    assert OM_register.main([str(word) for word in [*words, "--affine", "none", "--refine", "2"]]) == 0
    assert not list(tmp_path.glob("out/segmented*")), "they belong to another registration"


@pytest.mark.slow  # tests/test_ranks.py continues the same training with another number of ranks
def test_all_modes_resume_exactly(finished_run, data, tmp_path):
    for code, words in ((42, ["--max-steps-before-restart", "2"]), (0, [])):
        assert om.main(options(data, tmp_path, *words, **SHARED)) == code
    whole = finished_run(**SHARED)
    assert final_sha256(whole) == final_sha256(tmp_path)
    (epoch,) = log_lines(whole, "epoch")
    assert epoch["labelled"] == 1 and 0 < epoch["segmented"] < 1, "what is segmented stands in for labels"


def test_another_number_of_labels_is_one_sentence(data, tmp_path, capfd):
    assert om.main(options(data, tmp_path, **QUICK, **{**LEARNED, "model__structures": 5})) == 43
    assert ("error: model.structures is 5, but the label maps of the training volumes hold 6 labels (1, 2, 3, 4, 5, "
            "6): set it to that number, or name those that count by registration.labels.") in capfd.readouterr().err


@pytest.mark.slow
def test_structures_that_nothing_teaches_are_refused_unless_the_network_segments_already(data, tmp_path, finished_run,
                                                                                         capfd):
    untaught = {**QUICK, "model__rec_num": 2, **LEARNED, "loss__segment": 0, "model__descents": 2,
                "model__fine_descents": 1}
    assert om.main(options(data, tmp_path, **untaught)) == 43
    assert "error: model.structures is 6, but loss.segment is 0" in capfd.readouterr().err
    taught = ["--init-from", str(finished_run(**SHARED) / "Models/demo_om_net")]
    for words, warned in (([], True), (taught, False)):
        assert om.main(options(data, tmp_path, "--dry-run", *words, **untaught)) == 0
        assert ("training refuses this without --init-from" in capfd.readouterr().err) == warned
    for words in (taught, []):  # also where it goes on
        assert om.main(options(data, tmp_path, "--max-steps-before-restart", "1", *words, **untaught)) == 42


@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_labels_of_sides_that_are_mirrored_are_told(data, tmp_path, capfd, flip):
    words = options(data, tmp_path, "--max-steps-before-restart", "1", **QUICK, **LEARNED, augment__flip=flip)
    assert om.main(words) == 42
    assert ("set augment.flip to 0 if left and right have labels of their own" in capfd.readouterr().out) == bool(flip)


@pytest.mark.slow
def test_the_cost_of_a_step_is_counted_before_the_data_are_there(capfd):
    words = ["model.structures=2", "loss.segment=0.12", "data.root=/nowhere"]
    assert om.main(["--config", str(ROOT / "Config/config_hippocampus_labels.yaml"), "--dry-run",
                    *[word for item in words for word in ("--set", item)]]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["parameters"] // 1000 == 2982


def test_best_field_works_with_the_config_of_the_hippocampus():
    cfg = load_config(ROOT / "Config/config_hippocampus_labels.yaml", ["data.img_size=[16,24,16]", "run.amp=off",
                                                                       "diffusion.grids=[4,8]"])
    net = build_network(cfg)
    moving, fixed = torch.rand(2, 1, 1, 16, 24, 16, generator=torch.Generator().manual_seed(3))
    assert cfg["model.structures"] == 2 and cfg["loss.segment"] > 0
    with torch.no_grad():
        assert best_field(net, moving, fixed, cfg).shape == (1, 3, 16, 24, 16)
