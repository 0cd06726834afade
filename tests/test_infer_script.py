"""Scripts/bash_infer.sh as a person calls it, and as Slurm runs its copy of it."""
import os
import shutil
import sys

import pytest

from tests import launching
from tests.tiny import ROOT, stand_in

SCRIPT = ROOT / "Scripts/bash_infer.sh"


def call(*words, script=SCRIPT, folder=ROOT, **variables):
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name and name != "CLUSTER"}
    return launching.run(["bash", script, *words], cwd=folder,
                         timeout=120, env={**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables})


@pytest.mark.parametrize("task", ["prepare", "register", "augment", "evaluate"])
def test_each_task_reaches_its_program(task, tmp_path):
    done = call(task, "--help", PYTHON=stand_in(tmp_path / "python", 'echo "$@"'))
    assert done.returncode == 0 and done.stdout == f"{ROOT}/OM_{task}.py --help\n", done.stderr
    assert (ROOT / f"OM_{task}.py").is_file()


def test_a_relative_python_is_that_of_the_repository_and_one_that_is_not_there_is_one_sentence(tmp_path):
    stand_in(tmp_path / "python", 'echo "$@"')
    done = call("evaluate", "--help", folder=tmp_path, PYTHON=os.path.relpath(tmp_path / "python", ROOT))
    assert done.returncode == 0 and done.stdout == f"{ROOT}/OM_evaluate.py --help\n", done.stderr
    lost = call("evaluate", "--help", folder=tmp_path, PYTHON="no/python")
    assert lost.returncode == 43 and lost.stderr.startswith("error: PYTHON=no/python: there is no such program")


def test_paths_are_those_of_where_the_command_was_typed(tmp_path):
    python = stand_in(tmp_path / "python", 'echo "$PWD: ${@:2}"')
    done = call("evaluate", "--fixed-label", "F.nii.gz", "--out", "scores", folder=tmp_path, PYTHON=python)
    assert done.returncode == 0 and done.stdout == f"{tmp_path}: --fixed-label F.nii.gz --out scores\n", done.stderr
    assert "evaluate on" in done.stderr


def test_the_jobs_of_an_array_register_their_parts(tmp_path):
    python = stand_in(tmp_path / "python", 'echo "$@"')
    words = ["register", "--pairs", "pairs.csv", "--out", "out"]
    numbers = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "20",
               "SLURM_ARRAY_TASK_COUNT": "20"}
    assert call(*words, PYTHON=python, **numbers).stdout.strip().endswith("--out out --part 3/20")
    assert call(*words, "--part", "1/2", PYTHON=python, **numbers).stdout.strip().endswith("--part 1/2")
    done = call(*words, PYTHON=python, **{**numbers, "SLURM_ARRAY_TASK_MIN": "0"})
    assert done.returncode == 43 and "--array=1-N" in done.stderr
    # The one that joins them may be submitted from one of them, and inherits its variables.
    stand_in(tmp_path / "scontrol", 'echo "JobId=902 JobName=join Restarts=0 BatchFlag=1"')
    join = {**numbers, "SLURM_ARRAY_JOB_ID": "100", "SLURM_JOB_ID": "902", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert call(*words, PYTHON=python, **join).stdout.strip().endswith("--out out")


def test_bad_input_passes_its_exit_code_and_sentence_on(tmp_path):
    done = call("register", "--fixed", tmp_path / "none.nii.gz", "--moving", tmp_path / "none.nii.gz", "--model",
                "none", "--affine", "--out", tmp_path / "out")
    assert done.returncode == 43 and "none.nii.gz" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words, sentence", [
    ([], "name a task: prepare, register, augment or evaluate"),
    (["infer"], "infer is no task: it is prepare, register, augment or evaluate")])
def test_an_unknown_task_is_one_sentence(words, sentence):
    done = call(*words)
    assert done.returncode == 43 and not done.stdout
    assert done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1


def test_settings_of_the_site_limits_and_exit_code(tmp_path):
    python = stand_in(tmp_path / "python", 'env; echo "core=$(ulimit -c)"; echo "$@"; exit 7')
    done = call("augment", "--out", "two words", PYTHON=python, CLUSTER="gilbreth", RANK="3")
    lines = done.stdout.splitlines()
    assert done.returncode == 7 and lines[-1] == f"{ROOT}/OM_augment.py --out two words"
    assert {"NCCL_P2P_LEVEL=NVL", "NODE_COUNT=1", "core=0", "OMP_NUM_THREADS=1"} <= set(lines)
    assert "RANK=3" not in lines, "a single process is no rank"


@pytest.mark.parametrize("words, given, passed, said", [
    ("augment --model M --out A", "SLURM_JOB_GPUS=0", "--model M --out A --device auto", False),
    ("augment --model M --out A", "SLURM_GPUS_ON_NODE=0", "--model M --out A", False),
    ("augment --model M --device cpu", "SLURM_GPUS_ON_NODE=1", "--model M --device cpu", False),
    ("augment --model M --device=cpu", "SLURM_JOB_GPUS=0", "--model M --device=cpu", False),
    ("augment --model none", "SLURM_GPUS_ON_NODE=1", "--model none", True),
    ("augment --model=none", "SLURM_JOB_GPUS=0", "--model=none", True),
    ("augment --model none", "SLURM_GPUS_ON_NODE=0", "--model none", False),
    ("register --model none", "SLURM_JOB_GPUS=0", "--model none", False),
    ("evaluate --pairs P", "SLURM_JOB_GPUS=0", "--pairs P", True),
    ("prepare --config C", "SLURM_GPUS_ON_NODE=1", "--config C", True)])
def test_no_job_holds_a_device_that_it_does_not_use(tmp_path, words, given, passed, said):
    python = stand_in(tmp_path / "python", 'echo "${@:2}"')
    done = call(*words.split(), PYTHON=python, **dict([given.split("=")]))
    assert done.stdout.strip() == passed
    assert ("has no use for the device that this job holds: submit it with --gres=none" in done.stderr) == said


def test_the_copy_in_slurms_spool_folder(tmp_path):
    copy, python = shutil.copy(SCRIPT, tmp_path / "slurm_script"), stand_in(tmp_path / "python", 'echo "$@"')
    done = call("evaluate", "--help", script=copy, folder=tmp_path, PYTHON=python, SLURM_SUBMIT_DIR=str(ROOT),
                SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="lumi")
    assert done.returncode == 0 and done.stdout == f"{ROOT}/OM_evaluate.py --help\n"
    assert "settings of lumi, job 17" in done.stderr
    lost = call("evaluate", "--help", script=copy, folder=tmp_path)
    assert lost.returncode == 43 and lost.stderr.startswith("error: there is no OM_train_3modes.py in")
