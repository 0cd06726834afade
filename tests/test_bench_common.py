"""What a resumed benchmark takes from an earlier run: nothing that other code or other data has made; its last line."""
import json
import runpy
import subprocess
import sys
import types

import bench_augment
import bench_cpu
import bench_data
import bench_modes
import bench_registration
import bench_segment
import bench_template
import common
import first_day
import numpy as np
import peers
import pytest
import torch

from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Runtime.errors import InputError
from tests import tiny


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit; returns a function that commits a file."""
    monkeypatch.setattr(common, "ROOT", tmp_path)

    def commit(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--no-verify", "-m", name]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
    commit("Diffusion/fields.py", "1")
    return commit


def test_what_is_edited_counts_before_it_is_committed(repository, tmp_path):
    before = common.our_commit()
    (tmp_path / "Diffusion/fields.py").write_text("2")
    edited = common.our_commit()
    (tmp_path / "Diffusion/fields.py").write_text("3")
    assert before and len({before, edited, common.our_commit()}) == 3
    (tmp_path / "Diffusion/fields.py").write_text("1")
    assert common.our_commit() == before


def test_the_generator_of_draws_counts_and_the_fusion_of_labels_for_those_that_fuse(repository):
    before, fused = common.our_commit(), common.our_commit("Study/fusion.py")
    repository("Study/fusion.py", "1")
    assert common.our_commit() == before and common.our_commit("Study/fusion.py") != fused
    repository("Runtime/keyed_random.py", "1")
    assert common.our_commit() != before


def test_pairs_of_two_commits_are_not_mixed(monkeypatch):
    found = []
    for commit in ("a", "b"):
        monkeypatch.setattr(bench_registration, "our_commit", lambda commit=commit: commit)
        found.append(bench_registration.without_network(1, 10, {})[1])
    assert found[0] != found[1]


@pytest.mark.parametrize("changed", ["commit", "data"])
def test_labels_brought_by_other_code_or_from_other_data_are_brought_anew(tmp_path, monkeypatch, changed):
    brought, label = [], torch.ones(1, 4, 4, 4)
    monkeypatch.setattr(bench_augment, "bring", lambda *args: brought.append(1) or [(None, None)])
    monkeypatch.setattr(bench_augment, "on_grid", lambda *args: (None, label))
    for number in (0, 1, 1):
        monkeypatch.setattr(bench_augment, "our_commit", lambda number=number: number if changed == "commit" else 0)
        args = types.SimpleNamespace(out=tmp_path, resume=True, test_ids="1",
                                     data=f"data{number if changed == 'data' else 0}")
        bench_augment.brought_labels("registration", ("v",), [("t", None, None, None)], None, args, {})
    assert len(brought) == 2


def test_a_registration_that_was_killed_while_it_was_kept_is_done_anew(tmp_path, monkeypatch):
    def killed(file, **held):
        write = file.write if hasattr(file, "write") else file.write_bytes
        write(b"half of it")
        raise KeyboardInterrupt

    grid = types.SimpleNamespace(array=np.zeros((4, 4, 4)), affine=np.eye(4))
    found = types.SimpleNamespace(fixed=grid, warped=grid.array, field=np.zeros((3, 4, 4, 4), np.float32))
    monkeypatch.setattr(bench_segment.omnimorph, "register", lambda *args, **more: found)
    for name in ("read_volume", "read_label"):
        monkeypatch.setattr(bench_segment, name, lambda path: (np.ones((4, 4, 4), np.uint8), np.eye(4)))
    words = ["hippocampus", tmp_path / "imagesTr/a.nii.gz", tmp_path / "imagesTr/b.nii.gz", tmp_path]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bench_segment.np, "savez_compressed", killed)
        bench_segment.registered(*words)
    assert bench_segment.registered(*words).keys() == bench_segment.registered(*words).keys()


@pytest.mark.parametrize("key, value", [("threads", 2), ("overrides", ["optim.lr=1"]), ("data", "elsewhere"),
                                        ("commit", "b")])
def test_a_training_with_other_threads_data_keys_or_code_is_another_run(tmp_path, monkeypatch, key, value):
    made = []

    def run(command, **more):
        made.append(next(word for word in command if str(word).startswith("data.name=")).partition("=")[2])
        (tmp_path / f"Models/{made[-1]}_om_net").mkdir(parents=True, exist_ok=True)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench_modes.subprocess, "run", run)
    monkeypatch.setattr(bench_modes, "subjects", lambda *args: [1, 2])
    given = {"threads": 1, "overrides": [], "data": "here", "commit": "a"}
    for changed in ({}, {}, {key: value}):
        args = types.SimpleNamespace(out=tmp_path, resume=True, **{**given, **changed})
        monkeypatch.setattr(bench_modes, "our_commit", lambda *more, args=args: args.commit)
        bench_modes.train("3", 2, 10, args)
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("key, value", [("threads", 2), ("data", "elsewhere"), ("commit", "b"), ("train_minutes", 9)])
def test_a_resumed_comparison_takes_no_network_of_other_code_data_or_threads(tmp_path, monkeypatch, key, value):
    trained = []
    monkeypatch.setattr(bench_registration, "train_ours", lambda *words: trained.append(words) or tmp_path / "net.pth")
    for name in ("find_checkpoint", "load_model"):
        monkeypatch.setattr(bench_registration, name, lambda path, **more: path)
    given = {"threads": 1, "data": "here", "commit": "a", "train_minutes": 40}
    for number, changed in enumerate(({}, {}, {key: value}), 1):
        args = types.SimpleNamespace(out=tmp_path, resume=True, checkpoint=None, overrides=[], **{**given, **changed})
        monkeypatch.setattr(bench_registration, "our_commit", lambda *more, args=args: args.commit)
        bench_registration.our_model("net", args)
        assert len(trained) == (1, 1, 2)[number - 1]


def test_a_note_of_an_earlier_version_has_no_settings_and_counts_for_nothing(tmp_path):
    (tmp_path / "training-net.json").write_text(json.dumps({"minutes": 1, "from": []}))
    assert common.kept_json(tmp_path / "training-net.json", [], True) == {}


@pytest.mark.parametrize("sections, key, value", [(["syncs"], "host_syncs", 7), (["syncs", "memory"], "sections", 2)])
def test_the_first_day_ends_with_one_sections_figures_or_the_count_of_several(sections, key, value, tmp_path,
                                                                              monkeypatch, capsys):
    monkeypatch.setattr(first_day, "run_apart", lambda section, args: {"section": section.__name__, "host_syncs": 7})
    assert first_day.run_sections(types.SimpleNamespace(section=sections, out=tmp_path / "first_day.json")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[key] == value


def test_a_benchmark_on_a_cluster_needs_no_pytest(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert runpy.run_path(tiny.__file__)["begin"]


def test_a_peer_that_cannot_run_says_what_its_interpreter_needs(tmp_path):
    with pytest.raises(InputError) as said:
        list(peers.start_peer("no-such-method", {}, tmp_path, sys.executable, 1))
    assert f"{sys.executable} needs the packages of requirements-peers.txt" in str(said.value)
    assert "--methods" not in str(said.value)  # bench_template.py and bench_universal.py have no such option


def test_a_template_is_not_made_if_ants_is_missing(tmp_path, monkeypatch, capsys):
    for number in (281, 282):
        path = tmp_path / f"hippocampus/imagesTr/hippocampus_{number}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_volume(path, make_subject(number, (16, 18, 20))["image"], np.eye(4))
    monkeypatch.setattr(bench_template, "DATA", tmp_path)
    monkeypatch.setattr(bench_template, "KINDS", {"hippocampus": []})
    assert bench_template.main(["--sets", "hippocampus", "--peers-python", sys.executable,
                                "--out", str(tmp_path / "out")]) == 43
    assert "needs the packages of requirements-peers.txt" in capsys.readouterr().err
    assert not (tmp_path / "out/hippocampus/ours").exists()


def test_too_few_steps_to_measure_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", "--steps", "3"])
    with pytest.raises(SystemExit):
        bench_cpu.main()
    assert "--steps must be at least 4" in capsys.readouterr().err
    (tmp_path / "rank0.jsonl").write_text('{"event": "step", "time": 1.0}\n{"event": "epoch", "step": 1}\n')
    with pytest.raises(InputError, match="a training of one step"):
        bench_modes.measured(tmp_path)


def test_the_last_line_is_json_also_without_monai(monkeypatch, capsys):
    for name, value in {"speed": (40.0, float("nan")), "growth": 0.0, "wait_share": 0.0, "make_volumes": [],
                        "prepare": None}.items():
        monkeypatch.setattr(bench_data, name, lambda *words, value=value: value)
    monkeypatch.setattr(sys, "argv", ["bench_data.py"])
    bench_data.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert last["cache_vs_monai"] is None and last["cache_vs_nibabel"] == 40
