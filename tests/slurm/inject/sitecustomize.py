"""Devices for tests: this folder on PYTHONPATH makes torch.accelerator report as many as FAKE_DEVICES says for a node.

FAKE_DEVICES is JSON, e.g. {"n1": 2, "n2": 0}, by SLURMD_NODENAME; "hang" is a driver that does not answer. The devices
are `cpu` ones: tensors on cpu:1 work, and are on the CPU. TORCH_TAKES is how many seconds more torch takes to load, as
from a slow file system. The product knows nothing of it.
"""
import json
import os
import sys
import time
from pathlib import Path


def report_devices(accelerator):
    count = json.loads(os.environ["FAKE_DEVICES"]).get(os.environ.get("SLURMD_NODENAME", ""), 0)

    def current_accelerator(check_available=False):
        return None if check_available and not count else sys.modules["torch"].device("cpu")

    def device_count():
        while count == "hang":
            time.sleep(1)
        return count

    accelerator.device_count = device_count
    accelerator.is_available = lambda: count == "hang" or count > 0
    accelerator.current_accelerator = current_accelerator


sys.path.append(str(Path(__file__).resolve().parents[2]))
from after_import import after_import  # noqa: E402

if os.environ.get("FAKE_DEVICES"):
    after_import("torch.accelerator", report_devices)
if os.environ.get("TORCH_TAKES"):
    after_import("torch", lambda torch: time.sleep(float(os.environ["TORCH_TAKES"])))
