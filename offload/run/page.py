"""The page of a run: one HTML file that needs nothing else, made of ``page.html``, ``page.css`` and ``page.js``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from offload.run import units
from offload.run.charts import Line, key, lines, stacked
from offload.run.figures import figures, known, losses_of, middle
from offload.run.lanes import timeline
from offload.run.reading import Run, computing
from offload.run.thin import smooth, thin

_HERE = Path(__file__).parent

_LIMITS = {
    "compute": "compute",
    "nvme": "NVMe",
    "schedule": "forward, then backward",
    "to_device": "copies to the device",
    "to_host": "copies to the host",
    "memory": "host memory",
}
"""Limits of a step, in words."""

_TIERS = {"device": "Device", "host": "Host memory", "nvme": "NVMe"}
_KINDS = ("weights", "grads", "states", "activations", "staging", "spare copies", "vacant")
_METRICS_MAX = 24
"""So many of the user's metrics are drawn."""


def page(run: Run) -> str:
    """The HTML of the page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = {name: getattr(units, name) for name in ("seconds", "rate", "number", "count", "share")}
    environment.filters.update(filters, bytes=units.nbytes, date=_date)
    template = environment.from_string((_HERE / "page.html").read_text())
    found, losses = figures(run), losses_of(run)[1]
    return template.render(
        css=Markup((_HERE / "page.css").read_text()),
        script=Markup((_HERE / "page.js").read_text()),
        run=run,
        figures=found,
        about=run.about,
        limit=_LIMITS.get(found["bound_by"], found["bound_by"]),
        now=time.time(),
        num_not_finite=sum(1 for value in losses if not math.isfinite(value)) if known(losses) else 0,
        charts=_charts(run),
        limits=_limits(run),
        tiers=_tiers(run.memory, run.about["budgets"]),
        kinds=key([(kind, _class(kind)) for kind in _KINDS if any(run.memory.get(kind, {}).values())]),
        metrics=_metrics(run),
        timeline=None if run.timeline is None else timeline(run.timeline[1]),
        options=_options(run.about["options"]),
    )


def _charts(run: Run) -> dict[str, Markup]:
    """The charts over steps, by name. Where there is nothing to draw there is none."""
    if not run.steps:
        return {}
    steps, marks = list(run.steps), [float(each.first_step) for each in run.sections[1:] if each.first_step is not None]

    def line(name: str, colour: str, values: Sequence[float], *, band: bool = False) -> Line:
        return Line(name, colour, thin(steps, values), band)

    numbers, found = run.numbers, {}
    if known(losses_of(run)[1]):
        each = Line("each step", "loss-each", thin(*losses_of(run)), band=True)
        window = max(len(each.values.x) // 25, 1)
        mean = Line("smoothed", "loss", thin(each.values.x, smooth(each.values.mean, window)))
        series = [each, mean] if window > 1 else [Line("loss", "loss", each.values)]
        found["loss"] = lines("Loss over steps", series, units.number, from_zero=False, marks=marks)
    taken = line("step", "step", numbers["seconds"], band=True)
    bound = line("bound", "bound", numbers["bound_seconds"])
    found["seconds"] = lines("Seconds of a step, and its bound", [taken, bound], units.seconds, marks=marks)
    waits = sorted(run.waits.names, key=lambda name: -math.fsum(known(run.waits[name])))
    parts = [line("compute", "compute", computing(run))]
    parts += [
        line(f"waiting for {name}", f"wait-{at % 6}", [value if value == value else 0.0 for value in run.waits[name]])
        for at, name in enumerate(waits)
    ]
    found["parts"] = stacked("Where the time of a step went", parts, units.seconds)
    for name, label, shown in (
        ("learning_rate", "Learning rate", units.number),
        ("grad_norm", "Norm of the gradients", units.number),
        ("loss_scale", "Loss scale", units.number),
        ("process_bytes", "Memory of the process", units.nbytes),
    ):
        values = known(numbers[name])
        if values and (name != "loss_scale" or max(values) > 1):
            found[name] = lines(f"{label} over steps", [line(label, "step", numbers[name])], shown, marks=marks)
    return found


def _metrics(run: Run) -> list[tuple[str, Markup]]:
    """A chart of each metric that was logged. The loss has one already."""
    found = []
    for name, values in run.metrics.items():
        if name != "loss" or "loss" in run.numbers.names:
            steps, numbers = [float(step) for step, _ in values], [value for _, value in values]
            series = [Line(name, "metric", thin(steps, numbers))]
            found.append((name, lines(f"{name} over steps", series, units.number, from_zero=False)))
    return found[:_METRICS_MAX]


def _limits(run: Run) -> list[tuple[str, float, float]]:
    """Seconds that a step takes of each thing that goes on beside others, and its share of the longest: medians."""
    names = {
        "the step": "seconds",
        "compute": "compute_seconds",
        "NVMe, at its measured bandwidth": "nvme_seconds",
        "forward and then backward": "schedule_seconds",
        "copies to the device": "to_device_seconds",
        "copies to the host": "to_host_seconds",
        "host memory": "memory_seconds",
        "updates": "update_seconds",
    }
    middles = {label: middle(run.numbers[name]) or 0.0 for label, name in names.items()}
    longest = max(middles.values(), default=0.0)
    return [(label, value, value / longest) for label, value in middles.items() if value > 0]


def _tiers(memory: Mapping[str, Mapping[str, int]], budgets: Mapping[str, int]) -> list[dict[str, Any]]:
    """Bytes that each tier holds, by kind, as shares of the larger of that and its budget."""
    found = []
    for tier, label in _TIERS.items():
        held = {kind: memory[kind].get(tier, 0) for kind in memory}
        total, budget = sum(held.values()), budgets.get(tier, 0)
        if not total and not budget:
            continue
        whole = max(total, budget)
        parts = [(kind, _class(kind), size, size / whole) for kind, size in held.items() if size]
        found.append({"label": label, "total": total, "budget": budget, "parts": parts})
    return found


def _class(kind: str) -> str:
    return f"kind-{kind.replace(' ', '-')}"


def _options(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Those that are not empty."""
    return [(name, str(value)) for name, value in options.items() if value not in (None, [], {}, "")]


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
