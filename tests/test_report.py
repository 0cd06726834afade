"""The report of a run: of real logs, of made-up ones, of a run that goes on, of a copy, of a hundred thousand steps."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import OM_train_3modes as om
from Diffusion import training_state
from Report import compare
from Report import run as report
from Report.compare import PLACES, differing_keys, short_names
from Report.goodput import add_up, over_time
from Report.run import attempt_rows, duration, main, settings_of, state_of
from Report.run_logs import read_launches, read_run
from Runtime import provenance
from Runtime.errors import InputError
from Runtime.files import append_line, partial_path
from Runtime.profile import new_profile, parse_steps, profile_step
from tests.faults.common import run_of
from tests.made_up_run import START, STEP_S, made_up_run
from tests.test_page import NASTY, Balance
from tests.tiny import QUICK, ROOT, arguments, config, make_data

LOSSES = ["total", "ang", "dist", "regul", "contrastive", "regist", "imgsim", "imgmse", "ddf"]
HEADINGS = ["What is wrong, and what to do", "Losses", "Validation", "Where the time went", "Attempts", "Ranks",
            "Speed", "Gradients, gate, learning rate", "Config", "Environment"]

SLOW_S = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real training of one rank: a profile, a planned restart after step 9; then other settings, and a picture."""
    folder = tmp_path_factory.mktemp("report")
    make_data(folder, size=8)
    settings = {**QUICK, "run__epochs": 2, "run__picture_every": 2, "run__checkpoint_steps": 0, "run__val_pairs": 1}
    with pytest.MonkeyPatch.context() as patch:  # a full disk of the machine is a finding too
        patch.setattr("Runtime.progress.disk_space", lambda run: {"disk_free": 5 * 10 ** 11, "disk_total": 10 ** 12})
        assert om.main(arguments(folder, "--max-steps-before-restart", "10", "--profile", "3:1", **settings)) == 42
        announce = training_state.announce
        patch.setattr(training_state, "announce", lambda run: (time.sleep(SLOW_S), announce(run)))  # a slow disk
        assert om.main(arguments(folder, **{**settings, "optim__lr": 2e-4})) == 0
    return folder


def page_of(run, out):
    assert main([str(run), "--out", str(out)]) == 0
    return out.read_text()


@pytest.mark.slow
def test_the_page_of_a_real_run(folder, tmp_path):
    text = page_of(run_of(folder), tmp_path / "page.html")
    page = Balance(text)
    assert not re.search(r"https?://|url\(|@import|<script", text) and len(text) < 2_000_000
    charts = [attributes["aria-label"] for tag, attributes in page.attributes if tag == "svg"]
    shown = " ".join(page.text)
    zeros = re.search(r"0 throughout: (.*?)\.", shown)[1].split(", ")
    assert "regul" in zeros and charts[:9 - len(zeros)] == [name for name in LOSSES if name not in zeros]
    assert {"val_dice", "val_ang", "samples per second", "learning rate", "host memory, GiB", "own work of a step, s",
            "gradient norm, registration"} < set(charts)
    assert "-1 is perfect" in shown
    assert all(heading in shown for heading in [*HEADINGS, "Pictures", "Profile"])
    assert "Done since" in shown and "No rule found a problem" in shown and "2 of 2" in shown
    assert "attempt 0: planned restart" in shown and shown.count("--max-steps-before-restart") >= 1
    assert 'class="mark planned"' in text and "aten::" in shown and "registration, step 11" in shown
    assert "optim.lr" in shown and "0.0002" in shown  # the change since the launch before
    assert text.count("data:image/png") == 1


def test_what_a_training_logs_for_it(folder):
    found = read_run(run_of(folder))
    steps = found["steps"]
    assert steps["step"][steps["is_step"] == 1].tolist() == list(range(12))
    assert set(steps) > {"norms.diffusion", "norms.contrastive", "norms.registration", "lr", "samples"}
    assert steps["samples"][0] == 2 and steps["lr"][0] == pytest.approx(1e-4) and steps["lr"][-2] == pytest.approx(2e-4)
    [pace] = found["pace"][0]
    assert (pace["steps"], pace["step"]) == (10, 9) and pace["host_used"] > 10 ** 7
    assert 0 < pace["disk_free"] <= pace["disk_total"] and pace["spent"]["forward"] > 0
    # What a launch does between the checkpoint and its first step belongs to the restart, not to a step.
    resumed = steps["step"].tolist().index(10)
    assert steps["spent.agree"][resumed] < SLOW_S < steps["spent.restore"][resumed]


def test_tensorboard_has_speed_memory_and_gradients(folder):
    board = EventAccumulator(str(next((folder / "Logs").rglob("events*")).parent)).Reload()
    tags = set(board.Tags()["scalars"])
    assert tags > {"speed/samples_per_s", "speed/step_s", "speed/data_percent", "train/lr", "memory/host_used_gib",
                   "gradient_norm/diffusion", "gradient_norm/contrastive", "gradient_norm/registration"}
    assert [event.step for event in board.Scalars("train/ang")] == [5, 11], "the last step of each epoch"
    assert [event.step for event in board.Images("registration")] == [11]
    [event] = board.Scalars("speed/samples_per_s")
    assert event.step == 9 and 0.1 < event.value < 10_000


def test_a_copied_folder_gives_the_same_page_and_is_not_changed(folder, tmp_path):
    copy = tmp_path / "elsewhere/demo_om_net"
    shutil.copytree(run_of(folder), copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    parts = [page_of(run, tmp_path / f"{number}.html").split("<footer>")[0]
             for number, run in enumerate((run_of(folder), copy))]
    assert parts[0] == parts[1]
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


def test_the_terminal_shows_the_same(folder, capsys):
    assert main([str(run_of(folder)), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "Done since" in shown and "no rule found a problem" in shown and "planned restart" in shown
    assert re.search(r"^ang .*[\u2581-\u2588]{10}", shown, re.M) and re.search(r"^val_dice ", shown, re.M)
    assert "optim.lr 0.0001 -> 0.0002" in shown
    assert not (run_of(folder) / "report.html").exists()


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(folder):
    command = [sys.executable, "-m", "Report.run", str(run_of(folder)), "--text"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # before the program writes anything
    assert (process.stderr.read(), process.wait()) == ("", 128 + signal.SIGPIPE)


def test_bad_input_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 43
    assert capsys.readouterr().err == (f"error: {tmp_path}/nowhere: there is no attempts.jsonl; give the folder of a "
                                       "run, Models/<data>_<net>.\n")
    run = made_up_run(tmp_path / "run", 20)
    assert main([str(run), "--out", str(run)]) == 43
    assert f"{run}: Is a directory; results cannot be written there" in capsys.readouterr().err
    partial_path(run / "report.html").mkdir()
    assert main([str(run)]) == 43
    assert capsys.readouterr().err == (f"error: {run}/report.html: Is a directory; results cannot be written there; "
                                       "name another --out.\n")


@pytest.mark.parametrize("steps", [0, 9])
def test_a_run_that_has_just_begun_has_a_page(steps, tmp_path):
    run = made_up_run(tmp_path / "run", steps, ended=False)
    Balance(page_of(run, tmp_path / "page.html"))
    assert main([str(run), "--text"]) == 0
    for path in run.glob("rank*"):
        path.unlink()
    shutil.rmtree(run / "launches")
    text = page_of(run, tmp_path / "page.html")
    assert "no rank has written to its log yet" in text and "the config is not known" in text


@pytest.mark.parametrize("epochs, left", [(10, None), (12, "50 s"), (11, "25 s")])
def test_the_time_that_is_left_goes_by_the_newest_epoch(epochs, left, tmp_path):
    """Steps of half a second. The first epochs had fewer steps, as after more data or on other ranks."""
    few = made_up_run(tmp_path / "run", 500, run__epochs=epochs, epoch=lambda number, line: {
        "steps": 5 if number < 6 else 50})
    found = read_run(few)
    assert report.time_left(found, add_up(found)[0]) == left
    inside = read_run(made_up_run(tmp_path / "inside", 520, run__epochs=12))
    assert report.time_left(inside, add_up(inside)[0]) == "40 s"


def test_a_config_of_noise_is_left_out(tmp_path):
    run = made_up_run(tmp_path / "run", 9)
    (run / "launches/0000/config.yaml").write_bytes(bytes(range(256)))
    assert "the config is not known" in page_of(run, tmp_path / "page.html")


def test_damage_costs_the_parts_that_it_hit(tmp_path, capsys):
    """Each was a traceback of the report: tests/fuzz.py found them."""
    run = made_up_run(tmp_path / "run", 60)
    path = run / "launches/0000/launch.json"
    launch = json.loads(path.read_text())
    terms = launch["modes"][0]["terms"]
    launch["command"][1:1], terms[1:1] = [True, {}, None], [[], 7]
    launch["modes"].append({"name": 3})
    path.write_text(json.dumps({**launch, "packages": []}))
    (run / "manifest.json").write_text('{"checkpoints": {"a": null, "b": {"bytes": "many"}}}')
    page = page_of(run, tmp_path / "page.html")
    assert " ".join(word for word in launch["command"] if isinstance(word, str)) in page
    assert main([str(run), "--text"]) == 0 and all(name in capsys.readouterr().out for name in terms[:1])
    lines = (run / "attempts.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"begin"' not in line]
    (run / "attempts.jsonl").write_text("\n".join([*kept, '{"event": "x", "attempt": 0}', ""]))
    assert "no line of a beginning" in page_of(run, tmp_path / "page.html")


def test_what_a_log_says_is_escaped(tmp_path):
    leak = {"event": "leak", "step": 9, "time": 1.0, "who": "graph", "place": "host", "bytes_per_step": 1,
            "steps_left": 3, "sentence": NASTY}
    run = made_up_run(tmp_path / "run", 20, events=[(0, leak)],
                      step=lambda number, line: {"terms": {**line["terms"], NASTY: 1.0}}, data__subject_pattern=NASTY)
    (run / "pictures").mkdir()
    (run / "pictures/registration_x.png").write_bytes(b"no picture")
    assert "<script" not in page_of(run, tmp_path / "page.html")


# ---------------------------------------------------------------------------------------------------------------------
# The state
# ---------------------------------------------------------------------------------------------------------------------

def end_of(run, **changes):
    end = {"event": "end", "attempt": 0, "loop": "x", "time": START + 99, "cause": "killed", "decision": "continue",
           "verdict": {"dead": True, "cause": "killed", "rank": 1, "host": "n1"}, "sentence": "rank 1 was killed."}
    append_line(run / "attempts.jsonl", {**end, **changes})


def test_the_state_is_one_sentence(tmp_path):
    run = made_up_run(tmp_path / "run", 100, ended=False)
    last = START + STEP_S * 100
    word, sentence = state_of(read_run(run), last + 5)
    assert word == "running" and sentence == "Running: rank 0 on h is in forward (diffusion) of step 99, since 5 s."
    assert state_of(read_run(run), last - 5)[1].endswith("since 0 s."), "the clock here is behind that of the node"
    word, sentence = state_of(read_run(run), last + 200)
    assert word == "silent" and "the same command continues it, or this is a copy" in sentence
    end_of(run)
    assert state_of(read_run(run))[0] == "waiting" and "to be started again" in state_of(read_run(run))[1]
    (run / "lock.json").write_text('{"token": "x", "stale_after_s": 60}')
    assert "Between two rounds since" in state_of(read_run(run))[1]
    os.utime(run / "lock.json", (time.time() - 61,) * 2)
    assert "to be started again" in state_of(read_run(run))[1], "the launcher has died"
    end_of(run, decision="stop", sentence="Stopped: the same end 3 times.")
    word, sentence = state_of(read_run(run))
    assert word == "stopped" and sentence.endswith(": Stopped: the same end 3 times.")


def test_a_run_that_has_died_is_neither_running_nor_silent(tmp_path):
    """Without a launcher no verdict follows, but the ranks' last words are in their logs."""
    def died(rank, **changes):
        return rank, {"event": "died", "step": 99, "time": START + 60 + rank, "phase": "checkpoint", "mode": "",
                      "error": "OSError: [Errno 28] No space left on device\nmore", "errno": 28, "stack": [], **changes}

    run = made_up_run(tmp_path / "run", 100, ended=False, events=[died(1)])
    assert state_of(read_run(run), START + 60)[0] == "running", "rank 0 may still be at work"
    run = made_up_run(tmp_path / "run", 100, ended=False, events=[died(0), died(1, error="ConnectionError: peer")])
    word, sentence = state_of(read_run(run), START + 60)
    assert word == "died" and re.fullmatch(
        r"Died at [-\d]+ [:\d]+: rank 0 in checkpoint of step 99: OSError: \[Errno 28\] No space left on device\. The "
        "same command continues it, unless its launcher does.", sentence)
    assert [row["cause"] for row in attempt_rows(read_run(run))] == ["no verdict yet"]
    append_line(run / "attempts.jsonl", {"event": "begin", "attempt": 1, "loop": "y", "time": START + 99, "ranks": 2})
    assert state_of(read_run(run), START + 100)[0] == "running", "a later attempt counts"


def test_durations_in_words():
    assert [duration(seconds) for seconds in (7, 119, 300, 12_000, 260_000, None)] == [
        "7 s", "119 s", "5 min", "3 h 20 min", "3 d 0 h", "-"]


def test_follow_keeps_page_and_terminal_up_to_date_until_the_end(tmp_path, monkeypatch, capsys):
    run = made_up_run(tmp_path / "run", 30, ended=False)
    append_line(run / "rank0.jsonl", {"event": "now", "attempt": 0, "rank": 0, "step": 29, "mode": "", "phase": "data",
                                      "number": 1, "time": time.time(), "deadline": 900, "host": "h"})

    def end_meanwhile(seconds):
        if seconds >= report.FOLLOW_S:  # not of git, which is waited for
            assert 'http-equiv="refresh"' in (run / "report.html").read_text()
            end_of(run, decision="done", cause="done", sentence="The training is complete.", time=time.time(),
                   verdict={"dead": False, "cause": "done"})

    monkeypatch.setattr(report.time, "sleep", end_meanwhile)
    assert main([str(run), "--follow", "--text"]) == 0
    shown = capsys.readouterr().out
    assert "Running: rank" in shown and "Done since" in shown
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()


def test_the_page_of_a_silent_run_refreshes_too(tmp_path):
    """The same command may continue it."""
    run = made_up_run(tmp_path / "run", 5, ended=False)
    assert report.report(report.parse_arguments([str(run), "--follow"])) == "silent"
    assert 'http-equiv="refresh"' in (run / "report.html").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Large runs
# ---------------------------------------------------------------------------------------------------------------------

def test_many_ranks_stay_readable(tmp_path):
    text = page_of(made_up_run(tmp_path / "run", 100, ranks=64), tmp_path / "page.html")
    assert "Table of 64 ranks" in text and "median of all" in text and len(text) < 400_000


@pytest.mark.slow
def test_a_hundred_thousand_steps_open_in_seconds(tmp_path):
    run = made_up_run(tmp_path / "run", 100_000, ranks=2)
    began = time.process_time()
    text = page_of(run, tmp_path / "page.html")
    assert time.process_time() - began < 20 and len(text) < 2_000_000  # 4 s on an idle core


# ---------------------------------------------------------------------------------------------------------------------
# Side by side
# ---------------------------------------------------------------------------------------------------------------------

def test_compare_puts_runs_side_by_side(tmp_path, capsys):
    runs = [made_up_run(tmp_path / f"Models/run-{seed}", 100, run__seed=seed, optim__lr=1e-4 * (1 + (seed == 2)))
            for seed in range(3)]
    (runs[1] / "launches/0000/changes.diff").write_text("a line of the loss")
    out = tmp_path / "compare.html"
    assert compare.main([*map(str, runs), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r'^code +"abc" +"abc with changes [0-9a-f]{8}" +"abc"$', shown, re.M)
    assert re.search(r"^optim.lr +0.0001 +0.0001 +0.0002$", shown, re.M)
    assert re.search(r"^run.seed +0 +1 +2$", shown, re.M)
    assert "| optim.lr | 0.0001 | 0.0001 | 0.0002 |" in shown and "| best val_dice | 0.7475 |" in shown
    text = out.read_text()
    Balance(text)
    assert text.count("<svg") >= 11 and text.count('class="key c2">run-2') >= 9 and "run.models" not in text


def test_compare_shows_what_a_run_has_trained_with_not_only_its_newest_launch(tmp_path, capsys):
    """Nor what no step was trained with: a launch that died before its first step, or whose steps were done again."""
    runs = [made_up_run(tmp_path / name, 100, optim__lr=1e-4) for name in ("changed", "steady")]
    config, launch = (runs[0] / f"launches/0000/{name}" for name in ("config.yaml", "launch.json"))
    for number, (step, lr) in enumerate([(40, 0.7), (20, 2e-4), (60, 1e-4), (100, 0.8)], 1):
        folder = runs[0] / f"launches/000{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text(config.read_text().replace("lr: 0.0001", f"lr: {lr}"))
        (folder / "launch.json").write_text(json.dumps({**json.loads(launch.read_text()), "step": step}))
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "compare.html")]) == 0
    assert re.search(r"^optim.lr +0.0001 then 0.0002 then 0.0001 +0.0001$", capsys.readouterr().out, re.M)


def test_launches_of_installs_of_two_versions_differ_in_their_code(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "omnimorph/Runtime/provenance.py"))  # no checkout
    for version in ("1.11.2", "1.12.0"):
        monkeypatch.setattr(provenance, "__version__", version)
        provenance.save_launch(tmp_path, config(), 0, [])
    assert differing_keys([[settings_of(launch)] for launch in read_launches(tmp_path)]) == [
        ("code", '"1.11.2"', '"1.12.0"')]


def test_compared_hours_are_of_ranks_and_epochs_are_those_of_the_report(tmp_path):
    """An epoch that was left early, for other data, has no line; nothing runs between two attempts."""
    run = made_up_run(tmp_path / "run", 100, ranks=4, ended=False)
    lines = (run / "rank0.jsonl").read_text().splitlines(keepends=True)
    lines.remove(next(line for line in lines if line.startswith('{"event": "epoch"')))
    (run / "rank0.jsonl").write_text("".join(lines))
    end_of(run, time=START + 50)
    again = {"event": "begin", "attempt": 1, "loop": "x", "time": START + 3650, "ranks": 4}
    append_line(run / "attempts.jsonl", again)
    end_of(run, attempt=1, time=START + 3700)
    found = read_run(run)
    assert len(found["epochs"]) == 1
    row = compare.figures(found)
    assert row["epochs"] == 2 and row["rank hours"] == pytest.approx(4 * 100 / 3600) and row["wall time"] == "1 h 1 min"


def test_compare_refuses_one_run_and_the_same_one_twice(tmp_path, capsys):
    run = str(made_up_run(tmp_path / "run", 20))
    assert compare.main([run]) == 43 and "name two runs or more" in capsys.readouterr().err
    assert compare.main([run, run]) == 43 and "the same run is named twice" in capsys.readouterr().err


def test_names_and_keys_tell_runs_apart(tmp_path):
    assert short_names([tmp_path / "a/run", tmp_path / "b/run"]) == ["a/run", "b/run"]
    assert differing_keys([[{"a": 1, "run.models": "x", "c": [1]}], [{"a": 1, "run.models": "y", "c": [2]}]],
                          PLACES) == [("c", "[1]", "[2]")]
    assert differing_keys([[{"a": 1}], [{"a": 1, "b": 2}], []], ["a"]) == [("b", "-", "2", "-")]


# ---------------------------------------------------------------------------------------------------------------------
# --profile
# ---------------------------------------------------------------------------------------------------------------------

def test_a_profile_has_a_trace_and_its_top_operations(folder):
    profile = json.loads((run_of(folder) / "profile/step00000003.json").read_text())
    assert (profile["first"], profile["last"], profile["rank"]) == (3, 3, 0) and len(profile["top"]) >= 20
    times = [row["ms"] for row in profile["top"]]
    assert times == sorted(times, reverse=True) and sum(row["share"] for row in profile["top"]) <= 100.1
    assert os.path.getsize(run_of(folder) / "profile" / profile["trace"]) > 10_000


def test_a_profile_that_a_run_ends_before_is_told(tmp_path, capsys):
    profile = new_profile("1000:5", 0, 0, tmp_path, torch.device("cpu"))
    assert not any(profile_step(profile, step) for step in (0, 500, math.inf))
    assert "ended before step 1000, so nothing was profiled" in capsys.readouterr().err


def test_a_profile_that_a_run_cuts_short_names_the_steps_it_has(tmp_path):
    profile = new_profile("2:100", 0, 0, tmp_path, torch.device("cpu"))
    assert [profile_step(profile, step) for step in (0, 1, 2, 3, 4, math.inf)] == 5 * [False] + [True]
    table = json.loads((tmp_path / "profile/step00000002.json").read_text())
    assert (table["first"], table["last"]) == (2, 4)


@pytest.mark.parametrize("text", ["5", "1:0", "1:101", "a:b", "-1:2"])
def test_a_bad_profile_is_refused(text):
    with pytest.raises(InputError, match="write START:STEPS, such as 100:5"):
        parse_steps(text)


# ---------------------------------------------------------------------------------------------------------------------
# Where the time went, over the time
# ---------------------------------------------------------------------------------------------------------------------

def test_the_parts_of_the_run_add_up_to_what_it_took(tmp_path):
    run = made_up_run(tmp_path / "run", 100, ended=False)
    end_of(run, time=START + 60)  # killed 10 s after its last step
    append_line(run / "attempts.jsonl", {"event": "begin", "attempt": 1, "time": START + 70, "ranks": 2})
    for step in range(90, 120):
        append_line(run / "rank0.jsonl", {"event": "step", "attempt": 1, "rank": 0, "step": step, "open": True,
                                          "nonfinite": 0, "time": START + 80 + step - 90, "epoch": 0,
                                          "spent": {"forward": 1.0}})
    edges, seconds = over_time(read_run(run), 10)
    kinds, _ = add_up(read_run(run))
    wall = edges[-1] - edges[0]
    assert wall == pytest.approx(109) == sum(kinds.values())
    assert sum(values.sum() for values in seconds.values()) == pytest.approx(wall)
    assert {kind: round(float(values.sum()), 3) for kind, values in seconds.items() if "restart" not in kind} == {
        kind: round(value, 3) for kind, value in kinds.items() if value and kind != "restart"}
    assert seconds["restart: killed"].sum() == pytest.approx(19)
    assert seconds["detection"].nonzero()[0].tolist() == [4, 5]  # from 50 to 60 s of 109
    # Ten steps of 0.49 s, and waiting for data, were done again; they stand before the end at 50 s.
    assert seconds["replayed steps"].sum() == pytest.approx(4.9)
    assert seconds["replayed steps"].nonzero()[0].tolist() == [4]
