"""Transfers between the memories of ranks: of their hosts, each of which is waited for, or of their devices, where each
takes its place in a stream and nobody waits. All ranks ask for the same ones in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed

from offload.device.protocol import Device, Event
from offload.ranks.groups import Group, take_group
from offload.ranks.heartbeat import Heartbeat
from offload.ranks.torch_distributed import abort_group
from offload.ranks.world import Peers, World

_LAST_S = 30
"""Seconds that a program has for its end, in which NCCL or the driver may wait for a peer that is gone."""


def end_all_the_same(aborting: Sequence[threading.Thread]) -> None:
    """Have the kernel end this process, with SIGALRM, if its last part does not come to an end: an abort that hangs is
    waited for by destructors which no thread of Python outlives. For ``atexit``, in the main thread."""
    if any(thread.is_alive() for thread in aborting):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LAST_S)


class Links(Protocol):
    """``received_bytes`` came from other ranks. All tensors are flat, contiguous and where these links go."""

    received_bytes: int

    def all_gather(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        """Gather what these ranks have as ``own``, one after the other; ``own`` may be this rank's place in
        ``into``."""

    def gather(self, into: torch.Tensor | None, own: torch.Tensor, peers: Peers, place: int) -> None:
        """The same, for one of them, which gives ``into``."""

    def scatter_parts(self, into: torch.Tensor, own: torch.Tensor, peers: Peers, received: Sequence[int]) -> None:
        """This rank's part of what each peer has as ``own``, one after the other: so many bytes are ``received`` of
        each, none of those whose ``own`` is empty."""

    def turn(self, *events: Event | None) -> contextlib.AbstractContextManager[None]:
        """Within, this thread's transfers and torch's operations come after these events and what was asked for in
        such turns before."""

    def point(self) -> Event | None:
        """Event at which the links have done all that they were given."""

    def mark(self) -> Event | None:
        """Event that this thread's work has come to. None: it is done."""

    def after(self, event: Event | None) -> None:
        """Have what this thread asks torch for from now on come after ``event``."""


def all_reduce(links: Links, flat: torch.Tensor, landing: torch.Tensor, peers: Peers) -> None:
    """Make ``flat`` the sum of these ranks' ones, in their order: each adds up a part, and gives it to the others.
    Their bytes come to ``landing``, which is at least as large."""
    if peers.size == 1:
        return
    parts = landing[: flat.nbytes].view(flat.dtype)
    links.scatter_parts(parts, flat, peers, [flat.nbytes // peers.size] * peers.size)
    total, *others = parts.view(peers.size, -1)
    for other in others:
        total.add_(other)
    links.all_gather(flat, total, peers)


class _Transfers:
    """Transfers, as each is asked of ``torch.distributed``."""

    def __init__(self) -> None:
        self.received_bytes = 0

    def all_gather(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        if peers.size == 1:
            into.copy_(own)
            return
        call = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its older name
        self._carry_out(partial(call, into.view(torch.uint8), own.view(torch.uint8)), peers, [own], [into])
        self.received_bytes += into.nbytes - own.nbytes

    def gather(self, into: torch.Tensor | None, own: torch.Tensor, peers: Peers, place: int) -> None:
        parts = None if into is None else list(into.view(torch.uint8).view(peers.size, -1).unbind())
        call = partial(distributed.gather, own.view(torch.uint8), parts, peers.members[place])
        self._carry_out(call, peers, [own], [] if into is None else [into])
        self.received_bytes += 0 if into is None else into.nbytes - own.nbytes

    def scatter_parts(self, into: torch.Tensor, own: torch.Tensor, peers: Peers, received: Sequence[int]) -> None:
        if peers.size == 1:
            into.view(torch.uint8).copy_(own.view(torch.uint8))
            return
        sent = [own.nbytes // peers.size] * peers.size
        flat = into.view(torch.uint8), own.view(torch.uint8)
        call = partial(distributed.all_to_all_single, *flat, list(received), sent)
        self._carry_out(call, peers, [own], [into])
        self.received_bytes += into.nbytes - received[peers.own]

    def _carry_out(
        self,
        call: Callable[..., Any],
        peers: Peers,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        raise NotImplementedError


_END_S = 0.5
"""Time in which what is under way when a rank fails ends, or perhaps never does."""


class HostLinks(_Transfers):
    """Between host memories, over gloo."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat = heartbeat
        self._under_way: list[Any] = []
        """The works that are waited for. After a failure nobody waits for them."""

    def all_gather(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        """Each gives its own to all others, at the same time. Gloo's own operation would go through memory that is made
        anew for each call: with 40 MB, more than half of the time goes into that."""
        parts = into.view(torch.uint8).view(peers.size, -1).unbind()
        parts[peers.own].copy_(own.view(torch.uint8))
        for part, rank in zip(parts, peers.members if peers.size > 1 else (), strict=False):
            self._under_way.append(distributed.broadcast(part, rank, peers.group, async_op=True))
        self._wait()
        self.received_bytes += into.nbytes - own.nbytes

    def all_gather_message(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        """The same in one operation: for a few bytes."""
        super().all_gather(into, own, peers)

    def end(self) -> bool:
        """Nothing is asked for any more. False: a transfer that a failed rank has left may still be under way, and what
        it reads and writes must stay."""
        deadline = time.monotonic() + _END_S
        while not all(work.is_completed() for work in self._under_way):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def turn(self, *events: Event | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def point(self) -> None:
        return None

    def mark(self) -> None:
        return None

    def after(self, event: Event | None) -> None:
        return None

    def _carry_out(
        self, call: Callable[..., Any], peers: Peers, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        self._under_way.append(call(group=peers.group, async_op=True))
        self._wait()

    def _wait(self) -> None:
        for work in self._under_way:
            self._heartbeat.wait_for(work)
        self._under_way.clear()


class DeviceLinks(_Transfers):
    """Between the memories of devices, one for each rank, in the order of one stream of each: communicators that ran
    side by side could wait for each other on two ranks.

    A peer that is gone lets a transfer wait without end, and compute with it. So the first error of any rank aborts all
    transfers: they end, and what they should have brought is void. Whoever asks the engine next gets the error.
    """

    def __init__(self, world: World, device: Device) -> None:
        """All ranks of the ``world`` call this together."""
        super().__init__()
        self._device = device
        self._heartbeat = world.heartbeat
        self._stream = device.new_compute_stream()
        self._groups: dict[tuple[int, ...], Group] = {}
        """By ranks."""
        world.heartbeat.failure.when_known(self._abort)
        for peers in (world.shards, world.replicas):
            if peers.size > 1 and peers.ranks not in self._groups:
                self._groups[peers.ranks] = take_group(peers.members, self._heartbeat, device.backend)
                self._connect(peers)

    def close(self) -> None:
        """No transfer is under way, or all were aborted."""
        for held in self._groups.values():
            held.release(broken=self._heartbeat.failure.is_known)

    @contextlib.contextmanager
    def turn(self, *events: Event | None) -> Iterator[None]:
        for event in events:
            if event is not None:
                self._stream.wait(event)
        with self._device.current(self._stream), torch.no_grad():
            yield

    def point(self) -> Event:
        return self._stream.record()

    def mark(self) -> Event:
        return self._device.compute.record()

    def after(self, event: Event | None) -> None:
        if event is not None:
            self._device.compute.wait(event)

    def _carry_out(
        self, call: Callable[..., Any], peers: Peers, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        start = partial(call, group=self._groups[peers.ranks].group, async_op=True)
        self._device.collective(start, self._heartbeat.wait_for, reads=reads, writes=writes)

    def _connect(self, peers: Peers) -> None:
        """The first transfer of a group makes its connections, and waits for all peers; ``heartbeat`` looks after
        them."""
        own = torch.zeros(1, device=self._device.torch_device)
        into = torch.zeros(peers.size, device=self._device.torch_device)
        made = self.mark()  # the thread that connects may be another, with another stream

        def connect() -> None:
            with self.turn(made):
                self.all_gather(into, own, peers)

        self._heartbeat.wait_for_call(connect, "connect their devices")
        self.after(self.point())  # until then both must live: the streams know no other order of them
        self.received_bytes = 0

    def _abort(self) -> None:
        """Each group in a thread of its own: one may be waited for by what another one lets go."""
        if self._device.backend == "gloo":  # which whoever waits for it leaves
            return
        threads = [
            threading.Thread(target=abort_group, args=(held.group,), name="offload-abort", daemon=True)
            for held in self._groups.values()
        ]
        atexit.register(end_all_the_same, threads)
        for thread in threads:
            thread.start()
