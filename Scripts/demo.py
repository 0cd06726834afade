"""The whole pipeline on synthetic volumes: make data, train, register held-out pairs, report.

    make demo        (or: python Scripts/demo.py [--set key=value ...])

Takes minutes on two CPU cores and leaves everything in Logs/demo. The last line of standard output is one JSON object.
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
import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from Dataloader.datalist import read_datalist  # noqa: E402
from Dataloader.grids import intensity_range, rescale  # noqa: E402
from Dataloader.nifti import read_label  # noqa: E402
from Dataloader.synthetic import write_dataset  # noqa: E402
from Diffusion.figures import gallery_figure, registration_figure  # noqa: E402
from Diffusion.metrics import average, dice  # noqa: E402
from Inference.augmentation import augment  # noqa: E402
from Inference.choices import STEPS  # noqa: E402
from Inference.labels import apply_label  # noqa: E402
from Inference.load_model import find_checkpoint, load_model  # noqa: E402
from Inference.registration import register  # noqa: E402
from Inference.viewer import PAGE_BYTES, viewer_html  # noqa: E402
from Report import page  # noqa: E402
from Report.charts import grid  # noqa: E402
from Report.run_charts import loss_charts, validation_charts  # noqa: E402
from Report.run_logs import read_run  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.device import describe, pick_device, prepare_device  # noqa: E402
from Runtime.errors import DONE, InputError, parse_options, run_program  # noqa: E402
from Runtime.files import write_file  # noqa: E402
from Runtime.run_lock import generations, require_free, run_folder  # noqa: E402

CONFIG = "Config/config_demo.yaml"
TRAIN, VALIDATION = range(0, 40), range(900, 908)
HELD_OUT = range(5000, 5010)  # seeds of the ten subjects of the report; neither training nor validation uses them
FOLDER = Path("Logs/demo")


def register_held_out(model, device):
    """Register each held-out subject to the next one, by the network alone and with refinement: a list of dicts."""
    dims = model[1]["model.dims"]
    items = read_datalist(FOLDER / "held_out", dims)
    cases = []
    for number, moving in enumerate(tqdm(items, "registering", unit="pair", leave=False)):
        fixed = items[(number + 1) % len(items)]
        result = register(fixed["image"], moving["image"], model, affine=False, refine=False, device=device)
        refined = register(fixed["image"], moving["image"], model, affine=False, device=device)
        moving_label, moving_affine = read_label(moving["label"], dims)
        fixed_label, fixed_affine = read_label(fixed["label"], dims)
        labels = sorted(set(np.unique(fixed_label).tolist()) - {0})
        fields = {"before": 0 * result.field, "after": result.field, "refined": refined.field}
        warped = {word: apply_label(moving_label, moving_affine, field, fixed_affine)
                  for word, field in fields.items()}
        scores = {word: average(dice(label, fixed_label, labels)) for word, label in warped.items()}
        cases.append({"pair": f"{moving['id']} to {fixed['id']}", "folding": result.folding_percent, **scores,
                      "seconds": result.seconds["total"], "item": moving,
                      "volumes": [result.moving.array, result.fixed.array, result.warped, result.field],
                      "labels": [moving_label, fixed_label, warped["after"]], "affine": fixed_affine})
    return cases


def deformed_copies(case, model):
    """One subject, deformed at random and then recovered by the network: copies of `gallery_figure`."""
    cfg = model[1]
    image, label = case["volumes"][0], case["labels"][0]
    _, affine = read_label(case["item"]["label"], image.ndim)
    copies = [("original", image, label, None, affine)]
    for t in (50, cfg["diffusion.timesteps"] - 1):
        for word, network in (("random", None), ("recovered", model)):
            copy = augment(image, label, affine, network, start=t, subject=case["item"]["id"], cfg=cfg)
            copies.append((f"t = {t}, {word}", *copy, affine))
    return copies


def pair_pictures(cases):
    """The worst and the best pair, as HTML, each with a viewer; the best one is written as registration.png too."""
    worst = min(cases, key=lambda case: case["after"])
    best = max(cases, key=lambda case: case["after"])
    html = ""
    for case, word in ((worst, "the worst pair"), (best, "the best pair")):
        *volumes, field = case["volumes"]
        low, high = intensity_range(volumes[1])
        order = {"fixed": 1, "before": 0, "after": 2}
        html += viewer_html(case["pair"], {each: rescale(volumes[n], low, high) for each, n in order.items()}, field,
                            case["affine"], {each: case["labels"][n] for each, n in order.items()}, PAGE_BYTES // 2)
        figure = registration_figure(*case["volumes"], labels=case["labels"], title=f"{case['pair']} ({word})",
                                     affine=case["affine"])
        html += page.figure_html(
            figure, f"{case['pair']}: Dice {case['before']:.3f} before, {case['after']:.3f} after.")
    write_file(FOLDER / "registration.png", page.figure_png(figure))
    return html


def write_report(cases, found, model, seconds):
    """Write Logs/demo/report.html: headline figures, curves, pictures, table. Returns: the means, a flat dict.

    found: logs of the training, from Report/run_logs.py. seconds: duration of the whole demo.
    """
    mean = {key: average([case[key] for case in cases]) for key in ("before", "after", "refined", "folding", "seconds")}
    cards = [("Dice before", f"{mean['before']:.3f}", "no registration"),
             ("Dice after", f"{mean['after']:.3f}",
              f"{mean['after'] - mean['before']:+.3f} over {len(cases)} held-out pairs"),
             ("Dice refined", f"{mean['refined']:.3f}", f"{STEPS} steps of optimisation for each pair"),
             ("Folded voxels", f"{mean['folding']:.3f} %", "determinant of the Jacobian <= 0"),
             ("Time", f"{seconds / 60:.1f} min", "data, training, registration")]
    header = ["pair", "Dice before", "Dice after", "gain", "refined", "folded %", "seconds"]
    rows = [[case["pair"], case["before"], case["after"], case["after"] - case["before"], case["refined"],
             case["folding"], case["seconds"]] for case in [*cases, {"pair": "mean", **mean}]]
    formats = [None, ".3f", ".3f", "+.3f", ".3f", ".3f", ".2f"]
    pictures = pair_pictures(cases)
    gallery = gallery_figure(deformed_copies(cases[0], model))
    page.write_page(
        FOLDER / "report.html", "OmniMorph demo",
        f"One small {model[1]['model.name']} learned for {found['epochs'][-1]['step']} steps from {len(TRAIN)} "
        f"unlabelled synthetic volumes in three modes, then registered {len(cases)} pairs of subjects that it had "
        "never seen.",
        [("", page.cards_html(cards)),
         ("Pairs", page.table_html(header, rows, "Mean Dice over the labels of each held-out pair.", formats)),
         ("Before and after", pictures),
         ("Deformed copies", page.figure_html(
             gallery, "One subject deformed at random, at two times t, and the same volume after the network has "
                      "undone what it can, as OM_augment.py writes it. The labels are deformed too (outlines).")),
         ("Training", grid(loss_charts(found)[0] + validation_charts(found)))],
        viewer=True)
    print("\n" + page.text_table(header, rows, formats))
    return {"dice_before": mean["before"], "dice_after": mean["after"], "dice_refined": mean["refined"],
            "folding_percent": mean["folding"], "seconds": seconds}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Make synthetic data, train, register held-out pairs, write a report.")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys of Config/config_demo.yaml")
    return parse_options(parser, argv)


def train(overrides):
    """Run OM_train_3modes.py in a process of its own. Raises InputError if it fails."""
    command = [sys.executable, str(ROOT / "OM_train_3modes.py"), "--config", str(ROOT / CONFIG)]
    for override in overrides:
        command += ["--set", override]
    code = subprocess.run(command).returncode
    if code:
        raise InputError(f"the training ended with exit code {code}; its messages are above.")


def run(args):
    """Run the command line. Returns the exit code."""
    started = time.time()
    cfg = load_config(ROOT / CONFIG, args.overrides)
    for folder in generations(cfg).values():
        require_free(folder, "call this in another folder")
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_dataset(FOLDER / "data", [*TRAIN, *VALIDATION], cfg["data.img_size"])
    write_dataset(FOLDER / "held_out", HELD_OUT, cfg["data.img_size"])
    train(args.overrides)
    device = pick_device(cfg["run.device"])
    prepare_device(device, cfg["run.threads"])
    folder = run_folder(cfg)
    path = find_checkpoint(folder)
    print(f"\nregistering {len(HELD_OUT)} held-out pairs with {path} on {describe(device)}")
    model = load_model(path, device)
    cases = register_held_out(model, device)
    found = read_run(folder)
    result = write_report(cases, found, model, time.time() - started)
    print(f"\nDice {result['dice_before']:.3f} -> {result['dice_after']:.3f}, refined {result['dice_refined']:.3f}, "
          f"folded voxels {result['folding_percent']:.3f} %, {result['seconds'] / 60:.1f} minutes")
    print(f"report: {(FOLDER / 'report.html').resolve()}")
    amp = found["config"]["run.amp"]  # the training's precision; registration chooses its own
    print(json.dumps({**{name: round(value, 4) for name, value in result.items()}, "amp": amp}))
    return DONE


def main(argv=None):
    args = parse_arguments(argv)
    return run_program(run, args, FOLDER)


if __name__ == "__main__":
    sys.exit(main())
