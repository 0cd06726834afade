"""The training step as it is computes what the plainly written one does: values, gradients, weights after steps."""
import copy

import numpy as np
import pytest
import torch

import OM_train_3modes as om
from Dataloader.synthetic import make_subject
from Diffusion.diffuser import DeformDDPM
from Diffusion.embeddings import new_queue, push
from Diffusion.networks import build_network
from tests import plain_step
from tests.tiny import config

WAYS = (om, plain_step)


def prepared(**changes):
    """Config in float32, a network whose heads are not zero any more, and volumes."""
    cfg = config(run__amp="off", data__img_size=24, registration__scales=2, **changes)
    net = build_network(cfg)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.02 * noise)
    images = [make_subject(number, 24, dims=cfg["model.dims"])["image"] for number in range(4)]
    return cfg, net, torch.from_numpy(np.stack(images))[:, None]


def results(way, net, cfg, volumes, batch):
    """Terms and gradients of modes 1 and 3: two dicts by mode."""
    terms, gradients, pair = {}, {}, {"moving": volumes[:2], "fixed": volumes[2:]}
    for mode, compute in (("diffusion", lambda: way.step_diffusion(net, batch, cfg)),
                          ("registration", lambda: way.step_registration(net, pair, cfg))):
        net.zero_grad(set_to_none=True)
        loss, found = compute()
        loss.backward()
        terms[mode] = {name: value.item() for name, value in found.items()}
        gradients[mode] = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return terms, gradients


@pytest.mark.parametrize("dims", [2, 3])
def test_values_and_gradients_are_those_of_the_plain_step(dims):
    cfg, net, volumes = prepared(model__dims=dims)
    batch = om.deform_batch(volumes[:2], [(0, 0, 0), (0, 0, 1)], DeformDDPM(cfg), cfg)
    (terms, gradients), (plain_terms, plain_gradients) = (results(way, net, cfg, volumes, batch) for way in WAYS)
    for mode in terms:
        assert terms[mode] == pytest.approx(plain_terms[mode], rel=1e-4, abs=1e-7), mode
        difference = (gradients[mode] - plain_gradients[mode]).norm() / plain_gradients[mode].norm()
        assert plain_gradients[mode].norm() > 0 and difference < 1e-3, (mode, difference)


@pytest.mark.parametrize("dims", [2, 3])
def test_deformations_are_those_of_composing_one_after_the_other(dims):
    """Squaring interpolates less often, so the two differ by that: by some percent at the largest times."""
    cfg, _, volumes = prepared(model__dims=dims)
    ddpm, plain, rng_keys = DeformDDPM(cfg), plain_step.PlainDDPM(cfg), [(0, 0, number) for number in range(4)]
    for times, allowed in (([1, 2, 3, 4], 1e-4), ([20, 40, 60, 79], 0.06)):
        (images, fields), (plain_images, plain_fields) = (ddpm.diffuse(volumes, times, rng_keys),
                                                          plain.diffuse(volumes, times, rng_keys))
        assert (fields - plain_fields).norm() / plain_fields.norm() < allowed
        assert (images - plain_images).norm() / plain_images.norm() < allowed


def test_weights_after_three_steps_are_those_of_the_plain_step():
    cfg, net, volumes = prepared()
    ddpm, before, after = DeformDDPM(cfg), copy.deepcopy(net.state_dict()), []
    batches = [om.deform_batch(volumes[:2], [(0, step, 0), (0, step, 1)], ddpm, cfg) for step in range(3)]
    for way in WAYS:
        net.load_state_dict(before)
        # Adam divides by the gradient's size and so turns rounding of gradients near zero into steps of full length.
        optimizer, queue = torch.optim.SGD(net.parameters(), lr=1e-2), new_queue(cfg, "cpu")
        for batch in batches:
            for mode in ("diffusion", "contrastive", "registration"):
                optimizer.zero_grad(set_to_none=True)
                if mode == "diffusion":
                    loss, _ = way.step_diffusion(net, batch, cfg)
                elif mode == "contrastive":
                    known = {**batch, "subjects": torch.arange(2), "queue": queue, "targets": None}
                    loss, _, embeddings = way.step_contrastive(net, known, cfg)
                else:
                    loss, _ = way.step_registration(net, {"moving": volumes[:2], "fixed": volumes[2:]}, cfg)
                loss.backward()
                optimizer.step()
                if mode == "contrastive":
                    push(queue, *embeddings, torch.arange(2))
        after.append(torch.cat([value.flatten() for value in net.state_dict().values()]))
    start = torch.cat([value.flatten() for value in before.values()])
    moved = (after[1] - start).norm()
    assert moved > 0 and (after[0] - after[1]).norm() < 1e-3 * moved
