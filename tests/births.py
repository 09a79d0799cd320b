"""What the tests of models that are born without memory share."""

from __future__ import annotations

import pytest
import torch

from offload import OffloadEngine

EVERYWHERE = [
    pytest.param({"host_memory": "1GiB"}, id="RAM"),
    pytest.param({"host_memory": "5MiB"}, id="NVMe"),
]


def held(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    """All that the model has, buffers that are not saved included."""
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {**{name: value.clone() for name, value in engine.state_dict().items()}, **buffers}


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert [name for name in some if not torch.equal(some[name], others[name])] == []
    assert [name for name in some if some[name].dtype != others[name].dtype] == []
