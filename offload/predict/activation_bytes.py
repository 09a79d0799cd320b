"""Bytes of activations in each tier for one pass through the model, by what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from offload.predict.model import Model
from offload.predict.workload import Workload
from swapper import align

_LEAST_MEMORY = 64 << 20
"""The engine's default."""

_HOST_SHARE = 16
"""Of host memory no more than this part is a buffer for activations on NVMe: the rest holds weights and states."""

_MIB = 1 << 20


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of a pass.

    ``computing`` are in the memory where the model computes, outside of all budgets: what autograd keeps, logits with
    their gradients, and the widest matrix of a quantised base. ``leaving`` leave it, and come back in backward.
    ``memory`` is set aside for these in host memory; ``spill``: what it has no room for goes on to NVMe.
    """

    computing: int
    leaving: int = 0
    memory: int = 0
    spill: bool = False

    @property
    def written(self) -> int:
        """To NVMe: what fits into half of the memory is never written."""
        return max(self.leaving - self.memory // 2, 0) if self.spill else 0

    @property
    def read(self) -> int:
        """From NVMe: backward begins with what the memory holds."""
        return max(self.leaving - self.memory, 0) if self.spill else 0


def activation_bytes(model: Model, workload: Workload, host_bytes: int = 0) -> ActivationBytes:
    """Count those of one pass. ``host_bytes``: of a rank's host memory, a part of which may be set aside."""
    width, dtype = 4 if workload.precision == "fp32" else 2, workload.dtype
    kept = model.kept(workload.sequence, dtype)
    rows = min(workload.tokens, workload.loss_rows or workload.tokens)
    beside = rows * model.vocabulary * (width + 8) + model.widened_bytes(dtype)
    batch, sequences = workload.batch, workload.tokens // workload.sequence
    if not workload.leave:
        at_once = kept.nbytes(sequences, recomputed=workload.recomputed)
        if workload.recomputed:  # of micro-batches that are together one at a time is in a block
            at_once -= (sequences - batch) * kept.largest
        return ActivationBytes(at_once + beside)
    leaving, spill = sequences * (kept.inputs + kept.around), workload.activations == "nvme"
    memory = workload.activation_memory
    if memory is None and spill:
        two_units = 2 * sequences * kept.input
        memory = max(min(two_units, host_bytes // _HOST_SHARE), _LEAST_MEMORY)
    elif memory is None:
        memory = max(leaving + leaving // 64, _LEAST_MEMORY)  # pieces begin on pages
    on_their_way = 2 * kept.input  # one goes or comes beside the one in use
    return ActivationBytes(
        batch * (max(kept.largest, kept.around) + on_their_way) + beside, leaving, align(memory, _MIB), spill
    )
