"""Rules that find what is wrong with a run and what to do, from its logs alone.

Each rule is a function of what Report/run_logs.py has read; it returns findings, dicts of "rule", "sentence", "advice"
and "step". The report shows them.
"""
import numpy as np

from Report.run_logs import tail_of

# The phases of a step in which a rank works by itself. In the others it also waits for slower ranks.
OWN = ("data", "deform", "embeddings", "forward", "accumulate", "optimizer")
SLOWER, WINDOWS = 1.15, 3  # times the median of the other ranks, in each of the last windows of progress.EVERY steps
LEAK_STEPS = 2000  # steps after which a leak that was not logged again is over
RECENT = 1000  # last steps in which non-finite losses are counted
FEW_NONFINITE = 3
CLIP_STEPS, ALWAYS, NOTHING = 100, 0.95, 2e-3  # steps; share of them; fraction of the strongest mode's clipped norm
GATE_STEPS = 200
WORSE_SINCE, WORSE_SHARE = 5, 0.3  # validations, and share of all of them, since the best one
METRICS = ("val_dice", "val_imgsim")  # validation scores, higher is better; the first one present counts
DISK_FULL, CHECKPOINTS = 0.95, 3  # used share of the disk; checkpoints that should still fit


def find_all(found):
    """All findings of all rules. found: of run_logs.read_run."""
    return [finding for rule in RULES for finding in rule(found)]


def finding(rule, step, sentence, advice):
    return {"rule": rule, "step": int(step), "sentence": sentence, "advice": advice}


# ---------------------------------------------------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------------------------------------------------

def straggler(found):
    """A rank whose own work takes longer than that of the others, so that they wait for it in every step."""
    own, findings = own_seconds(found), []
    windows = sorted(set.intersection(*map(set, own.values())))[-WINDOWS:] if len(own) > 1 else []
    if len(windows) < WINDOWS:
        return []
    seconds = np.array([[rows[window] for window in windows] for rows in own.values()])  # (ranks, windows, phases)
    for number, rank in enumerate(own):
        mine, others = seconds[number], np.delete(seconds, number, axis=0)
        ratios = mine.sum(1) / np.maximum(np.median(others.sum(2), axis=0), 1e-9)
        if ratios.min() < SLOWER:
            continue
        lost = mine.mean(0) - np.median(others.mean(1), axis=0)
        findings.append(finding(
            "straggler", windows[-1], f"rank {rank} on {host_of(found, rank)} is {100 * np.median(ratios) - 100:.0f} % "
            f"slower than the others in its own work, most of all in {OWN[lost.argmax()]}; all ranks wait for it in "
            "every step",
            "check that node: clocks and temperature of the device, other processes, a slow disk if it waits for "
            "data; exclude it with `sbatch --exclude=NODE`"))
    return findings


def own_seconds(found):
    """{rank: {last step of a window: seconds per step}} of the newest attempt, by `own_of`.

    The first window of an attempt is left out, because it includes compiling and connecting.
    """
    attempt = max((line["attempt"] for line in found["attempts"]), default=0)
    paces = {}
    for rank, lines in found["pace"].items():
        rows = [line for line in lines if line["attempt"] == attempt and line.get("steps")][1:]
        if rows:
            paces[rank] = {line["step"]: own_of(line) for line in rows}
    return paces


def newest_ranks(found):
    """{rank: its "pace" lines} of the ranks that the newest attempt with such lines has: others may be gone."""
    last = max((line["attempt"] for lines in found["pace"].values() for line in lines[-1:]), default=0)
    return {rank: lines for rank, lines in sorted(found["pace"].items()) if lines and lines[-1]["attempt"] == last}


def own_of(line):
    """Seconds per step of a rank's own work, an array with the phases of OWN. line: of an event "pace"."""
    return np.array([line["spent"].get(phase, 0.0) for phase in OWN]) / line["steps"]


def host_of(found, rank):
    """Slurm's name for the node of a rank, or its host name."""
    starts = [line for line in found["events"] if line["event"] == "start" and line.get("rank") == rank]
    return (starts[-1].get("node") or starts[-1].get("host", "") if starts else "") or "an unknown host"


def leak(found):
    """Memory that grows linearly; each rank detects it in its own memory (Runtime/memory.py)."""
    last = last_step(found)
    newest = {line["rank"]: line for line in found["events"] if line["event"] == "leak"}
    cures = {"graph": "something keeps the graph alive: `python tests/diagnose_xpu_leak.py` shows which part",
             "driver or communication": "set run.refresh_process_group_every, or use another version of the driver; "
                                        "Scripts/bash_diagnose_leak.sh shows which part",
             "loader or Python objects": "set data.num_workers to 0, or look for a list that grows"}
    return [finding("leak", line["step"], f"rank {rank}: {line['sentence']}",
                    f"{cures.get(line.get('who'), 'look at what else runs on that node')}. The run restarts by itself "
                    "before memory is gone")
            for rank, line in sorted(newest.items()) if last - line["step"] <= LEAK_STEPS]


def nonfinite(found):
    """Non-finite losses in more of the last steps than of those before, or in all of them."""
    steps = tail_of(found["once"], RECENT)
    bad = np.nan_to_num(steps["nonfinite"]) > 0
    half = len(bad) // 2
    before, now = int(bad[:half].sum()), int(bad[half:].sum())
    if now < FEW_NONFINITE or now <= before and now < len(bad) - half:
        return []
    modes = [line.get("mode", "") for line in found["events"] if line["event"] == "nonfinite"]
    mode = max(dict.fromkeys(modes), key=modes.count, default="some mode")  # in a tie, the first, which runs first
    return [finding("non-finite losses", steps["step"][-1],
                    f"the loss of {mode} was not finite in {now} of the last {len(bad) - half} steps, after {before} "
                    "in as many before",
                    "lower optim.lr, look at the volumes (`OM_prepare.py` shows them), or train with --set "
                    "run.amp=off; after run.max_nonfinite of them in a row the run stops")]


def clipped_away(found):
    """A mode whose gradient is clipped so far that it hardly affects Adam, if all modes share one."""
    cfg, steps = found["config"], tail_of(found["once"], CLIP_STEPS)
    if cfg.get("optim.moments") == "per_mode":
        return []
    keys, findings = {mode["name"]: mode.get("clip_norm") for mode in found["modes"]}, []
    norms = {name.removeprefix("norms."): column[np.isfinite(column)] for name, column in steps.items()
             if name.startswith("norms.")}
    norms = {mode: column for mode, column in norms.items() if len(column) >= CLIP_STEPS // 2}
    limits = {mode: cfg.get(keys.get(mode)) or np.inf for mode in norms}
    kept = {mode: np.median(np.minimum(column, limits[mode])) for mode, column in norms.items()}
    strongest = max(kept, key=kept.get, default=None)
    for mode, column in norms.items():
        share, limit = np.mean(column > limits[mode]), limits[mode]
        if share >= ALWAYS and kept[mode] < NOTHING * kept[strongest]:
            findings.append(finding(
                "clipped away", steps["step"][-1], f"{mode} is clipped in {100 * share:.0f} % of the steps, from a "
                f"norm of {np.median(column):.2g} to {limit:.2g}, {kept[strongest] / limit:,.0f} times below that of "
                f"{strongest}: it learns next to nothing",
                f"raise {keys[mode]}, or lower the weights of {strongest} (loss.* in the config); the comment above "
                "`loss:` in Config/config_om.yaml explains how"))
    return findings


def stuck_gate(found):
    """A mode waits behind its gate, and `ang` does not approach the gate."""
    steps, mode = found["once"], next((mode for mode in found["modes"] if mode.get("gate")), None)
    opened = np.flatnonzero(steps["open"] == 1)
    shut = len(steps["step"]) - (opened[-1] + 1 if len(opened) else 0)
    if mode is None or shut < GATE_STEPS or "terms.ang" not in steps:
        return []
    ang, numbers = steps["terms.ang"][-shut:], steps["step"][-shut:]
    known = np.isfinite(ang)
    if known.sum() < GATE_STEPS // 2:
        return []
    rate, start = np.polyfit(numbers[known], ang[known], 1)
    value = rate * numbers[-1] + start
    gate = found["config"][mode["gate"]]
    left = (gate - value) / rate if rate < 0 else np.inf
    if left < 3 * shut:  # at this pace it opens soon
        return []
    when = f"at this pace it opens in {left:,.0f} steps" if left < 100 * shut else "it does not get closer"
    return [finding("stuck gate", numbers[-1], f"{mode['name']} has not run in the last {shut} steps: ang is "
                    f"{value:.2f}, the gate {gate:g}, and {when}", f"raise {mode['gate']} (2 = always open): "
                    "recovery often needs registration first")]


def overfitting(found):
    """Validation has been getting worse for a while, while the training loss improves."""
    metric = next((name for name in METRICS if found["scores"].get(name)), None)
    lines = found["scores"].get(metric, [])
    scores = np.array([line[metric] for line in lines])
    best = int(np.argmax(scores)) if len(scores) else 0
    since = len(scores) - 1 - best
    train = [line["imgsim"] for line in lines[best:] if line.get("imgsim") is not None]
    if since < max(WORSE_SINCE, WORSE_SHARE * len(scores)) or len(train) < 2 or train[-1] >= train[0]:
        return []
    falls = np.polyfit(np.arange(since + 1), scores[best:], 1)[0] < 0
    noise = np.std(np.diff(scores)) / np.sqrt(2)
    if not falls or scores[best] - np.mean(scores[-3:]) < 2 * noise:
        return []
    return [finding("overfitting", lines[-1]["step"], f"{metric} was best in epoch {lines[best]['epoch'] + 1} "
                    f"({scores[best]:.3f}) and has fallen to {scores[-1]:.3f} since, while imgsim of the training went "
                    f"from {train[0]:.3g} to {train[-1]:.3g}", "stop here: all tools use the best checkpoint; for a "
                    "better one use more volumes, stronger augment.*, or fewer epochs")]


def full_disk(found):
    """The disk of the run is almost full, or has no room for the next checkpoints."""
    lines = [line for line in found["pace"].get(0, []) if line.get("disk_total")]
    if not lines:
        return []
    line, sizes = lines[-1], [entry.get("bytes", 0) for entry in found["manifest"].get("checkpoints", {}).values()]
    free, total, need = line["disk_free"], line["disk_total"], CHECKPOINTS * max(sizes, default=0)
    if free > (1 - DISK_FULL) * total and free > need:
        return []
    each = f"; a checkpoint takes {size_text(max(sizes))}" if sizes else ""
    return [finding("full disk", line["step"], f"the disk of {found['run']} is {100 * (1 - free / total):.0f} % full, "
                    f"{size_text(free)} are left{each}", "make room, lower run.keep_last, or set run.keep_every to 0; "
                    "a full disk does not end a healthy run, but three failed checkpoints in a row do")]


def stopped(found):
    """The run has stopped, and only a person can start it again."""
    last = found["attempts"][-1]
    if last["event"] != "end" or last.get("decision") != "stop":
        return []
    return [finding("stopped", last_step(found), last.get("sentence", last["cause"]).rstrip("."),
                    "docs/trouble.md lists what to do for each cause; afterwards the same command continues the run")]


RULES = (stopped, straggler, leak, nonfinite, clipped_away, stuck_gate, overfitting, full_disk)


def size_text(size):
    """Bytes in words: "1.5 GB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"


def last_step(found):
    """The last step that is in the result."""
    steps = found["once"]["step"]
    return int(steps[-1]) if len(steps) else 0
