"""Reading the logs of a run: cut lines, parts, steps done again."""
import json

import numpy as np
import pytest

from Report.goodput import add_up
from Report.rules import last_step
from Report.run_charts import gradient_charts, limits_of, restarts
from Report.run_logs import read_run


def write_lines(path, *lines):
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def begin(run, attempt=0, at=1000.0, ranks=1, **more):
    write_lines(run / "attempts.jsonl", {"event": "begin", "attempt": attempt, "time": at, "ranks": ranks, **more})


def step(number, attempt=0, at=None, **more):
    at = 1000.0 + number if at is None else at
    return {"event": "step", "attempt": attempt, "rank": 0, "step": number, "time": at, "epoch": 0, "open": True,
            "nonfinite": 0, "terms": {"ang": -number / 100}, "norms": {}, "spent": {"forward": 1.0}, **more}


def test_steps_become_columns_and_missing_values_are_gaps(tmp_path):
    begin(tmp_path)
    write_lines(tmp_path / "rank0.jsonl", step(0), step(1, terms={"ang": -1, "regist": 5.0}, lr=0.1),
                step(2, terms={"ang": None}))
    steps = read_run(tmp_path)["steps"]
    assert steps["step"].tolist() == [0, 1, 2] and steps["is_step"].tolist() == [1, 1, 1]
    assert np.array_equal(steps["terms.regist"], [np.nan, 5, np.nan], equal_nan=True)
    assert np.array_equal(steps["terms.ang"], [0, -1, np.nan], equal_nan=True)
    assert np.array_equal(steps["lr"], [np.nan, 0.1, np.nan], equal_nan=True)


def test_a_step_that_was_done_again_counts_once(tmp_path):
    begin(tmp_path)
    begin(tmp_path, 1, 1100.0)
    write_lines(tmp_path / "rank0.jsonl", step(0), step(1), step(2), step(1, 1, 1111.0, lr=0.5), step(2, 1, 1112.0))
    found = read_run(tmp_path)
    once = found["once"]
    assert len(found["steps"]["step"]) == 5
    assert once["step"].tolist() == [0, 1, 2] and once["attempt"].tolist() == [0, 1, 1] and once["lr"][1] == 0.5


def test_what_lies_beyond_the_step_that_a_later_attempt_began_from_is_lost(tmp_path):
    """Also before it is done again, or if the run stops there."""
    begin(tmp_path)
    begin(tmp_path, 1, 1100.0)
    begin(tmp_path, 2, 1200.0)  # refused: it has no step
    for attempt, at in enumerate((1010.0, 1112.0)):
        write_lines(tmp_path / "attempts.jsonl", {"event": "end", "attempt": attempt, "time": at, "cause": "killed",
                                                  "verdict": {"dead": True, "cause": "killed", "phase": "forward"}})

    def epoch(number, attempt):
        return {"event": "epoch", "attempt": attempt, "rank": 0, "step": 2 * (number + 1), "epoch": number}

    def pace(last, attempt):
        return {"event": "pace", "attempt": attempt, "rank": 0, "step": last, "steps": 2}

    write_lines(tmp_path / "rank0.jsonl", *map(step, range(6)), *(epoch(number, 0) for number in range(3)),
                *(pace(last, 0) for last in (1, 3, 5)), step(2, 1, 1111.0), pace(2, 1),
                {"event": "end", "attempt": 2, "rank": 0, "step": 0, "time": 1201.0, "spent": {"start": 1.0}})
    found = read_run(tmp_path)
    assert found["once"]["step"].tolist() == [0, 1, 2] and found["once"]["attempt"].tolist() == [0, 0, 1]
    assert [line["epoch"] for line in found["epochs"]] == [0] and last_step(found) == 2
    assert [line["step"] for line in found["pace"][0]] == [1, 2]
    assert restarts(found) == [(2, "dead", "attempt 0: killed")]
    assert add_up(found)[0]["useful steps"] == 3 and add_up(found)[0]["replayed steps"] == 4


def test_each_step_was_clipped_as_its_launch_says(tmp_path):
    begin(tmp_path)
    write_lines(tmp_path / "rank0.jsonl", *(step(number, norms={"contrastive": 0.5}) for number in range(4)))
    for first, limit in ((0, 0.1), (2, 1.0)):
        folder = tmp_path / f"launches/000{first}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"contrastive: {{clip_norm: {limit}}}\n")
        mode = {"name": "contrastive", "curve": "contrastive", "terms": [], "clip_norm": "contrastive.clip_norm"}
        (folder / "launch.json").write_text(json.dumps({"step": first, "modes": [mode]}))
    found = read_run(tmp_path)
    assert limits_of(found, "contrastive.clip_norm").tolist() == [0.1, 0.1, 1, 1]
    charts = "".join(gradient_charts(found))
    assert "dashed: clipped to 1 in the newest launch" in charts and charts.count("not clipped") == 0


@pytest.mark.parametrize("torn", [b'{"event": "step", "att', b'{"event": "step", "step": 3}x\n', b"\xff\xfe\n", b"7\n"])
def test_a_torn_last_line_is_left_out(torn, tmp_path):
    begin(tmp_path)
    write_lines(tmp_path / "rank0.jsonl", step(0), step(1))
    with open(tmp_path / "rank0.jsonl", "ab") as file:
        file.write(torn)
    with open(tmp_path / "attempts.jsonl", "ab") as file:
        file.write(torn)
    assert read_run(tmp_path)["once"]["step"].tolist() == [0, 1]
    assert add_up(read_run(tmp_path))[0]["useful steps"] == 2


def test_lines_are_sorted_by_what_they_are(tmp_path):
    begin(tmp_path, ranks=2)
    write_lines(tmp_path / "rank0.jsonl", {"event": "start", "attempt": 0, "rank": 0, "time": 1.0}, step(0),
                {"event": "epoch", "attempt": 0, "rank": 0, "epoch": 0, "step": 1, "time": 2.0, "ang": 1},
                {"event": "epoch", "attempt": 0, "rank": 0, "epoch": 0, "step": 1, "time": 3.0, "ang": 2})
    write_lines(tmp_path / "rank1.jsonl", {"event": "pace", "attempt": 0, "rank": 1, "step": 9, "steps": 10, "time": 4},
                {"event": "leak", "attempt": 0, "rank": 1, "step": 9, "time": 0.5},
                {"event": "now", "attempt": 0, "rank": 1, "step": 9, "time": 4.0})
    (tmp_path / "lock.json").write_text('{"token": "x"')  # a machine died while it was written
    found = read_run(tmp_path)
    assert [line["ang"] for line in found["epochs"]] == [2]
    assert [line["event"] for line in found["events"]] == ["leak", "start"]
    assert found["now"][1]["step"] == 9 and len(found["pace"][1]) == 1 and not found["pace"][0]
    assert found["lock"] == {} and found["launches"] == [] and found["pictures"] == []
