"""Set-ups that others have published with their speed, and what ``offload plan`` forecasts for this engine on the same
hardware: data, and the table of docs/plan.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from offload.predict import known
from offload.predict.architecture import Architecture
from offload.predict.machine import Machine, described, parse_drive
from offload.predict.model import Model, from_architecture, from_count
from offload.predict.prediction import Batches, Prediction, predict
from offload.predict.variants import AS_WEIGHTS, Lora
from offload.predict.workload import Workload

_TIB = 1 << 40
_FAR = 0.2
"""A forecast that is further off than this share has a reason beside it."""


@dataclass(frozen=True)
class Setup:
    """A published step. ``model`` is a known name or a number of parameters; ``batch`` that of a GPU and a micro-batch,
    0: the largest that fits; ``published`` are tokens a second. ``reason`` says why the forecast is another."""

    system: str
    model: str | float
    gpu: str
    published: float
    reason: str = ""
    gpus: int = 1
    host_bytes: int = _TIB
    drive: str = ""
    memory_bandwidth: float = 200e9
    batch: int = 0
    sequence: int = 2048
    micro_batches: int = 1
    lora: bool = False

    def plain_model(self) -> Model:
        """Without adapters."""
        if not isinstance(self.model, str):
            return from_count(int(self.model))
        shapes = Architecture.of_config(known.configs()[self.model])
        assert shapes is not None
        return from_architecture(self.model, shapes)

    def machine(self) -> Machine:
        drives = [parse_drive(self.drive)] if self.drive else []
        return described(
            self.gpu, host_bytes=self.host_bytes, gpus=self.gpus, drives=drives, memory_bandwidth=self.memory_bandwidth
        )

    def forecast(self) -> Prediction:
        """Of this engine, activations recomputed."""
        model, machine = self.plain_model(), self.machine()
        if self.lora:
            model = model.with_adapters(Lora(), AS_WEIGHTS)
        workload = Workload(
            batch=max(self.batch, 1),
            sequence=self.sequence,
            micro_batches=self.micro_batches,
            activations="recompute",
        )
        if not self.batch:
            largest = Batches.of(predict(model, machine, workload)).largest
            workload = replace(workload, batch=max(largest, 1))
        return predict(model, machine, workload)

    def row(self) -> str:
        """In Markdown."""
        found = self.forecast()
        speed = found.tokens_per_second
        gpus = f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu
        name = self.model if isinstance(self.model, str) else f"{self.model / 1e9:g}B"
        kind = "LoRA" if self.lora else "full"
        deviation = speed / self.published - 1
        assert self.reason or abs(deviation) <= _FAR, f"{self.system}, {name}: {deviation:+.0%} without a reason"
        return (
            f"| {self.system} | {name}, {kind} | {gpus} | {self.published:,.0f} | {speed:,.0f} ({found.limit}) | "
            f"{deviation:+.0%} | {self.reason if abs(deviation) > _FAR else ''} |"
        )


def _of_flops(tflops: float, parameters: float, a_parameter: int = 6) -> float:
    """Tokens a second of published TFLOPS, of ``a_parameter`` FLOP for each parameter and token."""
    return tflops * 1e12 / (a_parameter * parameters)


_KEPT = (
    "at its speed recomputing all would take {} TFLOPS, and the peak is 165: it keeps activations; here all are "
    "recomputed"
)
_H100S: dict[str, Any] = {
    "gpu": "h100", "gpus": 4, "host_bytes": 372 * 10**9, "batch": 1,
}  # fmt: skip

SETUPS = (
    Setup("RoundPipe", "qwen3-1.7b", "rtx4090", 8881),
    Setup("RoundPipe", "llama-3.1-8b", "rtx4090", 3142, _KEPT.format(202)),
    Setup("RoundPipe", "qwen3-32b", "rtx4090", 740, _KEPT.format(194)),
    Setup("RoundPipe", "qwen3-235b-a22b", "rtx4090", 480, "all experts come over PCIe for each 8,192 tokens here; with "
          "activations in host memory more tokens share a pass", lora=True),
    Setup("RoundPipe", "llama-3.1-8b", "rtx4090", 24_275, "the same as with one GPU", gpus=8),
    Setup("RoundPipe", "qwen3-32b", "rtx4090", 5516, "the same; and ranks gather weights from each other over PCIe",
          gpus=8),
    Setup("KTransformers", "deepseek-v3", "l40s", 40.35, "two RTX 4090 of 48 GB there, for which the "
          "L40S stands; it computes experts on the CPU, here all of them pass PCIe for each 2,048 tokens",
          host_bytes=1331 << 30, lora=True, batch=1, micro_batches=4),
    Setup("MegaTrain", "qwen2.5-7b", "h100", _of_flops(272, 7.6e9),
          "it reached 28 % of the peak at 6 FLOP a parameter and token; 45 % is assumed"),
    Setup("Fuyou", 13e9, "rtx4090", _of_flops(156, 13e9, 8), host_bytes=768 << 30, drive="12GB/s,10GB/s,8TB"),
    Setup("ZeRO-Offload", 10e9, "v100", _of_flops(40, 10e9, 8), "it reached 32 % of the peak; 40 % is assumed",
          sequence=1024),
    Setup("ZeRO-Infinity", 70e9, published=8192 / 371, reason="it writes gradients in fp32, keeps no state in host "
          "memory, and updates after backward", drive="6.9GB/s,5.3GB/s,8TB", **_H100S),
    Setup("MLP-Offload", 70e9, published=8192 / 151, reason="it reads and writes nearly all states; here host memory "
          "has a third of them", drive="10.5GB/s,8.9GB/s,8TB", **_H100S),
)  # fmt: skip
"""RoundPipe: its README, arXiv:2604.27085; host memory and batch are not told. KTransformers: its page on fine-tuning.
MegaTrain: its README. Fuyou: arXiv:2403.06504, ZeRO-Offload: arXiv:2101.06840, both at 8 FLOP a parameter and token.
ZeRO-Infinity and MLP-Offload: arXiv:2509.02480 and its artifact, with the host memory that was used there."""


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield "| system | model | GPUs | published, tokens/s | forecast for this engine (limit) | deviation | why |"
    yield "|" + "---|" * 7
    for setup in SETUPS:
        yield setup.row()
