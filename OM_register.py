"""Register volumes: one pair, a list of pairs, or further images and landmarks by a field that is there already.

    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --model Models/RUN --out Results/pair
    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --model none --affine --refine --out Results/pair
    python OM_register.py --pairs pairs.json --model Models/RUN --refine --out Results/run
    python OM_register.py --apply Results/pair/field.nii.gz --moving OTHER.nii.gz --out Results/other

Volumes may have any size, spacing and orientation, and two grids. Into the folder go, for each pair: warped.nii.gz and
warped_label.nii.gz (on the fixed grid), field.nii.gz (millimetres, for ITK, ANTs, Slicer and --apply), jacobian.nii.gz
(determinant; <= 0 where it folds) and picture.png; for all of them report.html, results.csv and results.json. The last
line on the terminal is one line of JSON with the means. Exit codes: 0 done, 43 bad input; of a list whose other pairs
are done, too.
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import json
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import nibabel
import numpy as np
import torch
from tqdm import tqdm

from Dataloader.datalist import PAIR_KEYS, volume_id
from Dataloader.grids import SAME_GRID, corners_apart
from Dataloader.nifti import (
    move_points,
    open_nifti,
    read_field,
    read_header,
    read_label,
    read_points,
    read_raw_header,
    read_volume,
    write_field,
    write_field_learn2reg,
    write_volume,
)
from Diffusion.fields import jacobian_determinant
from Diffusion.metrics import average, dice
from Inference.load_model import DEFAULTS, load_model
from Inference.pair_figures import COLUMNS, means, pair_figures, write_report
from Inference.refine import STEPS
from Inference.registration import AFFINES, STARTS, apply_field, overlap_percent, register
from Inference.results import (
    file_digests,
    kept_rows,
    output_files,
    read_results,
    remove_outputs,
    source_digests,
    write_results,
)
from Runtime import checkpoint, run_lock
from Runtime.config import load_config
from Runtime.device import describe, pick_device, prepare_device
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.files import write_file
from Runtime.report import figure_png

OUTPUTS = r"(warped.*|field|inverse_field|jacobian)\.nii(\.gz)?$|points\.csv$"
FILES = ("fixed", "moving", "fixed_label", "moving_label", "points")
ROW = ("overlap_percent", "inverse_error_mm", "inverse_error_max_mm", "warnings", "start")  # beside COLUMNS
STALE_S = 3600.0  # a lock that has not been touched for so long, on another machine, is dead
LISTS = ("pairs", "registration_test", "registration_val", *PAIR_KEYS)  # of a JSON file, the first there is


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Register volumes of any size, spacing and orientation, or apply a "
                                     "field to further images, labels and landmarks.")
    parser.add_argument("--fixed", help="volume that stays; with --apply: whose grid the field has to be on")
    parser.add_argument("--moving", nargs="+", default=[], help="volume that is deformed; with --apply several may be")
    parser.add_argument("--fixed-label", help="its label image, to score the registration")
    parser.add_argument("--moving-label", nargs="+", default=[], help="label image to carry over")
    parser.add_argument("--points", help="CSV of landmarks of the fixed volume: x,y,z in mm, RAS; they are moved into "
                        "the moving volume")
    parser.add_argument("--pairs", metavar="JSON", help="list of objects with fixed, moving, fixed_label, "
                        "moving_label, points, name, or Learn2Reg's; paths are relative to it")
    parser.add_argument("--list", metavar="KEY", help="which list of that file, such as registration_val")
    parser.add_argument("--apply", metavar="FIELD", help="apply this field instead of looking for one")
    parser.add_argument("--model", metavar="FILE", help="checkpoint, .safetensors file or run folder; or none")
    parser.add_argument("--affine", nargs="?", const="affine", choices=AFFINES, help="align by this first")
    parser.add_argument("--refine", type=int, nargs="?", const=STEPS, default=0, metavar="N",
                        help=f"optimise the field for each pair, in N steps ({STEPS} where no number is given)")
    parser.add_argument("--start", choices=STARTS, default="auto", help="where the moving volume begins: as the "
                        "headers say, with the centres of the fields of view on each other, or the more similar of "
                        "the two (%(default)s)")
    parser.add_argument("--inverse", action="store_true", help="write inverse_field.nii.gz too, on the moving grid")
    parser.add_argument("--learn2reg", action="store_true", help="write disp_<fixed>_<moving>.nii.gz too")
    parser.add_argument("--no-picture", action="store_true", help="no picture.png for each pair")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="axes of the volumes where there is no model (3)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    parser.add_argument("--config", help="config file of refine.* and data.* where there is no model "
                        "(Config/config_om.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    return parser.parse_args(argv)


def check_arguments(args):
    """Whatever is asked for must fit together, before anything is read."""
    one = bool(args.fixed or args.moving or args.fixed_label or args.moving_label or args.points)
    if args.apply:
        if args.pairs or args.model or args.affine or args.refine:
            raise InputError("--apply takes a field that is there: leave out --pairs, --model, --affine and --refine.")
        if not (args.moving or args.moving_label or args.points):
            raise InputError("--apply needs something to move: --moving, --moving-label or --points.")
        return
    if bool(args.pairs) == one:
        raise InputError("give either --pairs or the files of one pair, --fixed and --moving.")
    if one and not (args.fixed and len(args.moving) == 1 and len(args.moving_label) <= 1):
        raise InputError("a pair is one --fixed and one --moving, with one --moving-label at most.")
    if not args.model:
        raise InputError("--model is missing: give a checkpoint, a run's folder, or none.")
    if args.model == "none" and not (args.refine or args.affine):
        raise InputError("--model none needs --refine, --affine or both: otherwise nothing is registered.")
    if args.model != "none" and (args.config or args.dims):
        raise InputError("--config and --dims are for --model none: a model brings its own config.")
    if args.refine < 0:
        raise InputError(f"--refine {args.refine}: a number of steps is 0 or more.")


def read_list(path, key=None):
    """The pairs of a JSON list, with whole paths and a name each.

    key: which list, where the file has several. Learn2Reg's entries have no labels: those that its list "training"
    names for the same images are taken, and those of the same name in a labelsTr or labelsTs beside the images.
    Raises InputError naming the file for a list that cannot be read, unknown keys and names that come twice.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: no such list of pairs ({error.strerror}); check the path.") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); correct the file.") from error
    entries, training = content, []
    if isinstance(content, dict):
        key = key or next((name for name in LISTS if content.get(name)), "pairs")
        entries, training = content.get(key), content.get("training", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: no list of pairs{f' under {key}' if key else ''}; write objects with fixed and "
                         "moving.")
    # A list of channels is no volume of a pair.
    labels = {path.parent / entry["image"]: path.parent / entry["label"] for entry in training
              if isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("image", "label"))}
    pairs = [_listed(path, number, entry, labels) for number, entry in enumerate(entries, 1)]
    names = [pair["name"] for pair in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"{path}: two pairs are called {twice}; give each a name of its own.")
    return pairs


def _listed(path, number, entry, labels):
    for key, value in entry.items():
        if key not in (*FILES, "name"):
            raise InputError(f"{path}: pair {number} has the unknown key {key}; the keys are {', '.join(FILES)} and "
                             "name.")
        if not isinstance(value, str | None) and key != "name":
            raise InputError(f"{path}: pair {number}: {key} is {value!r}, not a path; correct it.")
    if not entry.get("fixed") or not entry.get("moving"):
        raise InputError(f"{path}: pair {number} has no fixed or no moving volume; give both.")
    pair = {key: path.parent / entry[key] for key in FILES if entry.get(key)}
    for side in ("fixed", "moving"):
        image = pair[side]
        beside = [image.parent.parent / image.parent.name.replace("images", "labels") / image.name] \
            if image.parent.name.startswith("images") else []
        found = next((file for file in [labels.get(image), *beside] if file and file.is_file()), None)
        if found and f"{side}_label" not in entry:
            pair[f"{side}_label"] = found
    name = str(entry.get("name") or f"{volume_id(pair['moving'])}_to_{volume_id(pair['fixed'])}")
    if "/" in name or name.startswith("."):
        raise InputError(f"{path}: pair {number}: the name {name} is that of its folder; leave out slashes and a "
                         "leading dot.")
    return {"name": name, **pair}


def label_of(pair, side, dims):
    """The label image of one side of a pair, on its image's grid, or None."""
    path, image = pair.get(f"{side}_label"), pair[side]
    if not path:
        return None
    label, affine = read_label(path, dims)
    shape, image_affine = read_header(image, dims)
    if overlap_percent(shape, image_affine, label.shape, affine, np.eye(4)) == 0:
        raise InputError(f"{path}: the label lies outside its image {image}; give the one that belongs to it.")
    if label.shape != shape or corners_apart(shape, image_affine, affine) > SAME_GRID:
        raise InputError(f"{path}: the label is on another grid than its image {image} (shapes {label.shape} and "
                         f"{shape}); resample it to the image.")
    return label


def disp_name(pair, dims):
    """The name of a field in a Learn2Reg submission: the numbers of fixed and moving, of four digits."""
    (shape, affine), (moving_shape, moving_affine) = (read_header(pair[side], dims) for side in ("fixed", "moving"))
    if shape != moving_shape or corners_apart(shape, affine, moving_affine) > SAME_GRID:
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg needs both on one grid, as its data sets "
                         "have them; leave it out.")
    numbers = [re.findall(r"\d+", volume_id(pair[side])) for side in ("fixed", "moving")]
    if not all(numbers):
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg names fields by the numbers in the files' "
                         "names, and there is none; rename them, such as case_0001.nii.gz.")
    return "disp_{:04d}_{:04d}.nii.gz".format(*(int(found[-1]) for found in numbers))


def write_moved(path, image, source, fixed_header, affine):
    """Write a warped image on the fixed grid, in the moving file's type where that is of whole numbers."""
    stored = open_nifti(source).dataobj
    kind = np.dtype(stored.dtype)
    if kind.kind in "iu" and (stored.slope, stored.inter) == (1, 0):  # else its numbers are scaled ones
        limits = np.iinfo(kind)
        image = np.clip(np.rint(image.astype(np.float64)), limits.min, limits.max).astype(kind)
    fixed_header = nibabel.Nifti1Header.from_header(fixed_header)
    fixed_header["cal_min"] = fixed_header["cal_max"] = 0  # the display range was that of the fixed volume
    write_volume(path, image, affine, fixed_header)


def write_points(path, points_mm, field, affine):
    """Landmarks of the fixed volume, moved into the moving one, as x,y,z in mm, RAS."""
    if len(field) == 2:  # one plane of a 3D field
        field = np.concatenate([field, np.zeros_like(field[:1])])[..., None]
    moved = move_points(points_mm, field, affine)
    write_file(path, ("x,y,z\n" + "".join("{:.6f},{:.6f},{:.6f}\n".format(*point) for point in moved)).encode())


def register_pair(pair, model, cfg, args, folder, earlier=None):
    """Register one pair, write what it gives into `folder`, and return its row of the results.

    earlier: the row of an earlier registration of this pair, whose files are removed before the first new one.
    """
    dims = cfg["model.dims"]
    require_apart(folder, [pair[key] for key in FILES if key in pair])
    name = disp_name(pair, dims) if args.learn2reg else None
    points = read_points(pair["points"]) if "points" in pair else None
    labels = {side: label_of(pair, side, dims) for side in ("fixed", "moving")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the row, and printed from there
        found = register(pair["fixed"], pair["moving"], model, args.affine or False, args.refine, args.start,
                         args.device, args.inverse, cfg, progress=True)
    row = {"name": pair["name"], **{key: os.path.abspath(pair[key]) for key in FILES if key in pair},
           "folder": str(folder), **{key: found[key] for key in (*COLUMNS, *ROW) if key in found},
           "seconds": found["seconds"]["total"], "seconds_of": found["seconds"], "matrix": found["matrix"].tolist()}
    make_folder(folder)
    out, header = Path(args.out), read_raw_header(pair["fixed"])
    disp = out / name if name else None
    remove_outputs(folder, out, earlier)
    row.update(carry_labels(pair, labels, found, folder, header))
    write_pair(pair, found, points, folder, disp, header)
    if not args.no_picture:
        write_file(folder / "picture.png", figure_png(pair_figures(row, dims)[0]))
    return {**row, "source": source_digests(pair), "files": file_digests(output_files(folder, disp), out)}


def write_pair(pair, found, points, folder, disp, header):
    """Write the warped volume, the fields, the Jacobian map and the landmarks of one pair. disp: path or None."""
    (_, affine), (_, moving_affine), field = found["fixed"], found["moving"], found["field"]
    write_moved(folder / "warped.nii.gz", found["warped"], pair["moving"], header, affine)
    write_field(folder / "field.nii.gz", field, affine, header)
    determinant = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()
    write_volume(folder / "jacobian.nii.gz", determinant, affine, grid_header(header))
    if "inverse" in found:
        write_field(folder / "inverse_field.nii.gz", found["inverse"], moving_affine, read_raw_header(pair["moving"]))
    if disp:
        write_field_learn2reg(disp, field, affine)
    if points is not None:
        write_points(folder / "points.csv", points, field, affine)


def grid_header(header):
    """A header with nothing of another one but what places its grid: the codes of its affines and its units."""
    plain = nibabel.Nifti1Header()
    for key in ("qform_code", "sform_code", "xyzt_units"):
        plain[key] = header[key]
    return plain


def carry_labels(pair, labels, found, folder, header):
    """Write the warped label image; Dice before (as the headers place the volumes) and after, as part of the row."""
    part, (_, affine), (_, moving_affine) = {"labels": {}}, found["fixed"], found["moving"]
    if labels["moving"] is None:
        return part
    after = apply_field(labels["moving"], moving_affine, found["field"], affine, order=0)
    write_moved(folder / "warped_label.nii.gz", after, pair["moving_label"], header, affine)
    if labels["moving"].any() and not after.any():
        part["warnings"] = [*found["warnings"], f"no voxel of {pair['moving_label']} came to lie in the fixed volume."]
    values = [] if labels["fixed"] is None else sorted(set(np.unique(labels["fixed"]).tolist()) - {0})
    if values:
        before = apply_field(labels["moving"], moving_affine, np.zeros_like(found["field"]), affine, order=0)
        scores = [dice(image, labels["fixed"], values) for image in (before, after)]
        part.update(dice_before=average(scores[0]), dice=average(scores[1]))
        part["labels"] = {str(value): {"dice_before": first, "dice": second}
                          for value, first, second in zip(values, *scores)}
    return part


def read_model(args):
    """The model or None, the config, and all settings on which the results depend, as plain JSON."""
    if args.model == "none":
        model, cfg = None, load_config(args.config or DEFAULTS, [*args.set, f"model.dims={args.dims or 3}"])
    else:
        model = load_model(args.model, args.device, args.set)
        cfg = model[1]
    asked = {key: getattr(args, key) for key in ("affine", "refine", "start", "inverse", "learn2reg", "no_picture")}
    weights = model and checkpoint.weights_sha256(model[0].state_dict())
    return model, cfg, json.loads(json.dumps({"weights": weights, **asked, "config": cfg}))


def read_pairs(args):
    """The pairs that the command line asks for: those of a list, or one."""
    if args.pairs:
        return read_list(args.pairs, args.list)
    one = {"fixed": args.fixed, "moving": args.moving[0], "fixed_label": args.fixed_label,
           "moving_label": (args.moving_label or [None])[0], "points": args.points}
    return [{"name": f"{volume_id(one['moving'])} to {volume_id(one['fixed'])}",
             **{key: Path(path) for key, path in one.items() if path}}]


def register_all(args):
    """Register one pair or a list; returns the exit code. A pair of a list that cannot be done does not end it."""
    out, args.device = Path(args.out), pick_device(args.device)
    prepare_device(args.device, 0)
    (model, cfg, settings), pairs = read_model(args), read_pairs(args)
    make_folder(out)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        rows, failed = register_each(pairs, model, cfg, settings, args, out)
        if rows:
            page = write_report(out, rows, failed, how(args), cfg["model.dims"])
            print(f"\nreport: {page.resolve()}")
            print(json.dumps(means(rows, failed)))
        write_results(out, rows, failed, settings, complete=True)
    finally:
        run_lock.unlock(out, token)
    for entry in failed:
        print(f"error: {entry['name']}: {entry['reason']}" if args.pairs else f"error: {entry['reason']}",
              file=sys.stderr)
    return STOP if failed else DONE


def register_each(pairs, model, cfg, settings, args, out):
    """All pairs that an interrupted run has not done. Returns: rows and failed pairs of the results, in their order."""
    earlier = read_results(out)
    kept = kept_rows(earlier, settings, pairs, out)
    if kept:
        print(f"{out}: {len(kept)} of {len(pairs)} pairs are whole from a run that was interrupted, and are kept",
              file=sys.stderr)
    rows, failed = [], []
    # From here on no row stands for files that are about to be replaced.
    write_results(out, list(kept.values()), failed, settings, complete=False)
    (out / "report.html").unlink(missing_ok=True)
    print(f"device: {describe(args.device)}", file=sys.stderr)
    with tqdm(pairs, "registering", unit="pair", disable=not args.pairs) as bar:
        for pair in bar:
            name, folder = pair["name"], out / pair["name"] if args.pairs else out
            row = kept.pop(name, None) or attempt(f"{pair['fixed']} and {pair['moving']}", register_pair, pair, model,
                                                  cfg, args, folder, earlier["pairs"].get(name))
            if isinstance(row, str):
                failed.append({"name": name, "reason": row})
            else:
                rows.append(row)
                for sentence in row["warnings"]:
                    tqdm.write(f"warning: {sentence}", file=sys.stderr)
            run_lock.touch(out)
            write_results(out, rows + list(kept.values()), failed, settings, complete=False)
    return rows, failed


def how(args):
    """How the pairs were registered, for the top of the page."""
    return ", ".join(["model " + args.model, *[f"{args.affine} alignment"] * bool(args.affine),
                      *[f"{args.refine} steps of refinement"] * bool(args.refine), f"start by {args.start}"])


def apply_saved(args):
    """Apply a field that is there to images, labels and landmarks; returns the exit code."""
    dims, out = args.dims or 3, Path(args.out)
    given = (args.apply, args.fixed, args.points, *args.moving, *args.moving_label)
    require_apart(out, [path for path in given if path])
    field, affine = read_field(args.apply, dims)
    header = None
    if args.fixed:
        shape, fixed_affine = read_header(args.fixed, dims)
        header = read_raw_header(args.fixed)
        if field.shape[1:] != shape or corners_apart(shape, fixed_affine, affine) > SAME_GRID:
            raise InputError(f"{args.apply}: the field is on another grid than {args.fixed} (shapes {field.shape[1:]} "
                             f"and {shape}); give the field of this volume, or leave out --fixed.")
    header = header or nibabel.Nifti1Header()
    points = read_points(args.points) if args.points else None
    read = [(path, *read_volume(path, dims), 1) for path in args.moving]
    read += [(path, *read_label(path, dims), 0) for path in args.moving_label]
    make_folder(out)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        targets = [out / f"warped{'_label' * (not order)}{f'_{volume_id(path)}' * several(args, order)}.nii.gz"
                   for path, _, _, order in read]
        for old in [*targets, *[out / "points.csv"] * bool(args.points)]:
            old.unlink(missing_ok=True)  # a kill must not leave a new image beside an old label
        for target, (path, image, own_affine, order) in zip(targets, read):
            write_moved(target, apply_field(image, own_affine, field, affine, order), path, header, affine)
        if points is not None:
            write_points(out / "points.csv", points, field, affine)
    finally:
        run_lock.unlock(out, token)
    print(json.dumps({"images": len(args.moving), "labels": len(args.moving_label),
                      "points": 0 if points is None else len(points), "out": str(out)}))
    return DONE


def several(args, order):
    """Whether --apply has several images (order 1) or labels (order 0), whose results then need names of their own."""
    return len(args.moving if order else args.moving_label) > 1


def require_apart(folder, inputs):
    """No result may take the place of a file that is read."""
    for given in inputs:
        if Path(given).resolve().parent == folder.resolve() and re.match(OUTPUTS, Path(given).name):
            raise InputError(f"{given}: the result of that name would take its place; choose another --out.")


def make_folder(path):
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
