"""OmniMorph in other people's pipelines: a nipype interface and a Snakemake workflow, each run as their users do."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from tests.tiny import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "the data"
    for seed in range(4):
        write_volume(folder / f"s{seed}.nii.gz", make_subject(seed, 12)["image"], np.eye(4))
    return folder


def test_an_interface_of_nipype_registers_and_names_its_files(data, tmp_path, monkeypatch):
    pytest.importorskip("nipype")
    from Inference.nipype_interface import Register
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    node = Register(fixed=str(data / "s0.nii.gz"), moving=str(data / "s1.nii.gz"), affine="none", inverse=True,
                    args="--refine 2 --device cpu")
    made = node.run(cwd=str(tmp_path)).outputs
    assert json.loads(open(made.results).read())["pairs"][0]["similarity"] > 0
    for path in (made.warped, made.field, made.inverse_field, made.jacobian, made.picture):
        assert os.path.dirname(path) == str(tmp_path / "registration")
    with pytest.raises(Exception, match="s9.nii.gz"):
        Register(fixed=str(data / "s0.nii.gz"), moving=str(data / "s9.nii.gz"))


def test_a_workflow_of_snakemake_registers_parts_and_joins_them(data, tmp_path):
    pytest.importorskip("snakemake")
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "docs/examples/Snakefile", "--cores", "2",
               "--directory", tmp_path, "--config", f"fixed={data}/s0.nii.gz", f"moving={data}",
               f"out={tmp_path}/its results", "parts=2", "options=--affine none --refine 1 --device cpu",
               f"program={sys.executable} {ROOT}/OM_register.py"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "keeping 3 of 3 pairs" in done.stderr
    assert len(json.loads((tmp_path / "its results/results.json").read_text())["pairs"]) == 3
