"""The verdict on a registered pair: ok, doubtful or failed, and why, in one sentence.

It needs no labels: it checks what the registration did (the affine part, the folding, the inverse) and the outcome (how
alike the volumes are, how far the bodies overlap). Labels and landmarks count if given. The limits separate good pairs
from hopeless ones; tests/bench/bench_verdict.py names the subjects that they were chosen on, tests them on others, and
says which limits these others have changed.
"""
import statistics

from Diffusion.losses import OF_TWO_MODALITIES

VERDICTS = ("ok", "doubtful", "failed")  # from best to worst
# (doubtful, failed): beyond the first number a pair is doubtful, beyond the second it has failed.
ALIKE = (0.35, 0.25)  # least similarity where the moving body covers the fixed one
ALIKE_OF_TWO = (1.0, 0.11)  # the same for two modalities, where no score shows whether the volumes match
# If noise leaves less similarity attainable than the first (clean pairs: 0.82 to 0.94), a pair has failed only with
# too small a part of that; below the second, only with less than a tenth (LEFT), as a volume of noise alone has. Above
# these it is doubtful and not ok: wrong pairs with noise reach them.
NOISY, HIDDEN, LEFT = 0.7, 0.3, 0.1
LOST = 0.01  # similarity that smoothing may cost two volumes that were alike from the start
# Least part of the fixed body that the moving one covers, which may show only a part; the second of what its field of
# view reaches.
COVERED_PERCENT = (65.0, 20.0)
SCALES = (1.5, 3.0)  # largest factor by which an axis is stretched or shrunk
SHEAR_DEGREES = (25.0, 45.0)
# Similarity that a mirror image gains: 0.26 or more where the moving organ is mirrored, up to 0.02 in good pairs of one
# modality, and up to 0.18 by chance in those of two.
MIRROR_GAIN = (0.2, 0.3)
TURN_DEGREES = 75.0  # from the headers; beyond it a volume may be mirrored and still look alike
FOLDED_PERCENT = (1.0, 10.0)  # of the voxels of the body, by one-sided determinants
STRETCHED_PERCENT = (5.0, 100.0)  # of the body, see `stretched_percent` in scores.py; never failed for it alone
INVERSE_ERROR_VOXELS = (1.0, 5.0)
DICE_LOST, TRE_GAINED = 0.02, 1.05  # largest drop of Dice, and largest factor for the landmarks' error
TRE_GAINED_VOXELS = 0.1  # by which it must grow too: where it was nearly 0, rounding alone multiplies it
LEAST_DICE = 0.1
OUTLIER = 5.0  # robust standard deviations from the median of the list, on the bad side
LEAST_SPREAD = 0.03  # of the median, so that nearly equal pairs do not turn another one into an outlier
LEAST_LIST = 8  # pairs; a shorter list says nothing about one of them


def judge(scores):
    """The verdict on one pair: ("ok", "doubtful" or "failed"; the reason in one sentence, "" for ok).

    scores: of `pair_scores`, or the row of a pair; what is missing or None is not judged. The reason is that of the
    worst of the `findings`.
    """
    return max(findings(scores), key=lambda finding: VERDICTS.index(finding[0]), default=("ok", ""))


def _level(value, limits, larger_is_worse=True):
    """The verdict for one number, None where it is ok or None. limits: (doubtful, failed)."""
    if value is None:
        return None
    beyond = [value > limit if larger_is_worse else value < limit for limit in limits]
    return "failed" if beyond[1] else "doubtful" if beyond[0] else None


def findings(scores):
    """Yield (verdict, sentence) for all that is wrong with a pair; of equally bad ones `judge` takes the first."""
    sides = scores.get("segmentations") or []
    if len(sides) == 1:
        yield "failed", f"the {sides[0]} volume is a segmentation and the other one an image: give its image."
    if sides:
        yield "doubtful", ("both volumes are segmentations, and intensities were compared: give the images, and these "
                           "as labels.")

    # The affine part
    if scores.get("mirrors"):
        yield "failed", "the affine part mirrors the volume: correct the initial matrix or the header."
    if level := _level(scores.get("mirror_gain"), MIRROR_GAIN):
        yield level, ("a mirror image of the moving volume fits better (similarity "
                      f"{scores['mirror_gain']:.2f} higher): check left and right, and the order of the axes, in both "
                      "headers.")
    least, most = scores.get("scale_least"), scores.get("scale_most")
    if most is not None:
        word, factor = ("enlarges", most) if most * least > 1 else ("shrinks", 1 / least)
        if level := _level(factor, SCALES):
            yield level, (f"the affine part {word} an axis {factor:.2g} times: check the voxel sizes in both headers, "
                          "and that both show the same.")
    if level := _level(scores.get("shear_degrees"), SHEAR_DEGREES):
        yield level, f"the affine part shears by {scores['shear_degrees']:.0f} degrees: look at the picture."
    if (scores.get("turn_degrees") or 0) > TURN_DEGREES:
        yield "doubtful", (f"the affine part turns by {scores['turn_degrees']:.0f} degrees from the headers: check "
                           "both orientations, and left and right.")

    # How alike the volumes are, where the moving one covers the fixed one
    before, after = scores.get("similarity_before"), scores.get("similarity")
    two_modalities = scores.get("compared_by") in OF_TWO_MODALITIES
    # A correct pair of two modalities needs no linear relation. A user who chose another measure knows that.
    if after is not None and not (two_modalities and scores.get("one_sign") is None):
        covered = max(scores.get("covered_percent", 100.0), COVERED_PERCENT[1]) / 100  # the rest is judged below
        alike, limits = after / covered, ALIKE_OF_TWO if two_modalities else ALIKE
        level = _level(alike, limits, larger_is_worse=False)
        most = scores.get("similarity_attainable")
        hidden = most is not None and most < NOISY and (
            after >= LEFT * most if most < HIDDEN else alike >= limits[1] * most)  # products, as most may be 0
        if level == "doubtful" and two_modalities:
            yield level, ("the volumes look like two modalities, or one with very different contrast, and were "
                          "compared by their structures: check the picture, because no score shows whether they match.")
        elif level and hidden:
            yield "doubtful", (f"noise or speckle hides the anatomy from the similarity ({after:.2f}, where about "
                               f"{most:.2f} is attainable): look at the picture, or give labels or landmarks.")
        elif level:
            yield level, (f"the volumes still differ strongly after the registration (similarity {after:.2f}): check "
                          "that both show the same organ.")
        if before is not None and after < before - LOST:
            yield "doubtful", (f"the volumes are less similar than before (similarity {before:.2f}, after it "
                               f"{after:.2f}).")
    least = 1.0 if two_modalities else COVERED_PERCENT[1]  # where one shows nothing the other modality may
    limits = COVERED_PERCENT[0], least * scores.get("overlap_percent", 100.0) / 100
    if level := _level(scores.get("covered_percent"), limits, larger_is_worse=False):
        yield level, (f"the moving volume covers only {scores['covered_percent']:.0f} % of what the fixed one "
                      "shows: check that both show the same part of the body.")

    # Labels and landmarks
    before, after = scores.get("dice_before"), scores.get("dice")
    if after is not None:
        if before is not None and after < before - DICE_LOST:
            yield "failed", f"the labels overlap less than before (Dice {before:.3f} before, {after:.3f} after)."
        if after < LEAST_DICE:
            yield "failed", f"the labels hardly overlap (Dice {after:.3f}): check that they belong to these volumes."
    before, after = scores.get("tre_before_mm"), scores.get("tre_mm")
    grown = scores.get("tre_gained_voxels", TRE_GAINED_VOXELS) >= TRE_GAINED_VOXELS
    if after is not None and before is not None and grown and after > TRE_GAINED * before:
        yield "failed", (f"the landmarks are further apart than before the registration ({before:.2f} mm before, "
                         f"{after:.2f} mm after).")
    if scores.get("labels_lost"):
        yield "doubtful", (f"the warped labels lack structures of the fixed volume: {scores['labels_lost'][:5]}; check "
                           "that the moving labels have them.")

    # How regular the field is
    if level := _level(scores.get("folding_body_percent"), FOLDED_PERCENT):
        yield level, f"the field folds in {scores['folding_body_percent']:.2g} % of the body: raise refine.weight."
    if level := _level(scores.get("stretched_percent"), STRETCHED_PERCENT):
        yield level, ("the deformation changes the local volume more than fivefold in "
                      f"{scores['stretched_percent']:.0f} % of the body: check that the moving volume shows all of "
                      "it, and that both are equally sharp and of one contrast, or raise refine.weight.")
    if level := _level(scores.get("inverse_error_voxels"), INVERSE_ERROR_VOXELS):
        yield level, (f"going there and back misses by {scores['inverse_error_voxels']:.2g} voxels on average: do not "
                      "use the inverse.")


def judge_list(rows):
    """Each row of a list with its verdict and reason; outliers among the rows that are ok become doubtful.

    An outlier is further than OUTLIER times 1.48 median absolute deviations from the median, on the bad side.
    rows: dicts as for `judge`. Returns: new dicts, in the same order.
    """
    rows = [{**row, **dict(zip(("verdict", "reason"), judge(row)))} for row in rows]
    for key, word, bad in (("similarity", "similarity", -1), ("dice", "Dice", -1), ("tre_mm", "landmark error", 1)):
        middle, spread, count = spread_of(key, rows)
        for row in rows:
            if row["verdict"] == "ok" and count and row.get(key) is not None and (
                    bad * (row[key] - middle) > OUTLIER * spread):
                row["verdict"] = "doubtful"
                row["reason"] = (f"its {word} of {row[key]:.3g} is an outlier among {count} pairs, half of which are "
                                 f"{('below' if bad > 0 else 'above')} {middle:.3g}.")
    return rows


def spread_of(key, rows):
    """Median and robust standard deviation of a number, and how many rows have it; zeros if fewer than LEAST_LIST."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if len(values) < LEAST_LIST:
        return 0.0, 0.0, 0
    middle = statistics.median(values)
    spread = 1.48 * statistics.median(abs(value - middle) for value in values)
    return middle, max(spread, LEAST_SPREAD * abs(middle)), len(values)
