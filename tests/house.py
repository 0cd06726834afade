"""How much a reader has to hold in the head: functions and files that a training and a pair run through, and lines.

    python tests/house.py [--json]

Traced with sys.setprofile, in all threads: the tests' tiny training (8^3, six steps, two saves, validation), and one
pair with labels, aligned and refined without a network, with its page and without. Counted are functions of the house
that are entered at least once, and the files that hold them; comprehensions and lambdas are not. The loop is what runs
from the first step to the last.
"""
import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PRODUCT = ("OM_*.py", "setup.py", "omnimorph/**/*.py", "Scripts/**/*.py", "Runtime/**/*.py", "Supervisor/**/*.py",
           "Report/**/*.py", "Dataloader/**/*.py", "Diffusion/**/*.py", "Inference/**/*.py", "Study/**/*.py")
SHOWN = ("Diffusion/figures.py", "Inference/pair_figures.py", "Inference/viewer.py", "Report/page.py")  # a pair's page


def traced(function, *arguments):
    """Call a function, whose output is dropped. Returns: [(file, function)] of the house in the order of entering."""
    entered, own = [], f"{ROOT}{os.sep}"
    others = ("tests" + os.sep, ".venv" + os.sep)  # `make` puts the libraries into the checkout

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(own) and not code.co_name.startswith("<"):
            entered.append((code.co_filename.removeprefix(own), code.co_qualname))

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            code = function(*arguments)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if code:
        sys.exit(f"exit code {code}: {errors.getvalue()}")
    return [entry for entry in entered if not entry[0].startswith(others)]


def apart(function, *arguments):
    """`traced` in a process of its own, so that nothing is left over from what was traced before."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(traced, (function, *arguments))


def size(name, entered):
    """{"<name>_functions", "<name>_files"} of what was entered."""
    return {f"{name}_functions": len(set(entered)), f"{name}_files": len({file for file, _ in entered})}


def lines(*patterns):
    """Lines of the files of this repository that match."""
    return sum(len(path.read_text().splitlines()) for pattern in patterns for path in ROOT.glob(pattern))


def measure(folder):
    """All figures. folder: an empty one, for data and outputs."""
    import Inference.register_pairs  # noqa: F401  what runs while modules are imported does not count
    import OM_register
    import OM_train_3modes
    from tests import test_floors
    from tests.tiny import QUICK, arguments, make_data

    make_data(folder, size=8)
    run = apart(OM_train_3modes.main, arguments(folder, **{**QUICK, "model__rec_num": 2, "run__epochs": 1}))
    steps = [place for place, (_, name) in enumerate(run) if name == "train_step"]
    images, labels = folder / "data/imagesTr", folder / "data/labelsTr"
    options = ["--model", "none", "--affine", "--refine", "5", "--device", "cpu"]
    for which, number in (("fixed", 0), ("moving", 1)):
        options += [f"--{which}", str(images / f"subject_000{number}.nii.gz"),
                    f"--{which}-label", str(labels / f"subject_000{number}.nii.gz")]
    page = apart(OM_register.main, [*options, "--no-picture", "--out", str(folder / "page")])
    pair = [entry for entry in page if entry[0] not in SHOWN]
    imports = test_floors.graph()
    return {**size("loop", run[steps[0]:steps[-1]]), **size("run", run), **size("pair", pair),
            **size("page", page), "product_lines": lines(*PRODUCT), "test_lines": lines("tests/**/*.py"),
            "launcher_lines": lines("bash_train_multi_nodes.sh"),
            "upward": sum(test_floors.floor(other) > test_floors.floor(name)
                          for name, others in imports.items() for other in others),
            "circles": int(test_floors.circle(imports) is not None)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    print(json.dumps(figures) if args.json else "\n".join(f"{name:>16} {value:6}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
