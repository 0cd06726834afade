"""The command `omnimorph`: the programs of the repository by short names.

    omnimorph register | augment | train | export | prepare | evaluate | segment | template |
              jacobian | qc | motion | plan [options]
"""
import importlib
import importlib.util
import sys

from Runtime import __version__
from Runtime.errors import unbreakable_output

PROGRAMS = {"register": "OM_register", "augment": "OM_augment", "train": "OM_train_3modes", "export": "OM_export",
            "prepare": "OM_prepare", "evaluate": "OM_evaluate",
            **dict.fromkeys(["segment", "template", "jacobian", "qc", "motion", "plan"], "OM_study")}
USAGE = """usage: omnimorph TASK [options]

  register   align pairs of volumes, or apply a saved field
  augment    deformed copies of images with their labels and fields
  train      train a network in three modes
  export     write a trained network to a folder, ready for a model hub
  prepare    resample a data set onto the training grid, once before training
  evaluate   score registrations
  segment    label volumes with the help of a few labelled ones
  template   make the template of a group
  jacobian   map the change of volume from a template to its subjects, or between scans
  qc         show all results of a study on one page
  motion     align the frames of a 4D series
  plan       write a config for training on your volumes and this machine

omnimorph TASK --help explains the options of a task, omnimorph --version prints the version."""


def answer(word):
    """Print what a word that is no task asks for. Returns: the exit code."""
    if word in ("-h", "--help", "--version"):
        print(f"omnimorph {__version__}" if word == "--version" else USAGE)
        return 0
    print(f"error: {word} is no task: it is one of {', '.join(PROGRAMS)}.", file=sys.stderr)
    return 43


def main():
    """Run the program that the command line names. Returns: its exit code; 43 if it names none."""
    task = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if task not in PROGRAMS:
        with unbreakable_output():  # --help | true
            return answer(task)
    name = PROGRAMS[task]
    installed = f"{__package__}.{name}"  # in the repository, the programs are at the top level instead
    program = importlib.import_module(installed if importlib.util.find_spec(installed) else name)
    # OM_study.py has several tasks and takes the task's name as its first argument.
    sys.argv = ["omnimorph", *sys.argv[1:]] if name == "OM_study" else [f"omnimorph {task}", *sys.argv[2:]]
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
