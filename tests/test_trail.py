"""--debug leaves the name of the module that was running, forward and backward, whatever ends the process."""
import json
import signal

import pytest
import torch

from Runtime import trail, watchdog
from tests.test_watchdog import events, lines, run_process

NETWORK = """
import torch
from Runtime import trail
class Crash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        ctypes.string_at(0)
class Layer(torch.nn.Linear):
    def forward(self, x):
        if CRASH == "forward":
            ctypes.string_at(0)
        return Crash.apply(super().forward(x)) if CRASH == "backward" else super().forward(x)
inner = torch.nn.Sequential(torch.nn.GELU(), Layer(4, 4))
net = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 1))
trail.follow(net)
watchdog.new_step(3)
watchdog.phase("forward", "diffusion")
loss = net(torch.ones(2, 4)).sum()
watchdog.phase("backward", "diffusion")
loss.backward()
"""


@pytest.mark.parametrize("crash, phase, module", [("forward", "forward", "1.1 (Layer)"),
                                                  ("backward", "backward", "backward of 1.1 (Layer)")])
def test_a_segfault_in_a_module_leaves_its_name(crash, phase, module, tmp_path):
    done = run_process(tmp_path, NETWORK.replace("CRASH", repr(crash)))
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "rank1.stack").read_text()
    now = lines(tmp_path)[-1]
    assert (now["phase"], now["module"], now["step"]) == (phase, module, 3)


def test_the_breadcrumb_follows_into_a_module_and_out_of_it(monkeypatch):
    seen = []
    monkeypatch.setattr(watchdog, "inside", seen.append)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    assert trail.follow(net) == 4
    net(torch.ones(1, 2)).sum().backward()
    outer, inner = "the network itself (Sequential)", "1 (Sequential)"
    assert seen == [outer, "0 (Linear)", outer, inner, "1.0 (Linear)", inner, outer, "",
                    "backward of 1.0 (Linear)", "backward of 0 (Linear)"]


def test_an_exception_leaves_no_module_open(monkeypatch):
    class Refusing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no")
    seen = []
    monkeypatch.setattr(watchdog, "inside", seen.append)
    net = torch.nn.Sequential(torch.nn.Identity(), Refusing())
    trail.follow(net)
    with pytest.raises(ValueError):
        net(torch.ones(1))
    net[1].forward = lambda x: x
    net(torch.ones(1))
    assert seen[-1] == "" and seen.count("1 (Refusing)") == 2


def test_without_debug_nothing_is_written_between_two_phases(tmp_path):
    body = "watchdog.phase('forward')\nprint(json.dumps(watchdog.STATE['module']))"
    assert json.loads(run_process(tmp_path, body).stdout) == ""
    assert "module" not in lines(tmp_path)[-1] and not events(tmp_path, "module")
