"""Where volumes differ in size: maps of the logarithm of the Jacobian determinant, and their means in labels.

From a template to its subjects: det(d subject / d template), so above 0 the subject is larger there.

Between scans of one subject: each scan is moved by half of the rigid map between them, onto a grid in the middle. There
each is registered to the other; v is half the difference of the logarithms of the two fields. The scans are then at
exp(-v / 2) and exp(v / 2) from the middle, and the change is the difference of their log determinants. Every step
treats both scans in the same way, so swapping them only changes the sign. With one scan kept fixed, changes would look
smaller (Reuter et al., "Within-subject template estimation for unbiased longitudinal image analysis", NeuroImage 2012).
"""
import functools
import sys
from pathlib import Path

import numpy as np
import torch
from scipy import linalg, ndimage

from Dataloader.grids import require_same_grid, to_canonical
from Dataloader.nifti import read_field, read_label, read_numbers, read_volume, write_volume
from Dataloader.volume import dims_of, read_source
from Diffusion.fields import exponential, jacobian_determinant, then_affine
from Inference.labels import apply_field, apply_label, label_on, without_affine
from Inference.outputs import scores_of
from Inference.pair_lists import said_if_unfinished
from Inference.results import damage, do_all, read_results
from Inference.verdict import VERDICTS, judge
from Report.page import table_html
from Runtime.device import pick_device
from Runtime.errors import InputError
from Runtime.files import unfit_for_a_file
from Study import common
from Study.template import LABEL, in_voxels, log_matrix, logarithm
from Study.thumbnails import gallery_html, thumbnail

WHOLE, LOCAL, MIDDLE = "log_jacobian.nii.gz", "log_jacobian_without_affine.nii.gz", "middle.nii.gz"
LEAST = 1e-3  # smallest determinant; where a field folds, the map has the logarithm of this
SHOWN = 0.3  # logarithm that is drawn in full colour
NO_AFFINE_OF_FIELDS = ("0.1.0", "1.0.0", "1.1.0", "1.2.0")  # releases that stored none of a start from a field
MARGIN = 16  # voxels around the grid into which a field is continued, more than it moves a voxel


def jacobian(args):
    """`omnimorph jacobian`; returns the exit code."""
    scans = common.volumes_of(args.scans) if args.scans and not args.results else []
    if bool(args.results) == bool(args.scans) or len(scans) == 1:
        raise InputError("give either --results, or --scans with two or more scans of one subject.")
    if args.results and (args.affine != "rigid" or args.similarity):
        raise InputError("--affine and --similarity are for --scans: --results are registered already; leave them out.")
    entries, function, verdicts, resample = of_scans(scans, args) if scans else of_results(args)
    settings = {"program": "jacobian", "smooth_mm": args.smooth, "affine": args.affine, "similarity": args.similarity,
                "resample": resample}
    names = ["jacobian.html", "jacobian.tsv", *(f"{entry['name']}/{name}" for entry in entries
                                                for name in (WHOLE, LOCAL, MIDDLE))]
    inputs = [path for entry in entries for key, path in entry.items() if key != "name"]
    tasks = [(entry, Path(args.out, entry["name"])) for entry in entries]
    with common.locked(args.out, "jacobian", names, inputs, [folder for _, folder in tasks]) as out:
        rows, failed = do_all(out, tasks, function, settings, args.workers, "mapping", "subject", args.again)
        # Maps are kept from an earlier run, verdicts are not: they change when the list does.
        rows = [{**row, **verdicts.get(row["name"], {})} for row in rows]
        failed = [{"name": name, "reason": each["reason"]} for name, each in verdicts.items()
                  if each["verdict"] == "failed"] + failed
        page = write_maps_page(out, rows, failed, args)
        return common.end(out, rows, failed, settings, page, args.strict, {})


def log_determinant(field):
    """log det of x -> x + field(x). field: (1, N, *size) in voxels. Returns: (*size) float32."""
    return torch.log(jacobian_determinant(field)[0].clamp(min=LEAST)).numpy()


# ---------------------------------------------------------------------------------------------------------------------
# From a template to its subjects
# ---------------------------------------------------------------------------------------------------------------------

def of_results(args):
    """The subjects in a folder of results, all registered to one volume. Returns: entries for `do_all` of those that
    have not failed; the function for them; {name: verdict and reason} of all; how their labels are resampled to the
    grid, one of LABELS, or None."""
    folder = Path(args.results) if Path(args.results).is_dir() else Path(args.results).parent
    earlier = read_results(folder)
    rows = [row for row in earlier["pairs"].values() if "fixed" in row and "matrix" in row]
    if not rows:
        raise InputError(f"{args.results}: the folder has no results of a template or of OM_register.py; give a "
                         "folder that has.")
    if strange := next((row["name"] for row in rows if unfit_for_a_file(row["name"])), None):  # maps go to OUT/name
        raise InputError(f"{args.results}: its results.json names the subject {strange}, and no folder can have that "
                         "name; register the subjects again.")
    if any(row.get("start") == "field" for row in rows) and earlier["version"] in NO_AFFINE_OF_FIELDS:
        raise InputError(f"{args.results}: OmniMorph {earlier['version']} did not store the affine part of a "
                         "registration that starts from a field; register the subjects again.")
    for sentence in said_if_unfinished(args.results, earlier):
        print(f"warning: {sentence}", file=sys.stderr)
    targets = sorted({row["fixed"] for row in rows})
    if len(targets) > 1:
        raise InputError(f"{args.results}: registered to {targets[0]} and to {targets[1]}; maps are compared on one "
                         "grid: register all to one volume (--fixed).")
    verdicts = {row["name"]: {"verdict": row.get("verdict", "ok"), "reason": row.get("reason", "")} for row in rows}
    rows = [row for row in rows if row.get("verdict") != "failed"]
    if not rows:
        raise InputError(f"{args.results}: every registration has the verdict failed; register the subjects again "
                         "first.")
    beside = Path(targets[0]).parent / LABEL
    given = sorted({row["fixed_label"] for row in rows if row.get("fixed_label")})
    if len(given) > 1 and not args.labels:
        raise InputError(f"{args.results}: registered with the label maps {given[0]} and {given[1]}; choose one by "
                         "--labels.")
    label = args.labels or (given[0] if given else beside if beside.is_file() else None)
    entries = [{"name": row["name"], "field": Path(row["folder"]) / "field.nii.gz", "fixed": Path(targets[0]),
                **({"labels": Path(label)} if label else {})} for row in rows]
    known = {row["name"]: (row["matrix"], {name: digests for name, digests in row.get("files", {}).items()
                                           if Path(name).name == "field.nii.gz"}) for row in rows}
    settings = earlier["settings"] or {}
    resample = settings.get("labels", "smooth") if settings.get("resample_labels") and not args.labels else None
    return entries, functools.partial(map_subject, args.out, args.smooth, folder, known, resample), verdicts, resample


def map_subject(out, smooth_mm, home, known, resample, entry, folder, earlier):
    """Write both maps of one subject and return its row, with the mean change of each label.

    home: folder of the registrations. known: {name: (matrix, the `file_digests` of the field)} of all subjects.
    resample: one of LABELS if its labels may lie on another grid, as in a registration with --resample-labels.
    """
    matrix, written = known[entry["name"]]
    problem = damage(written, home)
    if problem:
        raise InputError(f"{problem}: register the subject again.")
    dims = dims_of(entry["fixed"])
    grid, affine = read_volume(entry["fixed"], dims)
    field, own = read_field(entry["field"], dims)
    require_same_grid(f"{entry['field']}: the field", field.shape[1:], own, entry["fixed"], grid.shape, affine,
                      "register the subject again")
    rest = without_affine(field, matrix, affine)
    maps = [log_determinant(torch.from_numpy(each)[None]) for each in (field, rest)]
    labels = None
    if "labels" in entry and resample:
        labels = label_on(*read_label(entry["labels"], dims), grid.shape, affine, resample)
    elif "labels" in entry:
        labels, _ = common.label_of(entry["labels"], entry["fixed"], grid.shape, affine,
                                    "give one on the template's grid")
    paths = write_maps(folder, maps, affine, smooth_mm)
    row = {"name": entry["name"], "folder": str(folder), "fixed": str(entry["fixed"]),
           "labels": changes_of(labels, maps)}
    return common.finished_row(row, out, paths)


def write_maps(folder, maps, affine, smooth_mm):
    """Write two maps on a grid, smoothed; the maps themselves stay as they are. Returns: the Paths of the files."""
    if smooth_mm:
        sigma = smooth_mm / np.linalg.norm(affine[:3, :maps[0].ndim], axis=0)
        maps = [ndimage.gaussian_filter(each, sigma, mode="nearest") for each in maps]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / WHOLE, folder / LOCAL]
    for path, each in zip(paths, maps):
        path.unlink(missing_ok=True)
        write_volume(path, each, affine)
    return paths


def changes_of(labels, maps, before=None):
    """The change of each label: {its value, as a text: a dict}; {} without labels. labels: on the grid of the maps.

    maps: before any smoothing, which would bring in what lies outside of a label.
    before: determinants, (*size), of the map from the grid to where volumes were before the change; None for 1
    everywhere. A voxel weighs as much as it took up then, so that the mean change is the ratio of a label's two
    volumes. These depend on its border alone: noise of the map inside does not raise the mean.
    """
    changes = {}
    for value in [] if labels is None else [int(value) for value in np.unique(labels) if value]:
        inside = labels == value
        weights = None if before is None else before[inside]
        changes[str(value)] = {"voxels": int(inside.sum()), "change_percent": percent(maps[0][inside], weights),
                               "change_without_affine_percent": percent(maps[1][inside], weights),
                               "mean_log": float(maps[0][inside].mean())}
    return changes


def percent(logs, weights=None):
    """The change of the volume of a region in percent: the weighted mean of the determinants, minus 1."""
    return 100 * float(np.average(np.expm1(logs.astype(np.float64)), weights=weights))


# ---------------------------------------------------------------------------------------------------------------------
# Between scans
# ---------------------------------------------------------------------------------------------------------------------

def of_scans(scans, args):
    """The later scans of one subject, each against the first. Returns: as `of_results`, without verdicts; labels are
    on the first scan's grid and not resampled."""
    first, *later = scans
    label = args.labels or first["label"]
    entries = [{"name": item["id"], "first": first["image"], "scan": item["image"],
                **({"labels": Path(label)} if label else {})} for item in later]
    options = {"similarity": args.similarity, "device": pick_device(args.device).type}
    return entries, functools.partial(map_change, args.out, args.smooth, args.affine, options), {}, None


def map_change(out, smooth_mm, kind, options, entry, folder, earlier):
    """Map the change from the first scan to a later one on the grid in the middle, and return its row."""
    scans = [read_source(str(entry[key]), key) for key in ("first", "scan")]
    files = [entry["first"], entry["scan"]]
    ways = [common.aligned(one, other, affine=kind, refine=False, **options) for one, other in (files, files[::-1])]
    there, back = (way.matrix for way in ways)
    # The affine stage decides whether the scans show two modalities; below there is none.
    measures = [way.compared_by for way in ways if way.compared_by != "correlation"]
    options = {**options, "similarity": measures[0] if measures else "correlation"}
    whole = 0.5 * (log_matrix(there) - log_matrix(back))  # of the map from the first scan's world to the other's
    half = linalg.expm(0.5 * whole)
    to_scan = np.linalg.inv(half), half  # from the middle to the first scan, and to the other
    size, affine = middle_grid(scans, to_scan)
    seen = [resampled(scan, matrix, size, affine) for scan, matrix in zip(scans, to_scan)]
    rests, founds = [], []
    for image, file, matrix in ((seen[0], files[1], to_scan[1]), (seen[1], files[0], to_scan[0])):
        found = common.aligned((image, affine), file, affine=False, start=matrix, **options)
        rests.append(torch.from_numpy(without_affine(found.field, found.matrix, affine))[None])
        founds.append(found)
    ahead, behind = half_ways(*rests)
    before = log_determinant(behind)
    local = log_determinant(ahead) - before
    maps = [local + np.float32(np.trace(whole)), local]  # log det of an exponential is the trace
    labels = None
    if "labels" in entry:
        label, own = common.label_of(entry["labels"], scans[0].name, scans[0].array.shape, scans[0].affine,
                                     "give one of the first scan")
        labels = apply_label(label, own, then_affine(behind, in_voxels(to_scan[0], affine))[0].numpy(), affine)
    paths = write_maps(folder, maps, affine, smooth_mm)
    write_volume(folder / MIDDLE, 0.5 * sum(in_unit_range(image) for image in seen), affine)
    worst = max(founds, key=lambda found: (VERDICTS.index(found.verdict), -found.similarity))
    judged = {"one_sign": ways[0].one_sign, "mirror_gain": ways[0].mirror_gain}
    verdict, reason = max((worst.verdict, worst.reason), judge({**scores_of(worst), **judged}),
                          key=lambda each: VERDICTS.index(each[0]))
    row = {"name": entry["name"], "folder": str(folder), **scores_of(worst), "verdict": verdict, "reason": reason,
           "labels": changes_of(labels, maps, np.exp(before))}
    return common.finished_row(row, out, [*paths, folder / MIDDLE])


def half_ways(there, back):
    """Two fields between two scans, (1, N, *size) in voxels: from the middle to the second scan, and to the first.

    there, back: fields of that shape from the first scan to the second, and from the second to the first, without their
    affine part. Swapping them swaps the result.
    """
    there, back = (logarithm(continued(field, MARGIN)) for field in (there, back))
    inside = (..., *[slice(MARGIN, -MARGIN)] * (there.dim() - 2))
    velocity = 0.5 * (there - back)
    return exponential(0.5 * velocity)[inside], exponential(-0.5 * velocity)[inside]


def continued(field, margin):
    """A field with `margin` voxels around its grid, in which it continues with the same slope, so that growth does not
    stop at the field of view: along each axis twice the value of the face minus the mirror image.

    field: (1, N, *size) in voxels. A mirror image beyond the far face is that of the face.
    """
    for axis in range(2, field.dim()):
        n = field.shape[axis]
        away = torch.arange(1, margin + 1).clamp(max=n - 1)
        low = 2 * field.narrow(axis, 0, 1) - field.index_select(axis, away.flip(0))
        high = 2 * field.narrow(axis, n - 1, 1) - field.index_select(axis, n - 1 - away)
        field = torch.cat([low, field, high], axis)
    return field


def middle_grid(scans, to_scan):
    """Size and affine of an isotropic grid in the middle of two scans, along the mean of their axes.

    It is as wide as the wider scan along each axis, and its voxels are as large as theirs on average.
    """
    dims = scans[0].array.ndim
    extents, voxels, centres, along = [], [], [], 0
    for scan, matrix in zip(scans, to_scan):
        canonical, turned = to_canonical(scan.array, scan.affine)
        voxel_mm = np.linalg.norm(turned[:3, :dims], axis=0)
        extents.append(np.array(canonical.shape) * voxel_mm)
        voxels.append(np.log(voxel_mm).mean())
        middle = turned @ [*((np.array(canonical.shape) - 1) / 2), *[0] * (3 - dims), 1]
        centres.append((np.linalg.inv(matrix) @ middle)[:3])
        along = along + (np.linalg.inv(matrix) @ turned)[:3, :dims] / voxel_mm
    spacing_mm = float(np.exp(np.mean(voxels)))
    size = np.ceil(np.max(extents, axis=0) / spacing_mm - 1e-3).astype(int)
    if dims == 2:  # a plane may lie anywhere in the world
        along = np.column_stack([along, np.cross(*along.T)])
    left, _, right = np.linalg.svd(along)
    affine = np.eye(4)
    affine[:3, :3] = spacing_mm * (left @ right)
    affine[:3, 3] = np.mean(centres, axis=0) - affine[:3, :dims] @ ((size - 1) / 2)
    return tuple(int(n) for n in size), affine


def resampled(scan, matrix, size, affine):
    """A scan on the grid in the middle, (*size) float32. matrix: from the middle's world to the scan's."""
    field = then_affine(torch.zeros(1, len(size), *size), in_voxels(matrix, affine))[0].numpy()
    return apply_field(scan.array, scan.affine, field, affine)


def in_unit_range(image):
    return (image - image.min()) / max(float(np.ptp(image)), 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

def write_maps_page(out, rows, failed, args):
    """Write jacobian.html and jacobian.tsv. Returns: the page's path."""
    columns = ["change_percent", "change_without_affine_percent", "mean_log", "voxels"]
    table = [{"name": row["name"], "label": label, **values} for row in rows for label, values in row["labels"].items()]
    common.write_table(out / "jacobian.tsv", ["name", "label", *columns], table)
    what, pictures = "later scan" if args.scans else "subject", []
    for row in rows:
        background = row.get("fixed") or Path(row["folder"]) / MIDDLE
        dims = dims_of(background)
        grid, affine = read_numbers(background, dims)
        change = read_numbers(Path(row["folder"]) / WHOLE, dims)[0]
        pictures.append((thumbnail(grid, affine, (), change / SHOWN), row["name"], ""))
    lines = [[entry["name"], entry["label"], entry["change_percent"], entry["change_without_affine_percent"],
              entry["voxels"]] for entry in table]
    cards = [(f"{what}s", len(rows), f"{len(failed)} left out" if failed else ""),
             ("labels", len(rows[0]["labels"]) if rows else 0, ""), ("smoothed by", f"{args.smooth:g} mm", "")]
    sections = []
    if lines:
        head = [what, "label", "change, %", "without the affine part, %", "voxels"]
        sections.append(("Labels", table_html(head, lines, "Change of volume, before any smoothing. Click on a "
                                                          "heading to sort.", [None, None, ".2f", ".2f", None])))
    sections.append(("Maps", f"<p>Red: larger, blue: smaller. The colour is full where the volume is "
                     f"{100 * np.expm1(SHOWN):.0f} % larger or {-100 * np.expm1(-SHOWN):.0f} % smaller.</p>\n"
                     + gallery_html(pictures)))
    lead = ("The change from the first scan to each later one, half-way between them." if args.scans else
            "How much larger or smaller each subject is than the template.")
    return common.write_study_page(out / "jacobian.html", "Change of volume", lead, cards, rows, failed, sections)
