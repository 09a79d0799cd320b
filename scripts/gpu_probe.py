"""What decides the schedule on a machine with a GPU, in about a minute; with ``--json`` also a JSON object of all that
is known, as soon as more is.

    python scripts/gpu_probe.py [--gib 8] [--json]

The CPU's Adam by threads; drawing random numbers; faulting in and registering memory; the link in each way, both ways,
in pieces of a unit, of a tile and of a small tile, alone, beside matrix products and beside the CPU's Adam, which works
in the same host memory; what each call costs the thread that makes it; how far a thread may run ahead of the device
before a launch blocks; whether segments are expandable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aio_ext import Memory
from offload import kernels
from offload.device.protocol import Device
from offload.memory import fault_in, tensor_at
from offload.native_optimizers import AdamCoef

_ADAM_NUMEL = 1 << 26
_ADAM_BYTES = 26
"""Read and written for an element: bf16 gradient, weight and rest, fp32 moments."""
_MIB = 1 << 20
_LINK_BYTES = 4 << 30
_PRODUCT_WIDTH = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8, help="host memory to register")
    parser.add_argument("--json", action="store_true", help="print one JSON object behind the lines")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, value in probe(options.gib << 30):
        found[name] = value
        print(f"{name:<24}{value}", flush=True)
        if options.json:
            print(json.dumps(found), flush=True)
    return int(not torch.cuda.is_available())


def probe(nbytes: int) -> Iterator[tuple[str, Any]]:
    yield "adam_gb_per_s", adam_by_threads(os.cpu_count() or 1)
    yield "normal_ns", normal_ns()
    if torch.cuda.is_available():
        from offload.device.cuda import CudaDevice

        yield from of_device(CudaDevice(torch.device("cuda")), nbytes)


def adam_by_threads(cores: int) -> dict[str, float]:
    """The kernel's bytes a second, best of three, by its number of threads."""
    found = {}
    for num_threads in sorted({*(1 << power for power in range(8) if 1 << power <= cores), cores}):
        step = adam(num_threads)
        taken = [seconds(step) for _ in range(3)]
        found[str(num_threads)] = round(_ADAM_BYTES * _ADAM_NUMEL / min(taken) / 1e9, 1)
    return found


def adam(num_threads: int) -> Callable[[], object]:
    """One step of the CPU's kernel."""
    arrays = {name: torch.zeros(_ADAM_NUMEL, dtype=torch.bfloat16) for name in ("grad", "weight", "rest")}
    arrays |= {name: torch.zeros(_ADAM_NUMEL) for name in ("exp_avg", "exp_avg_sq")}
    coef = AdamCoef(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=3, grad_scale=1.0)
    dtypes = {"grad_dtype": kernels.Dtype.BF16, "weight_dtype": kernels.Dtype.BF16}
    native = kernels.OnHost(kernels.always(num_threads))

    def step() -> None:
        addresses: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in arrays.items()}
        kernels.update(coef, _ADAM_NUMEL, **addresses, **dtypes, native=native)

    return step


def normal_ns() -> float:
    """Nanoseconds for a normal random number, on one thread."""
    tensor = torch.empty(1 << 24)
    return round(min(seconds(tensor.normal_) for _ in range(2)) / tensor.numel() * 1e9, 2)


def of_device(device: Device, nbytes: int) -> Iterator[tuple[str, Any]]:
    yield "gpu", device.identity
    memory = Memory(nbytes)
    faulting = seconds(lambda: fault_in(memory.address, nbytes, torch.get_num_threads()))
    yield "fault_in_s_per_gib", round(faulting * 2**30 / nbytes, 3)
    registering = seconds(lambda: device.pin(memory.address, nbytes))
    yield "register_s_per_gib", round(registering * 2**30 / nbytes, 3)
    try:
        host = tensor_at(memory.address, nbytes, torch.uint8)
        there = torch.empty(2 << 30, dtype=torch.uint8, device=device.torch_device)
        yield "expandable_segments", all(one.get("is_expandable") for one in torch.cuda.memory_snapshot())
        yield "link_gb_per_s", link(device, host, there)
        yield "link_beside_products", beside_products(device, host, there)
        yield "link_beside_adam", beside_adam(device, host, there)
        yield "call_us", calls(device, host, there)
        yield "launches_ahead", launches_ahead()
    finally:
        device.unpin(memory.address)


def link(device: Device, host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Each way, by the piece's MiB and the ways."""
    return {
        f"{piece} MiB, {ways}": round(_cross(device, host, there, piece * _MIB, ways), 1)
        for piece in (400, 32, 8, 1)
        for ways in ("in", "out", "in and out")
    }


def _cross(device: Device, host: torch.Tensor, there: torch.Tensor, piece: int, ways: str) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    _enqueue(device, host, there, piece, ways)
    for stream in (device.to_device, device.to_host):
        stream.record().wait()
    return _LINK_BYTES // piece * piece / (time.perf_counter() - started) / 1e9


def _enqueue(device: Device, host: torch.Tensor, there: torch.Tensor, piece: int, ways: str) -> None:
    half = there.numel() // 2
    for index in range(_LINK_BYTES // piece):
        start = index * piece % (half - piece + 1)
        if "in" in ways:
            device.to_device.copy(there[start : start + piece], host[start : start + piece])
        if "out" in ways:
            device.to_host.copy(host[half + start : half + start + piece], there[half + start : half + start + piece])


def beside_products(device: Device, host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Both ways in pieces of 400 MiB while the device multiplies: GB/s each way, and TFLOP/s."""
    left = torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device=device.torch_device, dtype=torch.bfloat16)
    torch.mm(left, left)
    torch.cuda.synchronize()
    started = time.perf_counter()
    _enqueue(device, host, there, 400 * _MIB, "in and out")
    ends = [stream.record() for stream in (device.to_device, device.to_host)]
    products = 0
    while not all(end.done() for end in ends):
        for _ in range(8):
            torch.mm(left, left)
        products += 8
        torch.cuda.current_stream().synchronize()
    taken = time.perf_counter() - started
    crossed = _LINK_BYTES // (400 * _MIB) * 400 * _MIB
    return {
        "gb_per_s": round(crossed / taken / 1e9, 1),
        "tflop_per_s": round(products * 2 * _PRODUCT_WIDTH**3 / taken / 1e12),
    }


def beside_adam(device: Device, host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Both ways in pieces of 32 MiB while the CPU updates on all cores: GB/s each way, and the kernel's."""
    step = adam(os.cpu_count() or 1)
    step()
    torch.cuda.synchronize()
    started, steps = time.perf_counter(), 0
    _enqueue(device, host, there, 32 * _MIB, "in and out")
    ends = [stream.record() for stream in (device.to_device, device.to_host)]
    while not all(end.done() for end in ends):
        step()
        steps += 1
    taken = time.perf_counter() - started
    return {
        "link_gb_per_s": round(_LINK_BYTES / taken / 1e9, 1),
        "adam_gb_per_s": round(steps * _ADAM_BYTES * _ADAM_NUMEL / taken / 1e9, 1),
    }


def calls(device: Device, host: torch.Tensor, there: torch.Tensor) -> dict[str, float]:
    """Microseconds that each call keeps its thread."""
    storage = torch.UntypedStorage(0, device=device.torch_device)
    event = device.compute.record()

    def cycle() -> None:
        device.allocate(storage, 400 * _MIB)
        device.free(storage)

    found = {}
    for name, call in {
        "copy of 4 KiB": lambda: device.to_device.copy(there[:4096], host[:4096]),
        "record of an event": device.compute.record,
        "query of an event": event.done,
        "wait of a stream": lambda: device.to_device.wait(event),
        "allocate and free 400 MiB": cycle,
    }.items():
        found[name] = round(_microseconds(call), 2)
        torch.cuda.synchronize()
    return found


def launches_ahead() -> int:
    """Launches that a thread makes behind long kernels before one takes a millisecond."""
    long, short = torch.empty(1 << 28, device="cuda"), torch.empty(1 << 10, device="cuda")
    short.add_(1)  # whose kernel is loaded when it is launched first
    torch.cuda.synchronize()
    for _ in range(200):
        long.mul_(1.0)
    launched = 200
    while launched < 5000 and seconds(lambda: short.add_(1)) < 1e-3:
        launched += 1
    torch.cuda.synchronize()
    return launched


def _microseconds(call: Callable[[], object], times: int = 200) -> float:
    call()
    return seconds(lambda: [call() for _ in range(times)]) / times * 1e6


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
