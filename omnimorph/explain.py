"""The rows of docs/messages.md that fit a message, and OmniMorph's own error messages in it."""
import ast
import re
import sys
from pathlib import Path

from Runtime.errors import unbreakable_output

USAGE = """Explain a message: python -m omnimorph.explain "pasted text", or python -m omnimorph.explain < a log.

Prints the rows of docs/messages.md that match, the closest first, and OmniMorph's own error messages in the text, with
the file that raises them. Exit code 0 if something fits, 1 if nothing does, 43 if there is no text.
"""

HERE = Path(__file__).resolve().parent
# In a checkout the code is beside this package; after `pip install` it is inside.
ROOT = HERE if (HERE / "Runtime").is_dir() else HERE.parent
FOLDERS = ("Runtime", "Supervisor", "Report", "Dataloader", "Diffusion", "Inference", "Study", "Scripts")
LEAST_LITERAL = 12  # letters of fixed text that a refusal must have: fewer would match anything


def read_rows(text):
    """[(list of fragments, meaning, cure)] of the tables of docs/messages.md.

    A fragment is text between backticks in the first cell.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        fragments = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("|") and len(cells) == 3 else []
        if fragments:
            rows.append((fragments, cells[1], cells[2]))
    return rows


def matching_rows(text, rows):
    """The rows that fit a text, those of the longest fragments first.

    In a fragment `...` and `{}` stand for any text, spaces for any space. What a fragment has matched is taken out of
    the text, so that "CUDA out of memory" is not also the "out of memory" of a host.
    """
    found, lower = {}, text.lower()
    for fragment, number in sorted(((fragment, number) for number, row in enumerate(rows) for fragment in row[0]),
                                   key=lambda entry: -len(entry[0])):
        if not all(word in lower for word in re.split(r"\.\.\.|\{\}|\s+", fragment.lower())):
            continue  # found a hundred times faster than by the expression, in a log of megabytes
        parts = [re.escape(part).replace(r"\ ", r"\s+") for part in re.split(r"\.\.\.|\{\}", fragment)]
        text, count = re.subn(".*?".join(parts), "\0", text, flags=re.IGNORECASE)
        if count:
            found[number] = rows[number]
    return [*found.values()]


def _template(node):
    """The text of a string expression, with {} for each variable part; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = _template(node.left), _template(node.right)
        return None if None in parts else "".join(parts)
    return None


def read_refusals(root=ROOT):
    """[(template, file)] of every InputError in the code, sorted by file: what OmniMorph refuses, and where."""
    paths = [*root.glob("OM_*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))]
    found = set()
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError" and node.args:
                template = _template(node.args[0])
                if template and len(template.replace("{}", "")) >= LEAST_LITERAL:
                    found.add((path.relative_to(root).as_posix(), template))
    return [(template, name) for name, template in sorted(found)]


def matching_refusals(text, refusals):
    """The refusals that a text contains, the most literal first; a long log is read line by line.

    The literal pieces are searched in order, without a regular expression: one with many wildcards takes minutes on a
    log of megabytes.
    """
    text = text.lower()
    lines, found = text.splitlines(), []
    for template, name in refusals:
        pieces = [piece.lower() for piece in template.split("{}") if piece]
        longest = max(pieces, key=len)
        if longest in text and any(longest in line and _in_order(pieces, line) for line in lines):
            found.append((len("".join(pieces)), template, name))
    return [(template, name) for _, template, name in sorted(found, reverse=True)]


def _in_order(pieces, line):
    start = 0
    for piece in pieces:
        start = line.find(piece, start)
        if start < 0:
            return False
        start += len(piece)
    return True


@unbreakable_output()  # | head -1
def main():
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE.strip())
        return 0
    if not arguments and (sys.stdin is None or sys.stdin.isatty()):
        print("error: no text: paste the message in quotes, or redirect a log (< FILE).", file=sys.stderr)
        return 43
    text = " ".join(arguments) or sys.stdin.buffer.read().decode(errors="replace")
    if not text.strip():
        print("error: the text is empty: paste what the program printed, or redirect a log (< FILE).", file=sys.stderr)
        return 43
    page = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    rows, refusals = matching_rows(text, read_rows(page)), matching_refusals(text, read_refusals())
    for fragments, meaning, cure in rows:
        print(f"{' or '.join(fragments)}\n  what it means: {meaning}\n  what to do:    {cure}\n")
    for template, name in refusals:
        print(f"{template.replace('{}', '...')} OmniMorph refuses an input ({name}): the sentence gives the reason.")
    if not rows and not refusals:
        print("No row of docs/messages.md fits. Search the page for a shorter piece of the text; verdict.json in "
              "the folder of a run has its verdict.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
