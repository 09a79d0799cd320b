"""Trains a LoRA adapter on the attention of a mixture of experts, whose linear layers are stored in 4 bits (NF4)."""

import peft
import torch
from _arguments import arguments, batches
from torch import nn
from torchao.quantization import to_nf4
from transformers import AutoModelForCausalLM

from offload import LiveLine, OffloadEngine

given = arguments(__doc__, lr=1e-4)
base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
base.requires_grad_(False)
for module in base.model.modules():
    if isinstance(module, nn.Linear) and module.weight.numel() % 2**14 == 0:  # what NF4 can take
        module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)
adapter = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
model = peft.get_peft_model(base, adapter, autocast_adapter_dtype=False)

with OffloadEngine(
    model, device=given.device, nvme_path=given.nvme_path, host_memory=given.host_memory, lr=given.lr
) as engine:
    print(engine.plan)
    engine.add_observer(LiveLine(given.steps))
    for tokens in batches(given):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_model(given.out)
print(f"the adapter is in {given.out}")
