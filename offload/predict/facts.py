"""A prediction with all that belongs to it as one plain object, for programs and for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.predict.advice import Advice
from offload.predict.endurance import Endurance
from offload.predict.prediction import Prediction


def facts_of(
    prediction: Prediction, least_host_bytes: int | None, advice: Sequence[Advice], endurance: Endurance
) -> dict[str, Any]:
    """Facts of the command's answer. Bytes are those of one rank, unless their name says a node's."""
    model, machine = prediction.model, prediction.machine
    facts: dict[str, Any] = {
        "model": {
            "name": model.name,
            "parameters": model.num_parameters,
            "layers": model.layers,
            "width": model.width,
            "vocabulary": model.vocabulary,
        },
        "machine": {
            "device": machine.device.name,
            "ranks": machine.num_ranks,
            "nodes": machine.num_nodes,
            "host_memory_bytes": machine.host_bytes,
            "nvme_bytes": machine.nvme_bytes,
            "nvme": None if machine.nvme is None else asdict(machine.nvme),
        },
        "assumptions": list(machine.assumptions),
        "workload": asdict(prediction.workload),
        "shard": prediction.shard,
        "fits": prediction.fits,
        "shortage": None if prediction.shortage is None else asdict(prediction.shortage),
        "least_host_memory_bytes": least_host_bytes,
        "activation_bytes": prediction.activation_bytes,
        "advice": [
            {
                "change": one.change,
                "seconds": one.prediction.seconds,
                "tokens_per_second": one.prediction.tokens_per_second,
                "gain": one.gain if prediction.fits else None,
            }
            for one in advice
        ],
    }
    if prediction.fits:
        facts |= _of_step(prediction, endurance)
    return facts


def _of_step(prediction: Prediction, endurance: Endurance) -> dict[str, Any]:
    return {
        "memory": memory_of(prediction),
        "seconds": prediction.seconds,
        "bound_seconds": prediction.bound_seconds,
        "unoverlapped_seconds": prediction.unoverlapped_seconds,
        "limit": prediction.limit,
        "link_seconds": prediction.links,
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second,
        "compute_bound_batch": prediction.compute_bound_batch,
        "nvme_read_bytes": prediction.read_bytes,
        "nvme_write_bytes": prediction.written_bytes,
        "endurance": {**asdict(endurance), "steps": endurance.steps, "days": endurance.days},
    }


def memory_of(prediction: Prediction) -> dict[str, dict[str, int]]:
    """Bytes of each kind in each tier of a rank, what passes through and activations included."""
    assert prediction.plan is not None
    none = {"device": 0, "host": 0, "nvme": 0}
    kept = {"device" if prediction.machine.device.computes else "host": prediction.activation_bytes}
    rows = {**prediction.plan.memory, "activations (outside of budgets)": kept}
    return {kind: {**none, **tiers} for kind, tiers in rows.items()}
