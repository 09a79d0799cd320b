"""Updates that were logged, as a description has them: of which elements, with which coefficients, and the extents of
their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from offload.checkpoint.native.saved_units import SavedUnit
from offload.encoding import Json, as_json
from offload.native_optimizers import NATIVE_OPTIMIZERS, Coef
from offload.plan.update_log import in_parts
from offload.units import ALIGNMENT
from offload.update.step import Segment
from swapper.checked import TEXT, Int, Kind, ListOf, MapOf, Real, Record, Refused, Tuple, within


@dataclass(frozen=True)
class LoggedUpdate:
    """The update of one unit in one step. ``gradients`` are extents, by number, each with those of ``num_tiles`` tiles.
    ``coefficients`` are the fields of a ``Coef``; ``segments`` say which elements take a step with which of them."""

    unit: str
    num_tiles: int
    gradients: tuple[int, ...]
    coefficients: tuple[dict[str, float], ...]
    segments: tuple[tuple[int, int, int], ...]

    @cached_property
    def as_json(self) -> Json:
        """It stays the same: it is made into JSON once, for all the commits that name it."""
        return as_json({field.name: getattr(self, field.name) for field in fields(self)}, "the log")

    def steps(self, optimizer: str) -> Iterator[Segment]:
        """The segments as ``Rule.apply`` takes them. Raises ``ValueError`` and ``TypeError`` for coefficients that the
        optimizer of this name cannot have."""
        kind = NATIVE_OPTIMIZERS[optimizer].kind
        if not all(_are_of(kind, given) for given in self.coefficients):
            raise ValueError(f"each step has {', '.join(field.name for field in fields(kind))}, and nothing else")
        frozen = [kind(**given) for given in self.coefficients]  # type: ignore[arg-type]
        for of in frozen:
            if not all(map(math.isfinite, of.constants)):
                raise ValueError("what follows from a step is no number")
        for start, stop, index in self.segments:
            yield Segment(start, stop, frozen[index])


def logged(unit: str, num_tiles: int, gradients: Sequence[int], segments: Sequence[Segment]) -> LoggedUpdate | None:
    """An update with these segments; None if its coefficients are other numbers than a description can have."""
    frozen: dict[Any, int] = {}
    for segment in segments:
        frozen.setdefault(segment.frozen, len(frozen))
    coefficients = tuple(asdict(of) for of in frozen)
    if not all(_are_of(type(of), given) for of, given in zip(frozen, coefficients, strict=True)):
        return None
    indexed = tuple((segment.start, segment.stop, frozen[segment.frozen]) for segment in segments)
    return LoggedUpdate(unit, num_tiles, tuple(gradients), coefficients, indexed)


def logged_as_json(updates: Sequence[LoggedUpdate]) -> Json:
    """All of them, in order."""
    return Json(b"[" + b",".join(update.as_json.text for update in updates) + b"]")


def check_logged(updates: Sequence[LoggedUpdate], units: Sequence[SavedUnit], optimizer: dict[str, Any] | None) -> None:
    """Raise ``Refused`` unless each is of a unit that is there, and of elements that it trains, one after the other,
    with coefficients that the optimizer can have."""
    by_name = {unit.name: unit for unit in units}
    for index, update in enumerate(updates):
        with within(index):
            unit = by_name.get(update.unit)
            if unit is None or optimizer is None or optimizer["optimizer"] not in NATIVE_OPTIMIZERS:
                raise Refused("there is nothing that it could be an update of", "unit")
            if len(update.gradients) != len(in_parts(unit.tiles, update.num_tiles)):
                raise Refused(f"there are {len(update.gradients)}, and {len(unit.tiles)} tiles", "gradients")
            _check_segments(update, unit.trainable_numel)
            try:
                steps = list(update.steps(optimizer["optimizer"]))
            except (ValueError, TypeError, ArithmeticError) as error:
                raise Refused(str(error), "coefficients") from None
            states = set(optimizer.get("states", ()))
            if any(not set(step.frozen.states) <= states for step in steps if isinstance(step.frozen, Coef)):
                raise Refused(f"the optimizer has the states {', '.join(states)} alone", "coefficients")


def _check_segments(update: LoggedUpdate, numel: int) -> None:
    end = 0
    for start, stop, index in update.segments:
        if not end <= start < stop <= numel or start % ALIGNMENT:
            raise Refused(f"[{start}, {stop}) is not what can follow {end} of {numel} elements", "segments")
        if index >= len(update.coefficients):
            raise Refused(f"{index} is none of {len(update.coefficients)} coefficients", "segments")
        end = stop


def _are_of(kind: type[Coef], given: Mapping[str, object]) -> bool:
    """The numbers are those of a step of this kind, each of its type."""
    types = {field.name: _TYPES[field.type] for field in fields(kind)}
    return given.keys() == types.keys() and all(
        type(value) in types[name] and abs(value) < _MOST  # type: ignore[arg-type]
        for name, value in given.items()
    )


_TYPES: Mapping[Any, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,)}
_MOST = 1e30


class _Number(Kind[float]):
    """A finite number, or a truth, as it is."""

    def take(self, value: Any) -> float:
        Real(finite=True).take(float(value) if type(value) is bool else value)
        return value  # type: ignore[no-any-return]


_EXTENT = Int(0, 1 << 32)
LOGGED_UPDATES = ListOf(
    Record(
        LoggedUpdate,
        {
            "unit": TEXT,
            "num_tiles": Int(1),
            "gradients": ListOf(_EXTENT),
            "coefficients": ListOf(MapOf(_Number())),
            "segments": ListOf(Tuple(Int(), Int(), Int())),
        },
        in_parts=True,
    )
)
