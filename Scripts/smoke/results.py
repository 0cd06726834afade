"""What a step of the smoke ladder says: why a rank failed, what the ranks talked through, the line and the table."""
import faulthandler
import json
import re
import signal
import socket
import sys
import time

import torch.distributed as dist

from Runtime.errors import InputError
from Runtime.report import text_table

NAMES = {"01": "one device", "02": "DDP", "03": "ZeRO-1", "04": "ZeRO-1, several nodes"}


def note_errors(path, rank):
    """Write an error down when it happens, before other ranks fail in its wake: "<time> rank <n> on <host>: <what>".

    SIGTERM, the end of the time limit, writes where every thread stands to standard error and then ends the process.
    """
    faulthandler.register(signal.SIGTERM, chain=True)

    def hook(kind, error, trace):
        text = str(error) if kind is InputError else f"{kind.__name__}: {error}"
        path.write_text(f"{time.time():.3f} rank {rank} on {socket.gethostname()}: {' '.join(text.split())[:400]}\n")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def transports(log):
    """What the channels of an NCCL log go through, sorted: P2P, SHM, NET/IB, NET/Socket or another network."""
    return sorted(set(re.findall(r"NCCL INFO (?:Channel|Ring) [\d/]+ : .* via (P2P|SHM|NET/[^/\n]+)", log)))


def transport(folder, step):
    """One phrase: what the ranks of a step talked through, from NCCL's own logs where it is NCCL."""
    if not dist.is_initialized():
        return "none"
    if dist.get_backend() != "nccl":
        return dist.get_backend()
    logs = [path.read_text(errors="replace") for path in folder.glob(f"{step}.nccl.*")]
    return ", ".join(transports("\n".join(logs))) or "nccl, see its log"


def sentence(step, figures):
    """The figures of a step in one line."""
    f = figures
    where = f"{f['ranks']} ranks on {f['nodes']} nodes" if f["nodes"] > 1 else f"ranks: {f['ranks']}"
    if step == "04" and f["nodes"] == 1:
        where += " (one host only, no Slurm)"
    back = "to the bit" if f["reload"] == 0 else f"within {f['reload']:.1g}"
    return (f"{NAMES[step]}: {f['device']}, {where}, transport {f['transport']}; {f['parameters']:,} parameters; "
            f"loss {f['before']:.3f} -> {f['after']:.3f} in {f['steps']} steps; {f['rate']:.1f} steps/s; "
            f"peak {f['peak']:.2f} GiB; reloaded {back}")


def table(folder, steps):
    """Steps that have been tried, passed or not, as aligned text."""
    header = ["step", "result", "what", "device", "ranks", "nodes", "parameters", "first loss", "last loss", "steps/s",
              "peak GiB", "transport"]
    keys = ("device", "ranks", "nodes", "parameters", "before", "after", "rate", "peak", "transport")
    rows = []
    for step in steps:
        failed = (folder / f"{step}.failed").exists()
        figures = {} if failed else json.loads((folder / f"{step}.json").read_text())
        rows.append([step, "FAILED" if failed else "PASSED", NAMES[step], *map(figures.get, keys)])
    return text_table(header, rows, [None] * 6 + [",d", ".3f", ".3f", ".1f", ".2f", None])
