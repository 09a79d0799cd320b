"""Costs of each unit of a plan in a step: what it computes and moves, and the time that each part of the machine
takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.plan.moved import UnitBytes
from offload.plan.passing import lying
from offload.plan.plan import Plan, Tier
from offload.play.schedule import KeptWork, Places, UnitWork
from offload.predict.activation_bytes import ActivationBytes
from offload.predict.cores import Own
from offload.predict.machine import Machine
from offload.predict.model import Model
from offload.predict.workload import Workload
from offload.report.report import MemoryRates
from offload.tiers.gradients.wire import WIRES
from offload.units import UnitSpec


def works_of(
    model: Model,
    machine: Machine,
    workload: Workload,
    whole: Sequence[UnitSpec],
    plan: Plan,
    activations: ActivationBytes,
    products: Callable[[UnitSpec], float],
    read: int,
    written: int,
) -> list[UnitWork]:
    """The seconds of every unit. ``whole`` are those of which the plan has a rank's shards; ``products`` are FLOP of a
    unit's update. ``read`` and ``written`` are a step's bytes on NVMe."""
    formats, network, drive = plan.formats, machine.network, _Drive(machine, read, written)
    compute = compute_seconds(model, machine, workload, whole)
    keeping = _kept(model, machine, whole, activations, drive)
    copying = 0.0 if machine.device.computes else 2 * activations.leaving / machine.update  # each way
    own, host_memory = Own(machine, plan), MemoryRates(machine.update, machine.memory)
    stays = 1.0
    if plan.device.all_bytes:
        stays = min(plan.device.weights_bytes / plan.device.all_bytes, 1.0)
    works: list[UnitWork] = []
    for item, (forward, backward), unit, (share, kept) in zip(plan.units, compute, whole, keeping, strict=True):
        one, uses = UnitBytes.of(item, plan), 2 if unit.is_tied else 1
        per_element = 0.0 if item.weights is Tier.DEVICE else formats.weights / machine.device.link
        to_device = item.unit.numel * per_element * plan.routing.used(unit)
        to_host = item.unit.trainable_numel * per_element * plan.routing.changed(unit)
        crossing = (to_device * (2 - stays) + to_host) * workload.passes * machine.device.link if to_device else 0.0
        works.append(
            UnitWork(
                forward=forward + own.forward(item) + share * copying,
                backward=backward + own.backward(item, unit, uses) + share * copying,
                fetch=drive.seconds(one.weights),
                update=drive.seconds(one.updated + one.states, one.trained + one.states),
                sweep=host_memory.seconds(one.in_memory, crossing)
                + products(item.unit) / machine.products
                + own.update(item),
                spill=drive.seconds(0, one.grads),
                late=drive.seconds(one.grads),
                to_device=to_device, to_device_again=to_device * (1 - stays), to_host=to_host,
                gather=network.gather_seconds(unit.numel * formats.weights),
                exchange=network.exchange_seconds(sent_bytes(unit, workload)),
                kept=kept, calls=uses, returns=plan.returning[len(works)], streamed=item.weights is Tier.NVME,
                eligible=item.has_spares or (plan.speculative and item.streamed),
                beside=one.in_memory * max(1 / machine.beside - 1 / machine.update, 0.0),
            )
        )  # fmt: skip
    return works


def _kept(
    model: Model, machine: Machine, units: Sequence[UnitSpec], activations: ActivationBytes, drive: _Drive
) -> list[tuple[float, KeptWork]]:
    """By unit: its share of what leaves, as it has of the blocks' products; and the seconds that it takes."""
    link = machine.device.link
    out = [activations.leaving / link, drive.seconds(0, activations.written)]
    back = [drive.seconds(activations.read), activations.leaving / link]
    products = [0.0 if _is_head(model, unit) else model.flops(unit)[0] for unit in units]
    shares = [one / (sum(products) or 1.0) for one in products]
    return [(share, KeptWork(*(share * seconds for seconds in (*out, *back)))) for share in shares]


def link_seconds(
    machine: Machine, workload: Workload, plan: Plan, places: Places, works: Sequence[UnitWork], read: int, written: int
) -> dict[str, float]:
    """Seconds that a step takes of each part of the machine. ``read`` and ``written`` are its bytes on NVMe."""
    passes, kept = workload.passes, kept_link_seconds(works, workload)
    forward, backward = (_brought(places, len(works), passes, backward=again) for again in (False, True))
    first = _brought(places, len(works), 1, backward=False)
    links = {
        "compute": sum(work.forward + work.backward for work in works) * passes,
        "NVMe": machine.nvme.seconds(read, written) if machine.nvme is not None else 0.0,
    }
    if machine.device.computes:
        links |= {
            "link to the device": kept["link to the device"]
            + sum(
                work.to_device * once + work.to_device_again * (there - once + back)
                for work, once, there, back in zip(works, first, forward, backward, strict=True)
            ),
            "link to the host": kept["link to the host"] + sum(work.to_host for work in works) * passes,
            "CPU updates": sum(work.sweep for work in works),
        }
    if plan.ranks.gathers:
        links["network"] = sum(
            work.gather * (there + back) + work.exchange * passes
            for work, there, back in zip(works, forward, backward, strict=True)
        )
    return links


def kept_link_seconds(works: Sequence[UnitWork], workload: Workload) -> dict[str, float]:
    """Of these seconds, those of activations."""
    kept = [work.kept for work in works]
    return {
        "NVMe": sum(one.read + one.write for one in kept) * workload.passes,
        "link to the device": sum(one.to_device for one in kept) * workload.passes,
        "link to the host": sum(one.to_host for one in kept) * workload.passes,
    }


def nvme_bytes(plan: Plan, places: Places, workload: Workload, activations: ActivationBytes) -> tuple[int, int]:
    """Bytes that a rank reads and writes in a step. Units that still lie in their slots are read no more."""
    passes = workload.passes
    moved, plan = [UnitBytes.of(item, plan) for item in plan.units], replace(plan, passes=passes)
    streamed, units = [index for index, one in enumerate(moved) if one.weights], [item.unit for item in plan.units]
    back = plan.returning
    lie, _ = lying(units, streamed, places.slots, back)
    forward, backward = (_brought(places, len(moved), passes, backward=again) for again in (False, True))
    read = float(plan.step_read_bytes)
    for index in streamed:  # what ranks have gathered of it is still there
        again = (backward[index] - passes) * (back[index] and index not in lie)
        read += moved[index].weights * (forward[index] - passes + again)
    if workload.clipped and plan.speculative:  # gradients are read by updates that begin later
        read += sum(one.grads for item, one in zip(plan.units, moved, strict=True) if item.streamed)
    return round(read + activations.read * passes), round(plan.step_write_bytes + activations.written * passes)


def _brought(places: Places, num_units: int, passes: int, *, backward: bool) -> list[int]:
    """Count the times that each unit's weights come for all forwards, or backwards, of a step."""
    return [
        sum(places.brought(index, num_units, backward=backward, first=number == 0) for number in range(passes))
        for index in range(num_units)
    ]


class _Drive:
    """Seconds of reads and writes: alone, less what is saved where both go on at once. ``read`` and ``written`` are a
    step's bytes."""

    def __init__(self, machine: Machine, read: int, written: int) -> None:
        self._nvme, self._overlap = machine.nvme, 1.0
        if self._nvme is not None:
            alone = self.seconds(read, written)
            self._overlap = self._nvme.seconds(read, written) / alone if alone else 1.0

    def seconds(self, read_bytes: float, write_bytes: float = 0.0) -> float:
        if self._nvme is None:
            return 0.0
        return (read_bytes / self._nvme.read + write_bytes / self._nvme.write) * self._overlap


def sent_bytes(unit: UnitSpec, workload: Workload) -> int:
    """Bytes of a whole unit's gradients as ranks send them."""
    return WIRES[workload.exchange_dtype]().nbytes(unit.trainable_numel, workload.dtype)


def receiving_seconds(
    machine: Machine, workload: Workload, plan: Plan, places: Places, whole: Sequence[UnitSpec]
) -> float:
    """Of cores, in a step: what a rank receives passes them where the CPU computes."""
    network, gathered = machine.network, 0.0
    for backward in (False, True):
        brought = _brought(places, len(whole), workload.passes, backward=backward)
        gathered += sum(unit.numel * times for unit, times in zip(whole, brought, strict=True)) * plan.formats.weights
    exchanged = sum(sent_bytes(unit, workload) for unit in whole) * workload.passes
    return network.received_bytes(network.gather_cores * gathered + network.exchange_cores * exchanged)


def compute_seconds(
    model: Model, machine: Machine, workload: Workload, units: Sequence[UnitSpec]
) -> list[tuple[float, float]]:
    """Seconds of each unit in forward and backward of one pass."""
    products = [model.flops(unit) for unit in units]
    heads = [_is_head(model, unit) for unit in units]
    in_blocks = sum(forward for (forward, _), head in zip(products, heads, strict=True) if not head) or 1.0
    attention = model.attention_flops(workload.sequence) * model.layers
    seconds = []
    for (forward, trained), head in zip(products, heads, strict=True):
        rate = workload.tokens / (machine.cores.head if head else machine.cores.blocks)
        mixing = 0.0 if head else attention * forward / in_blocks
        again = forward + mixing if (workload.loss_rows if head else workload.recomputed) else 0.0
        seconds.append((rate * (forward + mixing), rate * (forward + trained + 2 * mixing + again)))
    return seconds


def _is_head(model: Model, unit: UnitSpec) -> bool:
    """It makes logits: all its products end in the vocabulary."""
    shapes = [spec.shape if spec.piece is None else spec.piece.whole.shape for spec in unit.parameters]
    return bool(model.vocabulary) and all(len(shape) == 2 and shape[0] == model.vocabulary for shape in shapes)
