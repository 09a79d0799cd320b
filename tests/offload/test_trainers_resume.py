"""What trainers save by themselves continues with the same bits: the Trainer of transformers, and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload import BudgetError, OffloadEngine

pytest.importorskip("accelerate")


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().float().view(-1) for parameter in model.parameters()])


def least(model: nn.Module, path: Path) -> int:
    with pytest.raises(BudgetError) as refused:
        OffloadEngine(model, nvme_path=path, host_memory=1)
    return refused.value.needed_bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoint_of_the_trainer_of_transformers(tmp_path: Path, dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (24, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def train(resume: Path | None, **options):
        transformers.set_seed(1)
        model = transformers.LlamaForCausalLM(config).to(dtype)
        with OffloadEngine(model, lr=1e-2, **options) as engine:
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
            arguments = transformers.TrainingArguments(
                str(tmp_path / "run"), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, save_steps=5,
                report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.5, seed=3,
            )  # fmt: skip
            trainer = transformers.Trainer(
                model=model, args=arguments, train_dataset=data, optimizers=(engine.optimizer, schedule)
            )
            trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            return losses, weights(model), engine.global_step

    losses, final, steps = train(None)
    small = least(transformers.LlamaForCausalLM(config).to(dtype), tmp_path)
    resumed, result, reached = train(tmp_path / "run" / "checkpoint-5", nvme_path=tmp_path, host_memory=small)
    assert resumed[-len(losses[5:]) :] == losses[5:]
    assert result.equal(final)
    assert (steps, reached) == (12, 12)


def test_a_state_that_accelerate_has_saved(tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(5)]
        return nn.Sequential(*blocks).to(torch.bfloat16)

    def train(last: int, save_at: int | None = None, load: bool = False, **options):
        accelerate.utils.set_seed(0)
        accelerator, model = accelerate.Accelerator(cpu=True), make()
        with OffloadEngine(model, lr=1e-2, **options) as engine:
            schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
            prepared, optimizer, schedule = accelerator.prepare(model, engine.optimizer, schedule)
            if load:
                accelerator.load_state(str(tmp_path / "saved"))
            losses = []
            while engine.global_step < last:
                batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(engine.global_step)).bfloat16()
                loss = prepared(batch).float().square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if engine.global_step == save_at:
                    accelerator.save_state(str(tmp_path / "saved"))
            return losses, weights(model)

    losses, final = train(6, save_at=3)
    resumed, result = train(6, load=True, nvme_path=tmp_path, host_memory=least(make(), tmp_path))
    assert (resumed, result.equal(final)) == (losses[3:], True)
