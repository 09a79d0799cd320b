"""Fingerprints of weights: equal if and only if every bit is equal."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digests_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> BLAKE2b of the bytes of the value, in row-major order. Holds one value at a time."""
    return {name: _digest(value) for name, value in named}


def _digest(value: Tensor) -> str:
    flat = value.detach().clone().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
