#!/usr/bin/env python3
"""The same faults for DeepSpeed's swap path and for `swapper`: what does each do?

DeepSpeed's side is its `PartitionedOptimizerSwapper`, as its optimizer calls it, in the environment of `--python`; ours
is a store without a name, whose extents have one place. Each fault strikes a process of its own: values are written,
something happens to the file or to the device, values are read. Some need root and loop devices, and are skipped
without.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

NUMEL = 4 << 20
NBYTES = 4 * NUMEL
MIB = 1 << 20


class System(Protocol):
    """Holds tensors of ``NUMEL`` floats of one value each, by number."""

    def write(self, number: int, value: float) -> None: ...
    def read(self, number: int) -> bool:
        """True if every element has the value that was written last."""

    def place(self, number: int) -> tuple[str, int]:
        """The file that holds the tensor, and the offset in it."""


class DeepSpeed:
    """Tensors as the fp32 parameters of an optimizer on NVMe."""

    def __init__(self, path: str) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
        import deepspeed
        import torch
        from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
        from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

        deepspeed.init_distributed("gloo")
        self._torch = torch
        config = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path=path, buffer_count=4)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
        self._folder = path
        self._swapper = PartitionedOptimizerSwapper(
            config, get_aio_config({}), path, optimizer, NUMEL, torch.device("cpu"), torch.float32, None
        )
        self._parameters: dict[int, Any] = {}
        self._values: dict[int, float] = {}

    def write(self, number: int, value: float) -> None:
        self._values[number] = value
        if number not in self._parameters:
            parameter = self._torch.nn.Parameter(self._torch.full((NUMEL,), value))
            parameter.ds_id = number
            self._parameters[number] = parameter
            self._swapper.initialize_parameters([parameter], [parameter.data.clone()])
            return
        parameter = self._parameters[number]
        self._swapper.swap_in_optimizer_state(parameter)
        parameter.data.fill_(value)
        self._swapper.swap_out_optimizer_state(parameter)

    def read(self, number: int) -> bool:
        parameter = self._parameters[number]
        self._swapper.swap_in_optimizer_state(parameter)
        return bool((parameter.data == self._values[number]).all())

    def place(self, number: int) -> tuple[str, int]:
        return f"{self._folder}/optimizer/rank0/{number}.tensor.swp", 0


class Swapper:
    """Tensors as extents of one place in a store without a name."""

    def __init__(self, path: str) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from swapper import Arena, create_store

        self._store = create_store([path], None, [NBYTES] * 4, places=0)
        self._arena = Arena(NBYTES)
        self._address = self._arena.lease(NBYTES).address
        self._values: dict[int, float] = {}

    def write(self, number: int, value: float) -> None:
        self._values[number] = value
        self._fill(value)
        self._store.write(self._store.extents[number], self._address, NBYTES).wait()

    def read(self, number: int) -> bool:
        self._store.read(self._store.extents[number], self._address, NBYTES).wait()
        seen = ctypes.string_at(self._address, NBYTES)
        self._fill(self._values[number])
        return seen == ctypes.string_at(self._address, NBYTES)

    def place(self, number: int) -> tuple[str, int]:
        own = Path(f"/proc/{os.getpid()}/fd").iterdir()
        file = next(entry for entry in own if entry.is_symlink() and "/#" in str(entry.readlink()))
        return str(file), self._store.extents[number].offset

    def _fill(self, value: float) -> None:
        ctypes.memmove(self._address, (ctypes.c_float * 1024)(*[value] * 1024), 4096)
        for done in (4096 << n for n in range(12)):
            ctypes.memmove(self._address + done, self._address, done)


def flipped_bit(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    _change(system.place(0), lambda data: bytes([data[0] ^ 1]) + data[1:])
    return system.read(0)


def files_exchanged(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    system.write(1, 2.0)
    one, two = _bytes(system.place(0)), _bytes(system.place(1))
    _change(system.place(0), lambda _: two)
    _change(system.place(1), lambda _: one)
    return system.read(0)


def write_lost(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    before = _bytes(system.place(0))
    system.write(0, 2.0)
    _change(system.place(0), lambda _: before)
    return system.read(0)


def file_cut_short(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    path, offset = system.place(0)
    with Path(path).open("r+b") as file:
        file.truncate(offset + NBYTES // 2)
    return system.read(0)


def second_job_on_the_path(make: Callable[[], System], image: str) -> bool:
    first = make()
    first.write(0, 1.0)
    second = make()
    second.write(0, 2.0)
    return first.read(0)


def file_size_limit(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES // 2, NBYTES // 2))
    system.write(0, 2.0)
    return system.read(0)


def disk_full(make: Callable[[], System], image: str) -> bool:
    system = make()
    for number in range(4):
        system.write(number, 1.0)
    return all(system.read(number) for number in range(4))


def device_fails_reads(make: Callable[[], System], image: str) -> bool:
    system = make()
    system.write(0, 1.0)
    os.truncate(image, 8 * MIB)
    return system.read(0)


def killed(make: Callable[[], System], image: str) -> bool:
    make().write(0, 1.0)
    os.kill(os.getpid(), signal.SIGKILL)
    return False


CASES = {case.__name__: case for case in (
    flipped_bit, files_exchanged, write_lost, file_cut_short, second_job_on_the_path, file_size_limit, disk_full,
    device_fails_reads, killed,
)}  # fmt: skip
ROOM = {"disk_full": 40 * MIB, "device_fails_reads": 400 * MIB}
"""Cases that need a file system of their own, and how much the disk under it really holds."""


def _bytes(place: tuple[str, int]) -> bytes:
    path, offset = place
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(NBYTES)


def _change(place: tuple[str, int], change: Callable[[bytes], bytes]) -> None:
    path, offset = place
    data = change(_bytes(place))
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def _child(system: str, case: str, path: str, image: str) -> None:
    kind: Callable[[str], System] = DeepSpeed if system == "deepspeed" else Swapper
    try:
        right = CASES[case](lambda: kind(path), image)
        outcome = "right" if right else "WRONG NUMBERS, no error"
    except BaseException as error:
        text = (str(error).splitlines() or [""])[0]
        outcome = f"{type(error).__name__}: {text}"
    print("outcome " + json.dumps(outcome), flush=True)
    os._exit(0)


def _outcome(python: str, system: str, case: str, path: str, image: str) -> str:
    command = [python, __file__, "--child", system, case, path, image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "hangs (120 s)"
    found = [line for line in done.stdout.splitlines() if line.startswith("outcome ")]
    text = str(json.loads(found[-1][8:])) if found else f"the process dies: {_last_words(done)}"
    if case == "killed":
        left = sum(len(files) for _, _, files in os.walk(path))
        return f"{left} files left on the path"
    return text.replace(path, "PATH")


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
    return f"{name}, {lines[-1][:120] if lines else 'no word'}"


def _place_for(case: str, closing: contextlib.ExitStack) -> tuple[str, str]:
    if case not in ROOM:
        return closing.enter_context(tempfile.TemporaryDirectory()), ""
    from store_real_faults import _mounted

    path = closing.enter_context(_mounted(400 * MIB, ROOM[case]))
    return str(path), str(path.parent / "room" / "image")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the interpreter of an environment that has deepspeed")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.child:
        _child(*arguments.child)
    systems = {"swapper": sys.executable} | ({"deepspeed": arguments.python} if arguments.python else {})
    table: dict[str, dict[str, str]] = {}
    for case in CASES:
        for system, python in systems.items():
            with contextlib.ExitStack() as closing:
                try:
                    table.setdefault(case, {})[system] = _outcome(python, system, case, *_place_for(case, closing))
                except Exception as reason:
                    table.setdefault(case, {})[system] = f"skipped: {reason}"
            if not arguments.json:
                print(f"{case:<24}{system:<11}{table[case][system]}", flush=True)
    if arguments.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
