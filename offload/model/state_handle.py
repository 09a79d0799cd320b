"""``optimizer.state[parameter]``: handles on optimizer states, stored in the engine as the parameter is.

As in torch a state that is replaced is another tensor: who looked at the one before keeps what it had. So two
parameters can exchange their states, and one that is popped can come back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.handle import Handle
from offload.model.handle_backing import Memory

_STEP = "step"
"""The number of steps is the engine's, too, though no tile has it."""


class _Look(Protocol):
    """What looks at states."""

    key: str | None
    """The state, or None for all of them."""

    def leave(self) -> None:
        """Keep what the states are now, whatever becomes of the engine's."""


class StatesInEngine:
    """The way to all states of one parameter, and those who look at them."""

    def __init__(
        self,
        name: str,
        names: Callable[[], Sequence[str]],
        read: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """``name`` is the parameter's, ``names`` gives the states that its optimizer needs. ``read`` gives copies of
        them, and the user's own entries as they are; ``write`` takes all over: none, as before the first step."""
        self.name, self.names, self.read, self.write = name, names, read, write
        self._looks: WeakValueDictionary[int, _Look] = WeakValueDictionary()

    def add(self, look: _Look) -> None:
        self._looks[id(look)] = look

    def leave(self, keys: Collection[str] | None = None, but: _Look | None = None) -> None:
        """These states, or all, will be replaced."""
        for look in list(self._looks.values()):
            if look is not but and (keys is None or look.key in keys):
                del self._looks[id(look)]
                look.leave()


class _StateBacking:
    """Backs the handle of one state of a parameter."""

    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, key: str, states: StatesInEngine) -> None:
        self.name = f"{key} of {states.name}"
        self.key: str | None = key
        self._states = states
        self._own: Memory | None = None
        """The value, once the state is another one."""
        states.add(self)

    def read(self) -> torch.Tensor:
        return self._own.read() if self._own is not None else self._states.read()[self._key].clone()

    def write(self, value: torch.Tensor) -> None:
        if self._own is not None:
            self._own.write(value)
            return
        states = self._states.read()
        if self._key not in (*self._states.names(), _STEP) and states[self._key].shape == value.shape:
            states[self._key].detach().copy_(value)  # a tensor of the user's, who may hold it
        else:
            self._states.write({**states, self._key: value})

    def with_address(self) -> None:
        """It has none."""

    def leave(self) -> None:
        self._own = Memory(self.read())

    @property
    def _key(self) -> str:
        assert self.key is not None
        return self.key


class StatesOfParameter(dict[str, Any]):
    """The states of one parameter by name. What is put into it, or changed in place, reaches the engine. A copy of it
    is a dict."""

    key: str | None = None

    def __init__(self, states: StatesInEngine) -> None:
        self._states: StatesInEngine | None = states
        """None once the parameter has others."""
        super().__init__(_as_handles(states, states.read()))
        states.add(self)

    def leave(self) -> None:
        self._states = None

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def update(self, *others: Any, **more: Any) -> None:
        new = dict(*others, **more)
        if self._states is None:
            super().update(new)
            return
        states = {**self._states.read(), **new}
        for key in new:
            super().pop(key, None)
        self._states.leave(new.keys())
        self._states.write(states)
        super().update(_as_handles(self._states, {key: states[key] for key in new}))

    def __ior__(self, other: Any) -> StatesOfParameter:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Make the states what they are before the parameter's first step."""
        super().clear()
        if self._states is not None:
            self._states.leave(but=self)
            self._states.add(self)
            self._states.write({})

    def pop(self, key: str, *default: Any) -> Any:
        """Take out an entry of the user's own. Raises ``ConfigError`` for a state that the optimizer needs."""
        if self._states is None:
            return super().pop(key, *default)
        if key in self and key in self._states.names():
            raise ConfigError(
                f"the state {key} of {self._states.name} cannot be taken out alone: its optimizer needs it. "
                "optimizer.state[parameter].clear() makes all states of the parameter anew"
            )
        if key not in self and default:
            return default[0]
        value = super().pop(key)
        self._states.leave([key])
        self._states.write({name: state for name, state in self._states.read().items() if name != key})
        return value

    def popitem(self) -> tuple[str, Any]:
        """As ``pop``, of the last entry."""
        key = next(reversed(self))
        return key, self.pop(key)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _as_handles(states: StatesInEngine, values: dict[str, Any]) -> dict[str, Any]:
    """Handles for tensors; other values are what they are."""
    return {key: _handle(states, key, v) if type(v) is torch.Tensor else v for key, v in values.items()}


def _handle(states: StatesInEngine, key: str, value: torch.Tensor) -> Handle:
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return Handle(_StateBacking(key, states), meta, value.device)
