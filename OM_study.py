"""From a pair to a study: what people do with the scans of a group, one subcommand each.

    python OM_study.py segment --atlases Data/atlases --images Data/brains --out Results/segment

segment: label volumes by a few labelled ones. Every subcommand takes files, a folder, a .csv or .json list or a pattern
of volumes, resumes where an earlier run of the same options stopped, works on --workers subjects at a time, leaves out
what cannot be read and names it, and ends with a page and one line of JSON. Exit codes: 0 done, 43 bad input, with
--strict also where a subject was left out.
"""
from Runtime import __version__  # first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import importlib
import signal
import sys

from Inference.choices import LABELS, SIMILARITIES
from Runtime.errors import STOP, InputError, attempt, parse_options

HOMES = {"segment": "atlases"}  # {subcommand: file of Study/ that has a function of this name}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="What people do with the scans of a group.")
    parser.add_argument("--version", action="version", version=f"omnimorph {__version__}")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    add_segment(tasks)
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
    add_similarity(task)


def run(args):
    """Do what the command line asks for. Returns the exit code."""
    if args.workers < 1:
        raise InputError(f"--workers {args.workers}: at least 1 process is needed.")
    home = InputError.__module__.removesuffix("Runtime.errors")  # "omnimorph." where it is installed
    module = importlib.import_module(f"{home}Study.{HOMES[args.task]}")  # only now: torch takes seconds
    return getattr(module, args.task)(args)


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
