"""The training step as it is against the same step written plainly (tests/plain_step.py): seconds by mode.

    python tests/compare_3modes_speed.py [--size 40] [--steps 5] [--config Config/config_hippocampus.yaml]

Same network, same volumes, same draws, in turns in one process; "deform" is what modes 1 and 2 share. The first step,
which compiles, is left out; data loading and the optimizer are not measured. The plain correlation is the squared one.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import OM_train_3modes as om  # noqa: E402
from Dataloader.synthetic import make_subject  # noqa: E402
from Diffusion.diffuser import DeformDDPM  # noqa: E402
from Diffusion.embeddings import new_queue  # noqa: E402
from Diffusion.networks import build_network  # noqa: E402
from Report.page import text_table  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.device import describe, pick_device, prepare_device, synchronize  # noqa: E402
from Runtime.errors import DONE, STOP, InputError  # noqa: E402
from tests import plain_step  # noqa: E402

PARTS = ("deform", "diffusion", "contrastive", "registration")


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Seconds of a training step, as it is and written plainly.")
    parser.add_argument("--config", default=str(ROOT / "Config/config_hippocampus.yaml"), help="(%(default)s)")
    parser.add_argument("--size", type=int, default=40, help="voxels a side (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are measured (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or xpu (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: all (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of the config; may be repeated")
    return parser.parse_args(argv)


def one_step(way, net, ddpm, volumes, rng_keys, queue, cfg, device):
    """Seconds of the parts of a step: {part: seconds}. way: OM_train_3modes or plain_step."""
    seconds, subjects = {}, torch.arange(len(volumes), device=device)

    def measured(part, function):
        net.zero_grad(set_to_none=True)
        synchronize(device)
        began = time.perf_counter()
        found = function()
        if part != "deform":
            found[0].backward()
        synchronize(device)
        seconds[part] = time.perf_counter() - began
        return found

    batch = {**measured("deform", lambda: om.deform_batch(volumes, rng_keys, ddpm, cfg)), "subjects": subjects,
             "queue": queue, "targets": None, "moving": volumes, "fixed": volumes.flip(0).roll(1, 2)}
    measured("diffusion", lambda: way.step_diffusion(net, batch, cfg))
    measured("contrastive", lambda: way.step_contrastive(net, batch, cfg))
    measured("registration", lambda: way.step_registration(net, batch, cfg))
    return seconds


def main(argv=None):
    args = parse_arguments(argv)
    try:
        words = [f"data.img_size={args.size}", "registration.squared=true", *args.overrides]
        cfg, device = load_config(args.config, words), pick_device(args.device)
        prepare_device(device, args.threads)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    net, queue = build_network(cfg, device), new_queue(cfg, device)
    dims, count = cfg["model.dims"], cfg["data.batchsize"]
    images = [make_subject(number, cfg["data.img_size"], dims=dims)["image"] for number in range(count)]
    volumes = torch.from_numpy(np.stack(images))[:, None].to(device)
    ways = {"as it is": (om, DeformDDPM(cfg)), "plain": (plain_step, plain_step.PlainDDPM(cfg))}
    found = {name: [] for name in ways}
    for step in tqdm(range(args.steps + 1), "steps"):
        rng_keys = [(0, step, number) for number in range(count)]
        for name, (way, ddpm) in ways.items():
            found[name].append(one_step(way, net, ddpm, volumes, rng_keys, queue, cfg, device))
    medians = {name: {part: statistics.median(one[part] for one in steps[1:]) for part in PARTS}
               for name, steps in found.items()}
    for parts in medians.values():
        parts["step"] = sum(parts.values())
    rows = [[part, 1000 * medians["as it is"][part], 1000 * medians["plain"][part],
             medians["plain"][part] / medians["as it is"][part]] for part in (*PARTS, "step")]
    print(f"{describe(device)}, torch {torch.__version__}, {args.size} voxels a side, batch {count}, medians of "
          f"{args.steps} steps")
    print(text_table(["part", "ms as it is", "ms plain", "plain / as it is"], rows, [None, ".1f", ".1f", ".2f"]))
    print(json.dumps({part: {"ms": round(row[0], 2), "plain_ms": round(row[1], 2), "ratio": round(row[2], 3)}
                      for part, *row in rows}))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
