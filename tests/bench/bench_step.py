"""The share of a three-mode training step that is not the network.

    python tests/bench/bench_step.py [--steps 40]

A step is everything between two batches of the hippocampus config: loading, deforming, losses, clipping, optimizer,
with mode 3 in every step. The network's own time is the forward and backward pass of the same three calls on prepared
inputs, with a given gradient instead of a loss. Both are measured in turns in one process; the first steps, which
compile, are left out. Real volumes come from ../shared/data/hippocampus if present, else synthetic ones of that size.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, hippocampus
from tqdm import tqdm

import OM_train_3modes as om
from Dataloader.dataset import epoch_batches
from Diffusion.diffuser import make_condition
from Report.page import text_table
from Runtime.config import load_config
from Runtime.device import describe, synchronize
from tests.tiny import begin

WARM_UP = 5


def configuration(folder):
    """The hippocampus config with mode 3 always on, and its data."""
    overrides = ["registration.gate=2", "data.repeats=100", "data.cache=", *hippocampus(Path(folder) / "data")]
    return load_config(ROOT / "Config/config_hippocampus.yaml", overrides)


def network_alone(net, batch, moving, fixed, cfg, device):
    """Seconds of forward and backward of the three calls of a step: [diffusion, contrastive, registration]."""
    time_index = torch.full((len(moving),), cfg["diffusion.timesteps"], device=device)
    whole = make_condition(fixed, "volume")
    calls = [lambda: [net(batch["xt"], batch["t"], batch["condition"], batch["use_condition"])],
             lambda: net(batch["xt"], batch["t"], batch["condition"], embed=True),
             lambda: [net(moving, time_index, whole)]]
    seconds = []
    for call in calls:
        net.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        with om.autocast(device, cfg["run.amp"]):
            outputs = call()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(cfg, steps):
    """Seconds of each whole step and of its network alone."""
    run = begin(cfg)
    device, net = run.device, run.net
    steps_of_epoch = iter(epoch_batches(cfg, run.dataset, run.listed, run.progress, run.split, run.ranks,
                                        draw=run.ddpm.draw))
    whole, network = [], []
    for number in tqdm(range(WARM_UP + steps), "steps", file=sys.stderr, leave=False):
        started = time.perf_counter()
        volumes, pairs = next(steps_of_epoch)
        om.train_step(run, volumes, pairs)
        synchronize(device)
        taken = time.perf_counter() - started
        images, positions, _, _ = volumes[0]
        rng_keys = [(cfg["run.seed"], 0, p) for p in positions.tolist()]
        batch, both = om.deform_batch(images.to(device), rng_keys, run.ddpm, cfg), pairs[0][0].to(device)
        alone = network_alone(net, batch, both[0::2], both[1::2], cfg, device)
        if number >= WARM_UP:
            whole.append(taken)
            network.append(alone)
    return device, whole, network


def main():
    parser = argparse.ArgumentParser(description="Share of a three-mode training step that is not the network.")
    parser.add_argument("--steps", type=int, default=40, help="steps to measure (default 40)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cfg = configuration(folder)
        device, whole, network = measure(cfg, args.steps)
    step = statistics.median(whole)
    parts = [statistics.median(part) for part in zip(*network)]
    alone = statistics.median(sum(row) for row in network)
    print(f"hippocampus config, {args.steps} steps, batch {cfg['data.batchsize']}, {describe(device)}, torch "
          f"{torch.__version__}\nmedians; loading, augmentation, deformation, losses, clipping and optimizer count as "
          f"overhead\n")
    rows = [["network, mode 1 (diffusion)", parts[0] * 1e3], ["network, mode 2 (contrastive)", parts[1] * 1e3],
            ["network, mode 3 (registration)", parts[2] * 1e3], ["network alone, all three", alone * 1e3],
            ["whole step", step * 1e3], ["overhead", (step - alone) * 1e3]]
    print(text_table(["part", "ms"], rows, [None, ".1f"]))
    print(f"\nwhole step / network = {step / alone:.2f} (target: at most 1.3)\n")
    result = {"step_s": step, "network_s": alone, "overhead_ratio": step / alone}
    print(json.dumps({name: round(value, 5) for name, value in result.items()}))


if __name__ == "__main__":
    main()
