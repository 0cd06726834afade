"""What registration makes of a network's answers: rounds, and both directions; whom mode 2 knows."""
import pytest
import torch

from Diffusion.fields import compose, exponential, identity, warp
from Diffusion.metrics import folding_percent
from Diffusion.networks import build_network
from Diffusion.predict import align, best_field
from Diffusion.validation import best_by, retrieval, validate_registration
from Runtime.config import load_config
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
    common = 50 * torch.ones(32)
    alike = [torch.nn.functional.normalize(one + common, dim=1) for one in (own, own.roll(3, 0))]
    assert retrieval(alike[0], alike[0], each) == 1.0, "what all have in common does not count"
    assert retrieval(alike[0], alike[1], each) == 0.0
    many = torch.randn(2, 2000, 16, generator=generator)
    assert retrieval(*many, torch.arange(2000)) == pytest.approx(1 / 2000, abs=0.003), "chance"


def test_a_single_volume_is_not_registered_to_itself():
    """At that every network is perfect, so the first checkpoint would be the best for ever."""
    assert validate_registration(None, [FIXED]) == ([], None)


@pytest.mark.parametrize("value, known", [(0.3, True), (None, False), (float("nan"), False), (float("inf"), False)])
def test_only_a_number_can_be_the_best(value, known):
    assert (best_by({"val_imgsim": value}, True) is not None) is known
