"""Join the labels of several atlases for one image, weighted by the local similarity of each atlas to the image.

Around every voxel where the maps disagree, a patch of the image is compared with the patch of each registered atlas.
First each atlas is shifted by at most a voxel to its best fit; then the atlases are weighted. Two atlases that err in
the same way count as one: from the differences d_i of the patches, M_ij = (|d_i| . |d_j|)^BETA estimates how probably
both are wrong together, and the weights M^-1 1 / (1' M^-1 1) minimise the expected error (Wang et al., "Multi-Atlas
Segmentation with Joint Label Fusion", IEEE TPAMI 2013). A patch votes for all of its voxels, each atlas with its own
weight and shift there. Atlases vote with whole voxels; away from thin structures, smoothed votes are nearer to the
truth. Last, the votes are weighted by the image: a label counts more in a voxel whose intensity is frequent where the
atlases vote for the label (as in Ledig et al., "Robust whole-brain segmentation", Medical Image Analysis 2015).
"""
import itertools

import numpy as np
import torch
from scipy import ndimage

PATCH = 2  # voxels by which a patch extends to each side
SEARCH = 1  # voxels by which an atlas may be moved to fit better
BETA = 2.0  # how steeply a difference counts
ALPHA = 1.0  # times the mean of the diagonal is added to it; with less, few atlases decide, chance errors included
SIGMA = 0.9  # voxels, smoothing of the votes for structures that are not thin
THICK = 0.7  # share of the atlases in which a voxel has to belong to such a structure
BINS, BLUR = 64, 2.0  # of the histograms of intensities; their smoothing in bins
TRUST = 0.4  # exponent of their weights, since neighbouring voxels are not independent
CHUNK = 20_000  # voxels at a time
MARGIN = PATCH + SEARCH


def fuse(image, atlases, maps):
    """The labels of an image from several atlases, each weighted by its similarity around the voxel.

    image: (D, H, W) or (H, W) float32. atlases: the images of K atlases on its grid, (*size) each. maps: their K label
    maps (*size), integers. Each image may have a unit of its own.
    Returns: label (*size) of the maps' dtype; doubt (*size) float32, the share of the votes, weighted by the image's
    intensities, that the winner did not get, 0 where all agree.
    """
    maps = np.stack(maps)
    disputed = (maps != maps[0]).any(0)
    if len(maps) == 1 or not disputed.any():
        return maps[0].copy(), np.zeros(maps.shape[1:], np.float32)
    disputed = ndimage.binary_dilation(disputed, np.ones((3,) * disputed.ndim), iterations=SEARCH)
    box = around(disputed, MARGIN + 1)
    # The limits below are for intensities that vary by about 1.
    image, *atlases = ((each[box] / (each.std(dtype=np.float64) or 1)).astype(np.float32) for each in (image, *atlases))
    values, numbers = np.unique(maps[(slice(None), *box)], return_inverse=True)
    inside = disputed[box]
    numbers = numbers.reshape(len(maps), *inside.shape)
    votes = count(*weigh(image, atlases, inside), numbers, len(values), inside)
    thick = np.mean([is_thick(each) for each in numbers], axis=0)[inside] > THICK
    votes[thick] = smoothed(votes, inside)[thick]
    votes /= np.maximum(votes.sum(1, keepdims=True), 1e-6)
    votes = by_intensity(votes, image[inside])
    label, doubt = maps[0].copy(), np.zeros(disputed.shape, np.float32)
    label[disputed] = values[votes.argmax(1)]
    doubt[disputed] = np.clip(1 - votes.max(1) / np.maximum(votes.sum(1), 1e-6), 0, 1)
    return label, doubt


def around(mask, margin):
    """The smallest box around a mask, with a margin in voxels on each side: slices."""
    [box] = ndimage.find_objects(mask.astype(np.int8))
    return tuple(slice(max(side.start - margin, 0), side.stop + margin) for side in box)


def weigh(image, atlases, disputed):
    """How much each atlas counts in the patch around each disputed voxel, and where it fits best there.

    Arguments as for `fuse`, cut to a box. Returns: weights (n, K) float32, which add up to 1; numbers (n, K) of the
    shifts, in the order of `neighbours`.
    """
    image, *atlases = (np.pad(each, MARGIN, mode="edge") for each in (image, *atlases))
    steps = np.cumprod([1, *image.shape[:0:-1]])[::-1]  # of the flat array, along each axis
    cube = torch.from_numpy(neighbours(PATCH, image.ndim) @ steps)
    shifts = neighbours(SEARCH, image.ndim) @ steps
    places = np.ravel_multi_index(tuple(axis + MARGIN for axis in np.nonzero(disputed)), image.shape)
    best = np.stack([best_shift(image, atlas, shifts, places) for atlas in atlases], 1)
    own, others, weights = torch.from_numpy(image.ravel()), [torch.from_numpy(atlas.ravel()) for atlas in atlases], []
    for start in range(0, len(places), CHUNK):
        part, moved = places[start:start + CHUNK], shifts[best[start:start + CHUNK]]
        patches = normalised(own[torch.from_numpy(part)[:, None] + cube])
        apart = [patches - normalised(atlas[torch.from_numpy(part + shift)[:, None] + cube])
                 for atlas, shift in zip(others, moved.T)]
        weights.append(joint_weights(torch.stack(apart, 1).abs()))
    return torch.cat(weights).numpy(), best


def neighbours(reach, dims):
    """Offsets of the voxels up to `reach` away along each axis, (count, dims) ints, the nearest first."""
    offsets = itertools.product(range(-reach, reach + 1), repeat=dims)
    return np.array(sorted(offsets, key=lambda offset: np.square(offset).sum()))


def best_shift(image, atlas, shifts, places):
    """The number of the shift that makes an atlas look most like the image around each place, (n,); ties: the first.

    The measure is the correlation of the two patches, by running sums over the whole box. shifts, places: in the flat
    arrays.
    """
    def mean(volume):
        return ndimage.uniform_filter(volume, 2 * PATCH + 1, mode="nearest").ravel()

    own, other = image - image.mean(), atlas - atlas.mean()
    own_mean, other_mean = mean(own), mean(other)
    own_spread = np.sqrt(np.maximum(mean(own * own) - own_mean ** 2, 1e-12))
    other_spread = np.sqrt(np.maximum(mean(other * other) - other_mean ** 2, 1e-12))
    found, most = np.zeros(len(places), np.int64), np.full(len(places), -np.inf, np.float32)
    for number, shift in enumerate(shifts):
        moved = np.roll(other, -shift)  # of the flat array; the padding absorbs what wraps around
        product = mean(own * moved)[places] - own_mean[places] * other_mean[places + shift]
        alike = product / (own_spread[places] * other_spread[places + shift])
        better = alike > most + 1e-6
        found[better], most[better] = number, alike[better]
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


def count(weights, best, numbers, kinds, disputed):
    """The votes in each disputed voxel, (n, kinds) float32: of each patch that contains it.

    weights, best: from `weigh`. numbers: (K, *size), the labels as 0 .. kinds - 1. disputed: (*size) booleans.
    """
    votes, volume = np.zeros((len(weights), kinds), np.float32), np.zeros(disputed.shape, np.float32)
    rows, places, shifts = np.arange(len(weights)), np.argwhere(disputed) + SEARCH, neighbours(SEARCH, disputed.ndim)
    for atlas, labels in enumerate(np.pad(each, SEARCH, mode="edge") for each in numbers):
        for number, shift in enumerate(shifts):
            volume[disputed] = np.where(best[:, atlas] == number, weights[:, atlas], 0)
            share = ndimage.uniform_filter(volume, 2 * PATCH + 1, mode="constant")[disputed]
            votes[rows, labels[tuple((places + shift).T)]] += share
    return votes


def is_thick(labels):
    """Where a structure, or the background, is at least three voxels thick: (*size) booleans. labels: ints >= 0."""
    reach = 2
    wide = np.pad(labels, reach, mode="symmetric")
    found, ball = np.zeros(wide.shape, bool), ndimage.generate_binary_structure(labels.ndim, 2)
    for value, box in enumerate(ndimage.find_objects(wide + 1)):
        if box is not None:
            box = tuple(slice(max(side.start - reach, 0), side.stop + reach) for side in box)
            found[box] |= ndimage.binary_opening(wide[box] == value, ball)
    return found[(slice(reach, -reach),) * labels.ndim]


def smoothed(votes, disputed):
    """The votes (n, kinds) in the disputed voxels, smoothed by SIGMA. disputed: (*size) booleans."""
    found, volume = np.empty_like(votes), np.zeros(disputed.shape, np.float32)
    for kind in range(votes.shape[1]):
        volume[disputed] = votes[:, kind]
        found[:, kind] = ndimage.gaussian_filter(volume, SIGMA)[disputed]
    return found


def by_intensity(shares, values):
    """Shares of the votes (n, kinds), weighted by how typical the intensities `values` (n,) are for each label.

    The histogram of a label counts each voxel by its share. A label with few votes gets nearly that of all voxels,
    which has no effect.
    """
    low, high = np.quantile(values, (0.005, 0.995))
    bins = np.clip((values - low) / max(high - low, 1e-6) * BINS, 0, BINS - 1).astype(np.int64)
    counts = np.stack([np.bincount(bins, each, BINS) for each in shares.T], 1)
    counts = ndimage.gaussian_filter1d(counts, BLUR, axis=0)  # mirrored at the ends, so none is lost
    whole = counts.sum(1, keepdims=True) / len(values)
    counts += BINS * whole
    typical = (counts / counts.sum(0) / np.maximum(whole, 1e-9)) ** TRUST
    found = np.empty_like(shares)  # label by label: with a hundred labels, tables of all voxels fill the memory
    for kind in range(shares.shape[1]):
        found[:, kind] = shares[:, kind] * typical[bins, kind]
    return found
