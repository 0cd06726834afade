"""OmniMorph for other programs: align volumes, draw deformed copies, use trained networks.

    import omnimorph
    found = omnimorph.register("F.nii.gz", "M.nii.gz")
    copy, moved_label, field = omnimorph.augment(image, label, affine, draw=3)

Each function explains itself by help(). What a caller can mend is raised as omnimorph.InputError, in one sentence.
"""
from Inference.augmentation import augment
from Inference.labels import apply_field, apply_label
from Inference.load_model import load_model
from Inference.registration import register
from Runtime.errors import InputError

__all__ = ["InputError", "apply_field", "apply_label", "augment", "load_model", "register"]
