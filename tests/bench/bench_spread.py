"""Why recovery does not pay: shapes of copies compared with real subjects, and how much a network recovers.

    python tests/bench/bench_spread.py --json [--checkpoint universal] [--picture docs/spread.png]

Hippocampus. The sets, each of --volumes volumes of ids 1-60 with --draws copies (rows as in bench_fewshot.py):
  real       other subjects of ids 1-60, with the field that registers the volume to them
  moved      the volume registered to these, as OM_augment.py --register does: the same fields, labels warped by them
  random     deformations of the diffusion model before recovery      recovered   the same draws after recovery
  wide       the same with diffusion.v_scale 1e-4
  last       at the last time, OM_augment.py's default                last_wide   the same with diffusion.v_scale 6e-5
  towards    the same draws recovered towards another volume          elastic     random elastic deformations
Measures of each copy, within MARGIN voxels of its label:
  displacement_mm   root mean square length of the displacement, without its best-fitting affine map
  log_jacobian      standard deviation of the logarithm of the determinant: local growth and shrinking
  volume            |log(label volume in the copy / in the original)|
  overlap           Dice of the copy's label with the original's, both centred
  along_real        share of the change in the label's signed distance map along the first MODES principal modes of
                    other real subjects, ids 201-280 (from their labels alone, without registration)
A network's recovery is its mean cosine with the field that undoes the deformation (minus the loss `ang`: 1 is full
recovery, 0 none), at three times, for three conditions: none, another subject, and the volume itself. The published 2D
network is measured on its three reference slices, if its weights are present. The last line is JSON.
"""
import argparse
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from bench_augment import CONFIG, DATA, read
from bench_fewshot import MAGNITUDE, SIGMA, START, TRAIN_IDS, WIDE, elastic_field, number_of
from bench_original import DATA as ORIGINAL
from common import in_one_sentence
from scipy import ndimage
from tqdm import tqdm

from Dataloader.datalist import read_datalist
from Diffusion.diffuser import DeformDDPM, make_condition
from Diffusion.fields import jacobian_determinant
from Diffusion.losses import recovery_terms
from Diffusion.metrics import dice
from Inference.augmentation import augment, deform, pick_target, place, subject_number
from Inference.labels import apply_label
from Inference.load_model import load_model
from Inference.registration import register
from Report.page import text_table
from Runtime.config import load_config
from Runtime.device import autocast
from Runtime.errors import DONE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

MODE_IDS = "201-280"
STRENGTHS = {"random": (START, {}), "wide": (START, {"diffusion.v_scale": WIDE}), "last": (79, {}),
             "last_wide": (79, {"diffusion.v_scale": 6e-5})}  # start and keys of sets without a network
SETS = ("real", "moved", "towards", "recovered", *STRENGTHS, "elastic")
MEASURES = {"displacement_mm": "displacement, mm", "log_jacobian": "sd of log Jacobian",
            "volume": "|log volume ratio|", "overlap": "overlap with the original"}
MARGIN, MODES, TIMES = 3, 20, (20, 50, 79)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Shapes of copies beside those of real subjects.")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON (always done)")
    parser.add_argument("--data", default=str(DATA), help="volumes with labels (%(default)s)")
    parser.add_argument("--checkpoint", default="universal", help="network that recovers (%(default)s)")
    parser.add_argument("--volumes", type=int, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument("--draws", type=int, default=4, metavar="N", help="copies of each (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the measures there")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(%(default)s)")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# One copy
# ---------------------------------------------------------------------------------------------------------------------

def without_affine(field, counted):
    """The displacements (N, 3) of the counted voxels, less their least-squares affine map. field: (3, *size)."""
    places = np.argwhere(counted).astype(np.float64)
    places = np.column_stack([places - places.mean(0), np.ones(len(places))])
    moves = field[:, counted].T.astype(np.float64)
    return moves - places @ np.linalg.lstsq(places, moves, rcond=None)[0]


def centred(label, cfg):
    """Where a label image is not 0, its centre of mass in the middle of the network's grid: bool (*size)."""
    size = np.array(cfg["data.img_size"])
    places = np.argwhere(label > 0)
    places = np.rint(places - places.mean(0) + (size - 1) / 2).astype(int)
    shown = np.zeros(size, bool)
    shown[tuple(places[((places >= 0) & (places < size)).all(1)].T)] = True
    return shown


def distance(shape):
    """Signed distance from the border of a shape in voxels, outside positive, at most 8 either way: 1D float32."""
    outside, inside = (ndimage.distance_transform_edt(one) for one in (~shape, shape))
    return np.clip(outside - inside, -8, 8).astype(np.float32).ravel()


def measured(field, original, copy, cfg):
    """The measures of one copy, and by how much its distance map differs from the original's.

    field: (3, *size) in voxels of 1 mm, on the grid of the copy. original, copy: label images.
    """
    counted = ndimage.binary_dilation(copy > 0, iterations=MARGIN)
    growth = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()[counted]
    shapes = centred(original, cfg), centred(copy, cfg)
    return {"displacement_mm": float(np.sqrt((without_affine(field, counted) ** 2).sum(1).mean())),
            "log_jacobian": float(np.log(growth.clip(1e-2)).std()),
            "volume": float(abs(np.log((copy > 0).sum() / (original > 0).sum()))),
            "overlap": dice(*shapes, [True])[0]}, distance(shapes[1]) - distance(shapes[0])


def modes_of(shapes):
    """The first MODES principal modes of distance maps, orthonormal: (MODES, voxels). shapes: list of bool arrays."""
    maps = np.stack([distance(shape) for shape in shapes])
    return np.linalg.svd(maps - maps.mean(0), full_matrices=False)[2][:MODES]


# ---------------------------------------------------------------------------------------------------------------------
# The sets
# ---------------------------------------------------------------------------------------------------------------------

def registrations(volumes, args, cfg):
    """{"real", "moved"}: of each registration (field, original label, label of the other one; or the carried label)."""
    pairs = {"real": [], "moved": []}
    for moving in tqdm(volumes[:args.volumes], "registrations", unit="volume"):
        others = [other for other in volumes if other[0] != moving[0]]
        for number in range(args.draws):
            fixed = pick_target(others, (0, subject_number(moving[0]), number))
            found = register((fixed[1], fixed[3]), (moving[1], moving[3]), affine=True, config=cfg, device="cpu")
            carried = apply_label(moving[2], moving[3], found.field, fixed[3])
            pairs["real"].append((found.field, moving[2], fixed[2]))
            pairs["moved"].append((found.field, moving[2], carried))
    return pairs


def copies_of(name, volumes, args, model):
    """Copies of each volume: (field, original label, label of the copy), one after the other."""
    for identity, image, label, affine in tqdm(volumes[:args.volumes], name, unit="volume"):
        others = [other for other in volumes if other[0] != identity]
        for number in range(args.draws):
            key = (0, subject_number(identity), number)
            if name == "elastic":
                field = elastic_field(image.shape, np.random.default_rng(number_of(key, name)), SIGMA, MAGNITUDE)
                yield field, label, deform(label, field, "smooth")
                continue
            _, target, _, target_affine = pick_target(others, key) if name == "towards" else [None] * 4
            start, keys = STRENGTHS.get(name, (START, {}))
            _, copy, field = augment(image, label, affine, None if name in STRENGTHS else model, start, draw=number,
                                     subject=identity, cfg=model[1] | keys, target=target,
                                     target_affine=target_affine)
            yield field, label, copy


def spread_of(copies, modes, cfg):
    """{measure: of each copy}, and the share of all changes along real modes. copies: as of `copies_of`."""
    rows, changes = zip(*(measured(*copy, cfg) for copy in copies))
    changes = np.stack(changes)
    return {**{measure: [row[measure] for row in rows] for measure in MEASURES},
            "along_real": float(((changes @ modes.T) ** 2).sum() / (changes ** 2).sum())}


# ---------------------------------------------------------------------------------------------------------------------
# How much a network recovers
# ---------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def recovery_of(images, model, conditions):
    """{condition: {time: mean cosine with the field that undoes the deformation}}.

    images: (1, C, *size) each. conditions: {name: of each image, from `make_condition`, or None}.
    """
    net, cfg = model
    found, ddpm = {name: {} for name in conditions}, DeformDDPM(cfg)
    for t in TIMES:
        drawn = [ddpm.diffuse(image, [t], [(0, 0, number)]) for number, image in enumerate(images)]
        for name, shown in conditions.items():
            cosines = []
            for (xt, target), condition in zip(drawn, shown):
                with autocast(xt.device, cfg["run.amp"]):
                    pred = net(xt, torch.tensor([t]), condition).float()
                cosines.append(-float(recovery_terms(pred, target)[1]))
            found[name][t] = float(np.mean(cosines))
    return found


def recoveries(volumes, args, model):
    """Of the network of --checkpoint, and of the published one."""
    images = [place(volume[1], volume[3], model[1])[0] for volume in volumes[:args.volumes]]
    shown = [make_condition(image, "volume") for image in images]
    found = recovery_of(images, model, {"none": [None] * len(images), "another subject": shown[1:] + shown[:1],
                                        "the volume itself": shown})
    weights = ORIGINAL / "000000_cmr_recresacnet.pth"
    if weights.is_file():
        with np.load(ORIGINAL / "reference.npz") as archive:
            slices = list(torch.from_numpy(archive["image"]).split(1))
        found["published 2D network, none"] = recovery_of(slices, load_model(weights), {"none": [None] * 3})["none"]
    else:
        print("the published weights are not on this machine: their row is left out")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Table and picture
# ---------------------------------------------------------------------------------------------------------------------

def draw(found, path):
    """Box plots of the measures, and bars of the share along real modes."""
    figure, axes = plt.subplots(1, len(MEASURES) + 1, figsize=(13, 3.2), sharey=True)
    colours = ["0.25" if name == "real" else "tab:blue" for name in found]
    places = np.arange(len(found))[::-1]
    for axis, (measure, title) in zip(axes, MEASURES.items()):
        boxes = axis.boxplot([one[measure] for one in found.values()], positions=places, orientation="horizontal",
                             widths=0.6, patch_artist=True, flierprops={"markersize": 2})
        for box, colour in zip(boxes["boxes"], colours):
            box.set(facecolor=colour, alpha=0.5)
        axis.axvline(np.median(found["real"][measure]), color="0.25", linewidth=0.8, linestyle="--")
        axis.set_title(title, fontsize=10)
    axes[-1].barh(places, [100 * one["along_real"] for one in found.values()], 0.6, color=colours, alpha=0.6)
    axes[-1].axvline(100 * found["real"]["along_real"], color="0.25", linewidth=0.8, linestyle="--")
    axes[-1].set_title("% along real modes", fontsize=10)
    axes[0].set_yticks(places, list(found))
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    model, cfg = load_model(args.checkpoint), load_config(CONFIG)
    volumes = read(read_datalist(args.data, 3, TRAIN_IDS))
    modes = modes_of([centred(volume[2], cfg) for volume in read(read_datalist(args.data, 3, MODE_IDS))])
    recovered = recoveries(volumes, args, model)
    pairs = registrations(volumes, args, cfg)
    found = {name: spread_of(pairs.get(name) or copies_of(name, volumes, args, model), modes, cfg) for name in SETS}
    medians = {name: {**{measure: float(np.median(one[measure])) for measure in MEASURES},
                      "along_real": one["along_real"]} for name, one in found.items()}
    print(text_table(["medians", *MEASURES, "along_real"], [[name, *one.values()] for name, one in medians.items()],
                     [None, *[".3f"] * (len(MEASURES) + 1)]))
    print(text_table(["recovered at time", *TIMES], [[name, *one.values()] for name, one in recovered.items()],
                     [None, *[".3f"] * len(TIMES)]))
    if args.picture:
        draw(found, args.picture)
    print(json.dumps({"medians": medians, "recovered": recovered, "copies": args.volumes * args.draws}))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
