"""What OM_augment.py has drawn, for people: names of the files, pictures, tables, one page."""
from pathlib import Path

import numpy as np

from Dataloader.datalist import SUFFIXES
from Dataloader.grids import intensity_range, rescale
from Dataloader.nifti import read_field, read_label, read_volume
from Diffusion.figures import gallery_figure
from Inference.draws import MEASURES, draw_paths
from Runtime.report import cards_html, figure_html, table_html, text_table, write_page

PICTURED, ACROSS, ROWS = 3, 5, 400  # volumes and draws in the report's pictures, rows in its table


def describe(job, cfg):
    """How the copies were made, for the top of the page."""
    start = job["start"] or cfg["diffusion.timesteps"] - 1
    start = f"time {start}" if isinstance(start, int) else f"times {start[0]} to {start[1]}"
    lead = f"Random deformations of {start}, seed {job['seed']}"
    if job["model"]:
        lead += f", from which {Path(job['model']).name} recovered in steps of {job['stride']}"
    if job["target"]:
        shown = f"{job['slices'] or 'a random number of'} planes" if job["condition"] == "slice" else "all of it"
        others = "" if job["target"].endswith(SUFFIXES) else "others of "
        lead += f", towards {others}{Path(job['target']).name} ({shown})"
    return f"{lead}."


def picture(item, out, records, dims):
    """One volume and some of its draws, read from their files, as HTML."""
    image, _ = read_volume(item["image"], dims)
    low, high = intensity_range(image)
    blank = np.zeros(image.shape, np.int16)
    copies = [("original", rescale(image, low, high), read_label(item["label"], dims)[0] if item["label"] else blank,
               None)]
    for record in records[:ACROSS]:
        paths = draw_paths(item, record["draw"])
        label = read_label(out / paths["label"], dims)[0] if item["label"] else blank
        copies.append((f"draw {record['draw']}: {record['mean']:.1f} %",
                       rescale(read_volume(out / paths["image"], dims)[0], low, high), label,
                       read_field(out / paths["field"], dims)[0]))
    where = "Slice through the middle of the last axis, with" if dims == 3 else "With"
    return figure_html(gallery_figure(copies), f"{item['id']}. {where} outlines of the labels; below, the deformed "
                       "grid. Percent: mean displacement, of the image's longest side.")


def summary(kept, items, refused):
    """The headline figures of all draws, as plain JSON. kept: records. refused: {id: why}."""
    columns = {word: [record[word] for record in kept] for word in MEASURES}
    return {"draws": len(kept), "subjects": len(items), "refused": len(refused),
            "folding_percent_mean": round(float(np.mean(columns["folding"])), 5),
            "folding_percent_max": round(float(np.max(columns["folding"])), 5),
            "deformation_percent_mean": round(float(np.mean(columns["mean"])), 4)}


def write_report(out, lead, items, kept, refused, dims):
    """report.html in `out`, and its table on the terminal.

    lead: how the draws were made. items: the volumes. kept: their records, one for each draw. refused: {id: why} of
    volumes that could not be used. Returns: the `summary`.
    """
    result, own = summary(kept, items, refused), {item["id"]: [] for item in items}
    for record in kept:
        own[record["id"]].append(record)
    cards = [("draws", len(kept), f"of {len(items)} volume{'s' * (len(items) != 1)}"),
             ("deformation", f"{result['deformation_percent_mean']:.1f} %", "mean displacement, of the longest side"),
             ("folded voxels", f"{result['folding_percent_mean']:.3g} %",
              f"largest of a draw {result['folding_percent_max']:.3g} %")]
    header, formats = ["", "draws", "mean %", "95th %", "max %", "folded %"], [None, None, *[".2f"] * 3, ".4f"]
    rows = [[name, len(records), *[float(np.mean([record[word] for record in records])) for word in MEASURES],
             max(record["folding"] for record in records)] for name, records in own.items()]
    header, formats = [*header, "largest folded %"], [*formats, ".4f"]
    worst = sorted(kept, key=lambda record: (-record["folding"], -record["mean"], record["name"]))[:ROWS]
    cut = "" if len(worst) == len(kept) else f" The first {ROWS} of {len(kept)}; all are in draws.csv."
    sections = [
        ("", cards_html(cards)),
        ("Some of them", "".join(picture(item, out, own[item["id"]], dims) for item in items[:PICTURED])),
        ("Volumes", table_html(header, rows, "Length of the displacement in percent of the image's longest side: mean, "
                               "95th percentile and maximum over the voxels, then mean over the draws. Folded: voxels "
                               "whose Jacobian determinant is <= 0.", formats)),
        ("Draws", table_html(["", *header[2:6]], [[r["name"], *[r[word] for word in MEASURES]] for r in worst],
                             f"Most folded, then most deformed first.{cut}", [None, *formats[2:6]]))]
    if refused:
        sections.append(("Left out", table_html(["volume", "why"], sorted(refused.items()))))
    write_page(out / "report.html", "Deformed copies", lead, sections)
    print(text_table(header, rows, formats))
    print(f"\nreport: {(out / 'report.html').resolve()}")
    return result
