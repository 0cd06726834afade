"""Score registrations: how well labels and landmarks agree, and how regular the fields are.

    python OM_evaluate.py --pairs pairs.json --out Results/run
    python OM_evaluate.py --fixed-label F.nii.gz --moving-label M.nii.gz --field field.nii.gz --out Results/pair

pairs.json is a list of objects (or an object with such a list under "pairs") with the keys of the options below and,
if wanted, "name"; paths are relative to the list. A field is a file of ITK or ANTs (millimetres) or of Learn2Reg
(voxels), on the fixed grid. Whatever is not given is not scored. Writes scores.csv (a row for each pair and label),
scores.json and scores.html. Exit codes: 0 done, 43 bad input.
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from Dataloader.field_io import move_points, read_field, read_points
from Dataloader.volume_io import SAME_GRID, corners_apart, read_label
from Diffusion.metrics import average, dice, folding_percent, hd95, sdlogj, spread
from Diffusion.registration import apply_field
from Runtime.errors import DONE, STOP, InputError
from Runtime.report import cards_html, table_html, text_table, write_page

FILES = ("fixed_label", "moving_label", "field", "warped_label", "fixed_points", "moving_points")
COLUMNS = {"dice_before": ".3f", "dice": ".3f", "hd95_before_mm": ".2f", "hd95_mm": ".2f", "tre_before_mm": ".2f",
           "tre_mm": ".2f", "folding_percent": ".4f", "sdlogj": ".4f"}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Score registrations: Dice and HD95 for each label, landmark error, "
                                     "folding and SDlogJ of the fields.")
    parser.add_argument("--pairs", help="JSON list of pairs with the keys fixed_label, moving_label, field, ...")
    parser.add_argument("--fixed-label", help="label image of the fixed volume")
    parser.add_argument("--moving-label", help="label image of the moving volume, on any grid")
    parser.add_argument("--field", help="deformation field on the fixed grid")
    parser.add_argument("--warped-label", help="label image that has been warped already, on the fixed grid: instead "
                        "of --field or beside it")
    parser.add_argument("--fixed-points", help="CSV of landmarks of the fixed volume: x,y,z in mm, RAS")
    parser.add_argument("--moving-points", help="the same landmarks in the moving volume")
    parser.add_argument("--dims", type=int, default=3, choices=(2, 3), help="axes of the volumes (%(default)s)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the scores go")
    return parser.parse_args(argv)


def read_list(path):
    """The pairs of a JSON list, with whole paths."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such list of pairs; check the path.") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); correct the file.") from error
    content = content.get("pairs") if isinstance(content, dict) else content
    if not isinstance(content, list) or not content or not all(isinstance(pair, dict) for pair in content):
        raise InputError(f"{path}: no list of pairs; write objects with fixed_label, moving_label, field.")
    pairs = []
    for number, pair in enumerate(content, 1):
        unknown = [key for key in pair if key not in (*FILES, "name")]
        if unknown:
            raise InputError(f"{path}: pair {number} has the unknown key {unknown[0]}; the keys are {', '.join(FILES)} "
                             "and name.")
        pairs.append({"name": str(pair.get("name", f"pair {number}")),
                      **{key: str(path.parent / pair[key]) for key in FILES if pair.get(key)}})
    return pairs


def require_same_grid(path, fixed_path, shape, affine, fixed_shape, fixed_affine):
    if tuple(shape) != tuple(fixed_shape) or corners_apart(fixed_shape, fixed_affine, affine) > SAME_GRID:
        raise InputError(f"{path}: it is on another grid than {fixed_path} (shapes {tuple(shape)} and "
                         f"{tuple(fixed_shape)}); give the one of this pair.")


def score_labels(pair, field, grid, dims, scores):
    """Dice and HD95 of each label of the fixed image, before and after, into `scores`."""
    fixed, fixed_affine = read_label(pair["fixed_label"], dims)
    if grid:
        require_same_grid(pair["field"], pair["fixed_label"], *grid, fixed.shape, fixed_affine)
    images = {}
    if "moving_label" in pair:
        moving, affine = read_label(pair["moving_label"], dims)
        still = np.zeros((dims, *fixed.shape), np.float32)
        images["before"] = apply_field(moving, affine, still, fixed_affine, order=0)
        if field is not None:
            images["after"] = apply_field(moving, affine, field, fixed_affine, order=0)
    if "warped_label" in pair:
        images["after"], affine = read_label(pair["warped_label"], dims)
        require_same_grid(pair["warped_label"], pair["fixed_label"], images["after"].shape, affine, fixed.shape,
                          fixed_affine)
    labels = sorted(set(np.unique(fixed).tolist()) - {0})
    if not labels:
        raise InputError(f"{pair['fixed_label']}: no label but 0; give a label image.")
    spacing_mm = np.linalg.norm(fixed_affine[:3, :dims], axis=0)
    scores["labels"] = {label: {} for label in labels}
    for word, image in images.items():
        end = "_before" * (word == "before")
        for name, values in ((f"dice{end}", dice(image, fixed, labels)),
                             (f"hd95{end}_mm", hd95(image, fixed, labels, spacing_mm))):
            scores[name] = average(values)
            for label, value in zip(labels, values):
                scores["labels"][label][name] = value


def score_points(pair, field, affine, scores):
    """Mean distance of landmarks, before and after, into `scores`."""
    fixed, moving = read_points(pair["fixed_points"]), read_points(pair["moving_points"])
    if len(fixed) != len(moving):
        raise InputError(f"{pair['fixed_points']}: {len(fixed)} landmarks, {pair['moving_points']} has {len(moving)}; "
                         "they have to be the same points.")
    scores["tre_before_mm"] = float(np.linalg.norm(fixed - moving, axis=1).mean())
    if field is not None:
        scores["tre_mm"] = float(np.linalg.norm(move_points(fixed, field, affine) - moving, axis=1).mean())


def score_pair(pair, dims=3):
    """All scores of one pair.

    pair: dict with those of FILES that there are. Returns: dict of name, "labels" ({label: scores}) and the means of
    COLUMNS that could be found. Raises InputError naming the file for whatever does not fit.
    """
    field, grid, scores = None, None, {"name": pair.get("name", "pair"), "labels": {}}
    if "field" in pair:
        field, affine = read_field(pair["field"], dims)
        grid = (field.shape[1:], affine)
        tensor = torch.from_numpy(field)[None]
        scores.update(folding_percent=folding_percent(tensor), sdlogj=sdlogj(tensor))
    if "fixed_label" in pair:
        score_labels(pair, field, grid, dims, scores)
    if "fixed_points" in pair and "moving_points" in pair:
        score_points(pair, field, grid and grid[1], scores)
    if len(scores) == 2:
        raise InputError(f"{scores['name']}: nothing to score; give a field, label images or landmarks.")
    return scores


def write_scores(folder, scores):
    """scores.csv, scores.json, scores.html; and the table on the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    means = spread(scores, COLUMNS)
    with open(folder / "scores.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["pair", "label", *COLUMNS])
        for score in scores:
            writer.writerow([score["name"], "all", *[score.get(column) for column in COLUMNS]])
            for label, values in score["labels"].items():
                writer.writerow([score["name"], label, *[values.get(column) for column in COLUMNS]])
    plain = json.dumps({"pairs": scores, "mean": {column: mean for column, (mean, _, _) in means.items()}}, indent=1)
    (folder / "scores.json").write_text(plain.replace("NaN", "null") + "\n")
    header, formats = ["pair", *means], [None, *[COLUMNS[column] for column in means]]
    rows = [[score["name"], *[score.get(column) for column in means]] for score in scores]
    ends = [["mean", *[mean for mean, _, _ in means.values()]], ["sd", *[sd for _, sd, _ in means.values()]]]
    worst_first = [rows[number] for number in sorted(range(len(rows)), key=lambda n: scores[n].get("dice") or 0.0)]
    write_page(folder / "scores.html", "Registrations, scored", f"{len(scores)} pairs.",
               [("", cards_html([(column, f"{mean:{COLUMNS[column]}}", f"sd {sd:{COLUMNS[column]}}, {count} pairs")
                                 for column, (mean, sd, count) in means.items()])),
                ("Pairs", table_html(header, [*worst_first, *ends], "Worst Dice first.", formats))])
    print(text_table(header, [*rows, *ends], formats))
    print(f"\nscores: {(folder / 'scores.html').resolve()}")
    print(json.dumps({column: round(mean, 5) for column, (mean, _, _) in means.items()}))


def main(argv=None):
    args = parse_arguments(argv)
    try:
        given = {key: getattr(args, key) for key in FILES if getattr(args, key)}
        if bool(args.pairs) == bool(given):
            raise InputError("give either --pairs or the files of one pair, such as --fixed-label and --field.")
        pairs = read_list(args.pairs) if args.pairs else [given]
        with tqdm(pairs, "scoring", unit="pair") as bar:  # closed before an error is printed
            scores = [score_pair(pair, args.dims) for pair in bar]
        write_scores(Path(args.out), scores)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    return DONE


if __name__ == "__main__":
    sys.exit(main())
