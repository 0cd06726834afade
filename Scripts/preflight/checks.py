"""The checks of one task of the preflight: one short function for each.

A check gets `context`, a dict: cfg, rank, local_rank, world_size, node, nodes, tasks (on a node), allow_tmp, variables
(the environment), served (result of `serve`), began and ends (by time.monotonic) and findings (so far). It also
gets `at`, a function: at(text) reports what the check does now, at(late(...)) the result if it is not done in
time. It returns `passed`, `failed` or `skipped`, with facts that the collector compares.
Scripts/preflight/preflight.py runs each check in a process of its own, which it kills at the deadline.
"""
import contextlib
import datetime
import functools
import hashlib
import math
import os
import platform
import resource
import shutil
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from Dataloader.cache import read_manifest
from Dataloader.dataset import batch_bytes, read_datasets, wanted_maps
from Dataloader.staging import copy_of, expanded
from Diffusion.cost import training_volumes
from Diffusion.diffuser import make_condition
from Diffusion.fields import warp
from Diffusion.networks import build_network, new_network
from Runtime import launch, memory
from Runtime.device import autocast, backend, pick_device, prepare_device, synchronize
from Runtime.errors import InputError, first_line
from Runtime.files import write_file
from Runtime.global_batch import new_step, split_step, usable
from Runtime.provenance import SETTINGS, git

GIB = 2 ** 30
# Measured on x86-64 Linux with torch 2.13.0+cpu and glibc's malloc, on trainings of 16^3 to 96^3 voxels.
TRAINING = 125 * 2 ** 20  # bytes that the smallest training adds to a preflight: its modules, TensorBoard, pictures
WORKER = 190 * 2 ** 20  # bytes of a loader worker before it reads anything
READING = 8  # float32 volumes of the training grid in memory while one of that size is read: 7.4 measured
SHM = Path("/dev/shm")
# Keys of `loss` that weigh each mode of OM_train_3modes.py, which leaves a mode out if all of its are 0.
MODES = (("dist", "ang", "regul"), ("contrastive",), ("imgsim", "imgmse", "ddf", "dice"))
VOLUMES_ALONE = ("volumes",)  # pairs are left to the training, which alone knows its modes
OPEN_FILES = 4096  # enough for the sockets of all ranks and the shared-memory files of all loader workers
# Variables that name a node's or a rank's own devices, network cards and caches: they may differ.
OWN = (*launch.VISIBLE, "CCL_LOCAL_RANK", "CCL_LOCAL_SIZE", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR",
       "CUDA_CACHE_PATH", "SYCL_CACHE_DIR", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "UCX_NET_DEVICES")
OWN_ENDINGS = ("_IFNAME", "_HCA", "_NIC")
GIVEN = ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
TINY = {"model.channels": [8, 8, 16], "model.attention_width": 16, "model.attention_heads": 2,
        "model.attention_depth": 1, "diffusion.grids": [4, 8], "contrastive.embedding": 8}
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")


def passed(said, **facts):
    return {"ok": True, "said": said, "do": "", **facts}


def failed(said, do, **facts):
    return {"ok": False, "said": said, "do": do, **facts}


def late(said, do, **facts):
    """For `at`: the result if a check is not done in time though nothing is wrong. It warns."""
    return {"ok": True, "said": said, "do": do, "late": True, **facts}


def skipped(why):
    return {"ok": None, "said": f"skipped: {why}", "do": ""}


# ---------------------------------------------------------------------------------------------------------------------
# The node and its device
# ---------------------------------------------------------------------------------------------------------------------

def check_code(context, at):
    """The same versions of Python, torch and code. The first rank of a node runs git, which reads every file."""
    facts = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if context["local_rank"] == 0:
        at(late("git has not answered in time, so commits are not compared", "", **facts))
        at("git")
        commit, changes = git("rev-parse", "HEAD"), git("diff", "HEAD")
        facts["commit"] = commit.strip()[:12] if commit else "no git checkout"
        if changes:
            facts["commit"] += f" with local changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}"
    return passed(", ".join(f"{name} {value}" for name, value in reversed(facts.items())), **facts)


def check_settings(context, at):
    """Report the variables of device and communication libraries, and check the limit of open files."""
    mine = {name: value for name, value in context["variables"].items()
            if SETTINGS.match(name) and name not in OWN and not name.endswith(OWN_ENDINGS)}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        return failed(f"at most {files} open files are allowed",
                      f"raise the hard limit (ulimit -Hn) of this node to {OPEN_FILES} or more", settings=mine)
    return passed(f"{len(mine)} variables of device and network libraries, the same on all ranks", settings=mine)


def check_device(context, at):
    """torch sees as many devices as this node has tasks, or one in each task. facts: devices, own (identifies it)."""
    name, tasks, variables = context["cfg"]["run.device"], context["tasks"], context["variables"]
    if name == "cpu":
        return passed("cpu, as run.device says", devices=0)
    at("counting devices")
    with contextlib.suppress(InputError):
        # Older Intel packages register their devices here; a missing device is reported below.
        pick_device(name, context["local_rank"])
    count, built = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    given = next((f"{key}={variables[key]}" for key in GIVEN if variables.get(key, "0") not in ("", "0")), "")
    in_slurm = "SLURM_JOB_ID" in variables
    if count == 0:
        if name == "auto" and not given and not (built and in_slurm):
            return passed("cpu: torch sees no device, and Slurm gave none", devices=0)
        asked = f"Slurm gave {given}" if given else f"run.device is {name}"
        what = f"check the driver of this node or exclude the node (torch is built for {built.type})" if built else (
            "install the torch build for this device")
        return failed(f"{asked}, but torch {torch.__version__} sees no device", f"{what}, or set run.device=cpu",
                      devices=0)
    at("asking the device for its properties")
    device = pick_device(name, context["local_rank"] % count)  # too many tasks are reported below
    visible = [f"{key}={variables[key]}" for key in launch.VISIBLE if variables.get(key)]
    facts, kind = {"devices": count, "own": visible}, device.type
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        facts["own"] = [str(getattr(properties, "uuid", "")), *visible]
        kind = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    fewer_on_purpose = tasks < count and not in_slurm
    if count not in (1, tasks) and not fewer_on_purpose:
        return failed(f"ntasks-per-node is {tasks} but torch sees {count} devices",
                      f"use --ntasks-per-node={count}", **facts)
    return passed(f"{count} x {kind}", **facts)


def check_forward(context, at):
    """Run a tiny network of the config's kind forward and backward. facts: process_bytes, used afterwards."""
    cfg = {**context["cfg"], **TINY, "data.img_size": [16] * context["cfg"]["model.dims"]}
    began = time.monotonic()
    os.environ["MIOPEN_FIND_MODE"] = "FAST"  # the full search for the best kernels only pays in the training
    device = pick_device(cfg["run.device"], context["local_rank"])
    prepare_device(device, cfg["run.threads"])
    if device.type == "cpu":  # a CPU does not hang, but others may be using it
        at(late("a tiny network has not answered in time: the processors of this node are busy",
                "check which other jobs use them; training will be slow", process_bytes=0))
    at(f"moving a network to {device}")
    net = build_network(cfg, device)
    shape, random = (2, 1, cfg["data.channels"], *cfg["data.img_size"]), torch.Generator().manual_seed(0)
    image, fixed = torch.rand(shape, generator=random).to(device)
    condition = make_condition(fixed, "none" if cfg["model.condition_type"] == "none" else "volume")
    at("forward")
    with autocast(device, cfg["run.amp"]):
        field = net(image, torch.tensor([cfg["diffusion.timesteps"]], device=device), condition)
    loss = (warp(image, field) - fixed).square().mean()
    at("backward")
    loss.backward()
    synchronize(device)
    at("reading the result")
    size = sum(float(parameter.grad.square().sum()) for parameter in net.parameters() if parameter.grad is not None)
    if not (math.isfinite(loss.item()) and math.isfinite(size) and size > 0):
        return failed(f"loss {loss.item():g} and squared gradient {size:g} of a tiny network on {device}",
                      "this device computes wrong results: exclude its node and report it")
    seconds = time.monotonic() - began
    return passed(f"forward and backward on {device.type} in {seconds:.1f} s", worst=seconds,
                  process_bytes=memory.measure(device)["host_used"])


def check_data(context, at):
    """The cache, or else the folder or list, can be read on this node and has the volumes that the config names."""
    at(late("the volumes were not listed in time", "check the file system of data.root on this node"))
    volumes, _, source, _ = training_volumes(context["cfg"], VOLUMES_ALONE)
    if source.startswith("data.expect_samples"):  # a new site, or volumes that are being copied
        return skipped(source.removeprefix("data.expect_samples, since "))
    return passed(f"{volumes} training volumes (from {source})")


# ---------------------------------------------------------------------------------------------------------------------
# Memory of the node
# ---------------------------------------------------------------------------------------------------------------------

def check_memory(context, at):
    """The node has enough memory for ranks, loader workers, batches, and volumes or a cache kept in memory."""
    cfg, tasks, findings = context["cfg"], context["tasks"], context["findings"]
    at("counting parameters")
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in new_network(cfg).parameters())
    at("counting volumes")
    staged, on_cpu = staged_bytes(cfg), findings["device"]["devices"] == 0
    split = split_step(cfg, math.prod(usable(cfg, new_step(cfg, context["world_size"]),
                                             context["world_size"] // tasks, tasks)))
    need = memory_need(cfg, split, findings["forward"]["process_bytes"], parameters, on_cpu, context["rank"] == 0)
    room = host_room(cfg, tasks, context["variables"])
    together = tasks * (need["rank"] + need["workers"] * need["worker"] + need["batches"]) + need["checkpoint"]
    total = together + staged * expanded(cfg["data.stage"]).resolve().is_relative_to(SHM)
    said = (f"needs {total / GIB:.1f} of {room / GIB:.1f} GiB: {tasks} ranks x ({need['rank'] / GIB:.2f} + "
            f"{need['workers']} workers x {need['worker'] / GIB:.2f} + batches {need['batches'] / GIB:.2f})"
            + "".join(f" + {what} {size / GIB:.2f}" for what, size in (
                ("checkpoint", need["checkpoint"]), ("staged cache", total - together)) if size))
    facts = {"worst": total / room, "need": need, "room": room}
    if total <= room:
        lack, do = short_of_shared_memory(cfg, tasks, need, staged)
        return failed(lack, do, **facts) if lack else passed(said, **facts)
    if together <= room:
        return failed(said, 'set data.stage="" or to a folder on a disk, or request more memory (--mem)', **facts)
    fit = math.floor((room - together) / (tasks * need["worker"]) + need["workers"]) if need["workers"] else -1
    if fit >= 0:
        return failed(said, f"data.num_workers={fit} would fit; or request more memory (--mem)", **facts)
    return failed(said, "set data.in_memory=false, " * (cfg["data.in_memory"] and not cfg["data.cache"])
                  + "request more memory (--mem) or fewer tasks per node", **facts)


def memory_need(cfg, split, process, parameters, on_cpu, writes):
    """Host memory that the kernel cannot drop, in bytes, without the activations of a step on a CPU.

    split: of `split_step`. process: bytes of one process without the training. parameters: their number. on_cpu: the
    network is trained on the host. writes: whether rank 0, which writes checkpoints, is on this node.
    Returns: {"rank", "worker", "workers" (their number in a rank), "batches" (of one rank), "checkpoint"}. Pages of a
    cache are mapped files, which the kernel drops.
    """
    cached, weights = bool(cfg["data.cache"]), 4 * parameters
    voxels = math.prod(cfg["data.img_size"]) * cfg["data.channels"]
    kept = cfg["data.in_memory"] and not cached
    workers = 0 if kept else cfg["data.num_workers"]
    reading = 0 if cached else READING * 4 * voxels
    # The batch that is being computed, and what each worker, or a thread beside an accelerator, reads ahead.
    count = 1 + cfg["data.prefetch_factor"] * (workers or not on_cpu)
    rank = process + TRAINING + (0 if workers else reading)
    if kept:
        maps = wanted_maps(cfg)
        try:
            train, val, _ = read_datasets(cfg, headers_only=True, inputs=VOLUMES_ALONE)
            rank += 4 * voxels * (len(train) + len(val))
            for volumes, kinds in ((train, maps), (val, {"label", *maps})):  # int16, as far as a volume has them
                maps_kept = sum(bool(item[kind]) for item in volumes.items for kind in kinds)
                rank += 2 * math.prod(cfg["data.img_size"]) * maps_kept
        except InputError:  # the training reports it; the files may arrive before it starts
            rank += 4 * voxels * cfg["data.expect_samples"]
    modes = sum(any(cfg[f"loss.{weight}"] for weight in weights) for weights in MODES)
    moments = 2 * (modes if cfg["optim.moments"] == "per_mode" else 1)
    # On the host: weights, gradients, moments, the average. For a device they are initialised there.
    rank += weights * (2 + moments + bool(cfg["optim.average"]) if on_cpu else 1)
    return {"rank": rank, "worker": WORKER + reading, "workers": workers,
            "batches": count * batch_bytes(cfg, split.sample_batch, split.pair_batch),
            "checkpoint": weights * (1 + moments + bool(cfg["optim.average"])) if writes else 0}


def staged_bytes(cfg):
    """Bytes that data.stage will take on this node; files of the cache that are there already take none."""
    try:
        manifest = read_manifest(cfg["data.cache"], cfg) if cfg["data.cache"] and cfg["data.stage"] else {"files": {}}
    except InputError:
        return 0
    copy = copy_of(manifest, expanded(cfg["data.stage"])) if manifest["files"] else None
    return sum(size for name, (size, _) in manifest["files"].items() if not (copy / name).is_file())


def host_room(cfg, ranks, variables):
    """Bytes of host memory that the ranks of this node may take together.

    The least of what the machine and its control groups have free, Slurm's limit, and run.memory_limit_gb of each rank.
    """
    room = [memory.measure(torch.device("cpu"))["host_free"] or math.inf]
    if variables.get("SLURM_MEM_PER_NODE", "0") != "0":  # "0" asks for all of it
        room.append(int(variables["SLURM_MEM_PER_NODE"]) * 2 ** 20)
    if cfg["run.memory_limit_gb"]:
        room.append(cfg["run.memory_limit_gb"] * GIB * ranks)
    return min(room)


def short_of_shared_memory(cfg, ranks, need, staged):
    """(what does not fit into data.stage or /dev/shm, what to do), or ("", ""). Both may be smaller than the memory."""
    place = expanded(cfg["data.stage"])
    shared = ranks * need["batches"] if need["workers"] else 0
    if staged:
        free = shutil.disk_usage(place).free
        both = staged + (shared if place.resolve().is_relative_to(SHM) else 0)
        if both > free:
            return (f"the staged cache needs {both / GIB:.1f} GiB with the loaders' batches, data.stage {place} has "
                    f"{free / GIB:.1f}", f"enlarge {place}, or set data.stage=\"\" or to a folder on a disk")
    if SHM.is_dir() and shared > (free := shutil.disk_usage(SHM).free):
        return (f"the loaders' batches need {shared / GIB:.1f} GiB of shared memory, {SHM} has {free / GIB:.1f}",
                f"enlarge {SHM}, or lower data.num_workers or data.prefetch_factor")
    return "", ""


# ---------------------------------------------------------------------------------------------------------------------
# The output folders
# ---------------------------------------------------------------------------------------------------------------------

def marker_folder(cfg, key, variables):
    """Folder in which the nodes of this preflight show each other that they share run.models or run.logs."""
    parts = [variables.get(f"SLURM_{name}", "") for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID")]
    return Path(cfg[key]) / f".preflight-{'-'.join(filter(None, parts)) or variables.get('MASTER_PORT', 'local')}"


def write_and_read_back(path, text):
    """Write as checkpoints are written: under another name, flushed, renamed over the old file; then read."""
    write_file(path, text)
    if path.read_text() != text:
        raise OSError(f"{path} reads back differently after a rename")


def node_local(path):
    """The node-local folder in which `path` is, or "". TMPDIR may be on a shared disk, so the nodes find that out."""
    return next((folder for folder in NODE_LOCAL if path.resolve().is_relative_to(Path(folder).resolve())), "")


def check_folder(context, at):
    """run.models and run.logs are writable, with atomic renames, and shared. facts: marks, sees (nodes seen here)."""
    cfg, nodes, variables, notes = context["cfg"], context["nodes"], context["variables"], []
    keys = {key: marker_folder(cfg, key, variables) for key in ("run.models", "run.logs")}
    for key, folder in keys.items():
        if (place := node_local(Path(cfg[key]))) and len(nodes) > 1:
            if not context["allow_tmp"]:
                return failed(f"{key} {cfg[key]} is under {place}, of which each node has its own",
                              f"set {key} to a folder that all nodes share, or start with --allow-tmp")
            notes.append(f"{key} is under {place}: allowed")
        at(f"writing to {key} {cfg[key]}")
        folder.mkdir(parents=True, exist_ok=True)
        write_and_read_back(folder / context["node"], "")
        free = shutil.disk_usage(folder).free
        if free < 10 * GIB:
            notes.append(f"warning: {key} has only {free / GIB:.1f} GiB free")
    at("waiting for the files of the other nodes")
    missing = {}
    while True:
        for key, folder in keys.items():
            # A new write makes a network file system drop its cached listing of the folder.
            write_and_read_back(folder / context["node"], str(time.time()))
            missing[key] = [node for node in nodes if node not in os.listdir(folder)]
        if not any(missing.values()) or time.monotonic() > context["ends"] - 1:
            break
        time.sleep(0.2)
    unseen = set().union(*missing.values())
    facts = {"marks": folder.name, "sees": [node for node in nodes if node not in unseen]}
    if key := next((key for key in keys if missing[key]), ""):
        names = ", ".join(missing[key])
        return failed(f"files of {names} in {key} {Path(cfg[key]).resolve()} are not visible here",
                      f"set {key} to a folder that all nodes share", **facts)
    return passed("; ".join([f"{' and '.join(dict.fromkeys(cfg[key] for key in keys))} are writable"
                             + " and seen by all nodes" * (len(nodes) > 1), *notes]), **facts)


def clean_folders(context):
    """Remove this node's marks, and the folder if they were the last."""
    for key in ("run.models", "run.logs"):
        folder = marker_folder(context["cfg"], key, context["variables"])
        with contextlib.suppress(OSError):
            (folder / context["node"]).unlink(missing_ok=True)
            folder.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# The network
# ---------------------------------------------------------------------------------------------------------------------

def serve(context, at):
    """Rank 0: serve the store at MASTER_PORT, in a process that lives as long as its parent; `at` gets the result."""
    try:
        store = dist.TCPStore("127.0.0.1", int(context["variables"]["MASTER_PORT"]), context["world_size"], True,
                              wait_for_workers=False, timeout=datetime.timedelta(seconds=10))
    except (RuntimeError, ValueError, KeyError) as error:
        return failed(f"cannot serve MASTER_PORT {context['variables'].get('MASTER_PORT')}: {first_line(error)}",
                      "set MASTER_PORT to a port that is free on the host of rank 0")
    at(passed("serves"))
    while True:
        time.sleep(3600)
        store.num_keys()  # keeps the server's object alive


def reach(address, port, ends):
    """Connect until `ends`. Returns: "" or the reason why there is no connection."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(ends - time.monotonic(), 0.1)):
                return ""
        except OSError as error:
            if time.monotonic() > ends - 0.5:
                return error.strerror or str(error)
        time.sleep(0.2)


def common_store(context):
    """The store of all ranks, through Runtime.launch.rendezvous as in the training."""
    if context["rank"] == 0:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # `serve` holds the store, since this process may be killed
    ranks = launch.Ranks(rank=context["rank"], world_size=context["world_size"])
    launch.rendezvous(ranks, max(context["ends"] - time.monotonic() - 1, 1))
    return ranks.store


def check_rendezvous(context, at):
    """All ranks meet at MASTER_ADDR:MASTER_PORT. facts: waits_for, the ranks that did not come."""
    address, port = (context["variables"].get(f"MASTER_{name}", "") for name in ("ADDR", "PORT"))
    if context["world_size"] == 1:
        return passed("one rank")
    if not address or not launch.is_port(port):
        return failed(f"MASTER_ADDR is {address or 'not set'} and MASTER_PORT {port or 'not set'}",
                      "set them to the host of rank 0 and a free port on it")
    if context["served"] and not context["served"]["ok"]:
        return context["served"]
    first = context["nodes"][0]
    advice = f"it has to be the host of rank 0 ({first}): unset it or set it to {first}"
    try:
        at(f"resolving {address}")
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        return failed(f"cannot resolve MASTER_ADDR {address} ({error.strerror})", advice, unreachable=True)
    at(f"connecting to {address}:{port}")
    if why := reach(address, int(port), context["ends"] - 2):
        return failed(f"cannot reach MASTER_ADDR {address} port {port} ({why})", advice, unreachable=True)
    try:
        at(f"meeting at {address}:{port}")
        common_store(context)
    except RuntimeError as error:
        if missing := getattr(error, "missing", None):
            return failed(str(error), "look at the rows of these ranks", waits_for=missing)
        return failed(f"no store at MASTER_ADDR {address} port {port} ({first_line(error)})", advice, unreachable=True)
    return passed(f"{context['world_size']} ranks meet at {address}:{port}")


def check_collective(context, at, within_node=False):
    """all_reduce works among all ranks, or among those of this node: once all are there and well; they end together."""
    first, name = context["rank"] - context["local_rank"], "node" if within_node else "all"
    peers = range(first, first + context["tasks"]) if within_node else range(context["world_size"])
    if len(peers) == 1:
        return passed("one rank" + " on each node" * (context["world_size"] > 1))
    at("meeting")
    store = dist.PrefixStore(f"{name} {peers[0]}", common_store(context))
    ill = next((check for check in ("device", "forward", "node collective")
                if check in context["findings"] and not context["findings"][check]["ok"]), "")
    store.set(f"in/{context['rank']}", ill)
    if not launch.wait_for_keys(store, [f"in/{peer}" for peer in peers], context["ends"] - time.monotonic() - 2):
        absent = [peer for peer in peers if not store.check([f"in/{peer}"])]
        return failed(f"rank {', '.join(map(str, absent))} did not reach it", "look at the rows of these ranks",
                      waits_for=absent)
    states = {peer: store.get(f"in/{peer}").decode() for peer in peers}
    result = next((skipped(f"{state} failed on rank {peer}") for peer, state in states.items() if state), None)
    if result is None:
        result = all_reduce(context, at, dist.PrefixStore("group", store), peers.index(context["rank"]), len(peers))
    # Wait for the others: a rank that ends early breaks their collective. The group is not destroyed: that can hang.
    store.set(f"out/{context['rank']}", "")
    with contextlib.suppress(dist.DistError):  # rank 0, which has the store, may be the first to see that all are done
        launch.wait_for_keys(store, [f"out/{peer}" for peer in peers], context["ends"] - time.monotonic() - 1)
    return result


def all_reduce(context, at, store, index, count):
    """Check the sums of a small and a large tensor by the device's backend, then by gloo, which agreements use."""
    device = pick_device(context["cfg"]["run.device"], context["local_rank"])
    prepare_device(device, 0)
    kind = backend(device)
    at(f"joining a group of {kind}")
    # A long timeout: not every backend obeys one, and this process is killed at its deadline in any case.
    dist.init_process_group(kind, store=store, rank=index, world_size=count, timeout=datetime.timedelta(hours=1))
    large = torch.ones((64 if device.type != "cpu" else 4) * 2 ** 18, device=device)
    small = torch.full((4,), float(index + 1), device=device)
    at(f"all_reduce by {kind}")
    dist.all_reduce(small)
    dist.all_reduce(large)
    wrong = [(float(tensor.min()), float(tensor.max()), expected)
             for tensor, expected in ((small, count * (count + 1) / 2), (large, float(count)))
             if not (tensor == expected).all()]
    if wrong:
        return failed(f"all_reduce by {kind} gave {wrong[0][0]:g} to {wrong[0][1]:g} instead of {wrong[0][2]:g}",
                      "check the driver and the network of these nodes")
    synchronize(device)
    began = time.monotonic()
    dist.all_reduce(large)
    synchronize(device)
    rate = large.nbytes / (time.monotonic() - began) / GIB
    if device.type != "cpu":
        at("all_reduce by gloo")
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    return passed(f"{count} ranks by {kind}, {large.nbytes // 2 ** 20} MiB at {rate:.2g} GiB/s", worst=-rate)


# name: (function, deadline as a fraction of PREFLIGHT_SECONDS since the task began, checks that must have passed).
# Deadlines are points in time, so that a rank that waits for others outlasts a check that hangs there.
CHECKS = {
    "code": (check_code, 0.40, ()),
    "settings": (check_settings, 0.42, ()),
    "device": (check_device, 0.50, ()),
    "forward": (check_forward, 0.60, ("device",)),
    "folder": (check_folder, 0.68, ()),
    "rendezvous": (check_rendezvous, 0.75, ()),
    "node collective": (functools.partial(check_collective, within_node=True), 0.81, ("rendezvous",)),
    "collective": (check_collective, 0.87, ("rendezvous",)),
    "data": (check_data, 0.91, ()),
    "memory": (check_memory, 0.95, ("forward",)),
}
OF_THE_NODE = ("data", "memory", "folder")  # checks that only the first rank of a node runs
