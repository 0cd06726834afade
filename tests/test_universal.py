"""--model universal: missing, present, on volumes of other sizes; and the script that makes it."""
import importlib
import json
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import OM_register
import OM_train_3modes as om
from Dataloader.nifti import read_field, write_volume
from Dataloader.synthetic import make_subject, write_dataset
from Diffusion.fields import warp
from Diffusion.metrics import average, dice
from Diffusion.networks import build_network
from Inference import load_model as loading
from Inference.load_model import find_checkpoint, load_model, load_state
from Inference.registration import register
from Runtime import checkpoint
from Runtime.config import load_config
from Runtime.errors import InputError
from Runtime.files import sha256
from Runtime.weights_file import read_weights
from tests import launching
from tests.test_anatomies import CONFIG, TINY
from tests.test_weights_file import write
from tests.tiny import ROOT

SCRIPT = ROOT / "Scripts/bash_train_universal.sh"


def write_exported(path):
    """A tiny network of the universal config as an exported file, written by hand; its field is not zero."""
    cfg = load_config(CONFIG, [f"{key}={value}" for key, value in TINY.items()])
    net = build_network(cfg)
    for head in (net.fine, net.coarse.conv):
        torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    weights, header, content = net.state_dict(), {}, b""
    for name, tensor in weights.items():
        raw = tensor.contiguous().numpy().tobytes()
        dtype = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(content),
                                                                                      len(content) + len(raw)]}
        content += raw
    header["__metadata__"] = {"config": json.dumps(cfg), "weights_sha256": checkpoint.weights_sha256(weights)}
    return write(path, header, content)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The place of the universal network, with a tiny one in it."""
    monkeypatch.setattr(loading, "UNIVERSAL", tmp_path / "universal.safetensors")
    return write_exported(loading.UNIVERSAL)


@pytest.fixture
def volumes(tmp_path):
    """Two volumes of different sizes and spacings, neither that of the network."""
    for seed, (name, shape, spacing) in enumerate((("F", (22, 26, 20), 0.5), ("M", (26, 24, 22), 0.55))):
        image = np.rint(1000 * make_subject(seed, shape)["image"]).astype(np.int16)
        write_volume(tmp_path / f"{name}.nii.gz", image, np.diag([spacing, spacing, spacing, 1]))
    return tmp_path


def asked(folder, *more, model=("--model", "universal")):
    return OM_register.main([str(word) for word in (
        "--fixed", folder / "F.nii.gz", "--moving", folder / "M.nii.gz", *model, "--device", "cpu", "--no-picture",
        "--set", "run.amp=off", "--out", folder / "out", *more)])


def test_while_it_is_missing_one_sentence_says_how_to_make_it(volumes, monkeypatch, capsys):
    monkeypatch.setattr(loading, "UNIVERSAL", volumes / "not there.safetensors")
    assert asked(volumes) == 43
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "bash Scripts/bash_train_universal.sh" in said[0] and "not there.safetensors" in said[0]
    assert SCRIPT.is_file() and not (volumes / "out").exists()
    with pytest.raises(InputError, match="its weights are missing"):
        find_checkpoint("universal")


def test_the_file_that_comes_along_is_whole_small_and_has_the_settings_of_its_config():
    file, config = ROOT / "Inference/universal.safetensors", load_config(CONFIG)
    assert file.stat().st_size <= 20e6 and sha256(file) in file.with_suffix(".md").read_text()
    net, cfg = load_model("universal")
    assert all(torch.isfinite(weight).all() for weight in net.state_dict().values())
    keys = [key for key in config if key.startswith(("model.", "refine.", "registration."))]
    config["registration.similarity"] = "correlation"  # which auto is in a training
    assert {key: cfg[key] for key in keys} == {key: config[key] for key in keys} and cfg["data.name"] == "universal"


@pytest.mark.parametrize("inverted, gain", [(False, 0.1), (True, 0.05)])
def test_the_file_that_comes_along_brings_subjects_together_that_it_has_never_seen(inverted, gain):
    fixed, moving = (make_subject(number, (32, 36, 30)) for number in (11, 12))
    image = 1 - moving["image"] if inverted else moving["image"]
    found = register((fixed["image"], np.eye(4)), (image, np.eye(4)), "universal", False, False, start="header")
    labels = [torch.from_numpy(volume["label"].astype(np.float32)) for volume in (fixed, moving)]
    moved = warp(labels[1][None, None], torch.from_numpy(found.field)[None], mode="nearest")[0, 0]
    before, after = (average(dice(label, labels[0], range(1, 7))) for label in (labels[1], moved))
    assert after > before + gain and found.folding_percent < 0.05


def test_its_licence_is_in_the_file_and_in_its_card():
    """G18: the weights and their card each name the licence."""
    licence = read_weights(loading.UNIVERSAL)[1]["license"]
    assert licence == "Apache-2.0" and f'license: "{licence}"' in loading.UNIVERSAL.with_suffix(".md").read_text()
    setup = (ROOT / "setup.py").read_text()
    assert '"Inference/*.md"' in setup and '"Inference/*.safetensors"' in setup


def test_its_place_is_in_the_package_and_not_ignored():
    assert loading.UNIVERSAL == ROOT / "Inference/universal.safetensors"
    ignored = subprocess.run(["git", "check-ignore", "-q", str(loading.UNIVERSAL)], cwd=ROOT)
    assert ignored.returncode in (1, 128), "1: not ignored; 128: no checkout"


@pytest.mark.parametrize("keys", [TINY, {"data.img_size": 16, "diffusion.grids": [4, 8, 16]}], ids=["tiny", "ours"])
def test_a_training_begins_with_its_weights(tmp_path, keys, request):
    """With those of the file in the repository, too, which is older than some keys of the config."""
    given = request.getfixturevalue("shipped") if keys is TINY else loading.UNIVERSAL
    write_dataset(tmp_path / "data", range(8), (16, 18, 16))
    keys = {**keys, "data.root": tmp_path / "data", "data.cache": "", "data.in_memory": True, "data.train_ids": "0-5",
            "data.val_ids": "6-7", "run.models": tmp_path, "run.logs": tmp_path / "Logs", "optim.lr": 1e-12}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert om.main(["--config", "config_tune.yaml", *words, "--init-from", "universal",
                    "--max-steps-before-restart", "1"]) == 42
    begun, given = checkpoint.load(next(tmp_path.glob("data_om_net/tmp/*.pth"))), load_state(given)
    assert begun["step"] == 1 and begun["model"].keys() == given["model"].keys()
    assert all(torch.allclose(begun["model"][name], tensor, atol=1e-9) for name, tensor in given["model"].items())


def test_it_registers_and_refines_volumes_of_other_sizes(volumes, shipped):
    assert asked(volumes, "--affine", "none", "--refine", "10") == 0
    field, _ = read_field(volumes / "out/field.nii.gz")
    assert field.shape == (3, 22, 26, 20) and np.abs(field).max() > 0.3
    settings = json.loads((volumes / "out/results.json").read_text())["settings"]
    assert settings["config"]["refine.grid"] == "own" and settings["config"]["data.img_size"] == [16] * 3
    named = register(volumes / "F.nii.gz", volumes / "M.nii.gz", load_model(shipped, overrides=["run.amp=off"]),
                     affine=False, refine=10)
    np.testing.assert_allclose(named.field, field, atol=2e-3)


def test_it_is_an_option_and_not_the_default(volumes, shipped):
    for model, name in (((), None), (("--model", "universal"), "universal")):
        assert asked(volumes, "--affine", "rigid", "--refine", "1", model=model) == 0
        settings = json.loads((volumes / "out/results.json").read_text())["settings"]
        assert (settings["weights"] is None) == (name is None), "without the option no network is loaded"
        assert (settings["affine"], settings["refine"]) == ("rigid", 1)
        assert name in (None, settings["config"]["data.name"])


def test_a_folder_of_that_name_is_named_by_its_path(shipped, tmp_path, monkeypatch):
    (tmp_path / "here/universal").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_checkpoint("universal") == shipped
    with pytest.raises(InputError, match="no checkpoint in this folder"):
        find_checkpoint("./universal")


def test_no_package_is_needed_to_read_it(shipped, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # an import of it fails
    assert load_model("universal")[1]["data.name"] == "universal"


# ---------------------------------------------------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------------------------------------------------

def commands(*words):
    """What the script would run, as lists of words."""
    done = launching.run(["bash", SCRIPT, "--print", *words], cwd=ROOT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [shlex.split(line[2:]) for line in done.stdout.splitlines()]


def test_the_script_shows_commands_that_exist_with_keys_that_exist(tmp_path):
    shown = commands("--folder", tmp_path, "--count", "50", "--first-epochs", "3", "--", "--set", "run.device=cpu")
    programs = [words[1].removeprefix(f"{ROOT}/") for words in shown if words[1].endswith(".py")]
    assert programs == ["Scripts/make_anatomies.py", "OM_prepare.py", "OM_train_3modes.py", "OM_train_3modes.py",
                        "OM_export.py"]
    prepare, first, second = (load_config(words[words.index("--config") + 1], [
        value for word, value in zip(words, words[1:]) if word == "--set"]) for words in shown[1:4])
    assert prepare["data.root"] == shown[0][shown[0].index("--out") + 1] == str(tmp_path / "anatomies")
    assert {prepare["data.expect_samples"], first["data.expect_samples"]} == {100}
    changed = {key for key in first if first[key] != second[key]}
    assert changed == {"run.models", "run.logs", "run.epochs", "augment.remap"}
    assert first["augment.remap"] == 0 < second["augment.remap"] and second["data.pair_modalities"] == "same"
    assert first["run.epochs"] == 3 and first["run.device"] == second["run.device"] == "cpu"
    assert "--init-from" in shown[3] and "--init-from" not in shown[2]
    assert not list(tmp_path.iterdir())
    assert shown[-2][0] == "cp" and shown[-2][-1] == str(loading.UNIVERSAL)


def test_the_script_explains_itself_and_refuses_what_it_does_not_know():
    done = launching.run(["bash", SCRIPT, "--help"], cwd=ROOT)
    assert done.returncode == 0
    options = [word for words in re.findall(r"^ +(--[\w-]+(?: \| --[\w-]+)*)\)", SCRIPT.read_text(), re.M)
               for word in words.split(" | ")]
    assert {"--folder", "--print", "--into"} < set(options)
    assert all(re.search(rf"^{option} ", done.stdout, re.M) for option in options)
    for words, sentence in ((["--flod"], "--flod is unknown"), (["--count"], "--count needs a value"),
                            (["--count", "x"], "x: counts, sizes, workers and epochs"), (["--size", "0"], "0: counts")):
        done = launching.run(["bash", SCRIPT, "--print", *words], cwd=ROOT)
        assert done.returncode == 43 and done.stderr.startswith(f"error: {sentence}") and not done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten programs, one after another
def test_the_script_makes_a_network_that_registers_and_goes_on_after_its_end(volumes, monkeypatch):
    pytest.importorskip("safetensors", reason="pip install -r requirements-export.txt")
    into = volumes / "made/universal.safetensors"
    sets = [word for key, value in TINY.items() if key != "data.expect_samples" for word in ("--set", f"{key}={value}")]
    words = ["bash", SCRIPT, "--folder", volumes / "work", "--count", "10", "--size", "16", "--workers", "2",
             "--first-epochs", "1", "--second-epochs", "1", "--into", into, "--", *sets, "--set",
             "data.val_fraction=0.2", "--set", "data.pairs=4"]
    environment = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for _ in range(2):  # the second time everything is there
            done = launching.run(words, timeout=500, cwd=volumes)
            assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n+ ") == 8 and (into.parent / "universal.md").is_file()
    monkeypatch.setattr(loading, "UNIVERSAL", into)
    assert asked(volumes, "--refine", "5") == 0


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def bench():
    """The program; what it sets in this process, a signal handler and the number of threads, is set back."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("bench_universal")
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


def test_what_is_reached_and_what_is_not_measured(bench):
    means = {"hippocampus": {"net": {"dice": 0.71}, "refine": {"dice": 0.759}},
             "mouse": {"none": {"dice": 0.88, "seconds": 6.0}, "refine": {"dice": 0.88, "seconds": 3.0}},
             "inverted": {"refine": {"dice": 0.7}}}
    assert bench.judged(means, False) == {"hippocampus_alone": True, "hippocampus_refined": False, "mouse_dice": True,
                                          "mouse_time": True, "inverted": None}
    means["inverted"]["ants"] = {"dice": 0.69}
    means["mouse"]["refine"]["seconds"] = 3.1
    assert bench.judged(means, False)["inverted"] is True and bench.judged(means, False)["mouse_time"] is False
    assert set(bench.judged(means, True).values()) == {None}
    assert set(bench.judged({}, False).values()) == {None}


@pytest.mark.slow
def test_the_benchmark_scores_a_named_model_beside_none(bench, shipped, tmp_path, capsys):
    write_dataset(tmp_path / "brains", range(2), 16)
    words = ["--model", shipped, "--parts", "mouse", "--mouse", tmp_path / "brains", "--mouse-refine", 2, "--limit", 1,
             "--threads", 1, "--set", "run.amp=off", "--out", tmp_path / "out"]
    assert bench.main([str(word) for word in words]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["parts"]["mouse"]) == {"identity", "none", "net", "refine"} and result["ship"] is False
    scores = {name: mean["dice"] for name, mean in result["parts"]["mouse"].items()}
    assert scores["none"] > scores["identity"] and scores["refine"] != scores["net"] != scores["identity"]
    assert result["reached"]["mouse_dice"] is None, "one pair of six says nothing"
    assert json.loads((tmp_path / "out/results.json").read_text()) == result


def test_the_benchmark_says_what_is_missing(bench, shipped, tmp_path, monkeypatch, capsys):
    words = ["--parts", "hippocampus", "inverted", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert bench.main(words) == 43
    said = capsys.readouterr()
    assert said.err.count("is missing: ") == 2 and "nowhere" in said.err
    result = json.loads(said.out.splitlines()[-1])
    assert result["parts"] == {"hippocampus": {}, "inverted": {}} and not result["ship"]
    monkeypatch.setattr(loading, "UNIVERSAL", tmp_path / "none.safetensors")
    assert bench.main(words) == 43 and "bash Scripts/bash_train_universal.sh" in capsys.readouterr().err
