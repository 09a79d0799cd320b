"""The last step and the last metrics for Prometheus to fetch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from offload.errors import ConfigError
from offload.run.observer import Observer, StepRecord


class Prometheus(Observer):
    """Serves the numbers of the last step, and what was logged last, at ``http://address:port/metrics``: gauges with
    the prefix ``offload_``, and ``offload_waiting_seconds`` by ``cause``.

    Without ``address`` only this machine can fetch them; "0.0.0.0" lets others. Raises ``ConfigError`` if the package
    ``prometheus_client`` is not there, or nothing can be served at the port.
    """

    def __init__(self, port: int = 9400, address: str = "127.0.0.1") -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(
                "Prometheus: the package prometheus_client is not installed: pip install 'offload-engine[metrics]'"
            ) from None
        self._registry = prometheus_client.CollectorRegistry()
        self._make_gauge = prometheus_client.Gauge
        self._gauges: dict[str, Any] = {}
        self._where = f"{address}:{port}"
        self._waiting = self._make_gauge(
            "offload_waiting_seconds", "Of the training thread, in the last step", ["cause"], registry=self._registry
        )
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"Prometheus: nothing can be served at {self._where}: {error}") from None

    def step(self, record: StepRecord) -> None:
        self._set({"step": record.report.step, **record.scalars()})
        self._waiting.clear()
        for cause, seconds in record.report.stall_seconds.items():
            self._waiting.labels(cause).set(seconds)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._set(values)

    def close(self, error: BaseException | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                metric = "offload_" + re.sub(r"\W", "_", name, flags=re.ASCII)
                gauge = self._gauges[name] = self._make_gauge(metric, name, registry=self._registry)
            gauge.set(value)

    def __str__(self) -> str:
        return f"Prometheus at {self._where}"
