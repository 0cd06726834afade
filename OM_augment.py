"""Deformed copies of labelled images: for each draw the image, its label and the field.

    python OM_augment.py --data Data/hippocampus --ids 1-60 --model none --config Config/config_hippocampus.yaml --out A
    python OM_augment.py --image I.nii.gz --label L.nii.gz --model Models/hippocampus_om_net --out A --draws 32
    python OM_augment.py --image I.nii.gz --model CKPT --target F.nii.gz --slices 3 --out A
    python OM_augment.py --data Labelled --model CKPT --target Data/hippocampus --out A
    python OM_augment.py --data Labelled --model none --target Data/hippocampus --register --out A

With --model none copies are random deformations only. A network undoes what it can of them, which leaves a shape that
it considers likely. With --target it pulls the image towards the target; if --target is a data set, each draw uses
another of its volumes. With --register nothing is random: each copy is the volume registered to one of the targets. A
draw depends only on the seed, the id of the volume, the number of the draw and the targets. The output folder is a data
set for training: dataset.json lists the draws. After a kill, run the same command again to continue. Exit codes: 0
done, 43 bad input (the other volumes are done).
"""
import Runtime  # noqa: F401  first: an outdated Python stops here with one sentence

# isort: split
import argparse
import sys

from Inference.choices import DEFAULTS, DRAWS, LABELS, STEPS, STRIDE
from Runtime.errors import InputError, parse_options, run_program


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Write deformed copies of images with their labels and fields.")
    parser.add_argument("--image", help="one volume, in any format that OmniMorph reads")
    parser.add_argument("--label", help="its label image")
    parser.add_argument("--data", help="instead of --image, many volumes: a folder with dataset.json, a .json or "
                        ".csv list, or a folder of volumes")
    parser.add_argument("--ids", default="", help='volumes of --data to take, such as "1-60,75" (default: all)')
    parser.add_argument("--model", required=True, help="checkpoint, .safetensors file, run folder or hf:OWNER/NAME of "
                        "a model hub; universal: the network for any volumes; none: random deformations without a "
                        "network")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the copies go")
    parser.add_argument("--nnunet", metavar="NAME", help="also write originals and copies as a data set of nnU-Net "
                                                         "v2, such as Dataset501_Brains; X_0000 and X_0001 then get "
                                                         "the same deformation, as channels of X")
    parser.add_argument("--draws", type=int, help=f"copies of each volume ({DRAWS}; with --register, one for "
                        "each other volume of --target)")
    parser.add_argument("--start", metavar="T", help="time of the random deformation (larger is stronger), a range "
                        "such as 40-79, or 48+2: 48, and 2 more in every other copy (default: copies.start of the "
                        "config, usually the largest)")
    parser.add_argument("--target", help="volume towards which the network deforms; or a folder or list of volumes, "
                        "as for --data, from which each draw takes a random one, never the volume itself")
    parser.add_argument("--register", type=int, nargs="?", const=STEPS, metavar="STEPS",
                        help="with --target: register the volume to the target, so that the copy has its shape and "
                        "grid, by affine alignment, the network if given, and this many refinement steps "
                        f"({STEPS})")
    parser.add_argument("--condition", choices=("slice", "volume", "none"), help="what the network sees of the target "
                        "(default: what it was trained with)")
    parser.add_argument("--slices", type=int, default=0, help="number of planes of the target that the network sees "
                        "(default: a random number, as in training)")
    parser.add_argument("--stride", type=int, help="how many diffusion times a recovery step covers; 1 is finest "
                        f"and slowest ({STRIDE}; not with copies.recover published)")
    parser.add_argument("--labels", choices=LABELS, default="nearest", help="how labels and masks of whole "
                        "numbers are warped: nearest, the label of the nearest voxel, or smooth (each one slightly "
                        "smoothed and sampled linearly, the largest wins; makes thin structures thinner) "
                        "(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of processes on a CPU, each with "
                        "one thread (%(default)s)")
    parser.add_argument("--config", help="with --model none: config with the diffusion.*, copies.* and data.* keys "
                        f"(default: Config/{DEFAULTS.name})")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys, e.g. --set diffusion.v_scale=6e-5 data.window='[-100, 300]'")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, xpu or auto, for the network (%(default)s)")
    return parse_options(parser, argv)


def check_arguments(args):
    """Raise InputError for options that are wrong or do not fit together, before any file is read."""
    wrong = [
        (bool(args.image) == bool(args.data), "give either --image or --data."),
        (args.label and not args.image, "--label needs --image; with --data the list names the labels."),
        (args.ids and not args.data, "--ids needs --data; leave it out for a single --image."),
        (args.draws is not None and args.draws < 1, f"--draws {args.draws}: at least 1 copy is needed."),
        (args.workers < 1, f"--workers {args.workers}: at least 1 process is needed."),
        (args.stride is not None and args.stride < 1,
         f"--stride {args.stride}: the recovery goes at least 1 time on in each step."),
        (args.slices < 0, f"--slices {args.slices}: give a number of planes, or 0 for a random one."),
        (args.model != "none" and args.config,
         "--config is for --model none; a model has its own config, whose keys --set changes."),
        (args.register is not None and not args.target, "--register: name the volumes to register to by --target."),
        (args.register is not None and args.register < 0,
         f"--register {args.register}: the number of steps must be 0 or more."),
        (args.register is not None and (args.start or args.condition or args.slices), "--register makes no random "
         "deformation and uses the whole target: leave out --start, --condition and --slices."),
        (args.model == "none" and args.target and args.register is None,
         "--target: only a network can deform an image towards a target; give a --model, or --register."),
        (not args.target and args.condition not in (None, "none"),
         f"--condition {args.condition} needs a --target; give one."),
        (args.slices and not args.target, "--slices needs a --target, whose planes the network sees; give one."),
        (args.stride is not None and (args.model == "none" or args.register is not None),
         "--stride: only a network that recovers takes steps; leave it out, or give a --model without --register."),
        (args.target and args.condition == "none",
         "--target: with --condition none the target is not used; leave out one of the two."),
    ]
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise InputError(sentence)


def run(args):
    """Run the command line. Returns the exit code."""
    check_arguments(args)
    import torch  # it takes seconds: report wrong options first

    from Inference.augment_volumes import augment_all
    threads = torch.get_num_threads()
    try:
        return augment_all(args)
    finally:
        torch.set_num_threads(threads)  # the draws have one


def main(argv=None):
    return run_program(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
