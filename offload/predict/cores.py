"""Work of a CPU that computes: what the engine does on the same cores beside the model's compute, and which share of
them each part of the machine keeps busy (see [Note: Shared cores] in ``offload.play.simulator``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.plan.moved import num_tiles
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.play.schedule import UnitWork
from offload.play.simulator import Shares
from offload.predict.machine import Machine
from offload.units import UnitSpec


class Own:
    """Seconds of the engine's own work for a unit, by the part that does it. 0 where a device computes."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self._machine, self._formats, self._routing = machine, plan.formats, plan.routing
        self._is_nothing = machine.device.computes

    def forward(self, item: UnitPlan) -> float:
        """Of the thread that computes: hooks, places, and asking for what comes."""
        if self._is_nothing:
            return 0.0
        machine = self._machine
        others = num_records(item) - num_tiles(item)
        used = item.unit.count * self._routing.used(item.unit)
        return _alone(machine, used * (machine.unit_seconds + others * machine.record_seconds)) / 2

    def backward(self, item: UnitPlan, whole: UnitSpec, uses: int) -> float:
        """The same, and gradients are put away, or added to those of another of the ``uses``."""
        if self._is_nothing:
            return 0.0
        formats = self._formats
        traffic = whole.trainable_numel * (uses * (formats.weights + formats.grads) + (uses - 1) * formats.grads)
        return self.forward(item) + traffic / self._machine.cores.gradients

    def update(self, item: UnitPlan) -> float:
        """Of the update's thread: each tile that passes NVMe is asked for, waited for and sent off."""
        if self._is_nothing:
            return 0.0
        tiles = num_tiles(item) * self._routing.changed(item.unit)
        return _alone(self._machine, tiles * self._machine.record_seconds)


def num_records(item: UnitPlan) -> int:
    """Of a unit: its weights, its gradients and each tile of its states, if they are stored on NVMe."""
    return num_tiles(item) + (item.weights is Tier.NVME) + (item.grads is Tier.NVME)


def shares_of(
    machine: Machine, plan: Plan, works: Sequence[UnitWork], links: Mapping[str, float], moved: int, received: float
) -> Shares:
    """Of what is ``moved`` over NVMe each byte is checked; what is ``received`` from other ranks takes seconds of
    cores. ``links`` are the seconds of each part."""
    if machine.device.computes:
        return Shares()
    one = min(1 / machine.cores.count, 1.0)
    asking = sum(Own(machine, plan).update(item) for item in plan.units)
    sweeps = sum(work.sweep for work in works)
    return Shares(
        compute=machine.cores.busy,
        drive=_share(moved / machine.checksum / machine.cores.count, links["NVMe"]),
        sweep=_share(sweeps - asking + asking * one, sweeps),
        network=_share(received / machine.cores.count, links.get("network", 0.0)),
        lost=machine.cores.lost,
    )


def bound(shares: Shares, works: Sequence[UnitWork], links: Mapping[str, float]) -> float:
    """Seconds in which the cores can do all that a step asks of them."""
    others = shares.drive * links["NVMe"] + shares.network * links.get("network", 0.0)
    return shares.compute * links["compute"] + shares.sweep * sum(work.sweep for work in works) + others


def _alone(machine: Machine, seconds: float) -> float:
    """Seconds of a thread that has ``seconds`` of work for a core, where ranks may share one."""
    return seconds / min(machine.cores.count, 1.0)


def _share(busy: float, seconds: float) -> float:
    return min(busy / seconds, 1.0) if seconds else 0.0
