"""Deformed copies of labelled images: for each draw the image, its label and the field.

    python OM_augment.py --data Data/hippocampus --ids 1-60 --model none --config Config/config_hippocampus.yaml --out A
    python OM_augment.py --image I.nii.gz --label L.nii.gz --model Models/hippocampus_om_net --out A --draws 32
    python OM_augment.py --image I.nii.gz --model CKPT --target F.nii.gz --slices 3 --out A
    python OM_augment.py --data Labelled --model CKPT --target Data/hippocampus --out A

--model none takes the random deformations alone; a network then undoes what it can of them, which leaves a shape that
it finds likely, or with --target draws the image towards that one; of a whole data set without labels, towards another
volume in every draw. A draw depends on the seed, the id of the volume, its own number and the targets, and on nothing
else. The folder can be used for training as it is: dataset.json lists the draws. Run the same command again after a
kill, and it goes on. Exit codes: 0 done, 43 bad input (the other volumes are done).
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import csv
import functools
import hashlib
import io
import json
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from Dataloader.datalist import SUFFIXES, read_datalist, volume_id
from Dataloader.nifti import open_nifti, read_header, read_raw_header, read_volume, write_field, write_volume
from Dataloader.prepare import on_grid, read_beside
from Inference.augment_report import MEASURES, describe, draw_name, draw_paths, write_report
from Inference.augmentation import (
    STRIDE,
    deform,
    draw_field,
    draw_start,
    measure,
    pick_target,
    show,
    shown_kind,
    subject_number,
)
from Inference.load_model import DEFAULTS, find_checkpoint, load_model
from Runtime import run_lock
from Runtime.config import load_config
from Runtime.device import pick_device
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.files import sha256, write_file
from Runtime.workers import run_tasks

CHUNK = 4  # draws that a worker makes of a volume that it has read
STALE_S = 3600.0  # a lock that has not been touched for so long, on another machine, is dead
WORKER = {}  # what every worker has: job, config, network, items of the targets


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Write deformed copies of images with their labels and fields.")
    parser.add_argument("--image", help="one volume, .nii or .nii.gz")
    parser.add_argument("--label", help="its label image")
    parser.add_argument("--data", help="or many: folder with dataset.json, .json or .csv list, or a folder of volumes")
    parser.add_argument("--ids", default="", help='volumes of --data to take, such as "1-60,75" (default: all)')
    parser.add_argument("--model", required=True, help="checkpoint, .safetensors file or run folder; none: random "
                        "deformations without a network")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the copies go")
    parser.add_argument("--draws", type=int, default=32, help="copies of each volume (%(default)s)")
    parser.add_argument("--start", metavar="T", help="time of the random deformation, or a range of times such as "
                        "40-79: the larger the stronger (default: diffusion.timesteps - 1, the largest)")
    parser.add_argument("--target", help="volume towards which the network deforms; or a folder or list of volumes, as "
                        "for --data: every draw towards one of them, drawn at random, never itself")
    parser.add_argument("--condition", choices=("slice", "volume", "none"), help="what the network is shown of the "
                        "target (default: what it was trained with)")
    parser.add_argument("--slices", type=int, default=0, help="planes of the target that are shown (default: a random "
                        "number, as in training)")
    parser.add_argument("--stride", type=int, default=STRIDE, help="times per step of the recovery; 1 is finest and "
                        "slowest (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other draws (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes on a CPU, each with one thread "
                        "(%(default)s)")
    parser.add_argument("--config", help=f"with --model none: whose diffusion.* and data.* keys are taken (default: "
                        f"Config/{DEFAULTS.name})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key, e.g. --set diffusion.v_scale=6e-5; may be repeated")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, xpu or auto, for the network (%(default)s)")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for
# ---------------------------------------------------------------------------------------------------------------------

def check_arguments(args):
    """What can be told wrong before any file is read."""
    wrong = [
        (bool(args.image) == bool(args.data), "give either --image or --data."),
        (args.label and not args.image, "--label belongs to --image; with --data the list names the labels."),
        (args.ids and not args.data, "--ids belongs to --data; one --image is taken as it is."),
        (args.draws < 1, f"--draws {args.draws}: ask for at least 1 copy."),
        (args.workers < 1, f"--workers {args.workers}: at least 1 process is needed."),
        (args.stride < 1, f"--stride {args.stride}: the recovery goes at least 1 time on in each step."),
        (args.slices < 0, f"--slices {args.slices}: give a number of planes, or 0 for a random one."),
        (args.model != "none" and args.config, "--config is for --model none; a model has a config of its own, of "
         "which --set changes keys."),
        (args.model == "none" and args.target, "--target: only a network can deform towards it; give a --model."),
        (not args.target and args.condition not in (None, "none"), f"--condition {args.condition} is about a --target; "
         "give one."),
        (args.target and args.condition == "none", "--target: with --condition none it would not be looked at; leave "
         "out one of the two."),
    ]
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise InputError(sentence)


def read_start(text):
    """The words of --start: None, an int, or a pair of ints."""
    words = (text or "").split("-")
    if not text or all(word.strip().isdecimal() for word in words) and len(words) <= 2:
        return None if not text else int(text) if len(words) == 1 else tuple(map(int, words))
    raise InputError(f"--start {text}: give one time such as 79, or a range such as 40-79.")


def make_job(args):
    """All on which the draws depend, and how they are made: a plain dict, which goes to the workers."""
    model = None if args.model == "none" else str(find_checkpoint(args.model))
    job = {"seed": args.seed, "start": read_start(args.start), "model": model, "stride": args.stride,
           "config": str(args.config or DEFAULTS), "overrides": args.overrides, "target": args.target,
           "condition": args.condition, "slices": args.slices, "out": args.out, "device": args.device}
    prepare_worker(job)
    cfg = WORKER["cfg"]
    draw_start(job["start"], (0, 0, 0), cfg)
    if args.target:
        job["condition"] = shown_kind(args.condition, args.slices, cfg)
        for number in tqdm(range(len(WORKER["targets"])), "reading targets", unit="vol", disable=None, leave=False):
            placed_target(number)  # one that cannot be used is named before anything is drawn
        show(placed_target(0), job["condition"], job["slices"], (0, 0, 0), cfg)
        if cfg["model.condition_type"] == "volume" and job["condition"] == "slice":
            print(f"warning: {args.model} was trained with whole volumes (model.condition_type volume) and has not "
                  "learned to use a few planes; look at the draws before you use them.", file=sys.stderr)
    return job


def settings(job, cfg):
    """What must be the same for earlier draws to be kept."""
    shown = "".join(sha256(item["image"]) for item in WORKER["targets"])
    digest = {"model": job["model"] and sha256(job["model"]),
              "target": (shown if len(shown) <= 64 else hashlib.sha256(shown.encode()).hexdigest()) or None}
    kept = {key: value for key, value in cfg.items() if key.split(".")[0] in ("model", "diffusion") or key in (
        "data.img_size", "data.spacing_mm", "data.crop_above", "data.percentiles", "data.window", "run.amp")}
    plain = {**{key: job[key] for key in ("seed", "start", "stride", "condition", "slices")}, **digest, **kept}
    return json.loads(json.dumps(plain))


def claim_folder(out, job):
    """Take an empty folder, or go on in one of the same settings. Returns: the draws that are there, {name: record}."""
    path, wanted, records = out / "settings.json", settings(job, WORKER["cfg"]), read_records(out / "draws.jsonl")
    if not path.is_file():
        others = [entry.name for entry in out.iterdir() if entry.name not in ("lock.json", ".lock")]
        if others:
            raise InputError(f"{out} holds other things ({sorted(others)[0]}); name a new folder.")
    elif records:
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path}: not valid JSON ({error}); name a new folder.") from error
        for key in wanted:
            if found.get(key) != wanted[key]:
                raise InputError(f"{out} holds draws with {key} {found.get(key)}, not {wanted[key]}; name a new "
                                 "folder.")
    write_file(path, (json.dumps(wanted, indent=1) + "\n").encode())
    for unfinished in out.glob("*Tr/.*.tmp-*"):  # of a run that was killed; the lock says that no other is at work
        unfinished.unlink(missing_ok=True)
    return records


def read_records(path):
    """The draws that an earlier run has finished, {name: record}."""
    lines = path.read_text().splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may have cut the last one
    return {record["name"]: record for record in records}


def read_items(args, cfg):
    if args.data:
        return read_datalist(args.data, cfg["model.dims"], args.ids)
    return [{**read_one(args.image, cfg["model.dims"]), "label": args.label and Path(args.label)}]


def read_one(path, dims):
    """The item of a single volume, like those of `read_datalist`."""
    read_header(path, dims)
    name = volume_id(path)
    return {"id": name, "image": Path(path), "label": None, "mask": None, "subject": name, "modality": ""}


# ---------------------------------------------------------------------------------------------------------------------
# The workers
# ---------------------------------------------------------------------------------------------------------------------

def prepare_worker(job):
    """What every process needs: the config, the network, which targets there are."""
    torch.set_num_threads(1)  # the same rounding for any number of workers
    device = pick_device(job["device"])
    net, cfg = None, None
    if job["model"]:
        net, cfg = load_model(job["model"], device, job["overrides"])
    else:
        cfg = load_config(job["config"], job["overrides"])
    WORKER.update(job=job, net=net, cfg=cfg, device=device, targets=read_targets(job["target"], cfg["model.dims"]))
    placed_target.cache_clear()


def read_targets(path, dims):
    """The items that --target names: one volume, or those of a data set; none without it."""
    if not path:
        return []
    items = [read_one(path, dims)] if path.endswith(SUFFIXES) else read_datalist(path, dims)
    return [{**item, "file": item["image"].resolve()} for item in items]  # once, to be compared in every draw


@functools.lru_cache(maxsize=8)
def placed_target(number):
    """One of the targets on the training grid: (1, 1, *size)."""
    return torch.from_numpy(on_grid(WORKER["targets"][number], WORKER["cfg"], ("image",))["image"])[None, None]


def target_of(item, key):
    """The number of the target of a draw: of several any but the volume itself. None where there are no targets."""
    targets, own = WORKER["targets"], item["image"].resolve()
    others = [number for number, target in enumerate(targets) if len(targets) == 1 or target["file"] != own]
    return pick_target(others, key) if others else None


def read_item(item, dims):
    """Image (float32), affine, and the arrays with affines of what is deformed like labels, {kind: (array, affine)}."""
    image, affine = read_volume(item["image"], dims)
    beside = {}
    for kind in [kind for kind in ("label", "mask") if item[kind]]:
        beside[kind] = read_beside(item, kind, image.shape, affine)
    return image, affine, beside


def write_like(path, array, source, affine):
    """Write an array with the header and, where the file stores numbers without a scale, the dtype of `source`."""
    header, stored = read_raw_header(source), open_nifti(source).dataobj
    dtype = header.get_data_dtype().newbyteorder("=") if (stored.slope, stored.inter) == (1, 0) else array.dtype
    array = np.rint(array) if dtype.kind in "ui" and array.dtype.kind == "f" else array
    write_volume(path, array.astype(dtype), affine, header)


def try_draws(item, draws):
    """Some draws of one volume. Returns: their records; or the sentence that says why it cannot be used."""
    return attempt(item["image"], make_draws, item, draws)


def make_draws(item, draws):
    """Write some draws of one volume. Returns: their records. Raises InputError for a volume that cannot be used."""
    job, cfg, out = WORKER["job"], WORKER["cfg"], Path(WORKER["job"]["out"])
    image, affine, beside = read_item(item, cfg["model.dims"])
    digest, records = digests(item), []
    for draw in draws:
        key, condition = (job["seed"], subject_number(item["id"]), draw), None
        target = target_of(item, key)
        if target is not None:
            condition = show(placed_target(target), job["condition"], job["slices"], key, cfg).to(WORKER["device"])
        field = draw_field(image, affine, cfg, key, job["start"], WORKER["net"], condition, job["stride"],
                           beside.get("mask", (None,))[0], WORKER["device"])
        name, paths = draw_name(item, draw), draw_paths(item, draw)
        write_like(out / paths["image"], deform(image, field), item["image"], affine)
        for kind, (array, own) in beside.items():
            write_like(out / paths[kind], deform(array, field, "nearest"), item[kind], own)
        write_field(out / paths["field"], field, affine, read_raw_header(item["image"]))
        towards = "" if target is None else WORKER["targets"][target]["id"]
        records.append({"name": name, "id": item["id"], "draw": draw, "target": towards, "source": digest,
                        "bytes": sizes(paths, out), **{
                            word: round(measured, 5) for word, measured in measure(field, affine).items()}})
    return records


def sizes(paths, out):
    """Bytes of the files of a draw, by kind; None for one that is not there.

    Every file was flushed before it got its name, so one that was torn later shows by its size.
    """
    files = {kind: out / path for kind, path in paths.items()}
    return {kind: file.stat().st_size if file.is_file() else None for kind, file in files.items()}


def digests(item):
    """What the files of a volume hold, so that a changed file is deformed anew."""
    return [sha256(item[kind]) for kind in ("image", "label", "mask") if item[kind]]


def missing_draws(item, draws, records, out):
    """The draws of a volume that no earlier run has made from these files, or whose own files are not as it left them.

    Records of older versions have no sizes: those draws are made anew, for their files were not flushed.
    """
    digest, missing = digests(item) if records else None, []
    for draw in range(draws):
        record = records.get(draw_name(item, draw), {})
        if record.get("source") != digest or record.get("bytes") != sizes(draw_paths(item, draw), out):
            missing.append(draw)
    return missing


# ---------------------------------------------------------------------------------------------------------------------
# The steps
# ---------------------------------------------------------------------------------------------------------------------

def make_all(job, items, draws, workers, records):
    """Make the draws that are not there yet. Returns: records {name: record}, refused {id: why}."""
    out, refused, tasks = Path(job["out"]), {}, []
    for item in items:
        missing = missing_draws(item, draws, records, out)
        tasks += [(item, missing[first:first + CHUNK]) for first in range(0, len(missing), CHUNK)]
    left = sum(len(part) for _, part in tasks)
    bar = tqdm(total=len(items) * draws, initial=len(items) * draws - left, desc="augmenting", unit="draw")
    with bar, open(out / "draws.jsonl", "a", encoding="utf-8") as lines:
        for (item, part), made in results_of(job, tasks, workers):
            bar.update(len(part))
            run_lock.touch(out)
            if isinstance(made, str):
                refused[item["id"]] = made
                continue
            records.update({record["name"]: record for record in made})
            lines.writelines("\n" * (number == 0) + json.dumps(record) + "\n" for number, record in enumerate(made))
            lines.flush()
    return records, refused


def results_of(job, tasks, workers):
    """Yield ((item, draws), records or the reason of a refusal), from this process or from `workers` others."""
    if min(workers, len(tasks)) <= 1 or WORKER["device"].type != "cpu":
        return ((task, try_draws(*task)) for task in tasks)
    return run_tasks(try_draws, tasks, workers, job["out"], prepare_worker, (job,))


def write_lists(out, items, draws, records):
    """dataset.json, which every reader of Decathlon lists takes; draws.csv and draws.jsonl, in the order of the list.

    Returns: the records of these draws, in that order."""
    entries, kept = [], []
    for item in items:
        for draw in range(draws):
            kept.append(records[draw_name(item, draw)])
            words = {"modality": item["modality"]} if item["modality"] else {}
            entries.append({**draw_paths(item, draw), "subject": item["subject"], **words, "draw": draw})
    write_file(out / "draws.jsonl", "".join(json.dumps(record) + "\n" for record in kept).encode())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    named = ("name", "id", "draw", "target")
    writer.writerow([*named, *MEASURES.values()])
    writer.writerows([record[word] for word in (*named, *MEASURES)] for record in kept)
    write_file(out / "draws.csv", text.getvalue().encode())
    content = {"name": "deformed copies", "numTraining": len(entries), "training": entries}
    write_file(out / "dataset.json", (json.dumps(content, indent=1) + "\n").encode())
    return kept


def run(args):
    """Do what the command line asks for. Returns the exit code."""
    check_arguments(args)
    job, out = make_job(args), Path(args.out)
    items = read_items(args, WORKER["cfg"])
    out.mkdir(parents=True, exist_ok=True)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        records = claim_folder(out, job)
        records, refused = make_all(job, items, args.draws, args.workers, records)
        items = [item for item in items if item["id"] not in refused]
        if items:
            kept = write_lists(out, items, args.draws, records)
            lead = describe(job, WORKER["cfg"])
            print(json.dumps(write_report(out, lead, items, kept, refused, WORKER["cfg"]["model.dims"])))
    finally:
        run_lock.unlock(out, token)
    for reason in refused.values():
        print(f"error: {reason}", file=sys.stderr)
    return STOP if refused else DONE


def main(argv=None):
    args, threads = parse_arguments(argv), torch.get_num_threads()
    try:
        code = attempt(args.out, run, args)
        if not isinstance(code, str):
            return code
        print(f"error: {code}", file=sys.stderr)
        return STOP
    except OSError as error:
        print(f"error: --out {args.out}: reading or writing failed ({error}); make room, or correct the path, and run "
              "the same command again: it goes on.", file=sys.stderr)
        return STOP
    except KeyboardInterrupt:
        print("interrupted: run the same command again, it goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
