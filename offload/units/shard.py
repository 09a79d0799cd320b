"""A rank's shard of a unit: an equal part of what is trained of it, and an equal part of what is frozen.

A shard is a unit like any other: plans, homes, updates and stores know nothing of ranks. It has a spec for each of the
unit's parameters, in the same order, also for those of which the rank has no element.
"""

from __future__ import annotations

from dataclasses import replace

from offload.units.spec import ParameterSpec, UnitSpec


def shard_unit(unit: UnitSpec, rank: int, num_ranks: int) -> UnitSpec:
    """The shard of ``unit``, which was laid out for this many ranks; the unit itself if there is one."""
    if num_ranks == 1:
        return unit
    trained, frozen = unit.trainable_numel // num_ranks, (unit.numel - unit.trainable_numel) // num_ranks

    def shard(spec: ParameterSpec) -> ParameterSpec:
        begin, length, base = rank * trained, trained, 0
        if not spec.trainable:
            begin, length, base = unit.trainable_numel + rank * frozen, frozen, trained
        start, stop = (min(max(element - begin, 0), length) for element in (spec.offset, spec.offset + spec.numel))
        return replace(
            spec,
            shape=type(spec.shape)([stop - start]),
            numel=stop - start,
            offset=base + start,
            whole=spec,
            start=max(begin - spec.offset, 0) if stop > start else 0,
        )

    specs = tuple(shard(spec) for spec in unit.parameters)
    return replace(unit, parameters=specs, trainable_numel=trained, numel=trained + frozen)
