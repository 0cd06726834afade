"""The preflight without Slurm: the collector on written findings, the estimate of memory, and two real ranks."""
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import OM_train_3modes as om
from Dataloader import cache
from Dataloader.datalist import read_datalist
from Dataloader.dataset import batch_bytes, read_datasets
from Dataloader.staging import release, stage
from Runtime.global_batch import split_step
from Scripts.preflight import checks, collect, preflight
from Supervisor.attempts import free_port
from tests import launching
from tests.tiny import ROOT, arguments, config, make_data

GIB, MIB = 2 ** 30, 2 ** 20
FACTS = {"code": {"python": "3.11.7", "torch": "2.13.0", "commit": "aaa"},
         "settings": {"settings": {"NCCL_DEBUG": "WARN"}}, "device": {"devices": 2, "own": []},
         "forward": {"process_bytes": GIB}}


def healthy(nodes=2, tasks=2):
    """{(rank, check): finding} of an allocation in which all is well: nodes n1, n2 and so on, hosts h1, h2."""
    found = {}
    for rank in range(nodes * tasks):
        number = rank // tasks + 1
        for check in ("arrival", *checks.CHECKS):
            if check in checks.OF_THE_NODE and rank % tasks:
                continue
            found[rank, check] = {"rank": rank, "node": f"n{number}", "host": f"h{number}", "check": check, "ok": True,
                                  "said": "well", "do": "", **FACTS.get(check, {})}
        found[rank, "arrival"].update(world_size=nodes * tasks, local_rank=rank % tasks)
        if rank % tasks == 0:
            found[rank, "folder"]["sees"] = [f"n{number}" for number in range(1, nodes + 1)]
    return found


def spoil(found, *edits):
    """Change findings. edits: (ranks, check, what changes in it); "silent" removes it, and "all" means all checks."""
    for ranks, check, more in edits:
        for key in [key for key in found if key[0] in ranks and check in ("all", key[1])]:
            if more == "silent":
                del found[key]
            else:
                found[key].update(more)
    return found


def bad(said="broken", **facts):
    return {"ok": False, "said": said, "do": "repair it", **facts}


@pytest.fixture
def judge(tmp_path, capsys):
    """Runs the collector on findings; returns (exit code, nodes left out, rows of the table, all it printed)."""
    def run(found, nodes=2, tasks=2, more=(), may_repeat=False, fresh=False, **changes):
        lines = [*more, *(json.dumps(finding) + "\n" for finding in found.values())]
        names = [f"n{number}" for number in range(1, nodes + 1)]
        code = collect.collect(lines, config(tmp_path, **changes), names, tasks, 50, time.monotonic(), may_repeat,
                               fresh)
        output, printed = capsys.readouterr()
        assert output.startswith("EXCLUDED=") and output.count("\n") == 1
        rows = [re.split(r"  +", line) for line in printed.splitlines()]
        return code, output[9:-1], [cells for cells in rows if len(cells) > 3], printed
    return run


# ---------------------------------------------------------------------------------------------------------------------
# The collector
# ---------------------------------------------------------------------------------------------------------------------

def test_all_is_well(judge, tmp_path):
    code, excluded, rows, printed = judge(healthy())
    assert (code, excluded) == (0, "") and "FAILED" not in printed
    assert [cells[:4] for cells in rows[2:4]] == [["arrival", "ok", "2 nodes", "4 ranks"],
                                                  ["code", "ok", "2 nodes", "4 ranks"]]
    assert "preflight: passed on 2 nodes x 2 ranks" in printed
    report = json.loads((tmp_path / "Logs/preflight_local.json").read_text())
    assert (report["code"], report["nodes"], report["tasks_per_node"]) == (0, ["n1", "n2"], 2)
    assert len(report["findings"]) == len(healthy())


def test_other_lines_are_shown_and_long_findings_are_joined(judge, capsys):
    found = spoil(healthy(), (range(4), "settings", {"settings": {"NCCL_DEBUG": "\"quoted\"" * 500}}))
    preflight.print_line(found.pop((1, "settings")))
    pieces = capsys.readouterr().out.splitlines(keepends=True)
    assert len(pieces) > 5 and max(map(len, pieces)) < 1000
    strange = ["a library speaks\n", "{\"rank\": 1}\n", "[1, 2]\n", "7\n", "{\"rank\": 0, \"check\n"]
    code, _, rows, printed = judge(found, more=[*strange, *pieces])
    assert code == 0 and ["settings", "ok", "2 nodes", "4 ranks", "well"] in rows
    assert all(line.strip() in printed.splitlines() for line in strange)


def case(*edits, code=75, out="", rows=None, said="", nodes=2, **changes):
    """edits: of `spoil`. rows: beginnings of the rows that failed, [check, where, ranks, what], None for any."""
    return edits, code, out, rows, said, nodes, changes


NO_DEVICE = ((2, 3), "device", bad())
LOST = bad("cannot reach MASTER_ADDR n1 port 1", unreachable=True)
WAITS = bad("rank 2-3 of 4 did not arrive within 9 s", waits_for=[2, 3])
EIGHT = {"data__global_batchsize": 8}
SAME_DEVICE = [((rank,), "device", {"devices": 1, "own": [f"CUDA_VISIBLE_DEVICES={rank if rank < 2 else 0}"]})
               for rank in range(4)]  # n1: each task has its own; n2: both have the same one
CASES = {
    **{f"a node without a device, {len(changes)}": case(
        NO_DEVICE, out="n2", rows=[["device", "n2 (h2)", "2-3", "broken"]], **changes,
        said="continues without n2: 2 ranks on n1 do the whole step. device: rank 2-3") for changes in ({}, EIGHT)},
    "the others cannot do its part": case(
        NO_DEVICE, code=43, data__batchsize=2, data__global_batchsize=3,
        said="n2 failed, n1 well, but data.global_batchsize 3 is not a multiple of data.batchsize 2 x 1"),
    "the first node": case(((1,), "forward", bad()), out="n1", **EIGHT),
    **{f"not all healthy nodes can share, {len(changes)}": case(
        ((2,), "memory", bad()), out="n2", nodes=4, **changes,
        said="6 ranks on n1, n3, n4 do the whole step (2 x 2 of them, more cannot share it evenly)")
        for changes in ({}, {"data__global_batchsize": 16})},
    "no good node": case((range(4), "device", bad()), code=43, said="No node is well", **EIGHT,
                         rows=[["device", "n1 (h1), n2 (h2)", "0-3", "broken"]]),
    # Those that waited for a rank that never came, are not blamed.
    "a rank that never came": case(
        ((3,), "all", "silent"), ((0, 1, 2), "rendezvous", bad("rank 3 of 4 did not arrive", waits_for=[3])), out="n2",
        rows=[["arrival", "n2", "3", "did not arrive within"]], **EIGHT,
        said="rendezvous skipped n1 (h1), n2 (h2) 0-2 rank 3 did not come"),
    "a node that never came": case(((2, 3), "all", "silent"), ((0, 1), "rendezvous", WAITS), out="n2",
                                   rows=[["arrival", "n2", "2-3", "did not arrive within"]], **EIGHT),
    "a rank that falls silent": case(
        *(((2,), check, "silent") for check in list(checks.CHECKS)[3:] if check != "data"),
        ((0,), "folder", bad(sees=["n1"])), out="n2", said="folder skipped n1 (h1) 0 no files of n2",
        rows=[["forward", "n2 (h2)", "2", "no answer until the end"]]),
    "no rank at all": case((range(4), "all", "silent"), code=43,
                           rows=[["arrival", "n1, n2", "0-3", "did not arrive"]]),
    "wrong places": case(((1,), "arrival", {"node": "n2", "local_rank": 0}),
                         ((2,), "arrival", {"node": "n1", "local_rank": 1}), code=43,
                         rows=[["arrival", "n2 (h1), n1 (h2)", "1-2", "ranks do not fill the nodes in their order: "
                                "rank 1 is on n2 with LOCAL_RANK 0"]]),
    "another world size": case(((3,), "arrival", {"world_size": 3}), out="n2", rows=[
        ["arrival", "n2 (h2)", "3", "WORLD_SIZE is 3, but 2 nodes x 2 tasks make 4"]]),
    "another commit than most": case(
        ((2,), "code", {"commit": "bbb with local changes 123"}), out="n2", nodes=3, **EIGHT,
        rows=[["code", "n2 (h2)", "2-3", "commit bbb with local changes 123, but commit aaa on most ranks"]]),
    "another commit than half": case(
        ((2,), "code", {"commit": "bbb"}), code=43, **EIGHT,
        rows=[["code", "n1 (h1), n2 (h2)", "0-3", "commit aaa on n1 (rank 0-1); commit bbb on n2 (rank 2-3)"]]),
    "another torch": case(((1,), "code", {"torch": "2.12.0"}), out="n1", rows=[
        ["code", "n1 (h1)", "1", "torch 2.12.0, but torch 2.13.0 on most ranks"]]),
    "another setting": case(
        ((3,), "settings", {"settings": {"NCCL_DEBUG": "WARN", "NCCL_P2P_LEVEL": "NVL"}}), out="n2", rows=[
            ["settings", "n2 (h2)", "3", "NCCL_P2P_LEVEL is 'NVL', but NCCL_P2P_LEVEL is not set on most ranks"]]),
    "long settings with another end": case(
        *(((rank,), "settings", {"settings": {"NCCL_DEBUG": "x" * 300 + str(rank // 2)}}) for rank in range(4)),
        code=43, rows=[["settings", "n1 (h1), n2 (h2)", "0-3", "NCCL_DEBUG is 'xxx"]]),
    "devices on the other node only": case(((2, 3), "device", {"devices": 0}), out="n2", rows=[
        ["device", "n2 (h2)", "2-3", "torch sees no device here, but on other nodes"]]),
    "one device for two tasks": case(*SAME_DEVICE, out="n2", rows=[
        ["device", "n2 (h2)", "2-3", "ntasks-per-node is 2 but torch sees 1 device, the same for all of them"]]),
    "a folder of its own": case(
        *(((rank,), "folder", bad(f"not seen on n{rank // 2 + 1}", sees=sees)) for rank, sees in (
            (0, ["n1", "n3"]), (2, ["n2"]), (4, ["n1", "n3"]))), out="n2", nodes=3, **EIGHT,
        rows=[["folder", "n2 (h2)", "2", "not seen on n2"]]),
    "of two folders nobody knows which is right": case(
        ((0,), "folder", bad(sees=["n1"])), ((2,), "folder", bad(sees=["n2"])), code=43, **EIGHT),
    "an address that leads elsewhere from others": case(
        ((0, 1), "rendezvous", WAITS), ((2, 3), "rendezvous", LOST), code=43, **EIGHT, rows=[
            ["rendezvous", "n1 (h1)", "0-1", "MASTER_ADDR leads here from this node, but not from others"],
            ["rendezvous", "n2 (h2)", "2-3", LOST["said"]]]),
    "one node that does not reach it": case(
        ((6, 7), "rendezvous", LOST), (range(6), "rendezvous", bad("rank 6-7 did not arrive", waits_for=[6, 7])),
        out="n4", nodes=4, data__global_batchsize=24, rows=[["rendezvous", "n4 (h4)", "6-7", LOST["said"]]]),
    # Nobody is blamed for a first rank that is not there.
    "no first rank": case(((0,), "all", "silent"), ((1, 2, 3), "rendezvous", LOST), out="n1", **EIGHT,
                          rows=[["arrival", "n1", "0", "did not arrive"]]),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame_and_what_follows(judge, name):
    edits, code, out, wanted, said, nodes, changes = CASES[name]
    found = judge(spoil(healthy(nodes), *edits), nodes, **changes)
    assert found[:2] == (code, out), found[3]
    assert said in " ".join(found[3].split())
    failed = [[check, *more] for check, state, *more in found[2] if state == "FAILED"]
    assert wanted is None or [cells[:3] for cells in failed] == [row[:3] for row in wanted]
    assert all(cells[3].startswith(row[3]) for cells, row in zip(failed, wanted or []))


@pytest.mark.parametrize("asked, said", [("8", "whole step. memory"), ("", "whole step (1 x 2 of them, more cannot")])
def test_after_a_second_exclusion_the_step_is_that_of_the_ranks_asked_for(judge, monkeypatch, asked, said):
    """Four ranks share the 8 batches of 8 ranks, whose last node is gone already, but not the 6 of those that are."""
    monkeypatch.setenv("RANKS_ASKED", asked)
    code, out, _, printed = judge(spoil(healthy(3), ((4,), "memory", bad())), 3)
    assert (code, out) == (75, "n3") and f"4 ranks on n1, n2 do the {said}" in printed


def test_after_an_exclusion_a_run_that_is_continued_has_its_own_step(judge, tmp_path):
    """Of 6 ranks one is gone; 5 share the 6 batches of a new run as 3, but the 8 of a run that 8 began as 4."""
    run = tmp_path / "Models/demo_om_net"
    (run / "tmp").mkdir(parents=True)
    (run / "tmp/0001_step0001_net.pth").touch()
    cfg = config(tmp_path)
    (run / "step.json").write_text(json.dumps({"samples": 8 * cfg["data.batchsize"], "pairs": 8, "ranks": 8,
                                               "ratio": cfg["data.diff_reg_batch_ratio"]}))
    said = [judge(spoil(healthy(6, 1), ((5,), "memory", bad())), 6, 1, fresh=fresh)[3] for fresh in (False, True)]
    assert ["(4 x 1 of them" in said[0], "(3 x 1 of them" in said[1]] == [True, True], said


def test_ranks_that_are_silent_may_only_load_slowly(judge):
    assert "raise PREFLIGHT_SECONDS" in judge(spoil(healthy(), ((3,), "all", "silent")))[3]


def test_two_processes_that_are_one_rank(judge):
    found = healthy()
    found["again"] = found[0, "arrival"]
    assert "two processes say that they are this rank" in judge(found)[3]


def test_of_64_nodes_the_table_names_the_ranks_and_some_of_the_nodes(judge):
    """512 ranks: a row for each check, ranks as ranges; the nodes to leave out are all given to the launcher."""
    found = spoil(healthy(64, 8), (range(8, 88), "device", bad("no device")))
    code, excluded, rows, printed = judge(found, 64, 8)
    assert code == collect.GO_ON and excluded.split() == [f"n{number}" for number in range(2, 12)]
    (row,) = [cells for cells in rows if cells[1] == "FAILED"]
    assert row[2:4] == ["n2 (h2), n3 (h3), n4 (h4), n5 (h5), n6 (h6), n7 (h7) and 4 more", "8-87"]
    assert len(printed.splitlines()) < 20


@pytest.mark.parametrize("edit, codes", [  # with a second look, and without; no second look finds a device
    (((2,), "forward", bad("no answer within 30 s", passing=True)), (76, 75)), (((2, 3), "all", "silent"), (76, 75)),
    (((2, 3), "device", bad("torch sees no device")), (75, 75)), (((), "", {}), (0, 0))])
def test_what_may_pass_is_looked_at_once_more(judge, edit, codes):
    found = [judge(spoil(healthy(), edit), may_repeat=again) for again in (True, False)]
    assert tuple(code for code, *_ in found) == codes
    assert ("n2 failed in a way that may be temporary" in found[0][3]) == (codes[0] == 76 and not found[0][1])


def test_a_late_answer_warns(judge):
    found = spoil(healthy(), ((2,), "forward", {"late": True, "said": "the processors are busy"}))
    code, excluded, rows, printed = judge(found)
    assert (code, excluded) == (0, "") and "passed on 2 nodes" in printed
    assert ["forward", "late", "n2 (h2)", "2", "the processors are busy"] in [row[:5] for row in rows]
    assert ["forward", "ok", "2 nodes", "3 ranks", "well"] in rows


# ---------------------------------------------------------------------------------------------------------------------
# A task
# ---------------------------------------------------------------------------------------------------------------------

def context(folder, **more):
    variables = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return {"cfg": config(folder), "rank": 0, "local_rank": 0, "world_size": 2, "node": "n1", "nodes": ["n1"],
            "tasks": 2, "allow_tmp": False, "variables": variables, "served": None, "began": time.monotonic(),
            "ends": time.monotonic() + 5, **more,
            "findings": {"device": {"devices": 0}, "forward": {"process_bytes": GIB}}}


@pytest.mark.slow
def test_memory_beyond_what_slurm_gave(tmp_path):
    given = context(tmp_path, cfg=config(tmp_path, data__in_memory=False, data__num_workers=12, run__amp="bf16"))
    given["variables"]["SLURM_MEM_PER_NODE"] = "6000"
    found = checks.check_memory(given, print)
    # 2 ranks x (1 GiB + 125 MiB + 12 workers x 190 MiB and little more)
    assert not found["ok"]
    assert re.match(r"needs 6\.7 of 5\.9 GiB: 2 ranks x \(1\.1\d \+ 12 workers x 0\.19 \+ batches 0\.00\) "
                    r"\+ checkpoint 0\.00$", found["said"])
    assert found["do"].startswith("data.num_workers=9 would fit")
    given["variables"]["SLURM_MEM_PER_NODE"] = "8000"
    assert checks.check_memory(given, print)["ok"]
    given["cfg"] = config(tmp_path, data__in_memory=True, data__expect_samples=10 ** 6)
    found = checks.check_memory(given, print)
    assert not found["ok"] and found["do"].startswith("set data.in_memory=false")


def test_answers_of_checks_however_they_end(tmp_path):
    def hangs(context, at):
        at("in a driver")
        time.sleep(60)

    def dies(context, at):
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(context, at):
        raise RuntimeError("the device\nis gone")

    def answers(context, at):
        at("almost there")
        return checks.passed("well", number=3)

    given = context(tmp_path)
    assert preflight.answer(answers, given) == {"ok": True, "said": "well", "do": "", "number": 3}
    assert preflight.answer(raises, given)["said"] == "RuntimeError: the device"
    assert preflight.answer(dies, given)["said"] == "died with SIGKILL (at its start)"
    began = time.monotonic()
    found = preflight.answer(hangs, {**given, "began": began, "ends": began + 1})
    assert (found["ok"], found["said"]) == (False, "no answer within 1 s (in a driver)")
    assert time.monotonic() - began < 3


def test_a_check_that_only_needs_processor_time_is_late_and_not_failed(tmp_path, monkeypatch):
    given = context(tmp_path)
    monkeypatch.setattr(checks, "build_network", lambda cfg, device: time.sleep(60))
    found = preflight.answer(checks.check_forward, {**given, "ends": time.monotonic() + 1})
    assert found["ok"] and found["late"] and "the processors of this node are busy" in found["said"]
    assert found["process_bytes"] == 0


def test_what_a_node_needs():
    def need(on_cpu=False, writes=False, **changes):
        cfg = config(**{"data__img_size": 128, "data__num_workers": 8, "data__prefetch_factor": 3,
                        "data__in_memory": False, **changes})
        return checks.memory_need(cfg, split_step(cfg, 64), 2 * GIB, 10 ** 8, on_cpu, writes)

    volume = 4 * 128 ** 3
    plain = need()
    assert plain == {"rank": 2 * GIB + 125 * MIB + 4 * 10 ** 8, "workers": 8, "worker": 190 * MIB + 8 * volume,
                     "batches": (1 + 8 * 3) * 2 * volume, "checkpoint": 0}
    assert need(writes=True)["checkpoint"] == 12 * 10 ** 8, "weights and two moments, once"
    assert need(on_cpu=True)["rank"] - plain["rank"] == 12 * 10 ** 8, "gradients and two moments"
    each = need(True, True, optim__moments="per_mode")
    assert (each["rank"] - plain["rank"], each["checkpoint"]) == (28 * 10 ** 8, 28 * 10 ** 8), "two for each of 3 modes"
    two = need(True, True, optim__moments="per_mode", loss__contrastive=0)
    assert (two["rank"] - plain["rank"], two["checkpoint"]) == (20 * 10 ** 8, 20 * 10 ** 8), "one mode is left out"
    assert checks.MODES == tuple(mode.weights for mode in om.MODES.values())
    alone = need(data__num_workers=0)
    assert alone["rank"] == plain["rank"] + 8 * volume, "it is the rank that holds what reading takes"
    assert alone["batches"] == (1 + 3) * 2 * volume and need(True, data__num_workers=0)["batches"] == 2 * volume
    cached = need(data__cache="x", data__dtype="uint8", data__in_memory=True)
    assert (cached["worker"], cached["batches"]) == (190 * MIB, plain["batches"] // 4)
    kept = need(data__in_memory=True, data__root="not there yet", data__expect_samples=100)
    assert kept["workers"] == 0 and kept["rank"] == plain["rank"] + (100 + 8) * volume


def test_maps_in_memory_count_for_the_volumes_that_have_them(tmp_path):
    make_data(tmp_path, 10, 8)
    listed = json.loads((tmp_path / "data/dataset.json").read_text())
    del listed["training"][0]["label"]
    (tmp_path / "data/dataset.json").write_text(json.dumps(listed))

    def kept(**changes):
        cfg = config(tmp_path, data__in_memory=True, **changes)
        split = split_step(cfg, 1)
        need = checks.memory_need(cfg, split, 0, 0, True, False)
        batch = batch_bytes(cfg, split.sample_batch, split.pair_batch)
        assert need["batches"] == batch, "the one that is computed: a CPU reads none ahead without workers"
        return need["rank"], math.prod(cfg["data.img_size"])

    (without, voxels), (labels, _) = kept(loss__dice=0), kept(loss__dice=1)
    train = read_datasets(config(tmp_path), headers_only=True)[0]
    assert labels - without == 2 * voxels * (len(train) - 1)


@pytest.fixture
def staged(data, tmp_path):
    """(config, manifest) of a cache that is to be staged in /dev/shm."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    folder = tmp_path / "cache"
    folder.mkdir()
    place = tempfile.mkdtemp(dir="/dev/shm")
    cfg = config(data, data__cache=folder, data__stage=place)
    group = cache.write_group(folder, 0, read_datalist(cfg["data.root"], 3, ""), cfg)
    cache.write_manifest(folder, cfg, {0: group}, cache.list_mark(cfg["data.root"])[1])
    yield cfg, cache.read_manifest(folder, cfg)
    release()
    shutil.rmtree(place)


def test_a_staged_cache_counts_once(staged, tmp_path):
    cfg, manifest = staged
    size = sum(path.stat().st_size for path in Path(cfg["data.cache"]).glob("*_*"))
    assert checks.staged_bytes(cfg) == size > 8 * 16 ** 3
    assert checks.staged_bytes({**cfg, "data.stage": ""}) == 0
    assert checks.staged_bytes({**cfg, "data.cache": str(tmp_path / "not there yet")}) == 0
    stage(cfg["data.cache"], manifest, cfg["data.stage"])
    assert checks.staged_bytes(cfg) == 0, "the copy is there, and the memory that is free is less by it"


def test_a_staged_cache_that_is_too_large(staged, tmp_path):
    cfg, manifest = staged
    given = context(tmp_path, cfg=cfg, world_size=1, tasks=1)
    given["findings"]["device"]["devices"] = 1
    found = checks.check_memory(given, print)
    assert found["ok"] and re.search(r"\(1\.\d\d \+ 0 workers x 0\.19 \+ batches 0\.00\) \+ checkpoint 0\.00 \+ staged "
                                     r"cache 0\.00$", found["said"])
    manifest["files"]["images_00000.npy"][0] = 10 ** 15
    cache.write_json(cfg["data.cache"], "manifest.json", manifest)
    found = checks.check_memory(given, print)
    assert not found["ok"] and found["said"].endswith("+ staged cache 931322.57")
    assert found["do"].startswith("set data.stage=\"\" or to a folder on a disk")


def test_a_folder_in_memory_smaller_than_the_memory(staged):
    cfg, _ = staged
    free, short = shutil.disk_usage("/dev/shm").free, checks.short_of_shared_memory
    assert short(cfg, 2, {"workers": 1, "batches": free // 4}, free // 4) == ("", "")
    lack, do = short(cfg, 2, {"workers": 1, "batches": free // 2}, free // 2)
    assert lack.startswith("the staged cache needs") and "set data.stage=\"\"" in do
    lack, do = short(cfg, 2, {"workers": 1, "batches": free}, 0)
    assert lack.startswith("the loaders' batches need") and "data.prefetch_factor" in do
    assert short(cfg, 2, {"workers": 0, "batches": free}, 0) == ("", "")


def test_device_counts_and_tasks(tmp_path, monkeypatch):
    given = context(tmp_path, cfg=config(tmp_path, run__device="auto"))
    assert checks.check_device(given, print)["said"].startswith("cpu")
    given["variables"].update(SLURM_JOB_ID="7", SLURM_STEP_GPUS="0,1")
    found = checks.check_device(given, print)
    assert not found["ok"] and found["said"].startswith("Slurm gave SLURM_STEP_GPUS=0,1, but torch")
    assert checks.check_device({**given, "cfg": config(tmp_path)}, print)["ok"], "run.device is cpu"
    accelerator = checks.torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available=False: checks.torch.device(
        "cpu"))
    for count, tasks, in_slurm, well in ((2, 2, True, True), (4, 2, True, False), (4, 2, False, True),
                                         (2, 4, False, False), (1, 4, True, True)):
        monkeypatch.setattr(accelerator, "device_count", lambda count=count: count)
        variables = {"SLURM_JOB_ID": "7"} if in_slurm else {}
        found = checks.check_device({**given, "tasks": tasks, "variables": variables}, print)
        assert found["ok"] == well and found["devices"] == count, (count, tasks, in_slurm)
    monkeypatch.setattr(accelerator, "device_count", lambda: 3)
    found = checks.check_device({**given, "tasks": 2}, print)
    assert (found["said"], found["do"]) == ("ntasks-per-node is 2 but torch sees 3 devices", "use --ntasks-per-node=3")


@pytest.mark.parametrize("name, dims", [("om_net", 2), ("om_net", 3), ("recresacnet", 2), ("recmulmodmutattnnet", 3)])
def test_forward_of_every_network(tmp_path, name, dims):
    kind = "none" if dims == 2 else "volume"
    cfg = config(tmp_path, model__name=name, model__dims=dims, model__condition_type=kind)
    found = preflight.answer(checks.check_forward, context(tmp_path, cfg=cfg))
    assert found["ok"], found
    assert 50 * MIB < found["process_bytes"] < 2 * GIB


def test_ids_that_select_nothing_fail_before_the_training(tmp_path):
    """G9: the preflight opens the data as the training will. Without data yet, it says nothing."""
    assert checks.check_data(context(tmp_path), print)["ok"] is None
    make_data(tmp_path)
    found = checks.check_data(context(tmp_path), print)
    assert found["ok"] and found["said"].startswith("6 training volumes (from ")
    missing = {**context(tmp_path), "cfg": config(tmp_path, data__cache=tmp_path / "missing")}
    assert f"{tmp_path / 'data'}, since data.cache" in checks.check_data(missing, print)["said"]
    found = preflight.answer(checks.check_data, {**context(tmp_path), "cfg": config(tmp_path, data__train_ids="70-80")})
    assert found["ok"] is False and 'ids "70-80" select no volume of the 8 volumes' in found["said"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/manifest.json").write_text("{")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    damaged = config(tmp_path, data__cache=tmp_path / "cache")
    found = preflight.answer(checks.check_data, {**context(tmp_path), "cfg": damaged})
    assert found["ok"] is False and "damaged" in found["said"]


def test_settings_leave_out_what_is_a_nodes_own(tmp_path):
    variables = {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "cxi", "PYTHONPATH": "x", "NCCL_SOCKET_IFNAME": "eth0",
                 "ZE_AFFINITY_MASK": "1", "HIP_VISIBLE_DEVICES": "0", "HOME": "/root", "FIRST": "x",
                 "UCX_NET_DEVICES": "mlx5_0:1", "ONEAPI_DEVICE_SELECTOR": "level_zero:0",
                 "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps_0", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps_log_0"}
    found = checks.check_settings(context(tmp_path, variables=variables), print)
    assert found["ok"] and sorted(found["settings"]) == ["FI_PROVIDER", "NCCL_DEBUG", "PYTHONPATH"]

    def limited(context, at):  # in a process of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        return checks.check_settings(context, at)

    found = preflight.answer(limited, context(tmp_path))
    assert not found["ok"] and found["said"] == "at most 1000 open files are allowed" and "ulimit -Hn" in found["do"]


def test_a_folder_of_several_nodes(tmp_path, monkeypatch):
    """Two nodes, one after the other in this process: the second finds the mark of the first. TMPDIR is there too."""
    monkeypatch.setattr(checks, "NODE_LOCAL", ("/dev/shm",))  # tmp_path may be under /tmp
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    alone = checks.check_folder(context(tmp_path), print)
    assert alone["ok"] and alone["sees"] == ["n1"] and not alone["said"].endswith("seen by all nodes")
    both = {"nodes": ["n1", "n2"], "ends": time.monotonic()}
    first = checks.check_folder(context(tmp_path, **both, node="n1"), print)
    assert (first["ok"], first["sees"]) == (False, ["n1"]) and "files of n2 in run.models" in first["said"]
    second = checks.check_folder(context(tmp_path, **both, node="n2"), print)
    assert (second["ok"], second["sees"]) == (True, ["n1", "n2"])
    for node in ("n1", "n2"):
        checks.clean_folders(context(tmp_path, node=node))
    assert not list((tmp_path / "Models").iterdir()) and not list((tmp_path / "Logs").iterdir())
    refused = checks.check_folder(context(Path("/dev/shm/x"), **both), print)
    assert not refused["ok"] and "is under /dev/shm" in refused["said"] and not Path("/dev/shm/x").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "Models").write_text("a file")
    found = preflight.answer(checks.check_folder, context(tmp_path))
    assert not found["ok"] and found["said"].startswith("NotADirectoryError") and f"{tmp_path}/Models" in found["said"]
    assert not found["passing"], "it is no use to check once more"


def test_an_address_nobody_answers_at(tmp_path):
    given = context(tmp_path, rank=1, ends=time.monotonic() + 3)
    given["variables"].update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    found = checks.check_rendezvous(given, print)
    assert not found["ok"] and found["unreachable"] and "(Connection refused)" in found["said"]
    given["variables"]["MASTER_ADDR"] = "no.such.host.invalid"
    found = checks.check_rendezvous(given, print)
    assert not found["ok"] and found["said"].startswith("cannot resolve MASTER_ADDR no.such.host.invalid")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        given["variables"]["MASTER_PORT"] = str(taken.getsockname()[1])
        found = preflight.answer(checks.serve, {**given, "rank": 0, "ends": time.monotonic() + 5})
    assert not found["ok"] and found["said"].startswith(f"cannot serve MASTER_PORT {given['variables']['MASTER_PORT']}")


def test_all_ranks_of_a_node_that_does_not_come_are_named(tmp_path, monkeypatch):
    """They are a range in the sentence; the collector gets each of them."""
    served = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    found = checks.check_rendezvous(context(tmp_path, world_size=3, ends=time.monotonic() + 3, variables=place), print)
    assert found["said"].startswith("rank 1-2 of 3 did not arrive within") and found["waits_for"] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("torch_takes", ["", "20"])  # seconds; the second is after the store's part of the time limit
def test_two_real_ranks(tmp_path, torch_takes):
    words = arguments(tmp_path, "--max-steps-before-restart", "3")
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and "OMNIMORPH" not in name}
    variables = {"NODES": socket.gethostname(), "TASKS_PER_NODE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
                 "PYTHONPATH": str(ROOT / "tests/slurm/inject"), "TORCH_TAKES": torch_takes}
    pipeline = """P=Scripts/preflight/preflight.py
        (for RANK in 0 1; do RANK=$RANK LOCAL_RANK=$RANK "$PYTHON" $P --task "$@" & done
        wait -n && wait -n) | "$PYTHON" $P --collect "$@"; echo "${PIPESTATUS[@]}" """
    ended = launching.run(["bash", "-c", pipeline, "pipeline", *words], timeout=60 + int(torch_takes or 0),
                          env={**kept, **variables}, cwd=ROOT)
    assert ended.stdout == "EXCLUDED=\n0 0\n", ended.stderr
    assert "2 ranks by gloo, 4 MiB at" in ended.stderr and "preflight: passed on 1 node x 2 ranks" in ended.stderr
    assert {path.name for path in tmp_path.rglob("*")} == {"Logs", "Models", "preflight_local.json"}


def test_errors_of_the_command_line_are_sentences(tmp_path):
    words = arguments(tmp_path, run__epochs="many")
    ended = launching.run([sys.executable, ROOT / "Scripts/preflight/preflight.py", "--collect", *words], timeout=30,
                          env={**os.environ, "NODES": "n1", "TASKS_PER_NODE": "1"})
    assert (ended.returncode, ended.stdout) == (43, "") and ended.stderr.startswith("error: ")
    assert "run.epochs" in ended.stderr and "Traceback" not in ended.stderr
