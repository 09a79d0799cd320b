"""What the kernel tests share: arrays between guard bytes, a choice of instruction set, and awkward numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offload.kernels import _kernels

GUARD_BYTES = 128
GUARD = 0xA5


class Guarded:
    """A copy of an array between guard bytes, one element past a cache line (aligned to its element only), or more."""

    def __init__(self, values: npt.NDArray[Any], elements_past: int = 1) -> None:
        self._bytes = np.full(values.nbytes + 3 * GUARD_BYTES, GUARD, dtype=np.uint8)
        self._start = GUARD_BYTES - self._bytes.ctypes.data % 64 + elements_past * values.dtype.itemsize
        self.values = self._bytes[self._start : self._start + values.nbytes].view(values.dtype)
        self.values[:] = values
        self.address = self._bytes.ctypes.data + self._start

    def check(self) -> None:
        before, after = self._bytes[: self._start], self._bytes[self._start + self.values.nbytes :]
        assert (before == GUARD).all(), "wrote before the array"
        assert (after == GUARD).all(), "wrote behind the array"


@pytest.fixture
def guarded() -> Iterator[Callable[[npt.NDArray[Any]], Guarded]]:
    """Makes guarded arrays; checks the guards of all of them at the end of the test."""
    made: list[Guarded] = []

    def make(values: npt.NDArray[Any], elements_past: int = 1) -> Guarded:
        made.append(Guarded(values, elements_past))
        return made[-1]

    yield make
    for array in made:
        array.check()


@pytest.fixture
def use_isa() -> Iterator[Callable[[str], None]]:
    before = _kernels.isa()
    yield _kernels.use_isa
    _kernels.use_isa(before)


@pytest.fixture(scope="session")
def awkward() -> Callable[[int, int], npt.NDArray[np.uint32]]:
    return awkward_bits


def awkward_bits(numel: int, seed: int) -> npt.NDArray[np.uint32]:
    """Bits of fp32 numbers: mostly ordinary ones, and every kind that is not."""
    rng = np.random.default_rng(seed)
    bits = rng.normal(0, 1e-2, numel).astype(np.float32).view(np.uint32)
    special = np.array(
        [
            *(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 0xFFFFFFFF),  # zeros, inf, NaN
            *(1, 0x807FFFFF, 0x00400000, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000),  # denormal, least, largest
            *(0x3F7F8000, 0x3F808000, 0xBF818000, 0x3F7F7FFF, 0x3F808001),  # ties of BF16 and their neighbours
            *(0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x387FE000, 0x33000000, 0x33000001, 0x38801000),  # F16
        ],
        dtype=np.uint32,
    )
    where = rng.random(numel) < 0.15
    bits[where] = rng.choice(special, int(where.sum()))
    where = rng.random(numel) < 0.05
    bits[where] = rng.integers(0, 2**32, int(where.sum()), dtype=np.uint32)
    return bits
