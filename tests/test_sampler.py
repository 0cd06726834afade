"""The order of an epoch: the same for any number of ranks, and from any step on."""
import itertools
import time
from collections import Counter
from dataclasses import astuple, replace

import numpy as np
import pytest
from scipy.stats import chisquare

from Dataloader.dataset import VolumeDataset, epoch_batches
from Dataloader.sampler import (
    INPUTS,
    batches,
    epoch_order,
    epoch_pair_count,
    epoch_pairs,
    pair_rule,
    steps_left,
    with_labelled,
)
from Runtime.errors import InputError
from Runtime.global_batch import new_step, split_step, usable
from Runtime.launch import Ranks
from Runtime.progress import Progress
from tests.tiny import config

VOLUMES = 20
LISTED = [(i, (3 * i + 1) % VOLUMES) for i in range(VOLUMES)]
# Groups of unequal size: one subject with a single volume, one with a modality of its own.
GROUPS = [{"subject": word[0], "modality": word[1:]} for word in
          "aMR aMR aCT bMR bCT bCT bCT cMR cUS dCT aMR bMR cUS aUS".split()]
WORDS = ("any", "same", "different")
START = Progress(epoch=1)


def walk(cfg, world_size, listed=None, progress=START, rule=None, step=None, inputs=INPUTS):
    """What all ranks do to the end of the epoch: for each step (samples, pairs) as (position, volume) in order."""
    split, volumes = split_step(cfg, world_size, step), ([{"subject": ""}] * VOLUMES, np.arange(VOLUMES), None, rule)
    ranks = [list(epoch_batches(cfg, VolumeDataset(*volumes), listed, progress, split,
                                Ranks(rank=rank, world_size=world_size), inputs=inputs))
             for rank in range(world_size)]
    steps = steps_left(cfg, VOLUMES, listed, split, progress.samples, progress.pairs, inputs)
    assert [len(own) for own in ranks] == [steps] * world_size
    found = []
    for together in zip(*ranks):
        for volumes, pairs in together:
            assert [len(batch[1]) for batch in volumes] == [split.sample_batch] * (
                split.sample_batches * ("volumes" in inputs))
            assert [len(batch[1]) for batch in pairs] == [2 * split.pair_batch] * (
                split.pair_batches * ("pairs" in inputs))
        found.append(tuple([entry for own in together for batch in own[kind]
                            for entry in zip(batch[1].tolist(), batch[0].flatten().tolist())] for kind in (0, 1)))
    return found


def after(steps, split):
    return replace(START, samples=steps * split.samples, pairs=steps * split.pairs)


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
        assert walk(cfg, then, progress=after(done, split_step(cfg, before))) == whole[done:]


@pytest.mark.parametrize("before, then", [(4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("ratio", [2, 0.5, 4])
def test_fewer_ranks_do_the_steps_of_the_first_launch(before, then, ratio):
    cfg = config(data__batchsize=2, data__diff_reg_batch_ratio=ratio)
    step = new_step(cfg, before)
    whole = walk(cfg, before, LISTED)
    assert walk(cfg, then, LISTED, step=step) == whole
    assert split_step(cfg, then, step).pair_batch == split_step(cfg, before).pair_batch, "the same forwards"


@pytest.mark.parametrize("first, nodes, tasks, expected", [
    (64, 8, 8, (8, 8)), (64, 7, 8, (4, 8)), (64, 3, 8, (2, 8)), (64, 1, 8, (1, 8)), (12, 2, 4, (2, 3)),
    (6, 1, 3, (1, 3)), (2, 4, 8, (1, 2)), (7, 2, 3, (1, 1))])
def test_as_many_ranks_as_can_share_a_step_evenly(first, nodes, tasks, expected):
    cfg = config(data__batchsize=2)
    step = new_step(cfg, first)
    assert usable(cfg, step, nodes, tasks) == expected
    split_step(cfg, expected[0] * expected[1], step)


def test_a_step_that_nobody_can_share_names_its_numbers():
    with pytest.raises(InputError, match="the step of 6 samples, which the run's first launch with 3 ranks fixed"):
        usable(config(data__batchsize=4), {"samples": 6, "pairs": 3, "ranks": 3}, 2, 2)


@pytest.mark.parametrize("before, then", [(4, 2), (2, 4), (4, 1), (1, 4), (2, 5)])
def test_a_step_of_another_size_goes_on_at_the_next_sample(before, then):
    cfg = config(data__batchsize=2)
    done = 2
    first = walk(cfg, before, LISTED)[:done]
    rest = walk(cfg, then, LISTED, after(done, split_step(cfg, before)))
    order = epoch_order(cfg["run.seed"], 1, VOLUMES, cfg["data.repeats"])
    samples, pairs = joined(first, 0) + joined(rest, 0), joined(first, 1) + joined(rest, 1)
    assert samples[:40] == list(enumerate(order)) and [p for p, _ in pairs[:40]] == list(range(40))
    assert len(samples) < 40 + split_step(cfg, then).samples, "no more than the last step is filled from the front"
    assert [volume for _, volume in samples[40:]] == order[:len(samples) - 40]
    assert sorted(zip([v for _, v in pairs[0:40:2]], [v for _, v in pairs[1:40:2]])) == sorted(LISTED)


def test_an_epoch_ends_with_the_shorter_loader():
    cfg = config(data__batchsize=2, data__pairs=7)
    for world_size, steps in ((1, 7), (2, 4), (4, 2)):
        assert len(walk(cfg, world_size)) == steps == steps_left(cfg, VOLUMES, None, split_step(cfg, world_size))
        assert len(walk(cfg, world_size, LISTED[:3])) == -(-3 // world_size)
    assert epoch_pair_count(cfg, VOLUMES, LISTED[:3], split_step(cfg, 1)) == 3
    assert epoch_pair_count(cfg, VOLUMES, None, split_step(cfg, 1)) == 7
    assert epoch_pair_count(config(data__batchsize=2), VOLUMES, None, split_step(cfg, 4)) == 5 * 4
    assert steps_left(cfg, VOLUMES, None, split_step(cfg, 1), samples=48) == 0, "longer than the config's"


def test_inputs_that_no_mode_uses_neither_end_an_epoch_nor_are_loaded():
    cfg, listed = config(data__batchsize=1, data__diff_reg_batch_ratio=1, data__pairs=1000, data__repeats=1), LISTED[:5]
    split = split_step(cfg, 1)
    assert [steps_left(cfg, 38, None, split, inputs=inputs) for inputs in (["pairs"], ["volumes"], INPUTS)] == [
        1000, 38, 38]
    assert [steps_left(cfg, 1000, listed, split, inputs=inputs) for inputs in (["pairs"], ["volumes"], INPUTS)] == [
        5, 1000, 5]
    cfg = config(data__batchsize=1, data__diff_reg_batch_ratio=1, data__pairs=50, data__repeats=1)
    whole = walk(cfg, 1)
    assert len(whole) == VOLUMES and joined(walk(cfg, 1, inputs=["volumes"]), 0) == joined(whole, 0)
    pairs = walk(cfg, 1, inputs=["pairs"])
    assert len(pairs) == 50 and joined(pairs, 0) == [] and joined(pairs, 1)[:2 * VOLUMES] == joined(whole, 1)
    assert walk(cfg, 1, inputs=["pairs"], progress=after(30, split)) == pairs[30:]
    assert len(walk(cfg, 1, listed, inputs=["pairs"])) == 5
    assert joined(walk(cfg, 1, listed, inputs=["volumes"]), 1) == []


def test_a_batch_raised_within_an_epoch_leaves_no_volume_out():
    """Pairs are at least one per forward pass, so a larger batch may have relatively fewer of them."""
    few = {"data__batchsize": 1, "data__diff_reg_batch_ratio": 4}
    first, cfg = split_step(config(**few), 1), config(**few, data__global_batchsize=8)
    assert (first.samples, first.pairs) == (1, 1)
    rest = walk(cfg, 1, progress=after(20, first))
    order = epoch_order(cfg["run.seed"], 1, VOLUMES, cfg["data.repeats"])
    assert len(rest) == 3 and joined(rest, 0) == [(20 + n, order[(20 + n) % 40]) for n in range(24)]
    assert [position for position, _ in joined(rest, 1)] == list(range(40, 52)), "two pairs a step, after the 20 done"
    assert walk(cfg, 1, progress=replace(START, samples=28, pairs=22)) == rest[1:], "also after another restart"


@pytest.mark.parametrize("changes, world_size, expected", [
    ({"data__batchsize": 2}, 3, (6, 3, 2, 1, 1, 1)),
    ({"data__batchsize": 4, "data__diff_reg_batch_ratio": 2}, 1, (4, 2, 4, 2, 1, 1)),
    ({"data__batchsize": 1, "data__diff_reg_batch_ratio": 4}, 2, (2, 2, 1, 1, 1, 1)),
    ({"data__batchsize": 1, "data__diff_reg_batch_ratio": 0.5}, 2, (2, 4, 1, 2, 1, 1)),
    ({"data__batchsize": 7, "data__diff_reg_batch_ratio": 0.07}, 1, (7, 100, 7, 100, 1, 1)),  # 99.99999999999999
    ({"data__batchsize": 2, "data__global_batchsize": 16}, 4, (16, 8, 2, 1, 2, 2)),
    ({"data__batchsize": 2, "data__global_batchsize": 16}, 1, (16, 8, 2, 1, 8, 8)),
    ({"data__batchsize": 1, "data__global_batchsize": 8, "data__diff_reg_batch_ratio": 4}, 2, (8, 2, 1, 1, 4, 1)),
])
def test_shares_of_a_step(changes, world_size, expected):
    assert astuple(split_step(config(**changes), world_size)) == expected


@pytest.mark.parametrize("changes, world_size, words", [
    ({"data__batchsize": 4, "data__global_batchsize": 6}, 1, ["data.global_batchsize 6", "data.batchsize 4 x 1 ranks"]),
    ({"data__batchsize": 2, "data__global_batchsize": 8}, 3, ["data.global_batchsize 8", "data.batchsize 2 x 3 ranks"]),
    ({"data__batchsize": 2, "data__global_batchsize": 4}, 4, ["data.global_batchsize 4", "4 ranks"]),
    ({"data__batchsize": 1, "data__global_batchsize": 4, "data__diff_reg_batch_ratio": 4}, 2,
     ["data.global_batchsize 4", "1 pairs", "2 ranks", "data.diff_reg_batch_ratio"]),
    ({"data__batchsize": 1, "data__global_batchsize": 6, "data__diff_reg_batch_ratio": 2}, 2, ["3 pairs", "2 ranks"]),
])
def test_numbers_that_do_not_divide_are_one_sentence(changes, world_size, words):
    with pytest.raises(InputError) as error:
        split_step(config(**changes), world_size)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


def ruled(subjects, modalities, items=GROUPS, **changes):
    return pair_rule(config(data__pair_subjects=subjects, data__pair_modalities=modalities, **changes), items)


def holds(word, one, other):
    return {"any": True, "same": one == other, "different": one != other}[word]


def permitted(items, subjects, modalities):
    """Every ordered pair that the two words permit, one by one."""
    return [(i, j) for i, one in enumerate(items) for j, other in enumerate(items)
            if i != j and holds(subjects, one["subject"], other["subject"])
            and holds(modalities, one["modality"], other["modality"])]


def test_draws_without_a_rule_are_those_of_earlier_runs():
    assert epoch_pairs(3, 2, 7, 8) == [(6, 1), (4, 5), (0, 2), (2, 1), (2, 0), (6, 4), (3, 6), (2, 5)]
    assert epoch_pairs(0, -1, 30, 4, None, None) == [(20, 21), (1, 27), (11, 15), (16, 13)]
    assert epoch_pairs(1, 0, 5, 9, [(0, 1), (1, 2), (2, 3), (3, 4)]) == [(2, 3), (1, 2), (3, 4), (0, 1)]


@pytest.mark.parametrize("subjects", WORDS)
@pytest.mark.parametrize("modalities", WORDS)
def test_pairs_of_every_rule_are_those_of_brute_force(subjects, modalities):
    rule, expected = ruled(subjects, modalities), permitted(GROUPS, subjects, modalities)
    count = 20000
    drawn = epoch_pairs(0, 1, len(GROUPS), count, rule=rule)
    assert len(drawn) == count and set(drawn) == set(expected)
    assert all(type(index) is int for index in drawn[0])
    partners = Counter(moving for moving, _ in expected)
    often = [count / len(partners) / partners[moving] for moving, _ in expected]
    found = Counter(drawn)
    assert chisquare([found[pair] for pair in expected], often).pvalue > 1e-3


def test_pairs_under_a_rule_depend_on_seed_and_epoch_alone():
    rule = ruled("different", "different")
    pairs = epoch_pairs(4, 2, len(GROUPS), 100, rule=rule)
    assert pairs == epoch_pairs(4, 2, len(GROUPS), 100, rule=ruled("different", "different"))
    assert pairs != epoch_pairs(4, 3, len(GROUPS), 100, rule=rule)
    assert pairs != epoch_pairs(5, 2, len(GROUPS), 100, rule=rule)
    assert epoch_pairs(4, 2, len(GROUPS), 0, rule=rule) == []


def test_a_share_of_the_pairs_is_of_labelled_volumes():
    cfg, labelled = config(data__labelled_pairs=0.5), [2, 5, 11, 12]
    pairs = epoch_pairs(0, 3, 40, 2000)
    mixed = with_labelled(pairs, cfg, 3, labelled, None)
    of_labelled = [pair for pair in mixed if set(pair) <= set(labelled)]
    assert len(mixed) == 2000 and 900 < len(of_labelled) < 1150
    assert set(of_labelled) == set(itertools.permutations(labelled, 2))
    assert all(pair == before for pair, before in zip(mixed, pairs) if not set(pair) <= set(labelled))
    assert mixed == with_labelled(pairs, cfg, 3, labelled, None)
    assert with_labelled(pairs, config(data__labelled_pairs=0.0), 3, labelled, None) == pairs
    other = with_labelled(pairs, cfg, 4, labelled, None)
    assert [set(pair) <= set(labelled) for pair in other] != [set(pair) <= set(labelled) for pair in mixed]


def test_labelled_pairs_keep_the_rule():
    labelled = [number for number in range(len(GROUPS)) if number % 3]
    rule = ruled("different", "any", [GROUPS[number] for number in labelled])
    pairs = epoch_pairs(0, 0, len(GROUPS), 300, rule=ruled("different", "any"))
    mixed = with_labelled(pairs, config(data__labelled_pairs=1.0), 0, labelled, rule)
    assert {index for pair in mixed for index in pair} == set(labelled)
    assert all(GROUPS[moving]["subject"] != GROUPS[fixed]["subject"] for moving, fixed in mixed)


def test_pairs_under_a_rule_are_the_same_for_any_number_of_ranks():
    items = [{"subject": f"s{number // 3}", "modality": ""} for number in range(VOLUMES)]
    cfg, rule = config(data__global_batchsize=8, data__batchsize=2), ruled("same", "any", items)
    one = walk(cfg, 1, rule=rule)
    assert one == walk(cfg, 2, rule=rule) == walk(cfg, 4, rule=rule)
    assert joined(one, 0) == joined(walk(cfg, 1), 0), "the order of the volumes is not that of the pairs"
    pairs = [volume for _, volume in joined(one, 1)]
    assert all(i != j and i // 3 == j // 3 for i, j in zip(pairs[0::2], pairs[1::2]))


@pytest.mark.parametrize("subjects, modalities, items, message", [
    ("same", "any", [{"subject": "a", "modality": ""}, {"subject": "b", "modality": ""}],
     r"data.pair_subjects=same: no pair is left among 2 volumes \(subjects: 2, modalities: 1\); set any instead"),
    ("any", "different", [{"subject": "a", "modality": ""}] * 3,
     r"data.pair_modalities=different: no pair is left among 3 volumes \(subjects: 1, modalities: 1\)"),
    ("different", "different", [{"subject": "a", "modality": "x"}, {"subject": "b", "modality": "x"}],
     r"data.pair_subjects=different and data.pair_modalities=different: no pair is left among 2 volumes \("),
    ("same", "same", [], "no pair is left among 0 volumes"),
    ("any", "same", [{"subject": "a", "modality": ""}] * 3,
     "data.pair_modalities=same: none of the 3 volumes has a known modality; name it in the data list, or set any"),
])
def test_a_rule_that_leaves_no_pair_is_one_sentence(subjects, modalities, items, message):
    with pytest.raises(InputError, match=message) as error:
        ruled(subjects, modalities, items)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes, choices", [
    ({"data__pair_subjects": "same"}, "data.pair_subjects=same"),
    ({"data__pair_subjects": "different", "data__pair_modalities": "same"},
     "data.pair_subjects=different and data.pair_modalities=same"),
])
def test_a_pair_list_beside_another_choice_of_pairs_is_a_contradiction(changes, choices):
    with pytest.raises(InputError, match=f"data.pair_list p.json already lists .*: remove it, or remove {choices}."):
        pair_rule(config(data__pair_list="p.json", **changes), GROUPS)
    assert pair_rule(config(data__pair_list="p.json"), GROUPS) is None


def test_fifteen_thousand_volumes_are_paired_fast():
    items = [{"subject": f"s{number // 3}", "modality": f"m{number % 2}"} for number in range(15000)]
    rule = ruled("different", "different", items)
    start = time.process_time()  # the clock would also count what else the machine does
    pairs = epoch_pairs(0, 0, 15000, 15000, rule=rule)
    assert time.process_time() - start < 2
    assert len(pairs) == 15000 and all(items[moving][key] != items[fixed][key] for moving, fixed in pairs
                                       for key in ("subject", "modality"))
