"""Ctrl-C between any two instructions of the calling thread: whatever it strikes, the queue goes on for the others.

What is struck are writes: a read whose ticket was lost could still fill memory that the next one is read to.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from aio_ext import Memory, Queue, StripedFile, StripePath

KIB = 1 << 10
MIB = 1 << 20


class Strike:
    """Raises KeyboardInterrupt in this thread before the ``nth`` instruction of Python under ``with``."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.happened = False

    def __enter__(self) -> Strike:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at settrace whether any frame has it
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_name == "__exit__" and frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                self.happened = True
                raise KeyboardInterrupt
        return self._trace


def strikes(stride: int) -> Iterator[Strike]:
    """One strike at the first instruction, one ``stride`` instructions later, ... until one comes after the end."""
    nth = 1
    while True:
        strike = Strike(nth)
        yield strike
        if not strike.happened:
            return
        nth += stride


def test_requests_struck_anywhere_leave_a_queue_that_works(backend: str, memory: Memory, fd: int) -> None:
    count = 0
    with Queue(backend, block_bytes=64 * KIB) as queue:
        file = queue.register_file(fd)
        for strike in strikes(1):
            with contextlib.suppress(KeyboardInterrupt), strike:
                queue.write(file, 0, memory.address, 128 * KIB).wait(10)
                queue.unregister_file(queue.register_file(fd))
                ticket = queue.write(file, 0, memory.address, 4 * KIB)
                ticket.add_done_callback(str)
                queue.sync(file).wait(10)
            queue.read(file, 0, memory.address + 1 * MIB, 128 * KIB).wait(10)
            count += 1
        queue.close(10)
    assert count > 50, "the strikes did not hit the code under test"


def test_a_close_struck_anywhere_can_be_repeated(backend: str, memory: Memory, fd: int) -> None:
    for strike in strikes(3):
        queue = Queue(backend, block_bytes=64 * KIB)
        queue.write(queue.register_file(fd), 0, memory.address, 4 * MIB)
        with contextlib.suppress(KeyboardInterrupt), strike:
            queue.close(10)
        queue.close(10)
        with pytest.raises(OSError, match="closed"):
            queue.register_file(fd)


def test_striped_requests_struck_anywhere_leave_a_space_that_works(
    backend: str, memory: Memory, fd: int, tmp_path: Path
) -> None:
    with Queue(backend, block_bytes=64 * KIB) as queue:
        with (tmp_path / "other").open("w+b") as other:
            files = [queue.register_file(fd), queue.register_file(other.fileno())]
        paths = [StripePath(queue, file, 2 * MIB, 1e9) for file in files]
        space = StripedFile(paths, 1 * MIB, chunk_bytes=128 * KIB, chunks_in_flight=1)
        for strike in strikes(7):
            with contextlib.suppress(KeyboardInterrupt), strike:
                ticket = space.write(0, memory.address, 640 * KIB + 512)
                ticket.add_done_callback(str)
                ticket.wait(10)
            space.write(0, memory.address, 640 * KIB + 512).wait(10)
            space.read(512, memory.address + 1 * MIB, 256 * KIB).wait(10)
