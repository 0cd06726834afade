"""After a death: one verdict from what the ranks left behind. Reads files only, needs no torch.

Each rank leaves its log (Runtime/watchdog.py), to which the launcher adds how the process ended, and its stacks.
"""
import signal

from Runtime.errors import PLANNED_RESTART
from Runtime.files import read_lines

# What a backend says when another rank is gone: a consequence, never the cause.
ECHOES = ("closed by peer", "connection reset", "broken pipe", "timed out waiting", "connection refused", "heartbeat",
          "remote process", "connection was likely closed", "dist store", "diststore", "socket timeout",
          "did not arrive", "cannot be reached")
SYNCHRONISED = ("agree", "backward", "refresh")  # no rank can leave these before every other one has arrived
TAIL = 2 ** 20  # bytes of a rank's log that are read
OVERSLEPT_S = 1.5  # a rank that outlived its deadline by so much more than the others had no running watchdog


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
    """How this attempt ended.

    code: exit code of the launch (a hint only), None where nobody saw it. Returns a dict with cause, rank (None where
    no single one is to blame), host, step, mode, phase, stack (innermost last), others, detail, ended, and `dead`:
    False for done and for a planned restart.
    """
    ranks = [read_rank(run, rank, attempt) for rank in range(world_size)]
    cause, culprit, detail = find_cause(ranks, code)
    refused = event(ranks[culprit], "refused") if culprit is not None else None
    rank = ranks[culprit] if culprit is not None else max(ranks, key=position)
    now, started = rank["now"] or {}, event(rank, "start") or {}
    ended = [r["exit"]["time"] for r in ranks if r["exit"]] + [e["time"] for r in ranks for e in r["events"]]
    others = {}
    for other in ranks:
        if other["rank"] != culprit:
            others.setdefault(where(other), []).append(str(other["rank"]))
    host = started.get("node") or started.get("host", now.get("host", ""))  # Slurm's own name, where there is one
    phase = (refused or now).get("phase", "launch")
    return {"attempt": attempt, "cause": cause, "detail": detail, "rank": culprit, "host": host,
            "step": now.get("step"), "mode": now.get("mode", ""), "phase": phase,
            "stack": stack_lines(rank), "others": "; ".join(f"rank {', '.join(n)}: {w}" for w, n in others.items()),
            "ended": max(ended, default=None), "dead": cause not in ("done", "planned restart")}


def find_cause(ranks, code):
    """(cause, rank or None, detail), the surest evidence first. code: of the launch, None where nobody saw it."""
    return (what_ranks_said(ranks, code) or what_killed_ranks(ranks) or what_is_missing(ranks, code)
            or ("vanished", None, "no rank left last words: a node died, or the launcher was killed with them"))


def what_ranks_said(ranks, code):
    """A refusal, an end that a rank wrote down, or a rank that was stopped; None where there is nothing of the kind."""
    for rank in ranks:
        if refusal := event(rank, "refused"):
            return "refused", rank["rank"], refusal["error"]
        if odd := event(rank, "out of step"):
            return "out of step", odd["differs"], f"{odd['what']} is {odd['found']}, not {odd['wanted']}"
    if code == PLANNED_RESTART and not any(rank["now"] for rank in ranks):
        return "planned restart", None, "asked to leave before a rank had begun"
    if all(event(rank, "end") for rank in ranks):
        late = [rank for rank in ranks if "Timeout" in rank["stack"] or (rank["exit"] or {}).get("by_launcher")]
        if late:
            return "would not exit", late[0]["rank"], "the training was over but the process stayed"
        leaving = [line["reason"] for rank in ranks if (line := event(rank, "leave"))]
        # With a leak, the rank that has it says more than those that only agreed to leave.
        return ("planned restart", None, max(leaving, key=len)) if leaving else ("done", None, "")
    if stopped := [rank["rank"] for rank in ranks if rank["exit"] and rank["exit"].get("stopped")]:
        return "frozen", stopped[0], "the process was stopped, and woken for its end"
    return None


def last_words(ranks):
    """(time, rank, error) of each rank that died with an exception."""
    return [(line["time"], rank["rank"], line["error"]) for rank in ranks if (line := event(rank, "died"))]


def what_killed_ranks(ranks):
    """A crash in native code, an exception of a rank's own, or a signal; None where there is none of them."""
    crashed = [(rank["rank"], said) for rank in ranks if (said := native_crash(rank))]
    for number, said in crashed:
        if said not in ("Aborted", "SIGABRT"):  # which is also how some backends take the death of another rank
            return "crash in native code", number, said
    own = sorted(word for word in last_words(ranks) if not any(echo in word[2].lower() for echo in ECHOES))
    if own:
        return name_error(own[0][2]), own[0][1], own[0][2].splitlines()[0]
    # One that has said its last words was dying already when the signal came.
    killed = [rank for rank in ranks if is_ended(rank) and ended_by(rank) and not native_crash(rank)
              and not event(rank, "died")]
    starved = next((rank for rank in killed if rank["exit"].get("oom_kill")), None)
    if starved:
        return "out of host memory", starved["rank"], ("the kernel ended it for want of memory on its node: lower "
                                                       "data.num_workers, or ask for more memory")
    if killed and len(killed) == len(ranks):
        return "killed", None, f"all ranks ended by {ended_by(killed[0])}"
    if killed:
        return "killed", killed[0]["rank"], f"ended by {ended_by(killed[0])}"
    return ("crash in native code", *crashed[0]) if crashed else None


def what_is_missing(ranks, code):
    """Ranks that never came, hang, or are gone without a word; None where all left something else."""
    words = last_words(ranks)
    absent = [rank["rank"] for rank in ranks if not rank["now"]]
    if absent and (words or code not in (None, 0) or len(absent) < len(ranks)):
        return "never started", absent[0], f"rank {', '.join(map(str, absent))} left no sign of life"
    if any("Timeout" in rank["stack"] for rank in ranks):
        return find_hang(ranks)
    gone = [rank["rank"] for rank in ranks if rank["now"] and not rank["exit"] and not event(rank, "end")]
    if words and gone:
        return "vanished", gone[0], f"rank {', '.join(map(str, gone))} left neither last words nor an exit: a node died"
    if code in (124, 137):
        return "time limit of the round", behind(ranks)["rank"], "the launch outlived its time limit"
    if words:
        return name_error(min(words)[2]), min(words)[1], min(words)[2].splitlines()[0]
    return None


def find_hang(ranks):
    """Which of the ranks that ran into their deadlines made the others wait."""
    ended = max(rank["exit"]["time"] if rank["exit"] else 0 for rank in ranks)
    frozen = [rank for rank in ranks if "Timeout" not in rank["stack"] and not is_ended(rank)
              and not (rank["now"] and rank["now"]["time"] + rank["now"]["deadline"] > ended > 0)]
    punctual = min(overslept(rank) for rank in ranks if "Timeout" in rank["stack"])
    frozen += [rank for rank in ranks if overslept(rank) > punctual + OVERSLEPT_S and position(rank) == position(
        behind(ranks))]  # a scheduler wakes stopped processes before it ends them
    if frozen:  # not even its watchdog ran
        return "frozen", frozen[0]["rank"], "the process is stopped or its node is gone: its watchdog did not run"
    slowest, first = behind(ranks), max(ranks, key=position)
    if position(slowest) == position(first):
        return "hang", None, f"all ranks are in {where(slowest)}: what they wait for together did not complete"
    if slowest["now"]["phase"] in SYNCHRONISED:
        ahead = min((rank for rank in ranks if position(rank) > position(slowest)), key=position)
        return "out of step", ahead["rank"], f"went on without the others, who wait in {where(slowest)}"
    waited = max(ended - slowest["now"]["time"], slowest["now"]["deadline"])
    return "hang", slowest["rank"], f"no progress for {waited:.0f} s"


def overslept(rank):
    """Seconds by which a rank that has ended outlived its last deadline; 0 for others."""
    return rank["exit"]["time"] - rank["now"]["time"] - rank["now"]["deadline"] if is_ended(rank) and rank["now"] else 0


def behind(ranks):
    return min(ranks, key=position)


def position(rank):
    """How many phases a rank has entered; the same number is the same place on every rank."""
    return rank["now"]["number"] if rank["now"] else 0


def where(rank):
    now = rank["now"]
    if not now:
        return "no sign of life"
    if event(rank, "end"):
        return "finished"
    return f"{now['phase']}{f' ({now_mode})' if (now_mode := now['mode']) else ''} of step {now['step']}"


def event(rank, kind):
    """The last event of this kind that the rank logged, or None."""
    return next((entry for entry in reversed(rank["events"]) if entry["event"] == kind), None)


def native_crash(rank):
    """What faulthandler or the exit code says of a crash below Python, or ""."""
    said = rank["stack"].partition("Fatal Python error: ")[2].partition("\n")[0]
    return said or (ended_by(rank) if ended_by(rank) in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT") else "")


def is_ended(rank):
    return bool(rank["exit"]) and not rank["exit"].get("by_launcher")


def ended_by(rank):
    """Name of the signal that ended a rank, or ""."""
    code = rank["exit"]["code"] if rank["exit"] else 0
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def name_error(error):
    """The kind of death that an exception stands for."""
    text = error.lower()
    kinds = {"out of device memory": ("outofmemoryerror", "cuda out of memory", "xpu out of memory",
                                      "hip out of memory", "out_of_device_memory"),
             "out of host memory": ("memoryerror", "out of memory", "cannot allocate", "can't allocate"),
             "a loader worker died": ("dataloader worker", "worker process"),
             "disk": ("no space left", "disk quota", "could not be written", "read-only file system",
                      "input/output error", "stale file handle"),
             "weights not finite": ("not finite",),
             "a rank did not arrive": ("did not arrive", "cannot be reached")}
    return next((kind for kind, signs in kinds.items() if any(sign in text for sign in signs)), "exception")


def stack_lines(rank):
    """The innermost frames of the culprit, for a person: those of its last words, or those its watchdog dumped."""
    if found := event(rank, "died"):
        return found["stack"][-6:]
    # faulthandler prints the innermost frame first, under a heading for each thread; the main thread comes last.
    blocks = [block for block in rank["stack"].split("\n\n") if "File " in block] or [""]
    block = next((block for block in blocks if "Current thread" in block), blocks[-1])
    frames = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
    return frames[:6][::-1]


def sentence(verdict):
    """The verdict for a person."""
    if not verdict["dead"]:
        return f"attempt {verdict['attempt']}: {verdict['cause']}{f' ({d})' if (d := verdict['detail']) else ''}"
    who = f"rank {verdict['rank']}" if verdict["rank"] is not None else "all ranks"
    mode = f" ({verdict['mode']})" if verdict["mode"] else ""
    step = f" of step {verdict['step']}" if verdict["step"] is not None else ""
    stack = f", at {verdict['stack'][-1]}" if verdict["stack"] else ""
    others = f"; {verdict['others']}" if verdict["others"] else ""
    return (f"attempt {verdict['attempt']}: {verdict['cause']}: {who} on {verdict['host'] or 'an unknown host'} in "
            f"{verdict['phase']}{mode}{step}: {verdict['detail'].rstrip('.')}{stack}{others}")
