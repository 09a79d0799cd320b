"""Kinds of values: what a field may hold, and what it becomes. A format is a table of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from swapper.checked.refused import Refused, shown, within
from swapper.checked.text import Cursor

_T = TypeVar("_T")

NUMEL_MAX = 1 << 60
"""No tensor has more elements, and no file more bytes."""

_DIMENSIONS_MAX = 64
_NAME_BYTES_MAX = 255


class Kind(Generic[_T]):
    """A kind of value. ``take`` checks one; ``read`` takes it from text. Both raise ``Refused``."""

    def take(self, value: Any) -> _T:
        raise NotImplementedError

    def read(self, cursor: Cursor) -> _T:
        return self.take(cursor.piece())


class Int(Kind[int]):
    """A whole number from ``low`` to ``high``."""

    def __init__(self, low: int = 0, high: int = NUMEL_MAX) -> None:
        self._low, self._high = low, high

    def take(self, value: Any) -> int:
        if type(value) is not int:
            raise Refused(f"expected a whole number, not {shown(value)}")
        if not self._low <= value <= self._high:
            raise Refused(f"{shown(value)} is not between {self._low} and {self._high}")
        return value


class Real(Kind[float]):
    """A number. With ``finite`` neither NaN nor infinity, and above ``above``."""

    def __init__(self, *, finite: bool = False, above: float = -math.inf) -> None:
        self._finite, self._above = finite, above

    def take(self, value: Any) -> float:
        if type(value) not in (int, float) or (type(value) is int and abs(value) > 1 << 1023):
            raise Refused(f"expected a number, not {shown(value)}")
        if self._finite and not (math.isfinite(value) and value > self._above):
            raise Refused(f"{shown(value)} is not a number above {self._above}")
        return float(value)


class _Flag(Kind[bool]):
    def take(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise Refused(f"expected true or false, not {shown(value)}")
        return value


class Text(Kind[str]):
    """A string that can be written as UTF-8, of at most ``nchars_max``, and ``not_`` this one."""

    def __init__(self, nchars_max: int = 1 << 16, not_: str | None = None) -> None:
        self._nchars_max, self._not = nchars_max, not_

    def take(self, value: Any) -> str:
        if not isinstance(value, str):
            raise Refused(f"expected a string, not {shown(value)}")
        if len(value) > self._nchars_max:
            raise Refused(f"a string has {len(value):,} letters, and can have at most {self._nchars_max:,}")
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Refused(f"{shown(value)} has half of a letter")
        if value == self._not:
            raise Refused(f"it cannot be {shown(value)}")
        return value


class FileName(Text):
    """The name of a file in the directory of what names it."""

    def __init__(self) -> None:
        super().__init__(_NAME_BYTES_MAX)

    def take(self, value: Any) -> str:
        name = super().take(value)
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > _NAME_BYTES_MAX:
            raise Refused(f"{shown(name)} is not the name of a file in this directory")
        return name


class OneOf(Kind[_T]):
    """One of some strings, which stand for values."""

    def __init__(self, values: Mapping[str, _T]) -> None:
        self._values = values

    def take(self, value: Any) -> _T:
        if not isinstance(value, str) or value not in self._values:
            raise Refused(f"{shown(value)} is none of {', '.join(self._values)}")
        return self._values[value]


class Optional(Kind["_T | None"]):
    """Null, or a value of another kind."""

    def __init__(self, kind: Kind[_T]) -> None:
        self._kind = kind

    def take(self, value: Any) -> _T | None:
        return None if value is None else self._kind.take(value)


class ListOf(Kind[Sequence[_T]]):
    """A list of at most ``most``, as a tuple unless ``make`` makes something else of it. It is read item by item."""

    def __init__(self, kind: Kind[_T], most: int = NUMEL_MAX, make: Callable[[list[_T]], Sequence[_T]] = tuple) -> None:
        self._kind, self._most, self._make = kind, most, make

    def take(self, value: Any) -> Sequence[_T]:
        if not isinstance(value, (list, tuple)):
            raise Refused(f"expected a list, not {shown(value)}")
        if len(value) > self._most:
            raise Refused(f"a list of {len(value):,} can have at most {self._most:,}")
        found: list[_T] = []
        with _numbered(found):
            for item in value:
                found.append(self._kind.take(item))
        return self._make(found)

    def read(self, cursor: Cursor) -> Sequence[_T]:
        found: list[_T] = []
        with _numbered(found):
            for index in cursor.items():
                if index == self._most:
                    raise Refused(f"a list can have at most {self._most:,}")
                found.append(self._kind.read(cursor))
        return self._make(found)


class _numbered:
    """Name the next item in refusals of the block."""

    def __init__(self, found: Sequence[Any]) -> None:
        self._found = found

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Refused):
            error.place = (len(self._found), *error.place)


class Shape(Kind[tuple[int, ...]]):
    """The sizes of a tensor that can be."""

    _sizes = ListOf(Int(), _DIMENSIONS_MAX)

    def take(self, value: Any) -> tuple[int, ...]:
        sizes = tuple(self._sizes.take(value))
        if math.prod(sizes) > NUMEL_MAX or math.prod(size for size in sizes if size) > 1 << 62:
            raise Refused("a tensor of this shape would have more elements than can be")
        return sizes


class Tuple(Kind[tuple[Any, ...]]):
    """A list with a kind for each item; the last ``optional`` of them need not be there."""

    def __init__(self, *kinds: Kind[Any], optional: int = 0) -> None:
        self._kinds, self._least = kinds, len(kinds) - optional

    def take(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or not self._least <= len(value) <= len(self._kinds):
            raise Refused(f"expected a list of {len(self._kinds)}, not {shown(value)}")
        found: list[Any] = []
        with _numbered(found):
            for kind, item in zip(self._kinds, value, strict=False):
                found.append(kind.take(item))
        return tuple(found)


class MapOf(Kind[dict[str, _T]]):
    """An object with any names (of the kind ``names``) and values of one kind. It is read member by member."""

    def __init__(self, kind: Kind[_T], names: Kind[str] | None = None) -> None:
        self._kind, self._names = kind, Text() if names is None else names

    def take(self, value: Any) -> dict[str, _T]:
        if not isinstance(value, dict):
            raise Refused(f"expected an object, not {shown(value)}")
        found = {}
        for name, item in value.items():
            name = self._names.take(name)
            try:
                found[name] = self._kind.take(item)
            except Refused as error:
                error.place = (name, *error.place)
                raise
        return found

    def read(self, cursor: Cursor) -> dict[str, _T]:
        found = {}
        for name in cursor.members():
            with within(name):
                found[self._names.take(name)] = self._kind.read(cursor)
        return found


class Record(Kind[_T]):
    """An object with certain fields, which becomes what ``make`` makes of them. ``others``: fields that need not be
    there. ``in_parts``: a large one is read field by field, each as its kind is."""

    def __init__(
        self,
        make: Callable[..., _T],
        fields: Mapping[str, Kind[Any]],
        others: Mapping[str, Kind[Any]] | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        self._make = make
        self._needed = tuple(fields)
        self._kinds = {**fields, **(others or {})}
        self._in_parts = in_parts

    def take(self, value: Any) -> _T:
        if not isinstance(value, dict):
            raise Refused(f"expected an object, not {shown(value)}")
        found = {}
        for name, item in value.items():
            kind = self._kind(name)
            try:
                found[name] = kind.take(item)
            except Refused as error:
                error.place = (name, *error.place)
                raise
        return self._made(found)

    def read(self, cursor: Cursor) -> _T:
        if not self._in_parts or (small := cursor.small()) is not None:
            return self.take(small if self._in_parts else cursor.piece())
        found = {}
        for name in cursor.members():
            with within(name):
                found[name] = self._kind(name).read(cursor)
        return self._made(found)

    def _kind(self, name: str) -> Kind[Any]:
        kind = self._kinds.get(name)
        if kind is None:
            raise Refused(f"a field {shown(name)} is none of {', '.join(self._kinds)}")
        return kind

    def _made(self, found: dict[str, Any]) -> _T:
        for name in self._needed:
            if name not in found:
                raise Refused("it is not there", name)
        return self._make(**found)


class _Any(Kind[Any]):
    def take(self, value: Any) -> Any:
        return value


ANY = _Any()
FLAG = _Flag()
TEXT = Text()
