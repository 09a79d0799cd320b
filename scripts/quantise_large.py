#!/usr/bin/env python3
"""Post-training quantisation of a made-up Llama that does not fit, block by block, and the figures of
docs/recipes/compress.md.

``--folder`` gets the model in bf16 (``bf16/``), the quantised one (``int8/``) and ``progress.pt``. Each call goes on
where the last one ended, and ends after about ``--seconds``; it says what is left. The last one loads the files with
``transformers`` and compares its logits with those that the streamed model gave. GPTQ is that of the page, whose code
runs. ``--limit`` is a memory cgroup around the process while it quantises, imports and page cache included, and needs
root. The first block is calibrated and changed in memory alone, too, once in each call: that is what a block takes of
the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _cgroups import memory_limit
from safetensors.torch import load_file, save_file
from torch import nn

from offload import OffloadEngine

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "compress.md"
TOKENS, BATCHES = 256, 4


def config_of(layers: int) -> Any:
    """About 44 million parameters a layer, and 131 million besides."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
    )


def names_of_page() -> dict[str, Any]:
    """What the first block of the page defines; its own small models run in a folder that goes."""
    names: dict[str, Any] = {}
    block = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(block, names)
        os.chdir(here)
    return names


class Progress:
    """Figures of all calls so far and what the next block is called with, kept in one file."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.found: dict[str, Any] = {
            **{"made": 0, "blocks": 0, "where": {}, "seconds": {}, "read_bytes": 0, "peak": 0, "in memory": 0},
            "states": None,
        }
        if path.exists():
            self.found = torch.load(path)

    def add(self, what: str, seconds: float) -> None:
        self.found["seconds"][what] = self.found["seconds"].get(what, 0.0) + seconds

    def write(self) -> None:
        status = Path("/proc/self/status").read_text()
        peak = int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) << 10
        self.found["peak"] = max(self.found["peak"], peak)
        read = int(re.findall(r"^read_bytes:\s*(\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[0])
        self.found["read_bytes"] += read - self._read
        self._read = read
        self.save()

    def save(self) -> None:
        """Write the file."""
        torch.save(self.found, self._path.with_suffix(".new"))
        self._path.with_suffix(".new").replace(self._path)


def make(folder: Path, config: Any, progress: Progress, until: float) -> bool:
    """Write the model in bf16, a file for each block and one for the rest; True once all of it is there."""
    from transformers import LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files.setdefault(f"model-{int(layer[1]) if layer else config.num_hidden_layers:05}.safetensors", []).append(
            name
        )
    for number, (file, names) in enumerate(sorted(files.items())):
        if number < progress.found["made"]:
            continue
        if time.monotonic() > until:
            return False
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name in names:
            value = torch.empty(shapes[name], dtype=torch.bfloat16)
            tensors[name] = value.fill_(1.0) if "norm" in name else value.normal_(0.0, 0.02, generator=generator)
        save_file(tensors, folder / file, {"format": "pt"})
        progress.found["made"] = number + 1
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return True


def in_memory(page: dict[str, Any], folder: Path, model: nn.Module, states: Any) -> float:
    """Seconds that the first block takes without an engine."""
    prefix = "model.layers.0."
    block = type(model.model.layers[0])(model.config, 0).bfloat16()  # type: ignore[operator, union-attr, index]
    weights = load_file(folder / "bf16" / "model-00000.safetensors")
    block.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    found: dict[str, Any] = {}

    def change(name: str, weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        codes, scale = page["gptq"](weight, moments)
        found[name] = page["Int8Tensor"](codes, scale.bfloat16(), [1, weight.shape[1]], torch.bfloat16)
        return found[name].dequantize()

    start = time.monotonic()
    page["through"](block, prefix, states, change)
    return time.monotonic() - start


@torch.no_grad()
def quantise(folder: Path, host_memory: str, progress: Progress, until: float) -> bool:
    """Quantise block after block, and what is outside of them after the last one; True once all of it is there."""
    from transformers import AutoModelForCausalLM

    page = names_of_page()
    out = folder / "int8"
    out.mkdir(exist_ok=True)
    start = time.monotonic()
    with OffloadEngine.from_pretrained(
        AutoModelForCausalLM, folder / "bf16", optimizer=None, nvme_path=folder, host_memory=host_memory
    ) as engine:
        progress.add("start", time.monotonic() - start)
        model: nn.Module = engine.module
        names = [name for name, _ in model.named_parameters()]
        found: dict[str, Any] = {}

        def change(name: str, weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
            start = time.monotonic()
            codes, scale = page["gptq"](weight, moments)
            found[name] = page["Int8Tensor"](codes, scale.bfloat16(), [1, weight.shape[1]], torch.bfloat16)
            progress.add("gptq", time.monotonic() - start)
            return found[name].dequantize()

        def save(file: str) -> None:
            start = time.monotonic()
            progress.found["where"].update(page["save"](out, file, found, names))
            progress.add("write", time.monotonic() - start)
            found.clear()

        generator = torch.Generator().manual_seed(0)
        calibration = [torch.randint(0, 32000, (1, TOKENS), generator=generator) for _ in range(BATCHES)]
        states = page["inputs_of_blocks"](model, calibration)
        if progress.found["states"] is not None:
            states = [(x, kwargs) for x, (_, kwargs) in zip(progress.found["states"], states, strict=True)]
        layers = list(model.model.layers)  # type: ignore[union-attr, arg-type]
        if progress.found["blocks"] < len(layers):
            progress.add("in memory", in_memory(page, folder, model, states))
            progress.found["in memory"] += 1
        for number in range(progress.found["blocks"], len(layers)):
            if time.monotonic() > until:
                engine.close(discard=True)  # what it has changed is in the files
                return False
            start, prefix = time.monotonic(), f"model.layers.{number}."
            with page["put_back"](layers[number], engine.resident):
                states = page["through"](layers[number], prefix, states, change)
                for name, value in layers[number].named_parameters(prefix.rstrip(".")):
                    if name not in found:
                        found[name] = value.detach().clone().as_subclass(torch.Tensor)
            save(f"model-{number:05}.safetensors")
            progress.add("all", time.monotonic() - start)
            progress.found["blocks"], progress.found["states"] = number + 1, [x for x, _ in states]
            progress.write()
            print(f"block {number}: {time.monotonic() - start:.1f} s", flush=True)
        for name, value in model.named_parameters():
            if not name.startswith("model.layers."):
                found[name] = value.detach().clone().as_subclass(torch.Tensor)
                save(f"{name}.safetensors")
        page["save_index"](out, progress.found["where"], model.config)
        logits = model.lm_head(model.model.norm(states[0][0]))  # type: ignore[operator, union-attr]
        torch.save((calibration[0], logits.clone()), folder / "logits.pt")
        engine.close(discard=True)
    return True


@torch.no_grad()
def check(folder: Path) -> None:
    """Load the files with ``transformers``, and compare."""
    from transformers import AutoModelForCausalLM

    tokens, expected = torch.load(folder / "logits.pt")
    start = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(folder / "int8", dtype=torch.bfloat16)
    print(f"transformers loaded {type(model.model.layers[0].mlp.up_proj.weight).__name__}s in "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    logits = model(tokens, use_cache=False).logits
    away = (logits.float() - expected.float()).norm() / expected.float().norm()
    print(f"logits of {tokens.numel()} tokens: {away:.1e} of their norm from those of the streamed model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=66)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--limit", type=float, help="GiB that the process may take")
    parser.add_argument("--seconds", type=float, default=150.0)
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    given.folder.mkdir(parents=True, exist_ok=True)
    progress, config = Progress(given.folder / "progress.pt"), config_of(given.layers)
    if progress.found["made"] <= given.layers:
        done = make(given.folder / "bf16", config, progress, until)
        progress.save()
        print("the model is made" if done else f"{progress.found['made']} of {given.layers + 1} files are made")
        return
    if not (given.folder / "logits.pt").exists():
        limit = nullcontext() if given.limit is None else memory_limit(os.getpid(), int(given.limit * (1 << 30)))
        with limit:
            done = quantise(given.folder, given.host_memory, progress, until)
        progress.write()
        found = progress.found
        print(f"{found['blocks']} of {given.layers} blocks, {'all' if done else 'not all'} is written")
        print(f"peak of the process {found['peak'] / 2**20:.0f} MiB, read {found['read_bytes'] / 1e9:.2f} GB, seconds:",
              {name: round(seconds, 1) for name, seconds in found["seconds"].items()})  # fmt: skip
        block, alone = found["seconds"]["all"] / found["blocks"], found["seconds"]["in memory"] / found["in memory"]
        print(f"a block takes {block:.1f} s, of which {alone:.1f} s in memory: {alone / block:.2f}")
        return
    check(given.folder)


if __name__ == "__main__":
    main()
