"""Goodput under one hang in every epoch: epochs of a minute, with the deadlines and pauses of production scaled down.

    python tests/faults/goodput.py [--epochs 4] [--minutes 1] [--ranks 2] [--keep FOLDER]

The recorded epoch took 74 minutes (41 steps). Here it takes one, so pauses, deadline floors and the time between two
checkpoints of config_om.yaml are scaled by 60/4440, no floor below 1 s. In each epoch one rank hangs for ever, holding
the GIL, at a random step. The table says where the time went; the same log is then read as if the epochs had taken 74
minutes, with the losses as measured. The last line of standard output is one JSON object.
"""
import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from Report.goodput import add_up, goodput, lost_seconds, tables  # noqa: E402
from Report.run_logs import read_run  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Supervisor.attempts import read_lines  # noqa: E402
from tests.faults.common import ends, launch, new_folder, run_of, wait  # noqa: E402
from tests.tiny import make_data  # noqa: E402

RECORDED_S = 74 * 60
SIDE = 32  # voxels: steps of some tenths of a second


def scaled(seconds):
    """Deadlines, pauses and checkpoint interval of the production config for epochs of `seconds`."""
    cfg, factor = load_config(ROOT / "Config/config_om.yaml"), seconds / RECORDED_S
    floors = ("run.deadline_floor_s", "run.deadline_first_s", "run.grace_s")
    floors = {key: max(cfg[key] * factor, 1.0) for key in floors}
    rest = {key: cfg[key] * factor for key in ("run.pause_planned_s", "run.pause_crash_s", "run.checkpoint_minutes")}
    return {**floors, **rest, "run.deadline_factor": cfg["run.deadline_factor"], "run.checkpoint_steps": 0}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of an epoch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run there and leave everything")
    args = parser.parse_args(argv)
    parent, seconds = args.keep or Path(tempfile.mkdtemp(prefix="goodput-")), 60 * args.minutes
    make_data(parent, size=SIDE)
    changes = {"data__img_size": SIDE, "diffusion__grids": "[4, 8, 16]", "data__repeats": 10000, "run__val_every": 100}

    trial = new_folder(parent, "trial")
    wait(launch(trial, args.ranks, more=["--max-steps-before-restart", "30"], run__max_rounds=1, data__pairs=4000,
                **changes))
    times = [line["time"] for line in read_lines(run_of(trial) / "rank0.jsonl") if line["event"] == "step"]
    step = statistics.median(b - a for a, b in zip(times[5:], times[6:]))
    steps = max(round(seconds / step), 10)
    print(f"a step takes {step:.3f} s: {steps} steps make an epoch of {seconds:.0f} s", file=sys.stderr, flush=True)

    draws = random.Random(0)
    faults = [{"id": f"hang{epoch}", "do": "hold_gil", "rank": draws.randrange(args.ranks), "phase": "forward",
               "mode": "diffusion", "step": epoch * steps + draws.randrange(steps // 10, steps)}
              for epoch in range(args.epochs)]
    changes.update({key.replace(".", "__"): value for key, value in scaled(seconds).items()})
    folder = new_folder(parent, "hangs")
    code = wait(launch(folder, args.ranks, faults, run__epochs=args.epochs, data__pairs=4 * steps,
                       run__round_seconds=3600, **changes), 3600)
    run = run_of(folder)
    found = read_run(run)
    kinds, causes = add_up(found)
    print(tables(found))
    hangs = [end["sentence"] for end in ends(folder).values() if end["cause"] == "hang"]
    reached, lost = goodput(kinds), sum(map(lost_seconds, causes.values())) / args.epochs
    computed = RECORDED_S / (RECORDED_S + lost)  # if a recorded epoch lost as much time
    print(f"{len(hangs)} hangs found and named in {args.epochs} epochs; goodput {100 * reached:.1f} % (target 75), in "
          f"epochs of 74 minutes {100 * computed:.2f} % (target 99)")
    print(json.dumps({"hangs": len(hangs), "goodput": round(reached, 4), "goodput_recorded_epoch": round(computed, 4)}))
    if not args.keep:
        shutil.rmtree(parent)
    return 0 if code == 0 and len(hangs) == args.epochs and reached >= 0.75 and computed >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
