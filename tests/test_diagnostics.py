"""The leak diagnostics and their job scripts: real processes, and a real leak put in."""
import itertools
import json
import os
import re
import sys

import pytest
import torch

from tests import compare_3modes_speed, diagnose_xpu_leak, diagnose_xpu_leak_ops, launching, leaks, tiny, warm
from tests.tiny import ROOT

SMALL = ("--scale", "0.125", "--device", "cpu")


def run(*words, folder=ROOT, **variables):
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and name not in (
        "CLUSTER", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment = {**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    return launching.run(words, cwd=folder, timeout=200, env=environment)


def forked(program, log, *words, code):
    """The last line of a diagnosis in a process of its own."""
    printed = warm.train(1, log, [*SMALL, *words], target=program.main, expected=code)
    return json.loads(printed.splitlines()[-1])


def stand_in(folder, *lines):
    """An interpreter for the scripts that runs these lines of bash. Returns: its path."""
    return tiny.stand_in(folder / "python", "\n".join(lines))


def verdicts(done):
    return {name: found["verdict"] for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("program, word, case", [
    (diagnose_xpu_leak_ops, "interpolate", "interpolate 32^3->256^3"),
    (diagnose_xpu_leak, "network, backward", "network, backward")])
def test_a_leak_is_found_and_named_and_nothing_else_is(tmp_path, program, word, case):
    sound = forked(program, tmp_path / "sound", "--only", word, code=0)
    leaking = forked(program, tmp_path / "leaking", "--only", word, "--plant", "3", code=1)
    assert case in sound and all(found["verdict"] in ("none", "one-time") for found in sound.values()), sound
    assert {found["verdict"] for found in leaking.values()} == {"linear (loader or Python objects)"}, leaking
    assert leaking[case]["gib_per_step"] * 1024 == pytest.approx(3, rel=0.2), "MiB with every iteration"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
def test_freed_memory_that_the_c_library_keeps_is_no_leak(monkeypatch):
    """Each iteration frees all of its blocks, but more of them than the one before, below one that stays."""
    args, verdicts = leaks.parse_arguments("", ["--device", "cpu"]), []
    for measure in (leaks.in_use, leaks.measure):
        monkeypatch.setattr(leaks, "in_use", measure)
        count, stay = itertools.count(1), []

        def iteration(count=count, stay=stay):
            blocks = [bytearray(b"x") * 60_000 for _ in range(50 * next(count))]
            stay.append(bytearray(b"x") * 60_000)
            blocks.clear()
        verdicts.append(leaks.watch("freed", iteration, torch.device("cpu"), args, shown=False)["verdict"])
    assert verdicts[0] in ("none", "one-time") and verdicts[1].startswith("linear"), verdicts


@pytest.mark.parametrize("part", diagnose_xpu_leak.PARTS)
def test_every_part_does_every_pass(part):
    """With the network that has ConvTranspose3d, as it is named on the page of Dawn."""
    cfg = diagnose_xpu_leak.configuration(0.125, ["model.name=recmulmodmutattnnet"])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for kind in diagnose_xpu_leak.PASSES:
            diagnose_xpu_leak.make_iteration(part, kind, cfg, torch.device("cpu"))()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", diagnose_xpu_leak_ops.OPERATIONS)
def test_every_operation_runs(name):
    diagnose_xpu_leak_ops.make_iteration(name, 0.125, torch.device("cpu"))()


def test_a_wrong_name_is_answered_with_the_right_ones(capsys):
    assert diagnose_xpu_leak_ops.main([*SMALL, "--only", "Conv4d"]) == 43
    said = capsys.readouterr().err
    assert "Conv4d" in said and "UpsampleConv" in said


def test_the_leak_script_runs_several_ranks(tmp_path):
    cases = ["DDP, backward", "DDP no_sync, forward"]
    done = run("bash", ROOT / "Scripts/bash_diagnose_leak.sh", *SMALL, "--only", *cases, folder=tmp_path, RANKS="2")
    assert done.returncode == 0, done.stderr
    assert list(verdicts(done)) == cases


def test_the_ops_script_passes_its_options_on(tmp_path):
    done = run("bash", ROOT / "Scripts/bash_diagnose_ops.sh", *SMALL, "--only", "grid_sample", folder=tmp_path)
    assert done.returncode == 0 and list(verdicts(done)) == ["grid_sample 128^3"], done.stderr


def test_the_fix_is_verified_by_both_operations():
    both = run("bash", ROOT / "Scripts/bash_verify_fix.sh", *SMALL, "--plant", "3")
    assert both.returncode == 1 and "both leak here" in both.stdout.splitlines()[-1]
    for case in ("ConvTranspose3d 256->3", "UpsampleConv 256->3"):
        assert re.search(rf"^{case}.* linear", both.stdout, re.M), both.stdout


@pytest.mark.parametrize("transposed, upsampling, code, said", [
    (0, 0, 0, "neither leaks here"), (1, 0, 0, "the fix holds"), (0, 1, 1, "UpsampleConv leaks here"),
    (43, 0, 43, "no such device")])
def test_what_the_fix_is_worth_follows_from_both_exit_codes(tmp_path, transposed, upsampling, code, said):
    python = stand_in(tmp_path, f"code={transposed}", f'[[ "$*" == *UpsampleConv* ]] && code={upsampling}',
                      "((code == 43)) && echo no such device >&2",
                      '((code <= 1)) && echo "what grows with every iteration: it"', "exit $code")
    done = run("bash", ROOT / "Scripts/bash_verify_fix.sh", *SMALL, PYTHON=python)
    assert done.returncode == code and said in (done.stderr if code == 43 else done.stdout.splitlines()[-1])


def test_a_log_on_the_disk_has_what_was_said_of_both_operations(tmp_path):
    python = stand_in(tmp_path, 'echo "$*"', 'echo "what grows with every iteration: nothing"')
    run("bash", "-c", f"bash {ROOT}/Scripts/bash_verify_fix.sh > {tmp_path}/log 2>&1", PYTHON=python)
    text = (tmp_path / "log").read_text()
    assert all(word in text for word in ("--only ConvTranspose3d", "--only UpsampleConv", "neither leaks here")), text


@pytest.mark.parametrize("script", ["leak", "ops"])
@pytest.mark.parametrize("said, code, expected", [
    ("what grows with every iteration: it", 1, 1), ("what grows with every iteration: nothing", 0, 0),
    ("error: unrecognized arguments: --wrong", 1, 43)])
def test_both_scripts_tell_a_leak_from_what_they_cannot_run(tmp_path, script, said, code, expected):
    """A traceback says 1 too, and torch's launcher says it for whatever code a rank has."""
    python = stand_in(tmp_path, f'echo "{said}"', f"exit {code}")
    done = run("bash", ROOT / f"Scripts/bash_diagnose_{script}.sh", PYTHON=python, RANKS="2")
    assert done.returncode == expected and said in done.stdout
    with pytest.raises(SystemExit) as refused:
        leaks.parse_arguments("", ["--wrong"])
    assert refused.value.code == 43


def test_without_a_verdict_there_is_none(tmp_path):
    """A Python without torch ends with 1 as well, and so does --help with 0."""
    python = stand_in(tmp_path, "echo ModuleNotFoundError: torch >&2", "exit 1")
    done = run("bash", ROOT / "Scripts/bash_verify_fix.sh", *SMALL, PYTHON=python)
    assert done.returncode == 43 and "there is no verdict on ConvTranspose3d" in done.stderr
    assert "leak here" not in done.stdout


@pytest.mark.parametrize("script", ["verify_fix", "train_stratB", "compare", "infer", "smoke"])
def test_help_is_a_text(script):
    done = run("bash", ROOT / f"Scripts/bash_{script}.sh", "--help", PYTHON="/no/such/python")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 5 and "set -u" not in done.stdout, done.stderr
    assert f"Scripts/bash_{script}.sh" in done.stdout


def test_a_case_that_runs_out_of_memory_is_told_and_ends_no_table(capsys):
    args, calls = leaks.parse_arguments("", ["--device", "cpu"]), itertools.count()

    def iteration(last=5):
        if next(calls) >= last:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    def wrong():
        raise RuntimeError("shape")

    device = torch.device("cpu")
    found = {"leaking": leaks.watch("leaking", iteration, device, args, shown=False),
             "too large": leaks.watch("too large", lambda: iteration(0), device, args, shown=False)}
    assert found["leaking"]["verdict"] == "linear, out of memory in iteration 6"
    assert found["too large"]["verdict"].startswith("out of memory: try a smaller --scale")
    assert leaks.tell(found, device, args) == 1
    assert leaks.tell({"too large": found["too large"]}, device, args) == 43
    with pytest.raises(RuntimeError, match="shape"):
        leaks.watch("wrong", wrong, device, args, shown=False)


def test_where_the_driver_does_not_report_free_memory_there_is_no_verdict(monkeypatch, capsys):
    """Flat memory of torch says nothing about the driver; a graph that grows shows all the same."""
    args, device = leaks.parse_arguments("", ["--device", "xpu"]), torch.device("xpu")
    flat = [{"host_used": 2 ** 30, "host_free": 2 ** 36, "device_free": None, "device_unreserved": 40 * 2 ** 30,
             "device_reserved": 2 ** 30, "device_allocated": 2 ** 30} for _ in range(22)]
    growing = [{**sample, "device_reserved": (step + 1) * 2 ** 28, "device_allocated": (step + 1) * 2 ** 28}
               for step, sample in enumerate(flat)]
    found = {"flat": leaks.judge(flat, device), "growing": leaks.judge(growing, device)}
    assert found["growing"]["verdict"] == "linear (graph)" and found["growing"]["gib_per_step"] == pytest.approx(0.25)
    monkeypatch.setattr(leaks, "describe", str)  # no such device is here
    assert leaks.tell({"flat": found["flat"]}, device, args) == 43 and leaks.tell(found, device, args) == 1
    said = capsys.readouterr()
    assert "what grows with every iteration: unknown" in said.out
    assert "leaks of the driver are not seen; set ZES_ENABLE_SYSMAN=1 before the start: no verdict on flat." in said.err


def test_the_leak_rate_of_a_training_that_cannot_see_the_driver_is_no_verdict(tmp_path):
    log = '{"event": "leaks not seen", "rank": 0, "what": "this driver does not report free memory"}'
    python = stand_in(tmp_path, "[[ $1 == -c ]] && echo 1", "[[ $1 == OM_train_3modes.py ]] || exit 0",
                      f"mkdir -p {tmp_path}/out/Models/run", f"echo '{log}' > {tmp_path}/out/Models/run/rank0.jsonl",
                      f"yes '{{\"event\": \"step\"}}' | head -n 30 >> {tmp_path}/out/Models/run/rank0.jsonl")
    (tmp_path / "out").mkdir()
    done = run("bash", ROOT / "Scripts/bash_train_stratB.sh", PYTHON=python, STRATB=str(tmp_path / "out"))
    assert done.returncode == 43 and "there is no verdict: this driver does not report free memory." in done.stderr
    assert "no rank's memory grows" not in done.stdout and "steps of rank 0: 30" in done.stdout


def test_the_plain_step_is_compared(tmp_path):
    words = ["--size", "16", "--steps", "1", "--device", "cpu", "--set", "diffusion.grids=[4,8]", "--set",
             "registration.scales=2"]
    printed = warm.train(1, tmp_path / "log", words, target=compare_3modes_speed.main)
    found = json.loads(printed.splitlines()[-1])
    assert list(found) == ["deform", "diffusion", "contrastive", "registration", "step"]
    assert all(part["ms"] > 0 and part["plain_ms"] > 0 for part in found.values())


@pytest.mark.slow
def test_the_leak_rate_of_a_training_by_itself(tmp_path):
    words = ["run.device=cpu", "run.threads=1", "data.img_size=16", "model.channels=[8,8,16]",
             "model.attention_width=16", "model.attention_depth=1", "model.attention_heads=2", "diffusion.grids=[4,8]",
             "registration.window=5", "registration.scales=2"]
    done = run("bash", ROOT / "Scripts/bash_train_stratB.sh", *[word for item in words for word in ("--set", item)],
               STRATB=str(tmp_path), SECONDS_LONG="60", SIDE="16", RANKS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    steps, verdict = done.stdout.splitlines()[-2:]
    assert int(steps.removeprefix("steps of rank 0: ")) > 0 and verdict.startswith("no rank's memory grows")
    assert (tmp_path / "rank1.log").is_file() and not list((tmp_path / "Models").glob("*/0*.pth"))
