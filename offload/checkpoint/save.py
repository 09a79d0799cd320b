"""Saving in the foreground: all records are copied, where no store can hold a generation while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

import aio_ext
from offload.checkpoint.description import parts_of
from offload.checkpoint.folder import CheckpointDirectory
from offload.optim.formats import Formats
from offload.tiers.gradients.store import GradientStore
from offload.tiers.home import UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import UnitSpec
from swapper import DurableStore, Extent, align, create_store
from swapper.errors import failed

_NAME = "copy"
"""Of the store in the unfinished folder: it becomes the checkpoint's."""


@dataclass(frozen=True)
class RecordCopy:
    """The records of an engine, to be copied once the last step's update is over.

    Memory: the weights or the gradients of one unit, where they are not resident.
    """

    units: Sequence[UnitSpec]
    homes: Sequence[UnitHomes]
    formats: Formats
    gradients: GradientStore
    gradient_dtype: torch.dtype
    borrow_weights: Callable[[UnitSpec], contextlib.AbstractContextManager[int]]

    def layout(self) -> tuple[list[int], list[RecordExtents]]:
        """Sizes of the extents that the copy takes, and which record is in which."""
        sizes: list[int] = []

        def extent(nbytes: int) -> Extent:
            sizes.append(align(nbytes))
            return Extent(len(sizes) - 1, 0, align(nbytes))

        records = []
        for unit, of_unit in zip(self.units, self.homes, strict=True):
            weights = tuple(extent(nbytes) for _, nbytes in parts_of(unit, self.formats.weights))
            tiles = tuple(extent(tile.tile.nbytes) for tile in of_unit.tiles)
            has_gradients = unit.trainable_numel and self.formats.grads
            gradients = extent(unit.trainable_numel * self.formats.grads) if has_gradients else None
            records.append(RecordExtents(weights, tiles, gradients))
        return sizes, records

    def save(self, directory: CheckpointDirectory, tag: str, metadata: bytes) -> None:
        """Copy every record into a store in a new folder, and give it its tag.

        Raises ``StorageFull`` before anything is written if the room is too small.
        """
        sizes, records = self.layout()
        present = [1] * len(sizes)
        for unit, extents in zip(self.units, records, strict=True):
            if extents.gradients is not None and not self.gradients.of(unit):
                present[extents.gradients.index] = 0
        try:
            with directory.unfinished() as folder:
                with create_store([folder], _NAME, sizes, reserved=present) as store:
                    for unit, homes, extents in zip(self.units, self.homes, records, strict=True):
                        self._copy(store, unit, homes, extents)
                    store.commit(metadata)
                copied = folder / f"{_NAME}.store"
                (copied / "owner").unlink(missing_ok=True)
                directory.publish(copied, tag)
        except OSError as error:
            raise failed(f"saving the checkpoint in {directory.path}", error) from error

    def _copy(self, store: DurableStore, unit: UnitSpec, homes: UnitHomes, extents: RecordExtents) -> None:
        with self.borrow_weights(unit) as address:
            starts = [address + start for start, _ in parts_of(unit, self.formats.weights)]
            _write(store, zip(extents.weights, starts, strict=True))
        for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
            with tile.states.borrow(change=False) as address:
                _write(store, [(extent, address)])
        if extents.gradients is not None and self.gradients.of(unit):
            with aio_ext.Memory(extents.gradients.nbytes) as memory:
                self.gradients.copy_to(unit, memory.address, self.gradient_dtype)
                _write(store, [(extents.gradients, memory.address)])


def _write(store: DurableStore, parts: Iterable[tuple[Extent, int]]) -> None:
    """Write extents from these addresses. Returns when that is done."""
    tickets = [store.write(store.extents[extent.index], address, extent.nbytes) for extent, address in parts]
    for ticket in tickets:
        ticket.wait()
