"""A small module of Lightning, over either package, and a trainer that prints nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import Tiny, batches, loss_of
from torch import nn
from torch.utils.data import DataLoader

VOCAB, NUM_BLOCKS = 64, 8


def module_over(package: Any, **attributes: Any) -> Any:
    """A ``LightningModule`` of ``package``: a model of a few blocks with dropout, AdamW, and a falling learning rate.
    ``attributes`` take the place of its own. ``module.losses`` are those of its training."""

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Tiny(width=32, num_blocks=NUM_BLOCKS, vocab=VOCAB)
            self.dropout = nn.Dropout(0.2)
            self.losses: list[float] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(tokens)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.dropout(self.net(batch[0])), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", loss_of(self.net(batch[0]), batch[1]))

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).argmax(-1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    for name, value in attributes.items():
        setattr(Module, name, value)
    return Module()


def loader(count: int = 8, seed: int = 1) -> DataLoader:
    return DataLoader(batches(count, VOCAB, seed), batch_size=None)


def trainer_over(package: Any, root: Path, strategy: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        **options,
    }
    return package.Trainer(strategy=strategy, **given)


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    first, second = bits(one), bits(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Resumable:
    """Batches in an order that is drawn when an epoch begins, and that can be gone on with in the middle of it. To make
    an iterator draws a random number, as it does of a ``DataLoader``."""

    def __init__(self, count: int = 8) -> None:
        self.batches = batches(count, VOCAB)
        self.order: list[int] = []
        self.position = 0
        self.resumes = False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        torch.empty((), dtype=torch.int64).random_()
        if not self.resumes:
            self.order, self.position = torch.randperm(len(self)).tolist(), 0
        self.resumes = False
        return self._rest()

    def _rest(self) -> Any:
        while self.position < len(self):
            self.position += 1
            yield self.batches[self.order[self.position - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]
        self.resumes = self.position < len(self)
