"""The arguments that an operation of torch writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.errors import ConfigError
from offload.torch_internals import leaves_of

_COLLECTIVES = "c10d"
"""Namespace of ``torch.distributed``. Its schemas say nothing of writes, which come when the work is over."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that ``func`` writes to."""
    is_collective = func.namespace == _COLLECTIVES
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (is_collective and _is_output(_name(func), argument.name))
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def refuse_receiving(func: Any, name: str) -> None:
    """Raise ``ConfigError`` if ``func`` writes to ``name`` what one other rank sends: to wait for that here may have no
    end."""
    if func.namespace == _COLLECTIVES and _name(func).startswith("recv"):
        raise ConfigError(
            f"{name} has no memory that could be received into: receive into a tensor of your own, and copy it: "
            "parameter.data.copy_(tensor)"
        )


def wait_for_writes(func: Any, result: Any) -> None:
    """Return when ``func``, which gave ``result``, has written."""
    if func.namespace != _COLLECTIVES:
        return
    for leaf in leaves_of(result):
        if isinstance(leaf, torch.ScriptObject):
            torch.distributed.Work.unbox(leaf).wait()


def _name(func: Any) -> str:
    return str(func._schema.name.rpartition("::")[2])


def _is_output(func_name: str, name: str) -> bool:
    return name.startswith("output") or (name == "tensors" and func_name != "send")
