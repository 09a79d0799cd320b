"""Trains a LoRA adapter over a frozen base that does not fit: only the adapter has gradients and states."""

import peft
import torch
from _arguments import arguments, batches
from transformers import AutoModelForCausalLM

from offload import LiveLine, OffloadEngine

given = arguments(__doc__, lr=1e-4)
base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)  # once in RAM: 2 bytes a parameter
base.gradient_checkpointing_enable()
base.enable_input_require_grads()
adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
model = peft.get_peft_model(base, adapter, autocast_adapter_dtype=False)

with OffloadEngine(
    model, device=given.device, nvme_path=given.nvme_path, host_memory=given.host_memory, lr=given.lr
) as engine:
    print(engine.plan)
    engine.add_observer(LiveLine(given.steps))
    for tokens in batches(given):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_model(given.out)  # the adapter alone
print(f"the adapter is in {given.out}")
