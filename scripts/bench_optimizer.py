"""Measure the optimizer kernels against a stream of the same shape and against their peers, interleaved, in one run.

    python scripts/bench_optimizer.py --numel 1e6 1e7 1e8 --threads 1 2

The stream reads and writes the same arrays and does no arithmetic: it is what memory allows. States come from I/O and
are used once a step, so they are cold: a small size is measured over as many sets of arrays as fill ``--cold-bytes``,
several times the last-level cache. Peers: ``torch.optim.AdamW(fused=True)``, and where they are installed DeepSpeed's
CPU Adam and torchao's 8-bit AdamW.

A job is the whole update: gradient in bf16, unscaled and clipped, fp32 AdamW, weight out in bf16; ours is one kernel
call. Peers need further passes and are charged for them: torch three (upcast, fused step with ``grad_scale``,
downcast), DeepSpeed, whose step takes no scale, four (upcast, scale, step, downcast).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offload.kernels import CODE_BLOCK, ISA, Dtype, OnHost, _kernels, always, update
from offload.native_optimizers import AdamCoef

COEF = AdamCoef(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, grad_scale=0.5)
HUGE_PAGE = 2 << 20


@dataclass
class Case:
    """One thing to measure: its name, its work on one set of arrays, and the seconds that each round took."""

    name: str
    run: Callable[[dict[str, torch.Tensor]], None]
    seconds: list[float] = field(default_factory=list)


def allocate(layout: dict[str, int], num_sets: int) -> list[dict[str, torch.Tensor]]:
    """Sets of byte tensors in huge pages, filled with small numbers (in fp32, in bf16 and as codes)."""
    set_bytes = sum(-(-size // 4096) * 4096 for size in layout.values())
    memory = mmap.mmap(-1, num_sets * set_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat[: flat.numel() // 4 * 4].view(torch.int32).fill_(0x3A003A00)  # about 5e-4
    offset = -flat.data_ptr() % HUGE_PAGE
    sets = []
    for _ in range(num_sets):
        arrays = {}
        for name, size in layout.items():
            arrays[name] = flat[offset : offset + size]
            offset += -(-size // 4096) * 4096
        sets.append(arrays)
    return sets


def adam_of(num_threads: int, numel: int, grad: str, formats: dict[str, Any], names: dict[str, str]) -> Any:
    """The kernel call: ``names`` maps its arguments to arrays."""
    native = OnHost(always(num_threads))

    def run(arrays: dict[str, torch.Tensor]) -> None:
        addresses: dict[str, Any] = {argument: arrays[name].data_ptr() for argument, name in names.items()}
        grad_dtype = Dtype.F32 if grad == "grad" else Dtype.BF16
        update(
            COEF,
            numel,
            grad=arrays[grad].data_ptr(),
            grad_dtype=grad_dtype,
            native=native,
            **addresses,
            **formats,
        )

    return run


def stream_of(num_threads: int, numel: int, grad: str, split: bool) -> Any:
    def run(arrays: dict[str, torch.Tensor]) -> None:
        address = {name: array.data_ptr() for name, array in arrays.items()}
        weight, rest = (address["weight16"], address["rest"]) if split else (address["weight"], 0)
        states = [address["exp_avg"], address["exp_avg_sq"], 0]
        grad_dtype = Dtype.F32 if grad == "grad" else Dtype.BF16
        args = (numel, address[grad], grad_dtype.value, weight, rest, address["weight"], int(split), states, 0)
        _kernels.stream(*args, num_threads)

    return run


def torch_step(arrays: dict[str, torch.Tensor], grad_scale: float | None) -> None:
    names = ("weight", "grad", "exp_avg", "exp_avg_sq")
    weight, grad, exp_avg, exp_avg_sq = ([arrays[name].view(torch.float32)] for name in names)
    torch._fused_adamw_(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        [],
        [torch.tensor(3.0)],
        lr=COEF.lr,
        beta1=COEF.beta1,
        beta2=COEF.beta2,
        weight_decay=COEF.weight_decay,
        eps=COEF.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if grad_scale is None else torch.tensor(grad_scale),
        found_inf=None if grad_scale is None else torch.tensor(0.0),
    )


def torch_job(arrays: dict[str, torch.Tensor]) -> None:
    arrays["grad"].view(torch.float32).copy_(arrays["grad16"].view(torch.bfloat16))
    torch_step(arrays, 1 / COEF.grad_scale)
    arrays["weight16"].view(torch.bfloat16).copy_(arrays["weight"].view(torch.float32))


def peer_of(make: Callable[[torch.nn.Parameter], Any], sets: list[dict[str, torch.Tensor]]) -> Any:
    """A peer's bare fp32 step: an optimizer of its own for every set of arrays."""
    optimizers = {}
    for arrays in sets:
        parameter = torch.nn.Parameter(arrays["weight"].view(torch.float32))
        parameter.grad = arrays["grad"].view(torch.float32)
        optimizers[arrays["weight"].data_ptr()] = make(parameter)
    return lambda arrays: optimizers[arrays["weight"].data_ptr()].step()


def deepspeed_of(sets: list[dict[str, torch.Tensor]]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    return peer_of(lambda parameter: DeepSpeedCPUAdam([parameter], lr=COEF.lr, weight_decay=COEF.weight_decay), sets)


def torchao_of(sets: list[dict[str, torch.Tensor]]) -> Any:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    return peer_of(lambda parameter: AdamW8bit([parameter], lr=COEF.lr, weight_decay=COEF.weight_decay), sets)


def deepspeed_job_of(step: Callable[[dict[str, torch.Tensor]], None]) -> Any:
    def run(arrays: dict[str, torch.Tensor]) -> None:
        arrays["grad"].view(torch.float32).copy_(arrays["grad16"].view(torch.bfloat16))
        arrays["grad"].view(torch.float32).mul_(COEF.grad_scale)
        step(arrays)
        arrays["weight16"].view(torch.bfloat16).copy_(arrays["weight"].view(torch.float32))

    return run


def measure(numel: int, num_threads: int, rounds: int, cold_bytes: int, memory_bytes: int) -> dict[str, Any]:
    """Nanoseconds per parameter, median, least and most of the rounds, for every case that fits the memory."""
    blocks = -(-numel // CODE_BLOCK)
    layout = dict.fromkeys(("weight", "grad", "exp_avg", "exp_avg_sq"), 4 * numel)
    layout |= dict.fromkeys(("exp_avg_code", "exp_avg_sq_code"), numel)
    layout |= dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), 4 * blocks)
    jobs = 23 * numel <= memory_bytes
    if jobs:  # the bf16 arrays of their own; else in place of others, which split master does not use
        layout |= {"weight16": 2 * numel, "grad16": 2 * numel}
    num_sets = max(1, cold_bytes // sum(layout.values()))
    sets = allocate(layout, num_sets)
    for arrays in sets:
        arrays.setdefault("weight16", arrays["weight"][: 2 * numel])
        arrays.setdefault("grad16", arrays["grad"][: 2 * numel])
        arrays["rest"] = arrays["weight"][2 * numel :]

    torch.set_num_threads(num_threads)
    moments = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    codes = {name: f"{name}_code" for name in moments} | {f"{name}_scale": f"{name}_scale" for name in moments}
    f32, split = {"weight_dtype": Dtype.F32}, {"weight_dtype": Dtype.BF16}
    int8 = {"moments_dtype": Dtype.INT8}
    weight, split_weight = {"weight": "weight"}, {"weight": "weight16", "rest": "rest"}
    beside = {"weight": "weight16", "master": "weight"}

    def ours(grad: str, formats: dict[str, Any], names: dict[str, str]) -> Any:
        return adam_of(num_threads, numel, grad, formats, names)

    cases = [
        Case("stream", stream_of(num_threads, numel, "grad", split=False)),
        Case("adamw", ours("grad", f32, weight | moments)),
        Case("torch_fused", lambda arrays: torch_step(arrays, None)),
        Case("stream_split", stream_of(num_threads, numel, "grad16", split=True)),
        Case("adamw_split", ours("grad16", split, split_weight | moments)),
        Case("adamw_int8", ours("grad", f32 | int8, weight | codes)),
        Case("adamw_split_int8", ours("grad16", split | int8, split_weight | codes)),
    ]
    if jobs:
        cases += [Case("adamw_job", ours("grad16", split, beside | moments)), Case("torch_job", torch_job)]
    if importlib.util.find_spec("deepspeed") is not None:
        step = deepspeed_of(sets)
        cases.append(Case("deepspeed", step))
        if jobs:
            cases.append(Case("deepspeed_job", deepspeed_job_of(step)))
    if importlib.util.find_spec("torchao") is not None:
        cases.append(Case("torchao_int8", torchao_of(sets)))

    for round_index in range(rounds + 1):  # the first warms up
        for case in cases:
            start = time.perf_counter()
            for arrays in sets:
                case.run(arrays)
            if round_index > 0:
                case.seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {"numel": numel, "threads": num_threads, "isa": ISA, "sets": num_sets}
    peers = ("deepspeed", "deepspeed_job", "torchao_int8")
    for name in (*(case.name for case in cases), "adamw_job", "torch_job", *peers):
        result.setdefault(f"{name}_ns_per_param", None)
    for case in cases:
        samples = [seconds / num_sets / numel * 1e9 for seconds in case.seconds]
        result[f"{case.name}_ns_per_param"] = statistics.median(samples)
        result[f"{case.name}_samples"] = samples
    return result


def ratio(result: dict[str, Any], over: str, under: str) -> str:
    """How many times as fast ``under`` is as ``over``: the median of the ratios within a round."""
    if result[f"{over}_ns_per_param"] is None or result[f"{under}_ns_per_param"] is None:
        return "-"
    pairs = zip(result[f"{over}_samples"], result[f"{under}_samples"], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['numel']:,} parameters, {result['threads']} threads, {result['isa']}, {result['sets']} sets")
    print(f"  {'':18}{'median':>8}{'least':>8}{'most':>8}  ns per parameter")
    for key in [key for key in result if key.endswith("_samples")]:
        samples = result[key]
        values = f"{statistics.median(samples):8.3f}{min(samples):8.3f}{max(samples):8.3f}"
        print(f"  {key.removesuffix('_samples'):18}{values}")
    stream, split = ratio(result, "stream", "adamw"), ratio(result, "stream_split", "adamw_split")
    print(f"  of the stream: adamw {stream}, split {split}")
    int8, split_int8 = ratio(result, "adamw", "adamw_int8"), ratio(result, "adamw", "adamw_split_int8")
    print(f"  times as fast as fp32: int8 {int8}, split int8 {split_int8}")
    step, job = ratio(result, "torch_fused", "adamw"), ratio(result, "torch_job", "adamw_job")
    print(f"  times as fast as torch fused: step {step}, job {job}")
    step, job = ratio(result, "deepspeed", "adamw"), ratio(result, "deepspeed_job", "adamw_job")
    print(f"  times as fast as DeepSpeed: step {step}, job {job}")
    print(f"  int8 times as fast as torchao: {ratio(result, 'torchao_int8', 'adamw_int8')}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the optimizer kernels, in ns per parameter.")
    parser.add_argument("--numel", type=lambda text: int(float(text)), nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold-bytes", type=lambda text: int(float(text)), default=512 << 20)
    parser.add_argument("--memory-bytes", type=lambda text: int(float(text)), default=8 << 30)
    parser.add_argument("--json", action="store_true", help="one JSON object: the last result, and all `results`")
    arguments = parser.parse_args()

    if not arguments.json:
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}")
        print(
            f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {vars(arguments)}"
        )
    results = []
    for numel in arguments.numel:
        for num_threads in arguments.threads:
            with contextlib.redirect_stdout(sys.stderr):  # a peer's log must not end up in the JSON
                result = measure(numel, num_threads, arguments.rounds, arguments.cold_bytes, arguments.memory_bytes)
            results.append(result)
            if not arguments.json:
                show(result)
    if arguments.json:
        print(json.dumps({**results[-1], "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
