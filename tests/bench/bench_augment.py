"""What deformed copies are worth: a small segmentation network learns from five labelled volumes, with and without.

    python tests/bench/bench_augment.py [--checkpoint Models/hippocampus_om_net] [--steps 1500] [--seeds 3]

Hippocampus (real MR crops of ../shared/data/hippocampus, 1 mm, two labels), five volumes drawn from ids 1-60, Dice on
all volumes of ids 231-280; settings are tuned with --test-ids 201-230. The methods, of which each but the first deforms
every volume --draws times, once for all trainings:
  none            the five volumes as they are
  random          ours, --model none: random deformations of the times --start, local ones (OURS), since the volumes
                  are crops around the same structure: larger shifts are not what their shapes differ in
  recovered       ours, with the checkpoint's recovery from them (only with --checkpoint)
  towards         ours, with recovery towards another volume of ids 1-60, whose label is not looked at (the same)
  elastic         MONAI's Rand3DElasticd with the settings of its tutorials: sigma 5-7 voxels, magnitude 50-150
  elastic_strong  the same with magnitude 150-350
All volumes are deformed on their own grids, linear for images and nearest neighbour for labels, beyond the border the
nearest voxel; then cropped or padded to the network's grid. In a training a sample is a draw with probability --share,
else the volume itself. The config's augment.* (affine, gamma) is added to the samples of every method, of `none` too:
without it (--no-common) the spread over the seeds is larger than what lies between the methods. Network (three levels,
0.1 M weights), its first weights, the order of the volumes and the number of steps are the same for all methods. Dice
is the mean over labels and volumes; then mean and standard deviation over the seeds.
"""
import argparse
import json
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from Dataloader.datalist import read_datalist  # noqa: E402
from Dataloader.grids import intensity_range, rescale, to_grid  # noqa: E402
from Dataloader.nifti import read_label, read_volume  # noqa: E402
from Diffusion.batch_augment import augment as common_augment  # noqa: E402
from Diffusion.batch_augment import random_affine  # noqa: E402
from Diffusion.fields import affine_field, warp  # noqa: E402
from Diffusion.metrics import average, dice  # noqa: E402
from Inference.augmentation import STRIDE, augment, measure, pick_target, subject_number  # noqa: E402
from Inference.load_model import load_model  # noqa: E402
from OM_augment import read_start  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.device import autocast  # noqa: E402
from Runtime.errors import STOP, InputError  # noqa: E402
from Runtime.keyed_random import generator, uniform  # noqa: E402
from Runtime.page import text_table  # noqa: E402

DATA = ROOT.parent / "shared/data/hippocampus"
CONFIG = ROOT / "Config/config_hippocampus.yaml"
METHODS = ("none", "random", "recovered", "towards", "elastic", "elastic_strong")
MAGNITUDE = {"elastic": (50, 150), "elastic_strong": (150, 350)}
SIGMA = (5, 7)
OURS = ["diffusion.grids=[16,32]", "diffusion.v_scale=1.6e-4"]  # tuned on 201-230; for `random`
TRAIN_IDS, TRAINED, LABELS, BATCH, LR = "1-60", 5, (1, 2), 2, 2e-3
WIDTHS = (8, 16, 32)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Segmentation learned from five volumes, by how they were augmented.")
    parser.add_argument("--data", default=str(DATA), help="volumes with labels 1 and 2 (%(default)s)")
    parser.add_argument("--checkpoint", help="model for the methods `recovered` and `towards`")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of %(default)s")
    parser.add_argument("--steps", type=int, default=1500, help="optimiser steps of a training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method (%(default)s)")
    parser.add_argument("--draws", type=int, default=32, help="deformed copies of each volume (%(default)s)")
    parser.add_argument("--start", default="10-50", help="time or times of the random deformations (%(default)s)")
    parser.add_argument("--stride", type=int, default=STRIDE, help="times per step of the recovery (%(default)s)")
    parser.add_argument("--share", type=float, default=0.8, help="how often a sample is a draw (%(default)s)")
    parser.add_argument("--no-common", action="store_true", help="leave out the config's augment.*, which every method "
                        "has otherwise")
    parser.add_argument("--test-ids", default="231-280", help="held-out volumes (%(default)s)")
    parser.add_argument("--test-volumes", type=int, default=0, help="only the first so many of them; 0: all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of the config, e.g. diffusion.v_scale=6e-5; may be repeated")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# Volumes and their deformed copies
# ---------------------------------------------------------------------------------------------------------------------

def read(items):
    """Images and labels on their own grids: list of (id, image, label, affine)."""
    volumes = []
    for item in items:
        image, affine = read_volume(item["image"])
        volumes.append((item["id"], image, read_label(item["label"])[0], affine))
    return volumes


def on_grid(image, label, affine, limits, cfg):
    """Image in 0 .. 1 and label on the network's grid, both (1, *size) float32."""
    size, spacing = cfg["data.img_size"], cfg["data.spacing_mm"]
    image, _ = to_grid(rescale(image, *limits), affine, size, spacing)
    label, _ = to_grid(label, affine, size, spacing, order=0)
    return torch.from_numpy(image)[None], torch.from_numpy(np.ascontiguousarray(label)).float()[None]


def elastic(magnitude):
    """A function that deforms (image, label) by MONAI's Rand3DElasticd, and finds out by which field."""
    try:
        from monai.transforms import Rand3DElasticd
    except ImportError:
        raise InputError("the methods elastic and elastic_strong need MONAI: pip install -r requirements-bench.txt, or "
                         "name other --methods.") from None
    transform = Rand3DElasticd(["image", "label", "where"], SIGMA, magnitude, prob=1.0, padding_mode="border",
                               mode=["bilinear", "nearest", "bilinear"])

    def deform(image, label, affine, identity, number):
        where = np.indices(image.shape).astype(np.float32)
        transform.set_random_state(seed=number)
        found = transform({"image": image[None], "label": label[None].astype(np.float32), "where": where})
        found = {key: np.asarray(value) for key, value in found.items()}
        return found["image"][0], found["label"][0].astype(label.dtype), found["where"] - where

    return deform


def ours(model, args, cfg, targets=()):
    """A function that deforms (image, label), for each draw towards another one of the targets, if there are any."""
    def deform(image, label, affine, identity, number):
        others = [target for target in targets if target[0] != identity]
        shown = pick_target(others, (0, subject_number(identity), number)) if others else (None, None, None)
        return augment(image, label, affine, model, read_start(args.start), draw=number, stride=args.stride,
                       target=shown[1], target_affine=shown[2], subject=identity, cfg=cfg)

    return deform


def draw_pool(method, volumes, args, cfg):
    """The samples of one method: for each volume a list, the volume itself first; and mean measures of the draws."""
    deform = None
    if method in MAGNITUDE:
        deform = elastic(MAGNITUDE[method])
    elif method != "none":
        items = read_datalist(args.data, 3, TRAIN_IDS) if method == "towards" else []
        deform = ours(None if method == "random" else load_model(args.checkpoint), args, cfg,
                      [(item["id"], *read_volume(item["image"])) for item in items])
    pool, measures = [], []
    for identity, image, label, affine in tqdm(volumes, f"drawing {method}", unit="vol"):
        limits = intensity_range(image, *cfg["data.percentiles"])
        pool.append([on_grid(image, label, affine, limits, cfg)])
        for number in range(args.draws if deform else 0):
            copy, moved, field = deform(image, label, affine, identity, number)
            pool[-1].append(on_grid(copy, moved, affine, limits, cfg))
            measures.append(measure(field.astype(np.float32), affine))
    return pool, {key: average([found[key] for found in measures]) for key in ("mean", "p95", "folding")}


# ---------------------------------------------------------------------------------------------------------------------
# The segmentation
# ---------------------------------------------------------------------------------------------------------------------

def block(inputs, outputs):
    """Two convolutions with normalisation."""
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv3d(channels, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True)]
        layers += [nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A plain 3D U-Net: (B, 1, D, H, W) to (B, 3, D, H, W); sides are multiples of 4."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(block(a, b) for a, b in zip((1, *WIDTHS), WIDTHS))
        self.up = nn.ModuleList(block(WIDTHS[i] + WIDTHS[i + 1], WIDTHS[i]) for i in reversed(range(len(WIDTHS) - 1)))
        self.out = nn.Conv3d(WIDTHS[0], len(LABELS) + 1, 1)

    def forward(self, x):
        skips = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool3d(x, 2) if level else x)                         # 8, 16, 32 channels
            skips.append(x)
        for up, skip in zip(self.up, skips[-2::-1]):
            x = up(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skip], dim=1))
        return self.out(x)


def loss_of(logits, label):
    """Cross entropy plus one minus soft Dice. label: (B, 1, *size) float32."""
    target = label[:, 0].long()
    shares, hot = logits.softmax(1), F.one_hot(target, logits.shape[1]).movedim(-1, 1).float()
    both, sizes = (shares * hot).sum((0, 2, 3, 4)), (shares + hot).sum((0, 2, 3, 4))
    return F.cross_entropy(logits, target) + 1 - (2 * both / (sizes + 1))[1:].mean()


def batch_of(pool, seed, step, share, common):
    """Images and labels of one step, each (BATCH, 1, *size). common: config of the common augmentation, or None."""
    rng_keys = [(seed, step, sample) for sample in range(BATCH)]
    chosen = []
    for volume, drawn, number in uniform(rng_keys, "sample", 3).tolist():
        versions = pool[int(volume * len(pool))]
        last = len(versions) - 1
        chosen.append(versions[1 + int(number * last) if last and drawn < share else 0])
    image, label = (torch.stack(parts) for parts in zip(*chosen))
    if common:
        matrix = random_affine(rng_keys, 3, image.shape[2:], common)
        label = warp(label, affine_field(matrix, label.shape[2:]), mode="nearest", padding="border")
        image = common_augment(image, rng_keys, common)
    return image, label


def train(pool, seed, args, cfg, name):
    """A network after --steps steps. Its weights begin the same for every method."""
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2 ** 31, (), generator=generator(seed, "segmentation weights"))))
        net = UNet().to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in tqdm(range(args.steps), name, unit="step"):
        image, label = batch_of(pool, seed, step, args.share, None if args.no_common else cfg)
        optimizer.zero_grad(set_to_none=True)
        with autocast(image.device, cfg["run.amp"]):
            logits = net(image.to(memory_format=torch.channels_last_3d))
        loss_of(logits.float(), label).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


@torch.no_grad()
def score(net, held_out):
    """Dice of each label, averaged over the held-out volumes."""
    scores = [dice(net(image[None]).argmax(1)[0], label[0], LABELS) for image, label in held_out]
    return [average([values[number] for values in scores]) for number in range(len(LABELS))]


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------

def run_method(method, volumes, held_out, args, cfg):
    pool, measures = draw_pool(method, volumes, args, cfg)
    labels = [score(train(pool, seed, args, cfg, f"{method}, seed {seed}"), held_out) for seed in range(args.seeds)]
    means = [statistics.fmean(values) for values in labels]
    return {"dice": statistics.fmean(means), "sd": statistics.stdev(means) if len(means) > 1 else 0.0,
            **{f"dice_{label}": statistics.fmean(values) for label, values in zip(LABELS, zip(*labels))},
            "deformation_percent": measures["mean"], "deformation_percent_p95": measures["p95"],
            "folding_percent": measures["folding"], "dice_of_seeds": [round(mean, 5) for mean in means]}


def main(argv=None):
    args = parse_arguments(argv)
    try:
        methods = [method.strip() for method in args.methods.split(",")]
        if unknown := [method for method in methods if method not in METHODS]:
            raise InputError(f"--methods {unknown[0]}: the methods are {', '.join(METHODS)}.")
        if not args.checkpoint:
            methods = [method for method in methods if method not in ("recovered", "towards")]
        cfg = load_config(CONFIG, [*OURS, *args.overrides])
        items = read_datalist(args.data, 3, TRAIN_IDS)
        volumes = read(sorted(random.Random(0).sample(items, TRAINED), key=lambda item: item["id"]))
        print(f"trained on {', '.join(volume[0] for volume in volumes)}")
        held_out = [on_grid(image, label, affine, intensity_range(image, *cfg["data.percentiles"]), cfg) for
                    _, image, label, affine in read(read_datalist(args.data, 3, args.test_ids))]
        held_out = held_out[:args.test_volumes or None]
        result = {method: run_method(method, volumes, held_out, args, cfg) for method in methods}
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    header = ["method", "Dice", "sd", *[f"label {label}" for label in LABELS], "deformed %", "95th %", "folded %"]
    rows = [[method, *list(found.values())[:-1]] for method, found in result.items()]
    print(f"\n{len(held_out)} held-out volumes, {args.seeds} seeds, {args.steps} steps of {BATCH} samples")
    print(text_table(header, rows, [None, *[".4f"] * 4, ".2f", ".2f", ".4f"]))
    print(json.dumps({method: {key: round(value, 5) if isinstance(value, float) else value
                               for key, value in found.items()} for method, found in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
