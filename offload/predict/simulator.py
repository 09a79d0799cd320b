"""Tasks and jobs played through on the parts of a machine: what begins when, and how fast it goes.

Compute, the drive, the update thread, a link each way and the network each do one thing at a time, in the order in
which they are asked. The drive takes what compute needs before what can wait.

[Note: Shared cores] Where a CPU computes, the same cores also update, check what passes the drive, and copy what passes
the network. What is at work at a moment shares them evenly: each part gets the cores that it can keep busy, unless all
together would keep more busy than there are; then those that want more than an equal part get equal parts. None are
idle while one of them wants more. So a collective slows compute down, and takes nothing from it while it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_ROUNDING = 1e-12


_COMPUTE, _DRIVE, _SWEEP, _LINK, _NETWORK, _BACK = range(6)
"""Parts of a machine."""


@dataclass(frozen=True)
class Shares:
    """Of a rank's cores: what each part keeps busy while it works. 0: it has processors of its own. See [Note: Shared
    cores]."""

    compute: float = 0.0
    drive: float = 0.0
    sweep: float = 0.0
    network: float = 0.0


@dataclass(eq=False, slots=True)
class Job:
    """Something for the drive and what follows it, in seconds of each part. ``after`` is the task that must be over
    before, -1: none; ``needs`` another job. The kernel (``sweep``) works on tiles while others are read and written."""

    after: int
    drive: float
    sweep: float = 0.0
    link: float = 0.0
    network: float = 0.0
    back: float = 0.0
    needs: Job | None = None
    is_over: bool = False
    phases: deque[list[tuple[int, float]]] = field(init=False)
    """Phases that are left of it."""
    num_open: int = 0
    """Parts that are at it, or will be before its next phase."""

    def __post_init__(self) -> None:
        at_once = (_DRIVE, self.drive), (_SWEEP, self.sweep)
        then = (_LINK, self.link), (_NETWORK, self.network), (_BACK, self.back)
        first = [one for one in at_once if one[1]]
        self.phases = deque([first] if first else [])
        self.phases.extend([one] for one in then if one[1])


@dataclass(eq=False, slots=True)
class Task:
    """Compute, one after the other."""

    seconds: float
    waits_for: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    left: float
    of: Job | Task


class _Lane:
    """A part of the machine: its ``works``, of which the first is at work, and the ``share`` of the cores that it keeps
    busy."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.works: deque[_Work] = deque()


class Played:
    """``ends`` are the times at which the tasks are over."""

    def __init__(self, tasks: Sequence[Task], queues: Sequence[deque[Job]], shares: Shares) -> None:
        """Of the first jobs of the ``queues`` the first that can begin gets the drive."""
        self.ends: list[float] = []
        self._tasks, self._queues = tasks, queues
        self._now = 0.0
        self._lanes = [_Lane(share) for share in (shares.compute, shares.drive, shares.sweep, 0.0, shares.network, 0.0)]
        while len(self.ends) < len(tasks):
            self._begin()
            self._go_on()

    def _begin(self) -> None:
        """Begin all that can."""
        begun = True
        while begun:
            begun = self._begin_job() or self._begin_task()

    def _begin_job(self) -> bool:
        for queue in self._queues:
            if queue and self._can_begin(queue[0]):
                self._advance(queue.popleft())
                return True
        return False

    def _can_begin(self, job: Job) -> bool:
        return (
            job.after < len(self.ends)
            and (job.needs is None or job.needs.is_over)
            and not (job.drive and self._lanes[_DRIVE].works)
        )

    def _begin_task(self) -> bool:
        if self._lanes[_COMPUTE].works or len(self.ends) == len(self._tasks):
            return False
        task = self._tasks[len(self.ends)]
        if not all(job.is_over for job in task.waits_for):
            return False
        if task.seconds:
            self._lanes[_COMPUTE].works.append(_Work(task.seconds, task))
        else:
            self.ends.append(self._now)
        return True

    def _advance(self, job: Job) -> None:
        """Begin its next phase, or have it wait for its part."""
        if not job.phases:
            job.is_over = True
            return
        phase = job.phases.popleft()
        job.num_open = len(phase)
        for lane, seconds in phase:
            self._lanes[lane].works.append(_Work(seconds, job))

    def _go_on(self) -> None:
        """Until something is over."""
        busy = [lane for lane in self._lanes if lane.works]
        if not busy:
            assert len(self.ends) == len(self._tasks), "tasks and jobs wait for each other"
            return
        speeds = _speeds([lane.share for lane in busy])
        seconds = min(lane.works[0].left / speed for lane, speed in zip(busy, speeds, strict=True))
        self._now += seconds
        rounding = _ROUNDING * self._now
        for lane, speed in zip(busy, speeds, strict=True):
            work = lane.works[0]
            work.left -= seconds * speed
            if work.left <= rounding:
                lane.works.popleft()
                self._end(work.of)

    def _end(self, work: Job | Task) -> None:
        if isinstance(work, Task):
            self.ends.append(self._now)
            return
        work.num_open -= 1
        if not work.num_open:
            self._advance(work)


def _speeds(shares: Sequence[float]) -> list[float]:
    """Speed of each part that would keep these shares of the cores busy. See [Note: Shared cores]."""
    if sum(shares) <= 1:
        return [1.0] * len(shares)
    left, speeds = 1.0, [1.0] * len(shares)
    by_share = sorted(range(len(shares)), key=lambda index: shares[index])
    for position, index in enumerate(by_share):
        got = min(shares[index], left / (len(shares) - position))
        left -= got
        speeds[index] = got / shares[index] if shares[index] else 1.0
    return speeds
