"""The demo, whole, with a training too short to learn anything."""
import json
import sys

import pytest

from Runtime.errors import InputError
from Runtime.run_lock import lock
from Scripts import demo
from tests import launching
from tests.tiny import ROOT

TINY = ["model.channels=[8, 8, 16]", "model.attention_width=16", "model.attention_depth=1", "model.attention_heads=2",
        "diffusion.grids=[4, 8]", "registration.window=5", "registration.scales=2", "data.img_size=16",
        "data.repeats=1", "data.batchsize=8", "run.epochs=2", "run.val_pairs=2"]


def test_demo_ends_in_json_and_a_report(tmp_path):
    command = [sys.executable, str(ROOT / "Scripts/demo.py"), *[w for item in TINY for w in ("--set", item)]]
    run = launching.run(command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result) == {"dice_before", "dice_after", "dice_refined", "folding_percent", "seconds", "amp"}
    assert result["amp"] in ("bf16", "off")
    assert 0.3 < result["dice_before"] < 0.8 and result["seconds"] > 0
    report = tmp_path / "Logs/demo/report.html"
    assert str(report) in run.stdout
    pages = {name: (report.parent / name).read_text()
             for name in ("report.html", "alone/report.html", "refined/report.html", "copies/report.html")}
    assert [pages[name].count("data:image/png;base64,") for name in ("report.html", "copies/report.html")] == [2, 1]
    for name in list(pages)[1:]:
        assert f'href="{name}"' in pages["report.html"] and "subject_5000" in pages[name]
    assert "subject_5000 to subject_5001" in pages["alone/report.html"]
    assert not any(word in page for page in pages.values() for word in ("http://", "https://"))
    again = launching.run([*command, "--set", "data.expect_samples=99"], cwd=tmp_path)
    assert again.returncode == 43 and "data.expect_samples" in again.stderr and "Traceback" not in again.stderr


def test_a_second_demo_does_not_delete_the_first_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "Logs/demo/Models/demo_om_net"
    run.mkdir(parents=True)
    lock(run, 60)
    with pytest.raises(InputError, match=r"in use by process \d+ on .* or call this in another folder; if"):
        demo.run(demo.parse_arguments(["--set", "data.expect_samples=99"]))
    assert (run / "lock.json").exists()
