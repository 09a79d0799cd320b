"""Generates text by a model that does not fit: its weights are streamed, once a token for all sequences."""

from _arguments import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload import LiveLine, OffloadEngine

given = arguments(__doc__, length=64)
tokenizer = AutoTokenizer.from_pretrained(given.model)
prompt = tokenizer(given.text.read_text()[:200], return_tensors="pt").to(given.device)
with OffloadEngine.from_pretrained(
    AutoModelForCausalLM,
    given.model,
    optimizer=None,
    device=given.device,
    nvme_path=given.nvme_path,
    host_memory=given.host_memory,
) as engine:
    engine.add_observer(LiveLine(what="generation"))
    found = engine.module.generate(**prompt, max_new_tokens=given.length, do_sample=False)
    print(tokenizer.decode(found[0]))
    print(engine.report())
