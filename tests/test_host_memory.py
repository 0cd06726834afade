"""The preflight's estimate of host memory: its parts by arithmetic, and the whole against measured trainings."""
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from Dataloader import cache
from Dataloader.datalist import read_datalist
from Dataloader.staging import release, stage
from Diffusion.host_memory import (
    LOCAL_MATCH,
    PEAK,
    RECOMPUTED,
    activation_bytes,
    copies,
    file_system,
    held_bytes,
    memory_estimate,
    staged_bytes,
)
from OM_train_3modes import MODES
from Runtime.attempts import free_port
from Runtime.global_batch import split_step
from Runtime.memory import children
from Scripts.preflight.checks import check_memory, short_of_shared_memory
from tests import launching
from tests.tiny import ROOT, add_masks, arguments, config, launcher_environment, make_data

GIB, MIB = 2 ** 30, 2 ** 20
VOLUME = 128 ** 3
# The network of config_demo.yaml, on volumes and for a time that suit a test.
DEMO = {"model__channels": "[16, 32, 64, 128]", "model__attention_width": 128, "model__attention_depth": 2,
        "model__attention_heads": 4, "diffusion__grids": "[4, 8, 16]", "data__repeats": 1, "run__epochs": 1}


# ---------------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------------

def large(**changes):
    return config(**{"data__img_size": 128, "data__batchsize": 2, "data__diff_reg_batch_ratio": 2,
                     "data__num_workers": 8, "data__prefetch_factor": 3, "data__in_memory": False, **changes})


def test_an_accelerator_leaves_weights_and_loading_to_the_host():
    need = memory_estimate(large(), 64, 8, 2 * GIB, 10 ** 8)
    assert need["workers"] == 8 and need["worker"] == 190 * MIB + 8 * 4 * VOLUME
    # Ready: 8 x 3 batches, by turns two samples and one pair; at work: a step of both.
    assert need["batches"] == (8 * 3 * 2 + 2 + 2) * 4 * VOLUME
    assert need["rank"] == 2 * GIB + 125 * MIB + 4 * 10 ** 8
    assert need["activations"] == need["checkpoint"] == need["staged"] == 0
    assert need["total"] == 8 * (need["rank"] + 8 * need["worker"] + need["batches"])
    first = memory_estimate(large(), 64, 8, 2 * GIB, 10 ** 8, writes=True)
    assert first["total"] - need["total"] == 12 * 10 ** 8, "weights and two moments, once"
    of_three = memory_estimate(large(), 64, 8, 2 * GIB, 10 ** 8, writes=True, adams=3)
    assert of_three["total"] - need["total"] == 7 * 4 * 10 ** 8, "two moments of each mode"


def test_without_workers_a_thread_of_the_rank_reads_ahead():
    need = memory_estimate(large(data__num_workers=0), 1, 1, 0, 0)
    assert need["workers"] == 0 and need["batches"] == (3 + 1) * 4 * 4 * VOLUME, "three steps, and the one at work"
    assert need["rank"] == 125 * MIB + 8 * 4 * VOLUME, "it is the rank that holds what reading takes"
    several = memory_estimate(large(data__num_workers=0, data__global_batchsize=8), 1, 1, 0, 0)
    assert several["batches"] == 4 * need["batches"], "four batches of samples and four pairs in a step"


def test_labels_and_masks_are_read_with_the_images_of_pairs():
    plain, both = (memory_estimate(large(loss__dice=dice, registration__masks=masks), 64, 8, 0, 0)["batches"]
                   for dice, masks in ((0, False), (0.1, True)))
    # Half of the 24 batches that are ready are pairs, and a pair is at work; two maps of two bytes a voxel each.
    assert both - plain == (12 + 1) * 2 * 2 * 2 * VOLUME


@pytest.mark.parametrize("dtype, size", [("uint8", 1), ("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_cache_is_read_as_it_is_stored(dtype, size, in_memory):
    cached = {"data__cache": "x", "data__dtype": dtype, "data__in_memory": in_memory}
    need = memory_estimate(large(**cached), 1, 1, 0, 0)
    assert need["worker"] == 190 * MIB and need["batches"] == (8 * 3 * 2 + 4) * size * VOLUME
    need = memory_estimate(large(**cached, data__num_workers=0), 1, 1, 0, 0)
    assert need["rank"] == 125 * MIB and need["batches"] == (3 + 1) * 4 * size * VOLUME


def test_volumes_in_memory(tmp_path):
    cfg = config(add_masks(make_data(tmp_path)), data__in_memory=True, data__num_workers=4)
    assert held_bytes(cfg) == 16 ** 3 * (8 * 4 + 2 * 2), "six to train on, two held out with their labels"
    with_labels = {**cfg, "loss.dice": 0.1, "data.label_ids": "0-3", "registration.masks": True}
    assert held_bytes(with_labels) - held_bytes(cfg) == 16 ** 3 * (4 + 2) * 2, "labels of four, masks of two"
    need = memory_estimate(cfg, 1, 1, 0, 0, held=held_bytes(cfg))
    assert need["workers"] == 0 and need["rank"] == 125 * MIB + held_bytes(cfg) + 8 * 4 * 16 ** 3
    assert held_bytes({**cfg, "data.cache": "x"}) == held_bytes({**cfg, "data.in_memory": False}) == 0
    assert held_bytes({**cfg, "data.root": "not there yet"}) == 16 ** 3 * 6 * 4, "data.expect_samples"


def test_a_cpu_also_trains_on_the_host(tmp_path):
    cfg = config(tmp_path)
    need = memory_estimate(cfg, 1, 1, 0, 10 ** 8, activations=7, on_cpu=True)
    other = memory_estimate(cfg, 1, 1, 0, 10 ** 8)
    assert need["rank"] - other["rank"] == 3 * 4 * 10 ** 8 and need["activations"] == 7, "gradients and two moments"
    assert other["batches"] == 3 * need["batches"], "a thread reads two steps ahead, but only beside an accelerator"
    for strategy, world_size, batch, expected in (("ddp", 4, 0, 5.25), ("zero1", 4, 0, 3.75), ("fsdp", 4, 0, 6),
                                             ("ddp", 1, 0, 4), ("ddp", 1, 8, 6), ("ddp", 4, 32, 7.25)):
        cfg = config(tmp_path, run__strategy=strategy, data__global_batchsize=batch)
        split, own = split_step(cfg, world_size), 1 if strategy == "ddp" else 1 / world_size
        assert copies(cfg, world_size, split) == expected, (strategy, world_size, batch)
        assert copies(cfg, world_size, split, adams=3) == expected + 4 * own, "two moments of two more modes"


def counted_bytes(cfg):
    return activation_bytes(cfg, 1, MODES)


def test_activations_are_those_of_the_largest_mode(tmp_path):
    once = {"model__rec_num": 1}  # each pass is as large as the other, and half as many are counted faster
    half = {"run__amp": "bf16", **once}
    small = counted_bytes(config(tmp_path, data__img_size=16, **half))
    large = counted_bytes(config(tmp_path, data__img_size=32, data__batchsize=4, **half))
    assert 16 ** 3 * 100 < small < 16 ** 3 * 10000 and 14 < large / small < 18
    exact = counted_bytes(config(tmp_path, run__amp="off", **once))
    kept = exact / PEAK["off"] / LOCAL_MATCH
    assert 1.2 < kept / (small / PEAK["bf16"]) < 2, "float32 for some of what was bfloat16"
    plain = counted_bytes(config(tmp_path, run__amp="off", model__local_match=False, **once))
    assert plain / PEAK["off"] < kept
    again = counted_bytes(config(tmp_path, model__use_checkpoint=True, **half))
    assert again / RECOMPUTED < 0.8 * small


# ---------------------------------------------------------------------------------------------------------------------
# A cache staged in memory
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def staged(tmp_path):
    """(config, manifest) of a cache that is to be staged in /dev/shm."""
    if not Path("/dev/shm").is_dir() or file_system("/dev/shm") != "tmpfs":
        pytest.skip("needs /dev/shm in memory")
    make_data(tmp_path)
    folder = tmp_path / "cache"
    folder.mkdir()
    place = tempfile.mkdtemp(dir="/dev/shm")
    cfg = config(tmp_path, data__cache=folder, data__stage=place)
    items = read_datalist(cfg["data.root"], 3, "")
    cache.write_manifest(folder, cfg, {0: cache.write_group(folder, 0, items, cfg)})
    yield cfg, cache.read_manifest(folder, cfg)
    release()
    shutil.rmtree(place)


def test_file_systems_are_those_that_df_names(tmp_path):
    for path in ("/", "/dev/shm", "/proc", tmp_path):
        known = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=True)
        assert file_system(path) == known.stdout.split()[-1]


def test_a_staged_cache_counts_once_where_it_is_memory(staged, tmp_path):
    cfg, manifest = staged
    size = sum(path.stat().st_size for path in Path(cfg["data.cache"]).glob("*_*"))
    assert staged_bytes(cfg) == size > 8 * 16 ** 3
    two, one = (memory_estimate(cfg, 2, ranks, 0, 0, staged=size)["total"] for ranks in (2, 1))
    assert two - size == 2 * (one - size)
    assert staged_bytes({**cfg, "data.stage": "/proc"}) == staged_bytes({**cfg, "data.stage": ""}) == 0
    assert staged_bytes({**cfg, "data.cache": str(tmp_path / "not there yet")}) == 0
    stage(cfg["data.cache"], manifest, cfg["data.stage"])
    assert staged_bytes(cfg) == 0, "the copy is there, and the memory that is free is less by it"


def test_a_staged_cache_that_is_too_large(staged, tmp_path):
    cfg, manifest = staged
    variables = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    given = {"cfg": cfg, "rank": 0, "world_size": 1, "tasks": 1, "variables": variables,
             "findings": {"device": {"devices": 1}, "forward": {"process_bytes": GIB}}}
    found = check_memory(given, print)
    assert found["ok"] and re.search(r"\(1\.\d\d \+ 0 workers x 0\.19 \+ batches 0\.00\) \+ checkpoint 0\.00 \+ staged "
                                     r"cache 0\.00$", found["said"])
    manifest["files"]["images_00000.npy"][0] = 10 ** 15
    cache.write_json(cfg["data.cache"], "manifest.json", {**manifest, "sha256": cache.digest(manifest)})
    found = check_memory(given, print)
    assert not found["ok"] and found["said"].endswith("+ staged cache 931322.57")
    assert found["do"].startswith("set data.stage=\"\" or to a folder on a disk")


def test_a_folder_in_memory_smaller_than_the_memory(staged):
    cfg, _ = staged
    free = shutil.disk_usage("/dev/shm").free
    assert short_of_shared_memory(cfg, 2, {"staged": free // 4, "workers": 1, "batches": free // 4}) == ("", "")
    lack, do = short_of_shared_memory(cfg, 2, {"staged": free // 2, "workers": 1, "batches": free // 2})
    assert lack.startswith("the staged cache needs") and "set data.stage=\"\"" in do
    lack, do = short_of_shared_memory(cfg, 2, {"staged": 0, "workers": 1, "batches": free})
    assert lack.startswith("the loaders' batches need") and "data.prefetch_factor" in do
    assert short_of_shared_memory(cfg, 2, {"staged": 0, "workers": 0, "batches": free}) == ("", "")


# ---------------------------------------------------------------------------------------------------------------------
# The whole, against what is measured
# ---------------------------------------------------------------------------------------------------------------------

def estimated(words, ranks):
    """"total" in bytes, as the preflight of a node of so many ranks finds it."""
    environment = launcher_environment(ranks, NODES=socket.gethostname(), TASKS_PER_NODE=str(ranks),
                                       WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    tasks = """for ((rank = 0; rank < RANKS; rank++)); do
        RANK=$rank LOCAL_RANK=$rank "$PYTHON" Scripts/preflight/preflight.py --task "$@" & done; wait"""
    printed = launching.run(["bash", "-c", tasks, "tasks", *words], env=environment, cwd=ROOT, timeout=180,
                            check=True).stdout
    found = next(line for line in map(json.loads, printed.splitlines()) if line.get("check") == "memory")
    assert found["ok"], found
    return found["need"]["total"]


def measured(words, ranks, log):
    """Peak in bytes of a whole training: anonymous memory of ranks and workers, and shared memory once."""
    with open(log, "w") as file:
        training = launching.start(["bash", "bash_train_multi_nodes.sh", *words], env=launcher_environment(ranks),
                                   cwd=ROOT, stdout=file, stderr=file)
    peak = 0
    while training.poll() is None:
        peak = max(peak, sum(map(taken, of_ranks(training.pid))))
        time.sleep(0.1)
    assert training.returncode == 0, Path(log).read_text()
    return peak


def of_ranks(pid, inside=False):
    """Processes below a launcher that are ranks, or that ranks have started."""
    found = []
    with contextlib.suppress(OSError):  # one that ends meanwhile
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        inside = inside or ("python" in command[0] and "OM_train_3modes.py" in command)
        found = [pid] if inside else []
        for child in children(pid):
            found += of_ranks(child, inside)
    return found


def taken(pid):
    with contextlib.suppress(OSError):
        anonymous = re.search(r"^RssAnon:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        shared = re.search(r"^Pss_Shmem:\s*(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        return 1024 * sum(int(found[1]) for found in (anonymous, shared) if found)
    return 0


def compare(folder, size, ranks=1, count=8, **changes):
    """Estimate / measured of one training of the demo's network."""
    make_data(folder, count=count, size=size)
    words = arguments(folder, **{**DEMO, "data__img_size": size, **changes})
    ratio = estimated(words, ranks) / measured(words, ranks, folder / "training.log")
    print(f"{size}^3, {ranks} ranks, {changes}: estimate / measured {ratio:.2f}")
    return ratio


@pytest.mark.slow
@pytest.mark.parametrize("size, ranks, changes", [
    (24, 1, {}),
    (40, 2, {}),
    (40, 1, {"data__in_memory": False, "data__num_workers": 2, "model__field_stride": 2, "data__batchsize": 1}),
    (56, 1, {"run__amp": "off", "data__batchsize": 1, "data__train_ids": "0-3", "data__expect_samples": 4}),
], ids=["small", "two ranks", "workers", "float32"])
def test_trainings_take_what_was_estimated(tmp_path, size, ranks, changes):
    assert 0.8 <= compare(tmp_path, size, ranks, **changes) <= 1.2
