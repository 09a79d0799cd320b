"""Which batch is best, for each of the things that may become of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.predict.machine import Machine
from offload.predict.prediction import Batches, Prediction, predict
from offload.predict.workload import Mode


@dataclass(frozen=True)
class BestBatch:
    """Sequences that pass each unit at a time, in one batch or in micro-batches that are ``together``.

    ``best``: the least number with which compute limits, or else the largest that fits; a larger one would make no more
    tokens a second. ``computing`` is None where compute limits with none of them, ``largest`` 0 where none fits. The
    prediction is that of the best, or else of the least.
    """

    largest: int
    computing: int | None
    best: int
    prediction: Prediction


def modes_of(machine: Machine) -> Sequence[Mode]:
    """What may become of activations on this machine."""
    there: list[Mode] = ["keep", "recompute"]
    if machine.device.computes:  # else host memory is where they are
        there.append("host")
    if machine.nvme is not None:
        there.append("nvme")
    return there


def best_batches(prediction: Prediction) -> list[BestBatch]:
    """One for each of ``modes_of`` the machine, and for those that leave with micro-batches together, of the batch that
    was asked for; all else as it is."""
    return list(_best_batches(prediction))


def _best_batches(prediction: Prediction) -> Iterator[BestBatch]:
    model, machine = prediction.model, prediction.machine
    for together in (False, True):
        for mode in modes_of(machine):
            workload = replace(prediction.workload, activations=mode, activation_memory=None, together=together)
            if together and not workload.leave:
                continue
            one = predict(model, machine, workload.of_size(1))
            batches = Batches.of(one)
            size = batches.computing or batches.largest
            best = predict(model, machine, workload.of_size(size)) if size > 1 else one
            each = workload.batch if together else 1
            computing = None if batches.computing is None else each * batches.computing
            yield BestBatch(each * batches.largest, computing, each * size, best)
