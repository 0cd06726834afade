"""Puts the repository root on sys.path so that the tests run from any folder; cleans up after each test and file."""
import faulthandler
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
from pathlib import Path

import pytest

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored by all that the tests start
if "PYTEST_XDIST_WORKER" in os.environ:  # `make test` has a process for each core; what they start has one thread too
    os.environ["OMP_NUM_THREADS"] = "1"
# torch asks for the names of addresses when ranks meet; a name server that does not answer would take 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

from Runtime import watchdog  # noqa: E402
from tests import launching  # noqa: E402

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
HOOK = sys.excepthook
launching.mark_this_process()
# Files that take long, the longest first: begun last, one of them would run alone while the other processes wait.
LONG = ("faults", "strategies", "om_augment", "affine", "train", "ranks", "launcher", "cache", "masks_and_modalities",
        "register", "watchdog", "networks", "preflight", "scaling", "segment", "mslncc", "checkpoint", "data")

# Files for `make test-all`: they install, start or train programs as a whole, count or simulate devices, or ask tools
# of the tests themselves. What a commit breaks first has its test in the other files.
SLOW = ("anatomies", "bench_augment", "bench_default", "bench_multimodal", "bench_original", "containers",
        "demo", "diagnostics", "fake_device", "fuzz", "install", "kernels", "launching", "nnunet", "notebooks",
        "simulated_device", "smoke", "step_cost", "universal", "3modes_opt_equivalence")


def pytest_collection_modifyitems(items):
    """Within one process the order of files does not matter; tests of one file stay in theirs.

    Of the slow tests, all that need a Slurm or an accelerator, of which there is one, stay in one process too, and the
    parts of the fault matrix, of which each takes minutes, need not.
    """
    places = {f"test_{name}.py": index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if item.get_closest_marker("slurm") else places.get(item.path.name, len(LONG)))
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)
        shared = next((name for name in ("slurm", "gpu") if item.get_closest_marker(name)), None)
        if (shared or item.get_closest_marker("slow")) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # beside each other they take twice as long
        alone = item.path.name == "test_faults.py"
        item.add_marker(pytest.mark.xdist_group(shared or (item.name if alone else item.path.name)))


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


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """What a fixture of the whole file has started is there before, and stays."""
    before = list(launching.STARTED)
    yield
    for process in [process for process in launching.STARTED if process not in before]:
        launching.end(process)


@pytest.fixture(autouse=True, scope="module")
def no_process_outlives_its_file(request):
    """However it was started. Slurm's daemons and jobs last for the session; tests/slurm/conftest.py ends them."""
    mark = os.environ[launching.MARK]
    before = launching.marked(mark)
    yield
    if ROOT / "tests/slurm" not in request.path.parents:
        own = [*before, multiprocessing.resource_tracker._resource_tracker._pid,  # they live as long as this process
               multiprocessing.forkserver._forkserver._forkserver_pid]
        left = launching.expect_nothing(mark, own)
        launching.kill(mark, own)
        assert not left, f"{request.path.name} has left behind: {left}"
