"""Open and close the run of a training: in a rank that the launcher has started, or without a launcher.

Without a launcher, rank 0 does its work: take the lock, number the attempt, and record at the end how it went.
"""
import contextlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from Runtime import launch, watchdog
from Runtime.errors import PLANNED_RESTART
from Runtime.files import patiently
from Runtime.global_batch import fix_step
from Runtime.run_lock import TakenOver, assert_held, generations, hold, lock, run_folder
from Supervisor import attempts

LOCK_S = 60.0  # how long rank 0 tries to write the lock while the others wait for it
LAST_WORDS_S = 10.0  # rank 0 judges the attempt when all ranks have closed their logs, or after this time


def open_run(ranks, cfg, fresh):
    """Meet the other ranks and agree on the run's folder; lock it, number the attempt, start the watchdog.

    Sets ranks.step: samples and pairs of a step, fixed by the first launch of the run (Runtime/global_batch.py).
    A launcher has done all but the meeting, and passes the results as OMNIMORPH_* variables.
    fresh: begin a new folder. Returns: Path of the folder.
    """
    if "OMNIMORPH_TOKEN" in os.environ:  # the user's command (run.notify) has OMNIMORPH_RUN too
        return open_launched_run(ranks, cfg)
    launch.rendezvous(ranks, cfg["run.join_s"], f"{cfg['run.models']}/{cfg['data.name']}_{cfg['model.name']}")
    launch.refuse_together(ranks, "config", cfg, launch.other_config)
    opened = None
    if ranks.rank == 0:
        run = run_folder(cfg, fresh and not is_restart(cfg))
        ranks.token = lock_patiently(run, cfg)
        step = fix_step(run, cfg, ranks.world_size)
        opened = json.dumps([str(run), ranks.token, step, attempts.begin(run, ranks.token, ranks.world_size)])
    folder, token, ranks.step, ranks.attempt = json.loads(launch.broadcast(ranks, "run", opened))
    run = Path(folder)
    hold(run, token)
    watchdog.start(run, ranks.rank, ranks.attempt, cfg, launcher=False)
    launch.show_moves(ranks)
    return run


def is_restart(cfg):
    """Whether torchrun starts these ranks again, and an earlier start has begun a run of this name."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    return any(line.get("starter") == attempts.starter()
               for folder in generations(cfg).values() for line in attempts.history(folder))


def open_launched_run(ranks, cfg):
    """`open_run` in a rank that the launcher has started."""
    run = Path(os.environ["OMNIMORPH_RUN"])
    token = os.environ["OMNIMORPH_TOKEN"]
    ranks.step = json.loads(os.environ["OMNIMORPH_STEP"])
    watchdog.start(run, ranks.rank, int(os.environ["OMNIMORPH_ATTEMPT"]), cfg, launcher=True)
    hold(run, token)
    if ranks.rank == 0:
        lock_patiently(run, cfg, token)
    watchdog.phase("meet")
    launch.rendezvous(ranks, cfg["run.join_s"], token)
    launch.show_moves(ranks)
    launch.refuse_together(ranks, "config", cfg, launch.other_config)
    watchdog.event("met")
    return run


def lock_patiently(run, cfg, token=None):
    """Take or join the lock of a run folder, see `lock`; wait for a file system that does not answer."""
    return patiently(lambda: lock(run, attempts.stale_after_s(cfg), token=token),
                     min(cfg["run.patience_s"], LOCK_S), f"the lock of {run}")


def close_run(ranks, run, code):
    """Close the log; without a launcher, rank 0 also writes how the attempt ended and unlocks the folder.

    code: exit code of this process.
    """
    try:
        assert_held(run)
    except TakenOver:
        return  # another launch writes there now
    watchdog.finish()
    if ranks.attempt is not None and ranks.world_size > 1:
        with contextlib.suppress(dist.DistError):  # rank 0 or torchrun, which serves the store, may be dead
            ranks.store.set(f"closed/{ranks.rank}", "1")
            if ranks.rank == 0:
                launch.wait_for_keys(ranks.store, [f"closed/{rank}" for rank in range(ranks.world_size)], LAST_WORDS_S)
    if ranks.token is not None:
        try:
            # The process has printed that it is done, or why it was refused.
            attempts.end(run, ranks.attempt, code, quiet=code != PLANNED_RESTART, patience_s=LOCK_S)
            attempts.leave_folder(run, ranks.token)
        except OSError as error:  # the next launch judges this attempt from its logs
            print(f"{run}: how this attempt ended could not be written: {error}", file=sys.stderr)
