"""The interface of the memory that a weight cache fills."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Generic

import aio_ext
from offload.memory import private_memory
from offload.tiers.home import Transfer
from offload.tiers.weights.pin import P
from offload.units import UnitSpec
from swapper import Lease


class HostBuffer:
    """One buffer in host memory for the weights of a unit."""

    def __init__(self, memory: Lease | aio_ext.Memory) -> None:
        self.nbytes: int = memory.nbytes
        self._memory = memory

    @property
    def address(self) -> int:
        return self._memory.address

    @property
    def before(self) -> int:
        """Address of the weights that an update makes those in the buffer of."""
        return self.address

    def leave(self, spares: list[Lease | aio_ext.Memory]) -> Callable[[], None]:
        """Go on in other memory, with the same bytes: in one of the ``spares``, or beyond the plan. The memory that was
        here is one of the spares from the call that is returned on."""
        left, fitting = self._memory, [spare for spare in spares if spare.nbytes >= self.nbytes]
        if fitting:
            spares.remove(fitting[0])
        memory = fitting[0] if fitting else private_memory(self.nbytes)
        ctypes.memmove(memory.address, left.address, self.nbytes)
        self._memory = memory
        return lambda: spares.append(left)


class Carrier(Generic[P]):
    """The memory of one tier for units that are stored in a lower one, and the way of their bytes to it."""

    num_places: int | None = None
    """Number of places that there are; None if their sizes differ."""

    def has_room(self, units: Sequence[UnitSpec]) -> bool:
        """Tell whether these may be here at a time, with room left for others to pass."""
        return self.num_places is None or len(units) <= max(1, self.num_places - 1)

    def take_place(self, unit: UnitSpec) -> P | None:
        """Memory for the unit; None if there is none until some is freed. Never waits."""
        raise NotImplementedError

    def add_place(self, unit: UnitSpec) -> P:
        """Memory beyond the plan, because compute holds all there is. Raises ``OffloadError`` if there is none."""
        raise NotImplementedError

    def free_place(self, unit: UnitSpec, place: P) -> None:
        """Take a place back whose unit is evicted."""
        raise NotImplementedError

    def blocking_transfer(self, unit: UnitSpec) -> Transfer | None:
        """A transfer that must be over before the unit can be fetched, if there is one."""
        return None

    def fetch(self, unit: UnitSpec, place: P) -> Transfer:
        """Start bringing the unit to its place. The place may be freed once the transfer is ``done``."""
        raise NotImplementedError

    def waits_for(self, unit: UnitSpec) -> str:
        """The name in reports of what a fetch of the unit that is under way waits for."""
        return "read"

    def pending(self) -> Transfer | None:
        """A transfer whose end frees a place, if there is one."""
        return None

    def settle(self) -> None:
        """Wait until fetches that are over read nothing below any more."""
