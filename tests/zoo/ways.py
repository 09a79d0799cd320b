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
    "recomputed": {"activations": "recompute"},
    "activations in host memory": {"activations": "host"},
    "activations on NVMe": {"activations": "nvme", "activation_memory": "64KiB"},
    "on a device": {"device": SimulatedDevice()},
    "activations from a device": {"device": SimulatedDevice(), "activations": "nvme", "activation_memory": "64KiB"},
    "resident on a device": {"device": SimulatedDevice(), "device_memory": "1GiB", "host_memory": "1GiB"},
}
