"""Leaks, made and real: who takes the memory, and when it runs out."""
import os
import platform
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch

from Runtime import memory
from Runtime.memory import WINDOW, _host_used, _room_in_groups, children, find_leak, measure, runs_out_soon, trim
from tests import warm
from tests.tiny import ROOT

MIB, GIB = 2 ** 20, 2 ** 30
CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
HOLD = "block = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"


def series(host_used=4 * GIB, host_free=60 * GIB, device_free=40 * GIB, device_reserved=20 * GIB, count=WINDOW):
    """Samples of measure(), from one number or one array for each of its values."""
    columns = np.broadcast_arrays(host_used, host_free, device_free, device_reserved, device_reserved, np.zeros(count))
    names = ("host_used", "host_free", "device_free", "device_reserved", "device_allocated")
    return [dict(zip(names, map(float, row))) for row in zip(*columns)]


STEP = np.arange(WINDOW)


@pytest.mark.parametrize("who, place, samples, left", [
    ("graph", "device", series(device_reserved=20 * GIB + STEP * GIB, device_free=40 * GIB - STEP * GIB), 21),
    ("driver or communication", "device", series(device_free=40 * GIB - STEP * GIB), 21),
    ("loader or Python objects", "host", series(4 * GIB + STEP * GIB, 60 * GIB - STEP * GIB), 41),
    ("loader or Python objects", "host", series(4 * GIB + STEP * GIB, 60 * GIB - 2 * STEP * GIB), 11),
    ("loader or Python objects", "host", series(host_used=4 * GIB + STEP * GIB), 60),
    ("host, outside this run", "host", series(host_free=40 * GIB - STEP * GIB), 21)])
def test_each_leak_is_named_with_its_rate_and_its_end(who, place, samples, left):
    leak = find_leak(samples, 100 + STEP)
    assert leak["who"] == who and leak["steps_left"] == left
    assert leak["bytes_per_step"] == pytest.approx(GIB)
    assert leak["sentence"] == f"{place} memory grows by 1024.0 MiB a step ({who}) and runs out in about {left} steps"
    assert runs_out_soon(leak) == (left < 40)


def test_rates_are_per_step_and_a_short_window_says_nothing():
    samples = series(4 * GIB + STEP * GIB, 60 * GIB - STEP * GIB)
    assert find_leak(samples, 5 * STEP)["bytes_per_step"] == pytest.approx(GIB / 5)
    assert find_leak(samples[1:], STEP[1:]) is None
    assert not runs_out_soon(None)


def test_what_runs_out_first_is_told():
    host, device = 300 * GIB - STEP * GIB, 40 * GIB - STEP * GIB
    samples = series(4 * GIB + STEP * GIB, host, device, 20 * GIB + 0.9 * STEP * GIB)
    assert find_leak(samples, STEP)["who"] == "graph", "the driver's tenth is the smaller part"
    samples = series(4 * GIB + STEP * GIB, host - 275 * GIB, device)
    assert find_leak(samples, STEP)["who"] == "loader or Python objects"


def test_memory_that_others_take_is_told_only_where_it_runs_out_soon():
    assert find_leak(series(host_free=900 * GIB - STEP * GIB), STEP) is None


def test_growth_below_a_mebibyte_a_step_is_no_leak():
    assert find_leak(series(host_used=4 * GIB + 0.9 * MIB * STEP), STEP) is None
    assert find_leak(series(host_used=4 * GIB + 1.1 * MIB * STEP), STEP)["bytes_per_step"] == pytest.approx(1.1 * MIB)


STEPS = np.arange(200)
NOISE = np.random.default_rng(0).integers(0, 8, 200) * 200 * MIB + 500 * MIB * np.sin(STEPS / 3)


@pytest.mark.parametrize("grown", [
    (STEPS >= 100) * 3.0 * GIB, (1.0 * (STEPS >= 100) + (STEPS >= 110)) * GIB, NOISE,
    *(8 * GIB * (1 - np.exp(-STEPS / time_constant)) for time_constant in (2, 5, 10))],
    ids=["a jump", "two jumps", "loader workers", *(f"warm-up {steps}" for steps in (2, 5, 10))])
def test_what_jumps_wavers_or_levels_off_is_no_leak(grown):
    samples = series(4 * GIB + grown, 60 * GIB - grown, 40 * GIB - grown, 20 * GIB + grown, len(STEPS))
    for start in range(len(STEPS) - WINDOW):
        assert find_leak(samples[start:start + WINDOW], start + STEP) is None
    for start in range(0, len(STEPS) - 50, 5):
        assert find_leak(samples[start:start + 50], STEPS[start:start + 50]) is None


@pytest.mark.parametrize("reserved", [False, True])
def test_the_recorded_leaks_are_found(reserved):
    random = np.random.default_rng(1)
    slow = 0.07 * GIB * STEP + random.uniform(-1, 1, WINDOW) * 30 * MIB
    fast = np.cumsum(random.uniform(1.0, 1.8, WINDOW)) * GIB
    for grown, rate in ((slow, 0.07 * GIB), (fast, 1.4 * GIB)):
        leak = find_leak(series(device_free=60 * GIB - grown, device_reserved=4 * GIB + reserved * grown), STEP)
        assert leak["who"] == ("graph" if reserved else "driver or communication")
        assert leak["bytes_per_step"] == pytest.approx(rate, rel=0.1)
        assert leak["steps_left"] == pytest.approx((60 * GIB - grown[-1]) / rate, rel=0.1)
        assert runs_out_soon(leak) == (grown is fast)


def test_a_leak_that_leaves_no_time_for_a_whole_window_is_told_before():
    few = np.arange(8)
    leak = find_leak(series(device_free=15 * GIB - 1.4 * GIB * few, count=8), few)
    assert leak["who"] == "driver or communication" and leak["steps_left"] == 4 and runs_out_soon(leak)
    warm_up = 8 * GIB * (1 - np.exp(-few / 2))
    assert find_leak(series(device_free=40 * GIB - warm_up, count=8), few) is None
    assert find_leak(series(device_free=15 * GIB - 1.4 * GIB * few[:5], count=5), few[:5]) is None


@pytest.mark.parametrize("rate", [0.335, 1.15])
def test_a_leak_of_an_intel_driver_is_told_before_the_usable_share_is_used(monkeypatch, rate):
    """Measured on Dawn: of 64 GiB, the allocator and the driver together get 44.8."""
    free = iter(64 * GIB - 22 * GIB - int(rate * step * GIB) for step in range(100))
    module = types.SimpleNamespace(memory_reserved=lambda device: 22 * GIB, memory_allocated=lambda device: 20 * GIB,
                                   mem_get_info=lambda device: (next(free), 64 * GIB),
                                   get_device_properties=lambda device: types.SimpleNamespace(total_memory=64 * GIB))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    samples, leak = [], None
    while not runs_out_soon(leak):
        samples.append(measure(torch.device("xpu")))
        leak = find_leak(samples[-WINDOW:], np.arange(len(samples))[-WINDOW:])
    assert leak["who"] == "driver or communication" and leak["bytes_per_step"] == pytest.approx(rate * GIB, rel=0.01)
    assert 22 * GIB + rate * GIB * len(samples) < 44.8 * GIB


def test_a_driver_that_does_not_report_free_memory_shows_a_graph_but_no_leak_of_its_own(monkeypatch, capsys):
    """Of an Intel node without ZES_ENABLE_SYSMAN=1. What is said once is not that nothing leaks."""
    def unknown(device):
        raise RuntimeError("The device does not support querying the available free memory.")

    held = iter(20 * GIB + step * GIB for step in range(100) for _ in range(2))  # all of it in tensors
    module = types.SimpleNamespace(memory_reserved=lambda _: next(held), memory_allocated=lambda _: next(held),
                                   get_device_properties=lambda _: types.SimpleNamespace(total_memory=64 * GIB),
                                   mem_get_info=unknown)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    state = memory.new_watch(torch.device("xpu"), 0)
    told = [memory.watch(state, step) for step in range(WINDOW + 2)]
    assert state["leak"]["who"] == "graph" and told[-1] and all(s["device_free"] is None for s in state["samples"])
    assert state["leak"]["steps_left"] == 4, "of the 44.8 GiB that can be had, 41 are taken"
    said = capsys.readouterr().err
    assert said.count("does not report free memory, so leaks of the driver are not seen; set ZES_ENABLE_SYSMAN=1") == 1
    flat = [{**sample, "device_reserved": 20 * GIB, "device_allocated": 20 * GIB} for sample in state["samples"]]
    assert find_leak(flat, range(len(flat))) is None


@pytest.mark.slow
def test_a_leak_that_goes_on_is_logged_again_and_printed_once(monkeypatch, capsys):
    logged, free = [], 400 * GIB
    samples = ({"host_used": 4 * GIB + 3 * step * 2 ** 20, "host_free": free - 3 * step * 2 ** 20,
                **dict.fromkeys(("device_free", "device_unreserved", "device_reserved", "device_allocated"))}
               for step in range(2 * memory.TOLD_AGAIN + 100))
    monkeypatch.setattr(memory, "measure", lambda *_: next(samples))
    monkeypatch.setattr(memory.watchdog, "event", lambda kind, **_: logged.append(kind))
    state = memory.new_watch(CPU, 0)
    for step in range(2 * memory.TOLD_AGAIN + 100):
        memory.watch(state, step)
    assert logged.count("leak") == 3 and capsys.readouterr().err.count("grows by") == 1


def test_what_the_allocator_only_keeps_is_no_leak():
    """It gives cached blocks back before memory runs out; tensors that stay are a leak."""
    kept = series(device_reserved=20 * GIB + STEP * GIB, device_free=40 * GIB - STEP * GIB)
    assert find_leak([{**sample, "device_allocated": 15.0 * GIB} for sample in kept], STEP) is None
    used = [{**sample, "device_allocated": 15.0 * GIB + step * GIB} for sample, step in zip(kept, STEP)]
    leak = find_leak(used, STEP)
    assert leak["who"] == "graph" and leak["steps_left"] == 26, "21 GiB are free, and 5 kept"


def test_a_leak_in_blocks_of_the_allocator_is_found():
    blocks = STEP // 5 * 350 * MIB
    leak = find_leak(series(device_free=60 * GIB - blocks, device_reserved=4 * GIB + blocks), STEP)
    assert leak["who"] == "graph" and leak["bytes_per_step"] == pytest.approx(70 * MIB, rel=0.1)


def watched(what):
    """A loop that keeps 5 MB in each step, or frees them again, with 250 MB left."""
    kept, told = [], []
    state = memory.new_watch(CPU, (measure(CPU)["host_used"] + 250e6) / 2 ** 30)
    for step in range(30):
        kept.append(bytearray(b"x") * 5_000_000)
        if what == "frees":
            kept.clear()
        told.append(memory.watch(state, step))
    print(len(state["samples"]), told.index(True) if True in told else None)


@linux
@pytest.mark.parametrize("what, told", [pytest.param("keeps", WINDOW + 1, marks=pytest.mark.slow), ("frees", None)])
def test_a_watched_loop_is_told_as_soon_as_its_leak_shows_and_once(tmp_path, what, told):
    done = warm.program(watched, what, tmp_path)
    assert done.stdout.split() == ["28", str(told)], "the first two steps are not samples"
    sentence = r"host memory grows by 4\.\d MiB a step \(loader or Python objects\)"
    assert len(re.findall(sentence, done.stderr)) == (told is not None)


@linux
@pytest.mark.parametrize("nested", [False, True])
def test_memory_of_children_and_of_their_children_counts(nested):
    child = [sys.executable, "-c", HOLD]
    if nested:
        child = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r}); print('over')"]
    before = measure(CPU)["host_used"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        during = measure(CPU)["host_used"]
        process.communicate("\n")
    assert 64 * MIB <= during - before < 64 * MIB + (1 + nested) * 32 * MIB
    assert measure(CPU)["host_used"] == pytest.approx(before, abs=8 * MIB)


@linux
def test_measure_on_the_cpu_is_cheap_and_knows_its_limit(tmp_path):
    """In a process of its own: what earlier tests left running in this one takes and frees memory meanwhile."""
    done = warm.program(measure_is_cheap_and_knows_its_limit, None, tmp_path)
    assert done.returncode == 0, done.stderr


def measure_is_cheap_and_knows_its_limit():
    trim()
    before = measure(CPU)
    assert before["device_free"] is None and before["device_reserved"] is None
    assert MIB < before["host_used"] and 0 < before["host_free"]
    limited = measure(CPU, before["host_used"] + 100 * MIB)
    assert limited["host_free"] == pytest.approx(100 * MIB, abs=8 * MIB)
    shared = torch.ones(4 * MIB).share_memory_()  # 16 MiB: containers have 64 for all
    trim()
    assert measure(CPU)["host_used"] - before["host_used"] == pytest.approx(4 * shared.numel(), abs=8 * MIB)
    seconds = []
    for _ in range(20):
        started = time.thread_time()  # of a processor: the clock would also count the tests beside this one
        measure(CPU)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 1e-2, "a tenth of the shortest step there is"


@pytest.mark.parametrize("v1", [False, True])
def test_room_in_control_groups_is_that_of_the_group_and_of_those_above(tmp_path, v1):
    limit, usage, total, top = ("limit_in_bytes", "usage_in_bytes", "total_", "memory") if v1 else (
        "max", "current", "", ".")
    free = str(2 ** 63 - 4096) if v1 else "max"
    for folder, values in {"job_1": (900, 700, 50), "job_1/step_0": (free, 600, 0), "": (2000, 1000, 7)}.items():
        group = tmp_path / top / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / f"memory.{limit}").write_text(f"{values[0]}\n")
        (group / f"memory.{usage}").write_text(f"{values[1]}\n")
        lines = ["anon 1", f"{total}inactive_file {values[2]}", f"{total}active_file 5", "workingset_refault_file 99"]
        (group / "memory.stat").write_text("\n".join(lines + ["inactive_file 1", "active_file 2"] * v1) + "\n")
    membership = tmp_path / "membership"
    membership.write_text(f"3:cpu,cpuacct:/else\n{'4:hugetlb,memory' if v1 else '0:'}:/job_1/step_0\n")
    assert _room_in_groups(tmp_path, membership) == [255, 1012]
    assert _room_in_groups(tmp_path, tmp_path / "none") == []


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep other amounts")
def test_what_the_c_library_keeps_is_given_back():
    """Blocks below its threshold for mappings, freed below one that stays: the heap cannot shrink by itself."""
    blocks = [bytearray(b"x") * 2 ** 16 for _ in range(4000)]
    del blocks[:-1]
    kept = _host_used()
    trim()
    assert kept - _host_used() > 150 * MIB and blocks


FREED = """
import resource, sys, torch
from Runtime.errors import keep_freed_memory
if sys.argv[1] != "as it is":
    keep_freed_memory()
if sys.argv[1] == "as usual again":
    keep_freed_memory(False)
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2 ** 22)  # 16 MiB
    torch.ones(2 ** 25)  # 128 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep other amounts")
@pytest.mark.slow
def test_freed_memory_is_kept_for_the_next_tensor():
    """By itself glibc gets the pages of each large tensor from Linux anew."""
    pages = {word: int(subprocess.run([sys.executable, "-c", FREED, word], cwd=ROOT, check=True, capture_output=True,
                                      text=True).stdout) for word in ("as it is", "kept", "as usual again")}
    assert pages["kept"] < 50 < min(pages["as it is"], pages["as usual again"]), pages  # 64 where pages are huge


def test_processes_that_end_while_they_are_counted():
    """Loader workers come and go at any time; a process may be gone between two looks at it."""
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        assert sleeping.pid in children(os.getpid())
        sleeping.kill()
    assert children(sleeping.pid) == []
    few_at_once = "while true; do for n in 1 2 3 4 5 6; do /bin/true & done; wait; done"
    crowd = subprocess.Popen(["bash", "-c", few_at_once], stderr=subprocess.DEVNULL)
    try:
        until = time.time() + 0.7
        while time.time() < until:
            assert _host_used() > 0
    finally:
        crowd.kill()
        crowd.wait()


@linux
@pytest.mark.parametrize("missing, known", [("MemAvailable", True), ("MemAvailable|MemFree", False)])
def test_a_kernel_that_does_not_tell_its_free_memory_is_not_full(missing, known, monkeypatch):
    """WSL 1 has no MemAvailable."""
    meminfo, read = re.sub(rf"(?m)^({missing}):.*\n", "", memory._read("/proc/meminfo")), memory._read
    monkeypatch.setattr(memory, "_read", lambda path: meminfo if path == "/proc/meminfo" else read(path))
    monkeypatch.setattr(memory, "_room_in_groups", lambda: [])
    free = measure(CPU)["host_free"]
    assert free > MIB if known else free is None
