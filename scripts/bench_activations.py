#!/usr/bin/env python3
"""Memory and time of a training step by sequence length, for each of the modes of ``activations=``.

A transformer of the given size trains two steps on one sequence for each mode and length, each in a process of its own.
Printed are the highest resident memory of the process beside what it took before the first forward, the bytes of
activations that were kept, written and read in the second step, and its seconds. The loss is that of
``cross_entropy_in_tiles``, so that logits decide nothing. Lengths and modes are interleaved."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from offload import OffloadEngine, cross_entropy_in_tiles

MODES = ("keep", "recompute", "nvme")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy_in_tiles(self.head, x, targets, rows=512)


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(options: argparse.Namespace, mode: str, length: int) -> dict[str, float]:
    """One process's figures."""
    torch.manual_seed(0)
    model = Model(options.layers, options.width, options.vocabulary)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = {"host_memory": options.host_memory, "activation_memory": options.activation_memory}
    engine = OffloadEngine(
        model, nvme_path=options.path, lr=1e-4, precision="bf16", activations=mode, **(budget if mode == "nvme" else
        {"host_memory": options.host_memory}),
    )  # fmt: skip
    with engine:
        before = resident_peak()
        for _ in range(2):
            tokens = torch.randint(0, options.vocabulary, (1, length + 1))
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
            engine.step()
        report = engine.report()
        use = report.activations
        return {
            "parameters": parameters,
            "peak": resident_peak() - before,
            "kept": use.kept_bytes,
            "written": use.write_bytes,
            "read": use.read_bytes,
            "seconds": report.seconds,
            "bound": report.bound_seconds,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--host-memory", default="600MiB")
    parser.add_argument("--activation-memory", default="16MiB")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap store")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "LENGTH"), help="measure this one, and print it as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options, options.one[0], int(options.one[1]))))
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {vars(options)}")
    print(
        f"{'length':>8} {'mode':>10} {'peak MiB':>9} {'kept':>7} {'written':>8} {'read':>7} {'s':>7} {'bound/step':>10}"
    )
    for length in options.lengths:
        for mode in options.modes:
            one = [sys.executable, __file__, *sys.argv[1:], "--one", mode, str(length)]
            done = subprocess.run(one, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{length:>8} {mode:>10} {done.stderr.strip().splitlines()[-1][:90]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            sizes = [found[name] / (1 << 20) for name in ("peak", "kept", "written", "read")]
            print(
                f"{length:>8} {mode:>10} {sizes[0]:>9,.0f} {sizes[1]:>7,.1f} {sizes[2]:>8,.1f} {sizes[3]:>7,.1f} "
                f"{found['seconds']:>7.1f} {found['bound'] / found['seconds']:>10.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
