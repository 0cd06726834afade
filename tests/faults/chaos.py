"""SIGKILLs at random moments to random ranks of one run: are the final weights those of an undisturbed run?

    python tests/faults/chaos.py --kills 20 --seed S [--ranks 2] [--keep FOLDER]

The launcher is left alone and has to bring the run to its end. The last line of standard output is one JSON object.
"""
import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from Report.goodput import add_up, goodput, tables  # noqa: E402
from Report.run_logs import read_run  # noqa: E402
from Runtime.manifest import durable_step  # noqa: E402
from Supervisor.attempts import read_lines  # noqa: E402
from tests.faults.common import (  # noqa: E402
    STEPS_PER_EPOCH,
    ends,
    family,
    final_weights,
    launch,
    new_folder,
    run_of,
    steps_done,
    wait,
)
from tests.launching import until  # noqa: E402


def newest_pids(folder, ranks):
    """Process numbers of the newest attempt's ranks that have started."""
    starts = {}
    for rank in range(ranks):
        for line in read_lines(run_of(folder) / f"rank{rank}.jsonl"):
            if line["event"] == "start":
                starts[rank] = (line["attempt"], line["pid"])
    newest = max((attempt for attempt, _ in starts.values()), default=-1)
    return newest, {rank: pid for rank, (attempt, pid) in starts.items() if attempt == newest}


def start_seconds(folder):
    """What the first attempt of a run took from the start of rank 0 to its first step."""
    lines = read_lines(run_of(folder) / "rank0.jsonl")
    began, stepped = (next(line["time"] for line in lines if line["event"] == event) for event in ("start", "step"))
    return stepped - began


def disturb(process, folder, ranks, kills, draws, start_s):
    """Kill one random rank after another, each at a random moment of its attempt. Returns {attempt: rank}.

    start_s: seconds of a start. At most every second attempt dies within one and a half of these, in its start or first
    steps, the others in the two seconds after a checkpoint of their own: the launcher is right to stop a run that dies
    three times at one place without a new one, and kills by the clock alone do just that on a busy machine.
    """
    killed, last, early = {}, -1, False
    bar = tqdm(total=kills, desc="kills", unit="kill", file=sys.stderr, mininterval=10)
    while len(killed) < kills and process.poll() is None:
        until(lambda last=last: newest_pids(folder, ranks)[0] > last or process.poll() is not None)
        before = durable_step(run_of(folder))
        early = not early and draws.random() < 0.6
        if not early:
            until(lambda before=before: durable_step(run_of(folder)) > before or process.poll() is not None)
        time.sleep(draws.uniform(0.2, 1.5 * start_s) if early else draws.uniform(0, 2))
        attempt, pids = newest_pids(folder, ranks)
        rank = draws.randrange(ranks)
        if rank in pids and pids[rank] in family(process.pid):
            os.kill(pids[rank], signal.SIGKILL)
            killed[attempt], last = rank, attempt
            bar.update()
            bar.set_postfix_str(f"rank {rank} at step {steps_done(folder) + 1}")
    bar.close()
    return killed


def misnamed(killed, found):
    """{attempt: what was said} of the attempts whose end does not name the rank that was killed in them."""
    wrong = {}
    for attempt, rank in killed.items():
        end = found.get(attempt, {"cause": None, "verdict": {"rank": None}, "sentence": "no end was written"})
        if (end["cause"], end["verdict"]["rank"]) != ("killed", rank):
            wrong[attempt] = end["sentence"]
    return wrong


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run there and leave everything")
    args = parser.parse_args(argv)
    parent = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    # Long enough that the kills come first: a life of some seconds makes about two dozen steps.
    epochs = 4 + 2 * args.kills
    changes = {"run__epochs": epochs, "run__val_every": 10, "run__picture_every": 0}
    undisturbed, chaos = new_folder(parent, "undisturbed"), new_folder(parent, "chaos")
    print(f"undisturbed run of {epochs * STEPS_PER_EPOCH} steps", file=sys.stderr, flush=True)
    if code := wait(launch(undisturbed, args.ranks, **changes), 900):
        sys.exit(f"the undisturbed run ended with {code}: {undisturbed}/log.txt")
    process = launch(chaos, args.ranks, **changes)
    killed = disturb(process, chaos, args.ranks, args.kills, random.Random(args.seed), start_seconds(undisturbed))
    code = wait(process, 900)
    equal = code == 0 and final_weights(chaos, epochs) == final_weights(undisturbed, epochs) is not None
    found = ends(chaos)
    wrong = misnamed(killed, found)
    for attempt, sentence in wrong.items():
        print(f"rank {killed[attempt]} was killed, and the verdict was: {sentence}", file=sys.stderr)
    if code:
        said = [end["sentence"] for end in found.values()] or ["no attempt has an end"]
        print(f"the disturbed run ended with {code}: {said[-1]}", file=sys.stderr)
    logs = read_run(run_of(chaos))
    print(tables(logs))
    print(f"{len(killed)} ranks killed, {len(killed) - len(wrong)} of them named, {len(found)} attempts; weights "
          f"{'bitwise equal' if equal else 'DIFFERENT'} to those of the undisturbed run")
    print(json.dumps({"kills": len(killed), "named": len(killed) - len(wrong), "equal": equal,
                      "goodput": round(goodput(add_up(logs)[0]), 4)}))
    if not args.keep:
        shutil.rmtree(parent)
    return 0 if equal and len(killed) == args.kills and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
