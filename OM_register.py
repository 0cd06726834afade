"""Register one pair of volumes or a list of pairs, or apply a saved field to further images and landmarks.

    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --out Results/pair
    python OM_register.py --fixed F.nii.gz --moving M.nii.gz --model Models/RUN --out Results/pair
    python OM_register.py --fixed F.nii.gz --moving FOLDER --workers 4 --out Results/onto_F
    python OM_register.py --pairs pairs.csv --out Results/run
    python OM_register.py --pairs pairs.csv --part 3/20 --out Results/run
    python OM_register.py --fixed F.nrrd --moving M.mgz --initial A.mat --also h5 --out Results/b
    python OM_register.py --apply Results/pair/field.nii.gz --moving OTHER.nii.gz --out Results/other

Without options, a pair is aligned by an affine map and then refined without a network, like `omnimorph.register`. The
two volumes of a pair may differ in size, spacing and orientation; they are NIfTI files, .mgz, .nrrd or .mha
(Dataloader/nifti.py). For each pair it writes warped.nii.gz and warped_label.nii.gz (on the fixed grid), field.nii.gz
(mm, for ITK, ANTs, Slicer and --apply), jacobian.nii.gz (determinant; <= 0 where it folds) and picture.png; for all
pairs together report.html, results.csv and results.json. The last line on the terminal is one line of JSON with the
means. Exit codes: 0 done, 43 bad input, even if only some pairs of a list are bad: the others are done.
"""
from Runtime import __version__  # first: an outdated Python stops here with one sentence

# isort: split
import argparse
import os
import re
import sys

from Inference.choices import AFFINES, ALSO, LABELS, SIMILARITIES, STARTS, STEPS, is_list
from Runtime.errors import InputError, parse_options, run_program
from Runtime.files import require_apart, require_file

WITH_A_FIELD = ("apply", "fixed", "moving", "moving_label", "points", "labels", "dims", "device", "out")  # --apply


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Register volumes of any size, spacing and orientation, or apply a "
                                     "field to further images, labels and landmarks.")
    parser.add_argument("--version", action="version", version=f"omnimorph {__version__}")
    parser.add_argument("--fixed", help="the volume that does not change; with --apply: a volume on the field's grid")
    parser.add_argument("--moving", nargs="+", default=[], help="the volume to deform; several files, a folder or a "
                        "pattern such as 'Data/**/*_T1w.nii.gz' are each registered to --fixed")
    parser.add_argument("--fixed-label", help="label image of the fixed volume, to score the registration")
    parser.add_argument("--moving-label", nargs="+", default=[], help="label image to warp; for several moving "
                        "volumes one each, in the same order")
    parser.add_argument("--resample-labels", action="store_true", help="resample labels that are not on the grid "
                        "of their image")
    parser.add_argument("--fixed-mask", help="mask on the grid of the fixed volume: alignment, refinement and "
                        "similarity use only voxels above 0")
    parser.add_argument("--moving-mask", help="the same for the moving volume, on its own grid")
    parser.add_argument("--fixed-channels", nargs="+", default=[], metavar="FILE",
                        help="further channels of the fixed volume, on its grid, for the refinement and for a network "
                        "that was trained with several")
    parser.add_argument("--moving-channels", nargs="+", default=[], metavar="FILE",
                        help="further channels of the moving volume, in the same order; they are warped too")
    parser.add_argument("--points", help="landmarks of the fixed volume to transform into the moving volume: a "
                        "table (x,y,z in mm, RAS), .fcsv, .mrk.json, .json or .vtk")
    parser.add_argument("--moving-points", help="the same landmarks in the moving volume, in the same order or "
                        "with the same names, to score the registration")
    parser.add_argument("--pairs", metavar="LIST", help=".csv table or .json list with fixed, moving, fixed_label, "
                        "moving_label, fixed_mask, moving_mask, fixed_channel_2, moving_channel_2, ..., points, "
                        "moving_points, name, or a Learn2Reg file; paths are relative to it. With --fixed also a "
                        "folder, as for --moving")
    parser.add_argument("--list", metavar="KEY", help="which list in that file, such as registration_val")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of pairs to register at a time, "
                        "each in its own process (%(default)s)")
    parser.add_argument("--part", metavar="K/N", help="register every N-th pair of a list, from the K-th on, as one of "
                        "N jobs, such as those of a Slurm array; the same command without --part joins the results")
    parser.add_argument("--again", action="store_true", help="repeat the pairs of a list that an earlier run with the "
                        "same options has completed")
    parser.add_argument("--apply", metavar="FIELD", help="apply this field instead of registering")
    parser.add_argument("--model", default="none", metavar="FILE", help="start from the prediction of a network: "
                        "checkpoint, .safetensors file, run folder, hf:OWNER/NAME of a model hub, or universal, "
                        "the bundled network for any volumes (%(default)s)")
    parser.add_argument("--affine", nargs="?", const="affine", choices=(*AFFINES, "none"),
                        help="alignment before the deformation (affine, or none with --initial)")
    parser.add_argument("--refine", type=int, nargs="?", const=STEPS, metavar="N",
                        help=f"number of steps that optimise the field for each pair ({STEPS}; 0 for none)")
    parser.add_argument("--similarity", choices=SIMILARITIES, help="how alignment and refinement compare the volumes: "
                        "correlation; for two modalities, such as T1 and T2, mapped or mind; auto decides from the "
                        "pair (default: registration.similarity of the config)")
    parser.add_argument("--start", choices=STARTS, default="auto", help="where the moving volume starts: where "
                        "the headers place it, with the centres of the fields of view on each other, or (auto) at the "
                        "more similar of the two (%(default)s)")
    parser.add_argument("--initial", metavar="FILE", help="start from a transform: a matrix of ITK or ANTs (.mat, "
                        ".txt, .tfm), FSL (.mat) or FreeSurfer (.lta), or a field from fixed to moving (.nii.gz, .h5)")
    parser.add_argument("--also", nargs="+", default=[], choices=ALSO, help="write files for other programs too: h5 "
                        "(the field as a transform), mat (the affine alignment), the warped volumes as nrrd, mha, "
                        "mgz, or copies of warped volumes, labels and transforms under BIDS names, in OUT/bids (bids)")
    parser.add_argument("--labels", choices=LABELS, default="smooth", help="how labels are warped: smooth (each one "
                        "slightly smoothed and sampled linearly, the largest wins) or nearest, the label of the "
                        "nearest voxel (%(default)s)")
    parser.add_argument("--inverse", action="store_true", help="write inverse_field.nii.gz too, on the moving grid")
    parser.add_argument("--learn2reg", action="store_true", help="write disp_<fixed>_<moving>.nii.gz too")
    parser.add_argument("--strict", action="store_true", help="exit with code 43 if a pair gets the verdict failed")
    parser.add_argument("--no-picture", action="store_true", help="write no picture.png for each pair and no pages "
                        "for the pairs of a list")
    parser.add_argument("--dims", type=int, choices=(2, 3), help="without a model: number of axes of the volumes "
                        "(that of the first fixed volume)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu (%(default)s)")
    parser.add_argument("--config", help="without a model: config file with refine.* and data.* "
                        "(Config/config_om.yaml)")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
                        help="override config keys")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    args = parse_options(parser, argv)
    args.given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    return args


def check_arguments(args):
    """Raise InputError for options that do not fit together and for missing files; fill in defaults."""
    also_seen = args.fixed_mask or args.moving_mask or args.fixed_channels or args.moving_channels
    if args.apply:
        if args.inverse:
            raise InputError("--apply takes the field as it is: leave out --inverse, and apply inverse_field.nii.gz, "
                             "which a registration with --inverse writes.")
        others = [f"--{name.replace('_', '-')}" for name in args.given if name not in WITH_A_FIELD]
        if others:
            raise InputError("--apply uses an existing field and scores nothing: leave out " + ", ".join(others) + ".")
        if not (args.moving or args.moving_label or args.points):
            raise InputError("--apply needs something to move: --moving, --moving-label or --points.")
    else:
        one = args.moving or args.fixed_label or args.moving_label or args.points or args.moving_points or also_seen
        if args.pairs and one or not args.pairs and not (args.fixed and args.moving):
            raise InputError("give either --pairs, or --fixed and --moving: one file, several, or a folder.")
        if args.list and (not args.pairs or args.fixed):
            raise InputError("--list chooses one of the lists in a --pairs file; leave it out.")
        several = is_list(args)
        for path in [args.fixed, *args.moving] if args.fixed and not several else []:
            if path.lower().endswith((".csv", ".json")):
                raise InputError(f"{path}: a list, not a volume; give a list of volumes by --pairs with --fixed, and a "
                                 "list of pairs by --pairs alone.")
        require_apart([args.out], inputs=[*args.moving, args.pairs])
        if several and (args.moving_mask or args.fixed_channels or args.moving_channels or args.moving_points):
            raise InputError("--moving-mask, --moving-points and channels are for one pair; for several list them in a "
                             "--pairs table.")
        if not several and len(args.moving_label) > 1:
            raise InputError("--moving-label names several files for one moving volume; give the one that belongs to "
                             "it.")
        if args.fixed_label and not several and not args.moving_label:
            raise InputError("--fixed-label scores nothing alone: add --moving-label, or leave it out.")
        if args.initial and (several or args.start != "auto"):
            raise InputError("--initial sets the start of one pair: leave out --pairs and --start.")
        args.affine = args.affine or ("none" if args.initial else "affine")
        args.affine = None if args.affine == "none" else args.affine
        args.refine = STEPS if args.refine is None else args.refine
        if args.model == "none" and not (args.refine or args.affine or args.initial):
            raise InputError("--affine none and --refine 0 without a --model: nothing would be registered; leave "
                             "one of them out.")
        if args.model != "none" and (args.config or args.dims):
            raise InputError("--config and --dims are for --model none: a model has its own config.")
        if args.refine < 0:
            raise InputError(f"--refine {args.refine}: the number of steps must be 0 or more.")
        if args.part:
            found = re.fullmatch("([0-9]+)/([0-9]+)", args.part)
            if not found or not 1 <= int(found[1]) <= int(found[2]):
                raise InputError(f"--part {args.part}: it is K/N with K from 1 to N, such as 3/20.")
            if not several or "bids" in args.also:
                raise InputError("--part is for a list; leave --also bids to the command that joins the parts.")
        if args.workers < 1:
            raise InputError(f"--workers {args.workers}: at least 1 process is needed.")
    files = [args.fixed, args.fixed_label, args.fixed_mask, args.moving_mask, args.points, args.moving_points,
             args.initial, args.apply, *args.fixed_channels, *args.moving_channels, *args.moving_label,
             *(args.moving if args.apply or not is_list(args) else ())]
    for path in filter(None, files):
        if os.path.isdir(path):
            from Dataloader.formats import require_volume  # here: nibabel takes a moment

            require_volume(path)
        else:
            require_file(path)
    if args.pairs and not os.path.exists(args.pairs):
        raise InputError(f"{args.pairs}: no such list of pairs; check the path.")


def run(args):
    """Run the command line. Returns the exit code."""
    check_arguments(args)
    from Inference.register_pairs import apply_saved, register_all  # torch takes seconds: report wrong options first

    return apply_saved(args) if args.apply else register_all(args)


def main(argv=None):
    return run_program(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
