"""Inference/verdict.py: what is ok, doubtful or failed, each limit, and pairs that say so themselves."""
import warnings

import numpy as np
import pytest
from scipy import ndimage

from Dataloader.synthetic import make_subject
from Inference.outputs import ROW
from Inference.registration import register
from Inference.scores import COLUMNS, point_scores, stretched_percent
from Inference.verdict import (
    ALIKE,
    COVERED_PERCENT,
    FOLDED_PERCENT,
    HIDDEN,
    INVERSE_ERROR_VOXELS,
    LEAST_LIST,
    MIRROR_GAIN,
    NOISY,
    SCALES,
    SHEAR_DEGREES,
    STRETCHED_PERCENT,
    TURN_DEGREES,
    findings,
    judge,
    judge_list,
)

GOOD = {"similarity_before": 0.2, "similarity": 0.8, "covered_percent": 97.0, "scale_least": 0.95, "scale_most": 1.1,
        "turn_degrees": 8.0, "shear_degrees": 3.0, "mirrors": False, "segmentations": [], "folding_body_percent": 0.1,
        "inverse_error_voxels": 0.05, "compared_by": "correlation", "dice_before": 0.5, "dice": 0.8,
        "tre_before_mm": 6.0, "tre_mm": 1.2, "labels_lost": []}


def test_a_good_pair_is_ok_without_a_reason():
    assert judge(GOOD) == ("ok", "") == judge({})
    assert judge({**GOOD, "similarity_attainable": 0.2}) == ("ok", "") == judge({**GOOD, "similarity_attainable": None})
    assert judge({**GOOD, "dice_before": None, "tre_before_mm": None}) == ("ok", "")
    points = np.ones((4, 3))  # of a volume registered to itself
    same = point_scores(points, points, {}, np.full((3, 4, 4, 4), 0.02, np.float32), np.diag([2.0, 2, 2, 1]))
    assert same["tre_before_mm"] == 0 < same["tre_mm"] and judge({**GOOD, **same}) == ("ok", "")
    assert same["tre_gained_voxels"] == pytest.approx(0.02 * 3 ** 0.5)


@pytest.mark.parametrize("changes, verdict, words", [
    ({"similarity": 0.97 * ALIKE[0] - 0.01}, "doubtful", "still differ strongly"),
    ({"similarity": 0.97 * ALIKE[1] - 0.01}, "failed", "still differ strongly"),
    ({"similarity_before": 0.9}, "doubtful", "less similar than before"),
    ({"similarity": 0.15, "similarity_attainable": NOISY + 0.01, "similarity_before": 0.1}, "failed", "still differ"),
    ({"similarity": 0.15, "similarity_attainable": 0.5, "similarity_before": 0.1}, "doubtful", "speckle hides"),
    ({"similarity": 0.30, "similarity_attainable": 0.5}, "doubtful", "(0.30, where about 0.50 is attainable)"),
    ({"similarity": 0.08, "similarity_attainable": 0.5, "similarity_before": 0.08}, "failed", "still differ strongly"),
    ({"similarity": 0.05, "similarity_attainable": HIDDEN - 0.01, "similarity_before": 0.01}, "doubtful", "hides"),
    ({"similarity": 0.01, "similarity_attainable": HIDDEN - 0.01, "similarity_before": 0.01}, "failed", "still differ"),
    ({"similarity": 0.01, "similarity_attainable": 0.0, "similarity_before": 0.01}, "doubtful", "about 0.00 is"),
    ({"covered_percent": COVERED_PERCENT[0] - 1}, "doubtful", "covers only 64 %"),
    ({"covered_percent": COVERED_PERCENT[1] - 1}, "failed", "covers only 19 %"),
    ({"covered_percent": 40.0, "similarity": 0.3}, "doubtful", "covers only 40 %"),
    ({"covered_percent": 8.0, "overlap_percent": 25.0}, "doubtful", "covers only 8 %"),
    ({"scale_most": SCALES[0] + 0.1}, "doubtful", "enlarges an axis 1.6 times"),
    ({"scale_least": 1 / (SCALES[1] + 0.1), "scale_most": 0.9}, "failed", "shrinks an axis 3.1 times"),
    ({"mirrors": True}, "failed", "mirrors"),
    ({"mirror_gain": MIRROR_GAIN[0] + 0.01, "turn_degrees": 178.0}, "doubtful", "a mirror image of the moving volume"),
    ({"mirror_gain": MIRROR_GAIN[1] + 0.01, "similarity": 0.1}, "failed", "0.31 higher): check left and right"),
    ({"shear_degrees": SHEAR_DEGREES[0] + 1}, "doubtful", "shears"),
    ({"turn_degrees": TURN_DEGREES + 1}, "doubtful", "turns by 76 degrees"),
    ({"segmentations": ["moving"]}, "failed", "the moving volume is a segmentation"),
    ({"segmentations": ["fixed", "moving"]}, "doubtful", "both volumes are segmentations"),
    ({"folding_body_percent": FOLDED_PERCENT[0] + 0.5}, "doubtful", "folds in 1.5 %"),
    ({"folding_body_percent": FOLDED_PERCENT[1] + 5}, "failed", "folds in 15 %"),
    ({"stretched_percent": STRETCHED_PERCENT[0] + 1}, "doubtful",
     "fivefold in 6 % of the body: check that the moving volume shows all of it, and that both are equally sharp"),
    ({"inverse_error_voxels": INVERSE_ERROR_VOXELS[0] + 0.5}, "doubtful", "misses by 1.5 voxels"),
    ({"dice": 0.45}, "failed", "overlap less than before"),
    ({"dice_before": 0.0, "dice": 0.05}, "failed", "hardly overlap"),
    ({"tre_mm": 7.0}, "failed", "further apart"),
    ({"tre_mm": 7.0, "tre_gained_voxels": 0.5}, "failed", "further apart"),
    ({"labels_lost": [4]}, "doubtful", "lack structures of the fixed volume: [4]")])
def test_each_finding_has_its_verdict_and_its_sentence(changes, verdict, words):
    found, reason = judge({**GOOD, **changes})
    assert found == verdict and words in reason and reason.endswith(".") and "\n" not in reason


def test_a_row_of_the_results_has_all_that_the_verdict_uses():
    """A list is judged again from its rows."""
    asked = set()

    class Asked(dict):
        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    list(findings(Asked(GOOD)))
    assert asked >= {"similarity_attainable", "covered_percent"}
    assert asked - {*COLUMNS, *ROW} == {"labels_lost", "tre_gained_voxels"}, "these two come with the labels and points"


def test_two_modalities_are_not_judged_by_the_correlation_of_their_intensities():
    unlike = {**GOOD, "similarity": 0.05}
    assert judge(unlike)[0] == "failed" and judge({**unlike, "compared_by": "mind"}) == ("ok", "")
    chosen = {**GOOD, "similarity": 0.3, "compared_by": "mind", "one_sign": 0.6}
    assert judge(chosen)[0] == "doubtful" and "two modalities, or one with very different contrast" in judge(chosen)[1]
    assert judge({**chosen, "similarity": 0.05})[0] == "failed", "noise looks like another modality too"
    assert judge({**chosen, "covered_percent": 10.0})[0] == "doubtful", "each modality shows its own part of the body"


@pytest.mark.parametrize("changes, words", [
    ({"turn_degrees": 170.0, "similarity": 0.1}, "still differ strongly"),
    ({"scale_most": SCALES[0] + 0.1, "shear_degrees": SHEAR_DEGREES[1] + 1}, "shears"),
    ({"folding_body_percent": FOLDED_PERCENT[0] + 0.5, "inverse_error_voxels": INVERSE_ERROR_VOXELS[1] + 1},
     "misses by 6 voxels")])
def test_a_doubt_does_not_hide_what_is_worse(changes, words):
    found, reason = judge({**GOOD, **changes})
    assert found == "failed" and words in reason


def test_one_pair_of_a_list_that_stands_out_is_doubtful():
    rng = np.random.default_rng(0)
    rows = [{**GOOD, "name": str(n), "similarity": 0.8 + 0.01 * rng.normal()} for n in range(LEAST_LIST + 2)]
    assert all(row["verdict"] == "ok" for row in judge_list(rows))
    rows[3]["similarity"] = 0.6
    judged = judge_list(rows)
    assert [row["name"] for row in judged if row["verdict"] != "ok"] == ["3"]
    assert "is an outlier among 10 pairs" in judged[3]["reason"] and "verdict" not in rows[3]
    assert judge_list(judged) == judged, "judging twice changes nothing"
    rows[3]["similarity"] = 0.97
    assert all(row["verdict"] == "ok" for row in judge_list(rows)), "better than the others is no fault"
    assert all(row["verdict"] == "ok" for row in judge_list([*rows[:2], {**GOOD, "similarity": 0.5}])), "too few to say"


def brain(seed, shape=(30, 34, 28)):
    """A made-up subject with texture, float32."""
    return make_subject(seed, shape)["image"].astype(np.float32)


def found_by(fixed, moving, moving_affine=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        placed = moving, np.eye(4) if moving_affine is None else moving_affine
        return register((fixed, np.eye(4)), placed, **{"affine": False, "refine": False, **options})


def test_a_part_stretched_over_a_gap_is_told_from_an_affine_change_of_size():
    body = np.ones((20, 8, 8), bool)
    field = np.zeros((3, *body.shape), np.float32)
    field[0, 10:] = -0.9 * np.arange(10)[:, None, None]  # the second half shows a tenth of its length
    assert 45 <= stretched_percent(field, np.eye(4), body) <= 50
    field[0] = -0.9 * np.arange(20)[:, None, None]
    assert stretched_percent(field, np.eye(4), body) == 100
    assert stretched_percent(field, np.diag([0.1, 1, 1, 1]), body) == 0


@pytest.mark.parametrize("turned, step", [(True, 1), (False, 2), (True, 2)])
def test_orientation_and_voxel_size_of_the_moving_file_stretch_nothing(turned, step):
    """The same volume with its first axis stored the other way, or with voxels of eight times the volume."""
    fixed = make_subject(3, 32)["image"].astype(np.float32)
    moving = ndimage.gaussian_filter(fixed, 0.4 * step)[::step, ::step, ::step]
    affine = np.diag([step, step, step, 1.0])
    if turned:
        affine[0] = [-step, 0, 0, step * (len(moving) - 1)]
        moving = moving[::-1]
    found = found_by(fixed, np.ascontiguousarray(moving), affine)
    assert found.stretched_percent == 0 and found.verdict == "ok", found.reason


@pytest.mark.slow
def test_registered_pairs_know_their_own_verdict():
    fixed, moving = brain(0), brain(1)
    good = found_by(fixed, moving, affine=True, refine=20)
    assert (good.verdict, good.reason) == ("ok", "")
    noise = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=fixed.shape), 1).astype(np.float32)
    assert found_by(fixed, noise, affine=True, refine=20).verdict != "ok"  # so few voxels can be bent to fit noise
    label = make_subject(1, fixed.shape)["label"].astype(np.float32)
    given = found_by(fixed, label, affine="rigid")
    assert given.verdict == "failed" and "the moving volume is a segmentation" in given.reason
    mirror = np.diag([-1.0, 1, 1, 1])
    mirror[0, 3] = fixed.shape[0] - 1
    mirrored = found_by(fixed, moving[::-1], start=mirror)
    assert mirrored.verdict == "failed" and "mirrors" in mirrored.reason


@pytest.mark.slow
def test_no_warning_advises_what_has_run():
    fixed, moving = brain(0), brain(1)[:, :, :8]
    apart = np.eye(4)
    apart[2, 3] = 24
    for options, advised, not_advised in (({"start": "header"}, "--affine or --start centre", "check"),
                                          ({"affine": "rigid"}, "check that both show the same part", "--affine")):
        sentence, = found_by(fixed, moving, apart, **options).warnings
        assert advised in sentence and not_advised not in sentence
