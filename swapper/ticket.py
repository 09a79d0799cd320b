"""Transfers of whole extents, with their checksums, and the tickets that stand for them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Generator

from swapper.arena import Arena
from swapper.checksum import Once, digest
from swapper.device import IO_TIMEOUT_S, Device, Transfer
from swapper.errors import StorageCorrupt, StorageError, StorageTimeout, StoreMisuse, failed

_OVER = (errno.ECANCELED, errno.ESHUTDOWN)
"""What a request gets that a queue had no time for before it was closed: a second try is of no use."""


class Checksum:
    """What an extent must hold: set when a write of it is sealed. ``label`` names the bytes in messages."""

    __slots__ = ("label", "seed", "value")

    def __init__(self, label: str, seed: int, value: int | None = None) -> None:
        self.label = label
        self.seed = seed
        self.value = value


class Ticket:
    """The promise of one transfer and of the work on its checksum. Dropping a ticket cancels nothing.

    ``wait`` for it, or ``await`` it in asyncio.
    The memory must stay valid, and untouched, until the ticket is done; then it is the caller's again.
    """

    __slots__ = ("_name", "_transfer", "_work")

    def __init__(self, name: str, transfer: Transfer, work: Once) -> None:
        self._name = name
        self._transfer = transfer
        self._work = work

    def done(self) -> bool:
        """True when ``wait`` would not block: the bytes are there, and verified."""
        return self._transfer.done() and self._work.over()

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call ``function`` from another thread when the device has answered; it must be quick, and not raise."""
        self._transfer.add_done_callback(lambda _: function())

    def wait(self, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Block until the transfer is complete and its checksum worked out.

        Raises ``StorageIOError`` or ``StorageFull`` for what the device said, ``StorageCorrupt`` for wrong bytes,
        ``StorageTimeout`` when the device said nothing for ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._wait_for_transfer(timeout_s)
            self._work.run(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise StorageTimeout(f"{self._name}: no answer for {timeout_s:g} s.") from None
        self._raise()

    def _wait_for_transfer(self, timeout_s: float) -> None:
        try:
            self._transfer.wait(timeout_s)
        except TimeoutError:
            raise
        except OSError:
            return  # judged once the work is done

    def __await__(self) -> Generator[object, None, None]:
        with contextlib.suppress(OSError):
            yield from self._transfer.__await__()
        if not self._work.over():
            yield from asyncio.get_running_loop().run_in_executor(None, self._work.run)
        self._raise()

    def _raise(self) -> None:
        if self._work.error is not None:
            raise self._work.error


class _WriteTicket(Ticket):
    """Its work is the sealing, which runs beside the transfer and knows nothing of its outcome."""

    __slots__ = ("_transfers",)

    def __init__(self, name: str, transfer: Transfer, work: Once, transfers: Transfers) -> None:
        super().__init__(name, transfer, work)
        self._transfers = transfers

    def _raise(self) -> None:
        super()._raise()
        if self._transfer.error is not None:
            raise self._transfers.failed(self._name, self._transfer.error)


class Transfers:
    """Moves extents to and from a device, sealed and verified, and remembers what is under way."""

    def __init__(self, device: Device, where: str) -> None:
        self.device = device
        self.where = where
        self.num_second_reads = 0
        """Reads that went wrong and were tried again."""
        self._arenas: list[Arena] = []
        self._under_way: set[Once] = set()
        self._abandoned: StorageTimeout | None = None

    def register(self, arena: Arena) -> None:
        """Tell the device where its buffers are; keeps the arena alive."""
        self._arenas.append(arena)
        self.device.register(arena)

    def read(self, offset: int, address: int, nbytes: int, expected: Checksum, *, urgent: bool) -> Ticket:
        """Start reading; the ticket is done when the bytes are there and are the ones that ``expected`` tells of."""
        name = f"read of {expected.label}"
        transfer = self._start(name, self.device.read, offset, address, nbytes, urgent=urgent)

        def verify() -> None:
            try:
                if self._abandoned is not None:
                    raise self._abandoned
                if transfer.error is None and digest(address, nbytes, expected.seed) == expected.value:
                    return
                if transfer.error is not None and transfer.error.errno in _OVER:
                    raise self.failed(name, transfer.error)
                self._read_again(name, offset, address, nbytes, expected)
            finally:
                self._under_way.discard(work)

        work = Once(verify)
        self._under_way.add(work)
        transfer.add_done_callback(lambda _: work.start())
        return Ticket(name, transfer, work)

    def write(self, offset: int, address: int, nbytes: int, checksum: Checksum, *, urgent: bool) -> Ticket:
        """Start writing; ``checksum`` is sealed meanwhile."""
        name = f"write of {checksum.label}"
        transfer = self._start(name, self.device.write, offset, address, nbytes, urgent=urgent)

        def seal() -> None:
            try:
                checksum.value = digest(address, nbytes, checksum.seed)
            finally:
                self._under_way.discard(sealing)

        sealing = Once(seal)
        self._under_way.add(sealing)
        sealing.start()
        return _WriteTicket(name, transfer, sealing, self)

    def sync(self) -> None:
        """Make durable what was written. Raises ``StorageIOError`` or ``StorageTimeout``; never to be repeated then."""
        try:
            self.device.sync().wait(IO_TIMEOUT_S)
        except TimeoutError:
            raise StorageTimeout(f"sync of {self.where}: no answer for {IO_TIMEOUT_S:.0f} s.") from None
        except OSError as error:
            raise self.failed("sync", error) from error

    def close(self) -> None:
        """Wait for what is in flight. Raises ``StorageTimeout`` if it does not come back."""
        try:
            self.device.close()
        except StorageTimeout as error:
            self._abandoned = error  # should it come back after all, its memory may be gone: nobody must look at it
            raise
        for work in tuple(self._under_way):
            work.run()

    def _start(self, name: str, submit: Callable[..., Transfer], *request: int, urgent: bool) -> Transfer:
        try:
            return submit(*request, urgent=urgent)
        except OSError as error:
            if error.errno == errno.ESHUTDOWN:
                raise StoreMisuse(f"{name}: {self.where} is closed.") from None
            raise self.failed(name, error) from error

    def _read_again(self, name: str, offset: int, address: int, nbytes: int, expected: Checksum) -> None:
        """[Note: The second try] A transfer that went wrong on its way can be had right; what is wrong at rest cannot.
        One more read tells them apart, costs nothing when all is well, and is counted."""
        self.num_second_reads += 1
        transfer = self._start(name, self.device.read, offset, address, nbytes, urgent=True)
        try:
            transfer.wait(IO_TIMEOUT_S)
        except TimeoutError:
            raise StorageTimeout(f"second {name}: no answer for {IO_TIMEOUT_S:.0f} s.") from None
        except OSError as error:
            raise self.failed(name, error) from error
        seen = digest(address, nbytes, expected.seed)
        if seen != expected.value:
            raise StorageCorrupt(
                f"{name} gave wrong bytes, twice: {self.where} [{offset}, {offset + nbytes}), "
                f"checksum {_hex(seen)}, expected {_hex(expected.value)}.",
                expected=expected.value or 0,
                seen=seen,
            )

    def failed(self, name: str, error: OSError) -> StorageError:
        """What the device said, as the error that the user gets."""
        return failed(f"{name} on {self.where}", error)


def _hex(value: int | None) -> str:
    return "none" if value is None else f"{value:016x}"
