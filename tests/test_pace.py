"""What every rank writes down of its steps."""
import json
import time
from types import SimpleNamespace

import pytest

from Runtime import progress, watchdog
from Runtime.progress import EVERY, disk_space, keep_pace, new_pace, new_writer
from tests.test_writer import read

WATCH = {"samples": [{"host_used": 2 ** 30, "host_free": 2 ** 33, "device_free": None, "device_reserved": None}]}
LINE = {"lr": 0.1, "samples": 4, "norms": {"diffusion": 2.0}}


@pytest.fixture
def lines(monkeypatch):
    """What is logged, as (kind, fields)."""
    logged = []
    monkeypatch.setattr(watchdog, "event", lambda kind, **fields: logged.append((kind, fields)))
    return logged


def test_a_line_has_the_sums_of_its_steps_and_the_next_begins_anew(lines):
    sums = new_pace()
    for number in range(2 * EVERY + 3):
        keep_pace(sums, LINE, {"forward": 0.5, **({"checkpoint": 3.0} if number == 4 else {})}, WATCH, None)
    assert [kind for kind, _ in lines] == ["pace", "pace"]
    assert lines[0][1]["spent"] == {"forward": EVERY / 2, "checkpoint": 3.0} and lines[0][1]["steps"] == EVERY
    assert lines[1][1]["spent"] == {"forward": EVERY / 2} and lines[1][1]["host_used"] == 2 ** 30
    assert "disk_free" not in lines[0][1] and json.dumps(lines)


def test_a_clock_that_is_set_back_changes_no_speed(lines, monkeypatch):
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=lambda: -len(lines) * 3600.0, monotonic=time.monotonic))
    sums = new_pace()
    for _ in range(2 * EVERY):
        keep_pace(sums, LINE, {"forward": 0.5}, WATCH, None)
    assert all(0 <= fields["seconds"] < 60 for _, fields in lines)


def test_before_memory_has_been_measured_the_line_has_none(lines):
    sums = new_pace()
    for _ in range(EVERY):
        keep_pace(sums, LINE, {"forward": 1.0}, {"samples": []}, None)
    assert "host_used" not in lines[0][1]


def test_rank_0_adds_the_disk_and_the_curves(lines, tmp_path, monkeypatch):
    monkeypatch.setitem(watchdog.STATE, "run", tmp_path)
    monkeypatch.setitem(watchdog.STATE, "step", 9)
    monkeypatch.setattr(progress, "FLUSH_S", -1.0)
    curves, sums = new_writer(tmp_path / "board", 0), new_pace()
    for _ in range(EVERY):
        keep_pace(sums, LINE, {"forward": 0.3, "data": 0.1}, WATCH, curves)
    assert 0 < lines[0][1]["disk_free"] < lines[0][1]["disk_total"]
    board = read(tmp_path / "board")  # without a flush at the end of an epoch
    values = {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]}
    assert values["speed/step_s"] == pytest.approx(0.4) and values["speed/data_percent"] == pytest.approx(25)
    assert values["train/lr"] == pytest.approx(0.1) and values["gradient_norm/diffusion"] == 2
    assert values["memory/host_used_gib"] == 1 and "memory/device_free_gib" not in values
    assert values["speed/samples_per_s"] > 0


def test_a_disk_that_does_not_answer_is_left_out(tmp_path):
    assert disk_space(tmp_path / "nowhere") == {} == disk_space(None)
