"""Tables and pages of results: the one module that writes HTML. A page is one file and works offline."""
import base64
import io
import platform
from datetime import datetime
from html import escape
from pathlib import Path

import numpy as np
import torch

from Runtime.errors import InputError
from Runtime.files import write_file
from Runtime.provenance import git

NUMBER = (int, float, np.number)
SCREEN_DPI, FILE_DPI = 92, 150

STYLE = (Path(__file__).parent / "report.css").read_text()


def figure_png(figure):
    """The figure as the bytes of a PNG file on white."""
    buffer = io.BytesIO()
    # Without `metadata`, matplotlib writes the address of its home page into the file.
    figure.savefig(buffer, format="png", backend="agg", dpi=FILE_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def figure_html(figure, caption="", alt=""):
    """The figure as a <figure> with the picture inside; it scrolls in its box where the window is narrow."""
    data = base64.b64encode(figure_png(figure)).decode()
    width = round(figure.get_figwidth() * SCREEN_DPI)
    return (f'<figure><div class="wide"><img src="data:image/png;base64,{data}" alt="{escape(alt or caption)}" '
            f'width="{width}" style="min-width: {round(0.65 * width)}px"></div>\n'
            f"<figcaption>{escape(caption)}</figcaption></figure>\n")


def table_html(header, rows, caption="", formats=None):
    """HTML table; numbers to the right, None and NaN as "-", every text escaped.

    header: column names. rows: lists of cells. formats: one format such as ".3f" or None per column, used for numbers.
    Raises InputError if a row or `formats` has not one entry per column.
    """
    lines, right = _cells(header, rows, formats)
    for number, (cells, sides) in enumerate(zip(lines, right)):
        tag = "td" if number else "th"
        cells = [f"<{tag}{' class=num' * side}>{escape(cell)}</{tag}>" for cell, side in zip(cells, sides)]
        lines[number] = f"<tr>{''.join(cells)}</tr>\n"
    return (f'<div class="wide"><table><caption>{escape(caption)}</caption>\n<thead>\n{lines[0]}</thead>\n'
            f"<tbody>\n{''.join(lines[1:])}</tbody></table></div>\n")


def text_table(header, rows, formats=None):
    """The table of `table_html` as aligned plain text for a terminal, without a newline at the end."""
    lines, right = _cells(header, rows, formats)
    widths = [max(map(len, column)) for column in zip(*lines)]
    for number, (cells, sides) in enumerate(zip(lines, right)):
        cells = [cell.rjust(width) if side else cell.ljust(width) for cell, width, side in zip(cells, widths, sides)]
        lines[number] = "  ".join(cells).rstrip()
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def cards_html(cards):
    """Headline figures as large numbers, for the top of a page. cards: list of (label, value, note or "")."""
    parts = [f'<div class="card"><span>{escape(str(label))}</span><strong>{escape(_text(value))}</strong>'
             f"<span>{escape(str(note or ''))}</span></div>\n" for label, value, note in cards]
    return f'<div class="cards">\n{"".join(parts)}</div>\n'


def write_page(path, title, lead, sections):
    """Write a complete page that needs no other file and no network. A reader never sees half of it.

    path: the .html file; its folder is created. title, lead: plain text. sections: list of (heading, html), where the
    html comes from the functions above; an empty heading is left out.
    Returns: path as a Path.
    """
    path = Path(path)
    body = "".join(f"<section>\n{f'<h2>{escape(heading)}</h2>' if heading else ''}\n{html}</section>\n"
                   for heading, html in sections)
    # The policy keeps the page from asking the network for anything, whatever a section contains.
    page = f"""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title><link rel="icon" href="data:,">
<style>{STYLE}</style></head>
<body><main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}</main>
<footer><p>{escape(_origin())}</p></footer></body></html>
"""
    # File names that are not UTF-8 reach us as lone surrogates, which cannot be encoded.
    write_file(path, page.encode(errors="replace"))
    return path


def _origin():
    commit = git("rev-parse", "--short", "HEAD")
    commit = [f"commit {commit.strip()}"] if commit else []
    return " \u00b7 ".join([f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}", *commit,
                            f"Python {platform.python_version()}", f"PyTorch {torch.__version__}", platform.node()])


def _text(value, form=None):
    if value is None or value != value:
        return "-"
    default = "" if isinstance(value, (int, np.integer)) else ".4g"
    return format(value, form or default) if isinstance(value, NUMBER) else str(value)


def _cells(header, rows, formats):
    """The lines of the table as texts, header first, and for each cell whether it stands on the right."""
    formats, rows = list(formats or [None] * len(header)), [list(row) for row in rows]
    for row in [formats, *rows]:
        if len(row) != len(header):
            raise InputError(f"A table of {len(header)} columns cannot hold {row}; give one entry per column.")
    present = [[row[i] for row in rows if row[i] is not None] for i in range(len(header))]
    numeric = [bool(column) and all(isinstance(cell, NUMBER) for cell in column) for column in present]
    texts = [[" ".join(_text(cell, form).split()) for cell, form in zip(row, formats)] for row in rows]
    right = [[isinstance(cell, NUMBER) or (cell is None and side) for cell, side in zip(row, numeric)] for row in rows]
    return [[str(name) for name in header], *texts], [numeric, *right]
