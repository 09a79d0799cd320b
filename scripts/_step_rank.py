"""What peers on one device begin with: a process group of this process alone, and memory that is pinned quickly."""

from __future__ import annotations

import os

import torch
from torch.distributed import HashStore, init_process_group

_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Several threads fault the pages in: peers pin tens of GiB before their first step. torch 2.10 and later read it when
CUDA is first used."""


def begin_alone(device: torch.device) -> None:
    """One rank whose store is in memory: no port is opened, and no other host is asked for."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", _PINNING)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the machine may have no other network
    init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
