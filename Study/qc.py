"""All results of a study at a glance: one page and one table, of registrations, templates and segmentations.

Every row is judged again among all the others. A number is an outlier if it is more than OUTLIER robust standard
deviations (1.48 median absolute deviations) from the median, on its bad side.
"""
import functools
import os
import sys
from pathlib import Path

import numpy as np

from Dataloader.nifti import read_label, read_numbers, read_volume
from Dataloader.volume import dims_of
from Inference.labels import apply_field
from Inference.pair_lists import said_if_unfinished
from Inference.results import do_all, read_results
from Inference.scores import COLUMNS, heading, in_range
from Inference.verdict import FOLDED_PERCENT, OUTLIER, VERDICTS, judge_list, spread_of
from Report.page import table_html
from Runtime.errors import InputError
from Runtime.files import write_file
from Study.common import end, finished_row, locked, write_study_page, write_table
from Study.thumbnails import gallery_html, thumbnail

BAD_SIDE = {"similarity": -1, "dice": -1, "tre_mm": 1, "folding_body_percent": 1, "sdlogj": 1, "covered_percent": -1,
            "turn_degrees": 1, "scale_most": 1, "scale_least": -1, "shear_degrees": 1, "doubt": 1,
            "doubtful_percent": 1}
DRAWN = ("folder", "picture", "files", "source", "warnings")  # of a row: what belongs to its picture
LEAST = {"folding_body_percent": FOLDED_PERCENT[0] / 5, "turn_degrees": 1.0, "shear_degrees": 1.0}  # spread that counts
BRIGHT = 0.3  # of the range of a fixed volume: the outline at this intensity replaces missing labels


def qc(args):
    """`omnimorph qc`; returns the exit code."""
    rows, failed, unfinished = all_rows(args.results)
    for sentence in unfinished:
        print(f"warning: {sentence}", file=sys.stderr)
    names = ["qc.html", "qc.tsv", *(f"thumbnails/{picture_of(row['name'])}" for row in rows)]
    with locked(args.out, "qc", names) as out:
        # One colour for a structure in all pictures, whichever structures a subject has.
        values = sorted({int(label) for row in rows if "image" in row for label in row["labels"]})
        settings = {"program": "qc", "labels": values}
        tasks = [(entry_of(row), out / "thumbnails") for row in rows]
        now = {row["name"]: row for row in rows}
        draw = functools.partial(draw_row, str(out), now, values)
        drawn, undrawn = do_all(out, tasks, draw, settings, args.workers, "drawing", "subject", args.again)
        # Pictures are kept from an earlier run, numbers are not: outliers depend on all subjects of now.
        drawn = [{"labels": {}, **numbers_of(now[row["name"]]), **{key: row[key] for key in DRAWN}} for row in drawn]
        page = write_qc_page(out, drawn, failed + undrawn, unfinished, args)
        counts = {f"verdict_{word}": sum(row["verdict"] == word for row in drawn) for word in VERDICTS}
        return end(out, drawn, failed + undrawn, settings, page, args.strict,
                   {**counts, "outliers": sum(bool(row["outlier"]) for row in drawn)})


def all_rows(sources):
    """The rows of several folders of results, judged and with unique names; the entries that had failed; a sentence for
    each run that did not finish."""
    rows, failed, unfinished = [], [], []
    for source in map(Path, sources):
        folder = source if source.is_dir() else source.parent
        earlier = read_results(folder)
        found = list(earlier["pairs"].values())
        if not found and not earlier["failed"]:
            raise InputError(f"{source}: no results.json with results; give the --out of register, template or "
                             "segment.")
        unfinished += said_if_unfinished(source, earlier)
        judged = judge_list(found) if all("similarity" in row for row in found) else found
        spreads = spreads_of(judged)
        prefix = f"{Path(os.path.abspath(folder)).name}/" if len(sources) > 1 else ""  # "." too has a name
        failed += [{**entry, "name": prefix + entry["name"]} for entry in earlier["failed"]]
        rows += [{**row, **outlier_of(row, spreads), "name": prefix + row["name"]} for row in judged]
    if not rows:
        raise InputError(f"{sources[0]}: none of its {len(failed)} entries could be processed: "
                         f"{failed[0]['name']}: {failed[0]['reason']}")
    names = [row["name"] for row in rows]
    if len(set(names)) < len(names):
        raise InputError(f"{sources[0]}: two of the folders have the same name and subject; give them one by one.")
    return rows, failed, unfinished


def spreads_of(rows):
    """`spread_of` each column of BAD_SIDE, once for all rows."""
    return {key: spread_of(key, rows) for key in BAD_SIDE}


def outlier_of(row, spreads):
    """dict of outlier, the column furthest out on its bad side or "", and outlier_z, in robust standard deviations.
    spreads: of all rows, from `spreads_of`."""
    worst, name = 0.0, ""
    for key, bad in BAD_SIDE.items():
        middle, spread, count = spreads[key]
        far = bad * (row[key] - middle) / max(spread, LEAST.get(key, 1e-6)) if count and row.get(key) is not None else 0
        if far > worst:
            worst, name = far, key
    return {"outlier": name if worst > OUTLIER else "", "outlier_z": worst}


def entry_of(row):
    """What the picture of a row depends on, for Inference/results.py."""
    folder = Path(row["folder"])
    shown = [folder / name for name in ("warped.nii.gz", "warped_label.nii.gz", "label.nii.gz", "doubt.nii.gz")]
    files = {path.name: path for path in shown if path.is_file()}
    files.update({key: Path(row[key]) for key in ("fixed", "fixed_label", "image") if key in row})
    return {"name": row["name"], **files}


def draw_row(out, rows, values, entry, folder, earlier):
    """Draw one subject, and return the row of its results with the picture.

    A pair: the warped volume with the outlines of the fixed labels, or of the bright part of the fixed volume, and of
    the warped labels. A segmentation: the image with its labels and its doubt. values: of all labels, sorted.
    """
    row = rows[entry["name"]]
    if "label.nii.gz" in entry:
        dims = dims_of(entry["image"])
        image, affine = read_volume(entry["image"], dims)
        outlines = [(read_label(entry["label.nii.gz"], dims)[0], values)]
        heat = read_numbers(entry["doubt.nii.gz"], dims)[0]
    elif "warped.nii.gz" in entry and "fixed" in entry:
        dims, heat = dims_of(entry["fixed"]), None
        fixed, affine = read_volume(entry["fixed"], dims)
        image = read_numbers(entry["warped.nii.gz"], dims)[0]  # constant if it shows nothing of the moving volume
        outlines = [((in_range(fixed, fixed) > BRIGHT).astype(np.uint8), 0)]
        if "fixed_label" in entry:  # with --resample-labels on a grid of its own
            zero = np.zeros((dims, *fixed.shape), np.float32)
            outlines = [(apply_field(*read_label(entry["fixed_label"], dims), zero, affine, order=0), 0)]
            if "warped_label.nii.gz" in entry:
                outlines.append((read_label(entry["warped_label.nii.gz"], dims)[0], 1))
    else:
        raise InputError(f"{row['folder']}: it has neither a warped volume nor a label map; compute these results "
                         "again.")
    path = folder / picture_of(entry["name"])
    write_file(path, thumbnail(image, affine, outlines, heat))
    return finished_row({**numbers_of(row), "folder": str(folder), "picture": path.name}, out, [path])


def picture_of(name):
    return f"{name.replace('/', '%2F')}.png"


def numbers_of(row):
    """A row without what belongs to its picture, or to the files of its own results."""
    return {key: value for key, value in row.items() if key not in DRAWN}


def write_qc_page(out, rows, failed, unfinished, args):
    """Write qc.html and qc.tsv, the worst first. Returns: the page's path."""
    # In a short list nothing is an outlier.
    rows = sorted(rows, key=lambda row: (-VERDICTS.index(row["verdict"]), -row["outlier_z"],
                                         row.get("similarity", 0) - (row.get("doubt") or 0)))
    columns = [key for key in dict.fromkeys([*COLUMNS, *BAD_SIDE]) if any(row.get(key) is not None for row in rows)]
    write_table(out / "qc.tsv", ["name", "verdict", "reason", "outlier", "outlier_z", *columns], rows)
    shown = [key for key in columns if key in BAD_SIDE]
    header = ["subject", "verdict", "outlier in", "by", *map(heading, shown)]
    lines = [[row["name"], row["verdict"], heading(row["outlier"]), row["outlier_z"], *[row.get(key) for key in shown]]
             for row in rows]
    counts = [(word, sum(row["verdict"] == word for row in rows), "") for word in VERDICTS]
    cards = [*counts, ("outliers", sum(bool(row["outlier"]) for row in rows), ""), ("left out", len(failed), "")]
    pictures = [((out / "thumbnails" / row["picture"]).read_bytes(), row["name"],
                 row["verdict"] + (f", outlier in {heading(row['outlier'])}" if row["outlier"] else ""))
                for row in rows]
    sections = [("Numbers", table_html(header, lines, "The worst come first. Click on a heading to sort. by: robust "
                                                      "standard deviations from the median, on the bad side; above "
                                                      "5 is an outlier.",
                                       [None, None, None, ".1f", *[".3g"] * len(shown)])),
                ("All subjects", gallery_html(pictures) + "<p>A registered pair shows the warped volume, with the "
                 "labels or the outline of the fixed volume in orange and the warped labels in blue. A segmented image "
                 "shows its labels, with their doubt in red.</p>\n")]
    lead = f"{len(rows)} results of {', '.join(map(str, args.results))}."
    return write_study_page(out / "qc.html", "Quality control", lead, cards, rows, failed, sections, unfinished)
