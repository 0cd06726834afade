"""Join the labels of several atlases for one image, weighted by the local similarity of each atlas to the image.

Around every voxel where the maps disagree, a patch of the image is compared with the patch of each registered atlas.
First each atlas is shifted by at most a voxel to its best fit; then the atlases are weighted. Two atlases that err in
the same way count as one: from the differences d_i of the patches, M_ij = (|d_i| . |d_j|)^BETA estimates how probably
both are wrong together, and the weights M^-1 1 / (1' M^-1 1) minimise the expected error (Wang et al., "Multi-Atlas
Segmentation with Joint Label Fusion", IEEE TPAMI 2013). A patch votes for all of its voxels: the weights of a voxel are
the mean over the patches that contain it.
"""
import itertools

import numpy as np
import torch
from scipy import ndimage

PATCH = 2  # voxels by which a patch extends to each side
SEARCH = 1  # voxels by which an atlas may be moved to fit better
BETA = 2.0  # how steeply a difference counts
ALPHA = 1.0  # times the mean of the diagonal is added to it; with less, few atlases decide, chance errors included
CHUNK = 20_000  # voxels at a time


def fuse(image, atlases, maps):
    """The labels of an image from several atlases, each weighted by its similarity around the voxel.

    image: (D, H, W) or (H, W) float32. atlases: the images of K atlases on its grid, (*size) each. maps: their K label
    maps (*size), integers. Each image may have a unit of its own.
    Returns: label (*size) of the maps' dtype; doubt (*size) float32, the share of the votes that the winner did not
    get, 0 where all agree.
    """
    maps = np.stack(maps)
    disputed = (maps != maps[0]).any(0)
    if len(maps) == 1 or not disputed.any():
        return maps[0].copy(), np.zeros(maps.shape[1:], np.float32)
    disputed = ndimage.binary_dilation(disputed, np.ones((3,) * disputed.ndim), iterations=SEARCH)
    box = around(disputed, PATCH + SEARCH + 1)
    # The limits below are for intensities that vary by about 1.
    image, *atlases = ((each[box] / (each.std(dtype=np.float64) or 1)).astype(np.float32) for each in (image, *atlases))
    weights, voted = weigh(image, atlases, maps[(slice(None), *box)], disputed[box])
    return count(maps[0], disputed, averaged(weights, disputed[box]), voted)


def around(mask, margin):
    """The smallest box around a mask, with a margin in voxels on each side: slices."""
    [box] = ndimage.find_objects(mask.astype(np.int8))
    return tuple(slice(max(side.start - margin, 0), side.stop + margin) for side in box)


def weigh(image, atlases, maps, disputed):
    """The weight of each atlas in each disputed voxel, and the label it votes for.

    Arguments as for `fuse`, cut to a box. Returns: weights (n, K) float32, which add up to 1; labels (n, K).
    """
    dims, reach = image.ndim, PATCH + SEARCH
    image, *atlases = (np.pad(np.asarray(each, np.float32), reach, mode="edge") for each in (image, *atlases))
    maps = np.stack([np.pad(each, reach, mode="edge") for each in maps])
    strides = np.array([int(np.prod(image.shape[axis + 1:])) for axis in range(dims)])
    cube = np.array(list(itertools.product(range(-PATCH, PATCH + 1), repeat=dims))) @ strides
    shifts = np.array(sorted(itertools.product(range(-SEARCH, SEARCH + 1), repeat=dims),
                             key=lambda shift: np.square(shift).sum())) @ strides  # ties go to the shortest
    places = np.ravel_multi_index(tuple(axis + reach for axis in np.nonzero(disputed)), image.shape)
    flat, flats = torch.from_numpy(image.ravel()), [torch.from_numpy(atlas.ravel()) for atlas in atlases]
    best = [best_shift(image, atlas, shifts, places, 2 * PATCH + 1) for atlas in atlases]
    cube = torch.from_numpy(cube)
    weights = []
    for start in range(0, len(places), CHUNK):
        part = torch.from_numpy(places[start:start + CHUNK])
        own = normalised(flat[part[:, None] + cube])
        apart = torch.stack([(own - normalised(each[(part + torch.from_numpy(shift[start:start + CHUNK]))[:, None]
                                                    + cube])).abs() for each, shift in zip(flats, best)], 1)
        weights.append(joint_weights(apart))
    voted = np.stack([labels.ravel()[places + shift] for labels, shift in zip(maps, best)], 1)
    return torch.cat(weights).numpy(), voted


def best_shift(image, atlas, shifts, places, width):
    """The shift, in steps of the flat array, that makes an atlas look most like the image around each place: (n,).

    The measure is the correlation of the two patches, by running sums over the whole box. width: of a patch, in voxels.
    """
    def mean(volume):
        return ndimage.uniform_filter(volume, width, mode="nearest").ravel()

    own, other = image - image.mean(), atlas - atlas.mean()
    own_mean, other_mean = mean(own), mean(other)
    own_spread = np.sqrt(np.maximum(mean(own * own) - own_mean ** 2, 1e-12))
    other_spread = np.sqrt(np.maximum(mean(other * other) - other_mean ** 2, 1e-12))
    found, most = np.zeros(len(places), np.int64), np.full(len(places), -np.inf, np.float32)
    for shift in shifts:
        moved = np.roll(other, -shift)  # of the flat array; the padding absorbs what wraps around
        product = mean(own * moved)[places] - own_mean[places] * other_mean[places + shift]
        alike = product / (own_spread[places] * other_spread[places + shift])
        better = alike > most + 1e-6
        found[better], most[better] = shift, alike[better]
    return found


def normalised(patches):
    """Patches (n, P) minus their mean, divided by their standard deviation; flat ones become zero."""
    patches = patches - patches.mean(1, keepdim=True)
    return patches / patches.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)


def joint_weights(apart, beta=BETA, alpha=ALPHA):
    """Weights (n, K) of K atlases from the differences of their patches, (n, K, P) >= 0; they add up to 1.

    Negative weights, by which an atlas would vote against its label, become 0.
    """
    together = (apart @ apart.transpose(1, 2) / apart.shape[2]).clamp(min=1e-6) ** beta
    diagonal = torch.diagonal(together, dim1=1, dim2=2).mean(1)
    together = together + alpha * diagonal[:, None, None] * torch.eye(together.shape[1])
    weights = torch.linalg.solve(together, torch.ones(*together.shape[:2], 1))[..., 0].clamp(min=0)
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-12)


def averaged(weights, disputed):
    """The mean weights of the patches that contain each disputed voxel, (n, K). disputed: where the n weights are."""
    width, found = 2 * PATCH + 1, np.empty_like(weights)
    share = ndimage.uniform_filter(disputed.astype(np.float32), width, mode="constant")[disputed]
    for number in range(weights.shape[1]):
        volume = np.zeros(disputed.shape, np.float32)
        volume[disputed] = weights[:, number]
        found[:, number] = ndimage.uniform_filter(volume, width, mode="constant")[disputed] / share
    return found


def count(agreed, disputed, weights, voted):
    """Label and doubt from the votes. agreed: (*size), the label where nothing is disputed. Others from `weigh`."""
    winner, most = voted[:, 0].copy(), np.full(len(voted), -1.0, np.float32)
    for value in np.unique(voted):
        share = np.where(voted == value, weights, 0).sum(1)
        better = share > most
        winner[better], most[better] = value, share[better]
    label, doubt = agreed.copy(), np.zeros(agreed.shape, np.float32)
    label[disputed], doubt[disputed] = winner, np.clip(1 - most / np.maximum(weights.sum(1), 1e-6), 0, 1)
    return label, doubt
