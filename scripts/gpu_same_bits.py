"""A Llama on a GPU with most of it offloaded against the same with all of it resident: losses and weights, bit for bit.

    python scripts/gpu_same_bits.py [--size llama:4x1024] [--batch 4] [--context 1024] [--steps 4]

Budgets: all on the GPU, twice; the least of its memory with the rest in RAM; the least of both, with the rest on NVMe.
torch is asked for its deterministic kernels: the usual ones of attention's backward sum in any order.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used

import torch
from _step_model import Shape
from torch import nn

from offload import BudgetError, OffloadEngine


def _model(shape: Shape) -> nn.Module:
    """The engine draws its first values, the same at every budget, and as fast as the machine can."""
    with torch.device("meta"):
        return shape.model()


def train(shape: Shape, steps: int, **options: Any) -> list[str]:
    """The loss of each step as a hexadecimal number, and last a digest of all weights."""
    torch.manual_seed(0)
    generator, began = torch.Generator().manual_seed(1), time.monotonic()
    with OffloadEngine(_model(shape), precision="bf16", lr=1e-4, gradient_clipping=1.0, **options) as engine:
        seen, made = [], time.monotonic()
        for _ in range(steps):
            tokens, targets = shape.tokens(generator)
            loss = engine(tokens, targets)
            seen.append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        digest = hashlib.sha256()
        for weight in engine.module.parameters():
            digest.update(weight.detach().float().cpu().numpy().tobytes())
        engine.close(discard=True)
        print(
            f"made in {made - began:.1f} s, {steps} steps and a digest in {time.monotonic() - made:.1f} s", flush=True
        )
        return [*seen, digest.hexdigest()[:16]]


def least(shape: Shape, name: str, **options: Any) -> int:
    """The least memory of this name that the engine says to need."""
    try:
        OffloadEngine(_model(shape), precision="bf16", lr=1e-4, **{**options, name: 1}).close(discard=True)
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError(f"an engine was made with one byte of {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="llama:4x1024")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--path", help="a folder on the SSD to use (default: a new one in $TMPDIR)")
    options = parser.parse_args()
    shape = Shape.parse(options.size, options.batch, options.context, checkpointing=True)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        common: dict[str, Any] = {"device": options.device, "nvme_path": folder}
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        wanted = train(shape, options.steps, **common)
        print("resident:", *wanted, flush=True)
        in_ram = {**common, "device_memory": least(shape, "device_memory", **common)}
        wrong = 0
        for name, settings in (
            ("resident", common),
            ("in RAM", in_ram),
            ("on NVMe", {**in_ram, "host_memory": least(shape, "host_memory", **in_ram)}),
        ):
            found = train(shape, options.steps, **settings)
            wrong += found != wanted
            print(f"{name}:", "the same bits" if found == wanted else f"OTHER BITS: {' '.join(found)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
