"""A forward with casts of its own, in a model whose parameters the engine has converted: torch's error on dtypes says
why they do not fit any more."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from offload.model.installed_hooks import HookOfModel

_ON_DTYPES = re.compile("dtype|scalar type|input type", re.IGNORECASE)
"""All that torch's errors on operands of different dtypes have in common."""


def explain_dtypes(model: nn.Module, converted: Collection[torch.dtype], dtype: torch.dtype) -> Callable[[], None]:
    """Have errors on dtypes that a forward of ``model`` raises say that its parameters were ``converted`` to ``dtype``,
    if some were. Returns the call that undoes it."""
    if not converted:
        return lambda: None
    found = " and ".join(sorted(map(str, converted)))
    reason = (
        f"\nThe engine has converted the parameters that were {found} to {dtype}: see precision=. A forward that casts "
        "what it computes with to the dtype that a weight had (x.bfloat16(), x.float()) fails so: cast to the one that "
        "it has, x.to(self.weight.dtype). Buffers have kept theirs: a model that computes with them is converted as a "
        f"whole before the engine is made, model.to({dtype})."
    )
    return model.register_forward_hook(HookOfModel(_explain, reason), always_call=True).remove


def _explain(reason: str, module: nn.Module, args: Any, output: Any) -> None:
    if output is not None:  # and nothing is left for torch.compile to trace
        return
    error = sys.exc_info()[1]  # torch calls it within an error of forward
    if isinstance(error, RuntimeError) and _ON_DTYPES.search(str(error)) and reason not in str(error):
        error.args = (f"{error}{reason}", *error.args[1:])
