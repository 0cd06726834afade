"""The logs of a run, read once for the report, the rules, goodput and comparison. No torch.

`read_run` works on a folder that is being written and on a copy. An incomplete line, cut off by a crash or still being
written, is left out. The steps of rank 0 become columns of numbers, so that a run of a hundred thousand steps is read
in seconds.
"""
import array
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import yaml

from Runtime.config import flatten
from Runtime.errors import InputError

NAN = math.nan
NESTED = ("terms", "norms", "spent")  # dicts of numbers in a line "step"; each key becomes a column "terms.ang"
PLAIN = ("step", "attempt", "time", "epoch", "open", "nonfinite", "lr", "samples")
FEW_RANKS = 8  # are read whole; of each of many ranks at most the share of READ_BYTES at the end of its log
READ_BYTES = 64 * 2 ** 20
# What the files beside the logs have to look like (`of_form`), as far as a report goes by it.
MODE = {"name": str, "curve": str, "terms": [str]}
FORMS = {"launch": {"command": [str], "modes": [{**MODE, "clip_norm": str, "gate": str}], "packages": {},
                    "settings": {}, "job": {}},
         "manifest": {"checkpoints": {"*": {"bytes": (int, float)}}}, "lock": {}}


def read_run(run):
    """All that the logs of a run say.

    run: folder of the run, Models/<data>_<net>.
    Returns: {"run": Path, "attempts": lines of attempts.jsonl, "steps": columns of all rows (see `to_numpy`), "once":
    the same of each step once (see `step_columns`), "epochs": lines of rank 0, those of an epoch that ran twice only
    once, "events": all other lines of all ranks in the order of time, "pace": {rank: its lines}, "now": {rank: its last
    breadcrumb}, "launches": of `read_launches`, "lock", "manifest": content of these files, {} where there is none,
    "pictures": Paths, oldest first}.
    Raises InputError if this is no run folder.
    """
    run = Path(run)
    attempts = list(lines_of(run / "attempts.jsonl"))
    if not attempts:
        raise InputError(f"{run}: there is no attempts.jsonl; give the folder of a run, Models/<data>_<net>.")
    found = {"run": run, "attempts": attempts, "epochs": {}, "events": [], "pace": {}, "now": {}}
    ranks = ranks_of(run)
    steps = new_columns()
    for rank in ranks:
        tail = None if rank == 0 or len(ranks) <= FEW_RANKS else READ_BYTES // len(ranks)
        read_rank_log(run, rank, found, steps if rank == 0 else None, tail)
    found["steps"] = to_numpy(steps)
    found["once"] = rows_once(found["steps"])
    found["epochs"] = [found["epochs"][number] for number in sorted(found["epochs"])]
    found["events"].sort(key=lambda line: line.get("time", 0))
    for name in ("lock", "manifest"):
        found[name] = read_json(run / f"{name}.json", FORMS[name])
    pictures = sorted((run / "pictures").glob("*.png"))
    return {**found, "launches": read_launches(run), "pictures": pictures}


def ranks_of(run):
    """Numbers of the ranks that have a log, rising."""
    names = (re.fullmatch(r"rank(\d+)\.jsonl", path.name) for path in Path(run).glob("rank*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def log_lines(run, rank):
    """All lines of a rank's log, oldest first, one after the other: a long log need not fit into memory."""
    yield from lines_of(Path(run) / f"rank{rank}.jsonl")


def lines_of(path, tail=None):
    """The objects of a log, as Runtime/files.read_lines, but one at a time. Nothing if there is no such file."""
    try:
        with open(path, errors="replace", newline="\n") as file:
            if tail is not None:
                file.seek(max(os.fstat(file.fileno()).st_size - tail, 0))
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # cut
                if isinstance(line, dict) and "event" in line and "attempt" in line:
                    yield line
    except (FileNotFoundError, NotADirectoryError):
        return


def read_rank_log(run, rank, found, steps, tail):
    """Sort the lines of a rank into `found`, those of its steps into the columns `steps` unless that is None."""
    pace = found["pace"].setdefault(rank, [])
    for line in lines_of(Path(run) / f"rank{rank}.jsonl", tail):
        kind = line["event"]
        if kind == "step":
            if steps is not None:
                add_row(steps, line)
        elif kind == "pace":
            pace.append(line)
        elif kind == "now":
            found["now"][rank] = line
        elif kind == "epoch":
            found["epochs"][line.get("epoch")] = line
        else:
            found["events"].append(line)
            if kind == "end" and steps is not None:
                add_row(steps, line)


# ---------------------------------------------------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------------------------------------------------

def new_columns():
    """Rows without columns yet: {name: one float for each row so far that had one or came later}."""
    return {name: array.array("d") for name in (*PLAIN, "is_step")}


def add_row(columns, line):
    """Add the numbers of a line "step", or of the "end" of an attempt, which has the time since its last step.

    A key of NESTED becomes one name with it: "terms.ang". What a line has not, or not as a number, is NaN.
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


def to_numpy(columns):
    """{name: float64 array of one value per row}; always with PLAIN and "is_step". columns: of `add_row`."""
    rows = len(columns["is_step"])
    return {name: np.array([*column, *[NAN] * (rows - len(column))]) for name, column in columns.items()}


def step_columns(found):
    """The steps of a run that are in its result: {name: values} by rising step; of a step done twice the later time.

    found: of `read_run`.
    """
    return found["once"]


def rows_once(steps):
    """`step_columns` of all rows. steps: of `to_numpy`."""
    rows = np.flatnonzero(steps["is_step"] == 1)
    if not len(rows):
        return {name: column[:0] for name, column in steps.items()}
    _, first_from_behind = np.unique(steps["step"][rows][::-1], return_index=True)
    rows = rows[::-1][first_from_behind]
    return {name: column[rows] for name, column in steps.items()}


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
    """The parts of a JSON value that have the form of what was written: damage costs the parts that it hit.

    form: a type or tuple of types; [form] for a list of such values; {name: form} for an object, whose other names are
    kept as they are, or {"*": form} for one whose values are all alike. Returns: those parts, None where nothing fits.
    """
    if isinstance(form, list) and isinstance(content, list):
        parts = [of_form(part, form[0]) for part in content]
        return [part for part in parts if part is not None]
    if isinstance(form, dict) and isinstance(content, dict):
        parts = {name: of_form(part, form.get(name, form.get("*", object))) for name, part in content.items()}
        return {name: part for name, part in parts.items() if part is not None}
    return content if isinstance(form, (type, tuple)) and isinstance(content, form) else None


def read_launches(run):
    """[{"number", "config": flat dict, **launch.json}] of the launches of a run, oldest first."""
    launches = []
    for folder in sorted(Path(run).glob("launches/*")):
        config = folder / "config.yaml"
        try:
            flat = flatten(yaml.safe_load(config.read_text()), config)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # a machine died while it was written
        launches.append({**read_json(folder / "launch.json", FORMS["launch"]), "number": folder.name, "config": flat})
    return launches


def modes_of(found):
    """The modes of the newest launch, as `provenance.described` has them, without None. found: of `read_run`."""
    modes = found["launches"][-1].get("modes", []) if found["launches"] else []
    return [mode for mode in modes if MODE.keys() <= mode.keys()]


def losses_of(found):
    """Names of the losses and terms of a run, those of its modes first. found: of `read_run`."""
    listed = [name for mode in modes_of(found) for name in (mode["curve"], *mode["terms"])]
    own = [name.removeprefix("terms.") for name in step_columns(found) if name.startswith("terms.")]
    return list(dict.fromkeys([*listed, *own]))


def config_of(found):
    """The flat config of the newest launch, {} where there is none. found: of `read_run`."""
    return found["launches"][-1]["config"] if found["launches"] else {}
