"""Promises about the repository itself."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT

FOLDERS = ["", "Runtime", "Dataloader", "Diffusion", "Inference", "Scripts", "Scripts/preflight", "Scripts/smoke"]
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
PROGRAMS = [path for folder in [*FOLDERS, "tests", ".ci"] for path in (ROOT / folder).glob("*")
           if path.is_file() and path.read_bytes()[:19] == b"#!/usr/bin/env bash"]
SCRIPTS = [*PROGRAMS, *(ROOT / "Config/cluster").glob("*")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


def test_functions_can_be_read_at_a_glance():
    """No file has a cap: what belongs together stands together. But a function that fills a screen does too much."""
    longest = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "arguments" not in node.name:
                longest[f"{path.name}:{node.name}"] = node.end_lineno - node.lineno + 1
    assert len(longest) > 300
    allowed = {"OM_train_3modes.py:train": 80}  # the loop of the training is read as a whole
    assert not {name: lines for name, lines in longest.items() if lines > allowed.get(name, 60)}


@pytest.mark.parametrize("pattern", [r"weights_only=False", r"strict=False", r"yaml\.load\(", r"os\._exit", r"except:",
                                     r"except Exception", r"manual_seed_all", r"\bTODO\b"])
def test_what_has_hidden_errors_before_stays_out(pattern):
    assert len(SOURCES) > 20
    found = [path.name for path in SOURCES if re.search(pattern, path.read_text())]
    assert not found


# ---------------------------------------------------------------------------------------------------------------------
# README.md and docs/
# ---------------------------------------------------------------------------------------------------------------------

def prose(page):
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links(page):
    """[(file, anchor)] of the links to the repository itself; a link within the page names the page."""
    found = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in found]


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*?)\s*$", prose(page), re.M)]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = [(path.name, anchor) for path, anchor in links(page)
            if not path.exists() or (anchor and anchor not in anchors(path))]
    assert not dead


def test_files_that_are_named_exist():
    folders = "Config|Inference|Diffusion|Dataloader|Runtime|Scripts|tests|docs"
    name = rf"`((?:{folders})/[\w./-]*|(?:OM_|bash_|requirements|README|progress)[\w.-]*\.\w+)`"
    named = {(page.name, path) for page in PAGES for path in re.findall(name, prose(page))}
    assert len(named) > 60
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


# ---------------------------------------------------------------------------------------------------------------------
# make, scripts
# ---------------------------------------------------------------------------------------------------------------------

def test_make_help_lists_every_target():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"venv", "demo", "test", "test-all", "bench"} <= set(targets)
    assert all(f"make {target}" in printed for target in targets)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_sound(script):
    # What the sites' files set is for others to use.
    options = [] if script in PROGRAMS else ["--shell=bash", "--exclude=SC2034,SC1091"]
    for command in (["bash", "-n"], [SHELLCHECK, *options]):
        found = subprocess.run([*command, script], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def test_the_launcher_and_the_smoke_ladder_are_among_the_checked_scripts():
    assert {ROOT / "bash_train_multi_nodes.sh", ROOT / "Scripts/bash_smoke.sh"} < set(PROGRAMS) < set(SCRIPTS)
