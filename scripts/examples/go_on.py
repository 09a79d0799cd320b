"""Trains with every step committed: killed at any moment and started again, it goes on with the same bits."""

from _arguments import arguments, batches
from transformers import AutoModelForCausalLM

from offload import OffloadEngine

given = arguments(__doc__)
with OffloadEngine.from_pretrained(
    AutoModelForCausalLM,
    given.model,
    device=given.device,
    nvme_path=given.nvme_path,
    host_memory=given.host_memory,
    lr=given.lr,
    durable=1,
) as engine:
    engine.module.train()
    engine.load_checkpoint()  # the last step that was committed under nvme_path, if there is one
    for tokens in batches(given, engine.global_step):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_step}: loss {loss.item():.6f}", flush=True)
    engine.save_model(given.out)
print(f"the weights are in {given.out}")
