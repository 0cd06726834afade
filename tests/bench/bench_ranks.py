"""Many ranks on this machine: time to start, a killed rank, the restart, and bitwise equality of the result.

    python tests/bench/bench_ranks.py --ranks 64 [--fewer 4] [--keep FOLDER]
    python tests/bench/bench_ranks.py --paper 8 64 512 [--picture docs/ranks.png]

A tiny training runs under bash_train_multi_nodes.sh, one real process for each rank. Halfway, one rank gets SIGKILL;
the launcher has to name it and restart on its own. A few ranks then make the same steps by gradient accumulation. The
report gives the parts of each start, from the logs of all ranks:

    import     from the launch until the last rank has loaded Python, torch and this project
    meet       from there until every rank knows that all have arrived (the store of rank 0)
    first step from there to the end of the first step: data, process groups, network, checkpoint, step

On a few cores the processes take turns: importing then takes the CPU time of all ranks together, and says nothing about
a cluster, where every rank has its own cores. The meeting does, apart from waits for a core. The last line of standard
output is one JSON object.

--paper trains nothing: it computes the cost of joint work by the formulas of `paper`, and also measures the parts that
one machine can run: as many clients as ranks meet at one store (the median of five meetings), and the launcher's
verdict reads as many logs.
"""
import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import common  # noqa: F401  puts the repository on the path
import torch
from matplotlib.figure import Figure

from Report.page import text_table
from Runtime import launch as joining
from Runtime.device import describe
from Supervisor.attempts import free_port, read_lines
from Supervisor.verdict import judge
from tests.faults.common import (
    ends,
    final_weights,
    launch,
    new_folder,
    rank_pid,
    resumed_at,
    run_of,
    steps_done,
    wait,
)
from tests.launching import until

STEPS, KILLED_AFTER = 6, 3
RANK_BYTES = 350e6  # of a rank, beside what it shares with the others
# Of --paper: config_om.yaml's network, nodes of eight devices with 400 Gb/s, and what is usual of the rest.
PARAMETERS, MODES, NODE = 232.8e6, 3, 8
LATENCY_S, REQUEST_S, NODE_BANDWIDTH, COPY_BANDWIDTH, DISK_BANDWIDTH = 30e-6, 20e-6, 50e9, 20e9, 1e9
PATIENT = {"run__join_s": 900, "run__deadline_first_s": 900, "run__deadline_floor_s": 300, "run__round_seconds": 3600,
           "run__epochs": 1, "run__checkpoint_steps": 2, "run__grace_s": 20}


def settings(ranks):
    """Of a run whose steps have one sample and one pair for each of so many ranks; synthetic volumes have 6 subjects.
    """
    return {**PATIENT, "data__global_batchsize": ranks, "data__repeats": ranks * STEPS // 6}


def moments(folder, ranks, attempt):
    """When what happened in an attempt, by time.time(): {event: one for each rank} of "start" and "met"."""
    lines = [line for rank in range(ranks) for line in read_lines(run_of(folder) / f"rank{rank}.jsonl")
             if line["attempt"] == attempt]
    return {event: [line["time"] for line in lines if line["event"] == event] for event in ("start", "met", "step")}


def start_of(folder, ranks, attempt, began):
    """The parts of an attempt's start in seconds. began: when it was launched, by time.time()."""
    seen = moments(folder, ranks, attempt)
    if not seen["step"] or len(seen["start"]) < ranks or len(seen["met"]) < ranks:
        raise RuntimeError(f"attempt {attempt}: {len(seen['start'])} of {ranks} ranks have started, {len(seen['met'])} "
                           f"have met, and {len(seen['step'])} steps were made: {folder}/log.txt")
    imported, met, stepped = max(seen["start"]), max(seen["met"]), min(seen["step"])
    return {"import_s": imported - began, "meet_s": met - imported, "step_s": stepped - met, "total_s": stepped - began}


def begun_at(folder, attempt):
    """When the launcher began an attempt, by time.time()."""
    lines = read_lines(run_of(folder) / "attempts.jsonl")
    return next(line["time"] for line in lines if line["event"] == "begin" and line["attempt"] == attempt)


def with_a_kill(folder, ranks):
    """Train with so many ranks, one of which is killed. Returns the figures."""
    victim = ranks // 3
    print(f"{ranks} ranks, of which number {victim} is killed after {KILLED_AFTER} steps", file=sys.stderr, flush=True)
    process = launch(folder, ranks, **settings(ranks))
    until(lambda: process.poll() is not None or steps_done(folder) + 1 >= KILLED_AFTER, 1500)
    if process.poll() is not None:
        raise RuntimeError(f"the run ended early with {process.returncode}: {folder}/log.txt")
    os.kill(rank_pid(folder, victim), signal.SIGKILL)
    struck = time.time()
    code = wait(process, 1500)
    if code:
        raise RuntimeError(f"the run ended with {code} after the kill: {folder}/log.txt")
    first, second = (start_of(folder, ranks, attempt, begun_at(folder, attempt)) for attempt in (0, 1))
    end = ends(folder)[0]
    return {"first": first, "second": second, "verdict": end["sentence"], "judged_s": end["time"] - struck,
            "killed_named": (end["cause"], end["verdict"]["rank"]) == ("killed", victim),
            "resumed_at": resumed_at(folder)}


def measure(parent, ranks, fewer):
    """Both trainings. Returns the figures."""
    many, few = new_folder(parent, "many"), new_folder(parent, "few")
    figures = with_a_kill(many, ranks)
    print(f"the same steps with {fewer} ranks", file=sys.stderr, flush=True)
    if code := wait(launch(few, fewer, **settings(ranks)), 1500):
        raise RuntimeError(f"the run of {fewer} ranks ended with {code}: {few}/log.txt")
    figures["few"] = start_of(few, fewer, 0, begun_at(few, 0))
    weights = final_weights(many, 1)
    return {**figures, "weights": weights, "equal": weights is not None and weights == final_weights(few, 1)}


def show(figures, ranks, fewer):
    """A table for a person."""
    names = ("import_s", "meet_s", "step_s", "total_s")
    rows = [[title, *(figures[key][name] for name in names)] for title, key in (
        (f"{ranks} ranks", "first"), (f"{ranks} ranks, after the kill", "second"), (f"{fewer} ranks", "few"))]
    print(text_table(["start of", "import s", "meet s", "to first step s", "total s"], rows, [None, *[".2f"] * 4]))
    print(f"verdict {figures['judged_s']:.1f} s after the kill: {figures['verdict']}")
    print(f"went on from step {figures['resumed_at']}; weights {'bitwise equal' if figures['equal'] else 'DIFFERENT'}: "
          f"{figures['weights']}")
    print(f"on {os.cpu_count()} cores, {describe(torch.device('cpu'))}")


# ---------------------------------------------------------------------------------------------------------------------
# On paper, and with as many parts as ranks
# ---------------------------------------------------------------------------------------------------------------------

def paper(ranks, dtype_bytes=4):
    """Seconds of what ranks do together, by formula: config_om.yaml on nodes of eight devices.

    N ranks on n = N / 8 nodes; alpha, latency of a small message; B, bandwidth of a node; S, bytes of all gradients.
      meeting     5 N c           every rank sends five requests to one store, which answers each within c
      agreement   (N - 1) alpha   gloo passes the rows around a ring; once in each mode
      gradients   2 (n - 1) / n x S / B   a ring over the nodes, once in each mode, while the backward pass goes on
      checkpoint  S_all / C the copy to pinned memory, for which the step waits; S_all / D the write, which it does not
    """
    nodes, weights = max(ranks // NODE, 1), PARAMETERS * 4
    return {"meeting": 5 * ranks * REQUEST_S, "agreement": MODES * (ranks - 1) * LATENCY_S,
            "gradients": MODES * 2 * (nodes - 1) / nodes * PARAMETERS * dtype_bytes / NODE_BANDWIDTH,
            "copy": 4 * weights / COPY_BANDWIDTH, "write": 4 * weights / DISK_BANDWIDTH}


def meet_in_threads(ranks):
    """Seconds in which so many clients, each with its own connection, meet at a store, by `launch.rendezvous`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    spent = []

    def one(rank):
        began = time.monotonic()
        joining.rendezvous(joining.Ranks(rank=rank, world_size=ranks), 120)
        spent.append((began, time.monotonic()))
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in spent) - max(begin for begin, _ in spent)


def judge_logs(ranks):
    """Seconds in which the launcher finds, in the logs of so many ranks, the one that was killed."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        for rank in range(ranks):
            killed = rank == ranks // 2
            same = {"attempt": 0, "rank": rank, "step": 7, "time": 1e9}
            lines = [{**same, "event": "start", "host": f"node{rank // NODE}", "pid": 1, "node": ""}]
            lines += [{**same, "event": "step", "spent": {}}] * (1000 if rank == 0 else 0)
            if not killed:
                lines.append({**same, "event": "died", "error": "RuntimeError: Connection reset by peer", "stack": []})
            lines += [{**same, "event": "now", "mode": "diffusion", "phase": "forward" if killed else "agree",
                       "number": 9, "deadline": 30}]
            lines += [{"event": "exit", "attempt": 0, "rank": rank, "code": 137 if killed else 1, "time": 1e9 + 1}]
            (run / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        began = time.monotonic()
        verdict = judge(run, 0, ranks, 1)
        if verdict["rank"] != ranks // 2:
            raise RuntimeError(f"of {ranks} ranks number {ranks // 2} was killed, and the verdict blames {verdict}")
        return time.monotonic() - began


def show_paper(counts, picture):
    """The table, the picture and the line of JSON of --paper."""
    rows, found = [], {}
    for ranks in counts:
        computed, half = paper(ranks), paper(ranks, 2)
        found[ranks] = {**computed, "gradients_bf16": half["gradients"],
                        "meeting_measured": statistics.median(meet_in_threads(ranks) for _ in range(5)),
                        "verdict_measured": judge_logs(ranks)}
        names = ("meeting", "meeting_measured", "verdict_measured", "agreement", "gradients", "gradients_bf16", "copy",
                 "write")
        rows.append([ranks, *(1000 * found[ranks][name] for name in names)])
    header = ["ranks", "meeting", "measured", "verdict, measured", "agreements", "gradients", "in bf16", "copy",
              "write"]
    print("milliseconds; agreements and gradients of a step, copy and write of a checkpoint")
    print(text_table(header, rows, [None, *[".0f"] * 8]))
    if picture:
        draw(picture)
    print(json.dumps({str(ranks): {name: round(value, 5) for name, value in row.items()}
                      for ranks, row in found.items()}))
    return 0


def draw(path):
    """What a step spends between ranks, against their number."""
    counts = [8 * 2 ** power for power in range(8)]
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    ax = figure.subplots()
    lines = {"gradients, float64 (run.exact_sums)": [paper(n, 8)["gradients"] for n in counts],
             "gradients, float32": [paper(n)["gradients"] for n in counts],
             "gradients, bf16 (run.bf16_sums)": [paper(n, 2)["gradients"] for n in counts],
             "agreements": [paper(n)["agreement"] for n in counts]}
    for (label, seconds), style in zip(lines.items(), ("-", "-", "-", "--")):
        ax.plot(counts, [1000 * value for value in seconds], style, marker="o", markersize=4, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(n) for n in counts])
    ax.set(xlabel="ranks, eight to a node", ylabel="ms a step, three modes", ylim=(0, 300))
    ax.grid(color="#e3e6e9", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=130)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=64, help="processes; a multiple of --fewer (default: 64)")
    parser.add_argument("--fewer", type=int, default=4, help="processes of the run to compare with (default: 4)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run there and leave everything")
    parser.add_argument("--paper", type=int, nargs="+", metavar="N",
                        help="compute for so many ranks, and train nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --paper: draw what a step spends, as PNG")
    args = parser.parse_args(argv)
    if args.paper:
        return args
    if args.fewer < 1 or args.ranks < 3 or args.ranks % args.fewer:
        parser.error("--ranks must be at least 3 and a multiple of --fewer")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if args.ranks * RANK_BYTES > free:
        parser.error(f"{args.ranks} ranks need about {args.ranks * RANK_BYTES / 1e9:.0f} GB of memory, and "
                     f"{free / 1e9:.0f} GB are free: give fewer --ranks")
    return args


def main(argv=None):
    args = parse_arguments(argv)
    if args.paper:
        return show_paper(args.paper, args.picture)
    parent = args.keep or Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        figures = measure(parent, args.ranks, args.fewer)
    except (RuntimeError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(figures, args.ranks, args.fewer)
    keys = {"first_step_s": figures["first"]["total_s"], "meet_s": figures["first"]["meet_s"],
            "restart_s": figures["second"]["total_s"], "judged_s": figures["judged_s"]}
    print(json.dumps({"ranks": args.ranks, **{key: round(value, 3) for key, value in keys.items()},
                      "killed_named": figures["killed_named"], "equal": figures["equal"]}))
    if not args.keep:
        shutil.rmtree(parent)
    return 0 if figures["equal"] and figures["killed_named"] else 1


if __name__ == "__main__":
    sys.exit(main())
