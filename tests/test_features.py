"""The feature table of docs/features.md: thirty rows, a test behind each word of ours, a page behind each of others."""
import ast
import re

import pytest

from tests.tiny import ROOT

TEXT = (ROOT / "docs/features.md").read_text()
PEERS = ["ANTs", "uniGradICON", "FireANTs", "VoxelMorph", "MONAI", "nnU-Net"]
LINES = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEADER, ROWS = LINES[0], LINES[2:]
SOURCES = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", TEXT, re.M))
NOTES = {int(number): note for number, note in re.findall(r"^- \*\*(\d+)\.\*\* (.*(?:\n  .*)*)", TEXT, re.M)}


def test_the_table_has_thirty_rows_without_an_empty_cell():
    assert HEADER == ["", "OmniMorph", *PEERS, "shown by"]
    assert [row[0].split()[0] for row in ROWS] == [f"**{number}**" for number in range(1, 31)]
    assert {len(row) for row in ROWS} == {len(HEADER)} and all(cell for row in ROWS for cell in row)
    assert len({row[0].split(maxsplit=1)[1] for row in ROWS}) == 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_we_say_of_ourselves_is_shown_by_a_test(row):
    ours, shown = row[1], row[-1]
    if ours == "no":
        assert shown == "none"
        return
    assert ours in ("yes", "partly")
    file, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown).groups()
    functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


def test_what_we_say_of_others_leads_to_a_page():
    cells = [re.fullmatch(r"\[(yes|partly|no)\]\[([\w-]+)\]", cell) for row in ROWS for cell in row[2:-1]]
    assert len(cells) == 180 and all(cells)
    assert {cell[2] for cell in cells} == set(SOURCES)


def test_every_partly_is_explained():
    for number, row in enumerate(ROWS, 1):
        names = [name for name, cell in zip(HEADER[1:-1], row[1:-1]) if "partly" in cell]
        assert not names or all(name in NOTES[number] for name in names), (number, names)
    assert set(NOTES) <= set(range(1, 31))
