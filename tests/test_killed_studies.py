"""Programs on a study, killed again and again and run once more: the same results, and nothing done twice."""
import json
import multiprocessing
import signal
import sys
import time

import numpy as np
import pytest

import OM_study
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from Study.motion import BLOCK
from tests.test_qc_and_motion import write_results

pytestmark = pytest.mark.slow
SIZE, AFFINE = (12, 13, 11), np.diag([2.0, 2.0, 2.0, 1.0])
WORDS = {
    "segment": "--atlases {0}/atlases --images {0}/images --most 1 --keep",
    "template": "--images {0}/images --rounds 2",
    "jacobian": "--scans {0}/scan_0.nii.gz {0}/scan_1.nii.gz {0}/scan_2.nii.gz",
    "qc": "--results {0}/reg",
    "motion": "--series {0}/series.nii.gz",
}
STARTED = multiprocessing.get_context("forkserver")  # a new process has all modules, so each kill hits the work
STARTED.set_forkserver_preload([f"Study.{name}" for name in WORDS])
KILLS = 3  # in equal parts of the time that a whole run takes, each at a random moment of its part


def run(words):
    sys.exit(OM_study.main(words))


def ended(words, after_s=None):
    """The exit code of a process with these words, killed after some seconds; and how long it took."""
    process, began = STARTED.Process(target=run, args=(words,)), time.monotonic()
    process.start()
    process.join(after_s)
    process.kill()
    process.join()
    return process.exitcode, time.monotonic() - began


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Volumes with labels in two folders, scans of one subject, a series, and results to look through."""
    folder = tmp_path_factory.mktemp("killed")
    for number in range(5):
        subject, where = make_subject(number, SIZE), folder / ("atlases" if number < 2 else "images")
        write_volume(where / f"imagesTr/s_{number}.nii.gz", subject["image"], AFFINE)
        write_volume(where / f"labelsTr/s_{number}.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    image, rng = make_subject(0, SIZE)["image"], np.random.default_rng(0)
    for number in range(3):
        noisy = image + rng.normal(0, 0.02, SIZE).astype(np.float32)
        write_volume(folder / f"scan_{number}.nii.gz", noisy, AFFINE)
    frames = [image + rng.normal(0, 0.02, SIZE).astype(np.float32) for _ in range(BLOCK + 1)]
    write_volume(folder / "series.nii.gz", np.stack(frames, -1), AFFINE)
    write_results(folder, 40)
    return folder


def results_of(out):
    """{path: bytes} of all that a study writes but its logs of time: volumes, fields, maps, pictures and tables."""
    kinds = (".nii.gz", ".npy", ".mat", ".png", ".tsv")
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*"))
            if path.name.endswith(kinds)}


def finished_files(out):
    """{path: when it was written, in ns} of the files of all rows that are finished, as far as they are still there."""
    files = [path.parent / name for path in out.rglob("results.json")
             for row in json.loads(path.read_text())["pairs"] for name in row["files"]]
    return {path: path.stat().st_mtime_ns for path in files if path.exists()}


@pytest.mark.parametrize("task", WORDS)
def test_a_killed_study_goes_on_to_the_same_result(place, task, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [task, *WORDS[task].format(place).split(), *([] if task == "qc" else ["--device", "cpu"])]
    whole, killed = place / f"{task}_whole", place / f"{task}_killed"
    code, seconds = ended([*words, "--out", str(whole)])
    assert code == 0
    rng, kept, codes = np.random.default_rng(51), {}, []
    latest = seconds / 2 if task == "template" else seconds  # later its rounds' fields may be gone already
    for number in range(3 * KILLS):
        if number >= KILLS and (kept or codes[-1] == 0):
            break  # a machine that has become slower gets later kills
        codes.append(ended([*words, "--out", str(killed)], latest * (number + rng.random()) / KILLS)[0])
        assert codes[-1] in (-signal.SIGKILL, 0)
        now = finished_files(killed)
        assert {path: now.get(path) for path in kept} == kept
        kept = now
    assert ended([*words, "--out", str(killed)])[0] == 0
    assert -signal.SIGKILL in codes and kept
    now, expected, found = finished_files(killed), results_of(whole), results_of(killed)
    again = [path for path in kept if now.get(path, kept[path]) != kept[path]]  # a whole template has no rounds' fields
    assert again == []
    assert sorted(found) == sorted(expected) and expected
    assert [name for name in expected if found[name] != expected[name]] == []
    assert not list(killed.rglob("*.tmp*")) and not (killed / "lock.json").exists()
