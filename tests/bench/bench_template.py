"""The template of a group: ours compared with that of ANTs, from the same files, with the same scores.

    python tests/bench/bench_template.py --json [--sets NAME...] [--limit N] [--peers-python PYTHON]

Ours is `omnimorph template` without options. ANTs' is antspyx's build_template (SyN by local correlation, four rounds;
OPTIONS), to which each subject is then registered once more with the same settings, because its own last registrations
lead to the template before the last. Seconds are CPU seconds of the template alone.
  sharpness   mean gradient, in intensity ranges per mm, of the plain mean of the subjects on the template, without
              either program's sharpening, over the voxels within two voxels of a label
  dice        mean over labels and all pairs of subjects, with their labels warped to the template, smoothed
Sets: 20 hippocampus crops, 15 brains at 2 mm (tissues and 138 labels). The last line is JSON.
"""
import argparse
import contextlib
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
from bench_segment import DATA, FIRST_TEST, KINDS
from common import in_one_sentence
from peers import peer, peers_python, start_peer
from scipy import ndimage

import OM_study
from Dataloader.grids import intensity_range, rescale, to_grid
from Dataloader.nifti import read_field, read_label, read_volume, write_volume
from Diffusion.metrics import average, dice
from Inference.labels import apply_field, apply_label
from Runtime.errors import DONE, InputError

SPACING_MM = {"hippocampus": None, "brains": 2.0}
COUNT, NEAR = 20, 2  # hippocampus crops; voxels around a label
SYN = {"type_of_transform": "SyN", "syn_metric": "CC", "syn_sampling": 2, "reg_iterations": [40, 20, 5]}
OPTIONS = {**SYN, "iterations": 4}


def prepared(name, limit, folder):
    """Copies of a set's volumes and labels: {subject: {"image", and of each kind of labels its file}}, as paths."""
    files = sorted((DATA / name / "imagesTr").glob("*.nii.gz"))
    if name == "hippocampus":
        files = [path for path in files if int(path.name[12:15]) >= FIRST_TEST][:COUNT]
    if not files:
        raise InputError(f"{DATA / name}: no volumes there; the benchmark needs that data set.")
    found = {}
    for path in files[:limit]:
        subject = found.setdefault(path.name[:-7], {})
        for kind in ("imagesTr", *KINDS[name]):
            subject["image" if kind == "imagesTr" else kind] = copy = folder / kind / path.name
            if copy.is_file():
                continue
            array, affine = (read_volume if kind == "imagesTr" else read_label)(DATA / name / kind / path.name)
            if kind == "imagesTr":
                array = rescale(array, *intensity_range(array))
            if SPACING_MM[name]:
                size = max(-(-n // 2) for n in array.shape)
                array, affine = to_grid(array, affine, size, SPACING_MM[name], order=kind == "imagesTr")
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_volume(copy, array, affine)
    return found


def ours(subjects, out, python):
    """Fields of all subjects on our template, its affine, and the seconds it took."""
    began = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        code = OM_study.main(["template", "--images", *(str(subject["image"]) for subject in subjects.values()),
                              "--out", str(out / "ours"), "--device", "cpu", "--again"])
    if code:
        raise InputError(f"{out / 'ours'}: omnimorph template ended with {code}; see what it said above.")
    seconds = time.process_time() - began
    _, affine = read_volume(out / "ours/template.nii.gz")
    return {name: read_field(out / f"ours/subjects/{name}/field.nii.gz")[0] for name in subjects}, affine, seconds


def ants(subjects, out, python):
    """The same of ANTs."""
    folder = out / "ants"
    folder.mkdir(parents=True, exist_ok=True)
    job = {"images": [str(subject["image"]) for subject in subjects.values()], "options": OPTIONS,
           "template": str(folder / "template.nii.gz")}
    [line] = start_peer("ants-template", job, folder, python, 1)
    array, affine = read_volume(job["template"])
    blank = folder / "blank.nii.gz"
    write_volume(blank, np.zeros(array.shape, np.int16), affine)
    pairs = [{"fixed": job["template"], "moving": str(subject["image"]), "moving_label": str(blank)}
             for subject in subjects.values()]
    fields = [field for field, _, _ in peer(pairs, "ants", SYN, folder / "work", python, 1, warm_up=False)]
    return dict(zip(subjects, fields)), affine, line["seconds"][1]


def scores_of(name, subjects, fields, affine):
    """{"sharpness", and of each kind of labels the Dice of all pairs}."""
    plain, near, found = 0, False, {}
    for kind in KINDS[name]:
        maps = [apply_label(*read_label(subject[kind]), fields[key], affine) for key, subject in subjects.items()]
        values = [int(value) for value in np.unique(maps) if value]
        near = near | np.any(maps, axis=0)
        found["dice" if kind == "labelsTr" else "dice_tissues"] = float(np.mean(
            [average(dice(one, other, [value for value in values if (one == value).any() or (other == value).any()]))
             for one, other in itertools.combinations(maps, 2)]))
    for key, subject in subjects.items():
        plain = plain + apply_field(*read_volume(subject["image"]), fields[key], affine) / len(subjects)
    spacing_mm = np.linalg.norm(affine[:3, :3], axis=0)
    slopes = np.sqrt(sum(part ** 2 for part in np.gradient(plain, *spacing_mm)))
    found["sharpness"] = float(slopes[ndimage.binary_dilation(near, iterations=NEAR)].mean())
    return {key: round(value, 4) for key, value in found.items()}


@in_one_sentence
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the scores as one line of JSON (always done)")
    parser.add_argument("--sets", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--limit", type=int, metavar="N", help="subjects of a set")
    parser.add_argument("--peers-python", metavar="PYTHON", help="interpreter with requirements-peers.txt")
    parser.add_argument("--out", type=Path, default=Path("/tmp/bench-template"), help="where everything is kept")
    args = parser.parse_args(argv)
    found = {}
    python = peers_python(args.peers_python)
    for name in args.sets:
        folder = args.out / name
        subjects, found[name] = prepared(name, args.limit, folder / "volumes"), {}
        for method, build in (("ants", ants), ("ours", ours)):  # ANTs may be missing, which ends this at once
            fields, affine, seconds = build(subjects, folder, python)
            found[name][method] = {**scores_of(name, subjects, fields, affine), "seconds": round(seconds)}
            print(f"{name} {method}, {len(subjects)} subjects: {json.dumps(found[name][method])}", flush=True)
    print(json.dumps(found))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
