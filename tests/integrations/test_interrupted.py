"""Ctrl-C in the trainers of others: the last line of the program says what is kept."""

from __future__ import annotations

import signal
from pathlib import Path

import forked
import pytest

_LIGHTNING = """
import os, signal, sys, torch
import lightning.pytorch as package
from pathlib import Path
from lightning_modules import loader, module_over, trainer_over
from offload.integrations.lightning import OffloadStrategy

class CtrlC(package.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

root = Path(sys.argv[1])
trainer = trainer_over(package, root, OffloadStrategy(nvme_path=root), max_epochs=9, callbacks=[CtrlC()])
trainer.fit(module_over(package), loader(4))
"""

_TRANSFORMERS = """
import os, signal, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from offload.integrations.transformers import OffloadTrainer

class CtrlC(TrainerCallback):
    def on_step_end(self, arguments, state, control, **_):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 8))]
arguments = TrainingArguments(
    sys.argv[1] + "/run", per_device_train_batch_size=4, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True
)
trainer = OffloadTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[CtrlC()], offload={"nvme_path": sys.argv[1]}
)
"""


@pytest.mark.parametrize(
    ("library", "program", "status", "said"),
    [
        ("lightning", _LIGHTNING, 1, "none of its 3 steps is saved"),
        ("transformers", _TRANSFORMERS + "trainer.train()", -signal.SIGINT, "step 2 is in {path}/run/checkpoint-2/"),
        (
            "transformers",
            _TRANSFORMERS + "with trainer:\n    trainer.train()",
            -signal.SIGINT,
            "step 2 is in {path}/run/checkpoint-2/",
        ),
    ],
)
def test_the_last_line_of_a_trainer_says_what_is_kept(tmp_path: Path, library, program, status, said):
    pytest.importorskip(library)
    forked.import_ahead("lightning.pytorch", "transformers.trainer")
    ended = forked.run(program, tmp_path)
    assert ended.returncode == status, ended.stderr
    assert f"offload: interrupted after step 3: {said.format(path=tmp_path)}" in ended.stderr
    assert "Traceback" not in ended.stderr
