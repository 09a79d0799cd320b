"""``optimizer.state[parameter]``: handles on optimizer states, stored in the engine as the parameter is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.handle import Handle


class _StateBacking:
    """Backs the handle of one state of a parameter."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, name: str, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]) -> None:
        self.name = name
        self.read = read
        self.write = write


class StatesOfParameter(dict[str, Any]):
    """The states of one parameter by name. What is put into it, or changed in place, reaches the engine."""

    def __init__(
        self,
        name: str,
        of_optimizer: Sequence[str],
        read: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """``name`` is the parameter's, ``of_optimizer`` the states that its optimizer needs. ``read`` gives copies of
        all states, ``write`` takes all of them over: none, as before the first step."""
        self._name, self._of_optimizer, self._read, self._write = name, of_optimizer, read, write
        super().__init__(self._as_handles(read()))

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def update(self, *others: Any, **more: Any) -> None:
        states = {**self._read(), **dict(*others, **more)}
        self._write(states)
        super().update(self._as_handles({name: states[name] for name in dict(*others, **more)}))

    def __ior__(self, other: Any) -> StatesOfParameter:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Make the states what they are before the parameter's first step."""
        self._write({})
        super().clear()

    def pop(self, key: str, *default: Any) -> Any:
        """Take out an entry of the user's own. Raises ``ConfigError`` for a state that the optimizer needs."""
        if key in self and key in self._of_optimizer:
            raise ConfigError(
                f"the state {key} of {self._name} cannot be taken out alone: its optimizer needs it. "
                "optimizer.state[parameter].clear() makes all states of the parameter anew"
            )
        if key not in self and default:
            return default[0]
        value = self[key]
        value = value.value() if isinstance(value, Handle) else value
        self._write({name: state for name, state in self._read().items() if name != key})
        super().pop(key)
        return value

    def popitem(self) -> tuple[str, Any]:
        """As ``pop``, of the last entry."""
        key = next(reversed(self))
        return key, self.pop(key)

    def _as_handles(self, states: dict[str, Any]) -> dict[str, Any]:
        def write(key: str, value: torch.Tensor) -> None:
            self._write({**self._read(), key: value})

        return {
            key: _handle(f"{key} of {self._name}", value, _reader(self._read, key), partial(write, key))
            for key, value in states.items()
        }


def _reader(read: Callable[[], dict[str, Any]], key: str) -> Callable[[], torch.Tensor]:
    return lambda: read()[key]


def _handle(name: str, value: Any, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]) -> Any:
    """A handle for a tensor; other values are what they are."""
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return Handle(_StateBacking(name, read, write), meta, value.device)
