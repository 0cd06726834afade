"""Mode 2's embeddings: of a step's samples, of the averaged weights, and the queue of those of recent samples."""
import torch

from Dataloader.datalist import subject_key
from Diffusion.schedule import ema_weights
from Runtime import watchdog
from Runtime.device import autocast


def new_queue(cfg, device):
    """Embeddings of recent samples, oldest overwritten first.

    subjects: whose each is, by `subject_key`, which stays valid when volumes are added; -1 marks an empty place.
    """
    size, width = cfg["contrastive.queue"], cfg["contrastive.embedding"]
    return {"images": torch.zeros(size, width, device=device), "conditions": torch.zeros(size, width, device=device),
            "subjects": torch.full((size,), -1, device=device), "next": 0}


def push(queue, images, conditions, subjects):
    """Put a step's embeddings into the queue, in global sample order. images, conditions: (B, E). subjects: (B,)."""
    for image, condition, subject in zip(images, conditions, subjects):
        place = queue["next"] % len(queue["subjects"])
        queue["images"][place], queue["conditions"][place], queue["subjects"][place] = image, condition, subject
        queue["next"] += 1


def name_volumes(queue, subjects):
    """Turn the numbers of volumes, which a queue of an earlier version holds, into keys of their subjects.

    subjects: of the training volumes, in their order.
    """
    keys = {number: subject_key(subject) for number, subject in enumerate(subjects)}
    named = [keys.get(number, -1) for number in queue["subjects"].tolist()]
    queue["subjects"] = torch.tensor(named, device=queue["subjects"].device)


def embed(net, batch, cfg):
    """Unit vectors of the deformed volumes and of their conditions, (B, E) each."""
    with autocast(batch["xt"].device, cfg["run.amp"]):
        return net(batch["xt"], batch["t"], batch["condition"], embed=True)


@torch.no_grad()
def target_embeddings(net, ema, batches, cfg):
    """Embeddings of each batch by the averaged weights, (image, condition) of (B, E) each; None for each without ema.

    They are what mode 2 is to match, and what goes into the queue. (A slow second encoder for both: He et al.,
    "Momentum Contrast", CVPR 2020.) The queue's embeddings stay where they were made while the weights move on. At a
    high learning rate a sample can be told from them by that alone, and no subject need be told from another; the
    average hardly moves as long as they last. Every rank calls this: with fsdp the forward gathers the weights.
    """
    if not ema:
        return [None] * len(batches)
    watchdog.phase("embeddings", "contrastive")
    with ema_weights(net, ema):
        return [embed(net, batch, cfg) for batch in batches]
