"""Process a list of pairs or other entries: find those that are done, check their files, and do the others.

The row of a pair goes into results.json after the pair's files, with the size and SHA-256 of each. A pair without a
row, or with files that differ from its row, counts as not done: a kill between two files leaves no row. The old files
of a pair are removed before the first new one is written, so that a new image never lies beside an old field.
"""
import contextlib
import errno
import functools
import itertools
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

import torch
from tqdm import tqdm

from Dataloader import points
from Dataloader.datalist import MOST_CHANNELS
from Dataloader.formats import digest, size_and_time
from Dataloader.nifti import is_own_field
from Inference.choices import IMAGES
from Inference.pair_figures import PAIR_PAGE, link, means
from Inference.scores import COLUMNS
from Runtime import __version__, run_lock
from Runtime.errors import InputError, attempt, first_line
from Runtime.files import csv_text, remove_leftovers, require_apart, sha256, with_slashes, write_file
from Runtime.workers import run_tasks

OUTPUTS = ("warped.nii.gz", "warped_label.nii.gz", "field.nii.gz", "inverse_field.nii.gz", "jacobian.nii.gz",
           "segmented_fixed.nii.gz", "segmented_moving.nii.gz", "picture.png", PAIR_PAGE, "field.h5",
           "inverse_field.h5", "affine.mat", *points.WRITTEN,
           *(f"{name}.{suffix}" for name in ("warped", "warped_label") for suffix in IMAGES),
           *(f"warped_channel_{number}.nii.gz" for number in range(2, MOST_CHANNELS + 1)))  # of a pair, in its folder
PARTS = "parts"  # folder of the results of parts of a list
# Results that take longer than OFTEN_S to write wait SELDOM times as long for the next write, at most LATEST_S.
OFTEN_S, SELDOM, LATEST_S = 0.2, 20, 300
DISP = r"disp_\d{4,}_\d{4,}\.nii\.gz"  # beside results.json, for Learn2Reg


def require_own(out, folders=(), disps=(), program=None):
    """Raise InputError if results in `out` would replace files or results that are not their own.

    folders: Paths of the entries of the whole list. Their files of OUTPUTS would be replaced, and results in other
    folders would be dropped; (): only those of another program matter. program: as in the settings; None: a
    registration. disps: names of the whole list's fields for Learn2Reg.
    """
    pages = [out / name for name in ("results.json", "results.csv", "report.html")]
    outputs = itertools.chain.from_iterable(output_files(folder) for folder in folders if folder.is_dir())
    taken = [*filter(Path.exists, itertools.chain(pages, outputs))]
    # Read after the files were seen: a part of the list that begins meanwhile writes its results before its files.
    homes = [(home, read_results(home)) for home in (out, *parts_of(out))]
    listed = set(listed_files(out)) if disps else set()
    require_apart(taken, lambda _: any(earlier["version"] for _, earlier in homes))
    require_apart(filter(Path.exists, map(out.joinpath, disps)), lambda path: path in listed or is_own_field(path))
    named = set(map(os.path.abspath, folders))
    for home, earlier in homes:
        kept = {name: os.path.abspath(row["folder"]) for name, row in earlier["pairs"].items()}
        if kept and (earlier["settings"] or {}).get("program") != program:
            raise InputError(f"{home}: it has results of another program, which would be lost; name another --out.")
        lost = [(name, folder) for name, folder in kept.items()
                if named and folder not in named and os.path.isdir(folder)]
        if lost:
            raise InputError("{}: it has other results ({} in all, such as {}), which would be dropped; choose another "
                             "--out, or remove folders such as {}.".format(home, len(lost), *lost[0]))


def write_results(out, rows, failed, settings, complete):
    """Write results.json, and results.csv with a row for each pair and label.

    rows: dicts with name, "folder" (stored relative to `out`), labels and scores. failed: dicts of name and reason.
    settings: what the rows depend on, plain JSON. complete: whether the run has finished.
    """
    stored = [{**row, "folder": link(row["folder"], out)} for row in rows]
    content = {"version": __version__, "complete": complete, "pairs": stored, "failed": failed,
               "mean": means(rows, failed), "settings": settings}
    write_file(out / "results.json", (json.dumps(content, indent=1) + "\n").encode(errors="replace"))
    write_file(out / "results.csv", scores_csv(rows, [*COLUMNS, "verdict", "reason"]).encode(errors="replace"))


def scores_csv(rows, columns):
    """The text of a CSV table: a row for each pair, and after it one for each of its labels."""
    table = [["pair", "label", *columns]]
    for row in rows:
        for label, values in [("all", row), *row["labels"].items()]:
            table.append([row["name"], label, *[values.get(column) for column in columns]])
    return csv_text(table)


def read_results(out):
    """What an earlier run left: {"version": str, "settings": dict, "pairs": {name: row, with the folder's whole path},
    "failed": list of dicts of name and reason, "complete": whether it finished}.

    No pairs if results.json is missing or cannot be read.
    """
    try:
        content = json.loads((out / "results.json").read_text())
        rows = {row["name"]: {**row, "folder": str(out / row["folder"])} for row in content["pairs"]}
        for row in rows.values():
            if "files" in row:
                row["files"] = with_slashes(row["files"])
        if (content.get("settings") or {}).get("program") == "template":  # it may have been moved or copied
            for row in rows.values():
                row.update({key: str(out.resolve() / Path(row[key]).name) for key in ("fixed", "fixed_label")
                            if key in row})
        if not all(isinstance(name, str) for name in rows):
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        content, rows = {}, {}
    return {"version": content.get("version"), "settings": content.get("settings"), "pairs": rows,
            "failed": content.get("failed", []), "complete": content.get("complete", False)}


def listed_files(out):
    """Paths of the files that the rows of the results in `out`, or of its parts, list as written."""
    return [home / name for home in (out, *parts_of(out)) for row in read_results(home)["pairs"].values()
            for name in row.get("files", {})]


def parts_of(out):
    """The result folders of the parts of a list (--part), inside the folder of the whole list: Paths."""
    return sorted((out / PARTS).glob("*_of_*"))


def kept_rows(earlier, settings, pairs, out):
    """The rows of an earlier run of a list that are still valid: {name: row}. earlier: from `read_results`.

    Those with unchanged version, settings, source and written files: a list that was interrupted or has grown resumes.
    """
    if earlier["version"] != __version__ or earlier["settings"] != settings:
        return {}
    kept, once = {}, functools.cache(digest)  # one volume may be in all pairs
    found = [(pair, row) for pair in pairs if (row := earlier["pairs"].get(pair["name"]))]
    for pair, row in tqdm(found, f"checking {out}", unit="entry", delay=2):
        if row.get("source") == source_digests(pair, once) and not damage(row.get("files"), out):
            kept[pair["name"]] = with_paths_of(pair, row)
    return kept


def with_paths_of(pair, row):
    """A kept row with the paths that the files of its pair have now, since they may have been moved."""
    return {**row, **{key: os.path.abspath(path) for key, path in pair.items()
                      if key != "name" and isinstance(row.get(key), str)}}


def source_digests(pair, hashed=None):
    """SHA-256 of each file of a pair, {key: hex}, with one for a whole folder of DICOM slices; None if missing, or if
    this user may not read it. hashed: `digest`, or one that remembers."""
    digests = {key: None for key in pair if key != "name"}
    for key in digests:
        with contextlib.suppress(PermissionError):
            digests[key] = (hashed or digest)(pair[key])
    return digests


def source_stamps(pair):
    """Size and time of each file of a pair, {key: list}; None if missing."""
    stamps = {key: None for key in pair if key != "name"}
    for key in stamps:
        with contextlib.suppress(OSError):
            stamps[key] = size_and_time(pair[key])
    return stamps


def output_files(folder, disp=None):
    """Paths of the existing files of a pair. disp: path of the field for Learn2Reg, or None."""
    paths = [folder / name for name in OUTPUTS]
    if disp:
        paths.append(disp)
    return [path for path in paths if path.is_file()]


def remove_outputs(folder, out, row):
    """Remove what an earlier registration of this pair left. row: that of the earlier results, or None."""
    written = row.get("files", {}) if row else {}
    disps = [out / name for name in written if re.fullmatch(DISP, Path(name).name)]
    for path in output_files(folder) + disps:
        path.unlink(missing_ok=True)


def file_digests(paths, out):
    """{path relative to `out`: {"bytes", "sha256"}} of files."""
    return {link(path, out): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}


def damage(files, out):
    """A phrase for the first file of `file_digests` that has changed since it was written; None if none has."""
    if not files:
        return "results.json does not list the files that belong to it"
    for name, entry in files.items():
        path = Path(out) / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            return f"{path} has changed since it was written"
    return None


def do_all(out, tasks, function, settings, workers=1, doing="registering", unit="pair", again=False, resumes=True,
           begin=None, beside=(), ready=lambda entries: None):
    """Do every entry of a list that no earlier run has done, and write results.json after each: of a list so long that
    this takes a while (OFTEN_S), only now and then.

    out: Path of the results; the caller holds its lock. tasks: list of (entry, folder): a dict with "name" and the
    paths of the input files, and the Path for its results. function(entry, folder, earlier row or None) returns the
    row, a dict with its "files"; `do_one` adds its "source". settings: plain JSON on which the rows depend.
    doing, unit: words of the bar. again: repeat everything. resumes: False for a single entry, which is always done and
    has no bar. begin: called once in each process of several `workers`. beside: further folders of results whose
    entries count as done. ready: called with the entries that are left, before anything of theirs is dropped.
    Returns: rows, and failed entries as dicts of name and reason, in the order of the list.
    """
    remove_leftovers(out)  # of a run that was killed
    earlier = read_results(out)
    entries, kept = [entry for entry, _ in tasks], {}
    if resumes and not again:
        runs = [(home, read_results(home)) for home in beside]
        other = sorted({run["version"] or "" for _, run in (*runs, (out, earlier)) if run["pairs"]} - {__version__})
        if other:
            print(f"{out}: what OmniMorph {', '.join(other)} did of it is done again by {__version__}", file=sys.stderr)
        for home, run in runs:
            for name, row in kept_rows(run, settings, entries, home).items():
                files = {link(home / file, out): entry for file, entry in row["files"].items()}
                kept[name] = {**row, "folder": os.path.normpath(row["folder"]), "files": files}
        kept.update(kept_rows(earlier, settings, entries, out))
    if kept:
        print(f"{out}: keeping {len(kept)} of {len(tasks)} {unit}s from an earlier run (--again repeats them)",
              file=sys.stderr)
    found = dict(kept)
    due = 0.0  # when results.json is to be written next

    def write():
        nonlocal due
        began = time.monotonic()
        done = [(entry["name"], found[entry["name"]]) for entry in entries if entry["name"] in found]
        rows = [row for _, row in done if not isinstance(row, str)]
        failed = [{"name": name, "reason": row} for name, row in done if isinstance(row, str)]
        write_results(out, rows, failed, settings, complete=False)
        took = time.monotonic() - began
        due = began if took < OFTEN_S else began + min(SELDOM * took, LATEST_S)
        return rows, failed

    todo = [(entry, folder, earlier["pairs"].get(entry["name"])) for entry, folder in tasks
            if entry["name"] not in kept]
    require_writable(folder for _, folder, _ in todo)
    ready([entry for entry, *_ in todo])
    write()  # drop the rows of entries to be replaced before their files are removed
    guarded = functools.partial(do_one, function, str(out), resumes)
    if workers > 1 and len(tasks) > 1 and todo:
        # Of all tasks, not of those left: threads decide the rounding, so a resumed run gives the same bytes.
        share = max(1, torch.get_num_threads() // min(workers, len(tasks)))
        made = run_tasks(guarded, todo, workers, str(out), begin_worker, (share, begin),
                         lambda: keep_lock(out))
    else:
        made = ((task, guarded(*task)) for task in todo)
    try:
        # The pace of all so far: workers that started together end together, and the last few alone mislead.
        with tqdm(total=len(todo), desc=doing, unit=unit, disable=not resumes, smoothing=0) as bar:
            for (entry, *_), row in made:
                found[entry["name"]] = row
                for sentence in [] if isinstance(row, str) else row.get("warnings", []):
                    tqdm.write(f"warning: {sentence}", file=sys.stderr)
                keep_lock(out)
                if time.monotonic() >= due:
                    write()
                bar.update()
    finally:  # Ctrl-C, or a worker that was killed, must not cost the entries that were done since the last write
        keep_lock(out)  # raises if another program has taken over the results
        rows, failed = write()
    return rows, failed


def require_writable(folders):
    """Raise PermissionError for a folder in which this user may not write, before its rows are dropped: another user's
    results would stay without them."""
    for folder in folders:
        if folder.is_dir() and not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def keep_lock(out):
    """Show other machines that the holder of the lock on `out`, or on a folder above it, is alive."""
    for folder in (out, *out.parents):
        if os.path.abspath(folder) in run_lock.HELD:
            return run_lock.touch(folder)


def begin_worker(threads, begin):
    """Set up a new process; the processes share the CPU cores."""
    torch.set_num_threads(threads)
    if begin:
        begin()


def do_one(function, out, of_list, entry, folder, earlier):
    """function(entry, folder, earlier): the row and its "source", or the sentence of its error, which does not stop a
    list."""
    name = " and ".join(str(entry[key]) for key in ("fixed", "moving") if key in entry) or entry["name"]
    try:
        stamps = source_stamps(entry)
        row = attempt(name, function, entry, folder, earlier)
        if isinstance(row, str):
            return row
        source = source_digests(entry)  # not before, since hashing what will be refused may take minutes
        changed = [key for key, stamp in source_stamps(entry).items() if stamp != stamps[key]]
        return {**row, "source": {**source, **dict.fromkeys(changed)}}  # replaced meanwhile: the next run does it again
    except OSError as error:
        # The folder of a part holds neither those of its pairs nor what lies beside them for Learn2Reg.
        homes, written = {Path(out).resolve(), folder.resolve()}, Path(error.filename or "").resolve()
        beside = of_list and written.parent == folder.resolve().parent
        if not error.filename or homes & {*written.parents} or beside:
            raise  # the results of no entry can be written
        return f"{error.filename}: {error.strerror}; check the file."
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not of_list:
            raise
        traceback.print_exc()
        return f"{name}: {type(error).__name__} ({first_line(error)}); see the traceback above."
