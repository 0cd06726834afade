"""Deformation fields in and out: what ITK, ANTs and Slicer read, and what Learn2Reg scores.

In this project a field is (N, *spatial) on the fixed grid, displacement in voxels, channel 0 along the first axis of
the array: a voxel x of the fixed volume shows what is at A_moving^-1 A_fixed (x + field(x)) in the moving one. Affines
are 4x4, voxel to world in millimetres, RAS. ITK converts the grid of a file whose header names another unit of length,
but not its vectors: they are millimetres in every file.
"""
from pathlib import Path

import nibabel
import numpy as np
from scipy import ndimage

from Dataloader.volume_io import open_nifti, read_affine, read_voxels, write_volume
from Runtime.errors import InputError

VECTOR = 1007  # NIfTI's intent of a vector per voxel, which ITK and ANTs write for displacement fields
LPS = np.array([-1.0, -1.0, 1.0])  # ITK's world has its first two axes the other way round


def to_mm(field, affine):
    """A field in voxels as displacement in millimetres of the RAS world: (3, *spatial), also for 2D fields."""
    return np.einsum("ij,j...->i...", np.asarray(affine, np.float64)[:3, :len(field)], np.asarray(field, np.float64))


def to_voxels(field_mm, affine):
    """The inverse of `to_mm`, for (3, *spatial). Of a 2D field what leads out of its plane is lost."""
    dims = field_mm.ndim - 1
    inverse = np.linalg.inv(np.asarray(affine, np.float64)[:3, :3])[:dims]
    return np.einsum("ij,j...->i...", inverse, np.asarray(field_mm, np.float64)).astype(np.float32)


def write_field(path, field, affine, header=None):
    """Write a field as ITK, ANTs and Slicer read it: (X, Y, Z, 1, 3) float32, millimetres, LPS, intent 1007.

    field: (N, *spatial) in voxels; in 2D it becomes one plane of a 3D field. affine, header: of the fixed volume; the
    descriptive fields of the header are kept.
    """
    vectors = to_mm(field, affine) * LPS.reshape(3, *[1] * (len(field)))
    vectors = vectors.reshape(3, *field.shape[1:], *[1] * (3 - len(field)))
    header = nibabel.Nifti1Header() if header is None else nibabel.Nifti1Header.from_header(header)
    header.set_intent(VECTOR)
    write_volume(path, np.moveaxis(vectors, 0, -1)[..., None, :].astype(np.float32), affine, header)


def write_field_learn2reg(path, field, affine):
    """Write a field as Learn2Reg scores it: (X, Y, Z, 3) float32 in voxels, file name disp_<fixed>_<moving>.nii.gz."""
    write_volume(path, np.moveaxis(np.asarray(field, np.float32), 0, -1), affine)


def read_field(path, dims=3):
    """Read a field that either function above wrote, or ITK, ANTs or a Learn2Reg participant did.

    Returns: (N, *spatial) float32 in voxels of its own grid; affine 4x4.
    Raises InputError, naming the file, where it is missing, damaged, not finite or of another shape.
    """
    image = open_nifti(path)
    shape = image.shape
    in_mm = len(shape) == 5 and shape[3:] == (1, 3)
    if not in_mm and not (len(shape) == 4 and shape[3] == 3):
        raise InputError(f"{path}: shape {shape} is no displacement field; it has to be (X, Y, Z, 1, 3) in millimetres "
                         "(ITK, ANTs) or (X, Y, Z, 3) in voxels (Learn2Reg).")
    if dims == 2 and shape[2] != 1:
        raise InputError(f"{path}: a field of {shape[2]} planes for 2D volumes; give one of a single plane.")
    affine, vectors = read_affine(path, image, dims), read_voxels(path, image).astype(np.float64)
    vectors = np.moveaxis(vectors.reshape(*shape[:3], 3), -1, 0)
    if not np.isfinite(vectors).all():
        raise InputError(f"{path}: {np.count_nonzero(~np.isfinite(vectors))} numbers are NaN or infinite; make it "
                         "anew.")
    vectors = vectors[..., 0] if dims == 2 else vectors
    if not in_mm:
        return vectors[:dims].astype(np.float32), affine
    return to_voxels(vectors * LPS.reshape(3, *[1] * dims), affine), affine


def move_points(points_mm, field, affine):
    """Where points of the fixed volume are in the moving one, both in millimetres, RAS.

    points_mm: (P, 3). field: (3, D, H, W) in voxels, affine: of the fixed volume. Linear between voxels; outside the
    grid the displacement of its border. Returns: (P, 3).
    """
    points = np.asarray(points_mm, np.float64)
    inverse = np.linalg.inv(affine)
    voxels = points @ inverse[:3, :3].T + inverse[:3, 3]
    moved = [ndimage.map_coordinates(part, voxels.T, order=1, mode="nearest", output=np.float64) for part in field]
    return points + np.stack(moved, 1) @ np.asarray(affine)[:3, :3].T


def read_points(path):
    """Landmarks of a .csv file: x, y, z in millimetres (RAS) in each row; a header row is allowed. Returns (P, 3)."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file of landmarks; check the path.")
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    rows, found = [line.replace(";", ",").split(",") for line in lines], []
    for number, row in enumerate(rows, 1):
        try:
            found.append([float(cell) for cell in row[:3]])
        except ValueError:
            if number > 1:
                raise InputError(f"{path} row {number}: {','.join(row)} are not three numbers; write x,y,z in "
                                 "millimetres in each row.") from None
    if not found or any(len(point) != 3 for point in found):
        raise InputError(f"{path}: no landmarks of three numbers; write x,y,z in millimetres in each row.")
    return np.array(found)
