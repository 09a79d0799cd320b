"""Rates of the store's paths and of a device's link, measured in the moments before training starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch

from aio_ext.measure import mixed_q
from offload.device.protocol import Device, Event, Stream
from offload.memory import tensor_at
from offload.report.report import Bandwidths, LinkRates, MemoryRates
from offload.tiers.window import DeviceWindow
from swapper import DurableStore, Extent, Ticket

_SECONDS = 0.2
"""Duration of each of the three measurements of the store, unless all records have been moved ``_MOST_PASSES`` times
before."""

_MOST_PASSES = 2
"""A small store is not worn out for a rate that hardly matters there: the records of an adapter, over a frozen base."""

_PIECE_BYTES = 16 << 20
"""Host memory that is copied, or swept through, at a time while both go on."""

_NUM_FLYING = 4
"""Copies each way that are asked for meanwhile: a sweep of a piece takes no longer than these."""

_SWEPT_BYTES = 1 << 30
"""More than caches hold."""

_MOST_Q = 8.0
"""Both at once at full speed; what is more comes of a moment that was slow."""


def measure(store: DurableStore, extents: Sequence[Extent], buffers: Sequence[int]) -> Bandwidths:
    """Read, write, and do both at once, for a moment each. What is written is what was read: nothing changes.

    ``extents`` are of one kind, none larger than a buffer; ``buffers`` are addresses, two or more. Some extents are
    written and the others read, since no extent may be in two transfers at a time. Both at once is what a step does:
    one extent after the other is read and written back.
    """
    half = len(buffers) // 2
    num_written = max(min(half, len(extents) // 2), 1)
    own = list(zip(extents[:num_written], buffers[:num_written], strict=True))
    others = extents[num_written:] or extents
    spare = buffers[half:][: len(others)]
    others = others[: len(others) // len(spare) * len(spare)]  # so that no buffer is in two transfers at a time

    for extent, address in own:
        store.read(extent, address, extent.nbytes).wait()
    reads = [(store.read, extent, address) for extent, address in zip(others, cycle(spare), strict=False)]
    writes = [(store.write, extent, address) for extent, address in own]
    most_bytes = _MOST_PASSES * sum(extent.nbytes for extent in extents)
    read_rate, write_rate = _rate(reads, len(spare), most_bytes), _rate(writes, len(own), most_bytes)
    if len(extents) == 1:  # nothing to read while it is written
        return Bandwidths(read_rate, write_rate, 1.0)
    return fitted(read_rate, write_rate, *_both(store, extents, buffers, most_bytes))


def fitted(read_rate: float, write_rate: float, read_bytes: int, write_bytes: int, seconds: float) -> Bandwidths:
    """The rates by which reads and writes of so many bytes take ``seconds`` together.

    Where that is longer than one after the other, a write costs what it costs beside reads: a few extents that are
    written over and over alone are faster than those of a step, which go everywhere.
    """
    reading, writing = read_bytes / read_rate, write_bytes / write_rate
    if seconds > reading + writing:
        return Bandwidths(read_rate, write_bytes / (seconds - reading), 1.0)
    return Bandwidths(read_rate, write_rate, min(mixed_q(reading, writing, seconds), _MOST_Q))


def measure_link(device: Device, window: DeviceWindow, address: int, numel: int) -> LinkRates:
    """Copy so many elements to the device and back, for a moment each. The host memory at ``address`` holds afterwards
    what it held."""
    host = tensor_at(address, numel, window.dtype)
    window.allocate()
    for stream in (device.to_device, device.to_host):
        stream.wait(device.compute.record())
    rates = []
    there = window.target[:numel]
    for stream, target, source in ((device.to_device, there, host), (device.to_host, host, there)):
        rates.append(_copy_rate(stream, target, source))
    window.close()
    return LinkRates(*rates)


def measure_memory(
    device: Device, window: DeviceWindow, address: int, numel: int, updated: Sequence[tuple[int, int]]
) -> MemoryRates:
    """Sweep through host memory as an update does, which reads and writes, with copies of other memory both ways over
    the link meanwhile. All memory holds afterwards what it held.

    ``updated`` are addresses and bytes of what is updated there; nothing is measured where there is none.
    """
    whole = [tensor_at(start, nbytes // 4, torch.int32) for start, nbytes in updated]
    words = [piece for tensor in whole for (piece,) in _pieces(tensor)][: _SWEPT_BYTES // _PIECE_BYTES]
    if not words:
        return MemoryRates()
    window.allocate()
    for stream in (device.to_device, device.to_host):
        stream.wait(device.compute.record())
    here, there = tensor_at(address, numel, window.dtype), window.target[:numel]
    ways = [  # one half of the memory each
        (device.to_device, cycle(_pieces(there[: numel // 2], here[: numel // 2])), deque[tuple[Event, int]]()),
        (device.to_host, cycle(_pieces(here[numel // 2 :], there[numel // 2 :])), deque[tuple[Event, int]]()),
    ]
    for piece in words:
        piece.bitwise_or_(0)  # its pages are there from now on
    moved, start = 0, time.perf_counter()
    for piece in cycle(words):
        for stream, pairs, flying in ways:
            while flying and flying[0][0].done():
                moved += flying.popleft()[1]
            while len(flying) < _NUM_FLYING:
                target, source = next(pairs)
                stream.copy(target, source)
                flying.append((stream.record(), source.nbytes))
        piece.bitwise_or_(0)
        moved += 2 * piece.nbytes
        if (seconds := time.perf_counter() - start) >= _SECONDS / 2:
            break
    for *_, flying in ways:
        for event, _ in flying:
            event.wait()
    window.close()
    return MemoryRates(shared=moved / seconds)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(_PIECE_BYTES // tensor.itemsize) for tensor in tensors), strict=True)


def _copy_rate(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of copies over and over, two of them in flight: the link does not wait for the host between."""
    start, before = time.perf_counter(), stream.record()
    ends: list[Event] = []
    while len(ends) < 2 or time.perf_counter() - start < _SECONDS / 2:
        stream.copy(target, source)
        ends.append(stream.record())
        if len(ends) > 1:
            ends[-2].wait()
    ends[-1].wait()
    return len(ends) * source.nbytes / ends[-1].seconds_since(before)


def _both(
    store: DurableStore, extents: Sequence[Extent], buffers: Sequence[int], most_bytes: int
) -> tuple[int, int, float]:
    """Let one extent after the other pass through a buffer, and back: bytes read and written, and the seconds."""
    buffers = buffers[: len(extents)]  # so that no extent is in two transfers at a time
    reading: deque[tuple[Extent, int, Ticket]] = deque()
    writing: deque[Ticket] = deque()

    def write_back() -> None:
        extent, address, read = reading.popleft()
        read.wait()
        writing.append(store.write(extent, address, extent.nbytes))

    asked = 0
    start = time.perf_counter()
    for number, (extent, address) in enumerate(zip(cycle(extents), cycle(buffers), strict=False)):
        if asked >= most_bytes or (time.perf_counter() - start > _SECONDS and writing):
            break
        if number >= len(buffers):
            writing.popleft().wait()
        reading.append((extent, address, store.read(extent, address, extent.nbytes)))
        asked += extent.nbytes
        if len(reading) > len(buffers) // 2:
            write_back()
    while reading:
        write_back()
    for write in writing:
        write.wait()
    return asked, asked, time.perf_counter() - start


def _rate(
    jobs: Sequence[tuple[Callable[[Extent, int, int], Ticket], Extent, int]], depth: int, most_bytes: int
) -> float:
    """Bytes per second of the jobs, over and over, with ``depth`` of them in flight, up to ``most_bytes``."""
    moved = asked = 0
    flying: list[tuple[Ticket, int]] = []
    start = time.perf_counter()
    for operation, extent, address in cycle(jobs):
        if asked >= most_bytes or (time.perf_counter() - start > _SECONDS and moved):
            break
        if len(flying) >= depth:
            ticket, nbytes = flying.pop(0)
            ticket.wait()
            moved += nbytes
        flying.append((operation(extent, address, extent.nbytes), extent.nbytes))
        asked += extent.nbytes
    for ticket, nbytes in flying:
        ticket.wait()
        moved += nbytes
    return moved / (time.perf_counter() - start)
