"""How the samples of a step are shared by the ranks. The first launch of a run fixes how many they are. Needs no torch.

`<run>/step.json` keeps them: {"samples", "pairs", "ranks" (of the launch that fixed them)}. With fewer ranks later each
accumulates more batches, so that a step has the same samples, and by exact sums the same bits, whoever computes it.
"""
import json

from Runtime.errors import InputError
from Runtime.files import write_file


def new_step(cfg, ranks):
    """{"samples", "pairs", "ranks"} of a step as a launch makes it that is the first of its run."""
    total, size = cfg["data.global_batchsize"], cfg["data.batchsize"]
    if total:
        return {"samples": total, "pairs": max(int(total / cfg["data.diff_reg_batch_ratio"]), 1), "ranks": ranks}
    return {"samples": size * ranks, "pairs": most_pairs(cfg) * ranks, "ranks": ranks}


def known_step(run, cfg):
    """What an earlier launch of a run has fixed; None where there is none, or where data.global_batchsize says it."""
    path = run / "step.json"
    if cfg["data.global_batchsize"] or not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return {name: int(found[name]) for name in ("samples", "pairs", "ranks")}
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{path} is damaged: set data.global_batchsize to the samples of a step, or remove the file "
                         "and let the next launch fix them.") from None


def fix_step(run, cfg, ranks):
    """The step of a run: the one that is known, or that of this launch of so many ranks, which is written down."""
    known = known_step(run, cfg)
    if known is None:
        known = new_step(cfg, ranks)
        write_file(run / "step.json", json.dumps(known) + "\n")
    return known


def most_pairs(cfg):
    """Pairs of one forward beside data.batchsize samples."""
    return max(int(cfg["data.batchsize"] / cfg["data.diff_reg_batch_ratio"]), 1)


def split_step(cfg, world_size, step=None):
    """How the samples and pairs of a step are spread over `world` ranks: the same number of batches for each.

    step: of `fix_step`; None for that of a first launch.
    Returns: {"samples", "pairs": of all ranks together; "sample_batch", "pair_batch": of one forward;
    "sample_batches", "pair_batches": forwards of a rank in a step}.
    Raises InputError naming the numbers that do not divide.
    """
    size, step = cfg["data.batchsize"], step or new_step(cfg, world_size)
    samples, pairs = step["samples"], step["pairs"]
    pair_size = min(most_pairs(cfg), max(pairs // world_size, 1))
    what, change = f"data.global_batchsize {samples}", "change one of them"
    if not cfg["data.global_batchsize"]:
        what = f"the step of {samples} samples, as the run's first launch with {step['ranks']} ranks has fixed it,"
        change = "start another number of ranks, or say by data.global_batchsize how many samples a step shall have"
    if samples % (size * world_size):
        raise InputError(f"{what} is not a multiple of data.batchsize {size} x {world_size} ranks: {change}.")
    if pairs % (pair_size * world_size):
        raise InputError(f"{what} makes {pairs} pairs of a step, which {world_size} ranks cannot share in batches of "
                         f"{pair_size}: change data.diff_reg_batch_ratio or the batch.")
    return {"samples": samples, "pairs": pairs, "sample_batch": size, "pair_batch": pair_size,
            "sample_batches": samples // (size * world_size), "pair_batches": pairs // (pair_size * world_size)}


def usable(cfg, step, nodes, tasks):
    """The most ranks that can share a step evenly, on up to `nodes` nodes with up to `tasks` ranks each.

    Batches are never cut, since a forward of another size rounds differently, and no rank has more of them than
    another. Unequal numbers would rarely be faster: of 64 batches 32 ranks do two each; of 56 ranks some would still do
    two, and the others would wait for them.
    Returns: (nodes, tasks). Raises InputError where not even one rank can do it.
    """
    fits = [(used * each, each, used) for used in range(1, nodes + 1) for each in range(1, tasks + 1)
            if can_share(cfg, step, used * each)]
    if not fits:
        split_step(cfg, 1, step)
    _, each, used = max(fits)
    return used, each


def can_share(cfg, step, world_size):
    try:
        split_step(cfg, world_size, step)
    except InputError:
        return False
    return True
