"""Speed and accuracy of the optimised operations, each against a plain implementation.

    python tests/bench/bench_ops.py [--size 128] [--threads 2]

Prints one table, then one JSON object as the last line. Ours and the reference take turns within one run, because the
speed of a shared machine drifts; the times are medians.
"""
import argparse
import json
import os
import statistics
import sys
import time

import common  # noqa: F401  puts the repository on the path
import torch
import torch.nn.functional as F
from tqdm import tqdm

from Diffusion.diffuser import draw_velocity, image_count, middle
from Diffusion.fields import identity, integrate_velocity, resize_field, warp
from Diffusion.losses import local_correlation, local_correlation_map
from Report.page import text_table
from Runtime.device import describe
from tests.plain_step import dense_correlation, mslncc, step_by_step

GRIDS, V_SCALE, TIME = [8, 16, 32, 64], 4e-5, 79
WINDOW = 9
HEADINGS = ["operation", "ours ms", "reference ms", "ratio", "error", "target"]


def in_turns(label, ours, reference, repeats, reference_repeats=None):
    """Median milliseconds of two functions that take turns, and the last answer of each: ours, reference."""
    functions, counts = (ours, reference), (repeats, reference_repeats or repeats)
    times, answers = ([], []), [None, None]
    for turn in tqdm(range(repeats), desc=label, file=sys.stderr, leave=False):
        for i in (0, 1):
            if turn < counts[i]:
                start = time.perf_counter()
                answers[i] = functions[i]()
                times[i].append(1000 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1]), *answers


def relative(x, exact):
    return float((x - exact).norm() / exact.norm())


def trajectories(velocity, count, region):
    """Exact displacement of the points of the region: x <- x + v(x), read from the velocity itself at every step."""
    moved = torch.zeros_like(velocity[(..., *region)])
    origin = [r.start for r in region]
    for _ in tqdm(range(count), desc="trajectories", file=sys.stderr, leave=False):
        moved = moved + warp(velocity, moved, padding="border", origin=origin)
    return moved


def bench_integrate_velocity(size):
    velocity = draw_velocity([(0, 0, 0), (0, 0, 1)], "velocity", 3, GRIDS, V_SCALE)
    region, count, out = middle(GRIDS[-1], 3), image_count(TIME), [size] * 3

    def ours():
        return resize_field(integrate_velocity(velocity, [count, count], region), out)

    def plain():
        return resize_field(step_by_step(velocity, count, region), out)

    ours(), resize_field(step_by_step(velocity, 2, region), out)
    ms, plain_ms, field, plain_field = in_turns("self_compose", ours, plain, 3)
    exact = resize_field(trajectories(velocity, count, region), out)
    errors = relative(field, exact), relative(plain_field, exact)
    row = [f"integrate_velocity n={count} batch 2, against step by step", ms, plain_ms, f"{plain_ms / ms:.1f}x faster",
           f"{errors[0]:.4f} / {errors[1]:.4f}", ">= 15x, error ratio < 1"]
    return row, {"self_compose_speedup": plain_ms / ms, "self_compose_error_ratio": errors[0] / errors[1]}


def similar_images(size):
    """Two images in 0 .. 1, (1, 1, size, size, size): smooth with noise, and the same with more of it."""
    numbers = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 1, *[max(size // 8, 2)] * 3, generator=numbers)
    smooth = F.interpolate(coarse, size=[size] * 3, mode="trilinear", align_corners=True)
    first = (0.9 * smooth + 0.1 * torch.rand(smooth.shape, generator=numbers)).clamp(0, 1)
    return first, first + 0.2 * torch.rand(smooth.shape, generator=numbers)


def with_backward(function, a, b):
    """A function of nothing: value of function(a, b), after its gradient in the first image has been taken."""
    def run():
        image = a.clone().requires_grad_()
        value = function(image, b)
        value.backward()
        return float(value.detach())
    return run


def bench_correlation(size, name, reference, target):
    """MSLNCC, three scales, against a reference at the full scale alone; the values are compared at that scale.

    MONAI counts zeros outside the image, so its values are compared where no window reaches there.
    """
    a, b = similar_images(size)
    ours = with_backward(lambda x, y: mslncc(x, y, WINDOW, scales=3), a, b)
    ours(), with_backward(reference, *similar_images(16))()
    ms, other_ms, _, other = in_turns(f"mslncc, {name}", ours, with_backward(reference, a, b), 5, 1)
    with torch.no_grad():
        if name == "MONAI":
            inside = (..., *[slice(WINDOW // 2, -(WINDOW // 2))] * 3)
            value, other = (float(found[inside].mean()) for found in (
                local_correlation_map(a, b, WINDOW)[0], monai_correlation("none")(a, b)))
        else:
            value = float(local_correlation(a, b, WINDOW))
    return [f"mslncc 3 scales fwd+bwd, against {name} at 1 scale", ms, other_ms, f"{other_ms / ms:.1f}x faster",
            f"{abs(value - other):.1e}", f">= {target}x, error < 1e-4"], other_ms / ms


def monai_correlation(reduction="mean"):
    """MONAI's loss as a similarity, or None. It is the negative of the squared correlation; its variances are sums.

    reduction: "mean", or "none" for the correlation at each voxel.
    """
    try:
        from monai.losses import LocalNormalizedCrossCorrelationLoss
    except ImportError:
        return None
    loss = LocalNormalizedCrossCorrelationLoss(spatial_dims=3, kernel_size=WINDOW, reduction=reduction)
    return lambda a, b: -loss(a, b)


def bench_warp(size, channels, target):
    numbers = torch.Generator().manual_seed(1)
    image = torch.rand(1, channels, *[size] * 3, generator=numbers)
    coarse = 4 * torch.randn(1, 3, 8, 8, 8, generator=numbers)
    field = F.interpolate(coarse, size=[size] * 3, mode="trilinear", align_corners=True)
    points = identity([size] * 3) + field
    grid = (points * (2 / (size - 1)) - 1).movedim(1, -1).flip(-1).contiguous()

    def ours():
        return warp(image, field)

    def bare():
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=True)

    ours(), bare()
    ms, bare_ms, warped, sampled = in_turns(f"warp {channels}", ours, bare, 9)
    error = float((warped - sampled).abs().max())
    return [f"warp {channels} channel(s), against bare grid_sample", ms, bare_ms, f"{ms / bare_ms:.2f} of its time",
            f"{error:.1e}", f"<= {target}"], ms / bare_ms


def main():
    parser = argparse.ArgumentParser(description="Time the fast operations against the plain ones.")
    parser.add_argument("--size", type=int, default=128, help="image side in voxels (default 128)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{describe(torch.device('cpu'))}, {args.threads} threads, torch {torch.__version__}, image {args.size}^3, "
          f"float32, load at start {os.getloadavg()[0]:.1f} (other work on the machine spoils the figures)")
    row, results = bench_integrate_velocity(args.size)
    rows = [row]
    for key, name, reference, target in [("mslncc_vs_dense", "dense convolutions", dense_correlation, 30),
                                         ("mslncc_vs_monai", "MONAI", monai_correlation(), 20)]:
        results[key] = None
        if reference:
            row, results[key] = bench_correlation(args.size, name, reference, target)
            rows.append(row)
    for key, channels, target in [("warp_vs_grid_sample", 3, 1.4), ("warp1_vs_grid_sample", 1, 1.8)]:
        row, results[key] = bench_warp(args.size, channels, target)
        rows.append(row)
    print(text_table(HEADINGS, rows, [None, ".1f", ".1f", None, None, None]))
    print("error: fields, relative to exact particle trajectories (ours / step by step); "
          "correlation, difference of the values at one scale; warp, largest difference")
    print(json.dumps({key: value if value is None else round(value, 4) for key, value in results.items()}))


if __name__ == "__main__":
    main()
