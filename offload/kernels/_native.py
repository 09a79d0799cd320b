"""The native module, chosen and checked once, and the checks that every call shares."""

from __future__ import annotations

import os
from enum import IntEnum

from swapper.errors import OffloadError

from . import _kernels

_supported: list[str] = _kernels.isas_supported()
_wanted = os.environ.get("OFFLOAD_ISA") or _supported[0]
if _wanted not in _supported:
    raise OffloadError(
        f"OFFLOAD_ISA={_wanted!r} is none of the instruction sets that this CPU and this build have: "
        f"{', '.join(_supported)}. Unset it, or set it to one of these"
    )
_kernels.use_isa(_wanted)

ISA: str = _kernels.isa()
"""The instruction set in use: ``scalar``, ``avx2``, ``avx512`` or ``neon``."""


class Dtype(IntEnum):
    """Format of the numbers of an array, by the number that the native module knows it by."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    """Only for states of an optimizer: 8-bit codes, with an fp32 scale for each ``CODE_BLOCK`` elements. Inexact."""

    itemsize: int
    """Bytes of one element."""

    def __init__(self, number: int) -> None:
        self.itemsize = (4, 2, 2, 1)[number]


CODE_BLOCK = 256
"""Elements that share one scale where ``Dtype.INT8`` holds a state, counted from the address of the call."""

SQUARES_BLOCK = 16384
"""Elements whose squares are added up by themselves first: ``kBlock`` in src/arrays.h."""

SQUARES_LANES = 16
"""Sums that such a block is taken in: ``kLanes`` in src/arrays.h."""


def seed_of(step: int) -> int:
    """Give the 32 bits that seed the random rounding of this step."""
    return step * 0x9E3779B1 % 2**32


def check_numel(numel: int, num_threads: int = 1) -> None:
    if numel < 0:
        raise ValueError(f"numel must be >= 0, got {numel}")
    if num_threads < 1:
        raise ValueError(f"num_threads must be >= 1, got {num_threads}")


def check_numbers(name: str, address: int, dtype: Dtype, numel: int) -> None:
    """An array whose elements are numbers by themselves."""
    if dtype is Dtype.INT8:
        raise ValueError(f"{name} must be F32, BF16 or F16: INT8 is for states of an optimizer")
    check_address(name, address, dtype.itemsize, numel)


def check_address(name: str, address: int, itemsize: int, numel: int) -> None:
    """A null address is an error unless there is nothing behind it."""
    if address <= 0 and numel > 0:
        raise ValueError(f"{name} must be an address, got {address}")
    if address % itemsize:
        raise ValueError(f"{name} must be aligned to its element, {itemsize} bytes; got {address:#x}")
