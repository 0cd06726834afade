"""Faults against real launches: a few rows of the matrix always, all of it and random kills among the slow tests."""
import json
import sys

import pytest

from tests import launching
from tests.faults.run_matrix import NEED_RIGHTS, matrix
from tests.tiny import ROOT


def run(script, *arguments, seconds):
    """The JSON object of a script's last line; its output is shown where the test fails."""
    process = launching.run([sys.executable, f"tests/faults/{script}", *arguments], cwd=ROOT, timeout=seconds,
                            stderr=None)
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
    titles = [title for title, *_ in matrix()]
    assert [row["fault"] for row in found["rows"]] == [title for title in titles if title not in found["left_out"]]
    assert set(found["left_out"]) <= set(NEED_RIGHTS), found["left_out"]
    assert len(titles) >= 45 and sum("zero1" in title for title in titles) >= 5
    assert not found["failed"]
    assert all(row["equal"] for row in found["rows"] if row["fault"] != "the same crash every time")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_change_nothing():
    found = run("chaos.py", "--kills", "6", "--seed", "11", seconds=890)
    assert found["kills"] == found["named"] == 6 and found["equal"]
