"""Short training runs, whose losses and weights are compared with others'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload import BudgetError, OffloadEngine

VOCAB = 200


def make_model(seed: int = 0, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCAB, 32), *layers, nn.Linear(32, VOCAB, bias=False))
    if tied:
        model[-1].weight = model[0].weight
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))


def backward(engine: OffloadEngine, step: int) -> float:
    tokens = batch(step)
    loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten())
    engine.backward(loss)
    return loss.item()


def train(engine: OffloadEngine, last: int, each=lambda: None) -> list[float]:
    losses = []
    while engine.global_step < last:
        losses.append(backward(engine, engine.global_step))
        engine.step()
        each()
    return losses


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().view(-1).float() for parameter in model.parameters()])


def least(path: Path, **options) -> int:
    with pytest.raises(BudgetError) as refused:
        OffloadEngine(make_model(), nvme_path=path, host_memory=1, **options)
    return refused.value.needed_bytes
