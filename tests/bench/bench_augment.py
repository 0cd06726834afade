"""What deformed copies are worth to a small segmentation network that learns from a few labelled volumes.

    python tests/bench/bench_augment.py [--checkpoint Models/hippocampus_om_net] [--shots 1 2] [--resume]

Hippocampus (real MR crops of ../shared/data/hippocampus, 1 mm, two labels). The labelled volumes are drawn from ids
1-60; the others of these ids serve without labels. Dice is measured on all volumes of ids 231-280; settings were tuned
with --test-ids 201-230. The methods:
  none            the labelled volumes as they are
  elastic         MONAI's Rand3DElasticd with the settings of its tutorials: sigma 5-7 voxels, magnitude 50-150
  elastic_strong  the same with magnitude 150-350
  registration    no training: each labelled volume is registered to the test volume (affine stage and refinement,
                  without a network), and the carried labels vote
  random          ours, --model none: random deformations at the times --start, local ones (OURS), because crops around
                  one structure do not differ in shape by larger shifts
  recovered       ours: random deformations, then recovery by the checkpoint's network (only with --checkpoint)
  towards         ours: recovery towards another, unlabelled volume of ids 1-60 (only with --checkpoint)
  moved           ours: the labelled volume registered to unlabelled ones, as in `registration`, with its own
                  intensities and label
  transferred     the same fields, with the unlabelled volume's intensities: that volume and the carried label
  network         ours: like `registration`, by the checkpoint's network and refinement (only with --checkpoint)
Each volume is deformed --draws times, once for all trainings, on its own grid, with linear interpolation for images and
the nearest voxel beyond the border, then cropped or padded to the network's grid. A training sample is a draw with
probability SHARE, else the volume itself. The config's augment.* (affine, gamma) is added to the samples of every
method, including `none`: without it the spread over seeds exceeds the differences between methods. All
methods share the network (three levels, 0.1 M weights), its initial weights, the order of volumes and the step count.

Protocol, fixed before the test volumes were scored: the volumes are shuffled --subsets times; --shots K takes the first
K of each order. Dice is the mean over labels and volumes, then over the --seeds trainings of a subset. The gain of
--ours is its difference from the best of the other methods (the first four), paired by subset, with the 95 % confidence
interval of the mean by Student's t. Draws and scores are written immediately; --resume continues.
"""
import argparse
import itertools
import json
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT, in_one_sentence, interval, kept_json, our_commit
from torch import nn
from tqdm import tqdm

from Dataloader.datalist import read_datalist
from Dataloader.grids import intensity_range, rescale, to_grid
from Dataloader.nifti import read_label, read_volume
from Diffusion.batch_augment import augment as common_augment
from Diffusion.batch_augment import random_affine
from Diffusion.fields import affine_field, warp
from Diffusion.metrics import average, dice
from Inference.augmentation import augment, pick_target, subject_number
from Inference.labels import apply_label, vote
from Inference.load_model import find_checkpoint, load_model
from Inference.registration import register
from Report.page import text_table
from Runtime.config import load_config
from Runtime.device import autocast
from Runtime.errors import DONE, InputError
from Runtime.files import sha256, write_file
from Runtime.keyed_random import generator, uniform

DATA = ROOT.parent / "shared/data/hippocampus"
CONFIG = ROOT / "Config/config_hippocampus.yaml"
OTHERS = ("none", "elastic", "elastic_strong", "registration")
METHODS = (*OTHERS, "random", "recovered", "towards", "moved", "transferred", "network")
BROUGHT = ("registration", "network")  # no segmentation is trained
BY_NETWORK = ("recovered", "towards", "network")  # only with a checkpoint
CARRIED = ("moved", "transferred")  # by the fields of `registration`
MAGNITUDE = {"elastic": (50, 150), "elastic_strong": (150, 350)}
SIGMA = (5, 7)
OURS = ["diffusion.grids=[16,32]", "diffusion.v_scale=1.6e-4"]  # tuned on 201-230; for `random`
REFINE = 100  # steps, for the methods that register
TRAIN_IDS, LABELS, BATCH = "1-60", (1, 2), 2
LR = 5e-3  # tuned on 201-230 with `none`: after 200 steps 0.740, with 2e-3 0.722, with 1e-2 0.727
WIDTHS = (8, 16, 32)
SHARE = 0.8  # how often a sample is a draw


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Segmentation learned from a few volumes, by how they were augmented.")
    parser.add_argument("--data", default=str(DATA), help="volumes with labels 1 and 2 (%(default)s)")
    parser.add_argument("--checkpoint", help="model of the methods recovered, towards and network")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME",
                        help=f"some of {', '.join(METHODS)} (all that there is a network for)")
    parser.add_argument("--shots", nargs="+", type=int, default=[1, 2, 5, 10], metavar="K",
                        help="how many volumes have labels (1 2 5 10)")
    parser.add_argument("--subsets", type=int, default=8, metavar="N", help="of the volumes (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="trainings of each subset (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of a training (%(default)s)")
    parser.add_argument("--draws", type=int, default=32, help="deformed copies of each volume (%(default)s)")
    parser.add_argument("--start", default="10-50", help="time or times of the random deformations (%(default)s)")
    parser.add_argument("--ours", choices=METHODS, default="moved", metavar="NAME",
                        help="which of ours is compared with the best of the others (%(default)s)")
    parser.add_argument("--test-ids", default="231-280", help="held-out volumes (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder of --out; several "
                        "processes may fill it at once, each with other --methods")
    parser.add_argument("--out", type=Path, default=ROOT / "Logs/bench_augment", metavar="FOLDER")
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
    """A function that deforms (image, label) by MONAI's Rand3DElasticd; the third result is empty."""
    try:
        from monai.transforms import Rand3DElasticd
    except ImportError:
        raise InputError("the methods elastic and elastic_strong need MONAI: pip install -r requirements-bench.txt, or "
                         "name other --methods.") from None
    transform = Rand3DElasticd(["image", "label"], SIGMA, magnitude, prob=1.0, padding_mode="border",
                               mode=["bilinear", "nearest"])

    def deform(image, label, affine, identity, number):
        transform.set_random_state(seed=number)
        found = transform({"image": image[None], "label": label[None].astype(np.float32)})
        found = {key: np.asarray(value) for key, value in found.items()}
        return found["image"][0], found["label"][0].astype(label.dtype), None

    return deform


def ours(model, args, cfg, targets=()):
    """A function that deforms (image, label), for each draw towards another one of the targets, if there are any."""
    def deform(image, label, affine, identity, number):
        others = [target for target in targets if target[0] != identity]
        shown = pick_target(others, (0, subject_number(identity), number)) if others else (None, None, None)
        return augment(image, label, affine, model, args.start or None, draw=number, target=shown[1],
                       target_affine=shown[2], subject=identity, cfg=cfg)

    return deform


def draw_copies(method, volume, unlabelled, model, args, cfg):
    """Deformed copies of one volume on the network's grid: list of (image, label).

    volume: (id, image, label, affine). unlabelled: the volumes of ids 1-60, whose labels nobody looks at. model: (net,
    config) of the checkpoint.
    """
    identity, image, label, affine = volume
    limits = intensity_range(image, *cfg["data.percentiles"])
    if method in MAGNITUDE:
        deform = elastic(MAGNITUDE[method])
    else:
        deform = ours(None if method == "random" else model, args, cfg,
                      [(other[0], other[1], other[3]) for other in unlabelled] if method == "towards" else ())
    copies = []
    for number in tqdm(range(args.draws), f"drawing {method} of {identity}", unit="copy", leave=False):
        copy, moved, _ = deform(image, label, affine, identity, number)
        copies.append(on_grid(copy, moved, affine, limits, cfg))
    return copies


def bring(volume, others, model, cfg, shown, labels):
    """Register a labelled volume to others: for each (moved image, moved label), on the grid of that other.

    model: (net, config), or None for affine stage and refinement by `cfg`. labels: as for `apply_label`.
    """
    _, image, label, affine = volume
    how = {"model": model, "affine": False, "start": "centre"} if model else {"affine": True, "config": cfg}
    for _, target, _, target_affine in tqdm(others, f"{shown} {volume[0]}", unit="vol", leave=False):
        found = register((target, target_affine), (image, affine), refine=REFINE, **how)
        yield found.warped, apply_label(label, affine, found.field, target_affine, labels)


def brought_copies(volume, unlabelled, args, cfg):
    """{"moved", "transferred"}: copies of one volume on the grids of others, with its own intensities and with theirs.
    """
    order = random.Random(volume[0]).sample([other for other in unlabelled if other[0] != volume[0]],
                                            min(args.draws, len(unlabelled) - 1))
    copies, limits = {"moved": [], "transferred": []}, intensity_range(volume[1], *cfg["data.percentiles"])
    for other, (warped, label) in zip(order, bring(volume, order, None, cfg, "carrying", "nearest")):
        own_limits = intensity_range(other[1], *cfg["data.percentiles"])
        copies["moved"].append(on_grid(warped, label, other[3], limits, cfg))
        copies["transferred"].append(on_grid(other[1], label, other[3], own_limits, cfg))
    return copies


def kept(path, settings, resume):
    """The arrays of an .npz file that was made with these settings; None where there is none."""
    if not (resume and path.is_file()):
        return None
    with np.load(path) as found:
        return dict(found) if found["settings"].item() == settings else None


def keep(path, settings, **arrays):
    write_file(path, lambda file: np.savez_compressed(file, settings=settings, **arrays))


def pool_of(method, volume, unlabelled, model, args, cfg):
    """The samples of one volume by one method, the volume itself first: list of (image, label); drawn only once."""
    limits = intensity_range(volume[1], *cfg["data.percentiles"])
    itself = [on_grid(*volume[1:], limits, cfg)]
    if method == "none":
        return itself
    drawn = () if method in CARRIED else (args.start,)
    settings = json.dumps([str(args.data), args.draws, *drawn, cfg, weights_of(method, args), our_commit()],
                          sort_keys=True)
    path = args.out / "copies" / method / f"{volume[0]}.npz"
    found = kept(path, settings, args.resume)
    if found is None:
        if method in CARRIED:
            made = brought_copies(volume, unlabelled, args, cfg)
        else:
            made = {method: draw_copies(method, volume, unlabelled, model, args, cfg)}
        for name, copies in made.items():
            images, labels = (torch.stack(parts).numpy() for parts in zip(*copies))
            keep(args.out / "copies" / name / f"{volume[0]}.npz", settings, images=images.astype(np.float16),
                 labels=labels.astype(np.uint8))
        found = kept(path, settings, True)
    return itself + [(torch.from_numpy(image).float(), torch.from_numpy(label).float())
                     for image, label in zip(found["images"], found["labels"])]


def weights_of(method, args):
    """What identifies the network of a method, None where there is none."""
    if method not in BY_NETWORK:
        return None
    return sha256(find_checkpoint(args.checkpoint))


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
    """Cross entropy plus one minus soft Dice. label: (B, 1, *size) float32, of 2 or 3 axes."""
    target = label[:, 0].long()
    shares, hot = logits.softmax(1), F.one_hot(target, logits.shape[1]).movedim(-1, 1).float()
    voxels = [0, *range(2, logits.ndim)]
    both, sizes = (shares * hot).sum(voxels), (shares + hot).sum(voxels)
    return F.cross_entropy(logits, target) + 1 - (2 * both / (sizes + 1))[1:].mean()


def batch_of(pool, seed, step, common):
    """Images and labels of one step, each (BATCH, 1, *size). common: config of the common augmentation."""
    rng_keys = [(seed, step, sample) for sample in range(BATCH)]
    chosen = []
    for volume, drawn, number in uniform(rng_keys, "sample", 3).tolist():
        versions = pool[int(volume * len(pool))]
        last = len(versions) - 1
        chosen.append(versions[1 + int(number * last) if last and drawn < SHARE else 0])
    image, label = (torch.stack(parts) for parts in zip(*chosen))
    matrix = random_affine(rng_keys, 3, image.shape[2:], common)
    label = warp(label, affine_field(matrix, label.shape[2:]), mode="nearest", padding="border")
    return common_augment(image, rng_keys, common), label


def train(pool, seed, args, cfg, name):
    """A network after --steps steps. Its weights begin the same for every method."""
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2 ** 31, (), generator=generator(seed, "segmentation weights"))))
        net = UNet().to(memory_format=torch.channels_last_3d)

    def batch_at(step):
        image, label = batch_of(pool, seed, step, cfg)
        return image.to(memory_format=torch.channels_last_3d), label

    return fit(net, batch_at, args.steps, LR, cfg["run.amp"], name)


def fit(net, batch_at, steps, rate, amp, name):
    """Teach a network to segment, and return it. batch_at(step): images and labels of a step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in tqdm(range(steps), name, unit="step", leave=False):
        image, label = batch_at(step)
        optimizer.zero_grad(set_to_none=True)
        with autocast(image.device, amp):
            logits = net(image)
        loss_of(logits.float(), label).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


@torch.no_grad()
def score(net, held_out):
    """Dice, averaged over labels and held-out volumes."""
    return average([average(dice(net(image[None]).argmax(1)[0], label[0], LABELS)) for image, label in held_out])


# ---------------------------------------------------------------------------------------------------------------------
# Registration instead of a training
# ---------------------------------------------------------------------------------------------------------------------

def brought_labels(method, volume, tests, model, args, cfg):
    """The labels that a volume brings to each test volume, on the network's grid: (tests, *size) uint8."""
    path = args.out / "brought" / method / f"{volume[0]}.npz"
    settings = json.dumps([str(args.data), args.test_ids, cfg, weights_of(method, args), our_commit()], sort_keys=True)
    found = kept(path, settings, args.resume)
    if found is None:
        labels = [on_grid(test[1], label, test[3], (0.0, 1.0), cfg)[1][0].numpy()
                  for test, (_, label) in zip(tests, bring(volume, tests, model, cfg, "registering", "smooth"))]
        keep(path, settings, labels=np.stack(labels).astype(np.uint8))
        found = kept(path, settings, True)
    return found["labels"]


def score_registration(method, labelled, tests, held_out, model, args, cfg):
    """Dice of what labelled volumes bring, averaged over labels and held-out volumes."""
    model = model if method == "network" else None
    brought = [brought_labels(method, volume, tests, model, args, cfg) for volume in labelled]
    voted = (vote([maps[number] for maps in brought])[0] for number in range(len(held_out)))
    return average([average(dice(label, true[0].numpy(), LABELS)) for label, (_, true) in zip(voted, held_out)])


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------

def orders_of(volumes, subsets):
    """The volumes in `subsets` orders, each of which begins with another one; of each order the first ones have labels.
    """
    volumes = sorted(volumes, key=lambda volume: volume[0])
    if subsets > len(volumes):
        raise InputError(f"--subsets {subsets}: there are only {len(volumes)} volumes of ids {TRAIN_IDS}.")
    orders = {}
    for number in itertools.count():
        if len(orders) == subsets:
            return list(orders.values())
        order = random.Random(number).sample(volumes, len(volumes))
        orders.setdefault(order[0][0], order)


def methods_of(args):
    """The methods to score, in the order of the tables. Raises InputError for one named that lacks its network."""
    asked = args.methods or METHODS
    lacking = [method for method in asked if method in BY_NETWORK and not args.checkpoint]
    if lacking and args.methods:
        raise InputError(f"--methods {lacking[0]} needs a network: name one with --checkpoint.")
    if lacking:
        print(f"without --checkpoint {', '.join(lacking)} are left out")
    return [method for method in METHODS if method in asked and method not in lacking]


def run_method(method, volumes, tests, held_out, model, args, cfg):
    """{"shots": {"subset": [Dice of each seed]}}, written after each training."""
    path = args.out / f"{method}.json"
    settings = [str(args.data), args.steps, args.draws, args.test_ids, args.start, cfg, weights_of(method, args),
                our_commit()]
    scores = kept_json(path, settings, args.resume).get("scores", {})
    seeds = 1 if method in BROUGHT else args.seeds
    work = [(shots, number, seed) for shots in args.shots for number in range(args.subsets) for seed in range(seeds)]
    orders = orders_of(volumes, args.subsets)
    for shots, number, seed in tqdm(work, method, unit="training"):
        of_subset = scores.setdefault(str(shots), {}).setdefault(str(number), [])
        if len(of_subset) > seed:
            continue
        labelled = orders[number][:shots]
        if method in BROUGHT:
            of_subset.append(score_registration(method, labelled, tests, held_out, model, args, cfg))
        else:
            pool = [pool_of(method, volume, volumes, model, args, cfg) for volume in labelled]
            of_subset.append(score(train(pool, seed, args, cfg, f"{method}, {shots} volumes"), held_out))
        write_file(path, json.dumps({"settings": settings, "scores": scores}, indent=1) + "\n")
    return scores


def gain(ours, other):
    """Mean difference over the subsets, and its interval. ours, other: Dice of each subset, in the same order."""
    return interval([mine - theirs for mine, theirs in zip(ours, other)])


def publish(results, args, held_out):
    """A table for each number of labelled volumes, and the last line of JSON."""
    summary = {"shots": {}, "gain": {}}
    for shots in map(str, args.shots):
        by_subset = {method: [statistics.fmean(scores[shots][str(number)]) for number in range(args.subsets)]
                     for method, scores in results.items()}
        means = {method: statistics.fmean(values) for method, values in by_subset.items()}
        rivals = [method for method in OTHERS if method in means and method != args.ours]
        best = max(rivals, key=means.get) if args.ours in means and rivals else None
        rows = [[method, means[method], statistics.stdev(values) if len(values) > 1 else None,
                 *(gain(by_subset[args.ours], values) if best and method != args.ours else (None, None, None))]
                for method, values in by_subset.items()]
        print(f"\n{shots} labelled volumes, {args.subsets} subsets, {args.seeds} seeds, {args.steps} steps of {BATCH} "
              f"samples, {len(held_out)} held-out volumes")
        print(text_table(["method", "Dice", "sd of subsets", f"{args.ours} minus it", "95 % from", "to"], rows,
                         [None, *[".4f"] * 5]))
        summary["shots"][shots] = {method: round(mean, 5) for method, mean in means.items()}
        if best:
            mean, low, high = gain(by_subset[args.ours], by_subset[best])
            summary["gain"][shots] = {"best_other": best, "mean": mean, "ci_low": low, "ci_high": high}
    first = next(iter(summary["gain"].values()), {"ci_low": None, "ci_high": None})
    print(json.dumps({**summary, "ci_low": first["ci_low"], "ci_high": first["ci_high"]}))


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    methods = methods_of(args)
    model = load_model(args.checkpoint) if args.checkpoint else None
    cfg = load_config(CONFIG, [*OURS, *args.overrides])
    volumes = read(read_datalist(args.data, 3, TRAIN_IDS))
    if max(args.shots) > len(volumes):
        raise InputError(f"--shots {max(args.shots)}: there are only {len(volumes)} volumes of ids {TRAIN_IDS}.")
    tests = read(read_datalist(args.data, 3, args.test_ids))
    held_out = [on_grid(image, label, affine, intensity_range(image, *cfg["data.percentiles"]), cfg)
                for _, image, label, affine in tests]
    results = {method: run_method(method, volumes, tests, held_out, model, args, cfg) for method in methods}
    publish(results, args, held_out)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
