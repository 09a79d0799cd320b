"""The tiers of one unit's records, and the buffers that those on NVMe pass through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from offload.optim.formats import Formats
from offload.report.report import Bandwidths
from offload.units import Tile, UnitSpec
from swapper import align

TilesOf = Callable[[UnitSpec, int], tuple[Tile, ...]]
"""Divide a unit's states into tiles of at most so many bytes (``Rule.tiles_of``)."""


def shown_bytes(nbytes: int) -> str:
    """A size, for people."""
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= (1 << 20) // 10 else f"{nbytes / 1024:,.0f} KiB"


class Tier(Enum):
    """Tier of memory in which bytes are stored between uses. What a new one needs is listed in docs/design.md."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Drives:
    """Mover of bytes to and from NVMe, and its rates."""

    backend: str
    bandwidths: Bandwidths


@dataclass(frozen=True)
class Staging:
    """Numbers and sizes of the buffers that the records on NVMe pass through, and the size of a tile."""

    num_slots: int
    num_grad_buffers: int
    num_tile_buffers: int
    tile_bytes: int
    slot_bytes: int = 0
    grad_buffer_bytes: int = 0
    tile_buffer_bytes: int = 0
    edge_bytes: int = 0
    """Beside each slot, for what is read from files that are not aligned."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        slots = self.num_slots * (self.slot_bytes + self.edge_bytes)
        grads = self.num_grad_buffers * self.grad_buffer_bytes
        return slots + grads + self.num_tile_buffers * self.tile_buffer_bytes

    def shown(self) -> list[str]:
        """Return what there is, for people."""
        counts = {
            f"weight slots of {shown_bytes(self.slot_bytes)}": self.num_slots,
            f"gradient buffers of {shown_bytes(self.grad_buffer_bytes)}": self.num_grad_buffers,
            f"tile buffers of {shown_bytes(self.tile_buffer_bytes)}": self.num_tile_buffers,
        }
        return [f"{count} {name}" for name, count in counts.items() if count]


@dataclass(frozen=True)
class UnitPlan:
    """The tier of each kind of one unit. ``tiles`` are its optimizer states, each with its own tier."""

    unit: UnitSpec
    weights: Tier
    grads: Tier
    tiles: tuple[tuple[Tile, Tier], ...]
    has_spares: bool = False
    """Its records in host memory have a spare place each, so that it can be updated during backward."""
    is_logged: bool = False
    """A commit may write the gradients of its last step: see ``plan/update_log.py``."""

    @property
    def updated_in_ram(self) -> bool:
        """All of it is trained, and is stored in host memory with its states. A copy of what is frozen is of no use."""
        is_trained = bool(self.tiles) and self.unit.trainable_numel == self.unit.numel
        return is_trained and all(tier is Tier.HOST for tier in (self.weights, *(t for _, t in self.tiles)))

    def spare_bytes(self, formats: Formats) -> int:
        """Host memory that its spare places take, or would take."""
        return self.unit.numel * formats.weights + sum(align(tile.nbytes) for tile, _ in self.tiles)

    @property
    def streamed(self) -> bool:
        """Weights and all states are stored on NVMe: nothing that an update writes is resident."""
        return bool(self.tiles) and all(tier is Tier.NVME for tier in (self.weights, *(t for _, t in self.tiles)))

    def on_device(self) -> UnitPlan:
        """The same unit and tiles, resident on a device."""
        return UnitPlan(self.unit, Tier.DEVICE, Tier.DEVICE, tuple((tile, Tier.DEVICE) for tile, _ in self.tiles))
