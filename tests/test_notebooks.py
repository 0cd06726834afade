"""The notebooks: stored without results, and run from top to bottom as a person clicks through them."""
import json
import os
import sys

import pytest

from tests import launching
from tests.tiny import ROOT

NOTEBOOKS = sorted((ROOT / "Notebooks").glob("*.ipynb"))
# What has to be true after the last cell.
AFTER = {
    "register": "assert min(dice_after) > 0.75 and max(dice_before) < 0.2 and found.folding_percent < 0.1",
    "augment": "assert all(np.array_equal(one, other) for one, other in zip(again, copies[3]))\n"
               "assert all(np.abs(field).max() > 1 for _, _, field in copies)\n"
               "assert all(set(np.unique(moved)) == {0, 1, 2} for _, moved, _ in copies)",
}


def cells(path):
    return json.loads(path.read_text())["cells"]


def code_of(path):
    return ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]


def test_each_notebook_has_its_proof():
    assert [path.stem for path in NOTEBOOKS] == sorted(AFTER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_as_jupyter_reads_it_and_without_results(path):
    content = json.loads(path.read_text())
    assert content["nbformat"] == 4 and content["metadata"]["kernelspec"]["language"] == "python"
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert content["cells"][0]["cell_type"] == "markdown" and content["cells"][0]["source"][0].startswith("# ")
    for cell in content["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)
    for code in code_of(path):
        compile(code, path.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path):
    program = tmp_path / "cells.py"
    program.write_text("\n".join([*code_of(path), AFTER[path.stem]]))
    done = launching.run([sys.executable, program], cwd=tmp_path, timeout=600, env={
        **os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"})
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert ("similarity" in done.stdout) if path.stem == "register" else ("the same bits: True" in done.stdout)
