"""The schedule of a step: when each unit is fetched, computed and updated, and what waits for what.

One drive, one update thread, one link each way, the network and compute each do one thing at a time, unit by unit
(``offload.play.simulator``). So the step takes at least what the busiest of them takes, and more where one has to
wait for another. All ranks are taken to do the same at the same time, so one of them is played."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.play.simulator import Job, Pile, Played, Row, Shares, Task
from offload.units.spread import spread_rank

_STEPS = 4
"""The first ones begin with nothing on its way; the last one is a step among others."""

_EARLY_SHARES = 4
"""The engine finds out how many units to update during backward. So many shares of them are tried here."""


_ROUNDING = 1e-9
"""Steps that differ by less are as long."""

NOTHING_SHARED = Shares()


@dataclass(frozen=True)
class KeptWork:
    """Seconds that activations of one unit take of each part of the machine in a pass, on their way out and back."""

    to_host: float = 0.0
    write: float = 0.0
    read: float = 0.0
    to_device: float = 0.0


STAYS = KeptWork()


@dataclass(frozen=True)
class UnitWork:
    """Seconds that one unit takes of each part of the machine in a step.

    ``fetch`` is a read of its weights, ``update`` what its update reads and writes on NVMe, ``sweep`` the kernel.
    ``spill`` is a write of its gradients, ``late`` their read by an update that begins after the step is certain.
    ``to_device_again`` is the copy, of what has not stayed, for backward and for a later micro-batch's forward.
    ``gather`` is that of the whole unit's weights over the network, ``exchange`` that of its gradients. ``calls`` are 2
    for a weight that both ends of the model use. ``kept`` are its activations, where they leave.
    ``returns``: backward uses its weights. ``streamed``: they pass through a slot; ``eligible``: it may be updated in
    backward, which takes ``beside`` longer then.
    """

    forward: float
    backward: float
    fetch: float = 0.0
    update: float = 0.0
    sweep: float = 0.0
    beside: float = 0.0
    spill: float = 0.0
    late: float = 0.0
    to_device: float = 0.0
    to_device_again: float = 0.0
    to_host: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    kept: KeptWork = STAYS
    calls: int = 1
    returns: bool = True
    streamed: bool = False
    eligible: bool = False


_BRING, _BRING_KEPT, _UPDATE, _SPILL, _LEAVE = range(5)
"""Rows of jobs, in the order in which the drive takes them: what compute needs, updates of the last step, what is done
beside, and what goes. Updates that need no drive are a pile beside them: see [Note: Order of speculative updates] in
``offload.update.speculative``."""

_KEPT_AHEAD = 2
"""Activations of so many units are on their way at a time: their memory has room for no more."""


@dataclass(frozen=True)
class Places:
    """For so many units there is room at a time: ``slots`` for weights from NVMe in host memory, ``windows`` on a
    device, ``whole`` for what ranks gather, 0 where there is one rank; ``buffers`` for gradients that are spilled."""

    slots: int
    windows: int
    whole: int = 0
    buffers: int = 2

    def brought(self, position: int, num_units: int, *, backward: bool, first: bool) -> bool:
        """A unit's weights must come for this use: from where they are stored, and from all ranks where there are
        several. ``first``: of a step's micro-batches, whose forward follows an update."""
        if not self.whole:
            return True
        return position < num_units - self.whole if backward else first or position >= self.whole


@dataclass(frozen=True)
class Steps:
    """Parts of a step. Units in ``speculative`` may be updated during backward, the others under the next forward.
    ``settle`` is what ranks take to agree that backward is over, and on the norm."""

    speculative: frozenset[int] = frozenset()
    micro_batches: int = 1
    settle: float = 0.0


def step_seconds(works: Sequence[UnitWork], places: Places, steps: Steps, shares: Shares = NOTHING_SHARED) -> float:
    """Seconds of a step among others."""
    program = _Program(works, replace(places, slots=max(places.slots, 2), windows=max(places.windows, 2)), steps)
    last = [program.step() for _ in range(_STEPS)]
    ends = Played(program.tasks, program.rows, program.pile, shares).ends
    return ends[last[-1]] - ends[last[-2]]


@dataclass(frozen=True)
class Order:
    """The order of a step, and all that it takes to play it: ``clipped``, no update begins before the step is
    certain."""

    works: Sequence[UnitWork]
    places: Places
    shares: Shares
    micro_batches: int
    settle: float
    clipped: bool

    def seconds(self, least: float) -> float:
        """Seconds of a step with the best choice of units that are updated during backward; ``least``: no schedule
        takes less."""
        best = math.inf
        for speculative in self._choices():
            steps = Steps(speculative, self.micro_batches, self.settle)
            before, best = best, min(best, step_seconds(self.works, self.places, steps, self.shares))
            if best >= before * (1 - _ROUNDING) or best <= least * (1 + _ROUNDING):
                break  # fewer make it no faster, or there is nothing to gain
        return best

    def _choices(self) -> list[frozenset[int]]:
        """Sets of units that may be updated during backward: those that need no drive, and all others that can be, or
        fewer of these, evenly spread; the largest first."""
        eligible = [index for index, work in enumerate(self.works) if work.eligible]
        if self.clipped or not eligible:
            return [frozenset()]
        in_memory = [index for index in eligible if not self.works[index].update]
        spread = sorted((index for index in eligible if self.works[index].update), key=spread_rank)
        counts = {len(spread) * share // _EARLY_SHARES for share in range(_EARLY_SHARES + 1)}
        return [frozenset(in_memory + spread[:count]) for count in sorted(counts, reverse=True)]


def bound_seconds(works: Sequence[UnitWork], places: Places, micro_batches: int, *, clipped: bool) -> float:
    """Seconds that no order of the same work is faster than, where it is all a step does: forward and backward, each by
    itself, and updates one after the other. See "The bound of the schedule" in ``docs/plan.md``."""
    forward, backward = sum(one.forward for one in works), sum(one.backward for one in works)
    drive = sum(work.update + work.late for work in works) if clipped else 0.0
    first = max(forward, _late([work.to_device for work in works], places), drive)
    again = _late([work.to_device_again for work in works], places)
    backward = max(backward, again)
    others = (micro_batches - 1) * (max(forward, again) + backward)
    updates = sum(work.sweep for work in works) + _without_updates(works, clipped=clipped)
    return max(first + backward, updates) + others


def _late(copies: Sequence[float], places: Places) -> float:
    """Seconds of copies that no window has room for before the first of them is used."""
    return sum(copies) - sum(sorted(copies, reverse=True)[: places.windows])


def _without_updates(works: Sequence[UnitWork], *, clipped: bool) -> float:
    """Seconds from the end of a step's last update to the first one of the next step: its weights go to the device, the
    last updated unit and all behind it compute, and gradients of a unit that may be updated then go to the host."""
    updated = [index for index, work in enumerate(works) if work.sweep]
    if not updated:
        return 0.0
    early = [index for index in updated if works[index].eligible and not clipped]
    come = min(works[index].to_device for index in updated)
    forward = sum(work.forward for index, work in enumerate(works) if index >= updated[-1] or work.calls > 1)
    begins = early[-1] if early else 0
    backward = sum(work.backward for index, work in enumerate(works) if index >= begins or work.calls > 1)
    return come + forward + backward + (min(works[index].to_host for index in early) if early else 0.0)


@dataclass(frozen=True)
class _Use:
    """A unit at work, ``seconds`` long. ``brought``: its weights come for it, from where they are stored if they are
    ``fetched``, over the link in ``link``. ``leaves``: gradients go when it is over, ``last``: for this step.
    ``keeps``: it is a forward, whose activations go then."""

    index: int
    seconds: float
    link: float
    brought: bool
    fetched: bool = True
    leaves: bool = False
    last: bool = False
    keeps: bool = False


class _Program:
    """``tasks`` are what compute does, ``rows`` and the ``pile`` the jobs."""

    def __init__(self, works: Sequence[UnitWork], places: Places, steps: Steps) -> None:
        self.tasks: list[Task] = []
        self.rows: list[Row] = [deque() for _ in range(5)]
        self.pile = Pile()
        self._works, self._places, self._steps = works, places, steps
        self._streamed = [index for index, work in enumerate(works) if work.streamed]
        self._position = {index: position for position, index in enumerate(self._streamed)}
        self._number = 0
        """Of the step."""
        self._last = -1
        """The last task of the step before: no weights are gathered of which an update is to come."""
        self._pending: dict[int, Job] = {}
        """Updates of the last step, by unit."""
        self._slots: deque[int] = deque()
        """Tasks that have used a slot, the last ones."""
        self._windows: deque[int] = deque()
        self._held: deque[Job] = deque()
        """Speculative updates, each of which holds a slot."""
        self._uncertain: list[Job] = []
        """Updates that may begin before the step is certain."""
        self._spilling: deque[list[Job]] = deque()
        """For each buffer of gradients that was filled last, what must be over before another unit has it."""
        self._leaving: deque[Job] = deque()
        """Gradients on their way, of the last two units."""
        self._kept_leaving: deque[Job] = deque()
        """Activations on their way, of the last units."""
        self._kept_jobs: dict[int, Job] = {}
        """The same, and those that have left, by unit."""

    def step(self) -> int:
        """Add a step; the number of the task that ends its backward."""
        for number in range(self._steps.micro_batches):
            for use in self._uses(number):
                self._use(use)
        self.tasks.append(Task(self._steps.settle, list(self._leaving)))
        self._leaving.clear()
        self._last = len(self.tasks) - 1
        for job in self._uncertain:
            job.certain = self._last
        self._uncertain.clear()
        for index, work in enumerate(self._works):
            if index not in self._steps.speculative:
                after = self._last
                if work.streamed and (position := self._position[index]) >= self._places.slots:
                    after += 1 + self._streamed[position - self._places.slots]  # whose slot it takes
                self._ask(_UPDATE, index, Job(after, work.update + work.late, work.sweep))
        self._number += 1
        return self._last

    def _uses(self, number: int) -> Iterator[_Use]:
        """Of one micro-batch, in order."""
        works, count = self._works, len(self._works)
        last = number == self._steps.micro_batches - 1

        def use(
            index: int,
            seconds: float,
            *,
            backward: bool,
            fetched: bool = True,
            leaves: bool = False,
            keeps: bool = False,
        ) -> _Use:
            brought = self._places.brought(index, count, backward=backward, first=number == 0)
            stays = backward or number > 0
            link = works[index].to_device_again if stays else works[index].to_device
            return _Use(index, seconds, link * brought, brought, fetched and brought, leaves, leaves and last, keeps)

        def once(seconds: float, work: UnitWork) -> float:
            return seconds if work.calls == 1 else 0.0

        twice = [index for index in range(count) if works[index].calls > 1]
        for index, work in enumerate(works):
            yield use(index, once(work.forward, work), backward=False, keeps=True)
        for index in twice:
            yield use(index, works[index].forward, backward=True, fetched=False)
        for index in twice:
            yield use(index, works[index].backward, backward=True, fetched=False)
        lying = self._lying()
        for index in reversed([index for index, work in enumerate(works) if work.returns]):
            seconds = once(works[index].backward, works[index])
            yield use(index, seconds, backward=True, fetched=index not in lying, leaves=True)

    def _lying(self) -> set[int]:
        """Units that still lie in their slots when backward begins: those that forward ended with."""
        return set(self._streamed[-max(self._places.slots - 2, 1) :])

    def _use(self, use: _Use) -> None:
        """Add a task: the unit's weights are brought, its update and what it has no room beside waited for."""
        task = Task(use.seconds, self._brought(use))
        while len(self._held) >= self._places.slots - 1:
            task.waits_for.append(self._held.popleft())
        while len(self._leaving) > 1:  # gradients of one unit are on their way at a time
            task.waits_for.append(self._leaving.popleft())
        while len(self._kept_leaving) >= _KEPT_AHEAD:
            task.waits_for.append(self._kept_leaving.popleft())
        if use.leaves:
            task.waits_for.extend(self._kept_brought(use))
            while self._works[use.index].spill and len(self._spilling) >= self._places.buffers:
                task.waits_for.extend(self._spilling.popleft())
        self.tasks.append(task)
        if use.keeps:
            self._kept_leaves(use)
        if use.leaves:
            self._leave(use)

    def _kept_leaves(self, use: _Use) -> None:
        """The unit's forward is over: its activations go."""
        kept, now = self._works[use.index].kept, len(self.tasks) - 1
        if not kept.to_host and not kept.write:
            return
        copy = Job(now, 0.0, back=kept.to_host)
        write = Job(now, kept.write, needs=copy)
        self.rows[_LEAVE].append(copy)
        self.rows[_SPILL].append(write)
        self._kept_leaving.append(write)
        self._kept_jobs[use.index] = write

    def _kept_brought(self, use: _Use) -> list[Job]:
        """Its activations come back for the next task, its backward."""
        kept, left = self._works[use.index].kept, self._kept_jobs.pop(use.index, None)
        if left is None:
            return []
        job = Job(len(self.tasks) - _KEPT_AHEAD, kept.read, link=kept.to_device, needs=left)
        self.rows[_BRING_KEPT].append(job)
        return [job]

    def _brought(self, use: _Use) -> list[Job]:
        """The jobs that the next task, a use of the unit, waits for."""
        work, number = self._works[use.index], len(self.tasks)
        update = self._pending.pop(use.index, None)
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
            job = Job(after, fetch, link=use.link, network=gather, needs=update)
            self.rows[_BRING].append(job)
            return [job]
        return [] if update is None else [update]

    def _leave(self, use: _Use) -> None:
        """The unit's backward is over: its gradients go, and its update may begin."""
        work, now = self._works[use.index], len(self.tasks) - 1
        job = None
        if work.exchange or work.to_host:
            job = Job(now, 0.0, network=work.exchange, back=work.to_host)
            self.rows[_LEAVE].append(job)
            self._leaving.append(job)
        if work.spill:
            spilled = Job(now, work.spill, needs=job)
            self.rows[_SPILL].append(spilled)
            self._spilling.append([spilled])
        if use.last and use.index in self._steps.speculative:
            speculative = Job(now, work.update, work.sweep, needs=job, beside=work.beside)
            self._uncertain.append(speculative)
            if work.spill:  # it takes the gradients from where they lie
                self._spilling[-1].append(speculative)
            self._ask(_SPILL, use.index, speculative)
            if work.streamed:
                self._held.append(speculative)

    def _ask(self, row: int, index: int, job: Job) -> None:
        if job.drive:
            self.rows[row].append(job)
        elif job.sweep:
            self.pile.append(job, (self._number, index))
        if job.drive or job.sweep:
            self._pending[index] = job
