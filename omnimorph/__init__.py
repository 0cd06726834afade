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
    from Inference.registration import Result, register

HOMES = {"apply_field": "labels", "apply_label": "labels", "augment": "augmentation", "load_model": "load_model",
         "register": "registration", "Result": "registration"}
__all__ = ["InputError", "Result", "__version__", "apply_field", "apply_label", "augment", "load_model", "register"]


def __getattr__(name):
    """A function, imported at its first use: loading torch takes seconds, and `omnimorph --help` does not need it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    house = InputError.__module__.removesuffix("Runtime.errors")  # "omnimorph." if installed
    return getattr(importlib.import_module(f"{house}Inference.{HOMES[name]}"), name)


def __dir__():
    return sorted([*globals(), *HOMES])
