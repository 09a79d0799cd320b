"""The one tree of errors: whatever the engine, the store or the disk refuses is an ``OffloadError``."""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Base of every error raised on purpose. The message says what, where, the numbers and the way out."""


class StoreUnsafe(OffloadError):
    """The path cannot hold a store: missing, not a directory, or not writable. Nothing was created."""


class StoreLocked(OffloadError):
    """Another owner holds the path. Nothing was created and nothing of the owner's was touched."""


class StorageError(OffloadError):
    """The store could not do what it was asked: see the kinds below."""


class StorageFull(StorageError):
    """The file system has no room for what must be reserved. Nothing is left behind."""


class StorageIOError(StorageError):
    """The device failed a transfer. What the extent held is lost; everything in memory is intact."""


class StorageTimeout(StorageError):
    """A transfer did not complete within its deadline. Its buffer stays with the queue."""
