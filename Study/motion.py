"""Motion in a 4D series: every frame aligned to one frame or to the mean of all, and how far each had moved.

Frames are aligned in blocks. Within a block each frame starts from the result of the previous frame (with --deform from
its field), so the result is the same for any number of processes. The map of a frame leads from the reference to the
positions of its points in that frame.
"""
import dataclasses
import functools
from pathlib import Path

import nibabel
import numpy as np

from Dataloader.formats import is_itk
from Dataloader.nifti import READ_ERRORS, checked_image, open_nifti, read_affine, read_numbers, write_volume
from Diffusion.metrics import average
from Inference.bids import drop_copies, require_own_bids, split_name
from Inference.results import do_all, write_results
from Report.charts import grid, line_chart
from Report.page import table_html
from Runtime.device import pick_device
from Runtime.errors import InputError, MemoryShort
from Runtime.files import save_array, sha256
from Study.common import aligned, end, finished_row, locked, write_study_page, write_table
from Study.thumbnails import gallery_html, thumbnail

BLOCK = 10  # frames
MM, SECONDS, OF_TIME = 2, 8, 56  # codes of NIfTI's xyzt_units, and the bits for the unit of time
MOVED = 0.01  # framewise displacement above which a frame is counted, in radii: 0.5 mm for a human head, as is usual
PARAMETERS = ("trans_x", "trans_y", "trans_z", "rot_x", "rot_y", "rot_z")


def motion(args):
    """`omnimorph motion`; returns the exit code."""
    if args.bids:
        split_name(args.series)  # refuses a name without entities
        require_own_bids(args.out)
    if not args.radius > 0:
        raise InputError(f"--radius {args.radius:g}: it must be a number above 0.")
    shape, affine = shape_of(args.series)
    count = shape[-1]
    if args.reference not in ("mean", "middle") and not (args.reference.isdecimal() and int(args.reference) < count):
        raise InputError(f"--reference {args.reference}: give mean, middle, or the number of a frame from 0 to "
                         f"{count - 1}.")
    settings = {"program": "motion", "series": sha256(args.series), "reference": args.reference, "deform": args.deform,
                "similarity": args.similarity}
    options = {"affine": "rigid", "refine": args.deform, "similarity": args.similarity,
               "device": pick_device(args.device).type}
    names = ["reference.nii.gz", "aligned.nii.gz", "motion.tsv", "motion.html", "pass_1/results.json",
             "pass_2/results.json"]
    with locked(args.out, "motion", names, [args.series]) as out:
        drop_copies(out)
        write_results(out, [], [], settings, complete=False)  # its volumes are of no finished run until the end
        first = int(args.reference) if args.reference.isdecimal() else count // 2
        write_volume(out / "reference.nii.gz", frame_of(args.series, first), affine)
        passes = 2 if args.reference == "mean" else 1
        for number in range(passes):
            where = out / f"pass_{number + 1}"
            where.mkdir(exist_ok=True)
            tasks = [({"name": f"frames_{start:05d}", "reference": out / "reference.nii.gz"}, where)
                     for start in range(0, count, BLOCK)]
            align = functools.partial(align_block, str(where), str(args.series), options)
            rows, failed = do_all(where, tasks, align, settings, args.workers, f"pass {number + 1} of {passes}",
                                  "block", args.again)
            frames = [frame for row in rows for frame in row["frames"]]
            if not any(frame["matrix"] for frame in frames):
                raise InputError([*failed, *frames][0]["reason"])
            if number < passes - 1:
                write_volume(out / "reference.nii.gz", mean_of(rows), affine)
        table = join(out, rows, args.series, shape, affine, args.radius)
        page = write_motion_page(out, rows, table, failed, affine, args)
        mean = average([row["framewise_displacement"] for row in table])
        return end(out, rows, failed, settings, page, args.strict,
                   {"frames": len(table), "mean_displacement_mm": mean and round(mean, 4)})


def shape_of(path):
    """Shape (D, H, W, T) and affine of a series. Raises InputError if the file is not a series."""
    if is_itk(path):
        raise InputError(f"{path}: a series has to be one NIfTI file; convert it.")
    image = open_nifti(path)
    if len(image.shape) != 4 or image.shape[3] < 2 or min(image.shape[:3]) < 2:
        raise InputError(f"{path}: shape {image.shape} is not a series of volumes (D, H, W, frames); series of "
                         "slices are not supported.")
    return image.shape, read_affine(path, image, 3)


def frame_of(path, number):
    """One frame of a series, (D, H, W) float32."""
    try:
        voxels = np.asanyarray(open_nifti(path).dataobj[..., number])
    except READ_ERRORS as error:
        raise InputError(f"{path}: truncated or corrupt ({error}); copy or download it again.") from error
    return checked_image(f"{path}, frame {number}", voxels)


def align_block(out, series, options, entry, folder, earlier):
    """Align the frames of one block; their volumes go to one file, their maps and similarities into the row."""
    start = int(entry["name"].rpartition("_")[2])
    (*size, count), affine = shape_of(series)
    begin, volumes, frames = {}, [], []
    for number in range(start, min(start + BLOCK, count)):
        try:
            found = aligned(entry["reference"], (frame_of(series, number), affine), **options, **begin)
        except MemoryShort:
            raise  # not for the frame: the block is done again
        except InputError as error:  # later frames keep their numbers
            volumes.append(np.zeros(size, np.float32))
            frames.append({"frame": number, "matrix": None, "similarity": None, "similarity_before": None,
                           "verdict": "failed", "reason": str(error)})
            continue
        # Not its smoothing: that of a frame that hardly moved, as of the reference itself, would hold back the others.
        known = dataclasses.replace(found.known, weights=None) if options["refine"] else found.matrix
        begin = {} if found.verdict == "failed" else {"start": known}
        volumes.append(found.warped)
        frames.append({"frame": number, "matrix": found.matrix.tolist(), "similarity": found.similarity,
                       "similarity_before": found.similarity_before, "verdict": found.verdict, "reason": found.reason})
    path = folder / f"{entry['name']}.npy"
    save_array(path, np.stack(volumes, -1))
    bad = [frame for frame in frames if frame["verdict"] == "failed"]
    reason = f"frame {bad[0]['frame']}: {bad[0]['reason']}" if bad else ""
    row = {"name": entry["name"], "folder": str(folder), "frames": frames, "verdict": "failed" if bad else "ok",
           "reason": reason}
    return finished_row(row, out, [path])


def blocks_of(rows):
    return [np.load(Path(row["folder"]) / f"{row['name']}.npy", mmap_mode="r") for row in rows]


def mean_of(rows):
    """The mean of all frames that are aligned, (D, H, W) float32."""
    good = [[frame["verdict"] != "failed" for frame in row["frames"]] for row in rows]
    total = sum(np.asarray(block, np.float64).sum(-1, where=which) for block, which in zip(blocks_of(rows), good))
    return (total / max(sum(map(sum, good)), 1)).astype(np.float32)


def join(out, rows, series, shape, affine, radius_mm):
    """Write aligned.nii.gz and motion.tsv. Returns: the rows of the table. radius_mm: as in `displacement`."""
    header = nibabel.Nifti1Header()
    header.set_data_shape(shape)
    header.set_zooms(np.abs(open_nifti(series).header.get_zooms()[:4]))  # the fourth: the time of a frame
    header["xyzt_units"] = MM | (int(open_nifti(series).header["xyzt_units"]) & OF_TIME or SECONDS)
    write_volume(out / "aligned.nii.gz", np.concatenate(blocks_of(rows), -1), affine, header)
    centre_mm = (affine @ [*(np.subtract(shape[:3], 1) / 2), 1])[:3]
    table, before = [], None
    for frame in (frame for row in rows for frame in row["frames"]):
        now = None if frame["matrix"] is None else parameters_of(np.array(frame["matrix"]), centre_mm)
        follows = table and frame["frame"] == table[-1]["frame"] + 1  # not so after a block that failed
        moved = displacement(now - before, radius_mm) if follows and now is not None and before is not None else None
        table.append({"frame": frame["frame"], **dict(zip(PARAMETERS, [None] * 6 if now is None else now.tolist())),
                      "framewise_displacement": moved,
                      **{key: frame[key] for key in ("similarity_before", "similarity", "verdict")}})
        before = now
    write_table(out / "motion.tsv", list(table[0]), table)
    return table


def parameters_of(matrix, centre_mm):
    """Shift of a centre in mm, and angles around x, y and z in radians, of a rigid 4x4 map: (6,).

    The rotation is Rz Ry Rx, as in most motion-correction programs.
    """
    shift = (matrix @ [*centre_mm, 1])[:3] - centre_mm
    turn = matrix[:3, :3]
    return np.array([*shift, np.arctan2(turn[2, 1], turn[2, 2]), -np.arcsin(np.clip(turn[2, 0], -1, 1)),
                     np.arctan2(turn[1, 0], turn[0, 0])])


def displacement(change, radius_mm):
    """Framewise displacement in mm of a change of the six parameters (Power et al., NeuroImage 2012).

    radius_mm: of the sphere on which a rotation becomes millimetres.
    """
    return float(np.abs(change[:3]).sum() + radius_mm * np.abs(change[3:]).sum())


def write_motion_page(out, rows, table, failed, affine, args):
    """Write motion.html. Returns: the page's path."""
    moved = [row["framewise_displacement"] for row in table if row["framewise_displacement"] is not None]
    limit_mm = MOVED * args.radius
    many = [row for row in table if (row["framewise_displacement"] or 0) > limit_mm]
    cards = [("frames", len(table), f"{len(failed)} blocks left out" if failed else ""),
             ("mean displacement", f"{average(moved):.3f} mm" if moved else "-", "from frame to frame"),
             ("largest", f"{max(moved):.2f} mm" if moved else "-", ""), (f"above {limit_mm:g} mm", len(many), "frames")]
    header = ["frame", *PARAMETERS, "displacement, mm", "similarity before", "similarity", "verdict"]
    lines = [[row["frame"], *[row[key] for key in PARAMETERS], row["framewise_displacement"],
              row["similarity_before"], row["similarity"], row["verdict"]] for row in table]
    reference = read_numbers(out / "reference.nii.gz", 3)[0]
    series = np.asanyarray(open_nifti(out / "aligned.nii.gz").dataobj)
    good = np.array([row["verdict"] != "failed" for row in table])
    pictures = [(thumbnail(reference, affine), "reference", ""),
                (thumbnail(series.mean(-1, where=good), affine), "mean of the aligned frames", ""),
                (thumbnail(series.std(-1, where=good), affine), "standard deviation over the aligned frames", "")]
    frames = [row["frame"] for row in table]
    charts = [line_chart(title, [(key, frames, np.array([row[key] for row in table], float)) for key in keys],
                         across="frame")
              for title, keys in (("shift from the reference, mm", PARAMETERS[:3]),
                                  ("rotation from the reference, radians", PARAMETERS[3:]),
                                  ("displacement from frame to frame, mm", ("framewise_displacement",)))]
    sections = [("Motion", grid(charts)),
                ("Volumes", gallery_html(pictures)),
                ("Frames", table_html(header, lines, "Shifts in mm, rotations in radians. Click on a heading to "
                                                     "sort.",
                                      [None, *[".4f"] * 6, ".3f", ".3f", ".3f", None]))]
    lead = f"{args.series}, aligned to {args.reference}."
    return write_study_page(out / "motion.html", "Motion", lead, cards, rows, failed, sections)
