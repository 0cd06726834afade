"""A Python that is too old, and a system without fcntl: one sentence, or no difference."""
import argparse
import ast
import errno
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from Runtime.errors import InputError, MemoryShort, run_program
from tests import launching
from tests.tiny import ROOT

FOLDERS = (".", "Dataloader", "Scripts", "Scripts/preflight", "Scripts/smoke")
PROGRAMS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))
            if '__name__ == "__main__"' in path.read_text()]
OTHERS = ("numpy", "torch", "tqdm", "scipy", "nibabel", "yaml", "matplotlib")
SENTENCE = r"error: Python 3\.11 or newer is needed, and \S+ is 3\.\d+: use .venv/bin/python, .*\n"
# Those of the machine, and those that pyenv has.
OLD = [found for version in range(6, 11) for found in [
    shutil.which(f"python3.{version}"), *Path.home().glob(f".pyenv/versions/3.{version}.*/bin/python")] if found]


@pytest.mark.parametrize("program", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_an_old_python_ends_in_one_sentence_before_anything_else_is_imported(program, monkeypatch, capsys):
    ast.parse(program.read_text(), feature_version=(3, 6))  # a newer notation would be a SyntaxError there
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    for name in [name for name in sys.modules if name.split(".")[0] == "Runtime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(ROOT))
    for name in OTHERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 43 and re.fullmatch(SENTENCE, capsys.readouterr().err)


def test_there_are_programs():
    names = {path.name for path in PROGRAMS}
    assert names >= {"OM_train_3modes.py", "OM_register.py", "demo.py", "preflight.py", "ladder.py", "synthetic.py"}
    ast.parse((ROOT / "Runtime/__init__.py").read_text(), feature_version=(3, 6))


@pytest.mark.slow
@pytest.mark.skipif(not OLD, reason="no Python older than 3.11 here")
def test_real_old_pythons_say_the_same():
    for python in OLD:
        for words in (["OM_register.py"], ["Scripts/demo.py"], ["-m", "Supervisor.attempts"]):
            ended = launching.run([str(python), "-B", *words], cwd=ROOT, timeout=60)
            if "pyenv: " in ended.stderr:  # a shim whose version is not chosen
                continue
            assert ended.returncode == 43 and re.fullmatch(SENTENCE, ended.stderr), (python, words, ended.stderr)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_names_an_old_python(tmp_path):
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    old = tmp_path / "python3.9"
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 9\nexec {shlex.quote(sys.executable)} -c '
                   '"import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$2"\n')
    old.chmod(0o755)
    ended = subprocess.run(["make", "-s", "venv", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True,
                           timeout=60)
    assert ended.returncode and "Traceback" not in ended.stderr and not (tmp_path / ".venv").exists()
    assert f"error: Python 3.11 or newer is needed, and {old} is 3.9: name another one" in ended.stderr


@pytest.mark.slow
def test_the_tools_work_without_fcntl(tmp_path):
    """As on Windows. A real registration, with its lock."""
    script = """
import sys
sys.modules["fcntl"] = None
import numpy as np
import OM_augment, OM_evaluate, OM_register
from Dataloader.synthetic import make_subject
from Dataloader.nifti import write_volume
for seed in (0, 1):
    write_volume(f"{seed}.nii.gz", make_subject(seed, (16, 18, 20))["image"], np.eye(4))
sys.exit(OM_register.main("--fixed 0.nii.gz --moving 1.nii.gz --model none --affine none --refine 2 --device cpu "
                          "--no-picture --out out".split()))
"""
    ended = launching.run([sys.executable, "-c", script], cwd=tmp_path, timeout=200,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0 and (tmp_path / "out/warped.nii.gz").is_file(), ended.stderr


@pytest.mark.parametrize("program", ["OM_prepare", "OM_train_3modes"])
def test_without_fcntl_a_training_is_one_sentence(program, tmp_path):
    script = f"import sys; sys.modules['fcntl'] = None; import {program}"
    ended = launching.run([sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 43 and ended.stderr.startswith("error: preparing, training and exporting need")
    assert ended.stderr.count("\n") == 1 and "WSL 2" in ended.stderr


def test_a_name_that_standard_output_cannot_encode_ends_no_training():
    program = ("from Runtime.errors import unbreakable_output\nwith unbreakable_output():\n"
               "    print('volumes added: 1 (caf\\udce9_7)')")
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert (found.returncode, found.stdout) == (0, "volumes added: 1 (caf\\udce9_7)\n"), found.stderr


def test_a_program_without_any_output_runs():
    """As under pythonw.exe."""
    program = ("import argparse, sys\nsys.stdout = sys.stderr = None\nfrom tqdm import tqdm\n"
               "from Runtime.errors import run_program\n"
               "sys.exit(run_program(lambda args: [None for _ in tqdm([1])] and 7, argparse.Namespace(out='x')))")
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("outputs, code, said", [
    ("2> /dev/full", 7, ""), ("> /dev/full 2>&1", 43, ""), ("| true", 141, "a warning\n"),
    ("> /dev/full", 43, "a warning\nerror: standard output: No space left on device; make room, or redirect it "
                        "elsewhere.\n")])
def test_an_output_that_is_not_taken_is_no_fault_of_the_results(outputs, code, said, unbuffered):
    """As of OM_prepare.py, whose faults of the disk are those of its cache."""
    program = """if True:
        import argparse, sys, time
        from Runtime.errors import InputError, run_program
        def run(args):
            try:
                print("a warning", file=sys.stderr)
                time.sleep(0.2)  # until nobody reads
                print("the results")
            except OSError as error:
                raise InputError("data.cache: reading or writing failed") from error
            return 7
        sys.exit(run_program(run, argparse.Namespace(out="out")))"""
    shell = f'set -o pipefail; "$@" {outputs}'
    done = subprocess.run(["bash", "-c", shell, "bash", sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words, outputs, code", [
    (("OM_export.py", "--help"), "| true", 0), (("-m", "omnimorph", "--help"), "| true", 0),
    (("-m", "omnimorph.explain", "Bus error"), "| true", 0),
    (("OM_export.py", "--hell"), "2> /dev/full", 43), (("-m", "omnimorph", "hell"), "2> /dev/full", 43)])
def test_nor_is_it_before_a_program_begins(words, outputs, code):
    """Python would print a traceback and exit with 120 or 1."""
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$@" {outputs}', "bash", sys.executable, *words], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("number, name, remedy", [
    (errno.EROFS, "out/page.html", "results cannot be written there; name another --out"),
    (errno.EROFS, "", "results cannot be written there; name another --out"),
    (errno.ENOSPC, "out/page.html", "results cannot be written there; make room or name another --out"),
    (errno.ENOSPC, "cache/volumes", "results cannot be written there; make room"),
    (errno.EACCES, "out", "results cannot be written there; name another --out"),
    (errno.ENAMETOOLONG, "out/a_to_b", "results cannot be written there; shorten the names of the volumes"),
    (errno.EFBIG, "out/field.nii", "results cannot be written there; raise this shell's limit on the size of a file "
                                   "(ulimit -f), or use a file system without one"),
    (errno.EACCES, "volume.nii", "it cannot be read or written")])
def test_a_file_that_fails_is_named_with_what_to_do(tmp_path, capsys, number, name, remedy):
    def fail(args):
        raise OSError(number, os.strerror(number), str(tmp_path / name))

    assert run_program(fail, argparse.Namespace(out=tmp_path / "out")) == 43
    assert capsys.readouterr().err == f"error: {tmp_path / name}: {os.strerror(number)}; {remedy}.\n"


def test_a_gpu_that_another_process_holds_is_one_sentence(tmp_path, capsys):
    def fail(args):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be")

    assert run_program(fail, argparse.Namespace(out=tmp_path / "out")) == 43
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'out'}: another process holds the GPU (CUDA error")
    assert said.count("\n") == 1


@pytest.mark.parametrize("kind", [InputError, MemoryShort])
def test_a_sentence_cannot_move_the_cursor_or_break_its_line(kind):
    assert str(kind("bad name \x1b[2J\r of caf\udce9\ngrüße")) == "bad name \\x1b[2J\\r of caf\\udce9\ngrüße"
