"""A real Slurm on this host: one controller and several slurmd, each of which is a node to Slurm.

    python tests/slurm/cluster.py start|stop|env [FOLDER]      eval "$(... env)" in a shell, then sinfo, sbatch, ...

Needs root on Debian; what is missing is installed. Everything lives in FOLDER (default /tmp/omnimorph-slurm); only this
host's name may be added to /etc/hosts. All nodes have that name: they are told apart by SLURMD_NODENAME.
"""
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
DEFAULT = Path("/tmp/omnimorph-slurm")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/pid/slurmctld
SlurmdPidFile={folder}/pid/slurmd.%n
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,defer_batch=no,requeue_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
OverTimeLimit=0
SlurmctldTimeout=30
SlurmdTimeout=15
MessageTimeout=10
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory=4000 Gres=gpu:{devices} State=UNKNOWN
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO \
PriorityTier=2 PreemptMode=OFF
PartitionName=graceless Nodes=n[1-{count}] DefaultTime=60
PartitionName=grace Nodes=n[1-{count}] DefaultTime=60 GraceTime=15
"""


def missing():
    """Why there can be no Slurm here, or ""; installs the packages where that is possible."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    if os.geteuid() != 0:
        return "only root can start slurmd"
    if all(map(shutil.which, PROGRAMS)):
        return ""
    if not shutil.which("apt-get"):
        return "Slurm is not installed, and there is no apt-get to do it"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL,
             "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update"], **quiet)
    subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES], **quiet)
    return "" if all(map(shutil.which, PROGRAMS)) else f"apt-get could not install {' and '.join(PACKAGES)}"


def environment(folder=DEFAULT):
    """Variables that make sbatch, srun and the others talk to this cluster, without those of a job we may be in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return {**kept, "SLURM_CONF": str(Path(folder) / "slurm.conf")}


def start(folder=DEFAULT, count=4, cpus=4, devices=4):
    """Start munged, slurmctld and `count` slurmd, and wait until the nodes are idle. Returns their environment.

    devices: character devices that Slurm hands out as GPUs; torch knows nothing of them.
    """
    folder, host = Path(folder), socket.gethostname().split(".")[0]
    stop(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state", "log", "pid", "devices"):
        (folder / name).mkdir(parents=True)
    if subprocess.run(["getent", "hosts", host], stdout=subprocess.DEVNULL).returncode:
        with open("/etc/hosts", "a") as file:
            file.write(f"127.0.0.1 {host}\n")
    start_munge(folder)
    ports = free_ports(count + 1)
    nodes = "\n".join(f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
                      for i, port in enumerate(ports[1:], 1))
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, port=ports[0], cpus=cpus, nodes=nodes,
                                                   devices=devices, count=count))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    for number in range(devices):
        os.mknod(folder / f"devices/gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/devices/gpu[0-{devices - 1}]\n" if devices else "")
    daemon(folder, "slurmctld")
    wait_for(lambda: "UP" in ask(folder, "scontrol", "ping"), 20, "slurmctld to answer")
    for number in range(1, count + 1):
        (folder / f"spool.n{number}").mkdir()
        daemon(folder, "slurmd", "-N", f"n{number}")
    states = ("sinfo", "-h", "-N", "-p", "main", "-o", "%t")
    wait_for(lambda: ask(folder, *states).split() == ["idle"] * count, 30, "idle nodes")
    return environment(folder)


def start_munge(folder):
    """munged refuses keys that others can read, and runs as its own user."""
    user = pwd.getpwnam("munge")
    for name, mode in (("munge", 0o755), ("munge/key", 0o700)):
        (folder / name).mkdir(mode=mode)
        os.chown(folder / name, user.pw_uid, user.pw_gid)
    key = folder / "munge/key/key"
    key.write_bytes(os.urandom(1024))
    os.chown(key, user.pw_uid, user.pw_gid)
    key.chmod(0o400)
    place = folder / "munge"
    subprocess.run(["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--force",
                    f"--key-file={key}", f"--socket={place}/socket", f"--pid-file={place}/pid",
                    f"--log-file={place}/log", f"--seed-file={place}/seed"], check=True)
    wait_for((place / "socket").exists, 10, "munged")


def daemon(folder, program, *arguments):
    with open(folder / f"log/{program}.out", "a") as log:
        subprocess.run([program, "-f", str(folder / "slurm.conf"), *arguments], check=True, stdin=subprocess.DEVNULL,
                       stdout=log, stderr=log, start_new_session=True, env=environment(folder))


def stop(folder=DEFAULT):
    """End all jobs and daemons of this cluster."""
    folder = Path(folder)
    if not (folder / "slurm.conf").exists():
        return
    if (folder / "pid/slurmctld").exists():
        ask(folder, "scancel", "--user=root", "--signal=KILL", "--full")
        ask(folder, "scancel", "--user=root")
    pids = [int(path.read_text()) for path in [*folder.glob("pid/slurmd.*"), folder / "pid/slurmctld",
                                               folder / "munge/pid"] if path.exists()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in filter(running, pids):
            os.kill(pid, number)
        ends = time.time() + 10
        while any(map(running, pids)) and time.time() < ends:
            time.sleep(0.1)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ask(folder, *command):
    """Standard output of a Slurm command, "" where it fails."""
    return subprocess.run(command, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, timeout=60).stdout


def free_ports(count):
    """Different free TCP ports of this host."""
    sockets = [socket.socket() for _ in range(count)]
    for number in sockets:
        number.bind(("127.0.0.1", 0))
    ports = [number.getsockname()[1] for number in sockets]
    for number in sockets:
        number.close()
    return ports


def wait_for(condition, seconds, what):
    ends = time.time() + seconds
    while not condition():
        if time.time() > ends:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.1)


def main(argv):
    verb, folder = argv[0] if argv else "", Path(argv[1]) if len(argv) > 1 else DEFAULT
    if verb == "start":
        if reason := missing():
            sys.exit(f"error: {reason}")
        start(folder)
    if verb in ("start", "env"):
        print(f"export SLURM_CONF={folder}/slurm.conf")
        return 0
    if verb == "stop":
        stop(folder)
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
