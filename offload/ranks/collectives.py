"""Collectives of the ranks, one operation after the other, in the same order on all of them.

Each rank has a queue of operations (``Kind``). A thread carries
them out in *rounds*. In a round the ranks tell each other what is at the head of their queues. While that is the same
they carry it out. Where it differs, one rule, which looks at nothing but that, says what comes next:

- a gather, for the ranks that want it: the others give their part;
- else an exchange of gradients, among the ranks that have some;
- else the ranks are at different places of the program, and all of them end with an error that says where each is.

A rank that has no operation does not come to a round, and the others wait for it: most often it will want the same. It
may be in a barrier of the user's own, in which it would never want anything. So a rank that has waited for long calls
(``offload.ranks.heartbeat``), and ranks that are called give without wanting (``Rounds.give``), unless their weights
are just being changed (``suspend``).

So ranks may use other units than their peers, and in another order; what is next depends on the program of each rank
and never on its speed. A gather asks nothing of the training thread of a rank that only gives.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import distributed

from aio_ext.latch import Latch
from offload.errors import RankError
from offload.ranks.agreement import NO_FACTS, Facts, disagreement, told
from offload.ranks.heartbeat import PATIENCE_S, Waiting
from offload.ranks.links import HostLinks
from offload.ranks.places import Place, Places
from offload.ranks.world import Peers, World
from offload.waiting import Worker

_NUM_SHOWN = 8
"""Operations that a rank tells of in one round: while they are the same, no other round is needed."""

_SLICE_S = 0.1

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)
"""Those that ranks join, by the numbers under which they tell each other."""


_TOGETHER = (
    "Steps, saves and the end are calls of all ranks together, on equally many batches: an `if rank == 0:` around one "
    "of them ends so (docs/ranks.md)."
)


class Kind(IntEnum):
    """An operation.

    - ``WEIGHTS``: an all-gather of a unit's weights, for the ranks that want them.
    - ``GRADIENTS``: a reduce-scatter of a unit's gradients, among the ranks that have some.
    - ``MESSAGE``: an all-gather of a few bytes, at one place of the program.
    - ``LEAVE``: the end of all ranks.
    - ``BROADCAST``: all ranks get the first one's bytes.
    """

    WEIGHTS = 1
    GRADIENTS = 2
    MESSAGE = 3
    LEAVE = 4
    BROADCAST = 5


class Operation:
    """One rank's part of an operation. ``number`` says which of its kind: of what unit, for one. ``facts`` are those
    that it follows from."""

    def __init__(self, kind: Kind, number: int, name: str, own: Any, rounds: Rounds, facts: Facts = NO_FACTS) -> None:
        self.code = (kind << 32) | number
        self.name = name
        self.facts = facts
        self.own = own
        self.result: Any = None
        self._rounds = rounds
        self._over = Latch()

    def done(self) -> bool:
        """It was carried out."""
        return self._over.is_set()

    def wait(self) -> None:
        """Block until it was. Raises the first error of any rank."""
        heartbeat, deadline = self._rounds.world.heartbeat, time.monotonic() + PATIENCE_S
        with self._rounds.needed():
            while not self._over.wait(_SLICE_S):
                heartbeat.check()
                if time.monotonic() > deadline:
                    heartbeat.failure.raise_first(
                        RankError(f"a rank is at {self.name}, and others have not come there for {PATIENCE_S:g} s")
                    )

    def end(self) -> None:
        self._over.set()


CarryOut = Callable[[int, Sequence[int], Operation | None], None]
"""Does a rank's part of operation ``number`` among the ranks that want it; this one's operation, if it wants it. Also
called on ranks that do not."""


class LocalCollectives:
    """Collectives at places of the program that all ranks come to, in a world of one, which does them by itself."""

    received_bytes = 0
    """Received from other ranks, between host memories."""

    def all_gather(self, name: str, own: torch.Tensor, facts: Facts = NO_FACTS) -> list[torch.Tensor]:
        """Wait for all ranks; what each of them gives, of the same shape and dtype as ``own``. ``name`` is where the
        program is: the same on all ranks, and so are the ``facts``. Raises ``RankError`` on all of them if not."""
        return [own]

    def all_gather_parts(self, name: str, own: torch.Tensor) -> list[torch.Tensor]:
        """As ``all_gather``, with flat tensors that may have different lengths; one without elements has any dtype."""
        return [own]

    def join(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The flat tensors of those ranks that hold the shards of one copy with this one, one after the other."""
        return own

    def broadcast(self, name: str, tensor: torch.Tensor) -> None:
        """Make ``tensor``, contiguous in host memory and of one size on all ranks, what the first rank has."""

    def suspend(self) -> None:
        """This rank's weights are about to change: until ``resume`` nobody gets them while it has no operation."""

    def resume(self) -> None:
        """They are what the program has come to, after as many calls as of ``suspend``, and one for the making of the
        engine."""

    def leave(self) -> None:
        """Wait until all ranks leave; meanwhile this one gives what others want of it."""

    def stop(self) -> bool:
        """End. False: a transfer that a failed rank has left may still be under way, and what it reads and writes, this
        object included, must stay."""
        return True


_all: weakref.WeakSet[Rounds] = weakref.WeakSet()
"""Those of this process: what one waits for may be ended by the ranks of another alone."""


class Rounds(Waiting):
    """The same of several ranks: see the module's docstring. Operations are submitted by any thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links = HostLinks(world.heartbeat)
        self._all = Peers(tuple(range(world.size)), world.rank, world.held, world.members)
        self._heartbeat = world.heartbeat
        self._failure = world.heartbeat.failure
        self._carry_out: dict[int, CarryOut] = {
            Kind.MESSAGE: self._message,
            Kind.LEAVE: _nothing,
            Kind.BROADCAST: self._broadcast,
        }
        self._lock = threading.Lock()
        """Guards the queue. Innermost."""
        self._queue: deque[Operation] = deque()
        self._worker = Worker("offload-ranks")
        self._met_at: float | None = None
        """Since when the worker waits for the others to come to a round in which something is done."""
        self._is_giving = False
        """Takes part in rounds without an operation. Guarded by the lock, like the next one."""
        self._num_suspended = 1
        """Changes of this rank's weights that are under way: the making of the engine is the first."""
        self._needed_since: float | None = None
        self._places = Places(world.members)
        _all.add(self)
        world.heartbeat.attach(self)

    def register(self, kind: Kind, carry_out: CarryOut) -> None:
        """Register who does operations of this kind."""
        self._carry_out[kind] = carry_out

    def submit(self, kind: Kind, number: int, name: str, own: Any, facts: Facts = NO_FACTS) -> Operation:
        """Have an operation carried out after those before it. Never waits."""
        operation = Operation(kind, number, name, own, self, facts)
        with self._lock:
            self._queue.append(operation)
            self._is_giving = False
        self._worker.submit(lambda: self._advance(operation))
        return operation

    def all_gather(self, name: str, own: torch.Tensor, facts: Facts = NO_FACTS) -> list[torch.Tensor]:
        number = zlib.crc32(f"{name}, {own.nbytes} bytes{facts or ''}".encode())  # other sizes would end the process
        operation = self.submit(Kind.MESSAGE, number, name, own.contiguous(), facts)
        operation.wait()
        found: list[torch.Tensor] = operation.result
        return found

    def join(self, name: str, own: torch.Tensor) -> torch.Tensor:
        parts = self.all_gather_parts(name, own)
        return torch.cat([parts[rank] for rank in self.world.shards.ranks])

    def all_gather_parts(self, name: str, own: torch.Tensor) -> list[torch.Tensor]:
        numbers = torch.tensor([own.numel(), _DTYPES.index(own.dtype)])
        sizes, dtypes = zip(*(of_rank.tolist() for of_rank in self.all_gather(name, numbers)), strict=True)
        dtype = _DTYPES[next((kind for size, kind in zip(sizes, dtypes, strict=True) if size), dtypes[0])]
        padded = torch.zeros(max(sizes), dtype=dtype)
        padded[: own.numel()] = own.reshape(-1)
        parts = self.all_gather(name, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, name: str, tensor: torch.Tensor) -> None:
        number = zlib.crc32(f"{name}, {tensor.nbytes} bytes".encode())
        self.submit(Kind.BROADCAST, number, name, tensor.view(-1).view(torch.uint8)).wait()

    def leave(self) -> None:
        if not self.world.held.is_destroyed:  # else nobody can be told, or can ask
            self.submit(Kind.LEAVE, 0, "the end (close())", None).wait()

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Within, the training thread waits for operations that it has submitted."""
        before, self._needed_since = self._needed_since, time.monotonic()
        try:
            yield
        finally:
            self._needed_since = before

    def suspend(self) -> None:
        with self._lock:
            self._num_suspended += 1
            self._is_giving = False

    def resume(self) -> None:
        with self._lock:
            self._num_suspended -= 1

    @property
    def received_bytes(self) -> int:
        return self.links.received_bytes

    def stop(self) -> bool:
        self._worker.stop()  # no operation is carried out any more, but the one at hand
        return self.links.end()

    # On the heartbeat's thread: see ``Waiting``.

    def waited_s(self) -> float:
        met_at = self._met_at
        return 0.0 if met_at is None or not self._queue else time.monotonic() - met_at

    def can_be_given(self) -> bool:
        with self._lock:
            return bool(self._queue) and self._queue[0].code >> 32 == Kind.WEIGHTS

    def give(self) -> None:
        with self._lock:
            if self._queue or self._is_giving or self._num_suspended:
                return
            self._is_giving = True
        self._worker.submit(self._give)

    def place(self) -> Place:
        return self._places.look(self, list(_all))

    @property
    def members(self) -> Sequence[int]:
        return self.world.members

    @property
    def needed_for(self) -> str:
        with self._lock:
            return self._queue[0].name if self._queue and self._needed_since is not None else ""

    def stuck_s(self) -> float:
        since = self._needed_since
        return 0.0 if since is None else min(time.monotonic() - since, self.waited_s())

    # On the worker's thread.

    def all_gather_rows(self, own: torch.Tensor) -> torch.Tensor:
        """Inside of an operation: what all ranks have as ``own``, of one dimension, as rows."""
        into = torch.empty((self.world.size, len(own)), dtype=own.dtype)
        self.links.all_gather_message(into.view(-1), own, self._all)
        return into

    def _advance(self, operation: Operation) -> None:
        """Carry out rounds until the operation is over."""
        try:
            while not operation.done() and not self._failure.is_known:
                self._round()
        except BaseException as error:
            self._failure.record(error)

    def _give(self) -> None:
        """Take part in rounds until this rank has an operation of its own, or nobody needs what it has."""
        try:
            while self._is_giving and not self._failure.is_known:
                self._round()
        except BaseException as error:
            self._failure.record(error)

    def _round(self) -> None:
        with self._lock:
            shown = [self._queue[index] for index in range(min(len(self._queue), _NUM_SHOWN))]
        own = torch.zeros(_NUM_SHOWN, dtype=torch.int64)
        own[: len(shown)] = torch.tensor([operation.code for operation in shown])
        self._met_at = time.monotonic() if self._met_at is None else self._met_at
        rows = self.all_gather_rows(own)
        for column, codes in enumerate(rows.t().tolist()):
            if codes[0] and codes.count(codes[0]) == len(codes):
                self._do(codes[0], range(self.world.size))
            elif column == 0:
                chosen = self._choose(codes)
                if chosen:
                    self._do(chosen, [rank for rank, code in enumerate(codes) if code == chosen])
                else:
                    with self._lock:
                        self._is_giving = False
                return
            else:
                return

    def _choose(self, codes: Sequence[int]) -> int:
        """The operation that is carried out next; 0 if that has to wait for a rank which has none now."""
        for kind in (Kind.WEIGHTS, Kind.GRADIENTS):
            for code in codes:
                if code >> 32 == kind and (kind is Kind.WEIGHTS or 0 not in codes):
                    return code
        if 0 in codes:
            return 0
        head = self._queue[0]
        of_ranks = self.world.all_gather_object([head.name, told(head.facts)])
        names = [name for name, _ in of_ranks]
        difference = disagreement([facts for _, facts in of_ranks], range(len(names)))
        if difference and len(set(names)) == 1:
            raise RankError(f"{head.name}: {difference}")
        where = ", ".join(f"rank {rank} at {name}" for rank, name in enumerate(names))
        raise RankError(f"the ranks are at different places of the program: {where}", advice=_TOGETHER)

    def _do(self, code: int, wanting: Sequence[int]) -> None:
        self._met_at = None
        own = self._queue[0] if self.world.rank in wanting else None
        self._carry_out[code >> 32](code & 0xFFFFFFFF, wanting, own)
        if own is not None:
            with self._lock:
                self._queue.popleft()
            own.end()

    def _broadcast(self, number: int, wanting: Sequence[int], own: Operation | None) -> None:
        assert own is not None
        work = distributed.broadcast(own.own, self.world.members[0], self.world.group, async_op=True)
        self._heartbeat.wait_for(work)
        self.links.received_bytes += own.own.nbytes if self.world.rank else 0

    def _message(self, number: int, wanting: Sequence[int], own: Operation | None) -> None:
        assert own is not None
        into = torch.empty((self.world.size, *own.own.shape), dtype=own.own.dtype)
        if into.nbytes:
            self.links.all_gather_message(into.view(-1), own.own.view(-1), self._all)
        own.result = list(into.unbind())


def _nothing(number: int, wanting: Sequence[int], own: Operation | None) -> None:
    return None
