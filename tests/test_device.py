"""Devices by name and the backend of each, also where this machine has neither."""
import os
import platform
import sys

import pytest
import torch
import torch.distributed as dist

from Diffusion.optim import new_gradients
from Runtime.device import autocast, backend, computes_bf16, own_settings, pick_device, precision
from Runtime.errors import InputError
from Runtime.launch import unfit_devices
from tests import launching
from tests.tiny import ROOT

XPU = torch.device("xpu", 0)

# What the packages of older Intel stacks do when they are imported.
PACKAGES = {"intel_extension_for_pytorch": "import torch\ntorch.seen = ['extension']\n",
            "oneccl_bindings_for_pytorch": "import torch\nimport torch.distributed as dist\ntorch.seen.append('ccl')\n"
                                           "dist.Backend.register_backend('ccl', lambda *_: None, devices=['xpu'])\n"}
ASK = """
import torch
from Runtime.device import backend, pick_device
from Runtime.errors import InputError
from Runtime.launch import unfit_devices
try:
    pick_device(NAME)
except InputError as error:
    print(error)
print(getattr(torch, "seen", None))
try:
    print(backend(torch.device("xpu", 0)))
except InputError as error:
    print(error)
"""


OURS = ".".join(torch.__version__.split(".")[:2])
EXIT = "import os\nos._exit(127)\n"  # a package may end the process, and nothing catches that
# {name: (run.device, content of the package, its version)}
ELSEWHERE = {"broken": ("auto", "raise AttributeError('no xpu')\n", f"{OURS}.10+xpu"),
             "foreign": ("auto", EXIT, "1.13.10+xpu"), "foreign though asked for": ("xpu", EXIT, "1.13.10+xpu"),
             "for the CPU": ("auto", EXIT, f"{OURS}.0+cpu")}
PASS = """
import os, sys
import torch
from Runtime.device import pick_device, precision
from Runtime.errors import InputError
print("precision", precision("auto", torch.device("cpu")), flush=True)
for device, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.path.insert(0, folder)
    try:
        pick_device(device)
    except InputError as error:
        print(error)
    print(os.path.basename(sys.path.pop(0)) + ": past it", flush=True)
"""


def install(folder, name, content, version):
    """A package that is one file, with the metadata by which its version is known."""
    (folder / f"{name}.py").write_text(content)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def ask(name, folder):
    """What a fresh process that finds packages in `folder` says about an Intel GPU."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    ended = launching.run([sys.executable, "-c", ASK.replace("NAME", repr(name))], env=environment, timeout=240,
                          check=True)
    return ended.stdout.strip().splitlines()


@pytest.fixture(scope="module")
def said_elsewhere(tmp_path_factory):
    """Lines of one fresh process, where packages of ELSEWHERE come and go, on a processor without AVX-512.

    Or on this one told to be so: what torch then computes is float32.
    """
    folder, words = tmp_path_factory.mktemp("packages"), []
    for name, (device, content, version) in ELSEWHERE.items():
        (folder / name).mkdir()
        install(folder / name, "intel_extension_for_pytorch", content, version)
        words += [device, folder / name]
    lesser = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT)}
    ended = launching.run([sys.executable, "-c", PASS, *words], env={**os.environ, **lesser}, timeout=240)
    return (ended.stdout + ended.stderr).splitlines()


def test_the_cpu_is_always_there():
    assert pick_device("cpu", 3) == torch.device("cpu")
    if torch.accelerator.current_accelerator(check_available=True) is None:
        assert pick_device("auto", 3) == torch.device("cpu")
        with pytest.raises(InputError, match="run.device: cuda is requested, but torch .* sees no such device"):
            pick_device("cuda")


@pytest.mark.slow
def test_auto_takes_bf16_where_the_processor_computes_it(said_elsewhere):
    cpu = torch.device("cpu")
    assert [precision(word, cpu) for word in ("bf16", "off")] == ["bf16", "off"]
    assert precision("auto", cpu) == ("bf16" if computes_bf16(cpu) else "off")
    with autocast(cpu, "auto"):
        assert torch.is_autocast_enabled("cpu") == computes_bf16(cpu)
    assert "precision off" in said_elsewhere or platform.machine() != "x86_64"


def test_on_a_mac_auto_takes_the_cpu_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    device = pick_device("auto")
    said = capsys.readouterr().err
    assert device == torch.device("cpu") and said.count("\n") == 1 and "mps lacks" in said and "using the CPU" in said
    assert pick_device("cpu") == torch.device("cpu") and not capsys.readouterr().err
    with pytest.raises(InputError, match="run.device: mps lacks .*; set run.device to cpu"):
        pick_device("mps")
    with pytest.raises(InputError, match="cuda is requested, but torch .* sees no such device .it sees: mps."):
        pick_device("cuda")


def test_each_device_has_its_backend():
    assert backend(torch.device("cpu")) == "gloo" and backend(torch.device("cuda", 1)) == "nccl"


def test_intel_gpus_take_xccl_before_ccl(monkeypatch):
    """Which backends a build of torch has is all that is pretended."""
    there = {"xccl", "ccl"}
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in there)
    assert backend(XPU) == "xccl"
    there.remove("xccl")
    assert backend(XPU) == "ccl"


def test_a_torch_without_distributed_has_devices(monkeypatch):
    """As in AMD's wheels for Windows."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "is_backend_available")
    assert pick_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("message", ["CUDA error: no kernel image is available for execution on the device\nmore",
                                     "HIP error: invalid device function\nmore"])
def test_a_gpu_that_torch_has_no_code_for_is_left_to_the_cpu(monkeypatch, capsys, message):
    def refuse(*given, **more):
        raise RuntimeError(message)
    monkeypatch.setattr(torch, "ones", refuse)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert pick_device("auto") == torch.device("cpu") and "no code for cuda:0" in capsys.readouterr().err
    with pytest.raises(InputError, match="no code for cuda:0 .*; install a build"):
        pick_device("cuda")


def test_ranks_of_a_node_with_several_devices_have_one_each(monkeypatch):
    monkeypatch.setattr("Runtime.device.checked", lambda device, name: device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert [pick_device("auto", rank).index for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="local rank 5 of .* would share cuda:1 with local rank 1, .* 4 devices"):
        pick_device("cuda", 5)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert pick_device("auto", 3).index == 0, "bound to it by the launcher; two that are not find each other in a group"


def test_two_ranks_on_one_device_are_named():
    def rank(node="n1", index=0, unique="a", visible="0"):
        return [node, f"cuda:{index} (GPU)", "cuda", index, unique, [visible]]
    assert unfit_devices([rank(), rank("n2"), rank(index=1, unique="b"), rank(unique="c", visible="1")]) == ""
    assert unfit_devices([rank(visible="MIG-1"), rank(visible="MIG-2")]) == "", "parts of one device"
    assert unfit_devices([rank(), rank("n2"), rank()]) == (
        "ranks 0 and 2 share cuda:0 (GPU) of n1: start one rank for each device (--ntasks-per-node, RANKS), or bind "
        "one to each (--gpus-per-task=1).")
    assert unfit_devices([["n1", "the CPU", "cpu", None, "", []]] * 2) == "", "which all may share"


def test_a_node_that_has_lost_its_devices_is_named():
    """`auto` takes the CPU there, beside CUDA on the other ranks: no backend joins the two."""
    cuda, cpu = ["n1", "cuda:0 (GPU)", "cuda", 0, "a", []], ["n2", "the CPU", "cpu", None, "", []]
    assert unfit_devices([cpu, cpu]) == unfit_devices([cuda, [*cuda[:3], 1, "b", []]]) == ""
    for ranks, number in (([cuda, cpu, cuda], 1), ([cuda, cpu, cpu], 1), ([cpu, cpu, cuda], 0)):
        assert unfit_devices(ranks).startswith(f"rank {number} on n2 has the CPU and other ranks have cuda: ")


@pytest.mark.skipif(dist.is_backend_available("xccl"), reason="this torch has xccl")
def test_intel_gpus_without_a_backend_are_refused_in_one_sentence():
    with pytest.raises(InputError, match="install the XPU build of torch 2.8 or later, or oneccl_bindings_for_pytorch"):
        backend(XPU)


@pytest.mark.slow
@pytest.mark.skipif(dist.is_backend_available("xccl"), reason="this torch has xccl")
def test_older_intel_stacks_are_loaded_where_an_intel_gpu_may_be_meant(tmp_path):
    for name, content in PACKAGES.items():
        install(tmp_path, name, content, OURS)
    assert ask("xpu", tmp_path)[-2:] == ["['extension', 'ccl']", "ccl"]
    seen, refused = ask("cpu", tmp_path)[-2:]
    assert seen == "None" and "oneccl_bindings_for_pytorch" in refused


@pytest.mark.skipif(dist.is_backend_available("xccl"), reason="this torch has xccl")
def test_an_intel_package_for_another_torch_is_not_imported(said_elsewhere):
    assert {"foreign: past it", "foreign though asked for: past it", "for the CPU: past it"} <= set(said_elsewhere)


@pytest.mark.skipif(dist.is_backend_available("xccl"), reason="this torch has xccl")
def test_an_intel_package_that_raises_is_survived(said_elsewhere):
    assert "broken: past it" in said_elsewhere
    assert any("does not load (AttributeError: no xpu)" in line for line in said_elsewhere)


def test_a_device_without_float64_is_named_with_the_key_to_change():
    # The meta device has no numbers at all; nobody has an Intel GPU without float64 at hand.
    with pytest.raises(InputError, match="run.exact_sums: meta has no float64 .*; set it to false"):
        new_gradients({"run.exact_sums": True, "run.bf16_sums": False}, torch.device("meta"))


@pytest.mark.parametrize("exact, bf16, device, dtype, wire", [
    (True, False, "cpu", "float64", "float64"), ("auto", False, "cpu", "float64", "float64"),
    ("auto", False, "meta", "float32", "float32"), (False, False, "cpu", "float32", "float32"),
    ("auto", True, "cpu", "float32", "bfloat16"), (False, True, "meta", "float32", "bfloat16")])
def test_sums_of_gradients_have_the_types_of_their_keys(exact, bf16, device, dtype, wire):
    sums = new_gradients({"run.exact_sums": exact, "run.bf16_sums": bf16}, torch.device(device))
    assert (sums.dtype, sums.wire) == (getattr(torch, dtype), getattr(torch, wire))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has no general precision")
@pytest.mark.parametrize("general", ["none", "tf32", "ieee"])
def test_precisions_that_follow_a_general_one_still_follow_it_afterwards(general):
    backends = torch.backends
    parts = backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv

    def precisions():
        return [each.fp32_precision for each in parts]

    before, backends.fp32_precision = backends.fp32_precision, "none"
    own = precisions()  # another test may have set some, which then follow nothing
    try:
        for each in parts:
            each.fp32_precision = "none"
        backends.fp32_precision, backends.mkldnn.matmul.fp32_precision = general, "bf16"
        found = precisions()
        with own_settings():
            assert precisions() == ["ieee"] * 4
        assert precisions() == found and backends.fp32_precision == general
        backends.fp32_precision = "tf32" if general == "ieee" else "ieee"
        assert precisions() == [backends.fp32_precision, backends.fp32_precision, "bf16", backends.fp32_precision]
    finally:
        backends.fp32_precision = before
        for each, value in zip(parts, own):
            each.fp32_precision = value
