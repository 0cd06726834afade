"""Segment a volume by a few labelled ones: what their labels, brought to it one by one, say in each voxel.

    python OM_register.py --pairs pairs.json --out Results/atlases
    python Scripts/vote_labels.py --labels Results/atlases/*/warped_label.nii.gz --out Results/label.nii.gz

pairs.json pairs each labelled volume, as "moving" with its "moving_label", with the new one, as "fixed". All label
maps are on the grid of the new volume. In each voxel the label that most of them have wins; votes are smoothed by half
a voxel, so that the surroundings decide where as many say one thing as another, and single voxels give way.
--agreement writes the share of the maps that have the winner: low where a person should look. --truth scores the
result, and each map by itself. Exit codes: 0 done, 43 bad input.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import Runtime  # noqa: E402, F401  before what is not of the standard library: a Python that is too old ends here, in one sentence

# isort: split
import numpy as np  # noqa: E402

from Dataloader.grids import require_same_grid  # noqa: E402
from Dataloader.nifti import read_label, read_raw_header, require_volume_name, write_volume  # noqa: E402
from Diffusion.metrics import average, dice  # noqa: E402
from Inference.labels import vote  # noqa: E402
from Inference.results import read_results  # noqa: E402
from Runtime.errors import DONE, STOP, InputError, parse_options  # noqa: E402
from Runtime.page import text_table  # noqa: E402


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Let the label maps that several labelled volumes brought to one "
                                     "volume vote in each of its voxels.")
    parser.add_argument("--labels", nargs="+", required=True, metavar="FILE", help="the label maps, two or more, on "
                        "one grid, such as the files warped_label.nii.gz of OM_register.py")
    parser.add_argument("--out", required=True, metavar="FILE", help="the label map that wins")
    parser.add_argument("--agreement", metavar="FILE", help="the share of the maps that have it, an image of 0 to 1")
    parser.add_argument("--truth", metavar="FILE", help="label map of the volume, on the same grid, to score by")
    parser.add_argument("--dims", type=int, choices=(2, 3), default=3, help="axes of the maps (%(default)s)")
    return parse_options(parser, argv)


def read_on_one_grid(paths, dims):
    """The label maps (*size) int16 of these files, and the affine of the first one."""
    first, affine = read_label(paths[0], dims)
    maps = [first]
    for path in paths[1:]:
        label, other = read_label(path, dims)
        require_same_grid(f"{path}: the label map", label.shape, other, paths[0], first.shape, affine,
                          "bring all of them to the same fixed volume")
        maps.append(label)
    return maps, affine


def fixed_volume(path):
    """The fixed volume of the registration that wrote a label map, as its results.json has it, or None."""
    folder = Path(path).resolve().parent
    for place in (folder, folder.parent):
        for row in read_results(place)["pairs"].values():
            if Path(row["folder"]).resolve() == folder:
                return row.get("fixed")
    return None


def require_one_volume(paths):
    """Raise InputError where label maps were brought to different volumes: equal grids do not make them one subject.

    Returns: whether the results of OM_register.py beside all of them tell which volume that is.
    """
    targets = {path: fixed_volume(path) for path in paths}
    known = {target: path for path, target in targets.items() if target}
    if len(known) > 1:
        (one, first), (other, second) = sorted(known.items())[:2]
        raise InputError(f"{second}: brought to {other}, while {first} was brought to {one}; let maps of one volume "
                         "vote, such as Results/atlases/*_to_NAME/warped_label.nii.gz.")
    return None not in targets.values()


def scores(named, truth):
    """Dice of each label of the truth, and their mean, for each (name, map): titles and rows of a table."""
    values = [int(value) for value in np.unique(truth) if value]
    rows = []
    for name, label in named:
        found = dice(label, truth, values)
        rows.append([name, *found, average(found)])
    return ["", *(f"label {value}" for value in values), "mean"], rows


def main(argv=None):
    args = parse_arguments(argv)
    try:
        if len(args.labels) < 2:
            raise InputError(f"--labels: {args.labels[0]} alone has nobody to vote with; name two label maps or more.")
        known = require_one_volume(args.labels)
        for path in filter(None, (args.out, args.agreement)):
            require_volume_name(path)
        maps, affine = read_on_one_grid([*args.labels, *([args.truth] if args.truth else [])], args.dims)
        truth = maps.pop() if args.truth else None
        winner, agreement = vote(maps)
        header = read_raw_header(args.labels[0])
        write_volume(args.out, winner, affine, header)
        if args.agreement:
            write_volume(args.agreement, agreement, affine, header)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    if not known:
        print("warning: not all label maps lie where OM_register.py wrote them, so nothing tells whether they are of "
              "one volume", file=sys.stderr)
    if truth is not None:
        titles, rows = scores([("the vote", winner), *zip(args.labels, maps)], truth)
        print(text_table(titles, rows, [None, *[".3f"] * (len(titles) - 1)]))
    share = f", and {100 * agreement[winner != 0].mean():.0f} % of the maps agree there" if winner.any() else ""
    print(f"{args.out}: {np.count_nonzero(winner)} voxels have a label by the vote of {len(maps)} maps{share}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
