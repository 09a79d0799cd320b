"""What the optimizer kernels, sums of squares and the link of a GPU reach, and whether the bits are those of the CPU.

    python scripts/bench_gpu_kernels.py [--device cuda] [--numel 6.7e7] [--rounds 5] [--json]

A kernel's share is its bytes a second (each array that it reads or writes counted once) over those of a copy within the
GPU's memory in the same run. The link is measured as the engine measures it, from host memory that is registered as the
engine's is, and from memory that is not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload import kernels
from offload.device.protocol import Device
from offload.dtypes import kernel_dtype
from offload.native_optimizers import AdagradCoef, AdamCoef, Coef, LionCoef, SgdCoef
from offload.tiers import bandwidth
from offload.tiers.window import DeviceWindow

_CHECKED = 100_003
"""Elements whose bits are compared: some threads have less than four of them."""

_PARAMETER = 1 << 24
"""Elements of a large matrix."""

_HYPER = {"lr": 1e-3, "weight_decay": 0.01, "grad_scale": 0.5}
_ADAM = AdamCoef(**_HYPER, beta1=0.9, beta2=0.999, eps=1e-8, step=3)
_LION = LionCoef(**_HYPER, beta1=0.9, beta2=0.99, step=2)
_ADAGRAD = AdagradCoef(**_HYPER, lr_decay=0.1, eps=1e-10, step=2)
_SGD = SgdCoef(**_HYPER, momentum=0.0, dampening=0.0, step=2)
_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """An optimizer, and the dtypes of what it reads and writes. ``master``: what stands beside a 16-bit weight."""

    name: str
    coef: Coef
    weight: torch.dtype
    grad: torch.dtype
    master: str = ""
    moments: torch.dtype = _F32

    def arrays(self) -> dict[str, torch.dtype]:
        """The dtypes of all arrays by the names that the kernel's function has for them."""
        beside = {"": {}, "rest": {"rest": _BF16}, "master": {"master": _F32}}[self.master]
        return {"grad": self.grad, "weight": self.weight, **beside, **dict.fromkeys(self.coef.states, self.moments)}

    def bytes_per_element(self) -> int:
        """Read and written: a gradient is read, and a weight beside a whole master is written."""
        once = self.grad.itemsize + (self.weight.itemsize if self.master == "master" else 0)
        all_bytes = sum(dtype.itemsize for dtype in self.arrays().values())
        return once + 2 * (all_bytes - once)


CASES = (
    Case("AdamW bf16", _ADAM, _BF16, _BF16, "rest"),
    Case("AdamW fp32", _ADAM, _F32, _F32),
    Case("AdamW fp16", _ADAM, _F16, _F16, "master"),
    Case("AdamW bf16, moments bf16", _ADAM, _BF16, _BF16, "rest", _BF16),
    Case("Lion bf16", _LION, _BF16, _BF16, "rest"),
    Case("Adagrad fp32", _ADAGRAD, _F32, _F32),
    Case("SGD bf16", _SGD, _BF16, _BF16, "rest"),
)


def measure(device: Device, numel: int, rounds: int) -> dict[str, Any]:
    """Everything, in the units of its names. ``numel`` elements are timed, ``rounds`` times."""
    copy = _copy_gb_per_s(device, numel, rounds)
    rows = [_of_case(device, case, numel, rounds) for case in CASES]
    rows += [_of_squares(device, dtype, numel, rounds) for dtype in (_BF16, _F32)]
    for row in rows:
        row["share"] = row["gb_per_s"] / copy
    return {"numel": numel, "rounds": rounds, "copy_gb_per_s": copy, "kernels": rows, "link": _link(device, numel)}


def _of_case(device: Device, case: Case, numel: int, rounds: int) -> dict[str, Any]:
    there = _step(case, _arrays(device, case, _CHECKED), device.compute.kernel)
    here = _step(case, _arrays(None, case, _CHECKED), kernels.on_host)
    equal = all(torch.equal(there[name].cpu().view(torch.uint8), here[name].view(torch.uint8)) for name in here)
    arrays = _arrays(device, case, numel)
    seconds = _seconds(device, lambda: _step(case, arrays, device.compute.kernel), rounds)
    return {"name": case.name, "same_bits": equal, "gb_per_s": case.bytes_per_element() * numel / seconds / 1e9}


def _step(
    case: Case, arrays: dict[str, torch.Tensor], native: Callable[[str], kernels.Kernel]
) -> dict[str, torch.Tensor]:
    dtypes = {"grad_dtype": kernel_dtype(case.grad), "weight_dtype": kernel_dtype(case.weight)}
    if case.coef.states:
        dtypes["moments_dtype"] = kernel_dtype(case.moments)
    addresses = {name: tensor.data_ptr() for name, tensor in arrays.items()}
    kernels.update(case.coef, len(arrays["grad"]), **addresses, **dtypes, native=native)
    return arrays


def _of_squares(device: Device, dtype: torch.dtype, numel: int, rounds: int) -> dict[str, Any]:
    checked, found = _squares(device, dtype, _CHECKED)
    checked()
    host = _fill(None, _CHECKED, dtype, 1)
    equal = found.tolist() == [kernels.sum_squares(host.data_ptr(), _CHECKED, kernel_dtype(dtype))]
    seconds = _seconds(device, _squares(device, dtype, numel)[0], rounds)
    name = f"squares {str(dtype).removeprefix('torch.')}"
    return {"name": name, "same_bits": equal, "gb_per_s": numel * dtype.itemsize / seconds / 1e9}


def _squares(device: Device, dtype: torch.dtype, numel: int) -> tuple[Callable[[], None], torch.Tensor]:
    """What adds up the squares of parameters of ``_PARAMETER`` elements, and where the sums will be."""
    starts = range(0, numel, _PARAMETER)
    rows = [[start, min(_PARAMETER, numel - start), start // kernels.SQUARES_BLOCK] for start in starts]
    source = _fill(device, numel, dtype, 1)
    ranges = _tensor(device, 3 * len(rows), torch.int64).view(len(rows), 3)
    ranges.copy_(torch.tensor(rows))
    lanes = _tensor(device, -(-numel // kernels.SQUARES_BLOCK) * kernels.SQUARES_LANES, torch.float64)
    sums = _tensor(device, len(rows), torch.float64)
    return lambda: device.compute.sum_squares(source, ranges, lanes, sums), sums


def _copy_gb_per_s(device: Device, numel: int, rounds: int) -> float:
    source, target = (_fill(device, numel, _F32, seed) for seed in (1, 2))
    return 2 * source.nbytes / _seconds(device, lambda: device.compute.copy(target, source), rounds) / 1e9


def _link(device: Device, numel: int) -> dict[str, float]:
    nbytes = -(-4 * numel // mmap.PAGESIZE) * mmap.PAGESIZE
    rates = {}
    for name in ("pinned", "not_pinned"):
        memory = mmap.mmap(-1, nbytes)
        host = torch.frombuffer(memory, dtype=torch.float32)
        host.fill_(1)
        if name == "pinned":
            device.pin(host.data_ptr(), nbytes)
        window = DeviceWindow(len(host), torch.float32, device)
        window.close()  # it is given its memory again where it is measured
        found = bandwidth.measure_link(device, window, host.data_ptr(), len(host))
        if name == "pinned":
            device.unpin(host.data_ptr())
        rates |= {f"{name}_to_device_gb_per_s": found.to_device / 1e9, f"{name}_to_host_gb_per_s": found.to_host / 1e9}
    return rates


def _seconds(device: Device, run: Callable[[], object], rounds: int) -> float:
    """The median of several turns, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        before = device.compute.record()
        run()
        after = device.compute.record()
        after.wait()
        taken.append(after.seconds_since(before))
    return statistics.median(taken[1:])


def _arrays(device: Device | None, case: Case, numel: int) -> dict[str, torch.Tensor]:
    filled = {name: _fill(device, numel, dtype, seed) for seed, (name, dtype) in enumerate(case.arrays().items())}
    for name in case.coef.states:
        filled[name].abs_()  # a second moment is not negative
    return filled


def _fill(device: Device | None, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same numbers on the host and on a device."""
    part = torch.randn(min(numel, 1 << 20), generator=torch.Generator().manual_seed(seed)).to(dtype)
    tensor = torch.empty(numel, dtype=dtype) if device is None else _tensor(device, numel, dtype)
    for start in range(0, numel, len(part)):
        tensor[start : start + len(part)].copy_(part[: numel - start])
    return tensor


def _tensor(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    storage = torch.UntypedStorage(0, device=device.torch_device)
    device.allocate(storage, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device.torch_device).set_(storage, 0, (numel,))  # type: ignore[call-overload,no-any-return]


def table(result: dict[str, Any]) -> list[str]:
    """What a person reads."""
    lines = [f"a copy in the GPU's memory: {result['copy_gb_per_s']:,.0f} GB/s, read and written"]
    for row in result["kernels"]:
        bits = "the bits of the CPU" if row["same_bits"] else "OTHER BITS"
        lines.append(f"{row['name']:<26}{row['gb_per_s']:>9,.0f} GB/s {row['share']:>7.0%} of a copy   {bits}")
    for name, rate in result["link"].items():
        lines.append(f"{name.removesuffix('_gb_per_s').replace('_', ' '):<26}{rate:>9,.1f} GB/s")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--numel", type=float, default=float(1 << 26), help="elements that are timed (default: 2^26)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object behind the table")
    options = parser.parse_args()
    from offload.device.cuda import CudaDevice

    result = measure(CudaDevice(torch.device(options.device)), int(options.numel), options.rounds)
    print(*table(result), sep="\n")
    if options.json:
        print(json.dumps(result))
    return int(not all(row["same_bits"] for row in result["kernels"]))


if __name__ == "__main__":
    sys.exit(main())
