"""Results under the names of BIDS derivatives, in bids/ beside results.json: `--also bids`, and --bids of OM_study.py.

    bids/sub-01/ses-1/anat/sub-01_ses-1_space-F_T1w.nii.gz                       the warped volume, F the fixed one
    bids/sub-01/ses-1/anat/sub-01_ses-1_space-F_dseg.nii.gz                      its label map
    bids/sub-01/ses-1/anat/sub-01_ses-1_from-T1w_to-F_mode-image_xfm.nii.gz      the field, also as .h5

A segmentation stays on the grid of its volume and is named sub-01_ses-1_desc-omnimorph_dseg.nii.gz. An aligned series
is sub-01_task-rest_desc-aligned_bold.nii.gz, its motion sub-01_task-rest_desc-motion_timeseries.tsv. Source:
https://bids-specification.readthedocs.io, "Derivatives"; transforms as its proposal BEP014 and fMRIPrep name them.
"""
import contextlib
import json
import os
import re
from pathlib import Path

from Dataloader.datalist import ENTITIES, read_json, volume_id
from Runtime import __version__
from Runtime.errors import InputError
from Runtime.files import write_file

NAME = re.compile(r"(sub-[A-Za-z0-9]+(?:_[A-Za-z]+-[A-Za-z0-9]+)*)_([A-Za-z0-9]+)")  # entities, suffix
KINDS = ("anat", "func", "dwi", "fmap", "perf", "pet", "micr")  # folders of BIDS; anat or func elsewhere
# {file of a pair: what its name ends in}; a name in braces is filled in.
OF_A_PAIR = {"warped.nii.gz": "space-{space}_{suffix}.nii.gz", "warped_label.nii.gz": "space-{space}_dseg.nii.gz",
             "field.nii.gz": "from-{suffix}_to-{space}_mode-image_xfm.nii.gz",
             "field.h5": "from-{suffix}_to-{space}_mode-image_xfm.h5",
             "inverse_field.nii.gz": "from-{space}_to-{suffix}_mode-image_xfm.nii.gz",
             "inverse_field.h5": "from-{space}_to-{suffix}_mode-image_xfm.h5",
             "affine.mat": "from-{suffix}_to-{space}_mode-image_desc-affine_xfm.mat"}
OF_A_SEGMENTATION = {"label.nii.gz": "desc-omnimorph_dseg.nii.gz"}
OF_A_SERIES = {"aligned.nii.gz": "desc-aligned_{suffix}.nii.gz", "motion.tsv": "desc-motion_timeseries.tsv",
               "reference.nii.gz": "desc-reference_{suffix}ref.nii.gz"}
# Columns of motion.tsv: what the sidecar says about them.
COLUMNS = {"frame": {"Description": "number of the frame in the source, from 0"},
           **{f"trans_{axis}": {"Description": f"shift of the centre of the volume along {axis} (RAS) from the "
                                               "reference to the frame", "Units": "mm"} for axis in "xyz"},
           **{f"rot_{axis}": {"Description": f"rotation around {axis} from the reference to the frame, of Rz Ry Rx",
                              "Units": "rad"} for axis in "xyz"},
           "framewise_displacement": {"Description": "sum of the absolute changes of the six parameters since the last "
                                                     "frame, rotations on a sphere of {radius:g} mm", "Units": "mm"},
           "similarity_before": {"Description": "similarity of frame and reference before the alignment, at most 1"},
           "similarity": {"Description": "similarity of frame and reference after the alignment, at most 1"},
           "verdict": {"Description": "whether the alignment of the frame is trusted",
                       "Levels": {"ok": "yes", "doubtful": "look at it", "failed": "no"}}}
DESCRIPTION = re.compile(r"_desc-[A-Za-z0-9]+")
SOURCES = {"image": OF_A_SEGMENTATION, "series": OF_A_SERIES, "moving": OF_A_PAIR}


def split_name(path, own=ENTITIES):
    """The entities, without those of a derivative, and the suffix of a BIDS name: ("sub-01_ses-1", "T1w").

    own: the entities to leave out. Raises InputError for a name that is not BIDS.
    """
    found = NAME.fullmatch(volume_id(path))
    if not found:
        raise InputError(f"{path}: it has no BIDS name, so its derivatives cannot have one; rename it like "
                         "sub-01_T1w.nii.gz or sub-01_task-rest_bold.nii.gz.")
    return own.sub("", found[1]), found[2]


def targets(row):
    """{name of a result: its path below bids/} for a row of results.json."""
    key = key_of(row)
    source = Path(row[key])
    entities, suffix = split_name(source, ENTITIES if key == "moving" else DESCRIPTION)  # others stay in their space
    session = re.search(r"_(ses-[A-Za-z0-9]+)", entities)
    kind = source.parent.name if source.parent.name in KINDS else "func" if key == "series" else "anat"
    folder = Path(entities.split("_")[0], session[1] if session else "", kind)
    space = re.sub(r"[^A-Za-z0-9]", "", volume_id(row["fixed"])) if "fixed" in row else ""
    return {name: folder / f"{entities}_{ending.format(space=space, suffix=suffix)}"
            for name, ending in SOURCES[key].items()}


def key_of(row):
    """The key of SOURCES under which a row has the volume that it is about."""
    return next(key for key in SOURCES if key in row)


def require_own_names(rows):
    """Raise InputError if a volume has no BIDS name, or if two results would share a name.

    rows: of results.json, or pairs to register.
    """
    taken = {}
    for row in rows:
        written = [next(iter(SOURCES[key_of(row)])), *["warped_label.nii.gz"] * ("moving_label" in row)]
        for name in [targets(row)[key].name for key in written]:
            if name in taken:
                raise InputError(f"BIDS derivatives: {taken[name]} and {row['name']} would both be {name}; leave one "
                                 "out, or use two folders.")
            taken[name] = row["name"]


def is_ours(folder):
    """Whether a folder bids/ is one of `write_bids`, by its dataset_description.json."""
    try:
        about = json.loads((folder / "dataset_description.json").read_bytes())
        return any(program["Name"] == "OmniMorph" for program in about["GeneratedBy"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def require_own_bids(out):
    """Raise InputError if the folder of results has a folder bids/ with files of others, such as a raw data set."""
    folder = Path(out) / "bids"
    empty = folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())
    if folder.exists() and not empty and not is_ours(folder):
        raise InputError(f"{folder}: it is not of an earlier run (its dataset_description.json would say so), and the "
                         "BIDS derivatives would replace its files; name another --out.")


def sidecar_of(target):
    """The .json beside a result, which a .nii.gz and a .h5 of one name share."""
    return target.with_name(f"{target.name.split('.')[0]}.json")


def is_own_sidecar(path):
    """Whether a .json file is a sidecar of `write_bids`: its sources are paths of files."""
    try:
        sources = json.loads(path.read_bytes())["Sources"]
        return bool(sources) and all(map(os.path.isabs, sources))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def drop_copies(out, kept=()):
    """Remove what earlier runs copied to bids/, except the paths `kept`: copies must not outlive their results."""
    folder = Path(out) / "bids"
    for sidecar in filter(is_own_sidecar, sorted(folder.glob("sub-*/**/*.json")) if is_ours(folder) else ()):
        table = [".tsv"] if sidecar.stem.endswith("_timeseries") else []  # others are the user's, as of a _dseg
        for suffix in (".nii.gz", ".h5", ".mat", *table, ".json"):
            path = sidecar.with_name(sidecar.stem + suffix)
            if path not in kept:
                path.unlink(missing_ok=True)


def write_bids(out, series=None, radius=0.0):
    """Copy the results of a folder to bids/, each with a sidecar that names its sources. Returns: Path of bids/.

    series, radius: path of the series and --radius, if the folder is of `motion`, whose rows are blocks of frames.
    """
    out = Path(out)
    rows = [{"name": "series", "series": os.path.abspath(series), "folder": "."}] if series else (
        read_json(out / "results.json")["pairs"])
    require_own_names(rows)
    about = {"Name": "OmniMorph", "BIDSVersion": "1.10.0", "DatasetType": "derivative",
             "GeneratedBy": [{"Name": "OmniMorph", "Version": __version__}]}
    (out / "bids").mkdir(exist_ok=True)
    write_file(out / "bids/dataset_description.json", json.dumps(about, indent=1) + "\n")
    files = [(row, out / row["folder"] / name, out / "bids" / below)
             for row in rows for name, below in targets(row).items()]
    written = [target for _, path, target in files if path.is_file()]
    drop_copies(out, {*written, *map(sidecar_of, written)})
    for row, path, target in files:
        if path.is_file():
            sources = [row[key] for key in (*SOURCES, "fixed") if key in row]
            sidecar = {"Sources": sources, **({"SpatialReference": row["fixed"]} if "fixed" in row else {})}
            if path.name == "aligned.nii.gz":  # with the times of the frames, which are those of its source
                with contextlib.suppress(OSError, ValueError, TypeError):
                    sidecar = {**json.loads(sidecar_of(Path(row["series"])).read_bytes()), **sidecar}
            if path.suffix == ".tsv":
                sidecar |= {column: {**words, "Description": words["Description"].format(radius=radius)}
                            for column, words in COLUMNS.items()}
            write_file(sidecar_of(target), json.dumps(sidecar, indent=1) + "\n")  # first: it tells that both are ours
            write_file(target, path.read_bytes())
    return out / "bids"
