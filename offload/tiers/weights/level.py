"""Levels of the memory hierarchy: each gives pins on units, and stands on the level below."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol

from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.pin import P, Pin, Purpose
from offload.units import UnitSpec


class Level(Protocol):
    """Units of one tier, for compute or for the level above."""

    def pin(self, unit: UnitSpec, purpose: Purpose = Purpose.COMPUTE) -> Pin[Any]:
        """A pin that is not taken."""

    def has_room(self, units: Sequence[UnitSpec]) -> bool:
        """Tell whether these may be in use at a time."""

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        """The weights of these units are about to change below: copies of them here are void."""

    def announce(self, units: Sequence[UnitSpec]) -> None:
        """Compute will use these experts of one layer next, in this order."""

    def end_step(self) -> None:
        """A step was frozen, and its updates have been announced."""


class WholeWeights(Protocol):
    """Whole units, where this rank has shards of them."""

    def borrow(self, unit: UnitSpec, start: int, stop: int) -> AbstractContextManager[int]:
        """The address, in host memory, of these elements of the unit or of a copy of them, to be read."""


class Unsharded:
    """One rank has no shards: nobody asks for whole units."""

    def borrow(self, unit: UnitSpec, start: int, stop: int) -> AbstractContextManager[int]:
        raise RuntimeError(f"unit {unit.name} is no shard")


class CacheLevel(Generic[P]):
    """A level of copies: what an update changes lies below."""

    def __init__(self, cache: WeightCache[P]) -> None:
        self.cache = cache

    def pin(self, unit: UnitSpec, purpose: Purpose = Purpose.COMPUTE) -> Pin[P]:
        return Pin(self.cache.entries[unit.index], purpose, self)

    def take(self, pin: Pin[P], *, training: bool) -> None:
        """See ``Pin.take``."""
        self.cache.take(pin, training=training)

    def release(self, pin: Pin[P]) -> None:
        """See ``Pin.release``."""
        self.cache.release(pin)

    def announce(self, units: Sequence[UnitSpec]) -> None:
        self.cache.announce(units)

    def has_room(self, units: Sequence[UnitSpec]) -> bool:
        return self.cache.has_room(units)

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        self.cache.outdate(units)

    def end_step(self) -> None:
        """The first units of the next step are fetched as their updates end."""
        self.cache.end_step()
        self.cache.fetch_ahead(wrap=False)
