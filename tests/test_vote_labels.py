"""Labels of several volumes voting: the count by hand, ties, the program on files, and what it refuses."""
import json

import numpy as np
import pytest

from Dataloader.nifti import read_label, read_volume, write_volume
from Inference.labels import vote
from Scripts import vote_labels
from tests.test_nifti import make_affine

AFFINE = make_affine(signs=(-1, 1, 1), spacing=(1, 1.2, 2))


def two_that_differ():
    """Two maps of one size, label 1 in the one where label 7 is in the other, which overlap in a slab."""
    one, two = np.zeros((2, 9, 9, 9), np.int16)
    one[2:5, 2:7, 2:7], two[4:7, 2:7, 2:7] = 1, 7
    return one, two


def test_most_votes_win_and_agreement_is_the_share_of_the_maps():
    one, two = two_that_differ()
    winner, agreement = vote([one, one, two])
    assert winner.dtype == one.dtype and winner[3:7, 4, 4].tolist() == [1, 1, 0, 0]
    np.testing.assert_allclose(agreement[3:7, 4, 4], [2 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert agreement[0, 0, 0] == 1 and agreement.dtype == np.float32


def test_the_surroundings_decide_between_as_many_votes():
    one, two = two_that_differ()
    winner, agreement = vote([one, two])
    assert set(np.unique(winner)) == {0, 1, 7} and winner[3, 4, 4] == 1 and winner[5, 4, 4] == 7
    assert agreement[3, 4, 4] == 0.5
    np.testing.assert_array_equal(vote([two, one])[0] != 0, winner != 0)  # the order of the maps is nothing to them


def test_a_map_alone_is_the_vote():
    winner, agreement = vote([two_that_differ()[0]])
    np.testing.assert_array_equal(winner, two_that_differ()[0])
    assert (agreement == 1).all()


@pytest.fixture
def files(tmp_path):
    """Two label maps and the truth on one grid; the affine of the second one is rounded."""
    one, two = two_that_differ()
    for name, label, affine in (("one", one, AFFINE), ("two", two, AFFINE + 1e-6), ("truth", one, AFFINE)):
        write_volume(tmp_path / f"{name}.nii.gz", label, affine)
    return tmp_path


def run(folder, *words):
    return vote_labels.main([str(folder / word) if word.endswith(".gz") else word for word in words])


def test_the_program_writes_the_vote_and_scores_it(files, capsys):
    assert run(files, "--labels", "one.nii.gz", "one.nii.gz", "two.nii.gz", "--truth", "truth.nii.gz", "--out",
               "sub/vote.nii.gz", "--agreement", "sub/agreement.nii.gz") == 0
    winner, affine = read_label(files / "sub/vote.nii.gz")
    np.testing.assert_allclose(affine, AFFINE, atol=1e-5)
    wanted = vote([read_label(files / f"{name}.nii.gz")[0] for name in ("one", "one", "two")])
    np.testing.assert_array_equal(winner, wanted[0])
    np.testing.assert_allclose(read_volume(files / "sub/agreement.nii.gz")[0], wanted[1])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["label", "1", "mean"] and lines[2].startswith("the vote ")
    assert lines[3].split() == [str(files / "one.nii.gz"), "1.000", "1.000"]
    assert lines[5].split() == [str(files / "two.nii.gz"), "0.000", "0.000"]
    assert f"{np.count_nonzero(winner)} voxels have a label by the vote of 3 maps" in lines[-1]


def test_maps_without_any_label(files, capsys):
    write_volume(files / "empty.nii.gz", np.zeros((9, 9, 9), np.int16), AFFINE)
    assert run(files, "--labels", "empty.nii.gz", "empty.nii.gz", "--out", "vote.nii.gz") == 0
    assert "0 voxels have a label" in capsys.readouterr().out


def test_what_cannot_vote_is_refused(files, capsys):
    write_volume(files / "other.nii.gz", np.zeros((9, 9, 8), np.int16), AFFINE)
    write_volume(files / "halves.nii.gz", np.full((9, 9, 9), 0.5, np.float32), AFFINE)
    for words, said in ((["one.nii.gz"], "alone has nobody to vote with"),
                        (["one.nii.gz", "other.nii.gz"], "other.nii.gz: the label map is on another grid than"),
                        (["one.nii.gz", "halves.nii.gz"], "halves.nii.gz: 729 label voxels are not whole numbers"),
                        (["one.nii.gz", "nowhere.nii.gz"], "nowhere.nii.gz: no such file")):
        assert run(files, "--labels", *words, "--out", "vote.nii.gz") == 43
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1 and said in printed.err and not printed.out
        assert not (files / "vote.nii.gz").exists()
    assert run(files, "--labels", "one.nii.gz", "two.nii.gz", "--out", str(files / "vote.txt")) == 43
    assert "a volume file ends in" in capsys.readouterr().err
    assert run(files, "--labels", "one.nii.gz", "two.nii.gz", "--out", "vote.nii.gz", "--agreement", "share.png") == 43
    assert "share.png: a volume file ends in" in capsys.readouterr().err and not (files / "vote.nii.gz").exists()


def test_maps_of_two_subjects_do_not_vote_together(files, capsys):
    """Equal grids do not make them one volume: the results beside them say onto which they were brought."""
    names = ("a_to_x", "b_to_x", "a_to_y")
    for name in names:
        (files / "out" / name).mkdir(parents=True)
        write_volume(files / "out" / name / "warped_label.nii.gz", two_that_differ()[0], AFFINE)
    rows = [{"name": name, "folder": name, "fixed": f"/data/{name[-1]}.nii.gz"} for name in names]
    (files / "out/results.json").write_text(json.dumps({"pairs": rows}))
    maps = {row["name"]: str(files / "out" / row["name"] / "warped_label.nii.gz") for row in rows}
    assert vote_labels.main(["--labels", *maps.values(), "--out", str(files / "vote.nii.gz")]) == 43
    assert "a_to_y/warped_label.nii.gz: brought to /data/y.nii.gz, while " in capsys.readouterr().err
    words = ["--labels", maps["a_to_x"], maps["b_to_x"], "--out", str(files / "vote.nii.gz")]
    assert vote_labels.main(words) == 0 and "warning" not in capsys.readouterr().err
    assert run(files, "--labels", "one.nii.gz", "two.nii.gz", "--out", "vote.nii.gz") == 0
    assert "nothing tells whether they are of one volume" in capsys.readouterr().err
