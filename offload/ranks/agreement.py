"""Agreement of ranks: facts that must be the same on all of them, compared before anything stands on them.

Each rank states what its own program says: options, hyperparameters, what it is about to write. The number of a message
(``offload.ranks.collectives``) follows from its facts, so that equal ones cost no bytes; only where numbers differ do
the ranks tell each other the facts themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from offload.option_values import shown
from swapper.checksum import digest

Facts = Mapping[str, Any]
"""By name, numbers and texts. A mapping among them is of the things that have that name: ``{"lr": {"group 0": 0.1}}``
is "lr of group 0". On all ranks in the same order."""

NO_FACTS: Facts = MappingProxyType({})

_NUM_NAMED = 3
"""Differences that a message names."""


@dataclass(frozen=True)
class OfEach:
    """As a mapping among facts, where ranks have agreed on the ``names`` before: only the values are looked at."""

    names: Sequence[str]
    values: Sequence[Any]

    def __repr__(self) -> str:
        return repr(self.values)

    def items(self) -> Iterable[tuple[str, Any]]:
        return zip(self.names, self.values, strict=True)


@dataclass(frozen=True)
class Place:
    """A place of the program that all ranks come to, and what they must agree on there."""

    name: str
    facts: Callable[[], Facts] = dict


def told(facts: Facts) -> dict[str, str]:
    """Facts as ranks tell each other, and messages show them."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, (Mapping, OfEach)):
            found.update((f"{name} of {which}", _shown(one)) for which, one in value.items())
        else:
            found[name] = _shown(value)
    return found


def _shown(value: object) -> str:
    """One line; of a value that is too long for it, which value it is."""
    text, whole = shown(value), repr(value)
    return text if text == whole else f"{text} (#{zlib.crc32(whole.encode()):08x})"


def disagreement(of_ranks: Sequence[Mapping[str, str]], members: Sequence[int]) -> str:
    """Sentences on how these facts of ranks, which the program counts as ``members``, differ; empty if they do not."""
    names = dict.fromkeys(name for facts in of_ranks for name in facts)
    differing = [name for name in names if len({facts.get(name) for facts in of_ranks}) > 1]
    if not differing:
        return ""
    first = "; ".join(_difference(name, of_ranks, members) for name in differing[:_NUM_NAMED])
    more = f"; and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return f"the ranks differ in what must be the same on all of them: {first}{more}"


def _difference(name: str, of_ranks: Sequence[Mapping[str, str]], members: Sequence[int]) -> str:
    by_value: dict[str, list[int]] = {}
    for facts, member in zip(of_ranks, members, strict=True):
        by_value.setdefault(facts.get(name, "nothing"), []).append(member)
    values = (f"{value} on rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}" for value, ranks in by_value.items())
    return f"{name} is {', '.join(values)}"


def _listed(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def fact_of_all(values: Mapping[str, Any]) -> str:
    """The facts of several, by name: tensors, numbers, and what else a state dict has."""
    are_tensors = (torch.Tensor, bool, int, float)
    return ", ".join(
        f"{name} {fact_of(torch.as_tensor(value)) if isinstance(value, are_tensors) else shown(value)}"
        for name, value in sorted(values.items())
    )


def fact_of(value: torch.Tensor) -> str:
    """Shape, dtype and a checksum of a tensor's elements."""
    own = value.detach().cpu().contiguous()
    of_bytes = digest(own.data_ptr(), own.nbytes, 0) if own.nbytes else 0
    return f"{tuple(own.shape)} {str(own.dtype).removeprefix('torch.')} #{of_bytes:016x}"
