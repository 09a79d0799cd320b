"""What the store's paths and a device's link can do, measured in the moments before training starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from offload.device import Device
from offload.memory import tensor_at
from offload.report import Bandwidths, Link
from offload.window import DeviceWindow
from swapper import Extent, Lease, Store, Ticket

_SECONDS = 0.2
"""How long each of the three measurements takes."""


def measure(store: Store, extents: Sequence[Extent], buffers: Sequence[Lease]) -> Bandwidths:
    """Read, write, and do both at once, for a moment each. What is written is what was read: nothing changes.

    ``extents`` are of one kind, none larger than a buffer; there must be at least two buffers.
    """
    kept, spare = list(buffers[: len(buffers) // 2]), list(buffers[len(buffers) // 2 :][: len(extents)])
    own = list(zip(extents, kept, strict=False))
    extents = extents[: len(extents) // len(spare) * len(spare)]  # so that no buffer is in two transfers at a time

    def read(extent: Extent, lease: Lease) -> Ticket:
        return store.read(extent, lease.address, extent.nbytes)

    def write(extent: Extent, lease: Lease) -> Ticket:
        return store.write(extent, lease.address, extent.nbytes)

    reads = [(read, extent, lease) for extent, lease in zip(extents, cycle(spare), strict=False)]
    for extent, lease in own:
        read(extent, lease).wait()
    writes = [(write, extent, lease) for extent, lease in own]
    read_rate = _rate(reads, len(spare))
    write_rate = _rate(writes, len(own))
    mixed = [job for pair in zip(cycle(reads), islice(cycle(writes), len(reads)), strict=False) for job in pair]
    both_rate = _rate(mixed, 2 * len(own))
    return Bandwidths(read_rate, write_rate, _envelope(read_rate, write_rate, both_rate))


def measure_link(device: Device, window: DeviceWindow, address: int) -> Link:
    """Copy to the device and back, for a moment each. The host memory at ``address`` holds afterwards what it held."""
    host = tensor_at(address, window.numel, window.dtype)
    window.allocate()
    device.to_device.wait(device.compute.record())
    rates = []
    for stream, target, source in ((device.to_device, window.target, host), (device.to_host, host, window.target)):
        copied = 0
        start, before = time.perf_counter(), stream.record()
        while not copied or time.perf_counter() - start < _SECONDS / 2:
            stream.copy(target, source)
            after = stream.record()
            after.wait()
            copied += source.nbytes
        rates.append(copied / after.seconds_since(before))
    window.close()
    return Link(*rates)


def _rate(jobs: Sequence[tuple[Callable[[Extent, Lease], Ticket], Extent, Lease]], depth: int) -> float:
    """Bytes per second of the jobs, over and over, with ``depth`` of them in flight."""
    moved = 0
    flying: list[tuple[Ticket, int]] = []
    start = time.perf_counter()
    for operation, extent, lease in cycle(jobs):
        if time.perf_counter() - start > _SECONDS and moved:
            break
        if len(flying) >= depth:
            ticket, nbytes = flying.pop(0)
            ticket.wait()
            moved += nbytes
        flying.append((operation(extent, lease), extent.nbytes))
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
