"""A new user's walk: every command block of README.md and docs/ as it is written, in a fresh clone, one after another.

The clone is one of the commit that is checked out, with the uncommitted changes laid over it: what is about to be
committed is what walks. Beside .venv, which is a link to the environment at hand, it gets what a user would bring:
volumes in Data/brains, the files that the examples name, and a config_om.yaml that is small enough for a test. A
command that a page repeats finds its results there and is not run again.
"""
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import yaml

from Dataloader.synthetic import write_dataset
from Dataloader.transforms import write_matrix
from Runtime.config import load_config
from tests import launching
from tests.tiny import ROOT, launcher_environment

# README.md and all of docs/, in the order of the walk: what a page uses has been made by those before it.
PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "install", "data", "training", "report", "trouble", "registration", "coming_from", "how_long", "looks_wrong",
    "augmentation", "evaluation", "study", "clusters", "site_dawn", "site_lumi", "site_gilbreth", "site_torch-hpc",
    "site_local", "configuration", "benchmarks", "features", "paper", "faults", "messages", "code", "new_loss",
    "promises", "index"))]
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
HIPPOCAMPUS = ROOT.parent / "shared/data/hippocampus"
VOLUMES = 60  # in Data/brains; those after them are the files of the examples
# What an edit makes of config_om.yaml: the same recipe for thumbnails, an epoch of a few steps.
SMALL = {"model.channels": [8, 8, 16], "model.attention_width": 16, "model.attention_depth": 1,
         "model.attention_heads": 2, "diffusion.grids": [4, 8], "contrastive.embedding": 8, "contrastive.queue": 16,
         "registration.window": 5, "registration.scales": 2, "registration.gate": 2.0, "refine.levels": 2,
         "data.img_size": 16, "data.pairs": 12, "optim.warmup_steps": 2, "run.epochs": 1, "run.val_pairs": 2,
         "run.checkpoint_steps": 2}
# Commands that a walk does not run, as patterns of their beginnings, and the file that runs them instead.
ELSEWHERE = {
    r"git clone ADDRESS OmniMorph|cd OmniMorph": "tests/test_readme.py",  # its clone is of this folder
    r"make demo": "tests/test_demo.py",
    r"make test": ".ci/run",
    r"make docs": "tests/test_repository.py",
    r"make bench|.* tests/bench/bench_(registration|default|mouse|multimodal)\.py": "progress.md",  # by hand, for hours
    r".* omnimorph\.explain ": "tests/test_explain.py",
    r"python3 -m venv env |omnimorph (register|augment|prepare|train|evaluate) ": "tests/test_install.py",
    r"apptainer build|PYTHON=.apptainer exec|docker (build|run) ": "tests/test_containers.py",
    r".* OM_study\.py (segment|template|jacobian|qc|motion|plan) ": "tests/test_study_page.py",
    r".* tests/bench/bench_universal\.py|bash Scripts/bash_train_universal\.sh|.*--init-from universal":
        "tests/test_universal.py",  # half an hour and more
    r".*--initial Results/theirs|antsApplyTransforms ": "tests/test_transforms.py",
    r".*--nnunet |(mv|cp) .*Dataset504_Deformed|nnUNetv2_plan_and_preprocess": "tests/test_nnunet.py",
    r"sbatch .*bash_train_multi_nodes\.sh": "tests/slurm/test_slurm.py",
    r"sbatch .*Scripts/bash_infer\.sh (prepare|register|augment) ": "tests/test_infer_script.py",
}
OPTIONAL = {"monai": "tests/test_batch_augment.py"}  # Python blocks that import this run where it is installed
RECIPE = "tests/test_progress.py"  # applies the block of changes in docs/new_loss.md, and trains with them
# What a second way to store the volumes changes: these pages, and this heading of the README.
DATA_PART = ("docs/data.md", "docs/training.md", "Train on your own volumes")


# ---------------------------------------------------------------------------------------------------------------------
# The pages
# ---------------------------------------------------------------------------------------------------------------------

def read_blocks():
    """The fenced blocks of all pages, in order: dicts of language, page, heading (the last of level 2), text."""
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page):
    blocks, heading, inside = [], "", None
    for line in TEXT[page].splitlines():
        if inside is None and line.startswith("## "):
            heading = line[3:]
        if line.startswith("```"):
            if inside is None:
                inside = {"language": line[3:].strip(), "page": page, "heading": heading, "text": ""}
            else:
                blocks.append(inside)
                inside = None
        elif inside is not None:
            inside["text"] += line + "\n"
    assert inside is None, f"{page}: a block is not closed"
    return blocks


def commands(block):
    """The commands of a block, a line each, without comments."""
    lines = block["text"].replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip() and not line.startswith("#")]


def elsewhere(line):
    """The pattern of ELSEWHERE that a command matches, or None."""
    return next((pattern for pattern in ELSEWHERE if re.match(pattern, line)), None)


def first_column(heading):
    """{words of the first cell: the rest} of the table that begins with this heading row, on whichever page."""
    [after] = [text.split(heading + "\n")[1] for text in TEXT.values() if heading + "\n" in text]
    rows = after.split("\n\n", 1)[0].splitlines()[1:]
    return {cell: rest for cell, rest in (row.strip("| ").split(" | ", 1) for row in rows)}


def test_every_page_is_one_that_the_walk_knows():
    assert sorted(PAGES) == ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_every_block_is_one_that_the_walk_knows():
    blocks = read_blocks()
    assert {block["language"] for block in blocks} == {"bash", "sh", "python", "json", "yaml", "text", "diff"}
    assert [block["page"] for block in blocks if block["language"] == "diff"] == ["docs/new_loss.md"]
    # The parts that are asked for by name.
    assert {block["heading"] for block in blocks} > {"Train on your own volumes", "Train for days"}
    assert {block["page"] for block in blocks} > {"README.md", "docs/data.md", "docs/training.md"}
    written = {line for block in blocks if block["language"] == "bash" for line in commands(block)}
    walked = {line for line in written if not elsewhere(line)}
    assert {elsewhere(line) for line in written - walked} == set(ELSEWHERE), "not on the pages any more"
    assert all((ROOT / place).is_file() for place in [*ELSEWHERE.values(), *OPTIONAL.values(), RECIPE])
    assert len(walked) >= 15 and len(written - walked) <= 46
    assert all(re.match(r"(RANKS=\d+ bash|\.venv/bin/python) ", line) for line in walked)
    assert all(promised(shlex.split(line)) for line in walked if re.search("OM_(prepare|register|augment|eval)", line))


def test_the_sizes_of_the_configs_are_those_of_their_networks():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from Diffusion.networks import new_network
    for name, row in first_column("| config | training grid | parameters | for |").items():
        cfg = load_config(ROOT / "Config" / name.strip("`"))
        with FakeTensorMode():
            parameters = sum(p.numel() for p in new_network(cfg).parameters())
        grid, size = row.split(" | ")[:2]
        assert float(size.split()[0]) == pytest.approx(parameters / 1e6, rel=0.03), name
        assert ([int(side) for side in grid.split(" x ")] if " x " in grid else [int(grid[:-2])] * 3) == \
            cfg["data.img_size"], name


# ---------------------------------------------------------------------------------------------------------------------
# The clone, and what a user brings
# ---------------------------------------------------------------------------------------------------------------------

def clone(folder):
    """A clone of this checkout in `folder`, with the changes that are not committed yet."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout that could be cloned")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    listed = ["git", "ls-files", "-z", "--modified", "--deleted", "--others", "--exclude-standard"]
    changed = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in set(filter(None, changed.split("\0"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
        else:
            (folder / name).unlink()
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)


def volumes(folder):
    """Images of a labelled data set, sorted: the hippocampus crops, or synthetic ones made in `folder`."""
    if not HIPPOCAMPUS.is_dir():
        write_dataset(folder, range(VOLUMES + 4), 24)
    root = HIPPOCAMPUS if HIPPOCAMPUS.is_dir() else folder
    return sorted((root / "imagesTr").glob("*.nii.gz"))


def label_of(image):
    return image.parent.parent / "labelsTr" / image.name


def bring(folder, layout, images):
    """Data/brains in one of two layouts, and the files that the examples name."""
    for number, image in enumerate(images[:VOLUMES], 1):
        bids = f"sub-{number:03d}/anat/sub-{number:03d}_T1w.nii.gz"
        target = folder / "Data/brains" / (bids if layout == "BIDS" else image.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
    fixed, moving, other = images[VOLUMES:VOLUMES + 3]
    for name, source in (("F", fixed), ("M", moving), ("I", other), ("OTHER", moving)):
        shutil.copy(source, folder / f"{name}.nii.gz")
    for name, source in (("F_label", fixed), ("M_label", moving), ("L", other)):
        shutil.copy(label_of(source), folder / f"{name}.nii.gz")


def edit_config(folder, changes):
    """Change keys of Config/config_om.yaml. changes: {dotted key: value}."""
    path = folder / "Config/config_om.yaml"
    content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # `off` stays a text
    for key, value in changes.items():
        section, name = key.split(".")
        content[section][name] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))


# ---------------------------------------------------------------------------------------------------------------------
# What the text promises of a command
# ---------------------------------------------------------------------------------------------------------------------

def promised(words):
    """Paths that there must be after a command, as patterns below the clone."""
    program, out = Path(words[1]).name, words[words.index("--out") + 1] if "--out" in words else ""
    if program == "OM_register.py":
        names = ["warped.nii.gz", "warped_label.nii.gz"] if "--apply" in words else registered(words)
        deep = "*/" if "--pairs" in words else ""
        return [f"{out}/{'' if name.startswith(('results', 'report')) else deep}{name}" for name in names]
    if program == "OM_augment.py":
        kinds = ["imagesTr/*.nii.gz", "fieldsTr/*.nii.gz"] + ["labelsTr/*.nii.gz"] * ("--label" in words)
        return [f"{out}/{name}" for name in (*kinds, "dataset.json", "draws.csv", "report.html")]
    return {
        "OM_prepare.py": ["Cache/brains/manifest.json", "Logs/brains_prepared.html"],
        "OM_evaluate.py": [f"{out}/scores.{suffix}" for suffix in ("csv", "json", "html")],
        "OM_export.py": [f"Models/brains_om_net/hub/{name}" for name in ("model.safetensors", "config.json",
                                                                         "README.md")],
    }.get(program, [])


def registered(words):
    """Files of the table that a registration with these options writes."""
    names = []
    for cell, what in first_column("| file | what |").items():
        if what.startswith(("if the network", "if `--points`")):
            continue  # segments, or has another format than a table; those of the pages do not
        option = re.match(r"with `(--[\w-]+)", what)
        # Of a list each pair says whether it has labels; those of the page have.
        if not option or option[1] in words or ("--pairs" in words and option[1] == "--moving-label"):
            names += re.findall(r"`([^`]+)`", cell)
    assert len(names) >= 6
    return names


def check_further(line, printed, folder):
    """What the text says about single commands beyond the files that they leave."""
    if "--dry-run" in line:
        assert json.loads(printed.splitlines()[-1])["steps_per_epoch"] > 0
        assert not (folder / "Models").exists()
    if "--out Data/copies" in line:
        assert len(list((folder / "Data/copies/imagesTr").iterdir())) == 32
    if "--out Data/random" in line:
        assert len(list((folder / "Data/random/imagesTr").iterdir())) == 16 * 5
    if line.startswith("RANKS="):
        assert "done" in printed and "4 ranks" in printed


# ---------------------------------------------------------------------------------------------------------------------
# The walk
# ---------------------------------------------------------------------------------------------------------------------

def walk_command(line, folder, environment):
    """Run a command as it is written; it must end well, with what the text promises and nothing that looks ill."""
    done = launching.run(["bash", "-c", line], cwd=folder, env=environment, timeout=600, stderr=subprocess.STDOUT)
    print(f"$ {line}\n{done.stdout}")
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}"
    assert not re.search(r"Traceback|Warning:|^error", done.stdout, re.M), f"{line}\n{done.stdout[-3000:]}"
    missing = [pattern for pattern in promised(shlex.split(line)) if not list(folder.glob(pattern))]
    assert not missing, f"{line}: {missing}"
    check_further(line, done.stdout, folder)


def walk_python(block, folder, environment):
    absent = [name for name in OPTIONAL if f"import {name}" in block["text"] or f"from {name}" in block["text"]]
    if absent and not can_import(absent[0]):
        return
    done = launching.run([".venv/bin/python", "-"], input=block["text"], cwd=folder, env=environment)
    print(f"{block['text']}{done.stdout}{done.stderr}")
    # Other libraries may warn of their own, as MONAI does of decoders that are not installed.
    assert done.returncode == 0 and (absent or not done.stderr), done.stderr


def can_import(name):
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0


def walk_block(block, folder, environment, walked):
    """Run a block of commands or of Python; write a file that is shown; look for the files of a listing.

    walked: the commands that have run, to which those of the block are added.
    """
    text, language = block["text"], block["language"]
    if language == "bash":
        for line in commands(block):
            if line not in walked and not elsewhere(line):
                walk_command(line, folder, environment)
                walked.add(line)
    elif language == "python":
        walk_python(block, folder, environment)
    elif language == "yaml":
        path = folder / text.splitlines()[0].removeprefix("# ")
        path.write_text(text)
        shown = launching.run([".venv/bin/python", "-c", f"from Runtime.config import load_config as f; f('{path}')"],
                              cwd=folder, env=environment)
        assert shown.returncode == 0, shown.stderr
    elif language == "sh":  # a job for Slurm on a site
        checked = launching.run(["bash", "-n"], input=text)
        assert checked.returncode == 0 and text.startswith("#!/usr/bin/env bash\n#SBATCH --account="), checked.stderr
    elif language == "text":
        for line in text.splitlines():
            pattern = re.sub(r"\d+", "*", line.split()[0])
            assert list(folder.glob(pattern)) or re.search("if any|while a process runs", line), line
    else:
        assert language in ("json", "diff")  # written before the walk, as a command names it; and RECIPE


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layout", ["BIDS", "plain folder"])
def test_the_walk(layout, tmp_path):
    folder, blocks, walked = tmp_path / "OmniMorph", read_blocks(), set()
    clone(folder)
    bring(folder, layout, volumes(tmp_path / "synthetic"))
    edit_config(folder, SMALL)
    shown = [block["text"] for block in blocks if block["language"] == "json"]
    (folder / "pairs.json").write_text(*shown)
    environment = {name: value for name, value in launcher_environment(1).items()
                   if name not in ("RANKS", "PYTHON", "PYTHONPATH", "OMP_NUM_THREADS", "CLUSTER")}
    for block in blocks:
        if layout == "plain folder" and block["page"] not in DATA_PART and block["heading"] not in DATA_PART:
            continue
        if block["heading"] == "Train for days":  # a run that is not over yet, to see it go on
            edit_config(folder, {"run.epochs": 2})
        walk_block(block, folder, environment, walked)
    if layout == "BIDS":
        return
    text = (folder / "Models/brains_om_net/data.csv").read_text().splitlines()
    assert len(text) == 1 + VOLUMES and 2 <= sum(",val," in line for line in text) <= 10


# ---------------------------------------------------------------------------------------------------------------------
# What users of other programs type
# ---------------------------------------------------------------------------------------------------------------------

def coming_from():
    """The commands in the tables of docs/coming_from.md, in order and each once."""
    found = re.findall(r"`(OM_\w+\.py [^`]* --out [^`]*)`", TEXT["docs/coming_from.md"])
    return list(dict.fromkeys(found))


def bring_others(folder):
    """Files of the page, small: two synthetic subjects, masks, a series, and matrices of FSL and of ANTs."""
    write_dataset(folder, range(2), 24)
    images, labels = (sorted((folder / name).glob("*.nii.gz")) for name in ("imagesTr", "labelsTr"))
    for name, source in (("F", images[0]), ("M", images[1]), ("OTHER", images[1]), ("M_label", labels[1])):
        shutil.copy(source, folder / f"{name}.nii.gz")
    volume = nibabel.load(images[0])
    array = volume.get_fdata(dtype=np.float32)
    for name in ("FMASK", "MMASK"):
        nibabel.save(nibabel.Nifti1Image(np.ones_like(array), volume.affine), folder / f"{name}.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.stack([array] * 3, -1), volume.affine), folder / "BOLD.nii.gz")
    np.savetxt(folder / "A.mat", np.eye(4))
    write_matrix(folder / "P_0GenericAffine.mat", np.eye(4))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_for_users_of_other_programs_run(tmp_path):
    bring_others(tmp_path)
    lines = coming_from()
    assert len(lines) >= 18
    for line in lines:
        program, *words = shlex.split(line)
        done = launching.run([sys.executable, ROOT / program, *words], cwd=tmp_path, timeout=300,
                             stderr=subprocess.STDOUT)
        assert done.returncode == 0 and "Traceback" not in done.stdout, f"{line}\n{done.stdout[-2000:]}"
        out = tmp_path / words[words.index("--out") + 1]
        assert list(out.glob("*warped*.nii.gz")) or (out / "aligned.nii.gz").exists(), line
