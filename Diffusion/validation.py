"""Scores of a network on held-out volumes: recovery at fixed times, retrieval, and registration of fixed pairs."""
import hashlib
import inspect
import itertools
import json
import math

import numpy as np
import torch
import torch.nn.functional as F

from Dataloader.dataset import Maps
from Diffusion.diffuser import make_condition
from Diffusion.fields import warp
from Diffusion.losses import image_similarity, recovery_terms, warp_inside
from Diffusion.metrics import average, dice, folding_percent
from Diffusion.predict import best_field, label_map, segmented, segmented_labels
from Runtime import agree, launch, watchdog
from Runtime.device import autocast, send
from Runtime.keyed_random import generator

# Settings of val_imgsim, whatever window, scales and sign mode 3 uses, so that trainings with one
# registration.similarity can be compared.
VAL_IMGSIM = {"registration.window": 9, "registration.scales": 3, "registration.squared": True}

# Besides the volumes and pairs, the keys on which scores depend and that a run may change where it resumes.
MEASURED = ("run.seed", "run.val_pairs", "registration.rounds", "registration.symmetric", "registration.similarity",
            "data.img_size", "data.spacing_mm", "data.crop_above", "data.percentiles", "data.window",
            "model.condition_type", "diffusion.timesteps", "diffusion.grids", "diffusion.v_scale",
            "diffusion.noise_ratio")


def validation_pairs(cfg, dataset):
    """The pairs to score, the same in every epoch: run.val_pairs different ones, or all that are permitted.

    Pairs of two volumes with labels come first, because Dice decides which checkpoint is the best. In a random
    order, each volume is paired with the next one, then with the one after that, and so on, so that all serve about
    equally often. dataset: of the held-out volumes. Returns: list of (moving, fixed) volume indices.
    """
    items, rule, pairs = dataset.items, dataset.rule, {}
    order = torch.randperm(len(items), generator=generator(cfg["run.seed"], "pairs", -1)).numpy()
    labelled = np.array([index for index in order if items[index]["label"]], dtype=int)
    for moving, step in ((group, step) for group in (labelled, order) for step in range(1, len(group))):
        fixed = np.roll(moving, -step)
        permitted = np.ones(len(moving), bool)
        for name, word in (("subject", rule["subjects"]), ("modality", rule["modalities"])) if rule else ():
            if word != "any":
                permitted &= (rule[name][moving] == rule[name][fixed]) == (word == "same")
        pairs.update(dict.fromkeys(zip(moving[permitted].tolist(), fixed[permitted].tolist())))
        if len(pairs) >= cfg["run.val_pairs"]:
            break
    return list(pairs)[:cfg["run.val_pairs"]]


def measured_on(cfg, dataset):
    """Hash of all that scores depend on, 16 hexadecimal digits: scores with the same hash can be compared.

    dataset: of the held-out volumes.
    """
    described = [item["id"] for item in dataset.items], validation_pairs(cfg, dataset), [
        *(cfg[key] for key in MEASURED), *["masks"] * cfg["registration.masks"]]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def cases_of_rank(count, ranks):
    """The cases that this rank scores, of `count` in all: list of (number, whether it counts).

    Every rank gets the same number, because with fsdp a forward pass needs all ranks: a rank with none left repeats a
    case that does not count.
    """
    rank, world_size = ranks.rank, ranks.world_size
    last = -(-count // world_size) * world_size
    return [(number % count, number < count) for number in range(rank, last, world_size)]


def retrieval(images, conditions, subjects):
    """Fraction of the images whose nearest condition, by cosine, is of their own subject.

    images, conditions: (n, E) embeddings; their means are subtracted, because mode 2 ignores what all have in common.
    subjects: (n,), the subject of each. Returns: 0 .. 1, by chance about 1 / number of subjects; None if there is only
    one, whom every network would recognise.
    """
    if len(subjects.unique()) < 2:
        return None
    images, conditions = (F.normalize(one - one.mean(0), dim=1) for one in (images, conditions))
    return (subjects[(images @ conditions.T).argmax(1)] == subjects).double().mean().item()


@torch.no_grad()
def validate(run, dataset):
    """Scores on held-out volumes, computed by all ranks together, and the first pair for a picture.

    run: Run of Diffusion/training_state.py. Every rank calls this.
    Returns: scores, a dict of val_ang (mean over times, -1 is perfect), val_retrieval (of `retrieval`, at the middle
    time, None for a network that does not embed), val_dice and val_dice_before (None without labels), val_imgsim (mean
    of `image_similarity` with VAL_IMGSIM, 1 is perfect), val_folding (percent of voxels) and, with model.structures,
    val_segment (Dice of the segmentation, None without labels); and moving, fixed, warped and field of pair 0, without
    batch axis, None on ranks other than 0. A network that takes no condition cannot register: it has no picture and
    only the score val_ang.
    """
    ranks, cfg = run.ranks, run.cfg
    run.net.eval()
    cosines, embeddings = validate_recovery(run, dataset)
    alone = cfg["model.condition_type"] == "none"
    scores, picture = ([], None) if alone else validate_registration(run, dataset)
    run.net.train()
    watchdog.phase("agree", "evaluate")
    launch.arrive(ranks, f"the end of the validation after step {run.progress.step}")
    agree.agree(ranks, run.progress.step, "evaluate")
    parts = zip(*agree.gather_objects(ranks, (cosines, embeddings, scores)))
    # In the order of the cases, so that averages do not depend on the number of ranks.
    cosines, embeddings, scores = ([row[-1] for row in sorted(itertools.chain(*rows), key=lambda row: row[:-1])]
                                   for rows in parts)
    if alone:
        return {"val_ang": average(cosines)}, None
    found = None
    if embeddings:
        images, conditions = torch.from_numpy(np.stack(embeddings, axis=1))    # (n, E) each
        found = retrieval(images, conditions, dataset.subjects[:len(embeddings)])
    scores = scores or [dict.fromkeys(("val_dice", "val_dice_before", "val_imgsim", "val_folding"))]
    return {"val_ang": average(cosines), "val_retrieval": found,
            **{name: average([score[name] for score in scores]) for name in scores[0]}}, picture


def best_by(scores, modes):
    """(metric, value) that decides the best checkpoint, higher is better; None if validation gave no finite value.

    modes: names of the modes that are trained. Without mode 3 recovery decides if mode 1 is trained, and retrieval for
    mode 2 alone.
    """
    metric = "val_dice" if scores.get("val_dice") is not None else "val_imgsim"
    value = scores.get(metric)
    if scores and "registration" not in modes and "diffusion" in modes:
        angle = scores["val_ang"]
        metric, value = "-val_ang", None if angle is None else -angle
    if scores and modes == ["contrastive"]:
        metric, value = "val_retrieval", scores["val_retrieval"]
    return (metric, value) if value is not None and math.isfinite(value) else None


def validate_recovery(run, dataset):
    """Modes 1 and 2 on this rank's volumes, each deformed at three times.

    Returns: [(volume, t, cosine)] and [(volume, embeddings (2, E) of the image and of the condition)], none of these
    for a network that takes no `embed`.
    """
    cfg, net, ddpm, device = run.cfg, run.net, run.ddpm, run.device
    cosines, embeddings = [], []
    trained = any(mode.name == "contrastive" for mode in run.modes)
    embeds = trained or "embed" in inspect.signature(net.forward).parameters
    times = sorted({max(cfg["diffusion.timesteps"] * quarter // 4, 1) for quarter in (1, 2, 3)})
    for index, counts in cases_of_rank(min(len(dataset), cfg["run.val_pairs"]), run.ranks):
        watchdog.goes_on()
        x0 = send(dataset.image(index)[None], device)
        for t in times:
            rng_keys = [(cfg["run.seed"], -1, t * len(dataset) + index)]
            xt, target_field = ddpm.diffuse(x0, [t], rng_keys)
            condition = make_condition(x0, cfg["model.condition_type"], rng_keys)
            inputs = (xt, send(torch.tensor([t]), device), condition)
            with autocast(device, cfg["run.amp"]):
                pred_field = net(*inputs)
                embedded = net(*inputs, embed=True) if embeds and t == times[len(times) // 2] else None
            if counts:
                cosines.append((index, t, recovery_terms(pred_field, target_field)[1].item()))
            if counts and embedded:
                embeddings.append((index, torch.cat(embedded).cpu().numpy()))
    return cosines, embeddings


def validate_registration(run, dataset):
    """Mode 3 on this rank's pairs. Returns: [(pair, scores by name)], and the volumes and field of pair 0 or None.

    A single volume makes no pair: paired with itself, every network would be perfect.
    """
    if len(dataset) < 2:
        return [], None
    cfg, net, device = run.cfg, run.net, run.device
    scores, picture, as_measured = [], None, {**cfg, **VAL_IMGSIM}
    pairs = validation_pairs(cfg, dataset)
    masks = Maps(dataset, "mask", cfg["data.img_size"]) if cfg["registration.masks"] else None
    for number, counts in cases_of_rank(len(pairs), run.ranks):
        watchdog.goes_on()
        pair = pairs[number]
        moving, fixed = (send(dataset.image(index)[None], device) for index in pair)
        seen = segmented(net, moving, fixed, cfg)
        field = best_field(net, *seen, cfg)
        warped = warp(moving, field)
        if not counts:
            continue
        compared, inside = warped, None
        if masks:
            both = (send(torch.from_numpy(masks[index])[None, None], device) for index in pair)
            compared, inside = warp_inside(moving, field, *both)
        score = {"val_dice": None, "val_dice_before": None,
                 "val_imgsim": image_similarity(compared, fixed, as_measured, inside).item(),
                 "val_folding": folding_percent(field)}
        labels = [dataset.label(index) for index in pair]
        if all(label is not None for label in labels):
            moving_label, fixed_label = (label[None] for label in labels)                   # (1, 1, *spatial) each
            known = sorted(set(fixed_label.unique().tolist()) - {0})
            score["val_dice_before"] = average(dice(moving_label, fixed_label, known))
            score["val_dice"] = average(dice(warp(moving_label, field.cpu(), mode="nearest"), fixed_label, known))
        if cfg["model.structures"]:
            score["val_segment"] = segmentation_dice(seen, labels, cfg)
        scores.append((number, score))
        if number == 0:
            picture = [volume[0, 0].cpu() for volume in (moving, fixed, warped)] + [field[0].cpu()]
    return scores, picture


def segmentation_dice(volumes, truths, cfg):
    """Mean Dice of a network's segmentations, over the volumes with label maps and the labels that occur there.

    volumes: from `segmented`, (1, C + K, *spatial) each. truths: the label map (1, *spatial) of each, or None.
    Returns: 0 .. 1, None without a label.
    """
    labels, scores = segmented_labels(cfg), []
    for volume, truth in zip(volumes, truths):
        if truth is not None:
            found = label_map(volume[:, cfg["data.channels"]:], labels)
            scores += dice(found, truth, [label for label in labels if (truth == label).any()])
    return average(scores)
