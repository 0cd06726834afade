"""Labels from a few labelled volumes: ours compared with majority vote, one atlas, and ANTs' joint label fusion.

    python tests/bench/bench_segment.py --json [--sets hippocampus] [--part test] [--limit N] [--peers-python PYTHON]

hippocampus: ATLASES of ids below 203 label crops of ids from 203 on (--part choose: others below 203, on which the
parameters of Study/fusion.py were chosen). brains: the first seven label the others at 2 mm, tissues and 138 labels.
All methods use the same registrations, those of `omnimorph segment`, and differ only in how they fuse labels. ANTs uses
its own fusion (beta 4, radius 2), within two voxels of any label, on intensities of 0 to 100; it runs with
--peers-python, and its column is empty without that. Dice is the mean over labels, then over images. Registrations and
the scores of each image are kept in --out, and an interrupted run continues there. The last line is JSON.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import DATA, in_one_sentence, kept_json, our_commit
from peers import peers_python
from scipy import ndimage

import omnimorph
from Dataloader.grids import intensity_range, rescale, to_grid
from Dataloader.nifti import read_label, read_volume
from Diffusion.metrics import average, dice
from Inference.labels import apply_label, vote
from Runtime.errors import DONE, InputError
from Runtime.files import write_file
from Study.fusion import fuse

ATLASES = ("001", "014", "025", "036", "046")  # of the hippocampus, apart from each other: neighbours may be one person
FIRST_TEST = 203
KINDS = {"hippocampus": ("labelsTr",), "brains": ("labelsTr", "tissuesTr")}
METHODS = ("ours", "majority", "one", "jlf")
JOINT = """
import sys, numpy as np, ants
for path in sys.argv[1:]:
    held = np.load(path)
    maps = [np.where(label == 0, held["maps"].max() + 1, label).astype(np.float32) for label in held["maps"]]
    image = lambda array: ants.from_numpy(np.ascontiguousarray(array, np.float32))
    found = ants.joint_label_fusion(image(held["image"]), image(held["mask"]), [image(each) for each in held["warped"]],
                                    label_list=[image(each) for each in maps], beta=4, rad=2)["segmentation"].numpy()
    np.save(path + ".jlf.npy", np.where(found > held["maps"].max(), 0, found))
"""  # label 0 is none to ANTs, so the background is a label here


def subjects(name, part):
    """Files of the atlases and of the images to label, in two lists."""
    files = sorted((DATA / name / "imagesTr").glob("*.nii.gz"))
    if not files:
        raise InputError(f"{DATA / name}: no volumes there; the benchmark needs that data set.")
    if name == "brains":
        return (files[:7], files[7:]) if part == "test" else (files[:5], files[5:7])
    atlases = [path for path in files if path.name[12:15] in ATLASES]
    numbers = {path: int(path.name[12:15]) for path in files}
    wanted = [path for path in files if path not in atlases and (numbers[path] >= FIRST_TEST) == (part == "test")]
    return atlases, wanted[::max(len(wanted) // 20, 1)]


def at_2mm(path, order):
    """A brain at 2 mm: array, affine."""
    array, affine = read_volume(path) if order else read_label(path)
    size = tuple(-(-n // 2) for n in array.shape)
    return to_grid(array, affine, max(size), 2.0, order=order)


def registered(name, atlas, image, out):
    """An atlas on an image: dict of image, warped and, for each kind of labels, its map and the truth. Kept on disk."""
    path = out / our_commit() / name / f"{atlas.name[:-7]}_to_{image.name[:-7]}.npz"
    if path.is_file():
        return dict(np.load(path))
    read = at_2mm if name == "brains" else lambda file, order: read_volume(file) if order else read_label(file)
    found = omnimorph.register(read(image, 1), read(atlas, 1), device="cpu")
    held = {"image": found.fixed.array, "warped": found.warped}
    for kind in KINDS[name]:
        label, affine = read(atlas.parent.parent / kind / atlas.name, 0)
        held[f"map {kind}"] = apply_label(label, affine, found.field, found.fixed.affine)
        held[f"truth {kind}"] = read(image.parent.parent / kind / image.name, 0)[0]
    write_file(path, lambda file: np.savez_compressed(file, **held))
    return held


def joint_label_fusion(peers, folder, image, warped, maps):
    """ANTs' joined labels (*size), or None without its environment."""
    if peers is None:
        return None
    mask = ndimage.binary_dilation(np.any([label > 0 for label in maps], axis=0), iterations=2)
    path = folder / "joint.npz"
    image, *warped = (100 * rescale(each, *intensity_range(each)) for each in (image, *warped))  # as it needs them
    np.savez(path, image=image, warped=np.stack(warped), maps=np.stack(maps), mask=mask)
    done = subprocess.run([peers, "-c", JOINT, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"ANTs' joint label fusion failed: {done.stderr.strip().splitlines()[-1]}.")
    return np.load(f"{path}.jlf.npy")


def scored(name, atlases, image, out, peers):
    """{kind of labels: {method: Dice}} of one image, and "seconds" of the fusions; from its file if it has one."""
    settings = [[atlas.name for atlas in atlases], bool(peers), our_commit("Study/fusion.py")]
    path = out / our_commit() / name / f"{image.name[:-7]}.json"
    if found := kept_json(path, settings, True):
        return found
    held, found = [registered(name, atlas, image, out) for atlas in atlases], {"settings": settings, "seconds": 0.0}
    warped = [each["warped"] for each in held]
    for kind in KINDS[name]:
        maps, truth = [each[f"map {kind}"] for each in held], held[0][f"truth {kind}"]
        values = [int(value) for value in np.unique(truth) if value]
        began = time.process_time()
        labels = {"ours": fuse(held[0]["image"], warped, maps)[0]}
        found["seconds"] += time.process_time() - began
        labels |= {"majority": vote(maps)[0], "jlf": joint_label_fusion(peers, out, held[0]["image"], warped, maps)}
        found[kind] = {method: average(dice(label, truth, values))
                       for method, label in labels.items() if label is not None}
        found[kind]["one"] = average([average(dice(label, truth, values)) for label in maps])
    write_file(path, json.dumps(found) + "\n")
    return found


def score(name, part, limit, out, peers):
    """{kind of labels: {method: mean Dice}} of a set, and how many images and atlases there are."""
    atlases, images = subjects(name, part)
    found = []
    for number, image in enumerate(images[:limit], 1):
        found.append(scored(name, atlases, image, out, peers))
        print(f"{name} {number}/{len(images[:limit])} {image.name}: " + "; ".join(
            f"{kind} " + ", ".join(f"{method} {value:.4f}" for method, value in found[-1][kind].items())
            for kind in KINDS[name]), flush=True)
    means = {kind: {method: round(average([each[kind].get(method) for each in found]), 4) if method in found[0][kind]
                    else None for method in METHODS} for kind in KINDS[name]}
    return {**means, "images": len(found), "atlases": len(atlases),
            "fusion_cpu_seconds": round(average([each["seconds"] for each in found]), 2)}


@in_one_sentence
def main(argv=None):
    parser = argparse.ArgumentParser(description="Labels joined from several atlases, beside other ways.")
    parser.add_argument("--json", action="store_true", help="print the scores as one line of JSON (always done)")
    parser.add_argument("--sets", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--part", choices=("choose", "test"), default="test")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="images of a set")
    parser.add_argument("--peers-python", metavar="PYTHON", help="interpreter with requirements-peers.txt, for jlf")
    parser.add_argument("--out", type=Path, default=Path("/tmp/bench-segment"), help="where registrations are kept")
    args = parser.parse_args(argv)
    peers = str(peers_python(args.peers_python)) if args.peers_python else None
    found = {name: score(name, args.part, args.limit, args.out, peers) for name in args.sets}
    print(json.dumps({"part": args.part, **found}))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
