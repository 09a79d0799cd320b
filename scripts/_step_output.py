"""What ``bench_step.py`` found, as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MIB = 1 << 20


def brief(settings: dict[str, Any]) -> str:
    """Settings in a few characters."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def print_table(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{result['date']}  {machine['cores']} cores {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
          f"Linux {machine['kernel']}, torch {machine['torch']}, {result['config']['precision']}")  # fmt: skip
    print(
        f"{'model':<14}{'system':<15}{'budget':<8}{'clipped':<10}{'params M':>9}{'host MiB':>9}{'RSS MiB':>9}"
        f"{'read B/p':>9}{'write B/p':>10}{'step s (min med max)':>23}{'bound s':>9} {'by':<8}{'of bound':>8}"
        f"{'schedule s':>11}{'of it':>6}"
    )
    for run in result["runs"]:
        print(_row(run))
        if run["settings"]:
            print(f"{'':14}with {brief(run['settings'])}")
    for rates in {str(run["bandwidths"]): run["bandwidths"] for run in result["runs"] if run["bandwidths"]}.values():
        print(f"NVMe: read {rates['read'] / 1e9:.2f} GB/s, write {rates['write'] / 1e9:.2f} GB/s, q {rates['q']:.2f}")
    for line in _overheads(result["runs"]):
        print(line)
    for trial in result["deepspeed_trials"]:
        outcome = trial["failure"] or (
            f"{trial['step_seconds_median']:.2f} s, {trial['peak_rss_bytes'] / _MIB:,.0f} MiB"
        )
        print(f"tried: {trial['size']} {trial['system']} {brief(trial['settings'])}: {outcome}")


END_OF_RECORD = "<!-- end of the record -->"


def record(result: dict[str, Any], commit: str, page: Path) -> None:
    """Add a row for each run of the engine to the table of ``page`` that ends before ``END_OF_RECORD``."""
    text = page.read_text()
    before, mark, after = text.partition(f"\n{END_OF_RECORD}")
    if not mark:
        raise SystemExit(f"{page}: no {END_OF_RECORD!r}, before which rows are added")
    rows = [_recorded(run, result, commit) for run in result["runs"] if run["system"].startswith("engine")]
    page.write_text("\n".join([before.rstrip(), *rows, ""]) + mark + after)


def _recorded(run: dict[str, Any], result: dict[str, Any], commit: str) -> str:
    machine, seconds = result["machine"], run["step_seconds_median"]
    beside = [one for one in result["runs"] if (one["size"], one["clipping"]) == (run["size"], run["clipping"])]
    ratios = []
    for kind, name in (("in_memory", "plain PyTorch"), ("deepspeed", "DeepSpeed")):
        for other in (one for one in beside if one["system"].startswith(kind)):
            ratios.append(f"{seconds / other['step_seconds_median']:.2f} x {name}")
    share = f"{run['bound_seconds'] / seconds:.0%} ({run['bound_by']})" if run["bound_seconds"] else ""
    cpu = f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}"
    return (
        f"| {result['date']} | {commit} | {cpu} | {run['size']} {result['config']['precision']}, {run['budget']} "
        f"| {seconds:.3f} s | {share} | {', '.join(ratios)} |"
    )


def _row(run: dict[str, Any]) -> str:
    numel = run["parameters"]
    host = f"{run['host_memory_bytes'] / _MIB:,.0f}" if run["host_memory_bytes"] else "-"
    seconds = run["step_seconds"]
    times = f"{min(seconds):.3f} {run['step_seconds_median']:.3f} {max(seconds):.3f}"
    bound = run["bound_seconds"]
    share = f"{bound:>9.3f} {run['bound_by']:<8}{bound / run['step_seconds_median']:>8.2f}" if bound else ""
    schedule = run["schedule_seconds"]
    if schedule:
        share += f"{schedule:>11.3f}{schedule / run['step_seconds_median']:>6.2f}"
    budget = "" if run["settings"] else run["budget"]
    limit = f"  limit {run['limit_bytes'] / _MIB:,.0f} MiB" if run["limit_bytes"] else ""
    device = f"  device {run['peak_device_bytes'] / _MIB:,.0f} MiB" if run["peak_device_bytes"] else ""
    return (
        f"{run['size']:<14}{run['system']:<15}{budget:<8}{run['clipping']:<10}{numel / 1e6:>9.1f}{host:>9}"
        f"{run['peak_rss_bytes'] / _MIB:>9,.0f}{run['nvme_read_bytes_per_step'] / numel:>9.2f}"
        f"{run['nvme_write_bytes_per_step'] / numel:>10.2f}{times:>23}{share}{limit}{device}"
    )


def _overheads(runs: list[dict[str, Any]]) -> list[str]:
    """For chains, whose units do next to nothing: what the engine adds to each."""
    lines = []
    for run in runs:
        same = [one for one in runs if (one["size"], one["clipping"]) == (run["size"], run["clipping"])]
        plain = [one for one in same if one["system"] == "in_memory"]
        if run["size"].startswith("chain:") and run["num_units"] and plain:
            extra = (run["step_seconds_median"] - plain[0]["step_seconds_median"]) / run["num_units"]
            lines.append(f"{run['size']} {run['budget']}: {extra * 1e6:.0f} us over plain PyTorch a unit and step")
    return lines


def plot(result: dict[str, Any], path: str) -> None:
    """Efficiency over the budget, a line a size; step time over the size, a line a system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in result["runs"] if run["bound_seconds"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for size in dict.fromkeys(run["size"] for run in runs):
        points = sorted(
            (run["host_memory_bytes"] / run["model_state_bytes"], run["bound_seconds"] / run["step_seconds_median"])
            for run in runs
            if run["size"] == size and run["system"] == "engine"
        )
        if points:
            numel = next(run["parameters"] for run in runs if run["size"] == size)
            left.plot(*zip(*points, strict=True), marker="o", label=f"{numel / 1e6:.0f} M parameters")
    left.axhline(1, color="0.6", linewidth=0.8)
    left.set(xlabel="host memory / model state", ylabel="bound / step time", ylim=(0, 1.15), xlim=(0, None))
    left.set_title("Efficiency over budget")
    left.legend()
    labels = {"in_memory": "in memory", "deepspeed_cpu": "DeepSpeed, CPU", "deepspeed_nvme": "DeepSpeed, NVMe"}
    lines: dict[str, list[tuple[float, float]]] = {}
    for run in result["runs"]:
        label = labels.get(run["system"]) or f"engine, {run['budget']}"
        lines.setdefault(label, []).append((run["parameters"] / 1e6, run["step_seconds_median"]))
    for label, points in lines.items():
        style = {"engine": "-", "DeepSpeed": "--"}.get(label.split(",")[0], ":")
        right.plot(*zip(*sorted(points), strict=True), style, marker="o", label=label)
    right.set(xlabel="million parameters", ylabel="seconds a step", ylim=(0, None), xlim=(0, None))
    right.set_title("Time over size")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
