"""Time of a training step on a CPU, in float32 and bf16, with and without AVX-512, compared with an earlier commit.

    python tests/bench/bench_cpu.py [--steps 16] [--rounds 2] [--base ae2d719 | --base none] [--configs demo ...]

Every figure comes from a real training: OM_train_3modes.py runs some steps of a shipped config and logs when each ends.
Only the second half counts: in the first steps oneDNN compiles its kernels, and in the middle a checkpoint is written,
as in any training after some minutes. The earlier commit is unpacked into a folder and alternates with this tree, on
the same volumes. One more run of each, under torch's profiler, gives each kind of operation's share of the time and the
number of calls of `slow_conv3d`, the loop that torch falls back to without oneDNN.

"AVX2" disables AVX-512 on this processor (ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2), to stand for laptops and
many desktops; oneDNN then also reports no bf16, so bf16 is measured only without this setting. Hippocampus volumes come
from ../shared/data/hippocampus if present, else synthetic ones of that size. "om" is the network of config_om.yaml, 233
M parameters, at 64^3 with a batch of one; it takes half an hour by itself and is not profiled.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import ROOT, hippocampus

from Dataloader.synthetic import write_dataset
from Report.page import text_table
from Runtime.device import computes_bf16, describe
from Supervisor.attempts import read_lines

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROFILED = 4
KINDS = {
    "slow_conv3d": "slow_conv3d", "convolution": "convolution", "normalisation": "group_norm|layer_norm",
    "warping, resampling": "grid_sampler|upsample|interpolate|avg_pool",
    "attention, linear": "mm|scaled_dot_product|linear",
    "copies, layout": "copy_|fill_|zero_|cat|clone|contiguous|_to_copy", "pointwise, sums": "",
}
# Trains a few steps under the profiler; in the tree that is the working folder, whatever its age.
PROFILE = """
import json, sys
sys.path.insert(0, ".")
import torch
import OM_train_3modes as om
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
    code = om.main(sys.argv[2:])
rows = [(row.key, row.count, row.self_cpu_time_total) for row in seen.key_averages() if row.key.startswith("aten::")]
open(sys.argv[1], "w").write(json.dumps(rows))
sys.exit(code)
"""


def volumes(folder):
    """{config: overrides that name its volumes}. An earlier tree has to train the same network on them."""
    write_dataset(folder / "demo", range(8), 40)
    write_dataset(folder / "om", range(8), 64)
    ids = ["data.train_ids=0-5", "data.val_ids=6-7", "data.expect_samples=6"]
    words = {"demo": [f"data.root={folder}/demo", *ids],
             "om": [f"data.root={folder}/om", *ids, "data.img_size=64", "data.batchsize=1", "data.name=om",
                    "run.keep_last=1", "data.in_memory=true", "model.affine_match=true", "model.local_match=true",
                    "optim.average=0.998"]}
    return {**words, "hippocampus": hippocampus(folder / "hippocampus")}


def unpack(commit, folder):
    """The tree of a commit in a folder of its own."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


def start(tree, config, amp, words, isa, steps, program):
    """Run `program` in a tree with the arguments of a training of `steps` steps. Returns the lines of its log."""
    with tempfile.TemporaryDirectory() as place:
        words = [*words, f"run.amp={amp}", "data.cache=", "data.repeats=1000", "registration.gate=2",
                 f"run.checkpoint_steps={steps // 2}", "run.checkpoint_minutes=0", f"run.models={place}",
                 f"run.logs={place}"]
        arguments = ["--config", f"Config/config_{config}.yaml", "--max-steps-before-restart", str(steps)]
        arguments += [word for item in words for word in ("--set", item)]
        ended = subprocess.run([sys.executable, *program, *arguments], cwd=tree, env={**os.environ, **isa},
                               capture_output=True, text=True)
        if ended.returncode != 42:
            raise SystemExit(f"a training in {tree} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        return read_lines(next(Path(place).glob("*/rank0.jsonl")))


def step_seconds(tree, config, amp, words, isa, steps):
    """Seconds of each step, from the end of one to the end of the next, data included."""
    lines = start(tree, config, amp, words, isa, steps, ["OM_train_3modes.py"])
    ends = [line["time"] for line in lines if line["event"] == "step"][steps // 2:]
    return [after - before for before, after in zip(ends, ends[1:])]


def profile(tree, config, amp, words, isa):
    """({kind of operation: share of the time}, calls of slow_conv3d in a step)."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        start(tree, config, amp, words, isa, PROFILED, ["-c", PROFILE, file.name])
        rows = json.load(file)
    seconds = dict.fromkeys(KINDS, 0.0)
    for name, _, self_time in rows:
        seconds[next(kind for kind, words in KINDS.items() if re.search(words, name))] += self_time
    calls = sum(count for name, count, _ in rows if name == "aten::slow_conv3d_forward")
    return {kind: value / sum(seconds.values()) for kind, value in seconds.items()}, calls / PROFILED


def measure(trees, words, steps, rounds):
    """Rows of (config, isa, amp, tree, median seconds of a step, shares, slow calls). Trees take turns."""
    fast = {"as it is": {}, "AVX2": AVX2}
    cases = [(config, isa, amp) for config in words for isa in fast for amp in ("off", "bf16")
             if amp == "off" or (isa == "as it is" and computes_bf16(torch.device("cpu")))]
    rows = []
    for config, isa, amp in cases:
        seconds = {name: [] for name in trees}
        for _ in range(rounds):
            for name, tree in trees.items():
                seconds[name] += step_seconds(tree, config, amp, words[config], fast[isa], steps)
        for name, tree in trees.items():
            if config == "om":  # torch's profiler takes more memory for om than there is
                shares, calls = dict.fromkeys(KINDS, float("nan")), float("nan")
            else:
                shares, calls = profile(tree, config, amp, words[config], fast[isa])
            rows.append((config, isa, amp, name, statistics.median(seconds[name]), shares, calls))
            print(f"{config}, {isa}, {'float32' if amp == 'off' else amp}, {name}: {rows[-1][4]:.3f} s a step",
                  file=sys.stderr, flush=True)
    return rows


def show(rows):
    kinds = list(KINDS)
    table = [[config, isa, "float32" if amp == "off" else amp, name, seconds, calls,
              *[100 * shares[kind] for kind in kinds]] for config, isa, amp, name, seconds, shares, calls in rows]
    header = ["config", "CPU", "precision", "tree", "s a step", "slow_conv3d calls", *[f"{kind} %" for kind in kinds]]
    print(text_table(header, table, [None, None, None, None, ".3f", ".0f", *[".0f"] * len(kinds)]))


def main():
    parser = argparse.ArgumentParser(description="Seconds of a training step on a CPU, by precision and processor.")
    parser.add_argument("--steps", type=int, default=16, help="steps of each start (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each tree, in turns (%(default)s)")
    parser.add_argument("--configs", nargs="+", choices=("demo", "hippocampus", "om"), default=["demo", "hippocampus"],
                        help="which are trained (demo and hippocampus)")
    parser.add_argument("--base", default="ae2d719", help="commit to compare with, or none (%(default)s)")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error("--steps must be at least 4: only the second half counts, from the end of one step to the next")
    with tempfile.TemporaryDirectory() as name:
        trees = {} if args.base == "none" else {args.base: unpack(args.base, Path(name) / "base")}
        words = {config: of for config, of in volumes(Path(name)).items() if config in args.configs}
        trees = {**trees, "now": ROOT}
        rows = measure(trees, words, args.steps, args.rounds)
    print(f"{describe(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}; "
          f"mode 3 in every step; medians over {args.rounds} x {args.steps // 2 - 1} steps\n")
    show(rows)
    found = {(config, isa, amp, tree): seconds for config, isa, amp, tree, seconds, *_ in rows}
    speedups = {f"{config}, {isa}, {'float32' if amp == 'off' else amp}": round(found[config, isa, amp, args.base]
                                                                               / seconds, 3)
                for (config, isa, amp, tree), seconds in found.items() if tree == "now" and args.base != "none"}
    ours, base = (found.get(("hippocampus", "AVX2", "off", tree)) for tree in ("now", args.base))
    bf16 = found.get(("hippocampus", "as it is", "bf16", "now"))
    print("\n" + json.dumps({"slow_conv_calls": sum(row[6] for row in rows if row[3] == "now" and row[0] != "om"),
                             "step_s_fp32": ours and round(ours, 4), "speedup_fp32": base and round(base / ours, 3),
                             "step_s_bf16": bf16 and round(bf16, 4), "speedups": speedups}))


if __name__ == "__main__":
    main()
