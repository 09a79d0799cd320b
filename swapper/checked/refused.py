"""The refusal of a value: which field, and what is wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_SAID = 500
"""Letters of what is wrong: what others say of a value can be as long as that."""

_SHOWN = 80
"""Of a value, a message shows so many letters."""


class Refused(ValueError):
    """A value that cannot be. The message names the field, from the outermost on."""

    def __init__(self, what: str, *place: str | int) -> None:
        super().__init__(what if len(what) <= _SAID else f"{what[:_SAID]}...")
        self.place = place

    def __str__(self) -> str:
        names = "".join(f"[{name}]" if isinstance(name, int) else f".{_line(name)}" for name in self.place)
        return ": ".join(part for part in (names.removeprefix("."), str(self.args[0])) if part)


@contextlib.contextmanager
def within(name: str | int) -> Iterator[None]:
    """Name the field ``name`` in refusals of the block."""
    try:
        yield
    except Refused as error:
        error.place = (name, *error.place)
        raise


@contextlib.contextmanager
def refusals(where: str, kind: Callable[[str], Exception]) -> Iterator[None]:
    """Turn what is refused within into the error of a format, which names the file: ``where``."""
    try:
        yield
    except (Refused, RecursionError) as error:
        said = "its values are too deep in one another" if isinstance(error, RecursionError) else error
        raise kind(f"{where} is damaged: {said}.") from None


def shown(value: object) -> str:
    """A value as a message shows it."""
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not -(1 << 128) < value < 1 << 128:
        return "a number beyond all bounds"
    return _line(repr(value[: 2 * _SHOWN] if isinstance(value, (str, bytes)) else value))


def _line(text: str) -> str:
    """The beginning of a text, in one line."""
    text = text[: 2 * _SHOWN]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
