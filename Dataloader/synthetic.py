"""Synthetic anatomy with labels and known fields, in 2D and 3D, for the demo and the tests.

    python -m Dataloader.synthetic --out DIR --count 40 --size 48
"""
import Runtime  # noqa: F401  first of all: a Python that is too old ends here, in one sentence

# isort: split
import argparse
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy import ndimage
from tqdm import tqdm

from Dataloader.nifti import write_volume
from Runtime.errors import parse_options
from Runtime.files import write_file

# Between two subjects of 48^3 this gives a mean Dice of about 0.57 before registration.
AMPLITUDE = 0.041
LABELS = {"0": "background", "1": "shell", "2": "left lobe", "3": "right lobe", "4": "crescent", "5": "nucleus",
          "6": "ventral body"}
FIELD, INTENSITY = 1, 2  # purposes of the random draws of a subject
STEPS = 6  # squarings of a velocity
MOST_THREADS = 8  # limit for threads that write subjects: making one at 128^3 takes half a GiB


def template(size, dims=3):
    """The anatomy whose deformed copies are the subjects: a head with six labelled structures, always the same.

    size: int or one per axis. dims: 2 or 3; the 2D anatomy is the middle plane of the 3D one.
    Returns: image float32 in [0, 1], 0 at the border; label int16, 0 to 6 as in LABELS; both of shape `size`.
    """
    size = _shape(size, dims)
    axes_norm = [(np.arange(n) + 0.5) * 2 / n - 1 for n in size] + [[0.0]] * (3 - dims)  # -1 .. 1 from face to face
    x, y, z = np.meshgrid(*axes_norm, indexing="ij")
    head = _distance(x, y, z, (0, 0, 0), (0.72, 0.80, 0.74))
    image = 0.35 * _soft(head, 0.05)
    label = np.zeros(x.shape, np.int16)
    for number, (distance, value) in enumerate(_structures(x, y, z), start=1):
        weight = _soft(distance, 0.025)
        image = image * (1 - weight) + value * weight
        label[distance < 0] = number
    texture = np.sin(9 * x + 3 * y + 1) * np.sin(8 * y - 4 * z + 2) + np.sin(10 * z + 5 * x) * np.sin(7 * y + 6 * x)
    image = image + 0.07 * texture * _soft(head, 0.1)
    return np.clip(image, 0, 1).astype(np.float32).reshape(size), label.reshape(size)


def random_field(seed, size, amplitude=AMPLITUDE, dims=3):
    """A smooth random deformation without folds.

    The stationary velocity is Gaussian-smoothed noise at two scales plus an affine part (rotation within 5 degrees,
    scale within 8 %, shift within 2 %, at the default amplitude), integrated by scaling and squaring (Arsigny et al.,
    MICCAI 2006).
    seed: int >= 0. size: int or one per axis. amplitude: root mean square displacement over voxels and axes, as a
    fraction of the side along each axis; above 0.08 some voxels may fold, and it is met less exactly.
    Returns: float32 (dims, *size), displacement in voxels, channel 0 along the first axis.
    """
    size = _shape(size, dims)
    rng = np.random.default_rng([seed, FIELD])
    sides = np.array(size, np.float64).reshape(dims, *[1] * dims)
    velocity = _noise(rng, size, 0.09) + 0.7 * _noise(rng, size, 0.17)
    velocity = AMPLITUDE * velocity / _rms(velocity) + _affine_velocity(rng, size)
    velocity *= amplitude / _rms(velocity)
    # Integration changes the amplitude slightly; one correction leaves an error below 1 %.
    velocity *= amplitude / max(_rms(_integrate(velocity * sides) / sides), 1e-12)
    return _integrate(velocity * sides).astype(np.float32)


def make_subject(seed, size, amplitude=AMPLITUDE, dims=3):
    """One deformed subject with its own contrast, a pure function of the arguments.

    image(x) = template(x + field(x)), linear, then a gamma within 0.8 to 1.25, a slow multiplicative bias within 15 %
    and Gaussian noise of 0.02, clipped at 0. label(x) = template label(x + field(x)), nearest.
    Returns: dict(image=float32, label=int16, both of shape `size`, field=float32 (dims, *size) in voxels).
    """
    size = _shape(size, dims)
    image, label = template(size, dims)
    field = random_field(seed, size, amplitude, dims)
    points = np.indices(size) + field
    image = ndimage.map_coordinates(image, points, order=1)
    label = ndimage.map_coordinates(label, points, order=0)
    rng = np.random.default_rng([seed, INTENSITY])
    image = np.clip(image, 0, 1) ** np.exp(rng.uniform(np.log(0.8), np.log(1.25)))
    bias = _noise(rng, size, 0.25)[0]
    image = image * (1 + rng.uniform(0.05, 0.15) * bias / np.abs(bias).max())
    image = np.maximum(image + rng.normal(0, 0.02, size), 0)
    return {"image": image.astype(np.float32), "label": label, "field": field}


def write_dataset(folder, seeds, size, amplitude=AMPLITUDE, dims=3, with_fields=False):
    """Write subjects in the Decathlon layout: imagesTr, labelsTr, dataset.json and, with `with_fields`, fieldsTr.

    seeds: ints >= 0, one subject_%04d each. Images are int16 (intensity x 1000), labels uint8, 1 mm isotropic, RAS;
    fields .npy as from `random_field`.
    Returns: folder as a Path.
    """
    folder, seeds = Path(folder), list(seeds)

    def write(seed):
        subject = make_subject(seed, size, amplitude, dims)
        name = f"subject_{seed:04d}"
        write_volume(folder / "imagesTr" / f"{name}.nii.gz", np.rint(subject["image"] * 1000).astype(np.int16),
                     np.eye(4))
        write_volume(folder / "labelsTr" / f"{name}.nii.gz", subject["label"].astype(np.uint8), np.eye(4))
        if with_fields:
            (folder / "fieldsTr").mkdir(exist_ok=True)
            np.save(folder / "fieldsTr" / f"{name}.npy", subject["field"])
        return f"{name}.nii.gz"
    # Threads suffice: scipy and gzip release Python's lock. At 128^3 a subject takes nine seconds on one core.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as threads:
        names = list(tqdm(threads.map(write, seeds), desc=f"writing {folder}", unit="subject", total=len(seeds)))
    content = {"name": "Synthetic", "description": "Deformed copies of one synthetic anatomy, made by this repository",
               "tensorImageSize": f"{dims}D", "modality": {"0": "synthetic"}, "labels": LABELS,
               "numTraining": len(names), "numTest": 0, "test": [],
               "training": [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names]}
    write_file(folder / "dataset.json", json.dumps(content, indent=1) + "\n")
    return folder


def _shape(size, dims):
    """`size` as one int for each axis. Raises ValueError below 8 voxels."""
    shape = tuple(int(n) for n in np.broadcast_to(size, (dims,)))
    if min(shape) < 8:
        raise ValueError(f"size {shape} is too small for the anatomy; use at least 8 voxels per axis")
    return shape


def _distance(x, y, z, centre, radii):
    """Approximate signed distance to an ellipsoid, in normalised units; negative inside."""
    a, b, c = ((u - m) / r for u, m, r in zip((x, y, z), centre, radii))
    return (np.sqrt(a * a + b * b + c * c) - 1) * min(radii)


def _structures(x, y, z):
    """(signed distance in normalised units, intensity) of labels 1 to 6; a later one covers an earlier one."""
    outer = _distance(x, y, z, (0, 0, 0), (0.67, 0.75, 0.69))
    inner = _distance(x, y, z, (0, 0.02, 0), (0.51, 0.58, 0.53))
    moon = _distance(x, y, z, (0.02, 0.31, 0.02), (0.42, 0.26, 0.38))
    bite = _distance(x, y, z, (0.02, 0.16, 0.02), (0.27, 0.20, 0.27))
    return [(np.maximum(outer, -inner), 0.62),
            (_distance(x, y, z, (-0.27, -0.11, 0.0), (0.20, 0.26, 0.33)), 0.85),
            (_distance(x, y, z, (0.27, -0.07, -0.04), (0.18, 0.23, 0.30)), 0.76),
            (np.maximum(moon, -bite), 0.12),
            (_distance(x, y, z, (0.02, 0.10, 0.03), (0.17, 0.16, 0.19)), 0.98),
            (_distance(x, y, z, (0.0, -0.38, 0.05), (0.24, 0.16, 0.29)), 0.52)]


def _soft(distance, width):
    """1 inside, 0 outside, a cubic ramp from -width to +width between them."""
    ramp = np.clip(0.5 - distance / (2 * width), 0, 1)
    return ramp * ramp * (3 - 2 * ramp)


def _noise(rng, size, scale):
    """(dims, *size) smooth noise of unit root mean square; scale: Gaussian sigma as a fraction of the side."""
    noise = rng.standard_normal((len(size), *size))
    noise = ndimage.gaussian_filter(noise, [0, *(scale * n for n in size)], mode="reflect")
    return noise / _rms(noise)


def _affine_velocity(rng, size):
    """(dims, *size) velocity of a random affine map about the centre, as fractions of the sides."""
    dims = len(size)
    matrix = np.diag(rng.uniform(-0.08, 0.08, dims))
    for a, b in itertools.combinations(range(dims), 2):
        angle = np.deg2rad(rng.uniform(-5, 5))
        matrix[a, b] = -angle
        matrix[b, a] = angle
    shift = rng.uniform(-0.02, 0.02, dims)
    points = np.stack(np.meshgrid(*[(np.arange(n) + 0.5) / n - 0.5 for n in size], indexing="ij"))
    return np.tensordot(matrix, points, axes=1) + shift.reshape(dims, *[1] * dims)


def _rms(vectors):
    """Root mean square of all components."""
    return np.sqrt(np.mean(vectors ** 2))


def _integrate(velocity):
    """Displacement after unit time of a stationary velocity, both (dims, *size) in voxels, by scaling and squaring."""
    grid = np.indices(velocity.shape[1:])
    field = velocity / 2 ** STEPS
    for _ in range(STEPS):
        points = grid + field
        field = field + np.stack([ndimage.map_coordinates(part, points, order=1, mode="nearest") for part in field])
    return field


def main():
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.synthetic", description="Write synthetic "
                                     "anatomy with labels, in 2D or 3D, as a data set.")
    parser.add_argument("--out", required=True, help="folder to write to (Decathlon layout)")
    parser.add_argument("--count", type=int, required=True, help="number of subjects")
    parser.add_argument("--first-seed", type=int, default=0, help="seed and number of the first subject (default 0)")
    parser.add_argument("--size", type=int, nargs="+", default=[48], help="voxels per side, one or one per axis")
    parser.add_argument("--dims", type=int, choices=(2, 3), default=3, help="2 or 3 dimensions (default 3)")
    parser.add_argument("--amplitude", type=float, default=AMPLITUDE,
                        help="root mean square displacement per axis, fraction of the side; above 0.08 some voxels may "
                        f"fold (default {AMPLITUDE})")
    parser.add_argument("--with-fields", action="store_true", help="also write the true fields as .npy")
    args = parse_options(parser)
    if args.count < 1 or args.first_seed < 0:
        parser.error("--count must be at least 1 and --first-seed at least 0")
    if len(args.size) not in (1, args.dims) or min(args.size) < 8:
        parser.error(f"--size takes 1 or {args.dims} numbers of at least 8")
    seeds = range(args.first_seed, args.first_seed + args.count)
    write_dataset(args.out, seeds, args.size, args.amplitude, args.dims, args.with_fields)


if __name__ == "__main__":
    main()
