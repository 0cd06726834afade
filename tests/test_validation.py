"""What registration makes of a network's answers: rounds, and both directions; whom mode 2 knows; what is scored."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from Dataloader.dataset import VolumeDataset
from Diffusion.fields import compose, exponential, identity, warp
from Diffusion.metrics import folding_percent
from Diffusion.networks import build_network
from Diffusion.predict import align, best_field
from Diffusion.validation import (
    best_by,
    cases_of_rank,
    measured_on,
    retrieval,
    validate_registration,
    validation_pairs,
)
from Runtime.config import load_config
from Runtime.launch import Ranks
from tests.tiny import ROOT


def config(**more):
    return {**load_config(ROOT / "Config/config_demo.yaml", ["data.img_size=24", "diffusion.grids=[4, 8]"]),
            **{f"registration.{key}": value for key, value in more.items()}}


def ball(*centre):
    """A soft ball in 24^3."""
    away = identity((24, 24, 24), "cpu") - torch.tensor(centre, dtype=torch.float32).view(1, 3, 1, 1, 1)
    return torch.exp(-away.square().sum(1, keepdim=True) / 18)


def centre(image):
    places = identity(image.shape[2:], image.device)
    return (places * image).flatten(2).sum(2) / image.flatten(2).sum(2)


def partial(image, t, condition):
    """A network that goes seven tenths of the way between the centres of mass, and always half a voxel astray."""
    way = centre(image) - centre(condition[:, :1])
    way = 0.7 * way + torch.tensor([0.0, 0.5, 0.0])
    return way.view(-1, 3, 1, 1, 1).expand(-1, 3, *image.shape[2:])


MOVING, FIXED = ball(9.0, 12.0, 12.0), ball(13.0, 12.0, 10.0)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_goes_on_where_the_last_one_ended(rounds):
    field = best_field(partial, MOVING, FIXED, config(rounds=rounds, symmetric=False))
    left = (centre(warp(MOVING, field)) - centre(FIXED))[0]
    torch.testing.assert_close(left[0], torch.tensor(-4.0 * 0.3 ** rounds), atol=0.02, rtol=0)
    torch.testing.assert_close(left[2], torch.tensor(2.0 * 0.3 ** rounds), atol=0.02, rtol=0)
    assert abs(float(left[1])) > 0.4


def test_both_directions_cancel_what_does_not_depend_on_the_direction():
    field = best_field(partial, MOVING, FIXED, config(rounds=2, symmetric=True))
    left = (centre(warp(MOVING, field)) - centre(FIXED))[0]
    torch.testing.assert_close(left, torch.tensor([-0.36, 0.0, 0.18]), atol=0.03, rtol=0)


def test_one_question_is_what_training_asks():
    net = build_network(cfg := config(rounds=1, symmetric=False)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        asked = align(net, MOVING, FIXED, cfg)
        assert float(asked.abs().max()) > 0.01
        assert torch.equal(best_field(net, MOVING, FIXED, cfg), asked)


def test_the_other_way_round_is_the_inverse_and_nothing_folds():
    velocity = 2 * torch.sin(identity((24, 24, 24), "cpu") / 4.0).flip(1)

    def rough(image, t, condition):
        """Answers that fold and that are no inverses of each other, but for what is their own of each direction."""
        sign = torch.where(centre(image)[:, 0] < 11, 1.0, -1.0).view(-1, 1, 1, 1, 1)
        return sign * velocity + 1.5 * torch.cos(identity((24, 24, 24), "cpu"))

    cfg = config(rounds=1, symmetric=True)
    there, back = best_field(rough, MOVING, FIXED, cfg), best_field(rough, FIXED, MOVING, cfg)
    inside = (..., slice(6, -6), slice(6, -6), slice(6, -6))
    assert float(there[inside].abs().max()) > 1.0
    assert float(compose(there, back)[inside].abs().max()) < 0.1
    assert folding_percent(rough(MOVING, None, None)) > 0.5
    assert folding_percent(there) == 0.0
    torch.testing.assert_close(there, exponential(velocity))


def test_retrieval_counts_whose_own_condition_is_nearest_to_what_is_its_own():
    generator = torch.Generator().manual_seed(0)
    own = torch.nn.functional.normalize(torch.randn(10, 32, generator=generator), dim=1)
    each, pairs = torch.arange(10), torch.arange(10) // 2
    assert retrieval(own, own, each) == 1.0 and retrieval(own, own.roll(1, 0), each) == 0.0
    assert retrieval(own, torch.cat([own[:6], own[6:].roll(1, 0)]), each) == pytest.approx(0.6)
    swapped = own.reshape(5, 2, 32).flip(1).flatten(0, 1)
    assert (retrieval(own, swapped, each), retrieval(own, swapped, pairs)) == (0.0, 1.0), "both are of one subject"
    assert retrieval(own, own, torch.zeros(10)) is None and retrieval(own[:1], own[:1], each[:1]) is None, "no other"
    common = 50 * torch.ones(32)
    alike = [torch.nn.functional.normalize(one + common, dim=1) for one in (own, own.roll(3, 0))]
    assert retrieval(alike[0], alike[0], each) == 1.0, "what all have in common does not count"
    assert retrieval(alike[0], alike[1], each) == 0.0
    many = torch.randn(2, 2000, 16, generator=generator)
    assert retrieval(*many, torch.arange(2000)) == pytest.approx(1 / 2000, abs=0.003), "chance"


def test_a_single_volume_is_not_registered_to_itself():
    """At that every network is perfect, so the first checkpoint would be the best for ever."""
    assert validate_registration(None, [FIXED]) == ([], None)


def test_what_lies_outside_the_masks_does_not_decide_which_checkpoint_is_the_best():
    mask = np.ones((24, 24, 24), np.int16)
    mask[14:] = 0
    scores = []
    for lesion in (0.0, 1.0):
        images = [volume[0].clone() for volume in (MOVING, FIXED)]
        images[1][:, 14:] += lesion * torch.rand(10, 24, 24, generator=torch.Generator().manual_seed(1))
        dataset = VolumeDataset([{"id": name, "label": None, "mask": "m", "subject": name} for name in "ab"],
                                images, None, None, masks=[mask, mask])
        dataset.image = images.__getitem__
        run = SimpleNamespace(cfg=config(masks=True, rounds=1, symmetric=False), ranks=Ranks(),
                              net=lambda image, *_: torch.zeros(1, 3, 24, 24, 24), device=torch.device("cpu"))
        scores.append([score["val_imgsim"] for _, score in validate_registration(run, dataset)[0]])
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and 0 < scores[0][0] < 1


def held_out(count, labelled=(), rule=None):
    items = [{"id": f"s_{number}", "label": "there" if number in labelled else None} for number in range(count)]
    return SimpleNamespace(items=items, rule=rule)


@pytest.mark.parametrize("count, pairs, scored", [(2, 20, 2), (4, 20, 12), (30, 20, 20)])
def test_no_pair_is_scored_twice_and_every_volume_serves_about_equally_often(count, pairs, scored):
    cfg = {"run.seed": 3, "run.val_pairs": pairs}
    found = validation_pairs(cfg, held_out(count))
    assert len(found) == len(set(found)) == scored and all(moving != fixed for moving, fixed in found)
    for side in zip(*found):
        often = [side.count(number) for number in range(count)]
        assert max(often) - min(often) <= 1
    assert found == validation_pairs(cfg, held_out(count))
    assert count == 2 or found != validation_pairs({**cfg, "run.seed": 4}, held_out(count))


@pytest.mark.parametrize("seed", range(5))
def test_pairs_with_labels_are_scored_first(seed):
    found = validation_pairs({"run.seed": seed, "run.val_pairs": 20}, held_out(10, labelled=(1, 4, 8)))
    assert len(set(found)) == 20 and {one for pair in found[:6] for one in pair} == {1, 4, 8}


def test_only_permitted_pairs_are_scored():
    rule = {"subject": np.array([0, 0, 1, 1, 2]), "modality": np.array([0, 1, 0, 1, 0]), "subjects": "same",
            "modalities": "different"}
    cfg = {"run.seed": 0, "run.val_pairs": 20}
    assert sorted(validation_pairs(cfg, held_out(5, rule=rule))) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    other = validation_pairs(cfg, held_out(5, rule={**rule, "subjects": "any"}))
    both_ways = [(0, 1), (0, 3), (1, 2), (1, 4), (2, 3), (3, 4)]
    assert sorted(other) == sorted(both_ways + [(fixed, moving) for moving, fixed in both_ways])


def test_every_rank_scores_as_many_pairs_and_each_pair_counts_once():
    shares = [cases_of_rank(3, Ranks(rank=rank, world_size=2)) for rank in range(2)]
    assert shares == [[(0, True), (2, True)], [(1, True), (0, False)]]


def test_what_scores_depend_on_besides_the_network_makes_them_incomparable():
    cfg = config()
    first = measured_on(cfg, held_out(4))
    assert first == measured_on({**cfg, "optim.lr": 1.0, "run.val_every": 7}, held_out(4)) and len(first) == 16
    changes = [{"run.val_pairs": 3}, {"registration.rounds": 5}, {"registration.symmetric": False},
               {"registration.similarity": "mind"}, {"run.seed": 9}, {"data.img_size": [8, 8, 8]},
               {"data.spacing_mm": 3.5}, {"diffusion.v_scale": 0.5}, {"registration.masks": True}]
    others = [measured_on({**cfg, **change}, held_out(4)) for change in changes]
    others += [measured_on(cfg, held_out(5)), measured_on(cfg, held_out(4, labelled=(1, 2)))]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("modes, best", [
    (["diffusion", "contrastive", "registration"], ("val_dice", 0.7)), (["registration"], ("val_dice", 0.7)),
    (["diffusion", "contrastive"], ("-val_ang", 0.2)), (["contrastive"], ("val_retrieval", 0.9)),
    (["fourth"], ("val_dice", 0.7)), (["diffusion", "fourth"], ("-val_ang", 0.2))])
def test_a_mode_that_is_trained_decides_which_checkpoint_is_the_best(modes, best):
    scores = {"val_ang": -0.2, "val_retrieval": 0.9, "val_dice": 0.7, "val_imgsim": 0.8}
    assert best_by(scores, modes) == best and best_by({}, modes) is None
    assert best_by(dict.fromkeys(scores), modes) is None, "nothing that validation gave was finite"


@pytest.mark.parametrize("value, known", [(0.3, True), (None, False), (float("nan"), False), (float("inf"), False)])
def test_only_a_number_can_be_the_best(value, known):
    assert (best_by({"val_imgsim": value}, ["registration"]) is not None) is known
