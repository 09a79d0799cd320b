"""What a queue promises its callers when nothing goes wrong, or they do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from faulty_queue import load, store

from aio_ext import Memory, Queue, QueueError

KIB = 1 << 10
MIB = 1 << 20


def test_what_is_written_is_read_back_whatever_the_size_and_place(
    queue: Queue, memory: Memory, fd: int, noise: bytes
) -> None:
    file = queue.register_file(fd)
    for nbytes in (512, 4 * KIB, 64 * KIB - 512, 64 * KIB, 64 * KIB + 512, 1 * MIB - 512, 1 * MIB):
        for offset in (0, 512, 3 * MIB + 1536):
            store(memory.address, noise[:nbytes])
            queue.write(file, offset, memory.address, nbytes).wait(10)
            queue.read(file, offset, memory.address + 2 * MIB, nbytes).wait(10)
            assert load(memory.address + 2 * MIB, nbytes) == noise[:nbytes]
            assert load(memory.address + 2 * MIB + nbytes, 512) != noise[:512] or nbytes < 512


def test_a_read_leaves_its_neighbours_alone(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    store(memory.address, b"x" * 2 * MIB)
    queue.read(file, 0, memory.address + 4 * KIB, 256 * KIB).wait(10)
    everything = load(memory.address, 2 * MIB)
    assert everything == b"x" * 4 * KIB + bytes(256 * KIB) + b"x" * (2 * MIB - 260 * KIB)


def test_many_requests_on_several_files_at_once_all_arrive(
    queue: Queue, memory: Memory, tmp_path: Path, noise: bytes
) -> None:
    fds = [os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(3)]
    files = [queue.register_file(fd) for fd in fds]
    for fd in fds:
        os.close(fd)  # the queue has its own
    store(memory.address, noise)
    piece = 4 * KIB + 7  # buffered files take any size
    tickets = [queue.write(files[i % 3], (i // 3) * piece, memory.address + i * piece, piece) for i in range(150)]
    for ticket in tickets:
        ticket.wait(10)
    for i in range(150):
        queue.read(files[i % 3], (i // 3) * piece, memory.address + 4 * MIB + i * piece, piece).wait(10)
    assert load(memory.address + 4 * MIB, 150 * piece) == noise[: 150 * piece]


def test_more_requests_than_the_queue_holds_are_taken_one_after_the_other(
    queue: Queue, memory: Memory, fd: int
) -> None:
    file = queue.register_file(fd)
    tickets = [queue.write(file, 512 * (i % 100), memory.address, 512) for i in range(17_000)]
    for ticket in tickets:
        ticket.wait(30)
    assert queue.statistics().write.requests == 17_000


def test_nothing_to_transfer_is_done_at_once(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    ticket = queue.read(file, 0, memory.address, 0)
    assert ticket.done()
    ticket.wait(0)
    assert ticket.bytes_done == 0


def test_reading_past_the_end_fails_with_the_bytes_that_were_there(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    ticket = queue.read(file, 8 * MIB - 64 * KIB, memory.address, 128 * KIB)
    with pytest.raises(QueueError) as caught:
        ticket.wait(10)
    error = caught.value
    assert error.errno == errno.ENODATA
    assert (error.operation, error.offset, error.nbytes) == ("read", 8 * MIB - 64 * KIB, 128 * KIB)
    assert (error.bytes_done, error.error_offset) == (64 * KIB, 8 * MIB)
    assert "data" in str(error) and "65536 of 131072 bytes done" in str(error)


def test_the_error_of_the_kernel_reaches_the_ticket(queue: Queue, memory: Memory, tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    file = queue.register_file(fd)
    os.close(fd)
    with pytest.raises(QueueError) as caught:
        queue.write(file, 0, memory.address, 4096).wait(10)
    assert caught.value.errno == errno.EBADF
    assert caught.value.bytes_done == 0
    queue.read(file, 0, memory.address, 4096).wait(10)  # the queue goes on


def test_addresses_that_are_not_memory_fail_instead_of_crashing(queue: Queue, fd: int) -> None:
    file = queue.register_file(fd)
    with pytest.raises(QueueError) as caught:
        queue.read(file, 0, 4096, 4096).wait(10)
    assert caught.value.errno == errno.EFAULT


def test_misuse_is_refused_before_anything_happens(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    with pytest.raises(ValueError, match="multiples of"):
        queue.read(file, 1, memory.address, 4096)
    with pytest.raises(ValueError, match="multiples of"):
        queue.read(file, 0, memory.address, 1000)
    with pytest.raises(ValueError, match="multiples of"):
        queue.read(file, 0, memory.address + 4, 4096)
    with pytest.raises(ValueError, match="not registered"):
        queue.read(file + 1, 0, memory.address, 4096)
    with pytest.raises(ValueError, match="overflows"):
        queue.read(file, 2**63 - 512, memory.address, 4096)
    with pytest.raises((ValueError, TypeError)):
        queue.read(file, -512, memory.address, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.register_file(9999)
    assert queue.statistics().read.operations == 0


@pytest.mark.parametrize(
    "options",
    [{"depth": 0}, {"depth": 5000}, {"block_bytes": 5000}, {"block_bytes": 0}, {"num_threads": 0}, {"backend": "x"}],
)
def test_bad_settings_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Queue(**options)  # type: ignore[arg-type]


def test_a_file_can_be_given_back_when_nothing_is_outstanding(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    queue.write(file, 0, memory.address, 4096).wait(10)
    queue.unregister_file(file)
    with pytest.raises(ValueError, match="not registered"):
        queue.write(file, 0, memory.address, 4096)
    again = queue.register_file(fd)
    queue.write(again, 0, memory.address, 4096).wait(10)


def test_registered_memory_gives_the_same_bytes(queue: Queue, memory: Memory, fd: int, noise: bytes) -> None:
    file = queue.register_file(fd)
    queue.register_memory(memory.address, 1 * MIB)  # the second half of the requests below is outside
    store(memory.address + 512 * KIB, noise)
    queue.write(file, 0, memory.address + 512 * KIB, 1 * MIB).wait(10)
    queue.register_memory(memory.address + 4 * MIB, 2 * MIB)
    queue.read(file, 0, memory.address + 4 * MIB + 512, 1 * MIB).wait(10)
    assert load(memory.address + 4 * MIB + 512, 1 * MIB) == noise


def test_sync_succeeds_after_writes(queue: Queue, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    writes = [queue.write(file, i * 64 * KIB, memory.address, 64 * KIB) for i in range(16)]
    queue.sync(file).wait(30)
    assert all(ticket.done() for ticket in writes)
    assert queue.statistics().syncs == 1


def test_statistics_count_what_was_moved(queue: Queue, backend: str, memory: Memory, fd: int) -> None:
    file = queue.register_file(fd)
    queue.write(file, 0, memory.address, 1 * MIB).wait(10)
    queue.read(file, 0, memory.address, 100 * KIB).wait(10)
    s = queue.statistics()
    assert (s.write.bytes, s.write.requests, s.write.operations) == (1 * MIB, 1, 16)
    assert (s.read.bytes, s.read.requests, s.read.operations) == (100 * KIB, 1, 2)
    assert 1 <= s.depth_max <= 8
    assert 0 < s.depth_mean <= 8
    assert s.write.latency_max_s > 0
    if backend != "portable":  # keeps no percentiles
        assert 0 < s.write.latency_p50_s <= s.write.latency_p99_s <= s.write.latency_max_s * 1.13
    assert s.busy_seconds > 0
    assert (s.retries, s.short_transfers, s.failed_requests) == (0, 0, 0)


def test_a_closed_queue_refuses_requests_and_keeps_results(backend: str, memory: Memory, fd: int) -> None:
    queue = Queue(backend)
    file = queue.register_file(fd)
    tickets = [queue.write(file, 0, memory.address, 8 * MIB) for _ in range(3)]
    queue.close()
    assert [ticket.bytes_done for ticket in tickets] == [8 * MIB] * 3
    for ticket in tickets:
        ticket.wait(0)
    with pytest.raises(OSError, match="closed"):
        queue.write(file, 0, memory.address, 4096)
    queue.close()  # once more does nothing
