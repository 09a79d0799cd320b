#!/usr/bin/env python3
"""Compare the queue with DeepSpeed's async_io on one file, in turns, each at its own best settings, over tensors of
equal sizes.

Runs in an environment that has both (DeepSpeed with libaio-dev; DS_ACCELERATOR=cpu where there is no GPU). DeepSpeed is
no dependency: without it, the object printed says ``"deepspeed": null``. Works in a file without a name.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aio_ext import Memory, Queue, available_backends
from aio_ext.memory import huge_bytes
from offload.bench.search import search
from offload.bench.subject import GIB, MIB, BenchError, Setting, Subject, subject

MODES = ("read", "write", "both")
MADV_COLLAPSE = 25
# What DeepSpeed's own sweep (ds_io) tries, and overlap_events.
SWEEP = {
    "block_size": (1 * MIB, 8 * MIB),
    "queue_depth": (32, 128),
    "single_submit": (False, True),
    "overlap_events": (False, True),
    "intra_op_parallelism": (1, 2, 4, 8),
}
SWEEP_ROUNDS = 3


class Mover(ABC):
    """Moves tensors between memory and the file: all are asked for at once, then waited for."""

    @abstractmethod
    def move(self, reads: range, writes: range) -> None:
        """Read the tensors of these numbers, write those: tensor ``i`` rests at ``i`` times its size."""

    def rate(self, mode: str, num_tensors: int, tensor_bytes: int) -> dict[str, float]:
        """GiB/s and CPU seconds a GiB. "both": one half is read while the other is written."""
        reads = range({"read": num_tensors, "write": 0, "both": num_tensors // 2}[mode])
        cpu, start = time.process_time(), time.perf_counter()
        self.move(reads, range(len(reads), num_tensors))
        seconds, gib = time.perf_counter() - start, num_tensors * tensor_bytes / GIB
        return {"gib_per_s": gib / seconds, "cpu_seconds_per_gib": (time.process_time() - cpu) / gib}


class Ours(Mover):
    def __init__(self, it: Subject, setting: Setting, memory: Memory, tensor_bytes: int) -> None:
        self._queue = Queue(setting.backend, setting.depth, setting.block_bytes, num_threads=min(setting.depth, 256))
        self._queue.register_memory(memory.address, memory.nbytes)
        self._file = self._queue.register_file(it.fd)
        self._memory, self._nbytes = memory, tensor_bytes

    def move(self, reads: range, writes: range) -> None:
        at, nbytes = self._memory.address, self._nbytes
        tickets = [self._queue.read(self._file, i * nbytes, at + i * nbytes, nbytes) for i in reads]
        tickets += [self._queue.write(self._file, i * nbytes, at + i * nbytes, nbytes) for i in writes]
        for ticket in tickets:
            ticket.wait(300)


class DeepSpeed(Mover):
    """Two handles, as its optimizer swapper has: one alone would read first and then write."""

    def __init__(self, it: Subject, setting: dict[str, Any], tensors: list[Any]) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        aio = AsyncIOBuilder().load(verbose=False)
        self._reader, self._writer = aio.aio_handle(**setting), aio.aio_handle(**setting)
        self._name = f"/proc/{os.getpid()}/fd/{it.fd}"
        self._tensors = tensors

    def move(self, reads: range, writes: range) -> None:
        nbytes = self._tensors[0].numel()
        for i in reads:
            self._reader.async_pread(self._tensors[i], self._name, i * nbytes)
        for i in writes:
            self._writer.async_pwrite(self._tensors[i], self._name, i * nbytes)
        if reads and self._reader.wait() != len(reads):
            raise BenchError("DeepSpeed did not read everything")
        if writes and self._writer.wait() != len(writes):
            raise BenchError("DeepSpeed did not write everything")


@contextmanager
def locked_tensors(count: int, nbytes: int, huge_pages: bool) -> Iterator[list[Any]]:
    """Pinned tensors as DeepSpeed makes them, or moved to 2 MiB pages afterwards, which it does not do by itself."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    aio = AsyncIOBuilder().load(verbose=False)
    allocator = aio.aio_handle()
    tensors = [allocator.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)) for _ in range(count)]
    if huge_pages:
        libc = ctypes.CDLL(None, use_errno=True)
        for tensor in tensors:
            start = -(-tensor.data_ptr() // (2 * MIB)) * 2 * MIB
            length = (tensor.data_ptr() + nbytes - start) // (2 * MIB) * 2 * MIB
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_COLLAPSE)
    yield tensors
    for tensor in tensors:
        allocator.free_cpu_locked_tensor(tensor)


def best_of_deepspeed(it: Subject, tensors: list[Any], bar: tqdm[None]) -> dict[str, Any]:
    """The settings with the least time for reads, writes and both together."""
    settings = [dict(zip(SWEEP, values, strict=True)) for values in itertools.product(*SWEEP.values())]
    few = tensors[: max(2, len(tensors) // 4)]
    seconds: list[list[float]] = [[] for _ in settings]
    for turn in range(SWEEP_ROUNDS):
        for setting, found in zip(settings, seconds, strict=True):
            bar.set_description(f"DeepSpeed, {turn + 1} of {SWEEP_ROUNDS}: {setting}")
            mover = DeepSpeed(it, setting, few)
            found.append(sum(1 / mover.rate(mode, len(few), few[0].numel())["gib_per_s"] for mode in MODES))
            bar.update()
    medians = [statistics.median(found) for found in seconds]
    return settings[medians.index(min(medians))]


def compare(it: Subject, options: argparse.Namespace, bar: tqdm[None]) -> dict[str, Any]:
    count, nbytes = options.tensors, options.tensor_mib * MIB
    with it.range(Setting("threads", MIB, 4)) as range_:
        range_.measure("write", it.nbytes)
        it.bytes_per_s = range_.measure("read", it.nbytes // 4).bytes_per_s
    setting = search(it, bar, [name for name in available_backends() if name != "portable"], full=False)
    with (
        Memory(count * nbytes) as memory,
        locked_tensors(count, nbytes, huge_pages=False) as plain,
        locked_tensors(count, nbytes, huge_pages=True) as huge,
    ):
        memory.populate()
        theirs = best_of_deepspeed(it, huge, bar)
        movers: dict[str, Mover] = {
            "ours": Ours(it, setting, memory, nbytes),
            "deepspeed": DeepSpeed(it, theirs, plain),
            "deepspeed, huge pages": DeepSpeed(it, theirs, huge),
        }
        samples: dict[str, dict[str, list[dict[str, float]]]] = {name: {m: [] for m in MODES} for name in movers}
        for turn in range(options.turns):
            for mode in MODES:
                bar.set_description(f"{mode} {turn + 1} of {options.turns}")
                for name in list(movers)[turn % 3 :] + list(movers)[: turn % 3]:
                    samples[name][mode].append(movers[name].rate(mode, count, nbytes))
                bar.update()
        return {
            "tensors": count,
            "tensor_bytes": nbytes,
            "settings": {"ours": str(setting), "deepspeed": theirs},
            "huge_bytes": {
                "ours": memory.huge_bytes(),
                "deepspeed": sum(huge_bytes(t.data_ptr(), nbytes) for t in plain),
                "deepspeed, huge pages": sum(huge_bytes(t.data_ptr(), nbytes) for t in huge),
            },
            "samples": samples,
        }


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['tensors']} tensors of {result['tensor_bytes'] // MIB} MiB; {result['settings']}")
    print(f"{'':24}{'':6}{'GiB/s':>7}{'spread':>16}{'ours is':>9}{'CPU s/GiB':>11}")
    medians = {
        name: {mode: statistics.median(s["gib_per_s"] for s in samples) for mode, samples in modes.items()}
        for name, modes in result["samples"].items()
    }
    for mode in MODES:
        for name, modes in result["samples"].items():
            rates = sorted(sample["gib_per_s"] for sample in modes[mode])
            cpu = statistics.median(sample["cpu_seconds_per_gib"] for sample in modes[mode])
            spread = f"{rates[0]:.2f} to {rates[-1]:.2f}"
            times = medians["ours"][mode] / medians[name][mode]
            print(f"{name:24}{mode:6}{medians[name][mode]:7.2f}{spread:>16}{times:8.2f}x{cpu:11.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("path", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--tensors", type=int, default=8, help="moved at a time (default 8)")
    parser.add_argument("--tensor-mib", type=int, default=128, help="the size of each (default 128)")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument("--json", action="store_true", help="print one object for programs")
    options = parser.parse_args()
    try:
        import deepspeed
    except ImportError:
        print(json.dumps({"deepspeed": None}) if options.json else "DeepSpeed is not installed here")
        return 0
    try:
        with (
            subject(options.path, options.tensors * options.tensor_mib * MIB, any_file_system=False) as it,
            tqdm(disable=True if options.json else None, leave=False, file=sys.stderr) as bar,
        ):
            result = compare(it, options, bar)
    except (BenchError, OSError, ValueError) as error:
        print(f"aio_peers: {error}", file=sys.stderr)
        return 1
    result["deepspeed"] = deepspeed.__version__
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
