"""Puts the repository root on sys.path so that the tests run from any folder; cleans up after trainings in pytest."""
import faulthandler
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(2)

from Runtime import watchdog  # noqa: E402

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
HOOK = sys.excepthook


@pytest.fixture(autouse=True)
def no_watchdog_outlives_its_test():
    """A training arms deadlines that end its process, and takes its signals: here that process is pytest."""
    yield
    if watchdog.STATE["file"] is not None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(file=sys.__stderr__)
        os.close(watchdog.STATE["file"])
        watchdog.STATE.update(file=None, stop=None)
        sys.excepthook = HOOK
        for number, handler in HANDLERS.items():
            signal.signal(number, handler)
