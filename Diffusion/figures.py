"""Pictures of volumes and fields, as matplotlib figures; Report/page.py writes them to files and pages."""
import textwrap

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from Diffusion.fields import jacobian_determinant

COLUMNS = [("moving", ""), ("fixed", ""), ("warped", "moving(x + field(x))"), ("before", "|fixed \u2212 moving|"),
           ("after", "|fixed \u2212 warped|"), ("grid", "x + field(x)"), ("Jacobian", "determinant")]
FIXED_LINE, MOVING_LINE, FOLDED, NOT_FINITE = "#ff9e1b", "#19b5e0", "#00b83a", "#808080"
CELL, GAP, LEFT, BOTTOM = 1.6, 0.12, 0.7, 0.75  # inches
SLICES = {"R": "sagittal", "L": "sagittal", "A": "coronal", "P": "coronal", "S": "axial", "I": "axial"}  # across it
PLANES = {2: [(0, 1)], 3: [(1, 2), (0, 2), (0, 1)]}  # the two axes of each slice, right and up
GRID_LINES = 24  # approximate number along the longest axis of a deformed grid


def middle_slices(volume):
    """The slices through voxel n // 2 of each axis, in 3D (H, W), (D, W) and (D, H); in 2D the image itself.

    They are shown transposed, with the origin at the bottom: the first axis of a slice goes right, the second up.
    volume: (D, H, W) or (H, W), array or tensor. Returns: list of 2D float32 arrays.
    """
    volume = _array(volume)
    return [volume] if volume.ndim == 2 else [np.take(volume, n // 2, axis) for axis, n in enumerate(volume.shape)]


def registration_figure(moving, fixed, warped, field, labels=None, title="", body=None, axcodes=None):
    """Picture of one registration: the images, differences, deformed grid and Jacobian determinant, in middle slices.

    The minimum of the determinant and the percentage of voxels where it is <= 0 are those of the whole volume.
    moving, fixed, warped: (D, H, W) or (H, W), arrays or tensors on the fixed grid. field: (N, *spatial), displacement
    in voxels. labels: (moving_label, fixed_label, warped_label) of the same shape, 0 = background, drawn as outlines.
    body: booleans (*spatial), where the deformed grid is drawn; None for everywhere. axcodes: directions of the axes,
    such as "RAS" (nibabel.aff2axcodes), which name the slices; None for D, H and W.
    Returns: a matplotlib Figure, for `figure_png` or `figure_html`.
    """
    images = [_array(image) for image in (moving, fixed, warped)]
    field = _array(field)
    labels = [] if labels is None else [_array(label) for label in labels]
    determinant = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()
    facts = f"min determinant {determinant.min():.3g}, folded {100 * (determinant <= 0).mean():.4g} % of voxels"
    figure, axes = _layout(images[1].shape, [*textwrap.wrap(title, 115), facts], axcodes)
    columns = [middle_slices(image) for image in images]
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
        _draw_outlines(figure, axes, [middle_slices(label) for label in labels])
    _draw_grids(axes[:, 5], field if body is None else np.where(body, field, np.float32("nan")))
    _draw_determinant(figure, axes[:, 6], middle_slices(determinant))
    return figure


def gallery_figure(copies):
    """Several versions of one image side by side, with outlines of their labels and the deformed grid below each.

    copies: list of (title, image, label, field or None); image and label (D, H, W) or (H, W), arrays or tensors of one
    shape, shown by the middle slice of the last axis; field (N, *spatial) in voxels.
    Returns: a matplotlib Figure.
    """
    figure = Figure(figsize=(CELL * 1.25 * len(copies), CELL * 2.8), layout="constrained")
    axes = figure.subplots(2, len(copies), squeeze=False)
    high = _limits([middle_slices(image)[-1] for _, image, _, _ in copies])[1]
    for (top, bottom), (title, image, label, field) in zip(axes.T, copies):
        _show(top, middle_slices(image)[-1], "gray", 0, high)
        top.set_title(title, fontsize=10)
        _outline(top, middle_slices(label)[-1], FIXED_LINE)
        field = np.zeros((np.ndim(image), *np.shape(image)), np.float32) if field is None else _array(field)
        # The components along the two axes of the slice shown, the middle one of the last axis.
        planes = [np.take(part, part.shape[-1] // 2, -1) for part in field[:2]] if len(field) == 3 else list(field)
        _draw_grids([bottom], np.stack(planes))
    return figure


def contact_sheet(volumes):
    """Many volumes at a glance: the middle slices of each, side by side, with outlines of the labels.

    volumes: list of (title, image, label or None); image and label (D, H, W) or (H, W), arrays or tensors of one shape;
    each image is shown from 0 to its own percentile 99.5. Returns: a matplotlib Figure.
    """
    planes = len(PLANES[np.ndim(volumes[0][1])])
    across = min(12 // planes, len(volumes))
    rows = -(-len(volumes) // across)
    figure = Figure(figsize=(0.95 * across * planes + 0.2, 1.25 * rows), layout="constrained")
    axes = figure.subplots(rows, across * planes, squeeze=False).reshape(rows * across, planes)
    for ax in axes[len(volumes):].flat:
        ax.set_axis_off()
    for row, (title, image, label) in zip(axes, volumes):
        slices = middle_slices(image)
        high = _limits(slices)[1]
        for ax, plane in zip(row, slices):
            _show(ax, plane, "gray", 0, high)
        for ax, outline in zip(row, [] if label is None else middle_slices(label)):
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


def _layout(shape, heading, axcodes=None):
    """The figure with its texts, and the axes as an array (rows, columns). All rows have the same voxel size.

    shape: of the volumes. heading: lines of text. axcodes: as in `registration_figure`. All lengths are inches.
    """
    planes, names = PLANES[len(shape)], axcodes or "DHW"[-len(shape):]
    widest = max(shape[a] for a, _ in planes)
    # At least 0.6, the height of a row's label; at most 2.5 cells, so that a long thin image does not fill a page.
    heights = [min(max(CELL * shape[b] / widest, 0.6), 2.5 * CELL) for _, b in planes]
    top = 0.65 + 0.2 * len(heading)
    width = LEFT + len(COLUMNS) * (CELL + GAP)
    height = top + sum(heights) + GAP * (len(heights) - 1) + BOTTOM
    figure = Figure(figsize=(width, height))
    figure.suptitle("\n".join(heading), x=LEFT / width, y=1 - 0.12 / height, ha="left", va="top", fontsize=11,
                    linespacing=1.3, parse_math=False)
    axes = np.empty((len(heights), len(COLUMNS)), dtype=object)
    for column, (name, formula) in enumerate(COLUMNS):
        left, bottom = LEFT + column * (CELL + GAP), height - top
        centre = (left + CELL / 2) / width
        figure.text(centre, (bottom + 0.24) / height, name, ha="center", fontsize=10, fontweight="bold")
        figure.text(centre, (bottom + 0.08) / height, formula, ha="center", fontsize=8.5, color="#555")
        for row, size in enumerate(heights):
            bottom -= size + GAP * (row > 0)
            axes[row, column] = figure.add_axes([left / width, bottom / height, CELL / width, size / height])
            if column == 0:
                at = ""
                if len(shape) == 3:
                    at = f"{SLICES[names[row]]}\n" if names[row] in SLICES else f"{names[row]} = "
                    at += f"{shape[row] // 2}\n"
                text = at + "{} \u2192\n{} \u2191".format(*(names[axis] for axis in planes[row]))
                figure.text(0.12 / width, (bottom + size / 2) / height, text, va="center", fontsize=8.5, color="#333")
    return figure, axes


def _show(ax, image, cmap, low, high):
    ax.set_axis_off()
    return ax.imshow(image.T, cmap=cmap, vmin=low, vmax=high, origin="lower", interpolation="nearest")


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


def _draw_grids(axes, field):
    """Some grid lines of each slice, moved by the components of the field in its plane."""
    step = max(1, round(max(field.shape[1:]) / GRID_LINES))
    parts = [middle_slices(part) for part in field]
    for row, (ax, (a, b)) in enumerate(zip(axes, PLANES[len(field)])):
        index = np.indices(parts[a][row].shape)
        right = index[0] + parts[a][row]
        up = index[1] + parts[b][row]
        i, j = [slice((n - 1) % step // 2, None, step) for n in right.shape]
        ax.plot(right[i].T, up[i].T, right[:, j], up[:, j], color="#26323d", linewidth=0.6)
        across, high = right.shape
        ax.set(xlim=(-0.5, across - 0.5), ylim=(-0.5, high - 0.5), aspect="equal", xticks=[], yticks=[])
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
