"""Updates that were logged, as a description has them: of which elements, with which coefficients, and the extents of
their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        return as_json(asdict(self), "the log")

    def steps(self, optimizer: str) -> Iterator[Segment]:
        """The segments as ``Rule.apply`` takes them. Raises ``ValueError`` and ``TypeError`` for coefficients that the
        optimizer of this name cannot have."""
        kind = NATIVE_OPTIMIZERS[optimizer].kind
        names = {field.name for field in fields(kind)}
        if any(given.keys() != names for given in self.coefficients):
            raise ValueError(f"each step has {', '.join(sorted(names))}, and nothing else")
        frozen = [kind(**given) for given in self.coefficients]  # type: ignore[arg-type]  # JSON has one kind of number
        for start, stop, index in self.segments:
            yield Segment(start, stop, frozen[index])


def logged(unit: str, num_tiles: int, gradients: Sequence[int], segments: Sequence[Segment]) -> LoggedUpdate | None:
    """An update with these segments; None if its coefficients are not plain numbers, from which the same would
    follow."""
    frozen: dict[Any, int] = {}
    for segment in segments:
        frozen.setdefault(segment.frozen, len(frozen))
    coefficients = tuple(asdict(coefficients) for coefficients in frozen)
    if not all(map(_is_plain, (value for given in coefficients for value in given.values()))):
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
            states = optimizer.get("states", ())
            if any(not set(step.frozen.states) <= set(states) for step in steps if isinstance(step.frozen, Coef)):
                raise Refused(f"the optimizer has the states {', '.join(states)} alone", "coefficients")


def _check_segments(update: LoggedUpdate, numel: int) -> None:
    end = 0
    for start, stop, index in update.segments:
        if not end <= start < stop <= numel or start % ALIGNMENT:
            raise Refused(f"[{start}, {stop}) is not what can follow {end} of {numel} elements", "segments")
        if index >= len(update.coefficients):
            raise Refused(f"{index} is none of {len(update.coefficients)} coefficients", "segments")
        end = stop


def _is_plain(value: object) -> bool:
    return type(value) is bool or (type(value) in (int, float) and math.isfinite(value) and abs(value) < 1 << 53)  # type: ignore[arg-type]


class _Number(Kind[float]):
    """A finite number, or a truth, as it is."""

    def take(self, value: Any) -> float:
        if type(value) is not bool and type(value) is not int:
            return Real(finite=True).take(value)
        if not _is_plain(value):
            raise Refused("it is too large")
        return value


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
