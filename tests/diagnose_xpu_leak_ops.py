"""Which operation leaks: each of those a step is made of by itself, forward and backward, twenty times.

    python tests/diagnose_xpu_leak_ops.py [--scale 0.125] [--device cpu] [--only ConvTranspose3d UpsampleConv]

Recorded on one Intel driver: ConvTranspose3d took 0.335 GiB with every step, the whole network that had it 1.15, and
UpsampleConv, which replaced it, nothing. Scripts/bash_verify_fix.sh compares these two. Shapes are those of production;
--scale makes them smaller.
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from Diffusion.blocks import UpsampleConv, conv  # noqa: E402
from Diffusion.networks import build_network  # noqa: E402
from Diffusion.networks_older import TransposedConv  # noqa: E402
from Diffusion.om_net import AttentionBlock  # noqa: E402
from Runtime.device import autocast  # noqa: E402
from Runtime.errors import STOP, InputError  # noqa: E402
from tests.diagnose_xpu_leak import configuration  # noqa: E402
from tests.leaks import chosen, parse_arguments, scaled, start, tell, watch  # noqa: E402


def volume(channels, side, device, batch=1):
    return torch.rand(batch, channels, side, side, side, device=device)


def upsampling(kind, scale, device):
    """256 channels of 8^3 to a field of 128^3."""
    side, channels = scaled(8, scale, 2), scaled(256, scale, 8, 8)
    layer = TransposedConv(3, channels, 3, 16) if kind == "ConvTranspose3d" else UpsampleConv(3, channels, 3)
    layer, x = layer.to(device), volume(channels, side, device)
    return lambda: layer(x, [16 * side] * 3).float().square().mean(), layer.parameters()


def encoder(scale, device):
    """Five convolutions, four of them with stride 2: 1 channel of 128^3 to 256 of 8^3."""
    widths = [1, *[scaled(count, scale, 8, 8) for count in (16, 32, 64, 128, 256)]]
    layers = [conv(3, a, b, stride=1 if a == 1 else 2) for a, b in zip(widths, widths[1:])]
    net, x = nn.Sequential(*layers).to(device), volume(1, scaled(128, scale, 16, 16), device)
    return lambda: net(x).float().square().mean(), net.parameters()


def sampling(scale, device):
    """grid_sample of 128^3 at its own places, moved a little."""
    side = scaled(128, scale, 8)
    x, places = volume(1, side, device), torch.eye(3, 4, device=device)[None]
    grid = (F.affine_grid(places, x.shape, align_corners=True) * 0.99).requires_grad_()
    return lambda: F.grid_sample(x, grid, align_corners=True).square().mean(), [grid]


def convolution(scale, device):
    """16 to 32 channels of 64^3."""
    layer, x = conv(3, 16, 32).to(device), volume(16, scaled(64, scale, 8), device)
    return lambda: layer(x).float().square().mean(), layer.parameters()


def attention(scale, device):
    """One transformer block over 512 tokens."""
    width = scaled(768, scale, 32, 32)
    layer, x = AttentionBlock(width, 4).to(device), torch.rand(1, 512, width, device=device)
    return lambda: sum(layer(x)).float().square().mean(), layer.parameters()


def interpolation(scale, device):
    """32^3 to 256^3."""
    side = scaled(32, scale, 4)
    x = volume(3, side, device).requires_grad_()
    return lambda: F.interpolate(x, size=[8 * side] * 3, mode="trilinear", align_corners=False).square().mean(), [x]


def adam(scale, device):
    """Adam's step on 16 M weights; the loss is their mean square."""
    weights = nn.Parameter(torch.rand(scaled(2 ** 24, scale ** 3, 1000), device=device))
    return lambda: weights.square().mean(), [weights]


def network(scale, device):
    """All of OM_net."""
    cfg = configuration(scale)
    net, image = build_network(cfg, device), volume(1, cfg["data.img_size"][0], device)
    t, condition = torch.zeros(1, dtype=torch.long, device=device), torch.cat([image, torch.ones_like(image)], dim=1)
    return lambda: net(image, t, condition).square().mean(), net.parameters()


OPERATIONS = {
    "ConvTranspose3d 256->3 8^3->128^3": lambda *more: upsampling("ConvTranspose3d", *more),
    "UpsampleConv 256->3 8^3->128^3": lambda *more: upsampling("UpsampleConv", *more),
    "stacked Conv3d 1->256 128^3->8^3": encoder,
    "grid_sample 128^3": sampling,
    "Conv3d 16->32 64^3": convolution,
    "attention 512 tokens": attention,
    "interpolate 32^3->256^3": interpolation,
    "Adam": adam,
    "OM_net": network,
}


def make_iteration(name, scale, device):
    """A function of nothing: forward and backward, and for Adam its step."""
    loss_of, parameters = OPERATIONS[name](scale, device)
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=1e-5)

    def iteration():
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, "bf16"):
            loss = loss_of()
        loss.backward()
        if name == "Adam":
            optimizer.step()

    return iteration


def main(argv=None):
    args = parse_arguments("Which of the operations that a training step is made of leaks memory.", argv)
    try:
        if args.overrides:
            raise InputError("--set has no effect on single operations; it is for tests/diagnose_xpu_leak.py.")
        device, results = start(args), {}
        for name in chosen(OPERATIONS, args.only):
            results[name] = watch(name, make_iteration(name, args.scale, device), device, args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    return tell(results, device, args)


if __name__ == "__main__":
    sys.exit(main())
