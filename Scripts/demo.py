"""The whole pipeline on synthetic volumes: make data, train, register pairs the training has never seen, report.

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

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from Dataloader.datalist import read_datalist  # noqa: E402
from Dataloader.dataset import make_dataset  # noqa: E402
from Dataloader.synthetic import write_dataset  # noqa: E402
from Diffusion.diffuser import DeformDDPM  # noqa: E402
from Diffusion.evaluation import align  # noqa: E402
from Diffusion.fields import warp  # noqa: E402
from Diffusion.figures import curves_figure, gallery_figure, registration_figure  # noqa: E402
from Diffusion.metrics import average, dice_before_after, folding_percent  # noqa: E402
from Diffusion.networks import build_network  # noqa: E402
from Runtime import checkpoint, report  # noqa: E402
from Runtime.attempts import read_lines  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.device import describe, pick_device, prepare_device  # noqa: E402
from Runtime.errors import STOP, InputError  # noqa: E402
from Runtime.folder import run_folder  # noqa: E402

CONFIG = "Config/config_demo.yaml"
TRAIN, VALIDATION = range(0, 40), range(900, 908)
HELD_OUT = range(5000, 5010)  # seeds of the ten subjects that the report is about; no training or validation uses them
FOLDER = Path("Logs/demo")


def register_held_out(net, cfg, device):
    """Register each held-out subject to the next one. Returns a list of dicts with scores and volumes."""
    items = read_datalist(FOLDER / "held_out", cfg["model.dims"])
    dataset = make_dataset(items, None, "held-out volumes", ("image", "label"), None, cfg, True)
    cases = []
    for number, item in enumerate(items):
        other = (number + 1) % len(items)
        moving, fixed = (dataset.image(index)[None].to(device) for index in (number, other))
        moving_label, fixed_label = (dataset.label(index)[None] for index in (number, other))
        started = time.time()
        warped, field = align(net, moving, fixed, cfg)
        seconds = time.time() - started
        before, after, warped_label = dice_before_after(moving_label, fixed_label, field.cpu())
        cases.append({"pair": f"{item['id']} to {items[other]['id']}", "before": before, "after": after,
                      "folding": folding_percent(field), "seconds": seconds,
                      "volumes": [v[0, 0].cpu() for v in (moving, fixed, warped)] + [field[0].cpu()],
                      "labels": [v[0, 0] for v in (moving_label, fixed_label, warped_label)]})
    return cases


def deformed_copies(case, cfg):
    """Deformed copies of one subject at growing t, drawn with its label: [(t, image, label, field)]."""
    ddpm, copies = DeformDDPM(cfg), []
    image, label = case["volumes"][0][None, None], case["labels"][0][None, None]
    for t in (20, 40, 60, cfg["diffusion.timesteps"] - 1):
        field, _ = ddpm.draw_fields(image.shape[2:], [t], [(cfg["run.seed"], -2, t)], "cpu")
        copies.append((t, warp(image, field)[0, 0], warp(label, field, mode="nearest")[0, 0], field[0]))
    return copies


def write_report(cases, history, cfg, seconds):
    """Logs/demo/report.html: headline figures, curves, pictures, table."""
    before, after = (average([case[key] for case in cases]) for key in ("before", "after"))
    folding = average([case["folding"] for case in cases])
    worst = min(cases, key=lambda case: case["after"])
    best = max(cases, key=lambda case: case["after"])
    cards = [("Dice before", f"{before:.3f}", "no registration"),
             ("Dice after", f"{after:.3f}", f"{after - before:+.3f} over {len(cases)} held-out pairs"),
             ("Folded voxels", f"{folding:.3f} %", "determinant of the Jacobian <= 0"),
             ("Time", f"{seconds / 60:.1f} min", "data, training, registration")]
    panels = [("Mode 1: recovery of a random deformation (ang: -1 is perfect)", ["ang", "dist", "regul"]),
              ("Mode 2: contrastive", ["contrastive"]),
              ("Mode 3: registration (imgsim: -1 is perfect)", ["imgsim", "imgmse", "ddf"]),
              ("Validation", ["val_dice", "val_dice_before", "val_imgsim", "val_ang"])]
    header = ["pair", "Dice before", "Dice after", "gain", "folded %", "seconds"]
    rows = [[c["pair"], c["before"], c["after"], c["after"] - c["before"], c["folding"], c["seconds"]] for c in cases]
    rows.append(["mean", before, after, after - before, folding, average([c["seconds"] for c in cases])])
    formats = [None, ".3f", ".3f", "+.3f", ".3f", ".2f"]
    figures = [registration_figure(*case["volumes"], labels=case["labels"], title=f"{case['pair']} ({word})")
               for case, word in ((worst, "the worst pair"), (best, "the best pair"))]
    pictures = "".join(report.figure_html(
        figure, f"{case['pair']}: Dice {case['before']:.3f} before, {case['after']:.3f} after.")
        for figure, case in zip(figures, (worst, best)))
    (FOLDER / "registration.png").write_bytes(report.figure_png(figures[1]))
    copies = deformed_copies(cases[0], cfg)
    drawn = gallery_figure([("original", *[cases[0][k][0] for k in ("volumes", "labels")], None)]
                           + [(f"t = {t}", image, label, field) for t, image, label, field in copies])
    report.write_page(
        FOLDER / "report.html", "OmniMorph demo",
        f"One small {cfg['model.name']} learned for {history[-1]['step']} steps from {len(TRAIN)} unlabelled synthetic "
        f"volumes in three modes, then registered {len(cases)} pairs of subjects it had never seen.",
        [("", report.cards_html(cards)),
         ("Pairs", report.table_html(header, rows, "Mean Dice over the labels of each held-out pair.", formats)),
         ("Before and after", pictures),
         ("Deformed copies", report.figure_html(
             drawn, "Random deformations of one subject at growing t: what mode 1 undoes, and what augmentation draws "
                    "from. Labels move along (outlines).")),
         ("Training", report.figure_html(curves_figure(history, panels), "Averages of each epoch."))])
    print("\n" + report.text_table(header, rows, formats))
    return {"dice_before": before, "dice_after": after, "folding_percent": folding, "seconds": seconds}


def read_history(run):
    """The epochs' lines of the run's log; of an epoch that ran twice after a restart, the last."""
    epochs = {line["epoch"]: line for line in read_lines(run / "rank0.jsonl") if line["event"] == "epoch"}
    return [{**line, "epoch": epoch + 1} for epoch, line in sorted(epochs.items())]


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make synthetic data, train, register held-out pairs, write a report.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of Config/config_demo.yaml; may be repeated")
    args = parser.parse_args(argv)
    started = time.time()
    cfg = load_config(ROOT / CONFIG, args.overrides)
    shutil.rmtree(FOLDER, ignore_errors=True)
    size = cfg["data.img_size"]
    write_dataset(FOLDER / "data", [*TRAIN, *VALIDATION], size)
    write_dataset(FOLDER / "held_out", HELD_OUT, size)
    command = [sys.executable, str(ROOT / "OM_train_3modes.py"), "--config", str(ROOT / CONFIG)]
    code = subprocess.run(command + [word for override in args.overrides for word in ("--set", override)]).returncode
    if code:
        raise InputError(f"the training ended with exit code {code}; what it said stands above.")
    device = pick_device(cfg["run.device"])
    prepare_device(device, cfg["run.threads"])
    run = run_folder(cfg["run.models"], cfg["data.name"], cfg["model.name"])
    newest = checkpoint.newest(run)
    net = build_network(cfg, device)
    checkpoint.load_weights(net, checkpoint.load(run / newest, map_location=device), run / newest)
    print(f"\nregistering {len(HELD_OUT)} held-out pairs with {run / newest} on {describe(device)}")
    with torch.no_grad():
        cases = register_held_out(net.eval(), cfg, device)
        result = write_report(cases, read_history(run), cfg, time.time() - started)
    print(f"\nDice {result['dice_before']:.3f} -> {result['dice_after']:.3f}, folded voxels "
          f"{result['folding_percent']:.3f} %, {result['seconds'] / 60:.1f} minutes")
    print(f"report: {(FOLDER / 'report.html').resolve()}")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(STOP)
