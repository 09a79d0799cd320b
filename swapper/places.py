"""The places of a store's extents: what is current in them, and what was written since the last generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from swapper.checksum import seed
from swapper.device import Transfer
from swapper.errors import StorageFull, StorageIOError, StoreMisuse
from swapper.extent import Extent
from swapper.kept import KeptGenerations
from swapper.manifest import Entry
from swapper.record import Place, Record
from swapper.space import Space
from swapper.ticket import Checksum, Ticket, Transfers
from swapper.turns import Turns


class Places:
    """Begins the transfers of extents, each in the right place. See ``DurableStore``, whose methods these are.

    At first that is current which the generation holds that the store goes on from.
    """

    def __init__(
        self,
        transfers: Transfers,
        turns: Turns,
        generations: KeptGenerations,
        space: Space,
        extents: tuple[Extent, ...],
        records: Sequence[Record],
    ) -> None:
        self._transfers = transfers
        self._turns = turns
        self._generations = generations
        self._space = space
        self.extents = extents
        self.records = records
        self._writes: dict[int, Ticket | None] = {}
        """The last write of what is current and came after the last commit or ``prepare``, by extent; None while it is
        submitted."""
        self._shadow: dict[int, Ticket] = {}
        """The last write beside of each extent that was not flipped."""
        self.take_base()

    def needed(self) -> list[set[int]]:
        """The copies that kept generations need, of each extent."""
        return [self._generations.needed(extent.index) for extent in self.extents]

    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool) -> Ticket:
        with self._turns.lock:
            self._enter(extent, nbytes, reads=True)
            place = self.records[extent.index].readable()
            return self._transfers.read(place.offset, address, nbytes, place.checksum, urgent=urgent)

    def read_part(self, generation: int, extent: Extent, start: int, address: int, nbytes: int) -> Transfer:
        with self._turns.lock:
            self._enter(extent, extent.nbytes, reads=True)
            entry = self._generations.manifest_of(generation).entries[extent.index]
            if not entry.generation:
                raise StoreMisuse(f"extent {extent.index} is no part of generation {generation}.")
            offset = self.records[extent.index].offset_of(entry.copy) + start
            return self._transfers.read_part(f"extent {extent.index}, generation {generation}", offset, address, nbytes)

    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool) -> Ticket:
        def begin(record: Record, place: Place) -> Ticket:
            record.give_up_shadow()
            self._shadow.pop(extent.index, None)
            if record.num_places > 1:
                self._writes[extent.index] = None  # should Ctrl-C strike before there is a ticket
            ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
            record.replaced(place)
            if record.num_places > 1:
                self._writes[extent.index] = ticket
            return ticket

        return self._write(extent, nbytes, Record.replaceable, begin)

    def write_shadow(self, extent: Extent, address: int, nbytes: int, *, urgent: bool) -> Ticket:
        def choose(record: Record, needed: set[int]) -> int:
            if record.num_places == 1:
                raise StoreMisuse(
                    f"extent {extent.index} has one place: nothing can be written beside what is current.",
                    advice="Create the store with places=2, for this extent or for all.",
                )
            number = record.spare(needed)
            if number is None:
                raise StorageFull(
                    f"nothing can be written beside extent {extent.index}: {self._transfers.where} has "
                    f"{record.num_places} copies, of which the generations {sorted(self._generations.kept)} need "
                    f"{len(needed)}, and what is current takes one.",
                    survives="Nothing has changed.",
                    advice="Release a retained generation, commit or finish first, or create the store with places=2.",
                )
            return number

        def begin(record: Record, place: Place) -> Ticket:
            record.give_up_shadow()
            ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
            self._shadow[extent.index] = ticket
            record.put_shadow(place)
            return ticket

        return self._write(extent, nbytes, choose, begin)

    def flip(self, extent: Extent) -> None:
        with self._turns.lock:
            self._enter(extent, extent.nbytes)
            self.records[extent.index].flip()
            self._writes[extent.index] = self._shadow.pop(extent.index)

    def discard(self, extent: Extent) -> None:
        with self._turns.lock:
            self._enter(extent, extent.nbytes)
            self._writes.pop(extent.index, None)
            self.records[extent.index].reset(None)

    # What a commit makes of them. Whoever calls these has the turn.

    def wait_for_writes(self) -> None:
        """Return when all that is to be part of a generation is there. Raises what a write has failed with."""
        for index, ticket in self._writes.items():
            if ticket is None:
                raise StorageIOError(f"write of extent {index} was interrupted.", advice="Repeat it.")
            ticket.wait()
        for ticket in self._shadow.values():
            with contextlib.suppress(StorageIOError, StorageFull):  # no part of the generation
                ticket.wait()

    def entries(self) -> tuple[Entry, ...]:
        """Entries of what is current, as the manifest of a generation has them."""
        found = []
        for extent, record, before in zip(self.extents, self.records, self._generations.base.entries, strict=True):
            place = record.current
            if place is None or record.num_places == 1:
                found.append(Entry(extent.nbytes, 0, 0, 0, before.places))
            else:
                found.append(Entry(extent.nbytes, place.generation, place.number, _sealed(place), before.places))
        return tuple(found)

    def described(self) -> None:
        """Count what was written so far as part of a generation."""
        self._writes.clear()

    def give_up(self) -> None:
        """Forget what was written since the generation that the store goes on from."""
        for ticket in (*self._writes.values(), *self._shadow.values()):
            if ticket is not None:
                with contextlib.suppress(StorageIOError, StorageFull):  # it is not wanted
                    ticket.wait()
        self._writes.clear()
        self._shadow.clear()
        for record in self.records:
            record.forget()
        self.take_base()

    def take_base(self) -> None:
        """Make current what the generation that the store goes on from holds, where nothing was written since."""
        for extent, record, entry in zip(self.extents, self.records, self._generations.base.entries, strict=True):
            if record.num_places == 1 or extent.index in self._writes:
                continue
            current, wanted = record.current, entry.copy if entry.generation else None
            if wanted is None:
                record.reset(None)
            elif current is None or current.number != wanted:
                record.reset(self._place(extent, wanted, entry.generation, entry.checksum))

    def _enter(self, extent: Extent, nbytes: int, *, reads: bool = False) -> None:
        """``Turns.enter``, for so many bytes of an extent. Raises ``StoreMisuse`` for another number."""
        self._turns.enter(reads=reads)
        if nbytes != extent.nbytes:
            raise StoreMisuse(f"extent {extent.index} has {extent.nbytes} bytes, not {nbytes}.")

    def _write(
        self,
        extent: Extent,
        nbytes: int,
        choose: Callable[[Record, set[int]], int],
        begin: Callable[[Record, Place], Ticket],
    ) -> Ticket:
        """Begin a write in the place that ``choose`` gives, beside those that are needed, once that has its space: see
        [Note: Space]."""
        record = self.records[extent.index]
        while True:
            with self._turns.lock:
                self._enter(extent, nbytes)
                number = choose(record, self._generations.needed(extent.index))
                if self._space.has(extent, number):
                    return begin(record, self._place(extent, number, self._generations.next))
            self._space.take(extent, number)

    def _place(self, extent: Extent, copy: int, generation: int, value: int | None = None) -> Place:
        """Copy number ``copy`` with bytes of ``generation``, whose checksum is ``value`` if they are there already."""
        label = f"extent {extent.index}, generation {generation}"
        checksum = Checksum(label, seed(self._generations.base.store, extent.index, generation, extent.nbytes), value)
        return Place(copy, self.records[extent.index].offset_of(copy), checksum, generation)


def _sealed(place: Place) -> int:
    """The checksum of a place whose write is over and good."""
    if place.checksum.error is not None:
        raise place.checksum.error
    if place.checksum.value is None:
        raise StorageIOError(f"write of {place.checksum.label} has no checksum.", advice="Repeat it.")
    return place.checksum.value
