"""Lists of pairs as people have them: one volume and a folder, tables, workers, and lists that grow."""
import argparse
import contextlib
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

import OM_evaluate
import OM_register
import omnimorph
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Inference import register_pairs
from Inference import results as inference_results
from Inference.load_model import default_config
from Inference.pair_lists import pairs_onto, read_pairs_to_register, read_pairs_to_score
from Inference.results import do_all, do_one, file_digests, kept_rows, read_results, source_digests, write_results
from Runtime import __version__, run_lock
from Runtime.errors import InputError
from Study.common import volumes_of
from tests.tiny import ROOT

pytestmark = pytest.mark.usefixtures("no_figures")
FAST = ["--affine", "none", "--refine", "1", "--set", "refine.levels=1", "--no-picture", "--device", "cpu"]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Four subjects with labels beside their images, in a folder data; to be read only."""
    folder = tmp_path_factory.mktemp("lists")
    for seed in range(4):
        subject, name = make_subject(seed, (12, 13, 11)), f"sub-0{seed}"
        image = np.rint(1000 * subject["image"]).astype(np.int16)
        write_volume(folder / f"data/{name}_T1w.nii.gz", image, np.eye(4))
        write_volume(folder / f"data/{name}_dseg.nii.gz", subject["label"].astype(np.uint8), np.eye(4))
    return folder


@pytest.fixture
def data(volumes, tmp_path):
    """The same in a folder that may be changed."""
    return shutil.copytree(volumes / "data", tmp_path / "data")


def call(*words):
    return OM_register.main([str(word) for word in (*words, *FAST)])


@contextlib.contextmanager
def held(folder):
    """The lock of a folder is held by another process that lives."""
    with subprocess.Popen(["sleep", "60"]) as process:
        token = run_lock.lock(folder, run_lock.STALE_S, pid=process.pid)
        yield
        run_lock.unlock(folder, token)
        process.kill()


def results(out):
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_a_folder_onto_one_volume_is_kept_where_it_grows_and_survives_a_bad_one(data, tmp_path, capsys):
    words = ("--fixed", data / "sub-00_T1w.nii.gz", "--moving", data, "--out", tmp_path / "out")
    last = data / "sub-03_T1w.nii.gz"
    shutil.move(last, tmp_path / "later.nii.gz")
    bad = data / "sub-02_T1w.nii.gz"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-300])
    assert call(*words) == 43 and "sub-02_T1w.nii.gz: truncated" in capsys.readouterr().err
    assert [row["name"] for row in results(tmp_path / "out")["pairs"]] == ["sub-01_T1w_to_sub-00_T1w"]
    row = results(tmp_path / "out")["pairs"][0]
    assert row["dice"] > 0 and row["moving_label"] == str(data / "sub-01_dseg.nii.gz"), "labels beside are found"
    done = (tmp_path / "out/sub-01_T1w_to_sub-00_T1w/field.nii.gz").stat().st_mtime_ns
    bad.write_bytes(whole)
    shutil.move(tmp_path / "later.nii.gz", last)
    assert call(*words, "--workers", "2") == 0
    assert "keeping 1 of 3 pairs from an earlier run (--again" in capsys.readouterr().err
    found = results(tmp_path / "out")
    assert [row["name"] for row in found["pairs"]] == [f"sub-0{n}_T1w_to_sub-00_T1w" for n in (1, 2, 3)]
    assert found["version"] == __version__ and found["complete"] and found["mean"]["pairs"] == 3
    assert (tmp_path / "out/sub-01_T1w_to_sub-00_T1w/field.nii.gz").stat().st_mtime_ns == done
    assert call(*words, "--again") == 0
    assert (tmp_path / "out/sub-01_T1w_to_sub-00_T1w/field.nii.gz").stat().st_mtime_ns > done


@pytest.mark.slow
def test_parts_of_a_list_are_joined(data, tmp_path, capsys):
    """Two of three parts have run; the whole command keeps their pairs, registers the rest, and is as if alone."""
    out, cases = tmp_path / "out", [tmp_path / f"case_000{number}.nii.gz" for number in range(4)]
    for number, case in enumerate(cases):
        shutil.copy(data / f"sub-0{number}_T1w.nii.gz", case)
    words = ("--fixed", cases[0], "--moving", *cases[1:], "--learn2reg")
    for part in ("1/3", "3/3"):
        assert call(*words, "--out", out, "--part", part) == 0
    assert not (out / "results.json").exists() and (out / "parts/3_of_3/report.html").is_file()
    written = {path: path.stat().st_mtime_ns for path in (*out.glob("case_*/field.nii.gz"), *out.glob("disp_*"))}
    assert sorted(path.name for path in written) == ["disp_0000_0001.nii.gz", "disp_0000_0003.nii.gz",
                                                     "field.nii.gz", "field.nii.gz"]
    capsys.readouterr()
    with held(out / "parts/1_of_3"):
        assert call(*words, "--out", out) == 43 and "1_of_3 is in use" in capsys.readouterr().err
    assert call(*words, "--out", out) == 0
    assert "keeping 2 of 3 pairs" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert call(*words, "--out", tmp_path / "alone") == 0
    joined, alone = results(out)["pairs"], results(tmp_path / "alone")["pairs"]
    assert [row["name"] for row in joined] == [row["name"] for row in alone]
    for one, other in zip(joined, alone):
        assert one["folder"] == other["folder"] and one["similarity"] == other["similarity"]
        assert one["files"]["%s/field.nii.gz" % one["folder"]] == other["files"]["%s/field.nii.gz" % other["folder"]]
    capsys.readouterr()
    assert call(*words, "--out", out) == 0 and "keeping 3 of 3 pairs" in capsys.readouterr().err
    names = {name for row in results(out)["pairs"] for name in row["files"]}
    assert {f"disp_0000_000{number}.nii.gz" for number in (1, 2, 3)} <= names
    for path in (out / "results.json", *out.glob("parts/*/results.json")):
        path.write_text(path.read_text().replace(f'"version": "{__version__}"', '"version": "1.2.1"'))
    assert call(*words, "--out", out) == 0
    said = capsys.readouterr().err
    assert f"what OmniMorph 1.2.1 did of it is done again by {__version__}" in said and "keeping" not in said
    for part, said in (("4/3", "K from 1 to N"), ("1", "K/N")):
        assert call(*words, "--out", out, "--part", part) == 43 and said in capsys.readouterr().err


@pytest.mark.parametrize("words, other", [(["--part", "1/3"], ""), ([], "parts/1_of_3"),
                                          (["--part", "1/3"], "parts/1_of_2")])
def test_a_part_and_the_whole_list_that_begin_together_do_not_both_work(data, tmp_path, monkeypatch, capsys, words,
                                                                        other):
    """The other one takes its lock at the last moment before this one has its own."""
    other, held_results = tmp_path / "out" / other, run_lock.held_results

    def just_later(folder):
        other.mkdir(parents=True, exist_ok=True)
        locks.enter_context(held(other))
        monkeypatch.undo()
        return held_results(folder)

    monkeypatch.setattr(run_lock, "held_results", just_later)
    with contextlib.ExitStack() as locks:
        assert call("--fixed", data / "sub-00_T1w.nii.gz", "--moving", data, "--out", tmp_path / "out", *words) == 43
        assert f"{other} is in use" in capsys.readouterr().err


def test_a_file_that_may_not_be_read_and_a_fault_of_the_program_end_no_list(data, tmp_path, monkeypatch, capsys):
    def broken(pair, folder, earlier):
        if "sub-01" in pair["name"]:
            raise PermissionError(13, "Permission denied", str(pair["moving"]))
        if "sub-02" in pair["name"]:
            raise RuntimeError("a fault\nwith a second line")
        return whole(pair, folder, earlier)

    whole = register_pairs.register_pair
    monkeypatch.setattr(register_pairs, "register_pair", broken)
    words = ("--fixed", data / "sub-00_T1w.nii.gz", "--moving", data, "--out", tmp_path / "out")
    assert call(*words) == 43
    reasons = {entry["name"][:6]: entry["reason"] for entry in results(tmp_path / "out")["failed"]}
    assert reasons["sub-01"].endswith("sub-01_T1w.nii.gz: Permission denied; check the file.")
    assert "RuntimeError (a fault); see the traceback above" in reasons["sub-02"]
    assert [row["name"] for row in results(tmp_path / "out")["pairs"]] == ["sub-03_T1w_to_sub-00_T1w"]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", "parts/1_of_2"])
def test_a_full_disk_ends_a_list_and_a_part_of_it(tmp_path, out):
    def full(entry, folder, earlier):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", entry["name"])

    out, folder = str(tmp_path / "out" / out), tmp_path / "out/a"
    with pytest.raises(OSError, match="Disk quota exceeded"):
        do_one(full, out, True, {"name": str(folder / ".field.nii.gz.tmp")}, folder, None)
    assert "M.nii.gz: Disk quota exceeded; check the file" in do_one(
        full, out, True, {"name": str(tmp_path / "M.nii.gz")}, folder, None)


def test_a_row_is_kept_with_the_paths_of_now_and_done_again_if_a_file_may_not_be_read(tmp_path, monkeypatch):
    """A path is that of a link, whose own name counts, and not of what it leads to."""
    pair = {"name": "a", "moving": tmp_path / "old/m.nii.gz", "labels": tmp_path / "old/l.nii.gz"}
    for path in (pair["moving"], pair["labels"], tmp_path / "out/a/field.nii.gz"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    row = {"name": "a", "folder": str(tmp_path / "out/a"), "moving": str(pair["moving"]), "labels": {"1": {"dice": 1}},
           "source": source_digests(pair), "files": file_digests([tmp_path / "out/a/field.nii.gz"], tmp_path / "out")}
    write_results(tmp_path / "out", [row], [], {}, complete=True)
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "link.nii.gz").symlink_to(tmp_path / "new/m.nii.gz")
    monkeypatch.chdir(tmp_path)
    now = {"name": "a", "moving": Path("link.nii.gz"), "labels": Path("new/l.nii.gz")}
    assert kept_rows(read_results(tmp_path / "out"), {}, [now], tmp_path / "out") == {
        "a": {**row, "moving": str(tmp_path / "link.nii.gz")}}

    def forbid(path):
        if path == now["labels"]:
            raise PermissionError(13, "Permission denied", str(path))
        return row["source"]["moving"]

    monkeypatch.setattr("Inference.results.digest", forbid)
    assert source_digests(now) == {**row["source"], "labels": None}
    assert kept_rows(read_results(tmp_path / "out"), {}, [now], tmp_path / "out") == {}


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_registered_is_done_again(data, tmp_path, monkeypatch, capsys):
    def overtaken(initial, fixed, moving, *more, **options):
        found = register_from(initial, fixed, moving, *more, **options)
        if "sub-01" in moving.name:
            shutil.copy(data / "sub-03_T1w.nii.gz", moving)
        return found

    register_from = register_pairs.register_from
    words = ("--fixed", data / "sub-00_T1w.nii.gz", "--moving", *(data / f"sub-0{n}_T1w.nii.gz" for n in (1, 2)),
             "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(register_pairs, "register_from", overtaken)
        assert call(*words) == 0
    capsys.readouterr()
    assert call(*words) == 0 and "keeping 1 of 2 pairs" in capsys.readouterr().err
    assert call(*words) == 0 and "keeping 2 of 2 pairs" in capsys.readouterr().err


def test_tables_folders_patterns_and_names(data):
    (data / "pairs.csv").write_text("fixed;moving;name;age\nsub-00_T1w.nii.gz;sub-01_T1w.nii.gz;first;7\n"
                                    "sub-00_T1w.nii.gz;sub-02_T1w.nii.gz;;8\n")
    pairs = read_pairs_to_register(data / "pairs.csv")
    assert [pair["name"] for pair in pairs] == ["first", "sub-02_T1w_to_sub-00_T1w"]
    assert pairs[0]["fixed_label"] == data / "sub-00_dseg.nii.gz"
    with pytest.raises(InputError, match="pairs.csv: it is one list of pairs, so --list other chooses nothing"):
        read_pairs_to_register(data / "pairs.csv", "other")
    found = pairs_onto(data / "sub-01_T1w.nii.gz", [f"{data}/*-0[12]_T1w.nii.gz"])
    assert [pair["name"] for pair in found] == ["sub-02_T1w_to_sub-01_T1w"]
    found = pairs_onto(data / "sub-01_T1w.nii.gz", [data / "sub-02_T1w.nii.gz", data / "sub-03_T1w.nii.gz"],
                       labels=[data / "sub-03_dseg.nii.gz", data / "sub-02_dseg.nii.gz"])
    assert [pair["moving_label"].name for pair in found] == ["sub-03_dseg.nii.gz", "sub-02_dseg.nii.gz"]
    (data / "volumes.csv").write_text("image\nsub-03_T1w.nii.gz\nsub-01_T1w.nii.gz\n")
    found = pairs_onto(data / "sub-01_T1w.nii.gz", [data / "volumes.csv"])
    assert [pair["name"] for pair in found] == ["sub-03_T1w_to_sub-01_T1w"]
    for subject in ("a", "b"):  # brackets in a name are no pattern
        (data / subject).mkdir()
        shutil.copy(data / "sub-02_T1w.nii.gz", data / subject / "T[1].nii.gz")
    found = pairs_onto(data / "sub-01_T1w.nii.gz", [data / "a/T[1].nii.gz", data / "b/T[1].nii.gz"])
    assert [pair["name"] for pair in found] == ["a_T[1]_to_sub-01_T1w", "b_T[1]_to_sub-01_T1w"]


@pytest.mark.parametrize("find", [
    lambda images: read_pairs_to_register(images[0].parent / "pairs.csv"),
    lambda images: pairs_onto(images[0], images[1:]), volumes_of])
def test_a_folder_is_listed_once_for_all_volumes_of_a_list(data, monkeypatch, find):
    images, listed, scan = sorted(data.glob("*_T1w.nii.gz")), [], os.scandir
    (data / "pairs.csv").write_text("fixed,moving\n" + "".join(f"{images[0]},{image}\n" for image in images[1:]))
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scan(path))
    found = find(images)
    assert len(found) >= 3 and all(entry.get("label") or entry["moving_label"] for entry in found)
    assert len(listed) <= 2, "with thousands of volumes, listing it for each takes hours"


def test_results_that_take_long_to_write_are_not_written_after_each_pair(tmp_path, monkeypatch):
    written, write = [], inference_results.write_results
    monkeypatch.setattr(inference_results, "OFTEN_S", 0)
    monkeypatch.setattr(inference_results, "write_results", lambda *words, **more: written.append(
        write(*words, **more)))
    row = {"folder": str(tmp_path), "labels": {str(label): {"dice": 0.5} for label in range(200)}, "files": {}}
    tasks = [({"name": f"pair {number}"}, tmp_path) for number in range(100)]
    rows, _ = do_all(tmp_path, tasks, lambda entry, *_: {**row, "name": entry["name"]}, {})
    assert len(written) < 50 and len(rows) == 100 and set(read_results(tmp_path)["pairs"]) == {
        entry["name"] for entry, _ in tasks}, "each write takes as long as all pairs so far"

    def interrupted(entry, *_):
        if entry["name"] == "pair 99":
            raise KeyboardInterrupt
        return {**row, "name": entry["name"]}

    monkeypatch.setattr(inference_results, "OFTEN_S", 1e9)  # not written again before the end
    monkeypatch.setattr(inference_results, "SELDOM", 1e9)
    with pytest.raises(KeyboardInterrupt):
        do_all(tmp_path, tasks, interrupted, {}, again=True)
    assert len(read_results(tmp_path)["pairs"]) == 99, "Ctrl-C costs what was done since the last write"


def test_the_time_left_of_a_list_follows_from_all_its_entries(tmp_path, capsys):
    """16 workers that start together end together: one long wait, then 15 short ones."""
    times, tasks = [], [({"name": str(number)}, tmp_path) for number in range(18)]

    def wave(entry, *_):
        time.sleep(1.5 if entry["name"] in ("0", "16") else 0.12)
        times.append(time.monotonic())
        return {"name": entry["name"], "folder": str(tmp_path), "labels": {}, "files": {}}

    began = time.monotonic()
    do_all(tmp_path, tasks, wave, {})
    shown = float(re.search(r"17/18 \[.*?([\d.]+)pair/s", capsys.readouterr().err)[1])
    assert shown == pytest.approx(17 / (times[16] - began), rel=0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another user")
def test_rows_of_another_user_whose_files_cannot_be_replaced_are_kept():
    """In a folder of both, with a partial file that only its user may remove."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        out = Path(folder)
        out.chmod(0o777)
        write_results(out, [{"name": "a", "folder": out / "a", "labels": {}}], [], {"n": 1}, complete=True)
        (out / "a").mkdir()
        (out / "a/.x.tmp-elsewhere-1").touch()
        os.utime(out / "a/.x.tmp-elsewhere-1", (0, 0))
        before = (out / "results.json").read_bytes()
        program = ("import os, sys\nfrom pathlib import Path\nfrom Inference.results import do_all\nos.setuid(65534)\n"
                   "out = Path(sys.argv[1])\n"
                   "do_all(out, [({'name': 'a'}, out / 'a')], lambda *_: {}, {'n': 2})")
        done = subprocess.run([sys.executable, "-c", program, out], cwd=ROOT, capture_output=True, text=True)
        assert done.stderr.endswith(f"PermissionError: [Errno 13] Permission denied: '{out / 'a'}'\n")
        assert (out / "results.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another user")
@pytest.mark.parametrize("words, other, closed, shown", [
    (["OM_register", "--pairs", "list.csv"], ["--labels", "nearest"], "a_to_b", "report.html"),
    (["OM_study", "template", "--images", "data", "--rounds", "1"], ["--sharpen", "2"], "round_0/a", "template.html")])
def test_results_over_those_of_another_user_are_refused_before_anything_is_dropped(words, other, closed, shown):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        out, (program, *rest) = Path(folder, "out"), words
        Path(folder).chmod(0o755)
        for number, name in enumerate("ab"):
            image = make_subject(number, (16, 17), dims=2)["image"]
            write_volume(Path(folder, "data", f"{name}.nii"), image, np.eye(4))
        Path(folder, "list.csv").write_text("fixed,moving\ndata/b.nii,data/a.nii\n")
        code = ("import os, sys\nfrom pathlib import Path\nimport {0}\nout, closed, count, *words = sys.argv[1:]\n"
                "words, other = words[:int(count)], words[int(count):]\nassert {0}.main(words) == 0\nout = Path(out)\n"
                "for path in (out, *out.rglob('*')):\n    path.chmod(0o777)\n(out / closed).chmod(0o755)\n"
                "content = lambda: {{path: path.read_bytes() for path in out.rglob('*') if path.suffix}}\n"
                "before = content()\nos.setuid(65534)\nassert {0}.main(words + other) == 43\n"
                "assert content() == before and out / '{1}' in before").format(program, shown)
        rest += ["--device", "cpu", "--out", out]
        done = subprocess.run([sys.executable, "-c", code, out, closed, str(len(rest)), *rest, *other], cwd=folder,
                              capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0 and f"{out / closed}: Permission denied" in done.stderr, done.stderr


def threads_of_a_pair(entry, folder, _earlier):
    (folder / entry["name"]).write_text("a field")
    return {"name": entry["name"], "folder": str(folder), "labels": {}, "threads": torch.get_num_threads(),
            "files": file_digests([folder / entry["name"]], folder)}


@pytest.mark.slow
def test_the_last_pair_of_a_resumed_list_has_the_threads_of_the_others(tmp_path):
    """Other threads, other rounding: the same command would give other bytes after a kill."""
    tasks, before = [({"name": f"pair {number}"}, tmp_path) for number in range(2)], torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        whole, _ = do_all(tmp_path, tasks, threads_of_a_pair, {}, workers=2)
        write_results(tmp_path, whole[:1], [], {}, complete=False)
        resumed, _ = do_all(tmp_path, tasks, threads_of_a_pair, {}, workers=2)
    finally:
        torch.set_num_threads(before)
    assert [row["threads"] for row in whole] == [row["threads"] for row in resumed] == [2, 2]


def test_volumes_with_one_name_are_told_apart_by_their_folders(data, tmp_path):
    """As in s1/T1.nii.gz, named one by one or as a folder: they once had one name, and so would be one person."""
    for person in ("s1", "s2"):
        (tmp_path / "own" / person).mkdir(parents=True)
        shutil.copy(data / "sub-02_T1w.nii.gz", tmp_path / "own" / person / "T1.nii.gz")
    one, two = (tmp_path / f"own/s{number}/T1.nii.gz" for number in (1, 2))
    names = [[(item["id"], item["subject"]) for item in volumes_of(sources)]
             for sources in ([one, two], [tmp_path / "own"], [two])]
    assert names == [[("s1_T1", "s1"), ("s2_T1", "s2")]] * 2 + [[("s2_T1", "s2")]]
    fixed = data / "sub-01_T1w.nii.gz"
    assert [pair["name"] for pair in pairs_onto(fixed, [one, two])] == ["s1_T1_to_sub-01_T1w", "s2_T1_to_sub-01_T1w"]
    with pytest.raises(InputError, match="s1_T1: two moving volumes have this name; list the pairs in a .csv"):
        pairs_onto(fixed, [one, one])
    label = fixed.with_name("sub-01_dseg.nii.gz")  # a shell's * names it too
    assert [pair["moving"] for pair in pairs_onto(fixed, [one, label])] == [one]
    with pytest.raises(InputError, match="besides segmentations it contains only the fixed volume, so nothing"):
        pairs_onto(fixed, [fixed, label])


@pytest.mark.parametrize("words, said", [
    (["--pairs", "data"], "data: a folder does not define pairs; add --fixed F"),
    (["--pairs", "none.csv"], "none.csv: no such list of pairs"),
    (["--fixed", "data/sub-00_T1w.nii.gz", "--moving", "Data/list.CSV"], "Data/list.CSV: a list, not a volume; give a "
     "list of volumes by --pairs with --fixed, and a list of pairs by --pairs alone."),
    (["--pairs", "data", "--fixed", "data/sub-00_T1w.nii.gz", "--moving", "data"], "give either --pairs, or --fixed"),
    (["--fixed", "data/sub-00_dseg.nii.gz", "--moving", "data/sub-01_T1w.nii.gz"],
     "sub-00_dseg.nii.gz: its name marks it as a segmentation; give its image as the fixed volume"),
    (["--fixed", "data/sub-00_T1w.nii.gz", "--moving", "data", "--moving-label", "data/sub-01_dseg.nii.gz"],
     "--moving-label names 1 files for 3 moving volumes"),
    (["--fixed", "data/sub-00_T1w.nii.gz", "--moving", "data", "--moving-mask", "data/sub-01_dseg.nii.gz"],
     "--moving-mask, --moving-points and channels are for one pair"),
    (["--fixed", "data/sub-00_T1w.nii.gz", "--moving", "data", "--learn2reg", "--workers", "0"], "--workers 0")])
def test_lists_that_are_none_are_one_sentence(volumes, tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(volumes)
    assert call(*words, "--out", tmp_path / "out") == 43
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0], errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text, said", [
    ("not json", "not valid JSON"), ("[]", "no list of pairs"), ('{"pairs": 3}', "no list of pairs under pairs"),
    ('[{"fixed": "a.nii"}]', "pair 1 has no fixed or no moving"),
    ('[{"fixed": "a.nii", "moving": "b.nii", "mask": "c.nii"}]', "pair 1 has the unknown key mask"),
    ('[{"fixed": 3, "moving": "b.nii"}]', "pair 1: fixed is 3, not a path"),
    ('[{"fixed": ["a.nii", "b.nii"], "moving": "b.nii"}]', "pair 1: fixed is .'a.nii', 'b.nii'., not a path"),
    ('[{"fixed": "a.nii", "moving": "b.nii"}, {"fixed": "a.nii", "moving": "b.nii"}]', "two pairs are called b_to_a"),
    ('[{"fixed": "a.nii", "fixed": "b.nii", "moving": "c.nii"}]', "fixed stands twice in one object"),
    ('[{"fixed": "a.nii", "moving": "c.n\\u0000i"}]', "not a path; correct it"),
    ("fixed,moving,Fixed\na.nii,c.nii,b.nii\n", 'the header has the column "fixed" twice'),
    ("fixed,moving\na.nii,c.n\0i\n", "the text contains zero bytes"),
    ("fixed,moving,fixed_masks,age\na.nii,c.nii,m.nii,7\n", "unknown column fixed_masks; the columns of"),
    *[(json.dumps([{"fixed": "a.nii", "moving": "b.nii", "name": name}]), "pair 1: its folder cannot have the name")
      for name in ("../pair", ".pair", "a\nb", "results.json", "scores.html", "results.csv")]])
def test_bad_lists(tmp_path, text, said):
    path = tmp_path / ("pairs.csv" if text.startswith("fixed,") else "pairs.json")
    path.write_text(text)
    with pytest.raises(InputError, match=f"{path}: .*{said}"):
        read_pairs_to_register(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pairs": [], "settings": [1], "version": "1"}',
                                     '{"pairs": ["a"]}', '{"pairs": [{"name": "a"}]}', '{"pairs": {"a": 1}}'])
def test_results_that_somebody_has_edited_are_no_results(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    assert not read_results(tmp_path)["pairs"] and not read_results(tmp_path)["complete"]


def test_fields_of_two_pairs_with_one_learn2reg_name_are_refused(data, tmp_path, capsys):
    for subject in ("a", "b"):
        (tmp_path / subject).mkdir()
        shutil.copy(data / "sub-02_T1w.nii.gz", tmp_path / subject / f"{subject}_0007.nii.gz")
    shutil.copy(data / "sub-00_T1w.nii.gz", tmp_path / "f_0001.nii.gz")
    assert call("--fixed", tmp_path / "f_0001.nii.gz", "--moving", tmp_path / "a/a_0007.nii.gz", tmp_path
                / "b/b_0007.nii.gz", "--learn2reg", "--out", tmp_path / "out") == 43
    assert "would both be disp_0001_0007.nii.gz" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_pair_of_a_list_replaces_no_input_in_its_folder(data, tmp_path, capsys):
    out, images = tmp_path / "out", [data / f"sub-0{number}_T1w.nii.gz" for number in range(3)]
    rows = [("a", images[0], images[1]), ("b", images[0], images[2])]

    def register(rows):
        (tmp_path / "list.csv").write_text("".join(",".join(map(str, row)) + "\n"
                                                   for row in (("name", "fixed", "moving"), *rows)))
        return call("--pairs", tmp_path / "list.csv", "--out", out)

    assert register(rows) == 0
    warped = out / "a/warped.nii.gz"
    kept = warped.read_bytes()
    assert register([("a", warped, images[1]), rows[1]]) == 43
    assert f"{warped}: a result with the same name would overwrite this input" in capsys.readouterr().err
    assert warped.read_bytes() == kept and results(out)["pairs"][0]["name"] == "b"


@pytest.mark.slow
def test_a_learn2reg_field_of_others_is_not_replaced(data, tmp_path, capsys):
    for number in (1, 2):
        shutil.copy(data / f"sub-0{number}_T1w.nii.gz", tmp_path / f"case_000{number}.nii.gz")
    words = ("--fixed", tmp_path / "case_0001.nii.gz", "--moving", tmp_path / "case_0002.nii.gz", "--learn2reg",
             "--out", tmp_path / "out")
    theirs = tmp_path / "out/disp_0001_0002.nii.gz"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    assert call(*words) == 43 and f"{theirs}: it is not of an earlier run" in capsys.readouterr().err
    assert theirs.read_bytes() == b"theirs"
    theirs.unlink()
    assert call(*words) == 0 == call(*words)
    for path in (tmp_path / "out").iterdir():  # as after an interruption
        if path != theirs:
            path.unlink()
    assert call(*words) == 0, "the field is ours"
    without = [word for word in words if word != "--learn2reg"]
    assert call(*without, "--initial", theirs) == 43 and theirs.exists(), "it would be removed while it is read"
    assert call(*without) == 0 and not theirs.exists()
    theirs.write_bytes(b"theirs")
    assert call(*words) == 43 and f"{theirs}: it is not of an earlier run" in capsys.readouterr().err
    assert theirs.read_bytes() == b"theirs", "beside results too"


@pytest.mark.slow
def test_slices_and_volumes_do_not_share_a_list(data, tmp_path, capsys):
    for name in ("a", "b"):
        write_volume(data / f"{name}.nii.gz", make_subject(ord(name), (12, 13), dims=2)["image"], np.eye(4))
    lines = ["fixed,moving,name", "a.nii.gz,b.nii.gz,flat", "sub-00_T1w.nii.gz,sub-01_T1w.nii.gz,thick"]
    for first, said in ((1, "sub-00_T1w.nii.gz: 3D, but a list has one number of axes, here 2, that of the network, of "
                            "--dims or of its first volume; put the pairs of 3D volumes into another list."),
                        (2, "a.nii.gz: 2D, but a list has one number of axes, here 3")):
        (data / "pairs.csv").write_text("\n".join([lines[0], lines[first], lines[3 - first]]))
        assert call("--pairs", data / "pairs.csv", "--out", tmp_path / str(first)) == 43
        assert said in capsys.readouterr().err
        assert len(read_results(tmp_path / str(first))["pairs"]) == 1


def test_channels_of_one_side_alone_are_refused_instead_of_mixed(data, tmp_path, capsys):
    volumes, sides = [data / f"sub-0{number}_T1w.nii.gz" for number in range(4)], ("fixed", "moving")
    pairs = [{"name": name, **dict(zip(sides, volumes)), **dict(zip(keys, volumes[2:]))} for name, *keys in (
        ("both", "fixed_channel_2"), ("one", "fixed_channel_2", "moving_channel_3"),
        ("gap", "fixed_channel_3", "moving_channel_3"))]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs, default=str))
    assert call("--pairs", tmp_path / "pairs.json", "--out", tmp_path / "out") == 43
    said = capsys.readouterr().err
    assert f"error: both: {volumes[0]} has the further channels 2 and {volumes[1]} has none; give both the same" in said
    assert f"error: one: {volumes[0]} has the further channels 2 and {volumes[1]} has 3; give both the same" in said
    assert f"error: gap: {volumes[0]} has the further channels 3 and {volumes[1]} has 3; give both the same" in said


def test_a_label_on_another_grid_is_told_in_numbers(data, tmp_path, capsys):
    label = nibabel.load(data / "sub-01_dseg.nii.gz")
    coarse = np.diag([0.98, 1, 1, 1])
    coarse[0, 3] = 3
    write_volume(tmp_path / "coarse.nii.gz", np.asarray(label.dataobj), coarse)
    words = ("--fixed", data / "sub-00_T1w.nii.gz", "--moving", data / "sub-01_T1w.nii.gz", "--moving-label",
             tmp_path / "coarse.nii.gz", "--out", tmp_path / "out")
    assert call(*words) == 43
    said = capsys.readouterr().err
    assert "(spacings 0.98 x 1 x 1 and 1 x 1 x 1 mm, origins (3, 0, 0) and (0, 0, 0), 3 mm apart)" in said
    assert "--resample-labels resamples it to that grid" in said


@pytest.mark.slow
def test_a_result_saves_what_the_command_writes(data, tmp_path):
    paths = [data / f"sub-0{number}_T1w.nii.gz" for number in (0, 1)]
    assert call("--fixed", paths[0], "--moving", paths[1], "--out", tmp_path / "out", "--inverse") == 0
    cfg = {**default_config(3), "refine.levels": 1}
    found = omnimorph.register(*paths, affine=False, refine=1, inverse=True, config=cfg)
    found.save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert saved == names | {"picture.png"} and {"field.nii.gz", "warped.nii.gz", "report.html"} <= saved
    for name in ("field.nii.gz", "inverse_field.nii.gz", "warped.nii.gz", "jacobian.nii.gz"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    ours, theirs = (results(tmp_path / name)["pairs"][0] for name in ("saved", "out"))
    assert ours["similarity"] == theirs["similarity"] and ours["verdict"] == theirs["verdict"]
    volumes = [(nibabel.load(path).get_fdata(), np.eye(4)) for path in paths]
    omnimorph.register(*volumes, affine=False, refine=1, config=cfg).save(tmp_path / "arrays")
    row = next(iter(read_results(tmp_path / "arrays")["pairs"].values()))
    assert row["fixed"] == str(tmp_path / "arrays/fixed.nii.gz") and row["name"] == "moving to fixed"
    with pytest.raises(InputError, match="the folder cannot be created"):
        found.save(paths[0])


def in_memory(*seeds):
    """A Result of two 2D volumes that are in no file."""
    volumes = [(make_subject(seed, (16, 17), dims=2)["image"], np.eye(4)) for seed in seeds]
    return omnimorph.register(*volumes, affine=False, refine=False, device="cpu")


@pytest.mark.slow
def test_a_saved_result_replaces_its_own_volumes_and_none_of_the_user(tmp_path):
    path, result = tmp_path / "theirs/fixed.nii.gz", in_memory(1, 2)
    write_volume(path, make_subject(0, (16, 17), dims=2)["image"], np.eye(4))
    given = path.read_bytes()
    omnimorph.register(path, tuple(result.moving), affine=False, refine=False, device="cpu").save(path.parent)
    with pytest.raises(InputError, match="fixed.nii.gz: it is not of an earlier run"):
        result.save(path.parent)
    assert path.read_bytes() == given
    for seeds in ((1, 2), (3, 4)):
        in_memory(*seeds).save(tmp_path / "ours")
    found = nibabel.load(tmp_path / "ours/fixed.nii.gz").get_fdata()[..., 0]
    np.testing.assert_array_equal(found, make_subject(3, (16, 17), dims=2)["image"])


def test_a_save_needs_no_terminal_and_can_be_repeated_after_an_interruption(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    result, path = in_memory(1, 2), tmp_path / "Gehirn_\u00fc.nii.gz"
    write_volume(path, result.moving.array, np.eye(4))
    result = omnimorph.register(tuple(result.fixed), path, affine=False, refine=False, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr("Inference.outputs.write_report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            result.save(tmp_path / "out")
    assert not results(tmp_path / "out")["complete"] and (tmp_path / "out/warped.nii.gz").is_file()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    result.save(tmp_path / "out")
    assert results(tmp_path / "out")["complete"] and (tmp_path / "out/report.html").is_file()


@pytest.mark.slow
def test_labels_of_another_size_and_landmarks_are_registered_drawn_and_scored(data, tmp_path):
    """Also labels with numbers that float32 does not have."""
    words, unit = ["--resample-labels", "--labels", "nearest", "--out", tmp_path / "out"], 100_000_007
    for number, side in enumerate(("fixed", "moving")):
        label = np.asarray(nibabel.load(data / f"sub-0{number}_dseg.nii.gz").dataobj)[::2, ::2, ::2]
        write_volume(tmp_path / f"{side}.nii.gz", unit * label.astype(np.int32), np.diag([2.0, 2, 2, 1]))
        rows = [f"{5 + number},6,5,a", f"4,{7 - number},5,b"][::1 - 2 * number]  # paired by their names
        (tmp_path / f"{side}.csv").write_text("\n".join(["x,y,z,name", *rows]))
        words += [f"--{side}", data / f"sub-0{number}_T1w.nii.gz", f"--{side}-label", tmp_path / f"{side}.nii.gz",
                  "--points" if side == "fixed" else "--moving-points", tmp_path / f"{side}.csv"]
    assert OM_register.main([str(word) for word in (*words, *FAST) if word != "--no-picture"]) == 0
    assert {"picture.png", "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    row, = results(tmp_path / "out")["pairs"]
    assert row["tre_before_mm"] == pytest.approx(1)
    assert OM_evaluate.main(["--pairs", str(tmp_path / "out/results.json"), "--out",
                             str(tmp_path / "scores")]) == 0
    score, = json.loads((tmp_path / "scores/scores.json").read_text())["pairs"]
    for key in ("dice_before", "dice", "tre_before_mm", "tre_mm"):
        assert score[key] == pytest.approx(row[key], rel=1e-3), key
    carried = np.unique(nibabel.load(tmp_path / "out/warped_label.nii.gz").dataobj)
    assert len(carried) > 2 and not (carried % unit).any() and set(score["labels"]) == set(row["labels"])


def test_a_label_between_the_points_on_which_overlap_is_counted_lies_in_its_image(tmp_path):
    size, corner = (70, 4, 4), np.eye(4)
    corner[0, 3] = 32  # of the image, points at 31.2 and 33.4 are tested
    write_volume(tmp_path / "image.nii.gz", np.arange(1120.0).reshape(size), np.eye(4))
    write_volume(tmp_path / "label.nii.gz", np.ones((1, 4, 4), np.uint8), corner)
    pair, args = {"fixed": tmp_path / "image.nii.gz", "fixed_label": tmp_path / "label.nii.gz"}, argparse.Namespace(
        resample_labels=True, labels="smooth")
    label = register_pairs.read_own_label(pair, "fixed", 3, args)
    assert label.shape == size and label.any(axis=(1, 2)).nonzero()[0].tolist() == [32]


def test_a_folder_whose_list_is_no_object_is_one_sentence(tmp_path):
    (tmp_path / "dataset.json").write_text('[{"image": "sub-00_T1w.nii.gz"}]')
    with pytest.raises(InputError, match=f"{tmp_path}: a folder does not define pairs; add --fixed F"):
        read_pairs_to_register(tmp_path)


def test_a_list_in_a_folder_is_found_beside_a_resource_fork_of_a_mac(tmp_path):
    for name in ("a_0001.nii.gz", "b_0002.nii.gz"):
        write_volume(tmp_path / name, np.ones((4, 4, 4), np.uint8), np.eye(4))
    (tmp_path / "OASIS_dataset.json").write_text(json.dumps(
        {"registration_val": [{"fixed": "a_0001.nii.gz", "moving": "b_0002.nii.gz"}]}))
    (tmp_path / "._OASIS_dataset.json").write_bytes(b"\0\5\x16\7")
    assert len(read_pairs_to_register(tmp_path)) == 1


def test_a_list_is_complete_though_nobody_reads_what_is_printed(data, tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return log.fileno()

    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr("sys.stdout", Closed())
        code = call("--fixed", data / "sub-00_T1w.nii.gz", "--moving", data / "sub-01_T1w.nii.gz", "--out",
                    tmp_path / "out")
    assert code == 128 + 13 and read_results(tmp_path / "out")["complete"]


def test_results_that_an_earlier_version_wrote_on_windows_are_found(tmp_path, monkeypatch):
    """Their paths have backslashes."""
    field = {"bytes": 1, "sha256": ""}
    (tmp_path / "results.json").write_text(json.dumps({
        "complete": True, "failed": [], "settings": {"config": {"model.dims": 3}},
        "pairs": [{"name": "a", "folder": "a", "moving": "m.nii.gz", "files": {"a\\field.nii.gz": field}}]}))
    monkeypatch.setattr("sys.platform", "win32")
    assert read_results(tmp_path)["pairs"]["a"]["files"] == {"a/field.nii.gz": field}
    [pair], _ = read_pairs_to_score(tmp_path / "results.json")
    assert pair["written"] == (tmp_path, {"a/field.nii.gz": field})
    assert read_pairs_to_score(tmp_path)[0] == [pair], "by their folder too"
