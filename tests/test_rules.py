"""Each rule finds what it is for, in logs that are made up and in real ones, and nothing in those of healthy runs."""
import json

import pytest

from Report.rules import find_all
from Report.run_logs import read_run
from Supervisor import attempts
from tests import warm
from tests.faults.common import launch, new_folder, run_of, wait
from tests.made_up_run import made_up_run
from tests.tiny import QUICK, ROOT, arguments


def found(run):
    return {each["rule"]: each for each in find_all(read_run(run))}


def test_a_healthy_run_is_left_alone(tmp_path):
    assert found(made_up_run(tmp_path / "run", 500, ranks=4)) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Made up
# ---------------------------------------------------------------------------------------------------------------------

def slower(rank, share, since=0):
    def pace(number, step, line):
        spent = line["spent"]
        if number == rank and step >= since:
            spent = {**spent, "forward": spent["forward"] * (1 + share), "deform": spent["deform"] * (1 + share)}
        return {"spent": spent}
    return pace


def test_a_slow_rank_is_named_with_its_node_and_phase(tmp_path):
    each = found(made_up_run(tmp_path / "run", 50, ranks=2, pace=slower(1, 0.4)))["straggler"]
    assert "rank 1 on n1 is" in each["sentence"] and "most of all in forward" in each["sentence"]
    assert "--exclude" in each["advice"] and each["step"] == 49


@pytest.mark.parametrize("ranks, share, since, steps", [
    (2, 0.05, 0, 50), (8, 0.1, 0, 200), (2, 0.4, 0, 30), (1, 1, 0, 99), (2, 0.4, 190, 200)])
def test_no_rank_is_named_by_little_or_too_early(ranks, share, since, steps, tmp_path):
    assert found(made_up_run(tmp_path / "run", steps, ranks, pace=slower(ranks - 1, share, since))) == {}


def test_waiting_for_a_slow_rank_is_not_slow(tmp_path):
    def pace(rank, step, line):
        return {"spent": {**line["spent"], "agree": 5.0, "backward": 9.0}} if rank == 0 else {}
    assert found(made_up_run(tmp_path / "run", 100, 2, pace=pace)) == {}


LEAK = {"event": "leak", "step": 400, "time": 1.0, "who": "graph", "place": "device", "bytes_per_step": 2 ** 30,
        "steps_left": 30, "sentence": "device memory grows by 1024.0 MiB a step (graph) and runs out in about 30 steps"}


def test_a_leak_is_told_as_the_rank_has_found_it(tmp_path):
    each = found(made_up_run(tmp_path / "run", events=[(1, LEAK)]))["leak"]
    assert each["sentence"].startswith("rank 1: device memory grows by 1024.0 MiB a step (graph)")
    assert "diagnose_xpu_leak.py" in each["advice"]
    assert found(made_up_run(tmp_path / "later", 2600, 1, events=[(0, LEAK)])) == {}


def test_non_finite_losses_that_become_more_are_found(tmp_path):
    nan = {"event": "nonfinite", "step": 450, "time": 1.0, "mode": "contrastive"}
    run = made_up_run(tmp_path / "run", step=lambda number, line: {"nonfinite": int(number > 400 and number % 20 == 0)},
                      events=[(1, nan)])
    each = found(run)["non-finite losses"]
    assert "the loss of contrastive was not finite in 4 of the last 250 steps, after 0" in each["sentence"]
    run = made_up_run(tmp_path / "all", 20, step=lambda number, line: {"nonfinite": 1})
    assert "in 10 of the last 10 steps" in found(run)["non-finite losses"]["sentence"]
    run = made_up_run(tmp_path / "few", step=lambda number, line: {"nonfinite": int(number in (9, 480))})
    assert found(run) == {}


def test_a_mode_that_is_clipped_away_is_named(tmp_path):
    def loud(number, line):
        return {"norms": {"diffusion": 50.0, "contrastive": 5.0, "registration": 3.0}}
    run = made_up_run(tmp_path / "run", step=loud, contrastive__clip_norm=1e-3, registration__clip_norm=1.0)
    each = found(run)["clipped away"]
    assert each["sentence"].startswith("contrastive is clipped in 100 % of the steps, from a norm of 5 to 0.001, "
                                       "50,000 times below that of diffusion")
    assert "raise contrastive.clip_norm" in each["advice"]
    assert found(made_up_run(tmp_path / "half", step=loud, contrastive__clip_norm=0.2)) == {}
    own = {"contrastive__clip_norm": 1e-3, "registration__clip_norm": 1.0, "optim__moments": "per_mode"}
    assert found(made_up_run(tmp_path / "own", step=loud, **own)) == {}, "its own Adam divides by its own gradients"


@pytest.mark.parametrize("ang, gate, stuck", [(lambda share: -0.02, -0.7, True), (lambda share: -share / 9, -0.7, True),
                                              (lambda share: -share / 2, -0.7, False), (lambda share: 0.0, 2, False)])
def test_a_gate_that_stays_shut_is_found(ang, gate, stuck, tmp_path):
    def step(number, line):
        value = ang(number / 500)
        return {"open": value < gate, "terms": {**line["terms"], "ang": value}}
    each = found(made_up_run(tmp_path / "run", step=step, registration__gate=gate))
    assert set(each) == ({"stuck gate"} if stuck else set())
    if stuck:
        assert "has not run in the last 500 steps: ang is -0." in each["stuck gate"]["sentence"]
        assert "raise registration.gate" in each["stuck gate"]["advice"]
        off = {f"loss__{name}": 0.0 for name in ("imgsim", "imgmse", "ddf", "dice")}  # then mode 3 is not to run
        assert found(made_up_run(tmp_path / "off", step=step, registration__gate=gate, **off)) == {}


def test_overfitting_is_found_where_validation_falls_and_training_does_not(tmp_path):
    def worse(number, line):
        return {"val_dice": 0.7 - 0.02 * abs(number - 3) + 0.001 * (number % 2)}
    each = found(made_up_run(tmp_path / "run", epoch=worse))["overfitting"]
    assert "val_dice was best in epoch 4 (0.701) and has fallen to 0.581" in each["sentence"]
    assert "best checkpoint" in each["advice"]

    def both(number, line):
        return {**worse(number, line), "imgsim": -0.5 + number / 100}
    assert found(made_up_run(tmp_path / "both", epoch=both)) == {}
    noisy = [0.60, 0.64, 0.70, 0.66, 0.69, 0.67, 0.695, 0.66, 0.69, 0.68]
    run = made_up_run(tmp_path / "noisy", epoch=lambda number, line: {"val_dice": noisy[number]})
    assert found(run) == {}


def test_a_disk_that_is_almost_full_is_found(tmp_path):
    def pace(free):
        return lambda rank, step, line: {"disk_free": free, "disk_total": 10 ** 12} if rank == 0 else {}
    run = made_up_run(tmp_path / "run", pace=pace(5 * 10 ** 10))
    assert "is 95 % full, 50 GB are left" in found(run)["full disk"]["sentence"]
    run = made_up_run(tmp_path / "half", pace=pace(5 * 10 ** 11))
    assert found(run) == {}
    (run / "manifest.json").write_text(json.dumps({"checkpoints": {"a.pth": {"bytes": 2 * 10 ** 11}}}))
    assert "a checkpoint takes 200 GB" in found(run)["full disk"]["sentence"]


# ---------------------------------------------------------------------------------------------------------------------
# Real trainings
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_real_logs_of_a_slow_rank_a_shut_gate_a_clipped_mode_and_nan(tmp_path):
    """One launch of two ranks in which four things are wrong; the end is told by the user's command."""
    folder = new_folder(tmp_path, "run")
    slow = [{"id": f"slow {phase}", "do": "slow_down", "share": 1.0, "rank": 1, "phase": phase, "always": True}
            for phase in ("deform", "forward", "accumulate", "backward", "optimizer")]  # in all phases of its own work
    nan = [{"id": f"nan {step}", "do": "nan_batch", "rank": 0, "phase": "forward", "mode": "diffusion", "step": step}
           for step in (200, 210, 220, 230)]
    command = f"echo \"$OMNIMORPH_SUBJECT: $OMNIMORPH_MESSAGE\" >> {folder}/told.txt"
    code = wait(launch(folder, 2, [*slow, *nan], run__epochs=20, registration__gate=-1, run__val_every=100,
                       contrastive__clip_norm=1e-12, run__checkpoint_steps=0, run__notify=command), 800)
    each = found(run_of(folder))
    assert code == 0 and set(each) == {"straggler", "stuck gate", "clipped away", "non-finite losses"}, each
    assert each["straggler"]["sentence"].startswith("rank 1 on ")
    assert each["clipped away"]["sentence"].startswith("contrastive is ")
    assert "the loss of diffusion was not finite in 4" in each["non-finite losses"]["sentence"]
    assert (folder / "told.txt").read_text().startswith("done: attempt 0: done")


@pytest.mark.slow
def test_real_logs_of_a_leak(tmp_path):
    leak = {"do": "leak", "rank": 1, "phase": "optimizer", "mode": "diffusion", "step": 5, "always": True}
    folder = new_folder(tmp_path, "run")
    assert wait(launch(folder, 2, [leak], run__epochs=4)) == 0
    assert "rank 1: host memory grows by" in found(run_of(folder))["leak"]["sentence"]


HIPPOCAMPUS = ROOT.parent / "shared/data/hippocampus"


@pytest.mark.slow
@pytest.mark.skipif(not HIPPOCAMPUS.is_dir(), reason="needs ../shared/data/hippocampus")
def test_real_logs_of_overfitting(tmp_path):
    """Two volumes, mode 3 alone, no augmentation, a large learning rate: what is learned does not hold for others."""
    still = {f"augment__{name}": 0 for name in ("rotation", "scaling", "shift", "gamma")}
    alone = {f"loss__{name}": 0 for name in ("dist", "ang", "regul", "contrastive", "ddf")}
    words = arguments(tmp_path, **{
        **QUICK, **still, **alone, "data__root": HIPPOCAMPUS, "data__train_ids": "1,3", "data__val_ids": "201-210",
        "data__expect_samples": 0, "data__img_size": 16, "data__repeats": 4, "registration__clip_norm": 10,
        "optim__lr": 1e-2, "loss__imgsim": 1, "loss__imgmse": 1, "run__epochs": 160, "run__checkpoint_steps": 0})
    warm.train(1, tmp_path / "log.txt", words, seconds=600)
    each = found(run_of(tmp_path))
    assert set(each) == {"overfitting"} and "val_dice was best in epoch" in each["overfitting"]["sentence"], each


def test_a_command_that_fails_or_hangs_is_named_and_nothing_else(tmp_path, capfd, monkeypatch):
    for number, (command, seconds) in enumerate((("exit 7", 60.0), ("sleep 1", 0.2))):
        monkeypatch.setattr(attempts, "COMMAND_S", seconds)
        run = made_up_run(tmp_path / str(number), 5, run__notify=command)
        attempts.notify_end(run, {"decision": "stop", "sentence": "x"})
        attempts.notify_end(run, {"decision": "continue", "sentence": "x"})
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("run.notify: Command 'exit 7' returned") and "timed out" in said[1] and len(said) == 2
