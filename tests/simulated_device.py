"""An accelerator without hardware: tensors on the device "simulated" compute on the CPU, and everything is noted that
would cost on a real one.

    with SimulatedDevice() as seen:
        x = torch.rand(3, device="simulated")       # or .to("simulated")
        x.sum().item()
    seen.syncs       # [("item", "tests/test_x.py:3")]

Its tensors are a subclass whose operations torch hands over one by one: the values lie in ordinary CPU tensors, so that
every branch is taken as with real numbers. Noted are

  syncs         the host waits for a value of the device: item(), a copy to the CPU, a mask as index
  copies        the device waits for the host: a copy of a CPU tensor that is not pinned
  wrong_device  an operation has tensors of both; a real device refuses that

each with the line of this repository that asked for it. A number of no axis may come from the CPU, as on a device.

    python -m tests.simulated_device     a tiny training: waits of a step, as JSON
"""
import collections
import contextlib
import functools
import json
import sys
import tempfile
import types
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import OM_train_3modes as om
from Runtime import watchdog
from tests.tiny import ROOT, arguments, log_lines, make_data

NAME = "simulated"
aten = torch.ops.aten
# The host has to know values, or how many there are, before it can go on.
WAITS = {aten._local_scalar_dense.default: "item", aten.equal.default: "equal", aten.nonzero.default: "nonzero",
         aten.masked_select.default: "masked_select", aten._unique2.default: "unique",
         aten.unique_dim.default: "unique"}
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._unsafe_index.Tensor)
# Phases of the trainer that are part of every step.
IN_A_STEP = ("epoch", "step", "data", "deform", "forward", "accumulate", "agree", "backward", "optimizer", "embeddings")
Note = collections.namedtuple("Note", "what where phase")


def line_of_repository(machinery=__file__):
    """"file:line" of the innermost line of this repository, one file left out, that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and "/.venv" not in name and name != machinery:
            return f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"  # autograd's thread has no lines of its own


class Memory:
    """What is alive on the device: each storage once, however many tensors look at it; and the most that ever was."""

    def __init__(self):
        self.users, self.sizes, self.now, self.peak = collections.Counter(), {}, 0, 0

    def add(self, storage, size):
        if not self.users[storage]:
            self.sizes[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[storage] += 1

    def remove(self, storage):
        self.users[storage] -= 1
        if not self.users[storage]:
            self.now -= self.sizes.pop(storage)


MEMORY = Memory()


class Module:
    """torch.simulated: what torch.cuda is for a CUDA device, as far as this project asks for it."""

    TOTAL = 2 ** 35

    def is_initialized(self):
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def manual_seed_all(self, seed):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def is_bf16_supported(self, including_emulation=True):
        return True

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(name="simulated device", total_memory=self.TOTAL)

    def synchronize(self, device=None):
        if SimulatedDevice.current:
            SimulatedDevice.current.note(SimulatedDevice.current.syncs, "synchronize")

    def empty_cache(self):
        pass

    def memory_allocated(self, device=None):
        return MEMORY.now

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device=None):
        return MEMORY.peak

    def reset_peak_memory_stats(self, device=None):
        MEMORY.peak = MEMORY.now

    def mem_get_info(self, device=None):
        return self.TOTAL - MEMORY.now, self.TOTAL


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device. `values`: the CPU tensor that holds its numbers."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, values.stride(), values.storage_offset(),
                                                   dtype=values.dtype, device=torch.device(NAME, 0))

    def __init__(self, values):
        self.values = values
        storage = values.untyped_storage()
        MEMORY.add(storage._cdata, storage.nbytes())
        weakref.finalize(self, MEMORY.remove, storage._cdata)

    def __repr__(self):
        return f"DeviceTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


def compute(function, args, kwargs):
    """One operation of which a tensor, or its result, is on the simulated device."""
    flat = torch.utils._pytree.arg_tree_leaves(*args, **kwargs)
    tensors = [item for item in flat if isinstance(item, torch.Tensor)]
    here = [item for item in tensors if isinstance(item, DeviceTensor)]
    device = kwargs.get("device")
    wanted = torch.device(device).type if device is not None else None
    seen = SimulatedDevice.current
    if seen:
        seen.look_at(function, args, kwargs, tensors, here, wanted)
    inner = {key: torch.device("cpu") if key == "device" and value is not None else value
             for key, value in kwargs.items()}
    pinned = inner.pop("pin_memory", False)
    plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda x: x.values, (args, inner))
    result = function(*plain_args, **plain_kwargs)
    if pinned:
        result.pinned = True  # the device copies from and to it by itself
    if wanted == "cpu" or (not here and wanted != NAME) or function is aten._local_scalar_dense.default:
        return result
    if function is aten.copy_.default and not isinstance(args[0], DeviceTensor):
        return args[0]
    wrapped = tree_map_only(torch.Tensor, DeviceTensor, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped)


class SimulatedDevice(TorchDispatchMode):
    """Within this context tensors can be made on the device, and what happens there is noted."""

    current = None

    def __init__(self):
        super().__init__()
        self.syncs, self.wrong_device = [], []

    def __enter__(self):
        register()
        SimulatedDevice.current = self
        return super().__enter__()

    def __exit__(self, *error):
        SimulatedDevice.current = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        flat = torch.utils._pytree.arg_tree_leaves(*args, **kwargs)
        if function is aten.is_pinned.default:
            return getattr(args[0], "pinned", False)
        if function is aten._pin_memory.default:
            copy = args[0].clone()
            copy.pinned = True
            return copy
        ours = any(isinstance(item, DeviceTensor) for item in flat)
        if ours or (device is not None and torch.device(device).type == NAME):
            return compute(function, args, kwargs)
        return function(*args, **kwargs)

    def note(self, notes, what):
        notes.append(Note(what, line_of_repository(), watchdog.STATE.get("name")))

    def look_at(self, function, args, kwargs, tensors, here, wanted):
        """Note what an operation costs beside its work."""
        elsewhere = [item for item in tensors if not isinstance(item, DeviceTensor)]
        if function in WAITS and here:
            self.note(self.syncs, WAITS[function])
        elif function is aten._to_copy.default:
            to_device = wanted == NAME or (wanted is None and bool(here))
            self.look_at_copy(args[0], None, to_device, not kwargs.get("non_blocking"))
        elif function is aten.copy_.default:
            self.look_at_copy(args[1], args[0], isinstance(args[0], DeviceTensor), not any(args[2:]))
        elif here and any(item.dim() for item in elsewhere):
            self.note(self.wrong_device, str(function))
        if function in INDEXING and here and any(item.dtype == torch.bool for item in tensors[1:]):
            self.note(self.syncs, "mask as index")

    def look_at_copy(self, source, target, to_device, waits):
        """source, target: the tensors; None for a new one. to_device: where that is. waits: not non_blocking."""
        from_device = isinstance(source, DeviceTensor)
        if from_device != to_device:
            on_cpu, way = (source, "from") if to_device else (target, "to")
            if waits or not getattr(on_cpu, "pinned", False):
                self.note(self.syncs, f"{tuple(source.shape)} {way} the CPU")


def register():
    """Make the device known to torch, once."""
    if not register.done:
        _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
        for name in ("empty.memory_format", "empty_strided", "copy_"):
            overload = getattr(getattr(aten, name.split(".")[0]), (name.split(".") + ["default"])[1])
            LIBRARY.impl(name, functools.partial(called_by_torch, overload), "PrivateUse1")
        register.done = True


def called_by_torch(function, *args, **kwargs):
    """What torch.tensor(..., device=...) asks of a backend: it hands its operations over to no Python."""
    if function is aten.empty_strided.default or function is aten.empty.memory_format:
        kwargs["device"] = torch.device(NAME)
    return compute(function, args, kwargs)


LIBRARY = torch.library.Library("aten", "IMPL")
register.done = False


def main():
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = make_data(Path(name))
        with SimulatedDevice() as seen:
            code = om.main(arguments(folder, run__device="auto", run__epochs=1, run__checkpoint_steps=0,
                                     optim__average=0.9))
        steps = len(log_lines(folder, "step"))
    lines = collections.Counter(note.where for note in seen.syncs if note.phase in IN_A_STEP)
    found = {"lines": {line: count / steps for line, count in lines.items()},
             "host_syncs": sum(lines.values()) / steps, "wrong_device": len(seen.wrong_device)}
    print(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main())
