"""Build and check the cache of data.root: every volume resampled once to the training grid; training memory-maps it.

    python OM_prepare.py --config Config/config_om.yaml [--set key=value ...]

Run it once before training, on one node, with all of its cores. Run the same command again to continue after a kill, or
to add new volumes. Unusable volumes are left out and reported with the reason (refused.csv in the cache, and a page in
run.logs). Files that a training run reads are kept until it ends. Exit codes: 0 done, 43 bad input or damage found.
"""
import Runtime.unix  # noqa: F401  first: an outdated Python, or Windows, stops here with one sentence

# isort: split
import argparse
import contextlib
import math
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from Dataloader import cache
from Dataloader.datalist import list_volumes
from Runtime import run_lock
from Runtime.config import load_config
from Runtime.errors import DONE, STOP, InputError, parse_options, run_program
from Runtime.files import csv_text
from Runtime.workers import run_tasks, shared_counter

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LEAST_KEPT = 0.9  # share of a volume's labels on the grid; resampling thin ones changes them too
WORKER = {"counter": None}  # in each worker: number of volumes done, shared with the main process


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Prepare the volumes of data.root once for all training runs, in "
                                                 "data.cache. Run the same command again to continue after an "
                                                 "interruption, or after adding volumes.")
    parser.add_argument("--config", required=True, help="config file, e.g. Config/config_om.yaml; one that begins with "
                        "base: lists only what differs")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys, e.g. --set data.root=/data/brains model.dims=2")
    parser.add_argument("--workers", type=int, default=CORES, metavar="N",
                        help="number of processes that read and resample (default: the cores of this machine, "
                        "%(default)s)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="read everything and name each damaged, missing or "
                        "foreign file, without changing anything")
    action.add_argument("--repair", action="store_true", help="read everything and rebuild the parts that are damaged "
                        "or from which volumes were refused")
    action.add_argument("--fresh", action="store_true", help="remove the cache and rebuild it")
    return parse_options(parser, argv)


# ---------------------------------------------------------------------------------------------------------------------
# The workers
# ---------------------------------------------------------------------------------------------------------------------

def keep_counter(counter):
    WORKER["counter"] = counter


def count_one():
    with WORKER["counter"].get_lock():
        WORKER["counter"].value += 1


def make_groups(folder, groups, cfg, workers, before):
    """Prepare the missing parts of the cache, in parallel.

    groups: {number of the part: items}. before: number of volumes already prepared, for the progress bar.
    Returns: {number: record}. Raises InputError if a worker was killed.
    """
    counter = shared_counter(folder)
    tasks = [(folder, number, items, cfg, count_one) for number, items in groups.items()]
    left = sum(map(len, groups.values()))
    with tqdm(total=before + left, initial=before, desc=f"preparing {folder}", unit="vol") as bar:
        def meanwhile():
            bar.update(before + counter.value - bar.n)
            run_lock.touch(folder)

        results = run_tasks(cache.write_group, tasks, workers, folder, keep_counter, (counter,), meanwhile)
        return {number: record for (_, number, *_), record in results}


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------

def report(folder, manifest, cfg, seconds):
    """Report the content of the cache: on the terminal, as refused.csv, and as a page with pictures in run.logs.

    manifest: of the cache. seconds: duration of the preparation.
    """
    volumes, refused = cache.items_of(manifest), manifest["refused"]
    size = sum(length for length, _ in manifest["files"].values())
    if refused:
        table = csv_text([("id", "image", "reason"), *refused])
        cache.write_bytes(folder, "refused.csv", table.encode(errors="surrogateescape"))
    else:
        (folder / "refused.csv").unlink(missing_ok=True)
    print(f"{folder}: {len(volumes)} volumes ({sum(item['label'] for item in volumes)} with labels), {len(refused)} "
          f"refused, {len({item['subject'] for item in volumes})} subjects, {size / 2 ** 20:,.0f} MiB, {seconds:.0f} s")
    for name, _, reason in refused[:5]:
        print(f"refused {name}: {reason}")
    if len(refused) > 5:
        print(f"and {len(refused) - 5} more: {folder / 'refused.csv'}")
    print(f"report: {write_report(folder, volumes, refused, cfg, size)}")


def write_report(folder, volumes, refused, cfg, size):
    """Write the page: counts, refused volumes, and pictures of some volumes. Returns: its path.

    volumes: from `cache.items_of`. refused: of the manifest. size: of all files, in bytes.
    """
    from Diffusion.figures import contact_sheet  # here, because the workers need neither torch nor matplotlib
    from Report.page import cards_html, figure_html, table_html, write_page
    sheet = contact_sheet(sample_of(folder, volumes, cfg["data.channels"]))
    cards = [("volumes", len(volumes), f"{len({item['subject'] for item in volumes})} subjects"),
             ("with labels", sum(item["label"] for item in volumes), ""), ("refused", len(refused), ""),
             ("on disk", f"{size / 2 ** 20:,.0f} MiB", cfg["data.dtype"])]
    sections = [("", cards_html(cards)),
                ("Some of them", figure_html(sheet, "Middle slices on the training grid, outlines of their labels."
                                             + " The patient's right is on the left." * (cfg["model.dims"] == 3)))]
    if refused:
        sections.append(("Refused", table_html(["id", "file", "why"], refused, "Left out of the cache.")))
    settings = "; ".join(f"{key} {value}" for key, value in cache.settings(cfg).items())
    name = Path(os.path.abspath(folder)).name  # one data set may have several caches
    name = cfg["data.name"] if name == cfg["data.name"] else f"{cfg['data.name']}_{name}"
    path = Path(cfg["run.logs"]) / f"{name}_prepared.html"
    try:
        return write_page(path, f"Prepared: {cfg['data.name']}", f"{folder}, made with {settings}.", sections).resolve()
    except OSError as error:
        raise InputError(f"run.logs {cfg['run.logs']}: the page of the cache cannot be written there ({error}); name "
                         "another folder, and run the same command again: the cache itself is done.") from error


def sample_of(folder, volumes, channels, most=24):
    """Some volumes for a contact sheet: a list of (id, image, label or None). volumes: from `cache.items_of`.

    If a volume has several channels, the first is shown.
    """
    chosen = sorted(random.Random(0).sample(range(len(volumes)), min(most, len(volumes))))
    items = [volumes[number] for number in chosen]
    # Do not keep the memory maps: another run in this process may create files with the same names.
    images, labels = (cache.Rows(folder, kind, items, keep=False) for kind in ("image", "label"))
    return [(item["id"], np.asarray(images[number] if channels == 1 else images[number][0]),
             labels[number] if item["label"] else None) for number, item in enumerate(items)]


# ---------------------------------------------------------------------------------------------------------------------
# Preparing and verifying
# ---------------------------------------------------------------------------------------------------------------------

def check(folder, cfg):
    """--verify: name everything that is wrong. Returns the exit code."""
    manifest = cache.read_manifest(folder, cfg)
    wrong = cache.verify(folder, manifest)
    for text in wrong.values():
        print(f"{folder}: {text}")
    damaged = set(wrong) & set(manifest["files"])
    if damaged:
        print(f"error: {folder}: {len(damaged)} of {len(manifest['files'])} files are damaged; run OM_prepare.py with "
              "this config and --repair.", file=sys.stderr)
    elif wrong:
        print(f"error: {folder}: all {len(manifest['files'])} files of the cache are intact, but the folder has "
              f"{len(wrong)} other files; move away what does not belong to it, and run OM_prepare.py when no training "
              "reads the cache.", file=sys.stderr)
    else:
        print(f"{folder}: all {len(manifest['files'])} files of {len(manifest['volumes'])} volumes are intact")
    return STOP if wrong else DONE


def prepare(folder, cfg, args):
    """Prepare what is missing and report it. With --fresh or --repair no training may be reading the cache.

    Returns the exit code.
    """
    started = time.time()
    if not args.fresh:  # a cache that was made, or begun, with other settings stays unchanged
        for path in (folder / "manifest.json", folder / "plan.json", *cache.record_paths(folder)):
            content = cache.read_json(path)
            if content:
                cache.check_settings(folder, content["settings"], cfg)
                break
    cache.require_root(cfg)
    _, mark = cache.list_mark(cfg["data.root"])
    items = list_volumes(cfg["data.root"], cfg["data.subject_pattern"], cfg["data.channels"])
    if args.fresh:
        for name in cache.own_files(folder):
            (folder / name).unlink()
    if args.repair:
        removed = cache.forget_damaged(folder, lambda: run_lock.touch(folder))
        print(f"{folder}: rebuilding {removed} parts that are damaged or lack a volume")
    kept, groups = cache.plan(folder, items, cfg, lambda: run_lock.touch(folder))
    before = len(items) - sum(map(len, groups.values()))
    if before:
        print(f"{folder}: {before} of {len(items)} volumes are there already")
    edited = [record for record in kept.values() if record.get("code") != cache.code_mark()]
    if edited:
        print(f"warning: {folder}: {sum(len(cache.all_lines(record)) for record in edited)} of these were prepared "
              "by another version of OmniMorph, or before Dataloader/prepare.py or grids.py was edited; if the change "
              "matters to them (CHANGELOG.md), run this command with --fresh.", file=sys.stderr)
    if groups:
        require_room(folder, groups, cfg)
        parts = {**{number: cache.all_lines(record) for number, record in kept.items()}, **groups}
        cache.write_json(folder, "plan.json", {"settings": cache.settings(cfg), "groups": {
            f"{number:05d}": [line["id"] for line in lines] for number, lines in sorted(parts.items())}})
        kept.update(make_groups(folder, groups, cfg, max(args.workers, 1), before))
    if not any(record["volumes"] for record in kept.values()):
        first = next(line for record in kept.values() for line in record["refused"])
        raise InputError(f"{cfg['data.root']}: none of the {len(items)} volumes can be used; the first, "
                         f"{first['reason']}")
    manifest = cache.write_manifest(folder, cfg, kept, mark)
    remove_old(folder, {*manifest["files"], "manifest.json", "refused.csv"}, args.fresh or args.repair)
    report(folder, manifest, cfg, time.time() - started)
    warn_of_cut_labels(kept)
    return DONE


def warn_of_cut_labels(parts):
    """Warn if the training grid cuts off labelled parts of volumes, or a whole mask. parts: {number: record}."""
    advice = "enlarge data.img_size or data.spacing_mm (0 fits each volume), or check data.crop_above."
    lines = [line for record in parts.values() for line in record["volumes"]]
    kept = {line["id"]: line.get("label_kept") for line in lines}
    cut = {name: share for name, share in kept.items() if share is not None and share < LEAST_KEPT}
    if cut:
        worst = min(cut, key=cut.get)
        print(f"warning: {len(cut)} volumes have labels beyond the training grid, {worst} {100 - 100 * cut[worst]:.0f} "
              f"% of them: {advice}", file=sys.stderr)
    labelled = [line["id"] for line in lines if line["label"] and "label_kept" in line]  # caches before 1.4 lack it
    if labelled and all(kept[name] is None for name in labelled):
        print(f"warning: the label maps of all {len(labelled)} volumes that have one, such as {labelled[0]}, hold only "
              "background: look at them in a viewer.", file=sys.stderr)
    empty = [line["id"] for line in lines if line.get("mask_kept") == 0]
    if empty:
        print(f"warning: {len(empty)} volumes, such as {empty[0]}, have nothing of their mask on the training grid, so "
              f"that no voxel of them counts where masks do: {advice}", file=sys.stderr)


def remove_old(folder, keep, alone):
    """Remove parts that the cache no longer has, unless a training still reads them.

    keep: names of the files of the cache. alone: True if no training can be reading the cache.
    """
    (folder / "plan.json").unlink(missing_ok=True)
    with contextlib.nullcontext(True) if alone else cache.without_readers(folder) as free:
        old = cache.own_files(folder) - keep
        if free:
            for name in old:
                (folder / name).unlink()
        elif old:
            print(f"{folder}: a training run reads this cache, so {len(old)} old files stay until its next start, "
                  "which uses the new ones; run the same command again after that to remove them")


def require_room(folder, groups, cfg):
    """Raise InputError if the missing parts do not fit on the disk. A label counts as one byte per voxel.

    A part in which one volume has a label or mask stores one for each of its volumes.
    """
    volumes = sum(map(len, groups.values()))
    free = shutil.disk_usage(folder).free
    labels = sum(len(group) for group in groups.values() for kind in ("label", "mask")
                 if any(item[kind] for item in group))
    images = volumes * cfg["data.channels"] * np.dtype(cfg["data.dtype"]).itemsize
    need = math.prod(cfg["data.img_size"]) * (images + labels)
    if need > free:
        raise InputError(f"data.cache {folder}: {volumes} volumes need about {need / 2 ** 30:.1f} GiB, but only "
                         f"{free / 2 ** 30:.1f} are free; make room, or name another folder.")


def run(args):
    """Run the command line. Returns the exit code."""
    cfg = load_config(args.config, args.overrides)
    if not cfg["data.cache"]:
        raise InputError(f"{args.config}: data.cache is empty; name a folder for the prepared volumes, or set it "
                         "to auto.")
    folder = Path(cfg["data.cache"])
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(cache.for_this_user(f"data.cache {folder}"))
            if args.verify:
                return check(folder, cfg)
            cache.require_ours(folder)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock.held_results(folder, "name another data.cache"))
            if (args.fresh or args.repair) and not stack.enter_context(cache.without_readers(folder)):
                raise InputError(f"data.cache {folder} is in use by a training run: let it finish or stop it, or name "
                                 "another data.cache.")
            return prepare(folder, cfg, args)
    except OSError as error:
        raise InputError(f"data.cache {folder}: reading or writing failed ({error}); make room, or correct the path, "
                         "and run the same command again: it continues.") from error


def main(argv=None):
    args = parse_arguments(argv)
    return run_program(run, args, args.config)


if __name__ == "__main__":
    sys.exit(main())
