"""The last step of the smoke ladder, on several nodes of a real Slurm."""
import importlib.util
import json
import subprocess

import pytest

from tests.slurm.test_slurm import submitting
from tests.tiny import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install -r requirements-smoke.txt")
def test_several_nodes_with_zero1(slurm, tmp_path):
    command = ["bash", str(ROOT / "Scripts/bash_smoke.sh"), "--only", "04", "--device", "cpu", "--scale", "0.02",
               "--steps", "10"]
    environment = {**submitting(slurm), "SMOKE_LOGS": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED 04 ZeRO-1, several nodes: cpu, 4 ranks on 2 nodes" in done.stdout
    figures = json.loads(next(tmp_path.glob("*/04.json")).read_text())
    assert (figures["nodes"], figures["ranks"]) == (2, 4) and figures["after"] < figures["before"]
