"""Is the universal network good enough to ship? On data that it has never seen, compared with --model none and ANTs.

    python tests/bench/bench_universal.py [--model F] [--parts hippocampus mouse inverted] [--out FOLDER]

--model is a file or folder as OM_register.py takes it (default: universal). Three parts, each with the pairs, files,
scores, threads and seconds of another benchmark: `hippocampus`, the 40 test pairs of bench_registration.py; `mouse`,
the six pairs of bench_mouse.py; `inverted`, the ten pairs of bench_multimodal.py --subjects test in which dark is
bright and bright is dark. In each: `identity`, the start; `none`, affine stage and refinement without a network, as in
those benchmarks; `net`, the network alone, and `refine`, the same with refinement, with the roughness weight
(refine.weight) of `none` in each part. The network runs after the affine stage, as without a model. In `inverted`, both
refinements use the similarity `mapped`, and `ants` is antspyx by mutual information, if the peers' environment exists
(.venv-peers, or --peers-python).

NEEDED lists the criteria. A missing or incomplete part meets none. Results are written immediately; --resume continues.
The last line is one line of JSON: means of each part, the criteria met, and whether all are.
"""
import argparse
import itertools
import json
import sys
from pathlib import Path

import bench_mouse
import bench_multimodal
from bench_registration import (
    DATA,
    NO_NETWORK,
    ROOT,
    TEST,
    by_peer,
    identity,
    ours,
    prepare_pairs,
    read_pairs,
    run_methods,
    subjects,
    summary,
    without_network,
    write_json,
)
from common import add_shared, in_one_sentence, our_commit
from peers import begin, peers_python

from Inference.choices import DEFAULTS
from Inference.load_model import find_checkpoint, load_model
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import DONE, STOP, InputError
from Runtime.files import sha256

SHOWN = ("dice", "dice_smooth", "hd95_mm", "folding_percent", "seconds", "seconds_mean", "processor_seconds")


# ---------------------------------------------------------------------------------------------------------------------
# What has to be reached: {name: (part, sentence, function of the part's means by method)}
# ---------------------------------------------------------------------------------------------------------------------

NEEDED = {
    "hippocampus_alone": ("hippocampus", "Dice of the network alone at least 0.70",
                          lambda means: means["net"]["dice"] >= 0.70),
    "hippocampus_refined": ("hippocampus", "Dice with refinement at least 0.76",
                            lambda means: means["refine"]["dice"] >= 0.76),
    "mouse_dice": ("mouse", "Dice with refinement at least 0.880", lambda means: means["refine"]["dice"] >= 0.880),
    "mouse_time": ("mouse", "in at most half the time of --model none",
                   lambda means: means["refine"]["seconds"] <= 0.5 * means["none"]["seconds"]),
    "inverted": ("inverted", "Dice with refinement above ANTs with mutual information",
                 lambda means: means["refine"]["dice"] > means["ants"]["dice"]),
}


def judged(parts, limited):
    """Which of NEEDED are reached: {name: True, False, or None where it was not measured as a whole}.

    parts: {part: {method: means of `summary`}}. limited: whether only some of the pairs were taken.
    """
    found = {}
    for name, (part, _, reached) in NEEDED.items():
        try:
            found[name] = None if limited else bool(reached(parts[part]))
        except KeyError:  # the part or one of its methods is missing
            found[name] = None
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The parts: each gives its pairs, and its methods as {name: (generator, what has to be the same to resume it)}
# ---------------------------------------------------------------------------------------------------------------------

def hippocampus(args, model, out):
    pairs = read_pairs(args.data)[:args.limit]
    pairs = prepare_pairs(subjects(args.data, TEST), pairs, out / "work/volumes", "centre")
    return pairs, with_and_without(args, model, load_config(NO_NETWORK), 100, args.refine)


def mouse(args, model, out):
    brains = bench_mouse.read_brains(args.mouse)
    pairs = list(itertools.permutations(brains, 2))[:args.limit]
    pairs = prepare_pairs(brains, pairs, out / "work/volumes", "header")
    methods = with_and_without(args, model, load_config(DEFAULTS), 60, args.mouse_refine, warm_up=False)
    return pairs, methods


def inverted(args, model, out):
    every = bench_multimodal.EACH
    asked = argparse.Namespace(data=args.data, subjects="test", remaps=["inverted"], pairs=every, out=out)
    pairs = bench_multimodal.make_pairs(asked)[:args.limit]
    methods = with_and_without(args, model, load_config(NO_NETWORK), 100, args.refine, similarity="mapped")
    if args.peers_python or (ROOT / ".venv-peers/.ready").exists():
        python, folder = peers_python(args.peers_python), out / "work/ants"
        methods["ants"] = by_peer(*bench_multimodal.PEERS["ants"], folder, python, args.threads)
    else:
        print("inverted: ants is left out, as there is no .venv-peers; name an interpreter by --peers-python, or run "
              "bench_multimodal.py once, which makes it.", file=sys.stderr)
    return pairs, methods


PARTS = {"hippocampus": hippocampus, "mouse": mouse, "inverted": inverted}


def with_and_without(args, model, cfg, steps, refine, **more):
    """Methods of a part: the start, --model none with `steps` of refinement, the network alone, and with `refine`.

    model: (path, what `load_model` returned). cfg: of --model none. more: arguments of `register` for all.
    """
    path, (net, own) = model
    loaded = net, {**own, "refine.weight": cfg["refine.weight"]}
    by_net = {"threads": args.threads, **more, "weights": sha256(path), "config": loaded[1], "affine": True,
              "commit": our_commit()}
    return {"identity": (identity, {}),
            "none": without_network(args.threads, steps, cfg, **more),
            "net": (lambda pairs: ours(pairs, loaded, True, 0, **more), by_net),
            "refine": (lambda pairs: ours(pairs, loaded, True, refine, **more), {**by_net, "refine": refine})}


def run_part(name, model, args):
    """Means of each method of a part, {} where its data are missing, and sentences about what went wrong."""
    out = args.out / name
    try:
        pairs, methods = PARTS[name](args, model, out)
    except InputError as error:
        print(f"error: {name} is missing: {error}", file=sys.stderr)
        return {}, [str(error)]
    shared = argparse.Namespace(out=out, resume=args.resume)
    results, failed = run_methods(methods, methods.get, pairs, shared)
    means = {method: {key: summary(scores)[key] for key in SHOWN} for method, scores in results.items()}
    rows = [[method, *mean.values()] for method, mean in means.items()]
    print(f"{name}, {len(pairs)} pairs\n" + text_table(["method", *SHOWN], rows, [None, *[".4f"] * len(SHOWN)]) + "\n")
    return means, failed


# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="The universal network on data that it has never seen.")
    parser.add_argument("--model", default="universal", help="checkpoint, .safetensors file or run folder "
                        "(%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME",
                        help=f"some of {', '.join(PARTS)} (all)")
    parser.add_argument("--refine", type=int, default=100, metavar="N", help="steps of refinement after the network on "
                        "hippocampus pairs (%(default)s, as without a network)")
    parser.add_argument("--mouse-refine", type=int, default=20, metavar="N", help="and on mouse brains, where 60 are "
                        "taken without a network (%(default)s)")
    parser.add_argument("--mouse", type=Path, default=bench_mouse.DATA, metavar="FOLDER",
                        help="the mouse brains (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N pairs of each part: "
                        "then nothing counts as reached")
    add_shared(parser, DATA, "bench_universal")
    return parser.parse_args(argv)


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    begin(args.threads)
    path = find_checkpoint(args.model)
    model = path, load_model(path, overrides=args.overrides)
    found = {name: run_part(name, model, args) for name in args.parts}
    parts = {name: means for name, (means, _) in found.items()}
    reached = judged(parts, args.limit is not None)
    for name, (part, sentence, _) in NEEDED.items():
        print(f"{part}: {sentence}: {({True: 'yes', False: 'no', None: 'not measured'})[reached[name]]}")
    result = {"model": str(path), "sha256": sha256(path), "parts": parts, "reached": reached,
              "ship": all(value is True for value in reached.values())}
    write_json(args.out / "results.json", result)
    print(json.dumps(result))
    return STOP if any(failed for _, failed in found.values()) else DONE


if __name__ == "__main__":
    sys.exit(main())
