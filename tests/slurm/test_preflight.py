"""The preflight in real allocations: within a minute each wrong setting is named, and a healthy allocation passes."""
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from Scripts.preflight.checks import node_local
from tests.tiny import ROOT, arguments, make_data

pytestmark = pytest.mark.slurm

# What bash_train_multi_nodes.sh does, without what comes before and after it.
DRIVER = r"""
NODES=$(scontrol show hostnames | paste -sd ' ') TASKS_PER_NODE=$SLURM_NTASKS_PER_NODE
MASTER_PORT=$("$PYTHON" -c 'from Supervisor.attempts import free_port; print(free_port())')
export NODES TASKS_PER_NODE MASTER_PORT
timeout --kill-after=5 "$PREFLIGHT_SECONDS" srun --kill-on-bad-exit=0 --export=ALL bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec "$TASK_PYTHON" Scripts/preflight/preflight.py --task "$@"' task "$@" \
    | "$PYTHON" Scripts/preflight/preflight.py --collect "$@"
"""
HEALTHY = {"n1": 2, "n2": 2}


@pytest.fixture
def shared():
    """A folder that is not under /tmp."""
    parent = ROOT / "Logs"
    if node_local(parent):
        parent = Path.home()
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="preflight-test-", dir=parent))
    yield folder
    shutil.rmtree(folder)


def preflight(slurm, words, tasks=2, devices=None, **variables):
    """One preflight of n1 and n2 in an allocation of its own.

    devices: what torch sees on each node; None: what it really sees. Returns (exit code, EXCLUDED, what it printed).
    """
    environment = {name: value for name, value in slurm.items()
                   if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TMPDIR") and "OMNIMORPH" not in name}
    environment.update(PYTHON=sys.executable, TASK_PYTHON=sys.executable, PREFLIGHT_SECONDS="50", OMP_NUM_THREADS="1",
                       MASTER_ADDR="127.0.0.1")
    if devices:
        environment.update(FAKE_DEVICES=json.dumps(devices), PYTHONPATH=str(ROOT / "tests/slurm/inject"))
    began = time.time()
    ended = subprocess.run(
        ["timeout", "90", "salloc", "--quiet", "--nodelist=n1,n2", "--nodes=2", f"--ntasks-per-node={tasks}",
         "--gres=gpu:2", "bash", "-c", DRIVER, "driver", *words], cwd=ROOT, env={**environment, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert time.time() - began < 60, ended.stderr
    excluded = ended.stdout.strip().removeprefix("EXCLUDED=")
    return ended.returncode, excluded, ended.stderr


def row(printed, check, state):
    """The cells of the one row of the table with this check and state."""
    found = [cells for line in printed.splitlines() if (cells := re.split(r"  +", line))[:2] == [check, state]]
    assert len(found) == 1, printed
    return found[0]


def test_a_healthy_allocation_passes(slurm, shared):
    make_data(shared)
    words = arguments(shared, run__device="auto", data__in_memory=False, data__num_workers=1)
    # Findings longer than the lines that srun keeps whole.
    code, excluded, printed = preflight(slurm, words, devices=HEALTHY, NCCL_SOMETHING="x" * 5000)
    assert (code, excluded) == (0, ""), printed
    assert "preflight: passed on 2 nodes x 2 ranks" in printed and "FAILED" not in printed and "skipped" not in printed
    assert row(printed, "device", "ok")[2:5] == ["2 nodes", "4 ranks", "2 x cpu"]
    need = r"needs [01]\.\d of [\d.]+ GiB: 2 ranks x \(0\.\d\d \+ 1 workers x 0\.19"
    assert re.search(need, row(printed, "memory", "ok")[4])
    assert re.search(r"4 ranks by gloo, 4 MiB at [\d.e-]+ GiB/s", row(printed, "collective", "ok")[4])
    report = json.loads(next((shared / "Logs").glob("preflight_*.json")).read_text())
    assert report["code"] == 0 and report["nodes"] == ["n1", "n2"] and len(report["findings"]) == 4 * 8 + 2 * 3
    assert not list((shared / "Logs").glob(".*")) and not list((shared / "Models").iterdir())


def test_a_node_without_a_device(slurm, shared):
    found = preflight(slurm, arguments(shared, run__device="auto"), devices={"n1": 2, "n2": 0})
    assert found[:2] == (75, "n2"), found[2]
    cells = row(found[2], "device", "FAILED")
    assert cells[2].startswith("n2") and cells[3] == "2-3" and "Slurm gave SLURM_GPUS_ON_NODE=2, but torch" in cells[4]
    assert row(found[2], "forward", "skipped")[3] == "2-3" and row(found[2], "folder", "ok")
    assert "continues without n2: 2 ranks on n1 do the whole step" in found[2]


def test_a_node_whose_driver_hangs(slurm, shared):
    words = arguments(shared, run__device="auto", data__global_batchsize=8)
    code, excluded, printed = preflight(slurm, words, devices={"n1": 2, "n2": "hang"})
    assert (code, excluded) == (75, "n2"), printed
    assert preflight(slurm, [*words, "--may-repeat"], devices={"n1": 2, "n2": "hang"})[:2] == (76, "")
    cells = row(printed, "device", "FAILED")
    assert cells[3] == "2-3" and cells[4] == "no answer within 25 s (counting devices)"
    assert row(printed, "rendezvous", "ok")


def test_devices_of_slurm_that_torch_does_not_see(slurm, shared):
    code, _, printed = preflight(slurm, arguments(shared, run__device="auto"))
    cells = row(printed, "device", "FAILED")
    assert code == 43 and cells[3] == "0-3" and "sees no device" in cells[4] and "set run.device=cpu" in cells[5]
    assert "No node is well" in printed


def test_tasks_that_do_not_match_the_devices(slurm, shared):
    code, _, printed = preflight(slurm, arguments(shared, run__device="auto"), tasks=3, devices=HEALTHY)
    cells = row(printed, "device", "FAILED")
    assert (code, cells[3]) == (43, "0-5")
    assert cells[4:] == ["ntasks-per-node is 3 but torch sees 2 devices", "use --ntasks-per-node=2"]


def test_a_rank_that_never_arrives(slurm, shared):
    python = shared / "python"
    python.write_text(f'#!/bin/bash\n[[ $SLURM_PROCID == 3 ]] && exec sleep 300\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, excluded, printed = preflight(slurm, arguments(shared), TASK_PYTHON=str(python))
    cells = row(printed, "arrival", "FAILED")
    assert (code, excluded) == (75, "n2") and cells[2:4] == ["n2", "3"] and "did not arrive within" in cells[4]
    assert row(printed, "rendezvous", "skipped")[3:5] == ["0-2", "rank 3 did not come"]
    assert printed.count("FAILED") == 1, "no other rank is blamed"


def test_an_output_folder_that_each_node_has_for_itself(slurm):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        words = arguments(Path(folder))
        code, _, printed = preflight(slurm, words)
        cells = row(printed, "folder", "FAILED")
        assert code == 43 and cells[4].startswith("run.models /tmp/") and "is under /tmp" in cells[4]
        assert "--allow-tmp" in cells[5]
        code, _, printed = preflight(slurm, [*words, "--allow-tmp"])
        assert code == 0 and "run.models is under /tmp: allowed" in printed


def test_more_loader_workers_than_the_memory_holds(slurm, shared):
    words = arguments(shared, data__in_memory=False, data__num_workers=500, data__img_size=64)
    code, _, printed = preflight(slurm, words)
    failed = [line for line in printed.splitlines() if line.startswith("memory") and "FAILED" in line]
    assert code == 43 and len(failed) == 2 and "n1" in failed[0] and "n2" in failed[1]
    assert re.search(r"needs \d+\.\d of \d+\.\d GiB: 2 ranks x \(0\.\d\d \+ "
                     r"500 workers x 0\.19 \+ batches \d\.\d\d\)", failed[0])
    assert re.search(r"data\.num_workers=\d+ would fit", failed[0])


def test_a_wrong_master_address(slurm, shared):
    code, _, printed = preflight(slurm, arguments(shared), MASTER_ADDR="10.255.255.1")
    failed = [line for line in printed.splitlines() if line.startswith("rendezvous") and "FAILED" in line]
    assert code == 43 and all("cannot reach MASTER_ADDR 10.255.255.1 port" in line for line in failed)
    assert "it has to be the host of rank 0 (n1): unset it or set it to n1" in failed[0]
    assert row(printed, "collective", "skipped")[3:5] == ["0-3", "rendezvous failed"]


def test_ranks_at_different_commits(slurm, shared):
    clone, python = shared / "clone", shared / "python"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    for name in ("Config", "Dataloader", "Diffusion", "Inference", "Report", "Runtime", "Scripts", "Supervisor"):
        shutil.copytree(ROOT / name, clone / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", clone, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "commit", "--quiet", "--all", "--allow-empty", "-m", "another commit"], check=True)
    there, here = (subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True,
                                  check=True).stdout[:12] for folder in (clone, ROOT))
    python.write_text(f'#!/bin/bash\n[[ $SLURMD_NODENAME == n2 ]] && cd {clone}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, _, printed = preflight(slurm, arguments(shared), TASK_PYTHON=str(python))
    cells = row(printed, "code", "FAILED")
    assert code == 43 and cells[3] == "0-3", "of two nodes, nobody knows which is right"
    assert re.fullmatch(rf"commit {here}.* on n1 \(rank 0-1\); commit {there}.* on n2 \(rank 2-3\)", cells[4])
