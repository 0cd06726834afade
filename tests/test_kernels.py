"""Triton's kernels give what the plain operations give: on an accelerator, else by Triton's interpreter."""
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.tiny import ROOT

if torch.accelerator.current_accelerator(check_available=True) is not None:
    from tests.kernel_cases import *  # noqa: F403
    pytestmark = pytest.mark.gpu
else:
    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
    def test_kernels_by_the_interpreter():
        """In a process of its own: that Triton interprets is decided when torch or a test first imports it."""
        command = [sys.executable, "-m", "pytest", "-q", "tests/kernel_cases.py"]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                               text=True, timeout=600)
        assert ended.returncode == 0 and "49 passed, 1 skipped" in ended.stdout, ended.stdout[-4000:]

    def test_where_kernels_do_not_work_one_sentence_says_so_and_the_plain_way_is_taken():
        """A CPU has no driver for Triton."""
        words = "from Diffusion.device_ops import working_kernels as ask; print(ask('cpu'), ask('cpu'))"
        ended = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True)
        assert ended.stdout == "None None\n" and ended.stderr.count("\n") == 1, ended.stderr
        assert "using torch's operations, because the Triton kernels do not work here (" in ended.stderr
