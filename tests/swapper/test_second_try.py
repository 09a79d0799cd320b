"""A transfer that went wrong is tried once more, every wait has a deadline, and work is done once."""

import asyncio
import errno
import threading

import pytest
from interrupted import at_every_point
from store_helpers import fill, memory
from store_ram_disk import Fault, FaultPlan, RamDevice, RamDisk

import swapper.ticket
from swapper import PAGE_BYTES, Arena, StorageFull, StorageIOError, StorageTimeout, StoreMisuse
from swapper.checksum import Once, seed
from swapper.ticket import Checksum, Transfers


class Bench:
    """Transfers on a disk in memory of one page, with the plan of its faults."""

    def __init__(self, *faults: Fault) -> None:
        self.plan = FaultPlan(*faults)
        self.disk = RamDisk(bytearray(PAGE_BYTES))
        self.transfers = Transfers(RamDevice(self.disk, self.plan), "ram")
        self.checksum = Checksum("extent 0", seed(bytes(16), 0, 0, PAGE_BYTES))
        self.arena = Arena(PAGE_BYTES)
        self.lease = self.arena.lease(PAGE_BYTES)

    def write(self, value: int):
        fill(self.lease, value)
        return self.transfers.write(0, self.lease.address, PAGE_BYTES, self.checksum, urgent=False)

    def read(self):
        fill(self.lease, 0xEE)
        return self.transfers.read(0, self.lease.address, PAGE_BYTES, self.checksum, urgent=False)

    def seconds(self) -> tuple[int, int]:
        return self.transfers.num_second_reads, self.transfers.num_second_writes


def wait(ticket) -> None:
    ticket.wait(30)


def wait_in_asyncio(ticket) -> None:
    async def body() -> None:
        await ticket

    asyncio.run(body())


@pytest.mark.parametrize("wait", [wait, wait_in_asyncio])
@pytest.mark.parametrize("kind", ["error", "short"])
def test_a_write_that_failed_once_is_tried_again_and_good(wait, kind):
    bench = Bench(Fault(kind, 0, ("write",)))
    ticket = bench.write(7)
    wait(ticket)
    assert ticket.done() and bench.seconds() == (0, 1) and bench.checksum.error is None
    assert set(bench.disk.data) == {7}
    wait(bench.read())
    assert set(memory(bench.lease)) == {7}


@pytest.mark.parametrize("wait", [wait, wait_in_asyncio])
def test_a_write_that_failed_twice_is_an_error_and_not_tried_a_third_time(wait):
    bench = Bench(Fault("error", 0, ("write",), for_good=True))
    ticket = bench.write(7)
    for _ in range(2):
        with pytest.raises(StorageIOError, match=r"write of extent 0 on ram failed: .*Input/output error"):
            wait(ticket)
    assert ticket.done() and bench.seconds() == (0, 1) and bench.plan.counts == {"write": 2}
    assert isinstance(bench.checksum.error, StorageIOError)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.ECANCELED, StorageIOError),
        (errno.ESHUTDOWN, StorageIOError),
    ],
)
def test_a_write_is_not_tried_again_when_that_is_of_no_use(number, kind):
    bench = Bench(Fault("error", 0, ("write",), errno=number))
    with pytest.raises(kind):
        bench.write(7).wait(30)
    assert bench.seconds() == (0, 0) and bench.plan.counts == {"write": 1}


def test_a_second_write_that_finds_no_room_says_so():
    bench = Bench(Fault("error", 0, ("write",)), Fault("error", 1, ("write",), errno=errno.ENOSPC))
    with pytest.raises(StorageFull):
        bench.write(7).wait(30)
    assert bench.seconds() == (0, 1)


def test_a_second_write_that_the_closed_store_refuses_tells_of_the_first():
    bench = Bench(Fault("error", 0, ("write",)), Fault("error", 1, ("write",), errno=errno.ESHUTDOWN))
    with pytest.raises(StorageIOError, match="Input/output error"):
        bench.write(7).wait(30)


def test_a_sync_is_never_tried_again():
    bench = Bench(Fault("error", 0, ("sync",)))
    bench.write(7).wait(30)
    with pytest.raises(StorageIOError, match="sync on ram failed"):
        bench.transfers.sync()
    assert bench.plan.counts["sync"] == 1 and bench.seconds() == (0, 0)


def test_a_ticket_that_is_only_asked_whether_it_is_done_is_done_in_the_end():
    """The second try does not need a thread that waits for the ticket."""
    bench = Bench(Fault("error", 0, ("write",)), Fault("delay", 1, ("write",)))
    submitted = threading.Event()
    write = bench.transfers.device.write

    def told(*request: int, urgent: bool):
        transfer = write(*request, urgent=urgent)
        if bench.plan.counts["write"] == 2:
            submitted.set()
        return transfer

    bench.transfers.device.write = told
    ticket = bench.write(7)
    assert submitted.wait(30)
    assert not ticket.done()
    bench.plan.release()
    ticket._again.run(30)
    assert ticket.done()


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_second_try_that_hangs_keeps_to_the_deadline_of_the_wait(operation):
    bench = Bench()
    bench.write(7).wait(30)
    nth = bench.plan.counts.get(operation, 0)
    bench.plan.faults += [Fault("error", nth, (operation,)), Fault("delay", nth + 1, (operation,))]
    ticket = bench.write(8) if operation == "write" else bench.read()
    for _ in range(2):
        with pytest.raises(StorageTimeout, match=rf"{operation} of extent 0: no answer for 0\.05 s"):
            ticket.wait(0.05)
    assert not ticket.done()
    bench.plan.release()
    ticket.wait(30)
    assert ticket.done() and sum(bench.seconds()) == 1


def test_an_await_has_a_deadline(monkeypatch):
    monkeypatch.setattr(swapper.ticket, "IO_TIMEOUT_S", 0.05)
    bench = Bench(Fault("delay", 0, ("write",)))

    async def body() -> None:
        ticket = bench.write(7)
        try:
            with pytest.raises(StorageTimeout, match=r"write of extent 0: no answer for 0\.05 s"):
                await ticket
        finally:
            bench.plan.release()
        await ticket

    asyncio.run(body())


def test_work_is_done_by_the_first_thread_and_waited_for_by_the_others():
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def call(timeout_s: float) -> None:
        calls.append(timeout_s)
        begun.set()
        assert go_on.wait(30)

    work = Once(call)
    work.start()
    assert begun.wait(30) and not work.over()
    with pytest.raises(TimeoutError):
        work.run(0.02)
    go_on.set()
    work.run(30)
    assert work.over() and work.error is None and len(calls) == 1


def test_work_that_was_interrupted_or_late_is_done_by_the_next_thread():
    reasons = [KeyboardInterrupt(), TimeoutError(), StoreMisuse("No.")]
    over = []

    def call(_: float) -> None:
        raise reasons.pop(0)

    work = Once(call, then=over.append)
    for expected in (KeyboardInterrupt, TimeoutError):
        with pytest.raises(expected):
            work.run(0)
        assert not work.over() and over == []
    work.run(0)
    assert work.over() and isinstance(work.error, StoreMisuse) and over == [work]
    work.run(0)
    assert reasons == []


def test_work_that_is_interrupted_at_any_point_is_done_by_whoever_waits_next():
    """A point lies between the taking of the work and the note that it is taken, and another one between its end and
    the note of that: who waited next waited for a thread that was at nothing."""

    def run(interrupted):
        calls = []
        work = Once(calls.append)
        interrupted(lambda: work.run(30))
        work.run(0.5)
        assert work.over() and 1 <= len(calls) <= 2

    assert at_every_point("swapper/checksum.py", run) > 5
    assert at_every_point("aio_ext/latch.py", run) > 1
