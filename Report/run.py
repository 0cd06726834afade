"""What a run does, did and cost, from its logs alone: one self-contained page, or the same on a terminal.

    python -m Report.run Models/<run>                       write Models/<run>/report.html
    python -m Report.run Models/<run> --text                the same for a terminal
    python -m Report.run Models/<run> --follow              keep the report up to date until the run ends

It only reads what a run has written, so you can use it at any time and on a copied folder. Below, `found` is what
run_logs.read_run returns.
"""
import argparse
import base64
import itertools
import json
import sys
import time
from html import escape
from pathlib import Path

import numpy as np

from Report import run_charts
from Report.charts import grid, number, spark
from Report.goodput import add_up, causes_table, goodput, is_refused_start, kinds_table, tables
from Report.page import cards_html, findings_html, table_html, text_table, write_page
from Report.rules import find_all, host_of, newest_ranks, own_seconds, size_text
from Report.run_logs import read_json, read_run, tail_of
from Runtime.errors import DONE, parse_options, run_program
from Supervisor.verdict import place

FOLLOW_S, FOLLOW_SHARE = 10.0, 20  # --follow pauses at least this many s, and this many times a report's duration
PICTURE_BYTES = 3 * 2 ** 20  # limit for all pictures of a page, so that the page stays below 5 MB
QUIET_S = 10.0  # from the last deadline of the ranks until the run counts as silent
LAST_ATTEMPTS = 100  # listed one by one


# ---------------------------------------------------------------------------------------------------------------------
# The state of the run, in words and numbers
# ---------------------------------------------------------------------------------------------------------------------

def state_of(found, now=None):
    """The state of a run: (word, sentence). word: running, waiting, silent, died, stopped or done.

    now: time.time(). Each rank logs a deadline for its next sign of life. A run is silent once all deadlines have
    passed: all its processes are gone, or this is a copy of its folder.
    """
    now = now or time.time()
    newest = found["costs"][-1] if found["costs"] else {"attempt": None, "begin": {"time": now}, "end": None}
    if end := newest["end"]:
        decision = end.get("decision", "done" if end["cause"] == "done" else "continue")
        said, when = end.get("sentence", end["cause"]), moment(end["time"])
        if decision == "done":
            return "done", f"Done since {when}: {said}"
        if decision == "stop":
            return "stopped", f"Stopped since {when}: {said}"
        if is_fresh(found):
            return "waiting", f"Between two rounds since {when}: {said}"
        return "waiting", f"Waiting since {when} to be started again with the same command: {said}"
    died = {line["rank"]: line for line in found["events"]
            if line["event"] == "died" and line["attempt"] == newest["attempt"]}
    if died and len(died) >= (newest["begin"].get("ranks") or 1):  # no launcher has judged them yet
        first = min(died.values(), key=lambda line: line["time"])
        said = (str(first.get("error") or "").splitlines() or ["no error is logged"])[0].rstrip(".")
        return "died", (f"Died at {moment(first['time'])}: rank {first['rank']} in {place(first)}: {said}. The same "
                        "command continues it, unless its launcher does.")
    crumbs = [line for line in found["now"].values() if line["attempt"] == newest["attempt"]]
    if not crumbs:
        return "running", f"Starting since {moment(newest['begin']['time'])}: no rank has written to its log yet."
    behind = min(crumbs, key=lambda line: line["number"])
    where = f"rank {behind['rank']} on {behind['host']} is in {place(behind)}"
    if now > max(line["time"] + line["deadline"] for line in crumbs) + QUIET_S:
        heard = moment(max(line["time"] for line in crumbs))
        return "silent", (f"Silent since {heard}, beyond its deadline: {where}. Either the run has died, and the same "
                          "command continues it, or this is a copy of its folder.")
    return "running", f"Running: {where}, since {max(now - behind['time'], 0):.0f} s."


def is_fresh(found):
    """Whether a launcher still holds the lock of the run's folder, which it touches as long as it lives."""
    try:
        age_s = time.time() - (found["run"] / "lock.json").stat().st_mtime
    except OSError:
        return False
    return age_s < found["lock"].get("stale_after_s", 0)


def moment(stamp):
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def duration(seconds):
    """Seconds in words: "3 h 20 min"."""
    if seconds is None or not np.isfinite(seconds):
        return "-"
    minutes = int(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    hours, days = minutes // 60, minutes // 1440
    if days >= 2:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def headline(found, findings):
    """The cards at the top of a page: [(label, value, note)]."""
    kinds, _ = add_up(found)
    wall, done = sum(kinds.values()), len(found["once"]["step"])
    epochs, of = epochs_done(found), found["config"].get("run.epochs")
    attempts, ends = found["costs"], [each["end"] for each in found["costs"] if each["end"]]
    refused = sum(map(is_refused_start, ends))
    died = sum(bool(end["verdict"]["dead"]) for end in ends) - refused
    rate, left = speed(found), time_left(found, kinds)
    return [("Epochs", f"{epochs} of {of}" if of and epochs <= of else epochs, f"{done} steps"),
            *([("Time left", left, "at this pace")] if left else []),
            ("Goodput", f"{100 * goodput(kinds):.1f} %" if wall else "-", f"of {duration(wall)}"),
            ("Samples/s", number(rate) if rate else "-", "in 100 steps"),
            ("Deaths", died, f"in {len(attempts)} attempt{'s' * (len(attempts) != 1)}"
             + f", {refused} refused at {'their' if refused > 1 else 'its'} start" * (refused > 0)),
            ("Findings", len(findings), "see below" if findings else "no problem found")]


def epochs_done(found):
    """Epochs up to the newest one that has ended; one that was left early, for other data, counts too."""
    return found["epochs"][-1]["epoch"] + 1 if found["epochs"] else 0


def time_left(found, kinds):
    """The time until the last epoch is done, in words, from the steps done so far and their wall time.

    Each epoch that is left is taken to have the steps of the newest one, since other data or ranks change their number.
    None before the first epoch is done and after the last one.
    """
    epochs, of, steps = found["epochs"], found["config"].get("run.epochs"), found["once"]
    ended = epochs_done(found)
    if not ended or not of or ended >= of:
        return None
    steps_left = (of - ended) * epochs[-1]["steps"] - np.sum(steps["epoch"] == ended)
    return duration(max(steps_left, 0) * sum(kinds.values()) / max(len(steps["step"]), 1))


def speed(found):
    """Samples per second over the last 100 steps, waits included; None if the log does not have them."""
    steps = tail_of(found["once"], 100)
    total = steps["seconds"].sum()
    return float(np.nansum(steps["samples"]) / total) if total > 0 and np.isfinite(steps["samples"]).any() else None


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

def write_report(found, path, refresh_s=None):
    """Write the page of a run. refresh_s: seconds after which a browser reloads it. Returns: path."""
    findings, (word, sentence), (losses, zeros) = find_all(found), state_of(found), run_charts.loss_charts(found)
    wrong = findings_html([("", each["rule"], f"(step {each['step']}): {each['sentence']}. What to do: "
                            f"{each['advice']}.") for each in findings])
    if not findings:
        wrong = nothing("No rule found a problem: no slow rank, no leak, no non-finite losses, no mode clipped away, "
                        "no stuck gate, no overfitting, no full disk.")
    sections = [("", cards_html(headline(found, findings))),
                ("What is wrong, and what to do", wrong),
                ("Losses", grid(losses) + (nothing(f"0 throughout: {', '.join(zeros)}.") if zeros else "")),
                ("Validation", grid(run_charts.validation_charts(found)) or nothing("No validation yet.")),
                ("Where the time went", time_html(found)),
                ("Attempts", attempts_html(found)),
                ("Ranks", grid(run_charts.rank_charts(found)) + ranks_html(found)),
                ("Speed", grid(run_charts.speed_charts(found))),
                ("Gradients, gate, learning rate", grid(run_charts.gradient_charts(found))),
                ("Pictures", pictures_html(found)),
                ("Profile", profile_html(found)),
                ("Config", config_html(found)),
                ("Environment", environment_html(found))]
    sections = [(heading, html) for heading, html in sections if html]
    return write_page(path, f"{found['run'].resolve().name}: {word}", sentence, sections, refresh_s)


def nothing(sentence):
    return f"<p>{escape(sentence)}</p>\n"


def time_html(found):
    """Goodput over time, by kind of time and by cause of each end."""
    if not found["costs"]:
        return nothing("attempts.jsonl has no line of a beginning that can be read.")
    return (grid([run_charts.time_chart(found)]).replace('class="charts"', 'class="charts one"')
            + captioned(kinds_table(found), f"Goodput {100 * goodput(add_up(found)[0]):.1f} %")
            + captioned(causes_table(found), "What each cause cost"))


def captioned(table, caption):
    """HTML of a table given as (header, rows, formats)."""
    header, rows, formats = table
    return table_html(header, rows, caption, formats)


def attempt_rows(found):
    """A dict for each attempt: number, began, ranks, first and last step, cause, who, where, cost, sentence."""
    rows = []
    for each, following in zip(found["costs"], [*found["costs"][1:], {"restart": 0.0}]):
        verdict = (each["end"] or {}).get("verdict", {})
        steps = found["steps"]["step"][each["rows"]][found["steps"]["is_step"][each["rows"]] == 1]
        rows.append({"number": each["attempt"], "began": each["began"], "ranks": each["begin"].get("ranks"),
                     "steps": f"{steps[0]:.0f}-{steps[-1]:.0f}" if len(steps) else "none", "cause": each["cause"],
                     "dead": bool(verdict.get("dead")), "rank": verdict.get("rank"), "host": verdict.get("host", ""),
                     "place": place(verdict) if verdict.get("dead") else "",
                     "cost": each["detection"] + each["spent"]["replayed steps"] + following["restart"],
                     "seconds": each["ended"] - each["began"], "stack": verdict.get("stack") or [],
                     "sentence": (each["end"] or {}).get("sentence", "No end is recorded: it is running or has died.")})
    return rows


def attempts_html(found):
    """The end of each attempt with its cause and cost, newest first; each unfolds to the whole sentence and stack."""
    rows, items = attempt_rows(found), []
    for row in rows[::-1][:LAST_ATTEMPTS]:
        who = f"rank {row['rank']} on {row['host']}" if row["rank"] is not None else ""
        parts = [f"attempt {row['number']}", who, f"in {row['place']}" if row["dead"] else "",
                 f"steps {row['steps']}", f"cost {row['cost']:.1f} s" if row["cost"] >= 0.05 else ""]
        told = "\n".join([f"{moment(row['began'])}, {duration(row['seconds'])}, {row['ranks']} ranks", row["sentence"],
                          *row["stack"]])
        kind, line = "dead" if row["dead"] else "well", escape(" \u00b7 ".join(filter(None, parts)))
        items.append(f'<details class="{kind}"><summary><b>{escape(row["cause"])}</b> {line}</summary>'
                     f"<pre>{escape(told)}</pre></details>\n")
    left = len(rows) - len(items)
    return "".join(items) + (nothing(f"{left} earlier ones are in attempts.jsonl.") if left > 0 else "")


def ranks_table(found):
    """(header, rows, formats): host, own work per step and memory of each rank, from its last lines."""
    own, rows = own_seconds(found), []
    for rank, lines in newest_ranks(found).items():
        last = lines[-1]
        work = [seconds.sum() for seconds in list(own.get(rank, {}).values())[-5:]]
        memory = [last.get(key) and last[key] / 2 ** 30 for key in ("host_used", "device_reserved", "device_free")]
        rows.append([rank, host_of(found, rank), sum(work) / len(work) if work else None, *memory])
    header = ["rank", "node", "own work s", "host GiB", "torch holds GiB", "device free GiB"]
    return header, rows, [None, None, ".4g", ".2f", ".2f", ".2f"]


def ranks_html(found):
    table = ranks_table(found)
    if not table[1]:
        return ""
    html = captioned(table, "Own work: mean time of the last 50 steps without waiting for other ranks")
    count = len(table[1])
    return html if count <= 8 else f"<details><summary>Table of {count} ranks</summary>{html}</details>\n"


def pictures_html(found):
    """The newest pictures of a validation pair that fit into a page."""
    html, room = "", PICTURE_BYTES
    for path in found["pictures"][::-1][:2]:
        data = path.read_bytes()
        room -= len(data)
        if room > 0:
            name, _, step = path.stem.rpartition("_")
            html += (f'<figure><div class="wide"><img src="data:image/png;base64,{base64.b64encode(data).decode()}" '
                     f'alt="{escape(name)}" style="min-width: 700px"></div><figcaption>{escape(name)}, step '
                     f"{int(step) if step.isdecimal() else escape(step)}</figcaption></figure>\n")
    return html


def profile_html(found):
    """The operations that took the most time in the newest profile (--profile)."""
    paths = sorted((found["run"] / "profile").glob("*.json"))
    profile = read_json(paths[-1], {}) if paths else {}
    if not profile.get("top"):
        return ""
    rows = [[row["name"], row["calls"], row["ms"], row["share"]] for row in profile["top"]]
    return table_html(["operation", "calls", "own ms", "share %"], rows,
                      f"Steps {profile['first']} to {profile['last']} of rank {profile['rank']}; the trace, for "
                      f"ui.perfetto.dev, is profile/{profile['trace']}", [None, None, ".2f", ".1f"])


# ---------------------------------------------------------------------------------------------------------------------
# Config and environment
# ---------------------------------------------------------------------------------------------------------------------

def differing_keys(runs, without=()):
    """[(key, value in each run as text, "-" if absent)] of the keys in which runs differ, but `without`.

    runs: for each the flat configs of its launches, oldest first; a value that was changed reads "8 then 4".
    """
    rows = []
    for key in sorted({key for configs in runs for cfg in configs for key in cfg} - set(without)):
        texts = [[json.dumps(cfg[key]) if key in cfg else "-" for cfg in configs] for configs in runs]
        texts = [" then ".join(text for text, _ in itertools.groupby(each)) or "-" for each in texts]
        if len({*texts}) > 1:
            rows.append((key, *texts))
    return rows


def settings_of(launch):
    """What a launch was run with: its flat config and, as `code`, the mark of its code. launch: of `read_launches`."""
    return {**launch["config"], "code": launch["code"]}


def config_changes(found):
    """[(heading, rows of `differing_keys`)] from each launch to the next, where any differ."""
    result, launches = [], found["launches"]
    for old, new in zip(launches, launches[1:]):
        rows = differing_keys([[settings_of(old)], [settings_of(new)]])
        if rows:
            result.append((f"since launch {new['number']}, step {new.get('step', '-')}", rows))
    return result


def config_html(found):
    """The keys that have changed, and all keys folded up below them."""
    if not found["config"]:
        return nothing("The folder has no launches/, so the config is not known.")
    html = "".join(table_html(["key", "before", "now"], rows, f"Changed {heading}")
                   for heading, rows in config_changes(found))
    rows = [(key, json.dumps(value)) for key, value in found["config"].items()]
    return html + f"<details><summary>All keys</summary>{table_html(['key', 'value'], rows)}</details>\n"


def environment_html(found):
    """Commit, command, host, versions and settings of the newest launch."""
    if not found["launches"]:
        return ""
    launch = found["launches"][-1]
    names = ("started", "host", "version", "commit", "changed", "seed", "python")
    facts = [(name, "-" if launch.get(name) is None else str(launch[name])) for name in names]
    facts.append(("command", " ".join(launch.get("command", []))))
    groups = [(name, launch.get(name) or {}) for name in ("packages", "settings", "job")]
    return table_html(["launch", launch["number"]], facts) + "".join(
        f"<details><summary>{name} ({len(values)})</summary>{table_html(['name', 'value'], values.items())}</details>\n"
        for name, values in groups if values)


# ---------------------------------------------------------------------------------------------------------------------
# The terminal
# ---------------------------------------------------------------------------------------------------------------------

def as_text(found):
    """The report for a terminal."""
    findings, (_, sentence) = find_all(found), state_of(found)
    parts = [f"{found['run']}\n{sentence}", "\n".join(f"{label:>20}: {value}  ({note})" for label, value, note
                                                      in headline(found, findings))]
    parts.append("\n".join(f"{each['rule'].upper()} (step {each['step']}): {each['sentence']}\n    what to do: "
                           f"{each['advice']}" for each in findings) or "no rule found a problem")
    parts.append(text_table(["loss", "first", "last", "", ""], curve_rows(found)))
    parts.append(tables(found))
    ended = [(row["number"], row["steps"], row["cause"], row["rank"], row["host"], row["place"],
              round(row["cost"], 1)) for row in attempt_rows(found)[-10:]]
    parts.append(text_table(["attempt", "steps", "ended by", "rank", "node", "in", "cost s"], ended))
    ranks = ranks_table(found)
    parts += [text_table(*ranks)] if ranks[1] else []
    parts += [f"changed {heading}: " + ", ".join(f"{key} {old} -> {new}" for key, old, new in rows)
              for heading, rows in config_changes(found)]
    return "\n\n".join(parts)


def curve_rows(found):
    """A row for each loss and validation score: name, first and last value, the curve as characters."""
    curves = {name: found["once"].get(f"terms.{name}", np.zeros(0)) for name in found["losses"]}
    curves = {name: column[~np.isnan(column)] for name, column in curves.items()}
    curves.update({name: [line[name] for line in lines] for name, lines in found["scores"].items() if lines})
    return [[name, number(values[0]), number(values[-1]), "", spark(values)] if len(values)
            else [name, "-", "-", "", ""] for name, values in curves.items()]


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------

def report(args):
    """Write the page, print the text, or both, once. Returns: the word of the run's state."""
    found = read_run(args.run)
    word, sentence = state_of(found)
    if not args.text or args.follow:
        refresh = args.follow and word not in ("done", "stopped")
        path = write_report(found, args.out, FOLLOW_S if refresh else None)
    if args.text:
        print("\033[2J\033[H" * (args.follow and sys.stdout.isatty()) + as_text(found), flush=True)
    else:
        print(f"{sentence}\nreport: {path.resolve()} ({size_text(path.stat().st_size)})", flush=True)
    return word


def look(args):
    """Report once; with --follow, repeat until the run is done or stopped, or until Ctrl-C. Returns: the exit code."""
    while True:
        began = time.monotonic()
        if report(args) in ("done", "stopped") or not args.follow:
            return DONE
        try:
            time.sleep(max(FOLLOW_S, FOLLOW_SHARE * (time.monotonic() - began)))
        except KeyboardInterrupt:
            return DONE


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.run",  # of omnimorph, if installed
        description="Show what a run does, did and cost, as one self-contained page. "
                    f"`python -m {__package__}.compare RUN RUN...` puts runs side by side.")
    parser.add_argument("run", type=Path, help="folder of the run, Models/<data>_<net>; a copy will do")
    parser.add_argument("--text", action="store_true", help="print the report on the terminal instead")
    parser.add_argument("--follow", action="store_true", help="repeat every ten seconds until the run has ended")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the run's folder)")
    args = parse_options(parser, argv)
    args.out = args.out or args.run / "report.html"
    return args


def main(argv=None):
    args = parse_arguments(argv)
    return run_program(look, args, args.out)


if __name__ == "__main__":
    sys.exit(main())
