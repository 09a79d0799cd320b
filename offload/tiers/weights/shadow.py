"""Shadows, to which speculative updates write weights beside the current ones, until the verdict flips them in or drops
them. See ``offload.update.speculative``. Weights on NVMe go there from a slot; those in RAM have a spare place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offload.tiers.home import Home, Transfer, UnitHomes
from offload.tiers.weights.cache import WeightCache
from offload.tiers.weights.carrier import HostBuffer
from offload.tiers.weights.pin import Pin, Purpose, UnitState
from offload.units import Tile, UnitSpec
from swapper import Lease


class Slot(HostBuffer):
    """A buffer that units on NVMe pass through."""

    write: Transfer | None = None
    """The last transfer from it, while it is free."""


class SpareBuffer(HostBuffer):
    """The spare place of weights in host memory."""

    def __init__(self, place: Lease, before: int) -> None:
        super().__init__(place)
        self._before = before

    @property
    def before(self) -> int:
        return self._before


class Shadow(Protocol):
    """Treatment of a unit's weights by its speculative update."""

    waits: bool
    """``bring`` and ``lend`` may wait for a place, or for those that use the unit."""

    def hold(self, unit: UnitSpec) -> bool:
        """Keep the weights of a unit in use where they are; False if they are not in use."""

    def end_hold(self, unit: UnitSpec) -> None:
        """No speculative update will come."""

    def bring(self, unit: UnitSpec) -> None:
        """Have the weights of a unit that is not held in host memory."""

    def lend(self, unit: UnitSpec, written: Sequence[Tile], wanted: Callable[[], bool]) -> HostBuffer | None:
        """Memory for the unit's new weights, beside what others see of them. It has all but those of the tiles that
        are to be ``written``, which are made of what is at ``before``. None if that is not ``wanted`` any more."""

    def give_back(self, unit: UnitSpec, buffer: Any) -> None:
        """The weights in it are the new ones."""

    def flip(self, unit: UnitSpec) -> None:
        """The new weights are the unit's from now on; its update is done."""

    def forget(self, unit: UnitSpec) -> None:
        """The new weights, if any, are not wanted."""


class SpareWeights:
    """Of units that are stored in host memory with a spare place there. Nobody else looks at it, so nothing waits."""

    waits = False

    def __init__(
        self, cache: WeightCache[Any], homes: Sequence[UnitHomes], copy: Callable[[int, int, int], None]
    ) -> None:
        """``copy`` copies to an address from another one so many bytes."""
        self._cache = cache
        self._homes = homes
        self._copy = copy

    def hold(self, unit: UnitSpec) -> bool:
        return True

    def end_hold(self, unit: UnitSpec) -> None:
        pass

    def bring(self, unit: UnitSpec) -> None:
        pass

    def lend(self, unit: UnitSpec, written: Sequence[Tile], wanted: Callable[[], bool]) -> HostBuffer | None:
        home = self._homes[unit.index].weights
        if not wanted() or home.address is None or home.spare_address is None:
            return None
        element, start = home.nbytes // unit.numel, 0
        for tile in written:
            self._copy_between(home, start, tile.start * element)
            start = tile.stop * element
        self._copy_between(home, start, home.nbytes)
        return SpareBuffer(Lease(home.spare_address, home.nbytes), home.address)

    def give_back(self, unit: UnitSpec, buffer: HostBuffer) -> None:
        pass

    def flip(self, unit: UnitSpec) -> None:
        with self._cache.monitor:  # whoever takes the unit from now on finds the new weights
            self._homes[unit.index].weights.flip()
            self._cache.fence.done(unit)

    def forget(self, unit: UnitSpec) -> None:
        pass

    def _copy_between(self, home: Home, start: int, stop: int) -> None:
        assert home.address is not None and home.spare_address is not None
        if start < stop:
            self._copy(home.spare_address + start, home.address + start, stop - start)


class ShadowSlots:
    """Holds, lends and takes back slots of the cache of host memory. Each unit has one speculative update at most."""

    waits = True

    def __init__(self, cache: WeightCache[Any], homes: Sequence[UnitHomes]) -> None:
        self._cache = cache
        self._homes = homes
        self._pins = [Pin(entry, Purpose.SPECULATION, cache) for entry in cache.entries]

    def hold(self, unit: UnitSpec) -> bool:
        """Keep the weights of a unit in use where they are; False if they are not in use."""
        pin = self._pins[unit.index]
        with self._cache.monitor:
            if pin.entry.state is not UnitState.RESIDENT or not pin.entry.pins:
                return False
            pin.entry.pins.add(pin)
            return True

    def end_hold(self, unit: UnitSpec) -> None:
        """No speculative update will come."""
        self._pins[unit.index].release()

    def bring(self, unit: UnitSpec) -> None:
        """Hold the weights of a unit, which are read if they are not here. The unit that is needed last makes room: one
        that backward is done with, so that nothing is waited for which this backward still needs."""
        self._pins[unit.index].take()

    def lend(self, unit: UnitSpec, written: Sequence[Tile], wanted: Callable[[], bool]) -> Slot | None:
        """The slot of a unit that is held, once nothing else uses it. The unit itself is absent from now on.

        None if it is not ``wanted`` any more: the thread that says so may be the one that uses the unit. It is held no
        more then.
        """
        cache, pin = self._cache, self._pins[unit.index]
        entry = pin.entry
        with cache.monitor:
            while True:
                cache.monitor.wait_until(
                    lambda: entry.pins <= {pin} or not wanted(), lambda: f"the use of unit {unit.name}"
                )
                if not wanted():
                    pin.release()
                    return None
                if entry.is_settled():
                    break
                for transfer in entry.transfers():  # meanwhile others may use the unit again
                    cache.monitor.free_during(transfer.wait)
            slot: Slot = cache.lend(entry)
            return slot

    def give_back(self, unit: UnitSpec, slot: Slot) -> None:
        """Send the new weights in a lent slot to the shadow of the current ones; the slot is free when they have
        arrived."""
        home = self._homes[unit.index].weights.stored
        write = None if home is None else home.write_shadow(slot.address)
        with self._cache.monitor:
            slot.write = write
            self._cache.take_back(unit, slot)

    def flip(self, unit: UnitSpec) -> None:
        """The weights in the shadow are the unit's from now on; its update is done."""
        cache, entry, home = self._cache, self._pins[unit.index].entry, self._homes[unit.index].weights.stored
        with cache.monitor:
            cache.wait_until_unused(entry)
            if entry.place is not None:
                cache.evict(entry)
            if home is not None:
                home.flip()
            self.forget(unit)
            cache.fence.done(unit)
            cache.monitor.notify_all()

    def forget(self, unit: UnitSpec) -> None:
        """The weights in the shadow, if any, are not wanted."""
        entry = self._pins[unit.index].entry
        with self._cache.monitor:
            if entry.state is UnitState.SHADOWED:
                entry.become(UnitState.ABSENT)
