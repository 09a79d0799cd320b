"""Rates of the store's paths and of a device's link, measured in the moments before training starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch

from offload.device.protocol import Device, Event, Stream
from offload.memory import tensor_at
from offload.report.report import Bandwidths, LinkRates
from offload.tiers.window import DeviceWindow
from swapper import DurableStore, Extent, Ticket

_SECONDS = 0.2
"""Duration of each of the three measurements."""


def measure(store: DurableStore, extents: Sequence[Extent], buffers: Sequence[int]) -> Bandwidths:
    """Read, write, and do both at once, for a moment each. What is written is what was read: nothing changes.

    ``extents`` are of one kind, none larger than a buffer; ``buffers`` are addresses, two or more. Some extents are
    written and the others read, since no extent may be in two transfers at a time.
    """
    half = len(buffers) // 2
    num_written = max(min(half, len(extents) // 2), 1)
    own = list(zip(extents[:num_written], buffers[:num_written], strict=True))
    others = extents[num_written:] or extents
    spare = buffers[half:][: len(others)]
    others = others[: len(others) // len(spare) * len(spare)]  # so that no buffer is in two transfers at a time

    def read(extent: Extent, address: int) -> Ticket:
        return store.read(extent, address, extent.nbytes)

    def write(extent: Extent, address: int) -> Ticket:
        return store.write(extent, address, extent.nbytes)

    for extent, address in own:
        read(extent, address).wait()
    reads = [(read, extent, address) for extent, address in zip(others, cycle(spare), strict=False)]
    writes = [(write, extent, address) for extent, address in own]
    read_rate, write_rate = _rate(reads, len(spare)), _rate(writes, len(own))
    if len(extents) == 1:  # nothing to read while it is written
        return Bandwidths(read_rate, write_rate, 1.0)
    depth = min(len(spare), len(own))
    mixed = [job for pair in zip(cycle(reads), islice(cycle(writes), len(reads)), strict=False) for job in pair]
    return Bandwidths(read_rate, write_rate, _envelope(read_rate, write_rate, _rate(mixed, 2 * depth)))


def measure_link(device: Device, window: DeviceWindow, address: int, numel: int) -> LinkRates:
    """Copy so many elements to the device and back, for a moment each. The host memory at ``address`` holds afterwards
    what it held."""
    host = tensor_at(address, numel, window.dtype)
    window.allocate()
    device.to_device.wait(device.compute.record())
    rates = []
    there = window.target[:numel]
    for stream, target, source in ((device.to_device, there, host), (device.to_host, host, there)):
        rates.append(_copy_rate(stream, target, source))
    window.close()
    return LinkRates(*rates)


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


def _rate(jobs: Sequence[tuple[Callable[[Extent, int], Ticket], Extent, int]], depth: int) -> float:
    """Bytes per second of the jobs, over and over, with ``depth`` of them in flight."""
    moved = 0
    flying: list[tuple[Ticket, int]] = []
    start = time.perf_counter()
    for operation, extent, address in cycle(jobs):
        if time.perf_counter() - start > _SECONDS and moved:
            break
        if len(flying) >= depth:
            ticket, nbytes = flying.pop(0)
            ticket.wait()
            moved += nbytes
        flying.append((operation(extent, address), extent.nbytes))
    for ticket, nbytes in flying:
        ticket.wait()
        moved += nbytes
    return moved / (time.perf_counter() - start)


def _envelope(read: float, write: float, both: float) -> float:
    """The ``q`` for which equal parts of reading and writing take as long as measured, between 1 and 8.

    With ``a`` and ``b`` the seconds of each part alone and ``t`` of both, ``(a/t)^q + (b/t)^q = 1``.
    """
    a, b, t = 0.5 / read, 0.5 / write, 1 / both
    low, high = 1.0, 8.0
    if a + b <= t:
        return low
    for _ in range(40):
        q = (low + high) / 2
        if math.pow(a / t, q) + math.pow(b / t, q) > 1:
            low = q
        else:
            high = q
    return low
