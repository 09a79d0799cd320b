"""DeepSpeed as a rival: on the CPU in ``bench_step.py``, beside a GPU in ``gpu_batches.py``.

Source of the settings: DeepSpeed's documentation of ``zero_optimization``, ``bf16`` and ``aio``; its tutorials on
ZeRO-Offload; its own tuner's range for ``aio``. On the CPU those of ``TRIALS`` are tried, and the fastest compete; its
buffers are counted so that no run can abort for want of one: one for every parameter that may be swapped, each as large
as the largest. Beside a GPU it competes with ``ZERO``, and was not tuned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from _step_model import Shape
from _step_rank import begin_alone
from torch import Tensor, nn

Settings = dict[str, Any]

TRIALS: dict[str, list[Settings]] = {
    "deepspeed_cpu": [{"pin_memory": True}, {"pin_memory": False}],
    "deepspeed_nvme": [
        {"offload_param": "nvme"},
        {"offload_param": "cpu"},
        {"offload_param": "cpu", "pin_memory": False},
        {"offload_param": "cpu", "pipeline": True, "buffer_count": 8},
        {"offload_param": "cpu", "pipeline": True, "buffer_count": 12, "sub_group_size": 50_000_000},
        {"offload_param": "cpu", "io_threads": 4},
    ],
}

_PERSISTENT_NUMEL = 100_000
"""DeepSpeed's default: parameters up to this stay in memory."""

_TO_RAM = {"device": "cpu", "pin_memory": True}

_OVERLAPPED = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 200_000_000}
"""Gradients leave during backward, in buckets of so many elements: about a layer of 4,096."""

ZERO: dict[str, Settings] = {
    "deepspeed": {
        "stage": 3,
        "offload_optimizer": _TO_RAM,
        "offload_param": _TO_RAM,
        "stage3_prefetch_bucket_size": 200_000_000,
        **_OVERLAPPED,
    },
    "deepspeed_zero2": {"stage": 2, "offload_optimizer": _TO_RAM, **_OVERLAPPED},
}
"""``zero_optimization`` beside a GPU: weights in RAM, too, or on the device. The rest is DeepSpeed's default."""


class DeepSpeed:
    """One engine of DeepSpeed in this process, of one rank."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        device = torch.device(request["device"])
        os.environ |= {"DS_ACCELERATOR": device.type, "RANK": "0", "LOCAL_RANK": str(device.index or 0)}
        os.environ |= {"WORLD_SIZE": "1"}
        begin_alone(device)
        import deepspeed

        torch.manual_seed(0)
        deepspeed.init_distributed(verbose=False)
        config = config_of(shape, request)
        model = _model(shape, config, device)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())

    def settle(self) -> None:
        """Nothing runs behind a step."""

    def facts(self) -> dict[str, Any]:
        return {"parameters": self.num_parameters}

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DeepSpeedOffload(DeepSpeed):
    """The same beside a GPU, with a count of what it keeps in RAM."""

    def facts(self) -> dict[str, Any]:
        kept = [tensor for tensor in self._kept() if tensor.device.type == "cpu"]
        return {**super().facts(), "host_memory_bytes": sum(tensor.nbytes for tensor in kept)}

    def _kept(self) -> Iterable[Tensor]:
        """Masters, their gradients and moments; weights, and gradients of weights, in the precision of compute."""
        zero = self._engine.optimizer
        in_ram = hasattr(zero, "fp32_partitioned_groups_flat")  # stage 3
        for master in zero.fp32_partitioned_groups_flat if in_ram else zero.single_partition_of_fp32_groups:
            moments = zero.optimizer.state[master].values()
            yield from (tensor for tensor in (master, master.grad, *moments) if isinstance(tensor, Tensor))
        if in_ram:
            yield from (*zero.fp16_partitioned_groups_flat, zero.grad_partitions_flat_buffer)
        else:
            yield from zero.param_buffer_of_bit16_for_cpu_offload_groups


def _model(shape: Shape, config: dict[str, Any], device: torch.device) -> nn.Module:
    """The model where DeepSpeed wants it: each parameter in its home as soon as it is made, or all on the device."""
    import deepspeed

    if config["zero_optimization"]["stage"] == 3:
        # Without dtype: given one, it is ignored on the CPU's accelerator, and the weights become bf16.
        with deepspeed.zero.Init(config_dict_or_path=config):
            return shape.model()
    with device:
        return shape.model()


def config_of(shape: Shape, request: dict[str, Any]) -> dict[str, Any]:
    zero = ZERO.get(request["system"])
    config = {
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_clipping": request["clipping"],
        "bf16": {"enabled": request["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    }
    if zero is not None:  # no other system here looks for infinities in bf16
        return {**config, "bf16": {**config["bf16"], "check_grad_overflow": False}, "zero_optimization": zero}
    return {**config, **_config_of_trial(shape, request)}


def _config_of_trial(shape: Shape, request: dict[str, Any]) -> dict[str, Any]:
    settings = request["settings"]
    with torch.device("meta"):
        sizes = {p: p.numel() for p in shape.model().parameters()}.values()
    common = {"nvme_path": request["nvme_path"], "pin_memory": settings.get("pin_memory", True)}
    on_nvme = request["system"] == "deepspeed_nvme"
    pipeline = settings.get("pipeline", False)
    swapped = sum(size > _PERSISTENT_NUMEL for size in sizes)
    return {
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": settings.get("io_threads", 1)},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": _PERSISTENT_NUMEL,
            "sub_group_size": settings.get("sub_group_size", 1_000_000_000),
            "offload_optimizer": {
                **common,
                "device": "nvme" if on_nvme else "cpu",
                "pipeline_read": pipeline,
                "pipeline_write": pipeline,
                "buffer_count": settings.get("buffer_count", 4),
            },
            "offload_param": {
                **common,
                "device": settings.get("offload_param", "cpu"),
                "buffer_count": swapped + 1,
                "buffer_size": max(sizes) + 1024,
            },
        },
    }
