"""The plan of a training: a config that the training program takes, for the volumes at hand and within memory."""
import argparse
import json

import nibabel
import numpy as np
import pytest
import torch

import OM_study
from Dataloader.datalist import list_volumes, read_datalist
from Dataloader.nifti import write_volume
from Dataloader.sampler import steps_left
from Dataloader.synthetic import make_subject, write_dataset
from Runtime.config import load_config
from Runtime.errors import InputError
from Runtime.global_batch import split_step
from Study import plan
from Study.common import volumes_of
from Study.plan import OPENED, grid, look, write_config


def run(*words):
    return OM_study.main(["plan", *map(str, words), "--device", "cpu"])


def args_of(data):
    return argparse.Namespace(data=str(data), subject_pattern="", purpose="augment", channels=1)


def test_the_grid_covers_the_extent_and_chooses_the_network():
    size, row = grid(np.array([38.0, 54.0, 40.0]), 1.0)
    assert size.tolist() == [40, 56, 40] and row[1] == "config_hippocampus.yaml"
    size, row = grid(np.array([160.0, 190.0, 150.0]), 2.0)
    assert size.tolist() == [80, 96, 80] and row[1] == "config_medium.yaml"
    assert grid(np.array([160.0, 190.0, 150.0]), 1.0)[1][1] == "config_om.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["list.csv", "nnunet", "together"])
def test_several_channels_are_planned_together(tmp_path, layout, capsys):
    """As a list names them, as nnU-Net does beside one label for each case, and in one file."""
    lines, size = ["image,image_2"], (24, 24, 24) if layout == "together" else (24, 24)
    for name in ("a", "b", "c", "d"):
        image = make_subject(ord(name), size, dims=len(size))["image"]
        if layout == "together":
            nibabel.save(nibabel.Nifti1Image(np.stack([image, 1 - image], -1), np.eye(4)), tmp_path / f"{name}.nii")
        for number in () if layout == "together" else range(2):
            write_volume(tmp_path / f"nnunet/imagesTr/{name}_000{number}.nii.gz", image, np.eye(4))
        lines.append(f"nnunet/imagesTr/{name}_0000.nii.gz,nnunet/imagesTr/{name}_0001.nii.gz")
        write_volume(tmp_path / f"nnunet/labelsTr/{name}.nii.gz", np.ones(size, np.uint8), np.eye(4))
    data = tmp_path / layout if layout != "together" else tmp_path / "[abcd].nii"
    (tmp_path / "list.csv").write_text("\n".join(lines))
    assert run("--data", data, "--for", "augment", "--out", tmp_path / "plan") == 0
    cfg = load_config(tmp_path / "plan/config.yaml")
    assert cfg["data.channels"] == 2 and len(read_datalist(cfg["data.root"], len(size), channels=2)) == 4
    assert f"--data {data} --set data.channels=2 --out" in capsys.readouterr().out
    assert "Each volume has 2 channels." in (tmp_path / "plan/plan.html").read_text()
    if layout != "together":
        assert [item["image"].name for item in volumes_of([str(data)])] == [f"{name}_0000.nii.gz" for name in "abcd"]
        assert "only the first channel of each volume is used, such as a_0000.nii.gz" in capsys.readouterr().err


@pytest.mark.slow
def test_a_config_that_the_training_takes(tmp_path, capsys):
    write_dataset(tmp_path / "data", range(5), 24)
    write_volume(tmp_path / "data/imagesTr/flat.nii.gz", np.ones((24, 24, 24), np.float32), np.eye(4))
    write_volume(tmp_path / "data/labelsTr/flat.nii.gz", np.zeros((24, 24, 24), np.uint8), np.eye(4))
    (tmp_path / "data/dataset.json").unlink()
    assert run("--data", tmp_path / "data", "--out", tmp_path / "plan") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    cfg = load_config(tmp_path / "plan/config.yaml")
    assert cfg["data.img_size"] == found["img_size"] and cfg["loss.contrastive"] == 0 and cfg["data.val_fraction"]
    steps_per_epoch = found["steps"] / found["epochs"]
    assert cfg["run.epochs"] == found["epochs"] and 5000 <= found["steps"] < 5000 + steps_per_epoch
    assert found["left_out"] == 1 and "flat is left out" in printed.err
    assert found["memory_gib"] > 0 and found["hours"] > 0 and "omnimorph register" in printed.out
    steps = [f"omnimorph {name} --config {tmp_path / 'plan/config.yaml'}" for name in ("prepare", "train")]
    assert "\n  ".join(steps) in printed.out and "; then ".join(steps) in (tmp_path / "plan/plan.html").read_text()
    page = (tmp_path / "plan/plan.html").read_text()
    assert "by a trial on noise" in page and "flat" in page
    assert "<td>size, mm</td><td class=num>" in page


def test_the_config_for_a_pattern_finds_its_volumes(tmp_path):
    for number in range(2):
        write_volume(tmp_path / f"data/s_{number}.nii.gz", make_subject(number, (16, 16), dims=2)["image"], np.eye(4))
    write_config(tmp_path, args_of(tmp_path / "data/s_*.nii.gz"), "config_hippocampus.yaml", [16, 16], 1.0, 2)
    cfg = load_config(tmp_path / "config.yaml")
    assert [item["id"] for item in list_volumes(cfg["data.root"])] == ["s_0", "s_1"] and cfg["data.name"]


def test_a_config_that_was_edited_is_not_replaced(tmp_path, capsys):
    write_config(tmp_path, args_of(tmp_path / "data"), "config_hippocampus.yaml", [16, 16], 1.0, 2)
    words, path = ("--data", tmp_path / "none", "--out", tmp_path), tmp_path / "config.yaml"
    assert run(*words) == 43 and "config.yaml" not in capsys.readouterr().err  # as it was written
    for edited in (path.read_text().replace("epochs: 1", "epochs: 2"), path.read_text() + "optim: {lr: 0.5}\n", "mine"):
        path.write_text(edited)
        assert run(*words) == 43 and f"{path}: it is not of an earlier run, or not as this" in capsys.readouterr().err
        assert path.read_text() == edited


def test_a_trial_step_that_runs_out_of_memory_is_one_sentence(tmp_path, monkeypatch):
    cost = {"step_memory_bytes": {"cpu": 2 ** 30}, "free_bytes": 2 ** 34, "fits": False, "step_seconds": None}
    monkeypatch.setattr(plan, "dry_run", lambda *_: cost)
    seen = [{"voxel_mm": [1.0] * 3, "size_mm": [60.0] * 3, "box_mm": [50.0] * 3}]
    with pytest.raises(InputError, match="data: a training step does not fit into the memory of cpu even at"):
        plan.choose(seen, args_of(tmp_path / "data"), torch.device("cpu"), tmp_path)


@pytest.mark.parametrize("base", ["config_om.yaml", "config_hippocampus.yaml"])
@pytest.mark.parametrize("volumes", [3, 40, 20_000])
def test_an_epoch_is_long_enough_for_the_validation_after_it(base, volumes, tmp_path):
    """40 volumes made epochs of 18 steps, of which a fast GPU takes seven a second."""
    write_config(tmp_path, args_of(tmp_path), base, [128, 128, 128], 1.0, volumes)
    cfg, plain = load_config(tmp_path / "config.yaml"), load_config(base)
    steps = steps_left(cfg, round(0.9 * volumes), None, split_step(cfg, 1))
    assert steps >= 300 and cfg["data.repeats"] % plain["data.repeats"] == 0
    assert steps < 500 or cfg["data.repeats"] == plain["data.repeats"], "no longer than that"


def test_label_maps_alone_are_refused_in_one_sentence(tmp_path, capsys):
    """More of them than are opened: headers do not show what they are."""
    for number in range(OPENED + 1):
        write_volume(tmp_path / f"data/s_{number}.nii.gz", make_subject(number, (12, 13, 11))["label"], np.eye(4))
    assert run("--data", tmp_path / "data", "--out", tmp_path / "plan") == 43
    line, = capsys.readouterr().err.splitlines()
    assert "none of the volumes that were opened can be used" in line and "looks like a segmentation" in line


def test_a_short_time_series_among_volumes_is_left_out(tmp_path):
    image = make_subject(0, (16, 16, 16))["image"]
    for name in ("a", "b", "c"):
        write_volume(tmp_path / f"{name}.nii.gz", image, np.eye(4))
    nibabel.save(nibabel.Nifti1Image(np.stack([image] * 3, -1), np.eye(4)), tmp_path / "a2.nii.gz")
    seen, bad = look(tmp_path, list_volumes(tmp_path))
    assert [row["id"] for row in seen] == ["a", "b", "c"] and all(row["channels"] == 1 for row in seen)
    assert bad == [("a2", "it has 3 channels, and most volumes have 1.")]


def test_what_cannot_be_planned_is_refused(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert run("--data", tmp_path / "data", "--out", tmp_path / "plan") == 43
    assert "found no .nii, .nii.gz or other volume" in capsys.readouterr().err
    write_volume(tmp_path / "data/a.nii.gz", make_subject(0, (16, 16, 16))["image"], np.eye(4))
    write_volume(tmp_path / "data/b.nii.gz", make_subject(0, (16, 16), dims=2)["image"], np.eye(4))
    assert run("--data", tmp_path / "data", "--out", tmp_path / "plan") == 43
    assert "2D and 3D volumes are mixed" in capsys.readouterr().err
    (tmp_path / "list.csv").write_text("image,image_2\ndata/a.nii.gz,\ndata/c.nii.gz,data/a.nii.gz\n")
    write_volume(tmp_path / "data/c.nii.gz", make_subject(1, (16, 16, 16))["image"], np.eye(4))
    assert run("--data", tmp_path / "list.csv", "--out", tmp_path / "plan") == 43
    assert "list.csv: a has 1 channel and c has 2; give all volumes the same ones." in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()
