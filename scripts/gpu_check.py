#!/usr/bin/env python3
"""The engine on a machine with a GPU, CUDA, PyTorch and build tools, without a network.

    python scripts/gpu_check.py [PART...] [--limit 580] [--out build/gpu] [--nvme DIR]

Builds in place, tests, measures. Each part is processes of its own, and what it has found is in ``OUT/gpu_check.json``
as soon as it is over, so that a machine that is taken away loses one part at most. What a call has left (failed, too
slow, not begun) comes first in the next call with that file. It prints what a reader wants first, then a line for each
part. A part gets what those before it have left of the limit; one that takes too long is interrupted, so that it can
say where it was, and then ended.

With ``LIBURING_ROOT``, or ``.deps/liburing`` in the project, it builds with an unpacked liburing-dev.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _gpu_report

_ROOT = Path(__file__).resolve().parents[1]
_GRACE_S = 10
"""Seconds for an interrupted part to say where it was."""

_PYTEST = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
_SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no"]
_GPU_TESTS = ["tests/offload/test_cuda.py", "tests/kernels/test_gpu.py", "tests/kernels/test_gpu_assembly.py"]
_STEP = [
    *("scripts/bench_step.py", "--device", "cuda", "--precision", "bf16", "--checkpointing", "--context", "2048"),
    *("--rounds", "1", "--warm-up", "2", "--steps", "4", "--json"),
]


@dataclass(frozen=True)
class Part:
    """A command, with arguments of this interpreter unless it names a program, and the seconds that it may take."""

    name: str
    seconds: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    """It needs so many."""

    def argv(self, nvme: Path) -> list[str]:
        command = [argument.format(nvme=nvme) for argument in self.command]
        return [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else command


def _step(name: str, seconds: int, *arguments: str) -> Part:
    return Part(f"bench-{name}", seconds, [*_STEP, "--nvme-path", "{nvme}", *arguments])


_IN_RAM = ["--size", "llama:16x2048", "--batch", "4", "--context", "1024"]
_SEVEN = ["--systems", "engine", "--sizes", "llama:32x4096", "--device-memory", "16GiB", "--budgets", "all"]
_EIGHT_LAYERS = ["--systems", "in_memory", "--sizes", "llama:8x4096", "--clipping", "0"]
_THREE = ["--systems", "engine", "--sizes", "llama:26x3072", "--device-memory", "12GiB", "--budgets", "24GiB"]

PARTS = (
    Part("build", 240, ["scripts/_gpu_build.py"]),
    Part("kernels", 90, ["scripts/bench_gpu_kernels.py", "--json"]),
    Part("probe", 120, ["scripts/gpu_probe.py", "--json"]),
    Part("tests", 240, ["scripts/_each_test.py", "--jobs", "6", "--seconds", "90", *_GPU_TESTS]),
    Part("same-bits", 120, ["scripts/gpu_same_bits.py", *_IN_RAM]),
    Part("same-bits-blocking", 120, ["scripts/gpu_same_bits.py", *_IN_RAM], {"CUDA_LAUNCH_BLOCKING": "1"}),
    *(_step(f"8-layers-batch-{n}", 90, *_EIGHT_LAYERS, "--batch", str(n)) for n in (1, 4, 8)),
    *(_step(f"7b-batch-{n}", 240, *_SEVEN, "--batch", str(n), "--clipping", "0") for n in (1, 4, 8)),
    _step("3b-nvme", 240, *_THREE, "--batch", "4", "--clipping", "0", "1"),
    _step("peers", 240, "--sizes", "llama:16x2048", "--batch", "4"),  # those that are installed
    Part("soak", 120, ["scripts/soak.py", "--device", "cuda", "--steps", "150", "--nvme-path", "{nvme}"]),
    Part("ranks-tests", 200, [*_PYTEST, "tests/ranks/test_cuda.py", "tests/ranks/test_on_device.py"], gpus=2),
    Part("ranks-bench", 200, ["scripts/bench_ranks.py", "--device", "cuda", "--model", "16x2048"], gpus=2),
    Part("races", 90, [*_SANITIZER, "--tool", "racecheck", sys.executable, *_PYTEST, _GPU_TESTS[0], "-k", "squares"]),
    Part(
        "memory",
        240,
        [
            *(*_SANITIZER, "--tool", "memcheck", "--track-stream-ordered-races", "all"),
            *(sys.executable, *_PYTEST, _GPU_TESTS[0], "-k", "same_bits and 1-bf16"),
        ],
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},  # torch's own pool hides what is used too late
    ),
)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--limit", type=float, default=580, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu", help="a folder for what was found")
    parser.add_argument("--nvme", type=Path, help="a folder on the SSD to use (default: a new one in $TMPDIR)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for line in missing():
        print(f"missing: {line}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        check = Check(options.out, options.nvme or Path(made), time.monotonic() + options.limit)
        for part in in_order(check.result, options.parts):
            check.run(part)
            print(_gpu_report.line_of(check.result["parts"][part.name]), flush=True)
    print("", *_gpu_report.summary(check.result), "", *_gpu_report.runs_table(check.result["runs"]), sep="\n")
    print(json.dumps(check.result))
    return int(any(part["code"] != 0 for part in check.result["parts"].values()))


def missing() -> Iterator[str]:
    """Modules and tools that parts need and that are not here, and for what."""
    for module, use in (("torch", "everything"), ("numpy", "everything"), ("pytest", "tests"), ("xxhash", "the store")):
        if importlib.util.find_spec(module) is None:
            yield f"the module {module}, for {use}"
    for tools, use in (
        (("cmake",), "build"),
        (("make", "ninja"), "build"),
        (("c++", "g++", "clang++"), "build"),
        (("compute-sanitizer",), "races and memory"),
    ):
        if not any(map(shutil.which, tools)):
            yield f"the program {' or '.join(tools)}, for {use}"
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            yield "a GPU that torch can use: every part but build fails"


def in_order(result: Mapping[str, Any], wanted: Sequence[str]) -> list[Part]:
    """The parts to run: ``build`` first, then what an earlier call has left, then the rest."""
    done = {name for name, part in result["parts"].items() if part["code"] == 0}
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    return sorted(parts, key=lambda part: (part.name != "build", part.name in done))


class Check:
    """One call: it runs parts, and keeps what they have found, with what earlier calls have."""

    def __init__(self, out: Path, nvme: Path, ends: float) -> None:
        self._out, self._nvme, self._ends = out, nvme, ends
        self._written = out / "gpu_check.json"
        self.result: dict[str, Any] = {"parts": {}, "rates": {}, "runs": []}
        if self._written.exists():
            self.result |= json.loads(self._written.read_text())

    def run(self, part: Part) -> None:
        """Run it in what time is left, and save the result."""
        log = self._out / f"{part.name}.log"
        started = time.monotonic()
        left = min(self._ends - started, part.seconds)
        if part.gpus > 1 and _num_gpus() < part.gpus:
            log.write_text(f"needs {part.gpus} GPUs")
            code = 0
        elif left < _GRACE_S:
            log.write_text("no time was left")
            code = 124
        else:
            code = _run(part, self._nvme, log, left)
        _gpu_report.add(self.result, self._out, part.name, code, int(time.monotonic() - started))
        unfinished = self._written.with_suffix(".new")
        unfinished.write_text(json.dumps(self.result))
        unfinished.replace(self._written)
        with tarfile.open(self._out / "logs.tgz", "w:gz") as logs:
            for path in sorted(self._out.glob("*.log")):
                logs.add(path, path.name)


def _run(part: Part, nvme: Path, log: Path, seconds: float) -> int:
    """Its exit status; 124 if it was interrupted, 127 if there is no such program."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **part.environment,
    }
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                part.argv(nvme), cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        except FileNotFoundError as error:
            output.write(str(error))
            return 127
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return 124


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
