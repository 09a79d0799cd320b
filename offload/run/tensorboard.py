"""Steps and metrics for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping

from offload.errors import ConfigError
from offload.run.observer import Observer, StepRecord

_OF_TRAINING = ("loss", "learning_rate", "grad_norm", "loss_scale")


class TensorBoard(Observer):
    """Writes each step's numbers, and what is logged, to event files in ``directory``.

    Raises ``ConfigError`` if the package ``tensorboard`` is not there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard: the package tensorboard is not installed: pip install 'offload-engine[metrics]'"
            ) from None
        self._directory = directory
        self._writer = SummaryWriter(os.fspath(directory))  # type: ignore[no-untyped-call]

    def step(self, record: StepRecord) -> None:
        for name, value in record.scalars().items():
            self._add(name if name in _OF_TRAINING else f"offload/{name}", value, record.report.step, record.time)
        for cause, seconds in record.report.stall_seconds.items():
            self._add(f"offload/waiting for {cause}, seconds", seconds, record.report.step, record.time)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add(name, value, step)

    def close(self, error: BaseException | None) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]

    def _add(self, tag: str, value: float, step: int, time: float | None = None) -> None:
        self._writer.add_scalar(tag, value, step, time)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return f"TensorBoard in {os.fspath(self._directory)}"
