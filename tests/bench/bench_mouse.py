"""Mouse brains without any training: this project's affine stage and refinement against antspyx SyN with correlation.

    python tests/bench/bench_mouse.py [--refine N] [--out FOLDER]

Three brains (112 x 128 x 80 voxels of 0.15 mm, 37 labels) in different positions, registered in all six orders. Ours is
what `OM_register.py --model none --affine --refine N` does. The peers are antspyx SyN with local correlation of radius
2, iterations 40/20/5, and Greedy with local correlation, each after its own affine stage. Files, scores, threads and
seconds are as in bench_registration.py; there is no warm-up pair, because start-up is negligible in runs of minutes.
The last line is one line of JSON.
"""
import argparse
import itertools
import sys

from bench_registration import PEERS, ROOT, by_peer, prepare_pairs, publish, run_method, without_network
from common import add_shared, in_one_sentence
from peers import begin, peers_python

from Inference.choices import DEFAULTS
from Runtime.config import load_config
from Runtime.errors import DONE, InputError

DATA, BESIDE = ROOT.parent / "shared/data/mouse", ("antspyx_syn_cc", "greedy")


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Registration of mouse brains: this project and antspyx SyN-CC.")
    parser.add_argument("--methods", nargs="+", choices=("refine", *BESIDE), default=("refine", *BESIDE),
                        metavar="NAME", help=f"some of refine, {', '.join(BESIDE)} (all)")
    parser.add_argument("--refine", type=int, default=60, metavar="N", help="steps of our refinement (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N pairs")
    add_shared(parser, DATA, "bench_mouse")
    return parser.parse_args(argv)


def read_brains(data):
    """{name: (image, label)}. Raises InputError where there are fewer than two."""
    found = {path.name.removesuffix(".nii.gz"): (path, data / "labelsTr" / path.name)
             for path in sorted((data / "imagesTr").glob("*.nii.gz"))}
    if len(found) < 2:
        raise InputError(f"{data}: {len(found)} mouse brains there, and a pair needs two; give the folder of imagesTr "
                         "and labelsTr by --data.")
    return found


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    begin(args.threads)
    brains, cfg = read_brains(args.data), load_config(DEFAULTS, args.overrides)
    pairs = list(itertools.permutations(brains, 2))[:args.limit]
    pairs = prepare_pairs(brains, pairs, args.out / "work/volumes", "header")
    python = peers_python(args.peers_python) if set(args.methods) & set(BESIDE) else None
    results = {}
    for name in args.methods:
        if name == "refine":
            method, settings = without_network(args.threads, args.refine, cfg, warm_up=False)
        else:
            folder = args.out / "work" / name
            method, settings = by_peer(*PEERS[name], folder, python, args.threads, warm_up=False)
        results[name] = run_method(name, method, pairs, args.out / f"{name}.json", settings, args.resume)
    publish(results, args.out, ("refine",))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
