"""From a pair to a study: subcommands that label, average, compare and check the scans of a group.

    python OM_study.py segment --atlases Data/atlases --images Data/brains --out Results/segment
    python OM_study.py template --images Data/brains --out Results/template
    python OM_study.py jacobian --results Results/template --out Results/jacobian
    python OM_study.py jacobian --scans FIRST.nii.gz SECOND.nii.gz --out Results/change
    python OM_study.py qc --results Results/template Results/segment --out Results/qc
    python OM_study.py motion --series BOLD.nii.gz --out Results/motion
    python OM_study.py plan --data Data/brains --for register --out Results/plan

segment: label volumes with the help of a few labelled ones. template: build the average volume of a group. jacobian:
map where each subject is larger or smaller than the template, or a later scan than an earlier one. qc: show all results
on one page, with verdicts and outliers. motion: align the frames of a 4D series. plan: write a training config and
estimate its memory and hours. Volumes are given as files, a folder, a .csv or .json list or a pattern. Every subcommand
but plan resumes an earlier run with the same options, processes --workers subjects at a time, skips and names what it
cannot read, and ends with a page and one line of JSON. Exit codes: 0 done, 43 bad input, with --strict also if a
subject was left out or failed.
"""
from Runtime import __version__  # first: an outdated Python stops here with one sentence

# isort: split
import argparse
import importlib
import math
import os
import sys

from Inference.choices import LABELS, SIMILARITIES
from Runtime.errors import InputError, parse_options, run_program
from Runtime.files import require_apart


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Label, average, compare and check the scans of a group.")
    parser.add_argument("--version", action="version", version=f"omnimorph {__version__}")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")

    segment = new_task(tasks, "segment", "label volumes with the help of a few labelled ones", "registrations")
    segment.add_argument("--atlases", required=True, metavar="PATH", help="volumes with label maps: a folder with "
                         "imagesTr and labelsTr, NAME.nii.gz next to NAME_dseg.nii.gz, or a list")
    add_images(segment, "volumes to segment; label maps next to them, if any, score the result")
    segment.add_argument("--most", type=int, default=10, metavar="N", help="register at most N atlases to an image, "
                         "the most similar ones after an affine alignment (%(default)s; 0 for all)")
    segment.add_argument("--same-subject", action="store_true", help="let other scans of the same subject vote too")
    segment.add_argument("--join", choices=("joint", "majority"), default="joint", help="joint: weight each atlas by "
                         "its similarity around the voxel; majority: one vote each (%(default)s)")
    segment.add_argument("--labels", choices=LABELS, default="smooth", help="how labels are warped (%(default)s)")
    segment.add_argument("--keep", action="store_true", help="keep the registered atlases in atlases/")

    template = new_task(tasks, "template", "make the template of a group, which has its mean shape")
    add_images(template, "the volumes of the group; their label maps, if any, are carried to the template")
    template.add_argument("--start", metavar="FILE", help="start with this volume, which gives the template its field "
                          "of view (the subject of median size)")
    template.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds of registering and averaging, the "
                          "first half of them with voxels twice as large (%(default)s)")
    template.add_argument("--spacing", type=float, default=0.0, metavar="MM", help="voxel size of the template in mm "
                          "(that of the start volume)")
    template.add_argument("--sharpen", type=float, default=1.0, metavar="X", help="how strongly to restore edges "
                          "that averaging has blurred; 0 for the plain mean (%(default)s)")
    template.add_argument("--symmetric", action="store_true", help="count each subject also mirrored from left to "
                          "right, so that the sides of the template are mirror images")

    jacobian = new_task(tasks, "jacobian", "map the change of volume from a template to its subjects, or between scans")
    jacobian.add_argument("--results", metavar="FOLDER", help="results of a template, or of OM_register.py with one "
                          "fixed volume: the maps are on its grid")
    jacobian.add_argument("--scans", nargs="+", default=[], metavar="FILE", help="two or more scans of one subject, "
                          "the earliest first: maps the change from the first to each other scan, half-way between "
                          "them")
    jacobian.add_argument("--labels", metavar="FILE", help="label map for a table, on the grid of the template or, "
                          "with --scans, of the first scan (default: the label map of the results, or next to the "
                          "first scan)")
    jacobian.add_argument("--smooth", type=float, default=0.0, metavar="MM", help="smooth the maps by a Gaussian of "
                          "this standard deviation in mm (%(default)s)")
    jacobian.add_argument("--affine", choices=("rigid", "affine"), default="rigid", help="with --scans: alignment "
                          "before the deformation (%(default)s)")

    qc = new_task(tasks, "qc", "show all results of a study on one page, with verdicts and outliers")
    qc.add_argument("--results", nargs="+", required=True, metavar="FOLDER", help="one or more result folders "
                    "(--out) of OM_register.py, template or segment")

    motion = new_task(tasks, "motion", "align the frames of a 4D series to one of them or to their mean", "blocks")
    motion.add_argument("--series", required=True, metavar="FILE", help="NIfTI file (D, H, W, frames)")
    motion.add_argument("--reference", default="mean", metavar="WHAT", help="reference frame: mean of the frames after "
                        "a first pass, middle, or the number of a frame from 0 (%(default)s)")
    motion.add_argument("--deform", action="store_true", help="also deform each frame, for organs that move with "
                        "breathing")
    motion.add_argument("--radius", type=float, default=50.0, metavar="MM", help="radius of the head, at which a "
                        "rotation is turned into a displacement: about 5 for a mouse (%(default)s, a human head)")

    for task in (segment, template):
        task.add_argument("--affine", choices=("rigid", "affine"), default="affine", help="alignment before the "
                          "deformation (%(default)s)")
    for task in (segment, template, motion):
        task.add_argument("--bids", action="store_true", help="also copy the results to OUT/bids, under the names of "
                          "BIDS derivatives")
    for task in (segment, template, jacobian, motion):
        task.add_argument("--similarity", choices=SIMILARITIES, help="how volumes are compared: correlation; for two "
                          "modalities mapped or mind; auto decides from each pair (default: "
                          "registration.similarity of the config)")

    plan = tasks.add_parser("plan", help="write a config for training on a folder of volumes and this machine",
                            description="Write a config for training on a folder of volumes and this machine, "
                                        "estimate memory and hours, and advise which program to use.")
    plan.add_argument("--data", required=True, metavar="PATH", help="volumes to train on: a folder, list or pattern")
    plan.add_argument("--for", dest="purpose", choices=("register", "augment", "segment"), default="register",
                      help="purpose of the training (%(default)s)")
    plan.add_argument("--subject-pattern", default="", metavar="REGEX", help="data.subject_pattern of the config")
    plan.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    plan.add_argument("--strict", action="store_true", help="exit with code 43 if a volume was left out")
    plan.add_argument("--out", required=True, metavar="FOLDER", help="where config.yaml and plan.html go")
    return parse_options(parser, argv, tasks.choices.values())


def new_task(tasks, name, purpose, unit="subjects"):
    """A subcommand with the options common to all."""
    task = tasks.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
    task.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    task.add_argument("--workers", type=int, default=1, metavar="N", help=f"number of {unit} to process at a time, "
                      "each in its own process (%(default)s)")
    task.add_argument("--again", action="store_true", help="repeat what an earlier run with the same options has "
                      "completed")
    task.add_argument("--strict", action="store_true", help="exit with code 43 if a subject was left out, has "
                      "failed, or has the verdict failed")
    task.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    return task


def add_images(task, purpose):
    task.add_argument("--images", nargs="+", required=True, metavar="PATH", help=purpose)
    task.add_argument("--ids", default="", metavar="NUMBERS", help="use only volumes whose names end in these "
                      "numbers, such as 1-60,75")
    task.add_argument("--subject-pattern", default="", metavar="REGEX", help="regular expression whose group is the "
                      "subject in a path (default: from names and folders, see docs/data.md)")


def run(args):
    """Run the command line. Returns the exit code."""
    least = {"workers": 1, "rounds": 1, "spacing": 0, "sharpen": 0, "smooth": 0, "most": 0}
    wrong = next((name for name, number in least.items() if not number <= getattr(args, name, number) < math.inf), None)
    if wrong:
        raise InputError(f"--{wrong} {getattr(args, wrong)}: it must be a number of {least[wrong]} or more.")
    sources = [*getattr(args, "images", []), *getattr(args, "scans", []), getattr(args, "atlases", "")]
    inner = {"segment": "atlases", "template": "subjects"}.get(args.task)  # where it writes volumes of each of them
    require_apart([inner and os.path.join(args.out, inner)], inputs=sources)
    whole = [path for path in sources if not os.path.isdir(os.path.join(path, "imagesTr"))]  # else only that is read
    require_apart([args.out], inputs=whole)
    home = InputError.__module__.removesuffix("Runtime.errors")  # "omnimorph." if installed
    module = importlib.import_module(f"{home}Study.{args.task}")  # only now: importing torch takes seconds
    code = getattr(module, args.task)(args)
    bids = importlib.import_module(f"{home}Inference.bids")
    if getattr(args, "bids", False):
        folder = bids.write_bids(args.out, getattr(args, "series", None), getattr(args, "radius", 0.0))
        print(f"BIDS derivatives: {folder.resolve()}", file=sys.stderr)
    elif hasattr(args, "bids"):
        bids.drop_copies(args.out)
    return code


def main(argv=None):
    return run_program(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
