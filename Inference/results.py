"""What registrations leave in a folder, and which of them are whole.

results.json is written after the files of a pair and names each with its size and SHA-256. A pair that does not stand
there, or whose files are others, is not done: whoever was killed between two files leaves no row. Before a pair is
written its older files are removed, so that a new image never lies beside an old field.
"""
import csv
import io
import json
import os
import re
from pathlib import Path

from Inference.pair_figures import COLUMNS, means
from Runtime.files import sha256, write_file

OUTPUTS = ("warped.nii.gz", "warped_label.nii.gz", "field.nii.gz", "inverse_field.nii.gz", "jacobian.nii.gz",
           "points.csv", "picture.png")  # of a pair, in its folder
DISP = r"disp_\d{4,}_\d{4,}\.nii\.gz"  # beside results.json, for Learn2Reg


def write_results(out, rows, failed, settings, complete):
    """results.json and results.csv, a row for each pair and label; whoever reads them never sees half a file.

    rows: with "folder", which is stored relative to `out`. settings: on what the rows depend. complete: whether the run
    has come to its end.
    """
    stored = [{**row, "folder": os.path.relpath(row["folder"], out)} for row in rows]
    content = {"complete": complete, "pairs": stored, "failed": failed, "mean": means(rows, failed),
               "settings": settings}
    write_file(out / "results.csv", scores_csv(rows, COLUMNS).encode(errors="replace"))
    write_file(out / "results.json", (json.dumps(content, indent=1) + "\n").encode(errors="replace"))


def scores_csv(rows, columns):
    """The text of a CSV table: a row for each pair, and after it one for each of its labels."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["pair", "label", *columns])
    for row in rows:
        writer.writerow([row["name"], "all", *[row.get(column) for column in columns]])
        for label, values in row["labels"].items():
            writer.writerow([row["name"], label, *[values.get(column) for column in columns]])
    return text.getvalue()


def read_results(out):
    """What an earlier run left: {"complete", "settings", "pairs": {name: row, with its whole folder}}.

    Without pairs where results.json is not there or cannot be read.
    """
    try:
        found = json.loads((out / "results.json").read_text())
        rows = {row["name"]: {**row, "folder": str(out / row["folder"])} for row in found["pairs"]}
        return {"complete": found.get("complete", True), "settings": found.get("settings"), "pairs": rows}
    except (OSError, ValueError, LookupError, TypeError):
        return {"complete": True, "settings": None, "pairs": {}}


def kept_rows(earlier, settings, pairs, out):
    """Of an interrupted run with the same settings the rows of those pairs that are whole: {name: row}.

    earlier: from `read_results`. A run that came to its end is done anew.
    """
    if earlier["complete"] or earlier["settings"] != settings:
        return {}
    kept = {}
    for pair in pairs:
        row = earlier["pairs"].get(pair["name"])
        if row and row.get("source") == source_digests(pair) and not damage(row.get("files"), out):
            kept[pair["name"]] = row
    return kept


def source_digests(pair):
    """What the files of a pair hold, {key: SHA-256}; None for one that is not there."""
    return {key: sha256(path) if Path(path).is_file() else None for key, path in pair.items() if key != "name"}


def output_files(folder, disp=None):
    """The files of a pair that are there. disp: that of Learn2Reg, or None."""
    return [path for path in [*[folder / name for name in OUTPUTS], *[disp] * bool(disp)] if path.is_file()]


def remove_outputs(folder, out, row):
    """Remove what an earlier registration of this pair left. row: that of the earlier results, or None."""
    listed = [name for name in (row or {}).get("files", {}) if re.fullmatch(DISP, name)]
    for path in output_files(folder) + [out / name for name in listed]:
        path.unlink(missing_ok=True)


def file_digests(paths, out):
    """{path relative to `out`: {"bytes", "sha256"}} of files."""
    return {os.path.relpath(path, out): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}


def damage(files, out):
    """A phrase for the first file of `file_digests` that is not as it was written; None where all are."""
    if not files:
        return "results.json does not say which files belong to it"
    for name, entry in files.items():
        path = Path(out) / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            return f"{path} is not the file that was written"
    return None
