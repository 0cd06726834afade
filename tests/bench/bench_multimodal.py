"""Registration across modalities: hippocampus pairs whose intensities are remapped, ours beside ANTs and elastix.

    python tests/bench/bench_multimodal.py [--subjects test] [--pairs N] [--remaps NAME...] [--methods NAME...]

Six remappings (remappings.py) with ten pairs each, drawn from the volumes 201-230, or 231-280 with --subjects test. All
methods get the same files. Ours is affine stage and refinement without a network: `ours` with --similarity mapped,
`ours_mind` with mind, and `ours_correlation` with the similarity of one modality, to show the difference. The peers, in
.venv-peers as in bench_registration.py: antspyx (affine stage and SyN, both by mutual information) and elastix (affine
stage and B-splines, both by mutual information; always in one thread, as it crashes with two, whatever --threads says).
`identity` is the start. Scores and times are those of bench_registration.py: the field of each method warps the labels,
for `dice` by the nearest voxel and for `dice_smooth` smoothed; times are wall-clock and CPU seconds. Results are
written immediately; --resume continues. A table of the remappings goes to stderr. The last line is one line of JSON.
"""
import argparse
import sys

from bench_registration import (
    DATA,
    NO_NETWORK,
    TEST,
    VALIDATION,
    by_peer,
    draw_pairs,
    identity,
    prepare_pairs,
    publish,
    run_methods,
    subjects,
    without_network,
)
from common import add_shared, in_one_sentence
from peers import begin, peers_python
from remappings import REMAPPINGS, remap

from Dataloader.grids import intensity_range, rescale
from Dataloader.nifti import read_volume, write_volume
from Diffusion.metrics import average
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import DONE, STOP, InputError

PEERS = {  # name: the method of peers.py and its options, the best of a few on pairs of the volumes 201-230
    # Both stages by mutual information. Dice of twelve pairs 0.68; with a rigid stage before 0.67; from the centres of
    # mass, its default, which remapped intensities move, 0.65; and with its default iterations, which leave the finest
    # grid out, 0.62.
    "ants": ("ants", {"type_of_transform": "SyN", "reg_iterations": [100, 70, 50, 20], "from_start": True}),
    # Its default maps with a finer grid than their 10 mm: Dice 0.785 instead of 0.777 on two pairs. Without the penalty
    # on bending 0.779 in a seventh of the time, with folding in 0.9 % of the voxels; a rigid stage, and twice the
    # samples and iterations, changed little.
    "elastix": ("elastix", {"stages": [{"map": "affine", "resolutions": 3, "parameters": {}},
                                       {"map": "bspline", "resolutions": 3, "spacing_mm": 6.0, "parameters": {}}]}),
}
OURS = {"ours": "mapped", "ours_mind": "mind", "ours_correlation": "correlation"}  # by what register() compares
METHODS = ("identity", *OURS, *PEERS)
SUBJECTS = {"tuning": VALIDATION, "test": TEST}
EACH = 10  # pairs of a remapping


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------

def choose_pairs(volumes, remaps, count):
    """[(remapping, fixed, moving)]: the first `count` of the ten pairs that each remapping has for its own."""
    drawn = draw_pairs(volumes, EACH * len(REMAPPINGS))
    chosen = []
    for number, name in enumerate(REMAPPINGS):
        if name in remaps:
            own = drawn[EACH * number:EACH * (number + 1)]
            chosen += [(name, fixed, moving) for fixed, moving in own[:count]]
    return chosen


def write_remapped(volumes, chosen, folder):
    """Files of both volumes of each pair, remapped: as `volumes` and `pairs` of `prepare_pairs`."""
    remapped, pairs = {}, []
    for name, fixed, moving in chosen:
        arrays, affines = zip(*(read_volume(volumes[number][0]) for number in (fixed, moving)))
        arrays = [rescale(array, *intensity_range(array)) for array in arrays]
        key = f"{moving}_to_{fixed}"
        names = [f"{name}_{key}_{part}" for part in ("fixed", "moving")]
        for file_name, array, affine, number in zip(names, remap(name, *arrays, key), affines, (fixed, moving)):
            path = folder / f"{file_name}.nii.gz"
            write_volume(path, array, affine)
            remapped[file_name] = path, volumes[number][1]
        pairs.append(tuple(names))
    return remapped, pairs


def make_pairs(args):
    """The pairs of the command line as `run_methods` takes them, with the key `remap`.

    Raises InputError where the data folder lacks the volumes.
    """
    volumes = subjects(args.data, SUBJECTS[args.subjects])
    chosen = choose_pairs(volumes, args.remaps, args.pairs)
    if len(chosen) < len(args.remaps) * args.pairs:
        raise InputError(f"{args.data}: {len(volumes)} volumes of {args.subjects} there give too few pairs; give the "
                         "folder of the hippocampus data, with imagesTr and labelsTr, by --data.")
    remapped, names = write_remapped(volumes, chosen, args.out / "work/remapped")
    pairs = prepare_pairs(remapped, names, args.out / "work/volumes", "centre")
    return [{**pair, "name": f"{name}: {moving} to {fixed}", "remap": name}
            for pair, (name, fixed, moving) in zip(pairs, chosen)]


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------

def by_remapping(results, pairs):
    """Header and rows of mean Dice: a row for each remapping and one for all, a column for each method and way."""
    remaps = [pair["remap"] for pair in pairs]
    header, columns = ["remapping", "pairs"], []
    for name, scores in results.items():
        for key, way in (("dice", ""), ("dice_smooth", ", smooth")):
            header.append(name + way)
            columns.append([entry[key] for entry in scores])
    rows = [[name, remaps.count(name), *(average([value for value, each in zip(column, remaps) if each == name])
                                         for column in columns)] for name in dict.fromkeys(remaps)]
    return header, [*rows, ["all", len(pairs), *map(average, columns)]]


# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Registration across modalities: this project, ANTs and elastix.")
    parser.add_argument("--subjects", choices=SUBJECTS, default="tuning", help="tuning: volumes 201-230, by which "
                        "settings may be chosen; test: 231-280 (%(default)s)")
    parser.add_argument("--pairs", type=int, choices=range(1, EACH + 1), default=EACH, metavar="N",
                        help="of each remapping, 1 to %(default)s (%(default)s)")
    parser.add_argument("--remaps", nargs="+", choices=REMAPPINGS, default=list(REMAPPINGS), metavar="NAME",
                        help=f"some of {', '.join(REMAPPINGS)} (all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME",
                        help=f"some of {', '.join(METHODS)} (all)")
    parser.add_argument("--refine", type=int, default=100, metavar="N", help="steps of our refinement (%(default)s)")
    add_shared(parser, DATA, "bench_multimodal")
    return parser.parse_args(argv)


def method_of(name, args, python):
    """(generator of a method, what has to be the same to resume it)."""
    if name == "identity":
        return identity, {}
    if name in OURS:
        cfg = load_config(NO_NETWORK, args.overrides)
        return without_network(args.threads, args.refine, cfg, similarity=OURS[name])
    return by_peer(*PEERS[name], args.out / "work" / name, python, args.threads)


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    begin(args.threads)
    pairs = make_pairs(args)
    python = peers_python(args.peers_python) if set(args.methods) & set(PEERS) else None
    names = [name for name in METHODS if name in args.methods]
    results, failed = run_methods(names, lambda name: method_of(name, args, python), pairs, args)
    if results:
        header, rows = by_remapping(results, pairs)
        text = text_table(header, rows, [None, None, *[".4f"] * (len(header) - 2)])
        print(f"\nmean Dice of each remapping\n{text}\n", file=sys.stderr)
        publish(results, args.out, tuple(OURS), {"pairs": len(pairs)})
    print("\n".join(failed), file=sys.stderr)
    return STOP if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
