"""``optimizer.state``: states of parameters, stored in the engine, as a mapping that reads and writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torch import nn


class States(Protocol):
    """The states that are stored in the engine, by parameter as in ``torch.optim``."""

    def of_all(self) -> dict[nn.Parameter, dict[str, Any]]: ...

    def replace_all(self, states: dict[nn.Parameter, dict[str, Any]]) -> None: ...

    def parameters(self) -> list[nn.Parameter]: ...

    def of(self, parameter: nn.Parameter) -> dict[str, Any]: ...

    def replace(self, parameter: nn.Parameter, states: dict[str, Any]) -> None: ...

    def forget(self, parameter: nn.Parameter) -> None: ...


class StateView(MutableMapping[Any, Any]):
    """The states of each parameter that has taken a step, as handles; and ``entries`` of other keys, as they are."""

    def __init__(self, states: States, entries: Mapping[Any, Any] | None = None) -> None:
        self._states = states
        self.entries = dict(entries or {})

    def __getitem__(self, key: Any) -> Any:
        return self._states.of(key) if isinstance(key, nn.Parameter) else self.entries[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a ``defaultdict``, which makes nothing then."""
        if key in self:
            return self[key]
        return default

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, nn.Parameter):
            self.entries[key] = value
        elif value:
            self._states.replace(key, dict(value))
        else:
            self._states.forget(key)

    def __delitem__(self, key: Any) -> None:
        """Make the parameter's states what they are before its first step."""
        if isinstance(key, nn.Parameter):
            if key not in self:
                raise KeyError(key)
            self._states.forget(key)
        else:
            del self.entries[key]

    def clear(self) -> None:
        """Make all states what they are before the first step."""
        self.become({})

    def become(self, states: Mapping[Any, Any]) -> None:
        """Take over all of a mapping: ``optimizer.state = states``."""
        of_parameters = {key: dict(value) for key, value in states.items() if isinstance(key, nn.Parameter) and value}
        self.entries = {key: value for key, value in states.items() if not isinstance(key, nn.Parameter)}
        if of_parameters or self._states.parameters():
            self._states.replace_all(of_parameters)

    def __ior__(self, other: Any) -> StateView:
        self.update(other)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._states.parameters(), *self.entries])

    def __len__(self) -> int:
        return len(self._states.parameters()) + len(self.entries)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self))

    def __contains__(self, key: object) -> bool:
        return any(key is parameter for parameter in self)
