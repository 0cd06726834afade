"""The four networks of the smoke ladder, and one rank of one of its steps; Scripts/bash_smoke.sh starts the ranks.

    python Scripts/smoke/ladder.py --count [--scale S]      exact number of parameters of each network

A step trains on y = 1 + sin(x), saves, reloads into a fresh network and trains on; a difference is an error.
"""
import argparse
import datetime
import gc
import json
import os
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import Runtime  # noqa: E402, F401  before third-party packages: an outdated Python stops here with one sentence

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from Runtime import launch  # noqa: E402
from Runtime.device import backend, pick_device, prepare_device, synchronize  # noqa: E402
from Runtime.errors import DONE, InputError, parse_options, run_program  # noqa: E402
from Runtime.keyed_random import generator  # noqa: E402
from Runtime.memory import peak_bytes  # noqa: E402
from Scripts.smoke import results  # noqa: E402
from Supervisor.attempts import free_port  # noqa: E402

# Width h and number of blocks. No blocks: h -> 4h -> 4h -> h in float32; else bf16 and ZeRO-1.
STEPS = {"01": (1024, 0), "02": (2048, 0), "03": (4096, 6), "04": (4096, 8)}
ZERO1 = json.loads((ROOT / "Scripts/smoke/zero1.json").read_text())
BATCH = ZERO1["train_micro_batch_size_per_gpu"]
SEED = 1
TELL_EVERY = 25  # steps
FALL = 0.9  # the last loss must be below this fraction of the first
# Of a reloaded network, on devices whose results are not the same to the bit. Without its Adam state it is 0.8 % off.
OUTPUT_TOLERANCE, LOSS_TOLERANCE = 0.05, 1e-3


class Block(nn.Module):
    """x + Linear(GELU(Linear(x))). The sum is needed: sixteen layers without normalisation would hardly train."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.layers(x)


def hidden(step, scale):
    """Width h of a step's network: a multiple of 16, 16 at least."""
    return max(16, 16 * round(STEPS[step][0] * scale / 16))


def network(step, scale, device, seed=SEED):
    """The network of a step, (B, h) -> (B, h), float32, on the device ("meta": shapes without numbers)."""
    width, blocks = hidden(step, scale), STEPS[step][1]
    torch.manual_seed(seed)
    with torch.device(device):
        if blocks:
            return nn.Sequential(*[Block(width) for _ in range(blocks)])
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 4 * width), nn.GELU(),
                             nn.Linear(4 * width, width))


def count(net):
    """Number of parameters of a network."""
    return sum(parameter.numel() for parameter in net.parameters())


def start_plain(net, device, lr):
    """A trainer by DDP and AdamW.

    Returns: dict of model (the net, with DDP around it); advance(loss): one step of the optimizer; save(folder);
    load(folder).
    """
    model = net
    if dist.is_initialized():
        model = DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [device])
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)

    def advance(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def save(folder):
        if not dist.is_initialized() or dist.get_rank() == 0:
            folder.mkdir()
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")

    def load(folder):
        state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return {"model": model, "advance": advance, "save": save, "load": load}


def start_zero1(net, device, lr):
    """The trainer of `start_plain` by DeepSpeed: AdamW of zero1.json, its state divided among the ranks."""
    os.environ.update({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise InputError(f"DeepSpeed is needed here and there is no module {error.name} for {sys.executable}; run "
                         "`pip install -r requirements-smoke.txt`.") from error
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # take gloo's sums; DeepSpeed's own need a compiler and a minute
    optimizer = {**ZERO1["optimizer"], "params": {**ZERO1["optimizer"]["params"], "lr": lr}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), dist_init_required=False,
                                      config={**ZERO1, "train_batch_size": BATCH * dist.get_world_size(),
                                              "optimizer": optimizer})

    def advance(loss):
        engine.backward(loss)
        engine.step()

    def load(folder):
        if engine.load_checkpoint(str(folder))[0] is None:
            raise RuntimeError(f"DeepSpeed finds no checkpoint in {folder}: do all nodes see this folder?")

    def save(folder):
        engine.save_checkpoint(str(folder))

    return {"model": engine, "advance": advance, "save": save, "load": load}


def start(args, seed=SEED):
    """A trainer of the step on args.device, its network made from the seed."""
    # Adam moves an output by up to lr x width x activation in a step, so a narrower network takes a larger rate.
    lr = ZERO1["optimizer"]["params"]["lr"] * STEPS["04"][0] / hidden(args.step, args.scale)
    starter = start_zero1 if STEPS[args.step][1] else start_plain
    return starter(network(args.step, args.scale, args.device, seed), args.device, lr)


def over_ranks(value, device, operation=dist.ReduceOp.SUM):
    """Sum (or maximum) of one number over the ranks, a float."""
    tensor = torch.tensor(float(value), device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor.item()


def loss_of(trainer, args, number):
    """Output and loss for this rank's batch of one step; the batch is a function of step and rank alone."""
    draws = generator(SEED, "smoke", number, args.rank)
    x = torch.randn(BATCH, hidden(args.step, args.scale), generator=draws).to(args.device)
    output = trainer["model"](x.bfloat16() if STEPS[args.step][1] else x).float()
    return output, nn.functional.mse_loss(output, 1 + torch.sin(x))


def examine(trainer, args):
    """Output for a batch that is never trained on, and its loss averaged over ranks."""
    with torch.no_grad():
        output, loss = loss_of(trainer, args, 0)
    return output, over_ranks(loss / args.world, args.device)


def train(trainer, args):
    """Make all training steps. Returns steps per second, without the first one, which compiles and allocates."""
    for number in range(1, args.steps + 1):
        loss = loss_of(trainer, args, number)[1]
        trainer["advance"](loss)
        if number % TELL_EVERY == 0:
            mean = over_ranks(loss.detach() / args.world, args.device)
            if args.rank == 0:
                print(f"step {number}: loss {mean:.4f}, averaged over {args.world} ranks", flush=True)
        if number == 1:
            synchronize(args.device)
            began = time.perf_counter()
    synchronize(args.device)
    return (args.steps - 1) / (time.perf_counter() - began)


def reload(trainer, args):
    """Save and train on; then load into a fresh network, which has to do the same.

    Returns: the largest difference, and {path: bytes} of the checkpoint's files.
    """
    folder = args.folder / f"{args.step}.checkpoint"
    trainer["save"](folder)
    over_ranks(0, args.device)  # nobody reads before it is written
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    output, _ = examine(trainer, args)
    trainer["advance"](loss_of(trainer, args, args.steps + 1)[1])
    _, next_loss = examine(trainer, args)
    trainer.clear()  # the memory may not hold both
    gc.collect()
    fresh = start(args, SEED + 1)
    fresh["load"](folder)
    fresh_output, _ = examine(fresh, args)
    fresh["advance"](loss_of(fresh, args, args.steps + 1)[1])
    _, fresh_loss = examine(fresh, args)
    difference = over_ranks((fresh_output - output).abs().max(), args.device, dist.ReduceOp.MAX)
    if not (difference <= OUTPUT_TOLERANCE and abs(fresh_loss - next_loss) <= LOSS_TOLERANCE * next_loss):
        raise RuntimeError(f"reloaded, the network differs: output by {difference:.3g}, next loss {fresh_loss:.6g} "
                           f"instead of {next_loss:.6g}")
    return max(difference, abs(fresh_loss - next_loss)), files


def climb(args):
    """Do one step of the ladder. Returns: a dict of its figures. Raises RuntimeError for the first fault."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    nodes = [node] * args.world
    if args.world > 1:
        dist.all_gather_object(nodes, node)
    trainer = start(args)
    parameters = count(trainer["model"])
    expected = count(network(args.step, args.scale, "meta"))
    if parameters != expected:
        raise RuntimeError(f"the network has {parameters:,} parameters instead of {expected:,}")
    _, before = examine(trainer, args)
    rate = train(trainer, args)
    _, after = examine(trainer, args)
    if not after < FALL * before:
        raise RuntimeError(f"the loss did not fall: {before:.4g} before, {after:.4g} after {args.steps} steps")
    peak = over_ranks(peak_bytes(args.device) / 2 ** 30, args.device, dist.ReduceOp.MAX)  # GiB, of any rank
    difference, files = reload(trainer, args)
    return {"ranks": args.world, "nodes": len(set(nodes)), "device": args.device.type, "parameters": parameters,
            "before": before, "after": after, "steps": args.steps, "rate": rate,
            "samples": rate * BATCH * args.world, "scale": args.scale, "peak": peak, "reload": difference,
            "files": files, "transport": results.transport(args.folder, args.step)}


def run_rank(args):
    """Be one rank of one step, from the meeting of the ranks to the line that says PASSED."""
    ranks = launch.environment()
    args.rank, args.world = ranks.rank, ranks.world_size
    results.note_errors(args.folder / f"{args.step}.rank{args.rank}.error", args.rank)
    # DeepSpeed knows only these names, not those of Slurm.
    os.environ.update({names[0]: str(getattr(ranks, key)) for key, names in launch.NAMES.items()})
    args.device = pick_device(args.device, ranks.local_rank)
    prepare_device(args.device, 0)
    if args.device.type == "cuda":
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(args.folder / f"{args.step}.nccl.%h.%p"))
    if args.world > 1:
        launch.rendezvous(ranks, args.seconds / 2)
        dist.init_process_group(backend(args.device), store=ranks.store,
                                rank=args.rank, world_size=args.world,
                                timeout=datetime.timedelta(seconds=args.seconds))
    figures = climb(args)
    if args.rank == 0:
        (args.folder / f"{args.step}.json").write_text(json.dumps(figures))
        print(f"PASSED {args.step} {results.sentence(args.step, figures)}", flush=True)
    if args.world > 1:
        over_ranks(0, args.device)  # nobody leaves early
        gc.collect()  # destroying the group before the last DDP wrapper can deadlock
        dist.destroy_process_group()


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="print the parameter counts")
    parser.add_argument("--host", action="store_true", help="print device, number of devices and a free port")
    parser.add_argument("--table", nargs="+", metavar="STEP", help="print the results of these steps in the folder")
    parser.add_argument("--step", choices=STEPS, help="be one rank of this step")
    parser.add_argument("--folder", type=Path, help="logs and checkpoints; all nodes see it")
    parser.add_argument("--scale", type=float, default=1.0, help="of the widths: less than 1 for a CPU")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--seconds", type=int, default=900, help="the longest a step of the ladder may take")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or xpu")
    args = parse_options(parser, argv)
    if args.scale <= 0 or args.steps < 5 or args.seconds < 1:
        parser.error("--scale must be above 0, --steps 5 at least, --seconds 1 at least")
    return args


def answer(args):
    """Print what bash_smoke.sh asks beside the steps: results, this host, or parameter counts. Returns: the exit
    code."""
    if args.table:
        print(results.table(args.folder, args.table))
    elif args.host:
        device = pick_device(args.device)
        print(device.type, 0 if device.type == "cpu" else torch.accelerator.device_count(), free_port())
    else:
        for step in STEPS:
            print(f"{step} {count(network(step, args.scale, 'meta')):,} parameters, h = {hidden(step, args.scale)}")
    return DONE


def main(argv=None):
    args = parse_arguments(argv)
    if not args.step:
        return run_program(answer, args, args.folder or ".")
    run_rank(args)  # the hook of note_errors prints its errors
    return DONE


if __name__ == "__main__":
    sys.exit(main())
