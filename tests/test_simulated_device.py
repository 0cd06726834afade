"""A whole training on an accelerator without hardware: what would make one fail, or wait.

In processes of their own: once torch knows the device, run.device auto would take it in every other test too.
"""
import collections
import json

import numpy as np
import pytest
import torch
from torch.utils import backend_registration

import OM_study
import OM_train_3modes as om
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Diffusion.cost import mode_costs, step_memory
from Inference import affine
from Inference.refine import refine
from Runtime import checkpoint
from Runtime.global_batch import split_step
from tests import warm
from tests.tiny import add_masks, arguments, config, log_lines, make_data

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip(f"torch {torch.__version__} takes up no device that is written in Python", allow_module_level=True)

from tests.simulated_device import IN_A_STEP, SimulatedDevice  # noqa: E402


def train_and_report(words):
    """A training on the simulated device. Prints what was noted as the last line."""
    with SimulatedDevice() as seen:
        code = om.main(words)
        peak = torch.get_device_module("simulated").max_memory_allocated()
    print(json.dumps({"syncs": seen.syncs, "wrong_device": seen.wrong_device, "peak": peak}))
    return code


def printed(function, words, folder):
    """What a function prints in a process of its own, which it ends well."""
    done = warm.program(function, words, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def simulated(folder, **changes):
    said = printed(train_and_report, arguments(add_masks(make_data(folder)), run__device="auto", run__epochs=1,
                                               run__checkpoint_steps=0, **changes), folder)
    assert "1 x simulated:0, simulated device, 32 GiB" in said
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("changes", [
    {"optim__average": 0.9, "model__affine_match": True, "model__condition_type": "slice", "loss__dice": 0.1,
     "data__label_ids": "0-3", "registration__masks": True},
    pytest.param({"data__global_batchsize": 4}, marks=pytest.mark.slow)], ids=["shipped recipe", "accumulation"])
def test_a_step_waits_for_the_device_eight_times_at_most(tmp_path, changes):
    noted = simulated(tmp_path, **changes)
    assert noted["wrong_device"] == []
    waits = collections.Counter((what, where) for what, where, phase in noted["syncs"] if phase in IN_A_STEP)
    steps = len(log_lines(tmp_path, "step"))
    assert steps >= 3 and sum(waits.values()) <= 8 * steps, waits
    # Between the start of a mode and its one fetch the host only hands out work.
    in_modes = {where for _, where, phase in noted["syncs"] if phase in ("forward", "accumulate", "backward")}
    assert len(in_modes) == 1 and in_modes.pop().startswith("OM_train_3modes.py:"), in_modes
    compare_losses(tmp_path, **changes)
    cfg = config(tmp_path, **changes)
    net, costs = mode_costs(cfg, 1, om.MODES, labels=6)
    counted = step_memory(costs, net, {**cfg, "run.exact_sums": False}, split_step(cfg, 1).sample_batches)
    assert noted["peak"] == pytest.approx(counted, rel=0.15), "what --dry-run counts"


def compare_losses(tmp_path, **changes):
    """Those of the run on the device with those of the same run on the CPU."""
    on_device = [line["terms"] for line in log_lines(tmp_path, "step")]
    assert om.main(arguments(tmp_path, "--fresh", run__epochs=1, run__checkpoint_steps=0,
                             run__models=tmp_path / "other/Models", **changes)) == 0
    on_cpu = [line["terms"] for line in log_lines(tmp_path / "other", "step")]
    assert len(on_device) == len(on_cpu)
    for one, other in zip(on_device, on_cpu):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def look_at_mistakes():
    with SimulatedDevice() as seen:
        device = torch.rand(4, device="simulated")
        assert device.device.type == "simulated"
        device + torch.rand(4)
        device * torch.tensor(2.0)  # a number, as on any device
        assert seen.syncs == [] and [note.what for note in seen.wrong_device] == ["aten.add.Tensor"]
        device.sum().item()
        device[device > 0.5]
        device.cpu()
        torch.rand(4).to("simulated")
        torch.rand(4).to("simulated", non_blocking=True)  # not pinned: the driver copies it first
        torch.rand(4).pin_memory().to("simulated", non_blocking=True)
        found = [note.what for note in seen.syncs]
        assert found == ["item", "mask as index", "(4,) to the CPU", *["(4,) from the CPU"] * 2], found
        assert all(note.where.startswith("tests/test_simulated_device.py:") for note in seen.syncs)
        layer = torch.nn.Linear(4, 4).to("simulated")
        layer(device).square().sum().backward()
        assert layer.weight.grad.device.type == "simulated"
        expected = 2 * layer(device).detach()[:, None].cpu() * device.cpu()
        assert torch.allclose(layer.weight.grad.cpu(), expected)
    return 0


def count_memory():
    with SimulatedDevice():
        module = torch.get_device_module("simulated")
        before = module.memory_allocated()
        x = torch.zeros(1000, device="simulated", requires_grad=True)
        view, y = x.view(10, 100), x.exp()  # exp keeps its result for the backward pass
        assert module.memory_allocated() - before == 8000
        loss = y.square().sum()
        kept = module.memory_allocated() - before
        del y, view
        assert module.memory_allocated() - before == kept, "the graph still holds it"
        loss.backward()
        del loss
        assert module.memory_allocated() - before == 8000, "x and its gradient"
        assert module.max_memory_allocated() - before >= kept
    return 0


@pytest.mark.parametrize("look", [look_at_mistakes, count_memory])
def test_mistakes_are_noted_and_memory_is_counted_as_long_as_something_holds_it(tmp_path, look):
    printed(look, None, tmp_path)


def study_and_report(words):
    with SimulatedDevice():
        code = OM_study.main(words)
        print(torch.get_device_module("simulated").max_memory_allocated())
    return code


def test_a_study_works_on_the_device_that_auto_finds(tmp_path):
    image = make_subject(0, (12, 13, 11))["image"]
    write_volume(tmp_path / "bold.nii.gz", np.stack([image, np.roll(image, 1, 0)], -1), np.diag([2.0, 2.0, 2.0, 1.0]))
    words = ["motion", "--series", str(tmp_path / "bold.nii.gz"), "--reference", "0", "--out", str(tmp_path / "out")]
    said = printed(study_and_report, words, tmp_path)  # --device auto
    assert int(said.splitlines()[-1]) > 0, "bytes on the device"


def copy_to_a_checkpoint(folder):
    with SimulatedDevice() as seen:
        state = {"model": {"w": torch.arange(6.0, device="simulated").view(2, 3)}}
        state |= {key: 0 for key in checkpoint.REQUIRED if key != "model"}
        plain = checkpoint._savable(state, "a.pth", True)
        state["model"]["w"].zero_()
        waits = [note.what for note in seen.syncs]
    assert plain["model"]["w"].device.type == "cpu" and torch.equal(plain["model"]["w"].flatten(), torch.arange(6.0))
    assert waits == ["synchronize"], waits
    return 0


def test_a_checkpoint_waits_for_the_device_once(tmp_path):
    printed(copy_to_a_checkpoint, tmp_path, tmp_path)


def count_waits_of_refinements():
    """Prints for each similarity, with and without masks, the waits of refinements of 4 and of 12 steps."""
    found = []
    with SimulatedDevice() as seen:
        volume = torch.from_numpy(make_subject(0, (16, 18, 17))["image"])[None, None].to("simulated")
        mask = (volume > 0.1).float()
        for kind in ("correlation", "mapped", "mind"):
            for masks in ({"moving_mask": None, "fixed_mask": None}, {"moving_mask": mask, "fixed_mask": mask}):
                pair = {"moving": volume, "fixed": volume.flip(2), "structures": None, **masks}
                cfg = config(refine__levels=1, refine__weight=1.0) | {"registration.similarity": kind}
                waits = []
                for steps in (4, 12):
                    seen.syncs.clear()
                    refine(pair, None, steps, cfg)
                    waits.append(len(seen.syncs))
                found.append([kind, *waits])
        assert not seen.wrong_device
    print(json.dumps(found))
    return 0


def count_waits_of_comparisons():
    """Prints for each similarity of the affine part the waits of no and of three comparisons of two maps."""
    found = []
    with SimulatedDevice() as seen:
        image, same = make_subject(0, (16, 18, 17))["image"], np.eye(4)
        level = affine._levels(image, None, same, image, None, same, (same, same),
                               affine._basis(3, "affine"), 1.0, "simulated", "auto")[-1]
        maps = affine._in_voxels(torch.from_numpy(np.stack([same[:3], same[:3]])), level).to("simulated")
        for similarity in ("local", "mutual"):
            seen.syncs.clear()
            for _ in range(3):
                affine._alike_and_slope(maps, level, similarity)
            found.append([similarity, 0, len(seen.syncs)])
        assert not seen.wrong_device
    print(json.dumps(found))
    return 0


@pytest.mark.parametrize("count_waits", [count_waits_of_refinements, count_waits_of_comparisons])
def test_what_a_graph_records_of_a_pair_waits_for_nothing(tmp_path, count_waits):
    for kind, few, many in json.loads(printed(count_waits, None, tmp_path).splitlines()[-1]):
        assert few == many, kind
