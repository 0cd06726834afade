"""One agreement per mode and step: all ranks exchange one small vector over a CPU group before the mode's backward.

Every branch depends on agreed values only. If ranks are out of step, all of them end the run; the error names the rank
that differs and the value.
"""
import dataclasses
import hashlib

import torch
import torch.distributed as dist

from Runtime import watchdog
from Runtime.errors import InputError

# Columns of the vector that must be equal on all ranks. Then come three flags that any rank may raise for all, and the
# mode's loss terms.
SAME = ("step", "branch", "shapes", "weights", "names")
REASONS = (None, "steps", "time", "signal", "memory")  # why to leave; if ranks differ, the last in this list counts
TERMS = 16  # most loss terms of a mode; the fixed length lets ranks in different modes compare their vectors


class OutOfStep(RuntimeError):
    """Ranks differ in a value that must be the same. The message names the value and the first rank that differs."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all ranks agreed on; each flag is the maximum over the ranks."""

    nonfinite: bool
    leave: str | None  # one of REASONS
    save: bool
    terms: list        # means over the ranks


def agree(ranks, step, branch, shapes=0, weights=None, nonfinite=False, leave=None, save=False, terms=(),
          names=()):
    """Exchange one vector. Every rank calls this at the same points of the loop.

    ranks: Ranks of Runtime/launch.py. step: step of the run. branch: mode or phase. shapes: a `fingerprint`.
    weights: None, or {name: tensor} to compare. nonfinite: whether this rank's loss is NaN or infinite. leave: one of
    REASONS. save: whether to write a checkpoint. terms: up to TERMS floats. names: of the terms, in order; None if this
    rank's batches differ in them.
    Returns: Agreed.
    Raises OutOfStep on every rank if step, branch, shapes or weights differ, InputError on every rank if names do, on
    one rank or between them, and for more than TERMS terms.
    """
    if len(terms) > TERMS:
        raise InputError(f"mode {branch} returns {len(terms)} loss terms, at most {TERMS} are exchanged: return fewer, "
                         "or raise TERMS in Runtime/agree.py.")
    watchdog.phase("agree", branch)
    padded = [float(value) for value in terms] + [0.0] * (TERMS - len(terms))
    sums = None if weights is None else checksums(weights.values())
    own_row = [step, digest(branch), shapes, 0 if sums is None else digest(sums),
               digest(repr(names and [*names])), nonfinite, REASONS.index(leave), save, *padded]
    rows = gather(ranks, torch.tensor(own_row, dtype=torch.float64))
    for column, name in enumerate(SAME):
        values = rows[:, column].tolist()
        if len(set(values)) == 1:
            continue
        if name == "names":
            names = None
            continue
        if name == "branch":
            values = gather_objects(ranks, branch)  # every rank sees the difference, so every rank calls this
        if name == "weights" and sums is not None and 0 not in values:
            name, values = differing_tensor(ranks, dict(zip(weights, sums.tolist())))
        raise out_of_step(name, values, step, branch)
    if names is None:  # the means would be of different things
        raise InputError(f"mode {branch} returns different terms for different batches: return every term always and "
                         "in one order, 0 where it does not apply.")
    nonfinite, leave, save = rows[:, len(SAME):-TERMS].amax(0).tolist()
    return Agreed(nonfinite=bool(nonfinite), leave=REASONS[int(leave)], save=bool(save),
                  terms=rows[:, -TERMS:].mean(0)[:len(terms)].tolist())


def differing_tensor(ranks, sums):
    """(name, checksums by rank) of the first tensor that differs. sums: {name: checksum}; ranks may differ in names."""
    of_all_ranks = gather_objects(ranks, sums)
    for name in dict.fromkeys(name for of_rank in of_all_ranks for name in of_rank):
        values = [of_rank.get(name, 0) for of_rank in of_all_ranks]
        if len(set(values)) > 1:
            return name, values


def gather(ranks, row):
    """The tensors of all ranks: (ranks, *row.shape), on the CPU. row: same shape and type on every rank."""
    if ranks.world_size == 1:
        return row.detach().cpu()[None]
    row = row.detach().cpu().contiguous()
    rows = torch.full((ranks.world_size, *row.shape), -1, dtype=row.dtype)
    dist.all_gather(list(rows), row, group=ranks.cpu)
    return rows


def gather_objects(ranks, value):
    """The values of all ranks in rank order: anything picklable. Slower than `gather`, so not for every step."""
    if ranks.world_size == 1:
        return [value]
    values = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=ranks.cpu)
    return values


def out_of_step(name, values, step, branch):
    """The exception for a disagreement, also written to the log.

    name: name of the value that differs. values: by rank. The message names the first rank that differs from the most
    common value or, if no value is more common than the others, from rank 0.
    """
    wanted = max(values, key=values.count)
    rank, own = next((number, value) for number, value in enumerate(values) if value != wanted)
    if name != "branch":
        own, wanted = f"{own:.0f}", f"{wanted:.0f}"
    watchdog.event("out of step", differs=rank, what=name, found=own, wanted=wanted)
    return OutOfStep(f"rank {rank} is out of step in {branch} of step {step}: its {name} is {own} where the others "
                     f"have {wanted}")


def fingerprint(value):
    """Hash of the shapes and types of all tensors in nested lists, tuples and dicts, in order: an int, see `digest`."""
    return digest(repr(_shapes(value)))


def _shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        value = value.values()
    return [_shapes(item) for item in value] if hasattr(value, "__iter__") else None


def digest(value):
    """Hash of a text or a CPU tensor: an int from 1 to 2^48, which float64 holds exactly."""
    raw = value.encode() if isinstance(value, str) else value.numpy().tobytes()
    return 1 + int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "little")


def checksums(tensors):
    """One int64 per tensor: the sum of its bits read as integers. It is exact, so device and order do not matter.

    tensors: on any device. Returns: (number of tensors,) on the CPU.
    """
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        integers = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
        sums.append(integers.sum(dtype=torch.int64))
    return torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)
