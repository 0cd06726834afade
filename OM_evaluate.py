"""Score registrations: how well labels and landmarks agree, and how regular the fields are.

    python OM_evaluate.py --pairs pairs.json --out Results/run
    python OM_evaluate.py --fixed-label F.nii.gz --moving-label M.nii.gz --field field.nii.gz --out Results/pair

pairs.json is the results.json of OM_register.py; or a list of objects (or an object with such a list under "pairs")
with the keys of the options below and, if wanted, "name"; paths are relative to the list. A field is a file of ITK or
ANTs (millimetres) or of Learn2Reg (voxels), on the fixed grid. Whatever is not given is not scored. Writes scores.csv
(a row for each pair and label), scores.json and scores.html. Exit codes: 0 done, 43 bad input; of a list whose other
pairs are scored, too.
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from Dataloader.grids import SAME_GRID, corners_apart
from Dataloader.nifti import move_points, read_field, read_label, read_points
from Diffusion.metrics import average, dice, folding_percent, hd95, sdlogj, spread
from Inference.pair_lists import TO_SCORE, read_scored_pairs
from Inference.registration import apply_field
from Inference.results import damage, scores_csv
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.files import write_file
from Runtime.report import cards_html, table_html, text_table, write_page

COLUMNS = {"dice_before": ".3f", "dice": ".3f", "hd95_before_mm": ".2f", "hd95_mm": ".2f", "tre_before_mm": ".2f",
           "tre_mm": ".2f", "folding_percent": ".4f", "sdlogj": ".4f"}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Score registrations: Dice and HD95 for each label, landmark error, "
                                     "folding and SDlogJ of the fields.")
    parser.add_argument("--pairs", metavar="JSON", help="results.json of OM_register.py, or a list of pairs with "
                        "the keys fixed_label, moving_label, field, ...")
    parser.add_argument("--fixed-label", help="label image of the fixed volume")
    parser.add_argument("--moving-label", help="label image of the moving volume, on any grid")
    parser.add_argument("--field", help="deformation field on the fixed grid")
    parser.add_argument("--warped-label", help="label image that has been warped already, on the fixed grid: instead "
                        "of --field or beside it")
    parser.add_argument("--fixed-points", help="CSV of landmarks of the fixed volume: x,y,z in mm, RAS")
    parser.add_argument("--moving-points", help="the same landmarks in the moving volume")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="axes of the volumes (what results.json says, else 3)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the scores go")
    return parser.parse_args(argv)


def score_whole(pair, dims):
    """`score_pair` of a pair whose field is still the one that OM_register.py wrote, if it did."""
    problem = damage(pair["written"][1], pair["written"][0]) if "written" in pair else None
    if problem:
        raise InputError(f"{problem}: register this pair again.")
    return score_pair(pair, dims)


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

    pair: dict with those of TO_SCORE that there are. Returns: dict of name, "labels" ({label: scores}) and the means of
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


def write_scores(folder, scores, failed):
    """scores.csv, scores.json, scores.html; and the table on the terminal. failed: name and reason of other pairs."""
    means = spread(scores, COLUMNS)
    write_file(folder / "scores.csv", scores_csv(scores, COLUMNS))
    content = {"pairs": scores, "failed": failed, "mean": {column: mean for column, (mean, _, _) in means.items()}}
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)  # JSON has no NaN
    write_file(folder / "scores.json", json.dumps(plain, indent=1) + "\n")
    write_tables(folder / "scores.html", scores, failed, means)
    print(json.dumps({column: round(mean, 5) for column, (mean, _, _) in means.items()}))


def write_tables(path, scores, failed, means):
    """The page, worst pairs first, and the same table on the terminal. means: of `spread`."""
    header, formats = ["pair", *means], [None, *[COLUMNS[column] for column in means]]
    rows = [[score["name"], *[score.get(column) for column in means]] for score in scores]
    ends = [["mean", *[mean for mean, _, _ in means.values()]], ["sd", *[sd for _, sd, _ in means.values()]]]
    worst_first = [rows[number] for number in sorted(range(len(rows)), key=lambda n: scores[n].get("dice") or 0.0)]
    cards = cards_html([(column, f"{mean:{COLUMNS[column]}}", f"sd {sd:{COLUMNS[column]}}, {count} pairs")
                        for column, (mean, sd, count) in means.items()])
    sections = [("", cards), ("Pairs", table_html(header, [*worst_first, *ends], "Worst Dice first.", formats))]
    if failed:
        why = [[entry["name"], entry["reason"]] for entry in failed]
        sections.append(("Not scored", table_html(["pair", "why"], why)))
    write_page(path, "Registrations, scored", f"{len(scores)} pairs.", sections)
    print(text_table(header, [*rows, *ends], formats))
    print(f"\nscores: {path.resolve()}")


def main(argv=None):
    args = parse_arguments(argv)
    try:
        given = {key: getattr(args, key) for key in TO_SCORE if getattr(args, key)}
        if bool(args.pairs) == bool(given):
            raise InputError("give either --pairs or the files of one pair, such as --fixed-label and --field.")
        pairs, dims = read_scored_pairs(args.pairs) if args.pairs else ([{"name": "pair", **given}], None)
        with tqdm(pairs, "scoring", unit="pair") as bar:  # closed before an error is printed
            found = [attempt(pair["name"], score_whole, pair, args.dims or dims or 3) for pair in bar]
        failed = [{"name": pair["name"], "reason": reason} for pair, reason in zip(pairs, found)
                  if isinstance(reason, str)]
        scores = [score for score in found if not isinstance(score, str)]
        if scores:
            write_scores(Path(args.out), scores, failed)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror or error}; the scores cannot be written there.",
              file=sys.stderr)
        return STOP
    for entry in failed:
        print(f"error: {entry['name']}: {entry['reason']}" if args.pairs else f"error: {entry['reason']}",
              file=sys.stderr)
    return STOP if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
