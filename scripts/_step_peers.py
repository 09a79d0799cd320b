"""Other systems that keep states in host memory beside a GPU: peers of the engine in ``gpu_batches.py``.

Each is set up as its own documentation has it for one GPU. What they keep, a parameter, in bf16:

- ``fsdp2``: weights, gradients and moments in fp32, all on the host: 16 bytes. Weights are cast on the device.
- ``deepspeed``: ZeRO-3; weights and their gradients, and in fp32 masters, gradients and moments, all on the host: 20
  bytes.
- ``deepspeed_zero2``: weights and their gradients on the device, the rest and a buffer for new weights on the host: 18
  bytes.
- ``torchao_offload``: weights on the device and on the host, gradients and moments on the host, all in bf16: 10 bytes.
  There is no master weight, so that small updates are lost.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from _step_deepspeed import ZERO, DeepSpeedOffload
from _step_model import Shape
from _step_rank import begin_alone
from torch import Tensor, nn

ADAMW = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}


class _Peer:
    """A loop of plain PyTorch over what a peer has made of model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def settle(self) -> None:
        """Nothing runs behind a step."""

    def facts(self) -> dict[str, Any]:
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": num_parameters, "host_memory_bytes": _host_bytes(self._kept())}

    def close(self) -> None:
        pass

    def _kept(self) -> Iterable[Tensor | None]:
        """Weights, gradients and moments, as they are after a step."""
        raise NotImplementedError


class FSDP2(_Peer):
    """``fully_shard`` of each block and of the root over one rank, with all of it offloaded to pinned memory."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        device = torch.device(request["device"])
        on_gpu = device.type != "cpu"
        begin_alone(device)
        dtype = torch.bfloat16 if request["precision"] == "bf16" else None
        options = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        }
        with torch.device("meta"):
            self.model = shape.model()
        for block in self.model.get_submodule("blocks").children():
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.model.to_empty(device="cpu")
        for parameter in self.model.parameters():
            _draw(_local(parameter), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def close(self) -> None:
        torch.distributed.destroy_process_group()

    def _kept(self) -> Iterable[Tensor | None]:
        for parameter in self.model.parameters():
            kept = (parameter, parameter.grad, *self.optimizer.state[parameter].values())
            yield from map(_local, kept)


class TorchAOOffload(_Peer):
    """The model on the device; its gradients go to torchao's optimizer on the host during backward."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        from torchao.optim import CPUOffloadOptimizer

        with torch.device("meta"):
            self.model = shape.model()
        if request["precision"] == "bf16":
            self.model.to(torch.bfloat16)
        self.model.to_empty(device=request["device"])
        for parameter in self.model.parameters():
            _draw(parameter, parameter.device)
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, offload_gradients=True, **ADAMW
        )

    def _kept(self) -> Iterable[Tensor | None]:
        for optimizer in self.optimizer.optim_dict.values():
            for parameter, state in optimizer.state.items():
                yield from (parameter, parameter.grad, *state.values())


PEERS = {**dict.fromkeys(ZERO, DeepSpeedOffload), "fsdp2": FSDP2, "torchao_offload": TorchAOOffload}

_MODULES = {**dict.fromkeys(ZERO, "deepspeed"), "torchao_offload": "torchao"}


def missing_module(system: str) -> str | None:
    """The module that a system needs and that is not installed."""
    name = _MODULES.get(system)
    return name if name is not None and importlib.util.find_spec(name) is None else None


@torch.no_grad()
def _draw(weight: Tensor, device: torch.device) -> None:
    """Small random numbers, and ones for a norm, made where that is quick."""
    if weight.dim() == 1:
        weight.fill_(1.0)
    else:
        weight.copy_(torch.randn(weight.shape, device=device, dtype=weight.dtype).mul_(0.02))


def _local(tensor: Any) -> Any:
    """The part of a distributed tensor that this rank has."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def _host_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.device.type == "cpu")
