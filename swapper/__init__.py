"""A store for large blobs on local SSDs: preallocated extents, one arena of buffers, a ticket for each transfer."""

from swapper.arena import PAGE_BYTES, Arena, Lease, align
from swapper.copying import copy_generation
from swapper.durable import DurableStore
from swapper.errors import (
    OffloadError,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageIOError,
    StorageTimeout,
    StoreExists,
    StoreLocked,
    StoreMissing,
    StoreMisuse,
    StoreUnsafe,
    WeightsChanged,
    readable_bytes,
)
from swapper.extent import Extent
from swapper.folders import create_store, open_store, remove_store, remove_unfinished
from swapper.generation import (
    Generation,
    check_generation,
    generation_manifest,
    generation_metadata,
    open_generation,
)
from swapper.in_place import FilePart, InPlaceFiles, InPlaceRecord, ReadBytes, ReadOnlyFile
from swapper.ranges import Ranges
from swapper.scratch import Scratch, ScratchRange, open_scratch
from swapper.spool import Spool, let_go
from swapper.ticket import Ticket, waiting

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "DurableStore",
    "Extent",
    "FilePart",
    "Generation",
    "InPlaceFiles",
    "InPlaceRecord",
    "Lease",
    "OffloadError",
    "Ranges",
    "ReadBytes",
    "ReadOnlyFile",
    "Scratch",
    "ScratchRange",
    "Spool",
    "StorageCorrupt",
    "StorageError",
    "StorageFull",
    "StorageIOError",
    "StorageTimeout",
    "StoreExists",
    "StoreLocked",
    "StoreMissing",
    "StoreMisuse",
    "StoreUnsafe",
    "Ticket",
    "WeightsChanged",
    "align",
    "check_generation",
    "copy_generation",
    "create_store",
    "generation_manifest",
    "generation_metadata",
    "let_go",
    "open_generation",
    "open_scratch",
    "open_store",
    "readable_bytes",
    "remove_store",
    "remove_unfinished",
    "waiting",
]
