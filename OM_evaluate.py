"""Score registrations: how well labels and landmarks agree, and how regular the fields are.

    python OM_evaluate.py --pairs pairs.json --out Results/run
    python OM_evaluate.py --fixed-label F.nii.gz --moving-label M.nii.gz --field field.nii.gz --out Results/pair

pairs.json is the results.json of OM_register.py or its folder, or a list of objects (or an object with such a list
under "pairs", or a .csv table) whose keys are the options below and, optionally, "name"; paths are relative to the
list. A field is an ITK or ANTs file (millimetres) or a Learn2Reg file (voxels), on the fixed grid. Only what is given
is scored. Writes scores.csv (a row for each pair and label), scores.json and scores.html. Exit codes: 0 done, 43 bad
input, even if only some pairs of a list are bad: the others are scored.
"""
import Runtime  # noqa: F401  first: an outdated Python stops here with one sentence

# isort: split
import argparse
import os
import sys

from Inference.choices import LABELS, TO_SCORE, require_partners
from Runtime.errors import InputError, parse_options, run_program
from Runtime.files import require_file


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Score registrations by Dice and HD95 of each label, landmark "
                                                 "error, and folding and SDlogJ of the fields.")
    parser.add_argument("--pairs", metavar="LIST", help="results.json of OM_register.py or its folder, or a .csv "
                        "table or .json list of pairs with fixed_label, moving_label, field, ...")
    parser.add_argument("--fixed-label", help="label image of the fixed volume")
    parser.add_argument("--moving-label", help="label image of the moving volume, on any grid")
    parser.add_argument("--field", help="deformation field on the fixed grid")
    parser.add_argument("--warped-label", help="label image that is already warped, on the fixed grid, instead of "
                        "--field or in addition to it")
    parser.add_argument("--labels", choices=LABELS, help="how moving labels are warped: smooth "
                        "(each one slightly smoothed and sampled linearly, the largest wins) or nearest, the label of "
                        "the nearest voxel (as in results.json, else smooth)")
    parser.add_argument("--fixed-points", help="landmarks of the fixed volume: a table (x,y,z in mm, RAS), .fcsv, "
                        ".mrk.json, .json or .vtk")
    parser.add_argument("--moving-points", help="the same landmarks in the moving volume, in the same order or "
                        "with the same names")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="number of axes of the volumes (as in results.json, "
                        "else 3)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the scores go")
    return parse_options(parser, argv)


def asked_pairs(args):
    """The pairs that the command line names, from a list or a single one, and their number of axes."""
    files = {key: getattr(args, key) for key in TO_SCORE if getattr(args, key)}
    if bool(args.pairs) == bool(files):
        raise InputError("give either --pairs or the files of one pair, such as --fixed-label and --field.")
    if not args.pairs:
        # Else scores of an earlier run have to go first.
        if not any(os.path.exists(os.path.join(args.out, f"scores.{suffix}")) for suffix in ("json", "csv", "html")):
            require_partners(files)
            for path in files.values():
                if not os.path.exists(path):
                    require_file(path)
        return [{"name": "pair", **files}], args.dims or 3
    from Inference.pair_lists import read_pairs_to_score  # here: nibabel takes a moment

    pairs, dims = read_pairs_to_score(args.pairs)
    return pairs, args.dims or dims or 3


def run(args):
    """Run the command line. Returns the exit code."""
    pairs, dims = asked_pairs(args)
    from Inference.score_pairs import score_all  # torch takes seconds: report wrong options and lists first

    return score_all(args, pairs, dims)


def main(argv=None):
    return run_program(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
