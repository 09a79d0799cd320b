"""Clipping by the global norm, where a library gives a list of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.engine import OffloadEngine


def clip_all(engine: OffloadEngine, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """``engine.clip_grad_norm_``, if these are all parameters that the engine trains, and the norm before. None if they
    are not: nothing has happened then.

    ``torch.nn.utils.clip_grad_norm_`` rounds the norms of 16-bit gradients to 16 bits, the engine does not.
    """
    given = {id(parameter) for parameter in parameters}
    of_model = list(engine.module.parameters())
    trained = {id(parameter) for parameter in of_model if parameter.requires_grad}
    if not trained <= given <= {id(parameter) for parameter in of_model}:
        return None
    return engine.clip_grad_norm_(max_norm)
