"""The values that options take, for programs that explain them before importing torch."""
import glob
import os

from Runtime.config import KEYS

STEPS = 100  # of refinement; after 25 at each of three resolutions the similarity hardly grows
STEPS_CONTINUED = 33  # of refinement that continues another registration, at the finest resolution only
AFFINES = ("rigid", "affine")
STARTS = ("auto", "header", "centre")
SIMILARITIES = tuple(KEYS["registration.similarity"][1])
LABELS = ("smooth", "nearest")  # ways to carry label maps
IMAGES = ("nrrd", "mha", "mgz")  # formats of Dataloader/nifti.py in which warped volumes are written on request
ALSO = ("h5", "mat", *IMAGES, "bids")  # what is written for other programs on request


def is_list(args):
    """Whether the options of OM_register.py name a list: --pairs, several --moving, a folder or a pattern of files."""
    first = args.moving[0] if args.moving else ""
    return bool(args.pairs or len(args.moving) > 1 or os.path.isdir(first) and not is_dicom_folder(first)
                or (glob.has_magic(first) and not os.path.exists(first)))


def is_dicom_folder(path):
    """Whether a path is a folder of DICOM slices, which is one volume."""
    if not os.path.isdir(path):
        return False
    from Dataloader.formats import is_series  # here: nibabel takes a moment

    return is_series(path)
