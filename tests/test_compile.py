"""run.compile: a training whose network torch.compile has fused, with the compiler of this machine."""
import os
import re
import shutil
import sys

import pytest

from tests import launching
from tests.tiny import QUICK, ROOT, arguments, log_lines, make_data

# What compiles quickly: each size of each layer is a function of its own.
SMALL = {**QUICK, "model__channels": "[4, 8]", "model__affine_match": "false", "model__local_match": "false",
         "diffusion__grids": "[4, 8]", "run__epochs": 1, "run__compile": "step"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def train(folder, *more, cache, compiler=(), **changes):
    """A training in a process of its own. cache: folder of compiled code. compiler: variables that name another one."""
    words = arguments(folder, *more, **{**SMALL, **changes})
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1",
                   **dict(compiler)}
    return launching.run([sys.executable, ROOT / "OM_train_3modes.py", *words], env=environment, timeout=800)


def weights(ended):
    return re.search(r"weights ([0-9a-f]{64})", ended.stdout)[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_training_has_the_same_losses_and_is_exactly_resumed(tmp_path):
    make_data(tmp_path, size=8)
    cache, models = tmp_path / "cache", {name: tmp_path / name / "Models" for name in ("off", "step", "again")}
    off = train(tmp_path, cache=cache, run__compile="off", run__models=models["off"])
    step = train(tmp_path, cache=cache, run__models=models["step"])
    assert off.returncode == step.returncode == 0, step.stderr
    plain, fused = (log_lines(tmp_path / name, "step") for name in ("off", "step"))
    assert len(plain) == len(fused) >= 3
    for one, other in zip(fused, plain):
        assert one["terms"] == pytest.approx(other["terms"], rel=1e-3, abs=1e-5)
    left = train(tmp_path, "--max-steps-before-restart", "1", cache=cache, run__models=models["again"])
    assert left.returncode == 42, left.stderr
    again = train(tmp_path, cache=cache, run__models=models["again"])
    assert again.returncode == 0 and "continuing from" in again.stdout and weights(again) == weights(step)


def test_a_machine_that_cannot_compile_says_so(tmp_path):
    make_data(tmp_path, size=8)
    ended = train(tmp_path, cache=tmp_path / "cache", compiler={"CXX": "no-such-compiler"})
    assert ended.returncode == 43 and "Traceback" not in ended.stderr
    assert "error: run.compile: torch cannot compile for cpu on this machine (" in ended.stderr
    assert "set it to off" in ended.stderr
