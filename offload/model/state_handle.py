"""``optimizer.state[parameter]``: handles on optimizer states, which rest in the engine like the parameter itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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

    def __init__(self, name: str, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
        """``name`` is the parameter's. ``read`` gives copies of all its states, ``write`` takes some of them over."""
        self._write = write
        super().__init__(
            {
                key: _handle(f"{key} of {name}", value, _reader(read, key), _writer(write, key))
                for key, value in read().items()
            }
        )

    def __setitem__(self, key: str, value: Any) -> None:
        self._write({key: value})


def _reader(read: Callable[[], dict[str, Any]], key: str) -> Callable[[], torch.Tensor]:
    return lambda: read()[key]


def _writer(write: Callable[[dict[str, Any]], None], key: str) -> Callable[[torch.Tensor], None]:
    return lambda value: write({key: value})


def _handle(name: str, value: Any, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]) -> Any:
    """A handle for a tensor; other values are what they are."""
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return Handle(_StateBacking(name, read, write), meta, value.device)
