"""The scaling report: exact figures from hand-written logs, and real launches of 1 and 2 ranks."""
import datetime
import itertools
import json
import re
import shutil
import sys

import pytest

from Runtime.config import save_config
from Runtime.errors import InputError
from Scripts.scaling import WARM_UP, compare, main, measurements, report
from tests import launching, warm
from tests.faults.common import new_folder, run_of
from tests.tiny import QUICK, ROOT, arguments, config, log_lines

START = 1_000_000.0
LEAD = [{"start": 5.0, "epoch": 1.0, "forward": 30.0}, {"forward": 7.0}, {"forward": 6.0}]  # compiles


class Log:
    """A run folder written by hand; time goes by as the phases of the steps say."""

    def __init__(self, run, **changes):
        self.run, self.now, self.attempt = run, START, -1
        run.mkdir(parents=True)
        self.changes = {"data__batchsize": 2, **changes}

    def write(self, name, **line):
        with open(self.run / name, "a") as file:
            file.write(json.dumps({"attempt": self.attempt, "time": self.now, **line}) + "\n")

    def begin(self, ranks, nodes=1, **changes):
        self.attempt += 1
        self.now += 10
        self.write("attempts.jsonl", event="begin", ranks=ranks)
        for rank in range(ranks):
            self.write(f"rank{rank}.jsonl", event="start", host="h", node=f"n{rank * nodes // ranks}")
        folder = self.run / f"launches/{self.attempt:04d}"
        folder.mkdir(parents=True)
        save_config(config(**{**self.changes, **changes}), folder / "config.yaml")
        started = datetime.datetime.fromtimestamp(self.now).astimezone().isoformat(timespec="seconds")
        (folder / "launch.json").write_text(json.dumps({"started": started}))

    def steps(self, first, phases, epoch=0, **more):
        for number, spent in enumerate(phases, first):
            self.now += sum(spent.values())
            self.write("rank0.jsonl", event="step", step=number, epoch=epoch, spent=spent, **{"open": True, **more})

    def end_epoch(self, epoch, steps):
        self.write("rank0.jsonl", event="epoch", epoch=epoch, steps=steps)


# ---------------------------------------------------------------------------------------------------------------------
# Exact figures
# ---------------------------------------------------------------------------------------------------------------------

def test_first_steps_and_those_behind_a_checkpoint_do_not_count(tmp_path):
    log = Log(tmp_path / "run")
    log.begin(4, nodes=2)
    log.steps(0, [*LEAD, {"forward": 1.5, "data": 0.25, "agree": 0.25}, {"forward": 3.0, "data": 1.0},
                  {"checkpoint": 4.0, "forward": 2.0}, {"evaluate": 9.0, "epoch": 1.0, "forward": 2.0},
                  {"forward": 1.0}])
    (row,) = measurements(tmp_path / "run")
    assert {key: row[key] for key in ("ranks", "nodes", "batch", "steps", "left_out", "step_s")} == {
        "ranks": 4, "nodes": 2, "batch": 8, "steps": 3, "left_out": 5, "step_s": 2.0}
    assert row["samples_per_s"] == pytest.approx(8 * 3 / (2.0 + 4.0 + 1.0))
    assert row["data_share"] == pytest.approx(1.25 / 7) and row["agree_share"] == pytest.approx(0.25 / 7)
    assert row["mode3_share"] == 1 and row["epoch_s"] is None


def test_the_first_step_with_mode_3_compiles_too(tmp_path):
    log = Log(tmp_path / "run")
    log.begin(1)
    log.steps(0, [*LEAD, {"forward": 1.0}], open=False)
    log.steps(4, [{"forward": 50.0}, {"forward": 2.0}])
    (row,) = measurements(tmp_path / "run")
    assert (row["steps"], row["left_out"], row["mode3_share"]) == (2, 4, 0.5)
    assert row["samples_per_s"] == pytest.approx(2 * 2 / 3.0)


def test_replayed_steps_count_once_and_every_attempt_warms_up(tmp_path):
    log = Log(tmp_path / "run")
    log.begin(2)
    log.steps(0, [*LEAD, *[{"forward": 1.0}] * 4])  # 3 .. 6
    log.begin(2)
    log.steps(2, [*LEAD, {"forward": 2.0}, {"forward": 4.0}, {"forward": 3.0}])  # 2 .. 4 compile, 5 and 6 again, 7
    with open(tmp_path / "run/rank0.jsonl", "a") as file:
        file.write('{"event": "step", "attempt": 1, "st')  # a machine died
    (row,) = measurements(tmp_path / "run")
    assert (row["steps"], row["left_out"]) == (5, 3), "3 and 4 from the first attempt, 5 .. 7 from the second"
    assert row["samples_per_s"] == pytest.approx(4 * 5 / (1 + 1 + 2 + 4 + 3)) and row["step_s"] == 2.0


def test_each_number_of_ranks_nodes_and_samples_is_a_row_and_the_smallest_the_measure(tmp_path):
    log = Log(tmp_path / "a/run")
    log.begin(2)
    log.steps(0, [*LEAD, {"forward": 2.0}])
    log.begin(8)
    log.steps(4, [*LEAD, {"forward": 2.5}])
    log.begin(8, nodes=2)
    log.steps(8, [*LEAD, {"forward": 4.0}])
    log.begin(4, data__batchsize=3)
    log.steps(12, [*LEAD, {"forward": 3.0}])
    log.begin(16)
    log.steps(16, LEAD)
    other = Log(tmp_path / "b/run", data__batchsize=4)
    other.begin(1)
    other.steps(0, [*LEAD, {"forward": 4.0}])
    rows, notes = compare([tmp_path / "a/run", tmp_path / "b/run"])
    assert [(row["ranks"], row["nodes"], row["batch"], row["samples_per_s"]) for row in rows] == [
        (1, 1, 4, 1.0), (2, 1, 4, 2.0), (4, 1, 12, 4.0), (8, 1, 16, 6.4), (8, 2, 16, 4.0)]
    assert [row["speedup"] for row in rows] == [1.0, 2.0, 4.0, 6.4, 4.0]
    assert [row["efficiency"] for row in rows] == [1.0, 1.0, 1.0, 0.8, 0.5]
    assert notes == [f"{tmp_path}/a/run with 16 ranks: no step is left to measure, so it is left out."]


def test_what_cannot_be_compared_is_said(tmp_path):
    first, second = Log(tmp_path / "1"), Log(tmp_path / "2", model__attention_depth=2, run__epochs=7)
    for log, split in ((first, [True, False]), (second, [True, True])):
        log.begin(1)
        log.steps(0, LEAD)
        for number, opened in enumerate(split, 3):
            log.steps(number, [{"forward": 1.0}], open=opened)
    _, notes = compare([first.run, second.run])
    assert notes == ["Not the same work everywhere: the configs differ in model.attention_depth.",
                     "Not the same work everywhere: mode 3 ran in 50 to 100 % of the steps (registration.gate)."]


def test_time_per_epoch_is_that_of_complete_epochs_in_one_attempt(tmp_path):
    log = Log(tmp_path / "run")
    log.begin(1)
    log.steps(0, [*LEAD, {"forward": 2.0}])
    log.now += 3  # validation
    log.end_epoch(0, 4)
    assert measurements(log.run)[0]["epoch_s"] == pytest.approx(1 + 30 + 7 + 6 + 2 + 3), "all but the start"
    log.steps(4, [{"checkpoint": 1.0, "epoch": 1.0, "forward": 2.0}, *[{"forward": 2.0}] * 3], epoch=1)
    log.end_epoch(1, 4)
    assert measurements(log.run)[0]["epoch_s"] == pytest.approx(10.0), "without the one that compiles"
    log.steps(8, [{"checkpoint": 1.0, "forward": 2.0}] * 2, epoch=2)
    log.begin(1)
    log.steps(10, [*LEAD[:2]], epoch=2)
    log.end_epoch(2, 4)
    log.steps(12, [{"checkpoint": 2.0, "epoch": 1.0, "forward": 2.0}, *[{"forward": 3.0}] * 3], epoch=3)
    log.end_epoch(3, 4)
    (row,) = measurements(log.run)
    assert row["epoch_s"] == pytest.approx((10 + 14) / 2), "epoch 2 was in two attempts"


def test_one_run_alone_has_efficiency_one(tmp_path, capsys):
    log = Log(tmp_path / "run")
    log.begin(2)
    log.steps(0, [*LEAD, {"forward": 2.0}])
    assert report([log.run], tmp_path) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["ranks"], row["efficiency"], row["speedup"]) == (2, 1.0, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

def test_bad_input_is_a_sentence(tmp_path, capsys):
    log = Log(tmp_path / "run")
    with pytest.raises(InputError, match="there is no such folder; give the folder of a run"):
        measurements(tmp_path / "nowhere")
    with pytest.raises(InputError, match="there is no attempts.jsonl; give the folder of a run"):
        measurements(log.run)
    log.begin(1)
    with pytest.raises(InputError, match="logs have no step yet"):
        measurements(log.run)
    log.steps(0, LEAD)
    assert main([str(log.run)]) == 43
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {log.run}: none of its 3 steps counts, because the first {WARM_UP}")
    assert not printed.out
    log.steps(3, [{"forward": 1.0}])
    (tmp_path / "file").write_text("in the way")
    assert main([str(log.run), "--out", str(tmp_path / "file")]) == 43
    assert "file: File exists; results cannot be written there" in capsys.readouterr().err
    shutil.rmtree(log.run / "launches")
    with pytest.raises(InputError, match="launches/ lacks the config of its first steps"):
        measurements(log.run)


# ---------------------------------------------------------------------------------------------------------------------
# Real launches
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two epochs of six steps with four samples each, by one rank and by two."""
    parent = tmp_path_factory.mktemp("scaling")
    made = [new_folder(parent, str(ranks)) for ranks in (1, 2)]
    for ranks, folder in enumerate(made, 1):
        words = arguments(folder, **QUICK, data__batchsize=1, data__global_batchsize=4, data__repeats=4,
                          run__checkpoint_steps=0)
        warm.train(ranks, folder / "log", words)
    return made


def expected_rate(folder):
    """Samples per second by the clock alone, from the end of one step to the end of the next."""
    steps = log_lines(folder, "step")
    assert [line["step"] for line in steps] == list(range(12))
    seconds = sum(after["time"] - before["time"] for before, after in itertools.pairwise(steps[WARM_UP - 1:])
                  if after["step"] != 6)  # the first of the second epoch
    return 4 * (12 - WARM_UP - 1) / seconds


@pytest.mark.slow
def test_the_report_on_real_runs(folders, tmp_path):
    words = [*map(run_of, folders), "--out", tmp_path / "new/out"]
    ended = launching.run([sys.executable, "Scripts/scaling.py", *words], cwd=ROOT, timeout=100)
    assert ended.returncode == 0, ended.stderr
    *shown, last = ended.stdout.splitlines()
    result, page = json.loads(last), tmp_path / "new/out/scaling.html"
    assert result["page"] == str(page) and f"report: {page}" in shown
    assert result["notes"] == ["The effective batch is the same everywhere (strong scaling)."]
    rows = result["rows"]
    rates = [expected_rate(folder) for folder in folders]
    for ranks, (row, folder, rate) in enumerate(zip(rows, folders, rates), 1):
        assert (row["ranks"], row["nodes"], row["batch"], row["steps"], row["left_out"]) == (ranks, 1, 4, 8, 4)
        # The clock of a line is read after its step has ended: 20 ms later, on a busy machine, and all take 2 s.
        assert row["samples_per_s"] == pytest.approx(rate, rel=0.05)
        epochs = [line["time"] for line in log_lines(folder, "epoch")]
        assert row["epoch_s"] == pytest.approx(epochs[1] - epochs[0]) and row["epoch_s"] > 6 * 0.5 * row["step_s"]
        assert 0 < row["data_share"] < 0.5 and 0 < row["agree_share"] < 1 and row["mode3_share"] == 1
    assert rows[1]["efficiency"] == pytest.approx(rates[1] / rates[0] / 2, rel=0.1)
    assert re.search(rf"\n +2 +1 +4 +[\d.]+ +{rows[1]['samples_per_s']:.4g} ", ended.stdout)
    text = page.read_text()
    assert "samples per second" in text and "ideal" in text and "strong scaling" in text
    assert f"<td class=num>{rows[1]['samples_per_s']:.4g}</td>" in text
