"""The values that options take, for programs that explain them before importing torch."""
import glob
import os
from pathlib import Path

from Runtime.config import KEYS
from Runtime.errors import InputError

# Supplies keys that are newer than a checkpoint, and the whole config if there is no model.
DEFAULTS = Path(__file__).parent.parent / "Config/config_om.yaml"
DRAWS = 32  # copies of each volume
STRIDE = 4  # times per step of the recovery: what one prediction undoes, see DeformDDPM.recover
STEPS = 100  # of refinement; after 25 at each of three resolutions the similarity hardly grows
STEPS_CONTINUED = 33  # of refinement that continues another registration, at the finest resolution only
AFFINES = ("rigid", "affine")
STARTS = ("auto", "header", "centre")
SIMILARITIES = tuple(KEYS["registration.similarity"][1])
LABELS = ("smooth", "nearest")  # ways to carry label maps
IMAGES = ("nrrd", "mha", "mgz")  # formats of Dataloader/nifti.py in which warped volumes are written on request
# The weights file in a folder of OM_export.py, and the prefix for the name of such a folder on huggingface.co.
EXPORTED, HUB = "model.safetensors", "hf:"
TO_SCORE = ("fixed_label", "moving_label", "field", "warped_label", "fixed_points", "moving_points")  # files of a pair
# Of these: the one without which another scores nothing.
NEEDS = {"moving_label": "fixed_label", "warped_label": "fixed_label", "fixed_points": "moving_points",
         "moving_points": "fixed_points"}
ALSO = ("h5", "mat", *IMAGES, "bids")  # what is written for other programs on request


def is_list(args):
    """Whether the options of OM_register.py name a list: --pairs, several --moving, a folder or a pattern of files."""
    first = args.moving[0] if args.moving else ""
    return bool(args.pairs or len(args.moving) > 1 or os.path.isdir(first) and not is_dicom_folder(first)
                or (glob.has_magic(first) and not os.path.exists(first)))


def require_partners(pair):
    """Raise InputError if a file of a pair to score scores nothing without another one. pair: dict with TO_SCORE."""
    for one, other in NEEDS.items():
        if one in pair and other not in pair:
            raise InputError(f"{one} scores nothing alone: add {other}, or leave it out.")


def no_model(path):
    """The error for a --model that is not there."""
    return InputError(f"{path}: no such model; give a checkpoint (.pth), a .safetensors file or a run's folder.")


def is_dicom_folder(path):
    """Whether a path is a folder of DICOM slices, which is one volume."""
    if not os.path.isdir(path):
        return False
    from Dataloader.formats import is_series  # here: nibabel takes a moment

    return is_series(path)
