"""NRRD and MetaImage files (.nrrd, .nhdr, .mha, .mhd), read and written by SimpleITK, which is optional.

ITK's world has x and y the other way round (LPS) and its arrays the axes in reverse; what leaves this file is as in
Dataloader/nifti.py: axes i, j, k, affine 4x4 voxel to world in millimetres, RAS.
"""
import tempfile
from pathlib import Path

import nibabel
import numpy as np

from Runtime.errors import InputError
from Runtime.files import write_file

READ = (".nrrd", ".nhdr", ".mha", ".mhd")
WRITTEN = (".nrrd", ".mha")  # the others keep their voxels in a second file
NUMBERS = {"sitkInt8": "int8", "sitkUInt8": "uint8", "sitkInt16": "int16", "sitkUInt16": "uint16",
           "sitkInt32": "int32", "sitkUInt32": "uint32", "sitkInt64": "int64", "sitkUInt64": "uint64",
           "sitkFloat32": "float32", "sitkFloat64": "float64"}  # of SimpleITK and numpy
TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # its own inverse


def is_itk(path):
    """Whether a path is one of a file that is read by SimpleITK."""
    return Path(path).suffix.lower() in READ


def import_sitk(path):
    """SimpleITK, loaded only here, as that takes time. path: of the file for which it is needed.

    Raises InputError where it is missing.
    """
    try:
        import SimpleITK
    except ImportError:
        raise InputError(f"{path}: {Path(path).suffix} files need a package: pip install SimpleITK, or convert it to "
                         ".nii.gz.") from None
    return SimpleITK


def open_itk(path):
    """A nibabel image with shape, number type and affine of a file; its voxels are not read, and are all 0.

    Raises InputError, naming the file, where it cannot be read or has several numbers in a voxel.
    """
    sitk = import_sitk(path)
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise _unreadable(path, error) from error
    types = {getattr(sitk, theirs): ours for theirs, ours in NUMBERS.items()}
    if reader.GetNumberOfComponents() != 1 or reader.GetPixelID() not in types:
        raise InputError(f"{path}: voxels of type {sitk.GetPixelIDValueAsString(reader.GetPixelID())} are not one real "
                         "number each; convert it.")
    empty = np.broadcast_to(np.zeros((), types[reader.GetPixelID()]), reader.GetSize())
    affine = affine_of(reader.GetDirection(), reader.GetSpacing(), reader.GetOrigin())
    image = nibabel.Nifti1Image(empty, affine, dtype=empty.dtype)
    image.header.set_xyzt_units("mm")
    return image


def read_itk(path):
    """All voxels of a file, axes i, j, k. Raises InputError where it is damaged."""
    sitk = import_sitk(path)
    try:
        return sitk.GetArrayFromImage(sitk.ReadImage(str(path))).T
    except RuntimeError as error:
        raise _unreadable(path, error) from error


def write_itk(path, array, affine):
    """Write a .nrrd or .mha file, completely and durably.

    array: (D, H, W) or (H, W, 1), of any of NUMBERS. affine: 4x4, mm, RAS.
    """
    sitk = import_sitk(path)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / f"volume{Path(path).suffix}"
        sitk.WriteImage(itk_image(sitk, array, affine), str(whole), useCompression=True)
        write_file(path, whole.read_bytes())


def itk_image(sitk, array, affine):
    """A SimpleITK image of three axes.

    sitk: SimpleITK. array: (D, H, W), or (D, H, W, C) with C numbers in a voxel. affine: 4x4, mm, RAS.
    """
    order = (2, 1, 0, 3)[:array.ndim]
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.transpose(order)), isVector=array.ndim == 4)
    matrix = TO_LPS @ np.asarray(affine, np.float64)
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((matrix[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(matrix[:3, 3].tolist())
    return image


def affine_of(direction, spacing, origin):
    """The affine 4x4 (RAS) of direction, spacing and origin as ITK has them, of 2 axes or 3; others are left out."""
    dims = len(spacing)
    kept = min(dims, 3)
    matrix = np.eye(4)
    matrix[:kept, :kept] = (np.reshape(direction, (dims, dims)) * spacing)[:kept, :kept]
    matrix[:kept, 3] = origin[:kept]
    return TO_LPS @ matrix


def _unreadable(path, error):
    reason = str(error).strip().splitlines()[-1].strip()
    return InputError(f"{path}: not readable as {Path(path).suffix} ({reason}); export it again.")
