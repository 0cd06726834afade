"""Score registered pairs, and write a table, JSON and a page: what OM_evaluate.py does with its options."""
import json
import sys
from pathlib import Path

from tqdm import tqdm

from Dataloader.datalist import read_json
from Dataloader.grids import require_same_grid, thinning
from Dataloader.nifti import read_header, read_label
from Dataloader.points import read_point_pairs
from Dataloader.transforms import read_any_field
from Diffusion.metrics import spread
from Inference.choices import require_partners
from Inference.labels import apply_label, label_on
from Inference.results import damage, scores_csv
from Inference.scores import (
    COLUMNS,
    every,
    field_scores,
    heading,
    label_scores,
    point_scores,
    said_of_labels,
    unscored,
)
from Report.page import cards_html, table_html, text_table, write_page
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.files import require_apart, write_file

# The first of these columns that any pair has orders the page: 1 where less of it is worse, and the sentence there.
WORST = {"dice": (1, "Worst Dice first."), "tre_mm": (-1, "Largest landmark error first."),
         "folding_any_percent": (-1, "Most folded first.")}


def score_pair(pair, dims=3, carried=None):
    """All scores of one pair.

    pair: dict with name and any keys of TO_SCORE. dims: 2 or 3. carried: how labels are warped, one of LABELS; None: as
    the registration did, else smooth.
    Returns: dict of name, "labels" ({label: scores}) and the means of COLUMNS that the files allow.
    Raises InputError, naming the file, for files that do not fit together and for a field changed since it was written.
    """
    carried = carried or pair.get("carried", "smooth")
    if "written" in pair:
        folder, digests = pair["written"]
        problem = damage(digests, folder)
        if problem:
            raise InputError(f"{problem}: register this pair again.")
    else:  # a registration also warps labels that it does not score
        require_partners(pair)
    scores = {"name": pair.get("name", "pair"), "labels": {}}
    field = affine = moving = None
    problem = gone = ""
    if "field" in pair:
        field, affine = read_any_field(pair["field"], dims)
        # Of a registered pair as `pair_scores` does it; other programs' fields may fold in single voxels.
        seen = every(field, thinning(field.shape[1:])) if "written" in pair else field
        scores.update((key, value) for key, value in field_scores(seen).items() if key in COLUMNS)
    if "fixed_label" in pair:
        fixed, fixed_affine = read_label(pair["fixed_label"], dims)
        if field is not None and pair.get("resample"):
            fixed, fixed_affine = label_on(fixed, fixed_affine, field.shape[1:], affine, carried), affine
        on_its_grid = pair["fixed_label"], fixed.shape, fixed_affine, "give the one for this pair"
        if field is not None:
            require_same_grid(f"{pair['field']}: it", field.shape[1:], affine, *on_its_grid)
        label_maps = {}  # "_before": as the headers place them; "": after registration
        if "moving_label" in pair:
            moving, own = read_label(pair["moving_label"], dims)
            if pair.get("resample") and not Path(pair["resample"]).exists():
                gone = (f"{pair['resample']}: this image is gone, so its labels were not resampled to it first, as the "
                        "registration did.")
            elif pair.get("resample"):
                shape, image_affine = read_header(pair["resample"], dims)
                moving, own = label_on(moving, own, shape, image_affine, carried), image_affine
            label_maps["_before"] = label_on(moving, own, fixed.shape, fixed_affine, carried)
            if field is not None:
                label_maps[""] = apply_label(moving, own, field, fixed_affine, carried)
        if "warped_label" in pair:
            label_maps[""], own = read_label(pair["warped_label"], dims)
            require_same_grid(f"{pair['warped_label']}: it", label_maps[""].shape, own, *on_its_grid)
        problem = unscored(pair, fixed, moving)
        if not problem:
            scores.update(label_scores(label_maps, fixed, fixed_affine[:3, :dims]))
    if "fixed_points" in pair and "moving_points" in pair:
        points_mm = read_point_pairs(pair["fixed_points"], pair["moving_points"])
        scores.update(point_scores(*points_mm, pair, field, affine))
    scores["warnings"] = [*said_of_labels(scores), *filter(None, (problem, gone))]
    if len(scores) == 3:
        if "fixed_label" in pair and not problem:
            raise InputError(f"{pair['fixed_label']}: nothing to compare it with; add moving_label (with a field, to "
                             "score a registration) or warped_label.")
        raise InputError(f"{problem.rstrip('.') or 'nothing to score'}; give a field, label images or landmarks.")
    return scores


def write_scores(folder, scores, failed):
    """Write scores.csv, scores.json and scores.html, and print the table; the page has the worst pairs first (WORST).

    scores: from `score_pair`, at least one. failed: dicts of name and reason of the other pairs.
    """
    columns = spread(scores, COLUMNS)
    means = {column: mean for column, (mean, _, _) in columns.items()}
    content = {"pairs": scores, "failed": failed, "mean": means}
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)  # JSON has no NaN
    write_file(folder / "scores.json", json.dumps(plain, indent=1) + "\n")  # first: it tells whose the others are
    write_file(folder / "scores.csv", scores_csv(scores, COLUMNS))
    header, formats = ["pair", *map(heading, columns)], [None, *[COLUMNS[column] for column in columns]]
    worst, (sign, note) = next((each for each in WORST.items() if each[0] in columns), ("", (1, "")))
    ordered = sorted(scores, key=lambda score: (score.get(worst) is None, sign * (score.get(worst) or 0.0)))
    rows, worst_first = ([[score["name"], *[score.get(column) for column in columns]] for score in each]
                         for each in (scores, ordered))
    ends = []
    if len(scores) > 1:
        ends = [["mean", *means.values()], ["sd", *[sd for _, sd, _ in columns.values()]]]
    cards = cards_html([(heading(column), f"{mean:{COLUMNS[column]}}", "1 pair" if sd is None else
                         f"sd {sd:{COLUMNS[column]}}, {count} pairs") for column, (mean, sd, count) in columns.items()])
    sections = [("", cards), ("Pairs", table_html(header, [*worst_first, *ends], note, formats))]
    if failed:
        reasons = [[entry["name"], entry["reason"]] for entry in failed]
        sections.append(("Not scored", table_html(["pair", "why"], reasons)))
    path = folder / "scores.html"
    write_page(path, "Registrations, scored", f"{len(scores)} pair{'s' * (len(scores) > 1)}.", sections)
    print(text_table(header, [*rows, *ends], formats))
    print(f"\nscores: {path.resolve()}")
    print(json.dumps({column: round(mean, 5) for column, mean in means.items()}))


def score_all(args, pairs, dims):
    """Score pairs, see `score_pair`, and write the scores. args: of the command line. Returns the exit code."""
    files = [Path(args.out, f"scores.{suffix}") for suffix in ("json", "csv", "html")]
    earlier = read_json(files[0]) if files[0].exists() else None
    is_own = isinstance(earlier, dict) and {"pairs", "failed", "mean"} == set(earlier)
    require_apart(files, lambda _: is_own)
    scores, failed = [], []
    with tqdm(pairs, "scoring", unit="pair") as bar:  # closed before an error is printed
        for pair in bar:
            score = attempt(pair["name"], score_pair, pair, dims, args.labels)
            if isinstance(score, str):
                failed.append({"name": pair["name"], "reason": score})
            else:
                scores.append(score)
                for sentence in score["warnings"]:
                    tqdm.write(f"warning: {score['name']}: {sentence}", file=sys.stderr)
    if scores:
        write_scores(Path(args.out), scores, failed)
    else:
        for path in reversed(files):  # those of an earlier run would look like scores of these pairs
            path.unlink(missing_ok=True)
    for entry in failed:
        print(f"error: {entry['name']}: {entry['reason']}" if args.pairs else f"error: {entry['reason']}",
              file=sys.stderr)
    return STOP if failed else DONE
