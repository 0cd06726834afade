"""A hook of mkdocs: the page on configuration gets a table of all keys, from Config/config_om.yaml as it is."""
import html
import re
from pathlib import Path

import yaml

CONFIG = Path(__file__).resolve().parent.parent.parent / "Config/config_om.yaml"
MARK = "<!-- all keys -->"


def read_keys():
    """[(section, key, value as it is written, unit, allowed, meaning)], in the order of the file."""
    section, rows = "", []
    for line in CONFIG.read_text().splitlines():
        if top := re.match(r"(\w+):", line):
            section = top[1]
        elif key := re.match(r"  (\w+): +(.*?)  +# (.*)", line) or re.match(r"  (\w+): (\S+|\[.*?\]) +# (.*)", line):
            _, unit, allowed, meaning = key[3].split(" | ", 3)
            rows.append((section, key[1], key[2], unit, allowed, meaning))
    assert len(rows) == sum(map(len, yaml.safe_load(CONFIG.read_text()).values())), "a key is not in the table"
    return rows


def cell(text):
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")


def tables():
    """Markdown: a heading and a table for each section."""
    lines, section = [], ""
    for top, key, value, unit, allowed, meaning in read_keys():
        if top != section:
            section = top
            lines += ["", f"### {top}", "", "| key, default | what it does |", "|---|---|"]
        limits = cell(allowed if unit == "-" else f"{unit}; {allowed}")
        lines.append(f"| `{top}.{key}`<br>`{value}` | {cell(meaning)}<br><small>{limits}</small> |")
    return "\n".join(lines)


def on_page_markdown(markdown, page, **_):
    return markdown.replace(MARK, tables()) if page.file.src_uri == "configuration.md" else markdown
