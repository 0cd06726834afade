"""Mode 2's embeddings: of a step's samples, from the averaged weights, and a queue of recent ones.

The queue of negatives and the slowly moving second encoder come from He et al., "Momentum Contrast", CVPR 2020.
"""
import torch

from Diffusion import graphs
from Diffusion.optim import ema_weights
from Runtime import agree, watchdog
from Runtime.device import autocast, send


def new_queue(cfg, device):
    """An empty queue of the embeddings of K recent samples; the oldest is overwritten first.

    Returns: dict of images and conditions, (K, E) each; subjects (K,), the `subject_key` of each sample, which stays
    valid when volumes are added, -1 for an empty place; next, number of samples ever pushed.
    """
    size = cfg["contrastive.queue"]
    width = cfg["contrastive.embedding"]
    return {"images": torch.zeros(size, width, device=device),
            "conditions": torch.zeros(size, width, device=device),
            "subjects": torch.full((size,), -1, device=device),
            "next": 0}


def push(queue, images, conditions, subjects):
    """Put the embeddings of a step into the queue, in place, in global sample order.

    images, conditions: (B, E). subjects: (B,), from `subject_key`.
    """
    for image, condition, subject in zip(images, conditions, subjects):
        place = queue["next"] % len(queue["subjects"])
        queue["images"][place] = image
        queue["conditions"][place] = condition
        queue["subjects"][place] = subject
        queue["next"] += 1


def push_of_all_ranks(queue, embeddings, subjects, ranks, device):
    """`push` the embeddings of a step on every rank, in global sample order. Every rank calls this.

    embeddings: (images, conditions), (B, E) each, per batch of this rank. subjects: of all their samples, in order.
    """
    embeddings = torch.cat([torch.cat(both, dim=1) for both in embeddings]).cpu()
    # In float64, which holds a subject's number exactly; on the CPU, as not every device has it.
    rows = torch.cat([embeddings.double(), subjects[:, None].double()], dim=1)
    rows = agree.gather(ranks, rows).flatten(0, 1)                             # (samples, 2 E + 1)
    images, conditions = send(rows[:, :-1].float(), device).chunk(2, dim=1)
    push(queue, images, conditions, send(rows[:, -1].long(), device))


def embed(net, batch, cfg):
    """Embeddings of a batch: unit vectors of the deformed volumes and of their conditions, (B, E) each.

    batch: dict with "xt" (B, C, *spatial), "t" (B,) and "condition" (B, C + 1, *spatial) or None.
    """
    with autocast(batch["xt"].device, cfg["run.amp"]):
        return net(batch["xt"], batch["t"], batch["condition"], embed=True)


@torch.no_grad()
def target_embeddings(net, ema, batches, cfg, recorded=None):
    """Embeddings from the averaged weights: mode 2 has to match them, and they enter the queue.

    The queue keeps embeddings of earlier weights. At a high learning rate the weights move so far that a new sample
    differs from all of them by its age alone, which would solve mode 2 without telling subjects apart. The average
    hardly moves while an embedding is in the queue. (The key encoder of Momentum Contrast.)

    ema: from `new_ema`, or None. batches: list of dicts, as for `embed`. Every rank calls this: with fsdp the forward
    gathers the weights. recorded: from `new_graphs`.
    Returns: for each batch (image, condition), (B, E) each; without ema None for each.
    """
    if not ema:
        return [None] * len(batches)
    watchdog.phase("embeddings", "contrastive")
    with ema_weights(net, ema):
        return [graphs.run(recorded, "embeddings", lambda given: embed(net, given, cfg), batch) for batch in batches]
