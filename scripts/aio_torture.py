#!/usr/bin/env python3
"""Random requests with injected faults, against a model in memory: no silent difference, no hang, no leak.

A file is cut into slots; each slot has at most one request in flight, so the model always knows what its bytes may be.
Reads that succeed must show exactly those bytes; after a write that failed, every sector is the old or the new one.
Everything follows from the seed, except the order in which the machine finishes things. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from faulty_queue import FaultPlan, faulty_queue, load, store

from aio_ext import Memory, Queue, QueueError, Ticket, available_backends
from aio_ext.notify import notifier_of_thread

SECTOR = 512
SLOT_BYTES = 64 << 10
NUM_SLOTS = 64
BLOCK_BYTES = 4 << 10
NOISE_BYTES = 1 << 20
WAIT_SECONDS = 60.0
INJECTED = (errno.EIO, errno.ENOSPC, errno.EAGAIN)
VISIBLE = (errno.EIO, errno.ENOSPC)  # EAGAIN must stay below the surface


class Difference(Exception):
    """The queue and the model do not agree."""


@dataclass
class Slot:
    """One piece of the file, its buffer, and the request in flight on it."""

    offset: int
    address: int
    now: bytearray = field(default_factory=lambda: bytearray(SLOT_BYTES))
    maybe: bytes | None = None
    """What a failed write may have left in parts; None: ``now`` is all there can be."""
    ticket: Ticket | None = None
    is_write: bool = False
    begin: int = 0
    nbytes: int = 0
    data: bytes = b""


class Torture:
    def __init__(self, seed: int, backend: str, path: Path) -> None:
        self._random = random.Random(seed)
        self._noise = self._random.randbytes(NOISE_BYTES)
        rate = self._random.uniform(0.01, 0.05)
        self._plan = FaultPlan(log=False).strike_at_random(
            seed, error=rate, errors=INJECTED, shortfall=rate, delay=rate / 5, delay_us_max=300
        )
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        path.unlink()
        os.posix_fallocate(self._fd, 0, NUM_SLOTS * SLOT_BYTES)
        self._memory = Memory(NUM_SLOTS * 2 * SLOT_BYTES)
        depth = self._random.choice((1, 2, 8, 32))
        self._queue: Queue = faulty_queue(self._plan, backend, depth=depth, block_bytes=BLOCK_BYTES)
        self._queue.register_memory(self._memory.address, self._memory.nbytes // 2)
        self._file = self._queue.register_file(self._fd)
        self._slots = [Slot(i * SLOT_BYTES, self._memory.address + 2 * i * SLOT_BYTES) for i in range(NUM_SLOTS)]
        self.failed = 0
        self.settings = f"rate {rate:.3f}, depth {depth}"

    def one(self) -> None:
        """Settle what is in flight on a random slot, and start something new there."""
        slot = self._random.choice(self._slots)
        self._settle(slot)
        if self._random.random() < 0.01:
            self._queue.sync(self._file)
            return
        sectors = self._random.randint(1, 8 if self._random.random() < 0.9 else SLOT_BYTES // SECTOR)
        slot.nbytes = sectors * SECTOR
        slot.begin = self._random.randrange(SLOT_BYTES // SECTOR - sectors + 1) * SECTOR
        slot.is_write = self._random.random() < 0.5
        if slot.maybe is not None:  # What a failed write left is found out before anything else is written.
            slot.is_write, slot.begin, slot.nbytes = False, 0, SLOT_BYTES
        urgent = self._random.random() < 0.2
        if slot.is_write:
            start = self._random.randrange(NOISE_BYTES - slot.nbytes)
            slot.data = self._noise[start : start + slot.nbytes]
            store(slot.address, slot.data)
        else:
            ctypes.memset(slot.address, 0xA5, slot.nbytes + SECTOR)
        submit = self._queue.write if slot.is_write else self._queue.read
        slot.ticket = submit(self._file, slot.offset + slot.begin, slot.address, slot.nbytes, urgent)

    def finish(self) -> None:
        """Settle everything, and read the whole file once more through a queue without faults."""
        for slot in self._slots:
            self._settle(slot)
        retries = self._queue.statistics().retries
        self._queue.close(WAIT_SECONDS)
        with Queue(self._queue.backend) as honest:
            file = honest.register_file(self._fd)
            for slot in self._slots:
                slot.is_write, slot.begin, slot.nbytes = False, 0, SLOT_BYTES
                ctypes.memset(slot.address, 0xA5, SLOT_BYTES + SECTOR)
                slot.ticket = honest.read(file, slot.offset, slot.address, SLOT_BYTES)
                self._settle(slot)
        self._memory.close()
        os.close(self._fd)
        if retries == 0 and self.failed > 20:
            raise Difference("no attempt was ever repeated, though EAGAIN was injected")

    def _settle(self, slot: Slot) -> None:
        ticket, slot.ticket = slot.ticket, None
        if ticket is None:
            return
        try:
            ticket.wait(WAIT_SECONDS)
            error = None
        except QueueError as caught:
            error = caught
            self.failed += 1
            if error.errno not in VISIBLE:
                raise Difference(f"{error}: not an injected error") from None
        if ticket.bytes_done > slot.nbytes or (error is None and ticket.bytes_done != slot.nbytes):
            raise Difference(f"{ticket}: {ticket.bytes_done} of {slot.nbytes} bytes done")
        if slot.is_write:
            self._wrote(slot, failed=error is not None)
        elif error is None:
            self._check_read(slot)

    @staticmethod
    def _wrote(slot: Slot, failed: bool) -> None:
        end = slot.begin + slot.nbytes
        if failed:
            slot.maybe = bytes(slot.now[: slot.begin]) + slot.data + bytes(slot.now[end:])
        else:
            slot.now[slot.begin : end] = slot.data

    @staticmethod
    def _check_read(slot: Slot) -> None:
        got = load(slot.address, slot.nbytes + SECTOR)
        if got[slot.nbytes :] != b"\xa5" * SECTOR:
            raise Difference(f"a read at {slot.offset + slot.begin} wrote past its {slot.nbytes} bytes")
        end = slot.begin + slot.nbytes
        maybe, slot.maybe = slot.maybe, None
        if got[: slot.nbytes] == slot.now[slot.begin : end]:
            return
        for at in range(0, slot.nbytes, SECTOR):
            sector = got[at : at + SECTOR]
            place = slice(slot.begin + at, slot.begin + at + SECTOR)
            if sector != slot.now[place] and (maybe is None or sector != maybe[place]):
                raise Difference(
                    f"the sector at {slot.offset + slot.begin + at} is neither what was written nor before"
                )
            slot.now[place] = sector


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Threads and descriptors are the same afterwards as before."""

    def held() -> tuple[int, int]:
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return len(os.listdir("/proc/self/fd")), sum(name.startswith("aio") for name in threads)  # noqa: PTH208

    notifier_of_thread()  # one for all queues, which stays
    before = held()
    yield
    deadline = time.monotonic() + 5
    while held() != before:
        if time.monotonic() > deadline:
            raise Difference(f"descriptors and threads were {before}, are {held()}")
        threading.Event().wait(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=20_000, help="a backend (default 20000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, a backend (default 600)")
    parser.add_argument("--backend", action="append", choices=("io_uring", "threads", "portable"), help="default: all")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a directory, for one file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for backend in options.backend or available_backends():
        start = time.monotonic()
        count = 0
        try:
            with nothing_left_behind():
                torture = Torture(options.seed, backend, options.path / f"aio_torture.{os.getpid()}")
                while count < options.requests and time.monotonic() - start < options.seconds:
                    torture.one()
                    count += 1
                torture.finish()
        except (Difference, TimeoutError) as error:
            print(f"{backend}, seed {options.seed}, request {count}: {error}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - start
        results.append({"backend": backend, "requests": count, "failed": torture.failed, "seconds": round(seconds, 1)})
        if not options.json:
            print(
                f"{backend}: {count} requests, {torture.failed} failed as injected, no difference "
                f"({torture.settings}, seed {options.seed}, {seconds:.1f} s)"
            )
    if options.json:
        print(json.dumps({"seed": options.seed, "backends": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
