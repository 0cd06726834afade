"""Landmarks: tables, Slicer's .fcsv and .mrk.json, and legacy .vtk files. Here they are in mm, RAS.

A table is RAS. The other formats say which they are: .fcsv is RAS and the others are LPS unless they do. Sources:
https://slicer.readthedocs.io, "Markups"; https://docs.vtk.org, "VTK File Formats".
"""
import csv
import io
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

from Dataloader.nifti import LPS, ends_in
from Runtime.config import plain_number
from Runtime.errors import InputError
from Runtime.files import require_file, write_file

MESHES = (".vtp", ".vtu", ".ply", ".stl", ".obj")  # not read
SPACE = re.compile(rb"\bSPACE(?:=|\s+1\s+1\s+string\s.?)(RAS|LPS)\b")  # a title or field data of Slicer's .vtk files
MOST_SHOWN = 60  # characters of a row in a message
NAMED_BY = ("name", "label", "id")  # columns that name the points; the first one that a table has counts
SIGNS = {"RAS": 1.0, "0": 1.0, "LPS": LPS, "1": LPS}


def read_points(path):
    """Read landmarks from a table, or from a .fcsv, .mrk.json or legacy .vtk file.

    Returns: (P, 3) float64 in mm, RAS. Raises InputError if the file is missing or an entry lacks its numbers.
    """
    return _named_points(path)[0]


def read_point_pairs(fixed, moving):
    """Read the landmarks of two volumes so that both arrays have the same point in the same row.

    If the two files have the same names for their points, each once, the moving points are put into the order of the
    fixed ones. The names are a column name, label or id of a table, or Slicer's labels.
    fixed, moving: paths. Returns: two arrays as from `read_points`; their lengths may differ.
    Points are paired by row otherwise, with a warning if names in other rows contradict that. Raises InputError as
    `read_points`.
    """
    (fixed_mm, fixed_names), (moving_mm, moving_names) = map(_named_points, (fixed, moving))
    rows = {name: row for row, name in enumerate(moving_names)}
    if len(rows) == len(moving_names) and sorted(fixed_names) == sorted(moving_names) != []:
        return fixed_mm, moving_mm[[rows[name] for name in fixed_names]]
    known = set(fixed_names)
    astray = next((own for other, own in zip(fixed_names, moving_names) if own != other and own in known), None)
    if astray is not None and len(fixed_mm) == len(moving_mm):
        print(f"warning: {fixed} and {moving} are paired by row, although names such as {astray} stand in different "
              "rows: give the same point the same name, each once, or make sure that the rows agree.", file=sys.stderr)
    return fixed_mm, moving_mm


def _named_points(path):
    """`read_points`, and the names of the points: a list of str, empty if the file does not name all of them."""
    points_mm, names, copy = _parsed(path)
    if not len(points_mm):
        advice = "save it again with some" if copy else "write x,y,z in millimetres in each row"
        raise InputError(f"{path}: the file has no landmarks; {advice}.")
    return points_mm, names if all(names) else []


def write_points(folder, source, points_mm):
    """Write landmarks to `point_files`: as a table x,y,z in mm, RAS, and into a copy of a source of another format.

    source: where they were read. points_mm: (P, 3) RAS, in that order.
    """
    table, *copies = point_files(folder, source)
    write_file(table, "x,y,z\n" + "".join("{:.6f},{:.6f},{:.6f}\n".format(*point) for point in points_mm))
    for path in copies:
        write_file(path, _parsed(source)[2](np.asarray(points_mm)))


def point_files(folder, source):
    """The Paths that `write_points` writes."""
    suffix = _suffix(source)
    return [folder / "points.csv", *([folder / f"points{suffix}"] if suffix else [])]


def _suffix(path):
    """The suffix of one of FORMATS that a path has, or None."""
    return next((suffix for suffix in FORMATS if ends_in(path, suffix)), None)


def _parsed(path):
    """The points of a file, (P, 3) in mm, RAS; their names, "" for a point without one, or []; a function of other
    points that gives a copy of the file with them as bytes, None for a table."""
    path = Path(path)
    require_file(path)
    if ends_in(path, MESHES):
        raise InputError(f"{path}: landmarks are read from tables, .fcsv, .mrk.json and legacy .vtk files; save them "
                         "as one of these.")
    return FORMATS.get(_suffix(path), _table)(path, path.read_bytes())


def _fcsv(path, content):
    """Slicer's old list of control points: comment lines with the coordinate system and the columns, then a table."""
    text = _text(content)
    head = re.match(r"(?:#.*(?:\n|$))*", text)[0]
    heads = dict(re.findall(r"^#\s*(\w+)\s*=\s*(.*?)\s*$", head, re.M))
    columns = [name.strip().lower() for name in heads.get("columns", "id,x,y,z").split(",")]
    sign = SIGNS.get(heads.get("CoordinateSystem", "RAS").upper())
    if sign is None or not {"x", "y", "z"} <= set(columns):
        raise InputError(f"{path}: its header names no columns x, y and z, or another coordinate system than RAS and "
                         "LPS; export the points from Slicer again.")
    places = [columns.index(axis) for axis in "xyz"]
    try:
        rows = [row for row in csv.reader(io.StringIO(text[len(head):])) if row]
    except csv.Error as error:
        raise InputError(f"{path}: not a table of points ({error}); export it again.") from None
    points_mm = []
    for number, row in enumerate(rows, 1):
        # Newer versions write more cells than columns, but then the name is not in front of the coordinates.
        fits = len(row) > max(places) and (columns[0] != "label" or len(row) == len(columns))
        points_mm.append([_number(row[place]) for place in places] if fits else [None])
        if None in points_mm[-1]:
            raise InputError(f"{path}: point {number}, {_shown(row)}, has no x, y, z in millimetres.")

    def copy(points_mm):
        for row, point in zip(rows, points_mm * sign + 0.0):
            for place, value in zip(places, point):
                row[place] = f"{value:.6f}"
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(rows)
        return (head + table.getvalue()).encode()

    return np.array(points_mm, np.float64).reshape(-1, 3) * sign, _names(columns, rows), copy


def _markups(path, content):
    """Slicer's .mrk.json: lists of control points, each with its own coordinate system."""
    found, points_mm, names = [], [], []  # (control point, its signs); their places and labels
    try:
        markups = json.loads(_text(content))
        for each in markups["markups"]:
            if each.get("coordinateUnits", "mm") not in ("mm", ["mm"] * 3):
                raise InputError(f"{path}: its coordinates are in {each['coordinateUnits']}; export them in mm.")
            sign = SIGNS[each.get("coordinateSystem", "LPS")]
            found += [(point, sign) for point in each.get("controlPoints", [])]
        for number, (point, sign) in enumerate(found, 1):
            place = np.array(point.get("position") or [np.nan] * 3, np.float64)
            is_placed = point.get("positionStatus", "defined") == "defined" and place.shape == (3,)
            if not is_placed or not np.isfinite(place).all():
                raise InputError(f"{path}: control point {number}, {point.get('label', 'without a label')}, has no "
                                 "position of three numbers; place it in Slicer, or delete it.")
            points_mm.append(place * sign)
            names.append(str(point.get("label") or ""))
        points_mm = np.array(points_mm).reshape(-1, 3)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: not a list of Slicer's control points; export it again.") from None

    def copy(points_mm):
        for (point, sign), place in zip(found, points_mm):
            point["position"] = (place * sign + 0.0).tolist()
        return json.dumps(markups, indent=1).encode()

    return points_mm, names, copy


def _vtk(path, content):
    """A legacy .vtk file, ASCII or binary: its POINTS, whatever else it holds."""
    head = content.split(b"\n", 3)
    start = re.search(rb"^POINTS\s+(\d{1,18})\s+(float|double)[ \t]*\r?\n", content, re.M | re.I)
    if not content.startswith(b"# vtk DataFile") or len(head) < 4 or not start:
        raise InputError(f"{path}: not a legacy .vtk file with POINTS of float or double; save it as one.")
    count, kind, binary = 3 * int(start[1]), start[2].decode().lower(), head[2].strip().upper() == b"BINARY"
    space = SPACE.search(content)
    sign = SIGNS[space[1].decode() if space else "LPS"]
    dtype = np.dtype({"float": ">f4", "double": ">f8"}[kind])
    if binary:
        end = start.end() + count * dtype.itemsize
        numbers = np.frombuffer(content[start.end():end], dtype) if end <= len(content) else np.zeros(0)
    else:
        words = list(itertools.islice(re.finditer(rb"\S+", content[start.end():]), count))
        numbers = np.array([_number(word[0].decode("latin-1")) for word in words], np.float64)
        end = start.end() + (words[-1].end() if words else 0)
    if len(numbers) < count or not np.isfinite(numbers).all():
        raise InputError(f"{path}: it has fewer points than its header says, or they are not numbers; write it again.")

    def copy(points_mm):
        values = points_mm * sign + 0.0
        rows = "\n".join(" ".join(f"{value:.9g}" for value in point) for point in values)
        return content[:start.end()] + (values.astype(dtype).tobytes() if binary else rows.encode()) + content[end:]

    return numbers.astype(np.float64).reshape(-1, 3) * sign, [], copy


def _table(path, content):
    """x, y, z in each row.

    A header row names the columns x, y and z in any order, beside others such as an id; without a header there are
    three columns. Commas, semicolons, tabs or blanks separate them; decimal commas are read too, unless commas separate
    the columns. Cells may be quoted unless blanks separate them. The text is UTF-8, UTF-16 or Latin-1.
    """
    lines = [line for line in _text(content).splitlines() if line.strip()]
    rows = [_cells(path, line) for line in lines]
    columns, first, names = (0, 1, 2), 0, []
    if rows and None in map(_number, rows[0]):
        # Names may have blanks: the header's separator decides.
        separator = next((each for each in "\t;," if each in lines[0]), None)
        rows = [_cells(path, line, separator) for line in lines]
        names = [re.sub(r"[\W_]*mm\W*$", "", cell.strip("\"' ").lower()) for cell in rows[0]]
        if sorted(name for name in names if name in ("x", "y", "z")) != ["x", "y", "z"]:
            raise InputError(f"{path}: its header {_shown(rows[0])} does not name the columns x, y and z; correct "
                             "it, or leave it out.")
        columns, first = tuple(names.index(axis) for axis in "xyz"), 1
    points_mm, wanted = [], len(rows[0]) if first else 3
    for number, row in enumerate(rows[first:], first + 1):
        point_mm = [_number(row[column]) for column in columns] if len(row) == wanted else [None]
        if None in point_mm:
            advice = "" if first or len(row) < 4 else "; a header row must name the columns x, y and z"
            raise InputError(f"{path} row {number}: {_shown(row)} is not x, y, z in millimetres{advice}.")
        points_mm.append(point_mm)
    return np.array(points_mm), _names(names, rows[first:]), None


def _names(columns, rows):
    """The cells that name the points, by the names of the columns in lower case; [] without such a column."""
    place = next((columns.index(name) for name in NAMED_BY if name in columns), None)
    return [] if place is None else [row[place].strip() if place < len(row) else "" for row in rows]


def _text(content):
    """The text of a file in UTF-8, UTF-16 (with a byte order mark, or mostly ASCII) or Latin-1."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content[:4]:
        return content.decode("utf-16-be" if content[:1] == b"\0" else "utf-16-le", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _shown(row):
    """The cells of a row for a message."""
    text = ", ".join(row)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _cells(path, line, separator=None):
    """The cells of a row, split at a separator, or at its own one if it lacks that: tabs, semicolons, commas or blanks.
    """
    if not separator or separator not in line:
        line = line.strip()
        separator = next((each for each in "\t;" if each in line), None)
        if not separator and "," in line and (" " not in line or ", " in line or " ," in line):
            separator = ","  # else it is a decimal comma
    if not separator or line.count('"') % 2:  # a single quote, such as of inches, encloses nothing
        return [cell.strip() for cell in line.split(separator)]
    try:
        row, = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except csv.Error as error:
        raise InputError(f"{path}: not a table of points ({error}); save it again as CSV.") from None
    return [cell.strip() for cell in row]


def _number(cell):
    """The finite number in a cell, with a decimal point or comma, or None."""
    try:
        number = plain_number(cell.replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


FORMATS = {".fcsv": _fcsv, ".mrk.json": _markups, ".json": _markups, ".vtk": _vtk}
WRITTEN = ("points.csv", *(f"points{suffix}" for suffix in FORMATS))  # see `point_files`
