"""Verdicts from what ranks leave behind: the lines of the real log, and stacks of processes that really died."""
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from Runtime.files import PASSING
from Supervisor.verdict import judge, read_rank, sentence
from tests import launching
from tests.tiny import ROOT

NOW, DEADLINE = 1e9, 30.0
END = {"event": "end", "spent": {}}
KILLED, SEGFAULT, BY_LAUNCHER = {"code": 137}, {"code": 139}, {"code": 137, "by_launcher": True}
ECHO = "RuntimeError: [pair.cc:537] Read error [10.0.0.2]:52608: Connection reset by peer"


def write_rank(run, rank, *events, phase="forward", mode="diffusion", number=50, step=7, exit=None, stack="", attempt=0,
               deadline=DEADLINE, host=""):
    """The log of a rank as Runtime/watchdog.py and the launcher write it. phase None: it never came so far."""
    same = {"attempt": attempt, "rank": rank, "step": step, "time": NOW}
    lines = []
    if phase:
        lines = [{**same, "event": "start", "host": host or f"node{rank}", "pid": 1, "node": ""}]
        lines += [{**same, **event} for event in events]
        lines += [{**same, "event": "now", "mode": mode, "phase": phase, "number": number, "deadline": deadline}]
    if exit:
        lines += [{"event": "exit", "attempt": attempt, "rank": rank, "time": NOW + DEADLINE + 6, **exit}]
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


def test_ranks_of_a_node_that_died_are_named(tmp_path):
    """The others are dying of it when the scheduler's TERM reaches them."""
    for rank in (0, 1):
        write_rank(tmp_path, rank, died(ECHO, -1), exit={"code": 143})
    for rank in (2, 3):
        write_rank(tmp_path, rank)
    verdict = verdict_of(tmp_path, 4)
    assert (verdict["cause"], verdict["rank"], verdict["host"]) == ("vanished", 2, "node2")
    assert verdict["detail"].startswith("rank 2-3 left neither")


def test_a_launch_that_was_asked_to_leave_at_its_start_has_not_died(tmp_path):
    verdict = verdict_of(tmp_path, 2, 42)
    assert (verdict["cause"], verdict["rank"], verdict["dead"]) == ("planned restart", None, False)
    assert verdict_of(tmp_path, 2, 1)["cause"] == "never started"


def test_all_killed_blames_nobody(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, exit=KILLED)
    verdict = verdict_of(tmp_path, 2, 137)
    assert (verdict["cause"], verdict["rank"]) == ("killed", None) and "all ranks ended by SIGKILL" in sentence(verdict)


def test_a_rank_that_the_launcher_killed_was_not_killed(tmp_path):
    write_rank(tmp_path, 0, died("ValueError: bad\nworse"), exit={"code": 1})
    write_rank(tmp_path, 1, exit=BY_LAUNCHER)
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == ("exception", 0, "ValueError: bad")
    assert verdict["stack"] == ["net.py:3 main", "net.py:9 forward"] and ", at net.py:9 forward" in sentence(verdict)


def test_a_segmentation_fault_names_the_function(tmp_path, stacks):
    write_rank(tmp_path, 0, died(ECHO), exit={"code": 1})
    write_rank(tmp_path, 1, exit=SEGFAULT, stack=stacks["crash"])
    verdict = verdict_of(tmp_path, 2, 139)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == ("crash in native code", 1, "Segmentation fault")
    assert "in culprit" in "".join(verdict["stack"]), verdict["stack"]


def test_a_segmentation_fault_of_a_librarys_thread_is_told_apart(tmp_path, stacks):
    write_rank(tmp_path, 0, died(ECHO), exit={"code": 1})
    write_rank(tmp_path, 1, exit=SEGFAULT, stack=stacks["outside"])
    verdict = verdict_of(tmp_path, 2, 139)
    assert (verdict["cause"], verdict["rank"]) == ("crash in native code", 1)
    assert verdict["detail"] == "Segmentation fault in a thread outside Python"


@pytest.mark.parametrize("thread", ["Current thread", "Thread"])
def test_an_abort_after_the_death_of_another_rank_is_not_the_cause(tmp_path, thread):
    write_rank(tmp_path, 0, exit={"code": 134}, stack=f"Fatal Python error: Aborted\n\n{thread} 0x1:\n")
    write_rank(tmp_path, 1, exit=KILLED)
    assert (verdict_of(tmp_path, 2, 134)["cause"], verdict_of(tmp_path, 2, 134)["rank"]) == ("killed", 1)


def test_a_kill_by_the_kernel_for_want_of_memory_is_told_apart(tmp_path):
    write_rank(tmp_path, 0, died(ECHO), exit={"code": 1})
    write_rank(tmp_path, 1, exit={**KILLED, "oom_kill": True})
    verdict = verdict_of(tmp_path, 2, 137)
    assert (verdict["cause"], verdict["rank"]) == ("out of host memory", 1) and "num_workers" in verdict["detail"]


@pytest.mark.parametrize("words", ["", "crash"], ids=["silent", "with its last words"])
@pytest.mark.parametrize("phase, cause, rank", [("forward", "hang", 0), ("backward", "out of step", 1)])
def test_a_crash_on_the_way_out_is_not_the_cause(tmp_path, stacks, phase, cause, rank, words):
    write_rank(tmp_path, 0, phase=phase, number=50, exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, died(ECHO, 3), phase="agree", number=51, exit=SEGFAULT, stack=stacks.get(words, ""))
    assert (verdict_of(tmp_path, 2)["cause"], verdict_of(tmp_path, 2)["rank"]) == (cause, rank)


@pytest.mark.parametrize("code, name", [(139, "SIGSEGV"), (134, "SIGABRT"), (135, "SIGBUS")])
def test_a_native_crash_without_a_stack_is_known_by_its_signal(tmp_path, code, name):
    write_rank(tmp_path, 0, exit={"code": code})
    assert (verdict_of(tmp_path, 1)["cause"], verdict_of(tmp_path, 1)["detail"]) == ("crash in native code", name)


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
    ("DistBackendError: Bootstrap : no socket interface found", "communication set-up"),
    ("RuntimeError: ccl backend not found", "communication set-up"),
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
    write_rank(tmp_path, 0, died(f"OSError: [Errno {number}] {os.strerror(number)}: 'x.pth'", errno=number),
               exit={"code": 1})
    assert verdict_of(tmp_path, 1)["cause"] == "disk"


def test_an_echo_alone_is_better_than_nothing(tmp_path):
    write_rank(tmp_path, 0, exit={"code": 1})
    write_rank(tmp_path, 1, died(ECHO), exit={"code": 1})
    assert verdict_of(tmp_path, 2)["rank"] == 1


def test_a_hang_is_blamed_on_the_rank_behind(tmp_path, stacks):
    write_rank(tmp_path, 0, phase="agree", number=51, exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, phase="forward", number=50, exit={"code": 1}, stack=stacks["hang"])
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == ("hang", 1, "no progress for 36 s")
    assert "in culprit" in verdict["stack"][-1] and "in culprit" in sentence(verdict)


def test_a_rank_in_an_agreement_that_another_has_passed_was_left_alone(tmp_path, stacks):
    for rank, number, phase in ((0, 51, "agree"), (1, 53, "optimizer"), (2, 51, "agree")):
        write_rank(tmp_path, rank, phase=phase, number=number, exit={"code": 1}, stack=stacks["hang"])
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"]) == ("out of step", 1)
    assert verdict["detail"] == "went on without the others, who wait in agree (diffusion) of step 7"


def test_a_hang_of_all_blames_nobody(tmp_path, stacks):
    for rank in (0, 1):
        write_rank(tmp_path, rank, phase="backward", exit={"code": 1}, stack=stacks["hang"])
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"]) == ("hang", None) and "all ranks are in backward" in verdict["detail"]


def test_a_rank_whose_watchdog_did_not_run_is_frozen(tmp_path, stacks):
    write_rank(tmp_path, 0, phase="agree", number=51, exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, phase="forward", number=50, exit=BY_LAUNCHER)
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("frozen", 1, "forward")


@pytest.mark.parametrize("stack", ["", "hang"])
def test_a_stopped_rank_that_was_woken_for_its_end_is_frozen(tmp_path, stacks, stack):
    """Slurm sends CONT and TERM before KILL: the rank then finds the others gone, or its own deadline over."""
    for rank in (0, 2):
        write_rank(tmp_path, rank, phase="agree", number=50, exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, died(ECHO, DEADLINE + 9), phase="agree", number=50, stack=stacks.get(stack, ""),
               exit={"code": 1, "time": NOW + DEADLINE + 9})
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("frozen", 1, "agree")


def test_a_stopped_rank_that_its_shell_has_seen_is_frozen(tmp_path, stacks):
    """Woken, it may go on to where the others are, and have nothing to tell it from them."""
    write_rank(tmp_path, 0, phase="agree", number=50, exit={"code": 1}, stack=stacks["hang"])
    for rank in (1, 2):
        write_rank(tmp_path, rank, died(ECHO, DEADLINE + 5), phase="agree", number=50,
                   exit={"code": 1, "time": NOW + DEADLINE + 7, **({"stopped": True} if rank == 2 else {})})
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("frozen", 2, "agree")


def test_a_rank_ended_before_its_own_deadline_is_not_frozen(tmp_path, stacks):
    write_rank(tmp_path, 0, phase="agree", number=51, exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, phase="evaluate", number=50, exit=BY_LAUNCHER, deadline=900.0)
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("hang", 1, "evaluate")


def test_who_would_not_exit(tmp_path, stacks):
    finish(tmp_path, 0)
    write_rank(tmp_path, 1, END, phase="exit", number=90, exit=BY_LAUNCHER)
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["dead"]) == ("would not exit", 1, True)
    write_rank(tmp_path, 1, exit={"code": 1}, phase=None, stack=stacks["hang"])  # its own deadline ended it
    assert verdict_of(tmp_path, 2)["cause"] == "would not exit"


def test_a_refusal_keeps_its_sentence(tmp_path):
    write_rank(tmp_path, 0, died(ECHO), phase="join", mode="", exit={"code": 1})
    refused = {"event": "refused", "error": "x.nii: not a volume."}
    write_rank(tmp_path, 1, refused, END, phase="exit", mode="", number=3, exit={"code": 43})
    verdict = verdict_of(tmp_path, 2, 43)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == ("refused", 1, "x.nii: not a volume.")


def test_out_of_step_names_who_differs_and_in_what(tmp_path):
    event = {"event": "out of step", "differs": 2, "what": "shapes", "found": "7", "wanted": "9"}
    for rank in range(3):
        write_rank(tmp_path, rank, event, died("OutOfStep: rank 2 is out of step"), phase="agree", exit={"code": 1})
    verdict = verdict_of(tmp_path, 3)
    assert (verdict["cause"], verdict["rank"], verdict["detail"]) == ("out of step", 2, "shapes is 7, not 9")


def test_a_rank_that_left_no_sign_of_life(tmp_path):
    write_rank(tmp_path, 0, died("RuntimeError: rank 1 of 2 did not arrive within 3 s"), phase="join", mode="",
               exit={"code": 1})
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"]) == ("never started", 1)
    assert verdict["others"] == "rank 0: join of step 7" and "rank 1 on an unknown host" in sentence(verdict)


def test_a_rank_that_ended_before_it_had_a_log_while_the_others_waited(tmp_path, stacks):
    write_rank(tmp_path, 0, phase="join", mode="", exit={"code": 1}, stack=stacks["hang"])
    write_rank(tmp_path, 1, phase=None, exit={"code": 1})
    verdict = verdict_of(tmp_path, 2)
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("never started", 1, "launch")


def test_nothing_at_all(tmp_path):
    assert verdict_of(tmp_path, 2)["cause"] == "never started"
    assert verdict_of(tmp_path, 2, None)["cause"] == "vanished"


def test_ranks_that_vanished_and_a_round_that_ran_out_of_time(tmp_path):
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, number=49, phase="deform")
    assert (verdict_of(tmp_path, 2, None)["cause"], verdict_of(tmp_path, 2, None)["rank"]) == ("vanished", None)
    verdict = verdict_of(tmp_path, 2, 124)
    assert (verdict["cause"], verdict["rank"]) == ("time limit of the round", 1)


def test_done_and_planned_restart_are_no_deaths(tmp_path):
    for rank in (0, 1):
        finish(tmp_path, rank)
    verdict = verdict_of(tmp_path, 2, 0)
    assert (verdict["cause"], verdict["dead"], sentence(verdict)) == ("done", False, "attempt 0: done")
    for rank in (0, 1):
        finish(tmp_path, rank, {"event": "leave", "reason": "asked by a signal"}, attempt=1)
    assert sentence(judge(tmp_path, 1, 2, 42)) == "attempt 1: planned restart (asked by a signal)"
    assert verdict_of(tmp_path, 2, 0)["cause"] == "done"  # each attempt keeps its own


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
