"""The default of register() compared with other programs, on seven data sets: what a user gets without options.

    python tests/bench/bench_default.py --json [--sets NAME...] [--methods NAME...] [--limit N] [--resume]
    python tests/bench/bench_default.py --tune [--sets NAME...] [--methods NAME...]

Ours is `omnimorph.register(fixed, moving)` and nothing else. The peers are Greedy, ANTs SyN with local correlation,
DIPY's SyN and ConvexAdam, in the environment that peers.py makes. `weight_W` is ours with one fixed refine.weight; the
best of WEIGHTS on the test pairs is only an upper bound for a rule that infers the weight. `--networks NAME=MODEL` adds
networks (a run's folder, a file, or universal), each followed by --refine steps.

The protocol, written before the first score:

1. Choosing, tuning and testing use different subjects, see PARTS. If a set is too small for that, `note` in SETS and
   the page of results say so. The pairs were drawn once from a seed and are stored in default_pairs.json, those of the
   hippocampus in hippocampus_pairs.json.
2. Every peer has the same budget: four settings (SETTINGS), scored by --tune on the tuning pairs of a set. The best one
   is used for that set (CHOSEN). The hippocampus, brains and prostate were tuned; the other sets, also whole organs,
   use the settings of the brains. No peer runs on a set for which it was not tuned. Ours has one default for all sets.
3. All methods get the same files: intensities 0 to 1, headers kept. Each starts in its own default way.
4. One scoring for all: the field of each method warps the labels, smoothed (`dice`) and nearest (`dice_nearest`); Dice
   is averaged over the labels that both volumes have. Points give the mean distance in mm (TRE). Folding is that of the
   whole transform on the fixed grid. Times are wall-clock and CPU seconds from images in memory to the transform, in
   one thread; ours include the warped image and the scores of the result.
5. Test pairs are scored once for each method. Every run that registers test pairs adds a line with its date and commit
   to default_scored.jsonl, which is committed; --rescore, which scores the same fields again, adds none.
6. Intervals and p values come from a bootstrap over volumes, not pairs: volumes are drawn with replacement, and the
   weight of a pair is the product of the counts of its two volumes. With fewer than FEWEST volumes (for the liver,
   prostate and heart: persons) there is no interval. The p values of the comparisons within a set are corrected by
   Holm's method.

Fields and scores are written after each pair, and --resume continues; --rescore recomputes the scores of all stored
fields, and --report computes nothing. With --json the last line is JSON, over the pairs that both ours and Greedy have.
"""
import argparse
import datetime
import itertools
import json
import random
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from common import DATA, ROOT, add_shared, git, in_one_sentence, our_commit
from peers import begin, clocks, peer, peers_python, spent, write_json
from scipy import ndimage

import omnimorph
from Dataloader.grids import intensity_range, rescale
from Dataloader.nifti import read_label, read_volume, write_volume
from Diffusion.fields import then_affine
from Diffusion.metrics import average, dice, folding_percent
from Inference.choices import DEFAULTS
from Inference.load_model import find_checkpoint, load_model
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import DONE, STOP, InputError
from Runtime.files import sha256

HERE, SEED = Path(__file__).resolve().parent, 46
PAIRS, HIPPOCAMPUS_PAIRS, SCORED = (HERE / f"{name}" for name in ("default_pairs.json", "hippocampus_pairs.json",
                                                                  "default_scored.jsonl"))
DRAWS, FEWEST = 10_000, 8  # of the bootstrap; volumes below which it says nothing
COPIED = set()  # files that this process has written: those of an earlier run may be of other data

# labels: score: folder of the label maps. subject: what of a volume's name is the unit of the bootstrap.
SETS = {
    "hippocampus": {"labels": {"": "labelsTr"}, "note": ""},
    "brains": {"labels": {"": "labelsTr", "tissues_": "tissuesTr"},
               "note": "tuned on one pair at 2 mm, as four settings on several pairs at 1 mm take hours"},
    "mouse": {"labels": {"": "labelsTr"},
              "note": "three volumes: the tuning pair shares its volumes with the test pairs, and no interval is "
                      "possible"},
    "liver": {"points": "landmarksTr", "subject": r"liver\d+",
              "note": "two persons: one for tuning and one for the test, and no interval is possible"},
    "fetal": {"labels": {"": "labelsTr"},
              "note": "one template for each week"},
    "prostate": {"labels": {"": "labelsTr"}, "gland": True, "subject": r"prostate\d+",
                 "note": "landmarks are small structures: TRE is that of their centres"},
    "cardiac": {"labels": {"": "labelsTr"}, "subject": r"heart\d+",
                "note": "one heart: no tuning pair and no interval"},
}


def syn_cc(radius, iterations, **more):
    return {"type_of_transform": "SyN", "syn_metric": "CC", "syn_sampling": radius, "reg_iterations": iterations,
            **more}


def greedy(deformable, *affine):
    return {"affine": list(affine), "deformable": deformable}


def convexadam(**more):
    return {"grid_sp": 6, "disp_hw": 4, "grid_sp_adam": 2, **more}


RIGID, AFFINE = "-dof 6 -m NCC 2x2x2 -n 100x50x10", "-dof 12 -m NCC 2x2x2 -n 100x50x10"
SETTINGS = {  # the four of each peer, by name
    "greedy": {
        "default": greedy("-m NCC 2x2x2 -n 100x50x10", RIGID, AFFINE),
        "long": greedy("-m NCC 2x2x2 -n 100x100x50", RIGID, AFFINE),
        "rigid": greedy("-m NCC 2x2x2 -n 100x100x50", RIGID),
        "fine": greedy("-m NCC 2x2x2 -n 100x100x50 -s 1.5vox 0.5vox", RIGID, AFFINE)},
    "ants": {  # 100/70/50/20 iterations with a radius of 4 take 49 s of a core on one hippocampus, so none has these
        "default": syn_cc(2, [40, 20, 5]),
        "header": syn_cc(2, [40, 20, 5], from_start=True),
        "wide": syn_cc(4, [40, 20, 5], from_start=True),
        "long": syn_cc(2, [60, 40, 10], from_start=True)},
    "dipy": {
        "default": {"metric": "CC"},
        "long": {"metric": "CC", "iterations": [100, 50, 25]},
        "narrow": {"metric": "CC", "iterations": [100, 50, 25], "radius": 2},
        "fine": {"metric": "CC", "iterations": [100, 50, 25], "sigma_diff": 1.0}},
    "convexadam": {
        "default": convexadam(),
        "finer": convexadam(grid_sp=4),
        "weaker": convexadam(lambda_weight=0.6),
        "smooth": convexadam(selected_smooth=3)},
}
TWO_MODALITIES = {  # in place of those above where the volumes are of two modalities
    "greedy": {  # its affine stage by NMI lost all four pairs with twelve degrees of freedom, and three with six
        "centres": greedy("-m NMI -n 100x50x10"),
        "smooth": greedy("-m NMI -n 100x50x10 -s 3vox 1vox"),
        "ncc": greedy("-m NCC 4x4x4 -n 100x50x10 -s 3vox 1vox"),
        "ncc_rigid": greedy("-m NCC 4x4x4 -n 100x50x10", "-dof 6 -m NCC 4x4x4 -n 100x50x10")},
    "ants": {
        "mattes": {"type_of_transform": "SyN", "reg_iterations": [100, 70, 50, 20]},
        "mattes_header": {"type_of_transform": "SyN", "reg_iterations": [100, 70, 50, 20], "from_start": True},
        "mattes_short": {"type_of_transform": "SyN"},
        "affine_only": {"type_of_transform": "Affine"}},
    "convexadam": SETTINGS["convexadam"],
}
PEERS = tuple(SETTINGS)
CHOSEN = {  # {set: {peer: setting}}, by --tune; docs/benchmarks.md has the scores
    "hippocampus": {"greedy": "rigid", "ants": "long", "dipy": "long", "convexadam": "default"},
    "brains": {"greedy": "fine"},
    "prostate": {"greedy": "centres", "ants": "mattes_header", "convexadam": "weaker"},
}
CHOSEN |= {name: CHOSEN["brains"] for name in ("mouse", "liver", "fetal", "cardiac")}
# Greedy refuses three resolutions of nine slices.
THIN = {"greedy": {"fine": greedy("-m NCC 2x2x2 -n 100x50 -s 1.5vox 0.5vox", "-dof 6 -m NCC 2x2x2 -n 100x50",
                                  "-dof 12 -m NCC 2x2x2 -n 100x50")}}
WEIGHTS = ("0.1", "0.2", "0.5", "1", "2")
METHODS = ("identity", "ours", *PEERS, *(f"weight_{weight}" for weight in WEIGHTS))


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------

def names(prefix, *parts):
    return [f"{prefix}{part}" for part in parts]


# tuning, test: names of volumes of either part. Hippocampus ids next to each other are often one person: 230 is left
# out, as 231 is a test volume.
PARTS = {
    "hippocampus": (names("hippocampus_", 203, 204, 205, 207, 210, 212, 215, 216, 217, *range(219, 230)),
                    names("hippocampus_", *range(231, 281))),
    "brains": (names("oasis_", 1000, 1001, 1002, 1006, 1007, 1008, 1009),
               names("oasis_", 1010, 1011, 1012, 1013, 1014, 1015, 1017, 1036)),
    "mouse": (names("FVB_NCrl_in_vivo_", 1, 2), names("FVB_NCrl_in_vivo_", 1, 2, 3)),
    "liver": (names("liver19_", "exhmaster", "cyc_1_6", "cyc_1_9"),
              names("liver23_", "exhmaster", "cyc_1_4", "cyc_5_4")),
    "fetal": (names("sta", 22, 24), names("sta", 26, 28, 30, 32, 34, 36)),
    "prostate": (names("prostate", "00", "01", "02", "03"), names("prostate", "04", "05", "06", "07", "25", "26")),
    "cardiac": ([], names("heart1_", "ed", "es")),
}


def draw():
    """{set: {"tuning", "test"}}: lists of [fixed, moving], volumes by name: what default_pairs.json holds."""
    drawn = random.Random(SEED)
    far = [list(pair) for pair in itertools.permutations(PARTS["hippocampus"][0], 2)
           if abs(int(pair[0][-3:]) - int(pair[1][-3:])) > 5]
    found = {"hippocampus": {"tuning": drawn.sample(far, 4)}}
    few, last = PARTS["brains"]
    found["brains"] = {"tuning": [drawn.sample(few, 2)],
                       "test": [list(pair) for pair in drawn.sample(list(itertools.permutations(last, 2)), 12)]}
    mice = [list(pair) for pair in itertools.permutations(PARTS["mouse"][1], 2)]
    found["mouse"] = {"tuning": mice[:1], "test": mice[1:]}
    found["liver"] = dict(zip(("tuning", "test"), ([[volumes[0], moving] for moving in volumes[1:]]
                                                   for volumes in PARTS["liver"])))
    weeks, fetal = range(26, 37, 2), []
    for apart in (2, 4, 6):
        fetal.append(drawn.sample([(a, b) for a in weeks for b in weeks if abs(a - b) == apart], 2))
    found["fetal"] = {"tuning": [names("sta", 24, 22)],
                      "test": [names("sta", *pair) for pair in itertools.chain(*zip(*fetal))]}
    found["prostate"] = {part: [names(person, "_us", "_mr") for person in PARTS["prostate"][number]]
                         for number, part in enumerate(("tuning", "test"))}
    found["cardiac"] = {"tuning": [], "test": [names("heart1_", "es", "ed"), names("heart1_", "ed", "es")]}
    return found


def read_pairs(name, part):
    """The pairs [fixed, moving] of a set, by the names of its volumes. part: "tuning" or "test"."""
    if (name, part) == ("hippocampus", "test"):
        return [names("hippocampus_", *pair) for pair in json.loads(HIPPOCAMPUS_PAIRS.read_text())["pairs"]]
    return json.loads(PAIRS.read_text())[name][part]


def named_pairs(name, part, limit=None):
    """The pairs of `read_pairs` as dicts with their name and volumes."""
    return [{"name": f"{moving} to {fixed}", "volumes": [fixed, moving]}
            for fixed, moving in read_pairs(name, part)[:limit]]


def prepare(name, part, data, folder, limit=None):
    """The pairs of a set as every method gets them: dicts of paths, in the order of `read_pairs`.

    Volumes are copied with intensities 0 to 1. Brains for tuning have voxels of 2 mm. start: 4x4, the centres of the
    fields of view on each other, for methods that have no start of their own; by the headers where grids are the same.
    """
    kind, prepared, step = SETS[name], named_pairs(name, part, limit), 2 if (name, part) == ("brains", "tuning") else 1
    for pair in prepared:
        for side, volume in zip(("fixed", "moving"), pair["volumes"]):
            array, affine = read_volume(find(data / name / "imagesTr", volume))
            pair[side] = copied(folder / part / f"{volume}.nii.gz", rescale(array, *intensity_range(array)), affine,
                                step)
            for score, source in kind.get("labels", {}).items():
                label, affine = read_label(find(data / name / source, volume))
                pair[f"{side}_{score}label"] = copied(folder / part / f"{volume}_{score}label.nii.gz", label, affine,
                                                      step)
            if "points" in kind:
                pair[f"{side}_points"] = [str(data / name / kind["points"] / f"{volume}_{where}.csv")
                                          for where in ("liver", "outside")]
                blank = np.zeros(array.shape, np.int16)  # what a peer warps where there are no labels
                pair[f"{side}_label"] = copied(folder / part / f"{volume}_label.nii.gz", blank, affine, step)
        pair["start"] = centres(pair).tolist()
    return prepared


def find(folder, volume):
    """The file of a volume. Raises InputError where it is not there."""
    path = folder / f"{volume}.nii.gz"
    if not path.is_file():
        raise InputError(f"{path}: no such file; give the folder of all data sets by --data, or other sets by --sets.")
    return path


def copied(path, array, affine, step):
    """Write a volume, with every `step`-th voxel, images smoothed before, and return its path."""
    if step > 1:
        array = ndimage.gaussian_filter(array, 0.4 * step) if array.dtype == np.float32 else array
        array, affine = array[::step, ::step, ::step], affine @ np.diag([step, step, step, 1])
    if path not in COPIED:
        write_volume(path, np.ascontiguousarray(array), affine)
        COPIED.add(path)
    return str(path)


def centres(pair):
    """4x4, fixed world to moving world: the identity where both grids are one, else the middles on each other."""
    (fixed, affine), (moving, moving_affine) = (read_label(pair[f"{side}_label"]) for side in ("fixed", "moving"))
    start = np.eye(4)
    if fixed.shape != moving.shape or not np.allclose(affine, moving_affine):
        middles = [at @ [*(np.array(array.shape) - 1) / 2, 1] for array, at in ((fixed, affine),
                                                                               (moving, moving_affine))]
        start[:3, 3] = (middles[1] - middles[0])[:3]
    return start


# ---------------------------------------------------------------------------------------------------------------------
# Methods: each yields field and seconds (of the clock, of processors) for the pairs in turn
# ---------------------------------------------------------------------------------------------------------------------

def identity(pairs):
    """No registration: the volumes as their centres lie on each other."""
    for pair in pairs:
        fixed, affine = read_label(pair["fixed_label"])
        change = np.linalg.inv(affine) @ pair["start"] @ affine
        yield then_affine(torch.zeros(1, 3, *fixed.shape), change)[0].numpy(), (0.0, 0.0)


def ours(pairs, **more):
    """register() as it is, or with more arguments."""
    warm_up = tuple(np.random.default_rng(seed).random((16, 16, 16), np.float32) for seed in (0, 1))
    more = {"device": "cpu", **more}  # where the others run
    omnimorph.register(*((array, np.eye(4)) for array in warm_up), **more)
    for pair in pairs:
        fixed, moving = read_volume(pair["fixed"]), read_volume(pair["moving"])
        started = clocks()
        found = omnimorph.register(fixed, moving, **more)
        yield found.field, spent(started)


def of_peer(pairs, kind, options, folder, python, threads):
    for field, _, seconds in peer(pairs, kind, options, folder, python, threads, warm_up=False):
        yield field, seconds


def settings_of(name):
    """{peer: {name: options}}: the settings for a set."""
    return {"prostate": TWO_MODALITIES, "cardiac": THIN}.get(name, SETTINGS)


def method_of(name, method, setting, args):
    """(generator of a method, what has to be the same to resume it). setting: of a peer, by name."""
    if method == "identity":
        return identity, {}
    if method not in PEERS:
        more, same = {}, {"commit": our_commit(), "threads": args.threads}
        if method in args.networks:
            path = find_checkpoint(args.networks[method])
            more = {"model": load_model(path), "refine": args.refine}
            same |= {"weights": sha256(path), "refine": args.refine}
        elif method != "ours":
            more = {"config": load_config(DEFAULTS, [f"refine.weight={method.removeprefix('weight_')}"])}
        return (lambda pairs: ours(pairs, **more)), same
    options, folder = settings_of(name)[method][setting], args.out / "work" / name / method / setting
    return (lambda pairs: of_peer(pairs, method, options, folder, args.python, args.threads),
            {"setting": setting, "options": options, "threads": args.threads})


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------

def scores_of(name, pair, field):
    """Scores of a pair by the field of a method, (3, *fixed) in voxels."""
    kind, found = SETS[name], {"folding_percent": folding_percent(torch.from_numpy(field)[None])}
    for score in kind.get("labels", {}):
        (fixed, affine), (moving, moving_affine) = (read_label(pair[f"{side}_{score}label"])
                                                    for side in ("fixed", "moving"))
        if kind.get("gland"):
            found["tre_mm"] = tre_mm(field, affine, *landmarks(fixed, affine, moving, moving_affine))
            fixed, moving = (fixed > 0).astype(fixed.dtype), (moving > 0).astype(moving.dtype)
        both = [int(value) for value in np.intersect1d(fixed, moving) if value]
        for way, word in (("smooth", "dice"), ("nearest", "dice_nearest")):
            carried = omnimorph.apply_label(moving, moving_affine, field, affine, way)
            found[f"{score}{word}"] = average(dice(carried, fixed, both))
    if "points" in kind:
        _, affine = read_volume(pair["fixed"])
        groups = [tuple(np.loadtxt(pair[f"{side}_points"][number], delimiter=",", skiprows=1, ndmin=2)
                        for side in ("fixed", "moving")) for number in range(2)]
        found["tre_mm"] = tre_mm(field, affine, *map(np.concatenate, zip(*groups)))
        found["tre_liver_mm"], found["tre_outside_mm"] = (tre_mm(field, affine, *group) for group in groups)
    return found


def landmarks(fixed, affine, moving, moving_affine):
    """The centres in mm of the structures above 1 that both label maps have: (n, 3) of each."""
    values = [value for value in np.intersect1d(fixed, moving) if value > 1]
    return tuple(np.array([(at @ [*np.argwhere(label == value).mean(0), 1])[:3] for value in values]).reshape(-1, 3)
                 for label, at in ((fixed, affine), (moving, moving_affine)))


def tre_mm(field, affine, points_mm, true_mm):
    """Mean distance in mm of where a field leads points of the fixed volume from where they are in the moving one.

    field: (3, *fixed) in voxels. affine: 4x4 of the fixed volume, which turns voxels plus field into the moving world.
    points_mm, true_mm: (n, 3), in the world of either volume. Returns: float, None for n = 0.
    """
    if not len(points_mm):
        return None
    voxels = (np.c_[points_mm, np.ones(len(points_mm))] @ np.linalg.inv(affine).T)[:, :3].T
    moved = voxels + np.array([ndimage.map_coordinates(part, voxels, order=1, mode="nearest") for part in field])
    found_mm = (np.c_[moved.T, np.ones(len(points_mm))] @ affine.T)[:, :3]
    return float(np.linalg.norm(found_mm - true_mm, axis=1).mean())


def run_method(name, method, pairs, folder, generate, settings, args, log=None):
    """The rows of a method on the pairs of a set, one for each pair that it has done.

    Fields and rows.json lie in the folder; --resume keeps them where `settings` are the same. log: what the log says of
    this run, or None: one line before the first pair is scored.
    """
    path, settings = folder / "rows.json", json.loads(json.dumps(settings))
    earlier = json.loads(path.read_text()) if path.exists() else {"settings": settings, "rows": []}
    if not (args.rescore or args.report) and not (args.resume and earlier["settings"] == settings):
        earlier = {"settings": settings, "rows": []}
    kept = {row["name"]: row for row in earlier["rows"]}
    if args.rescore:
        for pair in pairs:
            if pair["name"] in kept:
                row = kept[pair["name"]]
                row.update(scores_of(name, pair, np.load(folder / row["field"])))
        write_json(path, {**earlier, "rows": list(kept.values())})
    if args.rescore or args.report:
        return [kept[pair["name"]] for pair in pairs if pair["name"] in kept]
    rest = [pair for pair in pairs if pair["name"] not in kept]
    if rest and log:
        log_line(args.log, **log, pairs=len(rest))
    for pair, (field, seconds) in zip(rest, generate(rest)) if rest else ():
        file = f"{pair['volumes'][1]}-{pair['volumes'][0]}.npy"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / file, np.ascontiguousarray(field, np.float32))
        kept[pair["name"]] = {"name": pair["name"], "volumes": pair["volumes"], "field": file, "seconds": seconds[0],
                              "processor_seconds": seconds[1], **scores_of(name, pair, field)}
        write_json(path, {"settings": settings, "rows": list(kept.values())})
        shown = {key: round(value, 4) for key, value in kept[pair["name"]].items() if isinstance(value, float)}
        print(f"{name} {method} {len(kept)}/{len(pairs)} {pair['name']}: {json.dumps(shown)}", file=sys.stderr)
    return [kept[pair["name"]] for pair in pairs if pair["name"] in kept]


def log_line(path, **entry):
    """Add a line to the log of what was scored on test pairs."""
    entry = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
             "commit": git("rev-parse", "--short", "HEAD"),
             "changed": bool(git("diff", "HEAD", "--name-only", "--", ".", f":!{SCORED.relative_to(ROOT)}")), **entry}
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# What the scores say
# ---------------------------------------------------------------------------------------------------------------------

def main_score(name):
    """(key, sign): the score by which a set is judged, and 1 where more of it is better."""
    return ("tre_mm", -1) if "points" in SETS[name] else ("dice", 1)


def subject(name, volume):
    """The unit of the bootstrap to which a volume belongs."""
    return re.match(SETS[name].get("subject", ".*"), volume)[0]


def difference(name, mine, other, draws=DRAWS):
    """Main score of one method less that of another, over the pairs of both.

    mine, other: rows. Returns: dict of pairs, mean, low and high (the 95 % interval) and p of no difference, two-sided;
    the last three are None where there are too few volumes. See the protocol's point 6.
    """
    key, _ = main_score(name)
    theirs = {row["name"]: row for row in other}
    both = [(row, theirs[row["name"]]) for row in mine if key in row and key in theirs.get(row["name"], {})]
    gains = np.array([a[key] - b[key] for a, b in both])
    found = {"pairs": len(both), "mean": float(gains.mean()) if both else None, "low": None, "high": None, "p": None}
    subjects = [[subject(name, volume) for volume in row["volumes"]] for row, _ in both]
    units = sorted(set(itertools.chain(*subjects)))
    if len(units) < FEWEST:
        return found
    first, second = (np.array([units.index(pair[side]) for pair in subjects]) for side in (0, 1))
    counts = np.random.default_rng(SEED).multinomial(len(units), np.full(len(units), 1 / len(units)), draws)
    weights = counts[:, first] * np.where(first == second, 1, counts[:, second])
    weights, total = weights[weights.sum(1) > 0], weights.sum(1)
    means = weights @ gains / total[total > 0]
    found["low"], found["high"] = map(float, np.percentile(means, (2.5, 97.5)))
    below = min((means <= 0).sum(), (means >= 0).sum())
    found["p"] = float(min(1, 2 * (below + 1) / (len(means) + 1)))
    return found


def holm(values):
    """p values corrected for their number (Holm, Scandinavian Journal of Statistics 1979); None stays None."""
    order = sorted((p, number) for number, p in enumerate(values) if p is not None)
    corrected, least = list(values), 0.0
    for rank, (p, number) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        corrected[number] = least
    return corrected


def mean_of(rows, key):
    return average([row.get(key) for row in rows])


def median_of(rows, key):
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def verdicts(name, results):
    """{peer: difference of ours and it}, p corrected within the set."""
    peers = [method for method in PEERS if results.get(method) and results.get("ours")]
    found = {method: difference(name, results["ours"], results[method]) for method in peers}
    for entry, p in zip(found.values(), holm([entry["p"] for entry in found.values()])):
        entry["p"] = p
    return found


def table(name, results):
    """Header, rows and formats of a set."""
    scores = [key for key in ("dice", "dice_nearest", "tissues_dice", "tissues_dice_nearest", "tre_mm", "tre_liver_mm",
                              "tre_outside_mm", "folding_percent", "seconds", "processor_seconds")
              if any(key in row for rows in results.values() for row in rows)]
    compared, rows = verdicts(name, results), []
    for method, found in results.items():
        entry = compared.get(method, {})
        rows.append([method, len(found), *((median_of if "seconds" in key else mean_of)(found, key) for key in scores),
                     *(entry.get(key) for key in ("mean", "low", "high", "p"))])
    formats = [None, None, *(".1f" if "seconds" in key else ".4f" for key in scores), "+.4f", "+.4f", "+.4f", ".2g"]
    return ["method", "pairs", *scores, "ours minus it", "low", "high", "p"], rows, formats


def line_of(name, results):
    """What the last line says of a set: of the pairs that ours and Greedy both have."""
    key, sign = main_score(name)
    by_name = {method: {row["name"]: row for row in rows if key in row} for method, rows in results.items()}
    mine, other = (by_name.get(method, {}) for method in ("ours", "greedy"))
    both = [pair for pair in mine if pair in other or not other]
    fixed = {method: rows for method, rows in by_name.items() if "weight_" in method}
    tried = [pair for pair in mine if fixed and all(pair in rows for rows in fixed.values())]

    def of(rows, pairs, key=key, how=statistics.fmean):
        return round(how([rows[pair][key] for pair in pairs]), 5) if rows and pairs else None

    peers = [of(by_name[method], both) for method in PEERS if both and set(both) <= set(by_name.get(method, ()))]
    best = max((of(rows, tried) for rows in fixed.values()), key=lambda value: sign * value) if tried else None
    return {"ours": of(mine, both), "greedy": of(other, both), "best_fixed": best, "ours_on_these": of(mine, tried),
            "seconds": of(mine, both, "processor_seconds", statistics.median),
            "greedy_seconds": of(other, both, "processor_seconds", statistics.median),
            "clock_seconds": of(mine, both, "seconds", statistics.median),
            "greedy_clock_seconds": of(other, both, "seconds", statistics.median),
            "pairs": len(both), "pairs_of_best_fixed": len(tried),
            "best_peer": max(peers, key=lambda value: sign * value, default=None)}


# ---------------------------------------------------------------------------------------------------------------------

def tune(args):
    """Score the settings of each peer on the tuning pairs. Returns: {set: {method: {setting: score}}}."""
    found = {}
    for name in args.sets:
        if not read_pairs(name, "tuning"):
            continue
        pairs, (key, _) = prepare(name, "tuning", args.data, args.out / "volumes" / name), main_score(name)
        for method in [method for method in args.methods if method in settings_of(name)]:
            for setting in settings_of(name)[method]:
                generate, settings = method_of(name, method, setting, args)
                rows = run_method(name, f"{method} {setting}", pairs, args.out / "tuning" / name / method / setting,
                                  generate, settings, args)
                found.setdefault(name, {}).setdefault(method, {})[setting] = {
                    key: mean_of(rows, key), "processor_seconds": mean_of(rows, "processor_seconds")}
                print(f"{name} {method} {setting}: {found[name][method][setting]}", file=sys.stderr)
    return found


def score_test(args):
    """Score each method on the test pairs. Returns: {set: {method: rows}}; sentences about what failed."""
    results, failed = {name: {} for name in args.sets}, []
    for name, method in itertools.product(args.sets, [*args.methods, *args.networks]):
        if method in PEERS and method not in CHOSEN.get(name, {}):
            continue  # it has not been tuned for this set
        try:
            pairs = (named_pairs(name, "test", args.limit) if args.report else
                     prepare(name, "test", args.data, args.out / "volumes" / name, args.limit))
            setting = CHOSEN[name][method] if method in PEERS else None
            generate, settings = method_of(name, method, setting, args)
            rows = run_method(name, method, pairs, args.out / "test" / name / method, generate, settings, args,
                              {"set": name, "method": method, "setting": setting} if method != "identity" else None)
            if rows:
                results[name][method] = rows
        except InputError as error:  # what the others have found is not lost for it
            failed.append(f"error: {name}, {method}: {error}")
            print(failed[-1], file=sys.stderr)
    return results, failed


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="The default of register() beside other programs.")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), metavar="NAME",
                        help=f"some of {', '.join(SETS)} (all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="NAME",
                        help=f"some of {', '.join(METHODS)} (all)")
    parser.add_argument("--networks", nargs="+", default=[], metavar="NAME=MODEL", help="networks to score as well")
    parser.add_argument("--refine", type=int, default=20, metavar="N", help="steps after a network (%(default)s)")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N pairs of each set")
    parser.add_argument("--tune", action="store_true", help="score the settings of the peers on the tuning pairs")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    parser.add_argument("--rescore", action="store_true", help="only compute the scores of the fields there anew")
    parser.add_argument("--report", action="store_true", help="only the tables of what the output folder holds")
    parser.add_argument("--log", type=Path, default=SCORED, metavar="F", help="of what was scored on test pairs")
    add_shared(parser, DATA, "bench_default", overrides=False)
    args = parser.parse_args(argv)
    args.networks = dict(word.split("=", 1) if "=" in word else parser.error(f"--networks {word}: NAME=MODEL is needed")
                         for word in args.networks)
    return args


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    begin(args.threads)
    left = args.rescore or args.report  # to no method
    args.python = peers_python(args.peers_python) if set(args.methods) & set(PEERS) and not left else None
    if args.tune:
        found = tune(args)
        write_json(args.out / "tuning.json", found)
        print(json.dumps(found))
        return DONE
    results, failed = score_test(args)
    for name, found in results.items():
        if found:
            note = f" ({SETS[name]['note']})" if SETS[name]["note"] else ""
            print(f"\n{name}{note}\n{text_table(*table(name, found))}", file=sys.stderr)
    print("\n".join(failed), file=sys.stderr)
    if args.json:
        print(json.dumps({name: line_of(name, found) for name, found in results.items() if found}))
    return STOP if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
