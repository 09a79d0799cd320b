"""Puts the report of a step together from the counters, and the rates measured before."""

from __future__ import annotations

from collections.abc import Callable

from offload.report.meter import Meter
from offload.report.report import Bandwidths, LinkRates, Report
from swapper import DurableStore


class Reporter:
    """Looks at the counters once a step."""

    def __init__(
        self,
        meter: Meter,
        store: DurableStore | None,
        copied_bytes: Callable[[], tuple[int, int]],
        busy_seconds: Callable[[], float | None],
        bandwidths: Bandwidths | None,
        link: LinkRates | None,
    ) -> None:
        """``copied_bytes`` to and from a device since the engine was made; ``busy_seconds`` of a device since the last
        call, None where the CPU computes. ``bandwidths`` are the store's."""
        self._meter = meter
        self._store = store
        self._copied_bytes = copied_bytes
        self._busy_seconds = busy_seconds
        self._bandwidths = bandwidths
        self._link = link
        self._moved = self._moved_bytes()
        self._copied = copied_bytes()

    def report(self, memory: dict[str, dict[str, int]], step: int, grad_norm: float, loss_scale: float) -> Report:
        """The step since the last call. ``memory`` is by kind and tier; the memory taken is measured when asked for."""
        seconds, stalls, update_seconds = self._meter.restart()
        read_bytes, write_bytes = self._moved_bytes()
        moved, self._moved = (read_bytes - self._moved[0], write_bytes - self._moved[1]), (read_bytes, write_bytes)
        copied = self._copied_bytes()
        to_device_bytes, to_host_bytes = (now - before for now, before in zip(copied, self._copied, strict=True))
        self._copied = copied
        compute_seconds = self._busy_seconds()
        if compute_seconds is None:
            compute_seconds = max(seconds - sum(stalls.values()), 0.0)
        bounds = {
            "compute": compute_seconds,
            "nvme": self._bandwidths.seconds(*moved) if self._bandwidths is not None else 0.0,
            "to_device": to_device_bytes / self._link.to_device if self._link is not None else 0.0,
            "to_host": to_host_bytes / self._link.to_host if self._link is not None else 0.0,
        }
        bound_by = max(bounds, key=lambda name: bounds[name])
        return Report(
            step=step,
            seconds=seconds,
            bound_seconds=bounds[bound_by],
            bound_by=bound_by,
            compute_seconds=compute_seconds,
            nvme_seconds=bounds["nvme"],
            to_device_seconds=bounds["to_device"],
            to_host_seconds=bounds["to_host"],
            update_seconds=update_seconds,
            stall_seconds=stalls,
            nvme_read_bytes=moved[0],
            nvme_write_bytes=moved[1],
            to_device_bytes=to_device_bytes,
            to_host_bytes=to_host_bytes,
            host_memory_bytes=0,
            device_memory_bytes=0,
            memory=memory,
            io_backend=None if self._store is None else self._store.backend,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
        )

    def _moved_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to NVMe since the engine was made."""
        if self._store is None:
            return 0, 0
        statistics = self._store.statistics()
        return statistics.read.bytes, statistics.write.bytes
