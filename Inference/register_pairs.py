"""What OM_register.py does with its options: register a pair or a list, or apply a saved field."""
import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import sys
import warnings
from pathlib import Path

import nibabel
import numpy as np
import torch

from Dataloader.datalist import MOST_CHANNELS, is_named_segmentation, volume_id
from Dataloader.formats import WRITTEN, sitk_to_write
from Dataloader.grids import require_same_grid
from Dataloader.nifti import (
    placement_doubts,
    read_header,
    read_label,
    read_numbers,
    read_raw_header,
)
from Dataloader.points import point_files, read_point_pairs, read_points, write_points
from Dataloader.transforms import meaning, read_any_field
from Dataloader.volume import dims_of, shape_of
from Diffusion.metrics import folding_percent
from Inference.bids import drop_copies, is_ours, require_own_bids, require_own_names, write_bids
from Inference.choices import DEFAULTS, is_list
from Inference.labels import apply_field, carry, label_on
from Inference.load_model import load_model
from Inference.outputs import disp_name, disp_names, make_folder, write_row, write_warped
from Inference.pair_figures import means, write_report
from Inference.pair_lists import (
    CHANNELS,
    TO_REGISTER,
    channels_of,
    pairs_onto,
    read_pairs_to_register,
    require_like_channels,
)
from Inference.registration import memory_needed, overlap_percent, register_from
from Inference.results import PARTS, do_all, listed_files, output_files, parts_of, require_own, write_results
from Inference.scores import moved_points, point_scores
from Inference.verdict import judge_list
from Runtime import checkpoint, memory, run_lock
from Runtime.config import load_config
from Runtime.device import describe, pick_device, prepare_device
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.files import first_repeated, require_apart, sha256, write_file

FOLDED, OUTSIDE = 20.0, 95.0  # percent of the voxels; above, an applied field is probably a mistake
APPLIED = "applied.json"  # names what --apply has written beside it
WORKER = {}  # set in each process by `begin_worker`: args, model, cfg


# ---------------------------------------------------------------------------------------------------------------------
# What the options say
# ---------------------------------------------------------------------------------------------------------------------

def asked_pairs(args):
    """The pairs that the command line names, from a list or a single one, as `read_pairs_to_register` returns them."""
    if args.pairs and not args.fixed:
        pairs = read_pairs_to_register(args.pairs, args.list)
    elif is_list(args):
        moving = [args.pairs] if args.pairs else args.moving
        of_fixed = {key: Path(getattr(args, key)) for key in ("fixed_mask", "points") if getattr(args, key)}
        pairs = [{**pair, **of_fixed} for pair in pairs_onto(args.fixed, moving, args.moving_label, args.fixed_label)]
    else:
        if max(len(args.fixed_channels), len(args.moving_channels)) >= MOST_CHANNELS:
            raise InputError(f"a volume has at most {MOST_CHANNELS} channels, the first one included; leave some out.")
        files = {"fixed": args.fixed, "moving": args.moving[0], "fixed_label": args.fixed_label,
                 "moving_label": args.moving_label[0] if args.moving_label else None, "fixed_mask": args.fixed_mask,
                 "moving_mask": args.moving_mask, "points": args.points, "moving_points": args.moving_points,
                 **dict(zip(CHANNELS["fixed"], args.fixed_channels)),
                 **dict(zip(CHANNELS["moving"], args.moving_channels))}
        name = f"{volume_id(Path(files['moving']))} to {volume_id(Path(files['fixed']))}"  # a folder may end in a slash
        pairs = [{"name": name, **{key: Path(path) for key, path in files.items() if path}}]
    for pair, side in itertools.product(pairs, ("fixed", "moving")):
        if is_named_segmentation(pair[side]):  # registration compares intensities
            raise InputError(f"{pair[side]}: its name marks it as a segmentation; give its image as the {side} "
                             f"volume and this one as its label ({side}_label), or rename it if it is an image.")
    return pairs


def settings_of(args, model, cfg):
    """All settings on which the results depend, as plain JSON."""
    asked = {key: getattr(args, key) for key in ("affine", "refine", "similarity", "start", "labels", "inverse",
                                                 "learn2reg", "no_picture", "also", "resample_labels")}
    asked["also"] = [word for word in args.also if word != "bids"]  # it only copies results
    weights = checkpoint.weights_sha256(model[0].state_dict()) if model else None
    initial = sha256(args.initial) if args.initial and Path(args.initial).is_file() else None
    return json.loads(json.dumps({"weights": weights, "initial": initial, **asked, "config": cfg}))


def memory_of(pairs, args):
    """The memory that the largest pair needs, in words, with a warning if all processes together need more than is
    free: each one compares its own pair, without labels, with all that is free."""
    needed = [attempt(pair["name"], lambda pair=pair: memory_needed(
        shape_of(pair["fixed"]), shape_of(pair["moving"]), 1 + len(channels_of(pair, "fixed")), args.inverse,
        args.refine and WORKER["cfg"]["refine.grid"] == "own", "moving_label" in pair)) for pair in pairs]
    processes = min(args.workers, len(pairs))
    at_once = heapq.nlargest(processes, (each for each in needed if not isinstance(each, str)))
    share = f" in each of {processes} processes" if processes > 1 else ""
    free = memory.measure(torch.device("cpu"))["host_free"]
    fewer = "use fewer --workers or larger voxels" if processes > 1 else "use larger voxels"
    return (f"up to {max(at_once, default=0) / 2 ** 30:.1f} GiB{share}"
            + ", and what the network takes" * (args.model != "none")
            + (f"\nwarning: only {free / 2 ** 30:.1f} GiB of memory are free; {fewer}, or take a machine with more"
               if free is not None and sum(at_once) > free else ""))


def how_registered(args):
    """How the pairs are registered, for the top of the page."""
    steps = [f"model {args.model}"] if args.model != "none" else []
    if args.affine:
        steps.append(f"{args.affine} alignment")
    if args.refine:
        steps.append(f"{args.refine} steps of refinement")
    if args.similarity:
        steps.append(f"compared by {args.similarity}")
    if args.initial or args.start != "auto":
        steps.append(f"start by {args.initial or args.start}")
    return ", ".join(steps)


# ---------------------------------------------------------------------------------------------------------------------
# Registering
# ---------------------------------------------------------------------------------------------------------------------

def register_all(args):
    """Register one pair or a list; returns the exit code. A failed pair does not stop a list."""
    out, args.device = Path(args.out), pick_device(args.device)
    pairs = asked_pairs(args)
    if not args.dims:  # those of the first fixed volume that can be opened
        opened = (attempt(pair["fixed"], dims_of, pair["fixed"]) for pair in pairs)
        args.dims = next((dims for dims in opened if not isinstance(dims, str)), 3)
    begin_worker(args)
    cfg = WORKER["cfg"]
    settings = settings_of(args, WORKER["model"], cfg)
    disps = disp_names(pairs, cfg["model.dims"]) if args.learn2reg else []
    if "bids" in args.also:
        require_own_names(pairs)
        require_own_bids(out)
    for suffix in args.also:
        if suffix == "h5" or f".{suffix}" in WRITTEN:
            sitk_to_write(out / f"field.{suffix}")  # reports a missing package or folder before the work
    args.home = home = out
    tasks = [(pair, out / pair["name"] if is_list(args) else out) for pair in pairs]
    folders = [folder for _, folder in tasks]
    if args.part:
        number, count = map(int, args.part.split("/"))
        args.home = home = out / PARTS / f"{number}_of_{count}"
        pairs, tasks = pairs[number - 1::count], tasks[number - 1::count]
    make_folder(home)
    with contextlib.ExitStack() as locks:
        # A part and the whole list each take their own lock before they look for the other's: one of them sees it.
        locks.enter_context(run_lock.held_results(home))
        others = [each for each in (out, *parts_of(out)) if each != home]  # what they have done is kept
        for each in others:
            if not args.part:
                locks.enter_context(run_lock.held_results(each))
            elif each == out or not each.name.endswith(f"_of_{count}"):  # nor may another division be at work
                run_lock.require_free(each)
        require_own(out, folders, disps)
        gone = [*(out / "bids").rglob("*")] if is_ours(out / "bids") else []
        if not is_list(args):  # of a list, only that pair is refused
            gone += [*output_files(out), *listed_files(out), *(out.glob("disp_*_*.nii.gz") if args.learn2reg else ())]
        require_apart(gone, inputs=[path for pair in pairs for path in inputs_of(pair, args)])
        print(f"device: {describe(args.device)}", file=sys.stderr)

        def ready(left):
            (home / "report.html").unlink(missing_ok=True)
            if not args.part:
                drop_copies(out)
            if left:
                print(f"memory: {memory_of(left, args)}", file=sys.stderr)
        rows, failed = do_all(home, tasks, register_pair, settings, args.workers, again=args.again,
                              resumes=is_list(args), begin=functools.partial(begin_worker, args), beside=others,
                              ready=ready)
        rows = judge_list(rows)
        page, table = write_report(home, rows, failed, how_registered(args), cfg["model.dims"]) if rows else (None, "")
        write_results(home, rows, failed, settings, complete=True)
        if "bids" in args.also:
            write_bids(out)
    if rows:
        print(f"{table}\n\nreport: {page.resolve()}")
        print(json.dumps(means(rows, failed)))
    for entry in failed:
        print(f"error: {entry['name']}: {entry['reason']}" if is_list(args) else f"error: {entry['reason']}",
              file=sys.stderr)
    for row in rows:
        if row["verdict"] != "ok":
            kind = "error" if args.strict and row["verdict"] == "failed" else "warning"
            print(f"{kind}: {row['name']}: {row['verdict']}, {row['reason']}", file=sys.stderr)
    hopeless = args.strict and any(row["verdict"] == "failed" for row in rows)
    return STOP if failed or hopeless else DONE


def begin_worker(args):
    """Fill WORKER, in this process and in each one of --workers."""
    prepare_device(args.device, 0)
    if args.model != "none":
        model = load_model(args.model, args.device, args.set)
        cfg = model[1]
    else:
        model, cfg = None, load_config(args.config or DEFAULTS, [*args.set, f"model.dims={args.dims}"])
    WORKER.update(args=args, model=model, cfg=cfg)


def register_pair(pair, folder, earlier):
    """Register one pair, write its files into `folder`, and return its row of the results."""
    args, model, cfg = WORKER["args"], WORKER["model"], WORKER["cfg"]
    dims, out = cfg["model.dims"], args.home
    points_mm = read_points(pair["points"]) if "points" in pair else None, None
    if "moving_points" in pair and "points" not in pair:
        raise InputError(f"{pair['moving_points']}: landmarks of the moving volume score nothing alone; give those of "
                         "the fixed volume too (points).")
    if "moving_points" in pair:  # reports unequal numbers before the work
        points_mm = read_point_pairs(pair["points"], pair["moving_points"])
        point_scores(*points_mm, pair, None, None)
    require_like_channels(pair)
    require_apart(output_files(folder), inputs=inputs_of(pair, args))
    for path in (pair["fixed"], pair["moving"]) if is_list(args) else ():
        if (found := dims_of(path)) != dims:
            raise InputError(f"{path}: {found}D, but a list has one number of axes, here {dims}, that of the network, "
                             f"of --dims or of its first volume; put the pairs of {found}D volumes into another list.")
    disp = Path(args.out) / disp_name(pair, dims) if args.learn2reg else None
    labels = [read_own_label(pair, side, dims, args) for side in ("fixed", "moving")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the row, and printed from there
        result = register_from(args.initial, pair["fixed"], pair["moving"], args.start, args.inverse, dims, model=model,
                               affine=args.affine or False, refine=args.refine, device=args.device, config=cfg,
                               progress=args.workers == 1, similarity=args.similarity,
                               fixed_mask=pair.get("fixed_mask"), moving_mask=pair.get("moving_mask"),
                               fixed_channels=channels_of(pair, "fixed"), moving_channels=channels_of(pair, "moving"))
    if args.initial:
        print(f"{args.initial}: {meaning(args.initial)}", file=sys.stderr)
    doubts = [doubt for side in ("fixed", "moving") for doubt in placement_doubts(pair[side], dims)]
    result = dataclasses.replace(result, warnings=[*doubts, *result.warnings])
    return write_row(folder, out, pair, result, labels, points_mm, disp, args.also, args.labels, not args.no_picture,
                     earlier)


def inputs_of(pair, args):
    """The paths of all files that a pair is registered from."""
    return [pair[key] for key in TO_REGISTER if key in pair] + [args.initial] * bool(args.initial)


def read_own_label(pair, side, dims, args):
    """The label map of one side of a pair, "fixed" or "moving", on the grid of its image; None if it has none.

    Raises InputError if it lies on another grid without --resample-labels, or outside the image.
    """
    if f"{side}_label" not in pair:
        return None
    path, image = pair[f"{side}_label"], pair[side]
    label, affine = read_label(path, dims)
    shape, image_affine = read_header(image, dims)
    grids = (shape, image_affine), (label.shape, affine)
    # Both ways, since it is counted on points: those of the image may lie around a small label.
    if not any(overlap_percent(*one, *other, np.eye(4)) for one, other in (grids, grids[::-1])):
        raise InputError(f"{path}: the label lies outside its image {image}; give the one that belongs to it.")
    if args.resample_labels:
        return label_on(label, affine, shape, image_affine, args.labels)
    require_same_grid(f"{path}: the label", label.shape, affine, f"its image {image}", shape, image_affine,
                      "--resample-labels resamples it to that grid")
    return label


# ---------------------------------------------------------------------------------------------------------------------
# Applying a field
# ---------------------------------------------------------------------------------------------------------------------

def apply_saved(args):
    """Apply a saved field to images, labels and landmarks; returns the exit code."""
    dims, out = args.dims or 3, Path(args.out)
    whole, affine = read_any_field(args.apply, dims, across=True)  # the points leave the plane, the images do not
    field = whole[:2, ..., 0] if dims == 2 else whole
    header = nibabel.Nifti1Header()
    if args.fixed:
        shape, fixed_affine = read_header(args.fixed, dims)
        require_same_grid(f"{args.apply}: the field", field.shape[1:], affine, args.fixed, shape, fixed_affine,
                          "give the field of this volume, or leave out --fixed")
        header = read_raw_header(args.fixed)
    points_mm = read_points(args.points) if args.points else None
    moved = []  # (target, source, array, its affine, interpolation); everything is read before anything is written
    for word, paths, read, mode in (("warped", args.moving, read_numbers, "bilinear"),
                                    ("warped_label", args.moving_label, read_label, args.labels)):
        for path in paths:
            for doubt in placement_doubts(path, dims):
                print(f"warning: {doubt}", file=sys.stderr)
            name = f"{word}_{volume_id(Path(path))}" if len(paths) > 1 else word
            moved.append((out / f"{name}.nii.gz", path, *read(path, dims), mode))
    targets = [target for target, *_ in moved] + (point_files(out, args.points) if args.points else [])
    if twice := first_repeated(targets):
        raise InputError(f"{twice.name}: two of the files would get this name; apply the field to one at a time, each "
                         "with an --out of its own.")
    wanted = [args.apply, args.fixed, args.points, *args.moving, *args.moving_label, *listed_files(out),
              *listed_files(out.parent)]
    own = written_before(out)
    require_apart([*targets, out / APPLIED], lambda path: path.name in own, wanted)
    own.update(target.name for target in targets)
    describe_field(args.apply, field, affine, [entry[1:4] for entry in moved])
    make_folder(out)
    with run_lock.held_results(out):
        # First, so that after a kill they are still ours.
        write_file(out / APPLIED, json.dumps({"files": sorted(own - {APPLIED})}) + "\n")
        try:
            for target in targets:
                target.unlink(missing_ok=True)  # a kill must not leave a new image beside an old label
            for target, path, array, own_affine, mode in moved:
                warped = carry(array, own_affine, field, affine, mode)
                if warped.min() == warped.max() and array.min() < array.max():
                    print(f"warning: {args.apply}: the field shows nothing of {path}; check that the two belong "
                          "together", file=sys.stderr)
                write_warped(target, warped, path, affine, header)
            if points_mm is not None:
                write_points(out, args.points, moved_points(points_mm, whole, affine))
        finally:
            if not any((out / name).exists() for name in own - {APPLIED}):
                (out / APPLIED).unlink()
    print(json.dumps({"images": len(args.moving), "labels": len(args.moving_label),
                      "points": 0 if points_mm is None else len(points_mm), "out": str(out)}))
    return DONE


def written_before(out):
    """The names of the files that --apply has written into a folder, its record there included: a set."""
    try:
        return {APPLIED, *json.loads((out / APPLIED).read_bytes())["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def describe_field(path, field, affine, moved):
    """Print how the numbers of a field are understood, and warn if the field is implausible.

    field: (N, *fixed) in voxels. affine: its 4x4. moved: (source, array, affine) of each volume.
    """
    print(f"{path}: {meaning(path)}", file=sys.stderr)
    folded = folding_percent(torch.from_numpy(field)[None])
    if folded > FOLDED:
        print(f"warning: {path}: the field folds in {folded:.0f} % of the voxels; check that its numbers are "
              "displacements in this unit", file=sys.stderr)
    for source, array, own in moved:
        inside = apply_field(np.ones(array.shape, np.uint8), own, field, affine, order=0)
        if inside.mean() < 1 - OUTSIDE / 100:
            print(f"warning: {path}: the field leads out of {source} from {100 * (1 - inside.mean()):.0f} % of the "
                  "voxels; check that the two belong together", file=sys.stderr)
