"""Costs counted without doing the work, against what is known by hand and what is really kept."""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from Runtime.memory import count_costs, weights_and_optimizer_bytes


def test_costs_of_a_linear_layer_are_those_counted_by_hand():
    with FakeTensorMode():
        layer, x = torch.nn.Linear(20, 30), torch.zeros(7, 20)
        flops, kept = count_costs(lambda: layer(x).square().sum(), layer)
    forward = 2 * 7 * 20 * 30
    assert flops == 2 * forward, "forward, and the weights' gradient; the input needs none"
    assert kept == 4 * (7 * 20 + 7 * 30), "the layer keeps its input, the square its own"
    assert weights_and_optimizer_bytes(layer) == 4 * 4 * (20 * 30 + 30)


def test_fake_costs_are_real_costs():
    def network():
        return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.LeakyReLU(), torch.nn.Conv3d(4, 2, 3))

    with FakeTensorMode():
        fake, x = network(), torch.zeros(2, 1, 10, 12, 14)
        counted = count_costs(lambda: fake(x).abs().sum(), fake)
    real, x = network(), torch.zeros(2, 1, 10, 12, 14)
    assert counted == count_costs(lambda: real(x).abs().sum(), real)
