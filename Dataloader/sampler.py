"""The data order: which volume is where in an epoch. A function of (seed, epoch) alone, so any step can be resumed."""
import torch

from Diffusion.draws import generator
from Runtime.errors import InputError


def epoch_order(seed, epoch, volumes, repeats=1):
    """Volume index at each position of an epoch: `repeats` shuffles one after the other. Returns a list of ints."""
    order = []
    for repeat in range(repeats):
        order += torch.randperm(volumes, generator=generator(seed, "order", epoch, repeat)).tolist()
    return order


def epoch_pairs(seed, epoch, volumes, count, listed=None):
    """(moving, fixed) volume indices at each position of an epoch.

    listed: the pairs of a pair list, shuffled once per epoch; otherwise `count` random pairs of different volumes.
    """
    draws = generator(seed, "pairs", epoch)
    if listed:
        return [listed[i] for i in torch.randperm(len(listed), generator=draws).tolist()]
    moving = torch.randint(volumes, (count,), generator=draws)
    step = torch.randint(1, max(volumes, 2), (count,), generator=draws)
    return list(zip(moving.tolist(), ((moving + step) % volumes).tolist()))


def shares(cfg, world):
    """How the samples and pairs of a step are spread over `world` ranks.

    Returns: {"samples", "pairs": of all ranks together; "sample_batch", "pair_batch": of one forward;
    "sample_batches", "pair_batches": forwards of a rank in a step}.
    Raises InputError naming the numbers that do not divide.
    """
    size, ratio = cfg["data.batchsize"], cfg["data.diff_reg_batch_ratio"]
    pair_size = max(size // ratio, 1)
    samples, pairs = size * world, pair_size * world
    if total := cfg["data.global_batchsize"]:
        samples, pairs = total, max(total // ratio, 1)
        if total % (size * world):
            raise InputError(f"data.global_batchsize {total} is not a multiple of data.batchsize {size} x {world} "
                             f"ranks: change one of them.")
        pair_size = min(pair_size, max(pairs // world, 1))
        if pairs % (pair_size * world):
            raise InputError(f"data.global_batchsize {total} makes {pairs} pairs of a step, which {world} ranks cannot "
                             f"share in batches of {pair_size}: change data.diff_reg_batch_ratio or the batch.")
    return {"samples": samples, "pairs": pairs, "sample_batch": size, "pair_batch": pair_size,
            "sample_batches": samples // (size * world), "pair_batches": pairs // (pair_size * world)}


def epoch_pair_count(cfg, volumes, listed, share):
    """Pairs of an epoch: the listed ones, data.pairs, or as many as mode 1 takes steps."""
    steps = -(-volumes * cfg["data.repeats"] // share["samples"])
    return len(listed) if listed else cfg["data.pairs"] or steps * share["pairs"]


def steps_left(cfg, volumes, listed, share, samples=0, pairs=0):
    """Steps to the end of an epoch of which `samples` and `pairs` are done: those of the shorter loader."""
    return max(min(-(-(volumes * cfg["data.repeats"] - samples) // share["samples"]),
                   -(-(epoch_pair_count(cfg, volumes, listed, share) - pairs) // share["pairs"])), 0)


def batches(order, total, batchsize, first=0, rank=0, world=1):
    """The batches of one rank from position `first` on, as (position, entry) lists.

    Each step takes `total` positions in order: the ranks one run of them each, in batches of `batchsize`. So the step
    is the same for any number of ranks. The last step is filled from the front of the order.
    """
    share = total // world
    return [[(p, order[p % len(order)]) for p in range(start, start + batchsize)]
            for step in range(first, len(order), total)
            for start in range(step + rank * share, step + (rank + 1) * share, batchsize)]
