"""CPU, CUDA (also ROCm) and XPU devices behind one interface, with their communication backends and precision."""
import contextlib
import importlib
import importlib.metadata
import os
import socket
import sys
import threading

import torch
import torch.distributed as dist

from Runtime import PROCESS
from Runtime.errors import InputError, first_line

# torch.mps lacks float64 and does not report the device's properties or memory.
UNFIT = ("mps",)
VOXELS_A_THREAD = 2 ** 16  # with two threads 62,000 voxels gain nothing, and 250,000 take 0.6 of the time
PRECISIONS = {"bf16": "bf16", "off": "float32"}  # values of run.amp in words
SHARED = {"lock": threading.Lock(), "users": 0, "before": None}  # of `own_settings`


def pick_device(name, local_rank=0):
    """The device for run.device: "auto" takes the accelerator that torch sees, else the CPU.

    name: value of run.device; a torch.device is returned as it is if torch sees any of its kind. local_rank: chooses
    among several devices of a node; a single visible device is assumed to be bound to this rank. "auto" skips the GPU
    of a Mac (mps) and prints that.
    Returns: torch.device. Raises InputError if the named device is missing or unfit, or if two ranks would share one.
    """
    if isinstance(name, torch.device):
        if name.type in ("cuda", "xpu") and not torch.get_device_module(name).is_available():
            raise InputError(f"device: {name} is requested, but torch {torch.__version__} sees none; install the "
                             "matching torch build or take auto.")
        return name
    if not isinstance(name, str):
        raise InputError(f"device: give auto, cpu, cuda, xpu or a torch.device, not {name!r}.")
    if name in ("auto", "xpu") and not (dist.is_available() and dist.is_backend_available("xccl")):
        load_intel_packages(name == "xpu")
    if ":" in name:
        raise InputError(f"run.device: {name} names one device; give its kind alone, and choose the device by "
                         "CUDA_VISIBLE_DEVICES (ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK).")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name in UNFIT:
        raise InputError(f"run.device: {name} lacks features that this code needs, such as float64; set run.device "
                         "to cpu.")
    if name == "auto" and accelerator is not None and accelerator.type in UNFIT:
        print(f"device: {accelerator.type} lacks features that this code needs, such as float64; using the CPU",
              file=sys.stderr)
        accelerator = None
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or (name != "auto" and accelerator.type != name):
        seen = accelerator.type if accelerator else "none"
        raise InputError(f"run.device: {name} is requested, but torch {torch.__version__} sees no such device (it "
                         f"sees: {seen}); install the matching torch build or set run.device to auto.")
    count = torch.accelerator.device_count()
    if 1 < count <= local_rank and accelerator.type != "cpu":
        shared = local_rank % count
        place = f"local rank {local_rank} of {socket.gethostname()}"
        raise InputError(f"{place} would share {accelerator.type}:{shared} with "
                         f"local rank {shared}, since torch sees {count} devices: start {count} ranks on a node "
                         f"(--ntasks-per-node={count}, or RANKS={count}).")
    return checked(torch.device(accelerator.type, local_rank % count), name)


def checked(device, name):
    """The device if torch has code for it. If not, as for an old GPU, "auto" prints that and returns the CPU; any other
    name raises InputError."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in ("no kernel image", "invalid device function")):  # NVIDIA, AMD
            raise
        sentence = f"this build of torch has no code for {device} ({first_line(error)})"
        if name != "auto":
            raise InputError(f"run.device: {sentence}; install a build that has, or set run.device to cpu.") from error
        print(f"device: {sentence}; using the CPU", file=sys.stderr)
        return torch.device("cpu")
    return device


def load_intel_packages(is_asked_for):
    """Import the packages that add torch.xpu and the backend ccl to older Intel stacks; they register themselves.

    A package built for another torch may kill the process or raise any exception on import. So this imports one only
    if its version matches torch and, unless an Intel GPU was requested, only if it is an XPU build.
    """
    release = torch.__version__.split(".")[:2]
    for package in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):  # in this order
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] != release or not (is_asked_for or "+xpu" in version):
            if is_asked_for:
                print(f"device: {package} {version} is not for torch {torch.__version__} and is not imported",
                      file=sys.stderr)
            continue
        try:
            importlib.import_module(package)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:  # torch itself still works
            print(f"device: {package} {version} does not load ({type(error).__name__}: {error})", file=sys.stderr)


def backend(device):
    """Name of the torch.distributed backend for a device. Raises InputError for an Intel GPU without one."""
    if device.type != "xpu":
        return dist.get_default_backend_for_device(device)  # gloo, nccl (also ROCm)
    for name in ("xccl", "ccl"):
        if dist.is_backend_available(name):
            return name
    raise InputError(f"torch {torch.__version__} has no backend for several Intel GPUs: install the XPU build of "
                     "torch 2.8 or later, or oneccl_bindings_for_pytorch beside an older one.")


def computes_bf16(device):
    """Whether a device computes bf16 natively. Emulated bf16 is slower than float32, twenty times on a CPU."""
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    return False


def precision(amp, device):
    """The precision of run.amp on a device: "bf16", or "off" for float32; "auto" uses bf16 where it is native."""
    if amp != "auto":
        return amp
    return "bf16" if computes_bf16(device) else "off"


def autocast(device, amp):
    """The autocast context of the network's forward pass. amp: value of run.amp."""
    if precision(amp, device) == "off":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def prepare_device(device, threads):
    """Set the thread count, the current device and full float32 products; call this before creating any tensor.

    threads: CPU threads of torch, 0 = torch's default. TF32 is off: its 10-bit mantissa is too coarse for correlations
    and fields.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


@contextlib.contextmanager
def own_settings(voxels=None):
    """Context in which torch computes as registration needs, whatever the calling program has set.

    Products of float32 keep their precision (torch.set_float32_matmul_precision("medium") moves coordinates by a fifth
    of a voxel), new tensors are float32 and on the CPU unless a device is named, and there is neither autocast nor
    inference mode, whose tensors have no gradients. voxels: size of the volume; it limits the CPU threads, since two
    are no faster than one on a hippocampus crop of 62,000 voxels and take twice the processor time. With one thread the
    result is also the same on any number of cores. A forked process uses one thread: its parent's other threads do not
    exist there, and torch would wait for them for ever.

    Autocast, inference mode and the device are set per thread, the others per process. Calls in several threads share
    the latter: the first one saves what the program had, and the last one restores it.
    """
    backends = torch.backends
    settings = [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]
    if hasattr(backends, "fp32_precision"):  # torch 2.9 and later
        # General settings first: a specific one then inherits the value and need not be set, which would end that.
        settings = [(each, "fp32_precision", "ieee") for each in (
            backends, backends.cudnn, backends.mkldnn, backends.cuda.matmul, backends.cudnn.conv,
            backends.mkldnn.matmul, backends.mkldnn.conv)]
    is_forked = os.getpid() != PROCESS
    with SHARED["lock"]:
        if not SHARED["users"]:
            changed = []
            SHARED["before"] = torch.get_num_threads(), torch.get_default_dtype(), changed
            torch.set_default_dtype(torch.float32)
            for each, name, value in settings:
                if getattr(each, name) != value:
                    changed.append((each, name, getattr(each, name)))
                    setattr(each, name, value)
        SHARED["users"] += 1
        threads, dtype, changed = SHARED["before"]
        if is_forked:
            torch.set_num_threads(1)
        elif voxels is not None:
            torch.set_num_threads(max(1, min(threads, voxels // VOXELS_A_THREAD)))
    try:
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda", "xpu"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.is_inference_mode_enabled():
                computes_gradients = torch.is_grad_enabled()
                stack.enter_context(torch.inference_mode(False))  # which turns gradients on
                stack.enter_context(torch.set_grad_enabled(computes_gradients))
            if torch.get_default_device().type != "cpu":  # only then: each call of torch takes longer within this
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        with SHARED["lock"]:
            SHARED["users"] -= 1
            if not SHARED["users"]:
                torch.set_default_dtype(dtype)
                for each, name, value in changed:
                    setattr(each, name, value)
            if not SHARED["users"] or (voxels is not None and not is_forked):
                torch.set_num_threads(threads)


def send(tensor, device):
    """Copy a CPU tensor to the device. Unlike a plain copy, this does not wait for the device to finish its work.

    Only from pinned memory does the driver copy while the host continues. No effect on the CPU.
    """
    device = torch.device(device or "cpu")
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def synchronize(device):
    """Wait until the device has finished its work, for example to time it. No effect on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def describe(device):
    """One phrase for the log: the device's name and memory in GiB, or the CPU's threads."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{device}, {properties.name}, {properties.total_memory / 2 ** 30:.0f} GiB"
