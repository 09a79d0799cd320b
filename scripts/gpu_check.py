#!/usr/bin/env python3
"""The engine on a machine with a GPU, CUDA, PyTorch and build tools, without a network.

    python scripts/gpu_check.py [PART...] [--limit 570] [--out build/gpu] [--nvme DIR]

Builds in place, tests, measures. Each part is processes of its own, and what it has found is in ``OUT/gpu_check.json``
as soon as it is over, so that a machine that is taken away loses one part at most; ``OUT/logs.tgz`` has what they said.
The next call with that folder, or with a copy of it on another machine, does what the calls before it have left: what
failed, was too slow or was not begun. For all of it again take another folder, or name the parts. It prints a line for
each part, and last what a reader wants to know. A part gets what those before it have left of the limit, and is not
begun with less than a third of what it may take; one that takes too long is interrupted, so that it can say where it
was, and then ended.

With ``LIBURING_ROOT``, or ``.deps/liburing`` in the project, it builds with an unpacked liburing-dev. What another
machine has built of the same sources, with a Python of the same version, is taken (``scripts/_gpu_build.py``).
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
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _gpu_report

_ROOT = Path(__file__).resolve().parents[1]
_GRACE_S = 10
"""Seconds for an interrupted part to say where it was."""

_PYTEST = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
_SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no"]
_GPU_TESTS = "tests/offload/test_cuda.py"
"""The others run without a GPU, and have."""

_NOT_HERE, _NOT_BEGUN = 77, 75
"""In place of an exit status: this machine has not the GPUs for the part; no time was left for it."""


@dataclass(frozen=True)
class Part:
    """A command, with arguments of this interpreter unless it names a program, and the seconds that it may take."""

    name: str
    seconds: int
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    """It needs so many."""

    def argv(self, nvme: Path, logs: Path) -> list[str]:
        command = [argument.format(nvme=nvme, logs=logs) for argument in self.command]
        return [sys.executable, *command] if command[0].endswith(".py") or command[0] == "-m" else command


_BATCHES = ["scripts/gpu_batches.py", "--batches", "1", "4", "8"]
_PEERS = [
    *("scripts/gpu_batches.py", "--sizes", "llama:16x4096", "--batches", "4", "--warm-up", "1", "--seconds", "60"),
    *("--system", "engine", "deepspeed", "fsdp2", "torchao_offload"),
    *("--device-memory", "3GiB", "auto"),  # no layer is resident; all of it where there is room
]
_NVME = [
    *("scripts/gpu_batches.py", "--sizes", "llama:16x2048", "--batches", "4", "--warm-up", "2", "--steps", "4"),
    *("--device-memory", "4GiB", "--host-memory", "6GiB", "--nvme-path", "{nvme}", "--timeline", "{logs}"),
]

PARTS = (
    Part("build", 240, ["scripts/_gpu_build.py"]),
    Part("kernels", 90, ["scripts/bench_gpu_kernels.py", "--json"]),
    Part("probe", 120, ["scripts/gpu_probe.py", "--json"]),
    Part("tests", 240, ["scripts/_each_test.py", "--seconds", "90", _GPU_TESTS]),
    Part("programs", 90, ["scripts/gpu_programs.py", "--seconds", "40"]),
    Part("same-bits", 120, ["scripts/gpu_same_bits.py"]),
    Part("same-bits-blocking", 120, ["scripts/gpu_same_bits.py"], {"CUDA_LAUNCH_BLOCKING": "1"}),
    Part("layers", 90, [*_BATCHES, "--system", "in_memory", "--sizes", "llama:4x4096", "llama:8x4096"]),
    Part("7b", 300, [*_BATCHES, "--sizes", "llama:32x4096", "--device-memory", "16GiB", "--timeline", "{logs}"]),
    Part("disk", 60, ["-m", "offload", "bench", "{nvme}", "--no-fio", "--no-profile", "--pairs", "1"]),
    Part("nvme", 120, _NVME),
    Part("nvme-clipped", 120, [*_NVME, "--clipping", "1"]),
    Part("peers", 220, _PEERS),
    Part("trainers", 100, ["scripts/gpu_trainers.py"]),
    Part("low-bits", 120, ["scripts/gpu_low_bits.py"]),
    Part("soak", 120, ["scripts/soak.py", "--device", "cuda", "--steps", "150", "--nvme-path", "{nvme}"]),
    Part("ranks-tests", 200, [*_PYTEST, "tests/ranks/test_cuda.py", "tests/ranks/test_on_device.py"], gpus=2),
    Part("ranks-bench", 200, ["scripts/bench_ranks.py", "--device", "cuda", "--model", "16x2048"], gpus=2),
    Part("races", 90, [*_SANITIZER, "--tool", "racecheck", sys.executable, *_PYTEST, _GPU_TESTS, "-k", "squares"]),
    Part(
        "memory",
        240,
        [
            *(*_SANITIZER, "--tool", "memcheck", "--track-stream-ordered-races", "all"),
            *(sys.executable, *_PYTEST, _GPU_TESTS, "-k", "same_bits and 1-bf16"),
        ],
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},  # torch's own pool hides what is used too late
    ),
)


def main() -> int:
    started = time.monotonic()
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--limit", type=float, default=570, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu", help="a folder for what was found")
    parser.add_argument("--nvme", type=Path, help="a folder on the SSD to use (default: a new one in $TMPDIR)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for line in missing():
        print(f"missing: {line}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        check = Check(options.out, options.nvme or Path(made), started + options.limit)
        for part in in_order(check.result, options.parts):
            has_run = check.run(part)
            of_before = "" if has_run else "  (of an earlier call: no time was left)"
            print(_gpu_report.line_of(check.result["parts"][part.name]) + of_before, flush=True)
    print("", *_gpu_report.summary(check.result), "", *_gpu_report.runs_table(check.result["runs"]), sep="\n")
    return int(any(part["code"] not in (0, _NOT_HERE) for part in check.result["parts"].values()))


def missing() -> Iterator[str]:
    """Modules and tools that parts need and that are not here, and for what."""
    everything, modules = "everything", ("torch", "numpy", "tqdm", "xxhash")
    for module, use in (*((module, everything) for module in modules), ("pytest", "tests")):
        if importlib.util.find_spec(module) is None:
            yield f"the module {module}, for {use}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "the header Python.h, for build, unless what it makes was carried"
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
    """The parts to run: ``build`` first, as the machine may be another one, then what earlier calls have begun and not
    brought to its end, then what no call has begun. Those that are ``wanted`` by name run in any case."""
    codes = {name: part["code"] for name, part in result["parts"].items()}

    def is_done(part: Part) -> bool:
        return part.name != "build" and codes.get(part.name) in (0, _NOT_HERE)

    parts = [part for part in PARTS if (part.name in wanted if wanted else not is_done(part))]
    return sorted(parts, key=lambda part: (part.name != "build", codes.get(part.name, _NOT_BEGUN) == _NOT_BEGUN))


class Check:
    """One call: it runs parts, and keeps what they have found, with what earlier calls have."""

    def __init__(self, out: Path, nvme: Path, ends: float) -> None:
        self._out, self._nvme, self._ends = out, nvme, ends
        self._written, self._packed = out / "gpu_check.json", out / "logs.tgz"
        self.result: dict[str, Any] = {"parts": {}, "rates": {}, "runs": []}
        if self._written.exists():
            self.result |= json.loads(self._written.read_text())

    def run(self, part: Part) -> bool:
        """Run it in what time is left, and save the result. False: what an earlier call has seen of it stays."""
        with tempfile.TemporaryDirectory() as folder:
            logs = Path(folder)
            if self._packed.exists():
                with tarfile.open(self._packed) as packed:
                    packed.extractall(logs, filter="data")
            has_run = self._run(part, logs)
            _replace(self._packed, lambda path: _pack(logs, path))
        _replace(self._written, lambda path: path.write_text(json.dumps(self.result)))
        return has_run

    def _run(self, part: Part, logs: Path) -> bool:
        log, started = logs / f"{part.name}.log", time.monotonic()
        left = self._ends - started
        if _num_gpus(part) < part.gpus:
            log.write_text(f"needs {part.gpus} GPUs")
            code = _NOT_HERE
        elif left < part.seconds / 3:
            if part.name in self.result["parts"]:
                return False  # what an earlier call has seen of it says more
            log.write_text("no time was left")
            code = _NOT_BEGUN
        else:
            code = _run(part, self._nvme, logs, min(left, part.seconds))
        _gpu_report.add(self.result, logs, part.name, code, int(time.monotonic() - started))
        return True


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have the file written as a whole: a reader finds the old one or the new one."""
    unfinished = path.with_suffix(".new")
    write(unfinished)
    unfinished.replace(path)


def _pack(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name)


def _run(part: Part, nvme: Path, logs: Path, seconds: float) -> int:
    """Its exit status; 124 if it was interrupted, 127 if there is no such program."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **part.environment,
    }
    with (logs / f"{part.name}.log").open("w") as output:
        try:
            process = subprocess.Popen(
                part.argv(nvme, logs), cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
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


def _num_gpus(part: Part) -> int:
    """GPUs that are here, where a part needs several: torch is asked for no others."""
    if part.gpus == 1:
        return 1
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
