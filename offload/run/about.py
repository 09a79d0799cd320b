"""Identity of a run: versions, machine, options, model, plan and drives, as plain values."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aio_ext.profile import file_system, load_profile
from offload.config import OffloadConfig
from offload.plan.plan import Plan
from offload.ranks.topology import cpuinfo
from offload.report.report import Bandwidths
from offload.version import VERSION
from swapper import readable_bytes

FORMAT = 1


def about(config: OffloadConfig, plan: Plan, model: str, bandwidths: Bandwidths | None) -> dict[str, Any]:
    """All of it. ``model`` is the name of the model's class, ``bandwidths`` the store's."""
    return {
        "format": FORMAT,
        "versions": {
            "offload": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "Linux": platform.release(),
        },
        "machine": _machine(config),
        "options": {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)},
        "model": {
            "class": model,
            "parameters": plan.num_parameters,
            "units": len(plan.units),
            "state_bytes": plan.model_state_bytes,
            "fingerprint": fingerprint(plan),
        },
        "plan": str(plan).splitlines(),
        "memory": plan.memory,
        "budgets": {
            "device": plan.device.total_bytes,
            "host": plan.host_budget_bytes,
            "nvme": 0 if config.nvme_capacity == "auto" or not config.paths else config.nvme_capacity,
        },
        "bandwidths": None if bandwidths is None else dataclasses.asdict(bandwidths),
        "drives": [_drive(path) for path in config.paths],
    }


def fingerprint(plan: Plan) -> str:
    """The same for two models whose parameters have the same names and shapes."""
    specs = [(spec.name, tuple(spec.shape)) for item in plan.units for spec in item.unit.parameters]
    return hashlib.blake2b(repr(sorted(specs)).encode(), digest_size=8).hexdigest()


def _machine(config: OffloadConfig) -> dict[str, Any]:
    device = str(getattr(config.device, "torch_device", config.device))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "name": socket.gethostname(),
        "processor": cpuinfo().get("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": device if name is None else f"{device}, {name}",
    }


def _drive(path: Path) -> dict[str, Any]:
    """A path of the store, with what was measured on it before the run, if it was."""
    profile, status = load_profile(path), os.statvfs(path)
    return {
        "path": str(path),
        "file_system": file_system(path),
        "total_bytes": status.f_blocks * status.f_frsize,
        "profile": None if profile is None else dataclasses.asdict(profile),
    }


def _plain(value: object) -> Any:
    """As JSON has it; what JSON has not, as a text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value) if isinstance(value, (os.PathLike, torch.device, torch.dtype)) else type(value).__name__


def summary(plan: Plan, bandwidths: Bandwidths | None) -> str:
    """The plan in a line, for the log."""
    line = f"{plan.num_parameters:,} parameters in {len(plan.units)} units"
    for tier in ("device", "host", "nvme"):
        nbytes = sum(of_kind.get(tier, 0) for of_kind in plan.memory.values())
        line += f", {readable_bytes(nbytes)} in {tier}" if nbytes else ""
    return line if bandwidths is None else f"{line}; NVMe {bandwidths}"
