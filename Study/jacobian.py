"""Where volumes differ in size: maps of the logarithm of the Jacobian determinant, and their means in labels.

From a template to its subjects: det(d subject / d template), so above 0 the subject is larger there. Between scans of
one subject: each is registered to the template in their middle, and the change from the first scan to another is the
difference of their maps. No scan is the fixed one, so nothing depends on which is: exchanging two scans changes the
sign (Reuter et al., NeuroImage 2012, "Within-subject template estimation for unbiased longitudinal image analysis").
"""
import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage

from Dataloader.grids import require_same_grid
from Dataloader.nifti import read_field, read_label, read_numbers, read_volume, write_volume
from Diffusion.fields import jacobian_determinant
from Inference.labels import apply_label
from Inference.pair_figures import without_affine
from Inference.results import read_results
from Inference.work import do_all
from Runtime.errors import InputError
from Runtime.page import cards_html, findings_html, table_html, write_page
from Study.common import Folder, dims_of, end, findings_of, finished_row, volumes_of, write_table
from Study.template import LABEL, make
from Study.thumbnails import gallery_html, thumbnail

WHOLE, LOCAL = "log_jacobian.nii.gz", "log_jacobian_without_affine.nii.gz"
LEAST = 1e-3  # determinant; where a field folds, the map has its logarithm
SHOWN = 0.3  # logarithm that is drawn in full red


def jacobian(args):
    """What `omnimorph jacobian` does with its options; returns the exit code."""
    if bool(args.results) == bool(args.scans) or len(args.scans) == 1:
        raise InputError("give either --results, or --scans with two or more scans of one subject.")
    with Folder(args.out) as out:
        rows, failed, dims = middle_of(out, args) if args.scans else rows_of(args.results)
        grid, affine = read_volume(rows[0]["fixed"], dims)
        labels = labels_of(args, rows, grid, affine)
        settings = {"program": "jacobian", "smooth_mm": args.smooth, "scans": len(args.scans)}
        first = rows[0] if args.scans else None
        tasks = [(entry_of(row, first, args.labels), out / row["name"]) for row in rows]
        map_one = functools.partial(map_volume, str(out), args.smooth, {row["name"]: row for row in rows}, first,
                                    labels, dims)
        done, more = do_all(out, tasks, map_one, settings, args.workers, "mapping", "subject", args.again)
        page = write_maps_page(out, done, failed + more, grid, affine, args, dims)
        return end(out, done, failed + more, settings, page, args.strict, {})


def rows_of(results):
    """The registered subjects of a folder of results, all onto one volume: rows, failed, axes."""
    folder = Path(results) if Path(results).is_dir() else Path(results).parent
    found = read_results(folder)
    rows = [row for row in found["pairs"].values() if "fixed" in row and "matrix" in row]
    if not rows:
        raise InputError(f"{results}: no results of a template or of OM_register.py; give their folder.")
    targets = sorted({row["fixed"] for row in rows})
    if len(targets) > 1:
        raise InputError(f"{results}: registered to {targets[0]} and to {targets[1]}; maps are compared on one grid: "
                         "register all to one volume (--fixed).")
    bad = [{"name": row["name"], "reason": row["reason"]} for row in rows if row.get("verdict") == "failed"]
    rows = [row for row in rows if row.get("verdict") != "failed"]
    if not rows:
        raise InputError(f"{results}: the registrations of all subjects have failed by their verdict; mend these.")
    return rows, bad, dims_of(rows[0]["fixed"])


def middle_of(out, args):
    """The scans of one subject, each registered to the template in their middle: rows in their order, failed, axes."""
    items = volumes_of(args.scans)
    where = out / "middle"
    where.mkdir(exist_ok=True)
    how = argparse.Namespace(**{**vars(args), "images": args.scans, "spacing": 0.0, "sharpen": 0.0, "start": None})
    rows, failed, _, _ = make(items, where, how)
    rows = {row["name"]: {**row, "folder": str(where / "subjects" / row["name"])} for row in rows}
    if items[0]["id"] not in rows or len(rows) < 2:
        reasons = "; ".join(f"{entry['name']}: {entry['reason']}" for entry in failed)
        raise InputError(f"{args.scans[0]}: the change from it cannot be measured ({reasons}).")
    return [rows[item["id"]] for item in items if item["id"] in rows], failed, dims_of(args.scans[0])


def labels_of(args, rows, grid, affine):
    """The label map for the table, on the template's grid, as an array; None without one."""
    beside = Path(rows[0]["fixed"]).parent / LABEL
    path = args.labels or rows[0].get("fixed_label") or (beside if beside.is_file() else None)
    if not path:
        return None
    label, own = read_label(path, grid.ndim)
    if args.scans and args.labels:
        image, image_affine = read_volume(rows[0]["moving"], grid.ndim)
        require_same_grid(f"{path}: the label map", label.shape, own, rows[0]["moving"], image.shape, image_affine,
                          "give one of the first scan")
        return apply_label(label, own, read_field(Path(rows[0]["folder"]) / "field.nii.gz", grid.ndim)[0], affine)
    require_same_grid(f"{path}: the label map", label.shape, own, rows[0]["fixed"], grid.shape, affine,
                      "give one on the template's grid")
    return label


def entry_of(row, first, labels):
    """What the maps of a subject depend on, for Inference/work.py."""
    files = {"field": Path(row["folder"]) / "field.nii.gz", **({"labels": Path(labels)} if labels else {})}
    if first is not None:
        files["first"] = Path(first["folder"]) / "field.nii.gz"
    return {"name": row["name"], **files}


def log_jacobians(row, dims, affine):
    """log det of the whole field of a row and of what is left without its affine part, (*size) float32 each."""
    field, _ = read_field(Path(row["folder"]) / "field.nii.gz", dims)
    parts = field, without_affine(field, np.array(row["matrix"]), affine)
    return [torch.log(jacobian_determinant(torch.from_numpy(each)[None])[0].clamp(min=LEAST)).numpy()
            for each in parts]


def map_volume(out, smooth_mm, rows, first, labels, dims, entry, folder, earlier):
    """Write both maps of one subject and return its row, with the mean change of each label."""
    row = rows[entry["name"]]
    affine = read_volume(row["fixed"], dims)[1]
    maps = log_jacobians(row, dims, affine)
    if first is not None:
        maps = [one - other for one, other in zip(maps, log_jacobians(first, dims, affine))]
    if smooth_mm:
        sigma = smooth_mm / np.linalg.norm(affine[:3, :dims], axis=0)
        maps = [ndimage.gaussian_filter(each, sigma, mode="nearest") for each in maps]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / WHOLE, folder / LOCAL]
    for path, each in zip(paths, maps):
        path.unlink(missing_ok=True)
        write_volume(path, each, affine)
    changes = {}
    for value in [] if labels is None else [int(value) for value in np.unique(labels) if value]:
        inside = labels == value
        changes[str(value)] = {"voxels": int(inside.sum()),
                               "change_percent": percent(maps[0][inside]),
                               "change_without_affine_percent": percent(maps[1][inside]),
                               "mean_log": float(maps[0][inside].mean())}
    scale = float(np.log(np.linalg.det(np.array(row["matrix"])[:dims, :dims])))
    if first is not None:
        scale -= float(np.log(np.linalg.det(np.array(first["matrix"])[:dims, :dims])))
    result = {"name": row["name"], "folder": str(folder), "affine_percent": 100 * float(np.expm1(scale)),
              "verdict": row.get("verdict", "ok"), "reason": row.get("reason", ""), "labels": changes}
    return finished_row(result, entry, out, paths)


def percent(logs):
    """The change of the volume of a region in percent: the mean of the determinants, less 1."""
    return 100 * float(np.expm1(logs.astype(np.float64)).mean())


def write_maps_page(out, rows, failed, grid, affine, args, dims):
    """Write jacobian.html and jacobian.tsv. Returns: the page's path."""
    columns = ["change_percent", "change_without_affine_percent", "mean_log", "voxels"]
    table = [{"name": row["name"], "label": label, **values} for row in rows for label, values in row["labels"].items()]
    write_table(out / "jacobian.tsv", ["name", "label", *columns], table)
    what = "later scan" if args.scans else "subject"
    shown = rows[1:] if args.scans else rows
    pictures = []
    for row in shown:
        change = read_numbers(Path(row["folder"]) / WHOLE, dims)[0]
        for sign, word in ((1, "larger"), (-1, "smaller")):
            heat = np.clip(sign * change / SHOWN, 0, 1)
            pictures.append((f"{row['name']}_{word}", thumbnail(grid, affine, (), heat), row["name"],
                             f"red: {word}, fully at {SHOWN:.1f} of the logarithm"))
    lines = [[entry["name"], entry["label"], entry["change_percent"], entry["change_without_affine_percent"],
              entry["voxels"]] for entry in table if not args.scans or entry["name"] != rows[0]["name"]]
    cards = [(f"{what}s", len(shown), f"{len(failed)} left out" if failed else ""),
             ("labels", len(rows[0]["labels"]) if rows else 0, ""), ("smoothed by", f"{args.smooth:g} mm", "")]
    sections = [("", cards_html(cards) + findings_html(findings_of(rows, failed)))]
    if lines:
        head = [what, "label", "change, %", "without the affine part, %", "voxels"]
        sections.append(("Labels", table_html(head, lines, "Mean change of volume. A click on a heading sorts.",
                                              [None, None, ".2f", ".2f", None])))
    sections.append(("Maps", gallery_html(pictures)))
    lead = ("The change from the first scan to each later one, through the template in their middle." if args.scans else
            "How much larger or smaller each subject is than the template.")
    return write_page(out / "jacobian.html", "Change of volume", lead, sections, sortable=True)

