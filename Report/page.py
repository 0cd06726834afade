"""Tables and pages of results: the only module that writes whole pages. A page is one file and works offline."""
import base64
import hashlib
import importlib.metadata
import io
import platform
from datetime import datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from Runtime.errors import InputError
from Runtime.files import write_file
from Runtime.provenance import git

NUMBER = (int, float, np.number)
SCREEN_DPI, FILE_DPI = 92, 150

STYLE, VIEWER_STYLE, VIEWER_SCRIPT, SORT_SCRIPT = [
    (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name in ("page.css", "viewer.css", "viewer.js", "sort.js")]


def figure_png(figure):
    """A matplotlib figure as the bytes of a PNG file, on white."""
    buffer = io.BytesIO()
    # Without this metadata, matplotlib writes the address of its home page into the file.
    figure.savefig(buffer, format="png", backend="agg", dpi=FILE_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def figure_html(figure, caption="", alt=""):
    """A matplotlib figure as a <figure> that embeds the picture; in a narrow window the picture scrolls."""
    return png_html(figure_png(figure), caption, alt)


def png_html(png, caption="", alt=""):
    """Embed the bytes of `figure_png` as `figure_html` does, without drawing the figure again."""
    data = base64.b64encode(png).decode()
    width = round(int.from_bytes(png[16:20], "big") * SCREEN_DPI / FILE_DPI)  # columns of pixels, from the PNG's header
    return (f'<figure><div class="wide"><img src="data:image/png;base64,{data}" alt="{escape(alt or caption)}" '
            f'width="{width}" style="min-width: {round(0.65 * width)}px"></div>\n'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n")


def table_html(header, rows, caption="", formats=None, explained=None):
    """HTML table: numbers right-aligned, None and NaN as "-", all text escaped.

    header: column names. rows: lists of cells; a cell may be (text, link), the link relative to the page. formats: a
    format for numbers such as ".3f", or None, for each column. explained: {column name: what it means}, on hover.
    Raises InputError if a row or `formats` does not have one entry per column.
    """
    lines, right = _cells(header, rows, formats)
    for number, (texts, sides, cells) in enumerate(zip(lines, right, [header, *rows])):
        tag, html = "td" if number else "th", ""
        for text, side, cell in zip(texts, sides, cells):
            text = escape(text)
            if isinstance(cell, tuple) and cell[1] is not None:  # not all paths are UTF-8
                text = f'<a href="{escape(quote(cell[1], errors="surrogateescape"))}">{text}</a>'
            hint = "" if number else _hint((explained or {}).get(cell))
            html += f"<{tag}{' class=num' * side}{hint}>{text}</{tag}>"
        lines[number] = f"<tr>{html}</tr>\n"
    return (f'<div class="wide"><table><caption><span>{escape(caption)}</span></caption>\n<thead>\n{lines[0]}</thead>\n'
            f"<tbody>\n{''.join(lines[1:])}</tbody></table></div>\n")


def text_table(header, rows, formats=None):
    """The table of `table_html` as aligned plain text, without a newline at the end. Arguments as there."""
    lines, right = _cells(header, rows, formats)
    widths = [max(map(len, column)) for column in zip(*lines)]
    for number, (cells, sides) in enumerate(zip(lines, right)):
        cells = [cell.rjust(width) if side else cell.ljust(width) for cell, width, side in zip(cells, widths, sides)]
        lines[number] = "  ".join(cells).rstrip()
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown_table(header, rows, formats=None):
    """The table of `table_html` as Markdown, without a newline at the end. Arguments as there."""
    head, *lines = [[cell.replace("|", "\\|") for cell in line] for line in _cells(header, rows, formats)[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(header), *lines))


def cards_html(cards, explained=None):
    """HTML of headline results in large type, for the top of a page.

    cards: list of (label, value, note or ""). explained: {label: what it means}, on hover.
    """
    explained = explained or {}
    parts = [f'<div class="card"><span{_hint(explained.get(label))}>{escape(str(label))}</span>'
             f"<strong>{escape(_text(value))}</strong><span>{escape(str(note or ''))}</span></div>\n"
             for label, value, note in cards]
    return f'<div class="cards">\n{"".join(parts)}</div>\n'


def _hint(words):
    """The attribute of an HTML element that shows words on hover; "" without words."""
    return f' title="{escape(words)}"' if words else ""


def findings_html(findings):
    """HTML list of findings, each with a bar in its colour. findings: list of (class of page.css, word, text)."""
    lines = [f'<li class="{kind}"><b>{escape(word)}</b> {escape(text)}</li>\n' for kind, word, text in findings]
    return f'<ul class="findings">\n{"".join(lines)}</ul>\n'


def write_page(path, title, lead, sections, refresh_s=None, viewer=False, sortable=False):
    """Write a complete, self-contained page, atomically; it needs no network.

    path: the .html file; its folder is created. title, lead: plain text. sections: list of (heading, html), with html
    from the functions above; an empty heading is left out. refresh_s: seconds after which a browser reloads the page;
    None: never. viewer: whether sections hold viewers (Inference/viewer.py), which need a script. sortable: whether a
    click on a column heading sorts the rows of a table, which needs another script.
    Returns: path as a Path.
    """
    path = Path(path)
    body = "".join(f"<section>\n{f'<h2>{escape(heading)}</h2>' if heading else ''}\n{html}</section>\n"
                   for heading, html in sections)
    refresh = f'<meta http-equiv="refresh" content="{refresh_s:.0f}">\n' if refresh_s else ""
    # Whatever a section contains, the policy keeps the page from loading anything over the network and from running
    # scripts other than these two.
    style, policy = STYLE + VIEWER_STYLE * viewer, "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    scripts = [VIEWER_SCRIPT] * viewer + [SORT_SCRIPT] * sortable
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    policy += "; script-src " * bool(scripts) + " ".join(f"'sha256-{digest}'" for digest in digests)
    script = "".join(f"<script>{text}</script>\n" for text in scripts)
    commit = git("rev-parse", "--short", "HEAD")
    footer = " \u00b7 ".join([
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}", *([f"commit {commit.strip()}"] if commit else []),
        f"Python {platform.python_version()}", f"PyTorch {importlib.metadata.version('torch')}", platform.node()])
    page = f"""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{refresh}<title>{escape(title)}</title><link rel="icon" href="data:,">
<style>{style}</style></head>
<body><main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}</main>
<footer><p>{escape(footer)}</p></footer>
{script}</body></html>
"""
    # A file name that is not UTF-8 holds lone surrogates, which cannot be encoded.
    write_file(path, page.encode(errors="replace"))
    return path


def _text(value, form=None):
    """A cell as text. form: format for numbers; None shows integers whole and others with four digits."""
    if value is None or value != value:
        return "-"
    if isinstance(value, tuple):
        value = value[0]
    default = "" if isinstance(value, (int, np.integer)) else ".4g"
    return format(value, form or default) if isinstance(value, NUMBER) else str(value)


def _cells(header, rows, formats):
    """(lines of texts, lines of flags whether a cell is right-aligned); the header is the first line of both."""
    formats = list(formats or [None] * len(header))
    rows = [list(row) for row in rows]
    for row in [formats, *rows]:
        if len(row) != len(header):
            raise InputError(f"A table of {len(header)} columns cannot hold {row}; give one entry per column.")
    numeric = []  # for each column, whether all cells except None are numbers
    for index in range(len(header)):
        column = [row[index] for row in rows if row[index] is not None]
        numeric.append(bool(column) and all(isinstance(cell, NUMBER) for cell in column))
    texts, right = [[str(name) for name in header]], [numeric]
    for row in rows:
        texts.append([" ".join(_text(cell, form).split()) for cell, form in zip(row, formats)])
        right.append([isinstance(cell, NUMBER) or (cell is None and side) for cell, side in zip(row, numeric)])
    return texts, right
