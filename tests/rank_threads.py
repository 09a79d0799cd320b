"""Ranks that are threads of one process, for tests: where they meet, links between their memories, and a heartbeat."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from offload.ranks.world import Peers
from offload.waiting import Failure

FOREVER_S = 20.0
"""No test takes this long, unless it fails."""


class Meeting:
    """Where the threads of all ranks wait for each other, and see what each has."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self._changed = threading.Condition()
        self._failures = failures
        self._brought: dict[tuple[tuple[int, ...], int, int], Any] = {}
        self._rounds: dict[tuple[tuple[int, ...], int], int] = {}

    def meet(self, peers: Peers, own: Any) -> list[Any]:
        me = peers.ranks, peers.own
        with self._changed:
            now = self._rounds[me] = self._rounds.get(me, 0) + 1
            self._brought[peers.ranks, now, peers.own] = own
            self._changed.notify_all()
            keys = [(peers.ranks, now, place) for place in range(peers.size)]
            while not all(key in self._brought for key in keys):
                for failure in self._failures:
                    failure.check()
                assert self._changed.wait(FOREVER_S), "a rank does not come"
            return [self._brought[key] for key in keys]

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class FakeLinks:
    """Between the memories of ranks that are threads. Sizes that do not fit would end a process."""

    def __init__(self, meeting: Meeting) -> None:
        self.received_bytes = 0
        self.num_parts = 0
        self._meeting = meeting

    def all_gather(self, into: torch.Tensor, own: torch.Tensor, peers: Peers) -> None:
        into.copy_(torch.cat(self._meeting.meet(peers, own.clone())))

    all_gather_message = all_gather

    def scatter_parts(self, into: torch.Tensor, own: torch.Tensor, peers: Peers, received: Sequence[int]) -> None:
        self.num_parts += 1
        sent = self._meeting.meet(peers, own.view(torch.uint8).clone())
        parts = [flat.view(peers.size, -1)[peers.own] for flat in sent]
        assert [part.numel() for part in parts] == list(received)
        into.view(torch.uint8).copy_(torch.cat(parts))

    def turn(self, *events: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def point(self) -> None:
        return None

    def mark(self) -> None:
        return None

    def after(self, event: object) -> None:
        return None

    def end(self) -> bool:
        return True


class FakeHeartbeat:
    def __init__(self) -> None:
        self.failure = Failure()

    def attach(self, waiting: Any) -> None:
        self.waiting = waiting

    def check(self) -> None:
        self.failure.check()

    def wait_for(self, work: Any) -> None:
        work.wait()
