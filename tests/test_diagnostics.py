"""The leak diagnostics and their job scripts, as a person calls them: real processes, and a real leak put in."""
import json
import os
import subprocess
import sys

import pytest

from tests.tiny import ROOT

SMALL = ("--scale", "0.125", "--device", "cpu")


def run(*words, folder=ROOT, **variables):
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and name not in (
        "CLUSTER", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment = {**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=200,
                          env=environment)


def verdicts(done):
    return {name: found["verdict"] for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("program, word, case", [("diagnose_xpu_leak_ops.py", "interpolate", "interpolate 32^3->256^3"),
                                                 ("diagnose_xpu_leak.py", "network", "network, backward")])
def test_a_leak_is_found_and_named_and_nothing_else_is(program, word, case):
    words = [sys.executable, ROOT / "tests" / program, *SMALL, "--only", word]
    sound, leaking = run(*words), run(*words, "--plant", "3")
    assert sound.returncode == 0 and case in verdicts(sound), sound.stderr
    assert all(verdict in ("none", "one-time") for verdict in verdicts(sound).values()), sound.stdout
    assert leaking.returncode == 1, leaking.stderr
    assert set(verdicts(leaking).values()) == {"linear (loader or Python objects)"}, leaking.stdout
    found = json.loads(leaking.stdout.splitlines()[-1])[case]["gib_per_step"]
    assert found * 1024 == pytest.approx(3, rel=0.2), "MiB with every iteration"


def test_a_wrong_name_is_answered_with_the_right_ones():
    done = run(sys.executable, ROOT / "tests/diagnose_xpu_leak_ops.py", *SMALL, "--only", "Conv4d")
    assert done.returncode == 43 and "Conv4d" in done.stderr and "UpsampleConv" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_leak_script_runs_several_ranks(tmp_path):
    done = run("bash", ROOT / "Scripts/bash_diagnose_leak.sh", *SMALL, "--only", "DDP", folder=tmp_path, RANKS="2")
    assert done.returncode == 0, done.stderr
    assert [name.split(", ")[0] for name in verdicts(done)] == ["DDP"] * 3 + ["DDP no_sync"] * 3


def test_the_ops_script_passes_its_options_on(tmp_path):
    done = run("bash", ROOT / "Scripts/bash_diagnose_ops.sh", *SMALL, "--only", "grid_sample", folder=tmp_path)
    assert done.returncode == 0 and list(verdicts(done)) == ["grid_sample 128^3"], done.stderr


def test_the_fix_is_verified_by_both_operations():
    script = ROOT / "Scripts/bash_verify_fix.sh"
    assert "neither leaks here" in run("bash", script, *SMALL).stdout.splitlines()[-1]
    both = run("bash", script, *SMALL, "--plant", "3")
    assert both.returncode == 1 and "both leak here" in both.stdout.splitlines()[-1]
    wrong = run("bash", script, "--device", "none")
    assert wrong.returncode == 43 and "none" in wrong.stderr


def test_the_plain_step_is_compared(tmp_path):
    done = run(sys.executable, ROOT / "tests/compare_3modes_speed.py", "--size", "16", "--steps", "1", "--device",
               "cpu", "--set", "diffusion.grids=[4,8]", "--set", "registration.scales=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["deform", "diffusion", "contrastive", "registration", "step"]
    assert all(part["ms"] > 0 and part["plain_ms"] > 0 for part in found.values())


def test_the_leak_rate_of_a_training_by_itself(tmp_path):
    words = ["run.device=cpu", "run.threads=1", "data.img_size=16", "model.channels=[8,8,16]",
             "model.attention_width=16", "model.attention_depth=1", "model.attention_heads=2", "diffusion.grids=[4,8]",
             "registration.window=5", "registration.scales=2"]
    done = run("bash", ROOT / "Scripts/bash_train_stratB.sh", *[word for item in words for word in ("--set", item)],
               STRATB=str(tmp_path), SECONDS_LONG="12", SIDE="16", RANKS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    steps, verdict = done.stdout.splitlines()[-2:]
    assert int(steps.removeprefix("steps of rank 0: ")) > 0 and verdict.startswith("no rank's memory grows")
    assert (tmp_path / "rank1.log").is_file() and not list((tmp_path / "Models").glob("*/0*.pth"))
