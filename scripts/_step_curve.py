"""The curve of ``bench_step.py``: a step over the budget, by installation and clipping, and whether it ever rises."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

_MIB = 1 << 20

Run = dict[str, Any]


def budgets(least: int, state_bytes: int, count: int) -> list[str]:
    """``count`` budgets from the least to all, each by the same factor above the one before."""
    factor = (state_bytes / least) ** (1 / (count - 1))
    return ["least", *(f"{round(least * factor**index)}B" for index in range(1, count - 1)), "all"]


def print_curve(result: dict[str, Any]) -> None:
    """A row for each budget: median, least and largest seconds of a step, and the share of its bound. Installations
    stand side by side, the first one's share of each other's time behind it."""
    machine = result["machine"]
    print(f"{result['date']}  {machine['cores']} cores {machine['cpu']}, torch {machine['torch']}, "
          f"{result['config']['precision']}, batch {result['config']['batch']}")  # fmt: skip
    for size, clipping in dict.fromkeys((run["size"], run["clipping"]) for run in result["runs"]):
        runs = [run for run in result["runs"] if (run["size"], run["clipping"]) == (size, clipping)]
        for run in (run for run in runs if run["system"] == "in_memory"):
            print(f"{size}, clipped {clipping}: in memory {_seconds(run)}")
        for line in _rows([run for run in runs if run["system"].startswith("engine")]):
            print(line)


def _rows(runs: list[Run]) -> Iterator[str]:
    """The table of one size and clipping, and what is not monotone in it."""
    systems = list(dict.fromkeys(run["system"] for run in runs))
    yield f"{'host MiB':>9}" + "".join(f"{name + ': s (min max)':>30}{'bound':>7}{'cores':>7}" for name in systems)
    for budget in dict.fromkeys(run["budget"] for run in runs):
        found = {run["system"]: run for run in runs if run["budget"] == budget}
        first = next(iter(found.values()))
        cells = [_cell(found[name]) if name in found else f"{'-':>44}" for name in systems]
        if systems[0] in found:
            mine = found[systems[0]]["step_seconds_median"]
            cells += [f"{mine / run['step_seconds_median']:>7.2f}" for name, run in found.items() if name != systems[0]]
        yield f"{(first['host_memory_bytes'] or 0) / _MIB:>9,.0f}" + "".join(cells)
    for name in systems:
        rises = list(_rises([run for run in runs if run["system"] == name]))
        yield f"{name}: " + ("; ".join(rises) if rises else "more memory is never slower, beyond the spread of steps")


def _cell(run: Run) -> str:
    share = f"{run['bound_seconds'] / run['step_seconds_median']:.2f}" if run["bound_seconds"] else ""
    return f"{_seconds(run):>30}{share:>7}{run['cpu_seconds_per_step']:>7.2f}"


def _seconds(run: Run) -> str:
    seconds = run["step_seconds"]
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} {max(seconds):.3f})"


def _rises(runs: list[Run]) -> Iterator[str]:
    """Budgets whose every step took longer than every step of a smaller one."""
    for index, run in enumerate(runs):
        fastest = min(runs[:index], key=lambda one: max(one["step_seconds"]), default=None)
        if fastest is not None and min(run["step_seconds"]) > max(fastest["step_seconds"]):
            ratio = run["step_seconds_median"] / fastest["step_seconds_median"]
            more, less = (one["host_memory_bytes"] / _MIB for one in (run, fastest))
            yield f"{more:,.0f} MiB is {ratio:.2f} times as slow as {less:,.0f} MiB"
