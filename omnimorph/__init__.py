"""OmniMorph for other programs: align volumes, draw deformed copies, use trained networks.

    import omnimorph
    found = omnimorph.register("F.nii.gz", "M.nii.gz")
    found.save("Results/pair")
    copy, moved_label, field = omnimorph.augment(image, label, affine, draw=3)

help() explains each function. An error that a caller can correct raises omnimorph.InputError, with one sentence.
"""
import importlib
from typing import TYPE_CHECKING

from Runtime import __version__
from Runtime.errors import InputError

if TYPE_CHECKING:
    from Inference.augmentation import augment
    from Inference.labels import apply_field, apply_label
    from Inference.load_model import load_model
    from Inference.monai_transforms import RandDeformationd, Registerd
    from Inference.registration import Result, register
    from Runtime.config import load_config

HOMES = {"apply_field": "Inference.labels", "apply_label": "Inference.labels", "augment": "Inference.augmentation",
         "load_config": "Runtime.config", "load_model": "Inference.load_model",
         "RandDeformationd": "Inference.monai_transforms", "register": "Inference.registration",
         "Registerd": "Inference.monai_transforms", "Result": "Inference.registration"}
__all__ = ["InputError", "RandDeformationd", "Registerd", "Result", "__version__", "apply_field", "apply_label",
           "augment", "load_config", "load_model", "register"]


def __getattr__(name):
    """A function, imported at its first use: loading torch takes seconds, and `omnimorph --help` does not need it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    house = InputError.__module__.removesuffix("Runtime.errors")  # "omnimorph." if installed
    return getattr(importlib.import_module(house + HOMES[name]), name)


def __dir__():
    return sorted([*globals(), *HOMES])
