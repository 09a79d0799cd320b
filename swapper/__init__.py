"""A store for large blobs on local SSDs: preallocated extents, one arena of buffers, a ticket for each transfer."""

from swapper.arena import PAGE_BYTES, Arena, Lease, align
from swapper.errors import (
    OffloadError,
    StorageError,
    StorageFull,
    StorageIOError,
    StorageTimeout,
    StoreLocked,
    StoreUnsafe,
)
from swapper.store import Extent, Store, Ticket

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "Extent",
    "Lease",
    "OffloadError",
    "StorageError",
    "StorageFull",
    "StorageIOError",
    "StorageTimeout",
    "Store",
    "StoreLocked",
    "StoreUnsafe",
    "Ticket",
    "align",
]
