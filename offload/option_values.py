"""Values that a user gave for options, as the engine keeps them; or one line that names option, value and what is
expected."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from offload.errors import ConfigError

Bytes = int | Literal["auto"]

_SUFFIXES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SUFFIXES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_SPELLINGS = {
    "bf16": ("bfloat16", "bf16-mixed", "bf16-true"),
    "fp16": ("float16", "half", "16", "16-mixed", "16-true"),
    "fp32": ("float32", "float", "32", "32-true", "no", "float64", "double", "fp64", "64"),
    "int8": ("uint8", "8bit", "8"),
}
"""Names that others have for dtypes; where there is no fp64, fp32 comes nearest."""


def refuse(option: str, expected: str, value: object, near: str | None = None, advice: str = "") -> NoReturn:
    """Raise ``ConfigError``. ``near`` is what the user may have meant; ``advice`` goes on with the sentence."""
    hint = "" if near is None else f", did you mean {near}?"
    raise ConfigError(f"{option}: expected {expected}, got {shown(value)}{hint}{advice}")


def shown(value: object) -> str:
    """A value as a message shows it: one line, and not a long one."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return " ".join(short.repr(value).split())
    except Exception:  # its own __repr__, or an int with too many digits
        return f"a value of type {type(value).__name__}"


def parse_bytes(option: str, value: object, expected: str = 'bytes such as 1073741824, "12GiB" or "auto"') -> Bytes:
    """A number of bytes, from a number or a text such as ``"12GiB"``; ``"auto"`` stays. The error says what was
    ``expected``."""
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _SUFFIXES:
            refuse(option, expected, value)
        number: int | None = int(float(match[1]) * _SUFFIXES[match[2].upper()])
    else:
        number = _whole(value)
    if number is None:
        refuse(option, expected, value)
    if not 0 <= number < 2**63:
        refuse(option, "a number of bytes from 0 to 2^63", value)
    return number


def as_count(option: str, value: object, least: int = 1, most: float = math.inf) -> int:
    """An integer of Python or numpy, from ``least`` to ``most``."""
    number = _whole(value)
    if number is None or number < least:
        refuse(option, f"a whole number >= {least}", value)
    if number > most:
        refuse(option, f"a whole number from {least} to {most:,}", value)
    return number


def as_number(option: str, value: object) -> float:
    """A finite number of Python or numpy, at least 0."""
    number = as_real(value)
    if number is None or not 0 <= number < float("inf"):
        refuse(option, "a finite number >= 0", value)
    return number


def as_betas(option: str, value: object) -> tuple[float, ...]:
    """Two numbers, each from 0 to less than 1."""
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    numbers_ = [as_real(item) for item in value] if several else []  # type: ignore[attr-defined]
    betas = tuple(number for number in numbers_ if number is not None and 0 <= number < 1)
    if not len(betas) == len(numbers_) == 2:
        refuse(option, "two numbers from 0 to less than 1, such as (0.9, 0.999)", value)
    return betas


def as_options(option: str, value: object) -> dict[str, Any]:
    """Options of something else, by name."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        refuse(option, 'a dict of options by name, such as {"momentum": 0.9}', value)
    return dict(value)


def as_flag(option: str, value: object) -> bool:
    """True or False, and no text that looks like it."""
    if not isinstance(value, bool):
        refuse(option, "True or False", value)
    return value


def as_choice(option: str, value: object, allowed: Sequence[str]) -> str:
    """One of the names in ``allowed``. The error says which one may have been meant by a text, a dtype or its bits."""
    if isinstance(value, str) and value in allowed:
        return value
    import torch  # here: a command that only reads its options does not wait for it

    text = ""
    if isinstance(value, (str, int, type, torch.dtype)):
        text = value if isinstance(value, str) else getattr(value, "__name__", shown(value))
        text = text.lower().removeprefix("torch.")
        text = next((name for name, others in _SPELLINGS.items() if text in others), text)
    refuse_name(option, one_of(allowed), value, text, allowed)


def as_choices(option: str, value: object, allowed: Sequence[str]) -> str | dict[str, str]:
    """One of the names in ``allowed``, or a dict of some by pattern."""
    if not isinstance(value, Mapping):
        return as_choice(option, value, allowed)
    for pattern, name in value.items():
        if not isinstance(pattern, str):
            refuse(option, "patterns of unit names as keys", pattern)
        as_choice(f"{option}[{pattern!r}]", name, allowed)
    return dict(value)


def refuse_name(option: str, expected: str, value: object, name: str, known: Iterable[str]) -> NoReturn:
    """Raise ``ConfigError``, with what may have been meant by ``name`` among those that are known."""
    near = nearest(name, known)
    refuse(option, expected, value, None if near is None else repr(near))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that may have been meant, whatever its case."""
    folded = {other.lower(): other for other in known}
    return next((folded[near] for near in difflib.get_close_matches(name.lower(), folded, 1)), None)


def one_of(allowed: Sequence[str]) -> str:
    """The choices, in words."""
    return f"one of {', '.join(map(repr, allowed))}"


def as_names(option: str, value: object) -> tuple[str, ...]:
    """One name or several."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        refuse(option, "a name, or a list of some", value)
    return tuple(names)


def as_path(option: str, value: object) -> Path:
    """One path, as a text or path. Whether it is there is not asked here."""
    expected = "a path"
    if not isinstance(value, (str, os.PathLike)):
        refuse(option, expected, value)
    return as_paths(option, value, expected)[0]


def as_paths(option: str, value: object, expected: str = "a directory, or a list of some") -> tuple[Path, ...]:
    """One directory or several, as texts or paths. Whether they are there is not asked here."""
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    paths = []
    for item in value if several else [value]:  # type: ignore[attr-defined]
        text = os.fspath(item) if isinstance(item, (str, os.PathLike)) else None
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            refuse(option, expected, value)
        try:
            paths.append(Path(text).expanduser())
        except RuntimeError:
            raise ConfigError(f"{option}: the home at the start of {shown(text)} is not known") from None
    return tuple(paths)


def as_device(option: str, value: object) -> Any:
    """The CPU, a GPU, or a ``Device`` of one's own."""
    import torch

    if not isinstance(value, (str, torch.device)):
        if not isinstance(value, type) and hasattr(value, "torch_device") and hasattr(value, "allocate"):
            return value
    elif str(value) == "cpu" or str(value).startswith("cuda"):
        try:
            if str(torch.device(value)) == str(value):  # "cuda:300" gives cuda:44
                return value
        except RuntimeError:
            pass
    refuse(option, '"cpu" or "cuda" ("cuda:1" is the second GPU)', value, advice=missing_on(str(value).split(":")[0]))


def missing_on(kind: str) -> str:
    """What the engine lacks on a kind of device that torch has, in words; empty where nothing more is known."""
    lacking = _LACKING.get(kind)
    return "" if lacking is None else f". On {kind} {lacking}: a Device of one's own is an option (docs/device.md)"


_LACKING = {
    "xpu": "host memory cannot be registered where it lies, and nothing compiles the optimizer's kernels",
    "mps": "host and device share one memory, from which nothing need be moved",
}
"""By torch's name of a kind of device, what the engine would need there."""


def _whole(value: object) -> int | None:
    """The value of an integer of Python or numpy."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_real(value: object) -> float | None:
    """The value of a number of Python or numpy."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")
