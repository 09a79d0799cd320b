"""A durable store: what was committed is there after any crash, whole, under the number of its generation.

[Note: Copies] There is room for several copies of every extent: they are the places of its record, see [Note: Places].
A copy that a kept generation needs is never written: a write goes to a copy that is neither needed nor current, and
writes over the current one if there is no other. So until a commit is complete the last generation is untouched,
and a retained generation costs no time, only its space. An extent with one place is scratch: it is written over, and
is no part of any generation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

import aio_ext
from swapper.arena import Arena
from swapper.device import Device, Transfer, add_up
from swapper.directory import Directory, RealDirectory
from swapper.errors import OffloadError, StoreMisuse, failed
from swapper.extent import Extent
from swapper.kept import KeptGenerations
from swapper.links import REPLACES, Links, find_links, note_linked_in
from swapper.manifest import Manifest
from swapper.places import Places
from swapper.publication import NEW, layout_of, prepared_name, publish
from swapper.space import Space
from swapper.ticket import Ticket, Transfers
from swapper.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Self

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Method: TypeAlias = "Callable[Concatenate[DurableStore, _P], _Result]"


def _alone(*, checked: bool = True, reads: bool = False) -> Callable[[_Method[_P, _Result]], _Method[_P, _Result]]:
    """The method has the store alone: see ``Turns.alone``."""

    def decorate(method: _Method[_P, _Result]) -> _Method[_P, _Result]:
        @wraps(method)
        def alone(store: DurableStore, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
            return store._turns.alone(lambda: method(store, *args, **kwargs), checked=checked, reads=reads)

        return alone

    return decorate


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
        self._turns = Turns(where, damage)
        self._generations = KeptGenerations(directory, self._turns, where, kept, retained, last, base)
        extents, records, _ = layout_of(self._generations.base)
        self._space = Space(self._transfers, extents, records, () if damage else reserved)
        self._places = Places(self._transfers, self._turns, self._generations, self._space, extents, records)
        self._closers = contextlib.ExitStack()
        self._closers.callback(self._transfers.close)
        self._closers.callback(self._space.close)

    def publish_first(self) -> None:
        """Publish generation 0 of a new store."""
        self._generations.publish_first()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents, in the order in which their sizes were given."""
        return self._places.extents

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
    def has_failed(self) -> bool:
        """A failure was final: every call raises it from then on."""
        return self._turns.failure is not None

    @property
    def generation(self) -> int:
        """The number of the generation that the store was last committed as, or opened at."""
        return self._generations.base.generation

    @property
    def metadata(self) -> bytes:
        """Metadata that was given to ``commit`` with that generation."""
        return self._generations.base.metadata

    @property
    def generations(self) -> tuple[int, ...]:
        """The generations that can be opened, oldest first: those retained, and the last."""
        return tuple(sorted(self._generations.retained | {self._generations.last}))

    @property
    def retained(self) -> tuple[int, ...]:
        """The generations that stay until they are released, oldest first."""
        return tuple(sorted(self._generations.retained))

    @property
    def prepared(self) -> int | None:
        """The generation that was prepared, by this owner or the one before, and is neither finished nor abandoned."""
        return self._generations.prepared

    def holds(self, extent: Extent) -> bool:
        """The extent is a part of the last generation."""
        return self.manifest_of(self.generation).entries[extent.index].generation > 0

    @property
    def identity(self) -> bytes:
        """Identity of the store, which no other one has: 16 bytes."""
        return self._generations.base.store

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
        pairs = zip(self._places.extents, self._places.records, strict=True)
        return [(extent.nbytes, record.num_places) for extent, record in pairs]

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
        return self._places.read(extent, address, nbytes, urgent=urgent)

    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``; later reads take these bytes.

        The bytes go to a copy that is neither current nor needed by a kept generation, if there is one. Then the old
        bytes are current again if the write fails; otherwise they are lost. What was written beside and not flipped is
        given up. No read and no other write of the extent may be in flight.
        Waits while a commit is under way. A write that fails may be repeated; until then nothing can be committed.
        Raises ``StoreMisuse`` if kept generations, a prepared one among them, need all copies: see ``prepare``.
        """
        return self._places.write(extent, address, nbytes, urgent=urgent)

    def write_shadow(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``, beside what is current, which stays current.

        Reads of the extent may be in flight; no other write may. The bytes become current with ``flip``; without it,
        they are no part of a commit, and the next write takes their place.
        The bytes go to a copy that is neither current nor needed. Waits while a commit is under way.
        Raises ``StorageFull`` if there is no such copy, ``StoreMisuse`` if the extent has one place only: see
        ``places`` of ``create_store``.
        """
        return self._places.write_shadow(extent, address, nbytes, urgent=urgent)

    def flip(self, extent: Extent) -> None:
        """Make current what was written beside ``extent`` last.

        No read of the extent may be in flight. The write may be; a read, and the next write, must wait until it is
        over. If it fails after this, what was current before is current again. Waits while a commit is under way.
        Raises ``StoreMisuse`` if nothing was written beside since the last flip or write, and the error of the write
        if that has failed already. Nothing has changed then.
        """
        self._places.flip(extent)

    def discard(self, extent: Extent) -> None:
        """Leave ``extent`` out of the generations to come, until it is written again: as before its first write.

        Generations that are kept have it still. No transfer of it may be in flight. Waits while a commit is under way.
        """
        self._places.discard(extent)

    @_alone(reads=True)
    def commit(self, metadata: bytes = b"") -> int:
        """Make everything written so far durable, as the next generation; returns its number.

        The generation before it goes, unless it is retained. Raises what a write under way fails with, or
        ``StorageFull`` or ``StorageIOError`` if the manifest cannot be written: nothing has changed then, and
        ``commit`` may be called again. Any other failure is final: the store raises it from then on, and ``open_store``
        finds the last generation or this one.
        """
        manifest = self._new_generation(metadata)
        self._publish(manifest, NEW)
        return manifest.generation

    @_alone(reads=True)
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
        manifest = self._new_generation(metadata)
        self._generations.prepare(manifest)
        return manifest.generation

    @_alone(reads=True)
    def finish(self) -> int:
        """Make the prepared generation the committed one; returns its number.

        The one before goes, unless it is retained. Extents that were not written since ``prepare``, or since the store
        was opened, hold what the generation has. Raises ``StoreMisuse`` if none is prepared. Any other failure is
        final: ``open_store`` finds the generation committed, or still prepared.
        """
        generation = self.prepared
        if generation is None:
            raise StoreMisuse(f"{self._transfers.where} has no prepared generation.", advice="Call prepare first.")
        self._publish(self._generations.manifest_of(generation), prepared_name(generation))
        return generation

    @_alone(reads=True)
    def abandon(self) -> None:
        """Give up the prepared generation, if there is one. What is current stays so, and can be committed.

        A failure is final: ``open_store`` finds the last generation, with the other still prepared or without it.
        """
        self._generations.abandon()

    @_alone(reads=True)
    def retain(self) -> int:
        """Keep the last generation until it is released, through all commits to come; returns its number.

        Raises ``StorageFull`` if the store has no room for one more: see ``retained_max`` of ``create_store``.
        """
        self._generations.retain()
        return self._generations.last

    @_alone(reads=True)
    def release(self, generation: int) -> None:
        """Let a retained generation go; its space is used again. Raises ``StoreMissing`` if it is not retained."""
        self._generations.release(generation)

    def links(self) -> Links:
        """Account for the names that the data has beside the store's own."""
        try:
            return find_links(self._directory, self._transfers.device.descriptors, self._generations.retained)
        except OSError as error:
            raise failed(f"looking for links to {self._transfers.where}", error) from error

    def release_unlinked(self) -> None:
        """Let the retained generations go that no folder holds any more. All stay as long as the data has a name that
        is not accounted for: see [Note: Links that are accounted for]."""
        links = self.links()
        for generation in self.retained if not links.num_unknown else ():
            if generation not in links.generations:
                self.release(generation)

    @_alone()
    def rewind(self) -> None:
        """Give up everything written since the last commit, or since the store was opened. No transfer of the caller's
        may be in flight."""
        self._places.give_up()

    def manifest_of(self, generation: int) -> Manifest:
        """Manifest of a generation that is kept. Raises ``StoreMissing``."""
        return self._generations.manifest_of(generation)

    def read_part(self, generation: int, extent: Extent, start: int, address: int, nbytes: int) -> Transfer:
        """Start reading ``nbytes``, from ``start`` on, of what ``extent`` holds in a generation that is kept, whatever
        is current. They come as they are: the checksum is that of the whole extent.

        Raises ``StoreMissing`` if it is not kept, ``StoreMisuse`` if the extent is no part of it.
        """
        return self._places.read_part(generation, extent, start, address, nbytes)

    @_alone(reads=True)
    def reserve(self, num_places: Sequence[int]) -> None:
        """Take the space of so many places of each of the first extents. Raises ``StorageFull``; nothing that was
        there is lost then."""
        self._space.reserve(num_places)

    def give_back(self) -> None:
        """Give back all space that no kept generation needs. What was written since the last commit is lost; a place is
        reserved again when it is needed. No transfer of the caller's may be in flight."""
        self.rewind()
        self._turns.alone(lambda: self._space.give_back(self._places.needed()))

    @_alone(reads=True)
    def link(self, folder: int, directory: Path) -> None:
        """Make the last generation a part of the empty directory ``folder`` (a descriptor), without copying it: hard
        links to the data, and the manifest. ``open_generation`` reads it there.

        It must be retained as long as the directory is needed: see ``release_unlinked``, which looks for it in
        ``directory``, and two below that. Raises ``OSError`` where the file system cannot link.
        """
        note_linked_in(self._directory, directory)
        for index, descriptor in enumerate(self._transfers.device.descriptors):
            os.link(f"/proc/self/fd/{descriptor}", f"data.{index}", dst_dir_fd=folder)
        publish(RealDirectory(folder), self._generations.manifest_of(self._generations.last))

    @_alone(checked=False)
    def close(self) -> None:
        """Wait for what is in flight, give files and lock back. Uncommitted writes are lost. May be called twice."""
        self._turns.failure = self._turns.failure or _closed(self._transfers.where)
        self._closers.close()

    def closing(self, call: Callable[[], object]) -> None:
        """Have ``call`` made when the store is closed, after its last transfer."""
        with contextlib.ExitStack() as order:
            order.callback(call)
            order.push(self._closers.pop_all())
            self._closers = order.pop_all()

    def _new_generation(self, metadata: bytes) -> Manifest:
        """Everything written so far as the next generation: steps 1 to 3 of [Note: The commit]."""
        self._generations.check_none_prepared()
        self._places.wait_for_writes()
        base, generation = self._generations.base, self._generations.next
        with self._turns.fatal(f"sync of the data of generation {generation}"):
            self._transfers.sync()
        manifest = replace(
            base,
            generation=generation,
            entries=self._places.entries(),
            chunks=tuple(self._transfers.device.table()),
            metadata=bytes(metadata),
        )
        self._generations.write_new(manifest)
        self._places.described()
        return manifest

    def _publish(self, manifest: Manifest, name: str) -> None:
        """Make it the last generation; so far its manifest is called ``name``."""
        with self._generations.published(manifest, name), self._turns.lock:
            self._places.take_base()


def _closed(where: str) -> OffloadError:
    return StoreMisuse(f"{where} is closed.")
