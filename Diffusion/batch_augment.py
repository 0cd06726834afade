"""Augmentation of whole batches on the device, keyed by sample."""
import functools
import math

import torch

from Dataloader.dataset import as_float
from Diffusion.fields import affine_field, append_dims, compose, warp
from Diffusion.losses import table_lookup
from Runtime.device import send
from Runtime.keyed_random import hashed, uniform

REMAP_PIECES = 8  # most linear pieces of a random function of intensity
REMAP_BINS = 64  # knots of its lookup table
GEOMETRIC = {"augment.rotation", "augment.scaling", "augment.shift", "augment.flip"}  # of `random_affine`
ELSEWHERE = {*GEOMETRIC, "augment.deform", "augment.remap"}  # what `augment` does not do to intensities


def random_affine(rng_keys, dims, size, cfg, paired=False):
    """Random affine maps about the image centre: scaling, then rotation, then shift; some flipped along the first axis.

    rng_keys: B tuples (seed, epoch, sample). size: voxels per side. cfg: augment.rotation (degrees), .scaling, .shift
    (fractions) and .flip (probability). paired: moving and fixed volumes alternate, and both of a pair are flipped or
    neither, because no deformation undoes a reflection.
    Returns: (B, dims, dims + 1), linear part and shift in voxels, as `affine_field` takes it.
    """
    numbers = uniform(rng_keys, "affine", 3 * 3 + 1) * 2 - 1
    angles = numbers[:, :3] * math.radians(cfg["augment.rotation"])
    scales = torch.exp(numbers[:, 3:3 + dims] * math.log1p(cfg["augment.scaling"]))
    shift = numbers[:, 6:6 + dims] * cfg["augment.shift"] * torch.tensor(size, dtype=torch.float32)
    linear = torch.diag_embed(scales)
    planes = [(0, 1), (1, 2), (0, 2)] if dims == 3 else [(0, 1)]
    for index, (i, j) in enumerate(planes):
        cos, sin = torch.cos(angles[:, index]), torch.sin(angles[:, index])
        turn = torch.eye(dims).repeat(len(linear), 1, 1)
        turn[:, i, i] = cos
        turn[:, j, j] = cos
        turn[:, i, j] = -sin
        turn[:, j, i] = sin
        linear = turn @ linear
    flipped = (numbers[:, 9] + 1) / 2 < cfg["augment.flip"]
    if paired:
        flipped = flipped[0::2].repeat_interleave(2)
    linear[flipped, :, 0] *= -1
    return torch.cat([linear, shift[:, :, None]], dim=2)


@functools.cache
def _quantiles(device):
    """The normal quantiles of 2^16 equally likely values, ascending: (65536,) float32, mean 0, variance 1, |x| <= 4.3.

    Rounded to 2^-14, far coarser than any rounding difference between processors.
    """
    values = torch.special.ndtri((torch.arange(2 ** 16, dtype=torch.float64) + 0.5) / 2 ** 16)
    values /= values.square().mean().sqrt()
    return ((values * 2 ** 14).round() / 2 ** 14).float().to(device)


def noise(rng_key, purpose, size, device="cpu"):
    """Standard normal noise of one sample, made on the device: the same bits on every device and in every batch.

    A hash of the key gives two 32-bit words, a (odd) and b. Voxel i and voxel i + half share the number a * i + b,
    whose mixed bits are two 16-bit indices into a table of normal quantiles. Integers only, no logarithm and no cosine:
    every device gets the same bits.
    rng_key: (seed, epoch, sample). purpose: str naming what is drawn. size: voxels per side.
    Returns: (*size) float32.
    """
    words = hashed(rng_key[0], purpose, *rng_key[1:])
    a, b = (int.from_bytes(words[at:at + 4], "little", signed=True) for at in (0, 4))
    count = math.prod(size)
    half = (count + 1) // 2
    device = torch.device(device)
    # On a CPU, work in pieces of 2^15 voxels: they stay in the cache, and torch does not split an operation of that
    # size over threads, which would cost each of a dozen short operations a synchronisation.
    step = 2 ** 15 if device.type == "cpu" else half
    table = _quantiles(device)
    values = torch.empty(2, half, device=device)
    for start in range(0, half, step):
        piece = slice(start, min(start + step, half))
        # int32 products wrap to their lowest 32 bits on every device; >> copies the sign bit, hence the mask.
        bits = torch.arange(piece.start, piece.stop, dtype=torch.int32, device=device).mul_(a | 1).add_(b)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2 ** 32)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
        high = (bits >> 16).bitwise_and_(0xFFFF)
        torch.index_select(table, 0, bits.bitwise_xor_(high).bitwise_and_(0xFFFF), out=values[0, piece])
        torch.index_select(table, 0, high, out=values[1, piece])
    return values.view(-1)[:count].view(size)


def _moved(volumes, rng_keys, cfg, deformation, paired, mode="bilinear"):
    """Volumes (B, C, *spatial) float32, warped by the random affine maps of their keys, then by the deformation.

    deformation: (B, N, *spatial) in voxels or None. paired: of `random_affine`. mode: of `warp`. Both are composed into
    one field, so volumes are interpolated only once; without either, they are returned unchanged.
    """
    if deformation is None and not any(cfg[key] for key in GEOMETRIC):
        return volumes
    size = volumes.shape[2:]
    field = affine_field(send(random_affine(rng_keys, len(size), size, cfg, paired), volumes.device), size)
    if deformation is not None:
        field = compose(first=field, then=deformation)
    return warp(volumes, field, mode, padding="border")


def augment(images, rng_keys, cfg, deformation=None, paired=False):
    """Copies of a batch with random affine maps, gamma, contrast, brightness and noise; disabled ones cost nothing.

    After the affine, intensities v become v ^ exp(+-gamma), then 0.5 + (v - 0.5) exp(+-contrast) +- brightness, then
    noise is added. They may leave [0, 1].
    images: (B, C, *spatial) as stored, on any device; unchanged. rng_keys: B tuples (seed, epoch, sample).
    deformation: (B, N, *spatial) in voxels, from DeformDDPM.draw_pair_fields, to warp by after the affine map; or None.
    paired: whether moving and fixed volumes alternate, see `random_affine`.
    Returns: (B, C, *spatial) float32; `images` itself if they are float32 and all augment.* keys are 0.
    """
    images = as_float(images)
    moved = _moved(images, rng_keys, cfg, deformation, paired)
    if not any(value for key, value in cfg.items() if key.startswith("augment.") and key not in ELSEWHERE):
        return moved
    moved = moved.clone() if moved is images else moved  # what follows is in place
    purposes = [f" channel {number}" if number else "" for number in range(moved.shape[1])]  # each draws its own

    def drawn(name):
        numbers = torch.stack([uniform(rng_keys, name + purpose) for purpose in purposes], dim=1)      # (B, C)
        numbers = (numbers * 2 - 1) * cfg[f"augment.{name}"]
        return send(append_dims(numbers, moved), moved.device)

    if cfg["augment.gamma"]:
        moved.clamp_(min=0.0).pow_(torch.exp(drawn("gamma")))
    if cfg["augment.contrast"]:
        factor = torch.exp(drawn("contrast"))
        offset = 0.5 - 0.5 * factor + (drawn("brightness") if cfg["augment.brightness"] else 0.0)
        torch.addcmul(offset, moved, factor, out=moved)
    elif cfg["augment.brightness"]:
        moved.add_(drawn("brightness"))
    if cfg["augment.noise"]:
        for image, rng_key in zip(moved, rng_keys):
            for channel, purpose in zip(image, purposes):
                grains = noise(rng_key, f"noise{purpose}", channel.shape, moved.device)
                channel.add_(grains, alpha=cfg["augment.noise"])
    return moved


def augment_maps(maps, rng_keys, cfg, deformation=None, paired=False):
    """Label maps or masks, warped by nearest neighbour as `augment` warps the images of the same keys.

    maps: (B, 1, *spatial) whole numbers; not changed. deformation, paired: as in `augment`.
    Returns: (B, 1, *spatial) float32, with the same values.
    """
    return _moved(maps.float(), rng_keys, cfg, deformation, paired, mode="nearest")


def _random_function(numbers):
    """A random function of intensity, as a table of its values at REMAP_BINS knots from 0 to 1.

    Piecewise linear between equidistant points with random values, then rescaled to run from 0 to 1.
    numbers: (REMAP_PIECES + 2,) in [0, 1). Returns: (REMAP_BINS,).
    """
    pieces = 1 + int(numbers[0] * REMAP_PIECES)
    values = numbers[1:pieces + 2]
    table = torch.nn.functional.interpolate(values[None, None], REMAP_BINS, mode="linear", align_corners=True)[0, 0]
    lowest, highest = table.min(), table.max()
    return (table - lowest) / (highest - lowest).clamp(min=1e-3)


def remap_intensities(images, rng_keys, cfg):
    """Imitate another modality: map the intensities of each volume by a random function.

    A fraction augment.remap of the volumes is mapped, each channel by its own `_random_function`. Bright may become
    dark, and different intensities may become equal.
    images: (B, C, *spatial) float32; not changed. rng_keys: B tuples (seed, epoch, sample).
    Returns: (B, C, *spatial), mapped volumes in 0 .. 1.
    """
    numbers = uniform(rng_keys, "remap", images.shape[1], REMAP_PIECES + 2)                            # (B, C, P + 2)
    tables = torch.stack([_random_function(row) for row in numbers.flatten(0, 1)])                     # (B C, bins)
    mapped = table_lookup(images.flatten(0, 1), send(tables, images.device)).view(images.shape)
    chosen = send(uniform(rng_keys, "remap share") < cfg["augment.remap"], images.device)
    return torch.where(append_dims(chosen, images), mapped, images)
