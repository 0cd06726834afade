"""Whether the affine stage aligns rotated and shifted volumes, half of them with a lost header: 60 pairs from a seed.

    python tests/bench/bench_start.py --json
    python tests/bench/bench_start.py --part choose --seed 7       # other brains, for choosing settings

A pair is two brains of `--data`/brains, two mice, or two fetal brains at most six weeks apart, resampled to voxels of
twice the side, which hardly affects an affine map. The moving volume is rotated by up to 60 degrees about any axis and
shifted by up to half its field of view in any direction, on a grid that still holds all of it. Of every four pairs
  two have a correct header: the volume itself has moved,
  one has lost its orientation: the axes are permuted and flipped, and the header holds only voxel sizes, and
  one has lost its spacing: the header says 1 mm, but voxels are up to twice as long along one axis as along another.
A lost orientation never mirrors, because a volume cannot be told from its mirror image.

The reference is the affine map of the untouched pair by the same program, followed by the known motion. A pair has
landed if the labels' mean Dice is at most 0.03 below that of the reference, or if the voxels of the body lie, on
average, within 3 % of the longest side of its box from where the reference puts them. This was fixed before the first
run. A verdict other than "ok" tells that a pair has not landed, see Inference/verdict.py.

Last line of stdout, with --json: {"cases": 60, "landed": .., "told": .., "missed": ..}: told, those not landed that the
verdict tells; missed, the others of them.
"""
import argparse
import itertools
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from common import DATA
from scipy import ndimage
from scipy.spatial.transform import Rotation

from Dataloader.grids import foreground_box, to_grid
from Dataloader.nifti import read_label, read_volume
from Diffusion.metrics import average, dice
from Inference.registration import register

SETS = {"brains": 28, "mouse": 16, "fetal": 16}  # how many of the pairs
CHOOSING = 7  # brains, the first ones, by which settings may be chosen; the others are for the figures
HEADERS = ("true", "true", "orientation", "spacing")
DEGREES, SHIFT = 60.0, 0.5
DICE_LOSS, DISTANCE = 0.03, 0.03
MOST_WEEKS = 6
PROPER = [turn.round() for turn in Rotation.create_group("O").as_matrix()]  # the 24 turns of a cube


def draw(seed, part, data):
    """The pairs: a list of dicts of set, fixed and moving (paths), header, and what `moved` needs."""
    numbers, cases = np.random.default_rng(seed), []
    for name, count in SETS.items():
        paths = sorted((data / name / "imagesTr").glob("*.nii.gz"))
        if name == "brains":
            paths = paths[:CHOOSING] if part == "choose" else paths[CHOOSING:]
        pairs = list(itertools.permutations(paths, 2))
        if name == "fetal":
            pairs = [pair for pair in pairs if abs(weeks(pair[0]) - weeks(pair[1])) <= MOST_WEEKS]
        for number in range(count):
            fixed, moving = pairs[numbers.integers(len(pairs))]
            axis, shift = numbers.normal(size=(2, 3))
            cases.append({"set": name, "fixed": fixed, "moving": moving, "header": HEADERS[number % len(HEADERS)],
                          "turn": np.deg2rad(DEGREES) * numbers.uniform() * axis / np.linalg.norm(axis),
                          "shift": SHIFT * numbers.uniform() * shift / np.linalg.norm(shift),
                          "order": PROPER[numbers.integers(len(PROPER))],
                          "sides": np.exp(numbers.uniform(0, np.log(2), 3))})
    return cases


def weeks(path):
    return int(path.name.removeprefix("sta").split(".")[0])


def read(path):
    """Image, label and their affine, canonical, with voxels of twice the side."""
    image, affine = read_volume(path)
    label, _ = read_label(str(path).replace("imagesTr", "labelsTr"))
    side = 2 * np.linalg.norm(affine[:3, 0])
    size = np.ceil(np.array(image.shape) * np.linalg.norm(affine[:3, :3], axis=0) / side).astype(int)
    ornt_size = size[np.argmax(np.abs(affine[:3, :3]), axis=1)]
    (image, new), (label, _) = (to_grid(array, affine, ornt_size, side, order)
                                for array, order in ((image, 1), (label, 0)))
    return image, label, new


def moved(image, label, affine, case):
    """The moving volume as a case has it: image, label, true affine, the header's affine, and the map onto it, 4x4.

    The map leads from a world point of the volume as it was to where it is now by the header.
    """
    side = np.linalg.norm(affine[:3, 0])
    corners = np.array(list(itertools.product(*[(0, n - 1) for n in image.shape])))
    centre = (affine @ [*(np.array(image.shape) - 1) / 2, 1])[:3]
    shift = case["shift"] * np.max(image.shape) * side
    motion = np.eye(4)
    motion[:3, :3] = Rotation.from_rotvec(case["turn"]).as_matrix()
    motion[:3, 3] = centre + shift - motion[:3, :3] @ centre
    sides = side * (case["sides"] if case["header"] == "spacing" else np.ones(3))
    order = case["order"] if case["header"] == "orientation" else np.eye(3)
    # The field of view: that of the volume as it was, as much larger as it takes to hold the body.
    body = np.argwhere(image > 0.02 * image.max())
    body = (motion @ affine @ np.column_stack([body, np.ones(len(body))]).T)[:3]
    before = (affine @ np.column_stack([corners, np.ones(len(corners))]).T)[:3]
    low, high = (choose(np.column_stack([choose(body, axis=1), choose(before, axis=1)]), axis=1)
                 for choose in (np.min, np.max))
    grid = np.eye(4)
    grid[:3, :3] = order @ np.diag(sides)
    extent = np.abs(order.T @ (high - low))
    size = np.ceil(extent / sides).astype(int) + 1
    grid[:3, 3] = (low + high) / 2 - grid[:3, :3] @ ((size - 1) / 2)
    change = np.linalg.inv(motion @ affine) @ grid
    image, label = (ndimage.affine_transform(array, change[:3, :3], change[:3, 3], tuple(size), order=order_of)
                    for array, order_of in ((image, 1), (label, 0)))
    header = grid
    if case["header"] != "true":
        header = np.diag([*(sides if case["header"] == "orientation" else np.ones(3)), 1.0])
    return image, label, grid, header, header @ np.linalg.inv(grid) @ motion


def label_dice(label, affine, other, other_affine, found):
    """Mean Dice of the labels of two volumes under a map T, 4x4."""
    change = np.linalg.inv(other_affine) @ found @ affine
    warped = ndimage.affine_transform(other, change[:3, :3], change[:3, 3], label.shape, order=0)
    values = sorted(set(np.unique(label).tolist()) & set(np.unique(other).tolist()) - {0})
    return average(dice(torch.from_numpy(warped), torch.from_numpy(label), values))


def apart(found, reference, image, affine):
    """How far two maps bring the body of a volume apart, on average, as a fraction of the longest side of its box."""
    body = image > 0.1 * np.percentile(image, 99)
    box = foreground_box(body)
    points = affine @ np.column_stack([np.argwhere(body), np.ones(body.sum())]).T
    # In the fixed volume's millimetres, whatever the other header says.
    away = (np.linalg.inv(reference) @ found @ points - points)[:3]
    extent = np.max((box[1] - box[0]) * np.linalg.norm(affine[:3, :3], axis=0))
    return float(np.linalg.norm(away, axis=0).mean() / extent)


def run(case, references):
    """What became of a case: a dict for one line. references: {pair: T of the untouched pair}, added to."""
    fixed, fixed_label, fixed_affine = read(case["fixed"])
    still, still_label, still_affine = read(case["moving"])
    pair = case["fixed"], case["moving"]
    if pair not in references:
        references[pair] = register((fixed, fixed_affine), (still, still_affine), refine=False, device="cpu").matrix
    moving, label, _, header, motion = moved(still, still_label, still_affine, case)
    began = time.process_time()
    result = register((fixed, fixed_affine), (moving, header), refine=False, device="cpu")
    seconds = time.process_time() - began
    reference = motion @ references[pair]
    before = label_dice(fixed_label, fixed_affine, still_label, still_affine, references[pair])
    after = label_dice(fixed_label, fixed_affine, label, header, result.matrix)
    away = apart(result.matrix, reference, fixed, fixed_affine)
    return {"set": case["set"], "fixed": case["fixed"].name.split(".")[0], "moving": case["moving"].name.split(".")[0],
            "header": case["header"], "degrees": round(float(np.rad2deg(np.linalg.norm(case["turn"])))),
            "dice_reference": round(before, 3), "dice": round(after, 3), "apart_percent": round(100 * away, 2),
            "landed": bool(after >= before - DICE_LOSS or away <= DISTANCE), "verdict": result.verdict,
            "similarity": round(result.affine_similarity, 3), "runner_up": round(result.affine_runner_up, 3),
            "seconds": round(seconds, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--part", choices=("report", "choose"), default="report")
    parser.add_argument("--seed", type=int, default=46)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair, to run them in parts")
    parser.add_argument("--most", type=int, default=sum(SETS.values()), help="pairs at most")
    parser.add_argument("--json", action="store_true", help="the last line as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    references, lines = {}, []
    for case in draw(options.seed, options.part, options.data)[options.first:options.first + options.most]:
        lines.append(run(case, references))
        print(json.dumps(lines[-1]), flush=True)
    lost = [line for line in lines if not line["landed"]]
    told = sum(line["verdict"] != "ok" for line in lost)
    counts = {"cases": len(lines), "landed": len(lines) - len(lost), "told": told, "missed": len(lost) - told}
    print(json.dumps(counts) if options.json else ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
