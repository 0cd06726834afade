"""Draw pictures of docs/: learning.png from recorded figures, looks_*.png from registrations of two volumes.

    python tests/bench/draw_pictures.py --fixed F --moving M --fixed-label FL --moving-label ML

The pictures of the pages show the mouse brains FVB_NCrl_in_vivo_1 and 2 of github.com/dancebean/mouse-brain-atlas.
"""
import argparse
import io
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nibabel
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
matplotlib.use("Agg")

import omnimorph  # noqa: E402  from the repository's folder
from Inference.labels import without_affine  # noqa: E402
from Runtime.config import load_config  # noqa: E402

# Two trainings of config_hippocampus.yaml of 2026-11-21: docs/training.md and the notebook have the table.
LEARNS = {"epoch": [1, 2, 3, 5, 6, 7], "imgsim": [-0.518, -0.765, -0.814, -0.831, -0.837, -0.844],
          "ang": [-0.030, -0.302, -0.428, -0.496, -0.528, -0.570],
          "val_dice": [0.588, 0.666, 0.667, 0.678, 0.685, 0.682]}
STALLS = {"epoch": [1, 2, 4, 6], "imgsim": [-0.509, -0.709, -0.827, -0.840], "ang": [-0.014, -0.090, -0.191, -0.194],
          "val_dice": [0.569, 0.656, 0.665, 0.681]}
FIXED, MOVING = "#f28e2b", "#4e9ae8"  # as in the pictures of the reports


def draw_learning():
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for ax, name in zip(axes, ("imgsim", "ang", "val_dice")):
        ax.plot(LEARNS["epoch"], LEARNS[name], "o-", color="#2a7f3f", label="learns")
        ax.plot(STALLS["epoch"], STALLS[name], "s--", color="#b5442e", label="ang stalls")
        ax.set(title=name, xlabel="epoch (380 steps)")
        ax.grid(alpha=0.3)
    axes[2].axhline(0.569, color="#888888", linewidth=0.8)
    axes[2].text(7, 0.572, "before training", ha="right", fontsize=8, color="#666666")
    axes[1].legend(frameon=False)
    write(figure, "learning")


def write(figure, name):
    """As PNG of 96 colours, a third of the size that true colours take."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    Image.open(buffer).convert("RGB").quantize(96).save(ROOT / f"docs/{name}.png", optimize=True)


def outlines(ax, label, colour):
    """The borders of all structures of a slice."""
    border = np.zeros(label.shape, bool)
    border[:-1] |= label[:-1] != label[1:]
    border[:, :-1] |= label[:, :-1] != label[:, 1:]
    ax.contour(border.T, levels=[0.5], colors=colour, linewidths=0.5)


def colours(ax, label):
    """Each structure in a colour of its own."""
    shown = np.ma.masked_equal(label, 0)
    ax.imshow((shown * 3 % 19).T, cmap="tab20", origin="lower", alpha=0.45, vmin=0, vmax=18, interpolation="nearest")


def draw(name, rows, fixed, fixed_label, plane, filled=False):
    """rows: {title: (Result, moved label)}. Columns: the fixed volume, the result, the grid without the affine part.

    filled: the labels as colours, not as outlines.
    """
    pick = {"axial": lambda a: a[..., a.shape[-1] // 2], "coronal": lambda a: a[..., a.shape[-2] // 2, :],
            "sagittal": lambda a: a[..., a.shape[-3] // 2, :, :]}[plane]
    parts = {"axial": (0, 1), "coronal": (0, 2), "sagittal": (1, 2)}[plane]
    across, high = pick(fixed).shape
    figure, axes = plt.subplots(len(rows), 3, figsize=(9, 0.3 + 3 * high / across * len(rows)), squeeze=False,
                                layout="constrained")
    for row, (title, (found, moved)) in zip(axes, rows.items()):
        for ax, image in ((row[0], fixed), (row[1], np.asarray(found.warped))):
            ax.imshow(pick(image).T, cmap="gray", origin="lower", vmax=np.percentile(image, 99.8))
            if not filled:
                outlines(ax, pick(fixed_label), FIXED)
        if filled:
            colours(row[0], pick(fixed_label))
            colours(row[1], pick(moved))
        else:
            outlines(row[1], pick(moved), MOVING)
        field = without_affine(found.field, found.matrix, found.fixed.affine)
        a, b = (pick(field[part]) for part in parts)
        index = np.indices(a.shape)
        inside = pick(fixed) > 0
        right, up = (np.where(inside, i + f, np.nan)[::3, ::3] for i, f in zip(index, (a, b)))
        row[2].plot(right.T, up.T, right, up, color="#26323d", linewidth=0.5)
        row[0].set_title("fixed", fontsize=10)
        row[1].set_title(title, fontsize=10)
        row[2].set_title("deformation without the affine part", fontsize=10)
        for ax in row:
            ax.set(xticks=[], yticks=[], xlim=(-0.5, across - 0.5), ylim=(-0.5, high - 0.5), aspect="equal")
    write(figure, f"looks_{name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in ("--fixed", "--moving", "--fixed-label", "--moving-label"):
        parser.add_argument(option, required=True)
    args = parser.parse_args()
    draw_learning()
    fixed, moving, fixed_label, moving_label = (
        nibabel.load(path) for path in (args.fixed, args.moving, args.fixed_label, args.moving_label))
    image, label = moving.get_fdata(dtype=np.float32), np.asarray(moving_label.dataobj)
    target, truth = fixed.get_fdata(dtype=np.float32), np.asarray(fixed_label.dataobj)

    def register(image, affine, label, **config):
        cfg = load_config(ROOT / "Config/config_om.yaml") | config
        found = omnimorph.register((target, fixed.affine), (image, affine), config=cfg)
        moved = np.asarray(omnimorph.apply_label(label, affine, found.field, fixed.affine))
        dice = np.mean([2 * np.sum((truth == n) & (moved == n)) / (np.sum(truth == n) + np.sum(moved == n))
                        for n in np.unique(truth)[1:]])
        print(f"similarity {found.similarity:.3f}, Dice {dice:.3f}, {found.verdict}: {found.reason}", flush=True)
        return found, moved

    right = register(image, moving.affine, label)
    turned = moving.affine.copy()
    turned[:3, [1, 2]] = turned[:3, [2, 1]]  # a header that exchanges two axes
    draw("mirrored", {"wrong header": register(image, turned, label), "right header": right}, target, truth,
         "axial", filled=True)
    half = np.s_[:, :round(0.55 * image.shape[1])]
    draw("cut", {"half of the moving volume": register(image[half], moving.affine, label[half]),
                 "all of it": right}, target, truth, "axial")
    draw("weight", {"refine.weight 0.01": register(image, moving.affine, label, **{"refine.weight": 0.01}),
                    "refine.weight 30": register(image, moving.affine, label, **{"refine.weight": 30.0}),
                    "auto": right}, target, truth, "coronal")


if __name__ == "__main__":
    main()
