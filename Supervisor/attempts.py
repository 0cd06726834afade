"""Each launch of a run is an attempt. `<run>/attempts.jsonl` numbers them and says how each ended and what follows.

The launcher (bash_train_multi_nodes.sh) calls `python -m Supervisor.attempts begin ...` before and `... end CODE` after
each round; a training without a launcher calls `begin` and `end` itself. Needs no torch.
"""
from Runtime import __version__  # noqa: F401  first: an outdated Python stops here with one sentence

# isort: split
import argparse
import contextlib
import datetime
import errno
import functools
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from Runtime.config import flatten, load_config
from Runtime.errors import DONE, PLANNED_RESTART, STOP, InputError, fault_of
from Runtime.files import append_line, is_passing, is_there, listed, patiently, read_lines, write_file
from Runtime.global_batch import fix_step, split_step, usable
from Runtime.manifest import checkpoint_files, durable, durable_step, trust_again
from Runtime.run_lock import TakenOver, generations, hold, launch_files, lock, run_folder, slurm_job, touch, unlock
from Supervisor.verdict import STARTING, judge, read_rank, sentence

SAME_DEATHS, ANY_DEATHS = 3, 10  # the loop stops after this many without a new durable step
COMMAND_S = 60.0  # time limit of the user's command (run.notify)
NOTIFY_S = 15.0  # for a file system that does not respond when that command is looked up
LAST_LINES = 2 ** 16  # bytes at the end of a rank's log: the lines of its last attempt
OF_A_FIRST_START = re.compile(r"(attempts|rank\d+)\.jsonl|rank\d+\.stack|(step|verdict)\.json|\.lock")
PATIENCE_S = 600.0  # for a file system that does not respond, until run.patience_s is read from the config
SILENT = ("vanished", "frozen", "never started", "a rank did not arrive")  # causes that may lie with a node


def history(run):
    """The lines of attempts.jsonl, oldest first. run: Path of the run folder."""
    return read_lines(run / "attempts.jsonl")


def begin(run, loop, world_size):
    """Number a new attempt and write its line. If the previous attempt has no end, judge that first.

    loop: the lock's token, the same for all rounds of one launcher. world_size: ranks. Returns: the attempt's number.
    """
    begins = judge_unended(run)
    # Above the numbers in the ranks' logs too: if attempts.jsonl is lost, old lines must not count for this attempt.
    logs = [path for path in listed(run) if path.match("rank*.jsonl")]
    logged = [line.get("attempt") for path in logs for line in read_lines(path, LAST_LINES)]
    logged = [number for number in logged if type(number) is int]  # a damaged line may hold anything
    attempt = max([-1, *(line["attempt"] for line in begins[-1:]), *logged]) + 1
    append_line(run / "attempts.jsonl", {
        "event": "begin", "attempt": attempt, "loop": loop, "time": time.time(), "ranks": world_size,
        "host": socket.gethostname(), "starter": starter(), "job": slurm_job(), "durable": durable_step(run)})
    return attempt


def judge_unended(run):
    """Judge the newest attempt if it has no end: launcher and ranks died together. Returns: the lines of all begins."""
    lines = history(run)
    begins = [line for line in lines if line["event"] == "begin"]
    ended = {line["attempt"] for line in lines if line["event"] == "end"}
    if begins and begins[-1]["attempt"] not in ended:
        end(run, begins[-1]["attempt"], None)
    return begins


def starter():
    """Identifies what started this process and its restarts: torchrun's job id, else host and PID of the parent."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"{socket.gethostname()} {os.getppid()}" if job == "none" else job


def end(run, attempt, code, quiet=False, patience_s=0.0):
    """Judge an attempt, decide what comes next, write and print both.

    code: exit code of the launch, None if unknown. quiet: do not print, since the process has printed how it ended.
    patience_s: how long to wait for a file system that is full or does not answer.
    Returns: "done", "continue", "restart" (planned), "step back" (one checkpoint) or "stop".
    """
    line = patiently(lambda: judged(run, attempt, code, patience_s), patience_s, run)
    back = went_back(history(run), line) if line["decision"] == "stop" else None
    if back:  # before the line: if this dies in between, the attempt is judged again
        patiently(lambda: trust_again(run, back["sentence"]), patience_s, run / "manifest.json")
    patiently(lambda: append_line(run / "attempts.jsonl", line), patience_s, run / "attempts.jsonl")
    if line["verdict"]["dead"] or line["decision"] == "stop":  # the launcher names this file when it stops
        path = run / "verdict.json"
        content = json.dumps({**line["verdict"], "next": line["next"], "sentence": line["sentence"],
                              "check_nodes": is_suspect(history(run), line["verdict"])}, indent=1)
        try:
            patiently(lambda: write_file(path, content + "\n"), patience_s, path)
            keep_stacks(run, attempt, line["verdict"]["rank"] or 0)
        except OSError as error:  # the decision stands all the same
            print(f"{fault_of(error, path)}; attempts.jsonl has the verdict on attempt {attempt}; its stacks are lost",
                  file=sys.stderr, flush=True)
    if not quiet:
        print(line["sentence"], file=sys.stderr, flush=True)
    notify_end(run, line)
    return line["decision"]


def leave_folder(run, token):
    """Unlock a run folder; remove it if it holds nothing but a refused first start, whose error has been printed.

    Beside a file of somebody else nothing is removed, so that the verdict stays. An empty folder that --fresh leaves
    would be continued in place of the run before it.
    """
    unlock(run, token)
    lines = history(run)
    if len(lines) not in (0, 2) or lines and not (is_refusal(lines[-1]) and lines[-1]["decision"] == "stop"):
        return
    with contextlib.suppress(OSError):  # somebody keeps more in tmp, or the file system does not answer
        files = [path for path in listed(run) if path.name != "tmp"]
        if all(OF_A_FIRST_START.fullmatch(path.name) for path in files):
            (run / "tmp").rmdir()
            for path in files:
                path.unlink(missing_ok=True)
            run.rmdir()


def keep_stacks(run, attempt, rank):
    """Keep the thread stacks that a rank left, since its next attempt overwrites them.

    The verdict has the innermost frames of one thread only, and another one may have crashed. If the disk is full,
    this does not wait for space.
    """
    text = read_rank(run, rank, attempt)["stack"]
    if text:
        write_file(run / f"stacks/attempt{attempt}_rank{rank}.txt", text)


def notify_end(run, line):
    """Run the user's command (run.notify) when a run is done or needs a person. line: the "end" in attempts.jsonl.

    sh gets OMNIMORPH_RUN, OMNIMORPH_SUBJECT and OMNIMORPH_MESSAGE. A command that fails or takes longer than COMMAND_S
    is only reported on standard error.
    """
    if line["decision"] not in ("done", "stop"):
        return
    try:
        configs = patiently(lambda: launch_files(run, "config.yaml"), NOTIFY_S, run)
        command = configs and flatten(yaml.safe_load(configs[-1].read_text()), configs[-1]).get("run.notify")
    except (ValueError, yaml.YAMLError):  # a machine died while it was written
        return
    except OSError as error:
        print(f"run.notify is not called: {run / 'launches'}: {error.strerror or error}", file=sys.stderr, flush=True)
        return
    if not command:
        return
    # Without what makes a process a rank of this launch (launch.environment): a training that the command starts would
    # join this run. Under Slurm RANKS is ours, elsewhere it may be the user's.
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_ID", *["RANKS"] * bool(os.environ.get("UNDER_SLURM")))
    environment = {name: value for name, value in os.environ.items()
                   if name not in own and not name.startswith(("OMNIMORPH_", "MASTER_", "TORCHELASTIC_"))}
    environment.update(OMNIMORPH_RUN=str(run), OMNIMORPH_SUBJECT=line["decision"], OMNIMORPH_MESSAGE=line["sentence"])
    try:
        # Its output goes to the log: standard output belongs to our caller.
        subprocess.run(command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=2, timeout=COMMAND_S,
                       check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"run.notify: {error}", file=sys.stderr, flush=True)


def judged(run, attempt, code, patience_s):
    """The "end" line of an attempt for attempts.jsonl. code, patience_s: as in `end`."""
    lines = history(run)
    begun = next((line for line in lines if line["event"] == "begin" and line["attempt"] == attempt), None)
    if begun is None:
        raise FileNotFoundError(errno.ENOENT, f"no longer has attempt {attempt}", str(run / "attempts.jsonl"))
    verdict = judge(run, attempt, begun["ranks"], code)
    steps = [entry["step"] for entry in durable(run)]
    line = {"event": "end", "attempt": attempt, "loop": begun["loop"], "code": code,
            "time": time.time() if code is not None else verdict["ended"] or begun["time"],
            "durable": steps[0] if steps else 0, "before": steps[1] if len(steps) > 1 else None,
            "unlisted": not steps and bool(checkpoint_files(run)),
            "cause": verdict["cause"], "host": verdict["host"] if verdict["rank"] is not None else "",
            "signature": [verdict[key] for key in ("cause", "mode", "phase", "step")]}
    decision, reason = decide([*lines, line], verdict, patience_s)
    return {**line, "decision": decision, "verdict": verdict, "next": reason,
            "sentence": f"{sentence(verdict).rstrip('.')}. {reason}"}


def decide(lines, verdict, patience_s=0.0):
    """(decision of `end`, one sentence on what happens next).

    lines: of attempts.jsonl; the last is the end that `verdict` judges. Only ends of the same loop count. patience_s:
    how long to retry refused starts in a loop, or a requeued job, that has trained before.
    """
    last = lines[-1]
    if verdict["cause"] == "done":
        return "done", "The training is complete."
    ends = ends_of(lines, last["loop"])
    if is_refusal(last) and has_trained(lines):  # someone is editing, or a node has lost something
        row = list(itertools.takewhile(is_refusal, reversed(ends)))
        if len(row) >= SAME_DEATHS and last["time"] - row[-1]["time"] >= patience_s:
            return "stop", f"Stopped: nothing has begun for {patience_s:.0f} s. This needs a person."
        return "continue", f"The run has trained before, so this may pass: tried again for up to {patience_s:.0f} s."
    alone = "OMNIMORPH_TOKEN" not in os.environ  # no launcher, so nobody starts it again
    if last["cause"] == "refused" and (is_refusal(last) or alone and last["code"] == STOP):
        return "stop", "This needs a person: correct it and start again."
    if not verdict["dead"]:
        repeats = len(list(itertools.takewhile(lambda line: is_same(line, last), reversed(ends))))
        if repeats >= SAME_DEATHS:  # a round that had saved a step would have another durable step
            return "stop", f"Stopped: {repeats} planned restarts in a row at step {last['durable']}."
        return "restart", f"Continues from step {last['durable']}."
    back = went_back(lines, last)
    if back and back["signature"][:3] == last["signature"][:3]:  # not the step: it began at another one
        return "stop", (f"Stopped: the same death from step {last['durable']} too, so the newest checkpoint (step "
                        f"{back['durable']}) is not to blame: it counts again.")
    deaths = [line for line in ends if line["durable"] == last["durable"] and line["cause"] != "planned restart"
              and (is_refusal(last) or not is_refusal(line))]
    repeats = sum(is_same(line, last) for line in deaths)
    if verdict["cause"] == "disk":
        repeats = 0  # no checkpoint is to blame, and the file system gets more time to come back
    if repeats >= SAME_DEATHS or len(deaths) >= ANY_DEATHS:
        count = f"the same end {repeats} times" if repeats >= SAME_DEATHS else f"{len(deaths)} ends"
        return "stop", f"Stopped: {count} without a new durable step after step {last['durable']}."
    if repeats == SAME_DEATHS - 1 and not back:
        way = "there is no earlier checkpoint to go back to" if last["before"] is None else "goes one checkpoint back"
        return "step back", f"The same death twice without a new durable step: {way}."
    if last.get("unlisted"):
        return "continue", ("Continues from the newest checkpoint that verifies, although manifest.json lists none "
                            "that counts.")
    return "continue", (f"Continues from the newest checkpoint that verifies (step {last['durable']})."
                        if last["durable"] else "Starts anew: no checkpoint has been written that verifies.")


def ends_of(lines, loop):
    """The ends of the attempts of one loop, oldest first. lines: of attempts.jsonl. loop: the lock's token."""
    return [line for line in lines if line["event"] == "end" and line["loop"] == loop]


def has_trained(lines):
    """Whether an attempt got past its start, in the loop of the last line or before Slurm requeued this job."""
    jobs = {line["attempt"]: line.get("job") for line in lines if line["event"] == "begin"}
    return any(line["signature"][2] not in STARTING for line in lines if line["event"] == "end" and (
        line["loop"] == lines[-1]["loop"] or was_requeued() and jobs.get(line["attempt"]) == slurm_job()))


def was_requeued():
    """Whether Slurm has started this job again, with no person waiting for it."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def went_back(lines, last):
    """The end in this loop after which the run went back one checkpoint, if no newer step has become durable since.

    lines: of attempts.jsonl. last: an end. Returns: None if the run did not go back, or has saved a step since.
    """
    backs = [line for line in ends_of(lines, last["loop"])
             if line.get("decision") == "step back" and line.get("before") is not None]
    return backs[-1] if backs and last["durable"] <= backs[-1]["before"] else None


def is_refusal(line):
    """Whether an attempt ended before its first step because it was refused, or because its code did not even load."""
    cause, _, phase, _ = line["signature"]
    return cause == "refused" and phase in STARTING or cause == "never started"


def is_suspect(lines, verdict):
    """Whether to check the nodes again after this death: a rank fell silent, or its host has had a death before.

    lines: of attempts.jsonl, with the end that `verdict` judges.
    """
    hosts = [line.get("host") for line in ends_of(lines, lines[-1]["loop"])
             if line["cause"] not in ("done", "planned restart")]
    return verdict["cause"] in SILENT or verdict["host"] != "" and hosts.count(verdict["host"]) > 1


def is_same(line, other):
    """Whether two attempts ended for the same cause at the same place with the same durable step."""
    return (line["signature"], line["durable"]) == (other["signature"], other["durable"])


# ---------------------------------------------------------------------------------------------------------------------
# Commands of the launcher
# ---------------------------------------------------------------------------------------------------------------------

def config_of(argv):
    """The config of a training, flat. argv: its arguments, and maybe others. Raises InputError for a bad one."""
    parser = argparse.ArgumentParser(prog="attempts")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="extend", nargs="+", default=[], dest="overrides")
    args = parser.parse_known_args(argv)[0]
    patiently(lambda: is_there(args.config) and Path(args.config).read_bytes(), PATIENCE_S, args.config)
    return load_config(args.config, args.overrides)


def launcher_begin(argv):
    """Before a round: check the config, take the lock, number the attempt; print the launcher's variables as JSON.

    argv: arguments of the training and those below. Raises InputError for a bad config or a folder in use.
    """
    cfg = config_of(argv)
    parser = argparse.ArgumentParser(prog="attempts begin")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--launcher-pid", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that are there")
    parser.add_argument("--tasks", type=int, required=True, help="ranks on each of them")
    parser.add_argument("--of", type=int, default=0, help="ranks that were asked for, before nodes were left out")
    args = parser.parse_known_args(argv)[0]
    floor, patience = cfg["run.deadline_floor_s"], cfg["run.patience_s"]
    run, token, requeued = take_folder(cfg, args.fresh, args.launcher_pid)
    try:
        step, nodes, tasks = patiently(lambda: share_out(run, cfg, args.nodes, args.tasks, args.of), patience, run)
        patiently(lambda: judge_unended(run), patience, run)  # which may decide to step back
        ends = ends_of(patiently(lambda: history(run), patience, run), token)
        step_back = pending_step_back(run, ends)
        attempt = patiently(lambda: begin(run, token, nodes * tasks), patience, run)
    except BaseException:
        if "OMNIMORPH_TOKEN" not in os.environ:  # nobody learns the token, so nobody else could unlock the folder
            with contextlib.suppress(OSError):
                leave_folder(run, token)
        raise
    variables = {"OMNIMORPH_RUN": str(run), "OMNIMORPH_TOKEN": token, "OMNIMORPH_STEP_BACK": step_back,
                 "OMNIMORPH_STEP": json.dumps(step), "NODE_COUNT": nodes, "TASKS_PER_NODE": tasks,
                 "RANKS": nodes * tasks, "OMNIMORPH_ATTEMPT": attempt, "OMNIMORPH_ROUND": len(ends) + requeued,
                 "ROUND_SECONDS": f"{cfg['run.round_seconds']:.10g}", "MAX_ROUNDS": cfg["run.max_rounds"],
                 # A healthy round saves and leaves before its time limit, which ends only those that hang.
                 "LEAVE_AFTER": f"{max(0.9 * cfg['run.round_seconds'], cfg['run.round_seconds'] - 300):.10g}",
                 "PAUSE_PLANNED": cfg["run.pause_planned_s"], "PAUSE_CRASH": cfg["run.pause_crash_s"],
                 "OMNIMORPH_PATIENCE_S": patience, "OMNIMORPH_STAGE": cfg["data.stage"],
                 "GRACE": math.ceil(cfg["run.grace_s"]), "START_SECONDS": math.ceil(cfg["run.deadline_first_s"]),
                 "LINGER": math.ceil(max(floor, 10)), "LEAVE_SECONDS": math.ceil(max(3 * floor, 10))}
    print(json.dumps(variables))


def pending_step_back(run, ends):
    """The sentence of the last decision to step back, "" unless the next attempt has to do so.

    Attempts since then that ended before they read a checkpoint, such as refused ones, have not done so.
    ends: of one loop, from attempts.jsonl.
    """
    since = list(itertools.takewhile(lambda line: line["decision"] != "step back", reversed(ends)))
    if len(since) == len(ends) or any(line["signature"][2] not in STARTING for line in since):
        return ""
    back = ends[-1 - len(since)]
    return back["sentence"] if durable_step(run) == back["durable"] else ""


def take_folder(cfg, fresh, launcher_pid):
    """Choose the run folder and take its lock for the launcher; wait up to run.patience_s for the file system.

    Returns: (Path of the folder, token of its lock, whether a requeued job continues there).
    """
    wait = functools.partial(patiently, seconds=cfg["run.patience_s"], subject=cfg["run.models"])
    folder_of_job = wait(lambda: run_of_job(cfg)) if was_requeued() else None
    run = Path(os.environ.get("OMNIMORPH_RUN") or folder_of_job or wait(lambda: run_folder(cfg, fresh)))
    token = wait(lambda: lock(run, stale_after_s(cfg), pid=launcher_pid, token=os.environ.get("OMNIMORPH_TOKEN")))
    return run, token, bool(folder_of_job)


def share_out(run, cfg, nodes, tasks, ranks_asked):
    """How many ranks share the run's step: (step of `fix_step`, nodes, tasks on each).

    nodes, tasks: available ones. ranks_asked: ranks requested, before nodes were left out. If fewer ranks are available
    than requested or than the first launch had, as many as possible continue, and one line says how many stay idle.
    Raises InputError if the config does not fit the requested ranks.
    """
    there = nodes * tasks
    ranks_asked = max(ranks_asked, there)
    step = fix_step(run, cfg, ranks_asked)
    used_nodes, used_tasks = usable(cfg, step, nodes, tasks)
    used = used_nodes * used_tasks
    if used < there == ranks_asked and ranks_asked >= step["ranks"]:
        split_step(cfg, there, step)  # raises the InputError
    most = max(ranks_asked, step["ranks"])
    if used < most:
        count = split_step(cfg, used, step).sample_batches
        idle = f"; {there - used} more could not share it evenly and stay idle" if used < there else ""
        print(f"{used} of {most} ranks ({used_nodes} x {used_tasks}) do the whole step of {step['samples']} samples, "
              f"{count} batches each{idle}", file=sys.stderr, flush=True)
    return step, used_nodes, used_tasks


def run_of_job(cfg):
    """The folder in which this Slurm job trained before it was requeued; None if it did not begin to train."""
    jobs = {line["job"]: folder for folder in generations(cfg).values() for line in history(folder)
            if line["event"] == "begin"}
    return jobs.get(slurm_job())


def launcher_end(argv):
    """After a round: judge it and decide. argv: [exit code of the round].

    Returns: exit code for the launcher: 0 (done), 42 (planned restart), 43 (stop) or 1 (crash).
    """
    run = Path(os.environ["OMNIMORPH_RUN"])
    hold(run, os.environ["OMNIMORPH_TOKEN"])
    touch(run)  # raises TakenOver if another launch has the folder now: then nothing may be written here
    decision = end(run, int(os.environ["OMNIMORPH_ATTEMPT"]), int(argv[0]),
                   patience_s=float(os.environ.get("OMNIMORPH_PATIENCE_S", PATIENCE_S)))
    return {"done": DONE, "restart": PLANNED_RESTART, "stop": STOP}.get(decision, 1)


def launcher_gained(argv):
    """Whether this launcher's rounds have made a step durable: exit code 0 if so, else 1."""
    run, token = Path(os.environ["OMNIMORPH_RUN"]), os.environ["OMNIMORPH_TOKEN"]
    began = min(line["time"] for line in history(run) if line["event"] == "begin" and line["loop"] == token)
    written = [datetime.datetime.fromisoformat(entry["written"]).timestamp() for entry in durable(run)]
    return 0 if max(written, default=0) >= math.floor(began) else 1


def launcher_tell(argv):
    """Call run.notify, because the launch stops. argv: the sentence that says why, then arguments of the training.

    A requeued job that cannot begin has no run yet: the message is about the run of its earlier start.
    """
    run = os.environ.get("OMNIMORPH_RUN") or was_requeued() and run_of_job(config_of(argv[1:]))
    if run:
        notify_end(Path(run), {"decision": "stop", "sentence": argv[0]})


def stale_after_s(cfg):
    """Seconds after which an untouched lock may be taken: longer than every deadline of its holder."""
    return 3 * max(cfg["run.deadline_first_s"], cfg["run.deadline_floor_s"], cfg["run.pause_crash_s"], 60.0)


def free_port():
    """The number of a free TCP port of this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main(argv):
    try:
        commands = {"begin": launcher_begin, "end": launcher_end, "gained": launcher_gained,
                    "port": lambda _: print(free_port()), "tell": launcher_tell,
                    "unlock": lambda _: leave_folder(Path(os.environ["OMNIMORPH_RUN"]), os.environ["OMNIMORPH_TOKEN"])}
        if not argv or argv[0] not in commands:
            known = ", ".join(commands)
            raise InputError(f"python -m Supervisor.attempts is for the launcher, with {known}; to see where "
                             "the time of a run went, use python -m Report.run Models/<run> --text.")
        return commands[argv[0]](argv[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        # In a run that has trained before, someone may be in the middle of an edit: the launcher tries again.
        unattended = "OMNIMORPH_TOKEN" in os.environ or was_requeued()
        passes = argv[:1] == ["begin"] and unattended and not isinstance(error, TakenOver)
        return 1 if passes else STOP
    except OSError as error:
        what = fault_of(error, "the run")
        if is_passing(error):
            what += ", and that did not pass: make room, or wait until it answers, then start the same command again."
            print(f"error: {what}", file=sys.stderr)
            if argv[0] == "end":  # after a round, the launcher leaves run.notify to this process
                launcher_tell([what])
            return STOP
        advice = "name another folder (run.models), or have the permissions of this one corrected"
        if isinstance(error, FileNotFoundError):
            advice = "somebody has moved or removed the run; put it back, or start the same command again"
        print(f"error: {what}: {advice}.", file=sys.stderr)
        return 1 if "OMNIMORPH_TOKEN" in os.environ else STOP


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
