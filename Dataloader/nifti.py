"""Read and write images, label maps, and deformation fields as ITK, ANTs, Slicer and Learn2Reg use them.

The formats are NIfTI, FreeSurfer's .mgz and .mgh (by nibabel), and .nrrd, MetaImage and DICOM (Dataloader/formats.py).
Every file is opened as a nibabel NIfTI image.

The nibabel array is used untransposed: D, H, W are its i, j, k (2D: H, W are i, j). Affines are 4x4 float64, voxel to
world in millimetres, RAS, in 2D too. Affines of files in other units are converted, as in ITK.

A field is (N, *spatial) on the fixed grid, displacement in voxels, channel 0 along the first axis of the array: voxel x
of the fixed volume corresponds to A_moving^-1 A_fixed (x + field(x)) in the moving one. If a header names another unit
of length, ITK converts the grid but not the vectors, which are millimetres in every file.
"""
import contextlib
import errno
import gzip
import math
import zlib
from pathlib import Path

import nibabel
import numpy as np
from scipy import ndimage

from Dataloader import formats
from Dataloader.grids import corners, is_singular, slabs
from Runtime.errors import InputError
from Runtime.files import require_file, write_file

NIFTI = (".nii.gz", ".nii")
FREESURFER = (".mgz", ".mgh")
SUFFIXES = (*NIFTI, *FREESURFER, *formats.READ)  # of all files that can hold volumes
WRITTEN = (*NIFTI, *FREESURFER, *formats.WRITTEN)
READ_ERRORS = (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError,
               nibabel.wrapstruct.WrapStructError, OSError, EOFError, zlib.error, ValueError,
               TypeError,  # nibabel raises it for a .mgh file that is shorter than its header
               OverflowError,  # and this one if the voxels begin at infinity
               nibabel.freesurfer.mghformat.MGHError, KeyError)  # of a .mgh file without voxels, or with unknown ones
MM_OF_UNIT = {1: 1000.0, 3: 0.001}  # NIfTI's codes for metre and micrometre; ITK treats all others as millimetres
MOST_BYTES = 16 * 2 ** 30  # limit for a compressed file's voxels, so that a damaged header cannot claim all memory
CHUNK = 8 * 2 ** 20  # bytes decompressed at a time
MOST_AFTER = 64 * 2 ** 20  # bytes after the last voxel: they are read up to the checksum, but not kept
MOST_LABELS = 500  # distinct whole numbers in a label map
EQUAL_NEIGHBOURS = 0.7  # share of a label map's foreground voxels that equal their neighbour, at least
ROUNDED = 1e-3  # relative error of a label that a scale factor such as 1.000015 may cause
OURS = b"OmniMorph"  # describes fields for Learn2Reg
VECTOR = 1007  # NIfTI's intent code for a vector per voxel, which ITK and ANTs write for displacement fields
PLACE_CODES = range(6)  # the sform and qform codes that NIfTI defines
ZOOMS_APART = 0.01  # by which sizes of voxels in sform and pixdim may differ without a warning, as a fraction
MOST_UNEVEN = 1000  # times by which the sides of a voxel may differ; a grid of the longest would take hours to smooth
PLACED_APART = 0.1  # voxels by which sform and qform may differ without a warning
DISPLACEMENT = 1006  # and its code for a displacement in millimetres
FSL_INTENTS = range(2006, 2020)  # displacements and coefficients of FNIRT and TOPUP
LPS = np.array([-1.0, -1.0, 1.0])  # signs from RAS to ITK's world, whose first two axes point the other way


def ends_in(path, suffixes):
    """Whether a path has one of these suffixes (str or tuple), in upper or lower case: some scanners write .NII.GZ."""
    return Path(path).name.lower().endswith(suffixes)


# ---------------------------------------------------------------------------------------------------------------------
# Images and label maps
# ---------------------------------------------------------------------------------------------------------------------

def read_volume(path, dims=3):
    """Read one image.

    path: with one of SUFFIXES; trailing axes of length 1 are dropped.
    Returns: array (D, H, W) or (H, W), float32, C-contiguous, file intensities; affine 4x4 float64.
    Raises InputError, naming the file, if it is missing, not NIfTI, truncated or corrupt, or has another number of
    axes, NaN or infinite voxels, one constant value, or a singular affine.
    """
    array, affine = _read(path, dims)
    return checked_image(path, array), affine


def read_channels(path, dims=3, count=1):
    """Read the images that one file holds on one grid, along the axis after its spatial ones.

    Returns: list of `count` arrays, each as `read_volume` returns it; affine 4x4 float64.
    Raises InputError as `read_volume` does, and for another number of images.
    """
    array, affine = _read(path, dims, count)
    arrays = [checked_image(path, each) for each in ([array] if array.ndim == dims else np.moveaxis(array, -1, 0))]
    if len(arrays) != count:
        raise InputError(f"{path}: {len(arrays)} of {count} channels (data.channels); name the files of all channels "
                         "together in the data list, or correct the key.")
    return arrays, affine


def checked_image(path, array):
    """An image as float32, C-contiguous. path: its name in errors.

    Raises InputError for an image that `read_volume` refuses.
    """
    require_real(path, array)
    if array.size == 0:
        raise InputError(f"{path}: shape {array.shape} has no voxels; give a volume.")
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, dtype=np.float32)
    require_finite_voxels(path, array)
    if array.min() == array.max():
        raise InputError(f"{path}: every voxel is {array.flat[0]:g}, so the volume is empty; remove it from the "
                         "data set.")
    return array


def is_segmentation(volume):
    """Whether a volume looks like a label map: few whole numbers, and nearly all neighbours are equal.

    volume: (D, H, W) or (H, W). In an image with few grey levels, neighbours differ wherever it has contrast.
    """
    some = volume[tuple(slice(None, None, 4) for _ in volume.shape)]  # a quick look that rules out most images
    for part in (some, volume):
        if not (part == np.rint(part)).all():
            return False
        values, counts = np.unique(part, return_counts=True)
        if len(values) > MOST_LABELS:
            return False
    here, there, ground = volume[:-1], volume[1:], values[counts.argmax()]
    shows = (here != ground) & (there != ground)
    return bool(shows.any() and (here == there)[shows].mean() > EQUAL_NEIGHBOURS)


def require_image(path, volume):
    """Raise InputError if a volume looks like a segmentation. path: of its file. volume: (D, H, W) or (H, W)."""
    if is_segmentation(volume):
        raise InputError(f"{path}: it has only a few whole numbers in large patches, so it is a segmentation and "
                         "not an image; list it as the label of its image, or choose the images by a pattern such "
                         'as "Data/**/*_T1w.nii.gz".')


def read_label(path, dims=3):
    """Read one label map.

    Returns: array (D, H, W) or (H, W), C-contiguous, int16, or int32 if the labels need it, as in atlases of the mouse
    brain; affine 4x4 float64.
    Raises InputError as `read_volume` does, except that a constant map is allowed, and for values that are not
    whole numbers (within ROUNDED, the error of a scale factor in the header) or do not fit int32.
    """
    array, affine = _read(path, dims)
    require_finite_voxels(path, array)
    if array.dtype.kind == "f":
        whole = np.round(array)
        broken = np.count_nonzero(np.abs(array - whole) > ROUNDED * np.maximum(1, np.abs(whole)))
        if broken:
            raise InputError(f"{path}: {broken} label voxels are not whole numbers; resample labels by nearest "
                             "neighbour.")
        array = whole
    dtype = next((kind for kind in (np.int16, np.int32)
                  if array.min() >= np.iinfo(kind).min and array.max() <= np.iinfo(kind).max), None)
    if dtype is None:
        raise InputError(f"{path}: labels from {array.min():g} to {array.max():g} do not fit int32; renumber them.")
    return np.ascontiguousarray(array, dtype=dtype), affine


def read_numbers(path, dims=3):
    """Read one image of any finite numbers, such as a constant or a soft mask; otherwise like `read_volume`."""
    array, affine = _read(path, dims)
    require_finite_voxels(path, array)
    return np.ascontiguousarray(array, dtype=np.float32), affine


def read_header(path, dims=3, channels=None):
    """Read shape and affine without decompressing the voxels.

    channels: data.channels, where it counts; with more than 1, a file of several images is permitted, as
    `read_channels` reads it.
    Returns: shape, a tuple of `dims` ints; affine 4x4 float64.
    Raises InputError as `read_volume` does, for errors that the header shows. A truncated .nii.gz goes unnoticed until
    the whole file is read.
    """
    image = open_nifti(path)
    return _squeezed_shape(path, image.shape, dims, channels)[:dims], read_affine(path, image, dims)


def open_nifti(path):
    """nibabel image whose voxels are not read yet. Raises InputError for a missing, foreign or too short file.

    For a file in another format it has the shape, affine and number type; the voxels come from `read_voxels`.
    """
    path = Path(path)
    formats.require_volume(path)
    if path.suffix.lower() in (".zst", ".bz2", ".xz"):
        raise InputError(f"{path}: compressed as {path.suffix}; unpack it, or store it as .nii.gz.")
    if formats.is_itk(path):
        return formats.open_itk(path)
    try:
        image = nibabel.load(path)
    except READ_ERRORS as error:
        if isinstance(error, FileNotFoundError):
            require_file(path)  # it was removed since the check above
        kind = "FreeSurfer" if ends_in(path, FREESURFER) else "NIfTI"
        advice = "export it again as .nii.gz"
        with contextlib.suppress(OSError), open(path, "rb") as file:
            start = file.read(4)
            if start[:2] == b"\x1f\x8b" and ends_in(path, ".nii"):
                advice = "it is compressed: rename it to end in .nii.gz"
            elif ends_in(path, ".gz") and {int.from_bytes(start, order) for order in ("little", "big")} & {348, 540}:
                advice = "it is not compressed: rename it to end in .nii"
        if ends_in(path, formats.PICTURES):
            advice = formats.made_grey(path)
        if ends_in(path, ".npy"):
            advice = ('an array has no affine; give both to omnimorph.register, or save them as NIfTI: nibabel.save('
                      f'nibabel.Nifti1Image(numpy.load("{path.name}").astype("float32"), affine), '
                      f'"{path.stem}.nii.gz")')
        raise InputError(f"{path}: not a readable {kind} file ({error}); {advice}.") from error
    if isinstance(image, nibabel.MGHImage):
        return as_nifti(image, path)
    if not isinstance(image, nibabel.Nifti1Image):
        raise InputError(f"{path}: {type(image).__name__} is not single-file NIfTI; convert it (nib-convert "
                         f"{path.name} {path.stem}.nii.gz).")
    if image.dataobj.offset < image.header.single_vox_offset:
        raise InputError(f"{path}: its vox_offset {image.dataobj.offset} lies within the header, which would be read "
                         "as voxels; export the file again.")
    _require_place_codes(path, image)
    if not ends_in(path, ".gz"):
        _require_bytes(path, image, path.stat().st_size)
    return image


def _require_place_codes(path, image):
    """Raise InputError for a code that NIfTI does not define: nibabel would ignore its matrix, and ITK would use it.

    image: as read by nibabel, which shows such a code as 0; only then is the header read again.
    """
    if int(image.header["sform_code"]) and int(image.header["qform_code"]):
        return
    with nibabel.openers.ImageOpener(path) as file:
        header = type(image.header).from_fileobj(file, check=False)
    for name in ("sform_code", "qform_code"):
        if int(header[name]) not in PLACE_CODES:
            raise InputError(f"{path}: its {name} is {int(header[name])}, and NIfTI defines 0 to {PLACE_CODES[-1]}; "
                             "the header is damaged: export the file again, or set the code with nibabel or fslorient.")


def as_nifti(image, name):
    """A nibabel image of any format as a NIfTI image, with the same voxels, not read yet, and its position in mm.

    Raises InputError, with the name of the image, if a NIfTI header cannot hold its shape or position.
    """
    if isinstance(image, nibabel.Nifti1Image):
        return image
    affine = np.array(image.affine, np.float64)
    if isinstance(image, nibabel.Nifti1Pair):
        affine[:3] *= mm_of_unit(image.header)
    found = formats.nifti_image(name, image.dataobj, affine, image.get_data_dtype())
    if isinstance(image, nibabel.MGHImage) and len(image.shape) == 4:
        found.header["pixdim"][4] = image.header["tr"]  # the time of a frame
        found.header.set_xyzt_units("mm", "msec")
    return found


def read_raw_header(path):
    """The nibabel header of a NIfTI file, unchanged. Raises InputError as `read_header` does."""
    return open_nifti(path).header


def stored_type(path):
    """The numpy dtype of the voxels in a file; None if they are scaled (slope, intercept)."""
    stored = open_nifti(path).dataobj
    scaled = (getattr(stored, "slope", 1), getattr(stored, "inter", 0)) != (1, 0)
    return None if scaled else np.dtype(stored.dtype).newbyteorder("=")


def rounded(array, dtype):
    """An array as whole numbers of a type, those beyond its limits at the limit (of 64 bits: next to it)."""
    limits = np.iinfo(dtype)
    # 2^63 - 1 is no float: it would become 2^63, which turns negative.
    largest = limits.max if limits.bits < 64 else np.nextafter(float(limits.max), 0)
    return np.clip(np.rint(array.astype(np.float64)), limits.min, largest).astype(dtype)


def mm_of_unit(header):
    """Millimetres in the unit of length of a nibabel header; 1 if it names none."""
    return MM_OF_UNIT.get(int(header["xyzt_units"]) & 7, 1.0)


def read_affine(path, image, dims):
    """The affine of a nibabel image, 4x4 float64, voxel to world in millimetres.

    A third axis that a 2D file leaves zero becomes the unit normal. Raises InputError if the affine is singular, or one
    side of a voxel MOST_UNEVEN times as long as another.
    """
    affine = np.array(image.affine, np.float64)
    affine[:3] *= mm_of_unit(image.header)
    if dims == 2 and np.isfinite(affine).all() and not affine[:3, 2].any():
        affine[:3, 2] = np.cross(affine[:3, 0], affine[:3, 1])
        affine[:3, 2] /= np.linalg.norm(affine[:3, 2]) or 1
    if is_singular(affine):
        whole = affine.round(4).tolist()
        found = f"{whole[:3]} is singular" if whole[3] == [0, 0, 0, 1] else f"{whole} does not end in the row 0 0 0 1"
        raise InputError(f"{path}: the affine {found}; repair the header.")
    sides = np.linalg.norm(affine[:3, :dims], axis=0)
    if sides.max() > MOST_UNEVEN * sides.min():
        raise InputError(f"{path}: its voxels measure {' x '.join(f'{side:.3g}' for side in sides)} mm, sides that "
                         f"differ by more than a factor of {MOST_UNEVEN}; repair the header.")
    return affine


def placement_doubts(path, dims=3):
    """Possible errors in the position that a header gives: sentences, usually none.

    path: of a readable volume. If both matrices are set, nibabel, FSL and this program use the sform; ITK (ANTs,
    Slicer, elastix) uses it only if its code is 1, and otherwise the qform. Only NIfTI files have two.
    """
    image = open_nifti(path)
    header = image.header
    if not is_rigid_and_scaled(image.affine[:3, :dims]):
        return [f"{path}: its axes are not at right angles (it is sheared), which ITK, ANTs and Slicer refuse in "
                ".nii.gz files; --also h5 nrrd writes field and warped volume as they read them."]
    if not ends_in(path, NIFTI):
        return []
    has_sform, has_qform = int(header["sform_code"]) > 0, int(header["qform_code"]) > 0
    try:
        sform, qform = header.get_sform(), header.get_qform() if has_qform else None
    except ValueError:
        return [f"{path}: the quaternion of its qform is not a rotation, and ITK may refuse the file: repair it, or "
                "set the qform code to 0."]
    if not (has_sform or has_qform):
        return [f"{path}: its header gives no position (sform and qform code are 0). OmniMorph places its centre at "
                "0, ITK its first voxel; set a position, for example with fslorient or nibabel."]
    lengths, zooms = np.linalg.norm(sform[:3, :dims], axis=0), np.array(header.get_zooms()[:dims]).clip(min=1e-30)
    if has_sform and np.abs(lengths / zooms - 1).max() > ZOOMS_APART:
        sizes = [" x ".join(f"{each:.3g}" for each in part) for part in (lengths, zooms)]
        return [f"{path}: the voxels of its sform measure {sizes[0]}, those of its pixdim {sizes[1]}. OmniMorph uses "
                "the sform, ITK and FSL mostly pixdim; correct the wrong one."]
    if has_sform and has_qform:
        apart = np.linalg.norm((sform - qform) @ corners(header.get_data_shape()[:3]), axis=0).max()
        if apart > PLACED_APART * lengths.min():
            return [f"{path}: its sform and qform differ by up to {mm_of_unit(header) * apart:.1f} mm. OmniMorph uses "
                    "the sform, ITK mostly the qform; make them equal, or set the code of the wrong one to 0."]
    return []


def is_rigid_and_scaled(matrix):
    """Whether the axes of an affine are at right angles to each other, within a thousandth. matrix: (3, N)."""
    axes = matrix / np.maximum(np.linalg.norm(matrix, axis=0), 1e-30)
    return bool(abs(axes.T @ axes - np.diag(np.diag(axes.T @ axes))).max() < 1e-3)


def write_volume(path, array, affine, header=None):
    """Write a volume, completely and durably (Runtime/files.py). The same input gives the same bytes.

    path: with one of WRITTEN; its folder is created if missing.
    array: (D, H, W), (H, W) stored as (H, W, 1), or more axes, stored as they are. The dtype is kept, except those that
    NIfTI lacks: bool becomes uint8, float16 becomes float32.
    affine: 4x4 voxel to world in millimetres, RAS; written as qform and sform with the codes of `header`, or 1 if it
    has none, and in its unit of length. header: nibabel header whose descriptive fields are kept; it is not changed.
    Formats other than NIfTI have no such fields; .mgz and .mgh have fewer number types, see `_for_freesurfer`.
    Raises InputError for another suffix.
    """
    path = Path(path)
    if not ends_in(path, WRITTEN):
        raise InputError(f"{path}: a volume file ends in {', '.join(WRITTEN)}; rename the output.")
    array = np.asarray(array)
    array = array[..., None] if array.ndim == 2 else array
    array = array.astype({"bool": np.uint8, "float16": np.float32}.get(array.dtype.name, array.dtype), copy=False)
    affine = np.array(affine, np.float64)
    if formats.is_itk(path):
        formats.write_itk(path, array, affine)
        return
    if ends_in(path, FREESURFER):
        image = nibabel.MGHImage(_for_freesurfer(path, array), affine)
    else:
        if header is not None:
            affine[:3] /= mm_of_unit(header)
        kind = nibabel.Nifti2Image if max(array.shape) > np.iinfo(np.int16).max else nibabel.Nifti1Image
        image = kind(array, affine, header, dtype=array.dtype)
        # The codes come from the given header: nibabel resets those of its copy if the affine differs.
        # A qform cannot express shear; with the shear dropped, ITK would place the volume elsewhere.
        qform_code, sform_code = (1 if header is None else int(header[name]) or 1
                                  for name in ("qform_code", "sform_code"))
        image.set_qform(affine, qform_code if is_rigid_and_scaled(affine[:3, :3]) else 0)
        image.set_sform(affine, sform_code)
        if not int(image.header["xyzt_units"]) & 7:
            image.header["xyzt_units"] |= 2  # millimetres; the unit of time stays

    def write(file):
        # No name and no time in the gzip header, so that the same content gives the same bytes.
        with (gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) if ends_in(path, (".gz", ".mgz"))
              else contextlib.nullcontext(file)) as stream:
            image.to_stream(stream)

    write_file(path, write)


def _for_freesurfer(path, array):
    """The array in a number type of .mgz: uint8, int16, int32 or float32. Raises InputError if none fits."""
    if array.dtype.name in ("uint8", "int16", "int32", "float32"):
        return array
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise InputError(f"{path}: numbers from {array.min()} to {array.max()} do not fit a .mgz file; write .nii.gz.")
    return array.astype(np.int32)


def _read(path, dims, channels=None):
    """Voxels in the file's own (scaled) dtype, (*spatial) or (*spatial, channels), and the checked affine."""
    image = open_nifti(path)
    shape = _squeezed_shape(path, image.shape, dims, channels)
    affine = read_affine(path, image, dims)
    return read_voxels(path, image).reshape(shape), affine


def read_voxels(path, image):
    """All voxels of an open file in its own (scaled) dtype. Raises InputError for a damaged file, MemoryError for one
    that is too large."""
    if formats.is_itk(path):
        return formats.read_itk(path, image.get_data_dtype())
    kind = nibabel.MGHImage if ends_in(path, FREESURFER) else type(image)
    try:
        if ends_in(path, (".gz", ".mgz")):
            # Decompress the whole file, which verifies the checksum at its end; nibabel would stop before it.
            content = _decompressed(path, image)
            image = kind.from_bytes(content)
            _require_bytes(path, image, len(content))
        array = np.asanyarray(image.dataobj)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    except InputError:
        raise
    except READ_ERRORS as error:
        if getattr(error, "errno", None) == errno.ENOMEM:  # a .nii that is too large to be mapped
            raise MemoryError(error.strerror) from error
        if isinstance(error, FileNotFoundError):
            require_file(path)  # it was removed since its header was read
        raise InputError(f"{path}: truncated or corrupt ({error}); copy or download it again.") from error
    if array.dtype.names:
        raise InputError(f"{path}: each voxel must be one real number, but it is a colour "
                         f"({', '.join(array.dtype.names)}); save one channel: v = nibabel.load("
                         f'"{Path(path).name}"); nibabel.save(nibabel.Nifti1Image(numpy.asarray(v.dataobj)["G"], '
                         'v.affine), "grey.nii.gz").')
    require_real(path, array)
    return array


def _decompressed(path, image):
    """Content of a .nii.gz up to its last voxel: as many bytes as its header says, at most MOST_BYTES."""
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
                raise InputError(f"{path}: the file has more than {MOST_AFTER / 2 ** 20:.0f} MiB after its last "
                                 "voxel; export it again.")
    return b"".join(parts)


def _bytes_of(image):
    """Bytes of a file up to its last voxel, by its header."""
    return int(image.dataobj.offset) + math.prod(image.shape) * image.get_data_dtype().itemsize


def _require_bytes(path, image, present):
    needed = _bytes_of(image)
    if present < needed:
        raise InputError(f"{path}: truncated, {present} of {needed} bytes are there; copy or download it again.")


def require_real(path, array):
    """Raise InputError if the voxels of a volume are no real numbers. path: its file or name."""
    if array.dtype.kind not in "buif":
        raise InputError(f"{path}: each voxel must be one real number, but the type is {array.dtype}; convert the "
                         "volume.")


def require_finite_voxels(path, array):
    """Raise InputError if a volume has voxels that are NaN, infinite or no real numbers. path: its file or name."""
    require_real(path, array)
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise InputError(f"{path}: {bad} of {array.size} voxels are NaN or infinite; set them to the background, as "
                         "numpy.nan_to_num or `fslmaths IN -nan OUT` does, or leave the volume out.")


def one_plane(shape):
    """The message for an array with one plane along some axis."""
    if shape.index(1) == len(shape) - 1:
        return (f"shape {tuple(shape)} is one plane of 3D, and not a 2D volume; drop the last axis, for example by "
                "array[..., 0] or MONAI's SqueezeDimd.")
    return (f"shape {tuple(shape)} is one plane along axis {shape.index(1)}, but a 2D volume must have it along the "
            "last axis; reorder the axes, for example with numpy.moveaxis or fslswapdim.")


def _squeezed_shape(path, shape, dims, channels=None):
    """Shape without trailing axes of length 1, which must leave `dims` axes.

    channels: with more than 1, a file may hold several images, and gives (*spatial, images). NIfTI's fourth axis is
    time; files without one may have their channels along the fifth. None: of a file that holds one image in any case.
    """
    kept = shape = tuple(map(int, shape))
    if channels and channels > 1 and math.prod(shape[dims:]) != 1:
        kept = (*shape[:dims], *(n for n in shape[dims:] if n != 1))
        if len(kept) != dims + 1 or min(shape[:dims]) < 1:
            raise InputError(f"{path}: shape {shape} is not {dims}D plus one axis for the channels; split it into one "
                             f"{dims}D file per channel.")
        return kept
    while kept and kept[-1] == 1:
        kept = kept[:-1]
    if dims == 2 and len(kept) == 3 and 1 in kept:
        raise InputError(f"{path}: {one_plane(kept)}")
    if len(kept) > dims:
        several = ", or set data.channels if its last axis holds the channels of one" if channels else ""
        raise InputError(f"{path}: shape {shape} is not {dims}D; split it into one {dims}D file per volume{several}.")
    if len(kept) < dims or min(kept) < 1:
        slices = ("; slices need model.dims 2 (--set model.dims=2, or in OM_register.py and OM_evaluate.py --dims 2)"
                  if len(kept) == 2 < dims else "")
        raise InputError(f"{path}: shape {shape} is not {dims}D; check the file{slices}.")
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Deformation fields and points
# ---------------------------------------------------------------------------------------------------------------------

def to_mm(field, affine):
    """u_mm = A[:3, :N] u: a field in voxels as displacement in millimetres of the RAS world.

    field: (N, *spatial). affine: 4x4. Returns: (3, *spatial) float64, for 2D fields too.
    """
    return np.einsum("ij,j...->i...", np.asarray(affine, np.float64)[:3, :len(field)], np.asarray(field, np.float64))


def to_itk(field, affine):
    """A field in voxels, (N, *spatial), in ITK's form: (X, Y, Z, 3) float64 in millimetres, LPS; 2D is one plane."""
    field_mm = to_mm(field, affine).reshape(3, *field.shape[1:], *[1] * (3 - len(field)))
    return np.moveaxis(field_mm, 0, -1) * LPS


def into_plane(field, affine, other_affine):
    """A 2D field with its step into the plane of the other volume: (3, H, W, 1) in voxels; a 3D field as it is.

    The step follows the third axis of the field's grid, so that the two other components stay.
    field: (N, *spatial) in voxels. affine: 4x4, of its grid. other_affine: 4x4, of the volume to which it leads.
    """
    if len(field) == 3:
        return field
    across = np.round(np.linalg.inv(other_affine) @ affine, 12)[2]  # in one plane the step is exactly 0
    step = -(np.einsum("j,j...->...", across[:2], np.indices(field.shape[1:]) + field) + across[3]) / across[2]
    return np.stack([*field, step])[..., None]


def require_finite(path, vectors):
    """Raise InputError if a field has numbers that are NaN or infinite. path: of its file. vectors: of any shape."""
    if not np.isfinite(vectors).all():
        raise InputError(f"{path}: {np.count_nonzero(~np.isfinite(vectors))} numbers are NaN or infinite; compute "
                         "the field again.")


def from_itk(vectors_mm, affine, dims):
    """The inverse of `to_itk`: (N, *spatial) float32 in voxels. In 2D, components out of the plane are dropped."""
    field_mm = np.moveaxis(vectors_mm, -1, 0) * LPS.reshape(3, 1, 1, 1)
    field_mm = field_mm[..., 0] if dims == 2 else field_mm
    inverse = np.linalg.inv(np.asarray(affine, np.float64)[:3, :3])[:dims]
    return np.einsum("ij,j...->i...", inverse, np.asarray(field_mm, np.float64)).astype(np.float32)


def require_one_plane(path, shape, dims):
    """Raise InputError for a field of several planes if the volumes are 2D, and of one, along any axis, if they are 3D.

    shape: X, Y, Z and maybe more, a tuple.
    """
    if dims == 3 and shape[2] == 1:
        raise InputError(f"{path}: the field has a single plane; for 2D volumes add --dims 2.")
    if dims == 2 and shape[2] != 1:
        raise InputError(f"{path}: the field has {shape[2]} planes, but the volumes are 2D; give a field with a "
                         "single plane.")
    if 1 in shape[:dims]:
        raise InputError(f"{path}: shape {tuple(shape)} has one point along axis {shape.index(1)}, and a field needs "
                         "at least two along each axis of the volumes; check the order of its axes.")


def write_field(path, field, affine, header=None):
    """Write a field as ITK, ANTs and Slicer read it: (X, Y, Z, 1, 3) float32, millimetres, LPS, intent 1007.

    field: (N, *spatial) in voxels; in 2D it becomes one plane of a 3D field, see `into_plane`. affine, header: of the
    fixed volume; the descriptive fields of the header are kept.
    """
    header = nibabel.Nifti1Header() if header is None else header.copy()
    header.set_intent(VECTOR)
    vectors = np.empty((*field.shape[1:], *[1] * (3 - len(field)), 1, 3), np.float32)
    for slab in slabs(field.shape[1:]):
        vectors[slab] = to_itk(field[:, slab], affine)[..., None, :]
    write_volume(path, vectors, affine, header)


def write_field_learn2reg(path, field, affine):
    """Write a field as Learn2Reg scores it: (X, Y, Z, 3) float32 in voxels, to be named disp_<fixed>_<moving>.nii.gz.

    field: (N, *spatial) in voxels; in 2D it becomes one plane of a 3D field. affine: 4x4, of the fixed volume.
    """
    vectors = np.zeros((*field.shape[1:], *[1] * (3 - len(field)), 3), np.float32)
    vectors[..., :len(field)] = np.moveaxis(field, 0, -1).reshape(*vectors.shape[:-1], len(field))
    header = nibabel.Nifti1Header()
    header["descrip"] = OURS  # its name is that of any other method's field
    write_volume(path, vectors, affine, header)


def is_own_field(path):
    """Whether `write_field_learn2reg` wrote a file."""
    try:
        return open_nifti(path).header["descrip"] == OURS
    except (InputError, KeyError, ValueError):
        return False


def read_field(path, dims=3, across=False):
    """Read a field written by `write_field` or `write_field_learn2reg`, or by ITK, ANTs or a Learn2Reg participant.

    across: in 2D, keep the component across the plane: (3, H, W, 1).
    Returns: (N, *spatial) float32 in voxels of its own grid; affine 4x4.
    Raises InputError, naming the file, if it is missing, damaged, not finite, of another shape, or from a program whose
    fields have another meaning.
    """
    image = open_nifti(path)
    _require_ours(path, image.header)
    shape = image.shape
    in_mm = is_in_mm(shape)
    if not in_mm and not (len(shape) == 4 and shape[3] == 3):
        raise InputError(f"{path}: shape {shape} is not a displacement field; it has to be (X, Y, Z, 1, 3) in "
                         "millimetres (ITK, ANTs) or (X, Y, Z, 3) in voxels (Learn2Reg).")
    if not in_mm and int(image.header["intent_code"]) in (VECTOR, DISPLACEMENT):
        raise InputError(f"{path}: shape {shape} means voxels (Learn2Reg), but intent {image.header['intent_code']} "
                         "millimetres; if its numbers are voxels, set the intent to 0, and if they are millimetres in "
                         "LPS, as in ITK, insert an axis: (X, Y, Z, 1, 3).")
    require_one_plane(path, shape, dims)
    affine = read_affine(path, image, dims)
    dims = 3 if across else dims
    vectors = read_voxels(path, image).reshape(*shape[:3], shape[-1])
    require_finite(path, vectors)
    vectors = np.pad(vectors, [(0, 0)] * 3 + [(0, 3 - shape[-1])]) if shape[-1] < 3 else vectors
    field = np.empty((dims, *shape[:dims]), np.float32)
    for slab in slabs(shape[:dims]):
        part = vectors[slab].astype(np.float64)
        if in_mm:
            field[:, slab] = from_itk(part, affine, dims)
        else:
            part = np.moveaxis(part, -1, 0)
            field[:, slab] = part[:2, ..., 0] if dims == 2 else part
    return field, affine


def is_in_mm(shape):
    """Whether the shape of a file is that of a field in millimetres (ITK, ANTs), not in voxels (Learn2Reg).

    In 2D, ITK and ANTs write two numbers for each voxel of one plane.
    """
    return len(shape) == 5 and (tuple(shape[3:]) == (1, 3) or tuple(shape[2:]) == (1, 1, 2))


def _require_ours(path, header):
    """Raise InputError for a field from a program that uses the same shape with another meaning."""
    code, name = int(header["intent_code"]), header["intent_name"].item().decode("latin-1").strip("\0 ")
    theirs = advice = None
    from_ras = "change the sign of x and y, and save them as a new file of shape (X, Y, Z, 1, 3)"
    if ends_in(path, FREESURFER):
        theirs, advice = "a warp of FreeSurfer", "mri_warp_convert writes it with --outitk"
    elif code in FSL_INTENTS:
        theirs = f"a field of FSL (intent {code}), in millimetres along its own axes"
        advice = "wb_command -convert-warpfield writes it with -from-fnirt ... -to-itk"
    elif name == "NREG_TRANS":
        theirs, advice = "a transformation of NiftyReg", f"let reg_transform -disp write displacements, {from_ras}"
    elif name == "Mapping" or Path(path).name.startswith(("y_", "iy_")):
        theirs = "a deformation of SPM, which stores positions"
        advice = f"subtract those of the voxels, in mm, {from_ras}"
    if theirs:
        raise InputError(f"{path}: {theirs}, not displacements as ITK, ANTs or Learn2Reg write them; convert the "
                         f"field to ITK's format: {advice}.")


def move_points(points_mm, field, affine):
    """The positions of points of the fixed volume in the moving one: x_mm + A u(A^-1 x_mm), in millimetres, RAS.

    The displacement u is interpolated linearly. Outside the grid it is extrapolated from the border by the affine map
    that fits the whole field best: an affine registration moves such points exactly.
    points_mm: (P, 3). field: (3, D, H, W) in voxels. affine: 4x4, of the fixed volume. Returns: (P, 3) float64.
    """
    points_mm = np.asarray(points_mm, np.float64)
    inverse = np.linalg.inv(affine)
    voxels = points_mm @ inverse[:3, :3].T + inverse[:3, 3]
    shift = [ndimage.map_coordinates(part, voxels.T, order=1, mode="nearest", output=np.float64) for part in field]
    shift, beyond = np.stack(shift, 1), voxels - np.clip(voxels, 0, np.array(field.shape[1:]) - 1)
    if beyond.any():
        shift += beyond @ (fitted_affine(field)[:3, :3] - np.eye(3)).T
    return points_mm + shift @ np.asarray(affine)[:3, :3].T


def fitted_affine(field):
    """The affine map closest to x -> x + field(x) in all voxels, by least squares: 4x4 float64 in voxels.

    field: (N, *spatial) in voxels. Along an axis of one voxel it changes nothing.
    """
    dims, matrix = len(field), np.eye(4)
    for axis, n in enumerate(field.shape[1:]):
        places = np.arange(n) - (n - 1) / 2
        # On a full grid the axes are independent: the mean over all others has the slope along this one.
        others = tuple(other + 1 for other in range(dims) if other != axis)
        matrix[:dims, axis] += np.mean(field, axis=others, dtype=np.float64) @ places / (places @ places or 1)
    middle = (np.array(field.shape[1:]) - 1) / 2
    mean = np.mean(field, axis=tuple(range(1, dims + 1)), dtype=np.float64)
    matrix[:dims, 3] = mean - (matrix[:dims, :dims] - np.eye(dims)) @ middle
    return matrix
