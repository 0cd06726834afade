"""A network as a folder for a model hub: the same weights bit for bit, and what is damaged is refused."""
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import OM_export
import OM_train_3modes
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Diffusion.networks import build_network
from Inference.load_model import find_checkpoint, load_model
from Runtime import checkpoint
from Runtime.config import save_config
from Runtime.errors import InputError
from Runtime.files import partial_path, sha256
from tests.tiny import config

ROOT = Path(__file__).parent.parent
safetensors = pytest.importorskip("safetensors", reason="pip install -r requirements-export.txt")


def write_launch(run, cfg, step, commit, changed=False, command=()):
    folder = run / f"launches/{len(list(run.glob('launches/*'))):04d}"
    folder.mkdir(parents=True)
    save_config(cfg, folder / "config.yaml")
    launch = {"step": step, "commit": commit, "changed": changed, "packages": {"torch": "9.9"},
              "command": ["OM_train_3modes.py", *command]}
    (folder / "launch.json").write_text(json.dumps(launch))


def make_run(folder, ema=False, changed=False, command=()):
    """A run folder with one checkpoint of random weights. Returns the folder and the weights."""
    cfg = config(folder)
    run = folder / "Models/demo_om_net"
    write_launch(run, cfg, 0, "0123abcd", changed, command)
    net = build_network(cfg, "cpu")
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
               for name, tensor in net.state_dict().items()}
    state = {"format": 1, "model": weights, "optimizer": {}, "queue": {}, "config": cfg, "epoch": 2, "step_in_epoch": 0,
             "step": 30, "data": json.dumps({"name": "demo", "volumes": [["a", "a", "train", 5]]})}
    if ema:
        state["ema"] = weights = {name: tensor * 0.5 for name, tensor in weights.items()}
    checkpoint.save(run, checkpoint.epoch_name(2, "demo", "om_net"), state,
                    metrics={"val_dice": 0.71234, "val_ang": float("nan")}, best=("val_dice", 0.71234, "x"))
    return run, weights


def test_the_card_counts_what_the_checkpoint_says_it_was_trained_on():
    rows = [["a_1", "a", "train", 5], ["a_2", "a", "train", 5], ["b_1", "b", "train", 5], ["c_1", "c", "val", 5]]
    state = {"data": json.dumps({"name": "demo", "volumes": rows})}
    said = OM_export.training_volumes(state)
    assert said == "volumes: 3 (subjects: 2); held out for validation: 1 (subjects: 1)"
    state = {"data": json.dumps({"name": "demo", "volumes": [*rows, ["d_1", "d", "gone", 5]]})}
    assert OM_export.training_volumes(state).startswith("volumes: 4 (subjects: 3), 1 of them removed during the tr")


def test_the_card_of_a_resumed_run_tells_what_its_steps_were_trained_with(tmp_path):
    """And nothing of the launches that have not made them: one that died at once, and one that resumed from them."""
    run, _ = make_run(tmp_path)
    for step, lr, commit in ((20, 0.3, "died"), (10, 1e-3, "second"), (30, 0.5, "later")):
        write_launch(run, config(tmp_path, optim__lr=lr, run__threads=2, data__batchsize=1), step, commit)
    lines = [{"event": "step", "attempt": 0, "step": step, "samples": samples} for step, samples in ((29, 6), (30, 8))]
    (run / "rank0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = OM_export.export(run)[1].read_text()
    assert "| Commit | second |" in page and "| Batch | 6 (of all ranks) |" in page
    assert "| Changed during the training | data.batchsize 2 then 1; optim.lr 0.0001 then 0.001 |" in page
    for number in range(3):
        shutil.rmtree(run / f"launches/000{number}")
    page = OM_export.export(run)[1].read_text()
    assert "| Commit | not recorded |" in page and "Changed" not in page, "a checkpoint without logs began a run"


def same(found, expected):
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_program_writes_the_same_weights_and_a_card(tmp_path):
    run, weights = make_run(tmp_path)
    assert OM_export.main(["--model", str(run), "--licence", "CC-BY-SA 4.0"]) == 0
    target = run / "hub/model.safetensors"
    assert sorted(path.name for path in target.parent.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    net, cfg = load_model(target.parent)
    assert same(net.state_dict(), weights) and not net.training
    expected_net, expected_cfg = load_model(run)
    assert {key for key in cfg if cfg[key] != expected_cfg[key]} <= set(OM_export.PLACES)
    assert same(net.state_dict(), expected_net.state_dict())
    assert json.loads((run / "hub/config.json").read_text()) == {
        key: value for key, value in config(tmp_path).items() if key not in OM_export.PLACES}
    page = (run / "hub/README.md").read_text()
    parameters = sum(parameter.numel() for parameter in net.parameters())
    for part in (sha256(target), "CC-BY-SA 4.0", "---\nlicense: cc-by-sa-4.0\nlibrary", "000002_demo_om_net.pth",
                 f"{parameters:,} parameters", "16 x 16 x 16 voxels", "0.7123", "30 steps in all", "0123abcd",
                 "9.9", "volumes: 1 (subjects: 1)", "as the last step left them", "| Precision | float32 |"):
        assert part in page, part
    assert "| val_ang | - |" in page and "with local changes" not in page and str(tmp_path) not in page
    assert not list(run.rglob("*.tmp-*"))


@pytest.mark.parametrize("command, row, limit", [
    ([], "random", "demo alone"), (["--init-from", "hf:OWNER/NAME"], "hf:OWNER/NAME", "demo, from hf:OWNER/NAME"),
    (["--init-from=/home/me/heads.pth", "--fresh"], "heads.pth", "demo, from heads.pth"),
    (["--init-from", "."], "another network", "demo, from another network")])
def test_the_card_names_the_network_from_which_the_training_began(command, row, limit, tmp_path):
    run, _ = make_run(tmp_path, command=command)
    page = OM_export.export(run)[1].read_text()
    assert f"| Initial weights | {row} |" in page and f"- Trained on {limit}: other anatomy" in page


def test_the_file_says_what_it_is(tmp_path):
    """The same at each export, with text beyond ASCII in it."""
    run, weights = make_run(tmp_path, changed=True)
    exports = [OM_export.export(run, tmp_path / str(number), "Café") for number in range(5)]
    assert len({(sha256(target), sha256(page)) for target, page in exports}) == 1
    assert int.from_bytes(exports[0][0].read_bytes()[:8], "little") % 8 == 0
    with safetensors.safe_open(exports[0][0], "pt") as file:
        assert file.metadata()["license"] == "Café"
        assert same({name: file.get_tensor(name) for name in weights}, weights)
    target, page = OM_export.export(run, tmp_path / "given away")
    assert target.parent == page.parent == tmp_path / "given away"
    with safetensors.safe_open(target, "pt") as file:
        found = file.metadata()
    assert json.loads(found["config"])["model.name"] == "om_net"
    assert str(tmp_path) not in found["config"], "folders of this machine are given away with it"
    assert not {"data.pair_list", "data.stage"} & set(json.loads(found["config"]))
    assert found["license"] in page.read_text() and found["license"] and "license: unknown\n" in page.read_text()
    assert found["format"] == "pt" and found["commit"] == "0123abcd with local changes"
    assert found["weights_sha256"] == checkpoint.weights_sha256(weights)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_a_file_that_was_edited_or_is_not_of_an_export_is_not_replaced(tmp_path, name):
    run, _ = make_run(tmp_path)
    for _ in range(2):  # what it has written itself is
        target, page = OM_export.export(run)
    path = target.parent / name
    before = path.read_bytes()
    other = before.replace(b"om_net", b"my_net") if path != target else b"of another program"
    path.write_bytes(other)
    with pytest.raises(InputError, match=f"{name}: it is not .* as this version wrote it, and would be replaced"):
        OM_export.export(run, licence="MIT")
    assert path.read_bytes() == other != before
    path.write_bytes(before)
    assert "MIT" not in page.read_text() and load_model(target)
    (page.parent / "config.json").unlink()  # an export was killed before it wrote it again
    half = partial_path(target).with_name(f".{target.name}.tmp-{socket.gethostname()}-999999999")
    half.write_bytes(b"half")  # of a process that is gone
    OM_export.export(run)
    assert not half.exists()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).write_text("{}")
    with pytest.raises(InputError, match=name):
        OM_export.export(run, tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [name]


def test_a_launch_that_was_cut_off_and_a_checkpoint_within_a_step_of_an_epoch(tmp_path):
    run, _ = make_run(tmp_path)
    (run / "launches/0001").mkdir()
    (run / "launches/0001/launch.json").write_text('{"step": 0, "comm')
    checkpoint.save(run, "tmp/000002_30_demo_om_net.pth", checkpoint.load(run / "000002_demo_om_net.pth"),
                    metrics={"val_dice": 0.61})
    target, page = OM_export.export(run / "tmp/000002_30_demo_om_net.pth")
    assert target.parent == run / "hub" and "0123abcd" in page.read_text() and "0.61" in page.read_text()


def test_averaged_weights_are_the_ones_given_away(tmp_path):
    run, weights = make_run(tmp_path, ema=True)
    target, page = OM_export.export(run)
    assert same(load_model(target)[0].state_dict(), weights) and "moving average" in page.read_text()


def test_keys_that_were_tuned_after_the_training_go_along(tmp_path, capsys):
    run, weights = make_run(tmp_path)
    assert OM_export.main(["--model", str(run), "--set", "refine.weight=5e-1", "--set", "refine.levels=1"]) == 0
    net, cfg = load_model(run / "hub")
    assert cfg["refine.weight"] == 0.5 and cfg["refine.levels"] == 1 and same(net.state_dict(), weights)
    capsys.readouterr()
    for words, part in (("refine.speed=3", "unknown key refine.speed"), ("refine.levels=none", "refine.levels")):
        assert OM_export.main(["--model", str(run), "--set", words, "--out", str(tmp_path / "bad")]) == 43
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and part in printed and not (tmp_path / "bad").exists()


def test_the_card_names_the_modes_of_the_training_alone(tmp_path, monkeypatch):
    about = {"metrics": {}, "commit": "", "torch": "", "samples": None, "changed": "", "began": ""}
    run, _ = make_run(tmp_path)
    net, state = load_model(run)[0], checkpoint.load(run / "000002_demo_om_net.pth")

    def page_of(**keys):
        return OM_export.card("a", net, state, config(tmp_path, **keys), about, "", "")

    names, page = ("Diffusion:", "Contrastive:", "Registration:"), page_of()
    assert all(name in page for name in names) and "No labels are used." in page
    page = page_of(loss__dist=0, loss__ang=0, loss__regul=0, loss__contrastive=0, loss__dice=0.1)
    assert [name for name in names if name in page] == ["Registration:"] and "No labels are used." not in page
    assert "Its loss has the Dice of label maps too." in page
    assert "No figures were recorded" in page and "choose the best checkpoint" not in page
    page = page_of(data__channels=3)
    about["metrics"] = {"val_imgsim": 0.8}
    assert "by the training itself at this checkpoint.\n\n|" in page_of(), "a score that needs no labels"
    about["metrics"]["val_dice"] = 0.7
    assert "Dice needs labels of\nthese volumes, which also choose the best checkpoint.\n\n|" in page_of()
    assert "--fixed-channels F2.nii.gz F3.nii.gz --moving-channels M2.nii.gz M3.nii.gz --model FOLDER" in page
    assert "omnimorph augment --data FOLDER_OF_IMAGES --model FOLDER" in page and "--image" not in page
    assert list(OM_export.SENTENCES) == list(OM_train_3modes.MODES)
    monkeypatch.setitem(OM_train_3modes.MODES, "fourth", OM_train_3modes.MODES["registration"]._replace(name="fourth"))
    assert "- Fourth.\n" in page_of(), "a mode of one's own"


def test_the_card_describes_only_what_the_network_has():
    rows = {name: OM_export.architecture(build_network(cfg), cfg) for name in ("om_net", "recresacnet")
            for cfg in [config(model__name=name, model__field_stride=2)]}
    for part, there in (("Channels of the levels", True), ("Attention at the bottom", True), ("at 1/2 of", True),
                        ("at 1/1 of", False)):
        assert (part in rows["om_net"], part in rows["recresacnet"]) == (there, not there), part


def test_a_checkpoint_outside_its_run_has_a_card_without_figures(tmp_path):
    run, weights = make_run(tmp_path)
    copy = tmp_path / "tmp/mine.pth"  # not the folder tmp of a run
    copy.parent.mkdir()
    copy.write_bytes((run / "000002_demo_om_net.pth").read_bytes())
    target, page = OM_export.export(copy)
    assert target.parent == copy.parent / "hub" and "of `mine.pth`" in page.read_text()
    assert same(load_model(target)[0].state_dict(), weights)
    assert "No figures were recorded" in page.read_text() and "not recorded" in page.read_text()


UNREADABLE, OTHER = "not a readable .safetensors file", "its weights differ from those that were exported"


@pytest.mark.parametrize("damage, said", [
    (lambda content: content[:len(content) // 2], UNREADABLE), (lambda content: content[:6], UNREADABLE),
    (lambda content: b"\xff" * 8 + content[8:], UNREADABLE), (lambda content: b"", UNREADABLE),
    (lambda content: content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:], OTHER)])
def test_a_damaged_file_is_one_sentence(tmp_path, damage, said):
    target, _ = OM_export.export(make_run(tmp_path)[0])
    target.write_bytes(damage(target.read_bytes()))
    with pytest.raises(InputError, match=f"{target}: {said}") as caught:
        load_model(target)
    assert "\n" not in str(caught.value)


def test_without_the_package_the_command_to_install_it(tmp_path, monkeypatch, capsys):
    run, _ = make_run(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert OM_export.main(["--model", str(run)]) == 43 and not list(run.rglob("*.safetensors"))
    assert capsys.readouterr().err == "error: writing .safetensors files needs a package: pip install safetensors\n"


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path, capsys):
    run, _ = make_run(tmp_path)
    partial_path(run / "hub/model.safetensors").mkdir(parents=True)
    assert OM_export.main(["--model", str(run)]) == 43
    assert capsys.readouterr().err == (f"error: {run}/hub/model.safetensors: Is a directory; results cannot be written "
                                       "there; name another --out.\n")


def test_what_cannot_be_exported(tmp_path, capsys):
    run, _ = make_run(tmp_path)
    target, _ = OM_export.export(run)
    (tmp_path / "text.pth").write_text("no weights")
    for words, part in (([target], "exported already"), ([tmp_path / "none.pth"], "no such model"),
                        ([tmp_path / "text.pth"], "text.pth cannot be read"),
                        ([run, "--out", run], f"{run}: the folder of a run; an exported network in it would be used")):
        assert OM_export.main(["--model", *map(str, words)]) == 43
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and part in printed and printed.count("\n") == 1
    assert find_checkpoint(run).suffix == ".pth"


class Hub(http.server.SimpleHTTPRequestHandler):
    """A hub with one repository: /OWNER/NAME/resolve/REVISION/FILE, in the words that its library waits for."""

    def send_head(self):
        owner, name, _, revision, file = self.path.removeprefix("/").split("/")
        self.path = f"/{file}"
        if (owner, name) != ("us", "demo") or revision not in ("main", "v1"):
            self.server.asked.append(404)
            return self.send_error(404)
        self.server.asked.append(revision)
        return super().send_head()

    def end_headers(self):
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{len(self.path)}"')
        super().end_headers()

    def log_message(self, *words):
        pass


@pytest.mark.slow  # its package comes with requirements-smoke.txt
def test_a_network_is_loaded_by_its_name_on_a_hub(tmp_path):
    pytest.importorskip("huggingface_hub", reason="pip install -r requirements-export.txt")
    target, _ = OM_export.export(make_run(tmp_path)[0])
    for number in range(2):
        write_volume(tmp_path / f"image_{number}.nii.gz", make_subject(number, (16, 16, 16))["image"], np.eye(4))
    serve = functools.partial(Hub, directory=target.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()

        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "OMP_NUM_THREADS": "1",
                       "HF_HOME": str(tmp_path / "hf")}

        def registered(name, **more):
            words = ["--fixed", tmp_path / "image_0.nii.gz", "--moving", tmp_path / "image_1.nii.gz", "--out",
                     tmp_path / "out", "--affine", "none", "--refine", "0", "--device", "cpu", "--model", name]
            return subprocess.run([sys.executable, ROOT / "OM_register.py", *words], capture_output=True, text=True,
                                  env={**environment, **more})

        def field_of(name, **more):
            done = registered(name, **more)
            assert done.returncode == 0, done.stderr
            return (tmp_path / "out/field.nii.gz").read_bytes()

        expected = field_of(target)
        for name, revision in (("hf:us/demo", "main"), ("hf:us/demo@v1", "v1")):
            assert field_of(name) == expected and set(server.asked) == {revision}
            server.asked.clear()
        assert field_of("hf:us/demo", HF_HUB_OFFLINE="1") == expected and not server.asked, "kept from the first time"
        for name in ("hf:us/other", "hf:us/demo@v2", "hf:us/a/b"):
            done = registered(name)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert done.returncode == 43 and len(errors) == 1 and "Traceback" not in done.stderr
            assert errors[0].startswith(f"error: {name}: model.safetensors cannot be downloaded from the hub (")
        server.shutdown()


def test_a_hub_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="hf:us/demo: networks of a hub need a package: pip install huggingface_hub"):
        load_model("hf:us/demo")


@pytest.mark.parametrize("licence, expected", [
    (OM_export.UNSTATED, "license: unknown"), ("CC-BY-SA 4.0", "license: cc-by-sa-4.0"),
    ("Apache-2.0", "license: apache-2.0"), ('ours: "ask"', 'license: other\nlicense_name: "ours: \\"ask\\""')])
def test_the_licence_in_the_head_of_the_card(licence, expected):
    assert OM_export.licence_keys(licence) == expected
