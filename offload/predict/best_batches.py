"""The best batch for each treatment of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.model.tiles import ROWS
from offload.predict.activation_bytes import activation_bytes
from offload.predict.machine import Machine
from offload.predict.prediction import Batches, Prediction, predict
from offload.predict.workload import Mode, Workload

_WORTH = 0.95
"""Share of the most tokens a second with which a smaller batch is as good."""


@dataclass(frozen=True)
class BestBatch:
    """Sequences that pass each unit at a time, in one batch or in micro-batches that are ``together``.

    ``best``: the least number that makes about as many tokens a second as any. It may be less than the ``largest`` that
    fits, whose activations leave weights and states less room. ``computing`` is the least with which compute
    limits, and None where it does with none of them; ``largest`` is 0 where none fits. The prediction is that of the
    best, or else of the least.
    """

    largest: int
    computing: int | None
    best: int
    prediction: Prediction


def modes_of(machine: Machine) -> Sequence[Mode]:
    """Return the treatments of activations that this machine offers."""
    there: list[Mode] = ["keep", "recompute"]
    if machine.device.computes:  # else host memory is where they are
        there.append("host")
    if machine.nvme is not None:
        there.append("nvme")
    return there


def best_batches(prediction: Prediction) -> list[BestBatch]:
    """One for each of ``modes_of`` the machine, and for those that leave with micro-batches together, of the batch that
    was asked for; all else as it is, but that the loss is in tiles where there are logits: larger batches fit then."""
    asked = prediction.workload
    if asked.loss_rows is None and _has_logits(prediction):
        asked = replace(asked, loss_rows=ROWS)
    return [_best_of(prediction, workload) for workload in _workloads(prediction.machine, asked)]


def _has_logits(prediction: Prediction) -> bool:
    whole, row = (
        activation_bytes(prediction.model, replace(prediction.workload, loss_rows=rows)).computing for rows in (None, 1)
    )
    return row < whole


def _workloads(machine: Machine, asked: Workload) -> Iterator[Workload]:
    for together in (False, True):
        for mode in modes_of(machine):
            workload = replace(asked, activations=mode, activation_memory=None, together=together)
            if workload.leave or not together:
                yield workload


def _best_of(prediction: Prediction, workload: Workload) -> BestBatch:
    model, machine = prediction.model, prediction.machine
    one = predict(model, machine, workload.of_size(1))
    batches = Batches.of(one)
    tried, fastest = {1: one}, 0.0
    for size in _sizes(batches):
        if size * one.most_tokens_per_second < _WORTH * fastest:
            break  # its step takes no less than that of one sequence, and smaller ones bring less still
        found = tried[size] = predict(model, machine, workload.of_size(size))
        if batches.computing is not None and found.limit == "compute" and _WORTH * found.tokens_per_second < fastest:
            break  # what waits for other parts waits less in a larger one, and larger ones bring no more
        if found.most_tokens_per_second > fastest:
            fastest = max(fastest, found.tokens_per_second)
    best = _least_that_is_enough(tried)
    each = workload.batch if workload.together else 1
    computing = None if batches.computing is None else each * batches.computing
    return BestBatch(each * batches.largest, computing, each * best, tried[best])


def _sizes(batches: Batches) -> list[int]:
    """Sizes beside one that are tried: powers of two, the least with which compute limits, and the largest. Where
    compute does not limit the largest comes first: it says how few cannot bring as much."""
    least = batches.computing or 1  # with fewer a step takes as long
    powers = {1 << power for power in range(least.bit_length(), batches.largest.bit_length())}
    return sorted((powers | {least, batches.largest}) - {0, 1}, reverse=batches.computing is None)


def _least_that_is_enough(tried: dict[int, Prediction]) -> int:
    """The least size that makes about as many tokens a second as any. Those alone are played whose bound allows it."""
    fastest, speeds = 0.0, {}
    for size, found in sorted(tried.items(), key=lambda item: -item[1].most_tokens_per_second):
        if found.most_tokens_per_second < _WORTH * fastest:
            break
        speeds[size] = found.tokens_per_second if found.fits else 0.0
        fastest = max(fastest, speeds[size])
    return min(size for size, speed in speeds.items() if speed >= _WORTH * fastest)
