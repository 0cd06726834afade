"""The training script as a user meets it: resume, modes, errors, what it leaves behind."""
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import OM_train_3modes as om
from Runtime import checkpoint
from tests.tiny import ROOT, arguments, config, make_data

STEPS = 12  # two epochs of six steps


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("train"))


def run_here(data, tmp_path, *more, **changes):
    """The training in this process; its data are shared, its outputs are not."""
    changes = {"run__models": tmp_path / "Models", "run__logs": tmp_path / "Logs", **changes}
    return om.main(arguments(data, *more, **changes))


def final_weights(output):
    return re.search(r"weights ([0-9a-f]{64})", output)[1]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """SHA-256 of the weights of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_here(data, folder) == 0
    run = folder / "Models/demo_om_net"
    newest = checkpoint.newest(run)
    return json.loads((run / "manifest.json").read_text())["checkpoints"][newest]["weights_sha256"]


def log_lines(folder, event):
    path = folder / "Models/demo_om_net/rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize("kill_at", [1, 5, 9])
def test_killed_run_resumes_to_the_same_weights(data, tmp_path, undisturbed, kill_at):
    command = [sys.executable, str(ROOT / "OM_train_3modes.py"),
               *arguments(data, run__models=tmp_path / "Models", run__logs=tmp_path / "Logs")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while len(log_lines(tmp_path, "step")) < kill_at:
        assert process.poll() is None and time.time() < deadline, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert final_weights(again.stdout) == undisturbed
    if kill_at > 2:
        assert "continuing from" in again.stdout


def test_planned_restarts_at_any_step_give_the_same_weights(data, tmp_path, undisturbed, capsys):
    codes = []
    while not codes or codes[-1] == 42:
        codes.append(run_here(data, tmp_path, "--max-steps-before-restart", "5"))
    assert codes == [42, 42, 0]
    assert final_weights(capsys.readouterr().out) == undisturbed


def test_epoch_averages_survive_a_restart(data, tmp_path):
    run_here(data, tmp_path / "whole", run__epochs=1)
    assert run_here(data, tmp_path / "parts", "--max-steps-before-restart", "4", run__epochs=1) == 42
    assert run_here(data, tmp_path / "parts", run__epochs=1) == 0
    whole, parts = (log_lines(tmp_path / name, "epoch")[-1] for name in ("whole", "parts"))
    for name in [*om.AVERAGES, "steps", "open_share", "nonfinite", "val_dice", "val_ang"]:
        assert whole[name] == parts[name], name
    assert whole["steps"] == 6 and whole["open_share"] == 1.0


def test_finished_run_says_so_and_trains_no_further(data, tmp_path, capsys):
    run_here(data, tmp_path, run__epochs=1)
    first = final_weights(capsys.readouterr().out)
    assert run_here(data, tmp_path, run__epochs=1) == 0
    assert final_weights(capsys.readouterr().out) == first
    assert len(log_lines(tmp_path, "step")) == STEPS // 2


def test_closed_gate_leaves_mode_3_out_of_the_averages(data, tmp_path, capsys):
    assert run_here(data, tmp_path, run__epochs=1, registration__gate=-1) == 0
    entry = log_lines(tmp_path, "epoch")[0]
    assert entry["regist"] is None and entry["imgsim"] is None and entry["open_share"] == 0
    assert all(entry[name] is not None for name in ("total", "ang", "dist", "regul", "contrastive"))
    assert "regist - imgsim -" in capsys.readouterr().out


def test_all_modes_move_the_weights(data):
    cfg = config(data)
    net, ddpm, queue = om.build_network(cfg), om.DeformDDPM(cfg), om.new_queue(cfg, "cpu")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    dataset, _, listed = om.read_datasets(cfg)
    hashes = [checkpoint.weights_sha256(net.state_dict())]
    volumes, pairs = next(zip(*om.epoch_loaders(cfg, dataset, listed, 0, 0)))
    keys = [(0, 0, p) for p in volumes[1].tolist()]
    batch = om.deform_batch(volumes[0], keys, ddpm, cfg)
    filled = torch.nn.functional.normalize(torch.randn(8, 8), dim=1)
    queue.update(images=filled, conditions=filled.flip(0), subjects=torch.full((8,), 99))
    for loss in (lambda: om.step_diffusion(net, batch, cfg)[0],
                 lambda: om.step_contrastive(net, batch, volumes[2], queue, cfg)[0],
                 lambda: om.step_registration(net, pairs[0][0::2], pairs[0][1::2], cfg)[0]):
        assert om.update(loss(), net, optimizer)
        hashes.append(checkpoint.weights_sha256(net.state_dict()))
    assert len(set(hashes)) == 4


def test_a_loss_that_is_not_finite_changes_nothing_and_ends_the_run_in_the_end(data, tmp_path, capsys):
    cfg = config(data)
    net = om.build_network(cfg)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    before = checkpoint.weights_sha256(net.state_dict())
    total = sum(p.sum() for p in net.parameters())
    for loss in (total * float("nan"), total * 0 + (total * 0).sqrt()):  # the second is 0, its gradient is not finite
        assert not om.update(loss, net, optimizer)
        assert checkpoint.weights_sha256(net.state_dict()) == before
    assert om.update(total, net, optimizer) and checkpoint.weights_sha256(net.state_dict()) != before
    assert run_here(data, tmp_path, optim__lr=1e30, run__max_nonfinite=3) == 43
    message = capsys.readouterr().err
    assert "not finite in 3 steps in a row" in message and "Traceback" not in message
    assert log_lines(tmp_path, "step")[-1]["nonfinite"] > 0


def test_contrastive_loss_is_zero_until_the_queue_holds_another_subject(data):
    cfg = config(data)
    net, ddpm, queue = om.build_network(cfg), om.DeformDDPM(cfg), om.new_queue(cfg, "cpu")
    images, subjects = torch.rand(2, 1, 16, 16, 16), torch.tensor([3, 3])
    batch = om.deform_batch(images, [(0, 0, 0), (0, 0, 1)], ddpm, cfg)
    loss, _, embeddings = om.step_contrastive(net, batch, subjects, queue, cfg)
    assert loss.item() == 0.0
    om.push(queue, embeddings, subjects)
    assert om.step_contrastive(net, batch, subjects, queue, cfg)[0].item() == 0.0
    assert om.step_contrastive(net, batch, torch.tensor([4, 5]), queue, cfg)[0].item() > 0.0


def test_every_key_is_read(data, tmp_path, monkeypatch):
    """A key nobody reads is a lie in the config file."""
    read = set()

    class Recorder(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

    plain = config(data, run__models=tmp_path / "Models", run__logs=tmp_path / "Logs", data__in_memory="false",
                   data__num_workers=1, run__epochs=1)
    monkeypatch.setattr(om, "load_config", lambda *a: Recorder(plain))
    # Saving the config as a whole is no reading of its keys.
    monkeypatch.setattr(om, "save_state", lambda *a, **k: [a[-1][key] for key in ("run.keep_last", "run.keep_every")])
    monkeypatch.setattr(om, "save_launch", lambda run, cfg, step: cfg["run.seed"])
    assert om.main(["--config", "any"]) == 0
    unread = set(plain) - read - {"run.keep_last", "run.keep_every"}
    assert not unread, f"keys that nothing reads: {sorted(unread)}"
    source = (ROOT / "OM_train_3modes.py").read_text()
    assert 'cfg["run.keep_last"]' in source and 'cfg["run.keep_every"]' in source


def test_launch_records_config_code_and_versions(data, tmp_path):
    run_here(data, tmp_path, "--max-steps-before-restart", "2", run__epochs=1)
    run_here(data, tmp_path, run__epochs=1, optim__lr=0.01)
    first, second = (tmp_path / "Models/demo_om_net/launches" / n for n in ("0000", "0001"))
    assert yaml.safe_load((first / "config.yaml").read_text())["optim"]["lr"] == 1e-4
    assert yaml.safe_load((second / "config.yaml").read_text())["optim"]["lr"] == 0.01
    launch = json.loads((second / "launch.json").read_text())
    assert launch["step"] == 2 and launch["seed"] == 0 and launch["packages"]["torch"] == torch.__version__


def test_fresh_starts_in_a_new_folder_and_the_old_one_stays(data, tmp_path):
    run_here(data, tmp_path, run__epochs=1)
    assert run_here(data, tmp_path, "--fresh", run__epochs=1) == 0
    old, new = tmp_path / "Models/demo_om_net", tmp_path / "Models/demo_om_net-2"
    assert checkpoint.newest(old) == checkpoint.newest(new) == "000001_demo_om_net.pth"


def test_init_from_takes_the_weights_alone(data, tmp_path, capsys):
    run_here(data, tmp_path, run__epochs=1)
    source = tmp_path / "Models/demo_om_net/000001_demo_om_net.pth"
    assert run_here(data, tmp_path, "--init-from", str(source)) == 43
    assert "--fresh" in capsys.readouterr().err
    assert run_here(data, tmp_path, "--init-from", str(source), "--fresh", "--max-steps-before-restart", "1",
                    optim__lr=1e-12) == 42
    state = checkpoint.load(tmp_path / "Models/demo_om_net-2/tmp/000000_step0001_demo_om_net.pth")
    original = checkpoint.load(source)
    assert state["step"] == 1 and state["queue"]["next"] == 2
    assert all(torch.allclose(state["model"][name], original["model"][name], atol=1e-9) for name in original["model"])


def test_checkpoints_of_another_network_or_config_are_refused(data, tmp_path, capsys):
    run_here(data, tmp_path, run__epochs=1)
    run = tmp_path / "Models/demo_om_net"
    assert run_here(data, tmp_path, run__epochs=1, model__rec_num=3) == 43
    message = capsys.readouterr().err
    assert "model.rec_num" in message and "2" in message and "3" in message and "--fresh" in message
    assert run_here(data, tmp_path, "--init-from", str(run / "000001_demo_om_net.pth"), model__name="recresacnet") == 43
    assert "another network" in capsys.readouterr().err


@pytest.mark.parametrize("changes, words", [
    ({"data__root": "no/such/folder"}, ["no/such/folder"]),
    ({"data__expect_samples": 100}, ["6 training volumes", "100"]),
    ({"model__name": "om_nett"}, ["om_nett", "om_net, recresacnet, recmulmodmutattnnet"]),
    ({"data__val_ids": "5-7"}, ["subject_0005", "data.val_ids"]),
    ({"data__train_ids": "3", "data__expect_samples": 1}, ["one training volume"]),
    ({"data__pair_list": "no_pairs.json"}, ["no_pairs.json"]),
    ({"run__device": "xpu"}, ["xpu", "run.device"]),
])
def test_bad_input_is_one_sentence(data, tmp_path, capsys, changes, words):
    if "run__device" in changes and torch.xpu.is_available():
        pytest.skip("this machine has that device")
    assert run_here(data, tmp_path, **changes) == 43
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert not (tmp_path / "Models").exists(), "a run that cannot start leaves no folder behind"


def test_a_volume_that_a_worker_cannot_read_is_one_sentence_too(tmp_path, capsys):
    make_data(tmp_path)
    path = tmp_path / "data/imagesTr/subject_0002.nii.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    assert om.main(arguments(tmp_path, data__in_memory="false", data__num_workers=1)) == 43
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and "subject_0002.nii.gz: truncated" in message, message


def test_pair_list_is_followed(data, tmp_path):
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([{"fixed": "subject_0001", "moving": "subject_0004"}] * 3))
    assert run_here(data, tmp_path, run__epochs=1, data__pair_list=pairs) == 0
    assert len(log_lines(tmp_path, "step")) == 3, "an epoch ends with the shorter loader"
    dataset, _, listed = om.read_datasets(config(data, data__pair_list=pairs))
    assert listed == [(4, 1)] * 3


@pytest.mark.parametrize("name", ["recresacnet", "recmulmodmutattnnet"])
@pytest.mark.parametrize("condition", ["none", "volume"])
def test_other_networks_train(data, tmp_path, name, condition):
    assert run_here(data, tmp_path, "--max-steps-before-restart", "2", model__name=name,
                    model__condition_type=condition) == 42
    assert checkpoint.newest(tmp_path / f"Models/demo_{name}")


def test_two_dimensions(tmp_path):
    make_data(tmp_path, dims=2, size=24)
    assert om.main(arguments(tmp_path, model__dims=2, data__img_size=24, run__epochs=1)) == 0
    entry = log_lines(tmp_path, "epoch")[0]
    assert all(entry[name] is not None for name in om.AVERAGES) and entry["val_dice"] is not None


def test_dry_run_costs_nothing_and_ends_in_json(data, tmp_path, capsys):
    assert run_here(data, tmp_path, "--dry-run") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    costs = json.loads(lines[-1])
    net = om.build_network(config(data))
    assert costs["parameters"] == sum(p.numel() for p in net.parameters())
    assert costs["steps_per_epoch"] == 6 and costs["effective_batch"] == 2
    assert costs["step_flops"] > 0 and costs["step_memory_bytes"] > 16 * costs["parameters"]
    assert not (tmp_path / "Models").exists()


def test_production_config_has_its_recorded_size(capsys):
    assert om.main(["--config", str(ROOT / "Config/config_om.yaml"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    costs = json.loads(output.strip().splitlines()[-1])
    assert 216e6 <= costs["parameters"] <= 264e6
    assert "128x128x128" in output and "batch 2" in output and "80 timesteps" in output


def test_a_checkpoint_beyond_the_end_of_a_shortened_epoch_goes_on_with_the_next(data, tmp_path):
    assert run_here(data, tmp_path, "--max-steps-before-restart", "5", run__epochs=2) == 42
    assert run_here(data, tmp_path, run__epochs=2, data__repeats=1) == 0
    assert [line["epoch"] for line in log_lines(tmp_path, "step")] == [0] * 5 + [1] * 3
