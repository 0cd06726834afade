"""Faults that a review found, each as its user met it, and the page of promises."""
import argparse
import os
import re
import subprocess

import pytest

import OM_train_3modes as om
from Dataloader.cache import read_manifest
from OM_prepare import prepare
from Report.goodput import add_up
from Report.rules import find_all
from Report.run import headline
from Report.run_logs import read_run
from Runtime import checkpoint
from Runtime.config import load_config
from Runtime.errors import InputError
from tests.launching import until
from tests.tiny import QUICK, ROOT, arguments, make_data, options

ONE_SUBJECT = {"data__train_ids": "", "data__val_ids": "", "data__subject_pattern": "(subject)"}


def test_a_fresh_clone_is_told_that_no_data_were_named(tmp_path):
    cfg = load_config("config_om.yaml", [f"data.cache={tmp_path}", f"data.root={tmp_path / 'none'}"])
    with pytest.raises(InputError, match="data.root .*none: there is no such data folder.*--set data.root=FOLDER"):
        read_manifest(tmp_path, cfg)
    with pytest.raises(InputError, match="data.root .*none: there is no such data folder.*--set data.root=FOLDER"):
        prepare(tmp_path, cfg, argparse.Namespace(fresh=False, repair=False))


def test_bars_of_a_job_print_a_line_a_minute():
    said = subprocess.run(["bash", "-c", 'root=$PWD; source Scripts/site.sh; echo "$TQDM_MININTERVAL"'], cwd=ROOT,
                          text=True, capture_output=True, env={**os.environ, "CLUSTER": "local"}, timeout=60)
    assert said.stdout.strip() == "60", said.stderr
    assert "TQDM_MININTERVAL" in (ROOT / "bash_train_multi_nodes.sh").read_text()


def test_a_refused_start_leaves_no_folder_and_is_no_death(tmp_path, capsys):
    """G14: a first start that is refused leaves nothing; one in a folder with a run is neither a death nor lost time.
    F13: whose volumes are of one subject is told why mode 2 stays 0."""
    run, changes = tmp_path / "Models/demo_om_net", {**QUICK, **ONE_SUBJECT, "data__repeats": 1}
    assert om.main(arguments(tmp_path, **changes)) == 43 and "no such data" in capsys.readouterr().err
    assert list((tmp_path / "Models").iterdir()) == [] and not (tmp_path / "Logs").exists()
    (tmp_path / "Models").rmdir()
    (tmp_path / "Models").symlink_to("nowhere")
    assert om.main(arguments(tmp_path, **changes)) == 43
    assert "Models: a link to nowhere, which is no folder: name another folder" in capsys.readouterr().err
    (tmp_path / "Models").unlink()
    make_data(tmp_path, size=8)
    assert om.main(arguments(tmp_path, **changes, run__epochs=1)) == 0
    assert "all training volumes are of one subject, so mode 2 has no other" in capsys.readouterr().out
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    before = read_run(run)
    assert find_all(before) == []
    assert om.main(arguments(tmp_path, **changes, run__epochs=2)) == 43
    after = read_run(run)
    cards = {label: (value, note) for label, value, note in headline(after, [])}
    assert cards["Deaths"] == (0, "in 2 attempts, 1 refused at its start")
    assert add_up(after)[0]["restart"] == add_up(before)[0]["restart"]
    [each] = find_all(after)
    assert each["rule"] == "stopped" and "This needs a person" in each["sentence"]


def test_an_error_of_the_picture_does_not_cost_the_epoch(data, tmp_path, monkeypatch):
    """B17: its checkpoint is written before the figure is drawn."""
    def no_font(*_, **__):
        raise RuntimeError("the font is gone")

    changes = {**QUICK, "run__picture_every": 1, "run__checkpoint_steps": 0, "data__repeats": 1}
    monkeypatch.setattr("Diffusion.figures.registration_figure", no_font)
    with pytest.raises(RuntimeError, match="the font is gone"):
        om.main(options(data, tmp_path, **changes))
    run = tmp_path / "Models/demo_om_net"
    assert until(lambda: checkpoint.newest(run), 60) == "000001_demo_om_net.pth", "a thread writes it"


def test_every_promise_has_a_command_that_exists():
    rows = re.findall(r"^\| \*\*([\d.]+)\*\* \| (.+) \| (.+) \|$", (ROOT / "docs/promises.md").read_text(), re.M)
    numbers = [1] * 6 + [2] * 3 + [3] + [4] * 3 + [5] * 9 + [6] * 8 + [7] * 3 + [8] * 5
    assert [int(number.split(".")[0]) for number, *_ in rows] == numbers
    matrix = (ROOT / "tests/faults/run_matrix.py").read_text()
    for number, _, commands in rows:
        files = re.findall(r"(?:tests|Scripts)/[\w/]+(?:\.py|\.sh)?", commands)
        assert files or "make faults" in commands, number
        assert all((ROOT / file).exists() for file in files), f"{number}: {commands}"
        titles = re.findall(r'"([^"]+)"', commands) if "run_matrix" in commands else []
        assert all(f'"{title}"' in matrix for title in titles), f"{number}: {titles}"
