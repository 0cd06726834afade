"""Averages of whatever terms the step functions return; and the recipe of docs/new_loss.md, as it is written."""
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import OM_train_3modes
from Runtime import agree
from Runtime.errors import InputError
from Runtime.launch import Ranks
from Runtime.progress import add_terms, averages, new_sums, of_their_share
from tests import launching
from tests.tiny import QUICK, ROOT, arguments, log_lines, make_data, settings

ALONE = Ranks()
AVERAGES = OM_train_3modes.TERMS
TRY = """
import sys
import pytest
import OM_train_3modes
failed = pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_losses.py", "-k", "bending"])
sys.exit(failed or OM_train_3modes.main(sys.argv[1:]))
"""

RECIPE = re.search(r"```diff\n(.*?)```", (ROOT / "docs/new_loss.md").read_text(), re.S)[1]


def test_the_recipe_of_a_new_loss_applies_to_the_code_of_today():
    checked = subprocess.run(["git", "apply", "--check", "-"], input=RECIPE, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_a_term_that_is_new_is_averaged_like_the_others():
    sums = new_sums(AVERAGES)
    assert averages(sums) == dict.fromkeys(AVERAGES)
    add_terms(sums, {"total": 1.0, "bend": 2.0})
    add_terms(sums, {"total": 2.0, "bend": 4.0})
    assert averages(sums) == {**dict.fromkeys(AVERAGES), "total": 1.5, "bend": 3.0}
    assert list(averages(sums)) == [*AVERAGES, "bend"]


def test_a_term_that_some_pairs_have_is_averaged_over_these():
    """Step functions return it times the share of these pairs: three of four, none, one of four."""
    sums = new_sums(AVERAGES)
    for dice, labelled in ((0.4, 0.75), (0.0, 0.0), (0.8, 0.25)):
        add_terms(sums, {"regist": 1.0, "dice": dice * labelled, "labelled": labelled})
    found = averages(sums)
    assert found["dice"] == pytest.approx((3 * 0.4 + 0.8) / 4) and found["labelled"] == pytest.approx(1 / 3)
    sums = new_sums(AVERAGES)
    add_terms(sums, {"regist": 1.0, "dice": 0.0, "labelled": 0.0})
    assert averages(sums) == {**dict.fromkeys(AVERAGES), "regist": 1.0, "dice": None, "labelled": 0.0}
    assert of_their_share({"ang": -0.1, "dice": 0.0, "labelled": 0.0}) == {"ang": -0.1, "labelled": 0.0}
    assert of_their_share({"ang": -0.1}) == {"ang": -0.1}


@pytest.mark.parametrize("name", ["steps", "counts", "epoch", "nonfinite"])
def test_a_term_cannot_take_a_name_of_the_log(name):
    sums = new_sums(AVERAGES)
    with pytest.raises(InputError, match=f"a loss term is called {name}.* rename the term"):
        add_terms(sums, {name: 1.0})
    assert sums == new_sums(AVERAGES)


def test_a_slow_first_step_does_not_count_in_the_pace(tmp_path, monkeypatch, capfd):
    """A first step compiles: on an H200 it takes 15 s, the others 0.3 s."""
    real, pauses = OM_train_3modes.train_step, iter([3.0])

    def slow_at_first(*given, **raised):
        time.sleep(next(pauses, 0.0))
        return real(*given, **raised)

    monkeypatch.setattr(OM_train_3modes, "train_step", slow_at_first)
    make_data(tmp_path)
    assert OM_train_3modes.main(arguments(tmp_path, **QUICK, data__repeats=4, run__epochs=1)) == 0
    first, *others = log_lines(tmp_path, "step")
    shown = float(re.findall(r"([\d.]+) samples/s", capfd.readouterr().err)[-1])
    assert shown == pytest.approx(len(others) * first["samples"] / (others[-1]["time"] - first["time"]), rel=0.1)


def test_more_terms_than_are_exchanged_are_named():
    assert len(agree.agree(ALONE, 0, "diffusion", terms=[1.0] * agree.TERMS).terms) == agree.TERMS > len(AVERAGES)
    with pytest.raises(InputError, match="mode diffusion returns 17 loss terms, at most 16"):
        agree.agree(ALONE, 0, "diffusion", terms=[1.0] * 17)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_recipe_of_a_new_loss(tmp_path):
    code = tmp_path / "code"
    for folder in ("Config", "Dataloader", "Diffusion", "Inference", "Report", "Runtime", "Scripts", "Study",
                   "Supervisor", "tests"):
        shutil.copytree(ROOT / folder, code / folder, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    shutil.copy(ROOT / "OM_train_3modes.py", code)
    (code / "bending.diff").write_text(RECIPE)
    git = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    applied = subprocess.run(["git", "apply", "bending.diff"], cwd=code, env=git, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    make_data(tmp_path)
    words = [word for item in settings(tmp_path, run__epochs=1, loss__bend=0.03) for word in ("--set", item)]
    ended = launching.run([sys.executable, "-c", TRY, "--config", "Config/config_demo.yaml", *words], cwd=code,
                          timeout=200, env={**git, "PYTHONPATH": str(code)})
    assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout + ended.stderr
    epoch, steps = log_lines(tmp_path, "epoch")[0], log_lines(tmp_path, "step")
    assert epoch["bend"] == pytest.approx(sum(step["terms"]["bend"] for step in steps) / len(steps))
    assert epoch["bend"] > 0
    assert f"bend {epoch['bend']:.3g}" in ended.stdout + ended.stderr
    board = EventAccumulator(str(next((tmp_path / "Logs").rglob("events*"))))
    board.Reload()
    assert board.Scalars("train/bend")[0].value == pytest.approx(epoch["bend"])
