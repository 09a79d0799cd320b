"""``deepspeed.zero``: what scripts write round the making of a model and round looks into its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def Init(*_: Any, enabled: bool = True, **__: Any) -> Iterator[None]:
    """Within ``with``, modules are made on the meta device: they take no memory, and ``initialize`` gives them the
    weights that their initialisers make. Other arguments have no effect."""
    with torch.device("meta") if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def GatheredParameters(*_: Any, **__: Any) -> Iterator[None]:
    """Does nothing: any parameter can be read and written at any time."""
    yield
