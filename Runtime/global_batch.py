"""How the ranks divide the samples of a step. The first launch of a run fixes the number of samples. Needs no torch.

`<run>/step.json` stores it: {"samples", "pairs", "ranks" (of the launch that fixed them), "ratio" (the config's, of
samples to pairs)}. With fewer ranks, each rank accumulates more batches. A step then has the same samples and, on CPUs,
where sums are exact, the same bits.
"""
import dataclasses
import json

from Runtime.errors import InputError
from Runtime.files import is_there, read_lines, write_file
from Runtime.manifest import checkpoint_files, durable_step

LOG_BYTES = 2 ** 20  # at the end of rank 0's log, where its last step is


@dataclasses.dataclass(frozen=True)
class Split:
    """How the samples and pairs of a step are split over the ranks: all have the same number of batches."""

    samples: int         # of all ranks together
    pairs: int
    sample_batch: int    # size of one forward pass
    pair_batch: int
    sample_batches: int  # forward passes of a rank in a step
    pair_batches: int


def new_step(cfg, world_size):
    """The step of a run's first launch: {"samples", "pairs", "ranks"}. world_size: ranks of this launch."""
    total = cfg["data.global_batchsize"]
    if total:
        return {"samples": total, "pairs": pairs_for(cfg, total), "ranks": world_size}
    return {"samples": cfg["data.batchsize"] * world_size, "pairs": most_pairs(cfg) * world_size, "ranks": world_size}


def known_step(run, cfg):
    """The step that an earlier launch fixed; None if step.json is lost or data.global_batchsize sets another step.

    If data.diff_reg_batch_ratio has changed since, it has as many pairs as the new ratio gives.
    run: Path of the run folder.
    """
    path, ratio, total = run / "step.json", cfg["data.diff_reg_batch_ratio"], cfg["data.global_batchsize"]
    try:
        content = json.loads(path.read_text())
        step = {name: int(content[name]) for name in ("samples", "pairs", "ranks")}
        # Steps of earlier versions have none. They took that of the config if this also set the step.
        same_ratio = content.get("ratio", None if total else ratio) == ratio
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if total and (total != step["samples"] or not same_ratio):
        return None
    return step if same_ratio else {**step, "pairs": whole_batches(cfg, step["samples"]) * most_pairs(cfg)}


def logged_step(run, cfg):
    """The step of a run that has lost its step.json, from the samples of the last step in rank 0's log.

    run: Path of the run folder. Returns: None without that log. Raises InputError if it has no step.
    """
    if not is_there(run / "rank0.jsonl"):  # a checkpoint without its logs, as on another cluster
        return None
    lines = read_lines(run / "rank0.jsonl", LOG_BYTES)
    samples = next((line["samples"] for line in reversed(lines)
                    if line.get("event") == "step" and type(line.get("samples")) is int), 0)
    if samples <= 0:
        raise InputError(f"{run / 'step.json'} is missing or damaged, and rank0.jsonl has no step: set "
                         "data.global_batchsize to the samples per step of this run, which are data.batchsize x the "
                         "ranks of its first launch.")
    count = whole_batches(cfg, samples)
    return {"samples": samples, "pairs": count * most_pairs(cfg), "ranks": count}


def fix_step(run, cfg, world_size):
    """The step of a run: `known_step`, or else `logged_step` or this launch's `new_step`, written to step.json.

    A step that no launch has taken yet, since the first one was refused or died, binds nobody.
    """
    begun = durable_step(run) or checkpoint_files(run)
    step, total = known_step(run, cfg) if begun else None, cfg["data.global_batchsize"]
    if step is None:
        step = (logged_step(run, cfg) if begun and not total else None) or new_step(cfg, world_size)
        write_file(run / "step.json", json.dumps({**step, "ratio": cfg["data.diff_reg_batch_ratio"]}) + "\n")
    return {**step, "ranks": world_size} if total else step  # one that the config sets binds this launch's ranks


def most_pairs(cfg):
    """Most pairs in one forward pass of the modes that take pairs."""
    return pairs_for(cfg, cfg["data.batchsize"])


def pairs_for(cfg, samples):
    """Pairs for so many samples, at least one. A quotient that floating point leaves just below a number is that."""
    return max(int(samples / cfg["data.diff_reg_batch_ratio"] + 1e-9), 1)


def whole_batches(cfg, samples):
    """How many batches of data.batchsize so many samples are, at least one."""
    return max(samples // cfg["data.batchsize"], 1)


def split_step(cfg, world_size, step=None):
    """Divide the samples and pairs of a step among world_size ranks: the same number of batches for each rank.

    step: of `fix_step`; None for `new_step`.
    Returns: Split. Raises InputError naming the numbers that do not divide.
    """
    step = step or new_step(cfg, world_size)
    samples, pairs = step["samples"], step["pairs"]
    size = cfg["data.batchsize"]
    pair_size = min(most_pairs(cfg), max(pairs // world_size, 1))
    source, change = f"data.global_batchsize {samples}", "change one of them"
    if not cfg["data.global_batchsize"]:
        source = f"the step of {samples} samples, which the run's first launch with {step['ranks']} ranks fixed,"
        change = "start another number of ranks, or set data.global_batchsize to the number of samples per step"
    if samples % (size * world_size):
        raise InputError(f"{source} is not a multiple of data.batchsize {size} x {world_size} ranks: {change}.")
    if pairs % (pair_size * world_size):
        raise InputError(f"{source} gives a step {pairs} pairs, which {world_size} ranks cannot share in batches of "
                         f"{pair_size}: change data.diff_reg_batch_ratio or the batch size.")
    return Split(samples, pairs, size, pair_size, samples // (size * world_size), pairs // (pair_size * world_size))


def usable(cfg, step, nodes, tasks):
    """The most ranks that can divide a step evenly, on up to `nodes` nodes with up to `tasks` ranks each.

    Batches keep their size, since a forward pass of another size rounds differently, and all ranks do the same number.
    Uneven shares would rarely be faster: 32 ranks do 64 batches at two each; with 56 ranks some would still do two,
    and the others would wait.
    Returns: (nodes, tasks). Raises InputError if not even one rank can do it.
    """
    fits = [(used_nodes * used_tasks, used_tasks, used_nodes) for used_nodes in range(1, nodes + 1)
            for used_tasks in range(1, tasks + 1) if can_share(cfg, step, used_nodes * used_tasks)]
    if not fits:
        split_step(cfg, 1, step)  # raises the InputError
    _, used_tasks, used_nodes = max(fits)
    return used_nodes, used_tasks


def can_share(cfg, step, world_size):
    """Whether world_size ranks can divide a step evenly."""
    try:
        split_step(cfg, world_size, step)
    except InputError:
        return False
    return True
