"""State of torch's generator on the CPU, moved on without its numbers.

It is a Mersenne Twister (MT19937): 624 words, of which each gives a number, and which a twist replaces when all were
given. To twist costs a fiftieth of what torch takes for numbers that nobody reads. torch promises no layout of a
state's bytes: ``numbers_of`` tries what this file believes of it, and says None where it is another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload import kernels

_NUM_WORDS = 624
_NUM_BYTES = 5056
_LEFT, _NEXT, _WORDS = 8, 16, 24
"""Bytes at which these begin: the count of words that are left and one more (32 bits), the word to give next, and the
words, each in 64 bits."""


def advance(state: Tensor, count: int) -> None:
    """Change a generator's state, as ``get_state`` gives it, to what drawing ``count`` numbers of 32 bits leaves."""
    left, following = _field(state, _LEFT, torch.int32), _field(state, _NEXT, torch.int64)
    at_hand = int(left) - 1
    if count <= at_hand:
        left -= count
        following += count
        return
    twists, into_last = divmod(count - at_hand - 1, _NUM_WORDS)
    stored = state[_WORDS : _WORDS + 8 * _NUM_WORDS].view(torch.int64)
    words = stored.to(torch.int32)
    kernels.twist(words.data_ptr(), twists + 1)
    stored.copy_(words).bitwise_and_(0xFFFFFFFF)
    left.fill_(_NUM_WORDS - into_last)
    following.fill_(into_last + 1)


@cache
def numbers_of(function: Callable[..., Any], dtype: torch.dtype, numel: int) -> int | None:
    """Numbers of the stream that ``function`` takes to fill so many elements, whatever it was given before; None if
    ``advance`` does not leave what it leaves."""
    for each in (1, 2):
        if all(_agree(function, dtype, numel, each, given) for given in (0, 1, 600, 623, 624, 1250)):
            return each * numel
    return None


def _agree(function: Callable[..., Any], dtype: torch.dtype, numel: int, each: int, given: int) -> bool:
    generator = torch.Generator().manual_seed(given)
    torch.empty(given, dtype=torch.float32, device="cpu").uniform_(generator=generator)
    state = generator.get_state()
    if state.numel() != _NUM_BYTES:
        return False
    advance(state, each * numel)
    function(torch.empty(numel, dtype=dtype, device="cpu"), generator=generator)
    return torch.equal(state, generator.get_state())


def _field(state: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    return state[start : start + dtype.itemsize].view(dtype)
