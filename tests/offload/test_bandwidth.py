"""The measurement of a store's paths before training starts: how long it lasts, and how much it moves."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from offload.tiers.bandwidth import fitted, measure


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


@pytest.mark.parametrize("seconds", [1.2, 1.5, 2.0, 3.0], ids=["at once", "nearly", "one after the other", "longer"])
def test_the_rates_tell_how_long_reads_and_writes_take_together(seconds: float):
    found = fitted(2e9, 1e9, 2_000_000_000, 1_000_000_000, seconds)
    assert found.seconds(2_000_000_000, 1_000_000_000) == pytest.approx(seconds)
    assert found.read == 2e9 and (found.write == 1e9) == (seconds <= 2)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_what_is_measured_as_both_at_once_goes_through_all_records_and_changes_none(count: int):
    """Each record is written from the buffer that it was read to, and not again before that write is over."""

    class Memory(Counted):
        def __init__(self) -> None:
            super().__init__(1e12)
            self.content = {number: number for number in range(count)}
            self.buffers: dict[int, int] = {}
            self.under_way: set[int] = set()
            self.written: set[int] = set()

        def read(self, extent: Any, address: int, nbytes: int) -> Any:
            return self._begin(extent, lambda: self.buffers.update({address: self.content[extent.number]}))

        def write(self, extent: Any, address: int, nbytes: int) -> Any:
            self.written.add(extent.number)
            return self._begin(extent, lambda: self.content.update({extent.number: self.buffers[address]}))

        def _begin(self, extent: Any, move: Any) -> Any:
            assert extent.number not in self.under_way
            self.under_way.add(extent.number)
            move()
            ticket = Ticket()
            ticket.wait = lambda: self.under_way.discard(extent.number)  # type: ignore[method-assign]
            return ticket

    store: Any = Memory()
    records: Any = [Record(number, 1 << 20) for number in range(count)]
    measure(store, records, [4096 * number for number in range(6)])
    assert store.content == {number: number for number in range(count)} and not store.under_way
    assert store.written == set(range(count))
