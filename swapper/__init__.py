"""A store for large blobs on local SSDs: preallocated extents, one arena of buffers, a ticket for each transfer."""

from swapper.arena import PAGE_BYTES, Arena, Lease, align
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
    readable_bytes,
)
from swapper.folders import create_store, open_store, remove_store
from swapper.generation import Generation, generation_metadata, open_generation
from swapper.spool import Spool, let_go
from swapper.store import AnyStore, Extent, Store
from swapper.ticket import Ticket

__all__ = [
    "PAGE_BYTES",
    "AnyStore",
    "Arena",
    "DurableStore",
    "Extent",
    "Generation",
    "Lease",
    "OffloadError",
    "Spool",
    "StorageCorrupt",
    "StorageError",
    "StorageFull",
    "StorageIOError",
    "StorageTimeout",
    "Store",
    "StoreExists",
    "StoreLocked",
    "StoreMissing",
    "StoreMisuse",
    "StoreUnsafe",
    "Ticket",
    "align",
    "create_store",
    "generation_metadata",
    "let_go",
    "open_generation",
    "open_store",
    "readable_bytes",
    "remove_store",
]
