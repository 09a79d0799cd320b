"""The weight cache over places that differ in size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from cache_rig import FakeTicket, unit_of
from cache_rig import a_deadline as a_deadline

from offload.report.meter import Meter
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.carrier import Carrier
from offload.tiers.weights.pin import Pin, Purpose, UnitState
from offload.units import UnitSpec
from offload.waiting import Failure
from swapper import StorageIOError


class FakeCarrier(Carrier[int]):
    """Room for some bytes; fetches end at once."""

    def __init__(self, events: list[str], room: int) -> None:
        self.room = room
        self.error: Exception | None = None
        self._events = events

    def take_place(self, unit: UnitSpec) -> int | None:
        return self.add_place(unit) if unit.numel <= self.room else None

    def add_place(self, unit: UnitSpec) -> int:
        self.room -= unit.numel
        return unit.numel

    def free_place(self, unit: UnitSpec, place: int) -> None:
        self._events.append(f"free {unit.name}")
        self.room += place

    def fetch(self, unit: UnitSpec, place: int) -> FakeTicket:
        if self.error is not None:
            raise self.error
        self._events.append(f"fetch {unit.name}")
        ticket = FakeTicket(lambda: None)
        ticket.end()
        return ticket


class PlainCache(WeightCache[int]):
    """Nothing but the cache."""

    def use(self, unit: UnitSpec) -> None:
        with Pin(self.entries[unit.index], Purpose.COMPUTE, self):
            pass
        self.fetch_ahead()

    def states(self) -> list[UnitState]:
        return [entry.state for entry in self.entries]


def plain_cache(
    sizes: Sequence[int], room: int, *, prefetch: bool = False, look_ahead: int = 16
) -> tuple[list[str], FakeCarrier, PlainCache, list[UnitSpec]]:
    events: list[str] = []
    units = [unit_of(index, "abcdefgh"[index], numel) for index, numel in enumerate(sizes)]
    carrier = FakeCarrier(events, room)
    plain = PlainCache(units, carrier, Failure(), Meter(), prefetch=prefetch, look_ahead=look_ahead)
    return events, carrier, plain, units


def test_as_many_units_are_evicted_as_a_large_one_needs() -> None:
    events, carrier, plain, units = plain_cache([1, 1, 1, 2], room=3)
    for unit in units:
        plain.use(unit)
    assert events == ["fetch a", "fetch b", "fetch c", "free a", "free b", "fetch d"]
    assert carrier.room == 0
    assert plain.states() == [UnitState.ABSENT, UnitState.ABSENT, UnitState.RESIDENT, UnitState.RESIDENT]


def test_prefetch_looks_no_farther_ahead_than_it_is_told() -> None:
    for look_ahead, ahead in ((0, []), (1, ["fetch b"]), (3, ["fetch b", "fetch c", "fetch d"])):
        events, _, plain, units = plain_cache([1] * 8, room=8, prefetch=True, look_ahead=look_ahead)
        plain.use(units[0])
        assert events == ["fetch a", *ahead]


def test_a_small_unit_does_not_overtake_a_large_one_that_finds_no_room() -> None:
    events, _, plain, units = plain_cache([2, 2, 1], room=3, prefetch=True)
    plain.use(units[0])  # c would fit beside a, but b comes first: it gets the place of a, which is needed after it
    assert events == ["fetch a", "free a", "fetch b", "fetch c"]


def test_a_fetch_that_cannot_begin_leaves_the_unit_absent_and_its_place_free() -> None:
    events, carrier, plain, units = plain_cache([1, 1], room=1)
    carrier.error = StorageIOError("the store is closed")
    with pytest.raises(StorageIOError, match="is closed"):
        plain.use(units[0])
    assert plain.states() == [UnitState.ABSENT, UnitState.ABSENT] and carrier.room == 1
    carrier.error = None
    plain.use(units[0])  # else it computes with whatever lies in its place
    assert events == ["free a", "fetch a"]
