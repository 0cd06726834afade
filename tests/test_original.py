"""The published method: its weights load, its network answers as it did, its recovery and copies can be made here."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import OM_augment
import OM_register
import OM_train_3modes as om
from Dataloader.nifti import read_field, read_label, read_volume, write_volume
from Diffusion.diffuser import DeformDDPM
from Diffusion.fields import jacobian_determinant
from Diffusion.networks import build_network
from Inference.augmentation import (
    augment,
    deform,
    draw_field,
    draw_start,
    draw_turn,
    measure,
    subject_number,
    turned,
)
from Inference.load_model import load_model
from Inference.registration import register
from Runtime.config import load_config
from Runtime.errors import InputError
from tests import launching
from tests.tiny import ROOT

ORIGINAL = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "original"
WEIGHTS = ORIGINAL / "000000_cmr_recresacnet.pth"
needs_weights = pytest.mark.skipif(not WEIGHTS.is_file(), reason="the public weights are not on this machine")
SLICE = (64, 64)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights as the published method saves them, bare and random; a slice and its label."""
    folder = tmp_path_factory.mktemp("original")
    net = build_network(load_config(ROOT / "Config/config_cmr.yaml"))
    weights = net.state_dict()
    weights["conv_out.weight"] = 1e-3 * noise(2, 10, 3, 3)
    torch.save(weights, folder / WEIGHTS.name)
    x = np.stack(np.meshgrid(*[np.linspace(-1, 1, n) for n in SLICE], indexing="ij"))
    ring = np.hypot(x[0] - 0.1, 0.8 * x[1] + 0.2)
    write_volume(folder / "slice.nii.gz", (900 * np.exp(-4 * (ring - 0.4) ** 2) + 80 * x[0]).astype(np.int16),
                 np.diag([1.4, 1.4, 8.0, 1.0]))
    write_volume(folder / "label.nii.gz", (1 * (ring < 0.55) + 1 * (ring < 0.3)).astype(np.uint8),
                 np.diag([1.4, 1.4, 8.0, 1.0]))
    return folder


def test_the_published_network_has_the_published_size(folder):
    net, cfg = load_model(folder / WEIGHTS.name)
    state = net.state_dict()
    assert len(state) == 193 and sum(tensor.numel() for tensor in state.values()) == 443_435
    assert (cfg["model.name"], cfg["model.dims"], cfg["data.img_size"]) == ("recresacnet", 2, [256, 256])


@needs_weights
def test_the_public_weights_answer_as_they_did():
    net, cfg = load_model(WEIGHTS)
    with np.load(ORIGINAL / "reference.npz") as reference:
        image, start = (torch.from_numpy(reference[name][:1]) for name in ("image", "start_field"))
        with torch.no_grad():
            for t in (0, 8, 79):
                field = net(image, torch.tensor([t])) / 256
                assert np.abs(field.numpy() - reference[f"field_t{t}"][:1]).max() < 1e-4, t
            ddpm = DeformDDPM(cfg)
            first = ddpm.recover_as_published(net, image, 256 * start, cfg, until=79) / 256
        assert np.abs(first.numpy() - reference["recovered_after_t79"]).max() < 1e-4


def test_weights_that_are_not_whole_are_one_sentence(folder, tmp_path):
    weights = torch.load(folder / WEIGHTS.name, weights_only=True)
    del weights["b_mid.1.ln.bias"]
    torch.save(weights, tmp_path / "cut.pth")
    with pytest.raises(InputError, match="cut.pth do not fit the network .b_mid.1.ln.bias is missing"):
        load_model(tmp_path / "cut.pth")


def test_it_recovers_and_does_not_register(folder, tmp_path, capsys):
    model, image = folder / WEIGHTS.name, folder / "slice.nii.gz"
    words = ["--fixed", image, "--moving", image, "--model", model, "--out", tmp_path / "pair"]
    assert OM_register.main([str(word) for word in words]) == 43
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and "only recovers deformed volumes and cannot register" in said
    assert "--model none" in said and "OM_augment.py" in said
    with pytest.raises(InputError, match="only recovers"):
        register(image, image, model=load_model(model))


@pytest.mark.slow
def test_copies_by_the_published_weights(folder, tmp_path, capsys):
    """Two copies, from starts of 48 and 50; the second is the one that the function gives."""
    model, small = folder / WEIGHTS.name, "data.img_size=64"
    words = ["--image", folder / "slice.nii.gz", "--label", folder / "label.nii.gz", "--model", model, "--draws", 2,
             "--set", small, "--out", tmp_path / "copies"]
    assert OM_augment.main([str(word) for word in words]) == 0, capsys.readouterr().err
    made = tmp_path / "copies"
    image, affine = read_volume(folder / "slice.nii.gz", 2)
    label = read_label(folder / "label.nii.gz", 2)[0]
    copy, moved, field = augment(image, label, affine, model=load_model(model, overrides=[small]), draw=1,
                                 subject="slice")
    assert np.allclose(read_field(made / "fieldsTr/slice_draw01.nii.gz", 2)[0], field, atol=1e-3)
    assert np.array_equal(read_label(made / "labelsTr/slice_draw01.nii.gz", 2)[0], moved)
    assert "times from 48 on, 2 more every other copy" in (made / "report.html").read_text()
    rows = [json.loads(line) for line in (made / "draws.jsonl").read_text().splitlines() if line]
    cfg = load_config(ROOT / "Config/config_cmr.yaml", [small])
    for row in rows:
        turn = draw_turn(SLICE, affine, (0, subject_number("slice"), row["draw"]), cfg)
        assert np.allclose(row["matrix"], affine @ turn @ np.linalg.inv(affine)) and not np.allclose(turn, np.eye(4))
        field = read_field(made / f"fieldsTr/{row['name']}.nii.gz", 2)[0]
        assert row["mean"] < 0.5 * measure(field, affine)["mean"], "the turn is no deformation"
    assert OM_augment.main([str(word) for word in words] + ["--stride", "2"]) == 43
    assert "copies.recover published uses every time step" in capsys.readouterr().err


def test_the_published_weights_can_be_given_away(folder, tmp_path):
    pytest.importorskip("safetensors", reason="pip install -r requirements-export.txt")
    import OM_export
    model = folder / WEIGHTS.name
    target, card = OM_export.export(model, tmp_path)
    net, cfg = load_model(target)
    same, same_cfg = load_model(model)
    places = set(OM_export.PLACES)
    assert all(cfg[key] == same_cfg[key] for key in cfg if key not in places)
    assert all(map(torch.equal, net.state_dict().values(), same.state_dict().values()))
    text = card.read_text()
    assert "Medical Image Analysis 110 (2026) 103987" in text and "license: apache-2.0\n" in text
    assert "omnimorph augment --image" in text and "omnimorph register" not in text


@pytest.mark.parametrize("words, code", [
    (["--max-steps-before-restart", "1"], 42), pytest.param(["--dry-run"], 0, marks=pytest.mark.slow)])
def test_a_training_begins_from_the_published_weights(folder, tmp_path, words, code):
    for number in range(4):
        image = read_volume(folder / "slice.nii.gz", 2)[0]
        write_volume(tmp_path / f"data/s_{number}.nii.gz", np.roll(image, number).astype(np.int16), np.eye(4))
    assert om.main(["--config", "config_cmr.yaml", "--init-from", str(folder / WEIGHTS.name), *words, "--set",
                    f"data.root={tmp_path / 'data'}", f"run.models={tmp_path}", f"run.logs={tmp_path}", "data.cache=",
                    "data.img_size=64", "run.device=cpu", "run.threads=1", "run.amp=off"]) == code
    assert bool(list(tmp_path.glob("cmr_recresacnet/tmp/*.pth"))) == (code == 42)


# ---------------------------------------------------------------------------------------------------------------------
# The settings of the published augmentation
# ---------------------------------------------------------------------------------------------------------------------

def test_the_start_rises_every_other_copy():
    cfg = load_config(ROOT / "Config/config_cmr.yaml")
    starts = [draw_start(None, (5, 1, draw), cfg) for draw in range(32)]
    assert starts[:6] == [48, 50, 50, 52, 52, 54] and starts[29:] == [78, 78, 79]
    assert draw_start("60", (0, 0, 9), cfg) == draw_start(60, (0, 0, 9), cfg) == 60
    assert draw_start("40-50", (3, 0, 9), cfg) == draw_start((40, 50), (3, 0, 9), cfg)
    for wrong in ("80+1", "0", "50-40", "4x", "48+", "-3"):
        with pytest.raises(InputError, match=f"start {wrong.replace('+', '.')}"):
            draw_start(wrong, (0, 0, 0), cfg)


@pytest.mark.parametrize("shape, affine", [((6, 6, 6), np.diag([2, 2, 2, 1.0])), ((6, 5, 6), np.diag([1, 1, 1, 1.0])),
                                           ((6, 6, 6), np.diag([1, 2, 1, 1.0])), ((7, 7), np.eye(4))])
def test_turns_keep_the_grid_and_move_voxels_exactly(shape, affine):
    cfg = {"copies.permute": True}
    volume = np.random.default_rng(0).integers(0, 1000, shape).astype(np.int16)
    seen = set()
    for draw in range(60):
        turn = draw_turn(shape, affine, (0, 7, draw), cfg)
        world = affine @ turn @ np.linalg.inv(affine)
        assert np.allclose(world[:3, :3] @ world[:3, :3].T, np.eye(3)), "a turn of the body, or its mirror image"
        grid = np.indices(shape).reshape(len(shape), -1)
        there = (turn[:len(shape), :len(shape)] @ grid + turn[:len(shape), 3:]).astype(int)
        assert np.array_equal(turned(volume, turn).ravel(), volume[tuple(there)])
        field = (there - grid).reshape(len(shape), *shape).astype(np.float32)
        assert np.array_equal(deform(volume, field), turned(volume, turn))
        seen.add(turn.tobytes())
    swaps = {(6, 6, 6): 6 if affine[1, 1] == affine[0, 0] else 2, (6, 5, 6): 2, (7, 7): 2}[shape]
    assert len(seen) == swaps * 2 ** len(shape) or (len(seen) > 20 and swaps == 6)


def test_a_turned_copy_is_the_turned_volume_deformed():
    cfg = load_config(ROOT / "Config/config_hippocampus.yaml", ["copies.permute=true"])
    image, key = np.random.default_rng(1).random((24, 30, 24)).astype(np.float32), (0, 3, 2)
    turn = draw_turn(image.shape, np.eye(4), key, cfg)
    assert not np.array_equal(turn, np.eye(4))
    field = draw_field(image, np.eye(4), cfg, key)
    plain = draw_field(image, np.eye(4), {**cfg, "copies.permute": False}, key)
    assert np.allclose(deform(image, field), deform(turned(image, turn), plain), atol=1e-4)
    mirrored = np.linalg.det(turn[:3, :3])
    determinant = jacobian_determinant(torch.from_numpy(field)[None])
    assert (determinant * mirrored > 0).double().mean() > 0.99


@needs_weights
@pytest.mark.slow
def test_the_benchmark_says_how_near_the_published_answers_are():
    done = launching.run([sys.executable, str(ROOT / "tests/bench/bench_original.py"), "--json"], timeout=900)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["parameters"] == 443_435 and result["field_error"] < 1e-4
    assert result["first_recovery_error"] < 1e-4
