"""The verdict on an attempt, from the files that its ranks have left. Needs no torch.

Each rank leaves its log (Runtime/watchdog.py), to which the launcher appends the exit of the process, and its stacks.
Below, a record is what `read_rank` returns; `records` has one for each rank, in rank order.
"""
import errno
import math
import signal
import statistics

from Runtime.errors import PLANNED_RESTART, STOP, ranges
from Runtime.files import PASSING, read_lines

# Errors of a backend when another rank is gone: a consequence, never the cause.
ECHOES = ("closed by peer", "connection reset", "broken pipe", "timed out waiting", "connection refused", "heartbeat",
          "remote process", "connection was likely closed", "dist store", "diststore", "socket timeout",
          "no route to host", "connection timed out", "network is unreachable", "did not arrive", "cannot be reached")
# Causes of death by phrases of the exception, in lower case; the first match counts.
KINDS = {
    "out of device memory": ("outofmemoryerror", "cuda out of memory", "xpu out of memory", "hip out of memory",
                             "cuda error: out of memory", "hip error: out of memory", "out_of_device_memory",
                             "cuda failure 2 'out of memory'", "cuda failure 'out of memory'", "hiperroroutofmemory",
                             "ur_result_error_out_of_resources", "cublas_status_alloc_failed"),
    "out of host memory": ("memoryerror", "out of memory", "out_of_host_memory", "cannot allocate", "can't allocate"),
    "device lost": ("ur_result_error_device_lost", "device_lost", "no xpu devices are available",
                    "no cuda gpus are available", "no hip gpus are available", "no cuda-capable device",
                    "busy or unavailable", "unspecified launch failure", "uncorrectable ecc error",
                    "has fallen off the bus"),
    "kernel cache": ("miopen error", "miopenstatus"),
    "out of step": ("expected to have finished reduction in the prior iteration",),
    "too many open files": ("too many open files",),
    "communication set-up": ("no socket interface found", "pmi_init", "ccl backend not found", "xccl not built in",
                             "distributed package doesn't have", "unknown backend type", "unknown c10d backend type",
                             "ofi transport", "ccl worker thread"),
    "a loader worker died": ("dataloader worker", "worker process"),
    "file too large": ("file too large",),
    "disk": ("no space left", "disk quota", "could not be written", "read-only file system", "input/output error",
             "stale file handle", "transport endpoint"),
    "weights not finite": ("not finite",),
    "a checkpoint that does not load": ("weights only load failed", "weights_only"),
    "a rank did not arrive": ("did not arrive", "cannot be reached")}
# Phases before the first step: a refusal there would recur in every round.
STARTING = ("launch", "start", "meet", "data set", "stage", "join", "restore")
SYNCHRONISED = ("agree", "backward", "refresh")  # phases that no rank can leave before all ranks have arrived
BAD_USAGE = (2, STOP)  # exit codes of a rank that refuses its command line, before it has a log
NO_FILE = {errno.EAGAIN, errno.EINTR, errno.ECONNRESET}  # no process can be started, or one at the other end has died
TAIL = 2 ** 20  # bytes of a rank's log that are read
OVERSLEPT_S = 1.5  # if a rank outlives its deadline by this much more than others, its watchdog did not run


def read_rank(run, rank, attempt):
    """What a rank left of this attempt.

    Returns: {"rank", "now" (last breadcrumb), "exit" (line of the launcher), "events" (all other lines), "stack"
    (text)}; what it did not leave is empty.
    """
    record = {"rank": rank, "events": [], "now": {}, "exit": {}, "stack": ""}
    for line in read_lines(run / f"rank{rank}.jsonl", TAIL):
        if line.get("attempt") != attempt:
            continue
        if line["event"] in ("now", "exit"):
            record[line["event"]] = line
        else:
            record["events"].append(line)
    stack = run / f"rank{rank}.stack"
    if record["now"] and stack.exists():
        record["stack"] = stack.read_text(errors="replace")
    return record


def judge(run, attempt, world_size, code):
    """How an attempt ended.

    run: Path of the run folder. code: exit code of the launch (a hint only), None if unknown.
    Returns: {"attempt", "cause", "detail", "rank" (None if no single one is to blame), "host", "step", "mode", "phase",
    "stack" (innermost frame last), "others" (text), "ended" (time.time or None), "dead" (False for done and for a
    planned restart)}.
    """
    records = [read_rank(run, rank, attempt) for rank in range(world_size)]
    # The surest evidence first.
    cause, culprit, detail = what_ranks_said(records, code) or what_killed_ranks(records) or what_is_missing(
        records, code) or ("vanished", None, "no rank left last words: a node died, or the launcher was killed with "
                           "them")
    record = records[culprit] if culprit is not None else max(records, key=position)
    now, started = record["now"], last_event(record, "start") or {}
    times = [line["time"] for other in records for line in other["events"]]
    times += [other["exit"]["time"] for other in records if other["exit"]]
    return {"attempt": attempt, "cause": cause, "detail": detail, "rank": culprit,
            "host": started.get("node") or started.get("host", now.get("host", "")),  # Slurm's name, if it has one
            "step": now.get("step"), "mode": now.get("mode", ""),
            "phase": (last_event(record, "refused") or now).get("phase", "launch"), "stack": stack_lines(record),
            "others": places([other for other in records if other["rank"] != culprit]),
            "ended": max(times, default=None), "dead": cause not in ("done", "planned restart")}


def places(records):
    """Where ranks are, in words: "rank 0, 2-5: forward of step 5; rank 6: finished"."""
    numbers = {}
    for record in records:
        numbers.setdefault(where(record), []).append(record["rank"])
    return "; ".join(f"rank {ranges(there)}: {place}" for place, there in numbers.items())


def what_ranks_said(records, code):
    """(cause, rank, detail) of a refusal, of an end that all ranks logged, or of a stopped rank; else None."""
    for record in records:
        if refusal := last_event(record, "refused"):
            return "refused", record["rank"], refusal["error"]
        if odd := last_event(record, "out of step"):
            return "out of step", odd["differs"], f"{odd['what']} is {odd['found']}, not {odd['wanted']}"
    if code == PLANNED_RESTART and not any(record["now"] for record in records):
        return "planned restart", None, "asked to leave before a rank had begun"
    if all(last_event(record, "end") for record in records):
        stuck = [record for record in records if has_timed_out(record) or record["exit"].get("by_launcher")]
        if stuck:
            return "would not exit", stuck[0]["rank"], "the training was over but the process stayed"
        leaves = [line for record in records if (line := last_event(record, "leave"))]
        if leaves:  # the rank whose memory runs out first; those without "steps_left" only agreed to leave
            return "planned restart", None, min(leaves, key=lambda line: line.get("steps_left", math.inf))["reason"]
        return "done", None, ""
    stopped = [record["rank"] for record in records if record["exit"].get("stopped")]
    if stopped:
        return "frozen", stopped[0], "the process was stopped, and woken for its end"
    return None


def exceptions(records):
    """(time, rank, error, cause) of each rank that died with an exception, the earliest first."""
    return sorted((line["time"], record["rank"], line["error"], name_error(line["error"], line.get("errno")))
                  for record in records if (line := last_event(record, "died")))


def what_killed_ranks(records):
    """(cause, rank, detail) of a native crash, of an exception that is no echo, or of a signal; else None."""
    records = sorted(records, key=lambda record: record["exit"].get("time", math.inf))
    crashes = [(record["rank"], crash) for record in records if (crash := native_crash(record))]
    for rank, crash in crashes:
        if not crash.startswith(("Aborted", "SIGABRT")):  # some backends abort when another rank dies
            return "crash in native code", rank, crash
    for _, rank, error, cause in exceptions(records):
        if cause == "disk" or not any(echo in error.lower() for echo in ECHOES):
            return cause, rank, error.splitlines()[0]
    # A rank that logged an exception was dying already when the signal came.
    killed = [record for record in records if is_ended(record) and ended_by(record) and not native_crash(record)
              and not last_event(record, "died")]
    starved = next((record for record in killed if record["exit"].get("oom_kill")), None)
    if starved:
        return "out of host memory", starved["rank"], ("the kernel ended it for want of memory on its node: lower "
                                                       "data.num_workers, or ask for more memory")
    if killed and len(killed) == len(records):
        return "killed", None, f"all ranks ended by {ended_by(killed[0])}"
    if killed:
        return "killed", killed[0]["rank"], f"ended by {ended_by(killed[0])}"
    return ("crash in native code", *crashes[0]) if crashes else None


def what_is_missing(records, code):
    """(cause, rank, detail) of ranks that never arrived, hang, or vanished; else None."""
    died = exceptions(records)
    absent = [record["rank"] for record in records if not record["now"]]
    usage = [rank for rank in absent if records[rank]["exit"].get("code") in BAD_USAGE]
    if usage:
        return "refused", usage[0], "the rank refused its command line or its config; its error is above"
    if absent and (died or code not in (None, 0) or len(absent) < len(records)):
        return "never started", absent[0], f"rank {ranges(absent)} left no sign of life"
    if any(map(has_timed_out, records)):
        return find_hang(records)
    gone = [record["rank"] for record in records
            if record["now"] and not record["exit"] and not last_event(record, "end")]
    if died and gone:
        return "vanished", gone[0], f"rank {ranges(gone)} left neither last words nor an exit: a node died"
    if code in (124, 137):
        return "time limit of the round", min(records, key=position)["rank"], "the launch outlived its time limit"
    if died:
        _, rank, error, cause = died[0]
        return cause, rank, error.splitlines()[0]
    return None


def find_hang(records):
    """(cause, rank, detail) after a deadline has expired: which rank kept the others waiting."""
    skew = clocks(records)
    ended = max((record["exit"]["time"] - skew[record["rank"]] for record in records if record["exit"]), default=0)
    frozen = [record for record in records if not has_timed_out(record) and not is_ended(record)
              and not (record["now"] and record["now"]["time"] + record["now"]["deadline"] - skew[record["rank"]]
                       > ended > 0)]
    # A scheduler wakes stopped processes before it ends them: their watchdogs then fire late.
    slowest = min(records, key=position)
    punctual = min(overslept(record) for record in records if has_timed_out(record))
    frozen += [record for record in records
               if overslept(record) > punctual + OVERSLEPT_S and position(record) == position(slowest)]
    if frozen:
        return "frozen", frozen[0]["rank"], "the process is stopped or its node is gone: its watchdog did not run"
    if position(slowest) == max(map(position, records)):
        return "hang", None, f"all ranks are in {where(slowest)}: what they wait for together did not complete"
    if slowest["now"]["phase"] in SYNCHRONISED:
        ahead = min((record for record in records if position(record) > position(slowest)), key=position)
        return "out of step", ahead["rank"], f"went on without the others, who wait in {where(slowest)}"
    waited = max(ended - slowest["now"]["time"] + skew[slowest["rank"]], slowest["now"]["deadline"])
    return "hang", slowest["rank"], f"no progress for {waited:.0f} s"


def clocks(records):
    """{rank: seconds by which its clock is ahead of that of the first rank with "pace" lines}, 0 if unknown.

    Ranks end each step together, so the times of their "pace" lines differ as their clocks do.
    """
    paces = [{line["step"]: line["time"] for line in record["events"] if line["event"] == "pace"} for record in records]
    first = next(filter(None, paces), {})
    return {record["rank"]: statistics.median([pace[step] - first[step] for step in pace.keys() & first.keys()] or [0])
            for record, pace in zip(records, paces)}


def has_timed_out(record):
    """Whether a deadline ended a rank: faulthandler heads the stacks with "Timeout"."""
    return "Timeout" in record["stack"]


def overslept(record):
    """Seconds by which a rank that has ended outlived its last deadline; 0 for others."""
    if not is_ended(record) or not record["now"]:
        return 0
    return record["exit"]["time"] - record["now"]["time"] - record["now"]["deadline"]


def position(record):
    """How many phases a rank has entered; equal numbers are the same place in the program on every rank."""
    return record["now"].get("number", 0)


def where(record):
    """Where a rank is, in words."""
    now = record["now"]
    if not now:
        return "no sign of life"
    if last_event(record, "end"):
        return "finished"
    return place(now)


def place(line):
    """A phase in words. In a start there is no step yet: the log has 0, even if the run resumes from a later one.

    line: a breadcrumb, the event "died" or a verdict.
    """
    mode = f" ({line['mode']})" if line["mode"] else ""
    step = "" if line["phase"] in STARTING or line["mode"] in STARTING else f" of step {line['step']}"
    return f"{line['phase']}{mode}{step}"


def last_event(record, kind):
    """The last event of this kind that the rank logged, or None."""
    return next((line for line in reversed(record["events"]) if line["event"] == kind), None)


def native_crash(record):
    """A crash below Python: faulthandler's message, else the name of the signal, else "".

    A rank that has logged an exception does not count: it was dying already, and a backend may crash while Python
    exits. faulthandler marks the crashed thread as the current one, except one that a library started: then no line of
    Python is to blame, not even the main thread's line in the dump.
    """
    if last_event(record, "died"):
        return ""
    message = record["stack"].partition("Fatal Python error: ")[2].partition("\n")[0]
    if message:
        return message if "Current thread" in record["stack"] else f"{message} in a thread outside Python"
    return ended_by(record) if ended_by(record) in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT") else ""


def is_ended(record):
    """Whether a rank's process ended by itself, not by the launcher."""
    return bool(record["exit"]) and not record["exit"].get("by_launcher")


def ended_by(record):
    """Name of the signal that ended a rank, or ""."""
    code = record["exit"].get("code", 0)
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def name_error(error, number=None):
    """The cause of an attempt's end according to the text of an exception. number: its errno, if it has one."""
    text = error.lower()
    if number in PASSING - NO_FILE:
        return "disk"
    return next((kind for kind, signs in KINDS.items() if any(sign in text for sign in signs)), "exception")


def stack_lines(record):
    """Up to six innermost frames of a rank, the innermost last: of its exception, or those that its watchdog dumped."""
    died = last_event(record, "died")
    if died:
        return died["stack"][-6:]
    # faulthandler prints the innermost frame first, under a heading for each thread; the main thread comes last.
    blocks = [block for block in record["stack"].split("\n\n") if "File " in block] or [""]
    block = next((block for block in blocks if "Current thread" in block), blocks[-1])
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    return frames[:6][::-1]


def sentence(verdict):
    """The verdict of `judge` as one sentence."""
    if not verdict["dead"]:
        detail = f" ({verdict['detail']})" if verdict["detail"] else ""
        return f"attempt {verdict['attempt']}: {verdict['cause']}{detail}"
    who = f"rank {verdict['rank']}" if verdict["rank"] is not None else "all ranks"
    stack = f", at {verdict['stack'][-1]}" if verdict["stack"] else ""
    others = f"; {verdict['others']}" if verdict["others"] else ""
    return (f"attempt {verdict['attempt']}: {verdict['cause']}: {who} on {verdict['host'] or 'an unknown host'} in "
            f"{place(verdict)}: {verdict['detail'].rstrip('.')}{stack}{others}")
