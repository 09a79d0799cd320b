#!/usr/bin/env python3
"""What a token costs with weights on NVMe: in memory, under the engine, and under accelerate's ``disk_offload``.

The bound of a token is the larger of the token in memory, and of the bytes of weights on NVMe at the bandwidth at which
the engine's queue reads a file of that size, measured in the same turns. Both rivals run twice: as they are, and
under a memory limit that keeps the page cache from holding the model (a cgroup, which needs root; where there is none,
accelerate's files are taken out of the page cache after each token, in time that is not counted).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from offload.option_values import parse_bytes

_WORKER = Path(__file__).with_name("_generate_worker.py")
_MIB = 1 << 20


@dataclass
class Contender:
    """One system, and what its turns gave."""

    name: str
    request: dict[str, Any]
    limited: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn["seconds"]]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path, closing: contextlib.ExitStack) -> None:
        self._arguments = arguments
        self._folder = folder
        self._closing = closing
        self._asked = {name: getattr(arguments, name) for name in ("tokens", "batch", "prompts", "length")}
        self._offload_folders = [str(folder / name) for name in ("offload", "offload-limited")]
        common = {"folder": str(folder / "model"), "nvme_path": str(folder)}
        self._common = common
        budgets = [int(parse_bytes("--budget", text)) for text in arguments.budget]
        self.limit_bytes = budgets[0] + int(parse_bytes("--beside", arguments.beside))
        self.can_limit = _memory_groups() is not None
        self.engines = [Contender("engine", {**common, "host_memory": budget}) for budget in budgets]
        self.in_memory = Contender("in memory", common)
        self.accelerate = Contender(
            "accelerate", {**common, "offload_folder": self._offload_folders[0], "evict": False}
        )
        evict = not self.can_limit
        limited = {**common, "offload_folder": self._offload_folders[1], "evict": evict}
        self.accelerate_limited = Contender("accelerate", limited, limited=True)
        self.engine_limited = Contender("engine", {**common, "host_memory": budgets[0]}, limited=True)
        self.rates: list[list[float]] = []

    @property
    def contenders(self) -> list[Contender]:
        return [self.in_memory, *self.engines, self.accelerate, self.engine_limited, self.accelerate_limited]

    def run(self) -> None:
        arguments = self._arguments
        with _worker({"system": "prepare", "layers": arguments.layers, "width": arguments.width, **self._common,
                      "offload_folders": self._offload_folders}) as prepare:  # fmt: skip
            self.parameters = prepare({})["parameters"]
        asks = []
        for one in self.contenders:
            limit = self.limit_bytes if one.limited and self.can_limit else None
            ask = self._closing.enter_context(_worker({"system": one.name, **one.request}, limit))
            one.facts = ask({})
            ask({**self._asked, "tokens": 3})  # warm
            asks.append(ask)
        sizes = [one.facts["nvme_bytes"] for one in self.engines]
        raw = self._closing.enter_context(_worker({"system": "raw", "nbytes": max(sizes), **self._common}))
        raw({})
        for _ in range(arguments.turns):
            self.rates.append(raw({"sizes": sizes})["rates"])
            for one, ask in zip(self.contenders, asks, strict=True):
                one.turns.append(ask(self._asked))
        expected = self.in_memory.turns[0]["tokens"]
        for one in self.contenders:
            one.facts["same"] = all(turn["tokens"] == expected for turn in one.turns)

    def print(self) -> None:
        arguments = self._arguments
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        print(
            f"{datetime.date.today()}  {os.cpu_count()} cores {_cpu()}, {memory / 2**30:.0f} GiB, Linux "
            f"{platform.release()}, torch {torch.__version__}, transformers {transformers.__version__}, accelerate "
            f"{accelerate.__version__}"
        )
        print(
            f"Llama {arguments.layers}x{arguments.width}, {self.parameters / 1e6:.0f} M parameters, bf16, "
            f"{2 * self.parameters / _MIB:,.0f} MiB; {arguments.prompts} prompts of {arguments.length} tokens, "
            f"{arguments.batch} at a time, {arguments.tokens} new tokens, {arguments.turns} turns"
        )
        how = f"a cgroup of {self.limit_bytes / _MIB:,.0f} MiB beside imports"
        print(f"limited: {how if self.can_limit else 'files taken out of the page cache after each token (no cgroup)'}")
        print(
            f"{'system':<22}{'host MiB':>9}{'NVMe MiB':>9}{'read MiB/token':>15}{'s/token (min med max)':>25}"
            f"{'tokens/s':>9}{'bound s':>9} {'by':<8}{'of bound':>8}  tokens"
        )
        for one in self.contenders:
            print(self._row(one))
        for engine, rates in zip(self.engines, zip(*self.rates, strict=True), strict=True):
            size = engine.facts["nvme_bytes"] / _MIB
            print(f"raw read of {size:,.0f} MiB by the engine's queue: {_spread(rates, 1e9)} GB/s (min med max)")
        for name, rival, engine in (
            ("without a limit", self.accelerate, self.engines[0]),
            ("limited", self.accelerate_limited, self.engine_limited),
        ):
            pairs = [
                statistics.median(a["seconds"]) / statistics.median(b["seconds"])
                for a, b in zip(rival.turns, engine.turns, strict=True)
            ]
            print(f"{name}, the engine is {_spread(pairs)} times as fast as accelerate (min med max of turns)")

    def _row(self, one: Contender) -> str:
        seconds = one.seconds
        row = f"{one.name + (', limited' if one.limited else ''):<22}"
        if one.name == "engine":
            row += f"{one.facts['host_bytes'] / _MIB:>9,.0f}{one.facts['nvme_bytes'] / _MIB:>9,.0f}"
        else:
            row += f"{'-':>9}{'-':>9}"
        read = statistics.median(turn["read_bytes"] for turn in one.turns) / _MIB
        row += f"{read:>15,.0f}{_spread(seconds):>25}{self._arguments.batch / one.median:>9.2f}"
        if one.name == "engine":
            index = [engine.request for engine in self.engines].index(one.request)
            disk = one.facts["nvme_bytes"] / statistics.median(rates[index] for rates in self.rates)
            bound = max(disk, self.in_memory.median)
            row += f"{bound:>9.3f} {'nvme' if disk == bound else 'compute':<8}{bound / one.median:>8.2f}"
        else:
            row += " " * 26
        return f"{row}  {'the same' if one.facts['same'] else 'others'}"


@contextlib.contextmanager
def _worker(request: dict[str, Any], limit_bytes: int | None = None) -> Iterator[Any]:
    """A worker as a function that sends it a message and returns its answer. A limit counts from after its imports."""
    command = [sys.executable, str(_WORKER), json.dumps(request)]
    with tempfile.TemporaryFile("w+") as errors, contextlib.ExitStack() as group:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            stdin, stdout = process.stdin, process.stdout

            def answer() -> dict[str, Any]:
                line = stdout.readline()
                if not line:
                    errors.seek(0)
                    last = (errors.read().strip() or "it ended without a word (out of memory?)").splitlines()[-1]
                    sys.exit(f"{request['system']}: {last}")
                return dict(json.loads(line))

            def ask(message: dict[str, Any]) -> dict[str, Any]:
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
                return answer()

            try:
                answer()
                if limit_bytes is not None:
                    group.enter_context(_memory_group(process.pid, limit_bytes))
                yield ask
            finally:
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
                process.wait()


def _memory_groups() -> tuple[Path, str] | None:
    """Where this user may make memory cgroups, and the file of a group that takes the limit; None if nowhere."""
    for first, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        probe = first / f"bench-generate-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = (probe / name).exists()
        probe.rmdir()
        if usable:
            return first, name
    return None


@contextlib.contextmanager
def _memory_group(pid: int, limit_bytes: int) -> Iterator[None]:
    """A cgroup of its own for the process, with this limit. It is removed when the process has ended."""
    found = _memory_groups()
    assert found is not None
    first, name = found
    group = first / f"bench-generate-{pid}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        group.rmdir()


def _spread(values: Any, unit: float = 1.0) -> str:
    values = [value / unit for value in values]
    return f"{min(values):.3f} {statistics.median(values):.3f} {max(values):.3f}"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--budget", nargs="+", default=["200MiB", "500MiB"],
                        help="host memory of the engine; 0: the least. Under the limit: the first one")  # fmt: skip
    parser.add_argument("--beside", default="320MiB", help="memory under the limit beside the budget")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens of each prompt in a turn")
    parser.add_argument("--prompts", type=int, default=1, help="prompts in a turn")
    parser.add_argument("--batch", type=int, default=1, help="prompts in one generate")
    parser.add_argument("--length", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--path", default=None, help="directory on the disk to be measured")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=arguments.path)))
        bench = Bench(arguments, folder, closing)
        bench.run()
        bench.print()


if __name__ == "__main__":
    main()
