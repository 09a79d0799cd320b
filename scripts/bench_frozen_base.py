#!/usr/bin/env python3
"""LoRA over made-up bf16 safetensors that are read in place: time until the first step, and what is read and written.

The base is a Llama in several shards. One sweep (all bytes of the shards by direct I/O, as fast as the queue reads
them) is measured beside, before and after. Bytes are the kernel's counts of the process, memory is its peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

import aio_ext
from offload import OffloadEngine, deferred_init

_READ_BYTES = 8 << 20


def config_of(num_layers: int, width: int) -> Any:
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=num_layers,
        num_attention_heads=width // 128, num_key_value_heads=width // 128, vocab_size=1024,
        max_position_embeddings=256, dtype="bfloat16",
    )  # fmt: skip


def make_files(config: Any, folder: Path) -> int:
    """Random weights in shards of nine layers each, as Hugging Face has them; their bytes."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    weight_map, nbytes = {}, 0
    for name in shapes:
        parts = name.split(".")
        number = int(parts[2]) // 9 if parts[1] == "layers" else 99
        weight_map[name] = f"model-{number:02d}.safetensors"
    for file in sorted(set(weight_map.values())):
        values: dict[str, torch.Tensor] = {}
        for name in (name for name in weight_map if weight_map[name] == file):
            noise = torch.randn(shapes[name], generator=generator) * 0.02
            values[name] = (noise + ("norm" in name)).to(torch.bfloat16)
        save_file(values, folder / file, metadata={"format": "pt"})
        nbytes += (folder / file).stat().st_size
        del values, noise
        with (folder / file).open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return nbytes


def sweep(folder: Path) -> float:
    """Seconds to read all whole pages of the shards, 32 blocks at a time."""
    with aio_ext.Memory(4 * _READ_BYTES) as memory, aio_ext.Queue() as queue:
        start, flying = time.perf_counter(), []
        for path in sorted(folder.glob("*.safetensors")):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            file = queue.register_file(descriptor)
            os.close(descriptor)
            whole = path.stat().st_size // 4096 * 4096
            for number, offset in enumerate(range(0, whole, _READ_BYTES)):
                if len(flying) >= 4:
                    flying.pop(0).wait()
                at = memory.address + number % 4 * _READ_BYTES
                flying.append(queue.read(file, offset, at, min(_READ_BYTES, whole - offset)))
            while flying:
                flying.pop(0).wait()
        return time.perf_counter() - start


def moved() -> tuple[int, int]:
    """Bytes that the kernel has read and written for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def train(folder: Path, arguments: argparse.Namespace, base_bytes: int, sweep_s: float) -> None:
    config = transformers.LlamaConfig.from_pretrained(folder)

    def build() -> Any:
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).to(torch.bfloat16)

    model = deferred_init(build)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = peak_bytes(), time.perf_counter()
    read, written = moved()
    engine = OffloadEngine(model, weights=folder, nvme_path=arguments.path, host_memory=arguments.host_memory, lr=1e-4)
    print(engine.plan)

    def tell(what: str) -> None:
        now_read, now_written = moved()
        seconds = time.perf_counter() - begin
        print(
            f"{what:<20} after {seconds:6.2f} s = {seconds / sweep_s:4.2f} sweeps; "
            f"read {(now_read - read) / 1e6:8,.1f} MB = {(now_read - read) / base_bytes:4.2f} bases, "
            f"written {(now_written - written) / 1e6:6,.1f} MB",
            flush=True,
        )

    tell("engine made")
    with engine:
        for number in range(arguments.steps):
            batch = torch.randint(0, 1024, (1, arguments.tokens), generator=torch.Generator().manual_seed(number))
            loss = engine(input_ids=batch, labels=batch).loss
            tell(f"forward {number + 1}")
            engine.backward(loss)
            engine.step()
            engine.synchronize()
            tell(f"step {number + 1}, loss {loss.item():.3f}")
        trained = sum(item.unit.trainable_numel for item in engine.plan.units)
        print(f"trained: {trained:,} elements; a step writes {engine.plan.step_write_bytes / 1e6:.1f} MB by the plan")
        grown = (peak_bytes() - before) / (1 << 20)
        print(f"peak memory grew by {grown:,.0f} MiB, with host_memory={arguments.host_memory}")
        engine.close(discard=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="an empty directory on the drive: files and store go there")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--host-memory", default="400MiB")
    arguments = parser.parse_args()
    folder = arguments.path / "base"
    folder.mkdir(parents=True)
    try:
        base_bytes = make_files(config_of(arguments.layers, arguments.width), folder)
        before = sweep(folder)
        num_files = len(list(folder.glob("*.safetensors")))
        print(f"base: {base_bytes / 1e9:.3f} GB in {num_files} files; torch {torch.__version__}")
        print(f"a sweep of it: {before:.2f} s, {base_bytes / before / 1e9:.2f} GB/s", flush=True)
        train(folder, arguments, base_bytes, before)
        print(f"a sweep afterwards: {sweep(folder):.2f} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
