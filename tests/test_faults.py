"""Faults against real launches: a few rows of the matrix always, all of it and random kills among the slow tests."""
import json
import subprocess
import sys

import pytest

from tests.tiny import ROOT


def run(script, *arguments, seconds):
    """The JSON object of a script's last line; its output is shown where the test fails."""
    process = subprocess.run([sys.executable, f"tests/faults/{script}", *arguments], cwd=ROOT, timeout=seconds,
                             stdout=subprocess.PIPE, text=True)
    print(process.stdout)
    return json.loads(process.stdout.splitlines()[-1])


def test_faults_are_found_named_and_survived():
    rows = ["SIGKILL of one rank", "SIGSTOP of one rank", "other branch on one rank", "newest checkpoint truncated"]
    found = run("run_matrix.py", "--ranks", "2", "--only", *rows, seconds=280)
    assert [row["fault"] for row in found["rows"]] == rows
    assert not found["failed"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_matrix():
    found = run("run_matrix.py", seconds=1790)
    assert len(found["rows"]) >= 30 and sum("4 ranks" in row["fault"] for row in found["rows"]) >= 3
    assert not found["failed"]
    assert all(row["equal"] for row in found["rows"] if row["fault"] != "the same crash every time")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_change_nothing():
    found = run("chaos.py", "--kills", "6", "--seed", "11", seconds=890)
    assert found["kills"] == 6 and found["equal"]
