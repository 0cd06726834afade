"""Several ranks, real processes, by themselves, under the launcher and torchrun: the training of one rank."""
import collections
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import OM_train_3modes as om
from Runtime import checkpoint, launch
from Runtime.files import read_lines
from Runtime.launch import Ranks
from Supervisor import attempts
from Supervisor.attempts import free_port
from tests import launching, tiny, warm
from tests.tiny import PICTURED, ROOT, SHARED, config, final_sha256, launcher_environment, log_lines, newest_state

TOLERANCE = 1e-5  # without run.exact_sums; each mode of a step moves a weight by up to 1e-4


def options(data, folder, *more, **changes):
    return tiny.options(data, folder, *more, **{**SHARED, **changes})


def by_launcher(ranks, *words):
    return launching.run(["bash", ROOT / "bash_train_multi_nodes.sh", *words], env=launcher_environment(ranks))


def decisions(folder):
    history = attempts.history(folder / "Models/demo_om_net")
    return [line["decision"] for line in history if line["event"] == "end"]


def assert_close(state, other, tolerance):
    assert state["step"] == other["step"] == 3
    for name, tensor in other["model"].items():
        assert torch.allclose(state["model"][name], tensor, rtol=0, atol=tolerance), name
    assert torch.equal(state["queue"]["subjects"], other["queue"]["subjects"]), "embeddings in global sample order"
    assert torch.allclose(state["queue"]["images"], other["queue"]["images"], atol=100 * tolerance)


@pytest.fixture(scope="module")
def alone(finished_run):
    """One rank that accumulates four batches in each step, two of pairs."""
    return finished_run(**SHARED)


@pytest.fixture(scope="module")
def together(finished_run):
    """Two ranks that accumulate two batches each, and have one of pairs."""
    return finished_run(ranks=2, **PICTURED)


def test_two_ranks_train_as_one_that_accumulates(alone, together):
    """With a network that segments, descents, labels of some pairs, an average, and moments of each mode."""
    one, two = (newest_state(folder) for folder in (alone, together))
    for kind in ("model", "ema"):
        assert checkpoint.weights_sha256(two[kind]) == checkpoint.weights_sha256(one[kind]), "run.exact_sums: same bits"
    assert one["step"] == two["step"] == 3 and set(two["optimizer"]) == set(om.MODES)
    one, two = (log_lines(folder, "epoch")[-1] for folder in (alone, together))
    assert one["labelled"] == 1 and 0 < one["segmented"] < 1, "what is segmented stands in for labels of other pairs"
    assert one["dice"] > 0 and one["segment"] > 0
    for name in [*om.TERMS, "dice", "labelled", "segment", "segmented", "steps", "open_share", "nonfinite", "val_ang",
                 "val_retrieval", "val_imgsim", "val_dice", "val_folding", "val_segment"]:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert len(log_lines(together, "step")) == 3 and not log_lines(together, "step", rank=1), "rank 0 logs the steps"
    assert len(log_lines(together, "end", rank=1)) == 1 and decisions(together) == ["done"]


def test_the_page_lists_what_a_run_leaves_behind(together):
    listed = (ROOT / "docs/training.md").read_text().partition("## What a run leaves behind")[2].split("```")[1]
    listed = {re.sub(r"\d+", "0", name) for name in re.findall(r"Models/brains_om_net/([^/ ]+)", listed)}
    left = [path.name.replace("demo", "brains") for path in (together / "Models/demo_om_net").iterdir()]
    assert {"step.json", "rank1.jsonl"} <= set(left) and {re.sub(r"\d+", "0", name) for name in left} <= listed


def test_ranks_have_entered_equally_many_phases_at_the_end(together):
    """Verdicts compare these numbers. Pictures are drawn and curves written by rank 0 alone."""
    run = together / "Models/demo_om_net"
    assert list((run / "pictures").iterdir()) and len(list((together / "Logs").rglob("events.out.*"))) == 1
    first, second = (read_lines(run / f"rank{rank}.jsonl")[-1] for rank in range(2))
    assert first["phase"] == second["phase"] == "exit" and first["number"] == second["number"]


@pytest.mark.slow
def test_planned_restarts_of_two_ranks_by_the_launcher_and_debugging_give_the_same_bits(data, tmp_path, together):
    ended = by_launcher(2, *options(data, tmp_path, "--max-steps-before-restart", "2", "--debug"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = json.loads((tmp_path / "Models/demo_om_net/launches/0001/launch.json").read_text())["settings"]
    wanted = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"}
    assert wanted.items() <= kept.items()
    assert decisions(tmp_path) == ["restart", "done"] and "done after 2 rounds" in ended.stdout
    assert final_sha256(tmp_path) == final_sha256(together)


def test_a_run_goes_on_with_another_number_of_ranks(data, tmp_path, alone):
    assert om.main(options(data, tmp_path, "--max-steps-before-restart", "1")) == 42
    printed = warm.train(2, tmp_path / "log", options(data, tmp_path))
    assert "continuing from" in printed and final_sha256(tmp_path) == final_sha256(alone)


@pytest.mark.slow
@pytest.mark.parametrize("changes, tolerance", [
    ({"run__exact_sums": "false"}, TOLERANCE), ({"run__bf16_sums": "true"}, 2e-4)], ids=["float32", "bf16"])
def test_without_exact_sums_the_ranks_differ_by_rounding_only(data, tmp_path, alone, changes, tolerance):
    warm.train(2, tmp_path / "log", options(data, tmp_path, **changes))
    assert_close(newest_state(tmp_path), newest_state(alone), tolerance)
    before = om.build_network(config(data, **SHARED)).state_dict()
    moved = [(newest_state(alone)["model"][name] - before[name]).abs().max().item() for name in before]
    assert max(moved) > 10 * TOLERANCE


def meet():
    """What three ranks do: rank 1 hears the answer when all the others may be gone."""
    class Slow(dist.PrefixStore):
        def get(self, key):
            time.sleep(2.0)
            return super().get(key)

    ranks = launch.environment()
    if ranks.rank == 1:
        dist.PrefixStore = Slow
    launch.rendezvous(ranks, 60)


def test_rank_0_leaves_a_meeting_only_when_all_have_heard_its_answer(tmp_path):
    with warm.ranks(3, tmp_path / "log", [], target=meet) as ranks:
        assert warm.codes(ranks, 90) == [0, 0, 0], (tmp_path / "log").read_text()


class CountingStore(dist.PrefixStore):
    """A real client that writes down what it asks."""
    asked = []

    def __getattribute__(self, name):
        if name in ("check", "set", "get", "wait", "add", "compare_set"):
            CountingStore.asked.append(name)
        return super().__getattribute__(name)


def meet_all(ranks, world_size, seconds):
    """launch.rendezvous of some ranks, each with a client of its own, in threads. Returns their errors."""
    def one(rank):
        try:
            launch.rendezvous(Ranks(rank=rank, world_size=world_size), seconds)
        except RuntimeError as error:
            return str(error)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(dist, "PrefixStore", CountingStore)
    monkeypatch.setattr(CountingStore, "asked", [])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return CountingStore.asked


def test_a_meeting_asks_the_store_a_few_times_for_each_rank(counted):
    world_size = 48
    assert meet_all(range(world_size), world_size, 60) == [None] * world_size
    others = world_size - 1
    assert collections.Counter(counted) == {
        "set": world_size + 1, "add": world_size + others, "compare_set": 1, "wait": world_size + 2, "get": world_size}


def test_a_meeting_names_who_did_not_come_to_all_who_did(counted, monkeypatch, capsys):
    monkeypatch.setattr(launch, "SAY_AFTER_S", 1)
    said = meet_all([0, 1, 2, 4, 6], 7, 2)
    assert re.fullmatch(r"WORLD_SIZE is 7: rank 0 waits up to [01] s more for rank 3, 5\n", capsys.readouterr().err)
    port = os.environ["MASTER_PORT"]
    assert said == [f"rank 3, 5 of 7 did not arrive within 2 s at 127.0.0.1:{port}: see how they ended; each training "
                    "needs a MASTER_PORT of its own"] * 5


@pytest.mark.parametrize("rank, served, said", [
    (1, True, "rank 0 of 2 did not arrive within 1 s at 127.0.0.1:{}: see how they ended; each"),
    (0, True, "port {} of this host is taken by another program: set MASTER_PORT to a free one, the same for all"),
    (1, False, "rank 0 cannot be reached at 127.0.0.1:{} within 1 s (")])
def test_a_rank_that_meets_nobody_at_its_port_says_so_in_one_sentence(rank, served, said, tmp_path, monkeypatch, capfd):
    """Such as one of a second training on a machine, at the port of the first."""
    port, first = free_port(), None
    if served:
        first = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "HEAR_S", 0.1)
    assert om.main(tiny.arguments(tmp_path, run__join_s=1)) == 1
    del first
    shown = capfd.readouterr().err  # torch's own lines come first
    assert "Traceback" not in shown and shown.splitlines()[-1].startswith(f"error: {said.format(port)}")


@pytest.mark.slow
def test_torchrun_starts_ranks_too(data, tmp_path, together):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    # Rank 0 writes down how the attempt ended: not before the others have said so, however slow they are.
    slow = {"id": "slow", "do": "nap", "rank": 1, "phase": "exit"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests/faults/inject"),
                   "FAULTS": json.dumps([slow]), "FAULT_DIR": str(tmp_path)}
    ended = launching.run([*command, ROOT / "OM_train_3modes.py", *options(data, tmp_path)], env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert final_sha256(tmp_path) == final_sha256(together) and decisions(tmp_path) == ["done"]
    assert (tmp_path / "slow").exists() and not (tmp_path / "Models/demo_om_net/lock.json").exists()


@pytest.mark.slow
def test_a_communicator_made_anew_between_epochs_changes_nothing(data, tmp_path):
    states = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        warm.train(2, folder / "log", options(data, folder, run__epochs=3, run__refresh_process_group_every=every))
        states.append(checkpoint.load(folder / "Models/demo_om_net/000003_demo_om_net.pth")["model"])
        spent = [line["spent"] for line in log_lines(folder, "step")]
        assert sum("refresh" in phases for phases in spent) == 2 * every, "twice in three epochs, in the same process"
        assert len(log_lines(folder, "start")) == 1
    assert checkpoint.weights_sha256(states[0]) == checkpoint.weights_sha256(states[1])


@pytest.mark.slow
def test_fifty_steps_of_one_two_and_four_ranks(data, tmp_path):
    states = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        warm.train(ranks, folder / "log", options(data, folder, data__repeats=40, data__pairs=200,
                                                  data__diff_reg_batch_ratio=1, run__checkpoint_steps=0))
        states[ranks] = newest_state(tmp_path / str(ranks))
        assert states[ranks]["step"] == 50 and len(log_lines(tmp_path / str(ranks), "step")) == 50
    for ranks in (2, 4):
        worst = max(((states[ranks]["model"][name] - tensor).norm() / tensor.norm()).item()
                    for name, tensor in states[1]["model"].items() if tensor.norm() > 0)
        print(f"1 and {ranks} ranks: largest relative difference of a tensor after 50 steps {worst:.2e}")
        assert worst <= 1e-5
