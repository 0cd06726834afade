"""Register one pair of volumes or a list of pairs, or apply a saved field to further images and landmarks.

    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --out Results/pair
    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --model Models/RUN --out Results/pair
    python OM_register.py --pairs pairs.json --out Results/run
    python OM_register.py --fixed F.nrrd --moving M.mgz --initial A.mat --also h5 --out Results/b
    python OM_register.py --apply Results/pair/field.nii.gz --moving OTHER.nii.gz --out Results/other

Without options a pair is aligned by an affine map and then refined, without a network, as `omnimorph.register` does it.
Volumes may have any size, spacing and orientation, the two of a pair different ones; they are NIfTI files, .mgz, .nrrd
or .mha (Dataloader/nifti.py). Written are, for each pair:
warped.nii.gz and warped_label.nii.gz (on the fixed grid), field.nii.gz (mm, for ITK, ANTs, Slicer and --apply),
jacobian.nii.gz (determinant; <= 0 where it folds) and picture.png; for all of them report.html, results.csv and
results.json. The last line on the terminal is one line of JSON with the means. Exit codes: 0 done, 43 bad input, also
where only some pairs of a list are bad: the others are done.
"""
from Runtime import __version__  # first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import nibabel
import numpy as np
from tqdm import tqdm

from Dataloader.datalist import MOST_CHANNELS, volume_id
from Dataloader.grids import require_same_grid
from Dataloader.nifti import open_nifti, read_header, read_label, read_points, read_raw_header, read_volume
from Dataloader.transforms import read_any_field
from Dataloader.volume import axes
from Inference.initial import register_from
from Inference.labels import LABELS, apply_field, apply_label
from Inference.load_model import DEFAULTS, load_model
from Inference.outputs import ALSO, disp_name, write_pair, write_points, write_warped
from Inference.pair_figures import means, pair_figure, read_pair, write_pair_page, write_report
from Inference.pair_lists import CHANNELS, TO_REGISTER, channels_of, read_pairs_to_register
from Inference.refine import STEPS
from Inference.registration import AFFINES, SIMILARITIES, STARTS, overlap_percent
from Inference.results import (
    file_digests,
    kept_rows,
    output_files,
    read_results,
    remove_outputs,
    require_apart,
    source_digests,
    write_results,
)
from Inference.scores import COLUMNS, label_scores, point_scores, said_of_labels
from Inference.verdict import judge, judge_list
from Runtime import checkpoint, run_lock
from Runtime.config import load_config
from Runtime.device import describe, pick_device, prepare_device
from Runtime.errors import DONE, STOP, InputError, attempt, parse_options
from Runtime.files import sha256, write_file
from Runtime.page import figure_png

# Beside COLUMNS; what `judge` looks at is among them.
ROW = ("overlap_percent", "covered_percent", "body_overlap", "folding_body_percent", "inverse_error_max_mm",
       "scale_least", "scale_most", "turn_degrees", "shear_degrees", "mirrors", "segmentations", "compared_by",
       "warnings", "start")
STALE_S = 3600.0  # a lock of another machine that nobody has touched for so long belongs to a dead process


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for
# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Register volumes of any size, spacing and orientation, or apply a "
                                     "field to further images, labels and landmarks.")
    parser.add_argument("--version", action="version", version=f"omnimorph {__version__}")
    parser.add_argument("--fixed", help="volume that stays; with --apply: whose grid the field has to be on")
    parser.add_argument("--moving", nargs="+", default=[], help="volume that is deformed; with --apply several may be")
    parser.add_argument("--fixed-label", help="its label image, to score the registration")
    parser.add_argument("--moving-label", nargs="+", default=[], help="label image to carry over")
    parser.add_argument("--fixed-mask", help="image on the grid of the fixed volume: only where it is above 0 do "
                        "alignment, refinement and similarity look")
    parser.add_argument("--moving-mask", help="the same for the moving volume, on its own grid")
    parser.add_argument("--fixed-channels", nargs="+", default=[], metavar="FILE", help="further channels of the fixed "
                        "volume, on its grid: refinement and similarity compare them too")
    parser.add_argument("--moving-channels", nargs="+", default=[], metavar="FILE", help="those of the moving volume, "
                        "in the same order; they are warped along")
    parser.add_argument("--points", help="CSV of landmarks of the fixed volume: x,y,z in mm, RAS; they are moved into "
                        "the moving volume")
    parser.add_argument("--moving-points", help="the same landmarks in the moving volume, to score the registration")
    parser.add_argument("--pairs", metavar="JSON", help="list of objects with fixed, moving, fixed_label, "
                        "moving_label, fixed_mask, moving_mask, fixed_channel_2, ..., points, name, or Learn2Reg's; "
                        "paths are relative to it")
    parser.add_argument("--list", metavar="KEY", help="which list of that file, such as registration_val")
    parser.add_argument("--apply", metavar="FIELD", help="apply this field instead of looking for one")
    parser.add_argument("--model", default="none", metavar="FILE", help="begin with a network's answer: "
                        "checkpoint, .safetensors file or run folder; universal, the bundled network for any volumes "
                        "(%(default)s)")
    parser.add_argument("--affine", nargs="?", const="affine", choices=(*AFFINES, "none"),
                        help="align by this first (affine; with --initial none)")
    parser.add_argument("--refine", type=int, nargs="?", const=STEPS, metavar="N",
                        help=f"optimise the field for each pair, in N steps ({STEPS}; 0 for none)")
    parser.add_argument("--similarity", choices=SIMILARITIES, help="by what alignment and refinement compare: "
                        "correlation; for two modalities, such as T1 and T2, mapped or mind (as in the config: "
                        "correlation, where the model was not trained with another)")
    parser.add_argument("--start", choices=STARTS, default="auto", help="where the moving volume begins: as the "
                        "headers say, with the centres of the fields of view on each other, or the more similar of "
                        "the two (%(default)s)")
    parser.add_argument("--initial", metavar="FILE", help="begin from this instead: a matrix of ITK or ANTs (.mat, "
                        ".txt, .tfm), FSL (.mat) or FreeSurfer (.lta), or a field, fixed to moving (.nii.gz, .h5)")
    parser.add_argument("--also", nargs="+", default=[], choices=ALSO, help="for other programs too: h5 (the field as "
                        "a transform), mat (the alignment before it), or the warped volumes as nrrd, mha, mgz")
    parser.add_argument("--labels", choices=LABELS, default="smooth", help="how labels are carried: smooth (each "
                        "one smoothed slightly and sampled linearly, the largest wins) or nearest, the label of the "
                        "nearest voxel (%(default)s)")
    parser.add_argument("--inverse", action="store_true", help="write inverse_field.nii.gz too, on the moving grid")
    parser.add_argument("--learn2reg", action="store_true", help="write disp_<fixed>_<moving>.nii.gz too")
    parser.add_argument("--strict", action="store_true", help="exit with 43 where the verdict on a pair is failed")
    parser.add_argument("--no-picture", action="store_true", help="no picture.png for each pair, nor the pages of the "
                        "pairs of a list")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="axes of the volumes where there is no model (those "
                        "of the first fixed volume)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    parser.add_argument("--config", help="config file of refine.* and data.* where there is no model "
                        "(Config/config_om.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    return parse_options(parser, argv)


def check_arguments(args):
    """Raise InputError for options that do not fit together, before anything is read; fill in what is not named."""
    also_seen = args.fixed_mask or args.moving_mask or args.fixed_channels or args.moving_channels
    one = bool(args.fixed or args.moving or args.fixed_label or args.moving_label or args.points or also_seen)
    if args.apply:
        if any((args.pairs, args.model != "none", args.affine, args.refine, args.initial, args.also, args.similarity,
                also_seen)):
            raise InputError("--apply takes a field that is there: leave out --pairs, --model, --affine, --refine, "
                             "--initial, --also, --similarity, masks and channels.")
        if not (args.moving or args.moving_label or args.points):
            raise InputError("--apply needs something to move: --moving, --moving-label or --points.")
        return
    if bool(args.pairs) == one:
        raise InputError("give either --pairs or the files of one pair, --fixed and --moving.")
    if one and not (args.fixed and len(args.moving) == 1 and len(args.moving_label) <= 1):
        raise InputError("a pair is one --fixed and one --moving, with one --moving-label at most.")
    if max(len(args.fixed_channels), len(args.moving_channels)) >= MOST_CHANNELS:
        raise InputError(f"a volume has at most {MOST_CHANNELS} channels, the first one included; leave some out.")
    if args.initial and (args.pairs or args.start != "auto"):
        raise InputError("--initial says where one pair begins: leave out --pairs and --start.")
    args.affine = args.affine or ("none" if args.initial else "affine")
    args.affine = None if args.affine == "none" else args.affine
    args.refine = STEPS if args.refine is None else args.refine
    if args.model == "none" and not (args.refine or args.affine):
        raise InputError("--affine none and --refine 0 without a --model: nothing would be registered; leave one out.")
    if args.model != "none" and (args.config or args.dims):
        raise InputError("--config and --dims are for --model none: a model brings its own config.")
    if args.refine < 0:
        raise InputError(f"--refine {args.refine}: a number of steps is 0 or more.")


def asked_pairs(args):
    """The pairs that the command line asks for, those of a list or one, as `read_pairs_to_register` gives them."""
    if args.pairs:
        return read_pairs_to_register(args.pairs, args.list)
    files = {"fixed": args.fixed, "moving": args.moving[0], "fixed_label": args.fixed_label,
             "moving_label": args.moving_label[0] if args.moving_label else None, "fixed_mask": args.fixed_mask,
             "moving_mask": args.moving_mask, "points": args.points, "moving_points": args.moving_points,
             **dict(zip(CHANNELS["fixed"], args.fixed_channels)), **dict(zip(CHANNELS["moving"], args.moving_channels))}
    name = f"{volume_id(files['moving'])} to {volume_id(files['fixed'])}"
    return [{"name": name, **{key: Path(path) for key, path in files.items() if path}}]


def asked_model(args, pairs):
    """The model or None, the config, and all settings on which the results depend, as plain JSON."""
    if args.model == "none":
        dims = args.dims or dims_of(pairs)
        model, cfg = None, load_config(args.config or DEFAULTS, [*args.set, f"model.dims={dims}"])
        weights = None
    else:
        model = load_model(args.model, args.device, args.set)
        cfg = model[1]
        weights = checkpoint.weights_sha256(model[0].state_dict())
    asked = {key: getattr(args, key) for key in ("affine", "refine", "similarity", "start", "labels", "inverse",
                                                 "learn2reg", "no_picture", "also")}
    initial = sha256(args.initial) if args.initial and Path(args.initial).is_file() else None
    settings = {"weights": weights, "initial": initial, **asked, "config": cfg}
    return model, cfg, json.loads(json.dumps(settings))


def dims_of(pairs):
    """The number of axes of the first fixed volume that can be opened, else 3."""
    for pair in pairs:
        found = attempt(pair["fixed"], lambda path: axes(path, open_nifti(path).shape), pair["fixed"])
        if not isinstance(found, str):
            return found
    return 3


def how_registered(args):
    """How the pairs are registered, for the top of the page."""
    steps = [f"model {args.model}"]
    if args.affine:
        steps.append(f"{args.affine} alignment")
    if args.refine:
        steps.append(f"{args.refine} steps of refinement")
    if args.similarity:
        steps.append(f"compared by {args.similarity}")
    return ", ".join([*steps, f"start by {args.initial or args.start}"])


# ---------------------------------------------------------------------------------------------------------------------
# Registering
# ---------------------------------------------------------------------------------------------------------------------

def register_all(args):
    """Register one pair or a list; returns the exit code. A pair of a list that cannot be done does not end it."""
    out, args.device = Path(args.out), pick_device(args.device)
    prepare_device(args.device, 0)
    pairs = asked_pairs(args)
    model, cfg, settings = asked_model(args, pairs)
    make_folder(out)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        rows, failed = register_each(pairs, model, cfg, settings, args, out)
        rows = judge_list(rows)
        if rows:
            page = write_report(out, rows, failed, how_registered(args), cfg["model.dims"])
            print(f"\nreport: {page.resolve()}")
            print(json.dumps(means(rows, failed)))
        write_results(out, rows, failed, settings, complete=True)
    finally:
        run_lock.unlock(out, token)
    for entry in failed:
        print(f"error: {entry['name']}: {entry['reason']}" if args.pairs else f"error: {entry['reason']}",
              file=sys.stderr)
    for row in rows:
        if row["verdict"] != "ok":
            kind = "error" if args.strict and row["verdict"] == "failed" else "warning"
            print(f"{kind}: {row['name']}: {row['verdict']}, {row['reason']}", file=sys.stderr)
    hopeless = args.strict and any(row["verdict"] == "failed" for row in rows)
    return STOP if failed or hopeless else DONE


def register_each(pairs, model, cfg, settings, args, out):
    """Register all pairs that an interrupted run has not done. Returns: rows and failed pairs, in their order."""
    earlier = read_results(out)
    kept = kept_rows(earlier, settings, pairs, out)
    if kept:
        print(f"{out}: {len(kept)} of {len(pairs)} pairs are whole from a run that was interrupted, and are kept",
              file=sys.stderr)
    rows, failed = [], []
    # Rows of pairs that are about to be replaced go before their files do.
    write_results(out, list(kept.values()), failed, settings, complete=False)
    (out / "report.html").unlink(missing_ok=True)
    print(f"device: {describe(args.device)}", file=sys.stderr)
    with tqdm(pairs, "registering", unit="pair", disable=not args.pairs) as bar:
        for pair in bar:
            name = pair["name"]
            folder = out / name if args.pairs else out
            row = kept.pop(name, None)
            if row is None:
                row = attempt(f"{pair['fixed']} and {pair['moving']}", register_pair, pair, model, cfg, args, folder,
                              earlier["pairs"].get(name))
            if isinstance(row, str):
                failed.append({"name": name, "reason": row})
            else:
                rows.append(row)
                for sentence in row["warnings"]:
                    tqdm.write(f"warning: {sentence}", file=sys.stderr)
            run_lock.touch(out)
            write_results(out, rows + list(kept.values()), failed, settings, complete=False)
    return rows, failed


def register_pair(pair, model, cfg, args, folder, earlier=None):
    """Register one pair, write what that gives into `folder`, and return its row of the results.

    earlier: the row of an earlier registration of this pair, whose files are removed before the first new one.
    """
    dims, out = cfg["model.dims"], Path(args.out)
    require_apart(folder, [pair[key] for key in TO_REGISTER if key in pair])
    disp = out / disp_name(pair, dims) if args.learn2reg else None
    points_mm = read_points(pair["points"]) if "points" in pair else None
    fixed_label = read_own_label(pair, "fixed", dims)
    moving_label = read_own_label(pair, "moving", dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the row, and printed from there
        result = register_from(args.initial, pair["fixed"], pair["moving"], args.start, args.inverse, dims, model=model,
                               affine=args.affine or False, refine=args.refine, device=args.device, config=cfg,
                               progress=True, similarity=args.similarity, fixed_mask=pair.get("fixed_mask"),
                               moving_mask=pair.get("moving_mask"), fixed_channels=channels_of(pair, "fixed"),
                               moving_channels=channels_of(pair, "moving"))
    warped_label = warp_label(moving_label, result, result.field, args.labels)
    row = {"name": pair["name"], **{key: os.path.abspath(pair[key]) for key in TO_REGISTER if key in pair},
           "folder": str(folder), **scores_of(result), "matrix": result.matrix.tolist(),
           **carried_scores(moving_label, warped_label, fixed_label, result, args.labels)}
    if points_mm is not None and "moving_points" in pair:
        row.update(point_scores(points_mm, read_points(pair["moving_points"]), pair, result.field, result.fixed.affine))
    row["verdict"], row["reason"] = judge(row)
    row["warnings"] = [*row["warnings"], *said_of_labels(row)]
    if moving_label is not None and moving_label.any() and not warped_label.any():
        row["warnings"] = [*row["warnings"], f"no voxel of {pair['moving_label']} came to lie in the fixed volume."]
    make_folder(folder)
    remove_outputs(folder, out, earlier)
    write_pair(folder, pair, result, warped_label, points_mm, disp, args.also)
    if not args.no_picture:
        shown = read_pair(row, dims)
        write_file(folder / "picture.png", figure_png(pair_figure(shown)))
        if args.pairs:
            write_pair_page(folder, row, shown)
    return {**row, "source": source_digests(pair), "files": file_digests(output_files(folder, disp), out)}


def read_own_label(pair, side, dims):
    """The label map of one side of a pair, (D, H, W) int16 on its image's grid, or None where there is none.

    side: "fixed" or "moving". Raises InputError naming the file where the label is on another grid than its image.
    """
    if f"{side}_label" not in pair:
        return None
    path, image = pair[f"{side}_label"], pair[side]
    label, affine = read_label(path, dims)
    shape, image_affine = read_header(image, dims)
    if overlap_percent(shape, image_affine, label.shape, affine, np.eye(4)) == 0:
        raise InputError(f"{path}: the label lies outside its image {image}; give the one that belongs to it.")
    require_same_grid(f"{path}: the label", label.shape, affine, f"its image {image}", shape, image_affine,
                      "resample it to the image")
    return label


def scores_of(result):
    """The part of the row that the registration itself gives."""
    found = {key: getattr(result, key, None) for key in (*COLUMNS, *ROW)}
    return {**{key: value for key, value in found.items() if value is not None}, "seconds": result.seconds["total"],
            "seconds_of": result.seconds}


def warp_label(moving_label, result, field, labels):
    """The moving label map as a field shows it, (*fixed), or None where there is none.

    result: of `register`. labels: how it is carried, a word of --labels.
    """
    if moving_label is None:
        return None
    return apply_label(moving_label, result.moving.affine, field, result.fixed.affine, labels)


def carried_scores(moving_label, warped_label, fixed_label, result, carried):
    """Dice of each label as the headers place the volumes and after the registration: this part of the row.

    moving_label, warped_label, fixed_label: label maps or None. result: of `register`. carried: a word of --labels.
    """
    if moving_label is None or fixed_label is None or not fixed_label.any():
        return {"labels": {}}
    by_header = warp_label(moving_label, result, np.zeros_like(result.field), carried)
    return label_scores({"_before": by_header, "": warped_label}, fixed_label)


# ---------------------------------------------------------------------------------------------------------------------
# Applying a field
# ---------------------------------------------------------------------------------------------------------------------

def apply_saved(args):
    """Apply a saved field to images, labels and landmarks; returns the exit code."""
    dims, out = args.dims or 3, Path(args.out)
    given = (args.apply, args.fixed, args.points, *args.moving, *args.moving_label)
    require_apart(out, [path for path in given if path])
    field, affine = read_any_field(args.apply, dims)
    header = fixed_header(args, field, affine, dims)
    points_mm = read_points(args.points) if args.points else None
    # Everything is read before anything is written: (target, source, array, its affine).
    images = [(out / warped_name("warped", path, args.moving), path, *read_volume(path, dims))
              for path in args.moving]
    label_maps = [(out / warped_name("warped_label", path, args.moving_label), path, *read_label(path, dims))
                  for path in args.moving_label]
    make_folder(out)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        for target, *_ in images + label_maps:
            target.unlink(missing_ok=True)  # a kill must not leave a new image beside an old label
        if args.points:
            (out / "points.csv").unlink(missing_ok=True)
        for target, path, array, own_affine in images:
            write_warped(target, apply_field(array, own_affine, field, affine), path, affine, header)
        for target, path, array, own_affine in label_maps:
            write_warped(target, apply_label(array, own_affine, field, affine, args.labels), path, affine, header)
        if points_mm is not None:
            write_points(out / "points.csv", points_mm, field, affine)
    finally:
        run_lock.unlock(out, token)
    print(json.dumps({"images": len(args.moving), "labels": len(args.moving_label),
                      "points": 0 if points_mm is None else len(points_mm), "out": str(out)}))
    return DONE


def fixed_header(args, field, affine, dims):
    """The NIfTI header for what is on the grid of the field: that of --fixed, or an empty one.

    field: (N, *spatial). affine: 4x4 of its grid. Raises InputError where --fixed is on another grid.
    """
    if not args.fixed:
        return nibabel.Nifti1Header()
    shape, fixed_affine = read_header(args.fixed, dims)
    require_same_grid(f"{args.apply}: the field", field.shape[1:], affine, args.fixed, shape, fixed_affine,
                      "give the field of this volume, or leave out --fixed")
    return read_raw_header(args.fixed)


def warped_name(word, path, paths):
    """The file name of a warped image or label; of several each has the name of its source in it."""
    return f"{word}_{volume_id(path)}.nii.gz" if len(paths) > 1 else f"{word}.nii.gz"


# ---------------------------------------------------------------------------------------------------------------------

def make_folder(path):
    """Make a folder of results. Raises InputError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: no folder can be made there ({error.strerror}); choose another --out.") from None


def run(args):
    """Do what the command line asks for. Returns the exit code."""
    check_arguments(args)
    return apply_saved(args) if args.apply else register_all(args)


def main(argv=None):
    args = parse_arguments(argv)
    try:
        code = attempt(args.out, run, args)
        if not isinstance(code, str):
            return code
        print(f"error: {code}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror or error}; results cannot be written there.",
              file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: run the same command again, it goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return STOP


if __name__ == "__main__":
    sys.exit(main())
