"""A small model with adapters over a frozen base, its weights in shards, and steps of its training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from offload import OffloadEngine
from offload.torch_internals import can_swap_memory

WIDTH = 256
FROZEN_BYTES = 8 * 2 * (WIDTH * WIDTH + WIDTH)
LEAST = "800KiB" if can_swap_memory() else "900KiB"  # with copies of the weights in use
"""A budget in which every unit's weights pass through slots."""


class Adapted(nn.Module):
    """A block: a frozen layer, and a small one beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def build(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(8)), nn.Linear(WIDTH, 10)).to(dtype)


def unborn(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return build(dtype)


def in_shards(values: dict[str, torch.Tensor], directory: Path, count: int = 3) -> Path:
    """The values in several files with an index. Names in the headers have odd lengths, so that tensors begin at odd
    bytes."""
    directory.mkdir(exist_ok=True)
    weight_map = {name: f"part-{index % count}.safetensors" for index, name in enumerate(values)}
    for file in sorted(set(weight_map.values())):
        of_file = {name: values[name].clone().contiguous() for name in values if weight_map[name] == file}
        save_file(of_file, directory / file, metadata={"odd": "x" * len(file)})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def steps(engine: OffloadEngine, numbers: Iterable[int]) -> list[float]:
    """The losses of steps with these numbers, which have batches of their own."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, WIDTH, generator=generator).to(engine.config.dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.synchronize()
    return losses


def held(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.state_dict().items()}


def in_place(base: Path, nvme: Path, **options: Any) -> OffloadEngine:
    """An engine over the model in these files, with most of it on NVMe."""
    options = {"host_memory": LEAST, "precision": "bf16", "lr": 1e-2, **options}
    return OffloadEngine(unborn(), weights=base, nvme_path=nvme, **options)
