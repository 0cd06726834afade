"""Containers: the definitions of the images, and an interpreter of several words that starts one of them.

No image is built here: that would fetch gigabytes. The definitions are checked for form, for files that are not there
and for what they install; the stand-in for Apptainer starts real processes as Apptainer does.
"""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from Supervisor.attempts import history, read_lines
from tests import launching
from tests.launching import until
from tests.test_install import PROGRAMS, copy_sources
from tests.tiny import ROOT, arguments, launcher_environment, make_data

FOLDER = ROOT / "Scripts/containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
DEFINITION = (FOLDER / "omnimorph.def").read_text()
INSTALL = FOLDER / "install.sh"
HADOLINT = Path(sys.executable).parent / "hadolint"
SECTIONS = {"arguments", "files", "post", "environment", "test", "runscript", "help"}
# Apptainer stays the parent of what it runs and passes signals on, those too that it was told to ignore; what it runs
# begins with the default answers to signals, and dies with it.
APPTAINER = f"#!{sys.executable} -S" + """
import ctypes, os, signal, subprocess, sys

words = sys.argv[1:]
if words.pop(0) != "exec":
    sys.exit("FATAL: unknown command")
while words[0].startswith("--"):
    flag = words.pop(0)
    if flag == "--bind":
        words.pop(0)
    elif flag != "--nv":
        sys.exit("FATAL: unknown flag " + flag)
image = words.pop(0)
if not os.path.isfile(image):
    print("FATAL: could not open image " + image, file=sys.stderr)
    sys.exit(255)
with open(os.environ["FOLDER"] + "/apptainer.log", "a") as log:
    log.write(image + " " + " ".join(words) + "\\n")
prctl = ctypes.CDLL(None).prctl
child = None
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda received, frame: child and child.send_signal(received))
child = subprocess.Popen(words, preexec_fn=lambda: prctl(1, signal.SIGKILL),
                         env={**os.environ, "APPTAINER_CONTAINER": image})
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


# ---------------------------------------------------------------------------------------------------------------------
# The definitions
# ---------------------------------------------------------------------------------------------------------------------

def instructions(text):
    """[(word, rest)] of a Dockerfile, lines that are continued joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def sections(text):
    """{name: lines} of an Apptainer definition, its header under ""."""
    found, name = {"": []}, ""
    for line in text.splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            found[name] = []
        elif line.strip() and not line.lstrip().startswith("#"):
            found[name].append(line.strip())
    return found


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint of requirements-test.txt is not installed")
@pytest.mark.parametrize("addition, found", [("", ""), ("RUN cd /tmp && sudo ls\n", "DL3004")])
def test_the_linter_has_nothing_to_say(addition, found, tmp_path):
    (tmp_path / "Dockerfile").write_text(DOCKERFILE + addition)
    done = subprocess.run([HADOLINT, tmp_path / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (not found) and found in done.stdout, done.stdout


def test_both_definitions_start_from_one_image_and_install_by_one_script():
    docker, apptainer = instructions(DOCKERFILE), sections(DEFINITION)
    assert set(apptainer) == {"", *SECTIONS} and apptainer[""][0] == "Bootstrap: docker"
    [base] = [rest for word, rest in docker if word == "FROM"]
    assert base == "docker.io/library/ubuntu:24.04" and apptainer[""][1] == "From: ubuntu:24.04"
    assert ("ARG", "DEVICE=cuda") in docker and apptainer["arguments"] == ["device=cuda"]
    assert [rest for word, rest in docker if word == "RUN" and 'install.sh \\"$DEVICE\\"' in rest]
    assert apptainer["post"][0] == "bash /opt/omnimorph/install.sh {{ device }}"


def test_what_they_copy_is_there_and_is_all_that_the_package_is_built_from(tmp_path):
    copied = [rest.split()[:-1] for word, rest in instructions(DOCKERFILE) if word == "COPY"]
    docker = {name for names in copied for name in names}
    apptainer = {line.split()[0] for line in sections(DEFINITION)["files"]}
    assert docker == apptainer and all(list(ROOT.glob(name)) for name in docker)
    allowed = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert allowed == docker
    # Of these files alone the package can be built.
    source = copy_sources(tmp_path / "whole")
    for name in docker:
        for path in source.glob(name):
            target = tmp_path / "image" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    launching.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path / "built"],
                  cwd=tmp_path / "image", check=True)
    assert {f"{program}.py" for program in PROGRAMS.values()} < {
        path.name for path in (tmp_path / "built/omnimorph").iterdir()}


def installed_by(device, folder):
    """What install.sh calls for a device, with stand-ins for the programs that would fetch something."""
    (folder / "requirements.txt").write_text((ROOT / "requirements.txt").read_text())
    script = folder / "install.sh"
    script.write_text(INSTALL.read_text().replace("/etc/apt", str(folder)).replace("/var/lib", str(folder)))
    for name in ("apt-get", "curl", "gpg", "pip", "python3"):
        # The venv that python3 makes has a pip.
        made = f'mkdir -p {folder}/bin; cp {folder}/tools/pip {folder}/bin' if name == "python3" else ":"
        (folder / "tools").mkdir(exist_ok=True)
        (folder / "tools" / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{made}\n')
        (folder / "tools" / name).chmod(0o755)
    (folder / "sources.list.d").mkdir()
    done = launching.run(["bash", script, device], env={**os.environ, "PATH": f"{folder}/tools:{os.environ['PATH']}"})
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done, calls


@pytest.mark.parametrize("device, index, package", [
    ("cuda", "", "gcc"), ("rocm7.1", "--index-url https://download.pytorch.org/whl/rocm7.1 ", "libnuma1"),
    ("xpu", "--index-url https://download.pytorch.org/whl/xpu ", "libze-intel-gpu1"),
    ("cpu", "--index-url https://download.pytorch.org/whl/cpu ", "gcc")])
def test_each_device_gets_its_torch_and_the_same_requirements(device, index, package, tmp_path):
    done, calls = installed_by(device, tmp_path)
    assert done.returncode == 0, done.stderr
    torch = re.search(r"^torch==.*$", (ROOT / "requirements.txt").read_text(), re.M)[0]
    pips = [call for call in calls if call.startswith("pip ")]
    assert pips == [f"pip install --no-cache-dir {index}{torch}",
                    f"pip install --no-cache-dir -r {tmp_path}/requirements.txt", "pip check"]
    assert package in [call for call in calls if call.startswith("apt-get install")][-1].split()
    assert (tmp_path / "sources.list.d/intel-graphics.list").exists() == (device == "xpu")


@pytest.mark.parametrize("device", ["", "rocm", "tpu"])
def test_another_device_is_one_sentence(device, tmp_path):
    done, calls = installed_by(device, tmp_path)
    assert done.returncode == 43 and not calls
    assert done.stderr == ("error: the device is cuda, rocm and its version such as rocm7.1, xpu or cpu, not "
                           f'"{device}".\n')


# ---------------------------------------------------------------------------------------------------------------------
# PYTHON="apptainer exec ..."
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def container(tmp_path):
    """Variables with which the launcher and the scripts run Python in an image."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apptainer").write_text(APPTAINER)
    (tmp_path / "bin/apptainer").chmod(0o755)
    (tmp_path / "om.sif").write_text("")
    words = f"apptainer exec --nv --bind /scratch:/data {tmp_path}/om.sif {sys.executable}"
    return {"PYTHON": words, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "FOLDER": str(tmp_path)}


def calls_in(folder):
    """The commands that ran in the image, as lists of words."""
    lines = (folder / "apptainer.log").read_text().splitlines()
    assert all(line.startswith(f"{folder}/om.sif {sys.executable} ") for line in lines)
    return [shlex.split(line)[2:] for line in lines]


def test_a_job_script_runs_its_program_in_the_image(container, tmp_path):
    done = launching.run(["bash", ROOT / "Scripts/bash_infer.sh", "evaluate", "--out", "two words"], cwd=tmp_path,
                         env={**os.environ, **container, "PYTHON": f"apptainer exec {tmp_path}/om.sif echo in here:"})
    assert done.returncode == 0 and done.stdout == f"in here: {ROOT}/OM_evaluate.py --out two words\n", done.stderr


def test_an_interpreter_whose_path_has_blanks_is_one_word(tmp_path):
    python = tmp_path / "my own python"
    python.write_text('#!/bin/bash\necho "$1"\n')
    python.chmod(0o755)
    done = launching.run(["bash", ROOT / "Scripts/bash_infer.sh", "evaluate"], cwd=tmp_path,
                         env={**os.environ, "PYTHON": str(python)})
    assert done.returncode == 0 and done.stdout == f"{ROOT}/OM_evaluate.py\n", done.stderr


def test_an_image_that_is_not_there_stops_the_launcher(container, tmp_path):
    (tmp_path / "om.sif").unlink()
    done = launching.run(["bash", ROOT / "bash_train_multi_nodes.sh", *arguments(tmp_path)], cwd=ROOT,
                         env={**launcher_environment(1), **container, "RANKS": ""})
    assert done.returncode == 43 and f"could not open image {tmp_path}/om.sif" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_launch_in_the_image_saves_when_asked_and_ends_when_done(container, tmp_path):
    """Two ranks, each a process in the image: a signal reaches them through Apptainer, and the next launch goes on."""
    make_data(tmp_path)
    command = ["bash", ROOT / "bash_train_multi_nodes.sh", *arguments(tmp_path, run__epochs=40)]
    environment = {**launcher_environment(2), **container}
    run = tmp_path / "Models/demo_om_net"
    with launching.running(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        until(lambda: any(line["event"] == "step" for line in read_lines(run / "rank0.jsonl")), 120)
        process.terminate()
        assert process.wait(60) == 42
    assert [line["cause"] for line in history(run) if line["event"] == "end"] == ["planned restart"]
    command = ["bash", ROOT / "bash_train_multi_nodes.sh", *arguments(tmp_path, run__epochs=2)]
    done = launching.run(command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    programs = [words[0] for words in calls_in(tmp_path)]
    assert programs.count("OM_train_3modes.py") == 4 and programs.count("-m") >= 6
    assert json.loads((run / "manifest.json").read_text())["checkpoints"]
