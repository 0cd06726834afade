"""The order of an epoch: the same for any number of ranks, and from any step on."""
import pytest
from torch.utils.data import Dataset

from Dataloader.dataset import epoch_batches
from Dataloader.sampler import batches, epoch_order, epoch_pair_count, epoch_pairs, shares, steps_left
from Runtime.errors import InputError
from tests.tiny import config

VOLUMES = 20
LISTED = [(i, (3 * i + 1) % VOLUMES) for i in range(VOLUMES)]
START = {"epoch": 1, "samples": 0, "pairs": 0}


class Numbers(Dataset):
    """Volumes that are nothing but their addresses."""

    def __len__(self):
        return VOLUMES

    def __getitem__(self, address):
        return address[1], *address


def walk(cfg, world, listed=None, progress=START):
    """What `world` ranks do to the end of the epoch: for each step (samples, pairs) as (position, volume) in order."""
    share = shares(cfg, world)
    ranks = [list(epoch_batches(cfg, Numbers(), listed, progress, share, {"rank": rank, "world": world}))
             for rank in range(world)]
    steps = steps_left(cfg, VOLUMES, listed, share, progress["samples"], progress["pairs"])
    assert [len(own) for own in ranks] == [steps] * world
    found = []
    for together in zip(*ranks):
        for volumes, pairs in together:
            assert [len(batch[1]) for batch in volumes] == [share["sample_batch"]] * share["sample_batches"]
            assert [len(batch[1]) for batch in pairs] == [2 * share["pair_batch"]] * share["pair_batches"]
        found.append(tuple([entry for own in together for batch in own[kind]
                            for entry in zip(batch[1].tolist(), batch[2].tolist())] for kind in (0, 1)))
    return found


def after(steps, share):
    return {**START, "samples": steps * share["samples"], "pairs": steps * share["pairs"]}


def joined(steps, kind):
    return [entry for step in steps for entry in step[kind]]


def test_epoch_order_is_a_shuffle_per_repeat_and_differs_by_epoch():
    order = epoch_order(0, 5, 10, repeats=3)
    assert all(sorted(order[i:i + 10]) == list(range(10)) for i in (0, 10, 20))
    assert order == epoch_order(0, 5, 10, 3) and order[:10] != order[10:20]
    assert order != epoch_order(0, 6, 10, 3) and order != epoch_order(1, 5, 10, 3)


def test_random_pairs_are_of_different_volumes_and_listed_ones_are_shuffled():
    pairs = epoch_pairs(0, 0, 5, 400)
    assert all(moving != fixed for moving, fixed in pairs) and len(set(pairs)) == 20
    listed = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    assert sorted(epoch_pairs(0, 0, 5, 99, listed)) == listed
    assert epoch_pairs(0, 0, 5, 99, listed) != epoch_pairs(0, 1, 5, 99, listed)


def test_batches_from_any_position_are_the_tail_and_the_last_is_filled_from_the_front():
    order = [4, 2, 0, 1, 3]
    whole = batches(order, 2, 2)
    assert whole == [[(0, 4), (1, 2)], [(2, 0), (3, 1)], [(4, 3), (5, 4)]]
    assert batches(order, 2, 2, first=4) == whole[2:]


@pytest.mark.parametrize("total", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 4])
def test_batches_of_the_ranks_lie_side_by_side_in_each_step(total, first):
    order, total = list("abcdefghij"), 4 * total
    alone = batches(order, total, total, first)
    for world in (1, 2, 4):
        ranks = [batches(order, total, total // world // (2 if world < 4 else 1), first, rank, world)
                 for rank in range(world)]
        count = len(ranks[0]) // len(alone)
        together = [[entry for own in ranks for batch in own[step * count:(step + 1) * count] for entry in batch]
                    for step in range(len(alone))]
        assert together == alone
    assert [position for batch in alone for position, _ in batch][:len(order) - first] == list(range(first, len(order)))


@pytest.mark.parametrize("listed", [None, LISTED])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(listed):
    cfg = config(data__global_batchsize=8, data__batchsize=2)
    one = walk(cfg, 1, listed)
    assert len(one) == 5 and one == walk(cfg, 2, listed) == walk(cfg, 4, listed)
    order = epoch_order(cfg["run.seed"], 1, VOLUMES, cfg["data.repeats"])
    assert joined(one, 0) == list(enumerate(order))
    pairs = joined(one, 1)
    assert [position for position, _ in pairs] == list(range(40)), "moving and fixed of twenty pairs"
    if listed:
        assert sorted(zip([v for _, v in pairs[0::2]], [v for _, v in pairs[1::2]])) == sorted(listed)


@pytest.mark.parametrize("before, then", [(4, 2), (2, 4), (4, 1), (1, 4)])
def test_a_global_batch_continues_the_same_order_with_other_ranks(before, then):
    cfg = config(data__global_batchsize=8, data__batchsize=2)
    whole = walk(cfg, before)
    for done in range(len(whole) + 1):
        assert walk(cfg, then, progress=after(done, shares(cfg, before))) == whole[done:]


@pytest.mark.parametrize("before, then", [(4, 2), (2, 4), (4, 1), (1, 4), (2, 5)])
def test_without_a_global_batch_other_ranks_go_on_at_the_next_sample(before, then):
    cfg = config(data__batchsize=2)
    done = 2
    first = walk(cfg, before, LISTED)[:done]
    rest = walk(cfg, then, LISTED, after(done, shares(cfg, before)))
    order = epoch_order(cfg["run.seed"], 1, VOLUMES, cfg["data.repeats"])
    samples, pairs = joined(first, 0) + joined(rest, 0), joined(first, 1) + joined(rest, 1)
    assert samples[:40] == list(enumerate(order)) and [p for p, _ in pairs[:40]] == list(range(40))
    assert len(samples) < 40 + shares(cfg, then)["samples"], "no more than the last step is filled from the front"
    assert [volume for _, volume in samples[40:]] == order[:len(samples) - 40]
    assert sorted(zip([v for _, v in pairs[0:40:2]], [v for _, v in pairs[1:40:2]])) == sorted(LISTED)


def test_an_epoch_ends_with_the_shorter_loader():
    cfg = config(data__batchsize=2, data__pairs=7)
    for world, steps in ((1, 7), (2, 4), (4, 2)):
        assert len(walk(cfg, world)) == steps == steps_left(cfg, VOLUMES, None, shares(cfg, world))
        assert len(walk(cfg, world, LISTED[:3])) == -(-3 // world)
    assert epoch_pair_count(cfg, VOLUMES, LISTED[:3], shares(cfg, 1)) == 3
    assert epoch_pair_count(cfg, VOLUMES, None, shares(cfg, 1)) == 7
    assert epoch_pair_count(config(data__batchsize=2), VOLUMES, None, shares(cfg, 4)) == 5 * 4
    assert steps_left(cfg, VOLUMES, None, shares(cfg, 1), samples=48) == 0, "a longer epoch than the config's is over"


@pytest.mark.parametrize("changes, world, expected", [
    ({"data__batchsize": 2}, 3, (6, 3, 2, 1, 1, 1)),
    ({"data__batchsize": 4, "data__diff_reg_batch_ratio": 2}, 1, (4, 2, 4, 2, 1, 1)),
    ({"data__batchsize": 1, "data__diff_reg_batch_ratio": 4}, 2, (2, 2, 1, 1, 1, 1)),
    ({"data__batchsize": 2, "data__global_batchsize": 16}, 4, (16, 8, 2, 1, 2, 2)),
    ({"data__batchsize": 2, "data__global_batchsize": 16}, 1, (16, 8, 2, 1, 8, 8)),
    ({"data__batchsize": 1, "data__global_batchsize": 8, "data__diff_reg_batch_ratio": 4}, 2, (8, 2, 1, 1, 4, 1)),
])
def test_shares_of_a_step(changes, world, expected):
    names = ("samples", "pairs", "sample_batch", "pair_batch", "sample_batches", "pair_batches")
    assert shares(config(**changes), world) == dict(zip(names, expected))


@pytest.mark.parametrize("changes, world, words", [
    ({"data__batchsize": 4, "data__global_batchsize": 6}, 1, ["data.global_batchsize 6", "data.batchsize 4 x 1 ranks"]),
    ({"data__batchsize": 2, "data__global_batchsize": 8}, 3, ["data.global_batchsize 8", "data.batchsize 2 x 3 ranks"]),
    ({"data__batchsize": 2, "data__global_batchsize": 4}, 4, ["data.global_batchsize 4", "4 ranks"]),
    ({"data__batchsize": 1, "data__global_batchsize": 4, "data__diff_reg_batch_ratio": 4}, 2,
     ["data.global_batchsize 4", "1 pairs", "2 ranks", "data.diff_reg_batch_ratio"]),
    ({"data__batchsize": 1, "data__global_batchsize": 6, "data__diff_reg_batch_ratio": 2}, 2, ["3 pairs", "2 ranks"]),
])
def test_numbers_that_do_not_divide_are_one_sentence(changes, world, words):
    with pytest.raises(InputError) as error:
        shares(config(**changes), world)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message
