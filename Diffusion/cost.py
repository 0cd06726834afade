"""What a training step costs, counted without computing it: `python OM_train_3modes.py --config C --dry-run`."""
import functools
import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from Dataloader.dataset import read_datasets
from Dataloader.sampler import epoch_pair_count, steps_left
from Diffusion.diffuser import make_condition
from Diffusion.embeddings import embed, new_queue
from Diffusion.networks import new_network
from Runtime.errors import DONE, InputError
from Runtime.global_batch import split_step


def count_costs(loss_function, network):
    """Cost of one forward and backward pass of a mode, on tensors without values: call under torch's FakeTensorMode.

    loss_function: computes the loss from scratch. network: its weights are not counted as activations.
    Returns: floating-point operations of matrix products, convolutions and attention; bytes of the activations that the
    forward pass keeps for the backward pass, each storage counted once.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # a reference, so that the address is not used again
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_function()
        loss.backward()
    return counter.get_total_flops(), sum(storage.nbytes() for storage in kept.values())


def weights_and_optimizer_bytes(network):
    """Bytes of the weights, their gradients and Adam's two moments, all in float32."""
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


def mode_costs(cfg, pair_batch, modes):
    """`count_costs` of each mode of a config.

    pair_batch: pairs of one forward. modes: MODES of the training script.
    Returns: the network, on tensors without values; {mode: (operations, bytes)}.
    """
    size, batchsize = cfg["data.img_size"], cfg["data.batchsize"]
    kind = "none" if cfg["model.condition_type"] == "none" else "volume"
    with FakeTensorMode():
        net = new_network(cfg)
        image = torch.zeros(batchsize, 1, *size)
        t = torch.zeros(batchsize, dtype=torch.long)
        moving, fixed = torch.zeros(2, pair_batch, 1, *size)
        batch = {"xt": image, "t": t, "target_field": torch.zeros(batchsize, len(size), *size), "keep": None,
                 "condition": make_condition(image, kind), "subjects": t, "queue": new_queue(cfg, "cpu"),
                 "targets": None, "moving": moving, "fixed": fixed}

        def loss_of(name):
            if name == "contrastive" and cfg["optim.average"]:
                with torch.no_grad():
                    embed(net, batch, cfg)  # the target embeddings, by the averaged weights
            return modes[name].step(net, batch, cfg)[0]

        return net, {name: count_costs(functools.partial(loss_of, name), net) for name in modes}


def training_volumes(cfg):
    """How many volumes would be trained on: counted in the cache, else in the files, else data.expect_samples.

    Returns: number of volumes; listed pairs or None; where the number comes from, as a text.
    """
    why = ""
    for place, source_cfg in ((cfg["data.cache"], cfg), (cfg["data.root"], {**cfg, "data.cache": ""})):
        if place:
            try:
                dataset, _, listed = read_datasets(source_cfg, headers_only=True)
                return len(dataset), listed, place + why
            except InputError as error:
                why = f", since {error}"
    return cfg["data.expect_samples"], None, f"data.expect_samples{why}"


def dry_run(cfg, world_size, modes):
    """Build everything on tensors without values, print what a step costs, and as the last line the same as JSON.

    world_size: ranks it is meant for. modes: MODES of the training script. Returns: the exit code.
    """
    size, word = "x".join(map(str, cfg["data.img_size"])), cfg["model.condition_type"]
    volumes, listed, source = training_volumes(cfg)
    split = split_step(cfg, world_size)
    steps = steps_left(cfg, volumes, listed, split)
    pairs = epoch_pair_count(cfg, volumes, listed, split)
    net, costs = mode_costs(cfg, split["pair_batch"], modes)
    parameters = sum(p.numel() for p in net.parameters())
    fixed_bytes = weights_and_optimizer_bytes(net)
    memory = fixed_bytes + max(kept for _, kept in costs.values())
    print(f"{cfg['model.name']}: {parameters / 1e6:.1f} M parameters, {size} voxels, batch {cfg['data.batchsize']}, "
          f"{cfg['diffusion.timesteps']} timesteps, condition {word}")
    for mode, (flops, kept) in costs.items():
        print(f"{mode:>13}: {flops / 1e12:8.3f} Tflop, activations {kept / 2 ** 30:6.2f} GiB")
    print(f"memory per step about {memory / 2 ** 30:.1f} GiB: {fixed_bytes / 2 ** 30:.1f} for weights, gradients and "
          f"Adam, the rest for the activations of the largest mode")
    print(f"{steps} steps per epoch: {volumes} volumes (from {source}), {pairs} pairs; effective batch "
          f"{split['samples']} (ranks: {world_size})")
    print(json.dumps({"parameters": parameters, "step_flops": sum(flops for flops, _ in costs.values()),
                      "step_memory_bytes": memory, "steps_per_epoch": steps, "effective_batch": split["samples"]}))
    return DONE
