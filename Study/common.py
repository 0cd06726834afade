"""Shared by all programs on a study: its volumes, its folder of results, its table and the end of a run."""
import contextlib
import functools
import json
import os
import sys
import warnings
from pathlib import Path

from Dataloader.datalist import (
    Folder,
    is_one_volume,
    label_beside,
    list_single,
    name_subjects,
    select,
    set_apart,
    volume_id,
    without_segmentations,
)
from Dataloader.grids import require_same_grid
from Dataloader.nifti import read_label
from Inference.outputs import make_folder, scores_of
from Inference.registration import register
from Inference.results import file_digests, read_results, require_own, write_results
from Report.page import cards_html, findings_html, write_page
from Runtime import run_lock
from Runtime.errors import DONE, STOP, InputError
from Runtime.files import as_stored, csv_text, first_repeated, require_apart, require_file, write_file


def volumes_of(sources, ids="", pattern="", known=(), told=()):
    """The volumes that a command line names, in order: dicts as Dataloader/datalist.py describes them.

    sources: files, folders, lists or patterns, see `without_segmentations`. ids: numbers and ranges as in `select`.
    pattern: names the subjects. known: volumes whose files have the same subjects here, since the folder that names the
    subject may not be seen from another source. told: sources whose warnings have been printed.
    Raises InputError if there are none, and if two have the same name.
    """
    listed = functools.cache(Folder)
    items, singles, subjects = [], [], {item["image"].resolve(): item["subject"] for item in known}
    for source in without_segmentations(sources):
        if is_one_volume(source):
            require_file(source)
            items.append({"id": volume_id(source), "image": Path(source),
                          "label": label_beside(source, listed(Path(source).parent)), "mask": None, "subject": "",
                          "modality": "", "split": ""})
            singles.append(items[-1])
        else:
            items += list_single(source, pattern, as_listed=True, quiet=source in told)
    if not items:
        raise InputError(f"{sources[0]}: the names of all {len(sources)} files mark them as segmentations; give the "
                         "images.")
    set_apart(singles)
    for item in singles:
        if pattern:  # which may match a folder that is not seen from here
            item["subject"] = subjects.get(item["image"].resolve(), "")
        name_subjects(item["image"].parent, [item], pattern)
    items = select(", ".join(map(str, sources)), items, ids)
    if subjects:
        items = [{**item, "subject": subjects.get(item["image"].resolve(), item["subject"])} for item in items]
    if twice := first_repeated(as_stored(item["id"]) for item in items):
        raise InputError(f"{twice}: two volumes have this name; give them in a .csv list with a column id.")
    return items


def write_study_page(path, title, lead, cards, rows, failed, sections, warnings=()):
    """Headline results, then subjects left out, verdicts that are not ok and all warnings, then the sections, whose
    tables can be sorted. warnings: sentences about no single row. Returns: the page's path."""
    said = [("failed", "left out", f"{entry['name']}: {entry['reason']}") for entry in failed]
    said += [(row["verdict"], row["verdict"], f"{row['name']}: {row['reason']}") for row in rows if row.get("reason")]
    said += [("doubtful", "warning", sentence) for sentence in warnings]
    said += [("doubtful", "warning", sentence) for row in rows for sentence in row["warnings"]]
    top = cards_html(cards) + findings_html(said)
    lead += (" Pictures of 3D volumes show the patient's right on the left, and the front on the left in sagittal "
             "slices.")
    return write_page(path, title, lead, [("", top), *sections], sortable=True)


def finished_row(row, out, paths):
    """A row with the digests of the files that were written; `do_all` adds those of the files that were read."""
    return {"labels": {}, "warnings": [], **row, "files": file_digests(paths, out)}


@contextlib.contextmanager
def locked(path, program, names, inputs=(), folders=()):
    """Make a folder of results, hold its lock, and make sure that no result replaces a file of the user.

    path: of the folder. names: of the files that the program will write there, relative to it. inputs: paths of the
    files that it will read; None is skipped. folders: of all entries of the list, as for `require_own`.
    Yields: the folder's Path.
    Raises InputError if the folder has results of another program or of entries in other `folders`, which would be
    dropped, or one of these files without results of an earlier run, or if one of these files is an input.
    """
    out = Path(path)
    make_folder(out)
    with run_lock.held_results(out):
        require_own(out, folders, program=program)
        is_new = not read_results(out)["version"]
        files = [out / name for name in names if not os.path.isdir(out / name)]  # no file replaces a folder
        require_apart(files, (lambda _: False) if is_new else None, inputs)
        if is_new:  # a run that is killed before its first row leaves files of its own
            write_results(out, [], [], {"program": program}, complete=False)
        yield out


def label_of(path, image, shape, affine, advice="resample it to its image"):
    """A label map and its affine.

    image, shape, affine: path and grid of the volume that it belongs to. advice: for a label map on another grid, which
    raises InputError.
    """
    label, own = read_label(path, len(shape))
    require_same_grid(f"{path}: the label map", label.shape, own, image, shape, affine, advice)
    return label, own


def aligned(fixed, moving, **options):
    """`register` without printing warnings: they are in the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return register(fixed, moving, **options)


def aligned_row(found, entry, folder, out, paths, **more):
    """The `finished_row` of a registration, without warnings: other steps repeat them. more: further columns."""
    row = {"name": entry["name"], "folder": str(folder), **scores_of(found), "verdict": found.verdict,
           "reason": found.reason, "matrix": found.matrix.tolist(), **more}
    return {**finished_row(row, out, paths), "warnings": []}


def dice_text(row):
    """The mean Dice of a row, to end a caption with; "" if the row has none, because it has no labels."""
    return "" if row.get("dice") is None else f", Dice {row['dice']:.3f}"


def write_table(path, columns, rows):
    """Write a table of tab-separated values, as BIDS has them: n/a for a missing value, numbers with 6 digits."""
    table = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    write_file(path, csv_text(table, "\t").encode(errors="replace"))


def _cell(value):
    if value is None or value != value:
        return "n/a"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def end(out, rows, failed, settings, page, strict, summary):
    """Write results.json, print what went wrong, and print the summary as one line of JSON. Returns: the exit code.

    strict: whether a subject that could not be processed, or whose verdict is failed, makes the exit code 43.
    """
    write_results(out, rows, failed, settings, complete=True)
    for entry in failed:
        print(f"{'error' if strict else 'warning'}: {entry['name']} is left out: {entry['reason']}", file=sys.stderr)
    for row in rows:
        if row.get("verdict", "ok") != "ok":
            print(f"warning: {row['name']}: {row['verdict']}, {row['reason']}", file=sys.stderr)
    print(f"\nreport: {Path(page).resolve()}")
    print(json.dumps({**summary, "done": len(rows), "failed": len(failed)}))
    hopeless = failed or any(row.get("verdict") == "failed" for row in rows)
    return STOP if not rows or strict and hopeless else DONE
