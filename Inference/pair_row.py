"""A registered pair in its folder: its files, picture and row of the results; and saving a single Result."""
import os
from pathlib import Path

import numpy as np

from Dataloader.datalist import volume_id
from Dataloader.nifti import write_volume
from Inference.labels import apply_label
from Inference.outputs import write_pair
from Inference.pair_figures import pair_figure, read_pair, write_pair_page, write_report
from Inference.pair_lists import CHANNELS, TO_REGISTER
from Inference.results import file_digests, output_files, remove_outputs, require_apart, source_digests, write_results
from Inference.scores import COLUMNS, label_scores, point_scores, said_of_labels
from Inference.verdict import judge, judge_list
from Report.page import figure_png
from Runtime.errors import InputError
from Runtime.files import write_file

# Beside COLUMNS; what `judge` looks at is among them.
ROW = ("overlap_percent", "covered_percent", "body_overlap", "folding_body_percent", "stretched_percent",
       "inverse_error_max_mm", "affine_similarity_before", "affine_similarity", "affine_runner_up", "one_sign",
       "scale_least", "scale_most", "turn_degrees", "shear_degrees", "mirrors", "segmentations", "compared_by",
       "warnings", "start")


def write_row(folder, out, pair, result, labels=(None, None), points_mm=(None, None), disp=None, also=(),
              carried="smooth", picture=True, earlier=None):
    """Write the files of a registered pair and return its row of the results.

    folder: of the pair. out: of the results, the same for a single pair. pair: its name and its files, TO_REGISTER.
    result: of `register`. labels: the label maps of fixed and moving volume, on their grids, or None. points_mm: the
    landmarks of both, (P, 3), or None. disp, also: as for `write_pair`. carried: how labels are, of LABELS. picture:
    whether to draw one. earlier: the row of an earlier registration, whose files go before the first new one comes.
    """
    fixed_label, moving_label = labels
    warped_label = warp_label(moving_label, result, result.field, carried)
    row = {"name": pair["name"], **{key: os.path.abspath(pair[key]) for key in TO_REGISTER if key in pair},
           "folder": str(folder), **scores_of(result), "matrix": result.matrix.tolist(),
           **carried_scores(moving_label, warped_label, fixed_label, result, carried)}
    if all(points is not None for points in points_mm):
        row.update(point_scores(*points_mm, pair, result.field, result.fixed.affine))
    row["verdict"], row["reason"] = judge(row)
    row["warnings"] = [*row["warnings"], *said_of_labels(row)]
    if moving_label is not None and moving_label.any() and not warped_label.any():
        row["warnings"] = [*row["warnings"], f"no voxel of {pair['moving_label']} lies in the fixed volume after "
                                             "the registration."]
    make_folder(folder)
    remove_outputs(folder, out, earlier)
    write_pair(folder, pair, result, warped_label, points_mm[0], disp, also)
    if picture:
        shown = read_pair(row, result.fixed.array.ndim)
        write_file(folder / "picture.png", figure_png(pair_figure(shown)))
        if folder != out:  # of a list: the page of a single pair is the report
            write_pair_page(folder, row, shown)
    return {**row, "source": source_digests(pair), "files": file_digests(output_files(folder, disp), out)}


def scores_of(result):
    """The part of the row that the registration itself gives."""
    found = {key: getattr(result, key, None) for key in (*COLUMNS, *ROW)}
    return {**{key: value for key, value in found.items() if value is not None}, "seconds": result.seconds["total"],
            "seconds_of": result.seconds}


def warp_label(moving_label, result, field, carried):
    """The moving label map as a field shows it, (*fixed); None without a label map."""
    if moving_label is None:
        return None
    return apply_label(moving_label, result.moving.affine, field, result.fixed.affine, carried)


def carried_scores(moving_label, warped_label, fixed_label, result, carried):
    """Dice of each label as the headers place the volumes and after the registration: this part of the row.

    moving_label, warped_label, fixed_label: label maps or None. result: of `register`. carried: of LABELS.
    """
    if moving_label is None or fixed_label is None or not fixed_label.any():
        return {"labels": {}}
    by_header = warp_label(moving_label, result, np.zeros_like(result.field), carried)
    return label_scores({"_before": by_header, "": warped_label}, fixed_label)


def save(result, folder):
    """Write a Result as the command writes a pair: its files, picture, results and report.

    Volumes that were given in memory are written too, as fixed.nii.gz, moving.nii.gz and so on: the page and the scores
    read them.
    """
    folder = Path(folder)
    volumes = {"fixed": result.fixed, "moving": result.moving}
    for side in ("fixed", "moving"):
        volumes.update(zip(CHANNELS[side], volumes[side].channels))
    require_apart(folder, [volume.path for volume in volumes.values() if volume.path])
    make_folder(folder)
    files = {key: volume.path or written(folder / f"{key}.nii.gz", volume) for key, volume in volumes.items()}
    pair = {"name": f"{volume_id(files['moving'])} to {volume_id(files['fixed'])}", **files}
    rows = judge_list([write_row(folder, folder, pair, result)])
    dims = result.fixed.array.ndim
    write_report(folder, rows, [], "omnimorph.register", dims)
    write_results(folder, rows, [], {"config": {"model.dims": dims}}, complete=True)


def written(path, volume):
    """Write a Volume with its header and, where its numbers are whole, their type. Returns: the path."""
    whole = volume.dtype is not None and volume.dtype.kind in "iu"
    write_volume(path, volume.array.astype(volume.dtype) if whole else volume.array, volume.affine, volume.header)
    return path


def make_folder(path):
    """Make a folder of results. Raises InputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: the folder cannot be created ({error.strerror}); choose another --out.") from None
