"""Transfers of whole extents, with their checksums, and the tickets that stand for them.

[Note: The second try] A transfer that went wrong on its way can be had right; what is wrong at rest cannot. One more
try tells them apart, costs nothing when all is well, and is counted. A read is tried again if it fails or gives wrong
bytes, a write if it fails: the same bytes go from the same memory to the same place, so nothing is different if the
first try did arrive. A write is not tried again for want of room: no second try makes any. A sync is never tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from swapper.arena import Arena
from swapper.checksum import Once, digest
from swapper.device import IO_TIMEOUT_S, Device, Transfer
from swapper.errors import NO_ROOM, StorageCorrupt, StorageError, StorageFull, StorageTimeout, StoreMisuse, failed

_OVER = (errno.ECANCELED, errno.ESHUTDOWN)
"""Error number of a request that a queue had no time for before it was closed: a second try is of no use."""


class Checksum:
    """Checksum of what a place must hold. ``label`` names the bytes in messages."""

    __slots__ = ("error", "label", "seed", "value")

    def __init__(self, label: str, seed: int, value: int | None = None) -> None:
        self.label = label
        self.seed = seed
        self.value = value
        """Set when the write of these bytes is sealed."""
        self.error: StorageError | None = None
        """Error by which the write of these bytes failed."""


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
        return self._transfer.done() and all(work.over() for work in self._works())

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call ``function`` from another thread when the device has answered; it must be quick, and not raise.

        The ticket need not be done then: its checksum may be under way, or a second try.
        """
        self._transfer.add_done_callback(lambda _: function())

    def wait(self, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Block until the transfer is complete and its checksum worked out.

        Raises ``StorageIOError`` or ``StorageFull`` for what the device said, ``StorageCorrupt`` for wrong bytes,
        ``StorageTimeout`` when the device said nothing for ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._wait_for_transfer(timeout_s)
            for work in self._works():
                work.run(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            if time.monotonic() < deadline:
                raise  # another one's: a signal handler of the user's may raise it anywhere
            raise self._late(timeout_s) from None
        self._raise()
        self._let_go()

    def _wait_for_transfer(self, timeout_s: float) -> None:
        try:
            self._transfer.wait(timeout_s)
        except TimeoutError:
            raise
        except OSError:
            return  # judged once the work is done

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + IO_TIMEOUT_S
        try:
            if not self._transfer.done():
                await asyncio.wait_for(_answered(self._transfer), IO_TIMEOUT_S)
            for work in self._works():
                if not work.over():
                    await loop.run_in_executor(None, work.run, max(deadline - time.monotonic(), 0.0))
        except (TimeoutError, asyncio.TimeoutError):
            raise self._late(IO_TIMEOUT_S) from None
        self._raise()
        self._let_go()

    def _works(self) -> tuple[Once, ...]:
        """Work that must be over for the ticket to be done, now that the transfer is."""
        return (self._work,)

    def _raise(self) -> None:
        for work in self._works():
            if work.error is not None:
                raise work.error

    def _let_go(self) -> None:
        """All is over and good: who keeps the ticket, as a store does until the next commit, keeps nothing else."""
        self._work = _NOTHING_LEFT

    def _late(self, timeout_s: float) -> StorageTimeout:
        return StorageTimeout(f"{self._name}: no answer for {timeout_s:g} s.")


async def _answered(transfer: Transfer) -> None:
    with contextlib.suppress(OSError):  # judged once the work is done
        await transfer


@contextlib.contextmanager
def waiting() -> Iterator[list[Ticket]]:
    """A list for tickets of transfers that are begun within. All of them are waited for at the end, also when one
    fails, and when what begins them does: their memory is in use until then. Raises what the first has failed with."""
    tickets: list[Ticket] = []
    with contextlib.ExitStack() as ending:
        try:
            yield tickets
        finally:
            for ticket in reversed(tickets):
                ending.callback(ticket.wait)


class _WriteTicket(Ticket):
    """Its work is the sealing, which runs beside the transfer; if the transfer fails, the second try as well."""

    __slots__ = ("_again",)

    def __init__(self, name: str, transfer: Transfer, sealing: Once, again: Once) -> None:
        super().__init__(name, transfer, sealing)
        self._again = again

    def _works(self) -> tuple[Once, ...]:
        return (self._work,) if self._transfer.error is None else (self._work, self._again)

    def _let_go(self) -> None:
        self._work = self._again = _NOTHING_LEFT


def _over() -> Once:
    work = Once(lambda _: None)
    work.run()
    return work


_NOTHING_LEFT = _over()
"""The work of a ticket that is over and good."""


class _SecondTry:
    """A transfer that is submitted once, when it is first waited for, however often that is."""

    __slots__ = ("_submit", "_transfer")

    def __init__(self, submit: Callable[[], Transfer]) -> None:
        self._submit = submit
        self._transfer: Transfer | None = None

    def begun(self) -> bool:
        """True once it was submitted."""
        return self._transfer is not None

    def wait(self, timeout_s: float) -> None:
        """Raises ``OSError`` if it fails, ``TimeoutError`` while it is in flight."""
        if self._transfer is None:
            self._transfer = self._submit()
        self._transfer.wait(timeout_s)


class Reads:
    """Reads that are judged when they have come, and the work on memory that is under way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_second_reads = 0
        """Reads that went wrong and were tried again."""
        self._counts_lock = threading.Lock()
        """Lock of the counts. Guards: the number above, and that of ``Transfers``. Order: last. Nothing is waited for
        under it."""
        self._under_way: set[Once] = set()
        """The work that looks at memory. Each change is one step of the interpreter, so there is no lock."""
        self._abandoned: StorageTimeout | None = None

    def begin(
        self,
        name: str,
        submit: Callable[[bool], Transfer],
        judge: Callable[[], StorageError | None],
        *,
        urgent: bool,
        then: Callable[[], object] = lambda: None,
    ) -> Ticket:
        """Start a read by ``submit``, which is told whether it is urgent. The ticket is done when the bytes are there
        and ``judge`` has found nothing wrong with them; it may also raise what no second try can mend. ``then`` is
        called when all is over."""
        transfer = submit(urgent)

        def submit_again() -> Transfer:
            with self._counts_lock:
                self.num_second_reads += 1
            return submit(True)

        again = _SecondTry(submit_again)

        def verify(timeout_s: float) -> None:
            if self._abandoned is not None:
                raise self._abandoned
            if not again.begun():
                error = transfer.error
                if error is None and judge() is None:
                    return
                if error is not None and error.errno in _OVER:
                    raise self.failed(name, error)
            try:
                again.wait(timeout_s)
            except TimeoutError:
                raise
            except OSError as second:
                raise self.failed(name, second) from second
            wrong = judge()
            if wrong is not None:
                raise wrong

        work = self._begun(verify, then)
        transfer.add_done_callback(lambda _: work.start())
        return Ticket(name, transfer, work)

    def failed(self, name: str, error: OSError) -> StorageError:
        """Turn what the device said into the error that the user gets."""
        return failed(f"{name} on {self.where}", error)

    def finish(self, close: Callable[[], object]) -> None:
        """Wait for what is in flight, by ``close``, and for the work on it. Raises ``StorageTimeout`` if it does not
        come back."""
        try:
            close()
        except StorageTimeout as error:
            self._abandoned = error  # should it come back after all, its memory may be gone: no work may look at it
            raise
        for work in tuple(self._under_way):
            try:
                work.run()
            except TimeoutError:
                raise StorageTimeout(f"closing {self.where}: a checksum is not done for {IO_TIMEOUT_S:g} s.") from None

    def _begun(self, call: Callable[[float], None], then: Callable[[], object] = lambda: None) -> Once:
        """Work on memory, which ``finish`` waits for."""

        def over(work: Once) -> None:
            self._under_way.discard(work)
            then()

        work = Once(call, then=over)
        self._under_way.add(work)
        return work


class Transfers(Reads):
    """Moves extents to and from a device, sealed and verified, and remembers what is under way."""

    def __init__(self, device: Device, where: str) -> None:
        super().__init__(where)
        self.device = device
        self.num_second_writes = 0
        """Writes that failed and were tried again."""
        self._arenas: list[Arena] = []

    def register(self, arena: Arena) -> None:
        """Tell the device where its buffers are; keeps the arena alive."""
        self._arenas.append(arena)
        self.device.register(arena)

    def read(self, offset: int, address: int, nbytes: int, expected: Checksum, *, urgent: bool) -> Ticket:
        """Start reading; the ticket is done when the bytes are there and are the ones that ``expected`` tells of."""
        name = f"read of {expected.label}"

        def submit(urgent: bool) -> Transfer:
            return self._start(name, self.device.read, offset, address, nbytes, urgent=urgent)

        def judge() -> StorageError | None:
            seen = digest(address, nbytes, expected.seed)
            if seen == expected.value:
                return None
            return StorageCorrupt(
                f"{name} gave wrong bytes, twice: {self.where} [{offset}, {offset + nbytes}), "
                f"checksum {_hex(seen)}, expected {_hex(expected.value)}.",
                expected=expected.value or 0,
                seen=seen,
            )

        return self.begin(name, submit, judge, urgent=urgent)

    def read_part(self, label: str, offset: int, address: int, nbytes: int) -> Transfer:
        """Start reading bytes that the caller verifies, behind all that is urgent."""
        return self._start(f"read of {label}", self.device.read, offset, address, nbytes, urgent=False)

    def write(self, offset: int, address: int, nbytes: int, checksum: Checksum, *, urgent: bool) -> Ticket:
        """Start writing; ``checksum`` is sealed meanwhile. If the write fails for good, ``checksum.error`` says so."""
        name = f"write of {checksum.label}"
        transfer = self._start(name, self.device.write, offset, address, nbytes, urgent=urgent)

        def submit_again() -> Transfer:
            with self._counts_lock:
                self.num_second_writes += 1
            return self.device.write(offset, address, nbytes, urgent=True)

        again = _SecondTry(submit_again)

        def seal(_: float) -> None:
            if self._abandoned is not None:
                raise self._abandoned
            checksum.value = digest(address, nbytes, checksum.seed)

        def write_again(timeout_s: float) -> None:
            first = transfer.error
            if first is None:
                return
            try:
                if self._abandoned is not None:
                    raise self._abandoned
                if first.errno in _OVER + NO_ROOM:
                    raise self.failed(name, first)
                try:
                    again.wait(timeout_s)
                except TimeoutError:
                    raise
                except OSError as second:
                    raise self.failed(name, first if second.errno in _OVER else second) from second
            except StorageError as error:
                checksum.error = error
                raise

        sealing, second_try = self._begun(seal), Once(write_again)
        sealing.start()
        transfer.add_done_callback(lambda over: None if over.error is None else second_try.start())
        return _WriteTicket(name, transfer, sealing, second_try)

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the space of these ranges (offset, bytes). Raises ``StorageFull`` or ``StorageIOError``."""
        try:
            self.device.reserve(ranges)
        except StorageFull as error:
            error.args = (f"{self.where}: {error.args[0]}",)
            raise
        except OSError as error:
            raise self.failed("reserving space", error) from error

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
        self.finish(self.device.close)

    def _start(self, name: str, submit: Callable[..., Transfer], *request: int, urgent: bool) -> Transfer:
        try:
            return submit(*request, urgent=urgent)
        except OSError as error:
            if error.errno is None:
                raise  # not the system's: a signal handler of the user's may raise a TimeoutError anywhere
            if error.errno == errno.ESHUTDOWN:
                raise StoreMisuse(f"{name}: {self.where} is closed.") from None
            raise self.failed(name, error) from error


def _hex(value: int | None) -> str:
    return "none" if value is None else f"{value:016x}"
