"""How the ranks divide the samples of a step. The first launch of a run fixes the number of samples. Needs no torch.

`<run>/step.json` stores it: {"samples", "pairs", "ranks" (of the launch that fixed them), "ratio" (the config's, of
samples to pairs)}. With fewer ranks, each rank accumulates more batches. A step then has the same samples and, on CPUs,
where sums are exact, the same bits.
"""
import contextlib
import dataclasses
import itertools
import json

from Runtime.errors import InputError
from Runtime.files import is_there, read_lines, write_file
from Runtime.manifest import checkpoint_files

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
    """The step of a run's first launch: {"samples", "pairs", "ranks", "ratio"}. world_size: ranks of this launch."""
    total = cfg["data.global_batchsize"]
    return {"samples": total or cfg["data.batchsize"] * world_size,
            "pairs": pairs_for(cfg, total) if total else most_pairs(cfg) * world_size,
            "ranks": world_size, "ratio": cfg["data.diff_reg_batch_ratio"]}


def known_step(run, cfg):
    """The step that an earlier launch fixed; None if it is unknown or data.global_batchsize sets another.

    If step.json is lost, the samples are those of the last step in rank 0's log. If data.diff_reg_batch_ratio has
    changed since, the step has as many pairs as the new ratio gives.
    run: Path of the run folder.
    """
    ratio = cfg["data.diff_reg_batch_ratio"]
    try:
        content = json.loads((run / "step.json").read_text())
        step = {name: int(content[name]) for name in ("samples", "pairs", "ranks")}
        step["ratio"] = content.get("ratio", ratio)  # versions before 1.4 did not store it
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        step = {"ratio": None, "samples": next((
            line["samples"] for line in reversed(read_lines(run / "rank0.jsonl", LOG_BYTES))
            if line.get("event") == "step" and type(line.get("samples")) is int), 0)}
    if step["samples"] <= 0 or cfg["data.global_batchsize"] not in (0, step["samples"]):
        return None
    if step["ratio"] != ratio:
        anew = new_step(cfg, max(step["samples"] // cfg["data.batchsize"], 1))
        step = {**anew, **step, "pairs": anew["pairs"], "ratio": ratio}
    return step


def fix_step(run, cfg, world_size, trains=False):
    """Write the step of a run (`step_of`) to step.json and return it, for `split_step`.

    trains: whether this launch has begun to train. Before, a run with checkpoints keeps its file, because the launch
    may still be refused.
    """
    step = step_of(run, cfg, world_size)
    if trains or not checkpoint_files(run):
        write_file(run / "step.json", json.dumps(step) + "\n")
    # One that the config sets binds this launch's ranks.
    return {**step, "ranks": world_size} if cfg["data.global_batchsize"] else step


def step_of(run, cfg, world_size):
    """The step of a run: its `known_step`, or else the `new_step` of this launch.

    Before the first checkpoint nothing is fixed: an earlier launch may have been refused or have died.
    Raises InputError if the step of a run that has trained is unknown.
    """
    begun, total = checkpoint_files(run), cfg["data.global_batchsize"]
    step = known_step(run, cfg) if begun else None
    # A checkpoint without any logs, as on another cluster, may begin a run.
    if begun and not step and not total and is_there(run / "rank0.jsonl"):
        raise InputError(f"{run / 'step.json'} is missing or damaged, and rank0.jsonl has no step: set "
                         "data.global_batchsize to the samples per step of this run, which are data.batchsize x the "
                         "ranks of its first launch.")
    return step or new_step(cfg, world_size)


def most_pairs(cfg):
    """Most pairs in one forward pass of the modes that take pairs."""
    return pairs_for(cfg, cfg["data.batchsize"])


def pairs_for(cfg, samples):
    """Pairs for a number of samples, at least 1. A quotient that rounding leaves just below an integer counts as it."""
    return max(int(samples / cfg["data.diff_reg_batch_ratio"] + 1e-9), 1)


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
        change = (f"start another number of ranks, or set data.global_batchsize to a multiple of {size * world_size}, "
                  "which changes the training")
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
    fits = []
    for used_nodes, used_tasks in itertools.product(range(1, nodes + 1), range(1, tasks + 1)):
        with contextlib.suppress(InputError):
            split_step(cfg, used_nodes * used_tasks, step)
            fits.append((used_nodes * used_tasks, used_tasks, used_nodes))
    if not fits:
        split_step(cfg, 1, step)  # raises the InputError
    _, used_tasks, used_nodes = max(fits)
    return used_nodes, used_tasks
