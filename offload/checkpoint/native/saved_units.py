"""Units as a description has them: what lies where in which record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from offload.checkpoint.native.base_files import SavedPart
from offload.encoding import Json, as_json
from offload.optim.rule import TilePart


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """``offset`` is in elements, from the unit's start. A piece of a large weight has the name of the ``whole``, and
    begins at row ``start`` of it. ``packing`` says how the bytes of a quantised one lie. A rank's shard has the
    elements from ``begin`` on of a parameter of shape ``flat_of``."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool
    whole: str | None = None
    start: int = 0
    packing: str | None = None
    begin: int = 0
    flat_of: tuple[int, ...] | None = None

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape in the model, also where this is a shard."""
        return self.shape if self.flat_of is None else self.flat_of

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True, slots=True)
class SavedTile:
    """Optimizer states of the unit's elements ``[start, stop)``; ``nbytes`` are used of its extent. ``parts`` are those
    of an optimizer without a kernel."""

    start: int
    stop: int
    nbytes: int
    extent: int
    parts: tuple[TilePart, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedUnit:
    """Extents are by their number. ``weights``: what is trained, then what is frozen, unless that is ``in_files``."""

    name: str
    numel: int
    trainable_numel: int
    parameters: tuple[SavedParameter, ...]
    weights: tuple[int, ...]
    tiles: tuple[SavedTile, ...]
    gradients: int | None
    in_files: tuple[SavedPart, ...] = ()

    @property
    def stored_numel(self) -> int:
        """Elements of its weights that are in extents."""
        return self.trainable_numel if self.in_files else self.numel


class SavedUnits(tuple[SavedUnit, ...]):
    """The units of a model, as they are saved with each commit."""

    @cached_property
    def as_json(self) -> Json:
        """They stay the same: they are made into JSON once."""
        return as_json([asdict(unit) for unit in self], "the units")
