"""Which part of a training step leaks: the network, the deformations, or the ranks' communication?

    python tests/diagnose_xpu_leak.py [--scale 0.125] [--device cpu] [--only DDP]
    torchrun --nproc-per-node 4 tests/diagnose_xpu_leak.py

Four parts, each forward only, with backward, and with the optimizer too, twenty times: the network of config_om.yaml;
DeformDDPM, which deforms a batch for the network (mode 1); the network in DistributedDataParallel; and the same under
no_sync(), which leaves communication out. The first part that grows, and the first kind of pass, is where to look; then
go on with diagnose_xpu_leak_ops.py. With several ranks each watches its own device and the first one reports.
"""
import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import OM_train_3modes as om  # noqa: E402
from Diffusion.diffuser import DeformDDPM  # noqa: E402
from Diffusion.networks import build_network  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.device import autocast, backend  # noqa: E402
from Runtime.errors import STOP, InputError  # noqa: E402
from tests.leaks import chosen, parse_arguments, scaled, start, tell, watch  # noqa: E402

PARTS, PASSES = ("network", "DeformDDPM", "DDP", "DDP no_sync"), ("forward", "backward", "optimizer")


def configuration(scale, overrides=()):
    """config_om.yaml with sides and widths scaled; below 1 the attention is small too. overrides: "key=value"."""
    side = scaled(128, scale, 16, 16)
    grids = [count for count in (8, 16, 32, 64) if count <= side // 2]
    channels = [scaled(count, scale, 8, 8) for count in (16, 32, 64, 128, 256)]
    words = {"data.img_size": side, "diffusion.grids": grids, "model.channels": channels,
             "registration.window": 9 if side >= 64 else 5, "registration.scales": 3 if side >= 64 else 1}
    if scale < 1:
        words.update({"model.attention_width": 32, "model.attention_depth": 2, "model.attention_heads": 2})
    words = [f"{key}={value}" for key, value in words.items()]
    return load_config(ROOT / "Config/config_om.yaml", [*words, *overrides])


def make_iteration(part, kind, cfg, device):
    """A function of nothing that does one iteration: loss forward, then as far as `kind` says."""
    net, ddpm = build_network(cfg, device), DeformDDPM(cfg)
    model = net
    if part.startswith("DDP"):
        model = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [device.index],
                                        find_unused_parameters=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg["optim.lr"])
    images = torch.rand(cfg["data.batchsize"], 1, *cfg["data.img_size"], device=device)
    rng_keys = [(0, 0, number) for number in range(len(images))]
    batch = om.deform_batch(images, rng_keys, ddpm, cfg)

    def iteration():
        silent = model.no_sync() if part == "DDP no_sync" else contextlib.nullcontext()
        optimizer.zero_grad(set_to_none=True)
        with silent, torch.set_grad_enabled(kind != "forward"):
            if part == "DeformDDPM":
                loss, _ = om.step_diffusion(model, om.deform_batch(images, rng_keys, ddpm, cfg), cfg)
            else:
                with autocast(device, cfg["run.amp"]):
                    loss = model(batch["xt"], batch["t"], batch["condition"]).square().mean()
            if kind != "forward":
                loss.backward()
        if kind == "optimizer":
            optimizer.step()

    return iteration


def main(argv=None):
    args = parse_arguments("Which part of a training step leaks memory: forward, backward or optimizer of the network, "
                           "of DeformDDPM, of DDP with and without no_sync.", argv)
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    try:
        device, cfg = start(args, local_rank), configuration(args.scale, args.overrides)
        names = chosen([f"{part}, {kind}" for part in PARTS for kind in PASSES], args.only)
        if "RANK" in os.environ:
            dist.init_process_group(backend(device))
        else:
            dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
        results = {}
        for name in names:
            iteration = make_iteration(*name.split(", "), cfg, device)
            results[name] = watch(name, iteration, device, args, shown=rank == 0)
            del iteration
        dist.destroy_process_group()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    return tell(results, device, args) if rank == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
