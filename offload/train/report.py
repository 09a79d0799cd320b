"""Figures of a run: one flat set of figures for programs, and the same as a table for people."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from offload.run.figures import DRIVE_ENDURANCE_BYTES
from offload.train.settings import STATE_BYTES, Settings
from offload.train.training import Training
from offload.train.verify import Verification

_REPORTED = ("bound_seconds", "bound_by", "nvme_read_bytes", "nvme_write_bytes")


def summary(settings: Settings, training: Training, verification: Verification | None) -> dict[str, Any]:
    """The figures of a run. Keys say their unit; per step means the median of all steps."""
    steps = training.steps
    budget_bytes = training.plan.host_budget_bytes
    state_bytes = training.plan.num_parameters * sum(STATE_BYTES[settings.precision].values())
    activation_bytes = verification.activation_bytes if verification else settings.activation_bytes_estimated
    step_seconds = median(step.seconds for step in steps)
    bound_seconds = median(step.report.bound_seconds for step in steps)
    write_bytes_per_step = round(median(step.report.nvme_write_bytes for step in steps))
    return {
        "parameters": training.plan.num_parameters,
        "model_state_bytes": state_bytes,
        "host_memory_bytes": budget_bytes,
        "host_memory_used_bytes": training.last_report.host_memory_bytes,
        "peak_rss_bytes": training.peak_rss_bytes,
        "rss_imports_bytes": training.rss_imports_bytes,
        "activation_bytes": activation_bytes,
        "activation_bytes_measured": verification is not None,
        "rss_expected_bytes": training.rss_imports_bytes + activation_bytes + budget_bytes,
        "steps": len(steps),
        "tokens_per_step": settings.batch * settings.context,
        "precision": settings.precision,
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "loss_last_mean": sum(step.loss for step in steps[-20:]) / len(steps[-20:]),
        "step_seconds_median": step_seconds,
        "bound_seconds": bound_seconds,
        "bound_by": Counter(step.report.bound_by for step in steps).most_common(1)[0][0],
        "efficiency": bound_seconds / step_seconds,
        "in_memory_step_seconds_median": verification.step_seconds_median if verification else None,
        "nvme_read_bytes_per_step": round(median(step.report.nvme_read_bytes for step in steps)),
        "nvme_write_bytes_per_step": write_bytes_per_step,
        "nvme_write_bytes": sum(step.report.nvme_write_bytes for step in steps),
        "drive_endurance_steps": round(DRIVE_ENDURANCE_BYTES / write_bytes_per_step) if write_bytes_per_step else None,
        "io_backend": training.last_report.io_backend,
        "verified": verification.difference is None if verification else None,
        "verified_steps": verification.num_steps if verification else 0,
    }


def series(training: Training) -> dict[str, Any]:
    """Values that the figures come from, step by step, and what rested where (kind, tier, bytes)."""
    return {
        "losses": [step.loss for step in training.steps],
        "step_seconds": [step.seconds for step in training.steps],
        "rss_bytes": [step.rss_bytes for step in training.steps],
        **{name: [getattr(step.report, name) for step in training.steps] for name in _REPORTED},
        "memory": training.last_report.memory,
        "sample": training.sample.decode(errors="replace"),
    }


def table(figures: dict[str, Any], settings: Settings, verification: Verification | None) -> str:
    """The figures of ``summary`` for people."""
    numel = figures["parameters"]
    state = STATE_BYTES[settings.precision]
    formula = " + ".join(f"{nbytes} {kind}" for kind, nbytes in state.items())
    budget, used = figures["host_memory_bytes"], figures["host_memory_used_bytes"]
    imports, activations = figures["rss_imports_bytes"], figures["activation_bytes"]
    peak, expected = figures["peak_rss_bytes"], figures["rss_expected_bytes"]
    how = "measured in memory" if figures["activation_bytes_measured"] else "estimated from the model's shape"
    read, write = figures["nvme_read_bytes_per_step"], figures["nvme_write_bytes_per_step"]
    step_seconds, bound_seconds = figures["step_seconds_median"], figures["bound_seconds"]
    rows = [
        ("parameters", f"{numel:,}"),
        ("model state", f"{_mib(figures['model_state_bytes'])} = {sum(state.values())} bytes a parameter ({formula})"),
        ("budget", f"{_mib(budget)} of host memory, {budget / figures['model_state_bytes']:.0%} of the model state; "
                   f"{_mib(used)} of it used"),
        ("peak RSS", f"{_mib(peak)}: {_mib(imports)} imports, {_mib(activations)} activations and working memory of "
                     f"torch ({how}), {_mib(peak - imports - activations)} engine; {peak / expected:.1%} of imports + "
                     f"activations + budget"),
        ("NVMe", "nothing is stored there" if figures["io_backend"] is None else
                 f"{_mb(read)} read and {_mb(write)} written a step: {read / numel:.1f} + {write / numel:.1f} bytes "
                 f"a parameter, by {figures['io_backend']}"),
        ("step", f"{step_seconds:.3f} s, {figures['tokens_per_step'] / step_seconds:,.0f} tokens/s; the bound is "
                 f"{bound_seconds:.3f} s, set by {figures['bound_by']}: {figures['efficiency']:.0%} of it reached"),
        ("loss", f"{figures['loss_first']:.3f} -> {figures['loss_last']:.3f} nats a byte in {figures['steps']} steps "
                 f"(mean of the last {min(20, figures['steps'])}: {figures['loss_last_mean']:.3f})"),
        ("endurance", _endurance(figures)),
    ]  # fmt: skip
    if verification is not None:
        ratio = step_seconds / verification.step_seconds_median
        rows.append(("in memory", f"{verification.step_seconds_median:.3f} s a step with everything in memory: "
                                  f"this run took {ratio:.2f} times that"))  # fmt: skip
        rows.append(("verified", _verdict(verification)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _verdict(verification: Verification) -> str:
    if verification.difference is not None:
        return f"NO: {verification.difference}"
    return (
        f"yes: {verification.num_steps} steps repeated in memory gave the same losses, and the same weights after "
        "the last, bit for bit"
    )


def _endurance(figures: dict[str, Any]) -> str:
    written = figures["nvme_write_bytes"]
    if not figures["drive_endurance_steps"]:
        return f"{_mb(written)} written in this run"
    return (
        f"{_mb(written)} written in this run, {written / DRIVE_ENDURANCE_BYTES:.4%} of a drive rated for 600 TB, which "
        f"lasts for {figures['drive_endurance_steps']:,} such steps"
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10e9 else f"{nbytes / 1e6:,.1f} MB"


def _mib(nbytes: float) -> str:
    """Of memory: drives are counted in powers of ten."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**20:,.1f} MiB"
