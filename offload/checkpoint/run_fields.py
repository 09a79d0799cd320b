"""Fields of a run's state as a checkpoint has it: see ``RunState.get``, and what belongs to the user's objects."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from offload.checkpoint.hugging_face import CONFIG, GENERATION_CONFIG
from offload.dtypes import BY_PRECISION
from offload.encoding import Dtype
from swapper.checked import (
    ANY,
    FLAG,
    TEXT,
    Int,
    Kind,
    ListOf,
    MapOf,
    OneOf,
    Optional,
    Real,
    Record,
    Refused,
    Text,
    Tuple,
    within,
)


class _Tensor(Kind[torch.Tensor]):
    def take(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise Refused(f"expected a tensor, not a {type(value).__name__}")
        return value


class _Scalar(Kind[Any]):
    """A number, or a tensor of one."""

    def take(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _NUMBER.take(value)
        if value.numel() != 1 or value.is_complex():
            raise Refused(f"expected one number, not a tensor of shape {tuple(value.shape)}")
        _NUMBER.take(value.item() if value.dtype != torch.bool else None)
        return value


class _With(Kind[dict[str, Any]]):
    """An object with any members, some of which are of certain kinds where they are there."""

    def __init__(self, kinds: dict[str, Kind[Any]], others: Kind[Any] = ANY) -> None:
        self._kinds, self._all = kinds, MapOf(others)

    def take(self, value: Any) -> dict[str, Any]:
        found = self._all.take(value)
        for name, kind in self._kinds.items():
            if name in found:
                with within(name):
                    found[name] = kind.take(found[name])
        return found


class _Plain(Kind[Any]):
    """A value that JSON has words for."""

    def take(self, value: Any) -> Any:
        if isinstance(value, (list, dict)):
            return _PLAIN_LIST.take(value) if isinstance(value, list) else _PLAIN_MAP.take(value)
        if value is not None and type(value) not in (bool, int, float, str):
            raise Refused(f"expected what JSON has words for, not a {type(value).__name__}")
        return value


class _RandomStates(Kind[dict[str, Any]]):
    """States of random generators: those that generators of the same kinds take."""

    def take(self, value: Any) -> dict[str, Any]:
        states = _RANDOM.take(value)
        for name, take in _GENERATORS.items():
            try:
                take(states[name])
            except Exception as error:  # whatever a generator says of what is no state
                raise Refused(f"no generator takes it: {error}", name) from None
        return states


def _python_takes(state: Any) -> None:
    random.Random().setstate(state)
    Optional(Real()).take(state[2])


_GENERATORS: dict[str, Callable[[Any], object]] = {
    "python": _python_takes,
    "numpy": lambda state: np.random.RandomState().set_state(state),
    "torch": lambda state: torch.Generator().set_state(state),
}

_NUMBER, _PLAIN = Real(finite=True), _Plain()
_PLAIN_LIST, _PLAIN_MAP = ListOf(_PLAIN, make=list), MapOf(_PLAIN)
_RANDOM: Kind[dict[str, Any]] = Record(dict, {"python": ANY, "numpy": ANY, "torch": _Tensor()}, {"device": _Tensor()})
_COUNT = Int(0, 1 << 53)
_GRADIENT_DTYPE = Dtype({str(dtype).removeprefix("torch."): dtype for dtype in BY_PRECISION.values()})
_CONFIGS = MapOf(
    _With({"architectures": Optional(ListOf(TEXT, make=list))}, _PLAIN),
    OneOf({name: name for name in (CONFIG, GENERATION_CONFIG)}),
)
"""By the names of the files that they become: there are no others."""

_SHARED: Kind[dict[str, Any]] = Record(
    dict,
    {
        "attributes": MapOf(ANY),
        "entries": MapOf(ANY),
        "representatives": ListOf(MapOf(ANY)),
        "absent": MapOf(ListOf(TEXT)),
    },
)

RUN: Kind[dict[str, Any]] = Record(
    dict,
    {
        "step": _COUNT,
        "num_backwards": _COUNT,
        "has_other_gradients": FLAG,
        "loss_scale": Optional(Tuple(Real(finite=True, above=0.0), _COUNT)),
        "gradient_dtype": _GRADIENT_DTYPE,
        "groups": ListOf(Record(dict, {"options": _With({"lr": _Scalar()}), "parameters": ListOf(TEXT, make=list)})),
        "states": MapOf(_With({"steps": _COUNT, "step": _Scalar()})),
        "gradients": MapOf(Tuple(Real(), Real(), Real(), optional=1)),
        "random": Optional(_RandomStates()),
        "objects": ListOf(ANY),
        "client_state": ANY,
    },
    {
        "accumulation_steps": _COUNT,
        "identity": Text(64),
        "moment": Text(64),
        "missed": ListOf(_COUNT, make=list),
        "shared": _SHARED,
        "buffers": MapOf(_Tensor()),
        "extra": MapOf(ANY),
        "configs": _CONFIGS,
        "folder": TEXT,
    },
)
