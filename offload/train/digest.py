"""Fingerprints of weights: equal if and only if every bit is equal."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> BLAKE2b of the bytes of the value. Holds one value at a time."""
    return {name: digest(value) for name, value in named}


def digest(value: Tensor) -> str:
    """BLAKE2b of the bytes of a tensor in row-major order."""
    flat = value.detach().clone().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
