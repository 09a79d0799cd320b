"""Buffers, files and threads on every way out: close, drop, exception, exit, fork."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from busy_machine import allowed
from faulty_queue import FaultPlan, faulty_queue, load, store

from aio_ext import Memory, Queue, QueueError

KIB = 1 << 10
MIB = 1 << 20
ROOT = Path(__file__).parent.parent.parent


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end and "rw" in line.split()[1]:
            return True
    return False


def eventually(holds: object, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
    return True


def test_memory_closed_with_a_read_in_flight_stays_mapped_until_it_is_over(backend: str, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)
    with faulty_queue(plan, backend) as queue:
        memory = Memory(4 * MIB)
        address = memory.address
        ticket = queue.read(queue.register_file(fd), 0, address, 1 * MIB)
        memory.close()
        assert is_mapped(address)
        plan.release()
        ticket.wait(10)
        assert eventually(lambda: not is_mapped(address))


def test_registered_memory_stays_mapped_until_the_queue_is_closed(fd: int) -> None:
    with Queue() as queue:
        if queue.backend != "io_uring":
            pytest.skip("only a ring registers memory")
        memory = Memory(4 * MIB)
        address = memory.address
        queue.register_memory(address, 4 * MIB)
        memory.close()
        assert is_mapped(address) or queue.notes
    assert not is_mapped(address)


def test_a_close_that_cannot_wait_parks_what_is_in_flight_and_cancels_the_rest(
    backend: str, fd: int, noise: bytes
) -> None:
    plan = FaultPlan().strike(0, hold=True)
    queue = faulty_queue(plan, backend, depth=1, num_threads=1)
    memory = Memory(8 * MIB)
    address = memory.address
    store(address, noise)
    file = queue.register_file(fd)
    held = queue.write(file, 0, address, 1 * MIB)
    assert eventually(lambda: plan.log())
    waiting = queue.write(file, 1 * MIB, address, 1 * MIB)
    with pytest.raises(TimeoutError, match="1 blocks still in flight"):
        queue.close(timeout=0.05)
    with pytest.raises(QueueError) as caught:
        waiting.wait(0)
    assert caught.value.errno == errno.ECANCELED
    assert not held.done()
    memory.close()
    del queue
    assert is_mapped(address)
    plan.release()
    held.wait(10)
    assert os.pread(fd, 0, 0) == b""
    with Memory(1 * MIB) as check, Queue(backend) as other:
        other.read(other.register_file(fd), 0, check.address, 1 * MIB).wait(10)
        assert load(check.address, 1 * MIB) == noise


def test_cancel_ends_what_has_not_begun_and_close_waits_for_the_rest(backend: str, memory: Memory, fd: int) -> None:
    plan = FaultPlan().strike(0, hold=True)
    with faulty_queue(plan, backend, depth=1, num_threads=1, block_bytes=64 * KIB) as queue:
        file = queue.register_file(fd)
        begun = queue.write(file, 0, memory.address, 128 * KIB)
        assert eventually(lambda: plan.log())
        waiting = [queue.read(file, 0, memory.address, 4 * KIB), queue.sync(file)]
        queue.cancel()
        for ticket in waiting:
            with pytest.raises(QueueError) as caught:
                ticket.wait(10)
            assert caught.value.errno == errno.ECANCELED
        with pytest.raises(OSError, match="closed"):
            queue.sync(file)
        plan.release()
    with pytest.raises(QueueError) as caught:
        begun.wait(0)
    assert (caught.value.errno, begun.bytes_done) == (errno.ECANCELED, 64 * KIB)


def test_a_dropped_queue_finishes_its_requests(backend: str, memory: Memory, fd: int) -> None:
    queue = Queue(backend, block_bytes=64 * KIB)
    ticket = queue.write(queue.register_file(fd), 0, memory.address, 8 * MIB)
    del queue
    ticket.wait(10)
    assert ticket.bytes_done == 8 * MIB


def test_a_lock_ends_with_the_queue_even_while_a_child_lives(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "locked"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    queue = Queue(backend)
    queue.register_file(fd)
    os.close(fd)
    end_child, pid = _sleeping_child()
    try:
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        queue.close()
        with path.open() as other:
            assert eventually(lambda: _locks(other.fileno()))
    finally:
        os.close(end_child)
        os.waitpid(pid, 0)


def test_a_child_cannot_use_its_parents_queue_and_ends_normally(backend: str, memory: Memory, fd: int) -> None:
    queue = Queue(backend)
    file = queue.register_file(fd)
    ticket = queue.write(file, 0, memory.address, 4 * KIB)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for use in (
                lambda: queue.write(file, 0, 0, 0),
                lambda: queue.register_file(fd),
                lambda: ticket.wait(1),
                lambda: queue.statistics(),
            ):
                with pytest.raises(RuntimeError, match="forked child"):
                    use()
            queue.close()
            del queue
            with Queue(backend) as own, Memory(4 * KIB) as own_memory:
                own.read(own.register_file(fd), 0, own_memory.address, 4 * KIB).wait(10)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ticket.wait(10)
    queue.write(file, 0, memory.address, 4 * KIB).wait(10)
    queue.close()


def test_forks_in_the_middle_of_io_change_nothing(backend: str, memory: Memory, fd: int, noise: bytes) -> None:
    store(memory.address, noise)
    with Queue(backend, block_bytes=64 * KIB) as queue:
        file = queue.register_file(fd)
        for i in range(20):
            write = queue.write(file, 4 * MIB, memory.address, 1 * MIB)
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            write.wait(10)
            read = queue.read(file, 4 * MIB, memory.address + (1 + i % 4) * MIB, 1 * MIB)
            os.waitpid(pid, 0)
            read.wait(10)
            assert load(memory.address + (1 + i % 4) * MIB, 1 * MIB) == noise


EXITS = {
    "end": "",
    "exit": "sys.exit(0)",
    "exception": "raise SystemExit(0)",
    "dropped": "del queue, tickets, memory",
    "thread": "threading.Thread(target=lambda: [t.wait() for t in tickets]).start()",
    "abrupt": "os._exit(0)",
    "collected": "queue.me = queue; memory.me = memory; del queue, tickets, memory; gc.collect()",
}


@pytest.mark.each_value
@pytest.mark.parametrize("way", EXITS)
def test_a_program_may_end_in_any_way_with_io_in_flight(backend: str, tmp_path: Path, way: str) -> None:
    path = tmp_path / "data"
    code = f"""
        import gc, os, sys, threading, aio_ext
        fd = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        memory = aio_ext.Memory(8 << 20)
        memory.populate()
        queue = aio_ext.Queue({backend!r}, block_bytes=64 << 10)
        file = queue.register_file(fd)
        queue.register_memory(memory.address, memory.nbytes)
        tickets = [queue.write(file, i << 20, memory.address + (i << 20), 1 << 20) for i in range(8)]
        {EXITS[way]}
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    if way != "abrupt":
        assert path.stat().st_size == 8 << 20


def test_a_program_ends_though_threads_wait_for_io(backend: str, tmp_path: Path) -> None:
    """As after Ctrl-C in the close at its end: the interpreter ends under daemons, which would abort the process."""
    code = f"""
        import os, threading, time
        import aio_ext, faulty_queue
        plan = faulty_queue.FaultPlan()
        plan.strike(0, delay_us=1_000_000)
        queue = faulty_queue.faulty_queue(plan, {backend!r})
        file = queue.register_file(os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT, 0o600))
        memory = aio_ext.Memory(4096)
        ticket = queue.write(file, 0, memory.address, 4096)
        for _ in range(50):  # a wait looks up ten times a second, and an interpreter ends faster
            threading.Thread(target=ticket.wait, daemon=True).start()
            time.sleep(0.002)
        queue._finalizer.detach()
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_ends_a_program_that_is_busy_within_two_seconds(backend: str, tmp_path: Path) -> None:
    code = f"""
        import os, aio_ext
        fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        memory = aio_ext.Memory(8 << 20)
        queue = aio_ext.Queue({backend!r}, block_bytes=64 << 10)
        file = queue.register_file(fd)
        print("started", flush=True)
        while True:
            tickets = [queue.write(file, i << 20, memory.address + (i << 20), 1 << 20) for i in range(8)]
            for ticket in tickets:
                ticket.wait()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    took = time.monotonic() - start
    assert took < allowed(2)
    assert stderr.rstrip().endswith(b"KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sleeping_child() -> tuple[int, int]:
    """A child that lives until the descriptor returned is closed."""
    hear, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(say)
        os.read(hear, 1)
        os._exit(0)
    os.close(hear)
    return say, pid
