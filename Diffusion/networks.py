"""The registry of networks, and the one place where a config becomes the arguments of a network.

Every network is called as net(image, t, condition) and returns one displacement field (B, N, *spatial) in voxels,
float32:
  image          (B, C, *spatial), sides of any length; C is data.channels, usually 1
  t              (B,) long: 0 .. timesteps - 1 for recovery, timesteps for registration
  condition      (B, C + 1, *spatial), values x mask and mask; or None
  use_condition  (B,) bool, an option: False hides the condition of a sample
net(image, t, condition, embed=True) returns two unit vectors (B, E) instead, of the image and of the condition.
Embeddings use t = 0; otherwise pairs could be matched by time instead of subject. Without mode 2 (loss.contrastive 0)
a network needs no `embed`.
With model.structures, net(image, t, condition, segment=True) returns the field and logits (2 B, K + 1, *spatial): of
background and structures in the images, then in the conditions; with segment="alone" only logits, of the images.

To add a network, write a class here or in its own file and add a line to NETWORKS. Its __init__ names the
`network_arguments` that it needs; tests/test_networks.py tests every network in the registry.
"""
import inspect

import torch

from Diffusion.diffuser import typical_displacement
from Diffusion.networks_older import RecMulModMutAttnNet, RecResACNet
from Diffusion.om_net import OM_net
from Runtime.errors import InputError

NETWORKS = {
    "om_net": OM_net,
    "recresacnet": RecResACNet,
    "recmulmodmutattnnet": RecMulModMutAttnNet,
}


def network_arguments(cfg):
    """The settings of a config for networks, by argument name; a network takes those that its __init__ names."""
    timesteps = cfg["diffusion.timesteps"]
    return {
        "dims": cfg["model.dims"],                                  # spatial axes, 2 or 3
        "image_channels": cfg["data.channels"],
        "structures": cfg["model.structures"],                      # number segmented in each volume, 0 for none
        "channels": cfg["model.channels"],                          # of the encoder's levels, finest first
        "conditioned": cfg["model.condition_type"] != "none",
        "rec_num": cfg["model.rec_num"],                            # recursive passes
        "detach": cfg["model.detach_recovery"],                     # earlier passes run without gradient
        "field_stride": cfg["model.field_stride"],                  # 2: predict at half resolution
        "attention_width": cfg["model.attention_width"],
        "attention_depth": cfg["model.attention_depth"],
        "attention_heads": cfg["model.attention_heads"],
        "affine_match": cfg["model.affine_match"],
        "local_match": cfg["model.local_match"],
        "descents": cfg["model.descents"],                          # learned steps that end each pass, 0 for none
        "fine_descents": cfg["model.fine_descents"],                # the same at full resolution, after them
        "use_checkpoint": cfg["model.use_checkpoint"],              # recompute activations in the backward pass
        "embedding_width": cfg["contrastive.embedding"],
        "timesteps": timesteps,                                     # t = timesteps means registration
        # Standard deviation of the field to be predicted at each t, in image sides.
        "typical_norm": [typical_displacement(cfg, t) for t in range(timesteps + 1)],
    }


def new_network(cfg):
    """The network of a config, with weights from torch's random numbers. Raises InputError for an unknown name."""
    if cfg["model.name"] not in NETWORKS:
        raise InputError(f"model.name: there is no network '{cfg['model.name']}'; known are {', '.join(NETWORKS)}.")
    network = NETWORKS[cfg["model.name"]]
    named = inspect.signature(network).parameters
    for key, lack in (("structures", "segments nothing"), ("descents", "makes no learned steps"),
                      ("fine_descents", "makes no learned steps")):
        if cfg[f"model.{key}"] and key not in named:
            raise InputError(f"model.{key}: the network '{cfg['model.name']}' {lack}; set it to 0, or model.name to "
                             "om_net.")
    return network(**{name: value for name, value in network_arguments(cfg).items() if name in named})


def build_network(cfg, device="cpu"):
    """The network of a config on `device`, with weights drawn from run.seed.

    Training, registration and augmentation all use this. Raises InputError for an unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg["run.seed"])
        network = new_network(cfg)
    if cfg["run.channels_last"]:
        memory_format = torch.channels_last_3d if cfg["model.dims"] == 3 else torch.channels_last
        network = network.to(memory_format=memory_format)
    return network.to(device)
