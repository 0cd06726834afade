"""One volume of a data set: from its files onto the training grid."""
import numpy as np

from Dataloader.grids import (
    air_for_filler,
    foreground_box,
    intensity_range,
    require_same_grid,
    rescale,
    same_grid,
    to_canonical,
    to_grid,
    voxel_volume,
)
from Dataloader.nifti import (
    placement_doubts,
    read_channels,
    read_label,
    read_numbers,
    read_volume,
    require_image,
)
from Runtime.errors import InputError

KINDS = ("image", "label", "mask")
RESAMPLE = "resample it, for example with nibabel.processing.resample_from_to(label, image, order=0)"


def on_grid(item, cfg, kinds=KINDS):
    """Read an image, its label and mask onto the training grid, with one interpolation, as the data.* keys say.

    item: from `read_datalist`. cfg: flat config. kinds: which of KINDS are wanted.
    Returns: dict of image (D, H, W) float32 in [0, 1], with data.channels C > 1 (C, D, H, W); label, mask (D, H, W)
    int16 or None; grid_affine (4x4, RAS) of the training grid; label_kept, mask_kept, the share of the labelled volume,
    or of that in the mask, that is on the grid, None without one.
    Raises InputError naming the file for whatever `read_volume` refuses and for a label on another grid.
    """
    size, spacing_mm = cfg["data.img_size"], cfg["data.spacing_mm"]
    channels, affine = read_image(item, cfg["model.dims"], cfg["data.channels"])
    images = [scaled(channel, cfg)[0] for channel in channels]
    shape = images[0].shape
    others = {}
    if item["label"] and "label" in kinds:
        others["label"] = read_beside(item, "label", shape, affine)[0]
    if item["mask"] and ("mask" in kinds or cfg["data.crop_above"]):
        others["mask"] = (read_beside(item, "mask", shape, affine, read_numbers)[0] > 0).astype(np.int16)
    box = focus(images, affine, cfg, others.get("mask"))
    arrays = dict.fromkeys(KINDS[1:])
    placed = [to_grid(image, affine, size, spacing_mm, box=box) for image in images]
    if any(array.min() == array.max() for array, _ in placed):
        raise InputError(f"{item['image']}: all of it is one intensity on the training grid; check its voxel size in "
                         "the header, data.spacing_mm and data.window.")
    for kind, other in others.items():
        if kind in kinds:
            if other.dtype != np.int16:
                raise InputError(f"{item[kind]}: labels from {other.min()} to {other.max()} do not fit int16, in "
                                 "which the cache stores them; renumber them.")
            arrays[kind] = np.ascontiguousarray(to_grid(other, affine, size, spacing_mm, 0, box)[0])
    grid_affine, kept = placed[0][1], dict.fromkeys(KINDS[1:])
    for kind in kept:
        if arrays[kind] is not None and not others[kind].any():
            kept[kind] = 0.0 if kind == "mask" else None
        elif arrays[kind] is not None:
            mm3 = [np.count_nonzero(array) * voxel_volume(around, array.ndim) for array, around in (
                (arrays[kind], grid_affine), (others[kind], affine))]
            kept[kind] = min(mm3[0] / mm3[1], 1.0)
    image = placed[0][0] if len(placed) == 1 else np.stack([array for array, _ in placed])
    return {**arrays, "image": image, "grid_affine": grid_affine, "label_kept": kept["label"],
            "mask_kept": kept["mask"]}


def read_image(item, dims, count):
    """The channels of a volume: list of `count` arrays (D, H, W) or (H, W) float32; affine 4x4.

    item: from `read_datalist`, with the files of further channels, or with one file that holds all of them.
    Raises InputError as `read_channels` does, for a segmentation, and for a channel on another grid than the first.
    """
    further = item.get("channels", [])
    arrays, affine = read_channels(item["image"], dims, 1 if further else count)
    require_image(item["image"], arrays[0])
    for path in further:
        channel, own_affine = read_volume(path, dims)
        require_same_grid(f"{path}: the channel", channel.shape, own_affine, item["image"], arrays[0].shape, affine,
                          "resample it")
        arrays.append(channel)
    return arrays, affine


def scaled(array, cfg, counted=None):
    """Scale intensities to 0 .. 1, as every network and registration sees them.

    data.window becomes 0 and 1 if set, else data.percentiles of the voxels that count. counted: these; None for all.
    Returns: float32 array in the shape of `array`; [low, high], the intensities that became 0 and 1.
    """
    array = air_for_filler(np.asarray(array, np.float32))
    limits = cfg["data.window"] if any(cfg["data.window"]) else (
        intensity_range(array if counted is None else counted, *cfg["data.percentiles"]))
    return rescale(array, *limits), list(map(float, limits))


def focus(images, affine, cfg, mask=None):
    """The box of a canonical volume on which the training grid centres: that of the mask, or of what its channels show.

    images: of the channels, an iterable of arrays in 0 .. 1. affine, mask: of them. Returns: as `foreground_box`, or
    None without data.crop_above, for the whole volume.
    """
    if not cfg["data.crop_above"]:
        return None
    inside = np.max([*images], axis=0) > cfg["data.crop_above"] if mask is None else mask > 0
    return foreground_box(to_canonical(inside, affine)[0])


def read_beside(item, kind, shape, affine, read=read_label):
    """The label or mask of an image, and its own affine, which may differ from the image's by rounding.

    kind: "label" or "mask". shape, affine: of the image. read: `read_numbers` for a mask that may be soft. Raises
    InputError if the grids differ, see `same_grid`.
    """
    array, own_affine = read(item[kind], len(shape))
    advice = RESAMPLE
    if array.shape == tuple(shape) and not same_grid(array.shape, own_affine, shape, affine):
        doubts = [doubt.rstrip(".") for path in (item["image"], item[kind])
                  for doubt in placement_doubts(path, len(shape))]
        advice = ". ".join(["if it fits the image voxel by voxel, one of the two headers is wrong: correct that one, "
                            f"since resampling would destroy it; if not, {RESAMPLE}", *doubts])
    require_same_grid(f"{item[kind]}: the {kind} of {item['image']}", array.shape, own_affine, "the image", shape,
                      affine, advice)
    return array, own_affine
