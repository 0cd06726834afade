"""Logs of a run that has not been: a healthy one of any length, in which a test spoils what it is about."""
import datetime
import json

from OM_train_3modes import MODES
from Runtime.config import modes_of, save_config
from Runtime.provenance import described
from tests.tiny import config

START, STEP_S = 1_000_000.0, 0.5
PHASES = {"data": 0.01, "deform": 0.09, "forward": 0.15, "agree": 0.02, "backward": 0.2, "optimizer": 0.03}
HEALTHY = {"registration.gate": 0.2, "run.epochs": 10}


def made_up_run(run, steps=500, ranks=2, ended=True, pace=None, step=None, epoch=None, events=(), **changes):
    """Write the logs of a healthy run, an epoch of 50 steps after the other.

    pace: (rank, step, line) -> changes of a line "pace". step: (number, line) -> changes of a line "step". epoch:
    (number, line) -> changes of a line "epoch". events: further lines, as (rank, line). changes: of the config, with a
    double underscore for the dot. Returns: run, a Path, which is created.
    """
    run.mkdir(parents=True, exist_ok=True)
    last = START + STEP_S * steps
    lines = [{"event": "begin", "attempt": 0, "loop": "x", "time": START, "ranks": ranks, "durable": 0}]
    if ended:
        verdict = {"dead": False, "cause": "done", "detail": ""}
        lines.append({"event": "end", "attempt": 0, "loop": "x", "time": last, "cause": "done", "decision": "done",
                      "verdict": verdict, "sentence": "attempt 0: done. The training is complete."})
    write(run / "attempts.jsonl", lines)
    for rank in range(ranks):
        head = {"attempt": 0, "rank": rank}
        lines = [{"event": "start", **head, "step": 0, "time": START, "host": "h", "node": f"n{rank}", "pid": 7}]
        for number in range(steps):
            lines += lines_of_step(number, head, steps, pace, step, epoch)
        lines += [{"attempt": 0, "rank": rank, **line} for of, line in events if of == rank]
        lines.append({"event": "now", **head, "step": steps - 1, "mode": "diffusion", "phase": "forward", "number": 99,
                      "time": last, "deadline": 120.0, "host": "h"})
        write(run / f"rank{rank}.jsonl", lines)
    write_launch(run, changes)
    return run


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of_step(number, head, steps, pace, step, epoch):
    """What a rank logs of a step."""
    at, rank, lines = START + STEP_S * (number + 1), head["rank"], []
    share = number / max(steps, 1)
    if rank == 0:
        terms = {"total": 1 - share, "ang": -share, "dist": 1.5 - share, "regul": 0.01, "contrastive": 4 - share,
                 "regist": -share, "imgsim": -share, "imgmse": 0.1, "ddf": 0.02}
        line = {"event": "step", **head, "step": number, "time": at, "epoch": number // 50, "ang": -share, "open": True,
                "nonfinite": 0, "terms": terms, "norms": {"diffusion": 0.02, "contrastive": 0.1, "registration": 0.3},
                "lr": 1e-4, "samples": 4, "spent": PHASES}
        lines.append({**line, **(step(number, line) if step else {})})
    if number % 10 == 9:
        # A little restless, and the same every time.
        spent = {name: 10 * seconds * (1 + 0.02 * ((number // 10 * 7 + rank * 3) % 5 - 2)) for name, seconds in
                 PHASES.items()}
        line = {"event": "pace", **head, "step": number, "time": at, "steps": 10, "seconds": 10 * STEP_S,
                "spent": spent, "host_used": 2 ** 30, "host_free": 2 ** 36, "device_free": None,
                "device_reserved": None}
        if rank == 0:
            line.update(disk_free=10 ** 12, disk_total=2 * 10 ** 12)
        lines.append({**line, **(pace(rank, number, line) if pace else {})})
    if rank == 0 and number % 50 == 49:
        line = {"event": "epoch", **head, "step": number + 1, "time": at, "epoch": number // 50, "steps": 50,
                "imgsim": -share, "regist": -share, "open_share": 1.0, "nonfinite": 0, "val_dice": 0.5 + share / 4,
                "val_imgsim": 0.8 + share / 10}
        lines.append({**line, **(epoch(number // 50, line) if epoch else {})})
    return lines


def write_launch(run, changes):
    folder = run / "launches/0000"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**{key.replace(".", "__"): value for key, value in HEALTHY.items()}, **changes}
    cfg = config(**settings)
    save_config(cfg, folder / "config.yaml")
    started = datetime.datetime.fromtimestamp(START).astimezone().isoformat(timespec="seconds")
    launch = {"started": started, "step": 0, "command": ["python", "OM_train_3modes.py"], "host": "h", "commit": "abc",
              "changed": False, "seed": 0, "python": "3.11", "packages": {"torch": "2"},
              "modes": [described(mode) for mode in modes_of(cfg, MODES)],
              "settings": {"NCCL_DEBUG": "INFO"}}
    (folder / "launch.json").write_text(json.dumps(launch))
