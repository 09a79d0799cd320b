"""Saving in the foreground: all records are copied, where no store can hold a generation while training goes on."""

from __future__ import annotations

from offload.checkpoint.native.folder import SavingDirectory
from offload.checkpoint.native.records import EngineRecords
from swapper import create_store, waiting
from swapper.errors import failed
from swapper.owner import NAME as OWNER

_NAME = "copy"
"""Of the store in the unfinished folder: it becomes the checkpoint's."""


def save_copy(records: EngineRecords, directory: SavingDirectory, metadata: bytes) -> None:
    """Copy every record into a store in a new folder, and give it its tag, once the last step's update is over.

    Memory: the weights or the gradients of one unit, where they are not resident. Raises ``StorageFull`` before
    anything is written if the room is too small.
    """
    layout = records.layout()
    extents = {extent.index: extent for of_unit in layout for extent in of_unit.all}
    present = {extent.index for record in records.within(layout, gradients=True) for extent, _ in record.parts}
    sizes = [extents[index].nbytes for index in range(len(extents))]
    try:
        with directory.unfinished() as folder:
            with create_store([folder], _NAME, sizes, reserved=[int(index in present) for index in extents]) as store:
                for record in records.within(layout, gradients=True):
                    with records.lent(record) as address, waiting() as tickets:
                        for extent, start in record.parts:
                            target = store.extents[extent.index]
                            tickets.append(store.write(target, address + start, extent.nbytes))
                store.commit(metadata)
            copied = folder / f"{_NAME}.store"
            (copied / OWNER).unlink(missing_ok=True)
            directory.publish(copied)
    except OSError as error:
        raise failed(f"saving the checkpoint in {directory.path}", error) from error
