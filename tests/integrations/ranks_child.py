"""One of two ranks that torchrun starts: trains in each library beside what the library does by itself, and goes on
from a checkpoint in the middle. Writes what it saw to ``rank-N.json`` in the folder that is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate_script import Script, same_bits
from lightning import pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader

from offload.compat import deepspeed
from offload.integrations.accelerate import OffloadAccelerator
from offload.integrations.lightning import OffloadStrategy

FOLDER = Path(sys.argv[1])
OPTIONS = {"nvme_path": str(FOLDER), "host_memory": "16MiB"}


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def with_accelerate() -> dict[str, Any]:
    def script(kind: Any, **options: Any) -> Script:
        return Script(kind(cpu=True, gradient_accumulation_steps=2, **options), 12)

    def all_of(one: Script) -> list[float]:
        torch.manual_seed(1)
        one.train(0, 3)
        if isinstance(one.accelerator, OffloadAccelerator):
            one.accelerator.save_state(FOLDER / "accelerate")
        one.train(3)
        return one.losses

    plain, own, resumed = script(Accelerator), *(script(OffloadAccelerator, offload=OPTIONS) for _ in range(2))
    losses, plain_losses = all_of(own), all_of(plain)
    resumed.accelerator.load_state(FOLDER / "accelerate")
    resumed.train(3)
    found = {
        "losses": losses,
        "plain": plain_losses,
        "resumed": resumed.losses == losses[3:] and same_bits(own.model, resumed.model),
        "processes": [own.accelerator.process_index, own.accelerator.num_processes],
        "wrapped": own.model is not own.accelerator.unwrap_model(own.model),
    }
    for one in (resumed, own):
        one.accelerator.free_memory()
    return found


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(dropout=0.2)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def with_lightning() -> dict[str, Any]:
    data = list(zip(*rows(), strict=True))
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False,
               "enable_model_summary": False, "gradient_clip_val": 1.0}  # fmt: skip

    def fit(strategy: Any, folder: str, epochs: int = 3, **more: Any) -> tuple[Regression, Any]:
        module = Regression()
        torch.manual_seed(2)
        saving = lightning.callbacks.ModelCheckpoint(FOLDER / folder, save_last=True, monitor="error")
        trainer = lightning.Trainer(strategy=strategy, max_epochs=epochs, callbacks=[saving], **options)
        loaders = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data[:24], batch_size=4)
        trainer.fit(module, *loaders, **more)
        return module, trainer

    plain, ddp = fit("ddp", "ddp")
    own, trainer = fit(OffloadStrategy(**OPTIONS), "whole")
    _, half = fit(OffloadStrategy(**OPTIONS), "half", 2)
    half.strategy.close()
    resumed, other = fit(OffloadStrategy(**OPTIONS), "half", ckpt_path=FOLDER / "half" / "last.ckpt")
    found = {
        "losses": own.losses,
        "plain": plain.losses,
        "resumed": resumed.losses == own.losses[8:] and same_bits(own, resumed),
        "processes": [trainer.global_rank, trainer.world_size],
        "errors": [one.callback_metrics["error"].item() for one in (trainer, ddp)],
    }
    for one in (other, trainer):
        one.strategy.close()
    return found


def with_deepspeed() -> dict[str, Any]:
    x, y = rows()

    def engine() -> deepspeed.DeepSpeedEngine:
        config = {
            "train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3}, "offload_engine": OPTIONS,
        }  # fmt: skip
        made, _, loader, _ = deepspeed.initialize(
            model=net(), config=config, training_data=list(zip(x, y, strict=True))
        )
        assert made.train_micro_batch_size_per_gpu() == 4 and len(loader) == 8
        return made

    def train(one: deepspeed.DeepSpeedEngine, first: int, last: int) -> None:
        for index in range(first, last):  # micro-batches of 4 of each rank: the next 8 rows
            begin = 8 * index + 4 * one.global_rank
            loss = nn.functional.mse_loss(one(x[begin : begin + 4]), y[begin : begin + 4])
            one.backward(loss)
            one.step()

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for begin in range(0, 64, 16):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x[begin : begin + 16]), y[begin : begin + 16]).backward()
        optimizer.step()
    own, resumed = engine(), engine()
    train(own, 0, 5)
    own.save_checkpoint(FOLDER / "deepspeed")
    train(own, 5, 8)
    resumed.load_checkpoint(FOLDER / "deepspeed")
    train(resumed, 5, 8)
    own.save_16bit_model(FOLDER)
    found = {
        "losses": [parameter.detach().clone().sum().item() for parameter in own.module.parameters()],
        "plain": [parameter.sum().item() for parameter in plain.parameters()],
        "resumed": same_bits(own.module, resumed.module),
        "processes": [own.global_rank, own.world_size],
        "shard": own.engine.config.shard,
    }
    for one in (resumed, own):
        one.destroy()
    return found


all_found = {"accelerate": with_accelerate(), "lightning": with_lightning(), "deepspeed": with_deepspeed()}
rank = torch.distributed.get_rank()
(FOLDER / f"rank-{rank}.json").write_text(json.dumps(all_found))
