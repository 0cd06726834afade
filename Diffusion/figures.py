"""Pictures of volumes and fields, as matplotlib figures; Report/page.py writes them to files and pages."""
import textwrap

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from nibabel import orientations

from Diffusion.fields import jacobian_determinant

COLUMNS = [("moving", ""), ("fixed", ""), ("warped", "moving(x + field(x))"), ("before", "|fixed \u2212 moving|"),
           ("after", "|fixed \u2212 warped|"), ("grid", "x + field(x)"), ("Jacobian", "determinant")]
FIXED_LINE, MOVING_LINE, FOLDED, NOT_FINITE = "#ff9e1b", "#19b5e0", "#00b83a", "#808080"
CELL, GAP, LEFT, BOTTOM = 1.6, 0.12, 0.7, 0.75  # inches
# Slices across each axis of a volume turned to the screen: the axes that run right and down, and the letters at left,
# right, top and foot, as in Report/viewer.js.
PLANES = [("sagittal", 1, 2, "APSI"), ("coronal", 0, 2, "RLSI"), ("axial", 0, 1, "RLAP")]
GRID_LINES = 24  # approximate number along the longest side of a deformed grid
NOTHING = "nothing here, as the\nheaders place it"


def turn_to_screen(images, labels, field, affine, body=None):
    """All volumes with three axes that run to the left, to the back and to the feet, as radiologists view slices.

    Oblique axes count as the nearest of these. 2D images get a third axis of one voxel; their first axis runs right,
    their second up, or down if it runs to the back or to the feet, as in DICOM files and those of SimpleITK.
    images, labels: {word: (D, H, W) or (H, W)}, on one grid. field: (N, *spatial) in voxels. affine: 4x4. body:
    booleans (*spatial), where the field is kept; None for everywhere.
    Returns: dict of images, labels, determinant, field (its components along these axes; NaN outside of the body),
    shape, and spacing in mm.
    """
    determinant = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()
    moved, spacing = _turn_field(field, affine)
    if body is not None:
        moved[:, ~turn(body, affine)] = np.nan
    return {"images": {word: turn(image, affine) for word, image in images.items()},
            "labels": {word: turn(label, affine) for word, label in labels.items()},
            "determinant": turn(determinant, affine), "field": moved, "shape": moved.shape[1:],
            "spacing": spacing}


def _screen_axes(affine, dims):
    """For each axis of the screen, the axis of the volume that it shows, and its sign: two arrays of three."""
    of_axes = orientations.io_orientation(affine)
    if dims == 2:
        axis, sign = of_axes[1]
        return np.array([0, 1, 2]), np.array([1, 1 if axis > 0 > sign else -1, 1])
    order = np.argsort(of_axes[:, 0])
    return order, -of_axes[order, 1].astype(int)  # nibabel counts to the right, to the front and to the head


def turn(volume, affine):
    """One volume of `turn_to_screen`, without a copy."""
    order, signs = _screen_axes(affine, np.ndim(volume))
    volume = np.asarray(volume)[..., None] if np.ndim(volume) == 2 else np.asarray(volume)
    return volume.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]


def screen_spacing(affine, dims):
    """The spacing of voxels along the axes of the screen in mm, (3,)."""
    return np.linalg.norm(np.asarray(affine)[:3, :3], axis=0)[_screen_axes(affine, dims)[0]]


def _turn_field(field, affine):
    """A field of `turn_to_screen`: (N, left, back, feet), and the spacing of its voxels in mm, (3,)."""
    order, signs = _screen_axes(affine, len(field))
    moved = np.stack([sign * turn(field[axis], affine) for axis, sign in zip(order[:len(field)], signs)])
    return moved, screen_spacing(affine, len(field))


def grid_nodes(shape, spacing):
    """Indices of the lines of a grid along each axis, about GRID_LINES along the longest side; and their steps (N,)."""
    apart = np.max(np.multiply(shape, spacing)) / GRID_LINES
    steps = np.maximum(1, np.rint(apart / spacing)).astype(int)
    return [np.arange((n - 1) % step // 2, n, step) for n, step in zip(shape, steps)], steps


def middle_slices(volume):
    """The slices through voxel n // 2 of each axis: sagittal, coronal, axial; of a 2D image the image itself.

    The first axis of a slice goes right, the second down. volume: turned to the screen, (left, back, feet); the last
    axis of a 2D image is one voxel. Returns: list of 2D arrays.
    """
    return [np.take(volume, volume.shape[axis] // 2, axis) for axis in slices_across(volume.shape)]


def slices_across(shape):
    """The axes of a turned volume across which slices are shown."""
    return [2] if shape[2] == 1 else [0, 1, 2]


def registration_figure(moving, fixed, warped, field, labels=None, title="", body=None, affine=None, by_headers=False):
    """Picture of one registration: the images, differences, deformed grid and Jacobian determinant, in middle slices.

    Slices are turned by `turn_to_screen` and true in mm. The minimum of the determinant and the percentage of voxels
    where it is <= 0 are those of the whole volume.
    moving, fixed, warped: (D, H, W) or (H, W), arrays or tensors on the fixed grid. field: (N, *spatial), displacement
    in voxels. labels: (moving_label, fixed_label, warped_label) of the same shape, 0 = background, drawn as outlines.
    body: booleans (*spatial), where the deformed grid is drawn; None for everywhere. affine: 4x4 of the fixed grid;
    None for the training grid, whose voxels are cubes along right, front and head. by_headers: whether `moving` is
    shown where its header places it, which the picture then says.
    Returns: a matplotlib Figure, for `figure_png` or `figure_html`.
    """
    words = ("moving", "fixed", "warped")
    images = {word: _array(image) for word, image in zip(words, (moving, fixed, warped))}
    labels = {word: _array(label) for word, label in zip(words, labels or ())}
    affine = np.eye(4) if affine is None else affine
    turned = turn_to_screen(images, labels, _array(field), affine, body)
    shape, spacing, determinant = turned["shape"], turned["spacing"], turned["determinant"]
    facts = (f"smallest Jacobian determinant {determinant.min():.3g}, folded {100 * (determinant <= 0).mean():.4g} % "
             "of voxels (determinant 0 or less)")
    figure, axes = _layout(shape, spacing, [*textwrap.wrap(title, 115), facts], by_headers,
                           "\u2191" if _screen_axes(affine, np.ndim(fixed))[1][1] < 0 else "\u2193")
    columns = [middle_slices(image) for image in turned["images"].values()]
    columns += [[np.abs(a - b) for a, b in zip(columns[1], columns[other])] for other in (0, 2)]
    of_moving = _limits(columns[0])
    of_fixed = _limits(columns[1])
    of_difference = (0, _limits(columns[3] + columns[4])[1])
    limits = [of_moving, of_fixed, of_moving, of_difference, of_difference]
    for column, slices in enumerate(columns):
        for ax, image in zip(axes[:, column], slices):
            shown = _show(ax, image, "gray" if column < 3 else "magma", *limits[column])
    _bar(figure, shown, axes[-1, 3:5], "absolute difference", MaxNLocator(5))
    if labels:
        _draw_outlines(figure, axes, [middle_slices(label) for label in turned["labels"].values()])
    for ax, across in zip(axes[:, 5], slices_across(shape)):
        _draw_grid(ax, turned["field"], across, spacing)
    _draw_determinant(figure, axes[:, 6], middle_slices(determinant))
    for row, across in zip(axes, slices_across(shape)):
        for ax in row:
            ax.set_aspect(_aspect(across, spacing))
    for ax, image, other in zip(axes[:, 0], columns[0], columns[1]):
        if by_headers and np.ptp(image) == 0 < np.ptp(other):
            ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", va="center", fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})
    return figure


def gallery_figure(copies):
    """Several versions of one image side by side, with outlines of their labels and the deformed grid below each.

    copies: list of (title, image, label, field or None, affine); image and label (D, H, W) or (H, W), arrays or tensors
    of one shape, shown by the middle axial slice; field (N, *spatial) in voxels; affine 4x4.
    Returns: a matplotlib Figure.
    """
    figure = Figure(figsize=(CELL * 1.25 * len(copies), CELL * 2.8), layout="constrained")
    axes = figure.subplots(2, len(copies), squeeze=False)
    slices = [middle_slices(turn(_array(image), affine))[-1] for _, image, _, _, affine in copies]
    high = _limits(slices)[1]
    for (top, bottom), shown, (title, image, label, field, affine) in zip(axes.T, slices, copies):
        field = np.zeros((np.ndim(image), *np.shape(image)), np.float32) if field is None else _array(field)
        moved, spacing = _turn_field(field, affine)
        _show(top, shown, "gray", 0, high)
        top.set_title(title, fontsize=10)
        _outline(top, middle_slices(turn(_array(label), affine))[-1], FIXED_LINE)
        _draw_grid(bottom, moved, 2, spacing)
        for ax in (top, bottom):
            ax.set_aspect(_aspect(2, spacing))
    return figure


def contact_sheet(volumes):
    """Many volumes at a glance: the middle slices of each, side by side, with outlines of the labels.

    volumes: list of (title, image, label or None); image and label (D, H, W) or (H, W), arrays or tensors of one shape
    on the training grid, whose voxels are cubes along right, front and head; each image is shown from 0 to its own
    percentile 99.5. Returns: a matplotlib Figure.
    """
    grid = np.eye(4)
    planes = 3 if np.ndim(volumes[0][1]) == 3 else 1
    across = min(12 // planes, len(volumes))
    rows = -(-len(volumes) // across)
    figure = Figure(figsize=(0.95 * across * planes + 0.2, 1.25 * rows), layout="constrained")
    axes = figure.subplots(rows, across * planes, squeeze=False).reshape(rows * across, planes)
    for ax in axes[len(volumes):].flat:
        ax.set_axis_off()
    for row, (title, image, label) in zip(axes, volumes):
        slices = middle_slices(turn(_array(image), grid))
        high = _limits(slices)[1]
        for ax, plane in zip(row, slices):
            _show(ax, plane, "gray", 0, high)
        for ax, outline in zip(row, [] if label is None else middle_slices(turn(_array(label), grid))):
            _outline(ax, outline, FIXED_LINE, 0.6)
        title = title.encode(errors="backslashreplace").decode()  # matplotlib draws no name that is not UTF-8
        row[0].set_title(textwrap.shorten(title, 30), fontsize=7, loc="left", parse_math=False)
    return figure


def _array(volume):
    """A copy as float32 array: differences of unsigned integers would wrap around."""
    volume = volume.detach().cpu().float().numpy() if isinstance(volume, torch.Tensor) else volume
    return np.array(volume, np.float32, order="C")


def _limits(slices):
    """Percentiles 0.5 and 99.5 of the finite values; for constant values the second is raised above the first."""
    values = np.concatenate([image[np.isfinite(image)] for image in slices])
    low, high = map(float, np.percentile(values, (0.5, 99.5))) if values.size else (0.0, 0.0)
    return low, high if high > low else low + max(1.0, abs(low) * 1e-3)


def _layout(shape, spacing, heading, by_headers, second):
    """The figure with its texts, and the axes as an array (rows, columns). One mm is as long in all rows.

    shape, spacing: of `turn_to_screen`. heading: lines of text. second: an arrow, where the second axis of a 2D image
    runs. All lengths are inches, but for the spacing.
    """
    planes, extent = [PLANES[axis] for axis in slices_across(shape)], np.multiply(shape, spacing)
    widest = max(extent[right] for _, right, _, _ in planes)
    # At least 0.6, the height of a row's label; at most 2.5 cells, so that a long thin image does not fill a page.
    heights = [min(max(CELL * extent[down] / widest, 0.6), 2.5 * CELL) for _, _, down, _ in planes]
    top = 0.65 + 0.2 * len(heading)
    width = LEFT + len(COLUMNS) * (CELL + GAP)
    height = top + sum(heights) + GAP * (len(heights) - 1) + BOTTOM
    figure = Figure(figsize=(width, height))
    figure.suptitle("\n".join(heading), x=LEFT / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=11,
                    linespacing=1.3, parse_math=False)
    axes = np.empty((len(heights), len(COLUMNS)), dtype=object)
    for column, (name, formula) in enumerate(COLUMNS):
        formula = "as the headers place it" if by_headers and not column else formula
        left, bottom = LEFT + column * (CELL + GAP), height - top
        centre = (left + CELL / 2) / width
        figure.text(centre, (bottom + 0.24) / height, name, ha="center", fontsize=10, fontweight="bold")
        figure.text(centre, (bottom + 0.08) / height, formula, ha="center", fontsize=8.5, color="#555")
        for row, size in enumerate(heights):
            bottom -= size + GAP * (row > 0)
            axes[row, column] = figure.add_axes([left / width, bottom / height, CELL / width, size / height])
            if column == 0:
                text = f"first \u2192\nsecond {second}"  # axes of an image
                if len(planes) > 1:
                    at = f"{shape[row] // 2 + 1}/{shape[row]}"  # as the viewer counts slices
                    text = "{}\n{}\n{} \u2192 {}\n{} \u2193 {}".format(planes[row][0], at, *planes[row][3])
                figure.text(0.12 / width, (bottom + size / 2) / height, text, va="center", fontsize=8.5, color="#333")
    return figure, axes


def _show(ax, image, cmap, low, high):
    ax.set_axis_off()
    return ax.imshow(image.T, cmap=cmap, vmin=low, vmax=high, origin="upper", interpolation="nearest")


def _aspect(across, spacing):
    """Height of a voxel over its width in slices across this axis."""
    _, right, down, _ = PLANES[across]
    return spacing[down] / spacing[right]


def _outline(ax, label, color, width=0.9):
    """Draw the borders of a slice's labels. Padding by background closes borders at the edge of the image."""
    limits, padded = ax.axis(), np.pad(label, 1)
    for value in np.unique(label[label != 0]):
        ax.contour(*(np.arange(n) - 1 for n in padded.shape), (padded == value).T, levels=[0.5], colors=[color],
                   linewidths=width)
    ax.axis(limits)


def _draw_outlines(figure, axes, labels):
    """Draw the fixed label's outlines over all three images, the moving and warped labels' over their own."""
    for column, own in enumerate(labels):
        for slices, color in [(labels[1], FIXED_LINE)] + [(own, MOVING_LINE)] * (column != 1):
            for ax, label in zip(axes[:, column], slices):
                _outline(ax, label, color)
    lines = [Line2D([], [], color=color) for color in (FIXED_LINE, MOVING_LINE)]
    place = (LEFT / figure.get_figwidth(), 0.35 / figure.get_figheight())
    figure.legend(lines, ["fixed label", "moving / warped label"], loc="lower left", bbox_to_anchor=place, ncols=2,
                  frameon=False, fontsize=9, borderaxespad=0, borderpad=0)


def _bar(figure, image, axes, text, ticks):
    """A horizontal colour bar below the columns of `axes`."""
    left = axes[0].get_position(original=True).x0
    right = axes[-1].get_position(original=True).x1
    height = figure.get_figheight()
    margin = 0.1 / figure.get_figwidth()
    place = [left + margin, (BOTTOM - 0.22) / height, right - left - 2 * margin, 0.1 / height]
    bar = figure.colorbar(image, cax=figure.add_axes(place), orientation="horizontal", ticks=ticks)
    bar.ax.tick_params(labelsize=8, length=2, pad=2)
    bar.outline.set_visible(False)
    bar.set_label(text, fontsize=8.5, labelpad=2, color="#333")
    return bar


def _draw_grid(ax, field, across, spacing):
    """Some grid lines of the middle slice across an axis, moved by the components of the field in its plane.

    field, spacing: of `turn_to_screen`.
    """
    _, a, b, _ = PLANES[across]
    nodes, _ = grid_nodes(field.shape[1:], spacing)
    of_a, of_b = (np.take(field[axis], field.shape[1 + across] // 2, across) for axis in (a, b))
    index = np.indices(of_a.shape)
    right, down = index[0] + of_a, index[1] + of_b
    i, j = nodes[a], nodes[b]
    ax.plot(right[i].T, down[i].T, right[:, j], down[:, j], color="#26323d", linewidth=0.6)
    across, high = right.shape
    ax.set(xlim=(-0.5, across - 0.5), ylim=(high - 0.5, -0.5), xticks=[], yticks=[])
    ax.spines[:].set_color("#c4cad0")


def _draw_determinant(figure, axes, slices):
    """The determinant's slices, blue to red around 1, with folded and not finite voxels in colours of their own."""
    values = np.concatenate([image[np.isfinite(image)] for image in slices])
    # The range is at most 0 .. 2 and at least 0.9 .. 1.1: at 0 .. 2 a gentle field would look blank.
    half = float(np.clip(np.abs(values - 1.0).max(initial=0.0), 0.1, 1.0))
    cmap = colormaps["RdBu_r"].with_extremes(under=FOLDED, bad=NOT_FINITE)
    for ax, image in zip(axes, slices):
        inside = np.where(image <= 0, -1.0, np.clip(image.astype(np.float64), 1 - half, 1 + half))
        shown = _show(ax, inside, cmap, 1 - half, 1 + half)
    bar = _bar(figure, shown, axes[-1:], "green: folded (\u2264 0)", [1 - half, 1, 1 + half])
    bar.ax.set_xticklabels([f"{1 - half:.2g}", "1", "\u2265 2" if (values > 2).any() else f"{1 + half:.3g}"])
