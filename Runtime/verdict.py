"""The verdict on an attempt, from the files that its ranks have left. Needs no torch.

Each rank leaves its log (Runtime/watchdog.py), to which the launcher appends the exit of the process, and its stacks.
Below, `ranks` is the list of what `read_rank` returns, by rank.
"""
import signal

from Runtime.errors import PLANNED_RESTART
from Runtime.files import read_lines

# Errors of a backend when another rank is gone: a consequence, never the cause.
ECHOES = ("closed by peer", "connection reset", "broken pipe", "timed out waiting", "connection refused", "heartbeat",
          "remote process", "connection was likely closed", "dist store", "diststore", "socket timeout",
          "did not arrive", "cannot be reached")
SYNCHRONISED = ("agree", "backward", "refresh")  # phases that no rank can leave before all ranks have arrived
TAIL = 2 ** 20  # bytes of a rank's log that are read
OVERSLEPT_S = 1.5  # the watchdog of a rank that outlives its deadline by so much more than others did not run


def read_rank(run, rank, attempt):
    """What a rank left of this attempt.

    Returns: {"rank", "events" (all lines but those of the next two), "now" (last breadcrumb or None), "exit" (line of
    the launcher or None), "stack" (text)}.
    """
    evidence = {"rank": rank, "events": [], "now": None, "exit": None, "stack": ""}
    for line in read_lines(run / f"rank{rank}.jsonl", TAIL):
        if line.get("attempt") != attempt:
            continue
        if line["event"] in ("now", "exit"):
            evidence[line["event"]] = line
        else:
            evidence["events"].append(line)
    stack = run / f"rank{rank}.stack"
    if evidence["now"] and stack.exists():
        evidence["stack"] = stack.read_text(errors="replace")
    return evidence


def judge(run, attempt, world_size, code):
    """How an attempt ended.

    run: Path of the run folder. code: exit code of the launch (a hint only), None if unknown.
    Returns: {"attempt", "cause", "detail", "rank" (None if no single one is to blame), "host", "step", "mode", "phase",
    "stack" (innermost frame last), "others" (text), "ended" (time.time or None), "dead" (False for done and for a
    planned restart)}.
    """
    ranks = [read_rank(run, rank, attempt) for rank in range(world_size)]
    cause, culprit, detail = find_cause(ranks, code)
    refused = last_event(ranks[culprit], "refused") if culprit is not None else None
    rank = ranks[culprit] if culprit is not None else max(ranks, key=position)
    now, started = rank["now"] or {}, last_event(rank, "start") or {}
    times = [line["time"] for other in ranks for line in other["events"]]
    times += [other["exit"]["time"] for other in ranks if other["exit"]]
    host = started.get("node") or started.get("host", now.get("host", ""))  # Slurm's name of the node, if there is one
    return {"attempt": attempt, "cause": cause, "detail": detail, "rank": culprit, "host": host,
            "step": now.get("step"), "mode": now.get("mode", ""), "phase": (refused or now).get("phase", "launch"),
            "stack": stack_lines(rank), "others": places([other for other in ranks if other["rank"] != culprit]),
            "ended": max(times, default=None), "dead": cause not in ("done", "planned restart")}


def places(ranks):
    """Where ranks are, in words: "rank 0, 2: forward of step 5; rank 3: finished"."""
    numbers = {}
    for rank in ranks:
        numbers.setdefault(where(rank), []).append(str(rank["rank"]))
    return "; ".join(f"rank {', '.join(there)}: {place}" for place, there in numbers.items())


def find_cause(ranks, code):
    """(cause, rank or None, detail), the surest evidence first. code: as in `judge`."""
    return (what_ranks_said(ranks, code) or what_killed_ranks(ranks) or what_is_missing(ranks, code)
            or ("vanished", None, "no rank left last words: a node died, or the launcher was killed with them"))


def what_ranks_said(ranks, code):
    """(cause, rank, detail) of a refusal, of an end that all ranks logged, or of a stopped rank; None without these."""
    for rank in ranks:
        if refusal := last_event(rank, "refused"):
            return "refused", rank["rank"], refusal["error"]
        if odd := last_event(rank, "out of step"):
            return "out of step", odd["differs"], f"{odd['what']} is {odd['found']}, not {odd['wanted']}"
    if code == PLANNED_RESTART and not any(rank["now"] for rank in ranks):
        return "planned restart", None, "asked to leave before a rank had begun"
    if all(last_event(rank, "end") for rank in ranks):
        stuck = [rank for rank in ranks if "Timeout" in rank["stack"] or (rank["exit"] or {}).get("by_launcher")]
        if stuck:
            return "would not exit", stuck[0]["rank"], "the training was over but the process stayed"
        reasons = [line["reason"] for rank in ranks if (line := last_event(rank, "leave"))]
        if reasons:  # the longest is that of the rank with a leak; the other ranks only agreed to leave
            return "planned restart", None, max(reasons, key=len)
        return "done", None, ""
    stopped = [rank["rank"] for rank in ranks if rank["exit"] and rank["exit"].get("stopped")]
    if stopped:
        return "frozen", stopped[0], "the process was stopped, and woken for its end"
    return None


def exceptions(ranks):
    """(time, rank, error) of each rank that died with an exception, the earliest first."""
    return sorted((line["time"], rank["rank"], line["error"]) for rank in ranks if (line := last_event(rank, "died")))


def what_killed_ranks(ranks):
    """(cause, rank, detail) of a native crash, of an exception that is no echo, or of a signal; None without these."""
    crashes = [(rank["rank"], crash) for rank in ranks if (crash := native_crash(rank))]
    for number, crash in crashes:
        if crash not in ("Aborted", "SIGABRT"):  # some backends abort when another rank dies
            return "crash in native code", number, crash
    for _, number, error in exceptions(ranks):
        if not any(echo in error.lower() for echo in ECHOES):
            return name_error(error), number, error.splitlines()[0]
    # A rank that logged an exception was dying already when the signal came.
    killed = [rank for rank in ranks if is_ended(rank) and ended_by(rank) and not native_crash(rank)
              and not last_event(rank, "died")]
    starved = next((rank for rank in killed if rank["exit"].get("oom_kill")), None)
    if starved:
        return "out of host memory", starved["rank"], ("the kernel ended it for want of memory on its node: lower "
                                                       "data.num_workers, or ask for more memory")
    if killed and len(killed) == len(ranks):
        return "killed", None, f"all ranks ended by {ended_by(killed[0])}"
    if killed:
        return "killed", killed[0]["rank"], f"ended by {ended_by(killed[0])}"
    return ("crash in native code", *crashes[0]) if crashes else None


def what_is_missing(ranks, code):
    """(cause, rank, detail) of ranks that never came, hang, or vanished; None without these."""
    died = exceptions(ranks)
    absent = [rank["rank"] for rank in ranks if not rank["now"]]
    if absent and (died or code not in (None, 0) or len(absent) < len(ranks)):
        return "never started", absent[0], f"rank {', '.join(map(str, absent))} left no sign of life"
    if any("Timeout" in rank["stack"] for rank in ranks):
        return find_hang(ranks)
    gone = [rank["rank"] for rank in ranks if rank["now"] and not rank["exit"] and not last_event(rank, "end")]
    if died and gone:
        return "vanished", gone[0], f"rank {', '.join(map(str, gone))} left neither last words nor an exit: a node died"
    if code in (124, 137):
        return "time limit of the round", min(ranks, key=position)["rank"], "the launch outlived its time limit"
    if died:
        _, number, error = died[0]
        return name_error(error), number, error.splitlines()[0]
    return None


def find_hang(ranks):
    """(cause, rank, detail) after deadlines: which rank made the others wait."""
    ended = max(rank["exit"]["time"] if rank["exit"] else 0 for rank in ranks)
    frozen = [rank for rank in ranks if "Timeout" not in rank["stack"] and not is_ended(rank)
              and not (rank["now"] and rank["now"]["time"] + rank["now"]["deadline"] > ended > 0)]
    # A scheduler wakes stopped processes before it ends them: their watchdogs then fire late.
    slowest = min(ranks, key=position)
    punctual = min(overslept(rank) for rank in ranks if "Timeout" in rank["stack"])
    frozen += [rank for rank in ranks
               if overslept(rank) > punctual + OVERSLEPT_S and position(rank) == position(slowest)]
    if frozen:
        return "frozen", frozen[0]["rank"], "the process is stopped or its node is gone: its watchdog did not run"
    if position(slowest) == max(map(position, ranks)):
        return "hang", None, f"all ranks are in {where(slowest)}: what they wait for together did not complete"
    if slowest["now"]["phase"] in SYNCHRONISED:
        ahead = min((rank for rank in ranks if position(rank) > position(slowest)), key=position)
        return "out of step", ahead["rank"], f"went on without the others, who wait in {where(slowest)}"
    waited = max(ended - slowest["now"]["time"], slowest["now"]["deadline"])
    return "hang", slowest["rank"], f"no progress for {waited:.0f} s"


def overslept(rank):
    """Seconds by which a rank that has ended outlived its last deadline; 0 for others."""
    if not is_ended(rank) or not rank["now"]:
        return 0
    return rank["exit"]["time"] - rank["now"]["time"] - rank["now"]["deadline"]


def position(rank):
    """How many phases a rank has entered; the same number is the same place in the program on every rank."""
    return rank["now"]["number"] if rank["now"] else 0


def where(rank):
    """Where a rank is, in words."""
    now = rank["now"]
    if not now:
        return "no sign of life"
    if last_event(rank, "end"):
        return "finished"
    mode = f" ({now['mode']})" if now["mode"] else ""
    return f"{now['phase']}{mode} of step {now['step']}"


def last_event(rank, kind):
    """The last event of this kind that the rank logged, or None."""
    return next((line for line in reversed(rank["events"]) if line["event"] == kind), None)


def native_crash(rank):
    """A crash below Python: faulthandler's message, else the name of the signal, else ""."""
    message = rank["stack"].partition("Fatal Python error: ")[2].partition("\n")[0]
    if message:
        return message
    return ended_by(rank) if ended_by(rank) in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT") else ""


def is_ended(rank):
    """Whether a rank's process ended by itself, not by the launcher."""
    return bool(rank["exit"]) and not rank["exit"].get("by_launcher")


def ended_by(rank):
    """Name of the signal that ended a rank, or ""."""
    code = rank["exit"]["code"] if rank["exit"] else 0
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def name_error(error):
    """The cause of an attempt's end for the text of an exception."""
    text = error.lower()
    kinds = {"out of device memory": ("outofmemoryerror", "cuda out of memory", "xpu out of memory",
                                      "hip out of memory", "out_of_device_memory"),
             "out of host memory": ("memoryerror", "out of memory", "cannot allocate", "can't allocate"),
             "a loader worker died": ("dataloader worker", "worker process"),
             "disk": ("no space left", "disk quota", "could not be written", "read-only file system",
                      "input/output error", "stale file handle"),
             "weights not finite": ("not finite",),
             "a rank did not arrive": ("did not arrive", "cannot be reached")}
    for kind, signs in kinds.items():
        if any(sign in text for sign in signs):
            return kind
    return "exception"


def stack_lines(rank):
    """Up to six innermost frames of a rank, the innermost last: of its exception, or those that its watchdog dumped."""
    died = last_event(rank, "died")
    if died:
        return died["stack"][-6:]
    # faulthandler prints the innermost frame first, under a heading for each thread; the main thread comes last.
    blocks = [block for block in rank["stack"].split("\n\n") if "File " in block] or [""]
    block = next((block for block in blocks if "Current thread" in block), blocks[-1])
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    return frames[:6][::-1]


def sentence(verdict):
    """The verdict of `judge` as one sentence."""
    if not verdict["dead"]:
        detail = f" ({verdict['detail']})" if verdict["detail"] else ""
        return f"attempt {verdict['attempt']}: {verdict['cause']}{detail}"
    who = f"rank {verdict['rank']}" if verdict["rank"] is not None else "all ranks"
    mode = f" ({verdict['mode']})" if verdict["mode"] else ""
    step = f" of step {verdict['step']}" if verdict["step"] is not None else ""
    stack = f", at {verdict['stack'][-1]}" if verdict["stack"] else ""
    others = f"; {verdict['others']}" if verdict["others"] else ""
    return (f"attempt {verdict['attempt']}: {verdict['cause']}: {who} on {verdict['host'] or 'an unknown host'} in "
            f"{verdict['phase']}{mode}{step}: {verdict['detail'].rstrip('.')}{stack}{others}")
