#!/usr/bin/env python3
"""Memory and time of a training step by sequence length, for each of the modes of ``activations=``.

A transformer of the given size trains two steps for each mode, batch and length, each in a process of its own.
Printed are the highest resident memory of the process from the first forward on, how much that is above what it was
before, the bytes of activations that were kept, written and read in the last step, all that the process gave to the
drive in it for each token, and its seconds. The loss is that of ``cross_entropy_in_tiles``, so that logits decide nothing. Lengths and modes
are interleaved.

``--window`` has tokens look at those of their own window alone, so that the time grows with the length and no faster;
``--rows`` puts MLPs in tiles of so many rows, and ``--heads`` attentions in so many tiles; ``--limit`` is a memory
cgroup around each process, imports included, and needs root; ``--steps 1`` is for long ones; ``--plot`` draws.
``--batches`` has so many sequences at a time; ``--drive READ WRITE`` throttles the drive, in bytes a second, by a
cgroup (root, too). What a mode cannot do within the limit is killed: so the longest sequence and the largest batch are
found.
Modes beside the engine's are plain PyTorch, whose weights and moments are in ``--precision`` without masters: "plain",
"checkpoint" with each block recomputed (``torch.utils.checkpoint``), and "save_on_cpu" with what autograd keeps in
``torch.autograd.graph.save_on_cpu``.
``MALLOC_MMAP_THRESHOLD_=33554432`` in the environment shows what the C library would keep of large tensors.

    python scripts/bench_activations.py --layers 24 --width 64 --window 512 --rows 4096 --limit 1GiB \\
        --lengths 16384 32768 65536 131072
    python scripts/bench_activations.py --layers 24 --width 1536 --modes recompute nvme --batches 4 12 --lengths 2048 \\
        --rows 1024 --heads 4 --steps 3 --host-memory 640MiB --activation-memory 64MiB --drive 70e6 60e6
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _cgroups import drive_limit, memory_limit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from offload import OffloadEngine, attention_in_tiles, cross_entropy_in_tiles, in_tiles
from offload.option_values import parse_bytes

MODES = ("keep", "recompute", "nvme")
LEAVING = ("host", "nvme", "auto")
PEERS = ("plain", "checkpoint", "save_on_cpu")
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.after(x))))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = 64
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """``window`` tokens look at each other; 0: all of them."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self._in_windows(self.norm(x))).view_as(x)
        return x + self.mlp(x)

    def _in_windows(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.window or x.shape[1])).flatten(0, 1)


class Model(nn.Module):
    def __init__(
        self, layers: int, width: int, vocabulary: int, window: int = 0, rows: int = 0, heads: int = 0
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, window) for _ in range(layers))
        for block in self.blocks:
            if rows:
                in_tiles(block.mlp, rows=rows)
            if heads:
                attention_in_tiles(block.attention, tiles=heads)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy_in_tiles(self.head, x, targets, rows=512)


def resident_peak() -> int:
    """Most bytes that were resident since ``forget_peak``."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> int:
    """What is resident now is the peak; returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def written_bytes() -> int:
    """Bytes that the process has given to drives, by the kernel's count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_oublock * 512


def model_of(options: argparse.Namespace) -> Model:
    torch.manual_seed(0)
    return Model(options.layers, options.width, options.vocabulary, options.window, options.rows, options.heads)


def batch_of(options: argparse.Namespace, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, options.vocabulary, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def measure_peer(options: argparse.Namespace, mode: str, batch: int, length: int) -> dict[str, float]:
    """The same of plain PyTorch, which gives nothing to the drive."""
    model = model_of(options).to(TORCH_DTYPES[options.precision])
    if mode == "checkpoint":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = forget_peak()
    for _ in range(options.steps):
        began = time.perf_counter()
        with torch.autograd.graph.save_on_cpu() if mode == "save_on_cpu" else contextlib.nullcontext():
            loss = model(*batch_of(options, batch, length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
    return {"peak": resident_peak() - before, "whole": resident_peak(), "seconds": seconds}


def measure(options: argparse.Namespace, mode: str, batch: int, length: int) -> dict[str, float]:
    """One process's figures."""
    if mode in PEERS:
        return measure_peer(options, mode, batch, length)
    with torch.device("meta"):  # the engine initialises it
        model = model_of(options)
    budget = {"host_memory": options.host_memory, "activation_memory": options.activation_memory}
    engine = OffloadEngine(
        model,
        nvme_path=options.path,
        lr=1e-4,
        precision=options.precision,
        activations=mode,
        **(budget if mode in LEAVING else {"host_memory": options.host_memory}),
    )
    with engine:
        before = forget_peak()
        for _ in range(options.steps):
            engine.synchronize()
            written = written_bytes()
            engine.backward(engine(*batch_of(options, batch, length)))
            engine.step()
        engine.synchronize()
        report = engine.report()
        use = report.activations
        return {
            "peak": resident_peak() - before,
            "whole": resident_peak(),
            "kept": use.kept_bytes,
            "written": use.write_bytes,
            "read": use.read_bytes,
            "to_drive": (written_bytes() - written) / batch / length,
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
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--limit")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--drive", type=float, nargs=2, metavar=("READ", "WRITE"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap store")
    parser.add_argument(
        "--one", nargs=3, metavar=("MODE", "BATCH", "LENGTH"), help="measure this one, and print it as JSON"
    )
    options = parser.parse_args()
    if options.one:
        sys.stdin.readline()
        print(json.dumps(measure(options, options.one[0], *map(int, options.one[1:]))))
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {vars(options)}")
    sizes = f"{'whole MiB':>9} {'peak MiB':>9} {'kept':>7} {'written':>8} {'read':>7} {'bytes/token':>11}"
    print(f"{'length':>8} {'batch':>5} {'mode':>10} {sizes} {'s':>7} {'bound/step':>10}")
    peaks: dict[str, list[tuple[int, float]]] = {}
    for length, batch, mode in itertools.product(options.lengths, options.batches, options.modes):
        found = in_process(options, [*sys.argv[1:], "--one", mode, str(batch), str(length)])
        what = f"{length:>8} {batch:>5} {mode:>10}"
        if isinstance(found, str):
            print(f"{what} {found}", flush=True)
            continue
        peaks.setdefault(mode, []).append((batch * length, found["whole"]))
        passed = [found.get(name, 0) / (1 << 20) for name in ("kept", "written", "read")]
        moving = "{:>7,.1f} {:>8,.1f} {:>7,.1f}".format(*passed) + f" {found.get('to_drive', 0):>11,.0f}"
        share = f"{found['bound'] / found['seconds']:>10.2f}" if "bound" in found else ""
        peak = f"{found['whole'] / (1 << 20):>9,.0f} {found['peak'] / (1 << 20):>9,.0f}"
        print(f"{what} {peak} {moving} {found['seconds']:>7.1f} {share}", flush=True)
    if options.plot is not None:
        draw(peaks, options)
    return 0


def in_process(options: argparse.Namespace, arguments: list[str]) -> dict[str, float] | str:
    """Figures of a process of its own, or its last words. It begins when it is told to, within the limit."""
    one = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with contextlib.ExitStack() as limits:
        if options.limit is not None:
            limits.enter_context(memory_limit(one.pid, byte_count(options.limit)))
        if options.drive is not None:
            limits.enter_context(drive_limit(one.pid, options.path, *options.drive))
        said, errors = one.communicate("begin\n")
    if one.returncode == -signal.SIGKILL:
        return "killed: out of memory"
    if one.returncode:
        return errors.strip().splitlines()[-1][:90]
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def byte_count(text: str) -> int:
    """``1GiB`` in bytes."""
    return int(parse_bytes("--limit", text))


def draw(peaks: dict[str, list[tuple[int, float]]], options: argparse.Namespace) -> None:
    """A picture of the peaks by length and mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for mode, points in peaks.items():
        axes.plot([length for length, _ in points], [peak / (1 << 20) for _, peak in points], marker="o", label=mode)
    if options.limit is not None:
        axes.axhline(byte_count(options.limit) / (1 << 20), color="#999999", linestyle="--", label="limit")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens at a time")
    axes.set_ylabel("peak resident memory of the process, MiB")
    axes.legend(frameon=False)
    figure.savefig(options.plot)


if __name__ == "__main__":
    sys.exit(main())
