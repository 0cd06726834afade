"""The report of registrations: pictures, tables, and the page that shows them."""
import os
from pathlib import Path

import numpy as np
import torch

from Dataloader import points
from Dataloader.grids import thinning
from Dataloader.nifti import read_field, read_label, read_volume
from Dataloader.volume import Volume
from Diffusion.figures import registration_figure
from Diffusion.metrics import spread
from Inference.labels import apply_field, without_affine
from Inference.scores import COLUMNS, CONTRAST, body_of, contrast, every, heading, in_range, noise_variance
from Inference.verdict import VERDICTS
from Inference.viewer import viewer_html
from Report.page import cards_html, figure_png, findings_html, png_html, table_html, text_table, write_page

PAIR_PAGE = "pair.html"  # of each pair of a list, in its folder
BEFORE_OF = {"dice": "dice_before", "hd95_mm": "hd95_before_mm", "tre_mm": "tre_before_mm",
             "similarity": "similarity_before"}
WORDS_OF_FILES = {"warped.nii.gz": "the moving volume on the fixed grid", "warped_label.nii.gz": "its labels there",
                  "field.nii.gz": "the deformation in mm, for ITK, ANTs, Slicer and --apply",
                  "inverse_field.nii.gz": "its inverse, on the moving grid",
                  "jacobian.nii.gz": "the change of volume in each voxel; the field folds where it is 0 or less",
                  **dict.fromkeys(points.WRITTEN, "the landmarks in the moving volume"),
                  "picture.png": "the picture of this page",
                  "segmented_fixed.nii.gz": "the network's segmentation of the fixed volume",
                  "segmented_moving.nii.gz": "the network's segmentation of the moving volume",
                  "results.json": "all scores and settings", "results.csv": "the scores as a table, label by label"}
# What each score means, shown on hover.
EXPLAINED = {heading(column): words for column, words in {
    "dice_before": "overlap of the labels as the headers place the volumes; 1 is perfect",
    "dice": "overlap of the warped labels with the fixed ones, mean over the labels; 1 is perfect",
    "hd95_before_mm": "HD95 as the headers place the volumes",
    "hd95_mm": "distance of the borders of the labels, 95th percentile; 0 is perfect",
    "tre_before_mm": "distance of the landmarks as the headers place the volumes",
    "tre_mm": "mean distance of the landmarks after the registration; 0 is perfect",
    "similarity_before": "similarity as the headers place the volumes",
    "similarity": "squared local correlation over the body of the fixed volume; 1 is perfect",
    "folding_percent": "voxels where the deformation folds, by central differences; 0 is best",
    "folding_any_percent": "voxels where any of the eight one-sided determinants is not positive; 0 is best",
    "ndv_percent": "volume that is turned inside out (non-diffeomorphic volume); 0 is best",
    "sdlogj": "how much the change of volume varies; 0 for an affine map",
    "inverse_error_mm": "mean error after going there and back from the moving volume",
    "inverse_consistency_mm": "mean error after going there and back from the fixed volume",
    "seconds": "time to register, without reading and writing files"}.items()}


def read_pair(row, dims):
    """The volumes of one registered pair from its files, on the fixed grid or every second or third of its voxels.

    Intensities are 0..1 between percentiles of each volume, so that volumes can be compared.
    row: of the results, with name, fixed, moving, folder, matrix and, if present, fixed_label and moving_label.
    Returns: dict of name, images and labels (fixed, and the moving volume before and after; labels may be None), field
    in voxels without the affine part, affine, and body, booleans, where the fixed volume shows something.
    """
    folder = Path(row["folder"])
    fixed = Volume(*read_volume(row["fixed"], dims), row["fixed"])
    moving, moving_affine = read_volume(row["moving"], dims)
    step = thinning(fixed.array.shape)
    kept = (slice(None, None, step),) * dims
    fixed, affine = fixed.every(step)
    field = every(read_field(folder / "field.nii.gz", dims)[0], step)
    zero = np.zeros_like(field)
    by_header = apply_field(moving, moving_affine, zero, affine)
    warped = apply_field(moving, moving_affine, field, affine)
    labels = None
    if "fixed_label" in row and "moving_label" in row:
        # With --resample-labels they are on grids of their own.
        placed = [apply_field(*read_label(row[f"{side}_label"], dims), zero, affine, order=0)
                  for side in ("fixed", "moving")]
        labels = {"fixed": placed[0], "before": placed[1],
                  "after": read_label(folder / "warped_label.nii.gz", dims)[0][kept]}
    seen, both = in_range(fixed, fixed), np.stack([by_header, warped])
    images = {"fixed": seen, "before": in_range(by_header, both), "after": in_range(warped, both)}
    seen = torch.from_numpy(seen)[None, None]
    whole = torch.ones_like(seen, dtype=torch.bool)
    variance = contrast(seen, whole.float())[2] - noise_variance(seen, whole)
    return {"name": row["name"], "images": {word: image.clip(0, 1) for word, image in images.items()},
            "labels": labels, "field": without_affine(field, row["matrix"], affine), "affine": affine,
            "body": body_of(variance, whole, CONTRAST)[0, 0].numpy()}


def pair_figure(pair):
    """The `registration_figure` of a pair from `read_pair`."""
    labels = pair["labels"] and [pair["labels"][word] for word in ("before", "fixed", "after")]
    images, title = pair["images"], pair["name"].encode(errors="replace").decode()
    return registration_figure(images["before"], images["fixed"], images["after"], pair["field"], labels, title,
                               pair["body"], pair["affine"], by_headers=True)


def means(rows, failed):
    """The means of all columns, the numbers of done and failed pairs, and the count of each verdict: a flat dict."""
    columns = {column: round(mean, 5) for column, (mean, _, _) in spread(rows, COLUMNS).items()}
    verdicts = {f"verdict_{word}": sum(row.get("verdict") == word for row in rows) for word in VERDICTS}
    return {**columns, "pairs": len(rows), "failed": len(failed), **verdicts}


def write_report(folder, rows, failed, lead, dims):
    """Write report.html. It shows a single pair itself; several pairs get a page each.

    rows, failed: of the results, at least one row. lead: how the pairs were registered.
    Returns: the page's path; the scores of the pairs as a table for a terminal.
    """
    columns = spread(rows, COLUMNS)
    by_dice = all(row.get("dice") is not None for row in rows)
    ordered = sorted(rows, key=lambda row: row["dice" if by_dice else "similarity"])
    header = ["pair", "verdict", *map(heading, columns)]
    formats = [None, None, *[COLUMNS[column] for column in columns]]
    lines = [[row["name"].replace("_to_", " to "), row["verdict"], *[row.get(column) for column in columns]]
             for row in ordered]
    summary = []
    if len(rows) > 1:
        summary = [["mean", "", *[mean for mean, _, _ in columns.values()]],
                   ["sd", "", *[deviation for _, deviation, _ in columns.values()]]]
    sections = [("", verdicts_html(ordered))]
    notes = [[entry["name"], "failed", entry["reason"]] for entry in failed]
    notes += [[row["name"], "warning", sentence] for row in ordered for sentence in row["warnings"]]
    if notes:
        sections.append(("Failed pairs and warnings", table_html(["pair", "", "what"], notes)))
    title, how = "Registrations", f"{len(rows)} pairs; {lead}."
    if len(rows) == 1:
        title, how = lines[0][0], f"{lead[:1].upper()}{lead[1:]}."
        sections += pair_sections(rows[0], folder, read_pair(rows[0], dims))
    else:
        pages = [Path(row["folder"]) / PAIR_PAGE for row in ordered]
        linked = [[(line[0], link(page, folder)) if page.is_file() else line[0], *line[1:]]
                  for line, page in zip(lines, pages)]
        note = (f"Worst {'Dice' if by_dice else 'similarity'} first; a name opens the page of its pair, a click on a "
                "heading sorts. Before: as the headers place the volumes. Seconds without reading files.")
        sections += [("Scores", cards_html(score_cards(columns), EXPLAINED)),
                     ("Pairs", table_html(header, linked, note, formats, EXPLAINED))]
    page = write_page(folder / "report.html", title, how, sections, viewer=len(rows) == 1, sortable=len(rows) > 1)
    return page, text_table(header, lines + summary, formats)


def link(path, folder):
    """A path as seen from `folder`, with slashes on every system: the address of a file in a page."""
    return Path(os.path.relpath(path, folder)).as_posix()


def write_pair_page(folder, row, pair):
    """Write the page of one pair of a list into its folder. pair: of `read_pair`."""
    sections = [("", verdicts_html([row])), *pair_sections(row, folder, pair)]
    lead = "Judged by itself; the page of the list also compares the pairs, and says which of them stand out."
    write_page(folder / PAIR_PAGE, row["name"], lead, sections, viewer=True)


def pair_sections(row, folder, pair):
    """The viewer, picture, scores and files of a pair, for a page in `folder`. pair: from `read_pair`."""
    drawn = Path(row["folder"]) / "picture.png"
    png = drawn.read_bytes() if drawn.is_file() else figure_png(pair_figure(pair))
    written = sorted(path for path in Path(row["folder"]).iterdir() if path.name in WORDS_OF_FILES)
    files = [[(path.name, link(path, folder)), WORDS_OF_FILES[path.name]] for path in written]
    return [("", viewer_html(**pair)),
            ("Slices", png_html(png, "Middle slices, on the fixed grid; grid and Jacobian without the affine part.",
                                pair["name"])),
            ("Scores", cards_html(score_cards(spread([row], COLUMNS)), EXPLAINED)),
            ("Files", table_html(["file", "what it is"], files))]


def score_cards(columns):
    """Cards of the mean scores of `spread`; one measured before the registration judges the change."""
    cards = []
    for column, (mean, deviation, _) in columns.items():
        form, note = COLUMNS[column], "" if deviation is None else f"sd {deviation:{COLUMNS[column]}}"
        if column in BEFORE_OF.values():
            continue
        if column in BEFORE_OF and BEFORE_OF[column] in columns:
            before = columns[BEFORE_OF[column]][0]
            gain = (before - mean) if column.endswith("_mm") else mean - before
            word = "no better" if abs(gain) < 0.01 * max(abs(before), 0.1) else "better" if gain > 0 else "worse"
            note = f"{word}: {before:{form}} before" + (f"; {note}" if note else "")
        cards.append((heading(column), f"{mean:{form}}", note))
    return cards


def verdicts_html(rows):
    """The verdict on each pair that is not ok, with its reason, in its colour; one line if all pairs are ok."""
    bad = sorted((row for row in rows if row["verdict"] != "ok"), key=lambda row: -VERDICTS.index(row["verdict"]))
    lines = [(row["verdict"], row["verdict"], f"{row['name']}: {row['reason']}" if len(rows) > 1 else row["reason"])
             for row in bad]
    if len(bad) < len(rows):
        count = len(rows) - len(bad)
        lines.append(("ok", "ok", f"{count} pair{'s' * (count > 1)} of {len(rows)}." if len(rows) > 1 else
                      "No sign of a failure was found."))
    return findings_html(lines)
