"""A viewer for pages: slices of volumes, compared with mouse or finger, with grid and Jacobian on top.

Report/viewer.js draws it from voxels that are packed in the page. Without JavaScript it is hidden.
"""
import base64
import json
import zlib
from html import escape

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from Diffusion.figures import FIXED_LINE, FOLDED, MOVING_LINE, NOT_FINITE, grid_nodes, turn_to_screen

PAGE_BYTES = 3_000_000  # of all viewers of a page; volumes that do not fit are shown on a coarser grid
MOST_VOXELS = 2_000_000  # of a volume; more never fit
HUNDREDTHS = 100  # of a voxel: the unit of the packed field
NO_NODE = -32768  # of the packed field: Report/viewer.js draws no line to it
LEVELS = 31  # colours of the determinant; few, because they compress well


def viewer_html(name, images, field, affine, labels=None, budget=PAGE_BYTES, body=None, without_affine=False):
    """HTML of one viewer, for a page of `write_page` with a viewer.

    name: of what is shown, for screen readers. images: {word: (D, H, W) or (H, W), values 0..1}, two or more on one
    grid; the others are compared with the first. field: (N, *spatial) in voxels, whose deformed grid and Jacobian are
    shown. labels: {word: label map} for the same words, or None. budget: bytes that the voxels may take; if they need
    more they are averaged on a coarser grid, and the page gives its size. body: booleans, where the deformed grid is
    shown; None for everywhere. without_affine: whether the field lacks its affine part, as it does if there is a body.
    """
    turned = turn_to_screen(images, labels or {}, np.asarray(field, np.float32), affine, body)
    full, dims, half = turned["shape"], len(field), half_range(turned["determinant"])
    part = ", without the affine part" if without_affine or body is not None else ""
    voxels = min(int(np.prod(full)), MOST_VOXELS)
    while True:
        shape = coarser(full, turned["spacing"], voxels)
        content = json.dumps(pack_all(turned, half, shape)).replace("<", "\\u003c")
        if len(content) <= budget or max(shape) == 1:
            break
        voxels = int(0.97 * np.prod(shape) * budget / len(content))
    return f"""<div class="viewer" hidden>
<div><div class="stage" tabindex="0" role="slider" aria-label="{escape(name)}: picture with a divider"
aria-valuemin="0" aria-valuemax="100" aria-valuenow="50"><canvas></canvas>
<span class="edge left"></span><span class="edge right"></span><span class="edge top"></span><span class="edge foot">
</span><span class="tag left"></span><span class="tag right"></span></div>
<label class="slices"><span>slice <output></output></span><input type="range" min="1" value="1"></label></div>
<div class="controls">
{controls_html(list(images), bool(labels), dims)}
{legends_html(list(images)[0], half, part)}
</div>
{help_html(list(images)[1:], full[:dims], shape[:dims], budget)}
<script type="application/json">{content}</script>
</div>
"""


# ---------------------------------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------------------------------

def coarser(shape, spacing, voxels):
    """The shape of a grid of the same extent with at most this many voxels; the shortest sides of voxels grow first."""
    side, coarse = min(spacing), tuple(shape)
    while np.prod(coarse) > max(voxels, 1):
        side *= 1.01
        coarse = tuple(min(n, max(1, int(n * length / side))) for n, length in zip(shape, spacing))
    return coarse


def half_range(determinant):
    """half, 0.1 .. 1: the colours of a determinant range from 1 - half to 1 + half."""
    apart = np.abs(determinant[np.isfinite(determinant)] - 1)
    return float(np.clip(np.percentile(apart, 99.9), 0.1, 1)) if apart.size else 1.0


def pack_all(turned, half, shape):
    """What Report/viewer.js reads, as plain JSON.

    turned: from `turn_to_screen`. half: from `half_range`. shape: of the grid that is shown.
    """
    scale = np.divide(turned["shape"], shape)
    spacing = scale * turned["spacing"]
    images = {word: np.rint(255 * pooled(image, shape)) for word, image in turned["images"].items()}
    fixed, *others = images.values()
    differences = np.percentile([np.abs(other - fixed) for other in others], 99.5)
    # Only the borders between labels are drawn: bytes are enough, with 0 for the background.
    values = sorted(set().union(*[np.unique(label).tolist() for label in turned["labels"].values()]) - {0})
    ranks = {word: (np.searchsorted(values, label) % 255 + 1) * (label != 0)
             for word, label in turned["labels"].items()}
    return {"shape": shape, "spacing": spacing.tolist(), "fixed": list(turned["images"])[0],
            "images": {word: pack(image) for word, image in images.items()},
            "labels": {word: pack(nearest(rank, shape)) for word, rank in ranks.items()},
            "determinant": pack(determinant_codes(turned["determinant"], half, shape)),
            "determinant_colours": pack(determinant_colours()),
            "difference_colours": pack(255 * colormaps["magma"](np.arange(256))),
            "brightest": max(1.0, float(differences)), "lines": [FIXED_LINE, MOVING_LINE],
            "grid": pack_grid(turned["field"], shape, scale, spacing)}


def pack_grid(field, shape, scale, spacing):
    """The nodes of a grid, of `grid_nodes`, and how far the field moves them.

    field: (N, *full). shape, spacing: of the grid that is shown. scale: full voxels along one voxel of it.
    """
    nodes, steps = grid_nodes(shape, spacing)
    at = [np.rint((places + 0.5) * ratio - 0.5).astype(int) for places, ratio in zip(nodes, scale)]
    moved = field[np.ix_(range(len(field)), *at)] / scale[:len(field)].reshape(-1, 1, 1, 1)
    units = np.where(np.isfinite(moved), np.rint(np.clip(HUNDREDTHS * moved, -32767, 32767)), NO_NODE)
    return {"start": [int(places[0]) for places in nodes], "step": steps.tolist(), "shape": moved.shape[1:],
            "unit": 1 / HUNDREDTHS, "moved": pack(units, "<i2")}


def determinant_codes(determinant, half, shape):
    """1 .. LEVELS for determinants of 1 - half .. 1 + half; 0 where any voxel folds, LEVELS + 1 where one is NaN."""
    is_finite = np.isfinite(determinant)
    share = (np.clip(np.where(is_finite, determinant, 1), 1 - half, 1 + half) - 1 + half) / (2 * half)
    codes = 1 + np.rint((LEVELS - 1) * pooled(share, shape))
    codes[pooled(~is_finite, shape, F.adaptive_max_pool3d) > 0] = LEVELS + 1
    codes[pooled(is_finite & (determinant <= 0), shape, F.adaptive_max_pool3d) > 0] = 0
    return codes


def determinant_colours():
    """Red, green, blue and opacity of the codes, 0..255: (LEVELS + 2, 4). Close to 1 the image shows through."""
    places = np.linspace(-1, 1, LEVELS)
    # Leave out the pale middle of these colours, which would cover dark tissue like fog.
    colours = colormaps["RdBu_r"](0.5 + np.sign(places) * (0.22 + 0.23 * np.abs(places)))
    colours[:, 3] = 0.85 * np.abs(places)
    return 255 * np.vstack([[*to_rgb(FOLDED), 1], colours, [*to_rgb(NOT_FINITE), 0.8]])


def pooled(volume, shape, pool=F.adaptive_avg_pool3d):
    return pool(torch.from_numpy(np.ascontiguousarray(volume, np.float32))[None], shape)[0].numpy()


def nearest(volume, shape):
    places = [(2 * np.arange(n) + 1) * full // (2 * n) for n, full in zip(shape, volume.shape)]
    return volume[np.ix_(*places)]


def pack(array, kind=np.uint8):
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array, kind).tobytes(), 9)).decode()


# ---------------------------------------------------------------------------------------------------------------------
# What people see and press
# ---------------------------------------------------------------------------------------------------------------------

def controls_html(words, has_labels, dims):
    """The buttons: data-set and data-to, or data-flip, say what one changes; aria-keyshortcuts, which key does it."""
    fixed, *others = words
    groups = []
    if dims == 3:
        groups.append(("Plane", "plane", {"axial": "1", "coronal": "2", "sagittal": "3"}))
    if len(others) > 1:
        groups.append(("Moving volume", "moving", {word: word[0] for word in others}))
    groups.append(("Show", "view", {"divider": "d", "flicker": "f", "checkerboard": "c", "difference": "e",
                                    "moving": "m", "fixed": "x"}))
    shown = {"fixed": fixed, "moving": "moving" if len(others) > 1 else others[0]}
    html = [(heading, [(f'data-set="{key}" data-to="{escape(to)}"', shown.get(to, to), letter)
                       for to, letter in buttons.items()]) for heading, key, buttons in groups]
    html.append(("On top", [('data-flip="labels"', "labels", "l")] * has_labels
                 + [('data-flip="grid"', "grid", "g"), ('data-flip="jacobian"', "Jacobian", "j")]))
    return "\n".join(
        f'<div role="group" aria-label="{heading}"><b>{heading}</b>\n' + "".join(
            f'<button type="button" {data} aria-pressed="false" aria-keyshortcuts="{escape(letter)}">{escape(text)}'
            f"<kbd>{escape(letter)}</kbd></button>\n" for data, text, letter in buttons) + "</div>"
        for heading, buttons in html)


def legends_html(fixed, half, grid_words):
    """What the colours mean; Report/viewer.js shows each beside what it explains."""
    stops = ", ".join("rgb({:.0f} {:.0f} {:.0f} / {:.2f})".format(*colour, opacity / 255)
                      for *colour, opacity in determinant_colours()[1:-1:3])
    return f"""<p data-legend="labels"><span><i style="background: {FIXED_LINE}"></i>{escape(fixed)}</span>
<span><i style="background: {MOVING_LINE}"></i><span class="other"></span></span></p>
<p data-legend="grid">Grid: where the points of a regular one come from, x + field(x){grid_words}.</p>
<p data-legend="jacobian"><span>{1 - half:.2f} <i class="scale" style="background: linear-gradient(to right, {stops}),
#000"></i> {1 + half:.2f}</span> <span><i style="background: {FOLDED}"></i>folded (\u2264 0)</span></p>
<p data-legend="difference">Dark: equal. Bright: different.</p>"""


def help_html(others, full, shape, budget):
    """The line below: the keys, which side is which, and how much of the volumes, `shape` of `full`, is shown."""
    keys = ["<kbd>\u2190</kbd> <kbd>\u2192</kbd> divider"]
    if len(full) == 3:
        keys.insert(0, "<kbd>\u2191</kbd> <kbd>\u2193</kbd> slices")
    if len(others) > 1:
        keys.append(f"<kbd>space</kbd> {escape(' or '.join(others))}")
    side = "R is the patient's right. " if len(full) == 3 else ""
    full_size, size = (" \u00d7 ".join(map(str, each)) for each in (full, shape))
    shown = f"All {full_size} voxels are shown."
    if full != shape:
        shown = (f"Shown are {size} voxels, averages of the {full_size}: this viewer may take {budget / 1e6:.2g} MB of "
                 "the page. The numbers are of all voxels.")
    return (f'<p class="help"><span class="mouse">Click the picture, then {", ".join(keys)}; the other keys are on the '
            f'buttons. </span><span class="touch">Drag the divider with a finger. </span>{side}{shown}</p>')
