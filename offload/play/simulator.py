"""Tasks and jobs played through on the parts of a machine: what begins when, and how fast it goes.

Compute, the drive, the update thread, a link each way and the network each do one thing at a time, in the order in
which they are asked. The drive takes what compute needs before what can wait.

[Note: Shared cores] Where a CPU computes, the same cores also update, check what passes the drive, and copy what passes
the network. What is at work at a moment shares them evenly: each part gets the cores that it can keep busy, unless all
together would keep more busy than there are; then those that want more than an equal part get equal parts. None are
idle while one of them wants more. So a collective slows compute down, and takes nothing from it while it waits.

[Note: Lost cores] Compute's threads wait for each other at barriers, and the kernel's sweep and they take memory's
bandwidth and caches from each other. So where more is wanted than there is, some of the cores' work is lost: a share of
it (``Shares.lost``, which the probe measures) where twice as much is wanted, and less in proportion where less is.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter

_ROUNDING = 1e-12


_COMPUTE, _DRIVE, _SWEEP, _LINK, _NETWORK, _BACK = range(6)
"""Parts of a machine. A job takes the drive and the kernel at once, and then the others, one after the other."""


@dataclass(frozen=True)
class Shares:
    """Of a rank's cores: what each part keeps busy while it works. 0: it has processors of its own. See [Note: Shared
    cores]."""

    compute: float = 0.0
    drive: float = 0.0
    sweep: float = 0.0
    network: float = 0.0
    lost: float = 0.0
    """See [Note: Lost cores]."""


@dataclass(eq=False, slots=True)
class Job:
    """Something for the drive and what follows it, in seconds of each part. ``after`` is the task that must be over
    before, -1: none; ``needs`` another job. The kernel (``sweep``) works on tiles while others are read and written.
    One that begins when task ``certain`` is not over writes beside what is current: it takes ``beside`` longer."""

    after: int
    drive: float
    sweep: float = 0.0
    link: float = 0.0
    network: float = 0.0
    back: float = 0.0
    needs: Job | None = None
    beside: float = 0.0
    certain: int = -1
    is_over: bool = False
    part: int = _COMPUTE
    """The one that was asked last to do it."""
    num_open: int = 0
    """Parts that are at it, or will be before the next one is asked."""


Row = deque[Job]
"""Jobs that begin in the order in which they are asked for."""


class Pile:
    """Jobs of the kernel alone: of those that can begin, the first by ``need`` does as soon as the kernel is free."""

    def __init__(self) -> None:
        self._later: list[tuple[int, int, tuple[int, int], Job]] = []
        """A heap, by the task that must be over before; in the order in which they came."""
        self._due: list[tuple[tuple[int, int], Job]] = []
        self._count = 0

    def append(self, job: Job, need: tuple[int, int]) -> None:
        self._count += 1
        heappush(self._later, (job.after, self._count, need, job))

    def take(self, num_ends: int) -> Job | None:
        """Take the job that is needed first of those that can begin when so many tasks are over."""
        while self._later and self._later[0][0] < num_ends:
            *_, need, due = heappop(self._later)
            insort(self._due, (need, due), key=itemgetter(0))
        for index, (_, job) in enumerate(self._due):
            if job.needs is None or job.needs.is_over:
                job.sweep += job.beside if job.certain >= num_ends else 0.0
                del self._due[index]
                return job
        return None


@dataclass(eq=False, slots=True)
class Task:
    """Compute, one after the other."""

    seconds: float
    waits_for: list[Job] = field(default_factory=list)


class Played:
    """``ends`` are the times at which the tasks are over. A forecast plays a million ends of tasks and jobs: what is
    asked at each of them is asked in few calls."""

    def __init__(self, tasks: Sequence[Task], rows: Sequence[Row], pile: Pile, shares: Shares) -> None:
        """Of the jobs that come next in the ``rows``, and of those in the ``pile``, the first that can begin gets the
        drive."""
        self.ends: list[float] = []
        self._tasks, self._rows, self._pile = tasks, rows, pile
        self._now = 0.0
        self._shares = shares.compute, shares.drive, shares.sweep, 0.0, shares.network, 0.0
        self._lost = shares.lost
        self._lanes: list[deque[tuple[float, Job | Task]]] = [deque() for _ in self._shares]
        """For each part what it has to do, and for how long; the first is at work."""
        self._left = [0.0] * len(self._lanes)
        """Of what is at work in each."""
        self._busy = 0
        """The parts that have something to do, a bit for each."""
        self._speeds: dict[int, list[tuple[int, float]]] = {}
        """The parts that are busy together, and their speeds."""
        while len(self.ends) < len(tasks):
            while self._begin_jobs() or self._begin_task():
                pass
            self._go_on()

    def _begin_jobs(self) -> bool:
        """Begin all jobs that can; True: one was over at once, and others may wait for it."""
        num_ends, drive = len(self.ends), self._lanes[_DRIVE]
        for row in self._rows:
            while row:
                job = row[0]
                if job.after >= num_ends or (drive and job.drive) or (job.needs is not None and not job.needs.is_over):
                    break
                self._go_to_next_part(row.popleft())
                if job.is_over:
                    return True
        while not self._lanes[_SWEEP] and (first := self._pile.take(num_ends)) is not None:
            self._go_to_next_part(first)
            if first.is_over:
                return True
        return False

    def _begin_task(self) -> bool:
        """Begin the next task if it can; True: it was over at once."""
        if self._lanes[_COMPUTE] or len(self.ends) == len(self._tasks):
            return False
        task = self._tasks[len(self.ends)]
        for job in task.waits_for:
            if not job.is_over:
                return False
        if task.seconds:
            self._ask(_COMPUTE, task.seconds, task)
            return False
        self.ends.append(self._now)
        return True

    def _go_to_next_part(self, job: Job) -> None:
        """Have it wait for the next of the parts that it takes; it is over if there is none."""
        part, job.num_open = job.part, 1
        if part < _DRIVE and (job.drive or job.sweep):
            job.num_open = 0
            for which, seconds in ((_DRIVE, job.drive), (_SWEEP, job.sweep)):
                if seconds:
                    job.num_open += 1
                    self._ask(which, seconds, job)
            job.part = _SWEEP
        elif part < _LINK and job.link:
            job.part = _LINK
            self._ask(_LINK, job.link, job)
        elif part < _NETWORK and job.network:
            job.part = _NETWORK
            self._ask(_NETWORK, job.network, job)
        elif part < _BACK and job.back:
            job.part = _BACK
            self._ask(_BACK, job.back, job)
        else:
            job.is_over = True

    def _ask(self, part: int, seconds: float, work: Job | Task) -> None:
        lane = self._lanes[part]
        if not lane:
            self._left[part] = seconds
            self._busy |= 1 << part
        lane.append((seconds, work))

    def _go_on(self) -> None:
        """Until something is over."""
        if not self._busy:
            assert len(self.ends) == len(self._tasks), "tasks and jobs wait for each other"
            return
        at_work = self._speeds.get(self._busy)
        if at_work is None:
            parts = [part for part, lane in enumerate(self._lanes) if lane]
            speeds = _speeds([self._shares[part] for part in parts], self._lost)
            at_work = self._speeds[self._busy] = list(zip(parts, speeds, strict=True))
        left = self._left
        seconds = min([left[part] / speed for part, speed in at_work])
        self._now += seconds
        rounding = _ROUNDING * self._now
        over = []
        for part, speed in at_work:
            rest = left[part] = left[part] - seconds * speed
            if rest <= rounding:
                lane = self._lanes[part]
                over.append(lane.popleft()[1])
                if lane:
                    left[part] = lane[0][0]
                else:
                    self._busy &= ~(1 << part)
        for work in over:
            if isinstance(work, Task):
                self.ends.append(self._now)
                continue
            work.num_open -= 1
            if not work.num_open:
                self._go_to_next_part(work)


def _speeds(shares: Sequence[float], lost: float) -> list[float]:
    """Speed of each part that would keep these shares of the cores busy. See [Note: Shared cores]."""
    wanted = sum(shares)
    if wanted <= 1:
        return [1.0] * len(shares)
    left, speeds = 1 - lost * min(wanted - 1, 1.0), [1.0] * len(shares)
    by_share = sorted(range(len(shares)), key=lambda index: shares[index])
    for position, index in enumerate(by_share):
        got = min(shares[index], left / (len(shares) - position))
        left -= got
        speeds[index] = got / shares[index] if shares[index] else 1.0
    return speeds
