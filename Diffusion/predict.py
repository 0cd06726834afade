"""What a trained network predicts: fields that align two volumes, in one pass or several, and segmentations."""
import torch

from Dataloader.datalist import read_ranges
from Diffusion.diffuser import make_condition
from Diffusion.fields import compose, exponential, warp
from Diffusion.losses import structure_shares
from Runtime.device import autocast


def align(net, moving, fixed, cfg, **options):
    """Register volumes by one forward pass, as mode 3 trains it.

    moving, fixed: (B, C, *spatial) in [0, 1]. options: of the network, see Diffusion/networks.py.
    Returns: field (B, N, *spatial) in voxels, or what the options select.
    """
    t = torch.full((len(moving),), cfg["diffusion.timesteps"], device=moving.device)
    kind = "none" if cfg["model.condition_type"] == "none" else "volume"
    with autocast(moving.device, cfg["run.amp"]):
        return net(moving, t, make_condition(fixed, kind), **options)


def segmented(net, moving, fixed, cfg):
    """Both volumes with the structures that a network (model.structures) segments: (B, C + K, *spatial) each, 0 .. 1.

    Without structures, or if already segmented, they are returned unchanged. Later warps carry the segmentation along:
    warped, interpolated volumes need not be segmented again. moving, fixed: (B, C, *spatial).
    """
    if not cfg["model.structures"] or moving.shape[1] > cfg["data.channels"]:
        return moving, fixed
    volumes = torch.cat([moving, fixed])
    t = torch.zeros(len(volumes), dtype=torch.long, device=volumes.device)
    with autocast(volumes.device, cfg["run.amp"]):
        logits = net(volumes, t, segment="alone")
    return torch.cat([volumes, structure_shares(logits)], dim=1).chunk(2)


def segmented_labels(cfg):
    """The labels of the structures that a network with model.structures segments, in its order: a list of K ints.

    They come from the training's label maps, recorded as registration.labels; 1 .. K if those are not K.
    """
    count, wanted = cfg["model.structures"], cfg["registration.labels"].strip()
    labels = [value for span in read_ranges(wanted, "registration.labels") for value in span] if wanted else []
    return labels if len(labels) == count else list(range(1, count + 1))


def label_map(shares, labels):
    """The label with the largest share in each voxel, (B, *spatial) int64 on the CPU; 0 is background.

    shares: (B, K, *spatial), 0 .. 1, of the structures; the rest is background. labels: of the structures, K ints.
    """
    shares = shares.float().cpu()
    return torch.tensor([0, *labels])[torch.cat([1 - shares.sum(1, keepdim=True), shares], dim=1).argmax(1)]


def best_field(net, moving, fixed, cfg):
    """Register volumes with a trained network, by several forward passes.

    With registration.symmetric both directions are predicted. If they are exp(v) - id and exp(-v) - id, half their
    difference is v up to third order; errors that do not depend on the direction cancel, and the flow of v does not
    fold. With registration.rounds > 1 each further round registers the warped volume and composes its field with the
    field so far, to correct what remains.

    moving, fixed: (B, C, *spatial) in [0, 1], or as returned by `segmented`.
    Returns: field (B, N, *spatial) in voxels.
    """
    field = None
    moving, fixed = segmented(net, moving, fixed, cfg)
    for _ in range(cfg["registration.rounds"]):
        seen = moving if field is None else warp(moving, field)
        if cfg["registration.symmetric"]:
            there, back = align(net, torch.cat([seen, fixed]), torch.cat([fixed, seen]), cfg).chunk(2)
            update = exponential(0.5 * (there - back))
        else:
            update = align(net, seen, fixed, cfg)
        field = update if field is None else compose(first=field, then=update)
    return field
