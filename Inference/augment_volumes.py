"""What OM_augment.py does with its options: the draws of all volumes, in this process or in several."""
import functools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from Dataloader.datalist import (
    are_numbered_channels,
    is_one_volume,
    list_volumes,
    name_subjects,
    select,
    trainable,
    volume_id,
)
from Dataloader.formats import place_of, same_volume
from Dataloader.grids import require_same_grid
from Dataloader.nifti import (
    ROUNDED,
    into_plane,
    one_plane,
    read_header,
    read_label,
    read_numbers,
    read_raw_header,
    read_volume,
    require_image,
    write_field,
)
from Dataloader.prepare import on_grid, read_beside
from Inference.augment_report import describe, write_report
from Inference.augmentation import (
    deform,
    draw_field,
    draw_start,
    draw_turn,
    measure,
    pick_target,
    show,
    shown_kind,
    subject_number,
)
from Inference.choices import DEFAULTS, DRAWS, STRIDE
from Inference.draws import (
    claim_folder,
    draw_name,
    draw_paths,
    draw_settings,
    file_sizes,
    missing_draws,
    source_digests,
    write_lists,
)
from Inference.labels import carry, without_affine
from Inference.load_model import find_checkpoint, load_model
from Inference.nnunet import (
    cases_of,
    grouped,
    require_no_negative,
    require_own_dataset,
    write_dataset,
    write_splits,
)
from Inference.outputs import grid_header, write_moved
from Inference.registration import register
from Runtime import run_lock
from Runtime.config import load_config
from Runtime.device import pick_device, prepare_device
from Runtime.errors import DONE, STOP, InputError, attempt
from Runtime.keyed_random import generator
from Runtime.workers import run_tasks

CHUNK = 4  # draws per task: a worker reads the volume once for all of them
WORKER = {}  # set in each process by `prepare_worker`: job, cfg, net, device, targets


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------

def make_job(args):
    """All settings of the draws, as a plain dict to pass to the workers. Also prepares this process to draw."""
    model = None if args.model == "none" else str(find_checkpoint(args.model))
    job = {**vars(args), "model": model, "stride": args.stride or STRIDE, "config": str(args.config or DEFAULTS),
           "unusable": {}}  # {id of a target: reason}
    prepare_worker(job)
    cfg = WORKER["cfg"]
    if args.stride and cfg["copies.recover"] == "published":
        raise InputError("--stride: copies.recover published uses every time step; leave out --stride, or set "
                         "copies.recover to scaled.")
    draw_start(job["start"], (0, 0, 0), cfg)  # refuses a time that the config does not have
    leave_out_unusable_targets(job)
    if args.model != "none" and not args.target and not (cfg["loss.dist"] or cfg["loss.ang"]):
        print(f"warning: {args.model} was not trained to recover (loss.dist and loss.ang are 0), so its copies are no "
              "likelier than random ones; use --model none, or name a --target, best with --register.", file=sys.stderr)
    if args.target and args.register is None:
        job["condition"] = shown_kind(args.condition, args.slices, cfg)
        show(placed_target(0), job["condition"], job["slices"], (0, 0, 0), cfg)
        if cfg["model.condition_type"] == "volume" and job["condition"] == "slice":
            print(f"warning: {args.model} was trained with whole volumes (model.condition_type volume) and has not "
                  "learned to use a few planes; look at the draws before you use them.", file=sys.stderr)
    return job


def leave_out_unusable_targets(job):
    """Read all targets before anything is drawn, and leave out those that cannot be used, each with a warning.

    Raises InputError if none is left.
    """
    targets = WORKER["targets"]
    for number, target in enumerate(tqdm(targets, "reading targets", unit="vol", disable=None, leave=False)):
        found = attempt(target["image"], placed_target, number)
        if isinstance(found, str):
            job["unusable"][target["id"]] = found
    if targets and len(job["unusable"]) == len(targets):
        raise InputError(job["unusable"][targets[0]["id"]])
    for name, reason in job["unusable"].items():
        print(f"warning: the target {name} is left out: {reason}", file=sys.stderr)
    set_targets(targets, job)


def copies_of_each(args, items):
    """Number of copies of each volume. Raises InputError if there are fewer targets to register to."""
    if args.register is None:
        return args.draws or DRAWS
    fewest, identity = min((len(targets_of(item["image"])), item["id"]) for item in items)
    if (args.draws or 1) > fewest:
        raise InputError(f"--target: it holds {fewest} volume{'s' * (fewest != 1)} that {identity} can be registered "
                         "to, each for one copy; name others, or ask for fewer --draws.")
    return args.draws or fewest


def read_items(args, cfg):
    """The volumes to deform, as `read_datalist` lists them; with --nnunet the cases, see Inference/nnunet.py."""
    dims = cfg["model.dims"]
    if args.data:
        items = list_volumes(args.data, channels=cfg["data.channels"])
        items = select(args.data, trainable(args.data, items), args.ids)  # each is opened when its turn comes
        if not args.nnunet and cfg["data.channels"] == 1 and are_numbered_channels(items):
            print(f"warning: {args.data}: the names of its files end in 0000, 0001 and so on, as those of channels "
                  "do, but each one is deformed by itself; to deform the channels of a case together, give "
                  f"{'--set data.channels=N' if args.model == 'none' else '--nnunet'}.", file=sys.stderr)
    else:
        if args.model != "none" and cfg["data.channels"] > 1:
            raise InputError(f"--image: {args.model} was trained with {cfg['data.channels']} channels of each volume, "
                             "and this is one; give them by --data, as a folder with X_0000 and X_0001, or as a list.")
        items = [read_one(args.image, dims)]
        items[0]["label"] = Path(args.label) if args.label else None
    return cases_of(args.nnunet, items) if args.nnunet else items


def read_one(path, dims):
    """The item of a single volume, like those of `read_datalist`."""
    read_header(path, dims)
    path = Path(path)  # without a slash after the name of a folder of slices
    item = {"id": volume_id(path), "image": path, "label": None, "mask": None, "subject": "", "modality": ""}
    name_subjects(path.parent, [item])
    return item


# ---------------------------------------------------------------------------------------------------------------------
# The draws of one volume, in this process or a worker
# ---------------------------------------------------------------------------------------------------------------------

def prepare_worker(job):
    """Fill WORKER with what every process needs for its draws."""
    device = pick_device(job["device"])
    prepare_device(device, 1)  # one thread: the same rounding for any number of workers
    net = None
    if job["model"]:
        net, cfg = load_model(job["model"], device, job["overrides"])
    else:
        cfg = load_config(job["config"], job["overrides"])
    targets, path = [], job["target"]
    if path:
        targets = [read_one(path, cfg["model.dims"])] if is_one_volume(path) else trainable(
            path, list_volumes(path, channels=cfg["data.channels"]))  # each is opened when its turn comes
    if job["nnunet"] and are_numbered_channels(targets):  # a case, and not each of its channels, is a target
        targets = [{**case, "channels": case["channels"][:cfg["data.channels"] - 1]} for case in grouped(targets)]
    WORKER.update(job=job, net=net, cfg=cfg, device=device)
    set_targets(targets, job)


def set_targets(targets, job):
    """Let this process use those targets of a list that are not unusable."""
    WORKER["targets"] = [target for target in targets if target["id"] not in job["unusable"]]
    for each in (placed_target, targets_of, place_once):
        each.cache_clear()


@functools.lru_cache(maxsize=8)
def placed_target(number):
    """One of the targets on the training grid: (1, C, *size)."""
    cfg = WORKER["cfg"]
    placed = torch.from_numpy(on_grid(WORKER["targets"][number], cfg, ("image",))["image"])
    return placed.view(1, cfg["data.channels"], *placed.shape[-cfg["model.dims"]:])


place_once = functools.cache(place_of)  # thousands of targets are compared with each of thousands of volumes


@functools.lru_cache(maxsize=None)
def targets_of(image):
    """Indices of the targets for the volume in this file, excluding the volume itself and copies of it."""
    return [number for number, target in enumerate(WORKER["targets"])
            if not same_volume(target["image"], image, place_once)]


def target_of(item, rng_key):
    """Index of a draw's target; the volume itself only if there is no other. None without targets."""
    others = targets_of(item["image"]) or [*range(len(WORKER["targets"]))]
    if WORKER["job"]["register"] is not None:  # each of them once
        seed, subject, draw = rng_key
        return others[int(torch.randperm(len(others), generator=generator(seed, "order of targets", subject))[draw])]
    return pick_target(others, rng_key) if others else None


def read_item(item, dims, labels, nnunet):
    """The arrays of a volume to deform, image first: tuples of kind, path, array, affine 4x4 and warp mode.

    labels: warp mode of label maps. nnunet: whether nnU-Net will read them.
    """
    image, affine = read_volume(item["image"], dims)
    require_image(item["image"], image)
    if 1 in image.shape:
        raise InputError(f"{item['image']}: {one_plane(image.shape)}")
    files = [("image", item["image"], image, affine, "bilinear")]
    for number, path in enumerate(item.get("channels", []), 1):
        array, own_affine = read_volume(path, dims)
        require_same_grid(f"{path}: the channel", array.shape, own_affine, item["image"], image.shape, affine,
                          "resample it")
        files.append((f"channel{number}", path, array, own_affine, "bilinear"))
    for kind, read in (("label", read_label), ("mask", read_numbers)):
        if item[kind]:
            array, own_affine = read_beside(item, kind, image.shape, affine, read)
            if kind == "label" and nnunet:
                require_no_negative(array, item[kind])
            whole = np.rint(array)  # a scale factor in the header may change whole numbers a little
            soft = kind == "mask" and (np.abs(array - whole) > ROUNDED * np.maximum(1, np.abs(whole))).any()
            files.append((kind, item[kind], array if soft or kind == "label" else whole, own_affine,
                          "bilinear" if soft else labels))
    return files


def try_draws(item, draws):
    """Make some draws of one volume. Returns: their records, or a sentence that says why the volume is unusable."""
    return attempt(item["image"], make_draws, item, draws)


def make_draws(item, draws):
    """Write some draws of one volume. draws: their numbers. Returns: their records."""
    job, out = WORKER["job"], Path(WORKER["job"]["out"])
    digests = source_digests(item)  # before the files are read: one that is replaced meanwhile is deformed again
    volume = read_item(item, WORKER["cfg"]["model.dims"], job["labels"], job["nnunet"])
    records = []
    for draw in draws:
        rng_key = (job["seed"], subject_number(item["id"]), draw)
        target, paths = target_of(item, rng_key), draw_paths(item, draw)
        made = random_copy(volume, target, rng_key) if job["register"] is None else registered_copy(item, target)
        field, affine, matrix, grid = made["field"], made["affine"], made["matrix"], made["file"]
        # Data types come from the volume, headers from the grid, but not the range in which to show the target.
        for kind, path, array, own_affine, mode in volume:
            write_moved(out / paths[kind], made["carry"](array, own_affine, mode), path,
                        own_affine if grid is None else affine,
                        read_raw_header(path) if grid is None else grid_header(read_raw_header(grid)))
        write_field(out / paths["field"], into_plane(field, affine, volume[0][3]), affine,
                    read_raw_header(grid or item["image"]))
        shape = field if matrix is None else without_affine(field, matrix, affine)
        measures = {name: round(value, 5) for name, value in measure(shape, affine).items()}
        records.append({"name": draw_name(item, draw), "id": item["id"], "draw": draw,
                        "target": "" if target is None else WORKER["targets"][target]["id"], "matrix": matrix,
                        "source": digests, "bytes": file_sizes(paths, out), **measures})
    return records


def random_copy(volume, target, rng_key):
    """A random copy on the volume's own grid. volume: from `read_item`. target: its index, or None.

    Returns: dict of field, (N, *spatial) in voxels; affine, of its grid; file, the one with this grid (None: each file
    keeps its own); matrix, the affine part of the field, as a list, or None; carry, a function of (array, its affine,
    mode as in `deform`).
    """
    job, cfg, device = WORKER["job"], WORKER["cfg"], WORKER["device"]
    (_, _, image, affine, _), *others = volume
    mask = next((array for kind, _, array, *_ in others if kind == "mask"), None)
    channels = [array for kind, _, array, *_ in others if kind.startswith("channel")]
    seen, condition = channels[:cfg["data.channels"] - 1] if WORKER["net"] else [], None
    if target is not None:
        condition = show(placed_target(target), job["condition"], job["slices"], rng_key, cfg).to(device)
    field = draw_field(image, affine, cfg, rng_key, job["start"], WORKER["net"], condition, job["stride"], mask, device,
                       seen)
    turn = draw_turn(image.shape, affine, rng_key, cfg) if target is None else None
    matrix = None if turn is None else (affine @ turn @ np.linalg.inv(affine)).tolist()
    return {"field": field, "affine": affine, "file": None, "matrix": matrix,
            "carry": lambda array, own_affine, mode: deform(array, field, mode)}


def registered_copy(item, target):
    """A copy with the shape and on the grid of a target: a dict like that of `random_copy`."""
    job, cfg, net = WORKER["job"], WORKER["cfg"], WORKER["net"]
    fixed, seen = WORKER["targets"][target], cfg["data.channels"] - 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the result holds them too; they are printed below
        found = register(fixed["image"], item["image"], affine=True, refine=job["register"], device=WORKER["device"],
                         model=None if net is None else (net, cfg), config=cfg, fixed_mask=fixed["mask"],
                         moving_mask=item["mask"],
                         fixed_channels=fixed.get("channels", [])[:seen],
                         moving_channels=item.get("channels", [])[:seen])
    for sentence in found.warnings:
        tqdm.write(f"warning: {sentence}", file=sys.stderr)
    return {"field": found.field, "affine": found.fixed.affine, "file": fixed["image"],
            "matrix": found.matrix.tolist(),
            "carry": lambda array, own_affine, mode: carry(array, own_affine, found.field, found.fixed.affine, mode)}


# ---------------------------------------------------------------------------------------------------------------------
# All volumes
# ---------------------------------------------------------------------------------------------------------------------

def make_all(job, items, draws, workers, records):
    """Make the missing draws, of `draws` for each volume.

    records: {name: record} of the existing draws, to which the new ones are added. Returns: refused, {id: reason}.
    """
    out, refused, tasks = Path(job["out"]), {}, []
    for item in items:
        missing = missing_draws(item, draws, records, out)
        tasks += [(item, missing[first:first + CHUNK]) for first in range(0, len(missing), CHUNK)]
    total, left = len(items) * draws, sum(len(numbers) for _, numbers in tasks)
    if min(workers, len(tasks)) <= 1 or WORKER["device"].type != "cpu":
        results = ((task, try_draws(*task)) for task in tasks)
    else:
        results = run_tasks(try_draws, tasks, workers, job["out"], prepare_worker, (job,), lambda: run_lock.touch(out))
    bar = tqdm(total=total, initial=total - left, desc="augmenting", unit="draw", smoothing=0)  # as in do_all
    with bar, open(out / "draws.jsonl", "a", encoding="utf-8") as file:
        for (item, numbers), made in results:
            bar.update(len(numbers))
            run_lock.touch(out)
            if isinstance(made, str):
                refused[item["id"]] = made
                continue
            records.update({record["name"]: record for record in made})
            # An empty line first: a kill may have cut the last line of an earlier run.
            file.write("\n" + "".join(json.dumps(record) + "\n" for record in made))
            file.flush()
    return refused


def augment_all(args):
    """Draw the copies of all volumes, and write their lists and report. args: of the command line, checked. Returns the
    exit code."""
    job, out = make_job(args), Path(args.out)
    cfg = WORKER["cfg"]
    items = read_items(args, cfg)
    draws = copies_of_each(args, items)
    twice = sorted({draw_name(item, draw) for item in items for draw in range(draws)} & {item["id"] for item in items})
    if args.nnunet and twice:
        raise InputError(f"--nnunet: a copy would get the name of the volume {twice[0]}; rename the volume, or leave "
                         "out copies by --ids.")
    out.mkdir(parents=True, exist_ok=True)
    with run_lock.held_results(out):
        records = claim_folder(out, draw_settings(job, cfg, WORKER["targets"]),
                               items, bool(args.data) and not args.ids)
        if args.nnunet:
            require_own_dataset(out / args.nnunet)
        refused = make_all(job, items, draws, args.workers, records)
        items = [item for item in items if item["id"] not in refused]
        if items:
            kept = write_lists(out, items, draws, records)
            if args.nnunet:
                folder = write_dataset(out, args.nnunet, items, draws, cfg["model.dims"], args.data,
                                       cfg["data.window"])
                subjects = {target["id"]: target.get("subject") for target in WORKER["targets"]}
                write_splits(folder, items, draws, {record["name"]: subjects.get(record["target"]) for record in kept})
                print(f"nnU-Net: {folder.resolve()}", file=sys.stderr)
            shown = {target["id"]: target for target in WORKER["targets"]} if args.register is not None else {}
            summary = write_report(out, describe(job, cfg), items, kept, refused, cfg["model.dims"], shown)
            print(json.dumps(summary))
    for reason in refused.values():
        print(f"error: {reason}", file=sys.stderr)
    return STOP if refused else DONE
