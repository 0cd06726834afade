"""A hook of mkdocs: the page of messages lists every sentence with which OmniMorph refuses an input, from the code."""
import html
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "<!-- all refusals -->"


def table():
    sys.path.insert(0, str(ROOT))  # the command mkdocs, unlike python -m mkdocs, does not look in the current folder
    # By its path: importing the package would import torch.
    refusals = runpy.run_path(str(ROOT / "omnimorph/explain.py"))["read_refusals"](ROOT)
    lines = ["| sentence | file |", "|---|---|"]
    for template, name in refusals:
        text = html.escape(" ".join(template.split()), quote=False)
        for letter in "|*_[]`":
            text = text.replace(letter, f"&#{ord(letter)};")
        lines.append(f"| {text} | `{name}` |")
    return "\n".join(lines)


def on_page_markdown(markdown, page, **_):
    return markdown.replace(MARK, table()) if page.file.src_uri == "messages.md" else markdown
