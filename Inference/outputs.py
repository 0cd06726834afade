"""A registered pair in its folder: its files, its picture and page, its row of the results; and saving one Result."""
import errno
import os
import re
from pathlib import Path

import nibabel
import numpy as np
import torch

from Dataloader.datalist import volume_id
from Dataloader.grids import same_grid, slabs
from Dataloader.nifti import (
    into_plane,
    read_header,
    read_raw_header,
    rounded,
    stored_type,
    write_field,
    write_field_learn2reg,
    write_volume,
)
from Dataloader.points import write_points
from Dataloader.transforms import write_field_h5, write_matrix
from Dataloader.volume import read_source
from Diffusion.fields import jacobian_determinant
from Inference.choices import IMAGES
from Inference.labels import apply_label, label_on
from Inference.pair_figures import pair_figure, read_pair, write_pair_page, write_report
from Inference.pair_lists import CHANNELS, TO_REGISTER, channels_of
from Inference.results import (
    DISP,
    file_digests,
    output_files,
    read_results,
    remove_outputs,
    require_own,
    source_digests,
    source_stamps,
    write_results,
)
from Inference.scores import COLUMNS, label_scores, moved_points, point_scores, said_of_labels, unscored
from Inference.verdict import judge
from Report.page import figure_png
from Runtime.device import own_settings
from Runtime.errors import InputError, attempt
from Runtime.files import require_apart, write_file

# Columns of a row besides COLUMNS, including all that `judge` uses.
ROW = ("overlap_percent", "similarity_attainable", "covered_percent", "body_overlap", "folding_body_percent",
       "stretched_percent", "inverse_error_max_mm", "inverse_error_voxels", "affine_similarity_before",
       "affine_similarity", "affine_runner_up", "one_sign", "mirror_gain", "scale_least", "scale_most", "turn_degrees",
       "shear_degrees", "mirrors", "segmentations", "compared_by", "warnings", "start", "smoothing")


def write_row(folder, out, pair, result, labels=(None, None), points_mm=(None, None), disp=None, also=(),
              carried="smooth", picture=True, earlier=None):
    """Write the files of a registered pair and return its row of the results, without its "source".

    folder: of the pair. out: of the results, the same for a single pair. pair: its name and its files, TO_REGISTER.
    labels: the label maps of fixed and moving volume, on their grids, or None. points_mm: their landmarks, (P, 3), or
    None. disp: path of the field for Learn2Reg, or None. also: some of ALSO. carried: how to warp labels, one of
    LABELS. picture: whether to draw one. earlier: row of an earlier registration, whose files are removed first.
    """
    fixed_label, moving_label = labels
    fixed, affine = result.fixed, result.moving.affine
    warped_label = None if moving_label is None else (
        apply_label(moving_label, affine, result.field, fixed.affine, carried))
    row = {"name": pair["name"], **{key: os.path.abspath(pair[key]) for key in TO_REGISTER if key in pair},
           "folder": str(folder), **scores_of(result), "matrix": result.matrix.tolist(), "labels": {}}
    problem = "" if fixed_label is None else unscored(pair, fixed_label, moving_label)
    if moving_label is not None and fixed_label is not None and not problem:
        before = label_on(moving_label, affine, fixed.array.shape, fixed.affine, carried)
        row.update(label_scores({"_before": before, "": warped_label}, fixed_label))
    if all(points is not None for points in points_mm):
        row.update(point_scores(*points_mm, pair, result.field, fixed.affine))
    row["verdict"], row["reason"] = judge(row)
    row["warnings"] = [*row["warnings"], *said_of_labels(row)]
    if moving_label is not None and moving_label.any() and not warped_label.any():
        row["warnings"].append(f"no voxel of {pair['moving_label']} lies in the fixed volume after the registration.")
    if problem:
        row["warnings"].append(problem)
    make_folder(folder)
    remove_outputs(folder, out, earlier)
    write_pair(folder, pair, result, warped_label, points_mm[0], disp, also)
    if picture:
        shown = read_pair(row, fixed.array.ndim)
        write_file(folder / "picture.png", figure_png(pair_figure(shown)))
        if folder != out:  # of a list: the page of a single pair is the report
            write_pair_page(folder, row, shown)
    return {**row, "files": file_digests(output_files(folder, disp), out)}


def scores_of(result):
    """The part of the row that the registration itself gives."""
    found = {key: getattr(result, key, None) for key in (*COLUMNS, *ROW)}
    return {**{key: value for key, value in found.items() if value is not None}, "seconds": result.seconds["total"],
            "seconds_of": result.seconds}


@own_settings()
def save(result, folder):
    """Write a Result as the command writes a pair: its files, picture, results and report.

    Volumes given in memory are written too, as fixed.nii.gz, moving.nii.gz and so on, whole numbers in their own type,
    because the page and the scores read them. Those given as files are read again: raises InputError for one that has
    changed since.
    """
    folder = Path(folder)
    volumes = {"fixed": result.fixed, "moving": result.moving}
    for side in ("fixed", "moving"):
        volumes.update(zip(CHANNELS[side], volumes[side].channels))
    paths = [volume.path for volume in volumes.values()]
    require_apart(output_files(folder), inputs=paths)
    require_own(folder, [folder])
    for volume in volumes.values():
        if volume.path and volume.stamp and source_stamps({"": volume.path})[""] != volume.stamp:
            again = read_source(volume.path, "volume") if Path(volume.path).exists() else None
            if again is None or not all(map(np.array_equal, again, volume)):  # not its time alone
                raise InputError(f"{volume.path}: it has changed or is gone since it was registered; register it "
                                 "again.")
    files = {key: volume.path or folder / f"{key}.nii.gz" for key, volume in volumes.items()}
    earlier = read_results(folder)
    own = written = (earlier["settings"] or {}).get("from_memory", [])  # an earlier save wrote them
    if earlier["version"] in ("1.0.0", "1.1.0", "1.2.0"):  # which did not say so
        own = [os.path.basename(row.get(key, "")) for row in earlier["pairs"].values() for key in files]
    given = [path for key, path in files.items() if not volumes[key].path]
    require_apart(given, lambda path: path.name in own, paths)
    dims = result.fixed.array.ndim
    settings = {"config": {"model.dims": dims}, "from_memory": [path.name for path in given]}
    make_folder(folder)
    # After an interruption the files are still of a save.
    write_results(folder, [], [], {**settings, "from_memory": [*settings["from_memory"], *written]}, complete=False)
    mine = {os.path.realpath(path) for path in files.values()}
    for path in (folder / os.path.basename(name) for name in written):
        if os.path.realpath(path) not in mine:
            path.unlink(missing_ok=True)
    for key, volume in volumes.items():
        if not volume.path:
            whole = volume.dtype is not None and volume.dtype.kind in "iu"
            write_volume(files[key], rounded(volume.array, volume.dtype) if whole else volume.array, volume.affine,
                         volume.header)
    pair = {"name": f"{volume_id(files['moving'])} to {volume_id(files['fixed'])}", **files}
    rows = [{**write_row(folder, folder, pair, result), "source": source_digests(pair)}]
    write_report(folder, rows, [], "omnimorph.register", dims)
    write_results(folder, rows, [], settings, complete=True)


def make_folder(path):
    """Make a folder of results. Raises InputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "shorten the names of the volumes" if error.errno == errno.ENAMETOOLONG else "choose another --out"
        raise InputError(f"{path}: the folder cannot be created ({error.strerror}); {remedy}.") from None


def write_pair(folder, pair, result, warped_label, points_mm, disp, also):
    """Write the files of a registration. warped_label: (*fixed) or None. Others as for `write_row`."""
    header, affine = read_raw_header(pair["fixed"]), result.fixed.affine
    for suffix in ("nii.gz", *(word for word in IMAGES if word in also)):
        if warped_label is not None:
            write_warped(folder / f"warped_label.{suffix}", warped_label, pair["moving_label"], affine, header)
        write_warped(folder / f"warped.{suffix}", result.warped, pair["moving"], affine, header)
    for number, (warped, path) in enumerate(zip(result.warped_channels, channels_of(pair, "moving")), 2):
        write_warped(folder / f"warped_channel_{number}.nii.gz", warped, path, affine, header)
    whole = into_plane(result.field, affine, result.moving.affine)
    inverse = None if result.inverse is None else into_plane(result.inverse, result.moving.affine, affine)
    for name, field, side in (("field", whole, "fixed"), ("inverse_field", inverse, "moving")):
        if field is not None:
            write_field(folder / f"{name}.nii.gz", field, getattr(result, side).affine, read_raw_header(pair[side]))
            if "h5" in also:
                write_field_h5(folder / f"{name}.h5", field, getattr(result, side).affine)
    write_volume(folder / "jacobian.nii.gz", determinants(result.field), affine, grid_header(header))
    for side in ("fixed", "moving"):
        found = getattr(result, f"segmented_{side}")
        if found is not None:
            write_volume(folder / f"segmented_{side}.nii.gz", found, getattr(result, side).affine,
                         grid_header(read_raw_header(pair[side])))
    if disp:
        write_field_learn2reg(disp, result.field, affine)
    if "mat" in also:
        write_matrix(folder / "affine.mat", result.matrix)
    if points_mm is not None:
        write_points(folder, pair["points"], moved_points(points_mm, whole, affine))


def determinants(field):
    """The `jacobian_determinant` of a field (N, *spatial) in voxels: (*spatial) float32, slab by slab."""
    found = np.empty(field.shape[1:], np.float32)
    for slab in slabs(found.shape):
        first = max(slab.start - 1, 0)  # a difference needs the planes beside it
        part = torch.from_numpy(field[:, first:slab.stop + 1])[None]
        found[slab] = jacobian_determinant(part)[0, slab.start - first:][:slab.stop - slab.start].numpy()
    return found


def write_warped(path, warped, source, affine, fixed_header):
    """Write a warped volume, (*fixed), with the fixed volume's header except for its display range.

    Whole numbers keep the type of the moving file, `source`. affine, fixed_header: of the fixed volume.
    """
    header = fixed_header.copy()  # of its kind: the axes of NIfTI-1 end at 32767
    header["cal_min"] = header["cal_max"] = 0
    write_moved(path, warped, source, affine, header, kinds="iu")


def write_moved(path, array, source, affine, header, kinds="iuf"):
    """Write a deformed volume with the number type of the file it comes from.

    If the file has scaled numbers (slope, intercept), its type does not fit, and the array keeps its own type.
    source: path of the file that was deformed. affine, header: of the array's grid. kinds: numpy's letters of the kinds
    of numbers whose type is kept ("i", "u" whole, "f" floating).
    """
    dtype = stored_type(source)
    if dtype is not None and dtype.kind in kinds:
        array = rounded(array, dtype) if dtype.kind in "iu" else array.astype(dtype)
    write_volume(path, array, affine, header)


def grid_header(header):
    """A new header with only the affine codes and the units of another one."""
    plain = nibabel.Nifti1Header()
    for key in ("qform_code", "sform_code", "xyzt_units"):
        plain[key] = header[key]
    return plain


def disp_names(pairs, dims):
    """The `disp_name` of each pair that has one; the others are refused when they are registered.

    Raises InputError if two pairs have the same.
    """
    taken = {}
    for pair in pairs:
        name = attempt(pair["name"], disp_name, pair, dims)
        if name in taken:
            raise InputError(f"--learn2reg: the fields of {taken[name]} and {pair['name']} would both be {name}, "
                             "after the last numbers in their file names; rename these files, or use two folders.")
        taken[name] = pair["name"]
    return [name for name in taken if re.fullmatch(DISP, name)]


def disp_name(pair, dims):
    """The name of a field in a Learn2Reg submission: disp_<fixed>_<moving>.nii.gz, four digits each.

    Raises InputError if the two volumes are on different grids, or if a file name has no number.
    """
    shape, affine = read_header(pair["fixed"], dims)
    moving_shape, moving_affine = read_header(pair["moving"], dims)
    if not same_grid(shape, affine, moving_shape, moving_affine, across=False):  # a field in voxels has no plane
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg needs both volumes on one grid, as in "
                         "its data sets; leave it out.")
    fixed_numbers, moving_numbers = (re.findall(r"\d+", volume_id(pair[side])) for side in ("fixed", "moving"))
    if not fixed_numbers or not moving_numbers:
        raise InputError(f"{pair['fixed']} and {pair['moving']}: --learn2reg names fields by the numbers in the "
                         "file names, but a number is missing; rename the files, for example to case_0001.nii.gz.")
    return f"disp_{int(fixed_numbers[-1]):04d}_{int(moving_numbers[-1]):04d}.nii.gz"
