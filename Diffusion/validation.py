"""What a network is worth on held-out volumes: recovery at fixed times, registration of fixed pairs."""
import itertools

import numpy as np
import torch
import torch.nn.functional as F

from Dataloader.sampler import epoch_pairs
from Diffusion.diffuser import make_condition
from Diffusion.fields import compose, flow, warp
from Diffusion.losses import mslncc, recovery_terms
from Diffusion.metrics import average, dice_before_after, folding_percent
from Runtime import agree
from Runtime.device import autocast


def align(net, moving, fixed, cfg):
    """The field (B, N, *spatial) in voxels that aligns (B, 1, *spatial) volumes, by one question, as in training."""
    t = torch.full((len(moving),), cfg["diffusion.timesteps"], device=moving.device)
    kind = "none" if cfg["model.condition_type"] == "none" else "volume"
    with autocast(moving.device, cfg["run.amp"]):
        return net(moving, t, make_condition(fixed, kind))


def best_field(net, moving, fixed, cfg):
    """The field (B, N, *spatial) in voxels that registers two volumes once the training is done.

    registration.symmetric: fixed to moving is asked as well. With u = exp(v) - id one way and exp(-v) - id the other,
    half the difference of both is v up to third order; errors that do not depend on the direction cancel, and the flow
    of v does not fold. registration.rounds: the network is asked so often, each time with the moving volume as the
    field so far shows it, so that it can better what it has not reached at once.
    """
    field = None
    for _ in range(cfg["registration.rounds"]):
        seen = moving if field is None else warp(moving, field)
        if cfg["registration.symmetric"]:
            there, back = align(net, torch.cat([seen, fixed]), torch.cat([fixed, seen]), cfg).chunk(2)
            update = flow(0.5 * (there - back))
        else:
            update = align(net, seen, fixed, cfg)
        field = update if field is None else compose(first=field, then=update)
    return field


def own_share(count, ranks):
    """The numbers below `count` that are this rank's, as (number, whether it counts): equally many on every rank.

    A forward may need all ranks (fsdp), so one that has nothing left repeats a number that does not count.
    """
    rank, world_size = ranks["rank"], ranks["world_size"]
    last = -(-count // world_size) * world_size
    return [(number % count, number < count) for number in range(rank, last, world_size)]


def retrieval(images, conditions, subjects):
    """Share of the images that are nearest to a condition of their own subject, 0 .. 1; by chance about 1 in subjects.

    images, conditions: (n, E) embeddings, seen from their means: what all have in common does not count in mode 2.
    subjects: (n,), whose each is.
    """
    images, conditions = (F.normalize(one - one.mean(0), dim=1) for one in (images, conditions))
    return (subjects[(images @ conditions.T).argmax(1)] == subjects).double().mean().item()


@torch.no_grad()
def validate(state, dataset, cfg):
    """Scores on held-out volumes, shared among the ranks, and the first pair for a picture.

    state: the training's net, ddpm, device, ranks and progress. Every rank calls this.
    Returns: dict of val_ang (mean over times), val_retrieval (share of volumes whose subject is known by its condition
    at the middle time), val_dice and val_dice_before (None without labels), val_imgsim (mean local correlation, 1 is
    perfect), val_folding (percent of voxels); and (moving, fixed, warped, field) of pair 0, None on other ranks than 0.
    """
    ranks = state["ranks"]
    state["net"].eval()
    cosines, embeddings = validate_recovery(state, dataset, cfg)
    scores, picture = validate_registration(state, dataset, cfg)
    state["net"].train()
    agree.agree(ranks, state["progress"]["step"], "evaluate")
    of_all_ranks = agree.gather_objects(ranks, (cosines, embeddings, scores))
    # In the order of their numbers, so that the averages are the same for any number of ranks.
    cosines, embeddings, scores = ([row[-1] for row in sorted(itertools.chain(*parts), key=lambda row: row[:-1])]
                                   for parts in zip(*of_all_ranks))
    known = retrieval(*torch.from_numpy(np.stack(embeddings, axis=1)), dataset.subjects[:len(embeddings)])
    return {"val_ang": average(cosines), "val_retrieval": known,
            **{name: average([score[name] for score in scores]) for name in scores[0]}}, picture


def validate_recovery(state, dataset, cfg):
    """Modes 1 and 2 on this rank's volumes, each deformed at three times.

    Returns: [(volume, t, cosine)] and [(volume, embeddings (2, E) of the image and of the condition)].
    """
    net, ddpm, device, cosines, embeddings = state["net"], state["ddpm"], state["device"], [], []
    times = sorted({max(cfg["diffusion.timesteps"] * quarter // 4, 1) for quarter in (1, 2, 3)})
    for index, counts in own_share(min(len(dataset), cfg["run.val_pairs"]), state["ranks"]):
        x0 = dataset.image(index)[None].to(device)
        for t in times:
            rng_keys = [(cfg["run.seed"], -1, t * len(dataset) + index)]
            xt, target_field = ddpm.diffuse(x0, [t], rng_keys)
            asked = (xt, torch.tensor([t], device=device), make_condition(x0, cfg["model.condition_type"], rng_keys))
            with autocast(device, cfg["run.amp"]):
                pred = net(*asked)
                known = net(*asked, embed=True) if t == times[len(times) // 2] else None
            if counts:
                cosines.append((index, t, recovery_terms(pred, target_field)[1].item()))
            if counts and known:
                embeddings.append((index, torch.cat(known).cpu().numpy()))
    return cosines, embeddings


def validate_registration(state, dataset, cfg):
    """Mode 3 on this rank's pairs. Returns: [(pair, scores by name)], and the volumes and field of pair 0 or None."""
    net, device, scores, picture = state["net"], state["device"], [], None
    pairs = epoch_pairs(cfg["run.seed"], -1, len(dataset), cfg["run.val_pairs"], rule=dataset.rule)
    for number, counts in own_share(len(pairs), state["ranks"]):
        pair = pairs[number]
        moving, fixed = (dataset.image(index)[None].to(device) for index in pair)
        field = best_field(net, moving, fixed, cfg)
        warped = warp(moving, field)
        if not counts:
            continue
        score = {"val_dice": None, "val_dice_before": None, "val_imgsim": mslncc(warped, fixed).item(),
                 "val_folding": folding_percent(field)}
        labels = [dataset.label(index) for index in pair]
        if all(label is not None for label in labels):
            before_after = dice_before_after(*[label[None] for label in labels], field.cpu())
            score["val_dice_before"], score["val_dice"], _ = before_after
        scores.append((number, score))
        if number == 0:
            picture = [volume[0, 0].cpu() for volume in (moving, fixed, warped)] + [field[0].cpu()]
    return scores, picture
