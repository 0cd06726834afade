"""Runtime/checkpoint.py on real files and real processes: nothing that was not read back counts."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from Runtime import checkpoint
from Runtime.errors import InputError

CONFIG = {"model.name": "om_net", "model.channels": [8, 16], "lr": 1e-5}
SAVE_LOOP = """
import sys
from test_checkpoint import checkpoint, name, small_state
run, same_name, step = sys.argv[1], sys.argv[2] == "same", int(sys.argv[3])
while True:
    step += 1
    relative = name(1) if same_name else checkpoint.step_name(1, step, "all", "net")
    checkpoint.save(run, relative, small_state(step, 700_000))
    print(step, flush=True)
"""
SAVE_ONCE = """
import resource, sys
from test_checkpoint import checkpoint, flip, name, Path, small_state
state = small_state(20, 300_000)
def flip_one_bit_before_the_first_read(event, arguments):
    if event == "open" and ".pth.tmp-" in str(arguments[0]) and arguments[1] == "r" and not flipped:
        flipped.append(True)
        flip(Path(arguments[0]), state["model"]["w"])
flipped = []
if sys.argv[3] == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
else:
    sys.addaudithook(flip_one_bit_before_the_first_read)
try:
    checkpoint.save(sys.argv[1], name(int(sys.argv[2])), state)
except OSError as error:
    print(error)
"""
# Dies at the n-th file operation of a save that replaces a checkpoint, n = 1, 2, ... until a save gets through.
DIE_AT_EACH_OPERATION = """
import json, os, signal, sys
from test_checkpoint import checkpoint, name, small_state
run = sys.argv[1]
def die_at(left):
    def hook(event, arguments):
        nonlocal left
        if event in ("open", "os.rename") and str(arguments[0]).startswith(run):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
checkpoint.save(run, name(1), small_state(0, 50), best=("dice", 0))
status, last = 1, 0
while status and last < 100:
    last += 1
    child = os.fork()
    if child == 0:
        die_at(last)
        checkpoint.save(run, name(1), small_state(last, 50), best=("dice", last))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    said = []
    step = checkpoint.load(os.path.join(run, checkpoint.newest(run, said.append)))["step"]
    checkpoint.save(run, name(0), small_state(0, 1) | {"epoch": 0})
    with open(os.path.join(run, "manifest.json")) as handle:
        best = int(json.load(handle)["best"]["value"])
    print(last, int(os.WIFSIGNALED(status)), step, best, len(said), flush=True)
"""


def small_state(step, size):
    return {"format": 1, "model": {"w": torch.full((size,), float(step))}, "optimizer": {}, "epoch": 1,
            "step_in_epoch": step, "step": step, "config": {}}


def make_state(epoch=1, step=10, step_in_epoch=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=generator)
    weight[0, 0] = float("nan")
    model = {"b.weight": weight, "a.half": torch.randn(33, generator=generator).bfloat16(),
             "count": torch.tensor(3), "empty": torch.empty(0, 4), "flag": torch.tensor([True, False]),
             "channels_last": torch.randn(1, 2, 3, 4, generator=generator).to(memory_format=torch.channels_last)}
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(layer.parameters(), lr=1e-5)
    layer(torch.randn(4, 3, generator=generator)).square().sum().backward()
    adam.step()
    return {"format": 1, "model": model, "optimizer": adam.state_dict(), "epoch": epoch, "step_in_epoch": step_in_epoch,
            "step": step, "config": dict(CONFIG), "sums": {"total": float("nan"), "ang": 0.1}}


def save_epochs(run, *epochs, **options):
    for epoch in epochs:
        checkpoint.save(run, name(epoch), make_state(epoch, 10 * epoch, seed=epoch), **options)


def name(epoch):
    return checkpoint.epoch_name(epoch, "all", "net")


def flip(path, tensor):
    """Flip one bit of `tensor` in the file that holds it."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 2] ^= 4
    path.write_bytes(content)


def flip_epoch(run, epoch):
    flip(run / name(epoch), make_state(seed=epoch)["model"]["b.weight"])


def same_bits(first, second):
    first_bytes, second_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first_bytes, second_bytes)


def child(code, *arguments):
    tests = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=env)


@pytest.fixture
def run(tmp_path):
    return checkpoint.run_folder(tmp_path / "Models", "all", "net")


def test_names_and_generations(tmp_path):
    assert checkpoint.epoch_name(36, "all", "om_net") == "000036_all_om_net.pth"
    assert checkpoint.step_name(4, 20, "all", "om_net") == "tmp/000004_step0020_all_om_net.pth"
    root = tmp_path / "deep" / "Models"
    for net, fresh, folder in (("net", True, "all_net"), ("net", False, "all_net"), ("net_big", False, "all_net_big"),
                               ("net", True, "all_net-2"), ("net", True, "all_net-3"), ("net", False, "all_net-3")):
        assert checkpoint.run_folder(root, "all", net, fresh) == root / folder and (root / folder / "tmp").is_dir()
    for folder in ("all_net-10", "all_net-old"):
        (root / folder).mkdir()
    assert checkpoint.run_folder(root, "all", "net") == root / "all_net-10"
    assert checkpoint.run_folder(root, "all", "net", fresh=True) == root / "all_net-11"
    assert (root / "all_net-11" / "tmp").is_dir()


def test_round_trip_is_bitwise(run):
    state = make_state(seed=7)
    entry = checkpoint.save(run, name(1), state, metrics={"dice": 0.5, "hd95": float("nan")}, best=("dice", 0.5))
    loaded = checkpoint.load(run / name(1))
    assert list(loaded["model"]) == list(state["model"])
    for key, tensor in state["model"].items():
        assert same_bits(tensor, loaded["model"][key]), key
    assert same_bits(state["optimizer"]["state"][0]["exp_avg"], loaded["optimizer"]["state"][0]["exp_avg"])
    torch.optim.Adam(torch.nn.Linear(3, 2).parameters()).load_state_dict(loaded["optimizer"])
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert (loaded["epoch"], loaded["step"], loaded["config"]) == (1, 10, CONFIG)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest == {"checkpoints": {name(1): entry},
                        "best": {"checkpoint": name(1), "metric": "dice", "value": 0.5}}
    assert entry["metrics"] == {"dice": 0.5, "hd95": None} and entry["bytes"] == (run / name(1)).stat().st_size
    assert entry["weights_sha256"] == checkpoint.weights_sha256(loaded["model"])
    assert checkpoint.verify(run, name(1)) is None and checkpoint.newest(run) == name(1)
    assert not list(run.rglob("*.tmp-*"))
    before = {path: path.read_bytes() for path in (run / name(1), run / "manifest.json")}
    for path in before:
        path.with_suffix(".old").hardlink_to(path)
    save_epochs(run, 1)  # replaced by a rename, never written in place
    assert all(path.with_suffix(".old").read_bytes() == old != path.read_bytes() for path, old in before.items())


def test_what_cannot_be_saved_is_refused(run):
    with pytest.raises(TypeError, match=r"state\.extra\.where is a PosixPath"):
        checkpoint.save(run, name(1), {**make_state(), "extra": {"where": Path("x")}})
    incomplete = make_state()
    del incomplete["step_in_epoch"]
    with pytest.raises(ValueError, match="lacks step_in_epoch"):
        checkpoint.save(run, name(1), incomplete)
    assert not list(run.rglob("*.pth*")) and checkpoint.newest(run) is None
    (run / "file").write_bytes(b"x")
    with pytest.raises(OSError, match=r"file/000001_all_net\.pth could not be written"):
        checkpoint.save(run / "file", name(1), make_state())


def test_newest_is_by_epoch_then_step_not_by_time(run):
    within = checkpoint.step_name(2, 5, "all", "net")
    for relative, state in ((within, make_state(2, 25, 5)), (name(2), make_state(2, 20)), (name(1), make_state())):
        checkpoint.save(run, relative, state)
    assert checkpoint.newest(run) == within
    save_epochs(run, 3)
    assert checkpoint.newest(run) == name(3)


@pytest.mark.parametrize("damage, reason", [
    (lambda path: path.write_bytes(path.read_bytes()[:100]), "truncated: 100 of "),
    (lambda path: path.write_bytes(b""), "truncated: 0 of "),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long: "),
    (lambda path: flip_epoch(path.parent, 2), "SHA-256 differs"),
    (lambda path: path.unlink(), "missing"),
])
def test_damaged_file_is_skipped_and_named(run, damage, reason):
    save_epochs(run, 1, 2)
    damage(run / name(2))
    said = []
    assert checkpoint.newest(run, said.append) == name(1)
    assert checkpoint.verify(run, name(2)).startswith(reason)
    assert len(said) == 1 and f"{run / name(2)} is skipped: {reason}" in said[0]


def test_foreign_file_is_skipped_and_default_warning_goes_to_stderr(run, capsys):
    save_epochs(run, 1)
    torch.save({"weights": torch.ones(2)}, run / "other.pth")
    assert checkpoint.newest(run) == name(1)
    assert f"{run / 'other.pth'} is skipped: not in the manifest" in capsys.readouterr().err
    assert checkpoint.verify(run, "other.pth") == "not in the manifest"


def test_none_that_verifies_never_starts_over(run):
    assert checkpoint.newest(run) is None
    save_epochs(run, 1, 2)
    flip_epoch(run, 1)
    (run / name(2)).unlink()
    said = []
    with pytest.raises(InputError, match="--fresh") as raised:
        checkpoint.newest(run, said.append)
    assert str(run) in str(raised.value) and len(said) == 2


@pytest.mark.parametrize("content", [None, b"", b'{"checkpoints": {', b"[]", b'{"checkpoints": {"a": 3}, "best": 0}'])
def test_lost_manifest_is_rebuilt_from_the_files_that_load(run, content):
    save_epochs(run, 1, 2, 3, 4)
    before = json.loads((run / "manifest.json").read_text())["checkpoints"]
    checkpoint.save(run, checkpoint.step_name(2, 3, "all", "net"), make_state(2, 23, 3))
    flip_epoch(run, 3)
    (run / name(4)).write_bytes(b"")
    torch.save({"weights": torch.ones(2)}, run / "other.pth")
    (run / "manifest.json").unlink() if content is None else (run / "manifest.json").write_bytes(content)
    said = []
    assert checkpoint.newest(run, said.append) == checkpoint.step_name(2, 3, "all", "net")
    after = json.loads((run / "manifest.json").read_text())["checkpoints"]
    assert sorted(after) == [name(1), name(2), checkpoint.step_name(2, 3, "all", "net")]
    assert after[name(2)] == before[name(2)]
    assert all(any(str(run / skipped) in line for line in said) for skipped in (name(3), name(4), "other.pth"))
    assert "CRC" in " ".join(said) and "manifest.json" in said[0]
    (run / "manifest.json").unlink()
    save_epochs(run, 5)
    assert {*after, name(5)} == set(json.loads((run / "manifest.json").read_text())["checkpoints"])


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("fault, expected", [
    ("full disk", "File too large; .* GiB free"), ("bad disk", r"state\.model\.w reads back differently")])
def test_failed_write_leaves_the_previous_checkpoint(run, epoch, fault, expected):
    save_epochs(run, 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    process = child(SAVE_ONCE, run, epoch, fault)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and re.search(expected, output) and str(run / name(epoch)) in output, output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert checkpoint.newest(run) == name(1)


@pytest.mark.parametrize("naming", ["new", "same"])
def test_kill_at_any_moment_leaves_a_good_checkpoint(run, naming):
    rng, done = random.Random(4), 0
    for _ in range(5):
        process = child(SAVE_LOOP, run, naming, done)
        seen = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        announced = int((rest.split() or [seen])[-1])
        said = []
        state = checkpoint.load(run / checkpoint.newest(run, said.append))
        assert said == [] and announced <= state["step"] <= announced + 1
        assert torch.equal(state["model"]["w"], torch.full((700_000,), float(state["step"])))
        checkpoint.clean_leftovers(run)
        assert not list(run.rglob("*.tmp-*"))
        done = state["step"]


def test_death_at_every_file_operation_leaves_the_old_or_the_new(run):
    output, _ = child(DIE_AT_EACH_OPERATION, run).communicate(timeout=60)
    lines = [[int(value) for value in line.split()] for line in output.splitlines()]
    assert len(lines) >= 8 and [line[1] for line in lines] == [1] * (len(lines) - 1) + [0], output
    current = 0
    for last, _, step, best, warnings in lines:
        assert step in (current, last) and best == step and warnings == 0, output
        current = step
    assert current == lines[-1][0] and any(killed and step == last for last, killed, step, *_ in lines), output


def test_clean_leftovers_spares_the_living(run):
    gone = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    dead, alive = run / f"a.pth.tmp-{int(gone.stdout)}", run / "tmp" / f"b.pth.tmp-{os.getpid()}"
    old, notes = run / f"c.pth.tmp-{os.getpid()}", run / "notes.tmp-mine"
    for path in (dead, alive, old, notes):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 90000 * (path in (old, notes)),) * 2)
    assert sorted(checkpoint.clean_leftovers(run)) == sorted([dead, old])
    assert alive.exists() and notes.exists() and not dead.exists() and not old.exists()


def test_load_names_what_is_wrong(run):
    path = run / "x.pth"
    with pytest.raises(InputError, match="x.pth cannot be read: FileNotFoundError"):
        checkpoint.load(path)
    torch.save({"model": Path("evil")}, path)
    with pytest.raises(InputError, match="x.pth cannot be read: UnpicklingError: Weights only load failed"):
        checkpoint.load(path)
    for foreign in ({"state_dict": {}}, {"model": {}}, torch.ones(2), {"format": 1, "model": 3}):
        torch.save(foreign, path)
        with pytest.raises(InputError, match="x.pth is not a checkpoint of this project"):
            checkpoint.load(path)
    torch.save({**make_state(), "format": 2}, path)
    with pytest.raises(InputError, match="x.pth has format 2"):
        checkpoint.load(path)


def test_compatibility_messages():
    state, keys = make_state(), ["model.channels", "model.name"]
    assert checkpoint.check_compatible(state, {**CONFIG, "model.channels": (8, 16)}, "f.pth", keys) == []
    said = checkpoint.check_compatible(state, {**CONFIG, "lr": 0.0001, "seed": 1}, "f.pth", iter(keys))
    assert said == ["lr: 1e-05 -> 0.0001", "seed: not set -> 1"]
    with pytest.raises(InputError, match=r"f\.pth does not match the config \(model\.channels is \[8, 16\] in the "
                                         r"checkpoint and \[8\] in the config\).*--fresh"):
        checkpoint.check_compatible(state, {**CONFIG, "model.channels": [8]}, "f.pth", keys)
    with pytest.raises(InputError, match=r"f\.pth is a checkpoint of another network .*om_net.*unet.*--fresh"):
        checkpoint.check_compatible(state, {**CONFIG, "model.channels": [8], "model.name": "unet"}, "f.pth", keys)
    with pytest.raises(InputError, match="f.pth holds no config"):
        checkpoint.check_compatible({"format": 1, "model": {}}, CONFIG, "f.pth", keys)


def test_weights_that_do_not_fit_are_one_sentence():
    model = torch.nn.Linear(3, 2)
    before = checkpoint.weights_sha256(model.state_dict())
    good = {key: tensor + 1 for key, tensor in model.state_dict().items()}
    for weights, message in (
            ({"weight": good["weight"]}, r"bias is missing; 1 missing, 0 unexpected, 0 mis-shaped"),
            ({**good, "scale": good["bias"]}, r"scale is unexpected; 0 missing, 1 unexpected, 0 mis-shaped"),
            ({**good, "weight": torch.ones(2, 4)}, r"weight is \(2, 4\) in the file and \(2, 3\) in the network")):
        with pytest.raises(InputError, match=r"f\.pth.*" + message) as raised:
            checkpoint.load_weights(model, {"model": weights}, "f.pth")
        assert "\n" not in str(raised.value) and checkpoint.weights_sha256(model.state_dict()) == before
    checkpoint.load_weights(model, {"model": good}, "f.pth")
    assert checkpoint.weights_sha256(model.state_dict()) == checkpoint.weights_sha256(good) != before


def test_weights_sha256_sees_every_bit_and_nothing_else():
    weights = make_state()["model"]
    digest = checkpoint.weights_sha256(weights)
    assert checkpoint.weights_sha256(dict(reversed(weights.items()))) == digest
    assert checkpoint.weights_sha256({key: tensor.contiguous().clone() for key, tensor in weights.items()}) == digest
    for key in ("b.weight", "a.half"):
        changed = {**weights, key: weights[key].clone()}
        changed[key].view(torch.uint8)[-1] ^= 1
        assert checkpoint.weights_sha256(changed) != digest, key
    assert checkpoint.weights_sha256({**weights, "b.weight": weights["b.weight"].reshape(7, 5)}) != digest
    assert checkpoint.weights_sha256({**weights, "a.half": weights["a.half"].view(torch.float16)}) != digest
    assert checkpoint.weights_sha256({f"c.{key}": tensor for key, tensor in weights.items()}) != digest


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_written_on_an_accelerator_reads_on_the_cpu(run):
    state = make_state()
    moved = {key: tensor.to(torch.accelerator.current_accelerator()) for key, tensor in state["model"].items()}
    entry = checkpoint.save(run, name(1), {**state, "model": moved})
    assert all(tensor.device.type == "cpu" for tensor in checkpoint.load(run / name(1))["model"].values())
    assert entry["weights_sha256"] == checkpoint.weights_sha256(moved) == checkpoint.weights_sha256(state["model"])


def test_the_best_is_the_highest_of_its_metric_and_a_new_metric_starts_over(run):
    found = []
    for epoch, best in enumerate([("dice", 0.5), ("dice", 0.7), ("dice", 0.6), None, ("imgsim", 0.1)], 1):
        save_epochs(run, epoch, best=best)
        found.append(json.loads((run / "manifest.json").read_text())["best"])
    assert [entry["checkpoint"] for entry in found] == [name(1), name(2), name(2), name(2), name(5)]
    assert [entry["value"] for entry in found] == [0.5, 0.7, 0.7, 0.7, 0.1]


def test_prune_keeps_what_it_must(run):
    save_epochs(run, 1, 2)
    save_epochs(run, 3, best=("dice", 0.8))
    save_epochs(run, 4, 5, 6, 7)
    steps = [checkpoint.step_name(7, step, "all", "net") for step in (1, 2, 3)]
    for step, relative in enumerate(steps, 1):
        checkpoint.save(run, relative, make_state(7, 70 + step, step))
    removed = checkpoint.prune(run, keep_last=2, keep_every=4, keep_tmp=1)
    assert sorted(removed) == sorted([name(1), name(2), name(5), *steps[:2]])
    left = sorted(path.relative_to(run).as_posix() for path in run.rglob("*.pth"))
    assert left == [name(3), name(4), name(6), name(7), steps[2]]
    assert sorted(json.loads((run / "manifest.json").read_text())["checkpoints"]) == left
    assert checkpoint.prune(run, keep_last=2, keep_every=4, keep_tmp=1) == []
    assert checkpoint.prune(run, keep_last=0, keep_every=0, keep_tmp=0) == [steps[2], name(7), name(6), name(4)]


def test_prune_never_removes_the_only_good_one(run):
    save_epochs(run, 1, 2, 3)
    flip_epoch(run, 3)
    assert checkpoint.prune(run, keep_last=1, keep_every=0, keep_tmp=0) == [name(1)]
    assert checkpoint.newest(run, lambda message: None) == name(2)
    flip_epoch(run, 2)
    assert checkpoint.prune(run, keep_last=0, keep_every=0, keep_tmp=0) == []
    assert (run / name(2)).exists() and (run / name(3)).exists()
