"""Updates that begin during backward, before the step is certain, and count only if it turns out as expected.

[Note: Why an early update harms nothing] It reads a unit's weights and states, and writes the new ones beside the old:
to shadow extents. Only the step's verdict makes shadow and extent change places, and only if what was frozen early is
what the step froze: the same gradients, learning rate and step number, nothing clipped, everything finite. Otherwise
the shadow is forgotten and the unit is updated in its turn. So a step gives the same bits with and without, and a
gradient that is not finite has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.unit import GradientBuffer, StateTile
    from offload.update import UnitUpdate


class Progress(Enum):
    """Where an early update is.

    - ``WAITING``: not begun.
    - ``RUNNING``: some tile is on its way.
    - ``DONE``: all of it is in the shadow extents, or on its way there.
    """

    WAITING = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(eq=False)
class Speculation:
    """One unit's early update. Guarded by the updater's lock."""

    update: UnitUpdate
    tiles: list[StateTile]
    """Those that the update touches."""
    loan: GradientBuffer | None = None
    """Where the gradients still lie, if they need not be read back."""
    progress: Progress = Progress.WAITING
    accepted: bool = False
    """The verdict has confirmed it."""
