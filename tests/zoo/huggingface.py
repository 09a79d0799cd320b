"""How architectures of ``transformers`` become specimens: tiny, with random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.specimen import Batch, Specimen

Settings = dict[str, Any]


def build(head: str, kind: str, settings: Settings) -> nn.Module:
    """A model of architecture ``kind``. A ``head`` with ``Auto`` stands for the class that fits; others name it."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **settings)
    factory = getattr(transformers, head)
    model: nn.Module = factory.from_config(config) if head.startswith("Auto") else factory(config)
    return model


def specimens(
    family: str,
    head: str,
    draw: Callable[[torch.Generator], Batch],
    settings_of: dict[str, Settings],
    loss: Callable[[Any], Tensor] = lambda output: output.loss,
) -> list[Specimen]:
    """One specimen for each architecture in ``settings_of``."""
    return [
        Specimen(kind, family, partial(build, head, kind, settings), draw, loss)
        for kind, settings in settings_of.items()
    ]


def mean_square(output: Any) -> Tensor:
    """A loss for models that have none of their own: every output that depends on the weights takes part."""
    values = [value for value in output.values() if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([value.square().mean() for value in values]).sum()
