"""What mode 2's embeddings are good for: finding another scan of the same person, and the most similar atlas.

    python tests/bench/bench_retrieval.py --json [--checkpoint universal] [--images 20]

retrieval: each scan of the liver (two persons, three breathing phases each), the heart (end diastole and end systole)
and the hippocampus (ids 201-280) is matched to its nearest other scan: by the cosine of the network's embeddings, minus
their mean over all scans, or by plain correlation of the images on the network's grid. A match is correct if it is of
the same person. The data do not say whose the hippocampi are. Neighbouring ids are often one person, so an id one apart
counts; they may be a left and a right hippocampus, so each scan is also matched mirrored. Chance is the share of
correct scans among all others, and among those of the same set.
atlas: --images hippocampi are labelled by one of five atlases, with the registrations of bench_segment.py: by the most
similar one in embeddings or in correlation, and by the best one in hindsight. Dice is the mean over both labels, then
over images; gain is the difference from the mean of all five, which is that of a random one, with its 95 % interval
over the images by Student's t. The last line is JSON.
"""
import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from bench_augment import DATA, LABELS
from bench_segment import registered, subjects
from common import in_one_sentence, interval
from tqdm import tqdm

from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_volume
from Diffusion.embeddings import embed
from Diffusion.metrics import average, dice
from Inference.augmentation import place
from Inference.load_model import load_model
from Report.page import text_table
from Runtime.errors import DONE

SCAN_IDS = "201-280"


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Embeddings as retrieval: the same person, and the nearest atlas.")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON (always done)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the sets (%(default)s)")
    parser.add_argument("--checkpoint", default="universal", help="network (%(default)s)")
    parser.add_argument("--images", type=int, default=20, metavar="N", help="to label, 0 for none (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("/tmp/bench-segment"), help="where registrations are kept, as "
                        "by bench_segment.py (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(%(default)s)")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# How similar scans are
# ---------------------------------------------------------------------------------------------------------------------

def person_of(name):
    """Who was scanned, as the file's name tells: the part before the phase; a hippocampus is known by its number."""
    return int(number[1]) if (number := re.fullmatch(r"hippocampus_(\d+)", name)) else name.split("_")[0]


def same_person(first, second):
    """Whether two of `person_of` are one person, or neighbouring hippocampi."""
    if isinstance(first, int) and isinstance(second, int):
        return abs(first - second) == 1
    return first == second


@torch.no_grad()
def features_of(images, model):
    """Rows for `likeness`, by each way: {"embeddings": (n, E), "correlation": (n, voxels)}.

    images: (1, 1, *size) each.
    """
    net, cfg = model
    batches = ({"xt": image, "t": torch.zeros(1, dtype=torch.long), "condition": None} for image in images)
    embeddings = [embed(net, batch, cfg)[0][0].float().numpy() for batch in tqdm(batches, "embeddings", len(images))]
    return {"embeddings": np.stack(embeddings), "correlation": np.stack([image.numpy().ravel() for image in images])}


def likeness(way, queries, gallery):
    """Cosine of each query with each scan of the gallery: (n, m). Embeddings are centred by the mean of the gallery,
    images each by its own."""
    middle = gallery.mean(0) if way == "embeddings" else None
    queries, gallery = (rows - (rows.mean(1, keepdims=True) if middle is None else middle)
                        for rows in (queries, gallery))
    queries, gallery = (rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-9) for rows in (queries, gallery))
    return queries @ gallery.T


def found_first(likenesses, persons, counted):
    """Share of the counted scans whose most similar other scan is of the same person.

    likenesses: (n, n). persons: of each scan, from `person_of`. counted: numbers of scans that have another one.
    """
    likenesses = likenesses.copy()
    np.fill_diagonal(likenesses, -np.inf)
    return float(np.mean([same_person(persons[one], persons[likenesses[one].argmax()]) for one in counted]))


def chance(persons, counted, among):
    """Share of scans of the same person among the others, on average over the counted scans. among: their numbers."""
    return float(np.mean([np.mean([same_person(persons[one], persons[other]) for other in among if other != one])
                          for one in counted]))


def retrieval(scans, model):
    """{set: {scans, chance among all, chance in the set, found by each way}}.

    scans: {set: [(name, image (1, 1, *size))]}.
    """
    sets = [name for name, part in scans.items() for _ in part]
    persons = [person_of(name) for part in scans.values() for name, _ in part]
    images = [image for part in scans.values() for _, image in part]
    rows, mirrored = (features_of(part, model) for part in (images, [image.flip(2) for image in images]))
    likenesses = {way: np.maximum(likeness(way, rows[way], rows[way]), likeness(way, mirrored[way], rows[way]))
                  for way in rows}
    found = {}
    for name in scans:
        among = [number for number, of in enumerate(sets) if of == name]
        counted = [one for one in among if any(same_person(persons[one], persons[other])
                                               for other in among if other != one)]
        found[name] = {"scans": len(counted), "chance": chance(persons, counted, range(len(persons))),
                       "chance_in_set": chance(persons, counted, among),
                       **{way: found_first(each, persons, counted) for way, each in likenesses.items()}}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The most similar atlas
# ---------------------------------------------------------------------------------------------------------------------

def atlas_gain(images, atlases, model, out):
    """{way: {dice, low, high, gain, gain_low, gain_high}} of the chosen atlas. images, atlases: files."""
    rows = [features_of([place(*read_volume(path), model[1])[0] for path in part], model) for part in (images, atlases)]
    scores = {way: [] for way in ("random", *rows[0], "best")}
    chosen = {way: likeness(way, rows[0][way], rows[1][way]).argmax(1) for way in rows[0]}
    for number, image in enumerate(tqdm(images, "labelling", unit="image")):
        held = [registered("hippocampus", atlas, image, out) for atlas in atlases]
        brought = [average(dice(one["map labelsTr"], one["truth labelsTr"], LABELS)) for one in held]
        known = {"random": average(brought), "best": max(brought)}
        for way, values in scores.items():
            values.append(known[way] if way in known else brought[chosen[way][number]])
    return {way: {**dict(zip(("dice", "low", "high"), interval(values))),
                  **dict(zip(("gain", "gain_low", "gain_high"), interval(np.subtract(values, scores["random"]))))}
            for way, values in scores.items()}


@in_one_sentence
def main(argv=None):
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    model = load_model(args.checkpoint)
    scans = {name: [(item["id"], place(*read_volume(item["image"]), model[1])[0])
                    for item in read_datalist(args.data / name, 3, ids)]
             for name, ids in (("liver", ""), ("cardiac", ""), ("hippocampus", SCAN_IDS))}
    atlases, images = subjects("hippocampus", "test")
    found = retrieval(scans, model)
    print(text_table(["same person first", *next(iter(found.values()))], [[name, *one.values()] for name, one in
                     found.items()], [None, None, *[".3f"] * 4]))
    gain = atlas_gain(images[:args.images], atlases, model, args.out) if args.images else {}
    if gain:
        print(text_table(["atlas", *gain["random"]], [[way, *one.values()] for way, one in gain.items()],
                         [None, *[".4f"] * 6]))
    print(json.dumps({"retrieval": found, "atlas": gain, "images": args.images, "atlases": len(atlases)}))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
