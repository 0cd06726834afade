"""The registry of networks, and how one is built from a config.

Every network is called as net(image, t, condition) and returns one displacement field in voxels, float32:
  image (B, 1, *spatial), any size; t (B,) long, 0 .. timesteps - 1 for diffusion, timesteps for registration;
  condition (B, 2, *spatial) values x mask and mask, or None; keep (B,) bool, False drops a sample's condition.
net(image, t, condition, embed=True) returns two unit vectors (B, E) instead: of the image and of the condition, both as
if t were 0. Told t, both could be a function of it, and be known by it among samples of other times, whoever they show.
A further network is a class, here or in a file of its own, and a line in NETWORKS.
"""
import torch

from Diffusion.networks_older import RecMulModMutAttnNet, RecResACNet
from Diffusion.om_net import OM_net
from Runtime.errors import InputError

NETWORKS = {"om_net": OM_net, "recresacnet": RecResACNet, "recmulmodmutattnnet": RecMulModMutAttnNet}


def network_class(name):
    """The class that model.name names. Raises InputError, listing the known names, for another."""
    if name not in NETWORKS:
        raise InputError(f"model.name: there is no network '{name}'; known are {', '.join(NETWORKS)}.")
    return NETWORKS[name]


def build_network(cfg, device="cpu"):
    """The network of a config on `device`, with weights drawn from run.seed.

    Training, registration and augmentation all come through here. Raises InputError for an unknown name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg["run.seed"])
        network = network_class(cfg["model.name"])(cfg)
    if cfg["run.channels_last"]:
        memory_format = torch.channels_last_3d if cfg["model.dims"] == 3 else torch.channels_last
        network = network.to(memory_format=memory_format)
    return network.to(device)
