"""The published method's claim in its own setting: a plain U-Net from a few labelled volumes, by their augmentation.

    python tests/bench/bench_fewshot.py --json [--data brains] [--checkpoint universal] [--resume]

hippocampus (MR crops, 1 mm, two labels): MONAI's U-Net (WIDTHS) learns from 1, 2, 5 or 10 labelled volumes of ids 1-60,
and is scored on all volumes of ids 231-280; all choices (rate, steps, widths) were made on ids 201-230.
brains (whole brains at 3 mm, three tissues): with these choices, it learns from 1, 2 or 5 of the first seven brains and
is scored on the last eight. heart (slices of one person, three labels): it learns from 1, 2 or 5 of the eight slices at
end diastole and is scored on the seven at end systole, with the published settings, and weights as --checkpoint, after
1500 steps; 250 are too few for any row. The rows:
  none              the labelled volumes as they are
  flips_affine      mirrored left to right, rotated by up to 15 degrees, scaled by up to 15 %, shifted by up to 5 %
  elastic           random elastic deformations as in MONAI's tutorials: sigma 5-7 voxels, magnitude 50-150
  nnunet            the set of nnU-Net's trainer, from batchgenerators: rotation to 30 degrees, scaling 0.7-1.4,
                    noise, blur, brightness, contrast, low resolution, gamma, all axes mirrored
  bigaug            the nine operations of BigAug (Zhang et al., IEEE TMI 39, 2020), each with probability 1/2:
                    sharpening, blur, noise, brightness, gamma, perturbation, rotation, scaling, deformation
  random            copies before recovery: random deformations of the diffusion model, times 48, 50, 50, 52, ...
  wide              the same with diffusion.v_scale 1e-4, not 4e-5: as large as between real subjects (bench_spread.py)
  moved             copies registered to unlabelled volumes of the same ids (OM_augment.py --register), of a brain
                    at most six
  recovered         the draws of `random` after recovery by the network of --checkpoint, as in the paper
  towards           the same draws recovered towards these unlabelled volumes, if the network sees a condition
  segmented         no copies: the unlabelled volumes themselves, all of them, with labels that the labelled ones give
                    them by registration (OM_study.py segment)
  moved_affine, wide_affine, recovered_affine, segmented_affine   those samples, with flips_affine on top
  moved_nnunet, recovered_nnunet                                  those copies, with nnunet on top
The simple rows draw anew in every step. Copies are drawn once: 16 of a single volume, 8 of each of two, 4 of each of
five or ten; a sample is a copy with probability SHARE, else the volume itself. Volumes lie on one grid, mean 0,
variance 1. All rows share the network, steps, initial weights and order of the volumes, and add only their own
augmentation. --copies N makes N copies of each volume in all rows; a run with --resume and fewer copies takes the first
ones of an earlier run with more.

Each seed takes other labelled volumes (those of 1 are among those of 2, 5 and 10) and other initial weights. Dice is
the mean over both labels, then over the seeds. Its 95 % interval, and that of the difference from the best simple row
(the first five), are over the test volumes by Student's t. The scores of each seed show the effect of the choice of
labelled volumes. Each cell and each volume's copies have a file; --resume continues.
MONAI and batchgenerators (nnU-Net's set) are in requirements-bench.txt.
"""
import argparse
import functools
import importlib.util
import itertools
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from bench_augment import DATA, ROOT, bring, fit, keep, kept, on_grid, orders_of, read
from common import in_one_sentence, interval, kept_json, our_commit
from scipy import ndimage
from tqdm import tqdm

from Dataloader.datalist import read_datalist
from Dataloader.grids import intensity_range, to_grid
from Dataloader.nifti import read_label, read_volume
from Diffusion.batch_augment import random_affine
from Diffusion.fields import affine_field, warp
from Diffusion.metrics import average, dice
from Inference.augmentation import augment, pick_target, subject_number
from Inference.load_model import find_checkpoint, load_model
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import DONE, InputError
from Runtime.files import sha256, write_file
from Runtime.keyed_random import generator, uniform
from Study.fusion import fuse

SIMPLE = ("none", "flips_affine", "elastic", "nnunet", "bigaug")
COMBINED = {f"{copies}_{on_top}": copies for on_top, kinds in (
    ("affine", ("moved", "wide", "recovered", "segmented")), ("nnunet", ("moved", "recovered"))) for copies in kinds}
COPIES = ("random", "wide", "moved", "recovered", "towards")
METHODS = (*SIMPLE, *COPIES, "segmented", *COMBINED)
MADE = set()  # files of copies that this run has made, which it need not make again
COUNTS = {1: 16, 2: 8}  # copies of each volume, by how many have labels; LEAST of more
WIDE = 1e-4
LEAST, SHARE, START = 4, 0.8, "48+2"
TRAIN_IDS = "1-60"
SETS = {"hippocampus": {"train": TRAIN_IDS, "test": "231-280", "shots": [1, 2, 5, 10], "labels": (1, 2), "grid": {},
                        "config": "Config/config_hippocampus.yaml"},
        "brains": {"train": "1000-1009", "test": "1010-1036", "shots": [1, 2, 5], "labels": (1, 2, 3),
                   "grid": {"data.img_size": [56, 72, 64], "data.spacing_mm": 3.0},
                   "config": "Config/config_hippocampus.yaml"},
        "heart": {"train": "heart1_ed", "test": "heart1_es", "shots": [1, 2, 5], "labels": (1, 2, 3), "grid": {},
                  "config": "Config/config_cmr.yaml", "steps": 1500}}
SIGMA, MAGNITUDE = (5, 7), (50, 150)  # of `elastic`, in voxels
WIDTHS, BATCH, STEPS, LR = (16, 32, 64, 64), 2, 250, 3e-3
TURN = {"augment.rotation": 15.0, "augment.scaling": 0.15, "augment.shift": 0.05, "augment.flip": 0.5}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Few-shot segmentation by how the labelled volumes are augmented.")
    parser.add_argument("--json", action="store_true", help="print the table as one line of JSON (always done)")
    parser.add_argument("--data", choices=SETS, default="hippocampus", help="(%(default)s)")
    parser.add_argument("--checkpoint", default="universal", help="network of the rows with recovery (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="ROW",
                        help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--shots", nargs="+", type=int, metavar="K", help="labelled volumes (1 2 5, and 10 crops)")
    parser.add_argument("--copies", type=int, metavar="N", help="of each labelled volume (16 of one, 8 of each of two, "
                        "4 of each of more)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="choices of volumes (%(default)s)")
    parser.add_argument("--steps", type=int, help=f"of each training ({STEPS}, heart 1500)")
    parser.add_argument("--test-ids", help="volumes to score (those above)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue with what is in the folder of --out")
    parser.add_argument("--out", type=Path, default=ROOT / "Logs/bench_fewshot", metavar="FOLDER")
    args = parser.parse_args(argv)
    args.shots, args.test_ids = args.shots or SETS[args.data]["shots"], args.test_ids or SETS[args.data]["test"]
    args.labels, args.out = SETS[args.data]["labels"], args.out / args.data
    args.steps = args.steps or SETS[args.data].get("steps", STEPS)
    args.counts = {labelled: args.copies or COUNTS.get(labelled, LEAST) for labelled in args.shots}
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Augmentation: a function of (image, label, key) to (image, label), arrays on the grid, for each row that draws anew
# ---------------------------------------------------------------------------------------------------------------------

def warped_by(image, label, field):
    """Both arrays warped by a field (1, N, *size) in voxels."""
    image = warp(torch.from_numpy(image)[None, None], field, padding="border")
    label = warp(torch.from_numpy(label)[None, None], field, mode="nearest", padding="border")
    return image[0, 0].numpy(), label[0, 0].numpy()


def flips_affine(image, label, key):
    return warped_by(image, label, affine_field(random_affine([key], image.ndim, image.shape, TURN), image.shape))


def elastic_field(size, draws, sigma, magnitude):
    """White noise of -1 to 1, smoothed by a Gaussian of `sigma` voxels, times the magnitude: (N, *size) in voxels."""
    width, strength, axes = draws.uniform(*sigma), draws.uniform(*magnitude), range(1, len(size) + 1)
    waves = np.fft.rfftn(draws.uniform(-1, 1, (len(size), *size)), axes=axes)
    smooth = [ndimage.fourier_gaussian(wave, width, size[-1]) for wave in waves]
    return np.float32(strength * np.fft.irfftn(smooth, size, axes=axes))


def elastic(image, label, key, sigma=SIGMA, magnitude=MAGNITUDE, probability=SHARE):
    draws = np.random.default_rng(number_of(key, "elastic"))
    if draws.random() >= probability:
        return image, label
    return warped_by(image, label, torch.from_numpy(elastic_field(image.shape, draws, sigma, magnitude))[None])


@functools.cache
def nnunet_transforms(size):
    """What nnU-Net's trainer does to a patch, with its settings."""
    from batchgenerators.transforms import color_transforms as color
    from batchgenerators.transforms.abstract_transforms import Compose
    from batchgenerators.transforms.noise_transforms import GaussianBlurTransform, GaussianNoiseTransform
    from batchgenerators.transforms.resample_transforms import SimulateLowResolutionTransform
    from batchgenerators.transforms.spatial_transforms import MirrorTransform, SpatialTransform
    angle = (-np.pi / 6, np.pi / 6) if len(size) == 3 else (-np.pi, np.pi)
    return Compose([
        SpatialTransform(size, None, do_elastic_deform=False, do_rotation=True, angle_x=angle, angle_y=angle,
                         angle_z=angle, p_rot_per_axis=1, do_scale=True, scale=(0.7, 1.4), border_mode_data="constant",
                         border_cval_data=0, order_data=3, border_mode_seg="constant", border_cval_seg=0, order_seg=1,
                         random_crop=False, p_rot_per_sample=0.2, p_scale_per_sample=0.2),
        GaussianNoiseTransform(p_per_sample=0.1),
        GaussianBlurTransform((0.5, 1.0), different_sigma_per_channel=True, p_per_sample=0.2, p_per_channel=0.5),
        color.BrightnessMultiplicativeTransform((0.75, 1.25), p_per_sample=0.15),
        color.ContrastAugmentationTransform(p_per_sample=0.15),
        SimulateLowResolutionTransform(zoom_range=(0.5, 1), per_channel=True, p_per_channel=0.5, order_downsample=0,
                                       order_upsample=3, p_per_sample=0.25),
        color.GammaTransform((0.7, 1.5), True, True, retain_stats=True, p_per_sample=0.1),
        color.GammaTransform((0.7, 1.5), False, True, retain_stats=True, p_per_sample=0.3),
        MirrorTransform(tuple(range(len(size)))),
    ])


def nnunet(image, label, key):
    np.random.seed(number_of(key, "nnunet"))  # batchgenerators draws from numpy's and Python's global generators
    random.seed(number_of(key, "nnunet"))
    found = nnunet_transforms(image.shape)(data=image[None, None], seg=label[None, None])
    return np.float32(found["data"][0, 0]), np.float32(found["seg"][0, 0])


def bigaug(image, label, key):
    draws = np.random.default_rng(number_of(key, "bigaug"))
    happens, of = draws.random(9) < 0.5, draws.uniform
    if happens[0]:
        soft = ndimage.gaussian_filter(image, of(0.25, 1.5))
        image = soft + of(10, 30) * (soft - ndimage.gaussian_filter(soft, of(0.25, 1.5)))
    if happens[1]:
        image = ndimage.gaussian_filter(image, of(0.25, 1.5))
    if happens[2]:
        image = image + of(0.1, 1.0) * draws.standard_normal(image.shape)
    if happens[3]:
        image = image + of(-0.1, 0.1)
    if happens[4]:
        low, reach = image.min(), np.ptp(image) + 1e-6
        image = ((image - low) / reach) ** of(0.5, 4.5) * reach + low
    if happens[5]:
        image = image * (1 + of(-0.1, 0.1)) + of(-0.1, 0.1)
    image = np.float32(image)
    if happens[6] or happens[7]:
        how = {"augment.rotation": 20.0 * happens[6], "augment.scaling": 0.0, "augment.shift": 0.0, "augment.flip": 0.0}
        matrix = random_affine([key], image.ndim, image.shape, how)
        matrix[:, :, :-1] /= of(0.4, 1.6) if happens[7] else 1.0
        image, label = warped_by(image, label, affine_field(matrix, image.shape))
    if happens[8]:
        image, label = elastic(image, label, key, (10, 13), (0, 1000), probability=1.0)
    return image, label


ANEW = {"flips_affine": flips_affine, "elastic": elastic, "nnunet": nnunet, "bigaug": bigaug,
        **{method: nnunet if method.endswith("nnunet") else flips_affine for method in COMBINED}}


def number_of(key, purpose):
    """A number below 2^32 for the generators of other programs. key: ints."""
    return int(torch.randint(2 ** 32, (), generator=generator(key[0], purpose, *key[1:])))


# ---------------------------------------------------------------------------------------------------------------------
# Volumes and their copies
# ---------------------------------------------------------------------------------------------------------------------

def read_set(name, ids, cfg):
    """Volumes of a set as `read` returns them: crops on their own grids, brains with their tissues on that of cfg, and
    slices of a heart that have labels."""
    if name == "heart":
        image, affine = read_volume(DATA.parent / "cardiac/imagesTr" / f"{ids}.nii.gz")
        label, _ = read_label(DATA.parent / "cardiac/labelsTr" / f"{ids}.nii.gz")
        spacing = np.diag([*np.linalg.norm(affine[:3, :2], axis=0), 1, 1])
        return [(f"{ids}_{z}", image[..., z], label[..., z], spacing) for z in range(image.shape[2])
                if label[..., z].any()]
    items = read_datalist(DATA.parent / name, 3, ids)
    if name == "hippocampus":
        return read(items)
    grid = cfg["data.img_size"], cfg["data.spacing_mm"]
    volumes = read([{**item, "label": item["image"].parents[1] / "tissuesTr" / item["image"].name} for item in items])
    return [(identity, to_grid(image, affine, *grid)[0], *to_grid(label, affine, *grid, order=0))
            for identity, image, label, affine in volumes]


def standard(image, label):
    """Arrays of a volume as the U-Net takes them: image of mean 0 and variance 1, label, both (*size) float32."""
    image, label = image[0].numpy(), label[0].numpy()
    return (image - image.mean()) / (image.std() + 1e-6), label


def counts_of(orders, counts):
    """How many copies each volume needs: {id: number}. orders: of the volumes, one for each seed. counts: of args."""
    needed = {}
    for order, (labelled, count) in itertools.product(orders, counts.items()):
        for volume in order[:labelled]:
            needed[volume[0]] = max(needed.get(volume[0], 0), count)
    return needed


def on_own_scale(image, label, affine, cfg):
    """A volume on the grid as the U-Net takes it, see `standard`."""
    return standard(*on_grid(image, label, affine, intensity_range(image, *cfg["data.percentiles"]), cfg))


def carried(volume, others, args, cfg):
    """A labelled volume registered to others: {id: (image, label) on the grid of that other}, each found only once."""
    settings, path = json.dumps([cfg, our_commit()], sort_keys=True), args.out / "carried" / f"{volume[0]}.npz"
    found = kept(path, settings, args.resume or path in MADE) or {}
    found.pop("settings", None)
    if missing := [other for other in others if f"{other[0]} label" not in found]:
        for other, (image, label) in zip(missing, bring(volume, missing, None, cfg, "carrying", "nearest")):
            found |= {f"{other[0]} image": image, f"{other[0]} label": label}
        keep(path, settings, **found)
        MADE.add(path)
    return {other[0]: (found[f"{other[0]} image"], found[f"{other[0]} label"]) for other in others}


def segmented(order, labelled, args, cfg):
    """For each labelled volume its samples: itself, and all unlabelled volumes with labels joined from all labelled
    ones. order: the volumes of a seed, of which the first `labelled` have labels."""
    unlabelled, samples = sorted(order[labelled:], key=lambda other: other[0]), []
    atlases = [carried(volume, unlabelled, args, cfg) for volume in order[:labelled]]
    for identity, image, _, affine in unlabelled:
        label, _ = fuse(image, *zip(*[atlas[identity] for atlas in atlases]))
        samples.append(on_own_scale(image, label, affine, cfg))
    return [[on_own_scale(*volume[1:], cfg), *samples] for volume in order[:labelled]]


def drawn_copies(method, volume, count, model, args, cfg, others):
    """Copies of one volume on the grid: list of (image, label). others: the unlabelled volumes, in any order: the
    copies are kept, and must not depend on the seed in which they are drawn first."""
    identity, image, label, affine = volume
    others = sorted((other for other in others if other[0] != identity), key=lambda other: other[0])
    limits, made = intensity_range(image, *cfg["data.percentiles"]), []
    if method == "moved":
        others = random.Random(identity).sample(others, min(count, len(others)))
        moved = carried(volume, others, args, cfg)
        return [on_grid(*moved[other[0]], other[3], limits, cfg) for other in others]
    drawing = model[1] | ({"diffusion.v_scale": WIDE} if method == "wide" else {})
    for number in tqdm(range(count), f"{method} copies of {identity}", unit="copy", leave=False):
        shown = pick_target(others, (0, subject_number(identity), number)) if method == "towards" else [None] * 4
        copy, moved, _ = augment(image, label, affine, None if method in ("random", "wide") else model, START,
                                 draw=number, target=shown[1], target_affine=shown[3], subject=identity, cfg=drawing)
        made.append(on_grid(copy, moved, affine, limits, cfg))
    return made


def pool_of(method, volume, count, labelled, model, args, cfg, others):
    """Samples of one labelled volume, itself first: list of (image, label), arrays on the grid.

    count: how many copies are drawn of it, or more in an earlier run, of which the first ones are taken when `labelled`
    volumes have labels.
    """
    itself, source = on_own_scale(*volume[1:], cfg), COMBINED.get(method, method)
    if source not in COPIES:
        return [itself]
    settings = json.dumps([START, cfg, sha256(find_checkpoint(args.checkpoint)), our_commit()], sort_keys=True)
    path = args.out / "copies" / source / f"{volume[0]}.npz"
    found = kept(path, settings, args.resume or path in MADE)
    if found is None or len(found["images"]) < count:
        images, labels = (torch.stack(parts).numpy()
                          for parts in zip(*drawn_copies(source, volume, count, model, args, cfg, others)))
        keep(path, settings, images=images.astype(np.float16), labels=labels.astype(np.uint8))
        MADE.add(path)
        found = kept(path, settings, True)
    copies = [(torch.from_numpy(image).float(), torch.from_numpy(label).float())
              for image, label in zip(found["images"], found["labels"])]
    return [itself, *(standard(*drawn) for drawn in copies[:args.counts[labelled]])]


# ---------------------------------------------------------------------------------------------------------------------
# One cell: a training and its scores
# ---------------------------------------------------------------------------------------------------------------------

def new_net(seed, dims, labels):
    """MONAI's U-Net of 2 or 3 dimensions for these labels; its first weights are a function of the seed."""
    from monai.networks.nets import UNet
    with torch.random.fork_rng():
        torch.manual_seed(number_of((seed,), "few-shot weights"))
        return UNet(dims, 1, len(labels) + 1, WIDTHS, (2,) * (len(WIDTHS) - 1))


def sample(pool, method, key):
    """Image and label of one sample, (1, *size) tensors. key: (seed, step, place in the batch)."""
    volume, drawn, number = uniform([key], "sample", 3)[0].tolist()
    versions = pool[int(volume * len(pool))]
    copies = len(versions) - 1
    image, label = versions[1 + int(number * copies) if copies and drawn < SHARE else 0]
    if method in ANEW:
        image, label = ANEW[method](image, label, key)
    return torch.from_numpy(image)[None], torch.from_numpy(label)[None]


def train(pool, method, seed, args, cfg):
    """The U-Net after --steps steps. pool: for each labelled volume its samples."""
    def batch_at(step):
        batch = [sample(pool, method, (seed, step, place)) for place in range(BATCH)]
        return (torch.stack(parts) for parts in zip(*batch))

    return fit(new_net(seed, cfg["model.dims"], args.labels), batch_at, args.steps, LR, cfg["run.amp"],
               f"{method}, {len(pool)} volumes, seed {seed}")


@torch.no_grad()
def scores_of(net, held_out, labels):
    """Dice of each test volume, the mean over its labels."""
    return [average(dice(net(torch.from_numpy(image)[None, None]).argmax(1)[0], torch.from_numpy(label), labels))
            for image, label in held_out]


def cell(method, labelled, seed, order, needed, held_out, model, args, cfg):
    """{"dice": of each test volume, "copies_s", "train_s": processor seconds}, from its file or run now."""
    source = COMBINED.get(method, method)
    copies = args.counts[labelled] if source in COPIES else 0
    weights = sha256(find_checkpoint(args.checkpoint)) if copies else None
    settings = [args.steps, args.test_ids, WIDTHS, cfg, weights, our_commit()]
    path = args.out / "cells" / f"{method}_{labelled}_{copies}_{seed}.json"
    if found := kept_json(path, settings, args.resume):
        return found
    began = time.process_time()
    if source == "segmented":
        pool = segmented(order, labelled, args, cfg)
    else:
        pool = [pool_of(method, volume, needed[volume[0]], labelled, model, args, cfg, order)
                for volume in order[:labelled]]
    drawn = time.process_time()
    net = train(pool, method, seed, args, cfg)
    trained = time.process_time()
    found = {"settings": settings, "labelled": [volume[0] for volume in order[:labelled]],
             "dice": scores_of(net, held_out, args.labels), "copies_s": drawn - began, "train_s": trained - drawn}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(found) + "\n")
    print(f"{method}, {labelled} volumes, seed {seed}: Dice {np.mean(found['dice']):.4f}, copies "
          f"{found['copies_s']:.0f} s, training {found['train_s']:.0f} s", flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

def summarised(found):
    """Of each row its Dice, interval, seeds, and difference from the best simple row.

    found: {(method, labelled, seed): Dice of each test volume}.
    """
    table, rows = {}, {}
    for (method, labelled), cells in itertools.groupby(found.items(), lambda one: one[0][:2]):
        table.setdefault(labelled, {})[method] = np.array([dices for _, dices in cells], np.float64)
    for labelled, by_method in table.items():
        simple = {method: float(each.mean()) for method, each in by_method.items() if method in SIMPLE}
        best = max(simple, key=simple.get, default=None)
        for method, each in by_method.items():
            mean, low, high = interval(each.mean(0))
            row = {"dice": mean, "low": low, "high": high, "seeds": each.mean(1).tolist()}
            if best and method != best:
                row["less_best"] = dict(zip(("mean", "low", "high"), interval((each - by_method[best]).mean(0))))
            rows.setdefault(str(labelled), {"best_simple": best, "rows": {}})["rows"][method] = row
    return rows


def publish(found, args, volumes):
    rows = summarised({key: value["dice"] for key, value in found.items()})
    for labelled, part in rows.items():
        print(f"\n{labelled} labelled volumes, {args.seeds} seeds, {args.steps} steps of {BATCH}, {volumes} test "
              f"volumes; best simple row: {part['best_simple']}")
        shown = [[method, row["dice"], row["low"], row["high"], " ".join(f"{one:.3f}" for one in row["seeds"]),
                  *(row.get("less_best") or dict.fromkeys(("mean", "low", "high"))).values()]
                 for method, row in part["rows"].items()]
        print(text_table(["row", "Dice", "from", "to", "seeds", "less the best", "from", "to"], shown,
                         [None, ".4f", ".4f", ".4f", None, ".4f", ".4f", ".4f"]))
    minutes = {kind: round(sum(cells[f"{kind}_s"] for cells in found.values()) / 60, 1)
               for kind in ("copies", "train")}
    print(json.dumps({"shots": rows, "seeds": args.seeds, "steps": args.steps, "volumes": volumes,
                      "processor_minutes": minutes}))


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    needed = ["monai", *["batchgenerators"] * any("nnunet" in method for method in args.methods)]
    if lacking := next((name for name in needed if importlib.util.find_spec(name) is None), None):
        raise InputError(f"{lacking} is not installed: pip install -r requirements-bench.txt, or name other --methods.")
    torch.set_num_threads(args.threads)
    grid = SETS[args.data]["grid"]
    net, drawn_by = load_model(args.checkpoint)
    model, cfg = (net, drawn_by | grid), load_config(ROOT / SETS[args.data]["config"]) | grid
    if drawn_by["model.dims"] != cfg["model.dims"]:
        raise InputError(f"--checkpoint {args.checkpoint}: its network is {drawn_by['model.dims']}D, but the set "
                         f"{args.data} is {cfg['model.dims']}D.")
    if drawn_by["model.condition_type"] == "none":
        args.methods = [method for method in args.methods if method != "towards"]
    volumes = read_set(args.data, SETS[args.data]["train"], cfg)
    if max(args.shots) > len(volumes):
        raise InputError(f"--shots {max(args.shots)}: there are only {len(volumes)} volumes to learn from.")
    held_out = [on_own_scale(*volume[1:], cfg) for volume in read_set(args.data, args.test_ids, cfg)]
    orders = orders_of(volumes, args.seeds)
    needed = counts_of(orders, args.counts)
    found = {}
    work = sorted(itertools.product(args.shots, METHODS), key=lambda one: one[1] in COMBINED)  # these come last
    work = [(method, labelled) for labelled, method in work if method in args.methods]
    for (method, labelled), seed in itertools.product(work, range(args.seeds)):
        key = (method, labelled, seed)
        found[key] = cell(*key, orders[seed], needed, held_out, model, args, cfg)
    publish(found, args, len(held_out))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
