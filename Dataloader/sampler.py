"""The order of volumes and pairs in an epoch: it depends only on (seed, epoch), so any step can be resumed."""
import numpy as np
import torch

from Runtime.errors import InputError
from Runtime.keyed_random import generator

INPUTS = ("volumes", "pairs")  # what a step may take, see Mode in OM_train_3modes.py


def epoch_order(seed, epoch, volumes, repeats=1):
    """Volume index at each position of an epoch: `repeats` shuffles, one after the other. Returns: list of ints."""
    order = []
    for repeat in range(repeats):
        order += torch.randperm(volumes, generator=generator(seed, "order", epoch, repeat)).tolist()
    return order


def pair_rule(cfg, items):
    """Which volumes may be paired, by data.pair_subjects and data.pair_modalities; both must hold.

    "same" means two volumes of one subject or modality, never a volume with itself.
    items: dicts with "subject" and "modality".
    Returns: None if any two volumes may be paired, else dict of subject and modality, (N,) ints, a code for each item;
    subjects and modalities, the words of the config.
    Raises InputError if no pair is permitted, or if a pair list is combined with another choice of pairs.
    """
    words = {key: cfg[key] for key in ("data.pair_subjects", "data.pair_modalities")}
    choices = [f"{key}={word}" for key, word in words.items() if word != "any"]
    others = choices + ([f"data.labelled_pairs={cfg['data.labelled_pairs']}"] if cfg["data.labelled_pairs"] else [])
    if cfg["data.pair_list"] and others:
        raise InputError(f"data.pair_list {cfg['data.pair_list']} already lists the pairs: remove it, or remove "
                         f"{' and '.join(others)}.")
    if not choices:
        return None
    rule = {name: np.unique([item[name] for item in items], return_inverse=True)[1] for name in ("subject", "modality")}
    rule.update(subjects=words["data.pair_subjects"], modalities=words["data.pair_modalities"])
    if not _partners(rule).any():
        subjects, modalities = (len(np.unique(rule[name])) for name in ("subject", "modality"))
        raise InputError(f"{' and '.join(choices)}: no pair is left among {len(items)} volumes (subjects: {subjects}, "
                         f"modalities: {modalities}); set any instead, or name the subjects and modalities in the "
                         "data list.")
    if cfg["data.pair_modalities"] == "same" and not any(item["modality"] for item in items):
        raise InputError(f"data.pair_modalities=same: none of the {len(items)} volumes has a known modality; name it "
                         "in the data list, or set any instead.")
    return rule


def epoch_pairs(seed, epoch, volumes, count, listed=None, rule=None):
    """(moving, fixed) volume indices at each position of an epoch.

    listed: the pairs of a pair list, shuffled once per epoch; otherwise `count` random pairs of different volumes.
    rule: from `pair_rule`; moving is then uniform among the volumes that have a partner, fixed among its partners.
    """
    draws = generator(seed, "pairs", epoch)
    if listed:
        return [listed[i] for i in torch.randperm(len(listed), generator=draws).tolist()]
    if rule:
        # Partners are looked up volume by volume: a table would be too large.
        partners = _partners(rule)
        with_partner = np.flatnonzero(partners)
        moving = with_partner[torch.randint(len(with_partner), (count,), generator=draws).numpy()]
        rank = (torch.rand(count, dtype=torch.float64, generator=draws).numpy() * partners[moving]).astype(int)
        fixed = [_permitted(volumes, rule, one)[place].item() for one, place in zip(moving, rank)]
        return list(zip(moving.tolist(), fixed))
    moving = torch.randint(volumes, (count,), generator=draws)
    step = torch.randint(1, max(volumes, 2), (count,), generator=draws)
    return list(zip(moving.tolist(), ((moving + step) % volumes).tolist()))


def with_labelled(pairs, cfg, epoch, labelled, rule):
    """Replace a random share data.labelled_pairs of an epoch's pairs by pairs of two labelled volumes.

    pairs: from `epoch_pairs`. labelled: indices of the labelled volumes. rule: from `pair_rule`, for these volumes.
    """
    seed, share = cfg["run.seed"], cfg["data.labelled_pairs"]
    chosen = (torch.rand(len(pairs), generator=generator(seed, "labelled", epoch)) < share).tolist()
    among = epoch_pairs(seed, epoch, len(labelled), len(pairs), rule=rule)
    return [tuple(labelled[one] for one in other) if take else pair
            for pair, other, take in zip(pairs, among, chosen)]


def _partners(rule):
    """(N,) number of permitted partners of each volume, computed without a table of all pairs."""
    subject, modality = rule["subject"], rule["modality"]
    both = np.unique(subject * len(subject) + modality, return_inverse=True)[1]
    codes = {("any", "any"): 0 * both, ("same", "any"): subject, ("any", "same"): modality, ("same", "same"): both}

    def size(subjects, modalities):
        """(N,) volumes that a rule permits for each volume, itself included; "different" is "any" less "same"."""
        if subjects == "different":
            return size("any", modalities) - size("same", modalities)
        if modalities == "different":
            return size(subjects, "any") - size(subjects, "same")
        code = codes[subjects, modalities]
        return np.bincount(code)[code]

    words = rule["subjects"], rule["modalities"]
    return size(*words) - (0 if "different" in words else 1)  # a volume is not its own partner


def _permitted(volumes, rule, moving):
    """Indices of the permitted partners of one volume, rising."""
    permitted = np.ones(volumes, bool)
    for name, word in (("subject", rule["subjects"]), ("modality", rule["modalities"])):
        if word != "any":
            permitted &= (rule[name] == rule[name][moving]) == (word == "same")
    permitted[moving] = False
    return np.flatnonzero(permitted)


def epoch_pair_count(cfg, volumes, listed, split, samples=0, pairs=0):
    """Number of pairs in an epoch: the listed ones, else data.pairs, else enough for the steps of mode 1.

    volumes: their number. listed: pairs or None. split: of `split_step`. samples, pairs: how many of this epoch are
    done, maybe by another split.
    """
    steps = max(-(-(volumes * cfg["data.repeats"] - samples) // split.samples), 0)
    return len(listed) if listed else cfg["data.pairs"] or pairs + steps * split.pairs


def steps_left(cfg, volumes, listed, split, samples=0, pairs=0, inputs=INPUTS):
    """Steps to the end of an epoch: until its samples or its pairs are used up, whichever is first.

    inputs: those of INPUTS that the modes of the training take; only these count. Other arguments as in
    `epoch_pair_count`.
    """
    pairs_left = epoch_pair_count(cfg, volumes, listed, split, samples, pairs) - pairs
    left = {"volumes": -(-(volumes * cfg["data.repeats"] - samples) // split.samples),
            "pairs": -(-pairs_left // split.pairs)}
    return max(min(left[name] for name in inputs), 0)


def batches(order, total, batchsize, first=0, rank=0, world_size=1):
    """The batches of one rank from position `first` on.

    Each step takes the next `total` positions. Each rank gets a contiguous range of them, in batches of `batchsize`, so
    a step has the same samples for any number of ranks. The last step is filled up from the start of the order.
    order: entries by position. Returns: list of batches, each a list of (position, entry).
    """
    per_rank = total // world_size
    result = []
    for step in range(first, len(order), total):
        for start in range(step + rank * per_rank, step + (rank + 1) * per_rank, batchsize):
            result.append([(p, order[p % len(order)]) for p in range(start, start + batchsize)])
    return result
