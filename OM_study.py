"""From a pair to a study: what people do with the scans of a group, one subcommand each.

    python OM_study.py segment --atlases Data/atlases --images Data/brains --out Results/segment
    python OM_study.py template --images Data/brains --out Results/template
    python OM_study.py jacobian --results Results/template --out Results/jacobian
    python OM_study.py jacobian --scans FIRST.nii.gz SECOND.nii.gz --out Results/change
    python OM_study.py qc --results Results/template Results/segment --out Results/qc
    python OM_study.py motion --series BOLD.nii.gz --out Results/motion
    python OM_study.py plan --data Data/brains --for register --out Results/plan

segment: label volumes by a few labelled ones. template: the volume in the middle of a group. jacobian: where each
subject is larger or smaller than the template, or a later scan than an earlier one. qc: all results on one page, with
verdicts and outliers. motion: the frames of a 4D series aligned. plan: a config for training, with its memory and
hours. Volumes are named as files, a folder, a .csv or .json list or a pattern. Every subcommand resumes where an
earlier run of the same options stopped, works on --workers subjects at a time, leaves out what cannot be read and names
it, and ends with a page and one line of JSON. Exit codes: 0 done, 43 bad input, with --strict also where a subject was
left out or has failed.
"""
from Runtime import __version__  # first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import importlib
import sys

from Inference.choices import LABELS, SIMILARITIES
from Runtime.errors import STOP, InputError, parse_options, run_program

# {subcommand: file of Study/ that has a function of this name}
HOMES = {"segment": "atlases", "template": "template", "jacobian": "jacobian", "qc": "qc", "motion": "motion",
         "plan": "plan"}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="What people do with the scans of a group.")
    parser.add_argument("--version", action="version", version=f"omnimorph {__version__}")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    add_segment(tasks)
    add_template(tasks)
    add_jacobian(tasks)
    add_qc(tasks)
    add_motion(tasks)
    add_plan(tasks)
    for task in tasks.choices.values():
        refuse_with_43(task)
    return parse_options(parser, argv)


def refuse_with_43(parser):
    """Make a subcommand's parser end like all bad input where it does not understand its words."""
    def refuse(message):
        print(f"error: {message}; see {parser.prog} --help.", file=sys.stderr)
        sys.exit(STOP)

    parser.error = refuse


def new_task(tasks, name, purpose, unit="subjects"):
    """A subcommand with the options that all have."""
    task = tasks.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
    task.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    task.add_argument("--workers", type=int, default=1, metavar="N", help=f"{unit} at a time, each in a process of its "
                      "own (%(default)s)")
    task.add_argument("--again", action="store_true", help="do anew what an earlier run of the same options has done")
    task.add_argument("--strict", action="store_true", help="exit with 43 where one was left out or has failed")
    task.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    return task


def add_volumes(task, name, purpose):
    task.add_argument(name, nargs="+", required=True, metavar="PATH", help=purpose)
    task.add_argument("--ids", default="", metavar="NUMBERS", help="only those whose names end in these numbers, such "
                      "as 1-60,75")
    task.add_argument("--subject-pattern", default="", metavar="REGEX", help="its group names the subject in a path; "
                      "without it sub-XX of BIDS names, else each volume is a subject of its own")


def add_similarity(task):
    task.add_argument("--similarity", choices=SIMILARITIES, help="by what volumes are compared: correlation; for two "
                      "modalities mapped or mind (as in the config: correlation)")


def add_segment(tasks):
    task = new_task(tasks, "segment", "label volumes by a few labelled ones", "registrations")
    task.add_argument("--atlases", required=True, metavar="PATH", help="volumes with label maps: a folder with "
                      "imagesTr and labelsTr, NAME.nii.gz beside NAME_dseg.nii.gz, or a list")
    add_volumes(task, "--images", "volumes to segment; where they have label maps, those score the result")
    task.add_argument("--most", type=int, default=10, metavar="N", help="register at most N atlases to an image, the "
                      "most similar ones after an affine alignment; 0 for all (%(default)s)")
    task.add_argument("--same-subject", action="store_true", help="let other scans of the same subject vote too")
    task.add_argument("--join", choices=("joint", "majority"), default="joint", help="joint: each atlas by how alike "
                      "it is around the voxel; majority: all alike (%(default)s)")
    task.add_argument("--affine", choices=("rigid", "affine"), default="affine", help="alignment before the "
                      "deformation (%(default)s)")
    task.add_argument("--labels", choices=LABELS, default="smooth", help="how labels are carried (%(default)s)")
    task.add_argument("--keep", action="store_true", help="keep the registered atlases, in atlases/")
    task.add_argument("--bids", action="store_true", help="the results also under the names of BIDS derivatives, in "
                      "OUT/bids")
    add_similarity(task)


def add_template(tasks):
    task = new_task(tasks, "template", "make the template of a group: the volume in its middle")
    add_volumes(task, "--images", "the volumes of the group; their label maps, if any, are carried to the template")
    task.add_argument("--start", metavar="FILE", help="begin with this volume, whose field of view the template gets "
                      "(the subject of middle size)")
    task.add_argument("--rounds", type=int, default=4, metavar="N", help="of registering and averaging, the first half "
                      "of them with voxels twice as large (%(default)s)")
    task.add_argument("--spacing", type=float, default=0.0, metavar="MM", help="side of the template's voxels (that of "
                      "the start volume's)")
    task.add_argument("--sharpen", type=float, default=1.0, metavar="X", help="how much of the edges that averaging "
                      "blurs is added again; 0 for the plain mean (%(default)s)")
    task.add_argument("--affine", choices=("rigid", "affine"), default="affine", help="alignment before the "
                      "deformation (%(default)s)")
    task.add_argument("--bids", action="store_true", help="the results also under the names of BIDS derivatives, in "
                      "OUT/bids")
    add_similarity(task)


def add_jacobian(tasks):
    task = new_task(tasks, "jacobian", "map the change of volume from a template to its subjects, or between scans")
    task.add_argument("--results", metavar="FOLDER", help="results of a template, or of OM_register.py with one fixed "
                      "volume: the maps are on its grid")
    task.add_argument("--scans", nargs="+", default=[], metavar="FILE", help="two or more scans of one subject, the "
                      "earliest first: the change from it to each, through the point in the middle of all")
    task.add_argument("--labels", metavar="FILE", help="label map on the template's grid, with --scans on that of the "
                      "first scan, for a table (the label map of the results, or beside the first scan)")
    task.add_argument("--smooth", type=float, default=0.0, metavar="MM", help="smooth the maps by a Gaussian of this "
                      "standard deviation (%(default)s)")
    task.add_argument("--affine", choices=("rigid", "affine"), default="rigid", help="with --scans: alignment before "
                      "the deformation (%(default)s)")
    add_similarity(task)


def add_qc(tasks):
    task = new_task(tasks, "qc", "show all results of a study on one page, with verdicts and outliers")
    task.add_argument("--results", nargs="+", required=True, metavar="FOLDER", help="the --out of OM_register.py, "
                      "template or segment, one or several")


def add_motion(tasks):
    task = new_task(tasks, "motion", "align the frames of a 4D series to one of them or to their mean", "blocks")
    task.add_argument("--series", required=True, metavar="FILE", help="NIfTI file (D, H, W, frames)")
    task.add_argument("--reference", default="mean", metavar="WHAT", help="mean of the frames after a first pass, "
                      "middle for the frame in the middle, or the number of a frame from 0 (%(default)s)")
    task.add_argument("--deform", action="store_true", help="deform each frame too, for organs that breathing moves")
    add_similarity(task)


def add_plan(tasks):
    task = tasks.add_parser("plan", help="write a config for a training on a folder and this machine",
                            description="Write a config for a training on a folder and this machine, with its memory "
                            "and hours, and say which program serves the purpose.")
    task.add_argument("--data", required=True, metavar="PATH", help="volumes to train on: a folder, list or pattern")
    task.add_argument("--for", dest="purpose", choices=("register", "augment", "segment"), default="register",
                      help="what it is for (%(default)s)")
    task.add_argument("--subject-pattern", default="", metavar="REGEX", help="data.subject_pattern of the config")
    task.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    task.add_argument("--strict", action="store_true", help="exit with 43 where a volume was left out")
    task.add_argument("--out", required=True, metavar="FOLDER", help="where config.yaml and plan.html go")


def run(args):
    """Do what the command line asks for. Returns the exit code."""
    least = {"workers": 1, "rounds": 1, "spacing": 0, "sharpen": 0, "smooth": 0, "most": 0}
    wrong = next((name for name, number in least.items() if getattr(args, name, number) < number), None)
    if wrong:
        raise InputError(f"--{wrong} {getattr(args, wrong)}: it is {least[wrong]} or more.")
    home = InputError.__module__.removesuffix("Runtime.errors")  # "omnimorph." where it is installed
    module = importlib.import_module(f"{home}Study.{HOMES[args.task]}")  # only now: torch takes seconds
    code = getattr(module, args.task)(args)
    if getattr(args, "bids", False):
        print(f"BIDS derivatives: {importlib.import_module(f'{home}Inference.bids').write_bids(args.out).resolve()}",
              file=sys.stderr)
    return code


def main(argv=None):
    return run_program(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
