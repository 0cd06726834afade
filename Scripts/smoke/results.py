"""What a step of the smoke ladder reports: why a rank failed, how the ranks talk to each other, its line, the table."""
import faulthandler
import json
import re
import signal
import socket
import sys
import time

import torch.distributed as dist

from Report.page import text_table
from Runtime.errors import InputError

# Steps per second and peak memory on A100 80 GB PCIe.
RECORDED = {"01": "one GPU: 95.0 steps/s, 0.52 GB", "02": "two GPUs, SHM: 23.7 steps/s, 2.44 GB",
            "03": "two GPUs: 4.3 steps/s, 9.68 GB", "04": "four nodes x 2, NET/IB: 1.3 steps/s, 7.12 GB"}
NAMES = {"01": "one device", "02": "DDP", "03": "ZeRO-1", "04": "ZeRO-1, several nodes"}


def note_errors(path, rank):
    """Have an error written to `path` when it happens, before other ranks fail because of it.

    The line is "<time> rank <n> on <host>: <what>". SIGTERM, the end of the time limit, prints the stack of every
    thread to standard error and then ends the process.
    """
    faulthandler.register(signal.SIGTERM, chain=True)

    def hook(kind, error, trace):
        text = str(error) if kind is InputError else f"{kind.__name__}: {error}"
        path.write_text(f"{time.time():.3f} rank {rank} on {socket.gethostname()}: {' '.join(text.split())[:400]}\n")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def transports(log):
    """The transports of the channels in an NCCL log, sorted: P2P, SHM, NET/IB, NET/Socket or another network."""
    return sorted(set(re.findall(r"NCCL INFO (?:Channel|Ring) [\d/]+ : .* via (P2P|SHM|NET/[^/\n]+)", log)))


def transport(folder, step):
    """The transport between the ranks of a step, one phrase; of NCCL from its own logs in `folder`."""
    if not dist.is_initialized():
        return "none"
    if dist.get_backend() != "nccl":
        return dist.get_backend()
    logs = [path.read_text(errors="replace") for path in folder.glob(f"{step}.nccl.*")]
    return ", ".join(transports("\n".join(logs))) or "nccl, see its log"


def sentence(step, figures):
    """The figures of a step in one line."""
    ranks, nodes, difference = figures["ranks"], figures["nodes"], figures["reload"]
    where = f"{ranks} ranks on {nodes} nodes" if nodes > 1 else f"ranks: {ranks}"
    if step == "04" and nodes == 1:
        where += " (one host only, no Slurm)"
    reloaded = "to the bit" if difference == 0 else f"within {difference:.1g}"
    text = ("{device}, {where}, transport {transport}; {parameters:,} parameters; loss {before:.3f} -> {after:.3f} in "
            "{steps} steps; {rate:.1f} steps/s, {samples:.0f} samples/s; peak {peak:.2f} GiB; reloaded {reloaded}; "
            "checkpoint {saved}")
    sizes = sorted(figures["files"].items(), key=lambda item: -item[1])
    saved = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in sizes[:4]) + f" ({len(sizes)} files)"
    return f"{NAMES[step]}: {text.format(**figures, where=where, reloaded=reloaded, saved=saved)}"


def table(folder, steps):
    """The steps that were tried, passed or not, as a text table. folder: of their results."""
    header = ["step", "result", "what", "device", "ranks", "nodes", "parameters", "first loss", "last loss", "steps/s",
              "samples/s", "peak GiB", "transport", "recorded"]
    keys = ("device", "ranks", "nodes", "parameters", "before", "after", "rate", "samples", "peak", "transport")
    rows = []
    for step in steps:
        failed = (folder / f"{step}.failed").exists()
        figures = {} if failed else json.loads((folder / f"{step}.json").read_text())
        rows.append([step, "FAILED" if failed else "PASSED", NAMES[step], *map(figures.get, keys),
                     RECORDED[step] if figures.get("scale") == 1 else "with --scale 1"])
    return text_table(header, rows, [None] * 6 + [",d", ".3f", ".3f", ".1f", ".0f", ".2f", None, None])
