"""Agreements of three real ranks over gloo, in one launch; and who a process takes itself for."""
import concurrent.futures
import json
import os
import socket
from dataclasses import asdict

import pytest
import torch

from Diffusion.training_state import agree_on_precision
from Runtime import agree, launch, watchdog
from Runtime.errors import InputError
from Runtime.launch import Ranks
from Supervisor.attempts import free_port
from tests import launching, warm

CFG = {"run.deadline_floor_s": 30.0, "run.deadline_factor": 3.0, "run.deadline_first_s": 30.0}
ALONE = Ranks()
WEIGHTS = {"head.weight": torch.arange(6.0).view(2, 3), "head.bias": torch.ones(3), "counter": torch.tensor(4.0)}


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (agree.OutOfStep, RuntimeError, InputError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def other_weights(rank, name):
    """The weights, of which rank 2 holds one that differs in the last bit."""
    weights = {key: tensor.clone() for key, tensor in WEIGHTS.items()}
    if rank == 2:
        weights[name].view(torch.int32).flatten()[-1] += 1
    return weights


def main(folder, waiting_port, other_port):
    """One of three ranks: goes through all cases and writes what it saw.

    Ranks 0 and 1 wait for the third at one port in the end, and it looks for them at the other.
    """
    ranks = launch.environment()
    rank, seen = ranks.rank, {}
    watchdog.start(folder, rank, 0, CFG, True)
    launch.rendezvous(ranks, 20)
    seen["told"] = [launch.broadcast(ranks, "from", "rank 0" if rank == 0 else None)]
    launch.join(ranks, torch.device("cpu"), {"run.deadline_first_s": 20, "run.backend_timeout_s": 20})
    seen["means"] = asdict(agree.agree(ranks, 5, "diffusion", 77, terms=[1.0 + rank, -0.5 * rank]))
    seen["raised"] = [agree.agree(ranks, 5, "contrastive", nonfinite=rank == 1).nonfinite,
                      agree.agree(ranks, 5, "contrastive", save=rank == 0).save,
                      agree.agree(ranks, 5, "contrastive", leave=("steps", "memory", "signal")[rank]).leave,
                      agree.agree(ranks, 5, "contrastive", leave=("time", None, None)[rank]).leave]
    seen["same weights"] = agree.agree(ranks, 5, "checkpoint", weights=other_weights(0, "head.bias")).terms
    # One rank differs; where all three do, rank 0 counts as right.
    seen["step"] = error_of(agree.agree, ranks, 9 if rank == 1 else 8, "diffusion")
    seen["branch"] = error_of(agree.agree, ranks, 8, "registration" if rank == 0 else "contrastive")
    shapes = agree.fingerprint([torch.zeros(2, 3 if rank == 2 else 4)])
    seen["shapes"] = error_of(agree.agree, ranks, 8, "diffusion", shapes)
    seen["all differ"] = error_of(agree.agree, ranks, 20 + rank, "diffusion")
    for name in WEIGHTS:
        seen[name] = error_of(agree.agree, ranks, 8, "diffusion", weights=other_weights(rank, name))
    seen["names"] = error_of(agree.agree, ranks, 8, "diffusion", terms=[1.0, 2.0],
                             names=("total", "dark" if rank == 1 else "bright"))
    seen["none compared"] = error_of(agree.agree, ranks, 8, "diffusion", weights=None if rank == 1 else WEIGHTS)
    seen["gather"] = agree.gather(ranks, torch.tensor([[rank, 1], [2, 3]]).t()).tolist()
    seen["objects"] = agree.gather_objects(ranks, {"rank": rank, "much": "x" * rank})
    cfg = {"run.amp": "off" if rank == 1 else "bf16"}
    seen["precision"] = [agree_on_precision(cfg, ranks, torch.device("cpu")), cfg["run.amp"]]
    seen["phase"] = [watchdog.STATE["name"], watchdog.STATE["mode"]]
    launch.refresh(ranks, torch.device("cpu"), {"run.deadline_first_s": 20, "run.backend_timeout_s": 20})
    seen["refreshed"] = [ranks.generation, agree.gather(ranks, torch.tensor([rank])).flatten().tolist()]
    os.environ["MASTER_PORT"] = str(waiting_port if rank < 2 else other_port)
    seen["meet"] = error_of(launch.rendezvous, Ranks(rank=rank, world_size=3), 3 if rank < 2 else 1)
    weights = {name: tensor for name, tensor in WEIGHTS.items() if rank != 1 or name != "head.bias"}
    seen["one less"] = error_of(agree.agree, ranks, 8, "checkpoint", weights=weights)
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    launch.leave(ranks)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw, in rank order."""
    folder = tmp_path_factory.mktemp("agree")
    with launching.held_port() as waiting, launching.held_port() as other:
        with warm.ranks(3, folder / "log", [folder, waiting, other], main) as processes:
            codes = warm.codes(processes, 60)
    found = [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(3)]
    logs = [(folder / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(3)]
    for one, log in zip(found, logs):
        one["events"] = [entry for entry in map(json.loads, log) if entry["event"] == "out of step"]
        one["codes"] = codes
    return found


def test_means_and_raised_flags_are_the_same_everywhere(seen):
    for one in seen:
        assert one["told"] == ["rank 0"]
        assert one["means"] == {"nonfinite": False, "leave": None, "save": False, "terms": [2.0, -0.5]}
        assert one["raised"] == [True, True, "memory", "time"]
        assert one["same weights"] == []


@pytest.mark.parametrize("case, text", [
    ("step", "rank 1 is out of step in diffusion of step {step}: its step is 9 where the others have 8"),
    ("branch", "rank 0 is out of step in {branch} of step 8: its branch is registration where the others have contra"),
    ("shapes", "rank 2 is out of step in diffusion of step 8: its shapes is "),
    ("all differ", "rank 1 is out of step in diffusion of step {all}: its step is 21 where the others have 20"),
    ("head.weight", "rank 2 is out of step in diffusion of step 8: its head.weight is "),
    ("head.bias", "rank 2 is out of step in diffusion of step 8: its head.bias is "),
    ("counter", "rank 2 is out of step in diffusion of step 8: its counter is "),
    ("none compared", "rank 1 is out of step in diffusion of step 8: its weights is 0")])
def test_every_rank_says_which_one_differs_and_in_what(seen, case, text):
    for rank, one in enumerate(seen):
        wanted = text.format(step=9 if rank == 1 else 8, branch="registration" if rank == 0 else "contrastive",
                             all=20 + rank)
        assert one[case].startswith(f"OutOfStep: {wanted}")


def test_terms_of_different_names_are_not_averaged(seen):
    for one in seen:
        assert one["names"].startswith("InputError: mode diffusion returns different terms for different batches: ")


def test_what_differs_stands_in_the_log(seen):
    for one in seen:
        assert [(event["differs"], event["what"]) for event in one["events"]][:8] == [
            (1, "step"), (0, "branch"), (2, "shapes"), (1, "step"), *((2, name) for name in WEIGHTS), (1, "weights")]
        assert (one["events"][0]["found"], one["events"][0]["wanted"]) == ("9", "8")


def test_all_ranks_take_float32_where_one_of_them_cannot_take_bf16(seen):
    assert [one["precision"] for one in seen] == [["off", "bf16"], ["off", "off"], ["off", "bf16"]]


def test_a_rank_with_fewer_weights_is_named_too(seen):
    for one in seen:
        assert one["one less"].startswith("OutOfStep: rank 1 is out of step in checkpoint of step 8: its head.bias is")
        assert one["codes"] == [0, 0, 0]


def test_rows_and_objects_come_in_rank_order_also_after_a_refresh(seen):
    for one in seen:
        assert one["gather"] == [[[rank, 2], [1, 3]] for rank in range(3)]
        assert one["objects"] == [{"rank": rank, "much": "x" * rank} for rank in range(3)]
        assert one["phase"] == ["agree", "diffusion"] and one["refreshed"] == [1, [0, 1, 2]]


def test_meeting_names_who_does_not_come(seen):
    vain, gone = "rank 2 of 3 did not arrive within 3 s", "rank 0 cannot be reached at 127.0.0.1:"
    assert seen[0]["meet"].startswith(f"NotMet: {vain} at 127.0.0.1:")
    assert vain in seen[1]["meet"] or gone in seen[1]["meet"], "rank 0, which serves the store, may give up first"
    assert gone in seen[2]["meet"] and "within 1 s" in seen[2]["meet"]


def test_a_rank_alone_agrees_with_itself_without_any_group():
    launch.rendezvous(ALONE, 1)
    assert launch.broadcast(ALONE, "key", "value") == "value"
    assert agree.agree(ALONE, 3, "checkpoint", weights={}).terms == [], "fsdp holds nothing whole but buffers, if any"
    found = agree.agree(ALONE, 3, "registration", 5, WEIGHTS, nonfinite=True, leave="time", terms=[0.25, 4, 1, 2])
    assert found == agree.Agreed(nonfinite=True, leave="time", save=False, terms=[0.25, 4.0, 1.0, 2.0])
    assert agree.gather(ALONE, torch.ones(2, requires_grad=True)).tolist() == [[1.0, 1.0]]
    assert agree.gather_objects(ALONE, "me") == ["me"]


def test_fingerprints_know_shape_type_order_and_absence_but_not_values():
    one = [[torch.zeros(2, 3), {"t": torch.zeros(2, dtype=torch.int64), "condition": None}]]
    first, second = one[0]
    others = [[[first.t(), second]], [[first.double(), second]], [[second, first]], [[first]], [one, one], [],
              [[first, {**second, "condition": torch.zeros(1)}]]]
    assert agree.fingerprint([(torch.ones(2, 3), second)]) == agree.fingerprint(one)
    numbers = {agree.fingerprint(value) for value in [one, *others]}
    assert len(numbers) == 8 and all(0 < number <= 2 ** 48 and float(number) == number for number in numbers)


def test_checksums_see_bits_and_not_memory_formats():
    net = torch.nn.Conv3d(3, 4, 3)
    before = agree.checksums(net.state_dict().values())
    after = agree.checksums(net.to(memory_format=torch.channels_last_3d).state_dict().values())
    assert before.dtype == torch.int64 and torch.equal(before, after)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(3, 5).to(dtype)
        other = tensor.clone()
        other[1, 2] = 0
        first, second = agree.checksums([tensor, other.t()]).tolist()
        assert first != second and agree.checksums([tensor.t(), other]).tolist() == [first, second]
    assert agree.checksums([torch.tensor(1.5)]).shape == (1,) and agree.checksums([]).shape == (0,)


VARIABLES = ["SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT", *(name for pair in launch.NAMES.values() for name in pair)]


@pytest.fixture
def environment(monkeypatch):
    def change(**variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return change


@pytest.mark.parametrize("variables, expected", [
    ({}, (0, 0, 1)), ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
    ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 0, 2)),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (0, 0, 1)),  # the batch script itself
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "4294967290"},
     (0, 0, 1)),  # the shell of salloc
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}, (5, 1, 8)),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "5",
      "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}, (1, 1, 2))])
def test_who_a_process_takes_itself_for(environment, variables, expected):
    environment(**variables)
    found = launch.environment()
    assert (found.rank, found.local_rank, found.world_size) == expected


@pytest.mark.parametrize("variables, text", [
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2: ranks count from 0."),
    ({"RANK": "0"}, "WORLD_SIZE is not set: every rank needs RANK, LOCAL_RANK and WORLD_SIZE, or none of them."),
    ({"WORLD_SIZE": "2"}, "RANK is not set"), ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is -1"),
    ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_NTASKS is not set: every rank needs SLURM_PROCID, SLURM_LOC")])
def test_contradictions_are_refused(environment, variables, text):
    environment(**variables)
    with pytest.raises(InputError) as refused:
        launch.environment()
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "a", "MASTER_PORT": "port"},
                                       {"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}])
def test_several_ranks_need_a_place_to_meet(environment, variables):
    environment(**variables)
    with pytest.raises(InputError, match=r"MASTER_ADDR is .* and MASTER_PORT .*: with 2 ranks both are needed"):
        launch.rendezvous(Ranks(rank=0, world_size=2), 1)


def meet_in_threads(people, port, monkeypatch, seconds=10):
    """What each of several ranks says once it has met the others: `error_of`. people: (ranks, name of run, config)."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def come(ranks, name, cfg):
        launch.rendezvous(ranks, seconds, name)
        launch.refuse_together(ranks, "config", cfg, launch.other_config)

    with concurrent.futures.ThreadPoolExecutor(len(people)) as pool:
        return list(pool.map(lambda person: error_of(come, *person), people))


def test_ranks_with_different_configs_are_all_refused(monkeypatch):
    """Else one model would be trained on two learning rates, with no word."""
    same = {"optim.lr": 1e-3, "data.stage": "", "run.threads": 0}
    for other, said in (({**same, "optim.lr": 1e-4}, "rank 1 has optim.lr 0.0001 and rank 0 has 0.001"),
                        ({**same, "data.stage": "/tmp", "run.threads": 2}, None)):
        people = [(Ranks(rank=rank, world_size=2), "run", cfg) for rank, cfg in enumerate((same, other))]
        found = meet_in_threads(people, free_port(), monkeypatch)
        assert [text and text.split(":")[1].strip() for text in found] == [said] * 2


def test_ranks_of_two_trainings_at_one_port_do_not_become_one_model(monkeypatch):
    """Rank 1 of another run comes first; the own one later. Both runs are called launch0 of two ranks."""
    monkeypatch.setattr(launch, "HEAR_S", 1)  # the stranger waits that long, too, for rank 0 to name the missing
    people = [(Ranks(rank=rank, world_size=2), f"Models/{name}_om_net", {}) for rank, name in ((1, "b"), (0, "a"),
                                                                                               (1, "a"))]
    stranger, *own = meet_in_threads(people, free_port(), monkeypatch, seconds=5)
    assert own == [None, None] and ("did not arrive" in stranger or "cannot be reached" in stranger)


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        said = meet_in_threads([(Ranks(rank=0, world_size=2), "run", {})], taken.getsockname()[1], monkeypatch, 5)
    assert "of this host is taken by another program: set MASTER_PORT" in said[0]
