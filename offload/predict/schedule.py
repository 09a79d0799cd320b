"""The schedule of a step, played through: when each unit is fetched, computed and updated, and what waits for what.

One drive, one update thread, one link each way, the network and compute each do one thing at a time, unit by unit.
The drive takes what compute needs before what can wait. So the step takes at least what the busiest of them takes, and
more where one has to wait for another. All ranks are taken to do the same at the same time, so one of them is played.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

_STEPS = 4
"""The first ones begin with nothing on its way; the last one is a step among others."""


@dataclass(frozen=True)
class UnitWork:
    """Seconds that one unit takes of each part of the machine in a step.

    ``fetch`` is a read of its weights, ``update`` what its update reads and writes on NVMe, ``sweep`` the kernel.
    ``spill`` is a write of its gradients, ``late`` their read by an update that begins after the step is certain.
    ``to_device_again`` is the copy for backward, if forward's has not stayed. ``gather`` is that of the whole unit's
    weights over the network, ``exchange`` that of its gradients. ``calls`` are 2 for a weight that both ends of the
    model use.
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
    exchange: float = 0.0
    calls: int = 1
    streamed: bool = False
    eligible: bool = False


@dataclass(frozen=True)
class Places:
    """For so many units there is room at a time: ``slots`` for weights from NVMe in host memory, ``windows`` on a
    device, ``whole`` for what ranks gather; 0 where there is one rank."""

    slots: int
    windows: int
    whole: int = 0

    def brought(self, position: int, num_units: int, *, backward: bool, first: bool) -> bool:
        """A unit's weights must come for this use: from where they rest, and from all ranks where there are several.
        ``first``: of a step's micro-batches, whose forward follows an update."""
        if not self.whole:
            return True
        return position < num_units - self.whole if backward else first or position >= self.whole


@dataclass(frozen=True)
class Steps:
    """What a step is made of. Units in ``early`` are updated during backward, the others under the next forward.
    ``exchanged_once``: gradients are added up over micro-batches before ranks exchange them. ``settle`` is what ranks
    take to agree that backward is over, and on the norm."""

    early: frozenset[int] = frozenset()
    micro_batches: int = 1
    exchanged_once: bool = False
    settle: float = 0.0


@dataclass
class _Job:
    """Something for the drive and what follows it. ``after`` is the compute task that must be over before, -1: none;
    ``needs`` another job."""

    after: int
    seconds: float
    sweep: float = 0.0
    link: float = 0.0
    network: float = 0.0
    back: float = 0.0
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


def step_seconds(works: Sequence[UnitWork], places: Places, steps: Steps) -> float:
    """Seconds of a step among others."""
    play = _Play(works, replace(places, slots=max(places.slots, 2), windows=max(places.windows, 2)), steps)
    ends = [play.step() for _ in range(_STEPS)]
    return ends[-1] - ends[-2]


@dataclass(frozen=True)
class _Use:
    """A unit at work, ``seconds`` long. ``brought``: its weights come for it, from where they rest if they are
    ``fetched``, over the link in ``link``. ``leaves``: gradients go when it is over, ``last``: for this step."""

    index: int
    seconds: float
    link: float
    brought: bool
    fetched: bool = True
    leaves: bool = False
    last: bool = False


class _Play:
    def __init__(self, works: Sequence[UnitWork], places: Places, steps: Steps) -> None:
        self._works, self._places, self._steps = works, places, steps
        self._streamed = [index for index, work in enumerate(works) if work.streamed]
        self._position = {index: position for position, index in enumerate(self._streamed)}
        self._queues: list[deque[_Job]] = [deque(), deque(), deque(), deque()]
        """For compute, updates of the last step, what is done beside, gradients that go; the first that can begin is
        taken."""
        self._drive, self._sweeps, self._link, self._back, self._network = (_Server() for _ in range(5))
        self._ends: list[float] = []
        """Of the compute tasks."""
        self._last = -1
        """The last one of the step before: no weights are gathered of which an update is to come."""
        self._pending: dict[int, _Job] = {}
        """Updates of the last step, by unit."""
        self._slots: deque[int] = deque()
        """Tasks that have used a slot, the last ones."""
        self._windows: deque[int] = deque()
        self._held: deque[_Job] = deque()
        """Early updates, each of which holds a slot."""
        self._leaving: deque[_Job] = deque()
        """Gradients on their way, of the last two units."""

    def step(self) -> float:
        """Play a step through; when its backward is over."""
        self._last = len(self._ends) - 1
        for number in range(self._steps.micro_batches):
            self._micro_batch(number)
        for job in self._leaving:
            self._ends[-1] = max(self._ends[-1], self._served(job))
        self._leaving.clear()
        self._ends[-1] += self._steps.settle
        base = len(self._ends)
        for index, work in enumerate(self._works):
            if index not in self._steps.early:
                after = base - 1
                if work.streamed and (position := self._position[index]) >= self._places.slots:
                    after = base + self._streamed[position - self._places.slots]  # whose slot it takes
                self._ask(1, index, _Job(after, work.update + work.late, work.sweep))
        return self._ends[-1]

    def _micro_batch(self, number: int) -> None:
        """A forward and its backward; after the last one of a step updates may begin. What a use needs is asked for
        while the one before it computes."""
        uses = list(self._uses(number))
        base = len(self._ends)
        ahead = deque([self._task(uses[0], base)])
        for position, use in enumerate(uses):
            if position + 1 < len(uses):
                ahead.append(self._task(uses[position + 1], base + position + 1))
            self._run(ahead.popleft())
            if use.leaves:
                self._leave(use, base + position)

    def _uses(self, number: int) -> Iterator[_Use]:
        """Of one micro-batch, in order."""
        works, count = self._works, len(self._works)
        last = number == self._steps.micro_batches - 1

        def use(index: int, seconds: float, *, backward: bool, fetched: bool = True, leaves: bool = False) -> _Use:
            brought = self._places.brought(index, count, backward=backward, first=number == 0)
            link = works[index].to_device_again if backward else works[index].to_device
            return _Use(index, seconds, link * brought, brought, fetched and brought, leaves, leaves and last)

        def once(seconds: float, work: UnitWork) -> float:
            return seconds if work.calls == 1 else 0.0

        twice = [index for index in range(count) if works[index].calls > 1]
        for index, work in enumerate(works):
            yield use(index, once(work.forward, work), backward=False)
        for index in twice:
            yield use(index, works[index].forward, backward=True, fetched=False)
        for index in twice:
            yield use(index, works[index].backward, backward=True, fetched=False)
        kept = self._kept()
        for index in reversed(range(count)):
            seconds = once(works[index].backward, works[index])
            yield use(index, seconds, backward=True, fetched=index not in kept, leaves=True)

    def _kept(self) -> set[int]:
        """Units that still lie in their slots when backward begins: those that forward ended with."""
        return set(self._streamed[-max(self._places.slots - 2, 1) :])

    def _task(self, use: _Use, number: int) -> _Task:
        """Compute task ``number``, a use of the unit: its weights are brought, and its update waited for."""
        work, task = self._works[use.index], _Task(use.seconds)
        update = self._pending.pop(use.index, None)
        if update is not None:
            task.waits_for.append(update)
        gather = work.gather if use.brought else 0.0
        after = max(number - self._places.whole, self._last) if gather else -1
        if work.streamed and use.brought:
            self._slots.append(number)
            if len(self._slots) > self._places.slots:
                after = max(after, self._slots.popleft())
        if use.link:
            self._windows.append(number)
            if len(self._windows) > self._places.windows:
                after = max(after, self._windows.popleft())
        fetch = work.fetch if use.fetched and update is None else 0.0
        if fetch or use.link or gather:
            job = _Job(after, fetch, link=use.link, network=gather, needs=update)
            self._queues[0].append(job)
            task.waits_for.append(job)
        return task

    def _leave(self, use: _Use, now: int) -> None:
        """The unit's backward is over: its gradients go, and its update may begin."""
        work = self._works[use.index]
        exchange = work.exchange if use.last or not self._steps.exchanged_once else 0.0
        job = None
        if exchange or work.to_host:
            job = _Job(now, 0.0, network=exchange, back=work.to_host)
            self._queues[3].append(job)
            self._leaving.append(job)
        if work.spill:
            self._queues[2].append(_Job(now, work.spill, needs=job))
        if use.last and use.index in self._steps.early:
            early = _Job(now, work.update, work.sweep, needs=job)
            self._ask(2, use.index, early)
            self._held.append(early)

    def _ask(self, queue: int, index: int, job: _Job) -> None:
        if job.seconds or job.sweep:
            self._queues[queue].append(job)
            self._pending[index] = job

    def _run(self, task: _Task) -> None:
        while len(self._held) >= self._places.slots - 1:
            task.waits_for.append(self._held.popleft())
        while len(self._leaving) > 1:  # gradients of one unit are on their way at a time
            task.waits_for.append(self._leaving.popleft())
        begin = max([self._ends[-1] if self._ends else 0.0, *map(self._served, task.waits_for)])
        self._ends.append(begin + task.seconds)

    def _served(self, job: _Job) -> float:
        """When the job is over."""
        while job.end is None:
            self._serve()
        return job.end

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
        job.end = self._back.run(self._network.run(self._link.run(end, job.link), job.network), job.back)

    def _begin(self, job: _Job) -> float:
        ready = self._ends[job.after] if job.after >= 0 else 0.0
        if job.needs is not None and job.needs.end is not None:
            ready = max(ready, job.needs.end)
        return max(ready, self._drive.free) if job.seconds else ready
