"""Fuzzing: files that somebody or something has changed, and the real programs on them.

    python tests/fuzz.py [--n 3000] [--seed 7] [--kinds config header ...] [--only NUMBER ...] [--keep FOLDER] [--json]

By seed and number each input is one mutation of a config, a NIfTI header, a landmark file, a list of pairs or volumes,
a checkpoint or a log. The main function of a real program runs on it in a forked child of a process that has imported
everything. Each input has to end in a result or in one sentence with exit code 43. Counted are
  tracebacks  another exit code, a traceback, or a refusal without exactly one sentence
  hangs       longer than 20 s
  silent      a result that is not what the changed file says: where the meaning of a mutation is known, it is worked
              out here, from the bytes and without the code under test (`meaning of` below)
  lost        a file that the program was given and that is gone or changed afterwards
The last line is one JSON object; the exit code is the number of faults. --keep leaves the folders of faulty inputs.
"""
import argparse
import codecs
import collections
import csv
import ctypes
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import nibabel  # noqa: E402
import numpy as np  # noqa: E402
import torch._dynamo  # noqa: E402, F401  an optimizer's first step would import it in each child
import yaml  # noqa: E402
from scipy import ndimage  # noqa: E402

import OM_augment  # noqa: E402
import OM_evaluate  # noqa: E402
import OM_register  # noqa: E402
import OM_train_3modes  # noqa: E402
from Diffusion import figures  # noqa: E402, F401
from Inference import register_pairs  # noqa: E402, F401
from omnimorph import explain  # noqa: E402
from Report import run as report  # noqa: E402
from Runtime import checkpoint  # noqa: E402
from Runtime.config import CONFIGS, KEYS, load_config  # noqa: E402
from Runtime.weights_file import read_weights  # noqa: E402
from tests import launching, tiny  # noqa: E402

LIMIT_S = 20
MOST_MEMORY = 3 * 2 ** 30  # beyond what the process has
SHAPE = (9, 8, 7)
AFFINE = np.array([[-1.5, 0.2, 0, 10], [0.1, 1.2, 0.1, -20], [0, 0.3, 2.0, 5], [0, 0, 0, 1]])
PROGRAMS = {"register": OM_register.main, "evaluate": OM_evaluate.main, "augment": OM_augment.main,
            "train": OM_train_3modes.main, "report": report.main,
            "explain": lambda words: explain.main()}
NASTY = ["", " ", "0", "-1", "1e3", "1e400", "-1e-400", "nan", "inf", "017", "1:30", "1_000", "0x10", "0o17", "3.0",
         "3.5", ".5", "5.", "+3", "--5", "1,5", "1e", "9007199254740993", "99999999999999999999", "\u0663", "\uff19",
         "true", "yes", "No", "~", "null", "[]", "[1, 2]", "{a: 1}", "&a 1", "*a", "!!int 3", "2024-01-05", "'7'",
         '"7"', "a b", "\u00e9", "\U0001f9e0", "../x", "/", "%s", "{}", "12 # twelve", "#", "|", ">", "- 1", "a: b",
         "\t", "x" * 5000]


@dataclass
class Case:
    """One input. words: the command line. check: () -> "" or what the result says that the input does not."""
    what: str
    program: str
    words: list
    check: object = lambda: ""
    stdin: Path = None
    grows: tuple = ()  # folders in which the program may write: there only whole files must not get lost


# ---------------------------------------------------------------------------------------------------------------------
# The originals
# ---------------------------------------------------------------------------------------------------------------------

def make_originals(folder):
    """All files that are mutated, whole: a pair with labels and landmarks, a data set, a trained run."""
    rng = np.random.default_rng(0)
    pair = folder / "pair"
    pair.mkdir(parents=True)
    smooth = [ndimage.gaussian_filter(rng.normal(size=SHAPE), 1.2) for _ in range(2)]
    for name, values in zip(("fixed", "moving"), smooth):
        image = nibabel.Nifti1Image((1000 * values).astype(np.int16), AFFINE)
        nibabel.save(image, pair / f"{name}.nii")
        nibabel.save(image, pair / f"{name}.nii.gz")
        for number in range(2):
            label = (values > np.quantile(values, 0.4 + 0.3 * number)).astype(np.uint8)
            nibabel.save(nibabel.Nifti1Image(label, AFFINE), pair / f"{name}_label{number}.nii.gz")
    for name, shift in (("zero", (0, 0, 0)), ("shift", (2.0, -3.0, 1.0))):
        vectors = np.broadcast_to(np.array(shift, np.float32), (*SHAPE, 1, 3))  # mm, LPS
        header = nibabel.Nifti1Header()
        header.set_intent(1007)
        nibabel.save(nibabel.Nifti1Image(np.ascontiguousarray(vectors), AFFINE, header), pair / f"{name}.nii.gz")
    nested = collections.defaultdict(dict)
    small = [f"{key}={value}" for key, value in tiny.SETTINGS.items() if key.split(".")[0] in ("model", "diffusion")]
    for key, value in load_config("config_om.yaml", ["refine.levels=1", "run.device=cpu", "run.threads=1",
                                                     "data.img_size=16", *small]).items():
        nested[key.split(".")[0]][key.split(".")[1]] = value
    (pair / "config.yaml").write_text(yaml.safe_dump(dict(nested), sort_keys=False, default_flow_style=False))
    tiny.make_data(folder, 8, 8)
    words = train_words(folder, "run.epochs=2")
    if OM_train_3modes.main(words):
        raise RuntimeError("the training of the originals failed")
    shutil.copytree(folder / "Models", folder / "continued/Models")
    if OM_train_3modes.main([*words, "--set", f"run.models={folder}/continued/Models", "--set", "run.epochs=3"]):
        raise RuntimeError("the continued training of the originals failed")


def train_words(folder, *settings):
    """Command line of the training in a folder of originals. settings: texts key=value."""
    words = tiny.arguments(folder, **tiny.QUICK, run__keep_last=99, run__patience_s=0, run__val_pairs=1)
    return [*words, *(word for setting in settings for word in ("--set", setting))]


# ---------------------------------------------------------------------------------------------------------------------
# Damage to any file
# ---------------------------------------------------------------------------------------------------------------------

def damaged(rng, content):
    """Bytes with something done to them that a disk, an editor or a copy does. Returns: what, the bytes."""
    place = rng.randrange(len(content)) if content else 0
    kinds = {"a flipped bit": lambda: content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)])
             + content[place + 1:],
             "a random byte": lambda: content[:place] + rng.randbytes(1) + content[place + 1:],
             "an inserted byte": lambda: content[:place] + rng.randbytes(1) + content[place:],
             "a lost byte": lambda: content[:place] + content[place + 1:],
             "cut off": lambda: content[:place],
             "zeros": lambda: content[:place] + bytes(min(512, len(content) - place)) + content[place + 512:],
             "a block twice": lambda: content[:place] + content[max(place - 64, 0):],
             "bytes after the end": lambda: content + rng.randbytes(rng.randrange(1, 200)),
             "empty": lambda: b"", "text": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
             "noise": lambda: rng.randbytes(rng.randrange(1, 600))}
    what = rng.choice(list(kinds))
    return f"{what} at {place}", kinds[what]()


def broken_text(rng, text):
    """Text with something done to it that an editor or another program does. Returns: what, bytes."""
    kinds = {"with a mark of its byte order": lambda: codecs.BOM_UTF8 + text.encode(),
             "as UTF-16": lambda: text.encode("utf-16"),
             "with CR LF": lambda: text.replace("\n", "\r\n").encode(),
             "with CR": lambda: text.replace("\n", "\r").encode(),
             "with tabs": lambda: text.replace("  ", "\t").encode(),
             "with a NUL": lambda: text.replace("\n", "\n\0", 1).encode(),
             "in Latin-1": lambda: (text + "# \u00e9\n").encode("latin-1"),
             "without its last line": lambda: text.rstrip("\n").rpartition("\n")[0].encode(),
             "deep": lambda: (text + "[" * 3000).encode(),
             "long": lambda: (text + "# " + "x" * 10 ** 6 + "\n").encode()}
    what = rng.choice(list(kinds))
    return what, kinds[what]()


# ---------------------------------------------------------------------------------------------------------------------
# Configs
# ---------------------------------------------------------------------------------------------------------------------

def config_case(rng, work):
    path = work / "config.yaml"
    text = path.read_text()
    changed, expected, what = None, None, ""
    if rng.random() < 0.65:
        changed = rng.choice([key for key in KEYS if key != "model.dims"])
        value = rng.choice(NASTY) if rng.random() < 0.6 else near_value(rng, changed)
        text, expected = with_value(text, changed, value), meaning_of_value(changed, value)
        what = f"{changed}: {value[:40]}"
        path.write_text(text)
    elif rng.random() < 0.5:
        what, content = broken_text(rng, text)
        path.write_bytes(content)
    elif rng.random() < 0.5:
        what, text = moved_line(rng, text)
        path.write_text(text)
    else:
        what, content = damaged(rng, path.read_bytes())
        path.write_bytes(content)
    words = ["--fixed", "fixed.nii.gz", "--moving", "moving.nii.gz", "--affine", "none", "--refine", "1", "--out",
             "out", "--device", "cpu", "--no-picture", "--config", "config.yaml"]
    if rng.random() < 0.2:
        words = ["--image", "fixed.nii.gz", "--label", "fixed_label0.nii.gz", "--draws", "1", "--model", "none",
                 "--config", "config.yaml", "--out", "out"]
        return Case(f"augment, {what}", "augment", words)
    return Case(what, "register", words, lambda: config_silent(work, changed, expected))


def near_value(rng, key):
    """A value near the limits of a key, as text."""
    rule = KEYS[key]
    if rule[0] == "str" and len(rule) > 1:
        return rng.choice([*rule[1], rule[1][0].upper(), rule[1][0][:-1]])
    if rule[0].startswith(("int", "float", "auto or float")):
        low, high = rule[1:3]
        base = rng.choice([limit for limit in (low, high, 1, 7) if limit is not None])
        return str(base + rng.choice([0, 0, 1, -1, 0.5, 1e-9]))
    return rng.choice(["true", "false", "on", "off", "maybe", "1", "some text"])


def with_value(text, key, value):
    """The config with another text after a key, as an editor would leave it."""
    section, name = key.split(".")
    lines, here = text.split("\n"), ""
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            here = line.split(":")[0]
        elif here == section and line.strip().split(":")[0] == name:
            end = number + 1
            while end < len(lines) and lines[end].startswith(("  -", "   ")):  # a list
                end += 1
            return "\n".join([*lines[:number], f"  {name}: {value}", *lines[end:]])
    raise LookupError(key)


def meaning_of_value(key, text):
    """What a plain text after a key means: a list of values that are right; None where nobody can say.

    Of a number the text in decimal notation, of a key of texts the text itself; anything else has to be refused: [].
    """
    rule = KEYS[key]
    plain = text.strip()
    if re.search(r"[\[\]{}&*!|>\"'#:\t\n]|^- |^%|^@|^`|^,", plain) or plain in ("~", "null", ""):
        return None
    if rule[0] == "str":
        return [plain, os.path.expanduser(plain)] if len(rule) == 1 or plain in rule[1] else []
    if rule[0] in ("bool", "auto or bool"):
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "auto": "auto"}
        return [words[plain.lower()]] if plain.lower() in words else []
    if rule[0] == "auto or float" and plain == "auto":
        return ["auto"]
    if rule[0].endswith("+"):
        return None if "," in plain or re.fullmatch(r"[+-]?\d+", plain) else []
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", plain, re.ASCII) or len(plain) > 400:
        return []
    if rule[0] == "int":
        number = Fraction(plain) if abs(float(plain)) < 1e30 else Fraction(1, 2)
        return [int(number)] if number.denominator == 1 else []
    return [float(plain)] if math.isfinite(float(plain)) else []


def moved_line(rng, text):
    """Lines lost, doubled, indented otherwise. Returns: what, text."""
    lines = text.split("\n")
    place = rng.randrange(len(lines) - 1)
    other = rng.randrange(len(lines) - 1)
    kinds = {"lost": lines[:place] + lines[place + 1:],
             "twice": lines[:place + 1] + lines[place:],
             "twice, elsewhere": lines[:other] + [lines[place]] + lines[other:],
             "indented": [*lines[:place], " " + lines[place], *lines[place + 1:]],
             "not indented": [*lines[:place], lines[place].lstrip(), *lines[place + 1:]],
             "joined with the next": [*lines[:place], lines[place] + lines[place + 1], *lines[place + 2:]],
             "commented out": [*lines[:place], "#" + lines[place], *lines[place + 1:]],
             "based on another": [f"base: {rng.choice(['config_om.yaml', 'config.yaml', '', 'no.yaml', '[1]', '/'])}",
                                  *lines]}
    what = rng.choice(list(kinds))
    return f"line {place + 1} {what}: {lines[place][:40]}", "\n".join(kinds[what])


def list_in_lines(text, key):
    """The list that stands below a key with one item a line, as bytes for each item; None for any other value."""
    lines = [line for line in text.split(b"\n") if not line.startswith(b"#")]
    if (head := b"  " + key.split(".")[1].encode() + b":") not in lines:
        return None
    return [line[4:] for line in itertools.takewhile(lambda line: line.startswith(b"  - "),
                                                     lines[lines.index(head) + 1:])]


DERIVED = {"data.root": {"data.name", "data.cache"}, "data.name": {"data.cache"}}


def config_silent(work, changed, expected):
    """Whether results.json has the config that the file says: the changed key as typed, all others as they were."""
    found = json.loads((work / "out/results.json").read_text())["settings"]["config"]
    text = (work / "config.yaml").read_bytes()
    whole = json.loads((work / "config.json").read_text())
    for key, value in found.items():
        if key == "model.dims" or key in DERIVED.get(changed, ()):
            continue
        if key == changed:
            if expected is not None and not any(same_value(key, value, right) for right in expected):
                return f"{key} became {value!r}, right is {expected}"
        elif value != whole[key] and key.split(".")[1].encode() + b": " + yaml_text(value) not in text \
                and list_in_lines(text, key) != [*map(yaml_text, np.atleast_1d(value).tolist())]:
            return f"{key} became {value!r} from {whole[key]!r}"
    return ""


def same_value(key, value, right):
    if key == "data.img_size" and isinstance(value, list):
        return set(value) == {right}
    return value == right and isinstance(value, bool) == isinstance(right, bool)


def yaml_text(value):
    return yaml.safe_dump(value).split("\n")[0].encode()


# ---------------------------------------------------------------------------------------------------------------------
# NIfTI headers
# ---------------------------------------------------------------------------------------------------------------------

FIELDS = {"sizeof_hdr": (0, "i", 1), "dim": (40, "h", 8), "intent_code": (68, "h", 1), "datatype": (70, "h", 1),
          "bitpix": (72, "h", 1), "pixdim": (76, "f", 8), "vox_offset": (108, "f", 1), "scl_slope": (112, "f", 1),
          "scl_inter": (116, "f", 1), "xyzt_units": (123, "B", 1), "qform_code": (252, "h", 1),
          "sform_code": (254, "h", 1), "quatern": (256, "f", 3), "qoffset": (268, "f", 3), "srow": (280, "f", 12)}
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
FLOATS = [0.0, 1.0, -1.0, 2.5, -0.5, 0.01, 1e-30, 1e30, math.nan, math.inf, -math.inf, 352.0, 360.0, 368.0, 1e9]
NUMBERS = {"h": [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 64, 128, 256, 512, 1007, 2304, 32767, -1, -32768],
           "i": [348, 540, 0, -1], "B": [0, 1, 2, 3, 8, 10, 255]}


def header_case(rng, work):
    name = rng.choice(["moving.nii", "moving.nii.gz"])
    path = work / name
    nifti = nibabel.load(path)  # the whole file, not packed
    content = nifti.to_bytes()
    what = ""
    if rng.random() < 0.8:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            field = rng.choice(list(FIELDS))
            start, code, count = FIELDS[field]
            number = rng.randrange(count)
            value = rng.choice(NUMBERS[code]) if code != "f" else rng.choice([*FLOATS, rng.uniform(-3, 3)])
            content = bytearray(content)
            struct.pack_into(f"<{code}", content, start + number * struct.calcsize(code), value)
            content, what = bytes(content), f"{what}{field}[{number}] = {value}; "
    elif rng.random() < 0.2:
        nifti = nibabel.Nifti1Image(np.asarray(nifti.dataobj), AFFINE, nifti.header.as_byteswapped(">"))
        what, content = "big endian", nifti.to_bytes()
    else:
        what, content = damaged(rng, content)
    if name.endswith(".gz"):
        content = gzip.compress(content, 1, mtime=0)
        if rng.random() < 0.15:
            more, content = damaged(rng, content)
            what += f"; packed: {more}"
    path.write_bytes(content)
    use = rng.choice(["image", "image", "label", "fixed"])
    if use == "fixed":
        words = ["--fixed", name, "--moving", "fixed.nii.gz", "--affine", "none", "--refine", "1", "--start", "header",
                 "--no-picture", "--device", "cpu", "--out", "out"]
    else:
        option = "--moving-label" if use == "label" else "--moving"
        words = ["--apply", "zero.nii.gz", option, name, "--labels", "nearest", "--out", "out"]
    return Case(f"{name} as {use}: {what}", "register", words, lambda: header_silent(work, path, use))


def meaning_of_nifti(content):
    """(array or None, affine) that the bytes of a NIfTI-1 file say, by the standard; None where they say nothing."""
    order = next((order for order in "<>" if struct.unpack_from(f"{order}i", content) == (348,)), None)
    if order is None:
        return None
    head = {name: struct.unpack_from(f"{order}{count}{code}", content, start)
            for name, (start, code, count) in FIELDS.items()}
    rank = head["dim"][0]
    if not 1 <= rank <= 7 or head["datatype"][0] not in TYPES:
        return None
    shape = list(head["dim"][1:rank + 1])
    while len(shape) > 3 and shape[-1] == 1:
        shape.pop()
    if len(shape) != 3 or min(shape) < 1:
        return None
    size = [abs(length) for length in head["pixdim"][1:4]]
    affine = np.eye(4)
    if head["sform_code"][0] > 0:
        affine[:3] = np.array(head["srow"]).reshape(3, 4)
    elif head["qform_code"][0] > 0:
        b, c, d = head["quatern"]
        a = math.sqrt(max(0.0, 1 - b * b - c * c - d * d))
        turn = np.array([[a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
                         [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
                         [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c]])
        size[2] *= -1 if head["pixdim"][0] < 0 else 1
        affine[:3, :3], affine[:3, 3] = turn * size, head["qoffset"]
    else:
        return None  # programs differ
    affine[:3] *= {1: 1000.0, 3: 0.001}.get(head["xyzt_units"][0] & 7, 1.0)
    start, kind = int(head["vox_offset"][0]), np.dtype(order + TYPES[head["datatype"][0]])
    if len(content) < start + kind.itemsize * math.prod(shape):
        return None
    array = np.frombuffer(content, kind, math.prod(shape), start).reshape(shape, order="F").astype(np.float64)
    slope, inter = head["scl_slope"][0], head["scl_inter"][0]
    return (array * slope + inter if slope and math.isfinite(slope) else array), affine


def read_plain(path):
    content = path.read_bytes()
    if path.name.endswith(".gz"):
        content = gzip.decompress(content)
    return content


def header_silent(work, path, use):
    """Whether what was written is what the header says, worked out here from the bytes."""
    content = read_plain(path)
    with np.errstate(all="ignore"):
        meant = meaning_of_nifti(content)
    if meant is None or not np.isfinite(meant[1]).all():
        return ""
    written = nibabel.load(work / ("out/warped_label.nii.gz" if use == "label" else "out/warped.nii.gz"))
    if use == "fixed":
        right, near = meant[1], written.affine.copy()
        near[:3] *= unit_of(written)
        if written.shape != meant[0].shape or not np.allclose(near, right, 1e-4, 1e-3 * max(1, abs(right).max())):
            return f"the grid is {written.shape} {near[:3].round(3).tolist()}, right is {right[:3].round(3).tolist()}"
        return ""
    with np.errstate(all="ignore"):
        matrix = np.linalg.inv(meant[1]) @ AFFINE
        grid = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij")).reshape(3, -1)
        place = matrix[:3, :3] @ grid + matrix[:3, 3:]
        limits = np.array(meant[0].shape)[:, None] - 1.001
        inner = ((place > 0.001) & (place < limits)).all(0)
        if use == "label":
            inner &= (abs(place % 1 - 0.5) > 0.01).all(0)
        values = meant[0].astype(np.float32).astype(np.float64)
        right = ndimage.map_coordinates(values, place, order=0 if use == "label" else 1, mode="nearest")[inner]
        found = np.asarray(written.dataobj, np.float64).reshape(-1)[inner]
        reach = abs(values).max() or 1
        off = abs(found - right)
    bound = 0.501 + 1e-4 * reach if np.dtype(written.get_data_dtype()).kind in "ui" else 2e-3 * reach
    if use == "label":
        bound = 1e-3 * reach
    if len(off) and not off.max() <= bound:
        worst = int(np.nanargmax(off)) if np.isfinite(off).any() else 0
        return f"a voxel is {found[worst]:g} and not {right[worst]:g} ({(off > bound).sum()} of {len(off)})"
    return ""


def unit_of(image):
    return {1: 1000.0, 3: 0.001}.get(int(image.header["xyzt_units"]) & 7, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Landmarks
# ---------------------------------------------------------------------------------------------------------------------

def points_case(rng, work):
    """meaning of: rows of numbers as they are given, and the header's order; any other row has to be refused."""
    points = [[round(rng.uniform(-30, 30), 3) for _ in range(3)] for _ in range(rng.randrange(1, 6))]
    order = rng.sample("xyz", 3) if rng.random() < 0.5 else ["x", "y", "z"]
    header = order != ["x", "y", "z"] or rng.random() < 0.5
    comma, expected, what = rng.choice([",", ", ", ";", "\t", " "]), [list(point) for point in points], "plain"
    decimal = "," if comma in (";", "\t") and rng.random() < 0.5 else "."
    cells = [[repr(point["xyz".index(axis)]).replace(".", decimal) for axis in order] for point in points]
    kind = rng.choice(["plain", "cell", "cell", "column", "row", "text", "bytes", "header"])
    if kind == "cell":
        row, column, value = rng.randrange(len(cells)), rng.randrange(3), rng.choice(NASTY)
        cells[row][column] = value
        plain = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value, re.ASCII) and len(value) < 400
        number = float(value) if plain else math.nan
        if value.strip('"\' ') == "7":
            expected = None  # quoted: a number to some
        elif value == "1,5":
            number, expected = 1.5, expected if comma in (";", "\t") else None
        elif "#" in value or value in ("", " ", "\t") or comma in (" ", "\t"):
            expected = None
        if expected is not None:
            expected[row]["xyz".index(order[column])] = number
            expected = expected if math.isfinite(number) else []
        what = f"cell {value[:20]!r}"
    elif kind == "column":
        for row in cells:
            row.insert(rng.randrange(4), str(rng.randrange(9)))
        expected, what = None, "a further column"
        if not header:
            expected = []
    elif kind == "row":
        cells.insert(rng.randrange(len(cells) + 1), cells[0][:rng.randrange(3)])
        expected, what = None, "a short row"
    lines = [comma.join(row) for row in cells]
    if header:
        names = [f"{axis}{rng.choice(['', '', '_mm', ' (mm)' if comma != ' ' else '', ''])}" for axis in order]
        if kind == "header":
            names, what, expected = rng.sample(["x", "y", "r", "a", "s", "i", "id", "z", "X"], 3), "other names", None
        lines.insert(0, comma.join(names))
    text = "\n".join(lines) + "\n"
    content = text.encode()
    if kind == "text":
        what, content = broken_text(rng, text)
        expected = expected if "byte order" in what or what in ("as UTF-16", "with CR LF", "with CR") else None
    elif kind == "bytes":
        what, content = damaged(rng, content)
        expected = None
    (work / "points.csv").write_bytes(content)
    words = ["--apply", "shift.nii.gz", "--points", "points.csv", "--out", "out"]
    return Case(f"{what}, {comma!r} {decimal!r} {order}", "register", words,
                lambda: points_silent(work, expected, len(lines) - header, kind))


def points_silent(work, expected, rows, kind):
    """Whether points.csv has the given landmarks, moved by the field: (-2, 3, 1) mm in RAS."""
    lines = (work / "out/points.csv").read_text().splitlines()[1:]
    found = [[float(cell) for cell in line.split(",")] for line in lines]
    if expected is None:
        wrong = kind == "row" and len(found) not in (rows, rows - 1)  # a row without a cell is a blank line
        return f"{len(found)} landmarks of {rows} rows" if wrong else ""
    right = [[x - 2, y + 3, z + 1] for x, y, z in expected]
    if len(found) != len(right) or not np.allclose(found, right, 1e-4, 2e-3):
        return f"{found} and not {right}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Lists of pairs and of volumes
# ---------------------------------------------------------------------------------------------------------------------

def pairs_case(rng, work):
    """meaning of: the files and names of each entry, which the result must have or refuse."""
    to = rng.choice(["evaluate", "evaluate", "register", "augment"])
    if to == "augment":
        return datalist_case(rng, work)
    sides = ["fixed_label", "warped_label"] if to == "evaluate" else ["fixed", "moving"]
    stems = [["fixed_label0", "fixed_label1", "moving_label0", "moving_label1"], ["fixed", "moving"]][to == "register"]
    entries = [{"name": f"p{number}", **{side: f"{rng.choice(stems)}.nii.gz" for side in sides}}
               for number in range(rng.randrange(1, 4) if to == "evaluate" else 1)]
    if to == "register":
        entries[0].update(fixed="fixed.nii.gz", moving="moving.nii.gz")
    kind, what = rng.choice(["plain", "value", "value", "key", "twice", "text", "bytes", "syntax"]), ""
    expected = [dict(entry) for entry in entries]
    entry = rng.choice(entries)
    key = rng.choice(list(entry))
    if kind == "value":
        entry[key] = rng.choice([None, 3, True, [], {}, ["a"], *NASTY[:30], "missing.nii.gz", "config.yaml", ".",
                                 "data"])
        what, expected = f"{key} = {str(entry[key])[:30]!r}", None
    elif kind == "key":
        entry[rng.choice([key.upper(), key + "s", "", "fixed image", "field ", "weight"])] = entry.pop(key)
        what, expected = f"{key} under another name", None
    is_csv = to == "register" and rng.random() < 0.5
    if is_csv:
        table = io.StringIO()
        columns = list(dict.fromkeys(name for entry in entries for name in entry))
        if kind == "twice":
            columns, what, expected = [*columns, key], f"column {key} twice", []
        writer = csv.writer(table, delimiter=rng.choice([",", ";", "\t"]), lineterminator="\n")
        writer.writerows([columns, *([entry.get(name, "") for name in columns] for entry in entries)])
        text = table.getvalue()
    else:
        text = json.dumps(entries if rng.random() < 0.7 else {"pairs": entries}, indent=1)
        if kind == "twice":
            text = text.replace(f'"{key}": ', f'"{key}": "other.nii.gz",\n "{key}": ', 1)
            what, expected = f"{key} twice in one entry", []
    content = text.encode()
    if kind == "text":
        what, content = broken_text(rng, text)
    elif kind == "bytes":
        what, content = damaged(rng, content)
        expected = None
    elif kind == "syntax":
        place = rng.randrange(len(text))
        piece = rng.choice([",", "}", "]", '"', "NaN", "//", "\\", "'", "\ud7ff", "0" * 5000])
        what, content, expected = f"{piece[:5]} at {place}", (text[:place] + piece + text[place:]).encode(), None
    path = work / ("pairs.csv" if is_csv else "pairs.json")
    path.write_bytes(content)
    words = ["--pairs", path.name, "--out", "out"]
    if to == "register":
        words += ["--affine", "none", "--refine", "1", "--no-picture", "--device", "cpu"]
    return Case(f"{to} {path.name}: {what}", to, words, lambda: pairs_silent(work, to, expected))


def pairs_silent(work, to, expected):
    if expected is None:
        return ""
    found = json.loads((work / ("out/scores.json" if to == "evaluate" else "out/results.json")).read_text())["pairs"]
    if [row["name"] for row in found] != [entry["name"] for entry in expected]:
        return f"pairs {[row['name'] for row in found]} and not {[entry['name'] for entry in expected]}"
    for row, entry in zip(found, expected):
        if to == "register":
            names = Path(row["fixed"]).name, Path(row["moving"]).name
            if names != (entry["fixed"], entry["moving"]):
                return f"{names} were registered"
        else:
            fixed, warped = (np.asarray(nibabel.load(work / entry[key]).dataobj) for key in ("fixed_label",
                                                                                            "warped_label"))
            dice = 2 * (fixed * warped).sum() / (fixed.sum() + warped.sum())
            if abs(row["dice"] - dice) > 1e-6:
                return f"{row['name']}: Dice {row['dice']} and not {dice}"
    return ""


def datalist_case(rng, work):
    path = work / "data/dataset.json"
    content = json.loads(path.read_text())
    entries, expected = content["training"], None
    kind = rng.choice(["plain", "value", "lost", "twice", "text", "bytes", "key"])
    what, number = kind, rng.randrange(len(entries))
    if kind == "value":
        entries[number][rng.choice(["image", "label"])] = rng.choice([None, 3, [], {}, "", "missing.nii.gz", "../x",
                                                                      *NASTY[:20]])
    elif kind == "lost":
        entries.pop(number)
    elif kind == "key":
        key = rng.choice(list(content))
        content[key + "s"] = content.pop(key)
        what = f"{key} under another name"
    if kind in ("plain", "lost"):
        expected = [Path(entry["image"]).name for entry in entries]
    text = json.dumps(content, indent=1)
    if kind == "twice":
        line = '"image": "./imagesTr/subject_0002.nii.gz"'
        text, expected = text.replace(line, f'"image": "./imagesTr/subject_0007.nii.gz", {line}'), []
    data = text.encode()
    if kind == "text":
        what, data = broken_text(rng, text)
    elif kind == "bytes":
        what, data = damaged(rng, data)
    path.write_bytes(data)
    words = ["--data", "data/dataset.json", "--model", "none", "--draws", "1", "--out", "out", "--config",
             "config.yaml"]
    return Case(f"augment dataset.json: {what}", "augment", words, lambda: datalist_silent(work, expected))


def datalist_silent(work, expected):
    listed = json.loads((work / "out/dataset.json").read_text())["training"]
    missing = [entry["image"] for entry in listed if not (work / "out" / entry["image"]).is_file()]
    found = sorted(Path(entry["image"]).name.split("_draw")[0] + ".nii.gz" for entry in listed)
    if missing or (expected is not None and found != sorted(expected)):
        return f"copies of {found} and not of {expected}; not there: {missing}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and run folders
# ---------------------------------------------------------------------------------------------------------------------

def checkpoint_case(rng, work):
    """meaning of: weights are those that were trained, to the last bit, or they are refused."""
    run = work / "Models/demo_om_net"
    newest, words, program = run / "000002_demo_om_net.pth", [], "register"
    kind = rng.choice(["file", "file", "copy", "state", "resume", "resume", "manifest", "safetensors"])
    target = newest
    if kind in ("copy", "state"):
        target = work / "model.pth"
        newest.rename(target)
        shutil.rmtree(run)
    if kind == "safetensors":
        target = work / "model.safetensors"
        shutil.copy(work / "universal.safetensors", target)
    what = ""
    if kind == "state":
        what = changed_state(rng, target)
    elif kind == "manifest":
        target = rng.choice([run / "manifest.json", run / "manifest.json", run / "step.json", run / "attempts.jsonl",
                             run / "launches/0000/config.yaml", run / "rank0.jsonl"])
        if not target.exists():
            target = run / "manifest.json"
        if target.suffix == ".json" and rng.random() < 0.6:
            what, text = changed_json(rng, target.read_text())
            target.write_text(text)
    elif rng.random() < 0.1:
        what = "another checkpoint in its place"
        if kind in ("file", "resume"):
            shutil.copy(run / "000001_demo_om_net.pth", target)
        else:
            what = ""
    if not what:
        what, content = damaged(rng, target.read_bytes())
        target.write_bytes(content)
    if kind == "resume" or (kind == "manifest" and rng.random() < 0.5):
        program, words = "train", train_words(work, "run.epochs=3")
        check = lambda: resumed_silent(work)  # noqa: E731
    else:
        model = target if kind in ("copy", "state", "safetensors") else rng.choice([run, newest])
        words = ["--fixed", "fixed.nii.gz", "--moving", "moving.nii.gz", "--model", str(model), "--affine", "none",
                 "--refine", "0", "--no-picture", "--device", "cpu", "--out", "out"]
        changed = kind == "state"
        check = lambda: weights_silent(work, kind, changed)  # noqa: E731
    return Case(f"{kind} {target.name}: {what}", program, words, check, grows=(work / "Models", work / "Logs"))


def changed_state(rng, path):
    """Save a checkpoint with one thing in it changed. Returns: what."""
    state = torch.load(path, weights_only=True)
    name = rng.choice(list(state["model"]))
    tensor = state["model"][name]
    kinds = {"a weight less": lambda: state["model"].pop(name),
             "a weight of another shape": lambda: state["model"].update({name: tensor.flatten()[:-1]}),
             "a weight of text": lambda: state["model"].update({name: "weight"}),
             "a weight not finite": lambda: state["model"].update({name: torch.full_like(tensor, math.nan)}),
             "a weight more": lambda: state["model"].update({"more.weight": tensor}),
             "no config": lambda: state.pop("config"), "another format": lambda: state.update(format=7),
             "a config of text": lambda: state.update(config="text"),
             "a key of the config": lambda: state["config"].update({rng.choice(list(KEYS)): rng.choice(NASTY)}),
             "a config for another size": lambda: state["config"].update({"model.channels": [4, 4, 16]}),
             "no model": lambda: state.pop("model"), "a list": lambda: state.clear()}
    what = rng.choice(list(kinds))
    kinds[what]()
    torch.save(list(state) if what == "a list" else state, path)
    return f"{what} ({name})"


def changed_json(rng, text):
    """A JSON text with one value, wherever it stands, replaced. Returns: what, text."""
    content = json.loads(text)
    places, stack = [], [content]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                stack.append(node[key])
    node, key = rng.choice(places)
    node[key] = rng.choice([None, -1, 10 ** 30, 1.5, "", "x", [], {}, True])
    return f"{key} = {node[key]!r}", json.dumps(content, indent=2)


def weights_silent(work, kind, changed):
    """Whether the weights that were used are trained ones."""
    used = json.loads((work / "out/results.json").read_text())["settings"]["weights"]
    known = json.loads((work / "weights.json").read_text())
    if kind == "safetensors":
        return "" if used == known["universal"] else f"other weights, {used}"
    return "" if used in known["trained"] or changed else f"weights that were never trained, {used}"


def resumed_silent(work):
    """Whether the continued run has the weights that an undisturbed one has."""
    known = json.loads((work / "weights.json").read_text())["continued"]
    run = work / "Models/demo_om_net"
    manifest = json.loads((run / "manifest.json").read_text())["checkpoints"]
    last = next((name for name, entry in manifest.items() if entry["epoch"] == 3), None)
    if last is None:
        return "done, without a third epoch"
    found = checkpoint.weights_sha256(torch.load(run / last, weights_only=True)["model"])
    return "" if found == known else "the third epoch has other weights"


# ---------------------------------------------------------------------------------------------------------------------
# Logs
# ---------------------------------------------------------------------------------------------------------------------

def logs_case(rng, work):
    """meaning of: a number in the last line of a step is the last value that the report tells."""
    run, expected = work / "Models/demo_om_net", None
    path = rng.choice([run / "rank0.jsonl", run / "rank0.jsonl", run / "attempts.jsonl",
                       run / "launches/0000/launch.json", run / "launches/0000/config.yaml",
                       run / "manifest.json", run / "step.json"])
    lines = path.read_text().split("\n")
    kind = rng.choice(["number", "value", "value", "line", "bytes"])
    what = ""
    if kind == "number":
        path = run / "rank0.jsonl"
        lines = path.read_text().split("\n")
        last = max(number for number, line in enumerate(lines) if '"event": "step"' in line)
        content = json.loads(lines[last])
        name = rng.choice(["dist", "imgsim", "imgmse", "contrastive"])
        content["terms"][name] = value = round(rng.uniform(1, 9), 3)
        lines[last] = json.dumps(content)
        path.write_text("\n".join(lines))
        expected, what = (name, value), f"{name} = {value}"
    elif kind == "value" and path.suffix in (".json", ".jsonl"):
        number = rng.randrange(len(lines)) if path.suffix == ".jsonl" else None
        text = lines[number] if number is not None else "\n".join(lines)
        try:
            what, text = changed_json(rng, text)
        except ValueError:
            what = "an empty line"
        path.write_text(text if number is None else "\n".join([*lines[:number], text, *lines[number + 1:]]))
    elif kind == "line":
        number = rng.randrange(len(lines))
        other = rng.choice([lines[:number] + lines[number + 1:], lines[::-1],
                            lines[:number] + [lines[number]] * 2 + lines[number + 1:],
                            lines[:number] + [lines[number][:len(lines[number]) // 2]]])
        what = "lines lost, doubled, cut or in another order"
        path.write_text("\n".join(other))
    if not what:
        what, content = damaged(rng, path.read_bytes())
        path.write_bytes(content)
    program = rng.choice(["report", "report", "page", "explain"])
    if kind == "number":
        program = "report"
    title = f"{program} {path.name}: {what}"
    if program == "explain":
        return Case(title, "explain", [], stdin=path)
    words = {"report": [str(run), "--text"], "page": [str(run), "--out", "report.html"]}[program]
    return Case(title, "report", words, lambda: log_silent(work, expected))


def log_silent(work, expected):
    if expected is None:
        return ""
    name, value = expected
    row = next((line.split() for line in (work / "stdout").read_text().splitlines() if line.split()[:1] == [name]), [])
    return "" if f"{value:.3g}" in row else f"{name} = {value}, and the report says {row[:3]}"


# ---------------------------------------------------------------------------------------------------------------------
# One input
# ---------------------------------------------------------------------------------------------------------------------

KINDS = {"config": (config_case, ("pair", "data")), "header": (header_case, ("pair",)),
         "points": (points_case, ("pair",)), "pairs": (pairs_case, ("pair", "data")),
         "checkpoint": (checkpoint_case, ("pair", "data", "Models")), "logs": (logs_case, ("Models",))}


def run_child(case, work):
    """What the forked child does: outputs and limits of its own, then the program. Does not return."""
    code = 1
    try:
        os.setsid()
        os.chdir(work)
        for name, stream in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(case.stdin or os.devnull, os.O_RDONLY), 0)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY,) * 2)
        sys.stdin, sys.argv = open(0), [case.program, *case.words]
        code = PROGRAMS[case.program](case.words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def wait(pid):
    """Exit code of a child, minus its signal, None where it takes longer than the limit; its processor seconds.

    Nothing of it is left.
    """
    until = time.monotonic() + LIMIT_S * launching.SLOW  # processor seconds have the limit itself
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found or time.monotonic() > until:
            break
        time.sleep(0.01)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not found:
        usage = os.wait4(pid, 0)[2]
    spent = usage.ru_utime + usage.ru_stime
    return (os.waitstatus_to_exitcode(status) if found and spent < LIMIT_S else None), spent


def digests(work):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in work.rglob("*") if path.is_file()}


def lost_files(before, case, work):
    """Files that were given and are gone or other than before. Those of a run may be written, never lost."""
    for path, digest in before.items():
        ours = any(folder in path.parents for folder in case.grows)
        if not path.exists():
            parent = path.parent  # of the files within an epoch a run keeps two
            passes = path.name == "lock.json" or ".tmp-" in path.name or (
                parent.name == "tmp" and len(list(parent.glob("*.pth"))) == 2)
            if not (ours and passes):
                return f"{path.relative_to(work)} is gone"
        elif not ours and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"{path.relative_to(work)} has changed"
        elif path.suffix == ".pth" and hashlib.sha256(path.read_bytes()).hexdigest() != digest \
                and path.name != "000002_demo_om_net.pth":
            return f"{path.relative_to(work)} has changed"
    return ""


def judge(case, code, work):
    """(kind of fault or "", sentence)."""
    said = (work / "stderr").read_text(errors="replace")
    if code is None:
        return "hangs", f"longer than {LIMIT_S} s"
    expected = (0, 1, 43) if case.program == "explain" else (0, 43)
    if "Traceback (most recent call last)" in said or code not in expected:
        return "tracebacks", f"exit code {code}: {said.strip()[-600:]}"
    if code == 43:
        sentences = [line for line in said.splitlines() if line.startswith("error: ") and len(line) > 20]
        if not sentences or (len(sentences) > 1 and case.program not in ("evaluate", "augment")):
            return "tracebacks", f"exit code 43 with {len(sentences)} sentences: {said.strip()[-600:]}"
        return "", sentences[0]
    try:
        silent = case.check() if code == 0 else ""
    except (OSError, LookupError, ValueError, TypeError) as error:
        silent = f"exit code 0 without a result that can be read ({type(error).__name__}: {error})"
    return ("silent", silent) if silent else ("", "")


def run_one(number, seed, kinds, originals, parent, keep):
    """One input from its mutation to its judgement: a dict."""
    kind = kinds[number % len(kinds)]
    rng, work = random.Random(f"{seed}/{number}/{kind}"), parent / f"{number:05d}"
    make, folders = KINDS[kind]
    work.mkdir()
    for folder in folders:
        # A pair lies at the top, so that options name its files as people do.
        shutil.copytree(originals / folder, work if folder == "pair" else work / folder, dirs_exist_ok=True)
    case = make(rng, work)
    before = digests(work)
    pid = os.fork()
    if not pid:
        run_child(case, work)
    code, spent = wait(pid)
    fault, sentence = judge(case, code, work)
    lost = lost_files(before, case, work)
    if lost:
        fault, sentence = "lost", lost
    if not (fault and keep):
        shutil.rmtree(work, ignore_errors=True)
    return {"number": number, "kind": kind, "what": case.what, "program": case.program, "code": code, "fault": fault,
            "sentence": sentence, "seconds": round(spent, 2)}


def note_weights(originals):
    """Write beside the pair what weights there are, and its config as the programs read it."""
    run, pair = "Models/demo_om_net", originals / "pair"
    trained = [*(originals / run).glob("*.pth"), *(originals / run).glob("tmp/*.pth")]
    digest = {path: checkpoint.weights_sha256(torch.load(path, weights_only=True)["model"]) for path in trained}
    last = originals / "continued" / run / "000003_demo_om_net.pth"
    shutil.copy(CONFIGS.parent / "Inference/universal.safetensors", pair)
    universal = checkpoint.weights_sha256(read_weights(pair / "universal.safetensors")[0])
    (pair / "weights.json").write_text(json.dumps({
        "trained": sorted(digest.values()), "universal": universal,
        "continued": checkpoint.weights_sha256(torch.load(last, weights_only=True)["model"])}))
    (pair / "config.json").write_text(json.dumps(load_config(pair / "config.yaml")))


def prepare(originals):
    """Make the originals, and write what that prints beside them."""
    log = os.open(originals.parent / "originals.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    make_originals(originals)
    note_weights(originals)


def fuzz(count, seed, kinds=tuple(KINDS), workers=1, only=(), keep=None, tell=lambda row: None):
    """Run so many inputs, or those of `only`. Returns: rows of `run_one`, in the order of their numbers.

    keep: folder for what faulty inputs leave. tell: called with each row. Raises BrokenProcessPool where a worker ends.
    """
    parent = Path(keep or tempfile.mkdtemp(prefix="fuzz-")).resolve()
    originals = parent / "originals"
    shutil.rmtree(originals, ignore_errors=True)
    originals.mkdir(parents=True)
    rows, forked = [], multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, forked) as pool:  # the others need a parent in which torch has computed nothing
        pool.submit(prepare, originals).result()
    dies_with_us = ctypes.CDLL(None).prctl, (1, signal.SIGKILL)  # PR_SET_PDEATHSIG; else it would wait for ever
    with ProcessPoolExecutor(workers, forked, *dies_with_us) as pool:
        given = [pool.submit(run_one, number, seed, kinds, originals, parent, keep) for number in only or range(count)]
        for done in as_completed(given):
            rows.append(done.result())
            tell(rows[-1])
    if not keep:
        shutil.rmtree(parent)
    return sorted(rows, key=lambda row: row["number"])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=3000, help="inputs (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="another one gives other mutations (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of files (all)")
    parser.add_argument("--only", nargs="+", type=int, default=[], metavar="NUMBER", help="only these inputs")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="at a time (%(default)s)")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the folders of faulty inputs there")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--all", action="store_true", help="print each input, also those without a fault")
    args = parser.parse_args(argv)

    def tell(row):
        if (row["fault"] or args.all) and not args.json:
            print(f"{row['number']} {row['kind']}, {row['what']}: {row['fault'] or 'well'} (exit {row['code']}, "
                  f"{row['seconds']} s) {row['sentence']}", flush=True)

    began, spent = time.monotonic(), os.times()
    rows = fuzz(args.n, args.seed, args.kinds, args.workers, args.only, args.keep, tell)
    faults, now = collections.Counter(row["fault"] for row in rows), os.times()
    print(json.dumps({"inputs": len(rows), **{kind: faults[kind] for kind in ("tracebacks", "hangs", "silent", "lost")},
                      "results": sum(row["code"] == 0 for row in rows),
                      "refused": sum(row["code"] == 43 for row in rows),
                      "seconds": round(time.monotonic() - began),
                      "processor_seconds": round(sum(now[:4]) - sum(spent[:4]))}))
    return min(len(rows) - faults[""], 100)


if __name__ == "__main__":
    sys.exit(main())
