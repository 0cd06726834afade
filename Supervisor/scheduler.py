"""Slurm: nodes of the job, tasks and steps on them, its time limit and the queue. Standard library only."""
import functools
import os
import signal
import subprocess
import sys
import time

from Supervisor.processes import ASKED, Leave, ask, code_of, nap, say

LEAST_S = 1200  # a job this close to its time limit without a new step has had its chance


def on_slurm():
    """Whether ranks are tasks of srun; else they are processes of this host."""
    return bool(os.environ.get("UNDER_SLURM"))


# ---------------------------------------------------------------------------------------------------------------------
# Tasks and steps
# ---------------------------------------------------------------------------------------------------------------------

@functools.lru_cache(None)
def overlap():
    """The option that lets `on_nodes` run beside other steps of the job; older versions of Slurm do not know it."""
    return ["--overlap"] if "--overlap" in ask(["srun", "--help"], 20, quiet=True)[1] else []


def cores():
    """The option with the cores of a task. Without it, a task has one core under Slurm 22.05 to 23.02; from 23.11 on,
    srun fails if SLURM_TRES_PER_TASK has another number."""
    return ["--cpus-per-task=" + os.environ["SLURM_CPUS_PER_TASK"]] if os.environ.get("SLURM_CPUS_PER_TASK") else []


def on_nodes(nodes, command):
    """The command that runs a single task on each of these nodes, within 30 s."""
    return ["timeout", "--kill-after=5", "30", "setsid", "srun", "--quiet", *overlap(),
            "--job-name=" + os.environ["STEP_NAME"], "--export=ALL", "--nodes=%d" % len(nodes),
            "--ntasks=%d" % len(nodes), "--ntasks-per-node=1", "--nodelist=" + ",".join(nodes), *cores(),
            "--input=none", *command]


def step(options, words):
    """The command that runs a program of the repository as one task for each rank on the chosen nodes."""
    return ["srun", *options, "--export=ALL", "--nodes=" + os.environ["NODE_COUNT"],
            "--nodelist=" + ",".join(os.environ["NODES"].split()), "--ntasks=" + os.environ["RANKS"],
            "--ntasks-per-node=" + os.environ["TASKS_PER_NODE"], *cores(),
            "--distribution=block", "--input=none", "--job-name=" + os.environ["STEP_NAME"],
            "bash", "Scripts/task.sh", *words]


def end_steps():
    """Kill all tasks of earlier rounds of this launcher; other steps of the job are not its own."""
    end_sruns()
    ends = time.monotonic() + (20 if os.environ.get("LEAVING") == "USR1" else 60)
    left = "Slurm does not answer"
    while time.monotonic() < ends:
        code, steps = ask(["squeue", "-h", "-s", "-j", os.environ["SLURM_JOB_ID"], "-o", "%i %j"], 20, quiet=True)
        if code == 0:
            rows = [line.split(None, 1) for line in steps.splitlines()]
            own = [row[0] for row in rows if row[1:] == [os.environ["STEP_NAME"]]]
            if not own:
                return
            left = " ".join(own)
            ask(["scancel", "--signal=KILL", *own], 20, quiet=True)
        time.sleep(1)
    say("steps of earlier rounds do not end: " + left)


def end_sruns():
    """Kill every srun of this launcher: one that still waits for its step would start it beside the next round."""
    name = ("--job-name=" + os.environ["STEP_NAME"]).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % pid, "rb") as file:
                if name in file.read().split(b"\0"):
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            pass


def on_all_nodes(nodes, command):
    """Run a command on each node, or here without Slurm. Returns: {node: exit code, None if it did not end in 40 s}."""
    started = {node: subprocess.Popen(on_nodes([node], command) if on_slurm() else command, stdin=subprocess.DEVNULL,
                                      stdout=sys.stderr) for node in nodes}
    ends = time.monotonic() + 40
    codes = {node: code_of(process, ends) for node, process in started.items()}
    for process in started.values():
        process.kill()  # those that have not ended
    return codes


# ---------------------------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------------------------

def nodes_of_job():
    """Names of all nodes of the allocation; [] if Slurm does not name them."""
    return ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], 60)[1].split()


def choose_nodes(patience):
    """{variable: value} for the nodes of the allocation that can start a task and that no preflight has EXCLUDED."""
    hosts, tasks = nodes_of_job(), os.environ["SLURM_TASKS_PER_NODE"].split("(")[0]
    if not hosts:
        raise Leave(43, "stopped: scontrol does not name the nodes of this job, see the error above")
    ends = time.monotonic() + patience
    wanted = [host for host in hosts if host not in os.environ.get("EXCLUDED", "").split()]
    good, lost, tries = set(), wanted, 1
    while True:
        # Sites limit the requests of a user, so first one srun for all nodes; one that does not respond makes it fail.
        if tries == 1 < len(wanted) and ask(on_nodes(wanted, ["true"]), 40, quiet=True)[0] == 0:
            good = set(wanted)
        elif not ASKED:
            good |= {node for node, code in on_all_nodes(lost, ["true"]).items() if code == 0}
        lost = [node for node in wanted if node not in good]
        # A slow node gets a second try; if no node answers, Slurm itself may be down.
        if ASKED or not lost or good and tries > 1 or time.monotonic() >= ends:
            break
        say("no task can be started on %s: tried again" % " ".join(lost))
        nap(10)
        tries += 1
    if ASKED:
        raise Leave(42, "")
    for node in lost:
        state = (ask(["sinfo", "-h", "-n", node, "-o", "%T"], 20)[1].split() or [""])[0]
        say("left out, since no task can be started there: %s (%s)" % (node, state))
    if not good:
        raise Leave(43, "stopped: no node of the allocation is left")
    nodes = [node for node in wanted if node in good]
    ranks = len(nodes) * int(tasks)
    return {"NODES": " ".join(nodes), "HOSTS": " ".join(nodes), "NODE_COUNT": len(nodes), "TASKS": tasks,
            "TASKS_PER_NODE": tasks, "RANKS": ranks, "RANKS_ASKED": len(hosts) * int(tasks),
            "MASTER_ADDR": address_of(nodes[0])}


def address_of(node):
    """Where the ranks meet: the user's address, else the node's name if it resolves, else its address in Slurm."""
    if os.environ.get("FIXED_ADDRESS"):
        return os.environ["FIXED_ADDRESS"]
    if ask(["getent", "hosts", node], 60, quiet=True)[0] == 0:
        return node
    return field(ask(["scontrol", "show", "node", "-o", node], 20)[1], "NodeAddr")


# ---------------------------------------------------------------------------------------------------------------------
# Time limit and queue
# ---------------------------------------------------------------------------------------------------------------------

def field(text, name):
    """The value of name=value in scontrol's output; "" if absent."""
    return next((word[len(name) + 1:] for word in text.split() if word.startswith(name + "=")), "")


def number():
    """This job's id; in an array with the task's, since `scontrol requeue` takes the array's alone for all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return "%s_%s" % (array, task) if array else os.environ.get("SLURM_JOB_ID", "")


def tell_jobs():
    """Set OMNIMORPH_JOBS, the states of the user's jobs, for an attempt whose container has no Slurm."""
    code, jobs = ask(["squeue", "-h", "--me", "-o", "%i=%T"], 20, quiet=True) if on_slurm() else (1, "")
    os.environ.pop("OMNIMORPH_JOBS", None)
    if code == 0:
        os.environ["OMNIMORPH_JOBS"] = " ".join(jobs.split())


def job(name):
    """A field of what Slurm says about this job."""
    return field(ask(["scontrol", "show", "job", "-o", number()], 20)[1], name)


def seconds_left():
    """Seconds to the job's time limit; None if unknown."""
    os.environ["SLURM_TIME_FORMAT"] = "standard"  # the user may have another
    text, form, now = job("EndTime"), "%Y-%m-%dT%H:%M:%S", time.time()
    try:
        ends = [time.mktime(time.strptime(text, form)) + shift for shift in (-3600, 0, 3600)]
        # The hour in which summer time ends comes twice: the limit is in the first one that is still to come.
        ends = [end for end in ends if time.strftime(form, time.localtime(end)) == text]
        return int(min([end for end in ends if end > now] or ends[-1:]) - now)
    except (ValueError, OverflowError):
        return None


def seconds_to_leave():
    """How long a round may continue before the time limit. It leaves 90 s, or a third if that is less, for the rest."""
    left = seconds_left()
    left = 240 if left is None else left
    return left - 90 if left > 270 else left * 2 // 3


def requeue(gained):
    """Requeue the job; False if Slurm refuses that, or if it would only repeat this start of it.

    gained: whether it made a step durable.
    """
    state = job("JobState")
    # By a person, meanwhile; COMPLETING until our processes have ended. So is a preempted job whose time is over, which
    # Slurm puts back itself (or cancels, if the site wants that), and one at its time limit: only this has that reason.
    if state.startswith("CANCELLED") or state == "COMPLETING" and job("Reason") != "TimeLimit":
        return True
    preempted = job("PreemptTime") not in ("", "None")  # still running: its grace is its time limit from then on
    if not gained and not preempted and (seconds_left() or 0) < LEAST_S:  # else it has had no chance
        say("job %s is not put back into the queue: it has reached its time limit without saving a single new step. "
            "Give it a longer --time: 480 s before the limit it already saves and leaves" % number())
        return False
    say("%s: back into the queue, to continue from the newest checkpoint"
        % ("job %s is preempted" if preempted else "the time limit of job %s is near") % number())
    for _ in range(3):
        if ask(["scontrol", "requeue", number()], 20)[0] == 0:
            return True
        time.sleep(2)
    say("it could not be put back into the queue: the same command that submitted it continues the run")
    return False
