"""Runtime/checkpoint.py on real files and real processes: nothing that was not read back counts."""
import concurrent.futures
import errno
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
import torch

from Diffusion import training_state
from Runtime import checkpoint
from Runtime.errors import InputError, is_out_of_memory
from Runtime.files import remove_leftovers
from Runtime.manifest import durable_step
from Runtime.run_lock import hold, lock, run_folder
from tests import launching, warm
from tests.tiny import ROOT

CONFIG = {"model.name": "om_net", "model.channels": [8, 16], "lr": 1e-5}
# A folder of four megabytes and checkpoints of 1.2: the fourth has no room. Prints what happened in each act.
FULL_DISK = """
import json, subprocess, sys
from pathlib import Path
import torch
from Runtime import checkpoint
run = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", run], check=True)
def attempt(epoch, keep, size=300_000):
    state = {"format": 1, "model": {"w": torch.full((size,), float(epoch))}, "optimizer": {}, "epoch": epoch,
             "step_in_epoch": epoch, "step": epoch, "config": {}}
    name = checkpoint.epoch_name(epoch, "all", "net")
    error = checkpoint.save_in_background(run, name, state, keep=keep).exception()
    left = sorted(path.name for path in run.glob("*.pth*"))
    verified = [checkpoint.verify(run, name) for name in left]
    said = error and [error.errno, str(error)]
    print(json.dumps([said, [int(file[:6]) for file in left], verified, checkpoint.newest(run)]), flush=True)
for epoch, keep in ((1, None), (2, None), (3, None), (4, None), (4, (3, 0, 0)), (4, (2, 0, 0))):
    attempt(epoch, keep)
attempt(5, (2, 0, 0))
with open(run / "filler", "wb", buffering=0) as handle:
    try:
        while True:
            handle.write(bytes(4096))
    except OSError:
        pass
attempt(6, (1, 0, 0), size=200_000)
"""


def small_state(step, size):
    return {"format": 1, "model": {"w": torch.full((size,), float(step))}, "optimizer": {}, "epoch": 1,
            "step_in_epoch": step, "step": step, "config": {}}


def make_state(epoch=1, step=10, step_in_epoch=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = {"b.weight": torch.randn(5, 7, generator=generator),
             "a.half": torch.randn(33, generator=generator).bfloat16(), "count": torch.tensor(3),
             "empty": torch.empty(0, 4), "flag": torch.tensor([True, False]),
             "channels_last": torch.randn(1, 2, 3, 4, generator=generator).to(memory_format=torch.channels_last)}
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(layer.parameters(), lr=1e-5)
    layer(torch.randn(4, 3, generator=generator)).square().sum().backward()
    adam.step()
    adam.state[layer.weight]["exp_avg"][0, 0] = float("nan")  # only weights must be finite
    return {"format": 1, "model": model, "optimizer": adam.state_dict(), "epoch": epoch, "step_in_epoch": step_in_epoch,
            "step": step, "config": dict(CONFIG), "sums": {"total": float("nan"), "ang": 0.1}}


def save_epochs(run, *epochs, **options):
    for epoch in epochs:
        checkpoint.save(run, name(epoch), make_state(epoch, 10 * epoch, seed=epoch), **options)


def manifest(run):
    return json.loads((run / "manifest.json").read_text())


def name(epoch):
    return checkpoint.epoch_name(epoch, "all", "net")


def within(epoch, step):
    return checkpoint.step_name(epoch, step, "all", "net")


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


def save_once(run, fault):
    """Save on a disk that is full, that flips a bit, or that loses half of what it was given."""
    state, damaged = small_state(20, 300_000), []

    def damage_before_the_first_read(event, arguments):
        if event == "open" and ".pth.tmp-" in str(arguments[0]) and arguments[1] == "r" and not damaged:
            damaged.append(True)
            path = Path(arguments[0])
            if fault == "lost half":
                os.truncate(path, path.stat().st_size // 2)
            else:
                flip(path, state["model"]["w"])

    if fault == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    else:
        sys.addaudithook(damage_before_the_first_read)
    try:
        checkpoint.save_in_background(run, name(1), state, keep=(1, 0, 0)).result()
    except OSError as error:
        print(error)


def die_at_each_operation(run):
    """Die at the n-th file operation of a save that replaces a checkpoint, n = 1, 2, ... until a save gets through."""
    def die_at(left):
        def hook(event, arguments):
            nonlocal left
            if event in ("open", "os.rename") and str(arguments[0]).startswith(str(run)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)

    checkpoint.save(run, name(1), small_state(0, 50), best=("dice", 0, "here"))
    status, last = 1, 0
    while status and last < 100:
        last += 1
        pid = os.fork()
        if pid == 0:
            die_at(last)
            checkpoint.save(run, name(1), small_state(last, 50), best=("dice", last, "here"))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        said = []
        step = checkpoint.load(run / checkpoint.newest(run, said.append))["step"]
        checkpoint.save(run, name(0), small_state(0, 1) | {"epoch": 0})
        best = int(manifest(run)["best"]["value"])
        print(last, int(os.WIFSIGNALED(status)), step, best, len(said), flush=True)


def save_without_end(run, step):
    """Save under new names and one old one; the tensors change in place as soon as the call is back."""
    state = small_state(step, 700_000)
    while True:
        step += 1
        state |= {"step": step, "step_in_epoch": step}
        state["model"]["w"].fill_(step)
        relative = within(1, step) if step % 3 else name(1)
        print("saving", step, flush=True)
        future = checkpoint.save_in_background(run, relative, state, keep=(1, 0, 2))
        state["model"]["w"].fill_(-1)
        future.result()
        print("saved", step, flush=True)


def child(target, run, *arguments):
    """A forked process that calls target(run, *arguments), and a file of what it prints."""
    pipe = run.parent / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    process = warm.start(target, [run, *arguments], pipe, dict(os.environ))
    return process, open(pipe)


def ended(process, output, code=0):
    """The rest of what a process prints until it ends with this exit code."""
    with output:
        rest = output.read()
    process.join(60)
    assert process.exitcode == code, rest
    return rest


@pytest.fixture
def run(tmp_path):
    return run_folder({"run.models": tmp_path / "Models", "data.name": "all", "model.name": "net"})


def test_round_trip_is_bitwise(run):
    state = make_state(seed=7)
    metrics = {"dice": 0.5, "hd95": float("nan")}
    entry = checkpoint.save(run, name(1), state, metrics=metrics, best=("dice", 0.5, "here"))
    loaded = checkpoint.load(run / name(1))
    assert list(loaded["model"]) == list(state["model"])
    for key, tensor in state["model"].items():
        assert same_bits(tensor, loaded["model"][key]), key
    assert same_bits(state["optimizer"]["state"][0]["exp_avg"], loaded["optimizer"]["state"][0]["exp_avg"])
    assert loaded["optimizer"]["state"][0]["exp_avg"][0, 0].isnan() and math.isnan(loaded["sums"]["total"])
    torch.optim.Adam(torch.nn.Linear(3, 2).parameters()).load_state_dict(loaded["optimizer"])
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert (loaded["epoch"], loaded["step"], loaded["config"]) == (1, 10, CONFIG)
    assert manifest(run) == {
        "checkpoints": {name(1): entry},
        "best": {"checkpoint": name(1), "metric": "dice", "value": 0.5, "measured_on": "here"}}
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
    states = {within(2, 5): make_state(2, 25, 5), name(2): make_state(2, 20), name(1): make_state()}
    for relative, state in states.items():
        checkpoint.save(run, relative, state)
    assert checkpoint.newest(run) == within(2, 5)
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
    torch.save({**make_state(2, 20), "model": Path("evil")}, run / name(2))  # loading this would run code
    listed, path = manifest(run), run / name(2)
    entry = {**listed["checkpoints"][name(1)], "epoch": 2, "step": 20, "bytes": path.stat().st_size}
    listed["checkpoints"][name(2)] = {**entry, "sha256": checkpoint.sha256(path)}
    checkpoint.write_manifest(run, listed)
    assert "UnpicklingError" in checkpoint.verify(run, name(2)) and checkpoint.newest(run) == name(1)


def test_none_that_verifies_never_starts_over(run):
    assert checkpoint.newest(run) is None
    save_epochs(run, 1, 2)
    flip_epoch(run, 1)
    (run / name(2)).unlink()
    said = []
    with pytest.raises(InputError, match="--fresh") as raised:
        checkpoint.newest(run, said.append)
    assert str(run) in str(raised.value) and len(said) == 2


@pytest.mark.parametrize("content", [None, b"", b'{"checkpoints": {', b"[]", b'{"checkpoints": {"a": 3}, "best": 0}',
                                     b'{"checkpoints": {}, "best": {"checkpoint": "a", "metric": "x", "value": "x"}}',
                                     b'{"checkpoints": {"a": {"epoch": 1, "step": 2, "bytes": {}, "sha256": "",'
                                     b' "weights_sha256": ""}}, "best": null}',
                                     b'{"checkpoints": {"a": {"epoch": 1, "step": 2, "score": null}}, "best": null}'])
def test_lost_manifest_is_rebuilt_from_the_files_that_load(run, content):
    save_epochs(run, 1, 2, 3, 4)
    before = manifest(run)["checkpoints"]
    checkpoint.save(run, within(2, 3), make_state(2, 23, 3))
    flip_epoch(run, 3)
    (run / name(4)).write_bytes(b"")
    torch.save({"weights": torch.ones(2)}, run / "other.pth")
    (run / "manifest.json").unlink() if content is None else (run / "manifest.json").write_bytes(content)
    said = []
    assert checkpoint.newest(run, said.append) == within(2, 3)
    after = manifest(run)["checkpoints"]
    assert sorted(after) == [name(1), name(2), within(2, 3)]
    assert after[name(2)] == before[name(2)]
    assert all(any(str(run / skipped) in line for line in said) for skipped in (name(3), name(4), "other.pth"))
    assert "CRC" in " ".join(said) and "manifest.json" in said[0]
    (run / "manifest.json").unlink()
    save_epochs(run, 5)
    assert {*after, name(5)} == set(manifest(run)["checkpoints"])


def test_a_disk_that_fails_once_loses_no_checkpoint_from_a_rebuilt_manifest(run, monkeypatch):
    save_epochs(run, 1, 2)
    (run / "manifest.json").unlink()
    faults = [OSError(errno.EIO, "Input/output error")]
    real = zipfile.ZipFile

    def opened(path, *args):
        if str(path).endswith(name(2)) and faults:
            raise faults.pop()
        return real(path, *args)

    monkeypatch.setattr(checkpoint.zipfile, "ZipFile", opened)
    assert checkpoint.newest(run, patience_s=20) == name(2) and not faults
    assert set(manifest(run)["checkpoints"]) == {name(1), name(2)}


@pytest.mark.parametrize("fault, expected", [
    ("full disk", "File too large; .* GiB free"), ("bad disk", r"state\.model\.w reads back differently"),
    ("lost half", r"could not be written \(reads back damaged: cannot be read: RuntimeError: .*; .* GiB free\)")])
def test_failed_write_leaves_the_previous_checkpoint(run, fault, expected):
    save_epochs(run, 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    output = ended(*child(save_once, run, fault))
    assert re.search(expected, output) and str(run / name(1)) in output, output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert checkpoint.newest(run) == name(1)


def test_save_in_the_background_holds_the_values_of_the_call(run):
    state, entries, metrics = make_state(), {}, {"dice": 0.0}
    momentum = state["optimizer"]["state"][0]["exp_avg_sq"]
    for epoch in (1, 2, 3):
        state.update(epoch=epoch, step=10 * epoch)
        for tensor in (state["model"]["b.weight"], state["model"]["channels_last"], momentum):
            tensor.fill_(epoch)
        metrics["dice"] = state["sums"]["ang"] = epoch / 10
        best = ("dice", epoch / 10, "here")
        future = checkpoint.save_in_background(run, name(epoch), state, metrics, best=best)
        for tensor in (state["model"]["b.weight"], state["model"]["channels_last"], momentum):
            tensor.fill_(-1)
        metrics["dice"] = state["sums"]["ang"] = -1.0
        entries[name(epoch)] = future.result(timeout=60)
    assert manifest(run) == {
        "checkpoints": entries,
        "best": {"checkpoint": name(3), "metric": "dice", "value": 0.3, "measured_on": "here"}}
    for epoch in (1, 2, 3):
        loaded = checkpoint.load(run / name(epoch))
        saved = [loaded["model"]["b.weight"], loaded["model"]["channels_last"],
                 loaded["optimizer"]["state"][0]["exp_avg_sq"]]
        assert all(torch.equal(tensor, torch.full_like(tensor, epoch)) for tensor in saved)
        assert loaded["sums"]["ang"] == entries[name(epoch)]["metrics"]["dice"] == epoch / 10
        assert checkpoint.verify(run, name(epoch)) is None
    last = checkpoint.save_in_background(run, name(4), make_state(4, 40), keep=(2, 0, 0))
    assert last.result(timeout=60)["epoch"] == 4
    assert sorted(path.name for path in run.glob("*.pth*")) == [name(3), name(4)]


def test_weights_that_are_not_finite_are_refused(run):
    save_epochs(run, 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for value in (float("nan"), float("inf"), -float("inf")):
        state = make_state(2, 20)
        state["model"]["a.half"][-1] = state["model"]["channels_last"][0, 1, 2, 3] = value
        for save in (checkpoint.save, checkpoint.save_in_background):
            with pytest.raises(ValueError, match=r"the weights .*000002_all_net\.pth are not finite: a\.half$"):
                save(run, name(2), state)
    with pytest.raises(TypeError, match="state.extra is a PosixPath"):
        checkpoint.save_in_background(run, name(2), make_state() | {"extra": Path("x")})
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_full_disk_in_the_background_spares_the_earlier_and_pruning_makes_room(tmp_path):
    (tmp_path / "probe").mkdir()
    private = ["unshare", "--map-root-user", "--mount"]  # the mount goes with the process
    probe = subprocess.run([*private, "mount", "-t", "tmpfs", "tmpfs", tmp_path / "probe"], capture_output=True)
    if probe.returncode:
        pytest.skip("no right to mount a small file system")
    (tmp_path / "run").mkdir()
    done = launching.run([*private, sys.executable, "-c", FULL_DISK, tmp_path / "run"], timeout=60,
                         env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    acts = [json.loads(line) for line in output.splitlines()]
    expected = [1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3], [3, 4], [4, 5], [6]
    for (_, left, verified, newest), kept in zip(acts, expected, strict=True):
        assert left == kept and newest == name(kept[-1]) and verified == [None] * len(kept), output
    refused = [bool(error) for error, *_ in acts]
    assert refused == [False, False, False, True, True, False, False, False], output
    for error, *_ in acts[3:5]:
        assert error[0] == errno.ENOSPC and "could not be written (No space left on device; 0.00 GiB" in error[1]
        assert str(tmp_path / "run" / name(4)) in error[1]


def test_no_thread_stays_when_a_checkpoint_is_written(tmp_path):
    """A thread in which torch has computed keeps OpenMP's helpers, and with more of them than cores all are slow."""
    def threads():
        torch.rand(10**6).isfinite().all()  # ours are there from the first operation on
        return len(os.listdir("/proc/self/task"))
    state, before = make_state(1, 10) | {"rng": torch.rand(10**6)}, threads()
    checkpoint.save_in_background(tmp_path, name(1), state).result(timeout=60)
    launching.until(lambda: threads() <= before, 10)


def test_kill_during_saves_in_the_background_leaves_a_good_checkpoint(run):
    rng, done = random.Random(5), 0
    for _ in range(3):
        process, output = child(save_without_end, run, done)
        begun = output.readline() + output.readline()
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        output = begun + ended(process, output, -signal.SIGKILL)
        last = {event: int(re.findall(rf"{event} (\d+)\n", output)[-1]) for event in ("saving", "saved")}
        said = []
        state = checkpoint.load(run / checkpoint.newest(run, said.append))
        assert said == [] and state["step"] in (last["saved"], last["saving"]), output
        assert torch.equal(state["model"]["w"], torch.full((700_000,), float(state["step"])))
        remove_leftovers(run)
        assert not list(run.rglob("*.tmp-*")) and len(list(run.rglob("*.pth"))) <= 4
        done = state["step"]


def test_death_at_every_file_operation_leaves_the_old_or_the_new(run):
    output = ended(*child(die_at_each_operation, run))
    lines = [[int(value) for value in line.split()] for line in output.splitlines()]
    assert len(lines) >= 8 and [line[1] for line in lines] == [1] * (len(lines) - 1) + [0], output
    current = 0
    for last, _, step, best, warnings in lines:
        assert step in (current, last) and best == step and warnings == 0, output
        current = step
    assert current == lines[-1][0] and any(killed and step == last for last, killed, step, *_ in lines), output


def test_load_names_what_is_wrong(run):
    path = run / "x.pth"
    with pytest.raises(InputError, match="x.pth cannot be read: FileNotFoundError"):
        checkpoint.load(path)
    torch.save({"model": Path("evil")}, path)
    with pytest.raises(InputError, match=r"x.pth holds Python objects \(pathlib.*\), .*: save it again"):
        checkpoint.load(path)
    for foreign in ({"state_dict": {}}, {"model": {}}, torch.ones(2), {"format": 1, "model": 3}):
        torch.save(foreign, path)
        with pytest.raises(InputError, match="x.pth is not an OmniMorph checkpoint"):
            checkpoint.load(path)
    torch.save({**make_state(), "config": {**CONFIG, "mine": torch.ones(2)}}, path)
    with pytest.raises(InputError, match="x.pth: its config has values that no config can have"):
        checkpoint.check_compatible(checkpoint.load(path), CONFIG, path)
    torch.save({**make_state(), "format": 2}, path)
    with pytest.raises(InputError, match="x.pth has format 2"):
        checkpoint.load(path)


def test_compatibility_messages():
    state = make_state()
    assert checkpoint.check_compatible(state, {**CONFIG, "model.channels": (8, 16)}, "f.pth") == []
    said = checkpoint.check_compatible(state, {**CONFIG, "lr": 0.0001, "seed": 1}, "f.pth")
    assert said == ["lr: 1e-05 -> 0.0001", "seed: not set -> 1"]
    with pytest.raises(InputError, match=r"f\.pth does not match the config \(model\.channels is \[8, 16\] in the "
                                         r"checkpoint and \[8\] in the config\).*, or start a new run with --fresh\.$"):
        checkpoint.check_compatible(state, {**CONFIG, "model.channels": [8]}, "f.pth")
    with pytest.raises(InputError, match=r"f\.pth is a checkpoint of another network .*om_net.*unet.*--fresh"):
        checkpoint.check_compatible(state, {**CONFIG, "model.channels": [8], "model.name": "unet"}, "f.pth")
    # Without weights of their own, these may differ where only the weights are taken.
    state["config"] |= {"model.rec_num": 1, "model.condition_type": "slice"}
    other = state["config"] | {"model.rec_num": 2, "model.condition_type": "volume"}
    checkpoint.check_compatible(state, other, "f.pth", continues=False)
    with pytest.raises(InputError, match=r"model\.(rec_num|condition_type) is"):
        checkpoint.check_compatible(state, other, "f.pth")
    with pytest.raises(InputError, match=r"model\.condition_type is slice.*, or begin without it \(leave out"):
        checkpoint.check_compatible(state, other | {"model.condition_type": "none"}, "f.pth", continues=False)
    with pytest.raises(InputError, match="f.pth has no config"):
        checkpoint.check_compatible({"format": 1, "model": {}}, CONFIG, "f.pth")


def test_weights_that_do_not_fit_are_one_sentence():
    model = torch.nn.Linear(3, 2)
    before = checkpoint.weights_sha256(model.state_dict())
    good = {key: tensor + 1 for key, tensor in model.state_dict().items()}
    for weights, message in (
            ({"weight": good["weight"]}, r"bias is missing; 1 missing, 0 unexpected, 0 mis-shaped"),
            ({**good, "scale": good["bias"]}, r"scale is unexpected; 0 missing, 1 unexpected, 0 mis-shaped"),
            ({**good, "bias": good["bias"] * math.inf}, "its weight bias is not all finite real numbers"),
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


def best(run):
    found = manifest(run)["best"]
    return found["checkpoint"], found["value"]


def test_the_best_is_the_highest_of_its_metric_and_a_new_metric_or_other_volumes_start_over(run):
    found = []
    for epoch, score in enumerate([("dice", 0.5, "x"), ("dice", 0.7, "x"), ("dice", 0.6, "x"), None,
                                   ("imgsim", 0.1, "x"), ("imgsim", 0.05, "y"), ("imgsim", 0.02, "y"),
                                   ("dice", 0.65, "x")], 1):
        save_epochs(run, epoch, best=score)
        found.append(best(run))
    assert found[:-1] == [(name(1), 0.5), *[(name(2), 0.7)] * 3, (name(5), 0.1), *[(name(6), 0.05)] * 2]
    assert found[-1] == (name(2), 0.7), "of all that stand, not of those since then"
    for score in ((), None):
        save_epochs(run, 9, best=score)
        assert manifest(run)["best"] is None, "nothing is held out any more"


def test_a_dice_of_labels_that_were_corrected_since_is_not_compared(run):
    """The Dice without registration, which no weights change, tells of it."""
    found = []
    for epoch, (before, dice) in enumerate([(0.5, 0.9), (0.5 + 1e-9, 0.7), (0.4, 0.6), (0.4, 0.5)], 1):
        save_epochs(run, epoch, metrics={"val_dice_before": before}, best=("val_dice", dice, "x"))
        found.append(best(run))
    assert found == [*[(name(1), 0.9)] * 2, *[(name(3), 0.6)] * 2]
    save_epochs(run, 5)
    assert best(run) == (name(3), 0.6)
    save_epochs(run, 6, best=("val_dice", 0.3, "x"))
    assert best(run) == (name(1), 0.9), "an older version did not store that Dice"


def test_the_best_of_weights_that_are_gone_counts_no_more(run):
    """An epoch that is trained again after its file was lost, or with a lower learning rate, may be worse."""
    def again(weights, score):
        checkpoint.save(run, name(2), small_state(weights, 50) | {"epoch": 2}, best=("dice", score, "x"))
        return best(run)

    for epoch, score in ((1, 0.5), (2, 0.8)):
        save_epochs(run, epoch, best=("dice", score, "x"))
    assert again(7, 0.6) == (name(2), 0.6)
    assert again(8, 0.4) == (name(1), 0.5), "the best that stands"
    assert again(7, 0.6) == again(7, 0.1) == (name(2), 0.6), "the same weights keep their score"
    (run / name(2)).unlink()
    save_epochs(run, 3, best=("dice", 0.55, "x"))
    assert best(run) == (name(3), 0.55)


def test_the_best_of_an_older_manifest_was_measured_on_other_pairs(run):
    save_epochs(run, 1, best=("dice", 0.5, "x"))
    older = manifest(run)
    del older["best"]["measured_on"], older["checkpoints"][name(1)]["score"]
    (run / "manifest.json").write_text(json.dumps(older))
    save_epochs(run, 2)
    assert manifest(run)["best"] == older["best"], "it stays until something else is measured"
    save_epochs(run, 3, best=("dice", 0.4, "x"))
    assert best(run) == (name(3), 0.4)


def read_without_memory(run):
    """Read a checkpoint of 160 MB with 100 MB left."""
    checkpoint.save(run, name(1), small_state(1, 40 * 2 ** 20))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2 ** 20,) * 2)
    try:
        checkpoint.read(run / name(1))
    except Exception as error:
        print(type(error).__name__, is_out_of_memory(error), flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_machine_without_memory_is_no_damaged_file(run):
    assert ended(*child(read_without_memory, run)) == "RuntimeError True\n"


def test_prune_keeps_what_it_must(run):
    save_epochs(run, 1, 2)
    save_epochs(run, 3, best=("dice", 0.8, "here"))
    save_epochs(run, 4, 5, 6)
    save_epochs(run, 7, best=())
    assert manifest(run)["best"] is None, "nothing is held out any more, perhaps by mistake"
    steps = [within(7, step) for step in (1, 2, 3)]
    for step, relative in enumerate(steps, 1):
        checkpoint.save(run, relative, make_state(7, 70 + step, step))
    removed = checkpoint.prune(run, keep_last=2, keep_every=4, keep_tmp=1)
    assert sorted(removed) == sorted([name(1), name(2), name(5), *steps[:2]])
    left = sorted(path.relative_to(run).as_posix() for path in run.rglob("*.pth"))
    assert left == [name(3), name(4), name(6), name(7), steps[2]]
    assert sorted(manifest(run)["checkpoints"]) == left
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


def test_prune_does_not_read_a_trusted_one_again(run):
    save_epochs(run, 1, 2, 3)
    flip_epoch(run, 3)
    assert checkpoint.prune(run, 1, 0, 0, trusted=[name(3)]) == [name(2), name(1)]


def marks(run, kind="doubtful"):
    return {relative: entry[kind] for relative, entry in manifest(run)["checkpoints"].items() if kind in entry}


def test_step_back_goes_one_checkpoint_back_each_time_and_writing_again_clears_the_mark(run):
    save_epochs(run, 1, 2, 3)
    assert checkpoint.step_back(run, "died twice at step 31") == name(2)
    assert marks(run) == {name(3): "died twice at step 31"}
    said = []
    assert checkpoint.newest(run, said.append) == name(2) and checkpoint.verify(run, name(3)) is None
    assert len(said) == 1 and str(run / name(3)) in said[0] and "doubtful" in said[0] and "died twice at" in said[0]
    assert checkpoint.step_back(run, "again") == name(1) and checkpoint.newest(run, said.append) == name(1)
    before = (run / "manifest.json").read_bytes()
    assert checkpoint.step_back(run, "once more") is None
    assert (run / "manifest.json").read_bytes() == before and checkpoint.newest(run, said.append) == name(1)
    save_epochs(run, 2)
    assert marks(run) == {name(3): "died twice at step 31"} and checkpoint.newest(run, said.append) == name(2)
    checkpoint.save_in_background(run, name(3), make_state(3, 30, seed=3)).result(timeout=60)
    said.clear()
    assert marks(run) == {} and checkpoint.newest(run, said.append) == name(3) and said == []


def test_step_back_marks_the_newest_that_verifies_or_nothing(run):
    assert checkpoint.step_back(run, "x") is None
    save_epochs(run, 1, 2, 3, 4, 5)
    flip_epoch(run, 3)
    (run / name(5)).unlink()
    assert checkpoint.step_back(run, "x") == name(2) and marks(run) == {name(4): "x"}
    flip_epoch(run, 1)
    assert checkpoint.step_back(run, "y") is None and marks(run) == {name(4): "x"}
    flip_epoch(run, 2)
    said = []
    assert checkpoint.newest(run, said.append) == name(4)
    assert f"{run / name(4)} is used although it is doubtful" in said[-1]
    assert checkpoint.step_back(run, "y") is None and marks(run) == {name(4): "x"}
    (run / name(4)).unlink()
    with pytest.raises(InputError, match="--fresh"):
        checkpoint.newest(run, said.append)


def test_prune_counts_a_doubtful_one_only_when_no_other_verifies(run):
    save_epochs(run, 1, 2, 3)
    checkpoint.step_back(run, "x")
    assert checkpoint.prune(run, keep_last=1, keep_every=0, keep_tmp=0) == [name(1)]
    assert marks(run) == {name(3): "x"} and checkpoint.newest(run, lambda message: None) == name(2)
    flip_epoch(run, 2)
    assert checkpoint.prune(run, keep_last=0, keep_every=0, keep_tmp=0) == [name(2)]
    assert checkpoint.newest(run, lambda message: None) == name(3)


# ---------------------------------------------------------------------------------------------------------------------
# What is damaged or doubtful takes nobody's place
# ---------------------------------------------------------------------------------------------------------------------

def save_steps(run, *steps, **options):
    for step in steps:
        checkpoint.save(run, within(1, step), make_state(1, step, step, seed=step), **options)


@pytest.mark.parametrize("how", ["damaged", "doubtful", "missing"])
def test_after_a_fallback_new_checkpoints_of_lower_steps_stay(run, how):
    save_steps(run, 10, 80, 90)
    for step in (90, 80):
        if how == "damaged":
            flip(run / within(1, step), make_state(seed=step)["model"]["b.weight"])
        elif how == "missing":
            (run / within(1, step)).unlink()
        else:
            checkpoint.step_back(run, "died twice")
    assert checkpoint.newest(run, lambda message: None, record=True) == within(1, 10)
    assert durable_step(run) == 10
    for step in (20, 30, 40):
        state = make_state(1, step, step, seed=step)
        checkpoint.save_in_background(run, within(1, step), state, keep=(3, 0, 2)).result(timeout=60)
        assert checkpoint.newest(run, lambda message: None, record=True) == within(1, step)
        assert durable_step(run) == step
    left = {int(path.name[11:15]) for path in run.glob("tmp/*.pth")}
    assert left == {30, 40} | ({80, 90} if how != "missing" else set()), "what is newer may be looked at, or restored"
    checkpoint.save_in_background(run, within(1, 100), make_state(1, 100, 100), keep=(3, 0, 2)).result(timeout=60)
    assert {int(path.name[11:15]) for path in run.glob("tmp/*.pth")} == {40, 100}
    assert sorted(manifest(run)["checkpoints"]) == [within(1, 40), within(1, 100)]


def test_damage_is_written_down_by_the_one_who_has_the_lock_and_forgotten_once_the_file_is_back(run):
    save_epochs(run, 1, 2, 3)
    good = (run / name(3)).read_bytes()
    flip_epoch(run, 3)
    before = (run / "manifest.json").read_bytes()
    assert checkpoint.newest(run, lambda message: None) == name(2), "tools only read"
    assert (run / "manifest.json").read_bytes() == before and durable_step(run) == 30
    assert checkpoint.newest(run, lambda message: None, record=True) == name(2)
    assert marks(run, "damaged") == {name(3): "SHA-256 differs"} and durable_step(run) == 20
    (run / name(3)).write_bytes(good)
    assert checkpoint.newest(run, record=True) == name(3)
    assert marks(run, "damaged") == {} and durable_step(run) == 30


def unreadable(run, epoch):
    """A file that the kernel answers EIO for, as a failing disk does: the unmapped start of a process's memory."""
    (run / name(epoch)).unlink()
    (run / name(epoch)).symlink_to("/proc/self/mem")
    found = manifest(run)
    found["checkpoints"][name(epoch)]["bytes"] = 0
    (run / "manifest.json").write_text(json.dumps(found))


def test_a_file_that_cannot_be_read_now_is_asked_for_again_and_is_no_reason_to_start_over(run, capsys):
    save_epochs(run, 1, 2)
    unreadable(run, 2)
    assert checkpoint.newest(run, record=True, patience_s=0.2) == name(1)
    said = capsys.readouterr().err
    assert f"{run / name(2)}: Input/output error; tried again for up to 0 s" in said
    assert f"{run / name(2)} is skipped: cannot be read: OSError: Input/output error" in said
    unreadable(run, 1)
    with pytest.raises(OSError, match="no checkpoint in .* can be read at the moment") as raised:
        checkpoint.newest(run, lambda message: None)
    assert raised.value.errno == errno.EIO and "--fresh" not in str(raised.value)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.load(run / name(1))
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.step_back(run, "x")
    assert checkpoint.verify(run, name(1)) == "cannot be read: OSError: Input/output error"


def test_a_run_that_was_taken_over_writes_no_checkpoint(run):
    save_epochs(run, 1, 2)
    hold(run, lock(run, 60))
    save_epochs(run, 3)
    other = json.loads((run / "lock.json").read_text()) | {"token": "another"}
    (run / "lock.json").write_text(json.dumps(other))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    state = make_state(4, 40)
    for write in (lambda: checkpoint.save(run, name(4), state), lambda: checkpoint.prune(run, 1, 0, 0),
                  lambda: checkpoint.save_in_background(run, name(4), state, keep=(1, 0, 0)).result(timeout=60),
                  lambda: checkpoint.step_back(run, "x")):
        with pytest.raises(InputError, match=r"was taken over by process \d+ on .* since"):
            write()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_appears_while_the_folder_is_read_is_none_yet(tmp_path, monkeypatch):
    real = checkpoint._manifest

    def then_a_save(run, warn):
        manifest = real(run, warn)
        monkeypatch.undo()
        save_epochs(run, 1)
        return manifest

    monkeypatch.setattr(checkpoint, "_manifest", then_a_save)
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path) == name(1)


def test_a_run_ends_after_failed_writes_of_three_steps_in_a_row(capsys):
    """A step that is written before and after its validation counts once."""
    run = types.SimpleNamespace(saving=None, saving_step=0, failed_saves=set())

    def written(step, error=None):
        run.saving, run.saving_step = concurrent.futures.Future(), step
        run.saving.set_exception(error) if error else run.saving.set_result(None)
        training_state.finish_saving(run)
        assert run.saving is None
    full = OSError(errno.ENOSPC, "No space left on device")
    for step, error in ((4, full), (8, full), (8, full), (12, None), (16, full), (20, full), (20, full)):
        written(step, error)
    with pytest.raises(OSError, match="No space left"):
        written(24, full)
    assert capsys.readouterr().err.count("checkpoint failed, the earlier ones are kept") == 7
