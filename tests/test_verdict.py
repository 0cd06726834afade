"""Verdicts from what ranks leave behind: the lines of the real log, and stacks of processes that really died."""
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from Runtime.files import PASSING
from Supervisor.verdict import NO_FILE, judge, read_rank, sentence
from tests import launching
from tests.tiny import ROOT

NOW, DEADLINE = 1e9, 30.0
END = {"event": "end", "spent": {}}
KILLED, SEGFAULT, ABORT, BY_LAUNCHER = {"code": 137}, {"code": 139}, {"code": 134}, {"code": 137, "by_launcher": True}
ECHO = "RuntimeError: [pair.cc:537] Read error [10.0.0.2]:52608: Connection reset by peer"


def write_rank(run, rank, *events, phase="forward", mode="diffusion", number=50, step=7, exit=None, stack="", attempt=0,
               deadline=DEADLINE, host="", clock=0):
    """The log of a rank as Runtime/watchdog.py and the launcher write it. phase None: it never came so far. clock:
    seconds by which that of its node is ahead."""
    same = {"attempt": attempt, "rank": rank, "step": step, "time": NOW + clock}
    lines = []
    if phase:
        lines = [{**same, "event": "start", "host": host or f"node{rank}", "pid": 1, "node": ""}]
        lines += [{**same, **event} for event in events]
        lines += [{**same, "event": "now", "mode": mode, "phase": phase, "number": number, "deadline": deadline}]
    if exit:
        lines += [{"event": "exit", "attempt": attempt, "rank": rank, "time": NOW + DEADLINE + 6 + clock, **exit}]
    with open(run / f"rank{rank}.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (run / f"rank{rank}.stack").write_text(stack)


def died(error, seconds=0.0, **more):
    stack = ["net.py:3 main", "net.py:9 forward"]
    return {"event": "died", "error": error, "time": NOW + seconds, "stack": stack, **more}


def finish(run, rank, *events, **more):
    write_rank(run, rank, *events, END, phase="exit", mode="", number=90, exit={"code": 0}, **more)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """What faulthandler really leaves, with a second thread and numpy.

    At a deadline, and at a segmentation fault of the main thread or of one that a library has started, in strlen(NULL).
    """
    folder = tmp_path_factory.mktemp("stacks")
    body = """
import ctypes, faulthandler, sys, threading, time
import numpy
file, libc = open(sys.argv[1], "w"), ctypes.CDLL(None)
faulthandler.enable(file=file)
threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
def culprit():
    if sys.argv[1].endswith("crash"):
        faulthandler._sigsegv()
    if sys.argv[1].endswith("outside"):
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.strlen, None)
    faulthandler.dump_traceback_later(0.2, exit=True, file=file)
    time.sleep(20)
culprit()
"""
    names = ("crash", "outside", "hang")
    for name in names:
        launching.run([sys.executable, "-c", body, str(folder / name)], timeout=20, stderr=subprocess.DEVNULL)
    return {name: (folder / name).read_text() for name in names}


def verdict_of(run, world_size, code=1):
    verdict = judge(run, 0, world_size, code)
    assert verdict["attempt"] == 0 and sentence(verdict).startswith(f"attempt 0: {verdict['cause']}")
    return verdict


def test_one_killed_rank_is_named_and_echoes_of_its_death_are_not(tmp_path):
    write_rank(tmp_path, 0, died(ECHO, -3), phase="backward", exit={"code": 1})
    write_rank(tmp_path, 1, phase="forward", exit=KILLED)
    write_rank(tmp_path, 2, died("DistBackendError: NCCL error: remote process exited", -2), exit={"code": 1})
    verdict = verdict_of(tmp_path, 3, 137)
    assert (verdict["cause"], verdict["rank"], verdict["host"], verdict["detail"]) == ("killed", 1, "node1",
                                                                                      "ended by SIGKILL")
    assert (verdict["step"], verdict["mode"], verdict["phase"], verdict["dead"]) == (7, "diffusion", "forward", True)
    assert verdict["others"] == "rank 0: backward (diffusion) of step 7; rank 2: forward (diffusion) of step 7"
    assert sentence(verdict) == ("attempt 0: killed: rank 1 on node1 in forward (diffusion) of step 7: ended by "
                                 "SIGKILL; " + verdict["others"])
    assert verdict["ended"] == NOW + DEADLINE + 6


def test_of_512_ranks_the_verdict_stays_one_readable_sentence(tmp_path):
    """And is found in seconds: the launcher reads the logs of all ranks."""
    for rank in range(512):
        where = {"phase": "forward", "exit": KILLED} if rank == 300 else {"phase": "agree", "exit": {"code": 143}}
        write_rank(tmp_path, rank, *([] if rank == 300 else [died(ECHO, -1)]), **where)
    began = time.time()
    verdict = verdict_of(tmp_path, 512)
    took = time.time() - began
    print(f"the logs of 512 ranks were judged in {took:.2f} s")
    assert (verdict["cause"], verdict["rank"]) == ("killed", 300) and took < 5
    assert verdict["others"] == "rank 0-299, 301-511: agree (diffusion) of step 7" and len(sentence(verdict)) < 200


def rank(*events, exit=1, **more):
    """What `write_rank` takes. exit: an exit code, or the launcher's words on it; None where it has none."""
    return events, {"exit": {"code": exit} if isinstance(exit, int) else exit, **more}


AT_DEADLINE = {"number": 50, "stack": "hang"}  # what ended it; `number` tells how far the rank has come
AHEAD = {"phase": "agree", "number": 51, "stack": "hang"}
WOKEN = {"code": 1, "time": NOW + DEADLINE + 9}  # long after its deadline
OUT_OF_STEP = {"event": "out of step", "differs": 2, "what": "shapes", "found": "7", "wanted": "9"}
ABSENT = rank(died("RuntimeError: rank 1 of 2 did not arrive within 3 s"), phase="join", mode="")
# (what the ranks left, exit code of the launch or None, cause, rank, how the detail begins)
CASES = {
    # The others are dying of it when the scheduler's TERM reaches them.
    "a node that died": ([rank(died(ECHO, -1), exit=143)] * 2 + [rank(exit=None)] * 2, 1, "vanished", 2,
                         "rank 2-3 left neither"),
    "asked to leave at its start": ([], 42, "planned restart", None, ""),
    "no word of any rank": ([], 1, "never started", 0, "rank 0-1 left no sign of life"),
    "nothing at all": ([], None, "vanished", None, ""),
    "all killed": ([rank(exit=KILLED)] * 2, 137, "killed", None, "all ranks ended by SIGKILL"),
    "one killed by the launcher": ([rank(died("ValueError: bad\nworse")), rank(exit=BY_LAUNCHER)], 1, "exception", 0,
                                   "ValueError: bad"),
    "a segmentation fault": ([rank(died(ECHO)), rank(exit=SEGFAULT, stack="crash")], 139, "crash in native code", 1,
                             "Segmentation fault"),
    "that of a library's thread": ([rank(died(ECHO)), rank(exit=SEGFAULT, stack="outside")], 139,
                                   "crash in native code", 1, "Segmentation fault in a thread outside Python"),
    **{f"an abort after the death of another, {thread}": (
        [rank(exit=134, stack=f"Fatal Python error: Aborted\n\n{thread} 0x1:\n"), rank(exit=KILLED)], 134, "killed", 1,
        "") for thread in ("Current thread", "Thread")},
    "the kernel, for want of memory": ([rank(died(ECHO)), rank(exit={**KILLED, "oom_kill": True})], 137,
                                       "out of host memory", 1, "the kernel ended it"),
    # A crash on the way out, with last words of faulthandler or without.
    **{f"a crash after a {cause} in {phase}, {words or 'silent'}": (
        [rank(phase=phase, **AT_DEADLINE), rank(died(ECHO, 3), phase="agree", number=51, exit=SEGFAULT, stack=words)],
        1, cause, culprit, "") for phase, cause, culprit in (("forward", "hang", 0), ("backward", "out of step", 1))
        for words in ("", "crash")},
    "several aborts, the second rank's first": (
        [rank(exit={**ABORT, "time": NOW + 2}), rank(exit={**ABORT, "time": NOW}), rank(exit=ABORT)], 134,
        "crash in native code", 1, ""),
    "several kills": ([rank(), rank(exit=KILLED), rank(exit={**KILLED, "time": NOW})], 137, "killed", 2, ""),
    **{f"a node that died: {words}": ([rank(died(f"RuntimeError: [gloo/pair.cc:1] Read error [n2]: {words}", -1)),
                                       rank(exit=None)], 1, "vanished", 1, "rank 1 left neither")
       for words in ("No route to host", "Connection timed out", "Network is unreachable")},
    **{f"{name} without a stack": ([rank(exit=code)], 1, "crash in native code", 0, name)
       for code, name in ((139, "SIGSEGV"), (134, "SIGABRT"), (135, "SIGBUS"))},
    "an echo alone": ([rank(), rank(died(ECHO))], 1, "exception", 1, ECHO[:20]),
    "a hang of the rank behind": ([rank(**AHEAD), rank(**AT_DEADLINE)], 1, "hang", 1, "no progress for 36 s"),
    "an agreement that one has passed": (
        [rank(**AHEAD), rank(phase="optimizer", number=53, stack="hang"), rank(**AHEAD)], 1, "out of step", 1,
        "went on without the others, who wait in agree (diffusion) of step 7"),
    "a hang of all": ([rank(phase="backward", **AT_DEADLINE)] * 2, 1, "hang", None, "all ranks are in backward"),
    "no watchdog ran": ([rank(**AHEAD), rank(exit=BY_LAUNCHER)], 1, "frozen", 1, ""),
    # Slurm sends CONT and TERM before KILL: the rank then finds the others gone, or its own deadline over.
    **{f"woken for its end, {stack or 'silent'}": (
        [rank(phase="agree", **AT_DEADLINE), rank(died(ECHO, DEADLINE + 9), phase="agree", stack=stack, exit=WOKEN),
         rank(phase="agree", **AT_DEADLINE)], 1, "frozen", 1, "") for stack in ("", "hang")},
    # Woken, it may go on to where the others are, and have nothing to tell it from them.
    "stopped, as its shell has seen": (
        [rank(phase="agree", **AT_DEADLINE), rank(died(ECHO, DEADLINE + 5), phase="agree", exit=WOKEN),
         rank(died(ECHO, DEADLINE + 5), phase="agree", exit={**WOKEN, "stopped": True})], 1, "frozen", 2, ""),
    "ended before its own deadline": ([rank(**AHEAD), rank(phase="evaluate", exit=BY_LAUNCHER, deadline=900.0)], 1,
                                      "hang", 1, ""),
    **{f"would not exit, {how}": ([rank(END, phase="exit", number=90, exit=0),
                                   rank(END, phase="exit", number=90, **more)], 1, "would not exit", 1, "")
       for how, more in (("killed", {"exit": BY_LAUNCHER}), ("at its deadline", {"stack": "hang"}))},
    "a refusal": ([rank(died(ECHO), phase="join", mode=""), rank(
        {"event": "refused", "error": "x.nii: not a volume."}, END, phase="exit", mode="", number=3, exit=43)], 43,
        "refused", 1, "x.nii: not a volume."),
    "out of step": ([rank(OUT_OF_STEP, died("OutOfStep: rank 2 is out of step"), phase="agree")] * 3, 1,
                    "out of step", 2, "shapes is 7, not 9"),
    "a rank that never came": ([ABSENT, rank(phase=None, exit=None)], 1, "never started", 1, ""),
    "one that ended before its log": ([rank(phase="join", mode="", **AT_DEADLINE), rank(phase=None)], 1,
                                      "never started", 1, ""),
    "all vanished": ([rank(exit=None), rank(phase="deform", number=49, exit=None)], None, "vanished", None, ""),
    "the round's time limit": ([rank(exit=None), rank(phase="deform", number=49, exit=None)], 124,
                               "time limit of the round", 1, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_told_and_who_is_to_blame(tmp_path, stacks, case):
    ranks, code, cause, culprit, detail = CASES[case]
    for number, (events, more) in enumerate(ranks):
        stack = more.get("stack", "")
        write_rank(tmp_path, number, *events, **{**more, "stack": stacks.get(stack, stack)})
    verdict = verdict_of(tmp_path, len(ranks) or 2, code)
    assert (verdict["cause"], verdict["rank"]) == (cause, culprit) and verdict["detail"].startswith(detail)
    assert verdict["dead"] == (cause != "planned restart")


@pytest.mark.parametrize("deadline, clock, cause", [(50.0, -20, "hang"), (DEADLINE, 20, "frozen")])
def test_clocks_that_differ_blame_no_healthy_node_and_hide_no_frozen_one(tmp_path, stacks, deadline, clock, cause):
    """The others have ended 36 s after the last word of rank 1, which had the time of its own deadline to go on."""
    behind = {"phase": "evaluate", "clock": clock, "deadline": deadline}
    for number, more in enumerate(({**AHEAD, "stack": stacks["hang"], "exit": {"code": 1}}, behind)):
        paces = [{"event": "pace", "step": step, "time": NOW - 100 + step + more.get("clock", 0) + late * number}
                 for step, late in ((9, 0.2), (19, 30), (29, -0.1))]  # once it was busy with something else
        write_rank(tmp_path, number, *paces, **more)
    write_rank(tmp_path, 2, **{**AHEAD, "stack": stacks["hang"], "exit": {"code": 1}})  # its log was lost
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"]) == (cause, 1)
    assert cause == "frozen" or verdict["detail"] == "no progress for 50 s"


def test_the_stack_is_that_of_the_one_to_blame(tmp_path, stacks):
    write_rank(tmp_path, 0, died("ValueError: bad"), exit={"code": 1})
    verdict = verdict_of(tmp_path, 1)
    assert verdict["stack"] == ["net.py:3 main", "net.py:9 forward"] and ", at net.py:9 forward" in sentence(verdict)
    for attempt, (words, code) in enumerate((("crash", 139), ("hang", 1)), 1):
        write_rank(tmp_path, 0, exit={"code": code}, stack=stacks[words], attempt=attempt)
        verdict = judge(tmp_path, attempt, 1, code)
        assert "in culprit" in "".join(verdict["stack"]) and "in culprit" in sentence(verdict)


def test_a_rank_that_left_no_sign_of_life(tmp_path):
    write_rank(tmp_path, 0, *ABSENT[0], **ABSENT[1])
    verdict = verdict_of(tmp_path, 2)
    assert verdict["others"] == "rank 0: join" and verdict["phase"] == "launch"
    assert "rank 1 on an unknown host" in sentence(verdict)


def test_done_and_planned_restart_are_no_deaths(tmp_path):
    for rank in (0, 1):
        finish(tmp_path, rank)
    verdict = verdict_of(tmp_path, 2, 0)
    assert (verdict["cause"], verdict["dead"], sentence(verdict)) == ("done", False, "attempt 0: done")
    for rank in (0, 1):
        finish(tmp_path, rank, {"event": "leave", "reason": "asked by a signal"}, attempt=1)
    assert sentence(judge(tmp_path, 1, 2, 42)) == "attempt 1: planned restart (asked by a signal)"
    assert verdict_of(tmp_path, 2, 0)["cause"] == "done"  # each attempt keeps its own


def test_of_several_leaks_the_one_that_runs_out_first_is_the_reason(tmp_path):
    leaks = ({}, {"steps_left": 32}, {"steps_left": 9}, {"steps_left": 32})
    for rank, leak in enumerate(leaks):
        finish(tmp_path, rank, {"event": "leave", "reason": f"rank {rank}" + " " * 9 * (2 - rank), **leak})
    assert verdict_of(tmp_path, 4, 42)["detail"] == "rank 2"


@pytest.mark.parametrize("error, cause", [
    ("OutOfMemoryError: XPU out of memory", "out of device memory"),
    ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of device memory"),
    ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "out of host memory"),
    ("RuntimeError: DataLoader worker (pid 3) was killed", "a loader worker died"),
    ("OSError: [Errno 28] No space left on device", "disk"), ("KeyError: 'x'", "exception"),
    ("RuntimeError: the weights are not finite after step 3: head.bias", "weights not finite"),
    # As programs print them.
    ("RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
     "out of device memory"),
    ("RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "device lost"),
    ("RuntimeError: No XPU devices are available.", "device lost"),
    ("RuntimeError: No CUDA GPUs are available", "device lost"),
    ("AcceleratorError: CUDA error: out of memory", "out of device memory"),
    ("RuntimeError: HIP error: out of memory", "out of device memory"),
    ("RuntimeError: MIOpen Error: No suitable algorithm was found to execute the required convolution", "kernel cache"),
    ("RuntimeError: miopenStatusUnknownError", "kernel cache"),
    ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
     "out of step"),
    ("OSError: [Errno 24] Too many open files", "too many open files"),
    ("OSError: [Errno 27] x.pth could not be written (File too large; 75.28 GiB free)", "file too large"),
    ("DistBackendError: Bootstrap : no socket interface found", "communication set-up"),
    ("DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
     "out of device memory"),
    ("RuntimeError: hipErrorOutOfMemory", "out of device memory"),
    ("RuntimeError: Distributed package doesn't have XCCL built in", "communication set-up"),
    ("RuntimeError: ccl backend not found", "communication set-up"),
    ("AssertionError: Unknown backend type ccl", "communication set-up"),
    ("AssertionError: Unknown c10d backend type CCL", "communication set-up"),
    ("AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "device lost"),
    ("UnpicklingError: Weights only load failed. This file can still be loaded", "a checkpoint that does not load"),
    ("OSError: [Errno 108] Cannot send after transport endpoint shutdown", "disk")])
def test_the_first_own_exception_is_the_cause(tmp_path, error, cause):
    write_rank(tmp_path, 0, died(ECHO, -9), exit={"code": 1})
    write_rank(tmp_path, 1, died("IndexError: later", 2.0), exit={"code": 1})
    write_rank(tmp_path, 2, died(error, 1.0), exit={"code": 1})
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == (cause, 2, error)


@pytest.mark.parametrize("number", sorted(PASSING))
def test_every_fault_of_a_file_system_that_passes_is_a_disk(tmp_path, number):
    """But not a process that cannot be started, nor another one that has died."""
    write_rank(tmp_path, 0, died(f"OSError: [Errno {number}] {os.strerror(number)}: 'x.pth'", errno=number),
               exit={"code": 1})
    assert (verdict_of(tmp_path, 1)["cause"] == "disk") == (number not in NO_FILE)


def run_watchdog(run, body):
    """The rest of `body` in a process with a real watchdog, rank 0 of attempt 0."""
    start = """
import os, sys
from pathlib import Path
from Runtime import watchdog
cfg = {"run.deadline_floor_s": 9, "run.deadline_factor": 3, "run.deadline_first_s": 9}
watchdog.start(Path(sys.argv[1]), 0, 0, cfg, True)
watchdog.new_step(4)
watchdog.phase("backward", "registration")
"""
    launching.run([sys.executable, "-c", start + body, str(run)], cwd=ROOT, timeout=20, stderr=subprocess.DEVNULL)


def test_half_lines_and_long_logs_are_tolerated(tmp_path):
    run_watchdog(tmp_path, "for _ in range(2500):\n    watchdog.event('step', spent={}, filler='x' * 500)\n"
                           "os.kill(os.getpid(), 9)")
    with open(tmp_path / "rank0.jsonl", "ab") as file:
        file.write(b'{"event": "died", "att\n\0\0\xff\xfe\n{"event": "exit", "attempt": 0, "rank": 0, "code": 137, '
                   b'"time": 1.5}\n{"event": "ex')
    assert (tmp_path / "rank0.jsonl").stat().st_size > 2 ** 20 and len(read_rank(tmp_path, 0, 0)["events"]) > 1000
    verdict = verdict_of(tmp_path, 1)
    assert (verdict["cause"], verdict["step"], verdict["phase"]) == ("killed", 4, "backward")
    assert verdict["host"] == socket.gethostname()


def test_the_last_words_of_a_real_process_are_read(tmp_path):
    run_watchdog(tmp_path, "raise MemoryError('cannot allocate 3 GB')")
    verdict = verdict_of(tmp_path, 1)
    assert (verdict["cause"], verdict["rank"], verdict["step"]) == ("out of host memory", 0, 4)
    assert sentence(verdict).endswith("in backward (registration) of step 4: MemoryError: cannot allocate 3 GB, at "
                                      + verdict["stack"][-1])
