"""Attempts: what is decided after each end, what the launcher is told, and where the wall time went."""
import datetime
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from Report.goodput import add_up, causes_table, goodput
from Report.page import text_table
from Report.run_logs import read_run
from Runtime import launch, run_lock
from Runtime.errors import InputError
from Runtime.files import append_line
from Runtime.global_batch import fix_step
from Runtime.manifest import durable_step
from Runtime.run_lock import lock
from Supervisor import attempts
from Supervisor.attempts import begin, end, history, share_out
from Supervisor.run import close_run
from tests import launching
from tests.test_verdict import END, died, finish, write_rank
from tests.tiny import arguments, config


def durable(run, *steps, marks=()):
    """A manifest and files of checkpoints of these steps, of which those of `marks` are marked as damaged."""
    entries = {}
    for step in steps:
        name = f"{step:06d}_all_net.pth"
        (run / name).write_bytes(b"x" * 10)
        entries[name] = {"epoch": 0, "step": step, "bytes": 10, "sha256": hashlib.sha256(b"x" * 10).hexdigest()}
        if step in marks:
            entries[name]["damaged"] = "SHA-256 differs"
    (run / "manifest.json").write_text(json.dumps({"checkpoints": entries, "best": None}))


def one_round(run, *events, loop="loop", code=1, **more):
    """One attempt of one rank that leaves these lines. Returns (attempt, decision)."""
    attempt = begin(run, loop, 1)
    write_rank(run, 0, *events, attempt=attempt, exit={"code": code}, **more)
    return attempt, end(run, attempt, code, quiet=True)


def die(run, step=7, error="ValueError: x", **more):
    return one_round(run, died(error), step=step, **more)[1]


def restart(run, **more):
    leave = {"event": "leave", "reason": "asked by a signal"}
    return one_round(run, leave, END, code=42, phase="exit", mode="", **more)[1]


@pytest.mark.parametrize("steps, way", [
    ([2, 4], "goes one checkpoint back."), ([4], "there is no earlier checkpoint to go back to.")])
def test_the_same_death_goes_on_then_back_then_stops(tmp_path, steps, way):
    durable(tmp_path, *steps)
    assert [die(tmp_path) for _ in range(3)] == ["continue", "step back", "stop"]
    said = [line["sentence"] for line in history(tmp_path) if line["event"] == "end"]
    assert said[0].endswith("Continues from the newest checkpoint that verifies (step 4).")
    assert said[1].endswith(f"The same death twice without a new durable step: {way}")
    assert said[2].endswith("Stopped: the same end 3 times without a new durable step after step 4.")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["attempt"] == 2 and verdict["cause"] == "exception" and verdict["sentence"] == said[2]


def mark(run, step, reason):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["checkpoints"][f"{step:06d}_all_net.pth"]["doubtful"] = reason
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_goes_back_once_until_it_has_saved_a_new_step(tmp_path):
    """Each attempt dies in its first step, wherever it begins: then no checkpoint is to blame."""
    durable(tmp_path, 4, 8, 12, 16)
    assert [die(tmp_path, step=16), die(tmp_path, step=16)] == ["continue", "step back"]
    mark(tmp_path, 16, history(tmp_path)[-1]["sentence"])  # as the next attempt does
    assert die(tmp_path, step=12) == "stop"
    assert history(tmp_path)[-1]["sentence"].endswith(
        "Stopped: the same death from step 12 too, so the newest checkpoint (step 16) is not to blame: it counts "
        "again.")
    assert durable_step(tmp_path) == 16
    assert die(tmp_path, step=16, loop="cured, but not quite") == "continue"


def test_other_deaths_after_the_step_back_do_not_lead_further_back(tmp_path):
    durable(tmp_path, 4, 8, 12, 16)
    for _ in range(2):
        die(tmp_path, step=16)
    mark(tmp_path, 16, history(tmp_path)[-1]["sentence"])
    assert [die(tmp_path, step=13, phase="agree") for _ in range(3)] == ["continue", "continue", "stop"]
    assert durable_step(tmp_path) == 16


def test_the_stacks_of_each_death_are_kept(tmp_path):
    """The next attempt of a rank begins with an empty file; an exception leaves no stacks of threads."""
    for attempt, stack in enumerate(("Fatal Python error: Segmentation fault\n", "", "Timeout (0:00:02)!\n")):
        die(tmp_path, step=attempt, stack=stack)
    kept = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert kept == {"attempt0_rank0.txt": "Fatal Python error: Segmentation fault\n",
                    "attempt2_rank0.txt": "Timeout (0:00:02)!\n"}


def test_stacks_that_cannot_be_kept_stop_nothing(tmp_path, capsys):
    (tmp_path / "stacks").write_text("a file where the folder would be")
    assert die(tmp_path, stack="Timeout (0:00:02)!\n") == "continue"
    assert "attempts.jsonl has the verdict on attempt 0; its stacks are lost" in capsys.readouterr().err


def test_a_new_durable_step_counts_anew(tmp_path):
    """After it a run may also go back again."""
    decisions = []
    for step in (4, 4, 8, 8, 12, 12, 12):
        durable(tmp_path, step - 4, step)
        decisions.append(die(tmp_path))
    assert decisions == ["continue", "step back"] * 3 + ["stop"]


def test_planned_restarts_after_a_fallback_are_no_ends(tmp_path):
    """The newest checkpoints turned out damaged, and the run has to come back a long way to where they were."""
    for step in range(20, 320, 20):
        durable(tmp_path, step, 500, 600, marks=(500, 600))
        assert restart(tmp_path, step=step) == "restart" and history(tmp_path)[-1]["durable"] == step
    assert die(tmp_path, step=301) == "continue"


def test_the_durable_step_is_that_of_the_newest_checkpoint_that_counts(tmp_path):
    assert durable_step(tmp_path) == 0
    durable(tmp_path, 4, 8, 12, 16)
    assert durable_step(tmp_path) == 16
    (tmp_path / "000016_all_net.pth").write_bytes(b"x" * 9)
    assert durable_step(tmp_path) == 12
    (tmp_path / "000012_all_net.pth").unlink()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["checkpoints"]["000008_all_net.pth"]["doubtful"] = "died there twice"
    # Killed between the rename and the manifest: this one counts once its SHA-256 has been compared.
    (tmp_path / "000020_all_net.pth").write_bytes(b"y" * 10)
    digest = hashlib.sha256(b"y" * 10).hexdigest()
    pending = {"checkpoint": "000020_all_net.pth", "best": None,
               "entry": {"epoch": 0, "step": 20, "bytes": 10, "sha256": digest}}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "pending": pending}))
    assert durable_step(tmp_path) == 20
    (tmp_path / "000020_all_net.pth").write_bytes(b"z" * 10)
    assert durable_step(tmp_path) == 4
    (tmp_path / "manifest.json").write_text("{")
    assert durable_step(tmp_path) == 0


FULL = "OSError: [Errno 28] x.pth could not be written (No space left on device; 0.00 GiB free)"
AWAY = "OSError: [Errno 5] no checkpoint in Models/all_net can be read (Input/output error)"


@pytest.mark.parametrize("deaths, decisions", [
    ([{"error": FULL}] * 10, ["continue"] * 9 + ["stop"]),  # no checkpoint is doubted
    ([{"error": AWAY, "phase": "restore"}] * 4, ["continue"] * 4),
    ([{"loop": loop} for loop in "aabbb"], ["continue", "step back"] * 2 + ["stop"]),  # another launch counts anew
    ([{"step": step} for step in range(10)], ["continue"] * 9 + ["stop"]),
    ([{"phase": phase} for phase in ("forward", "backward", "agree")], ["continue"] * 3)])
def test_what_follows_each_of_several_deaths(tmp_path, deaths, decisions):
    assert [die(tmp_path, **more) for more in deaths] == decisions
    last = history(tmp_path)[-1]
    assert (last["cause"] == "disk") == ("error" in deaths[0])
    assert len(deaths) < 10 or "10 ends without a new durable step after step 0" in last["sentence"]


def test_planned_restarts_go_on_while_there_is_progress(tmp_path):
    decisions = []
    for step in (1, 2, 3, 3, 3):
        durable(tmp_path, step)
        decisions.append(restart(tmp_path))
        assert (tmp_path / "verdict.json").exists() == (decisions[-1] == "stop"), "the launcher then names this file"
    assert decisions == ["restart"] * 4 + ["stop"]
    assert "Stopped: 3 planned restarts in a row at step 3." in (tmp_path / "verdict.json").read_text()
    assert history(tmp_path)[-3]["sentence"] == "attempt 3: planned restart (asked by a signal). Continues from step 3."


def test_done(tmp_path, capsys):
    attempt = begin(tmp_path, "loop", 2)
    for rank in (0, 1):
        finish(tmp_path, rank, attempt=attempt)
    assert end(tmp_path, attempt, 0) == "done"
    assert capsys.readouterr().err == "attempt 0: done. The training is complete.\n"


def test_a_refusal_in_the_middle_of_the_run_is_a_death(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIMORPH_TOKEN", "loop")  # of a launcher
    refused = {"event": "refused", "error": "the loss was not finite", "phase": "between steps"}
    assert [one_round(tmp_path, refused, END, code=43, phase="exit", mode="")[1] for _ in range(3)] == [
        "continue", "step back", "stop"]
    assert "Starts anew: no checkpoint" in history(tmp_path)[1]["sentence"], "none has been written"


@pytest.mark.parametrize("phase", ["data set", "stage", "restore"])
def test_a_refusal_at_the_start_needs_a_person(tmp_path, phase):
    refused = {"event": "refused", "error": "images_00001.npy is damaged", "phase": phase}
    assert one_round(tmp_path, refused, END, code=43, phase="exit", mode="")[1] == "stop"


def refuse(run, patience_s, phase="data set", **more):
    run.mkdir(exist_ok=True)
    attempt = begin(run, "loop", 1)
    refused = {"event": "refused", "error": "the cache is in use by OM_prepare", "phase": phase}
    write_rank(run, 0, refused, END, attempt=attempt, exit={"code": 43}, phase="exit", mode="", **more)
    return end(run, attempt, 43, quiet=True, patience_s=patience_s)


def age(run, seconds):
    """Let all ends of a run be older."""
    lines = [{**line, "time": line["time"] - seconds} for line in history(run)]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_refusal_after_the_run_has_trained_has_patience(tmp_path):
    assert die(tmp_path) == "continue"
    assert [refuse(tmp_path, 600) for _ in range(12)] == ["continue"] * 12
    assert "may pass: tried again for up to 600 s" in history(tmp_path)[-1]["sentence"]
    assert die(tmp_path, step=8) == "continue", "what has passed counts no more"
    assert refuse(tmp_path, 600) == "continue"
    age(tmp_path, 601)
    assert [refuse(tmp_path, 600) for _ in range(2)] == ["continue", "stop"], "at least three tries"
    assert "nothing has begun for 600 s" in history(tmp_path)[-1]["sentence"]


def test_half_a_line_saved_before_a_planned_restart_has_patience_too(tmp_path):
    assert restart(tmp_path) == "restart"
    assert [never_started(tmp_path) for _ in range(5)] == ["continue"] * 5
    assert history(tmp_path)[-1]["cause"] == "never started"


def never_started(run):
    return end(run, begin(run, "loop", 1), 1, quiet=True, patience_s=600)


def test_what_never_starts_in_a_new_loop_stops_after_three(tmp_path):
    assert [never_started(tmp_path) for _ in range(3)] == ["continue", "step back", "stop"]


@pytest.mark.parametrize("restarts, decision", [("0", "stop"), ("1", "continue")])
def test_a_requeued_job_that_has_trained_has_patience_as_nobody_waits_for_it(tmp_path, monkeypatch, restarts, decision):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert die(tmp_path, loop="former start") == "continue"
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert refuse(tmp_path, 600) == decision
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert refuse(tmp_path / "other", 600) == "stop"


@pytest.mark.parametrize("deaths, checked", [
    ([("ValueError: x", "n1")], [False]), ([("ValueError: x", "n1"), ("KeyError: y", "n1")], [False, True]),
    ([("ValueError: x", "n1"), ("ValueError: x", "n2"), ("OSError: z", "n1")], [False, False, True]),
    ([("rank 3 did not arrive within 20 s", "n1")], [True])])
def test_nodes_are_checked_again_after_the_second_death_on_one_of_them(tmp_path, deaths, checked):
    found = []
    for number, (error, host) in enumerate(deaths):
        die(tmp_path, step=number, error=error, host=host)
        found.append(json.loads((tmp_path / "verdict.json").read_text())["check_nodes"])
    assert found == checked


def test_an_attempt_that_nobody_closed_is_closed_by_the_next(tmp_path, capsys):
    assert begin(tmp_path, "a", 1) == 0
    write_rank(tmp_path, 0)
    assert begin(tmp_path, "b", 1) == 1
    kinds = [(line["event"], line["attempt"], line["loop"]) for line in history(tmp_path)]
    assert kinds == [("begin", 0, "a"), ("end", 0, "a"), ("begin", 1, "b")]
    assert history(tmp_path)[1]["cause"] == "vanished" and "attempt 0: vanished" in capsys.readouterr().err


def test_a_lost_list_of_attempts_makes_no_killed_attempt_a_finished_one(tmp_path):
    assert begin(tmp_path, "a", 2) == 0
    for rank in range(2):
        finish(tmp_path, rank)
    assert end(tmp_path, 0, 0, quiet=True) == "done"
    (tmp_path / "attempts.jsonl").unlink()
    assert begin(tmp_path, "b", 2) == 1
    for rank in range(2):
        write_rank(tmp_path, rank, attempt=1, exit={"code": 137})
    assert end(tmp_path, 1, 1, quiet=True) == "continue" and history(tmp_path)[-1]["cause"] == "killed"
    assert [line["attempt"] for line in read_run(tmp_path)["attempts"]] == [1, 1], "the page needs no others"


class LosesItsServer:
    """A connection to a store whose server dies once this rank has said that it is done."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = dist.TCPStore("127.0.0.1", self.server.port, is_master=False)

    def set(self, *key_and_value):
        self.store.set(*key_and_value)
        self.server = None

    def check(self, keys):
        return self.store.check(keys)


def test_a_run_is_closed_although_torchrun_died_with_its_store(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HELD", {})
    token = lock(tmp_path, 60)
    ranks = launch.Ranks(world_size=2, store=LosesItsServer(), attempt=begin(tmp_path, token, 2), token=token)
    for rank in range(2):
        finish(tmp_path, rank)
    close_run(ranks, tmp_path, 0)
    assert history(tmp_path)[-1]["cause"] == "done" and not (tmp_path / "lock.json").exists()


def test_a_lost_manifest_is_not_taken_for_a_run_without_checkpoints(tmp_path):
    die(tmp_path)
    assert history(tmp_path)[-1]["verdict"]["dead"] and "Starts anew" in history(tmp_path)[-1]["sentence"]
    durable(tmp_path, 4)
    (tmp_path / "manifest.json").write_text("")
    die(tmp_path, step=8)
    assert history(tmp_path)[-1]["next"] == (
        "Continues from the newest checkpoint that verifies, although manifest.json lists none that counts.")


@pytest.mark.parametrize("cut", [b'{"event": "end", "atte', b'{"event": "end"\n\xff\xfe\0'])
def test_a_line_cut_short_costs_only_itself(tmp_path, cut):
    die(tmp_path)
    with open(tmp_path / "attempts.jsonl", "ab") as file:
        file.write(cut)
    assert begin(tmp_path, "loop", 1) == 1
    write_rank(tmp_path, 0, died("ValueError: x"), attempt=1, exit={"code": 1})
    assert end(tmp_path, 1, 1, quiet=True) == "step back"
    assert [(line["event"], line["attempt"]) for line in history(tmp_path)] == [
        ("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


# ---------------------------------------------------------------------------------------------------------------------
# What the launcher calls
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def call(monkeypatch, capsys):
    """call(*words, NAME=value, ...): `python -m Supervisor.attempts ...` with these variables: code, output, errors.

    What `begin` tells the launcher is a dict of variables, as the launcher exports them.
    """
    def called(*words, **variables):
        with monkeypatch.context() as patch:
            patch.setattr(run_lock, "HELD", {})
            for name in [name for name in os.environ if name.startswith("OMNIMORPH_")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            code = attempts.main([str(word) for word in words])
        out, err = capsys.readouterr()
        told = {name: str(value) for name, value in json.loads(out).items()} if out else {}
        return SimpleNamespace(code=code or 0, told=told, err=err)
    return called


def own(done):
    """The variables of a run, which the launcher passes on."""
    assert done.code == 0, done.err
    return {name: value for name, value in done.told.items() if name.startswith("OMNIMORPH_")}


def begin_words(folder, *more, **changes):
    return ["begin", *arguments(folder, *more, **changes), "--launcher-pid", os.getpid(), "--tasks", 1]


def test_rounds_through_the_command_line(tmp_path, call):
    folder = tmp_path / "a folder's $(echo); `id`"
    first = call(*begin_words(folder, "--max-steps-before-restart", "3"))
    mine, found = own(first), first.told
    run = folder / "Models/demo_om_net"
    assert found["OMNIMORPH_RUN"] == str(run) and (found["OMNIMORPH_ATTEMPT"], found["OMNIMORPH_ROUND"]) == ("0", "0")
    assert found["OMNIMORPH_STEP_BACK"] == ""
    assert json.loads((run / "lock.json").read_text())["stale_after_s"] == 3 * 900, "docs/trouble.md says 45 minutes"
    names = ("ROUND_SECONDS", "LEAVE_AFTER", "MAX_ROUNDS", "PAUSE_CRASH", "GRACE")
    assert [found[name] for name in names] == ["5400", "5100", "500", "10.0", "5"]
    other = call(*begin_words(folder), "--launcher-pid", os.getppid())
    assert other.code == 43 and f"error: {run} is in use by process {os.getpid()}" in other.err
    assert not other.told and len(history(run)) == 1
    for attempt in (0, 1):
        write_rank(run, 0, died("ValueError: it's $1"), attempt=attempt, exit={"code": 1})
        ended = call("end", 1, **{**mine, "OMNIMORPH_ATTEMPT": str(attempt)})
        assert ended.code == 1 and "exception: rank 0 on node0" in ended.err
        found = call(*begin_words(folder), **mine).told
        assert (found["OMNIMORPH_ATTEMPT"], found["OMNIMORPH_ROUND"]) == (str(attempt + 1),) * 2
        assert found["OMNIMORPH_TOKEN"] == mine["OMNIMORPH_TOKEN"]
    assert found["OMNIMORPH_STEP_BACK"].startswith("attempt 1: exception") and "it's $1" in found["OMNIMORPH_STEP_BACK"]
    finish(run, 0, attempt=2)
    assert call("end", 0, **{**mine, "OMNIMORPH_ATTEMPT": "2"}).code == 0
    assert call("unlock", **mine).code == 0 and not (run / "lock.json").exists()


def test_a_step_back_is_not_lost_if_end_was_killed(tmp_path, call):
    run, mine = tmp_path / "Models/demo_om_net", {}
    for attempt in (0, 1):
        mine = own(call(*begin_words(tmp_path), **mine))
        if not attempt:
            durable(run, 8, 12)
        write_rank(run, 0, died("ValueError: x"), attempt=attempt, exit={"code": 1})
        if not attempt:
            call("end", 1, **mine)
    mine = own(call(*begin_words(tmp_path), **mine))
    ends = [line for line in history(run) if line["event"] == "end"]
    assert [line["decision"] for line in ends] == ["continue", "step back"], "the start has judged the second one"
    assert (mine["OMNIMORPH_STEP_BACK"], mine["OMNIMORPH_ROUND"]) == (ends[1]["sentence"], "2")


def test_a_step_back_is_not_lost_if_the_next_start_is_refused(tmp_path, call):
    run, mine = tmp_path / "Models/demo_om_net", {}

    def one_more(event, code, **more):
        mine.update(own(call(*begin_words(tmp_path), **mine)))
        if not (run / "manifest.json").exists():
            durable(run, 8, 12, 16)
        write_rank(run, 0, event, attempt=int(mine["OMNIMORPH_ATTEMPT"]), exit={"code": code}, **more)
        call("end", code, **mine)
        return mine["OMNIMORPH_STEP_BACK"], history(run)[-1]["decision"]

    refused = {"event": "refused", "error": "data.root: no such folder", "phase": "data set"}
    assert one_more(died("ValueError: x"), 1) == ("", "continue")
    assert one_more(died("ValueError: x"), 1) == ("", "step back")
    back = history(run)[-1]["sentence"]
    assert one_more(refused, 43, phase="data set") == (back, "continue")
    assert one_more(died("OSError: y"), 1, phase="join") == (back, "continue"), "none of them has read a checkpoint"
    mark(run, 16, back)  # as an attempt does that then dies
    assert one_more(died("ValueError: x"), 1) == ("", "stop")
    assert "the same death from step 12 too" in history(run)[-1]["sentence"]


def test_a_start_of_a_job_has_gained_something_once_it_has_saved_a_step(tmp_path, call):
    """What an earlier start has saved does not count: else a job with too little time is put back for ever."""
    mine = own(call(*begin_words(tmp_path)))
    run = tmp_path / "Models/demo_om_net"

    def gained(written):
        durable(run, 4, 8)
        manifest = json.loads((run / "manifest.json").read_text())
        for entry in manifest["checkpoints"].values():
            stamp = datetime.datetime.fromtimestamp(time.time() + written, datetime.timezone.utc)
            entry["written"] = stamp.isoformat(timespec="seconds")
        (run / "manifest.json").write_text(json.dumps(manifest))
        return call("gained", **mine).code

    assert call("gained", **mine).code == 1
    assert (gained(-300), gained(0)) == (1, 0)


def test_a_config_that_is_half_written_stops_a_new_run_but_not_one_that_has_begun(tmp_path, call):
    mine = own(call(*begin_words(tmp_path)))
    half = tmp_path / "half.yaml"
    half.write_text("base: config_demo.yaml\nrun:\n  epochs: [1,\n")
    words = ["begin", "--config", half, "--launcher-pid", os.getpid(), "--tasks", 1]
    assert call(*words).code == 43
    for unattended in (mine, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}):
        again = call(*words, **unattended)
        assert again.code == 1 and "error: " in again.err and "half.yaml" in again.err


def test_a_refusal_at_the_start_of_the_real_training_stops(tmp_path, monkeypatch, capsys, call):
    import OM_train_3modes as om  # here: most of these tests need no torch
    mine = own(call(*begin_words(tmp_path)))
    with monkeypatch.context() as patch:
        for name, value in mine.items():
            patch.setenv(name, value)
        assert om.main(arguments(tmp_path)) == 43 and capsys.readouterr().err.startswith("error: ")
    ended = call("end", 43, **mine)
    assert ended.code == 43 and "refused" in ended.err and "This needs a person" in ended.err and ".." not in ended.err


@pytest.mark.parametrize("slurm", ["1", ""])
def test_a_training_that_the_users_command_starts_is_a_run_of_its_own(tmp_path, monkeypatch, capsys, call, slurm):
    import OM_train_3modes as om
    mine = own(call(*begin_words(tmp_path / "first")))
    kept = Path(mine["OMNIMORPH_RUN"]) / "launches/0000/config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text(f"run:\n  notify: env > {tmp_path}/told\n")
    with monkeypatch.context() as patch:
        for name in (*mine, "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "RANKS", "SLURM_STEP_ID"):
            patch.setenv(name, mine.get(name, "0"))
        patch.setenv("UNDER_SLURM", slurm)
        attempts.notify_end(Path(mine["OMNIMORPH_RUN"]), {"decision": "done", "sentence": "x"})
    told = (tmp_path / "told").read_text()
    told = dict(re.findall(r"^(OMNIMORPH_\w+|MASTER_\w+|\w*RANKS?|WORLD_SIZE|SLURM_STEP_ID)=(.*)", told, re.M))
    given = {"OMNIMORPH_RUN": mine["OMNIMORPH_RUN"], "OMNIMORPH_SUBJECT": "done", "OMNIMORPH_MESSAGE": "x"}
    assert told == given | ({} if slurm else {"RANKS": "0"})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert om.main(arguments(tmp_path / "second")) == 43 and capsys.readouterr().err.startswith("error: ")
    assert not (Path(mine["OMNIMORPH_RUN"]) / "rank0.jsonl").exists()


def test_the_first_launch_fixes_the_step_and_fewer_ranks_do_all_of_it(tmp_path, capsys):
    """Nodes with two ranks each, data.global_batchsize 0 as in the shipped configs."""
    def split(nodes, asked, **changes):
        found = share_out(tmp_path, config(**changes), nodes, 2, asked)
        return *found, capsys.readouterr().err
    whole = {"samples": 8, "pairs": 4, "ranks": 4, "ratio": 2.0}
    assert split(1, 2)[0]["samples"] == 4
    assert split(2, 4) == (whole, 2, 2, "")
    assert json.loads((tmp_path / "step.json").read_text()) == whole
    durable(tmp_path, 4)  # from now on it is fixed: it has been taken
    assert split(1, 4) == (whole, 1, 2, "2 of 4 ranks (1 x 2) do the whole step of 8 samples, 2 batches each\n")
    assert split(2, 4, data__diff_reg_batch_ratio=1)[0] == {**whole, "pairs": 8, "ratio": 1.0}
    assert split(2, 4)[0] == whole and split(4, 8, data__global_batchsize=16)[0]["samples"] == 16
    assert split(2, 4)[0] == whole, "a launch that is refused later changes nothing"
    (tmp_path / "000001_demo_om_net.pth").touch()
    (tmp_path / "manifest.json").rename(tmp_path / "lost")
    assert split(1, 2)[0] == whole, "a lost manifest does not undo it"
    (tmp_path / "lost").rename(tmp_path / "manifest.json")
    step, *used, said = split(3, 8)  # three of four nodes: six ranks cannot share four batches
    assert (step, used) == (whole, [2, 2]) and "2 more could not share it evenly and stay idle" in said
    with pytest.raises(InputError, match="of 8 samples, which the run's first launch with 4 ranks fixed, is not"):
        split(4, 8)  # nothing is missing: somebody wants more than the run can use
    assert split(4, 8, data__global_batchsize=16) == (
        {**whole, "samples": 16, "pairs": 8, "ranks": 8}, 4, 2, ""), "the config's"
    fix_step(tmp_path, config(data__global_batchsize=16), 8, trains=True)
    assert split(2, 4)[0]["samples"] == 16, "as it was last"


def test_a_step_is_kept_if_its_file_is_lost_or_the_config_sets_the_same_samples(tmp_path):
    """Three ranks of batch 2 at ratio 4 take a pair each, where 6 samples / 4 would be one pair in all."""
    def step(ranks, **changes):
        return fix_step(tmp_path, config(data__diff_reg_batch_ratio=4, **changes), ranks, trains=True)
    whole, path = {"samples": 6, "pairs": 3, "ranks": 3, "ratio": 4.0}, tmp_path / "step.json"
    assert step(3) == whole
    durable(tmp_path, 4)
    assert step(3, data__global_batchsize=6) == whole
    assert step(1, data__global_batchsize=6, data__batchsize=1) == {**whole, "ranks": 1}
    path.unlink()
    assert step(3) == whole, "a checkpoint without its logs, as on another cluster"
    write_rank(tmp_path, 0, {"event": "epoch"})
    for lose in (path.unlink, lambda: path.write_text(""), lambda: path.write_text("[]")):
        lose()
        with pytest.raises(InputError, match=f"{path} is missing or damaged.*: set data.global_batchsize"):
            step(1)
    write_rank(tmp_path, 0, {"event": "step", "samples": 6}, {"event": "epoch"})
    for _ in range(2):
        assert step(1) == whole == json.loads(path.read_text())
    path.write_text('{"samples": 6, "pairs": 3, "ranks": 3}')
    assert step(1) == whole, "as versions before 1.4 wrote it"
    assert step(1, data__global_batchsize=12)["pairs"] == 3, "another step has samples / ratio"


def test_the_launcher_is_told_the_step_and_who_does_it(tmp_path, call):
    found = call(*begin_words(tmp_path), "--tasks", 2, "--nodes", 2, "--of", 8).told
    assert (found["NODE_COUNT"], found["TASKS_PER_NODE"], found["RANKS"]) == ("2", "2", "4")
    assert json.loads(found["OMNIMORPH_STEP"]) == {"samples": 16, "pairs": 8, "ranks": 8, "ratio": 2.0}
    assert history(tmp_path / "Models/demo_om_net")[0]["ranks"] == 4


def test_a_first_launch_with_ranks_that_cannot_share_its_batch_is_refused(tmp_path, call):
    done = call(*begin_words(tmp_path, data__global_batchsize=6), "--tasks", 2)
    assert done.code == 43 and "data.global_batchsize 6 is not a multiple of data.batchsize 2 x 2" in done.err
    assert not (tmp_path / "Models/demo_om_net/lock.json").exists(), "on another host it would be in the way"


def test_a_refused_first_start_leaves_no_folder_that_would_be_continued(tmp_path, call):
    """By a rank, and before there is one; a folder in which somebody keeps more stays."""
    fresh, newer = [*begin_words(tmp_path), "--fresh"], tmp_path / "Models/demo_om_net-2"
    (tmp_path / "Models/demo_om_net/launches").mkdir(parents=True)
    for more in (False, True):
        mine = own(call(*fresh))
        (newer / ("notes" if more else "rank0.stack")).touch()
        refused = {"event": "refused", "error": "x", "phase": "data set"}
        write_rank(newer, 0, refused, phase="data set", exit={"code": 43})
        assert call("end", 43, **mine).code == 43 and call("unlock", **mine).code == 0
        assert newer.exists() == more
    shutil.rmtree(newer)
    assert call(*fresh, "--tasks", 3, "--set", "data.global_batchsize=4").code == 43 and not newer.exists()
    assert own(call(*begin_words(tmp_path)))["OMNIMORPH_RUN"] == str(tmp_path / "Models/demo_om_net")


def test_a_folder_that_is_removed_while_it_trains_is_told_in_one_sentence(tmp_path, call):
    mine = own(call(*begin_words(tmp_path)))
    run = Path(mine["OMNIMORPH_RUN"])
    run.rename(tmp_path / "elsewhere")
    for words, subject in ((["end", 1], f"{run}/attempts.jsonl: no longer has attempt 0"),
                           (begin_words(tmp_path), f"{run}/.lock.claim: No such file or directory")):
        done = call(*words, **mine)
        assert done.code == 1 and done.err == (
            f"error: {subject}: somebody has moved or removed the run; put it back, or start the same command again.\n")


def test_a_launcher_whose_first_begin_died_after_it_locked_the_folder_gets_it(tmp_path, call):
    run = tmp_path / "Models/demo_om_net"
    run.mkdir(parents=True)
    token = lock(run, 60, pid=os.getpid())
    assert own(call(*begin_words(tmp_path)))["OMNIMORPH_TOKEN"] == token


def test_a_requeued_job_finds_its_own_folder_although_a_newer_one_is_there(tmp_path, call):
    gone = launching.start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    words = [gone.pid if word == os.getpid() else word for word in begin_words(tmp_path)]
    first = own(call(*words, SLURM_JOB_ID="7"))
    early = call(*begin_words(tmp_path, run__patience_s=0), SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert early.code == 43 and f"process {gone.pid} of the former start of this job is still there" in early.err
    gone.communicate(timeout=20)
    other = own(call(*begin_words(tmp_path, "--fresh"), SLURM_JOB_ID="8"))
    assert other["OMNIMORPH_RUN"] != first["OMNIMORPH_RUN"] and first["OMNIMORPH_ROUND"] == "0"
    found = own(call(*begin_words(tmp_path, "--fresh"), SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1"))
    assert found["OMNIMORPH_RUN"] == first["OMNIMORPH_RUN"], "--fresh counts for its first start only"
    kept = Path(first["OMNIMORPH_RUN"]) / "launches/0000/config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text(f"run:\n  notify: echo $OMNIMORPH_MESSAGE >> {tmp_path}/told\n")
    for restarts in ("0", "1"):  # a first start has no run before it begins
        call("tell", "no node", *arguments(tmp_path), SLURM_JOB_ID="7", SLURM_RESTART_COUNT=restarts)
    assert (tmp_path / "told").read_text() == "no node\n"
    assert (found["OMNIMORPH_ATTEMPT"], found["OMNIMORPH_ROUND"]) == ("1", "1")


def test_a_copy_of_a_run_is_not_the_run_of_a_requeued_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = tmp_path / "Models/demo_om_net-2"
    begin(run, "loop", 1)
    assert attempts.run_of_job(config(tmp_path)) == run
    run.rename(f"{run}_backup")
    assert attempts.run_of_job(config(tmp_path)) is None


def test_a_full_disk_under_the_launcher_is_waited_for_and_then_one_sentence(tmp_path, monkeypatch, call):
    full = [True] * 9  # for so many lines to come

    def append(path, line):
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        append_line(path, line)

    monkeypatch.setattr(attempts, "append_line", append)
    done = call(*begin_words(tmp_path / "full", run__patience_s=0))
    assert done.code == 43 and re.fullmatch(
        "error: .*attempts.jsonl: No space left on device, and that did not pass: make room, .*\n", done.err)
    full[:] = [True]
    begun = call(*begin_words(tmp_path, run__patience_s=30))
    full[:] = [True]
    ended = call("end", 1, **own(begun))
    assert ended.code == 1
    assert (begun.err + ended.err).count("No space left on device; tried again for up to 30") == 2
    run = tmp_path / "Models/demo_om_net"
    assert [line["event"] for line in history(run)] == ["begin", "end"]
    (run / "launches/0000").mkdir(parents=True)
    (run / "launches/0000/config.yaml").write_text(f"run:\n  notify: echo $OMNIMORPH_MESSAGE >> {tmp_path}/told\n")
    full[:] = [True]
    assert call("end", 1, **{**own(begun), "OMNIMORPH_PATIENCE_S": "0"}).code == 43
    assert "attempts.jsonl: No space left on device, and that did not pass" in (tmp_path / "told").read_text()


def test_a_verdict_that_cannot_be_written_changes_no_decision_and_is_told(tmp_path, call):
    begun = own(call(*begin_words(tmp_path)))
    run = Path(begun["OMNIMORPH_RUN"])
    (run / "verdict.json").mkdir()  # nothing that would pass
    (run / "launches/0000").mkdir(parents=True)
    (run / "launches/0000/config.yaml").write_text(f"run:\n  notify: echo $OMNIMORPH_MESSAGE >> {tmp_path}/told\n")
    write_rank(run, 0, {"event": "refused", "error": "bad key", "phase": "start"}, phase="start", exit={"code": 43})
    ended = call("end", 43, **begun)
    assert ended.code == 43 and "attempts.jsonl has the verdict on attempt 0" in ended.err
    assert "bad key. This needs a person" in (tmp_path / "told").read_text()


def test_errors_of_the_command_line_are_sentences(tmp_path, call):
    bad = call(*begin_words(tmp_path, run__epochs="many"))
    assert (bad.code, bad.told) == (43, {}) and bad.err.startswith("error: ") and "run.epochs" in bad.err
    assert not (tmp_path / "Models").exists()
    none = call(tmp_path / "nowhere")
    assert none.code == 43 and "time of a run went, use python -m Report.run" in none.err


# ---------------------------------------------------------------------------------------------------------------------
# Goodput
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path):
    """Killed in step 3 at 100 s, durable step 2; again from 110 s; done at 200 s."""
    spent = {"start": 4.0, "data": 2.0, "forward": 5.0, "backward": 3.0}
    log = [(0, "step", 0, 20, spent), (0, "step", 1, 30, {"forward": 8.0, "checkpoint": 2.0}),
           (0, "step", 2, 40, {"forward": 10.0}),
           (1, "step", 2, 130, {"restore": 5.0, "forward": 12.0}), (1, "step", 3, 150, {"optimizer": 20.0}),
           (1, "epoch", 3, 151, None), (1, "end", 3, 190, {"evaluate": 30.0, "refresh": 4.0, "leave": 1.0})]
    with open(tmp_path / "rank0.jsonl", "w") as file:
        for attempt, event, step, time, seconds in log:
            line = {"event": event, "attempt": attempt, "rank": 0, "step": step, "time": 1000.0 + time, "epoch": 0}
            file.write(json.dumps({**line, "spent": seconds} if seconds else line) + "\n")
        file.write('{"event": "now", "attempt": 1, "number"')
    lines = [{"event": "begin", "attempt": 0, "time": 1000.0},
             {"event": "end", "attempt": 0, "time": 1100.0, "verdict": {"dead": True, "cause": "killed"}},
             {"event": "begin", "attempt": 1, "time": 1110.0},
             {"event": "end", "attempt": 1, "time": 1200.0, "verdict": {"dead": False, "cause": "done"}}]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_kinds_add_up_to_the_wall_time(run):
    kinds, causes = add_up(read_run(run))
    assert sum(kinds.values()) == pytest.approx(200.0)
    expected = {"useful steps": 8 + 8 + 12 + 20, "replayed steps": 10, "waiting for data": 2, "checkpoints": 2,
                "validation": 30, "process-group refresh": 4, "detection": 60}
    assert {kind: kinds[kind] for kind in expected} == pytest.approx(expected)
    assert kinds["restart"] == pytest.approx(200 - sum(expected.values()))
    assert causes["killed"] == pytest.approx({"times": 1, "detection": 60, "replayed": 10, "restart": 100 - 66})
    assert causes["first start"]["restart"] == pytest.approx(40 - 30)
    assert causes["done"]["times"] == 1 and causes["done"]["detection"] == 0


def test_goodput_as_a_table(run):
    assert goodput(add_up(read_run(run))[0]) == pytest.approx((48 + 30) / 200)
    text = text_table(*causes_table(read_run(run)))
    assert [line for line in text.splitlines() if "killed" in line][0].split()[-4:] == ["60.0", "34.0", "10.0", "104.0"]


def test_the_time_between_a_finished_run_and_more_epochs_does_not_count(run):
    with open(run / "attempts.jsonl", "a") as file:
        file.write(json.dumps({"event": "begin", "attempt": 2, "time": 90000.0}) + "\n")
        file.write(json.dumps({"event": "end", "attempt": 2, "time": 90007.0,
                               "verdict": {"dead": False, "cause": "done"}}) + "\n")
    kinds, _ = add_up(read_run(run))
    assert sum(kinds.values()) == pytest.approx(207.0)


@pytest.mark.parametrize("before, after, pause", [
    ({"loop": "a", "job": ""}, {"loop": "b", "job": ""}, 0),             # Ctrl-C, and the same command later
    ({"loop": "a", "job": "7"}, {"loop": "b", "job": "8"}, 0),           # another job
    ({"loop": "a", "job": "7"}, {"loop": "b", "job": "7"}, 810),         # requeued by Slurm after its signal
    ({"loop": "a", "job": ""}, {"loop": "a", "job": ""}, 810)])          # a round of the same launcher
def test_the_pause_that_a_person_makes_does_not_count(run, before, after, pause):
    lines = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    for line, changes in zip(lines, [before, {}, after, {}]):
        line.update(changes)
    lines[1]["verdict"] = {"dead": False, "cause": "planned restart", "detail": "requested by a signal"}
    for line in lines[2:]:
        line["time"] += 800
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds, _ = add_up(read_run(run))
    assert sum(kinds.values()) == pytest.approx(190 + pause)


def test_a_run_that_is_still_going_on_counts_up_to_its_last_step(run):
    lines = (run / "attempts.jsonl").read_text().splitlines()[:3]
    (run / "attempts.jsonl").write_text("\n".join(lines) + "\n")
    kinds, causes = add_up(read_run(run))
    assert sum(kinds.values()) == pytest.approx(190.0) and causes["no verdict yet"]["times"] == 1
