#!/usr/bin/env python3
"""A model larger than memory from birth to export: made, trained, committed, killed, resumed, exported.

Each part is a process of its own, whose peak memory is the kernel's count (VmHWM). The model is a Llama of random
weights in bf16 with 8-bit moments; gradients are clipped, so that two places on the disk are enough.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from _step_model import Shape

from offload import OffloadEngine, deferred_init


class Part:
    """Says what it did, how long it took, and what it took at most."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def done(self, what: str) -> None:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        peak_mib = int(fields["VmHWM"].split()[0]) / 1024
        print(f"{what}: {time.perf_counter() - self._start:.1f} s; peak RSS so far {peak_mib:,.0f} MiB", flush=True)
        self._start = time.perf_counter()


def make_engine(arguments: argparse.Namespace) -> OffloadEngine:
    shape = Shape.parse(arguments.model, 1, arguments.context)
    torch.manual_seed(0)
    model = deferred_init(lambda: shape.model().to(torch.bfloat16))
    return OffloadEngine(
        model, nvme_path=arguments.path, host_memory=arguments.host_memory, lr=1e-4, moments_dtype="int8",
        gradient_clipping=1.0, durable=1,
    )  # fmt: skip


def step(engine: OffloadEngine, arguments: argparse.Namespace) -> float:
    shape = Shape.parse(arguments.model, 1, arguments.context)
    tokens, targets = shape.tokens(torch.Generator().manual_seed(engine.global_step))
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def digest(engine: OffloadEngine) -> str:
    """Of all weights, one parameter at a time."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        found.update(parameter.detach().clone().view(torch.int16).numpy())
    return found.hexdigest()[:16]


def born(arguments: argparse.Namespace) -> None:
    part = Part()
    engine = make_engine(arguments)
    part.done(f"born, {engine.plan.num_parameters:,} parameters")
    print(engine.plan, flush=True)
    for _ in range(2):
        print(f"step {engine.global_step + 1}: loss {step(engine, arguments):.4f}", flush=True)
        engine.synchronize()
        part.done("step")
    engine._session.checkpoints.pass_boundary()
    engine._session.checkpoints.generations.wait()
    part.done("committed")
    print(f"weights after step 2: {digest(engine)}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(arguments: argparse.Namespace) -> None:
    part = Part()
    engine = make_engine(arguments)
    part.done("made again")
    engine.load_checkpoint()
    part.done(f"resumed at step {engine.global_step}")
    print(f"weights: {digest(engine)}", flush=True)
    part = Part()
    print(f"step {engine.global_step + 1}: loss {step(engine, arguments):.4f}", flush=True)
    engine.synchronize()
    part.done("step")
    engine.save_model(Path(arguments.path) / "model")
    part.done("exported")
    nbytes = sum(file.stat().st_size for file in (Path(arguments.path) / "model").iterdir())
    print(f"{nbytes:,} bytes of safetensors", flush=True)
    engine.close()
    part.done("closed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:32x3200")
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--path", required=True, help="an empty directory on an SSD")
    parser.add_argument("--part", choices=("born", "resumed"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        {"born": born, "resumed": resumed}[arguments.part](arguments)
        return
    Path(arguments.path).mkdir(parents=True, exist_ok=True)
    print(f"free: {shutil.disk_usage(arguments.path).free:,} bytes on the disk")
    for part, status in (("born", -signal.SIGKILL), ("resumed", 0)):
        command = [sys.executable, "-W", "ignore", *sys.argv, "--part", part]
        found = subprocess.run(command, check=False).returncode
        if found != status:
            raise SystemExit(f"{part} ended with {found}")
        print(f"--- {part}: ended with {found} ---", flush=True)


if __name__ == "__main__":
    main()
