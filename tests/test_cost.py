"""Costs counted without doing the work, against what is known by hand and what is really kept."""
import dataclasses
import json
import signal
import subprocess
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import OM_train_3modes as om
from Diffusion import cost, losses
from Diffusion.cost import count_costs, fit_text, mode_costs, step_memory, step_seconds, this_machine, training_volumes
from Diffusion.fake_device import AliveBytes
from Diffusion.optim import local_bytes
from Runtime.errors import InputError
from Runtime.global_batch import split_step
from tests.tiny import QUICK, ROOT, arguments, begin, config, first_batches, make_data


def test_costs_of_a_linear_layer_are_those_counted_by_hand():
    with FakeTensorMode(), AliveBytes() as alive:
        layer, x = torch.nn.Linear(20, 30), torch.zeros(7, 20)
        costs = count_costs(lambda: layer(x).square().sum(), layer, alive)
    weights, batch, output, forward = 20 * 30 + 30, 7 * 20, 7 * 30, 2 * 7 * 20 * 30
    assert costs["flops"] == 2 * forward, "forward, and the weights' gradient; the input needs none"
    assert costs["kept"] == 4 * (batch + output), "the layer keeps its input, the square its own"
    assert alive.now == 4 * (weights + batch), "nothing else is left"
    # At its peak the backward pass holds the output's gradient, made of two factors, or the weights' gradient beside.
    assert 4 * (batch + 2 * output) <= costs["peak"] <= 4 * (batch + 3 * output + weights)
    for average, moments, copies in ((0.0, "shared", 3), (0.9, "shared", 4), (0.0, "per_mode", 5)):
        cfg = {"optim.average": average, "optim.moments": moments}
        both = {"one": costs, "other": costs}
        assert step_memory(both, layer, cfg) == copies * 4 * weights + costs["peak"]
        for exact, wide in (("auto", 2), (False, 1)):  # gradients of several batches are summed, on a CPU in float64
            counted = step_memory(both, layer, {**cfg, "run.exact_sums": exact, "run.bf16_sums": False}, 3)
            assert counted == (copies + wide) * 4 * weights + costs["peak"] + 2 * 4 * batch


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"data__batchsize": 1, "data__global_batchsize": 6}], ids=["one", "six"])
def test_a_step_takes_the_memory_that_is_counted(tmp_path, changes):
    """With weights that are not small beside the activations, so that the sums of gradients show."""
    make_data(tmp_path, size=8)
    cfg = config(tmp_path, **{**QUICK, "model__attention_width": 64, "optim__average": 0, **changes})
    run = begin(cfg)
    volumes, pairs = first_batches(run)
    net, costs = mode_costs(cfg, run.split.pair_batch, om.MODES)
    om.train_step(run, volumes, pairs)  # after which there are moments
    with AliveBytes() as alive:
        om.train_step(run, volumes, pairs)
    counted = step_memory(costs, net, cfg, run.split.sample_batches)
    assert 3 * local_bytes(run.net.parameters()) + alive.peak == pytest.approx(counted, rel=0.15)
    batch = om.volume_batches(run, volumes)[0]  # with all that one of noise must have, too
    with AliveBytes() as alive:
        real = count_costs(lambda: om.step_diffusion(run.model, batch, run.cfg)[0], run.net, alive)
    assert real["kept"] == pytest.approx(costs["diffusion"]["kept"], rel=0.005)


def test_fake_costs_are_real_costs():
    def network():
        return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.LeakyReLU(), torch.nn.Conv3d(4, 2, 3))

    def costs():
        with AliveBytes() as alive:
            net, x = network(), torch.zeros(2, 1, 10, 12, 14)
            return count_costs(lambda: net(x).abs().sum(), net, alive)

    with FakeTensorMode():
        counted = costs()
    assert counted == costs()


@pytest.mark.slow
def test_dry_run_costs_nothing_and_ends_in_json(tmp_path, capsys):
    make_data(tmp_path)
    assert om.main(arguments(tmp_path, "--dry-run", run__amp="bf16")) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    costs = json.loads(lines[-1])
    net = om.build_network(config(tmp_path))
    assert costs["parameters"] == sum(p.numel() for p in net.parameters())
    assert costs["steps_per_epoch"] == 6 and costs["effective_batch"] == 2
    assert costs["step_flops"] > 0 and set(costs["step_memory_bytes"]) == {"cuda", "xpu", "cpu"}
    memory = costs["step_memory_bytes"]
    assert memory["cuda"] == memory["xpu"] != memory["cpu"] and min(memory.values()) > 16 * costs["parameters"]
    assert not (tmp_path / "Models").exists()
    alone = {f"loss__{weight}": 0 for weight in ("dist", "ang", "regul", "contrastive")}
    assert om.main(arguments(tmp_path, "--dry-run", data__pairs=1000, run__amp="off", **alone)) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["steps_per_epoch"] == 1000 and "1000 pairs; effective" in printed
    assert "XPU, float32)" in printed and "on a CPU (float32)" in printed


@pytest.mark.slow
def test_what_is_not_prepared_yet_is_counted_from_the_files(tmp_path, capsys):
    make_data(tmp_path)
    assert om.main(arguments(tmp_path, "--dry-run", data__cache=tmp_path / "cache", data__expect_samples=0)) == 0
    *_, counted, here, costs = capsys.readouterr().out.strip().splitlines()
    costs = json.loads(costs)
    assert costs["steps_per_epoch"] == 6 and costs["device"] == "cpu" and costs["fits"] and costs["step_seconds"] > 0
    assert here.startswith("on this machine (cpu): it fits (") and "all 2 epochs" in here
    assert here.endswith("by a trial on noise")
    assert f"6 volumes (from {tmp_path / 'data'}, since data.cache" in counted and "run OM_prepare.py" in counted
    assert om.main(arguments(tmp_path / "none", "--dry-run", data__cache=tmp_path / "cache")) == 0
    assert f"(from data.expect_samples, since {tmp_path / 'none/data'}: no such" in capsys.readouterr().out
    assert om.main(arguments(tmp_path, "--dry-run", data__train_ids="70-80")) == 43
    assert 'ids "70-80" select no volume of the 8 volumes' in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_dry_run_has_counted_outlives_its_trial(tmp_path):
    """A trial step may take minutes, and the kernel may end it; a log then still has what was counted before."""
    command = [sys.executable, ROOT / "OM_train_3modes.py", "--config", ROOT / "Config/config_demo.yaml", "--dry-run",
               "--set", f"data.root={tmp_path / 'none'}", "run.device=cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "steps per epoch" in line:
                process.kill()
                break
        assert process.stdout.read() == "" and process.wait() == -signal.SIGKILL, "nothing came before the trial"


def test_data_that_no_mode_uses_refuse_no_dry_run(tmp_path):
    make_data(tmp_path, size=8)
    cfg = config(tmp_path, data__pair_list=tmp_path / "no_list.json")
    assert training_volumes(cfg, ["volumes"])[:2] == (6, None)
    with pytest.raises(InputError, match="no such pair list"):
        training_volumes(cfg, ["volumes", "pairs"])


def test_labels_that_training_refuses_refuse_the_dry_run(tmp_path, capsys):
    make_data(tmp_path, size=8)
    for changes, reason in (({"registration__labels": "77"}, "hold no label but the background among"),
                            ({"loss__segment": 1, "model__structures": 9}, "model.structures is 9, but")):
        assert om.main(arguments(tmp_path, "--dry-run", loss__dice=0.1, **changes)) == 43
        assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_results_of_a_step_function_that_training_refuses_refuse_the_dry_run(tmp_path, monkeypatch, capsys):
    step = om.step_registration
    bad = om.MODES["registration"]._replace(step=lambda *given: (step(*given)[0], {"bright": 0.5}))
    monkeypatch.setitem(om.MODES, "registration", bad)
    assert om.main(arguments(tmp_path, "--dry-run")) == 43
    assert "error: mode registration: its bright is a float, not a tensor of one number" in capsys.readouterr().err


def test_a_step_is_tried_on_a_grid_of_this_machine_and_grows_with_the_voxels(monkeypatch):
    """By a clock of its own: a step takes a second, and the first one ten."""
    shapes, clock = [], [1000.0]
    monkeypatch.setattr(cost, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def step(net, batch, cfg):
        shapes.append(tuple(batch["moving"].shape[2:]))
        losses.image_similarity(batch["moving"], batch["fixed"], cfg)
        clock[0] += 10.0 if len(shapes) == 1 else 1.0
        return sum(each.sum() for each in net.parameters()), {}

    modes = {"registration": om.MODES["registration"]._replace(step=step)}
    cfg = config(data__img_size=[64, 128, 64], registration__scales=7)  # of which the trial's 32 voxels allow six
    split = dataclasses.replace(split_step(cfg, 1), pair_batches=3)
    found = step_seconds(cfg, split, modes, 1, torch.device("cpu"))
    assert shapes == [(32, 64, 64)] * 2, "once to warm up, once timed"
    assert found == 3 * 4 * 1.0, "of three batches, with four times the voxels"


def test_a_trial_that_runs_out_of_memory_is_told_as_a_step_that_does_not_fit():
    def step(net, batch, cfg):
        return torch.empty(2 ** 50), {}  # a petabyte: the allocator refuses it

    modes, cfg = {"registration": om.MODES["registration"]._replace(step=step)}, config()
    here = this_machine(cfg, {"cpu": 0}, split_step(cfg, 1), modes, 1)
    assert here["fits"] is False and here["step_seconds"] is None
    assert "does NOT fit" in fit_text(here, cfg)
    assert "a trial step ran out of memory" in fit_text({**here, "free_bytes": None}, cfg)


def test_a_step_that_does_not_fit_is_told_with_what_to_change():
    here = {"fits": False, "free_bytes": 2 ** 31}
    said = fit_text(here, {"data.batchsize": 2, "model.use_checkpoint": False})
    assert said.endswith("does NOT fit (2.0 GiB are free): lower data.batchsize, or set model.use_checkpoint to true")
    assert fit_text(here, {"data.batchsize": 1, "model.use_checkpoint": True}).endswith("set a smaller data.img_size")


@pytest.mark.slow
def test_averaged_weights_cost_mode_2_another_forward():
    counted = [mode_costs(config(optim__average=average), 1, om.MODES)[1] for average in (0.0, 0.9)]
    without, beside = (costs.pop("contrastive") for costs in counted)
    assert 1.2 * without["flops"] < beside["flops"] < 1.5 * without["flops"] and without["kept"] == beside["kept"]
    assert counted[0] == counted[1]


@pytest.mark.slow
def test_each_label_of_the_dice_takes_some_volumes():
    cfg = config(loss__dice=0.1)
    plain, one, ten = (mode_costs(cfg | {"loss.dice": dice}, 1, om.MODES, labels=labels)[1]["registration"]["kept"]
                       for dice, labels in ((0, 1), (0.1, 1), (0.1, 10)))
    volume = 4 * 16 ** 3
    assert plain < one < ten and 2 * 9 * volume <= ten - one <= 4 * 9 * volume


@pytest.mark.slow
def test_production_config_has_its_recorded_size(capsys):
    assert om.main(["--config", str(ROOT / "Config/config_om.yaml"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    costs = json.loads(output.strip().splitlines()[-1])
    assert 15e9 < costs["step_memory_bytes"]["cuda"] < 20e9, "batch 2 on a device of 24 GiB"
    assert "steps per epoch: unknown without the volumes (data.expect_samples, since Data/all: no such" in output
    assert "0 steps" not in output and "epochs" not in output, "nothing is said of what is not known"
    assert "128x128x128" in output and "batch 2" in output and "80 timesteps" in output


@pytest.mark.slow
def test_dry_run_of_several_ranks_counts_their_common_batch(tmp_path, capsys, monkeypatch):
    make_data(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for total, batch, steps in ((0, 6, 2), (12, 12, 1)):
        assert om.main(arguments(tmp_path, "--dry-run", data__global_batchsize=total)) == 0
        printed = capsys.readouterr().out
        costs = json.loads(printed.strip().splitlines()[-1])
        assert costs["effective_batch"] == batch and costs["steps_per_epoch"] == steps
    assert "effective batch 12 (ranks: 3 x 2 batches, one after another)" in printed
