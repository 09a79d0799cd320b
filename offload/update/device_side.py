"""Updates, on a device, of tiles that rest on the host: a tile goes there, takes its step, and comes back.

The kernel is the one that updates units which are resident there, so the bits are those of the CPU. Two tiles at a time
keep both ways of the link busy: each has memory there with a stream of its own, in whose order it comes, is updated and
goes. So a tile needs no event but its last, and more tiles can be sent than there is memory for: they come in turn.

[Note: Which side updates a tile] The side that will have it done first. The CPU's rate is measured as it goes, anew in
each step, whose first tile is the CPU's; the link's rate is measured before training. The tiles that either side has
been given already count. A slow CPU sees more tiles leave, a slow link none. Both sides work in the same host memory,
whose bandwidth they share, so that no rate holds for long: the link is given work for as long as the CPU takes for two
tiles. So neither side waits long for the other at the end of a step (on an H200 with 16 cores the link had a hundred
tiles at a time before, and the CPU had nothing to do for the last 0.2 of 1.6 s).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from offload.device.protocol import Device, Event
from offload.memory import tensor_at
from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.plan.buffers import NUM_DEVICE_TILES, tile_parts, tile_sizes
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.report.trace import Span
from offload.tiers.home import Home, UnitHomes
from offload.units import Tile
from offload.update.step import UnitUpdate, apply
from offload.waiting import Job, Worker

_NUM_QUEUED = 2 * NUM_DEVICE_TILES
"""Trips that are no long queue: one that uses each buffer, and one that follows it at once."""


class DeviceBuffer:
    """Memory for one tile with all that its update needs, and the stream in whose order it is used."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        device.allocate(self._storage, nbytes)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        self.memory.set_(self._storage, 0, (nbytes,))  # type: ignore[call-overload]
        self.stream = device.new_stream()
        self.stream.wait(device.compute.record())

    def close(self) -> None:
        self._device.free(self._storage)


def tile_buffers(device: Device, nbytes: int) -> list[DeviceBuffer]:
    """Buffers for tiles, in ``nbytes`` as ``device_tile_bytes`` has them."""
    return [DeviceBuffer(device, nbytes // NUM_DEVICE_TILES) for _ in range(NUM_DEVICE_TILES)]


@dataclass(eq=False)
class Trip:
    """A tile's way there and back. ``views`` of its memory on either side live as long as it does."""

    tile: Tile
    views: list[torch.Tensor]
    span: Span
    seconds: float
    """Of the link, both ways."""
    back: Event | None = None
    """The host has all of it again; None until it is sent."""
    sent: Job | None = None
    """The call that sends it."""
    error: BaseException | None = None
    """Sending it has failed."""

    def is_over(self) -> bool:
        return self.error is not None or (self.back is not None and self.back.done())


class DeviceSide:
    """All calls but those that make and close it come from the thread that updates. Tiles larger than a buffer stay on
    the host; without buffers all do."""

    def __init__(
        self, rule: Rule, formats: Formats, meter: Meter, link: LinkRates, buffers: Sequence[DeviceBuffer] = ()
    ) -> None:
        self.copied_bytes = (0, 0)
        """To the device and to the host, since the engine was made."""
        self._rule = rule
        self._formats = formats
        self._link = link
        self._meter = meter
        self._buffers = deque(buffers)
        self._trips: deque[Trip] = deque()
        """Those that are not over."""
        self._queued = 0.0
        """Seconds that the link is busy with them: both ways are busy at the same time."""
        self._sender = Worker("offload-trips")
        self._cpu_seconds = 0.0
        """Seconds that an element takes on the CPU; 0 while it is not known."""

    @property
    def takes_tiles(self) -> bool:
        """Some tiles may be sent there."""
        return bool(self._buffers)

    @property
    def can_compare(self) -> bool:
        """It is known which side has a tile done first."""
        return self._cpu_seconds > 0 or not self._buffers

    def begin_step(self) -> None:
        """Forget how fast the CPU was."""
        self._cpu_seconds = 0.0

    def cpu_took(self, tile: Tile, seconds: float) -> None:
        """The CPU has updated a tile."""
        if self._buffers:
            measured = seconds / tile.numel
            self._cpu_seconds = (self._cpu_seconds + measured) / 2 if self._cpu_seconds else measured

    def sooner(self, tiles: Iterable[Tile], given: int = 0) -> Iterator[int]:
        """Index of each tile that, sent now, is back before the CPU has done it and those before it that stay, after so
        many elements that it was ``given``; none while the link's queue is long.

        The caller sends a tile before it asks for the next one.
        """
        num_elements = given  # that the CPU is to do
        for index, tile in enumerate(tiles if self._cpu_seconds else ()):
            if len(self._trips) >= _NUM_QUEUED and self._queued >= 2 * tile.numel * self._cpu_seconds:
                return
            num_elements += tile.numel
            if self._is_back_before(tile, num_elements * self._cpu_seconds):
                num_elements -= tile.numel
                yield index

    def _is_back_before(self, tile: Tile, seconds: float) -> bool:
        if sum(tile_parts(tile, self._formats)) > self._buffers[0].memory.nbytes:
            return False
        return self._queued + sum(self._ways(tile)) < seconds

    def begin(self, update: UnitUpdate, tile: Tile, at: TileBytes) -> Trip:
        """Have a tile sent on its way, by a thread of its own: the caller goes on with tiles of the CPU meanwhile.

        Nothing touches the memory ``at`` these addresses, except to read the gradients, until the trip is over.
        """
        formats, buffer = self._formats, self._buffers[0]
        self._buffers.rotate(-1)
        sizes = tile_sizes(tile, formats)
        here = [
            tensor_at(address, nbytes, torch.uint8)
            for address, nbytes in zip((at.states_before, at.weights_before, at.grads), sizes, strict=True)
        ]
        back = [tensor_at(address, nbytes, torch.uint8) for address, nbytes in zip(at[:2], sizes[:2], strict=True)]
        starts = accumulate(tile_parts(tile, formats), initial=0)
        there = [buffer.memory[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=False)]
        span = self._meter.trace.begin("update on the device", update.unit.name, sum(self._moved(tile)))
        trip = Trip(tile, here + there + back, span, max(self._ways(tile)))
        self._trips.append(trip)
        self._queued += trip.seconds
        trip.sent = self._sender.submit(partial(self._send, trip, update, buffer, here, there, back))
        into, out = self._moved(tile)
        self.copied_bytes = (self.copied_bytes[0] + into, self.copied_bytes[1] + out)
        return trip

    def end(self, trip: Trip) -> None:
        """Wait until the tile is back. Raises what sending it has failed with."""
        if trip.sent is not None:
            trip.sent.wait(lambda: f"the start of an update of {trip.span.name} on the device")
        if trip.error is not None:
            raise trip.error
        if trip.back is not None:
            trip.back.wait()
        self._meter.trace.end(trip.span)
        self._trips.remove(trip)
        self._queued = self._queued - trip.seconds if self._trips else 0.0

    def drain(self) -> None:
        """Wait for all trips, also one that could not be sent; what they did is of no interest."""
        for trip in self._trips:
            if trip.sent is not None:
                trip.sent.wait(lambda: "the start of updates on the device")
        for buffer in self._buffers if self._trips else ():
            buffer.stream.record().wait()
        self._trips.clear()
        self._queued = 0.0

    def _send(
        self,
        trip: Trip,
        update: UnitUpdate,
        buffer: DeviceBuffer,
        here: list[torch.Tensor],
        there: list[torch.Tensor],
        back: list[torch.Tensor],
    ) -> None:
        try:
            for target, source in zip(there, here, strict=True):
                buffer.stream.copy(target, source)
            addresses = TileBytes.in_place(*(view.data_ptr() for view in there))
            apply(self._rule, self._formats, update, trip.tile, addresses, buffer.stream.kernel)
            for target, source in zip(back, there[:2], strict=True):
                buffer.stream.copy(target, source)
            trip.back = buffer.stream.record()
        except BaseException as error:
            trip.error = error

    def close(self) -> None:
        """Free the device's memory. No trip is under way."""
        self._sender.finish()
        for buffer in self._buffers:
            buffer.close()

    def _ways(self, tile: Tile) -> tuple[float, float]:
        """Seconds to the device, and back."""
        into, out = self._moved(tile)
        return into / self._link.to_device, out / self._link.to_host

    def _moved(self, tile: Tile) -> tuple[int, int]:
        """Bytes to the device, and back."""
        states, weights, grads = tile_sizes(tile, self._formats)
        return states + weights + grads, states + weights


class NoResidentUpdates:
    """No unit is resident on a device."""

    def update(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        return list(step)


class ResidentUpdates:
    """Updates of units that are resident on a device: in place, in the order of compute, on the training thread."""

    def __init__(self, device: Device, rule: Rule, formats: Formats, homes: Sequence[UnitHomes]) -> None:
        self._device = device
        self._rule = rule
        self._formats = formats
        self._homes = homes

    def update(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        """Give the device its part of a step, after the work that compute has been given; the updates that are left."""
        left: list[UnitUpdate] = []
        changed: list[Home] = []
        for update in step:
            homes = self._homes[update.unit.index]
            weights, grads = homes.weights.tensor, None if homes.grads is None else homes.grads.tensor
            if weights is None or grads is None:
                left.append(update)
                continue
            for of_tile in homes.tiles:
                tile, states = of_tile.tile, of_tile.states.tensor
                at = TileBytes.in_place(
                    0 if states is None else states.data_ptr(),
                    weights.data_ptr() + tile.start * self._formats.weights,
                    grads.data_ptr() + tile.start * self._formats.grads,
                )
                apply(self._rule, self._formats, update, tile, at, self._device.compute.kernel)
            changed += [homes.weights, *(of_tile.states for of_tile in homes.tiles)]
        if changed:
            event = self._device.compute.record()
            for record in changed:
                record.changes_until(event)
        return left
