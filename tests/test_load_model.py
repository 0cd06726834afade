"""Loading a trained network: which file, which weights, and one sentence for what cannot be used."""
import zipfile

import pytest
import torch

from Diffusion.networks import build_network
from Inference.load_model import find_checkpoint, load_model
from Runtime import checkpoint
from Runtime.errors import InputError
from tests.tiny import config

PROGRESS = {"epoch": 1, "step_in_epoch": 0, "step": 6, "samples": 0, "pairs": 0}


def state(cfg, **more):
    return {"format": 1, "model": build_network(cfg).state_dict(), "optimizer": {}, "config": cfg, **PROGRESS, **more}


@pytest.fixture
def run(tmp_path):
    """A run folder with two epochs, of which the first is the best."""
    cfg = config()
    for epoch, score in ((1, 0.8), (2, 0.7)):
        content = state({**cfg, "run.seed": epoch}, epoch=epoch, step=6 * epoch)
        content["model"] = build_network({**cfg, "run.seed": epoch}).state_dict()
        checkpoint.save(tmp_path / "run", checkpoint.epoch_name(epoch, "d", "om_net"), content, {"val_dice": score},
                        ("val_dice", score, "here"))
    return tmp_path / "run"


def test_a_folder_gives_its_best_checkpoint_and_a_file_itself(run):
    best, newest = (run / checkpoint.epoch_name(epoch, "d", "om_net") for epoch in (1, 2))
    assert find_checkpoint(run) == best and find_checkpoint(newest) == newest
    assert load_model(run)[1]["run.seed"] == 1 and load_model(newest)[1]["run.seed"] == 2
    best.unlink()
    assert find_checkpoint(run) == newest


def flip_a_bit(path):
    """In the middle of the weights, where torch.load sees nothing."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    torch.load(path, weights_only=True)


def test_a_flipped_bit_in_the_best_checkpoint_is_said_and_the_newest_taken(run, capsys):
    best, newest = (run / checkpoint.epoch_name(epoch, "d", "om_net") for epoch in (1, 2))
    flip_a_bit(best)
    assert find_checkpoint(run) == newest
    said = capsys.readouterr().err
    assert said == (f"warning: {best}, the best checkpoint of its run, cannot be used (SHA-256 differs); "
                    f"using {newest.name}, the newest intact one\n")
    assert load_model(run)[1]["run.seed"] == 2
    with pytest.raises(InputError, match=f"{best} is damaged .SHA-256 differs.: restore the file"):
        load_model(best)
    flip_a_bit(newest)
    with pytest.raises(InputError, match="no checkpoint in .* can be used"):
        load_model(run)


def test_checkpoints_of_a_folder_are_skipped_until_one_is_whole(run, capsys):
    cfg, names = config(), [checkpoint.step_name(2, step, "d", "om_net") for step in (1, 2)]
    for step, name in enumerate(names, 1):
        checkpoint.save(run, name, state(cfg, epoch=2, step_in_epoch=step, step=12 + step))
    flip_a_bit(run / names[1])
    (run / checkpoint.epoch_name(1, "d", "om_net")).unlink()
    assert find_checkpoint(run) == run / names[0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "checkpoint of its run, cannot be used (missing)" in said[0] and names[1] in said[1]
    with pytest.raises(InputError, match=f"{names[1]} is damaged"):
        find_checkpoint(run / names[1])
    alone = run.parent / "copied.pth"
    alone.write_bytes((run / names[0]).read_bytes())
    assert find_checkpoint(alone) == alone, "no manifest knows it"
    flip_a_bit(alone)
    with pytest.raises(InputError, match="copied.pth is damaged .CRC of .* differs.: restore the file"):
        load_model(alone)


def test_the_network_is_ready_to_use_and_keys_that_came_later_get_defaults(tmp_path):
    old = {key: value for key, value in config().items() if not key.startswith("refine.")}
    torch.save({**state(config()), "config": {**old, "gone.key": 1}}, tmp_path / "old.pth")
    net, cfg = load_model(tmp_path / "old.pth", overrides=["refine.window=7"])
    assert not net.training and cfg["refine.window"] == 7 and cfg["refine.stride"] == 0 and "gone.key" not in cfg
    assert cfg["model.channels"] == old["model.channels"]
    field = net(torch.rand(1, 1, 16, 16, 16), torch.tensor([cfg["diffusion.timesteps"]]))
    assert field.shape == (1, 3, 16, 16, 16)
    velocity = {"refine.lr": 0.1, "refine.weight": 2.0, "refine.smooth": 1.0, "refine.levels": 2}
    torch.save({**state(config()), "config": {**old, **velocity}}, tmp_path / "velocity.pth")
    _, cfg = load_model(tmp_path / "velocity.pth", overrides="refine.window=7")
    assert cfg["refine.window"] == 7
    assert (cfg["refine.weight"], cfg["refine.smooth"], cfg["refine.levels"]) == ("auto", 1.5, 2)


def test_what_cannot_be_used_is_named(tmp_path):
    cfg = config()
    good = state(cfg)
    (tmp_path / "empty").mkdir()
    torch.save(good, tmp_path / "good.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "good.pth").read_bytes()[:5000])
    torch.save(good, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "old.pth").write_bytes((tmp_path / "old.pth").read_bytes()[:5000])
    (tmp_path / "tiny.yaml").write_text("base: config_om.yaml\nmodel:\n  channels: [4, 8]\n")
    (tmp_path / "gone.pth").write_bytes(bytes(5000))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pth")
    torch.save({**good, "config": None}, tmp_path / "bare.pth")
    torch.save({**good, "config": {**cfg, "model.channels": [8, 16, 16]}}, tmp_path / "other.pth")
    name, weight = next(iter(good["model"].items()))
    for kind, odd in (("nan", weight / 0), ("complex", weight + 0j), ("whole", weight.int()),
                      ("sparse", weight.to_sparse())):
        torch.save({**good, "model": {**good["model"], name: odd}}, tmp_path / f"{kind}.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as whole, zipfile.ZipFile(
            tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for member in whole.namelist():
            bomb.writestr(member, whole.read(member) + bytes(10 ** 6))
    with pytest.raises(InputError, match="model: give a checkpoint .*, not None."):
        load_model(None)
    for name, words in (("none.pth", "no such model"), ("empty", "no checkpoint in this folder"),
                        ("cut.pth", "restore the file"), ("old.pth", "restore the file"),
                        ("tiny.yaml", "a checkpoint .*, a run's folder"), ("gone.pth", "if it was .*, restore it"),
                        ("foreign.pth", "not an OmniMorph checkpoint"),
                        *((f"{kind}.pth", "is not all finite real") for kind in ("nan", "complex", "whole", "sparse")),
                        ("bomb.pth", "its archive is compressed"), ("bare.pth", "has no config"),
                        ("other.pth", "do not fit the network")):
        with pytest.raises(InputError, match=words) as error:
            load_model(tmp_path / name)
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
