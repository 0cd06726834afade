"""The template of a group: the mean of its subjects, in shape and in intensity.

Every subject is registered to the current template; T_i is the affine map and u_i the deformation from the template to
subject i. The template is then moved so that their means vanish: with the mean logarithms of the T_i and of the
deformations, x -> exp(-mean log u)(exp(-mean log T) x) is applied before each of them. The mean of the subjects, warped
by the moved maps, is sharpened and becomes the next template (Avants et al., NeuroImage 2010, "The optimal template
effect"; logarithms as in Arsigny et al., MICCAI 2006). The first half of the rounds uses a coarse grid. Later rounds do
not find the fields again from scratch: each continues the previous round's fields at the finest resolution.

With --symmetric every subject counts twice, as it is and mirrored from left to right. The template equals its mirror
image, so the map to a mirrored subject is the mirrored map to the subject, and nothing is registered twice.
"""
import functools
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from scipy import linalg, ndimage

from Dataloader.datalist import are_numbered_channels, case_and_channel
from Dataloader.formats import digest
from Dataloader.grids import intensity_range, rescale, to_canonical, to_grid, voxel_volume
from Dataloader.nifti import into_plane, read_label, read_volume, write_field, write_volume
from Dataloader.volume import dims_of, read_source
from Diffusion.fields import compose, exponential, then_affine
from Diffusion.metrics import average, dice, dice_of_pairs
from Inference.bids import require_own_bids, require_own_names
from Inference.labels import apply_field, apply_label, vote, without_affine
from Inference.registration import Known
from Inference.results import (
    damage,
    do_all,
    file_digests,
    read_results,
    require_writable,
    source_digests,
    with_paths_of,
    write_results,
)
from Inference.verdict import judge_list
from Report.charts import grid, line_chart
from Report.page import table_html
from Runtime import __version__
from Runtime.device import pick_device
from Runtime.errors import InputError, attempt
from Runtime.files import save_array, write_file
from Study import common
from Study.thumbnails import gallery_html, thumbnail

TEMPLATE, LABEL = "template.nii.gz", "template_label.nii.gz"
OF_SUBJECT = ("field.nii.gz", "warped.nii.gz", "warped_label.nii.gz")
ENOUGH_LEFT, MOST_PASSES, SMOOTH_MEAN = 0.02, 4, 1.0  # voxels of the mean logarithm, on average; passes; voxels
SHARPEN_SIGMA = 1.0  # voxels, of the Gaussian of the unsharp masking
FEWEST, LEAST_SIDE = 2, 8  # subjects; voxels along an axis
# Of a subject and round: the deformation without the affine part and the whole map from the moved template, (N, *size);
# and the smoothing by place, as in `Known`.
DEFORMATION, FIELD, WEIGHTS = "deformation.npy", "field.npy", "weights.npz"
COLUMNS = ("similarity", "dice", "folding_percent")


def template(args):
    """`omnimorph template`; returns the exit code."""
    items = common.volumes_of(args.images, args.ids, args.subject_pattern)
    items.sort(key=lambda item: item["id"])  # a mean in another order is rounded differently, and rounds amplify that
    if len(items) < FEWEST:
        raise InputError(f"{items[0]['image']}: it has {len(items)} volume; a template needs {FEWEST} subjects or "
                         "more.")
    doubts = []
    are_channels = are_numbered_channels(items)
    modalities = sorted({f"{case_and_channel(item['image'])[1]:04d}" if are_channels else item["modality"]
                         for item in items} - {""})
    if len(modalities) > 1:
        doubts = [f"{', '.join(map(str, args.images))}: the volumes have {len(modalities)} modalities ("
                  f"{', '.join(modalities)}), and the template is the mean of all of them; if it is to show one, "
                  "choose its volumes by a pattern such as \"Data/**/*_T1w.nii.gz\", or by a list."]
        print(f"warning: {doubts[0]}", file=sys.stderr)
    if args.bids:
        require_own_names([{**entry_of(item), "fixed": TEMPLATE} for item in items])
        require_own_bids(args.out)
    settings = {"program": "template", "rounds": args.rounds, "affine": args.affine, "similarity": args.similarity,
                "spacing_mm": args.spacing, "sharpen": args.sharpen, "symmetric": args.symmetric,
                "start": args.start and (digest(args.start) or args.start)}
    options = {"similarity": args.similarity, "device": pick_device(args.device).type}
    if args.start:
        read_source(str(args.start), "start")  # refuses it before anything is dropped
    names = [TEMPLATE, LABEL, "template.html", "subjects.tsv", "convergence.json",
             *(f"round_{number}/{name}" for number in range(args.rounds + 1) for name in ("results.json", TEMPLATE)),
             *(f"subjects/{item['id']}/{name}" for item in items for name in OF_SUBJECT)]
    with common.locked(args.out, "template", names, [item[key] for item in items for key in ("image", "label")]) as out:
        earlier = None if args.again else finished_earlier(items, settings, out)
        rows, failed, history = earlier or build(items, options, settings, out, args)
        page = write_template_page(out, rows, failed, history, args, doubts)
        last = history[-1]
        summary = {key: last[key] for key in ("mean_left", "most_left", "sharpness", "dice_pairs") if key in last}
        code = common.end(out, rows, failed, settings, page, args.strict, summary)
        for name in (DEFORMATION, FIELD, WEIGHTS):  # a kill before this point repeats no round
            for path in out.glob(f"round_*/*/{name}"):
                path.unlink()
        return code


def entry_of(item):
    return {"name": item["id"], "moving": item["image"], **({"moving_label": item["label"]} if item["label"] else {})}


def finished_earlier(items, settings, out):
    """rows, failed and history of an earlier run, if it finished with these subjects and files; else None."""
    earlier = read_results(out)
    try:
        history = json.loads((out / "convergence.json").read_text())
    except (OSError, ValueError):
        return None
    known = {**earlier["pairs"], **{entry["name"]: entry for entry in earlier["failed"]}}
    entries = {item["id"]: entry_of(item) for item in items}
    same = (earlier["complete"] and earlier["version"] == __version__ and earlier["settings"] == settings
            and known.keys() == entries.keys()
            and all(known[name].get("source") == source_digests(entry) for name, entry in entries.items()))
    if not same or any(damage(row["files"], out) for row in earlier["pairs"].values()):
        return None
    print(f"{out}: keeping the finished template of an earlier run (--again makes it again)")
    rows = [with_paths_of(entries[name], row) for name, row in earlier["pairs"].items()]
    return rows, earlier["failed"], history


# ---------------------------------------------------------------------------------------------------------------------
# The rounds
# ---------------------------------------------------------------------------------------------------------------------

def build(items, options, settings, out, args):
    """All rounds. Returns: rows of the subjects, failed ones, and the history, a dict for each round."""
    left_out, history, last_round = {}, [], {}
    items = [{**item, "source": source_digests(entry_of(item))} for item in items]  # as they are before they are read
    start = read_source(str(args.start or middle_subject(items, left_out)), "start")
    canonical, turned = to_canonical(start.array, start.affine)
    voxel_mm = np.linalg.norm(turned[:3, :canonical.ndim], axis=0)
    extent_mm = np.array(canonical.shape) * voxel_mm
    finest_mm = args.spacing or float(np.exp(np.log(voxel_mm).mean()))  # a cube as large as its voxels
    image, affine = rescale(canonical, *intensity_range(canonical)), turned
    if args.symmetric:
        image = upright(image, affine, start.name, options["device"])
    require_writable([*out.glob("round_*"), *out.glob("round_*/*"), *out.glob("subjects/*")])
    drop_subjects(out, {item["id"] for item in items})
    write_results(out, [], [], settings, complete=False)  # drops another template
    for number in range(args.rounds + 1):
        where = out / f"round_{number}"
        where.mkdir(exist_ok=True)
        spacing_mm = finest_mm * (2 if number <= args.rounds // 2 else 1)
        size = np.maximum(np.ceil(extent_mm / spacing_mm - 1e-3).astype(int), LEAST_SIDE)
        before, (image, affine) = affine, to_grid(image, affine, size, spacing_mm)
        write_volume(where / TEMPLATE, image, affine)
        continues = number > max(args.rounds // 2, 1)
        tasks = [({"name": item["id"], "moving": item["image"], "fixed": where / TEMPLATE, **(
                     {"known": out / f"round_{number - 1}" / item["id"] / FIELD} if continues else {})},
                  where / item["id"]) for item in items if item["id"] not in left_out]
        how = {**options, "affine": args.affine if number < 2 else False, "refine": number > 0}
        align = functools.partial(onto_template, str(where), how, last_round, before)
        rows, failed = do_all(where, tasks, align, settings, args.workers, f"round {number} of {args.rounds}",
                              "subject", args.again)
        left_out.update({entry["name"]: entry["reason"] for entry in failed})
        rows = without_strangers(rows, left_out) if number == 1 else rows
        if len(rows) < FEWEST:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise InputError(f"{args.images[0]}: fewer than {FEWEST} subjects are left: {reasons}")
        middle = centre(rows, affine, number == args.rounds, args.symmetric)
        rows = [moved(row, middle) for row in rows]
        last_round = {row["name"]: row for row in rows}
        plain, image = average_of(rows, affine, args.sharpen, args.symmetric)
        history.append({"round": number, "spacing_mm": spacing_mm, "moved": middle["moved"],
                        "mean_left": middle["left"], "most_left": middle["most_left"],
                        "sharpness": sharpness(plain) / spacing_mm,
                        "similarity": average([row["similarity"] for row in rows])})
    return finish(out, rows, image, affine, items, left_out, history)


def drop_subjects(out, names):
    """Remove the unchanged files of subjects of an earlier template that are not among `names`: fields that lead from
    two templates must not lie side by side."""
    for row in read_results(out)["pairs"].values():
        for file, entry in row.get("files", {}).items():
            if row["name"] not in names and file.startswith("subjects/") and not damage({file: entry}, out):
                (out / file).unlink()


def middle_subject(items, left_out):
    """The image of the subject whose bright part has the median size; those that cannot be read are left out."""
    sizes = []
    for item in items:
        try:
            image, affine = read_volume(item["image"], dims_of(item["image"]))
        except InputError as error:
            left_out[item["id"]] = str(error)
            continue
        low, high = intensity_range(image)
        voxel_mm3 = voxel_volume(affine, image.ndim)
        sizes.append((float((image > (low + high) / 2).sum() * voxel_mm3), item["id"], item["image"]))
    if not sizes:
        raise InputError(f"{items[0]['image']}: no volume of the group can be read: {left_out[items[0]['id']]}")
    return sorted(sizes)[len(sizes) // 2][2]


def upright(image, affine, name, device):
    """A volume turned and shifted so that its sides are mirror images in the middle plane of its grid: (*size).

    With F the mirror of the grid and M the rigid map from the volume to its mirror image, x -> F M x exchanges the
    sides of the volume; after half of M, F does. image: canonical, so that its first axis leads from left to right.
    """
    mirror = mirror_of(len(image), affine)
    found = common.aligned((image, affine), (image, mirror @ affine), affine="rigid", refine=False, device=device)
    if found.verdict == "failed":
        raise InputError(f"{name}: --symmetric needs volumes with a left and a right side, such as whole brains, but "
                         f"this one and its mirror image stay different (similarity {found.similarity:.2f}); leave "
                         "the option out, or give a more symmetric volume by --start.")
    log = log_matrix(found.matrix)
    half = linalg.expm((log - mirror @ log @ mirror) / 4)
    return apply_field(image, half @ affine, np.zeros((image.ndim, *image.shape), np.float32), affine)


def mirror_of(width, affine):
    """The reflection in the middle plane across the first axis of a grid, 4x4 in the world. width: voxels along it."""
    flip = np.diag([-1.0, 1, 1, 1])
    flip[0, 3] = width - 1
    return affine @ flip @ np.linalg.inv(affine)


def onto_template(out, options, last_round, before, pair, folder, earlier):
    """Register one subject to the template; its deformation without the affine part goes to deformation.npy.

    last_round: rows of the round before, by name. before: affine of its template, the grid of pair's "known".
    """
    if last := last_round.get(pair["name"]):
        start = np.array(last["matrix"])
        if "known" in pair:
            path, weights = pair["known"].with_name(WEIGHTS), None
            if path.exists():
                with np.load(path) as kept:
                    weights = kept["array"], kept["affine"]
            start = Known(start, np.load(pair["known"]), before, weights)
        options = {**options, "start": start}
        if options["affine"] is False:  # an earlier round's affine stage has decided it
            options["similarity"] = last["compared_by"]
    found = common.aligned(pair["fixed"], pair["moving"], **options)
    if "moving" in found.segmentations:
        raise InputError(f"{pair['moving']}: a segmentation; give its image.")
    rest = without_affine(found.field, found.matrix, found.fixed.affine)
    paths = [folder / DEFORMATION]
    save_array(paths[0], rest)
    (folder / WEIGHTS).unlink(missing_ok=True)  # left by a run with other options
    if isinstance(found.weights, tuple):
        paths.append(folder / WEIGHTS)
        array, affine = found.weights
        write_file(paths[1], lambda file: np.savez(file, array=array, affine=affine))
    return common.aligned_row(found, pair, folder, out, paths, moving=os.path.abspath(pair["moving"]))


def without_strangers(rows, left_out):
    """The rows without subjects that failed (another organ, modality or place), unless most did; left_out gets them."""
    if 2 * sum(row["verdict"] == "failed" for row in rows) > len(rows):
        return rows  # a blurred first template may resemble no subject
    left_out.update({row["name"]: row["reason"] for row in rows if row["verdict"] == "failed"})
    return [row for row in rows if row["verdict"] != "failed"]


# ---------------------------------------------------------------------------------------------------------------------
# The middle
# ---------------------------------------------------------------------------------------------------------------------

def deformation_of(row, margin=0):
    """The deformation u_i of a row's subject: (1, N, *size) in voxels of the template.

    margin: voxels around the template's grid in which it falls to zero; without them, maps that lead out of the field
    of view would have no logarithm there.
    """
    found = torch.from_numpy(np.load(Path(row["folder"]) / DEFORMATION))[None]
    if not margin:
        return found
    found = torch.nn.functional.pad(found, [margin] * (2 * (found.dim() - 2)), mode="replicate")
    for axis, n in enumerate(found.shape[2:], 2):
        inside = torch.minimum(torch.arange(n), torch.arange(n).flip(0)).clamp(max=margin) / margin
        taper = 0.5 - 0.5 * torch.cos(torch.pi * inside)
        found = found * taper.view([-1 if k == axis else 1 for k in range(found.dim())])
    return found


def margin_for(rows):
    """Voxels of margin for some rows, at least 8: in it, fields fall by a third of a voxel per voxel on average."""
    most = 0.0
    for row in rows:
        field = deformation_of(row)[0]
        faces = [field.select(axis, place) for axis in range(1, field.dim()) for place in (0, -1)]
        most = max(most, *(float(face.abs().max()) for face in faces))
    return max(8, int(np.ceil(3 * most)))


def logarithm(field):
    """The velocity v with exp(v) = field, for a field that does not fold: (1, N, *size) in voxels.

    v <- v + (field after exp(-v)), the first term of the Baker-Campbell-Hausdorff series (Bossa et al., MICCAI 2007).
    field: (1, N, *size) displacement in voxels. Beyond the grid it counts as zero, so a field that is not zero at the
    border needs a margin.
    """
    velocity = field
    for _ in range(2):  # more gain less than the error of interpolation
        velocity = velocity + compose(first=field, then=exponential(-velocity, 4))
    return velocity


def log_matrix(matrix):
    """The real logarithm of a 4x4 affine map, (4, 4); that of the identity if the map has no real logarithm."""
    found = linalg.logm(np.asarray(matrix, np.float64))
    return found.real if np.isrealobj(found) or np.abs(found.imag).max() < 1e-6 else np.zeros((4, 4))


def centre(rows, affine, exact, symmetric=False):
    """The middle of the subjects relative to the current template, whose grid has this affine.

    symmetric: of the subjects and their mirror images.
    exact: use the mean of displacements, then the mean of logarithms, in passes until little of it is left; otherwise
    only the mean of displacements, which comes close and costs little. The mean is smoothed by a voxel, because the
    logarithm of a field that nearly folds is coarse.
    Returns: dict of way, (1, N, *wide) in voxels: x -> x + way(x) leads from the new template to the old one, on the
    template's grid with `margin` voxels around it; before, 4x4: its affine part in the world, included in way; moved,
    the mean length of the mean deformation; left and most_left, mean and largest length of the mean logarithm
    afterwards, both None unless `exact`. Lengths are in voxels.
    """
    margin = margin_for(rows)
    size = deformation_of(rows[0], margin).shape[2:]
    dims, wide = len(size), affine.copy()
    wide[:3, 3] -= affine[:3, :dims] @ np.full(dims, margin)
    log = np.mean([log_matrix(row["matrix"]) for row in rows], axis=0)
    if symmetric:
        mirror = mirror_of(size[0], wide)
        log = (log + mirror @ log @ mirror) / 2
    before = linalg.expm(-log)
    way = then_affine(torch.zeros(1, dims, *size), in_voxels(before, wide))
    middle = {"margin": margin, "affine": wide, "before": before, "moved": None, "left": None, "most_left": None}
    inner = (..., *(slice(margin, -margin) for _ in size))
    for number in range(MOST_PASSES if exact else 1):
        logs = exact and number > 0  # the first pass goes most of the way without logarithms
        mean = sum(centred_deformation(row, {**middle, "way": way}, logs) for row in rows) / len(rows)
        if symmetric:
            other = mean.flip(2)
            other[:, 0] *= -1
            mean = (mean + other) / 2
        length = mean[inner].square().sum(1).sqrt()
        if number == 0:
            middle["moved"] = float(length.mean())
        if logs:
            middle.update(left=float(length.mean()), most_left=float(length.max()))
            if middle["left"] < ENOUGH_LEFT or number == MOST_PASSES - 1:
                break
        mean = torch.from_numpy(ndimage.gaussian_filter(mean.numpy(), (0, 0, *[SMOOTH_MEAN] * dims)))
        way = compose(first=way, then=exponential(-mean, 4))
    return {**middle, "way": way}


def in_voxels(matrix, affine):
    """A 4x4 map of the world as one of the voxels of a grid. affine: 4x4 of the grid."""
    return np.linalg.inv(affine) @ matrix @ affine


def centred_field(row, middle):
    """The whole map from the moved template to a subject: (1, N, *wide), total displacement in voxels of its grid."""
    field = compose(first=deformation_of(row, middle["margin"]), then=middle["way"])
    return then_affine(field, in_voxels(np.array(row["matrix"]), middle["affine"]))


def centred_deformation(row, middle, exact):
    """`centred_field` without its affine part, T_i after `before`: its logarithm if `exact`, else the field itself."""
    own = np.linalg.inv(np.array(row["matrix"]) @ middle["before"])
    rest = then_affine(centred_field(row, middle), in_voxels(own, middle["affine"]))
    return logarithm(rest) if exact else rest


def moved(row, middle):
    """A row after the template has moved: its matrix and the whole map in field.npy, (N, *size), lead from there."""
    inner = (0, ..., *(slice(middle["margin"], -middle["margin"]) for _ in middle["way"].shape[2:]))
    field = centred_field(row, middle)[inner].numpy()
    save_array(Path(row["folder"]) / FIELD, field)
    return {**row, "matrix": (np.array(row["matrix"]) @ middle["before"]).tolist()}


def average_of(rows, affine, amount, symmetric):
    """The mean of the subjects on the moved template, plain and sharpened, (*size) float32 in 0..1.

    Each subject counts within its field of view. amount: of sharpening. symmetric: add their mirror images.
    """
    total = weight = 0
    for row in rows:
        field = np.load(Path(row["folder"]) / FIELD)
        image, own = read_volume(row["moving"], len(field))
        seen = apply_field(np.ones(image.shape, np.float32), own, field, affine, order=0)
        total = total + seen * apply_field(rescale(image, *intensity_range(image)), own, field, affine)
        weight = weight + seen
    if symmetric:
        total, weight = total + total[::-1], weight + weight[::-1]
    plain = (total / np.maximum(weight, 1)).astype(np.float32)
    edges = plain - ndimage.gaussian_filter(plain, SHARPEN_SIGMA)
    return plain, np.clip(plain + amount * edges, 0, 1).astype(np.float32)


def sharpness(image):
    """The mean gradient magnitude of an image in 0..1, in units of its range per voxel."""
    return float(np.sqrt(sum(part ** 2 for part in np.gradient(image))).mean())


# ---------------------------------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------------------------------

def finish(out, rows, image, affine, items, left_out, history):
    """Write the template, its labels, and each subject's field and volumes. Returns: rows, failed, history."""
    for path in (out / LABEL, *(out / "subjects" / name / file for name in left_out for file in OF_SUBJECT)):
        path.unlink(missing_ok=True)  # of an earlier template
    write_volume(out / TEMPLATE, image, affine)
    items = {item["id"]: item for item in items}
    written = [write_subject(out, row, items[row["name"]], affine) for row in rows]
    done, maps = [row for row, _ in written], {row["name"]: label for row, label in written if label is not None}
    if maps:
        label = vote(list(maps.values()))[0]
        write_volume(out / LABEL, label, affine)
        # Of all subjects: a label that loses the vote everywhere, as lesions do, is a Dice of 0. If all lose it, there
        # is nothing to compare a subject with, and only the pairs have a Dice.
        values = sorted(set().union(*(np.unique(each).tolist() for each in maps.values())) - {0})
        for row in done:
            if row["name"] in maps and label.any():
                row["fixed_label"] = str((out / LABEL).resolve())
                scores = dice(maps[row["name"]], label, values)
                row["dice"], row["labels"] = average(scores), {str(value): {"dice": None if score != score else score}
                                                               for value, score in zip(values, scores)}
        pairs = dice_of_pairs(list(maps.values()), values)
        if pairs is not None:
            history[-1]["dice_pairs"] = pairs
    failed = [{"name": name, "reason": reason, "source": items[name]["source"]} for name, reason in left_out.items()]
    write_file(out / "convergence.json", json.dumps(history, indent=1) + "\n")
    shared = [out / TEMPLATE, *(out / f"round_{entry['round']}" / TEMPLATE for entry in history)]
    shared += [out / LABEL] * bool(maps)
    done[0]["files"].update(file_digests(shared, out))  # checked with the first subject
    return judge_list(done), failed, history


def write_subject(out, row, item, affine):
    """Write a subject's field, and its volume and label map on the template. Returns: its row; that label map or None.

    item: its files. affine: of the template.
    """
    folder = out / "subjects" / row["name"]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in OF_SUBJECT]
    field, warped_label = np.load(Path(row["folder"]) / FIELD), None
    volume, own = read_volume(row["moving"], len(field))
    write_field(paths[0], into_plane(field, affine, own), affine)
    write_volume(paths[1], apply_field(volume, own, field, affine), affine)
    paths[2].unlink(missing_ok=True)
    row = {**row, "folder": str(folder), "fixed": str((out / TEMPLATE).resolve()), "source": item["source"]}
    label = item["label"] and attempt(str(item["label"]), common.label_of, item["label"], row["moving"], volume.shape,
                                      own)
    if isinstance(label, str):
        row["warnings"] = [label]
    elif label:
        warped_label = apply_label(*label, field, affine)
        write_volume(paths[2], warped_label, affine)
        row["moving_label"] = os.path.abspath(item["label"])
    return common.finished_row(row, out, paths[:2] if warped_label is None else paths), warped_label


def write_template_page(out, rows, failed, history, args, doubts=()):
    """Write template.html and subjects.tsv. doubts: sentences about the whole group. Returns: the page's path."""
    image, affine = read_volume(out / TEMPLATE, dims_of(out / TEMPLATE))
    label = read_label(out / LABEL, image.ndim)[0] if any("dice" in row for row in rows) else None
    outline = [] if label is None else [(label, np.unique(label[label != 0]))]
    last = history[-1]
    rounds = [(thumbnail(*read_volume(out / f"round_{entry['round']}" / TEMPLATE, image.ndim)),
               f"before round {entry['round']}", f"voxels of {entry['spacing_mm']:.3g} mm") for entry in history]
    pictures = []
    for row in rows:
        warped, _ = read_volume(Path(row["folder"]) / "warped.nii.gz", image.ndim)
        pictures.append((thumbnail(warped, affine, outline), row["name"],
                         f"{row['verdict']}, similarity {row['similarity']:.2f}{common.dice_text(row)}"))
    shown = [column for column in COLUMNS if any(row.get(column) is not None for row in rows)]
    lines = [[row["name"], row["verdict"], *[row.get(column) for column in shown]] for row in rows]
    common.write_table(out / "subjects.tsv", ["name", "verdict", *shown], rows)
    cards = [("subjects", len(rows), f"{len(failed)} left out" if failed else ""),
             ("mean of the logarithms", f"{last['mean_left']:.3f}",
              f"voxels, {last['most_left']:.2f} where it is longest"),
             ("sharpness", f"{last['sharpness']:.4f}", "mean gradient before sharpening, of the range per mm")]
    if "dice_pairs" in last:
        cards.append(("Dice", f"{last['dice_pairs']:.3f}", "mean over all pairs of subjects, on the template"))
    numbers = [entry["round"] for entry in history]
    history = [{**entry, "moved": entry["moved"] * entry["spacing_mm"]} for entry in history]  # voxels change in size
    charts = [line_chart(title, [(title, numbers, [entry[key] for entry in history])], across="round")
              for key, title in (("moved", "template moved, mean, mm"),
                                 ("sharpness", "mean gradient of the plain mean, per mm"),
                                 ("similarity", "similarity, mean of subjects"))]
    sections = [("The template", gallery_html([(thumbnail(image, affine, outline), TEMPLATE, "")])),
                ("Convergence", grid(charts) + "<p>Each round registers all subjects to the template and moves it to "
                 "their middle.</p>\n" + gallery_html(rounds)),
                ("Subjects", table_html(["subject", "verdict", *[word.replace("_percent", " %") for word in shown]],
                                        lines, "Click on a heading to sort.", [None, None, *[".3f"] * len(shown)])),
                ("Subjects on the template", gallery_html(pictures))]
    mirrored = " and their mirror images" if args.symmetric else ""
    lead = f"Of {len(rows)} subjects{mirrored}, in {args.rounds} rounds, on {' x '.join(map(str, image.shape))} voxels."
    return common.write_study_page(out / "template.html", "Template", lead, cards, rows, failed, sections, doubts)
