"""What registrations look like, one and many: checkerboards, box plots, tables, and the page that shows them."""
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from Dataloader.nifti import read_field, read_label, read_volume
from Diffusion.figures import CELL, FIXED_LINE, MOVING_LINE, middle_slices, registration_figure
from Diffusion.metrics import spread
from Inference.registration import apply_field
from Runtime.report import cards_html, figure_html, table_html, text_table, write_page

COLUMNS = {"dice_before": ".3f", "dice": ".3f", "similarity_before": ".3f", "similarity": ".3f",
           "folding_percent": ".4f", "sdlogj": ".4f", "seconds": ".2f"}

WIDTH = 11.2  # inches
SQUARES = 7  # along the longer side of a slice
BEFORE, AFTER, LINE = "#c4cad0", MOVING_LINE, "#26323d"
MOST_BOXES = 40  # labels side by side


def checkerboard_figure(fixed, before, after):
    """Squares of the fixed and of the moving volume in turn, as the headers place them and after the registration.

    fixed, before, after: (D, H, W) or (H, W) on the fixed grid; before and after: the moving volume there. Where the
    edges of structures run on from square to square, the volumes agree.
    Returns: a matplotlib Figure of the middle slices, before on the left, after on the right.
    """
    slices = [middle_slices(volume) for volume in (_grey(fixed), *_greys_together(before, after))]
    widths = [plane.shape[0] for plane in slices[0]]
    widths = [*widths, 0.05 * sum(widths), *widths]  # a gap between before and after
    tallest = max(plane.shape[1] for plane in slices[0])
    height = min(tallest * WIDTH / sum(widths), 5 * CELL) + 0.4
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths, left=0.005, right=0.995, bottom=0.01,
                               top=1 - 0.32 / height, wspace=0.03)
    for part, (moving, word) in enumerate(zip(slices[1:], ("before", "after"))):
        for number, (still, moved) in enumerate(zip(slices[0], moving)):
            ax = figure.add_subplot(grid[part * (len(slices[0]) + 1) + number])
            side = max(2, round(max(still.shape) / SQUARES))
            odd = (np.indices(still.shape) // side).sum(0) % 2 == 1
            ax.imshow(np.where(odd, moved, still).T, cmap="gray", vmin=0, vmax=1, origin="lower",
                      interpolation="nearest", aspect="equal")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_color("#c4cad0")
            ax.set_anchor("S")
            if number == 0:
                figure.text(ax.get_position().x0, 1 - 0.22 / height, f"{word}: squares of fixed and "
                            f"{'warped' if part else 'moving'}", fontsize=10, fontweight="bold")
    return figure


def box_figure(dice, similarity, folding):
    """How the scores spread over the pairs: Dice of each label and similarity before and after, and folding.

    dice: {label: (values before, values after)}; may be empty. similarity: (values before, values after).
    folding: percent of voxels. None and NaN are left out. Up to 30 pairs are drawn as points, fewer than 5 only so.
    Returns: a matplotlib Figure.
    """
    labels = list(dice)[:MOST_BOXES]
    panels = {"similarity": ("local correlation", ["all"], [similarity]),
              "folding": ("folded voxels, %", [""], [(folding,)])}
    if labels:
        panels = {"dice": ("Dice" + f", first {MOST_BOXES} labels" * (len(dice) > MOST_BOXES),
                           [str(label) for label in labels], [dice[label] for label in labels])} | panels
    if len(labels) > 8:
        figure, layout, widths = Figure(figsize=(WIDTH, 5.8)), [["dice", "dice"], ["similarity", "folding"]], [1, 1]
    else:
        widths = [max(2.2, 0.7 * len(names)) for _, names, _ in panels.values()]
        figure, layout = Figure(figsize=(sum(widths) + 2.2, 3.3)), [list(panels)]
    figure.set_layout_engine("constrained")
    axes = figure.subplot_mosaic(layout, width_ratios=widths)
    for key, (title, names, groups) in panels.items():
        ax = axes[key]
        for place, group in enumerate(groups):
            for part, values in enumerate(group):
                _box(ax, place + (part - 0.5) * 0.36 * (len(group) > 1), _finite(values),
                     BEFORE if part == 0 and len(group) > 1 else AFTER)
        ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        ax.set(xticks=range(len(names)), xlim=(-0.6, len(names) - 0.4))
        ax.set_xticklabels(names, fontsize=8.5 if len(names) < 20 else 7)
        ax.grid(axis="y", color="#e3e6e9", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    if labels:
        axes["dice"].set(xlabel="label", ylim=(-0.02, 1.02))
    highest = max(_finite(folding), default=0)
    axes["folding"].set_ylim(-0.02 * max(0.1, highest), 1.05 * max(0.1, highest))
    figure.legend(handles=[Patch(color=BEFORE, label="before"), Patch(color=AFTER, label="after")], frameon=False,
                  loc="outside lower right", ncols=2, fontsize=9)
    return figure


def pair_figures(row, dims):
    """The pictures of one registered pair, from its files: `registration_figure` and `checkerboard_figure`.

    Intensities are 0..1 between percentiles of each volume, so that differences can be looked at.
    row: of the results, with fixed, moving, folder and, where there are, fixed_label and moving_label.
    """
    folder = Path(row["folder"])
    (fixed, affine), (moving, moving_affine) = (read_volume(row[side], dims) for side in ("fixed", "moving"))
    field, _ = read_field(folder / "field.nii.gz", dims)
    still, warped = np.zeros_like(field), apply_field(moving, moving_affine, field, affine)
    start = apply_field(moving, moving_affine, still, affine)
    labels = None
    if "fixed_label" in row and "moving_label" in row:
        moving_label = read_label(row["moving_label"], dims)[0]
        labels = [apply_field(moving_label, moving_affine, still, affine, order=0),
                  read_label(row["fixed_label"], dims)[0], read_label(folder / "warped_label.nii.gz", dims)[0]]
    images = [_grey(fixed), *_greys_together(start, warped)]
    return (registration_figure(images[1], images[0], images[2], field, labels, row["name"]),
            checkerboard_figure(fixed, start, warped))


def means(rows, failed):
    """The means of all columns, and how many pairs are done and failed, as one flat dict."""
    return {**{column: round(mean, 5) for column, (mean, *_) in spread(rows, COLUMNS).items()}, "pairs": len(rows),
            "failed": len(failed)}


def worst_first(rows):
    """The rows by mean Dice where all have one, else by similarity."""
    column = "dice" if all(row.get("dice") is not None for row in rows) else "similarity"
    return sorted(rows, key=lambda row: row[column]), {"dice": "Dice", "similarity": "similarity"}[column]


def write_report(folder, rows, failed, lead, dims):
    """report.html and the table on the terminal. rows: of the results, at least one. Returns: the page's path."""
    found, (ordered, by) = spread(rows, COLUMNS), worst_first(rows)
    words = [column.replace("_percent", " %").replace("_", " ") for column in found]
    header, formats = ["pair", *words], [None, *[COLUMNS[column] for column in found]]
    ends = [[word, *[pair[part] for pair in found.values()]] for part, word in enumerate(("mean", "sd"))]
    lines = [[row["name"].replace("_to_", " to "), *[row.get(column) for column in found]] for row in ordered]
    ends = ends if len(rows) > 1 else []
    sections = [("", cards_html([(word, f"{mean:{COLUMNS[column]}}",
                                  f"sd {deviation:{COLUMNS[column]}}" if len(rows) > 1 else "")
                                 for word, (column, (mean, deviation, _)) in zip(words, found.items())]))]
    notes = [[entry["name"], "failed", entry["reason"]] for entry in failed]
    notes += [[row["name"], "warning", sentence] for row in ordered for sentence in row["warnings"]]
    if notes:
        sections.append(("Failed pairs and warnings", table_html(["pair", "", "what"], notes)))
    sections.append(("Pairs", table_html(header, [*lines, *ends], f"Worst {by} first. Dice and similarity before: as "
                                         "the headers place the volumes. Seconds without reading files.", formats)))
    sections.append(("Spread over the pairs", figure_html(_boxes(rows), "Box: quartiles; line: median; whiskers: "
                                                          "within 1.5 times the box.", "box plots of the scores")))
    places = dict.fromkeys([0, (len(ordered) - 1) // 2, len(ordered) - 1])
    ranks = {1: [""], 2: ["Worst: ", "Best: "], 3: ["Worst: ", "Median: ", "Best: "]}[len(places)]
    for place, rank in zip(places, ranks):
        pictures = [figure_html(figure, caption, ordered[place]["name"]) for figure, caption in
                    zip(pair_figures(ordered[place], dims), ("Middle slices, on the fixed grid.", "Checkerboards."))]
        sections.append((f"{rank}{ordered[place]['name']}", "".join(pictures)))
    print(text_table(header, [*lines, *ends], formats))
    return write_page(folder / "report.html", "Registrations", f"{len(rows)} pair{'s' * (len(rows) > 1)}; {lead}.",
                      sections)


def _boxes(rows):
    """`box_figure` of the rows."""
    by_label = {}
    for row in rows:
        for label, values in row["labels"].items():
            pair = by_label.setdefault(label, ([], []))
            pair[0].append(values["dice_before"])
            pair[1].append(values["dice"])
    by_label = dict(sorted(by_label.items(), key=lambda item: int(item[0])))
    similarity = [[row[key] for row in rows] for key in ("similarity_before", "similarity")]
    return box_figure(by_label, similarity, [row["folding_percent"] for row in rows])


def _box(ax, place, values, color):
    """One box of values with its points; a few values have no quartiles worth drawing and are points alone."""
    few = len(values) < 5
    if not few:
        lines = {"color": LINE, "linewidth": 0.8}
        ax.boxplot([values], positions=[place], widths=0.3, patch_artist=True, manage_ticks=False, showfliers=False,
                   boxprops={"facecolor": color, "edgecolor": LINE, "linewidth": 0.8, "alpha": 0.75},
                   medianprops={"color": FIXED_LINE, "linewidth": 1.6}, whiskerprops=lines, capprops=lines)
    if len(values) <= 30:
        spread = 0.1 * np.sin(2.4 * np.arange(len(values)))  # apart, and the same in every drawing
        ax.plot(place + spread, values, "o", color=color if few else LINE, markersize=6 if few else 1.5,
                markeredgecolor=LINE, markeredgewidth=0.6, alpha=1 if few else 0.7)


def _finite(values):
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    return numbers[np.isfinite(numbers)]


def _grey(volume, limits=None):
    """Intensities as 0..1 between two percentiles, of this volume or as given."""
    volume = np.asarray(volume, np.float32)
    low, high = limits or np.percentile(volume, (0.5, 99.5))
    return np.clip((volume - low) / (high - low if high > low else 1), 0, 1)


def _greys_together(before, after):
    """The moving volume before and after, with the same intensity for the same grey."""
    low, high = np.percentile(np.stack([before, after]), (0.5, 99.5))
    return _grey(before, (low, high)), _grey(after, (low, high))
