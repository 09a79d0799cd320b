"""Steps of several GPUs that others have published, with the hardware that they took: data, and the forecast for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from offload.predict.machine import described
from offload.predict.model import Model, from_count
from offload.predict.prediction import Prediction, predict
from offload.predict.workload import Workload

_PLENTY = 1 << 50
"""Bytes. Memory is no limit here: where these systems keep activations is not this engine's way."""


@dataclass(frozen=True)
class System:
    """Whose it is, and on what: ``network`` is what a node sends and receives, bytes a second each way."""

    name: str
    gpu: str
    gpus_a_node: int
    network: float


@dataclass(frozen=True)
class Step:
    """One published step: its model, and of each GPU the batch and what it reached, in TFLOPS or tokens a second."""

    system: System
    parameters: float
    layers: int
    width: int
    vocabulary: int
    gpus: int
    batch: int
    sequence: int
    tflops: float | None = None
    tokens_per_second: float | None = None
    micro_batches: int = 1
    recomputed: bool = True
    shard: Literal["states", "gradients", "weights"] = "weights"

    @property
    def flops_a_token(self) -> float:
        """As the systems count them, recomputed forwards included: arXiv:2104.04473, equation 3."""
        layers, width = self.layers, self.width
        attention, head = self.sequence / (6 * width), self.vocabulary / (16 * layers * width)
        return (96 if self.recomputed else 72) * layers * width**2 * (1 + attention + head)

    @property
    def measured(self) -> float:
        """Tokens a second of one GPU."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        assert self.tflops is not None
        return self.tflops * 1e12 / self.flops_a_token

    @cached_property
    def prediction(self) -> Prediction:
        """With gradients that are added up inside of nodes, and no rounds before collectives, as NCCL has it."""
        system = self.system
        machine = described(
            system.gpu,
            host_bytes=_PLENTY,
            gpus=min(system.gpus_a_node, self.gpus),
            nodes=max(self.gpus // system.gpus_a_node, 1),
            network=system.network,
            added_inside=True,
        )
        machine = replace(
            machine,
            device=replace(machine.device, memory_bytes=_PLENTY),
            network=replace(machine.network, wait_seconds=0.0),
        )
        workload = Workload(
            batch=self.batch,
            sequence=self.sequence,
            micro_batches=self.micro_batches,
            activations="recompute" if self.recomputed else "keep",
            shard=self.shard,
        )
        return predict(_model(int(self.parameters), self.layers, self.width, self.vocabulary), machine, workload)

    @property
    def predicted(self) -> float:
        """Tokens a second of one GPU."""
        return self.prediction.tokens_per_second / self.gpus


@cache
def _model(parameters: int, layers: int, width: int, vocabulary: int) -> Model:
    return from_count(parameters, layers, width, vocabulary)


MEGATRON = System("DeepSpeed ZeRO-3, as Megatron-LM's authors ran it", "a100", 8, 200e9)
"""arXiv:2104.04473, table 2: Selene, DGX A100 with eight HDR InfiniBand cards each."""

FSDP = System("PyTorch FSDP on AWS p4d", "a100-40", 8, 50e9)
"""Belevich et al., "Training a 1 Trillion Parameter Model With PyTorch Fully Sharded Data Parallel on AWS", 2022."""

FMS = System("PyTorch FSDP, fms-fsdp", "a100", 8, 50e9)
"""README of foundation-model-stack/fms-fsdp: Llama 2 on 128 A100, 400 Gb/s."""

INTERNLM = System("InternLM, ZeRO-1", "a100", 8, 50e9)
"""doc/en/train_performance.md of InternLM: 4 x 100 Gb/s RoCE, four micro-batches of two sequences on each GPU."""

DEEPSPEED = System("ZeRO-3 Offload", "v100", 16, 100e9)
"""DeepSpeed's post of 2021-03-08: 32 DGX-2; their network: arXiv:1910.02054, section 10.1. Neither layers nor batch are
given; layers and width are those of a trillion in arXiv:2104.04473, and the batch bears on nothing: compute limits."""

_175B: dict[str, Any] = {
    "system": MEGATRON,
    "parameters": 174.6e9,
    "layers": 96,
    "width": 12_288,
    "vocabulary": 51_200,
    "sequence": 2048,
}
_530B: dict[str, Any] = {
    "system": MEGATRON,
    "parameters": 529.6e9,
    "layers": 105,
    "width": 20_480,
    "vocabulary": 51_200,
    "sequence": 2048,
}
_1T: dict[str, Any] = {"parameters": 1008e9, "layers": 128, "width": 25_600, "vocabulary": 51_200}
_7B: dict[str, Any] = {
    "system": INTERNLM, "parameters": 7.3e9, "layers": 32, "width": 4096, "vocabulary": 103_168, "batch": 2,
    "micro_batches": 4, "sequence": 2048, "recomputed": False, "shard": "states",
}  # fmt: skip

STEPS = (
    Step(**_175B, gpus=384, batch=4, tflops=144),
    Step(**_175B, gpus=768, batch=2, tflops=88),
    Step(**_175B, gpus=1536, batch=1, tflops=44),
    Step(**_530B, gpus=640, batch=4, tflops=138),
    Step(**_530B, gpus=1120, batch=2, tflops=98),
    Step(**_530B, gpus=2240, batch=1, tflops=48),
    Step(FSDP, 175e9, 96, 12_288, 50_000, gpus=128, batch=20, sequence=512, tflops=159),
    Step(**_1T, system=FSDP, gpus=128, batch=4, sequence=2048, tflops=84),
    Step(**_1T, system=FSDP, gpus=512, batch=4, sequence=2048, tflops=81),
    Step(FMS, 34e9, 48, 8192, 32_000, gpus=128, batch=8, sequence=4096, tokens_per_second=772),
    Step(FMS, 70e9, 80, 8192, 32_000, gpus=128, batch=6, sequence=4096, tokens_per_second=380),
    Step(**_7B, gpus=8, tokens_per_second=4078),
    Step(**_7B, gpus=128, tokens_per_second=3928),
    Step(**_7B, gpus=1024, tokens_per_second=3625),
    Step(**_1T, system=DEEPSPEED, gpus=512, batch=4, sequence=1024, tflops=49),
)
