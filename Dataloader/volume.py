"""A volume with its grid, mask and further channels, from a file, an image of another library, or an array."""
import dataclasses
import os
import warnings
from pathlib import Path

import nibabel
import numpy as np

from Dataloader import formats
from Dataloader.grids import air_for_filler, is_singular, require_same_grid, varying_box
from Dataloader.nifti import (
    READ_ERRORS,
    as_nifti,
    checked_image,
    open_nifti,
    read_affine,
    read_numbers,
    read_volume,
    require_finite_voxels,
    stored_type,
)
from Runtime.errors import InputError

KINDS = "give a path, a nibabel or SimpleITK image, an array, or (array, affine 4x4)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Volume:
    """One image, its mask and further channels on the same grid.

    array: (D, H, W) or (H, W) float32, intensities as stored. affine: 4x4 float64, voxel to world in mm, RAS.
    name: its path as given, or its name in errors. header: of the file or image; an empty one for an array. dtype: of
    the numbers as stored, None if scaled. path: of the file, and stamp: its `size_and_time` when it was read, both None
    if the volume was passed in memory. mask: (*spatial) float32, 1 where the image counts, else 0; None: everywhere.
    channels: more images.
    """

    array: np.ndarray
    affine: np.ndarray
    name: str
    header: nibabel.Nifti1Header = dataclasses.field(default_factory=nibabel.Nifti1Header)
    dtype: np.dtype | None = None
    path: Path | None = None
    stamp: list[int] | None = None
    mask: np.ndarray | None = None
    channels: tuple["Volume", ...] = ()

    def __repr__(self):
        return f"<Volume: {self.name}, {self.array.shape}>"

    def __iter__(self):
        """Yield array and affine, so that `apply_field(*volume, ...)` works."""
        return iter((self.array, self.affine))

    @property
    def images(self):
        """The image and its further channels, (*spatial) each, in a list."""
        return [self.array, *(channel.array for channel in self.channels)]

    def every(self, step):
        """The Volume of every step-th voxel along each axis; itself for a step of 1."""
        if step == 1:
            return self
        kept = (slice(None, None, step),) * self.array.ndim
        affine = self.affine.copy()
        affine[:3, :self.array.ndim] *= step
        return self.changed(lambda array: array[kept], affine)

    def changed(self, change, affine):
        """The Volume on another grid, which has this affine: change(array) of its image, its mask and its channels."""
        return dataclasses.replace(self, array=change(self.array), affine=affine,
                                   mask=None if self.mask is None else change(self.mask),
                                   channels=tuple(channel.changed(change, affine) for channel in self.channels))


def is_path(source):
    return isinstance(source, str | os.PathLike)


def shape_of(source):
    """The shape of a source of `read_source`, before its voxels are read; None for a source that it refuses."""
    if is_path(source):
        return tuple(open_nifti(source).shape)
    array = source[0] if isinstance(source, tuple | list) and len(source) else getattr(source, "array", source)
    return tuple(array.GetSize()) if hasattr(array, "GetSize") else getattr(array, "shape", None)


def read_source(source, name, affine=None):
    """A Volume of 2 or 3 axes from a file, image or array. Trailing axes of length 1 in a file or image do not count.

    source: path; nibabel image; SimpleITK image; (array, affine 4x4); a Volume, without its mask and channels; or an
    array or tensor alone. name: the name of a source without a path in errors, such as "fixed". affine: of an array
    alone; without it voxels are cubes of 1 mm, with a warning.
    Raises InputError if the source is not a volume, or is empty, constant, not finite or on a singular grid.
    """
    if isinstance(source, Volume):
        return dataclasses.replace(source, mask=None, channels=())
    if is_path(source):
        image, stamp = open_nifti(source), formats.size_and_time(source)
        array, affine = read_volume(source, axes(source, image.shape))
        return Volume(array, affine, str(source), image.header, stored_type(source), Path(source).absolute(), stamp)
    name = str(getattr(source, "get_filename", lambda: None)() or name)
    array, own, header = in_memory(source, name)
    affine = affine if own is None else own
    if affine is None:
        warnings.warn(f"{name}: an array alone has no spacing, so voxels of 1 mm are assumed; give (array, affine) if "
                      "that is wrong.", stacklevel=4)
        affine = np.eye(4)
    image = checked_image(name, array)
    if np.may_share_memory(image, array):  # the caller may use it for the next volume
        image = image.copy()
    return Volume(image, affine, name, header, array.dtype)


def in_memory(source, name):
    """Array (2 or 3 axes), affine 4x4 or None, and header of a volume that is not a file, see `read_source`."""
    affine, header = None, nibabel.Nifti1Header()
    if isinstance(source, nibabel.spatialimages.SpatialImage):
        own, dims = as_nifti(source, name), axes(name, source.shape)
        affine, header = read_affine(name, own, dims), own.header
        try:
            array = np.asanyarray(source.dataobj)
        except READ_ERRORS as error:
            raise InputError(f"{name}: truncated or corrupt ({error}); copy or download it again.") from error
        return array.reshape(source.shape[:dims]), affine, header
    if type(source).__module__.split(".")[0] == "SimpleITK":
        import SimpleITK

        if source.GetNumberOfComponentsPerPixel() != 1:
            raise InputError(f"{name}: each voxel has {source.GetNumberOfComponentsPerPixel()} numbers; give an image "
                             "with one.")
        array = SimpleITK.GetArrayFromImage(source).T
        return array.reshape(array.shape[:axes(name, array.shape)]), formats.affine_of(source), header
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise InputError(f"{name}: {len(source)} values instead of an array and its affine; {KINDS}.")
        source, affine = source[0], checked_affine(source[1], name)
    array = as_array(source, name)
    if array.ndim not in (2, 3):
        raise InputError(f"{name}: shape {array.shape} is neither 2D nor 3D; give one volume of it, such as "
                         "array[..., 0].")
    return array, affine, header


def as_array(source, name, kinds=KINDS):
    """An array or tensor as a numpy array. kinds: what else may be given, for the error. Raises InputError."""
    if isinstance(source, np.ma.MaskedArray):
        raise InputError(f"{name}: the mask of a masked array would be lost; give its data, and the mask by itself.")
    if hasattr(source, "detach"):  # a tensor, also one with a gradient; numpy has no bfloat16
        source = source.detach().cpu()
        source = source.float() if str(source.dtype) == "torch.bfloat16" else source
    if not hasattr(source, "__array__"):
        raise InputError(f"{name}: {type(source).__name__} is not a volume; {kinds}.")
    return np.asarray(source)


def axes(name, shape):
    """The number of axes of a file's shape, 2 or 3, without trailing axes of length 1. Raises InputError for others."""
    shape = tuple(map(int, shape))
    kept = without_ones(shape)
    if len(kept) not in (2, 3):
        raise InputError(f"{name}: shape {shape} is neither 2D nor 3D; split it into one file per volume "
                         "(fslsplit), or take the first one (nib-roi -t 0:1 IN OUT).")
    return len(kept)


def without_ones(shape):
    """A shape without trailing axes of length 1 after the second one."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def dims_of(path):
    """The number of axes of a volume's file, 2 or 3."""
    return axes(path, open_nifti(path).shape)


def checked_affine(affine, name):
    """An affine as 4x4 float64. name: of its volume. Raises InputError if it is none or singular."""
    try:
        # A tensor may have a gradient.
        affine = np.array(affine.detach().cpu().numpy() if hasattr(affine, "detach") else affine, np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: its affine is a {type(affine).__name__}; {KINDS}.") from None
    if is_singular(affine):
        shown = affine.tolist() if affine.size <= 16 else f"of shape {affine.shape}"
        raise InputError(f"{name}: the affine {shown} is not an invertible 4x4 matrix with the last row 0 0 0 1; give "
                         "that of the volume.")
    return affine


def read_mask(source, volume):
    """A mask on the grid of its volume, 0 or 1, float32; None without a source.

    source: whatever `read_source` takes, or None. volume: a Volume.
    Raises InputError if the mask is on another grid, or nowhere above 0.
    """
    if source is None:
        return None
    if is_path(source):
        (mask, affine), word = read_numbers(source, volume.array.ndim), str(source)
    else:
        word = f"the mask of {volume.name}"
        mask, affine, _ = in_memory(source, word)
        require_finite_voxels(word, mask)
    require_same_grid(f"{word}: the mask", mask.shape, volume.affine if affine is None else affine,
                      f"its volume {volume.name}", volume.array.shape, volume.affine, "resample it to the volume")
    if not (mask > 0).any():
        raise InputError(f"{word}: the mask is nowhere above 0, so no voxel of {volume.name} would count; set it "
                         "above 0 where voxels should count.")
    return (mask > 0).astype(np.float32)


def further_sources(given, source):
    """The further channels of a volume in a list, for `read_further`; one source alone is one of them.

    given: a list or a stack (C, *spatial) of sources, one source, or None. source: of the volume itself. Trailing axes
    of length 1 do not count.
    """
    if given is None:
        return []
    if isinstance(given, tuple) and [getattr(each, "shape", None) == (4, 4) for each in given] == [False, True]:
        return [given]  # (array, affine)
    if is_path(given) or isinstance(given, Volume) or hasattr(given, "dataobj") or hasattr(given, "GetSize"):
        return [given]
    if not hasattr(given, "ndim"):
        return list(given)
    shape = shape_of(source) or ()
    return [given] if len(without_ones(given.shape)) == len(without_ones(shape)) else list(given)


def read_further(sources, volume):
    """The further channels of a volume, a tuple of Volumes on its grid.

    sources: whatever `read_source` takes, in order. Raises InputError for another grid.
    """
    read = []
    for number, source in enumerate(sources, 2):
        channel = read_source(source, f"channel {number} of {volume.name}", volume.affine)
        require_same_grid(f"{channel.name}: the channel", channel.array.shape, channel.affine,
                          f"its volume {volume.name}", volume.array.shape, volume.affine, "resample it to the volume")
        read.append(channel)
    return tuple(read)


def unpadded_box(volume):
    """The slices of a Volume without constant planes at its borders, see `varying_box`."""
    return tuple(slice(*ends) for ends in zip(*varying_box(volume.images)))


def without_padding(volume):
    """A Volume without constant planes at its borders, so that padding does not change the result."""
    box = unpadded_box(volume)
    affine = volume.affine.copy()
    affine[:3, 3] += affine[:3, :len(box)] @ [ends.start for ends in box]
    return volume.changed(lambda array: array[box], affine)


def without_filler(volume):
    """A CT Volume with its filler set to air, see `air_for_filler`; other Volumes unchanged."""
    array = air_for_filler(volume.array)
    return volume if array is volume.array else dataclasses.replace(volume, array=array)
