"""Synthetic anatomies: the same bits for the same numbers, labels where the intensities are, contrasts that differ."""
import json
import re

import numpy as np
import pytest

import OM_train_3modes as om
from Dataloader import anatomies
from Dataloader.anatomies import MOST_LABELS, label_map, make_view, render
from Dataloader.datalist import read_datalist
from Dataloader.nifti import read_label, read_volume
from Diffusion.networks import build_network
from Inference.load_model import load_model
from Runtime.config import load_config
from Scripts import make_anatomies
from Supervisor.attempts import read_lines
from tests.tiny import ROOT

CONFIG = str(ROOT / "Config/config_universal.yaml")
SIZE = (24, 20, 22)
STILL = np.zeros((3, *SIZE))
# What makes a network and a step tiny; everything else is as Scripts/bash_train_universal.sh has it.
TINY = {"model.channels": "[8, 8, 16]", "model.attention_width": 16, "model.attention_depth": 1,
        "model.attention_heads": 2, "diffusion.grids": "[4, 8]", "contrastive.embedding": 8, "contrastive.queue": 8,
        "registration.scales": 2, "data.img_size": 16, "data.expect_samples": 6, "run.device": "cpu",
        "run.threads": 1, "run.amp": "off", "run.epochs": 1, "run.val_pairs": 2, "run.picture_every": 0}


def words(folder, **more):
    """--set words of a tiny training on the anatomies in a folder."""
    values = {**TINY, "data.root": folder / "anatomies", "data.cache": folder / "cache", "run.models": folder,
              "run.logs": folder / "Logs", **{key.replace("__", "."): value for key, value in more.items()}}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def make(folder, *more, count=4):
    asked = ["--out", folder, "--count", count, "--views", 3, "--size", 16, "--config", CONFIG, "--set",
             "diffusion.grids=[4, 8]", "--set", "data.img_size=16", *more]
    return make_anatomies.main([str(word) for word in asked])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anatomies")
    assert make(folder / "anatomies") == 0
    return folder


def test_an_anatomy_is_a_function_of_its_seed_and_number():
    found = {(seed, number): label_map(seed, number, SIZE) for seed in (0, 1) for number in (0, 1, 2)}
    for (seed, number), label in reversed(found.items()):
        np.testing.assert_array_equal(label, label_map(seed, number, SIZE))
    assert len({label.tobytes() for label in found.values()}) == len(found)
    view, again, other = (make_view(found[0, 1], STILL, 0, 1, number) for number in (3, 3, 2))
    assert all(np.array_equal(view[key], again[key]) for key in view)
    assert view["image"].tobytes() != other["image"].tobytes()


def test_these_anatomies_stay_what_they_are():
    """A seed in a paper or a model card means these volumes. Another processor may round a voxel the other way."""
    label = label_map(3, 7, SIZE)
    counts = np.bincount(label.ravel(), minlength=MOST_LABELS + 1)
    expected = [8203, 41, 468, 41, 340, 668, 665, 134, *[0] * 9]
    assert np.abs(counts - expected).max() <= 2 and counts.sum() == np.prod(SIZE)


def test_labels_regions_nests_and_space():
    maps = [label_map(0, number, SIZE) for number in range(16)]
    present = [set(np.unique(label).tolist()) for label in maps]
    assert all(max(labels) <= MOST_LABELS and len(labels - {0}) >= 4 for labels in present)
    with_space = [label for label in maps if (label == 0).any()]
    assert 4 <= len(with_space) <= 14, "some bodies in empty space, some volumes full of tissue"
    for label in with_space:
        assert label[0, 0, 0] == label[-1, -1, -1] == 0 and 0.1 < (label > 0).mean() < 0.6
    assert len({len(labels) for labels in present}) > 3


def test_structures_lie_within_each_other(monkeypatch):
    monkeypatch.setattr(anatomies, "NESTED", (3, 3))
    monkeypatch.setattr(anatomies, "NESTS", (1, 1))
    monkeypatch.setattr(anatomies, "REGIONS", (4, 4))
    monkeypatch.setattr(anatomies, "BODY", 0)
    for number in range(4):
        label = label_map(0, number, (32, 32, 32))
        around, within, core = (label == value for value in (5, 6, 7))
        assert around.sum() > within.sum() > core.sum() > 0
        for inner, outer in ((core, (6, 7)), (within, (5, 6, 7))):  # what a structure touches is its own shell
            grown = np.zeros_like(inner)
            for axis in range(3):
                for step in (-1, 1):
                    grown |= np.roll(inner, step, axis)
            assert np.isin(label[grown & ~inner], outer).mean() > 0.95


def test_intensities_are_those_of_the_labels():
    label = label_map(0, 2, SIZE)
    one, other = (render(label, 0, 2, contrast) for contrast in (0, 1))
    means = []
    for image in (one, other):
        of_label = {value: image[label == value] for value in np.unique(label)}
        assert all(values.std() < 2 * anatomies.TEXTURE for values in of_label.values())
        means.append([values.mean() for values in of_label.values()])
    assert np.ptp(means[0]) > 0.3 and np.abs(np.subtract(*means)).mean() > 0.15, "contrasts are drawn anew"
    np.testing.assert_array_equal(one, render(label, 0, 2, 0))


def test_two_views_of_a_contrast_have_one_order_of_intensities_and_others_do_not():
    """By the mean intensities of each label in the views themselves, after bias, gamma, blur and noise."""
    alike, apart = [], []
    for number in range(6):
        label = label_map(0, number, SIZE)
        views = [make_view(label, STILL, 0, number, view) for view in range(4)]
        values = [value for value in range(MOST_LABELS + 1)
                  if all((view["label"] == value).sum() >= 20 for view in views)]
        means = [[view["image"][view["label"] == value].mean() for value in values] for view in views]
        assert len(values) >= 3
        alike += [np.corrcoef(means[0], means[1])[0, 1], np.corrcoef(means[2], means[3])[0, 1]]
        apart += [np.corrcoef(means[0], means[2])[0, 1], np.corrcoef(means[1], means[3])[0, 1]]
    assert np.mean(alike) > 0.9 and min(alike) > 0.6 and np.mean(apart) < 0.5


def test_views_share_a_world_and_differ_in_fields_of_view_and_spacings():
    ramp = np.arange(SIZE[0], dtype=np.int16)[:, None, None] // 4 * np.ones(SIZE, np.int16)  # slabs along one axis
    shapes, spacings = set(), []
    for view in range(6):
        made = make_view(ramp, STILL, 0, 5, view)
        shapes.add(made["image"].shape)
        spacings.append(np.linalg.norm(made["affine"][:3, :3], axis=0))
        assert made["image"].shape == made["label"].shape and made["image"].dtype == np.int16
        # In mm, the slab under a voxel is the one that the anatomy has there, in every view.
        mm = made["affine"][0, 0] * np.arange(made["label"].shape[0]) + made["affine"][0, 3]
        middle = made["label"][:, made["label"].shape[1] // 2, made["label"].shape[2] // 2]
        scale, _, _, affine = anatomies.view_grid(np.random.default_rng(0), SIZE, 0, 5)
        places = mm / (affine[0, 0] / scale[0])  # in voxels of the anatomy
        within = (places > 0.6) & (places < SIZE[0] - 1.6) & (np.abs((places + 0.5) % 4 - 2) < 1.4)
        assert within.sum() > 2 and (middle[within] == np.round(places[within]) // 4).all()
    assert len(shapes) > 3 and np.ptp(spacings, axis=0).max() > 0
    ratios = [max(one) / min(one) for one in spacings]
    assert min(ratios) == pytest.approx(1) and max(ratios) > 1.9, "some are isotropic, some have thick slices"


def test_a_field_moves_image_and_label_alike():
    label = label_map(0, 3, SIZE)
    field = STILL.copy()
    field[0] = 2.0
    moved, shifted = make_view(label, field, 0, 3, 0), np.zeros_like(label)
    shifted[:-2] = label[2:]
    grid = make_view(shifted, STILL, 0, 3, 0)
    assert np.array_equal(moved["label"], grid["label"]) and (moved["affine"] == grid["affine"]).all()
    assert (moved["label"] != make_view(label, STILL, 0, 3, 0)["label"]).mean() > 0.05


@pytest.mark.parametrize("size", [(24, 20), (24, 20, 22)])
def test_both_dimensions(size):
    label = label_map(0, 0, size)
    made = make_view(label, np.zeros((len(size), *size)), 0, 0, 0)
    assert label.shape == size and made["image"].ndim == len(size) and np.linalg.det(made["affine"]) > 0


def test_the_data_set_names_anatomies_and_contrasts(data):
    items = read_datalist(data / "anatomies")
    assert len(items) == 12 and len({item["subject"] for item in items}) == 4
    assert [item["modality"] for item in items[:3]] == ["contrast 0", "contrast 0", "contrast 1"]
    for item in items:
        image, affine = read_volume(item["image"])
        label, label_affine = read_label(item["label"])
        assert image.shape == label.shape and (affine == label_affine).all() and len(np.unique(label)) >= 3
        assert image.min() >= 0 and 100 < image.max() < 2500


def files(folder):
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.rglob("*.nii.gz")}


def test_the_program_goes_on_and_refuses_another_beginning(data, tmp_path, capsys):
    folder = tmp_path / "a"
    assert make(folder, count=1) == 0
    kept = folder / "imagesTr/anatomy_00000_v0.nii.gz"
    (folder / "imagesTr/anatomy_00000_v1.nii.gz").unlink()
    (folder / "labelsTr/anatomy_00000_v1.nii.gz").write_bytes(b"half of it")
    before = kept.stat().st_mtime_ns
    assert make(folder, count=2) == 0, "more of them, and the missing one"
    assert kept.stat().st_mtime_ns == before and make(folder, "--workers", 2, count=2) == 0, "nothing is left to do"
    assert json.loads((folder / "dataset.json").read_text())["numTraining"] == 6
    assert len(files(folder)) == 12 and files(folder).items() <= files(data / "anatomies").items()
    capsys.readouterr()
    assert make(folder, "--seed", 1) == 43
    assert "made with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_files_in_any_number_of_processes(data, tmp_path):
    assert make(tmp_path / "a", "--workers", 2) == 0
    assert files(tmp_path / "a") == files(data / "anatomies")


@pytest.mark.parametrize("more, sentence", [
    (["--count", "0"], "error: --count 0: give at least 1."), (["--views", "1"], "error: --views 1: give at least 2."),
    (["--size", "7"], "error: --size 7: give at least 8."), (["--workers", "0"], "error: --workers 0:"),
    (["--size", "16", "17"], "error: --size 16 17: give one number, or 3 (model.dims)."),
    (["--set", "model.dim=2"], "unknown key model.dim")])
def test_what_cannot_be_made_is_one_sentence(more, sentence, tmp_path, capsys):
    assert make(tmp_path / "none", *more) == 43
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (tmp_path / "none").exists()


def test_both_stages_of_the_training_take_the_list(data, tmp_path, capsys):
    """Two steps on pairs of one contrast, and then two on pairs of any, from those weights."""
    places = {"data__cache": "", "data__in_memory": True, "run__logs": tmp_path / "Logs"}
    first = words(data, run__models=tmp_path, **places)
    assert om.main(["--config", CONFIG, *first, "--max-steps-before-restart", "2"]) == 42
    log = [line for line in read_lines(tmp_path / "universal_om_net/rank0.jsonl") if line["event"] == "step"]
    assert len(log) == 2 and all(line["open"] and line["nonfinite"] == 0 for line in log)
    assert "pairs may mix them" not in capsys.readouterr().out
    for line in log:
        assert line["terms"]["labelled"] == 1 and 0 < line["terms"]["dice"] < 1
        terms = [line["terms"][name] for name in ("dice", "imgsim", "ddf")]
        assert line["terms"]["regist"] == pytest.approx(0.03 * sum(terms))
    newest = max((tmp_path / "universal_om_net/tmp").glob("*.pth"))
    second = words(data, run__models=tmp_path / "second", data__pair_modalities="any", **places)
    assert om.main(["--config", CONFIG, *second, "--init-from", str(newest), "--max-steps-before-restart", "2"]) == 42
    cfg = load_model(tmp_path / "second/universal_om_net")[1]
    assert cfg["data.pair_modalities"] == "any" and cfg["refine.grid"] == "own"
    assert re.search(r"the volumes have \d+ modalities \(contrast .*\), and pairs may mix them: set data.pair_mod",
                     capsys.readouterr().out)


def test_the_network_is_as_small_as_a_repository_can_bear():
    """2 to 8 million parameters, and in float32 at most 20 MB."""
    net = build_network(load_config(CONFIG))
    assert 2e6 <= sum(parameter.numel() for parameter in net.parameters()) <= 8e6
    assert sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values()) < 19.5e6
