"""The data order: which volume is where in an epoch. A function of (seed, epoch) alone, so any step can be resumed."""
import torch

from Runtime.draws import generator


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


def batches(order, batchsize, first_step=0):
    """Positions and their entries in batches from step `first_step` on; the last one is filled from the front.

    Returns: list of lists of (position, entry).
    """
    steps = -(-len(order) // batchsize)
    return [[(p, order[p % len(order)]) for p in range(step * batchsize, (step + 1) * batchsize)]
            for step in range(first_step, steps)]
