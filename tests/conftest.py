"""Puts the repository root on sys.path, makes once what several files read, and cleans up after each test and file."""
import faulthandler
import fcntl
import hashlib
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

for name in list(os.environ):  # a job's or a launcher's own would lead what the tests start astray
    if name.startswith(("SLURM_", "SBATCH_")) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
                                                          "MASTER_PORT", "RANKS", "CLUSTER", "PYTHON"):
        del os.environ[name]
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
from tests import launching, tiny  # noqa: E402

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
HOOK = sys.excepthook
launching.mark_this_process()
# Files that take long, the longest first: begun last, one of them would run alone while the other processes wait.
LONG = ("om_augment", "strategies", "affine", "train", "ranks", "cache", "register", "launcher",
        "masks_and_modalities", "watchdog", "networks", "preflight", "template", "segment", "memory", "checkpoint",
        "data", "workers")

# Files for `make test-all`: they install, start or train programs as a whole, count or simulate devices, or ask tools
# of the tests themselves. What a commit breaks first has its test in the other files.
SLOW = ("anatomies", "bench_augment", "bench_default", "bench_multimodal", "containers", "demo", "diagnostics",
        "fake_device", "fuzz", "install", "kernels", "launching", "nnunet", "notebooks",
        "simulated_device", "smoke", "step_cost", "strategies", "universal", "3modes_opt_equivalence")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Within one process the order of files does not matter; tests of one file stay in theirs.

    Of the slow tests, all that need a Slurm or an accelerator, of which there is one, stay in one process too.
    """
    places = {f"test_{name}.py": index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if item.get_closest_marker("slurm") else places.get(item.path.name, len(LONG)))
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)
        shared = next((name for name in ("slurm", "gpu") if item.get_closest_marker(name)), None)
        if (shared or item.get_closest_marker("slow")) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # beside each other they take twice as long
        item.add_marker(pytest.mark.xdist_group(shared or item.path.name))


def pytest_collection_finish(session):
    """xdist sends a group to one process by a suffix of its tests' names; where that fails, nothing else tells."""
    if getattr(session.config.option, "loadgroup", False):  # in a process of --dist loadgroup
        apart = [item.nodeid for item in session.items
                 if item.get_closest_marker("slurm") and not item.nodeid.endswith("@slurm")]
        assert not apart, f"these tests are in no group: see pytest-xdist in requirements-test.txt: {apart[:3]}"


# ---------------------------------------------------------------------------------------------------------------------
# What is made once for all processes of a run of the tests: to be read only
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): a folder that make(folder) has filled for whichever test asked first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made(name, make):
        folder, whole = shared / name, shared / f"{name}.whole"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def data(once):
    """A folder data with eight synthetic subjects of 8^3 voxels and their labels."""
    return once("tiny_data", lambda folder: tiny.make_data(folder, size=8))


@pytest.fixture(scope="session")
def finished_run(once, data):
    """finished_run(ranks, **changes): folder of a training on `data` with tiny.QUICK that nothing has interrupted.

    What it printed is in its file log if it had several ranks. Tests that continue it copy the folder.
    """
    def folder(ranks=1, **changes):
        def train(folder):
            words = tiny.options(data, folder, **{**tiny.QUICK, **changes})
            if ranks > 1:
                from tests import warm
                warm.train(ranks, folder / "log", words)
            else:
                import OM_train_3modes as om
                assert om.main(words) == 0

        kind = hashlib.sha256(json.dumps([ranks, changes], sort_keys=True, default=str).encode()).hexdigest()[:12]
        return once(f"tiny_run_{kind}", train)

    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Reports have no figures: they take most of the time of a small registration or augmentation."""
    import Inference.outputs  # noqa: F401  first: the pictures of pairs are drawn by what it has taken from there
    monkeypatch.setattr("Inference.pair_figures.pair_figure", lambda pair: None)
    monkeypatch.setattr("Inference.pair_figures.figure_png", lambda figure: b"")
    monkeypatch.setattr("Inference.augment_report.PICTURED", 0)


# ---------------------------------------------------------------------------------------------------------------------
# What is cleaned up
# ---------------------------------------------------------------------------------------------------------------------

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
