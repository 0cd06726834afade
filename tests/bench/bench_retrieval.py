"""What mode 2's embeddings are good for: finding another scan of the same person, and the most similar atlas.

    python tests/bench/bench_retrieval.py --json [--checkpoint universal] [--images 16]

retrieval: every scan of the liver (two persons, three phases of breathing each), the heart (end of diastole and of
systole) and the hippocampus (ids 201-280) looks for its nearest one among all the others: by the cosine of the
network's embeddings of both, their mean over all scans taken away, or by plain correlation of the images on the
network's grid. Found is a scan of the same person. Whose the hippocampi are the data do not say; neighbouring ids are
often one person, so an id one apart counts, and since they may be its left and its right one, each scan is looked for
mirrored too. Chance is the share of such scans among all others, and among those of the same set.
atlas: --images of these hippocampi are segmented by one atlas of ids 1-60 each, registered without a network: the most
similar one by embeddings, by correlation, and RANDOM random ones. Dice is the mean over both labels, then over images;
gain is the difference from the random ones with its 95 % interval over the images by Student's t. The last line is
JSON.
"""
import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from bench_augment import CONFIG, DATA, LABELS, TRAIN_IDS, read  # and sys.path
from bench_fewshot import interval
from tqdm import tqdm

from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_volume
from Diffusion.embeddings import embed
from Diffusion.metrics import average, dice
from Inference.augmentation import place
from Inference.labels import apply_label
from Inference.load_model import load_model
from Inference.registration import register
from Report.page import text_table
from Runtime.config import load_config
from Runtime.errors import DONE, STOP, InputError
from Runtime.keyed_random import generator

SCAN_IDS, RANDOM = "201-280", 3


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Embeddings as retrieval: the same person, and the nearest atlas.")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON (always done)")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of the sets (%(default)s)")
    parser.add_argument("--checkpoint", default="universal", help="network (%(default)s)")
    parser.add_argument("--images", type=int, default=16, metavar="N", help="to segment (%(default)s)")
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

def overlap(atlas, image, cfg):
    """Dice of the labels that one atlas brings to an image. atlas, image: (id, image, label, affine)."""
    found = register((image[1], image[3]), (atlas[1], atlas[3]), affine=True, config=cfg, device="cpu")
    return average(dice(apply_label(atlas[2], atlas[3], found.field, image[3]), image[2], LABELS))


def atlas_gain(images, atlases, model, cfg):
    """{way: {dice, low, high, gain, gain_low, gain_high}} of the atlas that each way chooses, and of random ones."""
    rows = [features_of([place(one[1], one[3], model[1])[0] for one in part], model) for part in (images, atlases)]
    chosen = {way: likeness(way, rows[0][way], rows[1][way]).argmax(1) for way in rows[0]}
    scores = {way: [] for way in ("random", *chosen)}
    for number, image in enumerate(tqdm(images, "segmenting", unit="image")):
        drawn = torch.randperm(len(atlases), generator=generator(0, "atlas", number))[:RANDOM].tolist()
        brought = {one: overlap(atlases[one], image, cfg)
                   for one in {*drawn, *(int(numbers[number]) for numbers in chosen.values())}}
        scores["random"].append(average([brought[one] for one in drawn]))
        for way, numbers in chosen.items():
            scores[way].append(brought[int(numbers[number])])
    return {way: {**dict(zip(("dice", "low", "high"), interval(values))),
                  **dict(zip(("gain", "gain_low", "gain_high"), interval(np.subtract(values, scores["random"]))))}
            for way, values in scores.items()}


def main(argv=None):
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        model, cfg, hippocampi = load_model(args.checkpoint), load_config(CONFIG), args.data / "hippocampus"
        scans = {name: [(item["id"], place(*read_volume(item["image"]), model[1])[0])
                        for item in read_datalist(args.data / name, 3, ids)]
                 for name, ids in (("liver", ""), ("cardiac", ""), ("hippocampus", SCAN_IDS))}
        images, atlases = (read(read_datalist(hippocampi, 3, ids)) for ids in (SCAN_IDS, TRAIN_IDS))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STOP
    found = retrieval(scans, model)
    print(text_table(["same person first", *next(iter(found.values()))], [[name, *one.values()] for name, one in
                     found.items()], [None, None, *[".3f"] * 4]))
    step = max(len(images) // args.images, 1)
    gain = atlas_gain(images[::step][:args.images], atlases, model, cfg)
    print(text_table(["atlas", *next(iter(gain.values()))], [[way, *one.values()] for way, one in gain.items()],
                     [None, *[".4f"] * 6]))
    print(json.dumps({"retrieval": found, "atlas": gain, "images": args.images, "atlases": len(atlases)}))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
