"""The watchdog in real processes: what is left of them however they end."""
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from Runtime import watchdog
from Supervisor.attempts import free_port
from tests import launching
from tests.launching import until
from tests.tiny import ROOT, arguments, log_lines, make_data

CFG = {"run.deadline_floor_s": 20.0, "run.deadline_factor": 3.0, "run.deadline_first_s": 30.0}
PHASES = ("forward", "agree", "backward", "optimizer")
START = """
import ctypes, json, os, resource, signal, sys, time
from pathlib import Path
from Runtime import watchdog
RUN = Path(sys.argv[1])
watchdog.start(RUN, 1, 4, json.loads(sys.argv[2]), sys.argv[3] == "launcher")
"""


def command(run, body, launcher=True, **cfg):
    cfg = {**CFG, **{f"run.deadline_{key}": value for key, value in cfg.items()}}
    return [sys.executable, "-c", START + body, str(run), json.dumps(cfg), "launcher" if launcher else "alone"]


def run_process(run, body, **options):
    return launching.run(command(run, body, **options), cwd=ROOT, timeout=20)


def lines(run, rank=1):
    return [json.loads(line) for line in (run / f"rank{rank}.jsonl").read_text().splitlines()]


def events(run, kind):
    return [line for line in lines(run) if line["event"] == kind]


def test_the_log_survives_a_kill_and_ends_with_the_place(tmp_path):
    body = ("watchdog.new_step(7)\nwatchdog.event('leak', much=3)\nwatchdog.phase('forward', 'diffusion')\n"
            "print('there', flush=True)\ntime.sleep(30)")
    process = launching.start(command(tmp_path, body), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    found = lines(tmp_path)
    assert [line["event"] for line in found] == ["start", "leak", "now"]
    assert found[0]["pid"] == process.pid and found[0]["host"]
    assert (found[1]["much"], found[1]["step"], found[1]["rank"], found[1]["attempt"]) == (3, 7, 1, 4)
    now = found[-1]
    assert (now["phase"], now["mode"], now["step"], now["attempt"], now["rank"]) == ("forward", "diffusion", 7, 4, 1)
    assert now["number"] == 3 and abs(now["time"] - time.time()) < 20


@pytest.mark.parametrize("umask, mode", [(0o002, 0o664), (0o077, 0o600)])
def test_who_may_write_the_log_is_for_the_umask_to_say(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        run_process(tmp_path, "")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


@pytest.mark.parametrize("hang", ["time.sleep(15)", "ctypes.PyDLL(None).sleep(15)"])  # the latter keeps the GIL
def test_a_phase_beyond_its_deadline_ends_the_process_and_names_the_function(tmp_path, hang):
    body = (f"def culprit():\n    {hang}\nprint(time.time(), flush=True)\n"
            "watchdog.phase('forward', 'contrastive')\nculprit()\nprint('survived')")
    done = run_process(tmp_path, body, floor_s=0.4, first_s=0.4)
    assert done.returncode == 1 and "survived" not in done.stdout
    assert 0.4 <= time.time() - float(done.stdout) < 10, "since the phase began, not since the interpreter was started"
    stack = (tmp_path / "rank1.stack").read_text()
    assert stack.startswith("Timeout") and "in culprit" in stack
    assert lines(tmp_path)[-1]["phase"] == "forward" and lines(tmp_path)[-1]["deadline"] == 0.4


@pytest.mark.slow
def test_each_phase_starts_its_own_clock_and_the_last_one_keeps_it(tmp_path):
    body = ("for _ in range(4):\n    watchdog.phase('forward')\n    time.sleep(0.6)\nprint('in time', flush=True)\n"
            "watchdog.finish()\ntime.sleep(15)")
    done = run_process(tmp_path, body, floor_s=2.0, first_s=2.0)
    assert done.stdout == "in time\n" and done.returncode == 1
    assert "Timeout" in (tmp_path / "rank1.stack").read_text() and len(events(tmp_path, "end")) == 1
    assert lines(tmp_path)[-1]["phase"] == "exit"


def test_without_a_launcher_the_stack_goes_to_standard_error(tmp_path):
    done = run_process(tmp_path, "time.sleep(15)", launcher=False, floor_s=0.3, first_s=0.3)
    assert done.returncode == 1 and "Timeout" in done.stderr and not (tmp_path / "rank1.stack").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines, in this process and by a clock of its own
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Starts a watchdog that ends nothing. Returns the `sleep` by which alone its clock moves."""
    clock = [1000.0]
    # The machine's clock is set back by an hour with each second: no deadline may go by it.
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(time=lambda: 1e9 - 3600 * clock[0],
                                                          monotonic=lambda: clock[0]))
    monkeypatch.setattr(watchdog, "faulthandler", SimpleNamespace(enable=lambda **_: None,
                                                                  dump_traceback_later=lambda *_, **__: None))
    monkeypatch.setattr(watchdog, "STATE", dict(watchdog.STATE))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def sleep(seconds):
        clock[0] += seconds

    def start(**cfg):
        cfg = {**CFG, **{f"run.deadline_{key}": value for key, value in cfg.items()}}
        watchdog.start(tmp_path, 0, 0, cfg, launcher=False)
        return sleep

    yield start
    os.close(watchdog.STATE["file"])


def step(sleep, modes, seconds=0.0, last=0.0):
    """A step with four phases of each mode. seconds: of each phase; last: of those of the last mode, in addition."""
    watchdog.new_step(0)
    for mode in modes:
        for name in PHASES:
            watchdog.phase(name, mode)
            sleep(seconds + last * (mode == modes[-1]))
    return watchdog.end_step()


def test_phases_overwrite_one_line_and_events_append(tmp_path, watch):
    sleep, log, sizes = watch(), tmp_path / "rank0.jsonl", set()
    for _ in range(200):
        step(sleep, ["registration"])
        sizes.add(log.stat().st_size)
    watchdog.event("short")
    assert len(sizes) == 1 and 0 < log.stat().st_size - sizes.pop() < 200
    found = lines(tmp_path, 0)
    assert [line["event"] for line in found] == ["start", "short", "now"] and found[-1]["number"] == 1 + 6 * 200


def test_the_next_attempt_goes_on_behind_a_line_cut_short(tmp_path, watch):
    watch()
    watchdog.finish()
    os.close(watchdog.STATE["file"])
    with open(tmp_path / "rank0.jsonl", "a") as file:
        file.write('{"event": "exit", "att')
    watch()
    watchdog.event("second")
    text = (tmp_path / "rank0.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in text if line.endswith("}") or line.endswith(" ")]
    assert kinds == ["start", "end", "now", "start", "second", "now"] and '{"event": "exit", "att' in text


def test_deadlines_are_learned_from_steps_but_not_from_the_first(watch):
    sleep = watch(floor_s=0.2, factor=5.0, first_s=9.0)
    assert watchdog.deadline("forward") == 9.0
    spent = step(sleep, [""], 0.3)
    assert spent["forward"] == 0.3 and {"start", "data", "forward"} <= set(spent)
    assert watchdog.deadline("forward") == 9.0
    for _ in range(3):
        step(sleep, [""], 0.025)
    assert watchdog.deadline("forward") == pytest.approx(5 * 0.1), "the median, with no trace of the first one"
    watchdog.phase("checkpoint")
    sleep(0.4)
    watchdog.phase("agree")
    for written, deadline in ((None, 9.0), (0.0, 9.0), (1.5, 7.5), (0.6, 7.5)):  # copied, and then written
        if written is not None:
            watchdog.learn_write(written)
        assert watchdog.deadline("checkpoint") == deadline
    watchdog.phase("evaluate")
    sleep(0.4)
    watchdog.phase("agree", "checkpoint")
    assert watchdog.deadline("evaluate") == pytest.approx(5 * 0.4)
    watchdog.phase("agree", "registration")
    assert watchdog.deadline("agree", "checkpoint") == 7.5


def test_a_mode_that_takes_longer_than_the_steps_before_it_keeps_its_own_time(watch):
    """Steps of next to nothing, then mode 3 opens and each of its phases takes 0.5 s: five times that, from then on."""
    sleep = watch(floor_s=0.2, factor=5.0, first_s=9.0)
    for _ in range(30):
        step(sleep, ["diffusion"])
    for _ in range(2):
        step(sleep, ["diffusion", "registration"], last=0.5)
        assert watchdog.deadline("forward", "registration") == pytest.approx(2.5)
    step(sleep, ["diffusion"])
    assert watchdog.deadline("forward", "diffusion") == 0.2, "the floor"


def test_a_mode_that_first_opens_late_has_the_long_deadline_in_each_of_its_phases(watch):
    sleep = watch(floor_s=2.0, factor=3.0, first_s=33.0)
    for _ in range(30):
        step(sleep, ["diffusion", "contrastive"])
    assert [watchdog.deadline(name, "registration") for name in PHASES] == [33.0] * 4
    step(sleep, ["diffusion", "contrastive", "registration"])
    assert [watchdog.deadline(name, "registration") for name in PHASES] == [2.0] * 4


def test_entering_a_phase_again_at_once_does_not_count_as_having_timed_it(watch):
    watch(floor_s=1.0, factor=3.0, first_s=33.0)
    for name in ("start", "epoch", "checkpoint", "evaluate"):
        watchdog.phase(name)
        watchdog.phase(name)
        assert watchdog.STATE["deadline"] == 33.0


# ---------------------------------------------------------------------------------------------------------------------
# Signals, parts of a phase, last words
# ---------------------------------------------------------------------------------------------------------------------

def test_a_signal_asks_and_does_not_end(tmp_path):
    body = """
for _ in range(4):
    before = watchdog.stop_requested()
    print(before, flush=True)
    while watchdog.stop_requested() == before:
        time.sleep(0.01)
print(watchdog.stop_requested())
watchdog.finish()
"""
    process, said = launching.start(command(tmp_path, body), cwd=ROOT, stdout=subprocess.PIPE, text=True), []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        said.append(process.stdout.readline())
        process.send_signal(number)
    said.append(process.communicate(timeout=10)[0])
    assert said == ["None\n", "SIGTERM\n", "SIGUSR1\n", "SIGINT\n", "SIGHUP\n"] and process.returncode == 0
    assert events(tmp_path, "end")[0]["spent"]["start"] > 0


def test_who_presses_ctrl_c_twice_does_not_wait(tmp_path):
    body = "print('there', flush=True)\nwhile True:\n    time.sleep(0.01)"
    process = launching.start(command(tmp_path, body), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True)
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    assert [process.stderr.readline() for _ in range(2)] == [
        "\n", "Ctrl-C: saves and leaves after this step, and the same command resumes; once more ends at once\n"]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == "interrupted: run the same command again to continue\n"
    assert process.returncode and events(tmp_path, "died")[0]["error"] == "KeyboardInterrupt: a second Ctrl-C"


def test_nohup_keeps_its_meaning(tmp_path):
    body = "os.kill(os.getpid(), signal.SIGHUP)\nprint(watchdog.stop_requested())"
    ignoring = ["bash", "-c", "trap '' HUP; exec \"$@\"", "nohup", *command(tmp_path, body)]
    assert launching.run(ignoring, cwd=ROOT, timeout=20).stdout == "None\n"


def test_a_phase_in_parts_is_one_phase_whose_deadline_begins_anew_and_others_learn_that_it_moves(tmp_path):
    """25 parts of 0.1 s, with a deadline of two seconds; a thread, whose phase it is not, changes nothing."""
    body = """
import threading
told = []
watchdog.phase("data set")
watchdog.STATE["beat"] = lambda: told.append(watchdog.STATE["number"])
for _ in range(25):
    time.sleep(0.1)
    watchdog.goes_on()
thread = threading.Thread(target=watchdog.goes_on)
thread.start()
thread.join()
watchdog.wait_on()
print(told, watchdog.STATE["number"])
"""
    assert run_process(tmp_path, body, floor_s=2.0, first_s=2.0).stdout == f"{[2] * 25} 2\n"


RANK = """
import os, sys, time
from pathlib import Path
from Runtime import launch, watchdog
ranks = launch.environment()
launch.rendezvous(ranks, 200)
watchdog.start(Path(sys.argv[1]), ranks.rank, 0, {"run.deadline_floor_s": 20.0, "run.deadline_factor": 1.0,
                                                     "run.deadline_first_s": 20.0}, True)
launch.show_moves(ranks)
watchdog.phase("restore")
if WORKER == ranks.rank:
    for _ in range(int(os.environ["PARTS"])):
        time.sleep(6)
        watchdog.goes_on()
    time.sleep(float(os.environ["HANGS"]))
{launch}
print("here", flush=True)
time.sleep(5 if ranks.rank == 0 else 0)  # which holds the store that the other still reads
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call, worker", [("launch.arrive(ranks, 'join')", 1),
                                          ("assert launch.broadcast(ranks, 'file', 'x.pth') == 'x.pth'", 0)])
def test_a_rank_waits_as_long_as_the_slowest_one_moves(tmp_path, call, worker):
    """Half as long again as the deadline of who waits; where the slowest one hangs, both end at its deadline."""
    body = RANK.replace("{launch}", call).replace("WORKER", str(worker))
    for hangs, codes in (("0", [0, 0]), ("60", [1, 1])):
        environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                       "PARTS": "5", "HANGS": hangs, "OMP_NUM_THREADS": "1"}
        ranks = [launching.start([sys.executable, "-c", body, tmp_path], cwd=ROOT, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL, env={**environment, "RANK": str(rank)}) for rank in (0, 1)]
        assert [process.wait(250) for process in ranks] == codes
        hung = ["Timeout" in (tmp_path / f"rank{rank}.stack").read_text() for rank in (0, 1)]
        assert hung[worker] == (hangs != "0") and any(hung) == (hangs != "0")


def test_an_exception_leaves_its_last_words(tmp_path, watch, capsys):
    def inner():
        raise RuntimeError("no space for\nthe field")

    watch()
    watchdog.new_step(12)
    watchdog.phase("backward", "registration")
    with pytest.raises(RuntimeError) as raised:
        inner()
    sys.excepthook(raised.type, raised.value, raised.tb)
    died, = [line for line in lines(tmp_path, 0) if line["event"] == "died"]
    assert "in inner" in (said := capsys.readouterr().err) and "no space for" in said
    assert died["error"] == "RuntimeError: no space for\nthe field"
    assert (died["phase"], died["mode"], died["step"]) == ("backward", "registration", 12)
    assert re.search(r":\d+ test_an_\w+$", died["stack"][-2]) and re.search(r":\d+ inner$", died["stack"][-1])
    full = OSError(errno.ENOSPC, "No space left on device", "Models/run/a.pth")
    sys.excepthook(OSError, full, None)
    assert [line["errno"] for line in lines(tmp_path, 0) if line["event"] == "died"] == [None, errno.ENOSPC]
    said = capsys.readouterr().err
    assert said.startswith("error: No space left on device: 'Models/run/a.pth': make room") and said.count("\n") == 1


def test_a_child_that_dies_meanwhile_does_not_cut_the_last_words_off(tmp_path):
    body = """
import subprocess
def complain(*_):  # as torch does when a loader's worker has died
    raise RuntimeError("a child is dead")
signal.signal(signal.SIGCHLD, complain)
class Error(RuntimeError):
    def __str__(self):
        subprocess.run(["true"])
        return "the cause"
raise Error()
"""
    done = run_process(tmp_path, body)
    died, = events(tmp_path, "died")
    assert died["error"] == "Error: the cause" and done.returncode == 1
    assert "excepthook" not in done.stderr and "a child is dead" not in done.stderr


def test_phases_of_a_process_without_a_log_do_nothing():
    watchdog.phase("forward")
    watchdog.new_step(1)
    watchdog.event("x")
    watchdog.finish()
    assert watchdog.end_step() == {} and watchdog.stop_requested() is None


# A rank that has the folder's lock, is stopped in its first step, and goes through phases and events for ever.
HOLDER = """
from Runtime.run_lock import TakenOver, lock
watchdog.LOOK_S = 0.2
lock(RUN, 60)
def work():
    stopped = False
    while True:
        watchdog.new_step(3)
        watchdog.phase("forward")
        if not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)
        watchdog.event("step", spent=watchdog.end_step())
        time.sleep(0.05)
"""
CAUGHT = """
try:
    work()
except TakenOver as error:
    print("TakenOver:", error, flush=True)
"""


def stopped_holder(run, ending=CAUGHT, **cfg):
    """A holder that is stopped, and the content of the run's files after another has taken the folder over."""
    process = launching.start(command(run, HOLDER + ending, **cfg), cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
    until(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text(), 10)
    found = json.loads((run / "lock.json").read_text())
    (run / "lock.json").write_text(json.dumps({**found, "token": "another", "job": "9"}))
    other = run_process(run, "watchdog.new_step(8)")  # the other one's first rank, which has begun its log
    assert other.returncode == 0
    return process, {path: path.read_bytes() for path in run.iterdir()}


def woken(process, seconds):
    """What it says after so many more seconds of standing still, to its end."""
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=20)


@pytest.mark.parametrize("ending, code", [(CAUGHT, 0), ("work()", 1)], ids=["caught", "not caught"])
def test_a_holder_that_stood_still_leaves_without_writing_once_another_has_the_folder(tmp_path, ending, code):
    process, before = stopped_holder(tmp_path, ending)
    said = woken(process, 0.3)[code]  # on standard output, or as a traceback
    assert f"TakenOver: {tmp_path} was taken over" in said and "(job 9)" in said and process.returncode == code
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_that_slept_through_its_deadline_writes_no_stack_into_the_other_ones_file(tmp_path):
    process, before = stopped_holder(tmp_path, floor_s=1.0, first_s=1.0)
    woken(process, 1.5)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_full_disk_did_not_take_stands_in_the_log_once_there_is_room(tmp_path):
    body = """
limit = (RUN / "rank1.jsonl").stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for step in range(5):
    watchdog.new_step(step)
    watchdog.event("step", much="x" * 200)
    assert json.loads((RUN / "rank1.jsonl").read_text().splitlines()[-1][:320])["phase"] == "data"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
watchdog.event("room")
"""
    done = run_process(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 cannot write its log") == 1
    assert [line["event"] for line in lines(tmp_path)] == ["start", *["step"] * 5, "room", "now"]


SLOW_STORAGE = """
import sys, time
import OM_train_3modes as om
from Runtime import checkpoint
real = checkpoint._write_and_read_back
def slow(*args):
    time.sleep(2)
    real(*args)
checkpoint._write_and_read_back = slow
sys.exit(om.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_saving_has_the_time_that_a_write_takes_and_not_only_the_copy(tmp_path):
    """Each save waits for the write before it, and the end of the run for the last one."""
    words = arguments(make_data(tmp_path), run__epochs=1, run__deadline_floor_s=1, run__deadline_first_s=60,
                      run__picture_every=0)  # whose font cache may take longer than this deadline
    done = launching.run([sys.executable, "-c", SLOW_STORAGE, *words], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    spent = [line["spent"] for line in log_lines(tmp_path, "step") + log_lines(tmp_path, "end")]
    # Three writes of two seconds each, beside which steps go on; the last one alone would be 2.
    assert sum(seconds.get("checkpoint", 0) for seconds in spent) > 2.5
