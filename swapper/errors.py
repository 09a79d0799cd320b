"""The one tree of errors: each refusal of the engine, the store or the disk is an ``OffloadError``.

[Note: The table of errors] Each class says in four lines what happened, which numbers its message carries, what
survives and what to do. The last two end every message, and all make the table in ``docs/reliability.md``.
A message ends with the command that prints the heading of its class in ``docs/troubleshooting.md``.
"""

from __future__ import annotations

import errno
import resource

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers by which the system says that a file system or a quota is full."""


class OffloadError(RuntimeError):
    """Base of every error raised on purpose. The message says what, where, the numbers and the way out."""

    happened = ""
    numbers = ""
    survives = ""
    advice = ""
    explained = False
    """``docs/troubleshooting.md`` has a heading for the class."""

    def __init_subclass__(cls, *, explained: bool = True) -> None:
        """``explained=False`` for errors whose message says all that there is to say, as those of bad input do."""
        super().__init_subclass__()
        cls.explained = explained

    def __init__(self, what: str, *, survives: str | None = None, advice: str | None = None) -> None:
        super().__init__(what)
        if survives is not None:
            self.survives = survives
        if advice is not None:
            self.advice = advice

    def __str__(self) -> str:
        way_out = " ".join(line for line in (self.survives, self.advice) if line)
        read_on = f" (offload explain {type(self).__name__})" if self.explained else ""
        return "\n  ".join(line for line in (super().__str__(), way_out) if line) + read_on


class StoreUnsafe(OffloadError):
    """The path cannot hold a store: missing, no directory, not writable, not local, or not what this package made."""

    happened = (
        "The path is missing, not a directory, not writable or not on a local disk; or the store in it is a symbolic "
        "link, or others may change it."
    )
    numbers = "the path, and what the system said of it"
    survives = "Nothing was created or changed."
    advice = "Give a directory of your own on a local SSD."


class StoreLocked(OffloadError):
    """A durable store is open already, here or in another process."""

    happened = "Another owner has the durable store open."
    numbers = "process id, host and start time of the owner"
    survives = "Nothing of the owner's was touched."
    advice = "Wait for the owner to end, or give another name or directory. A store without a name is never locked."


class StoreMissing(OffloadError):
    """There is no store, or no such generation, under this name."""

    happened = "The store was never created under this name, its creation did not finish, or it has no such generation."
    numbers = "the path, and the generations that are there"
    survives = "Nothing was created or changed."
    advice = "See what is there: `python -m swapper inspect PATH`."


class StoreExists(OffloadError):
    """A store that was to be created is there already."""

    happened = "A durable store of this name is there already."
    numbers = "the path"
    survives = "It was not touched."
    advice = "Open it, or give another name."


class StoreMisuse(OffloadError, ValueError):
    """The store was asked for what no store can do."""

    happened = (
        "A size that is not the extent's, an extent that was never written or has no second place, a flip of nothing, "
        "a store that is closed or the parent's."
    )
    numbers = "the extent, and the sizes asked for and expected"
    survives = "Nothing has changed."
    advice = "This is a mistake in the calling program."


class StorageError(OffloadError):
    """The store could not do what it was asked: see the kinds below."""


class StorageFull(StorageError):
    """The file system has no room for what must be reserved or written."""

    happened = (
        "The file system, a quota or a limit of this process has no room, at the start or (copy-on-write file systems) "
        "in the middle; or a durable store has no free copy."
    )
    numbers = "the bytes needed and the bytes free, or the range that was written"
    survives = "At the start nothing is left behind; later, what is in memory and the last committed generation."
    advice = "Free some space, or give another path."


class StorageIOError(StorageError):
    """The device failed a transfer, a sync, or the publication of a generation."""

    happened = "The device said no: a read or a write (after a second try), a sync, or a step of a commit."
    numbers = "file, range, error of the system, bytes done"
    survives = "What is in memory, and the last committed generation. What a store without a name held is lost."
    advice = "Resume from the last commit or checkpoint. The device may be failing: see `dmesg`."


class StorageTimeout(StorageError):
    """A transfer did not complete within its deadline. Its buffer stays with the queue."""

    happened = "The device did not answer within the deadline."
    numbers = "what was waited for, and how many seconds"
    survives = "What is in memory, and the last committed generation. The buffers in flight stay parked."
    advice = "The device may be hung: see `dmesg`. End the process; resume from the last commit or checkpoint."


class StorageCorrupt(StorageError):
    """The device returned bytes that are not the ones that were written there. They were not used.

    ``expected`` and ``seen`` are checksums.
    """

    happened = "Bytes came back changed, stale, torn or from another place: the checksum is wrong, twice in a row."
    numbers = "the extent, its range and generation, the checksum expected and the one seen"
    survives = "Nothing wrong was used. Every other extent, and each generation that `scrub` finds whole."
    advice = "Find out how much is affected: `python -m swapper scrub PATH`; go back to a generation that is whole."

    def __init__(self, what: str, *, expected: int = 0, seen: int = 0) -> None:
        super().__init__(what)
        self.expected = expected
        self.seen = seen


class WeightsChanged(StorageError):
    """A file whose weights are read where they are is not what it was, or was to be changed. Nothing wrong was used."""

    happened = (
        "A weights file that is read in place has another size, inode, time of change or checksum than before, or its "
        "frozen weights were to be changed."
    )
    numbers = "the file, the range, and what it was and is"
    survives = "What was trained, up to the last commit or checkpoint. The file was not written."
    advice = "Put the file back as it was, or make the engine anew with the file that is there now."


def failed(what: str, error: OSError) -> StorageError:
    """Turn what the system said of an operation into the error that the user gets."""
    kind = StorageFull if error.errno in NO_ROOM else StorageIOError
    return kind(f"{what} failed: {error}.", advice=of_limit(error))


def no_room(what: str, error: OSError) -> StorageError:
    """Turn what the system said when space was to be taken into the error that the user gets: a limit of the size of
    files is a lack of room, too; a device that fails is none."""
    kind = StorageFull if error.errno in (*NO_ROOM, errno.EFBIG) else StorageIOError
    return kind(f"cannot reserve {what}: {error.strerror}.", advice=of_limit(error))


def of_limit(error: OSError) -> str | None:
    """What to do about a limit of this process that was met; None: it was none."""
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"A file of this process can have {most:,} bytes, and memory is a file: raise the limit (ulimit -f)."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"No file descriptor is left, and this process may have {most:,} open: raise the limit (ulimit -n), or "
            "close what is open (ls -l /proc/self/fd shows it)."
        )
    if error.errno == errno.ENOMEM:
        return "The system gives this process no more memory: free some, or raise the limit (ulimit -v)."
    if error.errno == errno.EAGAIN:
        return "The system gives this process no more threads: end some, or raise a limit (ulimit -u, ulimit -v)."
    return None


def unusable(what: str, error: OSError) -> StorageFull | StoreUnsafe:
    """Turn what the system said when something was to be made or opened into the error that the user gets: that there
    is no room (a file system can also run out of names), or that the path is of no use."""
    if error.errno in NO_ROOM:
        return StorageFull(f"{what}: {error}.", survives="What was there is as it was.")
    return StoreUnsafe(f"{what}: {error.strerror}.", advice=of_limit(error))


def readable_bytes(nbytes: int) -> str:
    """The exact number, and as people say it: ``227,278,848 bytes (216.8 MiB)``."""
    power = min((max(nbytes, 1).bit_length() - 1) // 10, 4)
    if power == 0:
        return f"{nbytes:,} bytes"
    return f"{nbytes:,} bytes ({nbytes / (1 << 10 * power):,.1f} {' KMGT'[power]}iB)"
