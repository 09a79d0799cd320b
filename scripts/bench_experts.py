#!/usr/bin/env python3
"""LoRA over a mixture of experts whose base is made-up MXFP4 safetensors, read in place, one expert after the other.

``make DIR`` writes the files: experts one by one in MXFP4, all else in bf16; shards that are there stay, so it can be
broken off and started again. ``train DIR`` trains an adapter of the attention over them, in a memory cgroup if asked,
and prints after each step time, losses, a checksum of the adapter, the kernel's counts of bytes of the process and of
the drive, and what was routed. Two runs with other budgets have the same lines. ``--change`` flips a byte of a shard at
the end, for as long as a forward takes, and prints what the engine says to that. ``generate DIR`` draws ``--tokens``
tokens, and prints the kernel's count of what was read against what had to be: experts that were routed to and not
there, and all else that rests on NVMe once a token. ``pace DIR`` trains a second engine with all in memory, whose
steps are what compute takes, throttles the drive so that the other one's reads take ``--ratio`` times as long, and
prints, in turns, what a step takes of the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import xxhash
from _cgroups import drive_limit, memory_limit
from bench_frozen_base import moved, sweep
from safetensors.torch import save_file
from transformers.initialization import no_init_weights

from offload import OffloadEngine, WeightsChanged, deferred_init
from offload.plan.plan import Tier

_PER_SCALE = 32
_MATRICES = ("gate_proj", "up_proj", "down_proj")


def config_of(arguments: argparse.Namespace) -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=arguments.width, moe_intermediate_size=arguments.inner, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_experts=arguments.experts, num_experts_per_tok=8, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1024, dtype="bfloat16",
    )  # fmt: skip


def make(folder: Path, config: Any) -> None:
    """Random weights, an eighth of a layer's experts in a shard, and all else in the first one."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in transformers.Qwen3MoeForCausalLM(config).state_dict().items()}
    weight_map: dict[str, str] = {}
    num_shards = 0

    def save(names: list[str], values_of: Callable[[torch.Generator], dict[str, torch.Tensor]]) -> None:
        nonlocal num_shards
        file, number = folder / f"model-{num_shards:04d}.safetensors", num_shards
        num_shards += 1
        weight_map.update(dict.fromkeys(names, file.name))
        if file.exists():
            return
        save_file(values_of(torch.Generator().manual_seed(number)), folder / "part", metadata={"format": "pt"})
        with (folder / "part").open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        (folder / "part").rename(file)

    def of_rest(generator: torch.Generator) -> dict[str, torch.Tensor]:
        noise = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in rest.items()}
        return {name: (value + ("norm" in name)).to(torch.bfloat16) for name, value in noise.items()}

    def of_experts(names: list[str], generator: torch.Generator) -> dict[str, torch.Tensor]:
        values = {}
        for name in names:
            rows, columns = config.moe_intermediate_size, config.hidden_size
            rows, columns = (columns, rows) if "down_proj" in name else (rows, columns)
            lengths = rows, columns // _PER_SCALE
            words = torch.randint(-(1 << 62), 1 << 62, (*lengths, 2), generator=generator)
            values[f"{name}_blocks"] = words.view(torch.uint8)
            values[f"{name}_scales"] = torch.randint(118, 121, lengths, dtype=torch.uint8, generator=generator)
        return values

    rest = {name: shape for name, shape in shapes.items() if ".mlp.experts." not in name}
    save(list(rest), of_rest)
    for layer in range(config.num_hidden_layers):
        for group in torch.arange(config.num_experts).chunk(8 if config.hidden_size > 1000 else 1):
            of = f"model.layers.{layer}.mlp.experts"
            names = [f"{of}.{expert}.{matrix}.weight" for expert in group.tolist() for matrix in _MATRICES]
            stored = [f"{name}_{part}" for name in names for part in ("blocks", "scales")]
            save(stored, partial(of_experts, names))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(folder)


def build(config: Any) -> Any:
    torch.manual_seed(0)
    with no_init_weights():  # the files have all of it: initialisers would draw as many numbers as there are weights
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).to(torch.bfloat16)


def on_drive(folder: Path) -> tuple[int, int]:
    """Bytes that the drive under the folder has read and written, for whomever."""
    device = folder.stat().st_dev
    fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return 512 * int(fields[2]), 512 * int(fields[6])


def resident_bytes() -> int:
    """Memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refuses_change(engine: OffloadEngine, folder: Path, batch: torch.Tensor) -> str:
    """What a forward says when a byte of the last shard is another one meanwhile."""
    shard = sorted(folder.glob("*.safetensors"))[-1]
    with shard.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        byte = stream.read(1)
        try:
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([byte[0] ^ 1]))
            stream.flush()
            engine(input_ids=batch)
        except WeightsChanged as error:
            return f"refused: {str(error).splitlines()[0]}"
        finally:
            stream.seek(-1, os.SEEK_END)
            stream.write(byte)
    return "read without a word"


def train(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    config = transformers.Qwen3MoeConfig.from_pretrained(folder)
    base_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    sweep_s = sweep(folder)
    print(f"base: {base_bytes / 1e9:.3f} GB; a sweep of it: {sweep_s:.2f} s, {base_bytes / sweep_s / 1e9:.2f} GB/s")
    print(f"memory of the process before: {resident_bytes() >> 20} MiB, which no limit of --cgroup counts")
    with memory_limit(os.getpid(), int(arguments.cgroup * (1 << 30))) if arguments.cgroup else nullcontext():
        train_over(folder, config, arguments, base_bytes, sweep_s)


def train_over(folder: Path, config: Any, arguments: argparse.Namespace, base_bytes: int, sweep_s: float) -> None:
    begin, (read, written), drive = time.perf_counter(), moved(), on_drive(folder)

    def sweeps(what: str) -> None:
        now = on_drive(folder)
        print(
            f"{what} after {time.perf_counter() - begin:.1f} s; the drive has read "
            f"{(now[0] - drive[0]) / base_bytes:.3f} sweeps, and written {(now[1] - drive[1]) / 1e6:.1f} MB; the "
            f"process has read {(moved()[0] - read) / base_bytes:.3f} sweeps, and has {resident_bytes() >> 20} MiB",
            flush=True,
        )

    engine = OffloadEngine(
        deferred_init(build, config), weights=folder, nvme_path=arguments.store, host_memory=arguments.host_memory,
        lr=1e-3,
    )  # fmt: skip
    print(engine.plan)
    sweeps("engine made")
    with engine:
        for number in range(arguments.steps):
            start, (read_before, written_before), use = time.perf_counter(), moved(), engine.expert_use()
            batch = torch.randint(0, 1024, (1, arguments.tokens), generator=torch.Generator().manual_seed(number))
            loss = engine(input_ids=batch, labels=batch).loss
            forward_s = time.perf_counter() - start
            sweeps(f"forward {number + 1}")
            engine.backward(loss)
            engine.step()
            engine.synchronize()
            now, (read_now, written_now), used = time.perf_counter(), moved(), engine.expert_use()
            adapter = xxhash.xxh3_64()
            for parameter in (p for p in engine.module.parameters() if p.requires_grad):
                adapter.update(parameter.detach().clone().view(torch.uint8).numpy().tobytes())
            routed, fetched = used.routed_bytes - use.routed_bytes, used.read_bytes - use.read_bytes
            print(
                f"step {number + 1}: {now - start:.2f} s (forward {forward_s:.2f}), loss {loss.item().hex()}, adapter "
                f"{adapter.hexdigest()}; read {(read_now - read_before) / 1e6:,.1f} MB, by the plan "
                f"{engine.plan.step_read_bytes / 1e6:,.1f}; written {(written_now - written_before) / 1e6:.2f} MB, by "
                f"the plan {engine.plan.step_write_bytes / 1e6:.2f}; routed {routed / 1e6:,.1f} MB, fetched for it "
                f"{fetched / 1e6:,.1f}; {(now - begin) / sweep_s:.2f} sweeps since the beginning",
                flush=True,
            )
        sweeps("all steps")
        if arguments.change:
            print(f"a byte of a shard changed: {refuses_change(engine, folder, batch)}")
        read_now, written_now = moved()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"all: read {(read_now - read) / 1e6:,.1f} MB, written {(written_now - written) / 1e6:,.1f} MB")
        print(f"peak of the process {peak:,.0f} MiB, with host_memory={arguments.host_memory}")
        engine.close(discard=True)


def pace(arguments: argparse.Namespace) -> None:
    folder, config = arguments.folder, transformers.Qwen3MoeConfig.from_pretrained(arguments.folder)

    def made(host_memory: str) -> OffloadEngine:
        return OffloadEngine(
            deferred_init(build, config), weights=folder, nvme_path=arguments.store, host_memory=host_memory, lr=1e-3
        )

    def step(engine: OffloadEngine, number: int) -> tuple[float, int]:
        """Seconds and bytes read."""
        batch = torch.randint(0, 1024, (1, arguments.tokens), generator=torch.Generator().manual_seed(number))
        start, before = time.perf_counter(), moved()[0]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        engine.synchronize()
        return time.perf_counter() - start, moved()[0] - before

    with made("16GiB") as resident, made(arguments.host_memory) as streaming:
        computing, reading = (step(engine, 0) for engine in (resident, streaming))
        compute_s, _ = step(resident, 1)
        rate = step(streaming, 1)[1] / (arguments.ratio * compute_s)
        print(
            f"warm: resident {computing[0]:.2f} s, streaming {reading[0]:.2f} s; then compute {compute_s:.2f} s a step"
        )
        with drive_limit(os.getpid(), folder, rate, 1e9):
            for number in range(2, 2 + arguments.steps):
                (compute_s, _), (seconds, nbytes) = step(resident, number), step(streaming, number)
                drive_s = nbytes / rate
                print(
                    f"turn {number - 1}: {seconds:.2f} s, {max(drive_s, compute_s) / seconds:.3f} of the bound; "
                    f"{nbytes / 1e6:.1f} MB at {rate / 1e6:.2f} MB/s take {drive_s:.2f} s, compute {compute_s:.2f} s; "
                    f"by the plan {streaming.plan.step_read_bytes / 1e6:.1f} MB",
                    flush=True,
                )
        streaming.close(discard=True)
        resident.close(discard=True)


def generate(arguments: argparse.Namespace) -> None:
    engine = OffloadEngine.from_pretrained(
        transformers.AutoModelForCausalLM, arguments.folder, optimizer=None, nvme_path=arguments.store,
        host_memory=arguments.host_memory,
    )  # fmt: skip
    print(engine.plan)
    with engine:
        away = [item.unit for item in engine.plan.units if item.weights is Tier.NVME and item.unit.experts is None]
        a_sweep = sum(unit.stored_numel * engine.plan.formats.weights for unit in away)

        def draw(count: int) -> None:
            prompt = torch.tensor([[1, 2, 3, 4]])
            engine.module.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=True, pad_token_id=0)

        draw(3)  # the order of the layers is known, and a checksum of what was read
        (read, _), use = moved(), engine.expert_use()
        draw(arguments.tokens)
        read, used = moved()[0] - read, engine.expert_use()
    routed, fetched = used.routed_bytes - use.routed_bytes, used.read_bytes - use.read_bytes
    needed = fetched + arguments.tokens * a_sweep
    print(
        f"{arguments.tokens} tokens: read {read / 1e6:,.1f} MB by the kernel, {read / needed:.3f} of what had to be: "
        f"{routed / 1e6:,.1f} MB of experts were routed to, {fetched / 1e6:,.1f} MB of them fetched, and "
        f"{a_sweep / 1e6:,.1f} MB of other units come for each token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "train", "pace", "generate"])
    parser.add_argument("folder", type=Path, help="where the files are, or are to be")
    parser.add_argument("--store", type=Path, default=Path(), help="a directory for what is trained")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--ratio", type=float, default=4.0, help="seconds of the drive for one of compute")
    parser.add_argument("--change", action="store_true", help="change a byte of a shard at the end, and put it back")
    parser.add_argument("--cgroup", type=float, help="GiB that the process may take, in a memory cgroup of its own")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder, config_of(arguments))
    else:
        {"train": train, "pace": pace, "generate": generate}[arguments.what](arguments)


if __name__ == "__main__":
    main()
