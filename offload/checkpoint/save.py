"""Saving: a generation of the engine's store is linked into a folder, or all records are copied there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import aio_ext
from offload.checkpoint.commit import Committer
from offload.checkpoint.description import Description, parts_of
from offload.checkpoint.folder import CheckpointDirectory
from offload.optim.formats import Formats
from offload.tiers.gradients import GradientStore
from offload.tiers.home import UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import UnitSpec
from swapper import DurableStore, Extent, Ticket, align, create_store
from swapper.errors import failed

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP)


class LinkedCheckpoints:
    """Checkpoints that are generations of the engine's store, on the same file system. The store keeps what they need
    until their folders are gone."""

    def __init__(self, committer: Committer) -> None:
        """Also knows those of the processes that had the store before. One that was never finished is given up."""
        self._committer = committer
        self._folders: dict[int, Path] = {}
        for number in committer.store.retained:
            description = Description.decode(committer.store.metadata_of(number), f"generation {number}")
            self._folders[number] = Path(description.run["folder"])
        self.release_removed()

    @property
    def any(self) -> bool:
        """There are some."""
        return bool(self._folders)

    def can_save(self, directory: CheckpointDirectory, paths: Sequence[Path]) -> bool:
        """The store can hold one more, and can be linked there."""
        self.release_removed()
        return (
            len(paths) == 1
            and len(self._folders) < self._committer.checkpoints_max
            and directory.path.stat().st_dev == paths[0].stat().st_dev
        )

    def save(self, directory: CheckpointDirectory, tag: str, metadata: bytes) -> bool:
        """Commit, retain and link the generation; False if the file system cannot link, then nothing was saved.

        Raises ``StorageFull`` before anything has changed.
        """
        store = self._committer.store
        self._committer.reserve()
        generation = self._committer.commit(metadata, with_gradients=True)
        store.retain()
        folder = directory.path.absolute() / directory.unfinished()
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            store.link(descriptor)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            store.release(generation)
            if error.errno in _NO_LINKS:
                return False
            raise failed(f"linking the checkpoint into {directory.path}", error) from error
        finally:
            os.close(descriptor)
        target = directory.folder(tag).absolute()
        replaced = [number for number, path in self._folders.items() if path == target]
        self._folders[generation] = target
        try:
            directory.publish(folder, tag)
        except OSError as error:  # it may have its tag: the space stays
            raise failed(f"naming the checkpoint {target}", error) from error
        for number in replaced:
            self._release(number)
        return True

    def removing(self, folder: Path) -> None:
        """The checkpoint in this folder is gone."""
        for number in [number for number, path in self._folders.items() if path == folder.absolute()]:
            self._release(number)

    def release_removed(self) -> None:
        """Use the space again of checkpoints that the user has removed."""
        for number in [number for number, path in self._folders.items() if not path.exists()]:
            self._release(number)

    def _release(self, number: int) -> None:
        del self._folders[number]
        self._committer.store.release(number)


def copy_layout(
    units: Sequence[UnitSpec], homes: Sequence[UnitHomes], formats: Formats
) -> tuple[list[int], list[RecordExtents]]:
    """Sizes of the extents that a copy of all records takes, and which record is in which."""
    sizes: list[int] = []

    def extent(nbytes: int) -> Extent:
        sizes.append(align(nbytes))
        return Extent(len(sizes) - 1, 0, align(nbytes))

    records = []
    for unit, of_unit in zip(units, homes, strict=True):
        weights = tuple(extent(nbytes) for _, nbytes in parts_of(unit, formats.weights))
        tiles = tuple(extent(tile.tile.nbytes) for tile in of_unit.tiles)
        gradients = extent(unit.trainable_numel * formats.grads) if unit.trainable_numel and formats.grads else None
        records.append(RecordExtents(weights, tiles, gradients))
    return sizes, records


def copy_checkpoint(
    directory: CheckpointDirectory,
    tag: str,
    units: Sequence[UnitSpec],
    homes: Sequence[UnitHomes],
    formats: Formats,
    gradients: GradientStore,
    gradient_dtype: torch.dtype,
    borrow_weights: Callable[[UnitSpec], contextlib.AbstractContextManager[int]],
    metadata: bytes,
) -> None:
    """Copy every record into a store in a new folder, whose layout is that of ``copy_layout``, and give it its tag.

    Raises ``StorageFull`` before anything is written if the room is too small.
    """
    sizes, records = copy_layout(units, homes, formats)
    name = directory.unfinished().removeprefix(".")
    present = [1] * len(sizes)
    for unit, extents in zip(units, records, strict=True):
        if extents.gradients is not None and not gradients.of(unit):
            present[extents.gradients.index] = 0
    folder = directory.path / f"{name}.store"
    try:
        with create_store([directory.path], name, sizes, reserved=present) as store:
            _copy(store, units, homes, formats, gradients, gradient_dtype, borrow_weights, records)
            store.commit(metadata)
        hidden = directory.path / f".{name}"
        folder.rename(hidden)
        (hidden / "owner").unlink(missing_ok=True)
        directory.publish(hidden, tag)
    except OSError as error:
        raise failed(f"saving the checkpoint in {directory.path}", error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it is still there if it was not finished


def _copy(
    store: DurableStore,
    units: Sequence[UnitSpec],
    homes: Sequence[UnitHomes],
    formats: Formats,
    gradients: GradientStore,
    gradient_dtype: torch.dtype,
    borrow_weights: Callable[[UnitSpec], contextlib.AbstractContextManager[int]],
    records: Sequence[RecordExtents],
) -> None:
    for unit, of_unit, extents in zip(units, homes, records, strict=True):
        with borrow_weights(unit) as address:
            tickets: list[Ticket] = []
            for extent, (start, _) in zip(extents.weights, parts_of(unit, formats.weights), strict=True):
                tickets.append(store.write(store.extents[extent.index], address + start, extent.nbytes))
            for ticket in tickets:
                ticket.wait()
        for tile, extent in zip(of_unit.tiles, extents.tiles, strict=True):
            with tile.states.borrow(change=False) as address:
                store.write(store.extents[extent.index], address, extent.nbytes).wait()
        if extents.gradients is not None and gradients.of(unit):
            memory = aio_ext.Memory(extents.gradients.nbytes)
            gradients.copy_to(unit, memory.address, gradient_dtype)
            store.write(store.extents[extents.gradients.index], memory.address, memory.nbytes).wait()
            memory.close()
