"""Code that trains what ``offload plan`` has planned, to be pasted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offload.cli.plan_asked import Asked
from offload.config import OffloadConfig
from offload.predict import known
from offload.predict.prediction import Prediction
from offload.predict.variants import Lora

_QUANTISED = {"nf4": "to_nf4"}
"""Functions of ``torchao.quantization`` that make a base as it is named here, which the engine holds."""


def code(asked: Asked, prediction: Prediction) -> str | None:
    """Lines up to the engine; None for a model that is described by numbers alone, or for a base of which there is no
    class that the engine holds."""
    quantised = asked.base.bits > 0
    if asked.model is None or (quantised and asked.base.name not in _QUANTISED):
        return None
    return "\n".join(_lines(asked, known.hub_name(asked.model), _options(asked, prediction), quantised=quantised))


def _lines(asked: Asked, name: str, options: dict[str, Any], *, quantised: bool) -> Iterator[str]:
    said = ", ".join(f"{option}={value!r}" for option, value in options.items())
    of_factory, rows = ":" in name, asked.given["loss_rows"]
    in_tiles = ", cross_entropy_in_tiles" if rows else ""
    if not of_factory and not quantised:
        yield from ["import peft"] if asked.lora is not None else []
        yield "from transformers import AutoModelForCausalLM"
        yield f"from offload import OffloadEngine{in_tiles}"
        yield ""
        if asked.lora is not None:
            yield f"adapters = {_adapters(asked.lora)}"
            said = f"peft_config=adapters, {said}"
        yield f"engine = OffloadEngine.from_pretrained(AutoModelForCausalLM, {name!r}, {said})"
        yield "model = engine.module.train()"
        yield from _loss_lines(rows)
        return
    if of_factory:
        module, _, function = name.partition(":")
        yield f"from {module} import {function.partition('.')[0]}"
    if asked.lora is not None:
        yield "import peft"
    deferred = ", deferred_init" if of_factory and asked.lora is None else ""
    yield f"from offload import OffloadEngine{'' if of_factory else in_tiles}{deferred}"
    if not of_factory:
        yield "import torch"
        yield "from transformers import AutoModelForCausalLM"
    if quantised:
        yield f"from torchao.quantization import {_QUANTISED[asked.base.name]}"
    yield ""
    if of_factory and asked.lora is None:
        yield f"model = deferred_init({function})"
    elif of_factory:
        yield f"model = {function}()"
    else:
        yield f"model = AutoModelForCausalLM.from_pretrained({name!r}, dtype=torch.bfloat16)"
    if quantised:
        yield "for layer in model.get_decoder().layers:"
        yield "    for part in layer.modules():"
        yield "        if isinstance(part, torch.nn.Linear):"
        quantise = _QUANTISED[asked.base.name]
        yield f"            part.weight = torch.nn.Parameter({quantise}(part.weight.detach()), requires_grad=False)"
    if asked.lora is not None:
        yield f"adapters = {_adapters(asked.lora)}"
        yield "model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)"
    yield f"engine = OffloadEngine(model, {said})"
    if not of_factory:
        yield from _loss_lines(rows)


def _adapters(lora: Lora) -> str:
    targets = repr(list(lora.targets)) if lora.targets else '"all-linear"'
    return f"peft.LoraConfig(r={lora.rank}, target_modules={targets})"


def _loss_lines(rows: int | None) -> Iterator[str]:
    """The loss of a language model of ``transformers`` in tiles, if that was asked for."""
    if rows:
        yield ""
        yield "def loss_of(tokens):"
        yield "    hidden = model.get_decoder()(tokens[:, :-1]).last_hidden_state"
        yield f"    return cross_entropy_in_tiles(model.get_output_embeddings(), hidden, tokens[:, 1:], rows={rows})"


def _options(asked: Asked, prediction: Prediction) -> dict[str, Any]:
    """Options of the engine that differ from its defaults."""
    given, machine = asked.given, prediction.machine
    options: dict[str, Any] = {}
    if machine.device.computes:
        options["device"] = "cuda"
    if asked.host_bytes is not None:
        options["host_memory"] = given["host_memory"]
    elif asked.takes_least:
        options["host_memory"] = machine.host_bytes * given["gpus"]
    if asked.paths:
        options["nvme_path"] = [str(path) for path in asked.paths]
    elif asked.drives:
        options["nvme_path"] = [f"/mnt/nvme{number}" for number in range(len(asked.drives))]
    defaults = OffloadConfig()
    numbers = ("precision", "optimizer", "moments_dtype", "master_dtype")
    for name in (*numbers, "gradient_accumulation_steps", "activations", "shard", "exchange_dtype"):
        if given[name] != getattr(defaults, name):
            options[name] = given[name]
    if prediction.activations.memory:
        options["activation_memory"] = prediction.activations.memory
    if given["device_memory"] != "auto":
        options["device_memory"] = given["device_memory"]
    if given["gradient_clipping"]:
        options["gradient_clipping"] = given["gradient_clipping"]
    return options
