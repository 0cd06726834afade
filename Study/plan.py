"""Plan training for a folder of volumes and this machine: a config, and its cost before it runs.

The grid comes from the volumes: their usual voxel size and the box around their content. The network is one of three
that have been shown to learn, chosen by the size of that grid. The training program's --dry-run counts memory and
operations of a step and measures the speed of this machine.
"""
import collections
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

from Dataloader.datalist import MOST_CHANNELS, list_volumes
from Dataloader.grids import air_for_filler, foreground_box, intensity_range, to_canonical
from Dataloader.nifti import is_segmentation, open_nifti, read_channels, read_header
from Dataloader.volume import axes, without_ones
from Inference.outputs import make_folder
from Report.page import cards_html, findings_html, table_html, write_page
from Runtime.config import load_config
from Runtime.device import pick_device
from Runtime.errors import DONE, STOP, InputError
from Runtime.files import is_unedited, require_apart, signed, write_file

# (most voxels of the grid, config, multiple of the sides, number of steps found to be enough)
NETWORKS = ((56 * 64 * 56, "config_hippocampus.yaml", 8, 5_000), (112 ** 3, "config_medium.yaml", 16, 20_000),
            (128 ** 3, "config_om.yaml", 16, 100_000))
OPENED = 12  # volumes to read whole, evenly spread over the folder; of the others only headers are read
FEW_LABELLED = 10  # labelled volumes up to which joined atlases are as good as a trained network or better
HELD_OUT = 0.1  # share of the subjects
EPOCH_STEPS = 300  # fewest steps of an epoch, about: each one ends with a validation, a picture and a checkpoint
ROOM = 0.8  # share of the free memory that a step may use
ALONE = {"loss": {"dist": 0.0, "ang": 0.0, "regul": 0.0, "contrastive": 0.0}}  # mode 3 alone: for registration


def plan(args):
    """`omnimorph plan`; returns the exit code."""
    require_apart([Path(args.out) / "config.yaml"], is_unedited)
    items = list_volumes(args.data, args.subject_pattern, channels=None)
    seen, bad = look(args.data, items)
    if not seen:
        raise InputError(f"{args.data}: none of its {len(items)} volumes can be read: {bad[0][1]}")
    if not any("box_mm" in row for row in seen):
        raise InputError(f"{args.data}: none of the volumes that were opened can be used: {bad[0][1]}")
    args.channels = seen[0]["channels"]
    device, out = pick_device(args.device), Path(args.out)
    make_folder(out)
    chosen = choose(seen, args, device, out)
    labelled = sum(item["label"] is not None for item in items)
    advice = advise(args.purpose, len(items), labelled, args.data, args.channels)
    steps = [f"omnimorph {name} --config {shlex.quote(str(out / 'config.yaml'))}" for name in ("prepare", "train")]
    page = write_plan_page(out, args, items, seen, bad, chosen, advice, steps)
    for name, reason in bad:
        print(f"warning: {name} is left out: {reason}", file=sys.stderr)
    print(f"{advice}\n\nto train:\n  {steps[0]}\n  {steps[1]}\n\nreport: {page.resolve()}")
    print(json.dumps({"config": str(out / "config.yaml"), "volumes": len(items), "left_out": len(bad), **chosen}))
    return STOP if args.strict and bad else DONE


def look(source, items):
    """Measure the volumes: a list of dicts with size_mm (canonical), voxel_mm and, for the OPENED ones, box_mm and
    range; and (id, reason) of unusable volumes. source: start of an error message."""
    seen, bad = [], []
    opened = {items[int(place)]["id"] for place in np.linspace(0, len(items) - 1, min(OPENED, len(items)))}
    for item in items:
        try:
            dims, channels = axes_of(item)
            shape, affine = read_header(item["image"], dims, channels)
            row = {"id": item["id"], "dims": dims, "shape": shape, "channels": channels}
            canonical, turned = to_canonical(np.empty(shape, np.uint8), affine)
            row["voxel_mm"] = np.linalg.norm(turned[:3, :dims], axis=0)
            row["size_mm"] = np.array(canonical.shape) * row["voxel_mm"]
            if item["id"] in opened:
                images, affine = read_channels(item["image"], dims, 1 if "channels" in item else channels)
                image, turned = to_canonical(images[0], affine)
                if is_segmentation(image):
                    raise InputError(f"{item['image']}: looks like a segmentation; give its image.")
                image = air_for_filler(image)
                low, high = intensity_range(image)
                box = foreground_box(image > low + 0.05 * (high - low))
                row.update(box_mm=(box[1] - box[0]) * row["voxel_mm"], range=(low, high))
            seen.append(row)
        except InputError as error:
            bad.append((item["id"], str(error)))
    if len({row["dims"] for row in seen}) > 1:
        raise InputError(f"{items[0]['image'].parent}: 2D and 3D volumes are mixed; plan for one kind at a time.")
    counts = collections.Counter(row["channels"] for row in seen).most_common()
    if len(counts) > 1 and any("channels" in item for item in items):  # grouped by their list
        (one, first), (other, second), *_ = sorted({row["channels"]: row["id"] for row in seen}.items())
        raise InputError(f"{source}: {first} has {one} channel{'s' * (one > 1)} and {second} has {other}; give all "
                         "volumes the same ones.")
    for number, _ in counts[1:]:  # such as a short time series among volumes
        bad += [(row["id"], f"it has {number} channels, and most volumes have {counts[0][0]}.") for row in seen
                if row["channels"] == number]
    return [row for row in seen if row["channels"] == counts[0][0]], bad


def axes_of(item):
    """The number of axes of a volume, and of its channels: of one file, those along its fourth axis."""
    found = open_nifti(item["image"]).shape
    shape = without_ones(found)
    if "channels" not in item and len(shape) == 4 and shape[3] <= MOST_CHANNELS:
        return 3, shape[3]
    return axes(item["image"], found), 1 + len(item.get("channels", []))


def choose(seen, args, device, out):
    """Write config.yaml with the finest grid for which a training step fits into memory. Returns: what it costs."""
    spacing = float(np.median([np.exp(np.log(row["voxel_mm"]).mean()) for row in seen]))
    boxes = [row["box_mm"] for row in seen if "box_mm" in row]
    extent = np.minimum(np.percentile([row["size_mm"] for row in seen], 95, axis=0), 1.05 * np.max(boxes, axis=0))
    while True:
        size, (_, base, multiple, steps) = grid(extent, spacing)
        write_config(out, args, base, size, spacing, len(seen))
        cost = dry_run(out, device)
        need = cost["step_memory_bytes"].get(device.type, cost["step_memory_bytes"]["cpu"])
        room = ROOM * (cost["free_bytes"] or (total_memory() if device.type == "cpu" else math.inf))
        fits = need <= room and cost["fits"] is not False  # a step is tried too: it may need more than estimated
        if fits or max(size) <= 2 * multiple:
            break
        spacing *= 1.15
    if not fits:
        raise InputError(f"{args.data}: a training step does not fit into the memory of {device} even at "
                         f"{spacing:.3g} mm (estimated at {need / 2 ** 30:.1f} GiB, {room / 2 ** 30:.1f} are free); "
                         "train on a machine with more memory.")
    epochs = -(-steps // cost["steps_per_epoch"])
    write_config(out, args, base, size, spacing, len(seen), epochs)
    step_s, steps = cost["step_seconds"], epochs * cost["steps_per_epoch"]
    return {"img_size": [int(n) for n in size], "spacing_mm": float(f"{spacing:.4g}"), "base": base,
            "memory_gib": round(need / 2 ** 30, 2), "step_seconds": round(step_s, 2),
            "epoch_minutes": round(step_s * cost["steps_per_epoch"] / 60, 2), "epochs": epochs, "steps": steps,
            "hours": round(step_s * steps / 3600, 2)}


def total_memory():
    """Bytes of memory of this machine, for systems that do not report how much is free; infinite if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def grid(extent_mm, spacing_mm):
    """The sides of the training grid, and its row of NETWORKS; the last one if none is large enough."""
    for row in NETWORKS:
        multiple = row[2]
        size = np.maximum(np.ceil(extent_mm / spacing_mm / multiple - 0.05), 2).astype(int) * multiple
        if np.prod(size) <= row[0] * 1.3 or row is NETWORKS[-1]:
            return size, row


def write_config(out, args, base, size, spacing_mm, volumes, epochs=1):
    """Write config.yaml: only what differs from its base. volumes: their number, held-out ones included."""
    content = {"base": base, "model": {"dims": len(size)},
               "data": {"name": "", "root": str(Path(args.data).resolve()),
                        "train_ids": "", "val_ids": "", "val_fraction": HELD_OUT, "cache": "auto", "expect_samples": 0,
                        "subject_pattern": args.subject_pattern, "img_size": [int(n) for n in size],
                        "spacing_mm": float(f"{spacing_mm:.4g}"),
                        **({"channels": args.channels} if args.channels > 1 else {})}}
    plain = load_config(base)
    steps = (1 - HELD_OUT) * volumes * plain["data.repeats"] / plain["data.batchsize"]  # of an epoch, about
    if steps < EPOCH_STEPS:
        content["data"]["repeats"] = plain["data.repeats"] * math.ceil(EPOCH_STEPS / steps)
    finest = int(min(size)) // 4 * 4  # about one control point per two voxels; the noise is twice as wide as the image
    content["diffusion"] = {"grids": sorted({max(4, finest // 2 ** k // 4 * 4) for k in (3, 2, 1, 0)})}
    if args.purpose == "register":
        content.update(ALONE)
    content["run"] = {"epochs": epochs}
    text = (f"# Written by `omnimorph plan --data {args.data} --for {args.purpose}`. The keys are explained in "
            f"config_om.yaml; change what you like.\n{yaml.safe_dump(content, sort_keys=False)}")
    write_file(out / "config.yaml", signed(text, "# SHA-256 of the lines above, by which a later plan knows that you "
                                                 "have changed none of them: {}"))


def dry_run(out, device):
    """What the training program's dry run counts for config.yaml on a device, a dict. Raises InputError if it fails."""
    home = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-m", "omnimorph", "train", "--config", str(out / "config.yaml"), "--dry-run", "--set",
               f"run.device={device.type}"]
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise InputError(f"{out / 'config.yaml'}: {(done.stderr.strip().splitlines() or ['the dry run failed'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def advise(purpose, count, labelled, data, channels):
    """Which program serves the purpose, in a sentence or two."""
    if purpose == "augment":
        several = f"--set data.channels={channels} " if channels > 1 else ""
        return (f"To augment you need no training: omnimorph augment --model none --data {data} {several}"
                "--out Data/copies. Copies with the shapes of other volumes need none either: name those by --target "
                "and add --register.")
    if purpose == "segment":
        few = f"With labels of {labelled} of {count} volumes, "
        if not labelled:
            return "No volume has labels: draw some, or register atlases of another study with omnimorph segment."
        if labelled <= FEW_LABELLED:
            return few + f"join atlases: omnimorph segment --atlases {data} --images NEW --out Results/segment."
        return few + "a segmentation network (nnU-Net) on them and on omnimorph augment's copies does best."
    return ("To register a few pairs you need no training: use omnimorph register. This config is for thousands of "
            "pairs, for which a network that answers in a second pays off.")


def write_plan_page(out, args, items, seen, bad, chosen, advice, steps):
    """Write plan.html. steps: the commands that train. Returns: the page's path."""
    cards = [("volumes", len(items), f"{len(bad)} left out" if bad else ""),
             ("grid", " x ".join(map(str, chosen["img_size"])), f"of {chosen['spacing_mm']} mm"),
             ("memory of a step", f"{chosen['memory_gib']} GiB", ""),
             ("a step", f"{chosen['step_seconds']} s", "by a trial on noise"),
             ("the training", f"{chosen['hours']} h", f"{chosen['steps']} steps")]
    rows = [[f"{key}, mm", *(n for bound in (np.min, np.max) for n in bound([row[f"{key}_mm"] for row in seen], 0))]
            for key in ("size", "voxel")]
    ways = ["right", "front", "up"][:seen[0]["dims"]]
    ranges = [[row["id"], *row["range"]] for row in seen if "range" in row]
    told = [("ok", "advice", advice), ("ok", "to train", "; then ".join(steps)),
            *(("doubtful", "left out", f"{name}: {reason}") for name, reason in bad)]
    sections = [("", cards_html(cards) + findings_html(told)),
                ("Sizes", table_html(["", *(f"{bound}, {way}" for bound in ("least", "most") for way in ways)], rows,
                                     "Over all volumes, with their axes turned to right, front and up.",
                                     [None, *[".3g"] * (2 * len(ways))])),
                ("Intensities", table_html(["volume", "percentile 0.5", "percentile 99.5"], ranges,
                                           "These are the volumes that were opened."))]
    several = f" Each volume has {args.channels} channels." if args.channels > 1 else ""
    return write_page(out / "plan.html", "Plan", f"{args.data}, to {args.purpose}.{several}", sections)
