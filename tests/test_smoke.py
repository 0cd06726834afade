"""The smoke ladder: exact parameter counts, what it reads from NCCL's log, and real climbs on the CPU."""
import importlib.util
import json
import os
import sys

import pytest
import torch

from Runtime.errors import InputError
from Scripts.smoke import ladder, results
from tests import launching
from tests.tiny import ROOT

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NCCL = """\
gpu06:4015539:4015652 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.0.0.2<0>
gpu06:4015539:4015652 [0] NCCL INFO Using network IB
gpu06:4015539:4015652 [0] NCCL INFO P2P Chunksize set to 131072
gpu06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
gpu06:4015539:4015652 [0] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
"""


def climb(folder, *words, python=sys.executable, device="cpu", where=("--no-slurm",), **variables):
    """The script as a person calls it, in the environment of no job but for `variables`. Returns what it has printed,
    and its exit code."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE") and not name.startswith(("SLURM_", "SMOKE_"))}
    environment.update(OMP_NUM_THREADS="1", PYTHON=str(python), SMOKE_LOGS=str(folder), **variables)
    command = ["bash", str(ROOT / "Scripts/bash_smoke.sh"), "--device", device, "--scale", "0.02", "--steps", "8",
               "--seconds", "120", *where, *words]
    ended = launching.run(command, env=environment, timeout=600)
    return ended.stdout + ended.stderr, ended.returncode


def python_where_rank_1(path, does):
    """An interpreter for the script that is different for rank 1."""
    path.write_text(f"#!/usr/bin/env bash\nif [[ ${{RANK:-}} == 1 ]]; then {does}; fi\nexec {sys.executable} \"$@\"\n")
    path.chmod(0o755)
    return path


def figures(folder, step):
    return json.loads(next(folder.glob(f"*/{step}.json")).read_text())


def test_networks_have_exactly_the_sizes_that_are_promised(capsys):
    ladder.main(["--count"])
    printed = capsys.readouterr().out.split()
    assert [word for word in printed if "," in word and word[0].isdigit()] == [
        "25,175,040", "100,681,728", "805,429,248", "1,073,905,664"]


@pytest.mark.parametrize("scale", [0.001, 0.02, 0.3])
def test_scaled_networks_keep_their_form(scale):
    for step, (full, blocks) in ladder.STEPS.items():
        width = ladder.hidden(step, scale)
        assert width % 16 == 0 and width >= 16 and abs(width - full * scale) <= 16
        expected = blocks * (8 * width ** 2 + 5 * width) if blocks else 24 * width ** 2 + 9 * width
        assert ladder.count(ladder.network(step, scale, "meta")) == expected


@pytest.mark.parametrize("lines, expected", [
    (NCCL, ["NET/IB", "P2P"]),
    ("a:1:2 [0] NCCL INFO Channel 00 : 0[1e0] -> 1[1e0] [receive] via NET/Socket/0\n", ["NET/Socket"]),
    ("a:1:2 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via SHM/direct/direct\n", ["SHM"]),
    ("n:1:2 [0] NCCL INFO Channel 03/0 : 0[d6000] -> 2[de000] via P2P/IPC comm 0x9bbf3b0 nRanks 4096\n"
     "n:1:2 [0] NCCL INFO Channel 00/0 : 9[d6000] -> 0[d6000] [receive] via NET/AWS Libfabric/2/GDRDMA comm 0x9\n",
     ["NET/AWS Libfabric", "P2P"]),
    ("h:9:1 [1] NCCL INFO Channel 01/0 : 26[2] -> 33[1] [receive] via NET/IBext_v8/4\n", ["NET/IBext_v8"]),
    ("a:1:2 [0] NCCL INFO Using network Socket\na:1:2 [0] NCCL INFO Connected all rings\n", []),
])
def test_transport_is_that_of_the_channels_and_not_of_the_offers(lines, expected):
    assert results.transports(lines) == expected


def test_one_device_and_two_ranks_pass(tmp_path):
    printed, code = climb(tmp_path, "--only", "01", "02")
    assert code == 0, printed
    lines = printed.splitlines()
    assert [line[:9] for line in lines if line.startswith("PASSED")] == ["PASSED 01", "PASSED 02"]
    assert lines[-2].startswith("01    PASSED") and lines[-1].startswith("02    PASSED")
    for step, ranks, transport in (("01", 1, "none"), ("02", 2, "gloo")):
        found = figures(tmp_path, step)
        assert (found["ranks"], found["transport"], found["nodes"]) == (ranks, transport, 1)
        assert found["parameters"] == ladder.count(ladder.network(step, 0.02, "meta"))
        assert found["after"] < 0.9 * found["before"] and found["reload"] < 1e-5
        assert found["samples"] == pytest.approx(found["rate"] * 32 * ranks) and list(found["files"]) == ["state.pt"]
        assert found["rate"] > 0 and 0.05 < found["peak"] < 8
    assert "with --scale 1" in lines[-1] and "samples/s" in printed and "state.pt" in printed
    assert not list(tmp_path.glob("*/*.checkpoint"))


def test_the_recorded_figures_stand_beside_those_of_the_full_size(tmp_path):
    found = {"device": "cuda", "ranks": 2, "nodes": 1, "parameters": 1, "before": 1.0, "after": 0.5, "rate": 4.0,
             "samples": 256.0, "peak": 9.0, "transport": "P2P", "scale": 1.0}
    (tmp_path / "03.json").write_text(json.dumps(found))
    assert "4.3 steps/s, 9.68 GB" in results.table(tmp_path, ["03"])


def test_the_deepspeed_settings_are_the_recorded_ones():
    settings = ladder.ZERO1
    assert settings["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8,
                                             "overlap_comm": True, "contiguous_gradients": True}
    assert settings["gradient_clipping"] == 1.0 and settings["optimizer"]["type"] == "AdamW"


def test_rank_that_dies_is_named_with_its_last_word(tmp_path):
    python = python_where_rank_1(tmp_path / "python", "echo no driver on this node >&2; exit 7")
    printed, code = climb(tmp_path, "--only", "02", python=python)
    assert code == 1
    assert "\nFAILED 02 rank 1 ended with exit code 7; its log ends: no driver on this node\n" in printed
    assert printed.splitlines()[-1].startswith("02    FAILED")


def test_error_of_a_rank_is_told_with_the_end_of_its_log(tmp_path):
    python = python_where_rank_1(tmp_path / "python", f'exec {sys.executable} "${{@/0.02/0.04}}"')
    printed, code = climb(tmp_path, "--only", "02", python=python)
    assert code == 1
    assert "FAILED 02 rank " in printed and "appears not to match" in printed.partition("FAILED 02 rank ")[2]
    assert "rank1.log ends:" in printed


def test_srun_gets_neither_all_devices_of_the_job_nor_what_a_user_has_set_for_its_output(tmp_path):
    """Of sbatch --gpus, and each srun would ask for all of them."""
    srun = f'env > {tmp_path}/told; echo "$*" > {tmp_path}/words; echo no task >&2; exit 1'
    for name, body in {"srun": srun, "python": "echo cpu 1 29500",
                       "scontrol": '[[ "$*" != "show hostnames"* ]] || echo n1'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_GPUS": "4", "SLURM_LABELIO": "1", "SLURM_CPU_BIND": "quiet", "SLURM_CPU_BIND_TYPE": "none"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]",
           "SLURM_CPUS_PER_TASK": "12"}
    printed, code = climb(tmp_path, "--only", "04", python=tmp_path / "python", where=(), **job, **given,
                          PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 1 and "FAILED 04 srun cannot run a task on n1: no task" in printed
    lines = (tmp_path / "told").read_text().splitlines()
    told = {line.partition("=")[0] for line in lines}
    assert "SRUN_CPUS_PER_TASK=12" in lines, "srun of Slurm 22.05 and newer gives a task one core without it"
    assert " --cpus-per-task=12 " in (tmp_path / "words").read_text(), "and that of 23.11 and newer may end"
    assert set(job) <= told and not told & set(given)


@pytest.mark.slow
def test_hung_rank_ends_with_the_time_limit(tmp_path):
    python = python_where_rank_1(tmp_path / "python", "exec sleep 100")
    printed, code = climb(tmp_path, "--only", "02", "--seconds", "30", python=python)
    assert code == 1
    assert "rank 1 of 2 did not arrive within 15 s" in printed.partition("FAILED 02 ")[2]


@pytest.mark.parametrize("words", [["--only", "05"], ["--scale", "0"], ["--device", "tpu"], ["--fast"]])
def test_bad_command_is_refused(tmp_path, words):
    printed, code = climb(tmp_path, *words)
    assert code == 43 and "error: " in printed and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(DEEPSPEED, reason="DeepSpeed is here")
def test_missing_deepspeed_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "")
    with pytest.raises(InputError, match="pip install -r requirements-smoke.txt"):
        ladder.start_zero1(ladder.network("03", 0.02, "cpu"), torch.device("cpu"), 1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed: pip install -r requirements-smoke.txt")
def test_zero1_by_deepspeed_passes(tmp_path):
    printed, code = climb(tmp_path, "--only", "03", "04")
    assert code == 0, printed
    assert "ranks: 2 (one host only, no Slurm)" in printed.partition("PASSED 04 ")[2].splitlines()[0]
    for step in ("03", "04"):
        found = figures(tmp_path, step)
        assert found["ranks"] == 2 and found["after"] < 0.9 * found["before"] and found["reload"] < 1e-5
        assert found["parameters"] == ladder.count(ladder.network(step, 0.02, "meta"))
