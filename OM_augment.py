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
import functools
import json
import signal
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from Dataloader.datalist import read_datalist, volume_id
from Dataloader.nifti import SUFFIXES, read_header, read_raw_header, read_volume, write_field
from Dataloader.prepare import on_grid, read_beside
from Inference.augment_report import describe, write_report
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
from Inference.draws import (
    append_records,
    claim_folder,
    draw_name,
    draw_paths,
    draw_settings,
    file_sizes,
    missing_draws,
    source_digests,
    write_lists,
)
from Inference.labels import LABELS
from Inference.load_model import DEFAULTS, find_checkpoint, load_model
from Inference.nnunet import cases_of, check_name, require_one_grid, write_dataset
from Inference.outputs import write_moved
from Runtime import run_lock
from Runtime.config import load_config
from Runtime.device import pick_device
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.workers import run_tasks

CHUNK = 4  # draws that a worker makes of a volume at a time: it reads the volume once for all of them
STALE_S = 3600.0  # a lock of another machine that nobody has touched for so long belongs to a dead process
WORKER = {}  # of each process, from `prepare_worker`: job, cfg, net, device, targets


# ---------------------------------------------------------------------------------------------------------------------
# What is asked for
# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Write deformed copies of images with their labels and fields.")
    parser.add_argument("--image", help="one volume, .nii or .nii.gz")
    parser.add_argument("--label", help="its label image")
    parser.add_argument("--data", help="or many: folder with dataset.json, .json or .csv list, or a folder of volumes")
    parser.add_argument("--ids", default="", help='volumes of --data to take, such as "1-60,75" (default: all)')
    parser.add_argument("--model", required=True, help="checkpoint, .safetensors file or run folder; universal: the "
                        "network for any volumes; none: random deformations without a network")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the copies go")
    parser.add_argument("--nnunet", metavar="NAME", help="write originals and copies as a data set of nnU-Net v2 too, "
                        "such as Dataset501_Brains; X_0000, X_0001 are deformed alike then, as channels of X")
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
    parser.add_argument("--labels", choices=LABELS, default="smooth", help="how labels and masks are carried: smooth "
                        "(each one smoothed slightly and sampled linearly, the largest wins) or nearest, the label of "
                        "the nearest voxel (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other draws (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes on a CPU, each with one thread "
                        "(%(default)s)")
    parser.add_argument("--config", help=f"with --model none: whose diffusion.* and data.* keys are taken (default: "
                        f"Config/{DEFAULTS.name})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one key, e.g. --set diffusion.v_scale=6e-5; may be repeated")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, xpu or auto, for the network (%(default)s)")
    return parser.parse_args(argv)


def check_arguments(args):
    """Raise InputError for options that are wrong or do not fit together, before any file is read."""
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
    """The words of --start as `draw_start` takes them: None, an int, or a pair of ints."""
    if not text:
        return None
    times = text.split("-")
    if len(times) > 2 or not all(time.strip().isdecimal() for time in times):
        raise InputError(f"--start {text}: give one time such as 79, or a range such as 40-79.")
    return int(times[0]) if len(times) == 1 else (int(times[0]), int(times[1]))


def make_job(args):
    """All that the draws depend on, and how they are made: a plain dict, which goes to the workers.

    Also makes this process ready to draw. Raises InputError for whatever of it cannot be used.
    """
    model = None if args.model == "none" else str(find_checkpoint(args.model))
    job = {"seed": args.seed, "start": read_start(args.start), "model": model, "stride": args.stride,
           "config": str(args.config or DEFAULTS), "overrides": args.overrides, "target": args.target,
           "condition": args.condition, "slices": args.slices, "labels": args.labels, "out": args.out,
           "device": args.device}
    prepare_worker(job)
    cfg = WORKER["cfg"]
    draw_start(job["start"], (0, 0, 0), cfg)  # refuses a time that the config does not have
    if args.target:
        job["condition"] = shown_kind(args.condition, args.slices, cfg)
        check_targets(job, cfg)
        if cfg["model.condition_type"] == "volume" and job["condition"] == "slice":
            print(f"warning: {args.model} was trained with whole volumes (model.condition_type volume) and has not "
                  "learned to use a few planes; look at the draws before you use them.", file=sys.stderr)
    return job


def check_targets(job, cfg):
    """Read all targets once: one that cannot be used is named before anything is drawn."""
    for number in tqdm(range(len(WORKER["targets"])), "reading targets", unit="vol", disable=None, leave=False):
        placed_target(number)
    show(placed_target(0), job["condition"], job["slices"], (0, 0, 0), cfg)


def read_items(args, cfg):
    """The volumes to deform, as `read_datalist` lists them; with --nnunet the cases, see Inference/nnunet.py."""
    dims = cfg["model.dims"]
    if args.data:
        items = read_datalist(args.data, dims, args.ids, channels=cfg["data.channels"])
    else:
        items = [read_one(args.image, dims)]
        items[0]["label"] = Path(args.label) if args.label else None
    if args.nnunet:
        check_name(args.nnunet)
        items = cases_of(items)
        for item in items:
            require_one_grid(item, dims)
    return items


def read_one(path, dims):
    """The item of a single volume, like those of `read_datalist`."""
    read_header(path, dims)
    name = volume_id(path)
    return {"id": name, "image": Path(path), "label": None, "mask": None, "subject": name, "modality": ""}


# ---------------------------------------------------------------------------------------------------------------------
# The draws of one volume, in this process or a worker
# ---------------------------------------------------------------------------------------------------------------------

def prepare_worker(job):
    """Fill WORKER: what every process needs for its draws."""
    torch.set_num_threads(1)  # the same rounding for any number of workers
    device = pick_device(job["device"])
    net = None
    if job["model"]:
        net, cfg = load_model(job["model"], device, job["overrides"])
    else:
        cfg = load_config(job["config"], job["overrides"])
    WORKER.update(job=job, net=net, cfg=cfg, device=device,
                  targets=read_targets(job["target"], cfg["model.dims"], cfg["data.channels"]))
    placed_target.cache_clear()


def read_targets(path, dims, channels):
    """The items of the volumes that --target names, each with its resolved path as "file"; none without --target."""
    if not path:
        return []
    items = [read_one(path, dims)] if path.endswith(SUFFIXES) else read_datalist(path, dims, channels=channels)
    return [{**item, "file": item["image"].resolve()} for item in items]


@functools.lru_cache(maxsize=8)
def placed_target(number):
    """One of the targets on the training grid: (1, C, *size)."""
    cfg = WORKER["cfg"]
    placed = torch.from_numpy(on_grid(WORKER["targets"][number], cfg, ("image",))["image"])
    return placed.view(1, cfg["data.channels"], *placed.shape[-cfg["model.dims"]:])


def target_of(item, rng_key):
    """The number of the target of a draw: any, but of several not the volume itself. None without targets."""
    targets, own = WORKER["targets"], item["image"].resolve()
    others = [number for number, target in enumerate(targets) if len(targets) == 1 or target["file"] != own]
    return pick_target(others, rng_key) if others else None


def read_item(item, dims):
    """Read a volume: image (D, H, W) or (H, W) float32, affine 4x4, {kind: int16 array} of its label and mask."""
    image, affine = read_volume(item["image"], dims)
    label_maps = {}
    for kind in ("label", "mask"):
        if item[kind]:
            label_maps[kind] = read_beside(item, kind, image.shape, affine)
    return image, affine, label_maps


def try_draws(item, draws):
    """Make some draws of one volume. Returns: their records; or the sentence that says why it cannot be used."""
    return attempt(item["image"], make_draws, item, draws)


def make_draws(item, draws):
    """Write some draws of one volume. draws: their numbers. Returns: their records."""
    job, cfg = WORKER["job"], WORKER["cfg"]
    image, affine, label_maps = read_item(item, cfg["model.dims"])
    mask = label_maps["mask"][0] if "mask" in label_maps else None
    channels = [read_volume(path, image.ndim)[0] for path in item.get("channels", [])] if WORKER["net"] else []
    digests, records = source_digests(item), []
    for draw in draws:
        rng_key = (job["seed"], subject_number(item["id"]), draw)
        target = target_of(item, rng_key)
        condition = None
        if target is not None:
            condition = show(placed_target(target), job["condition"], job["slices"], rng_key, cfg).to(WORKER["device"])
        field = draw_field(image, affine, cfg, rng_key, job["start"], WORKER["net"], condition, job["stride"], mask,
                           WORKER["device"], channels[:cfg["data.channels"] - 1])
        sizes = write_draw(Path(job["out"]), item, draw, image, affine, label_maps, field, job["labels"])
        measures = {name: round(value, 5) for name, value in measure(field, affine).items()}
        target_id = "" if target is None else WORKER["targets"][target]["id"]
        records.append({"name": draw_name(item, draw), "id": item["id"], "draw": draw, "target": target_id,
                        "source": digests, "bytes": sizes, **measures})
    return records


def write_draw(out, item, draw, image, affine, label_maps, field, labels):
    """Write the files of one draw with the headers and number types of its volume. Returns: their sizes.

    label_maps: {kind: (array, affine)}. field: (N, *spatial) in voxels. labels: how they are carried.
    """
    paths = draw_paths(item, draw)
    header = read_raw_header(item["image"])
    write_moved(out / paths["image"], deform(image, field), item["image"], affine, header)
    for channel, path in enumerate(item.get("channels", []), 1):
        array, own_affine = read_volume(path, image.ndim)
        write_moved(out / paths[f"channel{channel}"], deform(array, field), path, own_affine, read_raw_header(path))
    for kind, (array, own_affine) in label_maps.items():
        deformed = deform(array, field, labels)
        write_moved(out / paths[kind], deformed, item[kind], own_affine, read_raw_header(item[kind]))
    write_field(out / paths["field"], field, affine, header)
    return file_sizes(paths, out)


# ---------------------------------------------------------------------------------------------------------------------
# All volumes
# ---------------------------------------------------------------------------------------------------------------------

def make_all(job, items, draws, workers, records):
    """Make the draws that are not there yet.

    draws: how many of each volume. records: of the draws that are there, {name: record}.
    Returns: records with those that were made; refused, {id: why}.
    """
    out, refused, tasks = Path(job["out"]), {}, []
    for item in items:
        missing = missing_draws(item, draws, records, out)
        tasks += [(item, missing[first:first + CHUNK]) for first in range(0, len(missing), CHUNK)]
    total, left = len(items) * draws, sum(len(numbers) for _, numbers in tasks)
    bar = tqdm(total=total, initial=total - left, desc="augmenting", unit="draw")
    with bar, open(out / "draws.jsonl", "a", encoding="utf-8") as file:
        for (item, numbers), made in results_of(job, tasks, workers):
            bar.update(len(numbers))
            run_lock.touch(out)
            if isinstance(made, str):
                refused[item["id"]] = made
                continue
            records.update({record["name"]: record for record in made})
            append_records(file, made)
    return records, refused


def results_of(job, tasks, workers):
    """Yield ((item, numbers of draws), what `try_draws` returns), from this process or from `workers` others."""
    if min(workers, len(tasks)) <= 1 or WORKER["device"].type != "cpu":
        return ((task, try_draws(*task)) for task in tasks)
    return run_tasks(try_draws, tasks, workers, job["out"], prepare_worker, (job,))


def run(args):
    """Do what the command line asks for. Returns the exit code."""
    check_arguments(args)
    job, out = make_job(args), Path(args.out)
    cfg = WORKER["cfg"]
    items = read_items(args, cfg)
    out.mkdir(parents=True, exist_ok=True)
    token = run_lock.lock(out, STALE_S, instead="name another --out")
    try:
        records = claim_folder(out, draw_settings(job, cfg, WORKER["targets"]))
        records, refused = make_all(job, items, args.draws, args.workers, records)
        items = [item for item in items if item["id"] not in refused]
        if items:
            kept = write_lists(out, items, args.draws, records)
            if args.nnunet:
                folder = write_dataset(out, args.nnunet, items, args.draws, cfg["model.dims"], args.data)
                print(f"nnU-Net: {folder.resolve()}", file=sys.stderr)
            summary = write_report(out, describe(job, cfg), items, kept, refused, cfg["model.dims"])
            print(json.dumps(summary))
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
