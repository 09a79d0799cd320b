"""Advice on what would help most: the same prediction with one thing changed, and what the step takes then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offload.errors import ConfigError
from offload.native_optimizers import NATIVE_OPTIMIZERS
from offload.predict.best_batches import modes_of
from offload.predict.machine import Machine, with_second_drive
from offload.predict.prediction import Prediction, predict
from offload.predict.variants import AS_WEIGHTS, BASES, Lora
from offload.predict.workload import Mode, Workload

_WORTH = 1.01
"""Least gain that is worth a line."""

ACTIVATIONS: dict[Mode, str] = {
    "keep": "activations kept, not recomputed",
    "recompute": "recomputed activations",
    "host": "activations recomputed, inputs of blocks in host memory",
    "nvme": "activations recomputed, inputs of blocks on NVMe",
}
"""Each treatment of activations, in words."""


@dataclass(frozen=True)
class Advice:
    """A change, and the prediction with it. ``gain`` is tokens a second with it over those without; infinite if the
    model does not fit without."""

    change: str
    prediction: Prediction
    gain: float


def advise(prediction: Prediction) -> list[Advice]:
    """Changes that make training faster, or possible: the best first."""
    found = []
    for change, machine, workload in _changes(prediction.machine, prediction.workload):
        changed = predict(prediction.model, machine, workload)
        if not changed.fits:
            continue
        gain = changed.tokens_per_second / prediction.tokens_per_second if prediction.fits else float("inf")
        if gain >= _WORTH:
            found.append(Advice(change, changed, gain))
    return sorted(found, key=lambda advice: -advice.prediction.tokens_per_second)


@dataclass(frozen=True)
class Way:
    """A way to train a model, the ``options`` of the command that ask for it, and the prediction."""

    name: str
    options: str
    prediction: Prediction


def ways(prediction: Prediction) -> list[Way]:
    """Ways to train the model that differ in what is trained: all of it, adapters, adapters over a base in four bits.
    Empty if a part of it is frozen already, or there is nothing to put adapters over."""
    model, machine, workload = prediction.model, prediction.machine, prediction.workload
    if model.num_trained < model.num_parameters:
        return []
    lora, found = Lora(), [Way("full", "", prediction)]
    bases = [AS_WEIGHTS] if machine.num_ranks > 1 else [AS_WEIGHTS, BASES["nf4"]]
    try:
        adapted = model.with_adapters(lora, AS_WEIGHTS)
    except ConfigError:
        return []
    for base in bases:
        changed = predict(replace(adapted, base=base), machine, workload)
        name, options = f"LoRA r={lora.rank}", f"--lora r={lora.rank}"
        found.append(
            Way(f"{name} over {base.name}", f"{options} --base {base.name}", changed)
            if base.name
            else Way(name, options, changed)
        )
    return found


def _has_states(optimizer: str) -> bool:
    return optimizer not in NATIVE_OPTIMIZERS or bool(NATIVE_OPTIMIZERS[optimizer].states)


def _changes(machine: Machine, workload: Workload) -> Iterator[tuple[str, Machine, Workload]]:
    yield "twice the host memory", replace(machine, host_bytes=2 * machine.host_bytes), workload
    if machine.nvme is not None:
        yield "a second SSD for each one", with_second_drive(machine), workload
    if workload.moments_dtype != "int8" and _has_states(workload.optimizer):
        yield "moments in 8 bits (inexact)", machine, replace(workload, moments_dtype="int8")
    for mode in modes_of(machine):
        if mode != workload.activations:
            yield ACTIVATIONS[mode], machine, replace(workload, activations=mode)
    if workload.precision == "fp32" and machine.device.computes:
        yield "weights in bf16", machine, replace(workload, precision="bf16")
    if workload.clipped:
        yield "a bound of the gradient norm that steps do not reach", machine, replace(workload, clipped=False)
    what = "micro-batches" if workload.together else "batch"
    yield f"{what} {2 * workload.size}", machine, workload.of_size(2 * workload.size)
