"""A pasted message, or a log, leads to its row of docs/messages.md; so does every sentence of our own."""
import functools
import io
import re
import runpy
import subprocess
import sys

import pytest

import OM_prepare
from omnimorph import explain
from tests.tiny import ROOT

ROWS = explain.read_rows((ROOT / "docs/messages.md").read_text())
# As programs printed them on clusters, and words of the cure that belongs to each.
RECORDED = {
    "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)": "use_checkpoint",
    "RuntimeError: Native API failed. Native API returns: UR_RESULT_ERROR_DEVICE_LOST": "--exclude",
    "RuntimeError: No XPU devices are available.": "--exclude",
    "|CCL_WARN| mem handle cache limit is reached: mem_handle_cache size: 1000, limit: 1000": "THRESHOLD=10000",
    "Abort(1090831) on node 0: Fatal error in MPI PMI_Init failure": "I_MPI_PMI_LIBRARY",
    "RuntimeError: ccl backend not found": "same release",
    "CCL_ERROR: CCL OFI transport init failure": "cpus-per-task=12",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.": "Agree",
    "Weights only load failed. This file can still be loaded": "numbers only",
    "ZeroDivisionError: division by zero": "above 0",
    "Signal 11 (SIGSEGV) received by PID 4021": "stacks/",
    "OSError: [Errno 24] Too many open files": "ulimit -n 65536",
    "OSError: [Errno 27] x.pth could not be written (File too large; 75.28 GiB free)": "ulimit -Hf",
    "ValueError: prefetch_factor option could only be specified in multiprocessing.": "data.num_workers",
    "MIOpen Error: No suitable algorithm was found to execute the required convolution": "MIOPEN_FIND_MODE",
    "RuntimeError: miopenStatusUnknownError": "MIOPEN_FIND_MODE",
    "remote: error: File core is 180.00 MB; this exceeds GitHub's file size limit of 100.00 MB": "filter-repo",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0": "num_workers",
    "distributed_backend=nccl All distributed processes registered. GLOBAL_RANK: 0, MEMBER: 1/1": "srun",
    "ncclInternalError: Bootstrap : no socket interface found": "Unset both",
    "Use of ACCESS SSH keys is Required": "srun",
    "pdsh@gilbreth-g004: gilbreth-g005: ssh exited with exit code 2": "srun",
    "python: can't open file '/tmp/x/train.py': [Errno 2] No such file or directory": "shared folder",
    "ModuleNotFoundError: No module named 'Runtime'": "PYTHONSAFEPATH",
    "AssertionError: zero stage 1 requires an optimizer": "optimizer",
    "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16": "bf16",
    "OSError: [Errno 108] Cannot send after transport endpoint shutdown": "waits",
    "sbatch: error: Invalid account or account/partition combination specified": "sacctmgr",
    "FutureWarning: The pynvml package is deprecated.": "harmless",
    "Unable to find hostfile, will proceed with training with local resources only.": "harmless",
    "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct": "NET/Socket",
    "NCCL INFO comm 0x55 rank 0 nranks 2 - Abort COMPLETE": "normal",
    "NCCL INFO comm 0x55 rank 0 nranks 2 - Init COMPLETE": "one node",
    "RuntimeError: No backend type associated with device type xpu": "xccl",
    "SYCL version mismatch": "same release",
    "SYCL mismatch": "same release",
    "AssertionError: Unknown backend type ccl": "same release",
    "Abort was called at 288 line in file: /src/shared/source/os_interface/linux/drm_neo.cpp": "THRESHOLD=10000",
    "WeightsUnpickler error: Unsupported global: GLOBAL numpy.core.multiarray._reconstruct": "numbers only",
    "Some of your processes may have been killed by the cgroup out-of-memory handler.": "num_workers",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": "data.batchsize",
    "torch.AcceleratorError: CUDA error: out of memory": "data.batchsize",
    "Failed to CUDA calloc async 8 bytes, Cuda failure 2 'out of memory'": "data.batchsize",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "data.batchsize",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "--debug",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "nvidia-smi",
    "RuntimeError: No CUDA GPUs are available": "nvidia-smi",
    "slurmstepd: error: Detected 1 oom-kill event(s). Some of the tasks have been OOM Killed.": "num_workers",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array": "num_workers",
    "AssertionError: Unknown c10d backend type CCL": "same release",
    "  exitcode  : -11 (pid: 4021)": "stacks/",
    "OSError: [Errno 28] No space left on device: '/dev/shm/torch_4021'": "data.num_workers=0",
    "error: rank 0 of 2 did not arrive within 300 s at 127.0.0.1:29500: see how they ended": "of its own",
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9112. This is": "ended first",
    "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]: Connection reset by peer": "ended first",
    "attempt 9: killed: rank 0 on vm in data of step 7: ended by SIGKILL; rank 1: data of step 7.": "the scheduler",
    "UnboundLocalError: cannot access local variable 'xt'": "last use",
}


@pytest.fixture(scope="module", autouse=True)
def refusals():
    """The code is parsed once, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "read_refusals", functools.cache(explain.read_refusals))
        yield explain.read_refusals()


@pytest.mark.parametrize("text", RECORDED)
def test_recorded_texts_find_their_row(text):
    cures = [cure for _, _, cure in explain.matching_rows(text, ROWS)]
    assert len(cures) == 1 and RECORDED[text] in cures[0], "and no other"


def test_every_fragment_of_the_page_is_found_by_its_own_text():
    assert len(ROWS) > 45
    for row in ROWS:
        for fragment in row[0]:
            assert row in explain.matching_rows(f"x\nrank 3: {fragment.replace('...', 'anything')}\ny", ROWS)


def test_an_ordinary_log_matches_nothing(refusals):
    log = "epoch 3 step 20 loss 0.52 ang -0.41\nsaved 000003_brains_om_net.pth\nall ranks have arrived\n"
    assert not explain.matching_rows(log, ROWS)
    assert not explain.matching_refusals(log, refusals)


def test_every_refusal_of_the_code_is_known_by_its_sentence(refusals):
    assert len(refusals) > 250
    for template, name in refusals:
        said = "error: " + " ".join(template.replace("{}", "SOMETHING").splitlines())
        assert (template, name) in explain.matching_refusals(said, refusals), template


def test_a_log_is_read_from_standard_input(tmp_path, capsys):
    words = ["--config", str(ROOT / "Config/config_medium.yaml"), "--set", f"data.root={tmp_path}/nowhere"]
    assert OM_prepare.main(words) == 43
    log = f"{capsys.readouterr().err}\nRuntimeError: UR_RESULT_ERROR_DEVICE_LOST\n"
    found = subprocess.run([sys.executable, "-m", "omnimorph.explain"], cwd=ROOT, capture_output=True, text=True,
                           timeout=120, input=log)
    assert found.returncode == 0
    assert "name your volumes by" in found.stdout and "Dataloader/cache.py" in found.stdout
    assert "the driver or the card failed" in found.stdout


@pytest.mark.parametrize("arguments, text, code", [
    ((), "nothing that any program says", 1), ((), "  \n", 43), ((), None, 43), (("--help",), None, 0),
    (("Stale", "file", "handle"), None, 0)])
def test_exit_codes_and_one_sentence(arguments, text, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["explain", *arguments])
    # Standard input is None where it is closed.
    monkeypatch.setattr(sys, "stdin", None if text is None else io.TextIOWrapper(io.BytesIO(text.encode())))
    assert explain.main() == code
    said = capsys.readouterr()
    assert (said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out) if code == 43 else (
        said.out and not said.err)


def test_keys_and_files_that_the_page_names_exist():
    from Runtime.config import KEYS
    text = (ROOT / "docs/messages.md").read_text()
    named = set(re.findall(r"\b((?:data|run|model|optim)\.[a-z_]+)\b", text))
    assert len(named) > 5 and named <= set(KEYS)


def test_the_site_lists_all_refusals():
    hook = runpy.run_path(str(ROOT / "docs/extra/list_refusals.py"))
    assert (ROOT / "docs/messages.md").read_text().count(hook["MARK"]) == 1
    assert hook["table"]().count("\n| ") >= 250
