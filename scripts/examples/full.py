"""Trains all weights of a model that was never whole in memory, and writes them for others."""

from _arguments import arguments, batches
from transformers import AutoModelForCausalLM

from offload import LiveLine, OffloadEngine

given = arguments(__doc__)
with OffloadEngine.from_pretrained(
    AutoModelForCausalLM,
    given.model,
    precision="bf16",  # fp32 masters: 14 bytes a parameter
    device=given.device,
    nvme_path=given.nvme_path,
    host_memory=given.host_memory,
    lr=given.lr,
    gradient_clipping=1.0,
    run_dir=given.out / "run",  # offload report OUT/run
) as engine:
    print(engine.plan)
    engine.module.train()
    engine.module.gradient_checkpointing_enable()
    engine.add_observer(LiveLine(given.steps))
    for tokens in batches(given):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_model(given.out / "weights")
print(f"the weights are in {given.out / 'weights'}; offload report {given.out / 'run'} draws the run")
