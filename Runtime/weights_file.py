"""Read .safetensors files: the header's length (8 bytes, little-endian), the JSON header, then the raw tensors.

The header has an entry {"dtype", "shape", "data_offsets": [first, end]} for each tensor, counted from the end of the
header, and maybe "__metadata__", {name: text}. The tensors fill the rest of the file without a gap or an overlap
(https://github.com/huggingface/safetensors, "Format"). Only writing such files needs the package safetensors.
"""
import json
import math
from itertools import pairwise
from pathlib import Path

import torch

from Runtime.errors import InputError
from Runtime.files import is_passing, no_name_twice

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def read_weights(path, device="cpu"):
    """The tensors of a .safetensors file, {name: tensor} on `device`, and its metadata, {name: text}.

    Raises InputError, one sentence that names the file, if it is missing, cut off, or does not match its header.
    """
    try:
        content = bytearray(Path(path).read_bytes())  # torch wants writable memory
        entries, metadata, first = _read_header(content)
        _require_gapless(entries, len(content) - first)
    except (OSError, ValueError, RecursionError) as error:
        if is_passing(error):  # the file system, not the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise InputError(f"{path}: not a readable .safetensors file ({error}); export the model again.") from None
    tensors, raw = {}, torch.frombuffer(content, dtype=torch.uint8)[first:]
    for name, entry in entries.items():
        own = raw[slice(*entry["data_offsets"])].clone()  # aligned, so that torch can read numbers of any size
        tensors[name] = own.view(DTYPES[entry["dtype"]]).view(entry["shape"]).to(device)
    return tensors, metadata


def _read_header(content):
    """(entries by name, metadata, offset of the tensors). Raises ValueError for content that breaks the format."""
    if len(content) < 8:
        raise ValueError(f"{len(content)} bytes are too few for a header")
    length = int.from_bytes(content[:8], "little")
    if length > min(MOST_HEADER_BYTES, len(content) - 8):
        raise ValueError(f"its header claims {length} bytes, and the file has {len(content)}")
    header = json.loads(content[8:8 + length].decode("utf-8"), object_pairs_hook=no_name_twice)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ are not texts by name")
    for name, entry in header.items():
        _check_entry(name, entry)
    return header, metadata, 8 + length


def _check_entry(name, entry):
    """Raises ValueError for an entry that breaks the format or whose bytes do not match its shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name} does not give dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
    for key in ("shape", "data_offsets"):
        if not isinstance(entry[key], list) or not all(type(number) is int and number >= 0 for number in entry[key]):
            raise ValueError(f"{key} of {name} is {entry[key]}, not a list of numbers of at least 0")
    if len(entry["data_offsets"]) != 2:
        raise ValueError(f"data_offsets of {name} is {entry['data_offsets']}, not first and end")
    first, end = entry["data_offsets"]
    needed = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if math.prod(max(number, 1) for number in entry["shape"]) >= 2 ** 63:  # torch multiplies past a 0 too
        raise ValueError(f"the shape of {name} is {entry['shape']}, too large for a tensor")
    if end - first != needed:
        raise ValueError(f"{name} has {end - first} bytes, and its shape needs {needed}")


def _require_gapless(entries, size):
    """Raises ValueError if tensors overlap, leave a gap, or do not end with the file. size: bytes of all tensors."""
    spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    for (_, end, name), (first, _, other) in pairwise([(0, 0, "the header"), *spans]):
        if first < end:
            raise ValueError(f"{name} and {other} overlap")
        if first > end:
            raise ValueError(f"there is a gap of {first - end} bytes before {other}")
    end = spans[-1][1] if spans else 0
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, and there are {size}; it is cut off, or too long")
