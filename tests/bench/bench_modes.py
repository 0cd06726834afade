"""Which of the three modes help each other: trainings with some of them, for equal steps and for equal time.

    python tests/bench/bench_modes.py [--steps 380] [--volumes 38 8] [--modes 123 3 13 23] [--resume]

Hippocampus, as in bench_registration.py: trained on all 38 volumes of ids 1-60 or the first of them, with
Config/config_hippocampus.yaml; the weights (loss.*) of the other modes are 0, which skips those modes. A row is a set
of modes: 3 registration, 13 with diffusion too, 23 with contrastive, 123 all. Each trains for --steps steps, over which
the learning rate falls to zero, and then anew for as long as the row of all three takes. Step times are the 10th
percentile: other programs make steps longer, and nothing makes them shorter. Columns, all on the volumes 201-230, which
no row was trained on:
  dice       20 pairs, network alone, labels by the nearest voxel      folding   % of the voxels of these fields
  ang        mode 1's cosine, -1 is full recovery                      retrieval share of volumes recognised by slices
  augmented  Dice of a segmentation learned from one labelled volume and its copies, drawn with this network's recovery
             towards unlabelled volumes (bench_augment.py, method `towards`), over --subsets choices of that volume
Everything is written immediately, and --resume continues. Once --modes 123 is done for all, several processes may share
--out, each with other --modes or --volumes. The last line is one line of JSON: {volumes: {row: columns}}.
"""
import argparse
import json
import subprocess
import sys
import zlib

from bench_registration import DATA, ROOT, TRAINING, set_words, subjects, write_json
from common import add_shared, in_one_sentence, kept_json, our_commit

from Inference.load_model import find_checkpoint
from OM_train_3modes import MODES
from Report.page import text_table
from Runtime.errors import DONE, InputError
from Supervisor.attempts import read_lines

CONFIG, AUGMENT = ROOT / "Config/config_hippocampus.yaml", ROOT / "tests/bench/bench_augment.py"
KEYS = dict(zip("123", (mode.weights for mode in MODES.values())))  # the weights of each mode by its number
ROWS = ("123", "3", "13", "23", "12", "1", "2")
SHOWN = {"dice": "val_dice", "folding": "val_folding", "ang": "val_ang", "retrieval": "val_retrieval"}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Train with some of the modes only, for equal steps and equal time.")
    parser.add_argument("--steps", type=int, default=380, metavar="N", help="of each training (%(default)s)")
    parser.add_argument("--volumes", type=int, nargs="+", default=[38, 8], metavar="N", help="to train on (38 8)")
    parser.add_argument("--modes", nargs="+", choices=ROWS, default=list(ROWS[:4]), metavar="ROW",
                        help=f"some of {', '.join(ROWS)} (the first four); 123 is the measure of equal time")
    parser.add_argument("--times", nargs="+", choices=("steps", "time"), default=["steps", "time"], metavar="EQUAL",
                        help="equal steps, equal time (both)")
    parser.add_argument("--subsets", type=int, default=4, metavar="N", help="labelled volumes of the column augmented, "
                        "0 leaves it out (%(default)s)")
    add_shared(parser, DATA, "bench_modes", peers=False)
    return parser.parse_args(argv)


def made_by(args):
    """What has to be the same for --resume to take a training, beside its modes, volumes and steps."""
    return [str(args.data), args.threads, args.overrides, our_commit("OM_train_3modes.py", "Runtime")]


def train(modes, volumes, steps, args):
    """Train with some modes on the first volumes: the folder of the run and its last validation.

    One epoch has all steps, so that the learning rate falls to zero within it; the steps are rounded to whole rounds
    through the volumes.
    """
    ids = sorted(subjects(args.data, TRAINING))
    if volumes > len(ids):
        raise InputError(f"--volumes {volumes}: {args.data} has {len(ids)} of ids {TRAINING[0]}-{TRAINING[-1]}.")
    name = f"modes_{modes}_{volumes}_{steps}_{zlib.crc32(json.dumps(made_by(args)).encode()):08x}"
    keys = {"data.root": args.data, "data.cache": "", "data.name": name, "data.expect_samples": 0, "run.val_every": 1,
            "data.train_ids": ",".join(map(str, ids[:volumes])), "data.repeats": max(round(steps / volumes), 1),
            "run.epochs": 1, "run.threads": args.threads, "run.picture_every": 0, "run.models": args.out / "Models",
            "run.logs": args.out / "Logs",
            **{f"loss.{weight}": 0 for mode in set(KEYS) - set(modes) for weight in KEYS[mode]}}
    done = subprocess.run([sys.executable, ROOT / "OM_train_3modes.py", "--config", CONFIG,
                           *([] if args.resume else ["--fresh"]), *set_words(keys, args.overrides)],
                          cwd=ROOT, stdout=sys.stderr)
    if done.returncode != DONE:
        raise InputError(f"the training {name} ended with {done.returncode}; see what it said above.")
    return max((args.out / "Models").glob(f"{name}_om_net*"), key=lambda folder: folder.stat().st_mtime)


def measured(run):
    """Steps, seconds of a step and the last validation of a run."""
    lines = read_lines(run / "rank0.jsonl")
    times = [line["time"] for line in lines if line["event"] == "step"]
    lengths = sorted(b - a for a, b in zip(times, times[1:]))
    if not lengths:
        raise InputError(f"{run}: a training of one step has no length of a step; give more --steps.")
    last = [line for line in lines if line["event"] == "epoch"][-1]
    return {"steps": last["step"], "step_s": lengths[len(lengths) // 10],
            **{shown: last[key] for shown, key in SHOWN.items()}}


def augmented(run, name, args):
    """What the network's copies towards unlabelled volumes are worth to a segmentation of one labelled volume."""
    done = subprocess.run([sys.executable, AUGMENT, "--data", args.data, "--checkpoint", find_checkpoint(run),
                           "--methods", "towards", "--shots", "1", "--subsets", str(args.subsets), "--seeds", "1",
                           "--test-ids", "201-230", "--draws", "16", "--steps", "300", "--threads", str(args.threads),
                           "--resume", "--out", args.out / "augmented" / name], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode != DONE:
        raise InputError(f"bench_augment.py for {name} ended with {done.returncode}; see what it said above.")
    return json.loads(done.stdout.decode().splitlines()[-1])["shots"]["1"]["towards"]


def row(modes, volumes, equal, args, made):
    """The columns of a row; `equal` is "steps", or "time": that of all three modes. made: rows of this run, by name."""
    name = f"{volumes}_{modes}_{equal}"
    if name not in made:
        made[name] = kept_or_new(name, modes, volumes, equal, args, made)
    return made[name]


def kept_or_new(name, modes, volumes, equal, args, made):
    """The columns of a row that --resume finds, or of a new training."""
    path, settings, steps = args.out / f"{name}.json", [args.steps, args.subsets, *made_by(args)], args.steps
    if found := kept_json(path, settings, args.resume):
        return found["columns"]
    if equal == "time":
        own, whole = (row(which, volumes, "steps", args, made) for which in (modes, "123"))
        steps = round(whole["steps"] * whole["step_s"] / own["step_s"])
    run = train(modes, volumes, steps, args)
    columns = measured(run)
    if args.subsets:
        columns["augmented"] = augmented(run, name, args)
    write_json(path, {"settings": settings, "columns": columns})
    return columns


@in_one_sentence
def main(argv=None):
    args, made = parse_arguments(argv), {}
    found = {volumes: {f"{modes}, equal {equal}": row(modes, volumes, equal, args, made)
                       for equal in args.times for modes in args.modes if (equal, modes) != ("time", "123")}
             for volumes in args.volumes}
    for volumes, rows in found.items():
        header = ["modes", *next(iter(rows.values()))]
        print(f"\n{volumes} training volumes, {args.threads} threads\n"
              + text_table(header, [[name, *columns.values()] for name, columns in rows.items()],
                           [None, None, ".2f", ".4f", ".4f", ".3f", ".3f", ".4f"][:len(header)]))
    print(json.dumps(found))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
