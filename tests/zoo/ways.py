"""Ways to use NVMe, and a device, that must not change a bit: options of the engine."""

from __future__ import annotations

from typing import Any

from offload.testing.simulated import SimulatedDevice

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "threads": {"io_backend": "threads"},
    "small tiles": {"tile_bytes": 65536},
    "large tiles": {"tile_bytes": 1 << 20},
    "no prefetch": {"prefetch": False},
    "some in RAM": {"host_memory": 1.5},
    "on a device": {"device": SimulatedDevice()},
    "resident on a device": {"device": SimulatedDevice(), "device_memory": "1GiB", "host_memory": "1GiB"},
}
