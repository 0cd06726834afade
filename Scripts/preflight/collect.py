"""The other side of the preflight: read the findings of all tasks, compare them, print a table, decide.

`found` is {rank: {check: finding}}. A finding is what a task printed: rank, node, host, check, ok (True, False, or None
if the check could not run), said (the result), do (advice), and facts.
"""
import collections
import contextlib
import json
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

from Report.page import text_table
from Runtime.errors import DONE, STOP, InputError, ranges
from Runtime.files import write_file
from Runtime.global_batch import new_step, step_of, usable
from Runtime.run_lock import continued, generations
from Scripts.preflight.checks import CHECKS, OF_THE_NODE, skipped
from Supervisor.attempts import run_of_job, was_requeued

# Exit codes beside those of Runtime/errors.py
GO_ON = 75  # without the nodes in EXCLUDED
AGAIN = 76  # check once more: the fault may have been a stall
MOST_NODES = 6  # that a row of the table names
SLOW = "if Python and torch load slowly there, raise PREFLIGHT_SECONDS"  # advice


def collect(stream, cfg, nodes, tasks, limit, began, may_repeat=False, fresh=False):
    """Read findings to the end, judge them, print the table, write the report.

    stream: lines of all tasks. tasks: on each node. limit: seconds since `began` (time.monotonic) that all of it may
    take. may_repeat: whether a failure that may pass gives AGAIN. fresh: as in the training. Returns: exit code.
    """
    tell(f"{many(len(nodes), 'node')} x {many(tasks, 'rank')}, at most {limit:.0f} s")
    findings = read_findings(stream, len(nodes) * tasks, began)
    remove_marks(findings, cfg)
    judge(findings, nodes, tasks, time.monotonic() - began)
    rows = table_rows(findings, nodes, tasks)
    bad = [node for number, node in enumerate(nodes) if any(
        finding["ok"] is False for rank in range(number * tasks, (number + 1) * tasks)
        for finding in findings[rank].values())]
    code, excluded, sentence = decide(cfg, nodes, tasks, bad, rows, fresh)
    # No answer instead of a wrong one may have been a stall of a file system or of the network.
    stalled = any(finding["ok"] is False and (finding.get("passing") or finding.get("unreachable")
                                              or finding.get("waits_for"))
                  for checks in findings.values() for finding in checks.values())
    if bad and may_repeat and stalled:
        code, excluded, sentence = AGAIN, [], (f"{', '.join(bad)} failed in a way that may be temporary: checking "
                                               "again")
    header = ["check", "", "node (host)", "ranks", "found", "what to do"]
    print(text_table(header, rows), file=sys.stderr)
    tell(sentence)
    write_report(cfg, {"time": time.time(), "seconds": round(time.monotonic() - began, 1), "nodes": nodes,
                       "tasks_per_node": tasks, "code": code, "excluded": excluded, "sentence": sentence,
                       "findings": [finding for checks in findings.values() for finding in checks.values()]})
    print(f"EXCLUDED={' '.join(excluded)}", flush=True)
    return code


def tell(text):
    print(f"preflight: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------

def read_findings(stream, world_size, began):
    """Findings from a stream of lines; other lines are printed as they are. Returns: `found`."""
    findings, pieces = {rank: {} for rank in range(world_size)}, collections.defaultdict(str)
    answers, shown, arrived = 0, began, False
    for line in stream:
        finding = parse(line, pieces)
        if finding is None:
            continue
        checks = findings.setdefault(finding["rank"], {})
        if finding["check"] in checks:
            finding.update(ok=False, said="two processes say that they are this rank",
                           do="start one process for each rank, each with its own RANK")
        checks[finding["check"]] = finding
        answers, now = answers + 1, time.monotonic()
        if not arrived and all("arrival" in findings[rank] for rank in range(world_size)):
            arrived, shown = True, now
            tell(f"all {world_size} ranks have arrived after {now - began:.0f} s")
        elif now - shown > 10:
            shown = now
            tell(f"{answers} answers after {now - began:.0f} s")
    return findings


def parse(line, pieces):
    """The finding that a line completes, or None. pieces: {rank: text so far} of long findings, changed here."""
    try:
        content = json.loads(line)
        if "piece" in content:
            rank = content["rank"]
            pieces[rank] = content["text"] if content["piece"] == 1 else pieces[rank] + content["text"]
            if content["piece"] < content["of"]:
                return None
            content = json.loads(pieces.pop(rank))
        if isinstance(content, dict) and {"rank", "check", "ok", "said", "do", "node", "host"} <= content.keys():
            return content
    except (ValueError, TypeError, KeyError):
        pass
    if line.strip():
        print(line.rstrip("\n"), file=sys.stderr, flush=True)
    return None


def remove_marks(findings, cfg):
    """Remove the marks that the folder check of dead nodes has left behind."""
    for checks in findings.values():
        name = checks.get("folder", {}).get("marks", "")
        if name.startswith(".preflight-") and "/" not in name:
            for key in ("run.models", "run.logs"):
                shutil.rmtree(Path(cfg[key]) / name, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Judging: failures that only a comparison of ranks shows, and failures that follow from those of others
# ---------------------------------------------------------------------------------------------------------------------

def judge(findings, nodes, tasks, elapsed):
    """Complete and compare the findings, in place. elapsed: seconds since the start."""
    complete(findings, nodes, tasks, elapsed)
    compare_places(findings, nodes, tasks)
    versions = {rank: checks["code"] for rank, checks in findings.items() if "python" in checks.get("code", {})}
    for what in ("torch", "python"):
        compare(findings, "code", {rank: f"{what} {finding[what]}" for rank, finding in versions.items()},
                "use the same environment on all nodes")
    first = {rank: versions.get(rank - rank % tasks, {}) for rank in versions}  # git runs once on a node
    compare(findings, "code", {rank: f"commit {finding['commit']}" for rank, finding in first.items()
                            if "commit" in finding}, "use the same checkout and the same changes on all nodes")
    compare_settings(findings)
    compare_devices(findings, tasks)
    compare_folders(findings, nodes, tasks)
    compare_rendezvous(findings, nodes, tasks)
    excuse(findings)


def fail(findings, rank, check, said, do):
    """Turn a finding that was fine into a failure."""
    if findings[rank][check]["ok"]:
        findings[rank][check].update(ok=False, said=said, do=do)


def complete(findings, nodes, tasks, elapsed):
    """Add the findings that are missing: of ranks that never came, and of ranks that fell silent."""
    for rank, checks in findings.items():
        node = nodes[min(rank // tasks, len(nodes) - 1)]
        host = next((finding["host"] for finding in checks.values()), "")
        if "arrival" not in checks:
            checks["arrival"] = {"ok": False, "said": f"did not arrive within {elapsed:.0f} s", "passing": True,
                                 "do": f"check this node and the output above, or exclude the node; {SLOW}"}
        expected = [check for check in CHECKS if rank % tasks == 0 or check not in OF_THE_NODE]
        for check in expected if host else []:
            if check not in checks and all(finding["ok"] is not False for finding in checks.values()):
                checks[check] = {"ok": False, "said": f"no answer until the end, after {elapsed:.0f} s",
                                 "do": f"check this node; {SLOW}", "passing": True}
            checks.setdefault(check, skipped("no answer"))
        for check, finding in checks.items():
            finding.update({"rank": rank, "check": check, "node": finding.get("node", node),
                            "host": finding.get("host", host)})


def compare_places(findings, nodes, tasks):
    """Fail ranks with another world size, and ranks that do not fill the nodes in blocks."""
    world_size, wrong = len(nodes) * tasks, ""
    for rank, checks in sorted(findings.items()):
        arrival = checks["arrival"]
        if arrival.get("world_size", world_size) != world_size:
            fail(findings, rank, "arrival", f"WORLD_SIZE is {arrival['world_size']}, but {len(nodes)} nodes x {tasks} "
                 f"tasks make {world_size}", f"start {tasks} tasks on each node")
        if "local_rank" not in arrival or rank >= world_size:
            continue
        if arrival["node"] != nodes[rank // tasks] or arrival["local_rank"] != rank % tasks:
            wrong = wrong or f"rank {rank} is on {arrival['node']} with LOCAL_RANK {arrival['local_rank']}"
            fail(findings, rank, "arrival", f"ranks do not fill the nodes in their order: {wrong}",
                 "use srun --distribution=block, with the nodes in the order of NODES")


def compare(findings, check, values, do):
    """Fail the ranks whose value differs from that of most ranks; all of them if no value has a majority."""
    counts = collections.Counter(values.values())
    if len(counts) < 2:
        return
    common, times = counts.most_common(1)[0]
    places = "; ".join(f"{value} on {', '.join(dict.fromkeys(findings[r][check]['node'] for r in ranks))} (rank "
                       f"{ranges(ranks)})" for value, ranks in groups(values).items())
    for rank, value in values.items():
        if 2 * times <= len(values):
            fail(findings, rank, check, places, do)
        elif value != common:
            fail(findings, rank, check, f"{value}, but {common} on most ranks", do)


def groups(values):
    """{rank: value} becomes {value: [ranks]}."""
    grouped = collections.defaultdict(list)
    for rank, value in sorted(values.items()):
        grouped[value].append(rank)
    return grouped


def compare_settings(findings):
    """Compare the variables of all ranks, up to the first that differs."""
    settings = {rank: checks["settings"]["settings"] for rank, checks in findings.items()
                if "settings" in checks.get("settings", {})}
    for name in sorted(set().union(*settings.values())):
        values = {rank: f"{name} is {mine[name]!r}" if name in mine else f"{name} is not set"
                  for rank, mine in settings.items()}
        if len(set(values.values())) > 1:
            return compare(findings, "settings", {rank: shorten(value) for rank, value in values.items()},
                           f"set {name} the same on all nodes (Config/cluster/<site>.env), or nowhere")


def shorten(text):
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text)} characters, CRC {zlib.crc32(text.encode()):x})"


def compare_devices(findings, tasks):
    """Fail nodes without devices if others have some, and tasks that share one device."""
    counts = {rank: checks["device"]["devices"] for rank, checks in findings.items() if "devices" in
              checks.get("device", {})}
    for rank, count in counts.items():
        beside = [findings[other]["device"].get("own") for other in counts if other // tasks == rank // tasks]
        if count == 0 and any(counts.values()):
            fail(findings, rank, "device", "torch sees no device here, but on other nodes",
                 "check the driver of this node, or exclude the node")
        if count == 1 and beside.count(findings[rank]["device"]["own"]) > 1:
            fail(findings, rank, "device",
                 f"ntasks-per-node is {tasks} but torch sees 1 device, the same for all of them",
                 "use --ntasks-per-node=1, or bind one device to each task (--gpus-per-task=1); if other nodes "
                 "have more, look at the driver of this one")


def compare_folders(findings, nodes, tasks):
    """Excuse nodes that see the files of most nodes: the fault is with the nodes whose files they do not see."""
    sees = {nodes[rank // tasks]: checks["folder"]["sees"] for rank, checks in findings.items()
            if rank < len(nodes) * tasks and "sees" in checks.get("folder", {})}
    for checks in findings.values():
        mine = checks.get("folder", {})
        if "sees" in mine and mine["ok"] is False:
            seen = [node for node in mine["sees"] if node in sees]
            if 2 * len(seen) > len(sees):
                mine.update(skipped(f"no files of {', '.join(node for node in nodes if node not in mine['sees'])}"))


def compare_rendezvous(findings, nodes, tasks):
    """Excuse ranks if rank 0 does not serve the store; blame its node if most others cannot reach it."""
    lost = [rank for rank, checks in findings.items() if checks.get("rendezvous", {}).get("unreachable")]
    first = findings[0].get("rendezvous")
    if first is None or not (first["ok"] or first.get("unreachable") or "waits_for" in first):
        for rank in lost:
            findings[rank]["rendezvous"].update(skipped("rank 0 does not serve the store"))
        return
    away = {rank // tasks for rank in lost} - {0}
    if away and 2 * len(away) >= len(nodes) - 1 and 0 not in lost:
        for rank in range(tasks):
            if "rendezvous" in findings[rank]:
                findings[rank]["rendezvous"].update(
                    ok=False, said="MASTER_ADDR leads here from this node, but not from others",
                    do=findings[lost[0]]["rendezvous"]["do"], waits_for=[])


def excuse(findings):
    """Excuse ranks that only waited for others, if those have a failure of their own."""
    ill = {rank for rank, checks in findings.items() for finding in checks.values()
           if finding["ok"] is False and not finding.get("waits_for")}
    for checks in findings.values():
        for finding in checks.values():
            if finding["ok"] is False and finding.get("waits_for") and ill.issuperset(finding["waits_for"]):
                finding.update(skipped(f"rank {ranges(finding['waits_for'])} did not come"))


# ---------------------------------------------------------------------------------------------------------------------
# The table, the decision and the report
# ---------------------------------------------------------------------------------------------------------------------

def many(count, what):
    return f"{count} {what}{'s' * (count != 1)}"


def table_rows(findings, nodes, tasks):
    """Rows of the table: one for a check that all have passed, otherwise one for each different failure."""
    rows = []
    for check in ("arrival", *CHECKS):
        of_check = [checks[check] for _, checks in sorted(findings.items()) if check in checks]
        bad = [finding for finding in of_check if finding["ok"] is False]
        shown = bad or [finding for finding in of_check if finding["ok"] is None]
        add_rows(rows, "FAILED" if bad else "skipped", shown)
        add_rows(rows, "late", [finding for finding in of_check if finding["ok"] and finding.get("late")])
        well = [finding for finding in of_check if finding["ok"] and not finding.get("late")]
        if well and not shown:
            worst = max(well, key=lambda finding: finding.get("worst", 0))
            rows.append([check, "ok", many(len(nodes), "node"), many(len(well), "rank"), worst["said"], ""])
    return rows


def add_rows(rows, state, of_check):
    """Append one row for each different sentence among the findings `of_check` of one check, in the order of ranks."""
    for (said, do), ranks in groups({f["rank"]: (f["said"], f["do"]) for f in of_check}).items():
        hosts = {f["node"]: f["host"] for f in of_check if f["rank"] in ranks}
        shown = [f"{node} ({host})" if host not in ("", node) else node for node, host in hosts.items()]
        where = ", ".join(shown[:MOST_NODES])
        if len(shown) > MOST_NODES:
            where += f" and {len(shown) - MOST_NODES} more"
        rows.append([of_check[0]["check"], state, where, ranges(ranks), said.removeprefix("skipped: "), do])


def step_of_launch(cfg, asked, fresh):
    """The step that the next round will have with `asked` ranks: that of the run which it continues, or a new one."""
    with contextlib.suppress(OSError):  # the round will wait for a file system that does not answer
        runs = [] if fresh else list(generations(cfg).values())
        run = os.environ.get("OMNIMORPH_RUN") or was_requeued() and run_of_job(cfg) or runs and continued(runs, cfg)[0]
        if run:
            return step_of(Path(run), cfg, asked)
    return new_step(cfg, asked)


def decide(cfg, nodes, tasks, bad, rows, fresh):
    """(exit code, nodes to leave out, one sentence). fresh: whether a new run begins."""
    if not bad:
        return DONE, [], f"passed on {many(len(nodes), 'node')} x {many(tasks, 'rank')}"
    check, _, where, ranks, said, do = next(row for row in rows if row[1] == "FAILED")
    cause = f"{check}: rank {ranks} on {where}: {said}{f': {do}' if do else ''}"
    good = [node for node in nodes if node not in bad]
    if not good:
        return STOP, [], f"stop. No node is well. {cause}."
    # The step is that of the ranks asked for, as when the round begins: an earlier preflight may have left out nodes.
    asked = max(int(os.environ.get("RANKS_ASKED") or 0), len(nodes) * tasks)
    try:
        used, each = usable(cfg, step_of_launch(cfg, asked, fresh), len(good), tasks)
    except InputError as error:
        return STOP, [], f"stop: {', '.join(bad)} failed, {', '.join(good)} well, but {error} {cause}."
    idle = f" ({used} x {each} of them, more cannot share it evenly)" if used * each < len(good) * tasks else ""
    return GO_ON, bad, (f"continues without {', '.join(bad)}: {len(good) * tasks} ranks on {', '.join(good)} do the "
                        f"whole step{idle}. {cause}.")


def write_report(cfg, report):
    """Write `<run.logs>/preflight_<job>.json`. If the folder is not writable, the table says so already."""
    path = Path(cfg["run.logs"]) / f"preflight_{os.environ.get('SLURM_JOB_ID', 'local')}.json"
    try:
        write_file(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        tell(f"the report was not written ({error})")
