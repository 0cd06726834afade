"""One agreement per mode and step: all ranks exchange one small vector over a CPU group before the mode's backward.

Every branch is taken from agreed values. Ranks that are not at the same place end the run together, and say which one
differs and in what.
"""
import hashlib

import torch
import torch.distributed as dist

from Runtime import watchdog
from Runtime.errors import InputError

# What must be the same everywhere, what any rank may raise for all, and then the sums of the mode's terms.
SAME = ("step", "branch", "shapes", "weights")
RAISED = ("nonfinite", "leave", "save")
REASONS = (None, "steps", "time", "signal", "memory")  # why to leave; where ranks differ, the later one counts
TERMS = 16  # of a mode, at most: the vector has one length, so that ranks in different modes can tell each other so


class OutOfStep(RuntimeError):
    """Ranks differ in what must be the same. The message names the first rank that differs and in what."""


def agree(ranks, step, branch, shapes=0, weights=None, nonfinite=False, leave=None, save=False, terms=()):
    """Exchange one vector. Every rank calls this at the same places of the loop.

    branch: name of the mode or phase. shapes: a fingerprint. weights: None or {name: tensor} to compare. terms: up to
    TERMS floats.
    Returns: {"nonfinite", "leave" (one of REASONS), "save"} with the highest of all ranks, and "terms", the means.
    Raises OutOfStep on every rank where step, branch, shapes or weights differ, InputError for more than TERMS terms.
    """
    if len(terms) > TERMS:
        raise InputError(f"mode {branch} returns {len(terms)} loss terms, at most {TERMS} are exchanged: return fewer, "
                         "or raise TERMS in Runtime/agree.py.")
    watchdog.phase("agree", branch)
    padded = [float(value) for value in terms] + [0.0] * (TERMS - len(terms))
    sums = None if weights is None else checksums(weights.values())
    rows = gather(ranks, torch.tensor([step, digest(branch), shapes, 0 if sums is None else digest(sums),
                                       nonfinite, REASONS.index(leave), save, *padded], dtype=torch.float64))
    for column, what in enumerate(SAME):
        values = rows[:, column].tolist()
        if len(set(values)) == 1:
            continue
        if what == "branch":
            values = gather_objects(ranks, branch)  # every rank sees that they differ, so every rank calls this
        if what == "weights" and sums is not None and 0 not in values:
            every = gather_objects(ranks, dict(zip(weights, sums.tolist())))  # ranks may differ in how many they have
            names = dict.fromkeys(name for row in every for name in row)
            what = next(name for name in names if len({row.get(name, 0) for row in every}) > 1)
            values = [row.get(what, 0) for row in every]
        raise out_of_step(what, values, step, branch)
    highest = rows.amax(0)[len(SAME):].tolist()
    return {"nonfinite": bool(highest[0]), "leave": REASONS[int(highest[1])], "save": bool(highest[2]),
            "terms": rows[:, len(SAME) + len(RAISED):].mean(0)[:len(terms)].tolist()}


def gather(ranks, row):
    """The tensors of all ranks, stacked in rank order, on the CPU. row: same shape and type on every rank."""
    if ranks["world_size"] == 1:
        return row.detach().cpu()[None]
    row = row.detach().cpu().contiguous()
    rows = torch.full((ranks["world_size"], *row.shape), -1, dtype=row.dtype)
    dist.all_gather(list(rows), row, group=ranks["cpu"])
    return rows


def gather_objects(ranks, value):
    """The values of all ranks in rank order: anything that pickles, for what is not in every step."""
    if ranks["world_size"] == 1:
        return [value]
    values = [None] * ranks["world_size"]
    dist.all_gather_object(values, value, group=ranks["cpu"])
    return values


def out_of_step(what, values, step, branch):
    """The OutOfStep of this disagreement, written to the log: the first rank that differs from most, or from rank 0."""
    usual = max(values, key=values.count)
    rank = next(number for number, value in enumerate(values) if value != usual)
    found, wanted = (value if what == "branch" else f"{value:.0f}" for value in (values[rank], usual))
    watchdog.event("out of step", differs=rank, what=what, found=found, wanted=wanted)
    return OutOfStep(f"rank {rank} is out of step in {branch} of step {step}: its {what} is {found} where the others "
                     f"have {wanted}")


def fingerprint(value):
    """A number below 2^48 for the shapes and types of all tensors in nested lists, tuples and dicts, in order."""
    return digest(repr(_shapes(value)))


def _shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        value = value.values()
    return [_shapes(item) for item in value] if hasattr(value, "__iter__") else None


def digest(value):
    """A number from 1 to 2^48 for a text or a CPU tensor: a float64 holds it exactly."""
    raw = value.encode() if isinstance(value, str) else value.numpy().tobytes()
    return 1 + int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "little")


def checksums(tensors):
    """One number for each tensor: the sum of its bits read as integers, which no device and no order changes."""
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
        sums.append(words.sum(dtype=torch.int64))
    return torch.stack(sums).cpu()
