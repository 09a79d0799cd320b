"""The two pictures of a run. Import this only once its memory has been measured: matplotlib takes some itself."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_MIB = 1 << 20
_COLOURS = {
    "spare copies": "#8172b3",
    "weights": "#4c72b0",
    "master": "#64b5cd",
    "moments": "#dd8452",
    "states": "#dd8452",
    "grads": "#55a868",
}
_OTHER_COLOUR = "#8c8c8c"
_SMOOTHED_STEPS = 20


def plot_loss(path: Path, figures: dict[str, Any], losses: list[float]) -> None:
    """Write the loss over the steps, with what a guess without any learning gives."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(losses) + 1)
    smoothed = [fmean(losses[max(0, end - _SMOOTHED_STEPS) : end]) for end in steps]
    axes.plot(steps, losses, color="#4c72b0", alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, smoothed, color="#4c72b0", linewidth=2, label=f"mean of {_SMOOTHED_STEPS} steps")
    axes.axhline(math.log(256), color="#8c8c8c", linestyle=":", label="guessing: ln 256")
    axes.set(xlabel="step", ylabel="loss, nats a byte", xlim=(0, len(losses) + 1))
    axes.set_title(
        f"{figures['parameters'] / 1e6:.1f} M parameters, {figures['model_state_bytes'] / _MIB:,.0f} MiB of model "
        f"state trained within {figures['host_memory_bytes'] / _MIB:,.0f} MiB",
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_memory(path: Path, figures: dict[str, Any], memory: dict[str, dict[str, int]], rss_bytes: list[int]) -> None:
    """Write what rested where against the budget, and beside it the memory of the process over the steps."""
    figure, (resting, over_time) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained", width_ratios=(1, 1.3))
    _plot_resting(resting, memory, figures["host_memory_bytes"])
    _plot_rss(over_time, figures, rss_bytes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_resting(axes: Axes, memory: dict[str, dict[str, int]], budget_bytes: int) -> None:
    memory = {kind: tiers for kind, tiers in memory.items() if any(tiers.values())}
    tiers = [tier for tier in ("device", "host", "nvme") if any(tiers.get(tier) for tiers in memory.values())]
    heights = dict.fromkeys(tiers, 0.0)
    for kind, by_tier in memory.items():
        sizes = [by_tier.get(tier, 0) / _MIB for tier in tiers]
        bars = axes.bar(tiers, sizes, 0.6, list(heights.values()), color=_COLOURS.get(kind, _OTHER_COLOUR), label=kind)
        for bar, size in zip(bars, sizes, strict=True):
            if size > 0.04 * max(sum(memory[k].get(t, 0) for k in memory) for t in tiers) / _MIB:
                middle = (bar.get_x() + bar.get_width() / 2, bar.get_y() + size / 2)
                axes.annotate(
                    f"{size:,.3g}" if size < 100 else f"{size:,.0f}",
                    middle,
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                )
        heights = {tier: heights[tier] + size for tier, size in zip(tiers, sizes, strict=True)}
    axes.axhline(budget_bytes / _MIB, color="#c44e52", linestyle="--", label=f"budget {budget_bytes / _MIB:,.0f} MiB")
    axes.set(ylabel="MiB", title="What is stored where", xlim=(-0.6, len(tiers) - 0.4))
    axes.set_ylim(top=1.28 * max(*heights.values(), budget_bytes / _MIB))
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def _plot_rss(axes: Axes, figures: dict[str, Any], rss_bytes: list[int]) -> None:
    """Imports, activations and budget as bands: together they are what the process may take."""
    bottom = 0.0
    for name, colour in (("rss_imports", "#bbbbbb"), ("activation", "#ccb974"), ("host_memory", "#c44e52")):
        size = figures[f"{name}_bytes"] / _MIB
        label = {"rss_imports": "imports", "activation": "activations", "host_memory": "budget"}[name]
        axes.axhspan(bottom, bottom + size, color=colour, alpha=0.22, label=f"{label} {size:,.0f} MiB", linewidth=0)
        bottom += size
    peak = figures["peak_rss_bytes"] / _MIB
    axes.axhline(peak, color="#333333", linestyle=":", label=f"peak RSS {peak:,.0f} MiB")
    axes.plot(range(1, len(rss_bytes) + 1), [nbytes / _MIB for nbytes in rss_bytes], color="#333333", label="RSS")
    axes.set(xlabel="step", ylabel="MiB", title="Memory of the training process", xlim=(0, len(rss_bytes) + 1))
    axes.set_ylim(0, 1.35 * max(bottom, peak))
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
