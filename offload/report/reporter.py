"""Puts the report of a step together from the counters, and the rates measured before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from aio_ext import Statistics
from offload.report.meter import Meter
from offload.report.report import ActivationUse, Bandwidths, DriveUse, ExpertUse, LinkRates, MemoryRates, Report
from swapper import DurableStore, InPlaceFiles, Scratch


class _Moment(NamedTuple):
    """Time that a step has spent up to some moment, and bytes moved since the engine was made."""

    seconds: float
    stalled_seconds: float
    read_bytes: int
    write_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    received_bytes: int
    updated_bytes: int

    def since(self, start: _Moment) -> _Moment:
        """Difference to an earlier moment."""
        return _Moment(*(now - before for now, before in zip(self, start, strict=True)))  # type: ignore[arg-type]


def _between(start: DriveUse, end: DriveUse) -> DriveUse:
    """Difference between two moments of a path."""
    return DriveUse(
        end.path,
        end.read_bytes - start.read_bytes,
        end.write_bytes - start.write_bytes,
        end.busy_seconds - start.busy_seconds,
    )


@dataclass
class Reporter:
    """Looks at the counters once a step.

    ``copied_bytes`` to and from a device, and ``received_bytes`` from other ranks, since the engine was made;
    ``busy_seconds`` of a device since the last call, None where the CPU computes. ``paths`` and ``bandwidths`` are the
    store's; ``files`` are read beside it."""

    meter: Meter
    store: DurableStore | None
    files: InPlaceFiles | None
    paths: Sequence[Path]
    copied_bytes: Callable[[], tuple[int, int]]
    received_bytes: Callable[[], int]
    busy_seconds: Callable[[], float | None]
    bandwidths: Bandwidths | None
    link: LinkRates
    scratch: Sequence[Scratch] = ()
    activation_use: Callable[[], ActivationUse] = ActivationUse
    """Since the last call."""
    expert_use: Callable[[], ExpertUse] = ExpertUse
    """Since the engine was made."""
    updated_bytes: Callable[[], int] = int
    """Bytes that updates on the CPU have moved in host memory since the engine was made."""
    host_memory: MemoryRates = field(default_factory=MemoryRates)

    def __post_init__(self) -> None:
        self._experts = self.expert_use()
        self._start = self._moment(0.0, 0.0)
        self._drives = self._carried()
        self._forward: _Moment | None = None
        """State of the step when its first backward began."""
        self.disk_busy: tuple[float, float] | None = None
        """Shares of forward and of the rest of the last step in which the disk was busy; None if nothing is known."""
        self.last: Report | None = None
        """Of the last step, if one was taken here."""
        self.working_seconds = 0.0
        """Of the last step: without waits where the CPU computes, else all of it, as the host drives a device."""
        self._updates_wait = False
        """Those of the last step had to wait for its verdict."""

    def backward_begins(self) -> None:
        """The first backward of the coming step."""
        if self.bandwidths is not None:
            self._forward = self._moment(*self.meter.so_far())

    def report(
        self,
        memory: dict[str, dict[str, int]],
        step: int,
        grad_norm: float | None,
        loss_scale: float,
        *,
        updates_wait: bool,
        sequences: int = 0,
    ) -> Report:
        """The step since the last call. ``memory`` is by kind and tier; the memory taken is measured when asked for.
        ``updates_wait``: the updates of this step, which overlap with the next one, had to wait for its verdict."""
        self.disk_busy = None
        seconds, stalls, update_seconds = self.meter.restart()
        start, end = self._start, self._moment(seconds, sum(stalls.values()))
        spent, self._start = end.since(start), end._replace(seconds=0.0, stalled_seconds=0.0)
        drives, self._drives = self._drives, self._carried()
        before, self._experts = self._experts, self.expert_use()
        compute_seconds = self.busy_seconds()
        schedule_seconds = self._look_at_phases(start, end) if compute_seconds is None else 0.0
        self._forward, self._updates_wait = None, updates_wait
        self.working_seconds = seconds
        if compute_seconds is None:
            compute_seconds = self.working_seconds = max(seconds - spent.stalled_seconds, 0.0)
        bounds = {"schedule": schedule_seconds, "compute": compute_seconds, **self._transfers(spent)}
        bound_by = max(bounds, key=lambda name: bounds[name])
        self.last = Report(
            step=step,
            seconds=seconds,
            bound_seconds=bounds[bound_by],
            bound_by=bound_by,
            compute_seconds=compute_seconds,
            nvme_seconds=bounds["nvme"],
            schedule_seconds=schedule_seconds,
            to_device_seconds=bounds["to_device"],
            to_host_seconds=bounds["to_host"],
            update_seconds=update_seconds,
            stall_seconds=stalls,
            nvme_read_bytes=spent.read_bytes,
            nvme_write_bytes=spent.write_bytes,
            nvme_write_bytes_total=end.write_bytes,
            drives=tuple(map(_between, drives, self._drives)),
            activations=self.activation_use(),
            to_device_bytes=spent.to_device_bytes,
            to_host_bytes=spent.to_host_bytes,
            network_bytes=spent.received_bytes,
            host_memory_bytes=0,
            device_memory_bytes=0,
            memory=memory,
            io_backend=None if self.store is None else self.store.backend,
            bandwidths=self.bandwidths,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            experts=self._experts.since(before),
            sequences=sequences,
            memory_seconds=bounds["memory"],
        )
        return self.last

    def _look_at_phases(self, start: _Moment, end: _Moment) -> float:
        """See how busy the disk was in forward and in the rest of a step on the CPU. ``Report.schedule_seconds``."""
        if self._forward is None:
            return 0.0
        phases = [self._forward.since(start), end.since(self._forward)]
        busy = [self._nvme_seconds(phase) for phase in phases]
        self.disk_busy = busy[0] / max(phases[0].seconds, 1e-9), busy[1] / max(phases[1].seconds, 1e-9)
        if not self._updates_wait:
            return 0.0
        computing = (phase.seconds - phase.stalled_seconds for phase in phases)
        return sum(map(max, computing, busy))

    def _transfers(self, spent: _Moment) -> dict[str, float]:
        """Seconds that each way of bytes takes alone, by the name of the bound that it is."""
        return {
            "nvme": self._nvme_seconds(spent),
            "to_device": spent.to_device_bytes / self.link.to_device,
            "to_host": spent.to_host_bytes / self.link.to_host,
            "memory": self.host_memory.seconds(spent.updated_bytes, spent.to_device_bytes + spent.to_host_bytes),
        }

    def _nvme_seconds(self, phase: _Moment) -> float:
        return 0.0 if self.bandwidths is None else self.bandwidths.seconds(phase.read_bytes, phase.write_bytes)

    def _carried(self) -> list[DriveUse]:
        """Bytes that each path has carried since the engine was made."""
        found: dict[Path, list[Statistics]] = {}
        carriers: list[DurableStore | Scratch] = [*([] if self.store is None else [self.store]), *self.scratch]
        for carrier in carriers:
            for path, of_path in zip(self.paths, carrier.statistics_by_path(), strict=True):
                found.setdefault(path, []).append(of_path)
        if self.files is not None:
            found.setdefault(self.files.files[0].path.parent, []).append(self.files.statistics())
        return [
            DriveUse(
                str(path),
                sum(each.read.bytes for each in of_path),
                sum(each.write.bytes for each in of_path),
                sum(each.busy_seconds for each in of_path),
            )
            for path, of_path in found.items()
        ]

    def _moment(self, seconds: float, stalled_seconds: float) -> _Moment:
        """Now, when the step has spent this much time."""
        carried = self._carried()
        moved = sum(each.read_bytes for each in carried), sum(each.write_bytes for each in carried)
        passed = *self.copied_bytes(), self.received_bytes(), self.updated_bytes()
        return _Moment(seconds, stalled_seconds, *moved, *passed)
