"""The judge of placements: a step of each is played with the rates of the drive, and the shorter one is better.

[Note: Steps that nobody has seen] Neither the batch nor the speed of the cores is known when a plan is made. So the
steps that are played have a compute of their own: shares of the drive's time for a step with nothing in memory, divided
among the units by their weights. Where compute is far longer, placements hide under it; with next to none the bytes
alone count; and between them their order does. Two steps are played, and the sum is judged: alone, one with much
compute would not tell a placement that is hidden from another one that moves twice as much.

[Note: A part of many units] Of a model of many units those in the middle are played, and what they take is multiplied
by their share of the work. What is resident is spread evenly, so that they have their share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.plan.moved import UnitBytes, num_tiles, places_of
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.plan.records import TRANSFER_BYTES
from offload.play.schedule import Order, UnitWork
from offload.play.simulator import Shares
from offload.report.report import Bandwidths

ASSUMED_DRIVE = Bandwidths(2e9, 2e9, 1.0)
"""A drive without an I/O profile. What is measured when an engine is made comes after its plan."""

_COMPUTE_SHARES = (0.1, 1.0)
"""See [Note: Steps that nobody has seen]."""

_SWEEP = 30e9
"""Traffic of the optimizer's kernel on a core, bytes a second: ``docs/kernels.md``."""

_MOST_UNITS = 48
"""See [Note: A part of many units]."""

_MOST_BACKWARDS = 2
"""A step of more micro-batches is played with so many, and with one less: each further one takes the difference."""

_LEAST_SECONDS = 0.05
"""A step that the drive is done with sooner is not worth the seconds that it takes to play it."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the steps that a plan is for: the rates of its drive, and whether some of them may be clipped."""

    drive: Bandwidths
    clipped: bool


@dataclass(frozen=True)
class Judge:
    """A judge of placements under these conditions, for steps of ``num_backwards`` micro-batches. All is on NVMe in the
    plan ``nothing_resident``."""

    conditions: Conditions
    num_backwards: int
    nothing_resident: Plan

    @cached_property
    def is_worth_it(self) -> bool:
        """A step takes longer than playing it, whatever is resident."""
        return self._most_drive_seconds > _LEAST_SECONDS

    @cached_property
    def _most_drive_seconds(self) -> float:
        return self._drive_seconds(self.nothing_resident)

    def least_seconds(self, plan: Plan) -> float:
        """Seconds that no order of the plan's transfers and of compute is faster than."""
        drive = self._drive_seconds(plan)
        return sum(max(drive, share * self._most_drive_seconds) for share, _ in self._steps)

    def seconds(self, plan: Plan) -> float:
        """Seconds of the steps that are played, together."""
        return sum(self.step_seconds(plan, share, clipped=clipped) for share, clipped in self._steps)

    @property
    def _steps(self) -> list[tuple[float, bool]]:
        """Their shares of compute, and whether they are clipped. Where some may be, the one with most compute is played
        in both ways: it loses most by updates that wait for the verdict."""
        steps = [(share, False) for share in _COMPUTE_SHARES]
        return [*steps, (_COMPUTE_SHARES[-1], True)] if self.conditions.clipped else steps

    def step_seconds(self, plan: Plan, compute_share: float, *, clipped: bool) -> float:
        """Seconds of one step, whose compute takes this share of the drive's time with nothing resident."""
        numel = sum(item.unit.numel for item in self.nothing_resident.units)
        compute = compute_share * self._most_drive_seconds / self.num_backwards
        cost = _DriveCost.of(self.conditions.drive, plan)
        back = zip(plan.units, plan.returning, strict=True)
        works = [_work(item, plan, cost, compute / numel, returns) for item, returns in back]
        first = (len(works) - _MOST_UNITS) // 2
        played = works if first <= 0 else works[first : first + _MOST_UNITS]

        def of(num_backwards: int) -> float:
            order = Order(played, places_of(plan), Shares(), num_backwards, 0.0, clipped)
            return order.seconds(_busiest(played, num_backwards))

        seconds = of(min(self.num_backwards, _MOST_BACKWARDS))
        more = self.num_backwards - _MOST_BACKWARDS
        if more > 0:
            seconds += more * (seconds - of(_MOST_BACKWARDS - 1))
        return seconds * _busiest(works, self.num_backwards) / _busiest(played, self.num_backwards)

    def _drive_seconds(self, plan: Plan) -> float:
        one = plan.step_transfers * TRANSFER_BYTES / 2
        return self.conditions.drive.seconds(plan.step_read_bytes + one, plan.step_write_bytes + one)


@dataclass(frozen=True)
class _DriveCost:
    """Seconds of transfers. ``overlap`` is what is saved where reads and writes go on at once."""

    drive: Bandwidths
    overlap: float

    @classmethod
    def of(cls, drive: Bandwidths, plan: Plan) -> _DriveCost:
        read, written = plan.step_read_bytes, plan.step_write_bytes
        alone = read / drive.read + written / drive.write
        return cls(drive, drive.seconds(read, written) / alone if alone else 1.0)

    def read(self, nbytes: float, transfers: float) -> float:
        return (nbytes + transfers * TRANSFER_BYTES) / self.drive.read * self.overlap

    def write(self, nbytes: float, transfers: float) -> float:
        return (nbytes + transfers * TRANSFER_BYTES) / self.drive.write * self.overlap


def _work(item: UnitPlan, plan: Plan, drive: _DriveCost, compute_rate: float, returns: bool) -> UnitWork:
    """``compute_rate`` are seconds of forward and backward for each element of the weights; ``returns``: backward uses
    them."""
    unit, moved = item.unit, UnitBytes.of(item, plan)
    used, changed = plan.routing.used(unit), plan.routing.changed(unit)
    weights, states = unit.count * (moved.weights > 0) * used, num_tiles(item) * changed
    trained = unit.count * (moved.trained > 0) * changed
    grads = sum(tile.count for tile, _ in item.tiles) * (moved.grads > 0) * changed
    forward = unit.numel * compute_rate / 3
    return UnitWork(
        forward=forward,
        backward=2 * forward * returns,
        fetch=drive.read(moved.weights, weights),
        update=drive.read(moved.updated * (moved.trained > 0) + moved.states, trained + states)
        + drive.write(moved.trained + moved.states, trained + states),
        sweep=moved.in_memory / _SWEEP,
        spill=drive.write(moved.grads, grads),
        late=drive.read(moved.grads, grads),
        calls=2 if unit.is_tied else 1,
        returns=returns,
        streamed=item.weights is Tier.NVME,
        eligible=plan.speculative and item.streamed,
    )


def _busiest(works: Sequence[UnitWork], num_backwards: int) -> float:
    """Seconds of compute, or of the drive's updates and gradients, whichever takes longer."""
    compute = sum(work.forward + work.backward for work in works) * num_backwards
    return max(compute, sum(work.update + work.spill * num_backwards for work in works))
