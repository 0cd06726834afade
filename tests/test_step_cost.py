"""What a step costs a device, counted without one: so much and no more."""
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.tiny import ROOT


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_a_step_starts_no_more_operations_than_it_did():
    """config_om.yaml with one attention block and without mode 2, which has no kernels of its own: counted sooner."""
    command = [sys.executable, "tests/bench/bench_step_cost.py", "--json", "--set", "model.attention_depth=1", "--set",
               "loss.contrastive=0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    now = json.loads(ended.stdout)["now"]
    assert now["waits"] == 7
    assert now["kernels"] <= 4350 and now["copies"] == 0 and now["gb"] <= 185 and now["device_ms"] <= 54
    assert now["tflop"] == pytest.approx(5.6, rel=0.02)  # what the convolutions and attention have to do
