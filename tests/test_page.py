"""Pages are complete, escaped and offline."""
import base64
import re
from html.parser import HTMLParser
from importlib.metadata import version

import numpy as np
import pytest

from Diffusion.figures import gallery_figure, registration_figure
from Report.page import cards_html, figure_html, figure_png, markdown_table, table_html, text_table, write_page
from Runtime.errors import InputError
from tests.test_figures import pair, pixels

VOID = {"meta", "link", "img", "br", "hr", "input"}
NASTY = '<script>alert("1 & 2")</script>'


class Balance(HTMLParser):
    """Follows the tags of a page and fails on the first that does not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.attributes = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_cell_may_be_a_link_and_everything_is_escaped():
    html = table_html(["file", "what"], [[("a&b", "x y/<b>.html"), "c"]])
    assert '<td><a href="x%20y/%3Cb%3E.html">a&amp;b</a></td><td>c</td>' in html
    assert text_table(["file", "what"], [[("a&b", "x.html"), "c"]]).splitlines()[-1].split() == ["a&b", "c"]


def test_figure_html_holds_the_picture_and_escapes_its_texts():
    figure = gallery_figure([("a", np.eye(8), np.eye(8), None, np.eye(4))])
    html = figure_html(figure, caption=NASTY, alt='a "quoted" curve')
    page = Balance(html)
    attributes = dict(page.attributes)["img"]
    assert attributes["alt"] == 'a "quoted" curve'
    picture = pixels(base64.b64decode(attributes["src"].removeprefix("data:image/png;base64,")))
    assert picture.shape == pixels(figure_png(figure)).shape and picture.std() > 5
    assert "<script" not in html and NASTY in "".join(page.text)


def test_table_html_aligns_numbers_and_escapes_texts():
    html = table_html(["name", "Dice", NASTY], [[NASTY, 0.81249, 3], ["b", float("nan"), None]], caption=NASTY,
                      formats=[None, ".3f", None])
    page = Balance(html)
    assert "<script" not in html and "".join(page.text).count(NASTY) == 3
    cells = [(tag, attributes.get("class")) for tag, attributes in page.attributes if tag in ("td", "th")]
    assert cells == [("th", None), ("th", "num"), ("th", "num")] + [("td", None), ("td", "num"), ("td", "num")] * 2
    assert re.findall(r"<td class=num>([^<]*)</td>", html) == ["0.812", "3", "-", "-"]


def test_table_cells_of_other_kinds():
    rows = [[np.float32(0.5), np.int64(7), "x", None], [np.float64("nan"), 12345678, None, None]]
    html = table_html("abcd", rows)
    assert re.findall(r"<td[^>]*>([^<]*)<", html) == ["0.5", "7", "x", "-", "-", "12345678", "-", "-"]
    for bad in (dict(rows=[[1]]), dict(rows=[], formats=[".3f"])):
        with pytest.raises(InputError, match="columns"):
            table_html(["a", "b"], **bad)


def test_text_table_is_aligned():
    text = text_table(["name", "Dice", "n"], [["left lobe", 0.81249, 3], ["b", None, 1200], ["c", float("nan"), 1]],
                      formats=[None, ".3f", None])
    assert text.splitlines() == ["name        Dice     n",
                                 "---------  -----  ----",
                                 "left lobe  0.812     3",
                                 "b              -  1200",
                                 "c              -     1"]
    assert text_table(["a", "b"], []) == "a  b\n-  -"


def test_a_bar_in_a_cell_does_not_split_a_markdown_table():
    assert markdown_table(["key", "run|1"], [["pattern", "^(a|b)/"]]).splitlines() == [
        r"| key | run\|1 |", "| --- | --- |", r"| pattern | ^(a\|b)/ |"]


def test_page_is_complete_offline_and_escaped(tmp_path):
    moving, fixed, warped, field, labels = pair((16, 20, 24))
    sections = [("", cards_html([("mean Dice", 0.84371, "30 pairs"), (NASTY, None, ""), ("folded", NASTY, NASTY)])),
                (NASTY, figure_html(registration_figure(moving, fixed, warped, field, labels), "one pair")),
                ("Scores", table_html(["name", "Dice"], [["a", 0.5]]))]
    path = write_page(tmp_path / "new" / "page.html", NASTY, f"Lead {NASTY}", sections)
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    text = path.read_text(encoding="utf-8")
    page = Balance(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.tags.count("h1") == 1 and page.tags.count("h2") == 2 and page.tags.count("img") == 1
    assert "script" not in page.tags
    assert not re.search(r"https?://|url\(|@import", text)
    links = [value for _, attributes in page.attributes for name, value in attributes.items()
             if name in ("src", "href", "srcset", "action", "data")]
    assert len(links) == 2 and all(link.startswith("data:") for link in links)
    shown = "".join(page.text)
    assert f"Lead {NASTY}" in shown and "0.8437" in shown and f"PyTorch {version('torch')}" in shown
    assert shown.count(NASTY) == 7


def test_page_replaces_the_old_one_and_survives_odd_characters(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    with open(path) as reader:
        write_page(path, "M\u00fcller \udce9", "", [("a", "<p>new</p>")])
        assert reader.read() == "old"
    assert "M\u00fcller ?" in path.read_text(encoding="utf-8")
