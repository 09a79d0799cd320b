#!/usr/bin/env python3
"""The ``Trainer`` of ``transformers`` on a GPU, with the engine under it and without: the same losses.

    python scripts/gpu_trainers.py [--device cuda]

A small Llama is trained by ``Trainer``, then by ``OffloadTrainer`` with all that the engine may have, with the least
device memory, and with the least of both memories and the rest on NVMe; then with clipping, accumulation and a
checkpoint from which another trainer goes on. Losses of training and evaluation must agree to a thousandth: torch's
optimizer and the engine's round differently. Prints a line for each, and a JSON object last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

from offload import BudgetError
from offload.integrations.transformers import OffloadTrainer

_VOCABULARY, _SEQUENCE, _STEPS = 4096, 128, 12
_TOLERANCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), use_cpu=options.device == "cpu")
        for name, settings in _SETTINGS.items():
            expected = runs.losses(None, settings)
            for where, offload in runs.budgets().items():
                started = time.monotonic()
                error = max(abs(a - b) / b for a, b in zip(runs.losses(offload, settings), expected, strict=True))
                found[f"{name}, {where}"] = error
                print(f"{name:<28}{where:<26}largest error {error:.1e}  {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps({"trainers": found}))
    return int(max(found.values()) > _TOLERANCE)


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {"max_grad_norm": 0.0},
    "clipped, two accumulated": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
    "from a checkpoint": {"save_steps": _STEPS // 2},
}


class Runs:
    """Trains the same model on the same rows, each time from the start."""

    def __init__(self, folder: Path, *, use_cpu: bool) -> None:
        self._folder = folder
        self._use_cpu = use_cpu
        tokens = torch.randint(_VOCABULARY, (64, _SEQUENCE), generator=torch.Generator().manual_seed(0))
        self._rows = [{"input_ids": row, "labels": row} for row in tokens]
        self._count = 0

    def budgets(self) -> dict[str, dict[str, Any]]:
        """The engine's options by what they leave it."""
        nvme = {"nvme_path": str(self._folder)}
        if self._use_cpu:
            return {"all in RAM": {}, "the least of RAM": {**nvme, "host_memory": self._least("host_memory", nvme)}}
        device = {"device_memory": self._least("device_memory", {})}
        both = {**nvme, **device}
        return {
            "all on the device": {},
            "the least there": device,
            "the least of both": {**both, "host_memory": self._least("host_memory", both)},
        }

    def losses(self, offload: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> list[float]:
        """Losses of each step, and of the evaluation at the end."""
        if "save_steps" not in settings:
            return self._train(self._trainer(offload, settings))
        folder = self._new_folder()
        self._train(self._trainer(offload, {**settings, "max_steps": _STEPS // 2, "output_dir": folder}))
        return self._train(self._trainer(offload, {**settings, "output_dir": folder}), resume_from_checkpoint=True)

    def _train(self, trainer: Trainer, **options: Any) -> list[float]:
        try:
            trainer.train(**options)
            last = trainer.evaluate()["eval_loss"]
            return [*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), last]
        finally:
            if isinstance(trainer, OffloadTrainer):
                trainer.close()

    def _trainer(self, offload: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Trainer:
        set_seed(0)
        config = LlamaConfig(
            hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, vocab_size=_VOCABULARY
        )
        arguments = {
            **{"output_dir": self._new_folder(), "per_device_train_batch_size": 4, "max_steps": _STEPS},
            **{"learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1000, "seed": 0},
            **{"use_cpu": self._use_cpu, "report_to": [], "disable_tqdm": True},
        }
        args = TrainingArguments(**{**arguments, **settings})
        data: dict[str, Any] = {"train_dataset": self._rows, "eval_dataset": self._rows[:8]}
        model = LlamaForCausalLM(config)
        if offload is None:
            trainer = Trainer(model, args, **data)
        else:
            trainer = OffloadTrainer(model, args, **data, offload=dict(offload))
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _least(self, budget: str, options: Mapping[str, Any]) -> int:
        try:
            self._trainer({**options, budget: 1}, {})
        except BudgetError as refused:
            return refused.needed_bytes
        raise RuntimeError(f"{budget}=1 was enough")

    def _new_folder(self) -> str:
        self._count += 1
        return str(self._folder / str(self._count))


if __name__ == "__main__":
    sys.exit(main())
