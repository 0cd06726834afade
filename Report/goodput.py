"""How a run spent its wall time, from attempts.jsonl and the log of rank 0: useful, replayed, lost to each cause.

Below, `found` is what run_logs.read_run returns.
"""
import collections

import numpy as np

from Report.page import text_table
from Supervisor.verdict import STARTING

# The details of the verdict on an attempt that a person, or Slurm before its time limit, asked to leave.
ASKED = ("requested by a signal", "asked to leave before a rank had begun")
# The kind of time in the table for each phase of the log; any other phase belongs to a restart.
STEP = ("deform", "embeddings", "forward", "accumulate", "agree", "backward", "optimizer", "between steps")
PHASES = {"data": "waiting for data", "epoch": "waiting for data", "checkpoint": "checkpoints",
          "evaluate": "validation", "refresh": "process-group refresh", **dict.fromkeys(STEP, "steps")}
# The kinds of a step's phases, in the order of the chart: what counts, what is needed, what is lost.
KINDS = ("useful steps", "validation", "checkpoints", "waiting for data", "process-group refresh", "replayed steps")


def add_up(found):
    """Wall seconds of a run by kind, and the cost of each cause of an attempt's end.

    Returns: (Counter of seconds by kind, {cause: Counter of times, detection, restart, replayed}). "useful steps" are
    those whose work is in the result; "replayed steps" had to be done again.
    """
    kinds, causes = collections.Counter(), collections.defaultdict(collections.Counter)
    for attempt in found["costs"]:
        kinds.update({**attempt["spent"], "restart": attempt["restart"], "detection": attempt["detection"]})
        causes[attempt["began_after"]].update(restart=attempt["restart"])
        causes[attempt["cause"]].update(times=1, detection=attempt["detection"],
                                        replayed=attempt["spent"]["replayed steps"])
    return kinds, causes


def costs_of(attempts, steps):
    """What each attempt of a run cost, oldest first.

    attempts, steps: of `found`.
    Returns: [{"attempt", "begin": its line, "end": its line or None, "began", "ended": time stamps, "began_after":
    cause of the previous end, "cause", "spent": Counter of seconds by kind, "restart", "detection": seconds, "rows":
    indices of its rows in steps}]. An attempt begins when the previous one ended.
    """
    ends = {line["attempt"]: line for line in attempts if line["event"] == "end"}
    costs, kinds, end_before, cause = [], kinds_of_rows(steps), None, "first start"
    for begun in (line for line in attempts if line["event"] == "begin"):
        rows = np.flatnonzero(steps["attempt"] == begun["attempt"])
        spent = collections.Counter({kind: float(seconds[rows].sum()) for kind, seconds in kinds.items()})
        last_sign = steps["time"][rows[-1]] if len(rows) else begun["time"]
        end = ends.get(begun["attempt"])
        ended = end["time"] if end else max(last_sign, begun["time"])
        verdict = end["verdict"] if end else {"dead": False, "cause": "no verdict yet"}
        waits_for_person = bool(end) and is_refused_start(end)
        if costs and is_begun_by_person(costs[-1], begun):
            end_before = None
        began = begun["time"] if end_before is None else end_before
        detection = max(float(ended - last_sign), 0.0) if verdict["dead"] and len(rows) else 0.0
        restart = 0.0 if waits_for_person else float(max(ended - began - sum(spent.values()) - detection, 0.0))
        costs.append({"attempt": begun["attempt"], "begin": begun, "end": end, "began": began, "ended": float(ended),
                      "began_after": cause, "cause": verdict["cause"], "spent": spent, "restart": restart,
                      "detection": detection, "rows": rows})
        cause = verdict["cause"]
        # No attempt is charged for the time until a finished training gets more epochs or a refused one is corrected,
        # nor for a pause that a person has made.
        end_before = None if cause == "done" or waits_for_person else ended
    return costs


def is_refused_start(end):
    """Whether an attempt was refused before its first step and a person has to correct it. This is no death, and the
    run does not count its time as lost. end: the line of attempts.jsonl."""
    verdict = end["verdict"]
    return (verdict["cause"], end.get("decision")) == ("refused", "stop") and verdict["phase"] in STARTING


def is_begun_by_person(previous, begun):
    """Whether a signal ended an attempt and a person began the next one: neither the same launcher, nor Slurm, which
    signals a job before its time limit and then requeues it. A person who starts it again within one job counts as its
    launcher, and another scheduler's requeue as a person. previous: of `costs_of`. begun: line of attempts.jsonl."""
    before, end = previous["begin"], previous["end"]
    same = any(begun.get(key) and begun[key] == before.get(key) for key in ("loop", "job"))
    return bool(end) and end["verdict"].get("detail") in ASKED and not same


def kinds_of_rows(steps):
    """{kind: seconds of each row}, without kinds that belong to a whole attempt. steps: columns."""
    replayed, rows = steps["replayed"] == 1, {}
    for name, column in steps.items():
        kind = PHASES.get(name.removeprefix("spent.")) if name.startswith("spent.") else None
        values = np.nan_to_num(column)
        if kind == "steps":
            rows["replayed steps"] = rows.get("replayed steps", 0.0) + np.where(replayed, values, 0.0)
            rows["useful steps"] = rows.get("useful steps", 0.0) + np.where(replayed, 0.0, values)
        elif kind is not None:
            rows[kind] = rows.get(kind, 0.0) + values
    return rows


def over_time(found, parts=60):
    """Where the time went in each of `parts` equal parts of the run.

    Returns: (edges: parts + 1 time stamps, {kind: seconds in each part}). A restart is named after its cause, such as
    "restart: killed"; kinds that took no time are left out.
    """
    attempts, steps = found["costs"], found["steps"]
    began, ended = attempts[0]["began"], max(attempt["ended"] for attempt in attempts)
    edges = np.linspace(began, max(ended, began + 1e-3), parts + 1)
    rows = kinds_of_rows(steps)
    lasted = np.maximum(sum(rows.values(), np.zeros(len(steps["time"]))), 1e-9)
    # The share of each row that is over at each edge: a row ends at its time stamp and lasts as long as its phases.
    over = [np.clip((edge - steps["time"] + lasted) / lasted, 0.0, 1.0) for edge in edges]
    seconds = {kind: np.diff([np.dot(share, rows[kind]) for share in over]) for kind in KINDS if kind in rows}
    for cause in dict.fromkeys(attempt["began_after"] for attempt in attempts):
        seconds[f"restart: {cause}"] = np.zeros(parts)
    seconds["detection"] = np.zeros(parts)
    for attempt in attempts:
        after = seconds[f"restart: {attempt['began_after']}"]
        spread(after, edges, attempt["began"], attempt["began"] + attempt["restart"])
        spread(seconds["detection"], edges, attempt["ended"] - attempt["detection"], attempt["ended"])
    return edges, {kind: values for kind, values in seconds.items() if values.sum() > 0}


def spread(seconds, edges, start, end):
    """Add the time from start to end to the parts of the run that it overlaps. seconds: of each part, changed here."""
    overlap = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
    seconds += np.maximum(overlap, 0.0)


def goodput(kinds):
    """Fraction of the wall time that useful steps and validation took."""
    return (kinds["useful steps"] + kinds["validation"]) / max(sum(kinds.values()), 1e-9)


def lost_seconds(costs):
    """Seconds that a cause cost. costs: its Counter of `add_up`."""
    return costs["detection"] + costs["restart"] + costs["replayed"]


def kinds_table(found):
    """(header, rows, formats) of the wall time by kind, for page.table_html and text_table."""
    kinds, _ = add_up(found)
    wall = max(sum(kinds.values()), 1e-9)
    rows = [(kind, seconds, 100 * seconds / wall) for kind, seconds in kinds.most_common() if seconds]
    return ["wall time", "seconds", "share %"], [*rows, ("together", wall, 100.0)], [None, ".1f", ".1f"]


def causes_table(found):
    """(header, rows, formats) of the cost of each cause that ended an attempt."""
    _, causes = add_up(found)
    rows = [(cause, int(costs["times"]), costs["detection"], costs["restart"], costs["replayed"], lost_seconds(costs))
            for cause, costs in causes.items()]
    header = ["how attempts ended", "times", "detection s", "restart s", "replayed s", "lost s"]
    return header, rows, [None, "d", ".1f", ".1f", ".1f", ".1f"]


def tables(found):
    """Both tables as text."""
    return "\n\n".join([text_table(*kinds_table(found)), text_table(*causes_table(found))])
