"""Devices by one set of names: CPU, CUDA (also ROCm), XPU; and how ranks on them talk to each other."""
import contextlib
import importlib
import socket
import sys

import torch
import torch.distributed as dist

from Runtime.errors import InputError

# torch.mps has neither float64 nor the properties and the memory of the device that are asked for here.
UNFIT = ("mps",)


def pick_device(name, local_rank=0):
    """The device for run.device: "auto" takes the accelerator torch sees, else the CPU.

    With several devices on a node, local_rank chooses; one that is seen alone is taken for bound to this rank. The GPU
    of a Mac (mps) is left alone, and that is said. Raises InputError if the named one is not there, or if this rank
    would have to share one with another.
    """
    if name in ("auto", "xpu") and not dist.is_backend_available("xccl"):
        # Older Intel stacks have torch.xpu and the backend ccl from packages that register themselves, in this order.
        for package in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
            with contextlib.suppress(ImportError):
                importlib.import_module(package)
    found = torch.accelerator.current_accelerator(check_available=True)
    if name in UNFIT:
        raise InputError(f"run.device: {name} lacks what this code needs of a device, such as float64; set it to cpu.")
    if name == "auto" and found is not None and found.type in UNFIT:
        print(f"device: {found.type} lacks what this code needs of a device, such as float64; the CPU is used",
              file=sys.stderr)
        found = None
    if name == "cpu" or (name == "auto" and found is None):
        return torch.device("cpu")
    if found is None or (name != "auto" and found.type != name):
        seen = found.type if found else "none"
        raise InputError(f"run.device: {name} is asked for, but torch {torch.__version__} sees no such device (it "
                         f"sees: {seen}); install the matching torch build or set run.device to auto.")
    count = torch.accelerator.device_count()
    if 1 < count <= local_rank and found.type != "cpu":
        shared = local_rank % count
        raise InputError(f"local rank {local_rank} of {socket.gethostname()} would share {found.type}:{shared} with "
                         f"local rank {shared}, since torch sees {count} devices: start {count} ranks on a node "
                         f"(--ntasks-per-node={count}, or RANKS={count}).")
    return torch.device(found.type, local_rank % count)


def backend(device):
    """The backend of torch.distributed for a device. Raises InputError for an Intel GPU without one."""
    if device.type != "xpu":
        return dist.get_default_backend_for_device(device)  # gloo, nccl (also ROCm)
    found = next((name for name in ("xccl", "ccl") if dist.is_backend_available(name)), None)
    if found is None:
        raise InputError(f"torch {torch.__version__} has no backend for several Intel GPUs: install the XPU build of "
                         "torch 2.8 or later, or oneccl_bindings_for_pytorch beside an older one.")
    return found


def computes_bf16(device):
    """Whether a device computes bf16 as such. One that emulates it is slower than in float32, a CPU twenty times."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    return False


def precision(amp, device):
    """What run.amp means on a device: "bf16" or "off", which is float32; "auto" takes bf16 where it is fast."""
    if amp != "auto":
        return amp
    return "bf16" if computes_bf16(device) else "off"


def autocast(device, amp):
    """The autocast context of the network's forward pass, by run.amp."""
    return contextlib.nullcontext() if precision(amp, device) == "off" else torch.autocast(device.type, torch.bfloat16)


def prepare_device(device, threads):
    """Settings of the process before the first tensor: threads, and float32 products that are float32.

    TF32 keeps ten bits of the mantissa, which is too few for correlations and for fields.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def synchronize(device):
    """Wait for the device, so that a clock measures its work; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(device):
    """One phrase for the log: what it is and how much memory it has."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{device}, {properties.name}, {properties.total_memory / 2 ** 30:.0f} GiB"
