"""A script of DeepSpeed as it was, but for its import line."""

import json
from pathlib import Path

from _arguments import arguments, batches
from transformers import AutoModelForCausalLM

import offload.compat.deepspeed as deepspeed  # was: import deepspeed

given = arguments(__doc__)
nvme = {"device": "nvme", "nvme_path": str(given.nvme_path), "pin_memory": True}
Path("ds_config.json").write_text(
    json.dumps(
        {
            "train_micro_batch_size_per_gpu": given.batch,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": given.lr}},
            "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme},
            "offload_engine": {"host_memory": given.host_memory, "device": given.device},
        }
    )
)
model = AutoModelForCausalLM.from_pretrained(given.model)
model_engine, _, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
for tokens in batches(given):
    loss = model_engine(input_ids=tokens, labels=tokens).loss
    model_engine.backward(loss)
    model_engine.step()
    print(f"loss {loss.item():.3f}")
model_engine.save_checkpoint(str(given.out))
model_engine.destroy()
print(f"a checkpoint is in {given.out}: offload export {given.out} WEIGHTS makes safetensors of it")
