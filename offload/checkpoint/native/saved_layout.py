"""Layout of the units and states of a saved generation, read from its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from offload.checkpoint.native.saved_units import SavedUnit
from offload.errors import ConfigError
from offload.native_optimizers import NATIVE_OPTIMIZERS
from offload.optim.formats import Formats
from offload.optim.kernel_rule import MOMENTS, KernelRule
from offload.units import ParameterSpec, UnitSpec
from swapper import Extent, StorageCorrupt, Ticket


class Source(Protocol):
    """Source that a generation is read from: a checkpoint, or the store of a run."""

    @property
    def extents(self) -> Sequence[Extent]: ...
    def holds(self, extent: Extent) -> bool: ...
    @property
    def metadata(self) -> bytes: ...
    def read(self, extent: Extent, address: int, nbytes: int) -> Ticket: ...


def saved_unit(index: int, saved: SavedUnit) -> UnitSpec:
    """The unit with what is needed to find elements: a parameter's ``start`` is the first of its flat elements that is
    there."""
    specs = tuple(
        ParameterSpec(p.name, torch.Size(p.shape), p.numel, p.offset, p.trainable, (), start=p.begin)
        for p in saved.parameters
    )
    return UnitSpec(index, saved.name, (), specs, saved.trainable_numel, saved.numel, 0)


def saved_kernel_rule(
    optimizer: Mapping[str, Any], formats: Formats, dtypes: tuple[torch.dtype, torch.dtype]
) -> KernelRule | None:
    """Return how states lie in tiles, for an optimizer with a kernel. ``dtypes`` are those of weights and gradients.

    Raises ``ConfigError`` and ``StorageCorrupt`` for what it cannot have.
    """
    kernel = NATIVE_OPTIMIZERS.get(optimizer["optimizer"])
    if kernel is None:
        return None
    states, moments = optimizer["states"], optimizer["moments"]
    if moments not in MOMENTS:
        raise ConfigError(f"moments are in {moments!r} there, and this program knows {', '.join(MOMENTS)}")
    rule = KernelRule(kernel, [kernel.options_for(states)], formats, dtypes, moments)
    if rule.identity["states"] != states:
        raise StorageCorrupt(f"{optimizer['optimizer']} has states {states} there, which it cannot have.")
    return rule
