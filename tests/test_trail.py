"""--debug leaves the name of the module that was running, forward and backward, whatever ends the process."""
import json
import signal
import sys

import pytest
import torch

from Runtime import trail, watchdog
from tests import launching
from tests.test_watchdog import CFG, events, lines, run_process
from tests.tiny import ROOT

# One process imports torch; its children train a little, each in a run of its own, and crash.
NETWORK = """
import ctypes, json, os, sys
from pathlib import Path
import torch
from Runtime import trail, watchdog
RUN = Path(sys.argv[1])
class Crash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        ctypes.string_at(0)
class Layer(torch.nn.Linear):
    def forward(self, x):
        if self.crash == "forward":
            ctypes.string_at(0)
        return Crash.apply(super().forward(x))
def train(crash):
    (RUN / crash).mkdir()
    watchdog.start(RUN / crash, 1, 4, json.loads(sys.argv[2]), True)
    layer = Layer(4, 4)
    layer.crash = crash
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.GELU(), layer), torch.nn.Linear(4, 1))
    trail.follow(net)
    watchdog.new_step(3)
    watchdog.phase("forward", "diffusion")
    loss = net(torch.ones(2, 4)).sum()
    watchdog.phase("backward", "diffusion")
    loss.backward()
for crash in ("forward", "backward"):
    child = os.fork()
    if not child:
        train(crash)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_segfault_in_a_module_leaves_its_name(tmp_path):
    done = launching.run([sys.executable, "-c", NETWORK, tmp_path, json.dumps(CFG)], cwd=ROOT, timeout=60)
    assert done.stdout.split() == [str(-signal.SIGSEGV)] * 2, done.stderr
    for crash, module in (("forward", "1.1 (Layer)"), ("backward", "backward of 1.1 (Layer)")):
        assert "Segmentation fault" in (tmp_path / crash / "rank1.stack").read_text()
        now = json.loads((tmp_path / crash / "rank1.jsonl").read_text().splitlines()[-1])
        assert (now["phase"], now["module"], now["step"]) == (crash, module, 3)


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
