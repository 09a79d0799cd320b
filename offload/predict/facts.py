"""A prediction with all that belongs to it as one plain object, for programs and for tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from offload.optim.choose import takes_elements
from offload.plan.routing import Routing
from offload.predict.advice import Advice, Way
from offload.predict.best_batches import BestBatch
from offload.predict.endurance import Endurance
from offload.predict.prediction import Batches, Prediction


def facts_of(
    prediction: Prediction, least_host_bytes: int | None, advice: Sequence[Advice], endurance: Endurance
) -> dict[str, Any]:
    """Facts of the command's answer. Bytes are those of one rank, unless their name says a node's."""
    model, machine = prediction.model, prediction.machine
    facts: dict[str, Any] = {
        "model": {
            "name": model.name,
            "parameters": model.num_parameters,
            "trained": model.num_trained,
            "active": model.num_active,
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
        "assumptions": [*machine.assumptions, *_of_model(prediction)],
        "workload": asdict(prediction.workload),
        "shard": prediction.shard,
        "fits": prediction.fits,
        "shortage": None if prediction.shortage is None else asdict(prediction.shortage),
        "least_host_memory_bytes": least_host_bytes,
        "activation_bytes": prediction.activations.computing,
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


def _of_model(prediction: Prediction) -> Iterator[str]:
    """Assumptions about the model, in words."""
    model, workload = prediction.model, prediction.workload
    kept = model.kept(workload.sequence, workload.dtype)
    each = kept.blocks / max(model.layers * model.width * workload.sequence, 1)
    counted = f"{each:,.1f} bytes a token, layer and unit of width"
    if kept.reason:
        yield f"activations: {counted}, since the model's forward cannot be followed without memory ({kept.reason})"
    else:
        yield f"activations: {counted}, counted in the model's forward, with attention that keeps no matrix"
    if not takes_elements(workload.optimizer):
        reach = f"reach {prediction.machine.products / 1e9:,.0f} GFLOPS in products (--cores)"
        yield f"{workload.optimizer} looks at whole matrices, on the CPU, whose cores {reach}"
    if model.active < 1:
        tokens = workload.tokens * prediction.machine.num_ranks
        touched = Routing.of_tokens(tokens, model.active).touched
        yield (
            f"each expert moves by itself: {tokens:,} tokens at a time are sent to {touched:.1%} of a layer's, if all "
            "are chosen equally often"
        )


def _of_step(prediction: Prediction, endurance: Endurance) -> dict[str, Any]:
    return {
        "memory": memory_of(prediction),
        "seconds": prediction.seconds,
        "bound_seconds": prediction.bound_seconds,
        "schedule_seconds": prediction.schedule_seconds,
        "unoverlapped_seconds": prediction.unoverlapped_seconds,
        "limit": prediction.limit,
        "link_seconds": prediction.links,
        "tokens": prediction.tokens,
        "tokens_per_second": prediction.tokens_per_second,
        "nvme_read_bytes": prediction.read_bytes,
        "nvme_write_bytes": prediction.written_bytes,
        "endurance": {
            **asdict(endurance),
            "steps": endurance.steps,
            "hours": endurance.hours,
            "tokens": endurance.tokens,
        },
        "no_spare_copies": prediction.plan is not None
        and prediction.plan.record_copies == 1
        and prediction.plan.spare_copy_bytes > 0,
    }


def of_batches(batches: Batches) -> dict[str, Any]:
    """Facts about other batches."""
    return {"largest_batch": batches.largest, "compute_bound_batch": batches.computing}


def of_best_batches(found: Sequence[BestBatch]) -> list[dict[str, Any]]:
    """Rows of a table: for each thing that may become of activations the best batch, and what a step is with it."""
    return [
        {
            "activations": row.prediction.workload.activations,
            "micro_batch": row.prediction.workload.batch if row.prediction.workload.together else None,
            "loss_rows": row.prediction.workload.loss_rows,
            "largest_batch": row.largest,
            "compute_bound_batch": row.computing,
            "batch": row.best,
            **_of_way(row.prediction),
            **(_of_kept(row.prediction) if row.prediction.fits else {}),
        }
        for row in found
    ]


def _of_kept(prediction: Prediction) -> dict[str, Any]:
    """Return the bytes that a token writes to drives, and those of activations in each tier."""
    tokens = prediction.tokens // prediction.machine.num_ranks
    rows = [row for kind, row in memory_of(prediction).items() if kind.startswith("activations")]
    return {
        "written_bytes_a_token": prediction.written_bytes / tokens,
        "activation_bytes": {tier: sum(row[tier] for row in rows) for tier in ("device", "host", "nvme")},
    }


def of_training(prediction: Prediction, tokens: int | None) -> dict[str, Any]:
    """Facts about a training on so many tokens, if they are known."""
    hours = tokens / prediction.tokens_per_second / 3600 if tokens is not None and prediction.fits else None
    return {"tokens_wanted": tokens, "hours": hours}


def of_ways(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Rows of a table: each way to train the model with its speed and its bytes, or what there is too little of."""
    return [{"way": way.name, "options": way.options, **_of_way(way.prediction)} for way in ways]


def _of_way(prediction: Prediction) -> dict[str, Any]:
    if prediction.shortage is not None:
        return {"fits": False, "shortage": prediction.shortage.kind}
    rows = memory_of(prediction).values()
    return {
        "fits": True,
        "seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "limit": prediction.limit,
        "memory": {tier: sum(row[tier] for row in rows) for tier in ("device", "host", "nvme")},
        "nvme_write_bytes": prediction.written_bytes,
    }


def memory_of(prediction: Prediction) -> dict[str, dict[str, int]]:
    """Bytes of each kind in each tier of a rank, what passes through and activations included."""
    assert prediction.plan is not None
    none = {"device": 0, "host": 0, "nvme": 0}
    activations = prediction.activations
    kept = {"device" if prediction.machine.device.computes else "host": activations.computing}
    rows = {**prediction.plan.memory, "activations (outside of budgets)": kept}
    if activations.memory:
        rows["activations"] = {"host": activations.memory, "nvme": activations.written}
    return {kind: {**none, **tiers} for kind, tiers in rows.items()}
