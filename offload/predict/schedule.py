"""The schedule of a step, played through: when each unit is fetched, computed and updated, and what waits for what.

One drive, one update thread, one link each way, the network and compute each do one thing at a time, unit by unit.
The drive takes what compute needs before what can wait. So the step takes at least what the busiest of them takes, and
more where one has to wait for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEPS = 4
"""The first ones begin with nothing on its way; the last one is a step among others."""


@dataclass(frozen=True)
class UnitWork:
    """Seconds that one unit takes of each part of the machine in a step.

    ``fetch`` is a read of its weights, ``update`` what its update reads and writes on NVMe, ``sweep`` the kernel.
    ``spill`` is a write of its gradients, ``late`` their read by an update that begins after the step is certain.
    ``to_device_again`` is the copy for backward, if forward's has not stayed. ``gather`` and ``scatter`` are whole
    weights and gradients over the network. ``calls`` are 2 for a weight that both ends of the model use.
    ``streamed``: its weights pass through a slot; ``eligible``: it may be updated in backward.
    """

    forward: float
    backward: float
    fetch: float = 0.0
    update: float = 0.0
    sweep: float = 0.0
    spill: float = 0.0
    late: float = 0.0
    to_device: float = 0.0
    to_device_again: float = 0.0
    to_host: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    calls: int = 1
    streamed: bool = False
    eligible: bool = False


@dataclass
class _Job:
    """Something for the drive and what follows it. ``after`` is the compute task that must be over before, -1: none;
    ``needs`` another job."""

    after: int
    seconds: float
    sweep: float = 0.0
    link: float = 0.0
    network: float = 0.0
    needs: _Job | None = None
    end: float | None = None


@dataclass
class _Task:
    seconds: float
    waits_for: list[_Job] = field(default_factory=list)


@dataclass
class _Server:
    """Does one thing at a time, in the order in which it is asked."""

    free: float = 0.0

    def run(self, ready: float, seconds: float) -> float:
        if seconds == 0:
            return ready
        self.free = max(self.free, ready) + seconds
        return self.free


def step_seconds(
    works: Sequence[UnitWork], num_slots: int, num_windows: int, early: frozenset[int], micro_batches: int = 1
) -> float:
    """Seconds of a step among others. Units in ``early`` are updated during backward, the others under the next
    forward. ``num_slots`` weights from NVMe are in host memory at a time, ``num_windows`` on a device."""
    play = _Play(works, max(num_slots, 2), max(num_windows, 2), early)
    ends = [play.step(micro_batches) for _ in range(_STEPS)]
    return ends[-1] - ends[-2]


class _Play:
    def __init__(self, works: Sequence[UnitWork], num_slots: int, num_windows: int, early: frozenset[int]) -> None:
        self._works = works
        self._num_slots, self._num_windows, self._early = num_slots, num_windows, early
        self._streamed = [index for index, work in enumerate(works) if work.streamed]
        self._position = {index: position for position, index in enumerate(self._streamed)}
        self._queues: list[deque[_Job]] = [deque(), deque(), deque()]
        """For compute, updates of the last step, what is done beside; the first that can begin is taken."""
        self._drive, self._sweeps, self._link, self._back, self._network = (_Server() for _ in range(5))
        self._ends: list[float] = []
        """Of the compute tasks."""
        self._pending: dict[int, _Job] = {}
        """Updates of the last step, by unit."""
        self._slots: deque[int] = deque()
        """Tasks that have used a slot, the last ones."""
        self._windows: deque[int] = deque()
        self._held: deque[_Job] = deque()
        """Early updates, each of which holds a slot."""

    def step(self, micro_batches: int) -> float:
        """Play a step through; when its backward is over."""
        for rest in reversed(range(micro_batches)):
            self._micro_batch(last=rest == 0)
        self._ends[-1] = max(self._ends[-1], self._back.free)
        base = len(self._ends)
        for index, work in enumerate(self._works):
            if index not in self._early:
                after = base - 1
                if work.streamed and (position := self._position[index]) >= self._num_slots:
                    after = base + self._streamed[position - self._num_slots]  # whose slot it takes
                self._ask(1, index, _Job(after, work.update + work.late, work.sweep))
        return self._ends[-1]

    def _micro_batch(self, *, last: bool) -> None:
        """A forward and its backward; after the last one of a step updates may begin."""
        works, order = self._works, range(len(self._works))
        again = [index for index in order if works[index].calls > 1]
        for index in order:
            first = works[index].calls == 1
            self._compute(index, works[index].forward if first else 0.0, works[index].to_device)
        for index in again:
            self._compute(index, works[index].forward, works[index].to_device_again, fetched=False)
        for index in again:
            self._compute(index, works[index].backward, works[index].to_device_again, fetched=False)
        kept = self._kept()
        for index in reversed(order):
            work = works[index]
            seconds = work.backward if work.calls == 1 else 0.0
            self._compute(index, seconds, work.to_device_again, fetched=index not in kept)
            self._leave(index, early=last and index in self._early)

    def _kept(self) -> set[int]:
        """Units that still lie in their slots when backward begins: those that forward ended with."""
        return set(self._streamed[-max(self._num_slots - 2, 1) :])

    def _compute(self, index: int, seconds: float, link: float, *, fetched: bool = True) -> None:
        """A use of the unit: its weights are brought, and its update waited for."""
        work, task = self._works[index], _Task(seconds)
        update = self._pending.pop(index, None)
        if update is not None:
            task.waits_for.append(update)
        after = -1
        if work.streamed:
            self._slots.append(len(self._ends))
            if len(self._slots) > self._num_slots:
                after = self._slots.popleft()
        if link or work.gather:
            self._windows.append(len(self._ends))
            if len(self._windows) > self._num_windows:
                after = max(after, self._windows.popleft())
        fetch = work.fetch if fetched and update is None else 0.0
        if fetch or link or work.gather:
            job = _Job(after, fetch, 0.0, link, work.gather, needs=update)
            self._queues[0].append(job)
            task.waits_for.append(job)
        while len(self._held) >= self._num_slots - 1:
            task.waits_for.append(self._held.popleft())
        self._run(task)

    def _leave(self, index: int, *, early: bool) -> None:
        """The unit's backward is over: its gradients go, and its update may begin."""
        work, now = self._works[index], len(self._ends) - 1
        self._back.run(self._network.run(self._ends[now], work.scatter), work.to_host)
        if work.spill:
            self._queues[2].append(_Job(now, work.spill))
        if early:
            job = _Job(now, work.update, work.sweep)
            self._ask(2, index, job)
            self._held.append(job)

    def _ask(self, queue: int, index: int, job: _Job) -> None:
        if job.seconds or job.sweep:
            self._queues[queue].append(job)
            self._pending[index] = job

    def _run(self, task: _Task) -> None:
        begin = self._ends[-1] if self._ends else 0.0
        for job in task.waits_for:
            while job.end is None:
                self._serve()
            begin = max(begin, job.end)
        begin = max(begin, self._back.free - 2 * task.seconds)  # gradients of one unit are on their way at a time
        self._ends.append(begin + task.seconds)

    def _serve(self) -> None:
        """The drive takes the next job that can begin, or waits for the first that will."""
        waiting = [
            (self._begin(queue[0]), rank, queue)
            for rank, queue in enumerate(self._queues)
            if queue and queue[0].after < len(self._ends) and (queue[0].needs is None or queue[0].needs.end is not None)
        ]
        begin, _, queue = min(waiting, key=lambda item: item[:2])
        job = queue.popleft()
        end = self._drive.run(begin, job.seconds)
        if job.sweep:  # the kernel works on tiles while others are read and written
            end = max(self._sweeps.run(begin, job.sweep), end)
        job.end = self._network.run(self._link.run(end, job.link), job.network)

    def _begin(self, job: _Job) -> float:
        ready = self._ends[job.after] if job.after >= 0 else 0.0
        if job.needs is not None and job.needs.end is not None:
            ready = max(ready, job.needs.end)
        return max(ready, self._drive.free) if job.seconds else ready
