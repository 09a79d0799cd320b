"""One system of ``bench_step.py`` in a process of its own: builds it, then takes steps when a line of stdin asks.

The first line out tells what imports take and which budget the system gets (a request's 0 stands for the least that
works); the second, after a line in, that it is built; then an answer a line. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _step_deepspeed import DeepSpeed
from _step_model import Shape
from _step_optimizers import OPTIONS, optimizers
from _step_peers import PEERS
from torch import Tensor, nn

_INSTALLATION = json.loads(sys.argv[1]).get("installation") if len(sys.argv) > 1 else None
if _INSTALLATION is not None:
    sys.path.insert(0, _INSTALLATION)
    sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]  # an editable one is none

from offload import BudgetError, OffloadEngine  # noqa: E402


class InMemory:
    """Plain PyTorch. In bf16, masters in fp32 beside the weights, copied over after each step."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self._clipping = request["clipping"]
        self._norms: list[float] = []
        with torch.device(request["device"]):
            self._model = shape.model()
        self._weights = list(self._model.parameters())
        self._masters = self._weights
        if request["precision"] == "bf16":
            self._masters = [nn.Parameter(weight.detach().clone()) for weight in self._weights]
            self._model.to(torch.bfloat16)
        self._optimizers = optimizers(request["optimizer"], self._model, self._masters)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self._model(tokens, targets)
        loss.backward()
        if self._clipping:
            self._norms.append(float(torch.nn.utils.clip_grad_norm_(self._weights, self._clipping)))
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self._masters is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
        return float(loss.item())

    def settle(self) -> None:
        """Nothing runs behind a step."""

    def facts(self) -> dict[str, Any]:
        return {"parameters": sum(weight.numel() for weight in self._weights), "norms": self._norms}

    def close(self) -> None:
        pass


class Engine:
    """This project's engine."""

    def __init__(self, shape: Shape, request: dict[str, Any]) -> None:
        with torch.device("meta"):
            model = shape.model()
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        options = {name: request[name] for name in ("precision", "io_backend", "host_memory")}
        options |= {"gradient_clipping": request["clipping"], **OPTIONS}
        if request["nvme_path"] is not None:
            options["nvme_path"] = request["nvme_path"]
        if request["optimizer"] != "adamw":  # else an installation need not know of others
            options["optimizer"] = request["optimizer"]
        if request["device"] != "cpu":  # nor of devices
            options |= {name: request[name] for name in ("device", "device_memory")}
        torch.manual_seed(0)  # the engine initialises the model
        self._engine = OffloadEngine(model, **options)
        self._schedules: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        self._schedules.append(_known(self._engine.report(), "schedule_seconds") or 0.0)
        return float(loss.item())

    def settle(self) -> None:
        self._engine.synchronize()

    def write_timeline(self, path: str) -> None:
        self._engine.timeline(path)

    def facts(self) -> dict[str, Any]:
        """What this installation says of itself. Another one may not know all of it."""
        plan, report = self._engine.plan, self._engine.report()
        bandwidths, units = _known(report, "bandwidths"), _known(plan, "units")
        links = {name: _known(report, f"{name}_seconds") or 0.0 for name in ("to_device", "to_host")}
        return {
            "parameters": self._numel,
            "num_units": units and len(units),
            "host_memory_bytes": _known(plan, "host_bytes"),
            "device_memory_bytes": _known(plan, "device.total_bytes") or None,
            "schedule_seconds": self._schedules,
            "engine_efficiency": _known(report, "efficiency"),
            "engine_bound_by": _known(report, "bound_by"),
            "link_seconds": links,
            "nvme_bytes": _known(plan, "nvme_bytes"),
            "planned_read_bytes": _known(plan, "step_read_bytes"),
            "planned_write_bytes": _known(plan, "step_write_bytes"),
            "bandwidths": bandwidths and {name: _known(bandwidths, name) for name in ("read", "write", "q")},
            "stalls": _known(report, "stall_seconds"),
        }

    def close(self) -> None:
        try:
            self._engine.close(discard=True)
        except TypeError:  # an older one
            self._engine.close()


SYSTEMS = {"in_memory": InMemory, "engine": Engine, "deepspeed_cpu": DeepSpeed, "deepspeed_nvme": DeepSpeed, **PEERS}


def _known(thing: Any, path: str) -> Any:
    """The value at this path of attributes; None if the installation has none there."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def main() -> None:
    request = {"optimizer": "adamw", **json.loads(sys.argv[1])}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout is for answers alone

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    shape = Shape(**request["shape"])
    with torch.device("meta"):
        nn.Embedding(1, 1)  # what drawing on meta imports belongs to no system
    imports_bytes = _status("VmRSS")
    if request["system"] == "engine" and request["host_memory"] == 0:
        _take_least(shape, request)
    answer({"imports_bytes": imports_bytes, "host_memory": request.get("host_memory")})
    if not sys.stdin.readline():
        return
    system = SYSTEMS[request["system"]](shape, request)
    generator = torch.Generator().manual_seed(0)
    answer({})
    for line in sys.stdin:
        answer(_turn(system, shape, generator, request["device"], **json.loads(line)))
    system.close()


def _take_least(shape: Shape, request: dict[str, Any]) -> None:
    """Ask for the least budgets that work: of a device's memory, if that is "auto", and then of host memory."""
    on_device = request["device"] != "cpu" and request["device_memory"] == "auto"
    for budget in ("device_memory", "host_memory") if on_device else ("host_memory",):
        try:
            Engine(shape, {**request, budget: 1})
        except BudgetError as error:
            request[budget] = error.needed_bytes
        else:
            raise AssertionError("a byte is enough")


def _turn(
    system: Any,
    shape: Shape,
    generator: torch.Generator,
    device: str,
    warm_up: int,
    steps: int,
    batch: int | None = None,
    timeline: str | None = None,
) -> dict[str, Any]:
    """Some steps that do not count, one that counts for the bytes alone, and those that are timed. ``batch``: other
    than the shape's; ``timeline``: a file for that of the last step, if the system has one."""
    if batch is not None:
        shape = replace(shape, batch=batch)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up):
        system.step(*(tensor.to(device) for tensor in shape.tokens(generator)))
    system.settle()
    before = _so_far()
    seconds, losses = [], []
    for index in range(steps + 1):
        tokens, targets = (tensor.to(device) for tensor in shape.tokens(generator))
        start = time.perf_counter()
        losses.append(system.step(tokens, targets))
        if index:
            seconds.append(time.perf_counter() - start)
    system.settle()
    if timeline is not None and isinstance(system, Engine):
        system.write_timeline(timeline)
    moved = {name: (now - before[name]) / (steps + 1) for name, now in _so_far().items()}
    return {
        "seconds": seconds,
        "losses": losses,
        **moved,
        "peak_rss_bytes": _status("VmHWM") + _status("HugetlbPages"),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device.startswith("cuda") else None,
        **system.facts(),
    }


def _so_far() -> dict[str, float]:
    """What this process has read from and written to storage (caches do not count), the seconds of cores that it has
    taken, and how often one of its threads gave its core away, all as the kernel counts it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "nvme_read_bytes": int(fields["read_bytes"]),
        "nvme_write_bytes": int(fields["write_bytes"]),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "switches": usage.ru_nvcsw + usage.ru_nivcsw,
    }


def _status(name: str) -> int:
    """A field of the kernel's account of this process's memory, in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return next((int(line[1]) * 1024 for line in lines if line[0] == f"{name}:"), 0)


if __name__ == "__main__":
    main()
