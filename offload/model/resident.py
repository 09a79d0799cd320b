"""Blocks that stay resident between calls, for what works on one of them for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from offload.errors import ConfigError
from offload.model.hooks import Hooks
from offload.model.unit_in_model import UnitInModel
from offload.units import UnitSpec
from swapper import readable_bytes


@dataclass(eq=False)
class Resident:
    """Holds units of one engine. ``has_room`` tells whether they may be in use at a time. Uses within
    ``before_boundary`` commit no step."""

    hooks: Hooks
    before_boundary: Callable[[], contextlib.AbstractContextManager[None]]
    has_room: Callable[[Sequence[UnitSpec]], bool]
    held: list[UnitInModel] = field(default_factory=list)
    """Units that are to be resident now. What ends all uses may have ended that early."""

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """See ``OffloadEngine.resident``."""
        modules = set(module.modules())
        units = [unit for unit in self.hooks.units if any(site[0] in modules for site in unit.sites)]
        if not units:
            raise ConfigError(
                f"engine.resident({type(module).__name__}): the engine has no weights of it that come as a whole. Give "
                "a block of engine.module"
            )
        if not self.has_room([unit.spec for unit in units]):
            nbytes = sum(unit.nbytes for unit in units)
            raise ConfigError(
                f"engine.resident({type(module).__name__}): its {len(units)} units, {readable_bytes(nbytes)}, have no "
                "room at a time. Give one block after the other, or the engine more memory"
            )
        self.hooks.refuse_others("engine.resident()")
        with contextlib.ExitStack() as held:
            for unit in units:
                with self.before_boundary():
                    self.hooks.hold(unit)
                held.callback(self.hooks.let_go, unit)
                self.held.append(unit)
                held.callback(self.held.remove, unit)
            yield

    def store(self) -> None:
        """Store what was written to them so far. They stay resident."""
        for unit in dict.fromkeys(self.held):
            if unit.num_holds:
                writes = unit.own_writes.end()
                self.hooks.store(unit, writes)
                unit.own_writes.show(writes)
                unit.own_writes.begin(is_copy=unit.is_copy)
