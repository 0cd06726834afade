"""Small pictures of many volumes for a page: the middle slices with outlines, as PNG files of a few kilobytes."""
import base64
import io
from html import escape

import numpy as np
from PIL import Image  # a requirement of matplotlib
from scipy import ndimage

from Diffusion.figures import screen_spacing, slices_across, turn

SIDE = 120  # pixels, of the longest side of a volume
GREYS, STEPS, SHADES = 96, 5, 14  # of the palette: greys, steps of red and of blue, and greys under each step
COLOURS = ((255, 158, 27), (25, 181, 224), (0, 184, 58), (232, 84, 140), (150, 110, 240), (230, 210, 40))  # outlines
RED, BLUE = np.array([255, 40, 40]), np.array([40, 90, 255])
MOST = 0.8  # share of the colour at the last step, which leaves the anatomy visible


def palette():
    """(256, 3) bytes: GREYS greys, COLOURS, then SHADES greys under each step of red and under each step of blue."""
    greys = np.linspace(0, 255, GREYS)[:, None].repeat(3, 1)
    shades = np.linspace(0, 255, SHADES)[:, None].repeat(3, 1)
    tinted = [shades + share * (hue - shades) for hue in (RED, BLUE) for share in np.linspace(0, MOST, STEPS + 1)[1:]]
    colours = np.concatenate([greys, COLOURS, *tinted])
    return np.pad(colours, ((0, 256 - len(colours)), (0, 0))).astype(np.uint8)


def thumbnail(image, affine, outlines=(), heat=None):
    """The slices through the middle of the outlined part, side by side, or a 2D image: bytes of a PNG.

    image: (D, H, W) or (H, W). affine: 4x4; slices are turned as by `Diffusion.figures.turn_to_screen`.
    outlines: list of (label map (*size), number of one of COLOURS, or the sorted values of all labels, each of which
    gets a colour by its place among them), drawn one after another. heat: (*size), -1..1, or None; red where it is
    positive, blue where it is negative.
    """
    volumes = [image, *(label for label, _ in outlines), *([] if heat is None else [heat])]
    turned = [turn(each, affine) for each in volumes]
    spacing = screen_spacing(affine, np.ndim(image))
    focus = [n // 2 for n in turned[0].shape]
    if outlines and (turned[1] != 0).any():
        focus = [int(round(each)) for each in ndimage.center_of_mass(turned[1] != 0)]
    limits = np.percentile(turned[0], (1, 99.5))
    scale = SIDE / max(turned[0].shape * spacing)  # of all slices, so that their anatomy is equally large
    colours, tiles = [colour for _, colour in outlines], []
    for axis in slices_across(turned[0].shape):
        planes = [np.take(each, focus[axis], axis) for each in turned]
        tiles.append(tile(planes, np.delete(spacing, axis), scale, limits, colours, heat is not None))
    height = max(len(each) for each in tiles)
    picture = np.concatenate([np.pad(each, ((height - len(each), 0), (0, 2))) for each in tiles], 1)
    file, image = io.BytesIO(), Image.fromarray(picture)
    image.putpalette(palette().tobytes())
    image.save(file, "png", optimize=True)
    return file.getvalue()


def tile(planes, sides, scale, limits, colours, has_heat):
    """One slice as palette indices, with square pixels.

    planes: the image, its label maps and, if `has_heat`, the heat, 2D each; the first axis runs right, the second
    down. sides: of a voxel, in mm. scale: pixels per mm. colours: of each label map, see `thumbnail`.
    """
    size = np.maximum(1, np.rint(scale * sides * planes[0].shape).astype(int))
    at = [np.clip(((np.arange(n) + 0.5) * full / n).astype(int), 0, full - 1) for n, full in zip(size, planes[0].shape)]
    grey, *rest = (plane[np.ix_(*at)].T for plane in planes)
    low, high = limits
    grey = np.clip((grey.astype(np.float32) - low) / (high - low if high > low else 1), 0, 1)
    picture = np.rint((GREYS - 1) * grey).astype(np.uint8)
    if has_heat:
        step = np.rint(STEPS * np.clip(rest.pop(), -1, 1)).astype(int)
        row = np.where(step > 0, step, STEPS - step) - 1
        tinted = GREYS + len(COLOURS) + row * SHADES + np.rint((SHADES - 1) * grey)
        picture = np.where(step != 0, tinted, picture).astype(np.uint8)
    for label, colour in zip(rest, colours):
        for value in np.unique(label[label != 0]):
            place = colour if isinstance(colour, int) else int(np.searchsorted(colour, value))
            inside = np.pad(label == value, 1)
            edge = inside & ~ndimage.binary_erosion(inside)
            # Shifted by one per lap: labels that alternate between left and right get all colours.
            picture[edge[1:-1, 1:-1]] = GREYS + (place + place // len(COLOURS)) % len(COLOURS)
    return picture


def gallery_html(pictures):
    """Pictures with a line below each, as many side by side as fit. pictures: list of (png, title, line)."""
    figures = [f'<figure class="thumb"><img src="data:image/png;base64,{base64.b64encode(png).decode()}" '
               f'alt="{escape(title)}"><figcaption><b>{escape(title)}</b> {escape(line)}</figcaption></figure>\n'
               for png, title, line in pictures]
    return f'<div class="thumbs">\n{"".join(figures)}</div>\n'
