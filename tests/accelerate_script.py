"""A script as users of Accelerate write it: what it prepares, and some steps of it."""

from __future__ import annotations

from typing import Any

import torch
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.utils.data import DataLoader

VOCAB, NUM_BLOCKS = 64, 8


class Noisy(nn.Module):
    """The small model, with dropout on its logits."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.net = Tiny(**{"width": 32, "num_blocks": NUM_BLOCKS, "vocab": VOCAB, **sizes})
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.net(tokens))


class Script:
    """``accelerator`` is the one line that differs. ``losses`` are those of ``train``."""

    def __init__(self, accelerator: Any, count: int = 8, build: Any = Noisy) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
        loader = DataLoader([{"x": x[0], "y": y[0]} for x, y in batches(count, VOCAB)], batch_size=1)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        torch.manual_seed(1)

    def train(self, first: int = 0, last: int | None = None, max_norm: float | None = 0.5) -> None:
        """Batches ``[first, last)`` of an epoch."""
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for index, batch in enumerate(loader, first):
            if index == last:
                return
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model(batch["x"]), batch["y"])
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                if max_norm is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    values = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in (one, other)]
    return values[0].keys() == values[1].keys() and all(torch.equal(values[0][n], values[1][n]) for n in values[0])
