"""One micro-batch on its way through the model together with others: how far it has come, and what it has used."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from offload.model.hook_context import HookContext
from offload.model.unit_in_model import UnitInModel
from offload.units import ParameterSpec


class Stage(Enum):
    """Stage of a micro-batch.

    - ``WAITING``: it is about to use a unit, or to begin.
    - ``COMPUTING``: its thread has the turn.
    - ``OVER``: its thread touches nothing any more.
    """

    WAITING = auto()
    COMPUTING = auto()
    OVER = auto()


@dataclass(frozen=True)
class Place:
    """Point that a micro-batch has come to: what it is about to do."""

    unit: UnitInModel
    backward: bool

    @property
    def progress(self) -> tuple[bool, int]:
        """Grows on the way through the model and back, as far as units are used in their order."""
        return self.backward, -self.unit.spec.index if self.backward else self.unit.spec.index


class Ended(BaseException):
    """Ends a micro-batch because of another one's error. No ``Exception``: the user's code is not to handle it."""


@dataclass(eq=False)
class MicroBatch:
    """One call of the user's function."""

    context: HookContext
    stage: Stage = Stage.WAITING
    place: Place | None = None
    """The last use that it came to."""
    gives: ParameterSpec | None = None
    """It waits there in the middle of a backward, to give this one a gradient."""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Semaphore that its thread waits for."""
    states: tuple[Any, ...] = ()
    """Of random generators, when it got its turn."""
    last_unit: UnitInModel | None = None
    """The one that it used last."""
    used: set[UnitInModel] = field(default_factory=set)
    entered: set[UnitInModel] = field(default_factory=set)
    """Units of which it has begun a forward."""
    repeated: set[UnitInModel] = field(default_factory=set)
    """Those of which it has begun several."""
    calls: dict[UnitInModel, set[int]] = field(default_factory=dict)
    """Beginning of each call of a unit, of those whose backward is to come."""
    given: set[ParameterSpec] = field(default_factory=set)
    """Parameters that it gave a gradient."""
    is_one: bool = True
    """False: there was none left for it."""
    result: Any = None

    @property
    def index(self) -> int:
        """Place of its turn in a loop."""
        return self.context.index

    @property
    def unit(self) -> UnitInModel | None:
        """The one that it used last, or will use next."""
        return None if self.place is None else self.place.unit

    def num_calls(self, unit: UnitInModel) -> int:
        return len(self.calls.get(unit, ()))
