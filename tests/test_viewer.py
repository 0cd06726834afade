"""The viewer of the reports: what is packed, what stands in the page, and what a person does in a real browser."""
import base64
import hashlib
import io
import json
import re
import time
import zlib

import numpy as np
import pytest
from nibabel import orientations
from PIL import Image

import OM_register
from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject, random_field
from Inference.pair_figures import read_pair
from Inference.viewer import LEVELS, NO_NODE, PAGE_BYTES, coarser, viewer_html
from Report.charts import line_chart
from Report.page import VIEWER_SCRIPT, table_html, write_page
from tests.browser import CHROMIUM, browser
from tests.test_nifti import make_affine
from tests.test_page import NASTY, Balance

SHAPE = (14, 18, 11)
RAS = np.diag([1.0, 2.0, 3.0, 1.0])


def content_of(html):
    """What the script of the page reads."""
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    return json.loads(text)


def unpacked(text, shape, kind=np.uint8):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind).reshape(shape)


def volumes(shape, seed=0):
    """Two images, their labels and a smooth field between them."""
    fixed, after = make_subject(seed, shape, dims=len(shape)), make_subject(seed + 1, shape, dims=len(shape))
    images = {"fixed": fixed["image"], "before": 1.2 * after["image"] - 0.1, "after": after["image"]}
    images = {word: np.clip(image, 0, 1) for word, image in images.items()}
    labels = {"fixed": fixed["label"], "before": after["label"], "after": after["label"]}
    return images, random_field(seed, shape, dims=len(shape)), labels


@pytest.fixture(scope="module")
def scan():
    return volumes(SHAPE)


# ---------------------------------------------------------------------------------------------------------------------
# What is packed
# ---------------------------------------------------------------------------------------------------------------------

def test_axes_run_to_the_left_to_the_back_and_to_the_feet(scan):
    images, field, labels = scan
    content = content_of(viewer_html("a", images, field, RAS, labels))
    assert content["shape"] == list(SHAPE) and content["spacing"] == [1, 2, 3] and content["fixed"] == "fixed"
    for word, image in images.items():
        np.testing.assert_array_equal(unpacked(content["images"][word], SHAPE), np.rint(255 * image[::-1, ::-1, ::-1]))
        label = labels[word][::-1, ::-1, ::-1]
        shown = unpacked(content["labels"][word], SHAPE)
        assert np.array_equal(shown == 0, label == 0) and len(np.unique(shown)) == len(np.unique(label))
    grid = content["grid"]
    moved = grid["unit"] * unpacked(grid["moved"], (3, *grid["shape"]), "<i2")
    assert grid["step"] == [2, 1, 1] and grid["shape"][1:] == list(SHAPE[1:]), "54 mm in some 24 lines"
    np.testing.assert_allclose(moved, -field[:, ::-1, ::-1, ::-1][:, grid["start"][0]::2], atol=0.006)


@pytest.mark.parametrize("axes, signs", [((1, 2, 0), (1, -1, 1)), ((0, 2, 1), (-1, -1, -1))])
def test_however_a_file_stores_them_the_same_is_shown(scan, axes, signs):
    images, field, labels = scan
    turn = np.stack([np.argsort(axes), np.array(signs)[np.argsort(axes)]], axis=1)

    def stored(volume):
        return orientations.apply_orientation(volume, turn)

    affine = RAS @ orientations.inv_ornt_aff(turn, SHAPE)
    parts = [signs[k] * stored(field[axes[k]]) for k in range(3)]
    ours = viewer_html("a", {word: stored(image) for word, image in images.items()}, np.stack(parts), affine,
                       {word: stored(label) for word, label in labels.items()})
    theirs, ours = content_of(viewer_html("a", images, field, RAS, labels)), content_of(ours)
    assert {**ours, "determinant": 0} == {**theirs, "determinant": 0}
    codes = [unpacked(content["determinant"], SHAPE).astype(int) for content in (ours, theirs)]
    assert np.abs(codes[0] - codes[1]).max() <= 1, "but for the order of a sum"


def test_a_picture_is_shown_as_the_figures_show_it():
    images, field, _ = volumes((20, 24))
    html = viewer_html("a", images, field, make_affine((1, 0, 2), (-1, 1, 1), (1, 2, 1), (0, 0, 0)))
    content = content_of(html)
    assert content["shape"] == [20, 24, 1] and content["labels"] == {}
    shown = unpacked(content["images"]["fixed"], (20, 24))
    np.testing.assert_array_equal(shown, np.rint(255 * images["fixed"][:, ::-1]))
    moved = unpacked(content["grid"]["moved"], (2, 10, 24), "<i2") / 100
    np.testing.assert_allclose(moved, (field * [[[1]], [[-1]]])[:, ::2, ::-1], atol=0.006)
    assert "axial" not in html and "slices</kbd>" not in html and "patient" not in html and "labels<kbd>" not in html


def test_a_folded_voxel_is_marked_also_where_others_hide_it():
    shape = (24, 24, 24)
    field = np.zeros((3, *shape), np.float32)
    field[0, 11, 5, 6] = -4.0  # voxel 10 folds
    images = dict.fromkeys(("fixed", "after"), np.random.default_rng(0).random(shape))
    for budget in (PAGE_BYTES, 10_000):
        content = content_of(viewer_html("a", images, field, np.eye(4), budget=budget))
        size = content["shape"][0]
        codes = unpacked(content["determinant"], content["shape"])
        folded = np.argwhere(codes == 0).tolist()
        assert [place * size // 24 for place in (13, 18, 17)] in folded and 0 < codes.max() <= LEVELS
        assert size == 24 and len(folded) == 1 if budget == PAGE_BYTES else size < 16 and len(folded) <= 8
    field[2, 3] = np.nan
    assert LEVELS + 1 in unpacked(content_of(viewer_html("a", images, field, np.eye(4)))["determinant"], shape)


@pytest.mark.parametrize("spacing", [(1, 1, 1), (0.5, 0.5, 4)])
def test_large_volumes_become_coarser_until_they_fit_and_it_is_said(spacing):
    shape, rng = (64, 64, 16), np.random.default_rng(0)
    images = {word: rng.random(shape).astype(np.float32) for word in ("fixed", "before", "after")}
    html = viewer_html("a", images, np.zeros((3, *shape), np.float32), np.diag([*spacing, 1]), budget=100_000)
    content = content_of(html)
    assert 70_000 < len(json.dumps(content)) <= 100_000
    size, sides = content["shape"], np.multiply(content["shape"], content["spacing"])
    assert sides == pytest.approx(np.multiply(shape, spacing)), "the extent stays"
    assert size[2] == (16 if spacing[2] == 4 else size[0] // 4)
    shown = " \u00d7 ".join(map(str, size))
    assert f"Shown are {shown} voxels, averages of the 64 \u00d7 64 \u00d7 16: this viewer may take 0.1 MB" in html


@pytest.mark.parametrize("words", [{}, {"without_affine": True}, {"body": np.ones(SHAPE, bool)}])
def test_a_legend_says_whether_the_grid_is_that_of_the_whole_field(scan, words):
    images, field, _ = scan
    said = "x + field(x), without the affine part." if words else "x + field(x)."
    assert f"where the points of a regular one come from, {said}" in viewer_html("a", images, field, RAS, **words)


def test_the_grid_ends_where_the_body_does(scan):
    images, field, _ = scan
    body = np.zeros(SHAPE, bool)
    body[4:10] = True
    content = content_of(viewer_html("a", images, field, RAS, body=body))
    moved = unpacked(content["grid"]["moved"], (3, *content["grid"]["shape"]), "<i2")
    inside = body[::-1][content["grid"]["start"][0]::content["grid"]["step"][0], 0, 0]
    assert inside.any() and not inside.all()
    assert np.array_equal((moved != NO_NODE).all((0, 2, 3)), inside)
    assert np.array_equal((moved == NO_NODE).all((0, 2, 3)), ~inside)
    assert f"NO_NODE = {NO_NODE};" in VIEWER_SCRIPT, "both know the same number"


def test_the_short_sides_of_voxels_grow_first():
    assert coarser((100, 100, 20), (1, 1, 5), 200_000) == (100, 100, 20)
    assert coarser((100, 100, 20), (1, 1, 5), 60_000)[2] == 20
    assert coarser((300, 2, 2), (1, 1, 1), 0) == (1, 1, 1)
    assert max(np.divide((512, 512, 40), coarser((512, 512, 40), (0.4, 0.4, 2), 1_000_000))) < 3.6


# ---------------------------------------------------------------------------------------------------------------------
# What stands in the page
# ---------------------------------------------------------------------------------------------------------------------

def test_three_pairs_of_the_worst_kind_are_small():
    shape, rng = (36, 50, 36), np.random.default_rng(0)
    images = {word: rng.random(shape) for word in ("fixed", "before", "after")}
    labels = {word: rng.integers(0, 3, shape) for word in images}
    field = rng.normal(size=(3, *shape)).astype(np.float32)
    html = viewer_html("a", images, field, np.eye(4), labels, PAGE_BYTES // 3)
    assert len(html) < 700_000 and "All 36 \u00d7 50 \u00d7 36 voxels are shown." in html


def test_a_page_runs_the_script_of_the_viewers_and_no_other(scan, tmp_path):
    images, field, labels = scan
    words = {"fixed": NASTY, "before": "b", "after": "a"}
    html = viewer_html(NASTY, {words[word]: image for word, image in images.items()}, field, RAS,
                       {words[word]: label for word, label in labels.items()})
    page = write_page(tmp_path / "page.html", "a", "", [("", html), ("", html)], viewer=True)
    text = page.read_text(encoding="utf-8")
    page = Balance(text)
    scripts = [dict(attributes) for tag, attributes in page.attributes if tag == "script"]
    assert scripts == [{"type": "application/json"}] * 2 + [{}]
    [script] = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [attributes["content"] for _, attributes in page.attributes if "http-equiv" in attributes]
    assert script == VIEWER_SCRIPT and policy == ("default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
                                                  f"script-src 'sha256-{digest}'")
    assert not re.search(r"https?://|url\(|@import|innerHTML|eval\(", text)
    plain = write_page(tmp_path / "plain.html", "a", "", [("", "<p>a</p>")]).read_text(encoding="utf-8")
    assert "script" not in plain.lower() and ".viewer" not in plain


def test_every_control_has_a_name_and_a_key_of_its_own(scan):
    images, field, labels = scan
    page = Balance(viewer_html("one pair", images, field, RAS, labels))
    buttons = [attributes for tag, attributes in page.attributes if tag == "button"]
    keys = [attributes["aria-keyshortcuts"] for attributes in buttons]
    assert len(keys) == len(set(keys)) == 14 and not {" ", "ArrowUp"} & set(keys)
    assert all(attributes["type"] == "button" and "aria-pressed" in attributes for attributes in buttons)
    stage = next(attributes for _, attributes in page.attributes if attributes.get("class") == "stage")
    assert stage["aria-label"].startswith("one pair") and stage["tabindex"] == "0"
    assert [attributes for tag, attributes in page.attributes if tag == "div"][0] == {"class": "viewer", "hidden": None}


# ---------------------------------------------------------------------------------------------------------------------
# In a browser
# ---------------------------------------------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a registration of two made-up subjects, one stored in another orientation."""
    folder = tmp_path_factory.mktemp("viewed")
    affine = make_affine((2, 0, 1), (1, -1, -1), (1.0, 1.5, 1.2), (3, -4, 5))
    for seed, name in enumerate("FM"):
        subject = make_subject(seed, (26, 30, 22))
        write_volume(folder / f"{name}.nii.gz", subject["image"], affine)
        write_volume(folder / f"{name}_label.nii.gz", subject["label"].astype(np.uint8), affine)
    words = ["--fixed", "F.nii.gz", "--moving", "M.nii.gz", "--fixed-label", "F_label.nii.gz", "--moving-label",
             "M_label.nii.gz", "--affine", "none", "--refine", "5", "--out", "out", "--device", "cpu"]
    words = [str(folder / word) if word.endswith(".gz") or word == "out" else word for word in words]
    assert OM_register.main(words) == 0
    return folder / "out/report.html"


def opened(tab, page):
    tab.open(page)
    tab.wait_for("!document.querySelector('.viewer').hidden")


def picture(tab):
    """The canvas, (rows, columns, 3), after the frame that is due."""
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    shown = tab.ask(f"{frames}.then(() => document.querySelector('.stage canvas').toDataURL())")
    data = base64.b64decode(shown.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def words(tab):
    """What a screen reader says of the picture."""
    return tab.ask("document.querySelector('.stage').getAttribute('aria-valuetext')")


def divider(tab):
    return int(tab.ask("document.querySelector('.stage').getAttribute('aria-valuenow')"))


def slice_shown(tab, size, sides):
    """The slice on the canvas with one pixel for each voxel, (rows, columns). size: columns, rows. sides: their mm."""
    shown = Image.fromarray(picture(tab).astype(np.uint8)).convert("L")
    extent = np.multiply(size, sides)
    width, height = np.rint(np.min(np.divide(shown.size, extent)) * extent).astype(int)
    left, top = (shown.width - width) // 2, (shown.height - height) // 2
    return np.asarray(shown.resize(size, Image.Resampling.BOX, (left, top, left + width, top + height)))


@pytest.mark.slow
@needs_chromium
def test_slices_planes_and_volumes_are_those_of_the_files(report, tmp_path):
    [row] = json.loads((report.parent / "results.json").read_text())["pairs"]
    pair = read_pair({**row, "folder": report.parent}, 3)
    turn = orientations.ornt_transform(orientations.io_orientation(pair["affine"]),
                                       orientations.axcodes2ornt(("L", "P", "I")))
    images = {word: orientations.apply_orientation(image, turn) for word, image in pair["images"].items()}
    shape, spacing = images["fixed"].shape, (1.5, 1.2, 1.0)
    with browser(tmp_path) as tab:
        opened(tab, report)
        tab.click(".stage")
        tab.press("l")
        for key, plane, axis in (("2", "coronal", 1), ("3", "sagittal", 0), ("1", "axial", 2)):
            tab.press(key)
            tab.press("ArrowUp")
            tab.press("ArrowUp")
            at, sides = shape[axis] // 2 + 2, np.delete(spacing, axis)
            for key, word in (("x", "fixed"), ("m", "after"), ("b", "before"), ("a", "after")):
                tab.press(key)
                expected = 255 * images[word].take(at, axis).T
                shown = slice_shown(tab, expected.T.shape, sides)
                assert words(tab).startswith(f"{plane} slice {at + 1} of {shape[axis]}, ") and word in words(tab)
                assert np.abs(shown - expected).mean() < 6 < np.abs(shown[:, ::-1] - expected).mean(), (plane, word)
        assert tab.complaints == [] and tab.requests == []


@pytest.mark.slow
@needs_chromium
def test_slider_keys_buttons_and_divider_change_the_picture(report, tmp_path):
    with browser(tmp_path, width=1280, height=1000) as tab:
        opened(tab, report)
        assert divider(tab) == 50 and "axial slice" in words(tab)
        seen = [picture(tab)]

        def is_new():
            seen.append(picture(tab))
            return all(other.shape != seen[-1].shape or (other != seen[-1]).any() for other in seen[:-1])

        before = words(tab)
        tab.drag("input[type=range]", (0.5, 0.5), (0.8, 0.5))
        assert words(tab) != before and is_new()
        number = int(words(tab).split()[2])
        tab.press("ArrowRight")  # of the slider itself
        assert int(words(tab).split()[2]) == number + 1 and is_new()
        tab.click(".stage")
        for key in "2cegjld":
            tab.press(key)
            assert is_new(), key
        assert tab.ask("[...document.querySelectorAll('[aria-pressed=true]')].map(each => each.textContent)") == [
            "coronal2", "aftera", "dividerd", "gridg", "Jacobianj"]
        tab.press(" ")
        assert words(tab).endswith("divider: before fixed") and is_new()
        tab.press("ArrowLeft")
        assert divider(tab) == 48 and is_new()
        tab.click("[data-to=difference]")
        assert "difference of before and fixed" in words(tab) and is_new()
        tab.press(" ")  # on a button it presses that button
        assert "difference of before and fixed" in words(tab)
        assert tab.complaints == [] and tab.requests == []


@pytest.mark.slow
@needs_chromium
def test_the_divider_follows_the_mouse_and_shows_one_volume_on_each_side(report, tmp_path):
    with browser(tmp_path) as tab:
        opened(tab, report)
        tab.click(".stage")
        tab.press("l")
        alone = {}
        for key in "xm":
            tab.press(key)
            alone[key] = picture(tab)
        tab.press("d")
        tab.drag(".stage", (0.5, 0.5), (0.4, 0.7))
        assert divider(tab) == 40
        shown, place = picture(tab), round(0.4 * alone["x"].shape[1])
        np.testing.assert_array_equal(shown[:, :place - 2], alone["m"][:, :place - 2])
        right = slice(place + 2, None)  # but for the blurred rim of the image, where both volumes shine through
        assert np.abs(shown[:, right] - alone["x"][:, right]).mean() < 0.01
        assert np.abs(alone["m"][:, right] - alone["x"][:, right]).mean() > 1
        tab.drag(".stage", (0.4, 0.5), (1.3, 0.5))
        assert divider(tab) == 100, "also outside, where it ends"


@pytest.mark.slow
@needs_chromium
def test_on_a_phone_a_finger_moves_the_divider_and_nothing_is_wider_than_it(report, tmp_path):
    with browser(tmp_path, width=390, height=844, touch=True) as tab:
        opened(tab, report)
        assert tab.ask("document.documentElement.scrollWidth") == 390
        tab.swipe(".stage", (0.5, 0.5), (0.25, 0.5))
        tab.wait_for("document.querySelector('.stage').ariaValueNow === '25'")
        low = tab.ask("""[...document.querySelectorAll('button, input')].filter(
            each => each.getBoundingClientRect().height < 36).length""")
        assert low == 0, "fingers need room"
        tab.tap("[data-flip=jacobian]")
        tab.wait_for("document.querySelector('[data-flip=jacobian]').ariaPressed === 'true'")
        assert tab.complaints == [] and tab.requests == []


@pytest.mark.slow
@needs_chromium
def test_what_a_table_says_above_itself_fits_a_phone(tmp_path):
    table = table_html(["pair", *(f"column {number}" for number in range(12))], [["one", *range(12)]], "Words. " * 30)
    page = write_page(tmp_path / "page.html", "Table", "", [("Scores", table)])
    with browser(tmp_path, width=390, height=844, touch=True) as tab:
        tab.open(page)
        for scrolled in (0, 150):
            left, right, table = tab.ask(f"""(() => {{
                document.querySelector(".wide:has(table)").scrollLeft = {scrolled};
                const box = document.querySelector("caption span").getBoundingClientRect();
                return [box.left, box.right, document.querySelector("table").offsetWidth]; }})()""")
            assert table > 390 and 0 < left < right <= 390, "the table is wider than the screen, its caption is not"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_it_flickers_by_itself_only_where_that_is_welcome(report, tmp_path, motion):
    with browser(tmp_path, features=[("prefers-reduced-motion", motion)]) as tab:
        opened(tab, report)
        tab.click(".stage")
        tab.press("f")
        tab.ask("""window.seen = []; new MutationObserver(() => seen.push(1)).observe(
            document.querySelector('.tag.left'), { childList: true }); 0""")
        if motion == "no-preference":
            tab.wait_for("seen.length >= 3")
            return
        time.sleep(1.5)
        assert tab.ask("seen.length") == 0
        before = words(tab)
        tab.press("f")
        assert words(tab) != before, "each press is one change"


@pytest.mark.slow
@needs_chromium
def test_without_scripts_the_figures_are_there_and_the_viewer_is_not(report, tmp_path):
    with browser(tmp_path, scripts=False) as tab:
        tab.open(report)
        assert tab.ask("document.querySelector('.viewer').offsetHeight") == 0
        seen = tab.ask("[...document.images].map(each => each.offsetHeight > 100 && each.naturalWidth > 500)")
        assert seen == [True]


@pytest.mark.slow
@needs_chromium
def test_on_paper_no_picture_is_cut_and_no_button_is_printed(report, tmp_path):
    with browser(tmp_path, width=720) as tab:
        opened(tab, report)
        cut = "[...document.querySelectorAll('figure .wide')].some(each => each.scrollWidth > each.clientWidth)"
        assert tab.ask(cut), "on a screen this narrow it scrolls"
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert not tab.ask(cut)
        assert tab.ask("[...document.querySelectorAll('button, input')].every(each => each.offsetHeight === 0)")
        assert tab.ask("getComputedStyle(document.querySelector('.stage')).printColorAdjust") == "exact"


@pytest.mark.slow
@needs_chromium
def test_on_paper_no_table_is_cut_and_keys_have_their_colours(tmp_path):
    """A table of 26 columns, on a page of A4."""
    table = table_html(["subject", *(f"folding, % {number}" for number in range(25))],
                       [[f"sub-{row:02d}", *np.linspace(0.123, 12.3, 25)] for row in range(3)])
    chart = line_chart("loss", [("a", [0, 1], [1, 2]), ("b", [0, 1], [2, 1])])
    page = write_page(tmp_path / "wide.html", "Wide", "", [("", table + chart)])
    with browser(tmp_path, width=720) as tab:
        tab.open(page)
        cut = "document.documentElement.scrollWidth > 720 || [...document.querySelectorAll('.wide')].some(each => " \
              "each.scrollWidth > each.clientWidth)"
        assert tab.ask(cut), "on a screen this narrow it scrolls"
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert not tab.ask(cut)
        assert tab.ask("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"
        assert tab.ask("getComputedStyle(document.querySelector('.legend')).printColorAdjust") == "exact"
