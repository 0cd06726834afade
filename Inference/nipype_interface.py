"""The registration as an interface of nipype, for workflows: pip install nipype.

    from omnimorph.Inference.nipype_interface import Register
    found = Register(fixed="F.nii.gz", moving="M.nii.gz", inverse=True).run()
    found.outputs.warped, found.outputs.field

It runs `omnimorph register` in the folder of its node; pass further options in `args`.
"""
import os
import shlex
import sys

from nipype.interfaces.base import CommandLine, CommandLineInputSpec, Directory, File, TraitedSpec, traits

MADE = {"warped": "warped.nii.gz", "field": "field.nii.gz", "jacobian": "jacobian.nii.gz", "picture": "picture.png",
        "results": "results.json", "inverse_field": "inverse_field.nii.gz", "warped_label": "warped_label.nii.gz"}


class RegisterInput(CommandLineInputSpec):
    fixed = File(exists=True, mandatory=True, argstr="--fixed %s", desc="the volume that does not change")
    moving = File(exists=True, mandatory=True, argstr="--moving %s", desc="the volume to deform")
    fixed_label = File(exists=True, argstr="--fixed-label %s", desc="label image of the fixed volume")
    moving_label = File(exists=True, argstr="--moving-label %s", desc="label image of the moving volume")
    fixed_mask = File(exists=True, argstr="--fixed-mask %s", desc="where the fixed volume counts")
    moving_mask = File(exists=True, argstr="--moving-mask %s", desc="where the moving volume counts")
    affine = traits.Enum("affine", "rigid", "none", argstr="--affine %s", desc="alignment before the deformation")
    inverse = traits.Bool(argstr="--inverse", desc="write the inverse field too")
    out = Directory("registration", usedefault=True, argstr="--out %s", desc="folder of the results")


class RegisterOutput(TraitedSpec):
    warped = File(exists=True, desc="the moving volume on the fixed grid")
    field = File(exists=True, desc="the deformation in mm, as ITK has it")
    jacobian = File(exists=True, desc="the change of volume in each voxel")
    picture = File(exists=True, desc="slices before and after")
    results = File(exists=True, desc="scores, verdict and settings")
    inverse_field = File(desc="with inverse=True")
    warped_label = File(desc="with moving_label")


class Register(CommandLine):
    input_spec = RegisterInput
    output_spec = RegisterOutput
    _cmd = f"{shlex.quote(sys.executable)} -m omnimorph register"

    def _list_outputs(self):
        folder = os.path.abspath(self.inputs.out)
        paths = {name: os.path.join(folder, file) for name, file in MADE.items()}
        return {name: path for name, path in paths.items() if os.path.exists(path)}
