"""The way of a gradient from autograd to its home: a chain of sinks, each of which hands on to the next one.

::

    hooks -> OwnGradients -> [GradientExchange] -> [GradientTransport] -> GradientStore
    GradientStore -> UnitGradients: a home, or a buffer and NVMe

Ranks exchange theirs first; a transport brings those to the host that do not stay on a device. Each sink looks the
same from before it. ``assembly/compute.py`` ties the chain, and puts ``GradientStore`` at its end.

[Note: How a gradient reaches NVMe] Autograd calls a hook of the parameter, ``Hooks`` gives the gradient to
``TrainingPasses.take_gradient``, which waits for the unit's last update and calls ``take`` of the first sink. The last
one adds it up (``GradientStore._add``) by ``put`` or ``add`` of the unit's ``SpilledGradients``, in one of the buffers
of ``BufferPool``. When ``Hooks`` sees that the unit's backward is over it calls ``TrainingPasses.end_backward``; from
there ``close`` goes down the chain, and ``SpilledGradients.close`` writes each tile's part of the buffer to its extent
(``StoredHome.write``). ``GradientTransport`` calls that end of it (``GradientStore.put_away``) on its own thread, when
the unit's last copy has come. A buffer that another unit needs sooner is spilled by ``BufferPool.take``.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.ranks.agreement import Place
from offload.units import ParameterSpec, UnitSpec


class GradientSink(Protocol):
    """Takes gradients from one thread at a time.

    An interrupt at any line leaves it as before the call or as after it; where it cannot, an error of ours follows.
    """

    def take(self, unit: UnitSpec, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``gradient``, which is complete, to what the coming step has. Reads ``gradient`` only."""

    def end_part(self, unit: UnitSpec) -> None:
        """Gradients of the unit are from now on those of another one of several backwards that are under way."""

    def close(self, unit: UnitSpec) -> None:
        """The unit has all its gradients of this backward."""

    def complete(self) -> Iterator[UnitSpec]:
        """Closed units, each once, as soon as their gradients are in their places and their squares are known; without
        those that more gradients are coming for. Never waits."""

    def settle(self, at: Place | None = None) -> None:
        """Return when all gradients are in their places, and the sums of squares are those of all ranks. ``at``: the
        place of the program, where all ranks meet and agree."""

    def restored(self) -> None:
        """Gradients of a checkpoint, which all ranks load, have taken the place of those in the store."""

    def use_up(self, unit: UnitSpec, specs: Set[ParameterSpec]) -> None:
        """The gradients of these parameters of the unit belong to a step now: the next ones begin new sums."""

    def forget(self, unit: UnitSpec) -> None:
        """The gradients are not wanted: the next one begins a new sum."""


@dataclass(frozen=True)
class GradientDtypes:
    """Dtypes of gradients: as they are ``made``, and as they are ``kept`` for a step or for more of them."""

    made: torch.dtype
    kept: torch.dtype

    def of(self, is_held: bool) -> torch.dtype:
        """The dtype of gradients that wait for more of them, and of others."""
        return self.kept if is_held else self.made
