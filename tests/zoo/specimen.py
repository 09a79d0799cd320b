"""What the zoo knows of a model: how to build it, what to feed it, what its loss is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Specimen:
    """One architecture. ``build`` draws the weights from torch's global generator; ``draw`` makes one batch from the
    generator that it is given; ``loss`` is applied to what the model returns for the batch."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], Tensor] = lambda output: output.loss


def tokens(generator: torch.Generator, vocab: int, batch: int = 2, length: int = 12) -> Tensor:
    """Token numbers from 3 up: the first ones are often padding or marks, which some models treat differently."""
    return torch.randint(3, vocab, (batch, length), generator=generator)
