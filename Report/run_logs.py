"""The logs of a run, read once for the report, the rules, goodput and comparison. This module needs no torch.

`read_run` works on the folder of a running training and on a copy. An incomplete line, cut off by a crash or still
being written, is left out. The steps of rank 0 become columns of numbers, so that a run of a hundred thousand steps is
read in seconds.
"""
import array
import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import yaml

from Report.goodput import costs_of
from Runtime.config import flatten
from Runtime.errors import InputError

NAN = math.nan
NESTED = ("terms", "norms", "spent")  # dicts of numbers in a line "step"; a key becomes a column such as "terms.ang"
PLAIN = ("step", "attempt", "time", "epoch", "open", "nonfinite", "lr", "samples")
FEW_RANKS = 8  # logs read whole; with more ranks, only the last READ_BYTES / ranks bytes of each log but rank 0's
READ_BYTES = 64 * 2 ** 20
# The forms that a report expects of the files beside the logs (`of_form`).
MODE = {"name": str, "curve": str, "terms": [str]}
FORMS = {"launch": {"command": [str], "modes": [{**MODE, "clip_norm": str, "gate": str}], "packages": {},
                    "settings": {}, "job": {}, "step": (int, float)},
         "manifest": {"checkpoints": {"*": {"bytes": (int, float)}}}, "lock": {"stale_after_s": (int, float)}}


def read_run(run):
    """Everything that the logs of a run contain.

    run: folder of the run, Models/<data>_<net>.
    Returns a dict of
      run: Path; lock, manifest: content of these files, {} if absent; pictures: Paths, oldest first
      attempts: lines of attempts.jsonl; costs: of `goodput.costs_of`
      steps, once: columns of all rows of rank 0, and of the steps that are in the result, see `as_columns`
      epochs: lines of rank 0, one per epoch even if it ran twice; scores: {val_...: the epochs' lines that have it}
      pace: {rank: its "pace" lines that are in the result}; now: {rank: its last breadcrumb}
      events: all other lines of all ranks, by time
      launches: from `read_launches`; config, modes: those of the newest launch, {} and [] if there was no launch
      losses: names of the losses and their terms, the modes' own losses first
    Raises InputError if this is no run folder.
    """
    run = Path(run)
    attempts = list(lines_of(run / "attempts.jsonl"))
    if not attempts:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    columns = {name: array.array("d") for name in (*PLAIN, "is_step")}
    epochs, events, pace, now, ranks = [], [], {}, {}, ranks_of(run)
    for rank in ranks:
        tail = None if rank == 0 or len(ranks) <= FEW_RANKS else READ_BYTES // len(ranks)
        pace[rank] = []
        for line in lines_of(run / f"rank{rank}.jsonl", tail):
            kind = line["event"]
            if kind == "pace":
                pace[rank].append(line)
            elif kind == "now":
                now[rank] = line
            elif kind == "epoch" and rank == 0:
                epochs.append(line)
            elif kind != "step":
                events.append(line)
            if rank == 0 and kind in ("step", "end"):
                add_row(columns, line)
    (steps, once, again), launches = as_columns(columns), read_launches(run)
    pace = {rank: [line for line in lines if line["step"] < again.get(line["attempt"], math.inf)]
            for rank, lines in pace.items()}
    epochs = {line.get("epoch"): line for line in epochs
              if line.get("step", 0) <= again.get(line["attempt"], math.inf)}  # the steps done at its end
    epochs = [epochs[number] for number in sorted(epochs)]
    scores = sorted({name for line in epochs for name in line if name.startswith("val_")})
    newest = launches[-1] if launches else {"config": {}}
    modes = [mode for mode in newest.get("modes", []) if MODE.keys() <= mode.keys()]
    losses = [name for mode in modes for name in (mode["curve"], *mode["terms"])]
    losses += [name.removeprefix("terms.") for name in once if name.startswith("terms.")]
    return {"run": run, **{name: read_json(run / f"{name}.json", FORMS[name]) for name in ("lock", "manifest")},
            "pictures": sorted((run / "pictures").glob("*.png")), "attempts": attempts,
            "costs": costs_of(attempts, steps), "steps": steps, "once": once, "epochs": epochs,
            "scores": {name: [line for line in epochs if line.get(name) is not None] for name in scores},
            "pace": pace, "now": now, "events": sorted(events, key=lambda line: line.get("time", 0)),
            "launches": launches, "config": newest["config"], "modes": modes, "losses": list(dict.fromkeys(losses))}


def ranks_of(run):
    """Numbers of the ranks that have a log, rising."""
    names = (re.fullmatch(r"rank(\d+)\.jsonl", path.name) for path in Path(run).glob("rank*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def lines_of(path, tail=None):
    """The objects of a log, like Runtime/files.read_lines, but one at a time. Nothing if there is no such file.

    tail: number of bytes to read from its end, None for all.
    """
    try:
        with open(path, errors="replace", newline="\n") as file:
            if tail is not None:
                file.seek(max(os.fstat(file.fileno()).st_size - tail, 0))
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # incomplete
                if isinstance(line, dict) and "event" in line and "attempt" in line:
                    yield line
    except (FileNotFoundError, NotADirectoryError):
        return


# ---------------------------------------------------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------------------------------------------------

def add_row(columns, line):
    """Add the numbers of a line "step", or of the "end" of an attempt, which has the time since its last step.

    columns: {name: one float for each row up to the last one that has this name}. A nested key gets a joint name, such
    as "terms.ang". Missing values and values that are not numbers are NaN.
    """
    row = {name: line[name] for name in PLAIN if name in line}
    row["is_step"] = line["event"] == "step"
    for section in NESTED:
        row.update({f"{section}.{name}": value for name, value in (line.get(section) or {}).items()})
    rows = len(columns["is_step"])
    for name, value in row.items():
        column = columns.setdefault(name, array.array("d"))
        if len(column) < rows:
            column.extend([NAN] * (rows - len(column)))
        column.append(value if isinstance(value, (int, float)) else NAN)


def as_columns(columns):
    """All rows, those that are in the result, by rising step, and {attempt: step from which a later one resumed}.

    columns: from `add_row`. Two are added: "seconds", the sum over all phases of a row, and "replayed", 1 if a later
    attempt resumed from this step or an earlier one, so that its work is lost.
    """
    count = len(columns["is_step"])
    rows = {name: np.array([*column, *[NAN] * (count - len(column))]) for name, column in columns.items()}
    spent = [np.nan_to_num(column) for name, column in rows.items() if name.startswith("spent.")]
    done, again, least = np.flatnonzero(rows["is_step"] == 1), {}, math.inf
    for attempt in np.unique(rows["attempt"])[::-1]:
        again[attempt] = least
        least = rows["step"][done][rows["attempt"][done] == attempt].min(initial=least)
    rows["seconds"] = sum(spent, np.zeros(count))
    rows["replayed"] = (rows["is_step"] == 1) & (rows["step"] >= [again[attempt] for attempt in rows["attempt"]])
    rows["replayed"] = rows["replayed"].astype(float)
    kept = done[rows["replayed"][done] == 0][::-1]
    last = kept[np.unique(rows["step"][kept], return_index=True)[1]]
    return rows, {name: column[last] for name, column in rows.items()}, again


def tail_of(columns, count):
    """The last `count` rows of columns."""
    return {name: column[-count:] for name, column in columns.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What belongs to the run beside its logs
# ---------------------------------------------------------------------------------------------------------------------

def read_json(path, form):
    """What a JSON file holds of a form (see `of_form`); {} if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return of_form(content, form) if isinstance(content, dict) else {}


def of_form(content, form):
    """The parts of a JSON value that have the expected form; damaged parts are dropped.

    form: a type or tuple of types; [form] for a list of such values; {name: form} for an object, whose other names are
    kept as they are, or {"*": form} for one whose values are all alike. Returns: those parts, None if nothing fits.
    """
    if isinstance(form, list) and isinstance(content, list):
        parts = [of_form(part, form[0]) for part in content]
        return [part for part in parts if part is not None]
    if isinstance(form, dict) and isinstance(content, dict):
        parts = {name: of_form(part, form.get(name, form.get("*", object))) for name, part in content.items()}
        return {name: part for name, part in parts.items() if part is not None}
    return content if isinstance(form, (type, tuple)) and isinstance(content, form) else None


def read_launches(run):
    """[{"number", "config": flat dict, "code", **launch.json}] of the launches of a run, oldest first.

    code: the first digits of its commit, or outside of git its version; and, if there are changes, the first digits of
    the SHA-256 of changes.diff.
    """
    launches = []
    for folder in sorted(Path(run).glob("launches/*")):
        config, changes = folder / "config.yaml", folder / "changes.diff"
        try:
            flat = flatten(yaml.safe_load(config.read_text()), config)
            mark = f" with changes {hashlib.sha256(changes.read_bytes()).hexdigest()[:8]}" if changes.exists() else ""
        except (OSError, ValueError, yaml.YAMLError):
            continue  # a machine died while it was written
        launch = read_json(folder / "launch.json", FORMS["launch"])
        code = str(launch.get("commit") or "")[:8] or str(launch.get("version") or "-")
        launches.append({**launch, "number": folder.name, "config": flat, "code": code + mark})
    return launches


def launches_behind(launches, step):
    """The launches that have made the first `step` steps of a run, oldest first.

    Left out are those that made no step, and those whose steps were done again. launches: from `read_launches`.
    """
    behind = []
    for launch in launches[::-1]:
        if launch.get("step", step) < step:
            step = launch["step"]
            behind.insert(0, launch)
    return behind
