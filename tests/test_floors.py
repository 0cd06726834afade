"""The house: each folder imports only from the floors below it, nobody imports Scripts, and there are no circles.

    python tests/test_floors.py       the floors and what each imports

Imports within functions count like those at the head of a file.
"""
import ast
import collections
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# programs: OM_*.py and Scripts
FLOORS = ("Runtime", "Supervisor", "Report", "Dataloader", "Diffusion", "Inference", "Study", "programs")


def modules():
    """{dotted name: path} of the modules of the house; "Runtime" is Runtime/__init__.py."""
    folders = [ROOT / name for name in (*FLOORS[:-1], "Scripts")]
    paths = [*ROOT.glob("OM_*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


def imported(path, known):
    """Names of `known` modules that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # `from Runtime import agree` names a module, `from Runtime.agree import agree` what is in one.
            found |= {name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return found & known


@functools.cache
def graph():
    known = modules()
    return {name: imported(path, set(known)) - {name} for name, path in known.items()}


def floor(name):
    top = name.split(".")[0]
    return FLOORS.index(top if top in FLOORS else "programs")


def circle(imports):
    """The modules of one circle of imports, in order; None where there is none."""
    done, way = set(), []

    def visit(name):
        if name in way:
            return way[way.index(name):] + [name]
        if name in done:
            return None
        way.append(name)
        for other in sorted(imports[name]):
            if found := visit(other):
                return found
        way.pop()
        done.add(name)
        return None

    return next((found for name in sorted(imports) if (found := visit(name))), None)


def test_each_floor_imports_only_what_lies_below_it():
    wrong = [f"{name} imports {other}" for name, others in graph().items() for other in others
             if floor(other) > floor(name)]
    assert not wrong


def test_nobody_imports_scripts():
    """But the parts of one script each other; nor a program another, but one script the modes of the training."""
    wrong = [f"{name} imports {other}" for name, others in graph().items() for other in others
             if floor(other) == len(FLOORS) - 1 and name.rsplit(".", 1)[0] != other.rsplit(".", 1)[0]]
    assert set(wrong) <= {"OM_export imports OM_train_3modes"}


def test_there_are_no_circles():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert circle(graph()) is None


def test_the_programs_start_without_the_tests():
    """No file of the house imports the tests."""
    pattern = re.compile(r"^\s*(from|import) tests\b", re.M)
    assert not [name for name, path in modules().items() if pattern.search(path.read_text())]


def test_the_page_of_the_code_names_every_file_and_its_stops_are_there():
    """A file that nobody can say in one line what for should not be there."""
    page = (ROOT / "docs/code.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.M))
    files = {str(path.relative_to(ROOT)) for path in modules().values() if path.read_text().strip()}
    assert not files - listed, "docs/code.md has no line for these files"
    assert not {name for name in listed if not (ROOT / name).is_file()}
    for names, file in re.findall(r"^\| \d+ \| (.*) \(`([\w/]+\.py)`\) \|", page, re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b", (ROOT / file).read_text(), re.M), f"{file} has no {name}"


def test_every_module_is_in_git():
    """A file that is not would be missing from a clone."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository")
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "*.py"], cwd=ROOT, capture_output=True,
                            text=True, timeout=30)
    assert listed.returncode == 0, listed.stderr
    assert {str(path.relative_to(ROOT)) for path in modules().values()} <= set(listed.stdout.split())


def main():
    imports, found = graph(), circle(graph())
    for number, name in enumerate(FLOORS):
        here = [module for module in imports if floor(module) == number]
        below = collections.Counter(FLOORS[floor(other)] for module in here for other in imports[module])
        print(f"{name:>10}: {len(here):2} files, import from {dict(below)}")
    print("circle: " + (" -> ".join(found) if found else "none"))
    wrong = [f"{name} imports {other}" for name, others in imports.items() for other in others
             if floor(other) > floor(name)]
    print("\n".join(["against the floors:", *wrong] if wrong else ["the floors hold"]))
    return bool(wrong or found)


if __name__ == "__main__":
    sys.exit(main())
