"""Figures of a step among the logs of a trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offload.engine import OffloadEngine
from swapper import OffloadError

_FIGURES = (
    "bound_seconds", "efficiency", "nvme_read_bytes", "nvme_write_bytes", "nvme_write_bytes_total", "host_memory_bytes",
)  # fmt: skip
"""Numbers of a report that are logged, beside the seconds of the step."""


class OffloadCallback(TrainerCallback):
    """Adds figures of the last step to each log that has a training loss, and to ``state.log_history``.

    ``offload_step_seconds``, ``offload_bound_seconds`` (the least that the machine could take), their quotient
    ``offload_efficiency``, ``offload_nvme_read_bytes`` and ``offload_nvme_write_bytes`` of the step,
    ``offload_nvme_write_bytes_total`` since the engine was made (the wear of the SSD) and
    ``offload_host_memory_bytes``. Callbacks that come after this one see them. What the trainer logs goes to the
    engine's observers, such as the run directory.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        try:
            report = self.engine.report()
        except OffloadError:  # each step so far was skipped: its gradients were infinite in fp16
            return
        self.engine.log(**{name: value for name, value in logs.items() if isinstance(value, (int, float))})
        figures = {"offload_step_seconds": report.seconds}
        figures |= {f"offload_{name}": getattr(report, name) for name in _FIGURES}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
