"""DeepSpeed ZeRO-3 on the CPU accelerator as a rival in ``bench_step.py``, and the settings that are tried for it.

Source of the settings: DeepSpeed's documentation of ``zero_optimization`` and ``aio``; its own tuner's range for the
latter. What is tried is in ``TRIALS``; the fastest of them competes. Buffers are counted so that no run can abort for
want of one: one for every parameter that may be swapped, each as large as the largest.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from _step_model import Shape
from torch import Tensor

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


class DeepSpeed:
    """One engine of DeepSpeed in this process, on gloo with one rank."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        import deepspeed

        torch.manual_seed(0)
        config = _config(shape, request)
        deepspeed.init_distributed("gloo", verbose=False)
        # Without dtype: given one, it is ignored on this accelerator, and the weights become bf16.
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = shape.model()
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.num_parameters = sum(parameter.ds_numel for parameter in model.parameters())

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


def _config(shape: Shape, request: dict[str, Any]) -> dict[str, Any]:
    settings = request["settings"]
    with torch.device("meta"):
        sizes = {p: p.numel() for p in shape.model().parameters()}.values()
    common = {"nvme_path": request["nvme_path"], "pin_memory": settings.get("pin_memory", True)}
    on_nvme = request["system"] == "deepspeed_nvme"
    pipeline = settings.get("pipeline", False)
    swapped = sum(size > _PERSISTENT_NUMEL for size in sizes)
    return {
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_clipping": request["clipping"],
        "bf16": {"enabled": request["precision"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
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
