"""How closely this project reproduces the published code's answers, with the published weights, on its reference.

    python tests/bench/bench_original.py [--json]

Fields are in image sides. field_error: largest difference of the network's fields at times 0, 1, 8, 40 and 79.
first_recovery_error: the same after the first of the 80 predictions of the published recovery. recovered_error: after
those down to times 40 and 0. The published recovery is chaotic: a field is zero outside the image, and the jump at the
border multiplies differences at every step, so two runs that start 1e-6 image sides apart end as far apart as two that
round differently. own_spread is that distance, between two runs of this code; recovered_mean and own_spread_mean are
the means over voxels. mean_voxels: mean length of the recovered field per axis, here and in the reference. Prints one
JSON object as the last line; takes about five minutes on one core. Without the weights it says so and ends.
"""
import argparse
import json
import sys
import time

import numpy as np
import torch
from common import ROOT
from tqdm import tqdm

from Diffusion.diffuser import DeformDDPM
from Inference.load_model import load_model

DATA = ROOT.parent / "shared/data/original"
APART = 1e-6  # image sides by which the second run begins elsewhere


def recovered(net, image, field, cfg, name):
    """Fields after the predictions of times 79, 40 and 0, in image sides: {time: (1, 2, 256, 256)}."""
    ddpm, side, found = DeformDDPM(cfg), image.shape[-1], {}
    for first, until in tqdm(((79, 79), (78, 40), (39, 0)), desc=name, file=sys.stderr):
        part = DeformDDPM({**cfg, "diffusion.timesteps": first + 1}) if first < 79 else ddpm
        field = part.recover_as_published(net, image, field, cfg, until=until)
        found[until] = field / side
    return found


def compare():
    net, cfg = load_model(DATA / "000000_cmr_recresacnet.pth")
    with np.load(DATA / "reference.npz") as archive:
        reference = {name: torch.from_numpy(archive[name]) for name in archive}
    images, image = reference["image"], reference["image"][:1]
    side, result = images.shape[-1], {}
    with torch.no_grad():
        result["field_error"] = max(
            float((net(images, torch.full((len(images),), t)) / side - reference[f"field_t{t}"]).abs().max())
            for t in (0, 1, 8, 40, 79))
    start = side * reference["start_field"]
    found = recovered(net, image, start, cfg, "recovery")
    other = recovered(net, image, start + APART * side * torch.randn(start.shape), cfg, "again")
    distances = {t: (found[t] - reference[f"recovered_after_t{t}"]).abs() for t in found}
    spread = {t: (found[t] - other[t]).abs() for t in found}
    result["first_recovery_error"] = float(distances[79].max())
    result["recovered_error"] = max(float(distances[t].max()) for t in (40, 0))
    result["own_spread"] = max(float(spread[t].max()) for t in (40, 0))
    result["recovered_mean"] = {t: float(distances[t].mean()) for t in (40, 0)}
    result["own_spread_mean"] = {t: float(spread[t].mean()) for t in (40, 0)}
    result["mean_voxels"] = {name: side * float(field.abs().mean()) for name, field in (
        ("start", reference["start_field"]), ("here", found[0]), ("reference", reference["recovered_after_t0"]))}
    result["parameters"] = sum(tensor.numel() for tensor in net.state_dict().values())
    return result


def main(argv=None):
    parser = argparse.ArgumentParser(description="Compare the published network here with its own answers.")
    parser.add_argument("--json", action="store_true", help="only the last line, without the table")
    args = parser.parse_args(argv)
    if not (DATA / "000000_cmr_recresacnet.pth").is_file():
        print(f"skipped: the published weights are not on this machine ({DATA.name}/000000_cmr_recresacnet.pth)")
        return 0
    torch.manual_seed(0)
    began = time.time()
    result = {**compare(), "seconds": round(time.time() - began)}
    if not args.json:
        for name, value in result.items():
            print(f"{name:22} {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
