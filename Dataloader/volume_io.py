"""NIfTI volumes in and out, and the one interpolation that brings a volume onto the training grid.

The nibabel array is used untransposed: D, H, W are its i, j, k (2D: H, W are i, j). Affines are 4x4 float64,
voxel to world in millimetres, RAS, in 2D too: of a file in other units they are converted, as ITK does.
"""
import gzip
import math
import zlib
from pathlib import Path

import nibabel
import numpy as np
from nibabel import orientations
from scipy import ndimage

from Runtime.errors import InputError
from Runtime.files import write_file

READ_ERRORS = (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError,
               nibabel.wrapstruct.WrapStructError, OSError, EOFError, zlib.error, ValueError, gzip.BadGzipFile)
SMOOTH_ABOVE = 1.5
SMOOTH_SIGMA = 0.4
MM_OF_UNIT = {1: 1000.0, 3: 0.001}  # NIfTI's codes of metre and micrometre; ITK takes all others for millimetres
MOST_BYTES = 16 * 2 ** 30  # of a compressed file's voxels: a damaged or foreign header must not take all memory
CHUNK = 8 * 2 ** 20
MOST_AFTER = 64 * 2 ** 20  # bytes after the last voxel, which are read to see the checksum, and not kept
SAME_GRID = 0.1  # voxels by which the corners of what is called the same grid may lie apart


def read_volume(path, dims=3):
    """Read one image.

    path: .nii or .nii.gz; trailing axes of length 1 are dropped.
    Returns: array (D, H, W) or (H, W), float32, C-contiguous, file intensities; affine 4x4 float64.
    Raises InputError, naming the file, where it is missing, not NIfTI, truncated or corrupt, has another number of
    axes, NaN or infinite voxels, one constant value, or a singular affine.
    """
    array, affine = _read(path, dims)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, dtype=np.float32)
    _require_finite(path, array)
    if array.min() == array.max():
        raise InputError(f"{path}: every voxel is {array.flat[0]:g}, an empty volume; remove it from the data set.")
    return array, affine


def read_label(path, dims=3):
    """Read one label map.

    Returns: array (D, H, W) or (H, W), int16, C-contiguous; affine 4x4 float64.
    Raises InputError as `read_volume` does, except that a constant map is allowed, and for values that are not
    whole numbers or do not fit int16.
    """
    array, affine = _read(path, dims)
    _require_finite(path, array)
    broken = np.count_nonzero(array != np.round(array))
    if broken:
        raise InputError(f"{path}: {broken} label voxels are not whole numbers; resample labels by nearest neighbour.")
    if array.min() < -32768 or array.max() > 32767:
        raise InputError(f"{path}: labels from {array.min():g} to {array.max():g} do not fit int16; renumber them.")
    return np.ascontiguousarray(array, dtype=np.int16), affine


def read_header(path, dims=3):
    """Read shape and affine without decompressing the voxels.

    Returns: shape, a tuple of `dims` ints; affine 4x4 float64.
    Raises InputError as `read_volume` does for everything a header tells; a cut .nii.gz shows only when read whole.
    """
    image = open_nifti(path)
    return _squeezed_shape(path, image.shape, dims), read_affine(path, image, dims)


def open_nifti(path):
    """nibabel image with lazy voxels. Raises InputError for a missing, foreign or visibly cut file."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the path.")
    try:
        image = nibabel.load(path)
    except READ_ERRORS as error:
        raise InputError(f"{path}: not a readable NIfTI file ({error}); export it again as .nii.gz.") from error
    if not isinstance(image, nibabel.Nifti1Image):
        raise InputError(f"{path}: {type(image).__name__} is not single-file NIfTI; convert it to .nii.gz.")
    if path.suffix != ".gz":
        _require_bytes(path, image, path.stat().st_size)
    return image


def read_raw_header(path):
    """The nibabel header of a NIfTI file, unchanged. Raises InputError as `read_header` does."""
    return open_nifti(path).header


def mm_of_unit(header):
    """How many millimetres the unit of length of a nibabel header has; 1 where it does not say."""
    return MM_OF_UNIT.get(int(header["xyzt_units"]) & 7, 1.0)


def read_affine(path, image, dims):
    """The affine of a nibabel image, 4x4 float64, voxel to world in millimetres.

    A 2D file's missing third axis becomes the normal. Raises InputError naming the file where it is singular.
    """
    affine = np.array(image.affine, np.float64)
    affine[:3] *= mm_of_unit(image.header)
    if dims == 2 and np.isfinite(affine).all() and not affine[:3, 2].any():
        affine[:3, 2] = np.cross(affine[:3, 0], affine[:3, 1])
        affine[:3, 2] /= np.linalg.norm(affine[:3, 2]) or 1
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    usable = np.isfinite(affine).all() and lengths.min() > 0
    if not usable or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-6:
        raise InputError(f"{path}: the affine {affine[:3].round(4).tolist()} is singular; repair the header.")
    return affine


def write_volume(path, array, affine, header=None):
    """Write a NIfTI file, whole and durable (Runtime/files.py). The same input gives the same bytes.

    path: .nii or .nii.gz; its folder is made if missing.
    array: (D, H, W), (H, W) stored as (H, W, 1), or more axes, stored as they are. The dtype is kept; bool becomes
    uint8 and float16 float32, which NIfTI lacks.
    affine: 4x4 voxel to world in millimetres, RAS; written as qform and sform with the codes of `header`, or 1 where it
    has none, and in its unit of length. header: nibabel header whose descriptive fields are kept; it is not changed.
    """
    path = Path(path)
    suffix = _nifti_suffix(path)
    if not suffix:
        raise InputError(f"{path}: a volume file ends in .nii or .nii.gz; rename the output.")
    array = np.asarray(array)
    array = array[..., None] if array.ndim == 2 else array
    array = array.astype({"bool": np.uint8, "float16": np.float32}.get(array.dtype.name, array.dtype), copy=False)
    affine = np.array(affine, np.float64)
    if header is not None:
        affine[:3] /= mm_of_unit(header)
    image = nibabel.Nifti1Image(array, affine, header, dtype=array.dtype)
    # From the header given: nibabel resets the codes in its copy when the affine is a new one.
    image.set_qform(affine, 1 if header is None else int(header["qform_code"]) or 1)
    image.set_sform(affine, 1 if header is None else int(header["sform_code"]) or 1)
    if not int(image.header["xyzt_units"]) & 7:
        image.header["xyzt_units"] |= 2  # millimetres; the unit of time stays
    write_file(path, lambda file: _write_nifti(file, image, suffix == ".nii.gz"))


def _write_nifti(file, image, compressed):
    """A nibabel image into an open binary file, with the bytes that nibabel.save would write."""
    if not compressed:
        image.to_stream(file)
        return
    # No name and no time in its header: the same content is the same file, whatever it is called.
    with gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as stream:
        image.to_stream(stream)


def intensity_range(array, low=0.5, high=99.5):
    """The two intensities of an array that become 0 and 1: its percentiles.

    low, high: percent. Where both percentiles coincide (a sparse volume) they are minimum and maximum instead.
    Returns: two floats; equal for a constant array.
    """
    bottom, top = np.percentile(array, [low, high])
    return (float(bottom), float(top)) if top > bottom else (float(array.min()), float(array.max()))


def rescale(array, bottom, top):
    """Intensities as 0 .. 1 between two of them, clipped; 0 everywhere where they are equal. Returns float32."""
    if top <= bottom:
        return np.zeros(array.shape, np.float32)
    return np.clip((array.astype(np.float64) - bottom) / (top - bottom), 0, 1).astype(np.float32)


def to_canonical(array, affine):
    """Flip and permute axes to the orientation closest to RAS; every voxel keeps its world position.

    array: (D, H, W), or (H, W), where only those two axes are exchanged or flipped and the third column of the
    affine stays. affine: 4x4.
    Returns: array, C-contiguous; affine 4x4.
    """
    ornt = orientations.io_orientation(affine)[:array.ndim]
    # A 2D slice may lie in any world plane: only the order of its two world axes counts.
    ornt[:, 0] = np.argsort(np.argsort(ornt[:, 0]))
    change = orientations.inv_ornt_aff(ornt, array.shape)
    new_affine = np.asarray(affine, np.float64) @ _embed(change[:-1, :-1], change[:-1, -1])
    return np.ascontiguousarray(orientations.apply_orientation(array, ornt)), new_affine


def corners_apart(shape, affine, other):
    """How far the corners of a grid lie apart under two affines, at most, in voxels. shape: D, H, W or H, W."""
    corners = np.array([[*np.multiply(index, np.subtract(shape, 1)), *[0] * (3 - len(shape)), 1]
                        for index in np.ndindex(*[2] * len(shape))], np.float64).T
    return float(np.abs(np.linalg.inv(affine) @ other @ corners - corners)[:len(shape)].max())


def foreground_box(inside):
    """The smallest box around the True voxels of an array: first and past-the-end index of each axis, (2, dims) ints.

    Where nothing is True it is the whole array.
    """
    if not inside.any():
        return np.array([[0] * inside.ndim, inside.shape])
    spans = [np.flatnonzero(inside.any(tuple(a for a in range(inside.ndim) if a != axis)))
             for axis in range(inside.ndim)]
    return np.array([[span[0] for span in spans], [span[-1] + 1 for span in spans]])


def grid_transform(shape, affine, size, spacing_mm, box=None):
    """Place an isotropic grid centred on a canonical volume, or on a box in it.

    shape: of the canonical array, D, H, W or H, W. affine: 4x4. size: target shape, an int or one per axis.
    spacing_mm: target voxel side in millimetres; 0: the smallest at which the whole field of view fits in `size`.
    box: from `foreground_box`, what is to be centred and to fit instead of the field of view. What is around it and
    within the grid stays.
    Returns: scale (dims,), offset (dims,), with index_in = scale * index_out + offset; new_affine 4x4.
    An axis whose scale is 1 within 1e-4 gets exactly 1 and a whole offset, so that it is copied, not interpolated.
    """
    dims = len(shape)
    first, stop = np.asarray([[0] * dims, shape] if box is None else box, np.float64)
    size = np.broadcast_to(np.asarray(size, np.float64), (dims,))
    voxel_mm = np.linalg.norm(affine[:3, :dims], axis=0)
    target_mm = spacing_mm or np.max((stop - first) * voxel_mm / size)
    scale = target_mm / voxel_mm
    copied = np.abs(scale - 1) < 1e-4
    scale = np.where(copied, 1.0, scale)
    offset = (first + stop - 1) / 2 - scale * (size - 1) / 2
    # A shape difference that is odd would put the centre half a voxel off and blur every voxel.
    offset = np.where(copied, np.floor(offset), offset)
    return scale, offset, np.asarray(affine, np.float64) @ _embed(np.diag(scale), offset)


def to_grid(array, affine, size, spacing_mm, order=1, box=None):
    """Bring a volume to canonical orientation and onto the grid of `grid_transform`, interpolating at most once.

    array: (D, H, W) or (H, W). affine: 4x4. size: int or one per axis. spacing_mm: millimetres, 0 fits the volume.
    box: in the canonical array, see `grid_transform`.
    order: 1 for images (float32 out; smoothed first along axes that shrink by more than 1.5), 0 for labels (dtype
    kept). Outside the volume: 0.
    Returns: array of shape `size`; its affine 4x4. Where only a crop or padding is needed the values are exact copies.
    """
    array, affine = to_canonical(array, affine)
    scale, offset, new_affine = grid_transform(array.shape, affine, size, spacing_mm, box)
    size = tuple(np.broadcast_to(size, (array.ndim,)).tolist())
    array = array.astype(np.float32 if order else array.dtype, copy=False)
    if np.all(np.abs(scale - 1) < 1e-4) and np.all(np.abs(offset - np.round(offset)) < 1e-3):
        return _crop_or_pad(array, np.round(offset).astype(int), size), new_affine
    sigma = np.where(scale > SMOOTH_ABOVE, SMOOTH_SIGMA * scale, 0)
    if order and sigma.any():
        array = ndimage.gaussian_filter(array, sigma, mode="nearest")
    # grid-constant: plain "constant" drops the outer half voxel, and a border plane met with rounding error.
    array = ndimage.affine_transform(array, scale, offset, size, order=order, mode="grid-constant", cval=0)
    return array, new_affine


def from_grid(array, grid_affine, shape, affine, order=1):
    """Bring a volume on a grid of `to_grid` back to the grid of its file, orientation included.

    array: (D, H, W) or (H, W) on the grid. grid_affine: of the grid. shape, affine: of the file. order: 1 for images
    (float32 out), 0 for labels (dtype kept). Returns: array of `shape`; 0 where the grid does not reach.
    """
    dims = array.ndim
    change = np.linalg.inv(grid_affine) @ np.asarray(affine, np.float64)
    array = array.astype(np.float32 if order else array.dtype, copy=False)
    return ndimage.affine_transform(array, change[:dims, :dims], change[:dims, 3], tuple(shape), order=order,
                                    mode="grid-constant", cval=0)


def _nifti_suffix(path):
    return next((suffix for suffix in (".nii.gz", ".nii") if path.name.endswith(suffix)), "")


def _read(path, dims):
    """Voxels in the file's own (scaled) dtype with `dims` axes, and the checked affine."""
    path, image = Path(path), open_nifti(path)
    shape, affine = _squeezed_shape(path, image.shape, dims), read_affine(path, image, dims)
    return read_voxels(path, image).reshape(shape), affine


def read_voxels(path, image):
    """All voxels of an open NIfTI file in its own (scaled) dtype. Raises InputError naming a damaged file."""
    try:
        if Path(path).suffix == ".gz":
            # nibabel stops before the checksum at the end; decompressing the whole file verifies it.
            content = _decompressed(path, image)
            image = type(image).from_bytes(content)
            _require_bytes(path, image, len(content))
        array = np.asanyarray(image.dataobj)
    except InputError:
        raise
    except READ_ERRORS as error:
        raise InputError(f"{path}: truncated or corrupt ({error}); copy or download it again.") from error
    if array.dtype.kind not in "buif":
        raise InputError(f"{path}: voxels of type {array.dtype} are not one real number each; convert it.")
    return array


def _decompressed(path, image):
    """Content of a .nii.gz up to its last voxel. Its size is bounded by the header, and that by MOST_BYTES."""
    needed = _bytes_of(image)
    if needed > MOST_BYTES:
        raise InputError(f"{path}: its header asks for {needed / 2 ** 30:.1f} GiB, and at most "
                         f"{MOST_BYTES / 2 ** 30:.0f} are decompressed; repair the header, crop the volume, or store "
                         "it as .nii.")
    parts, size = [], 0
    with gzip.open(path) as file:
        while part := file.read(CHUNK):
            parts += [part] if size < needed else []
            size += len(part)
            if size > needed + MOST_AFTER:
                raise InputError(f"{path}: goes on for more than {MOST_AFTER / 2 ** 20:.0f} MiB after its last voxel; "
                                 "export it again.")
    return b"".join(parts)


def _bytes_of(image):
    """Bytes of a file up to its last voxel, as its header says."""
    return int(image.dataobj.offset) + math.prod(image.shape) * image.get_data_dtype().itemsize


def _require_bytes(path, image, present):
    needed = _bytes_of(image)
    if present < needed:
        raise InputError(f"{path}: truncated, {present} of {needed} bytes are there; copy or download it again.")


def _require_finite(path, array):
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise InputError(f"{path}: {bad} of {array.size} voxels are NaN or infinite; repair or remove the volume.")


def _squeezed_shape(path, shape, dims):
    """Shape without trailing axes of length 1, which must leave `dims` axes."""
    kept = tuple(shape)
    while kept and kept[-1] == 1:
        kept = kept[:-1]
    if len(kept) > dims:
        raise InputError(f"{path}: shape {shape} is not {dims}D; split it into one {dims}D file per volume.")
    if len(kept) < dims or min(kept) < 1:
        raise InputError(f"{path}: shape {shape} is not {dims}D; check the file and the setting of dims.")
    return kept


def _embed(matrix, offset):
    """4x4 of a (dims, dims) matrix and a (dims,) offset; axes beyond `dims` stay."""
    dims = len(offset)
    full = np.eye(4)
    full[:dims, :dims] = matrix
    full[:dims, 3] = offset
    return full


def _crop_or_pad(array, offset, size):
    """Copy with out[i] = array[i + offset], 0 outside."""
    out = np.zeros(size, array.dtype)
    first = np.maximum(0, -offset)
    stop = np.minimum(size, np.array(array.shape) - offset)
    if np.all(stop > first):
        inside = tuple(slice(a, b) for a, b in zip(first, stop))
        out[inside] = array[tuple(slice(a, b) for a, b in zip(first + offset, stop + offset))]
    return out
