"""Registration of hippocampus pairs: this project and its alternatives, on the same pairs in one run.

    python tests/bench/bench_registration.py [--train-minutes 40 | --checkpoint F] [--vxm-minutes 40 | --vxm-weights F]

No training and no choice of settings has seen the volumes of the 40 ordered pairs in hippocampus_pairs.json. Ours:
`net`, the network alone, trained only in mode 3, in three rounds; `quick` and `refine`, the same in two rounds, with
ten and with thirty steps of refinement; `refine_none`, affine stage and refinement (--refine) without a network;
`labels`, a network alone, trained with the labels of its volumes; `labels_few`, one trained with the labels of five;
`labels_refine` and `labels_few_refine`, the same with twenty steps, which use no labels except the network's own
segmentation. `universal` is the network of --model universal, which has never seen a hippocampus, after the affine
stage and with --refine. Peers, in an environment of their own (.venv-peers, made here from requirements-peers.txt):
antspyx (affine, SyN, and SyN with local correlation of radius 2 and iterations 40/20/5), Greedy with local correlation
after its affine stage, DIPY's SyN with local correlation after its affine pipeline, ConvexAdam, and a VoxelMorph U-Net
trained for as long on the same volumes. All get the same files (intensities 0 to 1, headers kept) and the same number
of threads. Those without an affine stage start with the volumes' centres aligned, as in `identity`; the others find
their own start. The field of each method warps the labels in both modes of --labels: `dice` and HD95 use the nearest
voxel, `dice_smooth` the smooth mode; all are means over both labels. Folding is that of the whole transform on the
fixed grid (an affine part changes no sign). Seconds run from images in memory to the transform, after one warm-up pair.
Results are written immediately; --resume continues. The last line is one line of JSON.
"""
import argparse
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from common import ROOT, add_shared, in_one_sentence, kept_json, our_commit
from peers import begin, clocks, peer, peers_python, spent, start_peer, write_json
from scipy.stats import wilcoxon
from tqdm import tqdm

from Dataloader.grids import intensity_range, rescale
from Dataloader.nifti import read_header, read_label, read_volume, write_volume
from Diffusion.fields import then_affine
from Diffusion.metrics import average, dice, folding_percent, hd95
from Inference.labels import apply_label
from Inference.load_model import UNIVERSAL, find_checkpoint, load_model
from Inference.registration import register, start_matrix
from Report.page import text_table
from Runtime import checkpoint
from Runtime.config import load_config
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError
from Runtime.files import sha256
from Supervisor.attempts import read_lines

LIST, DATA = Path(__file__).parent / "hippocampus_pairs.json", ROOT.parent / "shared/data/hippocampus"
TRAINING, VALIDATION, TEST = range(1, 61), range(201, 231), range(231, 281)
SYN_CC = {"type_of_transform": "SyN", "syn_metric": "CC", "syn_sampling": 2, "reg_iterations": [40, 20, 5]}
PEERS = {  # name: the method of peers.py and its options
    "antspyx_affine": ("ants", {"type_of_transform": "Affine"}),
    "antspyx_syn": ("ants", {"type_of_transform": "SyN"}),
    "antspyx_syn_cc": ("ants", SYN_CC),
    # Twelve degrees of freedom, at once or after the rigid stage, lose a fifth of the pairs of the validation ids.
    "greedy": ("greedy", {"affine": ["-dof 6 -m NCC 2x2x2 -n 100x50x10"], "deformable": "-m NCC 2x2x2 -n 100x100x50"}),
    "dipy_syn_cc": ("dipy", {"metric": "CC"}),
    # Its defaults. On pairs of the validation ids weaker regularisation gave the same Dice and much more folding.
    "convexadam": ("convexadam", {"grid_sp": 6, "disp_hw": 4, "grid_sp_adam": 2}),
    "voxelmorph": ("voxelmorph", {}),
}
NO_NETWORK = ROOT / "Config/config_hippocampus.yaml"  # whose refine.* are taken where there is no network
LABELS, FEW = ROOT / "Config/config_hippocampus_labels.yaml", ("data.label_ids=1-7", "data.labelled_pairs=0.5")
# Our trainings, all of mode 3 alone: name: config, overrides, option with the checkpoint of an earlier one.
TRAININGS = {"net": (ROOT / "Config/config_hippocampus_registration.yaml", (), "checkpoint"),
             "labels": (LABELS, (), "labels_checkpoint"),
             "labels_few": (LABELS, FEW, "few_labels_checkpoint")}
# The training whose network a method takes, and its steps of refinement; `quick` takes as long as Greedy.
NETWORKS = {"net": ("net", 0), "quick": ("net", 10), "refine": ("net", 30), "labels": ("labels", 0),
            "labels_refine": ("labels", 20), "labels_few": ("labels_few", 0), "labels_few_refine": ("labels_few", 20)}
NET_ROUNDS = 3  # of the method net, where --set names no others: with refinement ten steps find more than a third round
OURS = (*NETWORKS, "refine_none", "universal")
METHODS = ("identity", *PEERS, *OURS)
FEATURES = [16] * 5, [16, 32, 32, 32]  # the default of VxmPairwise; four levels of the first paper's widths
VXM_SETTINGS = [{"nb_features": features, "integration_steps": 5, "lr": lr, "weight": weight} for features, lr, weight
                in ((FEATURES[0], 1e-3, 1.0), (FEATURES[0], 1e-3, 0.3), (FEATURES[1], 1e-3, 1.0),
                    (FEATURES[1], 1e-3, 0.3), (FEATURES[0], 1e-4, 1.0))]


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------

def subjects(data, ids):
    """{id: (image, label)} of those ids that are in the data folder."""
    found = {int(re.search(r"_(\d+)\.nii", path.name)[1]): (path, data / "labelsTr" / path.name)
             for path in sorted((data / "imagesTr").glob("hippocampus_*.nii.gz"))}
    return {number: paths for number, paths in found.items() if number in ids}


def draw_pairs(ids, count, seed=0, apart=5):
    """Ordered pairs (fixed, moving) of ids more than `apart` apart: neighbouring ids are often one person."""
    pairs = sorted((fixed, moving) for fixed in ids for moving in ids if abs(fixed - moving) > apart)
    return random.Random(seed).sample(pairs, min(count, len(pairs)))


def read_pairs(data):
    """The committed pairs. Raises InputError where the data folder holds other volumes than those they came from."""
    if not (data / "imagesTr").is_dir():
        raise InputError(f"{data}: no hippocampus data there; give the folder of imagesTr and labelsTr by --data.")
    pairs = [tuple(pair) for pair in json.loads(LIST.read_text())["pairs"]]
    if pairs != draw_pairs(subjects(data, TEST), len(pairs)):
        raise InputError(f"{LIST}: these are not the pairs that are drawn from the volumes in {data}; take the data "
                         "set that the list was made from.")
    return pairs


def write_normalised(volumes, folder):
    """Copies with intensities 0 to 1. volumes: {name: (image, label)}. Returns: {name: path}."""
    files = {name: str(folder / f"{name}.nii.gz") for name in volumes}
    for name, (image, _) in volumes.items():
        array, affine = read_volume(image)
        write_volume(files[name], rescale(array, *intensity_range(array)), affine)
    return files


def prepare_pairs(volumes, pairs, folder, start):
    """Files of each pair (fixed, moving), for every method the same: list of dicts of name, paths and start.

    start: "header" or "centre" of the fields of view, to the next whole voxel, so that nothing is interpolated for it.
    """
    files = write_normalised({name: volumes[name] for pair in pairs for name in pair}, folder)
    prepared = []
    for fixed, moving in pairs:
        (shape, affine), (moving_shape, moving_affine) = (read_header(files[name]) for name in (fixed, moving))
        matrix = start_matrix(start, shape, affine, moving_shape, moving_affine)
        change = np.linalg.inv(moving_affine) @ matrix @ affine
        change[:3, 3] = np.round(change[:3, 3]) if start == "centre" else change[:3, 3]
        prepared.append({"name": f"{moving} to {fixed}", "fixed": files[fixed], "moving": files[moving],
                         "fixed_label": str(volumes[fixed][1]), "moving_label": str(volumes[moving][1]),
                         "start": (moving_affine @ change @ np.linalg.inv(affine)).tolist()})
    return prepared


# ---------------------------------------------------------------------------------------------------------------------
# Methods: each yields field, label on the fixed grid and seconds (of the clock, of processors) for the pairs in turn
# ---------------------------------------------------------------------------------------------------------------------

def identity(pairs):
    """The start itself."""
    for pair in pairs:
        fixed, fixed_affine = read_label(pair["fixed_label"])
        change = np.linalg.inv(fixed_affine) @ pair["start"] @ fixed_affine
        still = torch.zeros(1, 3, *fixed.shape)
        yield then_affine(still, change)[0].numpy(), None, (0.0, 0.0)


def ours(pairs, model, affine=False, refine=0, config=None, warm_up=True, **more):
    """register() of this project. model: (net, config), or None and a config. more: of its other arguments."""
    for number, pair in enumerate(pairs[:1] * warm_up + pairs):
        fixed, moving = read_volume(pair["fixed"]), read_volume(pair["moving"])
        started = clocks()
        found = register(fixed, moving, model=model, affine=affine, refine=refine, start=pair["start"], config=config,
                         device="cpu", **more)
        seconds = spent(started)
        if number or not warm_up:
            yield found.field, None, seconds


def without_network(threads, steps, cfg, **more):
    """Affine stage and refinement without a network: generator, and what has to be the same to resume it."""
    return (lambda pairs: ours(pairs, None, True, steps, cfg, **more),
            {"refine": steps, "config": cfg, "threads": threads, "commit": our_commit(), **more})


def by_peer(kind, options, folder, python, threads, **more):
    """A method of peers.py: generator, and what has to be the same to resume it."""
    return (lambda pairs: peer(pairs, kind, options, folder, python, threads, **more),
            {"options": options, "threads": threads})


# ---------------------------------------------------------------------------------------------------------------------
# Training: ours and VoxelMorph, on the volumes 1-60 without labels
# ---------------------------------------------------------------------------------------------------------------------

def set_words(keys, overrides=()):
    """The words of a command line that set keys of a config. overrides: "key=value" that come after these."""
    settings = [*(f"{key}={value}" for key, value in keys.items()), *overrides]
    return [word for setting in settings for word in ("--set", setting)]


def train_ours(name, minutes, data, out, threads):
    """One of TRAININGS with as many epochs as that many minutes hold: the path of its checkpoint.

    The learning rate falls to zero in the last of run.epochs, so a short first run finds out how many there is time
    for. It counts, and so does everything else: what is not done when the minutes are over is cut off.
    """
    began, (config, overrides, _) = time.time(), TRAININGS[name]
    keys = {"data.root": data, "data.name": f"hippocampus_{name}", "data.cache": "", "run.models": out / "Models",
            "run.logs": out / "Logs", "run.threads": threads}

    def train(**more):
        left = str(max(60 * minutes - (time.time() - began), 1))
        done = subprocess.run([sys.executable, ROOT / "OM_train_3modes.py", "--config", config, "--fresh",
                               "--max-seconds-before-restart", left, *set_words({**keys, **more}, overrides)],
                              cwd=ROOT, stdout=sys.stderr)
        if done.returncode not in (DONE, PLANNED_RESTART):
            raise InputError(f"the training ended with {done.returncode}; see what it said above.")
        return max((out / "Models").glob(f"hippocampus_{name}_om_net*"), key=lambda folder: folder.stat().st_mtime)

    lines = read_lines(train(**{"run.epochs": 1, "data.repeats": 1}) / "rank0.jsonl")
    steps, epoch = ([line["time"] for line in lines if line["event"] == kind] for kind in ("step", "epoch"))
    step = (steps[-1] - steps[len(steps) // 3]) / (len(steps) - 1 - len(steps) // 3)
    cfg = load_config(config, overrides)
    per_epoch = -(-len(subjects(data, TRAINING)) * cfg["data.repeats"] // cfg["data.batchsize"])
    seconds = per_epoch * step + (epoch[-1] - steps[-1]) / cfg["run.val_every"] + 1.0  # and a checkpoint
    # Processors slow down under a load that lasts: on two cores from 0.48 to 0.74 s a step in the first ten minutes.
    epochs = max(int(0.7 * (60 * minutes - (time.time() - began) - 20) / seconds), 1)
    run = train(**{"run.epochs": epochs})
    return run / checkpoint.newest(run)


def vxm_settings(minutes, data, threads):
    """What has to be the same for --resume to take VoxelMorph's training."""
    return [minutes, str(data), threads, VXM_SETTINGS]


def train_voxelmorph(minutes, data, out, python, threads):
    """Write voxelmorph.pt: each of VXM_SETTINGS has a twentieth of the time, the best is trained anew for all of it."""
    folder = out / "work/voxelmorph-training"
    training, held_out = subjects(data, TRAINING), subjects(data, VALIDATION)
    job = {"volumes": list(write_normalised(training, folder).values()), "settings": VXM_SETTINGS, "minutes": minutes,
           "validation": prepare_pairs(held_out, draw_pairs(held_out, 20), folder, "centre"),
           "weights": str(out / "voxelmorph.pt")}
    shown = "{l_bar}{bar}| {n:.1f}/{total:.1f} min {postfix}"
    with tqdm(total=minutes * (1 + len(VXM_SETTINGS) / 20), desc="VoxelMorph's training", bar_format=shown) as bar:
        for line in start_peer("voxelmorph-train", job, folder, python, threads):
            if "done" in line:
                write_json(out / "voxelmorph-training.json", {**line, "chosen": line["settings"],
                                                              "settings": vxm_settings(minutes, data, threads)})
            else:
                bar.set_postfix_str(f"step {line['steps']}, loss {line['loss']:.3f}", refresh=False)
                bar.update(line["minutes"] - bar.n)


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------

def score(pair, field, label, seconds):
    """Scores of one pair by the method's field.

    label: the moving label map as the method itself warps it, to the nearest voxel, or None where it has no means of
    its own. seconds: of the clock and of processors. agreement: Dice of the label with what the field gives.
    """
    (fixed, affine), (moving, moving_affine) = (read_label(pair[f"{part}_label"]) for part in ("fixed", "moving"))
    labels = [int(value) for value in np.unique(fixed) if value]
    nearest, smooth = (apply_label(moving, moving_affine, field, affine, way) for way in ("nearest", "smooth"))
    values = [None if math.isnan(value) else value for value in dice(nearest, fixed, labels)]
    return {"name": pair["name"], "dice": average(values), "labels": dict(zip(map(str, labels), values)),
            "dice_smooth": average(dice(smooth, fixed, labels)),
            "hd95_mm": average(hd95(nearest, fixed, labels, np.linalg.norm(affine[:3, :3], axis=0))),
            "folding_percent": folding_percent(torch.from_numpy(field)[None]), "seconds": seconds[0],
            "processor_seconds": seconds[1],
            "agreement": 1.0 if label is None else average(dice(nearest, label, labels))}


def run_method(name, method, pairs, path, settings, resume):
    """Scores of one method on all pairs, written to `path` after each; `resume` continues what is there.

    method(pairs): a generator as above. settings: what has to be the same to resume.
    """
    begin = [[pair["name"], pair["start"]] for pair in pairs]
    settings = {**settings, "pairs": begin}
    scores = kept_json(path, settings, resume).get("scores", [])
    with tqdm(total=len(pairs), initial=len(scores), desc=name, unit="pair", file=sys.stderr) as bar:
        rest = pairs[len(scores):]
        for found, pair in zip(method(rest), rest) if rest else ():
            scores.append(score(pair, *found))
            write_json(path, {"settings": settings, "scores": scores})
            bar.update()
    agreement = average([entry["agreement"] for entry in scores])
    if agreement is not None and agreement < 0.98:
        print(f"{name}: the field and the warped labels agree by a Dice of {agreement:.3f} only, so its folding may "
              "not be that of its transform.", file=sys.stderr)
    return scores


def run_methods(names, method_of, pairs, args):
    """Scores of each method in turn. method_of(name): its generator and what has to be the same to resume it.

    args: with `out` and `resume`. Returns: {name: scores}; a sentence for each method that failed, also printed.
    """
    results, failed = {}, []
    for name in names:
        try:
            method, settings = method_of(name)
            results[name] = run_method(name, method, pairs, args.out / f"{name}.json", settings, args.resume)
        except InputError as error:  # hours of the others are not lost for it
            failed.append(f"error: {name} is missing: {error}")
            print(failed[-1], file=sys.stderr)
    return results, failed


def summary(scores):
    """Means over the pairs, the deviation of Dice, and the median of the seconds."""
    found = {key: average([entry[key] for entry in scores])
             for key in ("dice", "dice_smooth", "hd95_mm", "folding_percent")}
    values, seconds = [entry["dice"] for entry in scores], [entry["seconds"] for entry in scores]
    return {**found, "seconds": statistics.median(seconds), "seconds_mean": statistics.fmean(seconds),
            "processor_seconds": average([entry.get("processor_seconds") for entry in scores]),  # not in older files
            "dice_sd": statistics.stdev(values) if len(values) > 1 else 0.0,
            "labels": {label: average([entry["labels"].get(label) for entry in scores])
                       for label in scores[0]["labels"]}}


def paired(mine, other):
    """Dice of one method minus that of another on the same pairs: mean, deviation, pairs won, p of Wilcoxon's test.

    The test takes pairs for independent, and these share volumes: p is too small (bench_default.py asks the volumes).
    """
    gains = np.array([a["dice"] - b["dice"] for a, b in zip(mine, other)])
    p = float(wilcoxon(gains).pvalue) if gains.any() else 1.0
    return {"mean": float(gains.mean()), "sd": float(gains.std(ddof=1)) if len(gains) > 1 else 0.0,
            "won": int((gains > 0).sum()), "pairs": len(gains), "p": p}


def publish(results, out, references, more=None):
    """Tables, results.json and the last line of JSON.

    references: methods the others are compared with. more: dict of further entries for the last line.
    """
    means = {name: summary(scores) for name, scores in results.items()}
    labels = sorted({label for mean in means.values() for label in mean["labels"]}, key=int)
    labels = labels if len(labels) < 6 else []
    header = ["method", "Dice", "sd", *[f"Dice {label}" for label in labels], "Dice, smooth", "HD95 mm", "folded %",
              "s, median", "s, mean", "processor s, mean"]
    formats = [None, ".4f", ".4f", *[".4f"] * len(labels), ".4f", ".3f", ".4f", ".2f", ".2f", ".2f"]
    rows = [[name, mean["dice"], mean["dice_sd"], *[mean["labels"][label] for label in labels],
             mean["dice_smooth"], mean["hd95_mm"], mean["folding_percent"], mean["seconds"], mean["seconds_mean"],
             mean["processor_seconds"]]
            for name, mean in means.items()]
    gains = {mine: {name: paired(results[mine], scores) for name, scores in results.items() if name != mine}
             for mine in references if mine in results}
    gain_header = ["difference of Dice", "mean", "sd", "pairs won", "of", "Wilcoxon p"]
    gain_rows = [[f"{mine} - {name}", *found.values()] for mine, others in gains.items()
                 for name, found in others.items()]
    gain_formats = [None, "+.4f", ".4f", None, None, ".2g"]
    write_json(out / "results.json", {"summary": means, "paired": gains, "scores": results})
    print(text_table(header, rows, formats) + "\n")
    if gain_rows:
        print(text_table(gain_header, gain_rows, gain_formats) + "\n")
    shown = ("dice", "dice_smooth", "hd95_mm", "folding_percent", "seconds", "processor_seconds")
    print(json.dumps({**{name: {key: mean[key] and round(mean[key], 5) for key in shown}
                         for name, mean in means.items()}, **(more or {})}))


# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Registration of 40 hippocampus pairs: this project and its peers.")
    parser.add_argument("--train-minutes", type=float, default=40, metavar="N", help="of each training (%(default)s)")
    parser.add_argument("--checkpoint", metavar="F", help="a checkpoint, .safetensors file or run folder instead")
    parser.add_argument("--labels-checkpoint", metavar="F", help="the same for the training with all labels")
    parser.add_argument("--few-labels-checkpoint", metavar="F", help="the same for that with the labels of five")
    parser.add_argument("--vxm-minutes", type=float, default=40, metavar="N", help="train VoxelMorph (%(default)s)")
    parser.add_argument("--vxm-weights", metavar="F", help="voxelmorph.pt of an earlier run instead")
    there = [name for name in METHODS if name != "universal" or UNIVERSAL.is_file()]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=there, metavar="NAME",
                        help=f"some of {', '.join(METHODS)} (all, universal where its file has been made)")
    parser.add_argument("--refine", type=int, default=100, metavar="N", help="steps of our refinement without "
                        "a network, and of the method universal (%(default)s)")
    parser.add_argument("--affine", action="store_true", help="align by our affine stage first, before both of ours")
    parser.add_argument("--start", choices=("centre", "header"), default="centre", help="how volumes begin: by the "
                        "centres of their fields of view, as in the training, or by their headers (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N pairs")
    add_shared(parser, DATA, "bench_registration")
    return parser.parse_args(argv)


def our_model(name, args):
    """Network and config of one of TRAININGS: of the checkpoint given, of a training that --resume finds, or a new one.

    Returns: its path, (net, config).
    """
    given, note = getattr(args, TRAININGS[name][2]), args.out / f"training-{name}.json"
    settings = [args.train_minutes, str(args.data), args.threads, our_commit("OM_train_3modes.py", "Runtime")]
    if given := given or kept_json(note, settings, args.resume).get("checkpoint"):
        path = find_checkpoint(given)
    else:
        path = train_ours(name, args.train_minutes, args.data, args.out, args.threads)
        write_json(note, {"settings": settings, "checkpoint": str(path)})
    return path, load_model(path, overrides=args.overrides)


def method_of(name, args, models, python):
    """(generator of a method, what has to be the same to resume it)."""
    if name == "identity":
        return identity, {}
    if name == "refine_none":
        return without_network(args.threads, args.refine, load_config(NO_NETWORK, args.overrides))
    if name in (*NETWORKS, "universal"):
        training, steps = NETWORKS.get(name, ("universal", args.refine))
        path, (net, cfg) = models[training]
        if name == "net" and not any(word.startswith("registration.rounds=") for word in args.overrides):
            cfg = {**cfg, "registration.rounds": NET_ROUNDS}
        options = {"affine": args.affine or name == "universal", "refine": steps}
        settings = {**options, "weights": sha256(path), "config": cfg, "threads": args.threads, "commit": our_commit()}
        return lambda pairs: ours(pairs, (net, cfg), **options), settings
    kind, options = PEERS[name]
    if name == "voxelmorph":
        weights = Path(args.vxm_weights or args.out / "voxelmorph.pt")
        note, settings = args.out / "voxelmorph-training.json", vxm_settings(args.vxm_minutes, args.data, args.threads)
        if not args.vxm_weights and not kept_json(note, settings, args.resume):
            train_voxelmorph(args.vxm_minutes, args.data, args.out, python, args.threads)
        if not weights.is_file():
            raise InputError(f"--vxm-weights {weights}: no such file; leave it out to have them trained.")
        options = {"weights": str(weights)}
    method, settings = by_peer(kind, options, args.out / "work" / name, python, args.threads)
    return method, {**settings, **({"weights": sha256(options["weights"])} if "weights" in options else {})}


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    begin(args.threads)
    pairs = read_pairs(args.data)[:args.limit]
    pairs = prepare_pairs(subjects(args.data, TEST), pairs, args.out / "work/volumes", args.start)
    python = peers_python(args.peers_python) if set(args.methods) & set(PEERS) else None
    models = {name: our_model(name, args) for name in TRAININGS
              if name in [NETWORKS[method][0] for method in args.methods if method in NETWORKS]}
    if "universal" in args.methods:
        path = find_checkpoint("universal")
        # Its refinement weighs roughness as it does here without a network.
        weight = load_config(NO_NETWORK)["refine.weight"]
        models["universal"] = path, load_model(path, overrides=[f"refine.weight={weight}", *args.overrides])
    names = [name for name in METHODS if name in args.methods]
    results, failed = run_methods(names, lambda name: method_of(name, args, models, python), pairs, args)
    if results:
        publish(results, args.out, OURS)
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return STOP if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
