"""The learning rate over a run, and the moving average of the weights."""
import math

import pytest
import torch

from Diffusion.networks import build_network
from Diffusion.optim import ema_weights, learning_rate, load_optimizers, new_ema, update_ema
from tests.tiny import config


def test_warm_up_is_linear_and_a_constant_rate_stays():
    cfg = {"optim.lr": 1e-3, "optim.warmup_steps": 4, "optim.schedule": "constant"}
    assert [learning_rate(cfg, step, step / 100) for step in (0, 1, 3, 4, 99)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]


def test_cosine_ends_at_zero_with_the_last_epoch_and_not_before():
    cfg = {"optim.lr": 2.0, "optim.warmup_steps": 0, "optim.schedule": "cosine"}
    assert learning_rate(cfg, 0, 0.0) == 2.0
    assert learning_rate(cfg, 50, 0.5) == pytest.approx(1.0)
    assert learning_rate(cfg, 99, 0.99) == pytest.approx(1 + math.cos(0.99 * math.pi))
    assert learning_rate(cfg, 99, 0.99) > 0 and learning_rate(cfg, 100, 1.0) == 0 == learning_rate(cfg, 250, 2.5)
    assert learning_rate(cfg, 7, 0.5) == learning_rate(cfg, 700, 0.5)


def test_a_checkpoint_brings_moments_but_not_the_options_of_its_optimizer():
    def after_a_step(**options):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True, **options)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return net, optimizer

    saved, (net, optimizer) = after_a_step(weight_decay=0.0)[1].state_dict(), after_a_step(weight_decay=0.1)
    saved["state"][0]["exp_avg"] += 1.0
    assert not load_optimizers(net, {"shared": optimizer}, saved)
    now = optimizer.state_dict()
    assert now["param_groups"][0]["weight_decay"] == 0.1
    assert all(torch.equal(now["state"][0][name], value) for name, value in saved["state"][0].items())


def test_average_follows_its_definition():
    cfg = config(optim__average=0.5)
    net = build_network(cfg)
    ema = new_ema(net, cfg)
    expected = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for step in range(12):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0 + step)
        update_ema(ema, net, cfg, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * p.detach() for name, p in net.named_parameters()}
    for name, tensor in ema.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-4)


def test_no_average_costs_nothing_and_changes_nothing():
    cfg = config()
    net = build_network(cfg)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    ema = new_ema(net, cfg)
    update_ema(ema, net, cfg, 0)
    with ema_weights(net, ema):
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert ema is None and all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_averaged_weights_are_put_back_even_after_an_error():
    cfg = config(optim__average=0.9)
    net = build_network(cfg)
    ema = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(RuntimeError, match="in the middle"), ema_weights(net, ema):
        assert all(not parameter.any() for parameter in net.parameters())
        raise RuntimeError("in the middle")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
