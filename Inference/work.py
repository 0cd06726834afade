"""Work on a list, one or several entries at a time: it resumes, and a failed entry does not end the others."""
import functools
import sys
import traceback
from pathlib import Path

import torch
from tqdm import tqdm

from Inference.results import kept_rows, read_results, write_results
from Runtime import run_lock
from Runtime.errors import attempt, first_line
from Runtime.workers import run_tasks


def do_all(out, tasks, function, settings, workers=1, doing="registering", unit="pair", again=False, resumes=True,
           begin=None, arguments=()):
    """Do every entry of a list that no earlier run has done, and write results.json after each.

    out: Path of the results; the caller holds its lock. tasks: list of (entry, folder): the entry's "name" and the
    paths of what is read, and where its files go, a Path. function(entry, folder, earlier row or None) returns the row,
    a dict with its "source" and "files" (Inference/results.py). settings: plain JSON on which the rows depend.
    doing, unit: words of the bar. again: repeat everything. resumes: False for a single entry, which is always done and
    has
    no bar. begin(*arguments): called once in each process of several `workers`.
    Returns: rows, and failed entries as dicts of name and reason, in the order of the list.
    """
    earlier = read_results(out)
    entries = [entry for entry, _ in tasks]
    kept = kept_rows(earlier, settings, entries, out) if resumes and not again else {}
    if kept:
        print(f"{out}: keeping {len(kept)} of {len(tasks)} {unit}s from an earlier run (--again repeats them)",
              file=sys.stderr)
    found = dict(kept)

    def write():
        done = [(entry["name"], found[entry["name"]]) for entry in entries if entry["name"] in found]
        rows = [row for _, row in done if not isinstance(row, str)]
        failed = [{"name": name, "reason": row} for name, row in done if isinstance(row, str)]
        write_results(out, rows, failed, settings, complete=False)
        return rows, failed

    write()  # rows of entries that are about to be replaced go before their files do
    todo = [(entry, folder, earlier["pairs"].get(entry["name"])) for entry, folder in tasks
            if entry["name"] not in kept]
    guarded = functools.partial(do_one, function, str(out), resumes)
    with tqdm(total=len(todo), desc=doing, unit=unit, disable=not resumes) as bar:
        for (entry, *_), row in rows_of(guarded, todo, workers, out, begin, arguments):
            found[entry["name"]] = row
            for sentence in [] if isinstance(row, str) else row.get("warnings", []):
                tqdm.write(f"warning: {sentence}", file=sys.stderr)
            run_lock.touch(out)
            write()
            bar.update()
    return write()


def rows_of(guarded, todo, workers, out, begin, arguments):
    """Yield (task, its row or the sentence that says why there is none), here or from processes. As for `do_all`."""
    if workers > 1 and len(todo) > 1:
        share = max(1, torch.get_num_threads() // min(workers, len(todo)))
        yield from run_tasks(guarded, todo, workers, str(out), begin_worker, (share, begin, arguments),
                             lambda: run_lock.touch(out))
        return
    for task in todo:
        yield task, guarded(*task)


def begin_worker(threads, begin, arguments):
    """In a new process: the processes share the processors."""
    torch.set_num_threads(threads)
    if begin:
        begin(*arguments)


def do_one(function, out, of_list, entry, folder, earlier):
    """function(entry, folder, earlier): the row, or the sentence of its error, which does not end a list."""
    name = " and ".join(str(entry[key]) for key in ("fixed", "moving") if key in entry) or entry["name"]
    try:
        return attempt(name, function, entry, folder, earlier)
    except OSError as error:
        if not error.filename or Path(out).resolve() in Path(error.filename).resolve().parents:
            raise  # results cannot be written, of no entry
        return f"{error.filename}: {error.strerror}; check the file."
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not of_list:
            raise
        traceback.print_exc()
        return f"{name}: {type(error).__name__} ({first_line(error)}); see the traceback above."
