#!/usr/bin/env python3
"""Bytes of activations that ``offload plan`` counts against those of real steps, for twelve shapes of models.

Each model of ``transformers`` is described to the plan by its config alone, as one on the hub is, and trains a step
with ``activations="nvme"``. Compared are all bytes that autograd keeps of a forward without the engine (each storage
once, parameters left out), and in the engine's step those that leave, and those that are written to and read from NVMe.
``python scripts/activations_check.py`` prints the table of ``docs/activations.md``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from offload import OffloadEngine
from offload.predict.activation_bytes import activation_bytes
from offload.predict.architecture import Architecture
from offload.predict.model import from_architecture
from offload.predict.workload import Workload

MEMORY = 4 << 20
"""Host memory for activations."""


@dataclass(frozen=True)
class Shape:
    """A model of ``transformers``, and a batch for it."""

    kind: str
    layers: int
    width: int
    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.kind} | {self.layers}x{self.width} | {self.batch} x {self.sequence:,}"

    def config(self) -> dict[str, Any]:
        """Fields as they are in its ``config.json``."""
        heads = self.width // 32
        if self.kind == "gpt2":
            return {
                "n_embd": self.width, "n_layer": self.layers, "n_head": heads, "vocab_size": 512,
                "n_positions": self.sequence, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            }  # fmt: skip
        if self.kind == "opt":
            return {
                "hidden_size": self.width, "ffn_dim": 4 * self.width, "num_hidden_layers": self.layers, "dropout": 0.0,
                "num_attention_heads": heads, "vocab_size": 512, "max_position_embeddings": self.sequence,
                "word_embed_proj_dim": self.width,
            }  # fmt: skip
        return {
            "hidden_size": self.width, "intermediate_size": 11 * self.width // 4, "num_hidden_layers": self.layers,
            "num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 32, "vocab_size": 512,
            "pad_token_id": None,
        }  # fmt: skip


SHAPES = (
    Shape("llama", 4, 256, 1, 2048), Shape("llama", 8, 256, 2, 1024), Shape("llama", 12, 512, 1, 512),
    Shape("llama", 24, 128, 4, 512), Shape("qwen3", 6, 256, 2, 1024), Shape("qwen3", 12, 128, 1, 4096),
    Shape("gpt2", 4, 256, 4, 512), Shape("gpt2", 12, 256, 1, 1024), Shape("opt", 6, 256, 2, 1024),
    Shape("opt", 12, 128, 8, 256), Shape("mistral", 8, 256, 1, 1024), Shape("phi3", 6, 256, 2, 512),
)  # fmt: skip


@dataclass(frozen=True)
class Bytes:
    """``kept`` of a forward without the engine; what leaves with it, and passes NVMe."""

    kept: int
    leaving: int
    written: int
    read: int


def planned(shape: Shape) -> Bytes:
    """As the plan counts them."""
    shapes = Architecture.of_config({"model_type": shape.kind, **shape.config()})
    assert shapes is not None
    model = from_architecture(shape.kind, shapes)
    workload = Workload(batch=shape.batch, sequence=shape.sequence, activations="nvme", activation_memory=MEMORY)
    found = activation_bytes(model, workload)
    kept = model.kept(shape.sequence, workload.dtype).nbytes(shape.batch, recomputed=False)
    return Bytes(kept, found.leaving, found.written, found.read)


def measured(shape: Shape, path: Path) -> Bytes:
    """Of real steps."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.kind, **shape.config())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    tokens = torch.randint(0, 512, (shape.batch, shape.sequence))
    lasting = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers(), tokens]}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(input_ids=tokens, use_cache=False)
    kept = sum(saved[key].untyped_storage().nbytes() for key in saved.keys() - lasting)
    saved.clear()
    del output
    given = {"activations": "nvme", "activation_memory": MEMORY, "precision": "bf16"}
    with OffloadEngine(model, nvme_path=path, host_memory="256MiB", **given) as engine:
        engine.backward(engine(input_ids=tokens, use_cache=False).logits.float().square().mean())
        engine.step()
        use = engine.report().activations
    return Bytes(kept, use.kept_bytes, use.write_bytes, use.read_bytes)


def rows(path: Path) -> Iterator[tuple[Shape, Bytes, Bytes]]:
    """All shapes, with what was counted and what was seen."""
    for shape in SHAPES:
        yield shape, planned(shape), measured(shape, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap store")
    path = parser.parse_args().path
    warnings.simplefilter("ignore")
    names = ("kept", "leaving", "written", "read")
    columns = (
        "model",
        "layers x width",
        "batch x tokens",
        *(f"{name}, MB" for name in names),
        "furthest off but for reads",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, plan, seen in rows(path):
        pairs = [(getattr(plan, name), getattr(seen, name)) for name in names]
        cells = " | ".join(f"{counted / 1e6:,.1f} ({real / 1e6:,.1f})" for counted, real in pairs)
        off = max((counted / real - 1 for counted, real in pairs[:-1]), key=abs)
        print(f"| {shape} | {cells} | {off:+.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
