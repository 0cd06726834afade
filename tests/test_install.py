"""The installed package: one name in site-packages, the commands, and the functions of `import omnimorph`."""
import ast
import json
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest
import yaml

import omnimorph
from Dataloader.nifti import read_field, read_volume, write_volume
from Dataloader.synthetic import make_subject
from omnimorph.__main__ import PROGRAMS, USAGE, main
from tests import launching
from tests.tiny import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOUSE = {"Runtime", "Supervisor", "Report", "Dataloader", "Diffusion", "Inference", "Study", *PROGRAMS.values()}
# A stranger's own modules, of the same names as ours.
STRANGER = """
import Runtime, Config, tests
import omnimorph, numpy as np
assert Runtime.__file__ == Config.__file__.replace("Config", "Runtime"), Runtime.__file__
image = np.random.default_rng(0).random((12, 14, 16))
copy, label, field = omnimorph.augment(image, image > 0.5, start=40, draw=1)
assert copy.shape == image.shape and label.dtype == bool and field.shape == (3, 12, 14, 16) and np.abs(field).max() > 0
found = omnimorph.register("F.nii.gz", (image, np.eye(4)), refine=2)
assert found.field.shape == (3, 14, 16, 18)
try:
    omnimorph.register("none.nii.gz", "F.nii.gz", refine=1)
except omnimorph.InputError as error:
    print(error)
"""


def copy_sources(folder):
    """The files that git knows or would take, in another folder: a build leaves things behind."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout whose files could be listed")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def imports_of(path):
    """Names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_all_of_the_package_is_under_one_name(tmp_path):
    source = copy_sources(tmp_path / "source")
    built = tmp_path / "built"
    launching.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", built], cwd=source, check=True)
    assert [path.name for path in built.iterdir()] == ["omnimorph"]
    files = {str(path.relative_to(built / "omnimorph")): path for path in built.rglob("*.py")}
    expected = {str(path.relative_to(source)) for name in HOUSE for path in [*source.rglob(f"{name}/**/*.py"),
                                                                              *source.glob(f"{name}.py")]}
    assert set(files) == expected | {"__init__.py", "__main__.py", "explain.py"} and len(files) > 50
    imported = [(name, module) for name, path in files.items() for module in imports_of(path)]
    assert not [pair for pair in imported if pair[1].split(".")[0] in {*HOUSE, "tests", "Scripts"}]
    assert ("Inference/register_pairs.py", "omnimorph.Inference.registration") in imported
    for name, path in files.items():  # line for line, so that a traceback fits the repository
        own = source / ("omnimorph" if (source / "omnimorph" / name).is_file() else ".") / name
        assert len(path.read_text().splitlines()) == len(own.read_text().splitlines())
    configs = {path.name for path in (ROOT / "Config").glob("*.yaml")}
    assert {path.name for path in (built / "omnimorph/Config").iterdir()} == configs
    for name in ("page.css", "sort.js", "viewer.css", "viewer.js"):
        assert (built / "omnimorph/Report" / name).read_text() == (ROOT / "Report" / name).read_text()


def test_the_package_says_what_the_repository_says():
    version = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert PROJECT["version"] == version == omnimorph.__version__
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()
    pinned = (ROOT / "requirements.txt").read_text().split()
    names = [requirement.split(">=")[0] for requirement in PROJECT["dependencies"]]
    assert names == [line.split("==")[0] for line in pinned if "==" in line]
    assert all(f"  {task} " in USAGE for task in PROGRAMS)


@pytest.mark.parametrize("words, code, out, error", [
    ([], 0, "usage: omnimorph TASK", ""), (["--help"], 0, "omnimorph TASK --help", ""),
    (["fly"], 43, "", f"error: fly is no task: it is one of {', '.join(PROGRAMS)}.\n")])
def test_the_command_names_its_tasks(words, code, out, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["omnimorph", *words])
    assert main() == code
    printed = capsys.readouterr()
    assert out in printed.out and printed.err == error


def test_the_command_runs_from_the_repository_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["omnimorph", "evaluate", "--out", "nowhere"])
    assert main() == 43 and capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(sys, "argv", ["omnimorph", "register", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("usage: omnimorph register [-h]")


# ---------------------------------------------------------------------------------------------------------------------
# In an environment of its own, away from the repository
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The bin folder of a new environment with the package in it. What it depends on is that of this environment."""
    folder = tmp_path_factory.mktemp("install")
    venv.create(folder / "env", with_pip=True)
    [site] = (folder / "env").glob("lib/python*/site-packages")
    (site / "here.pth").write_text(str(Path(np.__file__).parents[1]) + "\n")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    launching.run([sys.executable, *pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder,
                   copy_sources(folder / "source")], cwd=folder, check=True)
    [wheel] = folder.glob("*.whl")
    pip = [folder / "env/bin/python", *pip]
    launching.run([*pip, "install", "--quiet", "--no-deps", wheel], cwd=folder, check=True)
    shutil.rmtree(folder / "source")
    ours = {path.name for path in site.iterdir()} - {"here.pth", "pip", "setuptools", "pkg_resources",
                                                     "_distutils_hack", "distutils-precedence.pth"}
    assert {name for name in ours if not name.startswith(("pip-", "setuptools-"))} == {
        "omnimorph", "omnimorph-1.13.5.dist-info"}
    assert (site / "omnimorph/Inference/universal.md").is_file(), "the card of the weights"
    conflicts = launching.run([*pip, "check"], cwd=folder).stdout
    assert "omnimorph" not in conflicts, conflicts
    return folder / "env/bin"


@pytest.fixture
def elsewhere(tmp_path):
    """A folder away from the repository with a stranger's modules and two labelled volumes."""
    for name in ("Runtime", "Config", "tests"):
        (tmp_path / f"{name}.py").write_text("")
    for seed, name in enumerate("FM"):
        subject = make_subject(seed, (14, 16, 18))
        write_volume(tmp_path / f"{name}.nii.gz", subject["image"], np.eye(4))
        write_volume(tmp_path / f"{name}_label.nii.gz", subject["label"], np.eye(4))
    return tmp_path


def call(installed, folder, *words):
    return launching.run([installed / "omnimorph", *words], cwd=folder)


@pytest.mark.slow
def test_the_commands_explain_themselves(installed, elsewhere):
    for task in PROGRAMS:
        done = call(installed, elsewhere, task, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: omnimorph {task} "), done.stderr
    for name in ("omnimorph.Report.run", "omnimorph.Report.compare", "omnimorph.Dataloader.synthetic"):
        done = launching.run([installed / "python", "-m", name, "--help"], cwd=elsewhere)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m {name} "), done.stderr


@pytest.mark.slow
def test_registration_scores_and_copies_away_from_the_repository(installed, elsewhere):
    done = call(installed, elsewhere, "register", "--fixed", "F.nii.gz", "--moving", "M.nii.gz", "--moving-label",
                "M_label.nii.gz", "--affine", "none", "--refine", "5", "--out", "pair")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["pairs"] == 1, done.stderr
    assert read_field(elsewhere / "pair/field.nii.gz")[0].any()
    done = call(installed, elsewhere, "evaluate", "--fixed-label", "F_label.nii.gz", "--warped-label",
                "pair/warped_label.nii.gz", "--field", "pair/field.nii.gz", "--out", "scores")
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["dice"] > 0.3, done.stderr
    done = call(installed, elsewhere, "augment", "--image", "F.nii.gz", "--label", "F_label.nii.gz", "--model", "none",
                "--draws", "3", "--workers", "2", "--out", "copies")
    assert done.returncode == 0 and len(list((elsewhere / "copies/imagesTr").iterdir())) == 3, done.stderr
    copy = read_volume(elsewhere / "copies/imagesTr/F_draw00.nii.gz")[0]
    assert not np.array_equal(copy, read_volume(elsewhere / "F.nii.gz")[0])


@pytest.mark.slow
def test_a_training_finds_its_config_and_trains_away_from_the_repository(installed, elsewhere):
    launching.run([installed / "python", "-m", "omnimorph.Dataloader.synthetic", "--out", "data", "--count", "8",
                   "--size", "16"], cwd=elsewhere, check=True)
    words = ["--config", "config_demo.yaml", *(word for setting in (
        "data.root=data", "data.cache=cache", "data.train_ids=0-5", "data.val_ids=6-7", "data.expect_samples=6",
        "data.img_size=8", "model.channels=[4, 4, 8]", "model.attention_width=16", "model.attention_heads=2",
        "diffusion.grids=[4, 8]", "contrastive.embedding=8", "contrastive.queue=8", "registration.window=5",
        "registration.scales=2", "run.epochs=1", "run.picture_every=0", "run.device=cpu", "run.models=Models",
        "run.logs=Logs", "data.repeats=1", "run.amp=off") for word in ("--set", setting))]
    for task in ("prepare", "train"):
        done = call(installed, elsewhere, task, *words)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [run] = (elsewhere / "Models").iterdir()
    assert list(run.glob("*.pth"))


@pytest.mark.slow
def test_functions_beside_modules_of_a_stranger_with_our_names(installed, elsewhere):
    (elsewhere / "mine.py").write_text(STRANGER)
    done = launching.run([installed / "python", "mine.py"], cwd=elsewhere)
    assert done.returncode == 0 and done.stdout == "none.nii.gz: no such file; check the path.\n", done.stderr
