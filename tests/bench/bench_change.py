"""Does `omnimorph jacobian --scans` find a change of 1 % of one structure of a brain?

The first scan is a crop of a real scan. The second is the same crop, warped by a smooth field that shrinks one label by
1 % on average: the field's divergence is the label's smoothed mask, so nothing else changes in size. Both get
independent noise. Prints one line of JSON: the true change and those in the label's table, in percent, one for each
draw of the noise; --both measures both orders of the scans. mean and spread are of all from the first scan to the
second.

    python tests/bench/bench_change.py --data FOLDER --case oasis_1036:35 ... [--noise PART] [--draws N] [--both]
"""
import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  puts the repository on the path
import numpy as np
import torch
from scipy import ndimage

import OM_study
from Dataloader.nifti import read_label, read_volume, write_volume
from Diffusion.fields import jacobian_determinant

MARGIN, SMOOTH = 14, 2.0  # voxels around the label; of its mask


def shrinking_field(inside, percent):
    """A field y -> y + u(y) of the second scan's grid by which a region has shrunk by a percentage on average.

    It shows what lies further out. inside: (*size) bool. Returns: (3, *size) float64 in voxels.
    """
    source = ndimage.gaussian_filter(inside.astype(float), SMOOTH)
    padded = np.pad(source, [(n // 2, n // 2) for n in source.shape])
    places = np.meshgrid(*(np.fft.fftfreq(n) * 2 * np.pi for n in padded.shape), indexing="ij")
    square = sum(place ** 2 for place in places)
    square[0, 0, 0] = 1.0
    spectrum = np.fft.fftn(padded - padded.mean()) / square
    box = tuple(slice(n // 2, n // 2 + m) for n, m in zip(source.shape, source.shape))
    field = np.stack([-np.fft.ifftn(1j * place * spectrum).real[box] for place in places])
    fading = np.minimum.reduce(np.meshgrid(*(np.minimum(np.arange(n), np.arange(n)[::-1]) / (MARGIN / 2)
                                             for n in source.shape), indexing="ij"))
    field *= np.clip(fading, 0, 1)
    scale = 0.01 * percent
    for _ in range(5):
        scale *= percent / -change_percent(scale * field, inside)
    return scale * field


def change_percent(field, inside):
    """The change of volume of a region of the first scan: (3, *size) leads from the second scan's grid to it."""
    determinant = jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()
    seen = ndimage.map_coordinates(inside.astype(float), np.indices(inside.shape) + field, order=1)
    return 100 * (seen.sum() / (seen * determinant).sum() - 1)


def write_scans(folder, image, label, affine, value, noise, seed):
    """Write one.nii.gz, one_dseg.nii.gz and two.nii.gz. Returns: the change of the label that was made, in percent."""
    box = tuple(slice(max(at.start - MARGIN, 0), at.stop + MARGIN)
                for at in ndimage.find_objects((label == value).astype(np.uint8))[0])
    image, inside = image[box], label[box] == value
    affine = affine.copy()
    affine[:3, 3] += affine[:3, :3] @ [at.start for at in box]
    field = shrinking_field(inside, 1.0)
    second = ndimage.map_coordinates(image, np.indices(image.shape) + field, order=3, mode="nearest")
    noises = np.random.default_rng(seed).normal(0, noise * np.percentile(image, 99), (2, *image.shape))
    write_volume(folder / "one.nii.gz", (image + noises[0]).astype(np.float32), affine)
    write_volume(folder / "two.nii.gz", (second + noises[1]).astype(np.float32), affine)
    write_volume(folder / "one_dseg.nii.gz", inside.astype(np.uint8), affine)
    write_volume(folder / "two_dseg.nii.gz", (ndimage.map_coordinates(
        inside.astype(float), np.indices(image.shape) + field, order=1) > 0.5).astype(np.uint8), affine)
    return change_percent(field, inside)


def found_percent(folder, first, second, *words):
    """The change of the label from one scan to the other, as the table of the command says it."""
    out = folder / f"{first}_{second}"
    code = OM_study.main(["jacobian", "--scans", str(folder / f"{first}.nii.gz"), str(folder / f"{second}.nii.gz"),
                          "--out", str(out), "--device", "cpu", *words])
    if code:
        raise SystemExit(f"omnimorph jacobian ends with {code}")
    [row] = json.loads((out / "results.json").read_text())["pairs"]
    return row["labels"]["1"]["change_percent"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="folder with imagesTr and labelsTr")
    parser.add_argument("--case", nargs="+", required=True, metavar="NAME:LABEL")
    parser.add_argument("--noise", type=float, default=0.02, metavar="PART",
                        help="standard deviation, of the 99th percentile of the scan (%(default)s)")
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="of the noise (%(default)s)")
    parser.add_argument("--both", action="store_true", help="also from the second scan to the first")
    args, found = parser.parse_args(), {}
    for case in args.case:
        name, _, value = case.partition(":")
        image, affine = read_volume(args.data / f"imagesTr/{name}.nii.gz")
        label, _ = read_label(args.data / f"labelsTr/{name}.nii.gz")
        for seed in range(args.draws):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                made = write_scans(Path(folder), image, label, affine, int(value), args.noise, seed)
                held = found.setdefault(case, {"made": round(made, 3), "found": []})
                held["found"].append(round(found_percent(Path(folder), "one", "two"), 3))
                if args.both:
                    held.setdefault("found_back", []).append(round(found_percent(Path(folder), "two", "one"), 3))
    values = [value for held in found.values() for value in held["found"]]
    print(json.dumps({**found, "mean": round(float(np.mean(values)), 3), "spread": round(float(np.std(values)), 3)}))


if __name__ == "__main__":
    main()
