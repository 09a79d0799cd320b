"""Listeners to hooks: what the engine is told of the model, and what is told of micro-batches on their way together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from offload.model.aliases import Alias
from offload.model.own_writes import Writes
from offload.model.unit_in_model import UnitInModel
from offload.units import ParameterSpec, UnitSpec


class Listener(Protocol):
    """Receiver of what the hooks tell: a unit is needed, is no longer needed, got a gradient, has all its gradients,
    has weights with other values than before its use."""

    @property
    def aliased(self) -> Collection[int]:
        """Units, by index, whose weights others have in other memory: a use of them brings what was written there."""

    def begin_use(self, unit: UnitSpec) -> bool:
        """Return whether what is in the window is a copy of the weights, which a change of its bytes does not
        reach."""

    def end_use(self, unit: UnitSpec) -> None: ...

    def begin_passing(self) -> None:
        """A backward comes to units whose weights stay where they are, and which it does not use: see
        [Note: Backward without uses]."""

    def passed(self, unit: UnitSpec) -> None:
        """It is done with this one."""

    def take_gradient(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float | None) -> None:
        """``scale``: what the engine's own backward is still to multiply it by; None in a backward of the user's."""

    def end_backward(self, unit: UnitSpec) -> None: ...

    def end_part(self, unit: UnitSpec) -> None:
        """Another one of several micro-batches gives gradients of the unit from now on."""

    def changed_in_use(self, unit: UnitSpec, changes: Sequence[tuple[ParameterSpec, torch.Tensor]]) -> None:
        """A use of a unit has given these of its weights other values."""

    def moved_in_use(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor, memory: Alias) -> None: ...


class Interleaving(Protocol):
    """Micro-batches that are on their way together, each in a context: the hooks tell what they are about to do. Each
    call may raise in the place of a micro-batch, whose thread makes it. See ``offload.model.interleave``."""

    @property
    def first_is_alone(self) -> bool:
        """The first context runs to its end before another one begins, this once."""

    def arrive(self, unit: UnitInModel, *, backward: bool) -> None:
        """The context is about to use a unit that it does not use yet: others may compute first."""

    def left(self, unit: UnitInModel, start: int) -> None:
        """The call that began at ``start`` has an output whose gradient the hooks wait for."""

    def opened(self, unit: UnitInModel, start: int) -> None:
        """The backward of that call begins."""

    def is_awaited(self, unit: UnitInModel) -> bool:
        """Another context will use the unit next."""

    def gradient(self, unit: UnitInModel, spec: ParameterSpec, *, in_its_place: bool) -> bool:
        """A gradient has come; ``in_its_place``: during its unit's backward. Return whether the last one of the unit
        was another context's."""

    def changed(self, unit: UnitInModel) -> None:
        """A use of the unit has changed its weights."""

    def refuse_others(self, what: str) -> None:
        """``what`` comes in one context. Raises ``OffloadError`` if another one has calls under way, or will have
        some."""


def pass_on(
    unit: UnitInModel,
    writes: Writes,
    listener: Listener,
    serial: int,
) -> None:
    """Tell the listener what a use of the unit has written: to which of the watched parameters, its value, and the
    memory that it has now, if that is another one. ``serial`` is the number of the use."""
    found = [(unit.watched[index], value, other) for index, value, other in writes]
    listener.changed_in_use(unit.spec, [(spec, value) for spec, value, other in found if other is None])
    for spec, value, other in found:
        if other is not None:
            unit.reassigned[spec] = serial
            listener.moved_in_use(unit.spec, spec, value, Alias(other))
            unit.strays.refuse_move(spec.name)
