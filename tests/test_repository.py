"""Promises about the repository itself."""
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from Runtime.config import KEYS
from tests.tiny import ROOT

FOLDERS = ["", "omnimorph", "Runtime", "Supervisor", "Report", "Dataloader", "Diffusion", "Inference", "Study",
           "Scripts", "Scripts/preflight", "Scripts/smoke", "Scripts/containers"]
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
PROGRAMS = [path for folder in [*FOLDERS, "tests", ".ci"] for path in (ROOT / folder).glob("*")
           if path.is_file() and path.read_bytes()[:19] == b"#!/usr/bin/env bash"]
SCRIPTS = [*PROGRAMS, *(ROOT / "Config/cluster").glob("*")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.parametrize("pattern", [r"weights_only=False", r"strict=False", r"yaml\.load\((?!.*, TextLoader\))",
                                     r"os\._exit", r"except:", r"except Exception", r"manual_seed_all", r"\bTODO\b",
                                     r"__doc__\."])
def test_what_has_hidden_errors_before_stays_out(pattern):
    """TextLoader of Runtime/config.py makes texts, lists and dicts alone. With `python -OO` there is no __doc__."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    dead = [(path.name, anchor) for path, anchor in links(page)
            if not path.exists() or (anchor and anchor not in anchors(path))]
    assert not dead
    # What is not part of the site would be a dead link there (mkdocs.yml).
    assert page.name == "README.md" or all(path.parent == ROOT / "docs" for path, _ in links(page))


def test_files_that_are_named_exist():
    folders = "Config|Inference|Diffusion|Dataloader|Runtime|Report|Scripts|tests|docs"
    name = rf"`((?:{folders})/[\w./-]*|(?:OM_|bash_|requirements|README|progress|mkdocs)[\w.-]*\.\w+)`"
    named = {(page.name, path) for page in PAGES for path in re.findall(name, prose(page))}
    assert len(named) > 60
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def test_every_page_can_be_found():
    """In the navigation of the site, and by a link of the README or of the first page."""
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in files(part)]

    pages = [page.name for page in PAGES[1:]]
    assert len(pages) >= 12
    assert sorted(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == pages
    assert set(pages) <= {path.name for page in (PAGES[0], ROOT / "docs/index.md") for path, _ in links(page)} | {
        "index.md"}
    assert (ROOT / "docs/index.md", "") in links(PAGES[0])


def test_every_site_has_a_page_with_its_job_interfaces_storage_and_monitoring():
    sites = {path.stem for path in (ROOT / "Config/cluster").glob("*.env")}
    assert {path.stem.removeprefix("site_") for path in PAGES if path.stem.startswith("site_")} == sites
    for site in sites:
        text = (ROOT / f"docs/site_{site}.md").read_text()
        assert re.findall(r"^## (.*)$", text, re.M) == ["Job", "Interfaces", "Storage", "Watching"]
        assert all(word in text for word in ("--account=", "--partition=", "QOS", "bash_train_multi_nodes.sh"))


def header(text):
    return {line.split("#")[1].split()[1] for line in text.splitlines() if line.startswith("#SBATCH")}


@pytest.mark.parametrize("script, asked", [
    ("bash_train_multi_nodes.sh", "--nodes=8 --gres=gpu:4 --ntasks-per-node=8 --cpus-per-task=12 --time=36:00:00"),
    ("Scripts/bash_train_stratB.sh", "--nodes=1 --gres=gpu:4 --cpus-per-task=96 --time=02:15:00"),
    ("Scripts/bash_diagnose_leak.sh", "--nodes=1 --gres=gpu:2 --cpus-per-task=48"),
    ("Scripts/bash_smoke.sh", "--nodes=2 --ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=12")])
def test_a_job_asks_for_the_devices_and_cores_of_its_ranks(script, asked):
    assert set(asked.split()) <= header((ROOT / script).read_text())


def test_the_job_of_every_site_survives_its_time_limit():
    """Slurm's signal reaches the job's own shell only; what keeps a job alive is in the launcher's own header."""
    wanted = {line for line in header((ROOT / "bash_train_multi_nodes.sh").read_text())
              if line.startswith(("--signal", "--requeue", "--no-kill", "--open-mode", "--output"))}
    assert len(wanted) == 5
    for page in (ROOT / "docs").glob("site_*.md"):
        script = page.read_text().partition("```sh\n")[2].partition("```")[0]
        assert not wanted - header(script), page.name
        assert script.splitlines()[-1].startswith("exec bash bash_train_multi_nodes.sh "), page.name


def test_the_site_lists_every_key():
    hook = runpy.run_path(str(ROOT / "docs/extra/list_keys.py"))
    rows = hook["read_keys"]()
    config = yaml.safe_load((ROOT / "Config/config_om.yaml").read_text())
    assert sorted(f"{section}.{key}" for section, key, *_ in rows) == sorted(KEYS)
    assert not [key for section, key, value, *_ in rows if yaml.safe_load(value) != config[section][key]]
    assert all(meaning for *_, meaning in rows)
    assert (ROOT / "docs/configuration.md").read_text().count(hook["MARK"]) == 1


@pytest.mark.parametrize("addition, expected", [
    ("", ""), ("[dead](nowhere.md)", "nowhere.md"), ("[dead](training.md#nowhere)", "#nowhere"),
    ("[not of the site](../Config/config_om.yaml)", "config_om.yaml")], ids=["as it is", "link", "anchor", "outside"])
def test_the_site_is_built_and_refuses_dead_links(addition, expected, tmp_path):
    for name in ("docs", "Config", "omnimorph", "Runtime"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs/index.md", "a") as index:
        index.write(f"\n{addition}\n")
    built = subprocess.run([Path(sys.executable).with_name("mkdocs"), "build", "--strict"], cwd=tmp_path,
                           capture_output=True, text=True, timeout=120)
    assert (built.returncode == 0) == (not expected), built.stderr
    assert expected in built.stderr
    if expected:
        return
    site = tmp_path / "site"
    assert {page.stem for page in site.glob("*.html")} == {page.stem for page in PAGES[1:]} | {"404"}
    assert all(f"<code>{key}</code>" in (site / "configuration.html").read_text() for key in KEYS)
    # Nothing is fetched from the net.
    fetched = r"(?:src|href)=\"?https?://[^\s\">]*\.(?:js|css|woff2?)|fonts\.g"
    assert not [page.name for page in site.glob("*.html") if re.search(fetched, page.read_text())]


# ---------------------------------------------------------------------------------------------------------------------
# make, scripts
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_pasted_into_zsh(page):
    """The shell of a Mac takes an unquoted [4,8] for the characters of a file's name, finds none and runs nothing."""
    text = page.read_text()
    commands = re.findall(r"^ *```bash$(.*?)^ *```$", text, re.M | re.S) + re.findall(r"`([^`\n]*)`", prose(page))
    assert not [word for command in commands for word in command.split() if re.match(r"[a-z]+\.\w+=\[", word)]


def test_make_help_lists_every_target():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"venv", "demo", "test", "test-all", "bench", "docs"} <= set(targets)
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
