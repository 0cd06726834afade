"""The files of a registered pair: warped images and labels, fields, landmarks."""
import re

import nibabel
import numpy as np
import torch

from Dataloader.datalist import volume_id
from Dataloader.grids import same_grid
from Dataloader.nifti import (
    move_points,
    read_header,
    read_raw_header,
    stored_type,
    write_field,
    write_field_learn2reg,
    write_volume,
)
from Dataloader.transforms import write_field_h5, write_matrix
from Diffusion.fields import jacobian_determinant
from Inference.pair_lists import channels_of
from Runtime.errors import InputError, attempt
from Runtime.files import write_file


def write_pair(folder, pair, result, warped_label=None, points_mm=None, disp=None, also=()):
    """Write the files of a registration.

    folder: where warped.nii.gz, field.nii.gz, jacobian.nii.gz and, if present, warped_label.nii.gz,
    warped_channel_2.nii.gz and so on, inverse_field.nii.gz, segmented_fixed.nii.gz, segmented_moving.nii.gz and
    points.csv go. pair: paths of the files that were read, fixed, moving, moving_label and further channels.
    result: Result of `register`. warped_label: (*fixed) or None. points_mm: (P, 3) landmarks of the fixed volume or
    None. disp: path of the field for Learn2Reg, or None. also: some of ALSO: the fields as .h5, the alignment as
    affine.mat, the warped image and label in another format.
    """
    header = read_raw_header(pair["fixed"])
    field, affine = result.field, result.fixed.affine
    if warped_label is not None:
        write_warped(folder / "warped_label.nii.gz", warped_label, pair["moving_label"], affine, header)
    write_warped(folder / "warped.nii.gz", result.warped, pair["moving"], affine, header)
    for number, (warped, path) in enumerate(zip(result.warped_channels, channels_of(pair, "moving")), 2):
        write_warped(folder / f"warped_channel_{number}.nii.gz", warped, path, affine, header)
    write_field(folder / "field.nii.gz", field, affine, header)
    determinant = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()
    write_volume(folder / "jacobian.nii.gz", determinant, affine, grid_header(header))
    if result.inverse is not None:
        write_field(folder / "inverse_field.nii.gz", result.inverse, result.moving.affine,
                    read_raw_header(pair["moving"]))
    for side in ("fixed", "moving"):
        found = getattr(result, f"segmented_{side}")
        if found is not None:
            write_volume(folder / f"segmented_{side}.nii.gz", found, getattr(result, side).affine,
                         grid_header(read_raw_header(pair[side])))
    if disp:
        write_field_learn2reg(disp, field, affine)
    write_also(folder, pair, result, warped_label, also)
    if points_mm is not None:
        write_points(folder / "points.csv", points_mm, field, affine)


def write_also(folder, pair, result, warped_label, also):
    """Write the files for other programs, see `write_pair`."""
    header, affine = read_raw_header(pair["fixed"]), result.fixed.affine
    if "h5" in also:
        write_field_h5(folder / "field.h5", result.field, affine)
        if result.inverse is not None:
            write_field_h5(folder / "inverse_field.h5", result.inverse, result.moving.affine)
    if "mat" in also:
        write_matrix(folder / "affine.mat", result.matrix)
    for suffix in set(also) & {"nrrd", "mha", "mgz"}:
        write_warped(folder / f"warped.{suffix}", result.warped, pair["moving"], affine, header)
        if warped_label is not None:
            write_warped(folder / f"warped_label.{suffix}", warped_label, pair["moving_label"], affine, header)


def write_warped(path, warped, source, affine, fixed_header):
    """Write a warped volume on the fixed grid, its header that of the fixed volume without the display range.

    Whole numbers stay of the type that the moving file has; others are written as they are.
    warped: (*fixed). source: the moving file. affine, fixed_header: of the fixed volume.
    """
    header = nibabel.Nifti1Header.from_header(fixed_header)
    header["cal_min"] = header["cal_max"] = 0
    write_moved(path, warped, source, affine, header, kinds="iu")


def write_moved(path, array, source, affine, header, kinds="iuf"):
    """Write a deformed volume with the number type of the file it comes from.

    The type of a file with scaled numbers (slope, intercept) does not fit; the array keeps its own type then.
    array: (D, H, W) or (H, W). source: path of the file that was deformed. affine: 4x4, header: nibabel header, of the
    grid of the array. kinds: numpy's letters of the kinds of numbers whose type is kept ("i", "u" whole, "f" floating).
    """
    dtype = stored_type(source)
    if dtype is not None and dtype.kind in kinds:
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            array = np.clip(np.rint(array.astype(np.float64)), limits.min, limits.max)
        array = array.astype(dtype)
    write_volume(path, array, affine, header)


def write_points(path, points_mm, field, affine):
    """Write landmarks of the fixed volume, moved into the moving one, as a CSV table x,y,z.

    points_mm: (P, 3) mm, RAS. field: (N, *fixed) in voxels. affine: 4x4 of the fixed volume.
    """
    if len(field) == 2:  # one plane of a 3D field
        field = np.concatenate([field, np.zeros_like(field[:1])])[..., None]
    lines = ["x,y,z"]
    for point in move_points(points_mm, field, affine):
        lines.append("{:.6f},{:.6f},{:.6f}".format(*point))
    write_file(path, "\n".join(lines) + "\n")


def grid_header(header):
    """A new header with what places the grid of another one: the codes of its affines and its units."""
    plain = nibabel.Nifti1Header()
    for key in ("qform_code", "sform_code", "xyzt_units"):
        plain[key] = header[key]
    return plain


def require_own_disps(pairs, dims):
    """Raise InputError if the fields of two pairs would have the same `disp_name`, so that one would replace the other.

    A pair without such a name is skipped here and refused when it is registered.
    """
    taken = {}
    for pair in pairs:
        name = attempt(pair["name"], disp_name, pair, dims)
        if name in taken:
            raise InputError(f"--learn2reg: the fields of {taken[name]} and {pair['name']} would both be {name}, "
                             "after the last numbers in their file names; rename these files, or use two folders.")
        taken[name] = pair["name"]


def disp_name(pair, dims):
    """The name of a field in a Learn2Reg submission: disp_<fixed>_<moving>.nii.gz, four digits each.

    pair: dict with fixed and moving, paths. Raises InputError where the two volumes are on different grids, and where
    a file's name has no number.
    """
    shape, affine = read_header(pair["fixed"], dims)
    moving_shape, moving_affine = read_header(pair["moving"], dims)
    if not same_grid(shape, affine, moving_shape, moving_affine):
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg needs both volumes on one grid, as in "
                         "its data sets; leave it out.")
    fixed_numbers, moving_numbers = (re.findall(r"\d+", volume_id(pair[side])) for side in ("fixed", "moving"))
    if not fixed_numbers or not moving_numbers:
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg names fields by the numbers in the "
                         "file names, but a number is missing; rename the files, for example to case_0001.nii.gz.")
    return f"disp_{int(fixed_numbers[-1]):04d}_{int(moving_numbers[-1]):04d}.nii.gz"
