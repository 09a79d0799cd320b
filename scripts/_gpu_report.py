"""What ``gpu_check.py`` has found, from the logs of its parts: as one value, and for a reader."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from datetime import date
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)")
_VERDICTS = {0: "ok", 75: "not begun", 77: "not here", 124: "too slow", 127: "not found"}
_COUNTS = re.compile(r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s")


def add(result: dict[str, Any], folder: Path, name: str, code: int, seconds: int) -> None:
    """Put what a part has found, which is in its log in ``folder``, in the place of what an earlier call has."""
    result["date"], result["machine"] = str(date.today()), _machine()
    result["parts"][name] = _part(folder, name, code, seconds)
    found = _last_object(folder / f"{name}.log")
    if name in ("kernels", "probe"):
        result[{"kernels": "rates"}.get(name, name)] = found
    if "runs" in found:
        others = [run for run in result["runs"] if run["part"] != name]
        result["runs"] = others + [{**run, "part": name} for run in found["runs"]]


def summary(result: dict[str, Any]) -> list[str]:
    """What runs, the bits, the share of bandwidth of each kernel and of the link, a step against its bound."""
    machine, rates = result["machine"], result["rates"]
    parts = list(result["parts"].values())
    lines = [
        f"{result['date']}  {machine['gpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"torch {machine['torch']}, I/O by {machine['io_backend']}",
        "runs:    " + (", ".join(part["name"] for part in parts if part["code"] == 0) or "nothing"),
    ]
    for part in parts:
        if part["verdict"] not in ("ok", "not here"):
            names = ", ".join(part["failed"][:8]) + (", ..." if len(part["failed"]) > 8 else "")
            lines.append(f"NOT:     {part['name']}: {part['verdict']}" + (f": {names}" if names else ""))
    return (
        lines
        + ["bits:    " + _bits(rates)]
        + _shares(rates)
        + _host(result.get("probe", {}))
        + [_step(run, result["runs"]) for run in result["runs"] if run["bound_seconds"]]
    )


def _bits(rates: dict[str, Any]) -> str:
    kernels = rates.get("kernels", [])
    other = [row["name"] for row in kernels if not row["same_bits"]]
    if not kernels:
        return "not compared"
    return f"OTHER THAN THE CPU'S: {', '.join(other)}" if other else f"those of the CPU, in all {len(kernels)} kernels"


def _shares(rates: dict[str, Any]) -> list[str]:
    if not rates:
        return ["memory:  not measured"]
    shares = ", ".join(f"{row['name']} {row['share']:.0%}" for row in rates["kernels"])
    link = rates["link"]
    to_device, to_host, slow_to_device, slow_to_host = (
        link[f"{kind}_to_{end}_gb_per_s"] for kind in ("pinned", "not_pinned") for end in ("device", "host")
    )
    return [
        f"memory:  of a copy's {rates['copy_gb_per_s']:,.0f} GB/s: {shares}",
        f"link:    {to_device:.1f} GB/s to the device, {to_host:.1f} to the host; "
        f"not pinned {slow_to_device:.1f}, {slow_to_host:.1f}",
    ]


def _host(probe: dict[str, Any]) -> list[str]:
    """What the host gives a GPU, as far as it was seen."""
    said = []
    if rates := probe.get("adam_gb_per_s"):
        num_threads, rate = max(rates.items(), key=lambda one: one[1])
        said.append(f"Adam {rate:,.0f} GB/s on {num_threads} threads")
    for name, text in (("fault_in_s_per_gib", "faulted in"), ("register_s_per_gib", "registered")):
        if name in probe:
            said.append(f"{text} in {probe[name]} s a GiB")
    if beside := probe.get("link_beside_products"):
        said.append(f"{beside['gb_per_s']} GB/s each way beside products of {beside['tflop_per_s']} TFLOP/s")
    if calls := probe.get("call_us"):
        said.append(f"a copy's call {calls['copy of 4 KiB']} us")
    return [f"host:    {', '.join(said)}"] if said else []


def _step(run: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    seconds, bound = run["step_seconds_median"], run["bound_seconds"]
    beside = compute_seconds(run, runs)
    computes = (
        "" if beside is None else f"; its compute alone {beside:.3f} s, {max(beside, bound) / seconds:.0%} of both"
    )
    return (
        f"step:    {run['size']} {run['system']} {run['budget']}{_batch(run)}: {seconds:.3f} s, "
        f"{bound / seconds:.0%} of its bound by {run['bound_by']}{computes}"
    )


def compute_seconds(run: dict[str, Any], runs: list[dict[str, Any]]) -> float | None:
    """Seconds that the model of a run would compute if all of it were resident: of two smaller ones that are, with as
    wide layers, each further layer takes as long. None if there are no two."""
    layers, width = _shape(run)
    resident = {
        _shape(one)[0]: one["step_seconds_median"]
        for one in runs
        if one["system"] == "in_memory" and _shape(one)[1] == width and one.get("batch") == run.get("batch")
    }
    if run["system"] == "in_memory" or len(resident) < 2:
        return None
    (fewer, less), (more, longer) = sorted(resident.items())[-2:]
    return float(longer + (longer - less) / (more - fewer) * (layers - more))


def _shape(run: dict[str, Any]) -> tuple[int, str]:
    """Layers, and what is the same for every number of them."""
    kind, _, layers_by_width = run["size"].rpartition(":")
    layers, width = layers_by_width.split("x")
    return int(layers), f"{kind} {width}"


def _batch(run: dict[str, Any]) -> str:
    return f" batch {run['batch']}" if run.get("batch") else ""


def line_of(part: dict[str, Any]) -> str:
    """Its verdict, its seconds, and the last that it said."""
    return f"{part['name']:<24}{part['verdict']:<12}{part['seconds']:>5} s  {part['last']}"


def runs_table(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each timed run, below a heading."""
    if not runs:
        return []
    lines = [
        f"{'model':<16}{'system':<17}{'budget':<16}{'params M':>9}{'host MiB':>10}{'device MiB':>12}{'step s':>9}"
        f"{'bound s':>9} {'by':<10}{'of bound':>9}"
    ]
    for run in runs:
        bound = run["bound_seconds"] or 0.0
        lines.append(
            f"{run['size']:<16}{run['system']:<17}{run['budget'] + _batch(run):<16}{run['parameters'] / 1e6:>9.1f}"
            f"{(run['host_memory_bytes'] or 0) / _MIB:>10,.0f}{(run['peak_device_bytes'] or 0) / _MIB:>12,.0f}"
            f"{run['step_seconds_median']:>9.3f}{bound:>9.3f} {run['bound_by'] or '':<10}"
            f"{bound / run['step_seconds_median']:>9.2f}"
        )
    return lines


def _part(folder: Path, name: str, code: int, seconds: int) -> dict[str, Any]:
    lines = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
    verdict = _VERDICTS.get(code, f"failed: {code}")
    counts = next((match[1] for line in reversed(lines) if (match := _COUNTS.match(line))), None)
    last = counts or next((line[:200] for line in reversed(lines) if not line.startswith("{")), "")
    failed = list(dict.fromkeys(match[1] for line in lines if (match := _FAILED.match(line))))
    return {
        "name": name,
        "code": code,
        "verdict": verdict,
        "seconds": seconds,
        "last": last,
        "failed": failed,
    }


def _last_object(path: Path) -> dict[str, Any]:
    """The JSON object in the last line of a log that has one, also before the end of a part that was interrupted; empty
    if none has."""
    for line in reversed(path.read_text(errors="replace").splitlines() if path.exists() else ()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _machine() -> dict[str, Any]:
    import torch

    try:
        from aio_ext import unavailable_backends

        backends = [name for name in ("io_uring", "threads", "portable") if name not in unavailable_backends()]
    except ImportError as error:
        backends = [f"nothing: {error}"]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "io_backend": backends[0],
    }
