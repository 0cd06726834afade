"""The training script as a user meets it: resume, modes, errors, what it leaves behind."""
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import weakref
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

import OM_prepare
import OM_train_3modes as om
from Dataloader.dataset import end_workers, read_datasets
from Diffusion.networks import NETWORKS, build_network
from Diffusion.optim import footprint, replicated
from Inference.load_model import find_checkpoint, load_model
from Inference.registration import register
from Report.run import headline, state_of
from Report.run_logs import read_run
from Runtime import checkpoint, provenance
from Runtime.config import save_config
from Runtime.device import PRECISIONS, precision
from Runtime.errors import InputError
from Runtime.files import partial_path
from Runtime.run_lock import run_folder
from Supervisor import attempts
from tests import launching, warm
from tests.tiny import (
    CARRIED,
    FAST_BF16,
    QUICK,
    ROOT,
    arguments,
    begin,
    config,
    final_sha256,
    first_batches,
    kill_in,
    log_lines,
    make_data,
    newest_state,
    options,
    prepare,
)

STEPS = 12  # two epochs of six steps
LATER = ("model", "ema", "optimizer", "queue", "step")  # of a checkpoint: what the next step depends on


def train(data, folder, *more, **changes):
    """A training in this process with outputs of its own. Returns its exit code."""
    return om.main(options(data, folder, *more, **{**QUICK, **changes}))


@pytest.fixture(scope="module")
def whole(finished_run):
    """Folder of a run that nothing has interrupted."""
    return finished_run(**CARRIED)


@pytest.fixture
def finished(whole, tmp_path):
    """The folder of a test, with that run in it."""
    shutil.copytree(whole / "Models", tmp_path / "Models")
    return tmp_path / "Models/demo_om_net"


def equal(one, other):
    """Whether nested dicts and lists hold the same, bit by bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def same_run(folder, whole):
    """Whether a run has ended with the state, the log of its epochs and the steps of one that nothing interrupted."""
    one, other = (newest_state(place) for place in (folder, whole))
    epochs, others = (log_lines(place, "epoch") for place in (folder, whole))
    logged = [*om.TERMS, "steps", "open_share", "nonfinite", "val_dice", "val_ang", "val_retrieval"]
    return all(equal(one.get(key), other.get(key)) for key in LATER) and [
        [line[name] for name in logged] for line in epochs] == [[line[name] for name in logged] for line in others]


@pytest.mark.parametrize("word", ["--max-steps-before-restart=-1", "--max-seconds-before-restart=nan"])
def test_a_limit_that_is_none_is_refused(capsys, word):
    with pytest.raises(SystemExit, match="43"):
        om.parse_arguments(["--config", "any.yaml", word])
    assert "take a number of at least 0; see " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can give up root's rights")
def test_a_folder_that_is_closed_during_a_training_is_one_sentence(data, tmp_path):
    run, words = tmp_path / "Models/demo_om_net", options(data, tmp_path, **QUICK, run__epochs=10 ** 6)
    command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable, "OM_train_3modes.py"]
    with subprocess.Popen([*command, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (saved := list(run.glob("*.pth"))) and process.poll() is None:
            time.sleep(0.1)
        run.chmod(0)
        said = process.stderr.read()
    run.chmod(0o755)
    assert saved and process.returncode == 43 and "Traceback" not in said
    assert "Permission denied: name another folder (run.models), or have the permissions of this one corrected" in said


@pytest.mark.parametrize("steps", [(8,), pytest.param((0, 8), marks=pytest.mark.slow)], ids=str)
def test_a_run_that_is_killed_ends_with_the_same_weights(data, tmp_path, whole, capfd, steps):
    for step in steps:
        kill_in(options(data, tmp_path, **QUICK, **CARRIED), tmp_path, step)
    assert train(data, tmp_path, **CARRIED) == 0
    assert "continuing from" in capfd.readouterr().out
    assert final_sha256(tmp_path) == final_sha256(whole)


@pytest.mark.parametrize("words, codes, changes", [
    (["--max-steps-before-restart", "5"], [42, 42, 0], {}),
    pytest.param(["--max-steps-before-restart", "6"], [42, 42, 0], {}, marks=pytest.mark.slow),  # between two epochs
    pytest.param(["--max-seconds-before-restart", "0.001"], [42] * 12 + [0], {}, marks=pytest.mark.slow),
    pytest.param(["--max-steps-before-restart", "5"], [42, 42, 0], {"run__amp": "bf16"}, marks=[
        pytest.mark.slow, pytest.mark.skipif(not FAST_BF16, reason="bfloat16 is emulated here")])],
    ids=["within epochs", "at the end of one", "by time", "bfloat16"])
def test_planned_restarts_give_the_same_state_and_averages(data, tmp_path, finished_run, words, codes, changes):
    """Every step of the average of the weights depends on all before it: a lost one would show in the last bit."""
    whole = finished_run(**CARRIED, **changes)
    assert [train(data, tmp_path, *words, **CARRIED, **changes) for _ in codes] == codes
    assert same_run(tmp_path, whole)
    ends = [line["decision"] for line in attempts.history(tmp_path / "Models/demo_om_net") if line["event"] == "end"]
    assert ends == ["restart" if code else "done" for code in codes]
    assert {line["reason"] for line in log_lines(tmp_path, "leave")} == {words[0]}
    steps = log_lines(tmp_path, "step")
    assert [line["step"] for line in steps] == list(range(STEPS))
    if "steps" in words[0]:
        assert sum(line["attempt"] == 0 for line in steps) == int(words[1])


@pytest.mark.parametrize("left", [9, 1000])
def test_only_a_leak_that_runs_out_soon_is_the_reason_to_leave(data, tmp_path, monkeypatch, left, capsys):
    """A slow leak of this rank is not why it leaves, where another rank's memory runs out."""
    leak = {"steps_left": left, "sentence": f"runs out in {left} steps"}
    monkeypatch.setattr(om.memory, "watch", lambda state, step: bool(state.update(leak=leak)) or True)
    assert train(data, tmp_path, **CARRIED) == 42
    why = log_lines(tmp_path, "leave")[-1]["reason"]
    assert why == ("rank 0: runs out in 9 steps" if left == 9 else om.WHY_LEFT["memory"])
    # Whoever sees only the output, such as torchrun's "FAILED exitcode: 42", learns that nothing is wrong.
    assert f"attempt 0: planned restart ({why}). Continues from step 1.\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_in_the_last_step_of_an_epoch_is_heard_before_its_validation(data, tmp_path, whole, monkeypatch):
    """A launch that hears it before its first step validates first, or it could leave for ever."""
    advance, announce = om.advance, om.training_state.announce

    def warn(progress, split):
        advance(progress, split)
        if (progress.epoch, progress.step_in_epoch) == (0, STEPS // 2):
            os.kill(os.getpid(), signal.SIGUSR1)

    def warn_early(run):
        announce(run)
        os.kill(os.getpid(), signal.SIGUSR1)

    for place, name, function, epochs in ((om, "advance", warn, 0), (om.training_state, "announce", warn_early, 1)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, function)
            patched.setitem(om.watchdog.STATE, "stop", None)  # what a process keeps until it ends
            assert train(data, tmp_path, **CARRIED) == 42
        assert len(log_lines(tmp_path, "epoch")) == epochs
        assert log_lines(tmp_path, "leave")[-1]["reason"] == om.WHY_LEFT["signal"]
        step = f"tmp/00000{epochs}_step{1 if epochs else STEPS // 2:04d}"
        assert checkpoint.newest(tmp_path / "Models/demo_om_net").startswith(step)
    assert train(data, tmp_path, **CARRIED) == 0 and same_run(tmp_path, whole)


def test_what_a_run_leaves_behind_is_of_its_length(whole):
    """Adam of mode 3 has counted the steps in which the gate was open; the others all of them."""
    state, open_steps = newest_state(whole), sum(line["open"] for line in log_lines(whole, "step"))
    assert counts(state["optimizer"]) == {"diffusion": {STEPS}, "contrastive": {STEPS}, "registration": {open_steps}}
    assert 0 < open_steps < STEPS
    assert [line["steps"] for line in log_lines(whole, "epoch")] == [6, 6]


def test_the_average_of_the_weights_is_what_later_tools_load(whole):
    run, state = whole / "Models/demo_om_net", newest_state(whole)
    assert state["model"].keys() == state["ema"].keys()
    differ = [name for name, tensor in state["model"].items() if not torch.equal(tensor, state["ema"][name])]
    assert len(differ) > len(state["model"]) / 2
    net, cfg = load_model(run / checkpoint.newest(run), overrides=["run.threads=2"])
    assert cfg["optim.average"] == 0.9 and cfg["run.threads"] == 2 and not net.training
    assert equal(dict(net.state_dict()), state["ema"])


@pytest.mark.slow
def test_the_schedule_goes_by_epochs_whatever_a_step_holds(data, tmp_path, whole):
    """More ranks make fewer steps of an epoch: a rate that counted steps would not be at its end then."""
    assert train(data, tmp_path, data__global_batchsize=12, **CARRIED) == 0
    lines = log_lines(tmp_path, "step")
    many = [line["lr"] for line in log_lines(whole, "step")]
    assert len(lines) == 2 and [line["lr"] for line in lines] == [many[0], many[6]]
    within = tmp_path / "within"
    assert train(data, within, "--max-steps-before-restart", "3", **CARRIED) == 42
    assert train(data, within, data__global_batchsize=6, **CARRIED) == 0
    assert [line["lr"] for line in log_lines(within, "step")] == [*many[:4], many[6], many[9]]


@pytest.mark.slow
def test_a_run_goes_on_in_the_precision_in_which_it_began_and_keeps_each_launch(data, tmp_path, capfd):
    here = precision("auto", torch.device("cpu"))
    other = {"off": "bf16", "bf16": "off"}[here]
    assert train(data, tmp_path, "--max-steps-before-restart", "1", run__amp=other) == 42
    capfd.readouterr()
    assert train(data, tmp_path, "--max-steps-before-restart", "1", run__amp="auto") == 42
    said = capfd.readouterr().out
    assert (f"run.amp: this run began with {other} and continues with it; on these devices auto would choose {here}"
            in said)
    assert f"threads, {PRECISIONS[other]}" in said
    run = tmp_path / "Models/demo_om_net"
    assert newest_state(tmp_path)["config"]["run.amp"] == other
    assert train(data, tmp_path, "--max-steps-before-restart", "1", run__amp=here) == 42
    assert f"changed since the checkpoint: run.amp: {other} -> {here}" in capfd.readouterr().out
    assert load_model(run)[1]["run.amp"] == here == load_model(run, overrides=["run.amp=auto"])[1]["run.amp"]
    assert load_model(run, overrides=[f"run.amp={other}"])[1]["run.amp"] == other
    folders = sorted((run / "launches").iterdir())
    assert [yaml.safe_load((folder / "config.yaml").read_text())["run"]["amp"] for folder in folders] == [
        other, other, here]
    launch = json.loads((folders[1] / "launch.json").read_text())
    assert launch["step"] == 1 and launch["seed"] == 0 and launch["packages"]["torch"] == version("torch")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_changes_of_the_code_that_are_not_utf8_are_kept_too(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for words in (["init", "-q"], ["add", "notes.txt"]):
        launching.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "notes.txt").write_bytes(b"voil\xe0\n")
    assert "+voil\ufffd\n" in provenance.git("-C", str(tmp_path), "diff")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a checkout of another user")
def test_a_checkout_of_another_user_is_recorded_too(tmp_path, monkeypatch):
    (tmp_path / "Runtime").mkdir()
    (tmp_path / "known.py").write_text("one = 1\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        launching.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "known.py").write_text("one = 4\n")
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # the tester's own may allow it
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "Runtime/provenance.py"))
    assert len(provenance.git("rev-parse", "HEAD").strip()) == 40 and "+one = 4" in provenance.local_changes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another user")
@pytest.mark.parametrize("given, place", [("data.root", "data"), ("--init-from", "run")])
def test_a_folder_that_this_user_may_not_enter_is_one_sentence(data, given, place):
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        os.chmod(outer, 0o755)
        shutil.copytree(data / "data", Path(outer) / "data")
        cfg, closed = config(Path(outer), **QUICK), Path(outer) / place
        read_datasets(cfg)  # imports what the other user may not be able to read
        closed.mkdir(exist_ok=True)
        closed.chmod(0o700)
        args = om.parse_arguments(["--config", "", "--init-from", f"{outer}/run"])
        os.seteuid(65534)
        try:
            with pytest.raises(InputError, match=f"^{given} {closed}: this user may not read or write {closed}/.* ask"):
                om.set_up(cfg, args, om.launch.Ranks(), Path(outer) / "none")
        finally:
            os.seteuid(0)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_changes_of_a_launch_hold_new_files_that_it_has_loaded(tmp_path, monkeypatch):
    """As a patch that git can apply; an empty one, one without a last line end, and one that is too large.
    Nothing of one that is gone, and of a lazy module, which fails to load."""
    (tmp_path / "Runtime").mkdir()
    contents = {"known.py": "one = 1\n", "my net.py": "two = 2", "empty.py": "", "other.py": "three = 3\n",
                "large.py": "#" * provenance.MOST_NEW + "\n", "gone.py": ""}
    for number, (name, content) in enumerate(contents.items()):
        (tmp_path / name).write_text(content)
        if name != "other.py":
            module = types.ModuleType(f"loaded{number}")
            module.__file__ = str(tmp_path / name)
            monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "gone.py").unlink()
    (tmp_path / "gone.py").symlink_to("nowhere")  # git lists it, and it has no size
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: __import__("no_such_module")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    for words in (["init", "-q"], ["add", "known.py"],
                  ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        launching.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "Runtime/provenance.py"))
    (tmp_path / "known.py").write_text("one = 4\n")
    changes = provenance.local_changes()
    assert "+one = 4" in changes and "large.py: new, and too large" in changes
    assert "other.py" not in changes and "gone.py" not in changes
    (tmp_path / "a.diff").write_text(changes)
    launching.run(["git", "apply", "-R", "a.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "known.py").read_text() == "one = 1\n" and not (tmp_path / "my net.py").exists()
    assert not (tmp_path / "empty.py").exists()


def counts(adams):
    """{mode: the counts of steps of its parameters}. adams: "optimizer" of a checkpoint, by mode."""
    return {mode: {int(entry["step"]) for entry in adam["state"].values()} for mode, adam in adams.items()}


@pytest.mark.slow
def test_shared_moments_become_those_of_each_mode_but_not_the_other_way(data, tmp_path, capfd):
    def one_launch(steps, **changes):
        code = train(data, tmp_path, "--max-steps-before-restart", str(steps), **changes)
        return code, newest_state(tmp_path)["optimizer"], "".join(capfd.readouterr())

    two = OFF["contrastive"][1]
    _, shared, _ = one_launch(2, **two)
    assert set(shared) == {"state", "param_groups"} and counts({"all": shared}) == {"all": {4}}
    code, own, said = one_launch(1, optim__moments="per_mode", **two)
    assert code == 42 and "Adam's moments: each mode starts with the shared ones" in said
    assert "changed since the checkpoint: optim.moments: shared -> per_mode" in said
    assert {mode: max(found) for mode, found in counts(own).items()} == {"diffusion": 5, "registration": 5}
    code, own, said = one_launch(1, optim__moments="per_mode")
    assert code == 42 and "Adam's moments of mode contrastive start from zero, because the checkpoint has none" in said
    assert set(own) == set(om.MODES) and counts(own)["contrastive"] == {1}
    code, _, said = one_launch(1)
    assert code == 43 and "optim.moments shared cannot continue from them" in said and "Traceback" not in said
    assert "set optim.moments to per_mode, or start a new run with --fresh --init-from" in said


@pytest.mark.slow
def test_groups_of_parameters_keep_their_rates_and_a_resumed_run_its_bits(data, tmp_path, monkeypatch):
    """Also in other groups: a checkpoint knows parameters by their place in the network."""
    def in_groups(*groups):
        monkeypatch.setattr(om.optim, "make_optimizer", lambda net, ranks, cfg: torch.optim.Adam([
            {"params": [one for one in net.parameters() if one.dim() in dims], "lr": lr} for dims, lr in groups]))

    changes = {"optim__lr": 1e-3, "run__epochs": 1}
    in_groups(((1, 2), 0.0), ((0, 3, 4, 5), 5e-4))
    assert train(data, tmp_path / "whole", **changes) == 0
    assert train(data, tmp_path / "parts", "--max-steps-before-restart", "3", **changes) == 42
    in_groups(((0, 3, 4, 5), 5e-4), ((1,), 0.0), ((2,), 0.0))
    assert train(data, tmp_path / "parts", **changes) == 0
    one, other = (newest_state(tmp_path / name) for name in ("whole", "parts"))
    assert equal(one["model"], other["model"]) and equal(one["optimizer"]["state"], other["optimizer"]["state"])
    before = build_network(config(data, **QUICK)).state_dict()
    moved = {tensor.dim() for name, tensor in one["model"].items() if not torch.equal(tensor, before[name])}
    assert 5 in moved and not moved & {1, 2}


@pytest.mark.parametrize("other", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_another_kind_of_optimizer_starts_afresh(data, tmp_path, monkeypatch, capfd, other):
    assert train(data, tmp_path, "--max-steps-before-restart", "1") == 42
    monkeypatch.setattr(om.optim, "make_optimizer", lambda net, ranks, cfg: other(net.parameters(), cfg["optim.lr"]))
    for said in (True, False):
        capfd.readouterr()
        assert train(data, tmp_path, "--max-steps-before-restart", "1") == 42
        assert (f"the optimizer starts afresh, because the checkpoint has the state of another one: Adam -> "
                f"{other.__name__}" in capfd.readouterr().out) is said


@pytest.mark.parametrize("kind, options, parts", [
    (torch.optim.Adam, {"amsgrad": True}, {"max_exp_avg_sq"}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, {"grad_avg", "momentum_buffer"})])
def test_what_an_option_adds_to_an_optimizer_starts_from_zero(data, tmp_path, monkeypatch, capfd, kind, options, parts):
    made = {}
    monkeypatch.setattr(om.optim, "make_optimizer", lambda net, ranks, cfg: kind(net.parameters(), 1e-4, **made))
    assert train(data, tmp_path, "--max-steps-before-restart", "1") == 42
    before = {*newest_state(tmp_path)["optimizer"]["state"][0]}
    made.update(options)
    for said in (True, False):
        capfd.readouterr()
        assert train(data, tmp_path, "--max-steps-before-restart", "1") == 42
        printed = capfd.readouterr().out
        assert all((f"the optimizer's {part} starts from zero, because the checkpoint has none" in printed) is said
                   for part in parts)
        assert {*newest_state(tmp_path)["optimizer"]["state"][0]} == before | parts


def test_a_state_of_an_older_version_goes_to_the_parameters_that_it_had():
    """Its numbers are those of the optimizer's own parameters, and it does not name its kind."""
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
    net[0].requires_grad_(False)
    saved = {"param_groups": [{"lr": 0.5, "params": [0, 1]}],
             "state": {number: {"momentum_buffer": torch.full((1, 1), float(number))} for number in (0, 1)}}
    weights = [net[1].weight, net[2].weight]
    sgd, adam = torch.optim.SGD(weights, 0.1, momentum=0.9), torch.optim.Adam(weights)
    assert not om.optim.load_optimizers(net, {"shared": sgd}, saved)
    assert [float(sgd.state[weight]["momentum_buffer"]) for weight in weights] == [0, 1]
    assert sgd.param_groups[0]["lr"] == 0.5
    said = om.optim.load_optimizers(net, {"shared": adam}, saved)
    assert [*said] == ["the optimizer starts afresh, because the checkpoint has the state of another one: not Adam -> "
                       "Adam"] and not adam.state


def test_the_rate_is_that_of_the_config_whatever_the_optimizer_was_made_with(monkeypatch):
    """And a group with a rate of its own keeps its ratio to that of the others."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    monkeypatch.setattr(om.optim, "make_optimizer", lambda *_: torch.optim.SGD(
        [{"params": weights[:1], "lr": 0.03}, {"params": weights[1:]}], lr=0.3))
    made = om.optim.make_optimizers(None, None, {"optim.lr": 1e-4, "optim.moments": "shared"}, om.MODES)["shared"]
    assert [group["share"] for group in made.param_groups] == pytest.approx([0.1, 1.0])


def test_finished_run_says_so_and_trains_no_further(data, tmp_path, finished, whole, capfd):
    """And its records stay those of what was trained, whatever the config says now."""
    records = [finished / "data.csv", *(finished / "launches").rglob("*.*")]
    before = [path.read_bytes() for path in records]
    changes = {**CARRIED, "optim__lr": 0.5, "data__train_ids": "", "data__val_ids": "", "data__val_fraction": 0}
    assert train(data, tmp_path, **changes) == 0
    said = capfd.readouterr().out
    assert f"weights {final_sha256(whole)}" in said and "trained on instead of held out: 2" in said
    assert "all of its 2 epochs are done, so nothing is trained: raise run.epochs" in said
    assert len(log_lines(tmp_path, "step")) == STEPS
    assert [finished / "data.csv", *(finished / "launches").rglob("*.*")] == records
    assert [path.read_bytes() for path in records] == before
    other = run_folder(config(tmp_path, **QUICK, **changes), fresh=True)
    (other / "launches/0000").mkdir(parents=True)
    save_config(config(tmp_path, **QUICK, **changes), other / "launches/0000/config.yaml")
    assert run_folder(config(tmp_path, **QUICK, **CARRIED)) == finished, "the run with these settings"


@pytest.mark.parametrize("fewer", [
    {"data__train_ids": "", "data__val_ids": "", "data__val_fraction": 0}, {"data__val_ids": "6"}])
def test_a_run_that_no_longer_holds_a_pair_out_has_no_best_checkpoint(data, tmp_path, finished, fewer):
    assert find_checkpoint(finished).name == json.loads((finished / "manifest.json").read_text())["best"]["checkpoint"]
    assert train(data, tmp_path, run__epochs=3, data__repeats=1, **CARRIED, **fewer) == 0
    assert find_checkpoint(finished).name == "000003_demo_om_net.pth"


def test_curves_of_another_run_in_the_same_folder_are_told(data, tmp_path, capsys):
    short = {"run__epochs": 1, "data__repeats": 1, "data__train_ids": "0-1", "data__expect_samples": 2}
    for models, told in (("one", False), ("other", True)):
        code = train(data, tmp_path, "--max-steps-before-restart", "1", run__models=tmp_path / models,
                     **{**short, "data__repeats": 2})
        assert code == 42 and ("has curves of another run" in capsys.readouterr().out) == told
        assert train(data, tmp_path, run__models=tmp_path / models, **short) == 0
        assert "has curves of another run" not in capsys.readouterr().out, "its own"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="neither such names nor /dev/full are everywhere")
@pytest.mark.parametrize("outputs", ["> /dev/full 2>&1", ">&- 2> /dev/full"],
                         ids=["full disk", "no output"])
def test_output_that_nobody_takes_ends_no_training(data, tmp_path, finished_run, outputs):
    """A process of its own: Python writes what is left of both outputs as it ends."""
    short = {"run__epochs": 1, "data__repeats": 1}
    words = [sys.executable, ROOT / "OM_train_3modes.py", *options(data, tmp_path, **QUICK, **short)]
    done = launching.run(["bash", "-c", f'exec "$@" {outputs}', "bash", *words])
    assert done.returncode == 0 and final_sha256(tmp_path) == final_sha256(finished_run(**short))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_start_on_a_full_disk_is_one_sentence(data, tmp_path, monkeypatch, capfd):
    run = tmp_path / "Models/demo_om_net"
    run.mkdir(parents=True)
    partial_path(run / "step.json").symlink_to("/dev/full")
    monkeypatch.setitem(om.watchdog.STATE, "file", None)  # of another test
    assert train(data, tmp_path) == 1, "a launcher tries again"
    assert capfd.readouterr().err == (f"error: {run / 'step.json'}: No space left on device: make room, or name "
                                      "another folder (run.models).\n")


def test_empty_places_are_the_folder_of_the_command_and_a_stage_without_a_cache_is_told(data, tmp_path, monkeypatch,
                                                                                          capsys):
    monkeypatch.chdir(tmp_path)
    assert train(data, tmp_path, "--max-steps-before-restart", "1", run__logs="", data__stage="/dev/shm") == 42
    assert [*tmp_path.glob("demo_om_net/events.*")]
    assert "data.stage /dev/shm is not used, because data.cache is empty" in capsys.readouterr().out


def test_the_copy_of_the_cache_stays_for_a_restart_and_goes_with_the_end(data, tmp_path):
    cache, stage = prepare(data, tmp_path / "cache", **QUICK), tmp_path / "stage"
    stage.mkdir()
    for more, code, copies in ((["--max-steps-before-restart", "1"], 42, 1), ([], 0, 0)):
        assert train(data, tmp_path, *more, run__epochs=1, data__cache=cache, data__stage=stage) == code
        assert len(list(stage.iterdir())) == copies


def test_a_queue_of_another_length_starts_empty(data, tmp_path, capsys):
    run = begin(config(data, **QUICK), tmp_path)
    om.embeddings.push(run.queue, *torch.rand(2, 4, 8), torch.arange(4))
    om.training_state.save(run, "one.pth")
    om.training_state.finish_saving(run, last=True)
    assert begin(run.cfg, tmp_path).queue["next"] == 4
    assert begin(config(data, contrastive__queue=12, **QUICK), tmp_path).queue["subjects"].tolist() == [-1] * 12
    said = capsys.readouterr().out
    assert "changed since the checkpoint: contrastive.queue: 8 -> 12" in said
    assert "the queue of mode 2 starts empty, because it has another length" in said


def test_closed_gate_leaves_mode_3_out_of_the_averages(data, tmp_path, capfd):
    assert train(data, tmp_path, run__epochs=1, data__repeats=1, registration__gate=-1) == 0
    entry = log_lines(tmp_path, "epoch")[0]
    assert entry["regist"] is None and entry["imgsim"] is None and entry["open_share"] == 0
    assert all(entry[name] is not None for name in ("total", "ang", "dist", "regul", "contrastive"))
    assert "regist - imgsim -" in capfd.readouterr().out


def test_a_term_that_two_modes_return_under_one_name_is_refused(data):
    def step(net, batch, cfg):
        loss, terms = om.step_registration(net, batch, cfg)
        return loss, {**terms, "ang": terms["imgsim"]}

    run = begin(config(data, **QUICK))
    run.modes = [run.modes[0], run.modes[2]._replace(step=step)]
    with pytest.raises(InputError, match="mode registration and an earlier one both return a loss term ang; rename"):
        om.train_step(run, *first_batches(run))


@pytest.mark.parametrize("result, words", [
    (lambda loss: None, "its step function returns no loss with a dict of terms"),
    (lambda loss: loss, "its step function returns no loss with a dict of terms"),
    (lambda loss: (loss.item(), {}), "its loss is a float"),
    (lambda loss: (loss.repeat(2), {}), r"its loss is of shape .2."),
    (lambda loss: (loss.detach(), {}), "its loss has no gradient"),
    (lambda loss: (loss, {"bright": 0.5}), "its bright is a float, not a tensor of one number; take the mean"),
    (lambda loss: (loss[None], {"bright": loss[None]}), r"its loss is of shape .1."),
    (lambda loss: (loss, {"bright": torch.ones(1, 8, 8)}), r"its bright is of shape .1, 8, 8."),
    (lambda loss: (loss, {"total": loss}), "returns a term total, which is the name of its curve")])
def test_a_result_that_cannot_be_trained_on_is_one_sentence(data, result, words):
    run = begin(config(data, **QUICK))
    run.modes = [run.modes[0]._replace(step=lambda *given: result(om.step_diffusion(*given)[0]))]
    with pytest.raises(InputError, match=f"mode diffusion:? {words}"):
        om.train_step(run, *first_batches(run))


def test_terms_that_only_some_batches_have_are_refused(data):
    names = iter(("bright", "dark"))

    def step(net, batch, cfg):
        loss, terms = om.step_diffusion(net, batch, cfg)
        return loss, {next(names): loss, **terms}

    run = begin(config(data, data__global_batchsize=4, **QUICK))
    run.modes = [run.modes[0]._replace(step=step)]
    with pytest.raises(InputError, match="mode diffusion returns different terms for different batches: return every"):
        om.train_step(run, *first_batches(run))


OFF = {"diffusion": ("total", {"loss__dist": 0.0, "loss__ang": 0.0, "loss__regul": 0.0}),
       "contrastive": ("contrastive", {"loss__contrastive": 0.0}),
       "registration": ("regist", {"loss__imgsim": 0.0, "loss__imgmse": 0.0, "loss__ddf": 0.0})}


@pytest.mark.parametrize("wanted", [["registration"], *(pytest.param(modes, marks=pytest.mark.slow) for modes in (
    ["contrastive"], ["diffusion", "registration"], ["contrastive", "registration"]))], ids="+".join)
def test_a_mode_without_weights_is_not_computed_and_resuming_stays_exact(wanted, data, tmp_path, monkeypatch, capsys):
    changes = {key: value for mode, (_, keys) in OFF.items() if mode not in wanted for key, value in keys.items()}
    for mode in set(OFF) - set(wanted):
        monkeypatch.setitem(om.MODES, mode, om.MODES[mode]._replace(step=None))  # to call it would raise TypeError
    if "diffusion" not in wanted:
        changes["registration__gate"] = -1  # there is none without mode 1
    if wanted == ["registration"]:
        monkeypatch.setattr(om, "deform_batch", None)
        changes["run__epochs"] = 1
    assert train(data, tmp_path / "whole", **changes) == 0
    assert f", modes: {', '.join(wanted)}\n" in capsys.readouterr().out, "and it says so"
    entry = log_lines(tmp_path / "whole", "epoch")[-1]
    assert {mode for mode, (term, _) in OFF.items() if entry[term] is not None} == set(wanted)
    assert entry["open_share"] == ("registration" in wanted)
    for code in (42, 0) if "run__epochs" in changes else (42, 42, 0):
        assert train(data, tmp_path / "parts", "--max-steps-before-restart", "5", **changes) == code
    assert same_run(tmp_path / "parts", tmp_path / "whole")


def mode_batches(run):
    """{mode: batches of the first step}, with a queue full of another subject."""
    filled = torch.nn.functional.normalize(torch.randn(8, 8), dim=1)
    run.queue.update(images=filled, conditions=filled.flip(0), subjects=torch.full((8,), 99))
    volumes, pairs = first_batches(run)
    volumes = om.volume_batches(run, volumes[:1])
    return {"diffusion": volumes, "contrastive": volumes, "registration": om.pair_batches(run, pairs[:1])}


@pytest.mark.parametrize("moments", ["shared", "per_mode"])
def test_a_mode_steps_as_an_adam_that_has_seen_only_its_gradients(data, moments):
    """Or, with shared moments, as the one Adam that has seen those of all modes."""
    run = begin(config(data, optim__moments=moments, optim__lr=1e-3, **QUICK))
    parameters, batches = list(run.net.parameters()), mode_batches(run)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    one = torch.optim.Adam(copies, lr=1e-3, fused=True)
    adams = {mode: one if moments == "shared" else torch.optim.Adam(copies, lr=1e-3, fused=True) for mode in om.MODES}
    for mode in ("diffusion", "registration", "contrastive", "registration", "diffusion", "registration"):
        assert om.run_mode(run, om.MODES[mode], batches[mode]).moved
        for copy, parameter in zip(copies, parameters):
            copy.grad = None if parameter.grad is None else parameter.grad.clone()
        adams[mode].step()
        assert all(map(torch.equal, copies, parameters)), mode
    values = [value for adam in dict.fromkeys(adams.values()) for entry in adam.state.values()
              for value in entry.values()]
    assert all(run.progress.sums.counts.values())
    assert footprint(run.net, run.optimizers, run.device)["optimizer_bytes"] == sum(value.nbytes for value in values)
    compared = replicated(run.net, run.optimizers)
    assert len(compared) == len(run.net.state_dict()) + len(values), "ranks agree on the moments of every mode"


def test_only_the_gradients_of_modes_2_and_3_are_clipped(data):
    run = begin(config(data, contrastive__clip_norm=1e-6, registration__clip_norm=1e-6, **QUICK))
    batches = mode_batches(run)
    for mode in om.MODES.values():
        found = om.run_mode(run, mode, batches[mode.name]).norm
        left = torch.nn.utils.get_total_norm([p.grad for p in run.net.parameters() if p.grad is not None]).item()
        assert found > 1e-5 and left == pytest.approx(found if mode.name == "diffusion" else 1e-6, rel=0.05)


@pytest.mark.parametrize("agreed, opens", [(-1.0, True), (1.0, False)])
def test_the_gate_goes_by_what_all_ranks_agree_on(data, monkeypatch, agreed, opens):
    """Whatever this rank has found by itself: it is the same both times."""
    run, agree = begin(config(data, registration__gate=0, **QUICK)), om.agree.agree

    def of_all_ranks(ranks, step, branch, *more, **named):
        found = agree(ranks, step, branch, *more, **named)
        return dataclasses.replace(found, terms=[agreed] * len(found.terms)) if branch == "diffusion" else found
    monkeypatch.setattr(om.agree, "agree", of_all_ranks)
    assert om.train_step(run, *first_batches(run))[0]["open"] == opens


@pytest.mark.parametrize("share, count", [(0.0, 20), (0.1, 400), (1.0, 20)])
def test_the_condition_is_dropped_in_a_share_of_the_volumes(data, share, count):
    cfg = config(data, model__condition_dropout=share, **QUICK)
    keys = [(0, 0, number) for number in range(count)]
    used = om.deform_batch(torch.rand(len(keys), 1, 8, 8, 8), keys, om.DeformDDPM(cfg), cfg)["use_condition"]
    assert (~used).float().mean().item() == pytest.approx(share, abs=0.05 * (0 < share < 1))


@pytest.mark.slow
def test_validation_comes_every_so_many_epochs_and_at_the_end(data, tmp_path, capsys):
    one_step = {"run__val_every": 2, "data__train_ids": "0-1", "data__expect_samples": 2, "data__repeats": 1}
    assert train(data, tmp_path, run__epochs=3, **one_step) == 0
    assert ["val_ang" in line for line in log_lines(tmp_path, "epoch")] == [False, True, True]
    assert train(data, tmp_path, run__epochs=2, **one_step) == 0
    assert "done: 3 epochs" in capsys.readouterr().out, "run.epochs asks for two, but three are done"
    assert headline(read_run(next((tmp_path / "Models").iterdir())), [])[0][:2] == ("Epochs", "3 of 3")


def test_the_newest_checkpoints_stay_and_those_of_every_so_many_epochs(data, tmp_path):
    run = begin(config(data, run__keep_last=1, run__keep_every=2, **QUICK), tmp_path)
    for epoch in range(1, 5):
        run.progress.epoch, run.progress.step = epoch, 3 * epoch
        om.training_state.save(run, f"{epoch}.pth")
    om.training_state.finish_saving(run, last=True)
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["2.pth", "4.pth"]


def test_a_step_counts_its_modes_and_fills_the_queue_in_order(data):
    run = begin(config(data, data__global_batchsize=4))
    volumes, pairs = first_batches(run)
    assert [len(batch[0]) for batch in volumes] == [2, 2] and [len(batch[0]) for batch in pairs] == [2, 2]
    line, agreed, failed = om.train_step(run, volumes, pairs, leave="signal")
    assert line["open"] and line["nonfinite"] == 0 and not failed and agreed.leave == "signal" and not agreed.save
    subjects = torch.cat([batch[2] for batch in volumes])
    assert run.queue["next"] == 4 and torch.equal(run.queue["subjects"][:4], subjects)
    assert run.progress.sums.steps == run.progress.sums.open == 1
    queue = {name: value.clone() if torch.is_tensor(value) else value for name, value in run.queue.items()}
    line, _, failed = om.train_step(run, [(batch[0] * math.nan, *batch[1:]) for batch in volumes], pairs)
    assert failed == ["diffusion", "contrastive"] and not line["open"], "no recovery, so no registration"
    assert all(torch.equal(torch.as_tensor(run.queue[name]), torch.as_tensor(queue[name])) for name in queue)


def test_what_only_mode_1_needs_is_gone_in_mode_2_and_volumes_in_mode_3(data, monkeypatch):
    run = begin(config(data, data__global_batchsize=4))
    fields, images, alive = [], [], []
    deform, contrastive, registration = om.deform_batch, om.step_contrastive, om.step_registration

    def deform_and_watch(*args):
        batch = deform(*args)
        fields.append(weakref.ref(batch["target_field"]))
        images.append(weakref.ref(batch["xt"]))
        return batch

    def look(step, things):
        def step_and_look(*args):
            alive.extend(thing() is not None for thing in things)
            return step(*args)
        return step_and_look

    monkeypatch.setattr(om, "deform_batch", deform_and_watch)
    run.modes = [mode._replace(step={"contrastive": look(contrastive, fields),
                                     "registration": look(registration, images)}.get(mode.name, mode.step))
                 for mode in run.modes]
    om.train_step(run, *first_batches(run))
    assert alive == [False] * 8


@pytest.mark.parametrize("gate", [2, -1])
def test_a_fourth_mode_finds_its_whole_batch_whether_the_gate_is_open_or_shut(data, monkeypatch, gate):
    monkeypatch.setitem(om.MODES, "fourth", om.MODES["diffusion"]._replace(
        name="fourth", curve="fourth", step=lambda *given: (om.step_diffusion(*given)[0], {})))
    run = begin(config(data, registration__gate=gate, **QUICK))
    line, _, failed = om.train_step(run, *first_batches(run))
    assert line["open"] == (gate == 2) and not failed and "fourth" in line["terms"]


@pytest.mark.parametrize("asked", [True, False])
def test_garbage_and_cached_blocks_go_after_each_mode_where_asked(data, monkeypatch, asked):
    """A thing that holds itself is left in each mode. For a device, which is not there, its module counts."""
    run, knots, alive, emptied = begin(config(data, run__empty_cache=asked, **QUICK)), [], [], []

    class Knot:
        def __init__(self):
            self.itself = self
            knots.append(weakref.ref(self))

    def tie(step):
        def step_and_tie(*given):
            Knot()
            return step(*given)
        return step_and_tie

    def empty(cfg, device, really=om.memory.empty_cache):
        really(cfg, device)
        alive.append(sum(knot() is not None for knot in knots))

    run.modes = [mode._replace(step=tie(mode.step)) for mode in run.modes]
    monkeypatch.setattr(om.memory, "empty_cache", empty)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(
        is_available=lambda: False, empty_cache=lambda: emptied.append(device.type)))
    volumes, pairs = first_batches(run)
    gc.disable()
    gc.freeze()  # what there is already, through which each collection would go
    try:
        om.train_step(run, volumes, pairs)
        om.memory.empty_cache(run.cfg, torch.device("cuda", 0))
    finally:
        gc.unfreeze()
        gc.enable()
    assert len(knots) >= 3
    assert alive == [0, 0, 0, 0] if asked else alive[0] < alive[1] < alive[2] == alive[3] == len(knots)
    assert emptied == ["cuda"] * asked


def test_accumulated_batches_give_what_one_batch_does(data):
    weights, terms = [], []
    for batchsize in (4, 2, 1):
        cfg = config(data, data__batchsize=batchsize, data__global_batchsize=4, optim__lr=1e-3, **QUICK)
        torch.manual_seed(0)
        run = begin(cfg)
        om.train_step(run, *first_batches(run))
        weights.append(torch.cat([p.detach().flatten() for p in run.net.parameters()]))
        terms.append([value for value in om.averages(run.progress.sums).values()])
    before = torch.cat([p.detach().flatten() for p in om.build_network(cfg).parameters()])
    for other in (1, 2):
        assert terms[other] == pytest.approx(terms[0], rel=1e-4, abs=1e-6)
        assert (weights[other] - weights[0]).norm() < 0.01 * (weights[0] - before).norm()


def test_a_loss_that_is_not_finite_changes_nothing_and_ends_the_run_in_the_end(data, tmp_path, capfd, monkeypatch):
    run, told = begin(config(data)), []
    before = checkpoint.weights_sha256(run.net.state_dict())

    def step(kind):
        def compute(model, factor, cfg):
            total = sum(p.sum() for p in model.parameters())
            # The last is 0, its gradient is not finite.
            return {"plain": total, "loss": total * factor, "gradient": total * 0 + (total * 0).sqrt()}[kind], {}
        return om.run_mode(run, om.MODES["diffusion"]._replace(step=compute), [1.0, math.nan])

    with monkeypatch.context() as patched:
        patched.setattr(om.watchdog, "event", lambda name, **fields: told.append((name, fields)))
        for kind in ("loss", "gradient"):
            assert not step(kind).moved
            assert checkpoint.weights_sha256(run.net.state_dict()) == before
    assert [name for name, _ in told] == ["nonfinite"] * 2, "each is told once"
    assert told[1][1]["terms"]["total"] == 0 and not math.isfinite(float(told[1][1]["norm"]))
    assert run.progress.sums.counts["total"] == 0
    assert step("plain").moved and checkpoint.weights_sha256(run.net.state_dict()) != before
    assert train(data, tmp_path, optim__lr=1e30, run__max_nonfinite=3) == 43
    message = capfd.readouterr().err
    assert "not finite in 3 steps in a row, in the last one, " in message and "Traceback" not in message
    assert ", that of diffusion" in message
    assert train(data, tmp_path / "short", optim__lr=1e30, run__epochs=1) == 0
    assert "warning: the loss or its gradient was not finite in the last " in capfd.readouterr().err
    assert log_lines(tmp_path, "step")[-1]["nonfinite"] > 0
    word, sentence = state_of(read_run(next((tmp_path / "Models").iterdir())))
    assert word == "stopped" and "not finite in 3 steps in a row" in sentence and "checkpoint" not in sentence


def contrastive(data, subjects, **changes):
    """Config, network, an empty queue, and a batch of two volumes of these subjects for mode 2."""
    cfg = config(data, **changes)
    net, queue = om.build_network(cfg), om.embeddings.new_queue(cfg, "cpu")
    batch = om.deform_batch(torch.rand(2, 1, 8, 8, 8), [(0, 0, 0), (0, 0, 1)], om.DeformDDPM(cfg), cfg)
    return cfg, net, queue, {**batch, "subjects": torch.tensor(subjects), "queue": queue, "targets": None}


def test_contrastive_loss_is_zero_until_the_queue_holds_another_subject(data):
    cfg, net, queue, batch = contrastive(data, [3, 3])
    loss, _, kept = om.step_contrastive(net, batch, cfg)
    assert loss.item() == 0.0
    om.embeddings.push(queue, *kept, batch["subjects"])
    assert om.step_contrastive(net, batch, cfg)[0].item() == 0.0
    assert om.step_contrastive(net, {**batch, "subjects": torch.tensor([4, 5])}, cfg)[0].item() > 0.0


@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_mode_2_divides_by_the_temperature_of_the_config(data, temperature):
    cfg, net, queue, batch = contrastive(data, [3, 4], contrastive__temperature=temperature, loss__contrastive=2.0)
    own = om.embeddings.embed(net, batch, cfg)
    others = [F.normalize(one.detach() + 0.2 * torch.randn_like(one), dim=1) for one in own]
    om.embeddings.push(queue, *others, torch.tensor([7, 8]))
    like = [torch.cat([(one * other).sum(1, keepdim=True), one @ negatives.T], dim=1)
            for one, other, negatives in zip(own, own[::-1], others[::-1])]
    each = [F.cross_entropy(of_one / temperature, torch.zeros(2, dtype=torch.long)) for of_one in like]
    assert all(one > 0.01 for one in each)
    assert om.step_contrastive(net, batch, cfg)[0].item() == pytest.approx(sum(each).item(), rel=1e-4), "2 x 0.5"


def test_mode_2_matches_and_keeps_what_the_averaged_weights_make_of_a_sample(data):
    cfg, net, queue, batch = contrastive(data, [3, 4])
    before = checkpoint.weights_sha256(net.state_dict())
    ema = {name: parameter.detach() + 0.01 * torch.randn_like(parameter) for name, parameter in
           net.named_parameters()}
    om.embeddings.push(queue, *(one.detach() for one in om.embeddings.embed(net, batch, cfg)), torch.tensor([7, 8]))
    own = om.step_contrastive(net, batch, cfg)[0].item()
    assert om.embeddings.target_embeddings(net, None, [batch, batch], cfg) == [None, None]
    batch["targets"], = om.embeddings.target_embeddings(net, ema, [batch], cfg)
    loss, _, kept = om.step_contrastive(net, batch, cfg)
    assert checkpoint.weights_sha256(net.state_dict()) == before, "the weights are back"
    loss.backward()
    assert all(parameter.grad.any() for parameter in net.embedding.parameters())
    with om.optim.ema_weights(net, ema):
        expected = om.embeddings.embed(net, batch, cfg)
    assert all(torch.equal(*pair) for pair in zip(kept, expected)) and not any(one.requires_grad for one in kept)
    assert not torch.equal(kept[0], om.embeddings.embed(net, batch, cfg)[0]) and loss.item() != own


@pytest.mark.slow
def test_every_key_is_read(data, tmp_path, monkeypatch):
    """A key nobody reads is a lie in the config file."""
    read = set()

    class Recorder(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def __or__(self, other):
            return Recorder({**self, **other})

    changes = {"run__models": tmp_path / "Models", "run__logs": tmp_path / "Logs", "data__cache": tmp_path / "cache",
               "data__num_workers": 1, "run__epochs": 1, "data__repeats": 1, "loss__dice": 0.1, "loss__segment": 0.1,
               "model__structures": 6, **QUICK}
    plain = config(data, **changes)
    assert OM_prepare.main(arguments(data, "--workers", "1", **changes)) == 0
    monkeypatch.setattr(om, "load_config", lambda *a: Recorder(plain))
    monkeypatch.setattr(attempts, "load_config", lambda *a: Recorder(plain))
    assert om.main(["--config", "any"]) == 0
    handler = signal.getsignal(signal.SIGCHLD)
    workers = multiprocessing.active_children()
    end_workers()  # as when a program exits
    for worker in workers:
        worker.join(20)
    signal.signal(signal.SIGCHLD, handler)
    run = begin(plain)
    run.cfg = Recorder(plain)
    om.training_state.refuse_nonfinite(run, ["registration"])
    attempts.launcher_begin(["--config", "any", "--launcher-pid", str(os.getpid()), "--tasks", "1"])
    fixed, moving = ((volume, np.eye(4)) for volume in torch.rand(2, 12, 12, 12).numpy())
    register(fixed, moving, (build_network(plain), Recorder(plain)), affine=False, refine=2)
    read |= {key for key in plain if key.startswith("copies.")}  # of OM_augment.py; tests/test_om_augment.py has them
    read.add("run.notify")  # of the launch's config.yaml, when an attempt ends; tests/test_rules.py has it
    assert not set(plain) - read, f"keys that nothing reads: {sorted(set(plain) - read)}"


def test_fresh_starts_in_a_new_folder_and_init_from_takes_the_averaged_weights_alone(data, tmp_path, finished, capfd):
    source, newest, one_step = finished / "000002_demo_om_net.pth", "tmp/000000_step0001_demo_om_net.pth", [
        "--fresh", "--max-steps-before-restart", "1"]
    assert train(data, tmp_path, *one_step) == 42
    new = tmp_path / "Models/demo_om_net-2"
    assert checkpoint.newest(new) == newest and checkpoint.newest(finished) == source.name, "the old one stays"
    assert train(data, tmp_path, "--init-from", str(source)) == 43
    assert "--fresh" in capfd.readouterr().err
    assert train(data, tmp_path, "--init-from", str(source), *one_step, optim__lr=1e-12) == 42
    state = checkpoint.load(tmp_path / "Models/demo_om_net-3" / newest)
    assert state["step"] == 1 and state["queue"]["next"] == 2
    averaged = checkpoint.load(source)["ema"]  # what --model loads of it, too
    assert all(torch.allclose(state["model"][name], tensor, atol=1e-9) for name, tensor in averaged.items())
    assert "warning" not in capfd.readouterr().err
    others = {"data__train_ids": "2-7", "data__val_ids": "0-1"}
    assert train(data, tmp_path, "--init-from", str(source), *one_step, **others) == 42
    assert f"{source} was trained on subject_0000, subject_0001, held out in this run" in capfd.readouterr().err


def test_the_command_that_began_a_run_continues_it_also_with_init_from(data, tmp_path, whole, monkeypatch, capfd):
    def command(source):
        words = options(data, tmp_path, "--init-from", source, "--max-steps-before-restart", "1", **QUICK)
        monkeypatch.setattr(sys, "argv", ["OM_train_3modes.py", *map(str, words)])
        return om.main()

    source = whole / "Models/demo_om_net/000002_demo_om_net.pth"
    without = tmp_path / "Models/demo_om_net/launches/0000/launch.json"  # it died before it wrote a checkpoint
    without.parent.mkdir(parents=True)
    without.write_text(json.dumps({"step": 0, "command": ["OM_train_3modes.py"]}))
    assert [command(source), command(source)] == [42, 42]
    assert [line["step"] for line in log_lines(tmp_path, "step")] == [0, 1]
    assert command(tmp_path / "other.pth") == 43
    assert "has checkpoints already; leave --init-from out to continue that run" in capfd.readouterr().err


def test_torchrun_starts_a_fresh_run_once_and_then_continues_it(data, tmp_path, finished, monkeypatch):
    """It restarts ranks with the words of the first time."""
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert train(data, tmp_path, "--fresh", "--max-steps-before-restart", "1") == 42
    assert sorted(os.listdir(tmp_path / "Models")) == ["demo_om_net", "demo_om_net-2"]
    assert checkpoint.newest(tmp_path / "Models/demo_om_net-2") == "tmp/000000_step0002_demo_om_net.pth"


def test_checkpoints_of_another_network_or_config_are_refused(data, tmp_path, finished, capfd):
    step = (finished / "step.json").read_text()
    assert train(data, tmp_path, model__rec_num=3, data__global_batchsize=4) == 43
    assert (finished / "step.json").read_text() == step, "what a refused launch was given changes no run"
    message = capfd.readouterr().err
    assert "model.rec_num" in message and "1" in message and "3" in message and "--fresh" in message
    source = str(finished / "000002_demo_om_net.pth")
    assert train(data, tmp_path, "--init-from", source, model__name="recresacnet") == 43
    assert "another network" in capfd.readouterr().err


@pytest.mark.parametrize("changes, words", [
    ({"data__root": "no/such/folder"}, ["no/such/folder"]),
    ({"data__expect_samples": 100}, ["6 training volumes", "100"]),
    ({"model__name": "om_nett"}, ["om_nett", "om_net, recresacnet, recmulmodmutattnnet"]),
    ({key: value for _, keys in OFF.values() for key, value in keys.items()},
     ["loss.contrastive, loss.imgsim, ", " are all 0, so no mode is trained"]),
    ({"data__val_ids": "5-7"}, ["subject_0005", "data.val_ids"]),
    ({"data__train_ids": "3", "data__expect_samples": 1}, ["one training volume"]),
    ({"data__pair_list": "no_pairs.json"}, ["no_pairs.json"]),
    ({"run__device": "xpu"}, ["xpu", "run.device"]),
])
def test_bad_input_is_one_sentence(data, tmp_path, capfd, changes, words):
    if "run__device" in changes and torch.xpu.is_available():
        pytest.skip("this machine has that device")
    assert train(data, tmp_path, **changes) == 43
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and all(word in message for word in words), message
    assert not list((tmp_path / "Models").rglob("*")), "a refused first start leaves nothing"


@pytest.mark.slow
def test_a_volume_that_a_worker_cannot_read_is_one_sentence_too(tmp_path):
    make_data(tmp_path, size=8)
    path = tmp_path / "data/imagesTr/subject_0002.nii.gz"
    path.write_bytes(path.read_bytes()[:-100])
    words = options(tmp_path, tmp_path, **QUICK, data__in_memory="false", data__num_workers=1)
    # A process of its own: it also has to end, which it only does once its workers have.
    printed = warm.train(1, tmp_path / "log", words, expected=43)
    # Not always the last line: Python's resource tracker may warn after it, as the process ends.
    said = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "subject_0002.nii.gz: truncated" in said[0], printed


def test_a_bad_profile_is_told_before_anything_is_read(tmp_path, capsys):
    assert train(tmp_path / "nowhere", tmp_path, "--profile", "5") == 43
    assert "write START:STEPS" in capsys.readouterr().err and not (tmp_path / "Models").exists()


def test_pair_list_is_followed(data, tmp_path, capsys):
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([{"fixed": "subject_0001", "moving": "subject_0004"}] * 3))
    assert train(data, tmp_path, run__epochs=1, data__pair_list=pairs) == 0
    assert len(log_lines(tmp_path, "step")) == 3, "an epoch ends with the shorter loader"
    assert "data.pair_list has pairs for 3 steps, after which each epoch ends, although all volumes would take 6" in (
        capsys.readouterr().out)
    listed = read_datasets(config(data, data__pair_list=pairs))[2]
    assert listed == [(4, 1)] * 3
    words = "--max-steps-before-restart", "4"
    assert train(data, tmp_path / "alone", *words, data__pair_list=pairs, **ALONE) == 42
    assert not log_lines(tmp_path / "alone", "epoch"), "mode 1 alone takes no pairs"
    assert "pairs for" not in capsys.readouterr().out


# Mode 1 alone, for a network that sees one volume.
ALONE = {f"loss__{weight}": 0 for weight in ("contrastive", "imgsim", "imgmse", "ddf")}


@pytest.mark.parametrize("name, condition, changes", [("recresacnet", "none", ALONE),
                                                      ("recmulmodmutattnnet", "volume", {})])
def test_other_networks_train(data, tmp_path, name, condition, changes):
    assert train(data, tmp_path, "--max-steps-before-restart", "2", model__name=name, model__condition_type=condition,
                 **changes) == 42
    assert checkpoint.newest(tmp_path / f"Models/demo_{name}")


def test_a_network_that_cannot_embed_is_validated(data, tmp_path, monkeypatch):
    class Shift(torch.nn.Module):
        def __init__(self, dims):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(dims))

        def forward(self, image, t, condition=None, use_condition=None):
            return self.shift.view(1, -1, 1, 1, 1).expand(len(image), -1, *image.shape[2:])

    monkeypatch.setitem(NETWORKS, "shift", Shift)
    assert train(data, tmp_path, model__name="shift", run__epochs=1, data__repeats=1, **OFF["contrastive"][1]) == 0
    manifest = json.loads((tmp_path / "Models/demo_shift/manifest.json").read_text())
    scores = manifest["checkpoints"][manifest["best"]["checkpoint"]]["metrics"]
    assert scores["val_retrieval"] is None and scores["val_ang"] is not None


def test_a_network_that_sees_one_volume_is_judged_by_its_recovery(data, tmp_path):
    assert train(data, tmp_path, model__condition_type="none", run__epochs=1, data__repeats=1, **ALONE) == 0
    manifest = json.loads((tmp_path / "Models/demo_om_net/manifest.json").read_text())
    entry = manifest["checkpoints"][manifest["best"]["checkpoint"]]
    assert manifest["best"]["metric"] == "-val_ang" and list(entry["metrics"]) == ["val_ang"]
    assert manifest["best"]["value"] == -entry["metrics"]["val_ang"]


def test_two_dimensions(tmp_path):
    make_data(tmp_path, dims=2, size=24)
    assert om.main(arguments(tmp_path, model__dims=2, data__img_size=24, run__epochs=1, data__repeats=1)) == 0
    entry = log_lines(tmp_path, "epoch")[0]
    assert all(entry[name] is not None for name in om.TERMS) and entry["val_dice"] is not None


@pytest.mark.slow
def test_a_checkpoint_beyond_the_end_of_a_shortened_epoch_goes_on_with_the_next(data, tmp_path):
    assert train(data, tmp_path, "--max-steps-before-restart", "5") == 42
    assert train(data, tmp_path, data__repeats=1) == 0
    assert [line["epoch"] for line in log_lines(tmp_path, "step")] == [0] * 5 + [1] * 3
