"""What differs on an accelerator; skipped where there is none."""
import json

import numpy as np
import pytest
import torch

import OM_study
import OM_train_3modes as om
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Diffusion import device_ops, graphs
from Diffusion.fields import integrate_velocity, warp
from Inference.registration import register
from Runtime import checkpoint
from Runtime.memory import WINDOW, find_leak, measure
from tests import launching
from tests.plain_step import mslncc
from tests.tiny import ROOT, arguments, launcher_environment, log_lines, make_data

device = torch.accelerator.current_accelerator(check_available=True)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device is None, reason="this machine has no accelerator")]


def test_a_pair_is_registered_as_well_as_on_the_cpu():
    """Not to the same field: rounding by 1e-6 moves the affine part, which stops early, by 0.1 voxels on a CPU too."""
    size = (40, 48, 44)
    fixed, moving = ((make_subject(seed, size)["image"], np.eye(4)) for seed in (1, 2))
    here, there, again = (register(fixed, moving, device=where) for where in ("cpu", device.type, device.type))
    assert np.array_equal(there.field, again.field)
    assert np.linalg.norm(here.field - there.field, axis=0).mean() < 0.3  # voxels
    assert there.similarity == pytest.approx(here.similarity, abs=0.01)


def test_a_study_works_on_the_device_that_auto_finds(tmp_path):
    image = make_subject(0, (20, 22, 18))["image"]
    write_volume(tmp_path / "bold.nii.gz", np.stack([image, np.roll(image, 1, 0)], -1), np.eye(4))
    torch.accelerator.reset_peak_memory_stats()
    assert OM_study.main(["motion", "--series", str(tmp_path / "bold.nii.gz"), "--deform", "--out",
                          str(tmp_path / "out")]) == 0  # --device auto
    assert torch.accelerator.max_memory_allocated() > 0


def test_fields_and_losses_agree_with_the_cpu():
    om.prepare_device(torch.device(device.type, 0), 0)
    torch.manual_seed(0)
    image, field = torch.rand(1, 2, 20, 24, 28), torch.randn(1, 3, 20, 24, 28)
    assert torch.allclose(warp(image.to(device), field.to(device)).cpu(), warp(image, field), atol=1e-4)
    small = 0.05 * field
    assert torch.allclose(integrate_velocity(small.to(device), [13]).cpu(), integrate_velocity(small, [13]), atol=1e-3)
    other = image + 0.1 * torch.rand_like(image)
    assert mslncc(image.to(device), other.to(device), scales=2).item() == pytest.approx(
        mslncc(image, other, scales=2).item(), abs=1e-4)


def test_a_checkpoint_written_on_the_accelerator_continues_on_the_cpu(tmp_path):
    make_data(tmp_path)
    assert om.main(arguments(tmp_path, run__epochs=1, run__device=device.type)) == 0
    assert om.main(arguments(tmp_path, run__epochs=2, run__device="cpu")) == 0
    run = tmp_path / "Models/demo_om_net"
    state = checkpoint.load(run / checkpoint.newest(run))
    assert state["step"] == 12 and all(tensor.device.type == "cpu" for tensor in state["model"].values())


def test_a_step_takes_the_memory_that_the_dry_run_counted(tmp_path, capsys, monkeypatch):
    """On volumes large enough that the workspaces of the device's libraries do not count, and the plain way: recording
    graphs holds two steps' memory for a moment, and Triton's kernels keep less than the operations that are counted.
    """
    make_data(tmp_path, size=64)
    words = {"data__img_size": 64, "model__channels": "[16, 32, 64]", "run__amp": "bf16", "run__epochs": 1,
             "run__graphs": "off"}
    assert om.main(arguments(tmp_path, "--dry-run", **words)) == 0
    counted = json.loads(capsys.readouterr().out.splitlines()[-1])["step_memory_bytes"][device.type]
    peaks = {}
    for kernels in (False, True):
        monkeypatch.setitem(device_ops.SETTINGS, "kernels", kernels)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        assert om.main(arguments(tmp_path, "--fresh", run__device=device.type, **words)) == 0
        peaks[kernels] = log_lines(tmp_path, "memory")[-1]["peak_bytes"]
    assert peaks[False] == pytest.approx(counted, rel=0.15), peaks
    assert 0.6 * counted < peaks[True] <= peaks[False], peaks


def test_two_ranks_on_one_device_are_refused_in_one_sentence(tmp_path):
    make_data(tmp_path)
    ranks = torch.accelerator.device_count() + 1
    command = ["bash", str(ROOT / "bash_train_multi_nodes.sh"), *arguments(tmp_path, run__device="auto")]
    ended = launching.run(command, env=launcher_environment(ranks), timeout=300)
    assert ended.returncode == 43 and "Traceback" not in ended.stdout, ended.stdout
    assert f" share {device.type}:0 " in ended.stdout and "start" in ended.stdout


def test_tensors_kept_on_the_accelerator_are_found_as_a_leak_of_the_graph():
    kept, samples, size = [], [], 64 * 2 ** 20
    for _ in range(WINDOW):
        kept.append(torch.zeros(size, dtype=torch.uint8, device=device))
        samples.append(measure(torch.device(device.type, 0)))
    leak = find_leak(samples, range(WINDOW))
    assert leak["who"] == "graph" and leak["bytes_per_step"] == pytest.approx(size, rel=0.05)
    assert leak["steps_left"] == pytest.approx(samples[-1]["device_free"] / size, rel=0.1)
    assert samples[-1]["device_reserved"] >= WINDOW * size


@pytest.mark.skipif(device is None or device.type != "cuda", reason="graphs are those of CUDA")
def test_a_training_by_graphs_has_the_losses_of_the_plain_one(tmp_path, capfd):
    found = {}
    for way in ("off", "auto"):
        make_data(tmp_path / way)
        words = {"run__epochs": 1, "run__device": device.type, "run__graphs": way, "optim__average": 0.9}
        assert om.main(arguments(tmp_path / way, **words)) == 0
        found[way] = [line["terms"] for line in log_lines(tmp_path / way, "step")]
    assert len(found["auto"]) == 6
    assert "graphs:" not in capfd.readouterr().err
    for plain, by_graphs in zip(*found.values()):
        assert by_graphs == pytest.approx(plain, rel=1e-2, abs=1e-3)


@pytest.mark.skipif(device is None or device.type != "cuda", reason="graphs are those of CUDA")
def test_a_refinement_by_graphs_finds_the_field_of_the_plain_one(capfd, monkeypatch):
    monkeypatch.setattr(graphs, "IN_NO_PAIR", set())
    made = []
    monkeypatch.setattr(graphs, "Recorded", lambda *given, real=graphs.Recorded: made.append(real(*given)) or made[-1])
    fixed, moving = ((make_subject(seed, (40, 48, 44))["image"], np.eye(4)) for seed in (1, 2))
    plain, by_graphs = (register(fixed, moving, device=device.type, config={"run.graphs": way}).field
                        for way in ("off", "auto"))
    assert made and "graphs:" not in capfd.readouterr().err
    np.testing.assert_allclose(by_graphs, plain, rtol=0, atol=1e-3)  # voxels
