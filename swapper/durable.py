"""A durable store: what was committed is there after any crash, whole, under the number of its generation.

[Note: Copies] There is room for several copies of every extent: they are the places of its record, see [Note: Places].
A copy that a kept generation needs is never written: a write goes to a copy that is neither needed nor current, and
writes over the current one if there is no other. So until a commit is complete the last generation is untouched,
and a retained generation costs no time, only its space. An extent with one place is scratch: it is written over, and
is no part of any generation.

[Note: Space] The space of a place is taken when the store is made, or else by ``reserve``, or when it is first written.
So there can be room for many generations in the layout that takes no room on the disk before they are there.

[Note: The commit] 1. All writes are over, and good. 2. The data is synced. 3. The manifest, which names the copy and
the checksum of every extent, is written under a temporary name and synced. 4. It is renamed. 5. The directory is
synced. A crash before 4 leaves the last generation, one after 5 the new one; in between it is one of the two, both
whole.
After a failure in 2, 4 or 5 the content of the disk is unknown, so the store serves nothing more.

[Note: Two phases] Several stores can have one commit in common: each one prepares it (1 to 3, and the manifest gets a
name that stays, durably), and once all have, each one finishes it (4 and 5). In between the prepared generation is kept
beside the last one: no place that either needs is written. It outlives the process, and whoever opens the store next
decides what becomes of it. ``commit`` does both at once, under the temporary name, and never leaves one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aio_ext
from swapper.arena import Arena
from swapper.checksum import seed
from swapper.device import IO_TIMEOUT_S, Device, Transfer, add_up
from swapper.directory import Directory, RealDirectory
from swapper.errors import (
    OffloadError,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageIOError,
    StorageTimeout,
    StoreMissing,
    StoreMisuse,
    failed,
)
from swapper.extent import Extent
from swapper.links import REPLACES, Links, find_links, note_linked_in
from swapper.manifest import Entry, Manifest
from swapper.publication import (
    NEW,
    committed_name,
    last_name,
    layout_of,
    prepared_name,
    publish,
    put_new,
    retained_name,
)
from swapper.record import Place
from swapper.ticket import Checksum, Ticket, Transfers

if TYPE_CHECKING:
    from typing_extensions import Self


class DurableStore:
    """Extents that are read and written at will and committed as a whole; see ``create_store`` and ``open_store``.

    Each write has a checksum: a read gives the bytes that were written, or an error.
    What was written since the last ``commit`` is gone after a crash or a ``close``. ``generation`` and ``metadata`` are
    those of what was last committed or opened; generation 0 is the empty store. Any thread may call any method.
    """

    def __init__(
        self,
        directory: Directory,
        device: Device,
        kept: dict[int, Manifest],
        retained: set[int],
        last: int,
        base: int,
        where: str,
        reserved: Sequence[int] | None = None,
        damage: Sequence[str] = (),
    ) -> None:
        """Start from the manifests ``kept``, at generation ``base``. Takes over ``device``.

        ``last`` is the last generation that was committed; one that is kept above it is prepared.
        ``reserved`` is how many places of each extent get their space now; None: all of them have it already.
        ``damage`` says what is wrong with other generations; the store is only read then.
        Raises ``StorageFull``.
        """
        self.damage = tuple(damage)
        self._directory = directory
        self._transfers = Transfers(device, where)
        self._kept = dict(kept)
        self._last = last
        self._retained = set(retained)
        self._base = kept[base]
        self._extents, self._records, _ = layout_of(self._base)
        self._reserved = [record.num_places if reserved is None else 0 for record in self._records]
        """Number of places of each extent that have their space taken."""
        self._writes: dict[int, Ticket | None] = {}
        """The last write of what is current and came after the last commit or ``prepare``, by extent; None while it is
        submitted."""
        self._take_base()
        self._shadow: dict[int, Ticket] = {}
        """The last write beside of each extent that was not flipped."""
        self._failure: OffloadError | None = None
        self._lock = threading.Condition()
        """Lock of the store. Guards: records, ``_writes``, ``_shadow``, ``_failure``, generations and ``_turn_of``.
        Order: after all of the engine's; the lock of the counts is taken under it. No I/O is waited for under it, but
        that space is reserved for extents that are written for the first time.
        One exception: with 16384 requests in flight a submission waits until one is over. The threads of ``aio_ext``
        see to that, and they take no lock of the store."""
        self._turn_of: object | None = None
        """The call that has the store alone: a commit, another change of the generations, or ``close``. It waits for
        I/O, so it holds no lock; what it changes is its own until ``_turn_of`` is None again."""
        self._reads_go_on = False
        """That call lets reads begin meanwhile."""
        self._pid = os.getpid()
        self._closers = contextlib.ExitStack()
        self._closers.callback(self._transfers.close)
        if reserved is not None and not damage:
            self.reserve(reserved)

    def publish_first(self) -> None:
        """Publish generation 0 of a new store."""
        self._write_new(self._base)
        with self._renamed(NEW, last_name(0)):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents, in the order in which their sizes were given."""
        return self._extents

    @property
    def backend(self) -> str:
        """Backend that moves the bytes: ``io_uring``, ``threads`` or ``portable``."""
        return self._transfers.device.backend

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what the queue had to do without, why, and the fix."""
        return self._transfers.device.notes

    @property
    def num_second_reads(self) -> int:
        """Reads that went wrong and were done once more. More than a few: look after the device."""
        return self._transfers.num_second_reads

    @property
    def num_second_writes(self) -> int:
        """Writes that failed and were done once more. More than a few: look after the device."""
        return self._transfers.num_second_writes

    @property
    def generation(self) -> int:
        """The number of the generation that the store was last committed as, or opened at."""
        return self._base.generation

    @property
    def metadata(self) -> bytes:
        """Metadata that was given to ``commit`` with that generation."""
        return self._base.metadata

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations that can be opened, oldest first: those retained, and the last."""
        return tuple(sorted(self._retained | {self._last}))

    @property
    def retained(self) -> tuple[int, ...]:
        """The generations that stay until they are released, oldest first."""
        return tuple(sorted(self._retained))

    @property
    def prepared(self) -> int | None:
        """The generation that was prepared, by this owner or the one before, and is neither finished nor abandoned."""
        newest = max(self._kept)
        return newest if newest > self._last else None

    def metadata_of(self, generation: int) -> bytes:
        """Metadata that was given to ``commit`` or ``prepare`` with a generation that is kept. Raises
        ``StoreMissing``."""
        return self.manifest_of(generation).metadata

    def holds(self, extent: Extent) -> bool:
        """The extent is a part of the last generation."""
        return self.manifest_of(self.generation).entries[extent.index].generation > 0

    @property
    def identity(self) -> bytes:
        """Identity of the store, which no other one has: 16 bytes."""
        return self._base.store

    @property
    def replaces(self) -> bytes:
        """Identity of the store that this one was made to replace; empty if there was none, or nobody knows."""
        try:
            return self._directory.read(REPLACES, len(self.identity))
        except OSError:
            return b""

    @property
    def shape(self) -> list[tuple[int, int]]:
        """Bytes and places of each extent."""
        return [(extent.nbytes, record.num_places) for extent, record in zip(self._extents, self._records, strict=True)]

    def register(self, arena: Arena) -> None:
        """Tell the queue where its buffers are, so that the kernel need not map them for each transfer."""
        self._transfers.register(arena)

    def statistics(self) -> aio_ext.Statistics:
        """Statistics of what the queue has moved so far."""
        return add_up(self.statistics_by_path())

    def statistics_by_path(self) -> Sequence[aio_ext.Statistics]:
        """The same by path, in the order in which the paths were given."""
        return self._transfers.device.statistics_by_file()

    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start reading what is current of ``extent`` into memory at ``address``. ``urgent`` overtakes others.

        ``nbytes`` is the extent's. The ``write`` before must be over, and so must the write that was flipped last.
        A ``write_shadow`` may be in flight. A commit that is under way does not hold it up.
        Raises ``StoreMisuse`` for another size, and for an extent that was never written.
        """
        with self._entered(extent, nbytes, reads=True):
            place = self._records[extent.index].readable()
            return self._transfers.read(place.offset, address, nbytes, place.checksum, urgent=urgent)

    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``; later reads take these bytes.

        The bytes go to a copy that is neither current nor needed by a kept generation, if there is one. Then the old
        bytes are current again if the write fails; otherwise they are lost. What was written beside and not flipped is
        given up. No read and no other write of the extent may be in flight.
        Waits while a commit is under way. A write that fails may be repeated; until then nothing can be committed.
        Raises ``StoreMisuse`` if kept generations, a prepared one among them, need all copies: see ``prepare``.
        """
        with self._entered(extent, nbytes):
            record = self._records[extent.index]
            place = self._place(extent, record.replaceable(self._needed(extent)), self._last + 1)
            self._take_space(extent, place.number)
            record.give_up_shadow()
            self._shadow.pop(extent.index, None)
            if record.num_places > 1:
                self._writes[extent.index] = None  # should Ctrl-C strike before there is a ticket
            ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
            record.replaced(place)
            if record.num_places > 1:
                self._writes[extent.index] = ticket
            return ticket

    def write_shadow(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``, beside what is current, which stays current.

        Reads of the extent may be in flight; no other write may. The bytes become current with ``flip``; without it,
        they are no part of a commit, and the next write takes their place.
        The bytes go to a copy that is neither current nor needed. Waits while a commit is under way.
        Raises ``StorageFull`` if there is no such copy, ``StoreMisuse`` if the extent has one place only: see
        ``places`` of ``create_store``.
        """
        with self._entered(extent, nbytes):
            record = self._records[extent.index]
            if record.num_places == 1:
                raise StoreMisuse(
                    f"extent {extent.index} has one place: nothing can be written beside what is current.",
                    advice="Create the store with places=2, for this extent or for all.",
                )
            needed = self._needed(extent)
            number = record.spare(needed)
            if number is None:
                raise StorageFull(
                    f"nothing can be written beside extent {extent.index}: {self._transfers.where} has "
                    f"{record.num_places} copies, of which the generations {sorted(self._kept)} need "
                    f"{len(needed)}, and what is current takes one.",
                    survives="Nothing has changed.",
                    advice="Release a retained generation, commit or finish first, or create the store with places=2.",
                )
            place = self._place(extent, number, self._last + 1)
            self._take_space(extent, number)
            record.give_up_shadow()
            ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
            self._shadow[extent.index] = ticket
            record.put_shadow(place)
            return ticket

    def flip(self, extent: Extent) -> None:
        """Make current what was written beside ``extent`` last.

        No read of the extent may be in flight. The write may be; a read, and the next write, must wait until it is
        over. If it fails after this, what was current before is current again. Waits while a commit is under way.
        Raises ``StoreMisuse`` if nothing was written beside since the last flip or write, and the error of the write
        if that has failed already. Nothing has changed then.
        """
        with self._entered(extent, extent.nbytes):
            self._records[extent.index].flip()
            self._writes[extent.index] = self._shadow.pop(extent.index)

    def commit(self, metadata: bytes = b"") -> int:
        """Make everything written so far durable, as the next generation; returns its number.

        The generation before it goes, unless it is retained. Raises what a write under way fails with, or
        ``StorageFull`` or ``StorageIOError`` if the manifest cannot be written: nothing has changed then, and
        ``commit`` may be called again. Any other failure is final: the store raises it from then on, and ``open_store``
        finds the last generation or this one.
        """
        with self._alone(reads=True):
            manifest = self._new_generation(metadata)
            self._publish(manifest, NEW)
            return manifest.generation

    def prepare(self, metadata: bytes = b"") -> int:
        """Do all of a commit that can fail for lack of room, durably, and leave the rest to ``finish``; returns the
        number of the generation.

        The last generation stays the committed one, until ``finish`` or ``abandon``. Meanwhile nothing else can be
        committed or prepared, and no place that either generation needs is written. So a write of an extent that
        differs between the two takes a third place: one of ``places=2``, or of a generation that could be retained and
        is not. Without one ``write`` raises ``StoreMisuse`` and ``write_shadow`` ``StorageFull``. Such writes are no
        part of the prepared generation.
        Raises as ``commit``. After a failure that is final, ``open_store`` finds the last generation, with this one
        prepared or without it.
        """
        with self._alone(reads=True):
            manifest = self._new_generation(metadata)
            generation = manifest.generation
            with self._renamed(NEW, prepared_name(generation)):
                self._kept = self._kept | {generation: manifest}
            return generation

    def finish(self) -> int:
        """Make the prepared generation the committed one; returns its number.

        The one before goes, unless it is retained. Extents that were not written since ``prepare``, or since the store
        was opened, hold what the generation has. Raises ``StoreMisuse`` if none is prepared. Any other failure is
        final: ``open_store`` finds the generation committed, or still prepared.
        """
        with self._alone(reads=True):
            generation = self.prepared
            if generation is None:
                raise StoreMisuse(f"{self._transfers.where} has no prepared generation.", advice="Call prepare first.")
            self._publish(self._kept[generation], prepared_name(generation))
            return generation

    def abandon(self) -> None:
        """Give up the prepared generation, if there is one. What is current stays so, and can be committed.

        A failure is final: ``open_store`` finds the last generation, with the other still prepared or without it.
        """
        with self._alone(reads=True):
            generation = self.prepared
            if generation is not None:
                self._remove_for_good(prepared_name(generation), generation)

    def retain(self) -> int:
        """Keep the last generation until it is released, through all commits to come; returns its number.

        Raises ``StorageFull`` if the store has no room for one more: see ``retained_max`` of ``create_store``.
        """
        with self._alone(reads=True):
            if self._last in self._retained:
                return self._last
            if len(self._retained) >= self._base.num_copies - 2:
                raise StorageFull(
                    f"generation {self._last} cannot be retained: {self._transfers.where} has room for "
                    f"{self._base.num_copies - 2} retained generations, and holds {sorted(self._retained)}.",
                    survives="Nothing has changed.",
                    advice="Release one, or create the store with a larger retained_max.",
                )
            with self._renamed(last_name(self._last), retained_name(self._last)):
                self._retained.add(self._last)
            return self._last

    def release(self, generation: int) -> None:
        """Let a retained generation go; its space is used again. Raises ``StoreMissing`` if it is not retained."""
        with self._alone(reads=True):
            if generation not in self._retained:
                raise StoreMissing(f"generation {generation} is not retained; {sorted(self._retained)} are.")
            name = retained_name(generation)
            if generation == self._last:
                with self._renamed(name, last_name(generation)):
                    self._retained.discard(generation)
                return
            self._remove_for_good(name, generation)

    def links(self) -> Links:
        """Account for the names that the data has beside the store's own."""
        try:
            return find_links(self._directory, self._transfers.device.descriptors, self._retained)
        except OSError as error:
            raise failed(f"looking for links to {self._transfers.where}", error) from error

    def release_unlinked(self) -> None:
        """Let the retained generations go that no folder holds any more. All stay as long as the data has a name that
        is not accounted for: see [Note: Links that are accounted for]."""
        links = self.links()
        for generation in self.retained if not links.num_unknown else ():
            if generation not in links.generations:
                self.release(generation)

    def rewind(self) -> None:
        """Give up everything written since the last commit, or since the store was opened. No transfer of the caller's
        may be in flight."""
        with self._alone():
            for ticket in (*self._writes.values(), *self._shadow.values()):
                if ticket is not None:
                    with contextlib.suppress(StorageIOError, StorageFull):  # it is not wanted
                        ticket.wait()
            self._writes.clear()
            self._shadow.clear()
            for record in self._records:
                record.forget()
            self._take_base()

    def manifest_of(self, generation: int) -> Manifest:
        """Manifest of a generation that is kept. Raises ``StoreMissing``."""
        manifest = self._kept.get(generation)
        if manifest is None:
            raise StoreMissing(f"generation {generation} is not kept; {sorted(self._kept)} are.")
        return manifest

    def read_part(self, generation: int, extent: Extent, start: int, address: int, nbytes: int) -> Transfer:
        """Start reading ``nbytes``, from ``start`` on, of what ``extent`` holds in a generation that is kept, whatever
        is current. They come as they are: the checksum is that of the whole extent.

        Raises ``StoreMissing`` if it is not kept, ``StoreMisuse`` if the extent is no part of it.
        """
        with self._entered(extent, extent.nbytes, reads=True):
            entry = self.manifest_of(generation).entries[extent.index]
            if not entry.generation:
                raise StoreMisuse(f"extent {extent.index} is no part of generation {generation}.")
            offset = self._records[extent.index].offset_of(entry.copy) + start
            return self._transfers.read_part(f"extent {extent.index}, generation {generation}", offset, address, nbytes)

    def reserve(self, num_places: Sequence[int]) -> None:
        """Take the space of so many places of each of the first extents. Raises ``StorageFull``; nothing that was
        there is lost then."""
        with self._alone(reads=True):
            ranges: list[tuple[int, int]] = []
            reserved = list(self._reserved)
            for extent, want in zip(self._extents, num_places, strict=False):
                record, have = self._records[extent.index], reserved[extent.index]
                reserved[extent.index] = max(have, min(want, record.num_places))
                numbers = range(have, reserved[extent.index])
                ranges += [(record.offset_of(number), extent.nbytes) for number in numbers]
            self._transfers.reserve(ranges)
            self._reserved = reserved

    def give_back(self) -> None:
        """Give back all space that no kept generation needs. What was written since the last commit is lost; a place is
        reserved again when it is needed. No transfer of the caller's may be in flight."""
        self.rewind()
        with self._alone():
            ranges = []
            for extent in self._extents:
                record, needed = self._records[extent.index], self._needed(extent)
                numbers = (number for number in range(record.num_places) if number not in needed)
                ranges += [(record.offset_of(number), extent.nbytes) for number in numbers]
            self._transfers.device.give_back(ranges)
            self._reserved = [0] * len(self._reserved)

    def link(self, folder: int, directory: Path) -> None:
        """Make the last generation a part of the empty directory ``folder`` (a descriptor), without copying it: hard
        links to the data, and the manifest. ``open_generation`` reads it there.

        It must be retained as long as the directory is needed: see ``release_unlinked``, which looks for it in
        ``directory``, and two below that. Raises ``OSError`` where the file system cannot link.
        """
        with self._alone(reads=True):
            note_linked_in(self._directory, directory)
            for index, descriptor in enumerate(self._transfers.device.descriptors):
                os.link(f"/proc/self/fd/{descriptor}", f"data.{index}", dst_dir_fd=folder)
            publish(RealDirectory(folder), self._kept[self._last])

    def close(self) -> None:
        """Wait for what is in flight, give files and lock back. Uncommitted writes are lost. May be called twice."""
        with self._alone(checked=False):
            self._failure = self._failure or _closed(self._transfers.where)
            self._closers.close()

    def closing(self, call: Callable[[], object]) -> None:
        """Have ``call`` made when the store is closed, after its last transfer."""
        with contextlib.ExitStack() as order:
            order.callback(call)
            order.push(self._closers.pop_all())
            self._closers = order.pop_all()

    @contextlib.contextmanager
    def _entered(self, extent: Extent, nbytes: int, *, reads: bool = False) -> Iterator[None]:
        """Under the lock, once no call has the store alone, or one that lets ``reads`` go on. Raises if the store or
        the caller is not fit for it."""
        self._check_process()
        with self._lock:
            if not (reads and self._reads_go_on):
                self._wait_for_turn()
                if self._failure is not None:
                    raise self._failure
            if not reads:
                self._check_whole()
            if nbytes != extent.nbytes:
                raise StoreMisuse(f"extent {extent.index} has {extent.nbytes} bytes, not {nbytes}.")
            yield

    @contextlib.contextmanager
    def _alone(self, *, checked: bool = True, reads: bool = False) -> Iterator[None]:
        """Without the lock, while all other calls wait: no write begins, and no generation changes. No read begins
        either, unless ``reads`` says that what is current and kept stays as it is."""
        if checked:
            self._check_process()
            self._check_whole()
        me = object()
        try:
            with self._lock:
                self._wait_for_turn()
                if checked and self._failure is not None:
                    raise self._failure
                self._turn_of, self._reads_go_on = me, reads
            yield
        finally:
            with self._lock:
                if self._turn_of is me:
                    self._turn_of, self._reads_go_on = None, False
                    self._lock.notify_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreMisuse(f"{self._transfers.where} belongs to process {self._pid}: a forked child opens its own.")

    def _check_whole(self) -> None:
        if self.damage:
            error = StorageCorrupt(f"{self._transfers.where} is only read: {' '.join(self.damage)}")
            error.advice = "Copy what it holds into another store."
            raise error

    def _wait_for_turn(self) -> None:
        """Sleep, without the lock, until no call has the store alone."""
        if not self._lock.wait_for(lambda: self._turn_of is None, IO_TIMEOUT_S):
            raise StorageTimeout(
                f"{self._transfers.where}: a commit, or another change of generations, is not over for "
                f"{IO_TIMEOUT_S:.0f} s."
            )

    def _take_base(self) -> None:
        """Make current what the generation that the store goes on from holds, where nothing was written since."""
        for extent, record, entry in zip(self._extents, self._records, self._base.entries, strict=True):
            if record.num_places == 1 or extent.index in self._writes:
                continue
            current, wanted = record.current, entry.copy if entry.generation else None
            if wanted is None:
                record.reset(None)
            elif current is None or current.number != wanted:
                record.reset(self._place(extent, wanted, entry.generation, entry.checksum))

    def _take_space(self, extent: Extent, number: int) -> None:
        """The place ``number`` is about to be written."""
        have = self._reserved[extent.index]
        if number < have:
            return
        record = self._records[extent.index]
        self._transfers.reserve([(record.offset_of(k), extent.nbytes) for k in range(have, number + 1)])
        self._reserved[extent.index] = number + 1

    def _place(self, extent: Extent, copy: int, generation: int, value: int | None = None) -> Place:
        """Copy number ``copy`` with bytes of ``generation``, whose checksum is ``value`` if they are there already."""
        label = f"extent {extent.index}, generation {generation}"
        checksum = Checksum(label, seed(self._base.store, extent.index, generation, extent.nbytes), value)
        return Place(copy, self._records[extent.index].offset_of(copy), checksum, generation)

    def _needed(self, extent: Extent) -> set[int]:
        """The copies of ``extent`` that kept generations need."""
        entries = [manifest.entries[extent.index] for manifest in self._kept.values()]
        return {entry.copy for entry in entries if entry.generation}

    def _describe(self, generation: int, metadata: bytes) -> Manifest:
        entries = []
        for extent, record in zip(self._extents, self._records, strict=True):
            place, places = record.current, self._base.entries[extent.index].places
            if place is None or record.num_places == 1:
                entries.append(Entry(extent.nbytes, 0, 0, 0, places))
            else:
                entries.append(Entry(extent.nbytes, place.generation, place.number, _sealed(place), places))
        chunks = tuple(self._transfers.device.table())
        base = self._base
        return Manifest(
            base.store, generation, base.num_copies, base.num_paths, tuple(entries), chunks, bytes(metadata)
        )

    def _new_generation(self, metadata: bytes) -> Manifest:
        """Everything written so far as the next generation: steps 1 to 3 of [Note: The commit]."""
        if self.prepared is not None:
            raise StoreMisuse(
                f"generation {self.prepared} of {self._transfers.where} is prepared.", advice="Finish or abandon it."
            )
        for index, ticket in self._writes.items():
            if ticket is None:
                raise StorageIOError(f"write of extent {index} was interrupted.", advice="Repeat it.")
            ticket.wait()
        for ticket in self._shadow.values():
            with contextlib.suppress(StorageIOError, StorageFull):  # no part of the generation
                ticket.wait()
        generation = self._last + 1
        with self._fatal(f"sync of the data of generation {generation}"):
            self._transfers.sync()
        manifest = self._describe(generation, metadata)
        self._write_new(manifest)
        self._writes.clear()
        return manifest

    def _write_new(self, manifest: Manifest) -> None:
        try:
            put_new(self._directory, manifest)
        except OSError as error:
            raise failed(f"manifest of generation {manifest.generation} of {self._transfers.where}", error) from error

    def _publish(self, manifest: Manifest, name: str) -> None:
        """Make it the last generation; so far its manifest is called ``name``."""
        before, generation = self._last, manifest.generation
        with self._renamed(name, last_name(generation)):
            self._base, self._last = manifest, generation
            self._kept = {number: self._kept[number] for number in self._retained} | {generation: manifest}
            with self._lock:
                self._take_base()
        with contextlib.suppress(OSError):  # the next owner removes what is left, and what is not said is not known
            self._say_committed(before, generation)
            if before not in self._retained:
                self._directory.remove(last_name(before))

    def _say_committed(self, before: int, generation: int) -> None:
        """See [Note: What was acknowledged]."""
        try:
            self._directory.rename(committed_name(before), committed_name(generation))
        except FileNotFoundError:
            self._directory.create(committed_name(generation), b"")

    def _remove_for_good(self, name: str, generation: int) -> None:
        """Give up a generation, whose manifest is called ``name``: that must be gone for good before its copies are
        written again."""
        with self._for_good(f"removal of {name}", lambda: self._directory.remove(name)):
            self._retained.discard(generation)
            if generation != self._base.generation:
                self._kept = {number: kept for number, kept in self._kept.items() if number != generation}

    @contextlib.contextmanager
    def _renamed(self, old: str, new: str) -> Iterator[None]:
        with self._for_good(f"publication of {new}", lambda: self._directory.rename(old, new)):
            yield

    @contextlib.contextmanager
    def _for_good(self, what: str, change: Callable[[], None]) -> Iterator[None]:
        """Change a name on disk; what it means in memory is done in the body.

        If that fails or is interrupted before both are done, the store may believe what the disk does not hold: it
        serves nothing more.
        """
        with self._fatal(what):
            try:
                change()
                self._directory.sync()
            except OSError as error:
                raise failed(f"{what} of {self._transfers.where}", error) from error
            yield

    @contextlib.contextmanager
    def _fatal(self, what: str) -> Iterator[None]:
        """An error or an interruption in the body is final: the store raises it from then on."""
        self._failure = StorageIOError(f"{what} was interrupted on {self._transfers.where}.")
        try:
            yield
        except StorageError as error:
            self._failure = error
            raise
        self._failure = None


def _sealed(place: Place) -> int:
    """The checksum of a place whose write is over and good."""
    if place.checksum.error is not None:
        raise place.checksum.error
    if place.checksum.value is None:
        raise StorageIOError(f"write of {place.checksum.label} has no checksum.", advice="Repeat it.")
    return place.checksum.value


def _closed(where: str) -> OffloadError:
    return StoreMisuse(f"{where} is closed.")
