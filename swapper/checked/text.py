"""JSON, taken apart piece by piece, with a bound on the memory that its values take.

[Note: What text costs] ``[],`` is three bytes, and 72 as an object. So text whose fields are known is read record by
record (``Cursor``), each of which is small, and becomes what the field's kind makes of it at once. Text that may hold
anything is judged by its brackets, commas and quotes before it becomes values: ``cost_of``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from swapper.checked.refused import Refused, shown

SLACK_BYTES = 64 << 20
"""Memory that any text may take beside a multiple of its length."""

_PIECE_CHARS = (1 << 10, 1 << 14, 1 << 18)
"""Most letters of a record or a list of one, tried in this order."""

_COSTS = {b"{": 256, b"[": 104, b":": 72, b",": 44, b'"': 28}
"""Bytes that each of these takes at most: of the object that it begins, or its part of one (CPython 3.10 and later)."""

_SPACE = re.compile(r"[ \t\n\r]*")
_WIDE, _WIDER = re.compile(rb"[\xc4-\xff]"), re.compile(rb"[\xf0-\xff]")

Pairs = Callable[[list[tuple[str, Any]]], Any]
"""Makes a value of the members of an object."""


def cost_of(data: bytes | memoryview) -> int:
    """Bytes that the values of this text take, at most."""
    data = bytes(data)
    return len(data) + sum(data.count(sign) * cost for sign, cost in _COSTS.items())


def text_of(data: bytes) -> str:
    """The text, of UTF-8. Raises ``Refused`` for what is none, and if it takes too much memory as such."""
    width = 4 if _WIDER.search(data) else 2 if _WIDE.search(data) else 1
    if width * len(data) > 2 * len(data) + SLACK_BYTES:
        raise Refused(f"its {len(data):,} bytes of text would take {width * len(data):,}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"it is no text: {error.reason} at byte {error.start}") from None


def require_held(text: bytes, more_bytes: int = 0) -> None:
    """Raise ``Refused`` for text whose values, with ``more_bytes``, would take far more memory than its own bytes."""
    most = SLACK_BYTES + 6 * len(text)
    if cost_of(text) + more_bytes > most:
        raise Refused(f"its values would take more than {most:,} bytes")


class Cursor:
    """A place in JSON text, which moves on as values are taken. Raises ``Refused`` for text that is none."""

    def __init__(self, text: str, pairs: Pairs | None = None, list_in: str = "") -> None:
        """``pairs`` makes values of objects; without it they are ``dict``, and no name may be there twice. A list may
        also be the one member, of the name ``list_in``, of an object."""
        self.at = 0
        self._list_in = list_in
        self._text = text
        decoder: Any = json.JSONDecoder(object_pairs_hook=once if pairs is None else pairs)
        self._scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once

    def piece(self) -> Any:
        """The next value, which is a small one: a string, a number, or a record of a few fields."""
        if self._peek() not in ("[", "{"):
            return self.whole()
        value = self._within(_PIECE_CHARS)
        if value is not None:
            return value
        if len(self._text) - self.at <= _PIECE_CHARS[-1]:
            return self.whole()  # which says what is wrong
        raise Refused(f"it has more than {_PIECE_CHARS[-1]:,} letters, or is no value, from letter {self.at} on")

    def small(self) -> Any:
        """The next value, an object of a few letters; None if it has more."""
        self._peek()
        return self._within(_PIECE_CHARS[:-1])

    def whole(self) -> Any:
        """The next value, whatever it is: see ``cost_of``."""
        self._peek()
        try:
            value, self.at = self._scan(self._text, self.at)
        except StopIteration:
            raise Refused(f"there is no value at letter {self.at}") from None
        except RecursionError:
            raise Refused("its values are too deep in one another") from None
        except ValueError as error:
            if isinstance(error, Refused):
                raise
            raise Refused(str(error)) from None
        return value

    def members(self) -> Iterator[str]:
        """The names in the object that comes next. Its value is to be taken before the next name."""
        seen = set()
        for _ in self._between("{", "}"):
            if self._peek() != '"':
                raise Refused(f"expected a name at letter {self.at}")
            name: str = self.whole()
            if name in seen:
                raise Refused(f"a name is there twice: {shown(name)}")
            seen.add(name)
            self._skip(":")
            yield name

    def items(self) -> Iterator[int]:
        """The indices of the list that comes next. Its item is to be taken before the next index."""
        if self._list_in and self._peek() == "{":
            for name in self.members():
                if name != self._list_in:
                    raise Refused(f"expected a list at letter {self.at}")
                yield from self._between("[", "]")
            return
        yield from self._between("[", "]")

    def end(self) -> None:
        """Raise ``Refused`` unless the text ends here."""
        if self._peek():
            raise Refused(f"there is more behind it, from letter {self.at} on")

    def _between(self, first: str, last: str) -> Iterator[int]:
        self._skip(first)
        if self._peek() == last:
            self.at += 1
            return
        index = 0
        while True:
            yield index
            index += 1
            if self._peek() == last:
                self.at += 1
                return
            self._skip(",")

    def _peek(self) -> str:
        """The letter that comes next; empty at the end."""
        found = _SPACE.match(self._text, self.at)
        self.at = self.at if found is None else found.end()
        return self._text[self.at : self.at + 1]

    def _skip(self, sign: str) -> None:
        if self._peek() != sign:
            raise Refused(f"expected {sign} at letter {self.at}")
        self.at += 1

    def _within(self, sizes: Iterable[int]) -> Any:
        """The object or list that comes next, if it ends within so many letters; None if not."""
        for nchars in sizes:
            try:
                value, end = self._scan(self._text[self.at : self.at + nchars], 0)
            except Refused:
                raise
            except (ValueError, StopIteration, RecursionError):
                continue
            self.at += end
            return value
        return None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ``Refused`` for a name that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("a name is there twice")
    return found
