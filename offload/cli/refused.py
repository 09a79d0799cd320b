"""A refusal of the parser, as the engine words its own: the option, what was expected, what was given."""

from __future__ import annotations

import difflib
import math
import re

from typer import BadParameter
from typer.exceptions import TyperException

_WORDS = (
    ("Value error, ", ""),
    ("Input should be greater than or equal to ", "expected at least "),
    ("Input should be less than or equal to ", "expected at most "),
    ("Input should be a valid integer", "expected a whole number"),
    ("Input should be a valid number", "expected a number"),
    ("Input should be ", "expected "),
)
"""The parser's words, and ours."""


def words_of(error: TyperException) -> str:
    """The parser's message in one line."""
    message = error.format_message()
    if not isinstance(error, BadParameter) or not error.message:
        return message[:1].lower() + message[1:]
    name = message.removesuffix(error.message).partition(" for ")[2].replace("'", "")
    return name + _expected(error)


def _expected(error: BadParameter) -> str:
    message, given = error.message, _given(error)
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    if " is not one of " in message:
        value, _, choices = message.rstrip(".").partition(" is not one of ")
        near = difflib.get_close_matches(value.strip("'"), re.findall("'([^']*)'", choices), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"expected one of {choices}, got {value}{hint}"
    if given is None or not message.startswith("expected "):
        return message
    return f"{message.partition(',')[0]}, got {given!r}"


def _given(error: BadParameter) -> object:
    """What was given, where the parser's own checks have found it; None elsewhere."""
    errors = getattr(error.__cause__, "errors", None)
    return errors()[0].get("input") if callable(errors) else None


def above_zero(value: float | None) -> float | None:
    """A callback of an option."""
    if value is not None and not 0 < value < math.inf:
        raise BadParameter(f"expected a finite number above 0, got {value}")
    return value


def not_negative(value: float) -> float:
    """A callback of an option."""
    if not 0 <= value < math.inf:
        raise BadParameter(f"expected a finite number >= 0, got {value}")
    return value
