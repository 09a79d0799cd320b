"""The measurement of a store's paths before training starts: how long it lasts, and how much it moves."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from offload.tiers.bandwidth import measure


@dataclass(frozen=True)
class Record:
    number: int
    nbytes: int


class Ticket:
    def wait(self) -> None:
        """It is over at once."""


class Counted:
    """A store that counts what is read and written, at so many bytes a second."""

    def __init__(self, rate: float) -> None:
        self.moved: Counter[str] = Counter()
        self._rate = rate

    def read(self, extent: Any, address: int, nbytes: int) -> Any:
        return self._move("read", nbytes)

    def write(self, extent: Any, address: int, nbytes: int) -> Any:
        return self._move("written", nbytes)

    def _move(self, kind: str, nbytes: int) -> Any:
        self.moved[kind] += nbytes
        end = time.perf_counter() + nbytes / self._rate
        while time.perf_counter() < end:
            pass
        return Ticket()


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_small_store_is_not_worn_out_by_being_measured(count: int):
    store: Any = Counted(1e11)
    records: Any = [Record(number, 1 << 20) for number in range(count)]
    found = measure(store, records, [4096 * number for number in range(6)])
    most = (2 * count + 6) << 20  # two passes, and what is in flight
    assert found.write > 0 and found.read > 0
    assert 0 < store.moved["written"] <= 2 * most
    assert store.moved["read"] <= 2 * most + (3 << 20)


def test_a_large_store_is_measured_for_a_moment():
    store: Any = Counted(1e9)
    records: Any = [Record(number, 4 << 20) for number in range(4000)]
    begin = time.perf_counter()
    measure(store, records, [4096 * number for number in range(6)])
    assert time.perf_counter() - begin < 10
    assert store.moved["written"] < 1 << 30
