"""The whole pipeline on synthetic volumes: make data, train, register held-out pairs, deform one of them, report.

    make demo        (or: python Scripts/demo.py [--set key=value ...])

It runs the programs as you would. It takes minutes on two CPU cores and leaves everything in Logs/demo, with the
programs' own pages; report.html sums them up. The last line of standard output is one JSON object.
"""
import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import Runtime  # noqa: E402, F401  before third-party packages: an outdated Python stops here with one sentence

# isort: split
from Dataloader.synthetic import write_dataset  # noqa: E402
from Inference.choices import STEPS  # noqa: E402
from Report import page  # noqa: E402
from Report.charts import grid  # noqa: E402
from Report.run_charts import loss_charts, validation_charts  # noqa: E402
from Report.run_logs import read_run  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.errors import DONE, InputError, parse_options, run_program  # noqa: E402
from Runtime.files import csv_text, write_file  # noqa: E402
from Runtime.run_lock import generations, require_free, run_folder  # noqa: E402

CONFIG = ROOT / "Config/config_demo.yaml"
TRAIN, VALIDATION = range(0, 40), range(900, 908)
HELD_OUT = range(5000, 5010)  # seeds of the ten subjects of the report; neither training nor validation uses them
FOLDER = Path("Logs/demo")


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Make synthetic data, train, register held-out pairs, write a report.")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys of Config/config_demo.yaml")
    return parse_options(parser, argv)


def call(program, *options):
    """Run one of the programs in a process of its own. Raises InputError if it fails."""
    code = subprocess.run([sys.executable, str(ROOT / program), *map(str, options)]).returncode
    if code:
        raise InputError(f"{program} ended with exit code {code}; its messages are above.")


def write_report(alone, mean, found):
    """Write Logs/demo/report.html: what the programs' own pages show, in short, with links to them.

    alone: results of the registrations by the network alone. mean: the means, as the last line of the output has them.
    found: logs of the training, from Report/run_logs.py.
    """
    gain = mean["dice_after"] - mean["dice_before"]
    cards = [("Dice before", f"{mean['dice_before']:.3f}", "no registration"),
             ("Dice after", f"{mean['dice_after']:.3f}", f"{gain:+.3f} over {len(HELD_OUT)} held-out pairs"),
             ("Dice refined", f"{mean['dice_refined']:.3f}", f"{STEPS} steps of optimisation for each pair"),
             ("Folded voxels", f"{mean['folding_percent']:.3f} %", "determinant of the Jacobian <= 0"),
             ("Time", f"{mean['seconds'] / 60:.1f} min", "data, training, registration, copies")]
    links = [[("alone/report.html",) * 2, "each pair before and after registration by the network alone"],
             [("refined/report.html",) * 2, "the same pairs, each refined from there"],
             [("copies/report.html",) * 2, "one subject deformed at random, after the network has undone what it can"]]
    pictures = ""
    for word, best in (("worst", min), ("best", max)):
        row = best(alone["pairs"], key=lambda row: row["dice"])
        pictures += page.png_html((FOLDER / "alone" / row["folder"] / "picture.png").read_bytes(), f"The {word} pair: "
                                  f"Dice {row['dice_before']:.3f} before, {row['dice']:.3f} after.")
    page.write_page(
        FOLDER / "report.html", "OmniMorph demo",
        f"One small {found['config']['model.name']} learned for {found['epochs'][-1]['step']} steps from {len(TRAIN)} "
        f"unlabelled synthetic volumes in three modes, then registered {len(HELD_OUT)} pairs of subjects that it had "
        "never seen.",
        [("", page.cards_html(cards)), ("Pages", page.table_html(["page", "shows"], links)),
         ("Before and after", pictures), ("Training", grid(loss_charts(found)[0] + validation_charts(found)))])


def run(args):
    """Run the command line. Returns the exit code."""
    started = time.time()
    cfg = load_config(CONFIG, args.overrides)
    for folder in generations(cfg).values():
        require_free(folder, "call this in another folder")
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_dataset(FOLDER / "data", [*TRAIN, *VALIDATION], cfg["data.img_size"])
    write_dataset(FOLDER / "held_out", HELD_OUT, cfg["data.img_size"])
    call("OM_train_3modes.py", "--config", CONFIG, *(["--set", *args.overrides] if args.overrides else []))
    images = [f"held_out/imagesTr/subject_{number}.nii.gz" for number in HELD_OUT]
    write_file(FOLDER / "pairs.csv", csv_text([("moving", "fixed"), *zip(images, images[1:] + images[:1])]))
    network, pairs = ("--model", run_folder(cfg), "--device", cfg["run.device"]), ("--pairs", FOLDER / "pairs.csv")
    register = ("OM_register.py", *network, *pairs, "--affine", "none")
    call(*register, "--refine", "0", "--out", FOLDER / "alone")
    call(*register, "--no-picture", "--out", FOLDER / "refined")
    call("OM_augment.py", *network, "--data", FOLDER / "held_out", "--ids", HELD_OUT[0], "--draws", "2", "--out",
         FOLDER / "copies")
    alone, refined = (json.loads((FOLDER / name / "results.json").read_text()) for name in ("alone", "refined"))
    found = read_run(run_folder(cfg))
    mean = {"dice_before": alone["mean"]["dice_before"], "dice_after": alone["mean"]["dice"],
            "dice_refined": refined["mean"]["dice"], "folding_percent": alone["mean"]["folding_percent"],
            "seconds": time.time() - started}
    write_report(alone, mean, found)
    print(f"\nDice {mean['dice_before']:.3f} -> {mean['dice_after']:.3f}, refined {mean['dice_refined']:.3f}, "
          f"folded voxels {mean['folding_percent']:.3f} %, {mean['seconds'] / 60:.1f} minutes")
    print(f"report: {(FOLDER / 'report.html').resolve()}")
    amp = found["config"]["run.amp"]  # the training's precision; registration chooses its own
    print(json.dumps({**{name: round(value, 4) for name, value in mean.items()}, "amp": amp}))
    return DONE


def main(argv=None):
    args = parse_arguments(argv)
    return run_program(run, args, FOLDER)


if __name__ == "__main__":
    sys.exit(main())
