"""Randomness without state: every draw is a function of (seed, purpose, counters) and of nothing that ran before.

A run that resumes at any step or with another number of processes therefore draws the same numbers, and a checkpoint
needs no generator state. Numbers are drawn on the CPU, so they are the same for every device.
"""
import hashlib

import torch


def hashed(seed, purpose, *counters):
    """The hash of a draw's key: 8 bytes.

    seed: int. purpose: str naming what is drawn; different purposes give different hashes.
    counters: ints, e.g. epoch and global sample index.
    """
    key = (int(seed), purpose, *map(int, counters))
    return hashlib.blake2b(repr(key).encode(), digest_size=8).digest()


def generator(seed, purpose, *counters):
    """A CPU generator seeded with `hashed` of the same arguments.

    torch's CPU generator uses 32 bits of the seed, so two draws coincide with probability 1 in 4e9: in a million draws
    about a hundred pairs do, whatever their seeds.
    """
    number = int.from_bytes(hashed(seed, purpose, *counters), "little")
    return torch.Generator().manual_seed(number & (2 ** 63 - 1))  # seeds are non-negative int64


def uniform(rng_keys, purpose, *shape):
    """Numbers in [0, 1) for each sample of a batch: (B, *shape). rng_keys: B tuples (seed, epoch, position)."""
    return torch.stack([torch.rand(shape, generator=generator(key[0], purpose, *key[1:])) for key in rng_keys])


def normal(rng_keys, purpose, *shape):
    """Standard normal numbers for each sample of a batch: (B, *shape). rng_keys: B tuples (seed, epoch, position)."""
    return torch.stack([torch.randn(shape, generator=generator(key[0], purpose, *key[1:])) for key in rng_keys])
