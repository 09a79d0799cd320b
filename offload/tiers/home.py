"""Homes: where a record rests between uses, and the one way to its bytes.

A record is what is stored of one kind of one unit: its weights, its gradients, or one tile of its optimizer states. The
plan gives each a tier, and ``tiers.make`` makes its home there. Other code does not ask for the tier, but for what a
home can do. Bytes that can be used where they are have an ``address`` (host memory) or a ``tensor`` (in a device's
memory); the bytes of a home on NVMe pass through a buffer by ``read`` and ``write``. Code that looks in from outside of
the schedule borrows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.device.protocol import Device, Event
from offload.memory import passing_tensor, private_memory, tensor_at
from offload.report.trace import Trace
from offload.tiers.bounce import Bounce
from offload.units import Tile
from swapper import DurableStore, Extent, InPlaceRecord, Lease, Ticket


class Transfer(Protocol):
    """A transfer in flight: one ticket, or several as one."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class _Transfers:
    """Several transfers as one. All of them are waited for, also when the first one fails."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        with contextlib.ExitStack() as waiting:
            for ticket in self._tickets:
                waiting.callback(ticket.wait)


class Home:
    """See the module's docstring. ``tensor`` and ``address`` are None where the bytes cannot be used in place."""

    address: int | None = None
    tensor: torch.Tensor | None = None
    spare_address: int | None = None
    """Address of the spare place, to which an update writes before its step is certain; None if there is none."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def stored(self) -> StoredHome | None:
        """This, if the record is stored on NVMe."""
        return None

    def borrow(self, *, change: bool) -> contextlib.AbstractContextManager[int]:
        """The address of the record in host memory, or of a copy of it there. With ``change`` what was changed is in
        the home when the block is over. Nothing else may use the record meanwhile."""
        raise NotImplementedError

    def replace(self) -> contextlib.AbstractContextManager[int]:
        """The address of memory, with any bytes, that is to become the whole record: it is in the home when the block
        is over. Nothing else may use the record meanwhile."""
        raise NotImplementedError

    def changes_until(self, event: Event) -> None:
        """The stream that computes was given work that changes the record, until ``event``. Whoever borrows it, in
        whatever thread and under whatever stream, comes after that."""

    def flip(self) -> None:
        """Make what an update has written beside the record from now on."""
        raise NotImplementedError

    def bring(self, address: int) -> None:
        """Fill a record that has moved here from host memory at ``address``. Returns when that is done."""
        raise NotImplementedError


class HostHome(Home):
    """In the arena, or in other host memory that stays where it is."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.nbytes)
        self.address: int = lease.address
        self.is_looked_at = False
        """Somebody has the address, and looks there at what the record is."""

    def leave(self, spares: object) -> Callable[[], None]:
        """The record stays at its address until the call that is returned."""

        def take_back() -> None:
            self.is_looked_at = False

        self.is_looked_at = True
        return take_back

    @contextlib.contextmanager
    def borrow(self, *, change: bool) -> Iterator[int]:
        yield self.address

    @contextlib.contextmanager
    def replace(self) -> Iterator[int]:
        yield self.address


class SpareHostHome(HostHome):
    """In the arena, with a spare place there for what a speculative update writes."""

    def __init__(self, lease: Lease, spare: Lease) -> None:
        super().__init__(lease)
        self.spare_address: int = spare.address

    def flip(self) -> None:
        if self.is_looked_at:
            ctypes.memmove(self.address, self.spare_address, self.nbytes)
        else:
            self.address, self.spare_address = self.spare_address, self.address


@dataclass(frozen=True)
class ExtentPart:
    """A part in an extent of the store."""

    store: DurableStore
    extent: Extent

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    def read(self, address: int, *, urgent: bool) -> Ticket:
        return self.store.read(self.extent, address, self.nbytes, urgent=urgent)

    def write(self, address: int) -> Ticket:
        return self.store.write(self.extent, address, self.nbytes)

    def write_shadow(self, address: int) -> Ticket:
        return self.store.write_shadow(self.extent, address, self.nbytes)

    def flip(self) -> None:
        self.store.flip(self.extent)


class StoredHome(Home):
    """On NVMe: ``trained`` bytes, which an update writes, then ``frozen`` ones. Trained weights and states have two
    places where the disk is large enough; spilled gradients, which nothing needs after their step, have one. Frozen
    weights may lie in files that are only read.

    An update writes trained bytes only. Transfers of one record never overlap, except for a read with a write beside.
    """

    def __init__(
        self, name: str, trained: ExtentPart | None, frozen: ExtentPart | InPlaceRecord | None, trace: Trace
    ) -> None:
        begin = 0 if trained is None else trained.nbytes
        super().__init__(begin + (0 if frozen is None else frozen.nbytes))
        self.name = name
        self._trained = trained
        self._stored: list[tuple[ExtentPart, int]] = [] if trained is None else [(trained, 0)]
        self._in_files: list[tuple[InPlaceRecord, int]] = []
        if isinstance(frozen, InPlaceRecord):
            self._in_files.append((frozen, begin))
        elif frozen is not None:
            self._stored.append((frozen, begin))
        self._parts: list[tuple[ExtentPart | InPlaceRecord, int]] = [*self._stored, *self._in_files]
        self._trace = trace
        self._last_write: Transfer | None = None
        self.num_flips = 0
        """So many times the other place became the current one. What was read before the last time is outdated."""

    @property
    def stored(self) -> StoredHome:
        return self

    @property
    def extents(self) -> Iterator[Extent]:
        """Extents of the store that it is."""
        return (part.extent for part, _ in self._stored)

    @property
    def checksums(self) -> Sequence[int | None]:
        """Of each part that is in files, as far as they are known."""
        return [checksum for record, _ in self._in_files for checksum in record.checksums]

    def expect(self, checksums: Sequence[int | None]) -> None:
        """Require these checksums, where they are known, of what is in files. Raises ``WeightsChanged`` if other bytes
        were read."""
        for record, _ in self._in_files:
            record.expect(checksums)

    @property
    def write_in_flight(self) -> Transfer | None:
        """The last write, unless it is over and good. A read begins after it."""
        write = self._last_write
        if write is not None and write.done():
            write.wait()  # a failed one raises
            return None
        return write

    def read(self, address: int, *, urgent: bool = False) -> Transfer:
        """Start reading the record into memory at ``address``. No write is in flight but one beside."""
        tickets = [
            self._traced("read", part.nbytes, part.read(address + start, urgent=urgent)) for part, start in self._parts
        ]
        return tickets[0] if len(tickets) == 1 else _Transfers(tickets)

    def write(self, address: int) -> Transfer:
        """Start replacing the trained bytes of the record by those at ``address``."""
        if self._trained is None:
            return _Transfers(())
        self._last_write = self._traced("write", self._trained.nbytes, self._trained.write(address))
        return self._last_write

    def write_shadow(self, address: int) -> Transfer:
        """The same, to the place that is not current: it counts after ``flip``."""
        if self._trained is None:
            return _Transfers(())
        self._last_write = self._traced("write", self._trained.nbytes, self._trained.write_shadow(address))
        return self._last_write

    def flip(self) -> None:
        if self._trained is not None:
            self._trained.flip()
        self.num_flips += 1  # at last: what a read finds that begins meanwhile may be outdated or not

    def fill(self, address: int) -> Transfer:
        """Start writing all of the record, frozen bytes included, which was changed from outside. What is in files must
        be as it is there: raises ``WeightsChanged``, and nothing is written then."""
        for record, start in self._in_files:
            record.require(address + start)
        return self.begin(address)

    def begin(self, address: int) -> Transfer:
        """Start writing all of the record that is stored, for the first time: what is in files need not be there."""
        tickets = [self._traced("write", part.nbytes, part.write(address + start)) for part, start in self._stored]
        self._last_write = _Transfers(tickets)
        return self._last_write

    @contextlib.contextmanager
    def borrow(self, *, change: bool) -> Iterator[int]:
        with self._memory() as address:
            self.read(address, urgent=True).wait()
            yield address
            if change:
                self.fill(address).wait()

    @contextlib.contextmanager
    def replace(self) -> Iterator[int]:
        with self._memory() as address:
            yield address
            self.fill(address).wait()

    @contextlib.contextmanager
    def _memory(self) -> Iterator[int]:
        if self._last_write is not None:
            self._last_write.wait()
        memory = private_memory(self.nbytes)
        try:
            yield memory.address
        finally:
            memory.close()

    def _traced(self, track: str, nbytes: int, ticket: Ticket) -> Ticket:
        return self._trace.transfer(track, self.name, nbytes, ticket)


class DeviceHome(Home):
    """In a device's memory, ordered by the streams that compute: the one that is current where it is asked for, and the
    one that was when it was changed last, which may be another: a commit reads it in a thread of its own."""

    def __init__(self, device: Device, tensor: torch.Tensor, bounce: Bounce) -> None:
        super().__init__(tensor.nbytes)
        self._device = device
        self._bounce = bounce
        self._changed: Event | None = None
        """The end of the last change."""
        self.tensor: torch.Tensor = tensor

    def changes_until(self, event: Event) -> None:
        self._changed = event

    @contextlib.contextmanager
    def borrow(self, *, change: bool) -> Iterator[int]:
        with self.borrow_part(0, self.nbytes, change=change) as address:
            yield address

    @contextlib.contextmanager
    def borrow_part(self, start: int, stop: int, *, change: bool) -> Iterator[int]:
        """The address of a copy of the bytes ``[start, stop)``."""
        device, part = self._device, self.tensor.view(torch.uint8)[start:stop]
        host = passing_tensor(part.nbytes)  # on a page of its own, as direct I/O asks for
        for event in (device.compute.record(), self._changed):
            if event is not None:
                device.to_host.wait(event)
        self._bounce.to_host(host, part)
        yield host.data_ptr()
        if change:
            self._bring(part, host)

    @contextlib.contextmanager
    def replace(self) -> Iterator[int]:
        host = passing_tensor(self.nbytes)
        yield host.data_ptr()
        self._bring(self.tensor.view(torch.uint8), host)

    def bring(self, address: int) -> None:
        self._bring(self.tensor.view(torch.uint8), tensor_at(address, self.nbytes, torch.uint8))

    def _bring(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for event in (self._device.compute.record(), self._changed):
            if event is not None:
                self._device.to_device.wait(event)
        self._bounce.to_device(target, source)


@dataclass
class TileHomes:
    """The homes of one tile: of its states, and of its gradients where these are spilled."""

    tile: Tile
    states: Home
    grads: StoredHome | None = None


@dataclass
class UnitHomes:
    """The homes of one unit's records. ``grads`` is None where gradients are spilled tile by tile, or never made."""

    weights: Home
    grads: Home | None
    tiles: list[TileHomes]

    @property
    def have_spares(self) -> bool:
        """All that an update writes is stored in host memory, and has a spare place there."""
        return all(home.spare_address is not None for home in (self.weights, *(tile.states for tile in self.tiles)))

    @property
    def grads_address(self) -> int | None:
        """Address of the gradients, if they are stored in host memory."""
        return None if self.grads is None else self.grads.address
