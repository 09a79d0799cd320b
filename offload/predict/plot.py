"""A picture of the step time over host memory, or over the batch. ``matplotlib`` is needed here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from offload.errors import BudgetError, ConfigError
from offload.predict.prediction import Prediction, least_host_bytes, predict

Over = Literal["host-memory", "batch"]

_POINTS = 16
_GIB = 1 << 30
_COLORS = {
    "compute": "#2a7f62",
    "NVMe": "#c4572b",
    "link to the device": "#3b6fb6",
    "link to the host": "#7aa6d8",
    "CPU updates": "#8a5fa8",
    "network": "#777777",
}
"""By the part of the machine that limits."""


def plot(prediction: Prediction, over: Over, path: Path) -> None:
    """Write the picture. Raises ``ConfigError`` where ``matplotlib`` is missing, the name's ending is none that it
    knows, or nothing that could be drawn fits."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'offload-engine[plot]'") from None
    points = list(_over_batch(prediction) if over == "batch" else _over_memory(prediction))
    points = [(x, found) for x, found in points if found.fits]
    if not points:
        raise ConfigError("--plot: the model does not fit with any host memory, and there is nothing to draw")
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([x for x, _ in points], [found.seconds for _, found in points], color="#999999", zorder=1)
    for limit in dict.fromkeys(found.limit for _, found in points):
        those = [(x, found.seconds) for x, found in points if found.limit == limit]
        color = _COLORS.get(limit, "black")
        across, up = [x for x, _ in those], [y for _, y in those]
        axes.scatter(across, up, s=24, color=color, label=f"limited by {limit}", zorder=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch" if over == "batch" else "host memory of a rank, GiB")
    axes.set_ylabel("seconds a step")
    axes.set_title(f"{prediction.model.name}, predicted")
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"--plot: {error}") from None


def _over_memory(prediction: Prediction) -> Sequence[tuple[float, Prediction]]:
    """From the least budget to what holds all of it."""
    model, machine, workload = prediction.model, prediction.machine, prediction.workload
    try:
        least = least_host_bytes(model, machine, workload)
    except BudgetError as error:
        raise ConfigError(f"--plot: {error}") from None
    plenty = predict(model, replace(machine, host_bytes=1 << 61), workload)
    most = max(plenty.plan.host_bytes if plenty.plan is not None else machine.host_bytes, least)
    budgets = [least + (most - least) * index // (_POINTS - 1) for index in range(_POINTS)]
    return [(budget / _GIB, predict(model, replace(machine, host_bytes=budget), workload)) for budget in budgets]


def _over_batch(prediction: Prediction) -> Sequence[tuple[float, Prediction]]:
    """From one to past the batch from which compute limits."""
    model, machine, workload = prediction.model, prediction.machine, prediction.workload
    most = 2 * max(prediction.compute_bound_batch if prediction.fits else 0, workload.size, 4)
    batches = sorted({max(round(most * index / _POINTS), 1) for index in range(1, _POINTS + 1)})
    return [(float(batch), predict(model, machine, workload.of_size(batch))) for batch in batches]
