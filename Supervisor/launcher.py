"""What bash_train_multi_nodes.sh does before, during and after each round. Each command is a process of its own:

    python3 -ESm Supervisor.launcher COMMAND [options of the site] -- [the user's words]

`nodes` chooses the nodes, `preflight` checks them, `begin` opens a round, `round` runs its ranks, `end` judges it,
`again` checks the nodes after a death that one of them may have caused, `clean`, `tell` and `requeue` end a launch. The
shell keeps their results as exported variables: a command prints lines of NAME=value, which it exports and never runs.
All but `round` print nothing else on standard output. The standard library of Python 3.6 is enough.
"""
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

from Supervisor import scheduler
from Supervisor.processes import ASKED, Leave, ask, code_of, ignore, interpreter, listen, nap, note_exit, oom_kills, say
from Supervisor.scheduler import end_steps, on_slurm, step

TRAINING, PREFLIGHT = "OM_train_3modes.py", "Scripts/preflight/preflight.py"
MISSING = ("import importlib.util as u; "
           "print(*(n for n in ('torch', 'numpy', 'nibabel', 'scipy', 'yaml') if not u.find_spec(n)))")
COUNT = "import torch; print(max(torch.accelerator.device_count(), 1))"
OF_THE_LAUNCHER = ("--dry-run", "--preflight", "--no-preflight", "--allow-tmp")


def training_words(words):
    """The words for the training: the site's, then the user's, which take precedence.

    A path that exists in the folder where the command was typed is relative to that folder.
    """
    place = words.index("--")
    typed_in, before, given = os.environ["TYPED_IN"], "", []
    for word in words[place + 1:]:
        name, _, value = word.partition("=")
        if before in ("--config", "--init-from"):
            word = there(typed_in, word)
        elif name in ("--config", "--init-from") and value:
            word = name + "=" + there(typed_in, value)
        before = word
        if word not in OF_THE_LAUNCHER:
            given.append(word)
    return words[:place] + (given or ["--config", "Config/config_om.yaml"])


def there(folder, path):
    """A path joined to a folder if it exists there, else unchanged."""
    return os.path.join(folder, path) if os.path.exists(os.path.join(folder, path)) else path


def answer(**variables):
    """Set variables here and in the shell that started this command."""
    for name, value in variables.items():
        os.environ[name] = native(" ".join(str(value).splitlines()))
        # As bytes: in the locale C, Python 3.6 cannot print the name of a folder that is not ASCII.
        sys.stdout.buffer.write(os.fsencode("%s=%s\n" % (name, os.environ[name])))
    sys.stdout.flush()


def native(text):
    """A text of the training's Python, whose file names are UTF-8, for this one: 3.6 in locale C reads only ASCII."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def attempts(*words):
    """The command that runs Supervisor/attempts.py in the training's Python."""
    return [*interpreter(), "-m", "Supervisor.attempts", *map(str, words)]


# ---------------------------------------------------------------------------------------------------------------------
# Before the first round: the nodes, and whether they work
# ---------------------------------------------------------------------------------------------------------------------

def nodes(words):
    """Choose the nodes of the job; without Slurm, check RANKS."""
    ranks, job_nodes = os.environ.get("RANKS", ""), os.environ.get("SLURM_NNODES", "1")
    if on_slurm():
        tasks = os.environ.get("SLURM_TASKS_PER_NODE", "")
        if not tasks:
            raise Leave(43, "error: Slurm does not say how many tasks a node has: submit with --ntasks-per-node")
        if "," in tasks:
            raise Leave(43, "error: the nodes have different numbers of tasks (%s): submit with --ntasks-per-node"
                        % tasks)
        return answer(**scheduler.choose_nodes(patience()))
    if ranks and job_nodes != "1":
        raise Leave(43, "error: RANKS=%s starts processes on this host only, and job %s has %s nodes: unset RANKS"
                    % (ranks, scheduler.number(), job_nodes))
    if not ranks and job_nodes != "1" and "--dry-run" not in words:
        raise Leave(43, "error: job %s has %s nodes, and without srun in the PATH of this shell its ranks would start "
                    "on this host only: add Slurm's programs to the PATH, or submit the job with --nodes=1"
                    % (scheduler.number(), job_nodes))
    if ranks and not (ranks.isdecimal() and ranks[0] != "0"):
        raise Leave(43, "error: RANKS=%s: give the number of processes on this host, at least 1" % ranks)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # as the preflight's tasks call it
    answer(NODES=host, HOSTS=host, NODE_COUNT=1, MASTER_ADDR=os.environ.get("FIXED_ADDRESS") or "127.0.0.1")


def patience():
    """Seconds to wait for a transient fault to pass (run.patience_s)."""
    return math.floor(float(os.environ["OMNIMORPH_PATIENCE_S"]))


def is_first_start():
    """Whether a person has just started this launch, and may be watching: not so in later rounds or after a requeue."""
    return os.environ["ROUND"] == "0" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


def ranks(words):
    """Check PREFLIGHT_SECONDS, which a site's file may set, the user's port, and that PYTHON has the packages; count
    devices and cores of this host. words: the name of the log."""
    seconds, port = os.environ["PREFLIGHT_SECONDS"], os.environ.get("FIXED_PORT", "")
    try:
        usable = 0 < float(seconds) < math.inf
    except ValueError:
        usable = False
    if not usable:
        raise Leave(43, "error: PREFLIGHT_SECONDS=%s: give a number of seconds above 0" % seconds)
    if port and not (port.isdecimal() and 0 < int(port) < 2 ** 16):
        raise Leave(43, "error: MASTER_PORT=%s: give a free port of the first node, 1 to 65535, or unset it" % port)
    code, missing = ask([*interpreter(), "-c", MISSING], 600)
    if code or missing.strip():
        raise Leave(43, "error: %s lacks %s: name the interpreter of the environment with PYTHON=path, or install what "
                    "it lacks (docs/install.md)" % (os.environ["PYTHON"], "Python" if code else missing.strip()))
    if on_slurm():
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 1))
    else:
        count = os.environ.get("RANKS") or ask([*interpreter(), "-c", COUNT], 600)[1].strip()
        if not count:
            raise Leave(43, "stopped: torch cannot count the devices of this host, see the error above")
        answer(RANKS=count, TASKS=count, TASKS_PER_NODE=count, RANKS_ASKED=count)
        cores = len(os.sched_getaffinity(0)) // int(count)
    answer(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS") or max(cores, 1))
    times = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    life = ", start %d of job %s" % (times + 1, scheduler.number()) if times else ""
    say("%s ranks on %s, %s threads each, log %s%s" % (os.environ["RANKS"], os.environ["NODES"],
                                                       os.environ["OMP_NUM_THREADS"], words[0], life))


def choose_port():
    """Set the ranks' port: the user's, or one free on rank 0's node, or one free here and most likely there too."""
    first, port = os.environ["NODES"].split()[0], os.environ.get("FIXED_PORT", "")
    if not port and on_slurm() and os.environ.get("SLURMD_NODENAME") != first:
        port = ask(scheduler.on_nodes([first], attempts("port")), 40)[1].strip()
    with socket.socket() as probe:
        probe.bind(("", 0))
        answer(MASTER_PORT=port if port.isdecimal() else probe.getsockname()[1])


def preflight(words):
    """Keep the nodes that work; raise Leave if too few do. Transient faults get time to pass."""
    ends, repeat = time.monotonic() + patience(), ["--may-repeat"]
    words = training_words(words) + ["--allow-tmp"] * ("--allow-tmp" in words)
    while True:
        choose_port()
        say("preflight of %s ranks on %s" % (os.environ["RANKS"], os.environ["NODES"]))
        code, found = look(words, repeat)
        if code == 0:
            return
        if code == 75:  # again without some nodes
            more = [line.partition("=")[2] for line in found.splitlines() if line.startswith("EXCLUDED=")]
            answer(EXCLUDED=" ".join([os.environ.get("EXCLUDED", ""), *more]))
            answer(**scheduler.choose_nodes(patience()))
            continue
        # 2: its command line. 43: in a run that has trained before, this may pass too. 76: the file system hangs.
        if code != 76 and (code in (2, 43) and is_first_start() or time.monotonic() >= ends):
            raise Leave(43, "stopped: the preflight failed, see above")
        if time.monotonic() >= ends:
            repeat = []
        say("the preflight failed: once more in 20 s, for up to %d s in all" % patience())
        nap(20)
        if ASKED:
            raise Leave(42, " during the preflight")


def look(words, repeat):
    """Run one preflight: a task per rank, and a collector of their findings. Returns: its (exit code, output)."""
    seconds = os.environ["PREFLIGHT_SECONDS"]
    limit = ["timeout", "--kill-after=5", seconds]
    findings, out = os.pipe()
    if on_slurm():
        task = limit + ["setsid"] + step(["--kill-on-bad-exit=0"], [PREFLIGHT, "--task", *words])
        tasks = [subprocess.Popen(task, stdin=subprocess.DEVNULL, stdout=out)]
    else:
        task = limit + interpreter() + [PREFLIGHT, "--task", *words]
        tasks = [subprocess.Popen(task, stdin=subprocess.DEVNULL, stdout=out, env=of_rank(rank))
                 for rank in range(int(os.environ["RANKS"]))]
    os.close(out)
    found = ask([*interpreter(), PREFLIGHT, "--collect", *repeat, *words], math.floor(float(seconds)) + 60,
                stoppable=True, stdin=findings)
    os.close(findings)
    for process in tasks:
        process.terminate()
    ends = time.monotonic() + 10
    for process in tasks:
        code_of(process, ends)
        process.kill()
    if on_slurm():
        end_steps()
    if ASKED:
        raise Leave(42, " during the preflight")
    if found[0] == 137:
        say("the preflight has judged nothing in %s s + 60 s: if Python and torch load this slowly, raise "
            "PREFLIGHT_SECONDS" % seconds)
    return found


def of_rank(rank):
    """The environment of a rank on this host."""
    return dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=os.environ["RANKS"])


# ---------------------------------------------------------------------------------------------------------------------
# A round
# ---------------------------------------------------------------------------------------------------------------------

def begin(words):
    """Lock the folder and number the attempt; try again while a fault may pass."""
    ends, number = time.monotonic() + patience(), os.environ["ROUND"]
    hosts = os.environ["HOSTS"].split()
    command = attempts("begin", *training_words(words), "--launcher-pid", os.environ["LAUNCHER_PID"], "--nodes",
                       len(hosts), "--tasks", os.environ["TASKS"], "--of", os.environ["RANKS_ASKED"])
    while True:
        scheduler.tell_jobs()
        code, found = ask(command, 3600, stoppable=True)
        if code == 0:
            break
        if ASKED:
            raise Leave(42, " before round " + number)
        if code == 43 or code == 2 and is_first_start():
            raise Leave(43, "stopped before round %s: see the error above" % number)
        if time.monotonic() >= ends:
            raise Leave(43, "stopped before round %s, after %d s of the error above" % (number, patience()))
        say("round %s cannot begin yet (code %d): tried again" % (number, code))
        nap(5)
    answer(**json.loads([line for line in found.splitlines() if line.startswith("{")][-1]))
    answer(NODES=" ".join(hosts[:int(os.environ["NODE_COUNT"])]))  # those that can divide a step evenly
    choose_port()


def run_round(words):
    """Run the ranks of a round, within `timeout`. Returns: the exit code of the round."""
    words = ["--max-seconds-before-restart", os.environ["LEAVE_AFTER"]] + training_words(words)  # the user's last
    return run_step(words) if on_slurm() else run_ranks(words)


def has_spoken():
    """Whether a rank has begun its log since `begin` noted this attempt; before, only the launcher watches over it."""
    run = os.environ["OMNIMORPH_RUN"]
    try:
        begun = os.stat(os.path.join(run, "attempts.jsonl")).st_mtime_ns  # by the clock that stamps the logs too
        return any(file.name.startswith("rank") and file.name.endswith(".jsonl") and file.stat().st_mtime_ns > begun
                   for file in os.scandir(run))
    except OSError:  # a file system that does not answer now
        return False


def run_step(words):
    """Run the ranks as tasks of srun, which ends the others if one fails, or LINGER seconds after a good end."""
    spoken, began, next_word = False, time.monotonic(), 0
    srun = subprocess.Popen(step(["--kill-on-bad-exit=1", "--wait=" + os.environ["LINGER"]], [TRAINING, *words]),
                            stdin=subprocess.DEVNULL, start_new_session=True)
    while srun.poll() is None:
        time.sleep(0.5)
        now, spoken = time.monotonic(), spoken or has_spoken()
        if not spoken and (ASKED or now - began > int(os.environ["START_SECONDS"])):
            end_steps()
        if not spoken and ASKED:  # srun may not handle signals yet, and there is nothing to save
            return 42
        if ASKED and now >= next_word:
            srun.send_signal(signal.SIGUSR1)  # srun passes it on; repeated, since a rank may not handle it yet
            next_word = now + 5
    return code_of(srun)


def run_ranks(words):
    """Run the ranks as processes of this host. Once the first has ended, the others have limited time to end."""
    kills, spoken, began = oom_kills(), False, time.monotonic()
    first, until, next_word, ranks = None, None, 0, {}
    try:
        for rank in range(int(os.environ["RANKS"])):
            ranks[rank] = subprocess.Popen([*interpreter(), TRAINING, *words], env=of_rank(rank), preexec_fn=ignore)
        while ranks:
            time.sleep(0.1)
            now = time.monotonic()
            for rank, process in list(ranks.items()):
                code = code_of(process)
                if code is None:
                    continue
                del ranks[rank]
                note_exit(rank, code, kills)
                # The round's exit code is that of the first rank that failed, else that of the last rank.
                first = code if first in (None, 0, 42) else first
                # Other ranks need seconds to log their exceptions; after a good end they may still be finishing.
                if until is None:
                    until = now + int(os.environ["LINGER" if code in (0, 42) else "GRACE"])
            spoken = spoken or has_spoken()
            if not spoken and ASKED:  # there is nothing to save yet
                first, until = 42, 0
            elif not spoken and now - began > int(os.environ["START_SECONDS"]):
                until = 0
            if ASKED and now >= next_word:
                for process in ranks.values():
                    process.send_signal(signal.SIGUSR1)
                next_word = now + 5
            if ranks and until is not None and now > until:
                end_ranks(ranks, kills)
                ranks = {}
                first = 42 if ASKED and not spoken else 1 if first in (None, 0, 42) else first
    except OSError as error:
        say("a rank cannot be started: %s" % error)
        first = 127
    finally:  # whatever goes wrong here, no rank may run unwatched
        for process in ranks.values():
            process.kill()
    return first


def end_ranks(ranks, kills):
    """Kill all of {rank: process} at once; one blocked in a driver or file system (state D) dies later."""
    ends = time.monotonic() + 5
    for process in ranks.values():
        process.kill()
    for rank, process in ranks.items():
        code = code_of(process, ends)
        note_exit(rank, 137 if code is None else code, kills, by_launcher=True)
        if code is None:
            say("rank %d (process %d) was killed and does not end: a driver or a file system holds it"
                % (rank, process.pid))


def end(words):
    """Judge a round. words: its exit code. Returns: 0 done, 42 planned restart, 43 stop, another code after a death."""
    if on_slurm():
        end_steps()
    return ask(attempts("end", words[0]), 30 if os.environ.get("LEAVING") == "USR1" else 900)[0]


def again(words):
    """Check the nodes after a death if a rank fell silent (its node may be lost) or a node has had a second death.

    With --no-preflight, nodes on which no task can be started are left out all the same.
    """
    try:
        with open(os.path.join(os.environ["OMNIMORPH_RUN"], "verdict.json")) as file:
            suspect = json.load(file).get("check_nodes")
    except (OSError, ValueError):
        suspect = False
    if suspect:
        answer(**scheduler.choose_nodes(patience()))
        if "--no-preflight" not in words:
            preflight(words)


# ---------------------------------------------------------------------------------------------------------------------
# The end of a launch
# ---------------------------------------------------------------------------------------------------------------------

def clean(words):
    """End what is left, remove copies of the cache (data.stage) that killed ranks left, also on nodes that have been
    left out since, unlock the folder."""
    if on_slurm():
        end_steps()
    if os.environ.get("OMNIMORPH_STAGE"):
        command = [*interpreter(), "-m", "Dataloader.staging", os.environ["OMNIMORPH_STAGE"]]
        nodes = scheduler.nodes_of_job() if on_slurm() else []
        scheduler.on_all_nodes(nodes or os.environ["HOSTS"].split(), command)
    if os.environ.get("OMNIMORPH_TOKEN"):
        ask(attempts("unlock"), 60)


def back_into_the_queue(words):
    """Requeue the job if this start of it made a step durable or had no chance to. Returns: 43 if not."""
    gained = os.environ.get("OMNIMORPH_TOKEN") and ask(attempts("gained"), 60)[0] == 0
    return 0 if scheduler.requeue(gained) else 43


def tell(words):
    """Call the user's command (run.notify), because the launch stops outside a round. words: the reason, then those of
    the training."""
    return ask(attempts("tell", words[0], *training_words(words[1:])), 90)[0]


def dry_run(words):
    """Build everything, as rank 0, print sizes and costs."""
    os.environ.update(of_rank(0))
    command = [*interpreter(), TRAINING, "--dry-run", *training_words(words)]
    os.execvp(command[0], command)


COMMANDS = {"nodes": nodes, "ranks": ranks, "preflight": preflight, "begin": begin, "round": run_round, "end": end,
            "again": again, "clean": clean, "requeue": back_into_the_queue, "dry-run": dry_run, "tell": tell,
            "seconds": lambda words: print(scheduler.seconds_to_leave())}


def main(command, *words):
    if command in ("nodes", "ranks", "preflight", "begin", "round", "again"):
        listen()
    try:
        code = COMMANDS[command](list(words))
    except Leave as leave:
        answer(WHY=leave.why)
        code = leave.code
    except OSError as error:  # a process cannot be started, or an answer cannot be given
        say("error: %s" % error)
        code = 1
    if ASKED and command != "round":
        answer(LEFT=ASKED[0])
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
