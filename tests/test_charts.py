"""Charts: what is drawn is what was given, however long the curve."""
import numpy as np
import pytest

from Report.charts import LEFT, POINTS, TOP, line_chart, merge_marks, number, spark, stacked_chart, thin, ticks
from tests.test_page import NASTY, Balance


def points(html, tag="polyline"):
    """[(x, y)] of the curves of a chart."""
    page = Balance(html)
    return [[tuple(map(float, pair.split(","))) for pair in attributes["points"].split()]
            for name, attributes in page.attributes if name == tag]


def test_a_short_curve_is_left_as_it_is():
    x, mean, least, greatest = thin([0, 1, 2, 3], [1.0, np.nan, 3.0, 5.0])
    assert x.tolist() == [0, 2, 3] and mean.tolist() == [1, 3, 5] == least.tolist() == greatest.tolist()


def test_a_spike_of_one_step_in_a_hundred_thousand_is_still_seen():
    y = np.zeros(100_000)
    y[54_321] = 7.0
    x, mean, least, greatest = thin(np.arange(100_000), y)
    assert len(x) <= 310 and greatest.max() == 7 and least.max() == 0
    assert abs(x[greatest.argmax()] - 54_321) < 400
    assert mean.max() == pytest.approx(7 / 323, rel=0.05)
    page = line_chart("loss", [("loss", np.arange(100_000), y)], [(5, "dead", "early"), (99_990, "dead", "late")])
    assert len(page) < 30_000 and "<polygon" in page
    assert "early" in page and "late" in page and ">0</text>" in page, "all steps are on the axis"


def test_the_mean_of_a_thinned_curve_is_that_of_its_values():
    y = np.random.default_rng(0).normal(size=5000)
    x, mean, least, greatest = thin(np.arange(5000), y, 100)
    assert np.average(mean) == pytest.approx(y.mean(), abs=0.01)
    assert (least <= mean).all() and (mean <= greatest).all() and (np.diff(x) > 0).all()


def test_a_line_goes_up_where_the_values_do():
    [line] = points(line_chart("loss", [("loss", [0, 1, 2], [1.0, 2.0, 4.0])]))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2 and y0 > y1 > y2  # pixels count from the top
    assert (y1 - y2) / (y0 - y1) == pytest.approx(2, rel=0.02) and (x2 - x1) == pytest.approx(x1 - x0, abs=0.2)


def test_a_loss_that_becomes_nan_ends_before_the_axis():
    """Else it looks as if it had fallen until the last step."""
    [line] = points(line_chart("loss", [("loss", np.arange(401), np.r_[np.linspace(1, 0, 301), np.full(100, np.nan)])]))
    assert line[0][0] == LEFT and line[-1][0] == pytest.approx(LEFT + 0.75 * POINTS, abs=2)


def test_steps_without_a_mode_break_its_curve():
    y = np.linspace(1, 0, 401)
    y[[50, 52, 390]], y[100:301] = np.nan, np.nan
    first, second = points(line_chart("loss", [("loss", np.arange(401), y)]))
    assert first[-1][0] == pytest.approx(LEFT + 0.25 * POINTS, abs=2)
    assert second[0][0] == pytest.approx(LEFT + 0.75 * POINTS, abs=2)


def test_one_spike_does_not_flatten_a_curve_and_is_told():
    y = np.cos(np.arange(5000) / 100)
    chart = line_chart("loss", [("loss", np.arange(5000), np.r_[y[:40], 1e9, y[41:]])], note="mode 1")
    [line] = points(chart)
    assert "mode 1; off the axis: as far as 1G" in chart
    assert np.ptp([height for _, height in line[5:]]) > 15 and line[2][1] == TOP
    y[-1:] = 1e9  # what a curve ends with is no spike
    assert "off the axis" not in line_chart("memory", [("memory", np.arange(5000), y)])


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm():
    counted = np.r_[np.zeros(19_970), 1:31]
    assert f"<span>{number(30.0)}</span>" in line_chart("all", [("all", np.arange(20_000), counted)]), "not a mean"
    [line] = points(line_chart("norm", [("norm", [0, 1, 2, 3], [0.0, 1.0, 10.0, 100.0])], log=True))
    assert len(line) == 3
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def test_texts_are_escaped_and_one_curve_shows_its_last_value():
    page = line_chart(NASTY, [(NASTY, [0, 1], [1.0, 2.5]), ("b", [0, 1], [1, 1])], [(1, "dead", NASTY)], note=NASTY)
    assert "<script" not in page and "".join(Balance(page).text).count(NASTY) == 4
    assert ">2.5<" in line_chart("a", [("a", [0, 1], [1.0, 2.5])])


def test_a_curve_keeps_its_colour_where_another_one_has_no_values():
    page = line_chart("val", [("a", [0, 1], [np.nan, np.nan]), ("b", [0, 1], [1, 2])])
    assert 'class="line c1"' in page and 'class="key c1">b<' in page and "c0" not in page


def test_marks_on_the_same_pixels_become_one():
    box = {"first": 0, "last": 100_000}
    marks = merge_marks(box, [(5, "planned", "a"), (6, "dead", "b"), (50_000, "planned", "c"), (200_000, "dead", "d")])
    assert [(kind, text) for _, kind, text in marks] == [("dead", "a; b"), ("planned", "c")]


def test_a_curve_without_values_says_so():
    nothing = line_chart("val_dice", [("val_dice", [0, 1], [np.nan, np.nan])])
    assert "<svg" not in nothing and "no values yet" in nothing
    assert "no values yet" in stacked_chart("time", [0, 1], [])
    assert "<circle" in line_chart("one", [("one", [3], [4.0])])
    folding = line_chart("constant", [("constant", [0, 1, 2], [0.0, 0.0, 0.0])])
    Balance(folding)
    assert ">1</text>" in folding and ">-" not in folding, "nothing folds in less than 0 %"


def test_columns_fill_the_shares_of_their_kinds():
    page = stacked_chart("time", [0, 3600, 7200], [("good", "k0", [3.0, 0.0]), ("bad", "k6", [1.0, 0.0])])
    paths = [attributes["d"] for _, attributes in Balance(page).attributes if "fill" in attributes.get("class", "")]
    heights = []
    for path in paths:
        low, high = path.split("V")[0].split()[1], path.split("V")[1].split("H")[0]
        heights.append(float(low) - float(high))
    assert heights[0] / heights[1] == pytest.approx(3, rel=0.01) and path.count("M") == 1


def test_ticks_and_numbers_are_round():
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0] and ticks(0.0, 99_999, 3) == [0, 50_000]
    assert ticks(120, 288, 3) == [150, 200, 250], "one number shows no scale"
    assert [number(value) for value in (0, 0.00012345, 3e-9, 1234, 25_000, 2.5e6, None, float("nan"))] == [
        "0", "1.23e-4", "3e-9", "1234", "25k", "2.5M", "-", "-"]
    page = line_chart("close", [("close", [0, 1], [0.9321, 0.9325])])
    labels = [text for text in Balance(page).text if text.startswith("0.93")]
    assert len(set(labels)) == len(labels) >= 3


def test_a_curve_for_a_terminal():
    assert spark([0, 1, 2, 3]) == "\u2581\u2583\u2586\u2588" and spark([]) == "" and len(spark(np.arange(999))) == 40
