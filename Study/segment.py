"""Segment volumes with a few labelled ones: the most similar atlases are registered to each, and their labels joined.

Each image has its own vote: the atlases are registered to it here, and results for other images cannot take part. An
atlas that is the image itself never votes. One of the same person votes only on request, because the result would look
better than for anybody else.
"""
import functools
import os
from pathlib import Path

import numpy as np

from Dataloader.formats import same_volume
from Dataloader.grids import voxel_volume
from Dataloader.nifti import read_header, read_label, read_numbers, read_raw_header, read_volume, write_volume
from Dataloader.transforms import write_matrix
from Dataloader.volume import dims_of
from Diffusion.metrics import average, dice
from Inference.bids import require_own_bids, require_own_names
from Inference.labels import apply_label, vote
from Inference.outputs import grid_header, write_warped
from Inference.pair_figures import link
from Inference.results import damage, do_all, kept_rows, read_results, source_digests
from Report.page import table_html
from Runtime.device import pick_device
from Runtime.errors import InputError
from Runtime.files import as_stored, first_repeated
from Study import common
from Study.fusion import fuse
from Study.thumbnails import gallery_html, thumbnail

LABEL, DOUBT = "label.nii.gz", "doubt.nii.gz"
DOUBTFUL = 0.25  # doubt above which a labelled voxel is worth a look


def segment(args):
    """`omnimorph segment`; returns the exit code."""
    known = common.volumes_of([args.atlases], pattern=args.subject_pattern)
    atlases = [item for item in known if item["label"]]
    if not atlases:
        raise InputError(f"{args.atlases}: none of its volumes has a label map: put label maps into labelsTr beside "
                         "imagesTr, name them like NAME_dseg.nii.gz, or list both in a .csv.")
    images = common.volumes_of(args.images, args.ids, args.subject_pattern, known, told=[args.atlases])
    if args.bids:
        require_own_names([{"name": item["id"], "image": item["image"]} for item in images])
        require_own_bids(args.out)
    for atlas in atlases:  # one that was not taken may be taken once it has changed
        atlas["digests"] = source_digests({"image": atlas["image"], "label": atlas["label"]})
    images = [{**item, **voters(item, atlases, args.same_subject)} for item in images]
    if twice := first_repeated(as_stored(pair["name"]) for pair in pairs_of(images)):  # a on b_to_c, and a_to_b on c
        raise InputError(f"{twice}: two registrations of an atlas to an image would have this name; name the volumes "
                         "without _to_ in a .csv list with a column id.")
    settings = {"program": "segment", "most": args.most, "join": args.join, "similarity": args.similarity,
                "affine": args.affine, "labels": args.labels}
    options = {"similarity": args.similarity, "affine": args.affine, "device": pick_device(args.device).type}
    names = ["segment.html", "labels.tsv", "ranking/results.json", "atlases/results.json",
             *(f"{item['id']}/{name}" for item in images for name in (LABEL, DOUBT))]
    inputs = [item[key] for item in atlases + images for key in ("image", "label")]
    with common.locked(args.out, "segment", names, inputs, [Path(args.out, item["id"]) for item in images]) as out:
        kept = {}
        if not args.again:
            require_uncorrected(images, out)
            kept = kept_images(images, settings, out, args.keep)
        waiting, starts = rank_all([item for item in images if item["id"] not in kept], options, settings, out, args)
        carried = carry_all(waiting, starts, options, settings, out, args)
        voting = {**kept, **{item["id"]: item for item in waiting}}
        tasks = [(entry_of(voting[item["id"]]), out / item["id"]) for item in images]
        join = functools.partial(join_labels, str(out), args.join, voting, carried)
        rows, failed = do_all(out, tasks, join, settings, args.workers, "joining", "image", args.again)
        page = write_results_page(out, rows, failed, args, len(atlases))
        mean = average([row.get("dice") for row in rows])
        summary = {} if mean is None else {"dice": round(mean, 5)}
        code = common.end(out, rows, failed, settings, page, args.strict, {**summary, "atlases": len(atlases)})
        if not args.keep:
            again = tuple(f"_to_{entry['name']}" for entry in failed)  # once mended, they need no registering
            for path in (out / "atlases").glob("*_to_*/warped*.nii.gz"):
                if not path.parent.name.endswith(again):
                    path.unlink()
        return code


def voters(image, atlases, same_subject):
    """Which atlases may vote on an image: dict of atlases, candidates ({id: digests}), said (sentences about others).

    The image itself never votes, as the same file or as a copy; other scans of its subject vote only if `same_subject`.
    """
    may, said = [], []
    for atlas in atlases:
        if atlas["image"].resolve() == image["image"].resolve():
            continue
        if same_volume(atlas["image"], image["image"]):
            said.append(f"{image['id']}: the atlas {atlas['id']} is a copy of it and does not vote.")
            continue
        if atlas["subject"] == image["subject"] and not same_subject:
            said.append(f"{image['id']}: the atlas {atlas['id']} is of the same subject, {atlas['subject']}, and "
                        "does not vote (--same-subject allows it).")
            continue
        may.append(atlas)
    return {"atlases": may, "candidates": {atlas["id"]: atlas["digests"] for atlas in may}, "said": said}


def entry_of(image):
    """What the labels of an image depend on, for Inference/results.py. image: with its atlases."""
    files = {"image": image["image"], **({"truth": image["label"]} if image["label"] else {})}
    for atlas in image["atlases"]:
        files.update({f"atlas {atlas['id']}": atlas["image"], f"labels {atlas['id']}": atlas["label"]})
    return {"name": image["id"], **files}


def require_uncorrected(images, out):
    """Raise InputError if somebody has corrected a label map of an earlier run that this run would replace.

    One that cannot be read is damaged, not corrected.
    """
    rows = read_results(out)["pairs"]
    for row in (rows[item["id"]] for item in images if item["id"] in rows):
        path = Path(row["folder"]) / LABEL
        file = link(path, out)
        written = {file: row.get("files", {}).get(file)}
        if not written[file] or not path.is_file() or not damage(written, out):
            continue
        try:
            read_label(path, dims_of(path))
        except InputError:
            continue
        raise InputError(f"{path}: it has changed since it was written, and would be replaced: move it to another "
                         "folder to keep it, or give --again, which replaces it.")


def kept_images(images, settings, out, keep):
    """The images that an earlier run has done with these candidates, {id: image with the atlases that were taken}.

    keep: only those whose registered atlases are still there.
    """
    earlier, kept = read_results(out), {}
    for item in images:
        row = earlier["pairs"].get(item["id"])
        if not row or row.get("candidates") != item["candidates"]:
            continue
        taken = {**item, "atlases": [atlas for atlas in item["atlases"] if atlas["id"] in row["taken"]]}
        warped = [out / "atlases" / pair["name"] / "warped.nii.gz" for pair in pairs_of([taken])]
        if (not keep or all(map(Path.is_file, warped))) and kept_rows(earlier, settings, [entry_of(taken)], out):
            kept[item["id"]] = taken
    return kept


def pairs_of(images):
    """The registrations of the images' atlases, each as the entry of a list, see Inference/results.py."""
    return [{"name": f"{atlas['id']}_to_{item['id']}", "fixed": item["image"], "moving": atlas["image"],
             "moving_label": atlas["label"]} for item in images for atlas in item["atlases"]]


# ---------------------------------------------------------------------------------------------------------------------
# Registering
# ---------------------------------------------------------------------------------------------------------------------

def rank_all(images, options, settings, out, args):
    """Keep for each image the --most atlases that are most similar to it after an affine alignment.

    Returns: the images with these atlases; {name of the pair: matrix} of those alignments.
    """
    many = [item for item in images if args.most and len(item["atlases"]) > args.most]
    if not many:
        return images, {}
    where = out / "ranking"
    where.mkdir(exist_ok=True)
    tasks = [(entry, where) for entry in pairs_of(many)]
    rows, failed = do_all(where, tasks, functools.partial(rank, options), settings, args.workers, "comparing", "pair",
                          args.again)
    why = {entry["name"]: entry["reason"] for entry in failed}
    found, chosen = {row["name"]: row for row in rows}, {}
    for item in many:
        names = {atlas["id"]: f"{atlas['id']}_to_{item['id']}" for atlas in item["atlases"]}
        said = [f"{item['id']}: the atlas {identity} does not vote: {why[name]}" for identity, name in names.items()
                if name in why]
        ranked = sorted((found[name]["similarity"], identity) for identity, name in names.items() if name in found)
        best = {identity for _, identity in ranked[-args.most:]}
        chosen[item["id"]] = {**item, "said": item["said"] + said,
                              "atlases": [atlas for atlas in item["atlases"] if atlas["id"] in best]}
    # A pair that the affine stage found to show two modalities repeats it later, because it decides the measure.
    starts = {name: row["matrix"] for name, row in found.items()
              if args.similarity not in (None, "auto") or row["compared_by"] == "correlation"}
    return [chosen.get(item["id"], item) for item in images], starts


def rank(options, pair, folder, earlier):
    """Align an atlas to an image and write the affine map; the row has their similarity afterwards."""
    found = common.aligned(pair["fixed"], pair["moving"], refine=False, **options)
    path = folder / f"{pair['name']}.mat"
    write_matrix(path, found.matrix)
    return common.aligned_row(found, pair, folder, folder, [path])


def carry_all(images, starts, options, settings, out, args):
    """Register the atlases of the images still to be done: {name of the pair: row, or why there is none}.

    starts: from `rank_all`.
    """
    where = out / "atlases"
    tasks = [(entry, where / entry["name"]) for entry in pairs_of(images)]
    if not tasks:
        return {}
    where.mkdir(exist_ok=True)
    rows, failed = do_all(where, tasks, functools.partial(carry, str(where), starts, options, args.labels), settings,
                          args.workers, "registering", "pair", args.again)
    return {**{row["name"]: row for row in rows}, **{entry["name"]: entry["reason"] for entry in failed}}


def carry(out, starts, options, labels, pair, folder, earlier):
    """Register one atlas to one image, write its image and labels on that grid, and return the row."""
    grid = read_header(pair["moving"], dims_of(pair["moving"]))
    label, affine = common.label_of(pair["moving_label"], pair["moving"], *grid)
    if pair["name"] in starts:
        options = {**options, "affine": False, "start": np.array(starts[pair["name"]])}
    found = common.aligned(pair["fixed"], pair["moving"], **options)
    paths = [folder / "warped.nii.gz", folder / "warped_label.nii.gz"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        path.unlink(missing_ok=True)
    header, fixed_affine = read_raw_header(pair["fixed"]), found.fixed.affine
    write_volume(paths[0], found.warped, fixed_affine, grid_header(header))  # not rounded to the file's own numbers
    write_warped(paths[1], apply_label(label, affine, found.field, fixed_affine, labels), pair["moving_label"],
                 fixed_affine, header)
    return common.aligned_row(found, pair, folder, out, paths)


# ---------------------------------------------------------------------------------------------------------------------
# Joining
# ---------------------------------------------------------------------------------------------------------------------

def join_labels(out, join, voting, carried, entry, folder, earlier):
    """Join the labels of the atlases for one image, write label and doubt, and return the row."""
    item, dims = voting[entry["name"]], dims_of(entry["image"])
    found = {atlas["id"]: carried.get(f"{atlas['id']}_to_{entry['name']}") for atlas in item["atlases"]}
    reasons = {name: row if isinstance(row, str) else row["reason"] for name, row in found.items()
               if isinstance(row, str) or row["verdict"] == "failed"}
    good = [name for name in found if name not in reasons]
    sentences = [*item["said"], *(f"{entry['name']}: the atlas {name} does not vote: {reason}"
                                  for name, reason in reasons.items())]
    if not good:
        raise InputError(" ".join([f"{entry['image']}: no atlas may vote on it.", *sentences]))
    image, affine = read_volume(entry["image"], dims)
    if "truth" in entry:
        truth, _ = common.label_of(entry["truth"], entry["image"], image.shape, affine)
    places = [Path(found[name]["folder"]) for name in good]
    maps = [read_label(place / "warped_label.nii.gz", dims)[0] for place in places]
    if join == "joint":
        label, doubt = fuse(image, [read_volume(place / "warped.nii.gz", dims)[0] for place in places], maps)
    else:
        label, agreement = vote(maps)
        doubt = 1 - agreement
    folder.mkdir(parents=True, exist_ok=True)
    header, paths = grid_header(read_raw_header(entry["image"])), [folder / LABEL, folder / DOUBT]
    for path in paths:
        path.unlink(missing_ok=True)
    write_volume(paths[0], label, affine, header)
    write_volume(paths[1], doubt, affine, header)
    # Of the truth too: a structure that no atlas has is missed.
    known = [*maps, truth] if "truth" in entry else maps
    values = sorted(set().union(*(np.unique(each).tolist() for each in known)) - {0})
    labels = {str(value): sizes(label == value, doubt, affine) for value in values}
    inside = doubt[label != 0]
    row = {"name": entry["name"], "folder": str(folder), "image": os.path.abspath(entry["image"]),
           "candidates": item["candidates"], "taken": list(found), "voted": good, "warnings": sentences,
           "doubt": float(inside.mean()) if inside.size else 1.0,
           "doubtful_percent": 100.0 * float((inside > DOUBTFUL).mean()) if inside.size else 100.0}
    if len(good) == 1 and inside.size:  # nobody contradicts it
        row["doubt"] = row["doubtful_percent"] = None
        for each in labels.values():
            each["doubt"] = None
    row.update(verdict_of(row, good, found), labels=labels)
    if "truth" in entry:
        scores = dice(label, truth, values)
        for value, score in zip(values, scores):
            labels[str(value)]["dice"] = None if score != score else score
        row["dice"] = average(scores)
    return common.finished_row(row, out, paths)


def sizes(inside, doubt, affine):
    """Volume ("mm3"; 2D: area, "mm2") and mean doubt ("doubt") of a label. inside: booleans (*size)."""
    size = float(inside.sum()) * voxel_volume(affine, inside.ndim)
    return {f"mm{inside.ndim}": size, "doubt": float(doubt[inside].mean()) if inside.any() else None}


def verdict_of(row, good, found):
    """verdict and reason of a segmented image: doubtful if most atlases are, or most of the labelled voxels."""
    doubtful = [name for name in good if found[name]["verdict"] == "doubtful"]
    if 2 * len(doubtful) > len(good):
        return {"verdict": "doubtful", "reason": f"{len(doubtful)} of {len(good)} atlases have the verdict "
                                                 f"doubtful, such as {doubtful[0]}: {found[doubtful[0]]['reason']}"}
    if (row["doubtful_percent"] or 0) > 50:
        return {"verdict": "doubtful", "reason": f"the atlases disagree in {row['doubtful_percent']:.0f} % of the "
                                                 "labelled voxels: check the result."}
    return {"verdict": "ok", "reason": ""}


def write_results_page(out, rows, failed, args, count):
    """Write segment.html and labels.tsv. Returns: the page's path."""
    table = [{"image": row["name"], "label": label, **values} for row in rows
             for label, values in row["labels"].items()]
    units = [unit for unit in ("mm3", "mm2") if any(unit in each for each in table)] or ["mm3"]
    common.write_table(out / "labels.tsv", ["image", "label", *units, "doubt", "dice"], table)
    scored = any("dice" in row for row in rows)
    header = ["image", "verdict", "atlases that vote", "labels", "doubt", "doubtful, %", *["Dice"] * scored]
    lines = [[row["name"], row["verdict"], len(row["voted"]), len(row["labels"]), row["doubt"],
              row["doubtful_percent"], *[row.get("dice")] * scored] for row in rows]
    formats = [None, None, None, None, ".3f", ".1f", *[".3f"] * scored]
    pictures, values = [], sorted({int(label) for row in rows for label in row["labels"]})
    for row in rows:
        dims, folder = dims_of(row["image"]), Path(row["folder"])
        image, affine = read_volume(row["image"], dims)
        label, doubt = read_label(folder / LABEL, dims)[0], read_numbers(folder / DOUBT, dims)[0]
        pictures.append((thumbnail(image, affine, [(label, values)], doubt), row["name"],
                         row["verdict"] + ("" if row["doubt"] is None else f", doubt {row['doubt']:.2f}")
                         + common.dice_text(row)))
    cards = [("images", len(rows), f"{len(failed)} left out" if failed else ""), ("atlases", count, ""),
             ("doubt", average([row["doubt"] for row in rows]) if rows else None, "mean over the labelled voxels")]
    sections = [("Images", table_html(header, lines, "Click on a heading to sort. labels.tsv has every label: volume "
                                                     "or area, doubt and, if the image has its own labels, Dice.",
                                                     formats)),
                ("Labels and doubt", gallery_html(pictures) + "<p>The outlines are the labels. Red is doubt, the share "
                 "of the votes that the label did not get.</p>\n")]
    how = "joined by the local similarity of each atlas" if args.join == "joint" else "by majority"
    return common.write_study_page(out / "segment.html", "Segmentation by atlases",
                                   f"Labels of {args.atlases}, {how}.", cards, rows, failed, sections)
