"""All results on one page, and a series whose motion is known."""
import json
import shutil
import signal

import nibabel
import numpy as np
import pytest
from scipy import ndimage

import OM_study
from Dataloader.nifti import open_nifti, write_volume
from Dataloader.synthetic import make_subject
from Inference.results import read_results
from Runtime import memory
from Runtime.errors import InputError
from Study import motion
from Study.common import locked
from Study.motion import displacement, parameters_of
from Study.qc import outlier_of, spreads_of
from tests import test_jacobian
from tests.test_jacobian import table, texture

SIZE, AFFINE = (22, 24, 20), np.diag([2.0, 2.0, 2.0, 1.0])


def run(*words):
    return OM_study.main([*map(str, words)])


# ---------------------------------------------------------------------------------------------------------------------
# qc
# ---------------------------------------------------------------------------------------------------------------------

def write_results(place, count, size=SIZE):
    """Results as OM_register.py writes them, of one warped volume for all; the last one is unlike the others."""
    subject = make_subject(0, size)
    write_volume(place / "fixed.nii.gz", subject["image"], AFFINE)
    write_volume(place / "fixed_label.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    write_volume(place / "reg/all/warped.nii.gz", subject["image"], AFFINE)
    write_volume(place / "reg/all/warped_label.nii.gz", subject["label"].astype(np.uint8), AFFINE)
    rows = [{"name": f"s_{number:03d}", "folder": "all", "fixed": str(place / "fixed.nii.gz"), "matrix": [],
             "fixed_label": str(place / "fixed_label.nii.gz"), "similarity_before": 0.2, "labels": {},
             "similarity": 0.8 + 0.0001 * number, "dice": 0.8, "warnings": []} for number in range(count)]
    rows[-1]["similarity"] = 0.5
    failed = [{"name": "lost", "reason": "lost.nii.gz: no such file; check the path."}]
    (place / "reg/results.json").write_text(json.dumps({"version": "0.0.1", "pairs": rows, "failed": failed,
                                                         "complete": True}))


def change_rows(folder, change):
    """Call change(row) on every row of the results in a folder."""
    content = json.loads((folder / "results.json").read_text())
    for row in content["pairs"]:
        change(row)
    (folder / "results.json").write_text(json.dumps(content))


def test_an_outlier_is_told_by_its_worst_number():
    rows = [{"similarity": 0.8 + 0.001 * number, "sdlogj": 0.1} for number in range(9)]
    spreads = spreads_of(rows)
    assert outlier_of(rows[4], spreads)["outlier"] == "" and outlier_of({"similarity": 0.9}, spreads)["outlier"] == ""
    found = outlier_of({"similarity": 0.804 - 6 * 0.03 * 0.804, "sdlogj": 0.11}, spreads)
    assert found["outlier"] == "similarity" and found["outlier_z"] == pytest.approx(6, abs=1e-6)
    assert outlier_of({"similarity": 0.1}, spreads_of(rows[:7]))["outlier"] == ""  # too few to say


@pytest.mark.parametrize("key, little, much", [("folding_body_percent", 0.0004, 1.1), ("turn_degrees", 0.3, 6.0),
                                               ("shear_degrees", 0.1, 6.0)])
def test_a_little_among_zeros_is_no_outlier(key, little, much):
    spreads = spreads_of([{key: 0.0} for _ in range(9)])
    assert outlier_of({key: little}, spreads)["outlier"] == "" and outlier_of({key: much}, spreads)["outlier"] == key


@pytest.mark.slow
def test_the_page_of_two_hundred_subjects(tmp_path, capsys):
    write_results(tmp_path, 200)
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == {
        "verdict_ok": 199, "verdict_doubtful": 1, "verdict_failed": 0, "outliers": 1, "done": 200, "failed": 1}
    page = tmp_path / "qc/qc.html"
    text = page.read_text()
    assert page.stat().st_size < 20e6 and text.count('class="thumb"') == 200
    assert "http" not in text.replace("http-equiv", "") and "aria-sort" in text and "lost.nii.gz" in text
    first, *rest = table(tmp_path / "qc/qc.tsv")
    assert first["name"] == "s_199" and first["verdict"] == "doubtful" and first["outlier"] == "similarity"
    assert len(rest) == 199
    assert run("qc", "--results", tmp_path / "reg", "--strict", "--out", tmp_path / "qc") == 43
    assert "keeping 200 of 200 subjects from an earlier run" in capsys.readouterr().err


def test_verdicts_and_outliers_are_those_of_all_results_of_now(tmp_path, capsys):
    """Where pictures are kept, numbers are not: the last of three is one of ten, and no longer unlike the others."""
    write_results(tmp_path, 3, (10, 11, 9))
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc") == 0
    write_results(tmp_path, 10, (10, 11, 9))
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc") == 0
    assert "keeping 3 of 10 subjects" in capsys.readouterr().err
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "fresh") == 0
    assert (tmp_path / "qc/qc.tsv").read_text() == (tmp_path / "fresh/qc.tsv").read_text()
    first, *rest = table(tmp_path / "qc/qc.tsv")
    assert (first["name"], first["verdict"], first["outlier"]) == ("s_009", "doubtful", "similarity")
    assert {row["verdict"] for row in rest} == {"ok"} and not any(row["outlier"] for row in rest)
    assert "dice" in first
    change_rows(tmp_path / "reg", lambda row: row.pop("dice"))
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc") == 0
    printed = capsys.readouterr()
    assert "keeping 10 of 10 subjects" in printed.err
    assert json.loads(printed.out.splitlines()[-1]) == {
        "verdict_ok": 9, "verdict_doubtful": 1, "verdict_failed": 0, "outliers": 1, "done": 10, "failed": 1}
    assert "dice" not in table(tmp_path / "qc/qc.tsv")[0]
    change_rows(tmp_path / "reg", lambda row: row.update(folding_body_percent=50.0 * (row["name"] == "s_003")))
    assert run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc") == 0
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counts["verdict_failed"], counts["failed"]) == (1, 1)  # the second is lost.nii.gz, which is left out


@pytest.mark.parametrize("settings, what", [(None, "registration"), ({"program": "segment"}, "run")])
def test_results_of_a_run_that_did_not_finish_are_said_to_be_of_one(tmp_path, settings, what, capsys):
    write_results(tmp_path, 2, (10, 11, 9))
    content = json.loads((tmp_path / "reg/results.json").read_text())
    said = f"{tmp_path}/reg: the {what} did not finish; run it again to continue"
    for complete in (False, True):
        content.update(complete=complete, settings=settings)
        (tmp_path / "reg/results.json").write_text(json.dumps(content))
        run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc")
        assert (f"warning: {said}\n" in capsys.readouterr().err) is not complete
        assert (said in (tmp_path / "qc/qc.html").read_text()) is not complete


def test_a_registration_that_shows_nothing_of_the_moving_volume_keeps_its_row(tmp_path):
    write_results(tmp_path, 2)
    write_volume(tmp_path / "reg/all/warped.nii.gz", np.full(SIZE, 0.4, np.float32), AFFINE)
    run("qc", "--results", tmp_path / "reg", "--out", tmp_path / "qc")
    assert [row["name"] for row in table(tmp_path / "qc/qc.tsv")] == ["s_001", "s_000"], "the less similar one first"


def test_subjects_whose_names_differ_only_in_where_the_folder_ends_have_two_pictures(tmp_path, monkeypatch):
    write_results(tmp_path, 1, (10, 11, 9))
    shutil.copytree(tmp_path / "reg", tmp_path / "reg_T1")
    write_volume(tmp_path / "reg_T1/all/warped.nii.gz", make_subject(1, (10, 11, 9))["image"], AFFINE)
    change_rows(tmp_path / "reg", lambda row: row.update(name="T1_01"))
    change_rows(tmp_path / "reg_T1", lambda row: row.update(name="01"))
    assert run("qc", "--results", tmp_path / "reg", tmp_path / "reg_T1", "--out", tmp_path / "qc") == 0
    rows = json.loads((tmp_path / "qc/results.json").read_text())["pairs"]
    assert [row["name"] for row in rows] == ["reg/T1_01", "reg_T1/01"]
    one, other = ((tmp_path / "qc/thumbnails" / row["picture"]).read_bytes() for row in rows)
    assert one != other
    monkeypatch.chdir(tmp_path / "reg")
    (tmp_path / "link").symlink_to(tmp_path / "reg_T1")
    assert run("qc", "--results", ".", "../link", "--out", tmp_path / "qc") == 0
    rows = json.loads((tmp_path / "qc/results.json").read_text())["pairs"]
    assert [row["name"] for row in rows] == ["reg/T1_01", "link/01"]


def test_a_folder_in_which_everything_failed_is_shown_beside_others_and_alone_is_one_sentence(tmp_path, capsys):
    write_results(tmp_path, 1, (10, 11, 9))
    (tmp_path / "bad").mkdir()
    failed = [{"name": f"s_{number}", "reason": f"s_{number}.nii.gz: no such file."} for number in range(2)]
    (tmp_path / "bad/results.json").write_text(json.dumps({"pairs": [], "failed": failed, "complete": True}))
    assert run("qc", "--results", tmp_path / "reg", tmp_path / "bad", "--out", tmp_path / "qc") == 0
    capsys.readouterr()
    page = (tmp_path / "qc/qc.html").read_text()
    assert all(f"bad/s_{number}: s_{number}.nii.gz: no such file." in page for number in range(2))
    assert run("qc", "--results", tmp_path / "bad", "--out", tmp_path / "none") == 43
    line, = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}/bad: none of its 2 entries could be processed: s_0: s_0.nii.gz: no such file."


@pytest.mark.parametrize("words", [
    "qc --results {0}/reg", "jacobian --results {0}/reg", "motion --series {0}/bold.nii.gz",
    "template --images {0}/fixed.nii.gz {0}/reg/all/warped.nii.gz", "segment --atlases {0} --images {0}/fixed.nii.gz"])
def test_the_results_of_another_program_are_not_overwritten(tmp_path, words, capsys):
    write_results(tmp_path, 2)
    write_volume(tmp_path / "bold.nii.gz", np.random.default_rng(0).random((5, 5, 5, 2), np.float32), AFFINE)
    before = (tmp_path / "reg/results.json").read_bytes()
    assert run(*words.format(tmp_path).split(), "--out", tmp_path / "reg") == 43
    assert "it has results of another program, which would be lost" in capsys.readouterr().err
    assert (tmp_path / "reg/results.json").read_bytes() == before and not (tmp_path / "reg/lock.json").exists()


@pytest.mark.parametrize("words, name", [
    ("qc --results {0}/reg", "thumbnails/s_001.png"), ("motion --series {0}/bold.nii.gz", "reference.nii.gz"),
    ("jacobian --scans {0}/fixed.nii.gz {0}/reg/all/warped.nii.gz", "warped/middle.nii.gz"),
    ("template --images {0}/fixed.nii.gz {0}/reg/all/warped.nii.gz", "template.nii.gz"),
    ("segment --atlases {0} --images {0}/fixed.nii.gz", "fixed/label.nii.gz")])
def test_a_file_of_the_users_is_not_replaced_by_a_result_of_that_name(tmp_path, words, name, capsys):
    write_results(tmp_path, 2, (10, 11, 9))
    write_volume(tmp_path / "bold.nii.gz", np.random.default_rng(0).random((5, 5, 5, 2), np.float32), AFFINE)
    theirs = tmp_path / "out" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    assert run(*words.format(tmp_path).split(), "--out", tmp_path / "out") == 43
    assert f"{theirs}: it is not of an earlier run" in capsys.readouterr().err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [theirs]
    assert theirs.read_bytes() == b"theirs"


def test_what_a_killed_run_has_left_may_be_replaced_unless_it_is_an_input(tmp_path):
    for _ in range(2):
        with locked(tmp_path, "motion", ["reference.nii.gz"], [tmp_path / "bold.nii.gz", None]):
            (tmp_path / "reference.nii.gz").touch()
    with pytest.raises(InputError, match="reference.nii.gz: a result with the same name would overwrite this input"):
        with locked(tmp_path, "motion", ["reference.nii.gz"], [tmp_path / "reference.nii.gz"]):
            pass


def test_no_results_are_refused(tmp_path, capsys):
    assert run("qc", "--results", tmp_path, "--out", tmp_path / "qc") == 43
    assert "no results.json with results" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# motion
# ---------------------------------------------------------------------------------------------------------------------

def rigid(shift_mm, degrees, centre_mm):
    """A turn around z about a centre, then a shift: 4x4."""
    angle = np.deg2rad(degrees)
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    matrix[:3, 3] = centre_mm - matrix[:3, :3] @ centre_mm + shift_mm
    return matrix


def test_parameters_are_those_of_the_map():
    centre = np.array([10.0, -5.0, 3.0])
    found = parameters_of(rigid([1.0, 2.0, -3.0], 5.0, centre), centre)
    np.testing.assert_allclose(found, [1, 2, -3, 0, 0, np.deg2rad(5)], atol=1e-12)
    assert displacement(np.array([1.0, -2.0, 0, 0, 0.01, 0]), 50) == pytest.approx(3.5)
    assert displacement(np.array([1.0, -2.0, 0, 0, 0.01, 0]), 5) == pytest.approx(3.05)


@pytest.mark.slow
def test_a_known_motion_is_found_and_undone(tmp_path, capsys):
    image = texture(1, 2.0)
    centre = (AFFINE @ [*(np.subtract(SIZE, 1) / 2), 1])[:3]
    given = [([0, 0, 0], 0), ([1.0, 0, -0.6], 2.0), ([-0.8, 1.2, 0], -3.0)]
    frames = []
    for shift, degrees in given:
        matrix = np.linalg.inv(AFFINE) @ np.linalg.inv(rigid(shift, degrees, centre)) @ AFFINE
        frames.append(ndimage.affine_transform(image, matrix[:3, :3], matrix[:3, 3], order=3))
    noise = np.random.default_rng(0).normal(0, 0.005, (*SIZE, 3))
    write_volume(tmp_path / "bold.nii.gz", (np.stack(frames, -1) + noise).astype(np.float32), AFFINE)
    words = ["motion", "--series", tmp_path / "bold.nii.gz", "--reference", "0", "--out", tmp_path / "out", "--device",
             "cpu"]
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["frames"] == 3
    for cells, (shift, degrees) in zip(table(tmp_path / "out/motion.tsv"), given, strict=True):
        found = [float(cells[key]) for key in ("trans_x", "trans_y", "trans_z", "rot_x", "rot_y", "rot_z")]
        np.testing.assert_allclose(found[:3], shift, atol=0.5)  # a quarter of a voxel
        np.testing.assert_allclose(np.rad2deg(found[3:]), [0, 0, degrees], atol=1.0)
    aligned = np.asanyarray(open_nifti(tmp_path / "out/aligned.nii.gz").dataobj)
    before = np.abs(np.stack(frames, -1) - image[..., None])[4:-4, 4:-4, 4:-4].mean((0, 1, 2))
    after = np.abs(aligned - image[..., None])[4:-4, 4:-4, 4:-4].mean((0, 1, 2))
    assert aligned.shape == (*SIZE, 3) and (after[1:] < 0.6 * before[1:]).all()
    assert run(*words) == 0 and "keeping 1 of 1 blocks" in capsys.readouterr().err
    assert run("motion", "--series", tmp_path / "bold.nii.gz", "--reference", "9", "--out", tmp_path / "out") == 43
    assert "--reference 9: give mean, middle, or the number" in capsys.readouterr().err
    write_volume(tmp_path / "flat.nii.gz", image, AFFINE)
    assert run("motion", "--series", tmp_path / "flat.nii.gz", "--out", tmp_path / "out") == 43
    assert "is not a series of volumes" in capsys.readouterr().err
    write_volume(tmp_path / "cine.nii.gz", np.stack([image[..., :1]] * 3, -1), AFFINE)
    assert run("motion", "--series", tmp_path / "cine.nii.gz", "--out", tmp_path / "out") == 43
    assert "(D, H, W, frames); series of slices are not supported." in capsys.readouterr().err


@pytest.mark.slow
def test_a_frame_that_hardly_moved_does_not_smooth_the_next_one(tmp_path, monkeypatch):
    """The largest smoothing, which suits such a frame, would leave 0.993."""
    monkeypatch.setattr(test_jacobian, "SIZE", (32, 32, 28))
    still = test_jacobian.texture(3, 1.5)
    places = np.indices(still.shape).astype(float)
    apart = ((places - (np.array(still.shape)[:, None, None, None] - 1) / 2) ** 2).sum(0)
    bulge = 5 * np.exp(-apart / (2 * 4 ** 2))
    moved = ndimage.map_coordinates(still, [places[0] + bulge, places[1] - bulge / 2, places[2]], order=1)
    noise = np.random.default_rng(1).normal(0, 0.01, still.shape).astype(np.float32)
    write_volume(tmp_path / "cine.nii.gz", np.stack([still, still + noise, moved], -1), AFFINE)
    assert run("motion", "--series", tmp_path / "cine.nii.gz", "--deform", "--reference", "0", "--device", "cpu",
               "--out", tmp_path / "out") == 0
    assert float(table(tmp_path / "out/motion.tsv")[2]["similarity"]) > 0.995


@pytest.mark.slow
def test_a_run_that_is_broken_off_is_not_complete_and_keeps_its_frames(tmp_path, monkeypatch, capsys):
    image = make_subject(0, (12, 13, 11))["image"]
    write_volume(tmp_path / "bold.nii.gz", np.stack([image, image[::-1]], -1), AFFINE)
    words = ["motion", "--series", tmp_path / "bold.nii.gz", "--device", "cpu", "--out", tmp_path / "out"]
    assert run(*words) == 0
    reference = (tmp_path / "out/reference.nii.gz").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(motion, "do_all", lambda *_: signal.default_int_handler(signal.SIGINT, None))  # as Ctrl-C
        assert run(*words, "--again") == 130
    assert (tmp_path / "out/reference.nii.gz").read_bytes() != reference
    assert not read_results(tmp_path / "out")["complete"]
    capsys.readouterr()
    assert run(*words) == 0 and capsys.readouterr().err.count("keeping 1 of 1 blocks") == 2
    assert (tmp_path / "out/reference.nii.gz").read_bytes() == reference
    assert read_results(tmp_path / "out")["complete"]


def test_frames_that_could_not_be_aligned_do_not_count_in_the_mean(tmp_path):
    np.save(tmp_path / "frames.npy", np.full((2, 3, 4, 3), [1.0, 100.0, 3.0], np.float32))
    frames = [{"verdict": verdict} for verdict in ("ok", "failed", "doubtful")]
    found = motion.mean_of([{"folder": str(tmp_path), "name": "frames", "frames": frames}])
    np.testing.assert_array_equal(found, np.full((2, 3, 4), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("suffix, dot, reason", [
    (".nii.gz", 0, "{}, frame 1: every voxel is 0"),
    (".mgz", 1, "the moving volume shows something in a single plane only")])
def test_a_bad_frame_is_empty_and_all_keep_their_numbers_and_the_unit_of_time(tmp_path, suffix, dot, reason,
                                                                              monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(motion, "BLOCK", 3)
    monkeypatch.setattr(motion, "thumbnail", lambda image, affine: shown.append(image) or b"")
    frames, header = np.stack([make_subject(0, (12, 13, 11))["image"]] * 4, -1), nibabel.Nifti1Header()
    frames[..., 1] = 0
    frames[5, 5, 5, 1] = dot
    header.set_data_shape(frames.shape)
    header.set_zooms([2, 2, 2, 1500])
    header.set_xyzt_units("mm", "msec")
    write_volume(tmp_path / "bold.nii.gz", frames, AFFINE, header)
    image = nibabel.MGHImage(frames, AFFINE)
    image.header["tr"] = 1500
    nibabel.save(image, tmp_path / "bold.mgz")
    assert run("motion", "--series", tmp_path / f"bold{suffix}", "--reference", "0", "--device", "cpu", "--out",
               tmp_path / "out") == 0
    said = "frames_00000: frame 1: " + reason.format(tmp_path / f"bold{suffix}")
    assert said.replace(": frame", ": failed, frame", 1) in capsys.readouterr().err
    assert said in (tmp_path / "out/motion.html").read_text()
    rows = table(tmp_path / "out/motion.tsv")
    assert [row["frame"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["verdict"] for row in rows] == ["ok", "failed", "ok", "ok"]
    assert [row["framewise_displacement"] == "n/a" for row in rows] == [True, True, True, False]
    for key in (*motion.PARAMETERS, "similarity_before", "similarity"):
        assert [row[key] == "n/a" for row in rows] == [False, True, False, False]
    found = open_nifti(tmp_path / "out/aligned.nii.gz")
    assert found.header.get_xyzt_units() == ("mm", "msec") and found.header.get_zooms()[3] == 1500
    volumes = np.asanyarray(found.dataobj)
    assert volumes.shape == frames.shape and not volumes[..., 1].any() and volumes[..., [0, 2, 3]].any((0, 1, 2)).all()
    blocks = list(read_results(tmp_path / "out")["pairs"].values())
    for mean in (motion.mean_of(blocks), shown[1]):  # a bad frame is in neither
        np.testing.assert_allclose(mean, volumes[..., [0, 2, 3]].mean(-1), atol=1e-5)
    np.testing.assert_allclose(shown[2], volumes[..., [0, 2, 3]].std(-1), atol=1e-5)
    blocks[1]["frames"][0]["frame"] = 6  # as after a block that failed as a whole
    left = motion.join(tmp_path / "out", blocks, tmp_path / f"bold{suffix}", frames.shape, AFFINE, 50)
    assert [row["framewise_displacement"] for row in left] == [None] * 4


@pytest.mark.slow
def test_what_is_wrong_with_all_frames_or_with_the_machine_is_an_error_and_no_result(tmp_path, monkeypatch, capsys):
    thin = np.random.default_rng(0).random((14, 16, 3, 3), np.float32)
    write_volume(tmp_path / "thin.nii.gz", thin, AFFINE)
    words = ["--device", "cpu", "--reference", "middle"]
    assert run("motion", "--series", tmp_path / "thin.nii.gz", *words, "--out", tmp_path / "thin") == 43
    assert "fewer than 4 voxels along an axis" in capsys.readouterr().err
    assert not (tmp_path / "thin/aligned.nii.gz").exists()
    write_volume(tmp_path / "bold.nii.gz", np.stack([make_subject(0, (12, 13, 11))["image"]] * 2, -1), AFFINE)
    words += ["--series", tmp_path / "bold.nii.gz", "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(memory, "measure", lambda device: {"host_free": 1000})
        assert run("motion", *words) == 43
    assert "GiB are free" in capsys.readouterr().err
    assert run("motion", *words) == 0, "the frames were not given up for good"
    assert [row["verdict"] for row in table(tmp_path / "out/motion.tsv")] == ["ok", "ok"]


def test_a_negative_time_of_a_frame_is_written_as_a_positive_one(tmp_path):
    path, frames = tmp_path / "bold.nii", np.stack([make_subject(0, (12, 13, 11))["image"]] * 2, -1)
    write_volume(path, frames, AFFINE)
    content = bytearray(path.read_bytes())
    content[76 + 4 * 4:76 + 4 * 5] = np.float32(-2).tobytes()  # pixdim[4]
    path.write_bytes(content)
    np.save(tmp_path / "block.npy", frames)
    aligned = {"matrix": np.eye(4), "similarity_before": 1.0, "similarity": 1.0, "verdict": "ok"}
    block = {"folder": tmp_path, "name": "block", "frames": [{"frame": number, **aligned} for number in range(2)]}
    motion.join(tmp_path, [block], path, frames.shape, AFFINE, 50)
    assert open_nifti(tmp_path / "aligned.nii.gz").header.get_zooms()[3] == 2


@pytest.mark.parametrize("name, said", [("bold.nii.gz", "truncated or corrupt"),
                                        ("bold.mha", "a series has to be one NIfTI file")])
def test_a_series_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, said, capsys):
    write_volume(tmp_path / "whole.nii.gz", np.random.default_rng(0).random((9, 9, 9, 8), np.float32), AFFINE)
    content = (tmp_path / "whole.nii.gz").read_bytes()
    (tmp_path / name).write_bytes(content[:len(content) // 3])
    assert run("motion", "--series", tmp_path / name, "--device", "cpu", "--out", tmp_path / "out") == 43
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}") and said in line
