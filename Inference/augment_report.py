"""The report of OM_augment.py: pictures, tables, one page."""
from pathlib import Path

import numpy as np

from Dataloader.grids import intensity_range, rescale
from Dataloader.nifti import SUFFIXES, read_field, read_label, read_volume
from Diffusion.figures import gallery_figure
from Inference.draws import MEASURES, draw_paths
from Inference.labels import without_affine
from Inference.viewer import PAGE_BYTES, viewer_html
from Report.page import cards_html, figure_html, table_html, text_table, write_page

PICTURED = 3  # volumes that the report shows
ACROSS = 5  # draws of each of them
ROWS = 400  # of the table of draws


def write_report(out, lead, items, kept, refused, dims, targets):
    """Write report.html into the folder of the draws and print its table. Returns: the headline figures, plain JSON.

    lead: how they were made. kept: the records of the items' draws. refused: {id: why} of volumes that could not be
    used. targets: {id: item} of the volumes whose grids the copies use; empty if each keeps its volume's grid.
    """
    folding, lengths = ([record[key] for record in kept] for key in ("folding", "mean"))
    headline = {"draws": len(kept), "subjects": len({item["subject"] for item in items}), "refused": len(refused),
                "folding_percent_mean": round(float(np.mean(folding)), 5),
                "folding_percent_max": round(float(np.max(folding)), 5),
                "deformation_percent_mean": round(float(np.mean(lengths)), 4)}
    records = {item["id"]: [] for item in items}
    for record in kept:
        records[record["id"]].append(record)
    cards = [("draws", len(kept), f"of {len(items)} volume{'s' * (len(items) != 1)}"),
             ("deformation", f"{headline['deformation_percent_mean']:.1f} %", "mean displacement, of the longest side"),
             ("folded voxels", f"{headline['folding_percent_mean']:.3g} %",
              f"largest of a draw {headline['folding_percent_max']:.3g} %")]
    header = ["", "draws", "mean %", "95th %", "max %", "folded %", "largest folded %"]
    formats = [None, None, ".2f", ".2f", ".2f", ".4f", ".4f"]
    rows = [[name, len(draws), *[float(np.mean([record[key] for record in draws])) for key in MEASURES],
             max(record["folding"] for record in draws)] for name, draws in records.items()]
    pictures = [picture(item, out, records[item["id"]], dims, targets) for item in items[:PICTURED]]
    note = ("Length of the displacement in percent of the image's longest side: mean, 95th percentile and maximum over "
            "the voxels, then mean over the draws. Folded: voxels whose Jacobian determinant is <= 0.")
    worst = sorted(kept, key=lambda record: (-record["folding"], -record["mean"], record["name"]))[:ROWS]
    cut = "" if len(worst) == len(kept) else f" The first {ROWS} of {len(kept)}; all are in draws.csv."
    table = table_html(["", "mean %", "95th %", "max %", "folded %"],
                       [[record["name"], *[record[key] for key in MEASURES]] for record in worst],
                       f"Most folded, then most deformed first.{cut}", [None, ".2f", ".2f", ".2f", ".4f"])
    sections = [("", cards_html(cards)), ("Some of them", "".join(pictures)),
                ("Volumes", table_html(header, rows, note, formats)), ("Draws", table)]
    if refused:
        sections.append(("Left out", table_html(["volume", "why"], sorted(refused.items()))))
    write_page(out / "report.html", "Deformed copies", lead, sections, viewer=True)
    print(text_table(header, rows, formats))
    print(f"\nreport: {(out / 'report.html').resolve()}")
    return headline


def describe(job, cfg):
    """How the copies were made, for the top of the page. job: dict of OM_augment.py."""
    start = job["start"] or cfg["copies.start"] or str(cfg["diffusion.timesteps"] - 1)
    if "+" in start:
        start = "times from {} on, {} more every other copy".format(*start.split("+"))
    else:
        start = f"times {start.replace('-', ' to ')}" if "-" in start else f"time {start}"
    if job["register"] is not None:
        by = f", the network {Path(job['model']).name}" if job["model"] else ""
        return (f"Registered to volumes of {Path(job['target']).name}: affine stage{by} and {job['register']} steps "
                f"of refinement, order by seed {job['seed']}. Displacements leave out the affine map.")
    lead = f"Random deformations of {start}, seed {job['seed']}"
    if job["model"]:
        steps = "by every prediction" if cfg["copies.recover"] == "published" else f"in steps of {job['stride']}"
        lead += f", from which {Path(job['model']).name} recovered {steps}"
    if job["target"]:
        shown = f"{job['slices'] or 'a random number of'} planes" if job["condition"] == "slice" else "all of it"
        others = "" if job["target"].endswith(SUFFIXES) else "others of "
        lead += f", towards {others}{Path(job['target']).name} ({shown})"
    return f"{lead}."


def picture(item, out, records, dims, targets):
    """One volume and some of its draws, read from their files, as HTML; the first draw has a viewer.

    targets: if given, the viewer shows the first copy beside its target, and is left out where the target is gone.
    """
    image, affine = read_volume(item["image"], dims)
    low, high = intensity_range(image)

    def read_own_label(path, shape):
        return read_label(path, dims)[0] if item["label"] else np.zeros(shape, np.int16)

    copies = [("original", rescale(image, low, high), read_own_label(item["label"], image.shape), None, affine)]
    for record in records[:ACROSS]:
        paths = {kind: out / path for kind, path in draw_paths(item, record["draw"]).items()}
        copy, _ = read_volume(paths["image"], dims)
        field, own_affine = read_field(paths["field"], dims)
        field = without_affine(field, record["matrix"], own_affine) if record.get("matrix") else field
        title = f"draw {record['draw']}: {record['mean']:.1f} %"
        copies.append((title, rescale(copy, low, high), read_own_label(paths.get("label"), copy.shape), field,
                       own_affine))
    where = "Middle axial slice, with" if dims == 3 else "With"
    part = ", without the affine part" if records[0].get("matrix") else ""  # all of them have a matrix, or none
    figure = figure_html(gallery_figure(copies), f"{item['id']}. {where} outlines of the labels; below, the deformed "
                         f"grid{part}. Percent: mean displacement, of the image's longest side.")
    if targets and records[0]["target"] not in targets:
        return figure  # it has been renamed since, and nothing else is on the grid of the copy
    _, images, labels, fields, _ = zip(*copies[:2])
    names = ("original", f"draw {records[0]['draw']}")
    if targets:
        target, affine = read_volume(targets[records[0]["target"]]["image"], dims)
        images, labels = ((rescale(target, *intensity_range(target)), images[1]), (0 * labels[1], labels[1]))
        names = (records[0]["target"], names[1])
    viewer = viewer_html(f"{item['id']} and its first copy", dict(zip(names, images)), fields[1], affine,
                         dict(zip(names, labels)) if item["label"] else None, PAGE_BYTES // PICTURED,
                         without_affine=bool(part))
    return viewer + figure
